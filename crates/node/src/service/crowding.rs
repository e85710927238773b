//! Idle connections make room for clients that wait.
//!
//! A connection that was handed over holds its place until it ends, since nobody but the
//! instance sees when its client asks again. When somebody waits for a place, the connections
//! that have been idle for longest are closed instead: a client has to expect that of a
//! connection on which it has nothing under way (RFC 9112 §9.5), and makes a new one.

use super::Service;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;
use tokio::sync::OwnedSemaphorePermit;
use tokio::time::{Instant, timeout_at};

/// How long a connection must have been idle to be closed for somebody else.
const IDLE_AFTER: Duration = Duration::from_secs(1);
/// How often it is looked for such connections while somebody waits.
const LOOK_EVERY: Duration = Duration::from_millis(50);

/// Who waits for a place of a function.
#[derive(Debug, Default)]
pub(super) struct Crowding {
    waiting: AtomicUsize,
    /// However many wait, one of them looks at a time.
    looked: Mutex<Option<Instant>>,
}

/// Somebody who waits.
struct Waiting<'a>(&'a Crowding);

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        self.0.waiting.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Crowding {
    fn wait(&self) -> Waiting<'_> {
        self.waiting.fetch_add(1, Ordering::Relaxed);
        Waiting(self)
    }

    /// Whether it is time to look, and for how many.
    fn is_due(&self, now: Instant) -> Option<usize> {
        let mut looked = self.looked.lock().expect("no holder panics");
        if looked.is_some_and(|looked| now.duration_since(looked) < LOOK_EVERY) {
            return None;
        }
        *looked = Some(now);
        Some(self.waiting.load(Ordering::Relaxed))
    }
}

impl Service {
    /// Waits until a connection more may be placed; `None`: until the deadline none might.
    pub(super) async fn wait_for_place(&self, deadline: Instant) -> Option<OwnedSemaphorePermit> {
        if let Ok(permit) = self.permits.clone().try_acquire_owned() {
            return Some(permit);
        }
        let _waiting = self.crowding.wait();
        // It keeps its turn however often somebody looks.
        let mut permit = std::pin::pin!(self.permits.clone().acquire_owned());
        loop {
            let now = Instant::now();
            if let Some(wanted) = self.crowding.is_due(now) {
                self.close_idle_connections(wanted);
            }
            match timeout_at(deadline.min(now + LOOK_EVERY), permit.as_mut()).await {
                Ok(permit) => return Some(permit.expect("the semaphore is never closed")),
                Err(_) if Instant::now() >= deadline => return None,
                Err(_) => {}
            }
        }
    }

    /// Has up to so many connections closed, those that have been idle for longest first.
    fn close_idle_connections(&self, wanted: usize) {
        let tables: Vec<_> = self.slots().values().map(|slot| slot.table.clone()).collect();
        let mut idle = Vec::new();
        for table in &tables {
            let connections = table.idle_for(&self.config, IDLE_AFTER);
            idle.extend(connections.into_iter().map(|(silence, client)| (silence, client, table)));
        }
        idle.sort_by_key(|(silence, ..)| std::cmp::Reverse(*silence));
        for (_, client, table) in idle.into_iter().take(wanted) {
            table.crowd_out(client.id);
        }
    }
}
