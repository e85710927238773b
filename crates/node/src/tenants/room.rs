//! How many instances the functions of a tenant have together, and who waits until there
//! may be one more.

use super::Unmet;
use std::collections::{BTreeMap, VecDeque};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use thaw_home::config::{ByteSize, Quota};
use tokio::sync::futures::Notified;
use tokio::sync::{Notify, oneshot};

/// Room for a tenant's instances. Each takes a [`Lease`] of it, and so does everything that
/// is kept for the next boots.
///
/// Those who wait are served as they came, whatever memory they need: a large instance
/// does not starve behind small ones. Nobody overtakes them on the fast path.
#[derive(Debug, Default)]
pub struct Room {
    state: Mutex<State>,
    /// The same as the length of `State::waiting`.
    waiting: AtomicUsize,
    /// Something has changed by which somebody who waits can make room.
    stirred: Notify,
}

#[derive(Debug, Default)]
struct State {
    instances_max: Option<u32>,
    memory_max: Option<u64>,
    instances: u32,
    memory: u64,
    /// What is taken, by the numbers of leases; the sum is above.
    leases: BTreeMap<u64, Held>,
    next_lease: u64,
    waiting: VecDeque<Waiting>,
}

/// What one lease takes.
#[derive(Clone, Copy, Debug)]
struct Held {
    taken: Taken,
    /// It is about to be given back.
    is_ending: bool,
}

#[derive(Debug)]
struct Waiting {
    ticket: u64,
    memory: u64,
    grant: oneshot::Sender<Lease>,
}

/// The room that one instance takes, or memory beside instances, given back when it is dropped.
#[derive(Debug)]
pub struct Lease {
    room: Arc<Room>,
    number: u64,
    memory: u64,
}

/// Says of a lease that it is about to be given back, from elsewhere.
#[derive(Clone, Debug)]
pub(crate) struct Ending {
    room: Arc<Room>,
    number: u64,
}

/// A turn in the line for room. Dropping it leaves the line.
#[derive(Debug)]
pub(crate) struct Turn {
    room: Arc<Room>,
    ticket: u64,
    granted: oneshot::Receiver<Lease>,
}

/// How much is taken.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Taken {
    /// Instances, with those that are kept ready, and templates.
    pub instances: u32,
    /// Sum of their memory limits, in bytes.
    pub memory: u64,
}

impl State {
    /// Which bound keeps one more instance of `memory` bytes out beside `taken`.
    fn unmet(&self, taken: Taken, memory: u64) -> Option<Unmet> {
        let instances = self.instances_max.filter(|most| taken.instances >= *most);
        let too_much = |most: &u64| taken.memory.saturating_add(memory) > *most;
        match (instances, self.memory_max.filter(too_much)) {
            (Some(most), _) => Some(Unmet::Instances { most }),
            (None, Some(most)) => Some(Unmet::Memory { most: ByteSize(most) }),
            (None, None) => None,
        }
    }

    fn taken(&self) -> Taken {
        Taken { instances: self.instances, memory: self.memory }
    }

    /// Takes room; the number of its lease.
    fn take(&mut self, instances: u32, memory: u64) -> u64 {
        self.instances += instances;
        self.memory += memory;
        let number = self.next_lease;
        self.next_lease += 1;
        let held = Held { taken: Taken { instances, memory }, is_ending: false };
        self.leases.insert(number, held);
        number
    }

    /// Has a lease take so many bytes of memory.
    fn set_memory(&mut self, number: u64, memory: u64) {
        let held = self.leases.get_mut(&number).expect("a lease is there until it is dropped");
        self.memory = self.memory - held.taken.memory + memory;
        held.taken.memory = memory;
    }

    fn give_back(&mut self, number: u64) {
        let held = self.leases.remove(&number).expect("a lease is dropped once");
        self.instances -= held.taken.instances;
        self.memory -= held.taken.memory;
    }

    /// Whether more is taken than there may be when what is about to end is given back.
    fn is_overdrawn(&self) -> bool {
        let is_beyond = |taken: Taken| {
            self.instances_max.is_some_and(|most| taken.instances > most)
                || self.memory_max.is_some_and(|most| taken.memory > most)
        };
        if !is_beyond(self.taken()) {
            return false;
        }
        let mut left = self.taken();
        for held in self.leases.values().filter(|held| held.is_ending) {
            left.instances -= held.taken.instances;
            left.memory -= held.taken.memory;
        }
        is_beyond(left)
    }
}

impl Room {
    /// Room for one more instance whose memory limit is `memory` bytes, if there is room
    /// and nobody waits for it.
    pub fn try_enter(self: &Arc<Self>, memory: u64) -> Option<Lease> {
        let mut state = self.state();
        if !state.waiting.is_empty() || state.unmet(state.taken(), memory).is_some() {
            return None;
        }
        let number = state.take(1, memory);
        Some(Lease { room: self.clone(), number, memory })
    }

    /// Room for `memory` bytes that the host keeps for an instance beside its own, if there is room
    /// and nobody waits for memory.
    pub(crate) fn try_keep(self: &Arc<Self>, memory: u64) -> Option<Lease> {
        let mut state = self.state();
        let needed = state.memory.saturating_add(memory);
        // Where memory has no bound, those who wait do so for something else.
        let is_short = |most: u64| !state.waiting.is_empty() || needed > most;
        if state.memory_max.is_some_and(is_short) {
            return None;
        }
        let number = state.take(0, memory);
        Some(Lease { room: self.clone(), number, memory })
    }

    /// Joins the line for room.
    pub(crate) fn queue(self: &Arc<Self>, memory: u64) -> Turn {
        static TICKETS: AtomicU64 = AtomicU64::new(0);
        let ticket = TICKETS.fetch_add(1, Ordering::Relaxed);
        let (grant, granted) = oneshot::channel();
        let mut state = self.state();
        state.waiting.push_back(Waiting { ticket, memory, grant });
        self.waiting.store(state.waiting.len(), Ordering::SeqCst);
        self.grant(state);
        Turn { room: self.clone(), ticket, granted }
    }

    /// Which bound keeps an instance of `memory` bytes out even if there is no other.
    pub(crate) fn never_fits(&self, memory: u64) -> Option<Unmet> {
        self.state().unmet(Taken::default(), memory)
    }

    /// Whether so many bytes are more than all instances may have together.
    pub(crate) fn never_keeps(&self, memory: u64) -> bool {
        self.state().memory_max.is_some_and(|most| memory > most)
    }

    /// Which bound keeps one more instance out now.
    pub(crate) fn unmet(&self, memory: u64) -> Option<Unmet> {
        let state = self.state();
        state.unmet(state.taken(), memory)
    }

    /// Whether more is taken than there may be, as after the quota was lowered, when what
    /// is about to end is given back.
    pub(crate) fn is_overdrawn(&self) -> bool {
        self.state().is_overdrawn()
    }

    /// How many instances are about to give their room back.
    pub(crate) fn ending(&self) -> usize {
        let state = self.state();
        state.leases.values().filter(|held| held.is_ending && held.taken.instances > 0).count()
    }

    /// How much is taken.
    pub fn taken(&self) -> Taken {
        self.state().taken()
    }

    /// Sets the bounds. What is taken stays so.
    pub(crate) fn set(self: &Arc<Self>, quota: &Quota) {
        let mut state = self.state();
        state.instances_max = quota.instances;
        state.memory_max = quota.memory.map(ByteSize::bytes);
        self.grant(state);
    }

    /// An instance has become idle, or is kept ready again: somebody who waits can end it.
    pub(crate) fn stir(&self) {
        if self.waiting.load(Ordering::SeqCst) > 0 {
            self.stirred.notify_one();
        }
    }

    /// Resolves when something has changed by which room can be made.
    pub(crate) fn stirred(&self) -> Notified<'_> {
        self.stirred.notified()
    }

    /// Number of those who wait.
    pub fn waiting(&self) -> usize {
        self.waiting.load(Ordering::SeqCst)
    }

    /// Gives room back as `change` says.
    fn release(self: &Arc<Self>, change: impl FnOnce(&mut State)) {
        let mut state = self.state();
        change(&mut state);
        self.grant(state);
        // The next one may need more than that.
        self.stir();
    }

    fn leave(self: &Arc<Self>, ticket: u64) {
        let mut state = self.state();
        state.waiting.retain(|waiting| waiting.ticket != ticket);
        self.waiting.store(state.waiting.len(), Ordering::SeqCst);
        // It may have been the one that the others waited for.
        self.grant(state);
        // Or it has heard of what the next one can use.
        self.stir();
    }

    /// Gives room to those who wait, as far as it lasts.
    fn grant(self: &Arc<Self>, mut state: MutexGuard<'_, State>) {
        let mut granted = Vec::new();
        while let Some(next) = state.waiting.front() {
            let memory = next.memory;
            if state.unmet(state.taken(), memory).is_some() {
                break;
            }
            let number = state.take(1, memory);
            let next = state.waiting.pop_front().expect("it is in front");
            granted.push((next.grant, Lease { room: self.clone(), number, memory }));
        }
        if granted.is_empty() {
            return;
        }
        self.waiting.store(state.waiting.len(), Ordering::SeqCst);
        drop(state);
        for (grant, lease) in granted {
            // Who has just lost patience gives it back, outside of the lock.
            drop(grant.send(lease));
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("no holder panics")
    }
}

impl Lease {
    /// Bytes of memory that it takes.
    pub(crate) fn memory(&self) -> u64 {
        self.memory
    }

    /// Takes as much memory as is said, more or less than before.
    ///
    /// # Errors
    /// There is no room for more, beside what others have and those who wait; what the tenant may
    /// have. Nothing changes.
    pub(crate) fn resize(&mut self, memory: u64) -> Result<(), Option<ByteSize>> {
        let more = memory.saturating_sub(self.memory);
        if more > 0 {
            let mut state = self.room.state();
            let needed = state.memory.saturating_add(more);
            if !state.waiting.is_empty() || state.memory_max.is_some_and(|most| needed > most) {
                return Err(state.memory_max.map(ByteSize));
            }
            state.set_memory(self.number, memory);
        } else if memory < self.memory {
            self.room.release(|state| state.set_memory(self.number, memory));
        }
        self.memory = memory;
        Ok(())
    }

    /// Whether the tenant has more than it may, as after its quota was lowered.
    pub(crate) fn is_beyond_quota(&self) -> bool {
        self.room.is_overdrawn()
    }

    /// Takes so many bytes out of it, or all that it has, to be given back by themselves.
    pub(crate) fn split_off(&mut self, memory: u64) -> Self {
        let memory = memory.min(self.memory);
        self.memory -= memory;
        let mut state = self.room.state();
        state.set_memory(self.number, self.memory);
        let number = state.take(0, memory);
        drop(state);
        Self { room: self.room.clone(), number, memory }
    }

    /// What says that it is about to be given back.
    pub(crate) fn ending(&self) -> Ending {
        Ending { room: self.room.clone(), number: self.number }
    }

    /// Gives the memory back that it has beyond so many bytes.
    pub(crate) fn shrink_to(&mut self, memory: u64) {
        if self.memory > memory {
            drop(self.split_off(self.memory - memory));
        }
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        self.room.release(|state| state.give_back(self.number));
    }
}

impl Ending {
    /// The lease is about to be given back, or is not after all. Changes nothing if it is.
    pub fn announce(&self, is_ending: bool) {
        if let Some(held) = self.room.state().leases.get_mut(&self.number) {
            held.is_ending = is_ending;
        }
    }

    /// Announces it if the tenant has more than it may; says whether this has.
    pub fn announce_if_overdrawn(&self) -> bool {
        let mut state = self.room.state();
        if !state.is_overdrawn() {
            return false;
        }
        let held = state.leases.get_mut(&self.number).filter(|held| !held.is_ending);
        held.map(|held| held.is_ending = true).is_some()
    }
}

impl Turn {
    /// Resolves when it is its turn and there is room. Cancel safe.
    pub async fn lease(&mut self) -> Lease {
        (&mut self.granted).await.expect("the line keeps the sender until it grants")
    }

    /// The same without waiting.
    pub fn try_lease(&mut self) -> Option<Lease> {
        self.granted.try_recv().ok()
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        self.room.leave(self.ticket);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    fn room(instances: Option<u32>, memory: Option<u64>) -> Arc<Room> {
        let room: Arc<Room> = Arc::default();
        room.set(&Quota { instances, memory: memory.map(ByteSize), ..Quota::default() });
        room
    }

    #[test]
    fn memory_that_is_kept_beside_instances_counts_in_their_memory_only() {
        let room = room(Some(1), Some(3 * MIB));
        let kept = room.try_keep(MIB).unwrap();
        assert_eq!(room.taken(), Taken { instances: 0, memory: MIB });
        let instance = room.try_enter(2 * MIB).unwrap();
        assert!(room.try_keep(1).is_none());
        assert!(room.try_keep(u64::MAX).is_none());
        assert!(room.never_keeps(3 * MIB + 1) && !room.never_keeps(3 * MIB));
        drop(kept);
        assert!(room.try_keep(MIB).is_some());
        drop(instance);
        assert_eq!(room.taken(), Taken::default());
    }

    #[test]
    fn what_an_instance_takes_can_change() {
        let room = room(None, Some(4 * MIB));
        let mut lease = room.try_enter(MIB).unwrap();
        lease.resize(3 * MIB).unwrap();
        let other = room.try_enter(MIB).unwrap();
        assert_eq!(lease.resize(4 * MIB), Err(Some(ByteSize(4 * MIB))));
        assert_eq!((lease.memory(), room.taken().memory), (3 * MIB, 4 * MIB));
        // Whoever waits gets what is given back, and nobody takes it before.
        let mut turn = room.queue(2 * MIB);
        drop(other);
        assert!(lease.resize(4 * MIB).is_err() && turn.try_lease().is_none());
        lease.resize(2 * MIB).unwrap();
        assert!(turn.try_lease().is_some());
        drop((lease, turn));
        assert_eq!(room.taken(), Taken::default());
    }

    #[test]
    fn those_who_wait_keep_nobody_from_memory_that_has_no_bound() {
        let room = room(Some(1), None);
        let _instance = room.try_enter(MIB).unwrap();
        let _turn = room.queue(MIB);
        assert!(room.try_keep(MIB).is_some());
        room.set(&Quota {
            instances: Some(1),
            memory: Some(ByteSize(9 * MIB)),
            ..Quota::default()
        });
        assert!(room.try_keep(MIB).is_none(), "whoever waits needs it, too");
    }

    #[test]
    fn a_lease_is_given_back_in_parts() {
        let room = room(Some(1), Some(3 * MIB));
        let mut lease = room.try_enter(3 * MIB).unwrap();
        let mut turn = room.queue(0);
        let kept = lease.split_off(MIB);
        assert_eq!((lease.memory(), kept.memory()), (2 * MIB, MIB));
        assert_eq!(room.taken(), Taken { instances: 1, memory: 3 * MIB });
        lease.shrink_to(MIB);
        lease.shrink_to(2 * MIB);
        assert_eq!(room.taken(), Taken { instances: 1, memory: 2 * MIB });
        drop(kept);
        assert!(turn.try_lease().is_none(), "the instance has its place still");
        drop(lease);
        assert!(turn.try_lease().is_some());
    }

    #[test]
    fn instances_and_memory_are_counted_until_they_are_given_back() {
        let room = room(Some(2), Some(3 * MIB));
        let first = room.try_enter(2 * MIB).unwrap();
        assert_eq!(room.unmet(2 * MIB), Some(Unmet::Memory { most: ByteSize(3 * MIB) }));
        assert!(room.try_enter(2 * MIB).is_none());
        let second = room.try_enter(MIB).unwrap();
        assert_eq!(room.taken(), Taken { instances: 2, memory: 3 * MIB });
        assert_eq!(room.unmet(0), Some(Unmet::Instances { most: 2 }));
        drop((first, second));
        assert_eq!(room.taken(), Taken::default());
        assert_eq!(room.never_fits(4 * MIB), Some(Unmet::Memory { most: ByteSize(3 * MIB) }));
        assert_eq!(room.never_fits(3 * MIB), None);
        assert_eq!(room.never_fits(u64::MAX), Some(Unmet::Memory { most: ByteSize(3 * MIB) }));
    }

    #[test]
    fn those_who_wait_are_served_as_they_came_and_nobody_overtakes_them() {
        let room = room(None, Some(4 * MIB));
        let small = [room.try_enter(2 * MIB).unwrap(), room.try_enter(2 * MIB).unwrap()];
        let mut large = room.queue(4 * MIB);
        let mut next = room.queue(MIB);
        let [one, other] = small;
        drop(one);
        assert!(large.try_lease().is_none() && next.try_lease().is_none());
        assert!(room.try_enter(MIB).is_none(), "it would starve the large one");
        drop(other);
        let lease = large.try_lease().unwrap();
        assert!(next.try_lease().is_none());
        drop(lease);
        assert!(next.try_lease().is_some());
        assert_eq!(room.waiting(), 0);
    }

    #[test]
    fn who_leaves_the_line_does_not_hold_up_the_others() {
        let room = room(Some(1), Some(2 * MIB));
        let lease = room.try_enter(MIB).unwrap();
        let turns: Vec<Turn> = (0..10_000).map(|_| room.queue(2 * MIB)).collect();
        let mut last = room.queue(MIB);
        assert_eq!(room.waiting(), 10_001);
        drop(turns);
        assert_eq!(room.waiting(), 1);
        // Granted to one that leaves before it hears of it.
        let unheard = room.queue(MIB);
        drop(lease);
        drop(last.try_lease().unwrap());
        drop(unheard);
        assert_eq!(room.taken(), Taken::default());
        assert!(room.try_enter(2 * MIB).is_some());
    }

    /// However many look at the same moment.
    #[test]
    fn no_more_end_than_a_lowered_quota_takes() {
        let room = room(None, None);
        let leases: Vec<_> = (0..5).map(|_| room.try_enter(10 * MIB).unwrap()).collect();
        let all: Vec<Ending> = leases.iter().map(Lease::ending).collect();
        assert!(all.iter().all(|ending| !ending.announce_if_overdrawn()));
        room.set(&Quota { memory: Some(ByteSize(35 * MIB)), ..Quota::default() });
        let announced = || all.iter().filter(|ending| ending.announce_if_overdrawn()).count();
        assert_eq!((announced(), announced()), (2, 0));
        assert!(!room.is_overdrawn());
        // One that stays after all.
        all[0].announce(false);
        assert_eq!((announced(), announced()), (1, 0));
        drop(leases);
        assert_eq!(room.taken(), Taken::default());
        all[0].announce(true);
        assert!(!room.is_overdrawn());
    }

    #[test]
    fn a_quota_that_is_raised_serves_those_who_wait() {
        let room = room(Some(0), None);
        let mut turn = room.queue(MIB);
        assert!(turn.try_lease().is_none());
        room.set(&Quota { instances: Some(1), ..Quota::default() });
        let lease = turn.try_lease().unwrap();
        room.set(&Quota { instances: Some(0), ..Quota::default() });
        assert!(room.is_overdrawn());
        drop(lease);
        assert!(!room.is_overdrawn());
    }

    #[test]
    fn whoever_waits_hears_that_room_can_be_made() {
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        runtime.block_on(async {
            let room = room(Some(1), None);
            // Nobody waits: nothing is kept for those who come later.
            room.stir();
            let _lease = room.try_enter(MIB).unwrap();
            let _turn = room.queue(MIB);
            let stirred = room.stirred();
            tokio::pin!(stirred);
            room.stir();
            stirred.await;
        });
    }

    #[tokio::test]
    async fn who_has_got_room_passes_on_what_it_has_heard() {
        let room = room(Some(1), None);
        let held = room.try_enter(MIB).unwrap();
        let (mut first, _second) = (room.queue(MIB), room.queue(MIB));
        drop(held);
        let _lease = first.try_lease().unwrap();
        room.stirred().await;
        assert!(!std::pin::pin!(room.stirred()).enable());
        drop(first);
        assert!(std::pin::pin!(room.stirred()).enable());
    }
}
