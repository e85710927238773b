//! Eventfd, timerfd, signalfd, epoll, poll, select; System V IPC ([`sysv`]);
//! POSIX message queues ([`mqueue`]).
//!
//! Everything else here is a [`crate::fs::file::File`]: it never blocks itself, and
//! tells about changes through its wait queue. Wait queues are always woken
//! after the state behind them has been let go of, so that a waiter may look.

pub mod aio;
pub mod epoll;
pub mod eventfd;
pub mod mqueue;
pub mod namespace;
pub mod pidfd;
pub mod signalfd;
pub mod sysv;
pub mod timerfd;
