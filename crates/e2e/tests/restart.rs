//! A daemon that is restarted in order leaves what lives to the next one: instances with their
//! memory, and the connections that were handed over to them. Requests that are under way are
//! answered first, and new clients wait.

use rustix::process::Signal;
use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::net::{SocketAddr, TcpStream};
use std::path::PathBuf;
use std::process::Command;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread;
use std::time::{Duration, Instant};
use thaw_e2e::{
    Apart, Background, LASTING_KEYS, Lines, Raw, TlsClient, built_home, certify, count,
    descendants, exists, free_port, get, lasting, lasting_lines, repository, request, run,
    run_with_input, run_within, skip, thaw, wait_until,
};

/// The address of the function that speaks no HTTP.
fn lines_address() -> SocketAddr {
    static PORT: OnceLock<u16> = OnceLock::new();
    ([127, 0, 0, 1], *PORT.get_or_init(free_port)).into()
}

/// A home with functions that remember, or `None` where there is no monitor.
fn node() -> Option<Apart> {
    static HOME: OnceLock<PathBuf> = OnceLock::new();
    const SLEEPY: &str = "isolation = \"instance\"\npersist = true\n[limits]\nkeep_alive = \"10m\"";
    const STORED: &str = "isolation = \"instance\"\n[[volumes]]\nname = \"data\"\npath = \"/data\"\n\
                          size = \"1MiB\"";
    let functions = || {
        [
            lasting("lasting", LASTING_KEYS),
            lasting("single", "isolation = \"request\""),
            lasting("sleepy", SLEEPY),
            lasting(
                "locked",
                "isolation = \"instance\"\nlimits.keep_alive = \"10m\"\n[hibernate]\nencrypt = true",
            ),
            lasting("stored", STORED),
        ]
    };
    Apart::of(|| HOME.get_or_init(|| built_home("restart", &functions())).clone())
}

/// The same with a function at an address of its own, which one test at a time uses.
fn node_with_lines() -> Option<(MutexGuard<'static, ()>, Apart)> {
    static HOME: OnceLock<PathBuf> = OnceLock::new();
    static TURN: Mutex<()> = Mutex::new(());
    let turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    let functions = || [lasting("lasting", LASTING_KEYS), lasting_lines(lines_address())];
    let home = || HOME.get_or_init(|| built_home("restart-lines", &functions())).clone();
    Some((turn, Apart::of(home)?))
}

/// Ends a daemon in order, and starts the next one.
fn restart(node: &Apart, daemon: &mut Background, name: &str) {
    assert_eq!(daemon.stop(), Some(0), "{}", daemon.log());
    *daemon = patient_daemon(node, name);
}

/// Starts a daemon that waits for much longer than [`SHORT`] if it waits for clients at all.
fn patient_daemon(node: &Apart, name: &str) -> Background {
    node.start_as_daemon(node.daemon().arg("--drain=10m"), name)
}

/// For a restart that waits for nobody, on a busy machine.
const SHORT: Duration = Duration::from_secs(90);

#[test]
fn instances_and_their_connections_go_on_under_the_next_daemon() {
    let Some((_turn, node)) = node_with_lines() else { return };
    let mut monitor = node.start_monitor();
    let mut daemon = patient_daemon(&node, "daemon-0.log");
    let gateway = node.gateway(&daemon);
    assert_eq!(count(gateway, "lasting"), 1);
    let mut raw = Lines::connect(lines_address());
    assert_eq!(raw.say("first"), 1);
    for number in 1..4 {
        let began = Instant::now();
        restart(&node, &mut daemon, &format!("daemon-{number}.log"));
        assert!(began.elapsed() < SHORT, "nothing waits for the drain time");
        assert_eq!(node.gateway(&daemon), gateway);
        assert!(daemon.log().contains("took over 2 of 2 instances"), "{}", daemon.log());
        assert_eq!(raw.say("again"), number * 2);
        assert_eq!(Lines::connect(lines_address()).say("another"), number * 2 + 1);
        assert_eq!(count(gateway, "lasting"), number + 1);
    }
    // At the end of the monitor nothing is left.
    let all = descendants(monitor.pid());
    assert_eq!(daemon.stop(), Some(0));
    assert_eq!(monitor.stop(), Some(0));
    wait_until("nothing is left", || all.iter().all(|process| !exists(process.pid)));
}

/// The gateway copies the bytes of a connection that has changed its protocol, as a WebSocket has.
#[test]
fn connections_of_another_protocol_go_on_under_the_next_daemon() {
    let Some(node) = node() else { return };
    let _monitor = node.start_monitor();
    let mut daemon = node.start_daemon("daemon-0.log");
    let gateway = node.gateway(&daemon);
    let mut client = Lines::upgrade(gateway, "lasting");
    let mut single = Lines::upgrade(gateway, "single");
    let (mut said, long) = (0, "x".repeat(100_000));
    for number in 1..4 {
        restart(&node, &mut daemon, &format!("daemon-{number}.log"));
        for text in ["short", &long] {
            said += 1;
            assert_eq!(client.say(text), said, "{}", daemon.log());
            assert_eq!(single.say(text), said);
        }
    }
    // Its end is seen on both sides, and gives its place back.
    drop((client, single));
    wait_until("one instance is left, and nobody is connected to it", || {
        let instances = node.instances();
        instances.len() == 1 && instances[0]["connections"] == 0
    });
    let mut others: Vec<_> = (0..32).map(|_| Lines::upgrade(gateway, "lasting")).collect();
    assert_eq!(others[31].say("hello"), said + 1);
}

/// Bytes are on their way in both directions all the time.
#[test]
fn no_byte_is_lost_in_a_connection_that_goes_on() {
    let Some(node) = node() else { return };
    let _monitor = node.start_monitor();
    let mut daemon = node.start_daemon("daemon-0.log");
    let client = Lines::upgrade(node.gateway(&daemon), "lasting");
    let mut writer = client.0.get_ref().try_clone().expect("a descriptor");
    let is_over = Arc::new(AtomicBool::new(false));
    let written = {
        let is_over = is_over.clone();
        thread::spawn(move || {
            let mut written = 0;
            while !is_over.load(Ordering::SeqCst) {
                writer.write_all(format!("line {written}\n").as_bytes()).expect("it is sent");
                written += 1;
                if written % 64 == 0 {
                    thread::sleep(Duration::from_millis(1));
                }
            }
            writer.shutdown(std::net::Shutdown::Write).expect("it ends");
            written
        })
    };
    let read = thread::spawn(move || client.0.lines().map(|line| line.expect("a line")).collect());
    for number in 1..4 {
        thread::sleep(Duration::from_millis(300));
        restart(&node, &mut daemon, &format!("daemon-{number}.log"));
    }
    is_over.store(true, Ordering::SeqCst);
    let written = written.join().expect("the writer");
    let read: Vec<String> = read.join().expect("the reader");
    let expected: Vec<_> = (0..written).map(|line| format!("{} line {line}", line + 1)).collect();
    assert!(read == expected, "{} of {written} lines: {:?}", read.len(), read.last());
}

/// A node that speaks TLS at the address, as the host `lasting`.
fn node_with_tls(address: SocketAddr) -> Option<Apart> {
    let node = node()?;
    let keys = node.home().join("tls");
    fs::create_dir_all(&keys).expect("a directory");
    certify(&keys, &["lasting"]);
    let text = format!(
        "[tls]\nlisten = [\"{address}\"]\n\
         [[tls.certificate]]\nchain = \"tls/node.pem\"\nkey = \"tls/node.key\"\n"
    );
    fs::write(node.home().join("gateway.toml"), text).expect("our home");
    let given = Command::new("chown")
        .arg("-R")
        .arg(format!("--reference={}", node.home().display()))
        .args([&keys, &node.home().join("gateway.toml")])
        .status();
    assert!(given.expect("chown").success());
    Some(node)
}

fn tls_client(node: &Apart, address: SocketAddr, version: &str) -> TlsClient {
    TlsClient::connect(address, "lasting", &node.home().join("tls/node.pem"), &[version])
}

#[test]
fn connections_of_another_protocol_over_tls_go_on_under_the_next_daemon() {
    let address = SocketAddr::from(([127, 0, 0, 1], free_port()));
    let Some(node) = node_with_tls(address) else { return };
    let _monitor = node.start_monitor();
    let mut daemon = patient_daemon(&node, "daemon-0.log");
    let mut clients: Vec<_> = ["-tls1_2", "-tls1_3"]
        .map(|version| Lines::upgrade_over(tls_client(&node, address, version), "lasting"))
        .into();
    let (mut said, long) = (0, "x".repeat(100_000));
    for number in 1..4 {
        let began = Instant::now();
        assert_eq!(daemon.stop(), Some(0), "{}", daemon.log());
        // Nobody is there to hear it.
        clients.iter_mut().for_each(|client| client.send("meanwhile"));
        daemon = patient_daemon(&node, &format!("daemon-{number}.log"));
        assert!(began.elapsed() < SHORT, "nothing waits for the drain time");
        let mut numbers: Vec<_> =
            clients.iter_mut().map(|client| client.hear("meanwhile")).collect();
        numbers.sort_unstable();
        assert_eq!(numbers, [said + 1, said + 2], "{}", daemon.log());
        said += 2;
        for client in &mut clients {
            for text in ["short", &long] {
                said += 1;
                assert_eq!(client.say(text), said, "{}", daemon.log());
            }
        }
    }
    drop(clients);
    wait_until("nobody is connected", || node.instances()[0]["connections"] == 0);
    // A daemon that is killed takes its keys with it.
    let mut client = Lines::upgrade_over(tls_client(&node, address, "-tls1_3"), "lasting");
    assert_eq!(client.say("hello"), said + 1);
    daemon.signal(Signal::KILL);
    daemon.wait();
    assert_eq!(client.read(), "");
}

/// Bytes are on their way in both directions all the time.
#[test]
fn no_byte_is_lost_in_a_connection_over_tls_that_goes_on() {
    let address = SocketAddr::from(([127, 0, 0, 1], free_port()));
    let Some(node) = node_with_tls(address) else { return };
    let _monitor = node.start_monitor();
    let mut daemon = node.start_daemon("daemon-0.log");
    let is_over = Arc::new(AtomicBool::new(false));
    let clients = ["-tls1_2", "-tls1_3"].map(|version| {
        let client = Lines::upgrade_over(tls_client(&node, address, version), "lasting");
        let is_over = is_over.clone();
        thread::spawn(move || answers_until(client, &is_over))
    });
    for number in 1..4 {
        thread::sleep(Duration::from_millis(300));
        restart(&node, &mut daemon, &format!("daemon-{number}.log"));
    }
    is_over.store(true, Ordering::SeqCst);
    for client in clients {
        let (written, read) = client.join().expect("a client");
        let expected: Vec<_> = (0..written).map(|line| format!("line {line}")).collect();
        assert!(read == expected, "{} of {written} lines: {:?}", read.len(), read.last());
    }
}

/// Sends lines all the time. How many, and the answers without their numbers.
fn answers_until(client: Lines<TlsClient>, is_over: &AtomicBool) -> (usize, Vec<String>) {
    let mut client = client.0.into_inner();
    let (stdin, stdout) = (&mut client.stdin, &mut client.stdout);
    thread::scope(|scope| {
        let read = scope.spawn(|| {
            let mut read = Vec::new();
            for line in BufReader::new(stdout).lines() {
                let line = line.expect("a line");
                let (_, text) = line.split_once(' ').expect("its number");
                if text == "the last" {
                    break;
                }
                read.push(text.to_owned());
            }
            read
        });
        let mut written = 0;
        while !is_over.load(Ordering::SeqCst) {
            stdin.write_all(format!("line {written}\n").as_bytes()).expect("it is sent");
            written += 1;
            if written % 64 == 0 {
                thread::sleep(Duration::from_millis(1));
            }
        }
        stdin.write_all(b"the last\n").expect("it is sent");
        (written, read.join().expect("the reader"))
    })
}

/// What is younger than those that are kept in any case.
#[test]
fn connections_of_the_last_moment_are_left_to_the_next_daemon() {
    let Some((_turn, node)) = node_with_lines() else { return };
    let _monitor = node.start_monitor();
    let mut daemon = node.start_daemon("first.log");
    for round in 0..3 {
        let mut clients: Vec<_> = (0..8).map(|_| Lines::connect(lines_address())).collect();
        let first = clients[0].say("hello");
        restart(&node, &mut daemon, &format!("next-{round}.log"));
        let numbers: Vec<_> = clients.iter_mut().map(|client| client.say("hello")).collect();
        assert_eq!(numbers, (first + 1..first + 9).collect::<Vec<_>>(), "{}", daemon.log());
    }
}

#[test]
fn requests_under_way_are_answered_whichever_way_they_have_come() {
    let Some(node) = node() else { return };
    let _monitor = node.start_monitor();
    let mut daemon = patient_daemon(&node, "first.log");
    let gateway = node.gateway(&daemon);
    assert_eq!(count(gateway, "lasting"), 1);
    let routed = thread::spawn(move || get(gateway, "lasting", "/hold/10").status);
    // Nothing can follow it, so its connection is handed over.
    let whole = thread::spawn(move || {
        let mut client = Raw::connect(gateway);
        client.send("GET /hold/20 HTTP/1.1\r\nHost: single\r\nConnection: close\r\n\r\n");
        client.response().map(|response| response.status)
    });
    wait_until("both have an instance", || {
        let instances = node.instances();
        instances.len() == 2 && instances.iter().all(|instance| instance["connections"] == 1)
    });
    let began = Instant::now();
    restart(&node, &mut daemon, "second.log");
    assert_eq!(routed.join().expect("a client"), 200);
    assert!(began.elapsed() < SHORT);
    assert_eq!(whole.join().expect("a client"), Some(200), "{}", daemon.log());
    assert_eq!(count(gateway, "lasting"), 3);
}

#[test]
fn an_instance_with_a_volume_goes_on_under_the_next_daemon() {
    let Some(node) = node() else { return };
    let _monitor = node.start_monitor();
    let mut daemon = node.start_daemon("first.log");
    let gateway = node.gateway(&daemon);
    assert_eq!(count(gateway, "stored"), 1);
    wait_until("it is idle", || is_idle(&node));
    let whole = thread::spawn(move || {
        let mut client = Raw::connect(gateway);
        client.send("GET /hold/15 HTTP/1.1\r\nHost: stored\r\nConnection: close\r\n\r\n");
        client.response().map(|response| response.status)
    });
    wait_until("it is under way", || is_busy(&node));
    restart(&node, &mut daemon, "second.log");
    assert_eq!(whole.join().expect("a client"), Some(200), "{}", daemon.log());
    assert!(daemon.log().contains("took over 1 of 1 instances"), "{}", daemon.log());
    // Otherwise the next request may come before it is seen that the client has gone, and boot another one.
    wait_until("it is idle again", || is_idle(&node));
    assert_eq!(count(gateway, "stored"), 3);
}

#[test]
fn five_restarts_under_clients_cost_none_of_them_a_request() {
    let Some(node) = node() else { return };
    let _monitor = node.start_monitor();
    let mut daemon = node.start_daemon("daemon-0.log");
    let gateway = node.gateway(&daemon);
    count(gateway, "lasting");
    let is_over = Arc::new(AtomicBool::new(false));
    let served = Arc::new(AtomicUsize::new(0));
    let clients: Vec<_> = ["lasting", "lasting", "single"]
        .into_iter()
        .map(|function| {
            let (is_over, served) = (is_over.clone(), served.clone());
            thread::spawn(move || {
                let mut failures = Vec::new();
                while !is_over.load(Ordering::SeqCst) {
                    match request(gateway, function, "/count", None) {
                        Ok(response) if response.status == 200 => {
                            served.fetch_add(1, Ordering::SeqCst);
                        }
                        other => failures.push(format!("{function}: {other:?}")),
                    }
                }
                failures
            })
        })
        .collect();
    for number in 1..6 {
        let before = served.load(Ordering::SeqCst);
        wait_until("the clients are served", || served.load(Ordering::SeqCst) > before + 10);
        restart(&node, &mut daemon, &format!("daemon-{number}.log"));
        assert!(daemon.log().contains("took over"), "{}", daemon.log());
    }
    is_over.store(true, Ordering::SeqCst);
    let failures: Vec<_> = clients.into_iter().flat_map(|client| client.join().unwrap()).collect();
    assert_eq!(failures, Vec::<String>::new());
    let all = served.load(Ordering::SeqCst) as u32;
    assert!(count(gateway, "lasting") < all, "one instance has served all of its function");
}

/// Also where the daemon has bound the address itself.
#[test]
fn nobody_is_refused_at_an_address_of_a_function() {
    let Some((_turn, node)) = node_with_lines() else { return };
    let mut monitor = node.start_monitor_with(&["--keep-for", "40s"]);
    let mut daemon = node.start_daemon("daemon-0.log");
    let is_over = Arc::new(AtomicBool::new(false));
    let served = Arc::new(AtomicUsize::new(0));
    let client = {
        let (is_over, served) = (is_over.clone(), served.clone());
        thread::spawn(move || {
            let mut last = 0;
            while !is_over.load(Ordering::SeqCst) {
                let number = Lines::connect(lines_address()).say("hello");
                assert!(number > last, "the same instance");
                last = number;
                served.fetch_add(1, Ordering::SeqCst);
            }
            last
        })
    };
    for number in 1..4 {
        let before = served.load(Ordering::SeqCst);
        wait_until("the client is served", || served.load(Ordering::SeqCst) > before + 1);
        restart(&node, &mut daemon, &format!("daemon-{number}.log"));
        assert!(!daemon.log().contains("cannot listen"), "{}", daemon.log());
    }
    is_over.store(true, Ordering::SeqCst);
    assert!(client.join().expect("a client") > 3, "{}", daemon.log());
    // Nobody listens any more when no daemon has come, or all was to end.
    daemon.stop();
    wait_until("nobody listens", || TcpStream::connect(lines_address()).is_err());
    let times_over = |monitor: &Background| monitor.log().matches("no daemon has come").count();
    wait_until("it is said why", || times_over(&monitor) == 1);
    let mut daemon = node.start_daemon("last.log");
    daemon.signal(Signal::INT);
    assert_eq!(daemon.wait(), Some(0));
    wait_until("it is closed", || TcpStream::connect(lines_address()).is_err());
    assert_eq!(times_over(&monitor), 1, "it has waited for another daemon");
    assert_eq!(monitor.stop(), Some(0));
}

#[test]
fn what_no_daemon_comes_for_ends_after_a_while() {
    let Some((_turn, node)) = node_with_lines() else { return };
    let monitor = node.start_monitor_with(&["--keep-for", "20s"]);
    let mut daemon = node.start_daemon("first.log");
    let gateway = node.gateway(&daemon);
    assert_eq!(count(gateway, "lasting"), 1);
    let mut raw = Lines::connect(lines_address());
    raw.say("hello");
    assert_eq!(daemon.stop(), Some(0));
    assert_eq!(raw.say("still here"), 2, "{}", monitor.log());
    wait_until("all sandboxes are gone", || descendants(monitor.pid()).is_empty());
    wait_until("it is said why", || monitor.log().contains("no daemon has come within 20 s"));
    assert_eq!(raw.read(), "", "its instance has ended");
    // The monitor serves the next daemon all the same.
    let daemon = node.start_daemon("second.log");
    assert_eq!(node.gateway(&daemon), gateway);
    assert_eq!(count(gateway, "lasting"), 1, "another instance");
}

#[test]
fn a_daemon_can_be_told_to_end_what_lives() {
    let Some(node) = node() else { return };
    let monitor = node.start_monitor();
    let mut daemon = node.start_daemon("first.log");
    let gateway = node.gateway(&daemon);
    assert_eq!(count(gateway, "lasting"), 1);
    daemon.signal(Signal::INT);
    assert_eq!(daemon.wait(), Some(0));
    wait_until("all sandboxes are gone", || descendants(monitor.pid()).is_empty());
    let _daemon = node.start_daemon("second.log");
    assert_eq!(count(gateway, "lasting"), 1, "another instance");
}

/// Their state lies on disk, so that it outlives the monitor, too.
#[test]
fn idle_instances_that_persist_sleep_meanwhile() {
    let Some(node) = node() else { return };
    let mut monitor = node.start_monitor();
    let mut daemon = node.start_daemon("first.log");
    let gateway = node.gateway(&daemon);
    assert_eq!(count(gateway, "sleepy"), 1);
    restart(&node, &mut daemon, "second.log");
    assert_eq!(count(gateway, "sleepy"), 2, "{}", daemon.log());
    assert_eq!(daemon.stop(), Some(0));
    assert_eq!(monitor.stop(), Some(0));
    let _monitor = node.start_monitor();
    let daemon = node.start_daemon("third.log");
    assert_eq!(count(node.gateway(&daemon), "sleepy"), 3, "{}", daemon.log());
}

/// Whoever takes that long for a request may be let go of by a daemon that leaves: it waits half a second
/// (`CLIENTS_PATIENCE`, crates/node/src/node/ending.rs).
const LATE: Duration = Duration::from_millis(400);

/// One request after another on a connection, as long as the answers allow it.
fn keep_asking(gateway: SocketAddr, is_over: &AtomicBool) -> Vec<String> {
    let mut failures = Vec::new();
    let mut connection: Option<Raw> = None;
    let mut silent_since = Instant::now();
    while !is_over.load(Ordering::SeqCst) {
        let mut client = connection.take().unwrap_or_else(|| {
            silent_since = Instant::now();
            Raw::connect(gateway)
        });
        client.send("GET /count HTTP/1.1\r\nHost: lasting\r\n\r\n");
        let is_late = silent_since.elapsed() > LATE;
        let heard = client.response();
        silent_since = Instant::now();
        match heard {
            Some(response) if response.status == 200 => {
                let is_last = response.header("connection") == Some("close");
                connection = (!is_last).then_some(client);
            }
            // On a busy machine: the next attempt is to be answered.
            None if is_late => {}
            other => failures.push(format!("{other:?}")),
        }
    }
    failures
}

#[test]
fn clients_that_keep_their_connections_lose_no_request() {
    let Some(node) = node() else { return };
    let _monitor = node.start_monitor();
    let mut daemon = node.start_daemon("daemon-0.log");
    let gateway = node.gateway(&daemon);
    let is_over = Arc::new(AtomicBool::new(false));
    let clients = [(); 4].map(|()| {
        let is_over = is_over.clone();
        thread::spawn(move || keep_asking(gateway, &is_over))
    });
    for number in 1..4 {
        thread::sleep(Duration::from_millis(300));
        restart(&node, &mut daemon, &format!("daemon-{number}.log"));
    }
    is_over.store(true, Ordering::SeqCst);
    let failures: Vec<_> = clients.into_iter().flat_map(|client| client.join().unwrap()).collect();
    assert_eq!(failures, Vec::<String>::new(), "{}", daemon.log());
}

/// They are told to open another connection, or one that never rests would hold up the restart.
#[test]
fn clients_of_http_2_do_not_hold_up_a_restart() {
    if Command::new("node").arg("--version").output().is_err() {
        return skip("node is missing");
    }
    let Some(node) = node() else { return };
    let _monitor = node.start_monitor();
    let mut daemon = patient_daemon(&node, "first.log");
    let mut client = Command::new("node");
    let script = repository().join("tests/guest/host/http2_client.mjs");
    client.arg(script).args([node.gateway(&daemon).to_string(), "4000".to_owned()]);
    let client = thread::spawn(move || run_within(Duration::from_secs(300), &mut client, b""));
    thread::sleep(Duration::from_millis(500));
    let began = Instant::now();
    restart(&node, &mut daemon, "second.log");
    assert!(began.elapsed() < SHORT, "{}", daemon.log());
    let outcome = client.join().expect("a client");
    assert_eq!(outcome.stdout, "4000 answered, 0 failed\n", "{outcome:?}\n{}", daemon.log());
}

#[test]
fn a_request_has_the_drain_time_and_no_more() {
    let Some(node) = node() else { return };
    let _monitor = node.start_monitor();
    let mut daemon = node.start_as_daemon(node.daemon().args(["--drain", "2s"]), "first.log");
    let gateway = node.gateway(&daemon);
    assert_eq!(count(gateway, "lasting"), 1);
    wait_until("it is idle", || is_idle(&node));
    let slow = thread::spawn(move || request(gateway, "lasting", "/hold/30", None));
    wait_until("it is under way", || is_busy(&node));
    let began = Instant::now();
    restart(&node, &mut daemon, "second.log");
    assert!(began.elapsed() >= Duration::from_secs(2), "{}", daemon.log());
    slow.join().expect("a client").expect_err("it is cut");
    // The instance itself has gone on.
    assert_eq!(count(gateway, "lasting"), 3, "{}", daemon.log());
}

/// Whether there are instances, and all of them wait for a connection.
fn is_idle(node: &Apart) -> bool {
    let instances = node.instances();
    !instances.is_empty() && instances.iter().all(|instance| instance["state"] == "idle")
}

/// Whether an instance has a connection.
fn is_busy(node: &Apart) -> bool {
    node.instances().iter().any(|instance| instance["connections"] == 1)
}

#[test]
fn an_end_of_everything_overtakes_a_restart() {
    let Some((_turn, node)) = node_with_lines() else { return };
    let monitor = node.start_monitor();
    let mut daemon = node.start_as_daemon(node.daemon().args(["--drain", "5s"]), "first.log");
    let gateway = node.gateway(&daemon);
    assert_eq!(count(gateway, "lasting"), 1);
    Lines::connect(lines_address()).say("hello");
    wait_until("all are idle", || is_idle(&node) && node.instances().len() == 2);
    let slow = thread::spawn(move || request(gateway, "lasting", "/hold/30", None));
    wait_until("it is under way", || is_busy(&node));
    daemon.signal(Signal::TERM);
    wait_until("it leaves", || daemon.log().contains("leaving the live instances"));
    daemon.signal(Signal::INT);
    assert_eq!(daemon.wait(), Some(0));
    drop(slow.join().expect("a client"));
    wait_until("all sandboxes are gone", || descendants(monitor.pid()).is_empty());
    wait_until("nobody listens", || TcpStream::connect(lines_address()).is_err());
}

/// Nobody but the daemon has the key to its memory.
#[test]
fn an_instance_whose_memory_is_encrypted_on_disk_goes_on() {
    let Some(node) = node() else { return };
    let _monitor = node.start_monitor();
    let mut daemon = node.start_daemon("first.log");
    let gateway = node.gateway(&daemon);
    assert_eq!(count(gateway, "locked"), 1);
    wait_until("it is idle", || is_idle(&node));
    let mut hibernate = thaw();
    hibernate.env("THAW_HOME", node.home()).args(["hibernate", "locked"]);
    run(&mut hibernate).success();
    restart(&node, &mut daemon, "second.log");
    assert_eq!(count(gateway, "locked"), 2, "{}", daemon.log());
}

/// Bytes that were read for a client which does not take them are in the daemon's memory only.
#[test]
fn a_client_that_does_not_read_holds_up_no_restart() {
    let Some(node) = node() else { return };
    let _monitor = node.start_monitor();
    let mut daemon = patient_daemon(&node, "first.log");
    let gateway = node.gateway(&daemon);
    let stuck = Lines::upgrade(gateway, "lasting");
    let socket = stuck.0.get_ref();
    socket.set_nonblocking(true).expect("it can be set");
    let line = [&[b'x'; 9999][..], b"\n"].concat();
    wait_until("nothing more fits", || {
        let mut fitted = 0;
        while (&*socket).write(&line).is_ok() {
            fitted += 1;
        }
        thread::sleep(Duration::from_millis(200));
        fitted == 0
    });
    let began = Instant::now();
    restart(&node, &mut daemon, "second.log");
    assert!(began.elapsed() < SHORT, "{}", daemon.log());
    assert!(count(gateway, "lasting") > 1, "the same instance");
}

/// A sandbox without a program, such as people and agents work in.
const BOX: &str = "name = \"box\"\nisolation = \"instance\"\n[entry]\nkind = \"sandbox\"\n[runtime]\n\
                   kind = \"python3\"\nprograms = [\"sh\", \"cat\", \"sleep\"]\n";

#[test]
fn sandboxes_go_on_under_the_next_daemon() {
    static HOME: OnceLock<PathBuf> = OnceLock::new();
    let build = || {
        let home = built_home("restart-box", &[]);
        let directory = home.with_extension("box");
        fs::create_dir_all(&directory).expect("a directory");
        fs::write(directory.join("thaw.toml"), BOX).expect("thaw.toml");
        run(thaw().arg("build").arg(&directory).env("THAW_HOME", &home)).success();
        home
    };
    let Some(node) = Apart::of(|| HOME.get_or_init(build).clone()) else { return };
    let _monitor = node.start_monitor();
    let mut daemon = patient_daemon(&node, "first.log");
    let call = |arguments: &[&str]| run(thaw().args(arguments).env("THAW_HOME", node.home()));
    call(&["sandbox", "create", "box", "--name", "one"]).success();
    let leave = "echo kept > /tmp/file; sleep 600 & echo $! > /tmp/pid";
    call(&["exec", "one", "--", "sh", "-c", leave]).success();
    let count = "n=0; while :; do n=$((n+1)); echo n$n; sleep 0.05; done";
    let count = call(&["exec", "-d", "one", "--", "sh", "-c", count]).success().trim().to_owned();
    let answer = "while read line; do echo got $line; done; exit 5";
    let answer = call(&["exec", "-di", "one", "--", "sh", "-c", answer]).success();
    let typed = call(&["exec", "-dt", "one", "--", "cat"]).success();
    // The client of this one ends with its daemon.
    let home = node.home();
    let running = thread::spawn(move || {
        run(thaw().args(["exec", "one", "--", "sleep", "600"]).env("THAW_HOME", home))
    });
    // Otherwise it may reach the next daemon.
    let listed = || call(&["sandbox", "logs", "one", "--list", "--json"]).success();
    wait_until("it runs", || listed().contains("\"sleep\""));
    let began = Instant::now();
    restart(&node, &mut daemon, "second.log");
    assert!(began.elapsed() < SHORT, "{}", daemon.log());
    assert_ne!(running.join().expect("a client").code, Some(0));
    let look = "cat /tmp/file; kill -0 $(cat /tmp/pid) && echo runs";
    assert_eq!(call(&["exec", "one", "--", "sh", "-c", look]).success(), "kept\nruns\n");
    // Streams and terminals have waited for this daemon, and go on; twice.
    let lines = || call(&["sandbox", "logs", "one", &count]).success().lines().count();
    for log in ["third.log", "fourth.log"] {
        let before = lines();
        wait_until("it counts on", || lines() > before + 2);
        restart(&node, &mut daemon, log);
    }
    wait_until("this daemon has heard of it", || lines() > 0);
    let printed = call(&["sandbox", "logs", "one", &count]).success();
    let first: u64 = printed.lines().next().map_or(0, |line| line[1..].parse().expect("a number"));
    assert!(first > 6, "it has counted meanwhile: {printed}");
    let attach = |number: &str, input: &[u8]| {
        let mut attach = thaw();
        attach.args(["sandbox", "attach", "one", number.trim()]).env("THAW_HOME", node.home());
        let said = run_with_input(&mut attach, input);
        (said.stdout, said.code)
    };
    assert_eq!(attach(&answer, b"a\nb\n"), ("got a\ngot b\n".to_owned(), Some(5)));
    assert_eq!(attach(&typed, b"c\n\x04"), ("c\r\nc\r\n".to_owned(), Some(0)));
}

/// Connects to the monitor as a daemon of another version does, and goes.
const TURNS_AWAY: &str = "\
import socket, sys
s = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
s.settimeout(30)
s.connect(sys.argv[1])
assert s.recv(100000)
";

#[test]
fn daemons_that_do_not_understand_the_monitor_end_nothing() {
    let Some(node) = node() else { return };
    let _monitor = node.start_monitor_with(&["--keep-for", "5m"]);
    let mut daemon = node.start_daemon("first.log");
    let gateway = node.gateway(&daemon);
    assert_eq!(count(gateway, "lasting"), 1);
    assert_eq!(daemon.stop(), Some(0));
    for _ in 0..4 {
        let mut other = node.as_user(node.uid, node.gid);
        other.args(["/usr/bin/python3", "-c", TURNS_AWAY, &node.socket()]);
        // The monitor ends those that close its socket.
        run(&mut other);
    }
    let daemon = node.start_daemon("second.log");
    assert!(daemon.log().contains("took over 1 of 1 instances"), "{}", daemon.log());
    assert_eq!(count(gateway, "lasting"), 2);
}

#[test]
fn instances_wait_for_a_daemon_for_a_second_to_a_day() {
    for (time, is_refused) in [("999ms", true), ("86401s", true), ("1s", false), ("24h", false)] {
        // Without a socket it does not begin.
        let outcome = run(thaw().args(["monitor", "--keep-for", time]));
        assert_eq!(outcome.stderr.contains("it must be 1s to 1d"), is_refused, "{outcome:?}");
    }
}
