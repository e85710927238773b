//! Extended attributes of files of the lower layer.

use std::vec::Vec;

use super::{Attribute, World, sample};
use crate::errno::Errno;
use crate::fs::file::OpenFlags;
use crate::fs::inode::{AttributeChanges, Inode};
use crate::fs::overlay::{Grow, RegularFile};
use crate::fs::permission::Identity;
use crate::fs::xattr::{CAPABILITY, Existing, ExtendedAttributes};
use crate::io::Source;
use crate::task::Credentials;

/// `cap_kill+ep`.
const KILL: [u8; 20] = [1, 0, 0, 2, 0x20, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];

const ATTRIBUTES: [Attribute<'static>; 5] = [
    ("bin/tool", CAPABILITY, &KILL),
    ("bin/tool", b"user.a", b"1"),
    ("etc/motd", CAPABILITY, &KILL),
    ("lib", CAPABILITY, &KILL),
    ("usr/lib", b"user.empty", b""),
];

fn world() -> World {
    World::with_attributes(&sample(), &ATTRIBUTES)
}

fn names(of: &dyn Inode) -> Vec<u8> {
    of.extended_attributes().expect("files of the overlay have some").list(&Identity::default())
}

fn of(inode: &dyn Inode) -> &ExtendedAttributes {
    inode.extended_attributes().expect("files of the overlay have some")
}

#[test]
fn files_have_those_of_the_lower_layer() {
    let world = world();
    let tool = world.walk("/bin/tool").unwrap();
    assert_eq!(names(&**tool.inode()), b"security.capability\0user.a\0");
    assert_eq!(of(&**tool.inode()).get(b"user.a").unwrap(), b"1");
    assert_eq!(of(&**tool.inode()).get(CAPABILITY).unwrap(), KILL);
    // Under each of its names, and of links and directories, too.
    assert_eq!(of(&**world.walk("/etc/twin").unwrap().inode()).get(CAPABILITY).unwrap(), KILL);
    assert_eq!(names(&**world.walk_nofollow("/lib").unwrap().inode()), b"security.capability\0");
    assert_eq!(of(&**world.walk("/lib").unwrap().inode()).get(b"user.empty").unwrap(), b"");
    assert_eq!(names(&**world.walk("/etc/hosts").unwrap().inode()), b"");
}

#[test]
fn changes_of_them_stay() {
    let world = world();
    let tool = world.walk("/bin/tool").unwrap();
    of(&**tool.inode()).set(b"user.b", b"2", Existing::Absent).unwrap();
    of(&**tool.inode()).remove(b"user.a").unwrap();
    tool.inode().note_extended_change();
    drop(tool);
    // Nodes that are as below are forgotten and made anew.
    world.fs.prune();
    let tool = world.walk("/bin/tool").unwrap();
    assert_eq!(names(&**tool.inode()), b"security.capability\0user.b\0");
    let other = world.walk("/usr/lib").unwrap();
    drop(other);
    world.fs.prune();
    assert_eq!(names(&**world.walk("/usr/lib").unwrap().inode()), b"user.empty\0");
    world.rename("/bin/tool", "/bin/moved").unwrap();
    let moved = world.walk("/bin/moved").unwrap();
    assert_eq!(of(&**moved.inode()).get(b"user.b").unwrap(), b"2");
}

#[test]
fn a_change_of_a_file_takes_its_capabilities() {
    let changes: [&dyn Fn(&World); 7] = [
        &|world| {
            let open = world.open("/bin/tool", OpenFlags::WRONLY).unwrap();
            assert_eq!(open.write(&mut Source::kernel(b"x")), Ok(1));
        },
        &|world| drop(world.open("/bin/tool", OpenFlags::WRONLY | OpenFlags::TRUNC).unwrap()),
        &|world| world.walk("/bin/tool").unwrap().inode().truncate(3).unwrap(),
        &|world| {
            let open = world.open("/bin/tool", OpenFlags::WRONLY).unwrap();
            open.downcast::<RegularFile>().unwrap().allocate(0, 10, Grow::No).unwrap();
        },
        &|world| {
            let open = world.open("/bin/tool", OpenFlags::WRONLY).unwrap();
            open.downcast::<RegularFile>().unwrap().punch(0, 1).unwrap();
        },
        &|world| {
            let changes = AttributeChanges { drops_capabilities: true, ..Default::default() };
            world.walk("/bin/tool").unwrap().inode().change(&changes).unwrap();
        },
        &|world| {
            world.sandbox.become_user(Credentials::of_user(0, 0));
            let open = world.open("/bin/tool", OpenFlags::WRONLY).unwrap();
            assert_eq!(open.write(&mut Source::kernel(b"x")), Ok(1));
        },
    ];
    for (number, change) in changes.iter().enumerate() {
        let world = world();
        change(&world);
        world.fs.prune();
        let tool = world.walk("/bin/tool").unwrap();
        assert_eq!(of(&**tool.inode()).get(CAPABILITY), Err(Errno::ENODATA), "{number}");
        assert_eq!(of(&**tool.inode()).get(b"user.a").unwrap(), b"1", "{number}");
    }
    let world = world();
    let tool = world.walk("/bin/tool").unwrap();
    let permissions = AttributeChanges { permissions: Some(0o700), ..Default::default() };
    tool.inode().change(&permissions).unwrap();
    assert!(of(&**tool.inode()).get(CAPABILITY).is_ok());
}
