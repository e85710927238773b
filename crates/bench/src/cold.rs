//! Emptying the page cache of what a boot needs.

use super::BenchError;
use super::native::native_root;
use std::collections::hash_map::Entry;
use std::collections::{HashMap, HashSet};
use std::fs::File;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};
use thaw_abi::image::{Mapping, SOURCE_BLOB, SOURCE_IMAGE};
use thaw_abi::rootfs::{Index, ROOT_INODE};
use thaw_home::function::BuiltFunction;
use thaw_home::home::Home;
use thaw_sandbox::prefetch::is_cached;
use thaw_sandbox::working_set::drop_from_page_cache;
use thaw_store::{BlobHash, ImageId, PREFETCH_HEAD, Store};

/// How often the page cache is emptied at most, and how long between two times: pages that
/// are just being read stay, and so do those that another process maps.
const DROPS: (usize, Duration) = (40, Duration::from_millis(5));
/// Bytes of one request of the sequential reader.
const REQUEST: usize = 1 << 20;

/// The files that one function's boots and native starts need.
pub(crate) struct PageCache {
    store: Store,
    image_id: ImageId,
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
        Ok(Self {
            store: store.clone(),
            image_id: function.image,
            image,
            blobs: blobs.collect(),
            host_files,
            index: index.file().try_clone()?,
        })
    }

    /// What a thaw needs.
    pub(crate) fn drop_image_and_blobs(&self) -> Result<(), BenchError> {
        let blobs: io::Result<Vec<File>> = self.blobs.iter().map(File::open).collect();
        self.drop_with(&blobs?)
    }

    /// What no other function has: the image, what was recorded of it, and files that are not
    /// among `others`.
    pub(crate) fn drop_own(&self, others: &Self) -> Result<(), BenchError> {
        let is_own = |path: &&PathBuf| !others.blobs.contains(path);
        let own: io::Result<Vec<File>> = self.blobs.iter().filter(is_own).map(File::open).collect();
        self.drop_with(&own?)
    }

    /// Bytes of files that another function has, too.
    pub(crate) fn bytes_shared_with(&self, other: &Self) -> Result<u64, BenchError> {
        let others: HashSet<&PathBuf> = other.blobs.iter().collect();
        let shared = self.blobs.iter().filter(|path| others.contains(path));
        let bytes = shared.map(|path| Ok(path.metadata()?.len())).sum::<io::Result<u64>>();
        Ok(bytes?)
    }

    /// Reads all memory of the image, one part after the other, that of its own file and that of
    /// blobs; how many bytes that was.
    pub(crate) fn read_all(&self, mappings: &[Mapping]) -> Result<u64, BenchError> {
        let mut files: HashMap<u32, File> = HashMap::new();
        let mut buffer = vec![0; REQUEST];
        let mut bytes = 0;
        for mapping in mappings {
            let file = match mapping.source {
                SOURCE_IMAGE => &self.image,
                SOURCE_BLOB if (mapping.blob as usize) < self.blobs.len() => {
                    match files.entry(mapping.blob) {
                        Entry::Occupied(known) => &*known.into_mut(),
                        Entry::Vacant(unknown) => {
                            let path = &self.blobs[mapping.blob as usize];
                            &*unknown.insert(File::open(path)?)
                        }
                    }
                }
                _ => continue,
            };
            let end = mapping.offset + mapping.len;
            let mut at = mapping.offset;
            while at < end {
                let part = REQUEST.min((end - at) as usize);
                match file.read_at(&mut buffer[..part], at)? {
                    0 => break,
                    read => at += read as u64,
                }
            }
            bytes += at - mapping.offset;
        }
        Ok(bytes)
    }

    fn drop_with(&self, blobs: &[File]) -> Result<(), BenchError> {
        let prefetch = self.store.open_prefetch(self.image_id)?.map(|found| found.into_file());
        let files = [&self.image, &self.index].into_iter().chain(&prefetch).chain(blobs);
        let mut left: Vec<&File> = files.collect();
        let (tries, between) = DROPS;
        for _ in 0..tries {
            left.iter().try_for_each(|file| drop_from_page_cache(file))?;
            left.retain(|file| is_cached(file) == Some(true));
            if left.is_empty() {
                break;
            }
            std::thread::sleep(between);
        }
        Ok(())
    }

    /// Drops the prefetch file and reads its pages one after the other: how many bytes they
    /// are, and how many nanoseconds it took. `None`: there is none.
    pub(crate) fn read_pages(&self) -> Result<Option<(u64, u64)>, BenchError> {
        let Some(found) = self.store.open_prefetch(self.image_id)? else { return Ok(None) };
        let end = found.len();
        let file = found.into_file();
        drop_from_page_cache(&file)?;
        let mut buffer = vec![0; REQUEST];
        let (mut at, started) = (PREFETCH_HEAD, Instant::now());
        while at < end {
            let part = REQUEST.min((end - at) as usize);
            file.read_exact_at(&mut buffer[..part], at)?;
            at += part as u64;
        }
        Ok(Some((end - PREFETCH_HEAD, started.elapsed().as_nanos() as u64)))
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
