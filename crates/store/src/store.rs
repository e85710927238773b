//! Opening a store and reading blobs.

use std::fs::{self, DirBuilder, File};
use std::io::{ErrorKind, Write};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::error::{Context, Kind, Result, StoreError};
use crate::id::BlobHash;
use crate::layout::{Layout, STORE_VERSION};
use crate::owner::{Closed, Owner, closed};
use crate::reserve::{Reserve, Room};
use crate::stage::{self, Removal, Stage, publish, seal, sync_directory};

/// A directory with everything that Thaw keeps. Cheap to clone; any number of
/// processes may have the same store open.
#[derive(Clone, Debug)]
pub struct Store {
    pub(crate) layout: Arc<Layout>,
}

impl Store {
    /// Opens the store at `root`, makes it if it is not there, and removes what
    /// processes that died in the middle of their work left behind.
    ///
    /// Whoever is root acts as the owner of the directory above the store, or of the store
    /// if that one is root's.
    pub fn open(root: &Path) -> Result<Self> {
        Self::open_or_make(root).map_err(|error| match &error {
            StoreError::Io { path, source, .. } => match closed(path, source) {
                Some(Closed { path, owner }) => StoreError::OfAnotherUser { path, owner },
                None => error,
            },
            _ => error,
        })
    }

    fn open_or_make(root: &Path) -> Result<Self> {
        let owner = owner(root)?;
        let _acting = owner.act().context("act as the owner of", root)?;
        // Functions' files may hold secrets: nobody else can look inside.
        let mut private = DirBuilder::new();
        private.recursive(true).mode(0o700);
        private.create(root).context("create", root)?;
        let root = fs::canonicalize(root).context("find", root)?;
        let layout = Layout::new(&root, owner);
        check_version(&layout)?;
        for directory in layout.directories() {
            private.create(&directory).context("create", &directory)?;
        }
        let lock = layout.lock();
        File::options().create(true).append(true).open(&lock).context("create", &lock)?;
        if !layout.version().exists() {
            write_version(&layout)?;
        }
        stage::clean(&layout, Removal::Remove)?;
        Ok(Self { layout: Arc::new(layout) })
    }

    /// The store's directory, absolute and without symbolic links.
    pub fn root(&self) -> &Path {
        self.layout.root()
    }

    /// Room for what is small and needed although the disk is full.
    pub fn reserve(&self) -> Reserve {
        Reserve::of(self.layout.root())
    }

    /// Takes the room that the reserve lacks, if the disk has enough; says how it stands, or `None`
    /// where the file system cannot hold room for a file.
    pub fn fill_reserve(&self) -> Option<Room> {
        let _acting = self.layout.act().ok()?;
        self.reserve().fill().ok()
    }

    /// Where a blob lies if it is here. The file must never be written to.
    pub fn blob_path(&self, hash: BlobHash) -> PathBuf {
        self.layout.blob(hash)
    }

    /// Opens a blob read-only and close-on-exec, for the broker.
    pub fn open_blob(&self, hash: BlobHash) -> Result<File> {
        let _acting = self.layout.act()?;
        let path = self.layout.blob(hash);
        open_existing(&path, Kind::Blob, hash)
    }
}

/// The owner of the directory that a store lies in: nobody but root can change what lies
/// there, unless it is somebody else's. If it is root's, the owner of the store.
fn owner(root: &Path) -> Result<Owner> {
    let of = |path: &Path| match Owner::of(path) {
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(Owner::Caller),
        result => result.context("find the owner of", path),
    };
    // A path of one name lies in the working directory.
    let above = root.parent().map(|parent| match parent.as_os_str().is_empty() {
        true => Path::new("."),
        false => parent,
    });
    match above.map(of).transpose()? {
        Some(Owner::Caller) | None => of(root),
        Some(owner) => Ok(owner),
    }
}

/// Opens a file of the store, telling a missing one from other errors.
pub(crate) fn open_existing(path: &Path, kind: Kind, name: impl ToString) -> Result<File> {
    match File::open(path) {
        Err(error) if error.kind() == ErrorKind::NotFound => Err(StoreError::not_found(kind, name)),
        result => result.context("open", path),
    }
}

fn check_version(layout: &Layout) -> Result<()> {
    let path = layout.version();
    let found = match fs::read_to_string(&path) {
        Ok(found) => found,
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(StoreError::io("read", &path, error)),
    };
    if found.trim_end() == STORE_VERSION {
        return Ok(());
    }
    Err(StoreError::Version {
        path: layout.root().to_owned(),
        found: found.trim_end().chars().take(80).collect(),
        known: STORE_VERSION,
    })
}

fn write_version(layout: &Layout) -> Result<()> {
    let mut stage = Stage::create(layout)?;
    let (mut file, from) = stage.create_file()?;
    writeln!(file, "{STORE_VERSION}").context("write", &from)?;
    seal(&file, &from)?;
    file.sync_all().context("sync", &from)?;
    publish(&from, &layout.version(), stage::Existing::Keep)?;
    sync_directory(layout.root())
}
