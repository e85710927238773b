//! A pool whose zygote parents are killed while they start. It is a program of its own,
//! since it strikes any child that it has.

mod common;

use common::config;
use rustix::process::{Pid, Signal, kill_process};
use std::collections::BTreeSet;
use std::fs;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};
use thaw_sandbox::{PoolConfig, ZygotePool};

/// Parents that are killed one after the other until one is left alone: fewer than a pool
/// tries.
const STRUCK: usize = 2;

fn kill(pid: u32) {
    if let Some(pid) = Pid::from_raw(pid as i32) {
        let _ = kill_process(pid, Signal::KILL);
    }
}

/// The children of all threads of this process.
fn children() -> BTreeSet<u32> {
    let threads = fs::read_dir("/proc/self/task").unwrap();
    let of = |thread: fs::DirEntry| fs::read_to_string(thread.path().join("children"));
    let lists: Vec<String> = threads.filter_map(|thread| of(thread.unwrap()).ok()).collect();
    let numbers = lists.iter().flat_map(|list| list.split_whitespace());
    numbers.map(|number| number.parse().unwrap()).collect()
}

/// Kills the next children that are not known, some time after they came; how many.
fn strike_newcomers(mut known: BTreeSet<u32>, after: Duration, is_over: &AtomicBool) -> usize {
    let mut struck = 0;
    while struck < STRUCK && !is_over.load(Ordering::Relaxed) {
        for pid in children() {
            if known.insert(pid) {
                std::thread::sleep(after);
                kill(pid);
                struck += 1;
            }
        }
    }
    struck
}

#[test]
fn a_pool_starts_another_parent_whenever_one_is_killed_while_it_starts() {
    let pool = ZygotePool::new(PoolConfig { size: 0, zygotes: config() }).unwrap();
    let (mut struck, mut round) = (0, 0);
    // On a busy machine, many begin too late to be struck.
    let until = Instant::now() + Duration::from_secs(120);
    while round < 40 || struck <= 40 && Instant::now() < until {
        let after = Duration::from_micros(100 * (round % 20));
        let (known, is_over) = (children(), AtomicBool::new(false));
        std::thread::scope(|scope| {
            let killer = scope.spawn(|| strike_newcomers(known, after, &is_over));
            kill(pool.parent().unwrap().pid());
            let taken = pool.take();
            is_over.store(true, Ordering::Relaxed);
            struck += killer.join().unwrap();
            // It may have been struck with its parent since.
            taken.unwrap_or_else(|error| panic!("round {round}: {error}"));
        });
        round += 1;
    }
    assert!(struck > 40, "{struck} parents were struck");
}
