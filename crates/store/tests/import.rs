//! Imported directories are in the store what they are on the host.

mod common;

use std::fs::{self, File, Permissions};
use std::io::Write;
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, SystemTime};

use common::{describe_directory, describe_index, empty_store, is_root};
use rustix::fs::{CWD, FileType, Mode, mknodat};
use thaw_store::import::{Exclude, ImportOptions, Ownership, PathPattern, Readers, Unreadable};
use thaw_store::index::{Attributes, Content, Node};
use thaw_store::{BlobHash, Domain, Name, Store, StoreError, Tree};

/// A directory with one of everything.
fn sample(root: &Path) {
    fs::create_dir_all(root.join("a/b/c")).unwrap();
    fs::create_dir(root.join("empty")).unwrap();
    fs::write(root.join("a/text"), "text").unwrap();
    fs::write(root.join("a/b/same"), "text").unwrap();
    fs::write(root.join("a/nothing"), "").unwrap();
    // Larger than what is read at once, so that the other way is taken.
    let large: Vec<u8> = (0..3_000_000u32).flat_map(|n| n.to_le_bytes()).collect();
    fs::write(root.join("a/large"), large).unwrap();
    fs::hard_link(root.join("a/text"), root.join("a/b/c/link")).unwrap();
    symlink("../a/text", root.join("empty/relative")).unwrap();
    symlink("/nowhere", root.join("dangling")).unwrap();
    fs::set_permissions(root.join("a/text"), Permissions::from_mode(0o4751)).unwrap();
    fs::set_permissions(root.join("a/b"), Permissions::from_mode(0o1777)).unwrap();
    let long_ago = SystemTime::UNIX_EPOCH + Duration::new(1_000_000_000, 123_456_789);
    File::open(root.join("a/text")).unwrap().set_modified(long_ago).unwrap();
    mknodat(CWD, root.join("pipe"), FileType::Fifo, Mode::from(0o640), 0).unwrap();
}

fn import(store: &Store, from: &Path, options: &ImportOptions) -> thaw_store::OpenIndex {
    let mut session = store.session().unwrap();
    let mut tree = Tree::new();
    session.import_directory(&mut tree, from, Path::new("/"), options, &mut |_| {}).unwrap();
    let id = session.put_index(&tree).unwrap();
    store.open_index(id).unwrap()
}

#[test]
fn everything_is_kept() {
    let source = tempfile::tempdir().unwrap();
    sample(source.path());
    if is_root("importing devices and other people's files") {
        let device = rustix::fs::makedev(1, 3);
        let path = source.path().join("null");
        mknodat(CWD, &path, FileType::CharacterDevice, Mode::from(0o666), device).unwrap();
        std::os::unix::fs::chown(source.path().join("a/b"), Some(1234), Some(70000)).unwrap();
    }
    let (_directory, store) = empty_store();
    let open = import(&store, source.path(), &ImportOptions::default());
    assert_eq!(describe_index(&store, &open), describe_directory(source.path()));
    // "text" twice by content, once by link: one blob; and the large one.
    assert_eq!(open.index().blobs().len(), 2);
    for blob in open.index().blobs() {
        let path = store.blob_path(BlobHash(blob.hash));
        assert_eq!(fs::metadata(path).unwrap().mode() & 0o7777, 0o444);
    }
}

#[test]
fn importing_again_writes_nothing() {
    let source = tempfile::tempdir().unwrap();
    sample(source.path());
    let (_directory, store) = empty_store();
    let first = import(&store, source.path(), &ImportOptions::default());
    let inode = |hash| fs::metadata(store.blob_path(BlobHash(hash))).unwrap().ino();
    let before: Vec<u64> = first.index().blobs().iter().map(|blob| inode(blob.hash)).collect();
    let second = import(&store, source.path(), &ImportOptions::default());
    let after: Vec<u64> = second.index().blobs().iter().map(|blob| inode(blob.hash)).collect();
    assert_eq!((first.id(), before), (second.id(), after));
}

#[test]
fn directories_merge_below_a_prefix() {
    let source = tempfile::tempdir().unwrap();
    fs::create_dir(source.path().join("bin")).unwrap();
    fs::write(source.path().join("bin/x"), "x").unwrap();
    let (_directory, store) = empty_store();
    let mut session = store.session().unwrap();
    let mut tree = Tree::new();
    tree.make_directories(Path::new("/opt/app/bin/sub")).unwrap();
    let options =
        ImportOptions { ownership: Ownership::All { uid: 7, gid: 8 }, ..Default::default() };
    let to = Path::new("/opt/app");
    let mut seen = Vec::new();
    let report = session
        .import_directory(&mut tree, source.path(), to, &options, &mut |p| seen.push(p.files))
        .unwrap();
    assert_eq!((report.files, report.bytes, seen), (3, 1, vec![1, 2, 3]));
    let file = tree.find(Path::new("/opt/app/bin/x")).unwrap();
    assert_eq!((tree.node(file).attributes.uid, tree.node(file).attributes.gid), (7, 8));
    assert!(tree.find(Path::new("/opt/app/bin/sub")).is_some());
}

#[test]
fn a_link_to_a_directory_is_filled_not_replaced() {
    let source = tempfile::tempdir().unwrap();
    fs::create_dir_all(source.path().join("lib/sub")).unwrap();
    fs::write(source.path().join("lib/sub/x"), "x").unwrap();
    fs::create_dir(source.path().join("file")).unwrap();
    let (_directory, store) = empty_store();
    let mut session = store.session().unwrap();
    let mut tree = Tree::new();
    tree.make_directories(Path::new("/usr/lib")).unwrap();
    for (path, target) in [("/lib", "usr/lib"), ("/file", "nowhere")] {
        let content = Content::Symlink(target.as_bytes().to_vec());
        let node = Node { content, attributes: Attributes::root(0o777) };
        tree.add_at(Path::new(path), node).unwrap();
    }
    let options = ImportOptions::default();
    let mut import = |tree: &mut Tree, from: &Path, to: &str| {
        session.import_directory(tree, from, Path::new(to), &options, &mut |_| {})
    };
    import(&mut tree, &source.path().join("lib"), "/lib").unwrap();
    let error = import(&mut tree, source.path(), "/").unwrap_err();
    assert!(error.to_string().starts_with("/file is there already"), "{error}");
    fs::remove_dir(source.path().join("file")).unwrap();
    import(&mut tree, source.path(), "/").unwrap();
    assert!(tree.find(Path::new("/usr/lib/sub/x")).is_some());
    assert!(tree.lookup(Tree::ROOT, b"lib").is_some());
}

#[test]
fn what_is_excluded_stays_out() {
    let source = tempfile::tempdir().unwrap();
    for path in ["keep", "drop.pyc", "sub/drop.pyc", "sub/keep", ".git/config", "only/here"] {
        fs::create_dir_all(source.path().join(path).parent().unwrap()).unwrap();
        fs::write(source.path().join(path), path).unwrap();
    }
    let exclude = vec![
        Exclude::Name("*.pyc".into()),
        Exclude::Name(".git".into()),
        Exclude::Path("only/here".into()),
    ];
    let (_directory, store) = empty_store();
    let open = import(&store, source.path(), &ImportOptions { exclude, ..Default::default() });
    let found: Vec<PathBuf> = describe_index(&store, &open).into_keys().collect();
    assert_eq!(found, ["", "keep", "only", "sub", "sub/keep"].map(PathBuf::from));
}

#[test]
fn the_store_does_not_import_itself() {
    let (directory, store) = empty_store();
    fs::write(directory.path().join("file"), "x").unwrap();
    let open = import(&store, directory.path(), &ImportOptions::default());
    let found: Vec<PathBuf> = describe_index(&store, &open).into_keys().collect();
    assert_eq!(found, ["", "file"].map(PathBuf::from));
}

#[test]
fn domains_do_not_share() {
    let source = tempfile::tempdir().unwrap();
    fs::create_dir(source.path().join("secret")).unwrap();
    fs::write(source.path().join("public"), "same bytes").unwrap();
    fs::write(source.path().join("secret/key"), "same bytes").unwrap();
    let (_directory, store) = empty_store();
    let own = Domain::own(&Name::new("alone").unwrap());
    let domains = vec![(PathPattern::new("secret").unwrap(), own)];
    let open = import(&store, source.path(), &ImportOptions { domains, ..Default::default() });
    let index = open.index();
    let [one, other] = index.blobs() else { panic!("{:?}", index.blobs()) };
    let inode = |hash| fs::metadata(store.blob_path(BlobHash(hash))).unwrap().ino();
    assert_ne!(inode(one.hash), inode(other.hash));
    // Both are found intact, the second under its domain's key.
    let report = store.verify(thaw_store::Repair::Report, &mut |_| {}).unwrap();
    assert_eq!(report.problems, []);
}

#[test]
fn private_files_are_found_wherever_the_directory_lies() {
    let source = tempfile::tempdir().unwrap();
    fs::create_dir(source.path().join("deep")).unwrap();
    fs::write(source.path().join("a.key"), "same bytes").unwrap();
    fs::write(source.path().join("deep/b.txt"), "same bytes").unwrap();
    let (_directory, store) = empty_store();
    let blobs = |pattern: &str, place: &str| {
        let own = Domain::private(&Name::new("f").unwrap());
        let domains = vec![(PathPattern::new(pattern).unwrap(), own)];
        let place = PathBuf::from(place);
        let options = ImportOptions { domains, place, ..Default::default() };
        import(&store, source.path(), &options).index().blobs().len()
    };
    assert_eq!(blobs("*.key", ""), 2);
    assert_eq!(blobs("*.key", "sub"), 1);
    assert_eq!(blobs("sub/*.key", "sub"), 2);
    // All of it is private.
    assert_eq!(blobs("sub", "sub"), 1);
    assert_eq!(blobs("**/deep/*", "any/where"), 2);
}

#[test]
fn files_that_not_everybody_may_read_can_be_left_out() {
    let source = tempfile::tempdir().unwrap();
    let put = |path: &str, mode: u32| {
        let path = source.path().join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(&path, path.as_os_str().as_encoded_bytes()).unwrap();
        fs::set_permissions(path, Permissions::from_mode(mode)).unwrap();
    };
    put("open", 0o644);
    put("secret", 0o640);
    put("closed/open", 0o644);
    fs::set_permissions(source.path(), Permissions::from_mode(0o755)).unwrap();
    fs::set_permissions(source.path().join("closed"), Permissions::from_mode(0o750)).unwrap();
    let (_directory, store) = empty_store();
    let options = ImportOptions {
        readers: Readers::Everybody,
        unreadable: Unreadable::Skip,
        ..Default::default()
    };
    let open = import(&store, source.path(), &options);
    let regular = |description: &common::Description| !description.content.is_empty();
    let found = describe_index(&store, &open);
    let files: Vec<_> = found.iter().filter(|(_, d)| regular(d)).map(|(path, _)| path).collect();
    assert_eq!(files, [Path::new("open")]);
    let mut session = store.session().unwrap();
    let options = ImportOptions { readers: Readers::Everybody, ..Default::default() };
    let to = Path::new("/");
    let mut tree = Tree::new();
    session.import_directory(&mut tree, source.path(), to, &options, &mut |_| {}).unwrap_err();
}

#[test]
fn a_file_that_changes_is_an_error_or_consistent() {
    const FIRST: usize = 8 << 20;
    let source = tempfile::tempdir().unwrap();
    let path = source.path().join("busy");
    fs::write(&path, vec![b'1'; FIRST]).unwrap();
    let (_directory, store) = empty_store();
    let stop = AtomicBool::new(false);
    // Whether the writer gets to run during an import is up to the host, so
    // import until it did.
    let noticed = std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut file = File::options().append(true).open(&path).unwrap();
            while !stop.load(Ordering::Relaxed) {
                file.write_all(b"x").unwrap();
            }
        });
        let noticed = (0..100).any(|_| {
            let mut session = store.session().unwrap();
            let mut tree = Tree::new();
            let options = ImportOptions::default();
            let to = Path::new("/");
            match session.import_directory(&mut tree, source.path(), to, &options, &mut |_| {}) {
                Err(StoreError::Changing { path: named }) => named == path,
                Err(error) => panic!("{error}"),
                Ok(report) => {
                    let index = store.open_index(session.put_index(&tree).unwrap()).unwrap();
                    let blob = index.blob(0).unwrap();
                    let bytes = fs::read(store.blob_path(blob.hash)).unwrap();
                    assert_eq!((blob.size, report.bytes), (bytes.len() as u64, blob.size));
                    assert_eq!(blob.hash, blake3::hash(&bytes).into());
                    assert!(bytes[FIRST..].iter().all(|&byte| byte == b'x'));
                    false
                }
            }
        });
        stop.store(true, Ordering::Relaxed);
        noticed
    });
    assert!(noticed);
}

#[test]
fn a_missing_directory_is_named() {
    let (_directory, store) = empty_store();
    let mut session = store.session().unwrap();
    let error = session
        .import_directory(
            &mut Tree::new(),
            Path::new("/nowhere/at all"),
            Path::new("/"),
            &ImportOptions::default(),
            &mut |_| {},
        )
        .unwrap_err();
    assert!(error.to_string().contains("/nowhere/at all"), "{error}");
}

#[test]
fn files_that_did_not_change_are_not_read_again_and_others_are() {
    if !is_root("making files of root") {
        return;
    }
    let directory = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    if rustix::fs::major(directory.path().metadata().unwrap().dev()) == 0 {
        println!("SKIPPED: the file system has no block device");
        return;
    }
    let (_home, store) = empty_store();
    let path = directory.path().join("file");
    fs::write(&path, "first").unwrap();
    std::thread::sleep(Duration::from_secs(4));
    let import = || {
        let mut session = store.session().unwrap();
        let mut tree = Tree::new();
        let options = ImportOptions::default();
        session
            .import_directory(&mut tree, directory.path(), Path::new("/"), &options, &mut |_| {})
            .unwrap();
        let index = session.put_index(&tree).unwrap();
        let described = describe_index(&store, &store.open_index(index).unwrap());
        String::from_utf8(described[Path::new("file")].content.clone()).unwrap()
    };
    assert_eq!(import(), "first");
    // One that says another content shows whether the file is read.
    let table = store.root().join("known-files");
    let mut bytes = fs::read(&table).unwrap();
    let other = {
        let mut session = store.session().unwrap();
        let other = session.put_blob(b"other", &Domain::shared()).unwrap().unwrap();
        session.put_index(&Tree::new()).unwrap();
        other.hash
    };
    assert_eq!(bytes.len(), 48 + 104);
    bytes[48 + 72..].copy_from_slice(other.as_bytes());
    let checksum = *blake3::hash(&bytes[48..]).as_bytes();
    bytes[16..48].copy_from_slice(&checksum);
    fs::write(&table, &bytes).unwrap();
    assert_eq!(import(), "other");
    // A content that is not in the store any more is read.
    fs::remove_file(store.blob_path(other)).unwrap();
    assert_eq!(import(), "first");
    // A change that keeps size and time of the content is seen.
    let modified = fs::metadata(&path).unwrap().modified().unwrap();
    fs::write(&path, "later").unwrap();
    fs::File::options().write(true).open(&path).unwrap().set_modified(modified).unwrap();
    assert_eq!(import(), "later");
    // It is too new to be known, and one from the future is never.
    fs::write(&path, "newer").unwrap();
    assert_eq!(import(), "newer");
    let future = SystemTime::now() + Duration::from_secs(3600);
    fs::File::options().write(true).open(&path).unwrap().set_modified(future).unwrap();
    assert_eq!(import(), "newer");
    store.forget_known_files().unwrap();
    assert_eq!(import(), "newer");
}
