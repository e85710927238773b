//! Zygotes for images of older kernel builds.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::Duration;

use super::{ZygoteConfig, ZygoteError, ZygotePool};
use crate::kernel::{Kernel, KernelError};

/// Older kernel builds that have pools at a time: each has a zygote parent, with its helpers.
pub const OLDER_BUILDS_MAX: usize = 8;
/// Most sandboxes of each older build at a time: user ids that the present one does not have.
const OLDER_SANDBOXES_MAX: u32 = 1024;
/// How long the zygote parent of an older build is kept while nobody boots.
const IDLE: Duration = Duration::from_secs(60);

/// The pools of zygotes of a daemon: one for each kernel build that its images need.
///
/// The pool of the present build always exists and keeps zygotes ready. Those of older builds
/// are made when somebody asks, live as long as somebody holds them, and keep nothing ready.
#[derive(Debug)]
pub struct BuildPools {
    present: Arc<ZygotePool>,
    older: Mutex<HashMap<[u8; 32], Weak<ZygotePool>>>,
    idle_after: Duration,
}

/// Why there are no zygotes of an older kernel build.
#[derive(Debug, thiserror::Error)]
pub enum BuildError<E> {
    /// Its kernel cannot be had.
    #[error("{0}")]
    Read(E),
    /// The kernel is not usable.
    #[error(transparent)]
    Kernel(#[from] KernelError),
    /// Too many builds are in use.
    #[error(
        "images of {OLDER_BUILDS_MAX} older kernel builds are in use, as many as can be at a time; \
         build the functions anew that `thaw inspect` shows on one of them"
    )]
    TooMany,
    /// No pool can be made.
    #[error(transparent)]
    Zygote(#[from] ZygoteError),
}

impl BuildPools {
    /// Pools beside that of the present build.
    pub fn new(present: Arc<ZygotePool>) -> Self {
        Self { present, older: Mutex::default(), idle_after: IDLE }
    }

    /// The same, with older zygote parents that end when nobody has booted for so long.
    pub fn with_idle_after(present: Arc<ZygotePool>, idle_after: Duration) -> Self {
        Self { idle_after, ..Self::new(present) }
    }

    /// The pool of the present build.
    pub fn present(&self) -> &Arc<ZygotePool> {
        &self.present
    }

    /// Whether `build` is the present one.
    pub fn is_present(&self, build: [u8; 32]) -> bool {
        self.present.zygotes().kernel.build_id() == build
    }

    /// The pool of a build. `read` brings the ELF file of an older one, if it has no pool yet.
    ///
    /// # Errors
    /// The kernel cannot be had or is not usable here, or too many builds are in use.
    pub fn of<E>(
        &self,
        build: [u8; 32],
        read: impl FnOnce() -> Result<Vec<u8>, E>,
    ) -> Result<Arc<ZygotePool>, BuildError<E>> {
        if self.is_present(build) {
            return Ok(self.present.clone());
        }
        let mut older = self.older.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(pool) = older.get(&build).and_then(Weak::upgrade) {
            return Ok(pool);
        }
        older.retain(|_, pool| pool.strong_count() > 0);
        if older.len() >= OLDER_BUILDS_MAX {
            return Err(BuildError::TooMany);
        }
        let kernel = Kernel::of_build(read().map_err(BuildError::Read)?, build)?;
        let present = self.present.zygotes();
        let max_sandboxes = present.max_sandboxes.min(OLDER_SANDBOXES_MAX);
        let zygotes = ZygoteConfig { kernel, max_sandboxes, ..present.clone() };
        let pool = Arc::new(ZygotePool::on_demand(zygotes, self.idle_after)?);
        older.insert(build, Arc::downgrade(&pool));
        Ok(pool)
    }

    /// Older builds that have a pool now.
    pub fn older_count(&self) -> usize {
        let older = self.older.lock().unwrap_or_else(PoisonError::into_inner);
        older.values().filter(|pool| pool.strong_count() > 0).count()
    }
}
