//! System calls on user and group ids.

use core::ops::{Deref, DerefMut};

use crate::args::UserPtr;
use crate::errno::{Errno, Result};
use crate::sync::Borrowed;
use crate::task::{Capabilities, Credentials, Process, current_process};

/// Something that the credentials of the running process say.
fn told<T>(look: impl FnOnce(&Credentials) -> T) -> T {
    look(&current_process().credentials.borrow_mut())
}

/// getuid(2).
pub fn getuid() -> Result<u32> {
    Ok(told(|c| c.user_namespace.shown_user(c.uid)))
}
/// geteuid(2).
pub fn geteuid() -> Result<u32> {
    Ok(told(|c| c.user_namespace.shown_user(c.euid)))
}
/// getgid(2).
pub fn getgid() -> Result<u32> {
    Ok(told(|c| c.user_namespace.shown_group(c.gid)))
}
/// getegid(2).
pub fn getegid() -> Result<u32> {
    Ok(told(|c| c.user_namespace.shown_group(c.egid)))
}

/// getresuid(2).
pub fn getresuid(real: UserPtr<u32>, effective: UserPtr<u32>, saved: UserPtr<u32>) -> Result<()> {
    let ids = told(|c| c.users().map(|id| c.user_namespace.shown_user(id)));
    tell(ids, [real, effective, saved])
}

/// getresgid(2).
pub fn getresgid(real: UserPtr<u32>, effective: UserPtr<u32>, saved: UserPtr<u32>) -> Result<()> {
    let ids = told(|c| c.groups_of_process().map(|id| c.user_namespace.shown_group(id)));
    tell(ids, [real, effective, saved])
}

fn tell(ids: [u32; 3], to: [UserPtr<u32>; 3]) -> Result<()> {
    ids.iter().zip(to).try_for_each(|(id, to)| to.write(id))
}

/// The credentials of a process while it changes them. Nobody looks into one that acts as another user or group
/// than before, or may do more: it may know what that one must not (`commit_creds` in kernel/cred.c).
pub(super) struct Changing<'a> {
    process: &'a Process,
    old: Credentials,
    own: Borrowed<'a, Credentials>,
}

impl<'a> Changing<'a> {
    pub(super) fn of(process: &'a Process) -> Self {
        let own = process.credentials.borrow_mut();
        Self { process, old: own.clone(), own }
    }
}

impl Deref for Changing<'_> {
    type Target = Credentials;

    fn deref(&self) -> &Credentials {
        &self.own
    }
}

impl DerefMut for Changing<'_> {
    fn deref_mut(&mut self) -> &mut Credentials {
        &mut self.own
    }
}

impl Drop for Changing<'_> {
    fn drop(&mut self) {
        let acts_as = |c: &Credentials| [c.euid, c.egid, c.fsuid, c.fsgid];
        let is_same = acts_as(&self.own) == acts_as(&self.old);
        if !is_same || !self.old.permitted.contains(self.own.permitted) {
            self.process.dumpable.set(false);
        }
    }
}

/// Which of real, effective and saved id stay as they are.
const UNCHANGED: u32 = u32::MAX;

/// The ids that a call asks for, in place of `old`.
fn wanted<const N: usize>(asked: [u32; N], old: [u32; N]) -> [u32; N] {
    core::array::from_fn(|i| if asked[i] == UNCHANGED { old[i] } else { asked[i] })
}

/// The users of arguments, which are ids of the caller's namespace; `EINVAL` if one is none.
fn users<const N: usize>(c: &Credentials, ids: [u32; N]) -> Result<[u32; N]> {
    translate(ids, |id| c.user_namespace.user(id))
}

/// The same for groups.
fn groups<const N: usize>(c: &Credentials, ids: [u32; N]) -> Result<[u32; N]> {
    translate(ids, |id| c.user_namespace.group(id))
}

fn translate<const N: usize>(
    mut ids: [u32; N],
    find: impl Fn(u32) -> Option<u32>,
) -> Result<[u32; N]> {
    for id in ids.iter_mut().filter(|id| **id != UNCHANGED) {
        *id = find(*id).ok_or(Errno::EINVAL)?;
    }
    Ok(ids)
}

/// `EPERM` unless all `ids` are among `own` or `capability` allows any.
fn check(c: &Credentials, capability: Capabilities, ids: &[u32], own: &[u32]) -> Result<()> {
    if ids.iter().all(|id| own.contains(id)) { Ok(()) } else { c.require_in_own(capability) }
}

/// setresuid(2).
pub fn setresuid(real: u32, effective: u32, saved: u32) -> Result<()> {
    let process = current_process();
    let mut c = Changing::of(&process);
    let new = wanted(users(&c, [real, effective, saved])?, c.users());
    check(&c, Capabilities::SETUID, &new, &c.users())?;
    c.set_users(new);
    Ok(())
}

/// setresgid(2).
pub fn setresgid(real: u32, effective: u32, saved: u32) -> Result<()> {
    let process = current_process();
    let mut c = Changing::of(&process);
    let new = wanted(groups(&c, [real, effective, saved])?, c.groups_of_process());
    check(&c, Capabilities::SETGID, &new, &c.groups_of_process())?;
    c.set_groups(new);
    Ok(())
}

/// `EINVAL` for the number that is no id.
fn valid(id: u32) -> Result<u32> {
    if id == UNCHANGED { Err(Errno::EINVAL) } else { Ok(id) }
}

/// setuid(2).
pub fn setuid(id: u32) -> Result<()> {
    let id = valid(id)?;
    let process = current_process();
    let mut c = Changing::of(&process);
    let [id] = users(&c, [id])?;
    check(&c, Capabilities::SETUID, &[id], &[c.uid, c.suid])?;
    let [uid, _, suid] = c.users();
    let new = if c.can_in_own(Capabilities::SETUID) { [id; 3] } else { [uid, id, suid] };
    c.set_users(new);
    Ok(())
}

/// setgid(2).
pub fn setgid(id: u32) -> Result<()> {
    let id = valid(id)?;
    let process = current_process();
    let mut c = Changing::of(&process);
    let [id] = groups(&c, [id])?;
    check(&c, Capabilities::SETGID, &[id], &[c.gid, c.sgid])?;
    let [gid, _, sgid] = c.groups_of_process();
    let new = if c.can_in_own(Capabilities::SETGID) { [id; 3] } else { [gid, id, sgid] };
    c.set_groups(new);
    Ok(())
}

/// The ids after a call that asks for a real and an effective one: the saved id follows the effective
/// one if the real id is set, or the effective one to something else than the old real one.
fn with_saved([real, effective]: [u32; 2], old: [u32; 3]) -> [u32; 3] {
    let follows = real != UNCHANGED || (effective != UNCHANGED && effective != old[0]);
    let [real, effective] = wanted([real, effective], [old[0], old[1]]);
    [real, effective, if follows { effective } else { old[2] }]
}

/// setreuid(2).
pub fn setreuid(real: u32, effective: u32) -> Result<()> {
    let process = current_process();
    let mut c = Changing::of(&process);
    let old = c.users();
    let new = with_saved(users(&c, [real, effective])?, old);
    check(&c, Capabilities::SETUID, &new[..1], &old[..2])?;
    check(&c, Capabilities::SETUID, &new[1..2], &old)?;
    c.set_users(new);
    Ok(())
}

/// setregid(2).
pub fn setregid(real: u32, effective: u32) -> Result<()> {
    let process = current_process();
    let mut c = Changing::of(&process);
    let old = c.groups_of_process();
    let new = with_saved(groups(&c, [real, effective])?, old);
    check(&c, Capabilities::SETGID, &new[..1], &old[..2])?;
    check(&c, Capabilities::SETGID, &new[1..2], &old)?;
    c.set_groups(new);
    Ok(())
}

/// setfsuid(2): returns the old id and never fails.
pub fn setfsuid(id: u32) -> Result<u32> {
    let process = current_process();
    let mut c = Changing::of(&process);
    let (old, new) = (c.user_namespace.shown_user(c.fsuid), c.user_namespace.user(id));
    let new = new.unwrap_or(UNCHANGED);
    let own = [c.uid, c.euid, c.suid, c.fsuid];
    if new != UNCHANGED && check(&c, Capabilities::SETUID, &[new], &own).is_ok() {
        c.set_file_user(new);
    }
    Ok(old)
}

/// setfsgid(2): returns the old id and never fails.
pub fn setfsgid(id: u32) -> Result<u32> {
    let process = current_process();
    let mut c = Changing::of(&process);
    let (old, new) = (c.user_namespace.shown_group(c.fsgid), c.user_namespace.group(id));
    let new = new.unwrap_or(UNCHANGED);
    let own = [c.gid, c.egid, c.sgid, c.fsgid];
    if new != UNCHANGED && check(&c, Capabilities::SETGID, &[new], &own).is_ok() {
        c.fsgid = new;
    }
    Ok(old)
}

/// getgroups(2).
pub fn getgroups(size: i32, to: UserPtr<u32>) -> Result<usize> {
    let shown = |c: &Credentials| {
        let groups = c.groups.iter().map(|&id| c.user_namespace.shown_group(id));
        groups.collect::<alloc::vec::Vec<_>>()
    };
    let groups = told(shown);
    if size < 0 || size > 0 && (size as usize) < groups.len() {
        return Err(Errno::EINVAL);
    }
    if size > 0 {
        to.write_slice(&groups)?;
    }
    Ok(groups.len())
}

/// setgroups(2).
pub fn setgroups(count: usize, from: UserPtr<u32>) -> Result<()> {
    let namespace = told(|c| c.user_namespace.clone());
    // Who gives up groups may get rights that those do not have (user_namespaces(7)).
    if !namespace.allows_setgroups() || !namespace.has_groups() {
        return Err(Errno::EPERM);
    }
    told(|c| c.require_in_own(Capabilities::SETGID))?;
    if count > 65536 {
        return Err(Errno::EINVAL);
    }
    let mut groups = from.read_array(count)?;
    for group in &mut groups {
        *group = namespace.group(*group).ok_or(Errno::EINVAL)?;
    }
    current_process().credentials.borrow_mut().groups = groups;
    Ok(())
}
