//! The least pace of a download: a registry that sends a byte now and then does not keep one
//! waiting, and a place of those who download, for ever.

use super::source::innermost;
use bytes::Bytes;
use reqwest::Response;
use std::fmt;
use std::time::{Duration, Instant};

/// How long it is looked how much comes.
const WINDOW: Duration = Duration::from_secs(15);
/// Bytes that come in a window at least, about a kilobyte a second.
const LEAST: u64 = 16 << 10;
/// So many windows in a row with less are too many. In one, this program may have been busy itself.
const WINDOWS: u32 = 2;

/// What keeps a download from being endless.
#[derive(Debug)]
pub(crate) struct Pace {
    window: Duration,
    /// Time for which somebody has waited in this window.
    waited: Duration,
    /// Bytes that have come in it.
    come: u64,
    /// Windows before it, in a row, with less than [`LEAST`].
    slow: u32,
}

impl Default for Pace {
    fn default() -> Self {
        Self { window: WINDOW, waited: Duration::ZERO, come: 0, slow: 0 }
    }
}

/// Why nothing more comes.
#[derive(Debug)]
pub(crate) enum Broke {
    /// The connection broke.
    Off(reqwest::Error),
    /// It is too slow.
    Slow,
}

impl fmt::Display for Broke {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Off(error) => f.write_str(&innermost(error)),
            Self::Slow => f.write_str("it sends less than a kilobyte a second"),
        }
    }
}

impl Pace {
    /// The next bytes of a body; `None`: the end.
    ///
    /// # Errors
    /// The connection broke, or is too slow.
    pub async fn next(&mut self, body: &mut Response) -> Result<Option<Bytes>, Broke> {
        let began = Instant::now();
        let chunk = body.chunk().await.map_err(Broke::Off)?;
        let bytes = chunk.as_ref().map_or(0, Bytes::len);
        match chunk.is_some() && self.is_too_slow_after(began.elapsed(), bytes as u64) {
            true => Err(Broke::Slow),
            false => Ok(chunk),
        }
    }

    fn is_too_slow_after(&mut self, waited: Duration, bytes: u64) -> bool {
        self.waited += waited;
        self.come += bytes;
        if self.waited < self.window {
            return false;
        }
        self.slow = if self.come < LEAST { self.slow + 1 } else { 0 };
        (self.waited, self.come) = (Duration::ZERO, 0);
        self.slow >= WINDOWS
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::registry::source::{choose_cryptography, on_this_thread};
    use std::io::{Read, Write};
    use std::net::TcpListener;

    /// Whether a pace is lost in one of these windows, of a second and so many bytes each.
    fn is_lost(windows: &[u64]) -> bool {
        let mut pace = Pace { window: Duration::from_secs(1), ..Pace::default() };
        windows.iter().any(|&bytes| {
            pace.is_too_slow_after(Duration::from_millis(500), bytes)
                || pace.is_too_slow_after(Duration::from_millis(500), 0)
        })
    }

    #[test]
    fn only_windows_in_a_row_are_too_slow() {
        assert!(!is_lost(&[LEAST; 9]));
        assert!(!is_lost(&[0, LEAST, LEAST - 1, LEAST, 0]));
        assert!(is_lost(&[LEAST, LEAST - 1, 1]));
    }

    /// A real body, of which a byte comes now and then.
    #[test]
    fn a_body_that_drips_is_given_up() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        std::thread::spawn(move || {
            let (mut client, _) = listener.accept().unwrap();
            let _ = client.read(&mut [0; 4096]);
            let _ = client.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\n");
            while client.write_all(b" ").is_ok() {
                std::thread::sleep(Duration::from_millis(5));
            }
        });
        on_this_thread().unwrap().block_on(async {
            choose_cryptography();
            let client = reqwest::Client::new();
            let mut body = client.get(format!("http://{address}/")).send().await.unwrap();
            let mut pace = Pace { window: Duration::from_millis(50), ..Pace::default() };
            let broke = loop {
                match pace.next(&mut body).await {
                    Ok(chunk) => assert!(chunk.is_some(), "it came to its end"),
                    Err(broke) => break broke,
                }
            };
            assert!(matches!(broke, Broke::Slow), "{broke:?}");
        });
    }
}
