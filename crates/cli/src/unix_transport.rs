//! HTTP over a Unix socket, for `ureq`.

use std::fmt;
use std::io::{ErrorKind, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use thaw_home::admin::connect_unix;
use ureq::Error;
use ureq::unversioned::transport::{
    Buffers, ConnectionDetails, Connector, LazyBuffers, NextTimeout, Transport,
};

/// Connects to one socket, whatever the URL's host is.
#[derive(Debug)]
pub struct UnixConnector {
    /// The socket.
    pub path: PathBuf,
}

impl Connector for UnixConnector {
    type Out = UnixTransport;

    fn connect(
        &self,
        details: &ConnectionDetails<'_>,
        _chained: Option<()>,
    ) -> Result<Option<UnixTransport>, Error> {
        let stream = connect_unix(&self.path)?;
        let config = details.config;
        let buffers = LazyBuffers::new(config.input_buffer_size(), config.output_buffer_size());
        Ok(Some(UnixTransport { stream, buffers, is_deaf: false }))
    }
}

/// A connection.
pub struct UnixTransport {
    stream: UnixStream,
    buffers: LazyBuffers,
    /// Whether the daemon reads no more. It may have answered before.
    is_deaf: bool,
}

impl fmt::Debug for UnixTransport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("UnixTransport").field("stream", &self.stream).finish_non_exhaustive()
    }
}

impl Transport for UnixTransport {
    fn buffers(&mut self) -> &mut dyn Buffers {
        &mut self.buffers
    }

    fn transmit_output(&mut self, amount: usize, timeout: NextTimeout) -> Result<(), Error> {
        let timeout = timeout.for_write();
        self.stream.set_write_timeout(timeout.not_zero().map(|timeout| *timeout))?;
        if self.is_deaf {
            return Ok(());
        }
        match self.stream.write_all(&self.buffers.output()[..amount]) {
            Err(error) if error.kind() == ErrorKind::BrokenPipe => self.is_deaf = true,
            written => written.map_err(|error| with_timeout(error, &timeout))?,
        }
        Ok(())
    }

    fn await_input(&mut self, timeout: NextTimeout) -> Result<bool, Error> {
        let timeout = timeout.for_read();
        self.stream.set_read_timeout(timeout.not_zero().map(|timeout| *timeout))?;
        let input = self.buffers.input_append_buf();
        let count = loop {
            match self.stream.read(input) {
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                outcome => break outcome.map_err(|error| with_timeout(error, &timeout))?,
            }
        };
        self.buffers.input_appended(count);
        Ok(count > 0)
    }

    fn is_open(&mut self) -> bool {
        // A verb makes a request or two; each may have a connection of its own.
        false
    }
}

fn with_timeout(error: std::io::Error, timeout: &NextTimeout) -> Error {
    match error.kind() {
        ErrorKind::WouldBlock | ErrorKind::TimedOut => Error::Timeout(timeout.reason),
        _ => error.into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::net::UnixListener;
    use std::thread;
    use ureq::Agent;
    use ureq::unversioned::resolver::DefaultResolver;

    #[test]
    fn an_answer_that_comes_before_the_body_has_gone_is_read() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("socket");
        let listener = UnixListener::bind(&path).unwrap();
        let daemon = thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            stream.read_exact(&mut [0; 16]).unwrap();
            stream.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello").unwrap();
        });
        let config = Agent::config_builder().build();
        let agent = Agent::with_parts(config, UnixConnector { path }, DefaultResolver::default());
        let mut response = agent.post("http://127.0.0.1/").send(&vec![0; 4 << 20][..]).unwrap();
        assert_eq!(response.body_mut().read_to_string().unwrap(), "hello");
        daemon.join().unwrap();
    }
}
