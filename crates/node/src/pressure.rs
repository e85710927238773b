//! Hibernating idle instances, and putting them to sleep, while the host is short of memory.
//!
//! The host's kernel says for how much of the time somebody has waited for memory (pressure stall
//! information, Documentation/accounting/psi.rst). It counts those who wait within a limit of their
//! own, too, and one tenant must not take the memory of the others by that. So there has to be
//! little left besides: of the host's memory, or of what the daemon's control groups may have. As
//! long as both hold, the instances that have been idle longest give up theirs, one after the other.

use crate::service::Services;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use tokio::time::sleep;

const MEMORY_PRESSURE: &str = "/proc/pressure/memory";
const MEMORY_INFO: &str = "/proc/meminfo";
const OWN_GROUPS: &str = "/proc/self/cgroup";
/// Where control groups are mounted, version 2 or with the versions' controllers below.
const GROUPS: &str = "/sys/fs/cgroup";
/// How often the pressure is looked at.
const LOOK_EVERY: Duration = Duration::from_secs(1);
/// Percent of the last ten seconds in which somebody has waited for memory, from which on
/// instances are hibernated.
const TOO_MUCH: f64 = 10.0;
/// Percent of the memory that are left when it is short.
const TOO_LITTLE: u64 = 10;
/// Instances that are asked at a time: the next look shows whether that was enough.
const AT_A_TIME: usize = 4;
/// Watches the host's memory for as long as the node lives.
pub async fn watch_pressure(services: Arc<Services>) {
    if let Err(error) = memory_pressure()
        && thaw_home::debug::is_memory_short().is_none()
    {
        tracing::info!(
            "instances are hibernated by time only, since this host does not tell its memory pressure: {error}"
        );
        return;
    }
    loop {
        sleep(LOOK_EVERY).await;
        if thaw_home::debug::is_memory_short().unwrap_or_else(is_short) {
            relieve(&services);
        }
    }
}

/// Whether somebody waits for memory, and little is left.
fn is_short() -> bool {
    memory_pressure().is_ok_and(|percent| percent >= TOO_MUCH) && is_little_left()
}

/// Hibernates idle instances; if all are, puts them to sleep. One that can do neither ends.
fn relieve(services: &Services) {
    let asked = services.hibernate_idlest(AT_A_TIME);
    if asked > 0 {
        tracing::info!(instances = asked, "memory is short: hibernating idle instances");
        return;
    }
    let asked = services.put_idlest_to_sleep(AT_A_TIME);
    if asked > 0 {
        tracing::info!(instances = asked, "memory is short: putting hibernated instances to sleep");
    }
}

/// Percent of the last ten seconds in which somebody has waited for memory.
fn memory_pressure() -> io::Result<f64> {
    let text = fs::read_to_string(MEMORY_PRESSURE)?;
    average(&text).ok_or_else(|| io::ErrorKind::InvalidData.into())
}

/// `avg10` of the line `some`.
fn average(text: &str) -> Option<f64> {
    let line = text.lines().find_map(|line| line.strip_prefix("some "))?;
    let value = line.split(' ').find_map(|field| field.strip_prefix("avg10="))?;
    value.parse().ok().filter(|percent| (0.0..=100.0).contains(percent))
}

/// How much memory there is and how much of it can still be had, in the same unit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Room {
    all: u64,
    left: u64,
}

impl Room {
    fn is_short(self) -> bool {
        self.left.saturating_mul(100) < self.all.saturating_mul(TOO_LITTLE)
    }
}

/// Whether the host or one of the daemon's control groups has little memory left. Where that
/// cannot be read, the pressure alone counts.
fn is_little_left() -> bool {
    let host = fs::read_to_string(MEMORY_INFO).ok().and_then(|text| room_of_host(&text));
    let own = fs::read_to_string(OWN_GROUPS).unwrap_or_default();
    let groups = memory_groups(Path::new(GROUPS), &own);
    host.is_none_or(Room::is_short)
        || groups.iter().filter_map(|group| room_of_group(group)).any(Room::is_short)
}

/// The host's memory (proc_meminfo(5)).
fn room_of_host(text: &str) -> Option<Room> {
    let field = |name: &str| {
        let value = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))?;
        value.trim().strip_suffix(" kB")?.parse().ok()
    };
    Some(Room { all: field("MemTotal")?, left: field("MemAvailable")? })
}

/// The control groups that bound the memory of a process with these groups (`/proc/PID/cgroup`,
/// cgroups(7)): its own and those above.
fn memory_groups(mount: &Path, groups: &str) -> Vec<PathBuf> {
    let found = groups.lines().filter_map(|line| {
        let mut fields = line.splitn(3, ':').skip(1);
        let (controllers, path) = (fields.next()?, fields.next()?);
        let tree = match controllers {
            "" => mount.to_owned(),
            _ if controllers.split(',').any(|name| name == "memory") => mount.join(controllers),
            _ => return None,
        };
        let own = tree.join(path.trim_start_matches('/'));
        Some(
            own.ancestors()
                .take_while(|group| group.starts_with(&tree))
                .map(PathBuf::from)
                .collect(),
        )
    });
    found.collect::<Vec<Vec<_>>>().concat()
}

/// What a group may have and what is left of that; `None`: it has no limit. Page cache can be
/// given up.
fn room_of_group(group: &Path) -> Option<Room> {
    let number = |name: &str| fs::read_to_string(group.join(name)).ok()?.trim().parse().ok();
    let all: u64 = number("memory.max").or_else(|| number("memory.limit_in_bytes"))?;
    let used: u64 = number("memory.current").or_else(|| number("memory.usage_in_bytes"))?;
    let stat = fs::read_to_string(group.join("memory.stat")).unwrap_or_default();
    // Version 1 counts the groups below in fields of their own.
    let cache = ["inactive_file", "active_file"].map(|name| {
        let total = format!("total_{name}");
        let value = |name: &str| {
            let mut fields = stat.lines().filter_map(|line| line.split_once(' '));
            fields.find_map(|(found, value)| (found == name).then(|| value.parse().ok())?)
        };
        value(&total).or_else(|| value(name)).unwrap_or(0u64)
    });
    let kept = used.saturating_sub(cache.iter().sum());
    Some(Room { all, left: all.saturating_sub(kept) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_short_when_little_is_left() {
        let text =
            "MemTotal:       24684084 kB\nMemFree:        1 kB\nMemAvailable:   2468408 kB\n";
        let room = room_of_host(text).unwrap();
        assert_eq!(room, Room { all: 24684084, left: 2468408 });
        assert!(room.is_short());
        assert!(!Room { left: 2468409, ..room }.is_short());
        assert_eq!(room_of_host("MemTotal: 1 kB\n"), None);
    }

    #[test]
    fn each_group_above_bounds_the_memory() {
        let groups = "5:cpu,cpuacct:/a\n4:memory:/a/b\n0::/c/d\n";
        let found = memory_groups(Path::new("/m"), groups);
        let paths = ["/m/memory/a/b", "/m/memory/a", "/m/memory", "/m/c/d", "/m/c", "/m"];
        assert_eq!(found, paths.map(PathBuf::from));
        assert!(memory_groups(Path::new("/m"), "").is_empty());
    }

    #[test]
    fn the_cache_of_a_group_is_left() {
        let group = tempfile::tempdir().unwrap();
        let write = |name: &str, text: &str| fs::write(group.path().join(name), text).unwrap();
        assert_eq!(room_of_group(group.path()), None);
        write("memory.max", "max\n");
        write("memory.current", "900\n");
        assert_eq!(room_of_group(group.path()), None, "it has no limit");
        write("memory.max", "1000\n");
        write("memory.stat", "anon 400\ninactive_file 300\nactive_file 200\n");
        assert_eq!(room_of_group(group.path()), Some(Room { all: 1000, left: 600 }));
        write("memory.stat", "inactive_file 1\ntotal_inactive_file 50\ntotal_active_file 10\n");
        assert_eq!(room_of_group(group.path()), Some(Room { all: 1000, left: 160 }));
    }

    #[test]
    fn the_average_of_ten_seconds_is_read() {
        let text = "some avg10=12.50 avg60=0.02 avg300=0.09 total=103783901\n\
                    full avg10=1.00 avg60=0.00 avg300=0.02 total=19732130\n";
        assert_eq!(average(text), Some(12.5));
        for wrong in ["", "full avg10=1.00", "some avg60=1.00", "some avg10=x", "some avg10=101"] {
            assert_eq!(average(wrong), None, "{wrong}");
        }
    }
}
