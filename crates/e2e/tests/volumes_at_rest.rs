//! Checkpoints with the files of volumes: memory and files are of one moment, and are put back so.

use serde_json::{Value, json};
use std::fs;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::Duration;
use thaw_e2e::{Daemon, DaemonOptions, Outcome, built_home, get, post, repository, run, thaw};

const DATA: &str = "[[volumes]]\nname = \"data\"\npath = \"/data\"\nsize = \"128MiB\"\n";

/// Builds a function of a Python program that runs what it is sent.
fn build(home: &Path, name: &str, keys: &str, volumes: &str) {
    let directory = tempfile::tempdir().expect("a directory");
    let program = repository().join("tests/guest/functions/volumes.py");
    fs::copy(program, directory.path().join("app.py")).expect("a copy");
    let text = format!(
        "name = \"{name}\"\ncommand = [\"python3\", \"app.py\"]\nport = 8080\n\
         files = [\"app.py\"]\nisolation = \"instance\"\n{keys}\n{volumes}\n\
         [runtime]\nkind = \"python3\"\ninterpreter = \"/usr/bin/python3\"\n"
    );
    fs::write(directory.path().join("thaw.toml"), text).expect("thaw.toml");
    let mut build = thaw();
    build.env("THAW_HOME", home).args(["build", "--quiet", "--weak-limits"]);
    run(build.arg(directory.path())).success();
}

/// A home in which `shop` has volume `data`.
fn home(label: &str) -> PathBuf {
    let home = built_home(label, &[]);
    build(&home, "shop", "", DATA);
    home
}

fn command(home: &Path, arguments: &[&str]) -> Outcome {
    run(thaw().env("THAW_HOME", home).args(arguments))
}

#[track_caller]
fn ask(daemon: &Daemon, function: &str, code: &str) -> Value {
    let response = post(daemon.gateway(), function, "/", code.as_bytes());
    assert_eq!(response.status, 200, "{code}: {}", response.text());
    let answer = response.json();
    assert_eq!(answer.get("error"), None, "{code}: {answer}");
    answer["result"].clone()
}

#[track_caller]
fn refusal(outcome: Outcome) -> String {
    assert_ne!(outcome.code, Some(0), "{}", outcome.stdout);
    outcome.stderr
}

/// The only instance of a function.
#[track_caller]
fn instance(daemon: &Daemon, function: &str) -> String {
    let instances = daemon.instances(function);
    assert_eq!(instances.len(), 1, "{instances:?}");
    instances[0]["id"].to_string()
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
    thaw_e2e::wait_until("its instances have ended", || daemon.instances(function).is_empty());
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
        for n in range(100): db.execute('INSERT INTO t VALUES (?)', (n,))\n\
        number = os.stat('/data/app.db').st_ino\n\
        note = open('/data/note', 'w+b', 0); note.write(b'before')\n\
        shared = mmap.mmap(note.fileno(), 6)\n\
        db.execute('BEGIN IMMEDIATE'); db.execute('INSERT INTO t VALUES (100)')";
    ask(&daemon, "shop", begin);
    let taken = checkpoint(&daemon, "shop", "one");
    assert_eq!(taken["volumes"][0]["volume"], "data", "{taken}");
    // The original goes on.
    let more = "db.execute('COMMIT')\n\
        for n in range(1000, 1500): db.execute('INSERT INTO t VALUES (?)', (n,))\n\
        shared[:] = b'after.'; open('/data/other', 'w').write('x')\n\
        result = db.execute('SELECT count(*) FROM t').fetchone()[0]";
    assert_eq!(ask(&daemon, "shop", more), 601);

    let id = instance(&daemon, "shop");
    let refused = refusal(command(&home, &["restore", "one", "--volumes"]));
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
    look();
    thread::sleep(Duration::from_millis(200));
    let before = count(&look());
    checkpoint(&daemon, "mapped", "one");
    thread::sleep(Duration::from_millis(500));
    let after = look();
    assert_eq!(after["torn"], 0, "{after}");
    for _ in 0..2 {
        end(&daemon, "mapped");
        restore(&daemon, "one");
        let restored = look();
        assert_eq!(restored["torn"], 0, "{restored}");
        assert!(count(&restored) >= before, "{restored} {before}");
        thread::sleep(Duration::from_millis(100));
        let later = look();
        assert_eq!(later["torn"], 0, "{later}");
        assert!(count(&later) > count(&restored), "{later}");
    }
    // The file has a hole still.
    let file = fs::metadata(home.join("volumes/data/files/counters")).unwrap();
    let blocks = std::os::unix::fs::MetadataExt::blocks(&file);
    assert!(blocks * 512 < 16 << 20, "{blocks}");
}
