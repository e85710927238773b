//! The listener of E2B's API, and which part of the API a request is for.

use super::address::Address;
use super::backend::Sandbox;
use super::connect::refuse;
use super::files::Signature;
use super::problem::{Kind, Problem};
use super::records::{Record, are_equal};
use super::{E2b, control, files, filesystem, ports, process, templates, volumes};
use axum::Router;
use axum::body::Body;
use axum::extract::{DefaultBodyLimit, Request, State};
use axum::http::header::CONNECTION;
use axum::http::request::Parts;
use axum::http::{HeaderMap, HeaderValue, Method, StatusCode};
use axum::middleware::{self, Next};
use axum::response::{IntoResponse, Response};
use http_body_util::{BodyExt, Limited};
use hyper::server::conn::http1;
use hyper::service::Service;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use rustix::net::sockopt;
use rustls::ServerConfig;
use std::io::{self, ErrorKind};
use std::sync::Arc;
use std::time::Duration;
use thaw_http::linger::Lingering;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;
use tokio::time::timeout;
use tokio_rustls::TlsAcceptor;

/// Most connections at a time; others wait in the backlog. A command in the foreground has one.
const CONNECTIONS: usize = 1024;
/// How long the head of a request may take, and a connection may be idle: the SDKs keep
/// connections for so long, and whoever closes first loses a request now and then.
const HEAD_PATIENCE: Duration = Duration::from_secs(330);
/// Most bytes of a request's head.
const HEAD_MAX: usize = 64 * 1024;
/// After descriptors ran out, so long others can give some back.
const RESPITE: Duration = Duration::from_millis(100);
/// After so long without a sign of life the host asks whether the client is there.
const KEEP_ALIVE_IDLE: Duration = Duration::from_secs(60);
/// Most bytes of a request of the control API.
const CONTROL_BODY_MAX: usize = 1 << 20;
/// Most bytes of a body that are read though nobody needs them.
const UNREAD_MAX: usize = 64 << 10;
/// How long that may take.
const UNREAD_PATIENCE: Duration = Duration::from_secs(5);
/// How long a client may take to begin to speak TLS.
const HANDSHAKE_PATIENCE: Duration = Duration::from_secs(10);

/// The sandbox that a request of envd's part is for.
#[derive(Clone, Debug)]
pub(super) struct Target {
    /// Its id.
    pub id: String,
    /// What is known of it.
    pub record: Record,
    /// Where relative paths begin in it.
    pub directory: String,
}

impl E2b {
    /// Serves clients.
    ///
    /// # Errors
    /// The listener fails.
    pub async fn serve(self: Arc<Self>, listener: TcpListener) -> io::Result<()> {
        tokio::spawn(self.clone().clean_up());
        tokio::spawn(Self::remove_unused_steps_daily(Arc::downgrade(&self)));
        tokio::spawn(Self::take_samples(Arc::downgrade(&self)));
        tokio::spawn(volumes::OpenVolumes::close_idle(Arc::downgrade(&self.open_volumes)));
        let router = self.router();
        let tls = self.tls.as_ref();
        let places = Arc::new(Semaphore::new(CONNECTIONS));
        loop {
            let place =
                places.clone().acquire_owned().await.expect("the semaphore is never closed");
            match accept(&listener).await {
                Ok(stream) => {
                    let router = router.clone();
                    let tls = tls.map(|tls| tls.now(&self.settings.now().certificates));
                    tokio::spawn(async move {
                        match tls {
                            Some(tls) => serve_tls(stream, tls, router).await,
                            None => serve_connection(stream, router).await,
                        }
                        drop(place);
                    });
                }
                Err(error) => {
                    let is_of_one = [ErrorKind::ConnectionAborted, ErrorKind::ConnectionReset];
                    if !is_of_one.contains(&error.kind()) {
                        tracing::warn!("E2B's API cannot accept a connection ({error})");
                        tokio::time::sleep(RESPITE).await;
                    }
                }
            }
        }
    }

    /// Both parts of the API as a service: envd's for requests that name a sandbox.
    pub(super) fn router(self: &Arc<Self>) -> Router {
        let control = control::routes()
            .layer(DefaultBodyLimit::max(CONTROL_BODY_MAX))
            .layer(middleware::from_fn_with_state(self.clone(), control::check_key))
            .with_state(self.clone());
        let envd = Router::new()
            .merge(process::routes())
            .merge(filesystem::routes())
            .merge(files::routes())
            .fallback(|request: Request| async move {
                let (parts, body) = request.into_parts();
                refused(body, refuse(&parts.headers, nothing(&parts))).await
            })
            .layer(DefaultBodyLimit::disable())
            .layer(middleware::from_fn_with_state(self.clone(), check_token))
            .with_state(self.clone());
        let uploads =
            templates::upload_routes().layer(DefaultBodyLimit::disable()).with_state(self.clone());
        let contents =
            volumes::content_routes().layer(DefaultBodyLimit::disable()).with_state(self.clone());
        let control = Router::new().merge(uploads).merge(contents).fallback_service(control);
        let e2b = self.clone();
        Router::new().fallback(move |request: Request| {
            let (e2b, envd, control) = (e2b.clone(), envd.clone(), control.clone());
            async move { e2b.dispatch(request, envd, control).await }
        })
    }

    /// Has a request answered by the part that it is for.
    async fn dispatch(
        self: Arc<Self>,
        request: Request,
        envd: Router,
        control: Router,
    ) -> Response {
        let (mut parts, body) = request.into_parts();
        let is_health = parts.uri.path() == "/health" && parts.method == Method::GET;
        match Address::of(&parts, self.settings.now().domain.as_deref()) {
            Ok(Address::Control) if is_health => StatusCode::NO_CONTENT.into_response(),
            Ok(Address::Control) => answer(control, Request::from_parts(parts, body)).await,
            Ok(Address::Envd(id)) if is_health => self.health(&id),
            Ok(Address::Envd(id)) => {
                parts.extensions.insert(SandboxId(id));
                answer(envd, Request::from_parts(parts, body)).await
            }
            Ok(Address::Port(id, port)) => {
                ports::pass(self, id, port, Request::from_parts(parts, body)).await
            }
            Err(problem) => refused(body, problem.into_response()).await,
        }
    }

    /// Whether a sandbox runs.
    fn health(&self, id: &str) -> Response {
        let found = self.backend.find(id).filter(|sandbox| !sandbox.is_paused());
        match found.filter(|_| self.records.get(id).is_some()) {
            Some(_) => StatusCode::NO_CONTENT.into_response(),
            None => Problem::gone(id).into_response(),
        }
    }
}

impl Target {
    /// The user that a request names, or otherwise that of the template.
    pub fn user(&self, named: Option<String>) -> Option<String> {
        named.or_else(|| self.record.defaults.user.clone())
    }
}

/// The sandbox whose envd a request is for.
#[derive(Clone)]
struct SandboxId(String);

/// There is no such request.
pub(super) fn nothing(request: &Parts) -> Problem {
    let (method, path) = (&request.method, request.uri.path());
    Problem::unsupported(format!(
        "{method} {path} is nothing that this server does; docs/e2b.md lists all that it does"
    ))
}

/// Answers without having read a body. What there is of it is read first, within a bound: a
/// connection with an unread body is closed, and the client would send its next request there.
pub(super) async fn refused(body: Body, answer: Response) -> Response {
    let rest = Limited::new(body, UNREAD_MAX).collect();
    match timeout(UNREAD_PATIENCE, rest).await {
        Ok(Ok(_)) => answer,
        _ => closing(answer),
    }
}

/// An answer after which the connection closes, and which says so.
pub(super) fn closing(mut answer: Response) -> Response {
    answer.headers_mut().insert(CONNECTION, HeaderValue::from_static("close"));
    answer
}

async fn answer(part: Router, request: Request) -> Response {
    let answered = TowerToHyperService::new(part).call(request).await;
    answered.unwrap_or_else(|never| match never {})
}

async fn accept(listener: &TcpListener) -> io::Result<TcpStream> {
    let (stream, _) = listener.accept().await?;
    stream.set_nodelay(true)?;
    // A client that vanishes while it waits for a process does not keep its place.
    sockopt::set_socket_keepalive(&stream, true)?;
    sockopt::set_tcp_keepidle(&stream, KEEP_ALIVE_IDLE)?;
    Ok(stream)
}

async fn serve_tls(stream: TcpStream, tls: Arc<ServerConfig>, router: Router) {
    let handshake = TlsAcceptor::from(tls).accept(stream);
    match timeout(HANDSHAKE_PATIENCE, handshake).await {
        Ok(Ok(stream)) => serve_connection(stream, router).await,
        Ok(Err(error)) => tracing::debug!("a client of E2B's API speaks no TLS: {error}"),
        Err(_) => {}
    }
}

async fn serve_connection<S>(stream: S, router: Router)
where
    S: AsyncRead + AsyncWrite + Send + Unpin + 'static,
{
    let served = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(HEAD_PATIENCE)
        .max_buf_size(HEAD_MAX)
        .serve_connection(TokioIo::new(Lingering::new(stream)), TowerToHyperService::new(router))
        .with_upgrades()
        .await;
    if let Err(error) = served {
        tracing::debug!("a connection to E2B's API has failed: {error}");
    }
}

/// A header as text.
pub(super) fn header<'a>(headers: &'a HeaderMap, name: &str) -> Option<&'a str> {
    headers.get(name).and_then(|value| value.to_str().ok())
}

/// Lets requests of envd's part through that show the token of the sandbox they are for, which
/// runs. One that is paused is resumed first if that was asked for when it was made.
async fn check_token(State(e2b): State<Arc<E2b>>, request: Request, next: Next) -> Response {
    let (mut parts, body) = request.into_parts();
    let path = parts.uri.path();
    match find_target(&e2b, &parts).await {
        Ok(target) => {
            parts.extensions.insert(target);
            next.run(Request::from_parts(parts, body)).await
        }
        // The SDKs read this one as of a proxy: by its status.
        Err(problem) if problem.kind == Kind::Gone || path == files::PATH => {
            refused(body, problem.into_response()).await
        }
        Err(problem) => refused(body, refuse(&parts.headers, problem)).await,
    }
}

async fn find_target(e2b: &Arc<E2b>, request: &Parts) -> Result<Target, Problem> {
    let headers = &request.headers;
    let id = request.extensions.get::<SandboxId>().map_or("", |id| &id.0);
    let shown = header(headers, "x-access-token");
    let said = |holder| {
        let token = e2b.records.token(id, holder);
        match shown {
            Some(shown) if are_equal(shown, &token) => Signature::Valid,
            Some(_) => Signature::Missing,
            None => files::signature(request, &token),
        }
    };
    let (sandbox, record) = admit(e2b, id, |_| {
        let said: Vec<Signature> = e2b.settings.now().holders().map(said).collect();
        match (said.contains(&Signature::Valid), said.contains(&Signature::Expired)) {
            (true, _) => Ok(()),
            (false, true) => Err(expired()),
            (false, false) => Err(no_token()),
        }
    })
    .await?;
    let directory = record.defaults.directory.clone().unwrap_or(sandbox.directory);
    Ok(Target { id: id.to_owned(), record, directory })
}

/// In the words of E2B, which its clients compare.
fn expired() -> Problem {
    Problem::new(Kind::Unauthenticated, "signature is already expired")
}

fn no_token() -> Problem {
    Problem::new(
        Kind::Unauthenticated,
        "the access token of the sandbox is missing or wrong; connect to the sandbox by the API to \
         get it",
    )
}

/// The sandbox of this id for somebody who is allowed to use it, which runs then: one that is
/// paused is resumed if that was asked for when it was made.
///
/// # Errors
/// There is none, it is paused and stays so, its key was taken away, or whoever asks may not.
pub(super) async fn admit(
    e2b: &Arc<E2b>,
    id: &str,
    may: impl FnOnce(&Record) -> Result<(), Problem>,
) -> Result<(Sandbox, Record), Problem> {
    let found = e2b.backend.find(id).zip(e2b.records.get(id));
    let (sandbox, record) = found.ok_or_else(|| Problem::gone(id))?;
    may(&record)?;
    if !e2b.settings.now().has_owner(&record.owner) {
        return Err(Problem::new(
            Kind::Unauthenticated,
            "the key that has made the sandbox was taken away, and its tokens with it; e2b.toml of \
             the node has those that count",
        ));
    }
    if sandbox.is_paused() {
        if !record.auto_resume {
            return Err(Problem::gone(id));
        }
        let (e2b, id, seconds) = (e2b.clone(), id.to_owned(), record.timeout_s);
        thaw_node::to_its_end::to_its_end(async move { e2b.backend.resume(&id, seconds).await })
            .await?;
    }
    Ok((sandbox, record))
}
