//! Path resolution (path_resolution(7)).

use alloc::borrow::Cow;
use alloc::sync::Arc;
use alloc::vec::Vec;

use bitflags::bitflags;

use super::context::Context;
use super::dentry::Dentry;
use super::inode::{FileType, Link};
use super::mount::MountFlags;
use super::path::Path;
use super::permission::Access;
use crate::errno::{Errno, Result};

/// Symbolic links followed in one resolution (path_resolution(7)).
const LINKS_MAX: u32 = 40;
/// Directories above others that one resolution looks at, so that it does not keep the kernel for
/// seconds.
const STEPS_MAX: usize = 1 << 19;
/// Longest name of a file, in bytes.
pub const NAME_MAX: usize = 255;
/// Longest path, terminator included, in bytes.
pub const PATH_MAX: usize = 4096;

bitflags! {
    /// Restrictions of a resolution, with the values of openat2(2).
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
    pub struct Resolve: u64 {
        /// Stay on one mount.
        const NO_XDEV = 0x01;
        /// No magic links.
        const NO_MAGICLINKS = 0x02;
        /// No symbolic links at all.
        const NO_SYMLINKS = 0x04;
        /// Stay below the start.
        const BENEATH = 0x08;
        /// The start is the root.
        const IN_ROOT = 0x10;
        /// Only what is cached.
        const CACHED = 0x20;
    }
}

/// What to do when the last name is a symbolic link.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Follow {
    /// Go where it leads.
    Yes,
    /// Take the link itself.
    No,
}

/// The last part of a path.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Last {
    /// A name.
    Name(Vec<u8>),
    /// `.`.
    Dot,
    /// `..`.
    DotDot,
    /// There is none: the path was `/`.
    Root,
}

/// A directory and a name to look up, create or remove in it.
pub struct Parent {
    /// The directory.
    pub directory: Path,
    /// The name.
    pub last: Last,
    /// The path ended in a slash.
    pub trailing_slash: bool,
}

/// A resolution in progress: the number of links followed counts across all steps.
pub struct Walk<'c> {
    context: &'c Context,
    resolve: Resolve,
    root: &'c Path,
    links: u32,
    /// Directories that may still be looked at for `..`.
    steps: usize,
}

/// Where a resolution stopped.
enum Stop {
    At(Path, bool),
    Before(Parent),
}

/// Resolves `path` from `start`.
pub fn walk(context: &Context, start: &Path, path: &[u8], follow: Follow) -> Result<Path> {
    Walk::new(context, start, Resolve::empty()).to(start, path, follow)
}

/// Resolves all but the last part of `path`.
pub fn walk_parent(context: &Context, start: &Path, path: &[u8]) -> Result<Parent> {
    Walk::new(context, start, Resolve::empty()).parent(start, path)
}

impl<'c> Walk<'c> {
    /// A resolution from `start`, with restrictions.
    pub fn new(context: &'c Context, start: &'c Path, resolve: Resolve) -> Self {
        let confined = resolve.intersects(Resolve::IN_ROOT | Resolve::BENEATH);
        let root = if confined { start } else { &context.root };
        Self { context, resolve, root, links: 0, steps: STEPS_MAX }
    }

    /// Resolves `path` from `start` to a file.
    pub fn to(&mut self, start: &Path, path: &[u8], follow: Follow) -> Result<Path> {
        match self.run(start, path, follow, false)? {
            Stop::At(path, trailing_slash) => {
                if trailing_slash && !path.is_directory() {
                    return Err(Errno::ENOTDIR);
                }
                Ok(path)
            }
            Stop::Before(_) => Err(Errno::EINVAL),
        }
    }

    /// Resolves `path` from `start` up to the last part.
    pub fn parent(&mut self, start: &Path, path: &[u8]) -> Result<Parent> {
        match self.run(start, path, Follow::No, true)? {
            Stop::Before(parent) => Ok(parent),
            Stop::At(..) => Err(Errno::EINVAL),
        }
    }

    fn run(&mut self, start: &Path, path: &[u8], follow: Follow, to_parent: bool) -> Result<Stop> {
        if path.is_empty() {
            return Err(Errno::ENOENT);
        }
        if path.len() >= PATH_MAX {
            return Err(Errno::ENAMETOOLONG);
        }
        let mut rest: Cow<'_, [u8]> = Cow::Borrowed(path);
        let mut at = 0;
        let mut current = self.begin(start, path)?;
        loop {
            at = skip_slashes(&rest, at);
            let end = at + rest[at..].iter().position(|&b| b == b'/').unwrap_or(rest.len() - at);
            if at == end {
                // Nothing but slashes, or the end after a link's target.
                return Ok(if to_parent {
                    Stop::Before(Parent {
                        directory: current,
                        last: Last::Root,
                        trailing_slash: true,
                    })
                } else {
                    Stop::At(current, true)
                });
            }
            let after = skip_slashes(&rest, end);
            let is_last = after == rest.len();
            let trailing_slash = is_last && after > end;
            let name = &rest[at..end];
            if !current.is_directory() {
                return Err(Errno::ENOTDIR);
            }
            self.context.identity.check(&**current.inode(), Access::EXECUTE)?;
            if name.len() > NAME_MAX {
                return Err(Errno::ENAMETOOLONG);
            }
            current.inode().expect_walk(&rest[at..]);
            if is_last && to_parent {
                let last = match name {
                    b"." => Last::Dot,
                    b".." => Last::DotDot,
                    name => Last::Name(name.to_vec()),
                };
                return Ok(Stop::Before(Parent { directory: current, last, trailing_slash }));
            }
            match name {
                b"." => {}
                b".." => current = self.up(&current)?,
                name => {
                    let dentry = self.lookup(&current, name)?.ok_or(Errno::ENOENT)?;
                    let is_link = dentry.inode.file_type() == FileType::Symlink;
                    if !is_link || is_last && !trailing_slash && follow == Follow::No {
                        current = self.cross(current.moved_to(dentry))?;
                    } else {
                        match self.read_link(&current.beside(dentry))? {
                            Link::Magic(target) => current = target,
                            Link::Text(target) => {
                                (rest, current) = self.redirect(&current, target, &rest[end..])?;
                                at = 0;
                                continue;
                            }
                        }
                    }
                }
            }
            if is_last {
                return Ok(Stop::At(current, trailing_slash));
            }
            at = after;
        }
    }

    /// A link in `directory` leads to `target`: what is to be walked then, and from where.
    fn redirect(
        &self,
        directory: &Path,
        mut target: Vec<u8>,
        rest: &[u8],
    ) -> Result<(Cow<'static, [u8]>, Path)> {
        if target.is_empty() {
            return Err(Errno::ENOENT);
        }
        let from = self.begin(directory, &target)?;
        // Keeps the slash that follows: it makes the target a directory.
        target.extend_from_slice(rest);
        if target.len() >= 2 * PATH_MAX {
            return Err(Errno::ENAMETOOLONG);
        }
        Ok((Cow::Owned(target), from))
    }

    fn begin(&self, start: &Path, path: &[u8]) -> Result<Path> {
        if path.first() != Some(&b'/') {
            return Ok(start.clone());
        }
        if self.resolve.contains(Resolve::BENEATH) {
            return Err(Errno::EXDEV);
        }
        Ok(self.root.clone())
    }

    fn up(&mut self, from: &Path) -> Result<Path> {
        let above = match from.is(self.root) {
            true => None,
            false => from.parent_below(Some(self.root)),
        };
        let Some(above) = above else {
            // The root: what is mounted on it shows (`follow_dotdot`, fs/namei.c).
            return match self.resolve.contains(Resolve::BENEATH) {
                true => Err(Errno::EXDEV),
                false => self.cross(from.clone()),
            };
        };
        if self.resolve.contains(Resolve::NO_XDEV) && !above.is_in_mount_of(from) {
            return Err(Errno::EXDEV);
        }
        // Each `..` looks at all directories up to the root of the mount.
        if !above.is_connected(&mut self.steps).ok_or(Errno::ELOOP)? {
            return Err(Errno::ENOENT);
        }
        self.cross(above)
    }

    /// The file that `name` stands for in a directory, on top of what is mounted there.
    pub fn child(&self, directory: &Path, name: &[u8]) -> Result<Option<Path>> {
        let found = self.lookup(directory, name)?;
        found.map(|dentry| self.cross(directory.beside(dentry))).transpose()
    }

    fn lookup(&self, directory: &Path, name: &[u8]) -> Result<Option<Arc<Dentry>>> {
        let found = directory.dentry().child(name)?;
        if found.is_none() {
            super::dev::missing(directory, name)?;
        }
        Ok(found)
    }

    /// What is mounted at a place.
    fn cross(&self, path: Path) -> Result<Path> {
        if !path.dentry().is_mount_point() {
            return Ok(path);
        }
        let top = path.clone().topmost();
        if self.resolve.contains(Resolve::NO_XDEV) && !top.is_in_mount_of(&path) {
            return Err(Errno::EXDEV);
        }
        Ok(top)
    }

    /// Reads a link that is about to be followed.
    pub fn read_link(&mut self, link: &Path) -> Result<Link> {
        self.links += 1;
        if self.links > LINKS_MAX
            || self.resolve.contains(Resolve::NO_SYMLINKS)
            || link.mount_flags().contains(MountFlags::NOSYMFOLLOW)
        {
            return Err(Errno::ELOOP);
        }
        let target = link.inode().read_link()?;
        // As `nd_jump_root`, fs/namei.c: where a link leads is part of the way.
        if let Link::Text(text) = &target
            && text.first() == Some(&b'/')
            && self.resolve.contains(Resolve::NO_XDEV)
            && !self.root.is_in_mount_of(link)
        {
            return Err(Errno::EXDEV);
        }
        if let Link::Magic(path) = &target {
            if self.resolve.contains(Resolve::NO_MAGICLINKS) {
                return Err(Errno::ELOOP);
            }
            if self.resolve.intersects(Resolve::BENEATH | Resolve::IN_ROOT) {
                return Err(Errno::EXDEV);
            }
            if self.resolve.contains(Resolve::NO_XDEV) && !path.is_in_mount_of(link) {
                return Err(Errno::EXDEV);
            }
        }
        Ok(target)
    }
}

fn skip_slashes(path: &[u8], from: usize) -> usize {
    from + path[from..].iter().take_while(|&&b| b == b'/').count()
}
