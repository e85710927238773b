//! What a monitor's launchers have, with the monitor of root's and a daemon that sends what
//! it likes.

mod common;

use std::fs::{self, File};
use std::io::IoSlice;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use rustix::net::{
    AddressFamily, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketFlags, SocketType,
    sendmsg, socketpair,
};
use rustix::process::{Pid, WaitOptions, waitpid};
use thaw_sandbox::WeakLimits;
use thaw_sandbox::monitor::{DaemonIds, Monitor, socket_pair};

/// Number of the request for a zygote parent.
const REQUEST_PARENT: u32 = 1;

fn send(socket: impl AsFd, packet: &[u8], descriptors: &[BorrowedFd<'_>]) {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(4))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    assert!(control.push(SendAncillaryMessage::ScmRights(descriptors)));
    sendmsg(socket, &[IoSlice::new(packet)], &mut control, SendFlags::empty()).unwrap();
}

/// The daemon owns their user namespace, may look into them, and lets them wait for as long
/// as it likes.
#[test]
fn launchers_have_nothing_of_the_hosts_for_the_daemon_to_see() {
    if !rustix::process::geteuid().is_root() {
        // The daemon of another user has launchers as well: see the end-to-end tests.
        return;
    }
    let ids = DaemonIds { uid: 12_345, gid: 12_346 };
    let Some(mut monitor) = Monitor::new(ids, WeakLimits::Accept).unwrap() else { return };
    let (own, daemon) = socket_pair().unwrap();
    let (waiting, control) =
        socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None).unwrap();
    let mut request = [0; 32];
    request[..4].copy_from_slice(&REQUEST_PARENT.to_ne_bytes());
    let kernel = File::open("/dev/null").unwrap();
    send(&daemon, &request, &[control.as_fd(), kernel.as_fd()]);
    assert!(monitor.serve(&own));

    let children = fs::read_to_string("/proc/thread-self/children").unwrap();
    let launcher: u32 = children.trim().parse().expect("one child");
    let file = |name: &str| PathBuf::from(format!("/proc/{launcher}/{name}"));
    let own_namespace = fs::read_link("/proc/self/ns/user").unwrap();
    let deadline = Instant::now() + Duration::from_secs(20);
    while fs::read_link(file("ns/user")).is_ok_and(|namespace| namespace == own_namespace) {
        assert!(Instant::now() < deadline, "the launcher joins nothing");
        std::thread::sleep(Duration::from_micros(50));
    }
    // From that moment on the daemon could look.
    let names = |directory: &str| {
        let entries = fs::read_dir(file(directory)).unwrap();
        let mut names: Vec<_> = entries.map(|entry| entry.unwrap().file_name()).collect();
        names.sort();
        names
    };
    assert_eq!(names("root"), ["dev", "proc"]);
    assert_eq!(names("root/dev"), ["null"]);
    for number in names("fd") {
        let target = fs::read_link(file("fd").join(number)).unwrap_or_default();
        let target = target.to_string_lossy();
        let is_given = target.starts_with("socket:") || target.ends_with("/null");
        assert!(is_given || target.starts_with("user:") || target.is_empty(), "{target}");
    }
    assert_eq!(fs::read(file("environ")).unwrap(), b"");
    drop((waiting, control));
    waitpid(Pid::from_raw(launcher as i32), WaitOptions::empty()).unwrap();
}
