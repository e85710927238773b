//! Opening files (open(2), openat2(2)).

use alloc::string::String;
use alloc::sync::Arc;

use super::context::Context;
use super::dentry::Dentry;
use super::file::{Events, File, OpenFile, OpenFlags, Stat};
use super::inode::{FileType, Inode, Link, NewKind};
use super::inotify::Mask;
use super::mount::MountFlags;
use super::overlay::node_of_inode;
use super::path::Path;
use super::permission::Access;
use super::walk::{Follow, Last, Resolve, Walk};
use super::{namespace, notify};
use crate::errno::{Errno, Result};

/// How to open a file.
#[derive(Clone, Copy, Debug)]
pub struct How {
    /// Flags.
    pub flags: OpenFlags,
    /// Permission bits of a new file.
    pub permissions: u32,
    /// Restrictions of the path resolution.
    pub resolve: Resolve,
}

/// Flags that say something about opening and nothing about the open file.
const OPENING_FLAGS: OpenFlags = OpenFlags::CREAT
    .union(OpenFlags::EXCL)
    .union(OpenFlags::NOCTTY)
    .union(OpenFlags::TRUNC)
    .union(OpenFlags::CLOEXEC);

/// How often a file is looked for, and made, that others make and remove at once.
const TRIES_MAX: u32 = 64;

/// The bit of `O_TMPFILE` that is not `O_DIRECTORY`.
const TMPFILE_BIT: OpenFlags = OpenFlags::from_bits_retain(0o20000000);

/// Opens the file at `path`, from `start` if that is relative.
pub fn open(context: &Context, start: &Path, path: &[u8], how: How) -> Result<Arc<OpenFile>> {
    let mut flags = how.flags;
    if flags.contains(OpenFlags::PATH) {
        let kept =
            OpenFlags::PATH | OpenFlags::CLOEXEC | OpenFlags::DIRECTORY | OpenFlags::NOFOLLOW;
        flags &= kept;
    }
    if flags.intersects(TMPFILE_BIT) {
        return open_unnamed(context, start, path, How { flags, ..how });
    }
    let follow = if flags.contains(OpenFlags::NOFOLLOW) { Follow::No } else { Follow::Yes };
    if !flags.contains(OpenFlags::CREAT) {
        let target = Walk::new(context, start, how.resolve).to(start, path, follow)?;
        return open_existing(context, target, flags);
    }
    if flags.contains(OpenFlags::DIRECTORY) {
        return Err(Errno::EINVAL);
    }
    open_or_create(context, start, path, How { flags, ..how })
}

/// `O_CREAT`: opens the file, or makes it. In a directory of the host, others may make it after it was
/// looked for, and remove it after it was found.
fn open_or_create(context: &Context, start: &Path, path: &[u8], how: How) -> Result<Arc<OpenFile>> {
    let mut tries_left = TRIES_MAX;
    loop {
        tries_left -= 1;
        let mut walk = Walk::new(context, start, how.resolve);
        let opened = match find_or_create(context, &mut walk, start, path, how) {
            Ok((new, true)) => return open_checked(new, how.flags - OpenFlags::TRUNC),
            Ok((found, false)) if found.is_directory() => return Err(Errno::EISDIR),
            Ok((found, false)) => open_existing(context, found, how.flags),
            Err(Errno::EEXIST) if !how.flags.contains(OpenFlags::EXCL) => Err(Errno::EEXIST),
            Err(error) => return Err(error),
        };
        match opened {
            Err(Errno::EEXIST | Errno::ENOENT) if tries_left > 0 => {}
            outcome => return outcome,
        }
    }
}

/// `O_CREAT`: the file, and whether it is new.
fn find_or_create(
    context: &Context,
    walk: &mut Walk<'_>,
    start: &Path,
    path: &[u8],
    how: How,
) -> Result<(Path, bool)> {
    let mut start = start.clone();
    let mut path = alloc::borrow::Cow::Borrowed(path);
    loop {
        let parent = walk.parent(&start, &path)?;
        let Last::Name(name) = parent.last else { return Err(Errno::EISDIR) };
        if parent.trailing_slash {
            return Err(Errno::EISDIR);
        }
        let Some(found) = walk.child(&parent.directory, &name)? else {
            let new = namespace::create_in(
                context,
                &parent.directory,
                &name,
                NewKind::Regular,
                how.permissions,
            )?;
            return Ok((new, true));
        };
        if how.flags.contains(OpenFlags::EXCL) {
            return Err(Errno::EEXIST);
        }
        if found.inode().file_type() != FileType::Symlink || how.flags.contains(OpenFlags::NOFOLLOW)
        {
            return Ok((found, false));
        }
        match walk.read_link(&found)? {
            Link::Magic(target) => return Ok((target, false)),
            Link::Text(target) => {
                start = parent.directory;
                path = alloc::borrow::Cow::Owned(target);
            }
        }
    }
}

/// `O_TMPFILE`: a file in the file system of a directory, without a name.
fn open_unnamed(context: &Context, start: &Path, path: &[u8], how: How) -> Result<Arc<OpenFile>> {
    let flags = how.flags;
    if !flags.contains(OpenFlags::DIRECTORY) || !flags.can_write() {
        return Err(Errno::EINVAL);
    }
    let follow = if flags.contains(OpenFlags::NOFOLLOW) { Follow::No } else { Follow::Yes };
    let directory = Walk::new(context, start, how.resolve).to(start, path, follow)?;
    if !directory.is_directory() {
        return Err(Errno::ENOTDIR);
    }
    directory.check_writable()?;
    namespace::check_may_change(context, &directory)?;
    let holder = directory.inode();
    let new =
        namespace::new_inode(context, &holder.attributes(), NewKind::Regular, how.permissions);
    let inode = holder.create_unnamed(&new)?;
    if flags.contains(OpenFlags::EXCL)
        && let Some(node) = node_of_inode(&inode)
    {
        node.forbid_names();
    }
    let name = alloc::format!("#{}", inode.attributes().ino);
    let dentry = Dentry::detached(inode, name.as_bytes(), directory.dentry());
    dentry.set_unlinked();
    open_checked(directory.beside(dentry), flags - TMPFILE_BIT - OpenFlags::DIRECTORY)
}

/// Opens a file that has been found, after checking that the caller may.
pub fn open_existing(context: &Context, target: Path, flags: OpenFlags) -> Result<Arc<OpenFile>> {
    let file_type = target.inode().file_type();
    if file_type == FileType::Symlink && !flags.contains(OpenFlags::PATH) {
        return Err(Errno::ELOOP);
    }
    if flags.contains(OpenFlags::DIRECTORY) && file_type != FileType::Directory {
        return Err(Errno::ENOTDIR);
    }
    if flags.contains(OpenFlags::PATH) {
        return Ok(OpenFile::new(Arc::new(PathFile), flags - OPENING_FLAGS, Some(target)));
    }
    let writes = flags.can_write() || flags.contains(OpenFlags::TRUNC);
    if file_type == FileType::Directory && writes {
        return Err(Errno::EISDIR);
    }
    if file_type == FileType::CharacterDevice && target.mount_flags().contains(MountFlags::NODEV) {
        return Err(Errno::EACCES);
    }
    let mut access = Access::empty();
    access.set(Access::READ, flags.can_read());
    access.set(Access::WRITE, writes);
    context.identity.check(&**target.inode(), access)?;
    if writes && file_type == FileType::Regular {
        target.check_writable()?;
    }
    if flags.contains(OpenFlags::NOATIME) && !context.identity.owns(&target.inode().attributes()) {
        return Err(Errno::EPERM);
    }
    open_checked(target, flags)
}

fn open_checked(target: Path, flags: OpenFlags) -> Result<Arc<OpenFile>> {
    let inode = target.inode();
    let truncates = flags.contains(OpenFlags::TRUNC) && inode.file_type() == FileType::Regular;
    let file = match inode.file_type() {
        FileType::Regular => {
            if flags.can_write() || flags.contains(OpenFlags::TRUNC) {
                check_not_running(inode)?;
            }
            if truncates {
                inode.truncate(0)?;
            }
            inode.clone().open(flags)?
        }
        FileType::CharacterDevice => super::dev::open(&target, flags)?,
        FileType::Socket | FileType::BlockDevice => match inode.clone().open(flags) {
            // Already open under another descriptor (`/proc/self/fd/N`)…
            Ok(file) => file,
            // …or a name only, which open(2) cannot use.
            Err(_) => return Err(Errno::ENXIO),
        },
        FileType::Fifo => match inode.clone().open(flags) {
            // A pipe that is open already (`/proc/self/fd/N`)…
            Ok(file) => file,
            // …or a name for one.
            Err(_) => crate::fs::pipe::fifo::open(inode, flags)?,
        },
        FileType::Directory | FileType::Symlink => inode.clone().open(flags)?,
    };
    // Every file on a 64-bit system is opened as if with O_LARGEFILE.
    let flags = (flags - OPENING_FLAGS) | OpenFlags::LARGEFILE;
    let open = OpenFile::new(file, flags, Some(target));
    notify::open_file(&open, Mask::OPEN);
    if truncates {
        notify::open_file(&open, Mask::MODIFY);
    }
    Ok(open)
}

/// `ETXTBSY` if a process runs the program in this file (open(2), truncate(2)).
pub fn check_not_running(inode: &Arc<dyn Inode>) -> Result<()> {
    for process in crate::state::kernel().tasks.all_processes() {
        let runs =
            process.executable.borrow_mut().as_ref().is_some_and(|path| {
                core::ptr::addr_eq(Arc::as_ptr(path.inode()), Arc::as_ptr(inode))
            });
        if runs {
            return Err(Errno::ETXTBSY);
        }
    }
    Ok(())
}

/// Finds the program at `path` and opens it for execve(2).
pub fn open_program(
    context: &Context,
    start: &Path,
    path: &[u8],
    follow: Follow,
) -> Result<Arc<OpenFile>> {
    open_program_at(context, Walk::new(context, start, Resolve::empty()).to(start, path, follow)?)
}

/// Opens a program whose place is known (`AT_EMPTY_PATH`, execveat(2)).
pub fn open_program_at(context: &Context, target: Path) -> Result<Arc<OpenFile>> {
    match target.inode().file_type() {
        FileType::Regular => {}
        FileType::Symlink => return Err(Errno::ELOOP),
        _ => return Err(Errno::EACCES),
    }
    if target.mount_flags().contains(MountFlags::NOEXEC) {
        return Err(Errno::EACCES);
    }
    context.identity.check(&**target.inode(), Access::EXECUTE)?;
    if node_of_inode(target.inode()).is_some_and(|node| node.is_written()) {
        return Err(Errno::ETXTBSY);
    }
    open_checked(target, OpenFlags::empty())
}

/// The file behind a descriptor opened with `O_PATH`: a place and nothing else.
struct PathFile;

impl File for PathFile {
    fn poll(&self) -> Events {
        Events::NVAL
    }
    fn stat(&self) -> Result<Stat> {
        Err(Errno::EBADF)
    }
    fn description(&self) -> String {
        String::from("path")
    }
}

/// An inode for an open file that has no name, so that `/proc/self/fd/N` can
/// lead to it. Opening it gives the same file.
pub struct OpenFileInode {
    file: Arc<dyn File>,
}

impl OpenFileInode {
    /// A path to an open file.
    pub fn path(open: &OpenFile) -> Path {
        match &open.path {
            Some(path) => path.clone(),
            None => {
                let name = open.file.description();
                let inode = Arc::new(Self { file: open.file.clone() });
                Path::anonymous(Dentry::anonymous(inode, name.as_bytes()))
            }
        }
    }
}

impl Inode for OpenFileInode {
    fn attributes(&self) -> super::inode::Attributes {
        super::inode::Attributes::from_stat(&self.file.stat().unwrap_or_default())
    }
    fn file_type(&self) -> FileType {
        // Pipes and sockets say so; a file without a type is an anonymous inode.
        self.attributes().file_type()
    }
    fn filesystem(&self) -> super::inode::FilesystemId {
        super::inode::FilesystemId(u32::MAX)
    }
    fn open(self: Arc<Self>, _flags: OpenFlags) -> Result<Arc<dyn File>> {
        if self.file_type() == FileType::Socket {
            return Err(Errno::ENXIO);
        }
        Ok(self.file.clone())
    }
    fn statfs(&self) -> super::inode::Statfs {
        // PIPEFS_MAGIC, SOCKFS_MAGIC, ANON_INODE_FS_MAGIC (statfs(2)).
        let kind = match self.file_type() {
            FileType::Fifo => 0x5049_5045,
            FileType::Socket => 0x534f_434b,
            _ => 0x0904_1934,
        };
        super::inode::Statfs { kind, bsize: 4096, frsize: 4096, namelen: 255, ..Default::default() }
    }
}
