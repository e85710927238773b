//! The client's side of a measurement.

use super::BenchError;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, Instant};

/// How long one response may take.
pub(crate) const PATIENCE: Duration = Duration::from_secs(30);

/// A request after whose response the server closes the connection.
pub(crate) fn get(name: &str, path: &str) -> Vec<u8> {
    format!("GET {path} HTTP/1.1\r\nHost: {name}\r\nConnection: close\r\n\r\n").into_bytes()
}

/// The same with an argument.
pub(crate) fn post(name: &str, path: &str, argument: &[u8]) -> Vec<u8> {
    let mut request = format!(
        "POST {path} HTTP/1.1\r\nHost: {name}\r\nConnection: close\r\n\
         Content-Type: application/octet-stream\r\nContent-Length: {}\r\n\r\n",
        argument.len()
    )
    .into_bytes();
    request.extend_from_slice(argument);
    request
}

/// One request, until the server closes the connection; returns the client's
/// address and the bytes of the response.
pub(crate) fn exchange(
    address: SocketAddr,
    request: &[u8],
) -> Result<(SocketAddr, usize), BenchError> {
    let mut client = TcpStream::connect(address)?;
    client.set_nodelay(true)?;
    client.set_read_timeout(Some(PATIENCE))?;
    client.set_write_timeout(Some(PATIENCE))?;
    let local = client.local_addr()?;
    client.write_all(request)?;
    let mut response = Vec::new();
    client.read_to_end(&mut response)?;
    let head = String::from_utf8_lossy(&response[..response.len().min(200)]).into_owned();
    let status = head.split(' ').nth(1).and_then(|code| code.parse::<u16>().ok());
    match status {
        Some(200..=399) => Ok((local, response.len())),
        _ => Err(BenchError::Response(head)),
    }
}

/// Asks again and again until there is an answer.
pub(crate) fn eventually<T>(question: impl Fn() -> Option<T>) -> Option<T> {
    let deadline = Instant::now() + Duration::from_secs(30);
    loop {
        if let Some(answer) = question() {
            return Some(answer);
        }
        if Instant::now() >= deadline {
            return None;
        }
        std::thread::sleep(Duration::from_micros(200));
    }
}
