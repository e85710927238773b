//! Why a program does not come to its entry point, as far as it can be seen: it listens elsewhere,
//! or has a thread that never rests.

use std::fmt;
use std::time::Duration;
use thaw_abi::control::Described;

/// How often the sandbox is asked what its program does.
const ASK_EVERY: Duration = Duration::from_secs(1);
/// How often in a row a program must have been idle, and listened elsewhere only, to be taken for
/// one that will never listen where it should.
const CERTAIN_AFTER: u32 = 5;

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
    },
    /// It listens nowhere, and this thread can always run.
    Busy {
        /// Its name.
        name: String,
        /// Its process.
        process: u32,
    },
    /// It listens nowhere, and waits for something else.
    Nowhere,
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Elsewhere(ports) => {
                let all: Vec<_> = ports.iter().map(u16::to_string).collect();
                let (all, first) = (all.join(", "), &all[0]);
                write!(f, "it listens on port {all}; set `port = {first}` in thaw.toml")
            }
            Self::Restless { name, process } => write!(
                f,
                "it listens there, but its thread `{name}` of process {process} has run without a \
                 pause; let the program say when it is to be frozen, by a write to /dev/thaw, and set \
                 `freeze = \"program\"` in [entry] of thaw.toml (`THAW_TRACE=syscalls thaw run` shows \
                 what the thread calls)"
            ),
            Self::Busy { name, process } => write!(
                f,
                "it listens on no port yet, and its thread `{name}` of process {process} is at work; \
                 give it longer with `--timeout`"
            ),
            Self::Nowhere => f.write_str(
                "it listens on no port, and waits for something else; look at what it prints, and \
                 at what `THAW_TRACE=syscalls thaw run` shows",
            ),
        }
    }
}

/// What is known of a program that has not come to its entry point yet.
pub(super) struct Doubt {
    /// Where it should listen, if it should.
    port: Option<u16>,
    asked: u32,
    reason: Option<Reason>,
    /// How often in a row it was idle and listened elsewhere.
    elsewhere: u32,
}

impl Doubt {
    /// Of a program that should listen on `port`.
    pub fn new(port: Option<u16>) -> Self {
        Self { port, asked: 0, reason: None, elsewhere: 0 }
    }

    /// Whether it is time to ask the sandbox, which takes note of that.
    pub fn asks(&mut self, waited: Duration) -> bool {
        let is_due = self.port.is_some() && waited >= ASK_EVERY * (self.asked + 1);
        self.asked += u32::from(is_due);
        is_due
    }

    /// What the sandbox says.
    pub fn heard(&mut self, described: &Described) {
        let Some(own) = self.port else { return };
        let ports: Vec<u16> = described.ports.into_iter().filter(|&port| port != 0).collect();
        let len = described.name.iter().position(|&byte| byte == 0).unwrap_or(16);
        let name = String::from_utf8_lossy(&described.name[..len]).escape_debug().to_string();
        let process = described.process;
        self.reason = Some(match (ports.contains(&own), ports.is_empty(), described.runnable) {
            // It is about to come to its entry point, or something holds that back.
            (true, _, 0) => return,
            (true, _, _) => Reason::Restless { name, process },
            (false, true, 0) => Reason::Nowhere,
            (false, true, _) => Reason::Busy { name, process },
            (false, false, _) => Reason::Elsewhere(ports),
        });
        let is_idle = described.runnable == 0;
        self.elsewhere = match self.reason {
            Some(Reason::Elsewhere(_)) if is_idle => self.elsewhere + 1,
            _ => 0,
        };
    }

    /// Whether to wait for longer is of no use.
    pub fn is_certain(&self) -> bool {
        self.elsewhere >= CERTAIN_AFTER
    }

    /// What the program does instead, if that was seen.
    pub fn reason(self) -> Option<Reason> {
        self.reason
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn described(ports: &[u16], runnable: u32) -> Described {
        let mut described = Described { runnable, process: 7, ..Described::default() };
        described.ports[..ports.len()].copy_from_slice(ports);
        described.name[..4].copy_from_slice(b"a\x1b[m");
        described
    }

    #[test]
    fn who_listens_elsewhere_and_waits_is_not_waited_for() {
        let mut doubt = Doubt::new(Some(80));
        assert!(!doubt.asks(Duration::from_millis(900)));
        assert!(doubt.asks(Duration::from_secs(1)));
        assert!(!doubt.asks(Duration::from_secs(1)));
        for _ in 1..CERTAIN_AFTER {
            doubt.heard(&described(&[90, 9000], 0));
        }
        assert!(!doubt.is_certain());
        // It was at work again.
        doubt.heard(&described(&[90, 9000], 1));
        for _ in 0..CERTAIN_AFTER {
            assert!(!doubt.is_certain());
            doubt.heard(&described(&[90, 9000], 0));
        }
        assert!(doubt.is_certain());
        let text = doubt.reason().unwrap().to_string();
        assert_eq!(text, "it listens on port 90, 9000; set `port = 90` in thaw.toml");
    }

    #[test]
    fn a_thread_that_never_rests_is_named() {
        let mut doubt = Doubt::new(Some(80));
        doubt.heard(&described(&[80], 2));
        assert!(!doubt.is_certain());
        let text = doubt.reason().unwrap().to_string();
        assert!(text.contains("thread `a\\u{1b}[m` of process 7"), "{text}");
    }

    #[test]
    fn who_need_not_listen_is_not_asked() {
        let mut doubt = Doubt::new(None);
        assert!(!doubt.asks(Duration::from_secs(100)));
        doubt.heard(&described(&[80], 0));
        assert_eq!(doubt.reason(), None);
    }
}
