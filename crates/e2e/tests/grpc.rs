//! gRPC: the client of PyPI's `grpcio` outside, and unmodified servers as functions, in whatever state
//! their instances are.

use rustix::process::Signal;
use serde_json::Value;
use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::net::SocketAddr;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::OnceLock;
use std::time::Duration;
use thaw_e2e::{
    Daemon, DaemonOptions, Outcome, built_home, copy_home, free_port, js_module, python_site,
    python_with, repository, run, run_within, skip, thaw, wait_until,
};

const GRPCIO: &[&str] = &["grpcio==1.85.3"];
const GRPC_JS: &str = "@grpc/grpc-js@1.14.3";
/// How long a client may take for all of its checks, on a busy machine.
const PATIENCE: Duration = Duration::from_secs(400);
const LIMITS: &str =
    "concurrency = 128\nmemory = \"256MiB\"\nkeep_alive = \"10m\"\ntimeout = \"60s\"";

/// Every kind of call, as clients make them.
const CALLS: &[&str] = &[
    "calls_of_every_kind",
    "streams_go_both_ways",
    "metadata_goes_both_ways",
    "errors_have_their_code_and_message",
    "deadlines_and_cancellations_reach_the_function",
    "compressed_messages",
    "large_messages",
    "a_hundred_calls_at_once",
];

fn source(name: &str) -> PathBuf {
    repository().join("tests/grpc").join(name)
}

/// Builds a version of the Python server; what it is called is in its answers.
fn build_python(
    home: &Path,
    name: &str,
    version: &str,
    keys: &str,
    limits: &str,
) -> Option<Outcome> {
    let site = python_site(GRPCIO)?;
    let directory = tempfile::tempdir().expect("a directory");
    fs::copy(source("server.py"), directory.path().join("server.py")).expect("a copy");
    let text = format!(
        "name = \"{name}\"\ncommand = [\"python3\", \"server.py\", \"{version}\"]\nport = 8080\n\
         protocol = \"h2c\"\nfiles = [\"server.py\"]\n{keys}\n[limits]\n{limits}\n\
         [runtime]\nkind = \"python3\"\ninterpreter = \"/usr/bin/python3\"\npackages = {site:?}\n"
    );
    fs::write(directory.path().join("thaw.toml"), text).expect("thaw.toml");
    let mut build = thaw();
    build.env("THAW_HOME", home).args(["build", "--quiet", "--weak-limits"]).arg(directory.path());
    Some(run_within(PATIENCE, &mut build, b""))
}

const SHARED: &str = "isolation = \"instance\"";

/// A home with the Python server: as one instance, and as one for each request.
fn home(label: &str) -> Option<PathBuf> {
    static HOME: OnceLock<Option<PathBuf>> = OnceLock::new();
    let home = HOME.get_or_init(|| {
        let home = built_home("grpc", &[]);
        build_python(&home, "grpc", "first", SHARED, LIMITS)?.success();
        build_python(&home, "alone", "first", "", "timeout = \"60s\"")?.success();
        Some(home)
    });
    Some(copy_home(home.as_ref()?, &format!("grpc-{label}")))
}

fn start(label: &str) -> Option<Daemon> {
    Some(Daemon::start(&home(label)?, &DaemonOptions::default()))
}

/// The client, which is to do these checks.
fn client(address: SocketAddr, function: &str, checks: &[&str]) -> Option<Command> {
    let mut client = Command::new(python_with(GRPCIO)?);
    client.arg(source("client.py")).arg(address.to_string()).arg(function).args(checks);
    Some(client)
}

/// Does these checks; what the client has printed.
#[track_caller]
fn check(daemon: &Daemon, function: &str, checks: &[&str]) -> String {
    let mut client = client(daemon.gateway(), function, checks).expect("it was there");
    let outcome = run_within(PATIENCE, &mut client, b"");
    assert_eq!(outcome.code, Some(0), "{}{}\n{}", outcome.stdout, outcome.stderr, daemon.log());
    outcome.stdout
}

/// What an instance has counted, with its version.
#[track_caller]
fn count(daemon: &Daemon) -> (u32, String) {
    let said = check(daemon, "grpc", &["count"]);
    let mut words = said.split_whitespace();
    let number = words.next().and_then(|number| number.parse().ok());
    (number.unwrap_or_else(|| panic!("{said}")), words.next().expect("a version").to_owned())
}

fn command(daemon: &Daemon, arguments: &[&str]) -> Outcome {
    run(thaw().env("THAW_HOME", daemon.home()).args(arguments))
}

/// A client that does something for each line that it is told.
struct Talk {
    process: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
}

impl Talk {
    fn begin(daemon: &Daemon, what: &str) -> Self {
        let mut client = client(daemon.gateway(), "grpc", &[what]).expect("it was there");
        let client = client.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut process = client.spawn().expect("python3");
        let input = process.stdin.take().expect("a pipe");
        let output = BufReader::new(process.stdout.take().expect("a pipe"));
        Self { process, input, output }
    }

    #[track_caller]
    fn line(&mut self) -> String {
        let mut line = String::new();
        self.output.read_line(&mut line).expect("a line");
        line.trim_end().to_owned()
    }

    #[track_caller]
    fn say(&mut self, text: &str) -> String {
        writeln!(self.input, "{text}").expect("it listens");
        self.line()
    }

    fn end(self) -> Option<i32> {
        let Self { mut process, input, output } = self;
        drop((input, output));
        process.wait().expect("it ends").code()
    }
}

#[test]
fn an_unmodified_server_answers_calls_of_every_kind() {
    let Some(daemon) = start("calls") else { return };
    let printed = check(&daemon, "grpc", CALLS);
    assert_eq!(printed.lines().collect::<Vec<_>>(), CALLS);
    // One instance has answered them all, and is idle.
    assert_eq!(daemon.instances("grpc").len(), 1);
    wait_until("it is idle", || daemon.instances("grpc")[0]["connections"] == 0);
    check(&daemon, "nobody", &["nobody_is_there"]);
    check(&daemon, "grpc", &["an_instance_that_dies"]);
}

#[test]
fn each_call_may_have_an_instance_of_its_own() {
    let Some(daemon) = start("alone") else { return };
    // Calls of one instance know nothing of those of another.
    let checks = CALLS.iter().copied().filter(|name| !name.starts_with("deadlines"));
    check(&daemon, "alone", &checks.chain(["deadlines_end_calls"]).collect::<Vec<_>>());
    let counted = || check(&daemon, "alone", &["count"]);
    assert!(counted().starts_with("1 ") && counted().starts_with("1 "));
    wait_until("they have ended", || daemon.instances("alone").is_empty());
}

/// Clients that come by TLS, and agree on HTTP/2 so.
#[test]
fn calls_come_over_tls() {
    let Some(home) = home("tls") else { return };
    let address = SocketAddr::from(([127, 0, 0, 1], free_port()));
    let keys = home.join("tls");
    fs::create_dir_all(&keys).expect("a directory");
    let mut openssl = Command::new("openssl");
    openssl
        .args(["req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"])
        .args(["-subj", "/CN=grpc.example", "-addext", "subjectAltName=DNS:grpc.example"])
        .args(["-days", "2", "-keyout", "node.key", "-out", "node.pem"]);
    run(openssl.current_dir(&keys)).success();
    fs::set_permissions(keys.join("node.key"), fs::Permissions::from_mode(0o600)).expect("ours");
    let text = format!(
        "[access_log]\nformat = \"json\"\n[tls]\nlisten = [\"{address}\"]
         [[tls.certificate]]\nchain = \"tls/node.pem\"\nkey = \"tls/node.key\""
    );
    fs::write(home.join("gateway.toml"), text).expect("our home");
    let reference = format!("--reference={}", home.display());
    run(Command::new("chown").arg("-R").arg(reference).arg(&keys)).success();
    let daemon = Daemon::start(&home, &DaemonOptions::default());
    let mut client = client(address, "grpc.example", CALLS).expect("it was there");
    client.arg("--ca").arg(keys.join("node.pem"));
    run_within(PATIENCE, &mut client, b"").success();
    let log = || fs::read_to_string(home.join("logs/access_.log")).unwrap_or_default();
    wait_until("the access log has a call", || {
        log().contains("/thaw.test.Echo/Echo") && log().contains("\"version\":\"HTTP/2.0\"")
    });
    drop(daemon);
}

#[test]
fn idle_connections_neither_keep_an_instance_awake_nor_are_they_lost() {
    let Some(daemon) = start("idle") else { return };
    let mut talk = Talk::begin(&daemon, "call_for_each_line");
    assert!(talk.say("").starts_with("1 first"));
    for (number, verb) in [(2, "hibernate"), (4, "sleep"), (6, "hibernate")] {
        wait_until("it is idle", || daemon.instances("grpc")[0]["connections"] == 0);
        let told = command(&daemon, &[verb, "grpc"]);
        assert_eq!(told.code, Some(0), "{verb}: {}\n{}", told.stderr, daemon.log());
        let state = daemon.instances("grpc")[0]["state"].clone();
        let expected = if verb == "sleep" { "asleep" } else { "hibernated" };
        assert_eq!(state, expected);
        // Over the connection that the client has had all the time, and over a new one.
        assert!(talk.say("").starts_with(&format!("{number} first")), "{verb}");
        assert_eq!(count(&daemon).0, number + 1, "{verb}");
    }
    assert_eq!(talk.end(), Some(0));
    assert_eq!(daemon.instances("grpc").len(), 1);
}

#[test]
fn a_new_version_gets_new_calls_and_streams_of_the_old_one_go_on() {
    let Some(daemon) = start("deploy") else { return };
    let mut ticks = Talk::begin(&daemon, "ticks");
    assert_eq!(ticks.line(), "0 first");
    build_python(daemon.home(), "grpc", "second", SHARED, LIMITS).expect("it was there").success();
    wait_until("the second version answers", || count(&daemon).1 == "second");
    let rest: Vec<String> = (1..50).map(|_| ticks.line()).collect();
    assert!(rest.iter().all(|line| line.ends_with(" first")), "{rest:?}");
    assert_eq!(ticks.end(), Some(0));
    wait_until("the first version has ended", || daemon.instances("grpc").len() == 1);
}

#[test]
fn the_next_daemon_goes_on_with_the_instances_of_the_one_before() {
    let Some(mut daemon) = start("restart") else { return };
    let mut talk = Talk::begin(&daemon, "call_for_each_line");
    assert!(talk.say("").starts_with("1 first"));
    if daemon.live_pid().is_none() {
        return skip("there is no monitor, whose next daemon would go on");
    }
    daemon.wait_until_kept("grpc");
    daemon.end_and_await_next(Signal::KILL);
    assert_eq!(count(&daemon), (2, "first".to_owned()), "{}", daemon.log());
    // The client connects again by itself.
    assert!(talk.say("").starts_with("3 first"));
    assert_eq!(talk.end(), Some(0));
}

#[test]
fn the_node_itself_calls_such_functions() {
    let Some(home) = home("itself") else { return };
    let train = "[train]\nrequests = [{ path = \"/thaw.test.Echo/Count\", body = \"\\u0000\\u0000\\u0000\
                 \\u0000\\u0000\", headers = { content-type = \"application/grpc\" }, repeat = 3 }]\n\
                 [liveness]\nkind = \"grpc\"\nperiod = \"4s\"\ntimeout = \"4s\"\nfailures = 2";
    let limits = format!("{LIMITS}\n{train}");
    build_python(&home, "grpc", "trained", SHARED, &limits).expect("it was there").success();
    let wrong = limits.replace("Echo/Count", "Echo/Nothing");
    let refused = build_python(&home, "wrong", "trained", SHARED, &wrong).expect("it was there");
    assert!(refused.stderr.contains("its grpc-status is 12"), "{}", refused.stderr);

    let daemon = Daemon::start(&home, &DaemonOptions::default());
    assert_eq!(count(&daemon), (4, "trained".to_owned()));
    // Long enough for it to be ended if it did not answer.
    std::thread::sleep(Duration::from_secs(14));
    assert_eq!(count(&daemon).0, 5, "it is well: {}", daemon.log());
    // `thaw invoke` by the gateway, and to one instance.
    let invoked = |more: &[&str]| {
        let mut invoke = thaw();
        let path = ["invoke", "grpc", "--path", "/thaw.test.Echo/Count", "--data", "@-"];
        invoke.env("THAW_HOME", daemon.home()).args(path).args(more);
        invoke.args(["--header", "content-type: application/grpc"]);
        run_within(PATIENCE, &mut invoke, &[0; 5])
    };
    let instance = daemon.instances("grpc")[0]["id"].to_string();
    for (number, more) in [(6, &[][..]), (7, &["--instance", &instance])] {
        let outcome = invoked(more);
        assert_eq!(outcome.code, Some(0), "{}", outcome.stderr);
        assert!(outcome.stdout.contains(&format!("{number} trained")), "{outcome:?}");
    }
}

/// The same calls to other servers that nobody here wrote the stack of.
fn other_server(label: &str, directory: &Path) {
    let home = built_home(label, &[]);
    let mut build = thaw();
    build.env("THAW_HOME", &home).args(["build", "--quiet", "--weak-limits"]).arg(directory);
    run_within(PATIENCE, &mut build, b"").success();
    let daemon = Daemon::start(&home, &DaemonOptions::default());
    check(&daemon, label, CALLS);
    let instances: Vec<Value> = daemon.instances(label);
    assert_eq!(instances.len(), 1);
    wait_until("it is idle", || daemon.instances(label)[0]["state"] == "idle");
    command(&daemon, &["hibernate", label]).success();
    check(&daemon, label, &["calls_of_every_kind"]);
}

#[test]
fn a_server_on_node_answers_the_same() {
    if python_with(GRPCIO).is_none() {
        return;
    }
    let Some(module) = js_module(GRPC_JS) else { return };
    let modules = module.ancestors().nth(2).expect("node_modules");
    let directory = tempfile::tempdir().expect("a directory");
    fs::copy(source("server.mjs"), directory.path().join("server.mjs")).expect("a copy");
    run(Command::new("cp").arg("-r").arg(modules).arg(directory.path())).success();
    let text = format!(
        "name = \"grpc-node\"\ncommand = [\"node\", \"server.mjs\"]\nport = 8080\nprotocol = \"h2c\"\n\
         {SHARED}\n[limits]\n{LIMITS}\n[runtime]\nkind = \"node\"\n"
    );
    fs::write(directory.path().join("thaw.toml"), text).expect("thaw.toml");
    other_server("grpc-node", directory.path());
}

#[test]
fn a_server_in_go_answers_the_same() {
    if python_with(GRPCIO).is_none() {
        return;
    }
    let directory = tempfile::tempdir().expect("a directory");
    for file in ["main.go", "go.mod", "go.sum"] {
        fs::copy(source("go").join(file), directory.path().join(file)).expect("a copy");
    }
    let mut go = Command::new("go");
    go.args(["build", "-o", "server", "."]).env("CGO_ENABLED", "0").current_dir(directory.path());
    let built = run_within(PATIENCE, &mut go, b"");
    if built.code != Some(0) {
        return skip(&format!("go builds no server of gRPC: {}", built.stderr));
    }
    let text = format!(
        "name = \"grpc-go\"\ncommand = [\"/app/server\"]\nport = 8080\nprotocol = \"h2c\"\n\
         files = [\"server\"]\n{SHARED}\n[limits]\n{LIMITS}\n[runtime]\nkind = \"binary\"\n"
    );
    fs::write(directory.path().join("thaw.toml"), text).expect("thaw.toml");
    other_server("grpc-go", directory.path());
}
