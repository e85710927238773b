//! Requests about files in instances.

use super::Admin;
use super::extract::{Path, Query};
use super::routes::{problem, unknown_instance};
use axum::body::Body;
use axum::extract::{Request, State};
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Json, Router};
use http_body_util::BodyExt;
use serde::Deserialize;
use thaw_node::remote::files::{FileProblem, FileSession};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;

/// Their paths.
pub(super) fn routes() -> Router<Admin> {
    Router::new()
        .route("/instances/{id}/files", get(read).put(write).delete(remove))
        .route("/instances/{id}/files/stat", get(stat))
        .route("/instances/{id}/files/list", get(list))
        .route("/instances/{id}/files/directory", post(make_directory))
        .route("/instances/{id}/files/rename", post(rename))
        .route("/instances/{id}/files/link", get(read_link).post(symlink))
}

#[derive(Deserialize)]
pub(super) struct FileQuery {
    /// In the sandbox; a relative one begins at its working directory.
    pub path: String,
    /// The other path, or the target of a link.
    #[serde(default)]
    to: String,
    /// Whose rights count; that of the sandbox if empty.
    #[serde(default)]
    pub user: String,
    /// With all that is in it.
    #[serde(default)]
    all: bool,
    /// Not what a link leads to, but the link.
    #[serde(default)]
    no_follow: bool,
    /// Permissions, as a decimal number.
    mode: Option<u32>,
    /// Last modification, in seconds since 1970.
    mtime: Option<i64>,
}

pub(super) fn refusal(error: &FileProblem) -> Response {
    let status = match error {
        FileProblem::UnknownUser | FileProblem::Refused(libc::ENOENT, _) => StatusCode::NOT_FOUND,
        FileProblem::Refused(libc::EACCES | libc::EPERM, _) => StatusCode::FORBIDDEN,
        FileProblem::Refused(libc::ENOSPC | libc::ENOMEM, _) => StatusCode::INSUFFICIENT_STORAGE,
        FileProblem::Refused(..) => StatusCode::BAD_REQUEST,
        FileProblem::Lost(_) => StatusCode::CONFLICT,
    };
    problem(status, "file", error)
}

pub(super) async fn session(
    admin: &Admin,
    id: u64,
    user: &str,
) -> Result<FileSession, Box<Response>> {
    let service = admin.services.service_of(id).ok_or_else(|| Box::new(unknown_instance(id)))?;
    admin.sandboxes.used(id);
    let opened = service.files(id, user).await;
    opened.map_err(|reason| Box::new(problem(StatusCode::CONFLICT, "no_files", reason)))
}

/// Opens a session, or answers why there is none.
macro_rules! session {
    ($admin:expr, $id:expr, $query:expr) => {
        match session(&$admin, $id, &$query.user).await {
            Ok(session) => session,
            Err(refused) => return *refused,
        }
    };
}

pub(super) fn answer<T: serde::Serialize>(outcome: Result<T, FileProblem>) -> Response {
    match outcome {
        Ok(value) => Json(value).into_response(),
        Err(error) => refusal(&error),
    }
}

type Asked = (State<Admin>, Path<u64>, Query<FileQuery>);

async fn stat((State(admin), Path(id), Query(query)): Asked) -> Response {
    answer(session!(admin, id, query).stat(&query.path, !query.no_follow).await)
}

async fn list((State(admin), Path(id), Query(query)): Asked) -> Response {
    answer(session!(admin, id, query).list(&query.path).await)
}

async fn make_directory((State(admin), Path(id), Query(query)): Asked) -> Response {
    answer(session!(admin, id, query).make_directory(&query.path, query.mode).await)
}

async fn rename((State(admin), Path(id), Query(query)): Asked) -> Response {
    answer(session!(admin, id, query).rename(&query.path, &query.to).await)
}

async fn read_link((State(admin), Path(id), Query(query)): Asked) -> Response {
    answer(session!(admin, id, query).read_link(&query.path).await)
}

async fn symlink((State(admin), Path(id), Query(query)): Asked) -> Response {
    answer(session!(admin, id, query).symlink(&query.to, &query.path).await)
}

async fn remove((State(admin), Path(id), Query(query)): Asked) -> Response {
    answer(session!(admin, id, query).remove(&query.path, query.all).await)
}

async fn read((State(admin), Path(id), Query(query)): Asked) -> Response {
    let mut session = session!(admin, id, query);
    if let Err(error) = session.read(&query.path).await {
        return refusal(&error);
    }
    let (sender, receiver) = mpsc::channel(4);
    tokio::spawn(async move {
        loop {
            let piece = match session.next_piece(&query.path).await {
                Ok(Some(piece)) => Ok(piece),
                Ok(None) => return,
                Err(error) => Err(error),
            };
            let is_last = piece.is_err();
            if sender.send(piece).await.is_err() || is_last {
                return;
            }
        }
    });
    let kind = HeaderValue::from_static("application/octet-stream");
    let body = Body::from_stream(ReceiverStream::new(receiver));
    ([(header::CONTENT_TYPE, kind)], body).into_response()
}

async fn write(
    State(admin): State<Admin>,
    Path(id): Path<u64>,
    Query(query): Query<FileQuery>,
    request: Request,
) -> Response {
    let mut session = session!(admin, id, query);
    let mut body = request.into_body();
    if let Err(error) = session.write(&query.path, query.mode, query.mtime).await {
        return refusal(&error);
    }
    while let Some(frame) = body.frame().await {
        let Ok(frame) = frame else {
            let reason = "the body has ended before its time; what has come is in the file";
            return problem(StatusCode::BAD_REQUEST, "file", reason);
        };
        if let Ok(bytes) = frame.into_data()
            && let Err(error) = session.put(&bytes).await
        {
            return refusal(&error);
        }
    }
    answer(session.finish(&query.path).await)
}
