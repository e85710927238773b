//! Root file systems as sandboxes want them.

use crate::home::{Home, HomeError};
use crate::waiting::waiting;
use std::collections::HashMap;
use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use thaw_abi::rootfs::{Index, IndexInode, NO_BLOB, ROOT_INODE};
use thaw_sandbox::{BlobSource, HostDirectory, HostPolicy, Rootfs};
use thaw_store::import::{ImportOptions, ImportReport, Progress};
use thaw_store::index::{
    Attributes, Content, DeviceNumber, Extended, Node, NodeId, Timestamp, TreeError,
};
use thaw_store::{Blob, BlobHash, IndexId, InvalidName, Name, OpenIndex, Store, StoreError, Tree};

/// Why a root file system cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum RootfsError {
    /// The directory cannot be opened.
    #[error("cannot serve {} as a root file system ({error}); name another directory", path.display())]
    Directory {
        /// The directory.
        path: PathBuf,
        /// What the system said.
        error: io::Error,
    },
    /// Neither a directory nor a possible name.
    #[error("{0}; for a directory, give a path with a slash in it, as in ./dir")]
    Name(#[from] InvalidName),
    /// The state directory cannot be used.
    #[error(transparent)]
    Home(#[from] HomeError),
    /// The store does not have it.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// The stored index makes no sense.
    #[error("the stored root file system is damaged ({0}); import it again")]
    Tree(#[from] TreeError),
}

/// Whether `rootfs` names a directory of this host rather than a stored root
/// file system: it has a slash in it, or is `.` or `..`.
pub fn is_directory_name(rootfs: &str) -> bool {
    rootfs.contains('/') || rootfs == "." || rootfs == ".."
}

/// Opens what a user named: a directory of this host, a stored root file system,
/// or that of a stored function. `policy` is for the first, `home` is asked only
/// for the latter two.
///
/// # Errors
/// There is no such directory or stored root file system.
pub fn open(
    rootfs: &str,
    policy: &HostPolicy,
    home: impl FnOnce() -> Result<Home, HomeError>,
) -> Result<Rootfs, RootfsError> {
    if is_directory_name(rootfs) {
        let path = Path::new(rootfs);
        return match HostDirectory::open_with(path, policy) {
            Ok(directory) => Ok(Rootfs::HostDirectory(Arc::new(directory))),
            Err(error) => Err(RootfsError::Directory { path: path.to_owned(), error }),
        };
    }
    let name = Name::new(rootfs)?;
    let store = Store::open(&home()?.store())?;
    Ok(StoredRootfs::open(&store, find(&store, &name)?)?.rootfs())
}

/// The index that a name stands for: a root file system's own, or that of a
/// function.
fn find(store: &Store, name: &Name) -> Result<IndexId, StoreError> {
    match store.get_rootfs(name) {
        Err(error) if error.is_not_found() => match store.get_function(name) {
            Ok(function) => Ok(function.index),
            // What was asked for is a root file system.
            Err(_) => Err(error),
        },
        found => Ok(found?.index),
    }
}

/// Imports a directory of this host and gives it a name. Returns the name of the
/// index and the number of files.
///
/// # Errors
/// The directory cannot be read, or the store not written.
pub fn import(
    store: &Store,
    directory: &Path,
    name: &str,
    progress: &mut dyn FnMut(Progress<'_>),
) -> Result<(IndexId, ImportReport), RootfsError> {
    let unusable = |error| RootfsError::Directory { path: directory.to_owned(), error };
    let from = directory.canonicalize().map_err(unusable)?;
    let name = Name::new(name)?;
    let mut session = store.session()?;
    let mut tree = Tree::new();
    let options = ImportOptions::default();
    let report = session.import_directory(&mut tree, &from, Path::new("/"), &options, progress)?;
    let index = session.put_index(&tree)?;
    session.put_rootfs(&name, index)?;
    Ok((index, report))
}

/// A stored root file system, open for sandboxes. The garbage collector keeps
/// it and its blobs meanwhile.
#[derive(Clone)]
pub struct StoredRootfs {
    file: Arc<File>,
    file_len: u64,
    id: IndexId,
    contents: Contents,
}

/// Where the contents of a root file system are.
#[derive(Clone)]
enum Contents {
    /// In a store.
    Stored { index: Arc<OpenIndex>, store: Store },
    /// Elsewhere, for now.
    Elsewhere(Arc<dyn BlobSource>),
}

impl std::fmt::Debug for StoredRootfs {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("StoredRootfs").field("id", &self.id).finish_non_exhaustive()
    }
}

impl StoredRootfs {
    /// Opens an index of the store.
    ///
    /// # Errors
    /// It is missing or damaged.
    pub fn open(store: &Store, index: IndexId) -> Result<Self, StoreError> {
        let index = store.open_index(index)?;
        let file = index.file().try_clone().map_err(|source| StoreError::Io {
            action: "open",
            path: store.root().to_owned(),
            source,
        })?;
        let (file_len, id) = (index.file_len(), index.id());
        let contents = Contents::Stored { index: Arc::new(index), store: store.clone() };
        Ok(Self { file: Arc::new(file), file_len, id, contents })
    }

    /// One whose index is here and verified, and whose contents are not.
    pub fn elsewhere(
        file: Arc<File>,
        file_len: u64,
        id: IndexId,
        contents: Arc<dyn BlobSource>,
    ) -> Self {
        Self { file, file_len, id, contents: Contents::Elsewhere(contents) }
    }

    /// The index file.
    pub fn file(&self) -> Arc<File> {
        self.file.clone()
    }

    /// Bytes of the index file.
    pub fn file_len(&self) -> u64 {
        self.file_len
    }

    /// Name of the index: BLAKE3 of its file.
    pub fn id(&self) -> IndexId {
        self.id
    }

    /// The source of its blobs.
    pub fn blobs(&self) -> Arc<dyn BlobSource> {
        match &self.contents {
            Contents::Stored { .. } => Arc::new(self.clone()),
            Contents::Elsewhere(contents) => contents.clone(),
        }
    }

    /// The content of one of its files.
    ///
    /// # Errors
    /// It is missing, or cannot be opened.
    pub fn open_content(&self, hash: BlobHash) -> Result<File, StoreError> {
        match &self.contents {
            Contents::Stored { store, .. } => store.open_blob(hash),
            Contents::Elsewhere(_) => {
                Err(StoreError::Source(io::Error::other("the function is being pulled")))
            }
        }
    }

    /// The form in which programs are started over it.
    pub fn rootfs(&self) -> Rootfs {
        Rootfs::Index { file: self.file(), len: self.file_len(), blobs: self.blobs() }
    }

    /// The same files as a tree that can be added to.
    ///
    /// # Errors
    /// The index describes something that cannot be a file tree.
    pub fn tree(&self) -> Result<Tree, TreeError> {
        let Contents::Stored { index, .. } = &self.contents else {
            return Err(TreeError::Elsewhere);
        };
        let index = index.index();
        let mut copy = Copy { index, tree: Tree::new(), known: HashMap::new() };
        if let Some(root) = index.inode(ROOT_INODE) {
            *copy.tree.attributes_mut(Tree::ROOT) = attributes(root);
            copy.extended(ROOT_INODE, Tree::ROOT)?;
            copy.entries(root, Tree::ROOT)?;
        }
        Ok(copy.tree)
    }
}

impl BlobSource for StoredRootfs {
    fn open_blob(&self, number: u32) -> io::Result<OwnedFd> {
        let Contents::Stored { index, store } = &self.contents else {
            return Err(io::Error::other("the function is being pulled"));
        };
        let blob = index.blob(number).ok_or(io::ErrorKind::NotFound)?;
        // A sandbox asks while its supervisor, a task of the runtime, looks at it. The name may
        // have to be read from a disk.
        match waiting(|| store.open_blob(blob.hash)) {
            Ok(file) => Ok(file.into()),
            Err(StoreError::Io { source, .. }) => Err(source),
            Err(error) => Err(io::Error::new(io::ErrorKind::NotFound, error.to_string())),
        }
    }
}

/// An index on its way back to a tree.
struct Copy<'a> {
    index: Index<'a>,
    tree: Tree,
    /// Nodes of files that may have further names.
    known: HashMap<u32, NodeId>,
}

impl Copy<'_> {
    fn entries(&mut self, directory: &IndexInode, to: NodeId) -> Result<(), TreeError> {
        for entry in self.index.entries(directory) {
            let name = self.index.name(entry);
            let Some(inode) = self.index.inode(entry.inode) else { continue };
            if let Some(known) = self.known.get(&entry.inode) {
                self.tree.link(to, name, *known)?;
                continue;
            }
            let node = Node { content: self.content(inode), attributes: attributes(inode) };
            let is_directory = matches!(node.content, Content::Directory(_));
            let added = self.tree.add(to, name, node)?;
            self.extended(entry.inode, added)?;
            if is_directory {
                self.entries(inode, added)?;
            } else {
                self.known.insert(entry.inode, added);
            }
        }
        Ok(())
    }

    fn extended(&mut self, inode: u32, to: NodeId) -> Result<(), TreeError> {
        let mut all = Extended::default();
        for attribute in self.index.extended(inode) {
            let name = self.index.extended_name(attribute);
            all.insert(name, self.index.extended_value(attribute))?;
        }
        self.tree.set_extended(to, all)
    }

    fn content(&self, inode: &IndexInode) -> Content {
        // How the index writes device numbers: makedev(3) for 32 bits.
        let device = || DeviceNumber {
            major: (inode.rdev >> 8) & 0xfff,
            minor: (inode.rdev & 0xff) | ((inode.rdev >> 12) & 0xf_ff00),
        };
        match inode.mode & libc::S_IFMT {
            libc::S_IFDIR => Content::directory(),
            libc::S_IFLNK => Content::Symlink(self.index.link_target(inode).to_vec()),
            libc::S_IFIFO => Content::Fifo,
            libc::S_IFSOCK => Content::Socket,
            libc::S_IFCHR => Content::CharacterDevice(device()),
            libc::S_IFBLK => Content::BlockDevice(device()),
            _ => Content::Regular(self.blob(inode)),
        }
    }

    fn blob(&self, inode: &IndexInode) -> Option<Blob> {
        if inode.a == NO_BLOB {
            return None;
        }
        let blob = self.index.blobs().get(inode.a as usize)?;
        Some(Blob { hash: BlobHash(blob.hash), size: blob.size })
    }
}

fn attributes(inode: &IndexInode) -> Attributes {
    Attributes {
        permissions: inode.mode & 0o7777,
        uid: inode.uid,
        gid: inode.gid,
        modified: Timestamp { seconds: inode.mtime_sec, nanoseconds: inode.mtime_nsec },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tree_survives_its_index() {
        let directory = tempfile::tempdir().unwrap();
        let source = directory.path().join("source");
        std::fs::create_dir_all(source.join("a/b")).unwrap();
        std::fs::write(source.join("a/b/file"), "content").unwrap();
        std::fs::write(source.join("empty"), "").unwrap();
        std::fs::hard_link(source.join("a/b/file"), source.join("again")).unwrap();
        std::os::unix::fs::symlink("a/b", source.join("link")).unwrap();
        let store = Store::open(&directory.path().join("store")).unwrap();
        let mut session = store.session().unwrap();
        let mut tree = Tree::new();
        let options = Default::default();
        session.import_directory(&mut tree, &source, "/".as_ref(), &options, &mut |_| {}).unwrap();
        for path in ["/", "/a", "/again"] {
            let mut extended = Extended::default();
            extended.insert(b"user.path", path.as_bytes()).unwrap();
            tree.set_extended(tree.find(path.as_ref()).unwrap(), extended).unwrap();
        }
        let id = session.put_index(&tree).unwrap();
        let stored = StoredRootfs::open(&store, id).unwrap();
        assert_eq!(session.put_index(&stored.tree().unwrap()).unwrap(), id);
        let blob = stored.open_blob(0).unwrap();
        assert_eq!(io::read_to_string(File::from(blob)).unwrap(), "content");
        assert_eq!(stored.open_blob(99).unwrap_err().kind(), io::ErrorKind::NotFound);
    }

    #[test]
    fn directories_have_a_slash() {
        assert!(is_directory_name("/") && is_directory_name("./x") && is_directory_name("."));
        assert!(!is_directory_name("alpine"));
    }
}
