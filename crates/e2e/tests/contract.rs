//! What a container of Cloud Run relies on: its environment, SIGTERM with time to end, and liveness
//! probes.

use std::fs;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::time::Duration;
use thaw_e2e::{Daemon, DaemonOptions, built_home, command, free_port, get, run, thaw, wait_until};

const PROGRAM: &str = r#"
import http.server, json, os, signal, sys, time

def end(number, frame):
    print("told to end by", signal.Signals(number).name, flush=True)
    if sys.argv[1] == "stubborn":
        return
    if sys.argv[1] == "tidy":
        time.sleep(0.3)
    print("tidied up", flush=True)
    os._exit(0)

signal.signal(signal.SIGTERM, end)
signal.signal(signal.SIGQUIT, end)

class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        names = ["PORT", "K_SERVICE", "K_CONFIGURATION", "K_REVISION"]
        body = json.dumps({name: os.environ.get(name) for name in names}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
    def log_message(self, *arguments):
        pass

http.server.HTTPServer(("", int(os.environ["PORT"])), Handler).serve_forever()
"#;

/// Builds a server in Python with these further lines in its thaw.toml.
fn build(home: &Path, name: &str, program: &str, sections: &str) {
    build_at(home, name, program, "", sections);
}

/// The same with further keys that are in no section.
fn build_at(home: &Path, name: &str, program: &str, keys: &str, sections: &str) {
    let directory = tempfile::tempdir().expect("a directory");
    fs::write(directory.path().join("app.py"), program).expect("a program");
    let text = format!(
        "name = \"{name}\"\ncommand = [\"python3\", \"app.py\", \"{name}\"]\nport = 8123\n\
         files = [\"app.py\"]\nisolation = \"instance\"\n{keys}\n\
         [runtime]\nkind = \"python3\"\ninterpreter = \"/usr/bin/python3\"\n{sections}\n",
    );
    fs::write(directory.path().join("thaw.toml"), text).expect("thaw.toml");
    let mut building = thaw();
    building.env("THAW_HOME", home).arg("build").arg(directory.path());
    run(&mut building).success();
}

fn home() -> PathBuf {
    let home = built_home("contract", &[]);
    let common = "[env]\nK_CONFIGURATION = \"own\"\n[limits]\nkeep_alive = \"1s\"\n";
    build(&home, "tidy", PROGRAM, &format!("{common}grace = \"30s\""));
    // On a busy machine a program may not get to run within a second.
    let limits = "grace = \"15s\"\nstop_signal = \"SIGQUIT\"";
    build(&home, "stubborn", PROGRAM, &format!("{common}{limits}"));
    home
}

#[test]
fn programs_have_the_environment_and_the_time_to_end_of_cloud_run() {
    let home = home();
    let daemon = Daemon::start(&home, &DaemonOptions::default());
    let seen = get(daemon.gateway(), "tidy", "/").json();
    assert_eq!((&seen["PORT"], &seen["K_SERVICE"]), (&"8123".into(), &"tidy".into()), "{seen}");
    assert_eq!(seen["K_CONFIGURATION"], "own");
    assert!(seen["K_REVISION"].as_str().is_some_and(|name| name.starts_with("tidy-")), "{seen}");
    assert_eq!(get(daemon.gateway(), "stubborn", "/").status, 200);

    let log = |name: &str| command(&daemon, &["logs", name]).success();
    // It has been idle for too long, and ends by itself.
    wait_until("it has tidied up", || log("tidy").contains("tidied up"));
    assert!(log("tidy").contains("told to end by SIGTERM"));
    wait_until("it has gone", || daemon.instances("tidy").is_empty());
    // This one does not, and is ended.
    wait_until("it was told to", || log("stubborn").contains("told to end by SIGQUIT"));
    wait_until("it has gone", || daemon.instances("stubborn").is_empty());
    wait_until("it is said", || daemon.log().contains("did not end within 15 s after SIGQUIT"));

    // The same when the node stops.
    assert_eq!(get(daemon.gateway(), "tidy", "/").status, 200);
    assert_eq!(daemon.stop(), Some(0));
    let file = fs::read_to_string(home.join("logs/tidy.log")).expect("a log");
    assert_eq!(file.matches("tidied up").count(), 2, "{file}");
}

#[test]
fn an_idle_instance_that_ends_for_the_request_of_another_function_gets_its_signal() {
    let home = built_home("contract-room", &[]);
    // Much longer than a request waits.
    let limits = "[limits]\nkeep_alive = \"10m\"\nqueue = \"30s\"\ngrace = \"60s\"";
    build(&home, "prompt", PROGRAM, limits);
    build(&home, "stubborn", PROGRAM, limits);
    let arguments = vec!["--max-instances".to_owned(), "1".to_owned()];
    let daemon = Daemon::start(&home, &DaemonOptions { arguments });
    let log = |name: &str| command(&daemon, &["logs", name]).success();
    let ask = |name: &str, other: &str| {
        // Whoever waits for the grace of the other one is refused before that is over.
        assert_eq!(get(daemon.gateway(), name, "/").status, 200);
        assert!(daemon.instances(other).is_empty(), "there is room for one");
    };
    // On a busy machine a program may not get to run within the time that it has.
    let mut rounds = 0;
    while !log("prompt").contains("tidied up") || !log("stubborn").contains("told to end by") {
        assert!(rounds < 20, "{}\n{}", log("prompt"), log("stubborn"));
        ask("prompt", "stubborn");
        ask("stubborn", "prompt");
        rounds += 1;
    }
    assert!(log("prompt").contains("told to end by SIGTERM"));
    let said = "did not end within 0.1 s after SIGTERM";
    wait_until("it is said of the stubborn one", || daemon.log().contains(said));
    assert!(!log("stubborn").contains("tidied up"));
}

const UNWELL: &str = r#"
import http.server, os, signal, sys

def end(number, frame):
    print("told to end by", signal.Signals(number).name, flush=True)
    os._exit(0)

signal.signal(signal.SIGTERM, end)
status = 200

class Handler(http.server.BaseHTTPRequestHandler):
    # Connections stay, and it attends to one after the other.
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        global status
        if self.path == "/break":
            status = 500
        self.send_response(status if self.path == "/healthz" else 200)
        self.send_header("Content-Length", "0")
        self.end_headers()
        if self.path == "/healthz":
            print("was asked", flush=True)
    def log_message(self, *arguments):
        pass

http.server.HTTPServer(("", int(os.environ["PORT"])), Handler).serve_forever()
"#;

/// The same of one that is asked whether it is well.
fn build_probed(home: &Path, name: &str, period: &str, limits: &str) {
    let sections = format!(
        "[liveness]\npath = \"/healthz\"\n{period}\n[limits]\nkeep_alive = \"10m\"\n{limits}"
    );
    build(home, name, UNWELL, &sections);
}

#[test]
fn an_instance_that_fails_its_liveness_probes_ends_and_another_one_answers() {
    let home = built_home("liveness", &[]);
    // An instance that is well has time to say so, on a busy machine, too.
    let period = "period = \"3s\"\ntimeout = \"3s\"";
    build_probed(&home, "unwell", period, "grace = \"30s\"");
    let daemon = Daemon::start(&home, &DaemonOptions::default());
    let log = || command(&daemon, &["logs", "unwell"]).success();
    let numbers = || -> Vec<u64> {
        let instances = daemon.instances("unwell");
        instances.iter().filter_map(|instance| instance["id"].as_u64()).collect()
    };
    assert_eq!(get(daemon.gateway(), "unwell", "/").status, 200);
    let first = numbers();
    assert_eq!(first.len(), 1);
    wait_until("it was asked a few times", || log().matches("was asked").count() >= 4);
    assert_eq!(numbers(), first, "{}", log());

    assert_eq!(get(daemon.gateway(), "unwell", "/break").status, 200);
    let why = "ended because it failed 3 liveness probes in a row: status 500";
    wait_until("its log says why it ends", || log().contains(why));
    wait_until("it has gone", || numbers().is_empty());
    wait_until("it was told to", || log().contains("told to end by SIGTERM"));
    assert_eq!(get(daemon.gateway(), "unwell", "/").status, 200);
    assert_ne!(numbers(), first);
}

#[test]
fn probes_keep_no_instance_from_hibernating_and_wake_none() {
    let home = built_home("liveness-hibernated", &[]);
    build_probed(&home, "rests", "period = \"1s\"", "hibernate_after = \"10s\"");
    let daemon = Daemon::start(&home, &DaemonOptions::default());
    let asked = || command(&daemon, &["logs", "rests"]).success().matches("was asked").count();
    let is = |state: &str| daemon.instances("rests").iter().any(|one| one["state"] == state);
    assert_eq!(get(daemon.gateway(), "rests", "/").status, 200);
    wait_until("it hibernates", || is("hibernated"));
    wait_until("the log has that it was asked", || asked() > 0);
    let before = asked();
    std::thread::sleep(Duration::from_secs(3));
    assert!(is("hibernated"));
    // What it has said of the last one may have come to the log since.
    assert!(asked() <= before + 1);
    let before = asked();
    // It is asked again when it runs again.
    assert_eq!(get(daemon.gateway(), "rests", "/").status, 200);
    wait_until("it was asked again", || asked() > before);
}

/// It serves connections until one says that it is to serve no more.
const DEAF: &str = r#"
import os, socket, time

server = socket.create_server(("", int(os.environ["PORT"])))
while True:
    client, _ = server.accept()
    said = client.recv(100)
    print("heard", said, flush=True)
    client.sendall(said)
    client.close()
    if said == b"enough":
        server.close()
        time.sleep(1000)
"#;

#[test]
fn an_instance_that_takes_no_connections_fails_a_probe_of_tcp() {
    let home = built_home("liveness-tcp", &[]);
    let port = free_port();
    let sections = "[entry]\nkind = \"tcp\"\n[liveness]\nkind = \"tcp\"\nperiod = \"1s\"\n\
                    [limits]\nkeep_alive = \"10m\"\n";
    let listen = format!("listen = \"127.0.0.1:{port}\"");
    build_at(&home, "deaf", DEAF, &listen, sections);
    let daemon = Daemon::start(&home, &DaemonOptions::default());
    let say = |text: &[u8]| {
        let mut client = TcpStream::connect(("127.0.0.1", port)).expect("the gateway");
        client.write_all(text).expect("room");
        let mut answer = Vec::new();
        client.read_to_end(&mut answer).expect("an answer");
        answer
    };
    let log = || command(&daemon, &["logs", "deaf"]).success();
    assert_eq!(say(b"hello"), b"hello");
    wait_until("it was asked", || log().matches("heard b''").count() >= 3);
    let first = daemon.instance("deaf").0;
    assert_eq!(say(b"enough"), b"enough");
    let why = "ended because it failed 3 liveness probes in a row: nothing listens on port 8123";
    wait_until("its log says why it ends", || log().contains(why));
    wait_until("it has gone", || daemon.instances("deaf").is_empty());
    assert_eq!(say(b"again"), b"again");
    assert_ne!(daemon.instance("deaf").0, first);
}
