//! Who watches system calls, in one byte: a call that nobody watches reads no more than that.

use core::sync::atomic::{AtomicU8, Ordering::Relaxed};

use bitflags::bitflags;

bitflags! {
    /// Who watches.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub struct Watchers: u8 {
        /// Calls are printed.
        const PRINTED = 1;
        /// Calls are counted.
        const COUNTED = 2;
        /// A thread of the sandbox is traced (ptrace(2)).
        const TRACED = 4;
        /// A thread of the sandbox may not make all calls (seccomp(2)).
        const RESTRICTED = 8;
    }
}

static WATCHED: AtomicU8 = AtomicU8::new(0);

/// Those who watch.
#[inline]
pub fn watchers() -> Watchers {
    Watchers::from_bits_retain(WATCHED.load(Relaxed))
}

/// From now on these watch, and nobody else.
pub fn set(watchers: Watchers) {
    WATCHED.store(watchers.bits(), Relaxed);
}

/// These watch, too; who has until now.
pub fn add(watchers: Watchers) -> Watchers {
    Watchers::from_bits_retain(WATCHED.fetch_or(watchers.bits(), Relaxed))
}

/// These do not watch any more.
pub fn remove(watchers: Watchers) {
    WATCHED.fetch_and(!watchers.bits(), Relaxed);
}
