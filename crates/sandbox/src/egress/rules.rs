//! Lists of rules: what one of them says to a destination, and to a name.

use std::collections::{BTreeMap, VecDeque};
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use super::policy::OnHost;
use super::reach::{Reach, reach, stand_ins};
use super::rule::{EgressRule, EgressRuleError, Target, Transport, host_address};

/// Most pairs of an address and a name that are remembered for one sandbox.
const LEARNED_MAX: usize = 4096;
/// Most bytes of those names.
const LEARNED_BYTES_MAX: usize = 256 << 10;
/// Most names of one address: each rule is held against all of them.
const NAMES_OF_ADDRESS_MAX: usize = 32;
/// Most names that are remembered to have been looked up for their rules.
const LOOKED_UP_MAX: usize = 1024;
/// Most names that are looked up to judge one destination.
pub(super) const NAMES_MAX: usize = 8;

/// Rules that say together what may be reached: what `exempt` allows, and what `allow` or
/// `reconnect` allow and `deny` does not deny.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct EgressRules {
    /// Allowed, where nothing denies it.
    pub allow: Vec<EgressRule>,
    /// The same, and copies make connections there again.
    pub reconnect: Vec<EgressRule>,
    /// Denied: addresses, networks and `*`.
    pub deny: Vec<EgressRule>,
    /// Allowed, whatever is denied.
    pub exempt: Vec<EgressRule>,
}

/// What a list says to a destination.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Opinion {
    /// Allowed, and how much of the host is meant; whether a rule of `reconnect` says so.
    Allowed { on_host: OnHost, reconnects: bool },
    /// Allowed if it is an address of one of these names.
    IfNamed(Vec<String>),
    /// Forbidden.
    Denied,
}

/// A destination that is no address of the sandbox itself.
#[derive(Clone, Copy, Debug)]
pub(super) struct Asked {
    ip: IpAddr,
    port: u16,
    transport: Transport,
    kind: Reach,
}

impl Asked {
    /// `None`: nobody can be reached there.
    pub fn new(to: SocketAddr, transport: Transport) -> Option<Self> {
        // An IPv4 address in IPv6 clothes is the IPv4 address.
        let (ip, port) = (to.ip().to_canonical(), to.port());
        let asked = Self { ip, port, transport, kind: reach(ip) };
        let is_nowhere = port == 0 || asked.kind == Reach::Nowhere;
        (asked.is_host() || !is_nowhere).then_some(asked)
    }

    pub fn is_host(&self) -> bool {
        self.ip == host_address()
    }

    fn fits(&self, rule: &EgressRule) -> bool {
        rule.ports.contain(self.port) && rule.transport.contain(self.transport)
    }

    /// Whether a rule means this destination, by what was learned of names.
    fn is_meant(&self, rule: &EgressRule, learned: &Learned) -> bool {
        self.fits(rule)
            && match &rule.target {
                Target::Host => self.is_host(),
                _ if self.is_host() => false,
                Target::Network(_) => rule.target.has_written_out(self.ip),
                Target::Any => rule.farthest.includes(self.kind),
                Target::Name(_) | Target::Below(_) => {
                    rule.farthest.includes(self.kind) && learned.knows(self.ip, &rule.target)
                }
            }
    }

    /// Whether a rule of `deny` means it: a network means all of its addresses, of any kind, also
    /// where an IPv6 address stands for one of them.
    fn is_denied_by(&self, rule: &EgressRule) -> bool {
        self.fits(rule)
            && match &rule.target {
                Target::Network(network) => {
                    network.contains(&self.ip) || stand_ins(self.ip).any(|ip| network.contains(&ip))
                }
                Target::Any => true,
                Target::Host => self.is_host(),
                Target::Name(_) | Target::Below(_) => false,
            }
    }
}

impl EgressRules {
    /// Rules that deny nothing.
    pub fn allowing(allow: Vec<EgressRule>) -> Self {
        Self { allow, ..Self::default() }
    }

    /// Whether nothing is allowed.
    pub fn is_closed(&self) -> bool {
        self.permitting().next().is_none()
    }

    /// How many rules there are.
    pub fn len(&self) -> usize {
        self.permitting().count() + self.deny.len()
    }

    /// Whether there is no rule.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// All rules but those that deny.
    fn permitting(&self) -> impl Iterator<Item = &EgressRule> {
        self.allow.iter().chain(&self.reconnect).chain(&self.exempt)
    }

    /// Whether a name may be looked up.
    pub(super) fn allows_name(&self, name: &str) -> bool {
        self.permitting().any(|rule| rule.target.names(name))
    }

    /// Whether some port of the host's loopback may be reached.
    pub(super) fn allows_host(&self) -> bool {
        self.permitting().any(|rule| rule.target == Target::Host)
    }

    /// Whether a rule is about this name, and not about all names.
    pub(super) fn means_name(&self, name: &str) -> bool {
        self.permitting().any(|rule| rule.target != Target::Any && rule.target.names(name))
    }

    /// Whether this is the name of a rule.
    pub(super) fn has_name(&self, name: &str) -> bool {
        self.permitting().any(|rule| matches!(&rule.target, Target::Name(own) if own == name))
    }

    /// Whether a rule that means a name leads to an address.
    pub(super) fn leads_to(&self, name: &str, ip: IpAddr) -> bool {
        let kind = reach(ip);
        self.permitting().any(|rule| rule.target.names(name) && rule.farthest.includes(kind))
    }

    /// Judges a destination by what is known of names.
    pub(super) fn judge(&self, asked: Asked, learned: &Learned) -> Opinion {
        let is_denied = self.deny.iter().any(|rule| asked.is_denied_by(rule));
        let open: &[&[EgressRule]] = match is_denied {
            true => &[&self.exempt],
            false => &[&self.allow, &self.exempt, &self.reconnect],
        };
        let open = || open.iter().copied().flatten();
        let allowing = || open().filter(|rule| asked.is_meant(rule, learned));
        if let Some(on_host) = allowing().map(|rule| on_host(rule, asked.ip)).max() {
            // Where several allow it, those that reconnect count.
            let meant = |rule: &EgressRule| asked.is_meant(rule, learned);
            let reconnects = !is_denied && self.reconnect.iter().any(meant);
            return Opinion::Allowed { on_host, reconnects };
        }
        if asked.is_host() {
            return Opinion::Denied;
        }
        let names: Vec<String> = open()
            .filter(|rule| asked.fits(rule) && rule.farthest.includes(asked.kind))
            .filter_map(|rule| match &rule.target {
                Target::Name(name) if !learned.was_looked_up(name) => Some(name.clone()),
                _ => None,
            })
            .take(NAMES_MAX)
            .collect();
        if names.is_empty() { Opinion::Denied } else { Opinion::IfNamed(names) }
    }
}

impl EgressRule {
    /// A rule that can deny.
    ///
    /// # Errors
    /// The text is no rule, or names a name: servers of other names may have its addresses.
    pub fn denying(text: &str) -> Result<Self, EgressRuleError> {
        let rule: Self = text.parse()?;
        match rule.target {
            Target::Name(_) | Target::Below(_) => Err(EgressRuleError::name_denied(text)),
            Target::Any | Target::Network(_) | Target::Host => Ok(rule),
        }
    }
}

/// How much of the host a rule means that allows an address which may be the host's.
pub(super) fn on_host(rule: &EgressRule, ip: IpAddr) -> OnHost {
    let is_meant = rule.target == Target::Host || rule.target.is_address(ip);
    match (is_meant, rule.ports.is_one()) {
        (false, _) => OnHost::Nothing,
        (true, false) => OnHost::Servers,
        (true, true) => OnHost::WrittenOut,
    }
}

/// Addresses that a sandbox has been told for names. Whatever the rules are by then, they say
/// whether a name leads to its addresses.
#[derive(Debug, Default)]
pub(crate) struct Learned {
    names: BTreeMap<IpAddr, Vec<Arc<str>>>,
    /// The oldest first.
    order: VecDeque<(IpAddr, Arc<str>)>,
    bytes: usize,
    /// Names of rules that were looked up, whatever came of it.
    looked_up: Vec<String>,
}

impl Learned {
    fn knows(&self, ip: IpAddr, target: &Target) -> bool {
        self.names.get(&ip).is_some_and(|names| names.iter().any(|name| target.names(name)))
    }

    /// A name that this is an address of.
    pub fn name_of(&self, ip: IpAddr) -> Option<&str> {
        self.names.get(&ip.to_canonical())?.last().map(|name| &**name)
    }

    fn was_looked_up(&self, name: &str) -> bool {
        self.looked_up.iter().any(|known| known == name)
    }

    /// Notes that a name of a rule was looked up.
    pub(super) fn note_looked_up(&mut self, name: &str) {
        if !self.was_looked_up(name) && self.looked_up.len() < LOOKED_UP_MAX {
            self.looked_up.push(name.to_owned());
        }
    }

    /// Names may be looked up again: the rules are others.
    pub(super) fn forget_looked_up(&mut self) {
        self.looked_up.clear();
    }

    pub(super) fn add(&mut self, ip: IpAddr, name: &Arc<str>) {
        let known = self.names.entry(ip).or_default();
        if known.contains(name) {
            return;
        }
        known.push(name.clone());
        let surplus = (known.len() > NAMES_OF_ADDRESS_MAX).then(|| known[0].clone());
        self.order.push_back((ip, name.clone()));
        self.bytes += name.len();
        if let Some(oldest) = surplus {
            let place = self.order.iter().position(|pair| *pair == (ip, oldest.clone()));
            place.into_iter().for_each(|place| self.forget(place));
        }
        while self.order.len() > LEARNED_MAX || self.bytes > LEARNED_BYTES_MAX {
            self.forget(0);
        }
    }

    /// Forgets one pair, by its place in the order.
    fn forget(&mut self, place: usize) {
        let Some((ip, name)) = self.order.remove(place) else { return };
        self.bytes -= name.len();
        if let Some(names) = self.names.get_mut(&ip) {
            names.retain(|known| *known != name);
            if names.is_empty() {
                self.names.remove(&ip);
            }
        }
    }

    #[cfg(test)]
    pub fn len(&self) -> (usize, usize) {
        (self.names.len(), self.order.len())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rules(texts: &[&str]) -> Vec<EgressRule> {
        texts.iter().map(|text| text.parse().unwrap()).collect()
    }

    fn allows(rules: &EgressRules, to: &str) -> bool {
        let asked = Asked::new(to.parse().unwrap(), Transport::Tcp);
        asked.is_some_and(|asked| {
            matches!(rules.judge(asked, &Learned::default()), Opinion::Allowed { .. })
        })
    }

    #[test]
    fn what_is_denied_is_allowed_by_an_exemption_only() {
        let rules = EgressRules {
            allow: rules(&["*", "10.0.0.0/8:*"]),
            deny: rules(&["192.0.2.0/24:*", "10.1.0.0/16:*", "198.51.100.1:80"]),
            exempt: rules(&["192.0.2.7:443"]),
            ..EgressRules::default()
        };
        for to in ["192.0.3.1:1", "10.2.0.1:80", "192.0.2.7:443", "198.51.100.1:443"] {
            assert!(allows(&rules, to), "{to}");
        }
        for to in ["192.0.2.1:443", "192.0.2.7:80", "10.1.2.3:80", "198.51.100.1:80"] {
            assert!(!allows(&rules, to), "{to}");
        }
    }

    #[test]
    fn a_network_denies_addresses_of_every_kind_in_it() {
        let rules = EgressRules {
            allow: rules(&["*", "private:*", "169.254.169.254:80", "host.thaw.internal:80"]),
            deny: rules(&["0.0.0.0/0:*"]),
            ..EgressRules::default()
        };
        for to in ["192.0.2.1:80", "10.0.0.1:80", "169.254.169.254:80", "10.0.2.2:80"] {
            assert!(!allows(&rules, to), "{to}");
        }
        assert!(allows(&rules, "[2001:db8::1]:80"));
    }

    #[test]
    fn a_denied_network_is_not_reached_by_addresses_that_stand_for_its_own() {
        let rules = EgressRules {
            allow: rules(&["*", "private:*"]),
            deny: rules(&["203.0.113.0/24:*", "10.0.0.0/8:*"]),
            ..EgressRules::default()
        };
        // By a translator, 6to4, and ISATAP; as IPv4 in IPv6 clothes.
        for to in
            ["64:ff9b::cb00:7101", "2002:cb00:7101::1", "2001:db8::5efe:a00:1", "::ffff:10.0.0.1"]
        {
            assert!(!allows(&rules, &format!("[{to}]:443")), "{to}");
        }
        assert!(allows(&rules, "[64:ff9b::cb00:7201]:443"));
    }

    #[test]
    fn an_address_has_so_many_names_and_the_oldest_go() {
        let mut learned = Learned::default();
        let (ip, other) = ("192.0.2.1".parse().unwrap(), "192.0.2.2".parse().unwrap());
        for number in 0..100 {
            let name = format!("n{number}.example").into();
            learned.add(ip, &name);
            learned.add(other, &name);
        }
        assert_eq!(learned.len(), (2, 2 * NAMES_OF_ADDRESS_MAX));
        assert!(learned.knows(ip, &Target::Name("n99.example".to_owned())));
        assert!(!learned.knows(ip, &Target::Name("n0.example".to_owned())));
        assert_eq!(learned.bytes, 2 * NAMES_OF_ADDRESS_MAX * "n99.example".len());
    }

    #[test]
    fn nobody_is_asked_for_names_of_an_address_that_is_denied() {
        let mut list = EgressRules {
            allow: rules(&["api.example.com:443"]),
            deny: rules(&["192.0.2.0/24:*"]),
            ..EgressRules::default()
        };
        let judge = |list: &EgressRules, to: &str| {
            list.judge(
                Asked::new(to.parse().unwrap(), Transport::Tcp).unwrap(),
                &Learned::default(),
            )
        };
        assert_eq!(judge(&list, "192.0.2.1:443"), Opinion::Denied);
        assert!(matches!(judge(&list, "192.0.3.1:443"), Opinion::IfNamed(_)));
        list.exempt = rules(&["other.example.com:443"]);
        let names = Opinion::IfNamed(vec!["other.example.com".to_owned()]);
        assert_eq!(judge(&list, "192.0.2.1:443"), names);
    }

    #[test]
    fn a_name_cannot_be_denied() {
        for text in ["10.0.0.0/8:*", "*", "*:25", "192.0.2.1:53/udp"] {
            assert_eq!(EgressRule::denying(text).unwrap().to_string(), text);
        }
        for text in ["api.example.com:443", "*.example.com:*"] {
            let error = EgressRule::denying(text).unwrap_err().to_string();
            assert!(error.contains("can be denied"), "{error}");
        }
        assert!(EgressRule::denying("10.0.0.0/8").is_err());
    }

    #[test]
    fn what_is_learned_is_bounded_in_number_and_bytes() {
        let mut learned = Learned::default();
        for number in 0..10_000_u32 {
            let name: Arc<str> = format!("{number:0>200}.example.com").into();
            learned.add(IpAddr::V4((0x0b00_0000 + number).into()), &name);
        }
        assert!(learned.bytes <= LEARNED_BYTES_MAX && learned.len().1 < LEARNED_MAX);
        assert_eq!(learned.len().0, learned.len().1);
        // Many names of one address count, too.
        let mut learned = Learned::default();
        for number in 0..10_000_u32 {
            let name: Arc<str> = format!("{number}.example.com").into();
            learned.add(IpAddr::V4(0x0b00_0000.into()), &name);
        }
        assert_eq!(learned.len(), (1, NAMES_OF_ADDRESS_MAX));
        assert_eq!(learned.name_of(IpAddr::V4(0x0b00_0000.into())), Some("9999.example.com"));
    }
}
