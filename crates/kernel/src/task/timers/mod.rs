//! Timers of processes and threads, and the system calls on time.

pub mod clock;
pub mod cpu_limit;
pub mod itimer;
pub mod posix;
