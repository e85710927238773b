//! Boots of sandboxes from one image.

use super::cold::{ColdBoots, Plans, in_background};
use super::launch::{
    Client, ComingBack, LaunchError, Launched, Launcher, NotNow, StandbyInfo, StandbyState,
    WakeError,
};
use super::live::{FrozenInstance, Instance};
use super::options::{LaunchOptions, Techniques, WorkingSetUse};
use super::recording::{Recordings, Shows, WorkingSetState};
use super::sandbox_instance::SandboxInstance;
use super::standby::{BootPolicy, Lent, Standby, Unready};
use super::terms::{FunctionOutput, InstanceTerms, Output};
use crate::boots::BootKind;
use crate::logs::{FunctionLog, Logs};
use crate::remote::ExecNote;
use crate::tenants::{Lease, Tenant};
use std::fs::File;
use std::mem;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, RwLock};
use std::time::Duration;
use thaw_abi::control::{Connection, EntryPoint, FLAG_EXECS_GO_ON};
use thaw_build::build::freeze_instance;
use thaw_home::clock::monotonic_ns;
use thaw_home::config::{EntryKind, FunctionConfig};
use thaw_home::rootfs::StoredRootfs;
use thaw_home::seal::owner::KeyId;
use thaw_home::secrets::SecretStore;
use thaw_home::working_set::stored_working_set;
use thaw_sandbox::{
    AskedContents, BootError, BootPlan, EgressPolicy, FreezeBase, Image, MemoryReader, Orphan,
    PlanError, PopulatePolicy, ResourceLimits, Sandbox, Secrets, ThawOptions, VolumeMount,
    WorkingSet, Zygote, ZygotePool, connection, kernel_build_id,
};
use thaw_store::{ImageId, IndexId, KernelId, Store};

/// Zygotes that are tried for one boot: they may die while they wait.
const ZYGOTES_TRIED: u32 = 3;
/// After so many boots from the image nobody waits for a working set any more.
const BOOTS_UNTIL_SETTLED: u64 = 3;
/// Most bytes of an image that are read ahead at a boot before its working set is known.
const UNKNOWN_MAX: u64 = 64 << 20;
/// After this long without a boot, the image may have left the page cache.
const COLD_AFTER: Duration = Duration::from_secs(30);

/// Boots sandboxes from one image.
pub struct SandboxLauncher {
    shared: Arc<ImageBoots>,
}

/// What the boots of one image have in common; a launcher and its instances share it.
pub(super) struct ImageBoots {
    pub pool: Arc<ZygotePool>,
    /// What each instance gets.
    pub terms: InstanceTerms,
    /// Where the output of the instances goes.
    pub output: FunctionOutput,
    pub(super) image: Arc<Image>,
    /// What images that differ from it only know it by.
    pub(super) image_name: [u8; 32],
    /// The image, or if that lies in memory only, the one in the store that it comes from.
    pub(super) stored: FreezeBase,
    pub(super) rootfs: StoredRootfs,
    pub(super) store: Store,
    pub(super) image_id: ImageId,
    pub(super) plan: RwLock<Arc<BootPlan>>,
    /// The same for instances that are booted ahead: all of the working set is
    /// populated, since nobody waits for it.
    pub(super) ready_plan: RwLock<Arc<BootPlan>>,
    pub(super) standby: Standby,
    pub(super) techniques: Techniques,
    pub(super) working_set: Mutex<WorkingSetState>,
    pub(super) last_boot_ns: AtomicU64,
    pub(super) cold: ColdBoots,
    /// Boots from the image so far.
    pub(super) image_boots: AtomicU64,
    /// What further boots show of the working set.
    pub(super) recordings: Recordings,
    /// Clients that are connected to it in the image and will be again in the next boot from
    /// there, which is the only one.
    pub(super) resumed: Mutex<Vec<Arc<Client>>>,
    /// The image, or one that it comes from, was decrypted into memory.
    pub(super) decrypted: Option<Decrypted>,
    /// Processes from outside in the image, that boots from there are told of.
    pub(super) execs: OnceLock<Arc<[ExecNote]>>,
}

/// What goes with an image that was decrypted into memory.
#[derive(Clone, Debug)]
pub struct Decrypted {
    /// Room for it in the tenant's memory, as long as an instance may map it.
    pub memory: Arc<Lease>,
    /// The key of the checkpoint that it comes from: what its instances have in memory does not get
    /// to disk without one. `None`: it was asleep, and was never in an encrypted checkpoint.
    pub owner_key: Option<KeyId>,
}

/// What an image stands on that is in the store in another form only, since it was decrypted.
#[derive(Clone)]
pub struct StandsOn {
    /// The image in the store that it differs from.
    pub base: FreezeBase,
    /// What goes with it.
    pub decrypted: Decrypted,
}

impl From<ImageBoots> for SandboxLauncher {
    fn from(boots: ImageBoots) -> Self {
        Self { shared: Arc::new(boots) }
    }
}

/// What boots of an image begin with.
pub(super) struct NewBoots {
    pub pool: Arc<ZygotePool>,
    pub store: Store,
    pub terms: InstanceTerms,
    pub output: FunctionOutput,
    pub stored: FreezeBase,
    /// Where the image is not in the store as it is booted.
    pub stands_on: Option<StandsOn>,
    pub rootfs: StoredRootfs,
    pub plan: Arc<BootPlan>,
    pub ready_plan: Arc<BootPlan>,
    pub standby: Standby,
    pub techniques: Techniques,
    pub working_set: WorkingSetState,
}

impl SandboxLauncher {
    /// Prepares boots of `image` over `rootfs`, with the stored working set if
    /// there is one.
    ///
    /// # Errors
    /// A blob of the image cannot be opened.
    #[expect(clippy::too_many_arguments, reason = "each is a thing of its own, given once")]
    pub fn new(
        pool: Arc<ZygotePool>,
        store: &Store,
        rootfs: StoredRootfs,
        image_id: ImageId,
        image: Image,
        logs: Arc<Logs>,
        log: Arc<FunctionLog>,
        tenant: Arc<Tenant>,
        config: &FunctionConfig,
        options: LaunchOptions,
    ) -> Result<Self, PlanError> {
        Self::standing_on(
            None, pool, store, rootfs, image_id, image, logs, log, tenant, config, options,
        )
    }

    /// The same with an image that was decrypted, if it was.
    ///
    /// # Errors
    /// As above.
    #[expect(clippy::too_many_arguments, reason = "as above")]
    pub fn standing_on(
        stands_on: Option<StandsOn>,
        pool: Arc<ZygotePool>,
        store: &Store,
        rootfs: StoredRootfs,
        image_id: ImageId,
        image: Image,
        logs: Arc<Logs>,
        log: Arc<FunctionLog>,
        tenant: Arc<Tenant>,
        config: &FunctionConfig,
        options: LaunchOptions,
    ) -> Result<Self, PlanError> {
        let asked = Arc::new(AskedContents::default());
        let is_sandbox = config.entry.kind == EntryKind::Sandbox;
        let new_plan = || -> Result<BootPlan, PlanError> {
            let mut plan = image.plan(rootfs.file(), rootfs.file_len(), rootfs.blobs())?;
            if is_sandbox {
                plan.remember_asked(&asked);
            }
            Ok(plan)
        };
        let (mut plan, mut ready_plan) = (new_plan()?, new_plan()?);
        let LaunchOptions { working_set, policy: boots, techniques } = options;
        let working_set = match working_set {
            // No request would show what one without a program touches.
            _ if is_sandbox => WorkingSetState::Off,
            WorkingSetUse::Off => WorkingSetState::Off,
            WorkingSetUse::Unknown => WorkingSetState::Unknown,
            WorkingSetUse::Populate(policy) => match stored_working_set(store, image_id) {
                Some(set)
                    if plan.apply_working_set(&set, policy).is_ok()
                        && ready_plan.apply_working_set(&set, PopulatePolicy::Both).is_ok() =>
                {
                    WorkingSetState::Known(Arc::new(set), policy)
                }
                _ => WorkingSetState::Wanted(policy),
            },
        };
        let stored = FreezeBase { image: Arc::new(image), name: *image_id.as_bytes() };
        let launcher = Self::of_image(NewBoots {
            pool,
            store: store.clone(),
            terms: InstanceTerms::new(config, tenant, techniques),
            output: FunctionOutput { logs, log },
            stored,
            stands_on,
            rootfs,
            plan: Arc::new(techniques.reduce(plan)),
            ready_plan: Arc::new(techniques.reduce(ready_plan)),
            standby: Standby::new(boots),
            techniques,
            working_set,
        });
        if let Some((set, policy)) = launcher.shared.known_working_set()
            && !launcher.shared.use_prefetch_file(&set, policy)
        {
            let shared = launcher.shared.clone();
            in_background(move || {
                shared.store_prefetch_file(&set, policy);
                Ok(())
            });
        }
        // Copies that are booted ahead have their volumes.
        if !launcher.shared.terms.has_volumes() {
            launcher.shared.replenish();
        }
        Ok(launcher)
    }

    /// Boots of an image that nothing was booted from yet.
    pub(super) fn of_image(new: NewBoots) -> Self {
        let NewBoots { pool, store, terms, output, stored, stands_on, rootfs, .. } = new;
        let (image, image_name) = (stored.image.clone(), stored.name);
        let (stored, decrypted) = match stands_on {
            Some(StandsOn { base, decrypted }) => (base, Some(decrypted)),
            None => (stored, None),
        };
        let shared = ImageBoots {
            pool,
            terms,
            output,
            image,
            image_name,
            image_id: ImageId(image_name),
            stored,
            rootfs,
            store,
            plan: RwLock::new(new.plan),
            ready_plan: RwLock::new(new.ready_plan),
            standby: new.standby,
            techniques: new.techniques,
            working_set: Mutex::new(new.working_set),
            last_boot_ns: AtomicU64::new(0),
            cold: ColdBoots::default(),
            image_boots: AtomicU64::new(0),
            recordings: Recordings::default(),
            resumed: Mutex::default(),
            decrypted,
            execs: OnceLock::new(),
        };
        shared.pool.keep(shared.terms.processes);
        Self::from(shared)
    }

    /// Copies get their secrets and volumes from there.
    pub(crate) fn read_secrets_from(&self, store: Option<&Arc<SecretStore>>) {
        if let Some(store) = store {
            self.shared.terms.read_secrets_from(store);
            if self.shared.terms.has_volumes() {
                self.shared.replenish();
            }
        }
    }

    /// Makes sure, blocking, that the next boot can be of this kind.
    ///
    /// # Errors
    /// What it would begin from cannot be made.
    pub fn prepare(&self, kind: BootKind) -> Result<(), LaunchError> {
        let shared = &self.shared;
        match kind {
            BootKind::Cold | BootKind::Warm => Ok(()),
            BootKind::Fork => shared.standby.fill_template(shared),
            BootKind::Ready => shared.standby.fill_ready(shared).map_err(|unready| match unready {
                Unready::Failed(error) => error,
                Unready::NoRoom => LaunchError::Failed("the tenant's quota is used up".to_owned()),
            }),
            BootKind::Asleep => {
                Err(LaunchError::Failed("nothing of a function is asleep".to_owned()))
            }
        }
    }

    /// Whether a working set is in use.
    pub fn has_working_set(&self) -> bool {
        let state = self.shared.working_set.lock().expect("no holder panics");
        matches!(*state, WorkingSetState::Known(..))
    }

    /// The image that is booted.
    pub fn image(&self) -> &Image {
        &self.shared.image
    }

    /// Whether nothing needs the image: there is no instance of it, nothing is kept for the next
    /// boots, and nothing is being done in the background.
    pub(super) fn is_unused(&self) -> bool {
        let StandbyInfo { ready, template, forked, .. } = self.standby();
        ready.is_empty()
            && template.is_none()
            && forked.is_empty()
            && Arc::strong_count(&self.shared) == 1
    }
}

impl SandboxLauncher {
    /// A client's connection as the sandbox sees it.
    fn handed<'a>(&self, client: Option<&'a Client>) -> Handed<'a> {
        client.map(|client| self.shared.hand(client))
    }

    /// Watches a sandbox whose boot has begun, and makes what was used for it again.
    fn launched(&self, boot: Boot) -> Result<Launched, LaunchError> {
        let shared = &self.shared;
        shared.standby.request(shared);
        shared.replenish();
        let Boot { sandbox, plan, kind, taken_ns, output, lent, shows } = boot;
        let instance =
            SandboxInstance::new(sandbox, plan, shared.clone(), output.log).map_err(|error| {
                LaunchError::Failed(format!(
                    "cannot watch the new instance ({error}); raise the limit of open files"
                ))
            })?;
        let instance = instance.with_pipes(output.pipes).lent(lent).showing(shows);
        instance.sandbox().count_by(shared.terms.tenant.cpu().meter());
        instance.sandbox().enable_oom_killer(shared.terms.limits);
        let execs = shared.execs.get().cloned();
        Ok(Launched { instance: Box::new(instance), kind, zygote_ns: taken_ns, execs })
    }
}

impl Launcher for SandboxLauncher {
    fn launch(&self, client: Option<&Client>) -> Result<Launched, LaunchError> {
        let (shared, handed) = (&self.shared, self.handed(client));
        let secrets = shared.terms.secrets()?;
        let secrets = secrets.as_ref();
        let is_sample = shared.begins_sample();
        let of_standby = || {
            let waiting = shared.standby.boot_waiting(shared, handed, secrets);
            waiting.or_else(|| shared.standby.boot_fork(shared, handed, secrets))
        };
        let take = || {
            let zygote = shared.pool.take_in_haste(shared.terms.limits);
            zygote.map_err(|error| LaunchError::Failed(error.to_string()))
        };
        let boot = match if is_sample { None } else { of_standby() } {
            Some(boot) => boot,
            None => shared.boot_from_image(handed, secrets, take)?,
        };
        self.launched(boot)
    }

    fn launch_now(&self, client: Option<&Client>) -> Result<Launched, NotNow> {
        let (shared, handed) = (&self.shared, self.handed(client));
        let take = || shared.pool.take_ready_in_haste(shared.terms.limits).ok_or(NotNow::WouldWait);
        if shared.begins_sample() {
            // Its plan has to be made, which opens files.
            return Err(NotNow::WouldWait);
        }
        let secrets = shared.terms.secrets()?;
        let secrets = secrets.as_ref();
        let boot = match shared.standby.boot_waiting(shared, handed, secrets) {
            Some(boot) => boot,
            None if !self.is_ready() || shared.standby.is_rewinding() => {
                return Err(NotNow::WouldWait);
            }
            None => shared.boot_from_image(handed, secrets, take)?,
        };
        Ok(self.launched(boot)?)
    }

    fn coming_back(&self) -> Option<ComingBack> {
        // One that is to show its working set does not come back.
        let waits = !self.shared.is_sample_due();
        waits.then(|| self.shared.standby.coming_back()).flatten()
    }

    fn egress(&self) -> Option<Arc<EgressPolicy>> {
        Some(self.shared.terms.egress.clone())
    }

    fn take_over(
        &self,
        orphan: Orphan,
        thawed: Option<ImageId>,
        egress: Option<&Arc<EgressPolicy>>,
        limits: ResourceLimits,
    ) -> Result<Box<dyn Instance>, LaunchError> {
        let failed = |error: &dyn std::fmt::Display| LaunchError::Failed(error.to_string());
        let shared = self.shared.clone();
        let (plan, terms) = (shared.plan(), &shared.terms);
        let egress = egress.unwrap_or(&terms.egress);
        let adopted = orphan
            .adopt(
                &plan,
                limits,
                terms.cpu_time_limit,
                egress,
                terms.volumes()?,
                thawed.map(|id| id.0),
            )
            .map_err(|error| failed(&error))?;
        let readers = <[OwnedFd; 2]>::try_from(adopted.descriptors)
            .map_err(|_| failed(&"the pipes of its output are missing"))?;
        let log = shared.output.adopt(readers).map_err(|error| failed(&error))?;
        let instance = SandboxInstance::new(adopted.sandbox, plan, shared.clone(), log)
            .map_err(|error| failed(&error))?;
        let instance = instance.kept_as(adopted.kept).limited_to(limits);
        instance.sandbox().enable_oom_killer(limits);
        let meter = self.shared.terms.tenant.cpu().meter();
        let counted = instance.sandbox().count_from_now_by(meter);
        counted.map_err(|error| failed(&error))?;
        Ok(Box::new(instance))
    }

    fn waken(
        &self,
        file: File,
        checksum: ImageId,
        base: Option<&FreezeBase>,
        clients: Vec<Arc<Client>>,
        decrypted: Option<Decrypted>,
        limits: ResourceLimits,
    ) -> Result<Arc<dyn Launcher>, WakeError> {
        self.shared.waken(file, checksum, base, clients, decrypted, limits)
    }

    fn mounting(&self, more: &[VolumeMount]) -> Result<(Arc<dyn Launcher>, u32), LaunchError> {
        let (terms, first) = self.shared.terms.mounting(more)?;
        Ok((Arc::new(self.shared.with_terms(terms)), first))
    }

    fn go_on_with(&self, execs: Vec<ExecNote>) {
        // Kernels of other builds may not know how to wait for them.
        if self.shared.image.header().kernel_build == kernel_build_id() {
            // Nobody says it twice.
            let _ = self.shared.execs.set(execs.into());
        }
    }

    fn index(&self) -> Option<IndexId> {
        Some(self.shared.rootfs.id())
    }

    fn kernel_build(&self) -> Option<KernelId> {
        Some(KernelId(self.shared.image.header().kernel_build))
    }

    fn is_ready(&self) -> bool {
        let shared = &self.shared;
        // A template that has to fork takes a while.
        shared.standby.has_waiting()
            || !shared.standby.has_template() && shared.pool.has_ready(shared.terms.processes)
    }

    fn standby(&self) -> StandbyInfo {
        self.shared.standby.info()
    }

    fn standby_memory(&self) -> Vec<(StandbyState, MemoryReader)> {
        self.shared.standby.memory_readers()
    }

    fn spare_room(&self) -> Option<Lease> {
        self.shared.standby.spare_room()
    }

    fn give_up_one(&self) -> bool {
        self.shared.standby.give_up_one()
    }

    fn give_up_ready(&self) {
        self.shared.standby.give_up_ready();
    }

    fn stand_down(&self) {
        self.shared.standby.stand_down();
    }

    fn withdraw_secrets(&self) {
        self.shared.terms.withdraw_secrets();
    }
}

/// A sandbox whose boot has begun.
pub(super) struct Boot {
    pub sandbox: Sandbox,
    pub plan: Arc<BootPlan>,
    pub kind: BootKind,
    /// When what it begins from had been taken.
    pub taken_ns: u64,
    pub output: Output,
    /// It will be ready again.
    pub lent: Option<Lent>,
    /// What it shows of the working set.
    pub shows: Shows,
}

impl Boot {
    /// A copy of a template.
    pub fn fork(sandbox: Sandbox, plan: Arc<BootPlan>, taken_ns: u64, output: Output) -> Self {
        let (kind, shows) = (BootKind::Fork, Shows::default());
        Self { sandbox, plan, kind, taken_ns, output, lent: None, shows }
    }
}

/// A client's socket on its way into a sandbox.
pub(super) type Handed<'a> = Option<(Connection, BorrowedFd<'a>)>;

impl ImageBoots {
    /// A client's connection as the sandbox sees it.
    fn hand<'a>(&self, client: &'a Client) -> (Connection, BorrowedFd<'a>) {
        // The guest listens on its own port, whatever the gateway's is.
        let local = (client.local.ip(), self.terms.port).into();
        (connection(client.id, client.peer, local), client.socket.as_fd())
    }

    /// Boots of the same image under other terms. Nothing is kept ready for them.
    fn with_terms(&self, terms: InstanceTerms) -> SandboxLauncher {
        let plan = self.plan();
        let decrypted = self.decrypted.clone();
        let (image, stored) = (self.image.clone(), self.stored.clone());
        let new = Self::of_plan(self, image, self.image_name, stored, (plan, terms, decrypted));
        if let Some(execs) = self.execs.get() {
            // It is new, and nobody else has said it.
            let _ = new.execs.set(execs.clone());
        }
        SandboxLauncher::from(new)
    }

    /// Boots of an image with the files of these, for which nothing is kept ready, and of which no
    /// working set is recorded.
    pub(super) fn of_plan(
        &self,
        image: Arc<Image>,
        image_name: [u8; 32],
        stored: FreezeBase,
        (plan, terms, decrypted): (Arc<BootPlan>, InstanceTerms, Option<Decrypted>),
    ) -> Self {
        Self {
            pool: self.pool.clone(),
            terms,
            output: self.output.clone(),
            image,
            image_name,
            stored,
            rootfs: self.rootfs.clone(),
            store: self.store.clone(),
            image_id: self.image_id,
            ready_plan: RwLock::new(plan.clone()),
            plan: RwLock::new(plan),
            standby: Standby::new(BootPolicy::NONE),
            techniques: self.techniques,
            working_set: Mutex::new(WorkingSetState::Off),
            last_boot_ns: AtomicU64::new(0),
            cold: ColdBoots::default(),
            image_boots: AtomicU64::new(0),
            recordings: Recordings::default(),
            resumed: Mutex::default(),
            decrypted,
            execs: OnceLock::new(),
        }
    }

    fn exec_flags(&self) -> u32 {
        self.execs.get().map_or(0, |_| FLAG_EXECS_GO_ON)
    }

    /// Boots from the image in a zygote that `take` takes.
    fn boot_from_image<E: From<LaunchError>>(
        self: &Arc<Self>,
        handed: Handed<'_>,
        secrets: Option<&Secrets>,
        take: impl Fn() -> Result<Zygote, E>,
    ) -> Result<Boot, E> {
        let may_be_gone = self.is_first_for_long() || self.is_unknown();
        let cold = self.cold.wanted(may_be_gone);
        let (plan, shows) = self.showing_plan(cold.as_deref());
        let pipes = self.output.pipes()?;
        // Its own sockets stay open no longer than those of who keeps them.
        let clients = mem::take(&mut *self.resumed.lock().expect("no holder panics"));
        let resumed: Vec<_> = clients.iter().map(|client| self.hand(client)).collect();
        let mut tried = 0;
        let booted = loop {
            let zygote = match take() {
                Ok(zygote) => zygote,
                Err(error) => break Err(error),
            };
            let taken_ns = monotonic_ns();
            tried += 1;
            zygote.label(&self.terms.label);
            let options = self.terms.options(Some(&pipes));
            let flags = options.flags | self.recording_flags(shows) | self.exec_flags();
            let options = ThawOptions { flags, resumed: &resumed, secrets, ..options };
            match zygote.thaw(&plan, handed, &options) {
                Ok(sandbox) => break Ok((sandbox, taken_ns)),
                Err(BootError::ZygoteDied) if tried < ZYGOTES_TRIED => self.pool.discard_dead(),
                Err(error) => break Err(LaunchError::Failed(error.to_string()).into()),
            }
        };
        // Not before: the thread that reads would take this one's processor.
        if let Some(cold) = &cold {
            cold.read_ahead(self.rootfs.file());
        }
        self.pool.replenish();
        let (sandbox, taken_ns) = booted.inspect_err(|_| self.recordings.not_shown(shows))?;
        self.image_boots.fetch_add(1, Ordering::Relaxed);
        let is_cold = cold.is_some() || may_be_gone && self.read_ahead(&plan);
        let kind = if is_cold { BootKind::Cold } else { BootKind::Warm };
        Ok(Boot { sandbox, plan, kind, taken_ns, output: pipes.into(), lent: None, shows })
    }

    /// Makes the memory of an instance that is at rest the image of the function.
    ///
    /// # Errors
    /// One sentence for the operator.
    pub fn freeze(&self, sandbox: &Sandbox, rest: EntryPoint) -> Result<FrozenInstance, String> {
        let function = self.terms.function.as_str();
        let (image, report) =
            freeze_instance(&self.store, function, sandbox, rest, &self.rootfs, self.image_id)
                .map_err(|error| error.to_string())?;
        Ok(FrozenInstance {
            image: image.to_string(),
            file_len: report.file_len,
            stored: report.stored,
            mappings: report.mappings,
            freeze_ms: report.duration.as_secs_f64() * 1e3,
        })
    }

    /// What is kept ready for the next boots.
    pub fn standby(&self) -> &Standby {
        &self.standby
    }

    /// What templates are made from.
    pub fn plan(&self) -> Arc<BootPlan> {
        self.plan.read().expect("no holder panics").clone()
    }

    /// What instances are made from that are booted ahead.
    pub fn ready_plan(&self) -> Arc<BootPlan> {
        self.ready_plan.read().expect("no holder panics").clone()
    }

    /// Whether no boot is likely to change the plans any more. A program that ends
    /// with its first request never shows its working set.
    pub fn is_settled(&self) -> bool {
        if self.image_boots.load(Ordering::Relaxed) >= BOOTS_UNTIL_SETTLED {
            return true;
        }
        let state = self.working_set.lock().expect("no holder panics");
        !matches!(*state, WorkingSetState::Wanted(_))
    }

    /// Makes in the background what the next boots are to begin from.
    pub(super) fn replenish(self: &Arc<Self>) {
        if !self.standby.is_wanting(self) {
            return;
        }
        // Without a runtime there is nobody to do it meanwhile.
        if let Ok(runtime) = tokio::runtime::Handle::try_current() {
            let shared = self.clone();
            runtime.spawn_blocking(move || shared.standby.replenish(&shared));
        }
    }

    /// Whether the last boot is so long ago that the image may have left the page cache.
    fn is_first_for_long(&self) -> bool {
        let now_ns = monotonic_ns();
        let last_ns = self.last_boot_ns.swap(now_ns, Ordering::Relaxed);
        now_ns.saturating_sub(last_ns) >= COLD_AFTER.as_nanos() as u64
    }

    /// Lets the host read the working set in large requests while the sandbox already
    /// maps, where there is no prefetch file. Returns whether the boot counts as cold.
    fn read_ahead(self: &Arc<Self>, plan: &Arc<BootPlan>) -> bool {
        if self.cold.is_prepared() {
            return false;
        }
        let set = match &*self.working_set.lock().expect("no holder panics") {
            WorkingSetState::Known(set, _) => set.clone(),
            // Nobody has seen it yet. Most of an image is needed by its first request.
            WorkingSetState::Wanted(_)
            | WorkingSetState::WantedLater(..)
            | WorkingSetState::Unknown => {
                let image = self.image.clone();
                in_background(move || image.read_ahead(UNKNOWN_MAX).map(drop));
                return true;
            }
            WorkingSetState::Off => return true,
        };
        let (image, plan) = (self.image.clone(), plan.clone());
        in_background(move || {
            set.read_ahead(&image).and_then(|_| set.read_ahead_blobs(&plan)).map(drop)
        });
        true
    }

    /// Makes cold boots begin from the stored prefetch file. False: there is none, not even one
    /// that cannot be used.
    fn use_prefetch_file(&self, set: &Arc<WorkingSet>, policy: PopulatePolicy) -> bool {
        let loaded = self.plan_with(set, policy).map_err(|error| error.to_string());
        let loaded = loaded.and_then(|cold| {
            let plans = Plans { warm: self.plan(), cold };
            self.cold.load(&self.store, self.image_id, plans, set, policy)
        });
        loaded.unwrap_or_else(|error| {
            let function = self.terms.function.as_str();
            tracing::warn!(function, "cold boots go on without a prefetch file: {error}");
            true
        })
    }

    /// A plan that uses no working set.
    pub(super) fn bare_plan(&self) -> Result<BootPlan, PlanError> {
        let (file, len) = (self.rootfs.file(), self.rootfs.file_len());
        Ok(self.techniques.reduce(self.image.plan(file, len, self.rootfs.blobs())?))
    }

    /// A plan that uses a working set.
    pub(super) fn plan_with(
        &self,
        set: &WorkingSet,
        policy: PopulatePolicy,
    ) -> Result<BootPlan, PlanError> {
        let (file, len) = (self.rootfs.file(), self.rootfs.file_len());
        let mut plan = self.image.plan(file, len, self.rootfs.blobs())?;
        plan.apply_working_set(set, policy)?;
        Ok(self.techniques.reduce(plan))
    }

    /// Lets the page cache fill with what a cold boot has not read.
    pub fn fill_cache_behind(&self) {
        self.cold.fill_behind(&self.image);
    }

    /// Writes the pages of a new working set to a file for cold boots.
    pub(super) fn store_prefetch_file(&self, set: &Arc<WorkingSet>, policy: PopulatePolicy) {
        let tenant = &self.terms.tenant;
        match ColdBoots::store(&self.store, tenant, self.image_id, &self.plan(), set) {
            Ok(true) => drop(self.use_prefetch_file(set, policy)),
            Ok(false) => {}
            Err(error) => {
                let function = self.terms.function.as_str();
                tracing::warn!(function, "cold boots go on without a prefetch file: {error}");
            }
        }
    }
}
