//! The process itself: this test binary becomes it. No test asks a server: what getaddrinfo(3)
//! takes for an address needs none.
use std::fs;
use std::io;
use std::net::IpAddr;
use std::os::fd::{AsFd, OwnedFd};
use std::process::Child;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};

use super::handle::{LookUpError, Resolver, Running};
use super::launch::spawn;
use super::protocol::{Answer, Found, REQUEST_WORKER, Report, receive, send};
use crate::message::control_pair;
use crate::zygote::receive as receive_with_descriptors;

const LONG: Duration = Duration::from_secs(20);

fn found(ip: &str) -> Found {
    Found::Addresses(vec![ip.parse::<IpAddr>().unwrap()])
}

fn status(pid: u32, field: &str) -> String {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix(field)?.strip_prefix(':'));
    line.unwrap().trim().to_owned()
}

fn signal(running: &Arc<Running>, signal: Signal) {
    kill_process(Pid::from_raw(running.pid().unwrap() as i32).unwrap(), signal).unwrap();
}

#[test]
fn names_are_looked_up() {
    let resolver = Resolver::new(LONG, spawn);
    assert_eq!(resolver.look_up("192.0.2.7", LONG).unwrap(), found("192.0.2.7"));
    assert_eq!(resolver.look_up("::ffff:192.0.2.7", LONG).unwrap(), found("192.0.2.7"));
    assert_eq!(resolver.look_up("2001:db8::7", LONG).unwrap(), found("2001:db8::7"));
    assert_eq!(resolver.look_up("not a name", LONG).unwrap(), Found::NoSuchName);
    let long = "x".repeat(300);
    assert!(matches!(resolver.look_up(&long, LONG), Err(LookUpError::TooLong)));
}

#[test]
fn one_process_serves_all_until_it_is_old() {
    let resolver = Resolver::new(LONG, spawn);
    let first = resolver.running().unwrap();
    resolver.look_up("192.0.2.7", LONG).unwrap();
    assert!(Arc::ptr_eq(&first, &resolver.running().unwrap()));
    let resolver = Resolver::new(Duration::ZERO, spawn);
    let first = resolver.running().unwrap();
    let second = resolver.running().unwrap();
    assert_ne!(first.pid(), second.pid());
    // The old one serves those who have it.
    assert_eq!(status(first.pid().unwrap(), "Name"), "thaw-resolver");
    let pid = first.pid().unwrap();
    drop(first);
    assert!(!fs::exists(format!("/proc/{pid}")).unwrap());
}

/// The network is all it has.
#[test]
fn it_has_no_rights_and_sees_no_file_but_copies() {
    let resolver = Resolver::new(LONG, spawn);
    let running = resolver.running().unwrap();
    let pid = running.pid().unwrap();
    for field in ["CapInh", "CapPrm", "CapEff", "CapAmb"] {
        assert_eq!(status(pid, field), "0000000000000000", "{field}");
    }
    assert_eq!((status(pid, "NoNewPrivs"), status(pid, "Seccomp")), ("1".into(), "2".into()));
    assert_eq!(status(pid, "Threads"), "1");
    if !rustix::process::geteuid().is_root() {
        // Another may not look further.
        return;
    }
    assert!(status(pid, "Uid").split_whitespace().all(|uid| uid == "1999998"));
    assert_eq!(status(pid, "CapBnd"), "0000000000000000");
    let root = format!("/proc/{pid}/root");
    let names = |path: String| -> Vec<String> {
        let all = fs::read_dir(path).unwrap();
        all.map(|entry| entry.unwrap().file_name().to_string_lossy().into_owned()).collect()
    };
    for name in names(root.clone()) {
        assert!(["etc", "run"].contains(&&name[..]), "{name}");
    }
    let copied = ["resolv.conf", "hosts", "nsswitch.conf", "host.conf", "gai.conf"];
    for name in names(format!("{root}/etc")) {
        assert!(copied.contains(&&name[..]), "{name}");
    }
    let mounts = fs::read_to_string(format!("/proc/{pid}/mountinfo")).unwrap();
    for line in mounts.lines() {
        let point = line.split(' ').nth(4).unwrap();
        assert!(["/", "/run/systemd/resolve"].contains(&point), "{line}");
    }
    assert!(fs::write(format!("{root}/etc/hosts"), "").is_err());
}

#[test]
fn one_that_was_killed_is_started_again() {
    let resolver = Resolver::new(LONG, spawn);
    let first = resolver.running().unwrap();
    signal(&first, Signal::KILL);
    assert_eq!(resolver.look_up("192.0.2.7", LONG).unwrap(), found("192.0.2.7"));
    assert_ne!(resolver.running().unwrap().pid(), first.pid());
}

/// Between the request and the answer.
#[test]
fn one_that_is_killed_while_it_looks_up_a_name_is_asked_again() {
    let resolver: &'static Resolver = Box::leak(Box::new(Resolver::new(LONG, spawn)));
    let first = resolver.running().unwrap();
    signal(&first, Signal::STOP);
    let asking = std::thread::spawn(|| resolver.look_up("192.0.2.7", LONG).unwrap());
    // The request is in its socket, or will be.
    std::thread::sleep(Duration::from_millis(50));
    signal(&first, Signal::KILL);
    assert_eq!(asking.join().unwrap(), found("192.0.2.7"));
}

#[test]
fn one_that_hangs_is_waited_for_no_longer_than_wanted() {
    let resolver = Resolver::new(LONG, spawn);
    let running = resolver.running().unwrap();
    signal(&running, Signal::STOP);
    let late = resolver.look_up("192.0.2.7", Duration::from_millis(50));
    assert!(matches!(late, Err(LookUpError::Late)), "{late:?}");
    // Nor is anybody who fills its socket.
    let filled = (0..10_000).find_map(|_| {
        let result = resolver.look_up("192.0.2.7", Duration::ZERO);
        (!matches!(result, Err(LookUpError::Late))).then_some(result)
    });
    assert!(filled.is_none(), "{filled:?}");
    signal(&running, Signal::CONT);
}

/// A process that answers `answer` to every question, in a thread of this one.
fn liar(socket: OwnedFd, answer: impl Fn(&OwnedFd) + Send + 'static) {
    std::thread::spawn(move || {
        send(&socket, &Report::serving(), &[]).unwrap();
        loop {
            let mut descriptors = Vec::new();
            match receive_with_descriptors::<u32>(&socket, &mut descriptors) {
                Ok(Some(REQUEST_WORKER)) => answer(&descriptors[0]),
                _ => return,
            }
        }
    });
}

fn lies(socket: OwnedFd) -> io::Result<Option<Child>> {
    liar(socket, |worker| {
        let question = receive::<super::protocol::Question>(worker).unwrap();
        let super::protocol::Received::Packet(question) = question else { panic!() };
        let true_answer = Answer::new(&found("192.0.2.7"));
        let bytes = bytemuck::bytes_of(&true_answer);
        let packet = match question.name().unwrap() {
            "short" => bytes[..bytes.len() - 1].to_vec(),
            "long" => [bytes, &[0]].concat(),
            "outcome" => [&[9, 0, 0, 0], &bytes[4..]].concat(),
            "count" => [&bytes[..4], &[65, 0, 0, 0], &bytes[8..]].concat(),
            "descriptor" => return send(worker, &true_answer, &[io::stdin().as_fd()]).unwrap(),
            "nothing" => return,
            _ => bytes.to_vec(),
        };
        let parts = [io::IoSlice::new(&packet)];
        crate::message::send(worker, &parts, &[]).unwrap();
    });
    Ok(None)
}

#[test]
fn lies_of_a_worker_are_found_out() {
    let resolver = Resolver::new(LONG, lies);
    for name in ["short", "long", "outcome", "count", "descriptor"] {
        let result = resolver.look_up(name, LONG);
        assert!(matches!(result, Err(LookUpError::Nonsense)), "{name}: {result:?}");
    }
    let crashed = resolver.look_up("nothing", LONG);
    assert!(matches!(crashed, Err(LookUpError::Crashed)), "{crashed:?}");
    assert_eq!(resolver.look_up("truth", LONG).unwrap(), found("192.0.2.7"));
}

#[test]
fn a_failed_start_is_told_and_not_repeated_at_once() {
    fn fails(socket: OwnedFd) -> io::Result<Option<Child>> {
        let error = io::Error::from_raw_os_error(libc::EPERM);
        send(&socket, &Report::failed("copy files", &error), &[])?;
        Ok(None)
    }
    fn says_nothing(_socket: OwnedFd) -> io::Result<Option<Child>> {
        Ok(None)
    }
    let resolver = Resolver::new(LONG, fails);
    let error = resolver.look_up("192.0.2.7", LONG).unwrap_err().to_string();
    assert!(error.contains("cannot copy files: Operation not permitted"), "{error}");
    let then = Instant::now();
    for _ in 0..100 {
        assert_eq!(resolver.look_up("192.0.2.7", LONG).unwrap_err().to_string(), error);
    }
    assert!(resolver.failed_since().unwrap() <= then);
    let silent = Resolver::new(LONG, says_nothing).look_up("192.0.2.7", LONG);
    assert!(matches!(silent, Err(LookUpError::Start { .. })), "{silent:?}");
}

/// The process itself refuses what no caller sends, and ends.
#[test]
fn nonsense_ends_it() {
    for (request, attached) in [(7_u32, 1), (REQUEST_WORKER, 0), (REQUEST_WORKER, 2)] {
        let (own, remote) = control_pair().unwrap();
        let mut child = spawn(remote).unwrap().unwrap();
        assert!(matches!(receive::<Report>(&own).unwrap(), super::protocol::Received::Packet(_)));
        let null = fs::File::open("/dev/null").unwrap();
        send(&own, &request, &vec![null.as_fd(); attached]).unwrap();
        assert_eq!(child.wait().unwrap().code(), Some(1), "{request} with {attached}");
    }
}

/// Each is a process, and none is left.
#[test]
fn workers_end_with_their_answers() {
    let resolver = Resolver::new(LONG, spawn);
    for _ in 0..600 {
        resolver.look_up("192.0.2.7", LONG).unwrap();
    }
    let pid = resolver.running().unwrap().pid().unwrap();
    let children = || fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).unwrap();
    let deadline = Instant::now() + LONG;
    while !children().is_empty() {
        assert!(Instant::now() < deadline, "{}", children());
        std::thread::sleep(Duration::from_millis(5));
    }
}
