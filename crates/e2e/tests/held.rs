//! Sandboxes stay when the version of their function is replaced, until they are told to end.

use serde_json::Value;
use std::fs;
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::Command;
use thaw_e2e::{
    Daemon, DaemonOptions, Function, Outcome, built_home, pause_until_hibernated, run, thaw,
    wait_until,
};

/// A function without a program, with some programs of this host.
const BOX: &str = r#"
name = "box"
isolation = "instance"
persist = true
files = ["version"]
[entry]
kind = "sandbox"
[runtime]
kind = "python3"
programs = ["sh", "cat", "sleep"]
[limits]
instances = 50
keep_alive = "1s"
drain = "1s"
"#;

/// A home with `box`, whose `/app/version` says which build it is.
struct Box {
    home: PathBuf,
}

impl Box {
    fn built(label: &str) -> Self {
        let new = Self { home: built_home(label, &[]) };
        new.build("first");
        new
    }

    /// The same, of instances that serve one request.
    fn of_requests(label: &str) -> Self {
        let server = Function::Variant {
            example: "hello-python",
            name: "server",
            keys: "".into(),
            limits: "",
        };
        Self { home: built_home(label, &[server]) }
    }

    /// Builds a version whose file says this.
    fn build(&self, says: &str) {
        self.build_with(says, "");
    }

    /// The same with further limits. What thaw.toml says is in no file of the function.
    fn build_with(&self, says: &str, limits: &str) {
        let directory = self.home.with_extension("box");
        fs::create_dir_all(&directory).unwrap();
        fs::write(directory.join("thaw.toml"), format!("{BOX}{limits}\n")).unwrap();
        fs::write(directory.join("version"), says).unwrap();
        self.ok(&["build", directory.to_str().unwrap()]);
    }

    fn call(&self, arguments: &[&str]) -> Outcome {
        run(thaw().args(arguments).env("THAW_HOME", &self.home))
    }

    fn ok(&self, arguments: &[&str]) -> String {
        self.call(arguments).success()
    }

    fn json(&self, arguments: &[&str]) -> Value {
        serde_json::from_str(&self.ok(&[arguments, &["--json"]].concat())).unwrap()
    }

    /// Makes a sandbox with a file that has its name.
    fn create(&self, name: &str) {
        self.ok(&["sandbox", "create", "box", "--name", name]);
        self.ok(&["exec", name, "--", "sh", "-c", &format!("echo {name} > /tmp/file")]);
    }

    /// Which build a sandbox is of, and what its file says.
    fn has(&self, name: &str) -> (String, String) {
        let said = self.ok(&["exec", name, "--", "sh", "-c", "cat version; echo; cat /tmp/file"]);
        let (version, file) = said.split_once('\n').unwrap();
        (version.to_owned(), file.trim().to_owned())
    }

    fn version_of(&self, name: &str) -> Value {
        self.json(&["sandbox", "show", name])["version"].clone()
    }

    /// Instances of a version of the function.
    fn live(&self, version: u64) -> Value {
        let versions = self.json(&["versions", "box"]);
        let all = versions["versions"].as_array().unwrap();
        all.iter().find(|one| one["number"] == version).unwrap()["instances"].clone()
    }
}

fn pair(version: &str, file: &str) -> (String, String) {
    (version.to_owned(), file.to_owned())
}

#[test]
fn sandboxes_stay_when_their_version_is_replaced() {
    let made = Box::built("held-versions");
    let daemon = Daemon::start(&made.home, &DaemonOptions::default());
    made.create("runs");
    made.create("rests");
    pause_until_hibernated(&made.home, "rests");
    made.build("second");
    made.create("new");
    assert_eq!((made.version_of("runs"), made.version_of("new")), (1.into(), 2.into()));
    made.ok(&["activate", "box", "1"]);
    made.ok(&["rollback", "box"]);
    let restarted = made.ok(&["restart", "box"]);
    assert!(restarted.contains("3 sandboxes stay"), "{restarted}");
    // Longer than `drain` and `keep_alive`.
    std::thread::sleep(std::time::Duration::from_secs(3));
    assert_eq!(made.has("runs"), pair("first", "runs"));
    assert_eq!(made.has("rests"), pair("first", "rests"));
    assert_eq!(made.has("new"), pair("second", "new"));
    made.ok(&["sandbox", "fork", "runs", "--name", "copy"]);
    assert_eq!(made.has("copy"), pair("first", "runs"));
    pause_until_hibernated(&made.home, "copy");
    made.ok(&["sandbox", "resume", "copy"]);
    assert_eq!(made.live(1), 3);
    for name in ["runs", "rests", "copy"] {
        made.ok(&["sandbox", "kill", name]);
    }
    wait_until("nothing is left of the first version", || made.live(1).is_null());
    assert_eq!(made.has("new"), pair("second", "new"));
    let removed = made.call(&["remove", "box"]);
    assert!(removed.stderr.contains("1 sandbox of box ends with it"), "{removed:?}");
    wait_until("its sandbox has ended", || daemon.instances("box").is_empty());
}

#[test]
fn the_next_daemon_takes_over_sandboxes_of_older_versions() {
    let made = Box::built("held-takeover");
    let mut daemon = Daemon::start(&made.home, &DaemonOptions::default());
    made.create("runs");
    made.create("sleeps");
    // More versions than a collection of garbage keeps.
    for says in ["second", "third", "fourth", "fifth", "sixth"] {
        made.build(says);
    }
    let instance = made.json(&["sandbox", "show", "sleeps"])["instance"].to_string();
    made.ok(&["sleep", "box", "--instance", &instance]);
    made.ok(&["gc"]);
    daemon.wait_until_kept("box");
    daemon.kill_and_await_next();
    assert_eq!(made.has("runs"), pair("first", "runs"));
    assert_eq!(made.has("sleeps"), pair("first", "sleeps"));
    made.create("new");
    assert_eq!(made.has("new"), pair("sixth", "new"));
    // One that is stopped puts them to sleep, since their function has `persist`.
    daemon.stop();
    made.ok(&["gc"]);
    let _daemon = Daemon::start(&made.home, &DaemonOptions::default());
    assert_eq!(made.has("runs"), pair("first", "runs"));
    assert_eq!(made.has("sleeps"), pair("first", "sleeps"));
    assert_eq!(made.has("new"), pair("sixth", "new"));
    for name in ["runs", "sleeps"] {
        made.ok(&["sandbox", "kill", name]);
    }
    wait_until("the first version is gone", || {
        made.ok(&["gc"]);
        let versions = made.json(&["versions", "box"]);
        versions["versions"].as_array().unwrap().iter().all(|one| one["number"] != 1)
    });
}

/// Which version a sandbox is of is not to be seen in its files.
#[test]
fn versions_with_the_same_files_are_told_apart_by_the_next_daemon() {
    let made = Box { home: built_home("held-same-files", &[]) };
    let mut daemon = None;
    for (name, memory) in [("small", 96), ("large", 160)] {
        made.build_with("same", &format!("memory = \"{memory}MiB\""));
        daemon.get_or_insert_with(|| Daemon::start(&made.home, &DaemonOptions::default()));
        made.create(name);
    }
    made.build_with("same", "memory = \"128MiB\"");
    let mut daemon = daemon.expect("it serves");
    daemon.wait_until_kept("box");
    daemon.kill_and_await_next();
    let memory = |name: &str| {
        let usage = made.json(&["sandbox", "show", name])["usage"].clone();
        usage["memory_max_bytes"].as_u64().map(|bytes| bytes >> 20)
    };
    for (name, version, mib) in [("small", 1, 96), ("large", 2, 160)] {
        assert_eq!(made.has(name), pair("same", name));
        assert_eq!((made.version_of(name), memory(name)), (version.into(), Some(mib)), "{name}");
    }
}

/// A record that cannot be read says nothing of its function: what is served goes on.
#[test]
fn sandboxes_stay_while_the_record_of_their_function_cannot_be_read() {
    let made = Box::built("held-record");
    let daemon = Daemon::start(&made.home, &DaemonOptions::default());
    made.create("one");
    let record = made.home.join("store/functions/box/record.json");
    let good = fs::read(&record).unwrap();
    fs::write(&record, "{").unwrap();
    daemon.signal(rustix::process::Signal::HUP);
    wait_until("it was looked at", || daemon.log().contains("cannot be served: box"));
    assert_eq!(made.has("one"), pair("first", "one"));
    std::thread::sleep(std::time::Duration::from_secs(2));
    assert_eq!(made.has("one"), pair("first", "one"));
    fs::write(&record, good).unwrap();
    daemon.signal(rustix::process::Signal::HUP);
    made.create("two");
    assert_eq!(made.has("one"), pair("first", "one"));
}

/// A checkpoint has the files of its own version, whichever is active.
#[test]
fn a_sandbox_of_a_checkpoint_of_another_version_is_of_that_version() {
    let made = Box::built("held-checkpoint-version");
    let mut daemon = Daemon::start(&made.home, &DaemonOptions::default());
    made.create("one");
    made.ok(&["sandbox", "checkpoint", "one", "before"]);
    made.ok(&["sandbox", "kill", "one"]);
    for says in ["second", "third", "fourth", "fifth"] {
        made.build(says);
    }
    made.ok(&["sandbox", "create", "--checkpoint", "before", "--name", "restored"]);
    assert_eq!(made.version_of("restored"), 1);
    made.ok(&["gc"]);
    assert_eq!(made.has("restored"), pair("first", "one"));
    daemon.wait_until_kept("box");
    daemon.kill_and_await_next();
    assert_eq!(made.has("restored"), pair("first", "one"));
    // `persist`: it sleeps until the next one begins.
    daemon.stop();
    made.ok(&["gc"]);
    let _daemon = Daemon::start(&made.home, &DaemonOptions::default());
    assert_eq!(made.has("restored"), pair("first", "one"));
}

#[test]
fn a_name_is_free_as_soon_as_its_sandbox_has_ended() {
    let made = Box::built("held-names");
    let _daemon = Daemon::start(&made.home, &DaemonOptions::default());
    for _ in 0..5 {
        made.create("again");
        let instance = made.json(&["sandbox", "show", "again"])["instance"].to_string();
        end_first_process(&made, &instance);
    }
}

/// The sandboxes that the file of a daemon knows: all at first, then a change in each line.
fn known_in(file: &Path) -> Vec<Value> {
    let text = fs::read_to_string(file).unwrap();
    let mut lines = text.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
    let mut known = lines.next().unwrap().as_array().unwrap().clone();
    for change in lines {
        known.retain(|one| one["name"] != change["key"]);
        known.extend(Some(change["value"].clone()).filter(|value| !value.is_null()));
    }
    known
}

/// Numbers of instances may begin anew: what the file says of one that has ended is not true of the next
/// one with its number.
#[test]
fn a_name_of_a_sandbox_that_has_ended_leads_to_no_other_instance() {
    let made = Box::built("held-stale");
    let mut daemon = Daemon::start(&made.home, &DaemonOptions::default());
    made.create("own");
    let file = made.home.join("sandboxes.json");
    let known = known_in(&file);
    // As if it had been one of another function, or had had another number.
    let of_other = |name: &str, key: &str, value: Value| {
        let mut one = known[0].clone();
        one["name"] = name.into();
        one[key] = value;
        one
    };
    let all = [
        known[0].clone(),
        of_other("function", "function", "other".into()),
        of_other("number", "instance", 4711.into()),
    ];
    daemon.wait_until_kept("box");
    fs::write(&file, serde_json::to_vec(&all).unwrap()).unwrap();
    daemon.kill_and_await_next();
    let names = || {
        let known = known_in(&file);
        known.iter().map(|one| one["name"].clone()).collect::<Vec<_>>()
    };
    wait_until("the next daemon has it", || names() == ["own"]);
    for name in ["function", "number"] {
        let refused = made.call(&["exec", name, "--", "true"]);
        assert!(refused.stderr.contains("no sandbox is named"), "{refused:?}");
    }
    assert_eq!(made.ok(&["exec", "own", "--", "cat", "/tmp/file"]), "own\n");
}

fn end_first_process(made: &Box, instance: &str) {
    let pid = made.json(&["ps"]).as_array().unwrap().iter().find_map(|one| {
        let id = one["id"].to_string();
        (id == instance).then(|| one["pid"].as_u64()).flatten()
    });
    let pid = pid.expect("it is live");
    assert!(Path::new(&format!("/proc/{pid}")).exists());
    run(Command::new("kill").args(["-9", &pid.to_string()])).success();
    wait_until("it is gone", || {
        made.call(&["sandbox", "kill", "again"]).stderr.contains("no sandbox is named")
    });
}

#[test]
fn a_sandbox_is_made_of_a_checkpoint() {
    let made = Box::built("held-checkpoint");
    let _daemon = Daemon::start(&made.home, &DaemonOptions::default());
    made.create("one");
    let counts = "i=0; while :; do i=$((i+1)); echo $i > /tmp/count; sleep 0.05; done";
    made.ok(&["exec", "-d", "one", "--", "sh", "-c", counts]);
    made.ok(&["sandbox", "checkpoint", "one", "before"]);
    made.ok(&["exec", "one", "--", "sh", "-c", "echo later > /tmp/file"]);
    made.ok(&["sandbox", "kill", "one"]);
    let create = ["sandbox", "create", "--checkpoint"];
    let of = |rest: &[&str]| made.call(&[&create[..], rest].concat());
    assert_eq!(of(&["before", "--name", "one", "--timeout", "2s"]).success(), "one\n");
    assert_eq!(made.has("one"), pair("first", "one"));
    let count = || made.ok(&["exec", "one", "--", "cat", "/tmp/count"]);
    let before = count();
    wait_until("its process goes on", || count() != before);
    wait_until("its time has come", || made.ok(&["sandbox", "list"]).contains("hibernated"));
    assert!(count() != before);
    let taken = of(&["before", "--name", "one"]);
    assert!(taken.stderr.contains("there is a sandbox `one` already"), "{taken:?}");
    let unknown = of(&["nothing"]);
    assert!(unknown.stderr.contains("no checkpoint is named `nothing`"), "{unknown:?}");
    let key = made.home.with_extension("key");
    fs::write(&key, [7; 32]).unwrap();
    let sealed = ["sandbox", "checkpoint", "one", "sealed", "--key-file"];
    made.ok(&[&sealed[..], &[key.to_str().unwrap()]].concat());
    let sealed = of(&["sealed"]);
    assert!(sealed.stderr.contains("sandboxes are made of plain ones"), "{sealed:?}");
    made.ok(&["remove", "box"]);
    let orphan = of(&["before"]);
    assert!(orphan.stderr.contains("its function `box` is not served"), "{orphan:?}");
}

/// A checkpoint stays open for the next sandbox of it, but not with what its function might before.
#[test]
fn sandboxes_of_a_checkpoint_reach_what_their_function_may_now() {
    let made = Box::built("held-checkpoint-egress");
    let listener = TcpListener::bind(("127.0.0.1", 0)).unwrap();
    let port = listener.local_addr().unwrap().port();
    let allowed = format!("[egress]\nallow = [\"host.thaw.internal:{port}\"]");
    made.build_with("first", &allowed);
    let _daemon = Daemon::start(&made.home, &DaemonOptions::default());
    made.create("one");
    made.ok(&["sandbox", "checkpoint", "one", "before"]);
    let reaches = |name: &str| {
        made.ok(&["sandbox", "create", "--checkpoint", "before", "--name", name]);
        let line = format!(
            "import socket; socket.create_connection(('host.thaw.internal', {port}), 60); print('yes')"
        );
        made.call(&["exec", name, "--", "python3", "-c", &line]).stdout == "yes\n"
    };
    assert!(reaches("two"));
    made.build_with("second", "");
    assert!(!reaches("three"));
    assert_eq!(
        made.version_of("three"),
        made.version_of("one"),
        "it is of the version with its files"
    );
    made.build_with("third", &allowed);
    assert!(reaches("four"));
}

/// No client is connected to a sandbox, so it does not end with one.
#[test]
fn sandboxes_of_functions_that_serve_single_requests_are_sandboxes_too() {
    let made = Box::of_requests("held-requests");
    let mut daemon = Daemon::start(&made.home, &DaemonOptions::default());
    let created = made.call(&["sandbox", "create", "server", "--name", "one"]);
    assert!(created.stderr.contains("end when the daemon is stopped"), "{created:?}");
    let python = |name: &str, line: &str| made.ok(&["exec", name, "--", "python3", "-c", line]);
    python("one", "open('/tmp/file', 'w').write('kept')");
    let read = "print(open('/tmp/file').read())";
    made.ok(&["sandbox", "fork", "one", "--name", "copy"]);
    made.ok(&["sandbox", "checkpoint", "one", "before"]);
    made.ok(&["sandbox", "create", "--checkpoint", "before", "--name", "restored"]);
    pause_until_hibernated(&made.home, "copy");
    daemon.wait_until_kept("server");
    daemon.kill_and_await_next();
    for name in ["one", "copy", "restored"] {
        assert_eq!(python(name, read), "kept\n");
    }
}

#[test]
fn idle_instances_of_functions_make_room_for_sandboxes_and_sandboxes_for_nobody() {
    let server = Function::Variant {
        example: "hello-python",
        name: "server",
        keys: "isolation = \"instance\"".into(),
        // Room may come a moment after it was given back.
        limits: "keep_alive = \"600s\"\nqueue = \"3s\"",
    };
    let new = Box { home: built_home("held-room", &[server]) };
    new.build("first");
    fs::write(new.home.join("tenants.toml"), "[shared]\ninstances = 1\n").unwrap();
    let daemon = Daemon::start(&new.home, &DaemonOptions::default());
    let call = |arguments: &[&str]| new.call(arguments);
    let says = |name: &str| call(&["exec", name, "--", "cat", "/app/version"]);
    let instance = |name: &str| {
        let shown = call(&["sandbox", "show", name, "--json"]).success();
        serde_json::from_str::<Value>(&shown).unwrap()["instance"].to_string()
    };
    let serves = || thaw_e2e::get(daemon.gateway(), "server", "/").status;

    // A create, and a wake.
    assert_eq!(serves(), 200);
    call(&["sandbox", "create", "box", "--name", "one"]).success();
    wait_until("the other one is gone", || daemon.instances("server").is_empty());
    call(&["sleep", "box", "--instance", &instance("one")]).success();
    assert_eq!(serves(), 200);
    assert_eq!(says("one").success(), "first");
    wait_until("the other one is gone", || daemon.instances("server").is_empty());

    // Nobody else ends a sandbox, and who is refused hears why.
    assert_eq!(serves(), 503);
    for refused in [
        call(&["sandbox", "create", "box", "--name", "two"]),
        call(&["sandbox", "fork", "one", "--name", "two"]),
    ] {
        assert_ne!(refused.code, Some(0));
        assert!(
            refused
                .stderr
                .contains("none is idle: the quota of functions without a domain is 1 instance;"),
            "{refused:?}"
        );
    }
    assert_eq!(says("one").success(), "first");
    call(&["sleep", "box", "--instance", &instance("one")]).success();
    call(&["sandbox", "create", "box", "--name", "two"]).success();
    let refused = says("one");
    assert!(refused.stderr.contains("no room for one more instance"), "{refused:?}");
    call(&["sandbox", "kill", "two"]).success();
    assert_eq!(says("one").success(), "first");
}
