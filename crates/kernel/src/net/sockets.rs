//! All sockets of the sandbox, as tables show them: `/proc/net` (proc(5)), sock_diag(7).
//!
//! A socket is found where somebody has it: at a descriptor of a process, or in the queue of one that
//! listens. So tables cost nothing until somebody reads one. Who reads one goes on in small steps, since a
//! process may have very many descriptors, and the kernel lock is not to be held for long.

use alloc::collections::{BTreeSet, VecDeque};
use alloc::sync::Arc;

use super::address::Endpoint;
use super::namespace::{self, NetNamespace};
use super::socket::{Protocol, Socket};
use crate::platform::kernel_lock;
use crate::state::kernel;
use crate::task::ids::Pid;
use crate::task::thread::running;
use crate::task::{Process, scheduler};

/// How many descriptors are looked at in one step.
const DESCRIPTORS_AT_ONCE: usize = 1024;
/// After so many steps others may have the kernel lock.
const STEPS_AT_ONCE: u32 = 256;

/// The state of a connection, with the numbers of TCP (`TCP_*` in net/tcp_states.h), which tables
/// have for all sockets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum ConnectionState {
    /// Both ends are open.
    Established = 1,
    /// It is being made.
    SynSent = 2,
    /// This end has said that it sends no more.
    FinWait2 = 5,
    /// There is none, or it has ended.
    Close = 7,
    /// The other end has said so.
    CloseWait = 8,
    /// The socket waits for connections.
    Listen = 10,
}

/// What tables say of a socket, besides its name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Listed {
    /// State of the connection.
    pub state: ConnectionState,
    /// The other end, if it has an address.
    pub remote: Option<Endpoint>,
    /// Bytes that can be read; for one that listens, connections that wait.
    pub receive_queue: usize,
    /// Bytes that have not arrived at the other end; for one that listens, the most connections that wait.
    pub send_queue: usize,
    /// Inode number of the Unix socket at the other end; 0 if there is none.
    pub peer_ino: u64,
}

impl Listed {
    /// A socket without another end and with empty queues.
    pub fn new(state: ConnectionState) -> Self {
        Self { state, remote: None, receive_queue: 0, send_queue: 0, peer_ino: 0 }
    }
}

/// A socket that was found.
pub struct Found {
    /// The socket.
    pub socket: Arc<dyn Protocol>,
    /// What tables say of it.
    pub listed: Listed,
    /// The user who has it.
    pub uid: u32,
    /// Its inode number; 0 while it waits to be accepted, as on Linux.
    pub ino: u64,
}

/// A walk over all sockets that are in some table. Each is found once.
pub struct Walk {
    /// The network namespace of who looks. Processes in others are left out.
    namespace: Option<Arc<NetNamespace>>,
    /// The process whose descriptors are being looked at, or the next one.
    pid: Pid,
    /// The next descriptor.
    fd: usize,
    /// Inode numbers of those that may be found again, since several descriptors have them.
    known: BTreeSet<u64>,
    /// Connections that wait to be accepted.
    waiting: VecDeque<Arc<dyn Protocol>>,
}

impl Default for Walk {
    fn default() -> Self {
        Self {
            namespace: None,
            pid: Pid::new(0),
            fd: 0,
            known: BTreeSet::new(),
            waiting: VecDeque::new(),
        }
    }
}

/// What one step has come to.
enum Step {
    Found(Found),
    /// It goes on.
    Nothing,
    /// All processes have been looked at.
    End,
}

impl Walk {
    /// The next socket that `is_wanted`. Others may go on meanwhile, so no reference may be held.
    pub fn next(&mut self, is_wanted: impl Fn(&dyn Protocol) -> bool) -> Option<Found> {
        for steps in 1.. {
            match self.step(&is_wanted) {
                Step::Found(found) => return Some(found),
                Step::End => return None,
                Step::Nothing if steps % STEPS_AT_ONCE == 0 => {
                    kernel_lock::give_way();
                    scheduler::yield_now();
                }
                Step::Nothing => {}
            }
        }
        None
    }

    fn step(&mut self, is_wanted: &impl Fn(&dyn Protocol) -> bool) -> Step {
        if let Some(socket) = self.waiting.pop_front() {
            return list(socket, 0, 0);
        }
        let Some(process) = kernel().tasks.process_from(self.pid) else { return Step::End };
        if process.pid != self.pid {
            (self.pid, self.fd) = (process.pid, 0);
        }
        let looked_at = self.namespace.get_or_insert_with(namespace::own);
        if !Arc::ptr_eq(&process.namespaces().net, looked_at) {
            (self.pid, self.fd) = (Pid::new(process.pid.number() + 1), 0);
            return Step::Nothing;
        }
        match self.look(&process) {
            Some(socket) if is_wanted(&*socket) => {
                self.waiting.extend(socket.waiting_connections());
                let (uid, ino) = (process.credentials.borrow_mut().fsuid, socket.common().ino);
                list(socket, shown_user(uid), ino)
            }
            _ => Step::Nothing,
        }
    }

    /// Looks at some descriptors of a process, up to a socket that was not found before.
    fn look(&mut self, process: &Process) -> Option<Arc<dyn Protocol>> {
        let table = process.files.borrow_mut().clone();
        let table = table.borrow_mut();
        let is_shared = table.users() > 1;
        let mut looked = 0;
        for (fd, file) in table.slots_from(self.fd).take(DESCRIPTORS_AT_ONCE) {
            self.fd = fd + 1;
            looked += 1;
            let Some(file) = file else { continue };
            let Some(socket) = file.downcast::<Socket>() else { continue };
            let may_come_again = is_shared || Arc::strong_count(file) > 1;
            if !may_come_again || self.known.insert(socket.protocol.common().ino) {
                return Some(socket.protocol.clone());
            }
        }
        if looked == 0 {
            (self.pid, self.fd) = (Pid::new(self.pid.number() + 1), 0);
        }
        None
    }
}

/// The id of a user in the user namespace of who looks.
fn shown_user(uid: u32) -> u32 {
    running().map_or(uid, |thread| {
        thread.process.credentials.borrow_mut().user_namespace.shown_user(uid)
    })
}

fn list(socket: Arc<dyn Protocol>, uid: u32, ino: u64) -> Step {
    match socket.listed() {
        Some(listed) => Step::Found(Found { socket, listed, uid, ino }),
        None => Step::Nothing,
    }
}
