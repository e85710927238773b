//! A monitor that is told to executes its program anew in its own place, as in an upgrade: live
//! instances, their connections and the daemon go on, and what cannot be done leaves everything as
//! it was.

use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, memfd_create};
use rustix::process::Signal;
use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File, Permissions};
use std::io::{Seek, Write};
use std::net::{SocketAddr, TcpListener};
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread;
use std::time::Duration;
use thaw_e2e::{
    Apart, Background, Daemon, DaemonOptions, Descriptor, Function, LASTING_KEYS, Lines, Outcome,
    Raw, built_home, children, count, descendants, descriptors, exists, free_port, get, kill,
    lasting, lasting_lines, repository, request, run, setting, skip, thaw, unit, wait_until,
};

/// What a monitor says that has taken the place of another.
const GOES_ON: &str = "goes on in the place of the monitor before it";
/// What one says that has not been executed anew.
const STAYS: &str = "this monitor goes on as it is";

/// One whose instances have one request each.
fn single() -> Function {
    lasting("single", "isolation = \"request\"")
}

/// A home with a function that remembers, or `None` where there is no monitor.
fn node() -> Option<Apart> {
    static HOME: OnceLock<PathBuf> = OnceLock::new();
    let functions = || [lasting("lasting", LASTING_KEYS), single()];
    Apart::of(|| HOME.get_or_init(|| built_home("reexec", &functions())).clone())
}

/// The same with a function at an address of its own, which one test at a time uses.
fn node_with_lines() -> Option<(MutexGuard<'static, ()>, SocketAddr, Apart)> {
    static HOME: OnceLock<(PathBuf, u16)> = OnceLock::new();
    static TURN: Mutex<()> = Mutex::new(());
    let turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    let (home, port) = HOME.get_or_init(|| {
        let port = free_port();
        let functions = [
            lasting("lasting", LASTING_KEYS),
            single(),
            lasting_lines(([127, 0, 0, 1], port).into()),
        ];
        (built_home("reexec-lines", &functions), port)
    });
    Some((turn, ([127, 0, 0, 1], *port).into(), Apart::of(|| home.clone())?))
}

/// How often something stands in the log.
fn times(monitor: &Background, text: &str) -> usize {
    monitor.log().matches(text).count()
}

/// Has the monitor executed anew, and waits until it is.
fn execute_anew(monitor: &Background) {
    let before = times(monitor, GOES_ON);
    monitor.signal(Signal::USR2);
    wait_until("the monitor is executed anew", || {
        assert_eq!(times(monitor, STAYS), 0, "{}", monitor.log());
        times(monitor, GOES_ON) > before
    });
}

/// Puts another program in the place of the node's, as a package does.
fn replace_program(node: &Apart, by: &Path) {
    let new = node.thaw().with_extension("new");
    run(Command::new("cp").arg(by).arg(&new)).success();
    fs::set_permissions(&new, Permissions::from_mode(0o755)).expect("its mode");
    fs::rename(&new, node.thaw()).expect("it is in its place");
}

/// Whether a process executes the file at a path, and not one that was there before.
fn executes(pid: u32, program: &Path) -> bool {
    let file = |path: &Path| fs::metadata(path).map(|file| (file.dev(), file.ino())).ok();
    let own = file(&PathBuf::from(format!("/proc/{pid}/exe")));
    own.is_some() && own == file(program)
}

/// What a process has open, but for pipes that it has from whoever has started this test.
fn open(pid: u32) -> BTreeMap<u32, String> {
    let own: BTreeSet<_> = descriptors(std::process::id()).into_values().map(name).collect();
    let is_inherited = |target: &String| target.starts_with("pipe:") && own.contains(target);
    let all = descriptors(pid).into_iter().map(|(number, open)| (number, name(open)));
    all.filter(|(_, target)| !is_inherited(target)).collect()
}

/// Waits until the monitor keeps the only instance for the next daemon, with so many connections.
#[track_caller]
fn wait_until_kept(node: &Apart, connections: u64) {
    wait_until("it is kept for the next daemon", || {
        let instances = node.instances();
        instances.len() == 1 && instances[0]["kept"] == connections
    });
}

/// What a descriptor leads to. Numbers of inodes stay over an exec.
fn name(descriptor: Descriptor) -> String {
    descriptor.target
}

/// What a monitor has open when it has nothing to do.
fn open_at_rest(monitor: &Background) -> BTreeSet<String> {
    // Its thread may have a directory open for a moment, which is longer on a busy machine.
    let (mut before, mut times_seen) = (open(monitor.pid()), 0);
    while times_seen < 5 {
        thread::sleep(Duration::from_millis(50));
        let now = open(monitor.pid());
        times_seen = if now == before { times_seen + 1 } else { 0 };
        before = now;
    }
    before.into_values().collect()
}

#[test]
fn instances_and_their_connections_go_on_and_then_under_the_next_daemon() {
    let Some((_turn, lines, node)) = node_with_lines() else { return };
    let mut monitor = node.start_monitor();
    let mut daemon = node.start_daemon("daemon-0.log");
    let gateway = node.gateway(&daemon);
    let monitor_pid = monitor.pid();
    assert_eq!(count(gateway, "lasting"), 1);
    let mut raw = Lines::connect(lines);
    let mut upgraded = Lines::upgrade(gateway, "lasting");
    assert_eq!((raw.say("first"), upgraded.say("first")), (1, 2));
    // Requests and lines of the same instance have one count.
    let (mut said, mut counted) = (1, 2);
    for number in 1..3 {
        // More than once: what was handed over is handed on.
        for _ in 0..2 {
            execute_anew(&monitor);
            said += 1;
            counted += 2;
            assert_eq!((raw.say("again"), upgraded.say("again")), (said, counted - 1));
            assert_eq!(count(gateway, "lasting"), counted, "{}", daemon.log());
        }
        // The daemon asks the monitor for something.
        let more = 2 * number + 1;
        let held: Vec<_> = (0..more).map(|_| begin(gateway, "single", "/hold/1")).collect();
        for mut client in held {
            assert_eq!(client.response().map(|response| response.status), Some(200));
        }
        wait_until("those of one request have ended", || node.instances().len() == 2);
        assert_eq!(daemon.stop(), Some(0), "{}", daemon.log());
        daemon = node.start_daemon(&format!("daemon-{number}.log"));
        assert_eq!(node.gateway(&daemon), gateway);
        assert!(daemon.log().contains("took over 2 of 2 instances"), "{}", daemon.log());
        said += 1;
        counted += 2;
        assert_eq!((raw.say("next"), upgraded.say("next")), (said, counted - 1));
        assert_eq!(count(gateway, "lasting"), counted, "{}", daemon.log());
    }
    assert_eq!(monitor.pid(), monitor_pid);
    // At the end of the monitor nothing is left.
    let all = descendants(monitor.pid());
    assert_eq!(daemon.stop(), Some(0));
    assert_eq!(monitor.stop(), Some(0));
    assert!(!Path::new(&node.socket()).exists());
    wait_until("nothing is left", || all.iter().all(|process| !exists(process.pid)));
    wait_until("no control groups are left", || groups_of(monitor_pid).is_empty());
}

/// Begins a request whose connection is handed over, since nothing can follow it.
fn begin(gateway: SocketAddr, function: &str, path: &str) -> Raw {
    let mut client = Raw::connect(gateway);
    client.send(format!("GET {path} HTTP/1.1\r\nHost: {function}\r\nConnection: close\r\n\r\n"));
    client
}

/// Control groups of a monitor's sandboxes, in trees of either version.
fn groups_of(monitor: u32) -> Vec<PathBuf> {
    let mut found = Vec::new();
    let mut directories = vec![PathBuf::from("/sys/fs/cgroup")];
    while let Some(next) = directories.pop() {
        for entry in fs::read_dir(next).into_iter().flatten().flatten() {
            if !entry.file_type().is_ok_and(|kind| kind.is_dir()) {
                continue;
            }
            if entry.file_name().to_string_lossy().starts_with(&format!("thaw-{monitor}-")) {
                found.push(entry.path());
            }
            directories.push(entry.path());
        }
    }
    found
}

/// Each request of the function makes the daemon ask the monitor for control groups, to keep something,
/// or to forget it.
#[test]
fn clients_notice_nothing() {
    let Some(node) = node() else { return };
    let monitor = node.start_monitor();
    let daemon = node.start_daemon("daemon.log");
    let gateway = node.gateway(&daemon);
    let is_over = Arc::new(AtomicBool::new(false));
    let clients: Vec<_> = ["single", "single", "lasting"]
        .into_iter()
        .map(|function| {
            let is_over = is_over.clone();
            thread::spawn(move || {
                let mut failures = Vec::new();
                while !is_over.load(Ordering::SeqCst) {
                    match request(gateway, function, "/count", None) {
                        Ok(response) if response.status == 200 => {}
                        other => failures.push(format!("{function}: {other:?}")),
                    }
                }
                failures
            })
        })
        .collect();
    for round in 0..10 {
        thread::sleep(Duration::from_millis(100));
        if round % 2 == 0 {
            replace_program(&node, &node.thaw());
        }
        execute_anew(&monitor);
    }
    is_over.store(true, Ordering::SeqCst);
    let failures: Vec<_> = clients.into_iter().flat_map(|client| client.join().unwrap()).collect();
    assert_eq!(failures, Vec::<String>::new(), "{}", daemon.log());
}

/// Nothing that the monitor has is left behind, and nothing comes along twice.
#[test]
fn a_monitor_has_the_same_open_before_and_afterwards() {
    let Some(node) = node() else { return };
    let monitor = node.start_monitor();
    let mut daemon = node.start_daemon("first.log");
    let gateway = node.gateway(&daemon);
    let mut client = Lines::upgrade(gateway, "lasting");
    assert_eq!((client.say("hello"), count(gateway, "lasting")), (1, 2));
    wait_until("one connection is left", || node.instances()[0]["connections"] == 1);
    // Whoever copies its bytes has it kept, when the daemon ends.
    wait_until_kept(&node, 0);
    let before = open_at_rest(&monitor);
    assert!(before.len() > 8, "{before:?}");
    for _ in 0..3 {
        execute_anew(&monitor);
        wait_until("it has open what it had", || open_at_rest(&monitor) == before);
    }
    // Another program: the helpers of this daemon are those of the one before, as long as it lives.
    let original = node.thaw();
    replace_program(&node, &original);
    for _ in 0..2 {
        execute_anew(&monitor);
        assert!(executes(monitor.pid(), &node.thaw()));
        let more = BTreeSet::from([format!("{} (deleted)", original.display())]);
        let expected: BTreeSet<_> = before.union(&more).cloned().collect();
        wait_until("it has the older program open, too", || open_at_rest(&monitor) == expected);
    }
    assert_eq!(daemon.stop(), Some(0));
    let daemon = node.start_daemon("second.log");
    assert_eq!(client.say("hello"), 3, "{}", daemon.log());
    let is_old = |target: &String| target.contains("(deleted)") && target.contains("thaw");
    let is_memory = |target: &String| target.starts_with("/memfd:");
    wait_until("nothing old is left", || {
        !open_at_rest(&monitor).iter().any(|target| is_old(target) && !is_memory(target))
    });
}

/// The daemon speaks with zygote parents and other helpers of its own version.
#[test]
fn helpers_are_those_of_the_daemon_that_asks_for_them() {
    let Some(node) = node() else { return };
    let monitor = node.start_monitor();
    let mut daemon = node.start_daemon("first.log");
    let gateway = node.gateway(&daemon);
    assert_eq!(count(gateway, "lasting"), 1);
    replace_program(&node, &node.thaw());
    execute_anew(&monitor);
    assert!(!executes(daemon.pid(), &node.thaw()));
    // The parent of all zygotes is started again.
    let old: BTreeSet<u32> = parents(&monitor, &daemon);
    old.iter().for_each(|parent| kill(*parent));
    wait_until("there is another parent", || {
        parents(&monitor, &daemon).difference(&old).next().is_some()
    });
    wait_until("it is served", || get(gateway, "single", "/count").status == 200);
    // A fork shows the program of its parent until it executes its own.
    wait_until("the daemon speaks with its own version", || {
        parents(&monitor, &daemon)
            .difference(&old)
            .all(|parent| !executes(*parent, &node.thaw()) && executes_what(*parent, daemon.pid()))
    });
    assert_eq!(daemon.stop(), Some(0));
    let daemon = node.start_daemon("second.log");
    assert!(executes(daemon.pid(), &node.thaw()));
    let gateway = node.gateway(&daemon);
    wait_until("it is served", || get(gateway, "single", "/count").status == 200);
    wait_until("there is a parent of its version", || {
        parents(&monitor, &daemon).iter().any(|parent| executes(*parent, &node.thaw()))
    });
}

/// Zygote parents below a monitor.
fn parents(monitor: &Background, daemon: &Background) -> BTreeSet<u32> {
    let of_monitor = children(monitor.pid()).into_iter().map(|child| child.pid);
    of_monitor.filter(|pid| *pid != daemon.pid()).collect()
}

/// Whether two processes execute the same file.
fn executes_what(pid: u32, other: u32) -> bool {
    executes(pid, &PathBuf::from(format!("/proc/{other}/exe")))
}

/// The monitor goes on with what no daemon has just now, and with what one leaves at that moment.
#[test]
fn what_a_killed_daemon_has_left_is_there_for_the_next() {
    let Some(node) = node() else { return };
    let monitor = node.start_monitor();
    let daemon = node.start_daemon("first.log");
    let gateway = node.gateway(&daemon);
    assert_eq!(count(gateway, "lasting"), 1);
    let mut held = begin(gateway, "lasting", "/hold/20");
    wait_until("it is under way", || node.instances().len() == 1);
    wait_until_kept(&node, 1);
    monitor.signal(Signal::USR2);
    kill(daemon.pid());
    drop(daemon);
    wait_until("the monitor is executed anew", || times(&monitor, GOES_ON) == 1);
    wait_until("it waits", || monitor.log().contains("the daemon has ended; waiting"));
    // And once more while it waits for the next one.
    execute_anew(&monitor);
    assert!(monitor.log().contains("with no daemon"), "{}", monitor.log());
    let daemon = node.start_daemon("second.log");
    assert!(daemon.log().contains("took over 1 of 1 instances"), "{}", daemon.log());
    // The one that is held is the second.
    assert_eq!(count(gateway, "lasting"), 3);
    assert_eq!(held.response().map(|response| response.status), Some(200), "{}", daemon.log());
}

/// They wait for the program that is executed.
#[test]
fn signals_that_come_meanwhile_are_not_lost() {
    let Some(node) = node() else { return };
    for round in 0..12 {
        let mut monitor = node.start_monitor();
        monitor.signal(Signal::USR2);
        thread::sleep(Duration::from_millis(round * 9));
        assert_eq!(monitor.stop(), Some(0), "{}", monitor.log());
        assert!(!Path::new(&node.socket()).exists());
    }
    let mut monitor = node.start_monitor();
    let mut daemon = node.start_daemon("daemon.log");
    assert_eq!(count(node.gateway(&daemon), "lasting"), 1);
    let all = descendants(monitor.pid());
    monitor.signal(Signal::USR2);
    // Passed on to the daemon.
    monitor.signal(Signal::HUP);
    wait_until("the monitor is executed anew", || times(&monitor, GOES_ON) == 1);
    wait_until("the daemon reloads", || daemon.log().contains("reloaded"));
    monitor.signal(Signal::USR2);
    assert_eq!(monitor.stop(), Some(0), "{}", monitor.log());
    assert_eq!(daemon.wait(), Some(0), "{}", daemon.log());
    wait_until("nothing is left", || all.iter().all(|process| !exists(process.pid)));
}

/// Has the monitor refuse to be executed anew, for this reason, and everything go on.
fn is_refused(node: &Apart, monitor: &Background, gateway: SocketAddr, says: &str) {
    let (before, counted) = (times(monitor, STAYS), count(gateway, "lasting"));
    monitor.signal(Signal::USR2);
    wait_until("the monitor refuses", || times(monitor, STAYS) > before);
    let log = monitor.log();
    let line = log.lines().rfind(|line| line.contains(STAYS)).expect("a line");
    assert!(line.contains(says), "{says}: {line}");
    assert_eq!(times(monitor, GOES_ON), 0, "{log}");
    assert_eq!(count(gateway, "lasting"), counted + 1);
    assert_eq!(get(gateway, "single", "/count").status, 200, "{}", node.socket());
}

#[test]
fn a_program_that_is_not_acceptable_leaves_everything_as_it_was() {
    let Some(node) = node() else { return };
    let monitor = node.start_monitor();
    let mut daemon = node.start_daemon("first.log");
    let gateway = node.gateway(&daemon);
    let (program, directory) = (node.thaw(), node.thaw().parent().expect("its own").to_owned());
    let original = directory.join("original");
    run(Command::new("cp").arg("-p").args([&program, &original])).success();
    assert_eq!(count(gateway, "lasting"), 1);
    wait_until_kept(&node, 0);
    let open = open_at_rest(&monitor);
    let refused = |says: &str| is_refused(&node, &monitor, gateway, says);

    fs::remove_file(&program).expect("it is there");
    refused("cannot be opened");
    // Programs that answer otherwise, or not at all.
    for other in ["/bin/true", "/bin/false", "/bin/echo"] {
        replace_program(&node, Path::new(other));
        refused("does not answer as a Thaw");
    }
    fs::write(&program, "no program").expect("room");
    refused("says: ");
    replace_program(&node, &original);
    chown(&program, Some(54_321), None).expect("root may");
    refused("others than root may change");
    chown(&program, Some(0), Some(0)).expect("root may");
    fs::set_permissions(&program, Permissions::from_mode(0o775)).expect("its mode");
    refused("others than root may change");
    fs::set_permissions(&program, Permissions::from_mode(0o755)).expect("its mode");
    fs::set_permissions(&directory, Permissions::from_mode(0o777)).expect("its mode");
    refused("others than root may change");
    fs::set_permissions(&directory, Permissions::from_mode(0o755)).expect("its mode");
    // Another Thaw that lacks an option of this monitor's, as an older one: it says so.
    let strange = fs::read(&original).expect("a program");
    fs::write(directory.join("strange"), without(strange, b"weak-limits")).expect("room");
    replace_program(&node, &directory.join("strange"));
    refused("says: ");

    // Instances that have served their one request are kept no more.
    wait_until("the monitor has open what it had", || open_at_rest(&monitor) == open);
    replace_program(&node, &original);
    execute_anew_after_refusals(&monitor);
    assert_eq!(daemon.stop(), Some(0));
    let before = count_at_next(&node, gateway);
    assert!(before > 1, "the same instance");
}

/// A program in which a word is another one.
fn without(mut program: Vec<u8>, word: &[u8]) -> Vec<u8> {
    let places: Vec<_> = program
        .windows(word.len())
        .enumerate()
        .filter(|(_, window)| *window == word)
        .map(|(place, _)| place)
        .collect();
    assert!(!places.is_empty());
    for place in places {
        program[place] = b'X';
    }
    program
}

fn execute_anew_after_refusals(monitor: &Background) {
    monitor.signal(Signal::USR2);
    wait_until("the monitor is executed anew", || times(monitor, GOES_ON) == 1);
}

fn count_at_next(node: &Apart, gateway: SocketAddr) -> u32 {
    let daemon = node.start_daemon("next.log");
    assert!(daemon.log().contains("took over"), "{}", daemon.log());
    count(gateway, "lasting")
}

/// Asks the program whether it takes over this state.
fn ask(text: &[u8], seals: SealFlags) -> Outcome {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let mut state = File::from(memfd_create("state", flags).expect("memory"));
    state.write_all(text).expect("room");
    state.rewind().expect("a file");
    fcntl_add_seals(&state, seals).expect("seals");
    let mut command = thaw();
    command.args(["monitor", "--socket", "/nowhere", "--can-take-over"]).stdin(state);
    run_as_it_is(&mut command)
}

fn run_as_it_is(command: &mut Command) -> Outcome {
    let output = command.stdout(Stdio::piped()).stderr(Stdio::piped()).output().expect("it runs");
    let text = |bytes: Vec<u8>| String::from_utf8_lossy(&bytes).into_owned();
    Outcome { code: output.status.code(), stdout: text(output.stdout), stderr: text(output.stderr) }
}

#[test]
fn a_state_of_another_version_or_a_damaged_one_is_refused_in_one_sentence() {
    let all = SealFlags::WRITE | SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL;
    for (text, seals, says) in [
        ("{\"version\":99,\"more\":[]}", all, "written down in version 99"),
        ("{\"version\":0}", all, "written down in version 0"),
        ("{\"version\":1}", all, "not written down as it should be"),
        ("{\"version\":1,\"monitor\":{}}", all, "not written down as it should be"),
        ("", all, "not written down as it should be"),
        ("{\"version\":1}", SealFlags::empty(), "no monitor has made this file"),
    ] {
        let refused = ask(text.as_bytes(), seals);
        assert_eq!((refused.code, &*refused.stdout), (Some(1), ""), "{text}: {refused:?}");
        assert!(refused.stderr.contains(says), "{text}: {}", refused.stderr);
        assert_eq!(refused.stderr.lines().count(), 1, "{}", refused.stderr);
    }
    // Nobody becomes a monitor by naming a descriptor.
    for number in ["0", "9"] {
        let taking_over = format!("--taking-over={number}");
        let refused = run(thaw().args(["monitor", "--socket", "/nowhere", &taking_over]));
        assert_eq!(refused.code, Some(1), "{refused:?}");
        assert!(refused.stderr.contains("cannot go on in the place"), "{}", refused.stderr);
    }
}

/// The daemon has no right to signal its monitor, and nothing that it sends has it executed anew.
#[test]
fn the_daemons_user_has_no_say_in_it() {
    let Some(node) = node() else { return };
    let monitor = node.start_monitor();
    let daemon = node.start_daemon("first.log");
    let gateway = node.gateway(&daemon);
    assert_eq!(count(gateway, "lasting"), 1);
    let mut signalling = node.as_user(node.uid, node.gid);
    signalling.args(["sh", "-c", "kill -USR2 $0", &monitor.pid().to_string()]);
    let outcome = run(&mut signalling);
    assert_ne!(outcome.code, Some(0), "{outcome:?}");
    // Nor may it look at the state, or at what is open there.
    let mut looking = node.as_user(node.uid, node.gid);
    looking.args(["ls", &format!("/proc/{}/fd", monitor.pid())]);
    assert_ne!(run(&mut looking).code, Some(0));
    execute_anew(&monitor);
    let outcome = run(&mut looking);
    assert_ne!(outcome.code, Some(0), "{outcome:?}");
    assert_eq!((times(&monitor, GOES_ON), times(&monitor, STAYS)), (1, 0));
    assert_eq!(count(gateway, "lasting"), 2);
}

/// A socket of the service manager, and the addresses that the monitor has bound itself.
#[test]
fn listeners_go_on() {
    let Some(node) = node() else { return };
    let socket = TcpListener::bind("127.0.0.1:0").expect("a port");
    let gateway = socket.local_addr().expect("an address");
    let mut monitor = node.start_activated_monitor(&socket, "monitor.log");
    let mut daemon = node.start_daemon("first.log");
    assert_eq!(count(gateway, "lasting"), 1);
    for name in ["second.log", "third.log"] {
        execute_anew(&monitor);
        assert_eq!(daemon.stop(), Some(0));
        // A client waits while there is no daemon.
        let waiting = thread::spawn(move || get(gateway, "single", "/count").status);
        execute_anew(&monitor);
        daemon = node.start_daemon(name);
        assert!(!daemon.log().contains("a socket of the service manager"), "{}", daemon.log());
        assert_eq!(waiting.join().expect("a client"), 200);
    }
    assert_eq!(count(gateway, "lasting"), 2);
    assert_eq!(daemon.stop(), Some(0));
    assert_eq!(monitor.stop(), Some(0));
}

/// One that is being restarted in order, and one that comes when the monitor is executed anew.
#[test]
fn a_restart_of_the_daemon_goes_on_meanwhile() {
    let Some(node) = node() else { return };
    let monitor = node.start_monitor();
    let mut daemon = node.start_daemon("first.log");
    let gateway = node.gateway(&daemon);
    assert_eq!(count(gateway, "lasting"), 1);
    let mut client = Lines::upgrade(gateway, "lasting");
    let routed = thread::spawn(move || get(gateway, "lasting", "/hold/12").status);
    wait_until("it is under way", || node.instances()[0]["connections"] == 2);
    daemon.signal(Signal::TERM);
    wait_until("it leaves", || daemon.log().contains("leaving the live instances"));
    // It still finishes a request.
    execute_anew(&monitor);
    assert_eq!(daemon.wait(), Some(0), "{}", daemon.log());
    assert_eq!(routed.join().expect("a client"), 200);
    wait_until("it waits", || monitor.log().contains("ended in order; waiting"));
    monitor.signal(Signal::USR2);
    let daemon = node.start_daemon("second.log");
    assert!(daemon.log().contains("took over 1 of 1 instances"), "{}", daemon.log());
    wait_until("the monitor is executed anew", || times(&monitor, GOES_ON) == 2);
    assert_eq!(client.say("hello"), 3, "{}", daemon.log());
    assert_eq!(count(gateway, "lasting"), 4);
}

/// There the daemon would not be another one either.
#[test]
fn a_daemon_with_a_monitor_of_its_own_goes_on_as_it_is() {
    let Some(node) = node() else { return };
    let daemon = Daemon::start(&node.home(), &DaemonOptions::default());
    assert_eq!(count(daemon.gateway(), "lasting"), 1);
    daemon.signal(Signal::USR2);
    wait_until("it says so", || daemon.log().contains(STAYS));
    assert!(daemon.log().contains("only `thaw monitor`"), "{}", daemon.log());
    assert_eq!(count(daemon.gateway(), "lasting"), 2);
    assert_eq!(daemon.stop(), Some(0));
}

/// The commands of the unit's `ExecReload=`, for this monitor; the code of the first that fails.
fn reload(node: &Apart, pid: u32) -> Option<i32> {
    let unit = unit("thaw-monitor.service");
    let mut commands = unit.lines().filter_map(|line| line.strip_prefix("ExecReload="));
    let failed = commands.find_map(|line| {
        let script = line.strip_prefix("/bin/sh -c '").and_then(|line| line.strip_suffix('\''));
        let script = script.unwrap_or_else(|| panic!("{line}"));
        let script = script.replace("/usr/local/bin/thaw", &node.thaw().to_string_lossy());
        let mut shell = Command::new("/bin/sh");
        let code = run(shell.args(["-c", &script]).env("MAINPID", pid.to_string())).code;
        (code != Some(0)).then_some(code)
    });
    failed.unwrap_or(Some(0))
}

/// What the package's script has systemd do, called with these arguments, where a monitor is active or
/// not and its reload ends so; `None` where a test may not make a place for it.
fn postinst(arguments: &[&str], is_active: bool, reload: u8) -> Option<String> {
    const NO_PLACE: i32 = 99;
    let tools = tempfile::tempdir().expect("a directory");
    let systemctl = tools.path().join("systemctl");
    let active = u8::from(!is_active);
    let script = format!(
        "#!/bin/sh\necho \"$*\"\n\
         case $1 in reload) exit {reload};; is-active) exit {active};; *) exit 0;; esac\n"
    );
    fs::write(&systemctl, script).expect("room");
    fs::set_permissions(&systemctl, Permissions::from_mode(0o755)).expect("its mode");
    let inside = "unshare --mount true && mount -t tmpfs run /run && mkdir -p /run/systemd/system \
                  || exit 99\nPATH=$1:$PATH; shift; exec sh \"$@\"";
    let mut command = Command::new("unshare");
    command.args(["--mount", "sh", "-c", inside, "sh"]).arg(tools.path());
    command.arg(repository().join("contrib/debian/postinst")).args(arguments);
    let outcome = run(&mut command);
    if outcome.code == Some(NO_PLACE) || outcome.stderr.contains("unshare failed") {
        skip("no mount namespaces for a file system of the test's own");
        return None;
    }
    assert_eq!(outcome.code, Some(0), "{}", outcome.stderr);
    Some(outcome.stdout)
}

#[test]
fn the_package_restarts_the_monitor_only_if_it_cannot_be_reloaded() {
    let Some(first) = postinst(&["configure", ""], true, 0) else { return };
    assert_eq!(first, "", "a first installation");
    let upgrade = |is_active, reload| {
        let said = postinst(&["configure", "0.1"], is_active, reload).expect("a place");
        said.lines().map(str::to_owned).collect::<Vec<_>>()
    };
    let looks = ["daemon-reload", "is-active --quiet thaw-monitor.service"];
    let reload = "reload thaw-monitor.service";
    assert_eq!(upgrade(false, 0), looks);
    assert_eq!(upgrade(true, 0), [&looks[..], &[reload, "try-restart thaw.service"]].concat());
    let ends = [reload, reload, "stop thaw.service", "restart thaw-monitor.service"];
    assert_eq!(upgrade(true, 1), [&looks[..], &ends].concat());
}

#[test]
fn the_units_reload_says_whether_the_monitor_is_another_program_then() {
    let Some(node) = node() else { return };
    let monitor = node.start_monitor();
    let daemon = node.start_daemon("first.log");
    let gateway = node.gateway(&daemon);
    assert_eq!(count(gateway, "lasting"), 1);
    assert_eq!(reload(&node, monitor.pid()), Some(0));
    wait_until("the monitor is executed anew", || times(&monitor, GOES_ON) == 1);
    replace_program(&node, &node.thaw());
    assert_eq!(reload(&node, monitor.pid()), Some(0), "{}", monitor.log());
    assert!(executes(monitor.pid(), &node.thaw()));
    replace_program(&node, Path::new("/bin/true"));
    assert_ne!(reload(&node, monitor.pid()), Some(0), "{}", monitor.log());
    assert_eq!(count(gateway, "lasting"), 2);
    // One that does not know the signal yet would end by it, and is left alone.
    let mut older = Command::new("sleep").arg("1000").spawn().expect("a process");
    assert_ne!(reload(&node, older.id()), Some(0));
    assert_eq!(older.try_wait().expect("our child"), None);
    older.kill().expect("it runs");
    older.wait().expect("our child");
    assert_eq!(setting(&unit("thaw-monitor.service"), "Restart"), "on-failure");
}
