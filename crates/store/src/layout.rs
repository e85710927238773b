//! Where things lie below the store's root.
//!
//! ```text
//! version                        format of the store, one line
//! lock                           flock(2): shared by sessions, exclusive for the collector
//! blobs/ab/cdef…                 contents of regular files, 0444
//! indexes/<hash>                 rootfs indexes, 0444
//! rootfs/<name>                  JSON record: a name for an index
//! functions/<name>/record.json   JSON record of a function
//! images/<hash>                  snapshot images, sparse, 0444
//! images/<hash>.packed           the same, packed: in its place, or beside it, 0444
//! images/<hash>.workingset       recorded working set of that image
//! images/<hash>.prefetch         its pages, one after the other, with a checksum
//! images/<hash>.ancestors        the images that it differs from, 0600
//! images/<hash>.kernel           the build of the Thaw kernel that it needs, 0600
//! kernels/<hash>                 ELF files of builds of the Thaw kernel, 0444
//! checkpoints/<name>             JSON record of a checkpoint, 0600
//! templates/<name>               JSON record of a runtime template, 0600
//! reserve                        room for what must be written on a full disk, 0600
//! known-files                    contents of files of the host, 0600
//! domains/<name>                 empty file: a sharing domain that was used
//! tmp/<session>/                 what a session has not published yet; flock(2)ed while it lives
//! ```

use std::path::{Path, PathBuf};

use crate::error::{Context, Result};
use crate::id::{BlobHash, ImageId, IndexId, KernelId, Name};
use crate::owner::{Acting, Owner};

/// Content of the version file.
pub(crate) const STORE_VERSION: &str = "thaw store 1";

/// Name of the file that holds room on the disk.
pub(crate) const RESERVE_NAME: &str = "reserve";
/// End of the name of a packed image.
const PACKED_SUFFIX: &str = ".packed";
/// End of the name of a working set record.
const WORKING_SET_SUFFIX: &str = ".workingset";
/// End of the name of a prefetch file.
const PREFETCH_SUFFIX: &str = ".prefetch";
/// End of the name of a record of ancestors.
const ANCESTORS_SUFFIX: &str = ".ancestors";
/// End of the name of a record of the kernel that an image needs.
const KERNEL_SUFFIX: &str = ".kernel";

/// Paths below the root of a store.
#[derive(Clone, Debug)]
pub(crate) struct Layout {
    root: PathBuf,
    owner: Owner,
}

impl Layout {
    pub(crate) fn new(root: &Path, owner: Owner) -> Self {
        Self { root: root.to_owned(), owner }
    }

    /// With whose rights everything below the root is done.
    pub(crate) fn owner(&self) -> Owner {
        self.owner
    }

    /// Acts so until the result is dropped.
    pub(crate) fn act(&self) -> Result<Acting> {
        self.owner.act().context("act as the owner of", &self.root)
    }

    pub(crate) fn root(&self) -> &Path {
        &self.root
    }

    /// Every directory that an open store has.
    pub(crate) fn directories(&self) -> [PathBuf; 10] {
        [
            "blobs",
            "indexes",
            "rootfs",
            "functions",
            "checkpoints",
            "templates",
            "images",
            "kernels",
            "domains",
            "tmp",
        ]
        .map(|name| self.root.join(name))
    }

    pub(crate) fn version(&self) -> PathBuf {
        self.root.join("version")
    }

    pub(crate) fn lock(&self) -> PathBuf {
        self.root.join("lock")
    }

    pub(crate) fn reserve(&self) -> PathBuf {
        self.root.join(RESERVE_NAME)
    }

    pub(crate) fn blobs(&self) -> PathBuf {
        self.root.join("blobs")
    }

    /// 256 directories, so that none holds more than a few hundred names.
    pub(crate) fn blob_shard(&self, hash: BlobHash) -> PathBuf {
        self.root.join("blobs").join(&hash.to_string()[..2])
    }

    pub(crate) fn blob(&self, hash: BlobHash) -> PathBuf {
        let hex = hash.to_string();
        let mut path = self.root.join("blobs");
        path.push(&hex[..2]);
        path.push(&hex[2..]);
        path
    }

    pub(crate) fn indexes(&self) -> PathBuf {
        self.root.join("indexes")
    }

    pub(crate) fn index(&self, id: IndexId) -> PathBuf {
        self.root.join("indexes").join(id.to_string())
    }

    pub(crate) fn rootfs_names(&self) -> PathBuf {
        self.root.join("rootfs")
    }

    pub(crate) fn rootfs(&self, name: &Name) -> PathBuf {
        self.root.join("rootfs").join(name.as_str())
    }

    pub(crate) fn functions(&self) -> PathBuf {
        self.root.join("functions")
    }

    pub(crate) fn function(&self, name: &Name) -> PathBuf {
        self.root.join("functions").join(name.as_str())
    }

    pub(crate) fn function_record(&self, name: &Name) -> PathBuf {
        self.function(name).join("record.json")
    }

    pub(crate) fn images(&self) -> PathBuf {
        self.root.join("images")
    }

    pub(crate) fn image(&self, id: ImageId) -> PathBuf {
        self.root.join("images").join(id.to_string())
    }

    pub(crate) fn packed_image(&self, id: ImageId) -> PathBuf {
        self.root.join("images").join(format!("{id}{PACKED_SUFFIX}"))
    }

    /// Whether an image is there, packed or not.
    pub(crate) fn has_image(&self, id: ImageId) -> bool {
        self.image(id).exists() || self.packed_image(id).exists()
    }

    pub(crate) fn working_set(&self, id: ImageId) -> PathBuf {
        self.root.join("images").join(format!("{id}{WORKING_SET_SUFFIX}"))
    }

    pub(crate) fn prefetch(&self, id: ImageId) -> PathBuf {
        self.root.join("images").join(format!("{id}{PREFETCH_SUFFIX}"))
    }

    pub(crate) fn ancestors(&self, id: ImageId) -> PathBuf {
        self.root.join("images").join(format!("{id}{ANCESTORS_SUFFIX}"))
    }

    pub(crate) fn image_kernel(&self, id: ImageId) -> PathBuf {
        self.root.join("images").join(format!("{id}{KERNEL_SUFFIX}"))
    }

    pub(crate) fn kernels(&self) -> PathBuf {
        self.root.join("kernels")
    }

    pub(crate) fn kernel(&self, id: KernelId) -> PathBuf {
        self.root.join("kernels").join(id.to_string())
    }

    pub(crate) fn templates(&self) -> PathBuf {
        self.root.join("templates")
    }

    pub(crate) fn template(&self, name: &Name) -> PathBuf {
        self.root.join("templates").join(name.as_str())
    }

    pub(crate) fn checkpoints(&self) -> PathBuf {
        self.root.join("checkpoints")
    }

    pub(crate) fn checkpoint(&self, name: &Name) -> PathBuf {
        self.root.join("checkpoints").join(name.as_str())
    }

    pub(crate) fn known_files(&self) -> PathBuf {
        self.root.join("known-files")
    }

    pub(crate) fn domains(&self) -> PathBuf {
        self.root.join("domains")
    }

    pub(crate) fn domain(&self, name: &Name) -> PathBuf {
        self.root.join("domains").join(name.as_str())
    }

    pub(crate) fn temporary(&self) -> PathBuf {
        self.root.join("tmp")
    }
}

/// What a file in `images/` is, by its name.
pub(crate) enum ImageFile {
    Image(ImageId),
    Packed(ImageId),
    WorkingSet(ImageId),
    Prefetch(ImageId),
    Ancestors(ImageId),
    Kernel(ImageId),
}

/// Reads a file name in `images/`; `None` for a file that the store did not put there.
pub(crate) fn parse_image_name(name: &str) -> Option<ImageFile> {
    if let Some(hex) = name.strip_suffix(PACKED_SUFFIX) {
        return hex.parse().ok().map(ImageFile::Packed);
    }
    if let Some(hex) = name.strip_suffix(WORKING_SET_SUFFIX) {
        return hex.parse().ok().map(ImageFile::WorkingSet);
    }
    if let Some(hex) = name.strip_suffix(ANCESTORS_SUFFIX) {
        return hex.parse().ok().map(ImageFile::Ancestors);
    }
    if let Some(hex) = name.strip_suffix(KERNEL_SUFFIX) {
        return hex.parse().ok().map(ImageFile::Kernel);
    }
    match name.strip_suffix(PREFETCH_SUFFIX) {
        Some(hex) => hex.parse().ok().map(ImageFile::Prefetch),
        None => name.parse().ok().map(ImageFile::Image),
    }
}
