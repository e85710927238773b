//! The state helper: the process that reads the memory of sandboxes. Looked at from outside,
//! killed, and stopped, with a stand-in kernel that lays out memory like a frozen program.

mod common;

use std::fs::{self, File};
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use bytemuck::Zeroable;
use common::{Blobs, index_rootfs, next, parent, said, start_with};
use rustix::process::{Pid, Signal, geteuid, kill_process};
use tempfile::NamedTempFile;
use thaw_abi::control::EntryPoint;
use thaw_abi::rootfs::{INDEX_MAGIC, IndexHeader};
use thaw_sandbox::{
    BlobSource, BootPlan, Event, FreezeError, FreezeReport, FreezeSpec, Image, MemoryReader,
    MergePolicy, Rootfs, Sandbox, StateError, ThawOptions, UserIds, WorkingSet, ZygoteParent,
    freeze,
};

const PATIENCE: Duration = Duration::from_secs(60);

fn blob() -> Vec<u8> {
    (0..8).flat_map(|page| vec![page + 1; 4096]).collect()
}

fn spec() -> FreezeSpec {
    FreezeSpec {
        index_hash: [3; 32],
        program: "example".into(),
        arguments: String::new(),
        about: "{}".into(),
        max_stored: 1 << 30,
        merge: MergePolicy::default(),
        base: None,
        identity: None,
        post_copy: false,
    }
}

fn at_entry_point(parent: &ZygoteParent, rootfs: Rootfs) -> (Sandbox, EntryPoint) {
    let mut sandbox = start_with(parent.create().unwrap(), "freeze", "0", rootfs, |_| {});
    match next(&mut sandbox) {
        Event::EntryPoint(entry) => (sandbox, entry),
        event => panic!("{event:?}"),
    }
}

fn frozen(sandbox: &Sandbox, entry: EntryPoint) -> (NamedTempFile, FreezeReport) {
    let file = NamedTempFile::new().unwrap();
    let report = freeze(sandbox, entry, &spec(), file.as_file()).unwrap();
    (file, report)
}

fn proc(pid: u32, name: &str) -> PathBuf {
    Path::new("/proc").join(pid.to_string()).join(name)
}

fn namespace(pid: u32, name: &str) -> u64 {
    fs::metadata(proc(pid, "ns").join(name)).unwrap().ino()
}

fn status(pid: u32, field: &str) -> String {
    let status = fs::read_to_string(proc(pid, "status")).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix(field)?.strip_prefix(':'));
    line.unwrap().trim().to_owned()
}

/// The state helpers of a zygote parent, which has adopted them.
fn helpers(parent: &ZygoteParent) -> Vec<u32> {
    let is_helper = |pid: &u32| {
        let arguments = fs::read(proc(*pid, "cmdline")).unwrap_or_default();
        let status = fs::read_to_string(proc(*pid, "status")).unwrap_or_default();
        arguments.windows(19).any(|part| part == b"--thaw-state-helper")
            && status.contains(&format!("PPid:\t{}\n", parent.pid()))
    };
    let numbers = fs::read_dir("/proc").unwrap().flatten();
    numbers.filter_map(|entry| entry.file_name().to_str()?.parse().ok()).filter(is_helper).collect()
}

fn helper(parent: &ZygoteParent) -> u32 {
    match helpers(parent)[..] {
        [pid] => pid,
        ref others => panic!("{others:?}"),
    }
}

/// The last parts of what its descriptors refer to.
fn descriptors(pid: u32) -> Vec<String> {
    let targets = fs::read_dir(proc(pid, "fd"))
        .unwrap()
        // One may be closed meanwhile.
        .filter_map(|entry| fs::read_link(entry.unwrap().path()).ok());
    let mut names: Vec<String> = targets
        .map(|target| match target.file_name() {
            Some(name) => name.to_string_lossy().split(':').next().unwrap().to_owned(),
            None => "/".to_owned(),
        })
        .collect();
    names.sort();
    names
}

/// The worker of a helper, in the middle of a request.
fn worker(helper: u32) -> u32 {
    let children = fs::read_to_string(proc(helper, &format!("task/{helper}/children"))).unwrap();
    children.trim().parse().unwrap()
}

fn signal(pid: u32, signal: Signal) {
    kill_process(Pid::from_raw(pid as i32).unwrap(), signal).unwrap();
}

fn wait_until(what: &str, mut holds: impl FnMut() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !holds() {
        assert!(Instant::now() < deadline, "{what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Blobs whose source does something when the first is opened: in the middle of a freeze.
struct Interrupting(Blobs, Mutex<Option<Box<dyn FnOnce() + Send>>>);

impl BlobSource for Interrupting {
    fn open_blob(&self, blob: u32) -> io::Result<OwnedFd> {
        if let Some(act) = self.1.lock().unwrap().take() {
            act();
        }
        self.0.open_blob(blob)
    }
}

fn interrupting() -> (Rootfs, Arc<Interrupting>) {
    let source = Arc::new(Interrupting(Blobs(vec![blob()]), Mutex::default()));
    let file = Arc::new(tempfile::tempfile().unwrap());
    (Rootfs::Index { file, len: 0, blobs: source.clone() }, source)
}

fn plan(image: &NamedTempFile) -> BootPlan {
    let image = Image::open(File::open(image.path()).unwrap()).unwrap();
    let header = IndexHeader { magic: INDEX_MAGIC, blob_count: 1, ..IndexHeader::zeroed() };
    let index = tempfile::tempfile().unwrap();
    index.write_all_at(bytemuck::bytes_of(&header), 0).unwrap();
    image.plan(Arc::new(index), 0, Arc::new(Blobs(vec![blob()]))).unwrap()
}

fn thawed(parent: &ZygoteParent, plan: &BootPlan) -> Sandbox {
    let options = ThawOptions {
        streams: None,
        limits: Default::default(),
        cpu_time_limit: None,
        flags: 0,
        resumed: &[],
        volumes: &[],
        hostname: "copy",
        secrets: None,
        egress: &Default::default(),
        cores: None,
    };
    let mut copy = parent.create().unwrap().thaw(plan, None, &options).unwrap();
    assert!(matches!(next(&mut copy), Event::Booted(_)));
    assert_eq!(said(&mut copy), "thawed");
    copy
}

#[test]
fn it_has_no_rights_but_to_look_at_sandboxes() {
    let parent = parent();
    let (sandbox, entry) = at_entry_point(&parent, index_rootfs(vec![blob()]));
    assert!(helpers(&parent).is_empty(), "it is started when it is needed");
    frozen(&sandbox, entry);
    let helper = helper(&parent);

    // CAP_DAC_READ_SEARCH and CAP_SYS_PTRACE, and none to be had by other means.
    for (field, value) in [
        ("CapPrm", "0000000000080004"),
        ("CapEff", "0000000000080004"),
        ("CapInh", "0000000000000000"),
        ("CapBnd", "0000000000000000"),
        ("CapAmb", "0000000000000000"),
        ("NoNewPrivs", "1"),
        ("Seccomp", "2"),
        ("Threads", "1"),
        ("Name", "thaw-state"),
    ] {
        assert_eq!(status(helper, field), value, "{field}");
    }
    if geteuid().is_root() {
        // The first id of the range that its zygote parent has, which is nobody's on the host.
        assert!(status(helper, "Uid").split_whitespace().all(|id| id != "0"));
        assert!(status(helper, "Gid").split_whitespace().all(|id| id != "0"));
        assert_eq!(status(helper, "Groups"), "");
        assert_eq!(parent.user_ids(), UserIds::OnePerSandbox);
    }

    // It sees the sandboxes of its zygote parent, and has nothing else in common.
    assert_eq!(namespace(helper, "user"), namespace(sandbox.pid(), "user"));
    assert_eq!(namespace(helper, "pid"), namespace(parent.pid(), "pid"));
    for name in ["net", "mnt", "ipc", "uts", "cgroup"] {
        for other in [std::process::id(), parent.pid(), sandbox.pid()] {
            assert_ne!(namespace(helper, name), namespace(other, name), "{name}");
        }
    }
    let interfaces = fs::read_to_string(proc(helper, "net/dev")).unwrap();
    assert_eq!(interfaces.lines().count(), 3, "only the loopback interface: {interfaces}");

    assert_eq!(fs::read_dir(proc(helper, "root")).unwrap().count(), 0);
    let mounts = fs::read_to_string(proc(helper, "mountinfo")).unwrap();
    assert_eq!(mounts.lines().count(), 1, "{mounts}");

    // The standard streams, the /proc of the sandboxes, and the socket.
    wait_until("it has no others", || {
        descriptors(helper) == ["/", "null", "null", "null", "socket"]
    });

    let limits = fs::read_to_string(proc(helper, "limits")).unwrap();
    let limit = |name: &str| {
        let line = limits.lines().find_map(|line| line.strip_prefix(name)).unwrap();
        line.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap()
    };
    assert_eq!(limit("Max core file size"), 0);
    assert!(limit("Max address space") <= 2 << 30);
    assert!(limit("Max open files") <= 8192);
    let score = fs::read_to_string(proc(helper, "oom_score_adj")).unwrap();
    assert_eq!(score.trim(), "900");
}

/// A guest that takes over the worker wins what it has already: its own memory, its image.
#[test]
fn a_worker_has_no_rights_at_all() {
    let parent = parent();
    let (rootfs, source) = interrupting();
    let (sandbox, entry) = at_entry_point(&parent, rootfs);
    frozen(&sandbox, entry);
    let helper = helper(&parent);
    let (seen_to, seen) = std::sync::mpsc::channel();
    *source.1.lock().unwrap() = Some(Box::new(move || {
        let worker = worker(helper);
        let fields =
            ["CapPrm", "CapEff", "CapBnd", "NoNewPrivs", "Seccomp", "Seccomp_filters", "Threads"];
        let ids = status(worker, "Uid") == status(helper, "Uid");
        let root = fs::read_dir(proc(worker, "root")).unwrap().count();
        let values = fields.map(|field| status(worker, field));
        seen_to.send((values, descriptors(worker), ids, root)).unwrap();
    }));
    let (image, _) = frozen(&sandbox, entry);
    let (values, descriptors, has_ids_of_helper, root) = seen.recv().unwrap();
    let none = "0000000000000000";
    assert_eq!(values, [none, none, none, "1", "2", "2", "1"]);
    assert!(has_ids_of_helper);
    assert_eq!(root, 0);
    // No /proc: only the memory of this sandbox, and the image. Its socket is its own.
    let image = image.path().file_name().unwrap().to_string_lossy().into_owned();
    let mut expected = ["null", "null", "null", "socket", "anon_inode", "mem", "pagemap", &image];
    expected.sort();
    // A pidfd is a file of its own kind since Linux 6.9.
    let kind_of_pidfd = |name: String| if name == "pidfd" { "anon_inode".to_owned() } else { name };
    let mut descriptors: Vec<String> = descriptors.into_iter().map(kind_of_pidfd).collect();
    descriptors.sort();
    // And the directory of its first process, by name only.
    descriptors.retain(|name| name.parse::<u32>().is_err());
    assert_eq!(descriptors, expected);
}

#[test]
fn a_worker_that_is_killed_leaves_no_image() {
    let parent = parent();
    let (rootfs, source) = interrupting();
    let (sandbox, entry) = at_entry_point(&parent, rootfs);
    frozen(&sandbox, entry);
    let first = helper(&parent);
    *source.1.lock().unwrap() = Some(Box::new(move || signal(worker(first), Signal::KILL)));
    let file = NamedTempFile::new().unwrap();
    let error = freeze(&sandbox, entry, &spec(), file.as_file()).unwrap_err();
    assert!(matches!(error, FreezeError::Helper(StateError::Ended)), "{error}");
    Image::open(File::open(file.path()).unwrap()).unwrap_err();
    frozen(&sandbox, entry);
    assert_ne!(helper(&parent), first);
}

#[test]
fn one_helper_serves_all_sandboxes_of_a_zygote_parent() {
    let parent = parent();
    let (first, entry) = at_entry_point(&parent, index_rootfs(vec![blob()]));
    let (image, _) = frozen(&first, entry);
    let pid = helper(&parent);
    let (second, other_entry) = at_entry_point(&parent, index_rootfs(vec![blob()]));
    frozen(&second, other_entry);
    let plan = plan(&image);
    let copy = thawed(&parent, &plan);
    WorkingSet::recorder(&copy).unwrap().record(&plan).unwrap();
    assert_eq!(helpers(&parent), [pid]);
    wait_until("nothing of what it was given stays open", || descriptors(pid).len() == 5);
}

#[test]
fn the_memory_of_a_sandbox_is_counted_and_an_ended_one_has_none() {
    let parent = parent();
    let (first, entry) = at_entry_point(&parent, index_rootfs(vec![blob()]));
    let (image, _) = frozen(&first, entry);
    let plan = plan(&image);
    let alone = thawed(&parent, &plan);
    let reader = MemoryReader::new(&alone).unwrap();
    let memory = reader.read().unwrap();
    assert_eq!(memory.processes, 1);
    assert!(memory.private > 0 && memory.pss >= memory.private, "{memory:?}");
    // The pages of the image that another copy has mapped, too, are not its own any more.
    let other = thawed(&parent, &plan);
    let beside = reader.read().unwrap();
    assert!(beside.shared >= memory.shared && beside.pss <= memory.pss, "{beside:?} {memory:?}");
    assert_eq!(helpers(&parent).len(), 1);
    wait_until("nothing stays open", || descriptors(helper(&parent)).len() == 5);
    drop(other);
    signal(alone.pid(), Signal::KILL);
    wait_until("it has ended", || !proc(alone.pid(), "status").exists());
    assert_eq!(reader.read().unwrap_err().kind(), io::ErrorKind::NotFound);
    // Others are served all the same.
    MemoryReader::new(&first).unwrap().read().unwrap();
}

#[test]
fn it_is_started_again_when_it_has_died() {
    let parent = parent();
    let (sandbox, entry) = at_entry_point(&parent, index_rootfs(vec![blob()]));
    frozen(&sandbox, entry);
    let first = helper(&parent);
    signal(first, Signal::KILL);
    wait_until("it is reaped", || !proc(first, "status").exists());
    frozen(&sandbox, entry);
    assert_ne!(helper(&parent), first);
}

#[test]
fn a_helper_that_is_killed_during_a_freeze_takes_its_worker_along() {
    let parent = parent();
    let (rootfs, source) = interrupting();
    let (sandbox, entry) = at_entry_point(&parent, rootfs);
    frozen(&sandbox, entry);
    let pid = helper(&parent);
    let (killed_to, killed) = std::sync::mpsc::channel();
    *source.1.lock().unwrap() = Some(Box::new(move || {
        killed_to.send(worker(pid)).unwrap();
        signal(pid, Signal::KILL);
    }));
    let file = NamedTempFile::new().unwrap();
    let error = freeze(&sandbox, entry, &spec(), file.as_file()).unwrap_err();
    assert!(matches!(error, FreezeError::Helper(StateError::Ended)), "{error}");
    let worker = killed.recv().unwrap();
    wait_until("the worker is gone", || !proc(worker, "status").exists());
    let (image, _) = frozen(&sandbox, entry);
    thawed(&parent, &plan(&image));
}

#[test]
fn a_sandbox_that_ends_during_a_freeze_makes_no_image() {
    let parent = parent();
    let (rootfs, source) = interrupting();
    let (sandbox, entry) = at_entry_point(&parent, rootfs);
    frozen(&sandbox, entry);
    let pid = sandbox.pid();
    *source.1.lock().unwrap() = Some(Box::new(move || {
        signal(pid, Signal::KILL);
        wait_until("it is dead", || !proc(pid, "maps").exists());
    }));
    let file = NamedTempFile::new().unwrap();
    let error = freeze(&sandbox, entry, &spec(), file.as_file()).unwrap_err();
    assert!(matches!(error, FreezeError::SandboxEnded), "{error}");
    // The helper had no part in it.
    let (other, entry) = at_entry_point(&parent, index_rootfs(vec![blob()]));
    let pid = helper(&parent);
    frozen(&other, entry);
    assert_eq!(helper(&parent), pid);
}

#[test]
fn a_sandbox_that_has_ended_is_not_frozen() {
    let parent = parent();
    let (sandbox, entry) = at_entry_point(&parent, index_rootfs(vec![blob()]));
    let (other, other_entry) = at_entry_point(&parent, index_rootfs(vec![blob()]));
    frozen(&other, other_entry);
    sandbox.kill().unwrap();
    sandbox.wait();
    let file = NamedTempFile::new().unwrap();
    let error = freeze(&sandbox, entry, &spec(), file.as_file()).unwrap_err();
    assert!(matches!(error, FreezeError::SandboxEnded), "{error}");
    assert_eq!(file.as_file().metadata().unwrap().len(), 0);
}

/// A sandbox cannot hold it for ever, whatever it does to it.
#[test]
fn a_helper_that_does_not_answer_is_replaced() {
    let parent = parent();
    let (sandbox, entry) = at_entry_point(&parent, index_rootfs(vec![blob()]));
    let (image, _) = frozen(&sandbox, entry);
    let plan = plan(&image);
    let copy = thawed(&parent, &plan);
    let pid = helper(&parent);
    signal(pid, Signal::STOP);
    let error = WorkingSet::recorder(&copy).unwrap().record(&plan).unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::TimedOut, "{error}");
    wait_until("it is gone", || !proc(pid, "status").exists());
    WorkingSet::recorder(&copy).unwrap().record(&plan).unwrap();
    assert_ne!(helper(&parent), pid);
}

/// It is in the pid namespace of the sandboxes, whose end waits until all are reaped.
#[test]
fn it_ends_with_the_zygote_parent_and_does_not_hold_up_its_end() {
    let parent = parent();
    let (sandbox, entry) = at_entry_point(&parent, index_rootfs(vec![blob()]));
    frozen(&sandbox, entry);
    let pid = helper(&parent);
    signal(parent.pid(), Signal::KILL);
    let (ended, end) = std::sync::mpsc::channel();
    std::thread::scope(|scope| {
        scope.spawn(|| ended.send(sandbox.wait()));
        end.recv_timeout(PATIENCE).expect("the sandboxes end");
    });
    wait_until("it has ended, too", || !proc(pid, "status").exists());
    let file = NamedTempFile::new().unwrap();
    let error = freeze(&sandbox, entry, &spec(), file.as_file()).unwrap_err();
    assert!(matches!(error, FreezeError::SandboxEnded), "{error}");
}

#[test]
fn it_ends_when_nobody_wants_it_any_more() {
    let parent = parent();
    let (sandbox, entry) = at_entry_point(&parent, index_rootfs(vec![blob()]));
    frozen(&sandbox, entry);
    let (helper, parent_pid) = (helper(&parent), parent.pid());
    drop((sandbox, parent));
    wait_until("both are gone", || {
        !proc(helper, "status").exists() && !proc(parent_pid, "status").exists()
    });
}

#[test]
fn a_description_that_is_too_long_is_refused() {
    let parent = parent();
    let (sandbox, entry) = at_entry_point(&parent, index_rootfs(vec![blob()]));
    for (len, is_good) in [(16 * 1024, true), (16 * 1024 + 1, false)] {
        let spec = FreezeSpec { about: "x".repeat(len), ..spec() };
        let file = NamedTempFile::new().unwrap();
        match freeze(&sandbox, entry, &spec, file.as_file()) {
            Ok(_) => assert!(is_good, "{len}"),
            Err(error) => {
                assert!(!is_good && matches!(error, FreezeError::About { .. }), "{error}");
            }
        }
    }
}

/// The reports of a hostile kernel, read where they lie: the helper refuses them or makes an
/// image, and is there for the next one.
#[test]
fn it_survives_mutated_reports() {
    let parent = parent();
    let (sandbox, entry) = at_entry_point(&parent, index_rootfs(vec![blob()]));
    let memory = File::options().read(true).write(true).open(proc(sandbox.pid(), "mem"));
    let memory = match memory {
        Ok(memory) => memory,
        Err(error) => return thaw_skip::skip(&format!("no access to a sandbox's memory: {error}")),
    };
    let mut report = vec![0; entry.report_len as usize];
    memory.read_exact_at(&mut report, entry.report_address).unwrap();
    frozen(&sandbox, entry);
    let pid = helper(&parent);
    let (mut images, mut refused) = (0, 0);
    thaw_mutate::survive("live_report", &[&report], 400, |bytes| {
        // There is one page for it, and what is longer reads on.
        let written = &bytes[..bytes.len().min(4096)];
        memory.write_all_at(written, entry.report_address).unwrap();
        let entry = EntryPoint { report_len: bytes.len() as u64, ..entry };
        let file = NamedTempFile::new().unwrap();
        match freeze(&sandbox, entry, &spec(), file.as_file()) {
            Ok(_) => {
                images += 1;
                // It may lie about what is where; it is a whole image nevertheless.
                Image::open(File::open(file.path()).unwrap()).unwrap();
            }
            Err(FreezeError::Helper(error)) => panic!("{error}"),
            Err(_) => refused += 1,
        }
    });
    assert!(images > 0 && refused > 0, "{images} {refused}");
    assert_eq!(helper(&parent), pid);
}
