//! Functions that read their request from standard input.
//!
//! The body of a request goes into a pair of sockets whose other end is the standard
//! input and output of a fresh instance; what the program prints is the body of the
//! response, and how it ended is the status.
//!
//! As the status comes first, the output is kept until the program has ended. All that
//! is kept, until its client has read it, counts against a budget of the node; a function
//! can use half of it.

use super::attend::{died, ended};
use super::refusal::Refusal;
use super::routed::{AnswerBody, Asked, too_large};
use super::ticket::Ticket;
use crate::admission::OUTPUT_UNIT;
use crate::instance::{Client, End, Outcome, Way};
use crate::service::Service;
use crate::upstream::{RequestBody, Upload};
use http_body_util::BodyExt;
use hyper::body::{Bytes, Frame};
use hyper::header::{CONTENT_TYPE, HeaderName, HeaderValue};
use hyper::http::request::Parts;
use hyper::{Response, StatusCode};
use std::collections::VecDeque;
use std::io;
use std::sync::{Arc, Weak};
use std::task::Poll;
use std::time::Duration;
use thaw_sandbox::GuestExit;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;
use tokio::net::unix::{OwnedReadHalf, OwnedWriteHalf};
use tokio::sync::OwnedSemaphorePermit;
use tokio::time::{Instant, sleep_until, timeout};

/// Header of a response: with which code the program ended.
pub const EXIT_CODE_HEADER: &str = "thaw-exit-code";
/// Header of a response: by which signal the program ended.
pub const SIGNAL_HEADER: &str = "thaw-signal";

/// Most bytes that a program may print for one request: they are kept until it
/// has ended.
const OUTPUT_MAX: usize = 16 << 20;
/// How long a program may go on after it has closed its standard output.
const ENDING: Duration = Duration::from_secs(5);
/// Bytes that are read at once, at first.
const FIRST_PIECE: usize = 4 << 10;

/// Answers a request by what a program prints.
pub(super) async fn answer(
    asked: &Asked,
    head: Parts,
    body: RequestBody,
) -> Result<Response<AnswerBody>, Refusal> {
    let mut head = head;
    let function = asked.service.name().as_str();
    // Nothing of the head reaches the program; it has to be clear all the same.
    thaw_http::message::to_instance(&mut head, function, thaw_http::message::Afterwards::Close)?;
    let (exit, output) = run(asked, body).await?;
    Ok(respond(exit, output))
}

/// Runs one instance on the body of a request.
async fn run(asked: &Asked, body: RequestBody) -> Result<(GuestExit, OutputBody), Refusal> {
    let service = &asked.service;
    let broken = |error: io::Error| died(service, format!("the host refused a socket ({error})"));
    let (ours, theirs) = UnixStream::pair().map_err(broken)?;
    let client = Arc::new(Client {
        id: asked.client.gateway.shared().next_connection(),
        socket: theirs.into_std().map_err(broken)?.into(),
        peer: asked.client.peer,
        local: asked.client.local,
        accepted_ns: asked.since_ns,
        wants_head_only: false,
        way: Way::Routed,
        admitted: None,
        shared: Weak::<()>::new(),
    });
    let ticket = Ticket::find(service, &client).await?;
    asked.note_placed(ticket.placed.instance);
    // The instance alone has the other end.
    drop(client);
    // Dropping this ends the program: a client that goes away needs no answer.
    let running = Running { service: service.clone(), instance: ticket.placed.instance };
    let (reader, writer) = ours.into_split();
    let output = exchange(asked, body, reader, writer).await?;
    let Ok(outcome) = timeout(ENDING, ticket.done).await else {
        return Err(died(
            service,
            format!("it closed its standard output and did not end within {} s", ENDING.as_secs()),
        ));
    };
    drop(running);
    match outcome {
        Ok(Outcome::Gone(End::Exited(exit))) => Ok((exit, output)),
        Ok(Outcome::Gone(end)) => Err(ended(service, &end)),
        _ => Err(died(service, "its instance was lost".to_owned())),
    }
}

/// An instance that runs for one request. Dropping it ends it.
struct Running {
    service: Arc<Service>,
    instance: u64,
}

impl Drop for Running {
    fn drop(&mut self) {
        self.service.kill(self.instance);
    }
}

/// Passes the body to the program, and takes what it prints.
async fn exchange(
    asked: &Asked,
    body: RequestBody,
    reader: OwnedReadHalf,
    writer: OwnedWriteHalf,
) -> Result<OutputBody, Refusal> {
    let service = &asked.service;
    let limit = service.config().limits.timeout.0;
    let (body, state) = Upload::new(body, asked.body_max);
    let upload = send(body, writer);
    let download = receive(asked, reader);
    tokio::pin!(upload, download);
    let mut sent = None;
    let mut deadline = Instant::now() + limit;
    loop {
        tokio::select! {
            // A program that is killed may leave its end unread: no error.
            output = &mut download => return output,
            writer = &mut upload, if sent.is_none() => {
                if state.is_too_large() {
                    return Err(too_large(service, asked.body_max.unwrap_or_default()));
                }
                if state.has_failed() {
                    return Err(Refusal::BadHead(thaw_http::head::HeadError::Body));
                }
                sent = Some(writer);
                deadline = Instant::now() + limit;
            }
            () = sleep_until(deadline) => {
                let due = state.last_progress() + limit;
                if sent.is_none() && due > Instant::now() {
                    deadline = due;
                    continue;
                }
                if sent.is_none() && state.waits_for_client() {
                    return Err(Refusal::BodyTooSlow(limit));
                }
                return Err(Refusal::Timeout {
                    function: service.name().to_string(),
                    timeout: limit,
                });
            }
        }
    }
}

/// Writes a request's body. The program must not see the end of its input before the
/// request was complete, so the writer comes back.
async fn send(mut body: Upload, mut writer: OwnedWriteHalf) -> OwnedWriteHalf {
    while let Some(Ok(frame)) = body.frame().await {
        let Ok(data) = frame.into_data() else { continue };
        // A program that has read enough may end.
        if writer.write_all(&data).await.is_err() {
            break;
        }
    }
    let _ = writer.shutdown().await;
    writer
}

/// What a program has printed, on its way to the client. Each piece is a part of the
/// node's budget until it is passed on.
pub(super) struct OutputBody {
    pieces: VecDeque<(Bytes, [OwnedSemaphorePermit; 2])>,
    left: usize,
}

impl OutputBody {
    /// Bytes that are not passed on yet.
    pub fn left(&self) -> usize {
        self.left
    }

    pub fn poll_frame(&mut self) -> Poll<Option<io::Result<Frame<Bytes>>>> {
        let piece = self.pieces.pop_front().map(|(piece, _)| {
            self.left -= piece.len();
            Ok(Frame::data(piece))
        });
        Poll::Ready(piece)
    }
}

/// Takes what a program prints, as long as there is room for it.
async fn receive(asked: &Asked, mut reader: OwnedReadHalf) -> Result<OutputBody, Refusal> {
    let service = &asked.service;
    let mut output = OutputBody { pieces: VecDeque::new(), left: 0 };
    loop {
        let room = room_for_output(asked).ok_or_else(|| Refusal::NoCapacity {
            function: service.name().to_string(),
            reason: "the node keeps as much output for its clients as it may".to_owned(),
            retry_after: Duration::from_secs(1),
        })?;
        let mut piece = Vec::with_capacity(FIRST_PIECE);
        // Its end, or an error: the program is done.
        let _ = (&mut reader).take(OUTPUT_UNIT as u64).read_to_end(&mut piece).await;
        let count = piece.len();
        output.left += count;
        if output.left > OUTPUT_MAX {
            let mib = OUTPUT_MAX >> 20;
            return Err(died(service, format!("it printed more than {mib} MiB for one request")));
        }
        if count > 0 {
            output.pieces.push_back((Bytes::from(piece), room));
        }
        if count < OUTPUT_UNIT {
            return Ok(output);
        }
    }
}

fn room_for_output(asked: &Asked) -> Option<[OwnedSemaphorePermit; 2]> {
    let of_function = asked.service.output().clone().try_acquire_owned().ok()?;
    let of_node = asked.client.gateway.shared().admission().output()?;
    Some([of_function, of_node])
}

/// The response to a request on which a program has run: 200 if it succeeded.
fn respond(exit: GuestExit, output: OutputBody) -> Response<AnswerBody> {
    let kind = match is_text(output.pieces.iter().map(|(piece, _)| piece.as_ref())) {
        true => "text/plain; charset=utf-8",
        false => "application/octet-stream",
    };
    let (header, number) = match exit {
        GuestExit::Code(code) => (EXIT_CODE_HEADER, code),
        GuestExit::Signal(signal) => (SIGNAL_HEADER, signal),
    };
    let mut response = Response::new(AnswerBody::Output(output));
    if exit != GuestExit::Code(0) {
        *response.status_mut() = StatusCode::INTERNAL_SERVER_ERROR;
    }
    let headers = response.headers_mut();
    headers.insert(CONTENT_TYPE, HeaderValue::from_static(kind));
    headers.insert(HeaderName::from_static(header), HeaderValue::from(u16::from(number)));
    response
}

/// Whether the pieces together are UTF-8.
fn is_text<'a>(pieces: impl Iterator<Item = &'a [u8]>) -> bool {
    // The beginning of a character that the next piece completes.
    let mut begun = Vec::new();
    for piece in pieces {
        begun.extend_from_slice(piece);
        match std::str::from_utf8(&begun) {
            Ok(_) => begun.clear(),
            Err(error) if error.error_len().is_some() => return false,
            Err(error) => drop(begun.drain(..error.valid_up_to())),
        }
    }
    begun.is_empty()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn characters_may_be_split() {
        let text = "aä€😀".as_bytes();
        for at in 0..=text.len() {
            assert!(is_text([&text[..at], &text[at..]].into_iter()), "{at}");
        }
        assert!(is_text(text.chunks(1)));
        assert!(!is_text(text[..text.len() - 1].chunks(2)));
        assert!(!is_text([&b"a\xff"[..], b"b"].into_iter()));
        assert!(is_text(std::iter::empty()));
    }
}
