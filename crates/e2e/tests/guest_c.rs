//! The C programs of `tests/guest/c` print the same on the host and in a sandbox.

use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
use thaw_e2e::{Linking, compare_c, programs};

/// Makes, for every program, a test of each way to link it, and one in which
/// every system call takes the trap.
macro_rules! same {
    ($($name:ident),* $(,)?) => {
        const LISTED: &[&str] = &[$(stringify!($name)),*];
        mod linked_statically {
            use super::*;
            $(#[test] fn $name() { compare_c(stringify!($name), Linking::Static, true, &[]); })*
        }
        mod linked_dynamically {
            use super::*;
            $(#[test] fn $name() { compare_c(stringify!($name), Linking::Dynamic, true, &[]); })*
        }
        mod without_patching {
            use super::*;
            $(#[test] fn $name() { compare_c(stringify!($name), Linking::Static, false, &[]); })*
        }
    };
}

same! {
    aio, async_io, clocks, comparisons, credentials, descriptors, doors, echo, edges, epolls, events, exit_signals, file_at, file_attrs, file_capabilities, file_cwd,
    file_dirs, file_io, file_locks, file_lower, file_many, file_names, file_open, file_seals, file_space,
    groups, file_limits, file_waiting, file_watch, file_xattr, first_fork, flags, fork_beside_threads, forks, futexes, handed_on, hello, interruptions, jobs, late_failures, mem_file, mem_lock, mem_map,
    mem_move, mem_protect, memory_policy, mounts, mqueues, netlinks, parallel, pid_namespaces, pipes, polls, posix_timers, process_attributes,
    process_info, procfs, ptrace, ptys, resource_limits, rights_chain, sessions_tty, shared_ports, signal_actions, signal_context, signal_faults,
    scheduling, seccomp, segments, signal_restart, signal_threads, sites, socket_diagnosis, socket_tables, sockets_datagram, sockets_inet, sockets_local,
    sockets_messages,
    sockets_urgent, splices, start, sysv_memory, sysv_messages, sysv_semaphores, thread_ends,
    threads, timers, unshares, waits,
}

/// Ways to end; each must look the same from outside.
macro_rules! endings {
    ($($name:ident: [$($argument:literal),*];)*) => {
        mod ending {
            use super::*;
            $(#[test] fn $name() {
                compare_c("leave", Linking::Static, true, &[$($argument),*]);
            })*
        }
    };
}

endings! {
    with_zero: ["code", "0"];
    with_a_code: ["code", "42"];
    with_the_largest_code: ["code", "255"];
    with_a_code_that_wraps: ["code", "-1"];
    by_exit_group: ["group", "3"];
    by_exit_of_the_only_thread: ["thread", "4"];
    by_sigterm: ["signal", "15"];
    by_sigkill: ["signal", "9"];
    by_sigusr1: ["signal", "10"];
    by_sighup: ["signal", "1"];
    by_an_ignored_signal_not: ["signal", "17"];
    by_abort: ["abort"];
    by_a_bad_address: ["segv"];
    by_a_division: ["fpe"];
    by_an_illegal_instruction: ["ill"];
    by_a_breakpoint: ["trap"];
    by_a_broken_pipe: ["pipe"];
    by_a_file_that_ends: ["bus"];
}

/// With fewer processors than it has threads that compute, a sandbox counts what it has of them. What the
/// calling thread starts runs where that runs.
#[test]
fn cpu_time_is_that_of_the_host() {
    let mut one = CpuSet::new();
    let may_use = sched_getaffinity(None).unwrap();
    one.set((0..CpuSet::MAX_CPU).find(|&cpu| may_use.is_set(cpu)).unwrap());
    sched_setaffinity(None, &one).unwrap();
    compare_c("cpu_time", Linking::Static, true, &[]);
}

#[test]
fn a_static_pie_starts() {
    compare_c("start", Linking::StaticPie, true, &["one", "two words", ""]);
}

#[test]
fn arguments_arrive() {
    let long = "x".repeat(100_000);
    compare_c("start", Linking::Static, true, &["", "a b", "ü\n\t", &long]);
}

/// Some machines keep user namespaces from users, or take all rights in them away.
#[test]
fn namespaces_are_those_of_linux() {
    let script = "mount -t tmpfs none /tmp && ip link set lo up";
    let tried = std::process::Command::new("unshare").args(["-Urmn", "sh", "-c", script]).output();
    if !tried.is_ok_and(|output| output.status.success()) {
        eprintln!("left out: this machine gives no rights in user namespaces");
        return;
    }
    compare_c("namespaces", Linking::Static, true, &[]);
    compare_c("namespaces", Linking::Dynamic, false, &[]);
}

#[test]
fn no_program_is_forgotten() {
    let mut listed: Vec<&str> = LISTED.to_vec();
    listed.extend(["cpu_time", "leave", "namespaces"]);
    listed.sort_unstable();
    assert_eq!(programs("c", "c"), listed);
}
