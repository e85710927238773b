//! Finding an instance for a connection.

use super::{Service, Slot};
use crate::boots::BootKind;
use crate::gateway::refusal::Refusal;
use crate::instance::{
    Change, Client, Connections, Delivery, Done, InstanceState, Keeper, LaunchError, Launched,
    Placed,
};
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::{OwnedSemaphorePermit, mpsc};
use tokio::time::{Instant, timeout_at};

/// Whether a connection could be placed at once.
#[derive(Debug)]
pub enum Placement {
    /// An instance has it.
    Placed(Placed),
    /// It has to wait: for capacity, or for a zygote. Nobody is told of its end.
    Later,
    /// No instance could be booted. Nobody is told of its end.
    Failed(LaunchError),
}

impl Service {
    /// The fast path: gives the connection to an instance if that takes no
    /// waiting at all; `done` is told what became of it. Does no disk access and takes
    /// short locks.
    pub(crate) fn place_now(self: &Arc<Self>, client: &Arc<Client>, done: Done) -> Placement {
        if self.shared.is_draining() {
            return Placement::Later;
        }
        let Ok(permit) = self.permits.clone().try_acquire_owned() else { return Placement::Later };
        let delivery = Delivery { client: client.clone(), permit, done };
        let delivery = match self.reuse(delivery) {
            Ok(placed) => return Placement::Placed(placed),
            Err(delivery) => delivery,
        };
        let Ok(capacity) = self.shared.capacity().try_acquire_owned() else {
            return Placement::Later;
        };
        if !self.launcher.is_ready() {
            return Placement::Later;
        }
        match self.launcher.launch(Some(client)) {
            Ok(launched) => Placement::Placed(self.adopt(launched, delivery, capacity)),
            Err(error) => Placement::Failed(error),
        }
    }

    /// The slow path: waits for capacity as long as the function allows; `done` is told
    /// what became of the connection.
    ///
    /// # Errors
    /// What the client is to be told.
    pub(crate) async fn place(
        self: &Arc<Self>,
        client: &Arc<Client>,
        done: Done,
    ) -> Result<Placed, Refusal> {
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
        let permit = permit.expect("the semaphore is never closed");
        let mut delivery = Delivery { client: client.clone(), permit, done };
        let capacity = loop {
            let changed = self.changed.notified();
            delivery = match self.reuse(delivery) {
                Ok(placed) => return Ok(placed),
                Err(delivery) => delivery,
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
            Ok(launched) => Ok(self.adopt(launched, delivery, capacity)),
            Err(error) => Err(Refusal::InstanceDied {
                function: self.name().to_string(),
                reason: error.to_string(),
            }),
        }
    }

    /// Gives the connection to a live instance with a free place: the one that
    /// was used last, so that the others can end.
    fn reuse(&self, delivery: Delivery) -> Result<Placed, Delivery> {
        if self.is_single_use() {
            return Err(delivery);
        }
        let Some((instance, held)) = self.reserve() else { return Err(delivery) };
        let placed = Placed { instance, waited: true };
        let Err(delivery) = held.hand_over(delivery, placed) else {
            self.connected.reused.inc();
            return Ok(placed);
        };
        // It has just ended, or reads nothing any more.
        self.kill(instance);
        Err(delivery)
    }

    /// A free place of a live instance, counted as taken.
    fn reserve(&self) -> Option<(u64, Arc<Connections>)> {
        let most = self.config.limits.concurrency.get();
        let mut slots = self.slots();
        let (id, slot) = slots.take_free(most)?;
        slot.connections += 1;
        slot.change(Change::Connections { connections: slot.connections });
        Some((id, slot.held.clone()))
    }

    /// Makes a launched instance, booted with a client's connection in it, one of the
    /// service's.
    fn adopt(
        self: &Arc<Self>,
        launched: Launched,
        first: Delivery,
        capacity: OwnedSemaphorePermit,
    ) -> Placed {
        let id = self.shared.next_id();
        let placed = Placed { instance: id, waited: launched.kind == BootKind::Ready };
        let (commands, receiver) = mpsc::unbounded_channel();
        let instance = &launched.instance;
        let held = Arc::new(Connections::new(instance.connector(), commands, &self.config));
        let slot = Slot {
            state: InstanceState::Booting,
            connections: 1,
            held: held.clone(),
            pid: instance.pid(),
            started: std::time::Instant::now(),
            served: 0,
            idle_since: None,
        };
        let client = first.client.clone();
        held.adopt(first, placed);
        let keeper = Keeper::new(id, self.clone(), launched, receiver, held, &client, capacity);
        let mut slots = self.slots();
        slots.insert(id, slot);
        slots.perhaps_free.insert(id);
        drop(slots);
        self.connected.booted.inc();
        tokio::spawn(keeper.run());
        placed
    }

    fn no_capacity(&self, reason: String) -> Refusal {
        Refusal::NoCapacity {
            function: self.name().to_string(),
            reason,
            retry_after: self.config.limits.queue.0.max(Duration::from_secs(1)),
        }
    }
}
