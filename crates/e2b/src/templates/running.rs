//! Builds that are under way or wait for their turn, and the logs of those and of the last ones
//! before.

use super::log::BuildLog;
use crate::problem::{Kind, Problem};
use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, watch};

/// Most builds of an owner that are under way at a time.
pub const OF_ONE_MAX: usize = 2;
/// Most builds of the node that are under way at a time.
const OF_ALL_MAX: usize = 8;
/// Most builds of an owner, with those that wait.
pub const BEGUN_OF_ONE_MAX: usize = 12;
/// Most builds of the node, with those that wait.
const BEGUN_MAX: usize = 60;
/// Builds that have ended and whose logs are kept.
const LOGS_MAX: usize = 64;

struct Running {
    owner: String,
    cancel: watch::Sender<bool>,
}

#[derive(Default)]
struct Contents {
    running: BTreeMap<String, Running>,
    /// Turns of the owners that have builds.
    turns: BTreeMap<String, Arc<Semaphore>>,
    logs: BTreeMap<String, Arc<BuildLog>>,
    /// Those that have ended, the oldest first, with their owners.
    ended: VecDeque<(String, String)>,
}

impl Contents {
    fn of(&self, owner: &str) -> usize {
        self.running.values().filter(|one| one.owner == owner).count()
    }

    /// Forgets the oldest log of the owner who has the most.
    fn forget_a_log(&mut self) {
        let mut counts = BTreeMap::<&str, usize>::new();
        for (owner, _) in &self.ended {
            *counts.entry(owner).or_default() += 1;
        }
        let most = counts.into_iter().max_by_key(|(_, count)| *count).map(|(owner, _)| owner);
        let at = self.ended.iter().position(|(owner, _)| Some(owner.as_str()) == most);
        if let Some((_, build)) = at.and_then(|at| self.ended.remove(at)) {
            self.logs.remove(&build);
        }
    }
}

/// All of them, by the id of the build.
pub struct Builds {
    contents: Mutex<Contents>,
    turns: Arc<Semaphore>,
}

impl Default for Builds {
    fn default() -> Self {
        Self { contents: Mutex::default(), turns: Arc::new(Semaphore::new(OF_ALL_MAX)) }
    }
}

/// What a build that begins is given.
pub struct Begun {
    /// Where its lines go.
    pub log: Arc<BuildLog>,
    /// How it hears that it is not wanted any more.
    pub cancelled: watch::Receiver<bool>,
    /// Its turn.
    pub turn: Turn,
}

/// Where a build waits for its turn: that of its owner, and then that of the node.
#[derive(Clone)]
pub struct Turn([Arc<Semaphore>; 2]);

impl Turn {
    /// Waits for it; it lasts as long as the result.
    pub async fn come(self) -> [OwnedSemaphorePermit; 2] {
        let Self([owner, node]) = self;
        let open = "the semaphore is never closed";
        [owner.acquire_owned().await.expect(open), node.acquire_owned().await.expect(open)]
    }

    /// Whether it has come as soon as it is waited for.
    pub fn is_free(&self) -> bool {
        self.0.iter().all(|turns| turns.available_permits() > 0)
    }
}

impl Builds {
    /// A build begins, for which `begin` notes so. [`Builds::end`] follows.
    ///
    /// # Errors
    /// The owner or the node has as many already, or `begin` fails.
    pub fn begin(
        &self,
        owner: &str,
        build: &str,
        begin: impl FnOnce() -> Result<(), Problem>,
    ) -> Result<Begun, Problem> {
        let mut contents = self.contents();
        let full = |who: String, most: usize| {
            let text = format!("{who} has {most} builds under way or waiting; wait for some");
            Err(Problem::new(Kind::Exhausted, text))
        };
        if contents.of(owner) >= BEGUN_OF_ONE_MAX {
            return full(format!("`{owner}`"), BEGUN_OF_ONE_MAX);
        }
        if contents.running.len() >= BEGUN_MAX {
            return full("this node".to_owned(), BEGUN_MAX);
        }
        begin()?;
        let (cancel, cancelled) = watch::channel(false);
        let log = Arc::new(BuildLog::default());
        contents.running.insert(build.to_owned(), Running { owner: owner.to_owned(), cancel });
        contents.logs.insert(build.to_owned(), log.clone());
        let new = || Arc::new(Semaphore::new(OF_ONE_MAX));
        let of_owner = contents.turns.entry(owner.to_owned()).or_insert_with(new).clone();
        Ok(Begun { log, cancelled, turn: Turn([of_owner, self.turns.clone()]) })
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
        let Some(Running { owner, .. }) = contents.running.remove(build) else { return };
        if contents.of(&owner) == 0 {
            contents.turns.remove(&owner);
        }
        contents.ended.push_back((owner, build.to_owned()));
        if contents.ended.len() > LOGS_MAX {
            contents.forget_a_log();
        }
    }

    /// The log of a build, if it is kept.
    pub fn log(&self, build: &str) -> Option<Arc<BuildLog>> {
        self.contents().logs.get(build).cloned()
    }

    fn contents(&self) -> MutexGuard<'_, Contents> {
        self.contents.lock().expect("no holder panics")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn builds_of_an_owner_and_of_the_node_have_bounds_and_so_have_their_logs() {
        let builds = Builds::default();
        let begin = |owner: &str, id: &str| builds.begin(owner, id, || Ok(())).map(|_| ());
        for n in 0..BEGUN_MAX {
            begin(&format!("owner {}", n / BEGUN_OF_ONE_MAX), &n.to_string()).unwrap();
        }
        assert!(begin("owner 0", "x").unwrap_err().message.contains("owner 0"));
        assert!(begin("another", "x").unwrap_err().message.contains("this node"));
        (0..BEGUN_MAX).for_each(|n| builds.end(&n.to_string()));
        for n in BEGUN_MAX..LOGS_MAX + BEGUN_MAX {
            begin("owner", &n.to_string()).unwrap();
            builds.end(&n.to_string());
        }
        let contents = builds.contents();
        assert_eq!((contents.logs.len(), contents.running.len()), (LOGS_MAX, 0));
        assert!(contents.turns.is_empty());
        drop(contents);
        let latest = (LOGS_MAX + BEGUN_MAX - 1).to_string();
        assert!(builds.log("0").is_none() && builds.log(&latest).is_some());
        // Whoever builds the most makes nobody else's logs go.
        begin("quiet", "one").unwrap();
        builds.end("one");
        for n in 0..2 * LOGS_MAX {
            begin("owner", &format!("more {n}")).unwrap();
            builds.end(&format!("more {n}"));
        }
        assert!(builds.log("one").is_some() && builds.log(&latest).is_none());
        assert_eq!(builds.contents().logs.len(), LOGS_MAX);
        let refused = builds.begin("a", "refused", || Err(Problem::invalid("no")));
        assert!(refused.is_err() && builds.log("refused").is_none());
    }

    #[tokio::test]
    async fn an_owner_does_not_take_the_turns_of_others() {
        let builds = Builds::default();
        let turn = |owner: &str, id: &str| builds.begin(owner, id, || Ok(())).unwrap().turn;
        let first = [turn("a", "1").come().await, turn("a", "2").come().await];
        let third = turn("a", "3");
        assert!(!third.is_free() && turn("b", "4").is_free());
        let third = tokio::spawn(third.come());
        tokio::task::yield_now().await;
        assert!(!third.is_finished());
        drop(first);
        drop(third.await.unwrap());
        let mut all = Vec::new();
        for n in 0..OF_ALL_MAX {
            all.push(turn(&format!("owner {n}"), &format!("of {n}")).come().await);
        }
        assert!(!turn("b", "5").is_free(), "those of the node are taken");
    }
}
