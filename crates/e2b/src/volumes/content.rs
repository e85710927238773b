//! The content API of volumes, `/volumecontent/ID/…`: whoever shows the token of a volume uses its files.
//!
//! Each request has a thread of its own, which takes the rights of the volume's owner and waits for others
//! that use the volume. How many there are has a bound, and how long each waits for its client.

use super::tree::{self, Place};
use super::{no_volume, on_node, problem};
use crate::input::Query;
use crate::problem::{Kind, Problem};
use crate::records::are_equal;
use crate::serve::{closing, header};
use crate::{E2b, StreamPlace};
use axum::body::{Body, Bytes};
use axum::extract::{Path, Request, State};
use axum::http::header::{AUTHORIZATION, CONTENT_LENGTH, CONTENT_TYPE};
use axum::http::{HeaderMap, StatusCode};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use axum::{Json, Router};
use http_body_util::{BodyExt, Limited};
use serde::Deserialize;
use serde_json::Value;
use std::io;
use std::sync::Arc;
use std::thread;
use std::time::Duration;
use thaw_sandbox::{ClientFile, VolumeClient};
use tokio::runtime::Handle;
use tokio::sync::{OwnedSemaphorePermit, mpsc, oneshot};
use tokio::time::{Instant, timeout, timeout_at};
use tokio_stream::wrappers::ReceiverStream;

/// Most requests for contents at a time: of an owner.
const OF_OWNER_MAX: usize = 16;
/// The same of the node.
pub(crate) const OF_NODE_MAX: usize = 64;
/// How long a request waits until others have ended.
const TURN_PATIENCE: Duration = Duration::from_secs(10);
/// How long may be waited for a client in all until it has sent or taken so many bytes: slower ones
/// would keep a place from others for very little.
const PATIENCE: Duration = Duration::from_secs(60);
const LEAST: usize = 128 << 10;
/// How long a transfer may take, as long as the SDKs wait.
const TRANSFER_MAX: Duration = Duration::from_secs(3600);
/// Bytes that are read at once.
const PIECE: usize = 64 << 10;
/// Pieces on their way between a thread and a client.
const PIECES: usize = 2;
/// Most bytes of a request about metadata.
const METADATA_MAX: usize = 16 << 10;
/// The stack of a thread.
const STACK: usize = 512 << 10;

/// Their paths. No key is asked for.
pub(crate) fn routes() -> Router<Arc<E2b>> {
    Router::new()
        .route("/volumecontent/{id}/path", get(stat).patch(change).delete(remove))
        .route("/volumecontent/{id}/dir", get(list).post(make_directory))
        .route("/volumecontent/{id}/file", get(read).put(write))
}

/// Which file is meant, and how.
#[derive(Deserialize)]
struct Where {
    path: String,
    depth: Option<u32>,
    uid: Option<u32>,
    gid: Option<u32>,
    mode: Option<u32>,
    #[serde(default)]
    force: bool,
}

/// What is to change of a file.
#[derive(Deserialize)]
struct Changes {
    uid: Option<u32>,
    gid: Option<u32>,
    mode: Option<u32>,
}

/// Permissions of a file that somebody wants.
///
/// # Errors
/// They are none, or an owner is wanted as well.
fn permissions(
    uid: Option<u32>,
    gid: Option<u32>,
    mode: Option<u32>,
) -> Result<Option<u32>, Problem> {
    if uid.is_some_and(|uid| uid != 0) || gid.is_some_and(|gid| gid != 0) {
        return Err(Problem::unsupported(
            "`uid` and `gid`: all files of a volume are the sandbox' own user's; leave them out",
        ));
    }
    match mode {
        Some(mode) if mode > 0o777 => {
            Err(Problem::invalid("`mode` is a number of permissions, up to 0o777"))
        }
        mode => Ok(mode),
    }
}

type Asked = (State<Arc<E2b>>, Path<String>, Query<Where>, HeaderMap);

/// Somebody who may use a volume, with a place among those who do.
struct Guest {
    e2b: Arc<E2b>,
    id: String,
    _places: (StreamPlace, OwnedSemaphorePermit),
}

impl Guest {
    /// # Errors
    /// The token is missing or wrong, or too many use volumes.
    async fn admit(e2b: Arc<E2b>, id: String, headers: &HeaderMap) -> Result<Self, Problem> {
        let shown = header(headers, AUTHORIZATION.as_str());
        let shown = shown.and_then(|shown| shown.strip_prefix("Bearer ")).unwrap_or_default();
        let is_right = are_equal(shown, &e2b.records.volume_token(&id));
        // Keys may be taken away.
        let record = e2b.records.volume(&id);
        let record = record.filter(|record| {
            is_right && !record.is_being_made && e2b.settings.now().has_owner(&record.owner)
        });
        let record = record.ok_or_else(|| {
            Problem::new(
                Kind::Unauthenticated,
                "the token of the volume is missing or wrong, or the volume is gone; \
                 `Volume.connect` gets the token",
            )
        })?;
        let of_owner = e2b.contents.enter_half(&record.owner, OF_OWNER_MAX, OF_NODE_MAX)?;
        let turn = timeout(TURN_PATIENCE, e2b.content_turns.clone().acquire_owned()).await;
        let turn = turn.ok().and_then(Result::ok).ok_or_else(|| {
            Problem::new(Kind::Busy, "the node is busy with files of other volumes; try again")
        })?;
        Ok(Self { e2b, id, _places: (of_owner, turn) })
    }

    /// Does something with the volume, on a thread; what comes of it, when that is done.
    fn begin<T: Send + 'static>(
        self,
        work: impl FnOnce(&VolumeClient) -> Result<T, Problem> + Send + 'static,
    ) -> Result<oneshot::Receiver<Result<T, Problem>>, Problem> {
        let (reply, outcome) = oneshot::channel();
        let (store, name) = (self.e2b.backend.volumes()?, on_node(&self.id)?);
        let begun =
            thread::Builder::new().name("volume".into()).stack_size(STACK).spawn(move || {
                let done = match self.e2b.open_volumes.get(&store, &name) {
                    Ok(mount) => work(&VolumeClient::new(&mount)),
                    Err(error) => Err(match problem(error) {
                        missing if missing.kind == Kind::NotFound => no_volume(&self.id),
                        other => other,
                    }),
                };
                // Whoever hears of it finds a place.
                drop(self);
                let _ = reply.send(done);
            });
        begun.map_err(|error| Problem::new(Kind::Busy, error))?;
        Ok(outcome)
    }

    /// The same, until it is done.
    async fn run<T: Send + 'static>(
        self,
        work: impl FnOnce(&VolumeClient) -> Result<T, Problem> + Send + 'static,
    ) -> Result<T, Problem> {
        done(self.begin(work)?).await
    }

    /// Answers with what is opened on a thread, which keeps its place until the client has taken all,
    /// or is too slow.
    async fn send<S: Source>(
        self,
        kind: &'static str,
        open: impl FnOnce(&VolumeClient) -> Result<S, Problem> + Send + 'static,
    ) -> Result<Response, Problem> {
        let (opened, len) = oneshot::channel();
        let (pieces, next) = mpsc::channel(PIECES);
        let runtime = Handle::current();
        let outcome = self.begin(move |client| {
            let source = open(client)?;
            let _ = opened.send(source.len());
            let (until, mut pace) = (Instant::now() + TRANSFER_MAX, Pace::default());
            let mut at = 0;
            while at < source.len() {
                let mut bytes = vec![0; PIECE.min((source.len() - at) as usize)];
                let read = source.read_at(&mut bytes, at);
                let (is_over, count) = (!matches!(read, Ok(1..)), *read.as_ref().unwrap_or(&0));
                let piece = read.map(|count| {
                    bytes.truncate(count);
                    Bytes::from(bytes)
                });
                at += count as u64;
                let sent = runtime.block_on(pace.wait(pieces.send(piece)));
                if is_over || Instant::now() > until || !matches!(sent, Some(Ok(()))) {
                    break;
                }
                pace.moved(count);
            }
            Ok(())
        })?;
        let Ok(len) = len.await else {
            return Err(done(outcome).await.err().unwrap_or_else(|| no_volume("")));
        };
        let pieces: ReceiverStream<io::Result<Bytes>> = ReceiverStream::new(next);
        let headers = [(CONTENT_TYPE, kind.to_owned()), (CONTENT_LENGTH, len.to_string())];
        Ok((headers, Body::from_stream(pieces)).into_response())
    }
}

/// Bytes of an answer that are read as a client takes them.
trait Source {
    fn len(&self) -> u64;
    fn read_at(&self, bytes: &mut [u8], at: u64) -> io::Result<usize>;
}

impl Source for ClientFile {
    fn len(&self) -> u64 {
        self.size()
    }

    fn read_at(&self, bytes: &mut [u8], at: u64) -> io::Result<usize> {
        ClientFile::read_at(self, bytes, at)
    }
}

impl Source for Vec<u8> {
    fn len(&self) -> u64 {
        self.len() as u64
    }

    fn read_at(&self, bytes: &mut [u8], at: u64) -> io::Result<usize> {
        let rest = self.get(at as usize..).unwrap_or_default();
        let count = rest.len().min(bytes.len());
        bytes[..count].copy_from_slice(&rest[..count]);
        Ok(count)
    }
}

/// How long may still be waited for a client.
struct Pace {
    left: Duration,
    bytes: usize,
}

impl Default for Pace {
    fn default() -> Self {
        Self { left: PATIENCE, bytes: 0 }
    }
}

impl Pace {
    /// Waits for something of the client's; nothing: it is too slow.
    async fn wait<T>(&mut self, next: impl Future<Output = T>) -> Option<T> {
        let began = Instant::now();
        let next = timeout(self.left, next).await.ok()?;
        self.left = self.left.saturating_sub(began.elapsed());
        Some(next)
    }

    /// So many bytes have come from it, or gone to it.
    fn moved(&mut self, bytes: usize) {
        self.bytes += bytes;
        if self.bytes >= LEAST {
            *self = Self::default();
        }
    }
}

async fn done<T>(outcome: oneshot::Receiver<Result<T, Problem>>) -> Result<T, Problem> {
    let lost = |_| Err(Problem::new(Kind::Busy, "the node has ended this; try again"));
    outcome.await.unwrap_or_else(lost)
}

fn answer(status: StatusCode, outcome: Result<Value, Problem>) -> Response {
    match outcome {
        Ok(Value::Null) => status.into_response(),
        Ok(value) => (status, Json(value)).into_response(),
        Err(problem) => problem.into_response(),
    }
}

async fn stat((State(e2b), Path(id), Query(at), headers): Asked) -> Response {
    let found = async {
        let guest = Guest::admit(e2b, id, &headers).await?;
        let place = Place::parse(&at.path)?;
        guest.run(move |client| tree::stat(client, &place)).await
    };
    answer(StatusCode::OK, found.await)
}

async fn list((State(e2b), Path(id), Query(at), headers): Asked) -> Response {
    let listed = async {
        let guest = Guest::admit(e2b, id, &headers).await?;
        let (place, depth) = (Place::parse(&at.path)?, at.depth.unwrap_or(1));
        let listed = move |client: &VolumeClient| tree::list(client, &place, depth);
        guest.send("application/json", listed).await
    };
    listed.await.unwrap_or_else(IntoResponse::into_response)
}

async fn make_directory((State(e2b), Path(id), Query(at), headers): Asked) -> Response {
    let made = async {
        let guest = Guest::admit(e2b, id, &headers).await?;
        let place = Place::parse(&at.path)?;
        let mode = permissions(at.uid, at.gid, at.mode)?;
        guest.run(move |client| tree::make_directory(client, &place, mode, at.force)).await
    };
    answer(StatusCode::CREATED, made.await)
}

async fn remove((State(e2b), Path(id), Query(at), headers): Asked) -> Response {
    let removed = async {
        let guest = Guest::admit(e2b, id, &headers).await?;
        let place = Place::parse(&at.path)?;
        guest.run(move |client| tree::remove(client, &place)).await.map(|()| Value::Null)
    };
    answer(StatusCode::NO_CONTENT, removed.await)
}

async fn change(
    State(e2b): State<Arc<E2b>>,
    Path(id): Path<String>,
    Query(at): Query<Where>,
    request: Request,
) -> Response {
    let changed = async {
        let (parts, body) = request.into_parts();
        let guest = Guest::admit(e2b, id, &parts.headers).await?;
        let place = Place::parse(&at.path)?;
        let body = timeout(PATIENCE, Limited::new(body, METADATA_MAX).collect()).await;
        let body = body.map_err(|_| silent())?;
        let body = body.map_err(|error| Problem::invalid(format!("the request: {error}")))?;
        let Changes { uid, gid, mode } = crate::control::parse(&body.to_bytes())?;
        let mode = permissions(uid, gid, mode)?;
        guest.run(move |client| tree::change(client, &place, mode)).await
    };
    match changed.await {
        Ok(changed) => answer(StatusCode::OK, Ok(changed)),
        // There may be more of the body to come.
        Err(problem) => closing(problem.into_response()),
    }
}

fn silent() -> Problem {
    let seconds = PATIENCE.as_secs();
    let message = format!("fewer than {LEAST} bytes have come from the client within {seconds} s");
    Problem::new(Kind::Late, message)
}

/// What comes of the body of a request next.
enum Part {
    Bytes(Bytes),
    /// It was read to its end.
    End,
}

async fn write(
    State(e2b): State<Arc<E2b>>,
    Path(id): Path<String>,
    Query(at): Query<Where>,
    request: Request,
) -> Response {
    let written = async {
        let (parts, mut body) = request.into_parts();
        let guest = Guest::admit(e2b, id, &parts.headers).await?;
        let place = Place::parse(&at.path)?;
        let mode = permissions(at.uid, at.gid, at.mode)?;
        let (parts, mut next) = mpsc::channel(PIECES);
        let outcome = guest.begin(move |client| {
            tree::write(client, &place, mode, at.force, || match next.blocking_recv() {
                Some(Part::Bytes(bytes)) => Ok(Some(bytes)),
                Some(Part::End) => Ok(None),
                None => Err(Problem::invalid("the request is cut short")),
            })
        })?;
        let until = Instant::now() + TRANSFER_MAX;
        let passed = async {
            let mut pace = Pace::default();
            while let Some(frame) = pace.wait(body.frame()).await.ok_or_else(silent)? {
                let frame =
                    frame.map_err(|error| Problem::invalid(format!("cut short: {error}")))?;
                let Some(bytes) = frame.data_ref() else { continue };
                pace.moved(bytes.len());
                if parts.send(Part::Bytes(bytes.clone())).await.is_err() {
                    // It could not be written, and the outcome says why.
                    return Ok(());
                }
            }
            let _ = parts.send(Part::End).await;
            Ok(())
        };
        let passed = timeout_at(until, passed).await.unwrap_or_else(|_| Err(silent()));
        drop(parts);
        let outcome = done(outcome).await;
        passed.and(outcome)
    };
    match written.await {
        Ok(written) => answer(StatusCode::CREATED, Ok(written)),
        // There may be more of the body to come.
        Err(problem) => closing(problem.into_response()),
    }
}

async fn read((State(e2b), Path(id), Query(at), headers): Asked) -> Response {
    let opened = async {
        let guest = Guest::admit(e2b, id, &headers).await?;
        let place = Place::parse(&at.path)?;
        let opened = move |client: &VolumeClient| {
            client.open(place.bytes()).map_err(|error| tree::failed(&place, &error))
        };
        guest.send("application/octet-stream", opened).await
    };
    opened.await.unwrap_or_else(IntoResponse::into_response)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::future::{pending, ready};

    #[tokio::test]
    async fn a_client_has_its_time_again_when_it_has_moved_enough() {
        let mut pace = Pace { left: Duration::ZERO, bytes: 0 };
        assert!(pace.wait(pending::<()>()).await.is_none());
        // It is there without being waited for.
        assert!(pace.wait(ready(())).await.is_some());
        pace.moved(LEAST - 1);
        assert!(pace.wait(pending::<()>()).await.is_none());
        pace.moved(1);
        assert_eq!((pace.left, pace.bytes), (PATIENCE, 0));
    }
}
