//! The monitor and a daemon, at two ends of a pair of sockets.

use super::*;
use crate::message;
use crate::monitor::KeptKind;
use crate::monitor::handover::{Leaving, Left, seal};
use crate::monitor::protocol::{OLDEST_VERSION, receive_kept};
use crate::zygote::receive;
use std::io::IoSlice;
use std::os::fd::IntoRawFd;
use std::os::unix::fs::MetadataExt;

const USER: DaemonIds = DaemonIds { uid: 12_345, gid: 12_346 };

/// A monitor and a pair of sockets: its own, and the daemon's. `None` where the tests
/// have no rights that could be separated.
fn monitor() -> Option<(Monitor, OwnedFd, OwnedFd)> {
    if !rustix::process::geteuid().is_root() {
        return None;
    }
    let monitor = Monitor::new(USER, WeakLimits::Accept).unwrap()?;
    let (own, daemon) = message::control_pair().unwrap();
    Some((monitor, own, daemon))
}

/// What the monitor answers: an error number, and how many descriptors come with it.
fn ask(
    (monitor, own, daemon): &mut (Monitor, OwnedFd, OwnedFd),
    request: Request,
    attached: &[BorrowedFd<'_>],
) -> (i32, usize) {
    send(&*daemon, &request, attached).unwrap();
    assert!(monitor.serve(own));
    let mut descriptors = Vec::new();
    let answer = receive::<Answer>(&*daemon, &mut descriptors).unwrap().unwrap();
    (answer.errno, descriptors.len())
}

#[test]
fn one_id_is_not_for_sandboxes_where_there_are_several() {
    assert_eq!([0, 1, 2, IDS_MAX].map(ids_of_sandboxes), [0, 1, 1, 8 * SANDBOXES_MAX]);
}

#[test]
fn nonsense_is_not_served() {
    let Some((mut monitor, own, daemon)) = monitor() else { return };
    let length = size_of::<Request>();
    for len in [1, length - 1, length + 1, length + 1024, 4096] {
        message::send(&daemon, &[IoSlice::new(&vec![0; len])], &[]).unwrap();
        assert!(!monitor.serve(&own), "{len} bytes");
    }
    for kind in [0, REQUEST_SERVING + 1, u32::MAX] {
        send(&daemon, &Request::new(kind, 1), &[]).unwrap();
        assert!(!monitor.serve(&own), "kind {kind}");
    }
    drop(daemon);
    assert!(!monitor.serve(&own));
}

#[test]
fn processes_are_made_with_all_their_descriptors_or_not_at_all() {
    let Some(mut all) = monitor() else { return };
    let null = std::fs::File::open("/dev/null").unwrap();
    for kind in [REQUEST_PARENT, REQUEST_STATE_HELPER] {
        for count in [0, 1, 3] {
            let attached = vec![null.as_fd(); count];
            let answer = ask(&mut all, Request::new(kind, 1), &attached);
            assert_eq!(answer, (libc::EINVAL, 0), "kind {kind} with {count}");
        }
    }
    for count in [0, 2, 16] {
        let attached = vec![null.as_fd(); count];
        let answer = ask(&mut all, Request::new(REQUEST_RESOLVER, 0), &attached);
        assert_eq!(answer, (libc::EINVAL, 0), "a resolver with {count}");
    }
    let beyond = Request::new(REQUEST_STATE_HELPER, u64::MAX);
    assert_eq!(ask(&mut all, beyond, &[null.as_fd(); 2]), (libc::EINVAL, 0));
}

/// This test program, which lists its tests: an ended child counts until it is reaped.
#[test]
fn so_many_fetchers_are_started() {
    let Some(mut all) = monitor() else { return };
    let fetch = |all: &mut (Monitor, OwnedFd, OwnedFd), count: usize| {
        let null = std::fs::File::open("/dev/null").unwrap();
        ask(all, Request::new(REQUEST_FETCHER, 0), &vec![null.as_fd(); count])
    };
    assert_eq!(fetch(&mut all, 1), (libc::ENOSYS, 0), "nobody has said how");
    let (arguments, environment) = (vec!["--list".into()], Vec::new());
    all.0.fetch_with(FetcherCommand { arguments, environment });
    for count in [0, 2] {
        assert_eq!(fetch(&mut all, count), (libc::EINVAL, 0));
    }
    for _ in 0..FETCHERS_MAX {
        assert_eq!(fetch(&mut all, 1), (0, 0));
    }
    assert_eq!(fetch(&mut all, 1), (libc::EAGAIN, 0));
    let first = all.0.fetchers[0];
    reap(first);
    assert_eq!(fetch(&mut all, 1), (0, 0));
    children().into_iter().for_each(reap);
}

/// A launcher that is never told what to do waits for as long as its socket is open.
#[test]
fn so_many_children_are_made_and_nobody_waits_for_them() {
    let Some(mut all) = monitor() else { return };
    all.0.children_max = 3;
    let kernel = std::fs::File::open("/dev/null").unwrap();
    let sockets: Vec<_> = (0..4)
        .map(|_| {
            let (own, control) = message::control_pair().unwrap();
            let request = Request::new(REQUEST_PARENT, 0);
            (own, ask(&mut all, request, &[control.as_fd(), kernel.as_fd()]).0)
        })
        .collect();
    let errors: Vec<i32> = sockets.iter().map(|(_, errno)| *errno).collect();
    assert_eq!(errors, [0, 0, 0, libc::EAGAIN]);
    drop(sockets);
    children().into_iter().for_each(reap);
}

fn reap(child: u32) {
    let pid = Pid::from_raw(child as i32);
    rustix::process::waitpid(pid, rustix::process::WaitOptions::empty()).unwrap();
}

/// Starts a child that lives as long as the socket.
fn start_child(all: &mut (Monitor, OwnedFd, OwnedFd)) -> (OwnedFd, u32) {
    let before: HashSet<u32> = children().into_iter().collect();
    let kernel = std::fs::File::open("/dev/null").unwrap();
    let (own, control) = message::control_pair().unwrap();
    let request = Request::new(REQUEST_PARENT, 0);
    assert_eq!(ask(all, request, &[control.as_fd(), kernel.as_fd()]).0, 0);
    let child = children().into_iter().find(|child| !before.contains(child));
    (own, child.expect("a child more"))
}

fn keep_child(all: &mut (Monitor, OwnedFd, OwnedFd), key: u64, child: u32) {
    let pid = Pid::from_raw(child as i32).unwrap();
    let pidfd = rustix::process::pidfd_open(pid, rustix::process::PidfdFlags::empty()).unwrap();
    let null = std::fs::File::open("/dev/null").unwrap();
    let request = Request::keep(key, KeptKind::Parent, 0);
    assert_eq!(ask(all, request, &[null.as_fd(), pidfd.as_fd()]), (0, 0));
}

/// Which children stay is not a matter of how many.
#[test]
fn children_that_end_are_told_from_those_that_stay() {
    let Some(mut all) = monitor() else { return };
    assert!(!all.0.has_ending_children());
    let (staying, kept) = start_child(&mut all);
    assert!(all.0.has_ending_children());
    keep_child(&mut all, 1, kept);
    assert!(!all.0.has_ending_children());
    let (ending, other) = start_child(&mut all);
    assert!(all.0.has_ending_children());
    // The one that is kept has ended first, and nobody has had it forgotten yet.
    drop(staying);
    reap(kept);
    assert!(all.0.has_ending_children());
    drop(ending);
    reap(other);
    assert!(!all.0.has_ending_children());
}

#[test]
fn children_that_are_kept_take_no_place_of_others() {
    let Some(mut all) = monitor() else { return };
    all.0.children_max = 1;
    let kept: Vec<_> = (1..=3)
        .map(|key| {
            let (socket, child) = start_child(&mut all);
            keep_child(&mut all, key, child);
            (socket, child)
        })
        .collect();
    let (other, last) = start_child(&mut all);
    let null = std::fs::File::open("/dev/null").unwrap();
    let request = Request::new(REQUEST_PARENT, 0);
    assert_eq!(ask(&mut all, request, &[null.as_fd(); 2]).0, libc::EAGAIN);
    drop(other);
    reap(last);
    for (socket, child) in kept {
        drop(socket);
        reap(child);
    }
}

#[test]
fn privileged_ports_are_bound_and_no_others() {
    let Some(mut all) = monitor() else { return };
    let bind = |port: u16, transport| {
        Request::bind((std::net::Ipv4Addr::LOCALHOST, port).into(), transport)
    };
    for port in [0, 1024, 8080, u16::MAX] {
        let answer = ask(&mut all, bind(port, Transport::Tcp), &[]);
        assert_eq!(answer, (libc::EACCES, 0), "{port}");
    }
    assert_eq!(ask(&mut all, bind(824, Transport::Tcp), &[]), (0, 1));
    assert_eq!(ask(&mut all, bind(824, Transport::Udp), &[]), (0, 1));
    all.0.bound = BOUND_MAX;
    assert_eq!(ask(&mut all, bind(825, Transport::Tcp), &[]), (libc::EMFILE, 0));
}

#[test]
fn groups_are_the_daemons_to_be_limited_and_no_more() {
    let Some(mut all) = monitor() else { return };
    let places = all.0.grant().places;
    let request = |number| Request::new(REQUEST_GROUP, number);
    assert_eq!(ask(&mut all, request(7), &[]), (0, places.len()));
    assert_eq!(ask(&mut all, request(7), &[]), (libc::EEXIST, 0));
    let directories = all.0.made[&7].directories().to_vec();
    for directory in &directories {
        assert_eq!(std::fs::metadata(directory).unwrap().uid(), 0);
        for file in std::fs::read_dir(directory).unwrap().map(Result::unwrap) {
            let name = file.file_name().into_string().unwrap();
            // With the last three the daemon has one process ended when memory is used up.
            let is_limit = [
                "memory.max",
                "memory.limit_in_bytes",
                "cpu.max",
                "cpu.cfs_quota_us",
                "pids.max",
                "memory.high",
                "memory.oom_control",
                "cgroup.event_control",
            ];
            let owner = file.metadata().unwrap().uid();
            // Newcomers enter groups of version 2 by it.
            let is_entrance = name == "cgroup.procs" && owner != USER.uid;
            let is_given = is_limit.contains(&&name[..]) || is_entrance;
            assert!(owner == 0 || is_given, "{name} is {owner}'s");
        }
    }
    send(&all.2, &Request::new(REQUEST_REMOVE_GROUP, 7), &[]).unwrap();
    assert!(all.0.serve(&all.1));
    // What is left to another sandbox goes with the monitor.
    drop(all);
    let deadline = std::time::Instant::now() + std::time::Duration::from_secs(20);
    while directories.iter().any(|directory| directory.exists()) {
        assert!(std::time::Instant::now() < deadline, "the groups are still there");
        std::thread::sleep(std::time::Duration::from_millis(5));
    }
}

/// Has groups made; their name, and the files that lead into them.
fn make(all: &mut (Monitor, OwnedFd, OwnedFd), number: u64) -> (GroupName, Vec<OwnedFd>) {
    send(&all.2, &Request::new(REQUEST_GROUP, number), &[]).unwrap();
    assert!(all.0.serve(&all.1));
    let mut entrances = Vec::new();
    let answer = receive::<Answer>(&all.2, &mut entrances).unwrap().unwrap();
    assert_eq!((answer.errno, answer.group.number), (0, number));
    (answer.group, entrances)
}

/// A process of this user that waits.
fn waiting(uid: u32) -> std::process::Child {
    Command::new("sleep").arg("1000").uid(uid).gid(uid).spawn().unwrap()
}

/// Whoever takes over a daemon has these files.
#[test]
fn files_that_lead_into_groups_move_newcomers_and_nobody_else() {
    let Some(mut all) = monitor() else { return };
    let places = all.0.groups.places().to_vec();
    let newcomer = all.0.range.as_ref().unwrap().first;
    let (_, entrances) = make(&mut all, 1);
    assert_eq!(rustix::process::geteuid(), rustix::process::Uid::ROOT);
    let directories = all.0.made[&1].directories().to_vec();
    // The file of this one is the last.
    let has_cpu = |place: &limits::Place| place.controllers.contains(&limits::Controller::Cpu);
    let cpu = places.iter().position(has_cpu);
    let others = (0..places.len()).filter(|number| Some(*number) != cpu);
    for (entrance, number) in entrances.iter().zip(others.chain(cpu)) {
        for uid in [0, USER.uid, 65_534] {
            let mut child = waiting(uid);
            let moved = rustix::io::write(entrance, child.id().to_string().as_bytes());
            assert_eq!(moved, Err(Errno::ACCESS), "a process of {uid} in place {number}");
            child.kill().unwrap();
            child.wait().unwrap();
        }
        assert_eq!(rustix::io::write(entrance, b"0"), Err(Errno::ACCESS));
        let mut entering = Command::new("sh");
        entering.args(["-c", "echo 0 >&0 && exec cat /proc/self/cgroup"]).uid(newcomer);
        // Of version 2 they come from the group of zygote parents.
        enter_groups(&mut entering, Newcomers::origins(&all.0.groups).unwrap());
        let group = entering.stdin(entrance.try_clone().unwrap()).output().unwrap();
        let held = places[number].above_sandboxes();
        let name = directories[number].strip_prefix(held).unwrap().to_str().unwrap();
        let text = String::from_utf8_lossy(&group.stdout).into_owned();
        assert!(text.contains(name), "{name} is not in {text:?} {:?}", group.stderr);
    }
}

/// To open them is not to lose what the monitor has.
#[test]
fn who_opens_the_files_that_lead_into_groups_is_root_again() {
    use rustix::process::{Uid, getegid, geteuid, parent_process_death_signal};
    let Some(mut all) = monitor() else { return };
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let signal = Some(rustix::process::Signal::USR1);
            rustix::process::set_parent_process_death_signal(signal).unwrap();
            let before = (getegid(), rustix::thread::capabilities(None).unwrap());
            drop(make(&mut all, 1));
            assert_eq!((geteuid(), parent_process_death_signal().unwrap()), (Uid::ROOT, signal));
            assert_eq!((getegid(), rustix::thread::capabilities(None).unwrap()), before);
            // Files are root's, too.
            let file = tempfile::NamedTempFile::new().unwrap();
            assert_eq!(file.as_file().metadata().unwrap().uid(), 0);
        });
    });
}

fn remove(all: &mut (Monitor, OwnedFd, OwnedFd), number: u64) {
    send(&all.2, &Request::new(REQUEST_REMOVE_GROUP, number), &[]).unwrap();
    assert!(all.0.serve(&all.1));
}

/// Whether one of the next groups are those that were made with this number.
fn comes_again(
    all: &mut (Monitor, OwnedFd, OwnedFd),
    numbers: std::ops::Range<u64>,
    first: u64,
) -> bool {
    numbers.into_iter().any(|number| {
        std::thread::sleep(std::time::Duration::from_millis(5));
        make(all, number).0.first == first
    })
}

#[test]
fn a_daemon_gets_groups_again_only_when_nobody_is_in_them_or_can_come() {
    let Some(mut all) = monitor() else { return };
    let is_v1 = |place: &limits::Place| place.version == Version::V1;
    if !all.0.groups.places().iter().any(is_v1) || all.0.groups.places().len() < 2 {
        eprintln!("skipped: no control groups of version 1");
        return;
    }
    // The daemon says that it is done with a live sandbox.
    let mut child = Command::new("sleep").arg("1000").spawn().unwrap();
    make(&mut all, 1);
    let directories = all.0.made[&1].directories().to_vec();
    let cpu = all.0.made[&1].directory_of(limits::Controller::Cpu).unwrap().join("tasks");
    std::fs::write(cpu, child.id().to_string()).unwrap();
    remove(&mut all, 1);
    assert!(!comes_again(&mut all, 1000..1040, 1));
    child.kill().unwrap();
    child.wait().unwrap();
    // It keeps a file that leads there.
    let (_, entrances) = make(&mut all, 2);
    remove(&mut all, 2);
    assert!(!comes_again(&mut all, 2000..2040, 2));
    drop(entrances);
    // Another test's fork has a copy of every descriptor for a moment, and groups that
    // are not vacant in time are removed: one of several must come again.
    let is_handed_on = |first: u64| {
        drop(make(&mut all, first));
        remove(&mut all, first);
        comes_again(&mut all, first + 1..first + 100, first)
    };
    assert!((30..50).map(|hundreds| hundreds * 100).any(is_handed_on));
    drop(all);
    let deadline = std::time::Instant::now() + std::time::Duration::from_secs(20);
    while directories.iter().any(|directory| directory.exists()) {
        assert!(std::time::Instant::now() < deadline, "the groups are still there");
        std::thread::sleep(std::time::Duration::from_millis(5));
    }
}

#[test]
fn what_a_daemon_has_kept_is_there_for_the_next_and_its_groups_are() {
    let Some(mut all) = monitor() else { return };
    for number in [1, 2] {
        assert_eq!(ask(&mut all, Request::new(REQUEST_GROUP, number), &[]).0, 0);
    }
    let null = std::fs::File::open("/dev/null").unwrap();
    let request = Request::keep(1, KeptKind::Sandbox, 2);
    let parts = [IoSlice::new(bytemuck::bytes_of(&request)), IoSlice::new(b"a note")];
    message::send(&all.2, &parts, &[null.as_fd(); 3]).unwrap();
    assert!(all.0.serve(&all.1));
    let answer = receive::<Answer>(&all.2, &mut Vec::new()).unwrap().unwrap();
    assert_eq!(answer.errno, 0);
    all.0.forget_daemon();
    assert!(all.0.made.contains_key(&2) && !all.0.made.contains_key(&1));
    // Of the next daemon's own groups none has that number.
    let mut next = |key| {
        send(&all.2, &Request::new(REQUEST_NEXT_KEPT, key), &[]).unwrap();
        assert!(all.0.serve(&all.1));
        receive_kept(&all.2).unwrap()
    };
    let (key, kept) = next(0).unwrap();
    assert_eq!((key, kept.kind, kept.group.number), (1, KeptKind::Sandbox, 2));
    assert_eq!((&kept.note[..], kept.descriptors.len()), (&b"a note"[..], 3));
    assert!(next(key).is_none());
    send(&all.2, &Request::new(REQUEST_FORGET, key), &[]).unwrap();
    assert!(all.0.serve(&all.1));
    send(&all.2, &Request::new(REQUEST_NEXT_KEPT, 0), &[]).unwrap();
    assert!(all.0.serve(&all.1));
    assert!(receive_kept(&all.2).unwrap().is_none());
}

/// One that is killed reads no answers.
#[test]
fn what_a_daemon_has_said_in_its_last_moment_counts() {
    let Some((mut monitor, own, daemon)) = monitor() else { return };
    let null = std::fs::File::open("/dev/null").unwrap();
    let keep = |key| {
        let request = Request::keep(key, KeptKind::Sandbox, 0);
        send(&daemon, &request, &[null.as_fd()]).unwrap();
    };
    keep(1);
    assert!(monitor.serve(&own));
    [2, 3].into_iter().for_each(keep);
    for (kind, number) in [(REQUEST_FORGET, 1), (REQUEST_GROUP, 7), (REQUEST_LEAVE, 0)] {
        send(&daemon, &Request::new(kind, number), &[]).unwrap();
    }
    keep(4);
    drop(daemon);
    monitor.serve_last(&own);
    assert_eq!((monitor.kept(), monitor.has_left()), (3, true));
    assert!(monitor.kept_after(0).is_some_and(|(key, ..)| key == 2));
    assert!(monitor.made.is_empty(), "nothing is made for it");
    // Nothing is waited for, also where its end of the socket is open still.
    let (own, _daemon) = message::control_pair().unwrap();
    monitor.serve_last(&own);
}

#[test]
fn a_daemon_says_once_in_its_life_that_it_serves() {
    let Some((mut monitor, own, daemon)) = monitor() else { return };
    assert!(!monitor.is_serving());
    for _ in 0..2 {
        send(&daemon, &Request::new(REQUEST_SERVING, 0), &[]).unwrap();
        assert!(monitor.serve(&own) && monitor.is_serving());
    }
    monitor.forget_daemon();
    assert!(!monitor.is_serving(), "the next one does not yet");
}

#[test]
fn a_daemon_that_leaves_is_told_from_one_that_does_not() {
    let Some(mut all) = monitor() else { return };
    assert!(!all.0.has_left() && !all.0.has_asked());
    assert_eq!(ask(&mut all, Request::new(REQUEST_LEAVE, 0), &[]), (0, 0));
    assert!(all.0.has_left() && all.0.has_asked());
    all.0.forget_daemon();
    assert!(!all.0.has_left() && !all.0.has_asked(), "the next one has said nothing");
}

#[test]
fn a_daemon_has_so_many_groups_and_loses_them_at_its_end() {
    let Some(mut all) = monitor() else { return };
    all.0.groups_max = 2;
    for (number, expected) in [(1, 0), (2, 0), (3, libc::ENOSPC)] {
        assert_eq!(ask(&mut all, Request::new(REQUEST_GROUP, number), &[]).0, expected);
    }
    all.0.forget_daemon();
    assert!(all.0.made.is_empty());
    // Its groups may still be there when the next one has some.
    assert_eq!(ask(&mut all, Request::new(REQUEST_GROUP, 1), &[]).0, libc::EINVAL);
    let number = (u64::from(all.0.grant().life) << 32) + 1;
    assert_eq!(ask(&mut all, Request::new(REQUEST_GROUP, number), &[]).0, 0);
}

/// Has a monitor go on as after an exec: its descriptors stay, and its memory does not.
fn execute_anew(monitor: Monitor) -> Monitor {
    let mut leaving = Leaving::default();
    let text = serde_json::to_vec(&monitor.state(None, &mut leaving).unwrap()).unwrap();
    let sealed = seal(&text).unwrap().into_raw_fd();
    drop(leaving);
    std::mem::forget(monitor);
    // SAFETY: what the monitor had is owned by nobody any more, and the sealed file neither.
    let (text, mut left) = unsafe { Left::arrive(sealed) }.unwrap();
    let state: MonitorState = serde_json::from_slice(&text).unwrap();
    state.check().unwrap();
    Monitor::resume(state, &mut left).unwrap()
}

#[test]
fn a_monitor_goes_on_with_all_that_it_had() {
    let Some((mut monitor, own, daemon)) = monitor() else { return };
    monitor.forget_daemon();
    let mut all = (monitor, own, daemon);
    let life = 1 << 32;
    for number in [1, 2] {
        assert_eq!(ask(&mut all, Request::new(REQUEST_GROUP, life + number), &[]).0, 0);
    }
    let file = tempfile::tempfile().unwrap();
    let request = Request::keep(life + 3, KeptKind::Sandbox, life + 2);
    let note: Vec<u8> = (0..=255).collect();
    let parts = [IoSlice::new(bytemuck::bytes_of(&request)), IoSlice::new(&note)];
    message::send(&all.2, &parts, &[file.as_fd(); 3]).unwrap();
    assert!(all.0.serve(&all.1));
    assert_eq!(receive::<Answer>(&all.2, &mut Vec::new()).unwrap().unwrap().errno, 0);
    assert_eq!(ask(&mut all, Request::new(REQUEST_LEAVE, 0), &[]).0, 0);
    (all.0.bound, all.0.fetchers) = (BOUND_MAX, vec![12_345]);
    let (grant, uid) = (all.0.grant(), all.0.range.as_ref().unwrap().first);
    let directories = |number| all.0.made[&(life + number)].directories().to_vec();
    let (made, kept) = (directories(1), directories(2));
    // What a thread of the program before was about to remove.
    let others: Vec<_> = grant.places.iter().map(|place| place.of_sandbox(77)).collect();
    others.iter().for_each(|other| std::fs::create_dir(other).unwrap());

    let mut all = (execute_anew(execute_anew(all.0)), all.1, all.2);
    assert_eq!(all.0.grant().life, 1);
    assert_eq!((all.0.grant().ids, all.0.grant().places), (grant.ids, grant.places));
    assert_eq!((all.0.range.as_ref().unwrap().first, all.0.fetchers.clone()), (uid, vec![12_345]));
    assert!(all.0.has_asked() && all.0.has_left());
    // The bounds are those of before.
    let port = Request::bind((std::net::Ipv4Addr::LOCALHOST, 826).into(), Transport::Tcp);
    assert_eq!(ask(&mut all, port, &[]), (libc::EMFILE, 0));
    assert_eq!(ask(&mut all, Request::new(REQUEST_GROUP, life + 1), &[]), (libc::EEXIST, 0));
    send(&all.2, &Request::new(REQUEST_NEXT_KEPT, 0), &[]).unwrap();
    assert!(all.0.serve(&all.1));
    let (key, found) = receive_kept(&all.2).unwrap().unwrap();
    assert_eq!((key, found.group.number, found.note), (life + 3, life + 2, note));
    let inode = |file: &std::fs::File| file.metadata().unwrap().ino();
    for descriptor in found.descriptors {
        assert_eq!(inode(&descriptor.into()), inode(&file));
    }
    // Nobody else gets its ids.
    let other = Monitor::new(USER, WeakLimits::Accept).unwrap().unwrap();
    assert_ne!(other.range.as_ref().unwrap().first, uid);
    drop(other);

    let is_there = |all: &[std::path::PathBuf]| all.iter().any(|directory| directory.exists());
    let await_end = |all: &[std::path::PathBuf]| {
        let deadline = std::time::Instant::now() + std::time::Duration::from_secs(20);
        while is_there(all) {
            assert!(std::time::Instant::now() < deadline, "{all:?} are still there");
            std::thread::sleep(std::time::Duration::from_millis(5));
        }
    };
    await_end(&others);
    assert!(made.is_empty() || is_there(&made));
    all.0.forget_daemon();
    assert_eq!(all.0.grant().life, 2);
    assert_eq!(all.0.versions, BTreeMap::from([(1, VERSION), (2, VERSION)]));
    assert!(kept.is_empty() || is_there(&kept));
    drop(all);
    await_end(&[made, kept].concat());
}

#[test]
fn what_a_monitor_has_beyond_what_is_known_and_allowed_is_refused() {
    let Some((mut monitor, ..)) = monitor() else { return };
    // Whatever else is kept: one that is not known is enough.
    for other in [OLDEST_VERSION - 1, VERSION + 1] {
        monitor.versions = BTreeMap::from([(0, VERSION), (1, other), (2, OLDEST_VERSION)]);
        let state = monitor.state(None, &mut Leaving::default()).unwrap();
        let refused = state.check().unwrap_err();
        assert!(refused.contains(&format!("speaks version {other}")), "{refused}");
    }
    monitor.versions = BTreeMap::from([(0, VERSION)]);
    monitor.fetchers = vec![1; FETCHERS_MAX + 1];
    assert!(monitor.state(None, &mut Leaving::default()).unwrap().check().is_err());
    (monitor.fetchers, monitor.bound) = (Vec::new(), BOUND_MAX + 1);
    let refused = monitor.state(None, &mut Leaving::default()).unwrap().check().unwrap_err();
    assert!(refused.contains("more of something"), "{refused}");
}

/// A launcher executes what the daemon before it knows.
#[test]
fn helpers_are_started_from_the_program_that_was_kept() {
    let Some((mut monitor, ..)) = monitor() else { return };
    assert_eq!(monitor.program(), std::path::Path::new(sys::OWN_PROGRAM));
    let kept = std::fs::File::open("/bin/true").unwrap();
    let state = monitor.state(Some(kept.as_fd()), &mut Leaving::default()).unwrap();
    assert!(serde_json::to_string(&state).unwrap().contains("\"helpers\":"));
    monitor.helpers = Some(kept.into());
    let is_true = |path| std::fs::read(path).unwrap() == std::fs::read("/bin/true").unwrap();
    assert!(is_true(monitor.program()));
    monitor.forget_daemon();
    assert!(!is_true(monitor.program()));
}
