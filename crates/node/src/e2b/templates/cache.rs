//! Steps that a build need not do again. While the steps of a build take long, checkpoints are taken
//! in between, and a later build of the same owner that begins with the same steps goes on there.
//!
//! Such a checkpoint is known by a hash of all that has led to it: its owner, what the build begins
//! with, and the steps. It goes when it was not used for long, when others need its room, and with
//! what it stands on.

use super::steps::{Plan, Step};
use crate::e2b::backend::Base;
use crate::e2b::control::now_ms;
use crate::e2b::problem::{Kind, Problem};
use crate::e2b::records::{Defaults, random_text};
use crate::sandboxes::LimitsChange;
use crate::state_file::{self, StateFile};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::path::Path;
use std::sync::{Mutex, MutexGuard};

/// Name of the file in the node's home.
const FILE: &str = "e2b-steps.json";
/// What the names of the checkpoints begin with.
const PREFIX: &str = "e2b-step-";
/// Random letters and digits behind that.
const RANDOM_LEN: usize = 20;
/// Checkpoints that an owner may have for each template that it may have.
const PER_TEMPLATE: usize = 8;
/// So long after its last use one makes no room: a build may go on from it that has not written
/// anything yet. Builds take no longer.
const IN_USE_MS: u64 = 2 * 3_600_000;
/// So long after its last use one goes.
const UNUSED_MS: u64 = 30 * 24 * 3_600_000;

/// A checkpoint after some steps.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Kept {
    owner: String,
    /// What the build began with.
    base: Base,
    /// Its name in the store.
    pub checkpoint: String,
    /// What commands begin with after these steps.
    pub defaults: Defaults,
    used_ms: u64,
}

#[derive(Clone, Default, Serialize, Deserialize)]
struct Contents {
    /// By what has led to them.
    kept: BTreeMap<String, Kept>,
    /// Checkpoints that nobody wants any more, or that are being written, and whose they are.
    leftovers: BTreeMap<String, String>,
}

impl state_file::State for Contents {
    const LOST: &'static str = "the next daemon does steps of templates of E2B's API again";

    fn to_bytes(&self) -> Vec<u8> {
        serde_json::to_vec(self).expect("plain data")
    }
}

impl Contents {
    fn count(&self, owner: &str) -> usize {
        let kept = self.kept.values().filter(|kept| kept.owner == owner);
        kept.count() + self.leftovers.values().filter(|one| *one == owner).count()
    }

    /// Leaves those over of which this is so.
    fn leave_over(&mut self, is_meant: impl Fn(&Kept) -> bool) {
        let Self { kept, leftovers } = self;
        kept.retain(|_, one| {
            let goes = is_meant(one);
            if goes {
                leftovers.insert(one.checkpoint.clone(), one.owner.clone());
            }
            !goes
        });
    }
}

/// The steps of all owners.
pub struct StepCache {
    contents: StateFile<Contents>,
    /// Checkpoints that are being written.
    coming: Mutex<BTreeSet<String>>,
}

impl StepCache {
    /// Those in a directory. What was being written is left over.
    ///
    /// # Errors
    /// The file is there and of no use, or cannot be written.
    pub fn load(directory: &Path) -> io::Result<Self> {
        let file = directory.join(FILE);
        let contents = match std::fs::read(&file) {
            Ok(bytes) => serde_json::from_slice(&bytes)?,
            Err(error) if error.kind() == io::ErrorKind::NotFound => Contents::default(),
            Err(error) => return Err(error),
        };
        let contents = StateFile::new(file, contents);
        contents.write_first()?;
        Ok(Self { contents, coming: Mutex::default() })
    }

    /// The last one that some of these keys name, with how many steps lead to it.
    pub fn find(&self, keys: &[String]) -> Option<(usize, Kept)> {
        let mut contents = self.contents.lock();
        let (at, key) =
            keys.iter().enumerate().rfind(|(_, key)| contents.kept.contains_key(*key))?;
        let kept = contents.kept.get_mut(key)?;
        kept.used_ms = now_ms();
        let found = (at + 1, kept.clone());
        drop(contents);
        self.contents.write_soon();
        Some(found)
    }

    /// Notes that one is going to be written, for an owner who may have so many templates; its name.
    /// [`Self::keep`] or [`Self::give_up`] follows.
    ///
    /// # Errors
    /// The owner has as many as may be, or the host does not keep the note.
    pub async fn begin(&self, owner: &str, most_templates: u32) -> Result<String, Problem> {
        let random = random_text(RANDOM_LEN).map_err(|error| Problem::new(Kind::Busy, error))?;
        let name = format!("{PREFIX}{random}");
        {
            let mut contents = self.contents.lock();
            if contents.count(owner) >= PER_TEMPLATE * most_templates as usize {
                return Err(Problem::new(
                    Kind::Exhausted,
                    format!("`{owner}` has {} checkpoints of steps", contents.count(owner)),
                ));
            }
            contents.leftovers.insert(name.clone(), owner.to_owned());
            self.coming().insert(name.clone());
        }
        self.contents.write_soon();
        let written = self.contents.written().await;
        written.inspect_err(|_| self.give_up(&name)).map_err(|error| {
            Problem::new(Kind::NoSpace, format!("the node cannot note it: {error}"))
        })?;
        Ok(name)
    }

    /// One was written. What the key meant before is left over.
    pub fn keep(&self, key: &str, owner: &str, base: Base, checkpoint: &str, defaults: Defaults) {
        let mut contents = self.contents.lock();
        contents.leftovers.remove(checkpoint);
        let (checkpoint, owner) = (checkpoint.to_owned(), owner.to_owned());
        self.coming().remove(&checkpoint);
        let kept = Kept { owner, base, checkpoint, defaults, used_ms: now_ms() };
        if let Some(before) = contents.kept.insert(key.to_owned(), kept) {
            contents.leftovers.insert(before.checkpoint, before.owner);
        }
        drop(contents);
        self.contents.write_soon();
    }

    /// One was not written, and is not coming any more.
    pub fn give_up(&self, checkpoint: &str) {
        self.coming().remove(checkpoint);
    }

    /// One is of no use.
    pub fn forget(&self, checkpoint: &str) {
        self.change(|contents| contents.leave_over(|kept| kept.checkpoint == checkpoint));
    }

    /// What stands on a checkpoint that goes is left over: nothing begins with that any more.
    pub fn leave_over_those_on(&self, checkpoint: &str) {
        let base = Base::Checkpoint(checkpoint.to_owned());
        self.change(|contents| contents.leave_over(|kept| kept.base == base));
    }

    /// Those are left over that nobody has used for long, and those of an owner that stand on another
    /// version of a function than its builds begin with now. If the owner, who may have so many
    /// templates, has as many as may be, so is the one that it has not used for longest.
    pub fn retire(&self, owner: &str, base: Option<&Base>, most_templates: u32) {
        let now = now_ms();
        // After a clock that was ahead they would be in use for as long as it was.
        let unused = |kept: &Kept| now - kept.used_ms.min(now);
        self.change(|contents| {
            contents.leave_over(|kept| {
                let is_old = kept.owner == owner
                    && unused(kept) >= IN_USE_MS
                    && base.is_some_and(|base| base.replaces(&kept.base));
                is_old || unused(kept) >= UNUSED_MS
            });
            if contents.count(owner) < PER_TEMPLATE * most_templates as usize {
                return;
            }
            let free = contents.kept.values();
            let free = free.filter(|kept| kept.owner == owner && unused(kept) >= IN_USE_MS);
            if let Some(oldest) = free.min_by_key(|kept| kept.used_ms).cloned() {
                contents.leave_over(|kept| kept.checkpoint == oldest.checkpoint);
            }
        });
    }

    /// Checkpoints that are wanted no more.
    pub fn leftovers(&self) -> Vec<String> {
        let contents = self.contents.lock();
        let coming = self.coming();
        contents.leftovers.keys().filter(|name| !coming.contains(*name)).cloned().collect()
    }

    /// One of them is gone.
    pub fn forget_leftover(&self, checkpoint: &str) {
        self.change(|contents| drop(contents.leftovers.remove(checkpoint)));
    }

    fn change(&self, change: impl FnOnce(&mut Contents)) {
        let mut contents = self.contents.lock();
        let before = (contents.kept.len(), contents.leftovers.len());
        change(&mut contents);
        let has_changed = before != (contents.kept.len(), contents.leftovers.len());
        drop(contents);
        if has_changed {
            self.contents.write_soon();
        }
    }

    fn coming(&self) -> MutexGuard<'_, BTreeSet<String>> {
        self.coming.lock().expect("no holder panics")
    }
}

/// What a build begins with.
#[derive(Serialize)]
pub struct Beginning<'a> {
    /// Who builds.
    pub owner: &'a str,
    /// The base.
    pub base: &'a Base,
    /// What its sandbox may use.
    pub limits: LimitsChange,
    /// What commands begin with.
    pub defaults: &'a Defaults,
}

/// Names for the places after each step of a plan. `stamp` says which upload a step copies from;
/// from a step on that lacks it there is no name.
pub fn keys(
    beginning: &Beginning<'_>,
    plan: &Plan,
    stamp: impl Fn(&str) -> Option<String>,
) -> Vec<String> {
    let hash = |value: &[u8]| blake3::hash(value).to_hex().to_string();
    let mut before = hash(&serde_json::to_vec(beginning).expect("plain data"));
    let mut keys = Vec::new();
    for step in &plan.steps {
        let upload = match step {
            Step::Copy(copy) => match stamp(&copy.hash) {
                Some(stamp) => stamp,
                None => break,
            },
            _ => String::new(),
        };
        before = hash(&serde_json::to_vec(&(&before, step, upload)).expect("plain data"));
        keys.push(before.clone());
    }
    keys
}

#[cfg(test)]
mod tests {
    use super::*;

    const OWNER: &str = "a";

    fn base(version: u32) -> Base {
        Base::Function { name: "f".to_owned(), version, image: version.to_string() }
    }

    async fn keep(cache: &StepCache, key: &str, base: Base) -> String {
        let checkpoint = cache.begin(OWNER, 1).await.unwrap();
        cache.keep(key, OWNER, base, &checkpoint, Defaults::default());
        checkpoint
    }

    fn age(cache: &StepCache, key: &str, by_ms: u64) {
        cache.contents.lock().kept.get_mut(key).unwrap().used_ms -= by_ms;
    }

    #[tokio::test]
    async fn the_next_daemon_knows_them_and_removes_what_was_being_written() {
        let place = tempfile::tempdir().unwrap();
        let cache = StepCache::load(place.path()).unwrap();
        let kept = keep(&cache, "1", base(1)).await;
        let coming = cache.begin(OWNER, 1).await.unwrap();
        assert!(cache.leftovers().is_empty(), "it may be written yet");
        cache.contents.written().await.unwrap();
        let cache = StepCache::load(place.path()).unwrap();
        assert_eq!(cache.leftovers(), [coming]);
        let found = |keys: [&str; 2]| {
            cache.find(&keys.map(str::to_owned)).map(|(done, kept)| (done, kept.checkpoint))
        };
        assert_eq!(found(["1", "2"]), Some((1, kept.clone())));
        assert_eq!((found(["0", "1"]), found(["0", "2"])), (Some((2, kept)), None));
    }

    #[tokio::test]
    async fn an_owner_has_so_many_and_the_oldest_go() {
        let place = tempfile::tempdir().unwrap();
        let cache = StepCache::load(place.path()).unwrap();
        let mut all = Vec::new();
        for n in 0..PER_TEMPLATE {
            all.push(keep(&cache, &n.to_string(), base(1)).await);
        }
        cache.retire(OWNER, None, 1);
        assert_eq!(cache.begin(OWNER, 1).await.unwrap_err().kind, Kind::Exhausted);
        cache.begin("b", 1).await.unwrap();
        cache.begin(OWNER, 2).await.unwrap();
        age(&cache, "3", IN_USE_MS);
        age(&cache, "5", 2 * IN_USE_MS);
        cache.retire(OWNER, None, 1);
        assert_eq!(cache.leftovers(), [all[5].clone()]);
        // It counts until it is gone.
        assert_eq!(cache.begin(OWNER, 1).await.unwrap_err().kind, Kind::Exhausted);
    }

    #[tokio::test]
    async fn those_go_that_are_of_no_use_any_more() {
        let place = tempfile::tempdir().unwrap();
        let cache = StepCache::load(place.path()).unwrap();
        let old = keep(&cache, "1", base(1)).await;
        let unused = keep(&cache, "2", base(2)).await;
        keep(&cache, "3", base(1)).await;
        keep(&cache, "4", base(2)).await;
        let on = keep(&cache, "5", Base::Checkpoint("c".to_owned())).await;
        age(&cache, "1", IN_USE_MS);
        age(&cache, "2", UNUSED_MS);
        cache.retire(OWNER, Some(&base(2)), 1);
        cache.leave_over_those_on("c");
        let (left, mut wanted) = (cache.leftovers(), vec![old, unused, on]);
        wanted.sort();
        assert_eq!(left, wanted);
        // One that is written again is not needed twice.
        let before = cache.contents.lock().kept["3"].checkpoint.clone();
        keep(&cache, "3", base(1)).await;
        assert!(cache.leftovers().contains(&before));
    }
}
