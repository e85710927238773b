//! The Connect protocol (connectrpc.com/docs/protocol), as much of it as E2B's SDKs speak: JSON,
//! not compressed, unary calls and streams in one direction.
//!
//! A unary call is a `POST` of a message, answered by a message or by an error with a status. In a
//! stream each message stands in an envelope: a byte of flags, the length as a `u32` with the
//! highest byte first, and that many bytes. The answer to a stream has status 200 always; its last
//! envelope says whether it went well.

use super::input::from_json;
use super::problem::{Kind, Problem};
use super::serve::closing;
use axum::body::Body;
use axum::http::{HeaderMap, HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use http_body_util::{BodyExt, LengthLimitError, Limited};
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use std::time::Duration;

/// Most bytes of a message of a client.
pub const MESSAGE_MAX: usize = 4 << 20;
/// The flag of a compressed message.
const COMPRESSED: u8 = 1;
/// The flag of the last envelope of an answer.
const END: u8 = 2;
/// Bytes before a message.
const HEAD_LEN: usize = 5;
/// What a message is sent as in a unary call.
const UNARY: &str = "application/json";
/// The same in a stream.
const STREAM: &str = "application/connect+json";
/// Longest time that a client may give, which is longer than it has.
const TIMEOUT_MAX: Duration = Duration::from_secs(365 * 24 * 3600);

/// Whether a request is of this type of content.
fn is_of(headers: &HeaderMap, wanted: &str) -> bool {
    let kind = headers.get(header::CONTENT_TYPE).and_then(|kind| kind.to_str().ok());
    kind.is_some_and(|kind| kind.split(';').next().unwrap_or_default().trim() == wanted)
}

/// How long the client waits; none: for ever.
///
/// # Errors
/// It says something else than a number of milliseconds.
pub fn client_timeout(headers: &HeaderMap) -> Result<Option<Duration>, Problem> {
    let Some(value) = headers.get("connect-timeout-ms") else { return Ok(None) };
    let number = value.to_str().ok().and_then(|value| value.parse::<u64>().ok());
    let number = number
        .ok_or_else(|| Problem::invalid("`Connect-Timeout-Ms` is no number of milliseconds"))?;
    Ok((number > 0).then(|| Duration::from_millis(number).min(TIMEOUT_MAX)))
}

/// The message of a unary call.
///
/// # Errors
/// It is none, or too large.
pub async fn read_unary<T: DeserializeOwned>(
    headers: &HeaderMap,
    body: Body,
) -> Result<T, Problem> {
    if !is_of(headers, UNARY) {
        return Err(wrong_codec(UNARY));
    }
    let body = Limited::new(body, MESSAGE_MAX).collect().await.map_err(|error| {
        if error.downcast_ref::<LengthLimitError>().is_some() { too_large() } else { cut(error) }
    })?;
    from_json(&body.to_bytes())
}

/// Answers a unary call.
pub fn answer_unary(outcome: Result<Value, Problem>) -> Response {
    // Of what is too large, or in another codec, the rest is not read.
    let is_cut = matches!(&outcome, Err(problem) if matches!(problem.kind, Kind::TooLarge | Kind::Unsupported));
    let (status, message) = match outcome {
        Ok(message) => (StatusCode::OK, message),
        Err(problem) => (problem.status(), problem.connect_json()),
    };
    let kind = [(header::CONTENT_TYPE, HeaderValue::from_static(UNARY))];
    let answer = (status, kind, message.to_string()).into_response();
    if is_cut { closing(answer) } else { answer }
}

/// The messages of a client, one after the other.
pub struct Messages {
    body: Body,
    buffer: Vec<u8>,
}

impl Messages {
    /// Those in a body.
    ///
    /// # Errors
    /// It is no stream of JSON.
    pub fn new(headers: &HeaderMap, body: Body) -> Result<Self, Problem> {
        if !is_of(headers, STREAM) {
            return Err(wrong_codec(STREAM));
        }
        Ok(Self { body, buffer: Vec::new() })
    }

    /// The next message; none: there are no more.
    ///
    /// # Errors
    /// The client breaks the protocol, or has gone.
    pub async fn next<T: DeserializeOwned>(&mut self) -> Result<Option<T>, Problem> {
        loop {
            if let Some(message) = self.take()? {
                return from_json(&message).map(Some);
            }
            match self.body.frame().await {
                Some(Ok(frame)) => {
                    if let Some(bytes) = frame.data_ref() {
                        self.buffer.extend_from_slice(bytes);
                    }
                }
                Some(Err(error)) => return Err(cut(error)),
                None if self.buffer.is_empty() => return Ok(None),
                None => return Err(cut("it ends in the middle of a message")),
            }
        }
    }

    /// The first message that is whole.
    fn take(&mut self) -> Result<Option<Vec<u8>>, Problem> {
        let Some(&[flags, a, b, c, d]) = self.buffer.first_chunk::<HEAD_LEN>() else {
            return Ok(None);
        };
        let len = u32::from_be_bytes([a, b, c, d]) as usize;
        if len > MESSAGE_MAX {
            return Err(too_large());
        }
        if flags & COMPRESSED != 0 {
            return Err(Problem::unsupported("compressed messages are not taken; send plain ones"));
        }
        if self.buffer.len() < HEAD_LEN + len {
            return Ok(None);
        }
        let message = self.buffer[HEAD_LEN..HEAD_LEN + len].to_vec();
        self.buffer.drain(..HEAD_LEN + len);
        Ok(Some(message))
    }
}

fn wrong_codec(wanted: &str) -> Problem {
    Problem::unsupported(format!("send messages as `{wanted}`: this server takes no other codec"))
}

fn too_large() -> Problem {
    let most = MESSAGE_MAX >> 20;
    Problem::new(
        Kind::TooLarge,
        format!("the message is larger than {most} MiB; send less at once"),
    )
}

fn cut(error: impl ToString) -> Problem {
    Problem::invalid(format!("the request is cut short: {}", error.to_string()))
}

/// A message in its envelope.
pub fn envelope(message: &Value) -> Vec<u8> {
    wrapped(0, message)
}

/// The last envelope of an answer.
pub fn last_envelope(outcome: Result<(), Problem>) -> Vec<u8> {
    let message = match outcome {
        Ok(()) => json!({}),
        Err(problem) => json!({"error": problem.connect_json()}),
    };
    wrapped(END, &message)
}

fn wrapped(flags: u8, message: &Value) -> Vec<u8> {
    let message = message.to_string();
    let mut bytes = vec![flags];
    // Messages of this server are some hundred KiB at most.
    bytes.extend_from_slice(&(message.len() as u32).to_be_bytes());
    bytes.extend_from_slice(message.as_bytes());
    bytes
}

/// Whether a request is one of a stream, and wants a stream as its answer.
pub fn is_stream(headers: &HeaderMap) -> bool {
    let kind = headers.get(header::CONTENT_TYPE);
    kind.is_some_and(|kind| kind.as_bytes().starts_with(b"application/connect+"))
}

/// Answers a request of either kind with a problem.
pub fn refuse(headers: &HeaderMap, problem: Problem) -> Response {
    if is_stream(headers) { refuse_stream(problem) } else { answer_unary(Err(problem)) }
}

/// Answers a stream with envelopes.
pub fn answer_stream(body: Body) -> Response {
    ([(header::CONTENT_TYPE, HeaderValue::from_static(STREAM))], body).into_response()
}

/// Answers a stream that has not begun.
pub fn refuse_stream(problem: Problem) -> Response {
    answer_stream(Body::from(last_envelope(Err(problem))))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn headers(kind: &'static str) -> HeaderMap {
        [(header::CONTENT_TYPE, HeaderValue::from_static(kind))].into_iter().collect()
    }

    async fn all(bytes: Vec<u8>) -> Result<Vec<Value>, Problem> {
        let mut messages = Messages::new(&headers(STREAM), Body::from(bytes))?;
        let mut all = Vec::new();
        while let Some(message) = messages.next().await? {
            all.push(message);
        }
        Ok(all)
    }

    #[tokio::test]
    async fn envelopes_are_read_as_they_are_written() {
        let (one, two) = (json!({"a": 1}), json!({}));
        let bytes = [envelope(&one), envelope(&two)].concat();
        assert_eq!(all(bytes.clone()).await.unwrap(), [one, two]);
        assert_eq!(all(Vec::new()).await.unwrap(), Vec::<Value>::new());
        let cut = all(bytes[..bytes.len() - 1].to_vec()).await.unwrap_err();
        assert_eq!(cut.kind, Kind::Invalid);
        assert_eq!(last_envelope(Ok(())), b"\x02\0\0\0\x02{}");
    }

    #[tokio::test]
    async fn what_is_too_large_compressed_or_no_json_is_refused() {
        let head = |flags: u8, len: u32| [&[flags][..], &len.to_be_bytes()].concat();
        for (bytes, kind) in [
            (head(0, MESSAGE_MAX as u32 + 1), Kind::TooLarge),
            (head(1, 2), Kind::Unsupported),
            ([head(0, 1), b"{".to_vec()].concat(), Kind::Invalid),
        ] {
            assert_eq!(all(bytes).await.unwrap_err().kind, kind);
        }
        let large = Body::from(vec![b' '; MESSAGE_MAX + 1]);
        let refused = read_unary::<Value>(&headers(UNARY), large).await.unwrap_err();
        assert_eq!(refused.kind, Kind::TooLarge);
        let binary = read_unary::<Value>(&headers("application/proto"), Body::empty()).await;
        assert_eq!(binary.unwrap_err().kind, Kind::Unsupported);
        let charset = headers("application/json; charset=utf-8");
        assert!(read_unary::<Value>(&charset, Body::from("{}")).await.is_ok());
    }

    #[test]
    fn times_of_clients_are_milliseconds() {
        let time = |text| {
            let header = ("connect-timeout-ms".parse().unwrap(), HeaderValue::from_static(text));
            client_timeout(&[header].into_iter().collect::<HeaderMap>())
        };
        assert_eq!(time("1500"), Ok(Some(Duration::from_millis(1500))));
        assert_eq!(time("0"), Ok(None));
        assert_eq!(time("18446744073709551615"), Ok(Some(TIMEOUT_MAX)));
        assert!(time("soon").is_err());
        assert_eq!(client_timeout(&HeaderMap::new()), Ok(None));
    }
}
