//! Blobs: the contents of regular files, each stored once.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::os::unix::fs::FileExt;
use std::path::Path;

use rustix::fs::ioctl_ficlone;

use crate::error::{Context, Result, StoreError};
use crate::function::names;
use crate::id::{BlobHash, Name};
use crate::session::Session;
use crate::stage::{Existing, publish, seal, sync_all, sync_directory};
use crate::store::Store;

/// Files up to this many bytes are read once, into memory.
const SMALL: u64 = 1 << 20;
/// Bytes read or written at once. The page cache keeps what is written at once in
/// pages as large (folios), and maps large ones faster.
const CHUNK: usize = 2 << 20;
/// Times a file is read again because it changed meanwhile.
const ATTEMPTS: usize = 3;

/// Who shares equal files. Files of one domain with equal content are one inode
/// on the host, hence one copy on disk and in the page cache; files of different
/// domains never are, so that no function can find out by timing what another
/// one has in memory.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Domain {
    own: Option<(Name, [u8; 32])>,
}

impl Domain {
    /// The domain of all who do not ask for their own.
    pub fn shared() -> Self {
        Self::default()
    }

    /// A domain of its own. Its blobs are named by keyed BLAKE3, so they lie
    /// beside the others and need no second place to look.
    pub fn own(name: &Name) -> Self {
        let key = blake3::derive_key("Thaw store sharing domain v1", name.as_str().as_bytes());
        Self { own: Some((name.clone(), key)) }
    }

    /// What the names of domains begin with that are made for private files.
    pub const PRIVATE_PREFIX: &str = "private.";

    /// The domain of files that `owner` shares with nobody. Its name is made from a
    /// hash, since the longest name of an owner leaves no room for the prefix.
    pub fn private(owner: &Name) -> Self {
        let hash = blake3::hash(owner.as_str().as_bytes()).to_hex();
        let name = format!("{}{}", Self::PRIVATE_PREFIX, &hash[..40]);
        Self::own(&Name::new(&name).expect("a prefix and digits"))
    }

    /// The domain's name; `None` for the shared one.
    pub fn name(&self) -> Option<&Name> {
        self.own.as_ref().map(|(name, _)| name)
    }

    /// What tells it from others: the key of its hasher, of which half is enough.
    pub(crate) fn short_name(&self) -> [u8; 16] {
        let key = self.own.as_ref().map_or([0; 32], |(_, key)| *key);
        key[..16].try_into().expect("half of 32 bytes")
    }

    /// Hasher that names the blobs of this domain.
    pub(crate) fn hasher(&self) -> blake3::Hasher {
        match &self.own {
            None => blake3::Hasher::new(),
            Some((_, key)) => blake3::Hasher::new_keyed(key),
        }
    }

    /// Names what is read through the result, as a blob of this domain.
    pub fn naming<R: Read>(&self, source: R) -> NamingReader<R> {
        NamingReader { source, hasher: self.hasher(), size: 0 }
    }

    fn hash(&self, bytes: &[u8]) -> BlobHash {
        self.hasher().update(bytes).finalize().into()
    }
}

/// A reader that names what is read through it: [`Domain::naming`].
#[derive(Debug)]
pub struct NamingReader<R> {
    source: R,
    hasher: blake3::Hasher,
    size: u64,
}

impl<R> NamingReader<R> {
    /// What is read.
    pub fn source(&self) -> &R {
        &self.source
    }

    /// The name and size of what was read.
    pub fn blob(&self) -> Blob {
        Blob { hash: self.hasher.finalize().into(), size: self.size }
    }
}

impl<R: Read> Read for NamingReader<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let count = self.source.read(buffer)?;
        self.hasher.update(&buffer[..count]);
        self.size += count as u64;
        Ok(count)
    }
}

/// Content of a regular file that is not empty.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Blob {
    /// Its name in the store.
    pub hash: BlobHash,
    /// Bytes, at least 1.
    pub size: u64,
}

impl Session {
    /// Stores `bytes`; `None` if there are none, since an empty file has no blob.
    pub fn put_blob(&mut self, bytes: &[u8], domain: &Domain) -> Result<Option<Blob>> {
        let _acting = self.layout.act()?;
        if bytes.is_empty() {
            return Ok(None);
        }
        let blob = Blob { hash: domain.hash(bytes), size: bytes.len() as u64 };
        if self.has(blob)? {
            return Ok(Some(blob));
        }
        let (mut file, path) = self.stage.create_file()?;
        file.write_all(bytes).context("write", &path)?;
        seal(&file, &path)?;
        self.staged.insert(blob.hash, path);
        self.use_domain(domain);
        Ok(Some(blob))
    }

    /// The bytes of a blob, which this session may have put: all of it is in memory then.
    ///
    /// # Errors
    /// It is not here, or cannot be read.
    pub fn read_blob(&self, hash: BlobHash) -> Result<Vec<u8>> {
        let _acting = self.layout.act()?;
        let path = match self.staged.get(&hash) {
            Some(path) => path.to_path_buf(),
            None => self.blob_path(hash),
        };
        fs::read(&path).context("read", &path)
    }

    /// Stores the content of an open regular file of the host; `path` names it
    /// in errors. Reads again if the file changes meanwhile.
    pub fn put_file(&mut self, file: &File, path: &Path, domain: &Domain) -> Result<Option<Blob>> {
        let _acting = self.layout.act()?;
        for _ in 0..ATTEMPTS {
            let before = Version::of(file, path)?;
            let blob = if before.size <= SMALL {
                let mut bytes = Vec::with_capacity(before.size as usize + 1);
                read_all_at(file, &mut bytes).context("read", path)?;
                self.put_blob(&bytes, domain)?
            } else {
                self.put_large(file, path, domain)?
            };
            if Version::of(file, path)? == before {
                return Ok(blob);
            }
        }
        Err(StoreError::Changing { path: path.to_owned() })
    }

    /// Stores what can be read from `source`, up to its end. Pages of zeros become holes.
    pub fn put_stream(&mut self, source: &mut dyn Read, domain: &Domain) -> Result<Option<Blob>> {
        let _acting = self.layout.act()?;
        let mut start = Vec::new();
        source.take(SMALL).read_to_end(&mut start).map_err(StoreError::Source)?;
        if (start.len() as u64) < SMALL {
            return self.put_blob(&start, domain);
        }
        let (file, path) = self.stage.create_file()?;
        let mut hasher = domain.hasher();
        let mut size = 0;
        let mut chunk = start;
        while !chunk.is_empty() {
            hasher.update(&chunk);
            write_sparsely(&file, &chunk, size).context("write", &path)?;
            size += chunk.len() as u64;
            chunk.clear();
            source.take(CHUNK as u64).read_to_end(&mut chunk).map_err(StoreError::Source)?;
        }
        file.set_len(size).context("write", &path)?;
        let blob = Blob { hash: hasher.finalize().into(), size };
        self.stage_large(file, &path, blob, domain).map(Some)
    }

    /// Clones the file where the file system can; elsewhere hashes it first, so
    /// that content which is here already is not written again.
    fn put_large(&mut self, file: &File, path: &Path, domain: &Domain) -> Result<Option<Blob>> {
        if self.clones {
            let (clone, clone_path) = self.stage.create_file()?;
            if ioctl_ficlone(&clone, file).is_ok() {
                let blob = hash_file(&clone, domain).context("read", &clone_path)?;
                return self.stage_large(clone, &clone_path, blob, domain).map(Some);
            }
            // The source may lie on another file system; the next may not.
            self.clones = false;
            fs::remove_file(&clone_path).context("remove", &clone_path)?;
        }
        let seen = hash_file(file, domain).context("read", path)?;
        if self.has(seen)? {
            return Ok(Some(seen));
        }
        let (copy, copy_path) = self.stage.create_file()?;
        let mut hasher = domain.hasher();
        let mut size = 0;
        let mut chunk = vec![0; CHUNK];
        loop {
            let count = read_at(file, &mut chunk, size).context("read", path)?;
            if count == 0 {
                break;
            }
            hasher.update(&chunk[..count]);
            (&copy).write_all(&chunk[..count]).context("write", &copy_path)?;
            size += count as u64;
        }
        // Named by what was written, which differs if the file changed.
        let blob = Blob { hash: hasher.finalize().into(), size };
        self.stage_large(copy, &copy_path, blob, domain).map(Some)
    }

    fn stage_large(
        &mut self,
        file: File,
        path: &Path,
        blob: Blob,
        domain: &Domain,
    ) -> Result<Blob> {
        if self.has(blob)? {
            fs::remove_file(path).context("remove", path)?;
            return Ok(blob);
        }
        seal(&file, path)?;
        self.staged.insert(blob.hash, path.to_owned());
        self.use_domain(domain);
        Ok(blob)
    }

    /// Whether the content is here, published or staged. A published file of
    /// another size is damaged and does not count, so that it gets replaced.
    pub(crate) fn has(&self, blob: Blob) -> Result<bool> {
        if self.staged.contains_key(&blob.hash) {
            return Ok(true);
        }
        let path = self.store.layout.blob(blob.hash);
        match fs::symlink_metadata(&path) {
            Ok(metadata) => Ok(metadata.is_file() && metadata.len() == blob.size),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
            Err(error) => Err(StoreError::io("inspect", &path, error)),
        }
    }

    fn use_domain(&mut self, domain: &Domain) {
        if let Some(name) = domain.name()
            && !self.domains.contains(name)
        {
            self.domains.insert(name.clone());
        }
    }

    /// Moves all staged blobs to their places, contents on disk before names, so
    /// that a name never stands for half a file.
    pub(crate) fn publish_blobs(&mut self) -> Result<()> {
        let _acting = self.layout.act()?;
        let layout = self.store.layout.clone();
        self.write_known_files()?;
        for domain in std::mem::take(&mut self.domains) {
            let path = layout.domain(&domain);
            File::create(&path).context("create", &path)?;
            sync_directory(&layout.domains())?;
        }
        if self.staged.is_empty() {
            return Ok(());
        }
        sync_all(&self.staged.values().map(|path| path.as_path()).collect::<Vec<_>>())?;
        let mut shards = BTreeSet::new();
        for (hash, from) in &self.staged {
            let shard = layout.blob_shard(*hash);
            if shards.insert(shard.clone()) {
                match fs::create_dir(&shard) {
                    Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
                    result => result.context("create", &shard)?,
                }
            }
            let to = layout.blob(*hash);
            // A file of the wrong size is damaged: replace it.
            let size = fs::metadata(from).context("inspect", from)?.len();
            let existing = match fs::symlink_metadata(&to) {
                Ok(metadata) if metadata.len() != size => Existing::Replace,
                _ => Existing::Keep,
            };
            publish(from, &to, existing)?;
        }
        self.staged.clear();
        shards.insert(layout.blobs());
        sync_all(&shards.iter().map(|path| path.as_path()).collect::<Vec<_>>())
    }
}

/// Writes those pages of a chunk that are not zero.
fn write_sparsely(file: &File, chunk: &[u8], at: u64) -> io::Result<()> {
    const PAGE: usize = 4096;
    if chunk.chunks(PAGE).all(|page| page.iter().any(|&byte| byte != 0)) {
        return file.write_all_at(chunk, at);
    }
    for (number, page) in chunk.chunks(PAGE).enumerate() {
        if page.iter().any(|&byte| byte != 0) {
            file.write_all_at(page, at + (number * PAGE) as u64)?;
        }
    }
    Ok(())
}

/// What changes when somebody writes to a file.
#[derive(PartialEq, Eq)]
struct Version {
    size: u64,
    modified: (i64, u64),
    changed: (i64, u64),
}

impl Version {
    fn of(file: &File, path: &Path) -> Result<Self> {
        let stat = rustix::fs::fstat(file).context("inspect", path)?;
        Ok(Self {
            size: stat.st_size as u64,
            modified: (stat.st_mtime, stat.st_mtime_nsec),
            changed: (stat.st_ctime, stat.st_ctime_nsec),
        })
    }
}

impl Store {
    /// All domains that files in the store may belong to.
    pub(crate) fn domains(&self) -> Result<Vec<Domain>> {
        let mut domains = vec![Domain::shared()];
        domains.extend(names(&self.layout.domains())?.iter().map(Domain::own));
        Ok(domains)
    }

    /// Whether the bytes of an open blob match its name in one of these domains, and how many bytes
    /// were read.
    pub(crate) fn check_blob(
        &self,
        hash: BlobHash,
        file: &File,
        domains: &[Domain],
    ) -> Result<(bool, u64)> {
        let read = &mut |buffer: &mut [u8], at| read_at(file, buffer, at);
        self.check_blob_read(hash, read, domains)
    }

    /// The same of what `read` gives of the blob: it fills the front of a buffer from an offset on,
    /// and says how much of it; nothing at the end.
    pub(crate) fn check_blob_read(
        &self,
        hash: BlobHash,
        read: &mut dyn FnMut(&mut [u8], u64) -> io::Result<usize>,
        domains: &[Domain],
    ) -> Result<(bool, u64)> {
        let mut bytes = 0;
        for domain in domains {
            let found = hash_read(read, domain).context("read", &self.layout.blob(hash))?;
            bytes += found.size;
            if found.hash == hash {
                return Ok((true, bytes));
            }
        }
        Ok((false, bytes))
    }
}

/// Names and measures the content of a file.
pub(crate) fn hash_file(file: &File, domain: &Domain) -> io::Result<Blob> {
    hash_read(&mut |buffer, at| read_at(file, buffer, at), domain)
}

fn hash_read(
    read: &mut dyn FnMut(&mut [u8], u64) -> io::Result<usize>,
    domain: &Domain,
) -> io::Result<Blob> {
    let mut hasher = domain.hasher();
    let mut size = 0;
    let mut chunk = vec![0; CHUNK];
    loop {
        let count = read(&mut chunk, size)?;
        if count == 0 {
            return Ok(Blob { hash: hasher.finalize().into(), size });
        }
        hasher.update(&chunk[..count]);
        size += count as u64;
    }
}

/// Reads at an offset, so that the file's own offset does not matter.
fn read_at(file: &File, buffer: &mut [u8], offset: u64) -> io::Result<usize> {
    loop {
        match file.read_at(buffer, offset) {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            result => return result,
        }
    }
}

fn read_all_at(file: &File, bytes: &mut Vec<u8>) -> io::Result<()> {
    struct At<'a>(&'a File, u64);
    impl Read for At<'_> {
        fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
            let count = self.0.read_at(buffer, self.1)?;
            self.1 += count as u64;
            Ok(count)
        }
    }
    At(file, 0).read_to_end(bytes).map(|_| ())
}
