//! Answers with the inode numbers that files are shown under.

use bytemuck::bytes_of;
use thaw_abi::bind::Walked;
use thaw_abi::control::{DirectoryEntry, FileAttributes};

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

/// Replaces the inode numbers in the reply to a walk.
pub(super) fn renumber_walked(tail: &mut [u8], numbers: &FileNumbers) {
    let found = tail.get_mut(size_of::<Walked>()..).unwrap_or_default();
    for found in found.chunks_exact_mut(size_of::<FileAttributes>()) {
        renumber::<FileAttributes>(found, |found| &mut found.inode, numbers);
    }
}

/// Replaces the inode numbers in a page of a listing.
pub(super) fn renumber_entries(tail: &mut [u8], numbers: &FileNumbers) {
    const HEAD: usize = size_of::<DirectoryEntry>();
    let mut at = 0;
    while let Some(head) = tail.get_mut(at..at + HEAD) {
        renumber::<DirectoryEntry>(head, |entry| &mut entry.inode, numbers);
        let entry: DirectoryEntry = bytemuck::pod_read_unaligned(head);
        at += HEAD + (entry.name_len as usize).next_multiple_of(8);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use bytemuck::Zeroable;

    #[test]
    fn names_of_a_path_have_the_numbers_that_they_are_shown_under() {
        let with = |inode| FileAttributes { inode, ..FileAttributes::zeroed() };
        let head = Walked { errno: 0, reserved: 0 };
        let reply = |inodes: [u64; 2]| {
            let [first, second] = inodes.map(with);
            [bytes_of(&head), bytes_of(&first), bytes_of(&second)].concat()
        };
        let mut walked = reply([10, 11]);
        renumber_walked(&mut walked, &FileNumbers::new([(11, 3)]));
        assert_eq!(walked, reply([10, 3]));
        renumber_walked(&mut walked[..4], &FileNumbers::default());
    }
}
