//! Functions whose clients send datagrams.
//!
//! The gateway has the socket that clients send to. Each client address is a
//! flow: a pair of sockets, one end of which goes to an instance as a connection
//! does. What the client sends goes in there, what the instance sends comes out
//! and goes back from the address that the client knows. A flow ends when nothing
//! has come or gone for the function's `keep_alive`, and when its instance ends.
//!
//! Anybody can forge the address of a client, so flows are few: as many as the function
//! has places, and some that wait for one. Datagrams of others are lost.

use super::accept::Gateway;
use super::exchange::routed_client;
use super::passing;
use super::refusal::Refusal;
use super::ticket::Ticket;
use crate::instance::{Client, Outcome};
use crate::node::NodeState;
use crate::reactor::watch;
use crate::service::Service;
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, recv, send, socketpair,
};
use std::collections::HashMap;
use std::io;
use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use thaw_home::clock::monotonic_ns;
use tokio::io::unix::AsyncFd;
use tokio::net::UdpSocket;
use tokio::sync::{OwnedSemaphorePermit, mpsc};
use tokio::time::{Instant, sleep, sleep_until};

/// Largest datagram, in bytes (udp(7)).
const DATAGRAM_MAX: usize = 65_535;
/// Datagrams that wait for one instance; more are dropped, as UDP does.
const WAITING_MAX: usize = 64;
/// Flows of a function that wait for an instance.
const WAITING_FLOWS_MAX: usize = 16;
/// How often it is logged at most that clients got no instance.
const LOG_EVERY: Duration = Duration::from_secs(1);
/// How long an instance may take to let go of a flow that has ended.
const LETTING_GO: Duration = Duration::from_secs(2);

/// The flows of one socket, by client address.
type Flows = Arc<Mutex<HashMap<SocketAddr, mpsc::Sender<Vec<u8>>>>>;

/// A client's datagrams on their way to and from an instance.
struct Flow {
    shared: Arc<NodeState>,
    service: Arc<Service>,
    /// What clients send to.
    outside: Arc<UdpSocket>,
    /// Our end of the pair.
    inside: AsyncFd<OwnedFd>,
    /// The instance's end.
    client: Arc<Client>,
    arriving: mpsc::Receiver<Vec<u8>>,
    refusals: Arc<Refusals>,
    /// Its share of the node's flows.
    _share: OwnedSemaphorePermit,
}

/// Clients that got no instance; a flood of them does not fill the log.
#[derive(Default)]
struct Refusals(Mutex<Unlogged>);

#[derive(Default)]
struct Unlogged {
    count: u64,
    logged: Option<Instant>,
}

impl Refusals {
    fn add(&self, service: &Service, reason: &str) {
        let mut unlogged = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        unlogged.count += 1;
        if unlogged.logged.is_some_and(|at| at.elapsed() < LOG_EVERY) {
            return;
        }
        tracing::warn!(function = %service.name(), clients = unlogged.count, "no instance for clients: {reason}");
        *unlogged = Unlogged { count: 0, logged: Some(Instant::now()) };
    }
}

impl Gateway {
    /// Passes on the datagrams that come to `socket` until the task is dropped.
    ///
    /// # Errors
    /// The socket cannot be used at all.
    pub async fn receive(self, socket: std::net::UdpSocket, function: String) -> io::Result<()> {
        socket.set_nonblocking(true)?;
        let socket = Arc::new(UdpSocket::from_std(socket)?);
        let local = socket.local_addr()?;
        let flows = Flows::default();
        let refusals = Arc::new(Refusals::default());
        let mut buffer = vec![0; DATAGRAM_MAX];
        loop {
            let (len, peer) = match socket.recv_from(&mut buffer).await {
                Ok(received) => received,
                // An answer that did not reach its client.
                Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => continue,
                Err(error) => {
                    tracing::error!(%function, "cannot receive datagrams: {error}");
                    sleep(Duration::from_millis(20)).await;
                    continue;
                }
            };
            let datagram = buffer[..len].to_vec();
            let known = lock(&flows).get(&peer).cloned();
            let datagram = match known.map(|flow| flow.try_send(datagram)) {
                // A datagram without room is lost.
                Some(Ok(()) | Err(mpsc::error::TrySendError::Full(_))) => continue,
                Some(Err(mpsc::error::TrySendError::Closed(datagram))) => datagram,
                None => buffer[..len].to_vec(),
            };
            let Some(service) = self.services().route_by_chance(&function) else { continue };
            let admitted = passing::admit_raw(self.shared(), &service, peer)
                .and_then(|()| share(self.shared(), &service, lock(&flows).len()));
            let share = match admitted {
                Ok(share) => share,
                Err(refusal) => {
                    refuse(self.shared(), &service, &refusals, &refusal);
                    continue;
                }
            };
            let begun = Flow::begin(
                (self.shared(), service, refusals.clone(), share),
                &socket,
                (peer, local),
                &datagram,
            );
            match begun {
                Ok((flow, sender)) => {
                    lock(&flows).insert(peer, sender.clone());
                    tokio::spawn(flow.run(flows.clone(), sender));
                }
                Err(error) => tracing::error!(
                    %function,
                    "cannot take in a client ({error}); raise the limit of open files"
                ),
            }
        }
    }
}

/// A share of the node's flows for one more of a function that has `count`.
fn share(
    shared: &NodeState,
    service: &Service,
    count: usize,
) -> Result<OwnedSemaphorePermit, Refusal> {
    let no_capacity = |reason: &str| Refusal::NoCapacity {
        function: service.name().to_string(),
        reason: reason.to_owned(),
        retry_after: service.keep_alive(),
    };
    let limits = &service.config().limits;
    let places =
        (limits.instances.get() as usize).saturating_mul(limits.concurrency.get() as usize);
    if count >= places.saturating_add(WAITING_FLOWS_MAX) {
        return Err(no_capacity("the function has as many clients as it may"));
    }
    let share = shared.admission().flow();
    share.ok_or_else(|| no_capacity("the node has as many clients as it may"))
}

/// There is no answer that every protocol over UDP would understand.
fn refuse(shared: &NodeState, service: &Service, refusals: &Refusals, refusal: &Refusal) {
    shared.metrics().refused(Some(service.name()), refusal.status(), refusal.error());
    refusals.add(service, &refusal.detail());
}

fn lock(flows: &Flows) -> std::sync::MutexGuard<'_, HashMap<SocketAddr, mpsc::Sender<Vec<u8>>>> {
    flows.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Flow {
    /// Begins a flow with its first datagram.
    fn begin(
        (shared, service, refusals, share): (
            &Arc<NodeState>,
            Arc<Service>,
            Arc<Refusals>,
            OwnedSemaphorePermit,
        ),
        outside: &Arc<UdpSocket>,
        (peer, local): (SocketAddr, SocketAddr),
        first: &[u8],
    ) -> io::Result<(Self, mpsc::Sender<Vec<u8>>)> {
        let accepted_ns = monotonic_ns();
        // Both ends see when the other one is gone, unlike those of datagrams.
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let (inside, socket) = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?;
        send(&inside, first, SendFlags::NOSIGNAL)?;
        let client = routed_client(shared, socket, (peer, local), accepted_ns);
        let (sender, arriving) = mpsc::channel(WAITING_MAX);
        let flow = Self {
            shared: shared.clone(),
            service,
            outside: outside.clone(),
            inside: watch(inside)?,
            client: Arc::new(client),
            arriving,
            refusals,
            _share: share,
        };
        Ok((flow, sender))
    }

    /// Serves the flow to its end, and forgets it.
    async fn run(mut self, flows: Flows, own: mpsc::Sender<Vec<u8>>) {
        match Ticket::find(&self.service, &self.client).await {
            Ok(mut ticket) => {
                if !self.pass_on(&mut ticket).await {
                    self.let_go(ticket).await;
                }
            }
            Err(refusal) => refuse(&self.shared, &self.service, &self.refusals, &refusal),
        }
        self.arriving.close();
        let mut flows = lock(&flows);
        if flows.get(&self.client.peer).is_some_and(|flow| flow.same_channel(&own)) {
            flows.remove(&self.client.peer);
        }
    }

    /// Passes datagrams on in both directions; `true` when the instance has ended
    /// the flow, `false` when it has been idle for too long.
    async fn pass_on(&mut self, ticket: &mut Ticket) -> bool {
        let keep_alive = self.service.keep_alive();
        let mut idle_at = Instant::now() + keep_alive;
        let mut buffer = vec![0; DATAGRAM_MAX];
        // The instance has let go of its end; the outcome is about to come.
        let mut ended = false;
        loop {
            tokio::select! {
                outcome = &mut ticket.done => {
                    if let Ok(Outcome::Gone(end)) = outcome {
                        tracing::debug!(function = %self.service.name(), "a flow has ended: {end}");
                    }
                    return true;
                }
                Some(datagram) = self.arriving.recv() => {
                    // A full buffer, or an instance that has just ended, loses it.
                    let _ = send(self.inside.get_ref(), &datagram, SendFlags::NOSIGNAL);
                }
                ready = self.inside.readable(), if !ended => {
                    let Ok(mut ready) = ready else { return true };
                    match recv(self.inside.get_ref(), &mut buffer[..], RecvFlags::empty()) {
                        // Its end looks like an empty datagram.
                        Ok((0, _)) if ready.ready().is_read_closed() => ended = true,
                        Ok((count, _)) => {
                            // UDP promises nothing.
                            let _ = self.outside.try_send_to(&buffer[..count], self.client.peer);
                        }
                        Err(Errno::AGAIN) => {
                            ready.clear_ready();
                            continue;
                        }
                        Err(_) => ended = true,
                    }
                }
                () = sleep_until(idle_at) => return false,
            }
            idle_at = Instant::now() + keep_alive;
        }
    }

    /// Ends an idle flow: the instance that has it alone ends with it.
    async fn let_go(&self, mut ticket: Ticket) {
        if self.service.is_single_use() {
            self.service.kill(ticket.placed.instance);
        } else {
            let _ = rustix::net::shutdown(self.inside.get_ref(), rustix::net::Shutdown::Both);
        }
        if tokio::time::timeout(LETTING_GO, &mut ticket.done).await.is_err() {
            self.service.kill(ticket.placed.instance);
        }
    }
}
