//! HTTP messages on their way through the gateway: what of a head is for the next hop
//! only (RFC 9110 §7.6.1), and where the gateway and an instance could see different
//! messages in the same bytes (RFC 9112 §11.2).
//!
//! hyper has parsed each message, and writes it anew. Of several ways to write the same,
//! only one reaches an instance.

use super::head::{HeadError, host_in_authority};
use hyper::header::{
    AGE, CONNECTION, CONTENT_LENGTH, COOKIE, DATE, EXPECT, HOST, HeaderMap, HeaderName,
    HeaderValue, TE, TRAILER, TRANSFER_ENCODING, UPGRADE,
};
use hyper::http::request::Parts;
use hyper::http::uri::PathAndQuery;
use hyper::http::{Method, StatusCode, Uri, Version, response};
use std::time::{Duration, SystemTime};

/// The id of a request, in the gateway's own answers and in no other.
pub const REQUEST_ID: HeaderName = HeaderName::from_static("thaw-request-id");
/// Of the gateway's own answers alone: what is wrong, in the word that clients get.
pub const ERROR: HeaderName = HeaderName::from_static("thaw-error");

/// How the client has spoken to the gateway, for the function.
pub const FORWARDED_PROTO: HeaderName = HeaderName::from_static("x-forwarded-proto");

/// The header of a trace (W3C Trace Context).
pub const TRACEPARENT: HeaderName = HeaderName::from_static("traceparent");

/// Fields that describe one hop, whether `Connection` names them or not.
const HOP_BY_HOP: [HeaderName; 4] = [
    CONNECTION,
    TRANSFER_ENCODING,
    HeaderName::from_static("keep-alive"),
    HeaderName::from_static("proxy-connection"),
];

/// Fields that go on to the next hop, whatever `Connection` names.
const KEPT: [HeaderName; 5] = [HOST, CONTENT_LENGTH, UPGRADE, FORWARDED_PROTO, TRACEPARENT];

/// What follows the answer to a request on a connection to an instance.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Afterwards {
    /// Nothing: the instance has been told so.
    Close,
    /// Perhaps another request.
    KeepAlive,
}

/// The host that a request names: by the authority of its target, or else by its
/// `Host` field (RFC 9112 §3.2.2). `None`: by neither, or it is an IP address.
///
/// # Errors
/// The request does not say clearly what it is for.
pub fn host_of(head: &Parts) -> Result<Option<String>, HeadError> {
    let mut hosts = head.headers.get_all(HOST).iter();
    let host = hosts.next();
    if hosts.next().is_some() {
        return Err(HeadError::Host("the request has two Host headers; send one"));
    }
    if let Some(authority) = authority_of(&head.uri) {
        return Ok(host_in_authority(authority));
    }
    match host {
        Some(host) => {
            let host = std::str::from_utf8(host.as_bytes())
                .map_err(|_| HeadError::Host("the Host header is not text; send a host name"))?;
            Ok(host_in_authority(host.trim()))
        }
        None if head.version < Version::HTTP_11 => Ok(None),
        None => Err(HeadError::Host("the request has no Host header; send one")),
    }
}

fn authority_of(target: &Uri) -> Option<&str> {
    let is_ours = matches!(target.scheme_str(), Some("http" | "https"));
    let authority = target.authority().filter(|_| is_ours)?.as_str();
    Some(authority.rsplit_once('@').map_or(authority, |(_, host)| host))
}

/// Whether the request asks for another protocol on its connection. Another version of HTTP is
/// none: its requests would pass the gateway unseen.
pub fn wants_upgrade(head: &Parts) -> bool {
    let mut protocols = head.headers.get_all(UPGRADE).iter().peekable();
    head.version == Version::HTTP_11
        && protocols.peek().is_some()
        && protocols.all(|value| !names_http(value))
        && has_option(&head.headers, "upgrade")
}

/// Whether one of the protocols in a list is HTTP, as such, as `h2c` or within TLS (RFC 9110 §7.8,
/// RFC 2817, RFC 7540 §3.2).
fn names_http(value: &HeaderValue) -> bool {
    let Ok(text) = value.to_str() else { return true };
    text.split(',').any(|protocol| {
        let name = protocol.split('/').next().unwrap_or_default().trim();
        ["h2c", "h2", "h3", "http", "tls"].iter().any(|http| name.eq_ignore_ascii_case(http))
    })
}

/// Makes a client's request one to an instance of `function`.
///
/// # Errors
/// The request can be read in more than one way, or is not for servers.
pub fn to_instance(
    head: &mut Parts,
    function: &str,
    afterwards: Afterwards,
) -> Result<(), HeadError> {
    if head.method == Method::CONNECT {
        return Err(HeadError::Malformed("CONNECT is for proxies"));
    }
    let is_chunked = is_chunked(&head.headers)?;
    if head.version == Version::HTTP_2 {
        join_cookies(&mut head.headers);
    }
    let wants_upgrade = wants_upgrade(head);
    let wants_trailers = head.headers.get_all(TE).iter().any(|value| has_token(value, "trailers"));
    remove_hop_by_hop(&mut head.headers);
    // The gateway asks the client for the body when it is wanted.
    head.headers.remove(EXPECT);
    head.headers.remove(TE);
    head.headers.remove("http2-settings");
    if !wants_upgrade {
        head.headers.remove(UPGRADE);
    }
    if is_chunked {
        head.headers.remove(CONTENT_LENGTH);
        head.headers.insert(TRANSFER_ENCODING, HeaderValue::from_static("chunked"));
    }
    if wants_trailers {
        head.headers.insert(TE, HeaderValue::from_static("trailers"));
    }
    let options = match (wants_upgrade, wants_trailers, afterwards) {
        // A server that does not switch ends the connection after its answer.
        (true, _, _) => Some("upgrade"),
        (false, false, Afterwards::Close) => Some("close"),
        (false, true, Afterwards::Close) => Some("close, te"),
        (false, true, Afterwards::KeepAlive) => Some("te"),
        (false, false, Afterwards::KeepAlive) => None,
    };
    if let Some(options) = options {
        head.headers.insert(CONNECTION, HeaderValue::from_static(options));
    }
    normalise_target(head, function);
    head.version = Version::HTTP_11;
    Ok(())
}

/// Makes a client's request one of HTTP/2 to an instance of `function`.
///
/// # Errors
/// The request can be read in more than one way, or is not for servers.
pub fn to_http2(head: &mut Parts, function: &str) -> Result<(), HeadError> {
    let has_coding = head.headers.contains_key(TRANSFER_ENCODING);
    // It is asked for no other protocol: streams do not change theirs.
    head.headers.remove(UPGRADE);
    to_instance(head, function, Afterwards::KeepAlive)?;
    let headers = &mut head.headers;
    if has_coding {
        headers.remove(CONTENT_LENGTH);
    }
    headers.remove(TRANSFER_ENCODING);
    headers.remove(CONNECTION);
    // The gateway takes them, whatever it does with them; servers of gRPC insist on it.
    headers.insert(TE, HeaderValue::from_static("trailers"));
    let host = headers.remove(HOST);
    // The authority is one, whatever the client has sent (RFC 9113 §8.3.1).
    let authority = host.as_ref().and_then(|host| host.to_str().ok()).unwrap_or(function);
    let path = head.uri.path_and_query().map_or("/", PathAndQuery::as_str);
    let uri = Uri::builder().scheme("http").authority(authority).path_and_query(path).build();
    let uri = uri.ok().filter(|_| !authority.contains('@'));
    head.uri = uri.ok_or(HeadError::Host("its host is not one that a URI can have"))?;
    head.version = Version::HTTP_2;
    Ok(())
}

/// Takes out of trailers what says how a message is sent, or which one it is (RFC 9110 §6.5.1).
pub fn clean_trailers(trailers: &mut HeaderMap) {
    remove_hop_by_hop(trailers);
    for name in [HOST, CONTENT_LENGTH, TE, UPGRADE, TRAILER, REQUEST_ID, ERROR] {
        trailers.remove(name);
    }
}

/// The same for a client's trailers, and takes out what the gateway sets or guards in heads: some
/// programs make no difference.
pub fn clean_request_trailers(trailers: &mut HeaderMap) {
    clean_trailers(trailers);
    let is_guarded = |name: &&HeaderName| {
        let name = name.as_str();
        ["authorization", "traceparent"].contains(&name)
            || ["thaw-", "x-forwarded-"].iter().any(|own| name.starts_with(own))
    };
    let guarded: Vec<HeaderName> = trailers.keys().filter(is_guarded).cloned().collect();
    for name in guarded {
        trailers.remove(name);
    }
}

/// HTTP/2 may send a cookie in pieces; before, it was one field (RFC 9113 §8.2.3).
fn join_cookies(headers: &mut HeaderMap) {
    let pieces: Vec<&[u8]> = headers.get_all(COOKIE).iter().map(HeaderValue::as_bytes).collect();
    if pieces.len() > 1
        && let Ok(whole) = HeaderValue::from_bytes(&pieces.join(&b"; "[..]))
    {
        headers.insert(COOKIE, whole);
    }
}

/// Servers get the path only, and the authority as `Host` (RFC 9112 §3.2.1).
fn normalise_target(head: &mut Parts, function: &str) {
    if let Some(authority) = authority_of(&head.uri)
        && let Ok(host) = HeaderValue::from_str(authority)
    {
        head.headers.insert(HOST, host);
    }
    if !head.headers.contains_key(HOST)
        && let Ok(host) = HeaderValue::from_str(function)
    {
        head.headers.insert(HOST, host);
    }
    if head.uri.scheme().is_some() || head.uri.authority().is_some() {
        let root = PathAndQuery::from_static("/");
        let path = head.uri.path_and_query().cloned().unwrap_or(root);
        head.uri = Uri::from(path);
    }
}

/// How much older than now the date of an answer may be: clocks differ.
const DATE_MAX_AGE: Duration = Duration::from_secs(60);

/// Gives an answer the present date in the place of one that its program kept from before it was frozen. A
/// cache, which may say an older one, says the age, too (RFC 9111 §5.1).
fn renew_date(headers: &mut HeaderMap, now: SystemTime) {
    let said = headers.get(DATE).and_then(|date| date.to_str().ok());
    let Some(Ok(said)) = said.map(httpdate::parse_http_date) else { return };
    let is_old = now.duration_since(said).is_ok_and(|age| age > DATE_MAX_AGE);
    if is_old
        && !headers.contains_key(AGE)
        && let Ok(date) = HeaderValue::from_str(&httpdate::fmt_http_date(now))
    {
        headers.insert(DATE, date);
    }
}

/// Makes an instance's answer one to a client.
pub fn to_client(head: &mut response::Parts) {
    renew_date(&mut head.headers, SystemTime::now());
    let has_coding = head.headers.contains_key(TRANSFER_ENCODING);
    remove_hop_by_hop(&mut head.headers);
    if has_coding {
        // The coding has said where the body ends, not this: RFC 9112 §6.3.
        head.headers.remove(CONTENT_LENGTH);
    }
    if head.status != StatusCode::SWITCHING_PROTOCOLS {
        head.headers.remove(UPGRADE);
    }
    // The queue knows refusals by the latter: a function must not pass for the gateway.
    head.headers.remove(REQUEST_ID);
    head.headers.remove(ERROR);
    head.version = Version::HTTP_11;
}

/// Whether the instance will take another request on the connection of this answer.
pub fn keeps_alive(head: &response::Parts) -> bool {
    match head.version {
        Version::HTTP_11 => !has_option(&head.headers, "close"),
        _ => has_option(&head.headers, "keep-alive"),
    }
}

/// Whether the body of a request comes in chunks.
fn is_chunked(headers: &HeaderMap) -> Result<bool, HeadError> {
    let mut codings = headers.get_all(TRANSFER_ENCODING).iter();
    match (codings.next(), codings.next()) {
        (None, _) => Ok(false),
        (Some(coding), None) if coding.as_bytes().trim_ascii().eq_ignore_ascii_case(b"chunked") => {
            Ok(true)
        }
        // Other codings would have to be undone, as `chunked` is: RFC 9112 §6.1.
        _ => Err(HeadError::Malformed("its Transfer-Encoding is not exactly `chunked`")),
    }
}

fn remove_hop_by_hop(headers: &mut HeaderMap) {
    let named: Vec<HeaderName> = headers
        .get_all(CONNECTION)
        .iter()
        .filter_map(|value| value.to_str().ok())
        .flat_map(|value| value.split(','))
        .filter_map(|name| HeaderName::from_bytes(name.trim().as_bytes()).ok())
        // The gateway itself needs these, or has written them; `Connection` cannot take them
        // away.
        .filter(|name| !KEPT.contains(name))
        .collect();
    for name in named.iter().chain(&HOP_BY_HOP) {
        headers.remove(name);
    }
}

fn has_option(headers: &HeaderMap, option: &str) -> bool {
    headers.get_all(CONNECTION).iter().any(|value| has_token(value, option))
}

fn has_token(value: &HeaderValue, token: &str) -> bool {
    let Ok(text) = value.to_str() else { return false };
    text.split(',').any(|found| found.trim().eq_ignore_ascii_case(token))
}

#[cfg(test)]
mod tests {
    use super::*;
    use hyper::Request;

    fn request(method: &str, target: &str, fields: &[(&str, &str)]) -> Parts {
        let mut request = Request::builder().method(method).uri(target);
        for (name, value) in fields {
            request = request.header(*name, *value);
        }
        request.body(()).unwrap().into_parts().0
    }

    #[test]
    fn the_date_of_a_frozen_program_is_renewed_and_no_other() {
        let now = httpdate::parse_http_date("Sun, 06 Nov 1994 08:49:37 GMT").unwrap();
        let after = |fields: &[(&str, &str)]| {
            let mut headers = HeaderMap::new();
            for (name, value) in fields {
                let name = HeaderName::from_bytes(name.as_bytes()).unwrap();
                headers.insert(name, HeaderValue::from_str(value).unwrap());
            }
            renew_date(&mut headers, now);
            headers.get(DATE).map(|date| date.to_str().unwrap().to_owned())
        };
        let (old, new) = ("Sun, 06 Nov 1994 07:49:37 GMT", "Sun, 06 Nov 1994 08:49:37 GMT");
        assert_eq!(after(&[("date", old)]).as_deref(), Some(new));
        for kept in ["Sun, 06 Nov 1994 08:48:40 GMT", "Sun, 06 Nov 1994 09:49:37 GMT", "yesterday"]
        {
            assert_eq!(after(&[("date", kept)]).as_deref(), Some(kept));
        }
        // Of a cache.
        assert_eq!(after(&[("date", old), ("age", "3600")]).as_deref(), Some(old));
        assert_eq!(after(&[]), None);
    }

    fn fields(headers: &HeaderMap) -> Vec<String> {
        let field = |(name, value): (&HeaderName, &HeaderValue)| {
            format!("{name}: {}", value.to_str().unwrap())
        };
        let mut all: Vec<_> = headers.iter().map(field).collect();
        all.sort();
        all
    }

    #[test]
    fn fields_of_one_hop_end_there() {
        let mut head = request(
            "GET",
            "/x?y",
            &[
                ("host", "f"),
                ("connection", "keep-alive, X-Own, host, x-forwarded-proto, Traceparent"),
                ("keep-alive", "timeout=5"),
                ("proxy-connection", "keep-alive"),
                ("x-forwarded-proto", "https"),
                ("traceparent", "3"),
                ("x-own", "1"),
                ("x-other", "2"),
                ("upgrade", "h2c"),
                ("expect", "100-continue"),
                ("te", "gzip"),
            ],
        );
        to_instance(&mut head, "f", Afterwards::KeepAlive).unwrap();
        let kept = ["host: f", "traceparent: 3", "x-forwarded-proto: https", "x-other: 2"];
        assert_eq!(fields(&head.headers), kept);
    }

    #[test]
    fn an_instance_of_its_own_is_told_that_nothing_follows() {
        let mut head = request("GET", "/", &[("host", "f"), ("te", "trailers")]);
        to_instance(&mut head, "f", Afterwards::Close).unwrap();
        assert_eq!(fields(&head.headers), ["connection: close, te", "host: f", "te: trailers"]);
    }

    #[test]
    fn upgrades_are_passed_on() {
        let asked = [("host", "f"), ("connection", "Upgrade"), ("upgrade", "websocket")];
        let mut head = request("GET", "/", &asked);
        assert!(wants_upgrade(&head));
        to_instance(&mut head, "f", Afterwards::Close).unwrap();
        assert_eq!(fields(&head.headers), ["connection: upgrade", "host: f", "upgrade: websocket"]);
        assert!(!wants_upgrade(&request("GET", "/", &[("upgrade", "websocket")])));
        // Requests of another HTTP would pass the gateway unseen.
        for http in ["h2c", "H2C", "websocket, h2c", "HTTP/2.0", "TLS/1.2, HTTP/1.1"] {
            let asked = [
                ("host", "f"),
                ("connection", "Upgrade"),
                ("upgrade", http),
                ("http2-settings", "AAA"),
            ];
            let mut head = request("GET", "/", &asked);
            assert!(!wants_upgrade(&head), "{http}");
            to_instance(&mut head, "f", Afterwards::KeepAlive).unwrap();
            assert_eq!(fields(&head.headers), ["host: f"], "{http}");
        }
    }

    #[test]
    fn only_one_way_to_say_chunked_is_taken() {
        let chunked = |values: &[&str]| {
            let fields: Vec<_> = values.iter().map(|value| ("transfer-encoding", *value)).collect();
            let mut head = request("POST", "/", &fields);
            to_instance(&mut head, "f", Afterwards::Close).map(|()| head.headers)
        };
        let headers = chunked(&["Chunked"]).unwrap();
        assert_eq!(headers[TRANSFER_ENCODING], "chunked");
        for values in
            [&["gzip, chunked"][..], &["chunked", "chunked"], &["xchunked"], &["identity"], &[""]]
        {
            assert!(matches!(chunked(values), Err(HeadError::Malformed(_))), "{values:?}");
        }
    }

    #[test]
    fn a_length_beside_a_coding_does_not_count() {
        let mut head = request(
            "POST",
            "/",
            &[("host", "f"), ("content-length", "3"), ("transfer-encoding", "chunked")],
        );
        to_instance(&mut head, "f", Afterwards::KeepAlive).unwrap();
        assert_eq!(fields(&head.headers), ["host: f", "transfer-encoding: chunked"]);
    }

    #[test]
    fn servers_get_the_path_and_the_host() {
        let mut head = request("GET", "http://u:p@a.b:8080/x?y", &[("host", "other")]);
        assert_eq!(host_of(&head).unwrap().as_deref(), Some("a.b"));
        to_instance(&mut head, "a", Afterwards::KeepAlive).unwrap();
        assert_eq!(head.uri, "/x?y");
        assert_eq!(head.headers[HOST], "a.b:8080");
        let mut head = request("GET", "http://a", &[]);
        to_instance(&mut head, "a", Afterwards::KeepAlive).unwrap();
        assert_eq!(head.uri, "/");
        let mut old = request("GET", "/", &[]);
        to_instance(&mut old, "f", Afterwards::KeepAlive).unwrap();
        assert_eq!(old.headers[HOST], "f");
    }

    #[test]
    fn requests_that_name_nobody_or_two_are_refused() {
        let two = request("GET", "/", &[("host", "f"), ("host", "g")]);
        assert!(matches!(host_of(&two), Err(HeadError::Host(_))));
        assert!(matches!(host_of(&request("GET", "/", &[])), Err(HeadError::Host(_))));
        let mut connect = request("CONNECT", "a:1", &[("host", "f")]);
        assert!(to_instance(&mut connect, "f", Afterwards::Close).is_err());
    }

    #[test]
    fn a_request_is_one_of_http2_with_one_authority() {
        let sent = [
            ("host", "other"),
            ("connection", "keep-alive, X-Own"),
            ("x-own", "1"),
            ("x-kept", "2"),
            ("te", "gzip"),
            ("upgrade", "websocket"),
            ("transfer-encoding", "chunked"),
            ("content-length", "3"),
        ];
        let mut head = request("POST", "http://a.b:8080/x?y", &sent);
        to_http2(&mut head, "f").unwrap();
        assert_eq!(head.uri, "http://a.b:8080/x?y");
        assert_eq!(fields(&head.headers), ["te: trailers", "x-kept: 2"]);
        // A length that is the only one stays.
        let mut head = request("POST", "/", &[("host", "f"), ("content-length", "3")]);
        to_http2(&mut head, "f").unwrap();
        assert_eq!(fields(&head.headers), ["content-length: 3", "te: trailers"]);
        let mut old = request("GET", "/", &[]);
        to_http2(&mut old, "f").unwrap();
        assert_eq!(old.uri, "http://f/");
        for host in ["u@f", "f/x", "f?x", "f#x", "f g", ""] {
            let mut head = request("GET", "/", &[("host", host)]);
            assert!(to_http2(&mut head, "f").is_err(), "{host:?}: {}", head.uri);
        }
        let two = [("transfer-encoding", "chunked"), ("transfer-encoding", "chunked")];
        assert!(to_http2(&mut request("POST", "/", &two), "f").is_err());
        assert!(to_http2(&mut request("CONNECT", "a:1", &[("host", "f")]), "f").is_err());
    }

    #[test]
    fn trailers_say_nothing_of_how_a_message_is_sent() {
        let (mut head, ()) = hyper::Response::builder()
            .header("connection", "x-own")
            .header("x-own", "1")
            .header("transfer-encoding", "chunked")
            .header("content-length", "7")
            .header("host", "h")
            .header("te", "trailers")
            .header("thaw-error", "e")
            .header("thaw-request-id", "1")
            .header("grpc-status", "0")
            .body(())
            .unwrap()
            .into_parts();
        clean_trailers(&mut head.headers);
        assert_eq!(fields(&head.headers), ["grpc-status: 0"]);
    }

    #[test]
    fn trailers_of_clients_say_nothing_that_only_the_gateway_may_say() {
        let sent = [
            ("authorization", "Bearer x"),
            ("traceparent", "00-1-1-01"),
            ("x-forwarded-proto", "https"),
            ("thaw-invocation-id", "1"),
            ("host", "h"),
            ("x-own", "1"),
        ];
        let mut trailers = request("POST", "/", &sent).headers;
        clean_request_trailers(&mut trailers);
        assert_eq!(fields(&trailers), ["x-own: 1"]);
    }

    #[test]
    fn a_cookie_of_http2_is_one_field_again() {
        let fields = [("host", "f"), ("cookie", "a=1"), ("cookie", "b=2")];
        let mut head = request("GET", "https://f/", &fields);
        head.version = Version::HTTP_2;
        to_instance(&mut head, "f", Afterwards::KeepAlive).unwrap();
        assert_eq!(self::fields(&head.headers), ["cookie: a=1; b=2", "host: f"]);
        assert_eq!((head.version, head.uri.to_string()), (Version::HTTP_11, "/".to_owned()));
    }

    #[test]
    fn answers_lose_what_was_for_the_gateway() {
        let (mut head, ()) = hyper::Response::builder()
            .version(Version::HTTP_10)
            .header("connection", "close, x-own")
            .header("x-own", "1")
            .header("transfer-encoding", "chunked")
            .header("content-length", "7")
            .header("upgrade", "h2c")
            .header("server", "s")
            .header("thaw-request-id", "1")
            .header("Thaw-Request-Id", "2")
            .header("Thaw-Error", "unavailable")
            .body(())
            .unwrap()
            .into_parts();
        assert!(!keeps_alive(&head));
        to_client(&mut head);
        assert_eq!(fields(&head.headers), ["server: s"]);
        assert_eq!(head.version, Version::HTTP_11);
    }
}
