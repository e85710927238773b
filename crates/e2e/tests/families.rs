//! Instances of several processes hibernate, sleep and are copied as those of one are.

use serde_json::Value;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
use std::sync::OnceLock;
use thaw_e2e::{
    Daemon, DaemonOptions, Function, Outcome, built_home, children, copy_home, get, kill, run,
    skip, thaw, wait_until,
};

const KEYS: &str = "isolation = \"instance\"\n[limits]\nconcurrency = 8\nkeep_alive = \"10m\"\n\
                    memory = \"256MiB\"\ninstances = 4\n";
const BY_ITSELF: &str = "isolation = \"instance\"\nlimits = { concurrency = 8, keep_alive = \
                         \"10m\", hibernate_after = \"300ms\" }";

fn family(name: &'static str, keys: &'static str) -> Function {
    Function::PythonVariant { program: "family", name, keys }
}

fn daemon(label: &str) -> Daemon {
    static HOME: OnceLock<PathBuf> = OnceLock::new();
    let home = HOME.get_or_init(|| {
        built_home("families", &[family("family", KEYS), family("idle", BY_ITSELF)])
    });
    Daemon::start(&copy_home(home, &format!("families-{label}")), &DaemonOptions::default())
}

fn command(daemon: &Daemon, arguments: &[&str]) -> Outcome {
    run(thaw().env("THAW_HOME", daemon.home()).args(arguments))
}

#[track_caller]
fn said(daemon: &Daemon, function: &str, path: &str) -> Value {
    let response = get(daemon.gateway(), function, path);
    assert_eq!(response.status, 200, "{}\n{}", response.text(), daemon.log());
    serde_json::from_str(&response.text()).expect("JSON")
}

/// What one instance says.
#[track_caller]
fn said_by(daemon: &Daemon, instance: u64, path: &str) -> Value {
    let instance = instance.to_string();
    let arguments = ["invoke", "family", "--instance", &instance, "--path", path];
    serde_json::from_str(&command(daemon, &arguments).success()).expect("JSON")
}

/// What each process has of one kind of memory.
fn of_each(said: &Value, what: &str) -> Vec<u64> {
    let processes = said.as_array().expect("the processes");
    processes.iter().map(|process| process[what].as_u64().expect("a checksum")).collect()
}

/// All memory, by what it is.
fn memory(said: &Value) -> [Vec<u64>; 4] {
    ["inherited", "own", "shared", "file"].map(|what| of_each(said, what))
}

/// Number, process id and state of the only instance.
#[track_caller]
fn instance(daemon: &Daemon, function: &str) -> (u64, u32, String) {
    let instances = daemon.instances(function);
    let [only] = &instances[..] else { panic!("{instances:?}\n{}", daemon.log()) };
    let number = |name: &str| only[name].as_u64().expect("a number");
    (number("id"), number("pid") as u32, only["state"].as_str().expect("a state").to_owned())
}

#[track_caller]
fn wait_for_state(daemon: &Daemon, function: &str, states: &[&str]) {
    wait_until(&format!("{function} is {states:?}"), || {
        states.contains(&&*instance(daemon, function).2)
    });
}

#[track_caller]
fn hibernate(daemon: &Daemon, function: &str) -> Value {
    wait_for_state(daemon, function, &["idle", "woken-up"]);
    let outcome = command(daemon, &["hibernate", function, "--json"]);
    assert_eq!(outcome.code, Some(0), "{}\n{}", outcome.stderr, daemon.log());
    serde_json::from_str(&outcome.stdout).expect("JSON")
}

/// The host processes of a sandbox, the first one first.
fn host_processes(first: u32) -> Vec<u32> {
    std::iter::once(first).chain(children(first).iter().map(|child| child.pid)).collect()
}

/// Bytes of memory that the host processes of a sandbox have for themselves, and of their page
/// tables, and of the file that they share.
fn own_memory(first: u32) -> u64 {
    let field = |pid: u32, file: &str, name: &str| -> u64 {
        let text = fs::read_to_string(format!("/proc/{pid}/{file}")).expect("root may read this");
        let line = text.lines().find(|line| line.starts_with(name)).expect("the field");
        line.split_whitespace().nth(1).expect("a value").parse::<u64>().expect("a number") * 1024
    };
    let of_process =
        |pid| field(pid, "smaps_rollup", "Anonymous:") + field(pid, "status", "VmPTE:");
    let descriptors = fs::read_dir(format!("/proc/{first}/fd")).expect("root may read this");
    let descriptors = descriptors.map(|entry| entry.expect("a descriptor").path());
    let arena = descriptors.into_iter().find(|path| {
        let file = fs::read_link(path).expect("a descriptor");
        file.to_string_lossy().starts_with("/memfd:thaw-arena")
    });
    let shared = fs::metadata(arena.expect("several processes share it")).expect("a file");
    host_processes(first).into_iter().map(of_process).sum::<u64>() + shared.blocks() * 512
}

#[test]
fn a_server_with_workers_keeps_its_memory_over_hibernations() {
    let daemon = daemon("told");
    said(&daemon, "family", "/grow/8");
    said(&daemon, "family", "/share");
    let before = memory(&said(&daemon, "family", "/"));
    wait_for_state(&daemon, "family", &["idle"]);
    let (_, pid, _) = instance(&daemon, "family");
    let warm = own_memory(pid);
    assert!(warm > 24 << 20, "{warm}");
    for round in 1..=4 {
        let done = hibernate(&daemon, "family");
        assert!(done["stored"].as_u64().expect("bytes") > 24 << 20, "{done}");
        let left = own_memory(pid);
        assert!(left * 100 < warm * 7, "{left} of {warm}");
        // One worker, and then all.
        assert!(said(&daemon, "family", "/1")["asked"].as_u64() > Some(2 * round));
        if round % 2 == 0 {
            hibernate(&daemon, "family");
        }
        assert_eq!(memory(&said(&daemon, "family", "/")), before, "round {round}");
        wait_for_state(&daemon, "family", &["woken-up"]);
    }
    // What is shared still is, and what was not is not.
    said(&daemon, "family", "/share");
    let after = memory(&said(&daemon, "family", "/"));
    assert_eq!((&after[0], &after[1]), (&before[0], &before[1]));
    for what in 2..4 {
        assert_ne!(after[what], before[what]);
        assert!(after[what].iter().all(|sum| *sum == after[what][0]), "{after:?}");
    }
    assert_eq!(said(&daemon, "family", "/fork"), 7);
}

#[test]
fn one_with_workers_hibernates_by_itself_again_and_again() {
    let daemon = daemon("idle");
    let before = memory(&said(&daemon, "idle", "/"));
    for round in 0..6 {
        wait_for_state(&daemon, "idle", &["hibernated"]);
        match round % 2 {
            0 => assert!(said(&daemon, "idle", "/2")["asked"].is_u64()),
            _ => assert_eq!(memory(&said(&daemon, "idle", "/")), before),
        }
    }
}

#[test]
fn the_end_of_a_worker_s_host_process_ends_a_hibernated_instance() {
    let daemon = daemon("killed");
    for number in 0..4 {
        said(&daemon, "family", "/");
        hibernate(&daemon, "family");
        let processes = host_processes(instance(&daemon, "family").1);
        assert_eq!(processes.len(), 4);
        kill(processes[number]);
        wait_until("it is gone", || daemon.instances("family").is_empty());
    }
    assert_eq!(of_each(&said(&daemon, "family", "/"), "asked").len(), 4);
}

#[test]
fn one_with_workers_falls_asleep_and_is_copied_whatever_it_has_of_its_memory() {
    let daemon = daemon("asleep");
    said(&daemon, "family", "/grow/2");
    said(&daemon, "family", "/share");
    let before = memory(&said(&daemon, "family", "/"));
    for round in 0..3 {
        hibernate(&daemon, "family");
        if round > 0 {
            // Two of the workers are still without.
            said(&daemon, "family", "/0");
        }
        let (id, ..) = instance(&daemon, "family");
        wait_for_state(&daemon, "family", &["hibernated", "woken-up"]);
        let number = id.to_string();
        let copied = command(&daemon, &["fork", &number, "-n", "1", "--json"]).success();
        let copied: Value = serde_json::from_str(&copied).expect("JSON");
        assert_eq!(copied["twin"], true, "{copied}");
        let copy = copied["ids"][0].as_u64().expect("a number");
        assert_eq!(memory(&said_by(&daemon, copy, "/")), before);
        let instances = daemon.instances("family");
        let copy = instances.iter().find(|instance| instance["id"] == copy).expect("the copy");
        kill(copy["pid"].as_u64().expect("a pid") as u32);
        wait_until("the copy is gone", || daemon.instances("family").len() == 1);
        wait_for_state(&daemon, "family", &["hibernated", "woken-up", "idle"]);
        let outcome = command(&daemon, &["sleep", "family"]);
        assert_eq!(outcome.code, Some(0), "{}\n{}", outcome.stderr, daemon.log());
        wait_for_state(&daemon, "family", &["asleep"]);
        assert_eq!(memory(&said(&daemon, "family", "/")), before);
        assert_eq!(instance(&daemon, "family").0, id);
    }
}

#[test]
fn one_with_workers_outlives_its_daemon() {
    if !rustix::process::geteuid().is_root() {
        skip("only a daemon of root's has a monitor");
        return;
    }
    let mut daemon = daemon("outlived");
    let before = memory(&said(&daemon, "family", "/"));
    wait_until("it is kept", || {
        daemon.instances("family").iter().all(|instance| instance["kept"].is_u64())
    });
    hibernate(&daemon, "family");
    let (_, pid, _) = instance(&daemon, "family");
    daemon.kill_and_await_next();
    wait_until("it is taken over", || daemon.instances("family").len() == 1);
    assert_eq!(memory(&said(&daemon, "family", "/")), before);
    assert_eq!(instance(&daemon, "family").1, pid);
    hibernate(&daemon, "family");
    assert_eq!(memory(&said(&daemon, "family", "/")), before);
}
