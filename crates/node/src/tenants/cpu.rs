//! The CPU time of a tenant, and what becomes of it when its quota is spent.

use super::carried::Carried;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, SystemTime};
use thaw_home::clock::monotonic_ns;
use thaw_home::config::CpuQuota;
use thaw_sandbox::Meter;

/// A tenant that goes on to use CPU time after its quota is spent has so much of it more,
/// as a part of the quota, until its instances are ended.
const OVERDRAFT: u32 = 10;

/// The CPU time of one tenant.
#[derive(Debug, Default)]
pub struct CpuAccount {
    meter: Arc<Meter>,
    /// When the tenant gets CPU time again, in nanoseconds of `CLOCK_MONOTONIC`; 0: it has
    /// some.
    spent_until_ns: AtomicU64,
    period: Mutex<Option<Period>>,
}

/// The present period of a quota.
#[derive(Clone, Copy, Debug)]
struct Period {
    quota: CpuQuota,
    began_ns: u64,
    /// What the meter showed then.
    before: Duration,
    /// What was used in it under an earlier daemon.
    carried: Duration,
}

/// What a look at the account has shown.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Standing {
    /// There is some left.
    Solvent,
    /// The quota is spent; whether it was at the last look, too.
    Spent { already: bool },
    /// It goes on all the same: what runs is to be ended.
    Overdrawn,
}

/// A period as people see it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PeriodUse {
    /// CPU time that was used in it.
    pub used: Duration,
    /// Time until the next one.
    pub left: Duration,
    /// Whether the quota is spent.
    pub is_spent: bool,
}

impl Period {
    /// The period in which `now_ns` is; `total` is what the meter shows.
    fn at(self, now_ns: u64, total: Duration) -> Self {
        let length = as_ns(self.quota.period.0).max(1);
        let turns = now_ns.saturating_sub(self.began_ns) / length;
        match turns {
            0 => self,
            _ => Self {
                began_ns: self.began_ns + turns * length,
                before: total,
                carried: Duration::ZERO,
                ..self
            },
        }
    }

    fn ends_ns(&self) -> u64 {
        self.began_ns.saturating_add(as_ns(self.quota.period.0))
    }

    fn used(&self, total: Duration) -> Duration {
        total.saturating_sub(self.before) + self.carried
    }
}

impl CpuAccount {
    /// What counts the CPU time.
    pub fn meter(&self) -> &Arc<Meter> {
        &self.meter
    }

    /// Sets the quota. A period goes on if its length stays.
    pub(crate) fn set(&self, quota: Option<CpuQuota>) {
        let mut period = self.period();
        *period = match (quota, *period) {
            (None, _) => None,
            (Some(quota), Some(old)) if old.quota.period == quota.period => {
                Some(Period { quota, ..old })
            }
            (Some(quota), _) => {
                let (began_ns, before) = (monotonic_ns(), self.meter.cpu_time());
                Some(Period { quota, began_ns, before, carried: Duration::ZERO })
            }
        };
        drop(period);
        self.look(monotonic_ns());
    }

    /// How long there is no CPU time for new requests, if there is none. An atomic load as
    /// long as there is some.
    pub fn spent_for(&self) -> Option<Duration> {
        let until = self.spent_until_ns.load(Ordering::Relaxed);
        if until == 0 {
            return None;
        }
        let left = until.saturating_sub(monotonic_ns());
        (left > 0).then_some(Duration::from_nanos(left))
    }

    /// Compares what was used with the quota. Reads a file for each live instance if there
    /// is a quota.
    pub(crate) fn look(&self, now_ns: u64) -> Standing {
        if self.period().is_none() {
            self.spent_until_ns.store(0, Ordering::Relaxed);
            return Standing::Solvent;
        }
        // Takes host calls, so it is done without the lock.
        self.judge(now_ns, self.meter.cpu_time())
    }

    fn judge(&self, now_ns: u64, total: Duration) -> Standing {
        let mut period = self.period();
        let Some(current) = period.map(|period| period.at(now_ns, total)) else {
            return Standing::Solvent;
        };
        *period = Some(current);
        let (used, time) = (current.used(total), current.quota.time.0);
        if used < time {
            self.spent_until_ns.store(0, Ordering::Relaxed);
            return Standing::Solvent;
        }
        let already = self.spent_until_ns.swap(current.ends_ns(), Ordering::Relaxed) != 0;
        match used > time + time / OVERDRAFT {
            true => Standing::Overdrawn,
            false => Standing::Spent { already },
        }
    }

    /// The present period, if there is a quota. Reads a file for each live instance.
    pub fn period_use(&self) -> Option<PeriodUse> {
        let (now_ns, total) = (monotonic_ns(), self.meter.cpu_time());
        let period = self.period().map(|period| period.at(now_ns, total))?;
        let used = period.used(total);
        let left = Duration::from_nanos(period.ends_ns().saturating_sub(now_ns));
        Some(PeriodUse { used, left, is_spent: used >= period.quota.time.0 })
    }

    /// The present period, to be gone on with by the next daemon.
    pub(super) fn carried(&self) -> Option<Carried> {
        let PeriodUse { used, left, .. } = self.period_use()?;
        let period = self.period().map(|period| period.quota.period.0)?;
        let began = SystemTime::now().checked_sub(period.saturating_sub(left))?;
        Some(Carried { period, began, used })
    }

    /// Goes on with a period of an earlier daemon, unless it is over or the quota's have
    /// another length.
    pub(super) fn go_on_with(&self, carried: Carried) {
        let Ok(age) = carried.began.elapsed() else { return };
        let (now_ns, total) = (monotonic_ns(), self.meter.cpu_time());
        let mut period = self.period();
        let Some(current) = &mut *period else { return };
        if current.quota.period.0 != carried.period || age >= carried.period {
            return;
        }
        // A host that was started since has a clock that is younger than the period.
        current.began_ns = now_ns.saturating_sub(as_ns(age));
        (current.before, current.carried) = (total, carried.used);
        drop(period);
        self.look(now_ns);
    }

    #[cfg(test)]
    pub(super) fn count_for_tests(&self, used: Duration) {
        self.period().as_mut().expect("a quota").carried += used;
    }

    fn period(&self) -> MutexGuard<'_, Option<Period>> {
        self.period.lock().expect("no holder panics")
    }
}

fn as_ns(span: Duration) -> u64 {
    u64::try_from(span.as_nanos()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: u64 = 1_000_000_000;

    fn account(quota: &str) -> (CpuAccount, u64) {
        let account = CpuAccount::default();
        account.set(Some(quota.parse().unwrap()));
        let began = account.period().unwrap().began_ns;
        (account, began)
    }

    fn ms(count: u64) -> Duration {
        Duration::from_millis(count)
    }

    #[test]
    fn a_quota_is_spent_overdrawn_and_there_again_in_the_next_period() {
        let (account, began) = account("1s per 10s");
        assert_eq!(account.judge(began, ms(999)), Standing::Solvent);
        assert_eq!(account.spent_for(), None);
        assert_eq!(account.judge(began + 1, ms(1000)), Standing::Spent { already: false });
        assert!(account.spent_for().is_some_and(|left| left <= Duration::from_secs(10)));
        assert_eq!(account.judge(began + SECOND, ms(1100)), Standing::Spent { already: true });
        assert_eq!(account.judge(began + SECOND, ms(1101)), Standing::Overdrawn);
        // Three periods later; what was used in between counts for none.
        assert_eq!(account.judge(began + 31 * SECOND, ms(5000)), Standing::Solvent);
        assert_eq!(account.spent_for(), None);
        assert_eq!(account.period().unwrap().began_ns, began + 30 * SECOND);
        assert_eq!(
            account.judge(began + 32 * SECOND, ms(6000)),
            Standing::Spent { already: false }
        );
    }

    #[test]
    fn a_quota_that_is_raised_or_lifted_is_there_at_once() {
        let (account, began) = account("1s per 1h");
        account.judge(began, ms(5000));
        assert!(account.spent_for().is_some());
        // The meter shows nothing here, so what was used is forgotten; the period is not.
        account.set(Some("2s per 1h".parse().unwrap()));
        assert_eq!(account.period().unwrap().began_ns, began);
        assert_eq!(account.spent_for(), None);
        account.judge(began, ms(5000));
        assert!(account.spent_for().is_some());
        account.set(None);
        assert_eq!(account.spent_for(), None);
        assert_eq!(account.period_use(), None);
    }

    #[test]
    fn no_cpu_time_at_all_is_spent_from_the_beginning() {
        let (account, _) = account("0s per 1h");
        assert!(account.spent_for().is_some());
    }

    #[test]
    fn periods_of_any_length_are_reckoned_without_overflow() {
        let (account, began) = account("1ms per 876000h");
        assert_eq!(account.judge(began, ms(1)), Standing::Spent { already: false });
        // Some periods later.
        assert_eq!(account.judge(u64::MAX, ms(2)), Standing::Solvent);
        assert_eq!(account.judge(u64::MAX, Duration::MAX), Standing::Overdrawn);
    }
}
