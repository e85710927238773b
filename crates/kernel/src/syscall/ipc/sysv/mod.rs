//! System V semaphores, message queues and shared memory (sysvipc(7)).

pub mod memory;
pub mod messages;
pub mod semaphores;
