//! User namespaces (user_namespaces(7)).
//!
//! Credentials, inodes and the like hold ids of the initial namespace. System calls translate
//! between these and those of the caller's namespace.

use alloc::sync::Arc;
use alloc::vec::Vec;
use core::fmt;

use super::Credentials;
use super::namespace::{Common, Kind};
use crate::errno::{Errno, Result};
use crate::sync::KernelCell;

/// What an id is shown as that a namespace does not know (`/proc/sys/kernel/overflowuid`).
pub const OVERFLOW_ID: u32 = 65534;

/// Deepest level of a namespace below the initial one.
const LEVEL_MAX: u32 = 32;

/// Lines of a map.
const EXTENTS_MAX: usize = 340;

/// The number that is no id.
const NO_ID: u32 = u32::MAX;

/// A user namespace. The initial one takes no memory, so processes in it pay for a branch at most.
#[derive(Clone, Default)]
pub struct UserNamespace(Option<Arc<Inner>>);

struct Inner {
    /// Number and parent.
    common: Common,
    /// Its distance from the initial one.
    level: u32,
    /// The effective user and group of who made it.
    owner: (u32, u32),
    /// Whether who made it had `CAP_SETFCAP` (a map of the parent's root asks for it).
    may_map_root: bool,
    users: KernelCell<Map>,
    groups: KernelCell<Map>,
    projects: KernelCell<Map>,
    allows_setgroups: KernelCell<bool>,
}

/// Which ids a map is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ids {
    /// `uid_map`.
    Users,
    /// `gid_map`.
    Groups,
    /// `projid_map`.
    Projects,
}

/// A map of ids: none, until it is written.
#[derive(Clone, Debug, Default)]
struct Map(Vec<Extent>);

/// A line of a map.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Extent {
    /// First id in the namespace.
    inside: u32,
    /// First id in the initial namespace.
    global: u32,
    count: u32,
}

/// `id` moved from the range at `from` to that at `to`.
fn moved(id: u32, from: u32, to: u32, count: u32) -> Option<u32> {
    let offset = id.checked_sub(from)?;
    if offset < count { to.checked_add(offset) } else { None }
}

impl Map {
    fn to_global(&self, id: u32) -> Option<u32> {
        self.0.iter().find_map(|it| moved(id, it.inside, it.global, it.count))
    }

    fn from_global(&self, id: u32) -> Option<u32> {
        self.0.iter().find_map(|it| moved(id, it.global, it.inside, it.count))
    }
}

impl fmt::Debug for UserNamespace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "user:[{}]", self.ino())
    }
}

impl PartialEq for UserNamespace {
    fn eq(&self, other: &Self) -> bool {
        match (&self.0, &other.0) {
            (None, None) => true,
            (Some(own), Some(other)) => Arc::ptr_eq(own, other),
            _ => false,
        }
    }
}

impl UserNamespace {
    /// The one of the sandbox's first process.
    pub const INITIAL: Self = Self(None);

    /// Whether it is that one, which knows all ids.
    pub fn is_initial(&self) -> bool {
        self.0.is_none()
    }

    /// A child of the namespace of `maker`, without maps (`create_user_ns`,
    /// kernel/user_namespace.c). `ENOSPC`: too deep, or too many. `EPERM`: the namespace does not
    /// know who makes it.
    pub fn create(maker: &Credentials) -> Result<Self> {
        let parent = &maker.user_namespace;
        let level = parent.level() + 1;
        if level > LEVEL_MAX {
            return Err(Errno::ENOSPC);
        }
        if !parent.knows_user(maker.euid) || !parent.knows_group(maker.egid) {
            return Err(Errno::EPERM);
        }
        let inner = Inner {
            common: Common::new(Kind::User, parent)?,
            level,
            owner: (maker.euid, maker.egid),
            may_map_root: maker.can_in_own(super::Capabilities::SETFCAP),
            users: KernelCell::default(),
            groups: KernelCell::default(),
            projects: KernelCell::default(),
            allows_setgroups: KernelCell::new(parent.allows_setgroups()),
        };
        Ok(Self(Some(Arc::new(inner))))
    }

    /// Its inode number.
    pub fn ino(&self) -> u64 {
        self.0.as_ref().map_or(Kind::User.first_ino(), |inner| inner.common.ino())
    }

    /// Its distance from the initial one.
    pub fn level(&self) -> u32 {
        self.0.as_ref().map_or(0, |inner| inner.level)
    }

    /// The namespace that it was made in.
    pub fn parent(&self) -> Option<&UserNamespace> {
        self.0.as_ref().map(|inner| inner.common.owner())
    }

    /// Who made it.
    pub fn owner(&self) -> u32 {
        self.0.as_ref().map_or(0, |inner| inner.owner.0)
    }

    /// Whether it is `other`, or below it.
    pub fn is_within(&self, other: &UserNamespace) -> bool {
        let mut at = Some(self);
        while let Some(namespace) = at {
            if namespace == other {
                return true;
            }
            at = namespace.parent();
        }
        false
    }

    /// Whether setgroups(2) may be called at all.
    pub fn allows_setgroups(&self) -> bool {
        self.0.as_ref().is_none_or(|inner| inner.allows_setgroups.get())
    }

    /// The user that an id of this namespace stands for.
    pub fn user(&self, id: u32) -> Option<u32> {
        self.to_global(Ids::Users, id)
    }

    /// The group that an id of this namespace stands for.
    pub fn group(&self, id: u32) -> Option<u32> {
        self.to_global(Ids::Groups, id)
    }

    /// The id of a user here.
    pub fn shown_user(&self, global: u32) -> u32 {
        if self.is_initial() { global } else { self.shown(Ids::Users, global) }
    }

    /// The id of a group here.
    pub fn shown_group(&self, global: u32) -> u32 {
        if self.is_initial() { global } else { self.shown(Ids::Groups, global) }
    }

    fn shown(&self, ids: Ids, global: u32) -> u32 {
        self.from_global(ids, global).unwrap_or(OVERFLOW_ID)
    }

    /// Whether a user has an id here.
    pub fn knows_user(&self, global: u32) -> bool {
        self.from_global(Ids::Users, global).is_some()
    }

    /// Whether a group has an id here.
    pub fn knows_group(&self, global: u32) -> bool {
        self.from_global(Ids::Groups, global).is_some()
    }

    fn to_global(&self, ids: Ids, id: u32) -> Option<u32> {
        match &self.0 {
            _ if id == NO_ID => None,
            None => Some(id),
            Some(inner) => inner.cell(ids).borrow_mut().to_global(id),
        }
    }

    fn from_global(&self, ids: Ids, id: u32) -> Option<u32> {
        match &self.0 {
            _ if id == NO_ID => None,
            None => Some(id),
            Some(inner) => inner.cell(ids).borrow_mut().from_global(id),
        }
    }
}

impl Inner {
    fn cell(&self, ids: Ids) -> &KernelCell<Map> {
        match ids {
            Ids::Users => &self.users,
            Ids::Groups => &self.groups,
            Ids::Projects => &self.projects,
        }
    }
}
