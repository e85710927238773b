//! Requests of a sandbox, over both of its sockets.

use super::*;
use crate::broker::volume::VolumeMount;
use crate::broker::{BoundAccess, FileNumbers, HostDirectory, VolumeShare};
use std::fs::{self, File};
use thaw_abi::bind::{
    BIND_CLOSE, BIND_MKDIR, BIND_OPEN, BIND_STAT, BindRequest, OpenedVolumeFile, VOLUME_SOCKET,
};
use thaw_abi::control::{MSG_BIND, MSG_FS_STAT, MessageHeader, Reply};

#[test]
fn late_requests_are_given_up_once() {
    let now = Instant::now();
    let mut state = State::default();
    let control = |sequence| Asked { socket: Socket::Control, sequence };
    let own = |sequence| Asked { socket: Socket::Own, sequence };
    let running = |request, since| Running { request, since, given_up: false };
    state.running.insert(1, running(own(11), now));
    state.running.insert(2, running(control(12), now + PATIENCE / 2));
    for (sequence, since) in [(13, now), (14, now + PATIENCE / 2)] {
        let question = FileQuestion::Stat(Vec::new());
        state.queue.push_back(Job { sequence, question, since });
    }
    assert_eq!(give_up(&mut state, now + PATIENCE), [own(11), control(13)]);
    assert!(give_up(&mut state, now + PATIENCE).is_empty());
    assert_eq!(state.queue.len(), 1);
}

#[test]
fn answers_come_over_the_control_socket_and_the_queue_has_an_end() {
    let root = HostDirectory::open("/".as_ref()).unwrap();
    let (host, sandbox) = message::control_pair().unwrap();
    rustix::io::ioctl_fionbio(&host, true).unwrap();
    let directories = Directories::new(Some(Arc::new(root)));
    let server = FileServer::start(directories, host).unwrap();
    assert!(server.submit(7, &Question::Stat(b"etc")).unwrap());
    assert!(!server.submit(8, &Question::MemoryFile).unwrap());
    let mut buffer = [0; 1024];
    let packet = message::receive(&sandbox, &mut buffer, None).unwrap();
    let header: thaw_abi::control::MessageHeader = bytemuck::pod_read_unaligned(&buffer[..16]);
    assert_eq!((header.sequence, packet.len > 24), (7, true));
    // Nobody reads the replies: what waits is bounded.
    let fits = (0..100_000).take_while(|&n| server.submit(n, &Question::Stat(b"")).is_ok());
    let fits = fits.count();
    assert!((QUEUE_MAX..50_000).contains(&fits), "{fits}");
}

/// The number under which the volume is mounted.
const MOUNT: u32 = 3;

/// A sandbox that has a volume, as its kernel sees it.
struct Guest {
    all: tempfile::TempDir,
    server: FileServer,
    control: OwnedFd,
}

impl Guest {
    fn new() -> Self {
        let all = tempfile::tempdir().unwrap();
        let files = all.path().join("files");
        fs::create_dir(&files).unwrap();
        let own = |name: &str| {
            let mut options = File::options();
            options.read(true).write(true).create(true).truncate(false);
            options.open(all.path().join(name)).unwrap()
        };
        let numbers = FileNumbers::default();
        let volume = Volume::open(&files, own("usage"), own("users"), 1 << 20, numbers).unwrap();
        let mount = VolumeMount {
            volume: Arc::new(volume),
            access: BoundAccess::Write,
            of_tenant: VolumeShare::whole(),
        };
        let directories = Directories::of_volumes([(MOUNT, &mount)].into_iter());
        let (host, control) = message::control_pair().unwrap();
        let server = FileServer::start(directories, host).unwrap();
        Self { all, server, control }
    }

    /// Asks over the control socket.
    fn ask(&self, operation: u32, tail: &[u8]) -> (i32, Option<OwnedFd>) {
        self.server.submit(1, &Question::Bind(request(operation, 0), tail)).unwrap();
        let (_, errno, _, descriptor) = reply(&self.control).unwrap();
        (errno, descriptor)
    }

    /// Its own socket.
    fn own(&self) -> OwnedFd {
        let (errno, descriptor) = self.ask(VOLUME_SOCKET, b"");
        assert_eq!(errno, 0);
        descriptor.unwrap()
    }
}

fn request(operation: u32, a: u64) -> BindRequest {
    BindRequest { mount: MOUNT, operation, a, b: 0, c: 0 }
}

/// Sends a request; whether anybody can read it.
fn send(socket: &OwnedFd, sequence: u64, request: &BindRequest, tail: &[u8]) -> bool {
    let body = [bytemuck::bytes_of(request), tail].concat();
    let header = MessageHeader { kind: MSG_BIND, len: body.len() as u32, sequence };
    let parts = [IoSlice::new(bytemuck::bytes_of(&header)), IoSlice::new(&body)];
    message::send(socket, &parts, &[]).is_ok()
}

/// The next reply: which request it answers, the error, what follows it, and a descriptor; none if
/// the socket has ended.
fn reply(socket: &OwnedFd) -> Option<(u64, i32, Vec<u8>, Option<OwnedFd>)> {
    let (mut buffer, mut descriptors) = ([0; 4096], Vec::new());
    let len = message::receive(socket, &mut buffer, Some(&mut descriptors)).ok()?.len;
    let (head, tail) = buffer[..len].split_at_checked(24)?;
    let header: MessageHeader = bytemuck::pod_read_unaligned(&head[..16]);
    let answer: Reply = bytemuck::pod_read_unaligned(&head[16..]);
    Some((header.sequence, answer.errno, tail.to_vec(), descriptors.pop()))
}

#[test]
fn a_sandbox_gets_one_socket_of_its_own_on_which_nothing_answers_a_close() {
    let guest = Guest::new();
    let own = guest.own();
    assert_eq!(guest.ask(VOLUME_SOCKET, b"").0, libc::EBUSY, "it has one");
    let mut create = request(BIND_OPEN, 0o2 | 0o100 | 0o200);
    create.b = 0o644;
    assert!(send(&own, 5, &create, b"file"));
    let (sequence, errno, tail, descriptor) = reply(&own).unwrap();
    assert_eq!((sequence, errno, descriptor.is_some()), (5, 0, true));
    let opened: OpenedVolumeFile = bytemuck::pod_read_unaligned(&tail);
    // Twice: the second time it is not open any more.
    assert!(send(&own, 6, &request(BIND_CLOSE, opened.handle), b""));
    assert!(send(&own, 7, &request(BIND_CLOSE, opened.handle), b""));
    assert!(send(&own, 8, &request(BIND_STAT, 0), b"none"));
    let (sequence, errno, ..) = reply(&own).unwrap();
    assert_eq!((sequence, errno), (8, libc::ENOENT));
    assert!(guest.all.path().join("files/file").exists());
    // The control socket serves as before.
    assert_eq!(guest.ask(BIND_MKDIR, b"directory").0, 0);
    // What is no volume gives no socket.
    let other = BindRequest { mount: MOUNT + 1, ..request(VOLUME_SOCKET, 0) };
    guest.server.submit(9, &Question::Bind(other, b"")).unwrap();
    assert_eq!(reply(&guest.control).unwrap().1, libc::ENODEV);
}

#[test]
fn who_does_not_read_replies_or_asks_for_something_else_loses_the_socket() {
    let guest = Guest::new();
    let own = guest.own();
    // Two requests at once: the first reply may be read when the second is looked at, so there are
    // as many as it takes.
    let is_ended = (0..100_000).any(|n| !send(&own, n, &request(BIND_STAT, 0), b"none"));
    assert!(is_ended, "replies pile up");

    let guest = Guest::new();
    let own = guest.own();
    let header = MessageHeader { kind: MSG_FS_STAT, len: 3, sequence: 1 };
    let parts = [IoSlice::new(bytemuck::bytes_of(&header)), IoSlice::new(b"etc")];
    message::send(&own, &parts, &[]).unwrap();
    assert!(reply(&own).is_none());
    assert_eq!(guest.ask(BIND_MKDIR, b"directory").0, 0, "the control socket serves");

    for bad in [&[0; 3][..], &[0; 9000]] {
        let guest = Guest::new();
        let own = guest.own();
        message::send(&own, &[IoSlice::new(bad)], &[]).unwrap();
        assert!(reply(&own).is_none());
    }
}

#[test]
fn after_a_request_that_takes_too_long_the_control_socket_serves() {
    let guest = Guest::new();
    let own = guest.own();
    guest.server.shared.reply_late(Asked { socket: Socket::Own, sequence: 4 });
    let (sequence, errno, ..) = reply(&own).unwrap();
    assert_eq!((sequence, errno), (4, libc::ETIMEDOUT));
    assert!(reply(&own).is_none());
    assert!(!send(&own, 5, &request(BIND_STAT, 0), b"none"));
    assert_eq!(guest.ask(BIND_MKDIR, b"directory").0, 0);
}

#[test]
fn the_socket_ends_with_its_server() {
    let guest = Guest::new();
    let own = guest.own();
    drop(guest.server);
    assert!(reply(&own).is_none());
}
