//! What a monitor keeps for the next daemon: a store of descriptors, as service managers have
//! them (systemd, "file descriptor store"), so that live sandboxes outlive their daemon.

use std::collections::{BTreeMap, HashSet};
use std::io;
use std::os::fd::OwnedFd;

use rustix::io::Errno;
use rustix::net::sockopt::set_socket_linger;

use crate::limits::GroupName;

use super::protocol::{KEPT_DESCRIPTORS_MAX, Kept, KeptKind, Request};

/// Most zygote parents.
const PARENTS_MAX: usize = 32;

/// Descriptors by key. The notes beside them are the daemon's business.
#[derive(Debug)]
pub struct DescriptorStore {
    kept: BTreeMap<u64, Kept>,
    /// Descriptors that are kept now, and at most.
    descriptors: usize,
    descriptors_max: usize,
    /// Most keys.
    keys_max: usize,
}

impl DescriptorStore {
    pub fn new(keys_max: usize, descriptors_max: usize) -> Self {
        Self { kept: BTreeMap::new(), descriptors: 0, descriptors_max, keys_max }
    }

    /// Keeps what a [`Request::keep`] of the daemon with number `life` brings.
    ///
    /// # Errors
    /// The request is not sound, or the store is full.
    pub fn keep(
        &mut self,
        request: &Request,
        life: u32,
        note: Vec<u8>,
        descriptors: Vec<OwnedFd>,
    ) -> io::Result<()> {
        let kind = KeptKind::from_number(request.port.into()).ok_or(Errno::INVAL)?;
        let count = descriptors.len();
        if request.number >> 32 != u64::from(life) || !(1..=KEPT_DESCRIPTORS_MAX).contains(&count) {
            return Err(Errno::INVAL.into());
        }
        if self.kept.contains_key(&request.number) {
            return Err(Errno::EXIST.into());
        }
        if kind == KeptKind::Parent && self.parents() >= PARENTS_MAX {
            return Err(Errno::NOSPC.into());
        }
        if self.kept.len() >= self.keys_max || self.descriptors + count > self.descriptors_max {
            return Err(Errno::NOSPC.into());
        }
        self.descriptors += count;
        let group = GroupName::of_first(request.group_to_keep());
        let kept = Kept { kind, group, note, descriptors };
        self.kept.insert(request.number, kept);
        Ok(())
    }

    /// Lets go of what has this key, if there is such a thing.
    pub fn forget(&mut self, key: u64) {
        if let Some(kept) = self.kept.remove(&key) {
            self.descriptors -= kept.descriptors.len();
            close(kept);
        }
    }

    /// Lets go of everything.
    pub fn forget_all(&mut self) {
        std::mem::take(&mut self.kept).into_values().for_each(close);
        self.descriptors = 0;
    }

    /// What is kept under the first key behind `key`.
    pub fn next_after(&self, key: u64) -> Option<(u64, &Kept)> {
        let next = self.kept.range(key.checked_add(1)?..).next()?;
        Some((*next.0, next.1))
    }

    /// Numbers of the control groups that are to stay.
    pub fn groups(&self) -> HashSet<u64> {
        self.kept.values().map(|kept| kept.group.number).collect()
    }

    /// Zygote parents that do not end with their daemon.
    pub fn parents(&self) -> usize {
        self.kept.values().filter(|kept| kept.kind == KeptKind::Parent).count()
    }
}

/// Closes descriptors without waiting for what was sent on connections, whatever the daemon has
/// set (socket(7), `SO_LINGER`).
fn close(kept: Kept) {
    kept.descriptors.iter().for_each(do_not_linger);
}

/// See [`close`]; for what has just come, too.
pub fn do_not_linger(descriptor: &OwnedFd) {
    // What is no socket has nothing to wait for.
    let _ = set_socket_linger(descriptor, None);
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::File;

    fn descriptors(count: usize) -> Vec<OwnedFd> {
        (0..count).map(|_| File::open("/dev/null").unwrap().into()).collect()
    }

    fn errno(result: io::Result<()>) -> i32 {
        result.map_or_else(|error| error.raw_os_error().unwrap(), |()| 0)
    }

    #[test]
    fn so_much_is_kept_and_no_more() {
        let mut store = DescriptorStore::new(3, 7);
        let mut keep = |key, count| {
            let request = Request::keep(key, KeptKind::Sandbox, 9);
            errno(store.keep(&request, 1, Vec::new(), descriptors(count)))
        };
        let life = 1 << 32;
        assert_eq!(keep(1, 1), libc::EINVAL, "a key of another daemon");
        assert_eq!(keep(life + 1, 0), libc::EINVAL);
        assert_eq!(keep(life + 1, KEPT_DESCRIPTORS_MAX + 1), libc::EINVAL);
        assert_eq!(keep(life + 1, 5), 0);
        assert_eq!(keep(life + 1, 1), libc::EEXIST);
        assert_eq!(keep(life + 2, 3), libc::ENOSPC, "descriptors");
        assert_eq!((keep(life + 2, 1), keep(life + 3, 1)), (0, 0));
        assert_eq!(keep(life + 4, 1), libc::ENOSPC, "keys");
        store.forget(life + 1);
        store.forget(life + 77);
        assert_eq!(store.descriptors, 2);
        let request = Request::keep(life + 4, KeptKind::Parent, 0);
        assert_eq!(errno(store.keep(&request, 1, Vec::new(), descriptors(5))), 0);
        let mut keys = Vec::new();
        while let Some((key, _)) = store.next_after(keys.last().copied().unwrap_or_default()) {
            keys.push(key);
        }
        assert_eq!(keys, [life + 2, life + 3, life + 4]);
        assert_eq!((store.parents(), store.groups()), (1, HashSet::from([9, 0])));
        store.forget_all();
        assert_eq!((store.descriptors, store.parents()), (0, 0));
        let mut strange = Request::keep(life + 5, KeptKind::Sandbox, 0);
        strange.port = 3;
        assert_eq!(errno(store.keep(&strange, 1, Vec::new(), descriptors(1))), libc::EINVAL);
        assert!(store.next_after(u64::MAX).is_none());
    }
}
