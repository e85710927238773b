//! Copies of live instances: whatever a program is doing goes on in each of them, and in itself.

use serde_json::Value;
use std::collections::HashSet;
use std::fs;
use std::path::PathBuf;
use thaw_e2e::{
    Daemon, DaemonOptions, Outcome, built_home, get, repository, run, thaw, wait_until,
};

/// A store with the server that is never idle, as `alone` and with a second process as `two`; as
/// `quiet` it is idle.
fn home(label: &str) -> PathBuf {
    let home = built_home(label, &[]);
    let program = repository().join("tests/guest/functions/alive/app.py");
    let variants = [("alone", ""), ("two", ", \"worker\""), ("quiet", ", \"quiet\"")];
    for (name, argument) in variants {
        let directory = tempfile::tempdir().expect("a directory");
        fs::copy(&program, directory.path().join("app.py")).expect("a program");
        let text = format!(
            "name = \"{name}\"\ncommand = [\"python3\", \"app.py\"{argument}]\nport = 8080\n\
             files = [\"app.py\"]\nisolation = \"instance\"\n\
             [limits]\ninstances = 12\nkeep_alive = \"10m\"\n\
             [runtime]\nkind = \"python3\"\ninterpreter = \"/usr/bin/python3\"\n",
        );
        fs::write(directory.path().join("thaw.toml"), text).expect("thaw.toml");
        run(thaw().env("THAW_HOME", &home).arg("build").arg(directory.path())).success();
    }
    home
}

fn command(daemon: &Daemon, arguments: &[&str]) -> Outcome {
    run(thaw().env("THAW_HOME", daemon.home()).args(arguments))
}

/// What one instance says.
#[track_caller]
fn ask(daemon: &Daemon, function: &str, instance: u64, path: &str) -> Value {
    let instance = instance.to_string();
    let said = command(daemon, &["invoke", function, "--instance", &instance, "--path", path]);
    serde_json::from_str(&said.success()).expect("JSON")
}

/// Boots an instance that is at work; its number.
fn begin(daemon: &Daemon, function: &str) -> u64 {
    assert_eq!(get(daemon.gateway(), function, "/").status, 200);
    let instances = daemon.instances(function);
    assert_eq!(instances.len(), 1, "{instances:?}");
    instances[0]["id"].as_u64().expect("a number")
}

#[track_caller]
fn fork(daemon: &Daemon, instance: u64, copies: usize) -> Vec<u64> {
    let (instance, copies) = (instance.to_string(), copies.to_string());
    let said = command(daemon, &["fork", &instance, "-n", &copies, "--json"]).success();
    let said: Value = serde_json::from_str(&said).expect("JSON");
    assert!(said["pause_us"].as_u64() <= said["running_us"].as_u64(), "{said}");
    said["ids"].as_array().expect("ids").iter().filter_map(Value::as_u64).collect()
}

/// Waits until all that the server does beside its requests has gone on.
#[track_caller]
fn goes_on(daemon: &Daemon, function: &str, instance: u64) {
    let before = ask(daemon, function, instance, "/");
    for what in ["spins", "ticks", "echoes"] {
        wait_until(what, || {
            ask(daemon, function, instance, "/")[what].as_u64() > before[what].as_u64()
        });
    }
    assert_eq!(before["heap"], true, "{before}");
}

#[test]
fn copies_of_a_busy_program_go_on_where_it_was() {
    let daemon = Daemon::start(&home("copies"), &DaemonOptions::default());
    let original = begin(&daemon, "alone");
    goes_on(&daemon, "alone", original);
    let written = ask(&daemon, "alone", original, "/write?before");

    let copies = fork(&daemon, original, 3);
    assert_eq!(copies.len(), 3, "{copies:?}");
    let mut named = HashSet::new();
    for &instance in copies.iter().chain([&original]) {
        goes_on(&daemon, "alone", instance);
        let read = ask(&daemon, "alone", instance, "/read");
        for what in ["file", "pipe", "text"] {
            assert_eq!(read[what], "before", "{what} of {instance}: {read}");
        }
        assert!(read["spins"].as_u64() > written["spins"].as_u64(), "{read} after {written}");
        assert!(read["monotonic"].as_f64() > written["monotonic"].as_f64(), "{read}");
        assert!(named.insert(read["boot_id"].to_string()), "{read}");
        assert!(named.insert(read["random"].to_string()), "{read}");
    }
    // What one writes the others do not see.
    ask(&daemon, "alone", copies[0], "/write?after");
    assert_eq!(ask(&daemon, "alone", copies[0], "/read")["file"], "after");
    assert_eq!(ask(&daemon, "alone", original, "/")["text"], "before");

    // Copies of copies of copies.
    let mut last = copies[0];
    for generation in 0..3 {
        last = fork(&daemon, last, 1)[0];
        goes_on(&daemon, "alone", last);
        let said = ask(&daemon, "alone", last, "/");
        assert_eq!(said["text"], "after", "generation {generation}");
    }
}

#[test]
fn copies_of_several_processes_talk_to_each_other() {
    let daemon = Daemon::start(&home("copies-two"), &DaemonOptions::default());
    let original = begin(&daemon, "two");
    goes_on(&daemon, "two", original);
    assert_eq!(ask(&daemon, "two", original, "/worker")["asked"], 1);
    let copies = fork(&daemon, original, 2);
    for &instance in copies.iter().chain([&original]) {
        goes_on(&daemon, "two", instance);
        assert_eq!(ask(&daemon, "two", instance, "/worker")["asked"], 2, "{instance}");
    }
}

#[test]
fn what_cannot_be_copied_is_refused_and_goes_on() {
    let daemon = Daemon::start(&home("copies-refused"), &DaemonOptions::default());
    let original = begin(&daemon, "alone");
    let number = original.to_string();
    for (arguments, reason) in [
        (["fork", "4711", "-n", "1"], "there is no instance 4711"),
        (["fork", number.as_str(), "-n", "12"], "raise `instances` in [limits]"),
        (["fork", number.as_str(), "-n", "0"], "invalid value"),
    ] {
        let refused = command(&daemon, &arguments);
        assert_ne!(refused.code, Some(0), "{arguments:?}");
        assert!(refused.stderr.contains(reason), "{arguments:?}: {}", refused.stderr);
    }
    goes_on(&daemon, "alone", original);
    assert_eq!(daemon.instances("alone").len(), 1);
}

/// The checkpoints, by name.
fn checkpoints(daemon: &Daemon) -> Vec<Value> {
    let said = command(daemon, &["checkpoints", "--json"]).success();
    serde_json::from_str::<Value>(&said).expect("JSON").as_array().expect("a list").clone()
}

#[track_caller]
fn checkpoint(daemon: &Daemon, instance: u64, name: &str) -> Value {
    let said = command(daemon, &["checkpoint", &instance.to_string(), name, "--json"]).success();
    serde_json::from_str(&said).expect("JSON")
}

#[track_caller]
fn restore(daemon: &Daemon, name: &str) -> u64 {
    let said = command(daemon, &["restore", name, "--json"]).success();
    let said: Value = serde_json::from_str(&said).expect("JSON");
    said["ids"][0].as_u64().expect("a number")
}

#[test]
fn checkpoints_outlive_their_instance_and_store_what_differs() {
    let home = home("checkpoints");
    let daemon = Daemon::start(&home, &DaemonOptions::default());
    let original = begin(&daemon, "alone");
    ask(&daemon, "alone", original, "/write?one");
    let first = checkpoint(&daemon, original, "first");
    ask(&daemon, "alone", original, "/write?two");
    let second = checkpoint(&daemon, original, "second");
    goes_on(&daemon, "alone", original);
    let depth = |taken: &Value| taken["ancestors"].as_u64().expect("a count");
    assert_eq!((depth(&first), depth(&second)), (1, 2), "{first} {second}");
    assert!(second["stored"].as_u64() < first["stored"].as_u64(), "{first} {second}");

    // A copy that was never in the store, and what was restored, are checkpointed as well.
    let copy = fork(&daemon, original, 1)[0];
    ask(&daemon, "alone", copy, "/write?of-a-copy");
    checkpoint(&daemon, copy, "of-a-copy");
    let restored = restore(&daemon, "second");
    ask(&daemon, "alone", restored, "/write?three");
    let third = checkpoint(&daemon, restored, "third");
    assert_eq!(depth(&third), 3, "{third}");

    daemon.stop();
    let daemon = Daemon::start(&home, &DaemonOptions::default());
    assert!(daemon.instances("alone").is_empty());
    for (name, text) in
        [("first", "one"), ("second", "two"), ("third", "three"), ("of-a-copy", "of-a-copy")]
    {
        let instance = restore(&daemon, name);
        goes_on(&daemon, "alone", instance);
        assert_eq!(ask(&daemon, "alone", instance, "/read")["file"], text, "{name}");
    }
    let names: Vec<_> =
        checkpoints(&daemon).iter().map(|known| known["name"].to_string()).collect();
    assert_eq!(names, ["\"first\"", "\"of-a-copy\"", "\"second\"", "\"third\""]);

    // What others differ from stays.
    for (name, is_removed) in [("first", false), ("second", false), ("third", true)] {
        let removed = command(&daemon, &["checkpoints", "--remove", name]);
        assert_eq!(removed.code == Some(0), is_removed, "{name}: {}", removed.stderr);
    }
    command(&daemon, &["gc"]).success();
    let instance = restore(&daemon, "second");
    assert_eq!(ask(&daemon, "alone", instance, "/read")["file"], "two");
    let missing = command(&daemon, &["restore", "third"]);
    assert!(missing.stderr.contains("third"), "{}", missing.stderr);
}

/// Has an instance of `quiet` give up its memory as soon as it is idle.
fn hibernate(daemon: &Daemon, instance: u64) {
    let states = ["idle", "woken-up"];
    let is_idle = |known: &Value| {
        known["id"] == instance && states.iter().any(|state| known["state"] == *state)
    };
    wait_until("it is idle", || daemon.instances("quiet").iter().any(is_idle));
    command(daemon, &["hibernate", "quiet", "--instance", &instance.to_string()]).success();
}

#[test]
fn hibernated_instances_are_copied_and_go_on() {
    let daemon = Daemon::start(&home("copies-hibernated"), &DaemonOptions::default());
    let original = begin(&daemon, "quiet");
    for (round, text) in ["one", "two", "three"].into_iter().enumerate() {
        ask(&daemon, "quiet", original, &format!("/write?{text}"));
        hibernate(&daemon, original);
        let name = format!("hibernated-{round}");
        checkpoint(&daemon, original, &name);
        hibernate(&daemon, original);
        for instance in [fork(&daemon, original, 1)[0], restore(&daemon, &name), original] {
            let read = ask(&daemon, "quiet", instance, "/read");
            assert_eq!((&read["file"], &read["text"]), (&text.into(), &text.into()), "{read}");
            assert_eq!(read["heap"], true, "{read}");
        }
    }
}

#[test]
fn kills_while_copies_are_made_leave_nothing_behind() {
    let daemon = Daemon::start(&home("copies-killed"), &DaemonOptions::default());
    let mut refused = 0;
    for round in 0..12 {
        if daemon.instances("quiet").is_empty() {
            assert_eq!(get(daemon.gateway(), "quiet", "/").status, 200);
        }
        let instances = daemon.instances("quiet");
        let number = |name: &str| instances[0][name].as_u64().expect("a number");
        let (original, pid) = (number("id").to_string(), number("pid") as i32);
        let name = format!("killed-{round}");
        let arguments = match round % 2 {
            0 => vec!["fork", &original, "-n", "3"],
            _ => vec!["checkpoint", &original, &name],
        };
        let outcome = std::thread::scope(|scope| {
            let copying = scope.spawn(|| command(&daemon, &arguments));
            // Anywhere between the request and its end, which takes some 100 ms.
            std::thread::sleep(std::time::Duration::from_millis(round * 9));
            let pid = rustix::process::Pid::from_raw(pid).expect("a process id");
            let _ = rustix::process::kill_process(pid, rustix::process::Signal::KILL);
            copying.join().expect("no panic")
        });
        match outcome.code {
            Some(0) => {}
            // With one sentence that says which instance has ended.
            Some(1) => {
                refused += 1;
                let says = |text: &str| outcome.stderr.contains(text);
                assert!(says("ended") || says("no instance"), "{}", outcome.stderr);
            }
            _ => panic!("{outcome:?}"),
        }
        for instance in daemon.instances("quiet") {
            let id = instance["id"].to_string();
            let said = command(&daemon, &["invoke", "quiet", "--instance", &id]);
            // The one that was killed may still be listed.
            assert!(said.code == Some(0) || id == original, "{}", said.stderr);
        }
    }
    eprintln!("{refused} of 12 were refused");
    // The memory of copies goes with the last of them.
    for instance in daemon.instances("quiet") {
        let pid = instance["pid"].as_u64().expect("a pid") as i32;
        let pid = rustix::process::Pid::from_raw(pid).expect("a process id");
        let _ = rustix::process::kill_process(pid, rustix::process::Signal::KILL);
    }
    let descriptors = format!("/proc/{}/fd", daemon.pid());
    wait_until("no memory of copies is left", || {
        let all = fs::read_dir(&descriptors).expect("root may read this").flatten();
        let is_of_copies = |link: PathBuf| link.to_string_lossy().contains("thaw-copy");
        !all.filter_map(|entry| fs::read_link(entry.path()).ok()).any(is_of_copies)
    });
}

#[test]
fn checkpoints_count_in_the_quota_of_their_tenant() {
    let home = home("copies-quota");
    let quota = |store: &str| {
        let text = format!("[default]\nstore = \"{store}\"\n");
        fs::write(home.join("tenants.toml"), text).expect("writable");
    };
    quota("1GiB");
    let daemon = Daemon::start(&home, &DaemonOptions::default());
    let original = begin(&daemon, "quiet");
    let stored = || {
        let said = command(&daemon, &["tenants", "--json"]).success();
        let tenants: Value = serde_json::from_str(&said).expect("JSON");
        let of_all = tenants.as_array().expect("a list").iter();
        of_all.filter_map(|tenant| tenant["store"].as_u64()).sum::<u64>()
    };
    let before = stored();
    let taken = checkpoint(&daemon, original, "counted");
    assert!(stored() >= before + taken["stored"].as_u64().expect("bytes"), "{before} {taken}");

    quota("1MiB");
    daemon.signal(rustix::process::Signal::HUP);
    let number = original.to_string();
    wait_until("the quota is in force", || {
        let refused = command(&daemon, &["checkpoint", &number, "refused"]);
        refused.stderr.contains("with this checkpoint it would have")
    });
    let instances = daemon.instances("quiet");
    assert_eq!(instances[0]["id"], original, "it went on: {instances:?}");
    ask(&daemon, "quiet", original, "/");
    let other = command(&daemon, &["checkpoints"]).success();
    assert!(other.contains("counted"), "{other}");
}
