//! `thaw run --name` and `-d`: programs of images in sandboxes that the daemon holds.

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use thaw_e2e::{
    Daemon, DaemonOptions, Outcome, Workshop, built_home, call, free_port, ok,
    pause_until_hibernated, request, run_with_input, thaw, wait_until,
};

/// A home with the image `app`.
fn home(label: &str) -> PathBuf {
    let workshop = Workshop::new();
    workshop.build("app:1");
    let home = built_home(label, &[]);
    workshop.import("app:1", &home, "app");
    home
}

fn thaw_in(home: &Path, arguments: &[&str]) -> Command {
    let mut thaw = thaw();
    thaw.args(arguments).env("THAW_HOME", home);
    thaw
}

/// Runs a shell's script in a sandbox of that name.
fn named(home: &Path, name: &str, script: &str, input: &str) -> Outcome {
    let arguments = ["run", "--name", name, "app", "--", "sh", "-c", script];
    run_with_input(&mut thaw_in(home, &arguments), input.as_bytes())
}

fn json(home: &Path, arguments: &[&str]) -> Value {
    serde_json::from_str(&ok(home, arguments)).expect("JSON")
}

/// A sandbox as it is shown.
fn shown(home: &Path, name: &str) -> Value {
    json(home, &["sandbox", "show", name, "--json"])
}

/// The names of all sandboxes.
fn names(home: &Path) -> Vec<String> {
    let listed = json(home, &["sandbox", "list", "--json"]);
    listed
        .as_array()
        .expect("a list")
        .iter()
        .map(|one| one["name"].as_str().expect("a name").to_owned())
        .collect()
}

/// A client that stays with a program, which has printed `ready`.
fn stay(home: &Path, name: &str, script: &str) -> Child {
    stay_with(home, name, &format!("echo ready; {script}"))
}

/// The same with a program that prints it itself.
fn stay_with(home: &Path, name: &str, script: &str) -> Child {
    let mut thaw = thaw_in(home, &["run", "--name", name, "app", "--", "sh", "-c", script]);
    thaw.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut client = thaw.spawn().expect("thaw");
    let mut line = String::new();
    BufReader::new(client.stdout.as_mut().expect("piped")).read_line(&mut line).expect("a line");
    assert_eq!(line, "ready\n");
    client
}

fn tell(client: &Child, signal: Signal) {
    kill_process(Pid::from_child(client), signal).expect("it runs");
}

#[test]
fn a_program_with_a_name_runs_as_one_without_and_leaves_nothing() {
    let home = home("named-as-without");
    let refused = call(&home, &["run", "--name", "one", "app"]).refusal();
    assert!(refused.contains("start one with `thaw serve`, or run the program without --name"));
    let _daemon = Daemon::start(&home, &DaemonOptions::default());

    assert_eq!(ok(&home, &["run", "app"]), "uid=1000(app) gid=50\n");
    assert_eq!(ok(&home, &["run", "--name", "one", "app"]), "uid=1000(app) gid=50\n");
    assert!(names(&home).is_empty());
    let env = ["run", "--rm", "--name", "one", "-e", "SIZE=large", "app", "--", "env"];
    let env = ok(&home, &env);
    for variable in ["COLOUR=blue", "SIZE=large", "HOME=/srv", "LANG=C.UTF-8"] {
        assert!(env.lines().any(|line| line == variable), "{env}");
    }
    let other = ["-u", "5:6", "-w", "/tmp", "--memory", "300MiB", "--entrypoint", "/bin/busybox"];
    let script = "id -u; id -g; pwd; head -1 /proc/meminfo; wc -c < /large";
    let other = [&["run", "--name", "one"], &other[..], &["app", "--", "sh", "-c", script]];
    let other = ok(&home, &other.concat());
    assert_eq!(other, "5\n6\n/tmp\nMemTotal:         307200 kB\n4000000\n");

    let outcome = named(&home, "one", "cat; echo complaint >&2; exit 7", "typed");
    assert_eq!((outcome.stdout.as_str(), outcome.stderr.as_str()), ("typed", "complaint\n"));
    assert_eq!(outcome.code, Some(7));
    assert_eq!(named(&home, "one", "kill -9 $$", "").code, Some(137));
    // What it has started ends with it.
    assert_eq!(named(&home, "one", "sleep 1000 & echo started", "").success(), "started\n");
    assert!(names(&home).is_empty());

    let missing = ["run", "--name", "one", "--entrypoint", "/bin/missing", "app"];
    let missing = call(&home, &missing);
    assert_eq!(missing.code, Some(127), "{missing:?}");
    assert!(missing.stderr.contains("does not exist in the sandbox"), "{missing:?}");
    assert!(names(&home).is_empty());
    let terminal = ok(&home, &["run", "-it", "--name", "one", "app", "--", "tty"]);
    assert_eq!(terminal, "/dev/pts/0\r\n");

    let function = json(&home, &["list", "--json"]);
    let function = function[0]["name"].as_str().expect("a function").to_owned();
    let refused = call(&home, &["run", "--name", "one", &function]).refusal();
    assert!(refused.contains("is a function and no image"), "{refused}");
}

/// Counts in a file, and prints nothing: what it prints would not go on in a copy.
const COUNT: &str = "n=0; while :; do n=$((n+1)); echo $n > /tmp/n; sleep 0.02; done";

#[test]
fn a_running_program_with_a_name_is_reached_paused_and_copied() {
    let home = home("named-copied");
    let _daemon = Daemon::start(&home, &DaemonOptions::default());
    let mut client = stay(&home, "one", COUNT);
    let taken = named(&home, "one", "true", "");
    assert!(taken.stderr.contains("there is a sandbox `one` already"), "{taken:?}");

    let count = |name: &str| {
        // The program may not have begun to count.
        let said = call(&home, &["exec", name, "--", "/bin/busybox", "cat", "/tmp/n"]).stdout;
        said.trim().parse::<u64>().unwrap_or(0)
    };
    let counts = |name: &str| {
        let before = count(name);
        wait_until(&format!("{name} counts on"), || count(name) > before);
    };
    counts("one");
    pause_until_hibernated(&home, "one");
    counts("one");
    ok(&home, &["sandbox", "fork", "one", "--name", "two"]);
    ok(&home, &["sandbox", "checkpoint", "one", "then"]);
    ok(&home, &["sandbox", "create", "--checkpoint", "then", "--name", "three"]);
    ["one", "two", "three"].into_iter().for_each(counts);

    tell(&client, Signal::TERM);
    assert_eq!(client.wait().expect("it ends").code(), Some(143));
    let mut left = names(&home);
    left.sort();
    assert_eq!(left, ["three", "two"]);
    ["two", "three"].into_iter().for_each(counts);
}

#[test]
fn a_sandbox_with_a_name_ends_with_the_client_that_stays() {
    let home = home("named-clients");
    let _daemon = Daemon::start(&home, &DaemonOptions::default());
    let mut client = stay(&home, "one", "sleep 1000");
    client.kill().expect("it runs");
    client.wait().expect("it ends");
    wait_until("its sandbox has ended", || names(&home).is_empty());

    let script = "trap 'echo told > /tmp/told' INT; echo ready; while :; do sleep 0.1; done";
    let mut client = stay_with(&home, "one", script);
    tell(&client, Signal::INT);
    let told = ["exec", "one", "--", "/bin/busybox", "cat", "/tmp/told"];
    wait_until("the program has heard it", || call(&home, &told).stdout == "told\n");
    tell(&client, Signal::INT);
    assert_eq!(client.wait().expect("it ends").code(), Some(130));
    let mut said = String::new();
    client.stderr.take().expect("piped").read_to_string(&mut said).expect("text");
    assert_eq!(said, "thaw: the sandbox ends\n");
    wait_until("its sandbox has ended", || names(&home).is_empty());

    let mut client = stay(&home, "one", "sleep 1000");
    ok(&home, &["sandbox", "kill", "one"]);
    assert_eq!(client.wait().expect("it ends").code(), Some(137));
}

#[test]
fn a_sandbox_with_a_name_is_the_next_daemons_if_the_daemon_is_killed() {
    let home = home("named-daemon");
    let mut daemon = Daemon::start(&home, &DaemonOptions::default());
    let mut client = stay(&home, "one", COUNT);
    daemon.wait_until_kept(shown(&home, "one")["function"].as_str().expect("a name"));
    daemon.kill_and_await_next();
    assert_eq!(client.wait().expect("it ends").code(), Some(1));
    let mut said = String::new();
    client.stderr.take().expect("piped").read_to_string(&mut said).expect("text");
    assert!(said.contains("the connection to the daemon has ended"), "{said}");
    let count = ["exec", "one", "--", "/bin/busybox", "cat", "/tmp/n"];
    let before = ok(&home, &count);
    wait_until("it counts on", || ok(&home, &count) != before);
    ok(&home, &["sandbox", "kill", "one"]);
    assert!(names(&home).is_empty());
}

#[test]
fn a_detached_program_goes_on_alone_and_its_sandbox_ends_with_it() {
    let home = home("named-detached");
    let _daemon = Daemon::start(&home, &DaemonOptions::default());
    let script = "echo ready; read line; echo heard $line; exit 3";
    let detached = ["run", "-di", "--name", "one", "app", "--", "sh", "-c", script];
    assert_eq!(ok(&home, &detached), "one\n");
    assert_eq!(names(&home), ["one"]);
    let shown = shown(&home, "one");
    assert!(shown["timeout_s"].is_null() && shown["deadline_ms"].is_null(), "{shown}");
    // What is started besides is another matter.
    let beside = ["exec", "one", "--", "/bin/busybox", "echo", "beside"];
    assert_eq!(ok(&home, &beside), "beside\n");
    wait_until("it has begun", || ok(&home, &["sandbox", "logs", "one"]) == "ready\n");
    let mut attach = thaw_in(&home, &["sandbox", "attach", "one"]);
    let attached = run_with_input(&mut attach, b"words\n");
    assert_eq!((attached.stdout.as_str(), attached.code), ("ready\nheard words\n", Some(3)));
    wait_until("its sandbox has ended", || names(&home).is_empty());

    let made_up = ok(&home, &["run", "-d", "app", "--", "sleep", "1000"]);
    assert_eq!(names(&home), [made_up.trim()]);
    ok(&home, &["sandbox", "kill", made_up.trim()]);
}

#[test]
fn published_ports_of_a_program_with_a_name_lead_to_it() {
    let home = home("named-ports");
    let _daemon = Daemon::start(&home, &DaemonOptions::default());
    let port = free_port();
    let publish = format!("{port}:7000");
    let server = ["httpd", "-f", "-p", "7000", "-h", "/etc"];
    let start = ["run", "--name", "one", "--publish", &publish, "app", "--"];
    let mut server = thaw_in(&home, &[&start[..], &server].concat());
    let mut client = server.stdin(Stdio::null()).stderr(Stdio::null()).spawn().expect("thaw");
    let address = format!("127.0.0.1:{port}").parse().expect("an address");
    let answer = || request(address, "one", "/passwd", None).ok();
    wait_until("it answers", || answer().is_some_and(|got| got.text().contains("app:x:1000")));
    tell(&client, Signal::TERM);
    assert_eq!(client.wait().expect("it ends").code(), Some(143));
}
