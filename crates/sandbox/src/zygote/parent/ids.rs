//! User and group ids: which the sandboxes get, and how the parent's user
//! namespace maps them.

use std::fs;
use std::io;
use std::ops::Range;
use std::process::{Command, Stdio};

use rustix::process::{Gid, Uid, getegid, geteuid};
use rustix::thread::{set_thread_groups, set_thread_res_gid, set_thread_res_uid};

use super::namespaces::UserNamespace;
use crate::host::TOO_FEW_IDS;
use crate::zygote::protocol::UserIds;

/// Which ids the sandboxes have, as the parent's user namespace numbers them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IdMap {
    /// The id that all sandboxes share, or the one below that of slot 0.
    base: u32,
    /// Number of sandboxes with an id of their own; 0: they share `base`.
    slots: u32,
}

impl IdMap {
    /// Bytes of the encoding.
    pub const BYTES: usize = 8;

    pub fn to_bytes(self) -> [u8; Self::BYTES] {
        let mut bytes = [0; Self::BYTES];
        bytes[..4].copy_from_slice(&self.base.to_le_bytes());
        bytes[4..].copy_from_slice(&self.slots.to_le_bytes());
        bytes
    }

    pub fn from_bytes(bytes: [u8; Self::BYTES]) -> Self {
        let [a, b, c, d, e, f, g, h] = bytes;
        Self { base: u32::from_le_bytes([a, b, c, d]), slots: u32::from_le_bytes([e, f, g, h]) }
    }

    /// Ids of a namespace that somebody else has made: `slots` of them after `base`.
    pub fn given(base: u32, slots: u32) -> Self {
        Self { base, slots }
    }

    /// Whether each sandbox has its own id.
    pub fn user_ids(&self) -> UserIds {
        if self.slots == 0 { UserIds::Shared } else { UserIds::OnePerSandbox }
    }

    /// Number of slots with ids of their own; 0 if all share one.
    pub fn slots(&self) -> u64 {
        self.slots.into()
    }

    /// The id that all sandboxes share, or the one below that of slot 0.
    pub fn base(&self) -> u32 {
        self.base
    }

    /// The id of slot `slot`.
    pub fn of_slot(&self, slot: u32) -> u32 {
        self.user_ids().of_slot(self.base, slot)
    }

    /// Makes the calling process the parent's user and group, without
    /// supplementary groups where those may be dropped.
    pub fn take(&self) -> io::Result<()> {
        // With a single mapped id, setgroups(2) is denied for good.
        if self.slots > 0 {
            set_thread_groups(&[])?;
        }
        // Root of its user namespace, which it needs to be to give its children
        // other ids; the host's root only where there is no namespace.
        set_ids(0)
    }
}

/// Sets all user and group ids of the calling process.
pub fn set_ids(id: u32) -> io::Result<()> {
    let (uid, gid) = (Uid::from_raw(id), Gid::from_raw(id));
    // Each call changes the calling thread only, which is all of the process.
    set_thread_res_gid(gid, gid, gid)?;
    set_thread_res_uid(uid, uid, uid)?;
    Ok(())
}

/// Maps the ids of process `pid`, as far as the caller may, and says what the
/// parent has to work with: `count` ids for sandboxes from `first` on, with one before
/// them for the parent if the caller is root.
pub fn map(pid: i32, namespace: UserNamespace, first: u32, count: u32) -> io::Result<IdMap> {
    if geteuid().is_root() {
        let count = count.saturating_add(1);
        if namespace == UserNamespace::Host {
            return Ok(IdMap { base: first, slots: count - 1 });
        }
        let line = format!("0 {first} {count}");
        fs::write(format!("/proc/{pid}/gid_map"), &line)?;
        fs::write(format!("/proc/{pid}/uid_map"), &line)?;
        return Ok(IdMap { base: 0, slots: count - 1 });
    }
    if let Some(mapped) = map_with_helpers(pid, first, count, Numbers::FromZero) {
        return Ok(IdMap { base: 0, slots: mapped.count });
    }
    map_own(pid, Numbers::FromZero)?;
    Ok(IdMap { base: 0, slots: 0 })
}

/// How a user namespace numbers the ids of its maker, and those that follow.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Numbers {
    /// From 0 on.
    FromZero,
    /// As they are numbered outside.
    AsOutside,
}

/// Subordinate ids that are mapped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Subordinate {
    /// The first user id.
    pub uid: u32,
    /// The first group id.
    pub gid: u32,
    /// How many of each.
    pub count: u32,
}

/// Maps ids of the caller, who is not root, in the user namespace of process `pid`, where
/// they have the same numbers: its own, and those of `range` (the first user id, and how
/// many), if it has any. Returns what came of the range.
pub(crate) fn map_to_themselves(
    pid: i32,
    range: Option<(u32, u32)>,
) -> io::Result<Option<Subordinate>> {
    let Some((first, count)) = range else {
        return map_own(pid, Numbers::AsOutside).map(|()| None);
    };
    let mapped = map_with_helpers(pid, first, count, Numbers::AsOutside);
    mapped.map(Some).ok_or_else(|| io::Error::from(io::ErrorKind::PermissionDenied))
}

/// Maps the ids of the caller, who is not root, and no others.
fn map_own(pid: i32, numbers: Numbers) -> io::Result<()> {
    let map = |own: u32| match numbers {
        Numbers::FromZero => format!("0 {own} 1"),
        Numbers::AsOutside => format!("{own} {own} 1"),
    };
    fs::write(format!("/proc/{pid}/setgroups"), "deny")?;
    fs::write(format!("/proc/{pid}/gid_map"), map(getegid().as_raw()))?;
    fs::write(format!("/proc/{pid}/uid_map"), map(geteuid().as_raw()))
}

/// Where a parent of root's may have its ids: from `first` on, if this user namespace
/// has enough there for `slots` sandboxes, otherwise in the upper half of the largest
/// range that it has, since containers often map 65536 ids only.
pub(in crate::zygote) fn window_of_namespace(first: u32, slots: u32) -> io::Result<Range<u64>> {
    let count = u64::from(slots) + 1;
    choose_window(&fs::read_to_string("/proc/self/uid_map")?, first.into(), count)
        .ok_or_else(|| io::Error::from_raw_os_error(TOO_FEW_IDS))
}

fn choose_window(uid_map: &str, first: u64, count: u64) -> Option<Range<u64>> {
    let extents: Vec<Range<u64>> = uid_map
        .lines()
        .filter_map(|line| {
            let mut numbers = line.split_whitespace().map(str::parse::<u64>);
            let inside = numbers.next()?.ok()?;
            let length = numbers.nth(1)?.ok()?;
            Some(inside..inside + length)
        })
        .collect();
    let fits = |extent: &&Range<u64>| extent.start <= first && first + count <= extent.end;
    let window = match extents.iter().find(fits) {
        Some(extent) => first..extent.end,
        None => {
            let largest = extents.iter().max_by_key(|extent| extent.end - extent.start)?;
            largest.start + (largest.end - largest.start).div_ceil(2)..largest.end
        }
    };
    // One for the parent, one for a sandbox, and never root's.
    (window.start > 0 && window.end - window.start >= 2).then_some(window)
}

/// Where a parent of another user's may have the ids of its sandboxes: in the range of
/// `/etc/subuid`, as far as that of `/etc/subgid` goes.
pub(in crate::zygote) fn subordinate_window() -> Option<Range<u64>> {
    let uid = geteuid().as_raw();
    let (first, uids) = subordinate_range("/etc/subuid", uid)?;
    let (_, gids) = subordinate_range("/etc/subgid", uid)?;
    let count = uids.min(gids);
    (count > 0).then(|| u64::from(first)..u64::from(first) + u64::from(count))
}

/// Maps `count` ids of the caller's range of `/etc/subuid`, from `first` on, with the
/// set-user-id helpers newuidmap(1) and newgidmap(1), and as many of its groups, with
/// the same distance from the first.
fn map_with_helpers(pid: i32, first: u32, count: u32, numbers: Numbers) -> Option<Subordinate> {
    let (uid, gid) = (geteuid().as_raw(), getegid().as_raw());
    let (range_uid, uids) = subordinate_range("/etc/subuid", uid)?;
    let (range_gid, gids) = subordinate_range("/etc/subgid", uid)?;
    let skipped = first.checked_sub(range_uid)?;
    let (first_uid, first_gid) = (first, range_gid.checked_add(skipped)?);
    let slots = uids.min(gids).saturating_sub(skipped).min(count);
    if slots == 0 {
        return None;
    }
    let run = |helper: &str, own: u32, first: u32| {
        let inside = match numbers {
            Numbers::FromZero => (0, 1),
            Numbers::AsOutside => (own, first),
        };
        Command::new(helper)
            .env_remove("NOTIFY_SOCKET")
            .arg(pid.to_string())
            .args([inside.0, own, 1, inside.1, first, slots].map(|number| number.to_string()))
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .status()
            .is_ok_and(|status| status.success())
    };
    let is_mapped = run("newgidmap", gid, first_gid) && run("newuidmap", uid, first_uid);
    is_mapped.then_some(Subordinate { uid: first_uid, gid: first_gid, count: slots })
}

/// The first range that `path` (subuid(5)) gives to the user.
fn subordinate_range(path: &str, uid: u32) -> Option<(u32, u32)> {
    let name = user_name(uid);
    let owner = |field: &str| Some(field) == name.as_deref() || field == uid.to_string();
    fs::read_to_string(path).ok()?.lines().find_map(|line| {
        let mut fields = line.split(':');
        if !owner(fields.next()?) {
            return None;
        }
        Some((fields.next()?.parse().ok()?, fields.next()?.trim().parse().ok()?))
    })
}

fn user_name(uid: u32) -> Option<String> {
    fs::read_to_string("/etc/passwd").ok()?.lines().find_map(|line| {
        let mut fields = line.split(':');
        let name = fields.next()?;
        (fields.nth(1)?.parse() == Ok(uid)).then(|| name.to_owned())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const WHOLE: &str = "         0          0 4294967295\n";

    #[test]
    fn the_wanted_range_is_taken_where_it_exists() {
        assert_eq!(choose_window(WHOLE, 2_000_000, 1000), Some(2_000_000..4_294_967_295));
    }

    #[test]
    fn a_small_namespace_yields_its_upper_half() {
        assert_eq!(choose_window("0 100000 65536\n", 2_000_000, 16_385), Some(32_768..65_536));
        assert_eq!(choose_window("0 100000 1000\n", 2_000_000, 16_385), Some(500..1000));
    }

    #[test]
    fn a_namespace_of_one_id_has_no_range() {
        assert_eq!(choose_window("0 1000 1\n", 2_000_000, 16_385), None);
        assert_eq!(choose_window("", 2_000_000, 16_385), None);
    }

    #[test]
    fn the_encoding_keeps_the_map() {
        let map = IdMap { base: 7, slots: 9 };
        assert_eq!(IdMap::from_bytes(map.to_bytes()), map);
    }
}
