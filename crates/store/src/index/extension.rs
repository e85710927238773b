//! Indexes that extend others: all files of one, under the same numbers, and more.
//!
//! The image of a runtime template holds a kernel that knows files by their numbers of inode
//! and blob. Functions built from it have more files, and the kernel goes on with theirs.

use std::collections::{HashMap, HashSet};
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use thaw_abi::rootfs::{Index, IndexInode, NO_BLOB, ROOT_INODE};

use super::tree::{Attributes, Content, NodeId, Tree, TreeError};
use super::write::{S_IFBLK, S_IFCHR, S_IFDIR, S_IFIFO, S_IFLNK, S_IFREG, S_IFSOCK, encode_device};

/// The inode numbers that the files of `tree` have in `base`.
///
/// # Errors
/// [`TreeError::Extends`]: a file of `base` is not in the tree, or not the same there.
pub(super) fn match_files(
    tree: &Tree,
    base: &Index<'_>,
) -> Result<HashMap<NodeId, u32>, TreeError> {
    let mut matching = Matching { tree, base, numbers: HashMap::new(), taken: HashSet::new() };
    let mut ahead = vec![(PathBuf::from("/"), ROOT_INODE, Tree::ROOT)];
    while let Some((path, number, id)) = ahead.pop() {
        let inode = base.inode(number).ok_or_else(|| TreeError::Extends(path.clone()))?;
        matching.file(&path, number, inode, id)?;
        for entry in base.entries(inode) {
            let name = base.name(entry);
            let path = path.join(OsStr::from_bytes(name));
            match tree.lookup(id, name) {
                Some(child) => ahead.push((path, entry.inode, child)),
                None => return Err(TreeError::Extends(path)),
            }
        }
    }
    Ok(matching.numbers)
}

/// The files of a tree that were found in an index.
struct Matching<'a> {
    tree: &'a Tree,
    base: &'a Index<'a>,
    numbers: HashMap<NodeId, u32>,
    taken: HashSet<u32>,
}

impl Matching<'_> {
    fn file(
        &mut self,
        path: &Path,
        number: u32,
        inode: &IndexInode,
        id: NodeId,
    ) -> Result<(), TreeError> {
        let differs = || TreeError::Extends(path.to_owned());
        if !self.is_same(inode, id) || !self.has_same_extended(number, id) {
            return Err(differs());
        }
        match self.numbers.insert(id, number) {
            // Another name of the same file, on both sides.
            Some(before) if before == number => Ok(()),
            None if self.taken.insert(number) => Ok(()),
            _ => Err(differs()),
        }
    }

    fn is_same(&self, inode: &IndexInode, id: NodeId) -> bool {
        let node = self.tree.node(id);
        let kind = inode.mode & 0o170000;
        let same_content = match &node.content {
            // What has been added to a directory has changed its times.
            Content::Directory(_) => {
                return kind == S_IFDIR && has_same_owner(inode, &node.attributes);
            }
            Content::Regular(None) => kind == S_IFREG && inode.a == NO_BLOB,
            Content::Regular(Some(blob)) => {
                let below = self.base.blobs().get(inode.a as usize);
                let is_it = below.is_some_and(|it| it.hash == *blob.hash.as_bytes());
                kind == S_IFREG && is_it
            }
            Content::Symlink(target) => kind == S_IFLNK && self.base.link_target(inode) == target,
            Content::Fifo => kind == S_IFIFO,
            Content::Socket => kind == S_IFSOCK,
            Content::CharacterDevice(device) => {
                kind == S_IFCHR && inode.rdev == encode_device(*device)
            }
            Content::BlockDevice(device) => kind == S_IFBLK && inode.rdev == encode_device(*device),
        };
        let modified = node.attributes.modified;
        let same_times =
            (inode.mtime_sec, inode.mtime_nsec) == (modified.seconds, modified.nanoseconds);
        same_content && same_times && has_same_owner(inode, &node.attributes)
    }

    fn has_same_extended(&self, number: u32, id: NodeId) -> bool {
        let base = self.base;
        let below = base.extended(number).iter();
        let below = below.map(|one| (base.extended_name(one), base.extended_value(one)));
        below.eq(self.tree.extended(id).iter())
    }
}

fn has_same_owner(inode: &IndexInode, attributes: &Attributes) -> bool {
    inode.mode & 0o7777 == attributes.permissions & 0o7777
        && (inode.uid, inode.gid) == (attributes.uid, attributes.gid)
}

/// Checks that no file of `base` has another name in the new index: whoever knows the file
/// knows how many it has.
pub(super) fn check_links(inodes: &[IndexInode], base: &Index<'_>) -> Result<(), TreeError> {
    let is_other = |(new, old): (&IndexInode, &IndexInode)| {
        old.mode & 0o170000 != S_IFDIR && new.nlink != old.nlink
    };
    match inodes.iter().zip(base.inodes()).any(is_other) {
        true => Err(TreeError::Extends(PathBuf::from("a second name of one of its files"))),
        false => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::super::check::check_structure;
    use super::super::extended::Extended;
    use super::super::tree::{Node, Timestamp};
    use super::*;
    use crate::blob::Blob;
    use crate::id::BlobHash;

    fn regular(content: u8) -> Node {
        let blob = Blob { hash: BlobHash([content; 32]), size: content.into() };
        let attributes = Attributes::root(0o644);
        Node { content: Content::Regular(Some(blob)), attributes }
    }

    /// A tree with files of these contents.
    fn tree_of(files: &[(&str, u8)]) -> Tree {
        let mut tree = Tree::new();
        for (path, content) in files {
            tree.add_at(Path::new(path), regular(*content)).unwrap();
        }
        tree
    }

    /// The tree with an extended attribute of one of its files.
    fn with_attribute(tree: &Tree, path: &str, value: &[u8]) -> Tree {
        let mut tree = tree.clone();
        let mut extended = Extended::default();
        extended.insert(b"user.a", value).unwrap();
        let id = tree.find(Path::new(path)).unwrap();
        tree.set_extended(id, extended).unwrap();
        tree
    }

    /// Bytes of an index, aligned as `Index::parse` wants them.
    fn aligned(bytes: &[u8]) -> Vec<u64> {
        let mut words = vec![0u64; bytes.len().div_ceil(8)];
        bytemuck::cast_slice_mut(&mut words)[..bytes.len()].copy_from_slice(bytes);
        words
    }

    fn extend(tree: &Tree, base: &Tree) -> Result<(Vec<u64>, usize), TreeError> {
        let base = base.to_index().unwrap();
        let words = aligned(&base);
        let base = Index::parse(&bytemuck::cast_slice(&words)[..base.len()]).unwrap();
        let bytes = tree.to_index_over(&base)?;
        Ok((aligned(&bytes), bytes.len()))
    }

    /// Inode and blob number of each file by its name in a directory.
    fn numbers(index: &Index<'_>, directory: u32, found: &mut Vec<(Vec<u8>, u32, u32)>) {
        let inode = index.inode(directory).unwrap();
        for entry in index.entries(inode) {
            let child = index.inode(entry.inode).unwrap();
            let is_directory = child.mode & 0o170000 == S_IFDIR;
            let blob = if is_directory { 0 } else { child.a };
            found.push((index.name(entry).to_vec(), entry.inode, blob));
            if is_directory {
                numbers(index, entry.inode, found);
            }
        }
    }

    fn all_numbers(words: &[u64], len: usize) -> Vec<(Vec<u8>, u32, u32)> {
        let index = Index::parse(&bytemuck::cast_slice(words)[..len]).unwrap();
        assert_eq!(check_structure(&index), Ok(()));
        let mut found = Vec::new();
        numbers(&index, ROOT_INODE, &mut found);
        found
    }

    #[test]
    fn files_keep_their_numbers() {
        let base = [("/lib/b", 1), ("/lib/d", 2), ("/usr/x", 1)];
        let more = [("/app/main", 3), ("/lib/a", 4), ("/lib/c/deep", 2), ("/a", 5)];
        let base = tree_of(&base);
        let mut whole = base.clone();
        for (path, content) in more {
            whole.add_at(Path::new(path), regular(content)).unwrap();
        }
        whole.attributes_mut(Tree::ROOT).modified = Timestamp { seconds: 9, nanoseconds: 0 };
        let (words, len) = extend(&whole, &base).unwrap();
        let extended = all_numbers(&words, len);
        let plain = base.to_index().unwrap();
        for known in all_numbers(&aligned(&plain), plain.len()) {
            assert!(extended.contains(&known), "{known:?} in {extended:?}");
        }
        assert_eq!(extended.len(), 11);
        // An extension can be extended.
        let mut further = whole.clone();
        further.add_at(Path::new("/lib/c/more"), regular(9)).unwrap();
        let base = Index::parse(&bytemuck::cast_slice(&words)[..len]).unwrap();
        let bytes = further.to_index_over(&base).unwrap();
        let again = all_numbers(&aligned(&bytes), bytes.len());
        assert!(extended.iter().all(|known| again.contains(known)));
    }

    #[test]
    fn a_file_that_is_not_the_same_is_named() {
        let base = tree_of(&[("/lib/b", 1), ("/lib/d", 2)]);
        let named = |tree: &Tree| match extend(tree, &base) {
            Err(TreeError::Extends(path)) => path.display().to_string(),
            other => panic!("{other:?}"),
        };
        assert_eq!(named(&tree_of(&[("/lib/b", 1)])), "/lib/d");
        assert_eq!(named(&tree_of(&[("/lib/b", 1), ("/lib/d", 3)])), "/lib/d");
        assert_eq!(named(&tree_of(&[("/lib/b", 1), ("/lib/d/e", 2)])), "/lib/d");
        let mut older = base.clone();
        let id = older.find(Path::new("/lib/b")).unwrap();
        older.attributes_mut(id).modified.seconds = 1;
        assert_eq!(named(&older), "/lib/b");
        let mut closed = base.clone();
        let id = closed.find(Path::new("/lib")).unwrap();
        closed.attributes_mut(id).permissions = 0o700;
        assert_eq!(named(&closed), "/lib");
        let base = with_attribute(&base, "/lib/b", b"1");
        let named = |tree: &Tree| match extend(tree, &base) {
            Err(TreeError::Extends(path)) => path.display().to_string(),
            other => panic!("{other:?}"),
        };
        assert_eq!(named(&with_attribute(&base, "/lib/b", b"2")), "/lib/b");
        assert_eq!(named(&with_attribute(&base, "/lib", b"1")), "/lib");
        assert_eq!(named(&tree_of(&[("/lib/b", 1), ("/lib/d", 2)])), "/lib/b");
        let mut linked = base.clone();
        let id = linked.find(Path::new("/lib/b")).unwrap();
        linked.link(Tree::ROOT, b"second", id).unwrap();
        assert!(matches!(extend(&linked, &base), Err(TreeError::Extends(_))));
    }
}
