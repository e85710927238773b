//! One thread of the library that does what the host kernel does not do by itself: it
//! ends sandboxes that have used up their CPU time, and removes the control groups of
//! those that have ended, or leaves them to others.
//!
//! It sleeps as long as there is neither. A look at a sandbox is due when it could have
//! spent half of what is left, so looks become more frequent towards the end; the time
//! that is used beyond the limit stays within [`LOOK_MIN`] times its processors, plus
//! what the host takes to run this thread.

use std::collections::{HashMap, VecDeque};
use std::fs;
use std::io;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use rustix::process::{Signal, pidfd_send_signal};

use super::group::Account;
use super::processes::for_descendants;
use super::stock::{Reusable, Stock};
use super::{Controller, Limits};
use crate::zygote::{ExitCell, Process};

/// Shortest time between two looks at a sandbox.
const LOOK_MIN: Duration = Duration::from_millis(5);
/// Longest time between two looks, and so how late a new sandbox is first seen.
const LOOK_MAX: Duration = Duration::from_millis(100);
/// How long the thread goes on looking after the last sandbox has ended: to wake it
/// takes the next boot longer than to leave a note.
const LINGERING: Duration = Duration::from_secs(2);
/// First and last pause before a group that is not empty yet is tried again.
const REMOVAL_PAUSES: (Duration, Duration) = (Duration::from_millis(1), Duration::from_millis(500));
/// For so long a group may have somebody in it, or somebody who could come, before it is
/// removed instead of being left to others.
const VACATING_PATIENCE: Duration = Duration::from_secs(1);
/// After this long a group is left to the next start of Thaw.
const REMOVAL_PATIENCE: Duration = Duration::from_secs(60);

/// What the thread and the others share.
#[derive(Default)]
struct Shared {
    state: Mutex<State>,
    /// Something to do for the thread.
    wanted: Condvar,
    /// A removal has been settled.
    settled: Condvar,
}

#[derive(Default)]
struct State {
    is_running: bool,
    /// The thread will look by itself before long.
    is_looking: bool,
    new: Vec<Watch>,
    removals: VecDeque<Removal>,
    /// Removals that are not settled, those in the thread's hands included.
    unsettled: usize,
    /// Hierarchies that have not been dropped.
    hierarchies: usize,
}

/// Groups that are to be removed.
struct Removal {
    directories: Vec<PathBuf>,
    /// Groups for other sandboxes, as soon as they are vacant, and where those find them.
    reusable: Option<(Reusable, Arc<Stock>)>,
    /// What is still to be told of the group, and what it was at the last look.
    account: Option<Account>,
    used: Duration,
    since: Instant,
    pause: Duration,
    due: Instant,
}

/// A sandbox whose CPU time is limited.
pub(crate) struct Watch {
    usage: Usage,
    limit: Duration,
    /// Processors that it may use at a time.
    parallel: u32,
    pidfd: OwnedFd,
    exit: Arc<ExitCell>,
    limits: Weak<Limits>,
    due: Instant,
}

/// How the CPU time of a sandbox is found out.
pub(crate) enum Usage {
    /// Its control group counts it.
    Group,
    /// By `/proc`, as far as its processes are seen there: the CPU time of each, by the
    /// number of the process and when it started.
    Processes { first: u32, seen: HashMap<(u32, u64), Duration> },
}

static SHARED: Shared = Shared {
    state: Mutex::new(State {
        is_running: false,
        is_looking: false,
        new: Vec::new(),
        removals: VecDeque::new(),
        unsettled: 0,
        hierarchies: 0,
    }),
    wanted: Condvar::new(),
    settled: Condvar::new(),
};

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    /// Starts the thread if it does not run.
    fn ensure_running(&mut self) -> io::Result<()> {
        if !self.is_running {
            let thread = std::thread::Builder::new().name("thaw-limits".into());
            thread.spawn(|| supervise(&SHARED))?;
            self.is_running = true;
        }
        Ok(())
    }
}

/// Ends the sandbox with this process when it has used `limit` of CPU time.
///
/// # Errors
/// The thread, or a descriptor for it, cannot be made: the limit is not kept.
pub(crate) fn watch(process: &Process, limit: Duration) -> io::Result<()> {
    let usage = match process.limits.group().has(Controller::CpuAccounting) {
        true => Usage::Group,
        false => Usage::Processes { first: process.pid, seen: HashMap::new() },
    };
    let parallel = std::thread::available_parallelism().map_or(1, |count| count.get() as u32);
    let watch = Watch {
        usage,
        limit,
        parallel,
        pidfd: process.pidfd.try_clone()?,
        exit: process.exit.clone(),
        limits: Arc::downgrade(&process.limits),
        due: Instant::now() + pause(limit, parallel),
    };
    let mut state = SHARED.lock();
    state.ensure_running()?;
    // Who is about to look finds it in time.
    let in_time = state.is_looking && watch.due > Instant::now() + LOOK_MAX / 2;
    state.new.push(watch);
    drop(state);
    if !in_time {
        SHARED.wanted.notify_one();
    }
    Ok(())
}

/// Removes groups as soon as they are empty.
pub(super) fn remove(directories: Vec<PathBuf>) {
    if !directories.is_empty() {
        settle(Removal::new(directories, None, Instant::now()));
    }
}

/// Removes groups of a sandbox that has ended as soon as they are empty, leaves those to
/// others that these can have, and gives the last account of all.
pub(super) fn retire(
    directories: Vec<PathBuf>,
    reusable: Option<Reusable>,
    stock: &Arc<Stock>,
    account: Option<Account>,
) {
    if directories.is_empty() && reusable.is_none() {
        return;
    }
    let mut removal = Removal::new(directories, account, Instant::now());
    removal.reusable = reusable.map(|reusable| (reusable, stock.clone()));
    settle(removal);
}

fn settle(mut removal: Removal) {
    let mut state = SHARED.lock();
    if state.ensure_running().is_err() {
        drop(state);
        // As well as it can be done at once; the next start does the rest.
        removal.attempt(Instant::now());
        return;
    }
    state.unsettled += 1;
    state.removals.push_back(removal);
    drop(state);
    SHARED.wanted.notify_one();
}

pub(super) fn note_hierarchy() {
    SHARED.lock().hierarchies += 1;
}

pub(super) fn forget_hierarchy() {
    SHARED.lock().hierarchies -= 1;
    SHARED.settled.notify_all();
}

/// Waits until the control groups of all sandboxes of this process are removed, but not
/// for longer than `patience`: to be called when a program is done with sandboxes and
/// about to exit. Removed are those that nothing holds any more.
pub fn finish_removal(patience: Duration) {
    let deadline = Instant::now() + patience;
    let mut state = SHARED.lock();
    while state.hierarchies > 0 || state.unsettled > 0 {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return;
        }
        (state, _) =
            SHARED.settled.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner);
    }
}

/// How long a sandbox with so much CPU time left can be left alone.
fn pause(left: Duration, parallel: u32) -> Duration {
    (left / (2 * parallel.max(1))).clamp(LOOK_MIN, LOOK_MAX)
}

/// The thread.
fn supervise(shared: &Shared) {
    let mut watched: Vec<Watch> = Vec::new();
    let mut removals: Vec<Removal> = Vec::new();
    let mut looked = Instant::now();
    loop {
        let now = Instant::now();
        watched.retain_mut(|watch| watch.due > now || watch.look(now));
        let before = removals.len();
        removals.retain_mut(|removal| removal.due > now || removal.attempt(now));
        let settled = before - removals.len();

        let mut state = shared.lock();
        if settled > 0 {
            state.unsettled -= settled;
            shared.settled.notify_all();
        }
        watched.append(&mut state.new);
        removals.extend(state.removals.drain(..));
        if !watched.is_empty() {
            looked = now;
        }
        let lingers = looked.elapsed() < LINGERING;
        state.is_looking = lingers;
        let dues = watched.iter().map(|watch| watch.due).chain(removals.iter().map(|r| r.due));
        let next = dues.chain(lingers.then(|| now + LOOK_MAX)).min();
        match next.map(|next| next.saturating_duration_since(Instant::now())) {
            Some(wait) if wait.is_zero() => {}
            Some(wait) => drop(shared.wanted.wait_timeout(state, wait)),
            None => drop(shared.wanted.wait(state)),
        }
    }
}

impl Watch {
    /// Looks at the sandbox, and ends it if its time is up; whether there is something
    /// left to be watched.
    fn look(&mut self, now: Instant) -> bool {
        let Some(limits) = self.limits.upgrade() else { return false };
        if self.exit.get().is_some() {
            return false;
        }
        // A group that cannot be read is looked at again: it may be going away.
        let used = self.usage.read(&limits).unwrap_or_default();
        if used < self.limit {
            self.due = now + pause(self.limit - used, self.parallel);
            return true;
        }
        limits.note_cpu_time_spent();
        // Process 1 of its pid namespace: all others end with it. An error means that
        // it has ended already.
        let _ = pidfd_send_signal(&self.pidfd, Signal::KILL);
        false
    }
}

impl Usage {
    fn read(&mut self, limits: &Limits) -> io::Result<Duration> {
        match self {
            Self::Group => Ok(limits.group().cpu_time()?.unwrap_or_default()),
            Self::Processes { first, seen } => {
                see_processes(*first, seen);
                Ok(seen.values().sum())
            }
        }
    }
}

/// Notes the CPU time of a process and of its descendants. Those that end between two
/// looks keep the time that was last seen.
fn see_processes(first: u32, seen: &mut HashMap<(u32, u64), Duration>) {
    for_descendants(first, |pid| {
        if let Some((started, used)) =
            fs::read_to_string(format!("/proc/{pid}/stat")).ok().and_then(|stat| parse_stat(&stat))
        {
            seen.insert((pid, started), used);
        }
    });
}

/// When a process started, in ticks since boot, and its CPU time
/// (proc_pid_stat(5)).
fn parse_stat(stat: &str) -> Option<(u64, Duration)> {
    // The name in parentheses may contain anything; fields count from its end.
    let (_, fields) = stat.rsplit_once(')')?;
    let mut fields = fields.split_whitespace().map(|field| field.parse::<u64>().ok());
    let user = fields.nth(11)??;
    let system = fields.next()??;
    let started = fields.nth(6)??;
    // The unit of this file is fixed to 100 a second on x86-64.
    Some((started, Duration::from_millis((user + system) * 10)))
}

impl Removal {
    fn new(directories: Vec<PathBuf>, account: Option<Account>, now: Instant) -> Self {
        Self {
            directories,
            reusable: None,
            account,
            used: Duration::ZERO,
            since: now,
            pause: REMOVAL_PAUSES.0,
            due: now,
        }
    }

    /// Removes what is empty; whether something is left to be tried again.
    fn attempt(&mut self, now: Instant) -> bool {
        self.remove_empty();
        // Whoever is in one of the groups is in the others, too, and need not be looked for.
        if self.directories.is_empty() {
            self.leave_to_others(now);
        }
        self.due = now + self.pause;
        self.pause = (self.pause * 2).min(REMOVAL_PAUSES.1);
        let is_left = self.reusable.is_some() || !self.directories.is_empty();
        if is_left && now.duration_since(self.since) >= REMOVAL_PATIENCE {
            self.remove_reusable();
            return false;
        }
        is_left
    }

    fn remove_empty(&mut self) {
        // Processes that are about to end may still use some. Groups that others can have are
        // read when nobody is in them any more.
        let is_read_later =
            self.reusable.as_ref().is_some_and(|(reusable, _)| reusable.counts_cpu_time());
        if let Some(account) = self.account.as_ref().filter(|_| !is_read_later) {
            self.used = account.counter.read().unwrap_or(self.used);
        }
        self.directories.retain(|directory| match fs::remove_dir(directory) {
            Ok(()) => false,
            Err(error) => error.kind() != io::ErrorKind::NotFound,
        });
    }

    /// Puts groups that are vacant in the stock. Removes them where the host cannot tell, where
    /// there are enough, or where it takes too long.
    fn leave_to_others(&mut self, now: Instant) {
        let Some((mut reusable, stock)) = self.reusable.take() else { return };
        let is_in_time = now.duration_since(self.since) < VACATING_PATIENCE;
        let result = match stock.has_room() && is_in_time {
            true => reusable.is_vacant(),
            false => Err(io::ErrorKind::TimedOut.into()),
        };
        let left = match result {
            Ok(false) => return self.reusable = Some((reusable, stock)),
            Ok(true) => match reusable.close_account() {
                Ok(used) => {
                    self.used = used.unwrap_or(self.used);
                    stock.put(reusable)
                }
                Err(_) => Some(reusable),
            },
            Err(_) => Some(reusable),
        };
        self.reusable = left.map(|reusable| (reusable, stock));
        self.remove_reusable();
    }

    /// Removes the groups that others could have had.
    fn remove_reusable(&mut self) {
        if let Some((reusable, _)) = self.reusable.take() {
            self.directories.extend(reusable.into_directories());
            self.remove_empty();
        }
    }
}

impl Drop for Removal {
    fn drop(&mut self) {
        if let Some(account) = self.account.take() {
            account.meter.ended(self.used);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::Meter;
    use super::super::group::CpuCounter;
    use super::super::hierarchy::Version;
    use super::*;

    #[test]
    fn looks_come_closer_together_as_the_time_runs_out() {
        let ms = Duration::from_millis;
        assert_eq!(pause(ms(10_000), 2), LOOK_MAX);
        assert_eq!(pause(ms(100), 2), ms(25));
        assert_eq!(pause(ms(1), 64), LOOK_MIN);
        assert_eq!(pause(Duration::ZERO, 0), LOOK_MIN);
    }

    #[test]
    fn the_time_of_a_process_is_read_whatever_its_name() {
        let stat = "42 (a) R 7) S 1 42 42 0 -1 4194560 1 2 3 4 150 50 9 9 20 0 1 0 777 1 2 3";
        assert_eq!(parse_stat(stat), Some((777, Duration::from_secs(2))));
        assert_eq!(parse_stat("42 (x) S 1 2"), None);
    }

    #[test]
    fn this_process_and_its_children_are_seen() {
        let mut child = std::process::Command::new("sleep").arg("100").spawn().unwrap();
        let mut seen = HashMap::new();
        see_processes(std::process::id(), &mut seen);
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(seen.keys().any(|&(pid, _)| pid == child.id()), "{seen:?}");
    }

    /// A group whose counter is an ordinary file, so that its directory is never empty.
    #[test]
    fn the_last_account_is_what_was_used_at_the_last_look() {
        let tree = tempfile::tempdir().unwrap();
        let meter: Arc<Meter> = Arc::default();
        let counter = CpuCounter::of(tree.path(), Version::V1);
        let account = Some(Account { counter, meter: meter.clone() });
        let mut removal = Removal::new(vec![tree.path().to_owned()], account, Instant::now());
        for used_ns in ["1000", "5000", "no number"] {
            fs::write(tree.path().join("cpuacct.usage"), used_ns).unwrap();
            assert!(removal.attempt(Instant::now()));
            assert_eq!(meter.cpu_time(), Duration::ZERO, "it is told once");
        }
        fs::remove_file(tree.path().join("cpuacct.usage")).unwrap();
        assert!(!removal.attempt(Instant::now()));
        drop(removal);
        assert_eq!(meter.cpu_time(), Duration::from_micros(5));
    }

    #[test]
    fn a_directory_that_is_not_empty_is_tried_again() {
        let tree = tempfile::tempdir().unwrap();
        let (full, empty) = (tree.path().join("full"), tree.path().join("empty"));
        fs::create_dir_all(full.join("inside")).unwrap();
        fs::create_dir(&empty).unwrap();
        let now = Instant::now();
        let directories = vec![full.clone(), empty.clone(), tree.path().join("absent")];
        let mut removal = Removal::new(directories, None, now);
        assert!(removal.attempt(now));
        assert!(full.exists() && !empty.exists());
        fs::remove_dir(full.join("inside")).unwrap();
        assert!(!removal.attempt(now));
        assert!(!full.exists());
    }
}
