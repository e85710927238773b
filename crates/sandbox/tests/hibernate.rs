//! Hibernating in place, with the real kernel and a real program (`common/sleeper.c`).

mod common;

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::fd::AsFd;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use common::{config, host_rootfs, start_with};
use tempfile::TempDir;
use thaw_sandbox::{
    Awake, AwakeCause, Deflated, Event, FreezeError, HibernateError, HibernateSpec, Kernel,
    Sandbox, SwapFile, Swapped, Timers, WorkingSet, ZygoteConfig, ZygoteParent, connection,
};

/// The port of the program.
const PORT: u16 = 8080;
/// For what comes sooner or later.
const LONG: Duration = Duration::from_secs(20);

/// A directory that holds the program and nothing else.
fn rootfs() -> &'static Path {
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
struct Running {
    sandbox: Sandbox,
    connections: u64,
    rests: u64,
    timers: Timers,
    _parent: ZygoteParent,
}

/// A client of it.
struct Client(TcpStream);

impl Running {
    fn start(cpus: u32) -> Self {
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
    fn connect(&mut self) -> Client {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        client.set_read_timeout(Some(LONG)).unwrap();
        let (socket, peer) = listener.accept().unwrap();
        socket.set_nonblocking(true).unwrap();
        self.connections += 1;
        let about = connection(self.connections, peer, ([127, 0, 0, 1], PORT).into());
        self.sandbox.connector().send_connection(&about, socket.as_fd()).unwrap();
        Client(client)
    }

    /// The next event but those of the boot and of connections.
    fn next(&mut self) -> Event {
        loop {
            match self.sandbox.wait_event(Some(LONG)).unwrap().expect("an event") {
                Event::Booted(_) | Event::ConnectionClosed { .. } => {}
                event => return event,
            }
        }
    }

    /// Whether it says nothing for a while.
    fn is_quiet(&mut self) -> bool {
        self.sandbox.wait_event(Some(Duration::from_millis(100))).unwrap().is_none()
    }

    /// Has it come to rest, and writes its memory.
    fn deflate(
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

    fn hibernate_with(&mut self, spec: HibernateSpec, set: Option<&WorkingSet>) -> Swapped {
        let deflated = self.deflate(spec, swap_file(), set).unwrap();
        let swapped = self.sandbox.hibernate(deflated).unwrap();
        assert_eq!(self.next(), Event::Hibernated);
        swapped
    }

    fn hibernate(&mut self) -> Swapped {
        self.hibernate_with(SPEC, None)
    }

    fn awake(&mut self) -> Awake {
        let event = self.next();
        let Event::Awake(awake) = event else { panic!("{event:?}") };
        assert_eq!(awake.rest, self.rests);
        assert!(awake.woken_ns <= awake.ready_ns);
        awake
    }

    /// Has a request answered for which the sandbox needs its broker.
    fn serve(&mut self, client: &mut Client, command: &str) -> String {
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
    fn own_memory(&self) -> u64 {
        memory_of(self.sandbox.pid())
    }

    /// The same of all host processes of the sandbox, with the file that holds what they share,
    /// and how many those are. Pages that two have from a fork count twice.
    fn family_memory(&self) -> (u64, usize) {
        let processes = self.host_processes();
        let own: u64 = processes.iter().map(|&pid| memory_of(pid)).sum();
        (own + self.arena_memory(), processes.len())
    }

    /// Bytes of the memory file that the host processes share.
    fn arena_memory(&self) -> u64 {
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
    fn host_processes(&self) -> Vec<u32> {
        let first = self.sandbox.pid();
        let children = fs::read_to_string(format!("/proc/{first}/task/{first}/children")).unwrap();
        let children = children.split_whitespace().map(|pid| pid.parse().unwrap());
        std::iter::once(first).chain(children).collect()
    }

    fn is_running(&self) -> bool {
        self.sandbox.try_wait().is_none()
    }
}

fn memory_of(pid: u32) -> u64 {
    let field = |file: &str, name: &str| -> u64 {
        let text = fs::read_to_string(format!("/proc/{pid}/{file}")).unwrap();
        let line = text.lines().find(|line| line.starts_with(name)).unwrap().to_owned();
        line.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap() * 1024
    };
    field("smaps_rollup", "Anonymous:") + field("status", "VmPTE:")
}

impl Client {
    #[track_caller]
    fn ask(&mut self, command: &str) -> String {
        self.send(command);
        self.receive().expect("an answer")
    }

    fn send(&mut self, command: &str) {
        self.0.write_all(format!("{command}\n").as_bytes()).unwrap();
    }

    fn receive(&mut self) -> Option<String> {
        let mut answer = [0; 256];
        let len = self.0.read(&mut answer).ok()?;
        Some(String::from_utf8_lossy(&answer[..len]).trim().to_owned())
    }
}

const SPEC: HibernateSpec = HibernateSpec { max_stored: 1 << 30, base: None };

/// A swap file without a name.
fn swap_file() -> SwapFile {
    swap_file_in(&std::env::temp_dir())
}

fn swap_file_in(directory: &Path) -> SwapFile {
    let write = File::options()
        .read(true)
        .write(true)
        .mode(0o600)
        .custom_flags(libc::O_TMPFILE)
        .open(directory)
        .unwrap();
    let read = reopened(&write);
    SwapFile { write, read }
}

fn reopened(file: &File) -> File {
    let number = std::os::fd::AsRawFd::as_raw_fd(file);
    File::open(format!("/proc/self/fd/{number}")).unwrap()
}

#[test]
fn a_server_keeps_its_state_over_hibernations_and_is_woken_by_a_client() {
    let mut running = Running::start(1);
    let mut idle = running.connect();
    let mut expected = idle.ask("sum");
    assert_eq!(idle.ask("thread"), "1 3.0");
    let before = running.own_memory();
    assert!(before > 24 << 20, "{before}");
    for round in 1..=3 {
        assert_eq!(idle.ask("count"), format!("{round} {round}"));
        running.hibernate();
        // A connection that it has open wakes it.
        assert_eq!(idle.ask("sum"), expected, "round {round}");
        let awake = running.awake();
        assert_eq!((awake.cause, awake.was_hibernated), (AwakeCause::Connection, true));
        assert_eq!(idle.ask("thread"), format!("{} {:.1}", round + 1, 1.5 * f64::from(2 << round)));
        // What it changes since is in the next file.
        assert_eq!(idle.ask("write"), "written");
        let changed = idle.ask("sum");
        assert_ne!(changed, expected);
        expected = changed;
        // And it takes new connections while it sleeps.
        running.hibernate();
        let mut other = running.connect();
        assert_eq!(other.ask("sum"), expected);
        assert_eq!(running.awake().cause, AwakeCause::Message);
    }
}

#[test]
fn a_hibernated_server_has_given_back_its_memory_and_a_woken_one_what_it_does_not_need() {
    let mut running = Running::start(1);
    let mut client = running.connect();
    client.ask("sum");
    let warm = running.own_memory();
    running.hibernate();
    let hibernated = running.own_memory();
    assert!(hibernated < 300 << 10 && hibernated < warm / 20, "{hibernated} of {warm}");
    assert_eq!(client.ask("count"), "1 1");
    running.awake();
    let woken = running.own_memory();
    assert!(woken < warm / 5, "{woken} of {warm}");
    // As little as the first time.
    running.hibernate();
    let again = running.own_memory();
    assert!(again < hibernated + (64 << 10), "{again}, {hibernated} before");
}

#[test]
fn several_virtual_cpus_rest_together() {
    let mut running = Running::start(4);
    let mut client = running.connect();
    let expected = client.ask("sum");
    for round in 1..=5 {
        for _ in 0..20 {
            client.ask("thread");
        }
        running.hibernate();
        assert_eq!(client.ask("sum"), expected, "round {round}");
        running.awake();
    }
}

#[test]
fn recorded_pages_come_back_at_once() {
    let mut running = Running::start(1);
    let mut client = running.connect();
    let expected = client.ask("sum");
    running.hibernate();
    assert_eq!(client.ask("write"), "written");
    running.awake();
    let swapped = running.hibernate();
    assert_eq!(swapped.populated, 0);
    client.ask("write");
    running.awake();
    let set = WorkingSet::recorder(&running.sandbox).unwrap().record_swap(&swapped).unwrap();
    let (_, written) = set.pages();
    assert!((768..2000).contains(&written), "{written}");
    let swapped = running.hibernate_with(SPEC, Some(&set));
    assert!(swapped.populated > 0);
    // They are there before anything runs.
    running.sandbox.wake().unwrap();
    let awake = running.awake();
    assert_eq!((awake.cause, awake.was_hibernated), (AwakeCause::Message, true));
    assert!(running.own_memory() > 768 * 4096);
    assert_ne!(client.ask("sum"), expected);
    assert_eq!(client.ask("count"), "1 1");
}

#[test]
fn a_timer_wakes_only_who_wants_it_and_time_goes_on() {
    let mut running = Running::start(1);
    let mut client = running.connect();
    let clock = |client: &mut Client| client.ask("clock").parse::<u64>().unwrap();
    assert_eq!(client.ask("fired"), "-1");
    let before = clock(&mut client);
    client.ask("timer");
    running.hibernate();
    std::thread::sleep(Duration::from_millis(500));
    assert!(running.is_quiet());
    // It expires on waking; the program sees the time that has passed.
    assert!(clock(&mut client) >= before + 500);
    assert_eq!(running.awake().cause, AwakeCause::Connection);
    assert!(client.ask("fired").parse::<u64>().unwrap() < 10_000);
    client.ask("timer");
    running.timers = Timers::Wake;
    running.hibernate();
    assert_eq!(running.awake().cause, AwakeCause::Timer);
    assert_ne!(client.ask("fired"), "-1");
}

#[test]
fn a_request_during_the_writing_is_answered_at_once() {
    let mut running = Running::start(1);
    let mut client = running.connect();
    let expected = client.ask("sum");
    let deflated = running.deflate(SPEC, swap_file(), None).unwrap();
    assert_eq!(client.ask("count"), "1 1");
    let awake = running.awake();
    assert_eq!((awake.cause, awake.was_hibernated), (AwakeCause::Connection, false));
    // The file is out of date: the sandbox does not take it.
    running.sandbox.hibernate(deflated).unwrap();
    assert_eq!(client.ask("count"), "2 2");
    assert_eq!(client.ask("sum"), expected);
    running.hibernate();
    assert_eq!(client.ask("count"), "3 3");
}

#[test]
fn who_has_had_a_child_hibernates_too() {
    let mut running = Running::start(1);
    let mut client = running.connect();
    assert_eq!(running.serve(&mut client, "fork"), "forked");
    let sums = client.ask("sum");
    for round in 1..=3 {
        let warm = running.own_memory();
        running.hibernate();
        assert!(running.own_memory() < 600 << 10, "{} of {warm}", running.own_memory());
        assert_eq!(client.ask("count"), format!("{round} {round}"));
        assert!(running.awake().was_hibernated);
        assert_eq!(client.ask("sum"), sums);
    }
}

/// Each process has its own memory again, and they share what they did.
#[test]
fn several_processes_hibernate_together() {
    for cpus in [1, 2] {
        let mut running = Running::start(cpus);
        let mut client = running.connect();
        assert_eq!(running.serve(&mut client, "workers"), "hired");
        let all = ["sum", "1 sum", "2 sum"];
        client.ask("share");
        client.ask("1 write");
        let sums = all.map(|command| client.ask(command));
        let (warm, _) = running.family_memory();
        for round in 1..=4 {
            running.hibernate();
            let (left, processes) = running.family_memory();
            assert_eq!(processes, 3);
            assert!(left * 100 < warm * 7, "{left} of {warm}");
            assert_eq!(client.ask("1 count"), format!("{round} {}", 100 + round));
            assert!(running.awake().was_hibernated);
            if round % 2 == 0 {
                // In the others nobody has looked at anything since.
                running.hibernate();
                assert_eq!(
                    client.ask("thread"),
                    format!("{} {:.1}", round / 2, 1.5 * f64::from(2 << (round / 2 - 1)))
                );
                assert!(running.awake().was_hibernated);
            }
            assert_eq!(all.map(|command| client.ask(command)), sums);
        }
        assert_eq!(client.ask("2 share"), "shared");
        let after = all.map(|command| client.ask(command));
        let part = |sums: &str, number: usize| sums.split(' ').nth(number).map(str::to_owned);
        for (before, after) in sums.iter().zip(&after) {
            // The heap is each one's own; shared memory and the file are not.
            assert_eq!(part(before, 0), part(after, 0));
            assert_ne!(part(before, 1), part(after, 1));
            assert_ne!(part(before, 3), part(after, 3));
            assert_eq!(part(after, 1), part(&client.ask("sum"), 1));
        }
        // One more, and one less.
        assert_eq!(client.ask("1 write"), "written");
        assert_eq!(running.serve(&mut client, "fork"), "forked");
        assert_eq!(client.ask("2 end"), "none");
        let sums = ["sum", "1 sum"].map(|command| client.ask(command));
        running.hibernate();
        assert_eq!(["sum", "1 sum"].map(|command| client.ask(command)), sums);
    }
}

#[test]
fn a_full_disk_leaves_it_as_it_was() {
    let mut running = Running::start(1);
    let mut client = running.connect();
    let expected = client.ask("sum");
    let full = SwapFile {
        write: File::options().read(true).write(true).open("/dev/full").unwrap(),
        read: File::open("/dev/full").unwrap(),
    };
    let error = running.deflate(SPEC, full, None).unwrap_err();
    assert!(matches!(error, HibernateError::Write(FreezeError::Write(_))), "{error}");
    running.sandbox.wake().unwrap();
    assert!(!running.awake().was_hibernated);
    assert_eq!(client.ask("sum"), expected);

    let little = HibernateSpec { max_stored: 1 << 20, base: None };
    let error = running.deflate(little, swap_file(), None).unwrap_err();
    assert!(matches!(error, HibernateError::Write(FreezeError::TooLarge { .. })), "{error}");
    running.sandbox.wake().unwrap();
    running.awake();
    assert_eq!(client.ask("sum"), expected);
}

/// Where there were zeros when it was hibernated, there is memory now that nobody has touched
/// since it came from the swap file.
#[test]
fn memory_that_was_moved_between_two_hibernations_is_kept() {
    let mut running = Running::start(1);
    let mut client = running.connect();
    let expected = client.ask("moved");
    running.hibernate();
    assert_eq!(client.ask("move"), "here");
    running.awake();
    running.hibernate();
    assert_eq!(client.ask("moved"), expected);
    running.awake();
}

/// It says that it is awake when it has answered, and when that was.
#[test]
fn it_says_when_it_has_answered() {
    let mut running = Running::start(1);
    let mut client = running.connect();
    client.ask("count");
    running.hibernate();
    client.ask("count");
    let awake = running.awake();
    assert!(awake.answered_ns.is_some_and(|at| at >= awake.ready_ns), "{awake:?}");
    running.hibernate();
    running.sandbox.wake().unwrap();
    let awake = running.awake();
    assert_eq!((awake.answered_ns, awake.was_hibernated), (None, true));
}

#[test]
fn a_truncated_swap_file_ends_it_with_a_reason() {
    for len in [0, 4096, 1 << 20] {
        let mut running = Running::start(1);
        let mut client = running.connect();
        client.ask("sum");
        let swap = swap_file();
        let own = swap.write.try_clone().unwrap();
        let deflated = running.deflate(SPEC, swap, None).unwrap();
        running.sandbox.hibernate(deflated).unwrap();
        assert_eq!(running.next(), Event::Hibernated);
        own.set_len(len).unwrap();
        running.sandbox.wake().unwrap();
        let event = running.next();
        let Event::Failed(reason) = event else { panic!("{event:?}") };
        assert!(reason.contains("its swap file cannot be read (EIO)"), "{reason}");
        assert_eq!(running.next(), Event::Hangup);
    }
}

#[test]
fn it_can_be_killed_while_it_is_hibernated() {
    let mut running = Running::start(2);
    let mut client = running.connect();
    client.ask("thread");
    running.hibernate();
    assert!(running.is_running());
    running.sandbox.kill().unwrap();
    assert_eq!(running.next(), Event::Hangup);
    let ended = Instant::now();
    running.sandbox.wait();
    assert!(ended.elapsed() < LONG);
    let mut answer = [0];
    assert_eq!(client.0.read(&mut answer).unwrap_or(0), 0);
}

#[test]
fn a_doorbell_does_not_wake_it() {
    let mut running = Running::start(2);
    let mut client = running.connect();
    client.ask("thread");
    running.hibernate();
    for _ in 0..50 {
        // As the daemon does when a message seems to lie unread.
        Command::new("kill").args(["-USR1", &running.sandbox.pid().to_string()]).status().unwrap();
    }
    assert!(running.is_quiet());
    assert_eq!(client.ask("count"), "1 1");
    assert_eq!(running.awake().cause, AwakeCause::Connection);
}
