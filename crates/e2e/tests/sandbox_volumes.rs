//! Volumes of sandboxes: mounted when they are made, kept when they end.

use serde_json::{Value, json};
use sha2::{Digest, Sha256};
use std::fs::{self, OpenOptions};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;
use thaw_e2e::{
    Daemon, DaemonOptions, E2B_JS_SDK, E2B_SDK, announced, call, home_with_box, js_module, ok,
    pause_until_hibernated, python_with, repository, run_within, start_with_e2b, use_e2b,
    wait_until, write_e2b_settings,
};

const PROGRAMS: [&str; 8] = ["bash", "sh", "cat", "ls", "ln", "mkdir", "sleep", "touch"];
/// How long installing the SDK, and all that is done with it, may take.
const PATIENCE: Duration = Duration::from_secs(400);
/// A key of E2B's API that is another one's.
const OTHER_KEY: &str = "e2b_ffffffffffffffffffffffffffffffff";

fn home(label: &str) -> PathBuf {
    home_with_box(label, &[], &PROGRAMS, "memory = \"128MiB\"")
}

/// Has a shell in a sandbox run something; what it prints.
fn shell(home: &Path, sandbox: &str, script: &str) -> String {
    ok(home, &["exec", sandbox, "--", "sh", "-c", script])
}

fn refusal(home: &Path, arguments: &[&str]) -> String {
    call(home, arguments).refusal()
}

fn shown(home: &Path, sandbox: &str) -> Value {
    let text = ok(home, &["sandbox", "show", sandbox, "--json"]);
    serde_json::from_str(&text).expect("JSON")
}

#[test]
fn sandboxes_share_volumes_which_outlive_them() {
    let home = home("sandbox-volumes");
    let _daemon = Daemon::start(&home, &DaemonOptions::default());
    ok(&home, &["volume", "create", "data", "--size", "4MiB"]);
    ok(&home, &["volume", "create", "theirs", "--size", "1MiB", "--domain", "others"]);
    let create = |rest: &[&str]| call(&home, &[&["sandbox", "create", "box"], rest].concat());
    create(&["--name", "a", "-v", "data:/mnt/deep/data"]).success();
    create(&["--name", "r", "-v", "data:/data:ro"]).success();
    shell(&home, "a", "echo hello > /mnt/deep/data/file");
    assert_eq!(shell(&home, "r", "cat /data/file"), "hello\n");
    let refused = shell(&home, "r", "(echo no > /data/file) 2>&1; touch /data/new 2>&1; true");
    assert_eq!(refused.matches("Read-only file system").count(), 2, "{refused}");
    let full = shell(&home, "a", "cat /dev/zero 2>&1 > /mnt/deep/data/full; true");
    assert!(full.contains("quota"), "{full}");
    shell(&home, "a", "> /mnt/deep/data/full");
    assert_eq!(
        shown(&home, "r")["volumes"],
        json!([{"name": "data", "path": "/data", "read_only": true}])
    );
    assert!(ok(&home, &["sandbox", "show", "a"]).contains("volume data at /mnt/deep/data"));
    // What others have, and what makes no sense, is refused, and leaves nothing.
    for (volume, word) in [
        ("theirs:/data", "thaw volume allow theirs box"),
        ("none:/data", "there is no volume"),
        ("data:/proc/x", "kernel's own"),
        ("./data:/data", "no directories of this host"),
        ("data:data", "absolute path"),
    ] {
        let refused = create(&["-v", volume]).refusal();
        assert!(refused.contains(word), "{volume}: {refused}");
    }
    let twice = create(&["-v", "data:/x", "-v", "data:/y"]).refusal();
    assert!(twice.contains("named twice"), "{twice}");
    let not_there = create(&["-v", "data:/bin/sh"]).refusal();
    assert!(not_there.contains("cannot be mounted"), "{not_there}");
    wait_until("nothing is left of those that were refused", || {
        let all: Value = serde_json::from_str(&ok(&home, &["sandbox", "list", "--json"])).unwrap();
        all.as_array().unwrap().len() == 2
    });
    ok(&home, &["volume", "allow", "theirs", "box"]);
    create(&["--name", "t", "-v", "theirs:/theirs", "-v", "data:/data"]).success();
    assert_eq!(shell(&home, "t", "touch /theirs/x; cat /data/file"), "hello\n");
    for name in ["a", "r", "t"] {
        assert!(refusal(&home, &["volume", "remove", "data"]).contains("in use"));
        ok(&home, &["sandbox", "kill", name]);
    }
    wait_until("nobody uses the volume", || {
        call(&home, &["volume", "show", "data", "--json"]).success().contains("\"in_use\": false")
    });
    create(&["--name", "later", "-v", "data:/data"]).success();
    assert_eq!(shell(&home, "later", "cat /data/file"), "hello\n");
}

#[test]
fn copies_pauses_and_checkpoints_keep_the_volumes_of_a_sandbox() {
    let home = home("sandbox-volumes-states");
    let daemon = Daemon::start(&home, &DaemonOptions::default());
    ok(&home, &["volume", "create", "data", "--size", "4MiB"]);
    ok(&home, &["sandbox", "create", "box", "--name", "a", "-v", "data:/data"]);
    // A process with an open file goes on in all of them.
    let writer = "exec 3>>/data/log; while :; do echo $HOSTNAME >&3; sleep 0.05; done";
    ok(&home, &["exec", "-d", "a", "--", "bash", "-c", writer]);
    // On the host the file is longer ahead of whoever writes it.
    let len = |sandbox: &str| shell(&home, sandbox, "touch /data/log; cat /data/log").len();
    let writes = |sandbox: &str| {
        let before = len(sandbox);
        wait_until("the sandbox writes", || len(sandbox) > before);
    };
    writes("a");
    ok(&home, &["sandbox", "fork", "a", "--name", "b"]);
    assert_eq!(shown(&home, "b")["volumes"], shown(&home, "a")["volumes"]);
    shell(&home, "b", "echo from-b > /data/b");
    assert_eq!(shell(&home, "a", "cat /data/b"), "from-b\n");
    pause_until_hibernated(&home, "a");
    ok(&home, &["sandbox", "resume", "a"]);
    assert_eq!(shell(&home, "a", "cat /data/b"), "from-b\n");
    ok(&home, &["sandbox", "kill", "a"]);
    writes("b");
    // Its instances rest for a snapshot.
    assert!(ok(&home, &["volume", "snapshot", "data", "one"]).contains("2 files"));
    ok(&home, &["sandbox", "checkpoint", "b", "before"]);
    ok(&home, &["sandbox", "kill", "b"]);
    ok(&home, &["volume", "create", "more", "--size", "1MiB"]);
    let create = ["sandbox", "create", "--checkpoint", "before", "--name"];
    call(&home, &[&create[..], &["c", "-v", "more:/more"]].concat()).success();
    assert_eq!(shell(&home, "c", "touch /more/x; cat /data/b"), "from-b\n");
    writes("c");
    let names = |name: &str| -> Vec<String> {
        let volumes = shown(&home, name)["volumes"].clone();
        let one = |volume: &Value| volume["name"].as_str().unwrap().to_owned();
        volumes.as_array().unwrap().iter().map(one).collect()
    };
    assert_eq!(names("c"), ["data", "more"]);
    let instance = shown(&home, "c")["instance"].to_string();
    let frozen = refusal(&home, &["freeze", "box", "--instance", &instance]);
    assert!(frozen.contains("volumes of its own"), "{frozen}");
    // With its files: what the volume has afterwards is undone.
    ok(&home, &["checkpoint", &instance, "files", "--volumes"]);
    shell(&home, "c", "echo later > /data/b");
    let in_use = refusal(&home, &["restore", "files", "--volumes"]);
    assert!(in_use.contains("in use by instance"), "{in_use}");
    ok(&home, &["sandbox", "kill", "c"]);
    wait_until("it has ended", || daemon.instances("box").is_empty());
    ok(&home, &["restore", "files", "--volumes"]);
    let restored = daemon.first_instance("box")["id"].to_string();
    assert_eq!(ok(&home, &["exec", &restored, "--", "cat", "/data/b"]), "from-b\n");
}

#[test]
fn a_sandbox_with_volumes_goes_on_when_its_daemon_is_killed() {
    let home = home("sandbox-volumes-killed");
    let mut daemon = Daemon::start(&home, &DaemonOptions::default());
    ok(&home, &["volume", "create", "data", "--size", "4MiB"]);
    ok(&home, &["sandbox", "create", "box", "--name", "plain"]);
    ok(&home, &["sandbox", "create", "box", "--name", "a", "-v", "data:/data"]);
    shell(&home, "a", "echo kept > /data/file; echo memory > /tmp/file");
    ok(&home, &["sandbox", "fork", "a", "--name", "b"]);
    for round in ["first", "second"] {
        daemon.wait_until_kept("box");
        daemon.kill_and_await_next();
        assert_eq!(shell(&home, "plain", "echo lives"), "lives\n");
        for name in ["a", "b"] {
            let line =
                shell(&home, name, &format!("echo {round} >> /tmp/file; cat /data/file /tmp/file"));
            assert!(
                line.starts_with("kept\nmemory\nfirst\n") && line.ends_with(&format!("{round}\n")),
                "{line}"
            );
        }
    }
    let in_use = refusal(&home, &["volume", "remove", "data"]);
    assert!(in_use.contains("in use by sandboxes `a`, `b`"), "{in_use}");
    assert_eq!(shell(&home, "b", "echo more >> /data/file; cat /data/file"), "kept\nmore\n");
    ["a", "b"].iter().for_each(|name| drop(ok(&home, &["sandbox", "kill", name])));
    wait_until("nobody has the volume", || {
        call(&home, &["volume", "remove", "data"]).code == Some(0)
    });
}

#[test]
fn a_sandbox_that_sleeps_has_its_volumes_in_the_next_daemon() {
    let home = home("sandbox-volumes-asleep");
    let daemon = Daemon::start(&home, &DaemonOptions::default());
    ok(&home, &["volume", "create", "data", "--size", "4MiB"]);
    ok(&home, &["sandbox", "create", "box", "--name", "a", "-v", "data:/data"]);
    shell(&home, "a", "echo before > /data/file; echo memory > /tmp/file");
    assert_eq!(daemon.stop(), Some(0));
    let daemon = Daemon::start(&home, &DaemonOptions::default());
    assert!(refusal(&home, &["volume", "remove", "data"]).contains("in use by sandbox `a`"));
    assert_eq!(shell(&home, "a", "cat /data/file /tmp/file"), "before\nmemory\n");
    assert_eq!(shown(&home, "a")["volumes"][0]["path"], "/data");
    assert_eq!(daemon.stop(), Some(0));
    // Nobody serves it, and its volume goes.
    ok(&home, &["volume", "remove", "data"]);
    let daemon = Daemon::start(&home, &DaemonOptions::default());
    let log = daemon.log();
    assert!(log.contains("cannot wake without its volumes: there is no volume `data`"), "{log}");
    let lost = refusal(&home, &["exec", "a", "--", "cat", "/tmp/file"]);
    assert!(lost.contains("there is no volume `data`"), "{lost}");
    // Another one of its name is not its own.
    ok(&home, &["volume", "create", "data", "--size", "4MiB"]);
    let lost = refusal(&home, &["exec", "a", "--", "cat", "/tmp/file"]);
    assert!(lost.contains("is another one by now"), "{lost}");
    ok(&home, &["sandbox", "kill", "a"]);
}

/// Runs a script of `tests/e2b` with an SDK against a daemon; what it prints. No volume is left.
fn check(label: &str, program: &mut Command, script: &str) -> String {
    let home = home(label);
    write_e2b_settings(&home, "base = \"box\"");
    let hash: String = Sha256::digest(OTHER_KEY).iter().map(|byte| format!("{byte:02x}")).collect();
    let mut settings = OpenOptions::new().append(true).open(home.join("e2b.toml")).unwrap();
    let bounds = "volumes = 3\nvolume_size = \"32MiB\"";
    write!(settings, "{bounds}\n[[keys]]\nname = \"others\"\nsha256 = \"{hash}\"\n").unwrap();
    let daemon = start_with_e2b(&home);
    use_e2b(program, &daemon);
    program.env("E2B_VOLUME_API_URL", format!("http://{}", announced(&daemon, "e2b")));
    program.env("OTHER_KEY", OTHER_KEY).arg(repository().join("tests/e2b").join(script));
    let printed = run_within(PATIENCE, program, b"").success();
    let left = || fs::read_dir(home.join("volumes")).unwrap().count();
    wait_until("no volume is left", || left() == 0);
    printed
}

#[test]
fn volumes_of_the_python_sdk_work_unmodified() {
    let Some(python) = python_with(&[E2B_SDK]) else { return };
    let printed = check("sandbox-volumes-python", &mut Command::new(python), "volumes.py");
    assert!(printed.lines().any(|line| line == "the_asynchronous_sdk_works"), "{printed}");
}

#[test]
fn volumes_of_the_javascript_sdk_work_unmodified() {
    let Some(module) = js_module(E2B_JS_SDK) else { return };
    let mut program = Command::new("node");
    let printed = check("sandbox-volumes-js", program.env("E2B_SDK", module), "volumes.mjs");
    assert!(printed.lines().any(|line| line == "sandboxesShareAVolume"), "{printed}");
}
