//! Kernel builds in the store: kept as long as an image needs them, and no longer.

use std::fs;
use std::io::Write;
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt};
use std::path::Path;

use serde_json::json;
use tempfile::TempDir;
use thaw_store::{
    Domain, ImageId, IndexId, KERNEL_MAX, Kept, KernelId, Kind, Name, NewCheckpoint, NewFunction,
    Removal, Repair, Session, Store, StoreError, Tree,
};

fn store() -> (TempDir, Store) {
    let directory = tempfile::tempdir().unwrap();
    let store = Store::open(&directory.path().join("store")).unwrap();
    (directory, store)
}

fn name(text: &str) -> Name {
    Name::new(text).unwrap()
}

fn index(session: &mut Session) -> IndexId {
    session.put_blob(b"content", &Domain::shared()).unwrap();
    session.put_index(&Tree::new()).unwrap()
}

fn image_of(session: &mut Session, content: &str, kernel: KernelId, above: &[ImageId]) -> ImageId {
    let mut new = session.new_image_file().unwrap();
    new.needs(kernel);
    new.file().write_all_at(content.as_bytes(), 4096).unwrap();
    session.commit_checkpoint_image(new, above).unwrap()
}

/// A function whose image needs a kernel with this content.
fn put_function(store: &Store, function: &str, kernel: &str) -> (ImageId, KernelId) {
    let mut session = store.session().unwrap();
    // As any image, it names its kernel.
    let content = format!("{function} under {kernel}");
    let kernel = session.put_kernel(kernel.as_bytes()).unwrap();
    let image = image_of(&mut session, &content, kernel, &[]);
    let (name, index) = (name(function), index(&mut session));
    session
        .put_function(NewFunction { name, config: json!({}), index, image: Some(image) })
        .unwrap();
    (image, kernel)
}

fn put_checkpoint(store: &Store, checkpoint: &str, kernel: KernelId, above: &[ImageId]) -> ImageId {
    let mut session = store.session().unwrap();
    let image = image_of(&mut session, checkpoint, kernel, above);
    let (name, index) = (name(checkpoint), index(&mut session));
    let new = NewCheckpoint { name, owner: None, config: json!({}), index, image };
    session.put_checkpoint(new).unwrap();
    image
}

fn collected(store: &Store) -> Vec<KernelId> {
    store.gc(Removal::Remove).unwrap().kernels
}

fn problems(store: &Store, repair: Repair) -> Vec<(Kind, Vec<Name>)> {
    let report = store.verify(repair, &mut |_| {}).unwrap();
    report.problems.into_iter().map(|problem| (problem.kind, problem.used_by)).collect()
}

/// Puts other bytes into the file of a kernel.
fn overwrite(path: &Path, content: &[u8]) {
    fs::set_permissions(path, fs::Permissions::from_mode(0o600)).unwrap();
    fs::File::create(path).unwrap().write_all(content).unwrap();
}

#[test]
fn a_kernel_is_kept_by_all_that_needs_it() {
    let (_directory, store) = store();
    let (root, old) = put_function(&store, "f", "kernel A");
    assert_eq!(store.image_kernel(root).unwrap(), Some(old));
    assert_eq!(store.kernel(old).unwrap(), b"kernel A");
    // A copy of that function, which holds how it differs.
    put_checkpoint(&store, "c", old, &[root]);
    // The function is made anew under another kernel.
    let (_, new) = put_function(&store, "f", "kernel B");
    store.remove_function(&name("f")).unwrap();
    put_function(&store, "f", "kernel B");
    assert!(collected(&store).is_empty(), "the checkpoint needs it");
    store.remove_checkpoint(&name("c")).unwrap();
    let would = store.gc(Removal::DryRun).unwrap();
    assert_eq!(would.kernels, [old]);
    assert!(store.has_kernel(old), "nothing is removed");
    assert_eq!(collected(&store), [old]);
    assert!(store.kernel(old).unwrap_err().is_not_found());
    assert_eq!(store.list_kernels().unwrap().iter().map(|k| k.id).collect::<Vec<_>>(), [new]);
    assert!(problems(&store, Repair::Report).is_empty());
}

#[test]
fn the_version_before_keeps_its_kernel() {
    let (_directory, store) = store();
    let (_, old) = put_function(&store, "f", "kernel A");
    put_function(&store, "f", "kernel B");
    assert!(collected(&store).is_empty());
    store.remove_function(&name("f")).unwrap();
    assert_eq!(collected(&store).len(), 2);
    assert!(!store.has_kernel(old));
}

#[test]
fn an_image_that_is_open_keeps_its_kernel() {
    let (_directory, store) = store();
    let (image, kernel) = put_function(&store, "f", "kernel A");
    let open = store.open_image(image).unwrap();
    store.remove_function(&name("f")).unwrap();
    assert!(collected(&store).is_empty());
    assert!(store.has_kernel(kernel));
    drop(open);
    assert_eq!(collected(&store), [kernel]);
    // Nothing is left of the record either.
    assert_eq!(fs::read_dir(store.root().join("images")).unwrap().count(), 0);
}

#[test]
fn an_image_cannot_need_what_is_not_there() {
    let (_directory, store) = store();
    let mut session = store.session().unwrap();
    let mut new = session.new_image_file().unwrap();
    new.needs(KernelId([7; 32]));
    new.file().write_all_at(b"x", 0).unwrap();
    let refused = session.commit_image(new).unwrap_err();
    assert!(matches!(refused, StoreError::NotFound { kind: Kind::Kernel, .. }), "{refused}");
}

#[test]
fn a_kernel_is_what_its_name_says_or_is_not_used() {
    let (_directory, store) = store();
    let (_, kernel) = put_function(&store, "f", "kernel A");
    let path = store.kernel_path(kernel);
    assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o444);
    for wrong in [&b"kernel X"[..], b"", b"kernel A "] {
        overwrite(&path, wrong);
        let refused = store.kernel(kernel).unwrap_err();
        assert!(matches!(refused, StoreError::Damaged { kind: Kind::Kernel, .. }), "{refused}");
    }
    fs::File::options().write(true).open(&path).unwrap().set_len(KERNEL_MAX + 1).unwrap();
    assert!(store.kernel(kernel).unwrap_err().to_string().contains("too long"));
    assert_eq!(problems(&store, Repair::Report), [(Kind::Kernel, vec![name("f")])]);
    // Whoever has it puts it there again.
    store.session().unwrap().put_kernel(b"kernel A").unwrap();
    assert_eq!(store.kernel(kernel).unwrap(), b"kernel A");
    overwrite(&path, b"kernel X");
    assert_eq!(problems(&store, Repair::RemoveDamaged).len(), 1);
    assert!(!store.has_kernel(kernel));
    // From now on it is missing.
    assert_eq!(problems(&store, Repair::Report), [(Kind::Kernel, vec![name("f")])]);
}

#[test]
fn a_damaged_kernel_is_written_again_wherever_it_is_damaged() {
    let (_directory, store) = store();
    let mut session = store.session().unwrap();
    let elf: Vec<u8> = (0..600_001u32).map(|at| (at % 251) as u8).collect();
    let kernel = session.put_kernel(&elf).unwrap();
    let path = store.kernel_path(kernel);
    let inode = || fs::metadata(&path).unwrap().ino();
    let whole = inode();
    assert_eq!(session.put_kernel(&elf).unwrap(), kernel);
    assert_eq!(inode(), whole, "one that is whole stays");
    for at in [0, 262_143, 262_144, 600_000] {
        let mut damaged = elf.clone();
        damaged[at] ^= 1;
        overwrite(&path, &damaged);
        assert_eq!(session.put_kernel(&elf).unwrap(), kernel);
        assert_eq!(store.kernel(kernel).unwrap(), elf, "damaged at {at}");
    }
    for wrong in [&elf[..600_000], &elf[..0], &[&elf[..], &[0]].concat()] {
        overwrite(&path, wrong);
        assert_eq!(session.put_kernel(&elf).unwrap(), kernel);
        assert_eq!(store.kernel(kernel).unwrap(), elf, "damaged to {} bytes", wrong.len());
    }
}

#[test]
fn a_kernel_that_is_too_long_is_not_stored() {
    let (_directory, store) = store();
    let long = vec![0; KERNEL_MAX as usize + 1];
    let refused = store.session().unwrap().put_kernel(&long).unwrap_err();
    assert!(refused.to_string().contains("too long"), "{refused}");
    assert!(store.list_kernels().unwrap().is_empty());
}

#[test]
fn nothing_is_collected_while_nobody_knows_what_an_image_needs() {
    let (_directory, store) = store();
    let (image, kernel) = put_function(&store, "f", "kernel A");
    let record = store.root().join(format!("images/{image}.kernel"));
    fs::set_permissions(&record, fs::Permissions::from_mode(0o600)).unwrap();
    fs::write(&record, "nothing that anybody knows").unwrap();
    let refused = store.gc(Removal::Remove).unwrap_err();
    assert!(matches!(refused, StoreError::Damaged { kind: Kind::ImageKernel, .. }), "{refused}");
    assert!(store.has_kernel(kernel));
    let found = problems(&store, Repair::RemoveDamaged);
    assert_eq!(found, [(Kind::ImageKernel, vec![name("f")])]);
    assert!(record.exists());
}

#[test]
fn a_kernel_is_kept_for_whoever_says_so_once_no_session_is_open() {
    let (_directory, store) = store();
    let kernel = store.session().unwrap().put_kernel(b"of a partial function").unwrap();
    let asked = std::cell::Cell::new(0);
    let kernels = || {
        // Nobody adds anything now.
        assert!(fs::File::open(store.root().join("lock")).unwrap().try_lock_shared().is_err());
        asked.set(asked.get() + 1);
        [kernel].into()
    };
    let kept = Kept { kernels: &kernels, ..Kept::default() };
    assert!(store.gc_keeping(Removal::Remove, &kept).unwrap().is_empty());
    assert_eq!(asked.get(), 1);
    assert_eq!(collected(&store), [kernel]);
}
