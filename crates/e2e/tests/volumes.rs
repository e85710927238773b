//! Volumes: files that outlive copies, are shared by them, and stay within their quota.

use serde_json::{Value, json};
use std::fs;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};
use thaw_e2e::{
    Daemon, DaemonOptions, Outcome, VolumeFunction as Function, ask_volume as ask, built_home,
    exists, post, request, run, thaw, wait_until,
};

const DATA: &str = "[[volumes]]\nname = \"data\"\npath = \"/data\"\nsize = \"8MiB\"\n";

fn command(home: &Path, arguments: &[&str]) -> Outcome {
    run(thaw().env("THAW_HOME", home).args(arguments))
}

/// Has a copy run some code; what it answers.
fn answer(gateway: SocketAddr, function: &str, code: &str) -> Value {
    let response = post(gateway, function, "/", code.as_bytes());
    assert_eq!(response.status, 200, "{code}: {}", response.text());
    response.json()
}

/// Kills a daemon, and waits until its sandboxes, which have files of volumes open, have ended, too.
fn end(daemon: &Daemon) {
    let sandboxes = daemon.sandboxes();
    daemon.kill();
    wait_until("its sandboxes have ended", || sandboxes.iter().all(|one| !exists(one.pid)));
}

fn files_of(home: &Path, volume: &str) -> PathBuf {
    home.join("volumes").join(volume).join("files")
}

#[test]
fn what_one_copy_writes_the_next_one_reads() {
    let home = built_home("volumes-shared", &[]);
    let one = Function { name: "one", keys: "", volumes: DATA, at_start: "" };
    one.build(&home).success();
    let ready = Function { name: "ready", keys: "ready = 2", ..one };
    let refused = ready.build(&home).refusal();
    assert!(refused.contains("`thaw volume allow data ready`"), "{refused}");
    command(&home, &["volume", "allow", "data", "ready"]).success();
    ready.build(&home).success();
    command(&home, &["volume", "allow", "data", "forked"]).success();
    Function { name: "forked", keys: "template = true", ..one }.build(&home).success();
    let daemon = Daemon::start(&home, &DaemonOptions::default());
    for (number, function) in ["one", "ready", "forked"].into_iter().enumerate() {
        let code = format!(
            "os.makedirs('/data/d{number}/sub')\n\
             with open('/data/d{number}/sub/file', 'w') as file: file.write('x' * 5000)\n\
             with open('/data/d{number}/sub/file', 'r+') as file:\n  file.seek(100); file.write('{function}')\n\
             with open('/data/log', 'a') as file: file.write('{function} ')\n\
             os.rename('/data/d{number}/sub/file', '/data/d{number}/moved')\n\
             os.symlink('moved', '/data/d{number}/link')\n\
             os.link('/data/d{number}/moved', '/data/d{number}/twin')"
        );
        ask(&daemon, function, &code);
        let code = format!(
            "text = open('/data/d{number}/link').read()\n\
             found = os.stat('/data/d{number}/twin')\n\
             result = [len(text), text[99:100 + {}], found.st_nlink, found.st_uid, sorted(os.listdir('/data/d{number}'))]",
            function.len() + 1
        );
        let found = ask(&daemon, "one", &code);
        let expected =
            json!([5000, format!("x{function}x"), 2, 0, ["link", "moved", "sub", "twin"]]);
        assert_eq!(found, expected);
    }
    let log = fs::read_to_string(files_of(&home, "data").join("log")).unwrap();
    assert_eq!(log, "one ready forked ");
    let info = command(&home, &["volume", "show", "data", "--json"]).success();
    let info: Value = serde_json::from_str(&info).unwrap();
    assert_eq!(info["functions"], json!(["one", "ready", "forked"]));
    assert_eq!(info["in_use"], true);
    let lines = command(&home, &["volume", "show", "data"]).success();
    assert!(lines.contains(", in use\nfunctions: one ready forked\n"), "{lines}");
    let refused = command(&home, &["volume", "remove", "data"]).refusal();
    assert!(refused.contains("in use"), "{refused}");
    assert_eq!(daemon.stop(), Some(0));
    command(&home, &["volume", "remove", "data"]).success();
    assert!(!home.join("volumes/data").exists());
}

#[test]
fn mappings_are_shared_and_a_file_that_shrinks_is_a_bus_error() {
    let home = built_home("volumes-mapped", &[]);
    let keys = "isolation = \"instance\"";
    let at_start = "import mmap\nf = open('/data/m', 'w+b'); f.truncate(3 * 4096)\n\
                    m = mmap.mmap(f.fileno(), 3 * 4096); m[0:5] = b'start'";
    Function { name: "mapped", keys, volumes: DATA, at_start }.build(&home).success();
    command(&home, &["volume", "allow", "data", "other"]).success();
    Function { name: "other", keys: "", volumes: DATA, at_start: "" }.build(&home).success();
    let daemon = Daemon::start(&home, &DaemonOptions::default());
    // The mapping of before the freeze shows the file, not what was frozen.
    let write =
        "with open('/data/m', 'r+b') as f: f.write(b'other'); f.seek(8192); f.write(b'third')";
    ask(&daemon, "other", write);
    assert_eq!(ask(&daemon, "mapped", "result = (m[0:5] + m[8192:8197]).decode()"), "otherthird");
    ask(&daemon, "mapped", "m[4096:4102] = b'second'");
    let read = "f = open('/data/m', 'rb'); f.seek(4096); result = f.read(6).decode()";
    assert_eq!(ask(&daemon, "other", read), "second");
    // A child process has the same mapping.
    let fork = "pid = os.fork()\n\
                if pid == 0:\n  m[4096:4102] = b'childs'; os._exit(0)\n\
                os.waitpid(pid, 0); result = m[4096:4102].decode()";
    assert_eq!(ask(&daemon, "mapped", fork), "childs");
    assert_eq!(ask(&daemon, "other", read), "childs");
    ask(&daemon, "other", "os.truncate('/data/m', 4096)");
    let die = "import signal\npid = os.fork()\n\
               if pid == 0:\n  m[8192]; os._exit(0)\n\
               result = os.WTERMSIG(os.waitpid(pid, 0)[1]) == signal.SIGBUS";
    assert_eq!(ask(&daemon, "mapped", die), true);
    // A system call finds no memory there, and the kernel goes on.
    let call = "r, w = os.pipe()\n\
                try: os.write(w, memoryview(m)[8192:8200]); result = 0\n\
                except OSError as e: result = e.errno";
    assert_eq!(ask(&daemon, "mapped", call), 14);
    let grown = "with open('/data/m', 'r+b') as g: g.seek(8192); g.write(b'again')";
    ask(&daemon, "mapped", grown);
    assert_eq!(ask(&daemon, "other", "result = os.stat('/data/m').st_size"), 8197);
}

#[test]
fn a_mapping_shows_a_file_that_grows_under_it() {
    let home = built_home("volumes-windows", &[]);
    command(&home, &["volume", "create", "data", "--size", "32MiB"]).success();
    // Faults map windows of 2 MiB: pages on both sides of their ends, in any order, and pages that
    // the file gets after its window was mapped.
    let code = "\
import mmap, os, random
random.seed(3)
f = open('/v/file', 'w+b', buffering=0)
f.truncate(9 << 20)
m = mmap.mmap(f.fileno(), 9 << 20)
f.truncate(3 * 4096)
m[4096] = 1
f.truncate(5 * 4096 + 7)
assert m[4 * 4096] == 0
m[5 * 4096] = 2
f.truncate(9 << 20)
pages = list(range(9 << 8))
random.shuffle(pages)
for page in pages:
    if page % 3 == 0:
        os.pwrite(f.fileno(), bytes([page % 251]), page * 4096 + 5)
    elif page % 3 == 1:
        m[page * 4096 + 5] = page % 251
pid = os.fork()
for page in pages:
    want = page % 251 if page % 3 < 2 else 0
    assert m[page * 4096 + 5] == want, page
    assert os.pread(f.fileno(), 1, page * 4096 + 5)[0] == want, page
assert m[4096] == 1 and m[5 * 4096] == 2
if pid == 0:
    m[8 << 20] = 9
    os._exit(0)
assert os.waitpid(pid, 0)[1] == 0
assert m[8 << 20] == 9
print('shown')
";
    assert_eq!(run_with(&home, "data:/v", code).success(), "shown\n");
}

#[test]
fn volumes_count_for_their_tenant_and_are_shown_by_df() {
    let home = built_home("volumes-tenants", &[]);
    fs::write(home.join("tenants.toml"), "[domain.x]\nvolumes = \"9MiB\"").expect("quotas");
    let keys = "sharing = { domain = \"x\" }";
    Function { name: "one", keys, volumes: DATA, at_start: "" }.build(&home).success();
    let more = "[[volumes]]\nname = \"more\"\npath = \"/data\"\nsize = \"2MiB\"\n";
    let refused =
        Function { name: "two", keys, volumes: more, at_start: "" }.build(&home).refusal();
    assert!(refused.contains("domain `x` is 9MiB for volumes"), "{refused}");
    // A snapshot counts as much again as the volume.
    let refused = command(&home, &["volume", "snapshot", "data", "now"]).refusal();
    assert!(refused.contains("domain `x` is 9MiB for volumes"), "{refused}");
    Function { name: "two", keys: "", volumes: more, at_start: "" }.build(&home).success();
    let shown = command(&home, &["df"]).success();
    let line = |name: &str| shown.lines().find(|line| line.starts_with(name)).map(str::to_owned);
    let data = line("data").unwrap_or_else(|| panic!("{shown}"));
    assert!(data.contains("8.0MiB") && data.trim_end().ends_with('x'), "{shown}");
    assert!(line("more").is_some(), "{shown}");
    let daemon = Daemon::start(&home, &DaemonOptions::default());
    let tenants = daemon.admin("/tenants").json();
    let of_x = tenants.as_array().expect("a list").iter().find(|one| one["domain"] == "x");
    assert_eq!(of_x.expect("the tenant")["volumes"], 8 << 20);
}

#[test]
fn copies_lock_each_other_out() {
    let home = built_home("volumes-locks", &[]);
    let keys = "isolation = \"instance\"\nready = 0";
    let at_start = "import fcntl\nf = open('/data/lock', 'w+b')";
    Function { name: "holder", keys, volumes: DATA, at_start }.build(&home).success();
    command(&home, &["volume", "allow", "data", "asker"]).success();
    Function { name: "asker", keys, volumes: DATA, at_start }.build(&home).success();
    let daemon = Daemon::start(&home, &DaemonOptions::default());
    let attempt =
        |call: &str| format!("try: {call}; result = 0\nexcept OSError as e: result = e.errno");
    for (take, again, give) in [
        (
            "fcntl.lockf(f, fcntl.LOCK_EX | fcntl.LOCK_NB, 10, 5)",
            "fcntl.lockf(f, fcntl.LOCK_SH | fcntl.LOCK_NB, 1, 14)",
            "fcntl.lockf(f, fcntl.LOCK_UN, 10, 5)",
        ),
        (
            "fcntl.flock(f, fcntl.LOCK_EX | fcntl.LOCK_NB)",
            "fcntl.flock(f, fcntl.LOCK_SH | fcntl.LOCK_NB)",
            "fcntl.flock(f, fcntl.LOCK_UN)",
        ),
    ] {
        assert_eq!(ask(&daemon, "holder", &attempt(take)), 0);
        assert_eq!(ask(&daemon, "asker", &attempt(again)), 11, "{again}");
        assert_eq!(ask(&daemon, "holder", &attempt(give)), 0);
        assert_eq!(ask(&daemon, "asker", &attempt(again)), 0, "{again}");
        assert_eq!(ask(&daemon, "holder", &attempt(take)), 11, "{take}");
        ask(&daemon, "asker", "fcntl.lockf(f, fcntl.LOCK_UN); fcntl.flock(f, fcntl.LOCK_UN)");
    }
    // F_GETLK sees the lock of another sandbox, and one that waits gets it when its holder dies.
    ask(&daemon, "holder", "fcntl.lockf(f, fcntl.LOCK_EX)");
    let look = "import struct\nl = struct.pack('hhqqi4x', fcntl.F_WRLCK, 0, 0, 0, 0)\n\
                result = struct.unpack('hhqqi4x', fcntl.fcntl(f, fcntl.F_GETLK, l))[0]";
    assert_eq!(ask(&daemon, "asker", look), 1);
    let gateway = daemon.gateway();
    let waiting = thread::spawn(move || {
        answer(gateway, "asker", "fcntl.lockf(f, fcntl.LOCK_EX); result = 'mine'")
    });
    thread::sleep(Duration::from_millis(300));
    if waiting.is_finished() {
        panic!("it did not wait: {}", waiting.join().unwrap());
    }
    let code = b"import signal\nos.kill(os.getpid(), signal.SIGKILL)";
    let _ = request(gateway, "holder", "/", Some(code));
    assert_eq!(waiting.join().unwrap()["result"], "mine");
}

#[test]
fn files_that_were_open_when_frozen_are_not_confused() {
    let home = built_home("volumes-handles", &[]);
    let keys = "isolation = \"instance\"\nready = 0";
    let at_start = "import fcntl\n\
        a = open('/data/a', 'w+b', 0)\nb = open('/data/b', 'w+b', 0)\n\
        a.write(b'a' * 10)\nb.write(b'b' * 20)\n\
        fcntl.lockf(a, fcntl.LOCK_EX, 5, 0)\nfcntl.lockf(b, fcntl.LOCK_EX, 5, 10)";
    Function { name: "holder", keys, volumes: DATA, at_start }.build(&home).success();
    command(&home, &["volume", "allow", "data", "asker"]).success();
    let at_start = "import fcntl";
    Function { name: "asker", keys, volumes: DATA, at_start }.build(&home).success();
    let daemon = Daemon::start(&home, &DaemonOptions::default());
    // The second file is the first one that the host opens for the copy.
    assert_eq!(ask(&daemon, "holder", "result = os.pread(b.fileno(), 1, 0).decode()"), "b");
    let look = "s, n = os.fstat(a.fileno()), os.stat('/data/a')\n\
                result = [s.st_size, s.st_ino == n.st_ino]";
    assert_eq!(ask(&daemon, "holder", look), json!([10, true]));
    assert_eq!(ask(&daemon, "holder", "result = os.pread(a.fileno(), 1, 0).decode()"), "a");
    let attempt = |name: &str, start: u32| {
        let code = format!(
            "f = open('/data/{name}', 'r+b')\n\
             try: fcntl.lockf(f, fcntl.LOCK_EX | fcntl.LOCK_NB, 5, {start}); result = 0\n\
             except OSError as e: result = e.errno"
        );
        ask(&daemon, "asker", &code)
    };
    assert_eq!([attempt("a", 0), attempt("a", 10)], [11, 0]);
    assert_eq!([attempt("b", 0), attempt("b", 10)], [0, 11]);
}

#[test]
fn a_quota_holds_against_every_way_to_write() {
    let home = built_home("volumes-quota", &[]);
    let keys = "isolation = \"instance\"";
    Function { name: "full", keys, volumes: DATA, at_start: "" }.build(&home).success();
    let daemon = Daemon::start(&home, &DaemonOptions::default());
    let edquot = 122;
    let attempt = |code: &str| {
        let code = code.replace('\n', "\n ");
        format!("try:\n {code}\n result = 0\nexcept OSError as e: result = e.errno")
    };
    let ask = |code: &str| ask(&daemon, "full", &attempt(code));
    assert_eq!(
        ask("held = open('/data/a', 'wb', 0)\nwhile held.write(b'x' * 65536): pass"),
        edquot
    );
    let size = fs::metadata(files_of(&home, "data").join("a")).unwrap().len();
    assert!((7 << 20..=8 << 20).contains(&size), "{size}");
    for code in [
        "os.truncate('/data/a', 1 << 40)",
        "os.open('/data/b', os.O_CREAT | os.O_WRONLY)\nos.truncate('/data/b', 1 << 30)",
        "for n in range(4096): open(f'/data/n{n}', 'w').close()",
        "for n in range(4096): os.mkdir(f'/data/m{n}')",
        "for n in range(4096): os.symlink('a', f'/data/s{n}')",
        "for n in range(4096): os.link('/data/a', f'/data/l{n}')",
        "with open('/data/a', 'ab', 0) as f: f.write(b'x' * (1 << 20))",
    ] {
        assert_eq!(ask(code), edquot, "{code}");
    }
    assert_eq!(ask("s = os.statvfs('/data')\nassert s.f_blocks == 2048 and s.f_bavail < 16"), 0);
    // No write(2) of a hostile one makes a file longer.
    let (_, pid, _) = daemon.instance("full");
    let limits = fs::read_to_string(format!("/proc/{pid}/limits")).unwrap();
    let limit = limits.lines().find(|line| line.starts_with("Max file size")).unwrap();
    assert_eq!(limit.split_whitespace().nth(3), Some("0"), "{limit}");
    // What is removed while it is open counts until it is closed.
    let remove = "for n in os.listdir('/data'):\n if n[0] in 'lns': os.unlink('/data/' + n)\n if n[0] == 'm': os.rmdir('/data/' + n)";
    assert_eq!(ask(remove), 0);
    let more = "g = open('/data/c', 'wb', 0)\nwhile g.write(b'x' * 65536): pass";
    assert_eq!(ask(&format!("os.unlink('/data/a')\n{more}")), edquot);
    let size = || fs::metadata(files_of(&home, "data").join("c")).unwrap().len();
    assert!(size() < 1 << 20, "{}", size());
    assert_eq!(ask(&format!("held.close()\n{more}")), edquot);
    assert!(size() > 7 << 20, "{}", size());
    end(&daemon);
    let counted = command(&home, &["volume", "show", "data", "--json"]).success();
    let counted: Value = serde_json::from_str(&counted).unwrap();
    // The next who opens it counts again, and comes to the same.
    Function { name: "full", keys, volumes: DATA, at_start: "" }.build(&home).success();
    let again = command(&home, &["volume", "show", "data", "--json"]).success();
    let again: Value = serde_json::from_str(&again).unwrap();
    assert_eq!(counted["used"], again["used"]);
}

#[test]
fn a_read_only_volume_cannot_be_changed() {
    let home = built_home("volumes-read-only", &[]);
    command(&home, &["volume", "create", "data", "--size", "1MiB", "--function", "reader"])
        .success();
    fs::write(files_of(&home, "data").join("file"), "content").unwrap();
    let volumes = "[[volumes]]\nname = \"data\"\npath = \"/srv/data\"\nread_only = true\n";
    let keys = "isolation = \"instance\"";
    let at_start = "import mmap, fcntl";
    Function { name: "reader", keys, volumes, at_start }.build(&home).success();
    let daemon = Daemon::start(&home, &DaemonOptions::default());
    assert_eq!(ask(&daemon, "reader", "result = open('/srv/data/file').read()"), "content");
    let map = "m = mmap.mmap(os.open('/srv/data/file', os.O_RDONLY), 7, prot=mmap.PROT_READ)\n\
               result = m[:].decode()";
    assert_eq!(ask(&daemon, "reader", map), "content");
    for code in [
        "open('/srv/data/file', 'r+')",
        "open('/srv/data/new', 'w')",
        "os.unlink('/srv/data/file')",
        "os.truncate('/srv/data/file', 0)",
        "os.mkdir('/srv/data/d')",
        "os.rename('/srv/data/file', '/srv/data/f')",
    ] {
        let answer = answer(daemon.gateway(), "reader", code);
        assert_eq!(answer["errno"], 30, "{code}: {answer}");
    }
}

/// Several instances of two functions write to a database in WAL mode, and are killed.
#[test]
fn a_database_survives_its_writers() {
    let home = built_home("volumes-sqlite", &[]);
    let keys = "isolation = \"instance\"\nready = 1";
    let at_start = "db = sqlite3.connect('/data/app.db', timeout=30, check_same_thread=False, isolation_level=None)\n\
                    db.execute('PRAGMA journal_mode = WAL')\n\
                    db.execute('CREATE TABLE IF NOT EXISTS t (who TEXT, n INTEGER, filler BLOB)')";
    let volumes = "[[volumes]]\nname = \"data\"\npath = \"/data\"\nsize = \"256MiB\"\n";
    let names = ["first", "second", "third"];
    for name in names {
        if name != "first" {
            command(&home, &["volume", "allow", "data", name]).success();
        }
        Function { name, keys, volumes, at_start }.build(&home).success();
    }
    let daemon = Daemon::start(&home, &DaemonOptions::default());
    let gateway = daemon.gateway();
    let until = Instant::now() + Duration::from_secs(20);
    let latest = until + Duration::from_secs(100);
    // A connection that cannot go on after the freeze says so, and is made again.
    let insert = "def insert(who, n):\n\
                  \x20global db\n\
                  \x20for attempt in range(20):\n\
                  \x20 try:\n\
                  \x20  db.execute('BEGIN IMMEDIATE')\n\
                  \x20  db.execute('INSERT INTO t VALUES (?, ?, ?)', (who, n, os.urandom(3000)))\n\
                  \x20  db.execute('COMMIT'); return\n\
                  \x20 except sqlite3.Error as error:\n\
                  \x20  db.close(); db = sqlite3.connect('/data/app.db', timeout=30, check_same_thread=False, isolation_level=None)\n\
                  \x20raise error\n";
    let writers = names.map(|name| {
        thread::spawn(move || {
            let (mut committed, mut killed) = (Vec::new(), 0);
            for n in 0_u32.. {
                // For longer where each takes long.
                let is_enough = (committed.len() > 10 && killed > 1) || Instant::now() >= latest;
                if Instant::now() >= until && is_enough {
                    break;
                }
                if n % 7 == 6 {
                    // In the middle of a transaction.
                    let code = "db.execute('BEGIN IMMEDIATE')\n\
                                db.execute(\"INSERT INTO t VALUES ('none', 0, zeroblob(100000))\")\n\
                                import signal; os.kill(os.getpid(), signal.SIGKILL)";
                    let _ = request(gateway, name, "/", Some(code.as_bytes()));
                    killed += 1;
                    continue;
                }
                let code = format!("{insert}\ninsert('{name}', {n})");
                let response = post(gateway, name, "/", code.as_bytes());
                if response.status == 200 && response.json().get("error").is_none() {
                    committed.push(n);
                    // SQLite's lock is not fair: who writes without a pause keeps the others out.
                    thread::sleep(Duration::from_millis(10));
                } else if response.status == 200 {
                    panic!("{}", response.text());
                }
            }
            (name, committed, killed)
        })
    });
    for writer in writers {
        let (name, committed, killed) = writer.join().unwrap();
        assert!(committed.len() > 10 && killed > 1, "{name}: {} {killed}", committed.len());
        let read = format!(
            "c = sqlite3.connect('/data/app.db', timeout=30)\n\
             result = [c.execute('PRAGMA integrity_check').fetchone()[0], \
             [n for n, in c.execute(\"SELECT n FROM t WHERE who = '{name}' ORDER BY n\")], \
             c.execute(\"SELECT count(*) FROM t WHERE who = 'none'\").fetchone()[0]]"
        );
        assert_eq!(ask(&daemon, name, &read), json!(["ok", committed, 0]));
    }
}

#[test]
fn why_a_volume_cannot_be_opened_is_in_the_log_once() {
    let home = built_home("volumes-unusable", &[]);
    Function { name: "one", keys: "", volumes: DATA, at_start: "" }.build(&home).success();
    let users = home.join("volumes/data/users");
    fs::remove_file(&users).unwrap();
    fs::create_dir(&users).unwrap();
    let daemon = Daemon::start(&home, &DaemonOptions::default());
    let is_about_it = |line: &&str| {
        line.contains("no instance of `one` begins") && line.contains("volume `data`")
    };
    let said = || daemon.log().lines().filter(is_about_it).map(str::to_owned).collect::<Vec<_>>();
    wait_until("the log says why", || !said().is_empty());
    for _ in 0..3 {
        assert_ne!(post(daemon.gateway(), "one", "/", b"result = 1").status, 200);
    }
    assert!(said().len() == 1 && said()[0].contains("mend what prevents that"), "{:?}", said());
    fs::remove_dir(&users).unwrap();
    wait_until("it is served", || post(daemon.gateway(), "one", "/", b"result = 1").status == 200);
}

#[test]
fn a_volume_that_is_missing_is_named_to_who_asks() {
    let home = built_home("volumes-missing", &[]);
    Function { name: "one", keys: "", volumes: DATA, at_start: "" }.build(&home).success();
    // As on a node that has pulled the function: its volumes stay where it was built.
    command(&home, &["volume", "remove", "data"]).success();
    let daemon = Daemon::start(&home, &DaemonOptions::default());
    let refused = post(daemon.gateway(), "one", "/", b"result = 1");
    assert_eq!(refused.status, 503, "{}", refused.text());
    let making = "thaw volume create data --size 8MiB --function one";
    let why =
        format!("there is no volume `data`, which function `one` mounts; `{making}` makes it");
    let explained = daemon.explain(&refused);
    assert!(explained.contains("not_set_up") && explained.contains(&why), "{explained}");
    let problem = || daemon.admin("/functions/one").json()["problem"].clone();
    assert_eq!(problem(), why);
    let listed = command(&home, &["list"]).success();
    assert!(listed.contains(&why), "{listed}");
    let words: Vec<_> = making.split(' ').skip(1).collect();
    command(&home, &words).success();
    assert_eq!(problem(), Value::Null);
    wait_until("it is served", || post(daemon.gateway(), "one", "/", b"result = 1").status == 200);
}

/// `thaw run` in a stored root file system, with a volume.
fn run_with(home: &Path, volume: &str, code: &str) -> Outcome {
    let arguments = ["run", "--weak-limits", "--rootfs", "/", "-v", volume, "--"];
    command(home, &[&arguments[..], &["/usr/bin/python3", "-c", code]].concat())
}

#[test]
fn a_program_is_run_with_a_volume() {
    let home = built_home("volumes-run", &[]);
    let missing = run_with(&home, "data:/v", "pass").refusal();
    assert!(missing.contains("there is no volume `data`"), "{missing}");
    command(&home, &["volume", "create", "data", "--size", "1MiB"]).success();
    let write = "open('/v/a', 'w').write('kept')";
    run_with(&home, "data:/v", write).success();
    assert_eq!(fs::read_to_string(files_of(&home, "data").join("a")).unwrap(), "kept");
    let read = "print(open('/v/a').read())";
    assert_eq!(run_with(&home, "data:/v:ro", read).success(), "kept\n");
    let refused = run_with(&home, "data:/v:ro", write).refusal();
    assert!(refused.contains("Read-only file system"), "{refused}");
    let refused = run_with(&home, "data:/v", "open('/v/b', 'wb').write(bytes(2 << 20))").refusal();
    assert!(refused.contains("quota exceeded"), "{refused}");
}

/// No program with a volume makes a file longer itself, also not the one that its output goes to.
#[test]
fn a_program_with_a_volume_writes_to_files_of_its_caller() {
    let home = built_home("volumes-output", &[]);
    command(&home, &["volume", "create", "data", "--size", "1MiB"]).success();
    let path = home.join("output");
    let output = fs::File::create(&path).unwrap();
    let code = "import sys\n\
        for n in range(1000):\n\
        \x20print(n, file=(sys.stdout, sys.stderr)[n % 2], flush=True)\n\
        sys.exit(3)";
    let status = thaw()
        .env("THAW_HOME", &home)
        .args(["run", "--weak-limits", "--rootfs", "/", "-v", "data:/v", "--"])
        .args(["/usr/bin/python3", "-c", code])
        .stdout(output.try_clone().unwrap())
        .stderr(output)
        .status();
    assert_eq!(status.unwrap().code(), Some(3));
    let written = fs::read_to_string(&path).unwrap();
    let expected: Vec<String> = (0..1000).map(|n| n.to_string()).collect();
    let numbers = |line: &&str| line.parse::<u32>().is_ok();
    assert_eq!(written.lines().filter(numbers).collect::<Vec<_>>(), expected, "{written}");
}

/// A database that was in use when its daemon and the writers were killed.
#[test]
fn a_snapshot_of_a_database_is_whole() {
    let home = built_home("volumes-snapshot", &[]);
    let keys = "isolation = \"instance\"";
    let volumes = "[[volumes]]\nname = \"data\"\npath = \"/data\"\nsize = \"64MiB\"\n";
    Function { name: "writer", keys, volumes, at_start: "" }.build(&home).success();
    let daemon = Daemon::start(&home, &DaemonOptions::default());
    let write = "import threading\n\
        db = sqlite3.connect('/data/app.db', check_same_thread=False, isolation_level=None)\n\
        db.execute('PRAGMA journal_mode = WAL')\n\
        db.execute('CREATE TABLE t (n INTEGER, filler BLOB)')\n\
        for n in range(50): db.execute('INSERT INTO t VALUES (?, ?)', (n, os.urandom(3000)))\n\
        def more():\n\
        \x20while True: db.execute('INSERT INTO t VALUES (1000, ?)', (os.urandom(3000),))\n\
        threading.Thread(target=more, daemon=True).start()";
    ask(&daemon, "writer", write);
    // Its writer rests meanwhile.
    command(&home, &["volume", "snapshot", "data", "busy"]).success();
    daemon.kill();
    let until = Instant::now() + Duration::from_secs(60);
    // Its sandboxes end a moment after it; until then, files are open.
    loop {
        let outcome = command(&home, &["volume", "snapshot", "data", "one"]);
        if outcome.code == Some(0) {
            break;
        }
        let is_early = ["is open to be written", "is in use"];
        assert!(is_early.iter().any(|text| outcome.stderr.contains(text)), "{}", outcome.stderr);
        assert!(Instant::now() < until, "{}", outcome.stderr);
        thread::sleep(Duration::from_millis(100));
    }
    let check = "import sqlite3\n\
        db = sqlite3.connect('/data/app.db')\n\
        print(db.execute('PRAGMA integrity_check').fetchone()[0],\n\
              db.execute('SELECT count(*) FROM t WHERE n < 1000').fetchone()[0])";
    for label in ["one", "busy"] {
        fs::write(files_of(&home, "data").join("app.db"), "spoilt").unwrap();
        command(&home, &["volume", "restore", "data", label]).success();
        assert_eq!(run_with(&home, "data:/data", check).success(), "ok 50\n", "{label}");
    }
    let shown = command(&home, &["volume", "show", "data", "--json"]).success();
    let shown: Value = serde_json::from_str(&shown).unwrap();
    assert_eq!(shown["snapshots"][1]["label"], "one");
    command(&home, &["volume", "snapshot", "data", "one", "--remove"]).success();
    let gone = command(&home, &["volume", "restore", "data", "one"]).refusal();
    assert!(gone.contains("has no snapshot `one`"), "{gone}");
}

/// What a process other than the first one has written and closed is not open any more.
#[test]
fn a_volume_is_copied_whose_files_were_written_and_closed() {
    let home = built_home("volumes-closed", &[]);
    let keys = "isolation = \"instance\"";
    let volumes = "[[volumes]]\nname = \"data\"\npath = \"/data\"\nsize = \"64MiB\"\n";
    Function { name: "writer", keys, volumes, at_start: "" }.build(&home).success();
    let daemon = Daemon::start(&home, &DaemonOptions::default());
    let write = "import subprocess, sys\n\
        code = 'import time; file = open(\"/data/x\", \"wb\"); file.write(b\"kept\"); file.close(); \\\n\
        print(1, flush=True); time.sleep(1000)'\n\
        child = subprocess.Popen([sys.executable, '-c', code], stdout=subprocess.PIPE)\n\
        print(child.stdout.readline())";
    ask(&daemon, "writer", write);
    command(&home, &["volume", "snapshot", "data", "one"]).success();
    let instance = daemon.first_instance("writer")["id"].to_string();
    command(&home, &["checkpoint", &instance, "both", "--volumes"]).success();
    assert_eq!(run_with(&home, "data:/v", "print(open('/v/x').read())").success(), "kept\n");
}

#[test]
fn a_directory_of_the_host_is_served_as_its_owner_sees_it() {
    let home = built_home("volumes-host", &[]);
    let host = tempfile::tempdir().unwrap();
    let path = host.path().to_str().unwrap();
    let volumes =
        format!("[[volumes]]\nname = \"photos\"\npath = \"/photos\"\nhost = \"{path}\"\n");
    let function = Function {
        name: "shop",
        keys: "isolation = \"instance\"",
        volumes: &volumes,
        at_start: "",
    };
    let refused = function.build(&home).refusal();
    assert!(
        refused.contains("the operator makes it so with `thaw volume create photos"),
        "{refused}"
    );
    let create =
        ["volume", "create", "photos", "--size", "1MiB", "--host", path, "--function", "shop"];
    let refused = command(&home, &create).refusal();
    let owner = refused.split("as user ").nth(1).and_then(|rest| rest.split(';').next());
    let owner: u32 = owner.and_then(|owner| owner.parse().ok()).expect(&refused);
    std::os::unix::fs::chown(host.path(), Some(owner), Some(owner)).unwrap();
    command(&home, &create).success();
    // One of root's, which its owner may not read, and a way out.
    fs::write(host.path().join("secret"), "secret").unwrap();
    std::os::unix::fs::symlink("/etc/passwd", host.path().join("out")).unwrap();
    std::os::unix::fs::symlink("/etc", host.path().join("etc")).unwrap();
    let private = std::os::unix::fs::PermissionsExt::from_mode(0o600);
    fs::set_permissions(host.path().join("secret"), private).unwrap();
    let look = "def attempt(path):\n\
        \x20try: return open('/photos/' + path).read() == ''\n\
        \x20except OSError as e: return e.errno\n\
        result = attempt('secret')";
    // While it is built, root serves it.
    let kept = "def attempt(path):\n\
        \x20try: return open('/photos/' + path).read() == ''\n\
        \x20except OSError as e: return e.errno\n\
        at_build = attempt('secret'); open('/photos/built', 'w').write('x')";
    Function { at_start: kept, ..function }.build(&home).success();
    let daemon = Daemon::start(&home, &DaemonOptions::default());
    assert_eq!(ask(&daemon, "shop", "result = at_build"), 13);
    assert_eq!(ask(&daemon, "shop", look), 13);
    // The link is followed in the sandbox, where it leads to the sandbox' own file, if to any.
    let own = "result = [open('/photos/out').read() == open('/etc/passwd').read()\
               if os.path.exists('/etc/passwd') else not os.path.exists('/photos/out'),\
               os.path.exists('/photos/etc/shadow')]";
    assert_eq!(ask(&daemon, "shop", own), json!([true, false]));
    ask(&daemon, "shop", "open('/photos/new', 'w').write('new')");
    for (name, content) in [("new", "new"), ("built", "x")] {
        let made = host.path().join(name);
        assert_eq!(fs::read_to_string(&made).unwrap(), content);
        let made = fs::metadata(made).unwrap();
        assert_eq!(std::os::unix::fs::MetadataExt::uid(&made), owner, "{name}");
    }
    end(&daemon);
    // The home is that user's by now, and root acts as its owner when it opens a volume.
    let later = "open('/photos/later', 'w').write('x')";
    Function { at_start: later, ..function }.build(&home).success();
    let made = fs::metadata(host.path().join("later")).unwrap();
    assert_eq!(std::os::unix::fs::MetadataExt::uid(&made), owner);
    command(&home, &["volume", "remove", "photos"]).success();
    assert!(host.path().join("new").exists());
}
