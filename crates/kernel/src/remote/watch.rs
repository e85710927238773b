//! Telling the host what happens in a directory, by means of inotify(7).

use alloc::collections::{BTreeMap, VecDeque};
use alloc::sync::Arc;
use alloc::vec::Vec;

use thaw_abi::remote::*;

use super::tree;
use crate::errno::{Errno, Result};
use crate::fs::Context;
use crate::fs::file::File;
use crate::fs::inode::FileType;
use crate::fs::inotify::{Inotify, Mask};
use crate::fs::path::Path;
use crate::fs::walk::{Follow, walk};
use crate::io::Sink;
use crate::state::kernel;
use crate::task::scheduler;
use crate::task::wait::WaitQueue;

/// Bytes of `struct inotify_event` without a name.
const HEADER: usize = 16;
/// The longest event: a name has up to 255 bytes.
const EVENT_MAX: usize = HEADER + 256;

/// Whether directories in the watched one are watched, too.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Depth {
    /// They are not.
    One,
    /// They are, as are those that come later.
    All,
}

/// A directory that is watched.
pub struct Watch {
    instance: Arc<Inotify>,
    depth: Depth,
    /// Directories, with their paths in the watched one, by watch descriptor.
    directories: BTreeMap<i32, (Path, Vec<u8>)>,
    /// The watch descriptor of the directory itself.
    top: i32,
    /// What was in new directories before they were watched: it has been created, too.
    found: VecDeque<Vec<u8>>,
}

/// An event as inotify(7) tells it.
struct Raw {
    watch: i32,
    mask: Mask,
    name: Vec<u8>,
}

impl Watch {
    /// Watches a directory.
    ///
    /// # Errors
    /// It may not be read, or there are too many watches.
    pub fn begin(context: &Context, directory: &Path, depth: Depth) -> Result<Self> {
        let instance = kernel().fs.watches.instance()?;
        let (directories, found) = Default::default();
        let mut watch = Self { instance, depth, directories, top: 0, found };
        watch.top = watch.add(context, directory, Vec::new())?;
        Ok(watch)
    }

    /// Where to wait for events.
    pub fn queue(&self) -> &WaitQueue {
        self.instance.wait_queue().expect("an inotify instance has readers")
    }

    /// The next event, with the path of its file in the directory; none: there is none yet.
    ///
    /// # Errors
    /// `ENOENT`: the directory is gone; `EOVERFLOW`: events were lost.
    pub fn next(&mut self, context: &Context) -> Result<Option<(WatchEvent, Vec<u8>)>> {
        if let Some(path) = self.found.pop_front() {
            return Ok(Some((WatchEvent { what: WATCH_CREATED, reserved: 0 }, path)));
        }
        while let Some(raw) = self.read()? {
            if raw.mask.contains(Mask::Q_OVERFLOW) {
                return Err(Errno::EOVERFLOW);
            }
            if raw.mask.contains(Mask::IGNORED) {
                self.directories.remove(&raw.watch);
                if raw.watch == self.top {
                    return Err(Errno::ENOENT);
                }
            }
            let Some((directory, prefix)) = self.directories.get(&raw.watch) else { continue };
            // What happens to a directory itself is told by the one above it.
            let (Some(what), false) = (meaning(raw.mask), raw.name.is_empty()) else { continue };
            let path = joined(prefix, &raw.name);
            let is_new = raw.mask.intersects(Mask::CREATE | Mask::MOVED_TO);
            if self.depth == Depth::All && is_new && raw.mask.contains(Mask::ISDIR) {
                // One that has gone meanwhile, or may not be read, is not watched.
                if let Ok(new) = walk(context, &directory.clone(), &raw.name, Follow::No) {
                    let _ = self.add(context, &new, path.clone());
                }
            }
            return Ok(Some((WatchEvent { what, reserved: 0 }, path)));
        }
        Ok(None)
    }

    fn read(&self) -> Result<Option<Raw>> {
        let mut bytes = [0; EVENT_MAX];
        // Only one event is taken at a time: another one needs room, too.
        let room = match self.instance.next_len() {
            None => return Ok(None),
            Some(len) => len.min(EVENT_MAX),
        };
        let count = self.instance.read(&mut Sink::kernel(&mut bytes[..room]), 0)?;
        let word = |at: usize| u32::from_le_bytes([0, 1, 2, 3].map(|byte| bytes[at + byte]));
        let name = bytes[HEADER..count].split(|&byte| byte == 0).next().unwrap_or_default();
        let (watch, mask) = (word(0) as i32, Mask::from_bits_retain(word(4)));
        Ok(Some(Raw { watch, mask, name: name.to_vec() }))
    }

    /// Watches a directory, and all that are in it if that was asked for: nothing here calls
    /// itself, since trees are as deep as a guest likes. Returns the first one's watch descriptor.
    fn add(&mut self, context: &Context, directory: &Path, prefix: Vec<u8>) -> Result<i32> {
        let first = self.add_one(context, directory.clone(), prefix)?;
        let mut todo = alloc::vec![first.0];
        let mut names = first.1;
        while let Some(watch) = todo.pop() {
            if self.depth == Depth::One {
                break;
            }
            let Some((directory, prefix)) = self.directories.get(&watch).cloned() else { continue };
            if watch != first.0 {
                names = tree::names(context, directory.clone()).map_or(Vec::new(), |all| all.1);
            }
            for name in core::mem::take(&mut names) {
                if self.top != 0 {
                    self.found.push_back(joined(&prefix, &name));
                }
                let Ok(found) = walk(context, &directory, &name, Follow::No) else { continue };
                if found.inode().file_type() != FileType::Directory {
                    continue;
                }
                match self.add_one(context, found, joined(&prefix, &name)) {
                    Ok((watch, _)) => todo.push(watch),
                    // Whoever watches is to know that not all of it is watched.
                    Err(Errno::ENOSPC) => return Err(Errno::ENOSPC),
                    Err(_) => {}
                }
                scheduler::yield_if_due();
            }
        }
        Ok(first.0)
    }

    /// Watches one directory, which whoever asks may read; the names in it.
    fn add_one(
        &mut self,
        context: &Context,
        directory: Path,
        prefix: Vec<u8>,
    ) -> Result<(i32, Vec<Vec<u8>>)> {
        let (directory, names) = tree::names(context, directory)?;
        let wanted = Mask::CREATE
            | Mask::MODIFY
            | Mask::DELETE
            | Mask::ATTRIB
            | Mask::MOVED_FROM
            | Mask::MOVED_TO
            | Mask::DELETE_SELF;
        let watch = kernel().fs.watches.add(&self.instance, directory.inode(), wanted)?;
        self.directories.insert(watch, (directory, prefix));
        Ok((watch, names))
    }
}

fn joined(prefix: &[u8], name: &[u8]) -> Vec<u8> {
    match prefix.is_empty() {
        true => name.to_vec(),
        false => [prefix, b"/", name].concat(),
    }
}

/// What an event is called in the protocol.
fn meaning(mask: Mask) -> Option<u32> {
    [
        (Mask::CREATE | Mask::MOVED_TO, WATCH_CREATED),
        (Mask::MODIFY, WATCH_WRITTEN),
        (Mask::DELETE, WATCH_REMOVED),
        (Mask::MOVED_FROM, WATCH_RENAMED),
        (Mask::ATTRIB, WATCH_CHANGED),
    ]
    .into_iter()
    .find_map(|(of, what)| mask.intersects(of).then_some(what))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fs::tests::World;

    fn events(watch: &mut Watch, world: &World) -> Vec<(u32, alloc::string::String)> {
        let mut found = Vec::new();
        while let Some((event, path)) = watch.next(&world.context).unwrap() {
            found.push((event.what, alloc::string::String::from_utf8(path).unwrap()));
        }
        found
    }

    #[test]
    fn events_are_told_with_paths_in_the_directory() {
        let world = World::new();
        let make = |path: &str| tree::make_all(&world.context, path.as_bytes(), 0o755).unwrap();
        make("/etc/a/b");
        let directory = world.walk("/etc").unwrap();
        let mut all = Watch::begin(&world.context, &directory, Depth::All).unwrap();
        let mut one = Watch::begin(&world.context, &directory, Depth::One).unwrap();
        make("/etc/a/b/new");
        world.write("/etc/a/b/new/file", "x").unwrap();
        assert_eq!(events(&mut one, &world), []);
        // The new directory was not watched before it was heard of: what is in it is told all the same.
        let told = ["a/b/new", "a/b/new/file"].map(|path| (WATCH_CREATED, path.into()));
        assert_eq!(events(&mut all, &world), told);
        world.write("/etc/a/b/new/other", "x").unwrap();
        let other = "a/b/new/other";
        assert_eq!(
            events(&mut all, &world),
            [(WATCH_CREATED, other.into()), (WATCH_WRITTEN, other.into())]
        );
        tree::remove(&world.context, b"/etc/a", true).unwrap();
        let gone = events(&mut all, &world);
        assert!(gone.contains(&(WATCH_REMOVED, other.into())), "{gone:?}");
        assert_eq!(events(&mut one, &world), [(WATCH_REMOVED, "a".into())]);
    }

    #[test]
    fn a_directory_that_is_gone_ends_its_watch() {
        let world = World::new();
        tree::make_all(&world.context, b"/etc/a", 0o755).unwrap();
        let directory = world.walk("/etc/a").unwrap();
        let mut watch = Watch::begin(&world.context, &directory, Depth::One).unwrap();
        drop(directory);
        tree::remove(&world.context, b"/etc/a", true).unwrap();
        assert_eq!(watch.next(&world.context).unwrap_err(), Errno::ENOENT);
        drop(watch);
        assert!(kernel().fs.watches.is_empty());
    }
}
