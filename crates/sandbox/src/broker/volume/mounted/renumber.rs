//! Answers with the inode numbers that files are shown under.

use bytemuck::bytes_of;
use thaw_abi::control::DirectoryEntry;

use crate::broker::volume::FileNumbers;

/// Replaces the inode number in an answer that is a `T`.
pub(super) fn renumber<T: bytemuck::Pod>(
    tail: &mut [u8],
    inode: fn(&mut T) -> &mut u64,
    numbers: &FileNumbers,
) {
    if let Ok(mut found) = bytemuck::try_pod_read_unaligned::<T>(tail) {
        let inode = inode(&mut found);
        *inode = numbers.shown(*inode);
        tail.copy_from_slice(bytes_of(&found));
    }
}

/// Replaces the inode numbers in a page of a listing.
pub(super) fn renumber_entries(tail: &mut [u8], numbers: &FileNumbers) {
    const HEAD: usize = std::mem::size_of::<DirectoryEntry>();
    let mut at = 0;
    while let Some(head) = tail.get_mut(at..at + HEAD) {
        renumber::<DirectoryEntry>(head, |entry| &mut entry.inode, numbers);
        let entry: DirectoryEntry = bytemuck::pod_read_unaligned(head);
        at += HEAD + (entry.name_len as usize).next_multiple_of(8);
    }
}
