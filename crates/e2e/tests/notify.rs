//! What daemon and monitor tell the service manager that has started them (sd_notify(3)), which here is
//! a socket of the test's own.

use rustix::net::sockopt::set_socket_passcred;
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, recvmsg};
use rustix::process::Signal;
use std::fs::{self, Permissions};
use std::io::IoSliceMut;
use std::mem::MaybeUninit;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixDatagram;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;
use std::time::Duration;
use thaw_e2e::{
    Apart, Background, Function, Process, User, built_home, children, copy_home, descendants, kill,
    request, run, skip, thaw, wait_until,
};

/// The variable that names the socket.
const VARIABLE: &str = "NOTIFY_SOCKET";

fn home() -> PathBuf {
    static HOME: OnceLock<PathBuf> = OnceLock::new();
    HOME.get_or_init(|| built_home("notify", &[Function::Example("hello-c")])).clone()
}

/// One that units of `Type=notify` and `NotifyAccess=main` are told to.
struct ServiceManager {
    directory: tempfile::TempDir,
    socket: UnixDatagram,
}

/// A datagram, and the process that has sent it.
#[derive(Debug)]
struct Told {
    by: u32,
    lines: Vec<String>,
}

impl Told {
    fn says(&self, line: &str) -> bool {
        self.lines.iter().any(|own| own == line)
    }

    /// The status that came with it.
    fn status(&self) -> &str {
        self.lines.iter().find_map(|line| line.strip_prefix("STATUS=")).unwrap_or_default()
    }

    /// Whether it says no more than what the process does.
    fn is_status_alone(&self) -> bool {
        matches!(&self.lines[..], [only] if only.starts_with("STATUS="))
    }
}

impl ServiceManager {
    fn new() -> Self {
        // Where the daemon's user finds it.
        let directory = tempfile::Builder::new().prefix("thaw-notify-").tempdir().expect("/tmp");
        let set = |path: &Path, mode| fs::set_permissions(path, Permissions::from_mode(mode));
        set(directory.path(), 0o755).expect("its mode");
        let path = directory.path().join("notify");
        let socket = UnixDatagram::bind(&path).expect("a socket");
        set(&path, 0o777).expect("its mode");
        socket.set_read_timeout(Some(Duration::from_secs(60))).expect("a time-out");
        set_socket_passcred(&socket, true).expect("credentials");
        Self { directory, socket }
    }

    fn path(&self) -> PathBuf {
        self.directory.path().join("notify")
    }

    /// The next thing that somebody says.
    #[track_caller]
    fn next(&self) -> Told {
        self.receive(RecvFlags::empty()).expect("somebody says something")
    }

    /// What has been said by now.
    fn rest(&self) -> Vec<Told> {
        std::iter::from_fn(|| self.receive(RecvFlags::DONTWAIT).ok()).collect()
    }

    fn receive(&self, flags: RecvFlags) -> rustix::io::Result<Told> {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmCredentials(1))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let mut text = [0; 4096];
        let received =
            recvmsg(&self.socket, &mut [IoSliceMut::new(&mut text)], &mut control, flags)?;
        let by = control.drain().find_map(|message| match message {
            RecvAncillaryMessage::ScmCredentials(sender) => Some(sender.pid.as_raw_nonzero().get()),
            _ => None,
        });
        let text = String::from_utf8_lossy(&text[..received.bytes]).into_owned();
        let lines = text.lines().map(str::to_owned).collect();
        Ok(Told { by: by.expect("credentials") as u32, lines })
    }

    /// Reads until something is said, which the process `by` has to say like all before it; nothing but
    /// statuses may come before it.
    #[track_caller]
    fn await_line(&self, line: &str, by: u32) -> Told {
        loop {
            let told = self.next();
            assert_eq!(told.by, by, "{told:?}");
            if told.says(line) {
                return told;
            }
            assert!(told.is_status_alone(), "{told:?} before {line}");
        }
    }
}

/// Commands find the daemon at once.
#[track_caller]
fn commands_work(thaw: &dyn Fn() -> Command) {
    for arguments in [&["ps"][..], &["invoke", "hello-c"]] {
        let outcome = run(thaw().args(arguments));
        assert_eq!(outcome.code, Some(0), "{arguments:?}: {outcome:?}");
    }
}

/// The command `thaw` for the home of a node.
fn of(node: &Apart) -> Command {
    let mut thaw = thaw();
    thaw.env("THAW_HOME", node.home());
    thaw
}

/// Whether the environment with which a process has been executed names the socket; `None` if this user
/// may not look, or it has ended.
fn has_variable(pid: u32) -> Option<bool> {
    let environment = fs::read(format!("/proc/{pid}/environ")).ok()?;
    let is_it = |variable: &[u8]| variable.starts_with(format!("{VARIABLE}=").as_bytes());
    Some(environment.split(|byte| *byte == 0).any(is_it))
}

/// Of all processes below this one none has the variable, which it has itself if it was told. A fork
/// shows the environment of its parent until it executes its program.
#[track_caller]
fn no_child_has_the_variable(main: u32, is_told: bool) {
    assert_eq!(has_variable(main), Some(is_told));
    wait_until("no child has the variable", || {
        let below = descendants(main);
        let looked: Vec<_> = below.iter().filter_map(|process| has_variable(process.pid)).collect();
        let may_look = !looked.is_empty() || !rustix::process::geteuid().is_root();
        !below.is_empty() && may_look && !looked.contains(&true)
    });
}

#[test]
fn a_daemon_says_that_it_serves_when_commands_find_it_and_that_it_ends() {
    let Some(node) = Apart::of(home) else { return };
    let monitor = node.start_monitor();
    let manager = ServiceManager::new();
    for (signal, status) in [
        (Signal::TERM, "Leaving the live instances to the next daemon"),
        (Signal::INT, "Finishing what is being served"),
    ] {
        let log = node.directory().join("daemon.log");
        let mut daemon = Background::start(node.daemon().env(VARIABLE, manager.path()), log);
        let ready = manager.await_line("READY=1", daemon.pid());
        commands_work(&|| of(&node));
        assert_eq!(ready.status(), format!("Serving on http://{}", node.gateway(&daemon)));
        assert_eq!(has_variable(daemon.pid()), Some(true));
        no_child_has_the_variable(monitor.pid(), false);
        daemon.signal(signal);
        let stopping = manager.await_line("STOPPING=1", daemon.pid());
        assert_eq!(stopping.status(), status);
        assert_eq!(daemon.wait(), Some(0), "{}", daemon.log());
        assert!(manager.rest().iter().all(Told::is_status_alone));
    }
}

/// The daemon is not the process that the service manager knows, and does not see its socket.
#[test]
fn a_monitor_tells_of_the_daemon_that_it_has_started() {
    // Others copy theirs meanwhile, and what a daemon has there comes and goes.
    let home = copy_home(&home(), "notify-own");
    let log = home.with_extension("notify.log");
    tells_of_its_daemon(
        &|| {
            let mut thaw = thaw();
            thaw.env("THAW_HOME", &home);
            thaw
        },
        log,
    );
}

/// There the daemon is in namespaces of its own, with the same user id.
#[test]
fn so_does_that_of_another_user_than_root() {
    if !rustix::process::geteuid().is_root() {
        return skip("only root can become another user");
    }
    let user = User::nobody();
    let state = user.home().join("state");
    run(Command::new("cp").arg("-a").args([&home(), &state])).success();
    user.own(&state);
    tells_of_its_daemon(&|| user.thaw(), user.home().with_extension("notify.log"));
}

/// `thaw serve` by a command of `thaw`'s for a home.
#[track_caller]
fn tells_of_its_daemon(thaw: &dyn Fn() -> Command, log: PathBuf) {
    let manager = ServiceManager::new();
    let mut command = thaw();
    command.args(["serve", "--weak-limits", "--listen", "127.0.0.1:0"]);
    command.env(VARIABLE, manager.path()).env_remove("THAW_TRACE");
    let mut main = Background::start(&mut command, log);
    let ready = manager.await_line("READY=1", main.pid());
    commands_work(thaw);
    assert!(ready.status().starts_with("Serving on http://127.0.0.1:"), "{ready:?}");
    no_child_has_the_variable(main.pid(), true);
    if let Some(daemon) = monitored(main.pid()) {
        kill(daemon.pid);
        let again = manager.next();
        assert!(again.is_status_alone() && again.status().contains("signal 9"), "{again:?}");
        manager.await_line("READY=1", main.pid());
        commands_work(thaw);
    }
    main.signal(Signal::TERM);
    manager.await_line("STOPPING=1", main.pid());
    assert_eq!(main.wait(), Some(0), "{}", main.log());
}

/// The daemon of a monitor, if this user has the rights to part them.
fn monitored(main: u32) -> Option<Process> {
    let is_daemon = |child: &Process| {
        let line = fs::read(format!("/proc/{}/cmdline", child.pid)).unwrap_or_default();
        line.ends_with(b"--monitored\0")
    };
    children(main).into_iter().find(is_daemon)
}

#[test]
fn a_monitor_says_when_its_socket_is_there_and_when_it_is_another_program() {
    let Some(node) = Apart::of(home) else { return };
    let manager = ServiceManager::new();
    let socket = node.socket();
    let mut command = node.monitor(&["--socket", &socket, "--listen", "127.0.0.1:0"]);
    command.env(VARIABLE, manager.path());
    let mut monitor = Background::start(&mut command, node.directory().join("monitor.log"));
    let ready = manager.await_line("READY=1", monitor.pid());
    assert!(Path::new(&socket).exists());
    assert_eq!(ready.status(), "Waiting for a daemon");
    let mut daemon = node.start_daemon("daemon.log");
    assert_eq!(manager.next().status(), "A daemon is served");
    for _ in 0..2 {
        monitor.signal(Signal::USR2);
        let reloading = manager.await_line("RELOADING=1", monitor.pid());
        let time = reloading.lines.iter().find_map(|line| line.strip_prefix("MONOTONIC_USEC="));
        assert!(time.is_some_and(|time| time.parse::<u64>().is_ok()), "{reloading:?}");
        let ready = manager.await_line("READY=1", monitor.pid());
        assert_eq!(ready.status(), "A daemon is served", "{}", monitor.log());
        wait_until("its log says so", || monitor.log().contains("goes on in the place of"));
    }
    commands_work(&|| of(&node));
    no_child_has_the_variable(monitor.pid(), true);
    // One that is not executed anew does not reload either.
    fs::set_permissions(node.thaw(), Permissions::from_mode(0o777)).expect("its mode");
    monitor.signal(Signal::USR2);
    let stays = manager.next();
    assert!(stays.is_status_alone(), "{stays:?}");
    assert!(stays.status().starts_with("Goes on as it was"), "{stays:?}");
    assert_eq!(daemon.stop(), Some(0));
    assert_eq!(manager.next().status(), "Waiting for a daemon");
    monitor.signal(Signal::TERM);
    manager.await_line("STOPPING=1", monitor.pid());
    assert_eq!(monitor.wait(), Some(0), "{}", monitor.log());
}

/// Nobody listens there any more, as in a copy of another's environment.
#[test]
fn a_socket_that_leads_nowhere_holds_nothing_up() {
    let Some(node) = Apart::of(home) else { return };
    let _monitor = node.start_monitor();
    let nowhere = node.directory().join("nowhere");
    let mut daemon = node.start_as_daemon(node.daemon().env(VARIABLE, &nowhere), "daemon.log");
    let gateway = node.gateway(&daemon);
    let response = request(gateway, "hello-c", "/", None).expect("an answer");
    assert_eq!(response.status, 200);
    wait_until("it has tried", || daemon.log().contains("the service manager cannot be told"));
    assert_eq!(daemon.stop(), Some(0));
}
