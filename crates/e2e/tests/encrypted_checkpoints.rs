//! Checkpoints that are encrypted with a key of their owner's.

use serde_json::Value;
use std::fs::{self, File};
use std::io::ErrorKind;
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::thread;
use thaw_e2e::{
    Daemon, DaemonOptions, Function, Outcome, built_home, copy_home, get, run, thaw, wait_until,
};

const KEYS: &str = "isolation = \"instance\"\n[limits]\nconcurrency = 8\ninstances = 8\nmemory = \"128MiB\"\n\
    keep_alive = \"10m\"\n";
/// Nothing else in a memory has these bytes.
const SECRET: &str = "the-moon-is-made-of-gorgonzola-4712";
const FUNCTION: &str = "keeper";

fn daemon(label: &str) -> Daemon {
    static HOME: OnceLock<PathBuf> = OnceLock::new();
    let home = HOME.get_or_init(|| {
        let keeper = Function::PythonVariant { program: "survivor", name: FUNCTION, keys: KEYS };
        built_home("encrypted-checkpoints", &[keeper])
    });
    let home = copy_home(home, &format!("encrypted-checkpoints-{label}"));
    Daemon::start(&home, &DaemonOptions::default())
}

fn command(daemon: &Daemon, arguments: &[&str]) -> Outcome {
    run(thaw().env("THAW_HOME", daemon.home()).args(arguments))
}

#[track_caller]
fn json(daemon: &Daemon, arguments: &[&str]) -> Value {
    let outcome = command(daemon, &[arguments, &["--json"]].concat());
    assert_eq!(outcome.code, Some(0), "{arguments:?}: {}\n{}", outcome.stderr, daemon.log());
    serde_json::from_str(&outcome.stdout).expect("JSON")
}

#[track_caller]
fn refused(daemon: &Daemon, arguments: &[&str], why: &str) {
    let outcome = command(daemon, arguments);
    assert_ne!(outcome.code, Some(0), "{arguments:?}: {}", outcome.stdout);
    assert!(outcome.stderr.contains(why), "{arguments:?}: {}", outcome.stderr);
}

/// Asks one instance.
#[track_caller]
fn ask(daemon: &Daemon, instance: &str, path: &str) -> String {
    let arguments = ["invoke", FUNCTION, "--instance", instance, "--path", path];
    let outcome = command(daemon, &arguments);
    assert_eq!(outcome.code, Some(0), "{}\n{}", outcome.stderr, daemon.log());
    outcome.stdout.trim().to_owned()
}

/// The first instance, with the secret in its memory.
fn begin(daemon: &Daemon) -> String {
    let response = get(daemon.gateway(), FUNCTION, &format!("/keep/{SECRET}"));
    assert_eq!(response.status, 200, "{}", response.text());
    daemon.instance(FUNCTION).0.to_string()
}

fn key(daemon: &Daemon, name: &str, byte: u8) -> String {
    let path = daemon.home().join(name);
    fs::write(&path, [byte; 32]).expect("a key");
    path.to_str().expect("a path").to_owned()
}

/// A checkpoint with a key; what is said of it.
#[track_caller]
fn checkpoint(daemon: &Daemon, instance: &str, name: &str, key: &str) -> Value {
    json(daemon, &["checkpoint", instance, name, "--key-file", key])
}

#[track_caller]
fn restore(daemon: &Daemon, name: &str, key: &str) -> String {
    json(daemon, &["restore", name, "--key-file", key])["ids"][0].to_string()
}

fn image(daemon: &Daemon, taken: &Value) -> PathBuf {
    let name = taken["image"].as_str().expect("a name");
    let images = daemon.home().join("store/images");
    let all = fs::read_dir(images).expect("images").map(|entry| entry.expect("an entry").path());
    let is_it = |path: &PathBuf| {
        let file = path.file_name().and_then(|file| file.to_str()).expect("a name");
        file.starts_with(name) && fs::metadata(path).is_ok_and(|found| found.len() > 1 << 20)
    };
    all.into_iter().find(is_it).expect("the image")
}

fn holds_secret(path: &Path) -> bool {
    let content = match fs::read(path) {
        // The files of an instance that runs again go when the monitor has it.
        Err(error) if error.kind() == ErrorKind::NotFound => return false,
        read => read.expect("root may read it"),
    };
    content.windows(SECRET.len()).any(|window| window == SECRET.as_bytes())
}

/// All files of a directory and those below it.
fn files_below(directory: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in fs::read_dir(directory).expect("a directory") {
        let entry = entry.expect("an entry");
        match entry.file_type().expect("a type") {
            kind if kind.is_dir() => found.extend(files_below(&entry.path())),
            kind if kind.is_file() => found.push(entry.path()),
            _ => {}
        }
    }
    found
}

#[track_caller]
fn nothing_on_disk_holds_the_secret(daemon: &Daemon) {
    for directory in ["store", "asleep", "swap"] {
        for path in files_below(&daemon.home().join(directory)) {
            assert!(!holds_secret(&path), "{}", path.display());
        }
    }
}

/// Whether a swap file that the daemon has open holds the secret.
fn a_swap_file_holds_the_secret(daemon: &Daemon) -> bool {
    let descriptors = fs::read_dir(format!("/proc/{}/fd", daemon.pid())).expect("readable");
    let is_swap_file = |path: &PathBuf| {
        fs::read_link(path).is_ok_and(|to| to.to_string_lossy().contains("/swap/"))
    };
    let mut paths = descriptors.map(|entry| entry.expect("an entry").path()).filter(is_swap_file);
    paths.any(|path| holds_secret(&path))
}

#[track_caller]
fn wait_until_idle(daemon: &Daemon, instance: &str) {
    let is_idle = |one: &Value| {
        let states = ["idle", "woken-up"];
        one["id"].as_u64() == instance.parse().ok()
            && states.iter().any(|state| one["state"] == *state)
    };
    wait_until("it is idle", || daemon.instances(FUNCTION).iter().any(is_idle));
}

#[test]
fn only_the_key_gives_an_encrypted_checkpoint_back() {
    let daemon = daemon("key");
    let (own, other) = (key(&daemon, "own.key", 1), key(&daemon, "other.key", 2));
    let original = begin(&daemon);
    let digest = ask(&daemon, &original, "/digest");
    let sealed = checkpoint(&daemon, &original, "sealed", &own);
    let id = sealed["key"].as_str().expect("an id").to_owned();
    assert_eq!(id.len(), 16, "{sealed}");
    nothing_on_disk_holds_the_secret(&daemon);

    let plain = json(&daemon, &["checkpoint", &original, "plain"]);
    assert!(plain["key"].is_null(), "{plain}");
    assert!(holds_secret(&image(&daemon, &plain)));
    for path in [image(&daemon, &sealed), image(&daemon, &plain)] {
        let mode = fs::metadata(&path).expect("metadata").permissions().mode();
        assert_eq!(mode & 0o777, 0o400, "{}", path.display());
    }
    let listed = json(&daemon, &["checkpoints"]);
    let keys: Vec<_> = listed.as_array().expect("a list").iter().map(|one| &one["key"]).collect();
    assert_eq!(keys, [&Value::Null, &Value::from(id.as_str())], "{listed}");

    refused(&daemon, &["restore", "sealed"], &format!("it is encrypted with key {id}; give that"));
    let why = format!("it is encrypted with key {id}, and this is key ");
    refused(&daemon, &["restore", "sealed", "--key-file", &other], &why);
    refused(&daemon, &["restore", "plain", "--key-file", &own], "it is not encrypted");
    let short = daemon.home().join("short.key");
    fs::write(&short, "too short").expect("a file");
    let short = short.to_str().expect("a path");
    refused(&daemon, &["restore", "sealed", "--key-file", short], "at least 32 are needed");
    assert_eq!(daemon.instances(FUNCTION).len(), 1);

    // The next daemon restores it, too, after all that goes over the store.
    let home = daemon.home().to_owned();
    daemon.stop();
    let daemon = Daemon::start(&home, &DaemonOptions::default());
    command(&daemon, &["gc"]).success();
    command(&daemon, &["pack"]).success();
    let usage = json(&daemon, &["df"]);
    assert!(usage.to_string().contains("\"sealed\""), "{usage}");
    for _ in 0..2 {
        let restored = restore(&daemon, "sealed", &own);
        assert_eq!(ask(&daemon, &restored, "/digest"), digest);
    }
}

#[test]
fn what_comes_of_an_encrypted_checkpoint_does_not_lie_on_disk_as_it_is() {
    let daemon = daemon("bare");
    let own = key(&daemon, "own.key", 1);
    let original = begin(&daemon);
    let digest = ask(&daemon, &original, "/digest");
    checkpoint(&daemon, &original, "sealed", &own);
    let restored = restore(&daemon, "sealed", &own);
    let copy = json(&daemon, &["fork", &restored])["ids"][0].to_string();
    for instance in [&restored, &copy] {
        let why = "it comes from a checkpoint that is encrypted with key";
        refused(&daemon, &["checkpoint", instance, "bare"], why);
        wait_until_idle(&daemon, instance);
        refused(&daemon, &["freeze", FUNCTION, "--instance", instance], why);
        // They went on, and are the same after all that gives up their memory.
        assert_eq!(ask(&daemon, instance, "/digest"), digest);
        for verb in ["hibernate", "sleep"] {
            wait_until_idle(&daemon, instance);
            command(&daemon, &[verb, FUNCTION, "--instance", instance]).success();
            nothing_on_disk_holds_the_secret(&daemon);
            assert!(!a_swap_file_holds_the_secret(&daemon));
            assert_eq!(ask(&daemon, instance, "/digest"), digest);
        }
        refused(&daemon, &["checkpoint", instance, "bare"], why);
    }
    // A chain: each link is encrypted, and stands on what is not.
    ask(&daemon, &copy, "/keep/another");
    let another = ask(&daemon, &copy, "/digest");
    let second = checkpoint(&daemon, &copy, "second", &own);
    assert_eq!(second["ancestors"], 1, "{second}");
    command(&daemon, &["checkpoints", "--remove", "sealed"]).success();
    command(&daemon, &["gc"]).success();
    let last = restore(&daemon, "second", &own);
    assert_eq!(ask(&daemon, &last, "/digest"), another);
    assert_eq!(ask(&daemon, &original, "/digest"), digest);
    // The swap file of the one that was never encrypted does hold it.
    wait_until_idle(&daemon, &original);
    command(&daemon, &["hibernate", FUNCTION, "--instance", &original]).success();
    assert!(a_swap_file_holds_the_secret(&daemon));
}

#[test]
fn a_checkpoint_that_was_changed_is_refused() {
    let daemon = daemon("changed");
    let own = key(&daemon, "own.key", 1);
    let original = begin(&daemon);
    let digest = ask(&daemon, &original, "/digest");
    let taken = checkpoint(&daemon, &original, "sealed", &own);
    let path = image(&daemon, &taken);
    let whole = fs::read(&path).expect("the image");
    let file = File::options().write(true).open(&path).expect("root may write it");
    let is_refused = || {
        let arguments = ["restore", "sealed", "--key-file", &own];
        refused(&daemon, &arguments, "its encrypted file is damaged");
        assert_eq!(daemon.instances(FUNCTION).len(), 1);
    };
    let at = whole.len() / 2;
    file.write_all_at(&[whole[at] ^ 1], at as u64).expect("it can be written");
    is_refused();
    file.write_all_at(&whole, 0).expect("it can be written");
    file.set_len(whole.len() as u64 - 4096).expect("it can be cut off");
    is_refused();
    // Another one of the same key in its place.
    let record = |name: &str| daemon.home().join("store/checkpoints").join(name);
    let other = checkpoint(&daemon, &original, "other", &own);
    let text = fs::read_to_string(record("sealed")).expect("a record");
    let image_of = |taken: &Value| taken["image"].as_str().expect("a name").to_owned();
    fs::write(record("sealed"), text.replace(&image_of(&taken), &image_of(&other)))
        .expect("root may write it");
    is_refused();
    let restored = restore(&daemon, "other", &own);
    assert_eq!(ask(&daemon, &restored, "/digest"), digest);
}

#[test]
fn what_is_decrypted_counts_in_the_memory_of_its_tenant() {
    let daemon = daemon("quota");
    let own = key(&daemon, "own.key", 1);
    let original = begin(&daemon);
    let quota = |memory: &str| {
        let text = format!("[default]\nmemory = \"{memory}\"\n");
        fs::write(daemon.home().join("tenants.toml"), text).expect("writable");
        daemon.signal(rustix::process::Signal::HUP);
        wait_until("the quota is in force", || {
            let tenants = json(&daemon, &["tenants"]);
            tenants[0]["quota"]["memory"] == memory
        });
    };
    // The instance, and what is written of it until it is encrypted.
    quota("255MiB");
    let why = "has no room for 128MiB of decrypted memory";
    refused(&daemon, &["checkpoint", &original, "sealed", "--key-file", &own], why);
    quota("256MiB");
    checkpoint(&daemon, &original, "sealed", &own);
    // Two instances, and the image of the second. An idle one would make room.
    let gateway = daemon.gateway();
    let busy = thread::spawn(move || get(gateway, FUNCTION, "/hold/20"));
    wait_until("it is busy", || daemon.first_instance(FUNCTION)["connections"] == 1);
    let why = "no room for one more instance, and none is idle";
    refused(&daemon, &["restore", "sealed", "--key-file", &own], why);
    quota("1GiB");
    let restored = restore(&daemon, "sealed", &own);
    let taken = || {
        let tenants = json(&daemon, &["tenants"]);
        tenants[0]["memory_reserved"].as_u64().expect("bytes")
    };
    assert!(taken() > memory_bytes("256MiB"), "{}", taken());
    let instances = daemon.instances(FUNCTION);
    let of_it = instances.iter().find(|one| one["id"].as_u64() == restored.parse().ok());
    thaw_e2e::kill(of_it.expect("it lives")["pid"].as_u64().expect("a pid") as u32);
    wait_until("the room is free again", || taken() == memory_bytes("128MiB"));
    assert_eq!(busy.join().expect("it is answered").status, 200);
}

fn memory_bytes(text: &str) -> u64 {
    match text.split_at(text.len() - 3) {
        (count, "MiB") => count.parse::<u64>().expect("a number") << 20,
        (count, _) => count.parse::<u64>().expect("a number") << 30,
    }
}
