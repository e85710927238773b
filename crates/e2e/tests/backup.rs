//! A backup as docs/production.md says how to make it: restored elsewhere, everything is there.

use serde_json::Value;
use std::fs;
use std::path::Path;
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};
use thaw_e2e::{
    Daemon, DaemonOptions, built_home, command, ok, post, prefetch_file, repository, run,
    run_with_input, thaw,
};

/// The indented lines of the page's section that hold a command, each as one line.
fn commands_of_the_page() -> Vec<String> {
    let page = fs::read_to_string(repository().join("docs/production.md")).expect("the page");
    let (_, section) = page.split_once("## Backup\n").expect("the section");
    let (section, _) = section.split_once("\n## ").expect("the next section");
    let indented = section.lines().filter_map(|line| line.strip_prefix("    "));
    let text = indented.collect::<Vec<_>>().join("\n").replace("\\\n", " ");
    text.lines().map(str::to_owned).collect()
}

/// Runs one of them with another directory as `/var/lib/thaw`.
fn follow(line: &str, home: &Path, work: &Path) {
    let line = line.replace("/var/lib/thaw", home.to_str().expect("a name"));
    let outcome = run(Command::new("sh").args(["-c", &line]).current_dir(work));
    assert_eq!((outcome.code, &*outcome.stderr), (Some(0), ""), "{line}");
}

/// Runs a program that has a volume and a secret, as tests/guest/functions/volumes.py says.
fn build(home: &Path) {
    let directory = tempfile::tempdir().expect("a directory");
    let program = repository().join("tests/guest/functions/volumes.py");
    fs::copy(program, directory.path().join("app.py")).expect("a copy");
    let text = "name = \"kept\"\ncommand = [\"python3\", \"app.py\"]\nport = 8080\n\
        files = [\"app.py\"]\nisolation = \"instance\"\n\
        [secrets]\nnames = [\"database\"]\n\
        [[volumes]]\nname = \"data\"\npath = \"/data\"\nsize = \"8MiB\"\n\
        [runtime]\nkind = \"python3\"\ninterpreter = \"/usr/bin/python3\"\n";
    fs::write(directory.path().join("thaw.toml"), text).expect("thaw.toml");
    let mut build = thaw();
    build.env("THAW_HOME", home).args(["build", "--quiet", "--weak-limits"]);
    run(build.arg(directory.path())).success();
}

fn result(daemon: &Daemon, code: &str) -> Value {
    let response = post(daemon.gateway(), "kept", "/", code.as_bytes());
    assert_eq!(response.status, 200, "{}", response.text());
    let answer: Value = response.json();
    assert_eq!(answer.get("error"), None, "{code}: {answer}");
    answer["result"].clone()
}

const READ: &str =
    "result = open('/data/file').read() + ' ' + open('/run/secrets/database').read()";

#[test]
fn a_backup_has_volumes_secrets_and_checkpoints() {
    let home = built_home("backup", &[]);
    build(&home);
    let mut setting = thaw();
    setting.env("THAW_HOME", &home).args(["secret", "set", "kept", "database"]);
    run_with_input(&mut setting, b"hunter2").success();
    let daemon = Daemon::start(&home, &DaemonOptions::default());
    result(&daemon, "open('/data/file', 'w').write('before')");
    let instance = daemon.first_instance("kept")["id"].to_string();
    command(&daemon, &["checkpoint", &instance, "moment"]).success();
    ok(&home, &["volume", "snapshot", "data", "nightly"]);

    // Its prefetch file is stored in the background, or never, where that takes too long; nothing is to
    // change while files are read.
    let until = Instant::now() + Duration::from_secs(20);
    while prefetch_file(&home).is_none() && Instant::now() < until {
        thread::sleep(Duration::from_millis(50));
    }
    let work = tempfile::tempdir().expect("a directory");
    let [save, restore] = &commands_of_the_page()[..] else { panic!("two commands") };
    // Neither quotas nor certificates are there, and the daemon goes on.
    follow(save, &home, work.path());
    assert_eq!(result(&daemon, READ), "before hunter2");
    assert_eq!(daemon.stop(), Some(0));

    let elsewhere = work.path().join("restored");
    follow(restore, &elsewhere, work.path());
    // Nothing of the restored home may need the first one.
    fs::remove_dir_all(&home).expect("a home");
    ok(&elsewhere, &["gc", "--dry-run"]);
    let snapshots: Value =
        serde_json::from_str(&ok(&elsewhere, &["volume", "show", "data", "--json"])).expect("JSON");
    assert_eq!(snapshots["snapshots"][0]["label"], "nightly", "{snapshots}");
    let daemon = Daemon::start(&elsewhere, &DaemonOptions::default());
    assert_eq!(result(&daemon, READ), "before hunter2");
    let first = daemon.first_instance("kept")["id"].as_u64();
    let restored = command(&daemon, &["restore", "moment", "--json"]).success();
    let restored: Value = serde_json::from_str(&restored).expect("JSON");
    assert_ne!(restored["ids"][0].as_u64(), first, "{restored}");
    assert_eq!(daemon.instances("kept").len(), 2);
    assert_eq!(daemon.stop(), Some(0));
}
