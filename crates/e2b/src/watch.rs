//! The part of envd's service `filesystem.Filesystem` that tells what happens in directories: as a
//! stream, or kept for a client that asks now and then.

use super::backend::{Depth, Files, Happened};
use super::connect::{answer_stream, answer_unary, last_envelope, read_unary, refuse_stream};
use super::filesystem::absolute;
use super::messages::{FileRequest, file_event};
use super::problem::{Kind, Problem};
use super::process::{Events, every, one_message, send, user};
use super::serve::Target;
use super::{E2b, StreamPlace};
use axum::body::Body;
use axum::extract::State;
use axum::http::HeaderMap;
use axum::response::Response;
use axum::routing::post;
use axum::{Extension, Router};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;
use tokio::sync::mpsc;
use tokio::task::AbortHandle;
use tokio::time::sleep;
use tokio_stream::wrappers::ReceiverStream;

/// Most watchers of a sandbox whose events are kept: each is one of its sessions over files.
const WATCHERS_MAX: usize = 16;
/// Most bytes of events that are kept of one, as they are sent.
const KEPT_MAX: usize = 256 << 10;

type Asked = (State<Arc<E2b>>, Extension<Target>, HeaderMap, Body);
type Outcome<T> = Result<T, Problem>;

/// Its paths.
pub(super) fn routes() -> Router<Arc<E2b>> {
    Router::new()
        .route("/filesystem.Filesystem/WatchDir", post(watch_dir))
        .route("/filesystem.Filesystem/CreateWatcher", post(create))
        .route("/filesystem.Filesystem/GetWatcherEvents", post(events))
        .route("/filesystem.Filesystem/RemoveWatcher", post(remove))
}

/// Those whose events are kept, by number.
#[derive(Default)]
pub(super) struct Watchers {
    all: Mutex<BTreeMap<u64, Watcher>>,
    last: AtomicU64,
}

struct Watcher {
    sandbox: String,
    kept: Arc<Mutex<Kept>>,
    task: AbortHandle,
    _place: StreamPlace,
}

impl Drop for Watcher {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// Events that nobody has asked for yet.
#[derive(Default)]
struct Kept {
    events: Vec<Value>,
    bytes: usize,
    /// No more come.
    ended: Option<Problem>,
}

impl Watchers {
    fn lock(&self) -> MutexGuard<'_, BTreeMap<u64, Watcher>> {
        self.all.lock().expect("no holder panics")
    }

    /// Keeps the events of a session that watches a directory; the watcher's number.
    fn insert(
        &self,
        sandbox: &str,
        (files, path): (Box<dyn Files>, String),
        place: StreamPlace,
    ) -> Outcome<u64> {
        let mut all = self.lock();
        // One whose directory or sandbox has gone is told of once, to whoever still asks.
        all.retain(|_, one| one.sandbox != sandbox || one.kept().ended.is_none());
        if all.values().filter(|one| one.sandbox == sandbox).count() >= WATCHERS_MAX {
            return Err(Problem::new(
                Kind::Exhausted,
                format!("{WATCHERS_MAX} watchers watch the sandbox already; stop some"),
            ));
        }
        let kept = Arc::new(Mutex::new(Kept::default()));
        let task = tokio::spawn(keep(files, path, kept.clone())).abort_handle();
        let number = self.last.fetch_add(1, Ordering::Relaxed) + 1;
        all.insert(number, Watcher { sandbox: sandbox.to_owned(), kept, task, _place: place });
        Ok(number)
    }

    /// Whether no more events come of one.
    #[cfg(test)]
    pub fn has_ended(&self, number: u64) -> bool {
        self.lock()[&number].kept().ended.is_some()
    }

    /// Forgets those of a sandbox that is gone.
    pub fn forget(&self, sandbox: &str) {
        self.lock().retain(|_, one| one.sandbox != sandbox);
    }
}

impl Watcher {
    fn kept(&self) -> MutexGuard<'_, Kept> {
        self.kept.lock().expect("no holder panics")
    }
}

async fn keep(mut files: Box<dyn Files>, path: String, kept: Arc<Mutex<Kept>>) {
    loop {
        let happened = files.next_event(&path).await;
        if kept.lock().expect("no holder panics").add(happened).is_none() {
            return;
        }
        // One that always has events lets others run.
        tokio::task::yield_now().await;
    }
}

impl Kept {
    /// Keeps an event; none: no more come.
    fn add(&mut self, happened: Outcome<(Happened, String)>) -> Option<()> {
        let added = happened.and_then(|(what, name)| {
            let event = file_event(what, &name);
            self.bytes += event.to_string().len();
            if self.bytes > KEPT_MAX {
                return Err(Problem::new(
                    Kind::DataLoss,
                    "more has happened than is kept; watch again, and ask for events more often",
                ));
            }
            self.events.push(event);
            Ok(())
        });
        self.ended = added.err();
        self.ended.is_none().then_some(())
    }
}

/// A session that watches a directory, and the path of that.
async fn begin(
    e2b: &E2b,
    target: &Target,
    headers: &HeaderMap,
    request: &FileRequest,
) -> Outcome<(Box<dyn Files>, String)> {
    if request.include_entry {
        return Err(Problem::unsupported(
            "`includeEntry`: an event has no more than a name; leave it out",
        ));
    }
    let path = absolute(&target.directory, &request.path)?;
    let user = target.user(user(headers)?);
    let mut files = e2b.backend.files(&target.id, user.as_deref()).await?;
    let depth = if request.recursive { Depth::All } else { Depth::One };
    files.watch(&path, depth).await?;
    Ok((files, path))
}

async fn watch_dir(
    State(e2b): State<Arc<E2b>>,
    Extension(target): Extension<Target>,
    headers: HeaderMap,
    body: Body,
) -> Response {
    let begun = async {
        let request: FileRequest = one_message(&headers, body).await?;
        let place = e2b.streams.enter(&target.record.owner)?;
        Ok((place, begin(&e2b, &target, &headers, &request).await?))
    };
    let (place, (files, path)) = match begun.await {
        Ok(begun) => begun,
        Err(problem) => return refuse_stream(problem),
    };
    let (sender, receiver) = mpsc::channel(4);
    let every = every(&headers);
    tokio::spawn(async move {
        // Whoever has gone away needs no more.
        tokio::select! {
            () = sender.closed() => {}
            _ = tell(files, &path, every, &sender) => {}
        }
        drop(place);
    });
    answer_stream(Body::from_stream(ReceiverStream::new(receiver)))
}

async fn tell(mut files: Box<dyn Files>, path: &str, every: Duration, to: &Events) -> Option<()> {
    send(to, json!({"start": {}})).await?;
    loop {
        let happened = {
            // An event that has begun to come is not dropped for a sign of life.
            let mut next = files.next_event(path);
            loop {
                tokio::select! {
                    happened = &mut next => break happened,
                    () = sleep(every) => send(to, json!({"keepalive": {}})).await?,
                }
            }
        };
        match happened {
            Ok((what, name)) => send(to, json!({"filesystem": file_event(what, &name)})).await?,
            Err(problem) => return to.send(Ok(last_envelope(Err(problem)))).await.ok(),
        }
    }
}

async fn create((State(e2b), Extension(target), headers, body): Asked) -> Response {
    let created = async {
        let request = read_unary(&headers, body).await?;
        let place = e2b.streams.enter(&target.record.owner)?;
        let session = begin(&e2b, &target, &headers, &request).await?;
        let number = e2b.watchers.insert(&target.id, session, place)?;
        Ok(json!({"watcherId": number.to_string()}))
    };
    answer_unary(created.await)
}

fn unknown(id: &str) -> Problem {
    Problem::new(Kind::NotFound, format!("no watcher {id:?} watches the sandbox; watch again"))
}

async fn events((State(e2b), Extension(target), headers, body): Asked) -> Response {
    let taken = async {
        let request: FileRequest = read_unary(&headers, body).await?;
        let number = request.watcher_id.parse().map_err(|_| unknown(&request.watcher_id))?;
        let mut all = e2b.watchers.lock();
        let found = all.get(&number).filter(|one| one.sandbox == target.id);
        let watcher = found.ok_or_else(|| unknown(&request.watcher_id))?;
        let (events, ended) = {
            let mut kept = watcher.kept();
            kept.bytes = 0;
            let ended = if kept.events.is_empty() { kept.ended.take() } else { None };
            (std::mem::take(&mut kept.events), ended)
        };
        match ended {
            Some(problem) => {
                all.remove(&number);
                Err(problem)
            }
            None => Ok(json!({"events": events})),
        }
    };
    answer_unary(taken.await)
}

async fn remove((State(e2b), Extension(target), headers, body): Asked) -> Response {
    let removed = async {
        let request: FileRequest = read_unary(&headers, body).await?;
        let number: u64 = request.watcher_id.parse().map_err(|_| unknown(&request.watcher_id))?;
        let mut all = e2b.watchers.lock();
        if all.get(&number).is_none_or(|one| one.sandbox != target.id) {
            return Err(unknown(&request.watcher_id));
        }
        all.remove(&number);
        Ok(json!({}))
    };
    answer_unary(removed.await)
}
