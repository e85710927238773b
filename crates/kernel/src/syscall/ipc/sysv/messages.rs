//! System calls on System V message queues.

use bytemuck::{Pod, Zeroable};

use crate::args::Mode;
use crate::errno::{Errno, Result};
use crate::ipc::namespace::{left_of, own};
use crate::ipc::sysv::messages::{Message, MessageQueue, QUEUE_BYTES, Wanted, Wish};
use crate::ipc::sysv::permissions::{Caller, READ, UserPermissions, WRITE};
use crate::ipc::sysv::registry::{Object, place_of};
use crate::ipc::sysv::{IPC_INFO, IPC_NOWAIT, IPC_RMID, IPC_SET, IPC_STAT};
use crate::platform::user::UserAddress;
use crate::task::ids::Pid;
use crate::task::wait::wait_until;
use crate::task::{Capabilities, current_process};

/// Most queues (`MSGMNI`).
const QUEUES_MAX: usize = 32000;
/// Longest message (`MSGMAX`).
const MESSAGE_MAX: usize = 8192;

const MSG_STAT: u32 = 11;
const MSG_INFO: u32 = 12;
const MSG_STAT_ANY: u32 = 13;
/// Cuts a message that is too long.
const MSG_NOERROR: u32 = 0o10000;
/// Any type but that one.
const MSG_EXCEPT: u32 = 0o20000;
/// Copies a message, by its place in the queue.
const MSG_COPY: u32 = 0o40000;

fn caller() -> Caller {
    Caller::current()
}

/// msgget(2).
pub fn msgget(key: i32, Mode(flags): Mode) -> Result<i32> {
    let id = own().system_v.messages.get(
        (key, flags),
        &caller(),
        left_of(QUEUES_MAX, |it| it.messages.count()),
        |_| Ok(()),
        |permissions| Ok(MessageQueue::new(permissions)),
    )?;
    Ok(id)
}

/// As Linux: restarted after a signal only if no handler ran.
fn interrupted(error: Errno) -> Errno {
    if error == Errno::ERESTARTSYS { Errno::ERESTARTNOHAND } else { error }
}

/// msgsnd(2).
pub fn msgsnd(id: i32, at: UserAddress, len: u64, Mode(flags): Mode) -> Result<()> {
    let kind: i64 = at.read()?;
    let len = usize::try_from(len).ok().filter(|&len| len <= MESSAGE_MAX);
    let len = len.filter(|_| id >= 0 && kind >= 1).ok_or(Errno::EINVAL)?;
    let text = at.offset(8).read_array::<u8>(len)?;
    let queue = own().system_v.messages.find(id)?;
    let pid = current_process().pid;
    let mut message = Some(Message { kind, text });
    let mut attempt = || {
        queue.permissions().get().check(WRITE, &caller())?;
        queue.send(&mut message, pid)
    };
    if flags & IPC_NOWAIT != 0 {
        return attempt();
    }
    wait_until(&[&queue.senders], None, || match attempt() {
        Err(Errno::EAGAIN) => None,
        outcome => Some(outcome),
    })
    .map_err(interrupted)
}

fn wanted(kind: i64, flags: u32) -> Wanted {
    match kind {
        0 => Wanted::Any,
        i64::MIN => Wanted::Lowest(i64::MAX),
        kind if kind < 0 => Wanted::Lowest(-kind),
        kind if flags & MSG_EXCEPT != 0 => Wanted::Except(kind),
        kind => Wanted::Kind(kind),
    }
}

/// msgrcv(2).
pub fn msgrcv(id: i32, to: UserAddress, len: i64, kind: i64, Mode(flags): Mode) -> Result<usize> {
    let room = usize::try_from(len).ok().filter(|_| id >= 0).ok_or(Errno::EINVAL)?;
    if flags & MSG_COPY != 0 && (flags & MSG_EXCEPT != 0 || flags & IPC_NOWAIT == 0) {
        return Err(Errno::EINVAL);
    }
    let queue = own().system_v.messages.find(id)?;
    let wish = Wish {
        wanted: wanted(kind, flags),
        room,
        is_cut: flags & MSG_NOERROR != 0,
        pid: current_process().pid,
    };
    let message = if flags & MSG_COPY != 0 {
        queue.permissions().get().check(READ, &caller())?;
        queue.copy(kind, &wish)?
    } else {
        receive(&queue, wish, flags)?
    };
    let len = message.text.len().min(room);
    to.write(&message.kind)?;
    to.offset(8).write_bytes(&message.text[..len])?;
    Ok(len)
}

fn receive(queue: &MessageQueue, wish: Wish, flags: u32) -> Result<Message> {
    loop {
        queue.permissions().get().check(READ, &caller())?;
        match queue.take(&wish) {
            Err(Errno::ENOMSG) if flags & IPC_NOWAIT == 0 => {}
            outcome => return outcome,
        }
        let receiver = queue.line_up(wish);
        let outcome = wait_until(&[&receiver.queue], None, || receiver.take_outcome());
        queue.give_up(&receiver);
        match outcome {
            Err(Errno::EAGAIN) => {}
            outcome => return outcome.map_err(interrupted),
        }
    }
}

/// `struct msqid64_ds`.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct Status {
    permissions: UserPermissions,
    times_s: [i64; 3],
    bytes: u64,
    count: u64,
    bytes_max: u64,
    last_sender: u32,
    last_receiver: u32,
    unused: [u64; 2],
}

/// msgctl(2).
pub fn msgctl(id: i32, command: u32, argument: UserAddress) -> Result<u64> {
    if id < 0 {
        return Err(Errno::EINVAL);
    }
    let namespace = own();
    let queues = &namespace.system_v.messages;
    match command {
        IPC_INFO | MSG_INFO => info(command, argument).map(u64::from),
        IPC_STAT => {
            let queue = queues.find(id)?;
            queue.permissions().get().check(READ, &caller())?;
            argument.write(&status(id, &queue)).map(|()| 0)
        }
        MSG_STAT | MSG_STAT_ANY => {
            let (id, queue) = queues.at_place(place_of(id))?;
            if command == MSG_STAT {
                queue.permissions().get().check(READ, &caller())?;
            }
            argument.write(&status(id, &queue)).map(|()| id as u64)
        }
        IPC_SET => {
            let wanted: Status = argument.read()?;
            let queue = queues.find(id)?;
            let mut permissions = queue.permissions().get();
            permissions.check_owner(&caller())?;
            if wanted.bytes_max > QUEUE_BYTES && !caller().can(Capabilities::SYS_RESOURCE) {
                return Err(Errno::EPERM);
            }
            permissions.update(&wanted.permissions, &caller().user_namespace)?;
            queue.permissions().set(permissions);
            queue.changed(wanted.bytes_max);
            Ok(0)
        }
        IPC_RMID => {
            let queue = queues.find(id)?;
            queue.permissions().get().check_owner(&caller())?;
            queues.remove(id);
            queue.removed();
            Ok(0)
        }
        _ => Err(Errno::EINVAL),
    }
}

fn status(id: i32, queue: &MessageQueue) -> Status {
    let permissions = queue.permissions().get().to_user(id, &caller().user_namespace);
    queue.look(|state| Status {
        permissions,
        times_s: state.times_s,
        bytes: state.bytes,
        count: state.count() as u64,
        bytes_max: state.bytes_max,
        last_sender: Pid::new(state.last_sender).for_caller(),
        last_receiver: Pid::new(state.last_receiver).for_caller(),
        unused: [0; 2],
    })
}

/// `struct msginfo`: the limits, with what is in use for `MSG_INFO`.
fn info(command: u32, to: UserAddress) -> Result<u32> {
    let namespace = own();
    let queues = &namespace.system_v.messages;
    let (queues_max, queue_bytes) = (QUEUES_MAX as i32, QUEUE_BYTES as i32);
    let (pool, map, headers) = match command {
        MSG_INFO => {
            let all = queues.all();
            let messages: usize = all.iter().map(|(_, queue)| queue.look(|s| s.count())).sum();
            let bytes: u64 = all.iter().map(|(_, queue)| queue.look(|s| s.bytes)).sum();
            (all.len() as i32, messages as i32, bytes as i32)
        }
        _ => (queues_max * queue_bytes / 1024, queue_bytes, queue_bytes),
    };
    // pool, map, longest message, bytes of a queue, queues, bytes of a segment,
    // headers, segments.
    const SEGMENT_BYTES: i32 = 16;
    const SEGMENTS: i32 = 0xffff;
    let info: [i32; 8] =
        [pool, map, MESSAGE_MAX as i32, queue_bytes, queues_max, SEGMENT_BYTES, headers, SEGMENTS];
    to.write(&info)?;
    Ok(queues.last_place())
}
