//! The CPU time that tenants have used in their present periods, written down so that a
//! daemon that starts anew does not begin a new period.

use super::Tenants;
use serde::{Deserialize, Serialize};
use std::fs;
use std::io;
use std::path::Path;
use std::time::{Duration, SystemTime, UNIX_EPOCH};
use thaw_home::config::DomainName;
use thaw_home::tenants::TenantName;

/// The file's name in the daemon's home.
pub const CARRIED_FILE: &str = "daemon.cpu-time.json";

/// A period, by the clock on the wall.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Carried {
    /// Its length.
    pub period: Duration,
    /// When it began.
    pub began: SystemTime,
    /// CPU time that was used in it.
    pub used: Duration,
}

#[derive(Debug, Serialize, Deserialize)]
struct Entry {
    domain: Option<DomainName>,
    period_ms: u64,
    began_ms: u64,
    used_ms: u64,
}

/// Writes down the periods of all tenants that have one.
///
/// # Errors
/// The file cannot be written; the old one stays.
pub fn write_periods(tenants: &Tenants, file: &Path) -> io::Result<()> {
    let entry = |tenant: std::sync::Arc<super::Tenant>| {
        let Carried { period, began, used } = tenant.cpu().carried()?;
        let began = began.duration_since(UNIX_EPOCH).ok()?;
        let domain = tenant.name().domain().cloned();
        Some(Entry {
            domain,
            period_ms: as_ms(period),
            began_ms: as_ms(began),
            used_ms: as_ms(used),
        })
    };
    let entries: Vec<_> = tenants.with_cpu_quota().into_iter().filter_map(entry).collect();
    let temporary = file.with_extension("json.new");
    fs::write(&temporary, serde_json::to_vec(&entries).expect("plain data"))?;
    fs::rename(&temporary, file)
}

/// Writes the periods down. A disk that is full costs no more than that.
pub fn write_down(tenants: &Tenants, file: &Path) {
    if let Err(error) = write_periods(tenants, file) {
        tracing::debug!("cannot write down what tenants have used ({error})");
    }
}

/// Goes on with the periods that were written down, where they are not over and quotas have
/// the same length of period. To be called when the tenants are known.
///
/// # Errors
/// The file is there and cannot be read: all periods begin anew.
pub fn read_periods(tenants: &Tenants, file: &Path) -> io::Result<()> {
    let text = match fs::read(file) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        text => text?,
    };
    let entries: Vec<Entry> = serde_json::from_slice(&text)?;
    for entry in entries {
        let began = UNIX_EPOCH.checked_add(Duration::from_millis(entry.began_ms));
        let Some(began) = began else { continue };
        let carried = Carried {
            period: Duration::from_millis(entry.period_ms),
            began,
            used: Duration::from_millis(entry.used_ms),
        };
        if let Some(tenant) = tenants.known(&TenantName::of(entry.domain.as_ref())) {
            tenant.cpu().go_on_with(carried);
        }
    }
    Ok(())
}

fn as_ms(span: Duration) -> u64 {
    u64::try_from(span.as_millis()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;
    use thaw_home::config::Quotas;

    fn tenants(quota: &str) -> (Tenants, Arc<super::super::Tenant>) {
        let tenants = Tenants::default();
        let text = format!("[default]\ncpu_time = \"{quota}\"\n");
        tenants.set(Quotas::parse("tenants.toml".as_ref(), &text).unwrap());
        let tenant = tenants.of(TenantName::default());
        (tenants, tenant)
    }

    #[test]
    fn a_period_goes_on_where_it_was_and_one_that_is_over_does_not() {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join(CARRIED_FILE);
        let (before, tenant) = tenants("10s per 1h");
        tenant.cpu().count_for_tests(Duration::from_secs(4));
        write_periods(&before, &file).unwrap();

        let used = |quota: &str| {
            let (after, tenant) = tenants(quota);
            read_periods(&after, &file).unwrap();
            let period = tenant.cpu().period_use().unwrap();
            (period.used, period.is_spent)
        };
        assert_eq!(used("10s per 1h"), (Duration::from_secs(4), false));
        assert_eq!(used("4s per 1h"), (Duration::from_secs(4), true));
        assert_eq!(used("10s per 2h"), (Duration::ZERO, false));

        let text = fs::read_to_string(&file).unwrap();
        let entries: Vec<Entry> = serde_json::from_str(&text).unwrap();
        let old = |began_ms| {
            let entry =
                Entry { domain: None, began_ms, period_ms: entries[0].period_ms, used_ms: 4000 };
            fs::write(&file, serde_json::to_vec(&[entry]).unwrap()).unwrap();
            used("10s per 1h").0
        };
        assert_eq!(old(entries[0].began_ms - 3_700_000), Duration::ZERO, "it is over");
        assert_eq!(old(entries[0].began_ms + 3_700_000), Duration::ZERO, "it has not begun");
        assert_eq!(old(entries[0].began_ms - 3_000_000), Duration::from_secs(4));
        fs::write(&file, "no list").unwrap();
        assert!(read_periods(&before, &file).is_err());
        fs::remove_file(&file).unwrap();
        read_periods(&before, &file).unwrap();
    }
}
