//! Look-ups by the host's resolver, on threads of their own: the process that asks it
//! ([`resolver`]) may take a while.

use std::collections::VecDeque;
use std::net::IpAddr;
use std::sync::{LazyLock, Mutex, PoisonError};
use std::time::{Duration, Instant};

use super::super::budget::Budget;
use super::super::pool::{Bounds, Overloaded, Pool};
use super::message::Outcome;
use crate::resolver::{self, Found, LookUpError};

/// Look-ups, and whatever else of a function may wait for others: names whose servers are slow
/// hold up nobody but the function that asks for them.
static POOL: LazyLock<Pool> = LazyLock::new(|| {
    Pool::new(Bounds {
        name: "thaw-lookup",
        threads: 128,
        of_function: 4,
        shared: 32,
        waiting: 1024,
        waiting_of_function: 64,
    })
});

/// How long an answer is used again: programs ask for either type of address.
const FRESH: Duration = Duration::from_secs(5);
/// Most answers that are kept.
const KEPT_MAX: usize = 256;

/// An answer to one function. Others do not learn from how fast theirs comes what
/// it has asked for.
struct Kept {
    when: Instant,
    function: u64,
    name: String,
    outcome: Outcome,
}

/// The newest last.
static KEPT: Mutex<VecDeque<Kept>> = Mutex::new(VecDeque::new());

/// Runs `job` of the function with this number on a thread that may wait.
///
/// # Errors
/// The function, or all of them, have too much that waits.
pub fn submit(function: u64, job: impl FnOnce() + Send + 'static) -> Result<(), Overloaded> {
    POOL.submit(function, job)
}

/// Asks the host's resolver for the addresses of a name, or one's own memory if
/// that was just done for the same function. May block. A function that asks too fast is told
/// that it has failed.
///
/// # Errors
/// The resolver process cannot be asked. That is not kept in memory.
pub fn addresses_of(budget: &Budget, name: &str) -> Result<Outcome, LookUpError> {
    let function = budget.id;
    let lock = || KEPT.lock().unwrap_or_else(PoisonError::into_inner);
    {
        let mut all = lock();
        all.retain(|kept| kept.when.elapsed() < FRESH);
        let mut all = all.iter();
        if let Some(kept) = all.find(|kept| kept.function == function && kept.name == name) {
            return Ok(kept.outcome.clone());
        }
    }
    if !budget.take_look_up(Instant::now()) {
        return Ok(Outcome::Failed);
    }
    let outcome = judge(resolver::look_up(name)?);
    let mut all = lock();
    if all.len() == KEPT_MAX {
        all.pop_front();
    }
    let (when, name) = (Instant::now(), name.to_owned());
    all.push_back(Kept { when, function, name, outcome: outcome.clone() });
    Ok(outcome)
}

/// What the resolver process's answer means to a sandbox.
fn judge(found: Found) -> Outcome {
    match found {
        Found::Addresses(found) => {
            let mut addresses: Vec<IpAddr> = Vec::new();
            for ip in found {
                // What means the host to the host would mean the sandbox to the sandbox.
                if !ip.is_loopback() && !ip.is_unspecified() && !addresses.contains(&ip) {
                    addresses.push(ip);
                }
            }
            Outcome::Addresses(addresses)
        }
        Found::NoSuchName => Outcome::NoSuchName,
        Found::Failed => Outcome::Failed,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Nor does a worker get it past this that was taken over.
    #[test]
    fn the_hosts_loopback_is_no_answer() {
        let found =
            |all: &[&str]| Found::Addresses(all.iter().map(|ip| ip.parse().unwrap()).collect());
        let none = found(&["127.0.0.1", "127.8.9.1", "::1", "0.0.0.0", "::"]);
        assert_eq!(judge(none), Outcome::Addresses(vec![]));
        let address = "192.0.2.1".parse().unwrap();
        let twice = found(&["192.0.2.1", "127.0.0.1", "192.0.2.1"]);
        assert_eq!(judge(twice), Outcome::Addresses(vec![address]));
    }
}
