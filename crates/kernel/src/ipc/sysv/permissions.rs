//! Owners and modes of System V objects (sysvipc(7), "Resource access permissions").

use core::ops::Deref;

use bytemuck::{Pod, Zeroable};

use crate::errno::{Errno, Result};
use crate::ipc::namespace;
use crate::task::user_namespace::UserNamespace;
use crate::task::{Capabilities, Credentials, current_process};

/// Reading, by owner, group or others.
pub const READ: u32 = 0o444;
/// Writing, or altering.
pub const WRITE: u32 = 0o222;
/// Executing: memory only.
pub const EXECUTE: u32 = 0o111;

/// Bits of the mode that permit something.
pub const MODE_MASK: u32 = 0o777;

/// Who wants to do something with the objects of a namespace.
pub struct Caller {
    /// Ids and capabilities.
    pub credentials: Credentials,
    /// Where capabilities over the objects count: the owner of their namespace.
    pub owner: UserNamespace,
}

impl Caller {
    /// The running process, with the objects of its own namespace.
    pub fn current() -> Self {
        let credentials = current_process().credentials.borrow_mut().clone();
        Self { credentials, owner: namespace::own().common.owner().clone() }
    }

    fn can(&self, capability: Capabilities) -> bool {
        self.credentials.can_in(&self.owner, capability)
    }
}

impl Deref for Caller {
    type Target = Credentials;

    fn deref(&self) -> &Credentials {
        &self.credentials
    }
}

/// Who owns an object, and what others may do.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Permissions {
    /// Key, or 0 ([`super::IPC_PRIVATE`]).
    pub key: i32,
    /// Owner.
    pub uid: u32,
    /// Group of the owner.
    pub gid: u32,
    /// Who made it.
    pub creator_uid: u32,
    /// Group of who made it.
    pub creator_gid: u32,
    /// Permission bits.
    pub mode: u32,
}

impl Permissions {
    /// Of an object that `caller` makes.
    pub fn new(key: i32, mode: u32, caller: &Caller) -> Self {
        let (uid, gid) = (caller.euid, caller.egid);
        Self { key, uid, gid, creator_uid: uid, creator_gid: gid, mode: mode & MODE_MASK }
    }

    /// `EACCES` unless `caller` may do what `wanted` says in any of its digits.
    pub fn check(&self, wanted: u32, caller: &Caller) -> Result<()> {
        let in_group = |gid| caller.egid == gid || caller.groups.contains(&gid);
        let granted = if [self.uid, self.creator_uid].contains(&caller.euid) {
            self.mode >> 6
        } else if in_group(self.gid) || in_group(self.creator_gid) {
            self.mode >> 3
        } else {
            self.mode
        };
        let wanted = wanted | wanted >> 3 | wanted >> 6;
        let may = caller.can(Capabilities::IPC_OWNER) || wanted & !granted & 7 == 0;
        if may { Ok(()) } else { Err(Errno::EACCES) }
    }

    /// `EPERM` unless `caller` may change or remove the object.
    pub fn check_owner(&self, caller: &Caller) -> Result<()> {
        let may = caller.can(Capabilities::SYS_ADMIN)
            || [self.uid, self.creator_uid].contains(&caller.euid);
        if may { Ok(()) } else { Err(Errno::EPERM) }
    }

    /// `IPC_SET`: takes owner and mode over; `EINVAL` for an id that is none of the user namespace.
    pub fn update(&mut self, from: &UserPermissions, users: &UserNamespace) -> Result<()> {
        let uid = users.user(from.uid).ok_or(Errno::EINVAL)?;
        let gid = users.group(from.gid).ok_or(Errno::EINVAL)?;
        (self.uid, self.gid, self.mode) = (uid, gid, from.mode & MODE_MASK);
        Ok(())
    }

    /// As those in a user namespace see it, of the object with an id.
    pub fn to_user(self, id: i32, users: &UserNamespace) -> UserPermissions {
        UserPermissions {
            key: self.key,
            uid: users.shown_user(self.uid),
            gid: users.shown_group(self.gid),
            creator_uid: users.shown_user(self.creator_uid),
            creator_gid: users.shown_group(self.creator_gid),
            mode: self.mode,
            sequence: super::registry::sequence_of(id),
            ..UserPermissions::zeroed()
        }
    }
}

/// `struct ipc64_perm` of the x86-64 ABI.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
#[allow(missing_docs)]
pub struct UserPermissions {
    pub key: i32,
    pub uid: u32,
    pub gid: u32,
    pub creator_uid: u32,
    pub creator_gid: u32,
    pub mode: u32,
    pub sequence: u16,
    pub pad: [u16; 3],
    pub unused: [u64; 2],
}

#[cfg(test)]
mod tests {
    use super::*;

    fn user(euid: u32, egid: u32, groups: &[u32]) -> Caller {
        let credentials =
            Credentials { groups: groups.to_vec(), ..Credentials::of_user(euid, egid) };
        Caller { credentials, owner: UserNamespace::INITIAL }
    }

    #[test]
    fn owner_group_and_others_are_told_apart() {
        let object = Permissions::new(1, 0o1640, &user(10, 20, &[]));
        assert_eq!(object.mode, 0o640);
        let may = |wanted, caller: &Caller| object.check(wanted, caller).is_ok();
        assert!(may(READ | WRITE, &user(10, 1, &[])));
        assert!(may(READ, &user(11, 20, &[])) && !may(WRITE, &user(11, 20, &[])));
        assert!(may(READ, &user(11, 1, &[20])) && !may(READ, &user(11, 1, &[])));
        assert!(may(WRITE | EXECUTE, &user(0, 0, &[])));
        assert_eq!(object.check_owner(&user(11, 20, &[])), Err(Errno::EPERM));
    }

    #[test]
    fn owner_and_mode_change_but_not_the_creator() {
        let mut object = Permissions::new(1, 0o600, &user(10, 20, &[]));
        let users = UserNamespace::INITIAL;
        let mut wanted =
            UserPermissions { uid: 30, gid: 40, mode: 0o7777, ..object.to_user(5, &users) };
        assert_eq!(object.update(&wanted, &users), Ok(()));
        assert_eq!((object.uid, object.creator_uid, object.mode), (30, 10, 0o777));
        wanted.uid = u32::MAX;
        assert_eq!(object.update(&wanted, &users), Err(Errno::EINVAL));
        assert_eq!(size_of::<UserPermissions>(), 48);
    }
}
