//! Signal numbers (signal(7)).

use crate::args::SignalNumber;
use crate::errno::{Errno, Result};

/// Number of signals; they count from 1.
pub const SIGNAL_COUNT: u32 = 64;
/// First real-time signal, as the kernel counts.
const SIGRTMIN: u32 = 32;

/// A signal: a number from 1 to [`SIGNAL_COUNT`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, bytemuck::NoUninit)]
#[repr(transparent)]
pub struct Signal(u32);

impl Signal {
    /// The signal with a number, if there is one.
    pub const fn from_number(number: u32) -> Option<Self> {
        if 1 <= number && number <= SIGNAL_COUNT { Some(Self(number)) } else { None }
    }

    /// Its number.
    pub const fn number(self) -> u32 {
        self.0
    }

    /// Where it stands in a table of all signals.
    pub const fn index(self) -> usize {
        self.0 as usize - 1
    }

    /// Whether it is queued as often as it is sent (signal(7), "Real-time signals").
    pub fn is_real_time(self) -> bool {
        self.0 >= SIGRTMIN
    }
}

impl SignalNumber {
    /// The signal; `EINVAL` if there is none.
    pub fn signal(self) -> Result<Signal> {
        Signal::from_number(self.0).ok_or(Errno::EINVAL)
    }

    /// As [`SignalNumber::signal`], but 0 is allowed: nothing is sent, and the call only tells
    /// whether it could be (kill(2)).
    pub fn or_probe(self) -> Result<Option<Signal>> {
        if self.0 == 0 { Ok(None) } else { self.signal().map(Some) }
    }
}

macro_rules! signals {
    ($($name:ident $number:literal)*) => {
        $(#[allow(missing_docs)] pub const $name: Signal = Signal($number);)*
    };
}

signals! {
    SIGHUP 1
    SIGINT 2
    SIGQUIT 3
    SIGILL 4
    SIGTRAP 5
    SIGABRT 6
    SIGBUS 7
    SIGFPE 8
    SIGKILL 9
    SIGSEGV 11
    SIGPIPE 13
    SIGALRM 14
    SIGCHLD 17
    SIGCONT 18
    SIGSTOP 19
    SIGTSTP 20
    SIGTTIN 21
    SIGTTOU 22
    SIGURG 23
    SIGXCPU 24
    SIGXFSZ 25
    SIGVTALRM 26
    SIGPROF 27
    SIGWINCH 28
    SIGIO 29
    SIGSYS 31
}

/// A set of signals: bit `n - 1` is signal `n`.
pub type SignalSet = u64;

/// The bit of a signal.
pub const fn bit(signal: Signal) -> SignalSet {
    1 << signal.index()
}

/// Signals that cannot be blocked, caught or ignored.
pub const UNBLOCKABLE: SignalSet = bit(SIGKILL) | bit(SIGSTOP);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_signals_are_signals() {
        assert_eq!(SignalNumber(64).signal().map(bit), Ok(1 << 63));
        assert_eq!(SignalNumber(65).or_probe(), Err(Errno::EINVAL));
        assert_eq!(SignalNumber(0).or_probe(), Ok(None));
        assert_eq!(SignalNumber(0).signal(), Err(Errno::EINVAL));
        assert_eq!(SignalNumber(u32::MAX).or_probe(), Err(Errno::EINVAL));
    }
}
