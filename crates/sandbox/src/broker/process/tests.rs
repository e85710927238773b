//! The process itself, which this test binary becomes.

use super::*;
use crate::broker::{BoundAccess, BoundDirectory, HostDirectory, HostPolicy, Ids};
use bytemuck::Zeroable;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use thaw_abi::bind::{BIND_MKDIR, BIND_STAT, BIND_WRITE, BindRequest};
use thaw_abi::control::{
    FileAttributes, MSG_BIND, MSG_FS_LIST, MSG_FS_OPEN, MSG_FS_SOCKET, MSG_FS_STAT, Reply,
};

const LONG: Duration = Duration::from_secs(20);
/// As whom the program runs.
const PROGRAM: Ids = Ids { uid: 7, gid: 8 };

/// A process that serves these directories, and the sandbox' end of the control socket.
fn serving(directories: &Directories) -> (FileProcess, OwnedFd) {
    let (control, sandbox) = message::control_pair().unwrap();
    rustix::io::ioctl_fionbio(&control, true).unwrap();
    let server = FileProcess::start(directories, control).unwrap();
    server.wait_until_serving().unwrap();
    (server, sandbox)
}

/// A directory that everybody may read, with a file.
fn directory() -> tempfile::TempDir {
    let directory = tempfile::tempdir().unwrap();
    fs::set_permissions(directory.path(), fs::Permissions::from_mode(0o777)).unwrap();
    fs::write(directory.path().join("file"), "content").unwrap();
    directory
}

fn root(path: &Path, policy: &HostPolicy) -> Directories {
    Directories::new(Some(Arc::new(HostDirectory::open_with(path, policy).unwrap())))
}

/// The error number, the tail and the number of descriptors of the next reply.
fn reply(sandbox: &OwnedFd) -> (i32, Vec<u8>, usize) {
    let (errno, tail, descriptors) = reply_with_descriptors(sandbox);
    (errno, tail, descriptors.len())
}

fn reply_with_descriptors(sandbox: &OwnedFd) -> (i32, Vec<u8>, Vec<OwnedFd>) {
    assert!(is_readable(sandbox, Instant::now() + LONG));
    let mut buffer = vec![0; MESSAGE_MAX];
    let mut descriptors = Vec::new();
    let packet = message::receive(sandbox, &mut buffer, Some(&mut descriptors)).unwrap();
    let head = size_of::<MessageHeader>();
    let reply: Reply = pod_read_unaligned(&buffer[head..head + size_of::<Reply>()]);
    let tail = buffer[head + size_of::<Reply>()..packet.len].to_vec();
    (reply.errno, tail, descriptors)
}

/// Asks over the sandbox' own socket; whether anybody can read that.
fn ask_own(own: &OwnedFd, kind: u32, body: &[u8]) -> bool {
    let header = message::header(kind, body.len(), 1);
    message::send(own, &[IoSlice::new(bytes_of(&header)), IoSlice::new(body)], &[]).is_ok()
}

fn wait_for_end(server: &FileProcess) -> Violation {
    let deadline = Instant::now() + LONG;
    loop {
        match server.ended() {
            Some(violation) => return violation,
            None => assert!(Instant::now() < deadline, "it goes on"),
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn questions_are_answered_straight_to_the_sandbox() {
    let directory = directory();
    let (server, sandbox) = serving(&root(directory.path(), &HostPolicy::default()));
    server.pass_on(MSG_FS_STAT, 1, b"file").unwrap();
    assert_eq!((reply(&sandbox).0, reply_after(&server, &sandbox, b"none")), (0, libc::ENOENT));
    server.pass_on(MSG_FS_OPEN, 3, b"file").unwrap();
    let (errno, _, descriptors) = reply(&sandbox);
    assert_eq!((errno, descriptors), (0, 1));
    server.pass_on(MSG_FS_LIST, 4, &[0; 8]).unwrap();
    let (errno, tail, _) = reply(&sandbox);
    assert!(errno == 0 && String::from_utf8_lossy(&tail).contains("file"));
    assert_eq!(server.ended(), None);
}

fn reply_after(server: &FileProcess, sandbox: &OwnedFd, path: &[u8]) -> i32 {
    server.pass_on(MSG_FS_STAT, 2, path).unwrap();
    reply(sandbox).0
}

#[test]
fn a_sandbox_gets_one_socket_of_its_own() {
    let (root_directory, bound_directory) = (directory(), directory());
    let mut directories = root(root_directory.path(), &HostPolicy::default());
    let bound = BoundDirectory::open(bound_directory.path(), BoundAccess::Write).unwrap();
    directories.bind(7, &bound, PROGRAM);
    let (server, sandbox) = serving(&directories);
    server.pass_on(MSG_FS_SOCKET, 1, b"").unwrap();
    let (errno, _, mut descriptors) = reply_with_descriptors(&sandbox);
    let own = descriptors.pop().unwrap();
    assert_eq!((errno, descriptors.len()), (0, 0));
    server.pass_on(MSG_FS_SOCKET, 2, b"").unwrap();
    assert_eq!(reply(&sandbox).0, libc::EBUSY);

    assert!(ask_own(&own, MSG_FS_STAT, b"file"));
    assert_eq!(reply(&own).0, 0);
    assert!(ask_own(&own, MSG_FS_OPEN, b"file"));
    assert_eq!(reply(&own).2, 1);
    let request = BindRequest { mount: 7, operation: BIND_MKDIR, a: 0o755, b: 0, c: 0 };
    assert!(ask_own(&own, MSG_BIND, &[bytes_of(&request), b"new"].concat()));
    assert_eq!(reply(&own).0, 0);
    assert!(bound_directory.path().join("new").is_dir());
    // The control socket serves as before.
    assert_eq!(reply_after(&server, &sandbox, b"file"), 0);
    // Nonsense ends this socket only.
    assert!(ask_own(&own, MSG_FS_STAT, b"../secret"));
    assert_eq!(message::receive(&own, &mut [0; 64], None).unwrap().len, 0);
    assert_eq!(reply_after(&server, &sandbox, b"file"), 0);
    assert_eq!(server.ended(), None);
}

/// Replies have descriptors, which the host counts as long as nobody takes them.
#[test]
fn who_reads_no_replies_of_its_own_socket_loses_it() {
    let directory = directory();
    let (server, sandbox) = serving(&root(directory.path(), &HostPolicy::default()));
    server.pass_on(MSG_FS_SOCKET, 1, b"").unwrap();
    let own = reply_with_descriptors(&sandbox).2.pop().unwrap();
    let is_ended = (0..100_000).any(|_| !ask_own(&own, MSG_FS_OPEN, b"file"));
    assert!(is_ended, "the host goes on");
    assert_eq!(reply(&own).2, 1);
    assert_eq!(message::receive(&own, &mut [0; 64], None).unwrap().len, 0, "a second reply");
    assert_eq!(server.ended(), None);
}

/// What the caller hides and shows, the process hides and shows.
#[test]
fn the_policy_goes_with_the_directory() {
    let directory = directory();
    for name in ["hidden", "shown", "other"] {
        fs::create_dir(directory.path().join(name)).unwrap();
        fs::write(directory.path().join(name).join("x"), "").unwrap();
    }
    let policy =
        HostPolicy { hidden: vec![directory.path().join("hidden")], ..HostPolicy::default() };
    let (server, sandbox) = serving(&root(directory.path(), &policy));
    assert_eq!(reply_after(&server, &sandbox, b"hidden/x"), libc::ENOENT);
    assert_eq!(reply_after(&server, &sandbox, b"other/x"), 0);
    let part = HostDirectory::open_part(directory.path(), &[PathBuf::from("shown")], &policy);
    let (server, sandbox) = serving(&Directories::new(Some(Arc::new(part.unwrap()))));
    assert_eq!(reply_after(&server, &sandbox, b"shown/x"), 0);
    assert_eq!(reply_after(&server, &sandbox, b"other/x"), libc::ENOENT);
}

#[test]
fn bound_directories_have_their_numbers_and_their_access() {
    let (readable, writable) = (directory(), directory());
    let mut directories = Directories::new(None);
    for (number, (directory, access)) in
        [(&readable, BoundAccess::Read), (&writable, BoundAccess::Write)].into_iter().enumerate()
    {
        let bound = BoundDirectory::open(directory.path(), access).unwrap();
        directories.bind(7 + number as u32, &bound, PROGRAM);
    }
    let (server, sandbox) = serving(&directories);
    let ask = |mount, operation, path: &[u8]| {
        let request = BindRequest { mount, operation, a: 0o755, ..BindRequest::zeroed() };
        server.pass_on(MSG_BIND, 1, &[bytes_of(&request), path].concat()).unwrap();
        reply(&sandbox).0
    };
    assert_eq!(ask(7, BIND_STAT, b"file"), 0);
    assert_eq!(ask(9, BIND_STAT, b"file"), libc::ENODEV);
    assert_eq!(ask(7, BIND_MKDIR, b"new"), libc::EROFS);
    assert_eq!(ask(8, BIND_MKDIR, b"new"), 0);
    assert!(writable.path().join("new").is_dir());
    let request = BindRequest { mount: 8, operation: BIND_STAT, ..BindRequest::zeroed() };
    server.pass_on(MSG_BIND, 1, &[bytes_of(&request), b"new"].concat()).unwrap();
    let made: FileAttributes = pod_read_unaligned(&reply(&sandbox).1);
    assert_eq!((made.uid, made.gid), (PROGRAM.uid, PROGRAM.gid));
}

/// The process reads what its caller has passed on, and no more than that.
#[test]
fn nonsense_ends_it_and_the_sandbox() {
    let directory = directory();
    for (kind, body) in [(MSG_FS_STAT, &b"../secret"[..]), (9999, b""), (MSG_BIND, b"short")] {
        let (server, sandbox) = serving(&root(directory.path(), &HostPolicy::default()));
        server.pass_on(kind, 1, body).unwrap();
        assert_eq!(wait_for_end(&server), Violation::FilesUnserved, "kind {kind}");
        assert_eq!(message::receive(&sandbox, &mut [0; 64], None).unwrap().len, 0);
    }
}

/// A sandbox that asks and asks and does not read.
#[test]
fn what_waits_is_bounded() {
    let directory = directory();
    let (server, sandbox) = serving(&root(directory.path(), &HostPolicy::default()));
    for number in 0..100_000 {
        // The process itself is to find out, however much waits on the way to it.
        while server.pass_on(MSG_FS_STAT, number, b"file").is_err() {
            std::thread::sleep(Duration::from_millis(1));
        }
    }
    assert_eq!(wait_for_end(&server), Violation::RepliesUnread);
    drop(sandbox);
}

/// More bytes than its socket holds are written by a sandbox that does nothing wrong.
#[test]
fn a_moment_without_room_is_waited_for() {
    let writable = directory();
    let mut directories = Directories::new(None);
    let bound = BoundDirectory::open(writable.path(), BoundAccess::Write).unwrap();
    directories.bind(0, &bound, PROGRAM);
    let (server, sandbox) = serving(&directories);
    let request = BindRequest { operation: BIND_WRITE, ..BindRequest::zeroed() };
    let body = [bytes_of(&request), &[7; 64 * 1024]].concat();
    for sequence in 0..100 {
        server.pass_on(MSG_BIND, sequence, &body).unwrap();
    }
    // No such file is open; but each request has its answer.
    for _ in 0..100 {
        assert_eq!(reply(&sandbox).0, libc::EBADF);
    }
}

/// A process without a processor, or whose disk does not answer: whoever passes requests of
/// many sandboxes on goes on with those of the others.
#[test]
fn who_passes_requests_on_waits_for_no_process() {
    let (socket, slow) = message::control_pair().unwrap();
    rustix::io::ioctl_fionbio(&socket, true).unwrap();
    let (control, sandbox) = message::control_pair().unwrap();
    let server = FileProcess::new(socket, control);
    let request = |sequence: u64| [sequence as u8; 1024];
    for sequence in 0..BACKLOG_MAX as u64 {
        server.pass_on(MSG_FS_STAT, sequence, &request(sequence)).unwrap();
    }
    let directory = directory();
    let (other, of_other) = serving(&root(directory.path(), &HostPolicy::default()));
    assert_eq!(reply_after(&other, &of_other, b"file"), 0);
    // It reads them all, in their order, when it goes on.
    let mut buffer = [0; 2048];
    for sequence in 0..BACKLOG_MAX as u64 {
        let len = message::receive(&slow, &mut buffer, None).unwrap().len;
        let (header, body) = buffer[..len].split_at(size_of::<MessageHeader>());
        assert_eq!(pod_read_unaligned::<MessageHeader>(header).sequence, sequence);
        assert_eq!(body, request(sequence));
    }
    // What waits for it is bounded.
    let asked = (0..).take_while(|&number| server.pass_on(MSG_FS_STAT, number, &[0; 1024]).is_ok());
    let taken = asked.count();
    assert!((BACKLOG_MAX..2 * BACKLOG_MAX).contains(&taken), "{taken}");
    drop(server);
    drop(sandbox);
}

/// The sandbox would wait for ever.
#[test]
fn a_process_that_does_not_read_for_long_is_taken_for_ended() {
    let (socket, _slow) = message::control_pair().unwrap();
    rustix::io::ioctl_fionbio(&socket, true).unwrap();
    let (control, sandbox) = message::control_pair().unwrap();
    let server = FileProcess::new(socket, control);
    for sequence in 0..1000 {
        server.pass_on(MSG_FS_STAT, sequence, &[0; 1024]).unwrap();
    }
    assert_eq!(wait_for_end(&server), Violation::FilesUnserved);
    assert_eq!(message::receive(&sandbox, &mut [0; 64], None).unwrap().len, 0);
}

#[test]
fn a_process_that_cannot_take_its_rights_says_why() {
    let (socket, remote) = message::control_pair().unwrap();
    let mut child = spawn(remote).unwrap();
    message::send(&socket, &[IoSlice::new(b"no description")], &[]).unwrap();
    let mut answer = [0; 256];
    let len = message::receive(&socket, &mut answer, None).unwrap().len;
    let text = String::from_utf8_lossy(&answer[1..len]);
    assert!(answer[0] == 1 && text.starts_with("cannot hear what to serve"), "{text}");
    assert_eq!(child.wait().unwrap().code(), Some(1));
}
