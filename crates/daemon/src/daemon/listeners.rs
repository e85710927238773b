//! The addresses that are bound while a daemon serves: those of functions, and of E2B's API.

use super::ServeError;
use super::lasting::{self, Held};
use crate::activation;
use crate::tls_listeners::TlsListeners;
use std::collections::{BTreeMap, HashMap};
use std::future::Future;
use std::io;
use std::net::{SocketAddr, TcpListener, UdpSocket};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;
use thaw_e2b::{E2b, LiveSettings, NodeBackend};
use thaw_home::config::{EntryKind, FunctionName};
use thaw_home::home::Home;
use thaw_node::catalog::Catalog;
use thaw_node::gateway::Gateway;
use thaw_node::sandboxes::Sandboxes;
use thaw_node::service::{Service, Services};
use thaw_sandbox::{GuardedPort, PortGuard, Transport, monitor};
use tokio::task::JoinHandle;

/// The listeners of functions that have an address of their own.
pub(super) struct OwnListeners {
    gateway: Gateway,
    services: Arc<Services>,
    listening: Mutex<Listening>,
    /// The daemon ends: nobody listens again.
    has_stopped: AtomicBool,
    tls: TlsListeners,
}

/// The addresses of functions.
#[derive(Default)]
struct Listening {
    tasks: HashMap<SocketAddr, (Wanted, ListenTask)>,
    /// Those that could not be had.
    refused: HashMap<SocketAddr, Wanted>,
}

/// How often addresses are tried again that somebody else has.
const RETRY_EVERY: Duration = Duration::from_secs(3);
/// How many of them at a time.
const RETRIES_MAX: usize = 64;

/// Who is to be reached at an address, and how.
type Wanted = (FunctionName, EntryKind);

/// A task that listens until its listener fails.
pub(super) type ListenTask = JoinHandle<io::Result<()>>;

impl OwnListeners {
    pub fn new(gateway: Gateway, services: Arc<Services>) -> Self {
        let tls = TlsListeners::new(gateway.clone(), services.shared().clone());
        let (listening, has_stopped) = (Mutex::default(), AtomicBool::new(false));
        Self { gateway, services, listening, has_stopped, tls }
    }

    /// Listens where the present functions want it, and nowhere else. Functions for which that is
    /// not possible, with the reason.
    pub fn update(&self) -> BTreeMap<String, String> {
        let mut problems = BTreeMap::new();
        if self.has_stopped.load(Ordering::SeqCst) {
            return problems;
        }
        self.tls.update();
        let mut wanted: HashMap<SocketAddr, Wanted> = HashMap::new();
        for service in self.services.functions() {
            let wants = (service.name().clone(), service.config().entry.kind);
            let Some(address) = service.config().listen else { continue };
            if let Some((other, _)) = wanted.insert(address, wants) {
                let name = service.name();
                let problem = format!(
                    "`{other}` and `{name}` both want {address}; change `listen` of one of them"
                );
                tracing::error!("{problem}");
                problems.insert(other.to_string(), problem);
            }
        }
        let mut listening = self.listening.lock().expect("no holder panics");
        let Listening { tasks, refused } = &mut *listening;
        refused.clear();
        tasks.retain(|address, (present, task)| {
            let stays = wanted.get(address) == Some(present) && !task.is_finished();
            if !stays {
                task.abort();
            }
            stays
        });
        for (address, wants) in wanted {
            if tasks.contains_key(&address) {
                continue;
            }
            match self.listen(address, &wants) {
                Ok(task) => {
                    tasks.insert(address, (wants, task));
                }
                // A function that speaks HTTP is still served by name.
                Err(error) => {
                    tracing::error!(function = %wants.0, "{error}");
                    let problem = format!("{error}; it is tried again until it is free");
                    problems.insert(wants.0.to_string(), problem);
                    refused.insert(address, wants);
                }
            }
        }
        for service in self.services.functions() {
            service.set_unreachable(problems.get(service.name().as_str()).cloned());
        }
        problems
    }

    /// Tries the addresses again that somebody else had, without end.
    pub async fn keep_trying(self: Arc<Self>) {
        loop {
            tokio::time::sleep(RETRY_EVERY).await;
            self.try_again();
        }
    }

    /// The same once. It says nothing of those that somebody still has.
    fn try_again(&self) {
        let mut listening = self.listening.lock().expect("no holder panics");
        if self.has_stopped.load(Ordering::SeqCst) {
            return;
        }
        self.tls.try_again();
        let refused: Vec<_> = listening.refused.keys().copied().take(RETRIES_MAX).collect();
        for address in refused {
            let wants = listening.refused[&address].clone();
            let Ok(task) = self.listen(address, &wants) else { continue };
            tracing::info!(function = %wants.0, "listens on {address}, which is free by now");
            let of_it = |service: &&Arc<Service>| *service.name() == wants.0;
            if let Some(service) = self.services.functions().iter().find(of_it) {
                service.set_unreachable(None);
            }
            listening.refused.remove(&address);
            listening.tasks.insert(address, (wants, task));
        }
    }

    fn listen(&self, address: SocketAddr, (name, kind): &Wanted) -> Result<ListenTask, ServeError> {
        let (gateway, name) = (self.gateway.clone(), name.to_string());
        let option = "`listen` in its thaw.toml";
        Ok(match kind {
            EntryKind::Http | EntryKind::Stdin | EntryKind::Sandbox => {
                let (listener, held) = listen_for(address, option)?;
                tokio::spawn(with_held(held, gateway.listen(listener, Some(name))))
            }
            EntryKind::Tcp => {
                let (listener, held) = listen_for(address, option)?;
                tokio::spawn(with_held(held, gateway.listen_raw(listener, name)))
            }
            EntryKind::Udp => {
                let (socket, held) = receive_for(address, option)?;
                tokio::spawn(with_held(held, gateway.receive(socket, name)))
            }
        })
    }

    pub fn stop(&self) {
        self.has_stopped.store(true, Ordering::SeqCst);
        self.tls.stop();
        for (_, (_, task)) in self.listening.lock().expect("no holder panics").tasks.drain() {
            task.abort();
        }
    }
}

/// Serves E2B's API; where it listens.
///
/// # Errors
/// Its settings or the address cannot be used.
pub(super) fn serve_e2b(
    address: SocketAddr,
    home: &Home,
    catalog: &Arc<Catalog>,
    sandboxes: &Arc<Sandboxes>,
) -> Result<(SocketAddr, ListenTask), ServeError> {
    let settings = LiveSettings::load(home.root().join(thaw_e2b::FILE))?;
    let backend = NodeBackend::new(catalog.services().clone(), sandboxes.clone(), catalog.clone());
    let api = E2b::new(backend, settings, home.root())?;
    let (listener, held) = listen_for(address, "--e2b")?;
    listener.set_nonblocking(true)?;
    let listener = tokio::net::TcpListener::from_std(listener)?;
    let address = listener.local_addr()?;
    Ok((address, tokio::spawn(with_held(held, api.serve(listener)))))
}

pub(super) fn bind(address: SocketAddr, option: &'static str) -> Result<TcpListener, ServeError> {
    bind_connections(address, option).map_err(|error| ServeError::Listen { address, option, error })
}

fn bind_connections(address: SocketAddr, option: &'static str) -> io::Result<TcpListener> {
    match activation::find(address, Transport::Tcp, option)? {
        Some(socket) => Ok(socket.into()),
        None => TcpListener::bind(address)
            .or_else(|error| bind_for_us(address, Transport::Tcp, error).map(TcpListener::from)),
    }
}

fn bind_datagrams(address: SocketAddr, option: &'static str) -> io::Result<UdpSocket> {
    match activation::find(address, Transport::Udp, option)? {
        Some(socket) => Ok(socket.into()),
        None => UdpSocket::bind(address)
            .or_else(|error| bind_for_us(address, Transport::Udp, error).map(UdpSocket::from)),
    }
}

/// A listener at an address that `option` names, which sandboxes are kept from, and which the next
/// daemon gets. The daemon before this one may have left it.
pub(crate) fn listen_for(
    address: SocketAddr,
    option: &'static str,
) -> Result<(TcpListener, Held), ServeError> {
    let (listener, kept) = match lasting::claim(address, Transport::Tcp) {
        Some((socket, kept)) => {
            activation::note_user(address, Transport::Tcp, option);
            (TcpListener::from(socket), Some(kept))
        }
        None => (bind(address, option)?, None),
    };
    let bound = listener.local_addr().unwrap_or(address);
    let held = lasting::hold(listener.as_fd(), (bound, Transport::Tcp), kept);
    Ok((listener, held))
}

/// The same for datagrams.
fn receive_for(address: SocketAddr, option: &'static str) -> Result<(UdpSocket, Held), ServeError> {
    let (socket, kept) = match lasting::claim(address, Transport::Udp) {
        Some((socket, kept)) => {
            activation::note_user(address, Transport::Udp, option);
            (UdpSocket::from(socket), Some(kept))
        }
        None => {
            let bound = bind_datagrams(address, option);
            (bound.map_err(|error| ServeError::Listen { address, option, error })?, None)
        }
    };
    let held = lasting::hold(socket.as_fd(), (address, Transport::Udp), kept);
    Ok((socket, held))
}

/// Has the monitor bind what this process may not, if there is one.
fn bind_for_us(address: SocketAddr, transport: Transport, error: io::Error) -> io::Result<OwnedFd> {
    match monitor::of_this_process() {
        Some(link) if error.kind() == io::ErrorKind::PermissionDenied => {
            link.bind(address, transport)
        }
        _ => Err(error),
    }
}

/// Keeps sandboxes from the port of a listener of this process.
pub(super) fn guard(address: SocketAddr, transport: Transport, guard: PortGuard) -> GuardedPort {
    GuardedPort::new(transport, address.port(), guard)
}

/// Serves for as long as `serving` does, with what is held for its listener.
pub(crate) async fn with_held(
    _held: Held,
    serving: impl Future<Output = io::Result<()>>,
) -> io::Result<()> {
    serving.await
}

/// The address at which this process itself reaches a listener.
pub(super) fn reachable(mut address: SocketAddr) -> SocketAddr {
    if address.ip().is_unspecified() {
        match address {
            SocketAddr::V4(_) => address.set_ip(std::net::Ipv4Addr::LOCALHOST.into()),
            SocketAddr::V6(_) => address.set_ip(std::net::Ipv6Addr::LOCALHOST.into()),
        }
    }
    address
}
