//! Importing files of the host into a tree and their contents into the store.

mod directory;
mod exclude;
mod file;

pub(crate) use directory::Import;
pub use directory::{ImportOptions, ImportReport, LeaveOut, Ownership, Readers, Unreadable};
pub use exclude::{Exclude, PathPattern};

use std::path::Path;

/// How far an import has come; given to progress callbacks after each file.
#[derive(Clone, Copy, Debug)]
pub struct Progress<'a> {
    /// The file on the host that was just done.
    pub path: &'a Path,
    /// Files of all kinds done so far.
    pub files: u64,
    /// Bytes of regular files done so far.
    pub bytes: u64,
}
