//! Inode numbers that programs see of a volume's files.
//!
//! Programs tell files apart by their numbers (SQLite does), and a frozen one opens a file again only
//! if it has the number that it had. Files that were put back are new ones for the host. So they are
//! shown under the numbers of those that they stand for.

use std::collections::{HashMap, HashSet};
use std::io;

/// Bits that are not set in a number of the host: no file system has so many inodes. A file whose
/// own number stands for another one is shown with some of them.
const SPARE: u32 = 8;
/// Bytes of the number of the directory, and of each pair.
const HEAD: usize = 8;
const PAIR: usize = 16;

/// The numbers that files of one directory are shown under, if these are not their own.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct FileNumbers {
    /// By the number that the host knows a file by.
    shown: HashMap<u64, u64>,
    /// All of these.
    taken: HashSet<u64>,
}

impl FileNumbers {
    /// Those of files that the host knows by the first of two numbers, and programs by the second.
    pub fn new(pairs: impl IntoIterator<Item = (u64, u64)>) -> Self {
        let shown: HashMap<_, _> = pairs.into_iter().collect();
        let taken = shown.values().copied().collect();
        Self { shown, taken }
    }

    /// The number that a file of the host is shown under; no two files have the same.
    pub fn shown(&self, of_host: u64) -> u64 {
        match self.shown.get(&of_host) {
            Some(shown) => *shown,
            None => {
                // Files of earlier tables may have taken some of these, too.
                let others = (0..).map(|other: u64| other.rotate_right(SPARE));
                let mut numbers = others.map(|other| of_host.wrapping_add(other));
                let free = numbers.find(|number| !self.taken.contains(number));
                free.expect("more numbers than files")
            }
        }
    }

    /// As [`FileNumbers::shown`], of a file that has such a number.
    pub fn get(&self, of_host: u64) -> Option<u64> {
        self.shown.get(&of_host).copied()
    }

    /// As bytes, for a directory whose own number on the host is `directory`.
    pub fn to_bytes(&self, directory: u64) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(HEAD + self.shown.len() * PAIR);
        bytes.extend_from_slice(&directory.to_le_bytes());
        for (of_host, shown) in &self.shown {
            bytes.extend_from_slice(&of_host.to_le_bytes());
            bytes.extend_from_slice(&shown.to_le_bytes());
        }
        bytes
    }

    /// What [`FileNumbers::to_bytes`] has written for this directory; empty if it was for another
    /// one, as when the directory was copied to another disk.
    ///
    /// # Errors
    /// The bytes are none of these.
    pub fn from_bytes(bytes: &[u8], directory: u64) -> io::Result<Self> {
        let number = |bytes: &[u8]| bytes.try_into().map(u64::from_le_bytes);
        let parts = bytes.split_at_checked(HEAD).filter(|(_, rest)| rest.len() % PAIR == 0);
        let (head, rest) = parts.ok_or(io::ErrorKind::InvalidData)?;
        if number(head).ok() != Some(directory) {
            return Ok(Self::default());
        }
        let pair = |pair: &[u8]| Some((number(&pair[..8]).ok()?, number(&pair[8..]).ok()?));
        Ok(Self::new(rest.chunks_exact(PAIR).filter_map(pair)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_two_files_are_shown_under_one_number() {
        let numbers = FileNumbers::new([(10, 3), (11, 10), (12, 12)]);
        let all: HashSet<_> = (1..20).map(|of_host| numbers.shown(of_host)).collect();
        assert_eq!(all.len(), 19);
        assert_eq!([10, 11, 12, 13].map(|of_host| numbers.shown(of_host)), [3, 10, 12, 13]);
        assert_eq!(numbers.shown(3), 3 | 1 << 56);
    }

    #[test]
    fn no_number_of_an_earlier_table_is_given_again() {
        let first = FileNumbers::new([(10, 3)]);
        let other = first.shown(3);
        assert_ne!(other, 3);
        // Both files were put back, and the host has used number 3 once more.
        let next = FileNumbers::new([(20, 3), (21, other)]);
        let all: HashSet<_> = [3, 20, 21].map(|of_host| next.shown(of_host)).into();
        assert_eq!(all.len(), 3);
    }

    #[test]
    fn numbers_are_those_of_one_directory() {
        let numbers = FileNumbers::new([(10, 3), (11, 10)]);
        let bytes = numbers.to_bytes(7);
        assert_eq!(FileNumbers::from_bytes(&bytes, 7).unwrap(), numbers);
        assert_eq!(FileNumbers::from_bytes(&bytes, 8).unwrap(), FileNumbers::default());
        FileNumbers::from_bytes(&bytes[1..], 7).unwrap_err();
        FileNumbers::from_bytes(b"", 7).unwrap_err();
    }
}
