//! The zygote parent, its zygotes and sandboxes, with a stand-in kernel.

mod common;

use std::collections::BTreeSet;
use std::fs;
use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::UnixStream;
use std::os::unix::process::ExitStatusExt;
use std::time::{Duration, Instant};

use common::{
    careless_standin, config, index_rootfs, next, parent, said, start, start_with, zygote,
};
use thaw_sandbox::{
    Console, Event, GuestExit, PoolConfig, UserIds, Violation, ZygoteConfig, ZygoteError,
    ZygoteParent, ZygotePool, connection,
};

fn status_field(pid: u32, field: &str) -> String {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let line = status.lines().find(|line| line.starts_with(&format!("{field}:"))).unwrap();
    line.split_once(':').unwrap().1.trim().to_owned()
}

fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}

fn exists(pid: u32) -> bool {
    fs::metadata(format!("/proc/{pid}")).is_ok()
}

/// Whoever hears of the end of one process may be earlier than the ends of others.
#[track_caller]
fn wait_until_gone(pid: u32) {
    let until = Instant::now() + Duration::from_secs(60);
    while exists(pid) {
        assert!(Instant::now() < until, "process {pid} does not end");
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn a_zygote_has_only_its_two_descriptors_and_nothing_to_be_read() {
    let zygote = zygote();
    let mut descriptors: Vec<String> = fs::read_dir(format!("/proc/{}/fd", zygote.pid()))
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    descriptors.sort();
    assert_eq!(descriptors, ["0", "1", "2", "3", "4"]);
    for standard in 0..3 {
        let file = fs::metadata(format!("/proc/{}/fd/{standard}", zygote.pid())).unwrap();
        assert_eq!(file.rdev(), fs::metadata("/dev/null").unwrap().rdev());
    }
}

/// The user id of a process, as this process numbers it.
fn user_id(pid: u32) -> u32 {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let ids = status.lines().find_map(|line| line.strip_prefix("Uid:")).unwrap();
    ids.split_whitespace().next().unwrap().parse().unwrap()
}

#[test]
fn no_two_parents_give_their_sandboxes_the_same_user_ids() {
    let config = || ZygoteConfig { max_sandboxes: 50, ..config() };
    let parents = [(); 3].map(|()| ZygoteParent::start(config()).unwrap());
    if parents[0].user_ids() == UserIds::Shared {
        // All are the caller's.
        return;
    }
    let zygotes: Vec<_> =
        parents.iter().flat_map(|parent| [(); 2].map(|()| parent.create().unwrap())).collect();
    let ids: BTreeSet<u32> = zygotes.iter().map(|zygote| user_id(zygote.pid())).collect();
    assert_eq!(ids.len(), zygotes.len(), "{ids:?}");
}

/// Field 19 of `/proc/PID/stat`: the name in parentheses may contain anything.
fn niceness(process: &str) -> String {
    let stat = fs::read_to_string(format!("/proc/{process}/stat")).unwrap();
    let (_, fields) = stat.rsplit_once(") ").unwrap();
    fields.split(' ').nth(16).unwrap().to_owned()
}

/// Bytes of memory of this machine.
fn all_memory() -> u64 {
    let text = fs::read_to_string("/proc/meminfo").unwrap();
    text.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap() << 10
}

#[test]
fn a_zygote_has_no_rights_and_an_empty_world() {
    let zygote = zygote();
    zygote.verify().unwrap();
    let pid = zygote.pid();
    for set in ["CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"] {
        assert_eq!(status_field(pid, set), "0000000000000000");
    }
    // The first process of a pid namespace of its own.
    assert_eq!(status_field(pid, "NSpid").split_whitespace().last(), Some("1"));
    assert_eq!(fs::read_to_string(format!("/proc/{pid}/oom_score_adj")).unwrap().trim(), "1000");
    // It is told how much memory there is, and nothing else of this process' surroundings.
    let environment = fs::read_to_string(format!("/proc/{pid}/environ")).unwrap();
    let value = environment.strip_prefix("HOST_MEMORY=").and_then(|rest| rest.strip_suffix('\0'));
    let bytes: u64 = value.expect("one variable").parse().expect("a number");
    assert!(bytes >= 1 << 20 && bytes <= all_memory(), "{bytes}");
    assert_eq!(fs::read(format!("/proc/{pid}/cmdline")).unwrap(), b"thaw-kernel\0");
    // Its parent runs before others; it does not.
    assert_eq!(niceness("self"), niceness(&pid.to_string()));
    // Reading the directory through /proc needs the right to trace it.
    assert_eq!(fs::read_dir(format!("/proc/{pid}/root/")).unwrap().count(), 0);
    let mounts = fs::read_to_string(format!("/proc/{pid}/mountinfo")).unwrap();
    assert_eq!(mounts.lines().count(), 1, "{mounts}");
    assert!(mounts.contains(" / / ro,"), "{mounts}");
    for namespace in ["net", "pid", "mnt", "ipc", "uts", "user", "cgroup"] {
        let of = |process: &str| fs::read_link(format!("/proc/{process}/ns/{namespace}")).unwrap();
        assert_ne!(of(&pid.to_string()), of("self"), "{namespace}");
    }
    let interfaces = fs::read_to_string(format!("/proc/{pid}/net/dev")).unwrap();
    assert!(interfaces.lines().skip(2).all(|line| line.trim().starts_with("lo:")), "{interfaces}");
    let limits = fs::read_to_string(format!("/proc/{pid}/limits")).unwrap();
    for (limit, value) in [("Max core file size", "0"), ("Max locked memory", "0")] {
        let line = limits.lines().find(|line| line.starts_with(limit)).unwrap();
        assert_eq!(line[limit.len()..].split_whitespace().next(), Some(value), "{line}");
    }
}

#[test]
fn the_zygotes_of_root_have_user_ids_of_their_own() {
    if !is_root() {
        return;
    }
    let parent = parent();
    let (first, second) = (parent.create().unwrap(), parent.create().unwrap());
    let id = |pid, field| {
        let ids = status_field(pid, field);
        let mut ids = ids.split_whitespace().map(|id| id.parse::<u32>().unwrap());
        let id = ids.next().unwrap();
        assert!(ids.all(|other| other == id));
        assert!(id >= 1000);
        id
    };
    assert_ne!(id(first.pid(), "Uid"), id(second.pid(), "Uid"));
    assert_ne!(id(first.pid(), "Gid"), id(second.pid(), "Gid"));
    assert_eq!(status_field(first.pid(), "Groups"), "");
    // The parent itself is nobody on the host, either.
    assert_ne!(id(parent.pid(), "Uid"), id(first.pid(), "Uid"));
}

#[test]
fn each_zygote_has_namespaces_of_its_own() {
    let parent = parent();
    let (first, second) = (parent.create().unwrap(), parent.create().unwrap());
    let of =
        |pid: u32, namespace: &str| fs::read_link(format!("/proc/{pid}/ns/{namespace}")).unwrap();
    for namespace in ["pid", "uts"] {
        assert_ne!(of(first.pid(), namespace), of(second.pid(), namespace), "{namespace}");
    }
    for namespace in ["net", "mnt", "ipc", "user", "cgroup"] {
        assert_eq!(of(first.pid(), namespace), of(parent.pid(), namespace), "{namespace}");
    }
}

#[test]
fn a_kernel_without_a_filter_is_refused() {
    let config = ZygoteConfig::new(careless_standin(), Console::Pipe);
    let error = ZygoteParent::start(config).unwrap().create().unwrap_err();
    assert!(matches!(error, ZygoteError::NotIsolated { field: "Seccomp", .. }), "{error}");
}

#[test]
fn a_kernel_that_cannot_run_is_reported() {
    let mut elf = vec![0; 64];
    elf[..7].copy_from_slice(b"\x7fELF\x02\x01\x01");
    elf[16] = 2;
    elf[18] = 62;
    let kernel = thaw_sandbox::Kernel::from_elf(elf).unwrap();
    let error = ZygoteParent::start(ZygoteConfig::new(kernel, Console::Pipe))
        .unwrap()
        .create()
        .unwrap_err();
    assert!(error.to_string().contains("cannot execute the kernel"), "{error}");
}

#[test]
fn a_program_starts_and_its_exit_is_reported() {
    let mut sandbox = start("exit", "42");
    assert_eq!(next(&mut sandbox), Event::Exit(GuestExit::Code(42)));
    assert_eq!(next(&mut sandbox), Event::Hangup);
    assert_eq!(sandbox.wait_event(Some(Duration::ZERO)).unwrap(), None);
    assert_eq!(sandbox.wait().code(), Some(42));
    sandbox.kill().unwrap();
}

#[test]
fn a_crash_is_reported_as_its_signal() {
    let mut sandbox = start("crash", "");
    assert_eq!(next(&mut sandbox), Event::Hangup);
    assert_eq!(sandbox.wait().signal(), Some(libc::SIGSEGV));
}

#[test]
fn connections_signals_and_commands_arrive() {
    let mut sandbox = start("hang", "");
    let (socket, _peer) = UnixStream::pair().unwrap();
    let address = "127.0.0.1:80".parse().unwrap();
    let connector = sandbox.connector();
    connector.send_connection(&connection(1, address, address), socket.as_fd()).unwrap();
    assert_eq!(said(&mut sandbox), "connected");
    sandbox.request_freeze().unwrap();
    assert_eq!(said(&mut sandbox), "asked to freeze");
    sandbox.resume().unwrap();
    assert_eq!(said(&mut sandbox), "resumed");
    assert_eq!(sandbox.send_signal(65).unwrap_err().kind(), io::ErrorKind::InvalidInput);
    sandbox.send_signal(15).unwrap();
    assert_eq!(next(&mut sandbox), Event::Exit(GuestExit::Code(115)));
}

#[test]
fn standard_output_and_console_are_the_given_ones() {
    let (mut output, input) = io::pipe().unwrap();
    let sandbox = start_with(zygote(), "write", "to stdout", index_rootfs(Vec::new()), |spec| {
        spec.stdio[1] = rustix::fd::AsFd::as_fd(Box::leak(Box::new(input.try_clone().unwrap())));
    });
    let mut bytes = [0; 9];
    io::Read::read_exact(&mut output, &mut bytes).unwrap();
    assert_eq!(&bytes, b"to stdout");
    drop(sandbox);

    let mut sandbox = start("console", "a trace");
    assert_eq!(said(&mut sandbox), "written");
    let mut bytes = [0; 64];
    let read = rustix::io::read(sandbox.console().unwrap(), &mut bytes).unwrap();
    assert_eq!(&bytes[..read], b"a trace");
}

#[test]
fn protocol_violations_kill() {
    for (command, expected) in [
        ("garbage", Violation::Kind { kind: 4242 }),
        ("ready", Violation::Kind { kind: 101 }),
        ("long", Violation::TooLong { limit: 8192 }),
        ("gift", Violation::Descriptor),
        ("flood", Violation::RepliesUnread),
        ("open ../secret", Violation::Value { kind: 205 }),
    ] {
        let (command, argument) = command.split_once(' ').unwrap_or((command, ""));
        let mut sandbox = start(command, argument);
        assert_eq!(next(&mut sandbox), Event::Violation(expected), "{command}");
        while let Some(event) = sandbox.wait_event(Some(Duration::from_secs(20))).unwrap() {
            if event == Event::Hangup {
                break;
            }
        }
        assert_eq!(sandbox.wait().signal(), Some(libc::SIGKILL), "{command}");
    }
}

#[test]
fn a_sandbox_that_closes_its_socket_is_ended() {
    let mut sandbox = start("close", "");
    assert_eq!(next(&mut sandbox), Event::Hangup);
    assert_eq!(sandbox.wait().signal(), Some(libc::SIGKILL));
}

#[test]
fn the_broker_answers_over_the_socket() {
    let blobs = vec![b"first".to_vec(), b"second".to_vec()];
    let zygotes = parent();
    let ask = |command, argument: &str, rootfs| {
        said(&mut start_with(zygotes.create().unwrap(), command, argument, rootfs, |_| {}))
    };
    assert_eq!(ask("blob", "1", index_rootfs(blobs.clone())), "file second");
    assert_eq!(ask("blob", "2", index_rootfs(blobs)), "errno 02");

    let tree = tempfile::tempdir().unwrap();
    fs::write(tree.path().join("file"), "content").unwrap();
    std::os::unix::fs::symlink("/etc/passwd", tree.path().join("link")).unwrap();
    let ask = |command, argument| ask(command, argument, common::host_rootfs(tree.path()));
    assert_eq!(ask("open", "file"), "file content");
    assert_eq!(ask("open", "link"), "errno 40");
    assert_eq!(ask("readlink", "link"), "data /etc/passwd");
    assert_eq!(ask("stat", "none"), "errno 02");
    assert!(ask("list", "").contains("file"));
}

#[test]
fn dropping_a_sandbox_ends_it() {
    let zygotes = parent();
    let sandbox = start_with(zygotes.create().unwrap(), "hang", "", index_rootfs(vec![]), |_| {});
    let pidfd = sandbox.pidfd().try_clone_to_owned().unwrap();
    drop(sandbox);
    ended(&pidfd);
}

/// Waits until the process behind a pidfd has ended.
fn ended(pidfd: &std::os::fd::OwnedFd) {
    use rustix::event::{PollFd, PollFlags, Timespec, poll};
    let limit = Timespec { tv_sec: 20, tv_nsec: 0 };
    assert_eq!(poll(&mut [PollFd::new(pidfd, PollFlags::IN)], Some(&limit)), Ok(1));
}

#[test]
fn all_sandboxes_end_with_their_parent() {
    let zygotes = parent();
    let mut sandbox =
        start_with(zygotes.create().unwrap(), "hang", "", index_rootfs(vec![]), |_| {});
    let zygote = zygotes.create().unwrap();
    let pid = rustix::process::Pid::from_raw(zygotes.pid() as i32).unwrap();
    rustix::process::kill_process(pid, rustix::process::Signal::KILL).unwrap();
    assert_eq!(next(&mut sandbox), Event::Hangup);
    assert_eq!(sandbox.wait().signal(), Some(libc::SIGKILL));
    wait_until_gone(zygotes.pid());
    wait_until_gone(zygote.pid());
    assert!(zygotes.has_ended());
    assert!(matches!(zygotes.create(), Err(ZygoteError::ParentDied)));
    assert!(matches!(
        zygote.start(&thaw_sandbox::StartSpec {
            program: None,
            argv: vec!["hang".into()],
            env: vec![],
            cwd: "/".into(),
            hostname: "x".into(),
            uid: 0,
            gid: 0,
            port: 0,
            entry_signal: 0,
            cpus: 1,
            memory_limit: 0,
            process_limit: 0,
            cpu_time_limit: None,
            flags: 0,
            rootfs: index_rootfs(vec![]),
            egress: Default::default(),
            mounts: Vec::new(),
            stdio: [io::stderr().as_fd(); 3],
            window: None,
        }),
        Err(thaw_sandbox::BootError::ZygoteDied)
    ));
}

#[test]
fn dropping_everything_ends_the_parent() {
    let zygotes = parent();
    let pid = zygotes.pid();
    let zygote = zygotes.create().unwrap();
    drop(zygotes);
    // A sandbox in use keeps it.
    assert!(exists(pid));
    let mut sandbox = start_with(zygote, "hang", "", index_rootfs(vec![]), |_| {});
    sandbox.resume().unwrap();
    assert_eq!(said(&mut sandbox), "resumed");
    drop(sandbox);
    while exists(pid) {
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn slots_are_reused() {
    let config = ZygoteConfig { max_sandboxes: 2, ..config() };
    let zygotes = ZygoteParent::start(config).unwrap();
    let first = zygotes.create().unwrap();
    let _second = zygotes.create().unwrap();
    assert!(matches!(zygotes.create(), Err(ZygoteError::Full { limit: 2 })));
    drop(first);
    loop {
        match zygotes.create() {
            Ok(_) => break,
            Err(ZygoteError::Full { .. }) => std::thread::sleep(Duration::from_millis(5)),
            Err(error) => panic!("{error}"),
        }
    }
}

#[test]
fn memory_beyond_the_limit_ends_the_sandbox() {
    let zygotes = parent();
    let eat = |limit_mib: u64| {
        let zygote = zygotes.create().unwrap();
        let rootfs = index_rootfs(vec![]);
        let mut sandbox =
            start_with(zygote, "eat", "100", rootfs, |spec| spec.memory_limit = limit_mib << 20);
        (next(&mut sandbox), sandbox)
    };
    assert_eq!(eat(200).0, Event::Failed("full".to_owned()));
    let (event, sandbox) = eat(50);
    if !zygotes.missing_controllers().is_empty() {
        // The weaker limit refuses the mapping instead.
        assert_eq!(event, Event::Failed("mmap failed".to_owned()));
    } else {
        assert_eq!(event, Event::Hangup);
        assert_eq!(sandbox.wait().signal(), Some(libc::SIGKILL));
    }
    // The zygote parent is not what is killed.
    assert!(!zygotes.has_ended());
}

#[test]
fn a_pool_stays_full_and_never_runs_dry() {
    let pool = ZygotePool::new(PoolConfig { size: 3, zygotes: config() }).unwrap();
    pool.wait_full().unwrap();
    let mut taken: Vec<_> = (0..8).map(|_| pool.take().unwrap()).collect();
    // It may have made others as fast as these were taken.
    while pool.stats().misses == 0 && taken.len() < 64 {
        taken.push(pool.take().unwrap());
    }
    let pids: std::collections::HashSet<u32> = taken.iter().map(|zygote| zygote.pid()).collect();
    assert_eq!(pids.len(), taken.len());
    pool.wait_full().unwrap();
    let stats = pool.stats();
    assert_eq!((stats.ready, stats.taken as usize), (stats.target, taken.len()));
    // It has learned that three are too few.
    assert!(stats.misses > 0 && (4..=3 * 16).contains(&stats.target), "{stats:?}");
    pool.set_size(1);
    assert_eq!(pool.stats().ready, 1);
}

#[test]
fn a_pool_survives_the_death_of_its_parent() {
    let pool = ZygotePool::new(PoolConfig { size: 2, zygotes: config() }).unwrap();
    pool.wait_full().unwrap();
    let first = pool.parent().unwrap().pid();
    let pid = rustix::process::Pid::from_raw(first as i32).unwrap();
    rustix::process::kill_process(pid, rustix::process::Signal::KILL).unwrap();
    // Zygotes that nobody has noticed to be dead yet may still be handed out,
    // as at any other moment.
    while exists(first) {
        std::thread::sleep(Duration::from_millis(5));
    }
    while !pool.parent().unwrap().has_ended() && pool.parent().unwrap().pid() == first {
        std::thread::sleep(Duration::from_millis(5));
    }
    let mut sandbox = loop {
        let zygote = pool.take().unwrap();
        if zygote.has_ended() {
            continue;
        }
        break start_with(zygote, "hang", "", index_rootfs(vec![]), |_| {});
    };
    sandbox.resume().unwrap();
    assert_eq!(said(&mut sandbox), "resumed");
    assert_ne!(pool.parent().unwrap().pid(), first);
    assert_eq!(pool.stats().parent_restarts, 1);
}

/// Kills a process as `kill -9` does; it may have ended already.
fn kill(pid: u32) {
    if let Some(pid) = rustix::process::Pid::from_raw(pid as i32) {
        let _ = rustix::process::kill_process(pid, rustix::process::Signal::KILL);
    }
}

/// Strikes once after a while: the newest child of the parent, or the parent itself.
fn strike(parent: u32, after: Duration, strikes_parent: bool) {
    std::thread::sleep(after);
    let children = fs::read_to_string(format!("/proc/{parent}/task/{parent}/children"));
    let children = children.unwrap_or_default();
    match children.split_whitespace().next_back() {
        Some(child) if !strikes_parent => kill(child.parse().unwrap()),
        _ => kill(parent),
    }
}

#[test]
fn a_pool_gives_a_zygote_whatever_is_killed_while_it_is_made() {
    let pool = ZygotePool::new(PoolConfig { size: 0, zygotes: config() }).unwrap();
    for round in 0..120 {
        let parent = pool.parent().unwrap().pid();
        let after = Duration::from_micros(100 * (round % 30));
        std::thread::scope(|scope| {
            scope.spawn(|| strike(parent, after, round % 4 == 0));
            pool.take().unwrap_or_else(|error| panic!("round {round}: {error}"));
        });
    }
    assert!(pool.stats().parent_restarts > 0);
}

#[test]
fn zygotes_that_died_with_their_parent_can_be_discarded_at_once() {
    for _ in 0..20 {
        let pool = ZygotePool::new(PoolConfig { size: 4, zygotes: config() }).unwrap();
        pool.wait_full().unwrap();
        let parent = pool.parent().unwrap().pid();
        kill(parent);
        while fs::read_to_string(format!("/proc/{parent}/task/{parent}/children"))
            .is_ok_and(|children| !children.is_empty())
        {
            std::thread::yield_now();
        }
        pool.discard_dead();
        // Nothing dead is left to be taken.
        let zygote = pool.take().unwrap();
        zygote.verify().unwrap();
    }
}

/// Not a test: makes a zygote parent, a sandbox and a zygote, prints their
/// process ids and a control group, and waits to be killed.
#[test]
#[ignore = "runs as the victim of another test"]
fn victim() {
    let zygotes = parent();
    let sandbox = start_with(zygotes.create().unwrap(), "spin", "", index_rootfs(vec![]), |_| {});
    let zygote = zygotes.create().unwrap();
    println!("victims {} {} {}", zygotes.pid(), sandbox.pid(), zygote.pid());
    loop {
        std::thread::park();
    }
}

#[test]
fn a_killed_daemon_leaves_nothing_behind() {
    let mut daemon = std::process::Command::new("/proc/self/exe")
        .args(["--exact", "victim", "--ignored", "--nocapture"])
        .stdout(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    let output = io::BufReader::new(daemon.stdout.take().unwrap());
    let pids: Vec<u32> = io::BufRead::lines(output)
        .map(Result::unwrap)
        .find_map(|line| Some(line.split_once("victims ")?.1.to_owned()))
        .expect("the victim prints its process ids")
        .split(' ')
        .map(|pid| pid.parse().unwrap())
        .collect();
    assert!(pids.iter().all(|&pid| exists(pid)));
    let groups = groups_of(daemon.id());
    daemon.kill().unwrap();
    daemon.wait().unwrap();
    pids.into_iter().for_each(wait_until_gone);
    // Its control groups are removed by the next start. A group may have a process for a moment more
    // that nobody sees any more.
    let until = Instant::now() + Duration::from_secs(60);
    while groups.iter().any(|group| group.exists()) {
        assert!(Instant::now() < until, "{groups:?}");
        drop(parent());
    }
}

/// The memory control groups that a process has made for its sandboxes.
fn groups_of(pid: u32) -> Vec<std::path::PathBuf> {
    let groups = fs::read_to_string(format!("/proc/{pid}/cgroup")).unwrap();
    let Some((_, own)) = groups.lines().find_map(|line| line.split_once(":memory:")) else {
        return Vec::new();
    };
    let own = format!("/sys/fs/cgroup/memory{own}");
    let Ok(entries) = fs::read_dir(own) else { return Vec::new() };
    let prefix = format!("thaw-{pid}-");
    entries
        .map(|entry| entry.unwrap())
        .filter(|entry| entry.file_name().to_string_lossy().starts_with(&prefix))
        .map(|entry| entry.path())
        .collect()
}
