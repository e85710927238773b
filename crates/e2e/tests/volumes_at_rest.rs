//! Checkpoints with the files of volumes: memory and files are of one moment, and are put back so.

use serde_json::{Value, json};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};
use thaw_e2e::{
    Daemon, DaemonOptions, Outcome, VolumeFunction, ask_volume as ask, built_home, get, repository,
    run, thaw, wait_until,
};

const DATA: &str = "[[volumes]]\nname = \"data\"\npath = \"/data\"\nsize = \"128MiB\"\n";

/// Builds a function whose instances answer many requests.
fn build(home: &Path, name: &str, keys: &str, volumes: &str) {
    let keys = format!("isolation = \"instance\"\n{keys}");
    VolumeFunction { name, keys: &keys, volumes, at_start: "" }.build(home).success();
}

/// A home in which `shop` has volume `data`.
fn home(label: &str) -> PathBuf {
    let home = built_home(label, &[]);
    build(&home, "shop", "", DATA);
    home
}

/// Two more functions that have the volume.
fn others(home: &Path, keys: &str) {
    for name in ["other", "third"] {
        command(home, &["volume", "allow", "data", name]).success();
        build(home, name, keys, DATA);
    }
}

fn command(home: &Path, arguments: &[&str]) -> Outcome {
    run(thaw().env("THAW_HOME", home).args(arguments))
}

/// The only instance of a function.
#[track_caller]
fn instance(daemon: &Daemon, function: &str) -> String {
    daemon.instance(function).0.to_string()
}

#[track_caller]
fn checkpoint(daemon: &Daemon, function: &str, name: &str) -> Value {
    let id = instance(daemon, function);
    let said = command(daemon.home(), &["checkpoint", &id, name, "--volumes", "--json"]);
    serde_json::from_str(&said.success()).expect("JSON")
}

/// Ends all instances of a function.
fn end(daemon: &Daemon, function: &str) {
    command(daemon.home(), &["restart", function]).success();
    wait_until("its instances have ended", || daemon.instances(function).is_empty());
}

#[track_caller]
fn restore(daemon: &Daemon, name: &str) -> Value {
    let said = command(daemon.home(), &["restore", name, "--volumes", "--json"]);
    serde_json::from_str(&said.success()).expect("JSON")
}

/// The names in directory `of` of volume `data`, in order.
fn names(home: &Path, of: &str) -> Vec<String> {
    let Ok(entries) = fs::read_dir(home.join("volumes/data").join(of)) else { return Vec::new() };
    let names = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let mut names: Vec<_> = names.collect();
    names.sort();
    names
}

/// An open connection with an open transaction goes on in the restored instance, with the files of
/// that moment.
#[test]
fn a_database_and_its_program_are_put_back_together() {
    let home = home("at-rest-sqlite");
    let daemon = Daemon::start(&home, &DaemonOptions::default());
    let begin = "import mmap\n\
        db = sqlite3.connect('/data/app.db', check_same_thread=False, isolation_level=None)\n\
        db.execute('PRAGMA journal_mode = WAL'); db.execute('PRAGMA mmap_size = 1000000')\n\
        db.execute('CREATE TABLE t (n INTEGER)')\n\
        db.execute('BEGIN'); db.executemany('INSERT INTO t VALUES (?)', [(n,) for n in range(100)]); db.execute('COMMIT')\n\
        number = os.stat('/data/app.db').st_ino\n\
        note = open('/data/note', 'w+b', 0); note.write(b'before')\n\
        shared = mmap.mmap(note.fileno(), 6)\n\
        db.execute('BEGIN IMMEDIATE'); db.execute('INSERT INTO t VALUES (100)')";
    ask(&daemon, "shop", begin);
    let taken = checkpoint(&daemon, "shop", "one");
    assert_eq!(taken["volumes"][0]["volume"], "data", "{taken}");
    // The original goes on.
    let more = "db.execute('COMMIT')\n\
        db.execute('BEGIN'); db.executemany('INSERT INTO t VALUES (?)', [(n,) for n in range(1000, 1500)]); db.execute('COMMIT')\n\
        shared[:] = b'after.'; open('/data/other', 'w').write('x')\n\
        result = db.execute('SELECT count(*) FROM t').fetchone()[0]";
    assert_eq!(ask(&daemon, "shop", more), 601);

    let id = instance(&daemon, "shop");
    let refused = command(&home, &["restore", "one", "--volumes"]).refusal();
    let says = format!("volume `data` is in use by instance {id} of `shop`");
    assert!(refused.contains(&says), "{refused}");
    // Whatever was put back is written again, and once more.
    for round in 0..3 {
        end(&daemon, "shop");
        restore(&daemon, "one");
        let look = "result = [db.in_transaction, shared[:].decode(), os.path.exists('/data/other'),\n\
            os.stat('/data/app.db').st_ino == number, os.fstat(note.fileno()).st_ino == os.stat('/data/note').st_ino,\n\
            db.execute('SELECT count(*) FROM t').fetchone()[0]]";
        assert_eq!(
            ask(&daemon, "shop", look),
            json!([true, "before", false, true, true, 101]),
            "{round}"
        );
        let go_on = "db.execute('INSERT INTO t VALUES (2000)'); db.execute('COMMIT')\n\
            other = sqlite3.connect('/data/app.db')\n\
            result = [db.execute('PRAGMA integrity_check').fetchone()[0],\n\
            other.execute('SELECT count(*), max(n) FROM t').fetchone()]";
        assert_eq!(ask(&daemon, "shop", go_on), json!(["ok", [102, 2000]]), "{round}");
    }
    // A copy of what was restored, and a later boot, find the same files.
    let again = checkpoint(&daemon, "shop", "two");
    assert_ne!(again["volumes"], taken["volumes"]);
    assert_eq!(daemon.stop(), Some(0));
    let daemon = Daemon::start(&home, &DaemonOptions::default());
    restore(&daemon, "two");
    let look = "result = [os.stat('/data/app.db').st_ino == number, \
        db.execute('SELECT count(*), max(n) FROM t').fetchone()]";
    assert_eq!(ask(&daemon, "shop", look), json!([true, [102, 2000]]));
    // Without its files, the memory is restored as ever.
    end(&daemon, "shop");
    command(&home, &["restore", "one"]).success();
}

/// A program that counts in memory and in a shared mapping sees no difference between them.
#[test]
fn memory_and_shared_mappings_are_of_one_moment() {
    let home = built_home("at-rest-mapped", &[]);
    let directory = tempfile::tempdir().expect("a directory");
    let program = repository().join("tests/guest/functions/mapped.c");
    fs::copy(program, directory.path().join("app.c")).expect("a copy");
    let text = format!(
        "name = \"mapped\"\ncommand = [\"/app/app\"]\nport = 8080\nisolation = \"instance\"\n\
         files = [{{ from = \"app\", to = \"/app/app\" }}]\n{DATA}\n\
         [runtime]\nkind = \"binary\"\n[build]\ncommand = [\"cc\", \"-O2\", \"-static\", \"-pthread\", \"-o\", \"app\", \"app.c\"]\n"
    );
    fs::write(directory.path().join("thaw.toml"), text).expect("thaw.toml");
    let mut build = thaw();
    build.env("THAW_HOME", &home).args(["build", "--quiet", "--weak-limits"]);
    run(build.arg(directory.path())).success();
    let daemon = Daemon::start(&home, &DaemonOptions::default());
    let look = || get(daemon.gateway(), "mapped", "/").json();
    let count = |said: &Value| said["memory"].as_u64().expect("a number");
    let goes_on = |since: u64| {
        wait_until("it counts on", || {
            let said = look();
            assert_eq!(said["torn"], 0, "{said}");
            count(&said) > since
        });
    };
    goes_on(count(&look()));
    let before = count(&look());
    checkpoint(&daemon, "mapped", "one");
    goes_on(count(&look()));
    for _ in 0..2 {
        end(&daemon, "mapped");
        restore(&daemon, "one");
        let restored = look();
        assert_eq!(restored["torn"], 0, "{restored}");
        assert!(count(&restored) >= before, "{restored} {before}");
        goes_on(count(&restored));
    }
    // The file has a hole still.
    let file = fs::metadata(home.join("volumes/data/files/counters")).unwrap();
    let blocks = std::os::unix::fs::MetadataExt::blocks(&file);
    assert!(blocks * 512 < 16 << 20, "{blocks}");
}

/// Other instances that write all the time rest while the files are copied, and go on.
#[test]
fn all_who_write_rest_while_files_are_copied() {
    let home = home("at-rest-writers");
    others(&home, "ready = 1");
    let daemon = Daemon::start(&home, &DaemonOptions::default());
    ask(&daemon, "shop", "kept = open('/data/kept', 'w+b', 0); kept.write(b'x' * (48 << 20))");
    // First and last are written one after the other; which is copied first nobody knows.
    for name in ["other", "third"] {
        let write = format!(
            "import mmap, threading\nmaps = []\n\
             for n in ('first', 'last'):\n f = open('/data/{name}-' + n, 'w+b'); f.truncate(4096)\n maps.append(mmap.mmap(f.fileno(), 4096))\n\
             count = 0\n\
             def run():\n global count\n while True:\n\x20 count += 1\n\
             \x20 for m in maps: m[0:8] = count.to_bytes(8, 'little')\n\
             threading.Thread(target=run, daemon=True).start()"
        );
        ask(&daemon, name, &write);
    }
    let count = |name: &str| ask(&daemon, name, "result = count").as_u64().expect("a number");
    for round in 0..4 {
        let before = ["other", "third"].map(count);
        let label = format!("snapshot-{round}");
        match round {
            0 => command(&home, &["volume", "snapshot", "data", &label]).success(),
            _ => checkpoint(&daemon, "shop", "all")["volumes"][0]["label"].to_string(),
        };
        let label = match round {
            0 => label,
            // One that was replaced has gone with its files.
            _ => {
                let labels = names(&home, "snapshots");
                assert_eq!(labels.len(), 2, "{labels:?}");
                labels[0].clone()
            }
        };
        for name in ["other", "third"] {
            let [first, last] = ["first", "last"].map(|which| {
                let file = home.join(format!("volumes/data/snapshots/{label}/{name}-{which}"));
                u64::from_le_bytes(fs::read(file).unwrap()[..8].try_into().unwrap())
            });
            assert!(first == last || first == last + 1, "{name}: {first} {last}");
        }
        for (name, before) in ["other", "third"].into_iter().zip(before) {
            wait_until("it goes on", || count(name) > before);
        }
    }
    // Whoever does not rest is named.
    let (id, pid, _) = daemon.instance("other");
    let signal = |what: &str| {
        run(std::process::Command::new("kill").args([what, &pid.to_string()])).success();
    };
    signal("-STOP");
    let own = instance(&daemon, "shop");
    let refused = command(&home, &["checkpoint", &own, "late", "--volumes"]).refusal();
    signal("-CONT");
    let says = format!("instance {id} of `other`, which has volume `data`, does not rest");
    assert!(refused.contains(&says), "{refused}");
    assert_eq!(names(&home, "snapshots").len(), 2);
    let before = count("other");
    wait_until("it goes on", || count("other") > before);
    checkpoint(&daemon, "shop", "all");
}

/// One whose memory is elsewhere takes it back for that; one that is asleep has no files open, and is
/// among those whose files are not exchanged.
#[test]
fn those_that_have_given_up_their_memory_go_on_afterwards() {
    let home = home("at-rest-hibernated");
    others(&home, "");
    let daemon = Daemon::start(&home, &DaemonOptions::default());
    for name in ["shop", "other", "third"] {
        ask(&daemon, name, &format!("f = open('/data/{name}', 'w+b', 0); f.write(b'first')"));
    }
    for (verb, name) in [("hibernate", "other"), ("sleep", "third")] {
        wait_until("it is idle", || daemon.instance(name).2 == "idle");
        command(&home, &[verb, name]).success();
    }
    checkpoint(&daemon, "shop", "one");
    for name in ["shop", "other"] {
        let go_on = "f.write(b'more'); f.seek(0); result = f.read().decode()";
        assert_eq!(ask(&daemon, name, go_on), "firstmore");
    }
    for name in ["shop", "other"] {
        end(&daemon, name);
    }
    let id = instance(&daemon, "third");
    let refused = command(&home, &["restore", "one", "--volumes"]).refusal();
    let says = format!("volume `data` is in use by instance {id} of `third`");
    assert!(refused.contains(&says), "{refused}");
    end(&daemon, "third");
    restore(&daemon, "one");
    for name in ["shop", "other", "third"] {
        let look = format!("result = open('/data/{name}').read()");
        assert_eq!(ask(&daemon, "other", &look), "first");
    }
}

/// One that is to be checkpointed itself, and does not rest, keeps others from going on for a while.
#[test]
fn an_instance_that_does_not_rest_is_given_up() {
    let home = home("at-rest-stopped");
    let daemon = Daemon::start(&home, &DaemonOptions::default());
    ask(&daemon, "shop", "open('/data/file', 'w').write('x')");
    let (id, pid, _) = daemon.instance("shop");
    let signal = |what: &str| {
        run(std::process::Command::new("kill").args([what, &pid.to_string()])).success();
    };
    signal("-STOP");
    let refused = command(&home, &["checkpoint", &id.to_string(), "late", "--volumes"]).refusal();
    assert!(refused.contains("did not come to rest within 10 s"), "{refused}");
    assert!(names(&home, "snapshots").is_empty());
    signal("-CONT");
    assert_eq!(ask(&daemon, "shop", "result = open('/data/file').read()"), "x");
    checkpoint(&daemon, "shop", "one");
    assert_eq!(daemon.instances("shop").len(), 1);
}

#[test]
fn what_cannot_be_copied_or_put_back_is_refused_in_a_sentence() {
    let home = home("at-rest-refused");
    build(&home, "plain", "", "");
    let daemon = Daemon::start(&home, &DaemonOptions::default());
    ask(&daemon, "plain", "result = 1");
    ask(&daemon, "shop", "kept = open('/data/file', 'w+b', 0); kept.write(b'first')");
    let [shop, plain] = ["shop", "plain"].map(|name| instance(&daemon, name));
    let refused = command(&home, &["checkpoint", &plain, "none", "--volumes"]).refusal();
    assert!(refused.contains("`plain` has no volumes; leave --volumes out"), "{refused}");
    command(&home, &["checkpoint", &shop, "without"]).success();
    let refused = command(&home, &["restore", "without", "--volumes"]).refusal();
    assert!(refused.contains("has no files of volumes"), "{refused}");
    let bad = daemon.admin("/checkpoints");
    assert_eq!(bad.json()[0]["volumes"], Value::Null);
    // Another process has it.
    let mut outside = thaw()
        .env("THAW_HOME", &home)
        .args([
            "run",
            "--weak-limits",
            "--rootfs",
            "/",
            "-v",
            "data:/v",
            "--",
            "/usr/bin/python3",
            "-c",
        ])
        .arg("import sys; print('there', flush=True); sys.stdin.read()")
        .stdin(std::process::Stdio::piped())
        .stdout(std::process::Stdio::piped())
        .spawn()
        .expect("thaw run");
    let mut line = [0; 6];
    std::io::Read::read_exact(outside.stdout.as_mut().unwrap(), &mut line).expect("a line");
    let refused = command(&home, &["checkpoint", &shop, "busy", "--volumes"]).refusal();
    assert!(refused.contains("in use by another process of this host"), "{refused}");
    drop(outside.stdin.take());
    outside.wait().unwrap();
    // Its helpers may let go of the volume a moment later.
    wait_until("nobody else has it", || {
        command(&home, &["checkpoint", &shop, "one", "--volumes"]).code == Some(0)
    });
    // A checkpoint is there with its snapshot, or not at all.
    let shown: Value =
        serde_json::from_str(&command(&home, &["volume", "show", "data", "--json"]).success())
            .unwrap();
    assert_eq!(shown["snapshots"][0]["checkpoint"], "one");
    let label = shown["snapshots"][0]["label"].as_str().expect("a label");
    let refused = command(&home, &["volume", "snapshot", "data", label, "--remove"]).refusal();
    assert!(refused.contains("checkpoint `one` needs snapshot"), "{refused}");
    let listed = command(&home, &["checkpoints"]).success();
    let row = listed.lines().find(|line| line.starts_with("one")).expect("a row");
    assert!(row.trim_end().ends_with("data"), "{listed}");
    command(&home, &["checkpoints", "--remove", "one"]).success();
    assert!(names(&home, "snapshots").is_empty() && names(&home, "numbers").is_empty());
    // Without its snapshot nothing is put back.
    checkpoint(&daemon, "shop", "two");
    end(&daemon, "shop");
    let label = &names(&home, "snapshots")[0];
    fs::rename(
        home.join("volumes/data/snapshots").join(label),
        home.join("volumes/data/elsewhere"),
    )
    .unwrap();
    let refused = command(&home, &["restore", "two", "--volumes"]).refusal();
    assert!(refused.contains("has no snapshot"), "{refused}");
    assert!(daemon.instances("shop").is_empty());
    assert_eq!(ask(&daemon, "shop", "result = open('/data/file').read()"), "first");
}

/// The quota and the disk bound what is copied; an instance goes on when there is no room.
#[test]
fn without_room_nothing_is_written_and_the_instance_goes_on() {
    let home = built_home("at-rest-full", &[]);
    fs::write(home.join("tenants.toml"), "[domain.x]\nvolumes = \"300MiB\"").expect("quotas");
    build(&home, "shop", "sharing = { domain = \"x\" }", DATA);
    let daemon = Daemon::start(&home, &DaemonOptions::default());
    ask(&daemon, "shop", "kept = open('/data/kept', 'w+b', 0); kept.write(os.urandom(8 << 20))");
    let id = instance(&daemon, "shop");
    checkpoint(&daemon, "shop", "one");
    let refused = command(&home, &["checkpoint", &id, "two", "--volumes"]).refusal();
    assert!(refused.contains("domain `x` is 300MiB for volumes"), "{refused}");
    command(&home, &["checkpoints", "--remove", "one"]).success();
    assert_eq!(daemon.stop(), Some(0));

    let snapshots = home.join("volumes/data/snapshots");
    let mut mount = std::process::Command::new("mount");
    mount.args(["-t", "tmpfs", "-o", "size=4m,mode=0777", "tmpfs"]).arg(&snapshots);
    if run(&mut mount).code != Some(0) {
        thaw_e2e::skip("mounting a small file system takes root");
        return;
    }
    let _mounted = Mounted(snapshots);
    let daemon = Daemon::start(&home, &DaemonOptions::default());
    ask(&daemon, "shop", "kept = open('/data/kept', 'r+b', 0)");
    let id = instance(&daemon, "shop");
    let refused = command(&home, &["checkpoint", &id, "two", "--volumes"]).refusal();
    assert!(refused.contains("No space left on device"), "{refused}");
    assert!(names(&home, "snapshots").is_empty() && names(&home, "numbers").is_empty());
    let listed = command(&home, &["checkpoints", "--json"]).success();
    assert_eq!(serde_json::from_str::<Value>(&listed).unwrap(), json!([]));
    assert_eq!(ask(&daemon, "shop", "kept.truncate(5); result = kept.tell()"), 0);
    checkpoint(&daemon, "shop", "two");
    assert_eq!(daemon.stop(), Some(0));
}

/// A file system that is gone with it.
struct Mounted(PathBuf);

impl Drop for Mounted {
    fn drop(&mut self) {
        run(std::process::Command::new("umount").arg("-l").arg(&self.0));
    }
}

/// Volume `data` with 96 MiB, so that to copy it takes a while, a checkpoint `one` of it, and a change since.
fn fill_and_change(daemon: &Daemon) {
    let write = "kept = open('/data/kept', 'w+b', 0)\n\
        for n in range(24): kept.write(os.urandom(4 << 20))\n\
        open('/data/note', 'w').write('first')";
    ask(daemon, "shop", write);
    checkpoint(daemon, "shop", "one");
    ask(daemon, "shop", "open('/data/note', 'w').write('second')");
}

/// Begins a checkpoint `two`, or to restore `one`, and is there in the middle of it.
fn in_the_middle_of(daemon: &Daemon, verb: &str) -> Child {
    let home = daemon.home();
    let mut asked = thaw();
    match verb {
        "checkpoint" => asked.args(["checkpoint", &instance(daemon, "shop"), "two", "--volumes"]),
        _ => {
            end(daemon, "shop");
            asked.args(["restore", "one", "--volumes"])
        }
    };
    let asked = asked.env("THAW_HOME", home).stderr(Stdio::null()).spawn().expect("thaw");
    let is_at_it = || match verb {
        "checkpoint" => names(home, "snapshots").iter().any(|name| name.starts_with('.')),
        _ => names(home, "").iter().any(|name| name == ".files.new"),
    };
    let until = Instant::now() + Duration::from_secs(10);
    while !is_at_it() && Instant::now() < until {}
    asked
}

/// How often it is tried to kill a daemon in the middle of something.
const KILLED_MAX: usize = 8;

/// What a daemon was at when it was killed is removed or undone by the next one.
#[test]
fn a_daemon_that_is_killed_leaves_nothing_half() {
    let home = home("at-rest-killed");
    for verb in ["checkpoint", "restore"] {
        // On a busy machine it may be done before the daemon is killed.
        let is_undone = (0..KILLED_MAX).any(|_| !is_done_by_a_killed_daemon(&home, verb));
        assert!(is_undone, "no daemon was killed in the middle of a {verb}");
    }
}

/// Kills a daemon that is at something; whether the next one finds that done, or else nothing of it.
fn is_done_by_a_killed_daemon(home: &Path, verb: &str) -> bool {
    let daemon = Daemon::start(home, &DaemonOptions::default());
    fill_and_change(&daemon);
    let mut asked = in_the_middle_of(&daemon, verb);
    daemon.kill();
    let is_told = asked.wait().expect("it is ours").success();
    drop(daemon);
    let daemon = Daemon::start(home, &DaemonOptions::default());
    let left = names(home, "snapshots");
    assert!(left.iter().all(|name| !name.starts_with('.')), "{verb}: {left:?}");
    assert_eq!(names(home, "numbers"), left, "{verb}");
    assert!(!home.join("volumes/.put-back").exists());
    let listed = command(home, &["checkpoints", "--json"]).success();
    let listed: Value = serde_json::from_str(&listed).expect("JSON");
    assert_eq!(listed.as_array().map(Vec::len), Some(left.len()), "{listed} {left:?}");
    let seen = ask(&daemon, "shop", "result = open('/data/note').read()");
    let is_done = match verb {
        "checkpoint" => {
            assert_eq!(seen, "second");
            left.len() == 2
        }
        _ => {
            assert_eq!(left.len(), 1, "{left:?}");
            assert!(seen == "first" || seen == "second", "{seen}");
            seen == "first"
        }
    };
    assert!(is_done || !is_told, "{verb}: what the client was told of is lost");
    // And all goes on as ever.
    end(&daemon, "shop");
    restore(&daemon, "one");
    assert_eq!(ask(&daemon, "shop", "result = open('/data/note').read()"), "first", "{verb}");
    let left = names(home, "");
    assert!(!left.iter().any(|name| name.starts_with('.')), "{left:?}");
    if is_done && verb == "checkpoint" {
        command(home, &["checkpoints", "--remove", "two"]).success();
    }
    assert_eq!(daemon.stop(), Some(0));
    is_done
}

/// What it has asked for is done, or nothing of it is, and nobody rests for it any more.
#[test]
fn a_client_that_goes_away_leaves_nothing_half() {
    let home = home("at-rest-gone");
    let daemon = Daemon::start(&home, &DaemonOptions::default());
    fill_and_change(&daemon);
    let mut asked = in_the_middle_of(&daemon, "checkpoint");
    asked.kill().expect("it is ours");
    asked.wait().expect("it is ours");
    // Whoever rests goes on.
    let seen = ask(&daemon, "shop", "result = open('/data/note').read()");
    assert_eq!(seen, "second");
    let is_whole = |of: &str| names(&home, of).iter().all(|name| !name.starts_with('.'));
    wait_until("nothing is half", || {
        let snapshots = names(&home, "snapshots");
        is_whole("snapshots") && is_whole("") && names(&home, "numbers") == snapshots
    });

    let mut asked = in_the_middle_of(&daemon, "restore");
    asked.kill().expect("it is ours");
    asked.wait().expect("it is ours");
    wait_until("nothing is half", || is_whole("snapshots") && is_whole(""));
    let seen = ask(&daemon, "shop", "result = open('/data/note').read()");
    assert!(seen == "first" || seen == "second", "{seen}");
    // And all goes on as ever. What the client has asked for is done to its end, and its instance may
    // come only now.
    wait_until("it is restored", || {
        end(&daemon, "shop");
        command(&home, &["restore", "one", "--volumes"]).code == Some(0)
    });
    assert_eq!(ask(&daemon, "shop", "result = open('/data/note').read()"), "first");
    checkpoint(&daemon, "shop", "three");
    assert_eq!(daemon.stop(), Some(0));
}
