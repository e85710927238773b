//! What a sandbox may connect to.

use std::collections::{BTreeMap, VecDeque};
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use super::budget::{Budget, EgressQuota};
use super::reach::{HOST_LOOPBACK, Reach, reach};
use super::rule::{EgressRule, Target, Transport, host_address};

/// Most addresses that are remembered for one sandbox.
const LEARNED_MAX: usize = 4096;
/// Most names that are looked up to judge one destination.
const NAMES_MAX: usize = 8;

/// The destinations that the sandboxes of one function may connect to; everything
/// else is denied. The sandboxes that share one share its limits: how many sockets
/// they may ask for and have open, and how many names they may look up at a time.
#[derive(Debug, Default)]
pub struct EgressPolicy {
    rules: Vec<EgressRule>,
    /// How many of the rules, the last ones, are for connections that copies make
    /// again.
    reconnecting: usize,
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

/// Addresses that a sandbox has been told for names, and by which rules they
/// are allowed.
#[derive(Debug, Default)]
pub(crate) struct Learned {
    rules: BTreeMap<IpAddr, Vec<usize>>,
    /// The oldest first.
    order: VecDeque<IpAddr>,
    /// Names of rules that were looked up, whatever came of it.
    pub looked_up: Vec<String>,
}

impl EgressPolicy {
    /// Allows what any of `rules` allows.
    pub fn new(rules: Vec<EgressRule>) -> Self {
        Self { rules, reconnecting: 0, budget: Arc::default() }
    }

    /// Allows what any of `rules` allows, too, and has copies make again the TCP
    /// connections there that the frozen program has had.
    pub fn reconnecting(mut self, rules: Vec<EgressRule>) -> Self {
        self.reconnecting += rules.len();
        self.rules.extend(rules);
        self
    }

    /// Has the sandboxes share the bounds of others, besides their own.
    pub fn within(self, quota: Arc<EgressQuota>) -> Self {
        Self { budget: Arc::new(Budget::within(quota)), ..self }
    }

    /// Whether nothing is allowed.
    pub fn is_closed(&self) -> bool {
        self.rules.is_empty()
    }

    /// Whether a name, in lower case and without a final dot, may be looked up.
    pub(crate) fn allows_name(&self, name: &str) -> bool {
        self.rules.iter().any(|rule| rule.target.names(name))
    }

    /// Whether some port of the host's loopback may be reached.
    pub(crate) fn allows_host(&self) -> bool {
        self.rules.iter().any(|rule| rule.target == Target::Host)
    }

    /// Judges a destination, which comes from a sandbox.
    pub(crate) fn judge(&self, to: SocketAddr, transport: Transport, learned: &Learned) -> Verdict {
        // An IPv4 address in IPv6 clothes is the IPv4 address.
        let (ip, port) = (to.ip().to_canonical(), to.port());
        let fits =
            |rule: &EgressRule| rule.ports.contain(port) && rule.transport.contain(transport);
        let (to_host, kind) = (ip == host_address(), reach(ip));
        if !to_host && (port == 0 || kind == Reach::Nowhere) {
            return Verdict::Denied;
        }
        let allows = |(index, rule): &(usize, &EgressRule)| {
            fits(rule)
                && match &rule.target {
                    Target::Host => to_host,
                    _ if to_host => false,
                    Target::Network(_) => rule.target.has_written_out(ip),
                    Target::Any => rule.farthest.includes(kind),
                    Target::Name(_) | Target::Below(_) => learned.knows(ip, *index),
                }
        };
        let allowing = || self.rules.iter().enumerate().filter(allows);
        // Those that reconnect come last, and count where several allow it.
        if let Some((index, _)) = allowing().next_back() {
            let address = SocketAddr::new(if to_host { HOST_LOOPBACK } else { ip }, port);
            let on_host = allowing().map(|(_, rule)| on_host(rule, ip)).max();
            return Verdict::Allowed(Permit {
                address,
                after_thaw: self.after_thaw(index),
                on_host: on_host.unwrap_or(OnHost::Nothing),
            });
        }
        if to_host {
            return Verdict::Denied;
        }
        let names: Vec<String> = self
            .rules
            .iter()
            .filter(|rule| fits(rule) && rule.farthest.includes(kind))
            .filter_map(|rule| match &rule.target {
                Target::Name(name) if !learned.looked_up.contains(name) => Some(name.clone()),
                _ => None,
            })
            .take(NAMES_MAX)
            .collect();
        if names.is_empty() { Verdict::Denied } else { Verdict::IfNamed(names) }
    }

    fn after_thaw(&self, rule: usize) -> AfterThaw {
        let reconnects = rule >= self.rules.len() - self.reconnecting;
        if reconnects { AfterThaw::Reconnect } else { AfterThaw::Reset }
    }

    /// Notes that `name` has these addresses: the rules that allow the name now
    /// allow them.
    pub(crate) fn learn(&self, learned: &mut Learned, name: &str, addresses: &[IpAddr]) {
        let mut rules = Vec::new();
        for (index, rule) in self.rules.iter().enumerate() {
            match &rule.target {
                Target::Name(own) if own == name => {
                    if !learned.looked_up.contains(own) {
                        learned.looked_up.push(own.clone());
                    }
                    rules.push(index);
                }
                Target::Below(_) if rule.target.names(name) => rules.push(index),
                _ => {}
            }
        }
        if rules.is_empty() {
            return;
        }
        for ip in addresses.iter().map(IpAddr::to_canonical) {
            let kind = reach(ip);
            let leads_there = |rule: &usize| self.rules[*rule].farthest.includes(kind);
            let rules: Vec<usize> = rules.iter().copied().filter(leads_there).collect();
            if !rules.is_empty() {
                learned.add(ip, &rules);
            }
        }
    }
}

/// How much of the host a rule means that allows an address which may be the host's.
fn on_host(rule: &EgressRule, ip: IpAddr) -> OnHost {
    let is_meant = rule.target == Target::Host || rule.target.is_address(ip);
    match (is_meant, rule.ports.is_one()) {
        (false, _) => OnHost::Nothing,
        (true, false) => OnHost::Servers,
        (true, true) => OnHost::WrittenOut,
    }
}

impl Learned {
    fn knows(&self, ip: IpAddr, rule: usize) -> bool {
        self.rules.get(&ip).is_some_and(|rules| rules.contains(&rule))
    }

    fn add(&mut self, ip: IpAddr, rules: &[usize]) {
        let known = self.rules.entry(ip).or_insert_with(|| {
            self.order.push_back(ip);
            Vec::new()
        });
        for &rule in rules {
            if !known.contains(&rule) {
                known.push(rule);
            }
        }
        while self.order.len() > LEARNED_MAX {
            let oldest = self.order.pop_front();
            oldest.map(|ip| self.rules.remove(&ip));
        }
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
        assert!(learned.rules.is_empty());
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
    fn what_is_learned_is_bounded() {
        let policy = policy(&["*.example.com:443"]);
        let mut learned = Learned::default();
        for number in 0..10_000_u32 {
            let ip = IpAddr::V4((0x0b00_0000 + number).into());
            policy.learn(&mut learned, "a.example.com", &[ip]);
        }
        assert_eq!((learned.rules.len(), learned.order.len()), (LEARNED_MAX, LEARNED_MAX));
        assert!(learned.knows(IpAddr::V4((0x0b00_0000 + 9999).into()), 0));
    }
}
