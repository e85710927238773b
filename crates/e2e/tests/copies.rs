//! Copies of live instances: whatever a program is doing goes on in each of them, and in itself.

use serde_json::Value;
use std::collections::HashSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use thaw_e2e::{
    Daemon, DaemonOptions, Outcome, ask, begin, built_home, command, free_port, get,
    memory_limit_of, repository, run, state_helper_at_work, thaw, wait_until,
};

/// A store with the server as `alone`, never idle; as `two`, with a second process; or as `quiet`, idle.
fn home(label: &str, name: &str) -> PathBuf {
    let home = built_home(label, &[]);
    let argument = match name {
        "two" => ", \"worker\"",
        "quiet" => ", \"quiet\"",
        _ => "",
    };
    build(&home, name, argument, "instance", &[]);
    home
}

/// Builds the server as a function.
fn build(home: &Path, name: &str, argument: &str, isolation: &str, options: &[&str]) {
    let directory = tempfile::tempdir().expect("a directory");
    let program = repository().join("tests/guest/functions/alive/app.py");
    fs::copy(program, directory.path().join("app.py")).expect("a program");
    let text = format!(
        "name = \"{name}\"\ncommand = [\"python3\", \"app.py\"{argument}]\nport = 8080\n\
         files = [\"app.py\"]\nisolation = \"{isolation}\"\n\
         [limits]\ninstances = 12\nkeep_alive = \"10m\"\n\
         [runtime]\nkind = \"python3\"\ninterpreter = \"/usr/bin/python3\"\n",
    );
    fs::write(directory.path().join("thaw.toml"), text).expect("thaw.toml");
    let mut building = thaw();
    building.env("THAW_HOME", home).args(["build", "--no-compare"]);
    run(building.args(options).arg(directory.path())).success();
}

#[track_caller]
fn fork(daemon: &Daemon, instance: u64, copies: usize) -> Vec<u64> {
    fork_and_tell(daemon, instance, copies).0
}

/// The copies, and what is said of them.
#[track_caller]
fn fork_and_tell(daemon: &Daemon, instance: u64, copies: usize) -> (Vec<u64>, Value) {
    let (instance, copies) = (instance.to_string(), copies.to_string());
    let said = command(daemon, &["fork", &instance, "-n", &copies, "--json"]).success();
    let said: Value = serde_json::from_str(&said).expect("JSON");
    assert!(said["pause_us"].as_u64() <= said["running_us"].as_u64(), "{said}");
    let ids = said["ids"].as_array().expect("ids").iter().filter_map(Value::as_u64).collect();
    (ids, said)
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
    let daemon = Daemon::start(&home("copies", "alone"), &DaemonOptions::default());
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
    let daemon = Daemon::start(&home("copies-two", "two"), &DaemonOptions::default());
    let original = begin(&daemon, "two");
    goes_on(&daemon, "two", original);
    assert_eq!(ask(&daemon, "two", original, "/worker")["asked"], 1);
    // Each process has a twin, and one of these a copy of what they share.
    let (copies, said) = fork_and_tell(&daemon, original, 2);
    assert_eq!(said["twin"], true, "{said}");
    for &instance in copies.iter().chain([&original]) {
        goes_on(&daemon, "two", instance);
        assert_eq!(ask(&daemon, "two", instance, "/worker")["asked"], 2, "{instance}");
    }
}

#[test]
fn what_cannot_be_copied_is_refused_and_goes_on() {
    let daemon = Daemon::start(&home("copies-refused", "alone"), &DaemonOptions::default());
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
    let home = home("checkpoints", "alone");
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

#[test]
fn an_instance_is_checkpointed_again_though_what_it_differs_from_was_collected() {
    let home = home("checkpoints-collected", "alone");
    let daemon = Daemon::start(&home, &DaemonOptions::default());
    let original = begin(&daemon, "alone");
    ask(&daemon, "alone", original, "/write?one");
    checkpoint(&daemon, original, "first");
    command(&daemon, &["checkpoints", "--remove", "first"]).success();
    command(&daemon, &["gc"]).success();
    ask(&daemon, "alone", original, "/write?two");
    checkpoint(&daemon, original, "second");
    let restored = restore(&daemon, "second");
    assert_eq!(ask(&daemon, "alone", restored, "/read")["file"], "two");
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
    let daemon = Daemon::start(&home("copies-hibernated", "quiet"), &DaemonOptions::default());
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

/// What a program has mapped since it woke up is not in the swap file, and what it has not touched of that is
/// zero: nobody reads a hundred gigabytes to find that out.
#[test]
fn what_was_reserved_after_a_wake_is_copied_without_being_read() {
    let daemon = Daemon::start(&home("copies-reserved", "quiet"), &DaemonOptions::default());
    let original = begin(&daemon, "quiet");
    for round in 1..3 {
        hibernate(&daemon, original);
        ask(&daemon, "quiet", original, "/reserve");
        let name = format!("reserved-{round}");
        checkpoint(&daemon, original, &name);
        let expected: Vec<u64> = (1..=round).collect();
        for instance in [fork(&daemon, original, 1)[0], restore(&daemon, &name), original] {
            let said = ask(&daemon, "quiet", instance, "/");
            assert_eq!(said["reserved"], serde_json::json!(expected), "{said}");
            assert_eq!(said["heap"], true, "{said}");
        }
    }
}

#[test]
fn kills_while_copies_are_made_leave_nothing_behind() {
    let daemon = Daemon::start(&home("copies-killed", "quiet"), &DaemonOptions::default());
    let mut refused = 0;
    for round in 0..12 {
        // The one that was killed may be listed still, and gone a moment later.
        let first = match daemon.instances("quiet").first() {
            Some(first) => first.clone(),
            None => {
                assert_eq!(get(daemon.gateway(), "quiet", "/").status, 200);
                daemon.first_instance("quiet")
            }
        };
        let number = |name: &str| first[name].as_u64().expect("a number");
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
    let home = home("copies-quota", "quiet");
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

#[test]
fn a_checkpoint_is_restored_for_its_own_tenant_and_where_it_can_serve() {
    let home = home("copies-elsewhere", "quiet");
    let daemon = Daemon::start(&home, &DaemonOptions::default());
    let original = begin(&daemon, "quiet");
    checkpoint(&daemon, original, "mine");
    for (isolation, options, reason) in [
        ("request", &[][..], "set isolation = \"instance\""),
        ("instance", &["--domain", "other"][..], "in another sharing domain by now"),
    ] {
        build(&home, "quiet", ", \"quiet\"", isolation, options);
        let refused = command(&daemon, &["restore", "mine"]);
        assert_eq!(refused.code, Some(1), "{}", refused.stdout);
        assert!(refused.stderr.contains(reason), "{}", refused.stderr);
    }
    command(&daemon, &["remove", "quiet"]).success();
    let gone = command(&daemon, &["restore", "mine"]);
    assert!(gone.stderr.contains("is not served; build that again"), "{}", gone.stderr);
    build(&home, "quiet", ", \"quiet\"", "instance", &[]);
    let restored = restore(&daemon, "mine");
    ask(&daemon, "quiet", restored, "/");
}

/// Builds the server that changes `mib` MiB of its memory all the time, within `limits`.
fn build_writer(home: &Path, name: &str, mib: u32, limits: &str) {
    let directory = tempfile::tempdir().expect("a directory");
    let program = repository().join("tests/guest/functions/writer/app.py");
    fs::copy(program, directory.path().join("app.py")).expect("a program");
    let text = format!(
        "name = \"{name}\"\ncommand = [\"python3\", \"app.py\", \"{mib}\"]\nport = 8080\n\
         files = [\"app.py\"]\nisolation = \"instance\"\n\
         [limits]\ninstances = 12\nkeep_alive = \"10m\"\n{limits}\n\
         [runtime]\nkind = \"python3\"\ninterpreter = \"/usr/bin/python3\"\n",
    );
    fs::write(directory.path().join("thaw.toml"), text).expect("thaw.toml");
    run(thaw().env("THAW_HOME", home).arg("build").arg(directory.path())).success();
}

/// Builds a server in C of the guest programs.
fn build_in_c(home: &Path, name: &str) {
    let directory = tempfile::tempdir().expect("a directory");
    let program = repository().join(format!("tests/guest/functions/{name}.c"));
    fs::copy(program, directory.path().join("app.c")).expect("a program");
    let text = format!(
        "name = \"{name}\"\ncommand = [\"/app/app\"]\nport = 8080\nisolation = \"instance\"\n\
         files = [{{ from = \"app\", to = \"/app/app\" }}]\n\
         [limits]\ninstances = 12\nkeep_alive = \"10m\"\n[runtime]\nkind = \"binary\"\n\
         [build]\ncommand = [\"cc\", \"-O2\", \"-static\", \"-o\", \"app\", \"app.c\"]\n"
    );
    fs::write(directory.path().join("thaw.toml"), text).expect("thaw.toml");
    run(thaw().env("THAW_HOME", home).arg("build").arg(directory.path())).success();
}

/// Waits until every process has gone on to read its clock: none has ended, and no clock has gone backwards.
#[track_caller]
fn clocks_are_read(daemon: &Daemon, instance: u64) {
    let counts = || {
        let said = ask(daemon, "clocks", instance, "/");
        assert_eq!(said["ended"], 0, "{instance}: {said}");
        said["counts"].as_array().expect("counts").iter().map(Value::as_u64).collect::<Vec<_>>()
    };
    let before = counts();
    wait_until("all read their clocks", || {
        counts().iter().zip(&before).all(|(now, was)| now > was)
    });
}

/// The code of the host that reads clocks is somewhere else in a host process that another daemon has made.
#[test]
fn programs_that_are_reading_clocks_go_on_in_copies_and_under_another_daemon() {
    let home = built_home("copies-clocks", &[]);
    build_in_c(&home, "clocks");
    let daemon = Daemon::start(&home, &DaemonOptions::default());
    let mut instance = begin(&daemon, "clocks");
    clocks_are_read(&daemon, instance);
    for copy in fork(&daemon, instance, 4) {
        clocks_are_read(&daemon, copy);
    }
    checkpoint(&daemon, instance, "reading-0");
    clocks_are_read(&daemon, instance);
    daemon.stop();
    // What is restored has an offset of its clocks; the next one is made of that.
    for generation in 0..3 {
        let daemon = Daemon::start(&home, &DaemonOptions::default());
        instance = restore(&daemon, &format!("reading-{generation}"));
        clocks_are_read(&daemon, instance);
        checkpoint(&daemon, instance, &format!("reading-{}", generation + 1));
        daemon.stop();
    }
}

/// Timers of clocks that went on during the freeze are due in the copy at once; those of the monotonic clock,
/// which relative ones of the real-time clock are, have the time left that they had.
#[test]
fn timers_of_the_real_time_are_on_time_after_a_freeze() {
    let home = built_home("copies-alarms", &[]);
    build_in_c(&home, "alarms");
    let daemon = Daemon::start(&home, &DaemonOptions::default());
    let original = begin(&daemon, "alarms");
    ask(&daemon, "alarms", original, "/set");
    let set = std::time::Instant::now();
    checkpoint(&daemon, original, "set");
    std::thread::sleep(std::time::Duration::from_secs(4).saturating_sub(set.elapsed()));
    let copy = restore(&daemon, "set");
    let expected = serde_json::json!({
        "timers": ["once", "cancelled", "once", "no", "no"], "signals": 1, "slept": 1,
    });
    assert_eq!(ask(&daemon, "alarms", copy, "/"), expected);
}

/// Waits until the writer has gone through all of its memory, and finds nothing wrong with it.
#[track_caller]
fn is_consistent(daemon: &Daemon, function: &str, instance: u64) {
    let before = ask(daemon, function, instance, "/")["rounds"].as_u64().expect("a count");
    wait_until("it has written everything twice", || {
        ask(daemon, function, instance, "/")["rounds"].as_u64() >= Some(before + 2)
    });
    let said = ask(daemon, function, instance, "/");
    assert_eq!((&said["torn"], &said["unequal"]), (&0.into(), &0.into()), "{instance}: {said}");
    assert_eq!(said["still"], true, "{instance}: {said}");
}

#[test]
fn memory_that_changes_all_the_time_is_copied_as_it_was_at_one_moment() {
    let home = built_home("copies-writer", &[]);
    build_writer(&home, "writer", 24, "cpu = 2");
    let daemon = Daemon::start(&home, &DaemonOptions::default());
    let original = begin(&daemon, "writer");
    is_consistent(&daemon, "writer", original);
    for round in 0..4 {
        let (copies, said) = fork_and_tell(&daemon, original, 2);
        assert_eq!(said["twin"], true, "{said}");
        let name = format!("writer-{round}");
        let taken = checkpoint(&daemon, original, &name);
        assert_eq!(taken["twin"], true, "{taken}");
        let restored = restore(&daemon, &name);
        // A copy of a copy, too.
        let second = fork(&daemon, copies[0], 1)[0];
        for instance in copies.into_iter().chain([restored, second]) {
            is_consistent(&daemon, "writer", instance);
            kill(&daemon, "writer", instance);
        }
    }
    is_consistent(&daemon, "writer", original);
    wait_until("the twin has ended", || children(pid_of(&daemon, "writer", original)).is_empty());
}

/// A command that has the writer hibernate, which never has the time.
fn hibernating(daemon: &Daemon, instance: u64) -> Child {
    let mut command = thaw();
    command.env("THAW_HOME", daemon.home()).stderr(Stdio::null());
    command.args(["hibernate", "writer", "--instance", &instance.to_string()]);
    command.spawn().expect("thaw runs")
}

#[test]
fn busy_instances_take_no_place_of_those_that_hibernate() {
    let home = built_home("copies-busy", &[]);
    build_writer(&home, "writer", 4, "cpu = 2");
    build(&home, "quiet", ", \"quiet\"", "instance", &[]);
    let daemon = Daemon::start(&home, &DaemonOptions::default());
    let original = begin(&daemon, "writer");
    let mut busy = vec![original];
    busy.extend(fork(&daemon, original, 3));
    let quiet = begin(&daemon, "quiet");
    let mut waiting: Vec<_> = busy.iter().map(|&one| hibernating(&daemon, one)).collect();
    // At some time all of them were asked.
    for _ in 0..10 {
        hibernate(&daemon, quiet);
        command(&daemon, &["wake", "quiet"]).success();
    }
    for one in &mut waiting {
        one.kill().expect("it is ours");
        one.wait().expect("it is ours");
    }
}

/// A copy brings all threads to rest: that is no moment to hibernate, with the copy still owed.
#[test]
fn an_instance_that_is_to_hibernate_is_copied_first() {
    let home = built_home("copies-hibernating", &[]);
    build_writer(&home, "writer", 4, "cpu = 2");
    let daemon = Daemon::start(&home, &DaemonOptions::default());
    let original = begin(&daemon, "writer");
    let mut waiting = hibernating(&daemon, original);
    for _ in 0..5 {
        let copy = fork(&daemon, original, 1)[0];
        is_consistent(&daemon, "writer", copy);
        kill(&daemon, "writer", copy);
    }
    is_consistent(&daemon, "writer", original);
    waiting.kill().expect("it is ours");
    waiting.wait().expect("it is ours");
}

/// Process id of an instance.
#[track_caller]
fn pid_of(daemon: &Daemon, function: &str, instance: u64) -> i32 {
    let instances = daemon.instances(function);
    let known = instances.iter().find(|known| known["id"] == instance);
    known.and_then(|known| known["pid"].as_u64()).expect("it lives") as i32
}

fn kill_process(pid: i32) {
    let pid = rustix::process::Pid::from_raw(pid).expect("a process id");
    let _ = rustix::process::kill_process(pid, rustix::process::Signal::KILL);
}

/// Ends an instance, to make room for others.
fn kill(daemon: &Daemon, function: &str, instance: u64) {
    kill_process(pid_of(daemon, function, instance));
    wait_until("it is gone", || {
        !daemon.instances(function).iter().any(|known| known["id"] == instance)
    });
}

/// The children of a process.
fn children(pid: i32) -> Vec<i32> {
    let text = fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).unwrap_or_default();
    text.split_whitespace().filter_map(|child| child.parse().ok()).collect()
}

/// Kills what `find` finds while an instance is copied.
fn kill_while_copied(
    daemon: &Daemon,
    arguments: &[&str],
    find: impl Fn() -> Option<i32> + Sync,
) -> (Outcome, bool) {
    use std::sync::atomic::{AtomicBool, Ordering};
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let killing = scope.spawn(|| {
            while !is_over.load(Ordering::Relaxed) {
                if let Some(found) = find() {
                    kill_process(found);
                    return true;
                }
            }
            false
        });
        let outcome = command(daemon, arguments);
        is_over.store(true, Ordering::Relaxed);
        (outcome, killing.join().expect("no panic"))
    })
}

#[test]
fn a_copy_survives_the_end_of_the_twin() {
    let home = built_home("copies-twin", &[]);
    build_writer(&home, "writer", 100, "");
    let daemon = Daemon::start(&home, &DaemonOptions::default());
    let original = begin(&daemon, "writer");
    is_consistent(&daemon, "writer", original);
    let (pid, number) = (pid_of(&daemon, "writer", original), original.to_string());
    let mut at_rest = 0;
    for round in 0..40 {
        // On a busy machine, twins are often read before they are found.
        if round >= 3 && at_rest > 0 {
            break;
        }
        let twin = || children(pid).first().copied();
        let (outcome, _) =
            kill_while_copied(&daemon, &["fork", &number, "-n", "1", "--json"], twin);
        let said: Value = serde_json::from_str(&outcome.success()).expect("JSON");
        at_rest += usize::from(said["twin"] == false);
        let copy = said["ids"][0].as_u64().expect("a number");
        is_consistent(&daemon, "writer", copy);
        kill(&daemon, "writer", copy);
        let name = format!("twin-{round}");
        let (outcome, _) = kill_while_copied(&daemon, &["checkpoint", &number, &name], twin);
        outcome.success();
    }
    assert!(at_rest > 0, "no twin was killed before it was read");
    is_consistent(&daemon, "writer", original);
    assert_eq!(pid_of(&daemon, "writer", original), pid);
}

#[test]
fn an_instance_survives_the_end_of_who_reads_its_twin() {
    let home = built_home("copies-reader", &[]);
    build_writer(&home, "writer", 100, "");
    let daemon = Daemon::start(&home, &DaemonOptions::default());
    let original = begin(&daemon, "writer");
    let (pid, number) = (pid_of(&daemon, "writer", original), original.to_string());
    // A worker: the helper itself has been there before.
    let worker = || {
        let twin = children(pid).first().copied()?;
        let helper = state_helper_at_work(pid as u32)?;
        children(helper as i32).last().copied().filter(|_| twin > 0)
    };
    fork(&daemon, original, 1);
    let mut refused = 0;
    for round in 0..40 {
        if round >= 4 && refused > 0 {
            break;
        }
        let (outcome, was_killed) =
            kill_while_copied(&daemon, &["fork", &number, "-n", "1"], worker);
        if was_killed && outcome.code != Some(0) {
            refused += 1;
            assert!(outcome.stderr.contains("try again"), "{}", outcome.stderr);
        }
        wait_until("the twin has ended", || children(pid).is_empty());
        // Otherwise there is no room for another one after a few rounds.
        let all = daemon.instances("writer");
        let copies = all.iter().filter(|one| one["id"] != original);
        copies.for_each(|one| kill_process(one["pid"].as_u64().expect("a pid") as i32));
        wait_until("the copies are gone", || daemon.instances("writer").len() == 1);
    }
    assert!(refused > 0, "nobody was killed while reading");
    is_consistent(&daemon, "writer", original);
    let copy = fork(&daemon, original, 1)[0];
    is_consistent(&daemon, "writer", copy);
}

#[test]
fn a_twin_takes_no_memory_from_its_instance() {
    let home = built_home("copies-memory", &[]);
    // All of it a second time does not fit the limit.
    build_writer(&home, "writer", 80, "memory = \"128MiB\"\ncpu = 2");
    let daemon = Daemon::start(&home, &DaemonOptions::default());
    let original = begin(&daemon, "writer");
    is_consistent(&daemon, "writer", original);
    let pid = pid_of(&daemon, "writer", original);
    let usual = memory_limit_of(pid.try_into().expect("a number"));
    for round in 0..3 {
        let (copies, said) = fork_and_tell(&daemon, original, 1);
        assert_eq!(said["twin"], true, "{said}");
        kill(&daemon, "writer", copies[0]);
        wait_until("the limit is as before", || {
            memory_limit_of(pid.try_into().expect("a number")) == usual
        });
        let taken = checkpoint(&daemon, original, &format!("memory-{round}"));
        assert_eq!(taken["twin"], true, "{taken}");
        wait_until("the limit is as before", || {
            memory_limit_of(pid.try_into().expect("a number")) == usual
        });
    }
    is_consistent(&daemon, "writer", original);
    assert_eq!(pid_of(&daemon, "writer", original), pid);
}

#[test]
fn a_tenant_without_room_has_its_instances_rest() {
    let home = built_home("copies-room", &[]);
    build_writer(&home, "writer", 8, "memory = \"128MiB\"");
    fs::write(home.join("tenants.toml"), "[default]\nmemory = \"200MiB\"\n").expect("writable");
    let daemon = Daemon::start(&home, &DaemonOptions::default());
    let original = begin(&daemon, "writer");
    let taken = checkpoint(&daemon, original, "at-rest");
    assert_eq!(taken["twin"], false, "{taken}");
    is_consistent(&daemon, "writer", original);
    kill(&daemon, "writer", original);
    is_consistent(&daemon, "writer", restore(&daemon, "at-rest"));
}

/// A PostgreSQL server with a cluster of its own; it ends with this.
struct PostgreSql {
    server: std::process::Child,
    port: u16,
    _cluster: tempfile::TempDir,
}

impl PostgreSql {
    fn start() -> Self {
        use std::process::{Command, Stdio};
        let programs = fs::read_dir("/usr/lib/postgresql").expect("PostgreSQL is installed");
        let newest = programs.flatten().map(|entry| entry.path()).max().expect("a version");
        let cluster = tempfile::Builder::new().tempdir_in("/tmp").expect("a directory");
        let as_user = |program: &str| {
            let mut command = Command::new("setpriv");
            command.args(["--reuid=postgres", "--regid=postgres", "--clear-groups"]);
            command.arg(newest.join("bin").join(program)).stdout(Stdio::null());
            command
        };
        let owner = Command::new("chown").arg("postgres:postgres").arg(cluster.path()).status();
        assert!(owner.expect("chown").success());
        let mut making = as_user("initdb");
        making.args(["--username=thaw", "--auth=trust", "--no-sync", "-D"]).arg(cluster.path());
        assert!(making.status().expect("initdb").success());
        let port = free_port();
        let mut serving = as_user("postgres");
        let sockets = format!("unix_socket_directories={}", cluster.path().display());
        serving.args(["-c", &sockets, "-p", &port.to_string(), "-D"]).arg(cluster.path());
        let server = serving.stderr(Stdio::null()).spawn().expect("a server");
        wait_until("PostgreSQL listens", || {
            std::net::TcpStream::connect((std::net::Ipv4Addr::LOCALHOST, port)).is_ok()
        });
        Self { server, port, _cluster: cluster }
    }
}

impl Drop for PostgreSql {
    fn drop(&mut self) {
        // Its "immediate shutdown": nobody wants the cluster any more.
        let pid = rustix::process::Pid::from_child(&self.server);
        let _ = rustix::process::kill_process(pid, rustix::process::Signal::QUIT);
        let _ = self.server.wait();
    }
}

#[test]
#[ignore = "needs PostgreSQL and numpy; make runtimes"]
fn a_session_with_bash_a_repl_and_a_pool_of_connections_goes_on_in_every_copy() {
    let server = PostgreSql::start();
    let home = built_home("copies-session", &[]);
    let directory = tempfile::tempdir().expect("a directory");
    for file in ["app.py", "requirements.txt"] {
        let from = repository().join("tests/guest/functions/session").join(file);
        fs::copy(from, directory.path().join(file)).expect("a copy");
    }
    let text = format!(
        "name = \"session\"\ncommand = [\"python3\", \"app.py\"]\nport = 8080\nfiles = [\"app.py\"]\n\
         isolation = \"instance\"\nenv = {{ PGPORT = \"{port}\" }}\n\
         [limits]\ninstances = 12\nkeep_alive = \"10m\"\nmemory = \"512MiB\"\n\
         [egress]\nallow = [\"host.thaw.internal:{port}\"]\n\
         [runtime]\nkind = \"python3\"\ninterpreter = \"/usr/bin/python3\"\nprograms = [\"bash\"]\n\
         packages = \"build/site\"\n\
         [build]\ncommand = [\"{install}\", \"python\"]\n\
         egress = [\"pypi.org:443\", \"files.pythonhosted.org:443\"]\n",
        port = server.port,
        install = repository().join("scripts/install").display(),
    );
    fs::write(directory.path().join("thaw.toml"), text).expect("thaw.toml");
    run(thaw().env("THAW_HOME", &home).arg("build").arg(directory.path())).success();
    let daemon = Daemon::start(&home, &DaemonOptions::default());
    let repl = |instance: u64, expression: &str| {
        ask(&daemon, "session", instance, &format!("/repl?{expression}"))
    };
    let pool = |instance: u64| ask(&daemon, "session", instance, "/pool");

    assert_eq!(get(daemon.gateway(), "session", "/pool").status, 200);
    let original = daemon.first_instance("session")["id"].as_u64().expect("a number");
    let before = pool(original);
    assert_eq!(repl(original, "squares.sum()"), "333328333350000");
    assert_eq!(repl(original, "(number:=41)"), "41");

    let copies = fork(&daemon, original, 3);
    let mut servers = HashSet::new();
    for &instance in &copies {
        assert_eq!(repl(instance, "number%2Bint(squares[1])"), "42");
        let said = pool(instance);
        assert_eq!(said["made_anew"], 3, "{said}");
        assert!(servers.insert(said["servers"].to_string()), "{said}");
        assert_eq!(pool(instance), said, "the new ones stay");
        assert_eq!(ask(&daemon, "session", instance, "/bash"), "of-bash");
    }
    // The original has its connections still, and all else.
    assert_eq!(pool(original), before);
    assert!(servers.insert(before["servers"].to_string()), "{before}");
    assert_eq!(repl(original, "number"), "41");
}
