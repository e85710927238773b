//! What can go wrong in the store.

use std::io;
use std::path::{Path, PathBuf};

use rustix::io::Errno;

use crate::collect::CollectError;
use crate::id::{InvalidName, Name};
use crate::index::TreeError;

/// Result of a store operation.
pub type Result<T> = std::result::Result<T, StoreError>;

/// Kinds of things that the store keeps.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Kind {
    /// Content of a regular file.
    Blob,
    /// A rootfs index.
    Index,
    /// A name for a rootfs index.
    Rootfs,
    /// A function's record.
    Function,
    /// A snapshot image.
    Image,
    /// A snapshot image, packed.
    Packed,
    /// The recorded working set of an image.
    WorkingSet,
    /// The pages of an image's working set.
    Prefetch,
    /// The record of the images that an image differs from.
    Ancestors,
    /// A build of the Thaw kernel.
    Kernel,
    /// The record of the kernel that an image needs.
    ImageKernel,
    /// A checkpoint's record.
    Checkpoint,
    /// A runtime template's record.
    Template,
}

impl std::fmt::Display for Kind {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Kind::Blob => "file content",
            Kind::Index => "rootfs index",
            Kind::Rootfs => "rootfs",
            Kind::Function => "function",
            Kind::Image => "image",
            Kind::Packed => "packed image",
            Kind::WorkingSet => "working set",
            Kind::Prefetch => "prefetch file",
            Kind::Ancestors => "list of the ancestors of image",
            Kind::Kernel => "kernel build",
            Kind::ImageKernel => "record of the kernel of image",
            Kind::Checkpoint => "checkpoint",
            Kind::Template => "template",
        })
    }
}

/// Why the store could not do what it was asked.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// The host refused an operation.
    #[error("cannot {action} {}: {source}", path.display())]
    Io {
        /// What was tried, to read as "cannot …".
        action: &'static str,
        /// The file concerned.
        path: PathBuf,
        /// The host's reason.
        source: io::Error,
    },
    /// It is in a directory of another user's.
    #[error(
        "permission denied on {}, which belongs to user {owner}; run this as that user or as \
         root, or set THAW_HOME to a directory of your own",
        path.display()
    )]
    OfAnotherUser {
        /// The directory, or a file in it.
        path: PathBuf,
        /// User id of its owner.
        owner: u32,
    },
    /// What was to be stored cannot be read.
    #[error("it cannot be read: {0}")]
    Source(io::Error),
    /// The store's file system or the quota is full. Nothing was published.
    #[error(
        "the disk that holds {} is full: free some space on it or remove functions that are no \
         longer used, then try again; nothing in the store was changed", path.display()
    )]
    NoSpace {
        /// The file that could not be written.
        path: PathBuf,
    },
    /// The thing asked for is not in the store.
    #[error("there is no {kind} {name} in the store")]
    NotFound {
        /// What was looked for.
        kind: Kind,
        /// Its name or hash.
        name: String,
    },
    /// The thing is there but is not what was once written.
    #[error("{kind} {name} is damaged ({why}): {way_out}")]
    Damaged {
        /// What is damaged.
        kind: Kind,
        /// Its name or hash.
        name: String,
        /// How it was noticed.
        why: String,
        /// What to do about it.
        way_out: &'static str,
    },
    /// The record of a thing was written by a later program. It is not touched.
    #[error(
        "the record of {kind} {name} has version {version}, this program knows {known}: use the \
         version of Thaw that wrote it, or remove the {kind} first"
    )]
    LaterRecord {
        /// What it is.
        kind: Kind,
        /// Its name.
        name: String,
        /// The record's version.
        version: u64,
        /// The last one that this program knows.
        known: u32,
    },
    /// The store was written by another version.
    #[error(
        "the store {} has format {found:?}, this program knows {known:?}: use the \
         version of Thaw that made it, or choose another directory", path.display()
    )]
    Version {
        /// The store's root.
        path: PathBuf,
        /// What its version file says.
        found: String,
        /// What this program writes.
        known: &'static str,
    },
    /// Other processes kept the store in use for the whole waiting time.
    #[error(
        "the store {} is in use by an import or a build that goes on: try again when it \
         is done", path.display()
    )]
    Busy {
        /// The store's root.
        path: PathBuf,
    },
    /// A new version of a function was made from one that is not the newest.
    #[error("{name} was built anew meanwhile; nothing was changed")]
    Replaced {
        /// The function.
        name: Name,
    },
    /// The name is taken by somebody else.
    #[error(
        "there is a {kind} {name} already, and it belongs to somebody else: choose another name"
    )]
    Owned {
        /// What has the name.
        kind: Kind,
        /// The name.
        name: Name,
    },
    /// Others need what was to be removed.
    #[error(
        "{kind} {name} cannot be removed: {} hold only how they differ from it; remove those first",
        join(by)
    )]
    InUse {
        /// What was to be removed.
        kind: Kind,
        /// Its name.
        name: Name,
        /// Who needs it.
        by: Vec<Name>,
    },
    /// A file kept changing while it was imported.
    #[error(
        "{} changes while it is being imported: stop the program that writes it, or \
         leave it out", path.display()
    )]
    Changing {
        /// The file on the host.
        path: PathBuf,
    },
    /// A name is not usable.
    #[error(transparent)]
    Name(#[from] InvalidName),
    /// A file tree cannot be built as asked.
    #[error(transparent)]
    Tree(#[from] TreeError),
    /// Files could not be collected from the host.
    #[error(transparent)]
    Collect(#[from] CollectError),
}

impl StoreError {
    /// Wraps an error of the host with what was tried on which file.
    pub(crate) fn io(action: &'static str, path: &Path, source: impl Into<io::Error>) -> Self {
        let source = source.into();
        let path = path.to_owned();
        match Errno::from_io_error(&source) {
            // Only a write can fail so, and all writes of this crate go to the store.
            Some(Errno::NOSPC | Errno::DQUOT) => StoreError::NoSpace { path },
            _ => StoreError::Io { action, path, source },
        }
    }

    /// The thing asked for is not there.
    pub(crate) fn not_found(kind: Kind, name: impl ToString) -> Self {
        StoreError::NotFound { kind, name: name.to_string() }
    }

    /// The thing is damaged.
    pub(crate) fn damaged(kind: Kind, name: impl ToString, why: impl ToString) -> Self {
        StoreError::Damaged {
            kind,
            name: name.to_string(),
            why: why.to_string(),
            way_out: way_out(kind),
        }
    }

    /// Whether this says that a thing does not exist.
    pub fn is_not_found(&self) -> bool {
        matches!(self, StoreError::NotFound { .. })
    }
}

fn join(names: &[Name]) -> String {
    names.iter().map(Name::as_str).collect::<Vec<_>>().join(", ")
}

/// What to do when a thing of this kind is damaged.
pub(crate) fn way_out(kind: Kind) -> &'static str {
    match kind {
        Kind::Blob | Kind::Index => {
            "remove the damaged files with a repairing check, then build what uses it again"
        }
        Kind::Rootfs => "import the rootfs again under the same name",
        Kind::Function | Kind::Image | Kind::Packed => "build the function again",
        Kind::WorkingSet => "it can be removed: the next boot records a new one",
        Kind::Prefetch => "it can be removed: cold boots read the image instead",
        Kind::Kernel => {
            "build any function with the version of Thaw that it belongs to, or build again what \
             needs it and remove its checkpoints"
        }
        Kind::ImageKernel => "build the function again, or remove the checkpoint",
        Kind::Ancestors => "remove the checkpoint whose image that is",
        Kind::Checkpoint => "remove the checkpoint, or restore its record",
        Kind::Template => "build a function from it again",
    }
}

/// Adds what was tried on which file to an error of the host.
pub(crate) trait Context<T> {
    /// See [`StoreError::io`].
    fn context(self, action: &'static str, path: &Path) -> Result<T>;
}

impl<T, E: Into<io::Error>> Context<T> for std::result::Result<T, E> {
    fn context(self, action: &'static str, path: &Path) -> Result<T> {
        self.map_err(|error| StoreError::io(action, path, error))
    }
}
