//! Calling a function through the gateway, as any client would, and saying how
//! its boot went.

use super::Admin;
use super::extract::{Path, Query};
use super::routes::{problem, unknown_function, unknown_instance};
use axum::body::Body;
use axum::extract::{Request, State};
use axum::http::header::{CONNECTION, CONTENT_LENGTH, HOST, TRANSFER_ENCODING};
use axum::http::{HeaderValue, Method, StatusCode, Uri};
use axum::response::{IntoResponse, Response};
use http_body_util::{BodyExt, StreamBody};
use hyper_util::rt::TokioIo;
use serde::Deserialize;
use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;
use thaw_home::clock::monotonic_ns;
use thaw_home::config::Protocol;
use thaw_http::call::call;
use thaw_http::message;
use thaw_node::boots::BootRecord;
use thaw_node::edge::Addresses;
use thaw_node::gateway::own_connection;
use thaw_node::service::Service;
use tokio::net::{TcpStream, UnixStream};
use tokio::sync::mpsc;
use tokio::time::{Instant, sleep, timeout};
use tokio_stream::wrappers::ReceiverStream;

/// Header of the answer with the boot's phases as JSON, see
/// [`Phases`](thaw_node::boots::Phases); only if asked for and if an instance was booted.
pub const PHASES_HEADER: &str = "x-thaw-phases";
/// Header of the answer that says what the instance was booted from (the name of a
/// [`BootKind`](thaw_node::boots::BootKind)), or that it was `reused`.
pub const BOOT_HEADER: &str = "x-thaw-boot";

/// How long the sandbox may take to report the phases of a boot.
const PHASES_PATIENCE: Duration = Duration::from_millis(500);
/// How often it is looked whether they are there.
const PHASES_LOOK: Duration = Duration::from_millis(5);

/// How long the rest of a body is read that the function does not want.
const REST_PATIENCE: Duration = Duration::from_secs(30);

/// Why there is no response.
type Unanswered = Box<dyn std::error::Error + Send + Sync>;

#[derive(Deserialize)]
pub(super) struct InvokeQuery {
    /// Method of the request; default: `POST` with a body, `GET` without.
    method: Option<String>,
    /// Path and query of the request.
    #[serde(default = "root")]
    path: String,
    /// Say how the boot went.
    #[serde(default)]
    timings: bool,
    /// The instance that is to answer.
    instance: Option<u64>,
    /// Queue the request, and do not wait for the function.
    #[serde(default, rename = "async")]
    is_async: bool,
}

fn root() -> String {
    "/".to_owned()
}

pub(super) async fn invoke(
    State(admin): State<Admin>,
    Path(name): Path<String>,
    Query(query): Query<InvokeQuery>,
    request: Request,
) -> Response {
    let Some(service) = admin.services.route(&name) else { return unknown_function(&name) };
    let mut request = match translate(&name, &query, request) {
        Ok(request) => request,
        Err(reason) => return problem(StatusCode::BAD_REQUEST, "bad_request", reason),
    };
    if query.is_async {
        if let Some(reason) = no_queue(&service, &query) {
            return problem(StatusCode::CONFLICT, "not_queued", reason);
        }
        request.headers_mut().insert("prefer", HeaderValue::from_static("respond-async"));
    }
    if let Some(id) = query.instance {
        return invoke_instance(&admin, &name, id, request).await;
    }
    let asked_ns = monotonic_ns();
    match exchange(&admin, request).await {
        Ok((mut response, local)) => {
            if query.timings {
                match phases(&admin, local, asked_ns).await {
                    Some(boot) => {
                        let phases = serde_json::to_string(&boot.phases).unwrap_or_default();
                        if let Ok(value) = HeaderValue::from_str(&phases) {
                            response.headers_mut().insert(PHASES_HEADER, value);
                        }
                        response
                            .headers_mut()
                            .insert(BOOT_HEADER, HeaderValue::from_static(boot.kind.name()));
                    }
                    // An instance for a single request was booted for it, and has not said how.
                    None if service.is_single_use() => {}
                    None => {
                        response
                            .headers_mut()
                            .insert(BOOT_HEADER, HeaderValue::from_static("reused"));
                    }
                }
            }
            response
        }
        Err(error) => no_response(&name, &*error),
    }
}

/// Why a request to a function cannot be queued, if so.
fn no_queue(service: &Service, query: &InvokeQuery) -> Option<String> {
    if query.instance.is_some() || query.timings {
        return Some("an asynchronous invocation has no instance and no timings yet".to_owned());
    }
    let why = format!(
        "`{}` takes no asynchronous invocations; add [async] to its thaw.toml and build it",
        service.name()
    );
    service.config().r#async.is_none().then_some(why)
}

fn no_response(name: &str, error: &dyn std::error::Error) -> Response {
    let reason = format!(
        "the function's response could not be read ({error}); `thaw logs {name}` may say why"
    );
    problem(StatusCode::BAD_GATEWAY, "no_response", reason)
}

/// One request to one instance, past the gateway.
async fn invoke_instance(admin: &Admin, name: &str, id: u64, request: Request) -> Response {
    let service = admin.services.service_of(id).filter(|service| service.name().as_str() == name);
    let Some(service) = service else { return unknown_instance(id) };
    let refused = |error: io::Error| {
        let reason = format!("the host refused a socket ({error}); raise the limit of open files");
        problem(StatusCode::SERVICE_UNAVAILABLE, "no_socket", reason)
    };
    let (ours, client) = match own_connection(admin.shared()) {
        Ok(ends) => ends,
        Err(error) => return refused(error),
    };
    if let Err(reason) = service.wake_if_asleep(Some(id)).await {
        return problem(StatusCode::SERVICE_UNAVAILABLE, "cannot_wake", reason);
    }
    if let Err(reason) = service.place_at(id, &client, Box::new(|_, _| {})).await {
        return problem(StatusCode::CONFLICT, "not_placed", reason);
    }
    // So that the end of the instance is the end of the connection.
    drop(client);
    let answer = async {
        let stream = UnixStream::from_std(ours)?;
        match service.config().protocol {
            Protocol::Http1 => send(TokioIo::new(stream), request).await,
            Protocol::H2c => send_http2(stream, request, name).await,
        }
    };
    match timeout(service.config().limits.timeout.0, answer).await {
        Ok(Ok(response)) => response,
        Ok(Err(error)) => no_response(name, &*error),
        Err(elapsed) => no_response(name, &elapsed),
    }
}

/// Makes the request to the function from the request to the API.
fn translate(name: &str, query: &InvokeQuery, request: Request) -> Result<Request, String> {
    let (mut parts, body) = request.into_parts();
    let has_body = parts.headers.get(CONTENT_LENGTH).is_some_and(|length| length != "0")
        || parts.headers.contains_key(TRANSFER_ENCODING);
    parts.method = match &query.method {
        Some(method) => method.parse().map_err(|_| format!("`{method}` is not an HTTP method"))?,
        None if has_body => Method::POST,
        None => Method::GET,
    };
    let path = match query.path.starts_with('/') {
        true => query.path.clone(),
        false => format!("/{}", query.path),
    };
    parts.uri = path.parse::<Uri>().map_err(|_| format!("`{path}` is not a path"))?;
    parts.headers.insert(HOST, HeaderValue::from_str(name).map_err(|error| error.to_string())?);
    parts.headers.insert(CONNECTION, HeaderValue::from_static("close"));
    let body = if has_body { read_to_its_end(body) } else { body };
    Ok(Request::from_parts(parts, body))
}

/// The same body, which is read to its end even if the function has answered and wants no more: a
/// client that still sends it would find the connection closed, and not read the answer.
fn read_to_its_end(mut body: Body) -> Body {
    let (to_function, wanted) = mpsc::channel(1);
    tokio::spawn(async move {
        while let Some(frame) = body.frame().await {
            if to_function.send(frame).await.is_err() {
                break;
            }
        }
        let rest = async { while let Some(Ok(_)) = body.frame().await {} };
        // A client that is slower loses the answer.
        let _ = timeout(REST_PATIENCE, rest).await;
    });
    Body::new(StreamBody::new(ReceiverStream::new(wanted)))
}

/// One request over a connection of its own, whose local address tells it
/// from all others.
async fn exchange(admin: &Admin, request: Request) -> Result<(Response, SocketAddr), Unanswered> {
    let stream = TcpStream::connect(admin.gateway).await?;
    stream.set_nodelay(true)?;
    let local = stream.local_addr()?;
    let addresses = Addresses { client: local, gateway: stream.peer_addr()? };
    // The gateway looks when the head is there. What comes later it has judged before.
    let _trusted = admin.shared().edge().operators().trust(addresses);
    Ok((send(TokioIo::new(stream), request).await?, local))
}

/// One request over a connection.
async fn send<S>(stream: S, request: Request) -> Result<Response, Unanswered>
where
    S: hyper::rt::Read + hyper::rt::Write + Unpin + Send + 'static,
{
    let stream = UntilAnswered { stream, takes_more: true };
    let (mut sender, connection) = hyper::client::conn::http1::handshake::<_, Body>(stream).await?;
    tokio::spawn(connection);
    let response = sender.send_request(request).await?;
    let mut response = response.map(Body::new).into_response();
    response.headers_mut().remove(CONNECTION);
    Ok(response)
}

/// The same by HTTP/2.
async fn send_http2(
    stream: UnixStream,
    request: Request,
    name: &str,
) -> Result<Response, Unanswered> {
    let (mut head, body) = request.into_parts();
    message::to_http2(&mut head, name)?;
    let response = call(stream, Request::from_parts(head, body)).await?;
    Ok(response.map(Body::new).into_response())
}

/// A connection whose peer may answer, and close it, before it has read all of the request: what is
/// written after that goes nowhere, so that the answer can be read.
struct UntilAnswered<S> {
    stream: S,
    takes_more: bool,
}

impl<S: Unpin> UntilAnswered<S> {
    fn write<T>(
        &mut self,
        written: T,
        write: impl FnOnce(Pin<&mut S>) -> Poll<io::Result<T>>,
    ) -> Poll<io::Result<T>> {
        use io::ErrorKind::{BrokenPipe, ConnectionReset, NotConnected};
        if !self.takes_more {
            return Poll::Ready(Ok(written));
        }
        match write(Pin::new(&mut self.stream)) {
            Poll::Ready(Err(error))
                if matches!(error.kind(), BrokenPipe | ConnectionReset | NotConnected) =>
            {
                self.takes_more = false;
                Poll::Ready(Ok(written))
            }
            outcome => outcome,
        }
    }
}

impl<S: hyper::rt::Read + Unpin> hyper::rt::Read for UntilAnswered<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: hyper::rt::ReadBufCursor<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(context, buffer)
    }
}

impl<S: hyper::rt::Write + Unpin> hyper::rt::Write for UntilAnswered<S> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        self.write(bytes.len(), |stream| stream.poll_write(context, bytes))
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.write((), |stream| stream.poll_flush(context))
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.write((), |stream| stream.poll_shutdown(context))
    }
}

/// The boot that the connection from `local` caused, once it is reported, if possible with the first byte of
/// the response: in a program of several processes another one may have sent that, and say so later.
async fn phases(admin: &Admin, local: SocketAddr, asked_ns: u64) -> Option<BootRecord> {
    let found = || admin.shared().boots().by_peer(local, asked_ns);
    let is_whole = |boot: &BootRecord| boot.phases.first_byte.is_some();
    let begun = Instant::now();
    loop {
        let boot = found();
        if boot.as_ref().is_some_and(is_whole) || begun.elapsed() >= PHASES_PATIENCE {
            return boot;
        }
        sleep(PHASES_LOOK).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    #[tokio::test]
    async fn an_answer_is_read_that_comes_before_the_body_was() {
        for _ in 0..20 {
            let (ours, mut theirs) = UnixStream::pair().unwrap();
            tokio::spawn(async move {
                theirs.read_exact(&mut [0; 16]).await.unwrap();
                let answer = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok";
                theirs.write_all(answer).await.unwrap();
            });
            let request = Request::post("/").body(Body::from(vec![b'x'; 8 << 20])).unwrap();
            let response = send(TokioIo::new(ours), request).await.unwrap();
            assert_eq!(response.status(), StatusCode::OK);
            let body = response.into_body().collect().await.unwrap().to_bytes();
            assert_eq!(&body[..], b"ok");
        }
        // No answer is an error still.
        let (ours, theirs) = UnixStream::pair().unwrap();
        drop(theirs);
        let request = Request::post("/").body(Body::from("x")).unwrap();
        assert!(send(TokioIo::new(ours), request).await.is_err());
    }
}
