//! A terminal in a sandbox: a shell with a pseudo terminal of the sandbox's kernel, over a WebSocket.
//!
//! The browser sends binary messages for standard input, and text messages with rows and columns;
//! it gets binary messages. The terminal is hung up when the page is closed or the session ends.

use super::assets::path;
use super::frame::{Page, Place, plain, problem};
use super::session::Session;
use super::{App, format};
use axum::body::Bytes;
use axum::extract::ws::{CloseFrame, Message, WebSocket, WebSocketUpgrade};
use axum::extract::{Path, Query, State};
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{Html, IntoResponse, Response};
use axum::routing::get;
use axum::{Extension, Router};
use maud::html;
use serde::Deserialize;
use std::sync::Arc;
use std::time::Duration;
use thaw_node::remote::exec::{Attached, ExecProblem};
use thaw_node::remote::{ExecRequest, ExecState, Next, Reader};
use thaw_node::service::Service;
use tokio::sync::{OwnedSemaphorePermit, mpsc};
use tokio::task::JoinHandle;
use tokio::time::{Instant, timeout};

/// Most bytes of a message of a browser.
const MESSAGE_MAX: usize = 64 << 10;
/// Messages of a browser that wait for the shell to read them.
const INPUT_MAX: usize = 16;
/// How often the browser is asked whether it is there.
const PING: Duration = Duration::from_secs(20);
/// A browser that is silent for so long has gone.
const SILENCE_MAX: Duration = Duration::from_secs(60);
/// How long a browser may take to take a message.
const SEND_PATIENCE: Duration = Duration::from_secs(20);
/// Shells that are tried.
const SHELLS: [&str; 2] = ["/bin/bash", "/bin/sh"];

pub(super) fn routes() -> Router<App> {
    Router::new()
        .route("/sandboxes/{name}/terminal", get(page))
        .route("/sandboxes/{name}/terminal/stream", get(stream))
}

async fn page(
    State(app): State<App>,
    Path(name): Path<String>,
    Extension(session): Extension<Session>,
) -> Response {
    let one = match app.admin.sandboxes.find(&name) {
        Ok(one) => one,
        Err(error) => return problem(&session, StatusCode::NOT_FOUND, &error.to_string()),
    };
    let above = format!("/sandboxes/{}", one.name);
    let page = Page {
        place: Place::Sandboxes,
        title: "Terminal",
        above: &[("Sandboxes", "/sandboxes"), (&one.name, &above)],
        live: None,
        charts: false,
        session: &session,
    };
    // xterm.js writes its colours and sizes into style elements of its own; those, and no others,
    // carry this number (terminal.js).
    let nonce = nonce();
    let scripts = html! {
        link rel="stylesheet" href=(path("xterm.css"));
        script defer src=(path("xterm.js")) {}
        script defer src=(path("xterm-addon-fit.js")) {}
        script defer src=(path("app.js")) {}
        script defer src=(path("terminal.js")) nonce=(nonce) {}
    };
    let live = html! {
        section.card.terminal-card {
            div #terminal data-stream=(format!("{above}/terminal/stream")) {}
            p.hint #terminal-state role="status" { "Connecting" }
        }
    };
    let policy = format!(
        "default-src 'none'; script-src 'self'; style-src 'self' 'nonce-{nonce}'; img-src 'self'; \
         connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
    );
    let policy = HeaderValue::from_str(&policy).expect("it is ASCII");
    let page = page.whole(&scripts, live, html! {});
    ([(header::CONTENT_SECURITY_POLICY, policy)], Html(page.into_string())).into_response()
}

fn nonce() -> String {
    let mut bytes = [0; 16];
    let source = ring::rand::SystemRandom::new();
    ring::rand::SecureRandom::fill(&source, &mut bytes).expect("the host has random numbers");
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[derive(Clone, Copy, Debug, Deserialize)]
struct Size {
    rows: u16,
    columns: u16,
}

impl Size {
    fn bounded(self) -> (u16, u16) {
        (self.rows.clamp(1, 500), self.columns.clamp(1, 1000))
    }
}

async fn stream(
    State(app): State<App>,
    Path(name): Path<String>,
    Query(size): Query<Size>,
    Extension(session): Extension<Session>,
    upgrade: WebSocketUpgrade,
) -> Response {
    let one = match app.admin.sandboxes.find(&name) {
        Ok(one) => one,
        Err(error) => return plain(StatusCode::NOT_FOUND, &error.to_string()),
    };
    let Some(service) = app.admin.services.service_of(one.instance) else {
        return plain(StatusCode::NOT_FOUND, "its instance has ended");
    };
    let Ok(place) = app.terminals.clone().try_acquire_owned() else {
        let why = "too many terminals are open already; close one";
        return plain(StatusCode::TOO_MANY_REQUESTS, why);
    };
    let upgrade = upgrade.max_message_size(MESSAGE_MAX).max_frame_size(MESSAGE_MAX);
    upgrade.on_upgrade(move |socket| async move {
        let terminal = Terminal { app, session, name: one.name, instance: one.instance };
        terminal.serve(socket, &service, size, place).await;
    })
}

/// Somebody's terminal.
struct Terminal {
    app: App,
    session: Session,
    name: String,
    instance: u64,
}

impl Terminal {
    async fn serve(
        &self,
        mut socket: WebSocket,
        service: &Arc<Service>,
        size: Size,
        _place: OwnedSemaphorePermit,
    ) {
        self.app.admin.sandboxes.used(self.instance);
        let (exec, reader) = match start(service, self.instance, size).await {
            Ok(started) => started,
            Err(error) => return close(socket, &error.to_string()).await,
        };
        self.app.note(&self.name, "opened a terminal");
        let began = Instant::now();
        let why = self.carry(&mut socket, &exec, reader).await;
        exec.hang_up().await;
        self.app.admin.sandboxes.used(self.instance);
        self.app.note(
            &self.name,
            &format!("closed a terminal after {}", format::age(began.elapsed().as_secs())),
        );
        close(socket, &why).await;
    }

    /// Carries bytes until somebody ends; why.
    async fn carry(&self, socket: &mut WebSocket, exec: &Attached, mut output: Reader) -> String {
        let mut heard = Instant::now();
        let mut used = Instant::now();
        // A program that does not read its input does not hold up its output.
        let (input, typed) = mpsc::channel(INPUT_MAX);
        let _writer = AbortOnDrop(tokio::spawn(write_input(exec.clone(), typed)));
        loop {
            let outgoing = tokio::select! {
                next = output.next() => match next {
                    Next::Bytes(_, bytes) => Message::Binary(Bytes::from(bytes)),
                    Next::Lost(bytes) => {
                        Message::Binary(Bytes::from(format!("\r\n[{bytes} bytes are missing]\r\n")))
                    }
                    Next::End => return ended(&exec.ended().await),
                },
                (room, message) = async { (input.reserve().await, socket.recv().await) } => {
                    heard = Instant::now();
                    match message {
                        Some(Ok(Message::Binary(bytes))) if !bytes.is_empty() => {
                            let Ok(room) = room else { return "the shell takes no input".to_owned() };
                            room.send(bytes);
                        }
                        Some(Ok(Message::Text(text))) => match serde_json::from_str::<Size>(&text) {
                            Ok(size) => exec.resize(size.bounded()),
                            Err(_) => return "the browser has sent nonsense".to_owned(),
                        },
                        Some(Ok(Message::Close(_)) | Err(_)) | None => return "closed".to_owned(),
                        Some(Ok(_)) => {}
                    }
                    if used.elapsed() > PING {
                        used = Instant::now();
                        self.app.admin.sandboxes.used(self.instance);
                    }
                    continue;
                },
                () = tokio::time::sleep(PING) => {
                    // While input waits, nothing is heard.
                    if heard.elapsed() > SILENCE_MAX && input.capacity() > 0 {
                        return "the browser has gone".to_owned();
                    }
                    Message::Ping(Bytes::new())
                },
                () = self.session.ended() => return "you have logged out".to_owned(),
            };
            match timeout(SEND_PATIENCE, socket.send(outgoing)).await {
                Ok(Ok(())) => {}
                _ => return "the browser has gone".to_owned(),
            }
        }
    }
}

/// Passes on what is typed.
async fn write_input(exec: Attached, mut typed: mpsc::Receiver<Bytes>) {
    while let Some(bytes) = typed.recv().await {
        exec.write(&bytes).await;
    }
}

/// A task that ends with this.
struct AbortOnDrop(JoinHandle<()>);

impl Drop for AbortOnDrop {
    fn drop(&mut self) {
        self.0.abort();
    }
}

fn ended(state: &ExecState) -> String {
    match state {
        ExecState::Ended { code: Some(code), .. } => format!("the shell has ended with {code}"),
        ExecState::Ended { signal: Some(signal), .. } => {
            format!("the shell was ended by signal {signal}")
        }
        _ => "the shell has ended".to_owned(),
    }
}

/// Starts the first shell that there is.
async fn start(
    service: &Arc<Service>,
    instance: u64,
    size: Size,
) -> Result<(Attached, Reader), ExecProblem> {
    let mut last = ExecProblem::Refused("there is no shell".to_owned());
    for shell in SHELLS {
        let request = ExecRequest {
            argv: vec![shell.to_owned()],
            env: vec!["TERM=xterm-256color".to_owned()],
            terminal: Some(size.bounded()),
            ..ExecRequest::default()
        };
        match service.exec(instance, &request).await {
            Err(error @ (ExecProblem::Refused(_) | ExecProblem::NotRun(..))) => last = error,
            other => return other,
        }
    }
    Err(last)
}

/// Most bytes of the reason in the frame that ends a connection (RFC 6455, 5.5).
const REASON_MAX: usize = 120;

async fn close(mut socket: WebSocket, why: &str) {
    let mut end = why.len().min(REASON_MAX);
    while !why.is_char_boundary(end) {
        end -= 1;
    }
    let frame = CloseFrame { code: 1000, reason: why[..end].into() };
    // The browser may have gone already.
    let _ = timeout(SEND_PATIENCE, socket.send(Message::Close(Some(frame)))).await;
}
