//! fcntl(2) and ioctl(2).

use super::locking::LockedBy;
use super::{descriptor_limit, locking};
use crate::args::{Fd, Flags, SignalNumber};
use crate::errno::{Errno, Result};
use crate::fs::async_io::Owner;
use crate::fs::fd_table::OnExec;
use crate::fs::file::{OpenFile, OpenFlags};
use crate::fs::inode::FileType;
use crate::fs::locks::Patience;
use crate::fs::overlay::{RegularFile, Seals};
use crate::net::socket::Socket;
use crate::platform::user::UserAddress;
use crate::task::current_process;
use crate::task::signal::Signal;

const F_DUPFD: u32 = 0;
const F_GETFD: u32 = 1;
const F_SETFD: u32 = 2;
const F_GETFL: u32 = 3;
const F_SETFL: u32 = 4;
const F_GETLK: u32 = 5;
const F_SETLK: u32 = 6;
const F_SETLKW: u32 = 7;
const F_SETOWN: u32 = 8;
const F_GETOWN: u32 = 9;
const F_SETSIG: u32 = 10;
const F_GETSIG: u32 = 11;
const F_SETOWN_EX: u32 = 15;
const F_GETOWN_EX: u32 = 16;
const F_OFD_GETLK: u32 = 36;
const F_OFD_SETLK: u32 = 37;
const F_OFD_SETLKW: u32 = 38;
const F_NOTIFY: u32 = 1026;
const F_DUPFD_CLOEXEC: u32 = 1030;
const F_SETPIPE_SZ: u32 = 1031;
const F_GETPIPE_SZ: u32 = 1032;
const F_ADD_SEALS: u32 = 1033;
const F_GET_SEALS: u32 = 1034;
const FD_CLOEXEC: u64 = 1;
const DN_MULTISHOT: u32 = 0x8000_0000;

/// The flags that `F_SETFL` changes (fcntl(2)).
const SETTABLE: OpenFlags = OpenFlags::APPEND
    .union(OpenFlags::ASYNC)
    .union(OpenFlags::DIRECT)
    .union(OpenFlags::NOATIME)
    .union(OpenFlags::NONBLOCK);

/// fcntl(2).
pub fn fcntl(fd: Fd, command: u32, at: UserAddress) -> Result<u64> {
    let argument = at.0;
    let open = fd.file()?;
    if open.flags().contains(OpenFlags::PATH)
        && !matches!(command, F_DUPFD | F_DUPFD_CLOEXEC | F_GETFD | F_SETFD | F_GETFL)
    {
        return Err(Errno::EBADF);
    }
    match command {
        // There is no dnotify, which inotify has replaced; to end it is no error.
        F_NOTIFY if argument as u32 & !DN_MULTISHOT == 0 => Ok(0),
        F_DUPFD => duplicate(&open, argument, OnExec::Keep).map(|fd| fd as u64),
        F_DUPFD_CLOEXEC => duplicate(&open, argument, OnExec::Close).map(|fd| fd as u64),
        F_GETFD => {
            let on_exec = current_process().files.borrow_mut().borrow_mut().on_exec(fd.0)?;
            Ok(if on_exec == OnExec::Close { FD_CLOEXEC } else { 0 })
        }
        F_SETFD => {
            let on_exec = if argument & FD_CLOEXEC != 0 { OnExec::Close } else { OnExec::Keep };
            current_process().files.borrow_mut().borrow_mut().set_on_exec(fd.0, on_exec).map(|()| 0)
        }
        F_GETFL => Ok(open.flags().bits().into()),
        F_SETFL => {
            let wanted = OpenFlags::from_bits_retain(argument as u32) & SETTABLE;
            let old = open.flags();
            if wanted.contains(OpenFlags::NOATIME) && !old.contains(OpenFlags::NOATIME) {
                let context = crate::fs::Context::current();
                let place = super::place_of(&context, fd)?;
                if !context.identity.owns(&place.inode().attributes()) {
                    return Err(Errno::EPERM);
                }
            }
            open.set_flags((old - SETTABLE) | wanted);
            open.note_async_flag(fd.0);
            Ok(0)
        }
        F_GETLK => locking::get_record_lock(&open, at, LockedBy::Process).map(|()| 0),
        F_OFD_GETLK => locking::get_record_lock(&open, at, LockedBy::Description).map(|()| 0),
        F_SETLK | F_SETLKW | F_OFD_SETLK | F_OFD_SETLKW => {
            let of_process = matches!(command, F_SETLK | F_SETLKW);
            let waits = matches!(command, F_SETLKW | F_OFD_SETLKW);
            let owner = if of_process { LockedBy::Process } else { LockedBy::Description };
            let patience = if waits { Patience::Wait } else { Patience::Refuse };
            locking::set_record_lock(&open, at, owner, patience).map(|()| 0)
        }
        F_GETOWN => Ok(open.async_owner().number() as u64),
        F_SETOWN => open.set_async_owner(Owner::from_number(argument as i32)?).map(|()| 0),
        F_GETOWN_EX => at.write(&open.async_owner().pair()).map(|()| 0),
        F_SETOWN_EX => {
            let owner = Owner::from_pair(at.read()?)?;
            open.set_async_owner(owner).map(|()| 0)
        }
        F_GETSIG => Ok(open.async_signal().map_or(0, Signal::number).into()),
        F_SETSIG => {
            let number = u32::try_from(argument).map_err(|_| Errno::EINVAL)?;
            open.set_async_signal(SignalNumber(number).or_probe()?);
            Ok(0)
        }
        F_GETPIPE_SZ => crate::fs::pipe::get_pipe_size(&open),
        F_SETPIPE_SZ => crate::fs::pipe::set_pipe_size(&open, argument),
        F_ADD_SEALS => add_seals(&open, argument).map(|()| 0),
        F_GET_SEALS => {
            let regular = open.downcast::<RegularFile>().ok_or(Errno::EINVAL)?;
            regular.seals().map(|seals| seals.bits().into())
        }
        _ => Err(Errno::EINVAL),
    }
}

fn duplicate(open: &alloc::sync::Arc<OpenFile>, from: u64, on_exec: OnExec) -> Result<i32> {
    let limit = descriptor_limit();
    if from >= limit {
        return Err(Errno::EINVAL);
    }
    let table = current_process().files.borrow_mut().clone();
    let mut files = table.borrow_mut();
    files.insert_from(from as i32, open.clone(), on_exec, limit)
}

fn add_seals(open: &OpenFile, bits: u64) -> Result<()> {
    let seals = u32::try_from(bits).ok().and_then(Seals::from_bits).ok_or(Errno::EINVAL)?;
    let regular = open.downcast::<RegularFile>().ok_or(Errno::EINVAL)?;
    if !open.flags().can_write() {
        return Err(Errno::EPERM);
    }
    regular.add_seals(seals)
}

const FIONREAD: u32 = 0x541b;
const FIONBIO: u32 = 0x5421;
const FIONCLEX: u32 = 0x5450;
const FIOCLEX: u32 = 0x5451;
const FIOASYNC: u32 = 0x5452;
/// Of sockets only (socket(7)): what `F_SETOWN` and `F_GETOWN` do.
const FIOSETOWN: u32 = 0x8901;
const SIOCSPGRP: u32 = 0x8902;
const FIOGETOWN: u32 = 0x8903;
const SIOCGPGRP: u32 = 0x8904;

const FICLONE: u32 = 0x4004_9409;
const FICLONERANGE: u32 = 0x4020_940d;
const FIDEDUPERANGE: u32 = 0xc018_9436;

fn is_regular(open: &OpenFile) -> bool {
    open.path.as_ref().is_some_and(|path| path.inode().file_type() == FileType::Regular)
}

/// ioctl(2).
pub fn ioctl(fd: Fd, Flags(request): Flags, argument: UserAddress) -> Result<u64> {
    let open = fd.usable_file()?;
    match request {
        FIOCLEX => current_process()
            .files
            .borrow_mut()
            .borrow_mut()
            .set_on_exec(fd.0, OnExec::Close)
            .map(|()| 0),
        FIONCLEX => current_process()
            .files
            .borrow_mut()
            .borrow_mut()
            .set_on_exec(fd.0, OnExec::Keep)
            .map(|()| 0),
        FIONBIO => {
            let on: i32 = argument.read()?;
            let mut flags = open.flags();
            flags.set(OpenFlags::NONBLOCK, on != 0);
            open.set_flags(flags);
            Ok(0)
        }
        FIOASYNC => {
            let on: i32 = argument.read()?;
            if open.file.wait_queue().is_none() {
                return Err(Errno::ENOTTY);
            }
            let mut flags = open.flags();
            flags.set(OpenFlags::ASYNC, on != 0);
            open.set_flags(flags);
            open.note_async_flag(fd.0);
            Ok(0)
        }
        FIOSETOWN | SIOCSPGRP if open.downcast::<Socket>().is_some() => {
            open.set_async_owner(Owner::from_number(argument.read()?)?).map(|()| 0)
        }
        FIOGETOWN | SIOCGPGRP if open.downcast::<Socket>().is_some() => {
            argument.write(&open.async_owner().number()).map(|()| 0)
        }
        FIONREAD if open.downcast::<RegularFile>().is_some() => {
            let left = open.file.size().saturating_sub(open.position());
            argument.write(&i32::try_from(left).unwrap_or(i32::MAX)).map(|()| 0)
        }
        // No file system here shares blocks between files (ioctl_ficlone(2)).
        FICLONE if is_regular(&open) => {
            let source = Fd(argument.0 as i32).usable_file()?;
            match source.flags().can_read() && open.flags().can_write() {
                true => Err(Errno::EOPNOTSUPP),
                false => Err(Errno::EBADF),
            }
        }
        FICLONERANGE | FIDEDUPERANGE if is_regular(&open) => Err(Errno::EOPNOTSUPP),
        _ => open.file.ioctl(request, argument),
    }
}
