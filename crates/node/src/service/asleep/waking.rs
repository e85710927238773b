//! On the way back: the right to wake an instance, its boot from its file, and what becomes of one that
//! does not wake.

use super::sleepers::Sleeper;
use crate::asleep::Asleep;
use crate::boots::BootKind;
use crate::instance::{
    Command, ConnectionTable, Decrypted, Delivery, End, InstanceState, Launched, Outcome, Place,
    Placed, WakeError,
};
use crate::remote::Execs;
use crate::remote::exec::NewStreams;
use crate::remote::volumes::OwnVolumes;
use crate::service::held::use_egress;
use crate::service::place::PlaceError;
use crate::service::supervisor::Supervisor;
use crate::service::{Service, Slot, Slots};
use std::mem;
use std::sync::Arc;
use std::time::{Duration, Instant, UNIX_EPOCH};
use thaw_sandbox::EgressPolicy;
use tokio::sync::mpsc;
use tokio::time::timeout_at;

/// Why one does not wake that was ended while somebody was about to wake it.
pub(super) fn ended_asleep(id: u64) -> String {
    format!("instance {id} was ended before it woke")
}

/// The right to wake an instance, which sleeps on if it is dropped.
pub(in crate::service) struct Waking {
    service: Arc<Service>,
    asleep: Option<Arc<Asleep>>,
}

impl Waking {
    pub(in crate::service) fn new(service: &Arc<Service>, asleep: Arc<Asleep>) -> Self {
        Self { service: service.clone(), asleep: Some(asleep) }
    }

    pub(in crate::service) fn asleep(&self) -> &Arc<Asleep> {
        self.asleep.as_ref().expect("it is taken when this is dropped")
    }

    /// It is none of those that are asleep any more.
    fn done(mut self) -> Option<Sleeper> {
        let asleep = self.asleep.take()?;
        self.service.slots().asleep.remove(asleep.id())
    }
}

impl Drop for Waking {
    fn drop(&mut self) {
        let Some(asleep) = self.asleep.take() else { return };
        let mut slots = self.service.slots();
        slots.asleep.rest_again(&asleep);
        drop(slots);
        self.service.freed.notify_waiters();
    }
}

/// How a boot for a client is to begin.
pub(in crate::service) enum Beginning {
    /// From the image of the function.
    Image,
    /// From the file of an instance that is asleep.
    File(Waking),
    /// Not yet: an instance that is being woken will have a free place.
    Later,
}

impl Service {
    /// How a boot for a client is to begin, who has room for it.
    pub(in crate::service) fn beginning(self: &Arc<Self>) -> Beginning {
        let mut slots = self.slots();
        let most = self.config.limits.concurrency.get();
        match slots.wake_for_one_more(most) {
            Some(asleep) => Beginning::File(Waking::new(self, asleep)),
            // It has room for one more beside the client that wakes it.
            None if slots.asleep.are_waking() && most > 1 => Beginning::Later,
            None => Beginning::Image,
        }
    }

    /// Whether one that is asleep can be woken for one more client.
    pub(in crate::service) fn can_wake_one(&self) -> bool {
        let most = self.config.limits.concurrency.get();
        let slots = self.slots();
        slots.asleep.one_with_room(most, &slots.held).is_some()
    }

    /// Waits while instances are being woken that may have a free place then.
    pub(in crate::service) async fn wait_for_waking(&self, deadline: tokio::time::Instant) {
        if self.is_single_use() || self.config.limits.concurrency.get() == 1 {
            return;
        }
        loop {
            let freed = self.freed.notified();
            tokio::pin!(freed);
            // What happens from now on is noticed.
            freed.as_mut().enable();
            let will_be_free = {
                let slots = self.slots();
                let most = self.config.limits.concurrency.get();
                slots.asleep.are_waking() && slots.asleep.one_with_room(most, &slots.held).is_none()
            };
            if !will_be_free || timeout_at(deadline, freed).await.is_err() {
                return;
            }
        }
    }

    /// Boots an instance that is asleep, for a client or for nobody. The place has room for it and
    /// for its decrypted memory ([`Service::memory_to_wake`]).
    pub(in crate::service) async fn wake_up(
        self: &Arc<Self>,
        waking: Waking,
        first: Option<Delivery>,
        mut place: Place,
    ) -> Result<Placed, PlaceError> {
        let (launcher, asleep) = (self.launcher.clone(), waking.asleep().clone());
        let decrypted_len = asleep.decrypted_len();
        if place.lease.memory() < self.needs_awake(&asleep) {
            // The quota was lowered while it slept, or another one slept a moment ago.
            return Err(match self.never_wakes(asleep.id(), decrypted_len) {
                Some(why) => self.lose(waking, why),
                None => self.cannot_wake(
                    &waking,
                    "there is no room for its memory; it sleeps on, try again",
                ),
            });
        }
        let client = first.as_ref().map(|delivery| delivery.client.clone());
        let clients = self.slots().asleep.get(asleep.id()).map(|one| one.clients.clients());
        let clients = clients.unwrap_or_default();
        if let Some(opening) = launcher.clone().opening() {
            // If it fails, waking does, and says why.
            let _ = opening.await;
        }
        let decrypted = decrypted_len.map(|bytes| Decrypted {
            memory: Arc::new(place.lease.split_off(bytes)),
            owner_key: asleep.owner_key(),
        });
        let execs = self.slots().asleep.execs(asleep.id()).unwrap_or_default();
        let streams = match execs.new_streams() {
            Ok(streams) => streams,
            Err(error) => {
                return Err(self.cannot_wake(
                    &waking,
                    &format!(
                        "its processes cannot have streams ({error}); it sleeps on, try again"
                    ),
                ));
            }
        };
        let execs = execs.notes();
        let limits = self.limits_of(asleep.id());
        place.lease.shrink_to(limits.memory);
        let unsealer = match &decrypted {
            Some(_) => Some(self.tenant.unsealer().await),
            None => None,
        };
        let (egress, opener) = (self.shared.egress().clone(), self.clone());
        let boot = move |asleep: &Asleep, own: Option<Arc<EgressPolicy>>, volumes: OwnVolumes| {
            let later = |error: &dyn ToString| WakeError::Later(error.to_string());
            let file = asleep.open().map_err(|error| match error.kind() {
                std::io::ErrorKind::NotFound => WakeError::Lost("its file is gone".to_owned()),
                std::io::ErrorKind::InvalidData => WakeError::Lost(error.to_string()),
                _ => later(&error),
            })?;
            drop(unsealer);
            let launcher = opener.with_own_volumes(launcher, asleep.id(), volumes);
            let launcher = launcher.map_err(WakeError::Later)?.waken(
                file,
                asleep.checksum(),
                asleep.base(),
                clients,
                decrypted,
                limits,
            )?;
            launcher.go_on_with(execs);
            let mut launched = launcher.launch(client.as_deref()).map_err(|error| later(&error))?;
            if let Some(own) = own {
                use_egress(&mut launched, own).map_err(WakeError::Later)?;
            }
            Ok(Launched { kind: BootKind::Asleep, ..launched })
        };
        // It goes on if the client goes away, and its place stays taken.
        let service = self.clone();
        let wake = move || {
            let function = service.launcher.egress();
            let own = egress.of(asleep.id(), function.as_deref());
            let volumes = service.shared.own_volumes().all_of(asleep.id());
            if !service.is_asleep(asleep.id()) {
                // Its rules and volumes may have been forgotten with it.
                return Err(PlaceError::CannotWake(ended_asleep(asleep.id())));
            }
            match own.map_err(WakeError::Later).and_then(|own| boot(&asleep, own, volumes)) {
                Ok(launched) => Ok(service.adopt_woken(launched, waking, first, place, streams)),
                Err(WakeError::Later(why)) => {
                    Err(service.cannot_wake(&waking, &format!("{why}; it sleeps on, try again")))
                }
                Err(WakeError::Lost(why)) => Err(service.lose(waking, why)),
            }
        };
        tokio::task::spawn_blocking(wake).await.expect("a launcher does not panic")
    }

    /// An instance will never wake. Whoever comes next gets a new one.
    fn lose(&self, waking: Waking, why: String) -> PlaceError {
        let refused = self.cannot_wake(&waking, &format!("{why}; its state is lost"));
        if let Some(mut lost) = waking.done() {
            mem::take(&mut lost.clients).end(&Outcome::Gone(End::Failed(why)));
            self.forget_sleepers(vec![lost]);
        }
        self.shared.metrics().lost_asleep(self.name());
        self.freed.notify_waiters();
        refused
    }

    fn cannot_wake(&self, waking: &Waking, why: &str) -> PlaceError {
        let instance = waking.asleep().id();
        tracing::error!(function = %self.name(), instance, "cannot wake an instance that is asleep: {why}");
        PlaceError::CannotWake(format!("instance {instance} was asleep and cannot be woken: {why}"))
    }

    /// Makes an instance that was asleep a live one of the same number.
    fn adopt_woken(
        self: &Arc<Self>,
        launched: Launched,
        waking: Waking,
        first: Option<Delivery>,
        place: Place,
        streams: NewStreams,
    ) -> Placed {
        let asleep = waking.asleep().clone();
        let id = asleep.id();
        let placed = Placed { instance: id, waited: false };
        let (commands, receiver) = mpsc::unbounded_channel();
        let connector = launched.instance.connector();
        let table = ConnectionTable::new(connector.clone(), commands, &self.config);
        let execs = self.slots().asleep.execs(id).unwrap_or_default();
        let table = Arc::new(table.with_execs(execs.clone()));
        let booted = UNIX_EPOCH.checked_add(Duration::from_millis(asleep.booted_ms));
        let age = booted.and_then(|booted| booted.elapsed().ok()).unwrap_or_default();
        let now = Instant::now();
        let mut slot = Slot {
            state: InstanceState::Booting,
            connections: first.is_some().into(),
            table: table.clone(),
            pid: launched.instance.pid(),
            started: now.checked_sub(age).unwrap_or(now),
            served: asleep.served,
            idle_since: first.is_none().then_some(now),
            upstreams: Vec::new(),
            shared: None,
            was_full: false,
            ending: place.lease.ending(),
            is_unwanted: false,
            is_lost: false,
        };
        let client = first.as_ref().map(|delivery| delivery.client.clone());
        if let Some(first) = first {
            table.adopt(first, placed);
        }
        let shared = client.clone();
        let streams = launched.execs.is_some().then_some(streams);
        let (service, owned) = (self.clone(), table.clone());
        let supervisor = match client {
            Some(client) => Supervisor::new(id, service, launched, receiver, owned, &client, place),
            None => Supervisor::adopted(id, service, launched.instance, receiver, owned, place),
        };
        // It is never in both lists, nor in none, for anybody who looks.
        let mut slots = self.slots();
        if let Some(mut sleeper) = slots.asleep.remove(id) {
            sleeper.execs = None;
            slot.connections += sleeper.clients.len() as u32;
            slot.idle_since = slot.idle_since.filter(|_| slot.connections == 0);
            table.put_back(mem::take(&mut sleeper.clients));
        } else {
            // Its function was removed meanwhile, or it was to end.
            slot.is_unwanted = true;
            slot.end();
            table.tell(Command::End);
        }
        slots.insert(id, slot);
        // Whoever gives the first request up finds the instance.
        if let Some(slot) = slots.get_mut(&id) {
            slot.shared = shared.and_then(|client| self.share(&client, id));
        }
        slots.perhaps_free.insert(id);
        drop(slots);
        drop(waking.done());
        execs.wake(connector.clone(), streams);
        table.watch();
        self.shared.metrics().woken_from_sleep(self.name());
        tokio::spawn(supervisor.woken_from(asleep).run());
        self.places_came();
        placed
    }

    /// An instance that was asleep has ended before it was known to run. One that was killed is among
    /// those that are asleep again, if it may be.
    pub(in crate::service) fn sleeps_on(
        &self,
        slots: &mut Slots,
        asleep: Arc<Asleep>,
        execs: &Arc<Execs>,
        end: &End,
    ) -> bool {
        let was_killed = matches!(
            end,
            End::Killed(None | Some(libc::SIGKILL)) | End::KilledInBoot(_) | End::TenantSpent
        );
        if !was_killed || !self.may_keep(slots, asleep.id()) {
            return false;
        }
        let sleeper = Sleeper::new(asleep, execs.asleep_again());
        slots.asleep.insert(sleeper).is_ok()
    }

    /// Says what has become of an instance that was asleep and has ended before it was known to run.
    pub(in crate::service) fn did_not_wake(&self, id: u64, sleeps_on: bool, end: &End) {
        if sleeps_on {
            tracing::info!(function = %self.name(), instance = id, "an instance that was killed while it woke sleeps on");
        } else {
            tracing::warn!(function = %self.name(), instance = id, "an instance that was asleep is lost: {end}");
            self.shared.metrics().lost_asleep(self.name());
        }
    }
}
