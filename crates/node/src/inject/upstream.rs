//! The connection to a server: to an address that the rule leads to, over TLS, and to nobody whose
//! certificate is not the host's.

use super::proxy::Function;
use hyper::body::Incoming;
use hyper::client::conn::http1::{Builder, SendRequest};
use hyper_util::rt::TokioIo;
use rustls_pki_types::ServerName;
use std::io;
use std::net::{IpAddr, TcpStream as StdStream};
use std::os::fd::OwnedFd;
use std::time::Duration;
use thaw_sandbox::{DialError, Dialer};
use tokio::net::TcpStream;
use tokio::sync::oneshot;
use tokio::task::JoinSet;
use tokio::time::timeout;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;

/// Most bytes of the head of an answer.
const HEAD_MAX: usize = 64 << 10;
/// Most fields of one.
const FIELDS_MAX: usize = 128;

/// Sends requests to a server.
pub(super) type Sender = SendRequest<Incoming>;

/// A connection to a server. What moves its bytes ends with it.
pub(super) struct Line {
    /// The host.
    pub host: String,
    /// The address that it has there.
    pub address: IpAddr,
    /// Takes requests.
    pub sender: Sender,
    /// What moves the bytes.
    _driver: JoinSet<()>,
}

/// Connects to a host, and begins to speak HTTP.
///
/// # Errors
/// One sentence's end: why not.
pub(super) async fn connect(
    function: &Function,
    dialer: &Dialer,
    host: &str,
    port: u16,
) -> Result<Line, String> {
    let config = function.towards_servers()?;
    let patience = function.patience.handshake;
    let stream = reach(dialer, host, port, patience).await?;
    let address = stream.peer_addr().map_err(|error| error.to_string())?.ip();
    let name = ServerName::try_from(host.to_owned()).map_err(|error| error.to_string())?;
    let shaking = TlsConnector::from(config).connect(name, stream);
    let stream: TlsStream<TcpStream> = match timeout(patience, shaking).await {
        Ok(Ok(stream)) => stream,
        Ok(Err(error)) => return Err(format!("its TLS is not trusted or broken ({error})")),
        Err(_) => return Err("it does not answer in TLS".to_owned()),
    };
    let (sender, driver) = Builder::new()
        .max_header_size(HEAD_MAX)
        .max_buf_size(HEAD_MAX)
        .max_headers(FIELDS_MAX)
        .handshake(TokioIo::new(stream))
        .await
        .map_err(|error| error.to_string())?;
    // An error reaches whoever waits for the answer through the answer.
    let mut tasks = JoinSet::new();
    tasks.spawn(async move { drop(driver.with_upgrades().await) });
    Ok(Line { host: host.to_owned(), address, sender, _driver: tasks })
}

/// A connection to the first address that answers.
async fn reach(
    dialer: &Dialer,
    host: &str,
    port: u16,
    patience: Duration,
) -> Result<TcpStream, String> {
    let mut last = String::new();
    for attempt in 0.. {
        let (sender, receiver) = oneshot::channel();
        dialer.dial(host, port, attempt, move |outcome| drop(sender.send(outcome)));
        let dialed = receiver.await.map_err(|_| "nobody connects any more".to_owned())?;
        match dialed {
            Ok(socket) => match timeout(patience, connected(socket)).await {
                Ok(Ok(stream)) => return Ok(stream),
                Ok(Err(error)) => last = error.to_string(),
                Err(_) => last = "it does not answer".to_owned(),
            },
            Err(DialError::Connect(error)) => last = error.to_string(),
            // Those before have said more.
            Err(DialError::NoMore) => break,
            Err(error) => return Err(error.to_string()),
        }
    }
    Err(last)
}

/// Waits until a connect has ended.
async fn connected(socket: OwnedFd) -> io::Result<TcpStream> {
    let stream = TcpStream::from_std(StdStream::from(socket))?;
    stream.writable().await?;
    match stream.take_error()? {
        None => Ok(stream),
        Some(error) => Err(error),
    }
}
