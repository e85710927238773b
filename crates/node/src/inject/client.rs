//! One connection of a sandbox: TLS by the node's authority, or none, and HTTP/1.1 in it.
//!
//! A request goes to the host that TLS and the request both name, or nowhere: nobody gets a header
//! that is meant for another.

use super::own::OwnHeaders;
use super::proxy::{Function, Open};
use super::upstream::{Line, connect};
use super::watch::{Activity, Watched};
use http_body_util::{Either, Full};
use hyper::body::{Bytes, Incoming};
use hyper::header::{ALT_SVC, CONNECTION, CONTENT_TYPE, HOST, HeaderMap, HeaderName, HeaderValue};
use hyper::http::request::Parts;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::upgrade::OnUpgrade;
use hyper::{Request, Response, StatusCode};
use hyper_util::rt::{TokioIo, TokioTimer};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::{RecvFlags, recv};
use rustls::server::Acceptor;
use std::convert::Infallible;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use thaw_http::message::{Afterwards, host_of, to_client, to_instance, wants_upgrade};
use thaw_sandbox::{Dialer, Intercepted};
use tokio::io::{AsyncRead, AsyncWrite, Interest, copy_bidirectional};
use tokio::net::UnixStream;
use tokio::task::spawn_blocking;
use tokio::time::{sleep, timeout};
use tokio_rustls::LazyConfigAcceptor;

/// Most bytes of the head of a request, and of what is read ahead of its body.
const BUFFER: usize = 64 << 10;
/// Most fields of a request.
const FIELDS_MAX: usize = 128;
/// The port of requests that are not encrypted on their way to the proxy.
const PLAIN_PORT: u16 = 80;
/// Where those go, and the port of TLS.
const TLS_PORT: u16 = 443;
/// Methods whose answer repeats the request (RFC 9110 §9.3.8, and its form in IIS).
const ECHOES: [&str; 2] = ["TRACE", "TRACK"];
/// Fields by which some servers take a request for another one than its first line says.
const OVERRIDES: [HeaderName; 5] = [
    HeaderName::from_static("x-http-method"),
    HeaderName::from_static("x-http-method-override"),
    HeaderName::from_static("x-method-override"),
    HeaderName::from_static("x-original-url"),
    HeaderName::from_static("x-rewrite-url"),
];
/// The first byte of a handshake of TLS (RFC 8446 §5.1).
const HANDSHAKE: u8 = 0x16;
/// How often it is looked whether a sandbox is there.
const LOOK: Duration = Duration::from_secs(1);
/// How long the connection to a server may take to be done with the answer before.
const SETTLING: Duration = Duration::from_secs(1);

type Body = Either<Incoming, Full<Bytes>>;

/// Serves a connection until either side ends it, or nothing moves on it.
pub(super) async fn serve(function: Arc<Function>, connection: Intercepted, open: Open) {
    let (activity, idle) = (Activity::new(), function.patience.idle);
    let Ok(peer) = connection.socket.try_clone() else { return };
    tokio::select! {
        // A sandbox that breaks off is no event.
        _ = speak(function, connection, activity.clone()) => {}
        () = activity.ceases(idle) => {}
        // Nobody reads what is written, and what was written may hide that.
        () = hung_up(peer) => {}
    }
    drop(open);
}

/// Returns when the sandbox has closed its end, or has ended.
async fn hung_up(peer: OwnedFd) {
    loop {
        sleep(LOOK).await;
        let mut ends = [PollFd::new(&peer, PollFlags::empty())];
        let seen = poll(&mut ends, Some(&Timespec::default()));
        if seen.is_ok() && ends[0].revents().contains(PollFlags::HUP) {
            return;
        }
    }
}

async fn speak(
    function: Arc<Function>,
    connection: Intercepted,
    activity: Activity,
) -> io::Result<()> {
    let stream = UnixStream::from_std(connection.socket.into())?;
    let patience = function.patience.handshake;
    let first = timeout(function.patience.head, first_byte(&stream)).await??;
    let mut client = Client {
        function: function.clone(),
        port: connection.port,
        sni: None,
        dialer: connection.dialer,
        line: tokio::sync::Mutex::default(),
        tunnel: Mutex::default(),
    };
    let stream = Watched { stream, activity };
    if first != HANDSHAKE {
        return exchange(client, stream).await;
    }
    let config = function.towards_sandboxes().await.inspect_err(|error| {
        function.complain(&error.to_string());
    })?;
    let hello = LazyConfigAcceptor::new(Acceptor::default(), stream);
    let hello = timeout(patience, hello).await??;
    client.sni = hello.client_hello().server_name().map(str::to_ascii_lowercase);
    if function.trusts_all && !client.sni.as_ref().is_some_and(|host| client.has_name(host)) {
        // A certificate would be made for whatever it names.
        return Err(io::ErrorKind::InvalidInput.into());
    }
    // Without a name there is no certificate.
    let stream = timeout(patience, hello.into_stream(config)).await??;
    exchange(client, stream).await
}

/// The first byte that comes, which stays there.
async fn first_byte(stream: &UnixStream) -> io::Result<u8> {
    let peek = || {
        let mut byte = [0];
        let (count, _) = recv(stream, &mut byte, RecvFlags::PEEK | RecvFlags::DONTWAIT)?;
        if count == 0 { Err(io::ErrorKind::UnexpectedEof.into()) } else { Ok(byte[0]) }
    };
    stream.async_io(Interest::READABLE, peek).await
}

/// Answers requests until there are no more, and is a tunnel if the last one asked for it.
async fn exchange<S>(client: Client, stream: S) -> io::Result<()>
where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let head = client.function.patience.head;
    let client = Arc::new(client);
    let answering = client.clone();
    let service = service_fn(move |request| {
        let client = answering.clone();
        async move { Ok::<_, Infallible>(client.answer(request).await) }
    });
    http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(head)
        .max_buf_size(BUFFER)
        .max_headers(FIELDS_MAX)
        .serve_connection(TokioIo::new(stream), service)
        .with_upgrades()
        .await
        .map_err(io::Error::other)?;
    let tunnel = client.tunnel.lock().unwrap_or_else(PoisonError::into_inner).take();
    if let Some([sandbox, server]) = tunnel {
        let sandbox = sandbox.await.map_err(io::Error::other)?;
        let server = server.await.map_err(io::Error::other)?;
        copy_bidirectional(&mut TokioIo::new(sandbox), &mut TokioIo::new(server)).await?;
    }
    Ok(())
}

struct Client {
    function: Arc<Function>,
    /// The port that the sandbox has connected to.
    port: u16,
    /// The host that its TLS names; none without TLS.
    sni: Option<String>,
    dialer: Dialer,
    /// The connection to a server, which waits for the next request to it.
    line: tokio::sync::Mutex<Option<Line>>,
    /// Both ends of what has become of the connection.
    tunnel: Mutex<Option<[OnUpgrade; 2]>>,
}

/// Why a request is not sent: what the sandbox is told.
struct Refusal {
    status: StatusCode,
    why: String,
}

impl Refusal {
    fn new(status: StatusCode, why: impl Into<String>) -> Self {
        Self { status, why: why.into() }
    }

    fn answer(self) -> Response<Body> {
        let text = format!("thaw: {}\n", self.why);
        let mut response = Response::new(Either::Right(Full::new(Bytes::from(text))));
        *response.status_mut() = self.status;
        let kind = HeaderValue::from_static("text/plain; charset=utf-8");
        response.headers_mut().insert(CONTENT_TYPE, kind);
        response
    }
}

impl Client {
    async fn answer(&self, request: Request<Incoming>) -> Response<Body> {
        match self.forward(request).await {
            Ok(response) => response,
            Err(refusal) => {
                if refusal.status.is_server_error() {
                    self.function.complain(&refusal.why);
                }
                refusal.answer()
            }
        }
    }

    async fn forward(&self, mut request: Request<Incoming>) -> Result<Response<Body>, Refusal> {
        let on_sandbox = hyper::upgrade::on(&mut request);
        let (mut head, body) = request.into_parts();
        let (host, port) = self.destination(&head)?;
        let is_echo = |method: &str| head.method.as_str().eq_ignore_ascii_case(method);
        if ECHOES.into_iter().any(is_echo) {
            let why = "TRACE is not sent: its answer would have the header in it";
            return Err(Refusal::new(StatusCode::METHOD_NOT_ALLOWED, why));
        }
        let wants_upgrade = wants_upgrade(&head);
        to_instance(&mut head, &host, Afterwards::KeepAlive)
            .map_err(|error| Refusal::new(StatusCode::BAD_REQUEST, error.to_string()))?;
        let injected = self.injected(&head, &host, port).await?;
        if !injected.is_empty() {
            OVERRIDES.into_iter().for_each(|name| drop(head.headers.remove(name)));
        }
        for (name, value) in &injected {
            // All of that name go, however many the sandbox has sent.
            head.headers.insert(name.clone(), value.clone());
        }
        let authority = if port == TLS_PORT { host.clone() } else { format!("{host}:{port}") };
        let authority = HeaderValue::from_str(&authority)
            .map_err(|_| Refusal::new(StatusCode::BAD_REQUEST, "its host is no name"))?;
        head.headers.insert(HOST, authority);
        let response = self.send(Request::from_parts(head, body), &host, port).await?;
        Ok(self.returned(response, wants_upgrade.then_some(on_sandbox)))
    }

    /// The host that a request is for: the one that TLS names, too, and one of the rules.
    fn destination(&self, head: &Parts) -> Result<(String, u16), Refusal> {
        let misdirected = |why: String| Refusal::new(StatusCode::MISDIRECTED_REQUEST, why);
        let host = host_of(head)
            .map_err(|error| Refusal::new(StatusCode::BAD_REQUEST, error.to_string()))?
            .ok_or_else(|| misdirected("the request names no host".to_owned()))?;
        if let Some(sni) = self.sni.as_ref().filter(|sni| **sni != host) {
            return Err(misdirected(format!(
                "the request is for `{}`, and its TLS is for `{sni}`; make a connection for each",
                host.escape_default()
            )));
        }
        let port = if self.port == PLAIN_PORT { TLS_PORT } else { self.port };
        if !self.has(&host, port) {
            return Err(misdirected(format!(
                "no headers are added for `{}` at port {port}",
                host.escape_default()
            )));
        }
        Ok((host, port))
    }

    /// The headers of the sandbox itself, as they are now.
    fn own(&self) -> Option<Arc<OwnHeaders>> {
        self.dialer.told()?.downcast().ok()
    }

    /// Whether there are rules for a host.
    fn has(&self, host: &str, port: u16) -> bool {
        self.function.rules_of(host, port).next().is_some()
            || self.own().is_some_and(|own| own.has(host, port))
    }

    /// The same for what TLS names on this connection.
    fn has_name(&self, host: &str) -> bool {
        let port = if self.port == PLAIN_PORT { TLS_PORT } else { self.port };
        self.has(host, port)
    }

    /// The headers that the rules add to a request; of two rules for a header the first counts, and
    /// one of the function before one of the sandbox.
    async fn injected(&self, head: &Parts, host: &str, port: u16) -> Result<HeaderMap, Refusal> {
        let own = self.own();
        let own_rules = own.iter().flat_map(|own| own.rules());
        let own_rules = own_rules.filter(|rule| rule.name() == host && rule.port() == port);
        let all = self.function.rules_of(host, port).chain(own_rules);
        let fitting = all.filter(|rule| rule.fits(head.method.as_str(), head.uri.path()));
        let fitting: Vec<_> = fitting.cloned().collect();
        let mut added = HeaderMap::new();
        for (name, value) in own.iter().flat_map(|own| own.values(host, port)) {
            added.insert(name, value);
        }
        for rule in &fitting {
            added.remove(rule.header());
        }
        if fitting.is_empty() {
            return Ok(added);
        }
        let function = self.function.clone();
        let read = spawn_blocking(move || -> Result<HeaderMap, String> {
            let store = function.secrets()?;
            for rule in fitting {
                if added.contains_key(rule.header()) {
                    continue;
                }
                let value = rule.value::<String>(|name| {
                    store.value(&function.name, name).map_err(|error| function.told(error))
                })?;
                added.insert(HeaderName::clone(rule.header()), value);
            }
            Ok(added)
        });
        let unusable = |why: String| Refusal::new(StatusCode::BAD_GATEWAY, why);
        read.await.map_err(|error| unusable(error.to_string()))?.map_err(unusable)
    }

    /// Sends a request, over the connection of the one before if that is to the same host.
    async fn send(
        &self,
        mut request: Request<Incoming>,
        host: &str,
        port: u16,
    ) -> Result<Response<Incoming>, Refusal> {
        let failed = |why: String| {
            Refusal::new(StatusCode::BAD_GATEWAY, format!("cannot ask {host}:{port}: {why}"))
        };
        let mut line = self.line.lock().await;
        loop {
            let ready = match line.take().filter(|waiting| self.may_use(waiting, host, port)) {
                Some(mut waiting) => {
                    let ready = timeout(SETTLING, waiting.sender.ready()).await;
                    matches!(ready, Ok(Ok(()))).then_some(waiting)
                }
                None => None,
            };
            let was_waiting = ready.is_some();
            let mut used = match ready {
                Some(waiting) => waiting,
                None => {
                    let made = connect(&self.function, &self.dialer, host, port).await;
                    made.map_err(failed)?
                }
            };
            match used.sender.try_send_request(request).await {
                Ok(response) => {
                    *line = Some(used);
                    return Ok(response);
                }
                Err(mut error) => match error.take_message().filter(|_| was_waiting) {
                    // The server has closed it meanwhile, and has seen nothing of the request.
                    Some(unsent) => request = unsent,
                    None => return Err(failed(error.into_error().to_string())),
                },
            }
        }
    }

    /// Whether a connection leads to this host, and the sandbox may use it yet.
    fn may_use(&self, line: &Line, host: &str, port: u16) -> bool {
        line.host == host && self.dialer.may_reach(host, port, line.address)
    }

    /// Makes a server's answer one to the sandbox.
    fn returned(
        &self,
        mut response: Response<Incoming>,
        on_sandbox: Option<OnUpgrade>,
    ) -> Response<Body> {
        let on_server = hyper::upgrade::on(&mut response);
        let (mut head, body) = response.into_parts();
        to_client(&mut head);
        // It names other ports and protocols of the server, which the sandbox does not reach.
        head.headers.remove(ALT_SVC);
        if head.status == StatusCode::SWITCHING_PROTOCOLS {
            let Some(on_sandbox) = on_sandbox else {
                let why = "the server changes the protocol without being asked";
                return Refusal::new(StatusCode::BAD_GATEWAY, why).answer();
            };
            head.headers.insert(CONNECTION, HeaderValue::from_static("upgrade"));
            let mut tunnel = self.tunnel.lock().unwrap_or_else(PoisonError::into_inner);
            *tunnel = Some([on_sandbox, on_server]);
            return Response::from_parts(head, Either::Right(Full::default()));
        }
        Response::from_parts(head, Either::Left(body))
    }
}
