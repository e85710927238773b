//! The thread that has the queue. It does what it is asked in the order in which that comes, and
//! answers after all of it is on the disk: many that ask at a time wait for one sync.

use super::file::QueueFile;
use super::ledger::{Carried, Ledger};
use super::record::Unavailable;
use std::io;
use std::path::{Path, PathBuf};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};
use tokio::sync::{mpsc, oneshot};

/// How many may wait for the thread before others wait for them.
const WAITING_MAX: usize = 1024;
/// Most that one transaction does.
const BATCH_MAX: usize = 256;
/// How often a file that cannot be used is tried again.
const REOPEN: Duration = Duration::from_secs(5);

/// Answers one who has asked.
type Answer = Box<dyn FnOnce(Result<(), Unavailable>) + Send>;
/// Does something, and gives back what answers.
type Work = Box<dyn FnOnce(Result<&mut Ledger, Unavailable>) -> Answer + Send>;

/// The way to the thread.
#[derive(Clone)]
pub(super) struct Writer {
    work: mpsc::Sender<Work>,
}

impl Writer {
    /// Begins to write the file at `path`.
    ///
    /// # Errors
    /// The host has no thread.
    pub fn start(path: PathBuf) -> io::Result<(Self, JoinHandle<()>)> {
        let (work, asked) = mpsc::channel(WAITING_MAX);
        let thread = thread::Builder::new().name("triggers".to_owned());
        let thread = thread.spawn(move || run(&path, asked))?;
        Ok((Self { work }, thread))
    }

    /// Does something with the queue; the answer comes when what it has changed is on the disk.
    ///
    /// # Errors
    /// The file cannot be used, and nothing has changed.
    pub async fn ask<T: Send + 'static>(
        &self,
        work: impl FnOnce(&mut Ledger) -> T + Send + 'static,
    ) -> Result<T, Unavailable> {
        let (tell, answer) = oneshot::channel();
        let work: Work = Box::new(move |ledger| {
            let done = ledger.map(work);
            // Who has asked may have gone away.
            Box::new(move |committed| {
                let _ = tell.send(committed.and(done));
            })
        });
        let gone = || Unavailable("its thread has ended; start the daemon again".to_owned());
        self.work.send(work).await.map_err(|_| gone())?;
        answer.await.unwrap_or_else(|_| Err(gone()))
    }
}

/// The file, or why it cannot be used.
enum State {
    Open(Box<Ledger>),
    /// Those that were being attempted at the last commit still are.
    Broken {
        why: Unavailable,
        since: Instant,
        carried: Carried,
    },
}

fn run(path: &Path, mut asked: mpsc::Receiver<Work>) {
    let mut state = open(path, Carried::default());
    while let Some(first) = asked.blocking_recv() {
        if let State::Broken { since, .. } = &state
            && since.elapsed() >= REOPEN
        {
            try_again(path, &mut state);
        }
        let mut answers = Vec::new();
        let mut next = Some(first);
        while let Some(work) = next.take() {
            answers.push(work(match &mut state {
                State::Open(ledger) => Ok(ledger),
                State::Broken { why, .. } => Err(why.clone()),
            }));
            if answers.len() < BATCH_MAX {
                next = asked.try_recv().ok();
            }
        }
        let committed = commit(path, &mut state);
        answers.into_iter().for_each(|answer| answer(committed.clone()));
    }
}

/// Writes what has changed. If that fails, nothing has.
fn commit(path: &Path, state: &mut State) -> Result<(), Unavailable> {
    let State::Open(ledger) = state else { return Ok(()) };
    let Err(why) = ledger.commit() else { return Ok(()) };
    tracing::error!("{why}");
    let carried = ledger.carried();
    // Only one may have the file.
    *state = State::Broken { why: Unavailable(why.clone()), since: Instant::now(), carried };
    try_again(path, state);
    Err(Unavailable(why))
}

/// Opens a file that could not be used. What is being attempted stays known until it can.
fn try_again(path: &Path, state: &mut State) {
    if let State::Broken { carried, .. } = state {
        let carried = std::mem::take(carried);
        *state = open(path, carried);
    }
}

/// Opens the file, of whose invocations this is known besides.
fn open(path: &Path, carried: Carried) -> State {
    match QueueFile::open(path) {
        Ok((file, content)) => State::Open(Box::new(Ledger::new(file, content, carried))),
        Err(why) => {
            tracing::error!("{why}");
            State::Broken { why: Unavailable(why), since: Instant::now(), carried }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::triggers::record::{NewInvocation, Origin, Outcome, Terms};
    use std::path::PathBuf;
    use thaw_home::config::AsyncConfig;

    fn ledger(state: &mut State) -> &mut Ledger {
        match state {
            State::Open(ledger) => ledger,
            State::Broken { why, .. } => panic!("{why}"),
        }
    }

    fn add(ledger: &mut Ledger) {
        let new = NewInvocation {
            function: "f".to_owned(),
            origin: Origin::Client,
            request: Default::default(),
            key: None,
        };
        let terms = Terms { config: AsyncConfig::default(), domain: None, tenant_bytes: None };
        ledger.queue(new, &terms, 1).unwrap();
    }

    /// A file with two invocations that wait.
    fn with_two() -> (tempfile::TempDir, PathBuf, State) {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("queue");
        let mut state = open(&path, Carried::default());
        for _ in 0..2 {
            add(ledger(&mut state));
        }
        commit(&path, &mut state).unwrap();
        (directory, path, state)
    }

    #[test]
    fn what_runs_is_not_begun_again_however_often_the_file_cannot_be_opened() {
        let directory = tempfile::tempdir().unwrap();
        let (path, away) = (directory.path().join("queue"), directory.path().join("away"));
        let mut state = open(&path, Carried::default());
        add(ledger(&mut state));
        commit(&path, &mut state).unwrap();
        assert_eq!(ledger(&mut state).take(1, 9, |_, _| 9).unwrap().jobs.len(), 1);
        commit(&path, &mut state).unwrap();
        std::fs::rename(&path, &away).unwrap();
        std::fs::create_dir(&path).unwrap();
        add(ledger(&mut state));
        ledger(&mut state).close();
        commit(&path, &mut state).unwrap_err();
        try_again(&path, &mut state);
        assert!(matches!(state, State::Broken { .. }));
        std::fs::remove_dir(&path).unwrap();
        std::fs::rename(&away, &path).unwrap();
        try_again(&path, &mut state);
        let info = ledger(&mut state).queues().remove(0);
        assert_eq!((info.queued, info.running), (0, 1));
    }

    #[test]
    fn a_request_that_is_not_read_is_tried_again_and_holds_up_no_other() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("queue");
        let mut state = open(&path, Carried::default());
        add(ledger(&mut state));
        commit(&path, &mut state).unwrap();
        let take = |state: &mut State, now: u64| ledger(state).take(now, 9, |_, _| 9);
        let counts = |state: &mut State| {
            let info = ledger(state).queues().remove(0);
            (info.queued, info.running, info.dead)
        };
        ledger(&mut state).fail_to_read(1);
        take(&mut state, 10).unwrap_err();
        // Whoever has asked hears of it, and the file is opened anew.
        assert!(commit(&path, &mut state).is_err());
        assert_eq!(counts(&mut state), (1, 0, 0));
        // Another one, which came later, does not wait for it.
        add(ledger(&mut state));
        commit(&path, &mut state).unwrap();
        let jobs = take(&mut state, 11).unwrap().jobs;
        assert_eq!((jobs.len(), jobs[0].record.created_ms), (1, 1));
        commit(&path, &mut state).unwrap();
        assert_eq!(counts(&mut state), (1, 1, 0));
        let jobs = take(&mut state, 10_000).unwrap().jobs;
        assert_eq!(jobs.len(), 1, "it is tried again");
    }

    #[test]
    fn those_that_have_begun_beside_one_that_is_not_read_begin_again() {
        let (_directory, path, mut state) = with_two();
        let first = ledger(&mut state).take(10, 1, |_, _| 9).unwrap().jobs;
        assert_eq!(first.len(), 1);
        ledger(&mut state).fail_to_read(1);
        ledger(&mut state).take(10, 9, |_, _| 9).unwrap_err();
        assert!(commit(&path, &mut state).is_err());
        // Nobody has heard of the first one.
        let info = ledger(&mut state).queues().remove(0);
        assert_eq!((info.queued, info.running), (2, 0));
    }

    #[test]
    fn one_that_has_just_been_attempted_is_not_begun_again_if_that_is_not_written() {
        let (_directory, path, mut state) = with_two();
        let first = ledger(&mut state).take(10, 1, |_, _| 9).unwrap().jobs.remove(0);
        commit(&path, &mut state).unwrap();
        let terms = Terms { config: AsyncConfig::default(), domain: None, tenant_bytes: None };
        ledger(&mut state).finish(first.id, Outcome::Done(200), &terms, 11);
        ledger(&mut state).fail_to_read(1);
        ledger(&mut state).take(12, 9, |_, _| 9).unwrap_err();
        assert!(commit(&path, &mut state).is_err());
        // Whoever has attempted it says so again.
        let info = ledger(&mut state).queues().remove(0);
        assert_eq!((info.queued, info.running), (1, 1));
        ledger(&mut state).finish(first.id, Outcome::Done(200), &terms, 13);
        commit(&path, &mut state).unwrap();
        let info = ledger(&mut state).queues().remove(0);
        assert_eq!((info.queued, info.running), (1, 0));
    }

    #[test]
    fn one_that_is_never_read_is_a_dead_letter_that_says_so() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("queue");
        let mut state = open(&path, Carried::default());
        add(ledger(&mut state));
        commit(&path, &mut state).unwrap();
        let mut failures = 0;
        for hour in 1..=9 {
            ledger(&mut state).fail_to_read(1);
            let taken = ledger(&mut state).take(hour * 60_000, 9, |_, _| 9);
            failures += u32::from(taken.is_err());
            assert_eq!(commit(&path, &mut state).is_err(), taken.is_err());
        }
        assert_eq!(failures, 5);
        let info = ledger(&mut state).queues().remove(0);
        assert_eq!((info.queued, info.running, info.dead), (0, 0, 1));
        let ended = ledger(&mut state).take_ended();
        let death = ended[0].record.dead.as_ref().unwrap();
        assert!(death.reason.contains("was not read in 5 tries"), "{}", death.reason);
    }
}
