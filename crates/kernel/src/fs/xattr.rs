//! Extended attributes (xattr(7)), as tmpfs has them: `user.*`, `trusted.*` and
//! `security.*`, in memory. Files begin with those that the lower layer has.

use alloc::boxed::Box;
use alloc::collections::BTreeMap;
use alloc::vec::Vec;

pub use thaw_abi::extended::{CAPABILITY, LIST_MAX, NAME_MAX, VALUE_MAX};
use thaw_abi::extended::{FILE_MAX, FileCapabilities};

use super::inode::{FileType, Inode, S_ISVTX};
use super::lower::{Lower, LowerId};
use super::permission::{Access, Identity};
use crate::errno::{Errno, Result};
use crate::sync::KernelCell;
use crate::task::Capabilities;

/// Values by name.
type ByName = BTreeMap<Box<[u8]>, Box<[u8]>>;

/// The attributes of one file.
#[derive(Default)]
pub struct ExtendedAttributes {
    by_name: KernelCell<ByName>,
}

/// What must be true of an attribute that is set.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Existing {
    /// Nothing.
    Any,
    /// It is new (`XATTR_CREATE`).
    Absent,
    /// It is there (`XATTR_REPLACE`).
    Present,
}

impl ExtendedAttributes {
    /// Those of a file of the lower layer, which are copied: they are few and small.
    pub fn of_lower(lower: &dyn Lower, id: LowerId) -> Self {
        let mut by_name = ByName::new();
        lower.extended(id, &mut |name, value| {
            by_name.insert(name.into(), value.into());
        });
        Self { by_name: KernelCell::new(by_name) }
    }

    /// The capabilities of the file; `EINVAL` if it has some that make no sense.
    pub fn capabilities(&self) -> Result<Option<FileCapabilities>> {
        match self.by_name.borrow_mut().get(CAPABILITY) {
            Some(value) => FileCapabilities::parse(value).map(Some).ok_or(Errno::EINVAL),
            None => Ok(None),
        }
    }

    /// Takes the capabilities of the file away; says whether it had some.
    pub fn remove_capabilities(&self) -> bool {
        self.by_name.borrow_mut().remove(CAPABILITY).is_some()
    }

    /// The value of an attribute; `ENODATA`.
    pub fn get(&self, name: &[u8]) -> Result<Vec<u8>> {
        let all = self.by_name.borrow_mut();
        let value = all.get(name).ok_or(Errno::ENODATA)?;
        Ok(if name == CAPABILITY { shown_capabilities(value) } else { value.to_vec() })
    }

    /// Sets an attribute; `EEXIST`, `ENODATA`, `ENOSPC`.
    pub fn set(&self, name: &[u8], value: &[u8], existing: Existing) -> Result<()> {
        let mut all = self.by_name.borrow_mut();
        match (existing, all.contains_key(name)) {
            (Existing::Absent, true) => return Err(Errno::EEXIST),
            (Existing::Present, false) => return Err(Errno::ENODATA),
            _ => {}
        }
        let used: usize = all.iter().map(|(name, value)| name.len() + value.len()).sum();
        if used + name.len() + value.len() > FILE_MAX {
            return Err(Errno::ENOSPC);
        }
        all.insert(name.into(), value.into());
        Ok(())
    }

    /// Removes an attribute; `ENODATA`.
    pub fn remove(&self, name: &[u8]) -> Result<()> {
        self.by_name.borrow_mut().remove(name).map(drop).ok_or(Errno::ENODATA)
    }

    /// The names, each terminated. `trusted.*` takes `CAP_SYS_ADMIN`.
    pub fn list(&self, identity: &Identity) -> Vec<u8> {
        let all = self.by_name.borrow_mut();
        let shown = all
            .keys()
            .filter(|name| !name.starts_with(b"trusted.") || identity.can(Capabilities::SYS_ADMIN));
        shown.flat_map(|name| name.iter().copied().chain([0])).collect()
    }
}

/// Whether a program may set capabilities of a file to this (`validheader`,
/// security/commoncap.c).
pub fn is_capability_value(value: &[u8]) -> bool {
    FileCapabilities::parse(value).is_some()
}

/// Capabilities as a program reads them: those of the user 0 have no user
/// (`cap_inode_getsecurity`, security/commoncap.c).
fn shown_capabilities(value: &[u8]) -> Vec<u8> {
    const REVISION_2: u8 = 2;
    const LEN_2: usize = 20;
    let mut value = value.to_vec();
    if FileCapabilities::parse(&value).is_some_and(|file| file.root == 0) {
        value.truncate(LEN_2);
        value[3] = REVISION_2;
    }
    value
}

/// Whether and how an attribute is about to be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Use {
    /// It is read.
    Read,
    /// It is set or removed.
    Write,
}

/// Where the attributes of a file are, if the caller may use `name` in this way
/// (`xattr_permission` and `xattr_resolve_name`, fs/xattr.c).
pub fn attributes<'i>(
    identity: &Identity,
    inode: &'i dyn Inode,
    name: &[u8],
    usage: Use,
) -> Result<&'i ExtendedAttributes> {
    let kind = inode.file_type();
    if name.starts_with(b"trusted.") && !identity.can(Capabilities::SYS_ADMIN) {
        return Err(if usage == Use::Read { Errno::ENODATA } else { Errno::EPERM });
    }
    if name.starts_with(b"user.") {
        let refused = if usage == Use::Read { Errno::ENODATA } else { Errno::EPERM };
        if !matches!(kind, FileType::Regular | FileType::Directory) {
            return Err(refused);
        }
        let attributes = inode.attributes();
        if kind == FileType::Directory
            && attributes.mode & S_ISVTX != 0
            && usage == Use::Write
            && !identity.owns(&attributes)
        {
            return Err(refused);
        }
        identity.check(inode, if usage == Use::Read { Access::READ } else { Access::WRITE })?;
    }
    if name.starts_with(b"security.") && usage == Use::Write {
        let needed = match name {
            CAPABILITY => Capabilities::SETFCAP,
            _ => Capabilities::SYS_ADMIN,
        };
        if !identity.can(needed) {
            return Err(Errno::EPERM);
        }
    }
    let all = inode.extended_attributes().ok_or(Errno::EOPNOTSUPP)?;
    let known = [&b"user."[..], b"trusted.", b"security."];
    let prefix = known.iter().find(|prefix| name.starts_with(prefix)).ok_or(Errno::EOPNOTSUPP)?;
    if name.len() == prefix.len() { Err(Errno::EINVAL) } else { Ok(all) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fs::tests::World;

    #[test]
    fn names_have_rules_of_their_own() {
        let mut world = World::new();
        let file = world.walk("/etc/motd").unwrap();
        let link = world.walk_nofollow("/lib").unwrap();
        let root = Identity::default();
        let check = |identity: &Identity, name: &str, usage| {
            attributes(identity, &**file.inode(), name.as_bytes(), usage).map(drop)
        };
        assert_eq!(check(&root, "user.a", Use::Write), Ok(()));
        assert_eq!(check(&root, "user.", Use::Write), Err(Errno::EINVAL));
        assert_eq!(check(&root, "other.a", Use::Read), Err(Errno::EOPNOTSUPP));
        world.become_user(7);
        let user = &world.context.identity;
        assert_eq!(check(user, "user.a", Use::Write), Err(Errno::EACCES));
        assert_eq!(check(user, "user.a", Use::Read), Ok(()));
        assert_eq!(check(user, "trusted.a", Use::Read), Err(Errno::ENODATA));
        assert_eq!(check(user, "trusted.a", Use::Write), Err(Errno::EPERM));
        assert_eq!(check(user, "security.a", Use::Write), Err(Errno::EPERM));
        let on_link = attributes(&root, &**link.inode(), b"user.a", Use::Write);
        assert_eq!(on_link.map(drop), Err(Errno::EPERM));
    }

    #[test]
    fn capabilities_take_a_capability_of_their_own() {
        let world = World::new();
        let file = world.walk("/etc/motd").unwrap();
        let with = |capabilities| Identity { capabilities, ..Identity::default() };
        let check = |identity: &Identity, name: &[u8]| {
            attributes(identity, &**file.inode(), name, Use::Write).map(drop)
        };
        assert_eq!(check(&with(Capabilities::SETFCAP), CAPABILITY), Ok(()));
        assert_eq!(check(&with(Capabilities::SETFCAP), b"security.a"), Err(Errno::EPERM));
        assert_eq!(check(&with(Capabilities::SYS_ADMIN), CAPABILITY), Err(Errno::EPERM));
        let all = ExtendedAttributes::default();
        assert_eq!(all.capabilities(), Ok(None));
        let mut value = [0; 24];
        (value[3], value[4]) = (3, 1);
        all.set(CAPABILITY, &value, Existing::Any).unwrap();
        assert_eq!(all.get(CAPABILITY).unwrap(), [&[0, 0, 0, 2, 1][..], &[0; 15]].concat());
        assert_eq!(all.capabilities().unwrap().map(|file| file.permitted), Some(1));
        value[20] = 7;
        all.set(CAPABILITY, &value, Existing::Any).unwrap();
        assert_eq!(all.get(CAPABILITY).unwrap(), value);
        all.set(CAPABILITY, b"?", Existing::Any).unwrap();
        assert_eq!(all.capabilities(), Err(Errno::EINVAL));
        assert!(all.remove_capabilities() && !all.remove_capabilities());
    }

    #[test]
    fn attributes_are_created_replaced_and_removed() {
        let all = ExtendedAttributes::default();
        assert_eq!(all.set(b"user.a", b"1", Existing::Present), Err(Errno::ENODATA));
        all.set(b"user.a", b"1", Existing::Absent).unwrap();
        assert_eq!(all.set(b"user.a", b"2", Existing::Absent), Err(Errno::EEXIST));
        all.set(b"user.a", b"2", Existing::Present).unwrap();
        all.set(b"trusted.b", b"", Existing::Any).unwrap();
        assert_eq!(all.get(b"user.a").unwrap(), b"2");
        let root = Identity { capabilities: Capabilities::ALL, ..Identity::default() };
        assert_eq!(all.list(&root), b"trusted.b\0user.a\0");
        assert_eq!(all.list(&Identity::default()), b"user.a\0");
        let big = [0; 65536];
        for number in 0..15u8 {
            all.set(&[b'u', number], &big, Existing::Any).unwrap();
        }
        assert_eq!(all.set(b"user.full", &big, Existing::Any), Err(Errno::ENOSPC));
        all.remove(b"user.a").unwrap();
        assert_eq!(all.remove(b"user.a"), Err(Errno::ENODATA));
    }
}
