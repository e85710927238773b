//! A root file system in memory, on its way to become a rootfs index.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::{Component, Path, PathBuf};

use thaw_abi::extended::{INDEX_MAX, is_kept};

use super::extended::{Extended, ExtendedError, shown};
use super::write::{S_IFDIR, S_IFLNK, S_IFREG};
use crate::blob::Blob;

/// Symbolic links that one path may lead through (`ELOOP`, path_resolution(7)).
const MAX_LINKS: usize = 40;

/// Why a tree cannot be built as asked. Paths are those inside the tree.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum TreeError {
    /// A name is empty, `.`, `..`, longer than 255 bytes or holds `/` or NUL.
    #[error("{0:?} cannot be the name of a file")]
    BadName(String),
    /// A path leads through something that is not a directory.
    #[error("{} is not a directory, so nothing can be put below it", .0.display())]
    NotADirectory(PathBuf),
    /// A directory is to be replaced by something else or the other way round.
    #[error("{} is there already and is not of the same kind", .0.display())]
    Occupied(PathBuf),
    /// A path leads through too many symbolic links.
    #[error("{} leads through more than {MAX_LINKS} symbolic links", .0.display())]
    TooManyLinks(PathBuf),
    /// A directory lies in too many others.
    #[error("a directory would lie in more than {0} others")]
    TooDeep(usize),
    /// Its files are not here.
    #[error("its files are still being pulled; try again when that is done")]
    Elsewhere,
    /// A hard link to a directory.
    #[error("a directory cannot have a second name")]
    LinkedDirectory,
    /// A device number does not fit the index format (12 bits major, 20 bits minor).
    #[error("device number {0}:{1} is too large")]
    DeviceNumber(u32, u32),
    /// A symbolic link's target is empty or longer than a page.
    #[error("a symbolic link's target has 1 to 4095 bytes, not {0}")]
    BadTarget(usize),
    /// The tree does not have a file of the index that it is to extend, or another one there.
    #[error("{} is not as in the root file system that is to be extended", .0.display())]
    Extends(PathBuf),
    /// A file cannot have these extended attributes.
    #[error(transparent)]
    Extended(#[from] ExtendedError),
    /// The tree has more of something than the format can count.
    #[error("the tree has too many {0} for a rootfs index: import fewer files")]
    TooMany(&'static str),
}

/// A moment, as in `struct timespec`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Timestamp {
    /// Seconds since the epoch.
    pub seconds: i64,
    /// Nanoseconds, below 1 000 000 000.
    pub nanoseconds: u32,
}

/// Who may do what with a file, and when it was last written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Attributes {
    /// Permission bits, `07777`.
    pub permissions: u32,
    /// Owner.
    pub uid: u32,
    /// Group.
    pub gid: u32,
    /// Last modification.
    pub modified: Timestamp,
}

impl Attributes {
    /// Belongs to root, last written at the epoch.
    pub const fn root(permissions: u32) -> Self {
        Self { permissions, uid: 0, gid: 0, modified: Timestamp { seconds: 0, nanoseconds: 0 } }
    }
}

/// Number of a device, as in `st_rdev`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceNumber {
    /// Driver.
    pub major: u32,
    /// Device of that driver.
    pub minor: u32,
}

/// What a file is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Content {
    /// A directory and its entries by name.
    Directory(BTreeMap<Vec<u8>, NodeId>),
    /// A regular file; an empty one has no blob.
    Regular(Option<Blob>),
    /// A symbolic link to this path.
    Symlink(Vec<u8>),
    /// A named pipe.
    Fifo,
    /// A name of a unix socket.
    Socket,
    /// A character device.
    CharacterDevice(DeviceNumber),
    /// A block device.
    BlockDevice(DeviceNumber),
}

impl Content {
    /// An empty directory.
    pub fn directory() -> Self {
        Content::Directory(BTreeMap::new())
    }

    fn is_directory(&self) -> bool {
        matches!(self, Content::Directory(_))
    }

    /// Whether such a file may have an extended attribute of this name: others are not kept.
    pub fn may_have(&self, name: &[u8]) -> bool {
        is_kept(name, self.mode())
    }

    /// The file type of a mode, as far as extended attributes depend on it.
    fn mode(&self) -> u32 {
        match self {
            Content::Directory(_) => S_IFDIR,
            Content::Regular(_) => S_IFREG,
            _ => S_IFLNK,
        }
    }
}

/// One file with its attributes. Hard links are several names for one node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Node {
    /// What the file is.
    pub content: Content,
    /// Its attributes.
    pub attributes: Attributes,
}

impl Node {
    /// The same, but a directory without its entries.
    fn shallow(&self) -> Self {
        let content = match &self.content {
            Content::Directory(_) => Content::directory(),
            other => other.clone(),
        };
        Self { content, attributes: self.attributes }
    }
}

/// Number of a node in its tree.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct NodeId(pub(crate) u32);

/// A root file system being built. Starts as an empty root directory.
#[derive(Clone, Debug)]
pub struct Tree {
    /// Nodes that lost their last name stay here and are not written.
    nodes: Vec<Node>,
    /// The extended attributes of those nodes that have some.
    extended: BTreeMap<NodeId, Extended>,
    /// Bytes of them.
    extended_bytes: usize,
}

/// What most files have.
static NO_EXTENDED: Extended = Extended::new();

impl Default for Tree {
    fn default() -> Self {
        Self::new()
    }
}

impl Tree {
    /// The root directory.
    pub const ROOT: NodeId = NodeId(0);

    /// A tree with nothing but the root directory, mode 0755.
    pub fn new() -> Self {
        let root = Node { content: Content::directory(), attributes: Attributes::root(0o755) };
        Self { nodes: vec![root], extended: BTreeMap::new(), extended_bytes: 0 }
    }

    /// The node with this number.
    pub fn node(&self, id: NodeId) -> &Node {
        &self.nodes[id.0 as usize]
    }

    /// Attributes of a node, to be changed.
    pub fn attributes_mut(&mut self, id: NodeId) -> &mut Attributes {
        &mut self.nodes[id.0 as usize].attributes
    }

    /// The extended attributes of a node.
    pub fn extended(&self, id: NodeId) -> &Extended {
        self.extended.get(&id).unwrap_or(&NO_EXTENDED)
    }

    /// Those of all nodes that have some.
    pub(crate) fn all_extended(&self) -> impl Iterator<Item = (NodeId, &Extended)> {
        self.extended.iter().map(|(&id, extended)| (id, extended))
    }

    /// Gives a node other extended attributes.
    ///
    /// # Errors
    /// [`TreeError::Extended`]: it cannot have them, or all nodes have too many.
    pub fn set_extended(&mut self, id: NodeId, extended: Extended) -> Result<(), TreeError> {
        let content = &self.node(id).content;
        if let Some((name, _)) = extended.iter().find(|(name, _)| !content.may_have(name)) {
            return Err(ExtendedError::NotKept(shown(name)).into());
        }
        let others = self.extended_bytes - self.extended(id).bytes();
        let bytes = others + extended.bytes();
        if bytes > INDEX_MAX {
            return Err(ExtendedError::Index.into());
        }
        self.extended_bytes = bytes;
        match extended.is_empty() {
            true => self.extended.remove(&id),
            false => self.extended.insert(id, extended),
        };
        Ok(())
    }

    /// Number of nodes ever added, an upper bound of the inodes written.
    pub(crate) fn capacity(&self) -> usize {
        self.nodes.len()
    }

    /// The entry `name` of a directory.
    pub fn lookup(&self, directory: NodeId, name: &[u8]) -> Option<NodeId> {
        match &self.node(directory).content {
            Content::Directory(entries) => entries.get(name).copied(),
            _ => None,
        }
    }

    /// How many files and directories were ever added.
    pub fn nodes(&self) -> usize {
        self.nodes.len()
    }

    /// Directories that the deepest file lies in, the root among them.
    pub fn depth(&self) -> usize {
        let mut deepest = 0;
        let mut ahead = vec![(Self::ROOT, 1)];
        while let Some((directory, depth)) = ahead.pop() {
            deepest = deepest.max(depth);
            if let Content::Directory(entries) = &self.node(directory).content {
                let inside = entries.values().filter(|&&id| self.node(id).content.is_directory());
                ahead.extend(inside.map(|&id| (id, depth + 1)));
            }
        }
        deepest
    }

    /// Adds a file under a new name. A directory merges with one that is there:
    /// it takes the new attributes, has no extended ones, and keeps its entries.
    /// Anything else replaces what is there, unless that is a directory. Returns the
    /// file's number.
    pub fn add(&mut self, directory: NodeId, name: &[u8], node: Node) -> Result<NodeId, TreeError> {
        check_name(name)?;
        check_content(&node.content)?;
        match self.lookup(directory, name) {
            Some(old) if self.node(old).content.is_directory() => {
                if !node.content.is_directory() {
                    return Err(TreeError::Occupied(display(name)));
                }
                self.nodes[old.0 as usize].attributes = node.attributes;
                self.set_extended(old, Extended::default())?;
                return Ok(old);
            }
            Some(_) if node.content.is_directory() => {
                return Err(TreeError::Occupied(display(name)));
            }
            _ => {}
        }
        let number = u32::try_from(self.nodes.len()).map_err(|_| TreeError::TooMany("files"))?;
        self.nodes.push(node);
        self.insert(directory, name, NodeId(number))?;
        Ok(NodeId(number))
    }

    /// Gives a file a further name (a hard link).
    pub fn link(&mut self, directory: NodeId, name: &[u8], to: NodeId) -> Result<(), TreeError> {
        check_name(name)?;
        if self.node(to).content.is_directory() {
            return Err(TreeError::LinkedDirectory);
        }
        if let Some(old) = self.lookup(directory, name)
            && self.node(old).content.is_directory()
        {
            return Err(TreeError::Occupied(display(name)));
        }
        self.insert(directory, name, to)
    }

    /// Takes a name away from a directory, with everything below it; says
    /// whether it was there.
    pub fn remove(&mut self, directory: NodeId, name: &[u8]) -> bool {
        match &mut self.nodes[directory.0 as usize].content {
            Content::Directory(entries) => entries.remove(name).is_some(),
            _ => false,
        }
    }

    fn insert(&mut self, directory: NodeId, name: &[u8], node: NodeId) -> Result<(), TreeError> {
        match &mut self.nodes[directory.0 as usize].content {
            Content::Directory(entries) => {
                entries.insert(name.to_vec(), node);
                Ok(())
            }
            _ => Err(TreeError::NotADirectory(display(name))),
        }
    }

    /// Finds a file by path from the root, following symbolic links inside the
    /// tree but not in the last component.
    pub fn find(&self, path: &Path) -> Option<NodeId> {
        let name = match path.components().next_back() {
            Some(Component::Normal(name)) => name,
            Some(Component::ParentDir) => return self.find_directory(path),
            _ => return Some(Self::ROOT),
        };
        let directory = self.find_directory(path.parent()?)?;
        self.lookup(directory, name.as_bytes())
    }

    /// The same, following symbolic links in the last component, too.
    pub fn find_followed(&self, path: &Path) -> Option<NodeId> {
        let mut path = path.to_owned();
        for _ in 0..=MAX_LINKS {
            let found = self.find(&path)?;
            let Content::Symlink(target) = &self.node(found).content else { return Some(found) };
            // A target that begins at the root replaces the whole path.
            path = path.parent().unwrap_or(Path::new("/")).join(OsStr::from_bytes(target));
        }
        None
    }

    /// The directory at `path`, following symbolic links inside the tree.
    pub(crate) fn find_directory(&self, path: &Path) -> Option<NodeId> {
        let mut walk = Walk::new(path);
        while let Some(name) = walk.ahead.pop() {
            if !self.step(&mut walk, &name).ok()? {
                return None;
            }
        }
        Some(walk.here())
    }

    /// The directory at `path`, following symbolic links inside the tree. Those
    /// that are missing are made, mode 0755, owned by root.
    pub fn make_directories(&mut self, path: &Path) -> Result<NodeId, TreeError> {
        self.make_directories_within(path, usize::MAX)
    }

    /// The same, but none lies in more than `depth` others.
    pub fn make_directories_within(
        &mut self,
        path: &Path,
        depth: usize,
    ) -> Result<NodeId, TreeError> {
        let mut walk = Walk::new(path);
        while let Some(name) = walk.ahead.pop() {
            if self.step(&mut walk, &name)? {
                continue;
            }
            if walk.trail.len() > depth {
                return Err(TreeError::TooDeep(depth));
            }
            let attributes = Attributes::root(0o755);
            let node = Node { content: Content::directory(), attributes };
            let made = self.add(walk.here(), &name, node)?;
            walk.trail.push(made);
        }
        Ok(walk.here())
    }

    /// Adds a file at a path from the root, making the directories above it.
    pub fn add_at(&mut self, path: &Path, node: Node) -> Result<NodeId, TreeError> {
        let (directory, name) = self.make_parent(path)?;
        self.add(directory, &name, node).map_err(|error| with_path(error, path))
    }

    /// Copies what another tree has at a path, with everything below it and the directories
    /// above it, which take the attributes that they have there. Nothing if it has nothing
    /// there. Symbolic links are copied and not followed, and hard links become files.
    ///
    /// # Errors
    /// Something of another kind is there.
    pub fn copy_below(&mut self, from: &Tree, path: &Path) -> Result<(), TreeError> {
        let (mut here, mut there) = (Self::ROOT, Self::ROOT);
        for component in path.components() {
            let Component::Normal(name) = component else { continue };
            let Some(next) = from.lookup(there, name.as_bytes()) else { return Ok(()) };
            there = next;
            here = self.copy_node(from, there, here, name.as_bytes())?;
        }
        let mut ahead = vec![(there, here)];
        while let Some((there, here)) = ahead.pop() {
            let Content::Directory(entries) = &from.node(there).content else { continue };
            for (name, &child) in entries {
                let copy = self.copy_node(from, child, here, name)?;
                ahead.push((child, copy));
            }
        }
        Ok(())
    }

    /// Adds a node of another tree, without the entries of a directory.
    fn copy_node(
        &mut self,
        from: &Tree,
        id: NodeId,
        to: NodeId,
        name: &[u8],
    ) -> Result<NodeId, TreeError> {
        let copy = self.add(to, name, from.node(id).shallow())?;
        self.set_extended(copy, from.extended(id).clone())?;
        Ok(copy)
    }

    /// Makes the directories above `path`; returns the last of them and the
    /// path's last name.
    pub(crate) fn make_parent(&mut self, path: &Path) -> Result<(NodeId, Vec<u8>), TreeError> {
        let name = match path.components().next_back() {
            Some(Component::Normal(name)) => name.as_bytes().to_vec(),
            _ => return Err(TreeError::BadName(path.display().to_string())),
        };
        let directory = self.make_directories(path.parent().unwrap_or(Path::new("/")))?;
        Ok((directory, name))
    }

    /// Goes one component further; false: it is not there.
    fn step(&self, walk: &mut Walk<'_>, name: &[u8]) -> Result<bool, TreeError> {
        if name == b".." {
            if walk.trail.len() > 1 {
                walk.trail.pop();
            }
            return Ok(true);
        }
        let Some(next) = self.lookup(walk.here(), name) else { return Ok(false) };
        match &self.node(next).content {
            Content::Directory(_) => walk.trail.push(next),
            Content::Symlink(target) => {
                walk.links += 1;
                if walk.links > MAX_LINKS {
                    return Err(TreeError::TooManyLinks(walk.path.to_owned()));
                }
                if target.starts_with(b"/") {
                    walk.trail.truncate(1);
                }
                walk.ahead.extend(reversed_components(OsStr::from_bytes(target)));
            }
            _ => return Err(TreeError::NotADirectory(walk.path.to_owned())),
        }
        Ok(true)
    }
}

/// On the way to the directory at a path.
struct Walk<'a> {
    path: &'a Path,
    /// The directories that lead to where it is, the root first.
    trail: Vec<NodeId>,
    /// Components still to go, the next one last.
    ahead: Vec<Vec<u8>>,
    /// Symbolic links so far.
    links: usize,
}

impl<'a> Walk<'a> {
    fn new(path: &'a Path) -> Self {
        let ahead = reversed_components(path.as_os_str());
        Self { path, trail: vec![Tree::ROOT], ahead, links: 0 }
    }

    fn here(&self) -> NodeId {
        *self.trail.last().expect("the root is never popped")
    }
}

/// Components of a path without `.` and empty ones, last first.
fn reversed_components(path: &OsStr) -> Vec<Vec<u8>> {
    path.as_bytes()
        .split(|&byte| byte == b'/')
        .filter(|part| !part.is_empty() && *part != b".")
        .rev()
        .map(<[u8]>::to_vec)
        .collect()
}

fn check_name(name: &[u8]) -> Result<(), TreeError> {
    let bad = name.is_empty()
        || name.len() > 255
        || name == b"."
        || name == b".."
        || name.contains(&b'/')
        || name.contains(&0);
    if bad {
        return Err(TreeError::BadName(String::from_utf8_lossy(name).into_owned()));
    }
    Ok(())
}

fn check_content(content: &Content) -> Result<(), TreeError> {
    match content {
        Content::Symlink(target) if target.is_empty() || target.len() > 4095 => {
            Err(TreeError::BadTarget(target.len()))
        }
        Content::CharacterDevice(number) | Content::BlockDevice(number)
            if number.major >= 1 << 12 || number.minor >= 1 << 20 =>
        {
            Err(TreeError::DeviceNumber(number.major, number.minor))
        }
        _ => Ok(()),
    }
}

fn display(name: &[u8]) -> PathBuf {
    PathBuf::from(OsStr::from_bytes(name))
}

/// Replaces the bare name in an error by the whole path.
pub(crate) fn with_path(error: TreeError, path: &Path) -> TreeError {
    match error {
        TreeError::Occupied(_) => TreeError::Occupied(path.to_owned()),
        TreeError::NotADirectory(_) => TreeError::NotADirectory(path.to_owned()),
        other => other,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn symlink(target: &str) -> Node {
        let content = Content::Symlink(target.as_bytes().to_vec());
        Node { content, attributes: Attributes::root(0o777) }
    }

    fn file() -> Node {
        Node { content: Content::Regular(None), attributes: Attributes::root(0o644) }
    }

    #[test]
    fn paths_follow_links_inside_the_tree() {
        let mut tree = Tree::new();
        let usr_lib = tree.make_directories(Path::new("/usr/lib")).unwrap();
        tree.add_at(Path::new("/lib"), symlink("usr/lib")).unwrap();
        tree.add_at(Path::new("/usr/lib/back"), symlink("../../../lib")).unwrap();
        let added = tree.add_at(Path::new("/lib/back/x"), file()).unwrap();
        assert_eq!(tree.lookup(usr_lib, b"x"), Some(added));
        assert_eq!(tree.find(Path::new("/usr/lib/x")), Some(added));
        assert_eq!(tree.find(Path::new("/usr/lib/y")), None);
        assert_eq!(tree.find(Path::new("/")), Some(Tree::ROOT));
    }

    #[test]
    fn a_link_to_a_missing_directory_makes_it() {
        let mut tree = Tree::new();
        tree.add_at(Path::new("/a"), symlink("/b/c")).unwrap();
        let made = tree.make_directories(Path::new("/a/d")).unwrap();
        assert_eq!(tree.find(Path::new("/b/c/d")), Some(made));
    }

    #[test]
    fn link_loops_are_errors() {
        let mut tree = Tree::new();
        tree.add_at(Path::new("/a"), symlink("b")).unwrap();
        tree.add_at(Path::new("/b"), symlink("a")).unwrap();
        let error = tree.make_directories(Path::new("/a/c")).unwrap_err();
        assert!(matches!(error, TreeError::TooManyLinks(_)), "{error}");
    }

    #[test]
    fn kinds_do_not_replace_each_other() {
        let mut tree = Tree::new();
        tree.make_directories(Path::new("/d")).unwrap();
        tree.add_at(Path::new("/f"), file()).unwrap();
        assert!(matches!(tree.add_at(Path::new("/d"), file()), Err(TreeError::Occupied(_))));
        let directory = Node { content: Content::directory(), attributes: Attributes::root(0o700) };
        assert!(matches!(
            tree.add_at(Path::new("/f"), directory.clone()),
            Err(TreeError::Occupied(_))
        ));
        assert!(matches!(tree.add_at(Path::new("/f/g"), file()), Err(TreeError::NotADirectory(_))));
        let merged = tree.add_at(Path::new("/d"), directory).unwrap();
        assert_eq!(tree.node(merged).attributes.permissions, 0o700);
    }

    fn extended(attributes: &[(&str, &[u8])]) -> Extended {
        let mut all = Extended::default();
        for (name, value) in attributes {
            all.insert(name.as_bytes(), value).unwrap();
        }
        all
    }

    #[test]
    fn extended_attributes_are_copied_and_go_with_what_replaces_a_file() {
        let mut tree = Tree::new();
        let file_id = tree.add_at(Path::new("/d/f"), file()).unwrap();
        let directory = tree.find(Path::new("/d")).unwrap();
        tree.set_extended(file_id, extended(&[("user.a", b"1")])).unwrap();
        tree.set_extended(directory, extended(&[("user.b", b"2")])).unwrap();
        let mut copy = Tree::new();
        copy.copy_below(&tree, Path::new("/d")).unwrap();
        for path in ["/d", "/d/f"] {
            let of = |tree: &Tree| tree.extended(tree.find(Path::new(path)).unwrap()).clone();
            assert_eq!(of(&copy), of(&tree));
            assert!(!of(&copy).is_empty());
        }
        let merged = Node { content: Content::directory(), attributes: Attributes::root(0o700) };
        assert_eq!(tree.add_at(Path::new("/d"), merged), Ok(directory));
        let replaced = tree.add_at(Path::new("/d/f"), file()).unwrap();
        assert!(tree.extended(directory).is_empty() && tree.extended(replaced).is_empty());
    }

    #[test]
    fn a_tree_has_no_more_extended_attributes_than_an_index() {
        let mut tree = Tree::new();
        let link = tree.add_at(Path::new("/link"), symlink("f")).unwrap();
        let refused = tree.set_extended(link, extended(&[("user.a", b"")])).unwrap_err();
        assert!(matches!(refused, TreeError::Extended(ExtendedError::NotKept(_))), "{refused}");
        let large = vec![0; 65536 - 7];
        let names: Vec<_> = (10..26).map(|number| format!("user.{number}")).collect();
        let full = extended(&names.iter().map(|name| (&**name, &*large)).collect::<Vec<_>>());
        for number in 0..16 {
            let id = tree.add_at(Path::new(&format!("/f{number}")), file()).unwrap();
            tree.set_extended(id, full.clone()).unwrap();
            // Those that are replaced do not count.
            tree.set_extended(id, full.clone()).unwrap();
        }
        let last = tree.add_at(Path::new("/last"), file()).unwrap();
        let refused = tree.set_extended(last, extended(&[("user.a", b"")]));
        assert_eq!(refused, Err(TreeError::Extended(ExtendedError::Index)));
    }

    #[test]
    fn bad_names_are_refused() {
        let mut tree = Tree::new();
        for name in [&b""[..], b".", b"..", b"a/b", b"a\0b", &[b'x'; 256]] {
            assert!(matches!(tree.add(Tree::ROOT, name, file()), Err(TreeError::BadName(_))));
        }
    }
}
