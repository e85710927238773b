//! Directories of the host as sandboxes see them.

use super::*;
use std::fs;
use std::io::Read;
use std::os::unix::fs::symlink;

struct Tree {
    _all: tempfile::TempDir,
    directory: HostDirectory,
}

/// `served/` with an ordinary file, links of every hostile kind, a FIFO and
/// a device; `secret` beside it.
fn tree() -> Tree {
    let all = tempfile::tempdir().unwrap();
    let secret = all.path().join("secret");
    fs::create_dir(&secret).unwrap();
    fs::write(secret.join("key"), "secret").unwrap();
    let served = all.path().join("served");
    fs::create_dir_all(served.join("sub")).unwrap();
    fs::write(served.join("file"), "harmless").unwrap();
    symlink("file", served.join("inner")).unwrap();
    symlink("../secret/key", served.join("up")).unwrap();
    symlink(secret.join("key"), served.join("absolute")).unwrap();
    symlink(&secret, served.join("away")).unwrap();
    symlink("..", served.join("sub/parent")).unwrap();
    symlink("/proc/self/root", served.join("magic")).unwrap();
    rustix::fs::mknodat(CWD, served.join("fifo"), FileType::Fifo, Mode::from_raw_mode(0o666), 0)
        .unwrap();
    let directory = HostDirectory::open(&served).unwrap();
    Tree { _all: all, directory }
}

#[test]
fn an_ordinary_file_is_opened_read_only() {
    let tree = tree();
    let (file, attributes) = tree.directory.open_file(b"file").unwrap();
    let attributes: FileAttributes = bytemuck::pod_read_unaligned(&attributes);
    assert_eq!(attributes.size, 8);
    let mut text = String::new();
    fs::File::from(file.try_clone().unwrap()).read_to_string(&mut text).unwrap();
    assert_eq!(text, "harmless");
    assert_eq!(rustix::io::write(&file, b"x"), Err(Errno::BADF));
}

#[test]
fn nothing_leads_out() {
    let tree = tree();
    for path in [
        "up",
        "absolute",
        "away/key",
        "sub/parent/parent/secret/key",
        "sub/parent/file",
        "magic/etc/passwd",
        "magic",
        "away",
        "inner",
    ] {
        let error = tree.directory.open_file(path.as_bytes()).unwrap_err();
        assert_eq!(error, Errno::LOOP, "{path}");
        if path.contains('/') {
            assert_eq!(tree.directory.stat(path.as_bytes()).unwrap_err(), Errno::LOOP);
        }
        let error = tree.directory.list(path.as_bytes()).unwrap_err();
        assert!(matches!(error, Errno::LOOP | Errno::NOTDIR), "{path}: {error}");
    }
    for path in ["../secret/key", "/etc/passwd", "sub/../../secret/key", "sub/..", "file\0"] {
        assert_eq!(tree.directory.open_file(path.as_bytes()).unwrap_err(), Errno::INVAL);
        assert_eq!(tree.directory.stat(path.as_bytes()).unwrap_err(), Errno::INVAL);
        assert_eq!(tree.directory.list(path.as_bytes()).unwrap_err(), Errno::INVAL);
        assert_eq!(tree.directory.read_link(path.as_bytes()).unwrap_err(), Errno::INVAL);
    }
}

#[test]
fn links_are_reported_and_not_followed() {
    let tree = tree();
    assert_eq!(tree.directory.read_link(b"up").unwrap(), b"../secret/key");
    let attributes: FileAttributes =
        bytemuck::pod_read_unaligned(&tree.directory.stat(b"up").unwrap());
    assert_eq!(attributes.mode >> 12, 0o12);
    assert_eq!(tree.directory.read_link(b"file").unwrap_err(), Errno::INVAL);
}

#[test]
fn only_regular_files_are_opened() {
    let tree = tree();
    assert_eq!(tree.directory.open_file(b"fifo").unwrap_err(), Errno::ACCESS);
    assert_eq!(tree.directory.open_file(b"sub").unwrap_err(), Errno::ISDIR);
    assert_eq!(tree.directory.open_file(b"").unwrap_err(), Errno::ISDIR);
    assert_eq!(tree.directory.open_file(b"none").unwrap_err(), Errno::NOENT);
    let devices = HostDirectory::open(Path::new("/dev")).unwrap();
    assert_eq!(devices.open_file(b"zero").unwrap_err(), Errno::ACCESS);
}

#[test]
fn the_state_of_the_host_looks_empty() {
    let host = HostDirectory::open(Path::new("/")).unwrap();
    host.stat(b"proc").unwrap();
    assert_eq!(host.stat(b"proc/self").unwrap_err(), Errno::NOENT);
    assert_eq!(host.open_file(b"proc/version").unwrap_err(), Errno::NOENT);
    assert_eq!(host.open_file(b"proc/1/environ").unwrap_err(), Errno::NOENT);
    assert!(host.list(b"proc").unwrap().page(0).is_empty());
    assert!(host.list(b"sys").unwrap().page(0).is_empty());
}

#[test]
fn the_state_of_the_host_is_no_root() {
    for path in ["/proc", "/sys", "/proc/self"] {
        let error = HostDirectory::open(Path::new(path)).unwrap_err();
        assert!(error.to_string().contains("no sandbox sees"), "{path}: {error}");
    }
}

#[test]
fn hidden_directories_look_empty_by_every_path() {
    let all = tempfile::tempdir().unwrap();
    let home = all.path().join("deep/home");
    fs::create_dir_all(home.join("store")).unwrap();
    fs::write(home.join("store/key"), "secret").unwrap();
    let late = all.path().join("late");
    // It may be known by a link, as any directory.
    symlink(&home, all.path().join("link")).unwrap();
    let policy =
        HostPolicy { hidden: vec![all.path().join("link"), late.clone()], ..HostPolicy::default() };
    let directory = HostDirectory::open_with(all.path(), &policy).unwrap();
    let attributes = directory.stat(b"deep/home").unwrap();
    let attributes: FileAttributes = bytemuck::pod_read_unaligned(&attributes);
    assert_eq!(attributes.mode, 0o40555);
    assert!(directory.list(b"deep/home").unwrap().page(0).is_empty());
    for path in ["deep/home/store/key", "deep/home/store", "deep/home/daemon.json"] {
        assert_eq!(directory.stat(path.as_bytes()).unwrap_err(), Errno::NOENT);
        assert_eq!(directory.open_file(path.as_bytes()).unwrap_err(), Errno::NOENT);
    }
    fs::rename(all.path().join("deep"), all.path().join("moved")).unwrap();
    assert_eq!(directory.open_file(b"moved/home/store/key").unwrap_err(), Errno::NOENT);
    fs::rename(all.path().join("moved"), all.path().join("deep")).unwrap();

    fs::create_dir(&late).unwrap();
    fs::write(late.join("key"), "secret").unwrap();
    std::thread::sleep(std::time::Duration::from_millis(300));
    assert_eq!(directory.open_file(b"late/key").unwrap_err(), Errno::NOENT);

    for path in [home.clone(), home.join("store")] {
        let error = HostDirectory::open_with(&path, &policy).unwrap_err();
        assert!(error.to_string().contains("Thaw's own state"), "{error}");
    }
}

/// Directories that were passed before are taken for the same only while they are.
#[test]
fn a_directory_in_the_place_of_another_is_found() {
    let all = tempfile::tempdir().unwrap();
    let at = |path: &str| all.path().join(path);
    let put = |directory: &str| {
        fs::create_dir_all(at(directory)).unwrap();
        fs::write(at(directory).join("name"), directory).unwrap();
    };
    let directory = HostDirectory::open(all.path()).unwrap();
    let directory = HostDirectory { passed_max: PASSED_MAX, ..directory };
    let read = |path: &str| {
        let mut text = String::new();
        let (file, _) = directory.open_file(path.as_bytes())?;
        fs::File::from(file).read_to_string(&mut text).unwrap();
        Ok::<_, Errno>(text)
    };
    put("a/b/c");
    put("other/b/c");
    for _ in 0..2 {
        assert_eq!(read("a/b/c/name").unwrap(), "a/b/c");
        assert_eq!(read("other/b/c/name").unwrap(), "other/b/c");
        assert_eq!(directory.passed().len(), 3);
    }
    fs::rename(at("a/b"), at("moved")).unwrap();
    assert_eq!(read("a/b/c/name").unwrap_err(), Errno::NOENT);
    fs::rename(at("other/b"), at("a/b")).unwrap();
    assert_eq!(read("a/b/c/name").unwrap(), "other/b/c");
    assert_eq!(read("moved/c/name").unwrap(), "a/b/c");
    fs::remove_dir_all(at("a/b")).unwrap();
    symlink("../moved", at("a/b")).unwrap();
    assert_eq!(read("a/b/c/name").unwrap_err(), Errno::LOOP);
    fs::remove_file(at("a/b")).unwrap();
    put("a/b/c");
    assert_eq!(read("a/b/c/name").unwrap(), "a/b/c");
    let deep = "d/".repeat(2 * PASSED_MAX);
    put(&deep);
    assert_eq!(read(&format!("{deep}name")).unwrap(), deep);
    assert_eq!(directory.passed().len(), PASSED_MAX);
}

#[test]
fn a_list_with_attributes_says_what_a_look_says_or_nothing() {
    let all = tempfile::tempdir().unwrap();
    let policy = HostPolicy { hidden: vec![all.path().join("home")], ..HostPolicy::default() };
    for name in ["home", "sub"] {
        fs::create_dir(all.path().join(name)).unwrap();
    }
    fs::write(all.path().join("file"), "content").unwrap();
    symlink("/etc/passwd", all.path().join("link")).unwrap();
    let own = HostDirectory::open_with(all.path(), &policy).unwrap();
    assert_eq!(check_attributes(&own), ["home"]);
    let root = HostDirectory::open("/".as_ref()).unwrap();
    let page = root.page_with_attributes(&root.list(b"").unwrap(), 0);
    let proc = entries(&page).into_iter().find(|(name, _)| name == "proc").unwrap();
    assert_eq!(proc.1.mode, 0, "another mount");
}

/// The entries of a page with attributes.
fn entries(page: &[u8]) -> Vec<(String, FileAttributes)> {
    let (mut rest, mut found) = (page, Vec::new());
    while let Some((head, tail)) = rest.split_at_checked(size_of::<DirectoryEntry>()) {
        let head: DirectoryEntry = bytemuck::pod_read_unaligned(head);
        let (name, tail) = tail.split_at((head.name_len as usize).next_multiple_of(8));
        let (told, tail) = tail.split_at(size_of::<FileAttributes>());
        let name = String::from_utf8(name[..head.name_len as usize].to_vec()).unwrap();
        found.push((name, bytemuck::pod_read_unaligned(told)));
        rest = tail;
    }
    found
}

/// The entries of a directory of which its list tells no attributes; all others are as they are when
/// they are looked at.
fn check_attributes(directory: &HostDirectory) -> Vec<String> {
    let listing = directory.list(b"").unwrap();
    let all = entries(&directory.page_with_attributes(&listing, 0));
    assert_eq!(all.len(), listing.entries.len());
    let (untold, told): (Vec<_>, Vec<_>) = all.into_iter().partition(|(_, told)| told.mode == 0);
    for (name, told) in told {
        assert_eq!(bytes_of(&told), directory.stat(name.as_bytes()).unwrap(), "{name}");
    }
    untold.into_iter().map(|(name, _)| name).collect()
}

#[test]
fn a_directory_is_listed_in_order_and_in_pages() {
    let all = tempfile::tempdir().unwrap();
    for number in 0..3000 {
        fs::write(all.path().join(format!("file-{number:04}")), "").unwrap();
    }
    let listing = HostDirectory::open(all.path()).unwrap().list(b"").unwrap();
    let mut names = Vec::new();
    let mut pages = 0;
    loop {
        let page = listing.page(names.len() as u64);
        if page.is_empty() {
            break;
        }
        pages += 1;
        let mut rest = page.as_slice();
        while !rest.is_empty() {
            let (entry, tail) = rest.split_at(size_of::<DirectoryEntry>());
            let entry: DirectoryEntry = bytemuck::pod_read_unaligned(entry);
            assert_eq!(entry.file_type, 8);
            let len = entry.name_len as usize;
            names.push(String::from_utf8(tail[..len].to_vec()).unwrap());
            rest = &tail[len.next_multiple_of(8)..];
        }
    }
    assert!(pages > 1);
    assert_eq!(names.len(), 3000);
    assert!(names.is_sorted());
    assert!(listing.page(u64::MAX).is_empty());
}
