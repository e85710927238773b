//! What is in files: copy-up, holes, sizes.

use super::*;
use crate::fs::inode::AttributeChanges;
use crate::fs::overlay::{Grow, RegularFile, Seals};
use crate::mm::MapRequest;
use crate::mm::backing::{FileBacking, MmapSource};
use crate::mm::limits::GrowthLimits;
use crate::mm::remap::Remap;
use crate::mm::shared::{Placed, SEGV_MAPERR, page_in};
use crate::mm::space::Placement;
use crate::mm::vma::VmaFlags;
use crate::platform::user::UserAddress;
use crate::task::current_process;
use crate::task::process::RLIMIT_FSIZE;
use crate::task::signal::SIGXFSZ;
use crate::testing::is_mapped;

fn read_at(open: &OpenFile, offset: u64, len: usize) -> Vec<u8> {
    let mut bytes = std::vec![0xee; len];
    let count = open.read_at(&mut Sink::kernel(&mut bytes), offset).unwrap();
    bytes.truncate(count);
    bytes
}

fn write_at(open: &OpenFile, offset: u64, bytes: &[u8]) {
    assert_eq!(open.write_at(&mut Source::kernel(bytes), offset), Ok(bytes.len()));
}

/// A lower layer with one file of `len` patterned bytes.
fn world_with_big_file(len: usize) -> (World, Vec<u8>) {
    let text: String = (0..len).map(|i| char::from(b'a' + (i / 7 % 26) as u8)).collect();
    let leaked: &'static str = text.leak();
    (World::over(&[("big", Lower::File(leaked, 0o644))]), leaked.as_bytes().to_vec())
}

#[test]
fn only_pages_that_are_written_are_copied_up() {
    let (world, original) = world_with_big_file(20_000);
    let open = world.open("/big", OpenFlags::RDWR).unwrap();
    write_at(&open, 5000, b"XYZ");
    let mut expected = original.clone();
    expected[5000..5003].copy_from_slice(b"XYZ");
    assert_eq!(read_at(&open, 0, 30_000), expected);
    assert_eq!(read_at(&open, 4999, 5), &expected[4999..5004]);
    // Another description of the same file.
    assert_eq!(world.read("/big").unwrap().as_bytes(), &expected[..]);
    write_at(&open, 19_999, b"end");
    assert_eq!(open.file.size(), 20_002);
    assert_eq!(read_at(&open, 19_998, 10), [&original[19_998..19_999], b"end"].concat());
}

#[test]
fn attributes_follow_a_write() {
    let world = World::new();
    let before = world.walk("/etc/hosts").unwrap().inode().attributes();
    world.write("/etc/hosts", "abc").unwrap();
    let after = world.walk("/etc/hosts").unwrap().inode().attributes();
    assert_eq!(after.size, 3);
    assert!(after.mtime > before.mtime && after.ctime > before.ctime);
    assert_eq!((after.ino, after.mode, after.atime), (before.ino, before.mode, before.atime));
}

#[test]
fn a_cut_off_tail_does_not_come_back() {
    let (world, original) = world_with_big_file(10_000);
    let open = world.open("/big", OpenFlags::RDWR).unwrap();
    open.file.truncate(4100).unwrap();
    assert_eq!(read_at(&open, 0, 10_000), &original[..4100]);
    open.file.truncate(9000).unwrap();
    let mut expected = original[..4100].to_vec();
    expected.resize(9000, 0);
    assert_eq!(read_at(&open, 0, 10_000), expected);
    // The same with pages of its own.
    write_at(&open, 8000, &[1; 1000]);
    open.file.truncate(8500).unwrap();
    open.file.truncate(9000).unwrap();
    assert_eq!(read_at(&open, 8499, 3), [1, 0, 0]);
    write_at(&open, 4150, b"x");
    assert_eq!(read_at(&open, 4098, 4), [original[4098], original[4099], 0, 0]);
}

#[test]
fn holes_read_as_zeros_and_take_no_room() {
    let world = World::new();
    let open = world.open("/tmp/sparse", OpenFlags::CREAT | OpenFlags::RDWR).unwrap();
    write_at(&open, 1 << 40, b"far");
    let stat = open.file.stat().unwrap();
    assert_eq!((stat.size, stat.blocks), ((1 << 40) + 3, 8));
    assert_eq!(read_at(&open, (1 << 40) - 2, 10), b"\0\0far");
    assert_eq!(read_at(&open, 12345, 4), [0; 4]);
    write_at(&open, 8192, b"near");
    let file: &RegularFile = open.downcast().unwrap();
    assert_eq!(file.next_data(0), Ok(8192));
    assert_eq!(file.next_data(8193), Ok(8193));
    assert_eq!(file.next_data(12_288), Ok(1 << 40));
    assert_eq!(file.next_hole(0), Ok(0));
    assert_eq!(file.next_hole(8192), Ok(12_288));
    assert_eq!(file.next_hole((1 << 40) + 1), Ok((1 << 40) + 3));
    assert_eq!(file.next_data((1 << 40) + 3), Err(Errno::ENXIO));
    assert_eq!(file.next_hole((1 << 40) + 3), Err(Errno::ENXIO));
}

#[test]
fn space_is_allocated_and_punched() {
    let (world, original) = world_with_big_file(10_000);
    let open = world.open("/big", OpenFlags::RDWR).unwrap();
    let file: &RegularFile = open.downcast().unwrap();
    file.punch(1000, 5000).unwrap();
    let mut expected = original.clone();
    expected[1000..6000].fill(0);
    assert_eq!(read_at(&open, 0, 10_000), expected);
    file.allocate(9000, 10_000, Grow::No).unwrap();
    assert_eq!(open.file.size(), 10_000);
    file.allocate(9000, 10_000, Grow::Yes).unwrap();
    assert_eq!(open.file.size(), 19_000);
    expected.resize(19_000, 0);
    assert_eq!(read_at(&open, 0, 20_000), expected);
    assert_eq!(file.allocate(u64::MAX - 5, 10, Grow::Yes), Err(Errno::EFBIG));
    let fresh = world.open("/tmp/f", OpenFlags::CREAT | OpenFlags::RDWR).unwrap();
    write_at(&fresh, 0, &[7; 12_288]);
    fresh.downcast::<RegularFile>().unwrap().punch(4096, 4096).unwrap();
    assert_eq!(fresh.file.stat().unwrap().blocks, 16);
    assert_eq!(read_at(&fresh, 4095, 2), [7, 0]);
}

#[test]
fn appending_goes_to_the_end_whatever_the_position() {
    let world = World::new();
    let open = world.open("/etc/motd", OpenFlags::WRONLY | OpenFlags::APPEND).unwrap();
    open.write(&mut Source::kernel(b", world")).unwrap();
    assert_eq!(open.position(), 12);
    // pwrite(2), BUGS.
    open.write_at(&mut Source::kernel(b"!"), 0).unwrap();
    assert_eq!(world.read("/etc/motd").unwrap(), "hello, world!");
    assert_eq!(open.read(&mut Sink::kernel(&mut [0; 4])), Err(Errno::EBADF));
}

#[test]
fn no_file_grows_beyond_the_largest_offset() {
    let world = World::new();
    let open = world.open("/tmp/f", OpenFlags::CREAT | OpenFlags::RDWR).unwrap();
    let max = i64::MAX as u64;
    assert_eq!(open.write_at(&mut Source::kernel(b"xx"), max), Err(Errno::EFBIG));
    assert_eq!(open.write_at(&mut Source::kernel(b"xx"), max - 1), Ok(1));
    assert_eq!(open.file.size(), max);
    assert_eq!(open.file.truncate(max + 1), Err(Errno::EFBIG));
}

#[test]
fn mappings_are_made_of_blobs_until_a_file_changes() {
    let world = World::new();
    let reader = world.open("/etc/hosts", OpenFlags::empty()).unwrap();
    assert!(matches!(reader.file.mmap_source(), Ok(MmapSource::Blob(_))));
    // Through a description for writing, a mapping must see the writes.
    let writer = world.open("/etc/hosts", OpenFlags::RDWR).unwrap();
    let Ok(MmapSource::Upper(pages)) = writer.file.mmap_source() else {
        panic!("not an upper file")
    };
    writer.write(&mut Source::kernel(b"X")).unwrap();
    assert!(matches!(reader.file.mmap_source(), Ok(MmapSource::Upper(_))));
    let mut bytes = [0; 4];
    assert_eq!(pages.read_at(&mut Sink::kernel(&mut bytes), 0), Ok(4));
    assert_eq!(&bytes, b"X27.");
    // A mapping writes inside the file only.
    assert_eq!(pages.write_at(&mut Source::kernel(b"YZ"), pages.len() - 1), Ok(1));
}

#[test]
fn a_page_is_in_one_place_at_a_time() {
    const HERE: u64 = 0x1111_0000;
    const THERE: u64 = 0x2222_0000;
    let at = |address: u64, offset: u64| UserAddress(address + offset);
    let byte = |address, offset| is_mapped(address).then(|| at(address, offset).read().unwrap());
    let poke = |address, offset, value: u8| at(address, offset).write(&value).unwrap();

    let (world, original) = world_with_big_file(10_000);
    let open = world.open("/big", OpenFlags::RDWR).unwrap();
    let Ok(MmapSource::Upper(file)) = open.file.mmap_source() else { panic!("not an upper file") };
    assert_eq!(file.lend(1, HERE, 3), Ok(Some(Placed::Moved)));
    assert_eq!(byte(HERE, 5), Some::<u8>(original[4101]));
    poke(HERE, 5, b'!');
    // A read takes it back and sees the change.
    assert_eq!(read_at(&open, 4101, 1), b"!");
    assert_eq!(byte(HERE, 5), None);
    // So does another mapping.
    assert_eq!(file.lend(1, HERE, 3), Ok(Some(Placed::Moved)));
    poke(HERE, 6, b'?');
    assert_eq!(file.lend(1, THERE, 1), Ok(Some(Placed::Moved)));
    assert_eq!((byte(HERE, 6), byte(THERE, 6)), (None, Some(b'?')));
    // And a write.
    write_at(&open, 4096, b"W");
    assert_eq!(file.lend(1, THERE, 1), Ok(Some(Placed::Moved)));
    assert_eq!(byte(THERE, 0), Some(b'W'));
    file.recall(THERE, THERE + 4096);
    assert_eq!(byte(THERE, 0), None);
    // Behind the end there is nothing, and what is written there is lost.
    assert_eq!(file.lend(3, HERE, 3), Ok(None));
    assert_eq!(file.lend(2, HERE, 3), Ok(Some(Placed::Moved)));
    poke(HERE, 4000, b'x');
    open.file.truncate(20_000).unwrap();
    assert_eq!(byte(HERE, 0), None);
    assert_eq!(read_at(&open, 8192 + 4000, 1), [0]);
    assert_eq!(file.lend(3, HERE, 3), Ok(Some(Placed::Moved)));
    open.file.truncate(100).unwrap();
    assert_eq!(byte(HERE, 0), None);
    assert_eq!(file.lend(3, HERE, 3), Ok(None));
}

#[test]
fn a_private_mapping_loses_what_its_file_loses() {
    const HERE: u64 = 0x1111_0000;
    const THERE: u64 = 0x2222_0000;
    let (world, original) = world_with_big_file(10_000);
    let open = world.open("/big", OpenFlags::RDWR).unwrap();
    let mm = current_process().mm();
    let backing = FileBacking {
        source: open.file.mmap_source().unwrap(),
        path: Arc::from(&b"/big"[..]),
        device: 0,
        inode: 0,
        writable: true,
        holder: None,
    };
    let request = MapRequest {
        placement: Placement::FixedNoReplace(HERE),
        len: 4 * 4096,
        prot: 3,
        flags: VmaFlags::empty(),
        file: Some(Arc::new(backing)),
        offset: 0,
    };
    assert_eq!(mm.map(request), Ok(HERE));
    let mapped = |base: u64| [0, 1, 2, 3].map(|page| is_mapped(base + page * 4096));
    let byte = |address: u64| UserAddress(address).read::<u8>().unwrap();
    let comes = |address: u64| page_in(&mm, address, SEGV_MAPERR);
    assert_eq!(mapped(HERE), [true, true, true, false]);
    UserAddress(HERE + 4096).write(b"w").unwrap();
    UserAddress(HERE + 8192).write(b"w").unwrap();

    open.file.truncate(8000).unwrap();
    assert_eq!(mapped(HERE), [true, true, false, false]);
    assert_eq!(byte(HERE + 4096), b'w');
    assert!(!comes(HERE + 8192));
    assert_eq!(mm.present(HERE, HERE + 4 * 4096), [(HERE, HERE + 8192)]);
    // It comes back as the file has it, and once.
    open.file.truncate(20_000).unwrap();
    write_at(&open, 8193, b"new");
    assert!(comes(HERE + 8192 + 5));
    assert_eq!([byte(HERE + 8192), byte(HERE + 8193)], *b"\0n");
    UserAddress(HERE + 8192).write(b"x").unwrap();
    assert!(comes(HERE + 8192));
    assert_eq!(byte(HERE + 8192), b'x');
    // Pages that are absent in the middle do not hinder those around them.
    open.file.truncate(4096).unwrap();
    open.file.truncate(20_000).unwrap();
    assert!(comes(HERE + 3 * 4096));
    assert_eq!(mapped(HERE), [true, false, false, true]);
    assert_eq!(mm.protect(HERE, 4 * 4096, 3), Ok(()));
    let limit = GrowthLimits::NONE;
    assert_eq!(mm.remap(HERE, 4 * 4096, 4 * 4096, Remap::Fixed(THERE), limit), Ok(THERE));
    assert_eq!((mapped(HERE), mapped(THERE)), ([false; 4], [true, false, false, true]));
    assert_eq!(byte(THERE), original[0]);
    assert!(comes(THERE + 4096));
    assert_eq!(byte(THERE + 4096), 0);
    assert_eq!(mm.unmap(THERE, 4 * 4096), Ok(()));
    assert_eq!(open.file.truncate(0), Ok(()));
    assert!(!comes(THERE));
}

#[test]
fn seals_hold() {
    let world = World::new();
    let inode = world.walk("/etc/motd").unwrap().inode().clone();
    let node = crate::fs::overlay::node_of_inode(&inode).unwrap();
    let file = RegularFile::memory(node, Seals::empty());
    file.write(&mut Source::kernel(b"HELLO"), 0).unwrap();
    file.add_seals(Seals::GROW | Seals::SHRINK).unwrap();
    assert_eq!(file.truncate(2), Err(Errno::EPERM));
    assert_eq!(file.truncate(20), Err(Errno::EPERM));
    // As truncate(2) and `O_TRUNC` do, by way of `/proc/self/fd`.
    assert_eq!(inode.truncate(2), Err(Errno::EPERM));
    assert_eq!(inode.truncate(20), Err(Errno::EPERM));
    assert_eq!(file.write(&mut Source::kernel(b"abc"), 3), Err(Errno::EPERM));
    assert_eq!(file.write(&mut Source::kernel(b"abc"), 2), Ok(3));
    assert_eq!(file.write(&mut Source::kernel(b"abc"), 5), Err(Errno::EPERM));
    file.add_seals(Seals::WRITE | Seals::SEAL).unwrap();
    assert_eq!(file.write(&mut Source::kernel(b"a"), 0), Err(Errno::EPERM));
    assert_eq!(file.add_seals(Seals::EXEC), Err(Errno::EPERM));
    assert_eq!(file.seals(), Ok(Seals::GROW | Seals::SHRINK | Seals::WRITE | Seals::SEAL));
}

#[test]
fn unnamed_files_can_be_given_a_name() {
    let world = World::new();
    let flags = OpenFlags::TMPFILE | OpenFlags::RDWR;
    assert_eq!(error(world.open("/tmp", OpenFlags::TMPFILE)), Errno::EINVAL);
    assert_eq!(error(world.open("/etc/motd", flags)), Errno::ENOTDIR);
    let open = world.open("/tmp", flags).unwrap();
    open.write(&mut Source::kernel(b"quiet")).unwrap();
    assert!(world.list("/tmp").is_empty());
    let path = open.path.clone().unwrap();
    assert_eq!(path.inode().attributes().nlink, 0);
    namespace::link(&world.context, &path, &world.context.cwd, b"/tmp/loud").unwrap();
    assert_eq!(world.read("/tmp/loud").unwrap(), "quiet");
    assert_eq!(world.nlink("/tmp/loud"), 1);
}

/// Makes the running process that of a user with this limit.
fn write_as_a_user(world: &World, file_size_limit: u64) {
    world.sandbox.become_user(Credentials::of_user(1000, 1000));
    current_process().limits.borrow_mut()[RLIMIT_FSIZE].current = file_size_limit;
}

#[test]
fn every_change_of_a_file_keeps_to_the_limit() {
    let world = World::new();
    let open = world.open("/etc/hosts", OpenFlags::RDWR | OpenFlags::TRUNC).unwrap();
    let regular = open.downcast::<RegularFile>().unwrap();
    let write = |at, len| open.file.write(&mut Source::kernel(&std::vec![1; len]), at);
    write_as_a_user(&world, 10);
    assert_eq!(write(0, 20), Ok(10));
    assert_eq!(write(5, 20), Ok(5));
    assert_eq!(write(10, 0), Ok(0));
    assert_eq!(world.sandbox.take_signals(), []);
    let too_large: [&dyn Fn() -> Result<()>; 4] = [
        &|| write(10, 1).map(drop),
        &|| open.file.truncate(11),
        &|| open.path.as_ref().unwrap().inode().truncate(11),
        &|| regular.allocate(0, 11, Grow::Yes),
    ];
    for change in too_large {
        assert_eq!(change(), Err(Errno::EFBIG));
        assert_eq!(world.sandbox.take_signals(), [SIGXFSZ]);
    }
    assert_eq!(regular.allocate(0, 11, Grow::No), Ok(()));
    write_as_a_user(&world, 3);
    assert_eq!(open.file.truncate(8), Ok(()), "a file beyond the limit may shrink");
    assert_eq!(regular.allocate(0, 8, Grow::Yes), Ok(()), "nor does this make it longer");
    assert_eq!(open.file.size(), 8);
    assert_eq!(world.sandbox.take_signals(), []);
}

#[test]
fn every_change_by_a_user_takes_set_user_id_away() {
    let world = World::new();
    let open = world.open("/etc/hosts", OpenFlags::RDWR).unwrap();
    let regular = open.downcast::<RegularFile>().unwrap();
    let inode = open.path.as_ref().unwrap().inode();
    let write = || open.file.write(&mut Source::kernel(b"x"), 0).map(drop);
    let changes: [&dyn Fn() -> Result<()>; 5] = [
        &write,
        &|| open.file.truncate(5),
        &|| inode.truncate(5),
        &|| regular.allocate(0, 10, Grow::No),
        &|| regular.punch(0, 1),
    ];
    for (number, change) in changes.iter().enumerate() {
        for (before, after) in [(0o6777, 0o777), (0o6767, 0o2767), (0o644, 0o644)] {
            let permissions = AttributeChanges { permissions: Some(before), ..Default::default() };
            inode.change(&permissions).unwrap();
            world.sandbox.become_user(Credentials::of_user(0, 0));
            change().unwrap();
            assert_eq!(inode.attributes().mode & 0o7777, before, "by root, {number}");
            write_as_a_user(&world, u64::MAX);
            change().unwrap();
            assert_eq!(inode.attributes().mode & 0o7777, after, "{number}");
        }
    }
}

#[test]
fn nothing_writes_to_the_program_of_a_process() {
    let world = World::new();
    let tool = world.walk("/bin/tool").unwrap();
    *current_process().executable.borrow_mut() = Some(tool.clone());
    assert_eq!(error(world.open("/bin/tool", OpenFlags::RDWR)), Errno::ETXTBSY);
    assert_eq!(error(world.open("/bin/tool", OpenFlags::TRUNC)), Errno::ETXTBSY);
    assert!(world.open("/bin/tool", OpenFlags::empty()).is_ok());
    *current_process().executable.borrow_mut() = None;
    assert!(world.open("/bin/tool", OpenFlags::RDWR).is_ok());
}

#[test]
fn a_setting_takes_the_value_that_it_has() {
    let world = World::new();
    let write = |path: &str, text: &str| {
        let open = world.open(path, OpenFlags::WRONLY | OpenFlags::TRUNC)?;
        open.write(&mut Source::kernel(text.as_bytes()))
    };
    assert_eq!(write("/proc/sys/net/core/somaxconn", "4096"), Ok(4));
    assert_eq!(write("/proc/sys/net/ipv4/ip_local_port_range", "32768 60999\n"), Ok(12));
    assert_eq!(write("/proc/sys/net/core/somaxconn", "1024\n"), Err(Errno::EROFS));
    assert_eq!(write("/proc/sys/fs/inotify/max_user_watches", "1"), Err(Errno::EROFS));
    assert_eq!(write("/proc/sys/kernel/ostype", "Linux"), Err(Errno::EACCES));
    assert_eq!(world.read("/proc/sys/net/core/somaxconn").unwrap(), "4096\n");
}

#[test]
fn there_are_no_block_devices() {
    // lsblk(8) does not go on without the directory.
    let world = World::new();
    assert!(world.walk("/sys/dev/block").is_ok());
    assert_eq!(world.walk("/sys/dev/block/8:0").err(), Some(Errno::ENOENT));
}
