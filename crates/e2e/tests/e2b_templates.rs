//! `Template` of E2B's SDKs as PyPI and npm have them, not changed, against a daemon.

use std::io::Write;
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread;
use std::time::Duration;
use thaw_e2e::{
    Daemon, DaemonOptions, E2B_JS_SDK, E2B_SDK, announced, free_port, home_with_box, js_module,
    python_with, repository, run, run_within, start_with_e2b, thaw, use_e2b, wait_until,
    write_e2b_settings,
};

/// How long all that is done with an SDK may take.
const PATIENCE: Duration = Duration::from_secs(400);

/// The programs of this host that `base` has in the tests.
const PROGRAMS: [&str; 15] = [
    "bash", "cat", "chmod", "chown", "cp", "grep", "id", "ln", "ls", "mkdir", "mv", "rm", "sh",
    "sleep", "touch",
];
/// What names of checkpoints begin with that are kept of steps.
const OF_STEPS: &str = "e2b-step-";
/// What a template may have, and what it has that does not say.
const LIMITS: &str = "memory = \"512MiB\"\nmemory_max = \"1GiB\"\ncpu = 1\ncpu_max = 2";

/// A home with the function, and with settings.
fn home(label: &str) -> PathBuf {
    let home = home_with_box(label, &[], &PROGRAMS, LIMITS);
    write_e2b_settings(&home, "base = \"box\"\n[images]\n\"python:3.12\" = \"box\"");
    home
}

/// What is left of builds in a home: the names of checkpoints.
fn left_of_builds(home: &Path) -> Vec<String> {
    let listed = run(thaw().args(["checkpoints", "--json"]).env("THAW_HOME", home)).success();
    let listed: serde_json::Value = serde_json::from_str(&listed).expect("JSON");
    let names = listed.as_array().expect("a list").iter();
    names.map(|one| one["name"].as_str().expect("a name").to_owned()).collect()
}

/// Runs a script of `tests/e2b` with an SDK against a daemon; what it prints.
fn check(label: &str, program: &mut Command, script: &str) -> String {
    let home = home(label);
    let daemon = start_with_e2b(&home);
    use_e2b(program.arg(repository().join("tests/e2b").join(script)), &daemon);
    let printed = run_within(PATIENCE, program, b"").success();
    wait_until("nothing is left of the sandboxes", || daemon.instances("box").is_empty());
    wait_until("nothing is left of the builds", || left_of_builds(&home).is_empty());
    printed
}

#[test]
fn the_python_sdk_builds_templates() {
    let Some(python) = python_with(&[E2B_SDK]) else { return };
    let printed = check("e2b-templates-python", &mut Command::new(python), "templates.py");
    assert!(printed.lines().any(|line| line == "templates_are_deleted"), "{printed}");
}

#[test]
fn the_javascript_sdk_builds_templates() {
    let Some(module) = js_module(E2B_JS_SDK) else { return };
    let mut program = Command::new("node");
    let printed = check("e2b-templates-js", program.env("E2B_SDK", module), "templates.mjs");
    assert!(printed.lines().any(|line| line == "templatesAreDeleted"), "{printed}");
}

/// Runs some lines of Python with the SDK; what they print.
fn python_lines(python: &Path, daemon: &Daemon, lines: &str) -> String {
    let lines = format!("from e2b import Sandbox, Template, wait_for_port\n{lines}");
    let mut command = Command::new(python);
    use_e2b(command.args(["-c", &lines]), daemon);
    run_within(PATIENCE, &mut command, b"").success().trim().to_owned()
}

#[test]
fn a_build_that_its_daemon_does_not_end_says_so_and_leaves_nothing() {
    let Some(python) = python_with(&[E2B_SDK]) else { return };
    let home = home("e2b-templates-restart");
    let address = format!("127.0.0.1:{}", free_port());
    let options = DaemonOptions { arguments: vec!["--e2b".to_owned(), address] };
    let mut daemon = Daemon::start(&home, &options);
    let begin = "base = Template().from_image('python:3.12')\n\
                 served = base.set_start_cmd('python3 -m http.server 8000', wait_for_port(8000))\n\
                 Template.build(served, 'kept')\n\
                 endless = Template().from_template('kept').run_cmd('echo begun; sleep 1000')\n\
                 info = Template.build_in_background(endless, 'cut-off')\n\
                 while not any(line.message == 'begun' for line in Template.get_build_status(info).log_entries): pass\n\
                 print(info.template_id, info.build_id)";
    let begun = python_lines(&python, &daemon, begin);
    let (template, build) = begun.split_once(' ').expect("two ids");
    daemon.wait_until_kept("box");
    daemon.kill_and_await_next();
    assert!(announced(&daemon, "e2b").starts_with("127.0.0.1:"));
    let ask = format!(
        "from e2b.template.types import BuildInfo\n\
         info = BuildInfo(template_id='{template}', build_id='{build}', name='cut-off', alias='cut-off')\n\
         status = Template.get_build_status(info)\n\
         print(status.status.value, status.reason.message)"
    );
    let said = python_lines(&python, &daemon, &ask);
    assert!(said.starts_with("error ") && said.contains("daemon ended"), "{said}");
    wait_until("nothing is left of the build", || daemon.instances("box").is_empty());
    let mut one = left_of_builds(&home);
    one.retain(|name| !name.starts_with(OF_STEPS));
    assert!(one.len() == 1 && one[0].starts_with("e2b-template-"), "{one:?}");
    // What was built before is there, with its start command.
    let create = "import urllib.request, os\n\
                  box = Sandbox.create('kept')\n\
                  print(box.commands.list()[0].cmd, box.kill())";
    assert_eq!(python_lines(&python, &daemon, create), "/bin/bash True");
}

#[test]
fn steps_that_took_long_are_not_done_again() {
    let Some(python) = python_with(&[E2B_SDK]) else { return };
    let home = home("e2b-templates-steps");
    let address = format!("127.0.0.1:{}", free_port());
    let options = DaemonOptions { arguments: vec!["--e2b".to_owned(), address] };
    let mut daemon = Daemon::start(&home, &options);
    // What the slow step draws says whether it was done again; the server is another process.
    let functions = "\
        import contextlib, io\n\
        slow = 'cat /proc/sys/kernel/random/uuid > /drawn; sleep 2.5'\n\
        def build(name, *steps, **options):\n    \
            template = Template().from_template('base').set_envs({'A': 'b'})\n    \
            for step in steps: template = template.run_cmd(step)\n    \
            template = template.set_start_cmd('python3 -m http.server 8000', wait_for_port(8000))\n    \
            log = []\n    \
            Template.build(template, name, on_build_logs=lambda line: log.append(line.message), **options)\n    \
            return sum('CACHED' in line for line in log)\n\
        def drawn(name):\n    \
            box = Sandbox.create(name)\n    \
            assert box.commands.run('cat /last; echo $A').stdout.split() == [name, 'b']\n    \
            text = box.files.read('/drawn').strip()\n    \
            box.kill()\n    \
            return text\n";
    let first = "print(build('one', slow, 'echo one > /last'), drawn('one'))";
    let said = python_lines(&python, &daemon, &format!("{functions}{first}"));
    let (cached, drawn) = said.split_once(' ').expect("two words");
    assert_eq!((cached, drawn.len()), ("0", 36), "{said}");
    let of_steps = |home: &Path| -> Vec<String> {
        let all = left_of_builds(home).into_iter();
        all.filter(|name| name.starts_with(OF_STEPS)).collect()
    };
    assert_eq!(of_steps(&home).len(), 1);
    // Another template goes on there, also under the next daemon, and when the first one is gone.
    let second = "print(build('two', slow, 'echo two > /last'), drawn('two'))";
    let again = format!("2 {drawn}");
    assert_eq!(python_lines(&python, &daemon, &format!("{functions}{second}")), again);
    daemon.kill_and_await_next();
    assert!(announced(&daemon, "e2b").starts_with("127.0.0.1:"));
    let delete = "import httpx, os\n\
        key = {'X-API-KEY': os.environ['E2B_API_KEY']}\n\
        def delete(name): httpx.delete(os.environ['E2B_API_URL'] + '/templates/' + name, headers=key)\n";
    let third = format!("delete('one')\n{second}");
    assert_eq!(python_lines(&python, &daemon, &format!("{delete}{functions}{third}")), again);
    // Whoever says so has all done again.
    let anew = "print(build('two', slow, 'echo two > /last', skip_cache=True), drawn('two'))";
    let said = python_lines(&python, &daemon, &format!("{functions}{anew}"));
    assert!(said.starts_with("0 ") && !said.ends_with(drawn), "{said}");
    python_lines(&python, &daemon, &format!("{delete}delete('two')"));
    assert_eq!(left_of_builds(&home), Vec::<String>::new());
}

#[test]
fn steps_connect_to_what_the_function_may_reach() {
    let Some(python) = python_with(&[E2B_SDK]) else { return };
    let egress = format!("{LIMITS}\n[egress]\nallow = [\"host.thaw.internal:*\"]");
    let home = home_with_box("e2b-templates-egress", &[], &PROGRAMS, &egress);
    write_e2b_settings(&home, "base = \"box\"");
    let daemon = start_with_e2b(&home);
    let server = TcpListener::bind(("127.0.0.1", 0)).expect("a port");
    let port = server.local_addr().expect("an address").port();
    let answering = thread::spawn(move || {
        let (mut client, _) = server.accept().expect("a client");
        client.write_all(b"from outside\n").expect("it listens");
    });
    let build = format!(
        "step = \"python3 -c 'import socket; s = socket.create_connection((\\\"host.thaw.internal\\\", {port})); \
         open(\\\"/got\\\", \\\"wb\\\").write(s.recv(100))'\"\n\
         Template.build(Template().from_template('base').run_cmd(step), 'fetched')\n\
         box = Sandbox.create('fetched')\n\
         print(box.files.read('/got').strip(), box.kill())"
    );
    assert_eq!(python_lines(&python, &daemon, &build), "from outside True");
    answering.join().expect("it has answered");
}
