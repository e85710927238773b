//! User namespaces (user_namespaces(7)).
//!
//! Credentials, inodes and the like hold ids of the initial namespace. System calls translate
//! between these and those of the caller's namespace.

use alloc::string::String;
use alloc::sync::Arc;
use alloc::vec::Vec;
use core::fmt;

use super::namespace::{Common, KINDS, Kind, NAMESPACES_MAX};
use super::{Capabilities, Credentials};
use crate::errno::{Errno, Result};
use crate::sync::KernelCell;

/// What an id is shown as that a namespace does not know (`/proc/sys/kernel/overflowuid`).
pub const OVERFLOW_ID: u32 = 65534;

/// Deepest level below the initial namespace at which others can be made (`create_user_ns`).
const LEVEL_MAX: u32 = 32;

/// Lines of a map.
const EXTENTS_MAX: usize = 340;

/// The number that is no id.
pub const NO_ID: u32 = u32::MAX;

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
    /// The namespaces made in it and in those below, by kind.
    quotas: KernelCell<[Quota; KINDS]>,
}

/// How many namespaces there are, and how many there may be (`/proc/sys/user`).
#[derive(Clone, Copy)]
struct Quota {
    used: u32,
    max: u32,
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
    fn global(&self, id: u32) -> Option<u32> {
        self.0.iter().find_map(|it| moved(id, it.inside, it.global, it.count))
    }

    fn id_of(&self, id: u32) -> Option<u32> {
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
        if parent.level() > LEVEL_MAX {
            return Err(Errno::ENOSPC);
        }
        if !parent.knows_user(maker.euid) || !parent.knows_group(maker.egid) {
            return Err(Errno::EPERM);
        }
        let inner = Inner {
            common: Common::new(Kind::User, parent)?,
            level,
            owner: (maker.euid, maker.egid),
            may_map_root: maker.can_in_own(Capabilities::SETFCAP),
            users: KernelCell::default(),
            groups: KernelCell::default(),
            projects: KernelCell::default(),
            allows_setgroups: KernelCell::new(parent.allows_setgroups()),
            quotas: KernelCell::new([Quota { used: 0, max: i32::MAX as u32 }; KINDS]),
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

    /// How many namespaces of a kind may be made in it, and in those below.
    pub fn namespaces_max(&self, kind: Kind) -> u32 {
        match &self.0 {
            Some(inner) => inner.quotas.borrow_mut()[kind as usize].max,
            None if kind == Kind::Time => 0,
            None => NAMESPACES_MAX,
        }
    }

    /// Changes that. `EROFS` in the initial one, where it stays.
    pub fn set_namespaces_max(&self, kind: Kind, max: u32) -> Result<()> {
        match &self.0 {
            Some(inner) => inner.quotas.borrow_mut()[kind as usize].max = max,
            None if max != self.namespaces_max(kind) => return Err(Errno::EROFS),
            None => {}
        }
        Ok(())
    }

    /// It and those above, without the initial one.
    fn chain(&self) -> impl Iterator<Item = &Arc<Inner>> {
        core::iter::successors(self.0.as_ref(), |inner| inner.common.owner().0.as_ref())
    }

    /// Counts a namespace that is made in it. `ENOSPC` if it or one above may not have more (`inc_ucount`,
    /// kernel/ucount.c, where each user has a count).
    pub(super) fn count_namespace(&self, kind: Kind) -> Result<()> {
        let is_full = |inner: &Arc<Inner>| {
            let quota = inner.quotas.borrow_mut()[kind as usize];
            quota.used >= quota.max
        };
        if self.chain().any(is_full) {
            return Err(Errno::ENOSPC);
        }
        self.chain().for_each(|inner| inner.quotas.borrow_mut()[kind as usize].used += 1);
        Ok(())
    }

    /// Such a namespace has ended.
    pub(super) fn namespace_is_gone(&self, kind: Kind) {
        self.chain().for_each(|inner| inner.quotas.borrow_mut()[kind as usize].used -= 1);
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

    /// Whether groups have ids here already.
    pub fn has_groups(&self) -> bool {
        self.0.as_ref().is_none_or(|inner| !inner.groups.borrow_mut().0.is_empty())
    }

    /// A map as `/proc/PID/uid_map` shows it to somebody in a user namespace: with the ids of the
    /// reader's namespace, or of the parent if that is this one.
    pub fn shown_map(&self, ids: Ids, reader: &UserNamespace) -> Vec<u8> {
        let whole = Map(Vec::from([Extent { inside: 0, global: 0, count: NO_ID }]));
        let map = self.0.as_ref().map_or(whole, |inner| inner.cell(ids).borrow_mut().clone());
        let lower = match self.parent() {
            Some(parent) if reader == self => parent,
            _ => reader,
        };
        let mut text = String::new();
        for Extent { inside, global, count } in map.0 {
            let outside = lower.id_of(ids, global).unwrap_or(NO_ID);
            text += &alloc::format!("{inside:>10} {outside:>10} {count:>10}\n");
        }
        text.into_bytes()
    }

    /// Writes a map, which can be done once (`map_write`, kernel/user_namespace.c). Both who has
    /// opened the file and who writes need the right.
    pub fn write_map(
        &self,
        ids: Ids,
        text: &[u8],
        opener: &Credentials,
        writer: &Credentials,
    ) -> Result<()> {
        let (Some(inner), Some(parent)) = (&self.0, self.parent()) else {
            return Err(Errno::EPERM);
        };
        if opener.user_namespace != *self && opener.user_namespace != *parent {
            return Err(Errno::EPERM);
        }
        let is_written = !inner.cell(ids).borrow_mut().0.is_empty();
        let may_administer = opener.can_in(self, Capabilities::SYS_ADMIN);
        if is_written || ids != Ids::Projects && !may_administer {
            return Err(Errno::EPERM);
        }
        let lines = parse_map(text)?;
        if !self.may_map(ids, &lines, opener, writer) {
            return Err(Errno::EPERM);
        }
        let global = |line: &Extent| parent.range_to_global(ids, line);
        let map = lines.iter().map(global).collect::<Option<Vec<_>>>().ok_or(Errno::EPERM)?;
        *inner.cell(ids).borrow_mut() = Map(map);
        Ok(())
    }

    /// Whether these lines may become a map (`new_idmap_permitted`). Their ids outside are those of
    /// the parent.
    fn may_map(
        &self,
        ids: Ids,
        lines: &[Extent],
        opener: &Credentials,
        writer: &Credentials,
    ) -> bool {
        let Some(parent) = self.parent() else { return false };
        let maps_root = lines.iter().any(|line| line.global == 0);
        if ids == Ids::Users && maps_root && !self.may_map_root(opener, parent) {
            return false;
        }
        // Whoever has made the namespace may map their own id.
        if let [Extent { global: id, count: 1, .. }] = lines
            && self.owner() == opener.euid
        {
            let is_own = match ids {
                Ids::Users => parent.user(*id) == Some(opener.euid),
                Ids::Groups => !self.allows_setgroups() && parent.group(*id) == Some(opener.egid),
                Ids::Projects => false,
            };
            if is_own {
                return true;
            }
        }
        let needed = match ids {
            Ids::Users => Capabilities::SETUID,
            Ids::Groups => Capabilities::SETGID,
            Ids::Projects => return true,
        };
        writer.can_in(parent, needed) && opener.can_in(parent, needed)
    }

    /// `verify_root_map`: capabilities of files of the parent's root would count for the new one.
    fn may_map_root(&self, opener: &Credentials, parent: &UserNamespace) -> bool {
        match &self.0 {
            Some(inner) if opener.user_namespace == *self => inner.may_map_root,
            _ => opener.can_in(parent, Capabilities::SETFCAP),
        }
    }

    /// A line whose ids outside are those of this namespace, with those of the initial one instead.
    fn range_to_global(&self, ids: Ids, line: &Extent) -> Option<Extent> {
        let Some(inner) = &self.0 else { return Some(*line) };
        let map = inner.cell(ids).borrow_mut();
        let last = line.global.checked_add(line.count - 1)?;
        let holds = |it: &&Extent| {
            let end = moved(last, it.inside, it.global, it.count);
            moved(line.global, it.inside, it.global, it.count).is_some() && end.is_some()
        };
        let within = map.0.iter().find(holds)?;
        let global = moved(line.global, within.inside, within.global, within.count)?;
        Some(Extent { global, ..*line })
    }

    /// Allows or denies setgroups(2) (`proc_setgroups_write`).
    pub fn write_setgroups(&self, text: &[u8]) -> Result<()> {
        const LENGTH_MAX: usize = 8;
        let word = text.trim_ascii_end();
        let allows = match word {
            _ if text.len() >= LENGTH_MAX => return Err(Errno::EINVAL),
            b"allow" => true,
            b"deny" => false,
            _ => return Err(Errno::EINVAL),
        };
        match &self.0 {
            _ if allows && self.allows_setgroups() => Ok(()),
            Some(inner) if !allows && !self.has_groups() => {
                inner.allows_setgroups.set(false);
                Ok(())
            }
            _ => Err(Errno::EPERM),
        }
    }

    /// Whether setgroups(2) may be called at all.
    pub fn allows_setgroups(&self) -> bool {
        self.0.as_ref().is_none_or(|inner| inner.allows_setgroups.get())
    }

    /// The user that is the superuser here; [`NO_ID`] if none is.
    pub fn root(&self) -> u32 {
        self.user(0).unwrap_or(NO_ID)
    }

    /// The user that an id of this namespace stands for.
    pub fn user(&self, id: u32) -> Option<u32> {
        self.global(Ids::Users, id)
    }

    /// The group that an id of this namespace stands for.
    pub fn group(&self, id: u32) -> Option<u32> {
        self.global(Ids::Groups, id)
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
        self.id_of(ids, global).unwrap_or(OVERFLOW_ID)
    }

    /// Whether a user has an id here.
    pub fn knows_user(&self, global: u32) -> bool {
        self.id_of(Ids::Users, global).is_some()
    }

    /// Whether a group has an id here.
    pub fn knows_group(&self, global: u32) -> bool {
        self.id_of(Ids::Groups, global).is_some()
    }

    fn global(&self, ids: Ids, id: u32) -> Option<u32> {
        match &self.0 {
            _ if id == NO_ID => None,
            None => Some(id),
            Some(inner) => inner.global(ids, id),
        }
    }

    fn id_of(&self, ids: Ids, id: u32) -> Option<u32> {
        match &self.0 {
            _ if id == NO_ID => None,
            None => Some(id),
            Some(inner) => inner.id_of(ids, id),
        }
    }
}

/// The lines of a map, whose ids outside are those of whom it is for; `EINVAL`.
fn parse_map(text: &[u8]) -> Result<Vec<Extent>> {
    let text = core::str::from_utf8(text).map_err(|_| Errno::EINVAL)?;
    let mut lines: Vec<Extent> = Vec::new();
    for line in text.strip_suffix('\n').unwrap_or(text).split('\n') {
        let mut words = line.split_ascii_whitespace().map(str::parse::<u32>);
        let mut next = || words.next().and_then(|word| word.ok()).ok_or(Errno::EINVAL);
        let new = Extent { inside: next()?, global: next()?, count: next()? };
        let fits = |first: u32| first != NO_ID && first.checked_add(new.count).is_some();
        let is_line = words.next().is_none() && new.count > 0;
        let overlaps = |old: &Extent| new.overlaps(old);
        if !is_line || !fits(new.inside) || !fits(new.global) || lines.iter().any(overlaps) {
            return Err(Errno::EINVAL);
        }
        if lines.len() == EXTENTS_MAX {
            return Err(Errno::EINVAL);
        }
        lines.push(new);
    }
    Ok(lines)
}

impl Extent {
    /// Whether two lines, whose ends do not overflow, have an id in common on either side.
    fn overlaps(&self, other: &Self) -> bool {
        let meets = |own: u32, theirs: u32| own < theirs + other.count && theirs < own + self.count;
        meets(self.inside, other.inside) || meets(self.global, other.global)
    }
}

impl Inner {
    #[inline(never)]
    fn global(&self, ids: Ids, id: u32) -> Option<u32> {
        self.cell(ids).borrow_mut().global(id)
    }

    #[inline(never)]
    fn id_of(&self, ids: Ids, id: u32) -> Option<u32> {
        self.cell(ids).borrow_mut().id_of(id)
    }

    fn cell(&self, ids: Ids) -> &KernelCell<Map> {
        match ids {
            Ids::Users => &self.users,
            Ids::Groups => &self.groups,
            Ids::Projects => &self.projects,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::Sandbox;

    fn line(inside: u32, global: u32, count: u32) -> Extent {
        Extent { inside, global, count }
    }

    #[test]
    fn maps_are_read_as_linux_does() {
        assert_eq!(parse_map(b"0 1000 1"), Ok(Vec::from([line(0, 1000, 1)])));
        let two = Vec::from([line(0, 1000, 1), line(1, 100000, 65536)]);
        assert_eq!(parse_map(b"  0 1000 1\n1 100000 65536\n"), Ok(two));
        let refused: [&[u8]; 8] = [
            b"",
            b"0 1000",
            b"0 1000 0",
            b"0 1000 1 1",
            b"4294967295 0 1",
            b"1 0 4294967295",
            b"0 1000 2\n1 2000 1",
            b"0 1000 2\n5 1001 1",
        ];
        for text in refused {
            assert_eq!(parse_map(text), Err(Errno::EINVAL), "{text:?}");
        }
        let many =
            |lines: usize| (0..lines).map(|at| alloc::format!("{at} {at} 1\n")).collect::<String>();
        assert!(parse_map(many(EXTENTS_MAX).as_bytes()).is_ok());
        assert_eq!(parse_map(many(EXTENTS_MAX + 1).as_bytes()), Err(Errno::EINVAL));
    }

    #[test]
    fn ids_that_are_not_mapped_have_none() {
        let map = Map(Vec::from([line(0, 1000, 1), line(10, 2000, 5)]));
        assert_eq!((map.global(0), map.global(14)), (Some(1000), Some(2004)));
        assert_eq!((map.global(1), map.global(15)), (None, None));
        assert_eq!((map.id_of(1000), map.id_of(2000)), (Some(0), Some(10)));
        assert_eq!(map.id_of(0), None);
    }

    #[test]
    fn capabilities_count_in_a_namespace_and_below() {
        let sandbox = Sandbox::new();
        let maker = Credentials::of_user(1000, 1000);
        sandbox.become_user(maker.clone());
        let child = UserNamespace::create(&maker).unwrap();
        let inside = maker.clone().in_namespace(child.clone());
        let admin = Capabilities::SYS_ADMIN;
        assert!(!inside.can(admin) && !inside.can_in(&UserNamespace::INITIAL, admin));
        assert!(inside.can_in_own(admin) && inside.can_in(&child, admin));
        // Who has made it has all capabilities in it, and other users have none.
        assert!(maker.can_in(&child, admin));
        assert!(!Credentials::of_user(1001, 1000).can_in(&child, admin));
        assert!(Credentials::of_user(0, 0).can_in(&child, admin));
        // Without a map, it knows nobody who could make another one.
        assert_eq!(UserNamespace::create(&inside).err(), Some(Errno::EPERM));
        child.write_map(Ids::Users, b"0 1000 1", &inside, &inside).unwrap();
        assert_eq!((child.root(), child.shown_user(1000), child.shown_user(0)), (1000, 0, 65534));
        let beside = maker.clone().in_namespace(UserNamespace::create(&maker).unwrap());
        assert!(!beside.can_in(&child, admin) && !inside.can_in(&beside.user_namespace, admin));
    }

    #[test]
    fn only_own_ids_are_mapped_without_capabilities() {
        let _sandbox = Sandbox::new();
        let maker = Credentials::of_user(1000, 1000);
        let child = UserNamespace::create(&maker).unwrap();
        let inside = maker.clone().in_namespace(child.clone());
        let write = |ids, text: &[u8], opener, writer| child.write_map(ids, text, opener, writer);
        let root = Credentials::of_user(0, 0);
        let refused = Err(Errno::EPERM);
        assert_eq!(write(Ids::Users, b"0 0 1", &inside, &inside), refused);
        assert_eq!(write(Ids::Users, b"0 1000 2", &inside, &inside), refused);
        // A program with more rights that writes what it was given to does not have them count.
        assert_eq!(write(Ids::Users, b"0 1000 2", &inside, &root), refused);
        assert_eq!(write(Ids::Groups, b"0 1000 1", &inside, &inside), refused);
        child.write_setgroups(b"deny\n").unwrap();
        assert_eq!(write(Ids::Groups, b"0 1000 1", &inside, &inside), Ok(()));
        assert_eq!(child.write_setgroups(b"allow"), refused);
        assert_eq!(write(Ids::Users, b"0 0 65536", &root, &root), Ok(()));
        assert_eq!(write(Ids::Users, b"0 0 65536", &root, &root), refused);
        let initial = UserNamespace::INITIAL;
        assert_eq!(initial.write_map(Ids::Users, b"0 0 1", &root, &root), refused);
    }

    #[test]
    fn a_limit_holds_in_a_namespace_and_below() {
        let _sandbox = Sandbox::new();
        let maker = Credentials::of_user(1000, 1000);
        let top = UserNamespace::create(&maker).unwrap();
        top.write_map(Ids::Users, b"0 1000 1", &maker, &maker).unwrap();
        top.write_setgroups(b"deny").unwrap();
        top.write_map(Ids::Groups, b"0 1000 1", &maker, &maker).unwrap();
        let inside = maker.clone().in_namespace(top.clone());
        assert_eq!(UserNamespace::INITIAL.set_namespaces_max(Kind::User, 1), Err(Errno::EROFS));
        top.set_namespaces_max(Kind::User, 1).unwrap();
        let below = UserNamespace::create(&inside).unwrap();
        assert_eq!(UserNamespace::create(&inside).err(), Some(Errno::ENOSPC));
        let deeper = inside.clone().in_namespace(below.clone());
        below.write_map(Ids::Users, b"0 0 1", &inside, &inside).unwrap();
        below.write_map(Ids::Groups, b"0 0 1", &inside, &inside).unwrap();
        assert_eq!(UserNamespace::create(&deeper).err(), Some(Errno::ENOSPC));
        assert!(Common::new(Kind::Uts, &below).is_ok() && UserNamespace::create(&maker).is_ok());
        drop((below, deeper));
        assert!(UserNamespace::create(&inside).is_ok());
    }

    #[test]
    fn namespaces_have_a_depth_and_a_number() {
        let _sandbox = Sandbox::new();
        let root = Credentials::of_user(0, 0);
        let mut deepest = root.clone();
        for _ in 0..=LEVEL_MAX {
            let child = UserNamespace::create(&deepest).unwrap();
            child.write_map(Ids::Users, b"0 0 1", &deepest, &deepest).unwrap();
            child.write_map(Ids::Groups, b"0 0 1", &deepest, &deepest).unwrap();
            deepest = deepest.in_namespace(child);
        }
        assert_eq!(UserNamespace::create(&deepest).err(), Some(Errno::ENOSPC));
        drop(deepest);
        let many: Vec<_> = core::iter::repeat_with(|| UserNamespace::create(&root))
            .take(NAMESPACES_MAX as usize)
            .collect::<Result<_>>()
            .unwrap();
        assert_eq!(UserNamespace::create(&root).err(), Some(Errno::ENOSPC));
        drop(many);
        assert!(UserNamespace::create(&root).is_ok());
    }
}
