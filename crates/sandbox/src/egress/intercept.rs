//! Connections to names that the host answers for: a proxy on the host has the other end.
//!
//! The resolver gives such a name the address [`INTERCEPT_ADDRESS`] and no other. A connection
//! there is a pair of Unix sockets, of which the sandbox gets one and the proxy the other: nothing
//! listens, so that nobody else can reach the proxy, and the proxy knows whose connection it is.

use std::any::Any;
use std::fmt;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::OwnedFd;
use std::sync::atomic::AtomicUsize;
use std::sync::{Arc, PoisonError};
use std::time::Instant;

use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
use thaw_abi::network::{HOST_NAME, INTERCEPT_ADDRESS};

use super::budget::Share;
use super::dns::{Outcome, lookup};
use super::local;
use super::names::{ChannelSlot, Names};
use super::policy::{AfterThaw, EgressPolicy, Permit};
use super::pool::Overloaded;
use super::reach::{HOST_LOOPBACK, Reach, reach};
use super::rule::{EgressRule, Target, Transport, host_address};
use super::rules::on_host;
use super::socket::connect;

/// The port of connections that are not encrypted.
const PLAIN_PORT: u16 = 80;
/// Most connections to the proxy of one sandbox at a time.
pub(super) const OF_SANDBOX_MAX: usize = 64;
/// Most of all sandboxes of a function.
pub(super) const OF_FUNCTION_MAX: usize = 128;
/// Most addresses of a name that are tried.
const ADDRESSES_MAX: usize = 4;

/// Takes connections to the names of a policy's intercepted destinations.
pub trait Interceptor: fmt::Debug + Send + Sync {
    /// Takes one. Waits for nothing.
    ///
    /// # Errors
    /// It is not taken, and the sandbox hears why.
    fn take(&self, connection: Intercepted) -> Result<(), NotTaken>;
}

/// Why a connection was not taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NotTaken {
    /// Nobody is there: connect(2) fails with `ECONNREFUSED`.
    Nobody,
    /// There are too many: it fails with `EADDRNOTAVAIL`.
    TooMany,
}

/// A connection that a sandbox has made to an intercepted destination.
#[derive(Debug)]
pub struct Intercepted {
    /// The proxy's end of a stream, non-blocking.
    pub socket: OwnedFd,
    /// The port that the sandbox has asked for.
    pub port: u16,
    /// Makes the connections outside.
    pub dialer: Dialer,
}

/// The intercepted destinations of a policy.
#[derive(Clone, Debug)]
pub(super) struct Interception {
    rules: Vec<EgressRule>,
    by: Option<Arc<dyn Interceptor>>,
    /// Connections of all sandboxes of the function.
    pub channels: Arc<AtomicUsize>,
}

impl Interception {
    /// The destinations.
    pub fn rules(&self) -> &[EgressRule] {
        &self.rules
    }
}

/// Intercepted destinations of one sandbox, besides those of its function.
#[derive(Debug)]
pub(super) struct OwnDestinations {
    rules: Vec<EgressRule>,
    told: Told,
}

/// What whoever has given a sandbox its own destinations wants to know of them later.
pub type Told = Arc<dyn Any + Send + Sync>;

impl EgressPolicy {
    /// Has `by` take the connections to the names of `rules`, each of which is one name and one
    /// TCP port, and to port 80 of those names. It may connect where these rules lead; the
    /// sandbox may not. Without anybody they are refused. Sandboxes may have more such
    /// destinations ([`EgressPolicy::intercept_own`]) if there is somebody.
    pub fn intercepting(
        mut self,
        rules: Vec<EgressRule>,
        by: Option<Arc<dyn Interceptor>>,
    ) -> Self {
        if !rules.is_empty() || by.is_some() {
            self.interception = Some(Interception { rules, by, channels: Arc::default() });
        }
        self
    }

    /// Has the same take the connections of this sandbox to more names, each one name or all names
    /// below one, and a TCP port, in place of those that were given before. It may connect there
    /// where the sandbox may. `told` is what it can ask for ([`Dialer::told`]).
    pub fn intercept_own(&self, rules: Vec<EgressRule>, told: Told) {
        let own = (!rules.is_empty()).then(|| Arc::new(OwnDestinations { rules, told }));
        *self.own.write().unwrap_or_else(PoisonError::into_inner) = own;
    }

    /// What was said with those destinations, if there are some.
    pub fn told(&self) -> Option<Told> {
        self.own().map(|own| own.told.clone())
    }

    pub(super) fn own(&self) -> Option<Arc<OwnDestinations>> {
        self.own.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Whether an intercepted destination of the sandbox fits.
    pub(super) fn intercepts(&self, fits: impl Fn(&EgressRule) -> bool) -> bool {
        let Some(interception) = &self.interception else { return false };
        interception.rules.iter().any(&fits)
            || self.own().is_some_and(|own| own.rules.iter().any(&fits))
    }

    /// The intercepted destination that a name and a port are.
    fn intercepted(&self, name: &str, port: u16) -> Option<EgressRule> {
        let is_meant = |rule: &&EgressRule| {
            rule.name_and_port() == Some((name, port))
                || rule.target.names(name) && rule.ports.contain(port)
        };
        let of_function = self.interception.as_ref()?.rules.iter().find(is_meant);
        of_function.cloned().or_else(|| self.own()?.rules.iter().find(is_meant).cloned())
    }
}

impl Names {
    /// Whether a connection to `to` is the proxy's.
    pub fn is_intercepted(&self, to: SocketAddr, transport: Transport) -> bool {
        let (ip, port) = (to.ip().to_canonical(), to.port());
        let is_host = |rule: &EgressRule| {
            rule.target == Target::Host && rule.ports.contain(port) && transport == Transport::Tcp
        };
        match ip == IpAddr::from(INTERCEPT_ADDRESS) {
            true => self.policy().intercepts(|_| true),
            false => ip == host_address() && self.policy().intercepts(is_host),
        }
    }
}

/// Makes a connection to the proxy: the sandbox's end.
pub(super) fn open(
    names: &Arc<Names>,
    share: &Arc<Share>,
    port: u16,
    transport: Transport,
) -> Result<OwnedFd, Errno> {
    let interception = names.interception().ok_or(Errno::CONNREFUSED)?;
    let by = interception.by.as_ref().ok_or(Errno::CONNREFUSED)?;
    let has_port = || names.policy().intercepts(|rule| rule.ports.contain(port));
    if transport != Transport::Tcp || port != PLAIN_PORT && !has_port() {
        return Err(Errno::CONNREFUSED);
    }
    let slot = names.intercept_slot().ok_or(Errno::AGAIN)?;
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let (socket, theirs) = socketpair(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    let inner = Arc::new(Inner { names: names.clone(), share: share.clone(), _slot: slot });
    match by.take(Intercepted { socket, port, dialer: Dialer(inner) }) {
        Ok(()) => Ok(theirs),
        Err(NotTaken::Nobody) => Err(Errno::CONNREFUSED),
        Err(NotTaken::TooMany) => Err(Errno::AGAIN),
    }
}

/// Connects to where the intercepted destinations of a sandbox lead. What it connects counts as
/// the sandbox's; the connection to the proxy counts until this is dropped.
#[derive(Clone, Debug)]
pub struct Dialer(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    names: Arc<Names>,
    share: Arc<Share>,
    _slot: ChannelSlot,
}

/// Why there is no connection.
#[derive(Debug, thiserror::Error)]
pub enum DialError {
    /// No rule leads there.
    #[error("no rule leads there")]
    NoRule,
    /// The name has no address.
    #[error("there is no such name")]
    NoSuchName,
    /// The name could not be looked up.
    #[error("its name could not be looked up")]
    LookUpFailed,
    /// The name leads where the rule does not, or where the sandbox or its tenant may not connect.
    #[error(
        "its name leads to an address that the rule does not include, or the rules of the sandbox \
         or its tenant; one in a private network needs `private:` before the name"
    )]
    Denied,
    /// Too much is under way, or open.
    #[error("too many connections are open or under way")]
    TooMany,
    /// The host refuses.
    #[error("{0}")]
    Connect(io::Error),
    /// All addresses were tried.
    #[error("it has no other address")]
    NoMore,
}

impl Dialer {
    /// What was said with the sandbox' own destinations, as it is now, if it has some.
    pub fn told(&self) -> Option<Told> {
        self.0.names.policy().told()
    }

    /// Begins to connect to the address number `attempt`, from 0, of `name`, in lower case; `done`
    /// gets a non-blocking socket whose connect may be in progress, on a thread that may wait.
    pub fn dial(
        &self,
        name: &str,
        port: u16,
        attempt: usize,
        done: impl FnOnce(Result<OwnedFd, DialError>) + Send + 'static,
    ) {
        let (inner, name) = (self.0.clone(), name.to_owned());
        // Whatever becomes of the job, `done` is called once: from it, or here.
        let done = Arc::new(std::sync::Mutex::new(Some(done)));
        let call = |done: &std::sync::Mutex<Option<_>>| {
            done.lock().unwrap_or_else(std::sync::PoisonError::into_inner).take()
        };
        let of_job = done.clone();
        let job = move || {
            let outcome = inner.dial(&name, port, attempt);
            if let Some(done) = call(&of_job) {
                done(outcome);
            }
        };
        if let Err(Overloaded) = lookup::submit(self.0.names.function(), job)
            && let Some(done) = call(&done)
        {
            done(Err(DialError::TooMany));
        }
    }
}

impl Dialer {
    /// Whether a connection to a host, which was made to this address, may be used yet: rules may
    /// have changed.
    pub fn may_reach(&self, name: &str, port: u16, ip: IpAddr) -> bool {
        let meant = if name == HOST_NAME { host_address() } else { ip.to_canonical() };
        self.0.names.allows_dialing(name, SocketAddr::new(meant, port)).is_some()
    }
}

impl Inner {
    fn dial(&self, name: &str, port: u16, attempt: usize) -> Result<OwnedFd, DialError> {
        self.share.ask(Instant::now()).map_err(|_| DialError::TooMany)?;
        let permits = self.permits(name, port)?;
        let permit = permits.get(attempt).ok_or(DialError::NoMore)?;
        if !local::is_permitted(permit, Transport::Tcp) {
            self.names.deny(permit.address, Transport::Tcp);
            return Err(DialError::Denied);
        }
        self.share.wait_for_room();
        self.share.has_room().map_err(|_| DialError::TooMany)?;
        let socket = connect(permit.address, Transport::Tcp)
            .map_err(|errno| DialError::Connect(errno.into()))?;
        let noted = self.share.note_open(&socket, Some(permit.address));
        noted.map_err(|_| DialError::TooMany)?;
        self.names.reached_by(Some(name), permit.address, Transport::Tcp);
        Ok(socket)
    }

    /// The addresses that the rule for a name and a port leads to, as they are now.
    fn permits(&self, name: &str, port: u16) -> Result<Vec<Permit>, DialError> {
        let rule = self.names.policy().intercepted(name, port).ok_or(DialError::NoRule)?;
        // Of the host no more than the rule and all lists mean.
        let permit = |ip: IpAddr, meant: IpAddr| {
            let listed = self.names.allows_dialing(name, SocketAddr::new(meant, port))?;
            let on_host = on_host(&rule, meant).min(listed);
            let address = SocketAddr::new(ip, port);
            Some(Permit { address, after_thaw: AfterThaw::Reset, on_host })
        };
        if rule.target == Target::Host {
            let meant = host_address();
            return permit(HOST_LOOPBACK, meant).map(|permit| vec![permit]).ok_or_else(|| {
                self.names.deny(SocketAddr::new(meant, port), Transport::Tcp);
                DialError::Denied
            });
        }
        let addresses = match self.names.look_up(name) {
            Outcome::Addresses(addresses) => addresses,
            Outcome::NoSuchName => return Err(DialError::NoSuchName),
            _ => return Err(DialError::LookUpFailed),
        };
        if addresses.is_empty() {
            return Err(DialError::NoSuchName);
        }
        let leads_there = |ip: &IpAddr| {
            let kind = reach(*ip);
            kind != Reach::Nowhere && rule.farthest.includes(kind)
        };
        let canonical = || addresses.iter().map(IpAddr::to_canonical);
        let allowed = canonical().filter(leads_there).filter_map(|ip| permit(ip, ip));
        let allowed: Vec<_> = allowed.take(ADDRESSES_MAX).collect();
        if let (true, Some(ip)) = (allowed.is_empty(), canonical().next()) {
            self.names.deny(SocketAddr::new(ip, port), Transport::Tcp);
            return Err(DialError::Denied);
        }
        Ok(allowed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::{Ipv4Addr, TcpListener};
    use std::sync::{Mutex, mpsc};

    use super::super::rules::EgressRules;
    use thaw_abi::network::HOST_ADDRESS;

    /// Keeps what it takes.
    #[derive(Debug, Default)]
    struct Keeper(Mutex<Vec<Intercepted>>);

    impl Interceptor for Keeper {
        fn take(&self, connection: Intercepted) -> Result<(), NotTaken> {
            self.0.lock().unwrap().push(connection);
            Ok(())
        }
    }

    fn names(rules: &[&str], by: Option<Arc<dyn Interceptor>>) -> (Arc<Names>, Arc<Share>) {
        let rules = rules.iter().map(|rule| rule.parse().unwrap()).collect();
        let policy = Arc::new(EgressPolicy::default().intercepting(rules, by));
        let share = Arc::new(Share::new(policy.budget.clone()));
        (Names::new(policy), share)
    }

    fn tcp(names: &(Arc<Names>, Arc<Share>), port: u16) -> Result<OwnedFd, Errno> {
        open(&names.0, &names.1, port, Transport::Tcp)
    }

    fn dialed(connection: &Intercepted, name: &str, port: u16) -> Result<OwnedFd, String> {
        let (sender, receiver) = mpsc::channel();
        connection.dialer.dial(name, port, 0, move |outcome| sender.send(outcome).unwrap());
        receiver.recv().unwrap().map_err(|error| error.to_string())
    }

    #[test]
    fn the_resolver_answers_for_the_names_and_the_proxy_at_their_address() {
        let keeper: Arc<Keeper> = Arc::default();
        let names = names(&["api.example.com:443"], Some(keeper.clone()));
        let address = IpAddr::from(INTERCEPT_ADDRESS);
        let said = names.0.at_once(Some("api.example.com"));
        assert_eq!(said, Ok(Outcome::Addresses(vec![address])));
        assert_eq!(names.0.at_once(Some("example.com")), Ok(Outcome::NoSuchName));
        let at = |ip: IpAddr, port| SocketAddr::new(ip, port);
        assert!(names.0.is_intercepted(at(address, 443), Transport::Tcp));
        assert!(!names.0.is_intercepted(at(HOST_ADDRESS.into(), 443), Transport::Tcp));
        for (port, outcome) in [(443, None), (80, None), (22, Some(Errno::CONNREFUSED))] {
            assert_eq!(tcp(&names, port).err(), outcome, "{port}");
        }
        let udp = open(&names.0, &names.1, 443, Transport::Udp);
        assert_eq!(udp.err(), Some(Errno::CONNREFUSED));
        let ports: Vec<_> = keeper.0.lock().unwrap().iter().map(|taken| taken.port).collect();
        assert_eq!(ports, [443, 80]);
    }

    #[test]
    fn a_sandbox_has_destinations_of_its_own_that_change() {
        let keeper: Arc<Keeper> = Arc::default();
        let function = EgressPolicy::default().intercepting(Vec::new(), Some(keeper.clone()));
        let policy = Arc::new(function.of_sandbox(EgressRules::default(), None));
        let names = Names::new(policy.clone());
        let share = Arc::new(Share::new(policy.budget.clone()));
        let at = SocketAddr::new(INTERCEPT_ADDRESS.into(), 443);
        let all = (names, share);
        assert!(!all.0.is_intercepted(at, Transport::Tcp) && policy.is_closed());
        let rules = |rules: &[&str]| rules.iter().map(|rule| rule.parse().unwrap()).collect();
        policy.intercept_own(rules(&["private:*.example.com:443"]), Arc::new(7_u32));
        let proxy = Ok(Outcome::Addresses(vec![INTERCEPT_ADDRESS.into()]));
        assert_eq!(all.0.at_once(Some("a.example.com")), proxy);
        assert_eq!(all.0.at_once(Some("example.com")), Ok(Outcome::NoSuchName));
        assert!(all.0.is_intercepted(at, Transport::Tcp));
        tcp(&all, 443).unwrap();
        assert_eq!(tcp(&all, 8443).err(), Some(Errno::CONNREFUSED));
        {
            let taken = keeper.0.lock().unwrap();
            assert_eq!(taken[0].dialer.told().unwrap().downcast_ref(), Some(&7_u32));
            let error = dialed(&taken[0], "example.com", 443).unwrap_err();
            assert!(error.contains("no rule"), "{error}");
        }
        // What is told on a connection is what counts now.
        policy.intercept_own(rules(&["b.example:443"]), Arc::new(8_u32));
        assert_eq!(all.0.at_once(Some("b.example")), proxy);
        assert_eq!(all.0.at_once(Some("a.example.com")), Ok(Outcome::NoSuchName));
        policy.intercept_own(Vec::new(), Arc::new(()));
        assert!(keeper.0.lock().unwrap()[0].dialer.told().is_none());
        assert_eq!(tcp(&all, 443).err(), Some(Errno::CONNREFUSED));
    }

    #[test]
    fn a_sandbox_reaches_nothing_more_by_destinations_of_its_own() {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let port = listener.local_addr().unwrap().port();
        let host = format!("host.thaw.internal:{port}");
        let keeper: Arc<Keeper> = Arc::default();
        let function = EgressPolicy::default().intercepting(Vec::new(), Some(keeper.clone()));
        let policy = Arc::new(function.of_sandbox(EgressRules::default(), None));
        policy.intercept_own(vec![host.parse().unwrap()], Arc::new(()));
        let share = Arc::new(Share::new(policy.budget.clone()));
        tcp(&(Names::new(policy.clone()), share), port).unwrap();
        let taken = keeper.0.lock().unwrap();
        let error = dialed(&taken[0], "host.thaw.internal", port).unwrap_err();
        assert!(error.contains("does not include"), "{error}");
        policy.change(EgressRules::allowing(vec![host.parse().unwrap()]));
        dialed(&taken[0], "host.thaw.internal", port).unwrap();
    }

    #[test]
    fn without_anybody_connections_are_refused() {
        let names = names(&["api.example.com:443"], None);
        assert_eq!(tcp(&names, 443).err(), Some(Errno::CONNREFUSED));
    }

    #[test]
    fn connections_are_bounded_and_given_back() {
        let keeper: Arc<Keeper> = Arc::default();
        let names = names(&["api.example.com:443"], Some(keeper.clone()));
        for _ in 0..OF_SANDBOX_MAX {
            tcp(&names, 443).unwrap();
        }
        assert_eq!(tcp(&names, 443).err(), Some(Errno::AGAIN));
        keeper.0.lock().unwrap().pop();
        tcp(&names, 443).unwrap();
    }

    #[test]
    fn a_dialer_connects_to_where_its_rules_lead_and_nowhere_else() {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let port = listener.local_addr().unwrap().port();
        let keeper: Arc<Keeper> = Arc::default();
        let rules = [&format!("host.thaw.internal:{port}"), "10.0.0.1.example:1", "x.invalid:443"];
        let names = names(&rules, Some(keeper.clone()));
        let host = SocketAddr::from((HOST_ADDRESS, port));
        assert!(names.0.is_intercepted(host, Transport::Tcp));
        tcp(&names, port).unwrap();
        let taken = keeper.0.lock().unwrap();
        dialed(&taken[0], "host.thaw.internal", port).unwrap();
        let error = dialed(&taken[0], "host.thaw.internal", port.wrapping_add(1)).unwrap_err();
        assert!(error.contains("no rule"), "{error}");
        let error = dialed(&taken[0], "example.com", 443).unwrap_err();
        assert!(error.contains("no rule"), "{error}");
    }

    #[test]
    fn the_rules_of_a_sandbox_and_of_its_tenant_hold_for_the_proxy() {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let port = listener.local_addr().unwrap().port();
        let keeper: Arc<Keeper> = Arc::default();
        let host = format!("host.thaw.internal:{port}");
        let function =
            EgressPolicy::default().intercepting(vec![host.parse().unwrap()], Some(keeper.clone()));
        let sandbox = Arc::new(function.of_sandbox(function.first_rules(), None));
        let share = Arc::new(Share::new(sandbox.budget.clone()));
        tcp(&(Names::new(sandbox.clone()), share), port).unwrap();
        let dial = || dialed(&keeper.0.lock().unwrap()[0], "host.thaw.internal", port);
        dial().unwrap();
        assert_eq!(sandbox.report().reached, 1);
        sandbox.change(EgressRules::default());
        let error = dial().unwrap_err();
        assert!(error.contains("the rules of the sandbox"), "{error}");
        assert_eq!(sandbox.report().denied, 1);
    }
}
