//! Sandboxes that the daemon before this one has left.

use super::*;
use rustix::process::{Pid, PidfdFlags, pidfd_open};
use std::process::{Child, Command};
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::thread;
use std::time::{Duration, Instant};

const QUOTA: u64 = 64 << 20;

/// A process in the place of a sandbox'.
struct Process(Child);

impl Process {
    fn new() -> Self {
        Self(Command::new("sleep").arg("1000").spawn().unwrap())
    }

    fn pidfd(&self) -> OwnedFd {
        pidfd_open(Pid::from_child(&self.0), PidfdFlags::empty()).unwrap()
    }

    fn has_ended(&mut self) -> bool {
        self.0.try_wait().unwrap().is_some()
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// One that has lost its locks is ended at once.
#[test]
fn nobody_goes_on_without_the_locks_that_it_had() {
    let tree = next(&Tree::new(QUOTA));
    let mut process = Process::new();
    let mount = left(&tree, 7, &process);
    go_on(vec![tree.volume.clone()]);
    renew(&mount, RENEW_LET_GO);
    renew(&mount, RENEW_LOST);
    assert!(process.has_ended());
    open(&tree.mount(BoundAccess::Write), CREATE, b"other").unwrap();
}

/// One sandbox has two volumes, of which another one is slow to let go.
#[test]
fn nobody_is_late_for_the_sake_of_others() {
    let trees = [next(&Tree::new(QUOTA)), next(&Tree::new(QUOTA))];
    let (mut quick, mut slow) = (Process::new(), Process::new());
    let mounts = trees.each_ref().map(|tree| left(tree, 7, &quick));
    let silent = left(&trees[1], 8, &slow);
    let (volumes, apart) = (trees.iter().map(|tree| tree.volume.clone()), next(&Tree::new(QUOTA)));
    go_on(volumes.chain([apart.volume.clone()]).collect());
    // Nobody who has it is left.
    open(&apart.mount(BoundAccess::Write), CREATE, b"file").unwrap();
    assert!(!trees[0].volume.left.is_over());
    mounts.iter().for_each(|mount| drop(renew(mount, RENEW_LET_GO)));
    for mount in &mounts {
        open(mount, CREATE, b"file").unwrap();
        renew(mount, RENEW_DONE);
    }
    trees
        .iter()
        .for_each(|tree| drop(open(&tree.mount(BoundAccess::Write), 0o2, b"file").unwrap()));
    assert!(!quick.has_ended() && slow.has_ended());
    drop(silent);
}

/// Goes on with volumes, all of which can begin.
fn go_on(volumes: Vec<Arc<Volume>>) {
    Volume::go_on_with_left(volumes, |_, error| panic!("{error}")).unwrap();
}

/// A volume of which some are left, as the next daemon opens it.
fn next(tree: &Tree) -> Tree {
    let all = tempfile::tempdir().unwrap();
    for name in ["files", "lengths"] {
        let mut copy = Command::new("cp");
        // There are no lengths where nobody was told of any.
        let _ = copy.arg("-a").arg(tree.all.path().join(name)).arg(all.path()).output().unwrap();
    }
    let volume = Arc::new(open_volume_with(&all, QUOTA, true).unwrap());
    Tree { all, volume, of_tenant: tree.of_tenant.clone() }
}

fn left(tree: &Tree, holder: VolumeHolder, process: &Process) -> MountedVolume {
    let (volume, of_tenant) = (tree.volume.clone(), tree.of_tenant.clone());
    let mount = VolumeMount { volume, access: BoundAccess::Write, of_tenant };
    MountedVolume::left(&mount, Share::default(), holder, process.pidfd())
}

fn renew(mount: &MountedVolume, step: u64) -> Answer {
    ask(mount, VOLUME_RENEW, step, 0, b"").unwrap()
}

fn number_of(answer: &Answer) -> u64 {
    u64::from_ne_bytes(answer.tail[..].try_into().unwrap())
}

#[test]
fn others_are_served_when_those_who_are_left_have_their_files_again() {
    let tree = next(&Tree::new(QUOTA));
    let processes = [Process::new(), Process::new()];
    let mounts = [left(&tree, 7, &processes[0]), left(&tree, 8, &processes[1])];
    let other = tree.mount(BoundAccess::Write);
    for mount in &mounts {
        assert_eq!(ask(mount, BIND_STATFS, 0, 0, b"").err(), Some(Errno::NOTCONN));
        assert_eq!(number_of(&renew(mount, RENEW_ASK)), 1);
    }
    assert_eq!(number_of(&renew(&other, RENEW_ASK)), 0);
    let is_open = AtomicBool::new(false);
    let is_served = AtomicBool::new(false);
    thread::scope(|threads| {
        threads.spawn(|| {
            open(&other, CREATE, b"other").unwrap();
            is_served.store(true, SeqCst);
        });
        renew(&mounts[0], RENEW_LET_GO);
        // It waits for the second one.
        threads.spawn(|| {
            open(&mounts[0], CREATE, b"first").unwrap();
            is_open.store(true, SeqCst);
        });
        go_on(vec![tree.volume.clone()]);
        thread::sleep(Duration::from_millis(100));
        assert!(!is_open.load(SeqCst));
        renew(&mounts[1], RENEW_LET_GO);
        let (handle, _) = open(&mounts[1], CREATE, b"second").unwrap();
        let locked = ask(&mounts[1], VOLUME_FLOCK, handle, 2, b"");
        assert!(locked.is_ok());
        let until = Instant::now() + Duration::from_secs(20);
        while !is_open.load(SeqCst) && Instant::now() < until {
            thread::sleep(Duration::from_millis(5));
        }
        thread::sleep(Duration::from_millis(100));
        assert!(is_open.load(SeqCst) && !is_served.load(SeqCst), "locks are taken again first");
        assert!(ClosedVolume::close(&tree.volume, std::time::Instant::now()).is_err());
        renew(&mounts[0], RENEW_DONE);
        let more = threads.spawn(|| open(&mounts[0], 0o2, b"second"));
        thread::sleep(Duration::from_millis(100));
        assert!(!more.is_finished(), "what others had is theirs first");
        // One that ends is waited for no longer.
        mounts[1].end();
    });
    assert!(is_served.load(SeqCst));
    assert_eq!(tree.used(), 3 * NAME_COST);
    ClosedVolume::close(&tree.volume, std::time::Instant::now()).unwrap();
}

/// The former host had made the file longer ahead.
#[test]
fn a_file_ends_where_its_sandbox_has_said_last() {
    let tree = Tree::new(QUOTA);
    let (volume, of_tenant) = (tree.volume.clone(), tree.of_tenant.clone());
    let mount = VolumeMount { volume, access: BoundAccess::Write, of_tenant };
    let mount = MountedVolume::new(&mount, Share::default(), 7);
    let page = |which| ask(&mount, VOLUME_LENGTHS, which, 0, b"").unwrap().descriptor.unwrap();
    let (_lengths, ends) = (page(0), File::from(page(1)));
    let (handle, file) = open(&mount, CREATE, b"file").unwrap();
    for end in [10, 11] {
        ask(&mount, VOLUME_GRANT, handle, end, b"").unwrap();
    }
    file.write_all_at(b"hello world", 0).unwrap();
    ends.write_all_at(&11_u64.to_ne_bytes(), std::mem::offset_of!(EndsPage, ends) as u64).unwrap();
    assert!(file.metadata().unwrap().len() > 100_000);
    let tree = next(&tree);
    let names: Vec<_> = tree.all.path().join("lengths").read_dir().unwrap().collect();
    assert_eq!(names.len(), 2);
    // What was copied has other inode numbers.
    let inode = fs::metadata(tree.path("file")).unwrap().ino();
    for name in names {
        let path = name.unwrap().path();
        if path.extension().is_some() {
            let record = File::options().write(true).open(path).unwrap();
            record.write_all_at(&inode.to_ne_bytes(), 40).unwrap();
        }
    }
    let process = Process::new();
    let mount = left(&tree, 7, &process);
    go_on(vec![tree.volume.clone()]);
    renew(&mount, RENEW_LET_GO);
    let (_, file) = open(&mount, 0o2, b"file").unwrap();
    assert_eq!(file.metadata().unwrap().len(), 11);
    assert_eq!(fs::read(tree.path("file")).unwrap(), b"hello world");
    assert_eq!(tree.used(), NAME_COST + 4096);
    assert_eq!(fs::read_dir(tree.all.path().join("lengths")).unwrap().count(), 0);
}

#[test]
fn who_does_not_come_on_is_killed() {
    let tree = next(&Tree::new(QUOTA));
    let mut processes = [Process::new(), Process::new()];
    let mounts = [left(&tree, 7, &processes[0]), left(&tree, 8, &processes[1])];
    // To be done without having let go is nothing.
    renew(&mounts[0], RENEW_DONE);
    assert_eq!(ask(&mounts[0], VOLUME_RENEW, 9, 0, b"").err(), Some(Errno::INVAL));
    renew(&mounts[0], RENEW_LOST);
    renew(&mounts[1], RENEW_LET_GO);
    assert!(!processes[0].has_ended(), "it has not let go here");
    go_on(vec![tree.volume.clone()]);
    let other = tree.mount(BoundAccess::Write);
    open(&other, CREATE, b"other").unwrap();
    // The second one has let go, and said nothing then.
    assert!(processes.iter_mut().all(Process::has_ended));
}

/// A program of the operator's, which knows nothing of who is left.
#[test]
fn another_process_comes_in_when_all_have_what_is_theirs() {
    let tree = next(&Tree::new(QUOTA));
    let process = Process::new();
    let mount = left(&tree, 7, &process);
    let has_come = AtomicBool::new(false);
    thread::scope(|threads| {
        threads.spawn(|| {
            let other = open_volume(&tree.all, QUOTA).unwrap();
            has_come.store(true, SeqCst);
            assert_eq!(other.used(), Ok(NAME_COST));
        });
        go_on(vec![tree.volume.clone()]);
        renew(&mount, RENEW_LET_GO);
        open(&mount, CREATE, b"file").unwrap();
        thread::sleep(Duration::from_millis(200));
        assert!(!has_come.load(SeqCst));
        renew(&mount, RENEW_DONE);
    });
    assert!(has_come.load(SeqCst));
}

#[test]
fn why_a_volume_cannot_begin_is_said_once_for_each_cause() {
    static SAID: Mutex<Vec<Option<Errno>>> = Mutex::new(Vec::new());
    let said = || SAID.lock().unwrap().clone();
    let wait_until_said = |count: usize| {
        while said().len() < count {
            thread::sleep(Duration::from_millis(10));
        }
    };
    let tree = next(&Tree::new(QUOTA));
    let lengths = tree.all.path().join("lengths");
    fs::write(&lengths, "no directory").unwrap();
    let report = |_: &Arc<Volume>, error: &io::Error| {
        SAID.lock().unwrap().push(Errno::from_io_error(error));
    };
    Volume::go_on_with_left(vec![tree.volume.clone()], report).unwrap();
    wait_until_said(1);
    let again = io::Error::from(Errno::NOTDIR);
    assert!(!tree.volume.left.is_new_problem(&again), "it was said before");
    // At every moment there is something that prevents it.
    let other = tree.all.path().join("other");
    std::os::unix::fs::symlink(&lengths, &other).unwrap();
    fs::rename(&other, &lengths).unwrap();
    wait_until_said(2);
    assert!(!tree.volume.left.is_over());
    fs::remove_file(&lengths).unwrap();
    open(&tree.mount(BoundAccess::Write), CREATE, b"file").unwrap();
    assert_eq!(said(), [Some(Errno::NOTDIR), Some(Errno::LOOP)]);
}
