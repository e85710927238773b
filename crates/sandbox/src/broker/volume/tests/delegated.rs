//! Lengths that are delegated, to sandboxes that keep to the rules and to those that do not.

use super::*;
use rustix::fs::{SealFlags, fcntl_get_seals};
use std::mem::{offset_of, size_of};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};
use thaw_abi::bind::{EndsPage, FileLength, LENGTH_DELEGATED, LENGTH_TOLD, LENGTHS};

/// Bytes of a volume.
const QUOTA: u64 = 64 << 20;

/// A sandbox that knows of lengths.
struct Sandbox {
    mount: MountedVolume,
    lengths: File,
    ends: File,
}

/// A file that it has open.
struct Opened {
    handle: u64,
    place: u64,
    file: File,
}

impl Sandbox {
    fn of(tree: &Tree) -> Self {
        Self::with(tree, BoundAccess::Write)
    }

    fn with(tree: &Tree, access: BoundAccess) -> Self {
        let mount = tree.mount(access);
        let page = |which| ask(&mount, VOLUME_LENGTHS, which, 0, b"").unwrap().descriptor.unwrap();
        let (lengths, ends) = (File::from(page(0)), File::from(page(1)));
        Self { mount, lengths, ends }
    }

    fn open(&self, flags: u64, path: &[u8]) -> Result<Opened, Errno> {
        let answer = ask(&self.mount, BIND_OPEN, flags, 0o644, path)?;
        let opened: OpenedVolumeFile = bytemuck::pod_read_unaligned(&answer.tail);
        let file = answer.descriptor.unwrap().into();
        assert!((1..=LENGTHS as u64).contains(&opened.place));
        Ok(Opened { handle: opened.handle, place: opened.place, file })
    }

    fn grant(&self, opened: &Opened, end: u64) -> Result<u64, Errno> {
        let answer = ask(&self.mount, VOLUME_GRANT, opened.handle, end, b"")?;
        Ok(u64::from_ne_bytes(answer.tail.try_into().unwrap()))
    }

    fn number_at(page: &File, at: usize) -> u64 {
        let mut bytes = [0; 8];
        page.read_exact_at(&mut bytes, at as u64).unwrap();
        u64::from_ne_bytes(bytes)
    }

    fn told(&self, opened: &Opened, field: usize) -> u64 {
        let of_file = (opened.place as usize - 1) * size_of::<FileLength>();
        Self::number_at(&self.lengths, of_file + field)
    }

    fn is_delegated(&self, opened: &Opened) -> bool {
        self.told(opened, offset_of!(FileLength, state)) == LENGTH_DELEGATED
    }

    fn length(&self, opened: &Opened) -> u64 {
        self.told(opened, offset_of!(FileLength, length))
    }

    fn said(&self, opened: &Opened) -> u64 {
        Self::number_at(&self.ends, offset_of!(EndsPage, ends) + (opened.place as usize - 1) * 8)
    }

    fn say(&self, opened: &Opened, end: u64) {
        let at = offset_of!(EndsPage, ends) + (opened.place as usize - 1) * 8;
        self.ends.write_all_at(&end.to_ne_bytes(), at as u64).unwrap();
    }

    /// Makes an empty file two bytes long, by two writes: it has room ahead then.
    fn write_two(&self, opened: &Opened) {
        for end in [1, 2] {
            self.grant(opened, end).unwrap();
            self.say(opened, end);
        }
    }

    fn note_written(&self, opened: &Opened) {
        let at = offset_of!(EndsPage, written) + (opened.place as usize - 1) * 8;
        self.ends.write_all_at(&1_u64.to_ne_bytes(), at as u64).unwrap();
    }

    fn set_busy(&self, busy: u64) {
        self.ends.write_all_at(&busy.to_ne_bytes(), 0).unwrap();
    }

    /// What stat(2) says of a name.
    fn size(&self, path: &[u8]) -> u64 {
        let answer = ask(&self.mount, BIND_STAT, 0, 0, path).unwrap();
        bytemuck::pod_read_unaligned::<FileAttributes>(&answer.tail).size
    }
}

fn on_host(opened: &Opened) -> u64 {
    opened.file.metadata().unwrap().len()
}

#[test]
fn who_has_a_file_alone_says_how_long_it_is_until_another_one_opens_it() {
    let tree = Tree::new(QUOTA);
    let (one, other) = (Sandbox::of(&tree), Sandbox::of(&tree));
    let opened = one.open(CREATE, b"file").unwrap();
    assert!(one.is_delegated(&opened));
    // What is asked for first is granted, and more and more from then on.
    assert_eq!(one.grant(&opened, 5000), Ok(5000));
    one.say(&opened, 5000);
    assert_eq!(one.grant(&opened, 5001), Ok(5001 + (128 << 10)));
    assert_eq!(one.grant(&opened, 150_000), Ok(150_000 + (256 << 10)));
    assert_eq!(one.grant(&opened, 160_000), Ok(150_000 + (256 << 10)), "it has that");
    one.say(&opened, 160_000);
    assert_eq!((one.size(b"file"), other.size(b"file")), (160_000, 160_000));
    assert_eq!(on_host(&opened), 150_000 + (256 << 10));
    let (handle, _) = open(&one.mount, 0, b"file").unwrap();
    assert!(one.is_delegated(&opened), "it is the same sandbox");
    let theirs = other.open(0o2, b"file").unwrap();
    assert_eq!((on_host(&opened), tree.used()), (160_000, NAME_COST + blocks(160_000)));
    assert!(!one.is_delegated(&opened) && !other.is_delegated(&theirs));
    assert_eq!((one.length(&opened), other.length(&theirs)), (160_000, 160_000));
    assert_eq!(one.grant(&opened, 200_000), Err(Errno::AGAIN));
    // Both are told of changes.
    ask(&other.mount, VOLUME_GROW, theirs.handle, 200_000, b"").unwrap();
    ask(&one.mount, VOLUME_APPEND, opened.handle, 7, b"").unwrap();
    assert_eq!((one.length(&opened), other.length(&theirs)), (200_007, 200_007));
    ask(&one.mount, BIND_TRUNCATE, 10, 0, b"file").unwrap();
    assert_eq!((one.length(&opened), other.length(&theirs)), (10, 10));
    // Who is left has it alone again.
    ask(&one.mount, BIND_CLOSE, opened.handle, 0, b"").unwrap();
    assert!(!other.is_delegated(&theirs), "it is open twice");
    ask(&one.mount, BIND_CLOSE, handle, 0, b"").unwrap();
    assert!(other.is_delegated(&theirs));
    assert_eq!(one.grant(&opened, 20), Err(Errno::BADF));
    assert_eq!(other.grant(&theirs, 20), Ok(20));
}

#[test]
fn what_a_sandbox_says_counts_within_what_it_was_granted() {
    let tree = Tree::new(QUOTA);
    let one = Sandbox::of(&tree);
    let opened = one.open(CREATE, b"file").unwrap();
    for (granted, said, expected) in
        [(4096, u64::MAX, 4096), (8192, 0, 4096), (8192, 4097, 4097), (8192, 1 << 40, 8192)]
    {
        assert_eq!(one.grant(&opened, granted), Ok(granted));
        one.say(&opened, said);
        assert_eq!(one.size(b"file"), expected, "{said}");
        ask(&one.mount, BIND_SYNC, opened.handle, 0, b"").unwrap();
        assert_eq!((on_host(&opened), one.size(b"file")), (expected, expected), "{said}");
        assert!(one.is_delegated(&opened));
    }
    // A file that is read only is told of, and cannot be made longer.
    let reader = tree.mount(BoundAccess::Read);
    for which in [0, 1] {
        ask(&reader, VOLUME_LENGTHS, which, 0, b"").unwrap();
    }
    ask(&one.mount, BIND_CLOSE, opened.handle, 0, b"").unwrap();
    let (handle, _) = open(&reader, 0, b"file").unwrap();
    assert_eq!(ask(&reader, VOLUME_GRANT, handle, 9000, b"").err(), Some(Errno::ROFS));
    let read_only = one.open(0, b"file").unwrap();
    assert!(one.grant(&read_only, 9000).is_err());
    assert_eq!((one.size(b"file"), tree.used()), (8192, NAME_COST + 8192));
}

#[test]
fn a_grant_is_within_the_quota_and_what_is_not_used_is_given_back() {
    let tree = Tree::new(1 << 20);
    let one = Sandbox::of(&tree);
    let opened = one.open(CREATE, b"file").unwrap();
    assert_eq!(one.grant(&opened, 1 << 20), Err(Errno::DQUOT));
    assert_eq!((on_host(&opened), tree.used()), (0, NAME_COST));
    let mut end = 0;
    while one.grant(&opened, end + 4096).is_ok() {
        end += 4096;
        one.say(&opened, end);
    }
    assert_eq!(end, (1 << 20) - NAME_COST, "nothing is left unused");
    ask(&one.mount, BIND_FTRUNCATE, opened.handle, 100_000, b"").unwrap();
    assert_eq!(tree.used(), NAME_COST + blocks(100_000));
    for end in [100_001, 100_002] {
        one.grant(&opened, end).unwrap();
        one.say(&opened, end);
    }
    assert!(tree.used() > NAME_COST + (150 << 10));
    ask(&one.mount, BIND_UNLINK, 0, 0, b"file").unwrap();
    ask(&one.mount, BIND_CLOSE, opened.handle, 0, b"").unwrap();
    assert_eq!((tree.used(), on_host(&opened)), (0, 0));
}

#[test]
fn what_nobody_writes_to_is_soon_as_long_on_the_host_as_it_is_said_to_be() {
    let tree = Tree::new(QUOTA);
    let one = Sandbox::of(&tree);
    let opened = one.open(CREATE, b"file").unwrap();
    one.write_two(&opened);
    assert!(on_host(&opened) > 2);
    let until = Instant::now() + Duration::from_secs(20);
    while on_host(&opened) > 2 || !one.is_delegated(&opened) {
        assert!(Instant::now() < until, "it is still longer");
        std::thread::sleep(Duration::from_millis(10));
    }
    assert_eq!(one.grant(&opened, 3), Ok(3));
}

#[test]
fn a_sandbox_that_stays_busy_keeps_its_file_until_it_ends() {
    let tree = Tree::new(QUOTA);
    let (one, other) = (Sandbox::of(&tree), Sandbox::of(&tree));
    let opened = one.open(CREATE, b"file").unwrap();
    one.grant(&opened, 5000).unwrap();
    one.set_busy(1);
    assert_eq!(other.open(0o2, b"file").err(), Some(Errno::TIMEDOUT));
    assert!(one.is_delegated(&opened));
    let soon = Instant::now() + Duration::from_secs(10);
    ClosedVolume::close(&tree.volume, soon).unwrap_err();
    other.open(CREATE, b"more").unwrap();
    one.say(&opened, 700);
    drop(one);
    assert_eq!(other.size(b"file"), 700);
    other.open(0o2, b"file").unwrap();
}

#[test]
fn files_are_cut_after_a_process_that_was_killed() {
    let tree = Tree::new(QUOTA);
    let one = Sandbox::of(&tree);
    let opened = one.open(CREATE, b"file").unwrap();
    ask(&one.mount, BIND_MKDIR, 0o755, 0, b"d").unwrap();
    let below = one.open(CREATE, b"d/below").unwrap();
    for file in [&opened, &below] {
        for end in [3000, 3001] {
            one.grant(file, end).unwrap();
        }
    }
    opened.file.write_all_at(&[1; 3001], 0).unwrap();
    one.say(&opened, 3001);
    one.say(&below, u64::MAX);
    let granted = on_host(&opened);
    // What a killed process leaves.
    let lengths = tree.all.path().join("lengths");
    let kept = tree.all.path().join("kept");
    fs::create_dir(&kept).unwrap();
    for entry in fs::read_dir(&lengths).unwrap() {
        let entry = entry.unwrap();
        fs::copy(entry.path(), kept.join(entry.file_name())).unwrap();
    }
    drop(one);
    let Tree { all, volume, .. } = tree;
    drop(volume);
    assert_eq!(fs::read_dir(&lengths).unwrap().count(), 0);
    let as_killed = || {
        for entry in fs::read_dir(&kept).unwrap() {
            let entry = entry.unwrap();
            fs::copy(entry.path(), lengths.join(entry.file_name())).unwrap();
        }
        opened.file.set_len(granted).unwrap();
        below.file.set_len(granted).unwrap();
    };
    as_killed();
    let volume = open_volume(&all, QUOTA).unwrap();
    assert_eq!((on_host(&opened), on_host(&below)), (3001, granted));
    assert_eq!(fs::read(all.path().join("files/file")).unwrap(), [1; 3001]);
    assert_eq!(volume.used(), Ok(3 * NAME_COST + blocks(3001) + blocks(granted)));
    assert_eq!(fs::read_dir(&lengths).unwrap().count(), 0);
    drop(volume);
    // Of another boot of the machine, nothing is known.
    as_killed();
    for entry in fs::read_dir(&lengths).unwrap() {
        let path = entry.unwrap().path();
        if path.to_str().unwrap().ends_with(".granted") {
            File::options().write(true).open(path).unwrap().write_all_at(b"x", 3).unwrap();
        }
    }
    drop(open_volume(&all, QUOTA).unwrap());
    assert_eq!(on_host(&opened), granted);
    // Neither is anything known of a file whose length somebody has changed since.
    as_killed();
    opened.file.set_len(granted + 1).unwrap();
    drop(open_volume(&all, QUOTA).unwrap());
    assert_eq!(on_host(&opened), granted + 1);
    // A sandbox that has not ended yet is waited for.
    as_killed();
    let ends = fs::read_dir(&lengths).unwrap().map(|entry| entry.unwrap().path());
    let ends = ends.into_iter().find(|path| path.extension().is_none()).unwrap();
    let orphan = File::options().write(true).open(ends).unwrap();
    std::thread::scope(|threads| {
        threads.spawn(move || {
            std::thread::sleep(Duration::from_millis(300));
            drop(orphan);
        });
        drop(open_volume(&all, QUOTA).unwrap());
    });
    assert_eq!(on_host(&opened), 3001);
    as_killed();
    // What is no record is no reason not to open the volume.
    fs::write(lengths.join("7-7.granted"), "short").unwrap();
    opened.file.set_len(7).unwrap();
    drop(open_volume(&all, QUOTA).unwrap());
    assert_eq!(fs::read_dir(&lengths).unwrap().count(), 0);
}

#[test]
fn two_processes_that_have_a_volume_say_no_lengths() {
    let tree = Tree::new(QUOTA);
    let one = Sandbox::of(&tree);
    let opened = one.open(CREATE, b"file").unwrap();
    for end in [3000, 3001] {
        one.grant(&opened, end).unwrap();
    }
    one.say(&opened, 3001);
    let second = open_volume(&tree.all, QUOTA).unwrap();
    assert!(!one.is_delegated(&opened));
    assert_eq!((on_host(&opened), one.length(&opened)), (3001, u64::MAX));
    let second = Tree { all: tempfile::tempdir().unwrap(), volume: Arc::new(second), ..tree };
    let other = Sandbox::of(&second);
    let theirs = other.open(CREATE, b"other").unwrap();
    assert!(!other.is_delegated(&theirs) && other.length(&theirs) == u64::MAX);
    drop((other, theirs));
    drop(second);
}

/// What the kernel of a sandbox takes a file for, at every moment.
#[test]
fn a_file_is_never_shorter_than_its_sandbox_has_made_it() {
    let tree = Tree::new(QUOTA);
    let one = Sandbox::of(&tree);
    let opened = one.open(CREATE, b"file").unwrap();
    one.grant(&opened, 5000).unwrap();
    one.say(&opened, 5000);
    let is_over = AtomicBool::new(false);
    let length = || match one.told(&opened, offset_of!(FileLength, state)) {
        LENGTH_TOLD => one.length(&opened),
        _ => one.said(&opened),
    };
    std::thread::scope(|threads| {
        threads.spawn(|| {
            while !is_over.load(Ordering::Relaxed) {
                assert!((5000..u64::MAX).contains(&length()), "{}", length());
            }
        });
        for end in 5001..5400 {
            one.grant(&opened, end).unwrap();
            one.say(&opened, end);
            ask(&one.mount, BIND_SYNC, opened.handle, 0, b"").unwrap();
        }
        is_over.store(true, Ordering::Relaxed);
    });
}

#[test]
fn a_reader_says_no_lengths_and_keeps_nobody_from_a_file() {
    let tree = Tree::new(QUOTA);
    let one = Sandbox::of(&tree);
    let opened = one.open(CREATE, b"file").unwrap();
    ask(&one.mount, VOLUME_WRITE, opened.handle, 0, b"text").unwrap();
    ask(&one.mount, BIND_CLOSE, opened.handle, 0, b"").unwrap();
    let reader = Sandbox::with(&tree, BoundAccess::Read);
    let theirs = reader.open(0, b"file").unwrap();
    assert!(!reader.is_delegated(&theirs) && reader.length(&theirs) == 4);
    reader.set_busy(1);
    let opened = one.open(0o2, b"file").unwrap();
    ask(&one.mount, VOLUME_WRITE, opened.handle, VOLUME_END, b"more").unwrap();
    assert_eq!((reader.length(&theirs), one.length(&opened)), (8, 8));
}

#[test]
fn room_that_was_granted_ahead_is_there_for_whoever_needs_it() {
    let tree = Tree::new(2 << 20);
    let one = Sandbox::of(&tree);
    for number in 0..8 {
        let opened = one.open(CREATE, format!("file{number}").as_bytes()).unwrap();
        one.write_two(&opened);
    }
    let free = (2 << 20) - tree.used();
    assert!(free < 1 << 20, "{free}");
    let other = Sandbox::of(&tree);
    let opened = other.open(CREATE, b"large").unwrap();
    let most = (2 << 20) - 9 * NAME_COST - 8 * 4096;
    assert_eq!(other.grant(&opened, most), Ok(most));
    assert_eq!(other.grant(&opened, most + 1), Err(Errno::DQUOT));
}

/// A program of before, which knows nothing of lengths, has the volume, too.
#[test]
fn an_older_process_is_noticed() {
    let tree = Tree::new(QUOTA);
    let one = Sandbox::of(&tree);
    let opened = one.open(CREATE, b"file").unwrap();
    one.write_two(&opened);
    let users = File::options().read(true).write(true).open(tree.all.path().join("users")).unwrap();
    flock(&users, FlockOperation::LockShared).unwrap();
    sys::set_lock(users.as_fd(), RecordLock::Read, 0, 1).unwrap();
    let until = Instant::now() + Duration::from_secs(20);
    while one.is_delegated(&opened) || on_host(&opened) != 2 {
        assert!(Instant::now() < until, "its length is delegated still");
        std::thread::sleep(Duration::from_millis(10));
    }
}

#[test]
fn a_file_keeps_the_time_that_its_program_has_given_it() {
    let tree = Tree::new(QUOTA);
    let one = Sandbox::of(&tree);
    let opened = one.open(CREATE, b"file").unwrap();
    one.write_two(&opened);
    let time = || opened.file.metadata().unwrap().mtime();
    one.note_written(&opened);
    let day = 86_400_000_000_000;
    ask(&one.mount, BIND_UTIMES, BIND_TIME_OMIT, day, b"file").unwrap();
    assert!(on_host(&opened) > 2 && time() == 86_400);
    ask(&one.mount, BIND_SYNC, opened.handle, 0, b"").unwrap();
    assert_eq!((on_host(&opened), time()), (2, 86_400));
    // Whoever looks next sees that it was written to.
    one.note_written(&opened);
    let found = ask(&one.mount, BIND_STAT, 0, 0, b"file").unwrap();
    let found = bytemuck::pod_read_unaligned::<FileAttributes>(&found.tail);
    assert!(found.mtime_sec > 86_400 && time() == found.mtime_sec);
    ask(&one.mount, BIND_UTIMES, BIND_TIME_OMIT, day, b"file").unwrap();
    one.note_written(&opened);
    ask(&one.mount, BIND_CLOSE, opened.handle, 0, b"").unwrap();
    assert!(time() > 86_400);
}

#[test]
fn no_time_changes_while_files_are_copied() {
    let tree = Tree::new(QUOTA);
    let one = Sandbox::of(&tree);
    let opened = one.open(CREATE, b"file").unwrap();
    let day = 86_400_000_000_000;
    ask(&one.mount, BIND_UTIMES, BIND_TIME_OMIT, day, b"file").unwrap();
    one.note_written(&opened);
    let soon = Instant::now() + Duration::from_secs(20);
    let closed = ClosedVolume::close(&tree.volume, soon).unwrap();
    let time = || opened.file.metadata().unwrap().modified().unwrap();
    let before = time();
    assert!(opened.file.metadata().unwrap().mtime() > 86_400, "it was written before");
    one.note_written(&opened);
    // Longer than whoever looks after lengths sleeps.
    std::thread::sleep(Duration::from_millis(800));
    assert_eq!(time(), before);
    drop(closed);
    let until = Instant::now() + Duration::from_secs(20);
    while time() == before {
        assert!(Instant::now() < until, "its time does not change");
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// Two processes that have a volume append to one file.
#[test]
fn what_processes_append_at_once_is_all_there() {
    let tree = Tree::new(QUOTA);
    let second = Arc::new(open_volume(&tree.all, QUOTA).unwrap());
    let volumes = [tree.volume.clone(), second];
    std::thread::scope(|threads| {
        for (number, volume) in volumes.iter().enumerate() {
            threads.spawn(move || {
                let of_tenant = Shared::new(4096, 64 << 20).of_tenant();
                let access = BoundAccess::Write;
                let mount = VolumeMount { volume: volume.clone(), access, of_tenant };
                let mount = MountedVolume::new(&mount, Share::default(), 0);
                let handle = loop {
                    match open(&mount, CREATE, b"log").or_else(|_| open(&mount, 0o2, b"log")) {
                        Ok((handle, _)) => break handle,
                        Err(_) => std::thread::yield_now(),
                    }
                };
                for _ in 0..500 {
                    let line = [b"one\n", b"two\n"][number];
                    ask(&mount, VOLUME_WRITE, handle, VOLUME_END, line).unwrap();
                }
            });
        }
    });
    let text = fs::read_to_string(tree.path("log")).unwrap();
    assert_eq!(text.lines().filter(|line| *line == "one").count(), 500);
    assert_eq!(text.lines().filter(|line| *line == "two").count(), 500);
    assert_eq!(tree.used(), NAME_COST + blocks(4000));
}

#[test]
fn the_hosts_page_cannot_be_changed_by_who_has_it() {
    let tree = Tree::new(QUOTA);
    let one = Sandbox::of(&tree);
    let seals = SealFlags::SHRINK | SealFlags::GROW | SealFlags::FUTURE_WRITE;
    assert!(fcntl_get_seals(&one.lengths).unwrap().contains(seals));
    one.lengths.write_all_at(&[1], 0).unwrap_err();
    for which in [0, 1] {
        let again = ask(&one.mount, VOLUME_LENGTHS, which, 0, b"").err();
        assert_eq!(again, Some(Errno::BUSY), "each is granted once");
    }
    let page = one.ends.metadata().unwrap().len();
    assert_eq!(page, size_of::<EndsPage>() as u64);
}
