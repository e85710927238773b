//! What a container of Cloud Run relies on: its environment, and SIGTERM with time to end.

use std::fs;
use std::path::{Path, PathBuf};
use thaw_e2e::{Daemon, DaemonOptions, built_home, command, get, run, thaw, wait_until};

const PROGRAM: &str = r#"
import http.server, json, os, signal, sys, time

def end(number, frame):
    print("told to end by", signal.Signals(number).name, flush=True)
    if sys.argv[1] == "stubborn":
        return
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

fn build(home: &Path, name: &str, limits: &str) {
    let directory = tempfile::tempdir().expect("a directory");
    fs::write(directory.path().join("app.py"), PROGRAM).expect("a program");
    let text = format!(
        "name = \"{name}\"\ncommand = [\"python3\", \"app.py\", \"{name}\"]\nport = 8123\n\
         files = [\"app.py\"]\nisolation = \"instance\"\n\
         [limits]\nkeep_alive = \"1s\"\n{limits}\n\
         [runtime]\nkind = \"python3\"\ninterpreter = \"/usr/bin/python3\"\n[env]\nK_CONFIGURATION = \"own\"\n",
    );
    fs::write(directory.path().join("thaw.toml"), text).expect("thaw.toml");
    let mut building = thaw();
    building.env("THAW_HOME", home).arg("build").arg(directory.path());
    run(&mut building).success();
}

fn home() -> PathBuf {
    let home = built_home("contract", &[]);
    build(&home, "tidy", "grace = \"30s\"");
    build(&home, "stubborn", "grace = \"1s\"\nstop_signal = \"SIGQUIT\"");
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
    assert!(daemon.log().contains("did not end within 1 s after SIGQUIT"), "{}", daemon.log());

    // The same when the node stops.
    assert_eq!(get(daemon.gateway(), "tidy", "/").status, 200);
    assert_eq!(daemon.stop(), Some(0));
    let file = fs::read_to_string(home.join("logs/tidy.log")).expect("a log");
    assert_eq!(file.matches("tidied up").count(), 2, "{file}");
}
