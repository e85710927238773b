//! Requests about trees of files in instances, which travel as tar.

use super::Admin;
use super::extract::{Path, Query};
use super::files::{FileQuery, refusal, session};
use super::routes::problem;
use axum::body::{Body, Bytes};
use axum::extract::{Request, State};
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use axum::{Json, Router};
use http_body_util::BodyExt;
use std::io;
use std::time::Duration;
use thaw_node::remote::files::FileKind;
use thaw_node::remote::tree::{CLIENT_PATIENCE, PLACES, TREE_TYPE, TreeLimits, pack};
use thaw_node::remote::untree::{Source, unpack};
use tokio::runtime::Handle;
use tokio::sync::{SemaphorePermit, mpsc};
use tokio::time::timeout;
use tokio_stream::wrappers::ReceiverStream;

/// How long the rest of a body is read that nobody needs, so that the client reads the answer.
const UNREAD_PATIENCE: Duration = Duration::from_secs(30);

/// Their paths.
pub(super) fn routes() -> Router<Admin> {
    Router::new().route("/instances/{id}/files/tree", get(read).put(write))
}

fn place() -> Result<SemaphorePermit<'static>, Box<Response>> {
    PLACES.try_acquire().map_err(|_| {
        let reason = "as many trees are copied already as the node takes at a time; try again";
        Box::new(problem(StatusCode::TOO_MANY_REQUESTS, "trees", reason))
    })
}

async fn read(
    State(admin): State<Admin>,
    Path(id): Path<u64>,
    Query(query): Query<FileQuery>,
) -> Response {
    match begin(&admin, id, query).await {
        Ok(body) => {
            let kind = HeaderValue::from_static(TREE_TYPE);
            ([(header::CONTENT_TYPE, kind)], body).into_response()
        }
        Err(refused) => *refused,
    }
}

async fn begin(admin: &Admin, id: u64, query: FileQuery) -> Result<Body, Box<Response>> {
    let place = place()?;
    let mut session = session(admin, id, &query.user).await?;
    let found = session.stat(&query.path, true).await;
    let found = found.map_err(|error| Box::new(refusal(&error)))?;
    if found.kind != FileKind::Directory {
        let reason = format!("{} is no directory; ask for it as a file", query.path);
        return Err(Box::new(problem(StatusCode::BAD_REQUEST, "file", reason)));
    }
    let (sender, receiver) = mpsc::channel(4);
    tokio::spawn(async move {
        pack(session, query.path, TreeLimits::default(), sender).await;
        drop(place);
    });
    Ok(Body::from_stream(ReceiverStream::new(receiver)))
}

async fn write(
    State(admin): State<Admin>,
    Path(id): Path<u64>,
    Query(query): Query<FileQuery>,
    request: Request,
) -> Response {
    match unpacked(&admin, id, query, request.into_body()).await {
        Ok(answer) => answer,
        Err(refused) => *refused,
    }
}

async fn unpacked(
    admin: &Admin,
    id: u64,
    query: FileQuery,
    body: Body,
) -> Result<Response, Box<Response>> {
    let place = place()?;
    let sessions = (session(admin, id, &query.user).await?, session(admin, id, &query.user).await?);
    let (sender, receiver) = mpsc::channel(4);
    let handle = Handle::current();
    // At most as many threads as there are places.
    let worker = tokio::task::spawn_blocking(move || {
        let source = Source::new(receiver);
        let done = unpack(sessions, &query.path, source, &handle, TreeLimits::default());
        drop(place);
        done
    });
    feed(body, sender).await;
    let done = worker.await.map_err(|error| {
        Box::new(problem(StatusCode::INTERNAL_SERVER_ERROR, "file", error.to_string()))
    })?;
    match done {
        Ok(report) => Ok(Json(report).into_response()),
        Err(error) => Err(Box::new(refusal(&error))),
    }
}

/// Passes a body on. Where nobody takes it any more, some of the rest is read all the same: the
/// client would find its connection broken otherwise, and no reason.
async fn feed(mut body: Body, sender: mpsc::Sender<io::Result<Bytes>>) {
    loop {
        let piece = match timeout(CLIENT_PATIENCE, body.frame()).await {
            Ok(None) => return,
            Ok(Some(Ok(frame))) => match frame.into_data() {
                Ok(bytes) => Ok(bytes),
                Err(_) => continue,
            },
            Ok(Some(Err(_))) => Err("the body has ended before its time"),
            Err(_) => Err("the client sends nothing more"),
        };
        let is_last = piece.is_err();
        let sent = sender.send(piece.map_err(io::Error::other)).await;
        if sent.is_err() {
            let rest = async { while let Some(Ok(_)) = body.frame().await {} };
            let _ = timeout(UNREAD_PATIENCE, rest).await;
            return;
        }
        if is_last {
            return;
        }
    }
}
