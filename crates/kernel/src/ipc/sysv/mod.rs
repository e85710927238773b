//! System V semaphores, message queues and shared memory (sysvipc(7)).
//!
//! Objects have ids and keys ([`registry`]) and owners ([`permissions`]). Whoever
//! makes something possible that others wait for does it for them, in the order
//! in which they came: who looks after a semop(2) or msgsnd(2) sees the state
//! that Linux would show.

pub mod memory;
pub mod messages;
pub mod permissions;
pub mod proc_files;
pub mod registry;
pub mod semaphores;

use memory::Segment;
use messages::MessageQueue;
use registry::Registry;
use semaphores::SemaphoreSet;

use super::namespace;
use crate::task::Process;
use crate::time::clock;

/// Key of objects that nobody finds by key.
pub const IPC_PRIVATE: i32 = 0;

/// Commands of semctl(2), msgctl(2) and shmctl(2).
pub const IPC_RMID: u32 = 0;
/// Changes owner and mode.
pub const IPC_SET: u32 = 1;
/// Tells what there is to know about an object.
pub const IPC_STAT: u32 = 2;
/// Tells the limits.
pub const IPC_INFO: u32 = 3;

/// Does not wait (semop(2), msgsnd(2)).
pub const IPC_NOWAIT: u32 = 0o4000;

/// All objects of an IPC namespace. Saved.
#[derive(Default)]
pub struct SystemV {
    /// Sets of semaphores.
    pub semaphores: Registry<SemaphoreSet>,
    /// Message queues.
    pub messages: Registry<MessageQueue>,
    /// Shared memory.
    pub memory: Registry<Segment>,
}

/// Seconds since the epoch.
fn now_s() -> i64 {
    (clock::realtime_ns() / 1_000_000_000) as i64
}

/// The process has ended: what it has done with `SEM_UNDO` is undone, and memory
/// that only it had attached may go.
pub fn process_ended(process: &Process) {
    memory::process_ended(process);
}

/// Undoes what the process has done with `SEM_UNDO`.
pub fn undo_semaphores(process: &Process) {
    for namespace in namespace::all() {
        for (_, set) in namespace.system_v.semaphores.all() {
            set.undo(process.pid);
        }
    }
}
