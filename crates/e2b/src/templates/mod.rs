//! Templates that clients build: `Template` of E2B's SDKs.
//!
//! A build makes a sandbox of its base, does the steps in it from outside, has the start command
//! run, and takes a checkpoint, as `create_snapshot` does. A template is such a checkpoint with a
//! name. Sandboxes of it go on where it was taken, with the start command running.
//!
//! | file | |
//! | --- | --- |
//! | `control`, `tags`, `shown` | requests for templates and builds, and their answers |
//! | `steps`, `names` | what a client may ask for |
//! | `known`, `records` | what is kept of templates and builds |
//! | `running`, `log` | builds that are under way, and what they say |
//! | `origin` | what sandboxes and templates begin with |
//! | `build`, `shell`, `copying`, `archive` | the build itself |
//! | `cache`, `reusing` | steps that need not be done again |
//! | `uploads`, `uploading` | files for it |

mod archive;
mod build;
mod cache;
mod control;
mod copying;
mod known;
mod log;
mod names;
mod origin;
mod records;
mod reusing;
mod running;
mod shell;
mod shown;
mod steps;
mod tags;
mod uploading;
mod uploads;

pub(super) use control::{remove, routes};
pub(super) use names::plain_image;
pub(super) use uploading::routes as upload_routes;

use super::E2b;
use build::Times;
use cache::StepCache;
use records::TemplateRecords;
use running::Builds;
use std::collections::BTreeSet;
use std::io;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;
use uploads::{UploadBounds, Uploads};

/// How often a sandbox is ended that the daemon before this one has left.
const ENDED_AT_MOST: u32 = 60;
/// How long is waited in between.
const ENDED_EVERY: Duration = Duration::from_secs(1);

/// The templates of all keys.
pub(super) struct Templates {
    records: TemplateRecords,
    cache: StepCache,
    uploads: Arc<Uploads>,
    running: Builds,
    pub(super) times: Times,
    /// Builds that the daemon before this one has left, and their sandboxes.
    cut_off: Mutex<Vec<(String, String)>>,
    removing: Removing,
    /// Checkpoints that may come yet, though the builds that wanted them have failed.
    may_come: Mutex<BTreeSet<String>>,
}

/// Who has asked for the removal of what is left over, and for how many of them it was done. It is
/// held by the one who does it.
#[derive(Default)]
struct Removing {
    asked: AtomicU64,
    done: tokio::sync::Mutex<u64>,
}

impl Templates {
    /// Those in a node's home. Builds that were under way have failed.
    ///
    /// # Errors
    /// What is kept cannot be read or written.
    pub fn load(directory: &Path) -> io::Result<Self> {
        let records = TemplateRecords::load(directory)?;
        let cache = StepCache::load(directory)?;
        let uploads = Uploads::load(directory, UploadBounds::default())?;
        let cut_off = Mutex::new(records.fail_cut_off());
        let (running, times, removing, may_come) = Default::default();
        Ok(Self { records, cache, uploads, running, times, cut_off, removing, may_come })
    }

    fn may_come(&self) -> MutexGuard<'_, BTreeSet<String>> {
        self.may_come.lock().expect("no holder panics")
    }

    /// A sandbox was made of a template.
    pub fn spawned(&self, template: &str) {
        self.records.spawned(template);
    }
}

impl E2b {
    /// Ends what builds have left that the daemon before this one has not ended.
    pub(super) async fn clean_up(self: Arc<Self>) {
        let cut_off =
            std::mem::take(&mut *self.templates.cut_off.lock().expect("no holder panics"));
        for (build, id) in cut_off {
            for _ in 0..ENDED_AT_MOST {
                if self.backend.is_gone(&id) {
                    break;
                }
                // One that is being taken over just now is there in a moment.
                let _ = self.backend.kill(&id);
                tokio::time::sleep(ENDED_EVERY).await;
            }
            self.templates.records.leave_over(&build);
        }
        if let Ok(stored) = self.backend.snapshots(cache::PREFIX).await {
            self.templates.cache.leave_over_unknown(stored);
        }
        self.remove_unused_steps().await;
    }

    /// Removes checkpoints that nobody wants any more. Those on which others stand stay until these
    /// are gone. One does that for all who have asked for it meanwhile: each checkpoint is looked
    /// for in all others of the store.
    pub(super) async fn remove_leftovers(&self) {
        let Removing { asked, done } = &self.templates.removing;
        let own = asked.fetch_add(1, Ordering::SeqCst) + 1;
        let mut done = done.lock().await;
        if *done >= own {
            return;
        }
        let all = asked.load(Ordering::SeqCst);
        // What one stood on may go after it.
        while self.remove_some_leftovers().await {}
        *done = all;
    }

    /// Looks at each of them once; whether one was removed.
    async fn remove_some_leftovers(&self) -> bool {
        let mut has_removed = false;
        let Templates { records, cache, .. } = &self.templates;
        let of_builds = records.leftovers();
        of_builds.iter().for_each(|checkpoint| cache.leave_over_those_on(checkpoint));
        for checkpoint in of_builds {
            let Ok(was_there) = self.backend.remove_snapshot(&checkpoint).await else { continue };
            if was_there || !self.templates.may_come().contains(&checkpoint) {
                records.forget_leftover(&checkpoint);
            }
            has_removed |= was_there;
        }
        for checkpoint in cache.leftovers() {
            let Ok(was_there) = self.backend.remove_snapshot(&checkpoint).await else { continue };
            cache.is_gone(&checkpoint);
            has_removed |= was_there;
        }
        has_removed
    }
}

#[cfg(test)]
impl E2b {
    /// Has builds and start commands take no longer than this.
    pub(super) fn hurry(&mut self, all: Duration, ready: Duration) {
        let late = ready;
        self.templates.times = Times { all, ready, ready_untold: ready, late, ..Times::default() };
    }

    /// Has checkpoints be taken of steps that take so long.
    pub(super) fn keep_steps_after(&mut self, least: Duration) {
        self.templates.times.kept_after = least;
    }

    /// Checkpoints that nobody wants any more, and that are there still.
    pub(super) fn templates_left(&self) -> Vec<String> {
        let Templates { records, cache, .. } = &self.templates;
        records.leftovers().into_iter().chain(cache.leftovers()).collect()
    }
}
