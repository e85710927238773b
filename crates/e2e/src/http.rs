//! HTTP clients: a well-behaved one, and one that sends what it is told to.

use std::io::{self, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

/// How long an answer may take before it is taken for lost.
const PATIENCE: Duration = Duration::from_secs(60);

/// An answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Response {
    /// The status code.
    pub status: u16,
    /// Names in lower case, and values.
    pub headers: Vec<(String, String)>,
    /// The body.
    pub body: Vec<u8>,
}

impl Response {
    /// A header's value.
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.iter().find(|(n, _)| n == name).map(|(_, value)| value.as_str())
    }

    /// The body as text.
    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.body).into_owned()
    }

    /// The body as JSON.
    #[track_caller]
    pub fn json(&self) -> serde_json::Value {
        serde_json::from_slice(&self.body)
            .unwrap_or_else(|error| panic!("{error} in {:?}", self.text()))
    }
}

/// Makes a request with a real HTTP client, on a connection of its own.
///
/// # Errors
/// No answer, or not a whole one.
pub fn request(
    gateway: SocketAddr,
    host: &str,
    path: &str,
    body: Option<&[u8]>,
) -> Result<Response, String> {
    let agent: ureq::Agent = ureq::Agent::config_builder()
        .http_status_as_error(false)
        .timeout_global(Some(PATIENCE))
        .build()
        .into();
    let url = format!("http://{gateway}{path}");
    let result = match body {
        None => agent.get(&url).header("Host", host).call(),
        Some(body) => agent.post(&url).header("Host", host).send(body),
    };
    let mut response = result.map_err(|error| error.to_string())?;
    let headers = response
        .headers()
        .iter()
        .map(|(n, v)| (n.as_str().to_owned(), String::from_utf8_lossy(v.as_bytes()).into_owned()))
        .collect();
    let status = response.status().as_u16();
    let body = response
        .body_mut()
        .with_config()
        .limit(64 << 20)
        .read_to_vec()
        .map_err(|error| error.to_string())?;
    Ok(Response { status, headers, body })
}

/// Makes a GET request over a Unix socket.
///
/// # Errors
/// No answer, or not a whole one.
pub fn request_local(socket: &Path, path: &str) -> Result<Response, String> {
    let answer = || -> std::io::Result<Vec<u8>> {
        let mut stream = UnixStream::connect(socket)?;
        stream.set_read_timeout(Some(PATIENCE))?;
        let head = format!("GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n");
        stream.write_all(head.as_bytes())?;
        let mut answer = Vec::new();
        stream.read_to_end(&mut answer)?;
        Ok(answer)
    };
    let bytes = answer().map_err(|error| error.to_string())?;
    let (response, _) = parse(&bytes).ok_or("the answer is cut off")?;
    Ok(response)
}

/// A GET request that must be answered.
#[track_caller]
pub fn get(gateway: SocketAddr, host: &str, path: &str) -> Response {
    request(gateway, host, path, None).unwrap_or_else(|error| panic!("GET {host}{path}: {error}"))
}

/// A POST request that must be answered.
#[track_caller]
pub fn post(gateway: SocketAddr, host: &str, path: &str, body: &[u8]) -> Response {
    request(gateway, host, path, Some(body))
        .unwrap_or_else(|error| panic!("POST {host}{path}: {error}"))
}

/// What a client hears that waits for a response.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Heard {
    /// A whole response.
    Response(Response),
    /// The connection ended after so many bytes of one.
    Cut(usize),
    /// The connection ended without a byte.
    End,
    /// Nothing more came, and the connection did not end, within the time.
    Silence,
}

/// A connection on which the bytes are one's own.
#[derive(Debug)]
pub struct Raw {
    stream: TcpStream,
    received: Vec<u8>,
}

impl Raw {
    /// Connects.
    pub fn connect(address: SocketAddr) -> Self {
        Self::try_connect(address, PATIENCE).expect("a connection")
    }

    /// Connects within `patience`; nothing that is waited for later may take longer.
    ///
    /// # Errors
    /// Nobody listens there, or nobody accepts.
    pub fn try_connect(address: SocketAddr, patience: Duration) -> io::Result<Self> {
        let stream = TcpStream::connect_timeout(&address, patience)?;
        stream.set_read_timeout(Some(patience))?;
        stream.set_write_timeout(Some(patience))?;
        stream.set_nodelay(true)?;
        Ok(Self { stream, received: Vec::new() })
    }

    /// Sends bytes. The other side may have closed already, which is no error here.
    pub fn send(&mut self, bytes: impl AsRef<[u8]>) -> &mut Self {
        let _ = self.stream.write_all(bytes.as_ref());
        self
    }

    /// Ends the sending direction.
    pub fn finish(&mut self) -> &mut Self {
        let _ = self.stream.shutdown(Shutdown::Write);
        self
    }

    /// Everything until the other side closes; a reset counts as that.
    pub fn read_to_end(&mut self) -> Vec<u8> {
        let mut all = std::mem::take(&mut self.received);
        let _ = self.stream.read_to_end(&mut all);
        all
    }

    /// Reads one response with a `Content-Length`; none if the connection ends first.
    pub fn response(&mut self) -> Option<Response> {
        match self.hear(Duration::ZERO) {
            Heard::Response(response) => Some(response),
            Heard::Cut(_) | Heard::End | Heard::Silence => None,
        }
    }

    /// Reads one response with a `Content-Length`, resting for `pause` after each piece as
    /// a slow reader does.
    pub fn hear(&mut self, pause: Duration) -> Heard {
        loop {
            if let Some((response, used)) = parse(&self.received) {
                self.received.drain(..used);
                return Heard::Response(response);
            }
            let mut piece = [0; 16 * 1024];
            match self.stream.read(&mut piece) {
                Ok(count @ 1..) => self.received.extend_from_slice(&piece[..count]),
                Err(error) if is_timeout(&error) => return Heard::Silence,
                Ok(_) | Err(_) if self.received.is_empty() => return Heard::End,
                Ok(_) | Err(_) => return Heard::Cut(self.received.len()),
            }
            std::thread::sleep(pause);
        }
    }
}

/// `SO_RCVTIMEO` passes as either: socket(7).
fn is_timeout(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut)
}

/// A whole response at the start of `bytes`, and how many bytes it takes.
fn parse(bytes: &[u8]) -> Option<(Response, usize)> {
    let end = bytes.windows(4).position(|window| window == b"\r\n\r\n")?;
    let head = String::from_utf8_lossy(&bytes[..end]);
    let mut lines = head.split("\r\n");
    let status = lines.next()?.split(' ').nth(1)?.parse().ok()?;
    let headers: Vec<(String, String)> = lines
        .filter_map(|line| line.split_once(':'))
        .map(|(name, value)| (name.to_ascii_lowercase(), value.trim().to_owned()))
        .collect();
    let len = headers
        .iter()
        .find(|(name, _)| name == "content-length")
        .map_or(Some(0), |(_, value)| value.parse::<usize>().ok())?;
    let body = bytes.get(end + 4..end + 4 + len)?.to_vec();
    Some((Response { status, headers, body }, end + 4 + len))
}
