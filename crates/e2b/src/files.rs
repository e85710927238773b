//! envd's `/files`: contents of files, read and written over plain HTTP.
//!
//! A `GET` reads one. A `POST` writes one from its body (`application/octet-stream`, perhaps packed
//! with gzip), or some from a form (`multipart/form-data`). This node keeps a piece of some KiB at a
//! time, so there is no bound but the sandbox's memory. A request either shows the access token or
//! is signed with it, so that the address of a file can be given to others.

use super::E2b;
use super::backend::{FileKind, FileView, Files};
use super::filesystem::absolute;
use super::input::Query;
use super::problem::{Kind, Problem};
use super::process::user;
use super::records::are_equal;
use super::serve::{Target, closing, header};
use axum::body::Body;
use axum::extract::{FromRequest, Multipart, Query as AnyQuery, Request, State};
use axum::http::request::Parts;
use axum::http::{HeaderMap, HeaderValue, Uri, header as names};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use axum::{Extension, Json, Router};
use base64::Engine;
use base64::engine::general_purpose::STANDARD_NO_PAD;
use flate2::write::GzDecoder;
use http_body_util::BodyExt;
use ring::digest::{SHA256, digest};
use serde::Deserialize;
use serde_json::{Value, json};
use std::future::Future;
use std::io::Write;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};
use tokio::sync::mpsc;
use tokio::time::timeout;
use tokio_stream::wrappers::ReceiverStream;

/// Its path.
pub(super) const PATH: &str = "/files";
/// Packed bytes that are unpacked at a time: gzip makes at most some 1,032 bytes of one, so this
/// is 4 MiB at most.
const PACKED_PIECE: usize = 4 << 10;
/// How long a client may send nothing in the middle of a body.
const PATIENCE: Duration = Duration::from_secs(60);
/// Most files in one form.
const FILES_MAX: usize = 1000;

type Outcome<T> = Result<T, Problem>;

/// Its paths.
pub(super) fn routes() -> Router<Arc<E2b>> {
    Router::new().route(PATH, get(read).post(write))
}

#[derive(Default, Deserialize)]
struct FileQuery {
    #[serde(default)]
    path: String,
    username: Option<String>,
    signature: Option<String>,
    signature_expiration: Option<u64>,
}

/// What the address of a request says of a token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Signature {
    /// It is not signed with the token, or not for a file.
    Missing,
    /// It is, and its time is over.
    Expired,
    /// It is.
    Valid,
}

/// Whether a request is for a file, and signed with a token: the hash of path, operation, user,
/// token and perhaps a time is in its address (`get_signature` of E2B's SDK).
pub(super) fn signature(request: &Parts, token: &str) -> Signature {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
    match request.uri.path() == PATH {
        true => signature_at(request.method.as_str(), &request.uri, token, now),
        false => Signature::Missing,
    }
}

fn signature_at(method: &str, uri: &Uri, token: &str, now: u64) -> Signature {
    let Ok(AnyQuery(query)) = AnyQuery::<FileQuery>::try_from_uri(uri) else {
        return Signature::Missing;
    };
    let Some(shown) = query.signature else { return Signature::Missing };
    let operation = if method == "GET" { "read" } else { "write" };
    let user = query.username.unwrap_or_default();
    let mut signed = format!("{}:{operation}:{user}:{token}", query.path);
    if let Some(until) = query.signature_expiration {
        signed += &format!(":{until}");
    }
    let hash = STANDARD_NO_PAD.encode(digest(&SHA256, signed.as_bytes()));
    match are_equal(&shown, &format!("v1_{hash}")) {
        false => Signature::Missing,
        true if query.signature_expiration.is_some_and(|until| until < now) => Signature::Expired,
        true => Signature::Valid,
    }
}

/// The files of a sandbox, for the user that a request names.
async fn open(
    e2b: &E2b,
    target: &Target,
    query: &FileQuery,
    headers: &HeaderMap,
) -> Outcome<Box<dyn Files>> {
    let named = query.username.clone().filter(|name| !name.is_empty());
    let user = match named {
        Some(name) => Some(name),
        // Nobody has signed what the headers say.
        None if query.signature.is_some() => None,
        None => user(headers)?,
    };
    e2b.backend.files(&target.id, target.user(user).as_deref()).await
}

async fn read(
    State(e2b): State<Arc<E2b>>,
    Extension(target): Extension<Target>,
    Query(query): Query<FileQuery>,
    headers: HeaderMap,
) -> Response {
    let begun = async {
        let path = absolute(&target.directory, &query.path)?;
        let place = e2b.streams.enter(&target.record.owner)?;
        let mut files = open(&e2b, &target, &query, &headers).await?;
        let file = files.read(&path, u64::MAX).await?;
        Ok::<_, Problem>((place, path, files, file))
    };
    let (place, path, files, file) = match begun.await {
        Ok(begun) => begun,
        Err(problem) => return problem.into_response(),
    };
    let (sender, receiver) = mpsc::channel(4);
    tokio::spawn(async move {
        send_pieces(files, &path, &sender).await;
        drop(place);
    });
    let body = Body::from_stream(ReceiverStream::new(receiver));
    let kind = HeaderValue::from_static("application/octet-stream");
    let mut response = ([(names::CONTENT_TYPE, kind)], body).into_response();
    // Files of /proc have no size that means something.
    if file.kind == FileKind::File && file.size > 0 {
        let size = HeaderValue::from(file.size);
        response.headers_mut().insert("x-file-size", size);
    }
    response
}

/// Sends a file. An error breaks the answer off, which the client sees.
async fn send_pieces(mut files: Box<dyn Files>, path: &str, to: &mpsc::Sender<Outcome<Vec<u8>>>) {
    loop {
        let piece = match files.next_piece(path).await {
            Ok(Some(piece)) => Ok(piece),
            Ok(None) => return,
            Err(problem) => Err(problem),
        };
        let is_last = piece.is_err();
        if to.send(piece).await.is_err() || is_last {
            return;
        }
    }
}

async fn write(
    State(e2b): State<Arc<E2b>>,
    Extension(target): Extension<Target>,
    Query(query): Query<FileQuery>,
    request: Request,
) -> Response {
    let written = async {
        let _place = e2b.streams.enter(&target.record.owner)?;
        let headers = request.headers().clone();
        if headers.keys().any(|name| name.as_str().starts_with("x-metadata-")) {
            return Err(Problem::unsupported("files have no metadata here; leave it out"));
        }
        let files = open(&e2b, &target, &query, &headers).await?;
        let kind = header(&headers, names::CONTENT_TYPE.as_str()).unwrap_or_default();
        match kind.starts_with("multipart/form-data") {
            true => write_form(files, &target, &query, request).await,
            false => write_body(files, &target, &query, request).await,
        }
    };
    match written.await {
        Ok(written) => Json(written).into_response(),
        // There may be more of the body to come.
        Err(problem) => closing(problem.into_response()),
    }
}

/// A file that was written, as the API shows it.
fn shown(path: &str) -> Value {
    json!({"name": path.rsplit('/').next().unwrap_or_default(), "type": "file", "path": path})
}

async fn write_body(
    mut files: Box<dyn Files>,
    target: &Target,
    query: &FileQuery,
    request: Request,
) -> Outcome<Vec<Value>> {
    if query.path.is_empty() {
        return Err(Problem::invalid("`path` says nothing; name the file"));
    }
    let path = absolute(&target.directory, &query.path)?;
    let mut unpacker = match header(request.headers(), names::CONTENT_ENCODING.as_str()) {
        None | Some("identity") => None,
        Some("gzip") => Some(GzDecoder::new(Vec::new())),
        Some(other) => {
            return Err(Problem::unsupported(format!(
                "bodies packed with {other:?} are not taken; use gzip"
            )));
        }
    };
    files.write(&path).await?;
    let mut body = request.into_body();
    while let Some(frame) = in_time(body.frame()).await? {
        let frame = frame.map_err(|error| cut(&error))?;
        let Some(bytes) = frame.data_ref() else { continue };
        match &mut unpacker {
            None => files.put(bytes).await?,
            Some(unpacker) => {
                for piece in bytes.chunks(PACKED_PIECE) {
                    unpacker.write_all(piece).map_err(|error| packed_badly(&error))?;
                    files.put(&std::mem::take(unpacker.get_mut())).await?;
                }
            }
        }
    }
    if let Some(unpacker) = unpacker {
        files.put(&unpacker.finish().map_err(|error| packed_badly(&error))?).await?;
    }
    finish(&mut *files, &path).await?;
    Ok(vec![shown(&path)])
}

async fn finish(files: &mut dyn Files, path: &str) -> Outcome<FileView> {
    files.finish(path).await
}

/// What a client sends next, if it comes in time: a slow client has a session in the sandbox.
async fn in_time<T>(next: impl Future<Output = T>) -> Outcome<T> {
    timeout(PATIENCE, next).await.map_err(|_| {
        let seconds = PATIENCE.as_secs();
        Problem::new(
            Kind::Late,
            format!("no bytes of the body have come for {seconds} s; send again"),
        )
    })
}

fn cut(error: &dyn std::error::Error) -> Problem {
    Problem::invalid(format!("the request is cut short: {error}"))
}

fn packed_badly(error: &std::io::Error) -> Problem {
    Problem::invalid(format!("the body is no gzip: {error}"))
}

/// Each part named `file` is one: at `path` if the address has it, or else at the part's file name.
async fn write_form(
    mut files: Box<dyn Files>,
    target: &Target,
    query: &FileQuery,
    request: Request,
) -> Outcome<Vec<Value>> {
    let form = Multipart::from_request(request, &()).await;
    let mut form = form.map_err(|error| Problem::invalid(error.body_text()))?;
    let mut written = Vec::new();
    while let Some(mut part) = in_time(form.next_field()).await?.map_err(|error| cut(&error))? {
        if part.name() != Some("file") {
            continue;
        }
        if written.len() >= FILES_MAX || (!written.is_empty() && !query.path.is_empty()) {
            return Err(Problem::invalid(format!(
                "a form has at most {FILES_MAX} files, and one if `path` is in the address"
            )));
        }
        let name = match query.path.as_str() {
            "" => part.file_name().unwrap_or_default(),
            path => path,
        };
        if name.is_empty() {
            return Err(Problem::invalid("a file of the form has no name; give one, or `path`"));
        }
        let path = absolute(&target.directory, name)?;
        files.write(&path).await?;
        while let Some(bytes) = in_time(part.chunk()).await?.map_err(|error| cut(&error))? {
            files.put(&bytes).await?;
        }
        finish(&mut *files, &path).await?;
        written.push(shown(&path));
    }
    if written.is_empty() {
        return Err(Problem::new(Kind::Invalid, "the form has no part named `file`"));
    }
    Ok(written)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn signed(method: &str, uri: &str, now: u64) -> Signature {
        signature_at(method, &uri.parse().unwrap(), "secret", now)
    }

    #[test]
    fn signatures_are_those_of_the_sdk() {
        // As `get_signature` of E2B's Python SDK 2.63 makes them.
        let plain = "v1_JZ4oARkfyJlGHoJfXYdpTgwbCZQ649Z7s3Tvk4Fy+3U";
        let timed = "v1_l5prBq9mjWMnkWRkPj/nebFrg9wdi+pWG++u62AImig";
        let encoded = |signature: &str| signature.replace('+', "%2B").replace('/', "%2F");
        let uri = format!("/files?path=%2Fa%20b&signature={}", encoded(plain));
        assert_eq!(signed("GET", &uri, 5), Signature::Valid);
        assert_eq!(signed("POST", &uri, 5), Signature::Missing);
        assert_eq!(signed("GET", &uri.replace("%20b", "%20c"), 5), Signature::Missing);
        let uri = format!(
            "/files?path=%2Fa%20b&username=me&signature={}&signature_expiration=100",
            encoded(timed)
        );
        assert_eq!(signed("POST", &uri, 100), Signature::Valid);
        assert_eq!(signed("POST", &uri, 101), Signature::Expired);
        // Only whoever has a signature learns that its time is over.
        assert_eq!(signed("GET", &uri, 101), Signature::Missing);
        assert_eq!(signed("POST", &uri.replace("=100", "=1000"), 5), Signature::Missing);
        assert_eq!(signed("GET", "/files?path=%2Fa", 5), Signature::Missing);
    }
}
