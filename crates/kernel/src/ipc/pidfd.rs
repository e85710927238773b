//! Descriptors of processes: pidfd_open(2), pidfd_send_signal(2), pidfd_getfd(2).

use alloc::string::{String, ToString};
use alloc::sync::Arc;

use crate::args::{Fd, Flags};
use crate::errno::{Errno, Result};
use crate::fs::fd_table;
use crate::fs::fd_table::{NewDescriptor, OnExec};
use crate::fs::file::{Events, File, OpenFile, OpenFlags};
use crate::platform::user::UserAddress;
use crate::state::kernel;
use crate::task::process::Process;
use crate::task::signal::{self, SI_TKILL, SI_USER, SIGNAL_COUNT, SignalInfo};
use crate::task::wait::WaitQueue;

/// A descriptor that stands for a process; readable once that has ended.
pub struct PidFd {
    /// The process.
    pub process: Arc<Process>,
}

impl File for PidFd {
    fn poll(&self) -> Events {
        if self.process.is_zombie() { Events::IN | Events::RDNORM } else { Events::empty() }
    }

    fn wait_queue(&self) -> Option<&WaitQueue> {
        Some(&self.process.released)
    }

    fn description(&self) -> String {
        "anon_inode:[pidfd]".to_string()
    }
}

/// A descriptor of the running process for a process that is being made. Nobody
/// can use it yet.
pub struct NewPidFd {
    descriptor: NewDescriptor,
    file: Arc<OpenFile>,
}

impl NewPidFd {
    /// Reserves a descriptor for `process` and writes its number to `at`.
    pub fn prepare(process: Arc<Process>, at: UserAddress) -> Result<Self> {
        let descriptor = NewDescriptor::reserve()?;
        at.write(&descriptor.number())?;
        Ok(Self { descriptor, file: new_file(process, OpenFlags::empty()) })
    }

    /// Opens the descriptor. It is closed at execve(2).
    pub fn install(self) {
        self.descriptor.install(self.file, OnExec::Close);
    }
}

fn new_file(process: Arc<Process>, flags: OpenFlags) -> Arc<OpenFile> {
    let status = OpenFlags::RDWR | (flags & OpenFlags::NONBLOCK);
    OpenFile::new(Arc::new(PidFd { process }), status, None)
}

/// The process behind a descriptor; `EBADF` if it is no pidfd.
pub fn process_of(fd: Fd) -> Result<Arc<Process>> {
    let open = fd.file()?;
    let pidfd = open.downcast::<PidFd>().ok_or(Errno::EBADF)?;
    Ok(pidfd.process.clone())
}

/// The process that a pidfd or an open `/proc/PID` stands for (pidfd_send_signal(2)).
fn signalled(fd: Fd) -> Result<Arc<Process>> {
    let open = fd.file()?;
    match open.path.as_ref().and_then(|path| path.inode().process()) {
        Some(pid) => kernel().tasks.process(pid).ok_or(Errno::ESRCH),
        None => process_of(fd),
    }
}

/// pidfd_open(2).
pub fn pidfd_open(pid: i32, Flags(flags): Flags) -> Result<u64> {
    let flags = OpenFlags::from_bits_retain(flags);
    if pid <= 0 || !OpenFlags::NONBLOCK.contains(flags) {
        return Err(Errno::EINVAL);
    }
    let tasks = &kernel().tasks;
    let process = match tasks.process(pid as u32) {
        Some(process) => process,
        // pidfd_open(2): of a thread that is not the main one.
        None if tasks.thread(pid as u32).is_some() => return Err(Errno::EINVAL),
        None => return Err(Errno::ESRCH),
    };
    fd_table::install(new_file(process, flags), OpenFlags::CLOEXEC).map(|fd| fd as u64)
}

/// pidfd_send_signal(2).
pub fn pidfd_send_signal(fd: Fd, signal: u32, info: UserAddress, flags: u32) -> Result<u64> {
    if flags != 0 || signal > SIGNAL_COUNT {
        return Err(Errno::EINVAL);
    }
    let process = signalled(fd)?;
    let own = crate::task::current_process();
    let info = match info {
        UserAddress::NULL => {
            SignalInfo::from_process(signal, SI_USER, own.pid, own.credentials.borrow_mut().uid)
        }
        at => {
            let info: SignalInfo = at.read()?;
            if info.number() != signal {
                return Err(Errno::EINVAL);
            }
            if (info.code >= 0 || info.code == SI_TKILL) && process.pid != own.pid {
                return Err(Errno::EPERM);
            }
            info
        }
    };
    if process.is_zombie() && kernel().tasks.process(process.pid).is_none() {
        return Err(Errno::ESRCH);
    }
    signal::check_permission(&process, signal)?;
    if signal != 0 {
        signal::send_to_process(&process, info);
    }
    Ok(0)
}

/// pidfd_getfd(2).
pub fn pidfd_getfd(pidfd: Fd, fd: Fd, Flags(flags): Flags) -> Result<u64> {
    if flags != 0 {
        return Err(Errno::EINVAL);
    }
    let process = process_of(pidfd)?;
    if process.is_zombie() {
        return Err(Errno::ESRCH);
    }
    let file = process.files.borrow_mut().get(fd.0)?;
    fd_table::install(file, OpenFlags::CLOEXEC).map(|fd| fd as u64)
}
