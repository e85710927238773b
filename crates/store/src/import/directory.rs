//! Importing a directory with everything below it.

use std::collections::HashMap;
use std::ffi::OsStr;
use std::fmt;
use std::fs;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustix::fs::{CWD, Dir, FileType, Mode, OFlags, Stat, fstat, fstatfs, openat};
use rustix::io::Errno;

use super::Progress;
use super::exclude::{Exclude, PathPattern};
use super::file::{Source, attributes, file_type, open_directory, read_node, stat_entry};
use crate::blob::Domain;
use crate::error::{Context, Result, StoreError};
use crate::index::{Content, Extended, Node, NodeId, Tree, with_path};
use crate::session::Session;

/// Whose files the imported ones are in the tree.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Ownership {
    /// The same numbers as on the host.
    #[default]
    Keep,
    /// All belong to one owner.
    All {
        /// User id.
        uid: u32,
        /// Group id.
        gid: u32,
    },
}

/// What to do with files that may not be read.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Unreadable {
    /// Stop with an error that names the file.
    #[default]
    Fail,
    /// Leave it out and list it in the report.
    Skip,
}

/// Whose files may be imported.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Readers {
    /// Every file that this process may read.
    #[default]
    ThisProcess,
    /// Files that every user of the host may read. Others count as unreadable. For
    /// a process that has more rights than whoever chose the files.
    Everybody,
}

impl Readers {
    /// Checks a file with these attributes.
    pub(crate) fn check(self, stat: &Stat) -> rustix::io::Result<()> {
        let needed = match file_type(stat) {
            FileType::RegularFile => 0o004,
            FileType::Directory => 0o005,
            _ => 0,
        };
        match self == Self::Everybody && stat.st_mode & needed != needed {
            true => Err(Errno::ACCESS),
            false => Ok(()),
        }
    }
}

/// Says of each file and directory that is found whether it is left out, with all below it.
pub trait LeaveOut: fmt::Debug + Send + Sync {
    /// Whether the file at `path` is left out; the path begins with [`ImportOptions::place`].
    fn leaves_out(&self, path: &Path, is_directory: bool) -> bool;
}

/// How to import a directory.
#[derive(Clone, Debug, Default)]
pub struct ImportOptions {
    /// What to leave out.
    pub exclude: Vec<Exclude>,
    /// What else to leave out.
    pub leave_out: Option<Arc<dyn LeaveOut>>,
    /// Owner of the files in the tree.
    pub ownership: Ownership,
    /// What to do with files that may not be read.
    pub unreadable: Unreadable,
    /// With whom the contents are shared.
    pub domain: Domain,
    /// Files whose contents are kept in another domain than the rest.
    pub domains: Vec<(PathPattern, Domain)>,
    /// What the patterns of `domains` take the directory for: its own path, relative
    /// to where they start.
    pub place: PathBuf,
    /// Whose files may be imported.
    pub readers: Readers,
}

/// What an import did.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ImportReport {
    /// Files of all kinds, directories included.
    pub files: u64,
    /// Bytes of the regular files.
    pub bytes: u64,
    /// Files that may not be read and were left out, as paths on the host.
    pub unreadable: Vec<PathBuf>,
    /// Directories that are mount points of kernel file systems such as `/proc`,
    /// imported as empty.
    pub kernel_mounts: Vec<PathBuf>,
}

impl Session {
    /// Imports the directory `from` of the host with everything below it to
    /// `to` in the tree, where it merges with what is there. Follows no symbolic
    /// link below `from`; keeps modes, times, links and hard links. Directories
    /// above `to` that are missing are made. The store itself and the contents
    /// of `/proc` and its like are left out.
    pub fn import_directory(
        &mut self,
        tree: &mut Tree,
        from: &Path,
        to: &Path,
        options: &ImportOptions,
        progress: &mut dyn FnMut(Progress<'_>),
    ) -> Result<ImportReport> {
        let mut import = Import::new(self, tree, progress);
        import.directory(from, to, options)?;
        Ok(import.report)
    }

    /// The same for a directory that is open already; `from` names it in messages.
    /// Nobody can put another one in its place meanwhile.
    pub fn import_open_directory(
        &mut self,
        tree: &mut Tree,
        directory: OwnedFd,
        from: &Path,
        to: &Path,
        options: &ImportOptions,
        progress: &mut dyn FnMut(Progress<'_>),
    ) -> Result<ImportReport> {
        let mut import = Import::new(self, tree, progress);
        import.open_directory(directory, from, to, options)?;
        Ok(import.report)
    }
}

/// A running import, over one or several directories. Hard links are found among
/// everything that it has imported.
pub(crate) struct Import<'a> {
    pub(crate) session: &'a mut Session,
    pub(crate) tree: &'a mut Tree,
    pub(crate) report: ImportReport,
    /// Symbolic links met so far: paths on the host.
    pub(crate) symlinks: Vec<PathBuf>,
    /// Regular files met so far: paths on the host.
    pub(crate) regular_files: Vec<PathBuf>,
    progress: &'a mut dyn FnMut(Progress<'_>),
    /// Nodes of files with several names, by device and inode number on the host.
    linked: HashMap<(u64, u64), NodeId>,
    /// The store's own directory, by device and inode number.
    store: Option<(u64, u64)>,
}

/// A directory that is being imported.
struct Visit<'o> {
    options: &'o ImportOptions,
    /// Path on the host.
    path: PathBuf,
    /// Path below the directory that was asked for.
    relative: PathBuf,
    /// Path in the tree.
    to: PathBuf,
    device: u64,
}

impl<'a> Import<'a> {
    pub(crate) fn new(
        session: &'a mut Session,
        tree: &'a mut Tree,
        progress: &'a mut dyn FnMut(Progress<'_>),
    ) -> Self {
        let store = fs::metadata(session.root()).ok().map(|m| (m.dev(), m.ino()));
        Self {
            session,
            tree,
            report: ImportReport::default(),
            symlinks: Vec::new(),
            regular_files: Vec::new(),
            progress,
            linked: HashMap::new(),
            store,
        }
    }

    /// See [`Session::import_directory`].
    pub(crate) fn directory(
        &mut self,
        from: &Path,
        to: &Path,
        options: &ImportOptions,
    ) -> Result<()> {
        let directory = Self::open(from, options)?;
        self.open_directory(directory, from, to, options)
    }

    /// Opens a directory that may be imported.
    pub(crate) fn open(from: &Path, options: &ImportOptions) -> Result<OwnedFd> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let directory = openat(CWD, from, flags, Mode::empty()).context("open", from)?;
        let stat = fstat(&directory).context("inspect", from)?;
        options.readers.check(&stat).context("import", from)?;
        Ok(directory)
    }

    /// See [`Session::import_open_directory`].
    fn open_directory(
        &mut self,
        directory: OwnedFd,
        from: &Path,
        to: &Path,
        options: &ImportOptions,
    ) -> Result<()> {
        let stat = fstat(&directory).context("inspect", from)?;
        options.readers.check(&stat).context("import", from)?;
        let target = self.tree.make_directories(to)?;
        *self.tree.attributes_mut(target) = attributes(&stat, options.ownership);
        self.tree.set_extended(target, Extended::default())?;
        let visit = Visit {
            options,
            path: from.to_owned(),
            relative: PathBuf::new(),
            to: to.to_owned(),
            device: stat.st_dev,
        };
        self.count(from, 0);
        self.entries(directory, target, &visit)
    }

    /// Imports one file that is not a directory to `to` in the tree.
    pub(crate) fn file(&mut self, from: &Path, to: &Path, options: &ImportOptions) -> Result<()> {
        let parent = from.parent().unwrap_or(Path::new("/"));
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let directory = openat(CWD, parent, flags, Mode::empty()).context("open", parent)?;
        let Some(name) = from.file_name() else {
            return Err(StoreError::io("import", from, Errno::ISDIR));
        };
        let stat = stat_entry(&directory, name.as_bytes(), from)?;
        let (target, target_name) = self.tree.make_parent(to)?;
        let visit = Visit {
            options,
            path: parent.to_owned(),
            relative: PathBuf::new(),
            to: to.parent().unwrap_or(Path::new("/")).to_owned(),
            device: stat.st_dev,
        };
        self.leaf(&directory, name.as_bytes(), &stat, target, &target_name, &visit)
    }

    fn entries(&mut self, directory: OwnedFd, target: NodeId, visit: &Visit<'_>) -> Result<()> {
        let mut names = Vec::new();
        for entry in Dir::read_from(&directory).context("read", &visit.path)? {
            let entry = entry.context("read", &visit.path)?;
            let name = entry.file_name().to_bytes();
            if name != b"." && name != b".." {
                names.push(name.to_vec());
            }
        }
        // The order decides which name of a hard link comes first, nothing else;
        // sorted, an import that fails does so at the same file every time.
        names.sort();
        for name in names {
            let relative = visit.relative.join(OsStr::from_bytes(&name));
            if visit.options.exclude.iter().any(|rule| rule.matches(&relative)) {
                continue;
            }
            let path = visit.path.join(OsStr::from_bytes(&name));
            let result = self.entry(&directory, &name, target, visit, path.clone(), relative);
            match result {
                Err(StoreError::Io { source, path, .. })
                    if visit.options.unreadable == Unreadable::Skip
                        && source.kind() == std::io::ErrorKind::PermissionDenied =>
                {
                    self.report.unreadable.push(path);
                }
                // Removed since the directory was read.
                Err(StoreError::Io { source, path: gone, .. })
                    if source.kind() == std::io::ErrorKind::NotFound && gone == path => {}
                result => result?,
            }
        }
        Ok(())
    }

    fn entry(
        &mut self,
        directory: &OwnedFd,
        name: &[u8],
        target: NodeId,
        visit: &Visit<'_>,
        path: PathBuf,
        relative: PathBuf,
    ) -> Result<()> {
        let stat = stat_entry(directory, name, &path)?;
        let is_directory = file_type(&stat) == FileType::Directory;
        if let Some(rules) = &visit.options.leave_out
            && rules.leaves_out(&visit.options.place.join(&relative), is_directory)
        {
            return Ok(());
        }
        if file_type(&stat) != FileType::Directory {
            return self.leaf(directory, name, &stat, target, name, visit);
        }
        if self.store == Some((stat.st_dev, stat.st_ino)) {
            return Ok(());
        }
        let subdirectory = open_directory(directory, name, &path)?;
        let opened = fstat(&subdirectory).context("inspect", &path)?;
        visit.options.readers.check(&opened).context("import", &path)?;
        let attributes = attributes(&stat, visit.options.ownership);
        let node = Node { content: Content::directory(), attributes };
        let to = visit.to.join(OsStr::from_bytes(name));
        let child = self.add_directory(target, name, node, &to)?;
        self.count(&path, 0);
        let is_kernel_mount = stat.st_dev != visit.device
            && is_kernel_file_system(&subdirectory).context("inspect", &path)?;
        if is_kernel_mount {
            self.report.kernel_mounts.push(path);
            return Ok(());
        }
        let inner = Visit { options: visit.options, path, relative, to, device: stat.st_dev };
        self.entries(subdirectory, child, &inner)
    }

    /// Adds a directory at `to`. Where the tree has a symbolic link to a directory,
    /// as `/lib` often is one, that directory is filled.
    fn add_directory(
        &mut self,
        target: NodeId,
        name: &[u8],
        node: Node,
        to: &Path,
    ) -> Result<NodeId> {
        let existing = self.tree.lookup(target, name).map(|id| &self.tree.node(id).content);
        if let Some(Content::Symlink(_)) = existing
            && let Some(directory) = self.tree.find_directory(to)
        {
            return Ok(directory);
        }
        self.tree.add(target, name, node).map_err(|error| with_path(error, to).into())
    }

    /// Imports a file that is not a directory.
    fn leaf(
        &mut self,
        directory: &OwnedFd,
        name: &[u8],
        stat: &Stat,
        target: NodeId,
        target_name: &[u8],
        visit: &Visit<'_>,
    ) -> Result<()> {
        let path = visit.path.join(OsStr::from_bytes(name));
        let identity = (stat.st_dev, stat.st_ino);
        if stat.st_nlink > 1
            && let Some(&node) = self.linked.get(&identity)
        {
            self.tree.link(target, target_name, node).map_err(|error| with_path(error, &path))?;
            self.remember(&path, stat);
            self.count(&path, 0);
            return Ok(());
        }
        let relative = visit.relative.join(OsStr::from_bytes(name));
        let domain = visit
            .options
            .domains
            .iter()
            .find(|(pattern, _)| pattern.matches(&visit.options.place.join(&relative)))
            .map_or(&visit.options.domain, |(_, domain)| domain);
        let from = Source { directory, name, stat, path: &path };
        let node = read_node(self.session, &from, visit.options, domain)?;
        let bytes = match &node.content {
            Content::Regular(Some(blob)) => blob.size,
            _ => 0,
        };
        let id =
            self.tree.add(target, target_name, node).map_err(|error| with_path(error, &path))?;
        if stat.st_nlink > 1 {
            self.linked.insert(identity, id);
        }
        self.remember(&path, stat);
        self.count(&path, bytes);
        Ok(())
    }

    fn remember(&mut self, path: &Path, stat: &Stat) {
        match file_type(stat) {
            FileType::Symlink => self.symlinks.push(path.to_owned()),
            FileType::RegularFile => self.regular_files.push(path.to_owned()),
            _ => {}
        }
    }

    fn count(&mut self, path: &Path, bytes: u64) {
        self.report.files += 1;
        self.report.bytes += bytes;
        (self.progress)(Progress { path, files: self.report.files, bytes: self.report.bytes });
    }
}

/// Whether a directory lies on a file system that the kernel makes up; the
/// sandbox has its own `/proc`, `/sys` and `/dev`. Magic numbers: statfs(2).
fn is_kernel_file_system(directory: &OwnedFd) -> rustix::io::Result<bool> {
    const MAGIC: [u64; 12] = [
        0x9fa0,      // proc
        0x6265_6572, // sysfs
        0x1cd1,      // devpts
        0x27e0eb,    // cgroup
        0x6367_7270, // cgroup2
        0x6462_6720, // debugfs
        0x7472_6163, // tracefs
        0x7363_6673, // securityfs
        0xcafe_4a11, // bpf
        0x1980_0202, // mqueue
        0x4249_4e4d, // binfmt_misc
        0x6265_6570, // configfs
    ];
    let magic = fstatfs(directory)?.f_type as u64;
    Ok(MAGIC.contains(&magic))
}
