//! A client of functions that number the lines which they hear.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

/// A client that sends lines.
#[derive(Debug)]
pub struct Lines<S: Read = TcpStream>(pub BufReader<S>);

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
        lines.switch(function);
        lines
    }
}

impl<S: Read + Write> Lines<S> {
    /// The same over a connection that is there.
    ///
    /// # Panics
    /// The function does not change its protocol.
    pub fn upgrade_over(stream: S, function: &str) -> Self {
        let mut lines = Self(BufReader::new(stream));
        lines.switch(function);
        lines
    }

    fn switch(&mut self, function: &str) {
        let head = format!(
            "GET / HTTP/1.1\r\nHost: {function}\r\nConnection: Upgrade\r\nUpgrade: lines\r\n\r\n"
        );
        self.0.get_mut().write_all(head.as_bytes()).expect("it is sent");
        let status = self.read();
        assert!(status.starts_with("HTTP/1.1 101 "), "{status:?}");
        while self.read() != "\r\n" {}
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
        self.send(text);
        self.hear(text)
    }

    /// Says something.
    ///
    /// # Panics
    /// The connection has failed.
    pub fn send(&mut self, text: &str) {
        let line = format!("{text}\n");
        self.0.get_mut().write_all(line.as_bytes()).expect("it is sent");
        self.0.get_mut().flush().expect("it is sent");
    }

    /// Hears the number of what was said.
    ///
    /// # Panics
    /// The answer is not to that.
    pub fn hear(&mut self, text: &str) -> u32 {
        let answer = self.read();
        let (number, rest) = answer.split_once(' ').unwrap_or_else(|| panic!("{answer:?}"));
        assert_eq!(rest.trim_end(), text);
        number.parse().expect("a number")
    }
}
