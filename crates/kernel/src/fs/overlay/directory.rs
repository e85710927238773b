//! Directories of the overlay: changed entries above those of the lower layer.

use alloc::boxed::Box;
use alloc::collections::{BTreeMap, BTreeSet};
use alloc::string::String;
use alloc::sync::Arc;
use alloc::vec::Vec;

use super::Node;
use super::node::Body;
use crate::errno::{Errno, Result};
use crate::fs::file::{Dirent, Events, File, Stat};
use crate::fs::inode::{FileType, Inode, RenameMode};
use crate::fs::lower::LowerId;
use crate::io::{Sink, Source};
use crate::sync::KernelCell;

/// What a directory holds.
#[derive(Default)]
pub(super) struct Entries {
    /// The directory of the lower layer whose names show through.
    pub lower: Option<LowerId>,
    /// Names that hide those of the lower layer: nodes, including unchanged
    /// ones that have been looked up, and whiteouts.
    pub changed: BTreeMap<Box<[u8]>, Entry>,
}

/// What a name above the lower layer stands for.
pub(super) enum Entry {
    Node(Arc<Node>),
    /// The lower layer has the name, and it has been removed.
    Whiteout,
}

impl Node {
    /// Finds a name. A file of the lower layer becomes a node here.
    pub(super) fn lookup_node(&self, name: &[u8]) -> Result<Option<Arc<Node>>> {
        let below = {
            let entries = self.entries()?.borrow_mut();
            match entries.changed.get(name) {
                Some(Entry::Node(node)) => return Ok(Some(node.clone())),
                Some(Entry::Whiteout) => return Ok(None),
                None => entries.lower,
            }
        };
        let Some(id) = self.lookup_below(below, name)? else { return Ok(None) };
        let node = self.fs.node_of(id)?;
        self.entries()?.borrow_mut().changed.insert(name.into(), Entry::Node(node.clone()));
        Ok(Some(node))
    }

    fn lookup_below(&self, directory: Option<LowerId>, name: &[u8]) -> Result<Option<LowerId>> {
        match (directory, self.lower()) {
            (Some(directory), Some(lower)) => lower.0.lookup(directory, name),
            _ => Ok(None),
        }
    }

    /// All names, sorted by the lower layer first, then those above it.
    pub(super) fn list_entries(&self, emit: &mut dyn FnMut(&[u8], u64, FileType)) -> Result<()> {
        let below = self.entries()?.borrow_mut().lower;
        let mut seen: BTreeSet<Box<[u8]>> = BTreeSet::new();
        if let (Some(directory), Some(lower)) = (below, self.lower()) {
            // The lower layer may ask the host, so nothing is borrowed here.
            lower.0.list(directory, &mut |name, ino, kind| {
                let entries = match self.entries() {
                    Ok(entries) => entries.borrow_mut(),
                    Err(_) => return,
                };
                match entries.changed.get(name) {
                    None => emit(name, ino, kind),
                    Some(Entry::Whiteout) => {}
                    Some(Entry::Node(node)) => {
                        emit(name, node.ino, node.file_type());
                        seen.insert(name.into());
                    }
                }
            })?;
        }
        let entries = self.entries()?.borrow_mut();
        for (name, entry) in &entries.changed {
            if let Entry::Node(node) = entry
                && !seen.contains(name)
            {
                emit(name, node.ino, node.file_type());
            }
        }
        Ok(())
    }

    /// Whether a directory has no names.
    pub(super) fn is_empty_directory(&self) -> Result<bool> {
        let mut empty = true;
        self.list_entries(&mut |_, _, _| empty = false)?;
        Ok(empty)
    }

    /// Adds a name. A directory gives its new parent a link (`..`).
    pub(super) fn add_entry(&self, name: &[u8], node: Arc<Node>) -> Result<()> {
        let directory = node.file_type() == FileType::Directory;
        if self.meta.borrow_mut().nlink == 0 {
            return Err(Errno::ENOENT);
        }
        self.entries()?.borrow_mut().changed.insert(name.into(), Entry::Node(node));
        self.touch_content();
        if directory {
            self.meta.borrow_mut().nlink += 1;
        }
        Ok(())
    }

    /// Removes a name, leaving a whiteout where the lower layer has it.
    pub(super) fn remove_entry(&self, name: &[u8], node: &Arc<Node>) -> Result<()> {
        let below = self.entries()?.borrow_mut().lower;
        let covered = self.lookup_below(below, name)?.is_some();
        let old = {
            let mut entries = self.entries()?.borrow_mut();
            if covered {
                entries.changed.insert(name.into(), Entry::Whiteout)
            } else {
                entries.changed.remove(name)
            }
        };
        drop(old);
        self.touch_content();
        if node.file_type() == FileType::Directory {
            let mut meta = self.meta.borrow_mut();
            meta.nlink = meta.nlink.saturating_sub(1).max(1);
        }
        Ok(())
    }

    /// See [`Node::prune`].
    pub(super) fn prune_entries(&self, depth: usize) {
        let Body::Directory(entries) = &self.body else { return };
        let nodes: Vec<Arc<Node>> = {
            let entries = entries.borrow_mut();
            let nodes = entries.changed.values().filter_map(|entry| match entry {
                Entry::Node(node) if node.file_type() == FileType::Directory => Some(node.clone()),
                _ => None,
            });
            nodes.collect()
        };
        if depth > 0 {
            nodes.iter().for_each(|node| node.prune_entries(depth - 1));
        }
        drop(nodes);
        let mut dropped = Vec::new();
        entries.borrow_mut().changed.retain(|_, entry| match entry {
            Entry::Node(node) if Arc::strong_count(node) == 1 && node.is_as_below() => {
                dropped.push(node.clone());
                false
            }
            _ => true,
        });
    }

    /// Takes over what the lower layer now says of this directory, and of those below it that
    /// have nodes: more names, and other times if nothing was changed above it.
    pub(super) fn follow_lower(&self, depth: usize) -> Result<()> {
        let Body::Directory(entries) = &self.body else { return Ok(()) };
        let (below, nodes) = {
            let entries = entries.borrow_mut();
            let nodes = entries.changed.values().filter_map(|entry| match entry {
                Entry::Node(node) if node.file_type() == FileType::Directory => Some(node.clone()),
                _ => None,
            });
            (entries.lower, nodes.collect::<Vec<_>>())
        };
        if let (Some(id), Some(lower)) = (below, self.lower()) {
            let mut subdirectories = 0;
            self.list_entries(&mut |_, _, kind| {
                subdirectories += u32::from(kind == FileType::Directory);
            })?;
            let mtime = lower.0.attributes(id)?.mtime;
            let mut meta = self.meta.borrow_mut();
            meta.nlink = 2 + subdirectories;
            if !meta.changed {
                (meta.atime, meta.mtime, meta.ctime, meta.btime) = (mtime, mtime, mtime, mtime);
            }
        }
        match depth {
            0 if !nodes.is_empty() => Err(Errno::ELOOP),
            _ => nodes.iter().try_for_each(|node| node.follow_lower(depth - 1)),
        }
    }

    /// Whether a node made anew from the lower layer would be the same.
    fn is_as_below(&self) -> bool {
        if self.meta.borrow_mut().changed {
            return false;
        }
        match &self.body {
            Body::Regular(content) => content.borrow_mut().untouched().is_some(),
            Body::Directory(entries) => {
                let entries = entries.borrow_mut();
                entries.lower.is_some() && entries.changed.is_empty()
            }
            Body::LowerSymlink(..) | Body::Special => true,
            Body::Symlink(_) => false,
        }
    }

    pub(super) fn rename_entry(
        &self,
        name: &[u8],
        to: &Arc<Node>,
        new_name: &[u8],
        mode: RenameMode,
    ) -> Result<()> {
        let moved = self.lookup_node(name)?.ok_or(Errno::ENOENT)?;
        let target = to.lookup_node(new_name)?;
        match (mode, target) {
            (RenameMode::Exchange, Some(target)) => {
                self.remove_entry(name, &moved)?;
                to.remove_entry(new_name, &target)?;
                self.add_entry(name, target.clone())?;
                to.add_entry(new_name, moved.clone())?;
                target.update(|_| ());
            }
            (RenameMode::Exchange, None) => return Err(Errno::ENOENT),
            (RenameMode::Replace, target) => {
                if let Some(target) = target {
                    if target.file_type() == FileType::Directory && !target.is_empty_directory()? {
                        return Err(Errno::ENOTEMPTY);
                    }
                    to.remove_entry(new_name, &target)?;
                    target.lose_name();
                }
                self.remove_entry(name, &moved)?;
                to.add_entry(new_name, moved.clone())?;
            }
        }
        moved.update(|_| ());
        Ok(())
    }
}

/// An open directory.
///
/// The names are taken down when reading starts, so that removing entries
/// while reading skips none and repeats none. `rewinddir` takes them anew.
pub struct DirectoryFile {
    inode: Arc<dyn Inode>,
    snapshot: KernelCell<Option<Snapshot>>,
}

struct Snapshot {
    names: Vec<u8>,
    entries: Vec<SnapshotEntry>,
}

struct SnapshotEntry {
    ino: u64,
    start: u32,
    len: u8,
    kind: FileType,
}

impl DirectoryFile {
    /// An open directory of any file system.
    pub fn new(inode: Arc<dyn Inode>) -> Self {
        Self { inode, snapshot: KernelCell::new(None) }
    }

    fn take_snapshot(&self) -> Result<()> {
        let mut snapshot = Snapshot { names: Vec::new(), entries: Vec::new() };
        self.inode.list(&mut |name, ino, kind| {
            let start = snapshot.names.len() as u32;
            snapshot.names.extend_from_slice(name);
            snapshot.entries.push(SnapshotEntry { ino, start, len: name.len() as u8, kind });
        })?;
        *self.snapshot.borrow_mut() = Some(snapshot);
        Ok(())
    }
}

impl File for DirectoryFile {
    fn read(&self, _: &mut Sink<'_>, _: u64) -> Result<usize> {
        Err(Errno::EISDIR)
    }

    fn write(&self, _: &mut Source<'_>, _: u64) -> Result<usize> {
        Err(Errno::EISDIR)
    }

    fn seekable(&self) -> bool {
        true
    }

    fn poll(&self) -> Events {
        Events::IN | Events::OUT | Events::RDNORM | Events::WRNORM
    }

    fn stat(&self) -> Result<Stat> {
        Ok(self.inode.attributes().to_stat())
    }

    fn read_directory(&self, offset: u64, emit: &mut dyn FnMut(Dirent) -> bool) -> Result<()> {
        // Positions 0 and 1 are `.` and `..`, which the caller emits: only it
        // knows the parent's inode number.
        let offset = offset.saturating_sub(2);
        if offset == 0 || self.snapshot.borrow_mut().is_none() {
            self.take_snapshot()?;
        }
        let guard = self.snapshot.borrow_mut();
        let Some(snapshot) = guard.as_ref() else { return Ok(()) };
        let first = usize::try_from(offset).unwrap_or(usize::MAX);
        for (position, entry) in snapshot.entries.iter().enumerate().skip(first) {
            let start = entry.start as usize;
            let dirent = Dirent {
                ino: entry.ino,
                next_offset: position as u64 + 3,
                file_type: entry.kind as u8,
                name: snapshot.names[start..start + entry.len as usize].to_vec(),
            };
            if !emit(dirent) {
                break;
            }
        }
        Ok(())
    }

    fn description(&self) -> String {
        String::from("directory")
    }
}
