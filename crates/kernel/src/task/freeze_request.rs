//! Who asks for the sandbox to be frozen, and who waits for it.

use core::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering::Relaxed};

use thaw_abi::control::{
    CAUSE_ASKED, CAUSE_CHECKPOINT, CAUSE_HOST, CAUSE_SIGNAL, CHECKPOINT_TWIN, Checkpoint,
    FLAG_ENTRY_ASKED, FLAG_FREEZE_AT_ENTRY, FLAG_START_PATH, Rest,
};

use super::signal::Signal;
use super::wait::{WaitQueue, wait_uninterruptibly};
use crate::errno::{Errno, Result};
use crate::state::{Config, kernel};

/// Why a freeze was asked for (`CAUSE_*`) that may wait for its moment; 0 if none was.
static REQUESTED: AtomicU32 = AtomicU32::new(0);
/// Whether the host has asked for one at once.
static AT_ONCE: AtomicBool = AtomicBool::new(false);

/// How many host processes have no memory yet. It changes under the kernel lock.
static MEMORY_AWAITED: AtomicU32 = AtomicU32::new(0);

/// Whether the sandbox may go on while a twin is read.
static MAY_HAVE_TWIN: AtomicBool = AtomicBool::new(false);

/// The number of the rest that the host asks for; 0 if it asks for none.
static REST: AtomicU64 = AtomicU64::new(0);
/// Its flags (`REST_*`).
static REST_FLAGS: AtomicU32 = AtomicU32::new(0);

/// The host asks for a rest as soon as no thread can run, in order to hibernate the sandbox.
pub fn request_rest(rest: &Rest) {
    REST_FLAGS.store(rest.flags, Relaxed);
    REST.store(rest.number, Relaxed);
}

/// The host wants no rest any more.
pub fn withdraw_rest() {
    REST.store(0, Relaxed);
}

/// Whether the host asks for a rest.
pub fn wants_rest() -> bool {
    REST.load(Relaxed) != 0
}

/// Whether somebody may wait for a moment at which no thread can run.
pub fn may_be_awaited() -> bool {
    wants_rest() || cause() != 0 || kernel().config.get().freezes_when_waiting()
}

/// Takes the rest that the host asks for, if it does.
pub fn take_rest() -> Option<Rest> {
    if REST.load(Relaxed) == 0 {
        return None;
    }
    let (number, flags) = (REST.swap(0, Relaxed), REST_FLAGS.load(Relaxed));
    Some(Rest { number, flags, reserved: 0 })
}

/// The host asks for a freeze as soon as no thread can run.
pub fn request() {
    REQUESTED.store(CAUSE_HOST, Relaxed);
}

/// The host asks for a freeze at once: no thread is to run until it has happened.
pub fn request_at_once(checkpoint: &Checkpoint) {
    MAY_HAVE_TWIN.store(checkpoint.flags & CHECKPOINT_TWIN != 0, Relaxed);
    AT_ONCE.store(true, Relaxed);
}

/// The host that has asked for a rest, or for a freeze at once, has ended; whether threads rest for
/// it.
pub fn host_renewed() -> bool {
    withdraw_rest();
    AT_ONCE.swap(false, Relaxed)
}

/// Whether the host lets the sandbox go on at once, and reads the memory of a twin.
pub fn may_have_twin() -> bool {
    MAY_HAVE_TWIN.load(Relaxed)
}

/// Whether threads that could run are to rest until the sandbox is frozen.
pub fn is_at_once() -> bool {
    AT_ONCE.load(Relaxed) && MEMORY_AWAITED.load(Relaxed) == 0
}

/// So many host processes have no memory yet. No thread rests for a freeze at once before they have,
/// since none can happen.
pub fn await_memory(host_processes: u32) {
    MEMORY_AWAITED.store(host_processes, Relaxed);
}

/// One of them has its memory now; whether all have.
pub fn memory_has_come() -> bool {
    MEMORY_AWAITED.fetch_sub(1, Relaxed) == 1
}

/// The program asks for a freeze (a write to `/dev/thaw`). `EAGAIN` until it has
/// happened; nothing to wait for if the host does not want one.
pub fn ask() -> Result<()> {
    ask_because(CAUSE_ASKED)
}

fn ask_because(cause: u32) -> Result<()> {
    if kernel().config.get().flags & FLAG_FREEZE_AT_ENTRY == 0 {
        return Ok(());
    }
    REQUESTED.store(cause, Relaxed);
    Err(Errno::EAGAIN)
}

/// Whether an interpreter is to be frozen when it looks for its program.
pub fn awaits_program() -> bool {
    const BOTH: u32 = FLAG_FREEZE_AT_ENTRY | FLAG_START_PATH;
    kernel().config.get().flags & BOTH == BOTH
}

/// An interpreter looks for its program: waits until it was frozen. In a copy, it makes its call again,
/// by which it finds what is in its memory then.
///
/// `EINTR`: the thread has to end. Otherwise `ERESTARTNOINTR`.
pub fn await_program() -> Errno {
    let waited = wait_uninterruptibly(happened(), || {
        // A copy is frozen at its entry point, and must not take this for that.
        if !awaits_program() {
            return Some(Ok(()));
        }
        let _ = ask();
        None
    });
    super::thread::current().needs_attention();
    waited.err().unwrap_or(Errno::ERESTARTNOINTR)
}

/// The program sends `signal`. If that is what it is to be frozen at, waits until
/// it has happened, says so, and the signal is not delivered.
pub fn takes_signal(signal: Signal) -> bool {
    if !kernel().config.get().freezes_at(signal) {
        return false;
    }
    // Only the end of the thread makes this fail.
    let _ = wait_uninterruptibly(happened(), || match ask_because(CAUSE_SIGNAL) {
        Err(Errno::EAGAIN) => None,
        outcome => Some(outcome),
    });
    true
}

/// The host sends `signal`: as [`takes_signal`], without waiting.
pub fn takes_signal_from_host(signal: Signal) -> bool {
    let takes = kernel().config.get().freezes_at(signal);
    if takes {
        REQUESTED.store(CAUSE_SIGNAL, Relaxed);
    }
    takes
}

impl Config {
    /// Whether `signal` freezes the program.
    fn freezes_at(&self, signal: Signal) -> bool {
        self.flags & FLAG_FREEZE_AT_ENTRY != 0 && signal.number() == self.entry_signal
    }

    /// Whether the first wait for a client freezes the program.
    pub fn freezes_when_waiting(&self) -> bool {
        self.flags & (FLAG_FREEZE_AT_ENTRY | FLAG_ENTRY_ASKED) == FLAG_FREEZE_AT_ENTRY
    }
}

/// Where to wait for a freeze to have happened.
pub fn happened() -> &'static WaitQueue {
    &kernel().frozen
}

/// Why a freeze was asked for (`CAUSE_*`); 0 if none was.
pub fn cause() -> u32 {
    if is_at_once() { CAUSE_CHECKPOINT } else { REQUESTED.load(Relaxed) }
}

/// The freeze that was asked for by that cause is about to happen.
pub fn done(cause: u32) {
    match cause {
        CAUSE_CHECKPOINT => AT_ONCE.store(false, Relaxed),
        _ => REQUESTED.store(0, Relaxed),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_freeze_at_once_comes_before_another_one_and_does_not_replace_it() {
        let _sandbox = crate::testing::Sandbox::new();
        request();
        request_at_once(&Checkpoint::default());
        assert_eq!((cause(), is_at_once()), (CAUSE_CHECKPOINT, true));
        done(CAUSE_CHECKPOINT);
        assert_eq!((cause(), is_at_once()), (CAUSE_HOST, false));
        done(CAUSE_HOST);
        assert_eq!(cause(), 0);
    }

    #[test]
    fn only_what_becomes_a_template_awaits_a_program() {
        let _sandbox = crate::testing::Sandbox::new();
        for (flags, awaits) in [
            (0, false),
            (FLAG_START_PATH, false),
            (FLAG_FREEZE_AT_ENTRY | FLAG_ENTRY_ASKED, false),
            (FLAG_FREEZE_AT_ENTRY | FLAG_START_PATH, true),
        ] {
            kernel().config.borrow_mut().flags = flags;
            assert_eq!(awaits_program(), awaits, "{flags:#x}");
        }
        kernel().config.borrow_mut().flags = FLAG_START_PATH;
        assert_eq!((await_program(), cause()), (Errno::ERESTARTNOINTR, 0));
    }

    #[test]
    fn nobody_rests_for_a_host_that_has_ended() {
        let _sandbox = crate::testing::Sandbox::new();
        request_rest(&Rest { number: 7, flags: 0, reserved: 0 });
        assert!(!host_renewed() && !wants_rest());
        request_at_once(&Checkpoint::default());
        assert!(host_renewed() && !is_at_once());
    }

    #[test]
    fn what_freezes_is_what_the_host_said() {
        let [ten, twelve] = [10, 12].map(|number| Signal::from_number(number).unwrap());
        let config = |flags, entry_signal| Config { flags, entry_signal, ..Config::default() };
        let waiting = config(FLAG_FREEZE_AT_ENTRY, 0);
        assert!(waiting.freezes_when_waiting());
        assert!(!waiting.freezes_at(ten) && !waiting.freezes_at(twelve));
        let signal = config(FLAG_FREEZE_AT_ENTRY | FLAG_ENTRY_ASKED, 12);
        assert!(!signal.freezes_when_waiting());
        assert!(signal.freezes_at(twelve) && !signal.freezes_at(ten));
        // A copy, and a program that nobody wants to freeze.
        let copy = config(0, 12);
        assert!(!copy.freezes_when_waiting() && !copy.freezes_at(twelve));
    }
}
