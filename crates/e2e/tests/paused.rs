//! Pauses of sandboxes: answered when nothing in them runs, and written after that. Whatever comes
//! in between, their memory stays.

use rustix::process::Signal;
use serde_json::Value;
use std::fs;
use std::path::PathBuf;
use std::sync::OnceLock;
use thaw_e2e::{
    Daemon, DaemonOptions, Outcome, built_home, copy_home, has_controller, run, skip, thaw,
    wait_until,
};

/// A function without a program.
const BOX: &str = r#"
name = "box"
isolation = "instance"
[entry]
kind = "sandbox"
[runtime]
kind = "python3"
programs = ["sh", "cat", "sleep", "rm", "mv"]
[limits]
memory = "256MiB"
instances = 20
"#;

/// Holds memory that nothing else has, and writes down what that is when it is asked.
const HOLDER: &str = r"
import hashlib, os
held = bytearray(os.urandom(32 << 20))
os.mkfifo('/tmp/ask')
print(hashlib.sha256(held).hexdigest(), flush=True)
while True:
    open('/tmp/ask').read()
    with open('/tmp/new', 'w') as answer:
        answer.write(hashlib.sha256(held).hexdigest())
    os.rename('/tmp/new', '/tmp/answer')
";

/// Asks it.
const ASK: &str = "rm -f /tmp/answer; echo > /tmp/ask; until [ -e /tmp/answer ]; do sleep 0.02; \
                   done; cat /tmp/answer";

/// Computes until a file is there.
const COMPUTE: &str = "import os\nwhile not os.path.exists('/tmp/stop'): pass";

/// Computes for some seconds, and writes down that it has.
const COMPUTE_AWHILE: &str = "import time\nend = time.time() + 3\nwhile time.time() < end: pass\n\
                              open('/tmp/done', 'w')";

/// A daemon whose disk takes nothing as long as a file is there.
struct Node {
    daemon: Daemon,
    slow: PathBuf,
}

impl Node {
    fn start(label: &str) -> Self {
        static HOME: OnceLock<PathBuf> = OnceLock::new();
        let home = HOME.get_or_init(|| {
            let home = built_home("paused", &[]);
            let directory = home.with_extension("box");
            fs::create_dir_all(&directory).unwrap();
            fs::write(directory.join("thaw.toml"), BOX).unwrap();
            run(thaw().arg("build").arg(&directory).env("THAW_HOME", &home)).success();
            home
        });
        let home = copy_home(home, &format!("paused-{label}"));
        let slow = home.join("slow");
        let _ = fs::remove_file(&slow);
        let program = ["/usr/bin/env".to_owned(), format!("THAW_SLOW_SWAP={}", slow.display())];
        Self { daemon: Daemon::start_by(&program, &home, &DaemonOptions::default()), slow }
    }

    fn slow_down(&self) {
        fs::write(&self.slow, "").unwrap();
    }

    fn speed_up(&self) {
        fs::remove_file(&self.slow).unwrap();
    }

    /// At most so much may be in swap files.
    fn bound_swap(&self, most: &str) {
        let home = self.daemon.home();
        fs::write(home.join("tenants.toml"), format!("[default]\nswap = \"{most}\"\n")).unwrap();
        self.daemon.signal(Signal::HUP);
        let line = format!("quota=\"swap\"}} {}", bytes(most));
        wait_until("the quota is known", || self.daemon.admin("/metrics").text().contains(&line));
    }

    fn call(&self, arguments: &[&str]) -> Outcome {
        run(thaw().args(arguments).env("THAW_HOME", self.daemon.home()))
    }

    #[track_caller]
    fn ok(&self, arguments: &[&str]) -> String {
        self.call(arguments).success()
    }

    /// A sandbox in which memory is held.
    fn sandbox<'a>(&'a self, name: &'a str) -> Held<'a> {
        self.ok(&["sandbox", "create", "box", "--name", name]);
        let exec = self.ok(&["exec", "-d", name, "--", "python3", "-c", HOLDER]);
        let printed = || self.ok(&["sandbox", "logs", name, exec.trim()]);
        wait_until("it holds its memory", || printed().ends_with('\n'));
        Held { node: self, name, holds: printed().trim().to_owned() }
    }
}

fn bytes(mebibytes: &str) -> u64 {
    mebibytes.trim_end_matches("MiB").parse::<u64>().unwrap() << 20
}

struct Held<'a> {
    node: &'a Node,
    name: &'a str,
    holds: String,
}

impl Held<'_> {
    fn show(&self) -> Value {
        serde_json::from_str(&self.node.ok(&["sandbox", "show", self.name, "--json"])).unwrap()
    }

    fn state(&self) -> String {
        self.show()["state"].as_str().expect("a state").to_owned()
    }

    #[track_caller]
    fn pause(&self) {
        self.node.ok(&["sandbox", "pause", self.name]);
    }

    #[track_caller]
    fn wait_for(&self, state: &str) {
        wait_until(&format!("{} is {state}", self.name), || self.state() == state);
    }

    /// Its program runs, and has what it had.
    #[track_caller]
    fn check(&self) {
        self.check_in(self.name);
    }

    #[track_caller]
    fn check_in(&self, name: &str) {
        let answer = self.node.ok(&["exec", name, "--", "sh", "-c", ASK]);
        assert_eq!(answer, self.holds, "{}", self.node.daemon.log());
    }
}

fn times_kept(log: &str) -> usize {
    log.matches("stays paused and keeps its memory").count()
}

#[test]
fn a_pause_is_answered_before_the_memory_is_written() {
    let node = Node::start("answered");
    let one = node.sandbox("one");
    node.slow_down();
    one.pause();
    assert_eq!(one.state(), "paused");
    // Another pause changes nothing.
    one.pause();
    assert_eq!(one.state(), "paused");
    assert!(node.ok(&["ps"]).contains("paused"));
    node.speed_up();
    one.wait_for("hibernated");
    one.pause();
    one.check();
}

#[test]
fn what_wakes_a_paused_sandbox_ends_the_writing() {
    let node = Node::start("woken");
    let one = node.sandbox("one");
    node.slow_down();
    one.pause();
    node.ok(&["sandbox", "resume", "one"]);
    assert_eq!(one.state(), "idle");
    one.check();
    // Without a word, too: by what is wanted of it.
    one.pause();
    assert_eq!(one.state(), "paused");
    one.check();
    one.pause();
    node.ok(&["sandbox", "fork", "one", "--name", "two"]);
    one.check_in("two");
    one.check();
    // What was begun then is of no use, and does it no harm.
    node.speed_up();
    one.check();
    one.pause();
    one.wait_for("hibernated");
    one.check();
}

/// Whoever writes is interrupted in the middle, again and again, and serves others afterwards.
#[test]
fn a_sandbox_is_resumed_while_it_is_being_written() {
    let node = Node::start("interrupted");
    let one = node.sandbox("one");
    let mut interrupted = 0;
    for round in 0..40 {
        if interrupted == 5 {
            break;
        }
        one.pause();
        // On a busy machine it may be written before anybody looks.
        interrupted += usize::from(one.state() == "paused");
        node.ok(&["sandbox", "resume", "one"]);
        let copy = format!("copy-{round}");
        node.ok(&["sandbox", "fork", "one", "--name", &copy]);
        one.check_in(&copy);
        node.ok(&["sandbox", "kill", &copy]);
    }
    assert!(interrupted > 0, "it was written each time before it was resumed");
    one.check();
    one.pause();
    one.wait_for("hibernated");
    one.check();
}

/// It says that it is awake only when it waits.
#[test]
fn a_sandbox_is_paused_again_before_it_has_said_that_it_is_awake() {
    let node = Node::start("again");
    let one = node.sandbox("one");
    for _ in 0..3 {
        node.slow_down();
        one.pause();
        node.ok(&["sandbox", "resume", "one"]);
        one.pause();
        assert_eq!(one.state(), "paused");
        node.speed_up();
        one.wait_for("hibernated");
        node.ok(&["sandbox", "resume", "one"]);
        one.pause();
        one.wait_for("hibernated");
    }
    one.check();
}

#[test]
fn a_pause_waits_for_what_computes_in_a_paused_sandbox() {
    let node = Node::start("computes");
    let one = node.sandbox("one");
    let has_computed = || {
        let found = node.ok(&["exec", "one", "--", "sh", "-c", "[ -e /tmp/done ] && echo done"]);
        node.ok(&["exec", "one", "--", "rm", "/tmp/done"]);
        found == "done\n"
    };
    // Before its memory is written, and after that.
    for state in ["paused", "hibernated"] {
        if state == "paused" {
            node.slow_down();
        }
        one.pause();
        one.wait_for(state);
        node.ok(&["exec", "-d", "one", "--", "python3", "-c", COMPUTE_AWHILE]);
        one.pause();
        assert!(has_computed(), "the pause of one that is {state} was answered while it ran");
        if state == "paused" {
            node.speed_up();
        }
    }
    one.pause();
    one.wait_for("hibernated");
    one.check();
}

#[test]
fn a_pause_that_is_withdrawn_leaves_nothing_behind() {
    let node = Node::start("withdrawn");
    let one = node.sandbox("one");
    node.ok(&["exec", "-d", "one", "--", "python3", "-c", COMPUTE]);
    let refused = std::thread::scope(|scope| {
        let pause = scope.spawn(|| node.call(&["sandbox", "pause", "one"]));
        while !pause.is_finished() {
            node.ok(&["sandbox", "resume", "one"]);
        }
        pause.join().unwrap()
    });
    assert!(refused.stderr.contains("told to go on"), "{refused:?}");
    assert_eq!(one.state(), "idle");
    node.ok(&["exec", "one", "--", "sh", "-c", "echo > /tmp/stop"]);
    one.pause();
    one.wait_for("hibernated");
    one.check();
}

/// Takes a minute: whoever waits for its memory loses patience.
#[test]
fn a_paused_sandbox_stays_so_if_its_memory_takes_too_long() {
    let node = Node::start("patience");
    let one = node.sandbox("one");
    node.slow_down();
    one.pause();
    let instance = one.show()["instance"].to_string();
    let late = node.call(&["hibernate", "box", "--instance", &instance]);
    assert!(late.stderr.contains("still being written"), "{late:?}");
    assert_eq!(one.state(), "paused");
    node.speed_up();
    one.wait_for("hibernated");
    one.check();
}

#[test]
fn a_sandbox_whose_memory_finds_no_room_stays_paused_with_it() {
    let node = Node::start("kept");
    node.bound_swap("1MiB");
    let one = node.sandbox("one");
    one.pause();
    wait_until("it is said why", || one.show()["memory_kept"].is_string());
    assert_eq!(one.state(), "paused");
    let shown = node.ok(&["sandbox", "show", "one"]);
    assert!(shown.contains("keeps its memory, which could not be written"), "{shown}");
    wait_until("the log says so", || times_kept(&node.daemon.log()) == 1);
    if has_controller("memory") && has_controller("cpu") {
        // Limits are changed of one that rests.
        node.ok(&["sandbox", "limits", "one", "--cpus", "1"]);
        assert_eq!(one.state(), "paused");
    }
    one.check();
    wait_until("it runs, and nothing is said of it", || {
        let shown = one.show();
        shown["state"] == "idle" && shown["memory_kept"].is_null()
    });

    one.pause();
    wait_until("it is said why", || one.show()["memory_kept"].is_string());
    let instance = one.show()["instance"].to_string();
    let refused = node.call(&["hibernate", "box", "--instance", &instance]);
    assert!(refused.stderr.contains("swap"), "{refused:?}");
    assert_eq!(one.state(), "paused");
    node.bound_swap("512MiB");
    // Whoever waits for its memory to be given back does not wait for the next attempt.
    node.ok(&["hibernate", "box", "--instance", &instance]);
    assert_eq!(one.state(), "hibernated");
    assert!(one.show()["memory_kept"].is_null());
    one.check();
    node.ok(&["sandbox", "kill", "one"]);
    wait_until("it has ended", || node.daemon.instances("box").is_empty());
}

#[test]
fn a_paused_sandbox_ends_and_outlives_its_daemon() {
    if !rustix::process::geteuid().is_root() {
        return skip("only a daemon of root's has a monitor");
    }
    let mut node = Node::start("killed");
    let holds = {
        let (one, two) = (node.sandbox("one"), node.sandbox("two"));
        node.daemon.wait_until_kept("box");
        node.slow_down();
        one.pause();
        two.pause();
        node.ok(&["sandbox", "kill", "two"]);
        wait_until("it has ended", || node.daemon.instances("box").len() == 1);
        assert_eq!(one.state(), "paused");
        one.holds
    };
    node.daemon.kill_and_await_next();
    let one = Held { node: &node, name: "one", holds };
    one.check();
    node.speed_up();
    one.pause();
    one.wait_for("hibernated");
    one.check();
}

#[test]
fn a_new_sandbox_outlives_its_daemon_at_once() {
    if !rustix::process::geteuid().is_root() {
        return skip("only a daemon of root's has a monitor");
    }
    let mut node = Node::start("new");
    for round in 0..3 {
        let name = format!("new-{round}");
        node.ok(&["sandbox", "create", "box", "--name", &name]);
        node.ok(&["exec", &name, "--", "sh", "-c", "echo kept > /tmp/file"]);
        node.daemon.kill_and_await_next();
        assert_eq!(node.ok(&["exec", &name, "--", "cat", "/tmp/file"]), "kept\n");
    }
}

/// Nobody else is written while the disk is slow, and nobody is lost.
#[test]
fn many_are_paused_at_once() {
    let node = Node::start("many");
    let names = ["a", "b", "c", "d", "e"];
    let all: Vec<_> = names.iter().map(|name| node.sandbox(name)).collect();
    node.slow_down();
    all.iter().for_each(Held::pause);
    assert!(all.iter().all(|one| one.state() == "paused"));
    all[4].check();
    node.speed_up();
    all[..4].iter().for_each(|one| one.wait_for("hibernated"));
    all.iter().for_each(Held::check);
}
