//! Clients that are the admin API itself: who calls a function through it has shown that he
//! may, and is told what went wrong.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

/// Addresses of connections that this daemon has made itself.
#[derive(Debug, Default)]
pub struct Operators(Arc<Known>);

#[derive(Debug, Default)]
struct Known {
    addresses: Mutex<HashMap<SocketAddr, usize>>,
    /// How many they are: mostly none.
    count: AtomicUsize,
}

/// As long as this is kept, a client at its address is the operator's. Nobody else can have
/// the address while the connection is open.
#[derive(Debug)]
pub struct Trust {
    known: Arc<Known>,
    address: SocketAddr,
}

impl Operators {
    /// Trusts the client at the local end of a connection of this process.
    pub fn trust(&self, address: SocketAddr) -> Trust {
        let mut addresses = self.0.addresses.lock().expect("no holder panics");
        *addresses.entry(address).or_default() += 1;
        self.0.count.fetch_add(1, Ordering::Release);
        Trust { known: self.0.clone(), address }
    }

    /// Whether a client is trusted.
    pub fn has(&self, address: SocketAddr) -> bool {
        self.0.count.load(Ordering::Acquire) > 0
            && self.0.addresses.lock().expect("no holder panics").contains_key(&address)
    }
}

impl Drop for Trust {
    fn drop(&mut self) {
        let mut addresses = self.known.addresses.lock().expect("no holder panics");
        if let Some(count) = addresses.get_mut(&self.address) {
            *count -= 1;
            if *count == 0 {
                addresses.remove(&self.address);
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
        let [one, other]: [SocketAddr; 2] = [1, 2].map(|port| ([127, 0, 0, 1], port).into());
        let (first, second) = (operators.trust(one), operators.trust(one));
        assert!(operators.has(one) && !operators.has(other));
        drop(first);
        assert!(operators.has(one));
        drop(second);
        assert!(!operators.has(one));
        assert!(operators.0.addresses.lock().unwrap().is_empty());
    }
}
