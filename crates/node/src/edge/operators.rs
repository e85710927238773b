//! Clients that are the admin API itself: who calls a function through it has shown that he
//! may, and is told what went wrong.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

/// Both ends of a connection over TCP. No two connections have the same ones at a time, while a
/// client's address alone may be that of several, to several addresses.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Addresses {
    /// The client's.
    pub client: SocketAddr,
    /// The one that it has connected to.
    pub gateway: SocketAddr,
}

/// Connections that this daemon has made itself.
#[derive(Debug, Default)]
pub struct Operators(Arc<Known>);

#[derive(Debug, Default)]
struct Known {
    addresses: Mutex<HashMap<Addresses, usize>>,
    /// How many they are: mostly none.
    count: AtomicUsize,
}

/// As long as this is kept, the client of a connection is the operator. Keep it for no longer than
/// the connection is open: then nobody else can have its addresses.
#[derive(Debug)]
pub struct Trust {
    known: Arc<Known>,
    addresses: Addresses,
}

impl Operators {
    /// Trusts the client of a connection that this process has made.
    pub fn trust(&self, addresses: Addresses) -> Trust {
        let mut known = self.0.addresses.lock().expect("no holder panics");
        *known.entry(addresses).or_default() += 1;
        self.0.count.fetch_add(1, Ordering::Release);
        Trust { known: self.0.clone(), addresses }
    }

    /// Whether a client is trusted.
    pub fn has(&self, addresses: Addresses) -> bool {
        self.0.count.load(Ordering::Acquire) > 0
            && self.0.addresses.lock().expect("no holder panics").contains_key(&addresses)
    }
}

impl Drop for Trust {
    fn drop(&mut self) {
        let mut known = self.known.addresses.lock().expect("no holder panics");
        if let Some(count) = known.get_mut(&self.addresses) {
            *count -= 1;
            if *count == 0 {
                known.remove(&self.addresses);
            }
        }
        self.known.count.fetch_sub(1, Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn trust_ends_with_the_connection() {
        let operators = Operators::default();
        let at = |port: u16| SocketAddr::from(([127, 0, 0, 1], port));
        let one = Addresses { client: at(1), gateway: at(2) };
        // The same client may be somebody else at another address of the gateway.
        let other = Addresses { gateway: at(3), ..one };
        let (first, second) = (operators.trust(one), operators.trust(one));
        assert!(operators.has(one) && !operators.has(other));
        drop(first);
        assert!(operators.has(one));
        drop(second);
        assert!(!operators.has(one));
        assert!(operators.0.addresses.lock().unwrap().is_empty());
    }
}
