//! A sandbox with the program `sleeper.c`, and its clients.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::AsFd;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use tempfile::TempDir;
use thaw_sandbox::{
    Awake, Deflated, Event, FreezeError, HibernateError, HibernateSpec, Kernel, Sandbox, SwapFile,
    Swapped, Timers, Unchanged, WorkingSet, ZygoteConfig, ZygoteParent, connection,
};

use super::{config, host_rootfs, start_with};

/// The port of the program.
pub const PORT: u16 = 8080;
/// For what comes sooner or later.
pub const LONG: Duration = Duration::from_secs(40);

/// A directory that holds the program and nothing else.
pub fn rootfs() -> &'static Path {
    static ROOTFS: OnceLock<TempDir> = OnceLock::new();
    ROOTFS
        .get_or_init(|| {
            let directory = tempfile::tempdir().unwrap();
            let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/common/sleeper.c");
            let status = Command::new("cc")
                .args(["-O1", "-static", "-pthread", "-o"])
                .arg(directory.path().join("sleeper"))
                .arg(source)
                .status()
                .expect("a C compiler is installed");
            assert!(status.success());
            directory
        })
        .path()
}

/// A running program.
pub struct Running {
    pub sandbox: Sandbox,
    connections: u64,
    pub rests: u64,
    pub timers: Timers,
    _parent: ZygoteParent,
}

/// A client of it.
pub struct Client(pub TcpStream);

impl Running {
    pub fn start(cpus: u32) -> Self {
        let config = ZygoteConfig { kernel: Kernel::embedded().unwrap(), ..config() };
        let parent = ZygoteParent::start(config).unwrap();
        let zygote = parent.create().unwrap();
        let mut sandbox = start_with(zygote, "/sleeper", "", host_rootfs(rootfs()), |spec| {
            (spec.port, spec.cpus) = (PORT, cpus);
        });
        let booted = sandbox.wait_event(Some(LONG)).unwrap();
        assert!(matches!(booted, Some(Event::Booted(_))), "{booted:?}");
        Self { sandbox, connections: 0, rests: 0, timers: Timers::Wait, _parent: parent }
    }

    /// Connects a client, whose end the sandbox gets as the gateway hands it in.
    pub fn connect(&mut self) -> Client {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        client.set_read_timeout(Some(LONG)).unwrap();
        let (socket, peer) = accept_from(&listener, &client);
        socket.set_nonblocking(true).unwrap();
        self.connections += 1;
        let about = connection(self.connections, peer, ([127, 0, 0, 1], PORT).into());
        self.sandbox.connector().send_connection(&about, socket.as_fd()).unwrap();
        Client(client)
    }

    /// The next event but those of the boot and of connections.
    pub fn next(&mut self) -> Event {
        loop {
            match self.sandbox.wait_event(Some(LONG)).unwrap().expect("an event") {
                Event::Booted(_) | Event::ConnectionClosed { .. } => {}
                event => return event,
            }
        }
    }

    /// Whether it says nothing for a while.
    pub fn is_quiet(&mut self) -> bool {
        self.sandbox.wait_event(Some(Duration::from_millis(100))).unwrap().is_none()
    }

    /// Has it come to rest, and writes its memory.
    pub fn deflate(
        &mut self,
        spec: HibernateSpec,
        swap: SwapFile,
        set: Option<&WorkingSet>,
    ) -> Result<Deflated, HibernateError> {
        self.rests += 1;
        self.sandbox.request_rest(self.rests, self.timers).unwrap();
        let event = self.next();
        let Event::Resting(resting) = event else { panic!("{event:?}") };
        assert_eq!(resting.number, self.rests);
        self.sandbox.hibernator(resting, spec).unwrap().write(swap, set)
    }

    /// Has it come to rest to be trimmed, and compares its memory.
    pub fn find_unchanged(&mut self, files: &[Arc<File>]) -> Unchanged {
        self.rests += 1;
        self.sandbox.request_rest_to_trim(self.rests).unwrap();
        let event = self.next();
        let Event::Resting(resting) = event else { panic!("{event:?}") };
        assert_eq!(resting.number, self.rests);
        self.sandbox.trimmer(resting, files.to_vec()).unwrap().find().unwrap()
    }

    /// A disk that is full: it is woken.
    #[track_caller]
    pub fn deflate_without_room(&mut self) {
        let full = SwapFile {
            write: File::options().read(true).write(true).open("/dev/full").unwrap(),
            read: File::open("/dev/full").unwrap(),
            gate: None,
        };
        let error = self.deflate(SPEC, full, None).unwrap_err();
        assert!(matches!(error, HibernateError::Write(FreezeError::Write(_))), "{error}");
        self.sandbox.wake().unwrap();
    }

    /// More memory than may be stored: it is woken.
    #[track_caller]
    pub fn deflate_over_the_limit(&mut self) {
        let little = HibernateSpec { max_stored: 1 << 20, base: None };
        let error = self.deflate(little, swap_file(), None).unwrap_err();
        assert!(matches!(error, HibernateError::Write(FreezeError::TooLarge { .. })), "{error}");
        self.sandbox.wake().unwrap();
    }

    pub fn hibernate_with(&mut self, spec: HibernateSpec, set: Option<&WorkingSet>) -> Swapped {
        let deflated = self.deflate(spec, swap_file(), set).unwrap();
        let swapped = self.sandbox.hibernate(deflated).unwrap();
        assert_eq!(self.next(), Event::Hibernated);
        swapped
    }

    pub fn hibernate(&mut self) -> Swapped {
        self.hibernate_with(SPEC, None)
    }

    pub fn awake(&mut self) -> Awake {
        let event = self.next();
        let Event::Awake(awake) = event else { panic!("{event:?}") };
        assert_eq!(awake.rest, self.rests);
        assert!(awake.woken_ns <= awake.ready_ns);
        awake
    }

    /// Has a request answered for which the sandbox needs its broker.
    pub fn serve(&mut self, client: &mut Client, command: &str) -> String {
        client.send(command);
        client.0.set_nonblocking(true).unwrap();
        let begun = Instant::now();
        let answer = loop {
            if let Some(answer) = client.receive() {
                break answer;
            }
            assert!(begun.elapsed() < LONG, "no answer to {command}");
            self.sandbox.wait_event(Some(Duration::from_millis(10))).unwrap();
        };
        client.0.set_nonblocking(false).unwrap();
        answer
    }

    /// Bytes of memory that are the sandbox' own: pages of no file, and page tables.
    pub fn own_memory(&self) -> u64 {
        memory_of(self.sandbox.pid())
    }

    /// The same of all host processes of the sandbox, with the file that holds what they share,
    /// and how many those are. Pages that two have from a fork count twice.
    pub fn family_memory(&self) -> (u64, usize) {
        let processes = self.host_processes();
        let own: u64 = processes.iter().map(|&pid| memory_of(pid)).sum();
        (own + self.arena_memory(), processes.len())
    }

    /// Bytes of the memory file that the host processes share.
    pub fn arena_memory(&self) -> u64 {
        let descriptors = fs::read_dir(format!("/proc/{}/fd", self.sandbox.pid())).unwrap();
        let descriptors = descriptors.map(|entry| entry.unwrap().path());
        let is_memory = |path: &PathBuf| {
            fs::read_link(path).unwrap().to_string_lossy().starts_with("/memfd:thaw-arena")
        };
        let files: BTreeMap<u64, u64> = descriptors
            .filter(is_memory)
            .map(|path| fs::metadata(path).unwrap())
            .map(|about| (about.ino(), about.blocks() * 512))
            .collect();
        assert!(files.len() < 2, "{files:?}");
        files.into_values().sum()
    }

    /// The first host process and its children, which all others are.
    pub fn host_processes(&self) -> Vec<u32> {
        let first = self.sandbox.pid();
        let children = fs::read_to_string(format!("/proc/{first}/task/{first}/children")).unwrap();
        let children = children.split_whitespace().map(|pid| pid.parse().unwrap());
        std::iter::once(first).chain(children).collect()
    }

    pub fn is_running(&self) -> bool {
        self.sandbox.try_wait().is_none()
    }
}

impl Drop for Running {
    /// Who sees a test fail wants to know whether the sandbox has.
    fn drop(&mut self) {
        if std::thread::panicking() {
            let event = self.sandbox.wait_event(Some(Duration::from_secs(1)));
            eprintln!("next of the sandbox: {event:?}, its end: {:?}", self.sandbox.try_wait());
        }
    }
}

pub fn memory_of(pid: u32) -> u64 {
    let field = |file: &str, name: &str| -> u64 {
        let text = fs::read_to_string(format!("/proc/{pid}/{file}")).unwrap();
        let line = text.lines().find(|line| line.starts_with(name)).unwrap().to_owned();
        line.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap() * 1024
    };
    field("smaps_rollup", "Anonymous:") + field("status", "VmPTE:")
}

impl Client {
    #[track_caller]
    pub fn ask(&mut self, command: &str) -> String {
        self.send(command);
        self.try_receive().unwrap_or_else(|error| panic!("no answer to {command}: {error}"))
    }

    pub fn send(&mut self, command: &str) {
        self.0.write_all(format!("{command}\n").as_bytes()).unwrap();
    }

    pub fn receive(&mut self) -> Option<String> {
        self.try_receive().ok()
    }

    fn try_receive(&mut self) -> io::Result<String> {
        let mut answer = [0; 256];
        loop {
            match self.0.read(&mut answer) {
                // A read with a time-out ends so when its thread was frozen or stopped (signal(7)).
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
                Ok(len) => return Ok(String::from_utf8_lossy(&answer[..len]).trim().to_owned()),
            }
        }
    }
}

pub const SPEC: HibernateSpec = HibernateSpec { max_stored: 1 << 30, base: None };

/// The other end of a client's connection. The port was somebody else's a moment ago: whoever still
/// tries to reach him may come first, and is let go.
pub fn accept_from(listener: &TcpListener, client: &TcpStream) -> (TcpStream, SocketAddr) {
    let own = client.local_addr().unwrap();
    loop {
        let (socket, peer) = listener.accept().unwrap();
        if peer == own {
            return (socket, peer);
        }
    }
}

/// A swap file without a name.
pub fn swap_file() -> SwapFile {
    swap_file_in(&std::env::temp_dir())
}

pub fn swap_file_in(directory: &Path) -> SwapFile {
    let write = File::options()
        .read(true)
        .write(true)
        .mode(0o600)
        .custom_flags(libc::O_TMPFILE)
        .open(directory)
        .unwrap();
    let read = reopened(&write);
    SwapFile { write, read, gate: None }
}

pub fn reopened(file: &File) -> File {
    let number = std::os::fd::AsRawFd::as_raw_fd(file);
    File::open(format!("/proc/self/fd/{number}")).unwrap()
}
