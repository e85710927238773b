//! Copies of live instances.

use super::held::use_egress;
use super::memory::REST_PATIENCE;
use super::own_volumes::Mounting;
use super::room::Claimed;
use super::supervisor::Supervisor;
use super::{Service, Slot, VolumeFiles};
use crate::instance::{
    Checkpoint, CheckpointKey, Checkpointed, Command, ConnectionTable, Copied, InstanceState,
    LaunchError, Launched, Launcher, VolumesAtRest,
};
use crate::remote::limits::OwnLimits;
use crate::remote::volumes::{OwnVolumes, WantedVolumes};
use crate::remote::{ExecNote, SandboxVolume};
use crate::to_its_end::to_its_end;
use serde::{Deserialize, Serialize};
use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::{Duration, Instant};
use thaw_home::config::{FunctionConfig, FunctionName};
use thaw_home::seal::owner::{KeyId, OwnerKey};
use thaw_home::volumes::VolumeSnapshot;
use thaw_sandbox::EgressPolicy;
use thaw_store::Name;
use tokio::sync::{mpsc, oneshot};
use tokio::task::{JoinSet, spawn_blocking};
use tokio::time::{timeout, timeout_at};

/// How long copies may take until all of them run.
const RUN_PATIENCE: Duration = Duration::from_secs(30);
/// How long copies may take to end.
const GONE_PATIENCE: Duration = Duration::from_secs(10);
/// How many are booted at a time: each takes a processor.
const BOOTS_AT_A_TIME: usize = 2;

/// Copies of an instance.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
pub struct Forked {
    /// The function.
    pub function: FunctionName,
    /// The instance that was copied, which goes on.
    pub instance: u64,
    /// For how long it rested, in microseconds.
    pub pause_us: u64,
    /// It went on at once, and a process that held its memory as it was was read.
    pub twin: bool,
    /// Time until all copies ran, from the request on, in microseconds.
    pub running_us: u64,
    /// The copies.
    pub ids: Vec<u64>,
}

/// A checkpoint of an instance.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
pub struct CheckpointTaken {
    /// The function.
    pub function: FunctionName,
    /// The instance, which goes on.
    pub instance: u64,
    /// For how long it rested, in microseconds.
    pub pause_us: u64,
    /// It went on at once, and a process that held its memory as it was was read.
    pub twin: bool,
    /// The checkpoint.
    #[serde(flatten)]
    pub checkpoint: Checkpointed,
}

/// Instances that were made of a checkpoint.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
pub struct Restored {
    /// The function.
    pub function: FunctionName,
    /// Time until all of them ran, in microseconds.
    pub running_us: u64,
    /// The instances.
    pub ids: Vec<u64>,
}

/// What the store keeps of a checkpoint for its restoring.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct CheckpointOf {
    /// The function.
    pub function: FunctionName,
    /// Its configuration at that time, without the values of its environment variables, which
    /// are in the checkpoint's memory.
    pub config: FunctionConfig,
    /// The id of the key that it is encrypted with, to be shown. Its image itself decides.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub key: Option<KeyId>,
    /// Snapshots of its volumes that belong to it.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub volumes: Vec<VolumeSnapshot>,
    /// Processes from outside that go on in what is restored.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub execs: Vec<ExecNote>,
    /// The volumes that the sandbox had of its own, which are mounted in its memory.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub own_volumes: Vec<SandboxVolume>,
}

/// What instances have that is not their function's.
#[derive(Default)]
struct Own {
    egress: Option<Arc<EgressPolicy>>,
    limits: Option<OwnLimits>,
    volumes: OwnVolumes,
}

/// How long an instance stays for which no client waits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stays {
    /// Until it is told to end: it is a sandbox.
    UntilTold,
    /// As long as its function keeps idle ones.
    WhileWanted,
}

impl Service {
    /// Makes `count` copies of a live instance, with all that it has in memory. It goes on
    /// meanwhile, but for a pause.
    ///
    /// # Errors
    /// One sentence for the operator; there are no copies then.
    pub async fn fork(self: &Arc<Self>, id: u64, count: NonZeroU32) -> Result<Forked, String> {
        if self.is_retired() {
            return Err(format!(
                "version {} of `{}` gets no more requests, so plain copies would end at once; \
                 `thaw sandbox fork` makes a sandbox of it",
                self.version(),
                self.name()
            ));
        }
        // Half of the copies would stay if whoever wants them goes away.
        let service = self.clone();
        to_its_end(async move { service.copy(id, count, Stays::WhileWanted).await }).await
    }

    /// Makes a copy of a sandbox that is one, too; its number.
    ///
    /// # Errors
    /// The same.
    pub(crate) async fn fork_held(self: &Arc<Self>, id: u64) -> Result<u64, String> {
        let forked = self.copy(id, NonZeroU32::MIN, Stays::UntilTold).await?;
        Ok(forked.ids[0])
    }

    async fn copy(
        self: &Arc<Self>,
        id: u64,
        count: NonZeroU32,
        stays: Stays,
    ) -> Result<Forked, String> {
        let began = Instant::now();
        self.check_outlives_connections(Some(id), "a copy does not have it")?;
        // Nothing rests before it is known that there is room.
        let limits = self.limits_of(id);
        let places = self.places_for(count, limits.memory, Some(id)).await?;
        // As long as the original is known: it may end while it is copied.
        let own = self.own_of(id);
        let Copied { launcher, pause } = self.copy_of(id).await?;
        // The copies have what it had then, and room for what it had before.
        if self.shared.limits().of(id).is_some_and(|now| own.limits != Some(now)) {
            return Err(format!("the limits of instance {id} have just changed; try again"));
        }
        let ids = self.boot_copies(&launcher, places, own, stays).await;
        let ids = ids.map_err(|error| error.to_string())?;
        self.wait_until_running(&ids).await?;
        Ok(Forked {
            function: self.name().clone(),
            instance: id,
            pause_us: as_us(pause.time),
            twin: pause.had_twin,
            running_us: as_us(began.elapsed()),
            ids,
        })
    }

    /// What copies of an instance have of their own, as it has.
    fn own_of(&self, id: u64) -> Own {
        let (limits, volumes) = (self.shared.limits(), self.shared.own_volumes());
        Own {
            egress: self.shared.egress().copy_of(id),
            limits: limits.of(id),
            volumes: volumes.all_of(id),
        }
    }

    /// Writes a live instance to the store by a name, encrypted with a key if there is one, and the
    /// files of its volumes if they are to go with it. It goes on meanwhile, but for a pause. It is
    /// done to its end, also if nobody waits for that any more: others may rest for it.
    ///
    /// # Errors
    /// One sentence for the operator; the store is as before.
    pub async fn checkpoint(
        self: &Arc<Self>,
        id: u64,
        name: Name,
        key: Option<OwnerKey>,
        files: VolumeFiles,
    ) -> Result<CheckpointTaken, String> {
        let service = self.clone();
        let taking =
            tokio::spawn(async move { service.checkpoint_now(id, name, key, files).await });
        taking.await.map_err(|error| error.to_string())?
    }

    async fn checkpoint_now(
        &self,
        id: u64,
        name: Name,
        key: Option<OwnerKey>,
        files: VolumeFiles,
    ) -> Result<CheckpointTaken, String> {
        self.check_outlives_connections(Some(id), "the copy of a connection leads nowhere")?;
        drop(self.table_of_live(id)?);
        let volumes = match files {
            VolumeFiles::Stay => None,
            VolumeFiles::Go => Some(self.begin_volumes(id).await?),
        };
        let written = self.write_checkpoint(id, name, key, volumes.clone()).await;
        if let (Err(_), Some(volumes)) = (&written, volumes) {
            // Nothing is left of the copies when somebody hears of it.
            let _ = spawn_blocking(move || volumes.discard()).await;
        }
        written
    }

    async fn write_checkpoint(
        &self,
        id: u64,
        name: Name,
        key: Option<OwnerKey>,
        volumes: Option<Arc<VolumesAtRest>>,
    ) -> Result<CheckpointTaken, String> {
        let (reply, done) = oneshot::channel();
        let owner = self.tenant.name().domain().map(|domain| domain.name().clone());
        let config = CheckpointOf {
            function: self.name().clone(),
            config: self.config.without_secrets(),
            key: key.as_ref().map(OwnerKey::id),
            volumes: volumes.as_ref().map(|volumes| volumes.snapshots()).unwrap_or_default(),
            // They are known when it rests.
            execs: Vec::new(),
            own_volumes: self.shared.own_volumes().of(id),
        };
        let config = serde_json::to_value(config).expect("plain data");
        let most = self.limits_of(id).memory;
        let with_memory = |key| {
            let memory = Arc::new(self.tenant.keep_memory(most)?);
            Ok::<_, String>(CheckpointKey { key: Arc::new(key), memory })
        };
        let key = key.map(with_memory).transpose()?;
        let new = Checkpoint { name, owner, config, key, volumes: volumes.clone() };
        // As long as its twin is read it may have its memory twice.
        let room = self.tenant.room().try_enter(most);
        self.table_of_live(id)?.tell(Command::Checkpoint(new, reply, room));
        let (checkpoint, pause) = self.written_with(id, volumes, self.rested(id, done)).await?;
        let function = self.name().clone();
        let (pause_us, twin) = (as_us(pause.time), pause.had_twin);
        Ok(CheckpointTaken { function, instance: id, pause_us, twin, checkpoint })
    }

    /// Boots instances that begin where another one was when it was checkpointed. Before that, these
    /// snapshots are put back, if there are any. It is done to its end, also if nobody waits for that
    /// any more: no instance may live on whose files are put away again.
    ///
    /// # Errors
    /// One sentence for the operator; there is none of them then.
    pub async fn restore(
        self: &Arc<Self>,
        (launcher, own): (Arc<dyn Launcher>, Vec<SandboxVolume>),
        count: NonZeroU32,
        snapshots: Vec<VolumeSnapshot>,
    ) -> Result<Restored, String> {
        let service = self.clone();
        let restoring =
            tokio::spawn(
                async move { service.restore_now(launcher, own, count, &snapshots).await },
            );
        restoring.await.map_err(|error| error.to_string())?
    }

    async fn restore_now(
        self: &Arc<Self>,
        launcher: Arc<dyn Launcher>,
        own: Vec<SandboxVolume>,
        count: NonZeroU32,
        snapshots: &[VolumeSnapshot],
    ) -> Result<Restored, String> {
        let began = Instant::now();
        self.check_outlives_connections(None, "one that is restored has none")?;
        let places = self.places_for(count, self.config.limits.memory.bytes(), None).await?;
        let wanted = WantedVolumes { mounted: own, ..WantedVolumes::default() };
        // Before that: files are put back of volumes that are open.
        let Mounting { launcher, own, .. } = self.mounting(launcher, &wanted).await?;
        let own = Own { volumes: own, ..Own::default() };
        let put_back = self.put_back(snapshots).await?;
        let ids = self.boot_copies(&launcher, places, own, Stays::WhileWanted).await;
        let ids = match ids {
            Ok(ids) => ids,
            Err(error) => {
                // The files are as before when somebody hears of it.
                let _ = spawn_blocking(move || drop(put_back)).await;
                return Err(error.to_string());
            }
        };
        if let Err((why, put_back)) = Self::keep_put_back(put_back).await {
            // Nobody may have the files that are put away again.
            self.end_copies(&ids).await;
            let _ = spawn_blocking(move || drop(put_back)).await;
            return Err(why);
        }
        self.wait_until_running(&ids).await?;
        let function = self.name().clone();
        Ok(Restored { function, running_us: as_us(began.elapsed()), ids })
    }

    /// Instances that serve one connection end with it, unless they are sandboxes.
    fn check_outlives_connections(&self, id: Option<u64>, why: &str) -> Result<(), String> {
        let is_held = id.is_some_and(|id| self.slots().held.contains(&id));
        match self.is_single_use() && !is_held {
            false => Ok(()),
            true => Err(format!(
                "instances of `{}` end with their connection, and {why}; set isolation = \"instance\"",
                self.name()
            )),
        }
    }

    /// Has the memory of an instance copied.
    async fn copy_of(&self, id: u64) -> Result<Copied, String> {
        let (reply, copied) = oneshot::channel();
        self.table_of_live(id)?.tell(Command::Copy(reply));
        self.rested(id, copied).await
    }

    /// What comes of an instance's rest.
    async fn rested<T>(
        &self,
        id: u64,
        outcome: oneshot::Receiver<Result<T, String>>,
    ) -> Result<T, String> {
        match timeout(REST_PATIENCE, outcome).await {
            Ok(Ok(outcome)) => outcome,
            Ok(Err(_)) => Err(format!("instance {id} has ended before it could be copied")),
            Err(_) => Err(format!(
                "instance {id} did not come to rest, or was not written, within {} s; see `thaw ps` and \
                 `thaw checkpoints`",
                REST_PATIENCE.as_secs()
            )),
        }
    }

    /// What tells the supervisor of an instance that is not ending.
    pub(crate) fn table_of_live(&self, id: u64) -> Result<Arc<ConnectionTable>, String> {
        let slots = self.slots();
        let live = slots.get(&id).filter(|slot| slot.state.takes_connections());
        let table = live.map(|slot| slot.table.clone());
        table.ok_or_else(|| format!("`{}` has no instance {id}; see `thaw ps`", self.name()))
    }

    /// Boots a copy for each place; each has a policy, limits and volumes of its own as `original`, if
    /// that has some. If one cannot be booted, none is left.
    async fn boot_copies(
        self: &Arc<Self>,
        launcher: &Arc<dyn Launcher>,
        mut places: Vec<Claimed>,
        original: Own,
        stays: Stays,
    ) -> Result<Vec<u64>, LaunchError> {
        let (mut boots, mut ids) = (JoinSet::new(), Vec::with_capacity(places.len()));
        let mut policies = Vec::new();
        let mut failed = None;
        loop {
            while failed.is_none() && boots.len() < BOOTS_AT_A_TIME {
                let Some(place) = places.pop() else { break };
                let launcher = launcher.clone();
                boots.spawn_blocking(move || (launcher.launch(None), place));
            }
            let Some(boot) = boots.join_next().await else { break };
            match boot.expect("a launcher does not panic") {
                (Ok(mut launched), place) => {
                    let own = original.egress.as_ref().map(|original| Arc::new(original.copy()));
                    match own.map(|own| use_egress(&mut launched, own)).transpose() {
                        Ok(own) => {
                            let id = self.adopt_copy(launched, place, stays);
                            ids.push(id);
                            policies.extend(own.map(|own| (id, own)));
                        }
                        Err(why) => failed = Some(LaunchError::Failed(why)),
                    }
                }
                (Err(error), _) => failed = Some(error),
            }
        }
        if failed.is_none() {
            failed = self.shared.egress().insert(policies).await.err().map(LaunchError::Failed);
        }
        if let (None, Some(limits)) = (&failed, original.limits) {
            let new: Vec<_> = ids.iter().map(|id| (*id, limits)).collect();
            failed = self.shared.limits().set(&new).await.err().map(LaunchError::Failed);
        }
        if failed.is_none() {
            let set = self.shared.own_volumes().set(&ids, &original.volumes).await;
            failed = set.err().map(LaunchError::Failed);
        }
        match failed {
            None => {
                ids.sort_unstable();
                Ok(ids)
            }
            Some(error) => {
                self.end_copies(&ids).await;
                Err(error)
            }
        }
    }

    /// Ends copies, and waits until they are gone, but not for ever.
    async fn end_copies(&self, ids: &[u64]) {
        ids.iter().for_each(|&id| self.kill(id));
        let deadline = tokio::time::Instant::now() + GONE_PATIENCE;
        loop {
            let changed = self.changed.notified();
            tokio::pin!(changed);
            // From now on every change counts.
            changed.as_mut().enable();
            let are_gone = {
                let slots = self.slots();
                ids.iter().all(|id| slots.get(id).is_none())
            };
            if are_gone || timeout_at(deadline, changed).await.is_err() {
                return;
            }
        }
    }

    /// Makes an instance that was booted without a client one of the service's.
    pub(super) fn adopt_copy(
        self: &Arc<Self>,
        launched: Launched,
        Claimed { claim, place }: Claimed,
        stays: Stays,
    ) -> u64 {
        let id = self.shared.next_instance();
        let (commands, receiver) = mpsc::unbounded_channel();
        let Launched { instance, execs, .. } = launched;
        let table = Arc::new(ConnectionTable::new(instance.connector(), commands, &self.config));
        let slot = Slot {
            state: InstanceState::Booting,
            connections: 0,
            table: table.clone(),
            pid: instance.pid(),
            started: Instant::now(),
            served: 0,
            idle_since: Some(Instant::now()),
            upstreams: Vec::new(),
            shared: None,
            was_full: false,
            ending: place.lease.ending(),
            is_unwanted: false,
            is_lost: false,
        };
        if let Some(execs) = &execs {
            self.have_execs_go_on(id, &table, execs);
        }
        let supervisor = Supervisor::adopted(id, self.clone(), instance, receiver, table, place);
        let mut slots = self.slots();
        if stays == Stays::UntilTold {
            slots.hold(id);
        }
        slots.insert(id, slot);
        slots.perhaps_free.insert(id);
        claim.becomes_instance(&mut slots);
        drop(slots);
        self.places_came();
        tokio::spawn(supervisor.run());
        id
    }

    /// How many of these instances have not come up yet, and how many have ended.
    fn count_booting(&self, ids: &[u64]) -> (usize, usize) {
        let slots = self.slots();
        let (mut booting, mut gone) = (0, 0);
        for id in ids {
            match slots.get(id).map(|slot| slot.state) {
                Some(InstanceState::Booting) => booting += 1,
                // It has come up, and has had nothing to do since.
                None if slots.asleep.contains(*id) => {}
                None | Some(InstanceState::Ending) => gone += 1,
                Some(_) => {}
            }
        }
        (booting, gone)
    }

    /// Waits until instances have come up.
    async fn wait_until_running(&self, ids: &[u64]) -> Result<(), String> {
        let deadline = tokio::time::Instant::now() + RUN_PATIENCE;
        loop {
            let changed = self.changed.notified();
            tokio::pin!(changed);
            // From now on every change counts.
            changed.as_mut().enable();
            let (booting, gone) = self.count_booting(ids);
            let ended = |why: &str| {
                ids.iter().for_each(|&id| self.kill(id));
                Err(format!("{why}; `thaw logs {}` may say why", self.name()))
            };
            match (booting, gone) {
                (0, 0) => return Ok(()),
                (_, 1..) => return ended(&format!("{gone} of {} copies have ended", ids.len())),
                _ if timeout_at(deadline, changed).await.is_err() => {
                    return ended(&format!("{booting} of {} copies do not run", ids.len()));
                }
                _ => {}
            }
        }
    }
}

fn as_us(time: Duration) -> u64 {
    u64::try_from(time.as_micros()).unwrap_or(u64::MAX)
}
