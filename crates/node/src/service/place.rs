//! Finding an instance for a connection: one that lives, at once or when it has a free place
//! (`reuse`), or one that is booted when there is room for it (`waiting`), which is the service's then
//! (`adopt`).

use super::Service;
use super::asleep::Beginning;
use super::reuse::Reuse;
use super::room::Claimed;
use super::waiting::Waited;
use crate::instance::{Client, Delivery, Done, LaunchError, NotNow, Place, Placed};
use crate::tenants::{Lease, Refused};
use crate::upstream::Upstream;
use std::sync::Arc;
use std::time::Duration;
use tokio::time::{Instant, timeout_at};

/// How long a boot waits for an instance that comes back, before it begins elsewhere.
const COMING_BACK_PATIENCE: Duration = Duration::from_millis(50);

/// Most requests of a version that wait until its image is unpacked.
pub(super) const WAITING_FOR_IMAGE_MAX: usize = 256;

/// Whether a connection could be placed at once.
pub enum Placement {
    /// An instance has it.
    Placed(Placed),
    /// It is not needed: there is one to an instance already. Nobody is told of its end.
    Idle(Upstream),
    /// It has to wait: for capacity, or for a zygote. Nobody is told of its end.
    Later,
    /// No instance could be booted. Nobody is told of its end.
    Failed(LaunchError),
}

/// What serves a connection.
pub(crate) enum Found {
    /// An instance has it.
    Placed(Placed),
    /// It is not needed: there is one to an instance already. Nobody is told of its end.
    Idle(Upstream),
}

/// Why no instance serves a connection.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum PlaceError {
    /// The instance has ended, or could not be booted; with the reason.
    InstanceDied(String),
    /// The node lacks a volume or a secret of the function; with the command that brings it.
    Lacking(String),
    /// A part of the function could not be fetched; with the reason.
    NotFetched(String),
    /// An instance that is asleep cannot be booted; with the reason.
    CannotWake(String),
    /// Every instance is busy and no more may be started.
    NoCapacity {
        /// Which limit is reached.
        reason: String,
        /// When to try again.
        retry_after: Duration,
    },
    /// The function's tenant has used up a quota.
    QuotaReached {
        /// Which quota is reached.
        reason: String,
        /// When to try again.
        retry_after: Duration,
    },
    /// Instances of the function have crashed too often.
    BackingOff {
        /// When to try again.
        retry_after: Duration,
    },
    /// The node is going down.
    Draining,
}

impl From<LaunchError> for PlaceError {
    fn from(error: LaunchError) -> Self {
        match error {
            LaunchError::Failed(why) => Self::InstanceDied(why),
            LaunchError::Lacking(why) => Self::Lacking(why),
        }
    }
}

impl Service {
    /// The fast path: gives the connection to an instance if that takes no
    /// waiting at all; `done` is told what became of it. Does no disk access and takes
    /// short locks.
    pub(crate) fn place_now(
        self: &Arc<Self>,
        client: &Arc<Client>,
        reuse: Reuse,
        done: Done,
    ) -> Placement {
        if self.shared.is_ending()
            || self.backs_off().is_some()
            || self.tenant.cpu().spent_for().is_some()
        {
            return Placement::Later;
        }
        let Ok(permit) = self.permits.clone().try_acquire_owned() else { return Placement::Later };
        let delivery = Delivery { client: client.clone(), permit, done };
        let delivery = match self.reuse(delivery, reuse) {
            Ok(Found::Placed(placed)) => return Placement::Placed(placed),
            Ok(Found::Idle(upstream)) => return Placement::Idle(upstream),
            Err(delivery) => delivery,
        };
        if !self.is_single_use() && self.asleep_count() > 0 {
            // To wake one takes reading its file.
            return Placement::Later;
        }
        let Ok(capacity) = self.shared.capacity().try_acquire_owned() else {
            return Placement::Later;
        };
        if !self.launcher.is_ready() {
            return Placement::Later;
        }
        let Some(claim) = self.claim_for_client() else { return Placement::Later };
        let Some(lease) = self.lease_now() else { return Placement::Later };
        let place = Claimed { claim, place: Place { _capacity: capacity, lease } };
        match self.launcher.launch_now(Some(client)) {
            Ok(launched) => Placement::Placed(self.adopt(launched, delivery, place)),
            Err(NotNow::WouldWait) => Placement::Later,
            Err(NotNow::Failed(error)) => Placement::Failed(error),
        }
    }

    /// The slow path: waits for capacity as long as the function allows; `done` is told
    /// what became of the connection.
    ///
    /// # Errors
    /// Why no instance has it.
    pub(crate) async fn place(
        self: &Arc<Self>,
        client: &Arc<Client>,
        reuse: Reuse,
        done: Done,
    ) -> Result<Found, PlaceError> {
        let deadline = Instant::now() + self.config.limits.queue.0;
        if self.shared.is_ending() {
            return Err(PlaceError::Draining);
        }
        if let Some(retry_after) = self.backs_off() {
            return Err(PlaceError::BackingOff { retry_after });
        }
        self.solvent()?;
        let Some(permit) = self.wait_for_place(deadline).await else {
            return Err(self.no_capacity(format!(
                "all {} instances are busy, {} connections each",
                self.config.limits.instances, self.config.limits.concurrency
            )));
        };
        let mut delivery = Delivery { client: client.clone(), permit, done };
        loop {
            self.wait_for_waking(deadline).await;
            let claim = match self.wait_for_claim(delivery, reuse, deadline).await? {
                Waited::Found(found) => return Ok(found),
                Waited::Room(unplaced, claim) => {
                    delivery = unplaced;
                    claim
                }
            };
            let lease = match self.wait_for_tenant(delivery, reuse, deadline).await? {
                Waited::Found(found) => return Ok(found),
                Waited::Room(unplaced, lease) => {
                    delivery = unplaced;
                    lease
                }
            };
            let capacity = match self.wait_for_node(delivery, reuse, deadline).await? {
                Waited::Found(found) => return Ok(found),
                Waited::Room(unplaced, capacity) => {
                    delivery = unplaced;
                    capacity
                }
            };
            // It may have been spent meanwhile.
            self.solvent()?;
            let mut place = Place { _capacity: capacity, lease };
            match (self.beginning(), claim) {
                (Beginning::Image, Some(claim)) => {
                    place.lease.shrink_to(self.memory());
                    self.wait_for_image().await?;
                    let placed = self.boot(delivery, Claimed { claim, place }).await;
                    return Ok(Found::Placed(placed?));
                }
                // The one that was to be woken for it was woken for another one.
                (Beginning::Image, None) => drop(place),
                // Another one than that for which there is room: one was woken meanwhile.
                (Beginning::File(waking), _)
                    if place.lease.memory() < self.memory_to_wake(waking.asleep())
                        && Instant::now() < deadline =>
                {
                    drop((waking, place));
                    tokio::task::yield_now().await;
                }
                (Beginning::File(waking), claim) => {
                    // It counts already.
                    drop(claim);
                    return self.wake_up(waking, Some(delivery), place).await.map(Found::Placed);
                }
                (Beginning::Later, _) if tokio::time::Instant::now() >= deadline => {
                    return Err(self.no_capacity(
                        "instances that were asleep take too long to wake".to_owned(),
                    ));
                }
                // Whoever wakes them has to have a turn.
                (Beginning::Later, _) => tokio::task::yield_now().await,
            }
        }
    }

    /// Waits until an image is open that is packed. It is not waited for in a thread, and by a
    /// bounded number.
    async fn wait_for_image(&self) -> Result<(), PlaceError> {
        let Some(opening) = self.launcher.clone().opening() else { return Ok(()) };
        let Ok(_waiting) = self.waiting_for_image.try_acquire() else {
            return Err(self.no_capacity(format!(
                "{WAITING_FOR_IMAGE_MAX} requests wait until its image is unpacked"
            )));
        };
        Ok(opening.await?)
    }

    /// Boots an instance, in one that comes back if that does not take too long.
    async fn boot(
        self: &Arc<Self>,
        delivery: Delivery,
        place: Claimed,
    ) -> Result<Placed, LaunchError> {
        let patience = Instant::now() + COMING_BACK_PATIENCE;
        loop {
            let coming_back = self.launcher.coming_back();
            match self.launcher.launch_now(Some(&delivery.client)) {
                Ok(launched) => return Ok(self.adopt(launched, delivery, place)),
                Err(NotNow::Failed(error)) => return Err(error),
                Err(NotNow::WouldWait) => {}
            }
            let Some(coming_back) = coming_back else { break };
            if timeout_at(patience, coming_back).await.is_err() {
                break;
            }
        }
        // Making a zygote blocks. It goes on if the client goes away, and its place stays taken.
        let service = self.clone();
        let boot = move || {
            let launched = service.launcher.launch(Some(&delivery.client))?;
            Ok(service.adopt(launched, delivery, place))
        };
        tokio::task::spawn_blocking(boot).await.expect("a launcher does not panic")
    }

    /// Bytes of memory that an instance may use.
    pub(super) fn memory(&self) -> u64 {
        self.config.limits.memory.bytes()
    }

    /// Room of the tenant for one more instance, if that takes no waiting.
    fn lease_now(&self) -> Option<Lease> {
        let room = self.tenant.room();
        room.try_enter(self.memory()).or_else(|| self.launcher.spare_room())
    }

    /// Refuses requests of a tenant that has spent its CPU time.
    fn solvent(&self) -> Result<(), PlaceError> {
        let Some(retry_after) = self.tenant.cpu().spent_for() else { return Ok(()) };
        let tenant = self.tenant.name();
        let quota = self.tenant.quota().cpu_time;
        let quota = quota.map_or(String::new(), |quota| format!(", {quota}"));
        let reason = format!("the CPU time of {tenant} is spent{quota}");
        Err(self.quota_reached(Refused::CpuTime, reason, retry_after))
    }

    pub(super) fn quota_reached(
        &self,
        why: Refused,
        reason: String,
        retry_after: Duration,
    ) -> PlaceError {
        self.tenant.note_refused(why);
        PlaceError::QuotaReached { reason, retry_after }
    }

    pub(super) fn no_capacity(&self, reason: String) -> PlaceError {
        PlaceError::NoCapacity {
            reason,
            retry_after: self.config.limits.queue.0.max(Duration::from_secs(1)),
        }
    }
}
