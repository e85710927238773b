//! Builds that go on where an earlier one was, and checkpoints from which later ones do.

use super::Templates;
use super::build::Job;
use super::cache::{Beginning, keys};
use super::shell::Shell;
use super::steps::Step;
use crate::E2b;
use crate::backend::{Base, Sandbox, Wanted};
use crate::problem::{Kind, Problem};
use crate::records::Defaults;
use std::collections::BTreeMap;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};
use tokio::sync::oneshot;
use tokio::task::spawn_blocking;
use tokio::time::sleep;

/// Most bytes of the environment that is kept with steps.
const ENVS_MAX: usize = 16 << 10;
/// Most checkpoints that are tried at a time when one has to make room: many stand on each other.
const TRIED_MAX: usize = 16;
/// How often those go that nobody uses.
const UNUSED_EVERY: Duration = Duration::from_secs(24 * 3600);

/// What a build has of earlier ones, and may leave to later ones.
pub struct Reuse {
    /// What it begins with; none: it leaves nothing.
    base: Option<Base>,
    /// Names for the places after each step.
    keys: Vec<String>,
    /// Steps that are done already.
    pub done: usize,
    pace: Pace,
}

/// When a checkpoint is worth its time: when it has taken as long to come there from the last one as
/// from the beginning to the last one. So no more than half of a build is lost, and there are few.
struct Pace {
    begun: Instant,
    last: Instant,
}

impl Pace {
    fn new() -> Self {
        let begun = Instant::now();
        Self { begun, last: begun }
    }

    fn is_due(&self, least: Duration, is_last_step: bool) -> bool {
        let since = self.last.elapsed();
        since >= least && (is_last_step || since >= self.last - self.begun)
    }
}

impl E2b {
    /// Makes the sandbox of a build: of what is kept of the same steps, or otherwise of its base.
    pub(super) async fn begin_sandbox(
        &self,
        job: &Job,
        shell: &mut Shell,
    ) -> Result<(Sandbox, Reuse), Problem> {
        let cache = &self.templates.cache;
        let wanted = job.wanted(self.settings.now().most_egress());
        let base = self.backend.base(&wanted)?;
        let keys = self.keys(job, &base).await;
        let found = cache.find(&keys[..job.plan.reusable.min(keys.len())]);
        if let Some((done, kept)) = found {
            shell.say(&format!("Going on after step {done} of an earlier build"));
            let of_it = Wanted { snapshot: Some(kept.checkpoint.clone()), ..wanted.clone() };
            match self.backend.create(of_it).await {
                Ok(sandbox) => {
                    shell.defaults = kept.defaults;
                    let (base, pace) = (Some(base), Pace::new());
                    return Ok((sandbox, Reuse { base, keys, done, pace }));
                }
                Err(problem) => {
                    shell.say(&format!("No sandbox can be made of that: {}", problem.message));
                    if problem.kind == Kind::NotFound {
                        cache.is_gone(&kept.checkpoint);
                    }
                }
            }
        }
        shell.say(&format!("Making a sandbox of {}", job.origin.shown));
        let sandbox = self.backend.create(wanted.clone()).await?;
        // It may be of another version of the function than a moment ago.
        let is_same = self.backend.base(&wanted).is_ok_and(|now| now == base);
        let base = Some(base).filter(|_| is_same);
        Ok((sandbox, Reuse { base, keys, done: 0, pace: Pace::new() }))
    }

    /// Names for the places after each step of a build.
    async fn keys(&self, job: &Job, base: &Base) -> Vec<String> {
        let copied = job.plan.steps.iter().filter_map(|step| match step {
            Step::Copy(copy) => Some(copy.hash.clone()),
            _ => None,
        });
        let (copied, owner) = (copied.collect::<Vec<_>>(), job.owner.clone());
        let uploads = self.templates.uploads.clone();
        let stamps = spawn_blocking(move || -> BTreeMap<_, _> {
            let stamp = |hash: String| uploads.stamp(&owner, &hash).map(|stamp| (hash, stamp));
            copied.into_iter().filter_map(stamp).collect()
        });
        let stamps = stamps.await.unwrap_or_default();
        let (owner, limits, defaults) = (&*job.owner, job.known.limits, &job.origin.defaults);
        let beginning = Beginning { owner, base, limits, defaults };
        keys(&beginning, &job.plan, |hash| stamps.get(hash).cloned())
    }

    /// A step was done: takes a checkpoint if it has taken long to come there. The build goes on
    /// without one if none can be taken.
    pub(super) async fn keep_step(
        self: &Arc<Self>,
        job: &Job,
        shell: &Shell,
        reuse: &mut Reuse,
        steps_done: usize,
    ) {
        let is_last = steps_done == job.plan.steps.len();
        let (Some(base), Some(key)) = (&reuse.base, reuse.keys.get(steps_done - 1)) else { return };
        if !reuse.pace.is_due(job.times.kept_after, is_last) {
            return;
        }
        let keeping = Keeping {
            sandbox: shell.id.clone(),
            key: key.clone(),
            owner: job.owner.clone(),
            most_templates: job.most_templates,
            base: base.clone(),
            defaults: shell.defaults.clone(),
            late: job.times.late,
        };
        if let Err(problem) = self.write_step(keeping).await {
            shell.say(&format!("These steps are not kept for later builds: {}", problem.message));
            if problem.kind == Kind::Late {
                // The template itself is not to wait for another one.
                reuse.base = None;
            }
        }
        reuse.pace.last = Instant::now();
    }

    /// Writes a checkpoint. It is done to its end also if the build is given up meanwhile.
    async fn write_step(self: &Arc<Self>, keeping: Keeping) -> Result<(), Problem> {
        let envs = keeping.defaults.envs.iter();
        if envs.map(|(name, value)| name.len() + value.len()).sum::<usize>() > ENVS_MAX {
            let text = format!("their environment has more than {ENVS_MAX} bytes");
            return Err(Problem::invalid(text));
        }
        let (told, written) = oneshot::channel();
        tokio::spawn(self.clone().write_step_to_its_end(keeping, told));
        written.await.unwrap_or_else(|gone| Err(Problem::new(Kind::Busy, gone)))
    }

    async fn write_step_to_its_end(
        self: Arc<Self>,
        keeping: Keeping,
        told: oneshot::Sender<Result<(), Problem>>,
    ) {
        let Keeping { sandbox, key, owner, most_templates, base, defaults, late } = keeping;
        let Templates { cache, .. } = &self.templates;
        self.make_room_for_a_step(&owner, most_templates).await;
        let checkpoint = match cache.begin(&owner, most_templates).await {
            Ok(checkpoint) => checkpoint,
            // Whoever asked may be gone.
            Err(problem) => return drop(told.send(Err(problem))),
        };
        let taken = self.backend.snapshot(&sandbox, &checkpoint).await;
        let kind = taken.as_ref().err().map(|problem| problem.kind);
        if taken.is_ok() {
            cache.keep(&key, &owner, base.clone(), &checkpoint, defaults);
        }
        let _ = told.send(taken);
        if kind == Some(Kind::Late) {
            sleep(late).await;
        }
        if kind.is_some() {
            cache.give_up(&checkpoint);
            self.remove_leftovers().await;
        } else if !self.may_begin_with(&owner, &base) {
            // Its base or all templates of its owner were deleted meanwhile.
            cache.forget(&checkpoint);
            self.remove_leftovers().await;
        }
    }

    /// Whether an owner has templates, and builds of it may begin with this.
    fn may_begin_with(&self, owner: &str, base: &Base) -> bool {
        let records = &self.templates.records;
        let is_there = match base {
            Base::Function { .. } => true,
            Base::Checkpoint(name) => {
                records.has_checkpoint(name) || self.snapshot_named(owner, name).is_some()
            }
        };
        is_there && !records.of(owner).is_empty()
    }

    /// Removes a checkpoint of an owner who has as many as may be.
    async fn make_room_for_a_step(&self, owner: &str, most_templates: u32) {
        let cache = &self.templates.cache;
        for checkpoint in cache.may_go(owner).into_iter().take(TRIED_MAX) {
            if !cache.is_full(owner, most_templates) {
                return;
            }
            self.remove_step(&checkpoint).await;
        }
    }

    /// Removes a checkpoint of steps, unless others stand on it; whether it was there.
    async fn remove_step(&self, checkpoint: &str) -> bool {
        let removed = self.backend.remove_snapshot(checkpoint).await;
        match removed {
            Ok(_) => self.templates.cache.is_gone(checkpoint),
            Err(_) => self.templates.cache.is_stood_on(checkpoint),
        }
        removed.unwrap_or(false)
    }

    /// Removes what is kept of an owner's steps and was not used just now; whether there was any.
    pub(super) async fn remove_steps_of(&self, owner: &str) -> bool {
        let mut has_removed = false;
        // The newest ones stand on the others.
        for checkpoint in self.templates.cache.may_go(owner).into_iter().rev() {
            has_removed |= self.remove_step(&checkpoint).await;
        }
        has_removed
    }

    /// Removes what is kept of steps on a checkpoint, unless others stand on it.
    pub(crate) async fn remove_steps_on(&self, checkpoint: &str) {
        let mut standing = self.templates.cache.standing_on(checkpoint);
        loop {
            let before = standing.len();
            let mut left = Vec::new();
            for step in standing {
                if self.backend.remove_snapshot(&step).await.is_ok() {
                    self.templates.cache.is_gone(&step);
                } else {
                    left.push(step);
                }
            }
            // They stand on each other, too.
            if left.is_empty() || left.len() == before {
                return;
            }
            standing = left;
        }
    }

    /// Removes what nobody has used for long.
    pub(super) async fn remove_unused_steps(&self) {
        let settings = self.settings.now();
        self.templates.cache.leave_over_unused(|owner| settings.has_owner(owner));
        self.remove_leftovers().await;
    }

    /// The same each day, for as long as the API is there.
    pub(crate) async fn remove_unused_steps_daily(this: Weak<Self>) {
        loop {
            sleep(UNUSED_EVERY).await;
            let Some(this) = this.upgrade() else { return };
            this.remove_unused_steps().await;
        }
    }
}

/// A checkpoint that is to be taken.
struct Keeping {
    sandbox: String,
    key: String,
    owner: String,
    most_templates: u32,
    base: Base,
    defaults: Defaults,
    /// How long it may be written after nobody waits for it any more.
    late: Duration,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn checkpoints_are_taken_ever_more_rarely_and_at_the_end() {
        let now = Instant::now();
        let ago = |seconds| now - Duration::from_secs(seconds);
        let is_due = |begun, last, is_last_step| {
            Pace { begun: ago(begun), last: ago(last) }.is_due(Duration::from_secs(2), is_last_step)
        };
        assert!(is_due(3, 3, false) && !is_due(1, 1, false));
        assert!(is_due(60, 31, false) && !is_due(60, 29, false));
        assert!(is_due(60, 3, true) && !is_due(60, 1, true));
    }
}
