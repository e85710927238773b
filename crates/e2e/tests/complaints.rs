//! What a build says when a program does not come to its entry point: the cause, and the way out.

use serde_json::Value;
use std::fs::{self, Permissions};
use std::net::TcpListener;
use std::os::unix::fs::{PermissionsExt, chown};
use std::path::Path;
use tempfile::TempDir;
use thaw_e2e::{
    Daemon, DaemonOptions, Function, Outcome, User, built_home, command, free_port, get,
    has_controller, python, run, skip, thaw, wait_until,
};

const SERVE: &str = "import http.server\n\
    http.server.HTTPServer(('', PORT), http.server.SimpleHTTPRequestHandler).serve_forever()\n";

/// Whether the host says how much memory a sandbox has used at most.
fn counts_most_memory() -> bool {
    Path::new("/sys/fs/cgroup/memory/memory.max_usage_in_bytes").exists()
}

/// A function's directory with one program.
struct Complaining {
    directory: TempDir,
}

impl Complaining {
    /// A Python program, and further keys of its `thaw.toml`.
    fn python(program: &str, keys: &str) -> Self {
        let directory = tempfile::tempdir().expect("a directory");
        fs::write(directory.path().join("app.py"), program).expect("a program");
        let text = format!(
            "name = \"complaining\"\ncommand = [\"python3\", \"app.py\"]\nfiles = [\"app.py\"]\n\
             {keys}\n[runtime]\nkind = \"python3\"\ninterpreter = \"{}\"\n",
            python().display()
        );
        fs::write(directory.path().join("thaw.toml"), text).expect("thaw.toml");
        Self { directory }
    }

    fn path(&self) -> &Path {
        self.directory.path()
    }

    fn build(&self, home: &Path, options: &[&str]) -> Outcome {
        run(thaw().env("THAW_HOME", home).arg("build").args(options).arg(self.path()))
    }

    /// Builds it in a new home, in vain.
    #[track_caller]
    fn complaint(&self, options: &[&str]) -> String {
        let home = tempfile::tempdir().expect("a directory");
        let outcome = self.build(home.path(), options);
        assert_eq!(outcome.code, Some(1), "{}", outcome.stdout);
        outcome.stderr
    }
}

#[test]
fn who_listens_on_another_port_hears_which_one() {
    let function = Complaining::python(&SERVE.replace("PORT", "9000"), "port = 8000");
    // Sooner than the minute that a program has.
    let complaint = function.complaint(&[]);
    let expected = "it listens on port 9000; set `port = 9000` in thaw.toml";
    assert!(complaint.contains(expected), "{complaint}");
}

/// However long the user would wait: nothing can wake the program any more.
#[test]
fn who_listens_elsewhere_without_a_timer_is_not_waited_for() {
    let accept = "import socket\nsocket.create_server(('', 9000)).accept()\n";
    let function = Complaining::python(accept, "port = 8000");
    let complaint = function.complaint(&["--timeout", "10h"]);
    let expected = "it listens on port 9000; set `port = 9000` in thaw.toml";
    assert!(complaint.contains(expected), "{complaint}");
}

/// The same for one that listens nowhere.
#[test]
fn who_waits_for_nothing_is_not_waited_for() {
    let function =
        Complaining::python("import threading; threading.Event().wait()\n", "port = 8000");
    let complaint = function.complaint(&["--timeout", "10h"]);
    let expected = "it listens on no port, and waits for something else (no timer is to wake it)";
    assert!(complaint.contains(expected), "{complaint}");
}

/// Somebody who has given it a long time hears of it before that is over.
#[test]
fn a_program_that_seems_to_listen_elsewhere_is_waited_for_with_a_note() {
    let function = Complaining::python(&SERVE.replace("PORT", "9000"), "port = 8000");
    let complaint = function.complaint(&["--timeout", "20s"]);
    let note = "the program does not wait for a client on port 8000 yet: it listens on port 9000; \
                set `port = 9000` in thaw.toml";
    assert_eq!(complaint.matches(note).count(), 1, "{complaint}");
    assert!(
        complaint.contains("did not wait for a client on port 8000 within 20 s"),
        "{complaint}"
    );
}

/// Two ports, with a pause of one thread between them while the other one waits for clients.
#[test]
fn a_second_port_may_be_opened_later() {
    let late = format!(
        "import socket, threading, time\n\
         other = socket.create_server(('', 9000))\n\
         threading.Thread(target=other.accept, daemon=True).start()\ntime.sleep(3)\n{}",
        SERVE.replace("PORT", "8000")
    );
    let home = tempfile::tempdir().expect("a directory");
    Complaining::python(&late, "port = 8000").build(home.path(), &[]).success();
}

#[test]
fn a_program_may_take_as_long_as_the_user_says() {
    let late = format!(
        "import socket, time\nother = socket.create_server(('', 9000))\ntime.sleep(9)\n{}",
        SERVE.replace("PORT", "8000")
    );
    let home = tempfile::tempdir().expect("a directory");
    let function = Complaining::python(&late, "port = 8000");
    function.build(home.path(), &["--timeout", "25s"]).success();
}

#[test]
fn a_thread_that_never_rests_is_named() {
    let spin = "import threading\n\
        def spin():\n    while True: pass\n\
        threading.Thread(target=spin, daemon=True).start()\n";
    let function =
        Complaining::python(&format!("{spin}{}", SERVE.replace("PORT", "8000")), "port = 8000");
    let complaint = function.complaint(&["--timeout", "15s"]);
    assert!(complaint.contains("it listens there, but its thread `"), "{complaint}");
    assert!(complaint.contains("set `freeze = \"program\"` in [entry]"), "{complaint}");
}

#[test]
fn the_system_calls_of_a_thread_that_never_rests_are_named() {
    let spin = "import os, threading\n\
        def spin():\n    while True: os.getppid()\n\
        threading.Thread(target=spin, daemon=True).start()\n";
    let function =
        Complaining::python(&format!("{spin}{}", SERVE.replace("PORT", "8000")), "port = 8000");
    let complaint = function.complaint(&["--timeout", "15s"]);
    let expected = "(the system calls that it makes most: getppid";
    assert!(complaint.contains(expected), "{complaint}");
}

#[test]
fn what_a_program_waits_for_instead_is_said() {
    let function = Complaining::python("import time; time.sleep(100)\n", "port = 8000");
    let complaint = function.complaint(&["--timeout", "15s"]);
    assert!(complaint.contains("it listens on no port, and waits for something"), "{complaint}");
    // Before that is over, too.
    let note = "the program does not wait for a client on port 8000 yet: it listens on no port, and waits \
                for something else (a timer is to wake it); ";
    assert_eq!(complaint.matches(note).count(), 1, "{complaint}");
    assert!(complaint.contains("; it has 15 s in all"), "{complaint}");
    let function = Complaining::python("while True: pass\n", "port = 8000");
    let complaint = function.complaint(&["--timeout", "3s"]);
    assert!(complaint.contains("it listens on no port yet, and its thread"), "{complaint}");
}

#[test]
fn a_script_without_its_interpreter_names_it() {
    let directory = tempfile::tempdir().expect("a directory");
    let path = |name: &str| directory.path().join(name);
    fs::create_dir(path("root")).expect("a directory");
    fs::write(path("run.sh"), "#!/bin/sh\nexec true\n").expect("a script");
    fs::set_permissions(path("run.sh"), Permissions::from_mode(0o755)).expect("permissions");
    let text = "name = \"complaining\"\ncommand = [\"./run.sh\"]\nport = 8000\n\
                files = [\"run.sh\"]\nrootfs = \"./root\"\n";
    fs::write(path("thaw.toml"), text).expect("thaw.toml");
    let complaint = Complaining { directory }.complaint(&[]);
    assert!(complaint.contains("./run.sh needs the interpreter /bin/sh"), "{complaint}");
    let expected = "add it to ./root, the function's root file system";
    assert!(complaint.contains(expected), "{complaint}");
}

/// `env` alone would not help it.
#[test]
fn a_script_of_env_names_all_that_it_needs() {
    let directory = tempfile::tempdir().expect("a directory");
    let path = |name: &str| directory.path().join(name);
    fs::write(path("run"), "#!/usr/bin/env python3\n").expect("a script");
    fs::set_permissions(path("run"), Permissions::from_mode(0o755)).expect("permissions");
    let text = "name = \"complaining\"\ncommand = [\"./run\"]\nport = 8000\n\
                files = [\"run\"]\n[runtime]\nkind = \"binary\"\n";
    fs::write(path("thaw.toml"), text).expect("thaw.toml");
    let complaint = Complaining { directory }.complaint(&[]);
    let expected = "`programs = [\"env\", \"python3\"]` in [runtime]";
    assert!(complaint.contains(expected), "{complaint}");
}

#[test]
fn a_directory_without_a_thaw_toml_has_a_way_on() {
    let all = tempfile::tempdir().expect("a directory");
    let build = run(thaw().env("THAW_HOME", all.path()).current_dir(all.path()).arg("build"));
    assert_eq!(build.code, Some(1), "{build:?}");
    assert!(build.stderr.contains("thaw.toml in it, which `thaw init` writes"), "{build:?}");
}

/// As uv makes environments: their Python lies below a home directory.
#[test]
fn a_virtual_environment_whose_python_lies_elsewhere_is_explained() {
    let all = tempfile::tempdir().expect("a directory");
    let at = |path: &str| all.path().canonicalize().expect("it is there").join(path);
    for path in ["app/.venv/bin", "app/.venv/lib/python3.12/site-packages", "uv/bin"] {
        fs::create_dir_all(at(path)).expect("a directory");
    }
    let real = at("uv/bin/python3.12");
    fs::copy(python(), &real).expect("a Python");
    fs::set_permissions(at("uv"), Permissions::from_mode(0o700)).expect("permissions");
    fs::write(at("app/.venv/pyvenv.cfg"), "home = /x\n").expect("a file");
    std::os::unix::fs::symlink(&real, at("app/.venv/bin/python")).expect("a link");
    let flask = at("app/.venv/bin/flask");
    fs::write(&flask, format!("#!{}\n", at("app/.venv/bin/python").display())).expect("a script");
    fs::set_permissions(&flask, Permissions::from_mode(0o755)).expect("permissions");
    let home = tempfile::tempdir().expect("a directory");
    let complaint = |command: &str, runtime: &str| {
        let text = format!(
            "name = \"complaining\"\ncommand = [\"{command}\", \"app.py\"]\nport = 8000\n[runtime]\n{runtime}\n"
        );
        fs::write(at("app/thaw.toml"), text).expect("thaw.toml");
        let build = run(thaw().env("THAW_HOME", home.path()).arg("build").arg(at("app")));
        assert_eq!(build.code, Some(1), "{build:?}");
        build.stderr
    };
    let usual = format!("kind = \"python3\"\ninterpreter = \"{}\"", python().display());
    for (command, runtime, key) in [
        (".venv/bin/python", usual.as_str(), "command"),
        (".venv/bin/python", "kind = \"binary\"", "command"),
        ("python3", "kind = \"python3\"\ninterpreter = \".venv/bin/python\"", "interpreter"),
    ] {
        let said = complaint(command, runtime);
        let cause = format!(
            "`{key}` of thaw.toml cannot be used: .venv/bin/python is a link to {}, outside of the function's directory",
            real.display()
        );
        assert!(said.contains(&cause), "{said}");
        assert!(
            said.contains("`packages = \".venv/lib/python3.12/site-packages\"` in [runtime]"),
            "{said}"
        );
        assert!(!said.contains("running the program"), "{said}");
    }
    let said = complaint(".venv/bin/flask", &usual);
    // That interpreter would be refused as well.
    assert!(said.contains(".venv/bin/flask wants its interpreter at"), "{said}");
    assert!(said.contains("sandbox; .venv/bin/python is a link to"), "{said}");
    assert!(!said.contains("begin the command"), "{said}");
}

#[test]
fn a_program_that_is_missing_is_named_as_a_key() {
    let function = Complaining::python("", "port = 8000");
    let file = function.path().join("thaw.toml");
    let text = fs::read_to_string(&file).expect("thaw.toml");
    fs::write(file, text.replace("\"python3\", \"app.py\"", "\"ls\"")).expect("thaw.toml");
    let complaint = function.complaint(&[]);
    assert!(complaint.contains("ls does not exist in the sandbox"), "{complaint}");
    assert!(complaint.contains("`programs = [\"ls\"]` in [runtime]"), "{complaint}");
}

/// `programs` brings nothing into the sandbox of a command.
#[test]
fn a_program_that_a_build_command_lacks_has_another_way_out() {
    let function = Complaining::python("", "port = 8000\nbuild = { command = [\"no-such-tool\"] }");
    let complaint = function.complaint(&[]);
    assert!(complaint.contains("no-such-tool does not exist in the sandbox"), "{complaint}");
    assert!(complaint.contains("`thaw build --tools DIRECTORY`"), "{complaint}");
    assert!(!complaint.contains("`programs ="), "{complaint}");
}

#[test]
fn connections_that_are_denied_are_named() {
    let connect = "import socket; socket.create_connection(('192.0.2.1', 80))\n";
    let complaint = Complaining::python(connect, "port = 8000").complaint(&[]);
    let expected = "the connection to 192.0.2.1 port 80 was denied: no rule of [egress]";
    assert!(complaint.contains(expected), "{complaint}");
    let name = "import socket; socket.getaddrinfo('example.com', 80)\n";
    let complaint = Complaining::python(name, "port = 8000").complaint(&[]);
    let expected = "the look-up of example.com was denied: no rule of [egress]";
    assert!(complaint.contains(expected), "{complaint}");
}

/// A function with rules that do not name the destination; how often it tries, it is said once.
#[test]
fn connections_that_no_rule_allows_are_named() {
    let connect = "import socket\n\
        for _ in range(3):\n    try: socket.create_connection(('192.0.2.1', 5432))\n    \
        except OSError as error: last = error\n\
        socket.getaddrinfo('db.example.com', 80) if last.errno == 13 else print(last)\n";
    let keys = "port = 8000\n[egress]\nallow = [\"api.example.com:443\"]";
    let complaint = Complaining::python(connect, keys).complaint(&[]);
    for denied in ["192.0.2.1:5432", "db.example.com"] {
        let expected = format!(
            "it may not connect to {denied}; if it should, add the destination to `allow` in [egress]"
        );
        assert_eq!(complaint.matches(&expected).count(), 1, "{complaint}");
    }
}

#[test]
fn a_secret_that_is_read_too_early_is_explained() {
    let read = "open('/run/secrets/db').read()\n";
    let keys = "port = 8000\n[secrets]\nnames = [\"db\"]";
    let complaint = Complaining::python(read, keys).complaint(&[]);
    assert!(complaint.contains("a build has no values of secrets"), "{complaint}");
    assert!(complaint.contains("`freeze = \"program\"` in [entry]"), "{complaint}");
    let complaint = Complaining::python("1 / 0\n", "port = 8000").complaint(&[]);
    assert!(!complaint.contains("secrets"), "{complaint}");
}

#[test]
fn memory_that_is_refused_is_told_with_the_limit() {
    let keys = "port = 8000\nlimits = { memory = \"64MiB\" }";
    let complaint = Complaining::python("x = bytearray(400 << 20)\n", keys).complaint(&[]);
    assert!(complaint.contains("MemoryError"), "{complaint}");
    let expected = "is more than `limits.memory` in thaw.toml, which is 64MiB; raise that";
    assert!(complaint.contains(expected), "{complaint}");
    let fill =
        "with open('/tmp/file', 'wb') as file:\n    while True: file.write(bytes(1 << 20))\n";
    let complaint = Complaining::python(fill, keys).complaint(&[]);
    assert!(complaint.contains("No space left on device"), "{complaint}");
    let expected = "three quarters of `limits.memory` in thaw.toml, which is 64MiB; raise that";
    assert_eq!(complaint.matches(expected).count(), 2, "once shown, and repeated: {complaint}");
}

/// Once for each copy, also where the program goes on.
#[test]
fn memory_that_is_refused_to_a_copy_stands_in_the_daemons_log() {
    let serve = "import http.server\n\
        class Handler(http.server.SimpleHTTPRequestHandler):\n    \
        def do_GET(self):\n        \
        for _ in range(3):\n            \
        try: bytearray(400 << 20)\n            \
        except MemoryError: pass\n        \
        self.send_error(507)\n\
        http.server.HTTPServer(('', 8000), Handler).serve_forever()\n";
    let keys = "port = 8000\nlimits = { memory = \"64MiB\" }";
    let function = Complaining::python(serve, keys);
    let home = built_home("complaints-memory", &[]);
    function.build(&home, &[]).success();
    let daemon = Daemon::start(&home, &DaemonOptions::default());
    for _ in 0..2 {
        assert_eq!(get(daemon.gateway(), "complaining", "/").status, 507);
    }
    let expected = "thaw: an allocation of 409604KiB was refused: it is more than `limits.memory` in \
                    thaw.toml, which is 64MiB; raise that";
    wait_until("both copies have said so", || daemon.log().matches(expected).count() >= 2);
    assert_eq!(daemon.log().matches(expected).count(), 2, "{}", daemon.log());
    // And in the function's, where its author looks.
    let expected = "an allocation of 400.0MiB was refused: it is more than `limits.memory` of 64MiB; \
                    raise that in thaw.toml";
    let said = || log_of(&daemon, "complaining").matches(expected).count();
    wait_until("the function's log has both", || said() >= 2);
    assert_eq!(said(), 2, "{}", log_of(&daemon, "complaining"));
}

/// What `thaw logs` shows of a function.
fn log_of(daemon: &Daemon, function: &str) -> String {
    command(daemon, &["logs", function]).success()
}

/// Once for the function, however many copies look for it, and nothing of one that is there.
#[test]
fn a_program_that_a_request_misses_stands_in_the_functions_log() {
    let serve = "import http.server, subprocess, sys\n\
        TRIES = [['gitt', 'log'], ['/usr/bin/gitt2'], ['/opt/a\\x1bb'], ['./tool']]\n\
        class Handler(http.server.SimpleHTTPRequestHandler):\n    \
        def do_GET(self):\n        \
        for tried in TRIES * 2:\n            \
        try: subprocess.run(tried)\n            \
        except OSError: pass\n        \
        found = subprocess.run(['python3', '-c', 'print(\"found\")']).returncode\n        \
        self.send_error(404 if found == 0 else 500)\n\
        http.server.HTTPServer(('', 8000), Handler).serve_forever()\n";
    let function = Complaining::python(serve, "port = 8000");
    let home = built_home("complaints-missing", &[]);
    function.build(&home, &[]).success();
    let daemon = Daemon::start(&home, &DaemonOptions::default());
    for _ in 0..3 {
        assert_eq!(get(daemon.gateway(), "complaining", "/").status, 404);
    }
    let said = |name: &str, advice: &str| {
        let text =
            format!("it wanted to run {name}, which does not exist in the sandbox; {advice}");
        wait_until("it is said", || log_of(&daemon, "complaining").contains(&text));
    };
    said("gitt", "if it needs that, add \"gitt\" to `programs` in [runtime] of thaw.toml");
    said("/usr/bin/gitt2", "if it needs that, add \"gitt2\" to `programs`");
    said("/opt/a\\x1bb", "if it needs that, add it to `programs` in [runtime] of thaw.toml");
    said("./tool", "if it needs that, check the path, and `files` in thaw.toml");
    let log = log_of(&daemon, "complaining");
    assert_eq!(log.matches("it wanted to run").count(), 4, "{log}");
}

#[test]
fn a_memory_limit_that_is_reached_is_named_with_its_value() {
    let grow = "all = []\nwhile True: all.append(bytearray(1 << 20))\n";
    // Without control groups, the program hears of the limit itself.
    if !has_controller("memory") {
        return skip("there is no control group for memory");
    }
    let function = Complaining::python(grow, "port = 8000\nlimits = { memory = \"64MiB\" }");
    let complaint = function.complaint(&[]);
    assert!(complaint.contains("reached `limits.memory` of 64MiB before it waited"), "{complaint}");
    if counts_most_memory() {
        assert!(complaint.contains(" (it used 6"), "{complaint}");
    }
    assert!(complaint.contains("; raise that in thaw.toml"), "{complaint}");
}

#[test]
fn an_address_that_is_taken_fails_the_build() {
    // Nobody else gets it when it is free again.
    let taken = TcpListener::bind(("127.0.0.1", free_port())).expect("a port");
    let address = taken.local_addr().expect("an address");
    let daemon = Daemon::start(&built_home("complaints", &[]), &DaemonOptions::default());
    let keys = format!("port = 8000\nlisten = \"{address}\"");
    let function = Complaining::python(&SERVE.replace("PORT", "8000"), &keys);
    let outcome = function.build(daemon.home(), &[]);
    assert_eq!(outcome.code, Some(1), "{}", outcome.stderr);
    let expected = format!("is not reached at its own address: cannot listen on {address}");
    assert!(outcome.stderr.contains(&expected), "{}", outcome.stderr);
    let problem = || {
        let functions: Value = daemon.admin("/functions").json();
        functions[0]["problem"].as_str().map(str::to_owned)
    };
    assert!(problem().is_some_and(|problem| problem.contains("choose another address")));
    drop(taken);
    // Nobody has to ask for it.
    wait_until("the address is had", || problem().is_none());
    assert_eq!(get(address, "elsewhere", "/").status, 200);
    function.build(daemon.home(), &[]).success();
    assert_eq!(problem(), None);
}

/// Whoever may not see whether a daemon is running is not told that there is none.
#[test]
fn the_daemon_of_another_user_is_not_called_missing() {
    if !rustix::process::geteuid().is_root() {
        return skip("only root can act as another user");
    }
    let daemon = Daemon::start(
        &built_home("complaints-other", &[Function::Example("hello-c")]),
        &DaemonOptions::default(),
    );
    let function = Complaining::python("", "port = 8000");
    let function = function.path().to_str().expect("a name");
    fs::set_permissions(function, Permissions::from_mode(0o755)).expect("permissions");
    for arguments in [&["ps"][..], &["list"], &["logs", "hello-c"], &["build", function]] {
        let outcome = run(User::nobody().thaw().env("THAW_HOME", daemon.home()).args(arguments));
        assert_eq!(outcome.code, Some(1), "{arguments:?}: {}", outcome.stdout);
        let complaint = outcome.stderr;
        assert!(complaint.contains("permission denied on "), "{arguments:?}: {complaint}");
        assert!(complaint.contains(", which belongs to user "), "{arguments:?}: {complaint}");
        assert!(complaint.contains("; run this as "), "{arguments:?}: {complaint}");
    }
    // Whoever is told the socket by hand gets as far as there.
    let admin = format!("unix:{}", daemon.admin_socket().display());
    let outcome = run(User::nobody().thaw().args(["ps", "--admin", &admin]));
    let expected =
        format!("permission denied on {admin}; run this as the user who runs the daemon");
    assert!(outcome.stderr.contains(&expected), "{}", outcome.stderr);
    // So does a build whose home is another user's who is not root.
    let home = tempfile::tempdir().expect("a directory");
    chown(home.path(), Some(12345), Some(12345)).expect("root may do that");
    let home = home.path();
    let outcome = run(User::nobody().thaw().env("THAW_HOME", home).args(["build", function]));
    let expected = format!("permission denied on {}, which belongs to user 12345", home.display());
    assert!(outcome.stderr.contains(&expected), "{}", outcome.stderr);
}
