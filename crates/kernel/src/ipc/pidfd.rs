//! Descriptors of processes: pidfd_open(2), pidfd_send_signal(2), pidfd_getfd(2).

use alloc::format;
use alloc::string::{String, ToString};
use alloc::sync::Arc;

use crate::args::{Fd, UserPtr};
use crate::errno::{Errno, Result};
use crate::fs::fd_table::{NewDescriptor, OnExec};
use crate::fs::file::{Events, File, OpenFile, OpenFlags};
use crate::state::kernel;
use crate::task::current_process;
use crate::task::process::Process;
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

    fn details(&self) -> String {
        // As Linux, which shows a process that was waited for as -1.
        match kernel().tasks.process(self.process.pid) {
            Some(process) if Arc::ptr_eq(&process, &self.process) => {
                // In the namespaces from the reader's down.
                let viewer = &current_process().pid_namespace;
                let all = viewer.numbers_down_to(&process.pid_namespace, process.pid.number());
                let below: String = all.iter().map(|number| format!("\t{number}")).collect();
                format!("Pid:\t{}\nNSpid:{below}\n", process.pid.for_caller())
            }
            _ => "Pid:\t-1\nNSpid:\t-1\n".to_string(),
        }
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
    pub fn prepare(process: Arc<Process>, at: UserPtr<i32>) -> Result<Self> {
        let descriptor = NewDescriptor::reserve()?;
        at.write(&descriptor.number())?;
        let file = OpenFile::new(Arc::new(PidFd { process }), OpenFlags::RDWR, None);
        Ok(Self { descriptor, file })
    }

    /// Opens the descriptor. It is closed at execve(2).
    pub fn install(self) {
        self.descriptor.install(self.file, OnExec::Close);
    }
}

/// The process behind a descriptor; `EBADF` if it is no pidfd.
pub fn process_of(fd: Fd) -> Result<Arc<Process>> {
    let open = fd.file()?;
    let pidfd = open.downcast::<PidFd>().ok_or(Errno::EBADF)?;
    Ok(pidfd.process.clone())
}
