//! `/proc/PID/{status,stat,limits,io}`.

use alloc::format;
use alloc::string::String;
use alloc::vec::Vec;
use core::fmt::Write;
use core::sync::atomic::Ordering::Relaxed;

use super::cpu::{cpu_list, cpu_mask};
use super::memory::Totals;
use super::process::thread_ids;
use crate::errno::Result;
use crate::state::kernel;
use crate::task::Credentials;
use crate::task::ids::Tid;
use crate::task::pid_namespace::PidNamespace;
use crate::task::process::{Life, RLIM_INFINITY};
use crate::task::sched_attributes::{Scheduling, present_cpus};
use crate::task::scheduler::RunState;
use crate::task::signal::{Action, set_of};
use crate::task::{Process, Thread, current_process};

/// Clock ticks in a second (`sysconf(_SC_CLK_TCK)`).
const TICKS_PER_SECOND: u64 = 100;

/// The name of a thread, without padding.
pub(super) fn unpadded(name: [u8; 16]) -> String {
    let len = name.iter().position(|&byte| byte == 0).unwrap_or(name.len());
    String::from_utf8_lossy(&name[..len]).into_owned()
}

/// `comm`.
pub(super) fn name_line(thread: &Thread) -> Vec<u8> {
    format!("{}\n", unpadded(thread.name.get())).into_bytes()
}

/// Whom `stat` and `status` are about: a thread, or a process that has ended.
pub(super) struct Subject<'a> {
    pub process: &'a Process,
    pub tid: Tid,
    pub name: String,
    pub state: (char, &'static str),
    pub scheduling: Scheduling,
    pub cpu_ns: u64,
    pub threads: usize,
    pub sets: SignalSets,
    /// The thread that traces it.
    pub tracer: Option<Tid>,
    /// Mode and number of its filters (seccomp(2)).
    pub seccomp: (u8, u32),
    /// Its memory; `None` if it has none any more.
    pub memory: Option<Totals>,
}

impl<'a> Subject<'a> {
    fn of(thread: &Thread, process: &'a Process) -> Self {
        let is_main = thread.tid() == process.pid.main_thread();
        Self {
            process,
            tid: thread.tid(),
            name: unpadded(thread.name.get()),
            state: state(thread, process),
            scheduling: thread.scheduling.get(),
            cpu_ns: if is_main { process.cpu_ns() } else { thread.cpu_ns() },
            threads: thread_ids(process.pid).len(),
            sets: SignalSets::of(thread, process),
            tracer: thread.tracee.tracing_thread(),
            seccomp: thread.seccomp.borrow_mut().shown(),
            memory: Some(Totals::of(process)),
        }
    }

    fn cpus(&self) -> u64 {
        self.scheduling.cpus(present_cpus())
    }
}

/// State as a letter and a word.
fn state(thread: &Thread, process: &Process) -> (char, &'static str) {
    if thread.tracee.has_stopped() {
        return ('t', "tracing stop");
    }
    if let Life::Stopped(_) = process.life.get() {
        return ('T', "stopped");
    }
    match thread.sched.borrow_mut().state {
        RunState::Runnable => ('R', "running"),
        RunState::Blocked => ('S', "sleeping"),
        RunState::Uninterruptible | RunState::Forking => ('D', "disk sleep"),
        RunState::Dead => ('X', "dead"),
    }
}

fn start_ticks(process: &Process) -> u64 {
    ticks(process.start_ns)
}

pub(super) fn ticks(ns: u64) -> u64 {
    ns / (1_000_000_000 / TICKS_PER_SECOND)
}

/// Signal sets as `status` shows them.
pub(super) struct SignalSets {
    pending: u64,
    shared_pending: u64,
    blocked: u64,
    ignored: u64,
    caught: u64,
    queued: usize,
}

impl SignalSets {
    fn of(thread: &Thread, process: &Process) -> Self {
        let own = thread.signals.borrow_mut();
        let mut sets = Self::of_process(process, own.mask);
        sets.pending = set_of(&own.pending);
        sets.queued += own.pending.len();
        sets
    }

    /// Those of a process without a thread of its own.
    pub(super) fn of_process(process: &Process, blocked: u64) -> Self {
        let shared = process.signals.borrow_mut();
        let mut sets = Self {
            pending: 0,
            shared_pending: set_of(&shared.pending),
            blocked,
            ignored: 0,
            caught: 0,
            queued: shared.pending.len(),
        };
        for (index, action) in shared.actions.iter().enumerate() {
            match action.handler {
                Action::DEFAULT => {}
                Action::IGNORE => sets.ignored |= 1 << index,
                _ => sets.caught |= 1 << index,
            }
        }
        sets
    }
}

/// `status`.
pub(super) fn status(
    thread: &Thread,
    process: &Process,
    namespace: &PidNamespace,
) -> Result<Vec<u8>> {
    Ok(status_of(&Subject::of(thread, process), namespace))
}

/// The text of `status`, with numbers of a namespace.
pub(super) fn status_of(subject: &Subject<'_>, namespace: &PidNamespace) -> Vec<u8> {
    let mut text = String::new();
    // Writing to a string cannot fail.
    let _ = write_status(&mut text, subject, namespace);
    text.into_bytes()
}

fn write_status(
    text: &mut String,
    subject: &Subject<'_>,
    namespace: &PidNamespace,
) -> core::fmt::Result {
    let (letter, word) = subject.state;
    let process = subject.process;
    let credentials = process.credentials.borrow_mut().clone();
    writeln!(text, "Name:\t{}", subject.name)?;
    if subject.memory.is_some() {
        writeln!(text, "Umask:\t{:04o}", process.fs().borrow_mut().umask)?;
    }
    writeln!(text, "State:\t{letter} ({word})")?;
    let (pid, tid) = (process.pid.number_in(namespace), subject.tid.number_in(namespace));
    writeln!(text, "Tgid:\t{pid}\nNgid:\t0\nPid:\t{tid}")?;
    let tracer = subject.tracer.map_or(0, |tid| tid.number_in(namespace));
    writeln!(text, "PPid:\t{}\nTracerPid:\t{tracer}", process.parent_number(namespace))?;
    let reader = current_process().credentials.borrow_mut().user_namespace.clone();
    let Credentials { uid, euid, suid, fsuid, gid, egid, sgid, fsgid, ref groups, .. } =
        credentials;
    let [uid, euid, suid, fsuid] = [uid, euid, suid, fsuid].map(|id| reader.shown_user(id));
    let [gid, egid, sgid, fsgid] = [gid, egid, sgid, fsgid].map(|id| reader.shown_group(id));
    writeln!(text, "Uid:\t{uid}\t{euid}\t{suid}\t{fsuid}")?;
    writeln!(text, "Gid:\t{gid}\t{egid}\t{sgid}\t{fsgid}")?;
    let slots = match subject.memory {
        Some(_) => process.files.borrow_mut().borrow_mut().capacity(),
        None => 0,
    };
    writeln!(text, "FDSize:\t{slots}")?;
    text.push_str("Groups:\t");
    for group in groups {
        write!(text, "{} ", reader.shown_group(*group))?;
    }
    if groups.is_empty() {
        text.push(' ');
    }
    text.push('\n');
    for (name, id) in [
        ("NStgid", process.pid.number()),
        ("NSpid", subject.tid.number()),
        ("NSpgid", process.process_group().number()),
        ("NSsid", process.session().number()),
    ] {
        write!(text, "{name}:")?;
        for number in namespace.numbers_down_to(&process.pid_namespace, id) {
            write!(text, "\t{number}")?;
        }
        text.push('\n');
    }
    if let Some(totals) = &subject.memory {
        write_memory(text, totals)?;
    }
    writeln!(text, "Threads:\t{}", subject.threads)?;
    write_signals(text, subject)?;
    write_capabilities(text, &credentials)?;
    let no_new_privileges = credentials.no_new_privileges as u8;
    let (mode, filters) = subject.seccomp;
    writeln!(text, "NoNewPrivs:\t{no_new_privileges}")?;
    writeln!(text, "Seccomp:\t{mode}\nSeccomp_filters:\t{filters}")?;
    writeln!(text, "Speculation_Store_Bypass:\tvulnerable")?;
    let cpus = subject.cpus();
    writeln!(text, "Cpus_allowed:\t{}\nCpus_allowed_list:\t{}", cpu_mask(cpus), cpu_list(cpus))?;
    writeln!(text, "Mems_allowed:\t00000001\nMems_allowed_list:\t0")?;
    writeln!(text, "voluntary_ctxt_switches:\t0\nnonvoluntary_ctxt_switches:\t0")
}

fn write_memory(text: &mut String, totals: &Totals) -> core::fmt::Result {
    for (name, bytes) in [
        ("VmPeak", totals.size),
        ("VmSize", totals.size),
        ("VmLck", totals.locked),
        ("VmPin", 0),
        ("VmHWM", totals.resident),
        ("VmRSS", totals.resident),
        ("RssAnon", totals.resident - totals.file),
        ("RssFile", totals.file),
        ("RssShmem", 0),
        ("VmData", totals.data),
        ("VmStk", totals.stack),
        ("VmExe", totals.code),
        ("VmLib", 0),
        ("VmPTE", totals.resident / 512),
        ("VmSwap", 0),
    ] {
        writeln!(text, "{name}:\t{:>8} kB", bytes / 1024)?;
    }
    writeln!(text, "HugetlbPages:\t{:>8} kB\nCoreDumping:\t0\nTHP_enabled:\t1", 0)
}

fn write_signals(text: &mut String, subject: &Subject<'_>) -> core::fmt::Result {
    let sets = &subject.sets;
    writeln!(text, "SigQ:\t{}/{}", sets.queued, subject.process.limits.borrow_mut()[11].current)?;
    for (name, set) in [
        ("SigPnd", sets.pending),
        ("ShdPnd", sets.shared_pending),
        ("SigBlk", sets.blocked),
        ("SigIgn", sets.ignored),
        ("SigCgt", sets.caught),
    ] {
        writeln!(text, "{name}:\t{set:016x}")?;
    }
    Ok(())
}

fn write_capabilities(text: &mut String, credentials: &Credentials) -> core::fmt::Result {
    for (name, set) in [
        ("CapInh", credentials.inheritable),
        ("CapPrm", credentials.permitted),
        ("CapEff", credentials.effective),
        ("CapBnd", credentials.bounding),
        ("CapAmb", credentials.ambient),
    ] {
        writeln!(text, "{name}:\t{:016x}", set.bits())?;
    }
    Ok(())
}

/// `stat`.
pub(super) fn stat(
    thread: &Thread,
    process: &Process,
    namespace: &PidNamespace,
) -> Result<Vec<u8>> {
    Ok(stat_of(&Subject::of(thread, process), namespace))
}

/// The text of `stat`: 52 fields in one line (proc_pid_stat(5)).
pub(super) fn stat_of(subject: &Subject<'_>, namespace: &PidNamespace) -> Vec<u8> {
    let Subject { process, sets, scheduling, memory, .. } = subject;
    let (size, resident) =
        memory.as_ref().map_or((0, 0), |totals| (totals.size, totals.resident / 4096));
    let start = start_ticks(process);
    let spent = ticks(subject.cpu_ns);
    let children = ticks(process.children_cpu_ns.load(Relaxed));
    let limit = match memory {
        Some(_) => process.limits.borrow_mut()[5].current,
        None => RLIM_INFINITY,
    };
    let terminals = &kernel().fs.terminals;
    let (terminal, foreground) = terminals.numbers_of(process, namespace);
    let head = format!(
        "{} ({}) {} {} {} {} {terminal} {foreground} 4194304 0 0 0 0 {spent} 0 {children} 0 {} {} {} 0 {start} {size} {resident} {limit}",
        subject.tid.number_in(namespace),
        subject.name,
        subject.state.0,
        process.parent_number(namespace),
        process.process_group().number_in(namespace),
        process.session().number_in(namespace),
        scheduling.shown_priority(),
        scheduling.nice,
        subject.threads,
    );
    // Addresses (26 to 30), signals (31 to 34), CPU, priority and policy (39 to
    // 41), what is always zero, and the exit code (52).
    let tail = format!(
        " {} 0 0 0 {} {} {} {} 0 0 0 17 {} {} {} 0 0 0 0 0 0 0 0 0 0 {}\n",
        if memory.is_some() { "1 1" } else { "0 0" },
        sets.pending & 0x7fff_ffff,
        sets.blocked & 0x7fff_ffff,
        sets.ignored & 0x7fff_ffff,
        sets.caught & 0x7fff_ffff,
        subject.cpus().trailing_zeros(),
        scheduling.priority,
        scheduling.policy as u32,
        exit_code(process),
    );
    (head + &tail).into_bytes()
}

/// How a process has ended, as wait(2) tells it; 0 before.
fn exit_code(process: &Process) -> u32 {
    match process.life.get() {
        Life::Zombie(status) => status.to_wait_status(),
        _ => 0,
    }
}

/// Names and units of the limits, by `RLIMIT_*`.
const LIMITS: [(&str, &str); 16] = [
    ("Max cpu time", "seconds"),
    ("Max file size", "bytes"),
    ("Max data size", "bytes"),
    ("Max stack size", "bytes"),
    ("Max core file size", "bytes"),
    ("Max resident set", "bytes"),
    ("Max processes", "processes"),
    ("Max open files", "files"),
    ("Max locked memory", "bytes"),
    ("Max address space", "bytes"),
    ("Max file locks", "locks"),
    ("Max pending signals", "signals"),
    ("Max msgqueue size", "bytes"),
    ("Max nice priority", ""),
    ("Max realtime priority", ""),
    ("Max realtime timeout", "us"),
];

/// `limits`.
pub(super) fn limits(process: &Process) -> Result<Vec<u8>> {
    let shown = |limit: u64| {
        if limit == RLIM_INFINITY { String::from("unlimited") } else { format!("{limit}") }
    };
    let mut text = String::from(
        "Limit                     Soft Limit           Hard Limit           Units     \n",
    );
    for ((name, unit), limit) in LIMITS.iter().zip(*process.limits.borrow_mut()) {
        let (soft, hard) = (shown(limit.current), shown(limit.maximum));
        text += &format!("{name:<25} {soft:<20} {hard:<20} {unit:<10}\n");
    }
    Ok(text.into_bytes())
}

/// `io`: nothing is counted, and the files say so with zeros.
pub(super) fn io(_: &Process) -> Result<Vec<u8>> {
    let names =
        ["rchar", "wchar", "syscr", "syscw", "read_bytes", "write_bytes", "cancelled_write_bytes"];
    Ok(names.iter().flat_map(|name| format!("{name}: 0\n").into_bytes()).collect())
}
