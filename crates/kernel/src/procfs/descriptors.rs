//! `/proc/PID/fd` and `/proc/PID/fdinfo`.

use alloc::sync::Arc;
use alloc::vec::Vec;

use super::process::process;
use crate::errno::{Errno, Result};
use crate::fs::fd_table::OnExec;
use crate::fs::file::{OpenFile, OpenFlags};
use crate::fs::inode::{FileType, Inode, Link};
use crate::fs::open::OpenFileInode;
use crate::fs::pseudo::{Generated, Names, Place, SymbolicLink};
use crate::task::ids::Pid;
use crate::task::ptrace::access;

fn parse(name: &[u8]) -> Option<i32> {
    if name.len() > 1 && name[0] == b'0' {
        return None;
    }
    core::str::from_utf8(name).ok()?.parse().ok().filter(|fd| *fd >= 0)
}

/// `EACCES` unless the running process may look into this one.
fn check(pid: Pid) -> Result<()> {
    access::check_read(&*process(pid)?)
}

/// A descriptor's file; `None`: it is not open.
fn find(pid: Pid, fd: i32) -> Result<Option<Arc<OpenFile>>> {
    Ok(process(pid)?.files.borrow_mut().borrow_mut().get(fd).ok())
}

fn list(pid: Pid, kind: FileType, emit: &mut dyn FnMut(&[u8], FileType)) -> Result<()> {
    let numbers: Vec<i32> = process(pid)?.files.borrow_mut().borrow_mut().numbers().collect();
    for fd in numbers {
        emit(alloc::format!("{fd}").as_bytes(), kind);
    }
    Ok(())
}

/// `/proc/PID/fd`: links to what is open.
pub(super) struct Descriptors {
    pub pid: Pid,
}

impl Names for Descriptors {
    fn lookup(&self, name: &[u8], directory: &Place) -> Result<Option<Arc<dyn Inode>>> {
        let pid = self.pid;
        let Some(fd) = parse(name) else { return Ok(None) };
        let Some(open) = find(pid, fd)? else { return Ok(None) };
        Ok(Some(SymbolicLink::of_open(directory.below(name), open.flags(), move || {
            check(pid)?;
            let open = find(pid, fd)?.ok_or(Errno::ENOENT)?;
            Ok(Link::Magic(OpenFileInode::path(&open)))
        })))
    }

    fn list(&self, emit: &mut dyn FnMut(&[u8], FileType)) -> Result<()> {
        list(self.pid, FileType::Symlink, emit)
    }

    fn permissions(&self) -> u32 {
        0o500
    }
}

/// `/proc/PID/fdinfo`: position and flags.
pub(super) struct DescriptorInfos {
    pub pid: Pid,
}

impl Names for DescriptorInfos {
    fn lookup(&self, name: &[u8], directory: &Place) -> Result<Option<Arc<dyn Inode>>> {
        let pid = self.pid;
        let Some(fd) = parse(name) else { return Ok(None) };
        check(pid)?;
        if find(pid, fd)?.is_none() {
            return Ok(None);
        }
        Ok(Some(Generated::read_only(directory.below(name), move || info(pid, fd))))
    }

    fn list(&self, emit: &mut dyn FnMut(&[u8], FileType)) -> Result<()> {
        check(self.pid)?;
        list(self.pid, FileType::Regular, emit)
    }
}

fn info(pid: Pid, fd: i32) -> Result<Vec<u8>> {
    let process = process(pid)?;
    let (open, on_exec) = {
        let table = process.files.borrow_mut().clone();
        let files = table.borrow_mut();
        (files.get(fd).map_err(|_| Errno::ENOENT)?, files.on_exec(fd).map_err(|_| Errno::ENOENT)?)
    };
    let mut flags = open.flags();
    flags.set(OpenFlags::CLOEXEC, on_exec == OnExec::Close);
    let path = OpenFileInode::path(&open);
    let mount = path.mount().map_or(0, |mount| mount.id);
    let text = alloc::format!(
        "pos:\t{}\nflags:\t0{:o}\nmnt_id:\t{mount}\nino:\t{}\n{}",
        open.position(),
        flags.bits(),
        path.inode().attributes().ino,
        open.file.details()
    );
    Ok(text.into_bytes())
}
