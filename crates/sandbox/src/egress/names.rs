//! What one sandbox may ask the resolver, and what it has been told.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rustix::io::Errno;
use thaw_abi::network::{HOST_NAME, INTERCEPT_ADDRESS};

use super::budget;
use super::dns::{Outcome, lookup};
use super::events::{Denied, EgressEvents, Unseen};
use super::intercept::{self, Interception};
use super::journal::EgressOutcome;
use super::policy::{EgressPolicy, OnHost, Verdict};
use super::rule::{Transport, host_address};
use super::rules::{EgressRules, Learned};

/// Most look-ups of one sandbox at a time.
const LOOKUPS_MAX: usize = 8;
/// Most connections of one sandbox to the resolver at a time.
const CHANNELS_MAX: usize = 64;

/// The egress state of one sandbox, shared with the resolver.
#[derive(Debug)]
pub struct Names {
    policy: Arc<EgressPolicy>,
    learned: Mutex<Learned>,
    /// The rules under which the names of rules were looked up.
    rules: Mutex<Option<Arc<EgressRules>>>,
    /// What became of what it asked for.
    events: Unseen,
    lookups: Arc<AtomicUsize>,
    channels: Arc<AtomicUsize>,
    intercepted: Arc<AtomicUsize>,
}

/// A connection to the resolver or to a proxy, of those of the sandbox and of its function.
#[derive(Debug)]
pub struct ChannelSlot {
    _of_sandbox: Slot,
    _of_function: Slot,
}

/// One of a bounded number; dropping it gives it back.
#[derive(Debug)]
pub struct Slot(Arc<AtomicUsize>);

impl Slot {
    fn take(used: &Arc<AtomicUsize>, max: usize) -> Option<Self> {
        let taken = Self(used.clone());
        (used.fetch_add(1, Ordering::Relaxed) < max).then_some(taken)
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Names {
    pub fn new(policy: Arc<EgressPolicy>) -> Arc<Self> {
        Arc::new(Self {
            policy,
            learned: Mutex::default(),
            rules: Mutex::default(),
            events: Unseen::default(),
            lookups: Arc::default(),
            channels: Arc::default(),
            intercepted: Arc::default(),
        })
    }

    fn learned(&self) -> MutexGuard<'_, Learned> {
        self.learned.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What was made and denied since the last call.
    pub fn take_egress_events(&self) -> EgressEvents {
        self.events.take()
    }

    /// The answer to who may not reach `to`.
    pub fn deny(&self, to: SocketAddr, transport: Transport) -> Errno {
        self.deny_as(Denied::Address(to, transport));
        Errno::ACCESS
    }

    fn deny_as(&self, denied: Denied) {
        self.policy.note(EgressOutcome::Denied, &denied.to_string(), None);
        self.events.note(denied);
    }

    /// Notes that a connection to `to` was begun.
    pub fn reached(&self, to: SocketAddr, transport: Transport) {
        let learned = self.learned();
        let name = self.policy.is_of_sandbox().then(|| learned.name_of(to.ip())).flatten();
        self.reached_by(name, to, transport);
    }

    /// The same for a destination that was looked up by this name.
    pub fn reached_by(&self, name: Option<&str>, to: SocketAddr, transport: Transport) {
        self.events.note_made();
        if self.policy.is_of_sandbox() {
            let to = Denied::Address(to, transport).to_string();
            self.policy.note(EgressOutcome::Reached, &to, name);
        }
    }

    /// Whether there is nothing that may be reached, for now.
    pub fn is_closed(&self) -> bool {
        self.policy.is_closed()
    }

    /// Judges a destination by what is known now.
    pub fn judge(&self, to: SocketAddr, transport: Transport) -> Verdict {
        self.policy.judge(to, transport, &self.learned_by_these_rules())
    }

    /// What was learned; what the names of other rules led to may have changed since.
    fn learned_by_these_rules(&self) -> MutexGuard<'_, Learned> {
        let mut learned = self.learned();
        if self.policy.is_of_sandbox() {
            let rules = self.policy.rules();
            let mut known = self.rules.lock().unwrap_or_else(PoisonError::into_inner);
            if !known.as_ref().is_some_and(|known| Arc::ptr_eq(known, &rules)) {
                learned.forget_looked_up();
                *known = Some(rules);
            }
        }
        learned
    }

    /// What can be said of a name without asking anybody; otherwise the name.
    pub fn at_once<'a>(&self, name: Option<&'a str>) -> Result<Outcome, &'a str> {
        match name {
            None => Ok(Outcome::NoSuchName),
            Some(HOST_NAME) if self.policy.allows_host() => {
                Ok(Outcome::Addresses(vec![host_address()]))
            }
            Some(name) if self.policy.intercepts(|rule| rule.target.names(name)) => {
                Ok(Outcome::Addresses(vec![INTERCEPT_ADDRESS.into()]))
            }
            Some("localhost") => Ok(Outcome::Addresses(vec![
                IpAddr::V4(Ipv4Addr::LOCALHOST),
                IpAddr::V6(Ipv6Addr::LOCALHOST),
            ])),
            Some(name) if name != HOST_NAME && self.policy.allows_name(name) => Err(name),
            Some(name) => {
                self.deny_as(Denied::Name(name.to_owned()));
                Ok(Outcome::NoSuchName)
            }
        }
    }

    /// Asks the host's resolver, and notes what it says. May block.
    pub fn look_up(&self, name: &str) -> Outcome {
        let outcome = lookup::addresses_of(&self.policy.budget, name).unwrap_or_else(|error| {
            self.events.note_failure(name, &error);
            Outcome::Failed
        });
        let addresses: &[IpAddr] = match &outcome {
            Outcome::Addresses(addresses) => addresses,
            _ => &[],
        };
        self.policy.learn(&mut self.learned(), name, addresses);
        outcome
    }

    /// Leave to look something up; `None` if the sandbox has too much under way.
    pub fn lookup_slot(&self) -> Option<Slot> {
        Slot::take(&self.lookups, LOOKUPS_MAX)
    }

    /// Leave to have a connection to the resolver; `None` if the sandbox or its
    /// function has too many.
    pub fn channel_slot(&self) -> Option<ChannelSlot> {
        let of_sandbox = Slot::take(&self.channels, CHANNELS_MAX)?;
        let of_function = Slot::take(&self.policy.budget.channels, budget::CHANNELS_MAX)?;
        Some(ChannelSlot { _of_sandbox: of_sandbox, _of_function: of_function })
    }

    /// The policy of the sandbox.
    pub(super) fn policy(&self) -> &EgressPolicy {
        &self.policy
    }

    /// Who answers for intercepted destinations.
    pub(super) fn interception(&self) -> Option<&Interception> {
        self.policy.interception.as_ref()
    }

    /// How much of the host a proxy may mean at this address of a name, if it may connect there for
    /// the sandbox.
    pub(super) fn allows_dialing(&self, name: &str, to: SocketAddr) -> Option<OnHost> {
        self.policy.allows_dialing(name, to)
    }

    /// Leave to have a connection to the proxy; `None` if the sandbox or its function has too
    /// many.
    pub fn intercept_slot(&self) -> Option<ChannelSlot> {
        let of_sandbox = Slot::take(&self.intercepted, intercept::OF_SANDBOX_MAX)?;
        let of_function = Slot::take(&self.interception()?.channels, intercept::OF_FUNCTION_MAX)?;
        Some(ChannelSlot { _of_sandbox: of_sandbox, _of_function: of_function })
    }

    /// Number of the function, whose look-ups have their turn among those of others.
    pub fn function(&self) -> u64 {
        self.policy.budget.id
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(rules: &[&str]) -> Arc<Names> {
        let rules = rules.iter().map(|rule| rule.parse().unwrap()).collect();
        Names::new(Arc::new(EgressPolicy::new(rules)))
    }

    #[test]
    fn only_allowed_names_are_asked_for() {
        let names = names(&["api.example.com:443"]);
        assert_eq!(names.at_once(Some("api.example.com")), Err("api.example.com"));
        assert_eq!(names.at_once(Some("example.com")), Ok(Outcome::NoSuchName));
        assert_eq!(names.take_egress_events().recent, [Denied::Name("example.com".to_owned())]);
        assert_eq!(names.at_once(None), Ok(Outcome::NoSuchName));
        assert_eq!(names.at_once(Some(HOST_NAME)), Ok(Outcome::NoSuchName));
    }

    #[test]
    fn the_host_has_a_name_where_it_may_be_reached() {
        let names = names(&["host.thaw.internal:80"]);
        let address = IpAddr::from(thaw_abi::network::HOST_ADDRESS);
        assert_eq!(names.at_once(Some(HOST_NAME)), Ok(Outcome::Addresses(vec![address])));
    }

    #[test]
    fn the_sandboxes_of_a_function_share_its_connections_to_the_resolver() {
        let policy = Arc::new(EgressPolicy::new(vec!["*".parse().unwrap()]));
        let sandboxes: Vec<_> = (0..8).map(|_| Names::new(policy.clone())).collect();
        let take = |names: &Arc<Names>| std::iter::from_fn(|| names.channel_slot()).collect();
        let taken: Vec<Vec<ChannelSlot>> = sandboxes.iter().map(take).collect();
        assert_eq!(taken[0].len(), CHANNELS_MAX);
        assert_eq!(taken.iter().map(Vec::len).sum::<usize>(), budget::CHANNELS_MAX);
        assert!(sandboxes[7].channel_slot().is_none());
        drop(taken);
        assert!(sandboxes[7].channel_slot().is_some());
    }

    #[test]
    fn slots_are_given_back() {
        let names = names(&[]);
        let taken: Vec<Slot> = (0..LOOKUPS_MAX).map(|_| names.lookup_slot().unwrap()).collect();
        assert!(names.lookup_slot().is_none());
        drop(taken);
        assert!(names.lookup_slot().is_some());
    }
}
