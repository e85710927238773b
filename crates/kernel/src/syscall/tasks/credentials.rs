//! System calls on user and group ids.

use core::ops::{Deref, DerefMut};

use crate::args::UserPtr;
use crate::errno::{Errno, Result};
use crate::sync::Borrowed;
use crate::task::{Capabilities, Credentials, Process, current_process};

fn credentials() -> Credentials {
    current_process().credentials.borrow_mut().clone()
}

/// getuid(2).
pub fn getuid() -> Result<u32> {
    Ok(credentials().uid)
}
/// geteuid(2).
pub fn geteuid() -> Result<u32> {
    Ok(credentials().euid)
}
/// getgid(2).
pub fn getgid() -> Result<u32> {
    Ok(credentials().gid)
}
/// getegid(2).
pub fn getegid() -> Result<u32> {
    Ok(credentials().egid)
}

/// getresuid(2).
pub fn getresuid(real: UserPtr<u32>, effective: UserPtr<u32>, saved: UserPtr<u32>) -> Result<()> {
    tell(credentials().users(), [real, effective, saved])
}

/// getresgid(2).
pub fn getresgid(real: UserPtr<u32>, effective: UserPtr<u32>, saved: UserPtr<u32>) -> Result<()> {
    tell(credentials().groups_of_process(), [real, effective, saved])
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

/// `EPERM` unless all `ids` are among `own` or `capability` allows any.
fn check(c: &Credentials, capability: Capabilities, ids: &[u32], own: &[u32]) -> Result<()> {
    if ids.iter().all(|id| own.contains(id)) { Ok(()) } else { c.require(capability) }
}

/// setresuid(2).
pub fn setresuid(real: u32, effective: u32, saved: u32) -> Result<()> {
    let process = current_process();
    let mut c = Changing::of(&process);
    let new = wanted([real, effective, saved], c.users());
    check(&c, Capabilities::SETUID, &new, &c.users())?;
    c.set_users(new);
    Ok(())
}

/// setresgid(2).
pub fn setresgid(real: u32, effective: u32, saved: u32) -> Result<()> {
    let process = current_process();
    let mut c = Changing::of(&process);
    let new = wanted([real, effective, saved], c.groups_of_process());
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
    check(&c, Capabilities::SETUID, &[id], &[c.uid, c.suid])?;
    let [uid, _, suid] = c.users();
    let new = if c.can(Capabilities::SETUID) { [id; 3] } else { [uid, id, suid] };
    c.set_users(new);
    Ok(())
}

/// setgid(2).
pub fn setgid(id: u32) -> Result<()> {
    let id = valid(id)?;
    let process = current_process();
    let mut c = Changing::of(&process);
    check(&c, Capabilities::SETGID, &[id], &[c.gid, c.sgid])?;
    let [gid, _, sgid] = c.groups_of_process();
    let new = if c.can(Capabilities::SETGID) { [id; 3] } else { [gid, id, sgid] };
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
    let new = with_saved([real, effective], old);
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
    let new = with_saved([real, effective], old);
    check(&c, Capabilities::SETGID, &new[..1], &old[..2])?;
    check(&c, Capabilities::SETGID, &new[1..2], &old)?;
    c.set_groups(new);
    Ok(())
}

/// setfsuid(2): returns the old id and never fails.
pub fn setfsuid(id: u32) -> Result<u32> {
    let process = current_process();
    let mut c = Changing::of(&process);
    let (old, new) = (c.fsuid, id);
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
    let (old, new) = (c.fsgid, id);
    let own = [c.gid, c.egid, c.sgid, c.fsgid];
    if new != UNCHANGED && check(&c, Capabilities::SETGID, &[new], &own).is_ok() {
        c.fsgid = new;
    }
    Ok(old)
}

/// getgroups(2).
pub fn getgroups(size: i32, to: UserPtr<u32>) -> Result<usize> {
    let groups = credentials().groups;
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
    credentials().require(Capabilities::SETGID)?;
    if count > 65536 {
        return Err(Errno::EINVAL);
    }
    let groups = from.read_array(count)?;
    current_process().credentials.borrow_mut().groups = groups;
    Ok(())
}
