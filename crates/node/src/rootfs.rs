//! Root file systems as sandboxes want them.

use crate::home::{Home, HomeError};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use thaw_sandbox::{HostDirectory, Rootfs};

/// Why a root file system cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum RootfsError {
    /// The directory cannot be opened.
    #[error("cannot serve {} as a root file system ({error}); name a directory", path.display())]
    Directory {
        /// The directory.
        path: PathBuf,
        /// What the system said.
        error: std::io::Error,
    },
    /// The state directory cannot be used.
    #[error(transparent)]
    Home(#[from] HomeError),
}

/// Whether `rootfs` names a directory of this host rather than a stored root
/// file system: it has a slash in it, or is `.` or `..`.
pub fn is_directory_name(rootfs: &str) -> bool {
    rootfs.contains('/') || rootfs == "." || rootfs == ".."
}

/// Opens what a user named: a directory of this host, or a stored root file
/// system. `home` is asked only for the latter.
///
/// # Errors
/// There is no such directory or stored root file system.
pub fn open(
    rootfs: &str,
    home: impl FnOnce() -> Result<Home, HomeError>,
) -> Result<Rootfs, RootfsError> {
    if is_directory_name(rootfs) {
        let path = Path::new(rootfs);
        return match HostDirectory::open(path) {
            Ok(directory) => Ok(Rootfs::HostDirectory(Arc::new(directory))),
            Err(error) => Err(RootfsError::Directory { path: path.to_owned(), error }),
        };
    }
    let _ = home()?;
    todo!("stored root file systems")
}
