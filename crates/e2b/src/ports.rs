//! Ports on which programs in sandboxes listen: HTTP, WebSockets, and with `Upgrade: thaw-port`
//! any bytes.
//!
//! A port is reached with the traffic access token of its sandbox (`E2b-Traffic-Access-Token`), or
//! by everybody if the sandbox was made so (`network.allowPublicTraffic`). Neither token is passed
//! on: the program inside may be anybody's.
//!
//! A server for `run_code` was frozen before the sandbox was made, and so without its environment.
//! It gets that with each request, in `Thaw-Sandbox-Environment`. Strangers at an open port cause
//! no such header: whatever listens there may show it to them.

use super::backend::ByteStream;
use super::problem::{Kind, Problem};
use super::records::{Holder, Record, are_equal};
use super::serve::{admit, header, refused};
use super::{E2b, PORTS_MAX, StreamPlace};
use axum::body::Body;
use axum::extract::Request;
use axum::http::{HeaderMap, HeaderName, HeaderValue, StatusCode, Version, header as names};
use axum::response::{IntoResponse, Response};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use hyper::client::conn::http1;
use hyper::upgrade::OnUpgrade;
use hyper_util::rt::TokioIo;
use std::sync::Arc;
use thaw_node::remote::ports::PORT_PROTOCOL;
use tokio::io::copy_bidirectional;

/// The header with the token.
const TOKEN_HEADER: &str = "e2b-traffic-access-token";
/// The header with the token of envd's part, which the SDKs send to the server for code, too.
const ENVD_TOKEN_HEADER: &str = "x-access-token";
/// The port at which the SDKs of E2B's code interpreter run code.
const CODE_PORT: u16 = 49999;
/// The header with the environment of the sandbox, for that port: a JSON object in Base64.
const ENVIRONMENT_HEADER: HeaderName = HeaderName::from_static("thaw-sandbox-environment");
/// Most bytes of its value, about half of what the server in `examples/code-interpreter` takes as a
/// head.
const ENVIRONMENT_MAX: usize = 512 << 10;
/// Headers that are about one connection only (RFC 9110 §7.6.1), those with tokens, and those
/// that only this node sets.
const NOT_PASSED: [&str; 10] = [
    "connection",
    "keep-alive",
    "proxy-authenticate",
    "proxy-authorization",
    "proxy-connection",
    "te",
    "transfer-encoding",
    "thaw-sandbox-environment",
    TOKEN_HEADER,
    ENVD_TOKEN_HEADER,
];

/// Passes a request on to whatever listens on a port of a sandbox.
pub(super) async fn pass(e2b: Arc<E2b>, id: String, port: u16, request: Request) -> Response {
    let [shown, of_envd] = [TOKEN_HEADER, ENVD_TOKEN_HEADER]
        .map(|name| header(request.headers(), name).map(str::to_owned));
    let protocol = upgrade_of(request.headers());
    let is_raw = protocol.is_some_and(|protocol| protocol.eq_ignore_ascii_case(PORT_PROTOCOL));
    let connected = async {
        let (_, record) = admit(&e2b, &id, |record| {
            let is_shown = is_shown(&e2b, shown, |holder| e2b.records.traffic_token(&id, holder));
            if record.is_open || is_shown { Ok(()) } else { Err(private()) }
        })
        .await?;
        // Visitors of an open port do not take the places of its owner's commands.
        let place = e2b.ports.enter_below(&id, PORTS_MAX)?;
        let is_known =
            !record.is_open || is_shown(&e2b, of_envd, |holder| e2b.records.token(&id, holder));
        let environment = match port == CODE_PORT && !is_raw {
            true => Some(environment_of(&record, &id, is_known)?),
            false => None,
        };
        Ok::<_, Problem>((place, e2b.backend.port(&id, port).await?, environment))
    };
    let (place, stream, environment) = match connected.await {
        Ok(connected) => connected,
        Err(problem) => return refused(request.into_body(), problem.into_response()).await,
    };
    match is_raw {
        true => raw(request, stream, place),
        false => exchange(request, environment, stream, place).await,
    }
}

/// Whether a token is that of one who may have the sandbox.
fn is_shown(e2b: &E2b, shown: Option<String>, token: impl Fn(Holder) -> String) -> bool {
    shown.is_some_and(|shown| {
        e2b.settings.now().holders().any(|holder| are_equal(&shown, &token(holder)))
    })
}

/// The environment of a sandbox as a header: for strangers only what tells it from others.
fn environment_of(record: &Record, id: &str, is_known: bool) -> Result<HeaderValue, Problem> {
    let environment = if is_known { record.environment(id) } else { Record::identity(id) };
    let json = serde_json::to_vec(&environment).expect("plain data");
    let text = STANDARD.encode(json);
    if text.len() > ENVIRONMENT_MAX {
        let said = format!(
            "the environment of the sandbox has {} bytes in `{ENVIRONMENT_HEADER}`, and at most \
             {ENVIRONMENT_MAX} are sent; set less",
            text.len()
        );
        return Err(Problem::new(Kind::TooLarge, said));
    }
    Ok(HeaderValue::try_from(text).expect("Base64 is a header's text"))
}

fn private() -> Problem {
    Problem::new(
        Kind::Forbidden,
        "the ports of this sandbox are private; send its traffic access token in \
         `E2b-Traffic-Access-Token`, or make the sandbox with `allow_public_traffic`",
    )
}

/// The protocol that a client wants to go on with.
fn upgrade_of(headers: &HeaderMap) -> Option<String> {
    let connection = header(headers, names::CONNECTION.as_str())?;
    let is_asked = connection.split(',').any(|word| word.trim().eq_ignore_ascii_case("upgrade"));
    let protocol = header(headers, names::UPGRADE.as_str()).filter(|_| is_asked)?;
    Some(protocol.to_owned())
}

/// The connection carries the bytes of the port from now on.
fn raw(mut request: Request, stream: Box<dyn ByteStream>, place: StreamPlace) -> Response {
    let upgrade = hyper::upgrade::on(&mut request);
    tokio::spawn(async move {
        if let Ok(client) = upgrade.await {
            join(TokioIo::new(client), stream, place).await;
        }
    });
    let mut response = StatusCode::SWITCHING_PROTOCOLS.into_response();
    let headers = response.headers_mut();
    headers.insert(names::CONNECTION, HeaderValue::from_static("upgrade"));
    headers.insert(names::UPGRADE, HeaderValue::from_static(PORT_PROTOCOL));
    response
}

/// Carries bytes both ways until both sides are at their end, or one is gone.
async fn join(
    mut a: impl tokio::io::AsyncRead + tokio::io::AsyncWrite + Unpin,
    mut b: impl tokio::io::AsyncRead + tokio::io::AsyncWrite + Unpin,
    place: StreamPlace,
) {
    // A side that breaks off needs no more.
    let _ = copy_bidirectional(&mut a, &mut b).await;
    drop(place);
}

async fn exchange(
    mut request: Request,
    environment: Option<HeaderValue>,
    stream: Box<dyn ByteStream>,
    place: StreamPlace,
) -> Response {
    let client = hyper::upgrade::on(&mut request);
    let protocol = upgrade_of(request.headers());
    let Ok((mut sender, connection)) = http1::handshake(TokioIo::new(stream)).await else {
        return broken().into_response();
    };
    // It ends when the answer has been passed on, or the client is gone.
    let connection = tokio::spawn(connection.with_upgrades());
    let mut request = forwarded(request, protocol.as_deref());
    request.headers_mut().extend(environment.map(|value| (ENVIRONMENT_HEADER, value)));
    let answered = sender.send_request(request).await;
    let Ok(mut answer) = answered else { return broken().into_response() };
    let switches = answer.status() == StatusCode::SWITCHING_PROTOCOLS;
    let inner = switches.then(|| hyper::upgrade::on(&mut answer));
    let (mut parts, body) = answer.into_parts();
    let protocol = upgrade_of(&parts.headers).filter(|_| switches);
    strip(&mut parts.headers, protocol.as_deref());
    tokio::spawn(async move {
        match inner {
            Some(inner) => switch(client, inner, place).await,
            None => {
                // Nothing else is asked of it, so it ends when the answer has been read.
                drop(sender);
                let _ = connection.await;
                drop(place);
            }
        }
    });
    Response::from_parts(parts, Body::new(body))
}

async fn switch(client: OnUpgrade, inner: OnUpgrade, place: StreamPlace) {
    if let (Ok(client), Ok(inner)) = tokio::join!(client, inner) {
        join(TokioIo::new(client), TokioIo::new(inner), place).await;
    }
}

fn broken() -> Problem {
    Problem::new(
        Kind::Gone,
        "the program that listens on this port of the sandbox has broken off, or speaks no HTTP",
    )
}

/// The request as the program in the sandbox gets it.
fn forwarded(request: Request, protocol: Option<&str>) -> Request {
    let (mut parts, body) = request.into_parts();
    strip(&mut parts.headers, protocol);
    parts.version = Version::HTTP_11;
    let path = parts.uri.path_and_query().map_or("/", |path| path.as_str());
    // It was a path before, too.
    parts.uri = path.parse().unwrap_or_default();
    Request::from_parts(parts, body)
}

/// Removes what is about one connection only, but for the protocol that it goes on with.
fn strip(headers: &mut HeaderMap, protocol: Option<&str>) {
    let named = header(headers, names::CONNECTION.as_str()).unwrap_or_default().to_owned();
    let named = named.split(',').filter_map(|name| HeaderName::try_from(name.trim()).ok());
    let named = named.filter(|name| protocol.is_none() || name != names::UPGRADE);
    for name in named.collect::<Vec<_>>() {
        headers.remove(name);
    }
    for name in NOT_PASSED {
        headers.remove(name);
    }
    match protocol {
        Some(_) => headers.insert(names::CONNECTION, HeaderValue::from_static("upgrade")),
        None => headers.remove(names::UPGRADE),
    };
}
