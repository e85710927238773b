//! `thaw run --publish`: ports of this host whose clients are the sandbox's.

use crate::failure::Failure;
use std::future::poll_fn;
use std::io;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::os::fd::AsFd;
use std::str::FromStr;
use std::task::Poll;
use std::time::Duration;
use thaw_sandbox::{Sandbox, connection};
use tokio::net::{TcpListener, TcpStream};
use tokio::time::{Instant, sleep, sleep_until};

/// How long a program that computes may take until it is made to look at its clients.
const RING_AFTER: Duration = Duration::from_millis(10);
/// How long until clients are taken again after this host had no room for one more.
const ACCEPT_AGAIN: Duration = Duration::from_millis(100);

/// A port of this host, and that of the program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Publish {
    host: SocketAddr,
    /// That of the program.
    pub guest: u16,
}

impl Publish {
    /// Listens on the port of this host.
    ///
    /// # Errors
    /// It cannot be had.
    pub fn listen(&self) -> Result<std::net::TcpListener, Failure> {
        std::net::TcpListener::bind(self.host).map_err(|error| {
            Failure::failed(format!(
                "--publish: cannot listen on {} ({error}); choose another port",
                self.host
            ))
        })
    }
}

impl FromStr for Publish {
    type Err = String;

    /// `[IP:]HOST:GUEST[/tcp]`, or `GUEST` alone for the same port of this host.
    fn from_str(text: &str) -> Result<Self, String> {
        let usage = || {
            format!(
                "{text}: give [ADDRESS:]PORT:PORT, as in 8080:80, or 0.0.0.0:8080:80 for all of this host's addresses"
            )
        };
        let ports = match text.split_once('/') {
            None | Some((_, "tcp")) => text.trim_end_matches("/tcp"),
            Some((_, other)) => {
                return Err(format!("{text}: {other} cannot be published, only tcp"));
            }
        };
        let port = |text: &str| text.parse::<u16>().map_err(|_| usage());
        let (front, guest) = ports.rsplit_once(':').unwrap_or((ports, ports));
        let (address, host) = front.rsplit_once(':').unwrap_or(("", front));
        let address = match address.trim_start_matches('[').trim_end_matches(']') {
            "" => IpAddr::V4(Ipv4Addr::LOCALHOST),
            address => address.parse().map_err(|_| usage())?,
        };
        match port(guest)? {
            0 => Err(usage()),
            guest => Ok(Self { host: SocketAddr::new(address, port(host)?), guest }),
        }
    }
}

/// The ports that are open.
pub struct Published {
    listeners: Vec<(TcpListener, u16)>,
    clients: u64,
    /// When to make the program look at the client who has come last.
    ring_at: Option<Instant>,
}

/// What there is to do for the clients of a sandbox.
pub enum Wanted {
    /// To hand in one more, of the program's port.
    Client(TcpStream, SocketAddr, u16),
    /// To make the program look.
    Ring,
}

impl Published {
    /// Listens on all ports.
    ///
    /// # Errors
    /// One of them cannot be had.
    pub fn open(all: &[Publish]) -> Result<Self, Failure> {
        let mut listeners = Vec::new();
        for publish in all {
            let listener = publish.listen()?;
            listener.set_nonblocking(true)?;
            listeners.push((TcpListener::from_std(listener)?, publish.guest));
        }
        Ok(Self { listeners, clients: 0, ring_at: None })
    }

    /// Waits until there is something to do.
    pub async fn wanted(&self) -> Wanted {
        let far = Instant::now() + Duration::from_secs(3600);
        tokio::select! {
            (client, peer, port) = self.accept() => Wanted::Client(client, peer, port),
            () = sleep_until(self.ring_at.unwrap_or(far)), if self.ring_at.is_some() => Wanted::Ring,
        }
    }

    async fn accept(&self) -> (TcpStream, SocketAddr, u16) {
        loop {
            let accepted = poll_fn(|context| {
                for (listener, port) in &self.listeners {
                    if let Poll::Ready(accepted) = listener.poll_accept(context) {
                        return Poll::Ready(accepted.map(|(client, peer)| (client, peer, *port)));
                    }
                }
                Poll::Pending
            });
            match accepted.await {
                Ok(accepted) => return accepted,
                // The client has gone, or this host has no descriptor for it now.
                Err(_) => sleep(ACCEPT_AGAIN).await,
            }
        }
    }

    /// Does it. A client who cannot be handed in is disconnected.
    ///
    /// # Errors
    /// The sandbox cannot be rung for; it has ended.
    pub fn serve(&mut self, sandbox: &Sandbox, wanted: Wanted) -> io::Result<()> {
        match wanted {
            Wanted::Ring => {
                self.ring_at = None;
                sandbox.ring_if_unread()
            }
            Wanted::Client(client, peer, port) => {
                self.clients += 1;
                self.ring_at.get_or_insert(Instant::now() + RING_AFTER);
                let local = SocketAddr::new(client.local_addr()?.ip(), port);
                let connection = connection(self.clients, peer, local);
                sandbox.connector().send_connection(&connection, client.as_fd()).or_else(|error| {
                    match error.kind() {
                        io::ErrorKind::OutOfMemory => Ok(()),
                        _ => Err(error),
                    }
                })
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ports_are_published_as_people_write_them() {
        for (text, host, guest) in [
            ("8080:80", "127.0.0.1:8080", 80),
            ("8080", "127.0.0.1:8080", 8080),
            ("8080:80/tcp", "127.0.0.1:8080", 80),
            ("0.0.0.0:8080:80", "0.0.0.0:8080", 80),
            ("[::1]:8080:80", "[::1]:8080", 80),
        ] {
            let expected = Publish { host: host.parse().unwrap(), guest };
            assert_eq!(text.parse(), Ok(expected), "{text}");
        }
        for wrong in ["", "x", "8080:", ":80", "8080:0", "8080:65536", "8080:80:90", "a:1:2"] {
            let error = wrong.parse::<Publish>().unwrap_err();
            assert!(error.contains("as in 8080:80"), "{error}");
        }
        let error = "53:53/udp".parse::<Publish>().unwrap_err();
        assert_eq!(error, "53:53/udp: udp cannot be published, only tcp");
    }
}
