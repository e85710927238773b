//! Live instances outlive a daemon that is killed: the next one takes them over from the
//! monitor, with their memory, their connections and their logs.

use rustix::process::Signal;
use serde_json::Value;
use std::cell::Cell;
use std::collections::BTreeSet;
use std::fs;
use std::io::Read;
use std::net::TcpListener;
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
use std::sync::OnceLock;
use std::thread;
use std::time::{Duration, Instant};
use thaw_e2e::{
    Daemon, DaemonOptions, Function, Raw, Response, built_home, copy_home, descendants, exists,
    get, has_controller, kill, run, skip, thaw, wait_until,
};

const KEYS: &str = "isolation = \"instance\"\n[limits]\nconcurrency = 8\nmemory = \"96MiB\"\n\
                    timeout = \"60s\"\nkeep_alive = \"10m\"\n[egress]\nallow = [\"host.thaw.internal:*\"]";

fn survivor(name: &'static str, keys: &'static str) -> Function {
    Function::PythonVariant { program: "survivor", name, keys }
}

/// A daemon with functions that remember how often they were asked, or `None` where it would
/// have no monitor.
fn daemon(label: &str) -> Option<Daemon> {
    static HOME: OnceLock<PathBuf> = OnceLock::new();
    if !rustix::process::geteuid().is_root() {
        skip("only a daemon of root's has a monitor");
        return None;
    }
    let home = HOME.get_or_init(|| {
        let functions = [
            survivor("warm", KEYS),
            survivor("ready", "isolation = \"instance\"\nready = 2\nlimits.keep_alive = \"10m\""),
            survivor(
                "fork",
                "isolation = \"instance\"\ntemplate = true\nlimits.keep_alive = \"10m\"",
            ),
            survivor("single", "isolation = \"request\"\nlimits.timeout = \"60s\""),
        ];
        built_home("takeover", &functions)
    });
    let home = copy_home(home, &format!("takeover-{label}"));
    let daemon = Daemon::start(&home, &DaemonOptions::default());
    assert_ne!(daemon.pid(), daemon.main_pid(), "there is no monitor:\n{}", daemon.log());
    Some(daemon)
}

fn count(daemon: &Daemon, function: &str) -> u32 {
    let response = get(daemon.gateway(), function, "/count");
    assert_eq!(response.status, 200, "{function}: {}\n{}", response.text(), daemon.log());
    response.text().trim().parse().expect("a number")
}

/// Connections that the instances of a function have.
fn connections(daemon: &Daemon, function: &str) -> u64 {
    let of = |instance: &Value| instance["connections"].as_u64().expect("a number");
    daemon.instances(function).iter().map(of).sum()
}

/// Waits until all instances of a function are kept for the next daemon, with so many
/// connections in all.
#[track_caller]
fn wait_until_kept(daemon: &Daemon, function: &str, connections: u64) {
    wait_until("its instances and connections are kept", || {
        let kept: Option<Vec<u64>> =
            daemon.instances(function).iter().map(|instance| instance["kept"].as_u64()).collect();
        kept.is_some_and(|kept| !kept.is_empty() && kept.iter().sum::<u64>() == connections)
    });
}

/// A request on a connection that is handed over whole.
fn begin(daemon: &Daemon, function: &str, path: &str) -> Raw {
    let mut connection = Raw::connect(daemon.gateway());
    let head = format!("GET {path} HTTP/1.1\r\nHost: {function}\r\nConnection: close\r\n\r\n");
    connection.send(head);
    connection
}

fn answer(mut connection: Raw) -> Option<Response> {
    connection.response()
}

#[test]
fn instances_go_on_under_the_next_daemon() {
    let Some(mut daemon) = daemon("goes-on") else { return };
    let functions = ["warm", "ready", "fork"];
    for function in functions {
        assert_eq!(count(&daemon, function), 1, "{function}");
    }
    let pid = |daemon: &Daemon, function: &str| daemon.first_instance(function)["pid"].clone();
    let before = functions.map(|function| pid(&daemon, function));
    let lines = |daemon: &Daemon| {
        let outcome = run(thaw().env("THAW_HOME", daemon.home()).args(["logs", "fork"]));
        let is_request = |line: &&str| line.contains("request");
        outcome.stdout.lines().filter(is_request).map(str::to_owned).collect::<Vec<_>>()
    };
    for function in functions {
        wait_until_kept(&daemon, function, 0);
    }
    wait_until("the first line is written", || lines(&daemon).len() == 1);
    // More than once: each daemon leaves to the next what it has got itself.
    for number in 2..5 {
        daemon.kill_and_await_next();
        for function in functions {
            assert_eq!(count(&daemon, function), number, "{function}:\n{}", daemon.log());
        }
        assert_eq!(functions.map(|function| pid(&daemon, function)), before);
        // Lines that a daemon has read and not written yet end with it.
        wait_until("the lines are written", || lines(&daemon).len() == number as usize);
    }
    // Each line once, whichever daemon has read it.
    let numbers: Vec<_> =
        lines(&daemon).iter().map(|line| line.rsplit(' ').next().unwrap().to_owned()).collect();
    assert_eq!(numbers, ["1", "2", "3", "4"]);
    // They are as real as others: they can be ended, and others come.
    let first = before[0].as_u64().expect("a process id") as u32;
    kill(first);
    wait_until("it is gone", || daemon.instances("warm").is_empty());
    assert_eq!(count(&daemon, "warm"), 1);
    // At the end nothing is left of any of them.
    let all = descendants(daemon.main_pid());
    assert_eq!(daemon.stop(), Some(0));
    wait_until("nothing is left", || all.iter().all(|process| !exists(process.pid)));
}

#[test]
fn connections_that_were_handed_over_outlive_the_daemon() {
    let Some(mut daemon) = daemon("connections") else { return };
    let held: Vec<_> = ["warm", "single", "single"]
        .map(|function| begin(&daemon, function, "/hold/30"))
        .into_iter()
        .collect();
    let late = begin(&daemon, "warm", "/hold/90");
    wait_until_kept(&daemon, "warm", 2);
    wait_until_kept(&daemon, "single", 2);
    daemon.kill_and_await_next();
    // Their instances are busy, and known to be.
    wait_until("they are busy", || {
        daemon.instances("single").len() == 2 && connections(&daemon, "warm") == 2
    });
    for connection in held {
        assert_eq!(answer(connection).expect("an answer").status, 200, "{}", daemon.log());
    }
    // One that served a single request ends with it, and others have a place free.
    wait_until("they are gone", || daemon.instances("single").is_empty());
    wait_until("one is left", || connections(&daemon, "warm") == 1);
    // The time that a request may take is kept, too.
    assert_eq!(answer(late).expect("an answer").status, 504);
    assert!(daemon.log().contains("no answer within 60 s"), "{}", daemon.log());
}

#[test]
fn limits_hold_under_the_next_daemon() {
    let Some(mut daemon) = daemon("limits") else { return };
    assert_eq!(count(&daemon, "warm"), 1);
    wait_until_kept(&daemon, "warm", 0);
    daemon.kill_and_await_next();
    assert_eq!(count(&daemon, "warm"), 2);
    let beyond = get(daemon.gateway(), "warm", "/grow/200");
    assert_ne!(beyond.status, 200, "{}", beyond.text());
    // Its control groups are known.
    if !has_controller("memory") {
        return skip("counting memory needs a control group");
    }
    let tenants = daemon.admin("/tenants").json();
    let used = tenants[0]["memory_used"].as_u64();
    assert!(used > Some(1 << 20), "{tenants}");
}

/// A server that counts connections which bring something; its port.
fn server() -> (u16, std::sync::mpsc::Receiver<()>) {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let port = listener.local_addr().expect("an address").port();
    let (told, tell) = std::sync::mpsc::channel();
    thread::spawn(move || {
        for mut stream in listener.incoming().flatten() {
            let mut bytes = Vec::new();
            if stream.read_to_end(&mut bytes).is_ok() && bytes == b"hello" {
                let _ = told.send(());
            }
        }
    });
    (port, tell)
}

/// What a guest has asked the daemon for, and not got, it asks the next one for.
#[test]
fn questions_that_nobody_has_answered_are_asked_again() {
    let Some(mut daemon) = daemon("questions") else { return };
    let (port, heard) = server();
    assert_eq!(count(&daemon, "warm"), 1);
    wait_until_kept(&daemon, "warm", 0);
    let begun = Instant::now();
    let connection = begin(&daemon, "warm", &format!("/later/20/{port}"));
    wait_until_kept(&daemon, "warm", 1);
    // It asks while nobody listens, and nobody sees that.
    let pid = rustix::process::Pid::from_raw(daemon.pid() as i32).expect("a process id");
    rustix::process::kill_process(pid, Signal::STOP).expect("the daemon runs");
    thread::sleep(Duration::from_secs(22).saturating_sub(begun.elapsed()));
    assert!(heard.try_recv().is_err(), "somebody has connected it");
    daemon.kill_and_await_next();
    assert_eq!(answer(connection).expect("an answer").status, 200, "{}", daemon.log());
    heard.recv_timeout(Duration::from_secs(60)).expect("the connection was made");
}

fn set_quotas(daemon: &Daemon, text: &str) {
    let owner = std::fs::metadata(daemon.home()).expect("the home").uid();
    let quotas = daemon.home().join("tenants.toml");
    std::fs::write(&quotas, text).expect("tenants.toml");
    std::os::unix::fs::chown(&quotas, Some(owner), None).expect("its owner");
    daemon.signal(Signal::HUP);
}

/// What lives comes before what is kept ready, also where the quota has room for no more.
#[test]
fn instances_keep_their_share_of_a_quota() {
    let Some(mut daemon) = daemon("quota") else { return };
    set_quotas(&daemon, "[default]\ninstances = 2\n");
    let quota = || daemon.admin("/tenants").json()[0]["quota"].clone();
    wait_until("the quota is in force", || quota()["instances"] == 2);
    let both = [1, 2].map(|_| begin(&daemon, "single", "/hold/40"));
    wait_until("both have an instance", || daemon.instances("single").len() == 2);
    wait_until_kept(&daemon, "single", 2);
    daemon.kill_and_await_next();
    assert_eq!(daemon.instances("single").len(), 2, "{}", daemon.log());
    for connection in both {
        assert_eq!(answer(connection).expect("an answer").status, 200, "{}", daemon.log());
    }
}

/// A server that takes connections in and does nothing with them; its port.
fn silent_server() -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let port = listener.local_addr().expect("an address").port();
    thread::spawn(move || {
        let mut streams = Vec::new();
        streams.extend(listener.incoming().flatten());
    });
    port
}

/// Outgoing connections that an instance has count for its tenant, whichever daemon has made
/// them.
#[test]
fn outgoing_connections_count_under_the_next_daemon() {
    let Some(mut daemon) = daemon("outgoing") else { return };
    set_quotas(&daemon, "[default]\negress.connections = 4\n");
    let quota = |daemon: &Daemon| daemon.admin("/tenants").json()[0]["quota"].clone();
    wait_until("the quota is in force", || quota(&daemon)["egress_connections"] == 4);
    let port = silent_server();
    let open = |daemon: &Daemon, number: u32| {
        let path = format!("/open/{port}/{number}");
        get(daemon.gateway(), "warm", &path).text().trim().to_owned()
    };
    let used = |daemon: &Daemon| daemon.admin("/tenants").json()[0]["egress_connections"].clone();
    // Before the instance is kept, and afterwards.
    assert_eq!(open(&daemon, 2), "made made", "{}", daemon.log());
    wait_until_kept(&daemon, "warm", 0);
    assert_eq!(open(&daemon, 1), "made");
    daemon.kill_and_await_next();
    wait_until("they are counted", || used(&daemon) == 3);
    assert_eq!(open(&daemon, 2), "made EADDRNOTAVAIL");
    // What an instance opens that was taken over is known to the daemon after that.
    daemon.kill_and_await_next();
    wait_until("all are counted", || used(&daemon) == 4);
    assert_eq!(open(&daemon, 1), "EADDRNOTAVAIL");
    wait_until("those that are closed count no more", || {
        get(daemon.gateway(), "warm", "/close").status == 200
            && open(&daemon, 4) == "made made made made"
    });
    assert_eq!(daemon.instances("warm").len(), 1);
}

/// Daemons have the monitor keep and forget things, and wait for none of it.
#[test]
fn a_monitor_that_is_stopped_holds_up_no_client() {
    let Some(mut daemon) = daemon("stopped") else { return };
    assert_eq!(count(&daemon, "warm"), 1);
    wait_until_kept(&daemon, "warm", 0);
    daemon.signal(Signal::STOP);
    // These are to be kept, and forgotten, while the monitor does neither.
    let held: Vec<_> = (0..6).map(|_| begin(&daemon, "warm", "/hold/20")).collect();
    wait_until("they have arrived", || connections(&daemon, "warm") == 6);
    // The daemon asks for that some time after they have, and nobody hears of it.
    thread::sleep(Duration::from_millis(600));
    let asked: Vec<_> = (0..12)
        .map(|_| {
            let gateway = daemon.gateway();
            thread::spawn(move || get(gateway, "warm", "/count").status)
        })
        .collect();
    for connection in held {
        assert_eq!(answer(connection).expect("an answer").status, 200, "{}", daemon.log());
    }
    for request in asked {
        assert_eq!(request.join().expect("an answer"), 200, "{}", daemon.log());
    }
    // Copies of another function are booted meanwhile, and end.
    for _ in 0..2 {
        assert_eq!(get(daemon.gateway(), "single", "/count").status, 200, "{}", daemon.log());
    }
    daemon.signal(Signal::CONT);
    // What was asked of it is done then.
    let late = begin(&daemon, "warm", "/hold/40");
    wait_until_kept(&daemon, "warm", 1);
    let pids = |daemon: &Daemon| {
        let of = |instance: &Value| instance["pid"].as_u64().expect("a process id");
        daemon.instances("warm").iter().map(of).collect::<BTreeSet<_>>()
    };
    let before = pids(&daemon);
    daemon.kill_and_await_next();
    assert_eq!(answer(late).expect("an answer").status, 200, "{}", daemon.log());
    assert_eq!(pids(&daemon), before, "{}", daemon.log());
}

/// Until the monitor has it, the files are all that is left if the daemon is killed.
#[test]
fn one_that_wakes_keeps_its_files_until_the_monitor_has_it() {
    let Some(mut daemon) = daemon("wakes") else { return };
    assert_eq!(count(&daemon, "warm"), 1);
    wait_until("it is idle", || daemon.instance("warm").2 == "idle");
    run(thaw().env("THAW_HOME", daemon.home()).args(["sleep", "warm"])).success();
    let files = || fs::read_dir(daemon.home().join("asleep")).expect("a directory").count();
    assert_eq!(files(), 2);
    daemon.signal(Signal::STOP);
    assert_eq!(count(&daemon, "warm"), 2);
    assert_eq!(files(), 2, "{}", daemon.log());
    daemon.signal(Signal::CONT);
    wait_until("its files are gone", || files() == 0);
    wait_until_kept(&daemon, "warm", 0);
    daemon.kill_and_await_next();
    assert_eq!(count(&daemon, "warm"), 3, "{}", daemon.log());
}

/// The numbers of connections that a daemon gives are none that a guest knows from before.
#[test]
fn connections_that_were_not_kept_end_no_others() {
    let Some(mut daemon) = daemon("numbers") else { return };
    assert_eq!(count(&daemon, "warm"), 1);
    wait_until_kept(&daemon, "warm", 0);
    // Too young to be kept.
    let young = begin(&daemon, "warm", "/hold/12");
    // The daemon counts it a moment before the guest has it, and a kill in between would lose it.
    let asked = Cell::new(1);
    wait_until("the guest has it", || {
        asked.set(asked.get() + 1);
        count(&daemon, "warm") == asked.get() + 1
    });
    daemon.kill_and_await_next();
    let held: Vec<_> = (0..4).map(|_| begin(&daemon, "warm", "/hold/40")).collect();
    // The guest has it still, answers, and says then that it has closed it: before it says
    // the same of the next one.
    assert_eq!(answer(young).expect("an answer").status, 200);
    count(&daemon, "warm");
    wait_until("four are left", || connections(&daemon, "warm") == 4);
    for connection in held {
        assert_eq!(answer(connection).expect("an answer").status, 200);
    }
}

/// An instance may be why the daemon crashes, so that the third daemon takes over none.
#[test]
fn after_two_crashes_instances_begin_anew() {
    let Some(mut daemon) = daemon("crashes") else { return };
    let ends = [Signal::ABORT, Signal::ABORT, Signal::KILL, Signal::ABORT];
    for (expected, signal) in [1, 2, 1, 2].into_iter().zip(ends) {
        assert_eq!(count(&daemon, "warm"), expected, "{}", daemon.log());
        wait_until_kept(&daemon, "warm", 0);
        daemon.end_and_await_next(signal);
    }
    assert_eq!(count(&daemon, "warm"), 1, "{}", daemon.log());
    assert!(daemon.log().contains("its instances end, too"), "{}", daemon.log());
    assert_eq!(daemon.stop(), Some(0));
}

#[test]
fn what_is_not_kept_ends_and_so_does_what_nobody_serves_any_more() {
    let Some(mut daemon) = daemon("ends") else { return };
    for function in ["warm", "ready", "fork"] {
        count(&daemon, function);
    }
    for function in ["warm", "ready", "fork"] {
        wait_until_kept(&daemon, function, 0);
    }
    let kept: BTreeSet<u32> = ["warm", "ready", "fork"]
        .iter()
        .flat_map(|function| daemon.instances(function))
        .map(|instance| instance["pid"].as_u64().expect("a process id") as u32)
        .collect();
    assert_eq!(kept.len(), 3);
    let old = daemon.sandboxes();
    // Meanwhile a function is built anew, and another is removed.
    let pid = rustix::process::Pid::from_raw(daemon.pid() as i32).expect("a process id");
    rustix::process::kill_process(pid, Signal::STOP).expect("the daemon runs");
    let functions = daemon.home().join("store/functions");
    std::fs::remove_dir_all(functions.join("fork")).expect("the function's record");
    daemon.kill_and_await_next();
    assert_eq!(count(&daemon, "warm"), 2);
    let parents: BTreeSet<u32> =
        thaw_e2e::children(daemon.main_pid()).into_iter().map(|process| process.pid).collect();
    wait_until("all others of the daemon before are gone", || {
        old.iter()
            .filter(|process| exists(process.pid))
            .all(|process| parents.contains(&process.pid) || kept.contains(&process.pid))
    });
    assert_eq!(get(daemon.gateway(), "fork", "/count").status, 404);
    let live = || kept.iter().filter(|pid| exists(**pid)).count();
    wait_until("that of the removed function is gone", || live() == 2);
}
