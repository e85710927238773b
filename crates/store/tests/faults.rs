//! The store survives being killed, filled up, and used by many at once.

mod common;

use std::fs;
use std::io::Write;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, SystemTime};

use common::{SmallDisk, empty_store, is_root, start_victim};
use serde_json::json;
use thaw_store::import::ImportOptions;
use thaw_store::{Name, NewFunction, Removal, Repair, Store, StoreError, Tree};

/// Tells the process that is to be killed where to work.
const HOME: &str = "THAW_TEST_VICTIM_HOME";
const SOURCE: &str = "THAW_TEST_VICTIM_SOURCE";

/// Does everything that writes to the store, once. Equal `seed`s give equal files.
fn build(store: &Store, source: &Path, function: &str, seed: u64) -> thaw_store::Result<()> {
    let mut session = store.session()?;
    let mut tree = Tree::new();
    let options = ImportOptions::default();
    session.import_directory(&mut tree, source, Path::new("/"), &options, &mut |_| {})?;
    for number in 0..20 {
        let text = format!("{seed} {number}");
        let blob = session.put_blob(text.as_bytes(), &options.domain)?;
        let node = thaw_store::index::Node {
            content: thaw_store::index::Content::Regular(blob),
            attributes: thaw_store::index::Attributes::root(0o644),
        };
        tree.add_at(&Path::new("/new").join(number.to_string()), node)?;
    }
    let index = session.put_index(&tree)?;
    let image = session.new_image_file()?;
    for page in 0..64u64 {
        let content = [seed as u8 | 1; 4096];
        image.file().write_all_at(&content, page << 16).map_err(|source| StoreError::Io {
            action: "write",
            path: PathBuf::from("the image"),
            source,
        })?;
    }
    let image = session.commit_image(image)?;
    let name = Name::new(function)?;
    let config = json!({ "seed": seed });
    session.put_function(NewFunction { name, config, index, image: Some(image) })?;
    drop(session);
    store.put_working_set(image, &seed.to_le_bytes())
}

fn sample(root: &Path) {
    for number in 0..150 {
        let path = root.join(format!("{}/{number}", number % 7));
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, format!("file {number}").repeat(number)).unwrap();
    }
    fs::write(root.join("large"), vec![7; 3 << 20]).unwrap();
}

fn assert_intact(store: &Store) {
    let report = store.verify(Repair::Report, &mut |_| {}).unwrap();
    assert_eq!(report.problems, []);
}

/// Not a test: the process that [`killed_at_any_moment_the_store_stays_usable`]
/// starts and kills.
#[test]
#[ignore = "the victim of another test"]
fn victim() {
    let (Some(home), Some(source)) = (std::env::var_os(HOME), std::env::var_os(SOURCE)) else {
        panic!("this is started by another test");
    };
    println!("ready");
    std::io::stdout().flush().unwrap();
    for seed in 0.. {
        let store = Store::open(Path::new(&home)).unwrap();
        build(&store, Path::new(&source), "f", seed).unwrap();
        if seed % 3 == 2 {
            store.gc(Removal::Remove).unwrap();
        }
        if seed % 5 == 4 {
            store.remove_function(&Name::new("f").unwrap()).unwrap();
        }
    }
}

#[test]
fn killed_at_any_moment_the_store_stays_usable() {
    let source = tempfile::tempdir().unwrap();
    sample(source.path());
    let directory = tempfile::tempdir().unwrap();
    let home = directory.path().join("home");
    let seed = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap().as_nanos() as u64;
    println!("seed {seed}");
    let mut random = seed;
    let mut left_something = 0;
    for _ in 0..30 {
        let mut child = start_victim(&[(HOME, &home), (SOURCE, source.path())]);
        random = random.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        std::thread::sleep(Duration::from_micros((random >> 33) % 150_000));
        child.kill().unwrap();
        child.wait().unwrap();
        let temporary = home.join("tmp");
        let count = |path: &Path| fs::read_dir(path).map_or(0, |entries| entries.count());
        left_something += usize::from(count(&temporary) > 0);
        let store = Store::open(&home).unwrap();
        assert_eq!(count(&temporary), 0);
        assert_intact(&store);
        let functions = store.list_functions().unwrap();
        assert!(functions.damaged.is_empty());
        store.gc(Removal::Remove).unwrap();
        assert!(store.gc(Removal::DryRun).unwrap().is_empty());
        assert_intact(&store);
        for function in functions.records {
            let seed = function.config["seed"].as_u64().unwrap();
            let image = function.image.unwrap();
            assert!(store.open_image(image).is_ok());
            // Written after the function; perhaps it did not come so far.
            if let Some(working_set) = store.working_set(image).unwrap() {
                assert_eq!(working_set.len(), seed.to_le_bytes().len());
            }
        }
    }
    // Otherwise no kill has hit anything and the test shows nothing.
    assert!(left_something > 0);
    let store = Store::open(&home).unwrap();
    build(&store, source.path(), "f", 1).unwrap();
}

#[test]
fn many_at_once_with_the_collector() {
    let source = tempfile::tempdir().unwrap();
    sample(source.path());
    let (_directory, store) = empty_store();
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let builders: Vec<_> = (0..3)
            .map(|builder| {
                let (store, source) = (store.clone(), source.path());
                scope.spawn(move || {
                    for round in 0..12 {
                        // Two builders share a function, all share files.
                        let function = if builder == 2 { "own" } else { "common" };
                        build(&store, source, function, builder * 4 + round % 5).unwrap();
                    }
                })
            })
            .collect();
        let opener = scope.spawn(|| {
            while !done.load(Ordering::Relaxed) {
                // Cleans up after the dead, which must not hit the living.
                Store::open(store.root()).unwrap();
            }
        });
        let collector = scope.spawn(|| {
            let mut collected = 0;
            while !done.load(Ordering::Relaxed) || collected == 0 {
                match store.gc_within(Removal::Remove, Duration::from_millis(200)) {
                    Ok(_) => collected += 1,
                    Err(StoreError::Busy { .. }) => {}
                    Err(error) => panic!("{error}"),
                }
            }
        });
        let results: Vec<_> = builders.into_iter().map(|builder| builder.join()).collect();
        done.store(true, Ordering::Relaxed);
        opener.join().unwrap();
        collector.join().unwrap();
        assert!(results.iter().all(Result::is_ok));
    });
    assert_intact(&store);
    assert_eq!(store.list_functions().unwrap().records.len(), 2);
}

#[test]
fn a_full_disk_is_a_clear_error_and_loses_nothing() {
    if !is_root("mounting a small file system") {
        return;
    }
    let disk = SmallDisk::mount(8);
    let store = Store::open(&disk.0.path().join("home")).unwrap();
    let source = tempfile::tempdir().unwrap();
    fs::write(source.path().join("small"), "small").unwrap();
    build(&store, source.path(), "f", 1).unwrap();
    let before = store.get_function(&Name::new("f").unwrap()).unwrap();
    let large = tempfile::tempdir().unwrap();
    let mut number = 0u32;
    for (name, len) in [("one", 16 << 20), ("many", 900 << 10)] {
        for part in 0..(16 << 20) / len {
            let content: Vec<u8> = std::iter::repeat_with(|| {
                number = number.wrapping_mul(1664525).wrapping_add(1013904223);
                (number >> 24) as u8
            })
            .take(len)
            .collect();
            let path = large.path().join(name).join(part.to_string());
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, content).unwrap();
        }
        let error = build(&store, &large.path().join(name), "f", 2).unwrap_err();
        assert!(matches!(error, StoreError::NoSpace { .. }), "{error}");
        assert!(error.to_string().contains("is full"), "{error}");
        // Nothing is left of it, so there is room again.
        assert_eq!(fs::read_dir(store.root().join("tmp")).unwrap().count(), 0);
        assert_intact(&store);
        assert_eq!(store.get_function(&Name::new("f").unwrap()).unwrap(), before);
        store.put_working_set(before.image.unwrap(), &vec![1; 1 << 20]).unwrap();
    }
    // Images and working sets meet the same end.
    let mut session = store.session().unwrap();
    let image = session.new_image_file().unwrap();
    let full =
        (0..16).find_map(|part| image.file().write_all_at(&vec![1; 1 << 20], part << 20).err());
    assert!(full.is_some());
    let error = store.put_working_set(before.image.unwrap(), &vec![2; 1 << 20]).unwrap_err();
    assert!(matches!(error, StoreError::NoSpace { .. }), "{error}");
    assert_eq!(store.working_set(before.image.unwrap()).unwrap().unwrap(), vec![1; 1 << 20]);
    drop((image, session));
    store.gc(Removal::Remove).unwrap();
    build(&store, source.path(), "f", 3).unwrap();
    assert_intact(&store);
}
