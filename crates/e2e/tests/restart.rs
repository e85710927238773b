//! A daemon that is restarted in order leaves what lives to the next one: instances with their
//! memory, and the connections that were handed over to them. Requests that are under way are
//! answered first, and new clients wait.

use rustix::process::Signal;
use std::io::{BufRead, BufReader, Write};
use std::net::{SocketAddr, TcpStream};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread;
use std::time::{Duration, Instant};
use thaw_e2e::{
    Apart, Background, Function, built_home, descendants, exists, free_port, get, request,
    request_local, wait_until,
};

/// What an instance that stays may do.
const KEYS: &str = "isolation = \"instance\"\n[limits]\nconcurrency = 32\ntimeout = \"60s\"\n\
                    keep_alive = \"10m\"";

/// The address of the function that speaks no HTTP.
fn lines_address() -> SocketAddr {
    static PORT: OnceLock<u16> = OnceLock::new();
    ([127, 0, 0, 1], *PORT.get_or_init(free_port)).into()
}

fn lasting(name: &'static str, keys: &'static str) -> Function {
    Function::PythonVariant { program: "lasting", name, keys }
}

/// A home with functions that remember, or `None` where there is no monitor.
fn node() -> Option<Apart> {
    static HOME: OnceLock<PathBuf> = OnceLock::new();
    const SLEEPY: &str = "isolation = \"instance\"\npersist = true\n[limits]\nkeep_alive = \"10m\"";
    let functions = || {
        [
            lasting("lasting", KEYS),
            lasting("single", "isolation = \"request\""),
            lasting("sleepy", SLEEPY),
        ]
    };
    Apart::of(|| HOME.get_or_init(|| built_home("restart", &functions())).clone())
}

/// The same with a function at an address of its own, which one test at a time uses.
fn node_with_lines() -> Option<(MutexGuard<'static, ()>, Apart)> {
    static HOME: OnceLock<PathBuf> = OnceLock::new();
    static TURN: Mutex<()> = Mutex::new(());
    let turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    let keys = || {
        format!(
            "isolation = \"instance\"\nlisten = \"{}\"\n[entry]\nkind = \"tcp\"\n[limits]\n\
             concurrency = 32\nkeep_alive = \"10m\"",
            lines_address()
        )
    };
    let functions = || [lasting("lasting", KEYS), lasting("lines", keys().leak())];
    let home = || HOME.get_or_init(|| built_home("restart-lines", &functions())).clone();
    Some((turn, Apart::of(home)?))
}

/// Ends a daemon in order, and starts the next one.
fn restart(node: &Apart, daemon: &mut Background, name: &str) {
    assert_eq!(daemon.stop(), Some(0), "{}", daemon.log());
    *daemon = node.start_daemon(name);
}

fn count(gateway: SocketAddr, function: &str) -> u32 {
    let response = get(gateway, function, "/count");
    assert_eq!(response.status, 200, "{}", response.text());
    response.text().trim().parse().expect("a number")
}

/// How many instances there are.
fn instances(node: &Apart) -> usize {
    let all = request_local(&node.home().join("admin.sock"), "/instances").expect("an answer");
    all.json().as_array().expect("a list").len()
}

/// A client that sends lines.
struct Lines(BufReader<TcpStream>);

impl Lines {
    fn connect(address: SocketAddr) -> Self {
        let stream = TcpStream::connect(address).expect("a connection");
        stream.set_read_timeout(Some(Duration::from_secs(60))).expect("it can be set");
        Self(BufReader::new(stream))
    }

    /// A client of HTTP whose connection has another protocol after its first request.
    fn upgrade(gateway: SocketAddr, function: &str) -> Self {
        let mut lines = Self::connect(gateway);
        let head = format!(
            "GET / HTTP/1.1\r\nHost: {function}\r\nConnection: Upgrade\r\nUpgrade: lines\r\n\r\n"
        );
        lines.0.get_mut().write_all(head.as_bytes()).expect("it is sent");
        assert!(lines.read().starts_with("HTTP/1.1 101 "));
        while lines.read() != "\r\n" {}
        lines
    }

    fn read(&mut self) -> String {
        let mut line = String::new();
        self.0.read_line(&mut line).expect("a line");
        line
    }

    /// Says something, and hears its number.
    fn say(&mut self, text: &str) -> u32 {
        self.0.get_mut().write_all(format!("{text}\n").as_bytes()).expect("it is sent");
        let answer = self.read();
        let (number, rest) = answer.split_once(' ').unwrap_or_else(|| panic!("{answer:?}"));
        assert_eq!(rest.trim_end(), text);
        number.parse().expect("a number")
    }
}

#[test]
fn instances_and_their_connections_go_on_under_the_next_daemon() {
    let Some((_turn, node)) = node_with_lines() else { return };
    let mut monitor = node.start_monitor();
    let mut daemon = node.start_daemon("daemon-0.log");
    let gateway = node.gateway(&daemon);
    assert_eq!(count(gateway, "lasting"), 1);
    let mut raw = Lines::connect(lines_address());
    assert_eq!(raw.say("first"), 1);
    for number in 1..4 {
        let began = Instant::now();
        restart(&node, &mut daemon, &format!("daemon-{number}.log"));
        assert!(began.elapsed() < Duration::from_secs(20), "nothing waits for the drain time");
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
    wait_until("the single instance has ended", || instances(&node) == 1);
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
    let mut daemon = node.start_daemon("first.log");
    let gateway = node.gateway(&daemon);
    assert_eq!(count(gateway, "lasting"), 1);
    let routed = thread::spawn(move || get(gateway, "lasting", "/hold/2").status);
    // Nothing can follow it, so its connection is handed over.
    let whole = thread::spawn(move || {
        let mut client = thaw_e2e::Raw::connect(gateway);
        client.send("GET /hold/4 HTTP/1.1\r\nHost: single\r\nConnection: close\r\n\r\n");
        client.response().map(|response| response.status)
    });
    wait_until("both have an instance", || instances(&node) == 2);
    let began = Instant::now();
    restart(&node, &mut daemon, "second.log");
    assert_eq!(routed.join().expect("a client"), 200);
    assert!(began.elapsed() < Duration::from_secs(20));
    assert_eq!(whole.join().expect("a client"), Some(200), "{}", daemon.log());
    assert_eq!(count(gateway, "lasting"), 3);
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
    let mut monitor = node.start_monitor_with(&["--keep-for", "3s"]);
    let mut daemon = node.start_daemon("daemon-0.log");
    let is_over = Arc::new(AtomicBool::new(false));
    let client = {
        let is_over = is_over.clone();
        thread::spawn(move || {
            let mut last = 0;
            while !is_over.load(Ordering::SeqCst) {
                let number = Lines::connect(lines_address()).say("hello");
                assert!(number > last, "the same instance");
                last = number;
            }
            last
        })
    };
    for number in 1..4 {
        thread::sleep(Duration::from_millis(200));
        restart(&node, &mut daemon, &format!("daemon-{number}.log"));
        assert!(!daemon.log().contains("cannot listen"), "{}", daemon.log());
    }
    is_over.store(true, Ordering::SeqCst);
    assert!(client.join().expect("a client") > 3, "{}", daemon.log());
    // Nobody listens any more when no daemon has come, or all was to end.
    daemon.stop();
    wait_until("nobody listens", || TcpStream::connect(lines_address()).is_err());
    let mut daemon = node.start_daemon("last.log");
    daemon.signal(Signal::INT);
    assert_eq!(daemon.wait(), Some(0));
    TcpStream::connect(lines_address()).expect_err("it is closed at once");
    assert_eq!(monitor.stop(), Some(0));
}

#[test]
fn what_no_daemon_comes_for_ends_after_a_while() {
    let Some((_turn, node)) = node_with_lines() else { return };
    let monitor = node.start_monitor_with(&["--keep-for", "2s"]);
    let mut daemon = node.start_daemon("first.log");
    let gateway = node.gateway(&daemon);
    assert_eq!(count(gateway, "lasting"), 1);
    let mut raw = Lines::connect(lines_address());
    raw.say("hello");
    assert_eq!(daemon.stop(), Some(0));
    assert_eq!(raw.say("still here"), 2, "{}", monitor.log());
    wait_until("all sandboxes are gone", || descendants(monitor.pid()).is_empty());
    assert!(monitor.log().contains("no daemon has come within 2 s"), "{}", monitor.log());
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
