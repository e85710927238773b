//! Builds that go on where an earlier one was, and checkpoints from which later ones do.

use super::build::Job;
use super::cache::{Beginning, keys};
use super::shell::Shell;
use crate::e2b::E2b;
use crate::e2b::backend::{Base, Sandbox, Wanted};
use crate::e2b::problem::{Kind, Problem};
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::sync::oneshot;
use tokio::time::sleep;

/// What a build has of earlier ones, and may leave to later ones.
pub struct Reuse {
    /// What it begins with; none: its sandbox may be of another version of the function.
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
        let wanted = |checkpoint: Option<&str>| {
            let wanted = job.wanted(self.settings.now().most_egress());
            let snapshot = checkpoint.map(str::to_owned).or_else(|| wanted.snapshot.clone());
            Wanted { snapshot, ..wanted }
        };
        let base = self.backend.base(&wanted(None))?;
        let beginning = Beginning {
            owner: &job.owner,
            base: &base,
            limits: job.known.limits,
            defaults: &job.origin.defaults,
        };
        let keys =
            keys(&beginning, &job.plan, |hash| self.templates.uploads.stamp(&job.owner, hash));
        let found = cache.find(&keys[..job.plan.reusable.min(keys.len())]);
        if let Some((done, kept)) = &found {
            shell.say(&format!("Going on after step {done} of an earlier build"));
            match self.backend.create(wanted(Some(&kept.checkpoint))).await {
                Ok(sandbox) => {
                    shell.defaults = kept.defaults.clone();
                    let (base, done, pace) = (Some(base), *done, Pace::new());
                    return Ok((sandbox, Reuse { base, keys, done, pace }));
                }
                Err(problem) => shell.say(&format!("That cannot be used: {}", problem.message)),
            }
        }
        shell.say(&format!("Making a sandbox of {}", job.origin.shown));
        let sandbox = self.backend.create(wanted(None)).await?;
        // It was not for want of room.
        if let Some((_, kept)) = found {
            cache.forget(&kept.checkpoint);
        }
        let is_same = self.backend.base(&wanted(None)).is_ok_and(|now| now == base);
        let base = Some(base).filter(|_| is_same);
        Ok((sandbox, Reuse { base, keys, done: 0, pace: Pace::new() }))
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
        let cache = &self.templates.cache;
        cache.retire(&job.owner, Some(base), job.most_templates);
        if !cache.leftovers().is_empty() {
            self.remove_leftovers().await;
        }
        let written = match cache.begin(&job.owner, job.most_templates).await {
            Ok(checkpoint) => {
                let keeping = Keeping {
                    key: key.clone(),
                    owner: job.owner.clone(),
                    base: base.clone(),
                    checkpoint,
                    late: job.times.late,
                };
                self.write_step(keeping, shell).await
            }
            Err(problem) => Err(problem),
        };
        if let Err(problem) = written {
            shell.say(&format!("These steps are not kept for later builds: {}", problem.message));
        }
        reuse.pace.last = Instant::now();
    }

    /// Writes a checkpoint. It is done to its end also if the build is given up meanwhile.
    async fn write_step(self: &Arc<Self>, keeping: Keeping, shell: &Shell) -> Result<(), Problem> {
        let (e2b, id, defaults) = (self.clone(), shell.id.clone(), shell.defaults.clone());
        let (told, written) = oneshot::channel();
        tokio::spawn(async move {
            let Keeping { key, owner, base, checkpoint, late } = keeping;
            let taken = e2b.backend.snapshot(&id, &checkpoint).await;
            let problem = taken.as_ref().err().map(|problem| problem.kind);
            if taken.is_ok() {
                e2b.templates.cache.keep(&key, &owner, base, &checkpoint, defaults);
            }
            // The build may be gone.
            let _ = told.send(taken);
            let Some(kind) = problem else { return };
            if kind == Kind::Late {
                sleep(late).await;
            }
            e2b.templates.cache.give_up(&checkpoint);
            e2b.remove_leftovers().await;
        });
        written.await.unwrap_or_else(|gone| Err(Problem::new(Kind::Busy, gone)))
    }
}

/// A checkpoint that is to be taken.
struct Keeping {
    key: String,
    owner: String,
    base: Base,
    checkpoint: String,
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
