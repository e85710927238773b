//! envd's service `process.Process`: processes in a sandbox.

use super::backend::{Output, Piece, Process, WantedProcess};
use super::connect::{
    Messages, answer_stream, answer_unary, client_timeout, envelope, last_envelope, read_unary,
    refuse_stream,
};
use super::filesystem::absolute;
use super::messages::{self, ProcessRequest, Selector, StartRequest, StreamInputRequest};
use super::problem::{Kind, Problem};
use super::serve::{Target, closing, header};
use super::{E2b, StreamPlace};
use axum::body::Body;
use axum::extract::State;
use axum::http::{HeaderMap, header as names};
use axum::response::Response;
use axum::routing::post;
use axum::{Extension, Router};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use serde_json::{Value, json};
use std::io;
use std::sync::Arc;
use std::time::Duration;
use thaw_node::to_its_end::to_its_end;
use tokio::sync::mpsc;
use tokio::time::{Instant, sleep, sleep_until, timeout};
use tokio_stream::wrappers::ReceiverStream;

/// How often a stream shows that it is there, unless the client says how often.
const KEEP_ALIVE: Duration = Duration::from_secs(90);
/// How long the answer to a request that kills a process waits for its end.
const KILL_PATIENCE: Duration = Duration::from_secs(5);
/// The signal that ends a process.
const SIGKILL: u32 = 9;

type Asked = (State<Arc<E2b>>, Extension<Target>, HeaderMap, Body);

/// Its paths.
pub(super) fn routes() -> Router<Arc<E2b>> {
    Router::new()
        .route("/process.Process/Start", post(start))
        .route("/process.Process/Connect", post(connect))
        .route("/process.Process/StreamInput", post(stream_input))
        .route("/process.Process/List", post(list))
        .route("/process.Process/SendInput", post(send_input))
        .route("/process.Process/SendSignal", post(send_signal))
        .route("/process.Process/CloseStdin", post(close_stdin))
        .route("/process.Process/Update", post(update))
}

/// The user that a client wants to be: the name in `Authorization: Basic`, with no password.
///
/// # Errors
/// The header makes no sense.
pub(super) fn user(headers: &HeaderMap) -> Result<Option<String>, Problem> {
    let Some(value) = header(headers, names::AUTHORIZATION.as_str()) else { return Ok(None) };
    let decoded = value.strip_prefix("Basic ").and_then(|text| STANDARD.decode(text).ok());
    let text = decoded.and_then(|bytes| String::from_utf8(bytes).ok());
    let name = text.as_deref().and_then(|text| text.strip_suffix(':'));
    match name {
        Some("") => Ok(None),
        Some(name) => Ok(Some(name.to_owned())),
        None => Err(Problem::invalid("`Authorization` is not `Basic` with the name of a user")),
    }
}

/// Most bytes of a tag.
const TAG_MAX: usize = 256;
/// Most arguments and variables of a process.
const WORDS_MAX: usize = 4096;

/// One process of a sandbox.
async fn find(
    e2b: &E2b,
    target: &Target,
    selector: &Selector,
) -> Result<Arc<dyn Process>, Problem> {
    let is_meant = |process: &Arc<dyn Process>| match (&selector.pid, &selector.tag) {
        (Some(pid), _) => process.pid() == *pid,
        (None, Some(tag)) => process.wanted().tag.as_ref() == Some(tag),
        (None, None) => false,
    };
    let found = e2b.backend.processes(&target.id).await?.into_iter().find(is_meant);
    found.ok_or_else(|| {
        let which = match (&selector.pid, &selector.tag) {
            (Some(pid), _) => format!("number {pid}"),
            (None, Some(tag)) => format!("tag {tag:?}"),
            (None, None) => return Problem::invalid("say which process: `pid` or `tag`"),
        };
        Problem::new(
            Kind::NotFound,
            format!("no process with {which} that was started by this API runs in the sandbox"),
        )
    })
}

fn wanted(
    request: StartRequest,
    user: Option<String>,
    target: &Target,
) -> Result<WantedProcess, Problem> {
    check_size(&request)?;
    let mut argv = vec![request.process.cmd];
    argv.extend(request.process.args);
    let mut envs = target.record.environment(&target.id);
    envs.extend(request.process.envs);
    let cwd = request.process.cwd.filter(|cwd| !cwd.is_empty());
    let cwd = cwd.or_else(|| target.record.defaults.directory.clone());
    Ok(WantedProcess {
        argv,
        envs,
        cwd: cwd.map(|cwd| absolute(&target.directory, &cwd)).transpose()?,
        user: target.user(user),
        terminal: request.pty.map(messages::Pty::rows_and_columns),
        stdin: request.stdin.unwrap_or(true),
        tag: request.tag,
    })
}

/// What is wanted of a process is kept as long as it runs, and shown in lists.
fn check_size(request: &StartRequest) -> Result<(), Problem> {
    let process = &request.process;
    if request.tag.as_ref().is_some_and(|tag| tag.len() > TAG_MAX) {
        return Err(Problem::invalid(format!("`tag` is longer than {TAG_MAX} bytes")));
    }
    if process.args.len() + process.envs.len() > WORDS_MAX {
        return Err(Problem::invalid(format!(
            "there are more than {WORDS_MAX} arguments and variables"
        )));
    }
    Ok(())
}

async fn start(
    State(e2b): State<Arc<E2b>>,
    Extension(target): Extension<Target>,
    headers: HeaderMap,
    body: Body,
) -> Response {
    let started = async {
        let request = one_message(&headers, body).await?;
        let place = e2b.streams.enter(&target.record.owner)?;
        let timeout = client_timeout(&headers)?;
        let wanted = wanted(request, user(&headers)?, &target)?;
        // Its time is over at its end, also if the client does not wait for its beginning.
        let started = to_its_end(async move {
            let (process, output) = e2b.backend.start(&target.id, wanted).await?;
            let deadline = timeout.map(|timeout| Instant::now() + timeout);
            if let Some(deadline) = deadline {
                tokio::spawn(end_at(process.clone(), deadline));
            }
            Ok((process, output, deadline))
        });
        Ok((place, started.await?))
    };
    match started.await {
        // The client is told that its time is over, not how the process has ended then.
        Ok((place, (process, output, deadline))) => {
            stream(Following { process, output, deadline, every: every(&headers), place })
        }
        Err(problem) => refuse_stream(problem),
    }
}

async fn connect(
    State(e2b): State<Arc<E2b>>,
    Extension(target): Extension<Target>,
    headers: HeaderMap,
    body: Body,
) -> Response {
    let found = async {
        let request: ProcessRequest = one_message(&headers, body).await?;
        let place = e2b.streams.enter(&target.record.owner)?;
        let timeout = client_timeout(&headers)?;
        let process = find(&e2b, &target, &request.process).await?;
        let output = process.follow()?;
        Ok((place, timeout, process, output))
    };
    match found.await {
        Ok((place, timeout, process, output)) => {
            let deadline = timeout.map(|timeout| Instant::now() + timeout);
            stream(Following { process, output, deadline, every: every(&headers), place })
        }
        Err(problem) => refuse_stream(problem),
    }
}

/// The one message of a request whose answer is a stream.
pub(super) async fn one_message<T: serde::de::DeserializeOwned>(
    headers: &HeaderMap,
    body: Body,
) -> Result<T, Problem> {
    let mut messages = Messages::new(headers, body)?;
    let message = messages.next().await?;
    let message = message.ok_or_else(|| Problem::invalid("the request has no message"))?;
    match messages.next::<Value>().await? {
        Some(_) => Err(Problem::invalid("the request has more than one message")),
        None => Ok(message),
    }
}

/// How often the client wants to see that the stream is there.
pub(super) fn every(headers: &HeaderMap) -> Duration {
    let seconds = header(headers, "keepalive-ping-interval").and_then(|text| text.parse().ok());
    seconds.map_or(KEEP_ALIVE, |seconds: u64| Duration::from_secs(seconds.clamp(1, 3600)))
}

/// Ends a process whose time is over. The time is that of the command: a client that goes away
/// before does not end it.
async fn end_at(process: Arc<dyn Process>, deadline: Instant) {
    tokio::select! {
        () = process.ended() => {}
        () = sleep_until(deadline) => {
            // If the sandbox takes no message, it has ended.
            let _ = process.signal(SIGKILL);
        }
    }
}

/// A process that a client follows.
struct Following {
    process: Arc<dyn Process>,
    output: Box<dyn Output>,
    deadline: Option<Instant>,
    every: Duration,
    place: StreamPlace,
}

/// Answers with the events of a process.
fn stream(following: Following) -> Response {
    let (sender, receiver) = mpsc::channel::<Result<Vec<u8>, io::Error>>(4);
    tokio::spawn(async move {
        // Whoever has gone away needs no more.
        tokio::select! {
            () = sender.closed() => {}
            _ = follow(following, &sender) => {}
        }
    });
    answer_stream(Body::from_stream(ReceiverStream::new(receiver)))
}

/// Where a stream goes; an error ends the connection before the stream has ended.
pub(super) type Events = mpsc::Sender<Result<Vec<u8>, io::Error>>;

/// Sends one message; none: the client has gone.
pub(super) async fn send(to: &Events, message: Value) -> Option<()> {
    to.send(Ok(envelope(&message))).await.ok()
}

async fn follow(following: Following, to: &Events) -> Option<()> {
    let Following { process, mut output, deadline, every, place } = following;
    let bytes_of = if process.wanted().terminal.is_some() { "pty" } else { "stdout" };
    send(to, messages::started(process.pid())).await?;
    let outcome = loop {
        let late = async {
            match deadline {
                Some(deadline) => sleep_until(deadline).await,
                None => std::future::pending().await,
            }
        };
        let piece = tokio::select! {
            biased;
            () = late => break Err(Problem::new(Kind::Late, "the time that the client gave is over")),
            piece = output.next() => piece,
            () = sleep(every) => {
                send(to, messages::keep_alive()).await?;
                continue;
            }
        };
        match piece {
            Piece::Stdout(bytes) => send(to, messages::printed(bytes_of, &bytes)).await?,
            Piece::Stderr(bytes) => send(to, messages::printed("stderr", &bytes)).await?,
            Piece::Lost(bytes) => break Err(lost(bytes)),
            // As with E2B: the SDKs ask whether the sandbox is there when they lose a connection.
            Piece::Gone => {
                let gone = io::Error::other("the sandbox has ended");
                return to.send(Err(gone)).await.ok();
            }
            Piece::End(ended) => {
                send(to, messages::ended(ended)).await?;
                break Ok(());
            }
        }
    };
    let sent = to.send(Ok(last_envelope(outcome))).await;
    drop(place);
    sent.ok()
}

fn lost(bytes: u64) -> Problem {
    Problem::new(
        Kind::DataLoss,
        format!(
            "{bytes} bytes were printed before anybody read, and are not kept; connect to the \
             process again for what follows"
        ),
    )
}

async fn stream_input(
    State(e2b): State<Arc<E2b>>,
    Extension(target): Extension<Target>,
    headers: HeaderMap,
    body: Body,
) -> Response {
    let written = async {
        let _place = e2b.streams.enter(&target.record.owner)?;
        let mut messages = Messages::new(&headers, body)?;
        let first: Option<StreamInputRequest> = messages.next().await?;
        let start = first.and_then(|first| first.start);
        let start = start.ok_or_else(|| Problem::invalid("the first message is not `start`"))?;
        let process = find(&e2b, &target, &start.process).await?;
        while let Some(message) = messages.next::<StreamInputRequest>().await? {
            // Other messages only keep the stream.
            if let Some(data) = message.data {
                write(&*process, &data.input.bytes()?).await;
            }
        }
        Ok(())
    };
    match written.await {
        Ok(()) => answer_stream(Body::from([envelope(&json!({})), last_envelope(Ok(()))].concat())),
        // There may be more to come.
        Err(problem) => closing(refuse_stream(problem)),
    }
}

/// Passes bytes to a process; none are none, and not the end.
async fn write(process: &dyn Process, bytes: &[u8]) {
    if !bytes.is_empty() {
        process.write(bytes).await;
    }
}

async fn list((State(e2b), Extension(target), headers, body): Asked) -> Response {
    let listed = async {
        read_unary::<Value>(&headers, body).await?;
        let processes = e2b.backend.processes(&target.id).await?;
        let shown = processes.iter().map(|one| messages::process_info(one.pid(), &one.wanted()));
        Ok(json!({"processes": shown.collect::<Vec<_>>()}))
    };
    answer_unary(listed.await)
}

/// The process that a unary request names, and the request.
async fn named(
    (State(e2b), Extension(target), headers, body): Asked,
) -> Result<(Arc<dyn Process>, ProcessRequest), Problem> {
    let request: ProcessRequest = read_unary(&headers, body).await?;
    let process = find(&e2b, &target, &request.process).await?;
    Ok((process, request))
}

async fn send_input(asked: Asked) -> Response {
    let sent = async {
        let (process, request) = named(asked).await?;
        write(&*process, &request.input.bytes()?).await;
        Ok(json!({}))
    };
    answer_unary(sent.await)
}

async fn close_stdin(asked: Asked) -> Response {
    let closed = async {
        let (process, _) = named(asked).await?;
        if process.wanted().terminal.is_some() {
            return Err(Problem::invalid(
                "a terminal has no end that could be closed; send it the byte 4 (Ctrl+D)",
            ));
        }
        process.close_stdin().await;
        Ok(json!({}))
    };
    answer_unary(closed.await)
}

async fn send_signal(asked: Asked) -> Response {
    let sent = async {
        let (process, request) = named(asked).await?;
        let number = messages::signal(&request.signal)?;
        process.signal(number)?;
        if number == SIGKILL {
            // Whoever looks for it next is not to find it.
            let _ = timeout(KILL_PATIENCE, process.ended()).await;
        }
        Ok(json!({}))
    };
    answer_unary(sent.await)
}

async fn update(asked: Asked) -> Response {
    let updated = async {
        let (process, request) = named(asked).await?;
        if process.wanted().terminal.is_none() {
            return Err(Problem::invalid("the process has no terminal, so it has no size"));
        }
        if let Some(pty) = request.pty {
            process.resize(pty.rows_and_columns());
        }
        Ok(json!({}))
    };
    answer_unary(updated.await)
}
