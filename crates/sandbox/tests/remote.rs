//! Processes and files inside a sandbox that runs, with the real kernel and the host's files.

mod common;

use std::io::{Read, Write};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, mpsc};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use common::host_rootfs;
use thaw_abi::control::{FLAG_INIT, WindowSize};
use thaw_abi::remote::*;
use thaw_sandbox::{
    Connector, Console, ConsoleOutput, ConsoleRate, Event, ExecSpec, GuestExit, Kernel,
    RemoteEvent, RemoteMessage, Sandbox, SignalTo, StartSpec, WeakLimits, ZygoteConfig,
    ZygoteParent,
};

/// A sandbox without a program over the host's files. A thread serves its requests.
struct Box {
    connector: Connector,
    events: mpsc::Receiver<RemoteEvent>,
    ends: Arc<AtomicBool>,
    server: Option<JoinHandle<()>>,
}

/// How long anything may take.
const PATIENCE: Duration = Duration::from_secs(60);

impl Drop for Box {
    fn drop(&mut self) {
        self.ends.store(true, Ordering::Relaxed);
        self.server.take().unwrap().join().unwrap();
    }
}

/// Serves a sandbox until the test ends.
fn serve(mut sandbox: Sandbox, events: &mpsc::Sender<RemoteEvent>, ends: &AtomicBool) {
    while !ends.load(Ordering::Relaxed) {
        match sandbox.wait_event(Some(Duration::from_millis(5))).unwrap() {
            Some(Event::Remote(event)) => drop(events.send(event)),
            Some(Event::Booted(_)) | None => {}
            Some(event) => panic!("{event:?}"),
        }
    }
}

fn start() -> Box {
    start_with(|_| {})
}

fn start_with(change: impl FnOnce(&mut StartSpec<'_>)) -> Box {
    let kernel = Kernel::embedded().unwrap();
    let console = Console::lines(ConsoleRate::Lossless, |output| {
        if let ConsoleOutput::Line { text, .. } = output {
            eprintln!("{text}");
        }
    });
    let console = console.unwrap();
    let config =
        ZygoteConfig { weak_limits: WeakLimits::Accept, ..ZygoteConfig::new(kernel, console) };
    let parent = ZygoteParent::start(config).unwrap();
    let stderr = std::io::stderr();
    let mut spec = StartSpec {
        program: None,
        argv: Vec::new(),
        env: vec!["PATH=/usr/bin:/bin".into(), "KEPT=1".into()],
        cwd: "/tmp".into(),
        hostname: "box".into(),
        uid: 0,
        gid: 0,
        port: 0,
        entry_signal: 0,
        cpus: 2,
        memory_limit: 0,
        process_limit: 0,
        cpu_time_limit: None,
        flags: FLAG_INIT,
        rootfs: host_rootfs("/".as_ref()),
        egress: Arc::default(),
        mounts: Vec::new(),
        stdio: [stderr.as_fd(); 3],
        window: None,
    };
    change(&mut spec);
    let zygote = parent.create().unwrap();
    let sandbox = zygote.start(&spec).unwrap();
    let (connector, (sender, events)) = (sandbox.connector(), mpsc::channel());
    let ends = Arc::new(AtomicBool::new(false));
    let told = ends.clone();
    let server = thread::spawn(move || {
        serve(sandbox, &sender, &told);
        drop(parent);
    });
    Box { connector, events, ends, server: Some(server) }
}

fn spec(argv: &[&str]) -> ExecSpec {
    ExecSpec { argv: argv.iter().map(|&text| text.to_owned()).collect(), ..ExecSpec::default() }
}

/// The host's ends of a process' streams.
struct Streams(Vec<UnixStream>);

impl Streams {
    fn write(&mut self, text: &str) {
        self.0[0].write_all(text.as_bytes()).unwrap();
    }

    fn read(&mut self, text: &str) {
        let output = self.0.len() / 2;
        let mut bytes = vec![0; text.len()];
        self.0[output].read_exact(&mut bytes).unwrap();
        assert_eq!(String::from_utf8_lossy(&bytes), text);
    }

    fn all(&mut self, number: usize) -> String {
        let mut bytes = Vec::new();
        self.0[number].read_to_end(&mut bytes).unwrap();
        String::from_utf8_lossy(&bytes).into_owned()
    }
}

impl Box {
    fn exec(&mut self, id: u64, spec: &ExecSpec) -> Streams {
        let count = if spec.terminal.is_some() { 1 } else { 3 };
        self.send(RemoteMessage::exec(id, spec).unwrap(), count)
    }

    /// The host has gone, and another one has the process go on, with so many sockets.
    fn go_on(&mut self, earlier: u64, id: u64, count: usize) -> Streams {
        self.send(RemoteMessage::exec_goes_on(earlier, id), count)
    }

    /// Another host follows.
    fn wait_for_next(&mut self) {
        self.say(RemoteMessage::execs_wait());
        assert_eq!(self.heard(), RemoteEvent::Waiting);
    }

    fn say(&mut self, message: RemoteMessage) {
        self.connector.send_remote(message, &[]).unwrap();
    }

    fn send(&mut self, message: RemoteMessage, count: usize) -> Streams {
        let pairs: Vec<_> = (0..count).map(|_| UnixStream::pair().unwrap()).collect();
        let theirs: Vec<_> = pairs.iter().map(|(_, theirs)| theirs.as_fd()).collect();
        self.connector.send_remote(message, &theirs).unwrap();
        let ours = pairs.into_iter().map(|(ours, _)| ours);
        Streams(ours.inspect(|ours| ours.set_read_timeout(Some(PATIENCE)).unwrap()).collect())
    }

    fn heard(&mut self) -> RemoteEvent {
        self.events.recv_timeout(PATIENCE).expect("the sandbox says something")
    }

    fn started(&mut self) -> u32 {
        match self.heard() {
            RemoteEvent::Started { pid, .. } => pid,
            event => panic!("{event:?}"),
        }
    }

    fn ended(&mut self) -> (u64, GuestExit) {
        match self.heard() {
            RemoteEvent::Ended { id, exit } => (id, exit),
            event => panic!("{event:?}"),
        }
    }

    /// Runs a program to its end: exit, output and error output.
    fn run(&mut self, spec: &ExecSpec) -> (GuestExit, String, String) {
        let mut streams = self.exec(1, spec);
        self.started();
        let (_, exit) = self.ended();
        (exit, streams.all(1), streams.all(2))
    }

    fn files(&mut self, user: &str) -> Session {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let message = RemoteMessage::files(user).unwrap();
        self.connector.send_remote(message, &[theirs.as_fd()]).unwrap();
        drop(theirs);
        ours.set_read_timeout(Some(PATIENCE)).unwrap();
        Session(ours)
    }
}

/// A session over files.
struct Session(UnixStream);

impl Session {
    fn answer(&mut self) -> Result<(FileAnswer, Vec<u8>), i32> {
        let mut head = [0; size_of::<FileAnswer>()];
        self.0.read_exact(&mut head).unwrap();
        let answer: FileAnswer = bytemuck::pod_read_unaligned(&head);
        let mut bytes = vec![0; answer.len as usize];
        self.0.read_exact(&mut bytes).unwrap();
        if answer.errno == 0 { Ok((answer, bytes)) } else { Err(answer.errno) }
    }

    fn ask(&mut self, request: FileRequest, path: &str, other: &str) {
        let (path_len, other_len) = (path.len() as u32, other.len() as u32);
        let request = FileRequest { path_len, other_len, ..request };
        let bytes = [bytemuck::bytes_of(&request), path.as_bytes(), other.as_bytes()].concat();
        self.0.write_all(&bytes).unwrap();
    }

    fn perform(&mut self, operation: u32, flags: u32, path: &str) -> Result<Vec<u8>, i32> {
        self.ask(FileRequest { operation, flags, ..FileRequest::default() }, path, "");
        self.answer().map(|(_, bytes)| bytes)
    }

    fn pieces(&mut self) -> Vec<Vec<u8>> {
        let mut all = Vec::new();
        loop {
            let mut len = [0; 4];
            self.0.read_exact(&mut len).unwrap();
            let len = u32::from_ne_bytes(len);
            assert_eq!(len & FILE_FAILED, 0, "{len:#x}");
            if len == 0 {
                return all;
            }
            let mut piece = vec![0; len as usize];
            self.0.read_exact(&mut piece).unwrap();
            all.push(piece);
        }
    }

    fn write(&mut self, flags: u32, path: &str, bytes: &[u8]) -> Result<u64, i32> {
        let operation = FILE_WRITE;
        self.ask(FileRequest { operation, flags, ..FileRequest::default() }, path, "");
        for piece in bytes.chunks(FILE_PIECE_MAX) {
            self.0.write_all(&(piece.len() as u32).to_ne_bytes()).unwrap();
            self.0.write_all(piece).unwrap();
        }
        self.0.write_all(&[0; 4]).unwrap();
        self.answer().map(|(answer, _)| answer.attributes.size)
    }

    fn read(&mut self, path: &str) -> Result<Vec<u8>, i32> {
        let (operation, len) = (FILE_READ, u64::MAX);
        self.ask(FileRequest { operation, len, ..FileRequest::default() }, path, "");
        self.answer()?;
        Ok(self.pieces().concat())
    }

    fn list(&mut self, path: &str) -> Result<Vec<String>, i32> {
        self.ask(FileRequest { operation: FILE_LIST, ..FileRequest::default() }, path, "");
        self.answer()?;
        let name = |piece: Vec<u8>| String::from_utf8(piece[56..].to_vec()).unwrap();
        let mut names: Vec<_> = self.pieces().into_iter().map(name).collect();
        names.sort();
        Ok(names)
    }
}

#[test]
fn programs_run_with_streams_and_exit_codes() {
    let mut sandbox = start();
    let exit = |code| GuestExit::Code(code);
    let (code, out, err) =
        sandbox.run(&spec(&["sh", "-c", "echo $KEPT $PWD; echo no >&2; exit 3"]));
    assert_eq!((code, out.as_str(), err.as_str()), (exit(3), "1 /tmp\n", "no\n"));
    // Again and again, in one sandbox.
    for _ in 0..5 {
        assert_eq!(sandbox.run(&spec(&["true"])).0, exit(0));
    }
    let killed = sandbox.run(&spec(&["sh", "-c", "kill -TERM $$"]));
    assert_eq!(killed.0, GuestExit::Signal(15));
    let variables = ExecSpec {
        env: vec!["KEPT=2".into(), "NEW=3".into()],
        workdir: "/usr".into(),
        ..spec(&["sh", "-c", "echo $KEPT $NEW $(pwd)"])
    };
    assert_eq!(sandbox.run(&variables).1, "2 3 /usr\n");
}

/// Answers each line.
const ANSWER: &str = "while read line; do echo got $line; done; echo end; exit 4";

#[test]
fn streams_wait_for_the_next_host_and_go_on() {
    let mut sandbox = start();
    let mut streams = sandbox.exec(7, &spec(&["sh", "-c", ANSWER]));
    let pid = sandbox.started();
    let terminal = ExecSpec {
        terminal: Some(WindowSize { rows: 24, columns: 80, reserved: 0 }),
        ..spec(&["sh", "-c", ANSWER])
    };
    let mut typed = sandbox.exec(8, &terminal);
    let terminal = sandbox.started();
    streams.write("a\n");
    streams.read("got a\n");
    typed.write("b\n");
    typed.read("b\r\ngot b\r\n");
    for _ in 0..3 {
        sandbox.wait_for_next();
        // What was said before is not lost.
        streams.write("c\n");
        drop((streams, typed));
        streams = sandbox.go_on(7, 7, 3);
        assert_eq!(sandbox.started(), pid);
        typed = sandbox.go_on(8, 8, 1);
        assert_eq!(sandbox.started(), terminal);
        sandbox.say(RemoteMessage::execs_go_on());
        streams.write("d\n");
        // The line before it may have been answered while there was nobody, who has not heard it.
        let mut answer = [0; 6];
        streams.0[1].read_exact(&mut answer).unwrap();
        if &answer == b"got c\n" {
            streams.read("got d\n");
        } else {
            assert_eq!(String::from_utf8_lossy(&answer), "got d\n");
        }
        typed.write("e\n");
        typed.read("e\r\ngot e\r\n");
    }
    typed.write("\x04");
    typed.read("end\r\n");
    assert_eq!(sandbox.ended(), (8, GuestExit::Code(4)));
    drop(streams.0.remove(0));
    assert_eq!(sandbox.ended(), (7, GuestExit::Code(4)));
}

/// Says that it lives as long as there is nothing to read, and reads what there is.
const LOOK: &str = "
import os, select
while True:
    if not select.select([0], [], [], 0.02)[0]: os.write(1, b'.')
    elif not (said := os.read(0, 100)): break
    else: os.write(1, said)
";

#[test]
fn nobody_is_told_of_bytes_that_do_not_come_from_a_host_that_has_gone() {
    let mut sandbox = start();
    let mut streams = sandbox.exec(7, &spec(&["python3", "-c", LOOK]));
    sandbox.started();
    for _ in 0..3 {
        streams.read(".");
        sandbox.wait_for_next();
        drop(streams);
        thread::sleep(Duration::from_millis(50));
        streams = sandbox.go_on(7, 7, 3);
        sandbox.started();
        sandbox.say(RemoteMessage::execs_go_on());
    }
    streams.read(".");
    streams.write("text");
    let mut said = String::new();
    while !said.ends_with("text") {
        let mut byte = [0];
        streams.0[1].read_exact(&mut byte).unwrap();
        said.push(byte[0].into());
    }
    drop(streams.0.remove(0));
    assert_eq!(sandbox.ended(), (7, GuestExit::Code(0)));
}

#[test]
fn streams_that_no_host_has_go_on_are_at_their_end() {
    let mut sandbox = start();
    let named = sandbox.exec(7, &spec(&["cat"]));
    sandbox.started();
    let other = sandbox.exec(8, &spec(&["sh", "-c", "cat; exit 6"]));
    sandbox.started();
    sandbox.wait_for_next();
    drop((named, other));
    // A wrong number, and the wrong number of sockets, are refused and harm nothing.
    for (earlier, id, count) in [(9, 9, 3), (7, 9, 1), (7, 9, 0)] {
        let mut refused = sandbox.go_on(earlier, id, count);
        let heard = sandbox.heard();
        assert!(matches!(heard, RemoteEvent::Failed { id: 9, .. }), "{heard:?}");
        (0..count).for_each(|number| assert_eq!(refused.all(number), ""));
    }
    let mut named = sandbox.go_on(7, 10, 3);
    sandbox.started();
    sandbox.say(RemoteMessage::execs_go_on());
    assert_eq!(sandbox.ended(), (8, GuestExit::Code(6)));
    named.write("text");
    named.read("text");
    drop(named);
    assert_eq!(sandbox.ended(), (10, GuestExit::Code(0)));
    // Who never went away notices nothing.
    let mut streams = sandbox.exec(11, &spec(&["cat"]));
    sandbox.started();
    sandbox.say(RemoteMessage::execs_go_on());
    streams.write("text");
    streams.read("text");
}

#[test]
fn standard_input_is_passed_on_and_ends() {
    let mut sandbox = start();
    let mut streams = sandbox.exec(9, &spec(&["cat"]));
    sandbox.started();
    let text = "some text\n".repeat(100_000);
    let mut input = streams.0.remove(0);
    let (sent, writer) = (text.clone(), thread::spawn);
    let writer = writer(move || input.write_all(sent.as_bytes()).unwrap());
    let got = streams.all(0);
    writer.join().unwrap();
    assert_eq!(got.len(), text.len());
    assert!(got == text);
    assert_eq!(sandbox.ended(), (9, GuestExit::Code(0)));
}

#[test]
fn what_cannot_run_is_refused_with_a_sentence() {
    let mut sandbox = start();
    let mut refused = |spec: ExecSpec| {
        let mut streams = sandbox.exec(4, &spec);
        let event = sandbox.heard();
        assert_eq!(streams.all(1), "");
        match event {
            RemoteEvent::Failed { id: 4, reason, .. } => reason,
            event => panic!("{event:?}"),
        }
    };
    let missing = refused(spec(&["no-such-program"]));
    assert_eq!(
        missing,
        "no-such-program does not exist in the sandbox; check the path, or add it to the root file \
         system, for a function with `programs = [\"no-such-program\"]` in [runtime] of thaw.toml"
    );
    assert!(refused(spec(&["/etc/passwd"])).contains("may not be executed"));
    let nowhere = ExecSpec { workdir: "/nowhere".into(), ..spec(&["true"]) };
    assert!(refused(nowhere).contains("the working directory /nowhere does not exist"));
    let nobody = ExecSpec { user: "no-such-user".into(), ..spec(&["true"]) };
    assert!(refused(nobody).contains("do not know no-such-user"));
    // The sandbox is as before.
    assert_eq!(sandbox.run(&spec(&["true"])).0, GuestExit::Code(0));
}

#[test]
fn users_are_those_of_the_sandbox() {
    let mut sandbox = start();
    let as_user = |user: &str| ExecSpec { user: user.into(), ..spec(&["id", "-u"]) };
    assert_eq!(sandbox.run(&as_user("")).1, "0\n");
    assert_eq!(sandbox.run(&as_user("nobody")).1, "65534\n");
    assert_eq!(sandbox.run(&as_user("1234:5")).1, "1234\n");
    let groups = ExecSpec { user: "1234:5".into(), ..spec(&["id", "-g"]) };
    assert_eq!(sandbox.run(&groups).1, "5\n");
}

#[test]
fn a_signal_ends_a_process_and_its_group() {
    let mut sandbox = start();
    for to in [SignalTo::Process, SignalTo::Group] {
        let mut streams = sandbox.exec(3, &spec(&["sleep", "1000"]));
        sandbox.started();
        sandbox.connector.send_remote(RemoteMessage::signal(3, 15, to), &[]).unwrap();
        assert_eq!(sandbox.ended(), (3, GuestExit::Signal(15)));
        assert_eq!(streams.all(1), "");
    }
}

/// Reads until `wanted` was shown.
fn read_until(stream: &mut UnixStream, wanted: &str) -> String {
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    let mut shown = String::new();
    let mut buffer = [0; 4096];
    while !shown.contains(wanted) {
        let count = stream.read(&mut buffer).unwrap_or_else(|error| panic!("{error}: {shown:?}"));
        assert_ne!(count, 0, "{shown:?}");
        shown.push_str(&String::from_utf8_lossy(&buffer[..count]));
    }
    shown
}

#[test]
fn a_shell_has_a_terminal_with_job_control_and_a_size() {
    let mut sandbox = start();
    let window = |rows, columns| WindowSize { rows, columns, reserved: 0 };
    let shell = ExecSpec {
        env: vec!["PS1=ready> ".into()],
        terminal: Some(window(24, 80)),
        ..spec(&["bash", "--norc", "--noprofile", "-i"])
    };
    let mut streams = sandbox.exec(5, &shell);
    sandbox.started();
    let terminal = &mut streams.0[0];
    read_until(terminal, "ready> ");
    terminal.write_all(b"stty size; tty\n").unwrap();
    let shown = read_until(terminal, "/dev/pts/");
    assert!(shown.contains("24 80"), "{shown:?}");
    let message = RemoteMessage::window(5, window(50, 132));
    sandbox.connector.send_remote(message, &[]).unwrap();
    // What is typed is shown, too.
    let until = b"until [ \"$(stty size)\" = \"50 $((131+1))\" ]; do sleep 0.1; done; stty size\n";
    terminal.write_all(until).unwrap();
    read_until(terminal, "50 132");
    // Ctrl-C ends what is in the foreground, and not the shell.
    terminal.write_all(b"sh -c 'echo be\"\"gun; exec sleep 1000'\n").unwrap();
    read_until(terminal, "begun");
    terminal.write_all(b"\x03").unwrap();
    read_until(terminal, "ready> ");
    terminal.write_all(b"exit 7\n").unwrap();
    assert_eq!(sandbox.ended(), (5, GuestExit::Code(7)));
}

#[test]
fn closing_the_hosts_end_hangs_up_a_terminal() {
    let mut sandbox = start();
    let terminal = Some(WindowSize { rows: 1, columns: 1, reserved: 0 });
    let streams = sandbox.exec(6, &ExecSpec { terminal, ..spec(&["sleep", "1000"]) });
    sandbox.started();
    drop(streams);
    assert_eq!(sandbox.ended(), (6, GuestExit::Signal(1)));
}

#[test]
fn the_init_takes_over_orphans_and_cannot_be_killed() {
    let mut sandbox = start();
    let script = "kill -9 1; kill -TERM 1; (sleep 0.2 &) ; sleep 0.1; cat /proc/1/comm";
    let (exit, out, err) = sandbox.run(&spec(&["sh", "-c", script]));
    assert_eq!((exit, out.as_str(), err.as_str()), (GuestExit::Code(0), "init\n", ""));
    let mut left = || {
        let names = "cat /proc/[0-9]*/comm | sort | tr '\\n' ' '";
        sandbox.run(&spec(&["sh", "-c", names])).1
    };
    let until = Instant::now() + PATIENCE;
    while left().contains("sleep") {
        assert!(Instant::now() < until, "{}", left());
        thread::sleep(Duration::from_millis(50));
    }
}

#[test]
fn no_more_processes_than_the_bound_live_at_a_time() {
    let mut sandbox = start();
    let mut all = Vec::new();
    for id in 0..EXECS_MAX as u64 {
        all.push(sandbox.exec(id, &spec(&["sleep", "1000"])));
        sandbox.started();
    }
    let _one_more = sandbox.exec(1000, &spec(&["true"]));
    match sandbox.heard() {
        RemoteEvent::Failed { id: 1000, reason, .. } => {
            assert!(reason.contains("256 processes already"), "{reason}");
        }
        event => panic!("{event:?}"),
    }
    let signal = RemoteMessage::signal(17, 9, SignalTo::Process);
    sandbox.connector.send_remote(signal, &[]).unwrap();
    assert_eq!(sandbox.ended(), (17, GuestExit::Signal(9)));
    let _another = sandbox.exec(1001, &spec(&["true"]));
    sandbox.started();
}

#[test]
fn files_are_written_read_listed_and_removed() {
    let mut sandbox = start();
    let mut session = sandbox.files("");
    session.answer().unwrap();
    let big: Vec<u8> = (0..9_000_000u32).map(|n| (n / 7) as u8).collect();
    assert_eq!(session.write(FILE_PARENTS, "/tmp/thaw-tests/a/big", &big), Ok(big.len() as u64));
    assert!(session.read("/tmp/thaw-tests/a/big").unwrap() == big);
    for len in [0, 1, FILE_PIECE_MAX / 2 - 1, FILE_PIECE_MAX / 2, FILE_PIECE_MAX, 100_000] {
        assert_eq!(session.write(0, "/tmp/thaw-tests/a/small", &big[..len]), Ok(len as u64));
        assert!(session.read("/tmp/thaw-tests/a/small").unwrap() == big[..len], "{len}");
    }
    assert_eq!(session.write(0, "thaw-tests/a/small", b"x"), Ok(1), "from the working directory");
    assert_eq!(session.write(FILE_APPEND, "thaw-tests/a/small", b"yz"), Ok(3));
    assert_eq!(session.write(FILE_EXCLUSIVE, "thaw-tests/a/small", b""), Err(17));
    assert_eq!(session.read("/tmp/thaw-tests/a/small").unwrap(), b"xyz");
    assert_eq!(session.list("/tmp/thaw-tests/a").unwrap(), ["big", "small"]);
    assert_eq!(sandbox.run(&spec(&["cat", "/tmp/thaw-tests/a/small"])).1, "xyz");

    let rename = FileRequest { operation: FILE_RENAME, ..FileRequest::default() };
    session.ask(rename, "/tmp/thaw-tests/a/small", "/tmp/thaw-tests/b");
    session.answer().unwrap();
    let link = FileRequest { operation: FILE_SYMLINK, ..FileRequest::default() };
    session.ask(link, "/tmp/thaw-tests/link", "a/big");
    session.answer().unwrap();
    assert_eq!(session.perform(FILE_READ_LINK, 0, "/tmp/thaw-tests/link").unwrap(), b"a/big");
    assert_eq!(session.perform(FILE_REMOVE, 0, "/tmp/thaw-tests"), Err(39), "it is not empty");
    session.perform(FILE_REMOVE, FILE_RECURSIVE, "/tmp/thaw-tests").unwrap();
    assert_eq!(session.perform(FILE_STAT, 0, "/tmp/thaw-tests"), Err(2));
    assert_eq!(session.read("/tmp"), Err(21));
    assert_eq!(session.read("/dev/zero"), Err(22), "it would never end");
}

#[test]
fn sessions_over_files_have_the_rights_of_their_user() {
    let mut sandbox = start();
    let mut root = sandbox.files("");
    root.answer().unwrap();
    root.write(0, "/tmp/secret", b"of root").unwrap();
    let change = FileRequest {
        operation: FILE_CHANGE,
        flags: FILE_SET_MODE,
        mode: 0o600,
        ..FileRequest::default()
    };
    root.ask(change, "/tmp/secret", "");
    root.answer().unwrap();
    let mut nobody = sandbox.files("nobody");
    nobody.answer().unwrap();
    assert_eq!(nobody.read("/tmp/secret"), Err(13));
    assert_eq!(nobody.write(0, "/etc/passwd", b"x"), Err(13));
    assert_eq!(nobody.write(0, "/tmp/own", b"x"), Ok(1));
    let mut unknown = sandbox.files("no-such-user");
    assert_eq!(unknown.answer().unwrap_err(), 2);
}

#[test]
fn deep_trees_are_removed_without_depth_of_the_stack() {
    let mut sandbox = start();
    let script = "set -e; mkdir deep-tree; cd deep-tree; for i in {1..300}; do mkdir d; cd d; done";
    let (exit, _, err) = sandbox.run(&spec(&["bash", "-c", script]));
    assert_eq!((exit, err.as_str()), (GuestExit::Code(0), ""));
    let mut session = sandbox.files("");
    session.answer().unwrap();
    session.perform(FILE_REMOVE, FILE_RECURSIVE, "/tmp/deep-tree").unwrap();
    assert!(!session.list("/tmp").unwrap().contains(&"deep-tree".to_owned()));
}

#[test]
fn no_more_sessions_than_the_bound_are_open_at_a_time() {
    let mut sandbox = start();
    let mut all: Vec<_> = (0..FILE_SESSIONS_MAX).map(|_| sandbox.files("")).collect();
    all.iter_mut().for_each(|session| assert!(session.answer().is_ok()));
    let mut one_more = sandbox.files("");
    assert_eq!(one_more.0.read(&mut [0]).unwrap(), 0, "it is closed");
    drop(all.pop());
    // The end of one makes room, once the sandbox has seen it.
    let until = Instant::now() + PATIENCE;
    while !sandbox.files("").0.read(&mut [0]).is_ok_and(|count| count > 0) {
        assert!(Instant::now() < until, "there is no room again");
        thread::sleep(Duration::from_millis(20));
    }
}
