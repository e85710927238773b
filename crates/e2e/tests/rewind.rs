//! Instances that are put back into the state before their request: nothing of the request is
//! left, whatever the guest did, behind its kernel's back, too.

use serde_json::Value;
use std::cell::RefCell;
use std::collections::BTreeSet;
use std::fs;
use std::path::PathBuf;
use thaw_e2e::{
    Daemon, DaemonOptions, Function, Linking, built_home, compile, exists, get, kernel_symbol, run,
    thaw, wait_until,
};

const NAME: &str = "secrets";
/// As the program expects it: masked.
const SECRET: &[u8; 32] = b"the-first-client's-secret:7Q2xR9";
const MASK: u8 = 0x55;

/// A store with the program that hides secrets as a function that is rewound.
fn home(label: &str) -> PathBuf {
    let home = built_home(label, &[]);
    let directory = tempfile::tempdir().expect("a directory");
    let program = compile("hostile/secrets", Linking::Static);
    fs::copy(program, directory.path().join("secrets")).expect("a program");
    let text = format!(
        "name = \"{NAME}\"\ncommand = [\"/app/secrets\"]\nport = 8080\nfiles = [\"secrets\"]\n\
         rewind = true\n[runtime]\nkind = \"binary\"\n[env]\nTHAW_TEST_HOSTCALL = \"{:x}\"\n",
        kernel_symbol("thaw_hostcall"),
    );
    fs::write(directory.path().join("thaw.toml"), text).expect("thaw.toml");
    run(thaw().env("THAW_HOME", &home).arg("build").arg(directory.path())).success();
    home
}

/// How often instances of a function were put back, and how often not, and why not. Waits until
/// no request is being served, and nothing is being put back.
fn rewinds(daemon: &Daemon, function: &str) -> (u64, u64, String) {
    let detail = || daemon.admin(&format!("/functions/{function}")).json();
    let is_quiet = |detail: &Value| {
        detail["live"].as_array().is_some_and(Vec::is_empty)
            && detail["standby"]["rewinds"]["under_way"] == 0
    };
    wait_until("nothing goes on", || is_quiet(&detail()));
    let rewinds = &detail()["standby"]["rewinds"];
    let count = |name: &str| rewinds[name].as_u64().expect("a count");
    (count("done"), count("refused"), rewinds["last_refusal"].to_string())
}

/// Requests in a row whose instances end without being put back.
const ENDED_MAX: usize = 10;

/// What became of an instance after its request.
#[derive(Debug, PartialEq, Eq)]
enum Fate {
    Rewound,
    Refused(String),
}

/// Asks, and waits until the instance is ready again or has ended.
#[track_caller]
fn ask(daemon: &Daemon, function: &str, path: &str) -> (String, Fate) {
    for _ in 0..ENDED_MAX {
        let before = rewinds(daemon, function);
        let response = get(daemon.gateway(), function, path);
        assert_eq!(response.status, 200, "{path}: {}", response.text());
        let (done, refused, why) = rewinds(daemon, function);
        let fate = match (done - before.0, refused - before.1) {
            (1, 0) => Fate::Rewound,
            (0, 1) => Fate::Refused(why),
            // A new instance, which was to show what it touches, or booted while none was ready.
            (0, 0) => continue,
            other => panic!("{path}: {other:?} of one request"),
        };
        return (response.text(), fate);
    }
    panic!("{path}: no instance is put back any more");
}

fn with_secret(path: &str) -> String {
    let masked: String = SECRET.iter().map(|byte| format!("{:02x}", byte ^ MASK)).collect();
    format!("{path}?{masked}")
}

/// Waits until the next instance is one that can be put back.
fn settle(daemon: &Daemon, function: &str) {
    // The first ones show what they touch, and end.
    for _ in 0..3 {
        assert_eq!(get(daemon.gateway(), function, "/").status, 200);
    }
    let done = rewinds(daemon, function).0;
    wait_until("an instance was put back", || {
        get(daemon.gateway(), function, "/");
        rewinds(daemon, function).0 > done
    });
    let is_ready = |standby: &Value| standby["ready"].as_array().is_some_and(|all| !all.is_empty());
    let standby = || daemon.admin(&format!("/functions/{function}")).json()["standby"].clone();
    wait_until("an instance is ready", || is_ready(&standby()));
}

#[test]
fn nothing_of_a_request_is_left_for_the_next_one() {
    let daemon = Daemon::start(&home("rewind"), &DaemonOptions::default());
    settle(&daemon, NAME);
    // The search finds what is there: otherwise it proves nothing.
    let (found, fate) = ask(&daemon, NAME, &with_secret("/both"));
    let count: u32 = found
        .lines()
        .last()
        .and_then(|line| line.strip_prefix("found ")?.parse().ok())
        .expect("a count");
    assert!(count > 20, "{found}");
    for place in ["heap", "pages", "memory"] {
        assert!(found.contains(&format!(", {place}")), "{place}: {found}");
    }
    assert_eq!(fate, Fate::Rewound);
    let (before, fate) = ask(&daemon, NAME, "/state");
    assert_eq!(fate, Fate::Rewound);
    assert!(before.contains("secret (null)"), "{before}");

    for _ in 0..3 {
        assert_eq!(ask(&daemon, NAME, &with_secret("/hide")), ("done\n".into(), Fate::Rewound));
        assert_eq!(ask(&daemon, NAME, &with_secret("/find")), ("found 0\n".into(), Fate::Rewound));
        assert_eq!(ask(&daemon, NAME, &with_secret("/hide")), ("done\n".into(), Fate::Rewound));
        assert_eq!(ask(&daemon, NAME, "/state"), (before.clone(), Fate::Rewound));
    }
}

#[test]
fn what_its_kernel_does_not_know_of_is_put_right_or_ends_the_instance() {
    let daemon = Daemon::start(&home("rewind-attacked"), &DaemonOptions::default());
    settle(&daemon, NAME);
    let (before, _) = ask(&daemon, NAME, "/state");
    for attack in ["mapping", "window", "gate", "protection", "timer"] {
        let (said, fate) = ask(&daemon, NAME, &with_secret(&format!("/attack/{attack}")));
        assert_eq!((said, fate), (format!("attacked by {attack}: done\n"), Fate::Rewound));
        assert_eq!(ask(&daemon, NAME, &with_secret("/find")).0, "found 0\n", "{attack}");
        assert_eq!(ask(&daemon, NAME, "/state").0, before, "{attack}");
    }
    // With another signal stack the next signal ends it, before or after its answer.
    get(daemon.gateway(), NAME, &with_secret("/attack/stack"));
    settle(&daemon, NAME);
    assert_eq!(ask(&daemon, NAME, "/state").0, before);
    for (attack, why) in [
        ("text", "the text of its kernel was changed"),
        ("descriptor", "is not what it was"),
        ("process", "several threads or processes"),
        ("grandchild", "several threads or processes"),
    ] {
        let (said, fate) = ask(&daemon, NAME, &with_secret(&format!("/attack/{attack}")));
        assert_eq!(said, format!("attacked by {attack}: done\n"));
        let Fate::Refused(reason) = fate else { panic!("{attack}: {fate:?}") };
        assert!(reason.contains(why), "{attack}: {reason}");
        settle(&daemon, NAME);
        assert_eq!(ask(&daemon, NAME, &with_secret("/find")).0, "found 0\n", "{attack}");
    }
    let metrics = daemon.admin("/metrics").text();
    for (reason, count) in [("text", 1), ("files", 1), ("processes", 2)] {
        let line = format!(
            "thaw_rewinds_refused_total{{function=\"{NAME}\",reason=\"{reason}\"}} {count}\n"
        );
        assert!(metrics.contains(&line), "{reason}: {metrics}");
    }
    assert!(metrics.contains(&format!("thaw_rewinds_total{{function=\"{NAME}\"}} ")), "{metrics}");
}

/// More of them than there are instances: most wait for one that comes back.
#[test]
fn requests_at_the_same_time_find_nothing_of_each_other() {
    const CLIENTS: usize = 8;
    const REQUESTS: usize = 30;
    let daemon = Daemon::start(&home("rewind-together"), &DaemonOptions::default());
    settle(&daemon, NAME);
    let client = || {
        for _ in 0..REQUESTS {
            for (path, answer) in [("/hide", "done\n"), ("/find", "found 0\n")] {
                let response = get(daemon.gateway(), NAME, &with_secret(path));
                assert_eq!((response.status, response.text().as_str()), (200, answer));
            }
        }
    };
    let all_at_once = || {
        std::thread::scope(|scope| {
            let clients: Vec<_> = (0..CLIENTS).map(|_| scope.spawn(client)).collect();
            clients.into_iter().for_each(|client| client.join().expect("it got its answers"));
        });
    };
    // On a busy machine many are served by new instances, which show what they touch, and end.
    for _ in 0..8 {
        all_at_once();
        if rewinds(&daemon, NAME).0 as usize > CLIENTS * REQUESTS {
            break;
        }
    }
    let (done, refused, why) = rewinds(&daemon, NAME);
    assert!(done as usize > CLIENTS * REQUESTS, "{done} of {}", 2 * CLIENTS * REQUESTS);
    assert_eq!((refused, why.as_str()), (0, "null"));
}

#[test]
fn a_python_function_is_another_each_time() {
    let function =
        Function::PythonVariant { program: "copies", name: "rewound", keys: "rewind = true" };
    let home = built_home("rewind-python", &[function]);
    let daemon = Daemon::start(&home, &DaemonOptions::default());
    settle(&daemon, "rewound");
    let mut seen = BTreeSet::new();
    for _ in 0..20 {
        let (text, fate) = ask(&daemon, "rewound", "/");
        assert_eq!(fate, Fate::Rewound);
        assert!(seen.insert(text), "two lives are equal");
    }
}

#[test]
fn without_a_word_it_is_measured_whether_instances_are_put_back() {
    let function = Function::PythonVariant { program: "copies", name: "measured", keys: "" };
    let home = built_home("rewind-measured", &[function]);
    let daemon = Daemon::start(&home, &DaemonOptions::default());
    let standby = || daemon.admin("/functions/measured").json()["standby"].clone();
    get(daemon.gateway(), "measured", "/");
    assert_eq!(standby()["ready"].as_array().map(Vec::len), Some(0), "nobody asks for more");
    let seen = RefCell::new(BTreeSet::new());
    wait_until("it is measured", || {
        for _ in 0..10 {
            let text = get(daemon.gateway(), "measured", "/").text();
            assert!(seen.borrow_mut().insert(text), "two lives are equal");
        }
        standby()["rewinds"]["measured"].is_object()
    });
    let measured = standby()["rewinds"]["measured"].clone();
    let micros = |key: &str| measured[key].as_u64().expect("microseconds");
    assert!(micros("new_us") > 0 && micros("rewound_us") > 0);
    assert_eq!(measured["wins"], micros("rewound_us") < micros("new_us"), "{measured}");
    assert!(standby()["rewinds"]["done"].as_u64() >= Some(32));
    let inspected = run(thaw().env("THAW_HOME", daemon.home()).args(["inspect", "measured"]));
    assert!(inspected.success().contains("us of processor time with a new instance"));
    wait_until("nothing is kept for nobody", || {
        standby()["ready"].as_array().is_some_and(Vec::is_empty)
    });
}

/// The rewinder of a daemon that has rewound something.
fn rewinder(daemon: &Daemon) -> u32 {
    let all = thaw_e2e::descendants(daemon.main_pid());
    all.into_iter().find(|process| process.name == "thaw-rewind").expect("a rewinder").pid
}

#[test]
fn the_rewinder_has_rights_over_sandboxes_only() {
    let daemon = Daemon::start(&home("rewind-rights"), &DaemonOptions::default());
    settle(&daemon, NAME);
    let pid = rewinder(&daemon);
    let status = fs::read_to_string(format!("/proc/{pid}/status")).expect("it runs");
    let field = |name: &str| {
        let line = status.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
        line.unwrap_or_else(|| panic!("no {name}")).trim().to_owned()
    };
    // CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH, CAP_KILL, CAP_SYS_PTRACE.
    let kept = format!("{:016x}", 1 << 1 | 1 << 2 | 1 << 5 | 1 << 19);
    for (name, value) in [
        ("CapEff", kept.as_str()),
        ("CapPrm", &kept),
        ("CapInh", "0000000000000000"),
        ("CapBnd", "0000000000000000"),
        ("CapAmb", "0000000000000000"),
        ("NoNewPrivs", "1"),
        ("Seccomp", "2"),
        ("Threads", "1"),
    ] {
        assert_eq!(field(name), value, "{name}");
    }
    let namespace = |pid: &str, name: &str| {
        fs::read_link(format!("/proc/{pid}/ns/{name}")).expect("a namespace")
    };
    for name in ["user", "pid", "net", "mnt", "ipc", "uts", "cgroup"] {
        assert_ne!(namespace(&pid.to_string(), name), namespace("self", name), "{name}");
    }
    assert_eq!(fs::read_dir(format!("/proc/{pid}/root/")).expect("its root").count(), 0);
}

#[test]
fn a_rewinder_that_is_killed_costs_no_request() {
    let daemon = Daemon::start(&home("rewind-killed"), &DaemonOptions::default());
    settle(&daemon, NAME);
    for _ in 0..3 {
        let rewinder = rewinder(&daemon);
        thaw_e2e::kill(rewinder);
        wait_until("the rewinder is gone", || !exists(rewinder));
        for _ in 0..5 {
            assert_eq!(get(daemon.gateway(), NAME, "/").status, 200);
        }
        let before = rewinds(&daemon, NAME).0;
        wait_until("instances are put back again", || {
            assert_eq!(get(daemon.gateway(), NAME, "/").status, 200);
            rewinds(&daemon, NAME).0 > before
        });
    }
}
