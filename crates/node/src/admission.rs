//! Whom the gateway takes in.
//!
//! Every client takes descriptors, and so does every instance. [`Admission`] counts the
//! clients, so that they never take those that the instances are promised. It also knows
//! on which connections the gateway waits for the client (for the first head, or for the
//! next request): when there are too many, the one that has waited longest makes room,
//! first on the listener that has most of them. A flood of silent clients so displaces
//! itself.

use rustix::process::{Resource, getrlimit};
use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::pin::pin;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use thaw_sandbox::volume_descriptors;
use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore};

/// Descriptors that the daemon needs besides those of instances and clients: its files,
/// listeners, the store, zygotes that wait.
const OWN_DESCRIPTORS: u64 = 512;
/// Descriptors of one instance, those of a connection that the gateway has with it and the
/// list of its outgoing connections included.
const INSTANCE_DESCRIPTORS: u64 = 9;
/// Descriptors of a client whose request is under way: its socket, and a pair of sockets
/// to an instance.
const CLIENT_DESCRIPTORS: u64 = 3;
/// Descriptors of a flow of datagrams: the client's socket and the instance's.
const FLOW_DESCRIPTORS: u64 = 2;
/// Clients that are taken in however few descriptors there are.
const CLIENTS_MIN: usize = 16;

/// Bytes of output that are kept for clients of functions that read standard input.
const OUTPUT_MAX: usize = 256 << 20;
/// How finely these are counted, in bytes.
pub(crate) const OUTPUT_UNIT: usize = 64 << 10;
/// How many units of them one function may take: others need some, too.
pub(crate) const OUTPUT_SHARE: usize = OUTPUT_MAX / OUTPUT_UNIT / 2;

/// The listener on which a client came: the name of the function whose own it is, or
/// nothing.
pub(crate) type Entrance = Arc<str>;

/// Counts clients, and knows those that are waited for.
pub struct Admission {
    most: usize,
    taken: AtomicUsize,
    freed: Notify,
    waiting: Mutex<Waiting>,
    busy: AtomicUsize,
    flows: Arc<Semaphore>,
    output: Arc<Semaphore>,
}

/// Connections that wait for their clients.
#[derive(Default)]
struct Waiting {
    /// Of each listener, by age.
    lines: HashMap<Entrance, BTreeMap<u64, Arc<Notify>>>,
    count: usize,
    next: u64,
}

/// A client's share of those that are taken in. Dropping it gives it back.
pub struct Admitted(Arc<Admission>);

impl fmt::Debug for Admitted {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Admitted")
    }
}

impl Drop for Admitted {
    fn drop(&mut self) {
        self.0.taken.fetch_sub(1, Ordering::SeqCst);
        // Several listeners may wait, so each place that is free wakes one.
        self.0.freed.notify_one();
    }
}

/// A request that is under way.
pub(crate) struct Busy(Arc<Admission>);

impl Drop for Busy {
    fn drop(&mut self) {
        self.0.busy.fetch_sub(1, Ordering::SeqCst);
    }
}

impl Admission {
    /// Takes in as many clients as this process has descriptors for, beside those of
    /// `instances`.
    pub fn new(instances: usize) -> Arc<Self> {
        // Without a limit there are more than anybody uses.
        let descriptors = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
        Self::of(clients(descriptors, instances))
    }

    /// Takes in at most so many clients.
    pub(crate) fn of(most: usize) -> Arc<Self> {
        Arc::new(Self {
            most,
            taken: AtomicUsize::new(0),
            freed: Notify::new(),
            waiting: Mutex::default(),
            busy: AtomicUsize::new(0),
            flows: Arc::new(Semaphore::new((most / 4).clamp(1, Semaphore::MAX_PERMITS))),
            output: Arc::new(Semaphore::new(OUTPUT_MAX / OUTPUT_UNIT)),
        })
    }

    /// Most clients at a time.
    pub fn most(&self) -> usize {
        self.most
    }

    /// Takes in a client, if there is room for it.
    pub(crate) fn admit(self: &Arc<Self>) -> Option<Admitted> {
        let admitted = self.taken.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |taken| {
            (taken < self.most).then_some(taken + 1)
        });
        admitted.is_ok().then(|| Admitted(self.clone()))
    }

    /// Waits until there is room for a client. The connection that has waited longest for
    /// its client ends for that.
    pub(crate) async fn make_room(self: &Arc<Self>) -> Admitted {
        loop {
            let mut freed = pin!(self.freed.notified());
            // In the line before it looks, so that no word of a place is lost.
            freed.as_mut().enable();
            if let Some(admitted) = self.admit() {
                return admitted;
            }
            self.waiting().displace();
            freed.await;
        }
    }

    /// A connection waits for its client; `displaced` hears when it has to end. Returns
    /// its number in the line.
    pub(crate) fn wait(&self, entrance: &Entrance, displaced: &Arc<Notify>) -> u64 {
        let mut waiting = self.waiting();
        let in_line = waiting.lines.get(entrance).map_or(0, BTreeMap::len);
        if in_line >= (self.most / 2).max(1) {
            waiting.displace_from(&entrance.clone());
        } else if waiting.count >= (self.most * 3 / 4).max(1) {
            waiting.displace();
        }
        waiting.next += 1;
        let number = waiting.next;
        waiting.count += 1;
        waiting.lines.entry(entrance.clone()).or_default().insert(number, displaced.clone());
        number
    }

    /// It waits no more.
    pub(crate) fn stop_waiting(&self, entrance: &Entrance, number: u64) {
        self.waiting().remove(entrance, number);
    }

    /// Ends all connections that wait for their clients.
    pub(crate) fn let_go_of_waiting(&self) {
        let lines = {
            let mut waiting = self.waiting();
            waiting.count = 0;
            std::mem::take(&mut waiting.lines)
        };
        lines.values().flat_map(BTreeMap::values).for_each(|displaced| displaced.notify_one());
    }

    /// Connections that wait for their clients.
    pub(crate) fn waiting_count(&self) -> usize {
        self.waiting().count
    }

    /// A routed request begins, or a connection begins to wait for an instance.
    pub(crate) fn begin(self: &Arc<Self>) -> Busy {
        self.busy.fetch_add(1, Ordering::SeqCst);
        Busy(self.clone())
    }

    /// Routed requests that are under way, and connections that wait for an instance.
    pub(crate) fn busy(&self) -> usize {
        self.busy.load(Ordering::SeqCst)
    }

    /// A share of the flows of datagrams that the node serves.
    pub(crate) fn flow(&self) -> Option<OwnedSemaphorePermit> {
        self.flows.clone().try_acquire_owned().ok()
    }

    /// Room for [`OUTPUT_UNIT`] bytes of output.
    pub(crate) fn output(&self) -> Option<OwnedSemaphorePermit> {
        self.output.clone().try_acquire_owned().ok()
    }

    fn waiting(&self) -> MutexGuard<'_, Waiting> {
        self.waiting.lock().expect("no holder panics")
    }
}

impl Waiting {
    fn remove(&mut self, entrance: &Entrance, number: u64) -> Option<Arc<Notify>> {
        let line = self.lines.get_mut(entrance)?;
        let found = line.remove(&number)?;
        if line.is_empty() {
            self.lines.remove(entrance);
        }
        self.count -= 1;
        Some(found)
    }

    /// Ends the oldest of the listener that has most.
    fn displace(&mut self) {
        let longest = self.lines.iter().max_by_key(|(_, line)| line.len());
        if let Some(entrance) = longest.map(|(entrance, _)| entrance.clone()) {
            self.displace_from(&entrance);
        }
    }

    fn displace_from(&mut self, entrance: &Entrance) {
        let oldest = self.lines.get(entrance).and_then(|line| line.keys().next().copied());
        if let Some(displaced) = oldest.and_then(|number| self.remove(entrance, number)) {
            displaced.notify_one();
        }
    }
}

/// How many clients there are descriptors for.
fn clients(descriptors: u64, instances: usize) -> usize {
    let promised = (instances as u64).saturating_mul(INSTANCE_DESCRIPTORS);
    let kept = OWN_DESCRIPTORS + volume_descriptors(descriptors);
    let left = descriptors.saturating_sub(kept).saturating_sub(promised);
    // Rather fewer instances than nobody to boot them for.
    let left = left.max(descriptors / 4);
    // Beside four clients there may be one flow.
    let each = 4 * CLIENT_DESCRIPTORS + FLOW_DESCRIPTORS;
    usize::try_from(left / each).unwrap_or(usize::MAX).saturating_mul(4).max(CLIENTS_MIN)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::pin::pin;
    use std::task::{Context, Poll, Waker};

    fn is_displaced(notify: &Notify) -> bool {
        let mut context = Context::from_waker(Waker::noop());
        pin!(notify.notified()).poll(&mut context) == Poll::Ready(())
    }

    fn line(admission: &Admission, entrance: &str, count: usize) -> Vec<Arc<Notify>> {
        let one = |_| {
            let notify = Arc::new(Notify::new());
            admission.wait(&entrance.into(), &notify);
            notify
        };
        (0..count).map(one).collect()
    }

    #[test]
    fn instances_and_volumes_are_promised_their_descriptors() {
        assert_eq!(clients(1 << 20, 1024), ((1 << 20) - 512 - 4096 - 9 * 1024) / 14 * 4);
        assert_eq!(clients(4096, 1024), 4096 / 4 / 14 * 4);
        assert_eq!(clients(0, 1024), CLIENTS_MIN);
        assert!(clients(u64::MAX, usize::MAX) > CLIENTS_MIN);
        for descriptors in [16_384_u64, 65_536, 1 << 20] {
            let most = clients(descriptors, 1024) as u64;
            let kept = OWN_DESCRIPTORS + volume_descriptors(descriptors);
            let taken = 3 * most + 2 * (most / 4) + kept + 9 * 1024;
            assert!(taken <= descriptors, "{descriptors}");
        }
    }

    #[test]
    fn no_more_are_admitted_than_there_is_room_for() {
        let admission = Admission::of(2);
        let (first, second) = (admission.admit(), admission.admit());
        assert!(first.is_some() && second.is_some() && admission.admit().is_none());
        drop(first);
        assert!(admission.admit().is_some());
    }

    #[test]
    fn each_place_that_is_free_wakes_one_of_those_who_wait() {
        let admission = Admission::of(2);
        let taken = [admission.admit(), admission.admit()];
        let mut context = Context::from_waker(Waker::noop());
        let (mut first, mut second) = (pin!(admission.make_room()), pin!(admission.make_room()));
        assert!(first.as_mut().poll(&mut context).is_pending());
        assert!(second.as_mut().poll(&mut context).is_pending());
        drop(taken);
        let held = first.as_mut().poll(&mut context);
        assert!(held.is_ready());
        assert!(second.as_mut().poll(&mut context).is_ready());
    }

    #[test]
    fn a_listener_with_too_many_silent_clients_displaces_its_oldest() {
        let admission = Admission::of(8);
        let other = line(&admission, "other", 1);
        let flood = line(&admission, "", 6);
        let displaced: Vec<_> = flood.iter().map(|notify| is_displaced(notify)).collect();
        assert_eq!(displaced, [true, true, false, false, false, false]);
        assert!(!is_displaced(&other[0]));
    }

    #[test]
    fn the_longest_line_makes_room_on_a_full_node() {
        let admission = Admission::of(8);
        let (long, short) = (line(&admission, "long", 4), line(&admission, "short", 3));
        assert_eq!(long.iter().filter(|notify| is_displaced(notify)).count(), 1);
        assert!(!short.iter().any(|notify| is_displaced(notify)));
        let (number, notify) = {
            let notify = Arc::new(Notify::new());
            (admission.wait(&"x".into(), &notify), notify)
        };
        admission.stop_waiting(&"x".into(), number);
        admission.let_go_of_waiting();
        assert!(!is_displaced(&notify) && is_displaced(&short[0]));
    }
}
