//! Limits that the host enforces over all processes of a sandbox, with a stand-in kernel.

mod common;

use std::fs;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use common::{config, has_groups, index_rootfs, next, parent, said, start_with};
use thaw_sandbox::limits::{Controller, Group, Hierarchy, PROCESSES_MAX, Version, discover};
use thaw_sandbox::{Event, LimitReached, Sandbox, StartSpec, ZygoteParent};

/// Far longer than anything here takes.
const PATIENCE: Duration = Duration::from_secs(60);

fn start(
    parent: &ZygoteParent,
    command: &str,
    argument: &str,
    change: impl FnOnce(&mut StartSpec<'_>),
) -> Sandbox {
    start_with(parent.create().unwrap(), command, argument, index_rootfs(Vec::new()), change)
}

/// The directories of a process's control groups.
fn groups_of(pid: u32) -> Vec<PathBuf> {
    let controllers = |mount: &str| -> Option<PathBuf> {
        let (fields, kind) = mount.split_once(" - ")?;
        let options = kind.split(' ').nth(2)?;
        let path = fields.split(' ').nth(4)?;
        let text = fs::read_to_string(format!("/proc/{pid}/cgroup")).ok()?;
        let own = text.lines().find_map(|line| {
            let mut fields = line.splitn(3, ':');
            let (_, names, own) = (fields.next()?, fields.next()?, fields.next()?);
            let is_it = match kind.split(' ').next()? {
                "cgroup2" => names.is_empty(),
                "cgroup" => !names.is_empty() && options.split(',').any(|name| name == names),
                _ => false,
            };
            is_it.then(|| own.to_owned())
        })?;
        own.contains("/thaw-").then(|| Path::new(path).join(own.trim_start_matches('/')))
    };
    let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap();
    mounts.lines().filter_map(controllers).collect()
}

fn has_processes(group: &Path) -> bool {
    !fs::read_to_string(group.join("cgroup.procs")).unwrap_or_default().is_empty()
}

/// A hierarchy with groups that one sandbox can have after another; `None` where this host has
/// none.
fn reusing() -> Option<Arc<Hierarchy>> {
    let hierarchy = discover();
    let is_reusable = hierarchy.places().iter().any(|place| place.version == Version::V1);
    if !is_reusable {
        thaw_skip::skip("no control groups of version 1");
    }
    is_reusable.then_some(hierarchy)
}

/// Those groups that another sandbox can have.
fn lasting(group: &Group) -> Vec<PathBuf> {
    let is_of_v1 = |path: &&PathBuf| path.join("tasks").exists();
    group.directories().iter().filter(is_of_v1).cloned().collect()
}

/// Makes groups until they are these, or until there was time enough.
fn comes_again(hierarchy: &Arc<Hierarchy>, wanted: &[PathBuf], patience: Duration) -> bool {
    static NUMBER: AtomicU64 = AtomicU64::new(1000);
    let began = Instant::now();
    // What is made is held, so that something else comes next.
    let mut others = Vec::new();
    loop {
        let group = hierarchy.create(NUMBER.fetch_add(1, Ordering::Relaxed)).unwrap();
        if lasting(&group) == wanted {
            return true;
        }
        assert!(lasting(&group).iter().all(|path| !wanted.contains(path)), "some of them");
        if began.elapsed() > patience {
            return false;
        }
        others.push(group);
        std::thread::sleep(Duration::from_millis(20));
    }
}

#[test]
fn groups_are_left_to_the_next_sandbox() {
    let Some(hierarchy) = reusing() else { return };
    let group = hierarchy.create(1).unwrap();
    let wanted = lasting(&group);
    drop(group);
    assert!(comes_again(&hierarchy, &wanted, PATIENCE));
}

/// A process of the group writes a file, whose pages in the page cache stay charged to it.
#[test]
fn groups_to_which_much_memory_is_charged_are_not_left_to_others() {
    let Some(hierarchy) = reusing() else { return };
    let group = hierarchy.create(1).unwrap();
    let Some(memory) = group.directory_of(Controller::Memory).map(Path::to_owned) else { return };
    let wanted = lasting(&group);
    if !wanted.contains(&memory) {
        return thaw_skip::skip("control groups for memory have version 2");
    }
    let file = tempfile::NamedTempFile::new_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let write = "echo 0 > $0/tasks && head -c 4194304 /dev/zero > $1";
    let mut shell = std::process::Command::new("sh");
    let written = shell.args(["-c", write]).arg(&memory).arg(file.path()).status().unwrap();
    assert!(written.success());
    let charged = group.memory().unwrap().unwrap();
    assert!(charged >= 4 << 20, "{charged}");
    drop(group);
    assert!(!comes_again(&hierarchy, &wanted, Duration::from_millis(300)));
    wait_until("they are removed", || !wanted.iter().any(|group| group.exists()));
}

/// The host kernel goes on counting whom it has killed: the next sandbox would be said to have
/// run out of memory.
#[test]
fn groups_that_have_run_out_of_memory_are_not_left_to_others() {
    let Some(_) = reusing() else { return };
    let parent = parent();
    if !has_groups(&parent) {
        return;
    }
    let mut sandbox = start(&parent, "share", "200", |spec| spec.memory_limit = 50 << 20);
    let groups = groups_of(sandbox.pid());
    assert_eq!(next(&mut sandbox), Event::Hangup);
    assert_eq!(sandbox.wait().signal(), Some(libc::SIGKILL));
    assert_eq!(sandbox.limit_reached(), Some(LimitReached::Memory));
    drop(sandbox);
    wait_until("they are removed", || !groups.iter().any(|group| group.exists()));
    let next = start(&parent, "hang", "", |_| {});
    assert_eq!(next.limit_reached(), None);
}

#[test]
fn groups_with_an_open_entrance_are_not_left_to_others() {
    let Some(hierarchy) = reusing() else { return };
    for number in 0..lasting(&hierarchy.create(1).unwrap()).len() {
        let group = hierarchy.create(10 + number as u64).unwrap();
        let wanted = lasting(&group);
        let mut entrances = group.entrances().unwrap();
        let place = group.directories().iter().position(|path| *path == wanted[number]).unwrap();
        let entrance = entrances.swap_remove(place);
        drop((entrances, group));
        assert!(!comes_again(&hierarchy, &wanted, Duration::from_millis(300)));
        // Whoever holds the entrance cannot keep the group.
        wait_until("they are removed", || !wanted.iter().any(|group| group.exists()));
        assert!(rustix::io::write(&entrance, b"0").is_err());
    }
}

#[test]
fn groups_with_a_process_are_not_left_to_others() {
    let Some(hierarchy) = reusing() else { return };
    for number in 0..lasting(&hierarchy.create(1).unwrap()).len() {
        let group = hierarchy.create(10 + number as u64).unwrap();
        let wanted = lasting(&group);
        let mut child = std::process::Command::new("sleep").arg("1000").spawn().unwrap();
        fs::write(wanted[number].join("tasks"), child.id().to_string()).unwrap();
        drop(group);
        assert!(!comes_again(&hierarchy, &wanted, Duration::from_millis(300)));
        child.kill().unwrap();
        child.wait().unwrap();
    }
}

#[test]
fn groups_wait_for_others_in_a_bounded_number_and_are_removed_at_the_end() {
    let Some(hierarchy) = reusing() else { return };
    let groups: Vec<_> = (1..=200).map(|number| hierarchy.create(number).unwrap()).collect();
    let all: Vec<_> = groups.iter().map(lasting).collect();
    drop(groups);
    let left = || all.iter().filter(|group| group.iter().any(|path| path.exists())).count();
    wait_until("those that are too many are removed", || left() <= 128);
    // The others are there for the next.
    let next = hierarchy.create(1000).unwrap();
    assert!(all.contains(&lasting(&next)));
    drop((next, hierarchy));
    wait_until("all are removed", || left() == 0);
}

/// The second sandbox in the groups of the first has all of its own limits, and no others.
#[test]
fn a_sandbox_begins_anew_in_the_groups_of_another() {
    let Some(_) = reusing() else { return };
    let parent = parent();
    if !has_groups(&parent) {
        return;
    }
    let limit = Duration::from_millis(500);
    let mut seen: Vec<PathBuf> = Vec::new();
    let mut times = 0;
    let began = Instant::now();
    while times < 3 {
        assert!(began.elapsed() < PATIENCE, "{times} times");
        let mut sandbox = start(&parent, "spinners", "3", |spec| {
            spec.cpu_time_limit = Some(limit);
            spec.process_limit = 5;
            spec.cpus = 1;
        });
        let groups = groups_of(sandbox.pid());
        times += usize::from(groups.iter().any(|group| seen.contains(group)));
        seen.extend(groups);
        assert_eq!(said(&mut sandbox), "spinning");
        assert_eq!(next(&mut sandbox), Event::Hangup);
        assert_eq!(sandbox.limit_reached(), Some(LimitReached::CpuTime));
        let used = sandbox.cpu_time().unwrap().unwrap();
        // Four processes that have all of it each would have used four times as much.
        assert!(used >= limit && used < limit * 4, "{used:?}");
    }
    let mut other = start(&parent, "explode", "", |_| {});
    let made: u32 = said(&mut other).split(' ').next().unwrap().parse().unwrap();
    assert!(made > 5, "{made}");
    let mut small = start(&parent, "share", "200", |spec| spec.memory_limit = 50 << 20);
    assert_eq!(next(&mut small), Event::Hangup);
    assert_eq!(small.limit_reached(), Some(LimitReached::Memory));
    drop(small);
    let mut idle = start(&parent, "hang", "", |_| {});
    idle.resume().unwrap();
    assert_eq!(said(&mut idle), "resumed");
    assert_eq!(idle.limit_reached(), None);
}

fn wait_until(what: &str, is_so: impl Fn() -> bool) {
    let began = Instant::now();
    while !is_so() {
        assert!(began.elapsed() < PATIENCE, "{what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn cpu_time_is_counted_over_all_processes() {
    let parent = parent();
    let limit = Duration::from_millis(500);
    let mut sandbox = start(&parent, "spinners", "6", |spec| spec.cpu_time_limit = Some(limit));
    assert_eq!(said(&mut sandbox), "spinning");
    assert_eq!(next(&mut sandbox), Event::Hangup);
    assert_eq!(sandbox.wait().signal(), Some(libc::SIGKILL));
    assert_eq!(sandbox.limit_reached(), Some(LimitReached::CpuTime));
    if has_groups(&parent) {
        let used = sandbox.cpu_time().unwrap().unwrap();
        assert!(used >= limit, "{used:?}");
        // Six processes that have half a second each would have used three.
        assert!(used < limit * 3, "{used:?}");
    }
}

#[test]
fn cpu_time_of_processes_that_have_ended_counts() {
    let parent = parent();
    if !has_groups(&parent) {
        return;
    }
    let limit = Duration::from_millis(300);
    let mut sandbox = start(&parent, "relay", "1000", |spec| spec.cpu_time_limit = Some(limit));
    assert_eq!(next(&mut sandbox), Event::Hangup);
    assert_eq!(sandbox.limit_reached(), Some(LimitReached::CpuTime));
    let used = sandbox.cpu_time().unwrap().unwrap();
    assert!(used >= limit && used < limit * 3, "{used:?}");
}

#[test]
fn a_sandbox_that_waits_keeps_its_cpu_time() {
    let parent = parent();
    let limit = Some(Duration::from_millis(200));
    let mut sandbox = start(&parent, "hang", "", |spec| spec.cpu_time_limit = limit);
    std::thread::sleep(Duration::from_millis(600));
    sandbox.resume().unwrap();
    assert_eq!(said(&mut sandbox), "resumed");
    assert_eq!(sandbox.limit_reached(), None);
}

#[test]
fn many_processes_share_the_processors_of_one_sandbox() {
    let parent = parent();
    if !has_groups(&parent) {
        return;
    }
    if std::thread::available_parallelism().unwrap().get() < 2 {
        return thaw_skip::skip("this machine has one processor");
    }
    let mut sandbox = start(&parent, "spinners", "8", |spec| spec.cpus = 1);
    assert_eq!(said(&mut sandbox), "spinning");
    let (began, before) = (Instant::now(), sandbox.cpu_time().unwrap().unwrap());
    std::thread::sleep(Duration::from_secs(2));
    let used = sandbox.cpu_time().unwrap().unwrap() - before;
    let ratio = used.as_secs_f64() / began.elapsed().as_secs_f64();
    // What it had saved up, and how the host kernel hands out time, make it a little more.
    assert!(ratio < 1.3, "{ratio} processors");
}

#[test]
fn processes_are_bounded_and_nobody_else_is_touched() {
    let parent = parent();
    if !has_groups(&parent) {
        return;
    }
    let mut sandbox = start(&parent, "explode", "", |spec| spec.process_limit = 20);
    // The first process is one of them.
    assert_eq!(said(&mut sandbox), "00019 EAGAIN");
    let mut neighbour = start(&parent, "exit", "7", |_| {});
    assert!(matches!(next(&mut neighbour), Event::Exit(_)));
    // A sandbox without a limit of its own is bounded, too, by its user id.
    let mut other = start(&parent, "explode", "", |_| {});
    let made: u32 = said(&mut other).split(' ').next().unwrap().parse().unwrap();
    assert!(made < PROCESSES_MAX, "{made}");
}

#[test]
fn shared_memory_counts() {
    let parent = parent();
    if !has_groups(&parent) {
        return;
    }
    let mut sandbox = start(&parent, "share", "200", |spec| spec.memory_limit = 50 << 20);
    assert_eq!(next(&mut sandbox), Event::Hangup);
    assert_eq!(sandbox.wait().signal(), Some(libc::SIGKILL));
    assert_eq!(sandbox.limit_reached(), Some(LimitReached::Memory));
    let mut sandbox = start(&parent, "share", "20", |spec| spec.memory_limit = 50 << 20);
    assert_eq!(said(&mut sandbox), "full");
    assert_eq!(sandbox.limit_reached(), None);
}

#[test]
fn groups_go_with_their_sandbox() {
    let parent = parent();
    if !has_groups(&parent) {
        return;
    }
    let sandbox = start(&parent, "spinners", "3", |_| {});
    let groups = groups_of(sandbox.pid());
    assert!(!groups.is_empty());
    assert!(groups.iter().all(|group| group.is_dir()), "{groups:?}");
    drop(sandbox);
    wait_until("nobody is in the groups", || !groups.iter().any(|group| has_processes(group)));
    drop(parent);
    wait_until("all are removed", || !groups.iter().any(|group| group.exists()));
    // That which stands for this process has the name without the sandbox's number, or holds the
    // sandbox's (version 2).
    let own: Vec<_> = groups
        .iter()
        .map(|group| match group.extension() {
            Some(_) => group.with_extension(""),
            None => group.parent().unwrap().to_owned(),
        })
        .collect();
    wait_until("the others are removed", || !own.iter().any(|group| group.exists()));
}

#[test]
fn groups_go_after_the_death_of_the_parent() {
    let zygotes = parent();
    if !has_groups(&zygotes) {
        return;
    }
    let sandbox = start(&zygotes, "hang", "", |_| {});
    let groups = groups_of(sandbox.pid());
    let pid = rustix::process::Pid::from_raw(zygotes.pid() as i32).unwrap();
    rustix::process::kill_process(pid, rustix::process::Signal::KILL).unwrap();
    sandbox.wait();
    drop((sandbox, zygotes));
    wait_until("the groups are removed", || !groups.iter().any(|group| group.exists()));
    // The next one's groups lie beside the old ones' place, not in it.
    let again = parent();
    let places = groups_of(again.create().unwrap().pid());
    let depth = |groups: &[PathBuf]| groups.iter().map(|group| group.iter().count()).max();
    assert_eq!(depth(&places), depth(&groups), "{places:?} {groups:?}");
}

#[test]
fn each_controller_has_a_place_or_a_reason() {
    let hierarchy = discover();
    for controller in Controller::ALL {
        let missing = hierarchy.missing().iter().find(|missing| missing.controller == controller);
        assert_ne!(hierarchy.has(controller), missing.is_some(), "{controller:?}");
        assert!(missing.is_none_or(|missing| !missing.reason.is_empty()));
    }
    // Strict limits are refused exactly where one is missing.
    let strict =
        thaw_sandbox::ZygoteConfig { weak_limits: thaw_sandbox::WeakLimits::Refuse, ..config() };
    let refused = ZygoteParent::start(strict).err();
    assert_eq!(refused.is_some(), !hierarchy.missing().is_empty(), "{refused:?}");
    if let Some(error) = refused {
        assert!(error.to_string().contains("--weak-limits"), "{error}");
    }
}
