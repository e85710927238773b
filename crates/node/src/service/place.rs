//! Finding an instance for a connection.

use super::{Service, Slot};
use crate::boots::BootKind;
use crate::gateway::refusal::Refusal;
use crate::instance::{
    Change, Client, Command, Delivery, InstanceState, Keeper, LaunchError, Launched, Outcome,
};
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::{OwnedSemaphorePermit, mpsc, oneshot};
use tokio::time::{Instant, timeout_at};

/// A connection that an instance has.
#[derive(Debug)]
pub struct Ticket {
    /// Number of the instance.
    pub instance: u64,
    /// The instance was booted for this connection.
    pub fresh: bool,
    /// The instance had been waiting, and may have ended meanwhile.
    pub waited: bool,
    /// Resolves when the connection is done with.
    pub done: oneshot::Receiver<Outcome>,
}

/// Whether a connection could be placed at once.
#[derive(Debug)]
pub enum Placement {
    /// An instance has it.
    Placed(Ticket),
    /// It has to wait: for capacity, or for a zygote.
    Later,
    /// No instance could be booted.
    Failed(LaunchError),
}

impl Service {
    /// The fast path: gives the connection to an instance if that takes no
    /// waiting at all. Does no disk access and takes one short lock.
    pub fn place_now(self: &Arc<Self>, client: &Arc<Client>) -> Placement {
        if self.shared.is_draining() {
            return Placement::Later;
        }
        let Ok(permit) = self.permits.clone().try_acquire_owned() else { return Placement::Later };
        let permit = match self.reuse(client, permit) {
            Ok(ticket) => return Placement::Placed(ticket),
            Err(permit) => permit,
        };
        let Ok(capacity) = self.shared.capacity().try_acquire_owned() else {
            return Placement::Later;
        };
        if !self.launcher.is_ready() {
            return Placement::Later;
        }
        match self.launcher.launch(Some(client)) {
            Ok(launched) => Placement::Placed(self.adopt(launched, client, permit, capacity)),
            Err(error) => Placement::Failed(error),
        }
    }

    /// The slow path: waits for capacity as long as the function allows.
    ///
    /// # Errors
    /// What the client is to be told.
    pub async fn place(self: &Arc<Self>, client: &Arc<Client>) -> Result<Ticket, Refusal> {
        let deadline = Instant::now() + self.config.limits.queue.0;
        if self.shared.is_draining() {
            return Err(Refusal::Draining);
        }
        let permit = self.permits.clone().acquire_owned();
        let Ok(permit) = timeout_at(deadline, permit).await else {
            return Err(self.no_capacity(format!(
                "all {} instances are busy, {} connections each",
                self.config.limits.instances, self.config.limits.concurrency
            )));
        };
        let mut permit = permit.expect("the semaphore is never closed");
        let capacity = loop {
            let changed = self.changed.notified();
            permit = match self.reuse(client, permit) {
                Ok(ticket) => return Ok(ticket),
                Err(permit) => permit,
            };
            if let Ok(capacity) = self.shared.capacity().try_acquire_owned() {
                break capacity;
            }
            // Somebody else's idle instance may hold what is wanted here.
            self.shared.evict_idlest();
            tokio::select! {
                capacity = self.shared.capacity().acquire_owned() => {
                    break capacity.expect("the semaphore is never closed");
                }
                () = changed => {}
                () = tokio::time::sleep_until(deadline) => {
                    return Err(self.no_capacity(
                        "this node runs as many instances as it may".to_owned(),
                    ));
                }
            }
        };
        let launched = match self.launcher.is_ready() {
            true => self.launcher.launch(Some(client)),
            // Making a zygote blocks.
            false => {
                let (launcher, client) = (self.launcher.clone(), client.clone());
                let launch = move || launcher.launch(Some(&client));
                tokio::task::spawn_blocking(launch).await.expect("a launcher does not panic")
            }
        };
        match launched {
            Ok(launched) => Ok(self.adopt(launched, client, permit, capacity)),
            Err(error) => Err(Refusal::InstanceDied {
                function: self.name().to_string(),
                reason: error.to_string(),
            }),
        }
    }

    /// Gives the connection to a live instance with a free place: the one that
    /// was used last, so that the others can end.
    fn reuse(
        &self,
        client: &Arc<Client>,
        permit: OwnedSemaphorePermit,
    ) -> Result<Ticket, OwnedSemaphorePermit> {
        if self.is_single_use() {
            return Err(permit);
        }
        let most = self.config.limits.concurrency.get();
        let mut slots = self.slots();
        let Some((id, slot)) = slots.take_free(most) else { return Err(permit) };
        let (done, receiver) = oneshot::channel();
        let delivery = Delivery { client: client.clone(), done, permit };
        if let Err(refused) = slot.commands.send(Command::Connect(delivery)) {
            // Its keeper has just ended; the slot is about to vanish.
            slot.end();
            let Command::Connect(delivery) = refused.0 else { unreachable!("sent above") };
            return Err(delivery.permit);
        }
        slot.connections += 1;
        slot.change(Change::Connections { connections: slot.connections });
        Ok(Ticket { instance: id, fresh: false, waited: true, done: receiver })
    }

    /// Makes a launched instance one of the service's.
    fn adopt(
        self: &Arc<Self>,
        launched: Launched,
        client: &Arc<Client>,
        permit: OwnedSemaphorePermit,
        capacity: OwnedSemaphorePermit,
    ) -> Ticket {
        let id = self.shared.next_id();
        let waited = launched.kind == BootKind::Ready;
        let (commands, receiver) = mpsc::unbounded_channel();
        let slot = Slot {
            state: InstanceState::Booting,
            connections: 1,
            commands,
            pid: launched.instance.pid(),
            started: std::time::Instant::now(),
            served: 0,
            idle_since: None,
        };
        let mut slots = self.slots();
        slots.insert(id, slot);
        slots.perhaps_free.insert(id);
        drop(slots);
        let (done, ticket) = oneshot::channel();
        let first = Delivery { client: client.clone(), done, permit };
        let keeper = Keeper::new(id, self.clone(), launched, receiver, first, capacity);
        tokio::spawn(keeper.run());
        Ticket { instance: id, fresh: true, waited, done: ticket }
    }

    fn no_capacity(&self, reason: String) -> Refusal {
        Refusal::NoCapacity {
            function: self.name().to_string(),
            reason,
            retry_after: self.config.limits.queue.0.max(Duration::from_secs(1)),
        }
    }
}
