//! `/proc/PID`.

use alloc::sync::Arc;

use super::super::inode::{FileType, Inode, Link};
use super::super::open::OpenFileInode;
use super::super::pseudo::{Directory, Names, Place, SymbolicLink};
use crate::errno::{Errno, Result};
use crate::state::kernel;
use crate::task::{Process, Thread};

/// Parses a process or thread id: decimal, no leading zero.
fn parse_id(name: &[u8]) -> Option<u32> {
    if name.first() == Some(&b'0') {
        return None;
    }
    core::str::from_utf8(name).ok()?.parse().ok()
}

fn thread(tid: u32) -> Result<Arc<Thread>> {
    kernel().tasks.threads.lock().get(&tid).cloned().ok_or(Errno::ESRCH)
}

fn process(pid: u32) -> Result<Arc<Process>> {
    thread(pid).map(|thread| thread.process.clone())
}

/// The directory of a process, if `name` is the id of one.
pub fn directory(name: &[u8], place: Place) -> Option<Arc<dyn Inode>> {
    let id = parse_id(name)?;
    process(id).ok()?;
    Some(Directory::new(place, ProcessNames { pid: id }))
}

/// Emits the ids of all processes.
pub fn list(emit: &mut dyn FnMut(&[u8], FileType)) {
    for (tid, thread) in kernel().tasks.threads.lock().iter() {
        if *tid == thread.process.pid {
            emit(alloc::format!("{tid}").as_bytes(), FileType::Directory);
        }
    }
}

struct ProcessNames {
    pid: u32,
}

impl Names for ProcessNames {
    fn lookup(&self, name: &[u8], directory: &Place) -> Result<Option<Arc<dyn Inode>>> {
        let pid = self.pid;
        let place = directory.below(name);
        let inode: Arc<dyn Inode> = match name {
            b"exe" => SymbolicLink::new(place, move || {
                process(pid)?.executable.lock().clone().map(Link::Magic).ok_or(Errno::ENOENT)
            }),
            b"cwd" => SymbolicLink::new(place, move || {
                Ok(Link::Magic(process(pid)?.fs.lock().cwd.clone()))
            }),
            b"root" => SymbolicLink::new(place, move || {
                Ok(Link::Magic(process(pid)?.fs.lock().root.clone()))
            }),
            b"fd" => Directory::new(place, Descriptors { pid }),
            _ => return Ok(None),
        };
        Ok(Some(inode))
    }

    fn list(&self, emit: &mut dyn FnMut(&[u8], FileType)) -> Result<()> {
        for name in ["exe", "cwd", "root"] {
            emit(name.as_bytes(), FileType::Symlink);
        }
        emit(b"fd", FileType::Directory);
        Ok(())
    }
}

/// `/proc/PID/fd`.
struct Descriptors {
    pid: u32,
}

impl Names for Descriptors {
    fn lookup(&self, name: &[u8], directory: &Place) -> Result<Option<Arc<dyn Inode>>> {
        let Some(fd) = core::str::from_utf8(name).ok().and_then(|name| name.parse::<i32>().ok())
        else {
            return Ok(None);
        };
        let pid = self.pid;
        if process(pid)?.files.lock().get(fd).is_err() {
            return Ok(None);
        }
        Ok(Some(SymbolicLink::new(directory.below(name), move || {
            let open = process(pid)?.files.lock().get(fd).map_err(|_| Errno::ENOENT)?;
            Ok(Link::Magic(OpenFileInode::path(&open)))
        })))
    }

    fn list(&self, emit: &mut dyn FnMut(&[u8], FileType)) -> Result<()> {
        let process = process(self.pid)?;
        for fd in process.files.lock().numbers() {
            emit(alloc::format!("{fd}").as_bytes(), FileType::Symlink);
        }
        Ok(())
    }
}
