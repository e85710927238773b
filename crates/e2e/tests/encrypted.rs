//! Memory of hibernated and sleeping instances that is encrypted on disk.

use rustix::process::Signal;
use serde_json::Value;
use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::sync::OnceLock;
use thaw_e2e::{
    Daemon, DaemonOptions, Function, Outcome, built_home, copy_home, get, run, skip, thaw,
    wait_until,
};

const PLAIN: &str = "isolation = \"instance\"\n[limits]\nconcurrency = 8\ninstances = 1\n\
                     keep_alive = \"10m\"\n";
const SEALED: &str = "isolation = \"instance\"\nhibernate = { encrypt = true }\n[limits]\n\
                      concurrency = 8\ninstances = 1\nkeep_alive = \"10m\"\n";
const SEVERAL: &str = "isolation = \"instance\"\nhibernate = { encrypt = true }\n[limits]\n\
                       concurrency = 8\ninstances = 1\ncpu = 4\nkeep_alive = \"10m\"\n";
const VERIFIED: &str = "isolation = \"instance\"\nhibernate = { verify = true }\n[limits]\n\
                        concurrency = 8\ninstances = 1\nkeep_alive = \"10m\"\n";
const SMALL: &str = "isolation = \"instance\"\nhibernate = { encrypt = true }\n[limits]\n\
                     concurrency = 8\ninstances = 1\nmemory = \"128MiB\"\nkeep_alive = \"10m\"\n";
/// Nothing else in a memory has these bytes.
const SECRET: &str = "the-moon-is-made-of-gorgonzola-4711";

fn survivor(name: &'static str, keys: &'static str) -> Function {
    Function::PythonVariant { program: "survivor", name, keys }
}

fn daemon(label: &str) -> Daemon {
    static HOME: OnceLock<PathBuf> = OnceLock::new();
    let home = HOME.get_or_init(|| {
        let functions = [
            survivor("plain", PLAIN),
            survivor("sealed", SEALED),
            survivor("several", SEVERAL),
            survivor("verified", VERIFIED),
            survivor("small", SMALL),
        ];
        built_home("encrypted", &functions)
    });
    Daemon::start(&copy_home(home, &format!("encrypted-{label}")), &DaemonOptions::default())
}

fn command(daemon: &Daemon, arguments: &[&str]) -> Outcome {
    run(thaw().env("THAW_HOME", daemon.home()).args(arguments))
}

#[track_caller]
fn ask(daemon: &Daemon, function: &str, path: &str) -> String {
    let response = get(daemon.gateway(), function, path);
    assert_eq!(response.status, 200, "{}\n{}", response.text(), daemon.log());
    response.text().trim().to_owned()
}

/// Has the only instance of a function give up its memory, or sleep, as soon as it is idle.
#[track_caller]
fn put(daemon: &Daemon, verb: &str, function: &str) -> Value {
    wait_until("it is idle", || ["idle", "woken-up"].contains(&&*daemon.instance(function).2));
    let outcome = command(daemon, &[verb, function, "--json"]);
    assert_eq!(outcome.code, Some(0), "{}\n{}", outcome.stderr, daemon.log());
    serde_json::from_str(&outcome.stdout).expect("JSON")
}

/// What a process has open whose names hold this.
fn open_files(pid: u32, name: &str) -> Vec<PathBuf> {
    let descriptors = fs::read_dir(format!("/proc/{pid}/fd")).expect("root may read this");
    let paths = descriptors.map(|entry| entry.expect("an entry").path());
    let has_name = |path: &PathBuf| {
        fs::read_link(path).is_ok_and(|link| link.to_string_lossy().contains(name))
    };
    paths.filter(has_name).collect()
}

fn holds_secret(content: &[u8]) -> bool {
    content.windows(SECRET.len()).any(|window| window == SECRET.as_bytes())
}

/// The swap file of the only hibernated instance of a daemon.
#[track_caller]
fn swap_file(daemon: &Daemon) -> PathBuf {
    let found = open_files(daemon.pid(), "/swap/");
    let has_content = |path: &PathBuf| fs::metadata(path).is_ok_and(|found| found.len() > 0);
    found.into_iter().find(has_content).expect("the daemon has it open")
}

/// The files of instances that are asleep.
fn asleep_files(daemon: &Daemon) -> Vec<PathBuf> {
    let all = fs::read_dir(daemon.home().join("asleep")).expect("the directory");
    all.map(|entry| entry.expect("an entry").path()).collect()
}

/// Changes one byte in the middle of a file.
fn flip(path: &PathBuf) {
    let file = File::options().read(true).write(true).open(path).expect("root may write it");
    let at = file.metadata().expect("metadata").len() / 2;
    let mut byte = [0];
    file.read_exact_at(&mut byte, at).expect("it has that byte");
    file.write_all_at(&[byte[0] ^ 1], at).expect("it can be written");
}

fn cut(path: &PathBuf) {
    let file = File::options().write(true).open(path).expect("root may write it");
    let len = file.metadata().expect("metadata").len();
    file.set_len(len - 4096).expect("it can be cut off");
}

#[test]
fn a_secret_in_memory_is_not_in_an_encrypted_swap_file() {
    let daemon = daemon("swap");
    for (function, is_found) in [("plain", true), ("sealed", false)] {
        ask(&daemon, function, &format!("/keep/{SECRET}"));
        let digest = ask(&daemon, function, "/draw/2");
        // By page faults first, and in batch then.
        for _ in 0..4 {
            put(&daemon, "hibernate", function);
            let content = fs::read(swap_file(&daemon)).expect("root may read it");
            assert!(content.len() > 3 << 20, "{}", content.len());
            assert_eq!(holds_secret(&content), is_found, "{function}");
            let own = daemon.instance(function).1;
            wait_until("no copy of it is in memory", || {
                let copies = open_files(own, "thaw-unsealed");
                let len = |path: &PathBuf| fs::metadata(path).map_or(0, |found| found.len());
                assert_eq!(copies.is_empty(), is_found);
                copies.iter().all(|copy| len(copy) == 0)
            });
            assert_eq!(ask(&daemon, function, "/digest"), digest);
        }
        let (_, pid, _) = daemon.instance(function);
        thaw_e2e::kill(pid);
        wait_until("it is gone", || daemon.instances(function).is_empty());
    }
    // Neither a file nor memory is left of them.
    wait_until("no file is left", || open_files(daemon.pid(), "/swap/").is_empty());
    wait_until("no memory is left", || open_files(daemon.pid(), "thaw-unsealed").is_empty());
}

#[test]
fn threads_on_several_processors_wake_from_an_encrypted_file() {
    let daemon = daemon("several");
    for round in 0..3 {
        let asked = std::thread::scope(|scope| {
            let ask = || get(daemon.gateway(), "several", "/count").status;
            let asked = [(); 8].map(|()| scope.spawn(ask));
            asked.map(|asked| asked.join().expect("an answer"))
        });
        assert_eq!(asked, [200; 8], "{}", daemon.log());
        assert_eq!(ask(&daemon, "several", "/count"), (9 * (round + 1)).to_string());
        put(&daemon, "hibernate", "several");
    }
}

#[track_caller]
fn says(daemon: &Daemon, why: &str) {
    wait_until("the log says why", || daemon.log().contains(why));
}

const DAMAGED: &str = "its encrypted file is damaged";

#[test]
fn an_instance_whose_swap_file_was_changed_is_ended_and_the_client_told() {
    type Change = fn(&PathBuf);
    let cases: [(&str, Change, &str); 5] = [
        ("sealed", flip, DAMAGED),
        ("sealed", cut, DAMAGED),
        ("verified", flip, "its swap file is damaged"),
        ("verified", cut, "its swap file is damaged"),
        ("plain", cut, "its swap file cannot be read"),
    ];
    let daemon = daemon("changed");
    for (function, change, why) in cases {
        assert_eq!(ask(&daemon, function, "/count"), "1");
        assert_eq!(ask(&daemon, function, "/count"), "2");
        let (id, ..) = daemon.instance(function);
        put(&daemon, "hibernate", function);
        change(&swap_file(&daemon));
        let refused = get(daemon.gateway(), function, "/count");
        assert_eq!(refused.status, 503, "{function}: {}", refused.text());
        says(&daemon, why);
        // Nothing of it has run, and the next one is new.
        wait_until("it is gone", || {
            daemon.instances(function).iter().all(|instance| instance["id"] != id)
        });
        assert_eq!(ask(&daemon, function, "/count"), "1");
        thaw_e2e::kill(daemon.instance(function).1);
        wait_until("it is gone, too", || daemon.instances(function).is_empty());
        wait_until("no file is left", || open_files(daemon.pid(), "/swap/").is_empty());
    }
}

#[test]
fn an_instance_wakes_from_a_file_that_is_verified() {
    let daemon = daemon("verified");
    assert_eq!(ask(&daemon, "verified", "/count"), "1");
    let digest = ask(&daemon, "verified", "/draw/2");
    // By page faults first, and in batch then.
    for _ in 0..4 {
        put(&daemon, "hibernate", "verified");
        assert_eq!(ask(&daemon, "verified", "/digest"), digest);
    }
    assert_eq!(ask(&daemon, "verified", "/count"), "7");
}

#[test]
fn the_key_of_a_swap_file_ends_with_its_daemon() {
    if !rustix::process::geteuid().is_root() {
        skip("only a daemon of root's has a monitor");
        return;
    }
    let mut daemon = daemon("killed");
    assert_eq!(ask(&daemon, "sealed", "/count"), "1");
    daemon.wait_until_kept("sealed");
    put(&daemon, "hibernate", "sealed");
    daemon.end_and_await_next(Signal::KILL);
    wait_until("it is gone", || daemon.instances("sealed").is_empty());
    assert_eq!(ask(&daemon, "sealed", "/count"), "1");
}

#[test]
fn a_sleeping_instance_is_encrypted() {
    let mut daemon = daemon("asleep");
    for (function, is_found) in [("plain", true), ("sealed", false)] {
        ask(&daemon, function, &format!("/keep/{SECRET}"));
        let digest = ask(&daemon, function, "/draw/2");
        for _ in 0..2 {
            put(&daemon, "sleep", function);
            let files = asleep_files(&daemon);
            // Without a note no other daemon takes it over.
            assert_eq!(files.len(), if is_found { 2 } else { 1 }, "{files:?}");
            let read = |path: &PathBuf| fs::read(path).expect("root may read it");
            assert_eq!(files.iter().map(read).any(|text| holds_secret(&text)), is_found);
            command(&daemon, &["gc"]).success();
            assert_eq!(ask(&daemon, function, "/digest"), digest, "{}", daemon.log());
            wait_until("its files are gone", || asleep_files(&daemon).is_empty());
        }
    }
    for change in [flip, cut] {
        put(&daemon, "sleep", "sealed");
        asleep_files(&daemon).iter().for_each(change);
        let refused = get(daemon.gateway(), "sealed", "/count");
        assert_eq!(refused.status, 503, "{}", refused.text());
        says(&daemon, DAMAGED);
        wait_until("its files are gone", || asleep_files(&daemon).is_empty());
        assert_eq!(ask(&daemon, "sealed", "/count"), "1");
    }
    put(&daemon, "sleep", "sealed");
    daemon.end_and_await_next(Signal::KILL);
    wait_until("its files are gone", || asleep_files(&daemon).is_empty());
    assert_eq!(ask(&daemon, "sealed", "/count"), "1");
}

/// Sets what a tenant may have.
fn quota(daemon: &Daemon, key: &str, value: &Value) {
    let text = format!("[default]\n{key} = {value}\n");
    fs::write(daemon.home().join("tenants.toml"), text).expect("writable");
    daemon.signal(Signal::HUP);
    wait_until("the quota is in force", || {
        let tenants = command(daemon, &["tenants", "--json"]).success();
        let tenants: Value = serde_json::from_str(&tenants).expect("JSON");
        tenants[0]["quota"][key] == *value
    });
}

#[test]
fn an_instance_does_not_sleep_if_its_quota_could_never_wake_it() {
    let daemon = daemon("never");
    quota(&daemon, "memory", &"128MiB".into());
    ask(&daemon, "small", "/count");
    wait_until("it is idle", || daemon.instance("small").2 == "idle");
    let refused = command(&daemon, &["sleep", "small"]);
    assert!(refused.stderr.contains("never has room for 128MiB"), "{refused:?}");
    assert_eq!(ask(&daemon, "small", "/count"), "2");
    // With more it sleeps; without that again it is lost, and the function is not.
    quota(&daemon, "memory", &"1GiB".into());
    wait_until("it sleeps", || command(&daemon, &["sleep", "small"]).code == Some(0));
    assert_eq!(asleep_files(&daemon).len(), 1, "{}", daemon.log());
    quota(&daemon, "memory", &"128MiB".into());
    let refused = get(daemon.gateway(), "small", "/count");
    assert_eq!(refused.status, 503, "{}", refused.text());
    says(&daemon, "its state is lost");
    assert_eq!(ask(&daemon, "small", "/count"), "1");
}

#[test]
fn several_who_wait_for_a_sleeping_instance_are_all_served() {
    let daemon = daemon("line");
    for (key, value) in [("instances", Value::from(1)), ("memory", "256MiB".into())] {
        quota(&daemon, key, &value);
        ask(&daemon, "small", &format!("/keep/{SECRET}"));
        let digest = ask(&daemon, "small", "/digest");
        for _ in 0..3 {
            put(&daemon, "sleep", "small");
            std::thread::scope(|threads| {
                let clients = [(); 6].map(|()| threads.spawn(|| ask(&daemon, "small", "/digest")));
                for client in clients {
                    assert_eq!(client.join().expect("it was served"), digest);
                }
            });
        }
    }
}
