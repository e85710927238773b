//! What occupies the disk, and who shares it.

mod common;

use std::fs;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::Path;

use common::empty_store;
use serde_json::json;
use thaw_store::index::{Attributes, Content, Node};
use thaw_store::{
    Domain, ImageId, IndexId, Name, NewCheckpoint, NewFunction, OtherUser, Removal, Session, Sizes,
    Store, StoreUsage, Tree, UserKind,
};

const KIB: u64 = 1 << 10;

fn name(text: &str) -> Name {
    Name::new(text).unwrap()
}

fn index_of(session: &mut Session, files: &[(u8, u64)]) -> IndexId {
    let mut tree = Tree::new();
    for &(letter, kib) in files {
        let content = vec![letter; (kib * KIB) as usize];
        let blob = session.put_blob(&content, &Domain::shared()).unwrap();
        let node = Node { content: Content::Regular(blob), attributes: Attributes::root(0o644) };
        tree.add_at(Path::new(&format!("/{letter}")), node).unwrap();
    }
    session.put_index(&tree).unwrap()
}

/// An image of which so much is there and the rest is a hole.
fn image_of(session: &mut Session, letter: u8, kib: u64, ancestors: &[ImageId]) -> ImageId {
    let image = session.new_image_file().unwrap();
    image.file().set_len(64 << 20).unwrap();
    image.file().write_all_at(&vec![letter; (kib * KIB) as usize], 1 << 20).unwrap();
    match ancestors {
        [] => session.commit_image(image).unwrap(),
        ancestors => session.commit_checkpoint_image(image, ancestors).unwrap(),
    }
}

fn put(store: &Store, function: &str, index: IndexId, image: ImageId) {
    let (name, config, image) = (name(function), json!({}), Some(image));
    store.session().unwrap().put_function(NewFunction { name, config, index, image }).unwrap();
}

fn sizes(usage: &StoreUsage, user: &str) -> Sizes {
    let found = usage.users().iter().position(|found| found.name.as_str() == user);
    usage.sizes(&[found.unwrap()])
}

/// Records, indexes and the first blocks of images take a few blocks each.
#[track_caller]
fn near(bytes: u64, kib: u64) {
    assert!((kib * KIB..(kib + 48) * KIB).contains(&bytes), "{bytes} bytes are not {kib} KiB");
}

/// Blocks of all regular files below a directory.
fn blocks(directory: &Path) -> u64 {
    let mut sum = 0;
    for entry in fs::read_dir(directory).unwrap() {
        let path = entry.unwrap().path();
        let metadata = fs::symlink_metadata(&path).unwrap();
        sum += if metadata.is_dir() { blocks(&path) } else { metadata.blocks() * 512 };
    }
    sum
}

#[test]
fn a_file_of_two_functions_is_shared_and_holes_are_free() {
    let (_directory, store) = empty_store();
    let mut session = store.session().unwrap();
    let both = (b'a', 1024);
    let one = index_of(&mut session, &[both, (b'b', 256)]);
    let two = index_of(&mut session, &[both, (b'c', 512)]);
    let images = [b'1', b'2'].map(|letter| image_of(&mut session, letter, 128, &[]));
    drop(session);
    put(&store, "one", one, images[0]);
    let alone = store.usage(&[]).unwrap();
    near(sizes(&alone, "one").own, 1024 + 256 + 128);
    assert_eq!(sizes(&alone, "one").shared, 0);
    put(&store, "two", two, images[1]);
    let usage = store.usage(&[]).unwrap();
    for (function, own) in [("one", 256 + 128), ("two", 512 + 128)] {
        let found = sizes(&usage, function);
        near(found.own, own);
        assert_eq!((found.shared, found.base), (1024 * KIB, 0), "{function}");
    }
    // Of both together nothing is anybody else's.
    let together = usage.sizes(&[0, 1]);
    assert_eq!(together.shared, 0);
    near(together.own, 1024 + 256 + 512 + 2 * 128);
    let reserve = fs::metadata(store.root().join("reserve")).unwrap().blocks() * 512;
    assert_eq!(together.own + reserve, usage.stored().total());
    assert!(usage.damaged().is_empty());
}

#[test]
fn what_is_own_is_what_removing_frees() {
    let (_directory, store) = empty_store();
    let mut session = store.session().unwrap();
    let one = index_of(&mut session, &[(b'a', 512), (b'b', 64)]);
    let newer = index_of(&mut session, &[(b'a', 512), (b'n', 96)]);
    let two = index_of(&mut session, &[(b'a', 512)]);
    let images = [b'1', b'2', b'3'].map(|letter| image_of(&mut session, letter, 32, &[]));
    drop(session);
    put(&store, "one", one, images[0]);
    put(&store, "one", newer, images[1]);
    put(&store, "two", two, images[2]);
    store.put_working_set(images[1], &[7; 9000]).unwrap();
    let before = store.usage(&[]).unwrap();
    let own = sizes(&before, "one").own;
    // The version before counts, and so does what lies beside an image.
    near(own, 64 + 96 + 2 * 32 + 12);
    assert_eq!(before.stored().unused, 0);
    let record = fs::metadata(store.root().join("functions/one/record.json")).unwrap().blocks();
    store.remove_function(&name("one")).unwrap();
    let garbage = store.usage(&[]).unwrap().stored();
    assert_eq!(garbage.unused, own - record * 512);
    let freed = store.gc(Removal::Remove).unwrap().bytes;
    assert_eq!(freed, garbage.unused);
    assert_eq!(store.usage(&[]).unwrap().stored().unused, 0);
}

#[test]
fn images_that_others_differ_from_are_their_base() {
    let (_directory, store) = empty_store();
    let mut session = store.session().unwrap();
    let index = index_of(&mut session, &[(b'a', 64)]);
    let root = image_of(&mut session, b'r', 2048, &[]);
    let child = image_of(&mut session, b'c', 128, &[root]);
    let grandchild = image_of(&mut session, b'g', 64, &[root, child]);
    put(&store, "f", index, root);
    for (checkpoint, image) in [("first", child), ("second", grandchild)] {
        let (name, config) = (name(checkpoint), json!({}));
        session.put_checkpoint(NewCheckpoint { name, owner: None, config, index, image }).unwrap();
    }
    drop(session);
    let usage = store.usage(&[]).unwrap();
    let base = |user: &str| usage.users().iter().find(|u| u.name.as_str() == user).unwrap().base;
    assert_eq!((base("f"), base("first"), base("second")), (None, Some(root), Some(child)));
    let kind = |user: &str| usage.users().iter().find(|u| u.name.as_str() == user).unwrap().kind;
    assert_eq!((kind("f"), kind("first")), (UserKind::Function, UserKind::Checkpoint));
    let (first, second) = (sizes(&usage, "first"), sizes(&usage, "second"));
    // The first one's image is a part of the second one's memory.
    near(first.own, 0);
    near(first.base, 2048);
    near(first.shared, 2048 + 128 + 64);
    near(second.own, 64);
    near(second.base, 2048 + 128);
    near(sizes(&usage, "f").shared, 2048 + 64);
}

#[test]
fn a_runtime_template_is_of_those_who_were_built_from_it() {
    let (_directory, store) = empty_store();
    let mut session = store.session().unwrap();
    let language = index_of(&mut session, &[(b'l', 512), (b't', 128)]);
    let template = image_of(&mut session, b't', 1024, &[]);
    session.put_template(&name("python3-1"), json!({}), language, template).unwrap();
    assert!(store.usage(&[]).unwrap().stored().unused > 1664 * KIB);
    // A function's index has the template's files of its own accord, or has others.
    let index = index_of(&mut session, &[(b'l', 512), (b'f', 64)]);
    let image = image_of(&mut session, b'f', 32, &[template]);
    drop(session);
    put(&store, "f", index, image);
    let usage = store.usage(&[]).unwrap();
    assert_eq!((usage.stored().unused, sizes(&usage, "f").shared), (0, 0));
    near(sizes(&usage, "f").own, 512 + 128 + 1024 + 64 + 32);
    near(blocks(store.root()), usage.stored().total() / KIB);
    let (own, record) = (sizes(&usage, "f").own, store.root().join("functions/f/record.json"));
    let record = fs::metadata(record).unwrap().blocks() * 512;
    store.remove_function(&name("f")).unwrap();
    assert_eq!(store.gc(Removal::Remove).unwrap().bytes, own - record);
}

#[test]
fn others_than_records_keep_files_too() {
    let (_directory, store) = empty_store();
    let mut session = store.session().unwrap();
    let index = index_of(&mut session, &[(b'a', 256)]);
    let image = image_of(&mut session, b'i', 128, &[]);
    drop(session);
    assert!(store.usage(&[]).unwrap().stored().unused > 384 * KIB);
    let asleep = OtherUser { name: name("f"), index, image: Some(image) };
    let usage = store.usage(&[asleep.clone(), asleep]).unwrap();
    assert_eq!(usage.stored().unused, 0);
    assert_eq!(usage.users().len(), 2);
    assert_eq!(usage.users()[0].kind, UserKind::Other);
    assert_eq!(usage.sizes(&[0]).own, 0);
    near(usage.sizes(&[0, 1]).own, 384);
}

#[test]
fn root_file_systems_kernels_and_unpublished_files_are_counted() {
    let (_directory, store) = empty_store();
    let mut session = store.session().unwrap();
    let index = index_of(&mut session, &[(b'a', 256)]);
    session.put_rootfs(&name("debian"), index).unwrap();
    let used = session.put_kernel(&[5; 40_000]).unwrap();
    let unused = session.put_kernel(&[6; 20_000]).unwrap();
    let mut image = session.new_image_file().unwrap();
    image.file().write_all_at(&[9; 4096], 0).unwrap();
    image.needs(used);
    let image = session.commit_image(image).unwrap();
    put(&store, "f", index, image);
    let half = session.new_image_file().unwrap();
    half.file().write_all_at(&[1; 65_536], 0).unwrap();
    let usage = store.usage(&[]).unwrap();
    let kernels: Vec<_> = usage.kernels().iter().map(|kernel| (kernel.id, kernel.images)).collect();
    let mut expected = [(used, 1), (unused, 0)];
    expected.sort();
    assert_eq!(kernels, expected);
    let stored = usage.stored();
    assert_eq!((stored.kernels, stored.unused), (40_960 + 20_480, 20_480));
    near(stored.unpublished, 64);
    assert_eq!(sizes(&usage, "debian").shared, sizes(&usage, "f").shared);
    near(sizes(&usage, "debian").shared, 256);
    // The lock and the version are the store's own, and a directory of sessions holds a mark.
    near(blocks(store.root()), stored.total() / KIB);
}

#[test]
fn what_is_damaged_is_named_and_hides_nobody() {
    let (_directory, store) = empty_store();
    let mut session = store.session().unwrap();
    let bad = index_of(&mut session, &[(b'a', 64)]);
    let good = index_of(&mut session, &[(b'b', 64)]);
    let image = image_of(&mut session, b'i', 32, &[]);
    drop(session);
    put(&store, "bad", bad, image);
    put(&store, "good", good, image);
    let path = store.root().join("indexes").join(bad.to_string());
    fs::remove_file(&path).unwrap();
    fs::write(&path, b"damaged").unwrap();
    fs::create_dir(store.root().join("functions/worse")).unwrap();
    fs::write(store.root().join("functions/worse/record.json"), b"{").unwrap();
    let usage = store.usage(&[]).unwrap();
    near(sizes(&usage, "good").own, 64);
    assert_eq!(usage.damaged().len(), 2, "{:?}", usage.damaged());
    assert!(usage.damaged().iter().any(|text| text.contains("worse")), "{:?}", usage.damaged());
}
