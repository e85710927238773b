//! How many requests a function takes of a client: the generic cell rate algorithm (ITU-T
//! I.371), which keeps one time for each client and needs no clock of its own.

use serde::Deserialize;
use std::collections::HashMap;
use std::net::IpAddr;
use std::num::NonZeroU32;
use std::sync::Mutex;
use std::time::{Duration, Instant};
use thaw_home::config::{FunctionName, TimeSpan};

/// Most clients of the node that are told apart. Others share one count for each function.
const CLIENTS_MAX: usize = 65_536;
/// How often those are forgotten that have a full allowance again.
const SWEEP_EVERY: Duration = Duration::from_secs(1);
/// Longest time over which requests are counted.
const PER_MAX: Duration = Duration::from_secs(24 * 3600);

/// So many requests in each time, and so many at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Rate {
    requests: NonZeroU32,
    per: TimeSpan,
    /// Default: `requests`.
    burst: Option<NonZeroU32>,
    #[serde(default)]
    by: By,
}

/// Whose requests are counted together.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
enum By {
    /// Those of one IPv4 address, or one IPv6 network of 64 bits.
    #[default]
    Address,
    /// All of the function.
    Function,
}

impl Rate {
    /// # Errors
    /// One sentence.
    pub fn check(&self) -> Result<(), String> {
        match self.per.0.is_zero() || self.per.0 > PER_MAX {
            true => Err("`per` of a rate is more than nothing and at most 24h".to_owned()),
            false => Ok(()),
        }
    }

    /// Time that one request takes from the allowance.
    fn interval(&self) -> Duration {
        (self.per.0 / self.requests.get()).max(Duration::from_nanos(1))
    }

    /// How far the allowance may be overdrawn.
    fn tolerance(&self) -> Duration {
        self.interval().saturating_mul(self.burst.unwrap_or(self.requests).get() - 1)
    }
}

/// Whose requests are counted: a client's, all of the function, or those of clients for which
/// there was no room.
type Key = (FunctionName, Option<IpAddr>);

/// The counts of a node.
#[derive(Debug, Default)]
pub(super) struct Rates(Mutex<Table>);

#[derive(Debug, Default)]
struct Table {
    /// When each will have its whole allowance again.
    full_at: HashMap<Key, Instant>,
    swept: Option<Instant>,
}

impl Rates {
    /// Counts a request; how long its client has to wait if it has used up its allowance.
    pub fn count(
        &self,
        function: &FunctionName,
        rate: &Rate,
        client: IpAddr,
    ) -> Result<(), Duration> {
        self.count_at(function, rate, client, Instant::now(), CLIENTS_MAX)
    }

    fn count_at(
        &self,
        function: &FunctionName,
        rate: &Rate,
        client: IpAddr,
        now: Instant,
        most: usize,
    ) -> Result<(), Duration> {
        let address = (rate.by == By::Address).then(|| network(client));
        let mut table = self.0.lock().expect("no holder panics");
        let mut key = (function.clone(), address);
        if address.is_some() && !table.full_at.contains_key(&key) {
            table.make_room(now, most);
            if table.full_at.len() >= most {
                key.1 = None;
            }
        }
        let full_at = table.full_at.entry(key).or_insert(now);
        take_allowance(full_at, now, rate.interval(), rate.tolerance())
    }
}

/// Takes one request from an allowance that is whole again at `full_at`: each takes `interval` of
/// it, and it may be overdrawn by `tolerance`. How long to wait if nothing is left.
pub fn take_allowance(
    full_at: &mut Instant,
    now: Instant,
    interval: Duration,
    tolerance: Duration,
) -> Result<(), Duration> {
    let next = (*full_at).max(now) + interval;
    match next.duration_since(now).checked_sub(interval + tolerance) {
        None | Some(Duration::ZERO) => {
            *full_at = next;
            Ok(())
        }
        Some(wait) => Err(wait),
    }
}

impl Table {
    fn make_room(&mut self, now: Instant, most: usize) {
        let is_due = self.swept.is_none_or(|swept| now.duration_since(swept) >= SWEEP_EVERY);
        if self.full_at.len() >= most && is_due {
            self.full_at.retain(|_, full_at| *full_at > now);
            self.swept = Some(now);
        }
    }
}

/// A client's network: it can choose any address of it.
fn network(client: IpAddr) -> IpAddr {
    match client.to_canonical() {
        IpAddr::V6(address) => {
            let bits = address.to_bits() >> 64 << 64;
            IpAddr::V6(bits.into())
        }
        address => address,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rate(text: &str) -> Rate {
        toml::from_str(text).unwrap()
    }

    fn client(last: u8) -> IpAddr {
        [192, 0, 2, last].into()
    }

    #[test]
    fn a_client_has_a_burst_and_then_a_rate() {
        let (rates, f, begin) = (Rates::default(), "f".parse().unwrap(), Instant::now());
        let rate = rate("requests = 10\nper = \"1s\"\nburst = 3");
        let ask = |last, ms| {
            rates.count_at(&f, &rate, client(last), begin + Duration::from_millis(ms), 10)
        };
        assert_eq!((0..5).filter(|_| ask(1, 0).is_ok()).count(), 3);
        assert_eq!(ask(1, 0), Err(Duration::from_millis(100)));
        assert_eq!(ask(1, 60), Err(Duration::from_millis(40)));
        assert_eq!(ask(2, 60), Ok(()), "another has its own");
        assert_eq!((ask(1, 100), ask(1, 100).is_err()), (Ok(()), true));
        assert_eq!((0..5).filter(|_| ask(1, 60_000).is_ok()).count(), 3, "it saves no more");
    }

    #[test]
    fn functions_can_have_one_count_for_all() {
        let (rates, f, now) = (Rates::default(), "f".parse().unwrap(), Instant::now());
        let rate = rate("requests = 2\nper = \"1h\"\nby = \"function\"");
        let taken = (0..9).filter(|n| rates.count_at(&f, &rate, client(*n), now, 10).is_ok());
        assert_eq!(taken.count(), 2);
    }

    #[test]
    fn the_table_has_a_bound_and_those_beyond_share_a_count() {
        let (rates, f, begin) = (Rates::default(), "f".parse().unwrap(), Instant::now());
        let rate = rate("requests = 1\nper = \"10s\"");
        let ask =
            |last, s| rates.count_at(&f, &rate, client(last), begin + Duration::from_secs(s), 4);
        let served = (0..200).filter(|n| ask(*n, 0).is_ok()).count();
        assert_eq!(served, 5, "four clients, and all others together");
        assert_eq!(rates.0.lock().unwrap().full_at.len(), 5);
        // Those that have their allowance again are forgotten.
        assert_eq!(ask(201, 11), Ok(()));
        assert_eq!(rates.0.lock().unwrap().full_at.len(), 1);
    }

    #[test]
    fn addresses_of_one_network_are_one_client() {
        let [a, b, c, d]: [IpAddr; 4] =
            ["2001:db8::1", "2001:db8::ffff:1", "2001:db8:0:1::1", "::ffff:192.0.2.7"]
                .map(|text| text.parse().unwrap());
        assert_eq!(network(a), network(b));
        assert_ne!(network(a), network(c));
        assert_eq!(network(d), client(7));
    }

    #[test]
    fn a_rate_without_time_is_refused() {
        assert!(rate("requests = 1\nper = \"0s\"").check().is_err());
        assert!(rate("requests = 1\nper = \"25h\"").check().is_err());
        assert!(rate("requests = 4000000000\nper = \"1s\"").check().is_ok());
    }
}
