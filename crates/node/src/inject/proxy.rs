//! Takes the connections that the sandboxes of a function make to hosts of `[[egress.inject]]`.
//!
//! The proxy has a runtime of its own: what a sandbox keeps busy here, no client of the gateway
//! waits for.

use super::client::serve;
use super::roots;
use rustix::process::{Resource, getrlimit};
use rustls::server::{ClientHello, ResolvesServerCert, ServerSessionMemoryCache};
use rustls::sign::CertifiedKey;
use rustls::{ClientConfig, ServerConfig};
use std::collections::HashMap;
use std::io;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};
use thaw_build::authority::{Authority, LEAF_LIFE};
use thaw_home::config::{FunctionConfig, FunctionName, Inject};
use thaw_home::secrets::{SecretError, SecretSource, SecretStore};
use thaw_sandbox::{Intercepted, Interceptor, NotTaken};
use tokio::runtime::{Builder, Runtime};
use tokio::sync::OnceCell;

/// Most connections of all functions at a time, on a host with descriptors to spare.
const OF_NODE_MAX: usize = 1024;
/// Of so many descriptors of the daemon one connection may be there: it takes three of them.
const DESCRIPTORS_EACH: u64 = 32;
/// Most complaints of one function in the daemon's log.
const COMPLAINTS_MAX: usize = 16;
/// Most certificates of hosts that sandboxes of a function have named, which are kept.
const OTHERS_MAX: usize = 256;
/// Sessions of TLS of a function that can be resumed.
const SESSIONS_MAX: usize = 64;

/// Runs the connections of all functions, from the first one on.
static RUNTIME: OnceLock<Runtime> = OnceLock::new();

/// What runs them; `None`: the host has no threads for it now.
fn runtime() -> Option<&'static Runtime> {
    if let Some(runtime) = RUNTIME.get() {
        return Some(runtime);
    }
    let mut builder = Builder::new_multi_thread();
    builder.worker_threads(2).max_blocking_threads(4).thread_name("thaw-inject").enable_all();
    let made = builder.build();
    let made = made.inspect_err(|error| tracing::error!("cannot inject headers: {error}")).ok()?;
    if let Err(surplus) = RUNTIME.set(made) {
        // Somebody else was faster. It may not be dropped where tasks run.
        surplus.shutdown_background();
    }
    RUNTIME.get()
}

/// Connections of all functions.
static OPEN: AtomicUsize = AtomicUsize::new(0);

/// How long the proxy waits.
#[derive(Clone, Copy, Debug)]
pub(super) struct Patience {
    /// For a handshake of TLS, with either side, and for a connection to be made.
    pub handshake: Duration,
    /// For the head of a request, from its first byte or the answer before on.
    pub head: Duration,
    /// For a byte, in either direction.
    pub idle: Duration,
}

impl Patience {
    const USUAL: Self = Self {
        handshake: Duration::from_secs(10),
        head: Duration::from_secs(60),
        idle: Duration::from_secs(600),
    };
}

/// What the proxy does for one function.
#[derive(Debug)]
pub(super) struct Function {
    pub name: FunctionName,
    pub rules: Vec<Inject>,
    /// Whether its programs trust the authority for all hosts.
    pub trusts_all: bool,
    pub patience: Patience,
    store: Arc<SecretSource>,
    client: fn() -> Result<Arc<ClientConfig>, String>,
    server: OnceCell<Arc<ServerConfig>>,
    /// Connections of all functions of its tenant.
    open: Arc<AtomicUsize>,
    complaints: AtomicUsize,
}

/// The proxy of one function.
#[derive(Debug)]
pub(crate) struct Proxy(Arc<Function>);

impl Proxy {
    /// That of a function; `None` if nothing of it trusts the authority. Its secrets, and the authority,
    /// are where `store` says when it is there: until then connections are refused.
    pub fn of_function(
        config: &FunctionConfig,
        store: &Arc<SecretSource>,
        of_tenant: &Arc<AtomicUsize>,
    ) -> Option<Arc<dyn Interceptor>> {
        if !config.egress.adds_authority() {
            return None;
        }
        let function = Function::new(config, store, of_tenant);
        Some(Arc::new(Self(Arc::new(function))))
    }
}

impl Interceptor for Proxy {
    fn take(&self, connection: Intercepted) -> Result<(), NotTaken> {
        let runtime = runtime().ok_or(NotTaken::TooMany)?;
        if self.0.store.get().is_none() {
            return Err(NotTaken::Nobody);
        }
        let open = Open::of(&self.0).ok_or(NotTaken::TooMany)?;
        runtime.spawn(serve(self.0.clone(), connection, open));
        Ok(())
    }
}

/// A connection that counts until this is dropped.
#[derive(Debug)]
pub(super) struct Open(Arc<Function>);

impl Open {
    fn of(function: &Arc<Function>) -> Option<Self> {
        let of_node = OPEN.fetch_add(1, Relaxed);
        let of_tenant = function.open.fetch_add(1, Relaxed);
        // From here on, dropping gives both back.
        let open = Self(function.clone());
        is_room(of_node, of_tenant, most()).then_some(open)
    }
}

/// Most connections of all functions, on this host.
fn most() -> usize {
    static MOST: OnceLock<usize> = OnceLock::new();
    *MOST.get_or_init(|| {
        let descriptors = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
        OF_NODE_MAX.min((descriptors / DESCRIPTORS_EACH) as usize)
    })
}

/// Whether there may be one more connection than these: a tenant may have as many as are left for
/// all others, so that whoever comes later finds room.
fn is_room(of_node: usize, of_tenant: usize, most: usize) -> bool {
    of_tenant < most.saturating_sub(of_node)
}

impl Drop for Open {
    fn drop(&mut self) {
        self.0.open.fetch_sub(1, Relaxed);
        OPEN.fetch_sub(1, Relaxed);
    }
}

impl Function {
    pub(super) fn new(
        config: &FunctionConfig,
        store: &Arc<SecretSource>,
        of_tenant: &Arc<AtomicUsize>,
    ) -> Self {
        Self {
            name: config.name.clone(),
            rules: config.egress.inject.clone(),
            trusts_all: config.egress.authority,
            patience: Patience::USUAL,
            store: store.clone(),
            client: roots::client,
            server: OnceCell::new(),
            open: of_tenant.clone(),
            complaints: AtomicUsize::new(0),
        }
    }

    /// The rules for a host.
    pub fn rules_of(&self, host: &str, port: u16) -> impl Iterator<Item = &Inject> {
        self.rules.iter().filter(move |rule| rule.name() == host && rule.port() == port)
    }

    /// Where its secrets are.
    ///
    /// # Errors
    /// It is not known, or the function was removed.
    pub fn secrets(&self) -> Result<&Arc<SecretStore>, String> {
        let none = || "the function was removed, or no daemon serves it".to_owned();
        self.store.get().ok_or_else(none)
    }

    /// What a sandbox hears of a secret that cannot be used; the operator hears all of it.
    pub fn told(&self, error: SecretError) -> String {
        match error {
            error @ SecretError::NotSet { .. } => error.to_string(),
            error => {
                self.complain(&error.to_string());
                "a secret cannot be read; the log of the node says why".to_owned()
            }
        }
    }

    /// How TLS is spoken with servers.
    ///
    /// # Errors
    /// This host trusts nobody.
    pub fn towards_servers(&self) -> Result<Arc<ClientConfig>, String> {
        (self.client)()
    }

    /// How TLS is spoken with its sandboxes.
    ///
    /// # Errors
    /// The authority cannot be used.
    pub async fn towards_sandboxes(self: &Arc<Self>) -> io::Result<Arc<ServerConfig>> {
        let make = || async {
            let function = self.clone();
            let made = tokio::task::spawn_blocking(move || function.server_config());
            made.await.map_err(io::Error::other)?
        };
        self.server.get_or_try_init(make).await.cloned()
    }

    fn server_config(&self) -> io::Result<Arc<ServerConfig>> {
        let store = self.secrets().map_err(io::Error::other)?;
        let authority = Authority::of(store.home()).map_err(io::Error::other)?;
        let hosts = self.rules.iter().map(|rule| rule.name().to_owned());
        let leaves = hosts.map(|host| (host, Mutex::default())).collect();
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let builder = ServerConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .map_err(io::Error::other)?;
        let others = self.trusts_all.then(Mutex::default);
        let resolver = Arc::new(Leaves { authority, leaves, others });
        let mut config = builder.with_no_client_auth().with_cert_resolver(resolver);
        config.alpn_protocols = vec![b"http/1.1".to_vec()];
        config.session_storage = ServerSessionMemoryCache::new(SESSIONS_MAX);
        Ok(Arc::new(config))
    }

    /// Tells the operator of something that only he can change; of the first of them only.
    pub fn complain(&self, what: &str) {
        if self.complaints.fetch_add(1, Relaxed) < COMPLAINTS_MAX {
            tracing::warn!("{}: [[egress.inject]]: {what}", self.name);
        }
    }
}

/// A certificate, and when it was made.
type Leaf = (Arc<CertifiedKey>, Instant);

/// The certificates of the hosts of a function, each made when it is first asked for.
#[derive(Debug)]
struct Leaves {
    authority: Authority,
    leaves: HashMap<String, Mutex<Option<Leaf>>>,
    /// Those of hosts that only a sandbox has named, where its programs trust all; whoever asks has
    /// checked that.
    others: Option<Mutex<HashMap<String, Leaf>>>,
}

impl Leaves {
    /// One of a host that only a sandbox has named.
    fn other(&self, host: &str) -> Option<Arc<CertifiedKey>> {
        let mut others = self.others.as_ref()?.lock().unwrap_or_else(PoisonError::into_inner);
        others.retain(|_, (_, when)| when.elapsed() < LEAF_LIFE / 2);
        if let Some((made, _)) = others.get(host) {
            return Some(made.clone());
        }
        if others.len() >= OTHERS_MAX {
            others.clear();
        }
        let made = self.authority.leaf(host);
        let made = Arc::new(made.inspect_err(|error| tracing::error!("{host}: {error}")).ok()?);
        others.insert(host.to_owned(), (made.clone(), Instant::now()));
        Some(made)
    }
}

impl ResolvesServerCert for Leaves {
    fn resolve(&self, hello: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        let host = hello.server_name()?.to_ascii_lowercase();
        let Some(leaf) = self.leaves.get(&host) else { return self.other(&host) };
        let mut leaf = leaf.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((made, when)) = &*leaf
            && when.elapsed() < LEAF_LIFE / 2
        {
            return Some(made.clone());
        }
        let made = self.authority.leaf(&host);
        let made = made.inspect_err(|error| tracing::error!("{host}: {error}")).ok()?;
        Some(leaf.insert((Arc::new(made), Instant::now())).0.clone())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tenant_takes_no_room_that_others_need() {
        let most = |others: usize| {
            (0..).find(|&own| !is_room(others + own, own, 1024)).expect("there is a bound")
        };
        assert_eq!(most(0), 512);
        assert_eq!(most(512), 256);
        assert_eq!(most(1022), 1);
        assert!(!is_room(1024, 0, 1024) && !is_room(usize::MAX, 0, 1024));
    }
}
