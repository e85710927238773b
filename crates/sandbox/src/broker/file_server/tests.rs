//! Requests of a sandbox, over both of its sockets.

use super::*;
use crate::broker::volume::VolumeMount;
use crate::broker::{
    BoundAccess, ClosedVolume, FileNumbers, HostDirectory, OwnFiles, VolumeShare, VolumeUser,
};
use std::fs::{self, File};
use std::thread;
use thaw_abi::bind::{
    BIND_CLOSE, BIND_MKDIR, BIND_OPEN, BIND_STAT, BindRequest, OpenedVolumeFile, VOLUME_SOCKET,
};
use thaw_abi::control::{MSG_BIND, MSG_WAKE_SOCKET, MessageHeader, Reply};

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
    volume: Arc<Volume>,
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
        let own = OwnFiles {
            usage: own("usage"),
            users: own("users"),
            lengths: None,
            are_some_left: false,
        };
        let volume = Volume::open(&files, own, 1 << 20, numbers).unwrap();
        let volume = Arc::new(volume);
        let mount = VolumeMount {
            volume: volume.clone(),
            access: BoundAccess::Write,
            of_tenant: VolumeShare::whole(),
        };
        let user = VolumeUser::new(0);
        let directories = Directories::of_volumes([(MOUNT, &mount)].into_iter(), &user).unwrap();
        let (host, control) = message::control_pair().unwrap();
        let server = FileServer::start(directories, host).unwrap();
        Self { all, server, control, volume }
    }

    fn has(&self, name: &str) -> bool {
        self.all.path().join("files").join(name).exists()
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

fn create() -> BindRequest {
    BindRequest { b: 0o644, ..request(BIND_OPEN, 0o2 | 0o100 | 0o200) }
}

#[test]
fn a_sandbox_gets_one_socket_of_its_own() {
    let guest = Guest::new();
    let own = guest.own();
    assert_eq!(guest.ask(VOLUME_SOCKET, b"").0, libc::EBUSY, "it has one");
    assert!(send(&own, 5, &create(), b"file"));
    let (sequence, errno, tail, descriptor) = reply(&own).unwrap();
    assert_eq!((sequence, errno, descriptor.is_some()), (5, 0, true));
    let opened: OpenedVolumeFile = bytemuck::pod_read_unaligned(&tail);
    for (sequence, expected) in [(6, 0), (7, libc::EBADF)] {
        assert!(send(&own, sequence, &request(BIND_CLOSE, opened.handle), b""));
        let (answered, errno, ..) = reply(&own).unwrap();
        assert_eq!((answered, errno), (sequence, expected));
    }
    assert!(guest.has("file"));
    // The control socket serves as before.
    assert_eq!(guest.ask(BIND_MKDIR, b"directory").0, 0);
    // What is no volume gives no socket.
    let other = BindRequest { mount: MOUNT + 1, ..request(VOLUME_SOCKET, 0) };
    guest.server.submit(9, &Question::Bind(other, b"")).unwrap();
    assert_eq!(reply(&guest.control).unwrap().1, libc::ENODEV);
}

#[test]
fn who_reads_no_replies_has_one_with_a_descriptor_and_loses_the_socket() {
    let guest = Guest::new();
    let own = guest.own();
    assert_eq!(guest.ask(BIND_MKDIR, b"directory").0, 0);
    assert!(send(&own, 0, &create(), b"file"));
    let read = request(BIND_OPEN, 0);
    let is_ended = (1..100_000).any(|sequence| !send(&own, sequence, &read, b"file"));
    assert!(is_ended, "the host goes on");
    let (sequence, errno, _, descriptor) = reply(&own).unwrap();
    assert_eq!((sequence, errno, descriptor.is_some()), (0, 0, true));
    assert!(reply(&own).is_none(), "a second reply was sent");
    assert_eq!(guest.server.open_files_of(&guest.volume), 1);
}

#[test]
fn what_is_no_request_about_files_ends_the_socket() {
    let guest = Guest::new();
    let own = guest.own();
    let header = MessageHeader { kind: MSG_WAKE_SOCKET, len: 0, sequence: 1 };
    message::send(&own, &[IoSlice::new(bytemuck::bytes_of(&header))], &[]).unwrap();
    assert!(reply(&own).is_none());
    assert_eq!(guest.ask(BIND_MKDIR, b"directory").0, 0, "the control socket serves");

    for bad in [&[0; 3][..], &[0; 9000]] {
        let guest = Guest::new();
        let own = guest.own();
        message::send(&own, &[IoSlice::new(bad)], &[]).unwrap();
        assert!(reply(&own).is_none());
    }
}

/// What waits in the socket behind a request that takes too long is not served later, when the
/// sandbox has asked for it again.
#[test]
fn after_a_request_that_takes_too_long_the_control_socket_serves() {
    let guest = Guest::new();
    let own = guest.own();
    let soon = Instant::now() + Duration::from_secs(20);
    let closed = ClosedVolume::close(&guest.volume, soon).unwrap();
    assert!(send(&own, 4, &request(BIND_MKDIR, 0o755), b"slow"));
    let shared = &guest.server.shared;
    while shared.state().running.is_empty() {
        thread::yield_now();
    }
    assert!(send(&own, 5, &request(BIND_MKDIR, 0o755), b"behind"));
    let late = give_up(&mut shared.state(), Instant::now() + PATIENCE);
    assert_eq!(late, [Asked { socket: Socket::Own, sequence: 4 }]);
    shared.reply_late(late[0]);
    assert!(!send(&own, 6, &request(BIND_STAT, 0), b"none"), "nobody would serve it");
    let (sequence, errno, ..) = reply(&own).unwrap();
    assert_eq!((sequence, errno), (4, libc::ETIMEDOUT));
    assert!(reply(&own).is_none());
    drop(own);
    drop(closed);
    assert_eq!(guest.ask(BIND_MKDIR, b"again").0, 0);
    while !shared.state().running.is_empty() {
        thread::yield_now();
    }
    // The thread has looked at what is left when it has let go of what it shares.
    while Arc::strong_count(shared) > 3 {
        thread::yield_now();
    }
    assert!(guest.has("slow") && guest.has("again") && !guest.has("behind"));
}

#[test]
fn the_socket_ends_with_its_server() {
    let guest = Guest::new();
    let own = guest.own();
    drop(guest.server);
    assert!(reply(&own).is_none());
}
