//! System calls on System V shared memory.

use alloc::sync::Arc;

use bytemuck::{Pod, Zeroable};

use crate::args::Mode;
use crate::errno::{Errno, Result};
use crate::ipc::namespace::{left_of, own};
use crate::ipc::sysv::memory::{SHM_LOCKED, Segment, condemn};
use crate::ipc::sysv::permissions::{Caller, EXECUTE, READ, UserPermissions, WRITE};
use crate::ipc::sysv::registry::{Object, place_of};
use crate::ipc::sysv::{IPC_INFO, IPC_RMID, IPC_SET, IPC_STAT};
use crate::mm::space::{MapRequest, Placement};
use crate::mm::vma::{Vma, VmaFlags};
use crate::platform::machine::{PROT_EXEC, PROT_READ, PROT_WRITE};
use crate::platform::user::UserAddress;
use crate::state::kernel;
use crate::syscall::memory::check_room;
use crate::task::ids::Pid;
use crate::task::process::RLIMIT_MEMLOCK;
use crate::task::{Capabilities, current_process};

/// Most bytes of a segment (`SHMMAX`), and most pages of all (`SHMALL`).
const SIZE_MAX: u64 = u64::MAX - (1 << 24);
/// Most segments (`SHMMNI`).
const SEGMENTS_MAX: usize = 4096;

const SHM_LOCK: u32 = 11;
const SHM_UNLOCK: u32 = 12;
const SHM_STAT: u32 = 13;
const SHM_INFO: u32 = 14;
const SHM_STAT_ANY: u32 = 15;

const SHM_HUGETLB: u32 = 0o4000;
const SHM_NORESERVE: u32 = 0o10000;
const SHM_RDONLY: u32 = 0o10000;
const SHM_RND: u32 = 0o20000;
const SHM_REMAP: u32 = 0o40000;
const SHM_EXEC: u32 = 0o100000;

fn caller() -> Caller {
    Caller::current()
}

/// Pages of all segments.
fn pages_in_use() -> u64 {
    own().system_v.memory.all().iter().map(|(_, segment)| segment.size.div_ceil(4096)).sum()
}

/// shmget(2).
pub fn shmget(key: i32, size: u64, Mode(flags): Mode) -> Result<i32> {
    let fits = |segment: &Segment| if size > segment.size { Err(Errno::EINVAL) } else { Ok(()) };
    let id = own().system_v.memory.get(
        (key, flags),
        &caller(),
        left_of(SEGMENTS_MAX, |it| it.memory.count()),
        fits,
        |permissions| {
            if size == 0 || size > SIZE_MAX {
                return Err(Errno::EINVAL);
            }
            // Huge pages: as on a machine without any set aside.
            if size > i64::MAX as u64 || flags & SHM_HUGETLB != 0 {
                return Err(Errno::ENOMEM);
            }
            if flags & SHM_NORESERVE == 0 {
                kernel().check_commit(size)?;
            }
            Segment::new(permissions, size, current_process().pid)
        },
    )?;
    Ok(id)
}

/// Where shmat(2) is to map.
fn placement(at: u64, flags: u32) -> Result<Placement> {
    let remap = flags & SHM_REMAP != 0;
    if at == 0 {
        return if remap { Err(Errno::EINVAL) } else { Ok(Placement::Hint(0)) };
    }
    let rounded = at & !4095;
    if rounded != at && flags & SHM_RND == 0 || rounded == 0 && remap {
        return Err(Errno::EINVAL);
    }
    Ok(match (rounded, remap) {
        (0, _) => Placement::Hint(0),
        (at, true) => Placement::Fixed(at),
        (at, false) => Placement::FixedNoReplace(at),
    })
}

/// shmat(2).
pub fn shmat(id: i32, UserAddress(hint): UserAddress, Mode(flags): Mode) -> Result<u64> {
    if id < 0 {
        return Err(Errno::EINVAL);
    }
    let placement = placement(hint, flags)?;
    let is_writable = flags & SHM_RDONLY == 0;
    let (mut prot, mut access) =
        if is_writable { (PROT_READ | PROT_WRITE, READ | WRITE) } else { (PROT_READ, READ) };
    if flags & SHM_EXEC != 0 {
        prot |= PROT_EXEC;
        access |= EXECUTE;
    }
    let segment = own().system_v.memory.find(id)?;
    segment.permissions().get().check(access, &caller())?;
    check_room(placement, segment.size, false)?;
    let request = MapRequest {
        placement,
        len: segment.size,
        prot,
        flags: VmaFlags::SHARED,
        file: Some(Arc::new(segment.backing(is_writable))),
        offset: 0,
    };
    let start = current_process().mm().map(request).map_err(|error| match error {
        Errno::EEXIST => Errno::EINVAL,
        error => error,
    })?;
    segment.attached(current_process().pid);
    Ok(start)
}

/// shmdt(2): unmaps what is left of the attachment at an address, whatever namespace it comes from.
pub fn shmdt(UserAddress(at): UserAddress) -> Result<()> {
    if at & 4095 != 0 {
        return Err(Errno::EINVAL);
    }
    let mm = current_process().mm();
    let areas = mm.areas();
    let of_attachment = || areas.iter().filter(|vma| vma.start.checked_sub(at) == Some(vma.offset));
    let segments = of_attachment().filter_map(|vma| vma.shared_upper());
    let segment = segments.clone().find(|pages| pages.is_segment()).ok_or(Errno::EINVAL)?;
    let shows = |vma: &&Vma| vma.shared_upper().is_some_and(|pages| Arc::ptr_eq(pages, segment));
    for vma in of_attachment().filter(shows) {
        mm.unmap(vma.start, vma.len())?;
    }
    Ok(())
}

/// `struct shmid64_ds`.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct Status {
    permissions: UserPermissions,
    size: u64,
    times_s: [i64; 3],
    creator: u32,
    last_pid: u32,
    attachments: u64,
    unused: [u64; 2],
}

/// shmctl(2).
pub fn shmctl(id: i32, command: u32, argument: UserAddress) -> Result<u64> {
    if id < 0 {
        return Err(Errno::EINVAL);
    }
    let namespace = own();
    let segments = &namespace.system_v.memory;
    match command {
        IPC_INFO => limits(argument).map(u64::from),
        SHM_INFO => usage(argument).map(u64::from),
        IPC_STAT => {
            let segment = segments.find(id)?;
            segment.permissions().get().check(READ, &caller())?;
            argument.write(&status(id, &segment)).map(|()| 0)
        }
        SHM_STAT | SHM_STAT_ANY => {
            let (id, segment) = segments.at_place(place_of(id))?;
            if command == SHM_STAT {
                segment.permissions().get().check(READ, &caller())?;
            }
            argument.write(&status(id, &segment)).map(|()| id as u64)
        }
        IPC_SET => {
            let wanted: Status = argument.read()?;
            let segment = segments.find(id)?;
            let mut permissions = segment.permissions().get();
            permissions.check_owner(&caller())?;
            permissions.update(&wanted.permissions, &caller().user_namespace)?;
            segment.permissions().set(permissions);
            segment.changed();
            Ok(0)
        }
        IPC_RMID => {
            let segment = segments.find(id)?;
            segment.permissions().get().check_owner(&caller())?;
            condemn(&namespace.system_v, id, &segment);
            Ok(0)
        }
        SHM_LOCK | SHM_UNLOCK => lock(&*segments.find(id)?, command).map(|()| 0),
        _ => Err(Errno::EINVAL),
    }
}

/// `SHM_LOCK` and `SHM_UNLOCK`: noted, since nothing is paged out.
fn lock(segment: &Segment, command: u32) -> Result<()> {
    let caller = caller();
    segment.permissions().get().check_owner(&caller)?;
    let limit = current_process().limits.borrow_mut()[RLIMIT_MEMLOCK].current;
    if command == SHM_LOCK && !caller.can(Capabilities::IPC_LOCK) {
        if limit == 0 {
            return Err(Errno::EPERM);
        }
        if segment.size.next_multiple_of(4096) > limit {
            return Err(Errno::ENOMEM);
        }
    }
    let mut state = segment.state.borrow_mut();
    if command == SHM_LOCK {
        state.flags |= SHM_LOCKED;
    } else {
        state.flags &= !SHM_LOCKED;
    }
    Ok(())
}

fn status(id: i32, segment: &Segment) -> Status {
    let state = *segment.state.borrow_mut();
    let mut permissions = segment.permissions().get().to_user(id, &caller().user_namespace);
    permissions.mode |= state.flags;
    Status {
        permissions,
        size: segment.size,
        times_s: state.times_s,
        creator: segment.creator.for_caller(),
        last_pid: Pid::new(state.last_pid).for_caller(),
        attachments: segment.attachments(),
        unused: [0; 2],
    }
}

/// `struct shminfo64`: largest and smallest segment, segments, segments of a
/// process, pages.
fn limits(to: UserAddress) -> Result<u32> {
    let most = SEGMENTS_MAX as u64;
    to.write(&[SIZE_MAX, 1, most, most, SIZE_MAX, 0, 0, 0, 0])?;
    Ok(own().system_v.memory.last_place())
}

/// `struct shm_info`: segments, pages of them, pages in memory and paged out.
fn usage(to: UserAddress) -> Result<u32> {
    let namespace = own();
    let segments = &namespace.system_v.memory;
    let pages = pages_in_use();
    to.write(&[segments.count() as u64, pages, pages, 0, 0, 0])?;
    Ok(segments.last_place())
}
