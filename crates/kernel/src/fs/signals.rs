//! Signals that file system calls send to the running thread.

/// `SIGXFSZ` (signal(7)).
const SIGXFSZ: u32 = 25;
/// `SI_KERNEL`: sent by the kernel (sigaction(2)).
const SI_KERNEL: i32 = 0x80;

/// A file would have grown beyond `RLIMIT_FSIZE`.
pub fn file_size_exceeded() {
    use crate::task::signal::{SignalInfo, send_to_thread};
    send_to_thread(crate::task::current(), SignalInfo::new(SIGXFSZ, SI_KERNEL));
}
