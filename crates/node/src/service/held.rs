//! Instances that stay: sandboxes, which nobody's request ends, and processes in instances from
//! outside.

use super::copies::Stays;
use super::memory::{HIBERNATE_PATIENCE, MEMORY_PATIENCE};
use super::room::Claimed;
use super::{InstanceState, Service, Slot, Slots};
use crate::instance::{Command, ConnectionTable, InstanceUse, Launched, Launcher};
use crate::remote::exec::{Attached, Exec, ExecProblem, ExecRequest, Execs};
use crate::remote::files::FileSession;
use crate::remote::limits::{Unchanged, check_host, of_host};
use crate::remote::ports::{PortProblem, PortStream};
use crate::remote::volumes::WantedVolumes;
use crate::remote::{EgressWish, ExecNote, LimitsChange, Reader};
use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::Duration;
use thaw_abi::remote::{FILE_SESSIONS_MAX, PORT_CONNECTIONS_MAX};
use thaw_build::lacking::Lacking;
use thaw_sandbox::{EgressPolicy, ResourceLimits};
use tokio::sync::oneshot;
use tokio::time::{Instant, sleep, timeout};

/// How long the limits of an instance may take to be changed that is being copied.
const LIMITS_PATIENCE: Duration = Duration::from_secs(15);
/// How long an instance may take from the moment at which nobody may begin anything in it to its sleep.
const SHUT_PATIENCE: Duration = Duration::from_secs(10);
/// How long until it is looked at again.
const SHUT_AGAIN: Duration = Duration::from_millis(1);
/// How long until it is tried again.
const LIMITS_AGAIN: Duration = Duration::from_millis(50);

impl Service {
    /// Boots an instance that stays until it is told to end, and waits until it runs; its number.
    ///
    /// # Errors
    /// One sentence for the operator.
    pub(crate) async fn boot_held(
        self: &Arc<Self>,
        egress: EgressWish,
        volumes: WantedVolumes,
    ) -> Result<u64, String> {
        self.boot_held_of(self.launcher(), egress, volumes).await
    }

    /// The same from something else than the function's image.
    pub(crate) async fn boot_held_of(
        self: &Arc<Self>,
        launcher: Arc<dyn Launcher>,
        egress: EgressWish,
        volumes: WantedVolumes,
    ) -> Result<u64, String> {
        let memory = self.config.limits.memory.bytes();
        let places = self.places_for(NonZeroU32::MIN, memory, None).await?;
        let place = places.into_iter().next().ok_or("there is no room")?;
        if let Some(opening) = launcher.clone().opening() {
            opening.await.map_err(|error| error.to_string())?;
        }
        let mounting = self.mounting(launcher, &volumes).await?;
        let launcher = mounting.launcher.clone();
        let function = launcher.egress();
        // What is ready takes less time than to find another thread.
        let mut launched = match launcher.launch_now(None) {
            Ok(launched) => launched,
            Err(_) => {
                let boot = move || launcher.launch(None);
                let booted = tokio::task::spawn_blocking(boot).await;
                booted.map_err(|error| error.to_string())?.map_err(|error| error.to_string())?
            }
        };
        let own = match &function {
            Some(function) => Some(use_egress(&mut launched, egress.policy(function))?),
            None if egress == EgressWish::Function => None,
            None => return Err("where its instances connect to cannot be said".to_owned()),
        };
        let id = self.adopt_held(launched, place, own.is_some());
        let own = own.into_iter().map(|policy| (id, policy)).collect();
        let made = async {
            self.shared().egress().insert(own).await?;
            self.shared().own_volumes().set(&[id], &mounting.own).await?;
            self.mount_own(id, &mounting, &volumes).await
        };
        made.await.inspect_err(|_| self.kill(id)).map(|()| id)
    }

    fn adopt_held(self: &Arc<Self>, launched: Launched, place: Claimed, was_told: bool) -> u64 {
        let id = self.adopt_copy(launched, place, Stays::UntilTold);
        if was_told && let Ok(table) = self.table_of_live(id) {
            table.watch();
        }
        id
    }

    /// What an instance may use.
    pub fn limits_of(&self, id: u64) -> ResourceLimits {
        let (own, function) = (self.shared().limits().of(id), &self.config.limits);
        own.map_or_else(|| function.of_an_instance(), |own| own.within(function))
    }

    /// Changes what an instance may use, which is woken if it is asleep. It is done to its end, also
    /// if nobody waits for that any more.
    ///
    /// # Errors
    /// One sentence for the operator; nothing changes.
    pub(crate) async fn change_limits(
        self: &Arc<Self>,
        id: u64,
        change: LimitsChange,
    ) -> Result<(), String> {
        let service = self.clone();
        let changing = tokio::spawn(async move { service.change_limits_now(id, change).await });
        changing.await.map_err(|error| error.to_string())?
    }

    async fn change_limits_now(
        self: &Arc<Self>,
        id: u64,
        change: LimitsChange,
    ) -> Result<(), String> {
        let table = self.shared().limits().clone();
        let _turn = table.turn().await;
        let before = self.limits_of(id);
        let wanted = change.of(before, &self.config.limits)?;
        check_host(before, wanted, of_host())?;
        self.reach(id).await?;
        // Whatever becomes of this daemon, the next one takes the instance over with no less than
        // it may have.
        let memory = before.memory.max(wanted.memory);
        let cpus = before.cpus.max(wanted.cpus);
        table.set(&[(id, ResourceLimits { memory, cpus, ..before }.into())]).await?;
        let changed = self.tell_limits(id, wanted).await;
        let now = if changed.is_ok() { wanted } else { before };
        let written = table.set(&[(id, now.into())]).await;
        if changed.is_ok() && written.is_err() {
            // As before for this daemon as for the next.
            self.tell_limits(id, before).await?;
        }
        changed.and(written)
    }

    /// Has the supervisor of an instance change its limits, as soon as it is not being copied.
    async fn tell_limits(&self, id: u64, wanted: ResourceLimits) -> Result<(), String> {
        let deadline = Instant::now() + LIMITS_PATIENCE;
        loop {
            let (reply, changed) = oneshot::channel();
            self.table_of_live(id)?.tell(Command::Limits(wanted, reply));
            match changed.await {
                Ok(Ok(())) => return Ok(()),
                Ok(Err(Unchanged::Refused(why))) => return Err(why),
                Ok(Err(Unchanged::Busy)) if Instant::now() < deadline => sleep(LIMITS_AGAIN).await,
                Ok(Err(Unchanged::Busy)) => {
                    return Err("the sandbox is being copied or paused; try again".to_owned());
                }
                Err(_) => return Err(format!("instance {id} has ended, or sleeps; try again")),
            }
        }
    }

    /// What an instance does; none: it is not there.
    pub(crate) fn state_of(&self, id: u64) -> Option<InstanceState> {
        let slots = self.slots();
        let asleep = || slots.asleep.contains(id).then_some(InstanceState::Asleep);
        slots.get(&id).map(|slot| slot.state).or_else(asleep)
    }

    /// What an instance uses; none: it has no process. Wakes nobody.
    pub async fn use_of(&self, id: u64) -> Option<InstanceUse> {
        let (reply, used) = oneshot::channel();
        self.table_of_live(id).ok()?.tell(Command::Use(reply));
        timeout(MEMORY_PATIENCE, used).await.ok()?.ok()
    }

    /// Whether the node hears of the end of an instance that is there.
    pub(crate) fn tells_of_end(&self, id: u64) -> bool {
        let is_held = self.slots().held.contains(&id);
        is_held
            || self.shared.egress().knows(id)
            || self.shared.limits().of(id).is_some()
            || self.shared.own_volumes().has(id)
    }

    /// Has an instance stay: it gets no requests, and is not ended when it is idle.
    pub fn hold(&self, id: u64) {
        self.slots().hold(id);
    }

    /// Has an instance that stays get requests again. A sandbox stays until it ends.
    pub fn release(&self, id: u64) {
        let mut slots = self.slots();
        if slots.held.remove(&id) && slots.contains_key(&id) {
            slots.perhaps_free.insert(id);
            drop(slots);
            self.freed.notify_waiters();
        }
    }

    /// What tells an instance, which is woken first if it is asleep.
    ///
    /// # Errors
    /// One sentence for the operator: there is none, or it cannot be woken.
    pub(crate) async fn reach(self: &Arc<Self>, id: u64) -> Result<Arc<ConnectionTable>, String> {
        if self.is_asleep(id) {
            self.wake_if_asleep(Some(id)).await?;
        }
        self.table_of_live(id)
    }

    /// Wakes an instance first if it is asleep, so that it can be told something.
    ///
    /// # Errors
    /// The same.
    pub async fn make_reachable(self: &Arc<Self>, id: u64) -> Result<(), String> {
        self.reach(id).await.map(drop)
    }

    /// The same, once it is not about to be asleep.
    async fn reach_open(self: &Arc<Self>, id: u64) -> Result<Arc<ConnectionTable>, String> {
        let deadline = Instant::now() + SHUT_PATIENCE;
        loop {
            let table = self.reach(id).await?;
            if !table.execs().is_shut() {
                return Ok(table);
            }
            if Instant::now() > deadline {
                return Err(format!("instance {id} is being put to sleep; try again"));
            }
            sleep(SHUT_AGAIN).await;
        }
    }

    /// The same, with a place there; `None`: all are taken.
    async fn reach_place<T>(
        self: &Arc<Self>,
        id: u64,
        take: impl Fn(&Execs) -> Option<T>,
    ) -> Result<(Arc<ConnectionTable>, Option<T>), String> {
        loop {
            let table = self.reach_open(id).await?;
            let place = take(table.execs());
            if place.is_some() {
                return Ok((table, place));
            }
            if !table.execs().is_shut() && !self.is_other(id, &table) {
                // It may have been shut a moment ago.
                let place = take(table.execs());
                return Ok((table, place));
            }
        }
    }

    /// Whether the instance was booted anew since this table was its.
    fn is_other(&self, id: u64, table: &Arc<ConnectionTable>) -> bool {
        self.is_asleep(id) || self.table_of_live(id).is_ok_and(|now| !Arc::ptr_eq(&now, table))
    }

    /// Starts a process in an instance, and waits until it runs.
    ///
    /// # Errors
    /// See [`ExecProblem`].
    pub async fn exec(
        self: &Arc<Self>,
        id: u64,
        request: &ExecRequest,
    ) -> Result<(Attached, Reader), ExecProblem> {
        loop {
            let table = self.reach_open(id).await.map_err(ExecProblem::Refused)?;
            let number = self.shared().next_connection();
            let starting = table.execs().start(number, request, table.connector());
            table.watch();
            match starting.await {
                Err(ExecProblem::Refused(_))
                    if table.execs().is_shut() || self.is_other(id, &table) => {}
                Err(ExecProblem::NotRun(reason, code)) => {
                    let lacking = Lacking::program_of(self.config());
                    let reason = lacking.explain(&reason).unwrap_or(reason);
                    return Err(ExecProblem::NotRun(reason, code));
                }
                outcome => return outcome,
            }
        }
    }

    /// Has the processes from outside go on that the memory of a copy has.
    pub(super) fn have_execs_go_on(
        self: &Arc<Self>,
        id: u64,
        table: &ConnectionTable,
        notes: &[ExecNote],
    ) {
        let next = || self.shared().next_connection();
        match table.execs().go_on_in_copy(notes, next, table.connector()) {
            Ok(all) => self.end_with(id, all),
            Err(error) => {
                tracing::warn!(function = %self.name(), instance = id, "ended a copy, since its processes cannot have streams: {error}; raise the limit of open files");
                table.tell(Command::End);
            }
        }
        table.watch();
    }

    /// Ends an instance when those of its processes have ended that it is there for.
    pub(super) fn end_with(self: &Arc<Self>, id: u64, execs: Vec<Arc<Exec>>) {
        for exec in execs.into_iter().filter(|exec| exec.ends_sandbox()) {
            let service = self.clone();
            tokio::spawn(async move {
                exec.ended().await;
                // It may sleep on where nobody knows what became of the process.
                if !exec.is_cut_off() {
                    service.kill(id);
                }
            });
        }
    }

    /// Live instances, by their numbers, whose processes from outside can wait for the next daemon.
    pub(crate) fn with_execs(&self) -> Vec<(u64, Arc<ConnectionTable>)> {
        let slots = self.slots();
        let has_some = |slot: &&Slot| {
            slot.state.takes_connections()
                && !slot.table.execs().notes().is_empty()
                && slot.table.connector().can_have_execs_go_on()
        };
        let live = slots.iter().filter(|(_, slot)| has_some(slot));
        live.map(|(id, slot)| (*id, slot.table.clone())).collect()
    }

    /// Processes in an instance that were started from outside; it may be asleep.
    pub fn execs_of(&self, id: u64) -> Option<Arc<Execs>> {
        let slots = self.slots();
        let live = || slots.get(&id).map(|slot| slot.table.execs().clone());
        slots.asleep.execs(id).or_else(live)
    }

    /// Attaches to one of them, if it is there. The instance is woken if it is asleep.
    ///
    /// # Errors
    /// One sentence for the operator.
    pub async fn attach(self: &Arc<Self>, id: u64, exec: u64) -> Result<Option<Attached>, String> {
        loop {
            if let Ok(found) = self.reach_open(id).await?.execs().attach(exec) {
                return Ok(found);
            }
            sleep(SHUT_AGAIN).await;
        }
    }

    /// Attaches to all of them.
    ///
    /// # Errors
    /// The same.
    pub async fn attach_all(self: &Arc<Self>, id: u64) -> Result<Vec<Attached>, String> {
        loop {
            if let Ok(all) = self.reach_open(id).await?.execs().attach_all() {
                return Ok(all);
            }
            sleep(SHUT_AGAIN).await;
        }
    }

    /// Opens a session over the files of an instance.
    ///
    /// # Errors
    /// One sentence for the operator.
    pub async fn files(self: &Arc<Self>, id: u64, user: &str) -> Result<FileSession, String> {
        let (table, place) = self.reach_place(id, Execs::file_place).await?;
        let place = place.ok_or_else(|| {
            format!("{FILE_SESSIONS_MAX} others look at files of the instance; try again")
        })?;
        let session = FileSession::open(&*table.connector(), user, place)?;
        table.watch();
        Ok(session)
    }

    /// Gives an instance a host name of its own, where it has its function's so far.
    pub(crate) fn name_host(&self, id: u64, name: &str) {
        // One that has ended is told of by whoever uses it next.
        if let Ok(table) = self.table_of_live(id) {
            let _ = table.connector().name_host(name);
        }
    }

    /// Connects to a port on which something in an instance listens.
    ///
    /// # Errors
    /// See [`PortProblem`].
    pub async fn port(self: &Arc<Self>, id: u64, port: u16) -> Result<PortStream, PortProblem> {
        let (table, place) =
            self.reach_place(id, Execs::port_place).await.map_err(PortProblem::Refused)?;
        let place = place.ok_or_else(|| {
            PortProblem::Full(format!(
                "the sandbox has {PORT_CONNECTIONS_MAX} connections to its ports already; close some"
            ))
        })?;
        PortStream::open(&*table.connector(), port, place, || table.watch()).await
    }

    /// Has an instance come to rest, whatever its processes wait for. It gives up its memory after
    /// that; if that cannot be written, it rests with it.
    ///
    /// # Errors
    /// One sentence for the operator.
    pub(crate) async fn pause(&self, id: u64) -> Result<(), String> {
        if self.is_asleep(id) {
            return Ok(());
        }
        let (reply, paused) = oneshot::channel();
        self.table_of_live(id)?.tell(Command::Pause(reply));
        match timeout(HIBERNATE_PATIENCE, paused).await {
            Ok(Ok(outcome)) => outcome,
            Ok(Err(_)) => Err(format!("instance {id} has ended before it was paused")),
            Err(_) => {
                self.withdraw(id);
                Err(format!(
                    "instance {id} did not come to rest; what computes all the time cannot be paused"
                ))
            }
        }
    }
}

/// Puts an instance that was just launched under a policy of its own.
pub(super) fn use_egress(
    launched: &mut Launched,
    policy: Arc<EgressPolicy>,
) -> Result<Arc<EgressPolicy>, String> {
    let used = launched.instance.use_egress(&policy);
    used.map_err(|error| format!("the instance cannot be told where it may connect to: {error}"))?;
    Ok(policy)
}

impl Slots {
    /// Has an instance stay, unless its function is gone.
    pub(super) fn hold(&mut self, id: u64) {
        if !self.holds_none {
            self.held.insert(id);
        }
    }
}

impl Slot {
    /// Whether requests may reach it.
    pub(super) fn is_free(&self, most: u32, is_held: bool) -> bool {
        !is_held && self.state.takes_connections() && self.connections < most
    }
}
