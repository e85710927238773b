//! A liveness probe: one request to a program, on a connection of its own, or that connection alone.
//!
//! The sandbox is hostile: it may answer never, byte by byte, or without an end.

use super::launch::Connector;
use crate::sandboxes::ports::{PortProblem, PortStream};
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWriteExt};
use tokio::sync::OwnedSemaphorePermit;
use tokio::time::timeout;

/// Most bytes that are read of an answer.
const HEAD_MAX: usize = 64 * 1024;

/// Why a probe has failed: what stands in the log of its function.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum ProbeFailure {
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
}

impl ProbeFailure {
    /// Whether the program has answered, and has said itself that it is not well.
    pub fn is_answer(&self) -> bool {
        matches!(self, Self::Status(_))
    }
}

/// What is asked, and how.
pub(super) struct Probe {
    pub connector: Arc<dyn Connector>,
    /// This end of the connection, and the sandbox's.
    pub sockets: (OwnedFd, OwnedFd),
    pub port: u16,
    /// The name by which clients ask for the function.
    pub host: String,
    /// Of a request; without one, a connection is enough.
    pub path: Option<String>,
    /// How long the answer may take.
    pub limit: Duration,
    /// Its share of the node's probes, and of its tenant's.
    pub places: (OwnedSemaphorePermit, OwnedSemaphorePermit),
}

impl Probe {
    /// Asks the program; `sent` is called when the instance has the connection.
    pub async fn run(self, sent: impl FnOnce() + Send) -> Result<(), ProbeFailure> {
        let limit = self.limit;
        let answered = timeout(limit, self.ask(sent)).await;
        answered.unwrap_or(Err(ProbeFailure::NoAnswer(limit)))
    }

    async fn ask(self, sent: impl FnOnce() + Send) -> Result<(), ProbeFailure> {
        let Self { connector, sockets, port, host, path, places: (place, _share), .. } = self;
        let opened = PortStream::over(sockets, &*connector, port, place, sent).await;
        let mut stream = opened.map_err(|problem| match problem {
            PortProblem::Closed(port) => ProbeFailure::Closed(port),
            PortProblem::Full(_) | PortProblem::Refused(_) => ProbeFailure::Unreachable,
        })?;
        let Some(path) = path else { return Ok(()) };
        let request = format!(
            "GET {path} HTTP/1.1\r\nHost: {host}\r\nUser-Agent: thaw-liveness\r\nAccept: */*\r\n\
             Connection: close\r\n\r\n"
        );
        // It may have answered without having read everything.
        let _ = stream.write_all(request.as_bytes()).await;
        match status(&mut stream).await? {
            200..400 => Ok(()),
            status => Err(ProbeFailure::Status(status)),
        }
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
