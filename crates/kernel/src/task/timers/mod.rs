//! Timers of processes and threads, and the system calls on time.

pub mod cpu_clock;
pub mod itimer;
pub mod posix;
