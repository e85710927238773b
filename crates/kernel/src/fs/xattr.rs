//! Extended attributes (xattr(7)), as tmpfs has them: `user.*`, `trusted.*` and
//! `security.*`, in memory.

use alloc::boxed::Box;
use alloc::collections::BTreeMap;
use alloc::vec::Vec;

use super::inode::{FileType, Inode, S_ISVTX};
use super::permission::{Access, Identity};
use crate::errno::{Errno, Result};
use crate::sync::KernelCell;
use crate::task::Capabilities;

/// `XATTR_NAME_MAX`.
pub const NAME_MAX: usize = 255;
/// `XATTR_SIZE_MAX`.
pub const SIZE_MAX: usize = 65536;
/// Most bytes of names and values of one file: what the kernel's heap can bear
/// whoever asks for it.
const TOTAL_MAX: usize = 1 << 20;

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
    /// The value of an attribute; `ENODATA`.
    pub fn get(&self, name: &[u8]) -> Result<Vec<u8>> {
        self.by_name.borrow_mut().get(name).map(|value| value.to_vec()).ok_or(Errno::ENODATA)
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
        if used + name.len() + value.len() > TOTAL_MAX {
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
    if name.starts_with(b"security.")
        && usage == Use::Write
        && !identity.can(Capabilities::SYS_ADMIN)
    {
        return Err(Errno::EPERM);
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
