//! Whiteouts, renames, links: the overlay's names.

use super::*;
use crate::fs::inode::NewKind;

#[test]
fn a_whiteout_hides_the_lower_layer() {
    let world = World::new();
    world.unlink("/etc/hosts").unwrap();
    assert_eq!(error(world.walk("/etc/hosts")), Errno::ENOENT);
    assert_eq!(world.list("/etc"), ["motd", "secret", "twin"]);
    world.write("/etc/hosts", "new").unwrap();
    assert_eq!(world.read("/etc/hosts").unwrap(), "new");
    assert_eq!(world.list("/etc"), ["hosts", "motd", "secret", "twin"]);
    assert_eq!(error(world.unlink("/etc/none")), Errno::ENOENT);
}

#[test]
fn a_new_directory_over_a_whiteout_is_opaque() {
    let world = World::new();
    assert_eq!(error(world.rmdir("/usr/lib/deep")), Errno::ENOTEMPTY);
    assert_eq!(error(world.unlink("/usr/lib/deep")), Errno::EISDIR);
    assert_eq!(error(world.rmdir("/usr/lib/deep/leaf")), Errno::ENOTDIR);
    world.unlink("/usr/lib/deep/leaf").unwrap();
    assert_eq!(world.nlink("/usr/lib"), 3);
    world.rmdir("/usr/lib/deep").unwrap();
    assert_eq!(world.nlink("/usr/lib"), 2);
    world.mkdir("/usr/lib/deep").unwrap();
    assert_eq!(world.nlink("/usr/lib"), 3);
    assert!(world.list("/usr/lib/deep").is_empty());
    assert_eq!(error(world.walk("/usr/lib/deep/leaf")), Errno::ENOENT);
}

#[test]
fn removing_what_cannot_be_removed() {
    let world = World::new();
    assert_eq!(error(world.rmdir("/etc/.")), Errno::EINVAL);
    assert_eq!(error(world.rmdir("/usr/lib/..")), Errno::ENOTEMPTY);
    assert_eq!(error(world.rmdir("/")), Errno::EBUSY);
    assert_eq!(error(world.rmdir("/proc")), Errno::EBUSY);
    assert_eq!(error(world.unlink("/etc/motd/")), Errno::ENOTDIR);
    assert_eq!(error(world.mkdir("/etc")), Errno::EEXIST);
    assert_eq!(error(world.mkdir("/")), Errno::EEXIST);
    assert_eq!(error(world.mkdir("/lib")), Errno::EEXIST);
    assert_eq!(error(world.create("/tmp/x/", NewKind::Fifo)), Errno::ENOENT);
    assert!(world.mkdir("/tmp/d/").is_ok());
}

#[test]
fn an_unlinked_file_lives_while_it_is_open() {
    let world = World::new();
    let open = world.open("/etc/hosts", OpenFlags::empty()).unwrap();
    let upper = world.open("/tmp/f", OpenFlags::CREAT | OpenFlags::RDWR).unwrap();
    upper.write(&mut Source::kernel(b"data")).unwrap();
    world.unlink("/etc/hosts").unwrap();
    world.unlink("/tmp/f").unwrap();
    assert_eq!(read_all(&open).unwrap(), "127.0.0.1 localhost\n");
    assert_eq!(read_all(&upper).unwrap(), "data");
    assert_eq!(upper.file.stat().unwrap().nlink, 0);
    assert_eq!(error(world.walk("/tmp/f")), Errno::ENOENT);
}

#[test]
fn hard_links_are_one_file() {
    let world = World::new();
    assert_eq!(world.nlink("/etc/motd"), 2);
    // Two names in the lower layer: a write through one shows in the other.
    world.write("/etc/twin", "changed").unwrap();
    assert_eq!(world.read("/etc/motd").unwrap(), "changed");
    world.link("/etc/motd", "/tmp/third").unwrap();
    assert_eq!(world.nlink("/tmp/third"), 3);
    world.unlink("/etc/motd").unwrap();
    world.unlink("/etc/twin").unwrap();
    assert_eq!(world.nlink("/tmp/third"), 1);
    assert_eq!(world.read("/tmp/third").unwrap(), "changed");
    assert_eq!(error(world.link("/usr", "/tmp/usr")), Errno::EPERM);
    assert_eq!(error(world.link("/tmp/third", "/etc/hosts")), Errno::EEXIST);
    assert_eq!(error(world.link("/tmp/third", "/dev/shm/x")), Errno::EXDEV);
    // The link itself, not what it leads to.
    world.link("/lib", "/tmp/lib").unwrap();
    assert_eq!(world.nlink("/lib"), 2);
}

#[test]
fn rename_replaces_and_leaves_a_whiteout() {
    let world = World::new();
    let open = world.open("/etc/hosts", OpenFlags::empty()).unwrap();
    world.rename("/etc/hosts", "/etc/motd").unwrap();
    assert_eq!(world.list("/etc"), ["motd", "secret", "twin"]);
    assert_eq!(world.read("/etc/motd").unwrap(), "127.0.0.1 localhost\n");
    assert_eq!(world.read("/etc/twin").unwrap(), "hello");
    assert_eq!(world.nlink("/etc/twin"), 1);
    // Who has it open sees the new name.
    assert_eq!(world.name_of(open.path.as_ref().unwrap()), "/etc/motd");
    assert_eq!(error(world.rename("/etc/hosts", "/etc/x")), Errno::ENOENT);
}

#[test]
fn directories_of_the_lower_layer_move_whole() {
    let world = World::new();
    let deep = world.walk("/usr/lib/deep").unwrap();
    world.rename("/usr/lib", "/tmp/lib").unwrap();
    assert_eq!(world.read("/tmp/lib/a.so").unwrap(), "AAAA");
    assert_eq!(world.read("/tmp/lib/deep/leaf").unwrap(), "leaf");
    assert_eq!(world.name_of(&deep), "/tmp/lib/deep");
    assert_eq!(error(world.walk("/usr/lib")), Errno::ENOENT);
    assert_eq!(world.list("/usr"), ["absolute", "up"]);
    assert_eq!((world.nlink("/usr"), world.nlink("/tmp")), (2, 3));
    // Back under the old name: the same files again.
    world.rename("/tmp/lib", "/usr/lib").unwrap();
    assert_eq!(world.read("/lib/a.so").unwrap(), "AAAA");
    assert_eq!((world.nlink("/usr"), world.nlink("/tmp")), (3, 2));
}

#[test]
fn rename_respects_types_and_the_tree() {
    let world = World::new();
    assert_eq!(error(world.rename("/usr", "/usr/lib/usr")), Errno::EINVAL);
    world.rename("/usr", "/usr").unwrap();
    assert_eq!(error(world.rename("/usr/lib/deep", "/usr")), Errno::ENOTEMPTY);
    assert_eq!(error(world.rename("/etc/motd", "/usr")), Errno::EISDIR);
    assert_eq!(error(world.rename("/usr", "/etc/motd")), Errno::ENOTDIR);
    assert_eq!(error(world.rename("/usr", "/etc")), Errno::ENOTEMPTY);
    assert_eq!(error(world.rename("/etc/motd", "/dev/shm/motd")), Errno::EXDEV);
    assert_eq!(error(world.rename("/etc/motd", "/tmp/motd/")), Errno::ENOTDIR);
    assert_eq!(error(world.rename("/etc/.", "/tmp/x")), Errno::EBUSY);
    world.mkdir("/tmp/empty").unwrap();
    world.rename("/usr", "/tmp/empty").unwrap();
    assert_eq!(world.read("/tmp/empty/lib/a.so").unwrap(), "AAAA");
    // Two names of one file: nothing happens.
    world.rename("/etc/motd", "/etc/twin").unwrap();
    assert_eq!(world.list("/etc"), ["hosts", "motd", "secret", "twin"]);
}

#[test]
fn renameat2_refuses_or_exchanges() {
    let world = World::new();
    assert_eq!(
        error(world.rename_as("/etc/hosts", "/etc/motd", RenameKind::NoReplace)),
        Errno::EEXIST
    );
    world.rename_as("/etc/hosts", "/etc/moved", RenameKind::NoReplace).unwrap();
    assert_eq!(
        error(world.rename_as("/etc/moved", "/etc/none", RenameKind::Exchange)),
        Errno::ENOENT
    );
    world.rename_as("/etc/moved", "/usr/lib", RenameKind::Exchange).unwrap();
    assert_eq!(world.read("/etc/moved/a.so").unwrap(), "AAAA");
    assert_eq!(world.read("/usr/lib").unwrap(), "127.0.0.1 localhost\n");
    assert_eq!((world.nlink("/usr"), world.nlink("/etc")), (2, 3));
    assert_eq!(
        error(world.rename_as("/etc", "/etc/moved/deep", RenameKind::Exchange)),
        Errno::EINVAL
    );
}

#[test]
fn a_removed_directory_takes_no_new_files() {
    let mut world = World::new();
    let gone = world.mkdir("/tmp/gone").unwrap();
    world.rmdir("/tmp/gone").unwrap();
    world.context.cwd = gone.clone();
    assert_eq!(error(world.write("x", "x")), Errno::ENOENT);
    assert_eq!(error(world.mkdir("x")), Errno::ENOENT);
    assert_eq!(world.name_of(&gone), "/tmp/gone (deleted)");
    assert_eq!(gone.inode().attributes().nlink, 0);
}

#[test]
fn new_files_take_owner_group_and_umask() {
    let mut world = World::new();
    world.context.umask = 0o027;
    let shared = world.mkdir("/tmp/shared").unwrap();
    assert_eq!(shared.inode().attributes().mode, 0o040750);
    let changes = crate::fs::inode::AttributeChanges {
        permissions: Some(0o2777),
        gid: Some(50),
        ..Default::default()
    };
    shared.inode().change(&changes).unwrap();
    world.become_user(1000);
    let file = world.create("/tmp/shared/f", NewKind::Regular).unwrap();
    let attributes = file.inode().attributes();
    assert_eq!((attributes.mode, attributes.uid, attributes.gid), (0o100750, 1000, 50));
    let directory = world.mkdir("/tmp/shared/d").unwrap().inode().attributes();
    assert_eq!((directory.mode, directory.gid), (0o042750, 50));
}

#[test]
fn a_deep_chain_of_removed_directories_is_dropped_without_recursion() {
    let mut world = World::new();
    world.context.cwd = world.walk("/tmp").unwrap();
    for _ in 0..50_000 {
        world.mkdir("d").unwrap();
        world.context.cwd = world.walk("d").unwrap();
    }
    // Removing from the inside out leaves a chain that only the cwd holds.
    for _ in 0..50_000 {
        let parent = world.context.cwd.parent();
        namespace::remove(&world.context, &parent, b"d", Removal::Directory).unwrap();
        world.context.cwd = parent;
    }
    assert!(world.list("/tmp").is_empty());
}

#[test]
fn forgetting_changes_nothing_that_shows() {
    let mut world = World::new();
    let deep = world.walk("/usr/lib/deep").unwrap();
    let held = world.open("/etc/secret", OpenFlags::empty()).unwrap();
    world.write("/etc/hosts", "changed").unwrap();
    world.unlink("/etc/motd").unwrap();
    world.mkdir("/usr/lib/deep/new").unwrap();
    assert_eq!(error(world.walk("/etc/none")), Errno::ENOENT);
    let before = world.walk("/bin/tool").unwrap().inode().attributes();
    world.context.cwd = world.fs.root();
    world.fs.prune();
    assert_eq!(world.read("/etc/hosts").unwrap(), "changed");
    assert_eq!(error(world.walk("/etc/motd")), Errno::ENOENT);
    assert_eq!(error(world.walk("/etc/none")), Errno::ENOENT);
    assert_eq!(world.list("/usr/lib/deep"), ["leaf", "new"]);
    assert_eq!(world.walk("/bin/tool").unwrap().inode().attributes().ino, before.ino);
    // What somebody holds is still the same thing.
    assert!(world.walk("/usr/lib/deep").unwrap().is(&deep));
    assert!(world.walk("/etc/secret").unwrap().is(held.path.as_ref().unwrap()));
    assert!(world.walk("/proc").unwrap().is_mount_root());
    // A changed file whose dentry is forgotten is found again.
    let changes =
        crate::fs::inode::AttributeChanges { permissions: Some(0o700), ..Default::default() };
    world.walk("/bin/tool").unwrap().inode().change(&changes).unwrap();
    world.fs.prune();
    assert_eq!(world.walk("/bin/tool").unwrap().inode().attributes().mode, 0o100700);
}
