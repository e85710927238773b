//! Look-ups by the host's resolver, on threads of their own: the process that asks it
//! ([`resolver`]) may take a while.
//!
//! The functions take turns, and one has few threads at a time, so that names whose
//! servers are slow hold up nobody but the function that asks for them.

use std::collections::{HashMap, VecDeque};
use std::net::IpAddr;
use std::sync::{Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use super::super::budget::Budget;
use super::message::Outcome;
use crate::resolver::{self, Found, LookUpError};

/// Most look-ups at a time, of all functions.
const THREADS_MAX: usize = 128;
/// Most look-ups of one function at a time.
const OF_FUNCTION_MAX: usize = 4;
/// While so many look-ups of all functions are under way, a function has one at most:
/// the threads beyond are for those that have none.
const SHARED_MAX: usize = 32;
/// Most look-ups that wait for a thread, of all functions.
const WAITING_MAX: usize = 1024;
/// Most look-ups of one function that wait for a thread.
const WAITING_OF_FUNCTION_MAX: usize = 64;
/// How long a thread without work stays.
const IDLE: Duration = Duration::from_secs(10);
/// How long an answer is used again: programs ask for either type of address.
const FRESH: Duration = Duration::from_secs(5);
/// Most answers that are kept.
const KEPT_MAX: usize = 256;

type Job = Box<dyn FnOnce() + Send>;

/// An answer to one function. Others do not learn from how fast theirs comes what
/// it has asked for.
struct Kept {
    when: Instant,
    function: u64,
    name: String,
    outcome: Outcome,
}

/// The look-ups of one function.
#[derive(Default)]
struct Lane {
    waiting: VecDeque<Job>,
    running: usize,
}

#[derive(Default)]
struct State {
    /// Those functions that have look-ups waiting or under way.
    lanes: HashMap<u64, Lane>,
    /// The functions that have some waiting, each once; the next to have its turn
    /// first.
    turns: VecDeque<u64>,
    waiting: usize,
    running: usize,
    threads: usize,
    idle: usize,
    /// The newest last.
    kept: VecDeque<Kept>,
}

impl State {
    /// How many look-ups a function may have under way now.
    fn lane_limit(&self) -> usize {
        if self.running < SHARED_MAX { OF_FUNCTION_MAX } else { 1 }
    }

    /// How many of the waiting look-ups could begin.
    fn runnable(&self) -> usize {
        let limit = self.lane_limit();
        let of_lane = |lane: &Lane| lane.waiting.len().min(limit.saturating_sub(lane.running));
        self.lanes.values().map(of_lane).sum()
    }

    fn push(&mut self, function: u64, job: Job) -> Result<(), Overloaded> {
        let waiting = self.lanes.get(&function).map_or(0, |lane| lane.waiting.len());
        if self.waiting >= WAITING_MAX || waiting >= WAITING_OF_FUNCTION_MAX {
            return Err(Overloaded);
        }
        if waiting == 0 {
            self.turns.push_back(function);
        }
        self.waiting += 1;
        self.lanes.entry(function).or_default().waiting.push_back(job);
        Ok(())
    }

    /// Takes the next look-up that may begin, in turn of the functions.
    fn begin(&mut self) -> Option<(u64, Job)> {
        let limit = self.lane_limit();
        let may_begin =
            |function: &u64| self.lanes.get(function).is_some_and(|lane| lane.running < limit);
        let at = self.turns.iter().position(may_begin)?;
        let function = self.turns.remove(at)?;
        let lane = self.lanes.get_mut(&function)?;
        let job = lane.waiting.pop_front()?;
        lane.running += 1;
        if !lane.waiting.is_empty() {
            self.turns.push_back(function);
        }
        self.waiting -= 1;
        self.running += 1;
        Some((function, job))
    }

    /// Takes back the look-up that came last.
    fn withdraw(&mut self, function: u64) {
        let Some(lane) = self.lanes.get_mut(&function) else { return };
        self.waiting -= usize::from(lane.waiting.pop_back().is_some());
        if lane.waiting.is_empty() {
            self.turns.retain(|turn| *turn != function);
        }
        if lane.waiting.is_empty() && lane.running == 0 {
            self.lanes.remove(&function);
        }
    }

    fn finish(&mut self, function: u64) {
        self.running -= 1;
        if let Some(lane) = self.lanes.get_mut(&function) {
            lane.running -= 1;
            if lane.running == 0 && lane.waiting.is_empty() {
                self.lanes.remove(&function);
            }
        }
    }
}

/// The threads of this process.
#[derive(Default)]
struct Pool {
    state: Mutex<State>,
    work: Condvar,
}

fn pool() -> &'static Pool {
    static POOL: OnceLock<Pool> = OnceLock::new();
    POOL.get_or_init(Pool::default)
}

impl Pool {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn run(&self) {
        let mut state = self.lock();
        loop {
            if let Some((function, job)) = state.begin() {
                drop(state);
                job();
                state = self.lock();
                state.finish(function);
                continue;
            }
            state.idle += 1;
            let (guard, waited) =
                self.work.wait_timeout(state, IDLE).unwrap_or_else(PoisonError::into_inner);
            state = guard;
            state.idle -= 1;
            if waited.timed_out() && state.runnable() == 0 {
                state.threads -= 1;
                return;
            }
        }
    }

    fn submit(&'static self, function: u64, job: Job) -> Result<(), Overloaded> {
        let mut state = self.lock();
        state.push(function, job)?;
        if state.idle < state.runnable() && state.threads < THREADS_MAX {
            let thread = std::thread::Builder::new().name("thaw-lookup".into());
            match thread.spawn(|| self.run()) {
                Ok(_) => state.threads += 1,
                // Nobody would ever take it; with threads, one of them will.
                Err(_) if state.threads == 0 => {
                    state.withdraw(function);
                    return Err(Overloaded);
                }
                Err(_) => {}
            }
        }
        self.work.notify_one();
        Ok(())
    }
}

/// Too many look-ups wait already.
#[derive(Debug, PartialEq, Eq)]
pub struct Overloaded;

/// Runs `job` of the function with this number on a thread that may wait.
pub fn submit(function: u64, job: impl FnOnce() + Send + 'static) -> Result<(), Overloaded> {
    pool().submit(function, Box::new(job))
}

/// Asks the host's resolver for the addresses of a name, or one's own memory if
/// that was just done for the same function. May block. A function that asks too fast is told
/// that it has failed.
///
/// # Errors
/// The resolver process cannot be asked. That is not kept in memory.
pub fn addresses_of(budget: &Budget, name: &str) -> Result<Outcome, LookUpError> {
    let (pool, function) = (pool(), budget.id);
    {
        let mut state = pool.lock();
        state.kept.retain(|kept| kept.when.elapsed() < FRESH);
        let mut kept = state.kept.iter();
        if let Some(kept) = kept.find(|kept| kept.function == function && kept.name == name) {
            return Ok(kept.outcome.clone());
        }
    }
    if !budget.take_look_up(Instant::now()) {
        return Ok(Outcome::Failed);
    }
    let outcome = judge(resolver::look_up(name)?);
    let mut state = pool.lock();
    if state.kept.len() == KEPT_MAX {
        state.kept.pop_front();
    }
    let (when, name) = (Instant::now(), name.to_owned());
    state.kept.push_back(Kept { when, function, name, outcome: outcome.clone() });
    Ok(outcome)
}

/// What the resolver process's answer means to a sandbox.
fn judge(found: Found) -> Outcome {
    match found {
        Found::Addresses(found) => {
            let mut addresses: Vec<IpAddr> = Vec::new();
            for ip in found {
                // What means the host to the host would mean the sandbox to the sandbox.
                if !ip.is_loopback() && !ip.is_unspecified() && !addresses.contains(&ip) {
                    addresses.push(ip);
                }
            }
            Outcome::Addresses(addresses)
        }
        Found::NoSuchName => Outcome::NoSuchName,
        Found::Failed => Outcome::Failed,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::{Arc, mpsc};

    const LONG: Duration = Duration::from_secs(20);

    /// A pool of the test's own, which lives on: its threads may.
    fn new_pool() -> &'static Pool {
        Box::leak(Box::default())
    }

    /// Submits jobs that wait for the end of the returned sender; how many were taken.
    fn submit_slow(pool: &'static Pool, function: u64, count: usize) -> (mpsc::Sender<()>, usize) {
        let (gate, wait) = mpsc::channel::<()>();
        let wait = Arc::new(Mutex::new(wait));
        let job = || {
            let wait = wait.clone();
            Box::new(move || drop(wait.lock().map(|gate| gate.recv())))
        };
        let taken = (0..count).filter(|_| pool.submit(function, job()).is_ok()).count();
        (gate, taken)
    }

    #[test]
    fn jobs_run_at_the_same_time() {
        let pool = new_pool();
        let (sender, receiver) = mpsc::channel();
        let (gate, _) = submit_slow(pool, 1, 1);
        pool.submit(1, Box::new(move || sender.send(7).unwrap())).unwrap();
        assert_eq!(receiver.recv_timeout(LONG), Ok(7));
        drop(gate);
    }

    #[test]
    fn slow_names_of_some_functions_hold_up_no_other() {
        let pool = new_pool();
        let slow: Vec<_> = (0..30).map(|function| submit_slow(pool, function, 20)).collect();
        for function in 100..110 {
            let (sender, receiver) = mpsc::channel();
            pool.submit(function, Box::new(move || sender.send(7).unwrap())).unwrap();
            assert_eq!(receiver.recv_timeout(LONG), Ok(7), "{function}");
        }
        let state = pool.lock();
        assert!(state.lanes.values().all(|lane| lane.running <= OF_FUNCTION_MAX));
        assert!(state.threads <= THREADS_MAX);
        drop((state, slow));
    }

    #[test]
    fn the_functions_take_turns() {
        let mut state = State::default();
        for function in [1, 1, 1, 2, 3] {
            state.push(function, Box::new(|| ())).unwrap();
        }
        let turns: Vec<u64> =
            std::iter::from_fn(|| state.begin().map(|(function, _)| function)).collect();
        assert_eq!(turns, [1, 2, 3, 1, 1]);
        for function in turns {
            state.finish(function);
        }
        assert!(state.lanes.is_empty() && state.turns.is_empty());
        assert_eq!((state.waiting, state.running), (0, 0));
    }

    #[test]
    fn what_waits_is_bounded_for_each_function_and_for_all() {
        let mut state = State::default();
        let mut fill =
            |function| (0..1000).filter(|_| state.push(function, Box::new(|| ())).is_ok()).count();
        assert_eq!(fill(0), WAITING_OF_FUNCTION_MAX);
        let all: usize = (1..100).map(&mut fill).sum();
        assert_eq!(all, WAITING_MAX - WAITING_OF_FUNCTION_MAX);
        state.withdraw(0);
        assert_eq!(state.waiting, WAITING_MAX - 1);
        assert!(state.push(0, Box::new(|| ())).is_ok());
    }

    #[test]
    fn what_runs_is_bounded_for_each_function_and_beyond_a_number_to_one() {
        let mut state = State::default();
        for function in 0..200 {
            for _ in 0..5 {
                state.push(function, Box::new(|| ())).unwrap();
            }
            if function < 8 {
                while state.begin().is_some() {}
            }
        }
        assert_eq!((state.running, state.lanes[&0].running), (SHARED_MAX, OF_FUNCTION_MAX));
        while state.begin().is_some() {}
        assert_eq!((state.lanes[&0].running, state.lanes[&100].running), (OF_FUNCTION_MAX, 1));
    }

    /// Nor does a worker get it past this that was taken over.
    #[test]
    fn the_hosts_loopback_is_no_answer() {
        let found =
            |all: &[&str]| Found::Addresses(all.iter().map(|ip| ip.parse().unwrap()).collect());
        let none = found(&["127.0.0.1", "127.8.9.1", "::1", "0.0.0.0", "::"]);
        assert_eq!(judge(none), Outcome::Addresses(vec![]));
        let address = "192.0.2.1".parse().unwrap();
        let twice = found(&["192.0.2.1", "127.0.0.1", "192.0.2.1"]);
        assert_eq!(judge(twice), Outcome::Addresses(vec![address]));
    }
}
