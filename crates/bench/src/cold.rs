//! Emptying the page cache of what a boot needs.

use super::BenchError;
use super::native::native_root;
use std::fs::File;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use thaw_abi::rootfs::{Index, ROOT_INODE};
use thaw_node::function::BuiltFunction;
use thaw_node::home::Home;
use thaw_sandbox::working_set::drop_from_page_cache;
use thaw_store::{BlobHash, Store};

/// The files that one function's boots and native starts need.
pub(crate) struct PageCache {
    image: File,
    index: File,
    blobs: Vec<PathBuf>,
    host_files: Vec<PathBuf>,
}

impl PageCache {
    pub(crate) fn of(
        home: &Home,
        store: &Store,
        function: &BuiltFunction,
    ) -> Result<Self, BenchError> {
        let image = store.open_image(function.image)?;
        let index = store.open_index(function.index)?;
        let view = index.index();
        let blobs = view.blobs().iter().map(|blob| store.blob_path(BlobHash(blob.hash)));
        let mut host_files = Vec::new();
        same_on_host(&view, ROOT_INODE, Path::new("/"), &mut host_files);
        below(&native_root(home, function.function.config.name.as_str())?, &mut host_files)?;
        Ok(Self { image, blobs: blobs.collect(), host_files, index: index.file().try_clone()? })
    }

    /// What a thaw needs.
    pub(crate) fn drop_image_and_blobs(&self) -> io::Result<()> {
        drop_from_page_cache(&self.image)?;
        drop_from_page_cache(&self.index)?;
        for path in &self.blobs {
            drop_from_page_cache(&File::open(path)?)?;
        }
        Ok(())
    }

    /// What a native start needs; files that have vanished are none of it.
    pub(crate) fn drop_host_files(&self) {
        for path in &self.host_files {
            if let Ok(file) = File::open(path) {
                let _ = drop_from_page_cache(&file);
            }
        }
    }
}

/// Regular files of the rootfs that the host has at the same paths.
fn same_on_host(index: &Index<'_>, directory: u32, path: &Path, found: &mut Vec<PathBuf>) {
    let Some(inode) = index.inode(directory) else { return };
    for entry in index.entries(inode) {
        let path = path.join(std::ffi::OsStr::from_bytes(index.name(entry)));
        let Some(child) = index.inode(entry.inode) else { continue };
        match child.mode & libc::S_IFMT {
            libc::S_IFDIR => same_on_host(index, entry.inode, &path, found),
            libc::S_IFREG
                if path.metadata().is_ok_and(|m| m.is_file() && m.len() == child.size) =>
            {
                found.push(path);
            }
            _ => {}
        }
    }
}

/// Regular files below a directory; none if it does not exist.
fn below(directory: &Path, found: &mut Vec<PathBuf>) -> io::Result<()> {
    let entries = match std::fs::read_dir(directory) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        entries => entries?,
    };
    for entry in entries {
        let entry = entry?;
        let kind = entry.file_type()?;
        if kind.is_dir() {
            below(&entry.path(), found)?;
        } else if kind.is_file() {
            found.push(entry.path());
        }
    }
    Ok(())
}
