//! Hibernating in place, with the real kernel and a real program (`common/sleeper.c`).

mod common;

use std::io::Read;
use std::net::{TcpListener, TcpStream};
use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};

use common::sleeper::{Client, LONG, Running, SPEC, accept_from, reopened, swap_file};
use thaw_sandbox::{AwakeCause, Event, TRIM_FILES_MAX, Timers, WorkingSet};

#[test]
fn a_server_keeps_its_state_over_hibernations_and_is_woken_by_a_client() {
    let mut running = Running::start(1);
    let mut idle = running.connect();
    let mut expected = idle.ask("sum");
    assert_eq!(idle.ask("thread"), "1 3.0");
    let before = running.own_memory();
    assert!(before > 24 << 20, "{before}");
    // The end of a connection would wake it, too.
    let mut others = Vec::new();
    for round in 1..=3 {
        assert_eq!(idle.ask("count"), format!("{round} {round}"));
        running.hibernate();
        // A connection that it has open wakes it.
        assert_eq!(idle.ask("sum"), expected, "round {round}");
        let awake = running.awake();
        assert_eq!((awake.cause, awake.was_hibernated), (AwakeCause::Connection, true));
        assert_eq!(idle.ask("thread"), format!("{} {:.1}", round + 1, 1.5 * f64::from(2 << round)));
        // What it changes since is in the next file.
        assert_eq!(idle.ask("write"), "written");
        let changed = idle.ask("sum");
        assert_ne!(changed, expected);
        expected = changed;
        // And it takes new connections while it sleeps.
        running.hibernate();
        let mut other = running.connect();
        assert_eq!(other.ask("sum"), expected);
        assert_eq!(running.awake().cause, AwakeCause::Message);
        others.push(other);
    }
}

#[test]
fn a_hibernated_server_has_given_back_its_memory_and_a_woken_one_what_it_does_not_need() {
    let mut running = Running::start(1);
    let mut client = running.connect();
    client.ask("sum");
    let warm = running.own_memory();
    running.hibernate();
    let hibernated = running.own_memory();
    assert!(hibernated < 300 << 10 && hibernated < warm / 20, "{hibernated} of {warm}");
    assert_eq!(client.ask("count"), "1 1");
    running.awake();
    let woken = running.own_memory();
    assert!(woken < warm / 5, "{woken} of {warm}");
    // As little as the first time.
    running.hibernate();
    let again = running.own_memory();
    assert!(again < hibernated + (64 << 10), "{again}, {hibernated} before");
}

#[test]
fn several_virtual_cpus_rest_together() {
    let mut running = Running::start(4);
    let mut client = running.connect();
    let expected = client.ask("sum");
    for round in 1..=5 {
        for _ in 0..20 {
            client.ask("thread");
        }
        running.hibernate();
        assert_eq!(client.ask("sum"), expected, "round {round}");
        running.awake();
    }
}

#[test]
fn recorded_pages_come_back_at_once() {
    let mut running = Running::start(1);
    let mut client = running.connect();
    let expected = client.ask("sum");
    running.hibernate();
    assert_eq!(client.ask("write"), "written");
    running.awake();
    let swapped = running.hibernate();
    assert_eq!(swapped.populated, 0);
    client.ask("write");
    running.awake();
    let set = WorkingSet::recorder(&running.sandbox).unwrap().record_swap(&swapped).unwrap();
    let (_, written) = set.pages();
    assert!((768..2000).contains(&written), "{written}");
    let swapped = running.hibernate_with(SPEC, Some(&set));
    assert!(swapped.populated > 0);
    // They are there before anything runs.
    running.sandbox.wake().unwrap();
    let awake = running.awake();
    assert_eq!((awake.cause, awake.was_hibernated), (AwakeCause::Message, true));
    assert!(running.own_memory() > 768 * 4096);
    assert_ne!(client.ask("sum"), expected);
    assert_eq!(client.ask("count"), "1 1");
}

/// Pages that were written and are equal to the file's again go; those that differ stay.
#[test]
fn pages_that_are_equal_again_are_given_back() {
    let mut running = Running::start(1);
    let mut client = running.connect();
    let swap = swap_file();
    let image = reopened(&swap.write);
    let deflated = running.deflate(SPEC, swap, None).unwrap();
    running.sandbox.hibernate(deflated).unwrap();
    assert_eq!(running.next(), Event::Hibernated);
    // Of a long chain of images the nearest are looked at.
    let image = Arc::new(image);
    let files = vec![image; TRIM_FILES_MAX + 6];
    assert_eq!(client.ask("write"), "written");
    running.awake();
    let expected = client.ask("sum");
    let little = running.own_memory();
    assert_eq!(client.ask("touch"), "touched");
    assert!(running.own_memory() > little + (20 << 20));
    let unchanged = running.find_unchanged(&files);
    assert!((20 << 20..24 << 20).contains(&unchanged.bytes()), "{}", unchanged.bytes());
    running.sandbox.trim(&unchanged).unwrap();
    running.sandbox.wake().unwrap();
    assert_eq!(running.awake().cause, AwakeCause::Message);
    let trimmed = running.own_memory();
    assert!(trimmed < little + (1 << 20), "{trimmed}, {little} before");
    assert_eq!(client.ask("sum"), expected);
    // What was found in an earlier rest is not given back any more: the program has gone on.
    client.ask("touch");
    let unchanged = running.find_unchanged(&files);
    assert_eq!(client.ask("write"), "written");
    assert_eq!(running.awake().cause, AwakeCause::Connection);
    let changed = client.ask("sum");
    assert_ne!(changed, expected);
    running.sandbox.trim(&unchanged).unwrap();
    assert_eq!(client.ask("sum"), changed);
    assert!(running.own_memory() > little + (20 << 20));
    // Nor in another rest.
    running.find_unchanged(&files);
    running.sandbox.trim(&unchanged).unwrap();
    running.sandbox.wake().unwrap();
    running.awake();
    assert_eq!(client.ask("sum"), changed);
    running.hibernate();
    assert_eq!(client.ask("sum"), changed);
}

#[test]
fn a_timer_wakes_only_who_wants_it_and_time_goes_on() {
    let mut running = Running::start(1);
    let mut client = running.connect();
    let clock = |client: &mut Client| client.ask("clock").parse::<u64>().unwrap();
    assert_eq!(client.ask("fired"), "-1");
    let before = clock(&mut client);
    client.ask("timer");
    running.hibernate();
    std::thread::sleep(Duration::from_millis(6500));
    assert!(running.is_quiet());
    // It expires on waking; the program sees the time that has passed.
    assert!(clock(&mut client) >= before + 6500);
    assert_eq!(running.awake().cause, AwakeCause::Connection);
    assert!(client.ask("fired").parse::<u64>().unwrap() < 10_000);
    client.ask("timer");
    running.timers = Timers::Wake;
    running.hibernate();
    assert_eq!(running.awake().cause, AwakeCause::Timer);
    assert_ne!(client.ask("fired"), "-1");
}

#[test]
fn a_request_during_the_writing_is_answered_at_once() {
    let mut running = Running::start(1);
    let mut client = running.connect();
    let expected = client.ask("sum");
    let deflated = running.deflate(SPEC, swap_file(), None).unwrap();
    assert_eq!(client.ask("count"), "1 1");
    let awake = running.awake();
    assert_eq!((awake.cause, awake.was_hibernated), (AwakeCause::Connection, false));
    // The file is out of date: the sandbox does not take it.
    running.sandbox.hibernate(deflated).unwrap();
    assert_eq!(client.ask("count"), "2 2");
    assert_eq!(client.ask("sum"), expected);
    running.hibernate();
    assert_eq!(client.ask("count"), "3 3");
}

#[test]
fn a_full_disk_leaves_it_as_it_was() {
    let mut running = Running::start(1);
    let mut client = running.connect();
    let expected = client.ask("sum");
    running.deflate_without_room();
    assert!(!running.awake().was_hibernated);
    assert_eq!(client.ask("sum"), expected);

    running.deflate_over_the_limit();
    running.awake();
    assert_eq!(client.ask("sum"), expected);
}

/// Of the tests, which run beside others that look for servers at ports that are free by now.
#[test]
fn a_stranger_that_connects_first_is_not_taken_for_the_client() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let mut stranger = TcpStream::connect(address).unwrap();
    let client = TcpStream::connect(address).unwrap();
    let (mut socket, peer) = accept_from(&listener, &client);
    assert_eq!(peer, client.local_addr().unwrap());
    assert_eq!(stranger.read(&mut [0]).unwrap(), 0, "it is let go");
    let mut client = Client(client);
    client.send("it is me");
    let mut line = [0; 9];
    socket.read_exact(&mut line).unwrap();
    assert_eq!(&line, b"it is me\n");
}

/// Where there were zeros when it was hibernated, there is memory now that nobody has touched
/// since it came from the swap file.
#[test]
fn memory_that_was_moved_between_two_hibernations_is_kept() {
    let mut running = Running::start(1);
    let mut client = running.connect();
    let expected = client.ask("moved");
    running.hibernate();
    assert_eq!(client.ask("move"), "here");
    running.awake();
    running.hibernate();
    assert_eq!(client.ask("moved"), expected);
    running.awake();
}

/// It says that it is awake when it has answered, and when that was.
#[test]
fn it_says_when_it_has_answered() {
    let mut running = Running::start(1);
    let mut client = running.connect();
    client.ask("count");
    running.hibernate();
    client.ask("count");
    let awake = running.awake();
    assert!(awake.answered_ns.is_some_and(|at| at >= awake.ready_ns), "{awake:?}");
    running.hibernate();
    running.sandbox.wake().unwrap();
    let awake = running.awake();
    assert_eq!((awake.answered_ns, awake.was_hibernated), (None, true));
}

#[test]
fn a_truncated_swap_file_ends_it_with_a_reason() {
    for len in [0, 4096, 1 << 20] {
        let mut running = Running::start(1);
        let mut client = running.connect();
        client.ask("sum");
        let swap = swap_file();
        let own = swap.write.try_clone().unwrap();
        let deflated = running.deflate(SPEC, swap, None).unwrap();
        running.sandbox.hibernate(deflated).unwrap();
        assert_eq!(running.next(), Event::Hibernated);
        own.set_len(len).unwrap();
        running.sandbox.wake().unwrap();
        let event = running.next();
        let Event::Failed(reason) = event else { panic!("{event:?}") };
        assert!(reason.contains("its swap file cannot be read (EIO)"), "{reason}");
        assert_eq!(running.next(), Event::Hangup);
    }
}

#[test]
fn it_can_be_killed_while_it_is_hibernated() {
    let mut running = Running::start(2);
    let mut client = running.connect();
    client.ask("thread");
    running.hibernate();
    assert!(running.is_running());
    running.sandbox.kill().unwrap();
    assert_eq!(running.next(), Event::Hangup);
    let ended = Instant::now();
    running.sandbox.wait();
    assert!(ended.elapsed() < LONG);
    let mut answer = [0];
    assert_eq!(client.0.read(&mut answer).unwrap_or(0), 0);
}

#[test]
fn a_doorbell_does_not_wake_it() {
    let mut running = Running::start(2);
    let mut client = running.connect();
    client.ask("thread");
    running.hibernate();
    for _ in 0..50 {
        // As the daemon does when a message seems to lie unread.
        Command::new("kill").args(["-USR1", &running.sandbox.pid().to_string()]).status().unwrap();
    }
    assert!(running.is_quiet());
    assert_eq!(client.ask("count"), "1 1");
    assert_eq!(running.awake().cause, AwakeCause::Connection);
}
