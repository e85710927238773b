//! Builds that are under way, and the logs of those and of the last ones before.

use super::log::BuildLog;
use crate::e2b::problem::{Kind, Problem};
use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard};
use tokio::sync::watch;

/// Most builds of an owner at a time.
pub const OF_ONE_MAX: usize = 2;
/// Most builds of the node at a time.
pub const OF_ALL_MAX: usize = 8;
/// Builds that have ended and whose logs are kept.
const LOGS_MAX: usize = 64;

struct Running {
    owner: String,
    cancel: watch::Sender<bool>,
}

#[derive(Default)]
struct Contents {
    running: BTreeMap<String, Running>,
    logs: BTreeMap<String, Arc<BuildLog>>,
    /// Those that have ended, the oldest first.
    ended: VecDeque<String>,
}

/// All of them, by the id of the build.
#[derive(Default)]
pub struct Builds(Mutex<Contents>);

impl Builds {
    /// A build begins, for which `begin` notes so; where its lines go, and how it hears that it is
    /// not wanted any more. [`Builds::end`] follows.
    ///
    /// # Errors
    /// The owner or the node has as many already, or `begin` fails.
    pub fn begin(
        &self,
        owner: &str,
        build: &str,
        begin: impl FnOnce() -> Result<(), Problem>,
    ) -> Result<(Arc<BuildLog>, watch::Receiver<bool>), Problem> {
        let mut contents = self.contents();
        let of_one = contents.running.values().filter(|one| one.owner == owner).count();
        if of_one >= OF_ONE_MAX {
            return Err(Problem::new(
                Kind::Exhausted,
                format!("`{owner}` has {of_one} builds under way, which is the most; wait for one"),
            ));
        }
        if contents.running.len() >= OF_ALL_MAX {
            return Err(Problem::new(
                Kind::Exhausted,
                format!(
                    "this node has {OF_ALL_MAX} builds under way, which is the most; try again later"
                ),
            ));
        }
        begin()?;
        let (cancel, cancelled) = watch::channel(false);
        let log = Arc::new(BuildLog::default());
        contents.running.insert(build.to_owned(), Running { owner: owner.to_owned(), cancel });
        contents.logs.insert(build.to_owned(), log.clone());
        Ok((log, cancelled))
    }

    /// Tells a build that it is not wanted any more, if it is under way.
    pub fn cancel(&self, build: &str) {
        if let Some(running) = self.contents().running.get(build) {
            // It may have ended just now.
            let _ = running.cancel.send(true);
        }
    }

    /// A build has ended.
    pub fn end(&self, build: &str) {
        let mut contents = self.contents();
        contents.running.remove(build);
        contents.ended.push_back(build.to_owned());
        if contents.ended.len() > LOGS_MAX
            && let Some(oldest) = contents.ended.pop_front()
        {
            contents.logs.remove(&oldest);
        }
    }

    /// The log of a build, if it is kept.
    pub fn log(&self, build: &str) -> Option<Arc<BuildLog>> {
        self.contents().logs.get(build).cloned()
    }

    fn contents(&self) -> MutexGuard<'_, Contents> {
        self.0.lock().expect("no holder panics")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn builds_of_an_owner_and_of_the_node_have_bounds_and_so_have_their_logs() {
        let builds = Builds::default();
        let begin = |owner: &str, id: &str| builds.begin(owner, id, || Ok(())).map(|_| ());
        for n in 0..OF_ALL_MAX {
            begin(&format!("owner {}", n / OF_ONE_MAX), &n.to_string()).unwrap();
        }
        assert_eq!(begin("owner 0", "x").unwrap_err().kind, Kind::Exhausted);
        assert!(begin("another", "x").unwrap_err().message.contains("this node"));
        (0..OF_ALL_MAX).for_each(|n| builds.end(&n.to_string()));
        for n in OF_ALL_MAX..LOGS_MAX + OF_ALL_MAX {
            begin("owner", &n.to_string()).unwrap();
            builds.end(&n.to_string());
        }
        let contents = builds.contents();
        assert_eq!((contents.logs.len(), contents.running.len()), (LOGS_MAX, 0));
        drop(contents);
        assert!(builds.log("0").is_none() && builds.log(&LOGS_MAX.to_string()).is_some());
        let refused = builds.begin("a", "refused", || Err(Problem::invalid("no")));
        assert!(refused.is_err() && builds.log("refused").is_none());
    }
}
