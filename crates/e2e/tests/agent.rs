//! Agents that use sandboxes: examples/agent, and a framework from PyPI, not changed.

use serde_json::Value;
use std::fs;
use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;
use thaw_e2e::{
    Browser, Function, announced, build_directory, built_home, example_without, python_with,
    repository, run, run_within, skip, start_with_e2b, thaw, thaw_binary, use_e2b, wait_until,
    write_e2b_settings,
};

/// E2B's SDK and OpenAI's client, as examples/agent names them.
const CLIENTS: [&str; 2] = ["e2b==2.63.0", "openai==3.54.0"];
/// The framework, and the SDK that it uses.
const FRAMEWORK: [&str; 2] = ["smolagents==1.26.0", "e2b-code-interpreter==2.11.5"];
/// How long an agent may take.
const PATIENCE: Duration = Duration::from_secs(400);

/// What the scripted attempts come to, without the names of sandboxes.
const TREE: [&str; 9] = [
    "the project: 6 of 10 tests pass",
    "    attempt 1.1: 7 of 10 tests pass",
    "    attempt 1.2: 8 of 10 tests pass",
    "        attempt 2.1: 8 of 10 tests pass",
    "        attempt 2.2: 10 of 10 tests pass",
    "        attempt 2.3: the diff does not apply",
    "        attempt 2.4: 0 of 1 tests pass",
    "    attempt 1.3: 6 of 10 tests pass",
    "    attempt 1.4: the tests run longer than 10 s",
];

fn example() -> PathBuf {
    repository().join("examples/agent")
}

/// The lines of the tree that an agent has printed, and the sandbox of each.
fn tree(printed: &str) -> (Vec<String>, Vec<String>) {
    let lines = printed.lines().take_while(|line| !line.is_empty());
    let split = |line: &str| {
        let (line, id) = line.rsplit_once(" [").expect("a sandbox");
        (line.to_owned(), id.trim_end_matches(']').to_owned())
    };
    lines.map(split).unzip()
}

fn list(home: &Path) -> Vec<Value> {
    let listed = run(thaw().args(["sandbox", "list", "--json"]).env("THAW_HOME", home)).success();
    serde_json::from_str(&listed).expect("a list")
}

#[test]
fn attempts_are_forks_and_the_dashboard_shows_their_tree() {
    let Some(python) = python_with(&CLIENTS) else { return };
    let home = built_home("agent-tree", &[Function::Example("agent")]);
    write_e2b_settings(&home, "");
    let daemon = start_with_e2b(&home);
    let mut agent = Command::new(&python);
    use_e2b(agent.arg(example().join("agent.py")).arg("--keep"), &daemon);
    let printed = run_within(PATIENCE, &mut agent, b"").success();
    let (lines, ids) = tree(&printed);
    assert_eq!(lines, TREE);
    assert!(printed.contains("for first, last in sorted(intervals)"), "{printed}");

    // They were left paused, and each knows of which it is a copy.
    let sandboxes = list(&home);
    assert_eq!(sandboxes.len(), TREE.len());
    for (line, id) in lines.iter().zip(&ids) {
        let one = sandboxes.iter().find(|one| one["name"] == **id).expect("it was kept");
        let parent = match line.len() - line.trim_start().len() {
            0 => None,
            4 => Some(ids[0].as_str()),
            _ => Some(ids[2].as_str()),
        };
        assert_eq!(one["forked_from"]["name"].as_str(), parent, "{line}: {one}");
        assert!(
            ["paused", "hibernated", "asleep"].contains(&one["state"].as_str().unwrap()),
            "{one}"
        );
    }
    look_at_tree(&home, &announced(&daemon, "dashboard"), &ids);
}

/// In the dashboard each sandbox has as many branches before it as its attempt has ancestors.
fn look_at_tree(home: &Path, address: &str, ids: &[String]) {
    let token = fs::read_to_string(home.join("admin.token")).expect("a token");
    let Some(browser) = Browser::start() else { return };
    browser.open(&format!("http://{address}/sandboxes"));
    browser.type_into("#token", token.trim());
    browser.click("button[type=submit]");
    browser.wait_for_text("Busiest functions");
    browser.open(&format!("http://{address}/sandboxes"));
    browser.wait_for("table.tree");
    let rows = browser.run(
        "return [...document.querySelectorAll('table.tree tbody tr')].map(row => \
         [row.querySelector('a').textContent, row.querySelectorAll('.branch').length])",
    );
    let rows: Vec<(String, usize)> = serde_json::from_value(rows).expect("rows");
    browser.keep_picture("agent");
    for (line, id) in TREE.iter().zip(ids) {
        let place = rows.iter().position(|row| row.0 == *id).expect("a row");
        let depth = (line.len() - line.trim_start().len()) / 4;
        assert_eq!(rows[place].1, depth, "{line} in {rows:?}");
    }
    // Those of the second round follow the one that they are copies of.
    let place = |id: &String| rows.iter().position(|row| row.0 == *id).expect("a row");
    let mut second: Vec<_> = ids[3..7].iter().map(place).collect();
    second.sort_unstable();
    let after: Vec<_> = (1..=4).map(|n| place(&ids[2]) + n).collect();
    assert_eq!(second, after, "{rows:?}");
}

/// A server of answers, which ends with the test.
struct Endpoint {
    server: Child,
    address: String,
}

impl Endpoint {
    fn start(python: &Path) -> Self {
        let mut command = Command::new(python);
        command.arg(repository().join("tests/agent/endpoint.py")).arg(example());
        command.env("PYTHONPYCACHEPREFIX", build_directory().join("pycache"));
        let mut server = command.stdout(Stdio::piped()).spawn().expect("a server");
        let mut address = String::new();
        let mut output = BufReader::new(server.stdout.as_mut().expect("a pipe"));
        output.read_line(&mut address).expect("a line");
        Self { server, address: address.trim().to_owned() }
    }

    /// Ends it; the models that were asked for.
    fn stop(mut self) -> String {
        self.server.kill().expect("it runs");
        let mut asked = String::new();
        self.server.stdout.as_mut().expect("a pipe").read_to_string(&mut asked).expect("text");
        asked
    }
}

impl Drop for Endpoint {
    fn drop(&mut self) {
        let _ = self.server.kill();
        let _ = self.server.wait();
    }
}

#[test]
fn an_endpoint_with_openais_api_is_asked_if_one_is_named() {
    let Some(python) = python_with(&CLIENTS) else { return };
    let home = built_home("agent-endpoint", &[Function::Example("agent")]);
    write_e2b_settings(&home, "");
    let daemon = start_with_e2b(&home);
    let endpoint = Endpoint::start(&python);
    let mut agent = Command::new(&python);
    use_e2b(agent.arg(example().join("agent.py")).args(["--attempts", "4"]), &daemon);
    agent.env("OPENAI_BASE_URL", &endpoint.address).env("OPENAI_API_KEY", "k");
    let unnamed = run_within(PATIENCE, &mut agent, b"");
    assert_eq!(unnamed.code, Some(1));
    assert!(unnamed.stderr.contains("OPENAI_MODEL"), "{}", unnamed.stderr);
    agent.env("OPENAI_MODEL", "a-model");
    let printed = run_within(PATIENCE, &mut agent, b"").success();
    assert!(printed.contains("10 of 10 tests pass"), "{printed}");
    assert_eq!(endpoint.stop(), "a-model\n".repeat(8));
    wait_until("nothing is left of the sandboxes", || daemon.instances("agent").is_empty());
}

#[test]
fn one_command_builds_serves_and_runs_the_agent() {
    // Whether there is a registry.
    if python_with(&CLIENTS).is_none() {
        return;
    }
    let work = built_home("agent-run", &[]);
    let mut command = Command::new(example().join("run"));
    command.env("AGENT_HOME", work.join("home")).env("THAW", thaw_binary()).env("ONCE", "1");
    let printed = run_within(PATIENCE, command.args(["--rounds", "1"]), b"");
    // One round does not mend it, which its exit code says.
    assert_eq!(printed.code, Some(1), "{}{}", printed.stdout, printed.stderr);
    assert!(printed.stdout.contains("The best is attempt 1.2: 8 of 10"), "{}", printed.stdout);
}

#[test]
fn smolagents_from_pypi_runs_its_code_in_sandboxes() {
    let Some(python) = python_with(&FRAMEWORK) else { return };
    let home = built_home("agent-smolagents", &[]);
    let directory = home.with_extension("interpreter");
    let _ = fs::remove_dir_all(&directory);
    // Libraries for figures and tables take minutes to install. The framework wants numpy and Pillow.
    let heavy =
        ["contourpy", "cycler", "fonttools", "kiwisolver", "matplotlib", "pandas", "pyparsing"];
    example_without(&repository().join("examples/code-interpreter"), &directory, &heavy);
    leave_out_warm_up(&directory.join("python_context.py"));
    let file = directory.join("thaw.toml");
    let text = fs::read_to_string(&file).expect("thaw.toml");
    let install = repository().join("scripts/install");
    let text = text.replace("../../scripts/install", install.to_str().expect("a path"));
    // The agent writes Python only: this is what a host without Node.js builds.
    let node = "    { from = \"build/node_modules\", to = \"/app/node_modules\" },\n";
    let text = text.replace("    \"node\",\n", "").replace(", \"node\"]", "]").replace(node, "");
    fs::write(&file, text).expect("thaw.toml");
    let mut build = thaw();
    build.args(["build", "--weak-limits", "--no-compare"]).arg(&directory).env("THAW_HOME", &home);
    let built = run_within(PATIENCE, &mut build, b"");
    if built.code != Some(0) && built.stderr.contains("No matching distribution") {
        return skip(&format!("PyPI does not give what the interpreter needs: {}", built.stderr));
    }
    assert_eq!(built.code, Some(0), "{}", built.stderr);
    write_e2b_settings(&home, "code-interpreter-v1 = \"code-interpreter\"");
    let daemon = start_with_e2b(&home);
    let mut agent = Command::new(&python);
    use_e2b(agent.arg(repository().join("tests/agent/smolagents_agent.py")), &daemon);
    let printed = run_within(PATIENCE, &mut agent, b"").success();
    assert!(printed.ends_with("the agent's code ran in the sandbox\n"), "{printed}");
    wait_until("its sandbox has ended", || list(&home).is_empty());
}

/// The interpreter imports libraries before it is frozen, which are not there.
fn leave_out_warm_up(server: &Path) {
    let text = fs::read_to_string(server).expect("the server");
    let (before, rest) = text.split_once("WARM_UP = \"\"\"").expect("its first imports");
    let (_, after) = rest.split_once("\"\"\"").expect("their end");
    fs::write(server, format!("{before}WARM_UP = \"\"\"pass\"\"\"{after}")).expect("the server");
}
