//! Reading directories.

use super::*;
use crate::fs::file::Dirent;
use crate::fs::inode::NewKind;

/// Reads `count` entries from `offset` on.
fn entries(open: &OpenFile, offset: u64, count: usize) -> Vec<Dirent> {
    let mut found = Vec::new();
    open.file
        .read_directory(offset, &mut |entry| {
            if found.len() == count {
                return false;
            }
            found.push(entry);
            true
        })
        .unwrap();
    found
}

fn name(entry: &Dirent) -> &str {
    core::str::from_utf8(&entry.name).unwrap()
}

#[test]
fn both_layers_are_merged() {
    let world = World::new();
    world.write("/etc/aaa", "x").unwrap();
    world.write("/etc/motd", "changed").unwrap();
    world.unlink("/etc/secret").unwrap();
    world.mkdir("/etc/dir").unwrap();
    let open = world.open("/etc", OpenFlags::DIRECTORY).unwrap();
    let mut found: Vec<_> = entries(&open, 0, 100)
        .iter()
        .map(|entry| {
            let path = std::format!("/etc/{}", name(entry));
            assert_eq!(world.walk(&path).unwrap().inode().attributes().ino, entry.ino);
            (name(entry).to_string(), entry.file_type)
        })
        .collect();
    found.sort();
    let expected = [("aaa", 8), ("dir", 4), ("hosts", 8), ("motd", 8), ("twin", 8)];
    assert_eq!(found, expected.map(|(name, kind)| (name.to_string(), kind)));
}

#[test]
fn removing_while_reading_skips_nothing() {
    let world = World::new();
    for n in 0..100 {
        world.write(&std::format!("/tmp/f{n:02}"), "").unwrap();
    }
    let open = world.open("/tmp", OpenFlags::DIRECTORY).unwrap();
    let mut position = 0;
    let mut seen = 0;
    loop {
        let some = entries(&open, position, 7);
        if some.is_empty() {
            break;
        }
        for entry in &some {
            world.unlink(&std::format!("/tmp/{}", name(entry))).unwrap();
            position = entry.next_offset;
            seen += 1;
        }
    }
    assert_eq!(seen, 100);
    // Rewinding looks again.
    assert!(entries(&open, 0, 1).is_empty());
    world.rmdir("/tmp").unwrap();
}

#[test]
fn positions_can_be_gone_back_to() {
    let world = World::new();
    let open = world.open("/etc", OpenFlags::DIRECTORY).unwrap();
    let all = entries(&open, 0, 100);
    assert_eq!(all.len(), 4);
    let again = entries(&open, all[1].next_offset, 1);
    assert_eq!(again[0].name, all[2].name);
    assert!(entries(&open, all[3].next_offset, 1).is_empty());
}

#[test]
fn directories_are_opened_for_reading_only() {
    let world = World::new();
    assert_eq!(error(world.open("/etc", OpenFlags::WRONLY)), Errno::EISDIR);
    assert_eq!(error(world.open("/etc", OpenFlags::CREAT)), Errno::EISDIR);
    assert_eq!(error(world.open("/etc/new/", OpenFlags::CREAT)), Errno::EISDIR);
    assert_eq!(error(world.open("/etc/motd", OpenFlags::DIRECTORY)), Errno::ENOTDIR);
    let open = world.open("/etc", OpenFlags::empty()).unwrap();
    assert_eq!(open.read(&mut Sink::kernel(&mut [0; 4])), Err(Errno::EISDIR));
}

#[test]
fn opening_creates_or_refuses() {
    let world = World::new();
    let exclusive = OpenFlags::CREAT | OpenFlags::EXCL | OpenFlags::RDWR;
    assert_eq!(error(world.open("/etc/motd", exclusive)), Errno::EEXIST);
    assert_eq!(error(world.open("/loop", exclusive)), Errno::EEXIST);
    assert!(world.open("/tmp/new", exclusive).is_ok());
    assert_eq!(error(world.open("/usr/up", OpenFlags::NOFOLLOW)), Errno::ELOOP);
    assert_eq!(error(world.open("/tmp/none/x", OpenFlags::CREAT)), Errno::ENOENT);
    // Through a link that leads nowhere yet.
    world.create("/tmp/link", super::super::inode::NewKind::Symlink(b"target".to_vec())).unwrap();
    world.write("/tmp/link", "made").unwrap();
    assert_eq!(world.read("/tmp/target").unwrap(), "made");
    // A place only.
    let place = world.open("/etc/secret", OpenFlags::PATH).unwrap();
    assert_eq!(place.read(&mut Sink::kernel(&mut [0; 4])), Err(Errno::EBADF));
    let link = world.open("/usr/up", OpenFlags::PATH | OpenFlags::NOFOLLOW).unwrap();
    assert_eq!(link.path.as_ref().unwrap().inode().attributes().mode, 0o120777);
}

#[test]
fn devices_answer_by_number() {
    let world = World::new();
    let null = world.open("/dev/null", OpenFlags::RDWR).unwrap();
    assert_eq!(null.write(&mut Source::kernel(b"gone")), Ok(4));
    assert_eq!(null.read(&mut Sink::kernel(&mut [0; 4])), Ok(0));
    let zero = world.open("/dev/zero", OpenFlags::RDWR).unwrap();
    let mut bytes = [1; 5];
    assert_eq!(zero.read(&mut Sink::kernel(&mut bytes)), Ok(5));
    assert_eq!(bytes, [0; 5]);
    let full = world.open("/dev/full", OpenFlags::RDWR).unwrap();
    assert_eq!(full.write(&mut Source::kernel(b"x")), Err(Errno::ENOSPC));
    let kmsg = world.create("/dev/kmsg", NewKind::CharacterDevice(0x10b));
    kmsg.unwrap();
    assert_eq!(error(world.open("/dev/kmsg", OpenFlags::RDWR)), Errno::ENXIO);
    let attributes = world.walk("/dev/null").unwrap().inode().attributes();
    assert_eq!((attributes.mode, attributes.rdev), (0o020666, 0x103));
    world.write("/dev/shm/segment", "shared").unwrap();
    assert_eq!(world.read("/dev/shm/segment").unwrap(), "shared");
}
