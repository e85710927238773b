//! Fetches the pieces of one function: those that a daemon asks for first, all others meanwhile.
//!
//! All of it is one task: questions come over a Unix socket, pieces come from the registry, up to
//! [`AT_ONCE`] at a time, each once. A content or segment that was asked for is written to the
//! function's directory when all of its pieces are here; then the question is answered.

use super::written::{Written, WrittenError};
use crate::partial::{Question, RECORD_HASH, Reply, Rows, read_question, write_reply};
use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet, VecDeque};
use std::ops::Range;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;
use thaw_oci::artifact::Section;
use thaw_oci::{OciError, PieceName, RemoteFunction, has_piece};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::{Notify, mpsc};
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep_until};

/// Pieces that are fetched at a time, of which one place is kept for those that somebody waits for.
const AT_ONCE: usize = 4;
/// Most connections: those of daemons, of which there is one at a time, and of those before it.
const CLIENTS_MAX: usize = 16;
/// Most answers that a client leaves unread before it is let go.
const UNREAD_MAX: usize = 4096;
/// How long the background pauses when a piece has failed, and how often in a row.
const PAUSE: Duration = Duration::from_secs(5);
const FAILURES_MAX: u32 = 12;

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
    pub rows: Rows,
    /// The pieces of image and files, as `rows` numbers them.
    pub pieces: Vec<PieceName>,
    /// Writes what was asked for.
    pub written: Written,
    /// Where pieces are kept.
    pub directory: PathBuf,
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
type Done = (u32, Result<Option<Vec<u8>>, OciError>);

/// All that changes.
struct State {
    here: Vec<bool>,
    in_flight: HashSet<u32>,
    /// Pieces that somebody waits for, in the order in which they were asked for.
    wanted: VecDeque<u32>,
    /// The next piece that nobody waits for.
    background: u32,
    /// Not before then is one of those fetched.
    not_before: Option<Instant>,
    failures: u32,
    questions: BTreeMap<Question, BTreeSet<ClientId>>,
    clients: HashMap<ClientId, mpsc::Sender<Vec<u8>>>,
    next_client: ClientId,
}

impl Fetcher {
    /// Fetches until all is here, and goes on to answer until it is dropped. Says so once by the
    /// result of `whole`.
    ///
    /// # Errors
    /// One sentence through `whole`: too many pieces could not be had in a row.
    pub async fn run(self, whole: tokio::sync::oneshot::Sender<Result<(), String>>) {
        let mut whole = Some(whole);
        let (say, mut news) = mpsc::channel(64);
        let mut fetches: JoinSet<Done> = JoinSet::new();
        let mut state = State {
            here: vec![false; self.pieces.len()],
            in_flight: HashSet::new(),
            wanted: VecDeque::new(),
            background: 0,
            not_before: None,
            failures: 0,
            questions: BTreeMap::new(),
            clients: HashMap::new(),
            next_client: 0,
        };
        loop {
            self.begin(&mut state, &mut fetches);
            if state.failures >= FAILURES_MAX || state.here.iter().all(|here| *here) {
                let outcome = if state.failures >= FAILURES_MAX {
                    Err("the registry has not sent a piece of it for a minute".to_owned())
                } else {
                    Ok(())
                };
                // Whoever waited for it may have gone.
                whole.take().map(|whole| whole.send(outcome));
            }
            let pause = state.not_before;
            tokio::select! {
                accepted = self.listener.accept() => {
                    if let Ok((stream, _)) = accepted {
                        self.welcome(&mut state, stream, say.clone());
                    }
                }
                Some(news) = news.recv() => match news {
                    News::Asks(client, number) => self.asked(&mut state, client, number),
                    News::Left(client) => state.leave(client),
                },
                Some(done) = fetches.join_next() => {
                    let (piece, result) = done.expect("no task panics or is aborted");
                    self.arrived(&mut state, piece, result);
                }
                () = sleep_until(pause.unwrap_or_else(Instant::now)), if pause.is_some() => {
                    state.not_before = None;
                }
            }
        }
    }

    /// Begins to fetch as many pieces as may be fetched at a time.
    fn begin(&self, state: &mut State, fetches: &mut JoinSet<Done>) {
        while let Some(piece) = state.next() {
            state.in_flight.insert(piece);
            let name = self.pieces[piece as usize].clone();
            let (section, _) = self.rows.piece(piece);
            let (remote, directory) = (self.remote.clone(), self.directory.clone());
            fetches.spawn(async move {
                // Its digest is compared when it is read.
                if has_piece(&directory, &name) {
                    return (piece, Ok(None));
                }
                (piece, remote.fetch(section, &name).await.map(Some))
            });
        }
    }

    fn arrived(&self, state: &mut State, piece: u32, result: Result<Option<Vec<u8>>, OciError>) {
        state.in_flight.remove(&piece);
        let name = &self.pieces[piece as usize];
        let kept = match result {
            Ok(None) => Ok(0),
            Ok(Some(bytes)) => self.written.keep(name, &bytes).map(|()| name.size),
            Err(error) => Err(WrittenError::Other(error.to_string())),
        };
        match kept {
            Ok(moved) => {
                state.here[piece as usize] = true;
                state.failures = 0;
                self.fetched.here.fetch_add(name.size, Ordering::Relaxed);
                self.fetched.moved.fetch_add(moved, Ordering::Relaxed);
                self.answer_complete(state);
            }
            Err(error) => {
                state.failures += 1;
                self.fetched.failed.fetch_add(1, Ordering::Relaxed);
                state.not_before = Some(Instant::now() + PAUSE);
                state.background = state.background.min(piece);
                self.answer_all_that_need(state, piece, &error.to_string());
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
        state.questions.entry(number).or_default().insert(client);
        for piece in needed {
            let is_coming = state.here[piece as usize] || state.in_flight.contains(&piece);
            if !is_coming && !state.wanted.contains(&piece) {
                state.wanted.push_back(piece);
            }
        }
        self.answer_complete(state);
    }

    /// Answers the questions whose pieces are all here.
    fn answer_complete(&self, state: &mut State) {
        let is_here = |needed: &Range<u32>| {
            state.here[needed.start as usize..needed.end as usize].iter().all(|here| *here)
        };
        let needs = |number: Question| self.written.needs(&self.rows, number);
        let complete: Vec<_> = state.questions.keys().copied().collect();
        let complete =
            complete.into_iter().filter(|&number| needs(number).is_some_and(|all| is_here(&all)));
        for number in complete.collect::<Vec<_>>() {
            let written = self.written.write(&self.rows, &self.pieces, number);
            let outcome = match written {
                // A piece was damaged or removed meanwhile: it is fetched again.
                Err(WrittenError::Piece(piece)) => {
                    state.here[piece as usize] = false;
                    state.background = state.background.min(piece);
                    state.wanted.push_back(piece);
                    continue;
                }
                written => written.map_err(|error| error.to_string()),
            };
            state.answer(number, &outcome);
        }
    }

    fn answer_all_that_need(&self, state: &mut State, piece: u32, why: &str) {
        let numbers: Vec<_> = state.questions.keys().copied().collect();
        for number in numbers {
            let needed = self.written.needs(&self.rows, number);
            if needed.is_some_and(|needed| needed.contains(&piece)) {
                state.answer(number, &Err(why.to_owned()));
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
    /// The next piece to fetch, if one may be.
    fn next(&mut self) -> Option<u32> {
        while self.in_flight.len() < AT_ONCE
            && let Some(piece) = self.wanted.pop_front()
        {
            if !self.here[piece as usize] && !self.in_flight.contains(&piece) {
                return Some(piece);
            }
        }
        if self.in_flight.len() + 1 >= AT_ONCE || self.not_before.is_some() {
            return None;
        }
        if self.failures >= FAILURES_MAX {
            return None;
        }
        while (self.background as usize) < self.here.len() {
            let piece = self.background;
            self.background += 1;
            if !self.here[piece as usize] && !self.in_flight.contains(&piece) {
                return Some(piece);
            }
        }
        None
    }

    fn leave(&mut self, client: ClientId) {
        self.clients.remove(&client);
        self.questions.retain(|_, who| {
            who.remove(&client);
            !who.is_empty()
        });
    }

    fn answer(&mut self, number: Question, outcome: &Result<(), String>) {
        let who = self.questions.remove(&number).unwrap_or_default();
        let reply = Reply { number, outcome: outcome.clone() };
        who.into_iter().for_each(|client| self.reply(client, &reply));
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
