//! Daemons that are killed one after the other, each of which leaves a sandbox that lives: a
//! real monitor, and this same executable as each daemon.

mod common;

use std::env;
use std::fs;
use std::io::{self, BufRead, BufReader, Read};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{
    Signal, WaitOptions, kill_process, set_parent_process_death_signal, wait, waitpid,
};
use thaw_sandbox::monitor::{self, DaemonIds, Monitor};
use thaw_sandbox::{Console, Kernel, WeakLimits, ZygoteConfig, ZygoteParent, take_over};

/// More than a monitor may have children, besides those that are kept.
const LIVES: usize = 70;
/// Zygote parents that a daemon takes over.
const TAKEN_OVER: usize = 16;
/// Under each of two keys: a zygote parent and its sandbox.
const KEYS: usize = 2;
const PATIENCE: Duration = Duration::from_secs(60);
/// Says to this executable that it is a daemon: the path of its kernel.
const DAEMON: &str = "THAW_TEST_DAEMON";

/// A daemon: takes over what others have left, and leaves a sandbox more.
#[test]
fn daemon() {
    let Some(kernel) = env::var_os(DAEMON) else { return };
    set_parent_process_death_signal(Some(Signal::KILL)).unwrap();
    let socket = io::stdin().as_fd().try_clone_to_owned().unwrap();
    let (text, _) = monitor::receive_start(&socket).unwrap();
    monitor::adopt(socket, serde_json::from_slice(&text).unwrap());
    let legacy = take_over(&Console::Pipe).unwrap();
    let kernel = Kernel::from_elf(fs::read(kernel).unwrap()).unwrap();
    let config = ZygoteConfig {
        max_sandboxes: 4,
        weak_limits: WeakLimits::Accept,
        ..ZygoteConfig::new(kernel, Console::Pipe)
    };
    let zygote = ZygoteParent::start(config).unwrap().create().unwrap();
    let rootfs = common::index_rootfs(Vec::new());
    let sandbox = common::start_with(zygote, "hang", "", rootfs, |_| {});
    let kept = sandbox.keep("", &[]).unwrap();
    println!("\nlife {} {} {:?}", sandbox.pid(), legacy.sandboxes.len(), legacy.problems);
    assert!(kept.is_some());
    std::thread::sleep(Duration::from_secs(600));
}

/// The command of a daemon with this end of the monitor's socket.
fn command(remote: &OwnedFd, kernel: &Path, stdout: OwnedFd) -> io::Result<Command> {
    let mut command = Command::new("/proc/self/exe");
    command
        .args(["--exact", "daemon", "--nocapture"])
        .env(DAEMON, kernel)
        .current_dir("/")
        .stdin(Stdio::from(remote.try_clone()?))
        .stdout(Stdio::from(stdout))
        .uid(12_345)
        .gid(12_346);
    Ok(command)
}

/// Serves a daemon until it has had so many things kept. It has others forgotten before.
fn serve_until_kept(monitor: &mut Monitor, socket: &OwnedFd, wanted: usize) {
    let deadline = Instant::now() + PATIENCE;
    let mut added = 0;
    while added < wanted {
        assert!(Instant::now() < deadline, "it has {added} things kept, and not {wanted}");
        let mut events = [PollFd::new(socket, PollFlags::IN)];
        let _ = poll(&mut events, Some(&Timespec { tv_sec: 0, tv_nsec: 10_000_000 }));
        if !events[0].revents().is_empty() {
            let before = monitor.kept();
            assert!(monitor.serve(socket), "the daemon has ended");
            added += monitor.kept().saturating_sub(before);
        }
        while let Ok(Some(_)) = wait(WaitOptions::NOHANG) {}
    }
}

/// What a daemon says: its sandbox, and how many it has taken over.
fn report(stdout: impl Read) -> (u32, usize, String) {
    for line in BufReader::new(stdout).lines() {
        if let Some(report) = line.unwrap().strip_prefix("life ") {
            let mut words = report.splitn(3, ' ');
            let mut next = || words.next().unwrap().to_owned();
            return (next().parse().unwrap(), next().parse().unwrap(), next());
        }
    }
    panic!("the daemon has said nothing");
}

fn is_alive(pid: u32) -> bool {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    stat.rsplit_once(')').is_some_and(|(_, rest)| !rest.starts_with(" Z"))
}

/// A daemon that is killed leaves its zygote parent for as long as its sandbox lives. The
/// number of those has a bound, and none of them keeps the next daemon from having one.
#[test]
fn any_number_of_daemons_may_be_killed_in_a_row() {
    if env::var_os(DAEMON).is_some() {
        return;
    }
    if !rustix::process::geteuid().is_root() {
        return thaw_skip::skip("only root's monitor is tested here");
    }
    let ids = DaemonIds { uid: 12_345, gid: 12_346 };
    let Some(mut monitor) = Monitor::new(ids, WeakLimits::Accept).unwrap() else {
        return thaw_skip::skip("this host has no user namespaces");
    };
    let directory = tempfile::tempdir().unwrap();
    fs::set_permissions(directory.path(), fs::Permissions::from_mode(0o755)).unwrap();
    let kernel = directory.path().join("kernel");
    fs::write(&kernel, common::standin_elf(&[])).unwrap();
    let mut sandboxes = Vec::new();
    for life in 0..LIVES {
        let (socket, remote) = monitor::socket_pair().unwrap();
        rustix::io::ioctl_fionbio(&socket, true).unwrap();
        let (said, stdout) = io::pipe().unwrap();
        let daemon =
            monitor.spawn_daemon(|| command(&remote, &kernel, stdout.try_clone()?.into())).unwrap();
        drop((remote, stdout));
        let grant = serde_json::to_vec(&monitor.grant()).unwrap();
        monitor::send_start(&socket, &grant, &[]).unwrap();
        serve_until_kept(&mut monitor, &socket, KEYS);
        assert_eq!(monitor.kept(), KEYS * (life.min(TAKEN_OVER) + 1), "life {life}");
        let (sandbox, taken_over, problems) = report(said);
        assert_eq!(taken_over, life.min(TAKEN_OVER), "life {life}: {problems}");
        sandboxes.push(sandbox);
        // The newest live, whoever has made them.
        let newest = sandboxes.iter().rev().take(taken_over + 1);
        assert!(newest.clone().all(|sandbox| is_alive(*sandbox)), "life {life}");
        kill_process(daemon, Signal::KILL).unwrap();
        waitpid(Some(daemon), WaitOptions::empty()).unwrap();
        monitor.forget_daemon();
        let deadline = Instant::now() + PATIENCE;
        while monitor.has_ending_children() {
            assert!(Instant::now() < deadline, "children of life {life} do not end");
            while let Ok(Some(_)) = wait(WaitOptions::NOHANG) {}
            std::thread::sleep(Duration::from_millis(1));
        }
    }
    monitor.forget_kept();
    let deadline = Instant::now() + PATIENCE;
    while sandboxes.iter().any(|sandbox| is_alive(*sandbox)) {
        assert!(Instant::now() < deadline, "sandboxes outlive all that is kept");
        while let Ok(Some(_)) = wait(WaitOptions::NOHANG) {}
        std::thread::sleep(Duration::from_millis(1));
    }
}
