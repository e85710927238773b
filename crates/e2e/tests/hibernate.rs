//! Instances that give up their memory when they are idle, and take it back when they are asked.

use rustix::process::Signal;
use serde_json::Value;
use std::fs;
use std::path::PathBuf;
use std::sync::OnceLock;
use std::time::Duration;
use thaw_e2e::{
    Daemon, DaemonOptions, Function, Outcome, Raw, built_home, copy_home, get, kill, run, skip,
    thaw, wait_until,
};

const KEYS: &str = "isolation = \"instance\"\n[limits]\nconcurrency = 8\nmemory = \"96MiB\"\n\
                    keep_alive = \"10m\"\n";

fn survivor(name: &'static str, keys: &'static str) -> Function {
    Function::PythonVariant { program: "survivor", name, keys }
}

/// A daemon of its own with functions that remember how often they were asked.
fn daemon(label: &str) -> Daemon {
    static HOME: OnceLock<PathBuf> = OnceLock::new();
    let home = HOME.get_or_init(|| {
        let functions = [
            survivor("told", KEYS),
            survivor(
                "trimmed",
                "isolation = \"instance\"\nlimits = { trim_after = \"1s\", keep_alive = \"10m\" }",
            ),
            survivor(
                "idle",
                "isolation = \"instance\"\nlimits = { concurrency = 8, hibernate_after = \"300ms\", \
                 keep_alive = \"10m\" }",
            ),
            survivor(
                "several",
                "isolation = \"instance\"\nlimits = { concurrency = 8, cpu = 4, keep_alive = \"10m\" }",
            ),
            Function::Variant {
                example: "hello-go",
                name: "go",
                keys: "isolation = \"instance\"".to_owned(),
                limits: "concurrency = 8\ncpu = 2\nkeep_alive = \"10m\"",
            },
        ];
        built_home("hibernate", &functions)
    });
    let home = copy_home(home, &format!("hibernate-{label}"));
    Daemon::start(&home, &DaemonOptions::default())
}

#[track_caller]
fn count(daemon: &Daemon, function: &str) -> u32 {
    let response = get(daemon.gateway(), function, "/count");
    assert_eq!(response.status, 200, "{function}: {}\n{}", response.text(), daemon.log());
    response.text().trim().parse().expect("a number")
}

fn command(daemon: &Daemon, arguments: &[&str]) -> Outcome {
    run(thaw().env("THAW_HOME", daemon.home()).args(arguments))
}

/// Has the only instance of a function give up its memory as soon as it is idle.
#[track_caller]
fn hibernate(daemon: &Daemon, function: &str) -> Value {
    wait_until("it is idle", || ["idle", "woken-up"].contains(&&*instance(daemon, function).1));
    let outcome = command(daemon, &["hibernate", function, "--json"]);
    assert_eq!(outcome.code, Some(0), "{}\n{}", outcome.stderr, daemon.log());
    serde_json::from_str(&outcome.stdout).expect("JSON")
}

/// Process id and state of the only instance of a function.
#[track_caller]
fn instance(daemon: &Daemon, function: &str) -> (u32, String) {
    let (_, pid, state) = daemon.instance(function);
    (pid, state)
}

#[track_caller]
fn wait_for_state(daemon: &Daemon, function: &str, state: &str) {
    wait_until(&format!("{function} is {state}"), || instance(daemon, function).1 == state);
}

/// Bytes of pages of no file and of page tables of a process.
fn own_memory(pid: u32) -> u64 {
    let field = |file: &str, name: &str| -> u64 {
        let text = fs::read_to_string(format!("/proc/{pid}/{file}")).expect("root may read this");
        let line = text.lines().find(|line| line.starts_with(name)).expect("the field");
        line.split_whitespace().nth(1).expect("a value").parse::<u64>().expect("a number") * 1024
    };
    field("smaps_rollup", "Anonymous:") + field("status", "VmPTE:")
}

#[test]
fn an_instance_keeps_its_state_over_three_hibernations() {
    let daemon = daemon("told");
    assert_eq!(count(&daemon, "told"), 1);
    assert_eq!(get(daemon.gateway(), "told", "/grow/24").status, 200);
    wait_for_state(&daemon, "told", "idle");
    let (pid, _) = instance(&daemon, "told");
    let warm = own_memory(pid);
    assert!(warm > 24 << 20, "{warm}");
    for round in 1..=3 {
        let done = hibernate(&daemon, "told");
        assert!(done["stored"].as_u64().expect("bytes") > 24 << 20, "{done}");
        // The first wake, by page faults, has shown what comes back at once from then on.
        assert_eq!(done["ranges"].as_u64().expect("a number") > 0, round > 1, "{done}");
        assert_eq!(instance(&daemon, "told"), (pid, "hibernated".to_owned()));
        let hibernated = own_memory(pid);
        assert!(hibernated < 400 << 10, "{hibernated} of {warm}");
        assert_eq!(count(&daemon, "told"), 2 + round);
        wait_for_state(&daemon, "told", "woken-up");
        let woken = own_memory(pid);
        assert!(woken < warm / 2, "{woken} of {warm}");
    }
    let again = command(&daemon, &["wake", "told", "--instance", "1"]);
    assert_eq!(again.code, Some(0), "{}", again.stderr);
    assert!(again.stdout.contains("is awake"), "{}", again.stdout);
    for line in
        ["thaw_hibernations_total{function=\"told\"} 3", "thaw_wakes_total{function=\"told\"} 3"]
    {
        wait_until(&format!("the metrics say {line}"), || {
            daemon.admin("/metrics").text().contains(line)
        });
    }
}

/// Pages that the program has written and are as in its image again go, without it noticing.
#[test]
fn an_idle_instance_gives_back_what_is_equal_to_its_image() {
    let daemon = daemon("trim");
    let counted = |round| {
        assert_eq!(count(&daemon, "trimmed"), round);
        wait_for_state(&daemon, "trimmed", "idle");
        let (pid, _) = instance(&daemon, "trimmed");
        let before = own_memory(pid);
        wait_until("it has given something back", || own_memory(pid) < before - (256 << 10));
        assert_eq!(instance(&daemon, "trimmed"), (pid, "idle".to_owned()));
        pid
    };
    let pid = counted(1);
    assert_eq!(counted(2), pid, "once for each time that it is idle");
    assert_eq!(count(&daemon, "trimmed"), 3);
    let trimmed = "thaw_trims_total{function=\"trimmed\"} 2";
    wait_until("the metrics say so", || daemon.admin("/metrics").text().contains(trimmed));
    assert_eq!(count(&daemon, "trimmed"), 4);
}

/// What the metrics say of the memory of a function's instances in a state.
fn memory_metric(daemon: &Daemon, function: &str, state: &str) -> Option<u64> {
    let series =
        format!("thaw_instance_memory_bytes{{function=\"{function}\",state=\"{state}\"}} ");
    let metrics = daemon.admin("/metrics").text();
    metrics.lines().find_map(|line| line.strip_prefix(&series)?.parse().ok())
}

#[test]
fn metrics_say_how_much_memory_instances_have_in_each_state() {
    let daemon = daemon("metrics");
    assert_eq!(get(daemon.gateway(), "told", "/grow/24").status, 200);
    wait_for_state(&daemon, "told", "idle");
    wait_until("idle memory is counted", || {
        memory_metric(&daemon, "told", "idle").is_some_and(|bytes| bytes > 24 << 20)
    });
    hibernate(&daemon, "told");
    wait_until("hibernated memory is counted", || {
        memory_metric(&daemon, "told", "hibernated").is_some_and(|bytes| bytes < 4 << 20)
    });
    assert_eq!(memory_metric(&daemon, "told", "idle"), None, "nothing is idle any more");
    assert_eq!(instance(&daemon, "told").1, "hibernated", "counting has woken it");
}

#[test]
fn it_is_woken_by_the_control_plane_before_a_request() {
    let daemon = daemon("woken");
    count(&daemon, "told");
    wait_for_state(&daemon, "told", "idle");
    hibernate(&daemon, "told");
    let twice = command(&daemon, &["hibernate", "told"]);
    assert_eq!(twice.code, Some(1), "{}", twice.stdout);
    assert!(twice.stderr.contains("no idle instance with memory to give up"), "{}", twice.stderr);
    let woken = command(&daemon, &["wake", "told"]);
    assert_eq!(woken.code, Some(0), "{}", woken.stderr);
    assert!(woken.stdout.starts_with("woke instance"), "{}", woken.stdout);
    wait_for_state(&daemon, "told", "woken-up");
    let none = command(&daemon, &["wake", "told"]);
    assert!(none.stderr.contains("no such hibernated instance"), "{}", none.stderr);
    assert_eq!(count(&daemon, "told"), 2);
}

#[test]
fn an_idle_instance_hibernates_by_itself_again_and_again() {
    let daemon = daemon("idle");
    for round in 1..=3 {
        assert_eq!(count(&daemon, "idle"), round);
        wait_for_state(&daemon, "idle", "hibernated");
    }
    // A connection of a client stays open all the time.
    let mut client = Raw::connect(daemon.gateway());
    for round in 4..=6 {
        client.send("GET /count HTTP/1.1\r\nHost: idle\r\n\r\n");
        let response = client.response().expect("an answer");
        assert_eq!(response.text().trim(), round.to_string());
        wait_for_state(&daemon, "idle", "hibernated");
    }
}

#[test]
fn threads_on_several_processors_hibernate_together() {
    let daemon = daemon("several");
    for function in ["several", "go"] {
        let ask = || {
            std::thread::scope(|scope| {
                let asked = [(); 8]
                    .map(|()| scope.spawn(|| get(daemon.gateway(), function, "/count").status));
                asked.map(|asked| asked.join().expect("an answer"))
            })
        };
        // Those who come at once while there is none may get one each.
        assert_eq!(get(daemon.gateway(), function, "/count").status, 200);
        wait_for_state(&daemon, function, "idle");
        assert_eq!(ask(), [200; 8]);
        for _ in 0..4 {
            hibernate(&daemon, function);
            assert_eq!(ask(), [200; 8], "{}", daemon.log());
        }
    }
    wait_for_state(&daemon, "several", "woken-up");
    assert_eq!(count(&daemon, "several"), 42);
}

#[test]
fn one_that_is_killed_while_it_is_hibernated_is_replaced() {
    let daemon = daemon("killed");
    assert_eq!(count(&daemon, "told"), 1);
    wait_for_state(&daemon, "told", "idle");
    hibernate(&daemon, "told");
    kill(instance(&daemon, "told").0);
    wait_until("it is gone", || daemon.instances("told").is_empty());
    assert_eq!(count(&daemon, "told"), 1);
}

#[test]
fn it_outlives_its_daemon() {
    if !rustix::process::geteuid().is_root() {
        skip("only a daemon of root's has a monitor");
        return;
    }
    let mut daemon = daemon("outlived");
    assert_eq!(count(&daemon, "told"), 1);
    daemon.wait_until_kept("told");
    hibernate(&daemon, "told");
    // It is kept anew, since it rests by now.
    daemon.wait_until_kept("told");
    let (pid, _) = instance(&daemon, "told");
    daemon.kill_and_await_next();
    wait_until("it is taken over", || daemon.instances("told").len() == 1);
    assert_eq!(count(&daemon, "told"), 2);
    assert_eq!(instance(&daemon, "told").0, pid);
    // The end of the daemon has woken it.
    wait_for_state(&daemon, "told", "woken-up");
    hibernate(&daemon, "told");
    assert_eq!(count(&daemon, "told"), 3);
}

#[test]
fn swap_files_have_a_quota() {
    let daemon = daemon("quota");
    assert_eq!(count(&daemon, "told"), 1);
    assert_eq!(get(daemon.gateway(), "told", "/grow/24").status, 200);
    wait_for_state(&daemon, "told", "idle");
    let set_quota = |text: &str| {
        fs::write(daemon.home().join("tenants.toml"), text).expect("the file");
        daemon.signal(Signal::HUP);
        wait_until("the quota is known", || {
            let metrics = daemon.admin("/metrics").text();
            let bytes = text.rsplit('"').nth(1).and_then(|size| size.strip_suffix("MiB"));
            let bytes = bytes.and_then(|size| size.parse::<u64>().ok()).expect("a size") << 20;
            metrics.contains(&format!("quota=\"swap\"}} {bytes}"))
        });
    };
    set_quota("[default]\nswap = \"16MiB\"\n");
    let refused = command(&daemon, &["hibernate", "told"]);
    assert_eq!(refused.code, Some(1), "{}", refused.stdout);
    assert!(refused.stderr.contains("16.0 MiB of swap files"), "{}", refused.stderr);
    assert!(refused.stderr.contains("raise `swap` in tenants.toml"), "{}", refused.stderr);
    // It has kept its memory, and serves.
    assert_eq!(count(&daemon, "told"), 3);
    wait_for_state(&daemon, "told", "idle");
    set_quota("[default]\nswap = \"64MiB\"\n");
    // The file of one that hibernates again takes the place of the one before.
    for round in 4..7 {
        hibernate(&daemon, "told");
        wait_until("one file counts", || {
            let used = daemon.admin("/metrics").text();
            let used = used.lines().find(|line| line.starts_with("thaw_tenant_swap_bytes"));
            let used = used.and_then(|line| line.rsplit(' ').next()?.parse::<u64>().ok());
            used.is_some_and(|used| (24 << 20..48 << 20).contains(&used))
        });
        assert_eq!(count(&daemon, "told"), round);
        wait_for_state(&daemon, "told", "woken-up");
    }
    kill(instance(&daemon, "told").0);
    wait_until("its file is gone", || {
        let metrics = daemon.admin("/metrics").text();
        let is_of_swap = |line: &&str| line.starts_with("thaw_tenant_swap_bytes");
        metrics.lines().find(is_of_swap).is_some_and(|line| line.ends_with(" 0"))
    });
}

/// The swap file that a process has open.
fn swap_file(pid: u32) -> fs::File {
    let descriptors = fs::read_dir(format!("/proc/{pid}/fd")).expect("root may read this");
    let paths = descriptors.map(|entry| entry.expect("an entry").path());
    let is_swap = |path: &PathBuf| {
        fs::read_link(path).is_ok_and(|link| link.to_string_lossy().contains("/swap/"))
    };
    let found = paths.into_iter().find(is_swap).expect("it has one");
    fs::File::open(found).expect("root may open it")
}

/// Whoever keeps a descriptor of a file that was replaced keeps no disk by that.
#[test]
fn a_swap_file_that_was_replaced_takes_no_disk() {
    let daemon = daemon("replaced");
    count(&daemon, "told");
    wait_for_state(&daemon, "told", "idle");
    hibernate(&daemon, "told");
    let kept = swap_file(instance(&daemon, "told").0);
    assert!(kept.metadata().expect("metadata").len() > 1 << 20);
    for round in 2..5 {
        assert_eq!(count(&daemon, "told"), round);
        wait_for_state(&daemon, "told", "woken-up");
        hibernate(&daemon, "told");
        wait_until("it takes no disk", || kept.metadata().expect("metadata").len() == 0);
    }
}

/// Nothing of the memory is left where somebody could find it.
#[test]
fn swap_files_have_no_names() {
    let daemon = daemon("names");
    count(&daemon, "told");
    wait_for_state(&daemon, "told", "idle");
    hibernate(&daemon, "told");
    let swap = daemon.home().join("swap");
    assert_eq!(fs::read_dir(&swap).expect("the directory").count(), 0);
    daemon.signal(Signal::TERM);
    std::thread::sleep(Duration::from_millis(10));
}
