//! Instances that somebody wants awake: the control plane, or a client that is connected to one and sends
//! something.

use super::waking::{Waking, ended_asleep};
use crate::instance::{Client, End, InstanceState, Outcome};
use crate::reactor::watch;
use crate::service::Service;
use crate::service::place::PlaceError;
use std::future::poll_fn;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::task::Poll;
use std::time::{Duration, Instant};
use tokio::io::unix::AsyncFd;
use tokio::time::{sleep, timeout_at};

/// How long until it is looked again whether there is room for one that is wanted.
const ROOM_AGAIN: Duration = Duration::from_millis(50);
/// How long one may take to wake for the control plane.
const WAKE_PATIENCE: Duration = Duration::from_secs(30);

/// Waits until one of the clients of an instance that is asleep sends something or goes away, and
/// wakes the instance.
pub(super) async fn watch_clients(service: Arc<Service>, id: u64, clients: Vec<Arc<Client>>) {
    let mut watched = Vec::new();
    for client in clients {
        match client.socket.try_clone().and_then(watch) {
            Ok(socket) => watched.push(socket),
            // Nobody would hear of this client: that is taken for a byte of it.
            Err(_) => {
                watched.clear();
                break;
            }
        }
    }
    if !watched.is_empty() {
        poll_fn(|context| {
            let is_ready = |socket: &AsyncFd<OwnedFd>| socket.poll_read_ready(context).is_ready();
            if watched.iter().any(is_ready) { Poll::Ready(()) } else { Poll::Pending }
        })
        .await;
    }
    drop(watched);
    // This task ends with the sleep.
    tokio::spawn(async move { service.wake_for_client(id).await });
}

impl Service {
    /// Has an instance run if it is asleep; how long that took if it was.
    ///
    /// # Errors
    /// One sentence for the operator; it sleeps on, or is lost.
    pub async fn wake_if_asleep(
        self: &Arc<Self>,
        id: Option<u64>,
    ) -> Result<Option<(u64, Duration)>, String> {
        let began = Instant::now();
        let asleep = self.slots().asleep.begin_to_wake(id);
        let Some(asleep) = asleep else {
            return match id {
                // Somebody else is waking it.
                Some(id) if self.is_asleep(id) => {
                    self.wait_until_awake(id).await.map(|()| Some((id, began.elapsed())))
                }
                _ => Ok(None),
            };
        };
        let id = asleep.id();
        let waking = Waking::new(self, asleep);
        let place = tokio::select! {
            place = self.place_to_wake(self.memory_to_wake(waking.asleep())) => place?,
            () = self.until_ended_asleep(id) => return Err(ended_asleep(id)),
        };
        let woken = self.wake_up(waking, None, place).await;
        woken.map_err(|error| match error {
            PlaceError::CannotWake(why) => why,
            error => format!("{error:?}"),
        })?;
        self.wait_until_awake(id).await?;
        Ok(Some((id, began.elapsed())))
    }

    /// Waits until an instance is none of those that are asleep.
    async fn until_ended_asleep(&self, id: u64) {
        loop {
            let freed = self.freed.notified();
            tokio::pin!(freed);
            // What happens from now on is noticed.
            freed.as_mut().enable();
            if !self.is_asleep(id) {
                return;
            }
            freed.await;
        }
    }

    /// Waits until an instance that is being woken runs.
    async fn wait_until_awake(&self, id: u64) -> Result<(), String> {
        let deadline = tokio::time::Instant::now() + WAKE_PATIENCE;
        loop {
            let changed = self.changed.notified();
            let freed = self.freed.notified();
            tokio::pin!(changed, freed);
            // What happens from now on is noticed.
            changed.as_mut().enable();
            freed.as_mut().enable();
            let state = {
                let slots = self.slots();
                match slots.get(&id) {
                    Some(slot) => slot.state,
                    None if slots.asleep.is_waking(id) => InstanceState::Asleep,
                    None => InstanceState::Ending,
                }
            };
            match state {
                InstanceState::Booting | InstanceState::Asleep => {}
                InstanceState::Ending => {
                    return Err(format!(
                        "instance {id} has ended while it woke; `thaw logs {}` may say why",
                        self.name()
                    ));
                }
                _ => return Ok(()),
            }
            let either = async {
                tokio::select! {
                    () = changed => {}
                    () = freed => {}
                }
            };
            if timeout_at(deadline, either).await.is_err() {
                return Err(format!("instance {id} does not run yet; see `thaw ps`"));
            }
        }
    }

    /// A client that is connected to an instance which is asleep has sent something, or has gone:
    /// wakes the instance as soon as there is room for it.
    async fn wake_for_client(self: &Arc<Self>, id: u64) {
        let deadline = tokio::time::Instant::now() + self.config.limits.queue.0;
        loop {
            match self.wake_if_asleep(Some(id)).await {
                Ok(_) => return,
                Err(_) if !self.is_asleep(id) => return,
                Err(why) if tokio::time::Instant::now() >= deadline => {
                    tracing::warn!(function = %self.name(), instance = id, "disconnected the clients of an instance that is asleep: {why}");
                    let clients = self.slots().asleep.take_clients(id);
                    if let Some(clients) = clients {
                        clients.end(&Outcome::Gone(End::Failed(why)));
                        // Others may have it woken for them.
                        self.freed.notify_waiters();
                    }
                    return;
                }
                Err(_) => {}
            }
            sleep(ROOM_AGAIN).await;
        }
    }
}
