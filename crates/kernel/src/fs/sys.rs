//! `/sys` (sysfs(5)), as much of it as language runtimes read.

use alloc::sync::Arc;

use super::inode::{FilesystemId, Inode};
use super::pseudo::{Directory, Fixed, Item, Place};

/// `SYSFS_MAGIC` (statfs(2)).
const MAGIC: i64 = 0x6265_6572;

const ROOT: &[Item] = &[];

/// The root directory.
pub fn root(filesystem: FilesystemId) -> Arc<dyn Inode> {
    let place = Place { filesystem, magic: MAGIC, ino: 1, owner: (0, 0) };
    Directory::new(place, Fixed(ROOT))
}
