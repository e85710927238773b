//! Volumes, as a hostile sandbox asks for them.

use super::*;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;

struct Tree {
    all: tempfile::TempDir,
    volume: Arc<Volume>,
}

impl Tree {
    fn new(quota: u64) -> Self {
        let all = tempfile::tempdir().unwrap();
        fs::create_dir(all.path().join("files")).unwrap();
        fs::write(all.path().join("secret"), "secret").unwrap();
        let own = |name: &str| {
            let mut options = File::options();
            options.read(true).write(true).create(true).truncate(false);
            options.open(all.path().join(name)).unwrap()
        };
        let files = all.path().join("files");
        let volume = Volume::open(&files, own("usage"), own("users"), quota).unwrap();
        Self { volume: Arc::new(volume), all }
    }

    fn mount(&self, access: BoundAccess) -> MountedVolume {
        MountedVolume::new(&VolumeMount { volume: self.volume.clone(), access })
    }

    fn path(&self, name: &str) -> PathBuf {
        self.all.path().join("files").join(name)
    }

    fn used(&self) -> u64 {
        self.volume.usage().unwrap().0
    }
}

fn ask(
    mount: &MountedVolume,
    operation: u32,
    a: u64,
    b: u64,
    tail: &[u8],
) -> Result<Answer, Errno> {
    mount.serve(&BindRequest { mount: 0, operation, a, b, c: 0 }, tail)
}

const CREATE: u64 = 0o2 | 0o100 | 0o200;

/// Opens a file as a sandbox does: its handle, and the descriptor that it has.
fn open(mount: &MountedVolume, flags: u64, path: &[u8]) -> Result<(u64, File), Errno> {
    let answer = ask(mount, BIND_OPEN, flags, 0o644, path)?;
    let opened: OpenedVolumeFile = bytemuck::pod_read_unaligned(&answer.tail);
    Ok((opened.handle, answer.descriptor.unwrap().into()))
}

#[test]
fn who_lies_about_closing_a_removed_file_keeps_nothing() {
    let tree = Tree::new(1 << 20);
    let mount = tree.mount(BoundAccess::Write);
    let (handle, kept) = open(&mount, CREATE, b"file").unwrap();
    ask(&mount, VOLUME_GROW, handle, 500_000, b"").unwrap();
    assert_eq!(tree.used(), NAME_COST + blocks(500_000));
    kept.write_all_at(b"x", 499_999).unwrap();
    ask(&mount, BIND_UNLINK, 0, 0, b"file").unwrap();
    assert_eq!(tree.used(), blocks(500_000), "it counts while it is open");
    ask(&mount, BIND_CLOSE, handle, 0, b"").unwrap();
    assert_eq!((tree.used(), kept.metadata().unwrap().len()), (0, 0));
    assert_eq!(ask(&mount, VOLUME_GROW, handle, 4096, b"").err(), Some(Errno::BADF));
    // One that another sandbox has open, too, stays whole until that one ends.
    let (first, kept) = open(&mount, CREATE, b"file").unwrap();
    let other = tree.mount(BoundAccess::Write);
    open(&other, 0o2, b"file").unwrap();
    ask(&mount, VOLUME_GROW, first, 4096, b"").unwrap();
    ask(&mount, BIND_UNLINK, 0, 0, b"file").unwrap();
    ask(&mount, BIND_CLOSE, first, 0, b"").unwrap();
    assert_eq!((tree.used(), kept.metadata().unwrap().len()), (4096, 4096));
    drop(other);
    assert_eq!((tree.used(), kept.metadata().unwrap().len()), (0, 0));
}

#[test]
fn no_request_gets_beyond_the_quota() {
    let tree = Tree::new(10 * 4096);
    let mount = tree.mount(BoundAccess::Write);
    let (handle, _) = open(&mount, CREATE, b"file").unwrap();
    for (operation, b) in [
        (VOLUME_GROW, 10 * 4096),
        (VOLUME_GROW, u64::MAX),
        (VOLUME_APPEND, 9 * 4096 + 1),
        (BIND_FTRUNCATE, 1 << 40),
    ] {
        let refused = ask(&mount, operation, handle, b, b"");
        assert_eq!(refused.err(), Some(Errno::DQUOT), "{operation} {b}");
    }
    assert_eq!(ask(&mount, BIND_TRUNCATE, 1 << 40, 0, b"file").err(), Some(Errno::DQUOT));
    ask(&mount, VOLUME_APPEND, handle, 9 * 4096, b"").unwrap();
    assert_eq!(ask(&mount, BIND_MKDIR, 0o755, 0, b"d").err(), Some(Errno::DQUOT));
    assert_eq!(ask(&mount, BIND_LINK, 0, 0, b"file\0twin").err(), Some(Errno::DQUOT));
    assert_eq!(ask(&mount, BIND_SYMLINK, 0, 0, b"link\0file").err(), Some(Errno::DQUOT));
    assert_eq!(open(&mount, CREATE, b"more").err(), Some(Errno::DQUOT));
    ask(&mount, BIND_FTRUNCATE, handle, 0, b"").unwrap();
    // What fails is not counted.
    assert_eq!(open(&mount, CREATE, b"file").err(), Some(Errno::EXIST));
    assert_eq!(tree.used(), NAME_COST);
    open(&mount, CREATE, b"other").unwrap();
    ask(&mount, BIND_RENAME, 0, 0, b"other\0file").unwrap();
    assert_eq!(tree.used(), NAME_COST);
}

#[test]
fn nothing_outside_is_reached_and_what_is_open_has_a_bound() {
    let tree = Tree::new(1 << 30);
    let mount = tree.mount(BoundAccess::Write);
    ask(&mount, BIND_SYMLINK, 0, 0, b"out\0../secret").unwrap();
    for path in [&b"out"[..], b"../secret", b"/etc/passwd", b"."] {
        let refused = open(&mount, 0, path).err();
        assert!(matches!(refused, Some(Errno::LOOP | Errno::INVAL)), "{refused:?}");
    }
    let (first, _) = open(&mount, CREATE, b"file").unwrap();
    for _ in 1..OPEN_MAX {
        open(&mount, 0, b"file").unwrap();
    }
    assert_eq!(open(&mount, 0, b"file").err(), Some(Errno::MFILE));
    assert_eq!(open(&mount, CREATE, b"new").err(), Some(Errno::MFILE));
    ask(&mount, BIND_CLOSE, first, 0, b"").unwrap();
    let others: Vec<_> =
        (0..OPEN_OF_ALL_MAX / OPEN_MAX).map(|_| tree.mount(BoundAccess::Read)).collect();
    let opened = others.iter().flat_map(|mount| (0..OPEN_MAX).map(move |_| mount));
    let refused = opened.filter_map(|mount| open(mount, 0, b"file").err()).collect::<Vec<_>>();
    assert_eq!(refused, vec![Errno::NFILE; OPEN_MAX - 1]);
}

#[test]
fn a_reader_changes_nothing() {
    let tree = Tree::new(1 << 20);
    fs::write(tree.path("file"), "content").unwrap();
    let mount = tree.mount(BoundAccess::Read);
    let (handle, file) = open(&mount, 0, b"file").unwrap();
    assert!(file.write_at(b"x", 0).is_err());
    assert_eq!(open(&mount, 0o2, b"file").err(), Some(Errno::ROFS));
    for (operation, a, tail) in [
        (VOLUME_GROW, handle, &b""[..]),
        (VOLUME_APPEND, handle, b""),
        (BIND_FTRUNCATE, handle, b""),
        (BIND_TRUNCATE, 0, b"file"),
        (BIND_UNLINK, 0, b"file"),
        (BIND_MKDIR, 0, b"d"),
        (BIND_RENAME, 0, b"file\0other"),
        (BIND_LINK, 0, b"file\0other"),
        (BIND_SYMLINK, 0, b"other\0file"),
        (BIND_CHMOD, 0, b"file"),
    ] {
        let refused = ask(&mount, operation, a, 9, tail).err();
        assert_eq!(refused, Some(Errno::ROFS), "{operation}");
    }
}

#[test]
fn locks_are_the_sandbox_and_end_with_it() {
    let tree = Tree::new(1 << 20);
    let (one, two) = (tree.mount(BoundAccess::Write), tree.mount(BoundAccess::Write));
    let (first, _) = open(&one, CREATE, b"file").unwrap();
    let (again, _) = open(&one, 0o2, b"file").unwrap();
    let (other, _) = open(&two, 0o2, b"file").unwrap();
    ask(&one, VOLUME_LOCK_WRITE, first, 5, b"").unwrap();
    // All of a sandbox is one.
    ask(&one, VOLUME_LOCK_READ, again, 9, b"").unwrap();
    assert_eq!(ask(&two, VOLUME_LOCK_READ, other, 7, b"").err(), Some(Errno::AGAIN));
    ask(&two, VOLUME_LOCK_READ, other, 9, b"").unwrap();
    let found = ask(&two, VOLUME_TEST_LOCK, other, 0, &0_u64.to_ne_bytes()).unwrap();
    let found: VolumeLock = bytemuck::pod_read_unaligned(&found.tail);
    assert_eq!(found, VolumeLock { start: 5, len: 4, is_write: 1 });
    assert_eq!(ask(&two, VOLUME_FLOCK, other, 3, b"").err(), Some(Errno::INVAL));
    ask(&one, VOLUME_FLOCK, first, 2, b"").unwrap();
    assert_eq!(ask(&two, VOLUME_FLOCK, other, 1, b"").err(), Some(Errno::AGAIN));
    drop(one);
    ask(&two, VOLUME_FLOCK, other, 2, b"").unwrap();
    ask(&two, VOLUME_LOCK_WRITE, other, 0, b"").unwrap();
}
