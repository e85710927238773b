//! What every request passes: its host, the session, the origin of what changes something, and the
//! headers that keep browsers from being used against the operator.

use super::App;
use super::frame;
use super::session::{COOKIE, LIFE, Session};
use axum::Router;
use axum::body::{Body, Bytes};
use axum::extract::{Request, State};
use axum::http::{HeaderMap, HeaderValue, Method, StatusCode, header, uri::Authority};
use axum::middleware::Next;
use axum::response::{IntoResponse, Redirect, Response};
use axum::routing::{get, post};
use http_body_util::{BodyExt, Limited};
use serde::Deserialize;
use std::time::Duration;

/// Most bytes of a form.
const FORM_MAX: usize = 16 << 10;
/// How long a form may take to come.
const FORM_PATIENCE: Duration = Duration::from_secs(10);
/// How long a wrong token is not answered.
const WRONG_PAUSE: Duration = Duration::from_millis(300);
/// What every answer may load: files of this origin, and nothing that is written into a page.
const POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; \
    connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'";

/// Adds headers to every answer.
pub(super) async fn protect(State(app): State<App>, request: Request, next: Next) -> Response {
    let mut response = match app.access.knows_host(&request) {
        true => next.run(request).await,
        false => {
            let reason = "the dashboard is not known by this host name; use its address, or start \
                          the daemon with --admin-name";
            frame::plain(StatusCode::FORBIDDEN, reason)
        }
    };
    let headers = response.headers_mut();
    for (name, value) in [
        (header::CONTENT_SECURITY_POLICY, POLICY),
        (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
        // With `no-referrer` browsers would send `Origin: null` with our own forms.
        (header::REFERRER_POLICY, "same-origin"),
        (header::X_FRAME_OPTIONS, "DENY"),
        (header::CACHE_CONTROL, "no-store"),
    ] {
        // A page may be stricter, and files may be kept.
        headers.entry(name).or_insert(HeaderValue::from_static(value));
    }
    for (name, value) in [
        ("cross-origin-opener-policy", "same-origin"),
        ("cross-origin-resource-policy", "same-origin"),
        ("permissions-policy", "camera=(), microphone=(), geolocation=(), usb=()"),
    ] {
        headers.insert(name, HeaderValue::from_static(value));
    }
    response
}

/// The login.
pub(super) fn routes() -> Router<App> {
    Router::new().route("/login", get(login_page).post(login))
}

/// The way out, for those who are logged in.
pub(super) fn routes_out() -> Router<App> {
    Router::new().route("/logout", post(logout))
}

/// Lets only those through who are logged in.
pub(super) async fn check(State(app): State<App>, mut request: Request, next: Next) -> Response {
    let session = session_of(&app, request.headers());
    let Some(session) = session.filter(|_| comes_from_here(request.headers())) else {
        return ask_to_log_in(&request);
    };
    let is_upgrade = request.headers().contains_key(header::UPGRADE);
    let changes = ![Method::GET, Method::HEAD].contains(request.method());
    if (changes || is_upgrade) && !is_same_origin(request.headers()) {
        return frame::plain(StatusCode::FORBIDDEN, "this request comes from another page");
    }
    if changes {
        let checked = check_form(request, &session).await;
        request = match checked {
            Ok(request) => request,
            Err(refused) => return *refused,
        };
    }
    request.extensions_mut().insert(session);
    next.run(request).await
}

fn ask_to_log_in(request: &Request) -> Response {
    if request.headers().contains_key("hx-request") {
        let refreshed = [("hx-redirect", HeaderValue::from_static("/login"))];
        return (StatusCode::UNAUTHORIZED, refreshed).into_response();
    }
    let is_page = request.method() == Method::GET
        && !request.headers().contains_key(header::UPGRADE)
        && request
            .headers()
            .get(header::ACCEPT)
            .is_some_and(|accept| accept.to_str().is_ok_and(|accept| accept.contains("text/html")));
    if is_page {
        return Redirect::to("/login").into_response();
    }
    frame::plain(StatusCode::UNAUTHORIZED, "log in at /login first")
}

/// The session whose name the browser has sent.
fn session_of(app: &App, headers: &HeaderMap) -> Option<Session> {
    app.sessions.find(cookie(headers)?)
}

/// Value of the session's cookie (RFC 6265, 4.2).
fn cookie(headers: &HeaderMap) -> Option<&str> {
    let lines = headers.get_all(header::COOKIE).into_iter();
    let mut pairs =
        lines.filter_map(|line| line.to_str().ok()).flat_map(|line| line.split(';').map(str::trim));
    pairs.find_map(|pair| pair.strip_prefix(COOKIE)?.strip_prefix('='))
}

/// Whether no other page has caused the request, as far as the browser says (Fetch Metadata).
/// Another port of this host is the same site, to which cookies are sent.
fn comes_from_here(headers: &HeaderMap) -> bool {
    headers
        .get("sec-fetch-site")
        .is_none_or(|site| [b"same-origin".as_slice(), b"none"].contains(&site.as_bytes()))
}

/// Whether the page that has caused the request is of this host and port.
fn is_same_origin(headers: &HeaderMap) -> bool {
    let text = |name| headers.get(name).and_then(|value: &HeaderValue| value.to_str().ok());
    let (Some(origin), Some(host)) = (text(header::ORIGIN), text(header::HOST)) else {
        return false;
    };
    let Some((_, origin)) = origin.split_once("://") else { return false };
    match (origin.parse::<Authority>(), host.parse::<Authority>()) {
        (Ok(origin), Ok(host)) => origin == host,
        _ => false,
    }
}

#[derive(Deserialize)]
struct AnyForm {
    #[serde(default)]
    form: String,
}

/// Lets only forms through that carry the session's secret.
async fn check_form(request: Request, session: &Session) -> Result<Request, Box<Response>> {
    let (head, body) = request.into_parts();
    let bytes = whole_form(body).await?;
    let sent =
        serde_urlencoded::from_bytes::<AnyForm>(&bytes).unwrap_or(AnyForm { form: String::new() });
    if !session.has_sent(&sent.form) {
        let why = "the form is of another session; load the page again";
        return Err(Box::new(frame::plain(StatusCode::FORBIDDEN, why)));
    }
    Ok(Request::from_parts(head, Body::from(bytes)))
}

/// Reads a form, which is short and comes soon.
async fn whole_form(body: Body) -> Result<Bytes, Box<Response>> {
    let refused = |status, why| Box::new(frame::plain(status, why));
    let whole = Limited::new(body, FORM_MAX).collect();
    match tokio::time::timeout(FORM_PATIENCE, whole).await {
        Ok(Ok(body)) => Ok(body.to_bytes()),
        Ok(Err(_)) => Err(refused(StatusCode::PAYLOAD_TOO_LARGE, "the form is too long")),
        Err(_) => Err(refused(StatusCode::REQUEST_TIMEOUT, "the form did not come")),
    }
}

async fn login_page() -> Response {
    frame::login(None).into_response()
}

#[derive(Deserialize)]
struct LoginForm {
    token: String,
}

async fn login(State(app): State<App>, request: Request) -> Response {
    let (head, body) = request.into_parts();
    if !is_same_origin(&head.headers) || !comes_from_here(&head.headers) {
        return frame::plain(StatusCode::FORBIDDEN, "this request comes from another page");
    }
    let form = match whole_form(body).await {
        Ok(bytes) => serde_urlencoded::from_bytes::<LoginForm>(&bytes),
        Err(refused) => return *refused,
    };
    let Ok(form) = form else {
        return frame::plain(StatusCode::BAD_REQUEST, "the form has no token");
    };
    if !app.access.token.is(form.token.trim().as_bytes()) {
        tracing::warn!("somebody showed a wrong token to the dashboard");
        let _turn = app.wrong.acquire().await;
        tokio::time::sleep(WRONG_PAUSE).await;
        let page = frame::login(Some("This is not the token of this node."));
        return (StatusCode::UNAUTHORIZED, page).into_response();
    }
    app.sessions.tidy();
    let id = app.sessions.begin();
    app.note("", "somebody has logged in");
    let cookie =
        format!("{COOKIE}={id}; Path=/; HttpOnly; SameSite=Strict; Max-Age={}", LIFE.as_secs());
    // The name is hexadecimal.
    ([(header::SET_COOKIE, cookie)], Redirect::to("/")).into_response()
}

async fn logout(State(app): State<App>, headers: HeaderMap) -> Response {
    if let Some(id) = cookie(&headers) {
        app.sessions.end(id);
    }
    let cookie = format!("{COOKIE}=; Path=/; HttpOnly; SameSite=Strict; Max-Age=0");
    ([(header::SET_COOKIE, cookie)], Redirect::to("/login")).into_response()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn headers(pairs: &[(&'static str, &'static str)]) -> HeaderMap {
        let pairs = pairs.iter().map(|(name, value)| {
            (header::HeaderName::from_static(name), HeaderValue::from_static(value))
        });
        pairs.collect()
    }

    #[test]
    fn origins_are_compared_with_host_and_port() {
        let is = |origin, host| is_same_origin(&headers(&[("origin", origin), ("host", host)]));
        assert!(is("http://127.0.0.1:8083", "127.0.0.1:8083"));
        assert!(is("https://thaw.example", "thaw.example"));
        assert!(!is("http://127.0.0.1:8080", "127.0.0.1:8083"));
        assert!(!is("null", "127.0.0.1:8083"));
        assert!(!is_same_origin(&headers(&[("host", "127.0.0.1:8083")])));
    }

    #[test]
    fn the_cookie_is_found_among_others() {
        let found = |line| cookie(&headers(&[("cookie", line)])).map(str::to_owned);
        assert_eq!(found("a=b; thaw_session=12; c=d").as_deref(), Some("12"));
        assert_eq!(found("thaw_session-2=12; xthaw_session=1"), None);
    }

    #[test]
    fn another_port_is_another_page() {
        assert!(comes_from_here(&headers(&[])));
        assert!(comes_from_here(&headers(&[("sec-fetch-site", "same-origin")])));
        assert!(!comes_from_here(&headers(&[("sec-fetch-site", "same-site")])));
        assert!(!comes_from_here(&headers(&[("sec-fetch-site", "cross-site")])));
    }
}
