//! `thaw run` is like starting the program directly, and safer.

use rustix::mount::{MountFlags, UnmountFlags, mount, mount_bind, unmount};
use rustix::process::{Pid, Signal, kill_process};
use std::fs;
use std::io::{Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};
use thaw_e2e::{
    Linking, Outcome, compile, descendants, exists, free_port, get, limit_of, process, python, run,
    run_with_input, thaw, thaw_binary, wait_until,
};

fn sandboxed(arguments: &[&str], command: &[&str]) -> Outcome {
    run(thaw().args(["run", "--as-root", "--rootfs", "/"]).args(arguments).arg("--").args(command))
}

#[test]
fn the_readmes_first_example_works() {
    let interpreter = python();
    let outcome = sandboxed(&[], &[interpreter.to_str().expect("a path"), "-c", "print('hello')"]);
    assert_eq!(outcome.success(), "hello\n");
}

#[test]
fn what_is_written_in_the_wrong_place_is_put_right() {
    let misused = |arguments: &[&str], way_out: &str| {
        let outcome = run(thaw().args(arguments));
        assert!(outcome.code != Some(0) && outcome.stderr.contains(way_out), "{outcome:?}");
    };
    misused(&["run", "--rootfs", "/", "ls"], "`thaw run --rootfs / -- ls`");
    misused(&["run", "--rootfs", "/"], "name a program, as in");
    misused(&["run", "debian:12", "--memry", "1GiB"], "`--memry` is no option and no program");
    misused(&["run", "/bin/ls"], "`thaw run --rootfs / -- /bin/ls …`");
}

#[test]
fn the_program_is_looked_up_in_path() {
    assert_eq!(sandboxed(&[], &["echo", "found"]).success(), "found\n");
}

#[test]
fn a_missing_program_is_an_error_that_names_it() {
    let outcome = sandboxed(&[], &["/no/such/program"]);
    assert_eq!(outcome.code, Some(127));
    assert!(outcome.stderr.contains("/no/such/program"), "{}", outcome.stderr);
    assert_eq!(outcome.stderr.lines().count(), 1, "{}", outcome.stderr);
}

/// At the end, once, and not where the program's own output goes.
#[test]
fn connections_that_are_denied_are_said() {
    let interpreter = python();
    let connect = "import socket\n\
        for port in (81, 82, 83):\n    try: socket.create_connection(('192.0.2.1', port))\n    \
        except OSError: print('no')\n";
    let tried = |options: &[&str]| {
        let outcome = sandboxed(options, &[interpreter.to_str().expect("a path"), "-c", connect]);
        assert_eq!(outcome.stdout, "no\nno\nno\n", "{outcome:?}");
        outcome.stderr
    };
    let expected = "thaw: denied 3 outgoing connections such as to 192.0.2.1:81; \
                    --allow-egress '192.0.2.1:81' allows it\n";
    assert_eq!(tried(&[]), expected);
    // Some are allowed, so that others are denied by the host.
    assert_eq!(tried(&["--allow-egress", "192.0.2.9:80"]), expected);
    assert_eq!(tried(&["--egress", "192.0.2.9:80"]), expected);
    let name = "import socket\ntry: socket.getaddrinfo('a.example', 80)\nexcept OSError: pass\n";
    let outcome = sandboxed(&[], &[interpreter.to_str().expect("a path"), "-c", name]);
    // The name is seen only if the program asks a server in the sandbox, by the host's /etc/resolv.conf.
    let to_name = outcome.stderr.contains("to a name, which was not looked up; --allow-egress ");
    let to_its_own = outcome.stderr.contains("--allow-egress 'a.example:443' allows it\n");
    assert!(outcome.stderr.starts_with("thaw: denied ") && to_name | to_its_own, "{outcome:?}");
    assert_eq!(outcome.stderr.lines().count(), 1, "{outcome:?}");
}

#[test]
fn misuse_is_exit_code_2() {
    assert_eq!(run(thaw().arg("run")).code, Some(2));
    assert_eq!(run(thaw().arg("fly")).code, Some(2));
    assert_eq!(
        run(thaw().args(["run", "--as-root", "--rootfs", "/", "--memory", "many", "--", "x"])).code,
        Some(2)
    );
}

#[test]
fn a_program_that_cannot_be_started_has_a_shells_exit_code() {
    for (program, code, why) in [
        ("no-such-program", 127, "no-such-program does not exist in the sandbox"),
        ("/etc/passwd", 126, "/etc/passwd may not be executed"),
    ] {
        let outcome = run(thaw().args(["run", "--as-root", "--rootfs", "/", "--", program]));
        assert_eq!(outcome.code, Some(code), "{outcome:?}");
        assert!(outcome.stderr.contains(why), "{outcome:?}");
    }
}

/// Somebody who runs a program has no thaw.toml.
#[test]
fn what_helps_a_missing_program_is_said_for_its_root() {
    let root = tempfile::tempdir().expect("a directory");
    fs::set_permissions(root.path(), PermissionsExt::from_mode(0o755)).expect("its mode");
    let script = root.path().join("script");
    fs::write(&script, "#!/no/such\n").expect("a script");
    fs::set_permissions(&script, PermissionsExt::from_mode(0o755)).expect("its mode");
    let directory = root.path().to_str().expect("a path");
    let of_directory = format!("add it to {directory}, the root file system of the sandbox\n");
    for (root, program, way_out) in [
        ("/", "no-such", "check the path, or install it on this host\n"),
        (directory, "no-such", &of_directory),
        (directory, "/script", &of_directory),
    ] {
        for rights in [&[][..], &["--as-root"]] {
            let all = [&["run", "--rootfs", root], rights, &["--", program]].concat();
            let outcome = run(thaw().args(all));
            assert!(outcome.stderr.ends_with(way_out), "{outcome:?}");
            assert!(!outcome.stderr.contains("thaw.toml"), "{outcome:?}");
            assert!(!outcome.stderr.contains("--as-root"), "{outcome:?}");
        }
    }
}

/// `PATH` of the sandbox is not that of who runs it.
#[test]
fn a_program_that_lies_elsewhere_is_found_for_the_user() {
    let directory = tempfile::tempdir().expect("a directory");
    fs::set_permissions(directory.path(), PermissionsExt::from_mode(0o755)).expect("its mode");
    let tool = directory.path().join("my-tool");
    fs::write(&tool, "#!/bin/sh\necho mine\n").expect("a script");
    fs::set_permissions(&tool, PermissionsExt::from_mode(0o755)).expect("its mode");
    let path = format!("{}:/usr/bin:/bin", directory.path().display());
    let tried = |options: &[&str]| {
        let all = [&["run", "--rootfs", "/"], options, &["--", "my-tool"]].concat();
        run(thaw().env("PATH", &path).args(all))
    };
    let missing = tried(&[]);
    assert_eq!(missing.code, Some(127));
    let nowhere = tried(&["--workdir", "/no/such"]).stderr;
    assert!(nowhere.contains("/no/such") && !nowhere.contains("this host has it as"), "{nowhere}");
    let said = format!(
        "my-tool does not exist in the sandbox; this host has it as {}, where",
        tool.display()
    );
    assert!(
        missing.stderr.contains(&said) && missing.stderr.ends_with("`-e PATH`\n"),
        "{missing:?}"
    );
    assert_eq!(tried(&["-e", "PATH"]).success(), "mine\n");
}

/// Root hears of its rights only where they help.
#[test]
fn a_program_that_only_root_may_run_is_named_as_such() {
    if !is_root() {
        return;
    }
    let directory = tempfile::tempdir().expect("a directory");
    fs::set_permissions(directory.path(), PermissionsExt::from_mode(0o755)).expect("its mode");
    let script = directory.path().join("script");
    let program = script.to_str().expect("a path");
    let tried = |mode: u32, arguments: &[&str]| {
        fs::write(&script, "#!/bin/sh\n").expect("a script");
        fs::set_permissions(&script, PermissionsExt::from_mode(mode)).expect("its mode");
        by_default(arguments, &[program]).stderr
    };
    let hint = "only root may use this one: --as-root opens them under root's";
    let own = tried(0o700, &[]);
    assert!(
        own.contains("/script may not be executed; files are opened") && own.contains(hint),
        "{own}"
    );
    // Root may not execute it either.
    let plain = tried(0o600, &[]);
    assert!(plain.ends_with("/script may not be executed; check its permissions\n"), "{plain}");
    fs::set_permissions(directory.path(), PermissionsExt::from_mode(0o700)).expect("its mode");
    let hidden = tried(0o755, &[]);
    assert!(
        hidden.contains("does not exist in the sandbox; files are") && hidden.contains(hint),
        "{hidden}"
    );
    let inside = directory.path().join("inside");
    fs::create_dir(&inside).expect("a directory");
    let inside = by_default(&["--workdir", inside.to_str().expect("a path")], &["true"]);
    assert!(inside.stderr.contains(hint), "{inside:?}");
    let nowhere = by_default(&["--workdir", "/no/such"], &["true"]);
    assert!(!nowhere.stderr.contains("--as-root"), "{nowhere:?}");
    assert!(!nowhere.stderr.contains("this host has it as"), "{nowhere:?}");
}

#[test]
fn a_missing_root_is_an_error_that_names_it() {
    let outcome = run(thaw().args(["run", "--as-root", "--rootfs", "/no/such/root", "--", "x"]));
    assert_eq!(outcome.code, Some(1));
    assert!(outcome.stderr.contains("/no/such/root"), "{}", outcome.stderr);
}

#[test]
fn every_verb_has_help_with_an_example() {
    let help = run(thaw().arg("--help")).success();
    let verbs = help.lines().skip_while(|line| !line.starts_with("Commands:")).skip(1);
    let verbs: Vec<&str> = verbs
        .take_while(|line| !line.trim().is_empty())
        .filter(|line| line.starts_with("  ") && !line.starts_with("   "))
        .filter_map(|line| line.split_whitespace().next())
        .filter(|verb| *verb != "help")
        .collect();
    for verb in ["run", "build", "serve", "invoke", "ps", "images", "inspect", "logs", "doctor"] {
        assert!(verbs.contains(&verb), "thaw has no verb {verb}: {verbs:?}");
    }
    for verb in verbs {
        let help = run(thaw().args([verb, "--help"])).success();
        assert!(help.contains("Example"), "thaw {verb} --help has no example");
    }
}

#[test]
fn streams_are_the_programs() {
    let echo = compile("c/echo", Linking::Static);
    let input: Vec<u8> = (0..300_000_u32).map(|i| b'a' + (i % 26) as u8).collect();
    let mut command = thaw();
    command.args(["run", "--as-root", "--rootfs", "/", "--"]).arg(&echo);
    let outcome = run_with_input(&mut command, &input);
    assert_eq!(outcome.code, Some(0), "{}", outcome.stderr);
    assert_eq!(outcome.stdout.as_bytes(), input);
    assert_eq!(outcome.stderr, "300000 bytes\n");
}

#[test]
fn output_arrives_while_the_program_runs() {
    converse("--cpus=1", &["cat"]);
}

#[test]
fn a_thread_that_computes_keeps_no_other_from_its_input() {
    let echo = compile("c/echo", Linking::Dynamic);
    let echo = echo.to_str().expect("a path");
    for cpus in ["--cpus=1", "--cpus=2"] {
        converse(cpus, &[echo, "beside a thread that computes"]);
    }
}

/// Runs a program that answers each line with itself.
#[track_caller]
fn converse(cpus: &str, command: &[&str]) {
    let mut child = thaw()
        .args(["run", "--as-root", "--rootfs", "/", cpus, "--"])
        .args(command)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .expect("thaw");
    let mut stdin = child.stdin.take().expect("piped");
    let mut stdout = child.stdout.take().expect("piped");
    for line in ["first\n", "second\n"] {
        stdin.write_all(line.as_bytes()).expect("the program reads");
        let mut echoed = vec![0; line.len()];
        stdout.read_exact(&mut echoed).expect("the program answers");
        assert_eq!(echoed, line.as_bytes());
    }
    drop(stdin);
    assert!(child.wait().expect("our child").success());
}

/// Clients of two ports, some of them there before the program listens.
#[test]
fn published_ports_lead_to_the_program() {
    let script = "import http.server, threading, time\n\
                  time.sleep(0.3)\n\
                  for port in (8000, 8001):\n    \
                      handler = http.server.SimpleHTTPRequestHandler\n    \
                      server = http.server.ThreadingHTTPServer(('0.0.0.0', port), handler)\n    \
                      threading.Thread(target=server.serve_forever).start()";
    let ports = [free_port(), free_port()].map(|port| port.to_string());
    let [first, second] = &ports;
    let mut child = thaw()
        .args(["run", "--as-root", "--rootfs", "/", "-w", "/usr"])
        .args(["-p", &format!("{first}:8000"), "--publish", &format!("127.0.0.1:{second}:8001")])
        .arg("--")
        .arg(python())
        .args(["-c", script])
        .stderr(Stdio::null())
        .spawn()
        .expect("thaw");
    let addresses = ports.clone().map(|port| format!("127.0.0.1:{port}").parse().expect("one"));
    wait_until("it is there", || std::net::TcpStream::connect(addresses[1]).is_ok());
    thread::scope(|scope| {
        for _ in 0..8 {
            for address in addresses {
                scope.spawn(move || {
                    let listing = get(address, "localhost", "/");
                    assert_eq!(listing.status, 200);
                    assert!(listing.text().contains("bin/"), "{}", listing.text());
                });
            }
        }
    });
    let taken = sandboxed(&["-p", &format!("{first}:80")], &["/bin/true"]);
    assert_eq!(taken.code, Some(1), "{}", taken.stdout);
    assert!(taken.stderr.contains("choose another port"), "{}", taken.stderr);
    kill_process(Pid::from_child(&child), Signal::TERM).expect("it runs");
    assert_eq!(child.wait().expect("our child").code(), Some(128 + 15));
}

#[test]
fn signals_are_passed_on() {
    let script = "import os, signal, time\n\
                  def stop(number, frame):\n    os.write(1, b'got %d\\n' % number)\n    os._exit(5)\n\
                  signal.signal(signal.SIGTERM, stop)\n\
                  os.write(1, b'ready\\n')\n\
                  while True: time.sleep(60)";
    let mut child = thaw()
        .args(["run", "--as-root", "--rootfs", "/", "--"])
        .arg(python())
        .args(["-c", script])
        .stdout(Stdio::piped())
        .spawn()
        .expect("thaw");
    let mut stdout = child.stdout.take().expect("piped");
    let mut ready = [0; 6];
    stdout.read_exact(&mut ready).expect("the program starts");
    kill_process(Pid::from_child(&child), Signal::TERM).expect("it runs");
    let mut rest = String::new();
    stdout.read_to_string(&mut rest).expect("text");
    assert_eq!(rest, "got 15\n");
    assert_eq!(child.wait().expect("our child").code(), Some(5));
}

#[test]
fn death_by_a_signal_is_128_and_its_number() {
    let leave = compile("c/leave", Linking::Static);
    let leave = leave.to_str().expect("a path");
    assert_eq!(sandboxed(&[], &[leave, "signal", "9"]).code, Some(137));
    assert_eq!(sandboxed(&[], &[leave, "abort"]).code, Some(134));
    assert_eq!(sandboxed(&[], &[leave, "segv"]).code, Some(139));
}

#[test]
fn nothing_that_the_program_writes_reaches_the_host() {
    let directory = tempfile::tempdir().expect("a directory");
    let file = directory.path().join("file");
    fs::write(&file, "before").expect("a file");
    let script = format!(
        "import os\nopen({0:?}, 'w').write('after')\nopen({1:?}, 'w').write('new')\n\
         print(open({0:?}).read(), os.listdir({2:?}) != [])\nos.remove({0:?})\nos.mkdir('/new-directory')",
        file,
        directory.path().join("new"),
        directory.path(),
    );
    let interpreter = python();
    let outcome = sandboxed(&[], &[interpreter.to_str().expect("a path"), "-c", &script]);
    assert_eq!(outcome.success(), "after True\n");
    assert_eq!(fs::read_to_string(&file).expect("the file"), "before");
    assert_eq!(fs::read_dir(directory.path()).expect("a directory").count(), 1);
    assert!(!fs::exists("/new-directory").expect("an answer"));
}

#[test]
fn a_directory_is_a_root_file_system() {
    let root = tempfile::tempdir().expect("a directory");
    fs::copy(compile("c/hello", Linking::Static), root.path().join("hello")).expect("a copy");
    let outcome =
        run(thaw().args(["run", "--as-root", "--rootfs"]).arg(root.path()).args(["--", "/hello"]));
    assert_eq!(outcome.success(), "hello, world\n");
    let outcome =
        run(thaw().args(["run", "--as-root", "--rootfs"]).arg(root.path()).args(["--", "/bin/sh"]));
    assert_eq!(outcome.code, Some(127), "the host's shell is not in this root");
}

#[test]
fn links_that_lead_out_of_the_root_stay_inside() {
    let root = tempfile::tempdir().expect("a directory");
    let outside = tempfile::tempdir().expect("a directory");
    fs::write(outside.path().join("secret"), "secret").expect("a file");
    std::os::unix::fs::symlink(outside.path(), root.path().join("out")).expect("a link");
    fs::copy("/bin/busybox", root.path().join("cat"))
        .or_else(|_| fs::copy(compile("c/file_lower", Linking::Static), root.path().join("cat")))
        .expect("a program");
    // The program's first act is to enter the directory and look around.
    let outcome = run(thaw()
        .args(["run", "--as-root", "--rootfs"])
        .arg(root.path())
        .args(["--", "/cat", "/out"]));
    assert_ne!(outcome.code, Some(0));
    assert!(!outcome.stdout.contains("secret"), "{}", outcome.stdout);
}

#[test]
fn more_files_are_read_than_can_be_open() {
    const FILES: u32 = 4500;
    let root = tempfile::tempdir().expect("a directory");
    fs::copy(compile("c/file_many", Linking::Static), root.path().join("sum")).expect("a copy");
    fs::create_dir(root.path().join("numbers")).expect("a directory");
    for number in 1..=FILES {
        fs::write(root.path().join(format!("numbers/{number}")), number.to_string()).expect("room");
    }
    let home = tempfile::tempdir().expect("a directory");
    let stored = |command: &mut Command| run(command.env("THAW_HOME", home.path())).success();
    stored(thaw().arg("import").arg(root.path()).arg("numbers"));
    let line = format!("{FILES} files, together {}\n", FILES * (FILES + 1) / 2);
    for rootfs in [root.path(), Path::new("numbers")] {
        let output = stored(
            thaw()
                .args(["run", "--as-root", "--rootfs"])
                .arg(rootfs)
                .args(["--", "/sum", "/numbers"]),
        );
        assert_eq!(output, line.repeat(2), "{}", rootfs.display());
    }
}

#[test]
fn memory_is_limited() {
    let script = "try:\n    bytearray(300 << 20)\n    print('got it')\nexcept MemoryError:\n    print('refused')";
    let interpreter = python();
    let interpreter = interpreter.to_str().expect("a path");
    assert_eq!(sandboxed(&["--memory=1GiB"], &[interpreter, "-c", script]).success(), "got it\n");
    let outcome = sandboxed(&["--memory=128MiB"], &[interpreter, "-c", script]);
    assert!(!outcome.stdout.contains("got it"), "{}", outcome.stdout);
    assert!(outcome.code.is_some(), "it was stuck");
}

#[test]
fn without_a_limit_a_program_sees_the_memory_of_the_host() {
    let script = "import os\n\
        total = int(open('/proc/meminfo').readline().split()[1]) << 10\n\
        files = os.statvfs('/tmp')\n\
        print(total, os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE') == total)\n\
        print(files.f_blocks == total // 4 * 3 // files.f_bsize)";
    let interpreter = python();
    let interpreter = interpreter.to_str().expect("a path");
    let output = sandboxed(&["--memory=0B"], &[interpreter, "-c", script]).success();
    let [shown, "True", "True"] = output.split_whitespace().collect::<Vec<_>>()[..] else {
        panic!("{output}");
    };
    let memory = fs::read_to_string("/proc/meminfo").expect("the host's memory");
    let total = memory.split_whitespace().nth(1).and_then(|kib| kib.parse::<u64>().ok());
    let total = total.expect("a number") << 10;
    let own = limit_of(std::process::id(), "memory", "memory.limit_in_bytes", "memory.max");
    assert_eq!(shown.parse(), Ok(own.map_or(total, |own| own.min(total))));
}

#[test]
fn processor_time_is_limited() {
    let interpreter = python();
    let interpreter = interpreter.to_str().expect("a path");
    let outcome = sandboxed(&["--cpu-time=1s"], &[interpreter, "-c", "while True: pass"]);
    assert!(outcome.code.is_some_and(|code| code > 128), "{outcome:?}");
}

#[test]
fn the_environment_is_what_was_asked_for() {
    let mut command = thaw();
    command.args([
        "run",
        "--as-root",
        "--rootfs",
        "/",
        "--env",
        "A=b=c",
        "--env",
        "TAKEN",
        "--",
        "env",
    ]);
    let outcome = run(command.env("TAKEN", "from here").env("LEFT", "out")).success();
    assert!(outcome.contains("A=b=c\n") && outcome.contains("TAKEN=from here\n"), "{outcome}");
    assert!(!outcome.contains("LEFT"), "{outcome}");
}

#[test]
fn scripts_start_their_interpreter() {
    let directory = tempfile::tempdir().expect("a directory");
    let script = directory.path().join("script");
    let text = format!("#!{} -S\nimport sys; print(sys.argv[1:])\n", python().display());
    fs::write(&script, text).expect("a script");
    fs::set_permissions(&script, PermissionsExt::from_mode(0o755)).expect("its mode");
    let outcome = sandboxed(&[], &[script.to_str().expect("a path"), "one", "two words"]);
    assert_eq!(outcome.success(), "['one', 'two words']\n");
}

#[test]
fn the_trace_shows_the_calls() {
    let mut command = thaw();
    command
        .args(["run", "--as-root", "--rootfs", "/", "--"])
        .arg(compile("c/hello", Linking::Static));
    let outcome = run(command.env("THAW_TRACE", "syscalls"));
    assert_eq!(outcome.stdout, "hello, world\n");
    for call in ["write(1, ", "exit_group("] {
        assert!(outcome.stderr.contains(call), "no {call} in\n{}", outcome.stderr);
    }
}

#[test]
fn doctor_knows_this_host() {
    let outcome = run(thaw().args(["doctor", "--json"]));
    let report: serde_json::Value = serde_json::from_str(&outcome.stdout).expect("JSON");
    assert!(report.to_string().contains("seccomp"), "{report}");
    assert_eq!(outcome.code, Some(0), "{}", outcome.stderr);
}

#[test]
fn a_killed_thaw_leaves_no_sandbox() {
    let mut child = thaw()
        .args(["run", "--as-root", "--rootfs", "/", "--"])
        .arg(python())
        .args(["-c", "print('ready', flush=True)\nwhile True: pass"])
        .stdout(Stdio::piped())
        .spawn()
        .expect("thaw");
    let mut ready = [0; 6];
    child.stdout.as_mut().expect("piped").read_exact(&mut ready).expect("the program starts");
    let below = descendants(child.id());
    assert!(!below.is_empty());
    child.kill().expect("it runs");
    child.wait().expect("our child");
    wait_until("the sandbox is gone", || below.iter().all(|process| !exists(process.pid)));
}

#[test]
fn processes_that_the_host_stops_go_on() {
    let mut child = thaw()
        .args(["run", "--as-root", "--rootfs", "/", "--", "sh", "-c"])
        .arg("(sed -u s/line/seen/; exit 3); echo ended with $?")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .expect("thaw");
    let mut stdin = child.stdin.take().expect("piped");
    let mut stdout = child.stdout.take().expect("piped");
    // A program that has answered is in the process in which it stays.
    stdin.write_all(b"line\n").expect("the program reads");
    let mut seen = [0; 5];
    stdout.read_exact(&mut seen).expect("the program starts");
    assert_eq!(&seen, b"seen\n");
    let last = descendants(child.id()).last().expect("a process for the guest's child").pid;
    let send = |signal| {
        let pid = Pid::from_raw(last as i32).expect("a process id");
        kill_process(pid, signal).expect("it runs");
    };
    let state = || process(last).expect("it is there").state;
    send(Signal::STOP);
    wait_until("it is stopped", || state() == 'T');
    send(Signal::CONT);
    wait_until("it goes on", || state() != 'T');
    stdin.write_all(b"line\n").expect("the program reads");
    drop(stdin);
    let mut rest = String::new();
    stdout.read_to_string(&mut rest).expect("text");
    assert_eq!(rest, "seen\nended with 3\n");
    assert!(child.wait().expect("our child").success());
}

#[test]
fn a_closed_output_is_a_signal_to_the_one_that_writes() {
    let mut child = thaw()
        .args(["run", "--as-root", "--rootfs", "/", "--", "sh", "-c"])
        .arg("yes; echo yes: $? >&2; trap '' PIPE; yes 2>/dev/null; echo yes: $? >&2")
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("thaw");
    let mut first = [0; 2];
    child.stdout.take().expect("piped").read_exact(&mut first).expect("the program starts");
    let mut reported = String::new();
    child.stderr.take().expect("piped").read_to_string(&mut reported).expect("text");
    assert_eq!(reported, "yes: 141\nyes: 1\n");
    assert!(child.wait().expect("our child").success());
}

/// A command that runs the binary as a user without any rights, from a place
/// that this user can reach.
fn as_nobody(directory: &Path) -> Command {
    let binary = directory.join("thaw");
    // What ran there a moment ago may not be gone. And not by this process, since one that
    // another test forks meanwhile would have the file open for writing.
    if !binary.exists() {
        run(Command::new("cp").args([thaw_binary().as_path(), &binary])).success();
    }
    for (path, mode) in [(directory, 0o777), (&binary, 0o755)] {
        fs::set_permissions(path, PermissionsExt::from_mode(mode)).expect("its mode");
    }
    let mut command = Command::new("setpriv");
    command.args(["--reuid=65534", "--regid=65534", "--clear-groups"]).arg(binary);
    command.env("THAW_HOME", directory.join("home")).env("HOME", directory).current_dir("/");
    command
}

/// Whether this test can take another user's place, and that user may make
/// user namespaces.
fn can_try_as_nobody() -> bool {
    let unprivileged =
        ["/proc/sys/kernel/unprivileged_userns_clone", "/proc/sys/user/max_user_namespaces"]
            .iter()
            .all(|path| fs::read_to_string(path).map_or(true, |text| text.trim() != "0"));
    let restricted = fs::read_to_string("/proc/sys/kernel/apparmor_restrict_unprivileged_userns")
        .is_ok_and(|text| text.trim() == "1");
    rustix::process::getuid().is_root() && unprivileged && !restricted
}

#[test]
fn it_works_without_root() {
    if !can_try_as_nobody() {
        eprintln!("not checked: it takes root to become another user, who may make namespaces");
        return;
    }
    let directory = tempfile::tempdir().expect("a directory");
    let mut command = as_nobody(directory.path());
    let outcome =
        run(command.args(["run", "--rootfs", "/", "--", "sh", "-c", "echo $((6 * 7)); exit 3"]));
    assert_eq!((outcome.stdout.as_str(), outcome.code), ("42\n", Some(3)), "{}", outcome.stderr);
    let mut command = as_nobody(directory.path());
    let outcome = run(command.args(["run", "--rootfs", "/", "--", "cat", "/etc/shadow"]));
    assert_ne!(outcome.code, Some(0), "it reads what only root may read");
    assert_eq!(outcome.stdout, "");
}

/// A directory of the host with a file in it, and the option that mounts it.
fn bound(access: &str) -> (tempfile::TempDir, String) {
    let directory = tempfile::tempdir().expect("a directory");
    fs::write(directory.path().join("file"), "of the host\n").expect("a file");
    let option = format!("--bind={}:/shared{access}", directory.path().display());
    (directory, option)
}

#[test]
fn a_bound_directory_is_read() {
    let (directory, option) = bound("");
    let outcome = sandboxed(&[&option], &["cat", "/shared/file"]);
    assert_eq!(outcome.success(), "of the host\n");
    let outcome = sandboxed(&[&option], &["sh", "-c", "echo x > /shared/new"]);
    assert_ne!(outcome.code, Some(0));
    assert!(outcome.stderr.contains("Read-only file system"), "{}", outcome.stderr);
    assert_eq!(fs::read_dir(directory.path()).expect("readable").count(), 1);
}

#[test]
fn a_directory_bound_to_be_written_to_changes() {
    let (directory, option) = bound(":rw");
    let script = "cd /shared && mkdir made && cp file made/copy && mv made/copy moved && rmdir made && \
                  echo more >> moved && ln moved twin && rm file && ln -s moved link && cat link";
    let outcome = sandboxed(&[&option], &["sh", "-c", script]);
    assert_eq!(outcome.success(), "of the host\nmore\n");
    let names = fs::read_dir(directory.path()).expect("readable");
    let mut names: Vec<_> = names.map(|entry| entry.expect("an entry").file_name()).collect();
    names.sort();
    assert_eq!(names, ["link", "moved", "twin"]);
    let text = fs::read_to_string(directory.path().join("twin")).expect("a file");
    assert_eq!(text, "of the host\nmore\n");
}

/// Files have the host's ids, and the program has others.
#[test]
fn what_the_user_owns_in_a_bound_directory_is_the_programs() {
    if !can_try_as_nobody() {
        eprintln!("not checked: it takes root to become another user, who may make namespaces");
        return;
    }
    let directory = tempfile::tempdir().expect("a directory");
    let bound = directory.path().join("bound");
    fs::create_dir(&bound).expect("a directory");
    for (name, mode, uid) in [("secret", 0o600, 65534), ("other", 0o644, 4711), ("", 0o755, 65534)]
    {
        let path = bound.join(name);
        if !name.is_empty() {
            fs::write(&path, format!("{name}\n")).expect("a file");
        }
        chown(&path, Some(uid), Some(uid)).expect("root may give it away");
        fs::set_permissions(&path, PermissionsExt::from_mode(mode)).expect("its mode");
    }
    let option = format!("--bind={}:/work:rw", bound.display());
    let as_user = |user: &str, script: &str| {
        let mut command = as_nobody(directory.path());
        command.args(["run", "--rootfs", "/", "--user", user, "--workdir", "/work", &option]);
        run(command.args(["--", "sh", "-ec", script]))
    };
    let script = "git init -q 2>&1; git status --short; echo new > new; mkdir sub; ln -s new link; \
                  stat -c '%n %u:%g' . secret other new sub link; stat -c '%u:%g' - < secret; \
                  cp -a new copy; chown 0:0 secret; chown -h 0 link; chown 65534 new; \
                  chown 4711 new 2>/dev/null || echo refused; cat secret";
    let shown = "?? other\n?? secret\n. 0:0\nsecret 0:0\nother 4711:4711\nnew 0:0\nsub 0:0\n\
                 link 0:0\n0:0\nrefused\nsecret\n";
    assert_eq!(as_user("0:0", script).success(), shown);
    let script =
        "stat -c '%n %u:%g' . secret other; cat secret; echo more >> secret; chmod 640 new";
    let shown = ". 1000:1001\nsecret 1000:1001\nother 4711:4711\nsecret\n";
    assert_eq!(as_user("1000:1001", script).success(), shown);
    for name in ["new", "copy", "sub", "secret"] {
        let found = fs::metadata(bound.join(name)).expect("it is there");
        assert_eq!((found.uid(), found.gid()), (65534, 65534), "{name}");
    }
}

#[test]
fn nothing_outside_of_a_bound_directory_is_reached() {
    let (directory, option) = bound("/in:rw");
    fs::create_dir(directory.path().join("in")).expect("a directory");
    let inside = option.replace(":/shared/in", "/in:/shared");
    let script = "cd /shared; ln -s ../file up; ln -s /shared/../../etc/hostname far; cat up; \
                  cat ../file; echo x > up; echo x > ../file; ls -a";
    let outcome = sandboxed(&[&inside], &["sh", "-c", script]);
    assert!(!outcome.stdout.contains("of the host"), "{}", outcome.stdout);
    let text = fs::read_to_string(directory.path().join("file")).expect("a file");
    assert_eq!(text, "of the host\n");
}

#[test]
fn memory_is_mounted() {
    let script =
        "echo x > /scratch/deep/file && cat /scratch/deep/file && grep -c scratch /proc/mounts";
    let outcome = sandboxed(&["--tmpfs", "/scratch/deep"], &["sh", "-c", script]);
    assert_eq!(outcome.success(), "x\n1\n");
}

#[test]
fn a_mount_that_makes_no_sense_is_an_error_of_one_sentence() {
    for (option, code) in [
        ("--bind=/no/such/directory:/shared", 1),
        ("--bind=/etc/hostname:/shared", 1),
        ("--bind=/tmp", 2),
        ("--bind=/tmp:relative", 2),
        ("--tmpfs=/a/../b", 2),
        ("--tmpfs=/etc/passwd/below", 1),
    ] {
        let outcome = sandboxed(&[option], &["true"]);
        assert_eq!(outcome.code, Some(code), "{option}: {}", outcome.stderr);
        assert_eq!(outcome.stderr.lines().count(), 1, "{option}: {}", outcome.stderr);
    }
}

/// Whether the tests run as root, without which there is nothing to give up.
fn is_root() -> bool {
    let is_root = rustix::process::getuid().is_root();
    if !is_root {
        eprintln!("not checked: it takes root to have more rights than others");
    }
    is_root
}

/// Runs a command over the host's files as it is run by default.
fn by_default(arguments: &[&str], command: &[&str]) -> Outcome {
    run(thaw().args(["run", "--rootfs", "/"]).args(arguments).arg("--").args(command))
}

#[test]
fn roots_files_are_read_only_if_asked_for() {
    if !is_root() {
        return;
    }
    let outcome = by_default(&[], &["cat", "/etc/shadow"]);
    assert_eq!((outcome.code, outcome.stdout.as_str()), (Some(1), ""), "{}", outcome.stderr);
    assert!(sandboxed(&[], &["cat", "/etc/shadow"]).success().contains("root:"));

    // Neither as the owner nor as a member of the owner's group, and none of them
    // keeps a directory from being searched.
    let directory = tempfile::tempdir().expect("a directory");
    let at = |name: &str, mode: u32| {
        let path = directory.path().join(name);
        fs::write(&path, name).expect("a file");
        fs::set_permissions(&path, PermissionsExt::from_mode(mode)).expect("its mode");
        path.to_str().expect("a path").to_owned()
    };
    fs::set_permissions(directory.path(), PermissionsExt::from_mode(0o700)).expect("its mode");
    let (owner, group, other) = (at("owner", 0o600), at("group", 0o640), at("other", 0o604));
    let readable = |names: &[&str]| {
        let script = names.iter().map(|name| format!("cat {name} 2>/dev/null; "));
        by_default(&[], &["sh", "-c", &script.collect::<String>()]).stdout
    };
    assert_eq!(readable(&[&owner, &group, &other]), "");
    fs::set_permissions(directory.path(), PermissionsExt::from_mode(0o711)).expect("its mode");
    assert_eq!(readable(&[&owner, &group, &other]), "other");
}

#[test]
fn bound_directories_of_root_are_changed_only_if_asked_for() {
    if !is_root() {
        return;
    }
    let (directory, option) = bound(":rw");
    fs::set_permissions(directory.path(), PermissionsExt::from_mode(0o755)).expect("its mode");
    let script = "cat /shared/file; echo x > /shared/new; echo x >> /shared/file";
    let outcome = by_default(&[&option], &["sh", "-c", script]);
    assert_eq!(outcome.stdout, "of the host\n", "{}", outcome.stderr);
    assert_ne!(outcome.code, Some(0));
    let note = "or open files under root's rights with --as-root\n";
    assert!(outcome.stderr.ends_with(note), "{outcome:?}");
    let read = by_default(&[&option], &["cat", "/shared/file"]);
    assert_eq!((read.code, read.stderr.as_str()), (Some(0), ""), "nothing has failed");
    assert_eq!(fs::read_dir(directory.path()).expect("readable").count(), 1);
    // What is made belongs to the one under whose rights it is made.
    fs::set_permissions(directory.path(), PermissionsExt::from_mode(0o777)).expect("its mode");
    by_default(&[&option], &["sh", "-c", "echo x > /shared/new"]).success();
    let made = fs::metadata(directory.path().join("new")).expect("made");
    assert_eq!(std::os::unix::fs::MetadataExt::uid(&made), 65_534);
}

/// Something mounted for a test.
struct Mounted(PathBuf);

impl Drop for Mounted {
    fn drop(&mut self) {
        let _ = unmount(&self.0, UnmountFlags::DETACH | UnmountFlags::FORCE);
    }
}

#[test]
fn thaws_own_state_is_never_seen() {
    let all = tempfile::tempdir().expect("a directory");
    let at = |name: &str| all.path().join(name);
    let path = |name: &str| at(name).to_str().expect("a path").to_owned();
    for name in ["home/store", "elsewhere"] {
        fs::create_dir_all(at(name)).expect("a directory");
    }
    fs::write(at("home/daemon.json"), "secret").expect("a file");
    fs::write(at("home/store/key"), "secret").expect("a file");
    let run_with = |rootfs: &str, arguments: &[&str], script: &str| {
        let mut command = thaw();
        command.env("THAW_HOME", at("home")).args(["run", "--as-root", "--rootfs", rootfs]);
        run(command.args(arguments).args(["--", "sh", "-c", script]))
    };
    let look = |home: &str| format!("find {home}; cat {home}/daemon.json {home}/store/key");
    let home = path("home");
    let outcome = run_with("/", &[], &look(&home));
    assert_eq!(outcome.stdout, format!("{home}\n"), "{}", outcome.stderr);
    let bind = format!("--bind={}:/all:rw", all.path().display());
    let script = format!("{}; mv /all/home /all/h; rmdir /all/home", look("/all/home"));
    let outcome = run_with("/", &[&bind], &script);
    assert_eq!(outcome.stdout, "/all/home\n", "{}", outcome.stderr);
    assert!(at("home/store/key").exists());
    for (rootfs, arguments) in [(home.as_str(), vec![]), ("/", vec![format!("--bind={home}:/x")])] {
        let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
        let outcome = run_with(rootfs, &arguments, "true");
        assert_eq!(outcome.code, Some(1), "{}", outcome.stderr);
        assert!(outcome.stderr.contains("Thaw's own state"), "{}", outcome.stderr);
    }
    if is_root() {
        for (mounted, inner) in [("home", "daemon.json"), ("home/store", "key")] {
            mount_bind(at(mounted), at("elsewhere")).expect("a mount");
            let _mounted = Mounted(at("elsewhere"));
            assert!(at("elsewhere").join(inner).exists());
            let place = path("elsewhere");
            let outcome = run_with("/", &[], &format!("find {place}; cat {place}/{inner}"));
            assert_eq!(outcome.stdout, format!("{place}\n"), "{}", outcome.stderr);
        }
    }
}

/// A FUSE file system whose process says that it is there and never answers anything
/// again. Whoever asks it for something waits until it is unmounted.
struct SilentFuse {
    mounted: Mounted,
    _directory: tempfile::TempDir,
}

impl SilentFuse {
    /// `None`: it cannot be tried here.
    fn mount() -> Option<Self> {
        if !is_root() {
            return None;
        }
        let Ok(device) = fs::File::options().read(true).write(true).open("/dev/fuse") else {
            eprintln!("NOT CHECKED: this host has no /dev/fuse, so FUSE cannot be tried");
            return None;
        };
        let directory = tempfile::tempdir().expect("a directory");
        fs::set_permissions(directory.path(), PermissionsExt::from_mode(0o755)).expect("its mode");
        let at = directory.path().join("fuse");
        fs::create_dir(&at).expect("a directory");
        let options =
            format!("fd={},rootmode=40000,user_id=0,group_id=0,allow_other", device.as_raw_fd());
        let options = std::ffi::CString::new(options).expect("text");
        let flags = MountFlags::NOSUID | MountFlags::NODEV;
        mount("silent", &at, "fuse.silent", flags, Some(options.as_c_str())).expect("a mount");
        thread::spawn(move || answer_nothing(device));
        Some(Self { mounted: Mounted(at), _directory: directory })
    }

    fn path(&self) -> &str {
        self.mounted.0.to_str().expect("a path")
    }
}

/// Answers `FUSE_INIT` (linux/fuse.h), takes everything else, and says nothing.
fn answer_nothing(mut device: fs::File) {
    let mut request = vec![0; 1 << 17];
    while let Ok(length) = device.read(&mut request) {
        let opcode = u32::from_ne_bytes(request[4..8].try_into().expect("4 bytes"));
        if length < 40 || opcode != 26 {
            continue;
        }
        // fuse_out_header: length, error, the request's number; fuse_init_out.
        let mut reply = vec![0_u8; 16 + 64];
        reply[..4].copy_from_slice(&80_u32.to_ne_bytes());
        reply[8..16].copy_from_slice(&request[8..16]);
        reply[16..20].copy_from_slice(&7_u32.to_ne_bytes());
        reply[20..24].copy_from_slice(&31_u32.to_ne_bytes());
        // Most bytes of a write.
        reply[36..40].copy_from_slice(&4096_u32.to_ne_bytes());
        device.write_all(&reply).expect("the kernel takes it");
    }
}

#[test]
fn a_fuse_process_that_never_answers_keeps_nobody_waiting() {
    let Some(fuse) = SilentFuse::mount() else { return };
    let path = fuse.path();
    let script = format!("ls -A {path}; cat {path}/file; ls -ld {path} >/dev/null && echo after");
    for arguments in [&[][..], &["--as-root"]] {
        let outcome = by_default(arguments, &["sh", "-c", &script]);
        assert_eq!(outcome.stdout, "after\n", "{outcome:?}");
        assert!(outcome.stderr.contains("No such file"), "{outcome:?}");
    }
    let bind = format!("--bind={path}/..:/all");
    let outcome =
        by_default(&[&bind], &["sh", "-c", "ls -A /all/fuse; cat /all/fuse/x; echo after"]);
    assert_eq!(outcome.stdout, "after\n", "{outcome:?}");
    let outcome = run(thaw().args(["run", "--rootfs", path, "--", "/bin/sh"]));
    assert_eq!(outcome.code, Some(1), "{outcome:?}");
    assert!(outcome.stderr.contains("--allow-fuse"), "{outcome:?}");
}

/// Even if it is asked for: the request that waits fails, later ones are served.
#[test]
fn a_file_system_that_never_answers_fails_one_request() {
    let Some(fuse) = SilentFuse::mount() else { return };
    let script = format!("cat {}/file; cat /etc/os-release >/dev/null && echo told", fuse.path());
    let mut command = thaw();
    command.args(["run", "--allow-fuse", "--rootfs", "/", "--", "sh", "-c", &script]);
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("thaw");
    let mut said = String::new();
    let mut stdout = child.stdout.take().expect("piped");
    let began = Instant::now();
    while !said.ends_with("told\n") && began.elapsed() < Duration::from_secs(60) {
        let mut byte = [0];
        match stdout.read(&mut byte).expect("text") {
            0 => break,
            _ => said.push(byte[0].into()),
        }
    }
    // Until then the host's kernel lets nobody go who waits for it.
    drop(fuse);
    let mut errors = String::new();
    child.stderr.take().expect("piped").read_to_string(&mut errors).expect("text");
    assert_eq!(said, "told\n", "{errors}");
    assert!(errors.contains("timed out"), "{errors}");
    child.wait().expect("our child");
}

#[test]
fn nothing_is_mounted_because_a_sandbox_looks() {
    if !is_root() {
        return;
    }
    let directory = tempfile::tempdir().expect("a directory");
    let (_reader, writer) = std::io::pipe().expect("a pipe");
    // A process of the group that is named here would look through it.
    let group = rustix::process::getpgrp().as_raw_nonzero();
    let options = format!("fd={},pgrp={group},minproto=5,maxproto=5,direct", writer.as_raw_fd());
    let options = std::ffi::CString::new(options).expect("text");
    let flags = MountFlags::empty();
    if let Err(error) = mount("auto", directory.path(), "autofs", flags, Some(options.as_c_str())) {
        eprintln!("NOT CHECKED: this host cannot mount autofs ({error})");
        return;
    }
    let mounted = Mounted(directory.path().to_owned());
    let path = directory.path().to_str().expect("a path");
    let script = format!("ls -A {path}; cat {path}/file; echo after");
    let outcome = sandboxed(&[], &["sh", "-c", &script]);
    assert_eq!(outcome.stdout, "after\n", "{outcome:?}");
    drop(mounted);
}
