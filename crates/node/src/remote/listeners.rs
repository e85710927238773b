//! The ports on which something in a sandbox listens, as its kernel lists them.

use super::files::{FileProblem, FileSession};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

/// The tables of sockets (proc_pid_net(5)). The process that looks at files from outside is in no
/// directory of `/proc`, so that those of the first process are read: all have the same network.
const TABLES: [&str; 2] = ["/proc/1/net/tcp", "/proc/1/net/tcp6"];
/// `TCP_LISTEN`.
const LISTEN: &str = "0A";
/// Most bytes of a table that are read: those of some thousand sockets.
const TABLE_MAX: u64 = 512 << 10;

/// A port on which something in a sandbox listens.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, JsonSchema,
)]
pub struct Listener {
    /// The port.
    pub port: u16,
    /// The address in the sandbox: 0.0.0.0 and :: are all of its addresses.
    pub address: IpAddr,
}

/// The ports on which something listens, sorted.
///
/// # Errors
/// See [`FileProblem`].
pub async fn listeners(session: &mut FileSession) -> Result<Vec<Listener>, FileProblem> {
    let mut found = Vec::new();
    for path in TABLES {
        session.read_up_to(path, TABLE_MAX).await?;
        let mut table = Vec::new();
        while let Some(piece) = session.next_piece(path).await? {
            if table.len() as u64 <= TABLE_MAX {
                table.extend_from_slice(&piece);
            }
        }
        found.extend(String::from_utf8_lossy(&table).lines().filter_map(listener));
    }
    found.sort_unstable();
    // Several sockets may share one (SO_REUSEPORT).
    found.dedup();
    Ok(found)
}

/// The listener of a line, if it is of one.
fn listener(line: &str) -> Option<Listener> {
    let mut fields = line.split_ascii_whitespace();
    let (_, local, _) = (fields.next()?, fields.next()?, fields.next()?);
    if fields.next()? != LISTEN {
        return None;
    }
    let (address, port) = local.split_once(':')?;
    let port = u16::from_str_radix(port, 16).ok()?;
    Some(Listener { port, address: self::address(address)? })
}

/// An address that is written as words, each of which is a number in the order of this machine.
fn address(text: &str) -> Option<IpAddr> {
    let word = |at: usize| u32::from_str_radix(text.get(at..at + 8)?, 16).ok();
    match text.len() {
        8 => Some(Ipv4Addr::from(word(0)?.to_ne_bytes()).into()),
        32 => {
            let mut bytes = [0; 16];
            for (number, four) in bytes.chunks_exact_mut(4).enumerate() {
                four.copy_from_slice(&word(number * 8)?.to_ne_bytes());
            }
            Some(Ipv6Addr::from(bytes).into())
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_of_sockets_that_listen_are_read() {
        let of = |local: &str, state: &str| {
            let line = format!("   0: {local} 00000000:0000 {state} 00000000:00000000 00:00000000");
            listener(&line).map(|found| (found.address.to_string(), found.port))
        };
        let at = |address: &str, port| Some((address.to_owned(), port));
        assert_eq!(of("0100007F:1B58", "0A"), at("127.0.0.1", 7000));
        assert_eq!(of("00000000:1F90", "0A"), at("0.0.0.0", 8080));
        assert_eq!(of("00000000000000000000000001000000:1B59", "0A"), at("::1", 7001));
        assert_eq!(of("0100007F:1B58", "01"), None, "it is connected");
        // What a sandbox may write.
        for local in ["", ":", "0100007F", "0100007F:12345", "0100007G:1", "ä00007F:1", "01:1"] {
            assert_eq!(of(local, "0A"), None, "{local}");
        }
        assert_eq!(listener("  sl  local_address rem_address   st tx_queue"), None);
    }
}
