//! Processes from outside go on in copies of their sandbox, with their streams and terminals.

use serde_json::Value;
use std::io::{BufRead, BufReader, Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Stdio};
use thaw_e2e::{
    Daemon, DaemonOptions, Workshop, built_home, call, home_with_box, ok, run_with_input, thaw,
    wait_until,
};

fn home(label: &str) -> PathBuf {
    home_with(label, "")
}

/// The same with more limits.
fn home_with(label: &str, limits: &str) -> PathBuf {
    home_with_box(label, &[], &["sh", "cat", "sleep", "true"], limits)
}

/// A client that stays with a process, which has printed `ready`.
struct Client {
    child: Child,
    input: Option<ChildStdin>,
    output: BufReader<ChildStdout>,
}

impl Client {
    fn start(home: &Path, arguments: &[&str]) -> Self {
        let mut thaw = thaw();
        thaw.args(arguments).env("THAW_HOME", home);
        let mut child = thaw.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("thaw");
        let input = child.stdin.take();
        let output = BufReader::new(child.stdout.take().expect("piped"));
        let mut client = Self { child, input, output };
        assert_eq!(client.line(), "ready");
        client
    }

    fn line(&mut self) -> String {
        let mut line = String::new();
        self.output.read_line(&mut line).expect("a line");
        line.trim_end().to_owned()
    }

    fn say(&mut self, text: &str) {
        self.input.as_mut().expect("it is open").write_all(text.as_bytes()).expect("it reads");
    }

    /// Ends its input; what comes then, and how it ends.
    fn end(mut self) -> (String, Option<i32>) {
        self.input = None;
        let mut rest = String::new();
        self.output.read_to_string(&mut rest).expect("text");
        (rest, self.child.wait().expect("it ends").code())
    }
}

/// Counts for ever.
const COUNT: &str = "n=0; while :; do n=$((n+1)); echo n$n; sleep 0.05; done";
/// Answers each line.
const ANSWER: &str = "echo ready; while read line; do echo got $line; done; echo end; exit 5";

/// The processes of a sandbox that run.
fn processes(home: &Path, sandbox: &str) -> Vec<Value> {
    let listed = ok(home, &["sandbox", "logs", sandbox, "--list", "--json"]);
    let all: Vec<Value> = serde_json::from_str(&listed).expect("JSON");
    all.into_iter().filter(|one| one["state"] == "running").collect()
}

/// The number of the process with such a terminal whose arguments contain a text.
fn number_of(home: &Path, sandbox: &str, part: &str, terminal: bool) -> String {
    let listed = processes(home, sandbox);
    let is_it =
        |one: &&Value| one["argv"].to_string().contains(part) && one["terminal"] == terminal;
    let found: Vec<_> = listed.iter().filter(is_it).collect();
    assert!(found.len() == 1, "{listed:?}");
    found[0]["id"].to_string()
}

/// The numbers that a counting process has printed, which follow one another.
fn counted(home: &Path, sandbox: &str, number: &str) -> Vec<u64> {
    let printed = ok(home, &["sandbox", "logs", sandbox, number]);
    let counted: Vec<u64> =
        printed.lines().map(|line| line[1..].parse().expect("a number")).collect();
    assert!(counted.windows(2).all(|two| two[1] == two[0] + 1), "{printed}");
    counted
}

fn counts_on(home: &Path, sandbox: &str, number: &str) {
    let before = counted(home, sandbox, number).len();
    wait_until("it counts on", || counted(home, sandbox, number).len() > before + 2);
}

fn attached(home: &Path, sandbox: &str, number: &str, input: &str) -> (String, Option<i32>) {
    let mut attach = thaw();
    attach.args(["sandbox", "attach", sandbox, number]).env("THAW_HOME", home);
    let attached = run_with_input(&mut attach, input.as_bytes());
    (attached.stdout, attached.code)
}

#[test]
fn streams_and_terminals_go_on_in_copies_and_copies_of_copies() {
    let home = home("going-on");
    let _daemon = Daemon::start(&home, &DaemonOptions::default());
    ok(&home, &["sandbox", "create", "box", "--name", "one"]);
    let count = ok(&home, &["exec", "-d", "one", "--", "sh", "-c", COUNT]).trim().to_owned();
    let mut client = Client::start(&home, &["exec", "-i", "one", "--", "sh", "-c", ANSWER]);
    let mut typist = Client::start(&home, &["exec", "-it", "one", "--", "sh", "-c", ANSWER]);
    wait_until("it counts", || counted(&home, "one", &count).len() > 2);
    client.say("one\n");
    assert_eq!(client.line(), "got one");
    ok(&home, &["sandbox", "fork", "one", "--name", "two"]);
    ok(&home, &["sandbox", "fork", "two", "--name", "three"]);
    for copy in ["three", "two"] {
        assert_eq!(processes(&home, copy).len(), 3);
        let count = number_of(&home, copy, "sleep", false);
        counts_on(&home, copy, &count);
        assert!(counted(&home, copy, &count)[0] > 1, "it does not begin anew");
        let answer = number_of(&home, copy, "ready", false);
        let (said, code) = attached(&home, copy, &answer, "a\nb\n");
        assert_eq!((said.as_str(), code), ("got a\ngot b\nend\n", Some(5)));
        let terminal = number_of(&home, copy, "ready", true);
        let (said, code) = attached(&home, copy, &terminal, "c\n\x04");
        assert_eq!((said.as_str(), code), ("c\r\ngot c\r\nend\r\n", Some(5)));
        counts_on(&home, copy, &count);
    }
    // The original has noticed nothing.
    counts_on(&home, "one", &count);
    client.say("two\n");
    assert_eq!(client.line(), "got two");
    assert_eq!(client.end(), ("end\n".to_owned(), Some(5)));
    typist.say("three\n");
    assert_eq!([typist.line(), typist.line()], ["three", "got three"]);
}

#[test]
fn streams_go_on_in_what_is_made_of_a_checkpoint_also_by_the_next_daemon() {
    let home = home("going-on-checkpoint");
    let mut daemon = Daemon::start(&home, &DaemonOptions::default());
    ok(&home, &["sandbox", "create", "box", "--name", "one"]);
    let secret = format!("{COUNT} # secret");
    let count = ok(&home, &["exec", "-d", "one", "--", "sh", "-c", &secret]).trim().to_owned();
    let client = Client::start(&home, &["exec", "-i", "one", "--", "sh", "-c", ANSWER]);
    wait_until("it counts", || counted(&home, "one", &count).len() > 2);
    ok(&home, &["sandbox", "checkpoint", "one", "then"]);
    assert_eq!(client.end(), ("end\n".to_owned(), Some(5)));
    let check = |sandbox: &str| {
        let numbers: Vec<_> =
            processes(&home, sandbox).iter().map(|one| one["id"].to_string()).collect();
        let [count, answer] = &numbers[..] else { panic!("{numbers:?}") };
        counts_on(&home, sandbox, count);
        let (said, code) = attached(&home, sandbox, answer, "a\n");
        assert_eq!((said.as_str(), code), ("got a\nend\n", Some(5)));
        // What lies on disk names programs without their arguments.
        let listed = ok(&home, &["sandbox", "logs", sandbox, "--list", "--json"]);
        assert!(listed.contains("\"sh\"") && !listed.contains("secret"), "{listed}");
    };
    ok(&home, &["sandbox", "create", "--checkpoint", "then", "--name", "two"]);
    check("two");
    daemon.kill_and_await_next();
    ok(&home, &["sandbox", "create", "--checkpoint", "then", "--name", "three"]);
    check("three");
    let restored: Value = serde_json::from_str(&ok(&home, &["restore", "then", "--json"])).unwrap();
    check(&restored["ids"][0].to_string());
}

/// Makes a sandbox with a process that counts, one that answers, and one with a terminal.
fn make(home: &Path, sandbox: &str) -> [String; 3] {
    ok(home, &["sandbox", "create", "box", "--name", sandbox]);
    let start = |options, script| {
        ok(home, &["exec", options, sandbox, "--", "sh", "-c", script]).trim().to_owned()
    };
    let all = [start("-d", COUNT), start("-di", ANSWER), start("-dt", ANSWER)];
    wait_until("it counts", || counted(home, sandbox, &all[0]).len() > 2);
    all
}

fn instance_of(home: &Path, sandbox: &str) -> String {
    let shown = ok(home, &["sandbox", "show", sandbox, "--json"]);
    serde_json::from_str::<Value>(&shown).expect("JSON")["instance"].to_string()
}

fn state_of(home: &Path, sandbox: &str) -> String {
    let shown = ok(home, &["sandbox", "show", sandbox, "--json"]);
    let shown = serde_json::from_str::<Value>(&shown).expect("JSON");
    shown["state"].as_str().expect("a state").to_owned()
}

/// Puts a sandbox to sleep, as soon as it has read what it was told.
fn put_to_sleep(home: &Path, sandbox: &str) {
    let instance = instance_of(home, sandbox);
    wait_until("it sleeps", || {
        call(home, &["sleep", "box", "--instance", &instance]).code == Some(0)
    });
    assert_eq!(state_of(home, sandbox), "asleep");
}

#[test]
fn streams_and_terminals_go_on_after_a_sleep_and_nothing_that_was_printed_is_lost() {
    let home = home("going-on-asleep");
    let _daemon = Daemon::start(&home, &DaemonOptions::default());
    let [count, answer, terminal] = make(&home, "one");
    for _ in 0..3 {
        let before = counted(&home, "one", &count).len();
        put_to_sleep(&home, "one");
        // To look at it wakes nobody.
        assert_eq!(processes(&home, "one").len(), 3);
        assert!(counted(&home, "one", &count).len() >= before);
        assert_eq!(state_of(&home, "one"), "asleep");
        ok(&home, &["exec", "one", "--", "true"]);
        counts_on(&home, "one", &count);
        assert_eq!(counted(&home, "one", &count)[0], 1, "all is kept");
    }
    // Whoever attaches wakes it.
    put_to_sleep(&home, "one");
    let (said, code) = attached(&home, "one", &answer, "a\nb\n");
    assert_eq!((said.as_str(), code), ("ready\ngot a\ngot b\nend\n", Some(5)));
    put_to_sleep(&home, "one");
    let (said, code) = attached(&home, "one", &terminal, "c\n\x04");
    assert_eq!((said.as_str(), code), ("ready\r\nc\r\ngot c\r\nend\r\n", Some(5)));
    // A client that is attached keeps it awake.
    let client = Client::start(&home, &["exec", "-i", "one", "--", "sh", "-c", ANSWER]);
    let asleep = call(&home, &["sleep", "box", "--instance", &instance_of(&home, "one")]);
    assert!(asleep.stderr.contains("somebody is connected"), "{asleep:?}");
    assert_eq!(client.end(), ("end\n".to_owned(), Some(5)));
    // A copy of one that sleeps has its processes, too.
    put_to_sleep(&home, "one");
    ok(&home, &["sandbox", "fork", "one", "--name", "two"]);
    counts_on(&home, "two", &number_of(&home, "two", "sleep", false));
    counts_on(&home, "one", &count);
}

#[test]
fn processes_of_sleepers_go_on_under_the_next_daemon() {
    let home = home("going-on-next");
    let mut daemon = Daemon::start(&home, &DaemonOptions::default());
    let [count, answer, terminal] = make(&home, "one");
    for round in ["killed", "stopped", "stopped while it is awake"] {
        if round != "stopped while it is awake" {
            put_to_sleep(&home, "one");
        }
        match round {
            "killed" => daemon.kill_and_await_next(),
            _ => {
                assert_eq!(daemon.stop(), Some(0));
                daemon = Daemon::start(&home, &DaemonOptions::default());
            }
        }
        assert_eq!(state_of(&home, "one"), "asleep", "{round}");
        assert_eq!(processes(&home, "one").len(), 3, "{round}");
        ok(&home, &["exec", "one", "--", "true"]);
        counts_on(&home, "one", &count);
    }
    let (said, code) = attached(&home, "one", &answer, "a\n");
    assert_eq!((said.as_str(), code), ("got a\nend\n", Some(5)));
    let (said, code) = attached(&home, "one", &terminal, "c\n\x04");
    assert_eq!((said.as_str(), code), ("c\r\ngot c\r\nend\r\n", Some(5)));
}

#[test]
fn a_detached_program_of_an_image_goes_on_under_the_next_daemon_and_its_sandbox_ends_with_it() {
    let workshop = Workshop::new();
    workshop.build("app:1");
    let home = built_home("going-on-detached", &[]);
    workshop.import("app:1", &home, "app");
    let mut daemon = Daemon::start(&home, &DaemonOptions::default());
    let script = "n=0; while [ ! -e /tmp/end ]; do n=$((n+1)); echo n$n; sleep 0.05; done";
    ok(&home, &["run", "-d", "--name", "one", "app", "--", "sh", "-c", script]);
    for _ in 0..2 {
        let number = processes(&home, "one")[0]["id"].to_string();
        wait_until("it counts", || counted(&home, "one", &number).len() > 2);
        assert_eq!(daemon.stop(), Some(0));
        daemon = Daemon::start(&home, &DaemonOptions::default());
        assert_eq!(processes(&home, "one")[0]["id"].to_string(), number);
        assert_eq!(state_of(&home, "one"), "asleep");
        ok(&home, &["exec", "one", "--", "/bin/busybox", "true"]);
        counts_on(&home, "one", &number);
    }
    ok(&home, &["exec", "one", "--", "/bin/busybox", "touch", "/tmp/end"]);
    wait_until("it has ended", || call(&home, &["sandbox", "show", "one"]).code != Some(0));
}

/// A process has read one line, and not the next one; its client has gone.
fn leave_unread(home: &Path, is_closed: bool) -> String {
    let script =
        format!("read line; echo ready; while [ ! -e /tmp/{is_closed} ]; do sleep 0.05; done; cat");
    let number = ok(home, &["exec", "-di", "one", "--", "sh", "-c", &script]).trim().to_owned();
    let mut attach = thaw();
    attach.args(["sandbox", "attach", "one", &number]).env("THAW_HOME", home);
    let mut client = attach.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("thaw");
    // What is typed at once is passed on at once, and the shell reads a byte at a time.
    let mut input = client.stdin.take();
    input.as_mut().expect("piped").write_all(b"line\nkept\n").expect("it is read");
    input.take_if(|_| is_closed);
    let mut line = String::new();
    BufReader::new(client.stdout.as_mut().expect("piped")).read_line(&mut line).expect("a line");
    assert_eq!(line, "ready\n");
    let instance = instance_of(home, "one");
    let asleep = || call(home, &["sleep", "box", "--instance", &instance]);
    assert!(asleep().stderr.contains("somebody is connected"));
    // The client goes, and what it has typed lies unread in the socket.
    client.kill().expect("it runs");
    client.wait().expect("it has ended");
    for _ in 0..5 {
        assert!(asleep().stderr.contains("has not read its input"));
    }
    number
}

#[test]
fn what_a_sandbox_has_not_read_keeps_it_awake() {
    let home = home("going-on-unread");
    let _daemon = Daemon::start(&home, &DaemonOptions::default());
    ok(&home, &["sandbox", "create", "box", "--name", "one"]);
    for is_closed in [true, false] {
        let number = leave_unread(&home, is_closed);
        ok(&home, &["exec", "one", "--", "sh", "-c", &format!("> /tmp/{is_closed}")]);
        wait_until("it reads", || {
            ok(&home, &["sandbox", "logs", "one", &number]) == "ready\nkept\n"
        });
        put_to_sleep(&home, "one");
        ok(&home, &["exec", "one", "--", "true"]);
        if !is_closed {
            let (said, _) = attached(&home, "one", &number, "more\n");
            assert_eq!(said, "ready\nkept\nmore\n");
        }
    }
}

#[test]
fn processes_at_work_are_not_put_to_sleep_unless_somebody_asks() {
    let home = home_with("going-on-at-work", "sleep_after = \"200ms\"");
    let _daemon = Daemon::start(&home, &DaemonOptions::default());
    ok(&home, &["sandbox", "create", "box", "--name", "one"]);
    let count = ok(&home, &["exec", "-d", "one", "--", "sh", "-c", COUNT]).trim().to_owned();
    wait_until("it works for some seconds", || counted(&home, "one", &count).len() > 80);
    // One that is paused sleeps by itself after that.
    ok(&home, &["sandbox", "pause", "one"]);
    wait_until("it sleeps", || state_of(&home, "one") == "asleep");
    ok(&home, &["exec", "one", "--", "true"]);
    counts_on(&home, "one", &count);
}

#[test]
fn a_copy_ends_with_the_program_that_its_original_is_there_for() {
    let workshop = Workshop::new();
    workshop.build("app:1");
    let home = built_home("going-on-named", &[]);
    workshop.import("app:1", &home, "app");
    let _daemon = Daemon::start(&home, &DaemonOptions::default());
    let script = "echo ready; read line; echo got $line; exit 7";
    let client =
        Client::start(&home, &["run", "-i", "--name", "one", "app", "--", "sh", "-c", script]);
    ok(&home, &["sandbox", "fork", "one", "--name", "two"]);
    ok(&home, &["sandbox", "checkpoint", "one", "then"]);
    ok(&home, &["sandbox", "create", "--checkpoint", "then", "--name", "three"]);
    for copy in ["two", "three"] {
        let mut attach = thaw();
        attach.args(["sandbox", "attach", copy]).env("THAW_HOME", &home);
        let said = run_with_input(&mut attach, b"x\n");
        assert_eq!((said.stdout.as_str(), said.code), ("got x\n", Some(7)));
        wait_until("it has ended", || call(&home, &["sandbox", "show", copy]).code != Some(0));
    }
    assert!(ok(&home, &["sandbox", "show", "one"]).contains("one"));
    assert_eq!(client.end(), ("got\n".to_owned(), Some(7)));
}
