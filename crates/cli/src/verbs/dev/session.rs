//! What `thaw dev` does when something happens.

use super::Arguments;
use super::children::{Build, OwnDaemon};
use crate::client::Daemon;
use crate::failure::Failure;
use crate::output;
use crate::verbs::logs;
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, SyncSender};
use std::thread;
use std::time::{Duration, Instant};
use thaw_build::watch::{Change, Snapshot, Watcher};
use thaw_home::config::FunctionConfig;
use thaw_home::home::Home;
use thaw_sandbox::escape;
use tokio::signal::unix::{SignalKind, signal};

/// How long files may go on changing before they are built all the same.
const UNREST_MAX: Duration = Duration::from_secs(5);
/// Happenings that may wait: who tells of more waits as well.
const HAPPENINGS_MAX: usize = 16;
/// Names of changed files that are printed.
const NAMED_MAX: usize = 3;

/// What the deciding thread is told.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Happening {
    /// Something happened in a directory of the sources.
    Touched,
    /// The build has ended.
    Built,
    /// Somebody wants this to end.
    Stop,
    /// The daemon has ended.
    DaemonEnded,
    /// There is no more of the log.
    LogEnded,
}

/// A running `thaw dev`.
pub(super) struct Session<'a> {
    home: &'a Home,
    directory: &'a Path,
    arguments: &'a Arguments,
    happenings: Receiver<Happening>,
    tell: SyncSender<Happening>,
    watcher: Arc<Watcher>,
    sources: Sources,
    daemon: Option<OwnDaemon>,
    build: Option<Build>,
    /// What `thaw.toml` said when the build began, if it said anything usable.
    config: Option<FunctionConfig>,
    /// The function whose log is being printed.
    followed: Option<String>,
    /// Whether a version is being served that was built here.
    is_served: bool,
}

impl<'a> Session<'a> {
    /// Starts what tells of happenings, and a daemon if none runs.
    pub fn begin(
        home: &'a Home,
        directory: &'a Path,
        arguments: &'a Arguments,
    ) -> Result<Self, Failure> {
        let (tell, happenings) = mpsc::sync_channel(HAPPENINGS_MAX);
        // Before anything that would have to be ended.
        tell_of_signals(tell.clone())?;
        let watcher = Arc::new(Watcher::new(directory)?);
        let sources = Sources::new(watcher.look(None)?);
        let daemon = match home.daemon() {
            Some(_) => None,
            None => Some(OwnDaemon::start(arguments, &tell)?),
        };
        let session = Self {
            home,
            directory,
            arguments,
            happenings,
            tell,
            watcher,
            sources,
            daemon,
            build: None,
            config: None,
            followed: None,
            is_served: false,
        };
        session.tell_of_changes()?;
        if session.sources.now.is_cut() {
            say(
                "not all files are watched: there are too many; name those that are no sources in .thawignore",
            );
        }
        Ok(session)
    }

    /// Builds and serves until somebody wants it to end.
    pub fn run(mut self) -> Result<(), Failure> {
        let ended = self.go_on();
        if let Some(build) = self.build.take() {
            build.cancel();
        }
        if let Some(daemon) = self.daemon.take() {
            daemon.stop();
        }
        if ended.is_ok() {
            say("stopped");
        }
        ended
    }

    fn go_on(&mut self) -> Result<(), Failure> {
        self.start_build()?;
        loop {
            match self.happenings.recv().expect("it has a sender itself") {
                Happening::Stop => return Ok(()),
                Happening::DaemonEnded => {
                    return Err(Failure::failed("the daemon has ended; its last words are above"));
                }
                Happening::LogEnded => self.followed = None,
                Happening::Built => self.built()?,
                Happening::Touched if self.build.is_some() => {}
                Happening::Touched => {
                    if !self.wait_for_rest()? {
                        return Ok(());
                    }
                    self.look()?;
                }
            }
        }
    }

    /// Waits until nothing has been touched for a while. `false`: somebody wants this to end.
    fn wait_for_rest(&self) -> Result<bool, Failure> {
        let began = Instant::now();
        while began.elapsed() < UNREST_MAX {
            match self.happenings.recv_timeout(self.arguments.quiet.0) {
                Err(RecvTimeoutError::Timeout) => break,
                Ok(Happening::Stop) => return Ok(false),
                Ok(Happening::DaemonEnded) => {
                    return Err(Failure::failed("the daemon has ended; its last words are above"));
                }
                Ok(_) | Err(RecvTimeoutError::Disconnected) => {}
            }
        }
        Ok(true)
    }

    /// Builds if a source has changed.
    fn look(&mut self) -> Result<(), Failure> {
        let changes = self.sources.look(self.watcher.look(Some(&self.sources.now))?);
        if changes.is_empty() {
            return Ok(());
        }
        say(&format!("{} changed", named(&changes)));
        self.start_build()
    }

    fn start_build(&mut self) -> Result<(), Failure> {
        self.sources.begin_build();
        // The build itself says what is wrong with it.
        self.config = FunctionConfig::load(self.directory).ok();
        self.build = Some(Build::begin(self.directory, self.arguments, &self.tell)?);
        Ok(())
    }

    /// The build has ended: its function is served, or it has said why not.
    fn built(&mut self) -> Result<(), Failure> {
        let Some(build) = self.build.take() else { return Ok(()) };
        let is_success = build.finish()?.success();
        // Before anybody is told that it has ended: what changes from then on is no work of it.
        let now = self.watcher.look(Some(&self.sources.now))?;
        let (changes, restless) = self.sources.end_build(now, is_success);
        match is_success {
            true => self.serve()?,
            false if self.is_served => {
                say("the build failed: the version before goes on; waiting for a change");
            }
            false => say("the build failed; waiting for a change"),
        }
        if !restless.is_empty() {
            say(&format!(
                "{} changes with every build: after one more, that is no reason to build",
                named(&restless)
            ));
        }
        if changes.is_empty() {
            return Ok(());
        }
        say(&format!("{} changed meanwhile", named(&changes)));
        self.start_build()
    }

    /// Prints where the function is, and follows its log.
    fn serve(&mut self) -> Result<(), Failure> {
        let read = |config: Option<FunctionConfig>| match config {
            Some(config) => Ok(config),
            None => FunctionConfig::load(self.directory),
        };
        let config = match read(self.config.take()) {
            Ok(config) => config,
            Err(error) => {
                say(&format!("{error}; waiting for a change"));
                return Ok(());
            }
        };
        let name = config.name.as_str();
        let Some(address) = self.home.daemon() else {
            return Err(Failure::failed("the daemon has ended; its last words are above"));
        };
        let gateway = address.gateway;
        let at = match config.listen {
            Some(own) => format!("{} on {own}", config.entry.kind.name()),
            None => format!("http://{name}.localhost:{}/", gateway.port()),
        };
        output::print(&format!("serving {name}: {at}\n"))?;
        if config.listen.is_none() && !self.is_served {
            say(&format!("or: curl http://{gateway}/ -H 'Host: {name}'"));
        }
        self.is_served = true;
        if self.followed.as_deref() != Some(name)
            && let Some(daemon) = Daemon::running(self.home)
        {
            self.follow(daemon, name)?;
        }
        Ok(())
    }

    /// Prints what the function prints from now on.
    fn follow(&mut self, daemon: Daemon, name: &str) -> Result<(), Failure> {
        let response = daemon.stream(&format!("/functions/{name}/logs?follow=true"))?;
        let tell = self.tell.clone();
        thread::Builder::new().name("log".to_owned()).spawn(move || {
            let _ = logs::print_stream(response);
            let _ = tell.send(Happening::LogEnded);
        })?;
        self.followed = Some(name.to_owned());
        Ok(())
    }

    fn tell_of_changes(&self) -> Result<(), Failure> {
        let (watcher, tell) = (self.watcher.clone(), self.tell.clone());
        thread::Builder::new().name("watch".to_owned()).spawn(move || {
            while watcher.wait().is_ok() && tell.send(Happening::Touched).is_ok() {}
        })?;
        Ok(())
    }
}

/// Tells of Ctrl-C, `kill`, and the end of the terminal.
fn tell_of_signals(tell: SyncSender<Happening>) -> Result<(), Failure> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let kinds = [SignalKind::interrupt(), SignalKind::terminate(), SignalKind::hangup()];
    let signals = {
        let _inside = runtime.enter();
        kinds.into_iter().map(signal).collect::<Result<Vec<_>, _>>()?
    };
    thread::Builder::new().name("signals".to_owned()).spawn(move || {
        runtime.block_on(async {
            let Ok([mut interrupt, mut terminate, mut hangup]) = <[_; 3]>::try_from(signals) else {
                return;
            };
            tokio::select! {
                _ = interrupt.recv() => {}
                _ = terminate.recv() => {}
                _ = hangup.recv() => {}
            }
            let _ = tell.send(Happening::Stop);
        });
    })?;
    Ok(())
}

/// A remark of its own, beside what builds and functions print.
fn say(text: &str) {
    eprintln!("dev: {text}");
}

/// Files, for people.
fn named(changes: &[Change]) -> String {
    let names = changes.iter().take(NAMED_MAX);
    let names = names.map(|change| escape(change.path.as_os_str().as_encoded_bytes()));
    let names = names.collect::<Vec<_>>().join(", ");
    match changes.len().saturating_sub(NAMED_MAX) {
        0 => names,
        more => format!("{names} and {more} more"),
    }
}

/// The sources, and what of them a build makes itself.
struct Sources {
    now: Snapshot,
    /// When the build began.
    built: Snapshot,
    /// Files that builds make: their changes are no reason to build.
    made: BTreeSet<PathBuf>,
    /// Files that changed while the build before was running.
    suspects: BTreeSet<PathBuf>,
    /// Whether no build has succeeded yet.
    is_first: bool,
}

impl Sources {
    fn new(now: Snapshot) -> Self {
        let built = now.clone();
        Self { now, built, made: BTreeSet::new(), suspects: BTreeSet::new(), is_first: true }
    }

    /// Takes note of what the sources are now; the changes. No build is running, so that none of
    /// them is a build's: files that were taken for one's work are sources again.
    fn look(&mut self, now: Snapshot) -> Vec<Change> {
        let changes = now.changes_since(&self.now);
        for change in &changes {
            self.made.remove(&change.path);
        }
        self.now = now;
        changes
    }

    fn begin_build(&mut self) {
        self.built = self.now.clone();
    }

    /// The same after a build: changes that are a reason for another, and those of them that two
    /// builds in a row came with, which are a reason for the last time. A file that came with the
    /// first build that succeeded was made by it.
    fn end_build(&mut self, now: Snapshot, is_success: bool) -> (Vec<Change>, Vec<Change>) {
        let mut changes = now.changes_since(&self.built);
        self.now = now;
        changes.retain(|change| !self.made.contains(&change.path));
        if self.is_first && is_success {
            let made = changes.iter().filter(|change| !change.was_there);
            self.made.extend(made.map(|change| change.path.clone()));
            changes.retain(|change| change.was_there);
            self.is_first = false;
        }
        let is_restless = |change: &&Change| self.suspects.contains(&change.path);
        let restless: Vec<_> = changes.iter().filter(is_restless).cloned().collect();
        self.made.extend(restless.iter().map(|change| change.path.clone()));
        self.suspects = changes.iter().map(|change| change.path.clone()).collect();
        (changes, restless)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    struct Place(tempfile::TempDir);

    impl Place {
        fn write(&self, name: &str, text: &str) {
            fs::write(self.0.path().join(name), text).unwrap();
        }

        fn now(&self, sources: &Sources) -> Snapshot {
            Snapshot::take(self.0.path(), Some(&sources.now))
        }
    }

    fn place() -> (Place, Sources) {
        let place = Place(tempfile::tempdir().unwrap());
        place.write("app.py", "1");
        place.write("lock", "1");
        let sources = Sources::new(Snapshot::take(place.0.path(), None));
        (place, sources)
    }

    #[test]
    fn what_a_build_makes_does_not_start_another() {
        let (place, mut sources) = place();
        sources.begin_build();
        place.write("out", "1");
        assert_eq!(sources.end_build(place.now(&sources), true), (vec![], vec![]));
        sources.begin_build();
        place.write("out", "22");
        assert_eq!(sources.end_build(place.now(&sources), true), (vec![], vec![]));
        place.write("app.py", "22");
        assert_eq!(named(&sources.look(place.now(&sources))), "app.py");
    }

    #[test]
    fn a_file_that_comes_with_a_first_failure_is_built() {
        let (place, mut sources) = place();
        sources.begin_build();
        place.write("fine", "");
        let (changes, _) = sources.end_build(place.now(&sources), false);
        assert_eq!(named(&changes), "fine");
    }

    #[test]
    fn a_change_without_a_build_is_somebodys_even_of_a_file_that_a_build_made() {
        let (place, mut sources) = place();
        sources.begin_build();
        place.write("new.py", "1");
        assert_eq!(sources.end_build(place.now(&sources), true), (vec![], vec![]));
        place.write("new.py", "22");
        assert_eq!(named(&sources.look(place.now(&sources))), "new.py");
        sources.begin_build();
        place.write("new.py", "333");
        let (changes, _) = sources.end_build(place.now(&sources), true);
        assert_eq!(named(&changes), "new.py");
    }

    #[test]
    fn a_change_during_a_build_starts_another_and_a_file_of_every_build_does_not() {
        let (place, mut sources) = place();
        sources.begin_build();
        place.write("app.py", "22");
        place.write("lock", "22");
        let (changes, restless) = sources.end_build(place.now(&sources), true);
        assert_eq!((named(&changes).as_str(), restless.len()), ("app.py, lock", 0));
        sources.begin_build();
        place.write("lock", "333");
        // It may be somebody's: what it is now is built.
        let (changes, restless) = sources.end_build(place.now(&sources), true);
        assert_eq!((named(&changes), named(&restless)), ("lock".to_owned(), "lock".to_owned()));
        sources.begin_build();
        place.write("lock", "4444");
        assert_eq!(sources.end_build(place.now(&sources), true), (vec![], vec![]));
        // Both are watched on.
        place.write("app.py", "333");
        place.write("lock", "55555");
        assert_eq!(named(&sources.look(place.now(&sources))), "app.py, lock");
    }

    #[test]
    fn many_files_are_named_in_short() {
        let change = |name: &str| Change { path: name.into(), was_there: true };
        let changes = ["a", "b\u{1b}", "c", "d", "e"].map(change);
        assert_eq!(named(&changes), "a, b\\x1b, c and 2 more");
    }
}
