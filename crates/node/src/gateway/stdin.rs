//! Functions that read their request from standard input.
//!
//! Here the gateway does speak HTTP with the client: the body of a request goes
//! into a pair of sockets whose other end is the standard input and output of a
//! fresh instance; what the program prints is the body of the response, and how
//! it ended is the status.

use super::accept::Arrival;
use super::refusal::Refusal;
use super::ticket::Ticket;
use crate::clock::monotonic_ns;
use crate::instance::{Client, End, Outcome};
use crate::node::Shared;
use crate::service::Service;
use axum::body::Bytes;
use axum::http::header::CONTENT_TYPE;
use axum::http::{HeaderName, HeaderValue, Request, Response, StatusCode};
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use std::convert::Infallible;
use std::io;
use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;
use thaw_sandbox::GuestExit;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpStream, UnixStream};
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

/// Who asks.
struct Asker {
    shared: Arc<Shared>,
    service: Arc<Service>,
    peer: SocketAddr,
    local: SocketAddr,
}

/// Serves a client's connection to its end.
pub(super) async fn serve(shared: Arc<Shared>, service: Arc<Service>, arrival: Arrival) {
    let Arrival { socket, peer, local, accepted_ns } = arrival;
    let Ok(stream) = TcpStream::from_std(socket.into()) else { return };
    let asker = Arc::new(Asker { shared, service, peer, local });
    let first_ns = AtomicU64::new(accepted_ns);
    let handle = service_fn(move |request| {
        // Later requests of the connection come when they come.
        let since = match first_ns.swap(0, Ordering::Relaxed) {
            0 => monotonic_ns(),
            accepted_ns => accepted_ns,
        };
        let asker = asker.clone();
        async move { Ok::<_, Infallible>(asker.answer(request, since).await) }
    });
    let connection =
        hyper::server::conn::http1::Builder::new().serve_connection(TokioIo::new(stream), handle);
    if let Err(error) = connection.await {
        tracing::debug!(%peer, "a client's connection ended: {error}");
    }
}

impl Asker {
    async fn answer(&self, request: Request<Incoming>, accepted_ns: u64) -> Response<Full<Bytes>> {
        match self.run(request, accepted_ns).await {
            Ok((exit, output)) => respond(exit, output),
            Err(refusal) => {
                let metrics = self.shared.metrics();
                metrics.refused(Some(self.service.name()), refusal.status(), refusal.error());
                refuse(&refusal)
            }
        }
    }

    /// Runs one instance on the body of a request.
    async fn run(
        &self,
        request: Request<Incoming>,
        accepted_ns: u64,
    ) -> Result<(GuestExit, Vec<u8>), Refusal> {
        let broken = |error: io::Error| self.died(format!("the host refused a socket ({error})"));
        let (ours, theirs) = UnixStream::pair().map_err(broken)?;
        let socket = theirs.into_std().map_err(broken)?.into();
        let mut ticket = self.place(socket, accepted_ns).await?;

        let limit = self.service.config().limits.timeout.0;
        let (mut reader, mut writer) = ours.into_split();
        let upload = async move {
            let mut body = request.into_body();
            while let Some(Ok(frame)) = body.frame().await {
                let Ok(data) = frame.into_data() else { continue };
                // A program that has read enough may end.
                if writer.write_all(&data).await.is_err() {
                    break;
                }
            }
            let _ = writer.shutdown().await;
            // Its end must not be seen before the request was complete.
            writer
        };
        let mut output = Vec::new();
        let download = async {
            let mut limited = (&mut reader).take(OUTPUT_MAX as u64 + 1);
            limited.read_to_end(&mut output).await
        };
        tokio::pin!(upload, download);
        let mut sent = None;
        let mut deadline = Instant::now() + limit;
        loop {
            tokio::select! {
                // A program that is killed may leave its end unread: no error.
                _ = &mut download => break,
                writer = &mut upload, if sent.is_none() => {
                    sent = Some(writer);
                    deadline = Instant::now() + limit;
                }
                () = sleep_until(deadline), if sent.is_some() => {
                    self.service.kill(ticket.instance);
                    return Err(Refusal::Timeout {
                        function: self.service.name().to_string(),
                        timeout: limit,
                    });
                }
            }
        }
        if output.len() > OUTPUT_MAX {
            self.service.kill(ticket.instance);
            let reason = format!("it printed more than {} MiB for one request", OUTPUT_MAX >> 20);
            return Err(self.died(reason));
        }
        let Ok(outcome) = timeout(ENDING, &mut ticket.done).await else {
            self.service.kill(ticket.instance);
            return Err(self.died(format!(
                "it closed its standard output and did not end within {} s",
                ENDING.as_secs()
            )));
        };
        match outcome {
            Ok(Outcome::Gone(End::Exited(exit))) => Ok((exit, output)),
            Ok(Outcome::Gone(end)) => Err(self.died(end.to_string())),
            _ => Err(self.died("its instance was lost".to_owned())),
        }
    }

    async fn place(&self, socket: OwnedFd, accepted_ns: u64) -> Result<Ticket, Refusal> {
        let (id, peer, local) = (self.shared.next_id(), self.peer, self.local);
        let client =
            Arc::new(Client { id, socket, peer, local, accepted_ns, wants_head_only: false });
        // Once it is placed, the instance alone has the other end.
        match Ticket::at_once(&self.service, &client)? {
            Some(ticket) => Ok(ticket),
            None => Ticket::wait(&self.service, &client).await,
        }
    }

    fn died(&self, reason: String) -> Refusal {
        super::attend::died(&self.service, reason)
    }
}

/// The response to a request on which a program has run: 200 if it succeeded.
fn respond(exit: GuestExit, output: Vec<u8>) -> Response<Full<Bytes>> {
    let kind = match std::str::from_utf8(&output) {
        Ok(_) => "text/plain; charset=utf-8",
        Err(_) => "application/octet-stream",
    };
    let (header, number) = match exit {
        GuestExit::Code(code) => (EXIT_CODE_HEADER, code),
        GuestExit::Signal(signal) => (SIGNAL_HEADER, signal),
    };
    let mut response = Response::new(Full::new(Bytes::from(output)));
    if exit != GuestExit::Code(0) {
        *response.status_mut() = StatusCode::INTERNAL_SERVER_ERROR;
    }
    let headers = response.headers_mut();
    headers.insert(CONTENT_TYPE, HeaderValue::from_static(kind));
    headers.insert(HeaderName::from_static(header), HeaderValue::from(u16::from(number)));
    response
}

fn refuse(refusal: &Refusal) -> Response<Full<Bytes>> {
    let mut response = Response::new(Full::new(Bytes::from(refusal.body())));
    let status = StatusCode::from_u16(refusal.status());
    *response.status_mut() = status.unwrap_or(StatusCode::BAD_GATEWAY);
    let headers = response.headers_mut();
    headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
    if let Some(seconds) = refusal.retry_after() {
        headers.insert(axum::http::header::RETRY_AFTER, HeaderValue::from(seconds));
    }
    response
}
