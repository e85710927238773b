//! System calls of Linux' asynchronous input and output (io_setup(2)), which is done at once.

use alloc::sync::Arc;

use bytemuck::{Pod, Zeroable};

use super::sync::synchronized;
use crate::args::{Fd, UserPtr};
use crate::errno::{Errno, Result};
use crate::fs::file::OpenFile;
use crate::io::{Sink, Source};
use crate::ipc::aio::{Context, Contexts, Event};
use crate::ipc::eventfd::EventFd;
use crate::mm::space::{MapRequest, Placement};
use crate::mm::vma::VmaFlags;
use crate::platform::user::UserAddress;
use crate::state::kernel;
use crate::syscall::ipc::epoll::under_mask;
use crate::task::current_process;
use crate::task::signal::SignalSet;
use crate::task::wait::wait_until;
use crate::time::{Timeout, Timespec};

/// Bytes of the page at the address of a context.
const PAGE: u64 = 4096;
const PROT_READ_WRITE: u32 = 3;

const IOCB_CMD_PREAD: u16 = 0;
const IOCB_CMD_PWRITE: u16 = 1;
const IOCB_CMD_FSYNC: u16 = 2;
const IOCB_CMD_FDSYNC: u16 = 3;
const IOCB_CMD_PREADV: u16 = 7;
const IOCB_CMD_PWRITEV: u16 = 8;

const IOCB_FLAG_RESFD: u32 = 1;

/// `RWF_HIPRI`, `RWF_DSYNC`, `RWF_SYNC` and `RWF_NOWAIT`, which files in memory do or need not.
const RWF_KNOWN: u32 = 0x0f;

/// `struct iocb`.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub struct Request {
    data: u64,
    key: u32,
    rw_flags: u32,
    operation: u16,
    priority: i16,
    fd: i32,
    buffer: u64,
    len: u64,
    offset: i64,
    reserved: u64,
    flags: u32,
    event_fd: i32,
}

fn contexts() -> &'static Contexts {
    &kernel().aio
}

/// io_setup(2).
pub fn io_setup(requests: u32, id_at: UserPtr<u64>) -> Result<()> {
    if id_at.read()? != 0 {
        return Err(Errno::EINVAL);
    }
    let requests = u64::from(requests);
    contexts().check(requests)?;
    let request = MapRequest {
        placement: Placement::Hint(0),
        len: PAGE,
        prot: PROT_READ_WRITE,
        flags: VmaFlags::DONT_FORK,
        file: None,
        offset: 0,
    };
    let process = current_process();
    let address = process.mm().map(request)?;
    contexts().add(&process, address, requests);
    id_at.write(&address).inspect_err(|_| {
        let _ = io_destroy(address);
    })
}

/// io_destroy(2).
pub fn io_destroy(id: u64) -> Result<()> {
    let process = current_process();
    contexts().remove(&process, id)?;
    // The program may have taken the page away.
    let _ = process.mm().unmap(id, PAGE);
    Ok(())
}

/// io_submit(2): how many requests were taken. The first that is not ends the call.
pub fn io_submit(id: u64, count: i64, requests: UserPtr<u64>) -> Result<i64> {
    let count = u64::try_from(count).map_err(|_| Errno::EINVAL)?;
    let context = contexts().find(&current_process(), id)?;
    let count = count.min(context.capacity());
    for index in 0..count {
        let outcome = requests.at(index as usize).read().and_then(|at| submit(&context, at));
        match outcome {
            Ok(()) => {}
            Err(error) if index == 0 => return Err(error),
            Err(_) => return Ok(index as i64),
        }
    }
    Ok(count as i64)
}

fn submit(context: &Arc<Context>, at: u64) -> Result<()> {
    let request_at = UserPtr::<Request>::new(UserAddress(at));
    let request = request_at.read()?;
    if request.reserved != 0 || i64::try_from(request.len).is_err() {
        return Err(Errno::EINVAL);
    }
    let place = context.begin()?;
    let open = Fd(request.fd).usable_file()?;
    let event_fd = match request.flags & IOCB_FLAG_RESFD {
        0 => None,
        _ => Some(event_fd(request.event_fd)?),
    };
    // `aio_key` is Linux' own.
    UserPtr::<u32>::new(UserAddress(at).offset(8)).write(&0)?;
    let result = match perform(&open, &request)? {
        Ok(count) => count as i64,
        // There is nobody to begin it anew.
        Err(Errno::ERESTARTSYS) => Errno::EINTR.to_return() as i64,
        Err(error) => error.to_return() as i64,
    };
    place.complete(Event { data: request.data, request: at, result, second: 0 });
    if let Some(open) = event_fd {
        // A counter that is full stays so.
        let _ = open.file.write(&mut Source::kernel(&1u64.to_ne_bytes()), 0);
    }
    Ok(())
}

fn event_fd(fd: i32) -> Result<Arc<OpenFile>> {
    let open = Fd(fd).file()?;
    if open.downcast::<EventFd>().is_some() { Ok(open) } else { Err(Errno::EINVAL) }
}

/// Does what a request asks for. The outer error is that of a request that is not taken.
fn perform(open: &OpenFile, request: &Request) -> Result<Result<usize>> {
    let buffer = UserAddress(request.buffer);
    match request.operation {
        IOCB_CMD_PREAD | IOCB_CMD_PREADV => {
            check(request, open.flags().can_read())?;
            let mut sink = match request.operation {
                IOCB_CMD_PREAD => Sink::user(buffer, request.len as usize)?,
                _ => Sink::user_vectors(buffer, request.len as usize)?,
            };
            Ok(match open.file.seekable() {
                true => offset(request).and_then(|at| open.read_at(&mut sink, at)),
                false => open.read(&mut sink),
            })
        }
        IOCB_CMD_PWRITE | IOCB_CMD_PWRITEV => {
            check(request, open.flags().can_write())?;
            let mut source = match request.operation {
                IOCB_CMD_PWRITE => Source::user(buffer, request.len as usize)?,
                _ => Source::user_vectors(buffer, request.len as usize)?,
            };
            Ok(match open.file.seekable() {
                true => offset(request).and_then(|at| open.write_at(&mut source, at)),
                false => open.write(&mut source),
            })
        }
        IOCB_CMD_FSYNC | IOCB_CMD_FDSYNC => {
            if request.buffer != 0 || request.offset != 0 || request.len != 0 {
                return Err(Errno::EINVAL);
            }
            Ok(synchronized(open).map(|()| 0))
        }
        _ => Err(Errno::EINVAL),
    }
}

fn check(request: &Request, may: bool) -> Result<()> {
    if request.rw_flags & !RWF_KNOWN != 0 {
        return Err(Errno::EOPNOTSUPP);
    }
    if may { Ok(()) } else { Err(Errno::EBADF) }
}

fn offset(request: &Request) -> Result<u64> {
    u64::try_from(request.offset).map_err(|_| Errno::EINVAL)
}

/// io_getevents(2).
pub fn io_getevents(
    id: u64,
    least: i64,
    most: i64,
    events: UserPtr<Event>,
    timeout: UserPtr<Timespec>,
) -> Result<usize> {
    let timeout = Timeout::from_timespec(timeout)?;
    let context = contexts().find(&current_process(), id)?;
    if least < 0 || most < least {
        return Err(Errno::EINVAL);
    }
    let (least, most) = (least as usize, most as usize);
    let mut done = 0;
    let mut attempt = || match take(&context, &mut done, most, events) {
        Ok(()) if done < least => None,
        Ok(()) => Some(Ok(())),
        Err(error) => Some(Err(error)),
    };
    let outcome = match attempt() {
        Some(outcome) => outcome,
        None if timeout == Timeout::Zero => Ok(()),
        None => wait_until(&[&context.queue], timeout.deadline(), attempt),
    };
    match outcome {
        _ if done > 0 => Ok(done),
        Ok(()) | Err(Errno::ETIMEDOUT) => Ok(0),
        Err(Errno::ERESTARTSYS) => Err(Errno::EINTR),
        Err(error) => Err(error),
    }
}

/// Takes results until there are none or the program has `most`.
fn take(context: &Context, done: &mut usize, most: usize, events: UserPtr<Event>) -> Result<()> {
    while *done < most {
        let Some(event) = context.take()? else { return Ok(()) };
        events.at(*done).write(&event)?;
        *done += 1;
    }
    Ok(())
}

/// `struct __aio_sigset`.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub struct Mask {
    at: u64,
    size: u64,
}

/// io_pgetevents: io_getevents(2) under a signal mask.
pub fn io_pgetevents(
    id: u64,
    least: i64,
    most: i64,
    events: UserPtr<Event>,
    timeout: UserPtr<Timespec>,
    mask: UserPtr<Mask>,
) -> Result<usize> {
    let mask = mask.read_if_some()?.unwrap_or_else(Mask::zeroed);
    let at = UserPtr::<SignalSet>::new(UserAddress(mask.at));
    under_mask(at, mask.size as usize, || io_getevents(id, least, most, events, timeout))
}

/// io_cancel(2): what was submitted has been done.
pub fn io_cancel(id: u64, request: UserPtr<Request>, _: UserPtr<Event>) -> Result<()> {
    UserPtr::<u32>::new(request.0.offset(8)).read()?;
    contexts().find(&current_process(), id)?;
    Err(Errno::EINVAL)
}
