//! `thaw exec`, `thaw sandbox` and the files of sandboxes, through a daemon.

use rustix::process::{Pid, Signal, kill_process};
use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Stdio};
use std::thread;
use std::time::{Duration, Instant};
use thaw_e2e::{
    Daemon, DaemonOptions, Function, built_home, call, ok, pause_until_hibernated, run,
    run_with_input, thaw, wait_until,
};

/// A function without a program, with some programs of this host.
const BOX: &str = r#"
name = "box"
isolation = "instance"
persist = true
[entry]
kind = "sandbox"
[runtime]
kind = "python3"
programs = ["bash", "sh", "cat", "sleep", "ls", "id", "stty", "git"]
[limits]
instances = 50
"#;

/// A server with one process, which cannot have another.
const SINGLE: &str = "isolation = \"instance\"";

fn home(label: &str) -> PathBuf {
    let single = Function::Variant {
        example: "hello-python",
        name: "single",
        keys: SINGLE.into(),
        limits: "processes = 1",
    };
    let several = Function::Variant {
        example: "hello-python",
        name: "server",
        keys: SINGLE.into(),
        limits: "keep_alive = \"600s\"",
    };
    let home = built_home(label, &[single, several]);
    let directory = home.with_extension("box");
    fs::create_dir_all(&directory).unwrap();
    fs::write(directory.join("thaw.toml"), BOX).unwrap();
    run(thaw().arg("build").arg(&directory).env("THAW_HOME", &home)).success();
    home
}

/// Listens on two ports of the loopback: one answers each line in capitals, the other one ends at
/// once.
const LISTENER: &str = r"
import socket, threading
def echo(client):
    for line in client.makefile('rb'): client.sendall(line.upper())
    client.sendall(b'END'); client.close()
a = socket.create_server(('127.0.0.1', 7000)); b = socket.create_server(('::1', 7001), family=socket.AF_INET6)
def close():
    while True: b.accept()[0].close()
threading.Thread(target=close, daemon=True).start()
while True: threading.Thread(target=echo, args=(a.accept()[0],), daemon=True).start()
";

#[test]
fn ports_on_which_programs_listen_are_reached_also_in_a_paused_sandbox() {
    let home = home("exec-ports");
    let _daemon = Daemon::start(&home, &DaemonOptions::default());
    ok(&home, &["sandbox", "create", "box", "--name", "one"]);
    ok(&home, &["exec", "-d", "one", "--", "python3", "-c", LISTENER]);
    let stdio = |port: &str, input: &[u8]| {
        let mut thaw = thaw();
        thaw.args(["sandbox", "port", "one", port, "--stdio"]).env("THAW_HOME", &home);
        run_with_input(&mut thaw, input)
    };
    wait_until("it listens", || stdio("7001", b"").code == Some(0));
    assert_eq!(stdio("7000", b"one\ntwo\n").success(), "ONE\nTWO\nEND");
    pause_until_hibernated(&home, "one");
    assert_eq!(stdio("7000", b"awake\n").success(), "AWAKE\nEND");
    let closed = stdio("7002", b"");
    assert_eq!(closed.code, Some(1));
    assert!(closed.stderr.contains("nothing in the sandbox listens on port 7002"), "{closed:?}");
    let large = vec![b'x'; 3 << 20];
    assert_eq!(stdio("7000", &large).success().len(), large.len() + 3);
}

#[test]
fn connections_to_ports_of_a_sandbox_have_a_bound() {
    use std::io::{BufRead, BufReader, Read, Write};
    let home = home("exec-port-bound");
    let _daemon = Daemon::start(&home, &DaemonOptions::default());
    ok(&home, &["sandbox", "create", "box", "--name", "one"]);
    ok(&home, &["exec", "-d", "one", "--", "python3", "-c", LISTENER]);
    let mut forward = thaw()
        .args(["sandbox", "port", "one", "7000"])
        .env("THAW_HOME", &home)
        .stdout(std::process::Stdio::piped())
        .stderr(std::process::Stdio::null())
        .spawn()
        .expect("thaw");
    let mut address = String::new();
    BufReader::new(forward.stdout.take().unwrap()).read_line(&mut address).unwrap();
    let connect = || {
        let mut client = std::net::TcpStream::connect(address.trim()).unwrap();
        client.write_all(b"x\n").unwrap();
        let mut answer = [0; 2];
        client.read_exact(&mut answer).map(|()| client)
    };
    wait_until("it listens", || connect().is_ok());
    wait_until("its place is given back", || {
        let held: Vec<_> = (0..256).map_while(|_| connect().ok()).collect();
        held.len() == 256 && connect().is_err()
    });
    wait_until("others are let in again", || connect().is_ok());
    forward.kill().expect("it runs");
    forward.wait().expect("it ends");
}

#[test]
fn a_port_is_passed_on_until_its_sandbox_or_its_daemon_has_ended() {
    let home = home("exec-port-end");
    let daemon = Daemon::start(&home, &DaemonOptions::default());
    let pass_on = |name: &str| {
        ok(&home, &["sandbox", "create", "box", "--name", name]);
        let mut command = thaw();
        command.args(["sandbox", "port", name, "7000"]).env("THAW_HOME", &home);
        command.stdout(std::process::Stdio::null()).stderr(std::process::Stdio::piped());
        command.spawn().expect("thaw")
    };
    let said = |passing: std::process::Child| {
        let output = passing.wait_with_output().expect("it ends");
        assert_eq!(output.status.code(), Some(1));
        String::from_utf8(output.stderr).expect("text")
    };
    let (one, two) = (pass_on("one"), pass_on("two"));
    ok(&home, &["sandbox", "kill", "one"]);
    let of_one = said(one);
    assert!(of_one.contains("sandbox `one` has ended"), "{of_one}");
    assert_eq!(daemon.stop(), Some(0));
    let of_two = said(two);
    assert!(of_two.contains("the daemon of sandbox `two` has not answered"), "{of_two}");
    assert_eq!(of_two.lines().count(), 1, "{of_two}");
}

/// The host name that programs in a sandbox see, and where it leads.
fn host_name(home: &Path, sandbox: &str) -> (String, String) {
    let program = "import socket; n = socket.gethostname(); print(n, socket.gethostbyname(n))";
    let said = ok(home, &["exec", sandbox, "--", "python3", "-c", program]);
    let (name, address) = said.trim().split_once(' ').expect("two words");
    (name.to_owned(), address.to_owned())
}

#[test]
fn a_sandbox_has_its_own_name_as_its_host_name() {
    let home = home("exec-host-name");
    let mut daemon = Daemon::start(&home, &DaemonOptions::default());
    let own = "10.0.2.15".to_owned();
    let made = |name: &str| assert_eq!(host_name(&home, name), (name.into(), own.clone()));
    ok(&home, &["sandbox", "create", "box", "--name", "one"]);
    made("one");
    let unnamed = ok(&home, &["sandbox", "create", "box"]);
    made(unnamed.trim());
    ok(&home, &["sandbox", "fork", "one", "--name", "copy"]);
    made("copy");
    ok(&home, &["sandbox", "checkpoint", "one", "before"]);
    ok(&home, &["sandbox", "create", "--checkpoint", "before", "--name", "again"]);
    made("again");
    pause_until_hibernated(&home, "one");
    made("one");
    daemon.wait_until_kept("box");
    daemon.kill_and_await_next();
    made("one");
    // A copy of a server whose program was frozen, and an instance that serves requests.
    ok(&home, &["sandbox", "create", "server", "--name", "copy-of-server"]);
    made("copy-of-server");
    ok(&home, &["sandbox", "create", "single", "--name", "single-one"]);
    let read = ["sandbox", "cp", "single-one:/proc/sys/kernel/hostname", "-"];
    assert_eq!(ok(&home, &read), "single-one\n");
    let answer = ok(&home, &["invoke", "server", "/pid"]);
    assert!(answer.contains("\"hostname\": \"server\""), "{answer}");
}

#[test]
fn the_ports_of_a_sandbox_are_listed() {
    let home = home("exec-ports");
    let _daemon = Daemon::start(&home, &DaemonOptions::default());
    ok(&home, &["sandbox", "create", "box", "--name", "one"]);
    let list = || ok(&home, &["sandbox", "port", "one"]);
    assert_eq!(list(), "PORT  ADDRESS\n");
    ok(&home, &["exec", "-d", "one", "--", "python3", "-c", LISTENER]);
    wait_until("both listen", || list() == "PORT  ADDRESS\n7000  127.0.0.1\n7001  ::1\n");
    let json: serde_json::Value =
        serde_json::from_str(&ok(&home, &["sandbox", "port", "one", "--json"])).expect("JSON");
    assert_eq!(json[1], serde_json::json!({"port": 7001, "address": "::1"}));
    for wrong in [&["--stdio"][..], &["--listen", "8200"], &["7000", "--json"]] {
        let refused = call(&home, &[&["sandbox", "port", "one"], wrong].concat());
        assert_eq!(refused.code, Some(2), "{refused:?}");
    }
    let none = call(&home, &["sandbox", "port", "none"]);
    assert!(none.stderr.contains("no sandbox is named `none`"), "{none:?}");
}

#[test]
fn a_sandbox_runs_programs_keeps_files_is_copied_and_ends() {
    let home = home("exec-sandbox");
    let daemon = Daemon::start(&home, &DaemonOptions::default());
    assert_eq!(ok(&home, &["sandbox", "create", "box", "--name", "one"]), "one\n");
    let refused = call(&home, &["sandbox", "create", "box", "--name", "one"]);
    assert!(refused.stderr.contains("there is a sandbox `one` already"), "{refused:?}");

    // A slip is named before a registry is asked, which need not answer here.
    let slip = call(&home, &["sandbox", "create", "boxx"]);
    let said = "there is no function `boxx` here (is `box` meant?), and no container image of that name; looking";
    assert!(slip.code != Some(0) && slip.stderr.contains(said), "{slip:?}");
    // A sandbox has verbs of its own.
    let logs = call(&home, &["logs", "one"]);
    assert!(
        logs.stderr.contains("`one` is a sandbox, and no function; `thaw sandbox logs one`"),
        "{logs:?}"
    );
    let fork = call(&home, &["fork", "one"]);
    assert!(fork.code == Some(2) && fork.stderr.contains("`thaw sandbox fork`"), "{fork:?}");

    let script = "echo out; echo err >&2; exit 5";
    let outcome = call(&home, &["exec", "one", "--", "sh", "-c", script]);
    assert_eq!((outcome.stdout.as_str(), outcome.stderr.as_str()), ("out\n", "err\n"));
    assert_eq!(outcome.code, Some(5));
    let killed = call(&home, &["exec", "one", "--", "sh", "-c", "kill -9 $$"]);
    assert_eq!((killed.code, killed.stderr.as_str()), (Some(137), ""));
    let mut cat = thaw();
    cat.args(["exec", "-i", "one", "--", "cat"]).env("THAW_HOME", &home);
    let long = "line\n".repeat(200_000);
    assert!(run_with_input(&mut cat, long.as_bytes()).success() == long);
    let missing = call(&home, &["exec", "one", "--", "no-such-program"]);
    assert_eq!(missing.code, Some(127));
    assert!(
        missing.stderr.contains("no-such-program does not exist in the sandbox"),
        "{missing:?}"
    );
    let commits = "cd /tmp && git init -q r && cd r && git -c user.name=a -c user.email=b commit \
                   -q --allow-empty -m first && git log --format=%s";
    assert_eq!(ok(&home, &["exec", "one", "--", "sh", "-c", commits]), "first\n");
    let python = "print(sum(range(10)))";
    assert_eq!(ok(&home, &["exec", "one", "--", "python3", "-c", python]), "45\n");

    // Files, and what a pause and a copy leave of them.
    let work = home.with_extension("files");
    let _ = fs::remove_dir_all(&work);
    fs::create_dir_all(work.join("tree/below")).unwrap();
    fs::write(work.join("tree/below/file"), "content").unwrap();
    std::os::unix::fs::symlink("below/file", work.join("tree/link")).unwrap();
    let tree = work.join("tree");
    ok(&home, &["sandbox", "cp", tree.to_str().unwrap(), "one:/tmp/up"]);
    assert_eq!(ok(&home, &["exec", "one", "--", "cat", "/tmp/up/link"]), "content");
    ok(&home, &["sandbox", "pause", "one"]);
    wait_until("it has given up its memory", || {
        ok(&home, &["sandbox", "list"]).contains("hibernated")
    });
    // Standard output and input in the place of a file here.
    assert_eq!(ok(&home, &["sandbox", "cp", "one:/tmp/up/link", "-"]), "content");
    let mut cp = thaw();
    cp.args(["sandbox", "cp", "-", "one:/tmp/input"]).env("THAW_HOME", &home).current_dir(&work);
    run_with_input(&mut cp, long.as_bytes()).success();
    assert!(ok(&home, &["sandbox", "cp", "one:/tmp/input", "-"]) == long);
    assert!(!work.join("-").exists());
    let refused = call(&home, &["sandbox", "cp", "one:/tmp/up", "-"]);
    assert!(refused.stderr.contains("only files go to standard output"), "{refused:?}");
    // A name with a slash at its end is a directory's, which is not there.
    let file = work.join("tree/below/file");
    let none = work.join("none/");
    for (from, to, named) in [
        (file.to_str().unwrap(), "one:/tmp/none/", "/tmp/none"),
        ("one:/tmp/up/link", none.to_str().unwrap(), none.to_str().unwrap().trim_end_matches('/')),
    ] {
        let refused = call(&home, &["sandbox", "cp", from, to]);
        let expected = format!("there is no directory {named}; make it first");
        assert!(refused.stderr.contains(&expected), "{refused:?}");
    }
    let down = work.join("down");
    ok(&home, &["sandbox", "cp", "one:/tmp/up", down.to_str().unwrap()]);
    assert_eq!(fs::read_to_string(down.join("below/file")).unwrap(), "content");
    assert_eq!(fs::read_link(down.join("link")).unwrap(), Path::new("below/file"));
    ok(&home, &["sandbox", "fork", "one", "--name", "two"]);
    let paused = ok(&home, &["sandbox", "pause", "one", "two"]);
    assert_eq!(paused, "paused one\npaused two\n");
    assert_eq!(ok(&home, &["sandbox", "resume", "two", "one"]), "resumed two\nresumed one\n");
    ok(&home, &["exec", "two", "--", "sh", "-c", "echo other > /tmp/up/below/file"]);
    assert_eq!(ok(&home, &["exec", "one", "--", "cat", "/tmp/up/link"]), "content");

    // One that is not there does not keep the others from their end.
    let ended = call(&home, &["sandbox", "kill", "one", "none", "two"]);
    assert_eq!((ended.code, ended.stdout.as_str()), (Some(1), "ended one\nended two\n"));
    assert_eq!(ended.stderr.lines().count(), 1, "{ended:?}");
    assert!(ended.stderr.contains("no sandbox is named `none`"), "{ended:?}");
    wait_until("both have ended", || daemon.instances("box").is_empty());
    let gone = call(&home, &["exec", "one", "--", "true"]);
    assert!(gone.stderr.contains("no sandbox is named `one`"), "{gone:?}");
}

/// Its kernel's memory is made shared before anybody asks for a process.
#[test]
fn sandboxes_that_have_run_nothing_are_paused_copied_and_put_to_sleep() {
    let home = home("exec-unused");
    let directory = home.with_extension("stocked");
    fs::create_dir_all(&directory).unwrap();
    let stocked = BOX.replace("name = \"box\"", "name = \"stocked\"\nready = 2");
    fs::write(directory.join("thaw.toml"), stocked).unwrap();
    ok(&home, &["build", directory.to_str().unwrap()]);
    let _daemon = Daemon::start(&home, &DaemonOptions::default());
    let says = |sandbox: &str, said: &str| {
        let script = format!("echo {said} > /tmp/file; cat /tmp/file");
        assert_eq!(ok(&home, &["exec", sandbox, "--", "sh", "-c", &script]), format!("{said}\n"));
    };
    for function in ["box", "stocked"] {
        let named = |name: &str| {
            ok(&home, &["sandbox", "create", function, "--name", name]);
            let shown = ok(&home, &["sandbox", "show", name, "--json"]);
            let shown: serde_json::Value = serde_json::from_str(&shown).unwrap();
            shown["instance"].to_string()
        };
        let paused = format!("{function}-paused");
        named(&paused);
        for said in ["one", "two"] {
            pause_until_hibernated(&home, &paused);
            says(&paused, said);
        }
        let asleep = format!("{function}-asleep");
        let instance = named(&asleep);
        ok(&home, &["sleep", function, "--instance", &instance]);
        says(&asleep, "awake");
        let (original, copy) = (format!("{function}-original"), format!("{function}-copy"));
        named(&original);
        ok(&home, &["sandbox", "fork", &original, "--name", &copy]);
        ok(&home, &["sandbox", "checkpoint", &original, function]);
        says(&copy, "copy");
        says(&original, "original");
        let restored = ok(&home, &["restore", function, "--json"]);
        let restored: serde_json::Value = serde_json::from_str(&restored).unwrap();
        says(&restored["ids"][0].to_string(), "restored");
        says(&copy, "again");
    }
}

#[test]
fn processes_go_on_without_anybody_and_are_found_again() {
    let home = home("exec-detached");
    let _daemon = Daemon::start(&home, &DaemonOptions::default());
    ok(&home, &["sandbox", "create", "box", "--name", "one"]);
    let script = "echo begun; cat; echo ended";
    let id = ok(&home, &["exec", "-d", "one", "--", "sh", "-c", script]);
    wait_until("it has printed and ended", || {
        ok(&home, &["sandbox", "logs", "one", id.trim()]) == "begun\nended\n"
    });
    let attached = ok(&home, &["sandbox", "attach", "one", id.trim()]);
    assert_eq!(attached, "begun\nended\n");
    let busy = ok(&home, &["exec", "-d", "one", "--", "sleep", "1000"]);
    let listed = ok(&home, &["sandbox", "logs", "one", "--list"]);
    let is_its = |line: &&str| line.split_whitespace().next() == Some(busy.trim());
    let line = listed.lines().find(is_its).expect("it is listed");
    assert!(line.contains("running as ") && line.ends_with("sleep 1000"), "{listed}");
    let json = ok(&home, &["sandbox", "logs", "one", "--list", "--json"]);
    assert!(json.starts_with('[') && json.contains(busy.trim()), "{json}");
}

/// A process that has just begun is not as old as the image of its sandbox (proc_pid_stat(5),
/// `starttime`).
#[test]
fn a_process_has_begun_when_it_was_started() {
    let home = home("exec-start-time");
    let _daemon = Daemon::start(&home, &DaemonOptions::default());
    // The image gets older than a command takes.
    std::thread::sleep(std::time::Duration::from_secs(4));
    let began = std::time::Instant::now();
    ok(&home, &["sandbox", "create", "box", "--name", "one"]);
    let code = "print(float(open('/proc/uptime').read().split()[0]) \
                - int(open('/proc/self/stat').read().rsplit(')')[1].split()[19]) / 100)";
    let age: f64 = ok(&home, &["exec", "one", "--", "python3", "-c", code]).trim().parse().unwrap();
    let since = began.elapsed().as_secs_f64();
    assert!((-0.02..since + 0.02).contains(&age), "{age} seconds, of {since}");
}

/// A client that stays with a process, which has printed `ready`.
fn stay(home: &Path, arguments: &[&str], script: &str) -> (Child, BufReader<ChildStdout>) {
    let mut thaw = thaw();
    thaw.arg("exec").args(arguments).args(["--", "sh", "-c", script]).env("THAW_HOME", home);
    let mut client = thaw.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    let mut output = BufReader::new(client.stdout.take().unwrap());
    let mut line = String::new();
    output.read_line(&mut line).unwrap();
    assert_eq!(line, "ready\n");
    (client, output)
}

#[test]
fn signals_of_a_client_reach_the_process_and_its_end_is_that_of_the_input() {
    let home = home("exec-signals");
    let _daemon = Daemon::start(&home, &DaemonOptions::default());
    ok(&home, &["sandbox", "create", "box", "--name", "one"]);
    let tell = |client: &Child, signal| kill_process(Pid::from_child(client), signal).unwrap();

    let script = "trap 'echo told; exit 7' INT; echo ready; while :; do sleep 0.1; done";
    let (mut client, mut output) = stay(&home, &["one"], script);
    tell(&client, Signal::INT);
    assert_eq!(client.wait().unwrap().code(), Some(7));
    let mut rest = String::new();
    output.read_to_string(&mut rest).unwrap();
    assert_eq!(rest, "told\n");

    for (signal, code) in [(Signal::TERM, 143), (Signal::HUP, 129)] {
        let (mut client, _output) = stay(&home, &["one"], "echo ready; exec sleep 1000");
        tell(&client, signal);
        assert_eq!(client.wait().unwrap().code(), Some(code));
    }

    // Also past input that the process does not read.
    let (mut client, _output) = stay(&home, &["-i", "one"], "echo ready; exec sleep 1000");
    let mut input = client.stdin.take().unwrap();
    let fill = thread::spawn(move || drop(input.write_all(&vec![0; 8 << 20])));
    thread::sleep(Duration::from_millis(500));
    tell(&client, Signal::TERM);
    assert_eq!(client.wait().unwrap().code(), Some(143));
    fill.join().unwrap();

    // A client that is killed says nothing.
    let script = "echo ready; cat; echo ended > /tmp/ended";
    let (mut client, _output) = stay(&home, &["-i", "one"], script);
    client.kill().unwrap();
    client.wait().unwrap();
    wait_until("the process has seen the end of its input", || {
        call(&home, &["exec", "one", "--", "cat", "/tmp/ended"]).stdout == "ended\n"
    });
}

#[test]
fn who_runs_a_program_hears_that_its_sandbox_has_ended() {
    let home = home("exec-ended");
    let _daemon = Daemon::start(&home, &DaemonOptions::default());
    ok(&home, &["sandbox", "create", "box", "--name", "one"]);
    let mut command = thaw();
    command
        .args(["exec", "one", "--", "sh", "-c", "echo begun; sleep 600"])
        .env("THAW_HOME", &home);
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("thaw");
    let mut line = String::new();
    BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
    assert_eq!(line, "begun\n");
    ok(&home, &["sandbox", "kill", "one"]);
    let outcome = child.wait_with_output().unwrap();
    let said = String::from_utf8_lossy(&outcome.stderr);
    assert!(said.contains("the sandbox has ended, with all of its processes"), "{said}");
    assert_eq!(outcome.status.code(), Some(137));
}

#[test]
fn a_client_that_is_cut_off_before_its_process_has_begun_ends_its_input() {
    let home = home("exec-cut-off");
    let daemon = Daemon::start(&home, &DaemonOptions::default());
    ok(&home, &["sandbox", "create", "box", "--name", "one"]);
    let (id, pid, _) = daemon.instance("box");
    let sandbox = Pid::from_raw(i32::try_from(pid).unwrap()).unwrap();
    // It starts nothing for now.
    kill_process(sandbox, Signal::STOP).unwrap();
    let mut client = thaw();
    client.args(["exec", "-i", "one", "--", "sh", "-c", "cat; echo ended > /tmp/ended"]);
    client.env("THAW_HOME", &home).stdin(Stdio::piped()).stdout(Stdio::null());
    let mut client = client.spawn().unwrap();
    wait_until("the sandbox is asked to start it", || {
        let execs = daemon.admin(&format!("/instances/{id}/execs")).json();
        execs.as_array().is_some_and(|all| all.iter().any(|one| one["state"] == "starting"))
    });
    client.kill().unwrap();
    client.wait().unwrap();
    kill_process(sandbox, Signal::CONT).unwrap();
    wait_until("the process has seen the end of its input", || {
        call(&home, &["exec", "one", "--", "cat", "/tmp/ended"]).stdout == "ended\n"
    });
}

#[test]
fn a_sandbox_that_is_killed_while_it_wakes_ends() {
    let home = home("exec-killed-waking");
    let daemon = Daemon::start(&home, &DaemonOptions::default());
    for round in 0..10 {
        let name = format!("one-{round}");
        ok(&home, &["sandbox", "create", "box", "--name", &name]);
        pause_until_hibernated(&home, &name);
        let (id, ..) = daemon.instance("box");
        ok(&home, &["sleep", "box", "--instance", &id.to_string()]);
        let mut waking = thaw();
        waking.args(["exec", &name, "--", "sh", "-c", "echo awake; exec sleep 1000"]);
        waking.env("THAW_HOME", &home).stdout(Stdio::piped()).stderr(Stdio::null());
        let mut waking = waking.spawn().unwrap();
        if round % 2 == 1 {
            wait_until("it wakes", || daemon.instances("box")[0]["state"] != "asleep");
        }
        ok(&home, &["sandbox", "kill", &name]);
        wait_until("it ends", || daemon.instances("box").is_empty());
        assert_ne!(waking.wait().unwrap().code(), Some(0));
        wait_until("its file is gone", || {
            fs::read_dir(home.join("asleep")).unwrap().next().is_none()
        });
    }
    assert!(!daemon.log().contains("panicked"), "{}", daemon.log());
}

#[test]
fn a_terminal_sees_the_end_of_a_pipe_also_in_a_line() {
    let home = home("exec-piped-terminal");
    let _daemon = Daemon::start(&home, &DaemonOptions::default());
    ok(&home, &["sandbox", "create", "box", "--name", "one"]);
    for input in ["abc", "abc\n", ""] {
        let mut cat = thaw();
        // cat(1) closes its streams before it ends.
        cat.args(["exec", "-it", "one", "--", "cat"]).env("THAW_HOME", &home);
        let printed = run_with_input(&mut cat, input.as_bytes()).success();
        assert!(printed.starts_with(input.trim()), "{printed:?}");
    }
}

#[test]
fn a_process_that_closes_its_terminal_is_not_hung_up() {
    let home = home("exec-closed-terminal");
    let _daemon = Daemon::start(&home, &DaemonOptions::default());
    ok(&home, &["sandbox", "create", "box", "--name", "one"]);
    let close = "exec <&- >&- 2>&-; sleep 0.3";
    for (script, printed, code) in [
        (format!("{close}; exit 7"), "", 7),
        (format!("{close}; exec >/dev/tty && echo again"), "again\r\n", 0),
        ("sleep 0.3 & exit 7".to_owned(), "", 7),
    ] {
        let ended = call(&home, &["exec", "-t", "one", "--", "sh", "-c", &script]);
        assert_eq!((ended.stdout.as_str(), ended.code), (printed, Some(code)), "{script}");
    }
}

#[test]
fn programs_that_cannot_be_run_end_as_in_a_shell() {
    let home = home("exec-not-run");
    let _daemon = Daemon::start(&home, &DaemonOptions::default());
    ok(&home, &["sandbox", "create", "box", "--name", "one"]);
    let script = "import os\n\
                  open('/tmp/script', 'w').write('#!/no/such\\n'); os.chmod('/tmp/script', 0o755)\n\
                  open('/tmp/plain', 'w')";
    ok(&home, &["exec", "one", "--", "python3", "-c", script]);
    for (program, code, reason) in [
        ("no-such", 127, "no-such does not exist in the sandbox"),
        ("/usr/bin/no-such", 127, "does not exist in the sandbox"),
        ("/tmp/script", 127, "needs the interpreter /no/such"),
        ("/tmp/plain", 126, "may not be executed"),
        ("/tmp", 126, "may not be executed"),
    ] {
        for options in [&["exec", "one"][..], &["exec", "-t", "one"], &["exec", "-d", "one"]] {
            let ended = call(&home, &[options, &["--", program]].concat());
            assert_eq!(ended.code, Some(code), "{program}: {}", ended.stderr);
            assert!(ended.stderr.contains(reason), "{program}: {}", ended.stderr);
        }
    }
    let unknown = call(&home, &["exec", "one", "--user", "nobody-at-all", "--", "sh"]);
    assert_eq!(unknown.code, Some(1), "{}", unknown.stderr);
}

#[test]
fn wrong_names_and_too_many_arguments_are_refused_with_the_reason() {
    let home = home("exec-refused");
    let _daemon = Daemon::start(&home, &DaemonOptions::default());
    ok(&home, &["sandbox", "create", "box", "--name", "one"]);
    let create = call(&home, &["sandbox", "create", "box", "--name", "83"]);
    assert!(create.stderr.contains("a sandbox cannot be named `83`"), "{create:?}");
    let fork = call(&home, &["sandbox", "fork", "one", "--name", "83"]);
    assert!(fork.stderr.contains("a sandbox cannot be named `83`"), "{fork:?}");
    let long = "x".repeat(1000);
    for count in [170, 300, 1000] {
        let arguments = [&["exec", "one", "--", "true"][..], &vec![&*long; count]].concat();
        let refused = call(&home, &arguments);
        assert_eq!(refused.code, Some(1));
        assert!(refused.stderr.contains("write them to a file in the sandbox"), "{refused:?}");
    }
}

#[test]
fn the_time_of_a_sandbox_comes() {
    let home = home("exec-timeout");
    let daemon = Daemon::start(&home, &DaemonOptions::default());
    let create = ["sandbox", "create", "box", "--timeout", "1s", "--name"];
    ok(&home, &[&create[..], &["pauses"]].concat());
    ok(&home, &[&create[..], &["ends", "--on-timeout", "kill"]].concat());
    wait_until("one has ended, and the other one is paused", || {
        let list = ok(&home, &["sandbox", "list"]);
        !list.contains("ends") && list.contains("hibernated")
    });
    // A use wakes it.
    assert_eq!(ok(&home, &["exec", "pauses", "--", "sh", "-c", "echo on"]), "on\n");
    wait_until("the other one is gone", || daemon.instances("box").len() == 1);
}

/// What computes all the time takes a minute to refuse a pause.
#[test]
fn the_time_of_a_sandbox_waits_for_no_other_one() {
    let home = home("exec-timeouts");
    let _daemon = Daemon::start(&home, &DaemonOptions::default());
    ok(&home, &["sandbox", "create", "box", "--timeout", "1s", "--name", "computes"]);
    ok(&home, &["exec", "-d", "computes", "--", "sh", "-c", "while :; do :; done"]);
    let create = ["sandbox", "create", "box", "--timeout", "3s", "--on-timeout", "kill", "--name"];
    ok(&home, &[&create[..], &["ends"]].concat());
    // The time of the first one has come.
    std::thread::sleep(Duration::from_secs(2));
    let began = std::time::Instant::now();
    wait_until("it has ended", || !ok(&home, &["sandbox", "list"]).contains("ends"));
    assert!(began.elapsed() < Duration::from_secs(45), "it has waited for the other one");
    // Another one of its name has a time of its own.
    ok(&home, &["sandbox", "create", "box", "--name", "ends"]);
    std::thread::sleep(Duration::from_secs(2));
    assert!(ok(&home, &["sandbox", "list"]).contains("ends"));
}

#[test]
fn the_next_daemon_knows_when_a_sandbox_was_used() {
    let home = home("exec-used");
    let mut daemon = Daemon::start(&home, &DaemonOptions::default());
    let create = ["sandbox", "create", "box", "--timeout", "45s", "--on-timeout", "kill", "--name"];
    ok(&home, &[&create[..], &["one"]].concat());
    let created = Instant::now();
    std::thread::sleep(Duration::from_secs(25));
    ok(&home, &["exec", "one", "--", "sh", "-c", ":"]);
    // The use stands in the file within some seconds, and without it the time is over by then.
    std::thread::sleep(Duration::from_secs(46).saturating_sub(created.elapsed()));
    daemon.wait_until_kept("box");
    daemon.kill_and_await_next();
    assert!(ok(&home, &["sandbox", "list"]).contains("one"));
    wait_until("its time has come", || !ok(&home, &["sandbox", "list"]).contains("one"));
}

#[test]
fn sandboxes_outlive_their_daemon() {
    let home = home("exec-takeover");
    let mut daemon = Daemon::start(&home, &DaemonOptions::default());
    ok(&home, &["sandbox", "create", "box", "--name", "one"]);
    ok(&home, &["exec", "one", "--", "sh", "-c", "echo kept > /tmp/file"]);
    daemon.wait_until_kept("box");
    daemon.kill_and_await_next();
    assert_eq!(ok(&home, &["exec", "one", "--", "cat", "/tmp/file"]), "kept\n");
    assert!(ok(&home, &["sandbox", "list"]).contains("one"));
}

/// The next daemon wakes what it takes over. Nobody has asked for that.
#[test]
fn who_is_paused_stays_so_under_the_next_daemon_until_it_is_used() {
    let home = home("exec-takeover-paused");
    let mut daemon = Daemon::start(&home, &DaemonOptions::default());
    for name in ["paused", "used"] {
        ok(&home, &["sandbox", "create", "box", "--name", name]);
        let count = "while true; do echo . >> /tmp/count; sleep 0.1; done";
        ok(&home, &["exec", "-d", name, "--", "sh", "-c", count]);
        pause_until_hibernated(&home, name);
    }
    ok(&home, &["exec", "used", "--", "sh", "-c", ":"]);
    daemon.wait_until_kept("box");
    daemon.kill_and_await_next();
    let state = |name: &str| ok(&home, &["sandbox", "show", name]);
    wait_until("it is paused again", || state("paused").contains("hibernated"));
    ok(&home, &["exec", "paused", "--", "cat", "/tmp/count"]);
    // One that would be paused again would be by now, or soon.
    std::thread::sleep(std::time::Duration::from_secs(1));
    assert!(!state("used").contains("hibernated"));
}

#[test]
fn instances_of_functions_have_processes_from_outside_too() {
    let home = home("exec-function");
    let daemon = Daemon::start(&home, &DaemonOptions::default());
    for name in ["server", "single"] {
        ok(&home, &["invoke", name]);
    }
    let id = |name: &str| daemon.first_instance(name)["id"].to_string();
    let comm = "print(open('/proc/1/comm').read().strip() != '')";
    assert_eq!(ok(&home, &["exec", &id("server"), "--", "python3", "-c", comm]), "True\n");
    ok(&home, &["invoke", "server"]);
    let refused = call(&home, &["exec", &id("single"), "--", "python3", "-c", comm]);
    assert!(refused.stderr.contains("processes = 1"), "{refused:?}");
    ok(&home, &["invoke", "single"]);
}

/// Says whether a system call of the C library lies there as the library has it, after it was made.
const SITE: &str = r"
import ctypes, os
code = ctypes.cast(ctypes.CDLL(None).getppid, ctypes.c_void_p).value
assert os.getppid() >= 0
print(b'\x0f\x05' in ctypes.string_at(code, 16))
";

/// A second program finds replaced what the first one came by, also behind a fork.
#[test]
fn system_calls_of_one_program_are_replaced_in_the_next_one() {
    let home = home("exec-sites");
    let _daemon = Daemon::start(&home, &DaemonOptions::default());
    let fresh = |name: &str| {
        ok(&home, &["sandbox", "create", "box", "--name", name]);
        let site = || ok(&home, &["exec", name, "--", "python3", "-c", SITE]);
        (site(), site(), site())
    };
    let plain_first = ("True\n".to_owned(), "False\n".to_owned(), "False\n".to_owned());
    assert_eq!(fresh("one"), plain_first);
    assert_eq!(fresh("two"), plain_first, "no sandbox learns from another one");
    let script = format!("import os\nif os.fork(): os.wait(); os._exit(0)\n{SITE}");
    assert_eq!(ok(&home, &["exec", "two", "--", "python3", "-c", &script]), "False\n");
}
