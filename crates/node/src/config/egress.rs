//! `[egress]`: destinations of outgoing connections.

use super::quantity::FromText;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use std::fmt;
use std::str::FromStr;

/// One destination that a function may connect to: `host:port`, `*.domain:port`,
/// an address, or `host:*`.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct EgressRule {
    /// Host name, `*.` and a domain, or an address.
    pub host: String,
    /// Port; none: any port.
    pub port: Option<u16>,
}

/// The text is not an egress rule.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("`{0}` is not a destination; write host:port, *.domain:port or host:*")]
pub struct EgressRuleError(String);

impl FromStr for EgressRule {
    type Err = EgressRuleError;

    fn from_str(text: &str) -> Result<Self, EgressRuleError> {
        let wrong = || EgressRuleError(text.to_owned());
        let (host, port) = text.rsplit_once(':').ok_or_else(wrong)?;
        let port = match port {
            "*" => None,
            number => match number.parse::<u16>() {
                Ok(port) if port > 0 => Some(port),
                _ => return Err(wrong()),
            },
        };
        let bracketed = host.strip_prefix('[').and_then(|rest| rest.strip_suffix(']'));
        let valid = match bracketed {
            Some(address) => address.parse::<std::net::Ipv6Addr>().is_ok(),
            None => is_host_pattern(host),
        };
        if valid { Ok(Self { host: host.to_ascii_lowercase(), port }) } else { Err(wrong()) }
    }
}

fn is_host_pattern(host: &str) -> bool {
    let labels = host.strip_prefix("*.").unwrap_or(host);
    !labels.is_empty()
        && labels.len() <= 253
        && labels.split('.').all(|label| {
            (1..=63).contains(&label.len())
                && label.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'-' || b == b'_')
        })
}

impl fmt::Display for EgressRule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.port {
            Some(port) => write!(f, "{}:{port}", self.host),
            None => write!(f, "{}:*", self.host),
        }
    }
}

impl<'de> Deserialize<'de> for EgressRule {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_str(FromText("a destination", std::marker::PhantomData))
    }
}

impl Serialize for EgressRule {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn destinations_parse_and_print() {
        for text in ["api.example.com:443", "*.example.com:443", "10.0.0.1:*", "[::1]:80"] {
            assert_eq!(text.parse::<EgressRule>().unwrap().to_string(), text);
        }
        for text in ["", "host", ":80", "a..b:1", "host:0", "host:65536", "[x]:1", "*:80", "a b:1"]
        {
            assert!(text.parse::<EgressRule>().is_err(), "{text}");
        }
    }
}
