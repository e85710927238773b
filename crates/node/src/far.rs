//! Contents and segments of a partial function, as sandboxes ask for them: a fetcher in another
//! process gets them.
//!
//! Files are opened in the directory that was read with the record. Where another pull has made a new
//! one of its name, nothing is found any more, rather than something else.
//!
//! Whoever asks never waits: a thread for each connection asks ([`Asker`]), and another one reads
//! the answers.

use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::gauge::Gauge;
use rustix::fs::{Mode, OFlags, openat};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, sockopt};
use std::collections::HashMap;
use std::fs::File;
use std::io::{self, Write};
use std::mem;
use std::net::Shutdown;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, Weak};
use std::time::{Duration, Instant};
use thaw_home::partial::{PartialFunction, Reply, ask, parts, receive, take_reply};
use thaw_sandbox::{BlobSource, FetchAnswer, MovedFile, Segment};

/// How long a fetcher may take; it gives up earlier by itself.
const PATIENCE: Duration = Duration::from_secs(60);
/// How long those who wait do so without a fetcher: one that has ended is followed by another soon.
const WITHOUT_FETCHER: Duration = Duration::from_secs(15);
/// How often a fetcher is looked for meanwhile.
const LOOK_FOR_FETCHER: Duration = Duration::from_millis(100);
/// How often it is looked for questions that have waited too long.
const LOOK: Duration = Duration::from_secs(1);
/// How long a failure is told to those whose instances end.
const FAILURE_KEPT: Duration = Duration::from_secs(10);
/// Most sandboxes that wait for one function. Each waits for one answer at a time.
const WAITING_MAX: usize = 4096;

/// Asks the fetcher of a function.
pub struct FarContents {
    shared: Arc<Shared>,
}

struct Shared {
    /// Where the fetcher listens.
    socket: PathBuf,
    image: File,
    /// Where its contents get their names when they are here.
    directory: File,
    hash: [u8; 32],
    contents: u32,
    segments: Vec<Segment>,
    /// [`WITHOUT_FETCHER`].
    without_fetcher: Duration,
    counters: PartCounters,
    problem: Box<Problem>,
    state: Mutex<State>,
}

/// What is counted of those who wait for parts.
#[derive(Clone, Debug, Default)]
pub struct PartCounters {
    /// Those who wait now.
    pub waiting: Gauge,
    /// Those who have waited in vain.
    pub failed: Counter,
}

/// Counts somebody who waits, until it is dropped.
struct Counted(Gauge);

impl Counted {
    fn new(waiting: &Gauge) -> Self {
        waiting.inc();
        Self(waiting.clone())
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        self.0.dec();
    }
}

/// Says why nobody fetches, if that is known.
type Problem = dyn Fn() -> Option<String> + Send + Sync;

#[derive(Default)]
struct State {
    /// Takes the questions of the connection. No more of them are on their way than sandboxes wait.
    questions: Option<Sender<u32>>,
    /// Which connection that is: an earlier one's end is no news.
    number: u64,
    /// Who waits for what.
    waiting: HashMap<u32, Vec<Waiting>>,
    failure: Option<(Instant, String)>,
    /// Since when there is no fetcher that answers, as far as somebody has looked for one.
    alone_since: Option<Instant>,
    /// The whole function, once it is here.
    whole: Option<Whole>,
}

/// Somebody who waits for an answer.
struct Waiting {
    since: Instant,
    answer: FetchAnswer,
}

impl Waiting {
    fn is_late(&self) -> bool {
        self.since.elapsed() > PATIENCE
    }
}

/// A function of which everything is in the store.
struct Whole {
    image: File,
    contents: Arc<dyn BlobSource>,
}

impl FarContents {
    /// Those of a function; the fetcher is looked for when something is asked for.
    ///
    /// # Errors
    /// There are no descriptors left.
    pub fn new(
        function: &PartialFunction,
        counters: PartCounters,
        problem: Box<Problem>,
    ) -> io::Result<Self> {
        let shared = Shared {
            socket: function.directory.join(parts::SOCKET),
            image: function.image.file().try_clone()?,
            directory: function.contents.try_clone()?,
            hash: function.hash,
            contents: function.rows.contents(),
            segments: function.layout.segments().to_vec(),
            without_fetcher: WITHOUT_FETCHER,
            counters,
            problem,
            state: Mutex::default(),
        };
        Ok(Self { shared: Arc::new(shared) })
    }

    /// Nothing is missing any more: this is the image, over files with these contents.
    pub fn complete(&self, image: File, contents: Arc<dyn BlobSource>) {
        let mut state = self.shared.state();
        state.whole = Some(Whole { image, contents });
        state.failure = None;
        let waiting = mem::take(&mut state.waiting);
        drop(state);
        // One who does not read his answer holds up no one who says that the function is whole.
        let waiting = Arc::new(Mutex::new(waiting));
        let shared = self.shared.clone();
        let answer_all = move || {
            let waiting = mem::take(&mut *waiting.lock().expect("no holder panics"));
            for (number, all) in waiting {
                all.into_iter().for_each(|one| (one.answer)(shared.open_whole(number)));
            }
        };
        let name = "thaw-far-whole".to_owned();
        if std::thread::Builder::new().name(name).spawn(answer_all.clone()).is_err() {
            answer_all();
        }
    }
}

impl BlobSource for FarContents {
    fn open_blob(&self, number: u32) -> io::Result<OwnedFd> {
        self.shared.open_whole(number)
    }

    fn fetch(&self, number: u32, answer: FetchAnswer) -> Result<(), FetchAnswer> {
        let shared = &self.shared;
        if shared.place(number).is_none() {
            answer(Err(io::ErrorKind::NotFound.into()));
            return Ok(());
        }
        let mut state = shared.state();
        if state.whole.is_some() {
            return Err(answer);
        }
        if state.waiting.values().map(Vec::len).sum::<usize>() >= WAITING_MAX {
            drop(state);
            answer(Err(io::ErrorKind::ResourceBusy.into()));
            return Ok(());
        }
        let all = state.waiting.entry(number).or_default();
        let counted = Counted::new(&shared.counters.waiting);
        let answer: FetchAnswer = Box::new(move |outcome| {
            drop(counted);
            answer(outcome);
        });
        all.push(Waiting { since: Instant::now(), answer });
        let is_first = all.len() == 1;
        let asked = if is_first { shared.ask(&mut state, number) } else { Ok(()) };
        drop(state);
        if let Err(error) = asked {
            shared.lose(None, &shared.nobody_fetches(&error));
        }
        Ok(())
    }

    fn failure(&self) -> Option<String> {
        let state = self.shared.state();
        let (since, why) = state.failure.as_ref()?;
        (since.elapsed() < FAILURE_KEPT).then(|| why.clone())
    }
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("no holder panics")
    }

    /// Where something lies when it is here; `None`: there is no such number.
    fn place(&self, number: u32) -> Option<Place> {
        let Some(segment) = number.checked_sub(self.contents) else {
            return Some(Place::Named(number.to_string()));
        };
        Some(match self.segments.get(segment as usize)?.of {
            MovedFile::Image => Place::Image,
            MovedFile::Content(number) => Place::Named(format!("{number}.part")),
        })
    }

    /// Opens what is here.
    fn open(&self, number: u32) -> io::Result<OwnedFd> {
        match self.place(number).ok_or(io::ErrorKind::NotFound)? {
            Place::Image => Ok(self.image.try_clone()?.into()),
            Place::Named(name) => {
                let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
                Ok(openat(&self.directory, Path::new(&name), flags, Mode::empty())?)
            }
        }
    }

    /// Opens what is in the store with the whole function.
    fn open_whole(&self, number: u32) -> io::Result<OwnedFd> {
        let state = self.state();
        // Whoever cannot wait for it gets it when the function is whole.
        let whole = state.whole.as_ref().ok_or_else(|| {
            io::Error::other("the function is being pulled; try again when that is done")
        })?;
        let Some(segment) = number.checked_sub(self.contents) else {
            return whole.contents.open_blob(number);
        };
        let segment = self.segments.get(segment as usize).ok_or(io::ErrorKind::NotFound)?;
        match segment.of {
            MovedFile::Image => Ok(whole.image.try_clone()?.into()),
            MovedFile::Content(number) => whole.contents.open_blob(number),
        }
    }

    /// Has a number asked for that somebody waits for.
    fn ask(self: &Arc<Self>, state: &mut State, number: u32) -> io::Result<()> {
        if state.questions.as_ref().is_some_and(|questions| questions.send(number).is_ok()) {
            return Ok(());
        }
        let (questions, asked) = channel();
        state.number += 1;
        let shared = Arc::downgrade(self);
        let asker = Asker { shared, number: state.number, connection: None, asked };
        std::thread::Builder::new().name("thaw-far-ask".to_owned()).spawn(move || asker.run())?;
        // It asks for all that are waited for when it has found the fetcher.
        let _ = questions.send(number);
        state.questions = Some(questions);
        Ok(())
    }

    /// Connects to the fetcher, within [`LOOK`].
    fn connect(&self) -> io::Result<UnixStream> {
        let flags = SocketFlags::CLOEXEC;
        let socket =
            rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
        // Of one that hangs, it is that for which connect(2) waits.
        sockopt::set_socket_timeout(&socket, sockopt::Timeout::Send, Some(LOOK))?;
        sockopt::set_socket_timeout(&socket, sockopt::Timeout::Recv, Some(LOOK))?;
        rustix::net::connect(&socket, &SocketAddrUnix::new(&self.socket)?)?;
        let mut stream = UnixStream::from(socket);
        stream.write_all(&self.hash)?;
        Ok(stream)
    }

    /// Takes what was received, or learns that nothing was; why nothing more comes.
    fn take(&self, more: io::Result<bool>, received: &mut Vec<u8>) -> Result<(), End> {
        match more {
            Ok(true) => self.take_replies(received).map_err(End::ForGood)?,
            Err(error) if is_timeout(&error) => {}
            // A connection is reset if it ends with questions unread.
            Ok(false) | Err(_) => return Err(End::OfFetcher),
        }
        self.lose_late();
        Ok(())
    }

    /// Nobody answers. Whether those who wait have waited for a fetcher for too long.
    fn is_left_alone(&self, state: &mut State) -> bool {
        let since = *state.alone_since.get_or_insert_with(Instant::now);
        since.elapsed() >= self.without_fetcher
    }

    /// The fetcher of the connection of this number has ended. Those who wait have another one asked,
    /// which may be there soon.
    fn ask_another(&self, number: u64) {
        let mut state = self.state();
        if number != state.number {
            return;
        }
        let first = state.waiting.keys().next().copied();
        let Some(first) = first.filter(|_| !self.is_left_alone(&mut state)) else {
            drop(state);
            let ended = io::Error::other("whoever did has ended");
            return self.lose(Some(number), &self.nobody_fetches(&ended));
        };
        // The connection is found to be broken, and all that is waited for is asked for anew.
        if let Some(questions) = &state.questions {
            let _ = questions.send(first);
        }
    }

    fn nobody_fetches(&self, error: &io::Error) -> String {
        let why = (self.problem)().unwrap_or_else(|| error.to_string());
        format!(
            "nobody fetches what is missing of the function ({why}); `thaw inspect` says when the daemon \
             tries it again"
        )
    }

    /// Tells those who have waited for too long that they do so in vain. Others wait on.
    fn lose_late(&self) {
        let mut state = self.state();
        let mut late = Vec::new();
        state.waiting.retain(|_, all| {
            late.extend(all.extract_if(.., |one| one.is_late()));
            !all.is_empty()
        });
        self.fail(state, late, "what is missing of the function takes too long to come");
    }

    /// Answers that nothing comes, when the state is free again.
    fn fail(&self, mut state: MutexGuard<'_, State>, those: Vec<Waiting>, why: &str) {
        if !those.is_empty() {
            state.failure = Some((Instant::now(), why.to_owned()));
        }
        drop(state);
        for one in those {
            self.counters.failed.inc();
            (one.answer)(Err(io::Error::other(why.to_owned())));
        }
    }

    fn take_replies(&self, received: &mut Vec<u8>) -> Result<(), String> {
        let taken = |error: io::Error| format!("its fetcher makes no sense ({error})");
        while let Some(Reply { number, outcome }) = take_reply(received).map_err(taken)? {
            let mut state = self.state();
            state.alone_since = None;
            let all = state.waiting.remove(&number).unwrap_or_default();
            if let Err(why) = &outcome
                && !all.is_empty()
            {
                state.failure = Some((Instant::now(), why.clone()));
                self.counters.failed.inc_by(all.len() as u64);
            }
            drop(state);
            for one in all {
                (one.answer)(match &outcome {
                    Ok(()) => self.open(number),
                    Err(why) => Err(io::Error::other(why.clone())),
                });
            }
        }
        Ok(())
    }

    /// The connection of this number, or every one, has ended: nothing comes any more.
    fn lose(&self, number: Option<u64>, why: &str) {
        let mut state = self.state();
        if number.is_some_and(|number| number != state.number) {
            return;
        }
        state.questions = None;
        state.number += 1;
        state.alone_since = None;
        let waiting = mem::take(&mut state.waiting).into_values().flatten().collect();
        self.fail(state, waiting, why);
    }
}

/// Where something lies.
enum Place {
    Image,
    /// Below the directory of contents.
    Named(String),
}

/// Asks a fetcher what sandboxes wait for.
struct Asker {
    shared: Weak<Shared>,
    /// Of its connection.
    number: u64,
    connection: Option<UnixStream>,
    asked: Receiver<u32>,
}

impl Asker {
    /// Asks until nobody boots the function any more, or there is no fetcher.
    fn run(mut self) {
        while let Ok(number) = self.asked.recv() {
            let Some(shared) = self.shared.upgrade() else { return };
            if let Some(connection) = &self.connection
                && ask(connection, number).is_ok()
            {
                continue;
            }
            drop(shared);
            // There may be another fetcher by now, or soon.
            while let Some((shared, error)) = self.try_to_connect() {
                shared.lose_late();
                let is_left_alone = shared.is_left_alone(&mut shared.state());
                if is_left_alone {
                    return shared.lose(Some(self.number), &shared.nobody_fetches(&error));
                }
                drop(shared);
                std::thread::sleep(LOOK_FOR_FETCHER);
            }
        }
    }

    /// Why there is no connection, if there is none and somebody boots the function still.
    fn try_to_connect(&mut self) -> Option<(Arc<Shared>, io::Error)> {
        let shared = self.shared.upgrade()?;
        let error = self.connect(&shared).err()?;
        Some((shared, error))
    }

    /// Asks another fetcher for all that is waited for.
    fn connect(&mut self, shared: &Arc<Shared>) -> io::Result<()> {
        self.disconnect();
        let connection = shared.connect()?;
        let mut state = shared.state();
        if state.number != self.number {
            // All who waited were told so.
            return Ok(());
        }
        state.number += 1;
        self.number = state.number;
        // Whoever joins them from here on is asked for through the channel.
        while self.asked.try_recv().is_ok() {}
        let waiting: Vec<u32> = state.waiting.keys().copied().collect();
        drop(state);
        let (shared, from) = (self.shared.clone(), connection.try_clone()?);
        let reader = Reader { shared, from, number: self.number };
        std::thread::Builder::new().name("thaw-far-read".to_owned()).spawn(move || reader.run())?;
        // From here on it is ended with this, also if it takes no questions.
        let connection = self.connection.insert(connection);
        waiting.into_iter().try_for_each(|number| ask(&*connection, number))
    }

    /// Ends the connection, and with it whoever reads from it.
    fn disconnect(&mut self) {
        if let Some(old) = self.connection.take() {
            let _ = old.shutdown(Shutdown::Both);
        }
    }
}

impl Drop for Asker {
    fn drop(&mut self) {
        self.disconnect();
    }
}

/// Reads what a fetcher answers.
struct Reader {
    shared: Weak<Shared>,
    from: UnixStream,
    /// Of the connection.
    number: u64,
}

impl Reader {
    fn run(self) {
        let mut received = Vec::new();
        loop {
            let more = receive(&self.from, &mut received);
            // Nobody boots the function any more.
            let Some(shared) = self.shared.upgrade() else { return };
            match shared.take(more, &mut received) {
                Ok(()) => {}
                Err(End::ForGood(why)) => return shared.lose(Some(self.number), &why),
                Err(End::OfFetcher) => {
                    drop(shared);
                    std::thread::sleep(LOOK_FOR_FETCHER);
                    let Some(shared) = self.shared.upgrade() else { return };
                    return shared.ask_another(self.number);
                }
            }
        }
    }
}

/// Why nothing more comes over a connection.
enum End {
    /// The fetcher has ended; another one may follow.
    OfFetcher,
    /// There is no point in waiting any longer.
    ForGood(String),
}

fn is_timeout(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut | io::ErrorKind::Interrupted
    )
}

#[cfg(test)]
mod tests;
