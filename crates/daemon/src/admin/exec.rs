//! Requests about processes in instances.
//!
//! `POST /instances/ID/exec` starts one. With `Connection: Upgrade` and `Upgrade: thaw-exec` the
//! connection then carries its streams, in frames: a byte that says what it is ([`Frame`]), three
//! zeros, the length of what follows as a `u32` with the highest byte first, and that. Otherwise
//! the answer is an [`ExecInfo`](thaw_node::remote::ExecInfo), and the process goes on; what it
//! prints is kept within a bound.

use super::Admin;
use super::extract::{Path, Query};
use super::routes::{problem, unknown_instance};
use super::types::Problem;
use axum::body::Body;
use axum::extract::{Request, State};
use axum::http::{HeaderMap, HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Json, Router};
use hyper::upgrade::OnUpgrade;
use hyper_util::rt::TokioIo;
use serde::Deserialize;
use std::io;
use std::sync::Arc;
use thaw_node::remote::exec::{Attached, Exec, ExecProblem};
use thaw_node::remote::{ExecRequest, ExecState, Execs, Next, READERS_MAX, Reader, Stream};
use thaw_node::service::Service;
use thaw_node::to_its_end::to_its_end;
use thaw_sandbox::SignalTo;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, split};

/// What the `Upgrade` header says.
pub const EXEC_PROTOCOL: &str = "thaw-exec";
/// Most bytes of a request for a process.
const REQUEST_MAX: usize = 1 << 20;
/// Most bytes of a frame of a client.
const FRAME_MAX: u32 = 1 << 20;

/// What a frame is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Frame {
    /// From the client: bytes for standard input; none: it is at its end.
    Stdin = 0,
    /// From the client: rows and columns of its window, a `u16` each, the higher byte first.
    Window = 1,
    /// From the client: the number of a signal for the process' group, a byte.
    Signal = 2,
    /// To the client: bytes of standard output, or of the terminal.
    Stdout = 16,
    /// To the client: bytes of standard error.
    Stderr = 17,
    /// To the client: so many bytes were printed and not kept, a `u64`, the highest byte first.
    Lost = 18,
    /// To the client: the process' number on this node, a `u64`, the highest byte first. The first
    /// frame.
    Started = 19,
    /// To the client: exit code and signal, a byte each. The last frame.
    Ended = 20,
}

impl Frame {
    /// What a client may send.
    fn of_client(byte: u8) -> Option<Self> {
        match byte {
            0 => Some(Self::Stdin),
            1 => Some(Self::Window),
            2 => Some(Self::Signal),
            _ => None,
        }
    }

    /// The frame as it is sent.
    pub fn with(self, bytes: &[u8]) -> Vec<u8> {
        let mut frame = vec![self as u8, 0, 0, 0];
        frame.extend_from_slice(&(bytes.len() as u32).to_be_bytes());
        frame.extend_from_slice(bytes);
        frame
    }
}

/// Their paths.
pub(super) fn routes() -> Router<Admin> {
    Router::new()
        .route("/instances/{id}/exec", post(start))
        .route("/instances/{id}/execs", get(list))
        .route("/instances/{id}/execs/{exec}", get(show))
        .route("/instances/{id}/execs/{exec}/attach", post(attach))
        .route("/instances/{id}/execs/{exec}/output", get(output))
        .route("/instances/{id}/execs/{exec}/signal", post(signal))
}

async fn start(State(admin): State<Admin>, Path(id): Path<u64>, mut request: Request) -> Response {
    let Some(service) = admin.services.service_of(id) else { return unknown_instance(id) };
    let upgrade = wants_upgrade(request.headers()).then(|| hyper::upgrade::on(&mut request));
    let body = axum::body::to_bytes(request.into_body(), REQUEST_MAX).await;
    let wanted = match body.map(|body| serde_json::from_slice::<ExecRequest>(&body)) {
        Ok(Ok(wanted)) => wanted,
        Ok(Err(error)) => return problem(StatusCode::BAD_REQUEST, "bad_exec", error),
        Err(error) => return problem(StatusCode::BAD_REQUEST, "bad_exec", error),
    };
    admin.sandboxes.used(id);
    // A client that goes away before it has begun is one that goes away after that: its input is at its
    // end, and so is the sandbox that is there for the process.
    to_its_end(begin(admin, service, id, wanted, upgrade)).await
}

/// Starts a process, and answers that it runs.
async fn begin(
    admin: Admin,
    service: Arc<Service>,
    id: u64,
    wanted: ExecRequest,
    upgrade: Option<OnUpgrade>,
) -> Response {
    match (service.exec(id, &wanted).await, upgrade) {
        (Ok((exec, reader)), upgrade) => {
            let leaving = Leaving::of(&wanted);
            if leaving == Leaving::EndsSandbox {
                admin.sandboxes.keep_without_timeout(id);
            }
            match upgrade {
                Some(upgrade) => switch(admin, id, (exec, reader, leaving), upgrade),
                None => leave(admin, id, (exec, reader, leaving)),
            }
        }
        (Err(error), _) => {
            if wanted.ends_sandbox {
                admin.sandboxes.end_instance(id);
            }
            let status = match error {
                ExecProblem::Wrong(_) => StatusCode::BAD_REQUEST,
                ExecProblem::Full(_) => StatusCode::TOO_MANY_REQUESTS,
                ExecProblem::Refused(_) | ExecProblem::NotRun(..) => StatusCode::CONFLICT,
            };
            let name = match error {
                ExecProblem::NotRun(_, 127) => Problem::PROGRAM_NOT_FOUND,
                ExecProblem::NotRun(..) => Problem::PROGRAM_NOT_EXECUTABLE,
                _ => "not_started",
            };
            problem(status, name, error)
        }
    }
}

fn wants_upgrade(headers: &HeaderMap) -> bool {
    headers.get(header::UPGRADE).is_some_and(|value| value == EXEC_PROTOCOL)
}

/// What a client that goes away does to the process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Leaving {
    /// It started the process with its own standard input, which is at its end now.
    EndsInput,
    /// It started the process for which the sandbox is there: the sandbox ends.
    EndsSandbox,
    /// The process is left to itself.
    ChangesNothing,
}

impl Leaving {
    /// That of the client that asks for a process.
    fn of(wanted: &ExecRequest) -> Self {
        match wanted {
            ExecRequest { ends_sandbox: true, .. } => Self::EndsSandbox,
            ExecRequest { stdin: true, .. } => Self::EndsInput,
            _ => Self::ChangesNothing,
        }
    }
}

/// Answers that a process runs, with which nobody stays.
fn leave(
    admin: Admin,
    instance: u64,
    (exec, mut reader, leaving): (Attached, Reader, Leaving),
) -> Response {
    let info = exec.info();
    if leaving == Leaving::EndsSandbox {
        let exec = Arc::clone(&exec);
        tokio::spawn(async move {
            while reader.next().await != Next::End {}
            end_with(&admin, instance, &exec);
        });
    }
    Json(info).into_response()
}

/// Ends the sandbox of a process that it was there for. It may sleep on, or live on, where nobody knows
/// what became of the process.
fn end_with(admin: &Admin, instance: u64, exec: &Exec) {
    if !exec.is_cut_off() || !admin.services.may_have_instance(instance) {
        admin.sandboxes.end_instance(instance);
    }
}

/// Answers that the connection carries the streams of a process from now on.
fn switch(
    admin: Admin,
    instance: u64,
    (exec, reader, leaving): (Attached, Reader, Leaving),
    upgrade: OnUpgrade,
) -> Response {
    tokio::spawn(async move {
        if let Ok(upgraded) = upgrade.await {
            // The client finds the name free when it hears of the end.
            let ended = || {
                if leaving == Leaving::EndsSandbox {
                    end_with(&admin, instance, &exec);
                }
            };
            // A client that goes away is no failure.
            let _ = carry(&exec, reader, TokioIo::new(upgraded), ended).await;
        }
        match leaving {
            // A terminal has no end, and stays as it is.
            Leaving::EndsInput => exec.write(b"").await,
            Leaving::EndsSandbox => end_with(&admin, instance, &exec),
            Leaving::ChangesNothing => {}
        }
        admin.sandboxes.used(instance);
    });
    let mut response = StatusCode::SWITCHING_PROTOCOLS.into_response();
    let headers = response.headers_mut();
    headers.insert(header::CONNECTION, HeaderValue::from_static("upgrade"));
    headers.insert(header::UPGRADE, HeaderValue::from_static(EXEC_PROTOCOL));
    response
}

/// Carries the streams of a process until it has ended, or the client has gone.
async fn carry(
    exec: &Attached,
    output: Reader,
    stream: impl AsyncRead + AsyncWrite,
    ended: impl FnOnce(),
) -> io::Result<()> {
    let (reader, writer) = split(stream);
    tokio::select! {
        done = show_output(exec, output, writer, ended) => done,
        gone = take_input(exec, reader) => gone,
    }
}

async fn show_output(
    exec: &Exec,
    mut output: Reader,
    mut to: impl AsyncWrite + Unpin,
    ended: impl FnOnce(),
) -> io::Result<()> {
    to.write_all(&Frame::Started.with(&exec.id().to_be_bytes())).await?;
    loop {
        let frame = match output.next().await {
            Next::Bytes(Stream::Stdout, bytes) => Frame::Stdout.with(&bytes),
            Next::Bytes(Stream::Stderr, bytes) => Frame::Stderr.with(&bytes),
            Next::Lost(bytes) => Frame::Lost.with(&bytes.to_be_bytes()),
            Next::End => break,
        };
        to.write_all(&frame).await?;
    }
    let (code, signal) = match exec.ended().await {
        ExecState::Ended { code, signal } => (code.unwrap_or(0), signal.unwrap_or(0)),
        _ => (0, 9),
    };
    ended();
    to.write_all(&Frame::Ended.with(&[code, signal])).await?;
    to.shutdown().await
}

/// Takes what a client sends. An error ends the connection: it has gone, or sends nonsense.
async fn take_input(exec: &Attached, mut from: impl AsyncRead + Unpin) -> io::Result<()> {
    loop {
        let mut head = [0; 8];
        from.read_exact(&mut head).await?;
        let [kind, _, _, _, len @ ..] = head;
        let len = u32::from_be_bytes(len);
        let (Some(kind), true) = (Frame::of_client(kind), len <= FRAME_MAX) else {
            return Err(io::ErrorKind::InvalidData.into());
        };
        let mut bytes = vec![0; len as usize];
        from.read_exact(&mut bytes).await?;
        match (kind, &bytes[..]) {
            (Frame::Stdin, bytes) => exec.write(bytes).await,
            (Frame::Window, &[a, b, c, d]) => {
                exec.resize((u16::from_be_bytes([a, b]), u16::from_be_bytes([c, d])));
            }
            (Frame::Signal, &[number]) => {
                // One that is none does nothing.
                let _ = exec.signal(number.into(), SignalTo::Group);
            }
            _ => return Err(io::ErrorKind::InvalidData.into()),
        }
    }
}

/// Finds the processes of an instance, which may be asleep, or says that there is none.
fn execs_of(admin: &Admin, id: u64) -> Result<Arc<Execs>, Box<Response>> {
    let execs = admin.services.service_of(id).and_then(|service| service.execs_of(id));
    execs.ok_or_else(|| Box::new(unknown_instance(id)))
}

fn unknown_exec(id: u64, exec: u64) -> Response {
    let reason = format!("instance {id} has no process {exec} that was started from outside");
    problem(StatusCode::NOT_FOUND, "unknown_exec", reason)
}

/// Finds a process, or says that there is none.
fn find(admin: &Admin, id: u64, exec: u64) -> Result<Arc<Exec>, Box<Response>> {
    execs_of(admin, id)?.find(exec).ok_or_else(|| Box::new(unknown_exec(id, exec)))
}

/// Attaches to a process, or says that there is none.
async fn attach_to(admin: &Admin, id: u64, exec: u64) -> Result<Attached, Box<Response>> {
    let service = admin.services.service_of(id).ok_or_else(|| Box::new(unknown_instance(id)))?;
    let found = service.attach(id, exec).await;
    let found =
        found.map_err(|why| Box::new(problem(StatusCode::CONFLICT, "no_processes", why)))?;
    found.ok_or_else(|| Box::new(unknown_exec(id, exec)))
}

async fn list(State(admin): State<Admin>, Path(id): Path<u64>) -> Response {
    match execs_of(&admin, id) {
        Ok(execs) => Json(execs.list()).into_response(),
        Err(refused) => *refused,
    }
}

async fn show(State(admin): State<Admin>, Path((id, exec)): Path<(u64, u64)>) -> Response {
    match find(&admin, id, exec) {
        Ok(exec) => Json(exec.info()).into_response(),
        Err(refused) => *refused,
    }
}

fn too_many() -> Response {
    let reason = format!("{READERS_MAX} clients are attached to it already; end one");
    problem(StatusCode::TOO_MANY_REQUESTS, "too_many", reason)
}

async fn attach(
    State(admin): State<Admin>,
    Path((id, exec)): Path<(u64, u64)>,
    mut request: Request,
) -> Response {
    if !wants_upgrade(request.headers()) {
        let reason = format!("ask with `Connection: Upgrade` and `Upgrade: {EXEC_PROTOCOL}`");
        return problem(StatusCode::UPGRADE_REQUIRED, "no_upgrade", reason);
    }
    match attach_to(&admin, id, exec).await {
        Ok(exec) => {
            let Some(reader) = exec.output.reader() else { return too_many() };
            let upgrade = hyper::upgrade::on(&mut request);
            admin.sandboxes.used(id);
            switch(admin, id, (exec, reader, Leaving::ChangesNothing), upgrade)
        }
        Err(refused) => *refused,
    }
}

async fn output(State(admin): State<Admin>, Path((id, exec)): Path<(u64, u64)>) -> Response {
    let exec = match find(&admin, id, exec) {
        Ok(exec) => exec,
        Err(refused) => return *refused,
    };
    let mut kept = Vec::new();
    let Some(reader) = exec.output.reader() else { return too_many() };
    while let Some(next) = reader.try_next() {
        match next {
            Next::Bytes(_, bytes) => kept.extend_from_slice(&bytes),
            Next::Lost(_) => {}
            Next::End => break,
        }
    }
    let kind = HeaderValue::from_static("application/octet-stream");
    ([(header::CONTENT_TYPE, kind)], Body::from(kept)).into_response()
}

#[derive(Deserialize)]
struct SignalQuery {
    number: u32,
}

async fn signal(
    State(admin): State<Admin>,
    Path((id, exec)): Path<(u64, u64)>,
    Query(query): Query<SignalQuery>,
) -> Response {
    match attach_to(&admin, id, exec).await {
        Ok(exec) => match exec.signal(query.number, SignalTo::Group) {
            Ok(()) => Json(exec.info()).into_response(),
            Err(reason) => problem(StatusCode::BAD_REQUEST, "no_signal", reason),
        },
        Err(refused) => *refused,
    }
}
