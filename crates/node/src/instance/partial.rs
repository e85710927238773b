//! Boots of a function of which only a part is here.

use super::BootPolicy;
use super::cold::ColdBoots;
use super::options::Techniques;
use super::recording::{Recordings, WorkingSetState};
use super::sandboxed::{ImageBoots, SandboxLauncher};
use super::standby::Standby;
use super::terms::{FunctionOutput, InstanceTerms};
use crate::config::FunctionConfig;
use crate::logs::{FunctionLog, Logs};
use crate::partial::{FarContents, PartialFunction};
use crate::rootfs::StoredRootfs;
use crate::tenants::Tenant;
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Mutex, RwLock};
use thaw_sandbox::{FreezeBase, PlanError, ZygotePool};
use thaw_store::Store;

/// What a function does without while it is partial: all that keeps, stores or compares memory of
/// its instances.
pub fn while_partial(config: &FunctionConfig) -> FunctionConfig {
    let mut config = config.clone();
    (config.ready, config.rewind, config.template.fork) = (0, Some(false), false);
    (config.persist, config.refresh) = (false, None);
    (config.limits.hibernate_after, config.limits.sleep_after) = (None, None);
    config.limits.crashes = 0;
    config
}

impl SandboxLauncher {
    /// Prepares boots of a partial function; `config` is what [`while_partial`] has made of its own.
    ///
    /// # Errors
    /// Its boot command would not fit into one message.
    pub fn of_partial(
        pool: Arc<ZygotePool>,
        store: &Store,
        (function, contents): (PartialFunction, Arc<FarContents>),
        (logs, log): (Arc<Logs>, Arc<FunctionLog>),
        tenant: Arc<Tenant>,
        config: &FunctionConfig,
    ) -> Result<Self, PlanError> {
        let index_id = function.index_id();
        let PartialFunction { record, index, image, working_set, prefetch, layout, .. } = function;
        let image_id = record.document.image.id;
        let index_len = record.document.index.size;
        let rootfs = StoredRootfs::elsewhere(index, index_len, index_id, contents);
        let files = (rootfs.file(), index_len);
        let plan = image.plan_partial(files, rootfs.blobs(), (layout, prefetch), &working_set)?;
        let (plan, image, image_name) = (Arc::new(plan), Arc::new(image), *image_id.as_bytes());
        let techniques = Techniques::default();
        let shared = ImageBoots {
            pool,
            terms: InstanceTerms::new(config, tenant, techniques),
            output: FunctionOutput { logs, log },
            stored: FreezeBase { image: image.clone(), name: image_name },
            image,
            image_name,
            rootfs,
            store: store.clone(),
            image_id,
            plan: RwLock::new(plan.clone()),
            ready_plan: RwLock::new(plan),
            standby: Standby::new(BootPolicy::NONE),
            techniques,
            // A copy maps by page and has one vCPU until it has answered.
            working_set: Mutex::new(WorkingSetState::Unknown),
            last_boot_ns: AtomicU64::new(0),
            cold: ColdBoots::default(),
            image_boots: AtomicU64::new(0),
            recordings: Recordings::default(),
            resumed: Mutex::default(),
        };
        shared.pool.keep(shared.terms.processes);
        Ok(Self::from(shared))
    }
}
