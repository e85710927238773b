//! How clients upload archives: they ask where to, with their key, and get an address that is good
//! for this archive and for a while.

use super::records::no_template;
use super::steps::is_hash;
use crate::E2b;
use crate::control::{Asked, answer};
use crate::input::Query;
use crate::problem::{Kind, Problem};
use crate::records::are_equal;
use crate::serve::{closing, header};
use axum::Extension;
use axum::Router;
use axum::body::Body;
use axum::extract::{Path, Request, State};
use axum::http::header::{CONTENT_LENGTH, HOST};
use axum::http::{HeaderMap, StatusCode};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, put};
use http_body_util::BodyExt;
use serde::Deserialize;
use serde_json::json;
use std::fs::File;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};
use tokio::io::AsyncWriteExt;
use tokio::time::{Instant, timeout, timeout_at};

/// What paths of uploads begin with.
pub(crate) const PATH: &str = "/uploads/";
/// How long an address is good, and how long an upload may take. The SDKs wait as long.
const UPLOAD_MAX: Duration = Duration::from_secs(3600);
/// How long a client may send nothing in the middle of an archive.
const PATIENCE: Duration = Duration::from_secs(60);

/// The path where clients ask.
pub fn link_routes() -> Router<Arc<E2b>> {
    Router::new().route("/templates/{id}/files/{hash}", get(link))
}

/// The path where clients upload. They show no key.
pub(crate) fn routes() -> Router<Arc<E2b>> {
    Router::new().route("/uploads/{template}/{hash}", put(upload))
}

fn now_s() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs()
}

/// Says whether an archive is here, and where it goes.
async fn link(
    (State(e2b), Extension(client), Path((name, hash))): Asked<Path<(String, String)>>,
    headers: HeaderMap,
) -> Response {
    let linked = || {
        client.check_changes()?;
        if !is_hash(&hash) {
            return Err(Problem::invalid("the hash of files is no SHA-256 in hexadecimal digits"));
        }
        let (id, _) = e2b.template(&client, &name)?;
        let present = e2b.templates.uploads.has(client.owner(), &hash);
        let until_s = now_s() + UPLOAD_MAX.as_secs();
        let token = e2b.records.upload_token(&id, &hash, until_s);
        let root = e2b.root(&headers);
        let url = format!("{root}{PATH}{id}/{hash}?until={until_s}&signature={token}");
        Ok(json!({"present": present, "url": url}))
    };
    answer(StatusCode::CREATED, linked())
}

impl E2b {
    /// Where a client has reached this API: as it has named the host, over TLS if it speaks that with this
    /// node or with a proxy before it.
    fn root(&self, headers: &HeaderMap) -> String {
        let host = header(headers, HOST.as_str()).unwrap_or("localhost");
        let is_tls = self.tls.is_some() || header(headers, "x-forwarded-proto") == Some("https");
        format!("{}://{host}", if is_tls { "https" } else { "http" })
    }
}

#[derive(Deserialize)]
struct UploadQuery {
    until: u64,
    signature: String,
}

async fn upload(
    State(e2b): State<Arc<E2b>>,
    Path((template, hash)): Path<(String, String)>,
    Query(query): Query<UploadQuery>,
    request: Request,
) -> Response {
    match e2b.take(&template, &hash, &query, request).await {
        Ok(()) => StatusCode::OK.into_response(),
        // There may be more of the body to come.
        Err(problem) => closing(problem.into_response()),
    }
}

impl E2b {
    async fn take(
        &self,
        template: &str,
        hash: &str,
        query: &UploadQuery,
        request: Request,
    ) -> Result<(), Problem> {
        let token = self.records.upload_token(template, hash, query.until);
        if !are_equal(&query.signature, &token) || query.until < now_s() {
            return Err(Problem::new(
                Kind::Forbidden,
                "the address is not that of an upload, or its time is over; build again",
            ));
        }
        let owner = self.templates.records.owner(template).ok_or_else(|| no_template(template))?;
        if !self.settings.now().has_owner(&owner) {
            let text = "the key that has asked for this upload was taken away";
            return Err(Problem::new(Kind::Unauthenticated, text));
        }
        let length = header(request.headers(), CONTENT_LENGTH.as_str());
        let length = length.and_then(|text| text.parse().ok()).ok_or_else(|| {
            Problem::invalid("the upload does not say how long it is; send `Content-Length`")
        })?;
        let _place = self.streams.enter(&owner)?;
        let mut upload = self.templates.uploads.begin(&owner, hash, length)?;
        let received = receive(request.into_body(), upload.file(), length);
        received.await?;
        upload.keep().map_err(|error| Problem::new(Kind::NoSpace, error))
    }
}

/// Writes a body of so many bytes to a file.
async fn receive(mut body: Body, file: File, length: u64) -> Result<(), Problem> {
    let full = |error: std::io::Error| Problem::new(Kind::NoSpace, error);
    let late = |_| Problem::new(Kind::Late, "the upload comes too slowly; send it again");
    let cut = |error: axum::Error| Problem::invalid(format!("the upload is cut short: {error}"));
    let deadline = Instant::now() + UPLOAD_MAX;
    let mut file = tokio::fs::File::from_std(file);
    let mut count = 0;
    loop {
        let next = timeout_at(deadline, timeout(PATIENCE, body.frame())).await.map_err(late)?;
        let Some(frame) = next.map_err(late)? else { break };
        let frame = frame.map_err(cut)?;
        let Some(bytes) = frame.data_ref() else { continue };
        count += bytes.len() as u64;
        if count > length {
            break;
        }
        file.write_all(bytes).await.map_err(full)?;
    }
    if count != length {
        return Err(Problem::invalid("the upload is not as long as it says; send it again"));
    }
    file.sync_data().await.map_err(full)
}
