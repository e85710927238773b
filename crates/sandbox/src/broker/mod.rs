//! The broker: what a sandbox may ask its host for.

mod host_directory;

pub use host_directory::HostDirectory;

use std::io;
use std::os::fd::OwnedFd;

/// Opens the blobs of one rootfs index.
pub trait BlobSource: Send + Sync {
    /// Opens the blob with this number (its place in the index's blob table):
    /// a regular file, read-only. A number outside the table is
    /// [`io::ErrorKind::NotFound`]; the number may come from a sandbox.
    fn open_blob(&self, blob: u32) -> io::Result<OwnedFd>;
}
