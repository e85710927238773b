//! Hibernating sandboxes of several processes, with the real kernel and a real program
//! (`common/sleeper.c`).

mod common;

use std::time::{Duration, Instant};

use common::sleeper::{Client, LONG, Running, SPEC, swap_file};
use thaw_sandbox::{AwakeCause, Event};

/// What all processes are asked for: checksums of their memory.
const ALL: [&str; 3] = ["sum", "1 sum", "2 sum"];

/// A program with two workers, whose memory is not all the same.
fn family(cpus: u32) -> (Running, Client) {
    let mut running = Running::start(cpus);
    let mut client = running.connect();
    assert_eq!(running.serve(&mut client, "workers"), "hired");
    client.ask("share");
    client.ask("1 write");
    (running, client)
}

/// Longer than a process may take to give up its memory.
const PATIENCE: Duration = Duration::from_secs(30);

fn signal(pid: u32, signal: i32) {
    let status = std::process::Command::new("kill")
        .args([format!("-{signal}"), pid.to_string()])
        .status()
        .unwrap();
    assert!(status.success());
}

/// Nobody tells which process of several would give back what the first one has.
#[test]
fn several_processes_do_not_rest_to_be_trimmed() {
    let (mut running, mut client) = family(1);
    running.rests += 1;
    running.sandbox.request_rest_to_trim(running.rests).unwrap();
    let awake = running.awake();
    assert_eq!((awake.cause, awake.was_hibernated), (AwakeCause::Unanswered, false));
    assert_eq!(client.ask("count"), "1 1");
    running.hibernate();
    assert_eq!(client.ask("count"), "2 2");
}

#[test]
fn who_has_had_a_child_hibernates_too() {
    let mut running = Running::start(1);
    let mut client = running.connect();
    assert_eq!(running.serve(&mut client, "fork"), "forked");
    let sums = client.ask("sum");
    for round in 1..=3 {
        let warm = running.own_memory();
        running.hibernate();
        assert!(running.own_memory() < 600 << 10, "{} of {warm}", running.own_memory());
        assert_eq!(client.ask("count"), format!("{round} {round}"));
        assert!(running.awake().was_hibernated);
        assert_eq!(client.ask("sum"), sums);
    }
}

/// Each process has its own memory again, and they share what they did.
#[test]
fn several_processes_hibernate_together() {
    for cpus in [1, 2] {
        let mut running = Running::start(cpus);
        let mut client = running.connect();
        assert_eq!(running.serve(&mut client, "workers"), "hired");
        let all = ["sum", "1 sum", "2 sum"];
        client.ask("share");
        client.ask("1 write");
        let sums = all.map(|command| client.ask(command));
        let (warm, _) = running.family_memory();
        for round in 1..=4 {
            running.hibernate();
            let (left, processes) = running.family_memory();
            assert_eq!(processes, 3);
            assert!(left * 100 < warm * 7, "{left} of {warm}");
            assert_eq!(client.ask("1 count"), format!("{round} {}", 100 + round));
            assert!(running.awake().was_hibernated);
            if round % 2 == 0 {
                // In the others nobody has looked at anything since.
                running.hibernate();
                assert_eq!(
                    client.ask("thread"),
                    format!("{} {:.1}", round / 2, 1.5 * f64::from(2 << (round / 2 - 1)))
                );
                assert!(running.awake().was_hibernated);
            }
            assert_eq!(all.map(|command| client.ask(command)), sums);
        }
        assert_eq!(client.ask("2 share"), "shared");
        let after = all.map(|command| client.ask(command));
        let part = |sums: &str, number: usize| sums.split(' ').nth(number).map(str::to_owned);
        for (before, after) in sums.iter().zip(&after) {
            // The heap is each one's own; shared memory and the file are not.
            assert_eq!(part(before, 0), part(after, 0));
            assert_ne!(part(before, 1), part(after, 1));
            assert_ne!(part(before, 3), part(after, 3));
            assert_eq!(part(after, 1), part(&client.ask("sum"), 1));
        }
        // One more, and one less.
        assert_eq!(client.ask("1 write"), "written");
        assert_eq!(running.serve(&mut client, "fork"), "forked");
        assert_eq!(client.ask("2 end"), "none");
        let sums = ["sum", "1 sum"].map(|command| client.ask(command));
        running.hibernate();
        assert_eq!(["sum", "1 sum"].map(|command| client.ask(command)), sums);
    }
}

#[test]
fn the_end_of_any_process_ends_the_sandbox_at_every_step() {
    for number in 0..3 {
        for step in 0..4 {
            let (mut running, mut client) = family(1);
            let pid = running.host_processes()[number];
            match step {
                // While it rests, and before it hears that it may give up its memory.
                0 => {
                    let deflated = running.deflate(SPEC, swap_file(), None).unwrap();
                    signal(pid, 9);
                    // It may have ended already.
                    let _ = running.sandbox.hibernate(deflated);
                }
                // While it gives that up.
                1 => {
                    let deflated = running.deflate(SPEC, swap_file(), None).unwrap();
                    running.sandbox.hibernate(deflated).unwrap();
                    signal(pid, 9);
                }
                _ => {
                    running.hibernate();
                    if step == 3 {
                        client.send("1 sum");
                    }
                    signal(pid, 9);
                }
            }
            let killed = Instant::now();
            while running.is_running() {
                assert!(killed.elapsed() < LONG, "process {number}, step {step}");
                let _ = running.sandbox.wait_event(Some(Duration::from_millis(10)));
            }
        }
    }
}

/// One whose kernel somebody has taken over, or that the host has stopped.
#[test]
fn a_process_that_does_not_answer_keeps_the_sandbox_awake_and_unharmed() {
    let (mut running, mut client) = family(1);
    let sums = ALL.map(|command| client.ask(command));
    let mut unanswered = 0;
    // Which one asks the others is a matter of chance, so all of them may be missed at first.
    for stopped in (0..3).cycle().take(12) {
        if stopped == 0 && unanswered > 0 {
            break;
        }
        let pid = running.host_processes()[stopped];
        let deflated = running.deflate(SPEC, swap_file(), None).unwrap();
        signal(pid, 19);
        running.sandbox.hibernate(deflated).unwrap();
        let Some(event) = running.sandbox.wait_event(Some(PATIENCE)).unwrap() else {
            // It is the one that asks the others, and goes on with that.
            signal(pid, 18);
            assert_eq!(running.next(), Event::Hibernated);
            assert_eq!(ALL.map(|command| client.ask(command)), sums);
            running.awake();
            continue;
        };
        let Event::Awake(awake) = event else { panic!("{event:?}") };
        assert_eq!((awake.cause, awake.was_hibernated), (AwakeCause::Unanswered, false));
        unanswered += 1;
        // Others have given up their memory, and take it back. If this one was stopped while it held
        // the kernel lock, they wait for it (docs/roadmap.md), and answer when it goes on.
        if stopped > 0 {
            let other = 3 - stopped;
            client.send(ALL[other]);
            let answer = client.receive();
            signal(pid, 18);
            let answer = answer.or_else(|| client.receive());
            assert_eq!(answer.as_deref(), Some(sums[other].as_str()));
        }
        signal(pid, 18);
        assert_eq!(ALL.map(|command| client.ask(command)), sums);
        running.hibernate();
        assert_eq!(ALL.map(|command| client.ask(command)), sums);
        running.awake();
    }
    assert!(unanswered > 0);
    assert_eq!(ALL.map(|command| client.ask(command)), sums);
}

#[test]
fn a_full_disk_leaves_several_processes_as_they_were() {
    let (mut running, mut client) = family(2);
    let sums = ALL.map(|command| client.ask(command));
    for round in 0..3 {
        running.deflate_without_room();
        assert!(!running.awake().was_hibernated);
        running.deflate_over_the_limit();
        running.awake();
        assert_eq!(ALL.map(|command| client.ask(command)), sums);
        // The next time most of it has not come back since.
        running.hibernate();
        assert_eq!(client.ask("1 count"), format!("{} {}", round + 1, 101 + round));
        running.awake();
    }
}

#[test]
fn a_request_to_any_process_while_memory_is_written_is_answered_at_once() {
    let (mut running, mut client) = family(1);
    let sums = ALL.map(|command| client.ask(command));
    for round in 1..4 {
        let deflated = running.deflate(SPEC, swap_file(), None).unwrap();
        assert_eq!(client.ask("2 count"), format!("{round} {}", 200 + round));
        let awake = running.awake();
        assert_eq!((awake.cause, awake.was_hibernated), (AwakeCause::Connection, false));
        running.sandbox.hibernate(deflated).unwrap();
        assert_eq!(ALL.map(|command| client.ask(command)), sums);
        running.hibernate();
        client.send("2 sum");
        assert!(running.awake().was_hibernated);
        assert_eq!(client.receive().as_ref(), Some(&sums[2]));
    }
}

#[test]
fn a_truncated_swap_file_ends_all_processes() {
    for is_awake in [false, true] {
        let (mut running, mut client) = family(1);
        let swap = swap_file();
        let own = swap.write.try_clone().unwrap();
        let deflated = running.deflate(SPEC, swap, None).unwrap();
        running.sandbox.hibernate(deflated).unwrap();
        assert_eq!(running.next(), Event::Hibernated);
        if is_awake {
            // The workers still have all of their memory there.
            assert_eq!(client.ask("count"), "1 1");
            running.awake();
        }
        own.set_len(4096).unwrap();
        client.send("1 sum");
        let cut = Instant::now();
        while running.is_running() {
            assert!(cut.elapsed() < LONG, "it goes on with memory that is gone");
            let _ = running.sandbox.wait_event(Some(Duration::from_millis(10)));
        }
    }
}

#[test]
fn a_hibernation_follows_another_although_nobody_has_looked_at_the_memory() {
    let (mut running, mut client) = family(2);
    let sums = ALL.map(|command| client.ask(command));
    for _ in 0..3 {
        running.hibernate();
        running.sandbox.wake().unwrap();
        assert!(running.awake().was_hibernated);
    }
    assert_eq!(ALL.map(|command| client.ask(command)), sums);
}
