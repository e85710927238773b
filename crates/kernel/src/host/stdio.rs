//! Host descriptors of the standard streams.

use core::sync::atomic::{AtomicI32, Ordering};

use crate::platform::machine::HostFd;

static DESCRIPTORS: [AtomicI32; 3] = [AtomicI32::new(-1), AtomicI32::new(-1), AtomicI32::new(-1)];

/// Notes the host descriptor of a standard stream (0, 1 or 2).
pub fn set(stream: usize, fd: i32) {
    DESCRIPTORS[stream].store(fd, Ordering::Relaxed);
}

/// The host descriptor of a standard stream; `None` if it has none in this
/// boot and behaves like `/dev/null`.
pub fn descriptor(stream: usize) -> Option<HostFd> {
    let fd = DESCRIPTORS.get(stream)?.load(Ordering::Relaxed);
    (fd >= 0).then_some(HostFd::new(fd))
}
