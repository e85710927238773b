//! Steps that a build need not do again. While the steps of a build take long, checkpoints are taken
//! in between, and a later build of the same owner that begins with the same steps goes on there.
//!
//! Such a checkpoint is known by a hash of all that has led to it: its owner, what the build begins
//! with, and the steps. It goes when it was not used for long, when others need its room, and with
//! what it stands on.

use super::steps::{Plan, Step};
use crate::backend::Base;
use crate::control::now_ms;
use crate::problem::{Kind, Problem};
use crate::records::{Defaults, random_text};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::path::Path;
use std::sync::{Mutex, MutexGuard};
use thaw_home::state_file::{self, StateFile};
use thaw_node::remote::LimitsChange;

/// Name of the file in the node's home.
const FILE: &str = "e2b-steps.json";
/// What the names of the checkpoints begin with.
pub const PREFIX: &str = "e2b-step-";
/// Random letters and digits behind that.
const RANDOM_LEN: usize = 20;
/// Checkpoints that an owner may have for each template that it may have. The longest build takes
/// twelve, and its template stands on all of them.
const PER_TEMPLATE: usize = 16;
/// So long after its last use one makes no room: a build may go on from it that has not written
/// anything yet. Builds take no longer.
const IN_USE_MS: u64 = 2 * 3_600_000;
/// So long after its last use one goes.
const UNUSED_MS: u64 = 30 * 24 * 3_600_000;
/// So long after it was noted that one was used that is noted again.
const NOTED_EVERY_MS: u64 = 3_600_000;

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
    /// Those on which others stood when they were to go.
    stood_on: Mutex<BTreeSet<String>>,
}

impl StepCache {
    /// Those in a directory. What was being written is left over. A file that is of no use is as none:
    /// [`Self::leave_over_unknown`] follows.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn load(directory: &Path) -> io::Result<Self> {
        let file = directory.join(FILE);
        let read = match std::fs::read(&file) {
            Ok(bytes) => serde_json::from_slice(&bytes).map_err(io::Error::from),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Contents::default()),
            Err(error) => Err(error),
        };
        let contents = read.unwrap_or_else(|error| {
            let file = file.display();
            tracing::warn!(
                "builds of templates do all steps again, since {file} cannot be read: {error}"
            );
            Contents::default()
        });
        let contents = StateFile::new(file, contents);
        contents.write_first()?;
        Ok(Self { contents, coming: Mutex::default(), stood_on: Mutex::default() })
    }

    /// The last one that some of these keys name, with how many steps lead to it.
    pub fn find(&self, keys: &[String]) -> Option<(usize, Kept)> {
        let mut contents = self.contents.lock();
        let at = keys.iter().rposition(|key| contents.kept.contains_key(key))?;
        let (now, mut is_old) = (now_ms(), false);
        // What it stands on is used, too.
        for key in &keys[..=at] {
            if let Some(kept) = contents.kept.get_mut(key) {
                is_old |= unused_ms(kept, now) > NOTED_EVERY_MS;
                kept.used_ms = now;
            }
        }
        let found = contents.kept.get(&keys[at])?.clone();
        drop(contents);
        if is_old {
            self.contents.write_soon();
        }
        Some((at + 1, found))
    }

    /// Whether an owner who may have so many templates has as many as may be.
    pub fn is_full(&self, owner: &str, most_templates: u32) -> bool {
        self.contents.lock().count(owner) >= most(most_templates)
    }

    /// Others stand on one, which therefore cannot go now.
    pub fn is_stood_on(&self, checkpoint: &str) {
        self.stood_on().insert(checkpoint.to_owned());
    }

    /// Those of an owner that may make room, the one first that was not used for longest. Those on
    /// which others stood come last.
    pub fn may_go(&self, owner: &str) -> Vec<String> {
        let (contents, now) = (self.contents.lock(), now_ms());
        let may_go = |kept: &&Kept| kept.owner == owner && unused_ms(kept, now) >= IN_USE_MS;
        let mut all: Vec<_> = contents.kept.values().filter(may_go).collect();
        let mut stood_on = self.stood_on();
        // Perhaps nobody stands there any more.
        if all.iter().all(|kept| stood_on.contains(&kept.checkpoint)) {
            stood_on.retain(|name| all.iter().all(|kept| kept.checkpoint != *name));
        }
        all.sort_by_key(|kept| (stood_on.contains(&kept.checkpoint), kept.used_ms));
        all.into_iter().map(|kept| kept.checkpoint.clone()).collect()
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
            if contents.count(owner) >= most(most_templates) {
                let most = most(most_templates);
                let text = format!(
                    "{most} are kept already, which are in use or which templates stand on"
                );
                return Err(Problem::new(Kind::Exhausted, text));
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
        self.stood_on().remove(checkpoint);
        self.change(|contents| contents.leave_over(|kept| kept.checkpoint == checkpoint));
    }

    /// One is gone.
    pub fn is_gone(&self, checkpoint: &str) {
        self.stood_on().remove(checkpoint);
        self.change(|contents| {
            contents.kept.retain(|_, kept| kept.checkpoint != checkpoint);
            contents.leftovers.remove(checkpoint);
        });
    }

    /// What stands on a checkpoint that goes is left over: nothing begins with that any more.
    pub fn leave_over_those_on(&self, checkpoint: &str) {
        let base = Base::Checkpoint(checkpoint.to_owned());
        self.change(|contents| contents.leave_over(|kept| kept.base == base));
    }

    /// Those that stand on a checkpoint.
    pub fn standing_on(&self, checkpoint: &str) -> Vec<String> {
        let (base, contents) = (Base::Checkpoint(checkpoint.to_owned()), self.contents.lock());
        let standing = contents.kept.values().filter(|kept| kept.base == base);
        standing.map(|kept| kept.checkpoint.clone()).collect()
    }

    /// All of an owner are left over.
    pub fn leave_over_those_of(&self, owner: &str) {
        self.change(|contents| contents.leave_over(|kept| kept.owner == owner));
    }

    /// Those of an owner are left over that stand on another version of a function than its builds
    /// begin with now.
    pub fn leave_over_replaced(&self, owner: &str, base: &Base) {
        let now = now_ms();
        self.change(|contents| {
            contents.leave_over(|kept| {
                let is_free = kept.owner == owner && unused_ms(kept, now) >= IN_USE_MS;
                is_free && base.replaces(&kept.base)
            });
        });
    }

    /// Those are left over that nobody has used for long, and those of owners that are not there.
    pub fn leave_over_unused(&self, is_owner: impl Fn(&str) -> bool) {
        let now = now_ms();
        self.change(|contents| {
            contents.leave_over(|kept| unused_ms(kept, now) >= UNUSED_MS || !is_owner(&kept.owner));
        });
    }

    /// Of checkpoints in the store those are left over that nobody knows: the file was lost.
    pub fn leave_over_unknown(&self, stored: Vec<String>) {
        self.change(|contents| {
            let known: BTreeSet<_> = contents.kept.values().map(|kept| &kept.checkpoint).collect();
            let unknown = stored.into_iter().filter(|name| !known.contains(name));
            let unknown: Vec<_> = unknown.collect();
            for name in unknown {
                contents.leftovers.entry(name).or_default();
            }
        });
    }

    /// Checkpoints that are wanted no more.
    pub fn leftovers(&self) -> Vec<String> {
        let contents = self.contents.lock();
        let coming = self.coming();
        contents.leftovers.keys().filter(|name| !coming.contains(*name)).cloned().collect()
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

    fn stood_on(&self) -> MutexGuard<'_, BTreeSet<String>> {
        self.stood_on.lock().expect("no holder panics")
    }

    fn coming(&self) -> MutexGuard<'_, BTreeSet<String>> {
        self.coming.lock().expect("no holder panics")
    }
}

/// Most checkpoints of an owner who may have so many templates.
fn most(templates: u32) -> usize {
    PER_TEMPLATE.saturating_mul(templates as usize)
}

/// How long one was not used. After a clock that was ahead it is as if it had just been.
fn unused_ms(kept: &Kept, now: u64) -> u64 {
    now - kept.used_ms.min(now)
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
        let (name, config) = ("f".to_owned(), String::new());
        Base::Function { name, version, image: version.to_string(), config }
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
    async fn an_owner_has_so_many_and_those_may_go_that_were_not_used_for_long() {
        let place = tempfile::tempdir().unwrap();
        let cache = StepCache::load(place.path()).unwrap();
        let mut all = Vec::new();
        for n in 0..PER_TEMPLATE {
            assert!(!cache.is_full(OWNER, 1));
            all.push(keep(&cache, &n.to_string(), base(1)).await);
        }
        assert!(cache.is_full(OWNER, 1) && !cache.is_full(OWNER, 2) && !cache.is_full("b", 1));
        assert_eq!(cache.begin(OWNER, 1).await.unwrap_err().kind, Kind::Exhausted);
        assert!(cache.may_go(OWNER).is_empty());
        age(&cache, "3", IN_USE_MS);
        age(&cache, "5", 2 * IN_USE_MS);
        assert_eq!(cache.may_go(OWNER), [all[5].clone(), all[3].clone()]);
        cache.is_stood_on(&all[5]);
        assert_eq!(cache.may_go(OWNER), [all[3].clone(), all[5].clone()]);
        cache.is_stood_on(&all[3]);
        assert_eq!(cache.may_go(OWNER), [all[5].clone(), all[3].clone()], "perhaps it can go now");
        // What stands on one uses it.
        assert_eq!(cache.find(&["5", "6"].map(str::to_owned)).unwrap().0, 2);
        assert_eq!(cache.may_go(OWNER), [all[3].clone()]);
        // One that is left over counts until it is gone.
        cache.forget(&all[3]);
        assert!(cache.is_full(OWNER, 1));
        cache.is_gone(&all[3]);
        cache.begin(OWNER, 1).await.unwrap();
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
        assert_eq!(cache.standing_on("c"), std::slice::from_ref(&on));
        cache.leave_over_replaced(OWNER, &base(2));
        cache.leave_over_unused(|owner| owner == OWNER);
        cache.leave_over_those_on("c");
        let (left, mut wanted) = (cache.leftovers(), vec![old, unused, on]);
        wanted.sort();
        assert_eq!(left, wanted);
        // One that is written again is not needed twice.
        let before = cache.contents.lock().kept["3"].checkpoint.clone();
        keep(&cache, "3", base(1)).await;
        assert!(cache.leftovers().contains(&before));
        cache.leave_over_unused(|_| false);
        assert_eq!((cache.leftovers().len(), cache.contents.lock().kept.len()), (6, 0));
    }

    #[tokio::test]
    async fn a_damaged_file_loses_no_room() {
        let place = tempfile::tempdir().unwrap();
        let cache = StepCache::load(place.path()).unwrap();
        let kept = keep(&cache, "1", base(1)).await;
        cache.contents.written().await.unwrap();
        std::fs::write(place.path().join(FILE), "").unwrap();
        let cache = StepCache::load(place.path()).unwrap();
        let other = keep(&cache, "2", base(1)).await;
        cache.leave_over_unknown(vec![kept.clone(), other]);
        assert_eq!(cache.leftovers(), [kept]);
    }
}
