//! Images at rest: packed, unpacked when they are opened, and never lost.

mod common;

use std::fs;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::thread;
use std::time::Duration;

use common::{SmallDisk, empty_store, is_root, start_victim};
use thaw_store::{
    Domain, ImageForm, ImageId, Kind, Reference, Removal, Removed, Repair, Source, Store,
    StoreError, image_id,
};

const PAGE: u64 = 4096;

/// Pages of a base, and of what differs from it in some words.
fn content(seed: u64, changed: bool) -> Vec<u8> {
    let mut state = seed;
    let mut bytes: Vec<u8> = std::iter::repeat_with(|| {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (state >> 56) as u8
    })
    .take(300 * PAGE as usize)
    .collect();
    if changed {
        (0..300).step_by(3).for_each(|page| bytes[page * PAGE as usize + 40] ^= 0x55);
    }
    bytes
}

/// Stores an image whose bytes begin after a hole.
fn store_image(store: &Store, bytes: &[u8], ancestors: &[ImageId]) -> ImageId {
    let mut session = store.session().unwrap();
    let image = session.new_image_file().unwrap();
    image.file().write_all_at(bytes, 64 * PAGE).unwrap();
    image.file().set_len(64 * PAGE + bytes.len() as u64 + 700 * PAGE).unwrap();
    session.commit_image_over(image, ancestors).unwrap()
}

/// A base and an image that differs from it, and what the latter is to be compared with.
fn pair(store: &Store) -> (ImageId, ImageId, Vec<Reference>) {
    let base = store_image(store, &content(5, false), &[]);
    let image = store_image(store, &content(5, true), &[base]);
    let (at, len) = (64 * PAGE, 300 * PAGE);
    (base, image, vec![Reference { at, len, source: Source::Image(base), offset: at }])
}

fn file(store: &Store, id: ImageId, end: &str) -> PathBuf {
    store.root().join("images").join(format!("{id}{end}"))
}

fn form(store: &Store, id: ImageId) -> ImageForm {
    store.list_images().unwrap().iter().find(|image| image.id == id).unwrap().form
}

/// Has an image lie there packed only.
#[track_caller]
fn pack(store: &Store, id: ImageId, references: &[Reference]) -> u64 {
    let sizes = store.pack_image(id, references).unwrap();
    assert_eq!(form(store, id), ImageForm::Both);
    // A child that another test has just forked has the descriptor, and with it the lock, until it
    // executes its program.
    let removed = (0..500).find_map(|_| match store.remove_unpacked(id).unwrap() {
        Removed::Freed(bytes) => Some(bytes),
        Removed::InUse => {
            thread::sleep(Duration::from_millis(10));
            None
        }
    });
    assert!(matches!(removed, Some(1_000_000..)), "{removed:?}");
    assert_eq!(form(store, id), ImageForm::Packed);
    sizes.packed
}

#[test]
fn packed_images_are_unpacked_when_they_are_opened() {
    let (_directory, store) = empty_store();
    let (_, image, references) = pair(&store);
    store.put_working_set(image, b"pages").unwrap();
    let before = store.list_images().unwrap();
    let quota = store.image_bytes(image).unwrap();
    let packed = pack(&store, image, &references);
    assert!(packed < 8192, "{packed}");
    let info = *store.list_images().unwrap().iter().find(|info| info.id == image).unwrap();
    let old = before.iter().find(|info| info.id == image).unwrap();
    assert_eq!((info.len, info.working_set_len), (old.len, old.working_set_len));
    assert!(info.allocated < old.allocated / 50);
    assert_eq!(store.image_bytes(image).unwrap(), quota);
    assert_eq!(store.working_set(image).unwrap().unwrap(), b"pages");
    assert_eq!(store.verify(Repair::Report, &mut |_| {}).unwrap().problems, []);
    assert!(store.gc(Removal::DryRun).unwrap().bytes > 0);

    let opened = store.open_image(image).unwrap();
    assert_eq!((image_id(&opened).unwrap(), form(&store, image)), (image, ImageForm::Both));
    assert_eq!(opened.metadata().unwrap().mode() & 0o777, 0o444);
    // It is in use.
    assert_eq!(store.remove_unpacked(image).unwrap(), Removed::InUse);
    drop(opened);
    assert!(matches!(store.remove_unpacked(image).unwrap(), Removed::Freed(_)));
    assert!(store.open_image(image).is_ok());
}

#[test]
fn only_what_is_equal_to_its_packed_form_is_removed() {
    let (_directory, store) = empty_store();
    let (_, image, references) = pair(&store);
    assert!(store.remove_unpacked(image).unwrap_err().is_not_found());
    store.pack_image(image, &references).unwrap();
    let path = file(&store, image, ".packed");
    let whole = fs::read(&path).unwrap();
    for at in (0..whole.len()).step_by(97) {
        let mut flipped = whole.clone();
        flipped[at] ^= 8;
        replace(&path, &flipped);
        let refused = store.remove_unpacked(image).unwrap_err();
        assert!(matches!(refused, StoreError::Damaged { kind: Kind::Packed, .. }), "{refused}");
        assert!(store.open_image(image).is_ok());
    }
    replace(&path, &whole[..whole.len() - 1]);
    store.remove_unpacked(image).unwrap_err();
    replace(&path, &whole);
    assert!(matches!(store.remove_unpacked(image).unwrap(), Removed::Freed(_)));
}

fn replace(path: &Path, bytes: &[u8]) {
    fs::remove_file(path).unwrap();
    fs::write(path, bytes).unwrap();
}

#[test]
fn damage_is_told_and_never_unpacked() {
    let (_directory, store) = empty_store();
    let (base, image, references) = pair(&store);
    pack(&store, image, &references);
    let path = file(&store, image, ".packed");
    let whole = fs::read(&path).unwrap();
    for at in (0..whole.len()).step_by(61) {
        let mut flipped = whole.clone();
        flipped[at] ^= 1;
        replace(&path, &flipped);
        let refused = store.open_image(image).unwrap_err();
        assert!(refused.to_string().contains("build the function again"), "{refused}");
        assert_eq!(form(&store, image), ImageForm::Packed);
    }
    let problems = store.verify(Repair::Report, &mut |_| {}).unwrap().problems;
    assert_eq!(problems.iter().map(|problem| problem.kind).collect::<Vec<_>>(), [Kind::Packed]);
    replace(&path, &whole);
    // What it differs from is another.
    let base_path = file(&store, base, "");
    let bytes = fs::read(&base_path).unwrap();
    let mut flipped = bytes.clone();
    flipped[64 * PAGE as usize + 1000] ^= 1;
    replace(&base_path, &flipped);
    let refused = store.open_image(image).unwrap_err().to_string();
    assert!(refused.contains("its bytes do not match its name"), "{refused}");
    fs::remove_file(&base_path).unwrap();
    assert!(store.open_image(image).unwrap_err().is_not_found());
    replace_new(&base_path, &bytes);
    assert!(store.open_image(image).is_ok());
    assert_eq!(fs::read_dir(store.root().join("tmp")).unwrap().count(), 0);
}

fn replace_new(path: &Path, bytes: &[u8]) {
    fs::write(path, bytes).unwrap();
}

#[test]
fn contents_of_files_are_sources_too() {
    let (_directory, store) = empty_store();
    let bytes = &content(9, false)[..20 * PAGE as usize + 100];
    let mut session = store.session().unwrap();
    let blob = session.put_blob(bytes, &Domain::shared()).unwrap().unwrap();
    session.put_index(&thaw_store::Tree::new()).unwrap();
    // Where the file ends, memory goes on with zeros.
    let image = store_image(&store, &[bytes, &[0; PAGE as usize - 100]].concat(), &[]);
    drop(session);
    let reference = |offset| Reference {
        at: 64 * PAGE,
        len: 21 * PAGE,
        source: Source::Blob(blob.hash),
        offset,
    };
    // One that leads nowhere costs room only.
    let wrong = Reference { at: !4095, ..reference(0) };
    store.pack_image(image, &[reference(0), wrong]).unwrap();
    assert!(store.packed_sizes(image).unwrap().packed < 1000);
    store.remove_unpacked(image).unwrap();
    assert!(store.open_image(image).is_ok());
}

#[test]
fn a_chain_of_packed_images_that_leads_back_ends() {
    let (_directory, store) = empty_store();
    let (base, image, references) = pair(&store);
    pack(&store, image, &references);
    // A packed file under the name of what it differs from.
    let copy = file(&store, base, ".packed");
    fs::copy(file(&store, image, ".packed"), &copy).unwrap();
    fs::remove_file(file(&store, base, "")).unwrap();
    assert!(matches!(store.open_image(image).unwrap_err(), StoreError::Damaged { .. }));
}

#[test]
fn the_least_recently_used_is_first_and_what_others_need_is_not_there() {
    let (_directory, store) = empty_store();
    let (base, image, references) = pair(&store);
    let other = store_image(&store, &content(77, false), &[]);
    let ids = |store: &Store| -> Vec<ImageId> {
        store.unpacked_images().unwrap().iter().map(|image| image.id).collect()
    };
    assert_eq!(ids(&store), [image, other]);
    assert!(!ids(&store).contains(&base));
    store.pack_image(image, &references).unwrap();
    drop(store.open_image(image).unwrap());
    assert_eq!(ids(&store), [other, image]);
}

#[test]
fn collectors_remove_both_forms() {
    let (_directory, store) = empty_store();
    let (base, image, references) = pair(&store);
    pack(&store, image, &references);
    let opened = store.open_image(image).unwrap();
    // In use, and so is what it differs from.
    assert_eq!(store.gc(Removal::Remove).unwrap().images, []);
    drop(opened);
    let mut removed = store.gc(Removal::Remove).unwrap().images;
    removed.sort();
    let mut expected = vec![base, image];
    expected.sort();
    assert_eq!(removed, expected);
    assert_eq!(fs::read_dir(store.root().join("images")).unwrap().count(), 0);
}

#[test]
fn a_full_disk_while_an_image_is_unpacked_is_a_clear_error_and_loses_nothing() {
    if !is_root("mounting a small file system") {
        return;
    }
    let disk = SmallDisk::mount(8);
    let store = Store::open(&disk.0.path().join("home")).unwrap();
    let (_, image, references) = pair(&store);
    pack(&store, image, &references);
    // Room for the directory of a session.
    let filler = disk.fill_but_for(64 * PAGE);
    let refused = store.open_image(image).unwrap_err();
    assert!(matches!(refused, StoreError::NoSpace { .. }), "{refused}");
    assert_eq!(fs::read_dir(store.root().join("tmp")).unwrap().count(), 0);
    assert_eq!(form(&store, image), ImageForm::Packed);
    filler.remove();
    assert!(store.open_image(image).is_ok());
}

#[test]
fn on_a_full_disk_others_that_are_packed_make_room() {
    if !is_root("mounting a small file system") {
        return;
    }
    let disk = SmallDisk::mount(8);
    let store = Store::open(&disk.0.path().join("home")).unwrap();
    let (_, image, references) = pair(&store);
    pack(&store, image, &references);
    let others = [21, 22].map(|seed| {
        let other = store_image(&store, &content(seed, false), &[]);
        store.pack_image(other, &[]).unwrap();
        other
    });
    let _filler = disk.fill_but_for(64 * PAGE);
    let in_use = store.open_image(others[0]).unwrap();
    assert!(store.open_image(image).is_ok());
    assert_eq!(others.map(|id| form(&store, id)), [ImageForm::Both, ImageForm::Packed]);
    drop(in_use);
}

/// Tells the process that is to be killed where to work.
const HOME: &str = "THAW_TEST_PACK_HOME";

/// [`killed_while_it_unpacks_nothing_is_lost`] runs it and kills it.
#[test]
#[ignore = "the victim of another test"]
fn victim() {
    let home = std::env::var(HOME).unwrap();
    let store = Store::open(Path::new(&home)).unwrap();
    println!("\nready");
    loop {
        for image in store.list_images().unwrap() {
            drop(store.open_image(image.id).unwrap());
        }
        for image in store.unpacked_images().unwrap() {
            store.remove_unpacked(image.id).unwrap();
        }
    }
}

#[test]
fn killed_while_it_unpacks_nothing_is_lost() {
    let (directory, store) = empty_store();
    let home = directory.path().join("home");
    let (_, image, references) = pair(&store);
    pack(&store, image, &references);
    let mut left_something = 0;
    for turn in 0..24 {
        let mut child = start_victim(&[(HOME, &home)]);
        std::thread::sleep(Duration::from_micros(turn * 3_777 % 40_000));
        child.kill().unwrap();
        child.wait().unwrap();
        left_something += fs::read_dir(home.join("tmp")).unwrap().count();
        let store = Store::open(&home).unwrap();
        assert_eq!(fs::read_dir(home.join("tmp")).unwrap().count(), 0);
        assert_eq!(store.verify(Repair::Report, &mut |_| {}).unwrap().problems, []);
        assert_eq!(image_id(&store.open_image(image).unwrap()).unwrap(), image);
        store.remove_unpacked(image).unwrap();
    }
    // Otherwise no kill has hit anything and the test shows nothing.
    assert!(left_something > 0);
}

/// Replaces a file by one that has another byte at `at`; returns what it had.
fn damage(path: &Path, at: usize) -> Vec<u8> {
    let bytes = fs::read(path).unwrap();
    let mut flipped = bytes.clone();
    flipped[at] ^= 1;
    replace(path, &flipped);
    bytes
}

const IN_THE_CONTENT: usize = 64 * PAGE as usize + 1000;

#[test]
fn nothing_is_packed_against_what_is_damaged() {
    let (_directory, store) = empty_store();
    let (base, image, references) = pair(&store);
    let base_path = file(&store, base, "");
    let bytes = damage(&base_path, IN_THE_CONTENT);
    let refused = store.pack_image(image, &references).unwrap_err();
    assert!(matches!(refused, StoreError::Damaged { kind: Kind::Image, .. }), "{refused}");
    assert!(refused.to_string().contains(&base.to_string()), "{refused}");
    assert_eq!(form(&store, image), ImageForm::Whole);
    // A file of a root file system.
    let mut session = store.session().unwrap();
    let blob = session.put_blob(&content(5, true), &Domain::shared()).unwrap().unwrap();
    session.put_index(&thaw_store::Tree::new()).unwrap();
    drop(session);
    let blob_path = store.blob_path(blob.hash);
    let blob_bytes = damage(&blob_path, 1000);
    let of_blob = [Reference { source: Source::Blob(blob.hash), offset: 0, ..references[0] }];
    let refused = store.pack_image(image, &of_blob).unwrap_err();
    assert!(matches!(refused, StoreError::Damaged { kind: Kind::Blob, .. }), "{refused}");
    replace(&blob_path, &blob_bytes);
    store.pack_image(image, &of_blob).unwrap();
    replace(&base_path, &bytes);
    pack(&store, image, &references);
}

#[test]
fn a_packed_form_is_not_judged_by_what_is_damaged() {
    let (_directory, store) = empty_store();
    let (base, image, references) = pair(&store);
    let base_path = file(&store, base, "");
    store.pack_image(image, &references).unwrap();
    let bytes = damage(&base_path, IN_THE_CONTENT);
    let refused = store.remove_unpacked(image).unwrap_err();
    assert!(matches!(refused, StoreError::Damaged { kind: Kind::Image, .. }), "{refused}");
    let kinds = |repair| -> Vec<Kind> {
        let problems = store.verify(repair, &mut |_| {}).unwrap().problems;
        problems.iter().map(|problem| problem.kind).collect()
    };
    assert_eq!(kinds(Repair::Report), [Kind::Image]);
    assert_eq!(kinds(Repair::RemoveDamaged), [Kind::Image, Kind::Packed]);
    replace_new(&base_path, &bytes);
    assert_eq!(kinds(Repair::Report), []);
    assert_eq!(form(&store, image), ImageForm::Both);
    assert!(matches!(store.remove_unpacked(image).unwrap(), Removed::Freed(_)));
}

fn flock(path: &Path, operation: rustix::fs::FlockOperation) -> rustix::io::Result<fs::File> {
    let file = fs::File::open(path).unwrap();
    rustix::fs::flock(&file, operation).map(|()| file)
}

/// Waits until a thread of this process waits for a lock of a file.
fn wait_until_somebody_waits_for(path: &Path) {
    let inode = format!(":{} ", fs::metadata(path).unwrap().ino());
    let waits = |line: &str| line.contains("-> FLOCK") && line.contains(&inode);
    for _ in 0..6000 {
        if fs::read_to_string("/proc/locks").unwrap().lines().any(waits) {
            return;
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    panic!("nobody waits for {}", path.display());
}

#[test]
fn a_form_is_not_removed_while_the_other_one_goes() {
    use rustix::fs::FlockOperation::{LockExclusive, NonBlockingLockExclusive};
    let (_directory, store) = empty_store();
    let (_, image, references) = pair(&store);
    store.pack_image(image, &references).unwrap();
    let (whole, packed) = (file(&store, image, ""), file(&store, image, ".packed"));
    damage(&whole, IN_THE_CONTENT);
    // It is stored anew, and its packed form is looked at.
    let hold = flock(&packed, LockExclusive).unwrap();
    std::thread::scope(|scope| {
        let storing = scope.spawn(|| pair(&store));
        wait_until_somebody_waits_for(&packed);
        let refused = flock(&whole, NonBlockingLockExclusive).map(drop);
        assert_eq!(refused, Err(rustix::io::Errno::WOULDBLOCK));
        drop(hold);
        storing.join().unwrap();
    });
    assert_eq!(form(&store, image), ImageForm::Both);

    // The packed form that was read is another one by now.
    let hold = flock(&packed, LockExclusive).unwrap();
    let aside = packed.with_extension("aside");
    fs::hard_link(&packed, &aside).unwrap();
    std::thread::scope(|scope| {
        let removing = scope.spawn(|| store.remove_unpacked(image).unwrap());
        wait_until_somebody_waits_for(&aside);
        damage(&packed, 300);
        drop(hold);
        assert_eq!(removing.join().unwrap(), Removed::InUse);
    });
    fs::rename(&aside, &packed).unwrap();
    assert!(store.open_image(image).is_ok());
}
