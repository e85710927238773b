//! `/proc/PID/mem`: the memory of a process, also where that may not write (proc_pid_mem(5)).

use alloc::string::String;
use alloc::sync::Arc;

use super::process::process;
use crate::errno::{Errno, Result};
use crate::fs::file::{File, OpenFlags, Stat};
use crate::fs::inode::{Attributes, FileType, FilesystemId, Inode, Statfs};
use crate::fs::pseudo::Place;
use crate::io::{Sink, Source};
use crate::mm::force::Access;
use crate::platform::user::UserAddress;
use crate::task::ids::Pid;
use crate::task::ptrace::access;
use crate::task::visit::{self, Program};

/// Most bytes that are copied at a time.
const PIECE: usize = 64 << 10;

struct Memory {
    place: Place,
    pid: Pid,
}

/// The file.
pub(super) fn inode(place: Place, pid: Pid) -> Arc<dyn Inode> {
    Arc::new(Memory { place, pid })
}

impl Inode for Memory {
    fn attributes(&self) -> Attributes {
        self.place.attributes(FileType::Regular, 0o600)
    }
    fn file_type(&self) -> FileType {
        FileType::Regular
    }
    fn open(self: Arc<Self>, _: OpenFlags) -> Result<Arc<dyn File>> {
        let process = process(self.pid)?;
        if process.is_zombie() {
            return Err(Errno::ESRCH);
        }
        access::check(&process).or(Err(Errno::EACCES))?;
        Ok(Arc::new(OpenMemory { inode: self, program: Program::of(process) }))
    }
    fn truncate(&self, _: u64) -> Result<()> {
        Ok(())
    }
    fn filesystem(&self) -> FilesystemId {
        self.place.filesystem
    }
    fn statfs(&self) -> Statfs {
        self.place.statfs()
    }
}

/// The memory of the program that a process had when the file was opened.
struct OpenMemory {
    inode: Arc<Memory>,
    program: Program,
}

impl File for OpenMemory {
    fn read(&self, sink: &mut Sink<'_>, offset: u64) -> Result<usize> {
        let mut done = 0;
        while sink.remaining() > 0 && self.program.is_there() {
            let mut bytes = alloc::vec![0; sink.remaining().min(PIECE)];
            let from = UserAddress(offset.wrapping_add(done as u64));
            let read = visit::read(&self.program, from, &mut bytes).unwrap_or(0);
            if read == 0 {
                return if done > 0 { Ok(done) } else { Err(Errno::EIO) };
            }
            done += sink.put(&bytes[..read])?;
        }
        Ok(done)
    }

    fn write(&self, source: &mut Source<'_>, offset: u64) -> Result<usize> {
        let mut done = 0;
        while source.remaining() > 0 && self.program.is_there() {
            let mut bytes = alloc::vec![0; source.remaining().min(PIECE)];
            let taken = source.take(&mut bytes)?;
            let to = UserAddress(offset.wrapping_add(done as u64));
            let written = visit::write(&self.program, to, &bytes[..taken], Access::Forced);
            let written = written.unwrap_or(0);
            done += written;
            if written < taken {
                return if done > 0 { Ok(done) } else { Err(Errno::EIO) };
            }
        }
        Ok(done)
    }

    fn seekable(&self) -> bool {
        true
    }

    fn stat(&self) -> Result<Stat> {
        Ok(self.inode.attributes().to_stat())
    }

    fn description(&self) -> String {
        String::from("memory")
    }
}
