//! The four boots: what a copy is must not depend on how it was booted.

use serde_json::Value;
use std::collections::BTreeSet;
use std::sync::OnceLock;
use thaw_e2e::{
    Daemon, DaemonOptions, Function, built_home, descendants, exists, get, kill, process,
    wait_until,
};

const WARM: &str = "template = false";
const FORK: &str = "template = true";
const READY: &str = "template = false\nready = 2";

/// One daemon for the tests that damage nothing.
fn served() -> &'static Daemon {
    static SERVED: OnceLock<Daemon> = OnceLock::new();
    SERVED.get_or_init(|| {
        let copies = |name, keys| Function::PythonVariant { program: "copies", name, keys };
        let home = built_home(
            "boots",
            &[
                copies("warm", WARM),
                copies("fork", FORK),
                copies("ready", READY),
                copies("warm-workers", "template = false\nenv.WORKERS = \"2\""),
                copies("fork-workers", "template = true\nenv.WORKERS = \"2\""),
                copies("ready-workers", "template = false\nready = 2\nenv.WORKERS = \"2\""),
            ],
        );
        Daemon::start(&home, &DaemonOptions::default())
    })
}

fn detail(daemon: &Daemon, function: &str) -> Value {
    daemon.admin(&format!("/functions/{function}")).json()
}

/// Waits until the next boot of a function will be of this kind.
fn await_standby(daemon: &Daemon, function: &str, kind: &str) {
    let is_there = |standby: &Value| match kind {
        "fork" => !standby["template"].is_null(),
        "ready" => standby["ready"].as_array().is_some_and(|ready| !ready.is_empty()),
        _ => true,
    };
    wait_until(&format!("{function} can boot by {kind}"), || {
        is_there(&detail(daemon, function)["standby"])
    });
}

/// Asks a copy of its own.
#[track_caller]
fn ask(daemon: &Daemon, function: &str) -> Value {
    let response = get(daemon.gateway(), function, "/");
    assert_eq!(response.status, 200, "{}", response.text());
    response.json()
}

/// Boots copies and checks that they are what they should be and differ from
/// each other; returns the kinds of the boots, the newest first.
#[track_caller]
fn check_copies(daemon: &Daemon, function: &str, kind: &str) -> Vec<String> {
    let mut seen = BTreeSet::new();
    let values: Vec<Value> = (0..6)
        .map(|_| {
            await_standby(daemon, function, kind);
            ask(daemon, function)
        })
        .collect();
    for value in &values {
        let unique = value["unique"].as_object().expect("an object");
        for (key, drawn) in unique {
            assert!(
                seen.insert(format!("{key} {drawn}")),
                "two copies drew the same {key}: {drawn}"
            );
        }
        assert_eq!(value["threads"], 4, "{value}");
        assert!(value["ticked"].as_u64().is_some_and(|ticked| ticked > 0), "{value}");
        assert_eq!(value["hostname"], values[0]["hostname"]);
        assert_eq!(value["limit"], (256u64 << 20).to_string());
        let now = std::time::UNIX_EPOCH.elapsed().expect("a clock").as_secs_f64();
        assert!((now - value["time"].as_f64().expect("a number")).abs() < 10.0, "{value}");
    }
    let boots = detail(daemon, function)["boots"].clone();
    let boots = boots.as_array().expect("an array");
    boots.iter().map(|boot| boot["kind"].as_str().expect("a kind").to_owned()).collect()
}

#[test]
fn copies_from_the_image_are_their_own() {
    let kinds = check_copies(served(), "warm", "warm");
    assert!(kinds.iter().all(|kind| kind == "warm" || kind == "cold"), "{kinds:?}");
    check_copies(served(), "warm-workers", "warm");
}

#[test]
fn copies_of_a_template_are_their_own() {
    for function in ["fork", "fork-workers"] {
        // The first one comes from the image, and shows the working set.
        ask(served(), function);
        let kinds = check_copies(served(), function, "fork");
        assert!(kinds[..5].iter().all(|kind| kind == "fork"), "{function}: {kinds:?}");
    }
}

#[test]
fn copies_that_were_booted_ahead_are_their_own() {
    for function in ["ready", "ready-workers"] {
        let kinds = check_copies(served(), function, "ready");
        assert!(kinds[..4].iter().all(|kind| kind == "ready"), "{function}: {kinds:?}");
    }
}

/// The lines of `/proc/PID/status` that isolation shows in.
fn status(pid: u32, field: &str) -> String {
    let text = std::fs::read_to_string(format!("/proc/{pid}/status")).expect("a process");
    let line = text.lines().find_map(|line| line.strip_prefix(field)).expect("the field");
    line.trim_start_matches(':').trim().to_owned()
}

/// A copy of a template has nothing of the template's rights, ids and groups.
#[test]
fn a_copy_of_a_template_is_isolated_like_any_other() {
    let home = built_home(
        "boots-isolation",
        &[Function::PythonVariant {
            program: "copies",
            name: "kept",
            keys: "template = true\nisolation = \"instance\"\nlimits.instances = 4",
        }],
    );
    let daemon = Daemon::start(&home, &DaemonOptions::default());
    // Two at a time, so that the second one is booted, too.
    let both = || {
        std::thread::scope(|scope| {
            let asked = [0, 1].map(|_| scope.spawn(|| ask(&daemon, "kept")));
            asked.into_iter().for_each(|thread| drop(thread.join().expect("an answer")));
        });
    };
    both();
    await_standby(&daemon, "kept", "fork");
    daemon.instances("kept").iter().for_each(|instance| {
        kill(instance["pid"].as_u64().expect("a process id") as u32);
    });
    wait_until("they are gone", || daemon.instances("kept").is_empty());
    both();
    let copies: Vec<u32> = daemon
        .instances("kept")
        .iter()
        .map(|instance| instance["pid"].as_u64().expect("a process id") as u32)
        .collect();
    assert_eq!(copies.len(), 2);
    let boots = detail(&daemon, "kept")["boots"].clone();
    assert_eq!((&boots[0]["kind"], &boots[1]["kind"]), (&"fork".into(), &"fork".into()));

    let template =
        detail(&daemon, "kept")["standby"]["template"].as_u64().expect("a template") as u32;
    assert_eq!(status(template, "CapEff"), "00000000002000c0");
    let groups: Vec<String> = copies.iter().map(|&pid| memory_group(pid)).collect();
    for (i, &pid) in copies.iter().enumerate() {
        for field in ["CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"] {
            assert_eq!(status(pid, field), "0000000000000000", "{field}");
        }
        assert_eq!((status(pid, "Seccomp"), status(pid, "NoNewPrivs")), ("2".into(), "1".into()));
        assert_eq!(status(pid, "NSpid").split_whitespace().next_back(), Some("1"));
        assert_ne!(status(pid, "Uid"), status(template, "Uid"));
        assert_ne!(status(pid, "NSpgid"), status(template, "NSpgid"));
        assert_eq!(process(pid).map(|p| p.parent), process(template).map(|p| p.parent));
        if !groups[i].is_empty() {
            assert_ne!(groups[i], memory_group(template));
            assert!(!groups[..i].contains(&groups[i]), "{groups:?}");
        }
    }
    assert_ne!(status(copies[0], "Uid"), status(copies[1], "Uid"));
    // Copies outlive their template, and end with the daemon.
    kill(template);
    wait_until("the template is gone", || !exists(template));
    assert!(copies.iter().all(|&pid| exists(pid)));
    let all: Vec<u32> = descendants(daemon.pid()).iter().map(|p| p.pid).collect();
    daemon.kill();
    wait_until("nothing is left", || !all.iter().any(|&pid| exists(pid)));
}

/// The memory control group of a process; empty if there are none.
fn memory_group(pid: u32) -> String {
    let text = std::fs::read_to_string(format!("/proc/{pid}/cgroup")).unwrap_or_default();
    let of_memory = |line: &&str| line.contains(":memory:") || line.starts_with("0::");
    let line = text.lines().find(of_memory).unwrap_or_default();
    line.rsplit(':').next().unwrap_or_default().trim_matches('/').to_owned()
}

/// A function that is built anew or removed keeps nothing of the old one ready.
#[test]
fn what_was_kept_for_an_older_function_is_ended() {
    let function = Function::PythonVariant { program: "copies", name: "ready", keys: READY };
    let home = built_home("boots-replaced", std::slice::from_ref(&function));
    let daemon = Daemon::start(&home, &DaemonOptions::default());
    let kept = || -> Vec<u32> {
        let standby = detail(&daemon, "ready")["standby"]["ready"].clone();
        let pids = standby.as_array().expect("an array").iter();
        pids.map(|pid| pid.as_u64().expect("a process id") as u32).collect()
    };
    wait_until("two are ready", || kept().len() == 2);
    let old = kept();
    assert_eq!(function.build(&home).code, Some(0));
    wait_until("the old ones have ended", || !old.iter().any(|&pid| exists(pid)));
    wait_until("two are ready again", || kept().len() == 2);
    ask(&daemon, "ready");
}

/// Whatever dies that was kept for the next boot, the next boot works.
#[test]
fn lost_standbys_are_made_again() {
    let copies = |name, keys| Function::PythonVariant { program: "copies", name, keys };
    let home = built_home("boots-lost", &[copies("fork", FORK), copies("ready", READY)]);
    let daemon = Daemon::start(&home, &DaemonOptions::default());
    ask(&daemon, "fork");
    for _ in 0..3 {
        await_standby(&daemon, "fork", "fork");
        let template = detail(&daemon, "fork")["standby"]["template"].as_u64().expect("a template");
        kill(template as u32);
        ask(&daemon, "fork");
        wait_until("another template is made", || {
            ask(&daemon, "fork");
            let now = detail(&daemon, "fork")["standby"]["template"].as_u64();
            now.is_some_and(|now| now != template)
        });
        await_standby(&daemon, "ready", "ready");
        for pid in detail(&daemon, "ready")["standby"]["ready"].as_array().expect("an array") {
            kill(pid.as_u64().expect("a process id") as u32);
        }
        ask(&daemon, "ready");
    }
}
