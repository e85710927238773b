//! Where to listen, as people write it.

use serde::de::{Deserialize, Deserializer, Error};
use std::net::{IpAddr, Ipv4Addr, SocketAddr};

/// An address with its port, or a port alone, which is one of this host's loopback.
///
/// # Errors
/// It is neither: what to write.
pub fn parse_address(text: &str) -> Result<SocketAddr, String> {
    if let Ok(port) = text.parse::<u16>() {
        return Ok(SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), port));
    }
    text.parse().map_err(|_| {
        "give an IP address and a port, as in 0.0.0.0:8200 or [::1]:8200, or a port alone, which clients of \
         this host reach at 127.0.0.1"
            .to_owned()
    })
}

pub(super) fn address_if_any<'de, D: Deserializer<'de>>(
    deserializer: D,
) -> Result<Option<SocketAddr>, D::Error> {
    let text = String::deserialize(deserializer)?;
    parse_address(&text).map(Some).map_err(D::Error::custom)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_port_alone_is_one_of_the_loopback() {
        let read = |text| parse_address(text).map(|address| address.to_string());
        for (text, expected) in [
            ("8200", "127.0.0.1:8200"),
            ("0", "127.0.0.1:0"),
            ("0.0.0.0:80", "0.0.0.0:80"),
            ("[::1]:8200", "[::1]:8200"),
        ] {
            assert_eq!(read(text).as_deref(), Ok(expected));
        }
        for text in ["", ":8200", "70000", "localhost:8200", "127.0.0.1", "-1"] {
            assert!(read(text).unwrap_err().starts_with("give an IP address"), "{text}");
        }
    }
}
