//! What pipes and sockets ask of the rest of the kernel. In unit tests there is
//! no guest and no boot, so there these do nothing.

use alloc::sync::Arc;

use crate::errno::Result;
use crate::fs::fd_table::{NewDescriptor, OnExec};
use crate::fs::file::{OpenFile, OpenFlags};
use crate::platform::user::UserAddress;
use crate::task::current_process;
use crate::task::process::RLIMIT_NOFILE;

pub use crate::mm::pages::{PageBox, alloc_page};

/// The open file behind a descriptor of the running process; `EBADF`.
pub fn file(fd: i32) -> Result<Arc<OpenFile>> {
    current_process().files.lock().get(fd)
}

/// Number of descriptors that the running process' table has room for. A
/// program that a shell starts finds room for 256 on Linux.
pub fn descriptor_capacity() -> usize {
    current_process().files.lock().capacity().max(256)
}

/// Gives a file the lowest free descriptor; `EMFILE`. Only `O_CLOEXEC` of
/// `flags` is looked at.
pub fn install(file: Arc<OpenFile>, flags: OpenFlags) -> Result<i32> {
    let process = current_process();
    let limit = process.limits.lock()[RLIMIT_NOFILE].current;
    process.files.lock().insert(file, on_exec(flags), limit)
}

/// What `O_CLOEXEC` says.
pub fn on_exec(flags: OpenFlags) -> OnExec {
    if flags.contains(OpenFlags::CLOEXEC) { OnExec::Close } else { OnExec::Keep }
}

/// Gives two files descriptors and writes the numbers to `at` (pipe(2), socketpair(2)).
pub fn install_pair(at: UserAddress, files: [Arc<OpenFile>; 2], flags: OpenFlags) -> Result<u64> {
    let descriptors = [NewDescriptor::reserve()?, NewDescriptor::reserve()?];
    at.write(&descriptors.each_ref().map(NewDescriptor::number))?;
    for (descriptor, file) in descriptors.into_iter().zip(files) {
        descriptor.install(file, on_exec(flags));
    }
    Ok(0)
}

/// Whether a signal waits for the running thread.
pub fn signal_is_pending() -> bool {
    #[cfg(test)]
    return false;
    #[cfg(not(test))]
    crate::task::signal::is_pending(crate::task::thread::current())
}

/// Sends `SIGPIPE` to the running thread.
pub fn send_sigpipe() {
    #[cfg(not(test))]
    crate::task::signal::send_sigpipe();
}

/// Ends the time of a temporary signal mask of the running thread.
pub fn restore_mask() {
    #[cfg(not(test))]
    crate::task::signal::restore_mask();
}

/// Replaces the running thread's signal mask until the call returns to the guest.
pub fn set_temporary_mask(_mask: u64) {
    #[cfg(not(test))]
    crate::task::signal::set_temporary_mask(_mask);
}

/// Number of this boot.
pub fn boot_generation() -> u64 {
    #[cfg(test)]
    return 0;
    #[cfg(not(test))]
    crate::state::generation()
}

/// Nanoseconds since the epoch.
pub fn realtime_ns() -> u64 {
    #[cfg(test)]
    return 1;
    #[cfg(not(test))]
    crate::time::clock::realtime_ns()
}

/// Notes that the first response byte has been sent.
pub fn first_byte() {
    #[cfg(not(test))]
    crate::host::phases::first_byte();
}
