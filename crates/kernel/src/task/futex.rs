//! Futexes (futex(2)): waiting for words in guest memory.

use alloc::collections::{BTreeMap, VecDeque};
use alloc::sync::Arc;
use alloc::vec::Vec;
use core::sync::atomic::{AtomicBool, Ordering::Relaxed};

use super::scheduler;
use super::thread::{Thread, current, current_arc, current_process};
use super::wait::{Wake, wait_until};
use crate::errno::{Errno, Result};
use crate::platform::user::UserAddress;
use crate::state::kernel;
use crate::sync::KernelCell;
use crate::task::ids::Tid;
use crate::time::Instant;

/// What names a futex: processes that share memory share its futexes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Key {
    /// An address in one address space.
    Private(u64, u64),
    /// The same without `FUTEX_PRIVATE_FLAG`, which is another futex.
    Unshared(u64, u64),
    /// A place in shared memory: device and inode number of a file, or zeros;
    /// and the offset.
    Shared(u64, u64, u64),
}

/// Whether a futex may lie in shared memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scope {
    /// `FUTEX_PRIVATE_FLAG`.
    Private,
    /// Look at what is mapped there.
    Shared,
}

/// Those who wait on futexes.
pub type Futexes = Queues<Arc<Thread>>;

/// Waiters, which are `T`s, by futex and in order of arrival.
pub struct Queues<T> {
    waiters: KernelCell<BTreeMap<Key, VecDeque<Arc<Waiter<T>>>>>,
}

impl<T> Default for Queues<T> {
    fn default() -> Self {
        Self { waiters: KernelCell::default() }
    }
}

struct Waiter<T> {
    who: T,
    bitset: u32,
    /// Where it waits; a requeue changes it.
    key: KernelCell<Key>,
    woken: AtomicBool,
}

/// Bits that every waiter and every waker has (`FUTEX_BITSET_MATCH_ANY`).
pub const ANY: u32 = u32::MAX;

/// `FUTEX_WAITERS`: the word has waiters.
const WAITERS: u32 = 0x8000_0000;
/// `FUTEX_OWNER_DIED`.
const OWNER_DIED: u32 = 0x4000_0000;
/// `FUTEX_TID_MASK`.
const TID_MASK: u32 = 0x3fff_ffff;

/// The futex at an address; `EINVAL` if it is misaligned.
fn key_of(address: UserAddress, scope: Scope) -> Result<Key> {
    if address.0 & 3 != 0 {
        return Err(Errno::EINVAL);
    }
    address.check(4)?;
    let mm = current_process().mm();
    if scope == Scope::Private {
        return Ok(Key::Private(mm.id(), address.0));
    }
    // What lies there decides, so something has to.
    address.load_u32()?;
    Ok(match mm.shared_place(address.0) {
        Some((device, inode, offset)) => Key::Shared(device, inode, offset),
        None => Key::Unshared(mm.id(), address.0),
    })
}

/// Waits for a wake-up that shares a bit with `bitset`, if the word is what is expected.
pub fn wait(
    address: UserAddress,
    scope: Scope,
    expected: u32,
    bitset: u32,
    deadline: Option<Instant>,
) -> Result<u64> {
    if bitset == 0 {
        return Err(Errno::EINVAL);
    }
    let key = key_of(address, scope)?;
    if address.load_u32()? != expected {
        return Err(Errno::EAGAIN);
    }
    match wait_for_wake(key, bitset, deadline) {
        // signal(7): a wait that has a time-out is not begun again after a
        // handler. After a stop it is, with its whole time if that is relative.
        Err(Errno::ERESTARTSYS) if deadline.is_some() => Err(Errno::ERESTARTNOHAND),
        outcome => outcome.map(|()| 0),
    }
}

/// Waits in a queue until somebody takes the running thread out of it.
fn wait_for_wake(key: Key, bitset: u32, deadline: Option<Instant>) -> Result<()> {
    let waiter = kernel().futexes.add(current_arc(), key, bitset);
    let outcome = wait_until(&[], deadline, || waiter.woken.load(Relaxed).then_some(Ok(())));
    if outcome.is_err() {
        kernel().futexes.forget(&waiter);
    }
    outcome
}

impl<T> Queues<T> {
    /// Adds a waiter.
    fn add(&self, who: T, key: Key, bitset: u32) -> Arc<Waiter<T>> {
        let woken = AtomicBool::new(false);
        let waiter = Arc::new(Waiter { who, bitset, key: KernelCell::new(key), woken });
        self.waiters.borrow_mut().entry(key).or_default().push_back(waiter.clone());
        waiter
    }

    /// Removes a waiter, if it is still there.
    fn forget(&self, waiter: &Arc<Waiter<T>>) {
        let key = waiter.key.get();
        let mut waiters = self.waiters.borrow_mut();
        if let Some(queue) = waiters.get_mut(&key) {
            queue.retain(|other| !Arc::ptr_eq(other, waiter));
            if queue.is_empty() {
                waiters.remove(&key);
            }
        }
    }

    /// Takes up to `count` waiters out of a queue.
    fn take(&self, key: Key, count: u32, bitset: u32) -> Vec<Arc<Waiter<T>>> {
        let mut taken = Vec::new();
        let mut waiters = self.waiters.borrow_mut();
        if let Some(queue) = waiters.get_mut(&key) {
            queue.retain(|waiter| {
                let chosen = taken.len() < count as usize && waiter.bitset & bitset != 0;
                if chosen {
                    taken.push(waiter.clone());
                }
                !chosen
            });
            if queue.is_empty() {
                waiters.remove(&key);
            }
        }
        taken
    }

    /// Moves up to `count` waiters to the end of another queue, and returns how many.
    fn requeue(&self, from: Key, to: Key, count: u32) -> u64 {
        let moved = self.take(from, count, ANY);
        let moved_count = moved.len() as u64;
        if moved_count > 0 {
            let mut waiters = self.waiters.borrow_mut();
            let queue = waiters.entry(to).or_default();
            for waiter in moved {
                waiter.key.set(to);
                queue.push_back(waiter);
            }
        }
        moved_count
    }

    /// Whether somebody waits.
    fn has_waiters(&self, key: Key) -> bool {
        self.waiters.borrow_mut().contains_key(&key)
    }
}

fn wake_key(key: Key, count: u32, bitset: u32) -> u64 {
    let woken = kernel().futexes.take(key, count, bitset);
    for waiter in &woken {
        waiter.woken.store(true, Relaxed);
        scheduler::wake(&waiter.who, Wake::Woken);
    }
    woken.len() as u64
}

/// Wakes up to `count` waiters whose bit set shares a bit with `bitset`.
pub fn wake(address: UserAddress, count: u32, bitset: u32, scope: Scope) -> Result<u64> {
    if bitset == 0 {
        return Err(Errno::EINVAL);
    }
    Ok(wake_key(key_of(address, scope)?, count, bitset))
}

/// Wakes waiters and moves others to another futex.
pub fn requeue(
    from: UserAddress,
    wake_count: u32,
    move_count: u32,
    to: UserAddress,
    scope: Scope,
) -> Result<u64> {
    if (wake_count as i32) < 0 || (move_count as i32) < 0 {
        return Err(Errno::EINVAL);
    }
    let (from, to) = (key_of(from, scope)?, key_of(to, scope)?);
    let woken = wake_key(from, wake_count, ANY);
    Ok(woken + kernel().futexes.requeue(from, to, move_count))
}

/// `FUTEX_WAKE_OP`: changes a second word, wakes at the first, and at the
/// second if its old value compares as asked.
pub fn wake_op(
    first: UserAddress,
    first_count: u32,
    second_count: u32,
    second: UserAddress,
    encoded: u32,
    scope: Scope,
) -> Result<u64> {
    let (operation, comparison) = (encoded >> 28, encoded >> 24 & 0xf);
    let sign_extended = |bits: u32| ((bits << 20) as i32 >> 20) as u32;
    let (mut operand, compared) = (sign_extended(encoded >> 12), sign_extended(encoded));
    if operation & 8 != 0 {
        operand = 1u32.checked_shl(operand & 31).unwrap_or(0);
    }
    let (first_key, second_key) = (key_of(first, scope)?, key_of(second, scope)?);
    let new_value = |old: u32| match operation & 7 {
        0 => Some(operand),
        1 => Some(old.wrapping_add(operand)),
        2 => Some(old | operand),
        3 => Some(old & !operand),
        4 => Some(old ^ operand),
        _ => None,
    };
    if new_value(0).is_none() {
        return Err(Errno::ENOSYS);
    }
    let old = second.update_u32(new_value)?.unwrap_or_else(|unchanged| unchanged);
    let holds = match comparison {
        0 => old == compared,
        1 => old != compared,
        2 => (old as i32) < compared as i32,
        3 => old as i32 <= compared as i32,
        4 => old as i32 > compared as i32,
        5 => old as i32 >= compared as i32,
        _ => return Err(Errno::ENOSYS),
    };
    let mut woken = wake_key(first_key, first_count, ANY);
    if holds {
        woken += wake_key(second_key, second_count, ANY);
    }
    Ok(woken)
}

/// Takes a PI futex if it is free; `EAGAIN` if somebody has it, `EDEADLK` if
/// that is the caller.
pub fn try_lock_pi(address: UserAddress) -> Result<u64> {
    address.load_u32()?;
    let tid = current().own_number();
    let taken = address.update_u32(|old| match old & TID_MASK {
        0 => Some(old & (WAITERS | OWNER_DIED) | tid),
        _ => None,
    })?;
    match taken {
        Ok(_) => Ok(0),
        Err(old) if old & TID_MASK == tid => Err(Errno::EDEADLK),
        Err(_) => Err(Errno::EAGAIN),
    }
}

/// `FUTEX_LOCK_PI`. There are no priorities to inherit: the lock is handed to
/// waiters in order of arrival.
pub fn lock_pi(address: UserAddress, scope: Scope, deadline: Option<Instant>) -> Result<u64> {
    let key = key_of(address, scope)?;
    loop {
        match try_lock_pi(address) {
            Err(Errno::EAGAIN) => {}
            outcome => return outcome,
        }
        let marked = address.update_u32(|old| (old & TID_MASK != 0).then_some(old | WAITERS))?;
        let Ok(owner) = marked else { continue };
        let owner = owner & TID_MASK;
        if kernel().tasks.thread(Tid::from_caller(owner)).is_none() {
            return Err(Errno::ESRCH);
        }
        match wait_for_wake(key, ANY, deadline) {
            // The one who unlocks has put our id into the word.
            Ok(()) if address.load_u32()? & TID_MASK == current().own_number() => return Ok(0),
            Ok(()) => {}
            Err(Errno::ERESTARTSYS) => return Err(Errno::ERESTARTNOINTR),
            Err(error) => return Err(error),
        }
    }
}

/// `FUTEX_UNLOCK_PI`.
pub fn unlock_pi(address: UserAddress, scope: Scope) -> Result<u64> {
    let key = key_of(address, scope)?;
    if address.load_u32()? & TID_MASK != current().own_number() {
        return Err(Errno::EPERM);
    }
    hand_over(address, key, 0)
}

/// Gives a PI futex to the first waiter, or frees it.
fn hand_over(address: UserAddress, key: Key, died: u32) -> Result<u64> {
    let next = kernel().futexes.take(key, 1, ANY).into_iter().next();
    let more = kernel().futexes.has_waiters(key);
    let word = match &next {
        Some(waiter) => waiter.who.own_number() | if more { WAITERS } else { 0 },
        None => 0,
    };
    let outcome = address.update_u32(|_| Some(word | died));
    if let Some(waiter) = next {
        waiter.woken.store(true, Relaxed);
        scheduler::wake(&waiter.who, Wake::Woken);
    }
    outcome.map(|_| 0)
}

/// Longest list of robust futexes that is looked through (ROBUST_LIST_LIMIT).
const ROBUST_LIST_LIMIT: usize = 2048;

/// Frees the robust futexes that a thread holds when it leaves its memory
/// (Documentation/locking/robust-futexes.rst).
pub fn release_robust(thread: &Thread) {
    let head = UserAddress(thread.robust_list.load(Relaxed));
    if head.is_null() {
        return;
    }
    // An unusable list is the guest's problem: what can be freed is freed.
    let _ = release_list(thread, head);
}

fn release_list(thread: &Thread, head: UserAddress) -> Result<()> {
    const PI: u64 = 1;
    let offset: u64 = head.offset(8).read()?;
    let pending: u64 = head.offset(16).read()?;
    let mut entry: u64 = head.read()?;
    for _ in 0..ROBUST_LIST_LIMIT {
        if entry & !PI == head.0 {
            break;
        }
        let next = UserAddress(entry & !PI).read::<u64>();
        if entry != pending {
            mark_dead(thread, UserAddress((entry & !PI).wrapping_add(offset)), entry & PI != 0);
        }
        entry = next?;
    }
    if pending != 0 {
        mark_dead(thread, UserAddress((pending & !PI).wrapping_add(offset)), pending & PI != 0);
    }
    Ok(())
}

fn mark_dead(thread: &Thread, word: UserAddress, is_pi: bool) {
    let (Ok(key), Ok(private)) = (key_of(word, Scope::Shared), key_of(word, Scope::Private)) else {
        return;
    };
    if word.load_u32().is_ok_and(|value| value & TID_MASK == thread.own_number()) {
        if is_pi {
            let has_shared = kernel().futexes.has_waiters(key);
            let _ = hand_over(word, if has_shared { key } else { private }, OWNER_DIED);
            return;
        }
        let _ = word.update_u32(|old| Some(old & WAITERS | OWNER_DIED));
        if wake_key(key, 1, ANY) == 0 {
            wake_key(private, 1, ANY);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HERE: Key = Key::Private(1, 0x1000);
    const THERE: Key = Key::Shared(2, 3, 0x1000);

    fn names(taken: &[Arc<Waiter<u32>>]) -> Vec<u32> {
        taken.iter().map(|waiter| waiter.who).collect()
    }

    #[test]
    fn waiters_are_taken_in_order_and_by_their_bits() {
        let queues = Queues::default();
        for (who, bitset) in [(1, 1), (2, 2), (3, 3), (4, 1)] {
            queues.add(who, HERE, bitset);
        }
        queues.add(5, Key::Unshared(1, 0x1000), ANY);
        assert_eq!(names(&queues.take(HERE, 1, 2)), [2]);
        assert_eq!(names(&queues.take(HERE, 2, ANY)), [1, 3]);
        assert_eq!(names(&queues.take(HERE, u32::MAX, 2)), []);
        assert_eq!(names(&queues.take(HERE, u32::MAX, ANY)), [4]);
        assert!(!queues.has_waiters(HERE));
    }

    #[test]
    fn a_waiter_that_was_moved_is_forgotten_where_it_is() {
        let queues = Queues::default();
        let waiters: Vec<_> = (1..=3).map(|who| queues.add(who, HERE, ANY)).collect();
        assert_eq!(queues.requeue(HERE, THERE, 2), 2);
        assert_eq!(queues.requeue(Key::Private(1, 8), THERE, 2), 0);
        // As after a time-out: it must not be woken in place of another.
        queues.forget(&waiters[0]);
        queues.forget(&waiters[0]);
        assert_eq!(names(&queues.take(THERE, 2, ANY)), [2]);
        queues.forget(&waiters[2]);
        assert!(!queues.has_waiters(HERE) && !queues.has_waiters(THERE));
    }

    #[test]
    fn a_futex_is_moved_onto_itself() {
        let queues = Queues::default();
        for who in 1..=3 {
            queues.add(who, HERE, ANY);
        }
        assert_eq!(queues.requeue(HERE, HERE, 1), 1);
        assert_eq!(names(&queues.take(HERE, 3, ANY)), [2, 3, 1]);
    }
}
