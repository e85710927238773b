//! The requests of a sandbox, checked.

use bytemuck::AnyBitPattern;
use thaw_abi::control::{
    ListDirectory, MSG_BELL, MSG_FS_LIST, MSG_FS_OPEN, MSG_FS_READLINK, MSG_FS_STAT,
    MSG_MEMORY_FILE, MSG_OPEN_BLOB, OpenBlob,
};

use super::path::is_harmless;

/// A broker request.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Request<'a> {
    /// The sandbox's number for it.
    pub sequence: u64,
    /// What it asks for.
    pub question: Question<'a>,
}

/// What a sandbox asks for. Every path is relative, below the root, and free of
/// `.`, `..`, NUL and empty components; the empty path is the root itself.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Question<'a> {
    /// A blob of the rootfs index.
    OpenBlob(u32),
    /// Attributes of a file.
    Stat(&'a [u8]),
    /// Entries of a directory.
    List {
        /// The directory.
        path: &'a [u8],
        /// Entries to skip.
        skip: u64,
    },
    /// Target of a symbolic link.
    ReadLink(&'a [u8]),
    /// A regular file, to be read.
    Open(&'a [u8]),
    /// Memory that the processes of the sandbox share.
    MemoryFile,
    /// An eventfd(2) with which they wake each other.
    Bell,
}

impl<'a> Question<'a> {
    /// Reads the body of a request; `None` if it is not one of `kind`.
    pub fn parse(kind: u32, body: &'a [u8]) -> Option<Self> {
        let path = |bytes| is_harmless(bytes).then_some(bytes);
        match kind {
            MSG_OPEN_BLOB => {
                let (body, rest): (OpenBlob, _) = split(body)?;
                rest.is_empty().then_some(Self::OpenBlob(body.blob))
            }
            MSG_FS_STAT => path(body).map(Self::Stat),
            MSG_FS_LIST => {
                let (body, rest): (ListDirectory, _) = split(body)?;
                Some(Self::List { path: path(rest)?, skip: body.skip })
            }
            MSG_FS_READLINK => path(body).map(Self::ReadLink),
            MSG_FS_OPEN => path(body).map(Self::Open),
            MSG_MEMORY_FILE => body.is_empty().then_some(Self::MemoryFile),
            MSG_BELL => body.is_empty().then_some(Self::Bell),
            _ => None,
        }
    }
}

fn split<T: AnyBitPattern>(bytes: &[u8]) -> Option<(T, &[u8])> {
    let (head, rest) = bytes.split_at_checked(size_of::<T>())?;
    Some((bytemuck::pod_read_unaligned(head), rest))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bodies_are_read() {
        assert_eq!(
            Question::parse(MSG_OPEN_BLOB, &[3, 0, 0, 0, 0, 0, 0, 0]),
            Some(Question::OpenBlob(3))
        );
        assert_eq!(
            Question::parse(MSG_FS_LIST, b"\x05\0\0\0\0\0\0\0usr/lib"),
            Some(Question::List { path: b"usr/lib", skip: 5 })
        );
        assert_eq!(Question::parse(MSG_FS_STAT, b""), Some(Question::Stat(b"")));
    }

    #[test]
    fn short_long_and_unknown_bodies_are_refused() {
        assert_eq!(Question::parse(MSG_OPEN_BLOB, &[3, 0, 0, 0]), None);
        assert_eq!(Question::parse(MSG_OPEN_BLOB, &[0; 9]), None);
        assert_eq!(Question::parse(MSG_FS_LIST, &[0; 7]), None);
        assert_eq!(Question::parse(MSG_FS_OPEN, b"../etc/passwd"), None);
        assert_eq!(Question::parse(999, b""), None);
    }
}
