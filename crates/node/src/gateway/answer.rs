//! Answering a client in a function's place.

use super::refusal::{Audience, Refusal};
use crate::edge::RequestId;
use crate::instance::Client;
use std::io;
use std::net::{Shutdown, TcpStream as StdStream};
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::timeout;

/// How long a client may take to read an answer.
const PATIENCE: Duration = Duration::from_secs(5);
/// Most bytes of a request that are thrown away so that its sender reads the answer.
const DISCARD_MAX: usize = 1 << 20;

/// Sends the refusal and closes the client's connection. A client that has gone
/// away is nobody's error.
pub(super) async fn refuse(client: &Client, refusal: &Refusal, id: RequestId, audience: Audience) {
    let response = refusal.response(id, audience, client.wants_head_only);
    if let Err(error) = timeout(PATIENCE, send(client, &response)).await.unwrap_or(Ok(())) {
        tracing::debug!(peer = %client.peer, "could not answer a client: {error}");
    }
}

async fn send(client: &Client, response: &[u8]) -> io::Result<()> {
    let socket = StdStream::from(client.socket.try_clone()?);
    // Whoever had the connection shares this flag.
    socket.set_nonblocking(true)?;
    let mut stream = TcpStream::from_std(socket)?;
    stream.write_all(response).await?;
    stream.shutdown().await?;
    // Closing a socket with unread bytes resets the connection, and the reset
    // overtakes the answer: RFC 9112 §9.6.
    let mut discarded = 0;
    let mut buffer = vec![0; 16 * 1024];
    while discarded < DISCARD_MAX {
        match stream.read(&mut buffer).await? {
            0 => return Ok(()),
            count => discarded += count,
        }
    }
    stream.into_std()?.shutdown(Shutdown::Both)
}
