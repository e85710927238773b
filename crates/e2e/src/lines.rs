//! A client of functions that number the lines which they hear.

use std::io::{BufRead, BufReader, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

/// A client that sends lines.
#[derive(Debug)]
pub struct Lines(pub BufReader<TcpStream>);

impl Lines {
    /// Connects to a function that speaks no HTTP.
    ///
    /// # Panics
    /// Nobody listens.
    pub fn connect(address: SocketAddr) -> Self {
        let stream = TcpStream::connect(address).expect("a connection");
        stream.set_read_timeout(Some(Duration::from_secs(60))).expect("it can be set");
        Self(BufReader::new(stream))
    }

    /// A client of HTTP whose connection has another protocol after its first request.
    ///
    /// # Panics
    /// The function does not change it.
    pub fn upgrade(gateway: SocketAddr, function: &str) -> Self {
        let mut lines = Self::connect(gateway);
        let head = format!(
            "GET / HTTP/1.1\r\nHost: {function}\r\nConnection: Upgrade\r\nUpgrade: lines\r\n\r\n"
        );
        lines.0.get_mut().write_all(head.as_bytes()).expect("it is sent");
        assert!(lines.read().starts_with("HTTP/1.1 101 "));
        while lines.read() != "\r\n" {}
        lines
    }

    /// The next line; nothing at the end.
    ///
    /// # Panics
    /// The connection has failed.
    pub fn read(&mut self) -> String {
        let mut line = String::new();
        self.0.read_line(&mut line).expect("a line");
        line
    }

    /// Says something, and hears its number.
    ///
    /// # Panics
    /// The answer is not to that.
    pub fn say(&mut self, text: &str) -> u32 {
        self.0.get_mut().write_all(format!("{text}\n").as_bytes()).expect("it is sent");
        let answer = self.read();
        let (number, rest) = answer.split_once(' ').unwrap_or_else(|| panic!("{answer:?}"));
        assert_eq!(rest.trim_end(), text);
        number.parse().expect("a number")
    }
}
