//! `/proc` (proc(5)), as much of it as language runtimes and tools read.

mod process;

use alloc::sync::Arc;

use super::inode::{FileType, FilesystemId, Inode, Link};
use super::pseudo::{Directory, Fixed, Item, Names, Place, SymbolicLink};
use crate::errno::Result;

/// `PROC_SUPER_MAGIC` (statfs(2)).
const MAGIC: i64 = 0x9fa0;

/// The root directory.
pub fn root(filesystem: FilesystemId) -> Arc<dyn Inode> {
    let place = Place { filesystem, magic: MAGIC, ino: 1, owner: (0, 0) };
    Directory::new(place, Root)
}

/// Names in `/proc`: the fixed ones, then one per process.
struct Root;

const FIXED: &[Item] = &[];

impl Names for Root {
    fn lookup(&self, name: &[u8], directory: &Place) -> Result<Option<Arc<dyn Inode>>> {
        if let Some(found) = Fixed(FIXED).lookup(name, directory)? {
            return Ok(Some(found));
        }
        let place = directory.below(name);
        match name {
            b"self" => Ok(Some(SymbolicLink::new(place, || {
                Ok(Link::Text(
                    alloc::format!("{}", crate::task::current_process().pid).into_bytes(),
                ))
            }))),
            b"thread-self" => Ok(Some(SymbolicLink::new(place, || {
                let (pid, tid) = (crate::task::current_process().pid, crate::task::current().tid);
                Ok(Link::Text(alloc::format!("{pid}/task/{tid}").into_bytes()))
            }))),
            name => Ok(process::directory(name, place)),
        }
    }

    fn list(&self, emit: &mut dyn FnMut(&[u8], FileType)) -> Result<()> {
        Fixed(FIXED).list(emit)?;
        emit(b"self", FileType::Symlink);
        emit(b"thread-self", FileType::Symlink);
        process::list(emit);
        Ok(())
    }
}
