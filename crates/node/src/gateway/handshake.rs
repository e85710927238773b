//! Clients that speak TLS. The daemon ends it (docs/decisions/0038): beyond this, their
//! requests are routed like all others.

use super::accept::{Arrival, Gateway};
use super::client::{self, Protocol, Secured};
use super::tls::{Records, Tls};
use super::wire::Wire;
use crate::admission::Entrance;
use std::sync::Arc;
use thaw_home::clock::monotonic_ns;
use tokio::net::TcpStream;
use tokio::sync::Notify;
use tokio::time::{Instant, timeout_at};
use tokio_rustls::TlsAcceptor;

impl Gateway {
    /// Comes to terms with a client, as long as it takes its time no longer than for a head:
    /// meanwhile its connection is one that waits for its client, and makes room for others.
    pub(super) async fn shake_hands(self, arrival: Arrival, entrance: Entrance) {
        let Some(rules) = self.shared().edge().rules() else { return };
        let Some(tls) = rules.tls().cloned() else { return };
        let Arrival { socket, peer, local, admitted, .. } = arrival;
        let Ok(stream) = TcpStream::from_std(socket.into()) else { return };
        let displaced = Arc::new(Notify::new());
        let number = self.shared().admission().wait(&entrance, &displaced);
        let deadline = Instant::now() + self.config().head_timeout;
        let accepting = TlsAcceptor::from(tls.server).accept(Records::new(stream));
        let found = tokio::select! {
            found = timeout_at(deadline, accepting) => found.ok(),
            () = displaced.notified() => None,
        };
        self.shared().admission().stop_waiting(&entrance, number);
        let stream = match found {
            Some(Ok(stream)) => stream,
            Some(Err(error)) => return tracing::debug!(%peer, "no TLS with a client: {error}"),
            None => return,
        };
        let (_, session) = stream.get_ref();
        let protocol = match session.alpn_protocol() {
            Some(b"h2") => Protocol::Http2,
            _ => Protocol::Http1,
        };
        let name = session.server_name().map(str::to_ascii_lowercase);
        let secured = Some(Secured { certificates: tls.certificates, name });
        let wire = Wire::Tls(Tls::agreed(stream));
        let ends = client::Ends { peer, local, accepted_ns: monotonic_ns(), admitted };
        client::serve_wire(self, wire, ends, client::Coming { protocol, secured, entrance }).await;
    }
}
