//! Path resolution.

use thaw_abi::control::{FLAG_FREEZE_AT_ENTRY, FLAG_START_PATH, START_PATH};

use super::*;
use crate::fs::inode::{FileType, NewKind};
use crate::fs::path::AbsoluteName;
use crate::fs::walk::Walk;

#[test]
fn files_of_the_lower_layer_are_found() {
    let world = World::new();
    assert_eq!(world.read("/etc/motd").unwrap(), "hello");
    assert_eq!(world.read("etc/../etc/./motd").unwrap(), "hello");
    assert_eq!(world.read("///etc////motd").unwrap(), "hello");
    assert_eq!(error(world.walk("/etc/none")), Errno::ENOENT);
    assert_eq!(error(world.walk("/none/motd")), Errno::ENOENT);
    assert_eq!(error(world.walk("/etc/motd/x")), Errno::ENOTDIR);
    assert_eq!(error(world.walk("/etc/motd/")), Errno::ENOTDIR);
    assert_eq!(error(world.walk("/etc/motd/..")), Errno::ENOTDIR);
    assert_eq!(error(world.walk("")), Errno::ENOENT);
    assert!(world.walk("/").unwrap().is(&world.fs.root()));
    assert!(world.walk("/../../..").unwrap().is(&world.fs.root()));
    let attributes = world.walk("/etc/motd").unwrap().inode().attributes();
    assert_eq!((attributes.mode, attributes.size, attributes.nlink), (0o100644, 5, 2));
    assert_eq!((attributes.blocks, attributes.mtime.sec), (8, 1_600_000_000));
}

#[test]
fn symbolic_links_are_followed() {
    let world = World::new();
    assert_eq!(world.read("/lib/a.so").unwrap(), "AAAA");
    assert_eq!(world.read("/usr/up").unwrap(), "hello");
    assert_eq!(world.read("/usr/absolute").unwrap(), "hello");
    assert_eq!(world.walk_nofollow("/lib").unwrap().inode().file_type(), FileType::Symlink);
    // A trailing slash asks for what the link leads to.
    assert!(world.walk_nofollow("/lib/").unwrap().is_directory());
    assert_eq!(error(world.walk("/usr/up/")), Errno::ENOTDIR);
    assert_eq!(error(world.walk("/loop")), Errno::ELOOP);
    assert_eq!(error(world.walk("/loop/x")), Errno::ELOOP);
    let through = world.walk("/lib/deep/leaf").unwrap();
    assert_eq!(world.name_of(&through), "/usr/lib/deep/leaf");
}

/// The path at which interpreters are frozen is that of no file.
#[test]
fn the_path_of_a_template_is_none_for_others() {
    let world = World::new();
    for flags in [0, FLAG_FREEZE_AT_ENTRY, FLAG_START_PATH] {
        kernel().config.borrow_mut().flags = flags;
        assert_eq!(error(world.walk(START_PATH)), Errno::ENOENT);
        assert_eq!(error(world.walk(&std::format!("///{START_PATH}/"))), Errno::ENOENT);
        assert_eq!(crate::task::freeze_request::cause(), 0);
    }
    kernel().config.borrow_mut().flags = FLAG_FREEZE_AT_ENTRY | FLAG_START_PATH;
    for path in ["/thaw-start", "/tmp/thaw-start", "/dev/thaw-started"] {
        assert_eq!(error(world.walk(path)), Errno::ENOENT);
    }
}

#[test]
fn forty_links_are_the_limit() {
    let world = World::new();
    world.write("/tmp/l0", "end").unwrap();
    for n in 1..=41 {
        world
            .create(&std::format!("/tmp/l{n}"), NewKind::Symlink(std::format!("l{}", n - 1).into()))
            .unwrap();
    }
    assert_eq!(world.read("/tmp/l40").unwrap(), "end");
    assert_eq!(error(world.read("/tmp/l41")), Errno::ELOOP);
}

#[test]
fn names_and_paths_have_limits() {
    let world = World::new();
    let name = "n".repeat(255);
    world.write(&std::format!("/tmp/{name}"), "x").unwrap();
    assert_eq!(error(world.walk(&std::format!("/tmp/{name}n"))), Errno::ENAMETOOLONG);
    assert_eq!(error(world.walk(&"/".repeat(4096))), Errno::ENAMETOOLONG);
    assert!(world.walk(&"/".repeat(4095)).is_ok());
}

#[test]
fn permissions_decide() {
    let mut world = World::new();
    world.mkdir("/tmp/closed").unwrap();
    world.write("/tmp/closed/file", "x").unwrap();
    let closed = world.walk("/tmp/closed").unwrap();
    let changes =
        super::super::inode::AttributeChanges { permissions: Some(0o700), ..Default::default() };
    closed.inode().change(&changes).unwrap();
    world.become_user(1000);
    assert_eq!(error(world.walk("/tmp/closed/file")), Errno::EACCES);
    assert_eq!(error(world.read("/etc/secret")), Errno::EACCES);
    assert_eq!(error(world.open("/etc/motd", OpenFlags::RDWR)), Errno::EACCES);
    assert_eq!(error(world.mkdir("/etc/new")), Errno::EACCES);
    assert!(world.walk("/etc/secret").is_ok());
    // /tmp is sticky: others' files stay.
    assert_eq!(error(world.rmdir("/tmp/closed")), Errno::EPERM);
    world.mkdir("/tmp/own").unwrap();
    assert_eq!(world.walk("/tmp/own").unwrap().inode().attributes().uid, 1000);
    world.rmdir("/tmp/own").unwrap();
}

#[test]
fn names_lead_back_to_the_root() {
    let world = World::new();
    let deep = world.walk("/usr/lib/deep").unwrap();
    assert_eq!(world.name_of(&deep), "/usr/lib/deep");
    assert_eq!(world.name_of(&world.fs.root()), "/");
    assert_eq!(world.name_of(&world.walk("/proc").unwrap()), "/proc");
    assert_eq!(world.name_of(&world.walk("/dev/shm").unwrap()), "/dev/shm");
    assert!(world.walk("/dev/shm/../..").unwrap().is(&world.fs.root()));
    // From a root of its own.
    let usr = world.walk("/usr").unwrap();
    assert_eq!(deep.absolute_name(&usr), AbsoluteName::Reachable(b"/lib/deep".to_vec()));
    let etc = world.walk("/etc").unwrap();
    assert_eq!(deep.absolute_name(&etc), AbsoluteName::Unreachable(b"/usr/lib/deep".to_vec()));
    let open = world.open("/tmp/x", OpenFlags::CREAT).unwrap();
    world.unlink("/tmp/x").unwrap();
    assert_eq!(world.name_of(open.path.as_ref().unwrap()), "/tmp/x (deleted)");
}

#[test]
fn a_changed_root_confines() {
    let mut world = World::new();
    let usr = world.walk("/usr").unwrap();
    world.context.root = usr.clone();
    world.context.cwd = usr.clone();
    assert!(world.walk("/").unwrap().is(&usr));
    assert!(world.walk("/../..").unwrap().is(&usr));
    assert_eq!(world.read("/lib/a.so").unwrap(), "AAAA");
    assert_eq!(error(world.walk("/absolute")), Errno::ENOENT);
    assert_eq!(error(world.walk("/up")), Errno::ENOENT);
}

#[test]
fn openat2_restricts_resolution() {
    let world = World::new();
    let usr = world.walk("/usr").unwrap();
    let to = |path: &str, resolve| {
        Walk::new(&world.context, &usr, resolve).to(&usr, path.as_bytes(), Follow::Yes)
    };
    assert_eq!(error(to("../etc/motd", Resolve::BENEATH)), Errno::EXDEV);
    assert_eq!(error(to("up", Resolve::BENEATH)), Errno::EXDEV);
    assert_eq!(error(to("absolute", Resolve::BENEATH)), Errno::EXDEV);
    assert!(to("lib/deep/../a.so", Resolve::BENEATH).is_ok());
    assert_eq!(error(to("up", Resolve::IN_ROOT)), Errno::ENOENT);
    assert!(to("/lib/a.so", Resolve::IN_ROOT).is_ok());
    assert_eq!(error(to("up", Resolve::NO_SYMLINKS)), Errno::ELOOP);
    assert!(to("up", Resolve::NO_MAGICLINKS).is_ok());
    assert_eq!(error(to("/dev/null", Resolve::NO_XDEV)), Errno::EXDEV);
    assert!(to("/etc/motd", Resolve::NO_XDEV).is_ok());
}
