//! Trees of mounts that change, and their bounds.

use super::super::inode::NewKind;
use super::super::mount::change::{self, Arguments, Request, Unmount};
use super::super::mount::{MOUNTS_MAX, MountFlags};
use super::super::walk::Walk;
use super::*;
use crate::fs::dentry::Dentry;
use crate::fs::mount::MountNamespace;

const TMPFS: Request = Request::from_bits_retain(0);

impl World {
    fn namespace(&self) -> &MountNamespace {
        &self.fs.namespace
    }

    fn mount_with(&self, source: &str, at: &str, request: Request, options: &str) -> Result<()> {
        let arguments = Arguments {
            request,
            kind: Some(b"tmpfs"),
            source: Some(source.as_bytes()),
            options: options.as_bytes(),
        };
        let find = |path: &[u8]| walk(&self.context, &self.context.root, path, Follow::Yes);
        change::mount(self.namespace(), self.walk(at)?, &arguments, find)
    }

    fn mount(&self, at: &str) -> Result<()> {
        self.mount_with("none", at, TMPFS, "")
    }

    fn bind(&self, from: &str, at: &str) -> Result<()> {
        self.mount_with(from, at, Request::BIND | Request::REC, "")
    }

    fn unmount(&self, at: &str, how: Unmount) -> Result<()> {
        let at = self.walk(at)?;
        change::unmount(self.namespace(), &self.context.root, at, how)
    }

    /// Mounts that exist.
    fn count(&self) -> usize {
        self.fs.registry.mounts()
    }
}

#[test]
fn mounts_and_what_they_hold_go_when_they_are_unmounted() {
    let world = World::new();
    let before = world.count();
    world.mkdir("/m").unwrap();
    world.mount("/m").unwrap();
    world.mkdir("/m/a").unwrap();
    world.mount("/m/a").unwrap();
    world.write("/m/a/file", "text").unwrap();
    let mount = Arc::downgrade(world.walk("/m/a").unwrap().mount().unwrap());
    let file = Arc::downgrade(world.walk("/m/a/file").unwrap().dentry());
    assert_eq!(world.count(), before + 2);
    assert_eq!(world.unmount("/m", Unmount::empty()), Err(Errno::EBUSY));
    world.unmount("/m", Unmount::DETACH).unwrap();
    assert_eq!(world.count(), before);
    assert!(mount.upgrade().is_none() && file.upgrade().is_none());
    assert!(!world.walk("/m").unwrap().dentry().is_mount_point());
}

#[test]
fn what_is_used_lives_until_it_is_closed() {
    let world = World::new();
    let before = world.count();
    world.mkdir("/m").unwrap();
    world.mount("/m").unwrap();
    world.write("/m/file", "text").unwrap();
    let open = world.open("/m/file", OpenFlags::empty()).unwrap();
    assert_eq!(world.unmount("/m", Unmount::empty()), Err(Errno::EBUSY));
    world.unmount("/m", Unmount::DETACH).unwrap();
    assert_eq!(read_all(&open).unwrap(), "text");
    assert_eq!(world.count(), before + 1);
    drop(open);
    assert_eq!(world.count(), before);
}

#[test]
fn mounts_have_a_bound_and_a_bind_that_exceeds_it_leaves_nothing() {
    let world = World::new();
    let before = world.count();
    world.mkdir("/m").unwrap();
    world.mount("/m").unwrap();
    world.mkdir("/m/x").unwrap();
    // Each doubles what is below /m.
    let error = loop {
        if let Err(error) = world.bind("/m", "/m/x") {
            break error;
        }
    };
    assert_eq!(error, Errno::ENOSPC);
    assert!(world.count() <= MOUNTS_MAX && world.count() > MOUNTS_MAX / 2);
    while world.mount_with("/m/x", "/m/x", Request::BIND, "").is_ok() {}
    assert_eq!(world.count(), MOUNTS_MAX);
    assert_eq!(world.mount("/m/x"), Err(Errno::ENOSPC));
    let places = [&world.context.root, &world.context.cwd];
    assert_eq!(world.namespace().copy(&Default::default(), places).err(), Some(Errno::ENOSPC));
    world.unmount("/m", Unmount::DETACH).ok();
    while world.walk("/m").unwrap().is_mount_root() {
        world.unmount("/m", Unmount::DETACH).unwrap();
    }
    assert_eq!(world.count(), before);
}

#[test]
fn a_namespace_that_ends_takes_its_mounts_along() {
    let world = World::new();
    let before = world.count();
    world.mkdir("/m").unwrap();
    world.mount("/m").unwrap();
    let cwd = world.walk("/m").unwrap();
    let (namespace, [root, copied]) =
        world.namespace().copy(&Default::default(), [&world.fs.root(), &cwd]).unwrap();
    assert_eq!(world.count(), 2 * (before + 1));
    assert!(root.is(&namespace.root()) && !root.is(&world.fs.root()));
    assert!(!copied.is(&cwd) && Arc::ptr_eq(copied.dentry(), cwd.dentry()));
    assert_eq!(copied.mount().unwrap().namespace(), namespace.number);
    drop(root);
    drop(namespace);
    // A place in it is still held.
    assert_eq!(world.count(), before + 2);
    assert!(copied.parent().is(&copied));
    drop(copied);
    assert_eq!(world.count(), before + 1);
}

#[test]
fn deep_trees_go_without_recursion() {
    let world = World::new();
    world.mkdir("/m").unwrap();
    world.mount("/m").unwrap();
    let mut at = world.walk("/m").unwrap();
    let gone = Arc::downgrade(at.dentry());
    for _ in 0..20_000 {
        let directory = NewKind::Directory;
        at = namespace::create(&world.context, &at, b"d", directory, 0o755).unwrap();
    }
    drop(at);
    world.unmount("/m", Unmount::empty()).unwrap();
    assert!(gone.upgrade().is_none());
}

#[test]
fn a_name_of_proc_stays_the_same_while_something_is_mounted_on_it() {
    let world = World::new();
    let place = |path| world.walk(path).unwrap();
    world.mount("/proc/sys/kernel").unwrap();
    assert!(place("/proc/sys/kernel").is_mount_root());
    world.write("/proc/sys/kernel/file", "text").unwrap();
    assert_eq!(world.list("/proc/sys/kernel"), ["file"]);
    assert_eq!(world.name_of(&place("/proc/sys/kernel/file")), "/proc/sys/kernel/file");
    let pinned = Arc::downgrade(place("/proc/sys").dentry());
    assert!(pinned.upgrade().is_some());
    // Nor may the names go or move (rename(2) in directories of the host).
    let check = |above, name: &str| place(above).dentry().check_not_pinned(name.as_bytes());
    assert_eq!(check("/proc", "sys"), Err(Errno::EBUSY));
    assert_eq!(check("/proc/sys", "kernel"), Err(Errno::EBUSY));
    assert_eq!(check("/proc/sys", "fs"), Ok(()));
    world.unmount("/proc/sys/kernel", Unmount::empty()).unwrap();
    assert_eq!(check("/proc", "sys"), Ok(()));
    assert!(pinned.upgrade().is_none());
    assert!(!place("/proc/sys/kernel").is_mount_root());
}

#[test]
fn limits_of_a_tmpfs_count_what_is_there() {
    let world = World::new();
    world.mkdir("/m").unwrap();
    world.mount_with("none", "/m", TMPFS, "size=8k,nr_inodes=2").unwrap();
    let free = || world.walk("/m").unwrap().inode().statfs();
    let open = world.open("/m/file", OpenFlags::CREAT | OpenFlags::RDWR).unwrap();
    assert_eq!(error(world.mkdir("/m/other")), Errno::ENOSPC);
    let bytes = [1; 3 * 4096];
    assert_eq!(open.write(&mut Source::kernel(&bytes)).unwrap(), 8192);
    assert_eq!((free().bfree, free().ffree), (0, 0));
    // An open file without a name counts.
    world.unlink("/m/file").unwrap();
    assert_eq!((free().bfree, free().ffree), (0, 0));
    drop(open);
    assert_eq!((free().bfree, free().ffree), (2, 1));
    let again = |options| world.mount_with("none", "/m", Request::REMOUNT, options);
    again("size=0,nr_inodes=0").unwrap();
    world.mkdir("/m/other").unwrap();
    world.mkdir("/m/one more").unwrap();
    assert_eq!(again("nr_inodes=2"), Err(Errno::EINVAL));
}

#[test]
fn writers_forbid_to_make_a_mount_read_only() {
    let world = World::new();
    world.mkdir("/m").unwrap();
    world.mount("/m").unwrap();
    let open = world.open("/m/file", OpenFlags::CREAT | OpenFlags::WRONLY).unwrap();
    let read_only = Request::REMOUNT | Request::BIND | Request::RDONLY;
    assert_eq!(world.mount_with("", "/m", read_only, ""), Err(Errno::EBUSY));
    let mapping = open.holder();
    drop(open);
    assert_eq!(world.mount_with("", "/m", read_only, ""), Err(Errno::EBUSY));
    drop(mapping);
    world.mount_with("", "/m", read_only, "").unwrap();
    assert!(world.walk("/m").unwrap().mount_flags().contains(MountFlags::READ_ONLY));
    assert_eq!(error(world.mkdir("/m/x")), Errno::EROFS);
}

#[test]
fn a_bind_shows_the_same_dentry_at_two_places() {
    let world = World::new();
    world.mkdir("/m").unwrap();
    world.bind("/etc", "/m").unwrap();
    let (here, there) = (world.walk("/m/motd").unwrap(), world.walk("/etc/motd").unwrap());
    assert!(Arc::ptr_eq(here.dentry(), there.dentry()) && !here.is(&there));
    assert_eq!(world.name_of(&here), "/m/motd");
    assert_eq!(world.name_of(&there), "/etc/motd");
    assert!(world.walk("/m/..").unwrap().is(&world.fs.root()));
    assert!(Dentry::is_below(here.dentry(), world.walk("/").unwrap().dentry()));
}

#[test]
fn nothing_is_mounted_where_a_process_is_shown() {
    let world = World::new();
    let before = world.count();
    for at in ["/proc/self", "/proc/self/fdinfo", "/proc/self/task", "/proc/self/attr"] {
        assert_eq!(error(world.walk(at).and_then(|_| world.mount(at))), Errno::ENOENT, "{at}");
    }
    assert_eq!(world.count(), before);
}

#[test]
fn a_resolution_looks_at_a_bounded_number_of_directories() {
    let world = World::new();
    let _made = ["/m", "/b"].map(|path| world.mkdir(path).unwrap());
    world.mount("/m").unwrap();
    world.mkdir("/m/part").unwrap();
    world.bind("/m/part", "/b").unwrap();
    let top = world.walk("/b").unwrap();
    let mut at = top.clone();
    for _ in 0..1300 {
        at = namespace::create(&world.context, &at, b"d", NewKind::Directory, 0o755).unwrap();
    }
    let up = |count| walk(&world.context, &at, "../".repeat(count).as_bytes(), Follow::Yes);
    assert!(up(100).is_ok());
    assert_eq!(error(up(1300)), Errno::ELOOP);
    // All of a file system shows: there is nothing to look at.
    let whole = world.walk("/m/part").unwrap().beside(at.dentry().clone());
    assert!(walk(&world.context, &whole, "../".repeat(1300).as_bytes(), Follow::Yes).is_ok());
}

#[test]
fn no_way_out_of_a_mount_is_taken_if_that_is_forbidden() {
    let world = World::new();
    let _made = ["/m", "/m/d", "/m/d/x"].map(|path| world.mkdir(path).unwrap());
    let below = world.walk("/m/d/x").unwrap();
    world.mount("/m/d").unwrap();
    let link = NewKind::Symlink(b"/etc/motd".to_vec());
    namespace::create(&world.context, &world.context.root, b"/m/d/link", link, 0o777).unwrap();
    let to = |start: &Path, path: &str| {
        Walk::new(&world.context, start, Resolve::NO_XDEV).to(start, path.as_bytes(), Follow::Yes)
    };
    assert_eq!(error(to(&below, "..")), Errno::EXDEV);
    assert_eq!(error(to(&world.walk("/m/d").unwrap(), "link")), Errno::EXDEV);
    assert!(to(&world.walk("/m/d").unwrap(), "/etc/motd").is_ok());
}

#[test]
fn what_was_written_below_a_bind_is_told_and_below_another_file_system_is_not() {
    let world = World::new();
    let _made = ["/data", "/other"].map(|path| world.mkdir(path).unwrap());
    let files = || world.fs.written().numbers.files;
    let before = files();
    world.bind("/data", "/data").unwrap();
    world.write("/data/file", "text").unwrap();
    assert_eq!(files(), before + 1);
    world.write("/other/file", "text").unwrap();
    world.mount("/other").unwrap();
    world.write("/other/hides", "text").unwrap();
    assert_eq!(files(), before + 1);
}
