//! Egress rules as people write them.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::str::FromStr;

use ipnet::IpNet;
use thaw_abi::network::HOST_NAME;

use super::reach::{Reach, reach};

/// A set of destinations: `TARGET:PORTS`, with `/udp` behind it for UDP and
/// `private:` before it if a name may lead to private addresses too.
///
/// | target | destinations |
/// | --- | --- |
/// | `1.2.3.4`, `[2001:db8::1]` | the address |
/// | `10.0.0.0/8`, `[2001:db8::/32]` | the network |
/// | `api.example.com` | the public addresses of the name |
/// | `*.example.com` | those of all names below it, at any depth |
/// | `private:db.example.com` | the public and the private addresses of the name |
/// | `host.thaw.internal` | the host's loopback |
/// | `*` | all public addresses |
/// | `private:*` | all public and private addresses |
///
/// Ports are one port, a range such as `8000-8099`, or `*`. A rule that is only
/// `*` or `private:*` allows all ports of both protocols.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct EgressRule {
    pub(super) target: Target,
    pub(super) farthest: Farthest,
    pub(super) ports: Ports,
    pub(super) transport: Transports,
}

/// How far a name, or `*`, may lead. An address or a network that is written out
/// says that itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Farthest {
    /// To public addresses.
    Public,
    /// To private ones, too.
    Private,
}

impl Farthest {
    /// Whether such a rule leads to addresses of this kind.
    pub fn includes(self, kind: Reach) -> bool {
        match self {
            Self::Public => kind <= Reach::Public,
            Self::Private => kind <= Reach::Private,
        }
    }
}

impl EgressRule {
    /// The one name and the one TCP port that it means; `None` if it means more, or others.
    pub fn name_and_port(&self) -> Option<(&str, u16)> {
        let name = match &self.target {
            Target::Name(name) => name,
            Target::Host => HOST_NAME,
            _ => return None,
        };
        let is_tcp = self.transport == Transports::One(Transport::Tcp);
        (self.ports.is_one() && is_tcp).then_some((name, self.ports.first))
    }
}

/// What comes before a target that may be private.
const PRIVATE: &str = "private";

/// Where to.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) enum Target {
    /// Any address outside that a name may lead to.
    Any,
    /// Addresses.
    Network(IpNet),
    /// A name, in lower case.
    Name(String),
    /// The names below this one, in lower case.
    Below(String),
    /// The host's loopback.
    Host,
}

/// Ports from `first` to `last`, both included.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Ports {
    first: u16,
    last: u16,
}

impl Ports {
    const ALL: Self = Self { first: 1, last: u16::MAX };

    pub fn contain(self, port: u16) -> bool {
        (self.first..=self.last).contains(&port)
    }

    /// Whether it is one port, which somebody has thought of.
    pub fn is_one(self) -> bool {
        self.first == self.last
    }
}

/// A transport protocol.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Transport {
    /// TCP.
    Tcp,
    /// UDP.
    Udp,
}

/// Which transport protocols.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Transports {
    One(Transport),
    Both,
}

impl Transports {
    pub fn contain(self, transport: Transport) -> bool {
        match self {
            Self::One(one) => one == transport,
            Self::Both => true,
        }
    }
}

/// The text is not an egress rule.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("`{text}` is not a destination: {problem}")]
pub struct EgressRuleError {
    text: String,
    problem: Problem,
}

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
enum Problem {
    #[error(
        "write an address, a network such as 10.0.0.0/8, a name or *.domain, then a colon and a port"
    )]
    Form,
    #[error("a port is a number from 1 to 65535, a range such as 8000-8099, or *")]
    Port,
    #[error("an IPv6 address needs brackets, as in [2001:db8::1]:443")]
    Brackets,
    #[error(
        "a loopback address means the sandbox itself; for servers on this host write {HOST_NAME}"
    )]
    Loopback,
    #[error("nothing can be reached there")]
    Nowhere,
    #[error(
        "`private:` stands before a name or *; an address or a network that is written out needs \
         none, and {HOST_NAME} has none"
    )]
    NeedlesslyPrivate,
    #[error(
        "an address, a network or * can be denied; other names may have the addresses of a name, \
         so leave out the rule that allows it"
    )]
    NameDenied,
    #[error("`private` is no host but stands before a target, as in private:db.internal:5432")]
    OnlyPrivate,
}

impl EgressRuleError {
    /// A rule that is to deny names a name.
    pub(super) fn name_denied(text: &str) -> Self {
        Self { text: text.to_owned(), problem: Problem::NameDenied }
    }
}

impl FromStr for EgressRule {
    type Err = EgressRuleError;

    fn from_str(text: &str) -> Result<Self, EgressRuleError> {
        parse(text).map_err(|problem| EgressRuleError { text: text.to_owned(), problem })
    }
}

fn parse(text: &str) -> Result<EgressRule, Problem> {
    if let Some(rest) = text.strip_prefix(PRIVATE).and_then(|rest| rest.strip_prefix(':'))
        && (rest == "*" || rest.contains(':'))
    {
        let rule = parse(rest)?;
        return match rule {
            EgressRule { farthest: Farthest::Private, .. } => Err(Problem::Form),
            EgressRule { target: Target::Host | Target::Network(_), .. } => {
                Err(Problem::NeedlesslyPrivate)
            }
            rule => Ok(EgressRule { farthest: Farthest::Private, ..rule }),
        };
    }
    if text == "*" {
        return Ok(EgressRule {
            target: Target::Any,
            farthest: Farthest::Public,
            ports: Ports::ALL,
            transport: Transports::Both,
        });
    }
    let (rest, transport) = match (text.strip_suffix("/udp"), text.strip_suffix("/tcp")) {
        (Some(rest), _) => (rest, Transport::Udp),
        (None, Some(rest)) => (rest, Transport::Tcp),
        (None, None) => (text, Transport::Tcp),
    };
    if rest.parse::<Ipv6Addr>().is_ok() {
        return Err(Problem::Brackets);
    }
    let (target, ports) = rest.rsplit_once(':').ok_or(Problem::Form)?;
    let (target, ports) = (parse_target(target)?, parse_ports(ports)?);
    let transport = Transports::One(transport);
    Ok(EgressRule { target, farthest: Farthest::Public, ports, transport })
}

fn parse_ports(text: &str) -> Result<Ports, Problem> {
    if text == "*" {
        return Ok(Ports::ALL);
    }
    let number = |text: &str| match text.parse::<u16>() {
        Ok(port) if port > 0 && text.bytes().all(|byte| byte.is_ascii_digit()) => Ok(port),
        _ => Err(Problem::Port),
    };
    let (first, last) = text.split_once('-').unwrap_or((text, text));
    let ports = Ports { first: number(first)?, last: number(last)? };
    if ports.first <= ports.last { Ok(ports) } else { Err(Problem::Port) }
}

fn parse_target(text: &str) -> Result<Target, Problem> {
    if text == "*" {
        return Ok(Target::Any);
    }
    let bracketed = text.strip_prefix('[').and_then(|rest| rest.strip_suffix(']'));
    let network = match bracketed {
        Some(inner) => {
            let network = parse_network(inner).filter(|_| inner.contains(':'));
            Some(network.ok_or(Problem::Form)?)
        }
        None => parse_network(text),
    };
    if let Some(network) = network {
        return match network.addr() {
            ip if ip.is_ipv6() && bracketed.is_none() => Err(Problem::Brackets),
            ip if ip.is_loopback() => Err(Problem::Loopback),
            ip if is_single(&network) && reach(ip) == Reach::Nowhere => Err(Problem::Nowhere),
            _ => Ok(Target::Network(network.trunc())),
        };
    }
    let name = text.to_ascii_lowercase();
    if name == HOST_NAME {
        return Ok(Target::Host);
    }
    match name.strip_prefix("*.") {
        Some(domain) if is_name(domain) => Ok(Target::Below(domain.to_owned())),
        None if name == "localhost" => Err(Problem::Loopback),
        None if name == PRIVATE => Err(Problem::OnlyPrivate),
        // All digits and dots: a mistyped address, never a name.
        None if is_name(&name) && !looks_like_address(&name) => Ok(Target::Name(name)),
        _ => Err(Problem::Form),
    }
}

fn looks_like_address(name: &str) -> bool {
    name.rsplit('.').next().is_some_and(|last| last.bytes().all(|byte| byte.is_ascii_digit()))
}

fn parse_network(text: &str) -> Option<IpNet> {
    let network = match text.parse::<IpAddr>() {
        Ok(ip) => IpNet::from(ip),
        Err(_) => text.parse::<IpNet>().ok()?,
    };
    // An IPv4 address in IPv6 clothes is the IPv4 address.
    match network.addr().to_canonical() {
        IpAddr::V4(ip) if network.addr().is_ipv6() => {
            let prefix = network.prefix_len().checked_sub(96)?;
            ipnet::Ipv4Net::new(ip, prefix).ok().map(IpNet::V4)
        }
        _ => Some(network),
    }
}

/// Whether this is a host name in lower case (RFC 1123, and underscores, which
/// are in use).
fn is_name(name: &str) -> bool {
    !name.is_empty()
        && name.len() <= 253
        && name.split('.').all(|label| {
            (1..=63).contains(&label.len())
                && label.bytes().all(|byte| {
                    byte.is_ascii_lowercase()
                        || byte.is_ascii_digit()
                        || matches!(byte, b'-' | b'_')
                })
        })
}

/// Whether it is one address.
pub(super) fn is_single(network: &IpNet) -> bool {
    network.prefix_len() == network.max_prefix_len()
}

impl Target {
    /// Whether an address is in the network of the rule, and the rule means such
    /// addresses: a network that is all private means its private addresses, and so
    /// with link-local ones; one that only includes some among others, such as
    /// 0.0.0.0/0, means its public ones. A metadata service is meant by its own
    /// address only.
    pub fn has_written_out(&self, ip: IpAddr) -> bool {
        let Self::Network(network) = self else { return false };
        network.contains(&ip)
            && match reach(ip) {
                Reach::Public => true,
                kind @ (Reach::Private | Reach::LinkLocal) => {
                    reach(network.network()) == kind && reach(network.broadcast()) == kind
                }
                Reach::Metadata => is_single(network),
                Reach::Nowhere => false,
            }
    }

    /// Whether it is this one address.
    pub fn is_address(&self, ip: IpAddr) -> bool {
        matches!(self, Self::Network(network) if is_single(network) && network.addr() == ip)
    }

    /// Whether `name`, in lower case and without a final dot, is meant.
    pub fn names(&self, name: &str) -> bool {
        match self {
            Self::Any => true,
            Self::Name(own) => own == name,
            Self::Below(domain) => {
                name.strip_suffix(domain.as_str()).is_some_and(|rest| rest.ends_with('.'))
            }
            Self::Host | Self::Network(_) => false,
        }
    }
}

impl fmt::Display for EgressRule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.farthest == Farthest::Private {
            write!(f, "{PRIVATE}:")?;
        }
        if self.target == Target::Any && self.transport == Transports::Both {
            return f.write_str("*");
        }
        match &self.target {
            Target::Any => f.write_str("*")?,
            Target::Network(network) => {
                let text = if is_single(network) {
                    network.addr().to_string()
                } else {
                    network.to_string()
                };
                if network.addr().is_ipv6() {
                    write!(f, "[{text}]")?;
                } else {
                    f.write_str(&text)?;
                }
            }
            Target::Name(name) => f.write_str(name)?,
            Target::Below(domain) => write!(f, "*.{domain}")?,
            Target::Host => f.write_str(HOST_NAME)?,
        }
        match self.ports {
            Ports::ALL => f.write_str(":*")?,
            Ports { first, last } if first == last => write!(f, ":{first}")?,
            Ports { first, last } => write!(f, ":{first}-{last}")?,
        }
        match self.transport {
            Transports::One(Transport::Udp) => f.write_str("/udp"),
            _ => Ok(()),
        }
    }
}

/// The address that stands for the host's loopback.
pub(super) fn host_address() -> IpAddr {
    IpAddr::V4(Ipv4Addr::from(thaw_abi::network::HOST_ADDRESS))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rules_parse_and_print() {
        for text in [
            "api.example.com:443",
            "*.example.com:443",
            "10.0.0.1:*",
            "10.0.0.0/8:443",
            "1.2.3.4:53/udp",
            "[2001:db8::1]:80",
            "[2001:db8::/32]:8000-8099",
            "host.thaw.internal:5432",
            "*:443",
            "*:*/udp",
            "*",
            "private:*",
            "private:*:443",
            "private:db.example.com:5432",
            "private:*.example.com:53/udp",
        ] {
            assert_eq!(text.parse::<EgressRule>().unwrap().to_string(), text);
        }
        let same = [
            ("API.Example.com:443/tcp", "api.example.com:443"),
            ("10.1.2.3/8:1", "10.0.0.0/8:1"),
            ("[::ffff:10.0.0.0/104]:1", "10.0.0.0/8:1"),
        ];
        for (text, printed) in same {
            assert_eq!(text.parse::<EgressRule>().unwrap().to_string(), printed);
        }
    }

    #[test]
    fn what_is_no_rule_says_why() {
        let problem = |text: &str| text.parse::<EgressRule>().unwrap_err().problem;
        for text in ["", "host", ":80", "a..b:1", "[x]:1", "a b:1", "1.2.3:1", "10.0.0.0/33:1"] {
            assert_eq!(problem(text), Problem::Form, "{text}");
        }
        for text in ["host:0", "host:65536", "host:", "host:9-8", "host:+5", "host:1-"] {
            assert_eq!(problem(text), Problem::Port, "{text}");
        }
        for text in ["private:10.0.0.1:1", "private:[::ffff:10.0.0.0/104]:1"] {
            assert_eq!(problem(text), Problem::NeedlesslyPrivate, "{text}");
        }
        assert_eq!(problem("private:host.thaw.internal:1"), Problem::NeedlesslyPrivate);
        for text in ["private:443", "Private:*", "private:private:443"] {
            assert_eq!(problem(text), Problem::OnlyPrivate, "{text}");
        }
        for text in ["private:", "private", "private:private:*", "private:private:a:1"] {
            assert!(text.parse::<EgressRule>().is_err(), "{text}");
        }
        assert_eq!(problem("2001:db8::1"), Problem::Brackets);
        assert_eq!(problem("2001:db8::/32:80"), Problem::Brackets);
        for text in ["127.0.0.1:80", "127.0.0.0/8:80", "[::1]:80", "localhost:80"] {
            assert_eq!(problem(text), Problem::Loopback, "{text}");
        }
        for text in ["0.0.0.0:80", "224.0.0.1:80", "10.0.2.3:53", "[ff02::1]:5353/udp"] {
            assert_eq!(problem(text), Problem::Nowhere, "{text}");
        }
    }

    #[test]
    fn a_network_means_what_it_consists_of() {
        let written = |rule: &str, ip: &str| {
            let rule: EgressRule = rule.parse().unwrap();
            rule.target.has_written_out(ip.parse().unwrap())
        };
        assert!(written("10.0.0.0/8:1", "10.1.2.3"));
        assert!(written("[fc00::/7]:1", "fd00::1"));
        assert!(written("169.254.0.0/16:1", "169.254.1.1"));
        assert!(written("100.64.0.0/10:1", "100.64.1.1"));
        for rule in ["0.0.0.0/0:1", "8.0.0.0/5:1", "10.0.0.0/7:1", "0.0.0.0/1:1"] {
            assert!(!written(rule, "10.1.2.3"), "{rule}");
        }
        assert!(!written("192.0.0.0/2:1", "192.168.1.1"));
        assert!(!written("[::/0]:1", "fd00::1"));
        assert!(!written("[64:ff9b::/96]:1", "64:ff9b::10.0.0.1"));
        assert!(written("[64:ff9b::/96]:1", "64:ff9b::8.8.8.8"));
        // Metadata services are meant by their addresses only.
        for (network, ip) in [
            ("169.254.0.0/16:1", "169.254.169.254"),
            ("100.64.0.0/10:1", "100.100.100.200"),
            ("168.63.0.0/16:1", "168.63.129.16"),
            ("[fd00::/8]:1", "fd00:ec2::254"),
        ] {
            assert!(!written(network, ip), "{network}");
        }
        assert!(written("168.63.129.16:1", "168.63.129.16"));
        assert!(written("[fd00:ec2::254]:1", "fd00:ec2::254"));
    }

    #[test]
    fn a_wildcard_means_what_is_below() {
        let rule: EgressRule = "*.example.com:443".parse().unwrap();
        assert!(rule.target.names("api.example.com"));
        assert!(rule.target.names("a.b.example.com"));
        assert!(!rule.target.names("example.com"));
        assert!(!rule.target.names("badexample.com"));
        assert!(!rule.target.names("example.com.evil.org"));
    }
}
