//! Whether instances are put back after their request: always, or where a measurement says that
//! this takes less processor time than to make new ones.
//!
//! While requests come often, the first few are served by new instances, and the time that each
//! takes is noted, from the birth of its process to the end of the request. Then instances are
//! put back, and the same is noted: the time of the request and that of the rewinder. What a new
//! instance takes more for a request is what a rewind may take. If rewinds take more than that on average, at
//! first or later (a program that writes ever other pages has ever more of them to be written back),
//! instances are ended after their request, and it is tried again after a while.

use super::launch::RewindVerdict;
use std::fs;
use std::sync::{Mutex, MutexGuard};
use std::time::{Duration, Instant};
use thaw_home::config::FunctionConfig;

/// Requests within [`DEMAND_TIME`] that are worth keeping instances for.
const DEMAND: u32 = 8;
const DEMAND_TIME: Duration = Duration::from_secs(1);
/// After this long without a request nothing is kept.
pub(super) const IDLE: Duration = Duration::from_secs(10);
/// Requests of new instances that are measured, and of those that were put back.
const SAMPLES_NEW: usize = 4;
const SAMPLES_REWOUND: usize = 8;
/// Rewinds after which their average counts: the first of an instance takes longer.
const SAMPLES_REWINDS: u32 = 32;
/// What the latest rewind counts of the average: one part in so many.
const WEIGHT: u32 = 16;
/// After a measurement that spoke against it, the next one.
const AGAIN_AFTER: Duration = Duration::from_secs(600);

/// Which instances are put back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RewindPolicy {
    /// How many of them wait at most.
    pub most: usize,
    /// Only where a measurement says that this takes less processor time than new instances, and
    /// while requests come often.
    pub where_it_wins: bool,
}

impl RewindPolicy {
    /// That of a function; `None`: none is put back.
    pub fn of(config: &FunctionConfig) -> Option<Self> {
        let most = config.limits.instances.get() as usize;
        let possible = config.rewind != Some(false) && config.no_rewind().is_none();
        possible.then_some(Self { most, where_it_wins: config.rewind.is_none() })
    }
}

/// Decides for one image.
#[derive(Debug, Default)]
pub(super) struct Trial {
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    demand: Demand,
    measured: Measured,
    /// Until then instances are ended.
    lost_until: Option<Instant>,
}

/// How often requests come.
#[derive(Debug, Default)]
struct Demand {
    /// When the requests of this count began.
    since: Option<Instant>,
    count: u32,
    latest: Option<Instant>,
    is_high: bool,
}

/// Processor times.
#[derive(Debug, Default)]
struct Measured {
    /// Of requests of new instances, with all that these took.
    new: Vec<Duration>,
    /// Of requests of instances that had been put back, without that.
    rewound: Vec<Duration>,
    /// Of a rewind, on average.
    rewind: Duration,
    rewinds: u32,
}

/// What is to become of an instance that has served its request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Fate {
    PutBack,
    End,
}

/// An instance that has served its request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Served {
    /// Processor time of its process so far.
    pub now: Duration,
    /// The same when it had served the request before; `None`: this was its first.
    pub before: Option<Duration>,
}

impl Trial {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("no holder panics")
    }

    /// Counts a request; whether it is the one from which on instances are kept.
    pub fn request(&self, now: Instant) -> bool {
        let mut state = self.state();
        if state.lost_until.is_some_and(|until| now >= until) {
            (state.lost_until, state.measured) = (None, Measured::default());
        }
        state.demand.request(now)
    }

    /// Whether instances are kept, to be put back.
    pub fn is_on(&self) -> bool {
        let state = self.state();
        state.demand.is_high && state.lost_until.is_none()
    }

    /// Looks whether nobody has asked for so long that nothing is to be kept any more.
    pub fn is_over(&self, now: Instant) -> bool {
        self.state().demand.is_over(now)
    }

    /// Takes the measure of an instance that has served its request; `None`: the host does not
    /// say what that took.
    pub fn served(&self, served: Option<Served>, now: Instant) -> Fate {
        let mut state = self.state();
        let Some(served) = served else {
            state.lost_until = Some(now + AGAIN_AFTER);
            return Fate::End;
        };
        let measured = &mut state.measured;
        match served.before {
            None if measured.new.len() < SAMPLES_NEW => {
                measured.new.push(served.now);
                // The next one is to be new, too.
                return Fate::End;
            }
            // It is left from an earlier measurement.
            Some(_) if measured.new.len() < SAMPLES_NEW => return Fate::End,
            Some(before) if measured.rewound.len() < SAMPLES_REWOUND => {
                measured.rewound.push(served.now.saturating_sub(before));
            }
            _ => {}
        }
        Fate::PutBack
    }

    /// A rewind took so much processor time; `None`: it failed, and a new instance has to be
    /// made.
    pub fn rewound(&self, took: Option<Duration>, now: Instant) {
        let mut state = self.state();
        let failed = state.measured.new.iter().min().copied().unwrap_or_default();
        state.measured.note_rewind(took.unwrap_or(failed));
        if state.measured.verdict().is_some_and(|verdict| !verdict.wins) {
            state.lost_until = Some(now + AGAIN_AFTER);
        }
    }

    /// What has been measured; `None`: too little.
    pub fn verdict(&self) -> Option<RewindVerdict> {
        self.state().measured.verdict()
    }
}

impl Demand {
    fn request(&mut self, now: Instant) -> bool {
        if self.since.is_none_or(|since| now - since > DEMAND_TIME) {
            (self.since, self.count) = (Some(now), 0);
        }
        self.count = self.count.saturating_add(1);
        self.latest = Some(now);
        let begins = !self.is_high && self.count >= DEMAND;
        self.is_high |= begins;
        begins
    }

    fn is_over(&mut self, now: Instant) -> bool {
        let is_over = self.latest.is_none_or(|latest| now - latest >= IDLE);
        if is_over {
            *self = Self::default();
        }
        is_over
    }
}

impl Measured {
    fn note_rewind(&mut self, took: Duration) {
        self.rewinds = self.rewinds.saturating_add(1);
        let parts = self.rewinds.min(WEIGHT);
        self.rewind = (self.rewind * (parts - 1) + took) / parts;
    }

    fn verdict(&self) -> Option<RewindVerdict> {
        if self.new.len() < SAMPLES_NEW || self.rewinds < SAMPLES_REWINDS {
            return None;
        }
        let new = self.new.iter().min().copied()?;
        let rewound = self.request() + self.rewind;
        let micros = |time: Duration| time.as_micros() as u64;
        let wins = rewound < new;
        Some(RewindVerdict { new_us: micros(new), rewound_us: micros(rewound), wins })
    }

    /// Median time of a request of an instance that had been put back.
    fn request(&self) -> Duration {
        let mut sorted = self.rewound.clone();
        sorted.sort_unstable();
        sorted.get(sorted.len() / 2).copied().unwrap_or_default()
    }
}

/// Processor time that the first thread of a process has had so far, after proc_pid_schedstat(5);
/// `None`: it has ended, or the host does not count it.
pub(super) fn processor_time(pid: u32) -> Option<Duration> {
    let text = fs::read_to_string(format!("/proc/{pid}/schedstat")).ok()?;
    let nanoseconds = text.split_whitespace().next()?.parse().ok()?;
    (nanoseconds > 0).then(|| Duration::from_nanos(nanoseconds))
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn micros(count: u64) -> Duration {
        Duration::from_micros(count)
    }

    /// A trial with requests that come often, of which each takes a new instance so long.
    fn trial(new: Duration) -> Trial {
        let (trial, now) = (Trial::default(), Instant::now());
        let begins = (0..DEMAND).filter(|_| trial.request(now)).count();
        assert!(begins == 1 && trial.is_on());
        for _ in 0..SAMPLES_NEW {
            let served = Served { now: new, before: None };
            assert_eq!(trial.served(Some(served), now), Fate::End);
        }
        trial
    }

    fn rewind(trial: &Trial, request: Duration, took: Option<Duration>) {
        let served = Served { now: request * 3, before: Some(request * 2) };
        assert_eq!(trial.served(Some(served), Instant::now()), Fate::PutBack);
        trial.rewound(took, Instant::now());
    }

    #[test]
    fn what_takes_less_is_done() {
        let trial = trial(micros(1000));
        for _ in 0..SAMPLES_REWINDS {
            assert!(trial.is_on() && trial.verdict().is_none());
            rewind(&trial, micros(300), Some(micros(600)));
        }
        let verdict = RewindVerdict { new_us: 1000, rewound_us: 900, wins: true };
        assert!(trial.is_on() && trial.verdict() == Some(verdict));
    }

    #[test]
    fn what_takes_more_is_given_up_for_a_while() {
        let trial = trial(micros(1000));
        for _ in 0..SAMPLES_REWINDS {
            rewind(&trial, micros(300), Some(micros(800)));
        }
        assert!(!trial.is_on() && trial.verdict().is_some_and(|verdict| !verdict.wins));
        trial.request(Instant::now());
        assert!(!trial.is_on());
        trial.request(Instant::now() + AGAIN_AFTER + micros(1));
        assert!(trial.is_on() && trial.verdict().is_none());
    }

    #[test]
    fn ever_more_pages_are_noticed() {
        let trial = trial(micros(1000));
        for _ in 0..SAMPLES_REWINDS {
            rewind(&trial, micros(300), Some(micros(100)));
        }
        let mut rewinds = 0;
        while trial.is_on() {
            rewind(&trial, micros(300), Some(micros(900)));
            rewinds += 1;
        }
        assert!((2..100).contains(&rewinds), "{rewinds}");
    }

    #[test]
    fn those_that_cannot_be_put_back_are_ended() {
        let trial = trial(micros(1000));
        for _ in 0..SAMPLES_REWINDS {
            assert!(trial.is_on());
            trial.rewound(None, Instant::now());
        }
        assert!(!trial.is_on());
    }

    #[test]
    fn without_times_nothing_is_put_back() {
        let trial = trial(micros(1000));
        assert_eq!(trial.served(None, Instant::now()), Fate::End);
        assert!(!trial.is_on());
    }

    #[test]
    fn few_requests_keep_nothing() {
        let (trial, begin) = (Trial::default(), Instant::now());
        for second in 0..100 {
            assert!(!trial.request(begin + Duration::from_secs(second)));
        }
        let now = begin + Duration::from_secs(200);
        assert!((0..DEMAND).any(|_| trial.request(now)) && trial.is_on());
        assert!(!trial.is_over(now + IDLE / 2) && trial.is_on());
        assert!(trial.is_over(now + IDLE) && !trial.is_on());
    }

    #[test]
    fn a_process_has_had_time_of_a_processor() {
        assert!(processor_time(std::process::id()).is_some());
        assert!(processor_time(u32::MAX).is_none());
    }
}
