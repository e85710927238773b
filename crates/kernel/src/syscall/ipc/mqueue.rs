//! System calls on POSIX message queues (mq_overview(7)). The C library takes away the slash with which
//! names begin.

use alloc::sync::Arc;

use bytemuck::{Pod, Zeroable};

use crate::args::{ClockId, Fd, Flags, Mode, SignalNumber, UserPtr, UserString};
use crate::errno::{Errno, Result};
use crate::fs::fd_table::{NewDescriptor, OnExec};
use crate::fs::file::{OpenFile, OpenFlags};
use crate::ipc::mqueue::notification::{COOKIE_LEN, Notice, Registration};
use crate::ipc::mqueue::queue::{Message, PRIORITIES, Queue, Size};
use crate::ipc::mqueue::{self, Request};
use crate::net::netlink;
use crate::platform::user::UserAddress;
use crate::task::current_process;
use crate::task::thread::current;
use crate::task::timers::clock::Clock;
use crate::task::wait::wait_until;
use crate::time::{Instant, Timespec};

/// `struct mq_attr` (mq_getattr(3)).
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub struct QueueAttributes {
    flags: i64,
    messages_max: i64,
    message_bytes_max: i64,
    messages: i64,
    reserved: [i64; 4],
}

impl QueueAttributes {
    fn size(&self) -> Size {
        // A negative number is far too large.
        Size { messages: self.messages_max as u64, message_bytes: self.message_bytes_max as u64 }
    }
}

/// mq_open(3).
pub fn mq_open(
    name: UserString,
    Flags(flags): Flags,
    Mode(mode): Mode,
    attributes: UserPtr<QueueAttributes>,
) -> Result<i32> {
    let flags = OpenFlags::from_bits_retain(flags);
    let size = attributes.read_if_some()?.map(|attributes| attributes.size());
    let name = name.read_path()?;
    if name.is_empty() {
        return Err(Errno::ENOENT);
    }
    let descriptor = NewDescriptor::reserve()?;
    let process = current_process();
    let permissions = mode & 0o7777 & !process.fs().borrow_mut().umask;
    let queue = mqueue::open(&process, &name, &Request { flags, permissions, size })?;
    let of_opening = OpenFlags::CREAT | OpenFlags::EXCL | OpenFlags::NOCTTY | OpenFlags::TRUNC;
    let status = flags.difference(of_opening | OpenFlags::CLOEXEC);
    Ok(descriptor.install(OpenFile::new(queue, status, None), OnExec::Close))
}

/// mq_unlink(3).
pub fn mq_unlink(name: UserString) -> Result<()> {
    mqueue::unlink(&current_process(), &name.read_path()?)
}

/// The description behind a descriptor of a queue; `EBADF` for others and if `may` says no.
fn opened(fd: Fd, may: fn(OpenFlags) -> bool) -> Result<Arc<OpenFile>> {
    let open = fd.file()?;
    if open.downcast::<Queue>().is_some() && may(open.flags()) {
        Ok(open)
    } else {
        Err(Errno::EBADF)
    }
}

fn queue_of(open: &OpenFile) -> Result<&Queue> {
    open.downcast().ok_or(Errno::EBADF)
}

/// When to stop waiting, by the real-time clock; `None`: never.
fn deadline(at: UserPtr<Timespec>) -> Result<Option<Instant>> {
    let Some(time) = at.read_if_some()? else { return Ok(None) };
    Ok(Some(Clock::of(ClockId::REALTIME)?.look_at(time.to_ns()?)))
}

/// mq_timedsend: mq_send(3).
pub fn mq_timedsend(
    fd: Fd,
    text: UserAddress,
    len: usize,
    priority: u32,
    timeout: UserPtr<Timespec>,
) -> Result<()> {
    let deadline = deadline(timeout)?;
    if priority >= PRIORITIES {
        return Err(Errno::EINVAL);
    }
    let open = opened(fd, OpenFlags::can_write)?;
    let queue = queue_of(&open)?;
    if len as u64 > queue.size.message_bytes {
        return Err(Errno::EMSGSIZE);
    }
    // Who waits for room holds no memory for the message meanwhile.
    let attempt = || {
        let message = Message { priority, text: text.read_array(len)? };
        queue.send(message)
    };
    match attempt() {
        Err(Errno::EAGAIN) if !open.flags().contains(OpenFlags::NONBLOCK) => {}
        outcome => return outcome,
    }
    wait_until(&[&queue.senders], deadline, || match queue.check_room().and_then(|()| attempt()) {
        Err(Errno::EAGAIN) => None,
        outcome => Some(outcome),
    })
}

/// mq_timedreceive: mq_receive(3).
pub fn mq_timedreceive(
    fd: Fd,
    to: UserAddress,
    room: usize,
    priority_to: UserPtr<u32>,
    timeout: UserPtr<Timespec>,
) -> Result<usize> {
    let deadline = deadline(timeout)?;
    let open = opened(fd, OpenFlags::can_read)?;
    let queue = queue_of(&open)?;
    if (room as u64) < queue.size.message_bytes {
        return Err(Errno::EMSGSIZE);
    }
    let message = match queue.receive() {
        Err(Errno::EAGAIN) if !open.flags().contains(OpenFlags::NONBLOCK) => {
            await_message(queue, deadline)?
        }
        outcome => outcome?,
    };
    priority_to.write_if_some(&message.priority)?;
    to.write_bytes(&message.text)?;
    Ok(message.text.len())
}

fn await_message(queue: &Queue, deadline: Option<Instant>) -> Result<Message> {
    let receiver = queue.line_up();
    let outcome = wait_until(&[&receiver.queue], deadline, || queue.take_handed(&receiver).map(Ok));
    queue.give_up(&receiver);
    outcome
}

/// `struct sigevent`, as far as the kernel reads it.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub struct Event {
    value: u64,
    signal: SignalNumber,
    notify: i32,
}

impl Event {
    fn notice(&self) -> Result<Notice> {
        const SIGEV_SIGNAL: i32 = 0;
        const SIGEV_NONE: i32 = 1;
        const SIGEV_THREAD: i32 = 2;
        match self.notify {
            SIGEV_NONE => Ok(Notice::Nothing),
            SIGEV_SIGNAL => Ok(Notice::Signal(self.signal.or_probe()?, self.value)),
            // The C library has a thread that reads the cookie from a netlink socket.
            SIGEV_THREAD => {
                let cookie: [u8; COOKIE_LEN] = UserAddress(self.value).read()?;
                let open = Fd(self.signal.0 as i32).usable_file()?;
                Ok(Notice::Cookie(cookie, netlink::cookie_socket(&open)?))
            }
            _ => Err(Errno::EINVAL),
        }
    }
}

/// mq_notify(3).
pub fn mq_notify(fd: Fd, event: UserPtr<Event>) -> Result<()> {
    let notice = event.read_if_some()?.map(|event| event.notice()).transpose()?;
    let open = opened(fd, |_| true)?;
    let queue = queue_of(&open)?;
    let process = &current().process;
    match notice {
        None => queue.forget(process),
        Some(notice) => queue.register(Registration::new(process, notice))?,
    }
    Ok(())
}

/// mq_getsetattr: mq_getattr(3), mq_setattr(3).
pub fn mq_getsetattr(
    fd: Fd,
    new: UserPtr<QueueAttributes>,
    old_to: UserPtr<QueueAttributes>,
) -> Result<()> {
    let nonblock = i64::from(OpenFlags::NONBLOCK.bits());
    let new = new.read_if_some()?;
    if new.is_some_and(|new| new.flags & !nonblock != 0) {
        return Err(Errno::EINVAL);
    }
    let open = opened(fd, |_| true)?;
    let queue = queue_of(&open)?;
    let old = QueueAttributes {
        flags: i64::from((open.flags() & OpenFlags::NONBLOCK).bits()),
        messages_max: queue.size.messages as i64,
        message_bytes_max: queue.size.message_bytes as i64,
        messages: queue.count() as i64,
        reserved: [0; 4],
    };
    if let Some(new) = new {
        let mut flags = open.flags();
        flags.set(OpenFlags::NONBLOCK, new.flags & nonblock != 0);
        open.set_flags(flags);
    }
    old_to.write_if_some(&old)
}
