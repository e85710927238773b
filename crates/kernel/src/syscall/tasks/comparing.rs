//! Whether two threads share something: kcmp(2).

use alloc::sync::Arc;

use crate::errno::{Errno, Result};
use crate::fs::fd_table::FdTable;
use crate::fs::file::OpenFile;
use crate::state::kernel;
use crate::sync::KernelCell;
use crate::task::ids::Tid;
use crate::task::ptrace::access;
use crate::task::{Process, Thread};

const KCMP_FILE: i32 = 0;
const KCMP_VM: i32 = 1;
const KCMP_FILES: i32 = 2;
const KCMP_FS: i32 = 3;
const KCMP_SIGHAND: i32 = 4;
const KCMP_IO: i32 = 5;
const KCMP_SYSVSEM: i32 = 6;
const KCMP_EPOLL_TFD: i32 = 7;

/// kcmp(2).
pub fn kcmp(first: i32, second: i32, kind: i32, a: u64, b: u64) -> Result<u32> {
    let (first, second) = (inspected(first)?, inspected(second)?);
    let (one, other) = (&first.process, &second.process);
    let same = |is_same: bool| Ok(if is_same { 0 } else { order(first.tid(), second.tid()) });
    match kind {
        KCMP_FILE => {
            let (a, b) = (file_of(one, a)?, file_of(other, b)?);
            Ok(order(Arc::as_ptr(&a), Arc::as_ptr(&b)))
        }
        KCMP_VM => same(Arc::ptr_eq(&one.mm(), &other.mm())),
        KCMP_FILES => same(Arc::ptr_eq(&table_of(one), &table_of(other))),
        KCMP_FS => same(Arc::ptr_eq(&one.fs(), &other.fs())),
        KCMP_SIGHAND | KCMP_SYSVSEM => same(Arc::ptr_eq(one, other)),
        // Nobody has a context of input and output.
        KCMP_IO => Ok(0),
        KCMP_EPOLL_TFD => Err(Errno::EOPNOTSUPP),
        _ => Err(Errno::EINVAL),
    }
}

/// 0 if they are the same, otherwise 1 or 2, by an order that means nothing to the program.
fn order<T: Ord>(a: T, b: T) -> u32 {
    match a.cmp(&b) {
        core::cmp::Ordering::Equal => 0,
        core::cmp::Ordering::Less => 1,
        core::cmp::Ordering::Greater => 2,
    }
}

/// A thread, if the running process may look into its process (ptrace(2), "Ptrace access mode
/// checking").
fn inspected(number: i32) -> Result<Arc<Thread>> {
    let thread =
        u32::try_from(number).ok().and_then(|tid| kernel().tasks.thread(Tid::from_caller(tid)));
    let thread = thread.ok_or(Errno::ESRCH)?;
    access::check(&thread.process)?;
    Ok(thread)
}

/// The descriptors of a process. Both may be the same, so it is not held while they are compared.
fn table_of(process: &Process) -> Arc<KernelCell<FdTable>> {
    process.files.borrow_mut().clone()
}

fn file_of(process: &Process, fd: u64) -> Result<Arc<OpenFile>> {
    // As on Linux, the upper half is ignored.
    table_of(process).borrow_mut().get(fd as i32)
}
