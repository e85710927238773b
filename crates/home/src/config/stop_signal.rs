//! The signal that asks a program to end.

use serde::{Deserialize, Deserializer, Serialize, Serializer, de};
use std::fmt;
use std::str::FromStr;

/// Signals by number, from 1 on (signal(7), x86-64).
const NAMES: [&str; 31] = [
    "SIGHUP",
    "SIGINT",
    "SIGQUIT",
    "SIGILL",
    "SIGTRAP",
    "SIGABRT",
    "SIGBUS",
    "SIGFPE",
    "SIGKILL",
    "SIGUSR1",
    "SIGSEGV",
    "SIGUSR2",
    "SIGPIPE",
    "SIGALRM",
    "SIGTERM",
    "SIGSTKFLT",
    "SIGCHLD",
    "SIGCONT",
    "SIGSTOP",
    "SIGTSTP",
    "SIGTTIN",
    "SIGTTOU",
    "SIGURG",
    "SIGXCPU",
    "SIGXFSZ",
    "SIGVTALRM",
    "SIGPROF",
    "SIGWINCH",
    "SIGIO",
    "SIGPWR",
    "SIGSYS",
];
/// The first and the last signal without a meaning of its own, as the C library counts them.
const REAL_TIME: (u8, u8) = (34, 64);

/// A signal that a program may take as a word to end. SIGKILL and SIGSTOP are none.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StopSignal(u8);

/// A text that names no such signal.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "`{0}` is no signal that a program can end at; write one such as \"SIGTERM\", \"SIGQUIT\" or \"SIGRTMIN+3\""
)]
pub struct UnknownSignal(String);

impl StopSignal {
    /// Its number (signal(7), x86-64).
    pub fn number(self) -> u32 {
        self.0.into()
    }
}

impl Default for StopSignal {
    /// SIGTERM.
    fn default() -> Self {
        Self(15)
    }
}

impl fmt::Display for StopSignal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match NAMES.get(usize::from(self.0) - 1) {
            Some(name) => f.write_str(name),
            None => write!(f, "SIGRTMIN+{}", self.0 - REAL_TIME.0),
        }
    }
}

impl FromStr for StopSignal {
    type Err = UnknownSignal;

    /// A name, with `SIG` before it or without, or a number: the forms of container images.
    fn from_str(text: &str) -> Result<Self, UnknownSignal> {
        let upper = text.trim().to_ascii_uppercase();
        let name = upper.strip_prefix("SIG").unwrap_or(&upper);
        let by_name = NAMES.iter().position(|known| &known[3..] == name).map(|at| at as u8 + 1);
        let real_time = |offset: &str| REAL_TIME.0.checked_add(offset.parse().ok()?);
        let number = by_name
            .or_else(|| name.strip_prefix("RTMIN+").and_then(real_time))
            .or_else(|| (name == "RTMIN").then_some(REAL_TIME.0))
            .or_else(|| upper.parse().ok());
        let is_usable = |number: &u8| match number {
            9 | 19 => false,
            1..=31 => true,
            _ => (REAL_TIME.0..=REAL_TIME.1).contains(number),
        };
        number.filter(is_usable).map(Self).ok_or_else(|| UnknownSignal(text.to_owned()))
    }
}

impl Serialize for StopSignal {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for StopSignal {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(de::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn signals_are_written_as_in_images() {
        for (text, number) in [
            ("SIGTERM", 15),
            ("quit", 3),
            ("SIGWINCH", 28),
            ("37", 37),
            ("SIGRTMIN+3", 37),
            ("RTMIN", 34),
        ] {
            let signal: StopSignal = text.parse().unwrap();
            assert_eq!(signal.number(), number, "{text}");
            assert_eq!(signal.to_string().parse(), Ok(signal), "{text}");
        }
        for wrong in [
            "",
            "SIGKILL",
            "SIGSTOP",
            "0",
            "32",
            "65",
            "SIGNONE",
            "SIGRTMIN+31",
            "SIGRTMIN+300",
            "-1",
        ] {
            assert_eq!(wrong.parse::<StopSignal>(), Err(UnknownSignal(wrong.to_owned())));
        }
    }
}
