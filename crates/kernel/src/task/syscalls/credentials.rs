//! System calls on user and group ids and capabilities.

use crate::errno::{Errno, Result};
use crate::syscall::Args;
use crate::task::current_process;
use crate::task::process::Credentials;

fn credentials() -> Credentials {
    current_process().credentials.lock().clone()
}

/// getuid(2).
pub fn getuid(_args: &Args) -> Result<u64> {
    Ok(credentials().uid as u64)
}
/// geteuid(2).
pub fn geteuid(_args: &Args) -> Result<u64> {
    Ok(credentials().euid as u64)
}
/// getgid(2).
pub fn getgid(_args: &Args) -> Result<u64> {
    Ok(credentials().gid as u64)
}
/// getegid(2).
pub fn getegid(_args: &Args) -> Result<u64> {
    Ok(credentials().egid as u64)
}

/// getresuid(2).
pub fn getresuid(args: &Args) -> Result<u64> {
    let c = credentials();
    for (i, id) in [c.uid, c.euid, c.suid].iter().enumerate() {
        args.address(i).write(id)?;
    }
    Ok(0)
}

/// getresgid(2).
pub fn getresgid(args: &Args) -> Result<u64> {
    let c = credentials();
    for (i, id) in [c.gid, c.egid, c.sgid].iter().enumerate() {
        args.address(i).write(id)?;
    }
    Ok(0)
}

/// Whether `id` is one that an unprivileged process may take.
fn may_become(c: &Credentials, id: u32, own: [u32; 3]) -> Result<()> {
    if c.euid == 0 || own.contains(&id) { Ok(()) } else { Err(Errno::EPERM) }
}

const UNCHANGED: u32 = u32::MAX;

/// setresuid(2).
pub fn setresuid(args: &Args) -> Result<u64> {
    let c = credentials();
    let own = [c.uid, c.euid, c.suid];
    let new: [u32; 3] =
        core::array::from_fn(|i| if args.u32(i) == UNCHANGED { own[i] } else { args.u32(i) });
    for id in new {
        may_become(&c, id, own)?;
    }
    let mut c = current_process().credentials.lock();
    [c.uid, c.euid, c.suid] = new;
    c.fsuid = c.euid;
    Ok(0)
}

/// setresgid(2).
pub fn setresgid(args: &Args) -> Result<u64> {
    let c = credentials();
    let own = [c.gid, c.egid, c.sgid];
    let new: [u32; 3] =
        core::array::from_fn(|i| if args.u32(i) == UNCHANGED { own[i] } else { args.u32(i) });
    for id in new {
        may_become(&c, id, own)?;
    }
    let mut c = current_process().credentials.lock();
    [c.gid, c.egid, c.sgid] = new;
    c.fsgid = c.egid;
    Ok(0)
}

/// setuid(2).
pub fn setuid(args: &Args) -> Result<u64> {
    let id = args.u64(0);
    let all = if credentials().euid == 0 { id } else { UNCHANGED as u64 };
    setresuid(&Args([all, id, all, 0, 0, 0]))
}

/// setgid(2).
pub fn setgid(args: &Args) -> Result<u64> {
    let id = args.u64(0);
    let all = if credentials().euid == 0 { id } else { UNCHANGED as u64 };
    setresgid(&Args([all, id, all, 0, 0, 0]))
}

/// setreuid(2).
pub fn setreuid(args: &Args) -> Result<u64> {
    let c = credentials();
    let effective = if args.u32(1) == UNCHANGED { c.euid } else { args.u32(1) };
    let saved = if args.u32(0) != UNCHANGED || effective != c.uid { effective } else { UNCHANGED };
    setresuid(&Args([args.u64(0), args.u64(1), saved as u64, 0, 0, 0]))
}

/// setregid(2).
pub fn setregid(args: &Args) -> Result<u64> {
    let c = credentials();
    let effective = if args.u32(1) == UNCHANGED { c.egid } else { args.u32(1) };
    let saved = if args.u32(0) != UNCHANGED || effective != c.gid { effective } else { UNCHANGED };
    setresgid(&Args([args.u64(0), args.u64(1), saved as u64, 0, 0, 0]))
}

/// setfsuid(2): returns the old id and never fails.
pub fn setfsuid(args: &Args) -> Result<u64> {
    let c = credentials();
    if may_become(&c, args.u32(0), [c.uid, c.euid, c.suid]).is_ok() && args.u32(0) != UNCHANGED {
        current_process().credentials.lock().fsuid = args.u32(0);
    }
    Ok(c.fsuid as u64)
}

/// setfsgid(2): returns the old id and never fails.
pub fn setfsgid(args: &Args) -> Result<u64> {
    let c = credentials();
    if may_become(&c, args.u32(0), [c.gid, c.egid, c.sgid]).is_ok() && args.u32(0) != UNCHANGED {
        current_process().credentials.lock().fsgid = args.u32(0);
    }
    Ok(c.fsgid as u64)
}

/// getgroups(2).
pub fn getgroups(args: &Args) -> Result<u64> {
    let groups = credentials().groups;
    let size = args.i32(0);
    if size < 0 || size > 0 && (size as usize) < groups.len() {
        return Err(Errno::EINVAL);
    }
    if size > 0 {
        args.address(1).write_bytes(bytemuck::cast_slice(&groups))?;
    }
    Ok(groups.len() as u64)
}

/// setgroups(2).
pub fn setgroups(args: &Args) -> Result<u64> {
    if credentials().euid != 0 {
        return Err(Errno::EPERM);
    }
    if args.usize(0) > 65536 {
        return Err(Errno::EINVAL);
    }
    let groups = args.address(1).read_array(args.usize(0))?;
    current_process().credentials.lock().groups = groups;
    Ok(0)
}

/// capget(2): no capabilities beyond what user id 0 means inside the sandbox.
pub fn capget(args: &Args) -> Result<u64> {
    const VERSION_3: u32 = 0x2008_0522;
    let version: u32 = args.address(0).read()?;
    if version != VERSION_3 {
        args.address(0).write(&VERSION_3)?;
        return if args.address(1).is_null() { Ok(0) } else { Err(Errno::EINVAL) };
    }
    if !args.address(1).is_null() {
        args.address(1).write(&[0u32; 6])?;
    }
    Ok(0)
}

/// capset(2): nothing can be raised.
pub fn capset(args: &Args) -> Result<u64> {
    let data: [u32; 6] = args.address(1).read()?;
    if data == [0; 6] { Ok(0) } else { Err(Errno::EPERM) }
}
