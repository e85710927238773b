//! A liveness probe: one request to a program, on a connection of its own, or that connection alone.
//!
//! The sandbox is hostile: it may answer never, byte by byte, or without an end.

use super::live::Connector;
use crate::remote::ports::{PortProblem, PortStream};
use http_body_util::{BodyExt, Full};
use hyper::body::Bytes;
use hyper::header::{CONTENT_TYPE, HeaderMap, HeaderValue};
use hyper::{Request, Response};
use prost::encoding::{WireType, decode_key, decode_varint, skip_field, string};
use std::io::{self, IoSlice};
use std::os::fd::OwnedFd;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;
use thaw_home::config::{Liveness, ProbeKind, Protocol};
use thaw_http::call::{CallBody, call};
use thaw_http::message;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, ReadBuf};
use tokio::sync::OwnedSemaphorePermit;
use tokio::time::timeout;

/// Most bytes that are read of an answer.
const HEAD_MAX: usize = 64 * 1024;
/// What a program that serves gRPC is asked (`grpc/health/v1/health.proto`).
const CHECK: &str = "/grpc.health.v1.Health/Check";
/// `HealthCheckResponse.ServingStatus.SERVING`.
const SERVING: u64 = 1;
/// Bytes before each message: whether it is compressed, and its length.
const PREFIX: usize = 5;

/// Why a probe has failed: what stands in the log of its function.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum ProbeFailure {
    #[error("no answer within {} s", .0.as_secs_f64())]
    NoAnswer(Duration),
    #[error("status {0}")]
    Status(u16),
    #[error("nothing listens on port {0}")]
    Closed(u16),
    #[error("its sandbox makes no connection")]
    Unreachable,
    #[error("it closed the connection without an answer")]
    NothingSaid,
    #[error("its answer is not HTTP")]
    NotHttp,
    #[error("the head of its answer is longer than {} KiB", HEAD_MAX / 1024)]
    TooLong,
    #[error("its grpc-status is {0}")]
    CallFailed(u32),
    #[error("it says that it does not serve")]
    NotServing,
    #[error("its answer is not one to a health check of gRPC")]
    NotGrpc,
}

impl ProbeFailure {
    /// Whether the program has answered, and has said itself that it is not well.
    pub fn is_answer(&self) -> bool {
        matches!(self, Self::Status(_) | Self::CallFailed(_) | Self::NotServing)
    }
}

/// What is asked, and how.
pub(crate) struct Probe {
    pub connector: Arc<dyn Connector>,
    /// This end of the connection, and the sandbox's.
    pub sockets: (OwnedFd, OwnedFd),
    pub port: u16,
    /// The name by which clients ask for the function.
    pub host: String,
    pub question: Question,
    /// How long the answer may take.
    pub limit: Duration,
    /// Its share of the node's probes, and of its tenant's.
    pub places: (OwnedSemaphorePermit, OwnedSemaphorePermit),
}

/// What a program is asked.
pub(crate) enum Question {
    /// To have a connection.
    Connection,
    /// To answer a request for this path by HTTP/1.1.
    Path(String),
    /// The same by HTTP/2.
    PathByHttp2(String),
    /// Whether this service of gRPC serves.
    Service(String),
}

impl Question {
    pub fn of(liveness: &Liveness, protocol: Protocol) -> Self {
        let path = || liveness.path.as_ref().map(|path| path.0.clone()).unwrap_or_default();
        match (liveness.kind, protocol) {
            (ProbeKind::Tcp, _) => Self::Connection,
            (ProbeKind::Grpc, _) => Self::Service(liveness.service.clone().unwrap_or_default()),
            (ProbeKind::Http, Protocol::Http1) => Self::Path(path()),
            (ProbeKind::Http, Protocol::H2c) => Self::PathByHttp2(path()),
        }
    }
}

impl Probe {
    /// Asks the program; `sent` is called when the instance has the connection.
    pub async fn run(self, sent: impl FnOnce() + Send) -> Result<(), ProbeFailure> {
        let limit = self.limit;
        let answered = timeout(limit, self.ask(sent)).await;
        answered.unwrap_or(Err(ProbeFailure::NoAnswer(limit)))
    }

    async fn ask(self, sent: impl FnOnce() + Send) -> Result<(), ProbeFailure> {
        let Self { connector, sockets, port, host, question, places: (place, _share), .. } = self;
        let opened = PortStream::over(sockets, &*connector, port, place, sent).await;
        let stream = opened.map_err(|problem| match problem {
            PortProblem::Closed(port) => ProbeFailure::Closed(port),
            PortProblem::Full(_) | PortProblem::Refused(_) => ProbeFailure::Unreachable,
        })?;
        match question {
            Question::Connection => Ok(()),
            Question::Path(path) => ask_http1(stream, &host, &path).await,
            Question::PathByHttp2(path) => ask_http2(stream, &host, &path).await,
            Question::Service(service) => ask_grpc(stream, &host, &service).await,
        }
    }
}

async fn ask_http1(
    mut stream: impl AsyncRead + AsyncWrite + Unpin,
    host: &str,
    path: &str,
) -> Result<(), ProbeFailure> {
    let request = format!(
        "GET {path} HTTP/1.1\r\nHost: {host}\r\nUser-Agent: thaw-liveness\r\nAccept: */*\r\n\
         Connection: close\r\n\r\n"
    );
    // It may have answered without having read everything.
    let _ = stream.write_all(request.as_bytes()).await;
    judge(status(&mut stream).await?)
}

fn judge(status: u16) -> Result<(), ProbeFailure> {
    match status {
        200..400 => Ok(()),
        status => Err(ProbeFailure::Status(status)),
    }
}

async fn ask_http2(
    stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static,
    host: &str,
    path: &str,
) -> Result<(), ProbeFailure> {
    let request = Request::get(path).body(Full::default());
    let request = request.map_err(|_| ProbeFailure::NotHttp)?;
    judge(ask(stream, host, request).await?.status().as_u16())
}

/// Sends a request by HTTP/2 on a connection of which a bounded number of bytes is read.
async fn ask(
    stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static,
    host: &str,
    request: Request<Full<Bytes>>,
) -> Result<Response<CallBody>, ProbeFailure> {
    let (mut head, body) = request.into_parts();
    message::to_http2(&mut head, host).map_err(|_| ProbeFailure::NotHttp)?;
    head.headers.insert("user-agent", HeaderValue::from_static("thaw-liveness"));
    let bounded = Bounded { stream, left: HEAD_MAX };
    let answered = call(bounded, Request::from_parts(head, body)).await;
    answered.map_err(|_| ProbeFailure::NotHttp)
}

/// Asks whether a service serves; without a name, whether the server does.
async fn ask_grpc(
    stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static,
    host: &str,
    service: &str,
) -> Result<(), ProbeFailure> {
    let mut message = Vec::new();
    if !service.is_empty() {
        string::encode(1, &service.to_owned(), &mut message);
    }
    let mut body = vec![0; PREFIX];
    body[1..].copy_from_slice(&(message.len() as u32).to_be_bytes());
    body.extend(message);
    let mut request = Request::post(CHECK).body(Full::new(Bytes::from(body)));
    if let Ok(request) = &mut request {
        let headers = request.headers_mut();
        headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/grpc"));
    }
    let answer = ask(stream, host, request.map_err(|_| ProbeFailure::NotHttp)?).await?;
    judge(answer.status().as_u16())?;
    let (head, body) = answer.into_parts();
    let read = body.collect().await.map_err(|_| ProbeFailure::NotGrpc)?;
    let code = read.trailers().and_then(code_of).or_else(|| code_of(&head.headers));
    match code.ok_or(ProbeFailure::NotGrpc)? {
        0 if serving_status(&read.to_bytes()) == Some(SERVING) => Ok(()),
        0 => Err(ProbeFailure::NotServing),
        code => Err(ProbeFailure::CallFailed(code)),
    }
}

fn code_of(headers: &HeaderMap) -> Option<u32> {
    headers.get("grpc-status")?.to_str().ok()?.parse().ok()
}

/// The first field of a `HealthCheckResponse`; a field that is missing is 0.
fn serving_status(body: &[u8]) -> Option<u64> {
    let (prefix, mut message) = body.split_at_checked(PREFIX)?;
    let len = u32::from_be_bytes(prefix[1..].try_into().ok()?);
    if prefix[0] != 0 || message.len() != len as usize {
        return None;
    }
    let mut status = 0;
    while !message.is_empty() {
        match decode_key(&mut message).ok()? {
            (1, WireType::Varint) => status = decode_varint(&mut message).ok()?,
            (tag, kind) => skip_field(kind, tag, &mut message, Default::default()).ok()?,
        }
    }
    Some(status)
}

/// A connection of which only so many bytes are read.
struct Bounded<S> {
    stream: S,
    left: usize,
}

impl<S: AsyncRead + Unpin> AsyncRead for Bounded<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = buffer.filled().len();
        ready!(Pin::new(&mut self.stream).poll_read(context, buffer))?;
        let count = buffer.filled().len() - before;
        let left = self.left.checked_sub(count);
        self.left = left.ok_or_else(|| io::Error::other(ProbeFailure::TooLong))?;
        Poll::Ready(Ok(()))
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Bounded<S> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(context, bytes)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write_vectored(context, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}

/// Reads the head of an answer, behind those that announce it (RFC 9110, section 15.2); its status.
async fn status(stream: &mut (impl AsyncRead + Unpin)) -> Result<u16, ProbeFailure> {
    let mut bytes = Vec::new();
    let mut begin = 0;
    // No byte is looked at twice, however few come at a time.
    let mut seen = 0;
    loop {
        while let Some(end) = head_end(&bytes, seen) {
            match status_of(&bytes[begin..end]).ok_or(ProbeFailure::NotHttp)? {
                // To switch protocols is a last answer.
                100 | 102..200 => (begin, seen) = (end, end),
                status => return Ok(status),
            }
        }
        seen = bytes.len().saturating_sub(2).max(begin);
        if bytes.len() >= HEAD_MAX {
            return Err(ProbeFailure::TooLong);
        }
        match read_some(stream, &mut bytes).await {
            Ok(0) | Err(_) if bytes.is_empty() => return Err(ProbeFailure::NothingSaid),
            Ok(0) | Err(_) => return Err(ProbeFailure::NotHttp),
            Ok(_) => {}
        }
    }
}

async fn read_some(
    stream: &mut (impl AsyncRead + Unpin),
    bytes: &mut Vec<u8>,
) -> io::Result<usize> {
    let room = (HEAD_MAX - bytes.len()) as u64;
    bytes.reserve(1024);
    stream.take(room).read_buf(bytes).await
}

/// Where the first head ends whose last empty line ends behind `from`.
fn head_end(bytes: &[u8], from: usize) -> Option<usize> {
    let lines = bytes.iter().enumerate().skip(from).filter(|(_, byte)| **byte == b'\n');
    let mut ends = lines.map(|(at, _)| at);
    ends.find_map(|at| match bytes.get(at + 1..) {
        Some([b'\n', ..]) => Some(at + 2),
        Some([b'\r', b'\n', ..]) => Some(at + 3),
        _ => None,
    })
}

/// The status in the first line of a head (RFC 9112, section 4).
fn status_of(head: &[u8]) -> Option<u16> {
    let rest = head.strip_prefix(b"HTTP/1.1 ").or_else(|| head.strip_prefix(b"HTTP/1.0 "))?;
    let (digits, rest) = rest.split_at_checked(3)?;
    let is_whole = matches!(rest.first(), Some(b' ' | b'\r' | b'\n'));
    let digits = std::str::from_utf8(digits).ok().filter(|_| is_whole)?;
    digits.parse().ok().filter(|status| (100..600).contains(status))
}

#[cfg(test)]
mod tests {
    use super::*;

    async fn read(answer: &[u8]) -> Result<u16, ProbeFailure> {
        let whole = status(&mut &*answer).await;
        let (mut ours, mut theirs) = tokio::io::duplex(1);
        let answer = answer.to_owned();
        tokio::spawn(async move { theirs.write_all(&answer).await });
        assert_eq!(status(&mut ours).await, whole, "byte by byte");
        whole
    }

    #[tokio::test]
    async fn the_status_of_an_answer_is_read() {
        for (answer, expected) in [
            ("HTTP/1.1 200 OK\r\n\r\nbody", Ok(200)),
            ("HTTP/1.0 404 Not Found\r\nA: b\r\n\r\n", Ok(404)),
            ("HTTP/1.1 204\n\n", Ok(204)),
            (
                "HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 E\r\nA: b\r\n\r\nHTTP/1.1 500 \r\n\r\n",
                Ok(500),
            ),
            ("HTTP/1.1 101 Switching Protocols\r\n\r\n", Ok(101)),
            ("HTTP/1.1 200 OK\r\nA: b\r\n", Err(ProbeFailure::NotHttp)),
            ("HTTP/1.1 +20 OK\r\n\r\n", Err(ProbeFailure::NotHttp)),
            ("HTTP/1.1 2000 OK\r\n\r\n", Err(ProbeFailure::NotHttp)),
            ("HTTP/2 200\r\n\r\n", Err(ProbeFailure::NotHttp)),
            ("hello\r\n\r\n", Err(ProbeFailure::NotHttp)),
            ("\n\n", Err(ProbeFailure::NotHttp)),
            ("", Err(ProbeFailure::NothingSaid)),
        ] {
            assert_eq!(read(answer.as_bytes()).await, expected, "{answer:?}");
        }
    }

    #[test]
    fn the_status_of_a_service_is_read() {
        for (body, expected) in [
            (&b"\0\0\0\0\x02\x08\x01"[..], Some(SERVING)),
            (b"\0\0\0\0\x02\x08\x02", Some(2)),
            (b"\0\0\0\0\0", Some(0)),
            // Another field before it.
            (b"\0\0\0\0\x05\x12\x01x\x08\x01", Some(SERVING)),
            (b"\x01\0\0\0\x02\x08\x01", None),
            (b"\0\0\0\0\x03\x08\x01", None),
            (b"\0\0\0\0\x01\x08", None),
            (b"\0\0\0", None),
        ] {
            assert_eq!(serving_status(body), expected, "{body:?}");
        }
    }

    #[tokio::test]
    async fn no_more_is_read_than_a_head_may_have() {
        let endless = || tokio::io::repeat(b'x');
        assert_eq!(status(&mut endless()).await, Err(ProbeFailure::TooLong));
        let announced = "HTTP/1.1 103 Early\r\n\r\n".repeat(HEAD_MAX);
        assert_eq!(status(&mut announced.as_bytes()).await, Err(ProbeFailure::TooLong));
        // The body is not looked at.
        let mut answer = (&b"HTTP/1.1 200 OK\r\n\r\n"[..]).chain(endless());
        assert_eq!(status(&mut answer).await, Ok(200));
    }
}
