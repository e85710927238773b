//! What a monitor keeps for the next daemon: a store of descriptors, as service managers have
//! them (systemd, "file descriptor store"), so that live sandboxes outlive their daemon.

use std::collections::{BTreeMap, HashSet};
use std::io;
use std::os::fd::{AsFd, OwnedFd};

use rustix::io::Errno;
use rustix::net::sockopt::set_socket_linger;
use serde::{Deserialize, Serialize};

use super::handover::{Leaving, Left, Number};
use super::protocol::{
    KEPT_DESCRIPTORS_MAX, Kept, KeptKind, NOTE_MAX, PARENT_DESCRIPTORS, PARENT_PIDFD, Request,
};
use crate::limits::GroupName;
use crate::zygote::pid_of;

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
        if kind == KeptKind::Parent {
            if count != PARENT_DESCRIPTORS {
                return Err(Errno::INVAL.into());
            }
            if self.parents().count() >= PARENTS_MAX {
                return Err(Errno::NOSPC.into());
            }
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

    /// How many keys there are.
    pub fn len(&self) -> usize {
        self.kept.len()
    }

    /// Numbers of the control groups that are to stay.
    pub fn groups(&self) -> HashSet<u64> {
        self.kept.values().map(|kept| kept.group.number).collect()
    }

    /// Lives of the daemons that have had something kept.
    pub fn lives(&self) -> HashSet<u32> {
        self.kept.keys().map(|key| (key >> 32) as u32).collect()
    }

    /// The process ids of the zygote parents that do not end with their daemon, as `/proc`
    /// numbers them. Those that have ended have none.
    pub fn parent_pids(&self) -> HashSet<u32> {
        let pidfd = |kept: &Kept| pid_of(kept.descriptors[PARENT_PIDFD].as_fd());
        // A descriptor of another kind names nobody.
        self.parents().filter_map(|kept| pidfd(kept).ok()).collect()
    }

    fn parents(&self) -> impl Iterator<Item = &Kept> {
        self.kept.values().filter(|kept| kept.kind == KeptKind::Parent)
    }
}

/// What a store has, for the program that its process is about to execute.
#[derive(Debug, Serialize, Deserialize)]
#[serde(transparent)]
pub struct StoreState(Vec<KeptState>);

#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct KeptState {
    key: u64,
    kind: u32,
    group: GroupName,
    /// In hexadecimal digits: it need not be text.
    note: String,
    descriptors: Vec<Number>,
}

impl DescriptorStore {
    /// Writes down what is kept.
    pub fn state<'a>(&'a self, leaving: &mut Leaving<'a>) -> StoreState {
        let kept = self.kept.iter().map(|(&key, kept)| KeptState {
            key,
            kind: kept.kind as u32,
            group: kept.group,
            note: to_hex(&kept.note),
            descriptors: kept.descriptors.iter().map(|kept| leaving.add(kept.as_fd())).collect(),
        });
        StoreState(kept.collect())
    }

    /// Goes on with what the program before this one had kept.
    ///
    /// # Errors
    /// Something is not as [`DescriptorStore::state`] writes it, or is missing.
    pub fn resume(
        state: StoreState,
        left: &mut Left,
        keys_max: usize,
        descriptors_max: usize,
    ) -> io::Result<Self> {
        let mut store = Self::new(keys_max, descriptors_max);
        for KeptState { key, kind, group, note, descriptors } in state.0 {
            let (Some(kind), Some(note)) = (KeptKind::from_number(kind), from_hex(&note)) else {
                return Err(Errno::INVAL.into());
            };
            let descriptors = descriptors.into_iter().map(|number| left.take(number));
            let descriptors = descriptors.collect::<io::Result<Vec<_>>>()?;
            store.descriptors += descriptors.len();
            store.kept.insert(key, Kept { kind, group, note, descriptors });
        }
        Ok(store)
    }
}

impl StoreState {
    /// How many keys there are.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Whether it can be gone on with, as far as that is known without the descriptors.
    pub fn is_sound(&self) -> bool {
        let is_parent = |kept: &&KeptState| kept.kind == KeptKind::Parent as u32;
        let has_room_for_parents = self.0.iter().filter(is_parent).count() <= PARENTS_MAX;
        has_room_for_parents
            && self.0.iter().all(|kept| {
                let note = from_hex(&kept.note);
                KeptKind::from_number(kept.kind).is_some()
                    && note.is_some_and(|note| note.len() <= NOTE_MAX)
                    && (1..=KEPT_DESCRIPTORS_MAX).contains(&kept.descriptors.len())
                    && (kept.kind != KeptKind::Parent as u32
                        || kept.descriptors.len() == PARENT_DESCRIPTORS)
            })
    }
}

fn to_hex(bytes: &[u8]) -> String {
    const DIGITS: &[u8; 16] = b"0123456789abcdef";
    let digits = bytes.iter().flat_map(|byte| [byte >> 4, byte & 15]);
    digits.map(|digit| char::from(DIGITS[usize::from(digit)])).collect()
}

fn from_hex(text: &str) -> Option<Vec<u8>> {
    let (pairs, []) = text.as_bytes().as_chunks::<2>() else { return None };
    let digit = |byte: u8| char::from(byte).to_digit(16);
    pairs.iter().map(|&[high, low]| u8::try_from(digit(high)? << 4 | digit(low)?).ok()).collect()
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
    use rustix::process::{Pid, PidfdFlags, pidfd_open};
    use std::fs::File;
    use std::process::{Child, Command};

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
        for count in [1, 3] {
            let kept = store.keep(&request, 1, Vec::new(), descriptors(count));
            assert_eq!(errno(kept), libc::EINVAL, "a parent with {count}");
        }
        assert_eq!(errno(store.keep(&request, 1, Vec::new(), descriptors(2))), 0);
        let mut keys = Vec::new();
        while let Some((key, _)) = store.next_after(keys.last().copied().unwrap_or_default()) {
            keys.push(key);
        }
        assert_eq!(keys, [life + 2, life + 3, life + 4]);
        assert_eq!((store.parents().count(), store.groups()), (1, HashSet::from([9, 0])));
        // Its second descriptor is no process.
        assert_eq!(store.parent_pids(), HashSet::new());
        store.forget_all();
        assert_eq!((store.descriptors, store.parents().count()), (0, 0));
        let mut strange = Request::keep(life + 5, KeptKind::Sandbox, 0);
        strange.port = 3;
        assert_eq!(errno(store.keep(&strange, 1, Vec::new(), descriptors(1))), libc::EINVAL);
        assert!(store.next_after(u64::MAX).is_none());
    }

    #[test]
    fn notes_of_any_bytes_are_written_down() {
        let note: Vec<u8> = (0..=255).collect();
        assert_eq!(from_hex(&to_hex(&note)), Some(note));
        assert_eq!(from_hex(""), Some(Vec::new()));
        for wrong in ["0", "0g", "é0"] {
            assert_eq!(from_hex(wrong), None, "{wrong}");
        }
    }

    #[test]
    fn zygote_parents_are_known_by_their_pidfds_and_there_are_so_many() {
        let mut store = DescriptorStore::new(100, 1000);
        let keep = |store: &mut DescriptorStore, key, child: &Child| {
            let pid = Pid::from_child(child);
            let pidfd = pidfd_open(pid, PidfdFlags::empty()).unwrap();
            let mut given = descriptors(1);
            given.push(pidfd);
            errno(store.keep(&Request::keep(key, KeptKind::Parent, 0), 0, Vec::new(), given))
        };
        let mut children = [(); 2].map(|()| Command::new("sleep").arg("600").spawn().unwrap());
        let pids = children.each_ref().map(Child::id);
        assert_eq!([keep(&mut store, 1, &children[0]), keep(&mut store, 2, &children[1])], [0, 0]);
        assert_eq!(store.parent_pids(), HashSet::from(pids));
        children[0].kill().unwrap();
        children[0].wait().unwrap();
        assert_eq!(store.parent_pids(), HashSet::from([pids[1]]));
        for key in 3..=PARENTS_MAX as u64 {
            assert_eq!(keep(&mut store, key, &children[1]), 0);
        }
        assert_eq!(keep(&mut store, 1000, &children[1]), libc::ENOSPC);
        children[1].kill().unwrap();
        children[1].wait().unwrap();
    }
}
