//! The kernel lock: one vCPU at a time is in the kernel.
//!
//! It is taken on entry and given up on the way back to the guest and while a
//! vCPU waits in the host. A sandbox with a single vCPU has no use for it and
//! pays nothing: the lock is inert until [`enable`] is called, which happens
//! before a second vCPU exists. The words that vCPUs wait on in the host are
//! shared by all host processes from then on and never move, as the arena does
//! when it becomes shared.
#![allow(unsafe_code)]

use core::sync::atomic::{
    AtomicBool, AtomicU32, AtomicU64, Ordering::Acquire, Ordering::Relaxed, Ordering::Release,
};

use thaw_abi::layout::BOOT_BASE;

use crate::errno::Result;
use crate::machine::{
    HostFd, HostFiles, Machine, Memory, PROT_READ, PROT_WRITE, Processes, Sharing, Vcpus,
};
use crate::memory::KernelRange;

static ENABLED: AtomicBool = AtomicBool::new(false);

/// A page of words, mapped by [`enable`].
const WORDS: u64 = BOOT_BASE + 0xa_0000;
const WORDS_SIZE: u64 = 4096;
/// Words that wake vCPUs; the first cache line is the lock's.
const FIRST_WAKE_WORD: u32 = 16;
const WAKE_WORDS: u32 = WORDS_SIZE as u32 / 4 - FIRST_WAKE_WORD;

const FREE: u32 = 0;
const TAKEN: u32 = 1;
/// Taken, and somebody waits in the host.
const CONTENDED: u32 = 2;
/// The kernel has panicked: whoever wants the lock ends its host process.
const DEAD: u32 = 3;

/// Looks at the word this often before waiting in the host: longer than most
/// stays in the kernel, shorter than a host call.
const SPINS: u32 = 200;

/// Looks at the word this often before it is taken again: longer than the host takes to wake somebody.
const WAKE_SPINS: u32 = 5_000;

/// Whether there may be other vCPUs.
pub fn is_enabled() -> bool {
    ENABLED.load(Relaxed)
}

/// Makes the lock real; the caller holds it afterwards.
pub fn enable() -> Result<()> {
    if !is_enabled() {
        // SAFETY: nobody uses the words before the lock is real.
        let words = unsafe { KernelRange::new(WORDS, WORDS_SIZE) };
        Machine::map_anonymous(words, PROT_READ | PROT_WRITE, Sharing::Shared)?;
        lock_word().store(TAKEN, Relaxed);
        ENABLED.store(true, Release);
    }
    Ok(())
}

/// The wake word with a number, once the lock is real. Some numbers have the same.
pub fn wake_word(number: u32) -> &'static AtomicU32 {
    word(FIRST_WAKE_WORD + number % WAKE_WORDS)
}

fn lock_word() -> &'static AtomicU32 {
    word(0)
}

fn word(index: u32) -> &'static AtomicU32 {
    // SAFETY: inside the page, which stays mapped once the lock is real.
    unsafe { AtomicU32::from_ptr((WORDS as *mut u32).add(index as usize)) }
}

/// What is to be woken when the lock is given up, which protects this: the index of a wake word, and
/// above it a descriptor plus 1 to which a byte is to be sent. It is in the lock's cache line.
fn later() -> &'static AtomicU64 {
    // SAFETY: two aligned words of the page, which stays mapped once the lock is real; nobody uses them as
    // anything else.
    unsafe { AtomicU64::from_ptr((WORDS as *mut u64).add(1)) }
}

/// Takes the lock.
#[inline]
pub fn acquire() {
    if is_enabled() && lock_word().compare_exchange(FREE, TAKEN, Acquire, Relaxed).is_err() {
        wait();
    }
}

#[cold]
fn wait() {
    let word = lock_word();
    for _ in 0..SPINS {
        core::hint::spin_loop();
        if word.load(Relaxed) == FREE
            && word.compare_exchange(FREE, TAKEN, Acquire, Relaxed).is_ok()
        {
            return;
        }
    }
    loop {
        match word.swap(CONTENDED, Acquire) {
            FREE => return,
            DEAD => die(),
            _ => Machine::wait(word, CONTENDED, None),
        }
    }
}

/// Leaves the lock to nobody: the kernel has panicked. Every vCPU of every host
/// process that wants it from now on ends its process.
pub fn abandon() {
    if is_enabled() {
        lock_word().store(DEAD, Release);
        Machine::wake(lock_word(), i32::MAX as u32);
    }
}

fn die() -> ! {
    abandon();
    Machine::exit(crate::panic::PANIC_EXIT_CODE)
}

/// Makes a host call that takes long without the lock, which the caller has.
pub fn unlocked<T>(call: impl FnOnce() -> T) -> T {
    release();
    let outcome = call();
    acquire();
    outcome
}

/// Lets one of those take the lock who wait for it or are to be woken, if there are any: for work that takes long and need not be
/// done at once. The caller has the lock before and after.
pub fn give_way() {
    let is_wanted = || lock_word().load(Relaxed) == CONTENDED || later().load(Relaxed) != 0;
    if is_enabled() && is_wanted() {
        release();
        // Whoever sleeps is woken, and would come too late.
        for _ in 0..WAKE_SPINS {
            core::hint::spin_loop();
            if lock_word().load(Relaxed) != FREE {
                break;
            }
        }
        acquire();
    }
}

/// Gives the lock up.
#[inline]
pub fn release() {
    if is_enabled() {
        if later().load(Relaxed) != 0 {
            return release_and_wake();
        }
        give_up();
    }
}

#[inline]
fn give_up() {
    let was = lock_word().swap(FREE, Release);
    if was != TAKEN {
        wake(was);
    }
}

#[cold]
fn release_and_wake() {
    let (index, fd) = take_later();
    give_up();
    wake_now(index, fd);
}

/// Wakes whoever sleeps at a wake word when the caller gives the lock up. Whoever is woken wants the lock
/// first of all, and would find it taken before, sleep again and have to be woken once more.
pub fn wake_later(wake_word: &'static AtomicU32) {
    let index = (wake_word.as_ptr() as u64 - WORDS) as u32 / size_of::<u32>() as u32;
    let (before, fd) = take_later();
    if before != index {
        wake_now(before, 0);
    }
    set_later(index, fd);
}

/// Sends a byte to whoever polls, in the same way.
pub fn send_later(fd: HostFd) {
    let (index, _) = take_later();
    set_later(index, fd.0 as u32 + 1);
}

/// Makes the wake-ups that wait for the lock to be given up: it was abandoned.
pub fn wake_at_once() {
    let (index, fd) = take_later();
    wake_now(index, fd);
}

fn set_later(index: u32, fd: u32) {
    if is_enabled() && lock_word().load(Relaxed) != DEAD {
        later().store(u64::from(fd) << 32 | u64::from(index), Relaxed);
    } else {
        wake_now(index, fd);
    }
}

fn take_later() -> (u32, u32) {
    if !is_enabled() {
        return (0, 0);
    }
    let both = later().load(Relaxed);
    later().store(0, Relaxed);
    (both as u32, (both >> 32) as u32)
}

fn wake_now(index: u32, fd: u32) {
    if index != 0 {
        // Others may have the same wake word: they look and sleep again.
        Machine::wake(word(index), i32::MAX as u32);
    }
    if fd != 0 {
        send_now(HostFd::new(fd as i32 - 1));
    }
}

/// Sends a byte to whoever polls, at once.
pub fn send_now(fd: HostFd) {
    // Full means that somebody has woken it already.
    let _ = Machine::send(fd, [1u8][..].into());
}

#[cold]
fn wake(was: u32) {
    if was == DEAD {
        die()
    }
    Machine::wake(lock_word(), 1);
}
