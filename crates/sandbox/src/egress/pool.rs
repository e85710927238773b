//! Threads that may wait, for the sandboxes of all functions.
//!
//! The functions take turns, and one has few threads at a time, so that a function whose jobs
//! take long holds up nobody but itself.

use std::collections::{HashMap, VecDeque};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// How long a thread without work stays.
const IDLE: Duration = Duration::from_secs(10);

type Job = Box<dyn FnOnce() + Send>;

/// How much a pool takes on.
#[derive(Clone, Copy, Debug)]
pub struct Bounds {
    /// Name of its threads.
    pub name: &'static str,
    /// Most jobs at a time, of all functions.
    pub threads: usize,
    /// Most jobs of one function at a time.
    pub of_function: usize,
    /// While so many jobs of all functions are under way, a function has one at most: the
    /// threads beyond are for those that have none.
    pub shared: usize,
    /// Most jobs that wait for a thread, of all functions.
    pub waiting: usize,
    /// Most jobs of one function that wait for a thread.
    pub waiting_of_function: usize,
}

/// The jobs of one function.
#[derive(Default)]
struct Lane {
    waiting: VecDeque<Job>,
    running: usize,
}

struct State {
    bounds: Bounds,
    /// Those functions that have jobs waiting or under way.
    lanes: HashMap<u64, Lane>,
    /// The functions that have some waiting, each once; the next to have its turn
    /// first.
    turns: VecDeque<u64>,
    waiting: usize,
    running: usize,
    threads: usize,
    idle: usize,
}

impl State {
    fn new(bounds: Bounds) -> Self {
        Self {
            bounds,
            lanes: HashMap::new(),
            turns: VecDeque::new(),
            waiting: 0,
            running: 0,
            threads: 0,
            idle: 0,
        }
    }

    /// How many jobs a function may have under way now.
    fn lane_limit(&self) -> usize {
        if self.running < self.bounds.shared { self.bounds.of_function } else { 1 }
    }

    /// How many of the waiting jobs could begin.
    fn runnable(&self) -> usize {
        let limit = self.lane_limit();
        let of_lane = |lane: &Lane| lane.waiting.len().min(limit.saturating_sub(lane.running));
        self.lanes.values().map(of_lane).sum()
    }

    fn push(&mut self, function: u64, job: Job) -> Result<(), Overloaded> {
        let waiting = self.lanes.get(&function).map_or(0, |lane| lane.waiting.len());
        if self.waiting >= self.bounds.waiting || waiting >= self.bounds.waiting_of_function {
            return Err(Overloaded);
        }
        if waiting == 0 {
            self.turns.push_back(function);
        }
        self.waiting += 1;
        self.lanes.entry(function).or_default().waiting.push_back(job);
        Ok(())
    }

    /// Takes the next job that may begin, in turn of the functions.
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

    /// Takes back the job that came last.
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

/// The threads.
pub struct Pool {
    state: Mutex<State>,
    work: Condvar,
}

/// Too many jobs wait already.
#[derive(Debug, PartialEq, Eq)]
pub struct Overloaded;

impl Pool {
    /// One without threads yet.
    pub fn new(bounds: Bounds) -> Self {
        Self { state: Mutex::new(State::new(bounds)), work: Condvar::new() }
    }

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

    /// Runs `job` of the function with this number on a thread that may wait.
    ///
    /// # Errors
    /// The function, or all of them, have too many jobs that wait.
    pub fn submit(
        &'static self,
        function: u64,
        job: impl FnOnce() + Send + 'static,
    ) -> Result<(), Overloaded> {
        let mut state = self.lock();
        state.push(function, Box::new(job))?;
        if state.idle < state.runnable() && state.threads < state.bounds.threads {
            let thread = std::thread::Builder::new().name(state.bounds.name.into());
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

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::{Arc, mpsc};

    const LONG: Duration = Duration::from_secs(20);
    const BOUNDS: Bounds = Bounds {
        name: "test",
        threads: 128,
        of_function: 4,
        shared: 32,
        waiting: 1024,
        waiting_of_function: 64,
    };

    /// A pool of the test's own, which lives on: its threads may.
    fn new_pool() -> &'static Pool {
        Box::leak(Box::new(Pool::new(BOUNDS)))
    }

    /// Submits jobs that wait for the end of the returned sender; how many were taken.
    fn submit_slow(pool: &'static Pool, function: u64, count: usize) -> (mpsc::Sender<()>, usize) {
        let (gate, wait) = mpsc::channel::<()>();
        let wait = Arc::new(Mutex::new(wait));
        let job = || {
            let wait = wait.clone();
            move || drop(wait.lock().map(|gate| gate.recv()))
        };
        let taken = (0..count).filter(|_| pool.submit(function, job()).is_ok()).count();
        (gate, taken)
    }

    #[test]
    fn jobs_run_at_the_same_time() {
        let pool = new_pool();
        let (sender, receiver) = mpsc::channel();
        let (gate, _) = submit_slow(pool, 1, 1);
        pool.submit(1, move || sender.send(7).unwrap()).unwrap();
        assert_eq!(receiver.recv_timeout(LONG), Ok(7));
        drop(gate);
    }

    #[test]
    fn slow_jobs_of_some_functions_hold_up_no_other() {
        let pool = new_pool();
        let slow: Vec<_> = (0..30).map(|function| submit_slow(pool, function, 20)).collect();
        for function in 100..110 {
            let (sender, receiver) = mpsc::channel();
            pool.submit(function, move || sender.send(7).unwrap()).unwrap();
            assert_eq!(receiver.recv_timeout(LONG), Ok(7), "{function}");
        }
        let state = pool.lock();
        assert!(state.lanes.values().all(|lane| lane.running <= BOUNDS.of_function));
        assert!(state.threads <= BOUNDS.threads);
        drop((state, slow));
    }

    #[test]
    fn the_functions_take_turns() {
        let mut state = State::new(BOUNDS);
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
        let mut state = State::new(BOUNDS);
        let mut fill =
            |function| (0..1000).filter(|_| state.push(function, Box::new(|| ())).is_ok()).count();
        assert_eq!(fill(0), BOUNDS.waiting_of_function);
        let all: usize = (1..100).map(&mut fill).sum();
        assert_eq!(all, BOUNDS.waiting - BOUNDS.waiting_of_function);
        state.withdraw(0);
        assert_eq!(state.waiting, BOUNDS.waiting - 1);
        assert!(state.push(0, Box::new(|| ())).is_ok());
    }

    #[test]
    fn what_runs_is_bounded_for_each_function_and_beyond_a_number_to_one() {
        let mut state = State::new(BOUNDS);
        for function in 0..200 {
            for _ in 0..5 {
                state.push(function, Box::new(|| ())).unwrap();
            }
            if function < 8 {
                while state.begin().is_some() {}
            }
        }
        assert_eq!((state.running, state.lanes[&0].running), (BOUNDS.shared, BOUNDS.of_function));
        while state.begin().is_some() {}
        assert_eq!((state.lanes[&0].running, state.lanes[&100].running), (BOUNDS.of_function, 1));
    }
}
