//! Trees survive being written as an index.

mod common;

use std::collections::{BTreeMap, HashMap};
use std::ffi::OsStr;
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use common::{Description, describe_index, empty_store};
use proptest::collection::vec;
use proptest::prelude::*;
use thaw_abi::rootfs::Index;
use thaw_store::index::{
    Attributes, Content, DeviceNumber, Extended, Node, NodeId, Timestamp, check_structure,
};
use thaw_store::{BlobHash, Domain, Kind, Session, StoreError, Tree};

/// One step of building a tree.
#[derive(Clone, Debug)]
enum Step {
    Directory,
    File(Vec<u8>),
    Symlink(Vec<u8>),
    Device(DeviceNumber),
    Fifo,
    /// A further name for one of the files so far.
    HardLink(usize),
    Remove,
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        3 => Just(Step::Directory),
        4 => vec(any::<u8>(), 0..40).prop_map(Step::File),
        2 => vec(1..=255u8, 1..30).prop_map(Step::Symlink),
        1 => (0..4096u32, 0..1u32 << 20)
            .prop_map(|(major, minor)| Step::Device(DeviceNumber { major, minor })),
        1 => Just(Step::Fifo),
        2 => any::<usize>().prop_map(Step::HardLink),
        1 => Just(Step::Remove),
    ]
}

fn name() -> impl Strategy<Value = Vec<u8>> {
    let byte = prop_oneof![Just(b'a'), Just(b'b'), Just(0xff), 1..=255u8];
    vec(byte, 1..6).prop_filter("cannot be a name", |name| {
        !name.contains(&b'/') && name != b"." && name != b".."
    })
}

fn attributes() -> impl Strategy<Value = Attributes> {
    (0..0o10000u32, any::<u32>(), any::<u32>(), any::<i64>(), 0..1_000_000_000u32).prop_map(
        |(permissions, uid, gid, seconds, nanoseconds)| Attributes {
            permissions,
            uid,
            gid,
            modified: Timestamp { seconds, nanoseconds },
        },
    )
}

/// Extended attributes of a file: mostly none.
fn extended() -> impl Strategy<Value = Extended> {
    let name = vec(1..=255u8, 1..4).prop_map(|rest| [b"user.", &rest[..]].concat());
    let all = vec((name, vec(any::<u8>(), 0..20)), 0..4).prop_map(|all| {
        let mut extended = Extended::default();
        for (name, value) in all {
            extended.insert(&name, &value).unwrap();
        }
        extended
    });
    prop_oneof![3 => Just(Extended::default()), 1 => all]
}

/// The extended attributes of each path, found by walking the tree.
fn all_extended(tree: &Tree) -> BTreeMap<PathBuf, Extended> {
    let mut found = BTreeMap::new();
    let mut ahead = vec![(PathBuf::new(), Tree::ROOT)];
    while let Some((path, id)) = ahead.pop() {
        found.insert(path.clone(), tree.extended(id).clone());
        if let Content::Directory(entries) = &tree.node(id).content {
            let below = entries.iter();
            ahead.extend(below.map(|(name, &id)| (path.join(OsStr::from_bytes(name)), id)));
        }
    }
    found
}

/// The same, found by walking the index.
fn all_extended_of(index: &Index<'_>) -> BTreeMap<PathBuf, Extended> {
    let mut found = BTreeMap::new();
    let mut ahead = vec![(PathBuf::new(), 0)];
    while let Some((path, number)) = ahead.pop() {
        let mut extended = Extended::default();
        for attribute in index.extended(number) {
            let value = index.extended_value(attribute);
            extended.insert(index.extended_name(attribute), value).unwrap();
        }
        found.insert(path.clone(), extended);
        for entry in index.entries(index.inode(number).unwrap()) {
            ahead.push((path.join(OsStr::from_bytes(index.name(entry))), entry.inode));
        }
    }
    found
}

/// Builds a tree from random steps, each in one of the directories so far.
fn build(
    session: &mut Session,
    steps: Vec<(usize, Vec<u8>, Attributes, Extended, Step)>,
) -> (Tree, HashMap<BlobHash, Vec<u8>>) {
    let mut tree = Tree::new();
    let mut contents = HashMap::new();
    let mut directories = vec![Tree::ROOT];
    let mut files: Vec<NodeId> = Vec::new();
    for (place, name, attributes, extended, step) in steps {
        let directory = directories[place % directories.len()];
        let content = match step {
            Step::Directory => Content::directory(),
            Step::Symlink(target) => Content::Symlink(target),
            Step::Device(number) if place % 2 == 0 => Content::CharacterDevice(number),
            Step::Device(number) => Content::BlockDevice(number),
            Step::Fifo => Content::Fifo,
            Step::File(bytes) => {
                let blob = session.put_blob(&bytes, &Domain::shared()).unwrap();
                contents.extend(blob.map(|blob| (blob.hash, bytes)));
                Content::Regular(blob)
            }
            Step::HardLink(which) => {
                if !files.is_empty() {
                    // Refused where a directory has the name; that is fine here.
                    let _ = tree.link(directory, &name, files[which % files.len()]);
                }
                continue;
            }
            Step::Remove => {
                tree.remove(directory, &name);
                continue;
            }
        };
        let is_directory = matches!(content, Content::Directory(_));
        let Ok(id) = tree.add(directory, &name, Node { content, attributes }) else { continue };
        // Links and devices cannot have them.
        let _ = tree.set_extended(id, extended);
        if is_directory { directories.push(id) } else { files.push(id) }
    }
    (tree, contents)
}

/// What the tree holds, found by walking it and not through the index.
fn describe(tree: &Tree, contents: &HashMap<BlobHash, Vec<u8>>) -> BTreeMap<PathBuf, Description> {
    let mut names = vec![(PathBuf::new(), Tree::ROOT)];
    let mut at = 0;
    while let Some((path, id)) = names.get(at).cloned() {
        if let Content::Directory(entries) = &tree.node(id).content {
            for (name, &child) in entries {
                names.push((path.join(OsStr::from_bytes(name)), child));
            }
        }
        at += 1;
    }
    let mut links: HashMap<NodeId, u64> = HashMap::new();
    for (_, id) in &names {
        *links.entry(*id).or_default() += 1;
    }
    let describe_one = |id: NodeId| {
        let node = tree.node(id);
        let device = |number: DeviceNumber| rustix::fs::makedev(number.major, number.minor);
        let (kind, content, device) = match &node.content {
            Content::Directory(_) => (0o04, Vec::new(), 0),
            Content::Regular(None) => (0o10, Vec::new(), 0),
            Content::Regular(Some(blob)) => (0o10, contents[&blob.hash].clone(), 0),
            Content::Symlink(target) => (0o12, target.clone(), 0),
            Content::Fifo => (0o01, Vec::new(), 0),
            Content::Socket => (0o14, Vec::new(), 0),
            Content::CharacterDevice(number) => (0o02, Vec::new(), device(*number)),
            Content::BlockDevice(number) => (0o06, Vec::new(), device(*number)),
        };
        let attributes = node.attributes;
        Description {
            mode: kind << 12 | attributes.permissions,
            owner: (attributes.uid, attributes.gid),
            links: if kind == 0o04 { 0 } else { links[&id] },
            modified: (attributes.modified.seconds, attributes.modified.nanoseconds.into()),
            content,
            device,
        }
    };
    names.iter().map(|(path, id)| (path.clone(), describe_one(*id))).collect()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, failure_persistence: None, ..Default::default() })]

    #[test]
    fn any_tree_survives(
        steps in vec((any::<usize>(), name(), attributes(), extended(), step()), 0..120),
    ) {
        let (_directory, store) = empty_store();
        let mut session = store.session().unwrap();
        let (tree, contents) = build(&mut session, steps);
        let id = session.put_index(&tree).unwrap();
        let open = store.open_index(id).unwrap();
        prop_assert_eq!(check_structure(&open.index()), Ok(()));
        prop_assert_eq!(describe_index(&store, &open), describe(&tree, &contents));
        // Found by binary search, as the kernel does.
        let index = open.index();
        for directory in index.inodes() {
            for entry in index.entries(directory) {
                let found = index.lookup(directory, index.name(entry)).unwrap();
                prop_assert_eq!(found.inode, entry.inode);
            }
        }
        prop_assert_eq!(all_extended_of(&index), all_extended(&tree));
        // The same tree has the same name.
        prop_assert_eq!(session.put_index(&tree).unwrap(), id);
    }

    #[test]
    fn any_flipped_bit_is_noticed(position in any::<usize>(), bit in 0..8u32) {
        let (_directory, store) = empty_store();
        let mut session = store.session().unwrap();
        let mut tree = Tree::new();
        tree.make_directories(Path::new("/usr/lib")).unwrap();
        let id = session.put_index(&tree).unwrap();
        let path = store.root().join("indexes").join(id.to_string());
        let mut bytes = fs::read(&path).unwrap();
        let position = position % bytes.len();
        bytes[position] ^= 1 << bit;
        fs::remove_file(&path).unwrap();
        fs::write(&path, bytes).unwrap();
        let error = store.open_index(id).unwrap_err();
        prop_assert!(matches!(error, StoreError::Damaged { kind: Kind::Index, .. }), "{}", error);
        // Storing it again heals it.
        prop_assert_eq!(session.put_index(&tree).unwrap(), id);
        prop_assert!(store.open_index(id).is_ok());
    }
}

#[test]
fn an_index_without_extended_attributes_is_as_it_always_was() {
    let mut tree = Tree::new();
    let node = Node { content: Content::Regular(None), attributes: Attributes::root(0o644) };
    let id = tree.add_at(Path::new("/etc/passwd"), node).unwrap();
    // Written before there was a second version.
    let first = "5983";
    let name = || blake3::hash(&tree.to_index().unwrap()).to_hex().to_string();
    assert_eq!(name()[..4], *first);
    let version = |tree: &Tree| tree.to_index().unwrap()[8];
    assert_eq!(version(&tree), 1);
    let mut extended = Extended::default();
    extended.insert(b"user.a", b"1").unwrap();
    let mut with = tree.clone();
    with.set_extended(id, extended).unwrap();
    assert_eq!(version(&with), 2);
    with.set_extended(id, Extended::default()).unwrap();
    assert_eq!(with.to_index(), tree.to_index());
}

#[test]
fn links_are_followed_to_the_file_that_they_mean() {
    let mut tree = Tree::new();
    let node = |content| Node { content, attributes: Attributes::root(0o644) };
    let link = |target: &str| node(Content::Symlink(target.as_bytes().to_vec()));
    let file = tree.add_at(Path::new("/usr/lib/passwd"), node(Content::Regular(None))).unwrap();
    for (name, target) in [
        ("/etc/absolute", "/usr/lib/passwd"),
        ("/etc/relative", "../usr/lib/passwd"),
        ("/etc/twice", "absolute"),
        ("/etc/outside", "../../../../usr/lib/passwd"),
        ("/lib", "usr/lib"),
        ("/etc/ring", "ring"),
        ("/etc/nowhere", "/usr/lib/none"),
    ] {
        tree.add_at(Path::new(name), link(target)).unwrap();
    }
    for name in [
        "usr/lib/passwd",
        "etc/absolute",
        "etc/relative",
        "/etc/twice",
        "etc/outside",
        "lib/passwd",
    ] {
        assert_eq!(tree.find_followed(Path::new(name)), Some(file), "{name}");
    }
    for name in ["etc/ring", "etc/nowhere", "none"] {
        assert_eq!(tree.find_followed(Path::new(name)), None, "{name}");
    }
}
