//! Whether an index describes a file system: beyond the checksum, which only
//! says that the bytes are those once written.

use thaw_abi::extended::{INDEX_MAX, is_kept};
use thaw_abi::rootfs::{Index, IndexInode, NO_BLOB, ROOT_INODE};

use super::extended::{ExtendedError, Sizes, shown};

/// What is wrong with the structure of an index.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum StructureError {
    /// Inode 0 is not a directory.
    #[error("it has no root directory")]
    NoRoot,
    /// A table's range lies outside its table; holds the inode's number.
    #[error("inode {0} refers to something outside the file")]
    OutOfRange(u32),
    /// The entries of a directory are not sorted or not different.
    #[error("the entries of directory {0} are out of order")]
    Order(u32),
    /// An entry's name is none, or its type is not its inode's.
    #[error("directory {0} has an entry with a bad name or type")]
    BadEntry(u32),
    /// A directory has several parents or none.
    #[error("directory {0} does not have exactly one parent")]
    NotATree(u32),
    /// The number of links is not the number of names.
    #[error("inode {0} has a wrong number of links")]
    Links(u32),
    /// The size is not that of the content.
    #[error("inode {0} has a wrong size")]
    Size(u32),
    /// The extended attributes are not sorted or not different.
    #[error("the extended attributes of inode {0} are out of order")]
    ExtendedOrder(u32),
    /// A file has extended attributes that it cannot have.
    #[error("inode {0}: {1}")]
    Extended(u32, ExtendedError),
}

/// Checks every inode and every entry of an index.
pub fn check_structure(index: &Index<'_>) -> Result<(), StructureError> {
    let is_directory = |inode: &IndexInode| inode.mode & 0o170000 == 0o040000;
    let root = index.inode(ROOT_INODE).ok_or(StructureError::NoRoot)?;
    if !is_directory(root) {
        return Err(StructureError::NoRoot);
    }
    let count = index.inodes().len();
    let mut names = vec![0u32; count];
    let mut subdirectories = vec![0u32; count];
    for (number, inode) in (0u32..).zip(index.inodes()) {
        check_content(index, number, inode)?;
        let mut previous: Option<&[u8]> = None;
        for entry in index.entries(inode) {
            let name = index.name(entry);
            let child = index.inode(entry.inode).ok_or(StructureError::OutOfRange(number))?;
            let bad_name = name.is_empty()
                || name.len() != entry.name_len as usize
                || name.len() > 255
                || name == b"."
                || name == b".."
                || name.iter().any(|&byte| byte == 0 || byte == b'/');
            if bad_name || u32::from(entry.file_type) != child.mode >> 12 {
                return Err(StructureError::BadEntry(number));
            }
            if previous.is_some_and(|previous| previous >= name) {
                return Err(StructureError::Order(number));
            }
            previous = Some(name);
            names[entry.inode as usize] += 1;
            if is_directory(child) {
                subdirectories[number as usize] += 1;
            }
        }
    }
    for (number, inode) in (0u32..).zip(index.inodes()) {
        let own = names[number as usize];
        if is_directory(inode) {
            if own != u32::from(number != ROOT_INODE) {
                return Err(StructureError::NotATree(number));
            }
            if inode.nlink != 2 + subdirectories[number as usize] {
                return Err(StructureError::Links(number));
            }
        } else if inode.nlink != own || own == 0 {
            return Err(StructureError::Links(number));
        }
    }
    check_extended(index)?;
    check_reachable(index, is_directory)
}

/// Whether the files may have their extended attributes.
fn check_extended(index: &Index<'_>) -> Result<(), StructureError> {
    let mut previous: Option<(u32, &[u8])> = None;
    let mut sizes = Sizes::default();
    let mut whole = 0;
    for attribute in index.all_extended() {
        let number = attribute.inode;
        let refused = |error| StructureError::Extended(number, error);
        let inode = index.inode(number).ok_or(StructureError::OutOfRange(number))?;
        let (name, value) = (index.extended_name(attribute), index.extended_value(attribute));
        let lens = (attribute.name_len as usize, attribute.value_len as usize);
        if lens != (name.len(), value.len()) {
            return Err(StructureError::OutOfRange(number));
        }
        if previous.is_some_and(|previous| previous >= (number, name)) {
            return Err(StructureError::ExtendedOrder(number));
        }
        if !is_kept(name, inode.mode) {
            return Err(refused(ExtendedError::NotKept(shown(name))));
        }
        if previous.is_none_or(|(before, _)| before != number) {
            sizes = Sizes::default();
        }
        sizes.add(name, value).map_err(refused)?;
        whole += name.len() + value.len();
        if whole > INDEX_MAX {
            return Err(refused(ExtendedError::Index));
        }
        previous = Some((number, name));
    }
    Ok(())
}

/// One parent each still allows a ring of directories beside the tree.
fn check_reachable(
    index: &Index<'_>,
    is_directory: impl Fn(&IndexInode) -> bool,
) -> Result<(), StructureError> {
    let mut reached = vec![false; index.inodes().len()];
    let mut ahead = vec![ROOT_INODE];
    while let Some(number) = ahead.pop() {
        reached[number as usize] = true;
        let Some(inode) = index.inode(number).filter(|inode| is_directory(inode)) else { continue };
        ahead.extend(index.entries(inode).iter().map(|entry| entry.inode));
    }
    match reached.iter().position(|&reached| !reached) {
        Some(number) => Err(StructureError::NotATree(number as u32)),
        None => Ok(()),
    }
}

fn check_content(index: &Index<'_>, number: u32, inode: &IndexInode) -> Result<(), StructureError> {
    let out_of_range = Err(StructureError::OutOfRange(number));
    match inode.mode & 0o170000 {
        0o040000 if index.entries(inode).len() != inode.b as usize => out_of_range,
        0o120000 if index.link_target(inode).len() != inode.b as usize => out_of_range,
        0o120000 if inode.size != u64::from(inode.b) || inode.b == 0 => {
            Err(StructureError::Size(number))
        }
        0o100000 if inode.a == NO_BLOB => match inode.size {
            0 => Ok(()),
            _ => Err(StructureError::Size(number)),
        },
        0o100000 => match index.blobs().get(inode.a as usize) {
            Some(blob) if blob.size == inode.size => Ok(()),
            Some(_) => Err(StructureError::Size(number)),
            None => out_of_range,
        },
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use thaw_abi::rootfs::{IndexAttribute, IndexExtension, IndexHeader};

    use super::super::extended::Extended;
    use super::super::tree::{Attributes, Content, Node, Tree};
    use super::*;

    /// A small index in memory that is aligned as `Index::parse` wants it.
    fn sample() -> Vec<u64> {
        let mut tree = Tree::new();
        let file = Node { content: Content::Regular(None), attributes: Attributes::root(0o644) };
        tree.add_at(Path::new("/a/b"), file.clone()).unwrap();
        tree.add_at(Path::new("/a/c"), file).unwrap();
        tree.make_directories(Path::new("/d/e")).unwrap();
        aligned(&tree)
    }

    /// One with three extended attributes: two of inode 3 and one of inode 4.
    fn with_attributes() -> Vec<u64> {
        let mut tree = Tree::new();
        let file = Node { content: Content::Regular(None), attributes: Attributes::root(0o644) };
        for (path, names) in [("/a/b", &["user.a", "user.b"][..]), ("/a/c", &["user.c"])] {
            let id = tree.add_at(Path::new(path), file.clone()).unwrap();
            let mut extended = Extended::default();
            for name in names {
                extended.insert(name.as_bytes(), &[7; 60000]).unwrap();
            }
            tree.set_extended(id, extended).unwrap();
        }
        let link = Node { content: Content::Symlink(b"x".to_vec()), ..file };
        tree.add_at(Path::new("/link"), link).unwrap();
        aligned(&tree)
    }

    fn aligned(tree: &Tree) -> Vec<u64> {
        let bytes = tree.to_index().unwrap();
        let mut words = vec![0u64; bytes.len().div_ceil(8)];
        bytemuck::cast_slice_mut(&mut words)[..bytes.len()].copy_from_slice(&bytes);
        let padding = words.len() * 8 - bytes.len();
        let header: &mut [u8] =
            &mut bytemuck::cast_slice_mut(&mut words)[..size_of::<IndexHeader>()];
        bytemuck::from_bytes_mut::<IndexHeader>(header).total_len += padding as u64;
        words
    }

    fn inode(words: &mut [u64], number: usize) -> &mut IndexInode {
        let start = header(words).inodes_offset as usize + number * size_of::<IndexInode>();
        let bytes: &mut [u8] = bytemuck::cast_slice_mut(words);
        bytemuck::from_bytes_mut(&mut bytes[start..start + size_of::<IndexInode>()])
    }

    fn header(words: &[u64]) -> IndexHeader {
        *Index::parse(bytemuck::cast_slice(words)).unwrap().header()
    }

    fn extension(words: &mut [u64]) -> &mut IndexExtension {
        let bytes: &mut [u8] = bytemuck::cast_slice_mut(words);
        let (start, end) = (size_of::<IndexHeader>(), size_of::<IndexExtension>());
        bytemuck::from_bytes_mut(&mut bytes[start..start + end])
    }

    fn attribute(words: &mut [u64], number: usize) -> &mut IndexAttribute {
        let table = extension(words).attributes_offset as usize;
        let start = table + number * size_of::<IndexAttribute>();
        let bytes: &mut [u8] = bytemuck::cast_slice_mut(words);
        bytemuck::from_bytes_mut(&mut bytes[start..start + size_of::<IndexAttribute>()])
    }

    fn check(words: &[u64]) -> Result<(), StructureError> {
        check_structure(&Index::parse(bytemuck::cast_slice(words)).unwrap())
    }

    #[test]
    fn what_the_writer_makes_is_accepted() {
        assert_eq!(check(&sample()), Ok(()));
    }

    #[test]
    fn broken_structures_are_found() {
        type Break = fn(&mut [u64]);
        let cases: [(Break, StructureError); 6] = [
            (|w| inode(w, 0).mode = 0o100644, StructureError::NoRoot),
            (|w| inode(w, 0).b = 99, StructureError::OutOfRange(0)),
            (|w| inode(w, 3).nlink = 7, StructureError::Links(3)),
            (|w| inode(w, 3).size = 1, StructureError::Size(3)),
            (|w| inode(w, 3).a = 5, StructureError::OutOfRange(3)),
            // Directory 2 (/d) takes over the entries of the root.
            (|w| (inode(w, 2).a, inode(w, 2).b) = (0, 2), StructureError::NotATree(1)),
        ];
        for (break_it, expected) in cases {
            let mut words = sample();
            break_it(&mut words);
            assert_eq!(check(&words), Err(expected));
        }
    }

    #[test]
    fn attributes_that_a_file_cannot_have_are_found() {
        assert_eq!(check(&with_attributes()), Ok(()));
        let refused = |break_it: &dyn Fn(&mut [u64])| {
            let mut words = with_attributes();
            break_it(&mut words);
            check(&words).unwrap_err()
        };
        let extended = |number, error| StructureError::Extended(number, error);
        let not_kept = |name: &str| ExtendedError::NotKept(name.to_owned());
        let wrong = refused(&|words| attribute(words, 2).inode = 99);
        assert_eq!(wrong, StructureError::OutOfRange(99));
        let wrong = refused(&|words| attribute(words, 0).value_len = u32::MAX);
        assert_eq!(wrong, StructureError::OutOfRange(3));
        let wrong = refused(&|words| attribute(words, 0).name_offset = u32::MAX);
        assert_eq!(wrong, StructureError::OutOfRange(3));
        let wrong =
            refused(&|words| attribute(words, 1).name_offset = attribute(words, 0).name_offset);
        assert_eq!(wrong, StructureError::ExtendedOrder(3));
        let wrong = refused(&|words| attribute(words, 0).inode = 4);
        assert_eq!(wrong, StructureError::ExtendedOrder(3));
        // A file that is a link has none.
        let wrong = refused(&|words| attribute(words, 2).inode = 2);
        assert_eq!(wrong, StructureError::ExtendedOrder(2));
        let wrong = refused(&|words| attribute(words, 0).inode = 2);
        assert_eq!(wrong, extended(2, not_kept("user.a")));
        let wrong = refused(&|words| attribute(words, 0).name_len = 4);
        assert_eq!(wrong, extended(3, not_kept("user")));
    }

    /// A table may name the same bytes as often as it likes.
    #[test]
    fn attributes_are_counted_as_often_as_they_are_named() {
        let count = 300;
        let mut tree = Tree::new();
        let file = Node { content: Content::Regular(None), attributes: Attributes::root(0o644) };
        for number in 0..count {
            let id = tree.add_at(Path::new(&format!("/{number:03}")), file.clone()).unwrap();
            let mut extended = Extended::default();
            extended.insert(b"user.a", &[7; 50000]).unwrap();
            tree.set_extended(id, extended).unwrap();
        }
        // They are stored once.
        let mut words = aligned(&tree);
        assert!(words.len() * 8 < 100_000);
        assert_eq!(check(&words), Ok(()));
        for number in 0..count {
            attribute(&mut words, number).value_len += 6000;
        }
        let mut words = words.to_vec();
        words.resize(words.len() + 1000, 0);
        let total = words.len() as u64 * 8;
        let bytes: &mut [u8] = bytemuck::cast_slice_mut(&mut words);
        let header: &mut IndexHeader =
            bytemuck::from_bytes_mut(&mut bytes[..size_of::<IndexHeader>()]);
        header.total_len = total;
        header.strings_len = total - header.strings_offset;
        let last = (INDEX_MAX / 56006) as u32 + 1;
        assert_eq!(check(&words), Err(StructureError::Extended(last, ExtendedError::Index)));
    }
}
