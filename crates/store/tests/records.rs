//! Functions, named root file systems, images, working sets and the collector.

mod common;

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::Path;
use std::time::Duration;

use common::empty_store;
use serde_json::json;
use thaw_store::index::{Attributes, Content, Node};
use thaw_store::{
    Activation, Domain, Footprint, FunctionRecord, ImageId, IndexId, Kept, Kind, Name,
    NewCheckpoint, NewFunction, PREFETCH_HEAD, PREFETCH_MAX, Removal, Repair, Session, Store,
    StoreError, Tree, parse_label,
};

fn index_of(session: &mut Session, text: &str) -> IndexId {
    let blob = session.put_blob(text.as_bytes(), &Domain::shared()).unwrap();
    let mut tree = Tree::new();
    let node = Node { content: Content::Regular(blob), attributes: Attributes::root(0o644) };
    tree.add_at(Path::new("/file"), node).unwrap();
    session.put_index(&tree).unwrap()
}

fn image_of(session: &mut Session, text: &str) -> ImageId {
    let image = session.new_image_file().unwrap();
    image.file().set_len(64 << 20).unwrap();
    image.file().write_all_at(text.as_bytes(), 32 << 20).unwrap();
    session.commit_image(image).unwrap()
}

fn name(text: &str) -> Name {
    Name::new(text).unwrap()
}

fn put(store: &Store, function: &str, content: &str) -> (IndexId, ImageId) {
    let mut session = store.session().unwrap();
    let index = index_of(&mut session, content);
    let image = image_of(&mut session, content);
    let config = json!({ "port": 8000 });
    session
        .put_function(NewFunction { name: name(function), config, index, image: Some(image) })
        .unwrap();
    (index, image)
}

fn damaged(store: &Store) -> Vec<(Kind, String)> {
    let report = store.verify(Repair::Report, &mut |_| {}).unwrap();
    report.problems.into_iter().map(|problem| (problem.kind, problem.name)).collect()
}

/// Changes one byte of a file that nobody may write to.
fn flip(path: &Path, position: u64) {
    let file = fs::File::options().read(true).write(true).open(path);
    let file = file.unwrap_or_else(|_| {
        let mut permissions = fs::metadata(path).unwrap().permissions();
        #[allow(clippy::permissions_set_readonly_false)]
        permissions.set_readonly(false);
        fs::set_permissions(path, permissions).unwrap();
        fs::File::options().read(true).write(true).open(path).unwrap()
    });
    let mut byte = [0];
    file.read_exact_at(&mut byte, position).unwrap();
    file.write_all_at(&[byte[0] ^ 1], position).unwrap();
}

#[test]
fn functions_come_and_go() {
    let (_directory, store) = empty_store();
    assert!(store.get_function(&name("f")).unwrap_err().is_not_found());
    let first = put(&store, "f", "one");
    let record = store.get_function(&name("f")).unwrap();
    assert_eq!((record.index, record.image.unwrap()), first);
    assert_eq!(record.config, json!({ "port": 8000 }));
    assert_eq!((record.number, record.others.len()), (1, 0));
    let second = put(&store, "f", "two");
    let record = store.get_function(&name("f")).unwrap();
    assert_eq!((record.index, record.image.unwrap()), second);
    assert_eq!((record.number, record.before()), (2, Some(1)));
    let before = &record.others[0];
    assert_eq!((before.number, before.index, before.image.unwrap()), (1, first.0, first.1));
    put(&store, "g", "one");
    let listed = store.list_functions().unwrap();
    assert!(listed.damaged.is_empty());
    let names: Vec<&str> = listed.records.iter().map(|record| record.name.as_str()).collect();
    assert_eq!(names, ["f", "g"]);
    store.remove_function(&name("f")).unwrap();
    assert!(store.remove_function(&name("f")).unwrap_err().is_not_found());
    assert_eq!(store.list_functions().unwrap().records.len(), 1);
}

#[test]
fn a_function_must_refer_to_what_is_there() {
    let (_directory, store) = empty_store();
    let mut session = store.session().unwrap();
    let index = index_of(&mut session, "x");
    let missing =
        NewFunction { name: name("f"), config: json!({}), index: IndexId([1; 32]), image: None };
    assert!(session.put_function(missing.clone()).unwrap_err().is_not_found());
    let image = Some(ImageId([1; 32]));
    assert!(
        session.put_function(NewFunction { index, image, ..missing }).unwrap_err().is_not_found()
    );
    assert!(store.list_functions().unwrap().records.is_empty());
}

#[test]
fn images_stay_sparse_and_keep_their_name() {
    let (_directory, store) = empty_store();
    let (_, id) = put(&store, "f", "content");
    let images = store.list_images().unwrap();
    assert_eq!((images.len(), images[0].id, images[0].len), (1, id, 64 << 20));
    assert!(images[0].allocated < 1 << 20, "{images:?}");
    let file = store.open_image(id).unwrap();
    let mut content = [0; 7];
    file.read_exact_at(&mut content, 32 << 20).unwrap();
    assert_eq!(&content, b"content");
    assert_eq!(file.metadata().unwrap().mode() & 0o7777, 0o444);
    // The same image again is the same file.
    let inode = file.metadata().unwrap().ino();
    let mut session = store.session().unwrap();
    assert_eq!(image_of(&mut session, "content"), id);
    assert_eq!(store.open_image(id).unwrap().metadata().unwrap().ino(), inode);
}

#[test]
fn working_sets_are_optional_and_checked() {
    let (_directory, store) = empty_store();
    let (_, id) = put(&store, "f", "content");
    assert_eq!(store.working_set(id).unwrap(), None);
    store.put_working_set(id, b"pages").unwrap();
    store.put_working_set(id, b"other pages").unwrap();
    assert_eq!(store.working_set(id).unwrap().unwrap(), b"other pages");
    assert!(store.list_images().unwrap()[0].working_set_len > 11);
    let path = store.root().join("images").join(format!("{id}.workingset"));
    for position in [0, 9, 20, 60] {
        flip(&path, position);
        let error = store.working_set(id).unwrap_err();
        assert!(matches!(error, StoreError::Damaged { kind: Kind::WorkingSet, .. }), "{error}");
        flip(&path, position);
        assert!(store.working_set(id).is_ok());
    }
    assert!(store.remove_working_set(id).unwrap());
    assert!(!store.remove_working_set(id).unwrap());
    assert!(store.put_working_set(ImageId([9; 32]), b"x").unwrap_err().is_not_found());
}

/// Writes two pages of this byte.
fn two_pages(byte: u8) -> impl FnOnce(&std::fs::File) -> std::io::Result<u64> {
    use std::os::unix::fs::FileExt;
    move |file| file.write_all_at(&[byte; 8192], PREFETCH_HEAD).map(|()| 8192)
}

#[test]
fn prefetch_files_are_optional_and_checked() {
    let (_directory, store) = empty_store();
    let (_, id) = put(&store, "f", "content");
    assert!(store.open_prefetch(id).unwrap().is_none());
    store.put_prefetch(id, [1; 32], two_pages(1)).unwrap();
    store.put_prefetch(id, [2; 32], two_pages(2)).unwrap();
    let found = store.open_prefetch(id).unwrap().unwrap();
    assert_eq!((found.layout(), found.len()), ([2; 32], PREFETCH_HEAD + 8192));
    let path = store.root().join("images").join(format!("{id}.prefetch"));
    // The header's fields, the zeros behind it, both pages.
    for position in [0, 8, 12, 16, 24, 32, 64, 96, 4095, 4096, 8192, 12287] {
        flip(&path, position);
        let error = store.open_prefetch(id).unwrap_err();
        assert!(matches!(error, StoreError::Damaged { kind: Kind::Prefetch, .. }), "{error}");
        flip(&path, position);
        assert!(store.open_prefetch(id).is_ok());
    }
    let whole = std::fs::read(&path).unwrap();
    for len in [0, 1, 95, 96, 4095, 4096, 4097, 8192, 12287] {
        std::fs::remove_file(&path).unwrap();
        std::fs::write(&path, &whole[..len]).unwrap();
        assert!(store.open_prefetch(id).is_err(), "{len} bytes");
    }
    // That of another image is none of this one.
    let (_, other) = put(&store, "g", "other content");
    std::fs::write(store.root().join("images").join(format!("{other}.prefetch")), &whole).unwrap();
    assert!(store.open_prefetch(other).is_err());
    store.put_working_set(id, b"pages").unwrap();
    assert!(store.remove_working_set(id).unwrap());
    assert!(store.open_prefetch(id).unwrap().is_none());
    let gone = store.put_prefetch(ImageId([9; 32]), [0; 32], two_pages(1)).unwrap_err();
    assert!(gone.is_not_found());
}

#[test]
fn a_prefetch_file_has_whole_pages_and_not_too_many() {
    let (_directory, store) = empty_store();
    let (_, id) = put(&store, "f", "content");
    for len in [1, PREFETCH_MAX + 4096] {
        let written = store.put_prefetch(id, [0; 32], |file| {
            file.set_len(PREFETCH_HEAD + len)?;
            Ok(len)
        });
        assert!(written.is_err(), "{len} bytes");
    }
    let lied = store.put_prefetch(id, [0; 32], |file| {
        file.set_len(PREFETCH_HEAD + 8192)?;
        Ok(4096)
    });
    assert!(lied.is_err());
    assert!(store.open_prefetch(id).unwrap().is_none());
    assert_eq!(std::fs::read_dir(store.root().join("tmp")).unwrap().count(), 0);
}

#[test]
fn garbage_goes_and_the_rest_stays() {
    let (_directory, store) = empty_store();
    let kept = put(&store, "kept", "kept content");
    let old = put(&store, "gone", "old content");
    store.put_working_set(old.1, b"pages").unwrap();
    store.put_prefetch(old.1, [0; 32], two_pages(1)).unwrap();
    let mut session = store.session().unwrap();
    let named = index_of(&mut session, "named content");
    session.put_rootfs(&name("base"), named).unwrap();
    drop(session);
    assert!(store.gc(Removal::DryRun).unwrap().is_empty());
    store.remove_function(&name("gone")).unwrap();
    let announced = store.gc(Removal::DryRun).unwrap();
    assert!(store.open_image(old.1).is_ok());
    let removed = store.gc(Removal::Remove).unwrap();
    assert_eq!(announced, removed);
    assert_eq!((removed.images, removed.indexes), (vec![old.1], vec![old.0]));
    assert_eq!((removed.blobs.len(), removed.working_sets.len()), (1, 1));
    assert!(removed.bytes > 0);
    assert!(store.open_image(old.1).unwrap_err().is_not_found());
    assert!(store.open_index(old.0).unwrap_err().is_not_found());
    assert!(store.open_image(kept.1).is_ok());
    assert!(store.open_index(kept.0).is_ok());
    assert!(store.gc(Removal::Remove).unwrap().is_empty());
    store.remove_rootfs(&name("base")).unwrap();
    assert_eq!(store.gc(Removal::Remove).unwrap().indexes, [named]);
    assert_eq!(damaged(&store), []);
}

#[test]
fn the_newest_versions_are_kept_and_those_in_use() {
    let (_directory, store) = empty_store();
    let all = ["one", "two", "three", "four", "five"].map(|content| put(&store, "f", content));
    let mut session = store.session().unwrap();
    let share = |record: &mut FunctionRecord| {
        record.share(1, 5, None).unwrap();
        Ok::<_, StoreError>(())
    };
    session.change_function(&name("f"), share).unwrap();
    drop(session);
    let would = store.gc(Removal::DryRun).unwrap();
    assert_eq!(would.versions, [(name("f"), 2)]);
    assert_eq!(store.get_function(&name("f")).unwrap().versions().len(), 5);
    let removed = store.gc(Removal::Remove).unwrap();
    assert_eq!((removed.images, removed.indexes), (vec![all[1].1], vec![all[1].0]));
    let numbers = |store: &Store| {
        let versions = store.get_function(&name("f")).unwrap().versions();
        versions.iter().map(|version| version.number).collect::<Vec<_>>()
    };
    assert_eq!(numbers(&store), [1, 3, 4, 5]);
    assert_eq!(damaged(&store), []);
    // The version before the active one stays, too.
    store.gc_keeping(Removal::Remove, &Kept { versions: 1, ..Kept::default() }).unwrap();
    assert_eq!(numbers(&store), [1, 4, 5]);
}

/// A record as the version before this one has written it.
fn old_record(store: &Store, with_previous: bool) -> (IndexId, ImageId) {
    let (index, image) = put(store, "f", "present");
    let (older, older_image) = put(store, "g", "before");
    let mut record = json!({
        "version": 1, "name": "f", "config": { "port": 8000 }, "index": index, "image": image,
        "created_ms": 7, "previous": null,
    });
    if with_previous {
        record["previous"] = json!({
            "config": {}, "index": older, "image": older_image, "created_ms": 3,
        });
    }
    let path = store.root().join("functions/f/record.json");
    fs::remove_file(&path).unwrap();
    fs::write(&path, record.to_string()).unwrap();
    store.remove_function(&name("g")).unwrap();
    (older, older_image)
}

#[test]
fn records_of_the_version_before_have_numbers() {
    let (_directory, store) = empty_store();
    old_record(&store, false);
    let record = store.get_function(&name("f")).unwrap();
    assert_eq!((record.number, record.others.len(), record.created_ms), (1, 0, 7));
    let (index, image) = old_record(&store, true);
    let record = store.get_function(&name("f")).unwrap();
    assert_eq!((record.number, record.before()), (2, Some(1)));
    assert_eq!((record.others[0].index, record.others[0].image), (index, Some(image)));
    assert!(store.gc(Removal::Remove).unwrap().images.is_empty());
    put(&store, "f", "next");
    let record = store.get_function(&name("f")).unwrap();
    assert_eq!((record.number, record.before()), (3, Some(2)));
    assert_eq!(damaged(&store), []);
}

#[test]
fn versions_wait_to_be_activated() {
    let (_directory, store) = empty_store();
    put(&store, "f", "one");
    let mut session = store.session().unwrap();
    let index = index_of(&mut session, "two");
    let image = Some(image_of(&mut session, "two"));
    let new = NewFunction { name: name("f"), config: json!({}), index, image };
    let label = parse_label("next").unwrap();
    let record = session.put_version(new, Some(label), Activation::Later).unwrap();
    assert_eq!((record.number, record.find("next")), (1, Ok(2)));
    let activate = |record: &mut FunctionRecord| {
        record.activate(2).unwrap();
        Ok::<_, StoreError>(())
    };
    let record = session.change_function(&name("f"), activate).unwrap();
    assert_eq!((record.index, record.image), (index, image));
    assert_eq!(store.get_function(&name("f")).unwrap(), record);
    let gone = session.change_function(&name("g"), activate).unwrap_err();
    assert!(gone.is_not_found(), "{gone}");
}

#[test]
fn what_waits_to_be_activated_changes_nothing_of_what_is_active() {
    let (_directory, store) = empty_store();
    let (index, image) = put(&store, "f", "one");
    let before = store.get_function(&name("f")).unwrap();
    let mut session = store.session().unwrap();
    let with = |config| NewFunction { name: name("f"), config, index, image: Some(image) };
    let record = session.put_version(with(json!({ "port": 9 })), None, Activation::Later).unwrap();
    assert_eq!((record.active(), record.others.len()), (before.active(), 1));
    assert_eq!(
        (&record.others[0].config, record.others[0].image),
        (&json!({ "port": 9 }), Some(image))
    );
    // The same all over is no other version.
    let again = session.put_version(with(before.config.clone()), None, Activation::Later).unwrap();
    assert_eq!((again.number, again.versions().len()), (1, 2));
    // At once, it is the active one with another configuration.
    let record = session.put_function(with(json!({ "port": 7 }))).unwrap();
    assert_eq!((record.number, record.versions().len()), (1, 2));
    assert_eq!(record.config, json!({ "port": 7 }));
}

#[test]
fn a_record_of_a_later_program_is_not_overwritten() {
    let (_directory, store) = empty_store();
    put(&store, "f", "one");
    let path = store.root().join("functions/f/record.json");
    let mut record: serde_json::Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    let known = record["version"].as_u64().unwrap();
    record["version"] = json!(known + 1);
    // Nothing that this program would understand.
    record["name"] = json!({ "of": "the function" });
    let later = record.to_string();
    fs::remove_file(&path).unwrap();
    fs::write(&path, &later).unwrap();
    let mut session = store.session().unwrap();
    let index = index_of(&mut session, "two");
    let new = NewFunction { name: name("f"), config: json!({}), index, image: None };
    let refused = session.put_function(new.clone()).unwrap_err();
    drop(session);
    assert!(matches!(refused, StoreError::LaterRecord { .. }), "{refused}");
    assert!(refused.to_string().contains("use the version of Thaw that wrote it"), "{refused}");
    assert_eq!(fs::read_to_string(&path).unwrap(), later);
    assert!(matches!(store.gc(Removal::Remove).unwrap_err(), StoreError::LaterRecord { .. }));
    assert_eq!(store.list_functions().unwrap().damaged.len(), 1);
    // A way out that forgets it is somebody's wish.
    store.remove_function(&name("f")).unwrap();
    store.session().unwrap().put_function(new).unwrap();
}

#[test]
fn what_is_open_is_not_garbage() {
    let (_directory, store) = empty_store();
    let (index, image) = put(&store, "f", "content");
    let open_index = store.open_index(index).unwrap();
    // A copy of the descriptor, as a sandbox has it, is enough.
    let open_image = store.open_image(image).unwrap().try_clone().unwrap();
    store.remove_function(&name("f")).unwrap();
    assert!(store.gc(Removal::Remove).unwrap().is_empty());
    let blob = open_index.blob(0).unwrap();
    assert!(store.open_blob(blob.hash).is_ok());
    assert_eq!(open_index.blob(1), None);
    drop((open_index, open_image));
    let removed = store.gc(Removal::Remove).unwrap();
    assert_eq!((removed.images.len(), removed.indexes.len(), removed.blobs.len()), (1, 1, 1));
}

#[test]
fn the_collector_waits_for_sessions() {
    let (_directory, store) = empty_store();
    let mut session = store.session().unwrap();
    index_of(&mut session, "not referred to yet");
    let busy = store.gc_within(Removal::Remove, Duration::ZERO).unwrap_err();
    assert!(matches!(busy, StoreError::Busy { .. }), "{busy}");
    drop(session);
    assert_eq!(store.gc(Removal::Remove).unwrap().indexes.len(), 1);
}

#[test]
fn damage_is_found_named_and_repaired_by_building_again() {
    let (_directory, store) = empty_store();
    let (index, image) = put(&store, "f", "content");
    store.put_working_set(image, b"pages").unwrap();
    store.put_prefetch(image, [0; 32], two_pages(1)).unwrap();
    assert_eq!(damaged(&store), []);
    let blob = store.open_index(index).unwrap().blob(0).unwrap();
    let image_path = store.root().join("images").join(image.to_string());
    let working_set_path = store.root().join("images").join(format!("{image}.workingset"));
    flip(&store.blob_path(blob.hash), 3);
    flip(&image_path, 50 << 20);
    flip(&working_set_path, 60);
    flip(&working_set_path.with_extension("prefetch"), 9000);
    let expected = [
        (Kind::Blob, blob.hash.to_string()),
        (Kind::Image, image.to_string()),
        (Kind::WorkingSet, image.to_string()),
        (Kind::Prefetch, image.to_string()),
    ];
    assert_eq!(damaged(&store), expected);
    let report = store.verify(Repair::RemoveDamaged, &mut |_| {}).unwrap();
    assert!(report.problems.iter().all(|problem| problem.removed), "{report:?}");
    assert!(report.problems.iter().all(|problem| problem.used_by == [name("f")]), "{report:?}");
    // Now the same things are missing, which is said too, except for the working set.
    assert_eq!(damaged(&store), expected[..2]);
    assert_eq!(put(&store, "f", "content"), (index, image));
    assert_eq!(damaged(&store), []);
}

#[test]
fn a_damaged_index_or_record_stops_the_collector() {
    let (_directory, store) = empty_store();
    let (index, _) = put(&store, "f", "content");
    let index_path = store.root().join("indexes").join(index.to_string());
    flip(&index_path, 200);
    let error = store.gc(Removal::Remove).unwrap_err();
    assert!(matches!(error, StoreError::Damaged { kind: Kind::Index, .. }), "{error}");
    assert_eq!(damaged(&store), [(Kind::Index, index.to_string())]);
    flip(&index_path, 200);
    let record = store.root().join("functions/f/record.json");
    flip(&record, 0);
    let error = store.gc(Removal::Remove).unwrap_err();
    assert!(matches!(error, StoreError::Damaged { kind: Kind::Function, .. }), "{error}");
    assert_eq!(damaged(&store), [(Kind::Function, "f".to_owned())]);
    assert_eq!(store.list_functions().unwrap().damaged.len(), 1);
    // The way out works.
    put(&store, "f", "content");
    assert!(store.gc(Removal::Remove).unwrap().is_empty());
}

#[test]
fn a_store_of_another_version_is_refused() {
    let (directory, store) = empty_store();
    let root = store.root().to_owned();
    fs::remove_file(root.join("version")).unwrap();
    fs::write(root.join("version"), "thaw store 99\n").unwrap();
    let error = Store::open(&directory.path().join("home")).unwrap_err();
    assert!(error.to_string().contains("thaw store 99"), "{error}");
}

#[test]
fn a_version_replaces_the_one_that_it_was_made_from_only() {
    let (_directory, store) = empty_store();
    put(&store, "f", "one");
    let old = store.get_function(&name("f")).unwrap();
    let mut session = store.session().unwrap();
    let new = |session: &mut Session, text: &str, config| {
        let image = Some(image_of(session, text));
        NewFunction { name: name("f"), config, index: old.index, image }
    };
    // Somebody else stores the same files and image with another configuration.
    let other = NewFunction {
        name: name("f"),
        config: json!({ "port": 9000 }),
        index: old.index,
        image: old.image,
    };
    let newer = session.put_function(other).unwrap();
    let late = new(&mut session, "late", json!({ "port": 8000 }));
    let refused = session.replace_function(&old.version(), late.clone()).unwrap_err();
    assert!(matches!(refused, StoreError::Replaced { .. }), "{refused}");
    assert_eq!(store.get_function(&name("f")).unwrap(), newer);
    // The same configuration once more is another version, too.
    let again = NewFunction {
        name: name("f"),
        config: newer.config.clone(),
        index: newer.index,
        image: newer.image,
    };
    let newest = session.put_function(again).unwrap();
    assert!(session.replace_function(&newer.version(), late.clone()).is_err());
    let stored = session.replace_function(&newest.version(), late.clone()).unwrap();
    assert_eq!(store.get_function(&name("f")).unwrap(), stored);
    assert_eq!((stored.number, stored.others.len()), (1, 0), "it is the same version");
    // A version that is not active is replaced where it is.
    put(&store, "f", "two");
    let replaced = session.replace_function(&stored.version(), late.clone()).unwrap();
    assert_eq!((replaced.number, replaced.others[0].image), (2, late.image));
    assert!(session.put_version_from(&stored.version(), late.clone()).is_err());
    let stored = session.put_version_from(&replaced.version(), late.clone()).unwrap();
    assert_eq!((stored.number, stored.before()), (3, Some(2)));
    // A function that was removed stays so.
    store.remove_function(&name("f")).unwrap();
    assert!(session.replace_function(&stored.version(), late).is_err());
    assert!(store.get_function(&name("f")).unwrap_err().is_not_found());
}

/// An image with its ancestors, as of a checkpoint.
fn differential_image(session: &mut Session, content: &str, ancestors: &[ImageId]) -> ImageId {
    let new = session.new_image_file().unwrap();
    new.file().write_all_at(content.as_bytes(), 4096).unwrap();
    session.commit_checkpoint_image(new, ancestors).unwrap()
}

fn put_checkpoint(session: &mut Session, checkpoint: &str, owner: Option<&str>, image: ImageId) {
    let index = index_of(session, "files");
    let owner = owner.map(name);
    let new = NewCheckpoint { name: name(checkpoint), owner, config: json!({}), index, image };
    session.put_checkpoint(new).unwrap();
}

/// A function, a checkpoint of an instance of it, and one of a copy of that.
fn chain(store: &Store) -> [ImageId; 3] {
    let (_, root) = put(store, "f", "root");
    let mut session = store.session().unwrap();
    let first = differential_image(&mut session, "first", &[root]);
    put_checkpoint(&mut session, "first", Some("alice"), first);
    let second = differential_image(&mut session, "second", &[root, first]);
    put_checkpoint(&mut session, "second", Some("alice"), second);
    [root, first, second]
}

#[test]
fn checkpoints_are_their_owners_and_nobody_else_reads_them() {
    let (_directory, store) = empty_store();
    let [_, first, _] = chain(&store);
    let record = store.get_checkpoint(&name("first")).unwrap();
    assert_eq!((record.image, record.owner), (first, Some(name("alice"))));
    let listed = store.list_checkpoints().unwrap();
    let names: Vec<&str> = listed.records.iter().map(|record| record.name.as_str()).collect();
    assert_eq!((names, listed.damaged.len()), (vec!["first", "second"], 0));
    for (path, mode) in [
        ("checkpoints/first".to_owned(), 0o600),
        (format!("images/{first}"), 0o400),
        (format!("images/{first}.ancestors"), 0o600),
    ] {
        let metadata = std::fs::metadata(store.root().join(path)).unwrap();
        assert_eq!(metadata.mode() & 0o7777, mode);
    }
    let mut session = store.session().unwrap();
    let index = index_of(&mut session, "files");
    let new = |owner| NewCheckpoint {
        name: name("first"),
        owner,
        config: json!({}),
        index,
        image: first,
    };
    for other in [None, Some(name("bob"))] {
        let refused = session.put_checkpoint(new(other)).unwrap_err();
        assert!(matches!(refused, StoreError::Owned { .. }), "{refused}");
    }
    session.put_checkpoint(new(Some(name("alice")))).unwrap();
    let missing = NewCheckpoint { image: ImageId([1; 32]), ..new(Some(name("alice"))) };
    assert!(session.put_checkpoint(missing).unwrap_err().is_not_found());
}

#[test]
fn ancestors_stay_as_long_as_something_refers_to_them() {
    let (_directory, store) = empty_store();
    let [root, first, second] = chain(&store);
    assert_eq!(store.image_ancestors(root).unwrap(), []);
    assert_eq!(store.image_ancestors(second).unwrap(), [root, first]);
    assert!(store.gc(Removal::Remove).unwrap().is_empty());
    // The function goes, and its image stays.
    store.remove_function(&name("f")).unwrap();
    assert!(store.gc(Removal::Remove).unwrap().images.is_empty());
    let refused = store.remove_checkpoint(&name("first")).unwrap_err();
    assert_eq!(
        refused.to_string(),
        "checkpoint first cannot be removed: second hold only how they differ from it; remove \
         those first"
    );
    store.remove_checkpoint(&name("second")).unwrap();
    // Somebody has opened an image, and is about to open its ancestors.
    let open = store.open_image(second).unwrap();
    assert!(store.gc(Removal::Remove).unwrap().images.is_empty());
    drop(open);
    assert_eq!(store.gc(Removal::Remove).unwrap().images, [second]);
    assert!(!store.root().join("images").join(format!("{second}.ancestors")).exists());
    store.remove_checkpoint(&name("first")).unwrap();
    assert!(store.remove_checkpoint(&name("first")).unwrap_err().is_not_found());
    let removed: BTreeSet<ImageId> =
        store.gc(Removal::Remove).unwrap().images.into_iter().collect();
    assert_eq!(removed, BTreeSet::from([root, first]));
}

#[test]
fn an_image_without_its_ancestors_is_not_stored() {
    let (_directory, store) = empty_store();
    let mut session = store.session().unwrap();
    let new = session.new_image_file().unwrap();
    new.file().write_all_at(b"x", 0).unwrap();
    let missing = session.commit_checkpoint_image(new, &[ImageId([1; 32])]).unwrap_err();
    assert!(missing.is_not_found());
    assert!(store.list_images().unwrap().is_empty());
}

#[test]
fn damage_of_ancestors_is_told_to_those_who_need_them() {
    let (_directory, store) = empty_store();
    let [root, first, second] = chain(&store);
    let images = store.root().join("images");
    std::fs::remove_file(images.join(root.to_string())).unwrap();
    let report = store.verify(Repair::Report, &mut |_| {}).unwrap();
    let [problem] = &report.problems[..] else { panic!("{report:?}") };
    assert_eq!((problem.kind, &problem.name), (Kind::Image, &root.to_string()));
    assert_eq!(problem.used_by, ["f", "first", "second"].map(name));
    // Nobody knows what an image needs whose list is damaged, so nothing is collected.
    flip(&images.join(format!("{second}.ancestors")), 60);
    let damaged = store.gc(Removal::Remove).unwrap_err();
    assert!(matches!(damaged, StoreError::Damaged { kind: Kind::Ancestors, .. }), "{damaged}");
    assert!(store.open_image(first).is_ok());
    let report = store.verify(Repair::RemoveDamaged, &mut |_| {}).unwrap();
    let problem = report.problems.iter().find(|problem| problem.kind == Kind::Ancestors).unwrap();
    assert_eq!(problem.used_by, [name("second")]);
    // Removing its checkpoint is what mends it.
    store.remove_checkpoint(&name("second")).unwrap();
    store.remove_checkpoint(&name("first")).unwrap();
    assert_eq!(store.gc(Removal::Remove).unwrap().images.len(), 2);
}

#[test]
fn a_damaged_checkpoint_keeps_everything_and_can_be_removed() {
    let (_directory, store) = empty_store();
    chain(&store);
    std::fs::write(store.root().join("checkpoints/second"), "{").unwrap();
    let damaged = store.gc(Removal::Remove).unwrap_err();
    assert!(matches!(damaged, StoreError::Damaged { kind: Kind::Checkpoint, .. }), "{damaged}");
    let report = store.verify(Repair::Report, &mut |_| {}).unwrap();
    assert_eq!(report.problems[0].kind, Kind::Checkpoint);
    store.remove_checkpoint(&name("second")).unwrap();
    assert_eq!(store.gc(Removal::Remove).unwrap().images.len(), 1);
}

#[test]
fn a_checkpoint_occupies_what_its_ancestors_do() {
    let (_directory, store) = empty_store();
    let [root, first, second] = chain(&store);
    let index = store.get_checkpoint(&name("second")).unwrap().index;
    let bytes = |images: &[ImageId]| {
        let mut footprint = Footprint::default();
        images.iter().for_each(|&image| footprint.add(&store, index, Some(image)).unwrap());
        footprint.bytes()
    };
    assert_eq!(bytes(&[second]), bytes(&[root, first, second]));
    assert!(bytes(&[second]) > bytes(&[first]) && bytes(&[first]) > bytes(&[root]));
}
