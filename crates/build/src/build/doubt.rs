//! Why a program does not come to its entry point, as far as it can be seen: it listens elsewhere,
//! or has a thread that never rests.

use std::fmt;
use std::time::Duration;
use thaw_abi::control::Described;
use thaw_sandbox::ProgramActivity;

/// How often the sandbox is asked what its program does.
const ASK_EVERY: Duration = Duration::from_millis(250);
/// How long a program must have listened elsewhere or nowhere without doing anything, with nothing due
/// that could wake it, to be taken for one that will never listen where it should.
const STUCK_AFTER: Duration = Duration::from_millis(500);
/// The same for one that timers wake: they may be those of a server that waits for clients, or a
/// pause before it listens.
const IDLE_AFTER: Duration = Duration::from_secs(5);
/// How long a reason must have been seen for people to hear of it.
const SAID_AFTER: Duration = Duration::from_secs(1);
/// The same for a thread that never rests: many threads are at work for a while.
const RESTLESS_SAID_AFTER: Duration = Duration::from_secs(5);
/// The same for a program that listens nowhere yet, as most do while they start.
const NOWHERE_SAID_AFTER: Duration = Duration::from_secs(8);

/// What a program does instead of waiting at its entry point. It is what the sandbox says, for
/// people.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Reason {
    /// It listens on these ports only.
    Elsewhere(Vec<u16>),
    /// It listens, but this thread can always run.
    Restless {
        /// Its name.
        name: String,
        /// Its process.
        process: u32,
        /// The system calls that it makes most, if that is known; empty: it makes none.
        calls: Option<String>,
    },
    /// It listens nowhere, and this thread can always run.
    Busy {
        /// Its name.
        name: String,
        /// Its process.
        process: u32,
    },
    /// It listens nowhere, and waits for something else: for so many timers among it, if that is known.
    Nowhere {
        /// Timers that are to fire.
        timers: Option<u32>,
    },
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Elsewhere(ports) => {
                let all: Vec<_> = ports.iter().map(u16::to_string).collect();
                let (all, first) = (all.join(", "), &all[0]);
                write!(f, "it listens on port {all}; set `port = {first}` in thaw.toml")
            }
            Self::Restless { name, process, calls } => {
                let calls = match calls.as_deref() {
                    None => String::new(),
                    Some("") => " and makes no system calls".to_owned(),
                    Some(calls) => format!(" (the system calls that it makes most: {calls})"),
                };
                write!(
                    f,
                    "it listens there, but its thread `{name}` of process {process} has run \
                     without a pause{calls}; let the program say when it is to be frozen, by a \
                     write to /dev/thaw, and set `freeze = \"program\"` in [entry] of thaw.toml"
                )
            }
            Self::Busy { name, process } => write!(
                f,
                "it listens on no port yet, and its thread `{name}` of process {process} is at work; \
                 give it longer with `--timeout`"
            ),
            Self::Nowhere { timers } => {
                let with = match timers {
                    None => "",
                    Some(0) => " (no timer is to wake it)",
                    Some(_) => " (a timer is to wake it)",
                };
                write!(
                    f,
                    "it listens on no port, and waits for something else{with}; look at what it prints, \
                     and at what `THAW_TRACE=syscalls thaw run` shows"
                )
            }
        }
    }
}

/// Who could wake a program whose threads all wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Wakers {
    /// Its own timers only.
    Timers,
    /// Others, too: over connections to the outside, or by locks on files of a volume.
    Others,
}

/// What is known of a program that has not come to its entry point yet.
pub(super) struct Doubt {
    /// Where it should listen, if it should.
    port: Option<u16>,
    wakers: Wakers,
    asked: u32,
    /// What the sandbox said last, before it described its program.
    activity: Option<ProgramActivity>,
    reason: Option<Reason>,
    /// Since when the reason has been what it is, whatever the thread calls.
    reason_since: Duration,
    is_said: bool,
    /// Since when it has been idle and listened elsewhere only.
    idle_since: Option<Duration>,
    /// Since when nothing is to come that could change that.
    stuck_since: Option<Duration>,
}

impl Doubt {
    /// Of a program that should listen on `port`.
    pub fn new(port: Option<u16>, wakers: Wakers) -> Self {
        Self {
            port,
            wakers,
            asked: 0,
            activity: None,
            reason: None,
            reason_since: Duration::ZERO,
            is_said: false,
            idle_since: None,
            stuck_since: None,
        }
    }

    /// Whether it is time to ask the sandbox, which takes note of that.
    pub fn asks(&mut self, waited: Duration) -> bool {
        let is_due = self.port.is_some() && waited >= ASK_EVERY * (self.asked + 1);
        self.asked += u32::from(is_due);
        is_due
    }

    /// What the sandbox says before it describes its program.
    pub fn heard_activity(&mut self, activity: ProgramActivity) {
        self.activity = Some(activity);
    }

    /// What the sandbox says after the program has had this long.
    pub fn heard(&mut self, described: &Described, waited: Duration) {
        let Some(own) = self.port else { return };
        let activity = self.activity.take();
        let ports: Vec<u16> = described.ports.into_iter().filter(|&port| port != 0).collect();
        let len = described.name.iter().position(|&byte| byte == 0).unwrap_or(16);
        let name = String::from_utf8_lossy(&described.name[..len]).escape_debug().to_string();
        let process = described.process;
        let counted = activity.as_ref().filter(|activity| activity.numbers.is_first == 0);
        let calls = counted.map(|activity| activity.names.clone());
        let reason = match (ports.contains(&own), ports.is_empty(), described.runnable) {
            // It is about to come to its entry point, or something holds that back.
            (true, _, 0) => return self.is_well(),
            (true, _, _) => Reason::Restless { name, process, calls },
            (false, true, 0) => Reason::Nowhere {
                timers: activity.as_ref().map(|activity| activity.numbers.timers),
            },
            (false, true, _) => Reason::Busy { name, process },
            (false, false, _) => Reason::Elsewhere(ports),
        };
        let rests = described.runnable == 0;
        let is_idle = matches!(reason, Reason::Elsewhere(_)) && rests;
        let is_alone = self.wakers == Wakers::Timers;
        let is_stuck = rests && is_alone && activity.is_some_and(is_stuck);
        self.idle_since = since(is_idle, self.idle_since, waited);
        self.stuck_since = since(is_stuck, self.stuck_since, waited);
        if !self.reason.as_ref().is_some_and(|before| before.is_like(&reason)) {
            (self.reason_since, self.is_said) = (waited, false);
        }
        self.reason = Some(reason);
    }

    /// It listens where it should, and waits: what it did before is the reason for nothing.
    fn is_well(&mut self) {
        (self.idle_since, self.stuck_since) = (None, None);
        if let Some(Reason::Restless { .. }) = self.reason {
            return;
        }
        self.reason = None;
    }

    /// Whether to wait for longer is of no use, and if the user has named no time, of hardly any.
    pub fn is_certain(&self, waited: Duration, timeout: Option<Duration>) -> bool {
        let lasts = |since: Option<Duration>, long: Duration| {
            since.is_some_and(|since| waited.saturating_sub(since) >= long)
        };
        lasts(self.stuck_since, STUCK_AFTER)
            || timeout.is_none() && lasts(self.idle_since, IDLE_AFTER)
    }

    /// What people should hear while they wait on, once for each reason.
    pub fn says(&mut self, waited: Duration) -> Option<&Reason> {
        let after = match self.reason.as_ref()? {
            Reason::Elsewhere(_) if self.idle_since.is_some() => SAID_AFTER,
            Reason::Restless { .. } => RESTLESS_SAID_AFTER,
            Reason::Nowhere { .. } | Reason::Busy { .. } => NOWHERE_SAID_AFTER,
            Reason::Elsewhere(_) => return None,
        };
        if self.is_said || waited.saturating_sub(self.reason_since) < after {
            return None;
        }
        self.is_said = true;
        self.reason.as_ref()
    }

    /// What the program does instead, if that was seen.
    pub fn reason(self) -> Option<Reason> {
        self.reason
    }
}

impl Reason {
    /// Whether it is the same one, seen at another time.
    fn is_like(&self, other: &Self) -> bool {
        match (self, other) {
            (
                Self::Restless { name, process, .. },
                Self::Restless { name: others, process: of, .. },
            ) => (name, process) == (others, of),
            // What it does until then changes all the time.
            (
                Self::Nowhere { .. } | Self::Busy { .. },
                Self::Nowhere { .. } | Self::Busy { .. },
            ) => true,
            (one, other) => one == other,
        }
    }
}

/// Whether a program of which no thread can run has done nothing since the sandbox was asked
/// before, and waits for nothing that is sure to come.
fn is_stuck(ProgramActivity { numbers, .. }: ProgramActivity) -> bool {
    let is_quiet = numbers.is_first == 0 && numbers.calls == 0;
    is_quiet && numbers.timers == 0 && numbers.uninterruptible == 0
}

/// Since when something holds that held `before`, if it does `now`.
fn since(holds: bool, before: Option<Duration>, now: Duration) -> Option<Duration> {
    holds.then(|| before.unwrap_or(now))
}

#[cfg(test)]
mod tests {
    use super::*;
    use thaw_abi::control::Activity;

    fn described(ports: &[u16], runnable: u32) -> Described {
        let mut described = Described { runnable, process: 7, ..Described::default() };
        described.ports[..ports.len()].copy_from_slice(ports);
        described.name[..4].copy_from_slice(b"a\x1b[m");
        described
    }

    const fn ms(ms: u64) -> Duration {
        Duration::from_millis(ms)
    }

    fn activity(timers: u32, calls: u64) -> ProgramActivity {
        let numbers = Activity { timers, calls, ..Activity::default() };
        ProgramActivity { numbers, names: "futex, read".to_owned() }
    }

    #[test]
    fn who_listens_elsewhere_and_waits_is_not_waited_for() {
        let mut doubt = Doubt::new(Some(80), Wakers::Others);
        assert!(!doubt.asks(ms(240)));
        assert!(doubt.asks(ms(250)));
        assert!(!doubt.asks(ms(250)));
        doubt.heard(&described(&[90, 9000], 0), ms(1000));
        assert!(!doubt.is_certain(ms(5900), None));
        // It was at work again.
        doubt.heard(&described(&[90, 9000], 1), ms(2000));
        doubt.heard(&described(&[90, 9000], 0), ms(3000));
        assert!(!doubt.is_certain(ms(7900), None));
        assert!(doubt.is_certain(ms(8000), None));
        // The user has said how long to wait.
        assert!(!doubt.is_certain(ms(8000), Some(ms(60_000))));
        let text = doubt.reason().unwrap().to_string();
        assert_eq!(text, "it listens on port 90, 9000; set `port = 90` in thaw.toml");
    }

    #[test]
    fn who_can_never_go_on_is_not_waited_for_at_all() {
        let elsewhere = described(&[9000], 0);
        let heard = |wakers, timers, calls| {
            let mut doubt = Doubt::new(Some(80), wakers);
            for at in [1000, 1250, 1500] {
                doubt.heard_activity(activity(timers, calls));
                doubt.heard(&elsewhere, ms(at));
            }
            doubt.is_certain(ms(1500), Some(ms(60_000)))
        };
        assert!(heard(Wakers::Timers, 0, 0));
        assert!(!heard(Wakers::Timers, 1, 0), "a timer may be what it waits for");
        assert!(!heard(Wakers::Timers, 0, 1), "it does something between two looks");
        assert!(!heard(Wakers::Others, 0, 0), "an answer may come from outside");
        // A kernel that does not say what the program does.
        let mut doubt = Doubt::new(Some(80), Wakers::Timers);
        doubt.heard(&elsewhere, ms(1000));
        assert!(!doubt.is_certain(ms(2000), Some(ms(60_000))));
    }

    #[test]
    fn who_listens_nowhere_and_waits_for_nothing_is_not_waited_for() {
        let heard = |timers, runnable| {
            let mut doubt = Doubt::new(Some(80), Wakers::Timers);
            for at in [1000, 1250, 1500] {
                doubt.heard_activity(activity(timers, 0));
                doubt.heard(&described(&[], runnable), ms(at));
            }
            (doubt.is_certain(ms(1500), Some(ms(60_000))), doubt.reason().unwrap().to_string())
        };
        let (is_certain, text) = heard(0, 0);
        assert!(is_certain && text.contains("something else (no timer is to wake it);"), "{text}");
        let (is_certain, text) = heard(1, 0);
        assert!(!is_certain && text.contains("something else (a timer is to wake it);"), "{text}");
        assert!(!heard(0, 1).0, "it is at work");
    }

    #[test]
    fn people_hear_once_of_each_reason() {
        let mut doubt = Doubt::new(Some(80), Wakers::Timers);
        doubt.heard(&described(&[9000], 0), ms(250));
        assert_eq!(doubt.says(ms(1240)), None);
        assert_eq!(doubt.says(ms(1250)), Some(&Reason::Elsewhere(vec![9000])));
        doubt.heard(&described(&[9000], 0), ms(1500));
        assert_eq!(doubt.says(ms(2500)), None);
        doubt.heard(&described(&[80, 9000], 1), ms(3000));
        assert_eq!(doubt.says(ms(7900)), None);
        assert!(matches!(doubt.says(ms(8000)), Some(Reason::Restless { .. })));
        // One that listens nowhere yet is as one expects, for a while, and whatever it does.
        doubt.heard(&described(&[], 1), ms(9000));
        assert_eq!(doubt.says(ms(16_900)), None);
        doubt.heard(&described(&[], 0), ms(16_950));
        assert_eq!(doubt.says(ms(17_000)), Some(&Reason::Nowhere { timers: None }));
        doubt.heard(&described(&[], 1), ms(20_000));
        assert_eq!(doubt.says(ms(50_000)), None);
    }

    #[test]
    fn a_thread_that_never_rests_is_named() {
        let mut doubt = Doubt::new(Some(80), Wakers::Timers);
        doubt.heard(&described(&[80], 2), ms(1000));
        assert!(!doubt.is_certain(ms(50_000), None));
        doubt.heard_activity(activity(0, 12));
        doubt.heard(&described(&[80], 2), ms(1250));
        // It may rest when it is looked at by chance.
        doubt.heard(&described(&[80], 0), ms(1500));
        let text = doubt.reason().unwrap().to_string();
        assert!(text.contains("thread `a\\u{1b}[m` of process 7"), "{text}");
        assert!(text.contains("(the system calls that it makes most: futex, read)"), "{text}");
    }

    #[test]
    fn who_need_not_listen_is_not_asked() {
        let mut doubt = Doubt::new(None, Wakers::Timers);
        assert!(!doubt.asks(Duration::from_secs(100)));
        doubt.heard(&described(&[80], 0), ms(1000));
        assert_eq!(doubt.reason(), None);
    }
}
