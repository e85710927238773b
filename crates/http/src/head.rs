//! Reads the head of an HTTP/1 request far enough to route it.

use hyper::http::Method;
use std::net::IpAddr;

/// Header of an attempt of the node's own queue: the name of the invocation.
pub const INVOCATION_HEADER: &str = "thaw-invocation-id";
/// Header of an attempt: its number, from 1 on.
pub const ATTEMPT_HEADER: &str = "thaw-attempt";
/// Header of an event's type (CloudEvents).
pub const EVENT_TYPE: &str = "ce-type";
/// Largest request head, in bytes.
pub const HEAD_MAX: usize = 16 * 1024;
/// What a client sends first that speaks HTTP/2.
const HTTP2: &[u8] = b"PRI * HTTP/2.0\r\n";
/// Most header fields in a head.
const FIELDS_MAX: usize = 128;

/// What the gateway wants to know of a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Head {
    /// The host that the client asked for, in lower case and without a port; `None` if it
    /// is an IP address or missing.
    pub host: Option<String>,
    /// The path and the query.
    pub target: String,
    /// The method.
    pub method: Method,
    /// HTTP/1.1, not HTTP/1.0.
    pub is_1_1: bool,
    /// What the client says of its connection.
    pub announces: Announcement,
    /// It may be an event, or for the queue of its function.
    pub may_trigger: bool,
    /// It may have a field that only requests of the node's own queue have.
    pub may_pretend: bool,
}

impl Head {
    /// The name of the function that the host begins with.
    pub fn function(&self) -> Option<&str> {
        self.host.as_deref().map(first_label)
    }

    /// An answer has no body.
    pub fn wants_head_only(&self) -> bool {
        self.method == Method::HEAD
    }
}

/// What a client says will follow its first request on the connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Announcement {
    /// Nothing: the connection ends with the answer (RFC 9112 §9.6). A client that
    /// sends more all the same harms only itself.
    Last,
    /// Perhaps other requests, for anybody.
    More,
}

/// How far the bytes at hand go.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Progress {
    /// All of the head is there.
    Complete(Head),
    /// They begin HTTP/2 with prior knowledge (RFC 9113 §3.3).
    Http2,
    /// More bytes are needed.
    Partial,
}

/// Why a head is not served.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum HeadError {
    /// Not an HTTP/1 request.
    #[error("the request head is not HTTP/1 ({0}); send a plain HTTP/1.1 request")]
    Malformed(&'static str),
    /// A rule on the `Host` header is broken.
    #[error("{0}")]
    Host(&'static str),
    /// The body of the request is not one, or ends too early.
    #[error("the request body is not whole; send as many bytes, or chunks, as its head says")]
    Body,
    /// More than [`HEAD_MAX`] bytes or too many fields.
    #[error("the request head is larger than 16 KiB or has more than 128 fields; send less")]
    TooLarge,
}

/// Parses the first bytes of a connection.
///
/// # Errors
/// The bytes cannot become a request that can be routed, whatever follows.
pub fn parse(bytes: &[u8]) -> Result<Progress, HeadError> {
    if bytes.starts_with(HTTP2) {
        return Ok(Progress::Http2);
    }
    if bytes.first() == Some(&0x16) {
        return Err(HeadError::Malformed("it is TLS"));
    }
    let mut fields = [httparse::EMPTY_HEADER; FIELDS_MAX];
    let mut request = httparse::Request::new(&mut fields);
    match request.parse(bytes) {
        Ok(httparse::Status::Complete(len)) if len <= HEAD_MAX => Ok(Progress::Complete(Head {
            host: host_of(&request)?,
            target: target_of(request.path.unwrap_or_default()).to_owned(),
            method: Method::from_bytes(request.method.unwrap_or_default().as_bytes())
                .map_err(|_| HeadError::Malformed("its method is not one"))?,
            is_1_1: request.version == Some(1),
            announces: announcement(&request),
            may_trigger: may_trigger(&request),
            may_pretend: may_pretend(&request),
        })),
        Ok(httparse::Status::Partial) if bytes.len() < HEAD_MAX => Ok(Progress::Partial),
        Ok(_) | Err(httparse::Error::TooManyHeaders) => Err(HeadError::TooLarge),
        Err(error) => Err(HeadError::Malformed(describe(error))),
    }
}

/// Whether the head at the begin of `bytes` has a field with this value; `name` in any case.
pub fn has_field(bytes: &[u8], name: &str, value: &str) -> bool {
    let mut fields = [httparse::EMPTY_HEADER; FIELDS_MAX];
    let mut request = httparse::Request::new(&mut fields);
    // What cannot be parsed has no fields, and is refused elsewhere.
    let _ = request.parse(bytes);
    request.headers.iter().any(|field| {
        field.name.eq_ignore_ascii_case(name) && field.value.trim_ascii() == value.as_bytes()
    })
}

/// Whether it has a field by which events and asynchronous invocations are known.
fn may_trigger(request: &httparse::Request<'_, '_>) -> bool {
    let begins = |text: &[u8], beginning: &str| {
        let text = text.get(..beginning.len());
        text.is_some_and(|text| text.eq_ignore_ascii_case(beginning.as_bytes()))
    };
    request.headers.iter().any(|field| {
        let is_event = || begins(field.value.trim_ascii(), "application/cloudevents");
        field.name.eq_ignore_ascii_case("prefer")
            || begins(field.name.as_bytes(), "ce-")
            || field.name.eq_ignore_ascii_case("content-type") && is_event()
    })
}

/// Whether it has a field by which functions know the node's own queue.
fn may_pretend(request: &httparse::Request<'_, '_>) -> bool {
    let telling = [INVOCATION_HEADER, ATTEMPT_HEADER, EVENT_TYPE];
    let is_telling = |name: &str| telling.iter().any(|one| name.eq_ignore_ascii_case(one));
    request.headers.iter().any(|field| is_telling(field.name))
}

fn host_of(request: &httparse::Request<'_, '_>) -> Result<Option<String>, HeadError> {
    let mut hosts = request.headers.iter().filter(|f| f.name.eq_ignore_ascii_case("host"));
    let field = hosts.next();
    if hosts.next().is_some() {
        return Err(HeadError::Host("the request has two Host headers; send one"));
    }
    // RFC 9112 §3.2.2: the authority of an absolute target goes before the header.
    let authority = match request.path.and_then(authority_of) {
        Some(authority) => authority,
        None => match field {
            Some(field) => std::str::from_utf8(field.value)
                .map_err(|_| HeadError::Host("the Host header is not text; send a host name"))?,
            // RFC 9112 §3.2: a missing header is an error from HTTP/1.1 on.
            None if request.version == Some(0) => return Ok(None),
            None => {
                return Err(HeadError::Host("the request has no Host header; send one"));
            }
        },
    };
    Ok(host_in_authority(authority.trim()))
}

/// The last request of a connection says `close`, or is of HTTP/1.0 and does not say
/// `keep-alive` (RFC 9112 §9.3).
fn announcement(request: &httparse::Request<'_, '_>) -> Announcement {
    let says = |wanted: &str| {
        let fields = request.headers.iter();
        let values = fields.filter(|f| f.name.eq_ignore_ascii_case("connection")).map(|f| f.value);
        let mut options = values.flat_map(|value| value.split(|byte| *byte == b','));
        options.any(|option| option.trim_ascii().eq_ignore_ascii_case(wanted.as_bytes()))
    };
    if says("close") || request.version == Some(0) && !says("keep-alive") {
        return Announcement::Last;
    }
    Announcement::More
}

fn authority_of(target: &str) -> Option<&str> {
    let (_, rest) = split_scheme(target)?;
    let authority = rest.split(['/', '?']).next()?;
    Some(authority.rsplit_once('@').map_or(authority, |(_, host)| host))
}

/// The path and the query of a request's target.
fn target_of(target: &str) -> &str {
    match split_scheme(target) {
        Some((_, rest)) => rest.find(['/', '?']).map_or("/", |at| &rest[at..]),
        None => target,
    }
}

fn split_scheme(target: &str) -> Option<(&str, &str)> {
    let (scheme, rest) = target.split_once("://")?;
    let is_ours = ["http", "https"].iter().any(|known| scheme.eq_ignore_ascii_case(known));
    is_ours.then_some((scheme, rest))
}

/// The host that an authority names, in lower case; none if it is an IP address.
pub(crate) fn host_in_authority(authority: &str) -> Option<String> {
    if authority.starts_with('[') {
        return None;
    }
    let host = authority.rsplit_once(':').map_or(authority, |(host, _)| host);
    let host = host.strip_suffix('.').unwrap_or(host);
    if host.is_empty() || host.parse::<IpAddr>().is_ok() {
        return None;
    }
    Some(host.to_ascii_lowercase())
}

/// The part of a host that names a function.
pub fn first_label(host: &str) -> &str {
    host.split('.').next().unwrap_or_default()
}

fn describe(error: httparse::Error) -> &'static str {
    match error {
        httparse::Error::HeaderName => "a header's name is invalid",
        httparse::Error::HeaderValue => "a header's value is invalid",
        httparse::Error::NewLine => "a line end is invalid",
        httparse::Error::Status | httparse::Error::Token => "the request line is invalid",
        httparse::Error::TooManyHeaders => "there are too many headers",
        httparse::Error::Version => "the version is unknown",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn function(bytes: &[u8]) -> Option<String> {
        match parse(bytes).unwrap() {
            Progress::Complete(head) => head.function().map(str::to_owned),
            other => panic!("the head is complete: {other:?}"),
        }
    }

    #[test]
    fn the_first_label_of_the_host_names_the_function() {
        assert_eq!(function(b"GET / HTTP/1.1\r\nHost: hello\r\n\r\n").unwrap(), "hello");
        assert_eq!(
            function(b"GET / HTTP/1.1\r\nhost:Hello.example.com:80\r\n\r\nbody").unwrap(),
            "hello"
        );
        assert_eq!(function(b"GET http://a.b/x HTTP/1.1\r\nHost: c\r\n\r\n").unwrap(), "a");
        assert_eq!(function(b"GET http://u:p@a:1 HTTP/1.1\r\nHost: c\r\n\r\n").unwrap(), "a");
        assert_eq!(function(b"GET / HTTP/1.1\r\nHost: 127.0.0.1:8080\r\n\r\n"), None);
        assert_eq!(function(b"GET / HTTP/1.1\r\nHost: [::1]:8080\r\n\r\n"), None);
        assert_eq!(function(b"GET / HTTP/1.1\r\nHost:\r\n\r\n"), None);
        assert_eq!(function(b"GET / HTTP/1.0\r\n\r\n"), None);
    }

    #[test]
    fn fields_are_found_by_their_whole_value() {
        let head = b"GET / HTTP/1.1\r\nHost: a\r\nX-Canary:  yes \r\nX-Canary: b\r\n\r\n";
        assert!(has_field(head, "x-canary", "yes") && has_field(head, "X-CANARY", "b"));
        assert!(!has_field(head, "x-canary", "ye") && !has_field(head, "x", "yes"));
        assert!(!has_field(b"\x16\x03", "x", "y"));
    }

    #[test]
    fn what_may_pass_for_the_queue_is_known_by_its_fields() {
        for (field, expected) in [
            ("Thaw-Invocation-Id: 1", true),
            ("thaw-attempt: 1", true),
            ("CE-Type: x", true),
            ("ce-id: 1", false),
            ("x-thaw-attempt: 1", false),
        ] {
            let head = format!("POST / HTTP/1.1\r\nHost: a\r\n{field}\r\n\r\n");
            match parse(head.as_bytes()).unwrap() {
                Progress::Complete(head) => assert_eq!(head.may_pretend, expected, "{field}"),
                other => panic!("{other:?}"),
            }
        }
    }

    #[test]
    fn what_may_be_for_triggers_is_known_by_its_fields() {
        let may = |fields: &str| {
            let head = format!("POST / HTTP/1.1\r\nHost: a\r\n{fields}\r\n");
            match parse(head.as_bytes()).unwrap() {
                Progress::Complete(head) => head.may_trigger,
                other => panic!("the head is complete: {other:?}"),
            }
        };
        assert!(may("prefer: respond-async\r\n") && may("CE-Id: 1\r\n"));
        assert!(may("Content-Type: Application/CloudEvents+json\r\n"));
        assert!(!may("Content-Type: application/json\r\nCe: 1\r\nX-Prefer: 1\r\n"));
    }

    #[test]
    fn the_end_of_a_connection_is_announced() {
        let announces = |version: &str, fields: &str| {
            let head = format!("GET / HTTP/{version}\r\nHost: a\r\n{fields}\r\n");
            match parse(head.as_bytes()).unwrap() {
                Progress::Complete(head) => head.announces,
                other => panic!("the head is complete: {other:?}"),
            }
        };
        for (version, fields) in [
            ("1.1", "Connection: close\r\n"),
            ("1.1", "connection: x,\tClose , y\r\n"),
            ("1.1", "Connection: keep-alive\r\nConnection: close\r\n"),
            ("1.0", ""),
            ("1.0", "Connection: keep-alive, close\r\n"),
        ] {
            assert_eq!(announces(version, fields), Announcement::Last, "{version} {fields}");
        }
        for (version, fields) in [
            ("1.1", ""),
            ("1.1", "Connection: keep-alive\r\n"),
            ("1.1", "Connection: Upgrade\r\nUpgrade: websocket\r\n"),
            ("1.1", "Connection: closed\r\nX: close\r\n"),
            ("1.0", "Connection: Keep-Alive\r\n"),
        ] {
            assert_eq!(announces(version, fields), Announcement::More, "{version} {fields}");
        }
    }

    #[test]
    fn hosts_and_targets_are_those_of_the_client() {
        let asked = |bytes: &[u8]| match parse(bytes).unwrap() {
            Progress::Complete(head) => (head.host.unwrap_or_default(), head.target),
            other => panic!("the head is complete: {other:?}"),
        };
        let pair = |host: &str, target: &str| (host.to_owned(), target.to_owned());
        assert_eq!(
            asked(b"GET /x?y HTTP/1.1\r\nHost: A.Example.:80\r\n\r\n"),
            pair("a.example", "/x?y")
        );
        assert_eq!(asked(b"GET http://b/x?y HTTP/1.1\r\nHost: a\r\n\r\n"), pair("b", "/x?y"));
        assert_eq!(asked(b"GET HTTPS://b/x HTTP/1.1\r\nHost: a\r\n\r\n"), pair("b", "/x"));
        assert_eq!(asked(b"GET http://b?y HTTP/1.1\r\nHost: a\r\n\r\n"), pair("b", "?y"));
        assert_eq!(asked(b"GET http://b HTTP/1.1\r\nHost: a\r\n\r\n"), pair("b", "/"));
        assert_eq!(asked(b"OPTIONS * HTTP/1.1\r\nHost: a\r\n\r\n"), pair("a", "*"));
    }

    #[test]
    fn http2_is_known_by_its_first_line() {
        let preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
        assert_eq!(parse(preface), Ok(Progress::Http2));
        assert_eq!(parse(&preface[..10]), Ok(Progress::Partial));
    }

    #[test]
    fn every_prefix_of_a_head_is_partial() {
        let head = b"POST /x?y HTTP/1.1\r\nHost: a\r\nContent-Length: 5\r\n\r\n";
        for end in 0..head.len() {
            assert_eq!(parse(&head[..end]), Ok(Progress::Partial), "{end}");
        }
        assert!(matches!(parse(head), Ok(Progress::Complete(_))));
    }

    #[test]
    fn a_pipelined_second_request_does_not_matter() {
        let two = b"GET /1 HTTP/1.1\r\nHost: a\r\n\r\nGET /2 HTTP/1.1\r\nHost: b\r\n\r\n";
        assert_eq!(function(two).unwrap(), "a");
    }

    #[test]
    fn what_cannot_become_a_request_is_refused_at_once() {
        for bytes in [
            &b"\x16\x03\x01\x02\x00"[..],
            b"\0\0\0",
            b"GET / HTTP/9.9\r\n\r\n",
            b"GET / HTTP/1.1\r\nbad header\r\n\r\n",
        ] {
            assert!(matches!(parse(bytes), Err(HeadError::Malformed(_))), "{bytes:?}");
        }
        assert!(matches!(parse(b"GET / HTTP/1.1\r\n\r\n"), Err(HeadError::Host(_))));
        assert!(matches!(
            parse(b"GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n"),
            Err(HeadError::Host(_))
        ));
    }

    #[test]
    fn a_huge_head_is_refused() {
        let mut head = b"GET / HTTP/1.1\r\nHost: a\r\nX: ".to_vec();
        head.resize(HEAD_MAX, b'x');
        assert_eq!(parse(&head), Err(HeadError::TooLarge));
        head.extend_from_slice(b"\r\n\r\n");
        assert_eq!(parse(&head), Err(HeadError::TooLarge));
        let many = format!("GET / HTTP/1.1\r\n{}\r\n", "a: b\r\n".repeat(FIELDS_MAX + 1));
        assert_eq!(parse(many.as_bytes()), Err(HeadError::TooLarge));
    }
}
