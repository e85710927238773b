//! Volumes, as a hostile sandbox asks for them.

mod delegated;
mod left;

use super::limits::{LISTING_MAX, OPEN_MAX, RANGES_MAX, Shared};
use super::tree::DEPTH_MAX;
use super::*;
use crate::broker::Answer;
use std::collections::BTreeMap;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use thaw_abi::control::{DirectoryEntry, FileAttributes};

struct Tree {
    all: tempfile::TempDir,
    of_tenant: VolumeShare,
    volume: Arc<Volume>,
}

impl Tree {
    fn new(quota: u64) -> Self {
        Self::with_share(quota, Shared::new(4096, 64 << 20).of_tenant())
    }

    fn with_share(quota: u64, of_tenant: VolumeShare) -> Self {
        let all = tempfile::tempdir().unwrap();
        fs::create_dir(all.path().join("files")).unwrap();
        fs::write(all.path().join("secret"), "secret").unwrap();
        let volume = Arc::new(open_volume(&all, quota).unwrap());
        Self { volume, of_tenant, all }
    }

    fn mount(&self, access: BoundAccess) -> MountedVolume {
        self.mount_with(access, &Share::default())
    }

    fn mount_with(&self, access: BoundAccess, share: &Share) -> MountedVolume {
        let (volume, of_tenant) = (self.volume.clone(), self.of_tenant.clone());
        let mount = VolumeMount { volume, access, of_tenant };
        MountedVolume::new(&mount, share.clone(), 0)
    }

    fn path(&self, name: &str) -> PathBuf {
        self.all.path().join("files").join(name)
    }

    fn used(&self) -> u64 {
        self.volume.usage().unwrap().0
    }
}

/// Opens a volume by descriptions of its own, as each process does.
fn open_volume(all: &tempfile::TempDir, quota: u64) -> io::Result<Volume> {
    open_volume_with(all, quota, false)
}

fn open_volume_with(
    all: &tempfile::TempDir,
    quota: u64,
    are_some_left: bool,
) -> io::Result<Volume> {
    let own = |name: &str| {
        let mut options = File::options();
        options.read(true).write(true).create(true).truncate(false);
        options.open(all.path().join(name)).unwrap()
    };
    let lengths = Some(all.path().join("lengths"));
    let own = OwnFiles { usage: own("usage"), users: own("users"), lengths, are_some_left };
    Volume::open(&all.path().join("files"), own, quota, FileNumbers::default())
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

/// What a request for all names of a path says: the error behind them, and what they stand for.
fn walk(mount: &MountedVolume, skip: u64, path: &[u8]) -> (i32, Vec<FileAttributes>) {
    let answer = ask(mount, BIND_WALK, skip, 0, path).unwrap().tail;
    let (head, found) = answer.split_at(std::mem::size_of::<Walked>());
    let head: Walked = bytemuck::pod_read_unaligned(head);
    let found = found.chunks_exact(std::mem::size_of::<FileAttributes>());
    (head.errno, found.map(bytemuck::pod_read_unaligned).collect())
}

#[test]
fn a_path_is_walked_as_its_names_are_looked_at() {
    let tree = Tree::new(1 << 20);
    let mount = tree.mount(BoundAccess::Write);
    ask(&mount, BIND_MKDIR, 0o755, 0, b"a").unwrap();
    ask(&mount, BIND_MKDIR, 0o755, 0, b"a/b").unwrap();
    let (handle, file) = open(&mount, CREATE, b"a/b/file").unwrap();
    file.write_all_at(b"x", 0).unwrap();
    ask(&mount, VOLUME_GROW, handle, 100, b"").unwrap();
    let stat = |path: &[u8]| {
        let answer = ask(&mount, BIND_STAT, 0, 0, path).unwrap().tail;
        bytemuck::pod_read_unaligned::<FileAttributes>(&answer)
    };
    let names = [stat(b"a"), stat(b"a/b"), stat(b"a/b/file")];
    assert_eq!(names[2].size, 100);
    assert_eq!(walk(&mount, 0, b"a/b/file"), (0, names.to_vec()));
    assert_eq!(walk(&mount, 2, b"a/b/file"), (0, names[2..].to_vec()));
    assert_eq!(walk(&mount, u64::MAX, b"a/b/file"), (0, vec![]));
    assert_eq!(walk(&mount, 1, b"a/c/file"), (Errno::NOENT.raw_os_error(), vec![]));
    assert_eq!(
        walk(&mount, 1, b"a/b/file/no"),
        (Errno::NOTDIR.raw_os_error(), names[1..].to_vec())
    );
    assert_eq!(walk(&mount, 0, b"a/../a").0, Errno::INVAL.raw_os_error());
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
fn bytes_that_make_a_file_longer_come_with_the_request() {
    let tree = Tree::new(10 * 4096);
    let (mount, reader) = (tree.mount(BoundAccess::Write), tree.mount(BoundAccess::Read));
    let (handle, file) = open(&mount, CREATE, b"file").unwrap();
    let at = |answer: Result<Answer, Errno>| {
        answer.map(|answer| u64::from_ne_bytes(answer.tail.try_into().unwrap()))
    };
    assert_eq!(at(ask(&mount, VOLUME_WRITE, handle, VOLUME_END, b"begin")), Ok(0));
    assert_eq!(at(ask(&mount, VOLUME_WRITE, handle, VOLUME_END, b"ning")), Ok(5));
    assert_eq!(at(ask(&mount, VOLUME_WRITE, handle, 5000, b"end")), Ok(5000));
    assert_eq!(at(ask(&mount, VOLUME_WRITE, handle, 1, b"E")), Ok(1));
    let mut bytes = vec![0; 5003];
    file.read_exact_at(&mut bytes, 0).unwrap();
    assert!(bytes.starts_with(b"bEginning\0") && bytes.ends_with(b"\0end"));
    assert_eq!(tree.used(), NAME_COST + 8192);
    assert_eq!(at(ask(&mount, VOLUME_WRITE, handle, 1 << 16, b"")), Err(Errno::INVAL));
    assert_eq!(file.metadata().unwrap().blocks(), 16, "it keeps no more of the disk");
    for offset in [9 * 4096, u64::MAX - 1, 1 << 40] {
        let refused = at(ask(&mount, VOLUME_WRITE, handle, offset, b"more"));
        assert!(matches!(refused, Err(Errno::DQUOT | Errno::FBIG)), "{offset} {refused:?}");
    }
    assert_eq!((file.metadata().unwrap().len(), tree.used()), (5003, NAME_COST + 8192));
    let (theirs, _) = open(&reader, 0, b"file").unwrap();
    assert_eq!(at(ask(&reader, VOLUME_WRITE, theirs, 0, b"x")), Err(Errno::ROFS));
    let (theirs, _) = open(&mount, 0, b"file").unwrap();
    assert!(at(ask(&mount, VOLUME_WRITE, theirs, 0, b"x")).is_err(), "it is open to be read");
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

#[test]
fn descriptors_are_counted_for_a_sandbox_and_for_its_tenant() {
    // Half of them are for one tenant.
    let of_tenant = Shared::new(2 * (OPEN_MAX + 4), 0).of_tenant();
    let [one, two] = [(); 2].map(|()| Tree::with_share(1 << 20, of_tenant.clone()));
    let share = Share::default();
    let mounts = [&one, &two].map(|tree| tree.mount_with(BoundAccess::Write, &share));
    for mount in &mounts {
        open(mount, CREATE, b"file").unwrap();
        for _ in 1..OPEN_MAX / 2 {
            open(mount, 0, b"file").unwrap();
        }
    }
    // Both volumes together, of this sandbox.
    assert_eq!(mounts.each_ref().map(|m| open(m, 0, b"file").err()), [Some(Errno::MFILE); 2]);
    let other = two.mount(BoundAccess::Write);
    let handles = [CREATE, CREATE, CREATE].iter().zip([b"a", b"b", b"c"]);
    let handles: Vec<_> =
        handles.map(|(&flags, name)| open(&other, flags, name).unwrap().0).collect();
    // One more descriptor holds locks, in either volume.
    ask(&mounts[0], VOLUME_FLOCK, 1, 1, b"").unwrap();
    assert_eq!(ask(&other, VOLUME_FLOCK, handles[0], 1, b"").err(), Some(Errno::NOLCK));
    assert_eq!(open(&other, 0, b"file").err(), Some(Errno::NFILE));
    drop(mounts);
    ask(&other, VOLUME_FLOCK, handles[0], 1, b"").unwrap();
    open(&other, 0, b"file").unwrap();
}

#[test]
fn a_tenant_that_takes_all_it_can_leaves_half_of_everything_to_others() {
    let shared = Shared::new(40, LISTING_MAX);
    let [greedy, other] = [(); 2].map(|()| Tree::with_share(1 << 30, shared.of_tenant()));
    // In all of its sandboxes.
    let mounts = [(); 2].map(|()| greedy.mount(BoundAccess::Write));
    let (first, _) = open(&mounts[0], CREATE, b"file").unwrap();
    let opened = |mount: &MountedVolume| open(mount, 0, b"file").map(drop);
    assert!((0..18).all(|at| opened(&mounts[at % 2]).is_ok()));
    ask(&mounts[0], VOLUME_FLOCK, first, 1, b"").unwrap();
    assert_eq!(mounts.each_ref().map(opened), [Err(Errno::NFILE); 2]);
    let mount = other.mount(BoundAccess::Write);
    let (own, _) = open(&mount, CREATE, b"file").unwrap();
    ask(&mount, VOLUME_FLOCK, own, 1, b"").unwrap();
    assert!((0..8).all(|_| opened(&mount).is_ok()));
    assert_eq!(opened(&mount), Err(Errno::NFILE));
    for tree in [&greedy, &other] {
        fs::create_dir(tree.path("d")).unwrap();
        for number in 0..6_000 {
            File::create(tree.path(&format!("d/{number:0255}"))).unwrap();
        }
    }
    assert!(!ask(&mounts[0], BIND_LIST, 0, 0, b"d").unwrap().tail.is_empty());
    assert!(ask(&mounts[1], BIND_LIST, 0, 0, b"d").err() == Some(Errno::NOMEM));
    assert!(!ask(&mount, BIND_LIST, 0, 0, b"d").unwrap().tail.is_empty());
}

#[test]
fn locked_ranges_have_a_bound() {
    let tree = Tree::new(1 << 20);
    let share = Share::default();
    let mounts = [(); 2].map(|()| tree.mount_with(BoundAccess::Write, &share));
    let lock = |mount: &MountedVolume, operation, a, b, c| {
        mount.serve(&BindRequest { mount: 0, operation, a, b, c }, b"").map(drop)
    };
    let (handle, _) = open(&mounts[0], CREATE, b"file").unwrap();
    let (other, _) = open(&mounts[1], CREATE, b"other").unwrap();
    for at in 0..RANGES_MAX as u64 {
        lock(&mounts[0], VOLUME_LOCK_READ, handle, 2 * at, 1).unwrap();
    }
    let refused = Err(Errno::NOLCK);
    assert_eq!(lock(&mounts[0], VOLUME_LOCK_READ, handle, 1 << 30, 1), refused);
    assert_eq!(lock(&mounts[1], VOLUME_LOCK_READ, other, 0, 1), refused);
    // One that joins two others needs no place.
    lock(&mounts[0], VOLUME_LOCK_READ, handle, 1, 1).unwrap();
    lock(&mounts[1], VOLUME_LOCK_WRITE, other, 0, 10).unwrap();
    assert_eq!(lock(&mounts[1], VOLUME_UNLOCK, other, 5, 1), refused, "it would be two");
    ask(&mounts[0], BIND_CLOSE, handle, 0, b"").unwrap();
    lock(&mounts[1], VOLUME_UNLOCK, other, 5, 1).unwrap();
}

#[test]
fn listings_have_a_bound() {
    let shared = Shared::new(4096, 2 * LISTING_MAX);
    let tree = Tree::with_share(1 << 40, shared.of_tenant());
    let (one, two) = (tree.mount(BoundAccess::Write), tree.mount(BoundAccess::Read));
    // Names of 255 bytes.
    let name = |number: usize| tree.path(&format!("d/{number:0255}"));
    fs::create_dir(tree.path("d")).unwrap();
    for number in 0..15_000 {
        File::create(name(number)).unwrap();
    }
    assert!(!ask(&one, BIND_LIST, 0, 0, b"d").unwrap().tail.is_empty());
    assert_eq!(ask(&two, BIND_LIST, 0, 0, b"d").err(), Some(Errno::NOMEM));
    // The end of a listing gives it back.
    assert!(ask(&one, BIND_LIST, 15_000, 0, b"d").unwrap().tail.is_empty());
    assert!(!ask(&two, BIND_LIST, 0, 0, b"d").unwrap().tail.is_empty());
    drop(two);
    for number in 15_000..LISTING_MAX / 255 {
        File::create(name(number)).unwrap();
    }
    assert_eq!(ask(&one, BIND_LIST, 0, 0, b"d").err(), Some(Errno::OVERFLOW));
}

#[test]
fn a_removed_file_is_given_back_by_whoever_closes_it_last() {
    for access in [BoundAccess::Write, BoundAccess::Read] {
        let tree = Tree::new(1 << 20);
        let (mount, reader) = (tree.mount(BoundAccess::Write), tree.mount(access));
        for name in [&b"old"[..], b"new"] {
            let (handle, _) = open(&mount, CREATE, name).unwrap();
            ask(&mount, VOLUME_GROW, handle, 500_000, b"").unwrap();
            ask(&mount, BIND_CLOSE, handle, 0, b"").unwrap();
        }
        let (handle, kept) = open(&reader, 0, b"old").unwrap();
        ask(&mount, BIND_RENAME, 0, 0, b"new\0old").unwrap();
        ask(&reader, BIND_CLOSE, handle, 0, b"").unwrap();
        assert_eq!(kept.metadata().unwrap().len(), 0);
        assert_eq!(tree.used(), NAME_COST + blocks(500_000));
    }
}

/// What is counted is what the next one counts.
fn counted(tree: &Tree) -> u64 {
    tree::count(File::open(tree.path("")).unwrap().as_fd(), u64::MAX)
}

#[test]
fn truncation_and_removal_at_once_give_back_once() {
    let tree = Tree::new(1 << 30);
    let mounts = [(); 2].map(|()| tree.mount(BoundAccess::Write));
    for _ in 0..200 {
        let (handle, _) = open(&mounts[0], CREATE, b"file").unwrap();
        ask(&mounts[0], VOLUME_GROW, handle, 1 << 20, b"").unwrap();
        ask(&mounts[0], BIND_CLOSE, handle, 0, b"").unwrap();
        let (other, _) = open(&mounts[0], CREATE, b"other").unwrap();
        ask(&mounts[0], VOLUME_GROW, other, 1 << 20, b"").unwrap();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                // It may be gone.
                let _ = ask(&mounts[1], BIND_TRUNCATE, 0, 0, b"file");
            });
            ask(&mounts[0], BIND_UNLINK, 0, 0, b"file").unwrap();
        });
        assert_eq!(tree.used(), counted(&tree));
        ask(&mounts[0], BIND_UNLINK, 0, 0, b"other").unwrap();
        ask(&mounts[0], BIND_CLOSE, other, 0, b"").unwrap();
        assert_eq!(tree.used(), 0);
    }
}

#[test]
fn no_directory_is_deeper_than_what_is_counted() {
    let tree = Tree::new(1 << 30);
    let mount = tree.mount(BoundAccess::Write);
    let name = "n".repeat(60);
    let path = |depth: usize| vec![&name[..]; depth].join("/").into_bytes();
    for depth in 1..=DEPTH_MAX {
        ask(&mount, BIND_MKDIR, 0o755, 0, &path(depth)).unwrap();
    }
    let refused = Some(Errno::NAMETOOLONG);
    assert_eq!(ask(&mount, BIND_MKDIR, 0o755, 0, &path(DEPTH_MAX + 1)).err(), refused);
    let (handle, _) = open(&mount, CREATE, &[&path(DEPTH_MAX)[..], b"/f"].concat()).unwrap();
    ask(&mount, VOLUME_GROW, handle, 4096, b"").unwrap();
    // However long its path is, it is counted.
    let long = "l".repeat(255);
    let both = [name.as_bytes(), b"\0", long.as_bytes()].concat();
    ask(&mount, BIND_RENAME, 0, 0, &both).unwrap();
    assert_eq!((tree.used(), counted(&tree)), (4096 * 66, 4096 * 66));
    ask(&mount, BIND_MKDIR, 0o755, 0, b"a").unwrap();
    ask(&mount, BIND_MKDIR, 0o755, 0, b"a/b").unwrap();
    for (flags, last) in [(0, &b"c"[..]), (2, b"b")] {
        let both = [long.as_bytes(), b"\0a/", last].concat();
        assert_eq!(ask(&mount, BIND_RENAME, flags, 0, &both).err(), refused, "{flags}");
    }
    ask(&mount, BIND_RENAME, 0, 0, b"a/b\0c").unwrap();
    ask(&mount, BIND_RENAME, 0, 0, b"c\0a/c").unwrap();
}

#[test]
fn a_volume_that_cannot_be_counted_is_full() {
    let tree = Tree::new(1 << 30);
    fs::create_dir_all(tree.path(&vec!["d"; DEPTH_MAX + 1].join("/"))).unwrap();
    let root = File::open(tree.path("")).unwrap();
    assert_eq!(tree::count(root.as_fd(), 1 << 30), 1 << 30);
}

#[test]
fn the_target_of_a_link_is_counted() {
    let tree = Tree::new(1 << 20);
    let mount = tree.mount(BoundAccess::Write);
    ask(&mount, BIND_SYMLINK, 0, 0, b"link\0target").unwrap();
    assert_eq!((tree.used(), counted(&tree)), (2 * 4096, 2 * 4096));
    ask(&mount, BIND_LINK, 0, 0, b"link\0twin").unwrap();
    assert_eq!((tree.used(), counted(&tree)), (3 * 4096, 3 * 4096));
    ask(&mount, BIND_UNLINK, 0, 0, b"link").unwrap();
    assert_eq!((tree.used(), counted(&tree)), (2 * 4096, 2 * 4096));
    ask(&mount, BIND_UNLINK, 0, 0, b"twin").unwrap();
    assert_eq!(tree.used(), 0);
}

/// The inode number of a path, as a sandbox sees it.
fn shown(mount: &MountedVolume, path: &[u8]) -> u64 {
    let found = ask(mount, BIND_STAT, 0, 0, path).unwrap();
    bytemuck::pod_read_unaligned::<FileAttributes>(&found.tail).inode
}

/// The inode numbers of a directory's entries by name, as a sandbox sees them.
fn listed(mount: &MountedVolume) -> BTreeMap<Vec<u8>, u64> {
    let tail = ask(mount, BIND_LIST, 0, 0, b"").unwrap().tail;
    let (mut all, mut rest) = (BTreeMap::new(), &tail[..]);
    while let Some((head, after)) = rest.split_at_checked(std::mem::size_of::<DirectoryEntry>()) {
        let entry: DirectoryEntry = bytemuck::pod_read_unaligned(head);
        all.insert(after[..entry.name_len as usize].to_vec(), entry.inode);
        rest = &after[(entry.name_len as usize).next_multiple_of(8)..];
    }
    all
}

/// Closes a volume at once.
fn close(tree: &Tree) -> ClosedVolume {
    ClosedVolume::close(&tree.volume, later()).unwrap()
}

fn later() -> std::time::Instant {
    std::time::Instant::now() + std::time::Duration::from_secs(20)
}

/// Copies a closed volume to a new directory beside it.
fn copy_beside(tree: &Tree, closed: &ClosedVolume, name: &str) -> io::Result<FileNumbers> {
    let to = tree.all.path().join(name);
    fs::create_dir(&to)?;
    closed.copy_to(File::open(&to)?.as_fd(), later()).map(|(_, numbers)| numbers)
}

#[test]
fn files_that_were_put_back_are_shown_as_what_they_were() {
    let tree = Tree::new(1 << 20);
    let mount = tree.mount(BoundAccess::Write);
    let (first, file) = open(&mount, CREATE, b"first").unwrap();
    ask(&mount, VOLUME_GROW, first, 5, b"").unwrap();
    file.write_all_at(b"first", 0).unwrap();
    ask(&mount, BIND_MKDIR, 0o755, 0, b"d").unwrap();
    let before = [&b"first"[..], b"d", b""].map(|path| shown(&mount, path));
    // It is copied although somebody has a file open to be written.
    let closed = close(&tree);
    assert_eq!(tree.volume.open_files(), mount.open_files_of(&tree.volume));
    let numbers = copy_beside(&tree, &closed, "copy").unwrap();
    drop(closed);
    ask(&mount, BIND_CLOSE, first, 0, b"").unwrap();
    open(&mount, CREATE, b"other").unwrap();
    close(&tree).move_to(&tree.all.path().join("copy"), numbers.clone()).unwrap();
    assert_eq!([&b"first"[..], b"d", b""].map(|path| shown(&mount, path)), before);
    assert_eq!(listed(&mount), [(b"d".to_vec(), before[1]), (b"first".to_vec(), before[0])].into());
    let answer = ask(&mount, BIND_OPEN, 0, 0, b"first").unwrap();
    let opened: OpenedVolumeFile = bytemuck::pod_read_unaligned(&answer.tail);
    assert_eq!((opened.inode, opened.size), (before[0], 5));
    assert_eq!(ask(&mount, BIND_STAT, 0, 0, b"other").unwrap_err(), Errno::NOENT);
    assert_eq!(tree.used(), 2 * 4096 + 4096);
    // The copy of the copy is shown so, too.
    let again = copy_beside(&tree, &close(&tree), "again").unwrap();
    close(&tree).move_to(&tree.all.path().join("again"), again).unwrap();
    assert_eq!([&b"first"[..], b"d", b""].map(|path| shown(&mount, path)), before);
    // And where they were before, with what they counted for.
    let mut closed = close(&tree);
    closed.move_to(&tree.path(""), FileNumbers::default()).unwrap();
    assert_eq!(tree.used(), 3 * 4096 + 4096);
    closed.move_back();
    drop(closed);
    assert_eq!(tree.used(), 2 * 4096 + 4096);
    assert_eq!([&b"first"[..], b"d", b""].map(|path| shown(&mount, path)), before);
}

#[test]
fn a_closed_volume_is_not_changed_and_can_be_looked_at_again_later() {
    let tree = Tree::new(1 << 20);
    let mount = tree.mount(BoundAccess::Write);
    let (handle, _) = open(&mount, CREATE, b"file").unwrap();
    let closed = close(&tree);
    ClosedVolume::close(&tree.volume, later()).unwrap_err();
    std::thread::scope(|threads| {
        let waiting = threads.spawn(|| ask(&mount, BIND_MKDIR, 0o755, 0, b"d").map(drop));
        std::thread::sleep(std::time::Duration::from_millis(50));
        assert!(!waiting.is_finished() && !tree.path("d").exists());
        // Who ends gives its files back all the same.
        ask(&mount, BIND_CLOSE, handle, 0, b"").unwrap();
        drop(closed);
        waiting.join().unwrap().unwrap();
    });
}

#[test]
fn a_copy_at_rest_has_bounds() {
    let tree = Tree::new(1 << 20);
    fs::write(tree.path("file"), [7; 5000]).unwrap();
    let closed = close(&tree);
    let to = tree.all.path().join("late");
    fs::create_dir(&to).unwrap();
    let late = closed.copy_to(File::open(&to).unwrap().as_fd(), std::time::Instant::now());
    assert_eq!(late.unwrap_err().kind(), io::ErrorKind::TimedOut);
    let terms =
        super::copy::CopyTerms { most: 1 << 20, until: None, files: Some(1), rests: &|_| false };
    let files = File::open(tree.path("")).unwrap();
    let many = super::copy::copy_on_terms(files.as_fd(), File::open(&to).unwrap().as_fd(), &terms);
    assert!(many.unwrap_err().to_string().contains("more than 1 files"));
    // One whom nobody holds back writes to a file that no sandbox has open.
    let writer = File::options().write(true).open(tree.path("file")).unwrap();
    let refused = copy_beside(&tree, &closed, "busy").unwrap_err();
    assert_eq!(refused.kind(), io::ErrorKind::ExecutableFileBusy, "{refused}");
    drop(writer);
    copy_beside(&tree, &closed, "rest").unwrap();
}

#[test]
fn another_process_that_has_a_volume_is_found() {
    let tree = Tree::new(1 << 20);
    assert!(!tree.volume.is_used_elsewhere().unwrap());
    // As another process has it.
    let other = open_volume(&tree.all, 1 << 20);
    let other = other.unwrap();
    assert!(tree.volume.is_used_elsewhere().unwrap() && other.is_used_elsewhere().unwrap());
    drop(other);
    assert!(!tree.volume.is_used_elsewhere().unwrap());
    // Whoever wants it alone is kept out by the one that came second, too.
    let other = open_volume(&tree.all, 1 << 20).unwrap();
    let Tree { all, volume, .. } = tree;
    drop(volume);
    let users = File::options().write(true).open(all.path().join("users")).unwrap();
    let alone = || flock(&users, FlockOperation::NonBlockingLockExclusive);
    assert_eq!(alone(), Err(Errno::WOULDBLOCK));
    drop(other);
    assert_eq!(alone(), Ok(()));
}
