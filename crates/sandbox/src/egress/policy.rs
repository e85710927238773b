//! What a sandbox may connect to.

use std::net::{IpAddr, SocketAddr};
use std::sync::{Arc, PoisonError, RwLock};

use super::budget::{Budget, EgressQuota};
use super::intercept::{Interception, OwnDestinations};
use super::journal::{EgressOutcome, EgressReport, Journal};
use super::meter;
use super::reach::HOST_LOOPBACK;
use super::rule::{EgressRule, Target, Transport};
use super::rules::{Asked, EgressRules, Learned, NAMES_MAX, Opinion};
use super::traffic::{EgressBytes, SandboxTraffic};

/// The destinations that the sandboxes of one function may connect to; everything
/// else is denied. The sandboxes that share one share its limits: how many sockets
/// they may ask for and have open, and how many names they may look up at a time.
///
/// A sandbox may have one of its own ([`EgressPolicy::of_sandbox`]), whose rules can change.
#[derive(Debug, Default)]
pub struct EgressPolicy {
    rules: RwLock<Arc<EgressRules>>,
    /// What the rules may allow at most, besides the ceiling of the tenant.
    within: Option<Arc<EgressRules>>,
    /// What the sandbox has reached; only of one that has a policy of its own.
    journal: Option<Journal>,
    /// What its connections have carried; only of the same.
    traffic: Option<Arc<SandboxTraffic>>,
    /// Destinations that a proxy answers for.
    pub(super) interception: Option<Interception>,
    /// More of them, of one sandbox.
    pub(super) own: RwLock<Option<Arc<OwnDestinations>>>,
    pub(super) budget: Arc<Budget>,
}

/// What becomes of a connection in the copies of a program that is frozen while it
/// is open.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum AfterThaw {
    /// It is reset.
    Reset,
    /// It is made again when it is first used (Catalyzer §3.3).
    Reconnect,
}

/// Leave to connect to exactly this address: no name is looked up after it was
/// judged.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Permit {
    pub address: SocketAddr,
    pub after_thaw: AfterThaw,
    pub on_host: OnHost,
}

/// What is allowed if the address should be one of the host's own.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum OnHost {
    /// Nothing: no rule has written the address out.
    Nothing,
    /// Its servers, but not those of Thaw.
    Servers,
    /// All servers: a rule has written out the address and this one port.
    WrittenOut,
}

/// What the policy says to a destination.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Verdict {
    /// Connect to this address.
    Allowed(Permit),
    /// Allowed if it is an address of one of these names.
    IfNamed(Vec<String>),
    /// Forbidden.
    Denied,
}

impl EgressPolicy {
    /// Allows what any of `rules` allows.
    pub fn new(rules: Vec<EgressRule>) -> Self {
        Self::from(EgressRules::allowing(rules))
    }

    /// Allows what any of `rules` allows, too, and has copies make again the TCP
    /// connections there that the frozen program has had.
    pub fn reconnecting(self, rules: Vec<EgressRule>) -> Self {
        let mut all = (*self.rules()).clone();
        all.reconnect.extend(rules);
        Self { rules: RwLock::new(Arc::new(all)), ..self }
    }

    /// Has the sandboxes share the bounds of others, besides their own.
    pub fn within(self, quota: Arc<EgressQuota>) -> Self {
        Self { budget: Arc::new(Budget::within(quota)), ..self }
    }

    /// The policy of one sandbox of the function whose policy this is: with rules of its own,
    /// which can change, never more than `within`, and the function's limits.
    pub fn of_sandbox(&self, rules: EgressRules, within: Option<EgressRules>) -> Self {
        Self {
            rules: RwLock::new(Arc::new(rules)),
            within: within.map(Arc::new),
            journal: Some(Journal::default()),
            traffic: Some(Arc::default()),
            interception: self.interception.clone(),
            own: RwLock::default(),
            budget: self.budget.clone(),
        }
    }

    /// One for a copy of the sandbox: it begins with the same rules and destinations of its own, and
    /// may have no more.
    pub fn copy(&self) -> Self {
        let copy = self.of_sandbox((*self.rules()).clone(), self.most().cloned());
        Self { own: RwLock::new(self.own()), ..copy }
    }

    /// Whether nothing is allowed.
    pub fn is_closed(&self) -> bool {
        self.rules().is_closed() && !self.intercepts(|_| true)
    }

    /// Whether it is that of one sandbox, so that its rules can change.
    pub fn is_of_sandbox(&self) -> bool {
        self.journal.is_some()
    }

    /// The rules as they are now.
    pub fn rules(&self) -> Arc<EgressRules> {
        self.rules.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// What the rules may allow at most, besides the ceiling of the tenant.
    pub fn most(&self) -> Option<&EgressRules> {
        self.within.as_deref()
    }

    /// The rules that a sandbox of the function begins with: the function's, and the destinations
    /// that a proxy answers for.
    pub fn first_rules(&self) -> EgressRules {
        let mut rules = (*self.rules()).clone();
        rules.allow.extend(self.interception.iter().flat_map(Interception::rules).cloned());
        rules
    }

    /// Replaces the rules. They hold for what is asked for from now on; connections stay.
    pub fn change(&self, rules: EgressRules) {
        *self.rules.write().unwrap_or_else(PoisonError::into_inner) = Arc::new(rules);
    }

    /// Has the bytes of all connections counted as those of the function of this name, if bytes
    /// are counted ([`super::count_egress_bytes`]).
    pub fn counted_as(self, function: &str) -> Self {
        self.budget.count_as(function);
        self
    }

    /// What the sandbox has reached and was denied; nothing if the policy is that of a function.
    pub fn report(&self) -> EgressReport {
        self.journal.as_ref().map(Journal::report).unwrap_or_default()
    }

    /// What the TCP connections of the sandbox have carried, those that have ended included; none
    /// if nobody counts it, or if the policy is that of a function.
    pub fn bytes(&self) -> Option<EgressBytes> {
        let traffic = self.traffic.as_ref().filter(|_| meter::running().is_some())?;
        Some(traffic.all.read())
    }

    pub(super) fn traffic(&self) -> Option<Arc<SandboxTraffic>> {
        self.traffic.clone()
    }

    /// Notes what became of a request.
    pub(super) fn note(&self, outcome: EgressOutcome, to: &str, name: Option<&str>) {
        if let Some(journal) = &self.journal {
            journal.note(outcome, to, name);
        }
    }

    /// All lists that have to allow something.
    fn lists(&self) -> Vec<Arc<EgressRules>> {
        let ceiling = self.budget.ceiling();
        [Some(self.rules()), self.within.clone(), ceiling].into_iter().flatten().collect()
    }

    /// How much of the host a proxy may mean at this address of a name, if it may connect there for
    /// the sandbox: its tenant's ceiling holds for that, too, and the sandbox' own rules if it has
    /// some. Those of a function do not name these destinations.
    pub(super) fn allows_dialing(&self, name: &str, to: SocketAddr) -> Option<OnHost> {
        let asked = Asked::new(to, Transport::Tcp)?;
        let mut learned = Learned::default();
        learned.add(to.ip().to_canonical(), &name.into());
        let lists = match self.is_of_sandbox() {
            true => self.lists(),
            false => self.budget.ceiling().into_iter().collect(),
        };
        let mut least = OnHost::WrittenOut;
        for rules in lists {
            match rules.judge(asked, &learned) {
                Opinion::Allowed { on_host, .. } => least = least.min(on_host),
                Opinion::IfNamed(_) | Opinion::Denied => return None,
            }
        }
        Some(least)
    }

    /// Whether a name, in lower case and without a final dot, may be looked up.
    pub(crate) fn allows_name(&self, name: &str) -> bool {
        self.lists().iter().all(|rules| rules.allows_name(name))
    }

    /// Whether some port of the host's loopback may be reached.
    pub(crate) fn allows_host(&self) -> bool {
        self.lists().iter().all(|rules| rules.allows_host())
            || self.intercepts(|rule| rule.target == Target::Host)
    }

    /// Judges a destination, which comes from a sandbox.
    pub(crate) fn judge(&self, to: SocketAddr, transport: Transport, learned: &Learned) -> Verdict {
        let Some(asked) = Asked::new(to, transport) else { return Verdict::Denied };
        let (mut least, mut after_thaw, mut names) =
            (OnHost::WrittenOut, AfterThaw::Reset, Vec::new());
        for (place, rules) in self.lists().iter().enumerate() {
            match rules.judge(asked, learned) {
                Opinion::Denied => return Verdict::Denied,
                Opinion::IfNamed(more) => names.extend(more),
                Opinion::Allowed { on_host, reconnects } => {
                    least = least.min(on_host);
                    if place == 0 && reconnects {
                        after_thaw = AfterThaw::Reconnect;
                    }
                }
            }
        }
        if !names.is_empty() {
            names.dedup();
            names.truncate(NAMES_MAX);
            return Verdict::IfNamed(names);
        }
        let ip = if asked.is_host() { HOST_LOOPBACK } else { to.ip().to_canonical() };
        let address = SocketAddr::new(ip, to.port());
        Verdict::Allowed(Permit { address, after_thaw, on_host: least })
    }

    /// Notes that `name` has these addresses: the rules that allow the name now
    /// allow them.
    pub(crate) fn learn(&self, learned: &mut Learned, name: &str, addresses: &[IpAddr]) {
        let lists = self.lists();
        if lists.iter().any(|rules| rules.has_name(name)) {
            learned.note_looked_up(name);
        }
        // Where every list means all names, nothing hangs on this one.
        if !self.is_of_sandbox() && !lists.iter().any(|rules| rules.means_name(name)) {
            return;
        }
        let shared: Arc<str> = name.into();
        for ip in addresses.iter().map(IpAddr::to_canonical) {
            if lists.iter().any(|rules| rules.leads_to(name, ip)) {
                learned.add(ip, &shared);
            }
        }
    }
}

impl From<EgressRules> for EgressPolicy {
    fn from(rules: EgressRules) -> Self {
        Self { rules: RwLock::new(Arc::new(rules)), ..Self::default() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn policy(rules: &[&str]) -> EgressPolicy {
        EgressPolicy::new(rules.iter().map(|rule| rule.parse().unwrap()).collect())
    }

    fn judge(policy: &EgressPolicy, to: &str, transport: Transport) -> Verdict {
        policy.judge(to.parse().unwrap(), transport, &Learned::default())
    }

    fn permit(verdict: Verdict) -> Option<Permit> {
        match verdict {
            Verdict::Allowed(permit) => Some(permit),
            _ => None,
        }
    }

    /// The address that is connected, if the verdict is that one may.
    fn connected(verdict: Verdict) -> Option<String> {
        permit(verdict).map(|permit| permit.address.to_string())
    }

    fn allows(rules: &[&str], to: &str) -> bool {
        let verdict = judge(&policy(rules), to, Transport::Tcp);
        connected(verdict).is_some_and(|address| address == to)
    }

    #[test]
    fn nothing_is_allowed_by_default() {
        assert_eq!(judge(&policy(&[]), "192.0.2.1:443", Transport::Tcp), Verdict::Denied);
    }

    #[test]
    fn networks_ports_and_protocols_are_looked_at() {
        let rules = ["10.0.0.0/8:443", "192.0.2.7:8000-8002"];
        assert!(allows(&rules, "10.255.0.1:443"));
        assert!(!allows(&rules, "10.255.0.1:444"));
        assert!(!allows(&rules, "11.0.0.1:443"));
        assert!(allows(&rules, "192.0.2.7:8002"));
        assert!(!allows(&rules, "192.0.2.7:8003"));
        assert_eq!(judge(&policy(&rules), "10.0.0.1:443", Transport::Udp), Verdict::Denied);
        let udp = policy(&["192.0.2.1:53/udp"]);
        let asked = connected(judge(&udp, "192.0.2.1:53", Transport::Udp));
        assert_eq!(asked.as_deref(), Some("192.0.2.1:53"));
        assert_eq!(judge(&udp, "192.0.2.1:53", Transport::Tcp), Verdict::Denied);
    }

    #[test]
    fn the_host_is_reached_by_its_own_name_only() {
        for rules in [&["*"][..], &["0.0.0.0/0:*", "[::/0]:*"], &["10.0.0.0/8:*"]] {
            for to in [
                "127.0.0.1:80",
                "127.8.9.1:80",
                "0.0.0.0:80",
                "0.0.0.1:80",
                "10.0.2.2:80",
                "10.0.2.3:80",
                "10.0.2.15:80",
                "255.255.255.255:80",
                "224.0.0.1:80",
                "[::1]:80",
                "[::]:80",
                "[::ffff:127.0.0.1]:80",
                "[::127.0.0.1]:80",
                "[ff02::1]:80",
            ] {
                assert_eq!(judge(&policy(rules), to, Transport::Tcp), Verdict::Denied, "{to}");
            }
        }
        let host = policy(&["host.thaw.internal:5432"]);
        for to in ["10.0.2.2:5432", "[::ffff:10.0.2.2]:5432"] {
            let loopback = connected(judge(&host, to, Transport::Tcp));
            assert_eq!(loopback.as_deref(), Some("127.0.0.1:5432"));
        }
        assert_eq!(judge(&host, "10.0.2.2:5433", Transport::Tcp), Verdict::Denied);
    }

    #[test]
    fn everything_does_not_mean_the_metadata_service() {
        assert!(allows(&["*"], "192.0.2.1:443"));
        assert!(allows(&["*:443"], "[2001:db8::1]:443"));
        assert!(!allows(&["*"], "169.254.169.254:80"));
        assert!(!allows(&["*"], "[fe80::1]:80"));
        assert!(!allows(&["0.0.0.0/0:*"], "169.254.169.254:80"));
        assert!(allows(&["169.254.0.0/16:80"], "169.254.1.1:80"));
        assert!(allows(&["169.254.169.254:80"], "169.254.169.254:80"));
        for to in [
            "169.254.169.254:80",
            "168.63.129.16:80",
            "100.100.100.200:80",
            "192.0.0.192:80",
            "[fd00:ec2::254]:80",
            "[64:ff9b::a9fe:a9fe]:80",
        ] {
            let wide = ["*", "private:*", "169.254.0.0/16:*", "100.64.0.0/10:*", "168.0.0.0/5:*"];
            assert!(!allows(&wide, to), "{to}");
            assert!(!allows(&["0.0.0.0/0:*", "[::/0]:*", "[fc00::/7]:*"], to), "{to}");
        }
        assert!(allows(&["[fd00:ec2::254]:80"], "[fd00:ec2::254]:80"));
    }

    #[test]
    fn names_and_everything_lead_to_public_addresses_unless_they_say_private() {
        for to in ["10.1.2.3:80", "192.168.0.1:80", "[fd00::1]:80", "[64:ff9b::a00:1]:80"] {
            assert!(!allows(&["*", "0.0.0.0/0:*", "[::/0]:*"], to), "{to}");
            assert!(allows(&["private:*:80"], to), "{to}");
            assert!(allows(&["private:*"], to), "{to}");
        }
        let policy = policy(&["a.example.com:80", "private:b.example.com:80"]);
        let ips = ["10.0.0.1", "fd00::1", "198.51.100.1", "169.254.169.254", "fd00:ec2::254"];
        let ips = ips.map(|ip| ip.parse().unwrap());
        let reaches = |name: &str| {
            let mut learned = Learned::default();
            policy.learn(&mut learned, name, &ips);
            ips.map(|ip| {
                let to = SocketAddr::new(ip, 80);
                connected(policy.judge(to, Transport::Tcp, &learned)).is_some()
            })
        };
        assert_eq!(reaches("a.example.com"), [false, false, true, false, false]);
        assert_eq!(reaches("b.example.com"), [true, true, true, false, false]);
    }

    #[test]
    fn only_what_is_written_out_may_be_the_hosts_own() {
        let on_host = |rules: &[&str], to: &str| {
            permit(judge(&policy(rules), to, Transport::Tcp)).map(|permit| permit.on_host)
        };
        let to = "192.168.0.1:80";
        assert_eq!(on_host(&["192.168.0.0/24:80"], to), Some(OnHost::Nothing));
        assert_eq!(on_host(&["private:*:80"], to), Some(OnHost::Nothing));
        assert_eq!(on_host(&["192.168.0.1:*", "private:*"], to), Some(OnHost::Servers));
        assert_eq!(on_host(&["192.168.0.1:80", "192.168.0.1:*"], to), Some(OnHost::WrittenOut));
        assert_eq!(on_host(&["host.thaw.internal:*"], "10.0.2.2:80"), Some(OnHost::Servers));
        assert_eq!(on_host(&["host.thaw.internal:80"], "10.0.2.2:80"), Some(OnHost::WrittenOut));
    }

    #[test]
    fn mapped_addresses_are_the_addresses() {
        let verdict = judge(&policy(&["10.0.0.0/8:443"]), "[::ffff:10.1.2.3]:443", Transport::Tcp);
        assert_eq!(connected(verdict).as_deref(), Some("10.1.2.3:443"));
    }

    #[test]
    fn addresses_are_allowed_for_the_rule_of_their_name() {
        let policy = policy(&["api.example.com:443", "*.example.org:80", "other.example.com:22"]);
        let mut learned = Learned::default();
        let judge = |learned: &Learned, to: &str| {
            matches!(
                policy.judge(to.parse().unwrap(), Transport::Tcp, learned),
                Verdict::Allowed(..)
            )
        };
        assert!(!judge(&learned, "192.0.2.1:443"));
        policy.learn(&mut learned, "api.example.com", &["192.0.2.1".parse().unwrap()]);
        policy.learn(&mut learned, "www.example.org", &["192.0.2.2".parse().unwrap()]);
        policy.learn(&mut learned, "evil.example.net", &["192.0.2.3".parse().unwrap()]);
        assert!(judge(&learned, "192.0.2.1:443"));
        assert!(!judge(&learned, "192.0.2.1:80"));
        assert!(!judge(&learned, "192.0.2.1:22"));
        assert!(judge(&learned, "192.0.2.2:80"));
        assert!(!judge(&learned, "192.0.2.2:443"));
        assert!(!judge(&learned, "192.0.2.3:443"));
    }

    #[test]
    fn a_name_that_leads_to_the_host_leads_nowhere() {
        let policy = policy(&["*.example.com:*"]);
        let mut learned = Learned::default();
        let addresses = ["127.0.0.1", "169.254.169.254", "::1", "::ffff:127.0.0.1", "0.0.0.0"];
        let addresses = addresses.map(|ip| ip.parse().unwrap());
        policy.learn(&mut learned, "rebind.example.com", &addresses);
        assert_eq!(learned.len(), (0, 0));
    }

    #[test]
    fn a_name_that_was_not_looked_up_yet_is_looked_up_once() {
        let policy = policy(&["api.example.com:443", "*.example.org:443"]);
        let mut learned = Learned::default();
        let to = "192.0.2.1:443".parse().unwrap();
        let names = vec!["api.example.com".to_owned()];
        assert_eq!(policy.judge(to, Transport::Tcp, &learned), Verdict::IfNamed(names));
        let metadata = "169.254.169.254:443".parse().unwrap();
        assert_eq!(policy.judge(metadata, Transport::Tcp, &learned), Verdict::Denied);
        policy.learn(&mut learned, "api.example.com", &[]);
        assert_eq!(policy.judge(to, Transport::Tcp, &learned), Verdict::Denied);
    }

    #[test]
    fn only_names_that_may_be_private_are_looked_up_for_a_private_address() {
        let policy = policy(&["api.example.com:443", "private:db.example.com:443"]);
        let judge =
            |to: &str| policy.judge(to.parse().unwrap(), Transport::Tcp, &Learned::default());
        let names =
            |names: &[&str]| Verdict::IfNamed(names.iter().map(|&name| name.to_owned()).collect());
        assert_eq!(judge("10.0.0.1:443"), names(&["db.example.com"]));
        assert_eq!(judge("198.51.100.1:443"), names(&["api.example.com", "db.example.com"]));
        for to in ["169.254.1.1:443", "168.63.129.16:443", "[fd00:ec2::254]:443"] {
            assert_eq!(judge(to), Verdict::Denied, "{to}");
        }
    }

    #[test]
    fn a_rule_that_reconnects_allows_and_outweighs_one_that_does_not() {
        let rules = |rules: &[&str]| rules.iter().map(|rule| rule.parse().unwrap()).collect();
        let policy = EgressPolicy::new(rules(&["10.0.0.0/8:*", "host.thaw.internal:1-9"]))
            .reconnecting(rules(&["10.1.0.0/16:6379", "host.thaw.internal:5"]));
        let after = |to| match judge(&policy, to, Transport::Tcp) {
            Verdict::Allowed(permit) => Some(permit.after_thaw),
            _ => None,
        };
        assert_eq!(after("10.1.0.1:6379"), Some(AfterThaw::Reconnect));
        assert_eq!(after("10.1.0.1:6380"), Some(AfterThaw::Reset));
        assert_eq!(after("10.2.0.1:6379"), Some(AfterThaw::Reset));
        assert_eq!(after("10.0.2.2:5"), Some(AfterThaw::Reconnect));
        assert_eq!(after("10.0.2.2:6"), Some(AfterThaw::Reset));
        assert_eq!(after("11.0.0.1:6379"), None);
    }

    #[test]
    fn rules_that_change_hold_at_once_and_what_was_learned_stays() {
        let rules = |rules: &[&str]| {
            EgressRules::allowing(rules.iter().map(|rule| rule.parse().unwrap()).collect())
        };
        let policy = policy(&["*"]).of_sandbox(rules(&["*.example.com:443"]), None);
        let mut learned = Learned::default();
        policy.learn(&mut learned, "a.example.com", &["192.0.2.1".parse().unwrap()]);
        let to = "192.0.2.1:443".parse().unwrap();
        let judge = |policy: &EgressPolicy| policy.judge(to, Transport::Tcp, &learned);
        assert!(permit(judge(&policy)).is_some());
        policy.change(EgressRules::default());
        assert_eq!(judge(&policy), Verdict::Denied);
        policy.change(rules(&["a.example.com:443"]));
        assert!(permit(judge(&policy)).is_some(), "its address is known");
    }

    #[test]
    fn no_rule_allows_more_than_what_it_is_within() {
        let rules = |rules: &[&str]| {
            EgressRules::allowing(rules.iter().map(|rule| rule.parse().unwrap()).collect())
        };
        let quota: Arc<EgressQuota> = Arc::default();
        let function = policy(&[]).within(quota.clone());
        let all = ["private:*", "169.254.169.254:80", "host.thaw.internal:80", "192.0.2.1:22"];
        let policy = function.of_sandbox(
            rules(&all),
            Some(rules(&["*:80", "*.example.com:*", "10.0.0.0/8:443", "192.0.2.0/24:22"])),
        );
        let mut learned = Learned::default();
        let judge = |learned: &Learned, to: &str| {
            policy.judge(to.parse().unwrap(), Transport::Tcp, learned)
        };
        for to in ["192.0.2.1:443", "10.0.0.1:80", "169.254.169.254:80", "10.0.2.2:80"] {
            assert_eq!(judge(&learned, to), Verdict::Denied, "{to}");
        }
        assert!(permit(judge(&learned, "10.0.0.1:443")).is_some());
        // An address that only the sandbox has written out may not be the host's own.
        assert_eq!(permit(judge(&learned, "192.0.2.1:22")).unwrap().on_host, OnHost::Nothing);
        policy.learn(&mut learned, "www.example.com", &["192.0.2.9".parse().unwrap()]);
        assert!(permit(judge(&learned, "192.0.2.9:443")).is_some());
        assert!(policy.allows_name("www.example.com") && !policy.allows_host());
        // That of the tenant counts at once, for all of its functions.
        quota.set_ceiling(Some(rules(&["*:80"])));
        assert_eq!(judge(&learned, "10.0.0.1:443"), Verdict::Denied);
        assert_eq!(judge(&learned, "192.0.2.9:443"), Verdict::Denied);
        assert!(permit(judge(&learned, "192.0.2.9:80")).is_some());
        quota.set_ceiling(None);
        assert!(permit(judge(&learned, "10.0.0.1:443")).is_some());
    }

    #[test]
    fn only_a_sandbox_has_a_journal() {
        let function = policy(&["*"]);
        let sandbox = function.of_sandbox(EgressRules::default(), None);
        for policy in [&function, &sandbox] {
            policy.note(EgressOutcome::Denied, "192.0.2.1:1", None);
        }
        assert_eq!((function.report().denied, sandbox.report().denied), (0, 1));
        assert!(sandbox.is_of_sandbox() && sandbox.is_closed());
    }
}
