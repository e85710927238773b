//! gRPC over HTTP/2, as far as the gateway has to know it: how a call says what became of it
//! ("gRPC over HTTP2", PROTOCOL-HTTP2.md of the gRPC project).

use super::refusal::Refusal;
use hyper::StatusCode;
use hyper::header::{CONTENT_TYPE, HeaderMap, HeaderName, HeaderValue};
use percent_encoding::{AsciiSet, CONTROLS, utf8_percent_encode};
use std::time::Duration;

/// The status of a call, in its trailers, or in its head if it has no others.
pub(super) const STATUS: HeaderName = HeaderName::from_static("grpc-status");
const MESSAGE: HeaderName = HeaderName::from_static("grpc-message");
/// Fields of the trailers, as HTTP/1.1 has to announce them.
pub(super) const TRAILERS: HeaderValue =
    HeaderValue::from_static("grpc-status, grpc-message, grpc-status-details-bin");

/// What is written as `%XX` in a message: all but printable ASCII, and `%`.
const ESCAPED: &AsciiSet = &CONTROLS.add(b'%');

/// Status codes of gRPC (`grpc/status.h`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Code {
    Unknown = 2,
    InvalidArgument = 3,
    DeadlineExceeded = 4,
    ResourceExhausted = 8,
    Unimplemented = 12,
    Internal = 13,
    Unavailable = 14,
    Unauthenticated = 16,
}

impl Code {
    /// What a call is told that no function answers. Where the gateway knows no more than the status,
    /// this is what clients make of that ("HTTP to gRPC Status Code Mapping").
    pub fn of(refusal: &Refusal) -> Self {
        match refusal.status() {
            400 => Self::Internal,
            401 => Self::Unauthenticated,
            404 | 421 => Self::Unimplemented,
            // Clients may repeat what is unavailable: not this.
            408 | 504 => Self::DeadlineExceeded,
            413 | 429 | 431 => Self::ResourceExhausted,
            422 => Self::InvalidArgument,
            502 | 503 => Self::Unavailable,
            _ => Self::Unknown,
        }
    }
}

/// Whether a message is one of gRPC. Those of gRPC-Web are not: their trailers are in the body.
pub(super) fn is_grpc(headers: &HeaderMap) -> bool {
    let kind = headers.get(CONTENT_TYPE).map(HeaderValue::as_bytes).unwrap_or_default();
    let rest = kind.get(..16).filter(|name| name.eq_ignore_ascii_case(b"application/grpc"));
    rest.is_some() && matches!(kind.get(16), None | Some(b'+' | b';' | b' '))
}

/// How long a client waits for its call, if it says so.
pub(super) fn timeout(headers: &HeaderMap) -> Option<Duration> {
    let text = headers.get("grpc-timeout")?.to_str().ok()?;
    let (number, unit) = text.split_at_checked(text.len().checked_sub(1)?)?;
    let is_number = (1..=8).contains(&number.len()) && number.bytes().all(|b| b.is_ascii_digit());
    let number: u64 = if is_number { number.parse().ok()? } else { return None };
    match unit {
        "H" => Some(Duration::from_secs(number * 3600)),
        "M" => Some(Duration::from_secs(number * 60)),
        "S" => Some(Duration::from_secs(number)),
        "m" => Some(Duration::from_millis(number)),
        "u" => Some(Duration::from_micros(number)),
        "n" => Some(Duration::from_nanos(number)),
        _ => None,
    }
}

/// Says what became of a call.
pub(super) fn tell(headers: &mut HeaderMap, code: Code, message: &str) {
    headers.insert(STATUS, HeaderValue::from(code as u16));
    let message = utf8_percent_encode(message.trim_end(), ESCAPED).to_string();
    if let Ok(message) = HeaderValue::try_from(message) {
        headers.insert(MESSAGE, message);
    }
}

/// The status of HTTP that says the same as that of a call, if there is one and the call failed for
/// a fault of the server ("google/rpc/code.proto"): not for one that any client can bring about, by
/// the name of its method or by its deadline.
pub(super) fn http_status(headers: &HeaderMap) -> Option<StatusCode> {
    match headers.get(STATUS)?.as_bytes() {
        b"2" | b"13" | b"15" => Some(StatusCode::INTERNAL_SERVER_ERROR),
        b"14" => Some(StatusCode::SERVICE_UNAVAILABLE),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of_kind(kind: &str) -> HeaderMap {
        let value = HeaderValue::from_str(kind).unwrap();
        std::iter::once((CONTENT_TYPE, value)).collect()
    }

    #[test]
    fn grpc_is_known_by_its_content_type() {
        for kind in ["application/grpc", "Application/gRPC+proto", "application/grpc;x=y"] {
            assert!(is_grpc(&of_kind(kind)), "{kind}");
        }
        for kind in [
            "application/grpc-web",
            "application/grpc-web+proto",
            "application/grp",
            "text/plain",
            "",
        ] {
            assert!(!is_grpc(&of_kind(kind)), "{kind}");
        }
        assert!(!is_grpc(&HeaderMap::new()));
    }

    #[test]
    fn clients_say_how_long_they_wait() {
        let of = |text: &str| {
            let value = HeaderValue::from_str(text).unwrap();
            timeout(&std::iter::once((HeaderName::from_static("grpc-timeout"), value)).collect())
        };
        assert_eq!(of("2S"), Some(Duration::from_secs(2)));
        assert_eq!([of("3H"), of("180M")], [Some(Duration::from_secs(10_800)); 2]);
        assert_eq!([of("5m"), of("5000u"), of("5000000n")], [Some(Duration::from_millis(5)); 3]);
        assert!(of("99999999H").is_some());
        for text in ["", "S", "2", "2x", "-2S", "+2S", "123456789S", "2 S"] {
            assert_eq!(of(text), None, "{text}");
        }
    }

    #[test]
    fn refusals_have_a_code_and_messages_are_escaped() {
        let timeout = Duration::from_secs(1);
        let function = || "f".to_owned();
        for (refusal, code) in [
            (Refusal::NodeFull, Code::Unavailable),
            (Refusal::UnknownFunction(None), Code::Unimplemented),
            (Refusal::Timeout { function: function(), timeout }, Code::DeadlineExceeded),
            (Refusal::DeadlinePassed { function: function() }, Code::DeadlineExceeded),
            (
                Refusal::TooManyRequests { function: function(), retry_after: timeout },
                Code::ResourceExhausted,
            ),
            (Refusal::BodyTooLarge { function: function(), most: 1 }, Code::ResourceExhausted),
        ] {
            assert_eq!(Code::of(&refusal), code, "{refusal:?}");
        }
        let mut headers = HeaderMap::new();
        tell(&mut headers, Code::Unavailable, "50 % ü\r\nx: y\n");
        assert_eq!(headers[STATUS], "14");
        assert_eq!(headers[MESSAGE], "50 %25 %C3%BC%0D%0Ax: y");
        assert_eq!(http_status(&headers), Some(StatusCode::SERVICE_UNAVAILABLE));
        headers.insert(STATUS, HeaderValue::from_static("5"));
        assert_eq!(http_status(&headers), None);
    }
}
