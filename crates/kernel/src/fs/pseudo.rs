//! Files whose content the kernel makes up when they are read: the building
//! blocks of `/proc` and `/sys`.

use alloc::boxed::Box;
use alloc::string::String;
use alloc::sync::Arc;
use alloc::vec::Vec;

use super::file::{File, OpenFlags, Stat};
use super::inode::{Attributes, FileType, FilesystemId, Inode, Link, NewInode, Statfs, Timestamp};
use super::overlay::{DirectoryFile, device_number};
use core::panic::RefUnwindSafe;

use crate::errno::{Errno, Result};
use crate::io::{Sink, Source};
use crate::platform::saved::Saved;
use crate::sync::KernelCell;
use crate::task::ids::Pid;

/// What the file systems of this kind share.
#[derive(Clone, Copy)]
pub struct Place {
    /// The file system.
    pub filesystem: FilesystemId,
    /// `f_type` of statfs(2).
    pub magic: i64,
    /// Inode number.
    pub ino: u64,
    /// Owner and group.
    pub owner: (u32, u32),
}

impl Place {
    /// The place of a file in this directory: inode numbers follow from names,
    /// so that a file keeps its number although it is made anew at every look.
    pub fn below(&self, name: &[u8]) -> Place {
        // FNV-1a.
        let mut hash = self.ino ^ 0xcbf2_9ce4_8422_2325;
        for byte in name.iter().chain(b"/") {
            hash = (hash ^ u64::from(*byte)).wrapping_mul(0x100_0000_01b3);
        }
        Place { ino: (hash >> 24) | 0x100, ..*self }
    }

    /// Attributes of a file there.
    pub(crate) fn attributes(&self, file_type: FileType, permissions: u32) -> Attributes {
        let now = Timestamp::now();
        Attributes {
            dev: device_number(self.filesystem, 0),
            ino: self.ino,
            mode: file_type.mode_bits() | permissions,
            uid: self.owner.0,
            gid: self.owner.1,
            nlink: 1,
            atime: now,
            mtime: now,
            ctime: now,
            ..Attributes::default()
        }
    }

    /// What statfs(2) says of it.
    pub(crate) fn statfs(&self) -> Statfs {
        Statfs { kind: self.magic, bsize: 4096, frsize: 4096, namelen: 255, ..Statfs::default() }
    }
}

/// The parts of `Inode` that all of these share.
macro_rules! pseudo_inode {
    () => {
        fn filesystem(&self) -> FilesystemId {
            self.place.filesystem
        }
        fn statfs(&self) -> Statfs {
            self.place.statfs()
        }
    };
}

/// The names in a directory.
pub trait Names: Saved + Send + Sync {
    /// Finds a name; `place` is where the file goes.
    fn lookup(&self, name: &[u8], directory: &Place) -> Result<Option<Arc<dyn Inode>>>;
    /// All names.
    fn list(&self, emit: &mut dyn FnMut(&[u8], FileType)) -> Result<()>;
    /// See [`Inode::caches_lookups`].
    fn caches_lookups(&self) -> bool {
        false
    }
    /// See [`Inode::process`].
    fn process(&self) -> Option<Pid> {
        None
    }
    /// Permission bits of the directory.
    fn permissions(&self) -> u32 {
        0o555
    }
    /// Names that stand for the directory: its own, `.`, and `..` in others.
    fn links(&self) -> u32 {
        2
    }
}

/// A directory.
pub struct Directory<N> {
    place: Place,
    names: N,
}

impl<N: Names + 'static> Directory<N> {
    /// A directory with these names.
    pub fn new(place: Place, names: N) -> Arc<Self> {
        Arc::new(Self { place, names })
    }

    /// What names there are.
    pub fn names(&self) -> &N {
        &self.names
    }
}

impl<N: Names + 'static> Inode for Directory<N> {
    fn attributes(&self) -> Attributes {
        let attributes = self.place.attributes(FileType::Directory, self.names.permissions());
        Attributes { nlink: self.names.links(), ..attributes }
    }
    fn file_type(&self) -> FileType {
        FileType::Directory
    }
    fn caches_lookups(&self) -> bool {
        self.names.caches_lookups()
    }
    fn process(&self) -> Option<Pid> {
        self.names.process()
    }
    fn lookup(&self, name: &[u8]) -> Result<Option<Arc<dyn Inode>>> {
        self.names.lookup(name, &self.place)
    }
    fn list(&self, emit: &mut dyn FnMut(&[u8], u64, FileType)) -> Result<()> {
        self.names.list(&mut |name, kind| emit(name, self.place.below(name).ino, kind))
    }
    fn open(self: Arc<Self>, _: OpenFlags) -> Result<Arc<dyn File>> {
        Ok(Arc::new(DirectoryFile::new(self)))
    }
    fn create(&self, _: &[u8], _: &NewInode) -> Result<Arc<dyn Inode>> {
        // Where names come and go by themselves, one that is not there cannot
        // be created: /proc says that it does not exist.
        Err(if self.names.caches_lookups() { Errno::EPERM } else { Errno::ENOENT })
    }
    pseudo_inode!();
}

/// A symbolic link.
pub struct SymbolicLink {
    place: Place,
    permissions: u32,
    size: u64,
    target: Box<dyn Fn() -> Result<Link> + RefUnwindSafe + Send + Sync>,
}

impl SymbolicLink {
    /// A link that `target` resolves.
    pub fn new(
        place: Place,
        target: impl Fn() -> Result<Link> + Saved + Send + Sync + 'static,
    ) -> Arc<Self> {
        Arc::new(Self { place, permissions: 0o777, size: 0, target: Box::new(target) })
    }

    /// The link of an open file, which says for what it is open (proc_pid_fd(5)).
    pub fn of_open(
        place: Place,
        flags: OpenFlags,
        target: impl Fn() -> Result<Link> + Saved + Send + Sync + 'static,
    ) -> Arc<Self> {
        // Access mode 3 is neither.
        let is_neither = flags.contains(OpenFlags::PATH) || flags.bits() & 3 == 3;
        let read = if flags.can_read() && !is_neither { 0o500 } else { 0 };
        let write = if flags.can_write() && !is_neither { 0o300 } else { 0 };
        // As Linux shows it (`proc_fd_instantiate` in fs/proc/fd.c).
        Arc::new(Self { place, permissions: read | write, size: 64, target: Box::new(target) })
    }
}

impl Inode for SymbolicLink {
    fn attributes(&self) -> Attributes {
        let attributes = self.place.attributes(FileType::Symlink, self.permissions);
        Attributes { size: self.size, ..attributes }
    }
    fn file_type(&self) -> FileType {
        FileType::Symlink
    }
    fn read_link(&self) -> Result<Link> {
        (self.target)()
    }
    fn open(self: Arc<Self>, _: OpenFlags) -> Result<Arc<dyn File>> {
        Err(Errno::ELOOP)
    }
    pseudo_inode!();
}

/// Makes the content of a file.
pub type Generate = Arc<dyn Fn() -> Result<Vec<u8>> + RefUnwindSafe + Send + Sync>;
/// Refuses to open a file.
pub type Check = Arc<dyn Fn() -> Result<()> + RefUnwindSafe + Send + Sync>;
/// Takes what is written to a file.
pub type Accept = Arc<dyn Fn(&[u8]) -> Result<()> + RefUnwindSafe + Send + Sync>;

/// A regular file.
pub struct Generated {
    place: Place,
    permissions: u32,
    generate: Generate,
    accept: Option<Accept>,
    check: Option<Check>,
}

impl Generated {
    /// A file that can only be read.
    pub fn read_only(
        place: Place,
        generate: impl Fn() -> Result<Vec<u8>> + Saved + Send + Sync + 'static,
    ) -> Arc<Self> {
        Self::new(place, 0o444, Arc::new(generate), None)
    }

    /// A file.
    pub fn new(
        place: Place,
        permissions: u32,
        generate: Generate,
        accept: Option<Accept>,
    ) -> Arc<Self> {
        Arc::new(Self { place, permissions, generate, accept, check: None })
    }

    /// A file that can only be read, and that `check` may refuse to open.
    pub fn checked(place: Place, permissions: u32, generate: Generate, check: Check) -> Arc<Self> {
        Arc::new(Self { place, permissions, generate, accept: None, check: Some(check) })
    }
}

impl Inode for Generated {
    fn attributes(&self) -> Attributes {
        self.place.attributes(FileType::Regular, self.permissions)
    }
    fn file_type(&self) -> FileType {
        FileType::Regular
    }
    fn open(self: Arc<Self>, flags: OpenFlags) -> Result<Arc<dyn File>> {
        if flags.can_write() && self.accept.is_none() {
            return Err(Errno::EACCES);
        }
        self.check.as_ref().map_or(Ok(()), |check| check())?;
        Ok(Arc::new(GeneratedFile { inode: self, content: KernelCell::new(None) }))
    }
    fn truncate(&self, _: u64) -> Result<()> {
        // `echo 1 > /proc/…` opens with O_TRUNC; there is nothing to cut off.
        if self.accept.is_some() { Ok(()) } else { Err(Errno::EACCES) }
    }
    pseudo_inode!();
}

/// An open file with generated content. It is made at the first read, and
/// again whenever reading starts at the beginning.
struct GeneratedFile {
    inode: Arc<Generated>,
    content: KernelCell<Option<Arc<[u8]>>>,
}

impl File for GeneratedFile {
    fn read(&self, sink: &mut Sink<'_>, offset: u64) -> Result<usize> {
        let known = self.content.borrow_mut().clone();
        let content = match known {
            Some(content) if offset > 0 => content,
            _ => {
                let fresh: Arc<[u8]> = (self.inode.generate)()?.into();
                *self.content.borrow_mut() = Some(fresh.clone());
                fresh
            }
        };
        let rest =
            usize::try_from(offset).ok().and_then(|offset| content.get(offset..)).unwrap_or(&[]);
        sink.put(rest)
    }

    fn write(&self, source: &mut Source<'_>, _: u64) -> Result<usize> {
        let accept = self.inode.accept.as_ref().ok_or(Errno::EACCES)?;
        let bytes = source
            .take_all(4096)
            .map_err(|error| if error == Errno::EMSGSIZE { Errno::EINVAL } else { error })?;
        accept(&bytes)?;
        Ok(bytes.len())
    }

    fn seekable(&self) -> bool {
        true
    }

    fn stat(&self) -> Result<Stat> {
        Ok(self.inode.attributes().to_stat())
    }

    fn description(&self) -> String {
        String::from("generated")
    }
}

/// A name in a fixed tree.
pub struct Item {
    /// The name.
    pub name: &'static str,
    /// What it stands for.
    pub kind: Kind,
}

/// A file with fixed content.
pub const fn text(name: &'static str, text: &'static str) -> Item {
    Item { name, kind: Kind::Text(text) }
}

/// A file that can only be read.
pub const fn file(name: &'static str, generate: fn() -> Result<Vec<u8>>) -> Item {
    Item { name, kind: Kind::File(generate) }
}

/// A setting with fixed content, and one whose content is made: both stay as they are.
pub const fn setting(name: &'static str, text: &'static str) -> Item {
    Item { name, kind: Kind::FixedText(text) }
}

/// See [`setting`].
pub const fn bound(name: &'static str, generate: fn() -> Result<Vec<u8>>) -> Item {
    Item { name, kind: Kind::Fixed(generate) }
}

/// A directory of a fixed tree.
pub const fn directory(name: &'static str, items: &'static [Item]) -> Item {
    Item { name, kind: Kind::Directory(items) }
}

/// What a name in a fixed tree stands for.
pub enum Kind {
    /// A directory.
    Directory(&'static [Item]),
    /// A file that can only be read.
    File(fn() -> Result<Vec<u8>>),
    /// A file with fixed content.
    Text(&'static str),
    /// A setting that stays as it is, with fixed content.
    FixedText(&'static str),
    /// A setting that stays as it is.
    Fixed(fn() -> Result<Vec<u8>>),
    /// A file that can be written to.
    Setting(fn() -> Result<Vec<u8>>, fn(&[u8]) -> Result<()>),
    /// A symbolic link.
    Link(&'static str),
    /// Anything else, made by a function.
    Made(FileType, fn(&Place) -> Arc<dyn Inode>),
}

impl Kind {
    fn file_type(&self) -> FileType {
        match self {
            Self::Directory(_) => FileType::Directory,
            Self::Link(_) => FileType::Symlink,
            Self::Made(kind, _) => *kind,
            _ => FileType::Regular,
        }
    }

    fn inode(&'static self, place: Place) -> Arc<dyn Inode> {
        match self {
            Self::Directory(items) => Directory::new(place, Fixed(items)),
            Self::File(generate) => Generated::new(place, 0o444, Arc::new(*generate), None),
            Self::Text(text) => Generated::read_only(place, move || Ok(text.as_bytes().to_vec())),
            Self::FixedText(text) => stays(place, Arc::new(|| Ok(text.as_bytes().to_vec()))),
            Self::Fixed(generate) => stays(place, Arc::new(*generate)),
            Self::Setting(generate, accept) => {
                Generated::new(place, 0o644, Arc::new(*generate), Some(Arc::new(*accept)))
            }
            Self::Link(target) => {
                SymbolicLink::new(place, move || Ok(Link::Text(target.as_bytes().to_vec())))
            }
            Self::Made(_, make) => make(&place),
        }
    }
}

/// A setting that takes no other value than it has: as in a container, where `/proc/sys` is read-only.
fn stays(place: Place, generate: Generate) -> Arc<dyn Inode> {
    let has = generate.clone();
    let accept = move |new: &[u8]| {
        let words = |text: &[u8]| -> Vec<Vec<u8>> {
            let words = text.split(|byte| byte.is_ascii_whitespace() || *byte == 0);
            words.filter(|word| !word.is_empty()).map(<[u8]>::to_vec).collect()
        };
        if words(&has()?) == words(new) { Ok(()) } else { Err(Errno::EROFS) }
    };
    Generated::new(place, 0o644, generate, Some(Arc::new(accept)))
}

/// The names of a directory in a fixed tree.
pub struct Fixed(pub &'static [Item]);

impl Names for Fixed {
    fn lookup(&self, name: &[u8], directory: &Place) -> Result<Option<Arc<dyn Inode>>> {
        let item = self.0.iter().find(|item| item.name.as_bytes() == name);
        Ok(item.map(|item| item.kind.inode(directory.below(name))))
    }

    fn list(&self, emit: &mut dyn FnMut(&[u8], FileType)) -> Result<()> {
        for item in self.0 {
            emit(item.name.as_bytes(), item.kind.file_type());
        }
        Ok(())
    }

    fn caches_lookups(&self) -> bool {
        true
    }
}
