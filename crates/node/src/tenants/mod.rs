//! Tenants: all functions of a sharing domain together, what they use, and what they may
//! use.
//!
//! The operator sets quotas in `$THAW_HOME/tenants.toml` ([`Quotas`]). A tenant at its
//! bound waits for itself and for nobody else: its requests stand in a line of their own
//! ([`Room`]), hold no place of the node while they do, and make room by ending what is
//! idle of the same tenant.
//!
//! | file | what it bounds |
//! | --- | --- |
//! | `room` | instances, and the sum of their memory limits |
//! | `cpu`, `carried` | CPU time in a period, which outlasts the daemon |
//! | `swap` | bytes in swap files, counted when an instance hibernates |
//! | `report` | all of it, to be shown |
//!
//! Outgoing connections are bounded by [`EgressQuota`], where they are made; bytes in the store by
//! [`thaw_home::tenants`], when a function is built.

mod carried;
mod cpu;
mod report;
mod room;
mod swap;

pub use carried::{CARRIED_FILE, read_periods, write_down, write_periods};
pub use cpu::{CpuAccount, PeriodUse};
pub use report::{CpuPeriod, TenantReport};
pub(crate) use room::Ending;
pub use room::{Lease, Room, Taken};
pub use swap::{SwapLease, SwapRoom};

pub(crate) use cpu::Standing;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock};
use thaw_home::config::{ByteSize, Quota, Quotas, QuotasError};
use thaw_home::seal::{Unsealer, Unsealers};
use thaw_home::tenants::{StoreQuotaError, StoreUse, TenantName, check_file};
use thaw_sandbox::{CoreError, CoreGroup, CoreScheduling, EgressQuota, VolumeShare};
use thaw_store::Store;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// A bound that keeps one more instance out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Unmet {
    Instances { most: u32 },
    Memory { most: ByteSize },
}

/// The reasons for which requests of a tenant are refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Refused {
    Instances,
    Memory,
    CpuTime,
}

impl From<Unmet> for Refused {
    fn from(unmet: Unmet) -> Self {
        match unmet {
            Unmet::Instances { .. } => Self::Instances,
            Unmet::Memory { .. } => Self::Memory,
        }
    }
}

/// Names of the reasons in metrics, in the order of [`Refused`].
pub(crate) const REFUSED_NAMES: [&str; 3] = ["instances", "memory", "cpu_time"];

/// Most liveness probes of a tenant that are under way at a time: a quarter of the node's, so that
/// instances of one or a few that never answer leave room for those of others.
const PROBES_MAX: usize = 16;

/// All functions of one domain.
#[derive(Debug)]
pub struct Tenant {
    name: TenantName,
    quota: Mutex<Quota>,
    room: Arc<Room>,
    swap: Arc<SwapRoom>,
    cpu: CpuAccount,
    egress: Arc<EgressQuota>,
    /// Connections of its sandboxes to the proxy of `[[egress.inject]]`.
    injected: Arc<AtomicUsize>,
    volumes: VolumeShare,
    refused: [AtomicU64; REFUSED_NAMES.len()],
    /// Liveness probes of its instances that may be under way.
    probes: Arc<Semaphore>,
    /// Bytes on disk of its instances that are asleep.
    asleep: AtomicU64,
    /// Its files that are decrypted.
    unsealers: Unsealers,
    /// Made with its first function, if tenants are kept apart on cores.
    cores: OnceLock<CoreGroup>,
}

/// Bytes on disk of an instance that is asleep, which count for its tenant until this is dropped.
#[derive(Debug)]
pub(crate) struct AsleepBytes {
    tenant: Arc<Tenant>,
    bytes: AtomicU64,
}

impl AsleepBytes {
    /// How many.
    pub fn get(&self) -> u64 {
        self.bytes.load(Ordering::Relaxed)
    }

    /// They count no more, whoever still has this value.
    pub fn give_back(&self) {
        let bytes = self.bytes.swap(0, Ordering::Relaxed);
        self.tenant.asleep.fetch_sub(bytes, Ordering::Relaxed);
    }
}

impl Drop for AsleepBytes {
    fn drop(&mut self) {
        self.give_back();
    }
}

impl Tenant {
    pub(crate) fn new(name: TenantName, quota: Quota) -> Arc<Self> {
        let tenant = Self {
            name,
            quota: Mutex::default(),
            room: Arc::default(),
            swap: Arc::default(),
            cpu: CpuAccount::default(),
            egress: Arc::default(),
            injected: Arc::default(),
            volumes: VolumeShare::default(),
            refused: Default::default(),
            probes: Arc::new(Semaphore::new(PROBES_MAX)),
            asleep: AtomicU64::new(0),
            unsealers: Unsealers::default(),
            cores: OnceLock::new(),
        };
        tenant.set(quota);
        Arc::new(tenant)
    }

    /// Which tenant it is.
    pub fn name(&self) -> &TenantName {
        &self.name
    }

    /// What it may use.
    pub fn quota(&self) -> Quota {
        *self.quota.lock().expect("no holder panics")
    }

    /// Room for its instances.
    pub fn room(&self) -> &Arc<Room> {
        &self.room
    }

    /// Room for its swap files.
    pub fn swap(&self) -> &Arc<SwapRoom> {
        &self.swap
    }

    /// A place among its liveness probes; `None`: all are taken.
    pub(crate) fn probe_place(&self) -> Option<OwnedSemaphorePermit> {
        self.probes.clone().try_acquire_owned().ok()
    }

    /// A place among those who decrypt, to be kept until the file is there.
    pub(crate) async fn unsealer(&self) -> Unsealer {
        self.unsealers.enter().await
    }

    /// Room for memory that the host keeps for one of its instances beside the instance's own.
    ///
    /// # Errors
    /// One sentence for the operator: its quota has none.
    pub(crate) fn keep_memory(&self, bytes: u64) -> Result<Lease, String> {
        self.room.try_keep(bytes).ok_or_else(|| {
            format!(
                "the quota of {} has no room for {} of decrypted memory; see `thaw tenants`",
                self.name,
                ByteSize(bytes)
            )
        })
    }

    /// Its CPU time.
    pub fn cpu(&self) -> &CpuAccount {
        &self.cpu
    }

    /// The bounds of its outgoing connections.
    pub fn egress(&self) -> &Arc<EgressQuota> {
        &self.egress
    }

    /// How many connections its sandboxes have to the proxy of `[[egress.inject]]`.
    pub(crate) fn injected(&self) -> &Arc<AtomicUsize> {
        &self.injected
    }

    /// What its sandboxes may make this process keep for volumes.
    pub fn volumes(&self) -> &VolumeShare {
        &self.volumes
    }

    /// With whom its sandboxes may share a core; `None`: with everybody.
    pub fn cores(&self) -> Option<&CoreGroup> {
        self.cores.get()
    }

    /// Bytes on disk of its instances that are asleep.
    pub fn asleep_bytes(&self) -> u64 {
        self.asleep.load(Ordering::Relaxed)
    }

    /// Counts so many bytes of one more instance that is asleep.
    pub(crate) fn count_asleep(self: &Arc<Self>, bytes: u64) -> AsleepBytes {
        self.asleep.fetch_add(bytes, Ordering::Relaxed);
        AsleepBytes { tenant: self.clone(), bytes: AtomicU64::new(bytes) }
    }

    /// Whether it may have a file of `bytes` bytes beside what it has, its instances that are asleep
    /// included. To be asked during a [`Store::counting_turn`] that lasts until the file is there.
    ///
    /// # Errors
    /// It would have too much, or that cannot be counted.
    pub(crate) fn check_file(
        &self,
        store: &Store,
        with: &'static str,
        bytes: u64,
    ) -> Result<(), StoreQuotaError> {
        let more = bytes.saturating_add(self.asleep_bytes());
        check_file(store, (&self.name, self.quota().store), with, more)
    }

    pub(crate) fn note_refused(&self, why: Refused) {
        self.refused[why as usize].fetch_add(1, Ordering::Relaxed);
    }

    fn set(&self, quota: Quota) {
        // Two reloads at once must not mix.
        let mut current = self.quota.lock().expect("no holder panics");
        *current = quota;
        self.room.set(&quota);
        self.swap.set(quota.swap);
        self.egress.set(quota.egress_connections, quota.egress_per_second);
        self.cpu.set(quota.cpu_time);
    }

    /// Why an instance cannot have `memory` bytes, more than it has.
    pub(crate) fn explain_more(&self, most: Option<ByteSize>, memory: u64) -> String {
        let memory = ByteSize(memory);
        match most {
            Some(most) => format!(
                "the quota of {} is {most} of memory, and what its instances may use leaves no \
                 room for one of {memory}; see `thaw tenants`",
                self.name
            ),
            None => format!("others of {} wait for memory before; try again", self.name),
        }
    }

    /// Why an instance of `memory` bytes cannot be had.
    pub(crate) fn explain(&self, unmet: Unmet, memory: u64) -> String {
        match unmet {
            Unmet::Instances { most } => {
                let plural = if most == 1 { "" } else { "s" };
                format!("the quota of {} is {most} instance{plural}", self.name)
            }
            Unmet::Memory { most } => format!(
                "the quota of {} is {most} of memory, and an instance of this function may use {}",
                self.name,
                ByteSize(memory)
            ),
        }
    }
}

/// All tenants of a node, and where their quotas are written.
#[derive(Debug, Default)]
pub struct Tenants {
    state: Mutex<State>,
    store: StoreUse,
}

#[derive(Debug, Default)]
struct State {
    quotas: Quotas,
    file: Option<PathBuf>,
    known: BTreeMap<TenantName, Arc<Tenant>>,
    cores: Option<CoreScheduling>,
}

impl Tenants {
    /// From now on, sandboxes of different tenants never share a core at a time.
    pub fn keep_apart(&self, cores: CoreScheduling) {
        self.state().cores = Some(cores);
    }

    /// The tenant of this name, whose functions are about to be served.
    ///
    /// # Errors
    /// It cannot be kept apart from others.
    pub fn serving(&self, name: TenantName) -> Result<Arc<Tenant>, CoreError> {
        let tenant = self.of(name);
        let cores = self.state().cores.clone();
        if let Some(cores) = cores
            && tenant.cores().is_none()
        {
            // If somebody else was first, all use that one's.
            let _ = tenant.cores.set(cores.group()?);
        }
        Ok(tenant)
    }

    /// The tenant of this name.
    pub fn of(&self, name: TenantName) -> Arc<Tenant> {
        let mut state = self.state();
        let quota = state.quotas.of(name.domain());
        let ceiling = state.quotas.egress_of(name.domain());
        let made = || {
            let tenant = Tenant::new(name.clone(), quota);
            tenant.egress.set_ceiling(ceiling);
            tenant
        };
        state.known.entry(name.clone()).or_insert_with(made).clone()
    }

    /// The tenant of this name, if it is known.
    fn known(&self, name: &TenantName) -> Option<Arc<Tenant>> {
        self.state().known.get(name).cloned()
    }

    /// Sets the quotas.
    pub fn set(&self, quotas: Quotas) {
        let mut state = self.state();
        for tenant in state.known.values() {
            tenant.set(quotas.of(tenant.name.domain()));
            tenant.egress.set_ceiling(quotas.egress_of(tenant.name.domain()));
        }
        state.quotas = quotas;
    }

    /// Reads the quotas from a file, and again with every [`Tenants::reload`].
    ///
    /// # Errors
    /// The file is there and not usable.
    pub fn read_from(&self, file: PathBuf) -> Result<(), QuotasError> {
        self.state().file = Some(file);
        self.reload()
    }

    /// Reads the quotas again, and forgets tenants of which nothing is left. On an error
    /// the old quotas stay.
    ///
    /// # Errors
    /// The file is there and not usable.
    pub fn reload(&self) -> Result<(), QuotasError> {
        let file = self.state().file.clone();
        if let Some(file) = file {
            self.set(Quotas::load(&file)?);
        }
        // Who has a reference to a tenant has got it from here.
        self.state().known.retain(|_, tenant| Arc::strong_count(tenant) > 1);
        Ok(())
    }

    /// All tenants that have functions or a table of their own, in the order of their names.
    pub fn all(&self) -> Vec<Arc<Tenant>> {
        let named: Vec<_> = self.state().quotas.domains().cloned().collect();
        for domain in named {
            self.of(TenantName::of(Some(&domain)));
        }
        self.state().known.values().cloned().collect()
    }

    /// Those whose CPU time is bounded.
    pub(crate) fn with_cpu_quota(&self) -> Vec<Arc<Tenant>> {
        let known = self.state().known.values().cloned().collect::<Vec<_>>();
        known.into_iter().filter(|tenant| tenant.quota().cpu_time.is_some()).collect()
    }

    /// What they have in the store.
    pub fn store(&self) -> &StoreUse {
        &self.store
    }

    /// Whether the CPU time of anybody is bounded.
    pub fn bound_cpu_time(&self) -> bool {
        self.state().quotas.bound_cpu_time()
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("no holder panics")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn domain(name: &str) -> TenantName {
        TenantName::of(Some(&name.parse().unwrap()))
    }

    fn write(file: &std::path::Path, text: &str) {
        std::fs::write(file, text).unwrap();
    }

    #[test]
    fn quotas_change_with_the_file_and_a_wrong_file_changes_nothing() {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("tenants.toml");
        let tenants = Tenants::default();
        let tenant = tenants.of(domain("a"));
        tenants.read_from(file.clone()).unwrap();
        assert_eq!(tenant.quota(), Quota::default());
        write(&file, "[default]\ninstances = 3\n[domain.a]\ninstances = 2");
        tenants.reload().unwrap();
        assert_eq!(tenant.quota().instances, Some(2));
        assert_eq!(tenants.of(domain("b")).quota().instances, Some(3));
        write(&file, "[default]\ninstances = \"none\"");
        assert!(tenants.reload().is_err());
        assert_eq!(tenant.quota().instances, Some(2));
        std::fs::remove_file(&file).unwrap();
        tenants.reload().unwrap();
        assert_eq!(tenant.quota(), Quota::default());
    }

    #[test]
    fn tenants_without_functions_are_forgotten_unless_they_are_named() {
        let tenants = Tenants::default();
        let quotas = Quotas::parse("t".as_ref(), "[domain.named]").unwrap();
        tenants.set(quotas);
        let present = tenants.of(TenantName::default());
        for number in 0..100 {
            tenants.of(domain(&format!("gone-{number}")));
        }
        tenants.reload().unwrap();
        let names: Vec<_> = tenants.all().iter().map(|tenant| tenant.name().clone()).collect();
        assert_eq!(names, [present.name().clone(), domain("named")]);
    }

    #[test]
    fn a_refusal_names_tenant_and_bound() {
        let tenants = Tenants::default();
        tenants.set(Quotas::parse("t".as_ref(), "[default]\nmemory = \"64MiB\"").unwrap());
        let tenant = tenants.of(domain("a"));
        let memory = 65 << 20;
        let unmet = tenant.room().never_fits(memory).unwrap();
        let text = tenant.explain(unmet, memory);
        assert!(text.contains("domain `a`") && text.contains("64MiB") && text.contains("65MiB"));
        let instances = tenants.of(TenantName::default()).explain(Unmet::Instances { most: 2 }, 0);
        assert_eq!(instances, "the quota of functions without a domain is 2 instances");
    }
}
