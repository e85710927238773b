//! Fetches the pieces of one function: those that a daemon asks for first, all others meanwhile.
//!
//! All of it is one task: questions come over a Unix socket, pieces come from the registry, some at a
//! time, each once. A content or segment that was asked for is written to the function's directory, by a
//! thread of its own, when all of its pieces are here; then the question is answered. A piece that cannot be had fails the
//! questions that were asked before its fetch began. It is fetched once more for those that came later,
//! which wait for that for [`QUESTION_MAX`] at most.

use super::written::{Written, WrittenError};
use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;
use thaw_home::partial::{Question, RECORD_HASH, Reply, Rows, read_question, write_reply};
use thaw_oci::artifact::Section;
use thaw_oci::{PieceName, RemoteFunction};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::{Notify, mpsc};
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, sleep_until};

/// Pieces that nobody waits for and that are fetched at a time.
const BACKGROUND_MAX: usize = 3;
/// Pieces that somebody waits for and that are fetched at a time, beside those.
const WANTED_MAX: usize = 4;
/// Contents and segments that are written at a time.
const WRITES_MAX: usize = 4;
/// Most connections: those of daemons, of which there is one at a time, and of those before it.
const CLIENTS_MAX: usize = 16;
/// Most answers that a client leaves unread before it is let go.
const UNREAD_MAX: usize = 4096;
/// How long the background waits from the beginning of a fetch that has failed to the next one. One that
/// took longer needs no pause after it.
const PAUSE: Duration = Duration::from_secs(5);
/// How long a question waits for a piece of which a fetch has failed: as long as one that stalls takes.
/// Requests have longer, so that their clients hear why.
const QUESTION_MAX: Duration = Duration::from_secs(20);
/// How long fetches may fail, one after the other.
const FAILING_MAX: Duration = Duration::from_secs(60);
/// How long it is waited before a connection is accepted after one could not be: descriptors may be free
/// again by then.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// How far it is.
#[derive(Debug, Default)]
pub struct Fetched {
    /// Bytes of the pieces that are here.
    pub here: AtomicU64,
    /// Of those, bytes that were moved.
    pub moved: AtomicU64,
    /// Fetches of pieces that have failed.
    pub failed: AtomicU64,
    /// Something has changed, or all is here.
    pub news: Notify,
}

/// What is to be fetched.
pub struct Fetcher {
    pub remote: Arc<RemoteFunction>,
    pub rows: Arc<Rows>,
    /// The pieces of image and files, as `rows` numbers them.
    pub pieces: Arc<[PieceName]>,
    /// Keeps pieces, and writes what was asked for.
    pub written: Arc<Written>,
    pub listener: UnixListener,
    /// Hash of the record that its clients have read.
    pub record: [u8; RECORD_HASH],
    pub fetched: Arc<Fetched>,
}

/// A client that asks.
type ClientId = u64;

/// What a client does.
enum News {
    Asks(ClientId, Question),
    Left(ClientId),
}

/// The end of a fetch: the piece, and its bytes if it was moved.
type Done = (u32, Result<Option<Vec<u8>>, String>);

/// The end of a write of what was asked for.
type Wrote = (Question, Result<(), WrittenError>);

/// For whom a piece is fetched.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Purpose {
    Wanted,
    Background,
}

/// A fetch that is under way.
#[derive(Clone, Copy, Debug)]
struct Fetch {
    purpose: Purpose,
    begun: Instant,
}

/// Who waits for an answer, and since when.
struct Waiting {
    since: Instant,
    clients: BTreeSet<ClientId>,
    /// Which piece could not be had that is fetched once more, and why.
    failed: Option<(u32, String)>,
    /// Which piece was damaged or removed, and is fetched once more.
    lost: Option<u32>,
}

impl Waiting {
    /// When it is told that it waits in vain; none: not before a fetch has failed.
    fn due(&self) -> Option<Instant> {
        self.failed.as_ref().map(|_| self.since + QUESTION_MAX)
    }
}

/// All that changes.
struct State {
    here: Vec<bool>,
    in_flight: HashMap<u32, Fetch>,
    /// Pieces that somebody waits for, in the order in which they were asked for.
    wanted: VecDeque<u32>,
    /// The next piece that nobody waits for.
    background: u32,
    /// Not before then is one of those fetched.
    not_before: Option<Instant>,
    /// Since when fetches have failed, and why the last one has.
    failing: Option<(Instant, String)>,
    /// When a piece came last.
    last_came: Option<Instant>,
    /// What is being written.
    writing: BTreeSet<Question>,
    questions: BTreeMap<Question, Waiting>,
    clients: HashMap<ClientId, mpsc::Sender<Vec<u8>>>,
    next_client: ClientId,
}

impl Fetcher {
    /// Fetches until all is here, and goes on to answer until it is dropped. Says so once by the
    /// result of `whole`.
    ///
    /// # Errors
    /// One sentence through `whole`: no piece could be had for [`FAILING_MAX`].
    pub async fn run(self, whole: tokio::sync::oneshot::Sender<Result<(), String>>) {
        let mut whole = Some(whole);
        let (say, mut news) = mpsc::channel(64);
        let mut fetches: JoinSet<Done> = JoinSet::new();
        let mut writes: JoinSet<Wrote> = JoinSet::new();
        let mut state = State::new(self.pieces.len());
        loop {
            self.begin(&mut state, &mut fetches);
            self.write_complete(&mut state, &mut writes);
            if let Some(outcome) = state.outcome(Instant::now()) {
                // Whoever waited for it may have gone.
                whole.take().map(|whole| whole.send(outcome));
            }
            let (pause, due) = (state.not_before, state.due());
            tokio::select! {
                stream = accept(&self.listener) => self.welcome(&mut state, stream, say.clone()),
                Some(news) = news.recv() => match news {
                    News::Asks(client, number) => self.asked(&mut state, client, number),
                    News::Left(client) => state.leave(client),
                },
                Some(done) = fetches.join_next() => {
                    let (piece, result) = done.expect("no task panics or is aborted");
                    self.arrived(&mut state, piece, result);
                }
                Some(wrote) = writes.join_next() => {
                    let (number, outcome) = wrote.expect("no task panics or is aborted");
                    self.wrote(&mut state, number, outcome);
                }
                () = sleep_until(pause.unwrap_or_else(Instant::now)), if pause.is_some() => {
                    state.not_before = None;
                }
                () = sleep_until(due.unwrap_or_else(Instant::now)), if due.is_some() => {
                    state.answer_due(Instant::now());
                }
            }
        }
    }

    /// Begins to fetch as many pieces as may be fetched at a time.
    fn begin(&self, state: &mut State, fetches: &mut JoinSet<Done>) {
        while let Some(piece) = state.next(Instant::now()) {
            let name = self.pieces[piece as usize].clone();
            let (section, _) = self.rows.piece(piece);
            let (remote, written) = (self.remote.clone(), self.written.clone());
            fetches.spawn(async move {
                // Its digest is compared when it is read.
                let fetched = match written.has(&name) {
                    Ok(true) => Ok(None),
                    Ok(false) => {
                        let fetched = remote.fetch(section, &name).await.map(Some);
                        fetched.map_err(|error| error.to_string())
                    }
                    Err(error) => Err(error.to_string()),
                };
                (piece, fetched)
            });
        }
    }

    fn arrived(&self, state: &mut State, piece: u32, result: Result<Option<Vec<u8>>, String>) {
        let fetch = state.in_flight.remove(&piece).expect("it was under way");
        let name = &self.pieces[piece as usize];
        let kept = match result {
            Ok(None) => Ok(0),
            Ok(Some(bytes)) => {
                let kept = self.written.keep(name, &bytes).map(|()| name.size);
                kept.map_err(|error| error.to_string())
            }
            Err(why) => Err(why),
        };
        match kept {
            Ok(moved) => {
                state.succeeded(piece, Instant::now());
                self.fetched.here.fetch_add(name.size, Ordering::Relaxed);
                self.fetched.moved.fetch_add(moved, Ordering::Relaxed);
            }
            Err(why) => {
                self.fetched.failed.fetch_add(1, Ordering::Relaxed);
                state.failed(piece, fetch.begun, &why);
                self.answer_all_that_need(state, piece, (fetch.begun, &why));
            }
        }
        self.fetched.news.notify_one();
    }

    /// A client asks for a content or a segment.
    fn asked(&self, state: &mut State, client: ClientId, number: Question) {
        let Some(needed) = self.written.needs(&self.rows, number) else {
            let outcome = Err("there is no such part of the function".to_owned());
            return state.reply(client, &Reply { number, outcome });
        };
        let since = Instant::now();
        let waiting = || Waiting { since, clients: BTreeSet::new(), failed: None, lost: None };
        state.questions.entry(number).or_insert_with(waiting).clients.insert(client);
        needed.for_each(|piece| state.want(piece));
    }

    /// Begins to write what was asked for and of which all pieces are here, some at a time.
    fn write_complete(&self, state: &mut State, writes: &mut JoinSet<Wrote>) {
        let is_here = |needed: &Range<u32>| {
            state.here[needed.start as usize..needed.end as usize].iter().all(|here| *here)
        };
        let needs = |number: Question| self.written.needs(&self.rows, number);
        let asked = state.questions.keys().filter(|number| !state.writing.contains(number));
        let complete = asked.filter(|&&number| needs(number).is_some_and(|all| is_here(&all)));
        let free = WRITES_MAX - state.writing.len();
        for number in complete.copied().take(free).collect::<Vec<_>>() {
            state.writing.insert(number);
            let (written, rows) = (self.written.clone(), self.rows.clone());
            let pieces = self.pieces.clone();
            writes.spawn_blocking(move || (number, written.write(&rows, &pieces, number)));
        }
    }

    /// Answers a question for which something was written.
    fn wrote(&self, state: &mut State, number: Question, outcome: Result<(), WrittenError>) {
        state.writing.remove(&number);
        let is_lost_again = |piece: u32| {
            let waiting = state.questions.get(&number);
            waiting.is_some_and(|waiting| waiting.lost == Some(piece))
        };
        match outcome {
            // A piece was damaged or removed meanwhile: it is fetched again, but not again and again.
            Err(WrittenError::Piece(piece)) if !is_lost_again(piece) => {
                if state.lost(piece, number) {
                    let size = self.pieces[piece as usize].size;
                    self.fetched.here.fetch_sub(size, Ordering::Relaxed);
                }
            }
            outcome => state.answer(number, &outcome.map_err(|error| error.to_string())),
        }
    }

    /// Answers those who waited for a piece when its fetch began, which has failed. It is fetched once
    /// more for those who came later.
    fn answer_all_that_need(&self, state: &mut State, piece: u32, (begun, why): (Instant, &str)) {
        let all = state.questions.iter().map(|(number, waiting)| (*number, waiting.since));
        let needs = |number: Question| self.written.needs(&self.rows, number);
        let need_it =
            all.filter(|(number, _)| needs(*number).is_some_and(|all| all.contains(&piece)));
        for (number, since) in need_it.collect::<Vec<_>>() {
            match since <= begun {
                true => state.answer(number, &Err(why.to_owned())),
                false => state.want_again(piece, number, why),
            }
        }
    }

    fn welcome(&self, state: &mut State, stream: UnixStream, say: mpsc::Sender<News>) {
        if state.clients.len() >= CLIENTS_MAX {
            return;
        }
        let id = state.next_client;
        state.next_client += 1;
        let (replies, to_send) = mpsc::channel(UNREAD_MAX);
        state.clients.insert(id, replies);
        let record = self.record;
        tokio::spawn(async move {
            // Its end is all that matters.
            let _ = serve(stream, id, record, &say, to_send).await;
            let _ = say.send(News::Left(id)).await;
        });
    }
}

/// The next client that connects.
async fn accept(listener: &UnixListener) -> UnixStream {
    loop {
        match listener.accept().await {
            Ok((stream, _)) => return stream,
            Err(_) => sleep(ACCEPT_PAUSE).await,
        }
    }
}

/// Reads questions of a client and sends it what was answered, until one of both ends.
async fn serve(
    stream: UnixStream,
    id: ClientId,
    record: [u8; RECORD_HASH],
    say: &mpsc::Sender<News>,
    mut replies: mpsc::Receiver<Vec<u8>>,
) -> std::io::Result<()> {
    let (mut from, mut to) = stream.into_split();
    let ask = async {
        let mut hash = [0; RECORD_HASH];
        from.read_exact(&mut hash).await?;
        // It has read the record of another pull: its numbers mean something else.
        if hash != record {
            return Ok(());
        }
        let mut number = [0; 4];
        loop {
            from.read_exact(&mut number).await?;
            if say.send(News::Asks(id, read_question(&number))).await.is_err() {
                return Ok(());
            }
        }
    };
    let answer = async {
        while let Some(reply) = replies.recv().await {
            to.write_all(&reply).await?;
        }
        Ok(())
    };
    tokio::select! { result = ask => result, result = answer => result }
}

impl State {
    /// Nothing is here of so many pieces.
    fn new(pieces: usize) -> Self {
        Self {
            here: vec![false; pieces],
            in_flight: HashMap::new(),
            wanted: VecDeque::new(),
            background: 0,
            not_before: None,
            failing: None,
            last_came: None,
            writing: BTreeSet::new(),
            questions: BTreeMap::new(),
            clients: HashMap::new(),
            next_client: 0,
        }
    }

    /// Whether all is here, or nothing has come for too long; none: it goes on.
    fn outcome(&self, now: Instant) -> Option<Result<(), String>> {
        if let Some(why) = self.given_up(now) {
            return Some(Err(format!("no piece of it could be had for a minute: {why}")));
        }
        self.here.iter().all(|here| *here).then_some(Ok(()))
    }

    /// Why the last fetch has failed, if they have for too long.
    fn given_up(&self, now: Instant) -> Option<&str> {
        let (since, why) = self.failing.as_ref()?;
        (now.duration_since(*since) >= FAILING_MAX).then_some(why)
    }

    /// Takes the next piece to fetch, if one may be.
    fn next(&mut self, now: Instant) -> Option<u32> {
        let (piece, purpose) = match self.next_wanted() {
            Some(piece) => (piece, Purpose::Wanted),
            None => (self.next_of_background(now)?, Purpose::Background),
        };
        self.in_flight.insert(piece, Fetch { purpose, begun: now });
        Some(piece)
    }

    fn next_wanted(&mut self) -> Option<u32> {
        if self.count(Purpose::Wanted) >= WANTED_MAX {
            return None;
        }
        while let Some(piece) = self.wanted.pop_front() {
            if self.is_missing(piece) {
                return Some(piece);
            }
        }
        None
    }

    fn next_of_background(&mut self, now: Instant) -> Option<u32> {
        let is_full = self.count(Purpose::Background) >= BACKGROUND_MAX;
        let pauses = self.not_before.is_some_and(|not_before| not_before > now);
        if is_full || pauses || self.given_up(now).is_some() {
            return None;
        }
        while (self.background as usize) < self.here.len() {
            let piece = self.background;
            self.background += 1;
            if self.is_missing(piece) {
                return Some(piece);
            }
        }
        None
    }

    fn count(&self, purpose: Purpose) -> usize {
        self.in_flight.values().filter(|fetch| fetch.purpose == purpose).count()
    }

    /// Whether it is neither here nor on its way.
    fn is_missing(&self, piece: u32) -> bool {
        !self.here[piece as usize] && !self.in_flight.contains_key(&piece)
    }

    /// Has a piece fetched before those that nobody waits for, if it is missing.
    fn want(&mut self, piece: u32) {
        if self.is_missing(piece) && !self.wanted.contains(&piece) {
            self.wanted.push_back(piece);
        }
    }

    /// Has a piece fetched once more for a question that was asked while its fetch was under way.
    fn want_again(&mut self, piece: u32, number: Question, why: &str) {
        if let Some(waiting) = self.questions.get_mut(&number) {
            waiting.failed = Some((piece, why.to_owned()));
        }
        self.want(piece);
    }

    /// When the next question is to be told that it waits in vain.
    fn due(&self) -> Option<Instant> {
        self.questions.values().filter_map(Waiting::due).min()
    }

    fn answer_due(&mut self, now: Instant) {
        let is_due = |waiting: &Waiting| waiting.due().is_some_and(|due| due <= now);
        let all = self.questions.iter();
        let due = all.filter(|(_, waiting)| is_due(waiting)).map(|(number, _)| *number);
        for number in due.collect::<Vec<_>>() {
            let failed = self.questions.get(&number).and_then(|waiting| waiting.failed.clone());
            self.answer(number, &Err(failed.map(|(_, why)| why).unwrap_or_default()));
        }
    }

    /// A piece is here: whatever was in the way is not there any more.
    fn succeeded(&mut self, piece: u32, now: Instant) {
        self.here[piece as usize] = true;
        (self.failing, self.not_before, self.last_came) = (None, None, Some(now));
        for waiting in self.questions.values_mut() {
            waiting.failed.take_if(|(failed, _)| *failed == piece);
        }
    }

    /// The fetch of a piece has failed that began then. Others may have come meanwhile.
    fn failed(&mut self, piece: u32, begun: Instant, why: &str) {
        let since = self.last_came.map_or(begun, |came| came.max(begun));
        let since = self.failing.as_ref().map_or(since, |(since, _)| *since);
        self.failing = Some((since, why.to_owned()));
        let not_before = begun + PAUSE;
        self.not_before = Some(self.not_before.map_or(not_before, |at| at.max(not_before)));
        self.background = self.background.min(piece);
    }

    /// A piece that was here is not, as was found for this question; whether nobody has found that before.
    fn lost(&mut self, piece: u32, number: Question) -> bool {
        let was_here = std::mem::replace(&mut self.here[piece as usize], false);
        self.background = self.background.min(piece);
        self.want(piece);
        if let Some(waiting) = self.questions.get_mut(&number) {
            waiting.lost = Some(piece);
        }
        was_here
    }

    fn leave(&mut self, client: ClientId) {
        self.clients.remove(&client);
        self.questions.retain(|_, waiting| {
            waiting.clients.remove(&client);
            !waiting.clients.is_empty()
        });
    }

    fn answer(&mut self, number: Question, outcome: &Result<(), String>) {
        let clients = self.questions.remove(&number).map(|waiting| waiting.clients);
        let reply = Reply { number, outcome: outcome.clone() };
        self.reply_to(clients.unwrap_or_default(), &reply);
    }

    fn reply_to(&mut self, clients: BTreeSet<ClientId>, reply: &Reply) {
        clients.into_iter().for_each(|client| self.reply(client, reply));
    }

    /// A client that leaves its answers unread is let go.
    fn reply(&mut self, client: ClientId, reply: &Reply) {
        let mut bytes = Vec::new();
        write_reply(reply, &mut bytes);
        let sent = self.clients.get(&client).map(|to| to.try_send(bytes));
        if sent.is_some_and(|sent| sent.is_err()) {
            self.leave(client);
        }
    }
}

/// The sections whose pieces are fetched one by one, in the order of their numbers.
pub const SECTIONS: [Section; 2] = [Section::Image, Section::Files];

#[cfg(test)]
mod tests {
    use super::super::written::tests::function;
    use super::*;
    use rustix::fs::{CWD, FileType, Mode, mknodat};
    use std::io::{Read, Write};
    use std::path::Path;
    use thaw_home::partial::parts;
    use thaw_oci::artifact::FunctionDocument;
    use thaw_oci::{Limits, Pull, Registries};

    fn fetched(state: &mut State, now: Instant) -> Vec<u32> {
        std::iter::from_fn(|| state.next(now)).collect()
    }

    /// A fetch ends.
    fn end(state: &mut State, piece: u32) -> Instant {
        state.in_flight.remove(&piece).unwrap().begun
    }

    fn fail(state: &mut State, piece: u32) {
        let begun = end(state, piece);
        state.failed(piece, begun, "no room");
    }

    #[test]
    fn connections_that_are_held_keep_nobody_from_what_he_waits_for() {
        let (mut state, now) = (State::new(20), Instant::now());
        assert_eq!(fetched(&mut state, now), [0, 1, 2]);
        (10..16).for_each(|piece| state.want(piece));
        // Those that are on their way are not asked for twice.
        state.want(1);
        assert_eq!(fetched(&mut state, now), [10, 11, 12, 13]);
        end(&mut state, 11);
        state.succeeded(11, now);
        assert_eq!(fetched(&mut state, now), [14]);
    }

    #[test]
    fn who_came_later_waits_for_one_more_fetch_and_not_for_long() {
        let (mut state, since) = (State::new(3), Instant::now());
        let (to, mut told) = mpsc::channel(2);
        state.clients.insert(1, to);
        for number in [7, 8] {
            let waiting = Waiting { since, clients: BTreeSet::from([1]), failed: None, lost: None };
            state.questions.insert(number, waiting);
        }
        state.want_again(0, 7, "held");
        state.want_again(1, 8, "held");
        assert_eq!((&state.wanted, state.due()), (&[0, 1].into(), Some(since + QUESTION_MAX)));
        state.succeeded(1, since);
        state.answer_due(since + QUESTION_MAX / 2);
        assert!(told.try_recv().is_err());
        state.answer_due(since + QUESTION_MAX);
        let outcome = Err("held".to_owned());
        let mut reply = Vec::new();
        write_reply(&Reply { number: 7, outcome }, &mut reply);
        assert_eq!(told.try_recv().unwrap(), reply);
        assert!(told.try_recv().is_err() && state.questions.contains_key(&8));
    }

    #[test]
    fn a_fetch_that_took_long_is_followed_by_no_pause() {
        let (mut state, now) = (State::new(9), Instant::now());
        assert_eq!(fetched(&mut state, now), [0, 1, 2]);
        fail(&mut state, 1);
        assert_eq!(state.not_before, Some(now + PAUSE));
        // Somebody who waits does not wait for that, and what comes for him ends it.
        state.want(7);
        assert_eq!(fetched(&mut state, now), [7]);
        end(&mut state, 7);
        state.succeeded(7, now);
        assert_eq!(fetched(&mut state, now), [1]);
    }

    #[test]
    fn it_is_given_up_when_nothing_has_come_for_a_minute_however_often_it_was_tried() {
        let (mut state, begun) = (State::new(1), Instant::now());
        for _ in 0..1000 {
            state.not_before = None;
            assert_eq!(fetched(&mut state, begun), [0]);
            fail(&mut state, 0);
        }
        assert!(state.outcome(begun + FAILING_MAX / 2).is_none());
        let why = state.outcome(begun + FAILING_MAX).unwrap().unwrap_err();
        assert!(why.ends_with("no room"), "{why}");
        state.want(0);
        assert_eq!(fetched(&mut state, begun), [0]);
        end(&mut state, 0);
        state.succeeded(0, begun);
        assert_eq!(state.outcome(begun + FAILING_MAX), Some(Ok(())));
    }

    #[test]
    fn a_fetch_that_fails_late_ends_nothing_if_others_came_meanwhile() {
        let (mut state, begun) = (State::new(3), Instant::now());
        assert_eq!(fetched(&mut state, begun), [0, 1, 2]);
        end(&mut state, 1);
        let came = begun + FAILING_MAX;
        state.succeeded(1, came);
        fail(&mut state, 0);
        assert!(state.outcome(came).is_none());
        // The others are fetched at once: it began long ago.
        assert_eq!(fetched(&mut state, came), [0]);
        fail(&mut state, 2);
        assert!(state.outcome(came + FAILING_MAX).unwrap().is_err());
    }

    #[test]
    fn a_pause_that_is_over_is_none() {
        let (mut state, begun) = (State::new(1), Instant::now());
        assert_eq!(fetched(&mut state, begun), [0]);
        fail(&mut state, 0);
        assert!(fetched(&mut state, begun + PAUSE / 2).is_empty());
        assert_eq!(fetched(&mut state, begun + PAUSE), [0]);
    }

    /// One that is asked for nothing.
    fn remote(directory: &Path, document: FunctionDocument) -> RemoteFunction {
        let reference = "registry.example/shop:1".parse().unwrap();
        let registries = Registries::default();
        let (owner, limits) = (thaw_store::Owner::Caller, Limits::default());
        let pull =
            Pull { reference: &reference, registries: &registries, directory, owner, limits };
        let kind = thaw_oci::artifact::FUNCTION_DOCUMENT;
        let digest = thaw_oci::digest(b"");
        let manifest = serde_json::json!({
            "schemaVersion": 2,
            "config": { "mediaType": kind, "digest": digest, "size": 0 },
            "layers": [],
        });
        let manifest = manifest.to_string().into_bytes();
        let known = (document, thaw_oci::digest(&manifest), false);
        pull.known_function("registry.example", manifest, known).unwrap()
    }

    /// A named pipe that nobody reads stands for a disk on which a large content takes long.
    #[test]
    fn what_takes_long_to_write_holds_up_no_other_question() {
        let function = function(false);
        let place = function.directory.path().join("function");
        let slow = place.join(parts::CONTENTS).join("0.new");
        mknodat(CWD, &slow, FileType::Fifo, Mode::RWXU, 0).unwrap();
        let socket = place.join(parts::SOCKET);
        let listener = std::os::unix::net::UnixListener::bind(&socket).unwrap();
        listener.set_nonblocking(true).unwrap();
        let runtime =
            tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build();
        let runtime = runtime.unwrap();
        let guard = runtime.enter();
        let fetcher = Fetcher {
            remote: Arc::new(remote(&place, function.document)),
            rows: function.rows.into(),
            pieces: function.names.into(),
            written: function.written.into(),
            listener: UnixListener::from_std(listener).unwrap(),
            record: [7; RECORD_HASH],
            fetched: Arc::default(),
        };
        let (say, _whole) = tokio::sync::oneshot::channel();
        runtime.spawn(fetcher.run(say));
        drop(guard);
        let mut client = std::os::unix::net::UnixStream::connect(&socket).unwrap();
        client.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        client.write_all(&[7; RECORD_HASH]).unwrap();
        for number in [0_u32, 2] {
            client.write_all(&number.to_le_bytes()).unwrap();
        }
        let mut reply = [0; 7];
        let heard = client.read_exact(&mut reply);
        // The write is never done.
        runtime.shutdown_background();
        heard.unwrap();
        assert_eq!(reply, [2, 0, 0, 0, 0, 0, 0]);
    }
}
