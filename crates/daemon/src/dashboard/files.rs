//! Files of a sandbox: directories, a look at the beginning of a file, and downloads.
//!
//! Contents are hostile. A look shows them as text of the page; a download is never shown by the
//! browser, and has a policy under which nothing in it would run.

use super::App;
use super::format::{bytes, permissions, time};
use super::frame::{Page, Place, problem};
use super::session::Session;
use axum::body::Body;
use axum::extract::{Path, Query, State};
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use axum::{Extension, Router};
use maud::{Markup, html};
use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, utf8_percent_encode};
use serde::Deserialize;
use thaw_node::remote::files::{FileInfo, FileKind, FileProblem, FileSession};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;

/// Bytes of a file that the page shows.
const LOOK_MAX: usize = 256 << 10;
/// Entries of a directory that the page shows.
const ENTRIES_SHOWN: usize = 2000;
/// What may stand in a query and in `filename*` (RFC 5987).
const PLAIN: &AsciiSet = &NON_ALPHANUMERIC.remove(b'-').remove(b'_').remove(b'.').remove(b'~');

pub(super) fn routes() -> Router<App> {
    Router::new()
        .route("/sandboxes/{name}/files", get(browse))
        .route("/sandboxes/{name}/download", get(download))
}

#[derive(Deserialize)]
struct Where {
    #[serde(default)]
    path: String,
}

fn encoded(text: &str) -> String {
    utf8_percent_encode(text, PLAIN).to_string()
}

async fn open(app: &App, name: &str) -> Result<FileSession, (StatusCode, String)> {
    let found = app.admin.sandboxes.find(name);
    let one = found.map_err(|error| (StatusCode::NOT_FOUND, error.to_string()))?;
    let service = app.admin.services.service_of(one.instance);
    let ended = || (StatusCode::NOT_FOUND, "its instance has ended".to_owned());
    let service = service.ok_or_else(ended)?;
    app.admin.sandboxes.used(one.instance);
    service.files(one.instance, "").await.map_err(|error| (StatusCode::CONFLICT, error))
}

/// What a page shows of a path.
enum Seen {
    Directory(Vec<FileInfo>),
    File(FileInfo, Vec<u8>),
    Other(FileInfo),
}

async fn see(session: &mut FileSession, path: &str) -> Result<Seen, FileProblem> {
    let info = session.stat(path, true).await?;
    match info.kind {
        FileKind::Directory => {
            let mut entries = session.list(path).await?;
            entries.retain(|entry| entry.name != "." && entry.name != "..");
            let rank = |entry: &FileInfo| (entry.kind != FileKind::Directory, entry.name.clone());
            entries.sort_by_key(rank);
            Ok(Seen::Directory(entries))
        }
        FileKind::File => {
            session.read_up_to(path, LOOK_MAX as u64).await?;
            let mut contents = Vec::new();
            while let Some(piece) = session.next_piece(path).await? {
                let room = LOOK_MAX - contents.len();
                contents.extend_from_slice(&piece[..piece.len().min(room)]);
            }
            Ok(Seen::File(info, contents))
        }
        _ => Ok(Seen::Other(info)),
    }
}

async fn browse(
    State(app): State<App>,
    Path(name): Path<String>,
    Query(place): Query<Where>,
    Extension(session): Extension<Session>,
) -> Response {
    let path = if place.path.is_empty() { "/" } else { &place.path };
    let seen = match open(&app, &name).await {
        Ok(mut files) => see(&mut files, path).await,
        Err((status, why)) => return problem(&session, status, &why),
    };
    let seen = match seen {
        Ok(seen) => seen,
        Err(error) => return problem(&session, StatusCode::NOT_FOUND, &format!("{path}: {error}")),
    };
    let above = format!("/sandboxes/{name}");
    let page = Page {
        place: Place::Sandboxes,
        title: "Files",
        above: &[("Sandboxes", "/sandboxes"), (&name, &above)],
        live: None,
        charts: false,
        session: &session,
    };
    let body = html! {
        (trail(&name, path))
        @match &seen {
            Seen::Directory(entries) => (directory(&name, path, entries)),
            Seen::File(info, contents) => (file(&name, path, info, contents)),
            Seen::Other(info) => section.card { p.hint { "This is neither a file nor a directory (" (kind(info.kind)) "), so it is not read." } },
        }
    };
    page.show(body, html! {})
}

/// The directories above, as links.
fn trail(name: &str, path: &str) -> Markup {
    let mut so_far = String::new();
    let parts: Vec<_> = path
        .split('/')
        .filter(|part| !part.is_empty())
        .map(|part| {
            so_far = format!("{so_far}/{part}");
            (part, so_far.clone())
        })
        .collect();
    html! {
        nav.trail aria-label="Directories" {
            a href=(format!("/sandboxes/{name}/files?path=%2F")) { "/" }
            @for (part, whole) in &parts {
                a href=(format!("/sandboxes/{name}/files?path={}", encoded(whole))) { (part) } span aria-hidden="true" { "/" }
            }
        }
    }
}

fn kind(kind: FileKind) -> String {
    let name = serde_json::to_value(kind).ok();
    name.and_then(|name| name.as_str().map(str::to_owned)).unwrap_or_default()
}

fn join(path: &str, name: &str) -> String {
    format!("{}/{name}", path.trim_end_matches('/'))
}

fn directory(name: &str, path: &str, entries: &[FileInfo]) -> Markup {
    html! {
        section.card { div.scroll { table.files {
            thead { tr { th { "Name" } th.number { "Size" } th { "Permissions" } th.number { "Owner" } th { "Changed" } th { "" } } }
            tbody { @for entry in entries.iter().take(ENTRIES_SHOWN) {
                @let whole = join(path, &entry.name);
                tr data-kind=(kind(entry.kind)) {
                    td { a href=(format!("/sandboxes/{name}/files?path={}", encoded(&whole))) { (entry.name) @if entry.kind == FileKind::Directory { "/" } } }
                    td.number { @if entry.kind == FileKind::File { (bytes(entry.size)) } @else { span.hint { (kind(entry.kind)) } } }
                    td { code { (permissions(entry.mode)) } }
                    td.number { (entry.uid) ":" (entry.gid) }
                    td { (time(u64::try_from(entry.mtime).unwrap_or(0).saturating_mul(1000))[..19].replace('T', " ")) }
                    td { @if entry.kind == FileKind::File { a href=(format!("/sandboxes/{name}/download?path={}", encoded(&whole))) { "Download" } } }
                }
            } }
        } }
        @if entries.is_empty() { p.hint { "It is empty." } }
        @if entries.len() > ENTRIES_SHOWN { p.hint { (entries.len() - ENTRIES_SHOWN) " more are not shown." } } }
    }
}

fn file(name: &str, path: &str, info: &FileInfo, contents: &[u8]) -> Markup {
    let is_text = !contents.contains(&0);
    html! {
        section.card {
            h2 { (bytes(info.size)) a.button href=(format!("/sandboxes/{name}/download?path={}", encoded(path))) { "Download" } }
            @if is_text {
                pre.contents tabindex="0" { (String::from_utf8_lossy(contents)) }
                @if info.size > contents.len() as u64 { p.hint { "Only the first " (bytes(contents.len() as u64)) " are shown." } }
            } @else { p.hint { "This is not text." } }
        }
    }
}

async fn download(
    State(app): State<App>,
    Path(name): Path<String>,
    Query(place): Query<Where>,
    Extension(session): Extension<Session>,
) -> Response {
    let path = place.path;
    let mut files = match open(&app, &name).await {
        Ok(files) => files,
        Err((status, why)) => return problem(&session, status, &why),
    };
    if let Err(error) = files.read(&path).await {
        return problem(&session, StatusCode::NOT_FOUND, &format!("{path}: {error}"));
    }
    app.note(&name, &format!("downloaded {path}"));
    let (sender, receiver) = mpsc::channel(4);
    let asked = path.clone();
    tokio::spawn(async move {
        loop {
            let piece = tokio::select! {
                piece = files.next_piece(&asked) => piece,
                () = session.ended() => return,
            };
            let piece = match piece {
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
    let base = path.rsplit('/').next().unwrap_or_default();
    let named = format!("attachment; filename*=UTF-8''{}", encoded(base));
    let headers = [
        (header::CONTENT_TYPE, HeaderValue::from_static("application/octet-stream")),
        (header::CONTENT_DISPOSITION, HeaderValue::from_str(&named).expect("it is encoded")),
        (header::CONTENT_SECURITY_POLICY, HeaderValue::from_static("sandbox; default-src 'none'")),
    ];
    (headers, Body::from_stream(ReceiverStream::new(receiver))).into_response()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_guests_do_not_leave_their_place() {
        let hostile = "a\"; filename=x.html\r\nSet-Cookie: a=b/<script>";
        let entry = |mtime| FileInfo {
            name: hostile.to_owned(),
            kind: FileKind::File,
            size: 1,
            mode: 0o644,
            uid: 0,
            gid: 0,
            mtime,
        };
        // No year that a guest gives a file is too much.
        let entries = [i64::MIN, 0, 253_402_300_800, i64::MAX].map(entry);
        let shown = directory("box", "/tmp", &entries).into_string();
        assert!(shown.contains("9999-12-31 23:59:59"), "{shown}");
        assert!(!shown.contains("<script>") && !shown.contains("href=\"a\""), "{shown}");
        assert!(!encoded(hostile).contains(['"', '\r', '\n', ' ', '<', ';']));
        let path = trail("box", "/a b/\"onload=1").into_string();
        assert!(path.contains("path=%2Fa%20b"), "{path}");
    }
}
