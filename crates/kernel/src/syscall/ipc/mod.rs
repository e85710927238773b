//! System calls on what `ipc` holds.

pub mod epoll;
pub mod eventfd;
pub mod mqueue;
pub mod poll;
pub mod select;
pub mod signalfd;
pub mod sysv;
pub mod timerfd;
