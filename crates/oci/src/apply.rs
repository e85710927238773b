//! A layer on top of a tree: its entries are added, and its whiteouts take away what lower layers
//! have (OCI image layer filesystem changeset).

use crate::error::{OciError, escaped};
use std::collections::HashSet;
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::{Component, Path};
use thaw_store::Tree;
use thaw_store::index::{Content, Extended, Node, NodeId, TreeError};

/// Takes away one name of the lower layers: `.wh.NAME`.
const WHITEOUT: &[u8] = b".wh.";
/// Takes away all that lower layers have in a directory.
const OPAQUE: &[u8] = b".wh..wh..opq";
/// Deepest directory that an entry may lie in: so many can be named by a path.
const DEPTH_MAX: usize = 2048;
/// Longest path of an entry (`PATH_MAX`, limits.h).
const PATH_MAX: usize = 4096;

/// What an entry is.
pub(crate) enum Kind {
    /// A file of its own, with its extended attributes.
    Node(Node, Extended),
    /// A further name of another file of the image.
    HardLink(Vec<u8>),
}

/// A layer that is being applied.
pub(crate) struct Layer<'a> {
    tree: &'a mut Tree,
    number: usize,
    /// Names that this layer has put there, which its whiteouts do not mean.
    own: HashSet<(NodeId, Vec<u8>)>,
}

impl<'a> Layer<'a> {
    /// Layer `number`, from 1, on top of `tree`.
    pub fn new(tree: &'a mut Tree, number: usize) -> Self {
        Self { tree, number, own: HashSet::new() }
    }

    /// Applies one entry with this name.
    ///
    /// # Errors
    /// The name leads out of the image, or does not fit to what is there.
    pub fn apply(&mut self, name: &[u8], kind: Kind) -> Result<(), OciError> {
        self.try_apply(name, kind).map_err(|reason| self.refuse(name, reason))
    }

    /// Why an entry cannot be applied.
    pub fn refuse(&self, name: &[u8], reason: impl ToString) -> OciError {
        let path = escaped(&name[..name.len().min(PATH_MAX)]);
        OciError::Entry { layer: self.number, path, reason: reason.to_string() }
    }

    fn try_apply(&mut self, name: &[u8], kind: Kind) -> Result<(), Refusal> {
        let path = checked(name)?;
        let Some(last) = path.file_name().map(OsStr::as_bytes) else {
            return self.root(kind);
        };
        let directory = self.directory(path.parent().unwrap_or(Path::new("")))?;
        if last == OPAQUE {
            self.clear(directory);
            return Ok(());
        }
        if let Some(hidden) = last.strip_prefix(WHITEOUT) {
            self.white_out(directory, hidden);
            return Ok(());
        }
        match kind {
            Kind::Node(node, extended) => {
                self.make_room(directory, last, matches!(node.content, Content::Directory(_)));
                let added = self.tree.add(directory, last, node)?;
                self.tree.set_extended(added, extended)?;
            }
            Kind::HardLink(target) => {
                let target = checked(&target)?;
                let to = self.tree.find(&target).ok_or(Refusal::NoTarget)?;
                if self.tree.lookup(directory, last) != Some(to) {
                    self.make_room(directory, last, false);
                    self.tree.link(directory, last, to)?;
                }
            }
        }
        self.own.insert((directory, last.to_vec()));
        Ok(())
    }

    /// Files and directories of the tree so far.
    pub fn nodes(&self) -> u64 {
        self.tree.nodes() as u64
    }

    /// The directory of an entry, whose whole path is this layer's own from now on.
    fn directory(&mut self, path: &Path) -> Result<NodeId, Refusal> {
        let directory = self.tree.make_directories_within(path, DEPTH_MAX)?;
        let mut here = Tree::ROOT;
        for name in path.components().map(|part| part.as_os_str().as_bytes()) {
            // Behind a link it is somewhere else, which no whiteout on this path means.
            let Some(next) = self.tree.lookup(here, name) else { break };
            self.own.insert((here, name.to_vec()));
            here = next;
        }
        Ok(directory)
    }

    /// The root itself has attributes only.
    fn root(&mut self, kind: Kind) -> Result<(), Refusal> {
        match kind {
            Kind::Node(Node { content: Content::Directory(_), attributes }, extended) => {
                *self.tree.attributes_mut(Tree::ROOT) = attributes;
                Ok(self.tree.set_extended(Tree::ROOT, extended)?)
            }
            _ => Err(Refusal::Root),
        }
    }

    /// Directories become one; anything else replaces what is there.
    fn make_room(&mut self, directory: NodeId, name: &[u8], for_directory: bool) {
        let is_directory = |id| matches!(self.tree.node(id).content, Content::Directory(_));
        let old = self.tree.lookup(directory, name).map(is_directory);
        if old.is_some_and(|is_directory| is_directory != for_directory) {
            self.tree.remove(directory, name);
        }
    }

    /// Takes a name away as far as lower layers have it.
    fn white_out(&mut self, directory: NodeId, name: &[u8]) {
        let Some(id) = self.tree.lookup(directory, name) else { return };
        if !self.own.contains(&(directory, name.to_vec())) {
            self.tree.remove(directory, name);
        } else if matches!(self.tree.node(id).content, Content::Directory(_)) {
            self.clear(id);
        }
    }

    /// Takes away all below a directory that is not this layer's own.
    fn clear(&mut self, directory: NodeId) {
        let mut directories = vec![directory];
        while let Some(directory) = directories.pop() {
            let Content::Directory(entries) = &self.tree.node(directory).content else { continue };
            let entries: Vec<_> = entries.iter().map(|(name, &id)| (name.clone(), id)).collect();
            for (name, id) in entries {
                if self.own.contains(&(directory, name.clone())) {
                    directories.push(id);
                } else {
                    self.tree.remove(directory, &name);
                }
            }
        }
    }
}

/// Why an entry is not applied.
#[derive(Debug, thiserror::Error)]
enum Refusal {
    #[error("its path leads out of the image; make the image anew")]
    LeadsOut,
    #[error("its path is longer than {PATH_MAX} bytes; shorten it")]
    TooLong,
    #[error("it is a further name of a file that is not there; make the image anew")]
    NoTarget,
    #[error("the root is a directory and nothing else; make the image anew")]
    Root,
    #[error(transparent)]
    Tree(#[from] TreeError),
}

/// A path without what means the root or the directory itself.
fn checked(name: &[u8]) -> Result<std::path::PathBuf, Refusal> {
    if name.len() > PATH_MAX {
        return Err(Refusal::TooLong);
    }
    let mut path = std::path::PathBuf::new();
    for component in Path::new(OsStr::from_bytes(name)).components() {
        match component {
            Component::Normal(part) => path.push(part),
            Component::RootDir | Component::CurDir => {}
            Component::ParentDir | Component::Prefix(_) => return Err(Refusal::LeadsOut),
        }
    }
    Ok(path)
}

#[cfg(test)]
mod tests {
    use super::*;
    use thaw_store::index::Attributes;

    fn file(permissions: u32) -> Kind {
        let attributes = Attributes::root(permissions);
        Kind::Node(Node { content: Content::Regular(None), attributes }, Extended::default())
    }

    fn dir() -> Kind {
        let attributes = Attributes::root(0o755);
        Kind::Node(Node { content: Content::directory(), attributes }, Extended::default())
    }

    fn link(target: &str) -> Kind {
        let content = Content::Symlink(target.as_bytes().to_vec());
        let node = Node { content, attributes: Attributes::root(0o777) };
        Kind::Node(node, Extended::default())
    }

    fn layer(tree: &mut Tree, entries: Vec<(&str, Kind)>) {
        let mut layer = Layer::new(tree, 1);
        for (name, kind) in entries {
            layer.apply(name.as_bytes(), kind).unwrap();
        }
    }

    fn has(tree: &Tree, path: &str) -> bool {
        tree.find(Path::new(path)).is_some()
    }

    #[test]
    fn whiteouts_mean_lower_layers() {
        let mut tree = Tree::new();
        layer(
            &mut tree,
            vec![
                ("a/x", file(1)),
                ("a/y", file(1)),
                ("b/x", file(1)),
                ("c", file(1)),
                ("e/old", file(1)),
                ("e/sub/old", file(1)),
                ("g/old", file(1)),
            ],
        );
        layer(
            &mut tree,
            vec![
                ("./a/.wh.x", file(0)),
                ("b/new", file(2)),
                ("b/.wh..wh..opq", file(0)),
                ("c", file(2)),
                (".wh.c", file(0)),
                (".wh.never", file(0)),
                ("e/sub/new", file(2)),
                ("e/.wh..wh..opq", file(0)),
                ("g/new", file(2)),
                (".wh.g", file(0)),
            ],
        );
        assert!(!has(&tree, "/a/x") && has(&tree, "/a/y"));
        assert!(!has(&tree, "/b/x") && has(&tree, "/b/new"));
        assert!(has(&tree, "/e/sub/new") && !has(&tree, "/e/sub/old") && !has(&tree, "/e/old"));
        assert!(has(&tree, "/g/new") && !has(&tree, "/g/old"));
        let c = tree.find(Path::new("/c")).expect("that of the second layer");
        assert_eq!(tree.node(c).attributes.permissions, 2);
    }

    #[test]
    fn a_directory_that_is_made_anew_has_nothing_of_the_old_one() {
        let mut tree = Tree::new();
        layer(&mut tree, vec![("d/old", file(1)), ("d/sub/old", file(1))]);
        layer(
            &mut tree,
            vec![("d", dir()), ("d/sub", dir()), ("d/sub/new", file(1)), (".wh.d", file(0))],
        );
        assert!(has(&tree, "/d/sub/new") && !has(&tree, "/d/old") && !has(&tree, "/d/sub/old"));
    }

    #[test]
    fn kinds_replace_each_other() {
        let mut tree = Tree::new();
        layer(&mut tree, vec![("x/in", file(1)), ("y", file(1)), ("lib", link("usr/lib"))]);
        layer(&mut tree, vec![("x", file(1)), ("y/in", dir())].into_iter().take(1).collect());
        layer(&mut tree, vec![("y", dir()), ("y/in", file(1)), ("lib/z", file(1))]);
        assert!(!has(&tree, "/x/in") && has(&tree, "/x") && has(&tree, "/y/in"));
        assert!(has(&tree, "/usr/lib/z"));
        layer(&mut tree, vec![("lib", dir())]);
        assert!(!has(&tree, "/lib/z") && has(&tree, "/usr/lib/z"));
    }

    #[test]
    fn links_stay_inside() {
        let mut tree = Tree::new();
        layer(&mut tree, vec![("up", link("../../../..")), ("up/etc/x", file(1)), ("f", file(1))]);
        assert!(has(&tree, "/etc/x"));
        layer(&mut tree, vec![("g", Kind::HardLink(b"/f".to_vec()))]);
        assert_eq!(tree.find(Path::new("/g")), tree.find(Path::new("/f")));
        let mut refused = |name: &[u8], kind| {
            Layer::new(&mut tree, 7).apply(name, kind).expect_err("a refusal").to_string()
        };
        assert!(refused(b"../x", file(1)).contains("layer 7"));
        assert!(refused(b"a/../../x", file(1)).contains("leads out"));
        assert!(refused(b"h", Kind::HardLink(b"../f".to_vec())).contains("leads out"));
        assert!(refused(b"h", Kind::HardLink(b"none".to_vec())).contains("not there"));
        assert!(refused(b"h", Kind::HardLink(b"etc".to_vec())).contains("second name"));
        assert!(refused(b"/", file(1)).contains("root"));
        assert!(refused(&[b'a'; 5000], file(1)).contains("longer"));
        assert!(refused(b"\x1b[2J/..", file(1)).contains("\\x1b"));
        layer(&mut tree, vec![("a", link("b")), ("b", link("a"))]);
        let mut layer = Layer::new(&mut tree, 1);
        assert!(layer.apply(b"a/x", file(1)).is_err());
    }
}
