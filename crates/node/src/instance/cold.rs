//! Cold boots: those of an image whose pages have left the page cache.

use crate::tenants::Tenant;
use std::fs::File;
use std::io;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, RwLock};
use thaw_sandbox::prefetch::read_ahead;
use thaw_sandbox::{BootPlan, CacheProbe, Image, PopulatePolicy, PrefetchLayout, WorkingSet};
use thaw_store::{ImageId, PREFETCH_HEAD, PREFETCH_MAX, Store};

/// The largest index that is read ahead, in bytes: a millisecond of a usual disk. Of a larger one a
/// first request touches a small part.
const INDEX_MAX: u64 = 1 << 20;

/// How an image boots cold, if it has a prefetch file.
#[derive(Default)]
pub(super) struct ColdBoots {
    prefetched: RwLock<Option<Arc<Prefetched>>>,
    boots: AtomicUsize,
}

/// All that is needed to boot from a prefetch file.
pub(super) struct Prefetched {
    /// Boots that take the pages of the working set from the file.
    plan: Arc<BootPlan>,
    /// The same boots with all pages from the image and the blobs.
    warm_plan: Arc<BootPlan>,
    file: Arc<File>,
    set: Arc<WorkingSet>,
    probe: CacheProbe,
    /// Its image and blobs are being read into the page cache.
    is_filling: AtomicBool,
}

/// The plans of a working set: with which a prefetch file is written, and which is to use it.
pub(super) struct Plans {
    pub warm: Arc<BootPlan>,
    pub cold: BootPlan,
}

impl ColdBoots {
    /// Writes the pages of the working set to a prefetch file, if the function's tenant may
    /// have so much in the store. `Ok(false)`: it has none that are worth a file.
    ///
    /// # Errors
    /// One sentence that says what went wrong.
    pub fn store(
        store: &Store,
        tenant: &Tenant,
        image: ImageId,
        plan: &BootPlan,
        set: &WorkingSet,
    ) -> Result<bool, String> {
        let Some(layout) = PrefetchLayout::new(plan, set, PREFETCH_HEAD, PREFETCH_MAX) else {
            return Ok(false);
        };
        let write = |file: &File| layout.write(plan, file).map(|()| layout.len());
        let _turn = store.counting_turn().map_err(|error| error.to_string())?;
        tenant
            .check_file(store, "a prefetch file", PREFETCH_HEAD + layout.len())
            .map_err(|error| error.to_string())?;
        store.put_prefetch(image, layout.name(), write).map_err(|error| error.to_string())?;
        Ok(true)
    }

    /// Uses the stored prefetch file of the image from now on, if it belongs to the working
    /// set. Reads all of it to see that it is intact. `Ok(false)`: there is none of this set.
    ///
    /// # Errors
    /// One sentence that says what went wrong; boots go on without.
    pub fn load(
        &self,
        store: &Store,
        image: ImageId,
        Plans { warm, mut cold }: Plans,
        set: &Arc<WorkingSet>,
        policy: PopulatePolicy,
    ) -> Result<bool, String> {
        let Some(layout) = PrefetchLayout::new(&cold, set, PREFETCH_HEAD, PREFETCH_MAX) else {
            return Ok(false);
        };
        let stored = store.open_prefetch(image).map_err(|error| error.to_string())?;
        let Some(stored) = stored else { return Ok(false) };
        if stored.layout() != layout.name() || stored.len() != PREFETCH_HEAD + layout.len() {
            // A daemon has ended between storing the two: it is written anew.
            return Ok(false);
        }
        let file = Arc::new(stored.into_file());
        cold.prefetch(file.clone(), layout, set, policy).map_err(|error| error.to_string())?;
        let prefetched = Prefetched {
            plan: Arc::new(cold),
            probe: CacheProbe::new(&warm, set),
            warm_plan: warm,
            file,
            set: set.clone(),
            is_filling: AtomicBool::new(false),
        };
        *self.prefetched.write().expect("no holder panics") = Some(Arc::new(prefetched));
        Ok(true)
    }

    /// How to boot if the pages are not in the page cache. Looks at one page, which takes
    /// 0.3 µs, and at more only if that is not there or the last boot is long
    /// ago (`may_be_gone`).
    pub fn wanted(&self, may_be_gone: bool) -> Option<Arc<Prefetched>> {
        let prefetched = self.prefetched();
        let prefetched = prefetched.as_ref()?;
        let (probe, plan) = (&prefetched.probe, &prefetched.warm_plan);
        let turn = self.boots.fetch_add(1, Ordering::Relaxed);
        if !may_be_gone && probe.is_one_cached(plan, turn) != Some(false) {
            return None;
        }
        // A host that does not say leaves only the time to judge by.
        let is_gone = probe.are_most_cached(plan).map_or(may_be_gone, |cached| !cached);
        is_gone.then(|| prefetched.clone())
    }

    /// Whether there is a prefetch file.
    pub fn is_prepared(&self) -> bool {
        self.prefetched().is_some()
    }

    /// Lets the page cache take in the image and the blobs behind a cold boot, so that the
    /// next boots are warm.
    pub fn fill_behind(&self, image: &Arc<Image>) {
        let Some(prefetched) = self.prefetched() else { return };
        if prefetched.is_filling.swap(true, Ordering::Relaxed) {
            return;
        }
        let image = image.clone();
        in_background(move || {
            let read = prefetched.set.read_in_order(&image, &prefetched.warm_plan);
            prefetched.is_filling.store(false, Ordering::Relaxed);
            read
        });
    }

    fn prefetched(&self) -> Option<Arc<Prefetched>> {
        self.prefetched.read().expect("no holder panics").clone()
    }
}

impl Prefetched {
    /// How to boot.
    pub fn plan(&self) -> Arc<BootPlan> {
        self.plan.clone()
    }

    /// Begins to read the prefetch file, and before it the index of the root file system: it is
    /// small, and what is touched of it would wait behind the whole prefetch file.
    pub fn read_ahead(&self, index: Arc<File>) {
        let file = self.file.clone();
        in_background(move || {
            if index.metadata()?.len() <= INDEX_MAX {
                read_ahead(&index)?;
            }
            read_ahead(&file)
        });
    }
}

/// Reads ahead on a thread that may wait. Without a runtime there is nobody to do it
/// meanwhile, and the pages are read when they are touched.
pub(super) fn in_background(read: impl FnOnce() -> io::Result<()> + Send + 'static) {
    let read = || {
        if let Err(error) = read() {
            tracing::debug!("could not read ahead: {error}");
        }
    };
    if let Ok(runtime) = tokio::runtime::Handle::try_current() {
        runtime.spawn_blocking(read);
    }
}
