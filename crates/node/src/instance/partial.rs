//! Boots of a function of which only a part is here.

use super::BootPolicy;
use super::options::Techniques;
use super::recording::WorkingSetState;
use super::sandboxed::{NewBoots, SandboxLauncher};
use super::standby::Standby;
use super::terms::{FunctionOutput, InstanceTerms};
use crate::far::FarContents;
use crate::logs::{FunctionLog, Logs};
use crate::tenants::Tenant;
use std::sync::Arc;
use thaw_home::config::FunctionConfig;
use thaw_home::partial::PartialFunction;
use thaw_home::rootfs::StoredRootfs;
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
        let (plan, techniques) = (Arc::new(plan), Techniques::default());
        Ok(Self::of_image(NewBoots {
            pool,
            store: store.clone(),
            terms: InstanceTerms::new(config, tenant, techniques),
            output: FunctionOutput { logs, log },
            stored: FreezeBase { image: Arc::new(image), name: *image_id.as_bytes() },
            stands_on: None,
            rootfs,
            ready_plan: plan.clone(),
            plan,
            standby: Standby::new(BootPolicy::NONE),
            techniques,
            // A copy maps by page and has one vCPU until it has answered.
            working_set: WorkingSetState::Unknown,
        }))
    }
}
