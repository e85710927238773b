//! Files that several sandboxes use at once, and how long they are for each of them.

use serde_json::json;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::thread;
use std::time::{Duration, Instant};
use thaw_e2e::{
    Daemon, DaemonOptions, VolumeFunction, ask_volume, built_home, command, exists, post, request,
    run, thaw, wait_until,
};

const DATA: &str = "[[volumes]]\nname = \"data\"\npath = \"/data\"\nsize = \"256MiB\"\n";
const NAMES: [&str; 3] = ["first", "second", "third"];

/// A home with functions that share a volume.
fn home(label: &str, names: &[&str], keys: &str, at_start: &str) -> PathBuf {
    let home = built_home(label, &[]);
    for &name in names {
        if name != names[0] {
            let mut allow = thaw();
            allow.env("THAW_HOME", &home).args(["volume", "allow", "data", name]);
            run(&mut allow).success();
        }
        VolumeFunction { name, keys, volumes: DATA, at_start }.build(&home).success();
    }
    home
}

fn files(home: &Path) -> PathBuf {
    home.join("volumes/data/files")
}

/// Has all functions run some code at once.
fn at_once(daemon: &Daemon, code: impl Fn(&str) -> String + Sync) -> Vec<serde_json::Value> {
    let code = &code;
    thread::scope(|threads| {
        let asked = NAMES.map(|name| threads.spawn(move || ask_volume(daemon, name, &code(name))));
        asked.map(|asked| asked.join().expect("an answer")).to_vec()
    })
}

/// One, which is asked again and again: a client may have its answer before its instance is free.
const STAYS: &str = "isolation = \"instance\"\nlimits.instances = 1";

/// Records of many lengths that a program appends as `who`, for a while; how many.
fn append(who: &str, reopens: bool) -> String {
    let open = "fd = os.open('/data/log', os.O_WRONLY | os.O_APPEND | os.O_CREAT)";
    let again = if reopens { format!("os.close(fd); {open}") } else { "pass".to_owned() };
    format!(
        "import time\n{open}\nend, n = time.monotonic() + 4, 0\n\
         while time.monotonic() < end + 20 * (n <= 50) and n < 5000:\n\
         \x20n += 1\n\
         \x20line = ('{who} %d ' % n + 'x' * (n * 37 % 9000) + '\\n').encode()\n\
         \x20assert os.write(fd, line) == len(line)\n\
         \x20if n % 3 == 0: {again}\n\
         os.close(fd)\nresult = n"
    )
}

/// Checks that a file consists of whole records: so many of each writer, in order.
fn check_records(log: &Path, counts: &[(&str, u64)]) {
    let text = fs::read_to_string(log).expect("a text");
    let mut seen = vec![0_u64; counts.len()];
    for line in text.split_terminator('\n') {
        let mut parts = line.split(' ');
        let (who, n) = (parts.next().unwrap_or_default(), parts.next().unwrap_or_default());
        let index = counts.iter().position(|(name, _)| *name == who);
        let index = index.unwrap_or_else(|| panic!("no record: {:?}", &line[..line.len().min(60)]));
        seen[index] += 1;
        assert_eq!(n.parse(), Ok(seen[index]), "{who}");
        let filler = parts.next().expect("a filler");
        assert_eq!(filler.len() as u64, seen[index] * 37 % 9000, "{who} {n}");
    }
    assert!(text.ends_with('\n'));
    assert_eq!(seen, counts.iter().map(|(_, count)| *count).collect::<Vec<_>>());
}

#[test]
fn what_sandboxes_append_at_once_is_there_whole() {
    let home = home("volumes-append", &NAMES, STAYS, "");
    let daemon = Daemon::start(&home, &DaemonOptions::default());
    for reopens in [false, true] {
        let counts = at_once(&daemon, |name| append(name, reopens));
        let counts = counts.iter().map(|count| count.as_u64().expect("a number"));
        let counts: Vec<_> = NAMES.into_iter().zip(counts).collect();
        assert!(counts.iter().all(|(_, count)| *count > 50), "{counts:?}");
        check_records(&files(&home).join("log"), &counts);
        fs::remove_file(files(&home).join("log")).unwrap();
    }
}

/// One writer that nobody disturbs, and readers that come and go: what they see is the beginning of
/// what is written.
#[test]
fn who_reads_a_file_that_grows_sees_its_beginning() {
    let home = home("volumes-grow", &NAMES, STAYS, "");
    let daemon = Daemon::start(&home, &DaemonOptions::default());
    let write = "import time\n\
        f = open('/data/grows', 'wb', buffering=0)\n\
        end, n = time.monotonic() + 4, 0\n\
        while time.monotonic() < end:\n\
        \x20f.write(b''.join(b'%08d' % (n + k) for k in range(1 + n % 900))); n += 1 + n % 900\n\
        \x20if n > 4000000: f.truncate(0); f.seek(0); n = 0\n\
        result = os.fstat(f.fileno()).st_size // 8 == n and os.path.getsize('/data/grows') // 8 == n";
    // The writer may begin later, on a busy machine.
    let read = "import time\nend, result = time.monotonic() + 4, 0\n\
        while time.monotonic() < end + 20 * (result <= 1000):\n\
        \x20try: f = open('/data/grows', 'rb', buffering=0)\n\
        \x20except FileNotFoundError: continue\n\
        \x20for _ in range(3):\n\
        \x20\x20data = f.read(65536)\n\
        \x20\x20count = len(data) // 8\n\
        \x20\x20first = int(data[:8] or b'0')\n\
        \x20\x20assert data[:8 * count] == b''.join(b'%08d' % (first + k) for k in range(count)), data[:80]\n\
        \x20\x20result += count\n\
        \x20f.close()";
    let answers = at_once(&daemon, |name| (if name == "first" { write } else { read }).to_owned());
    assert_eq!(answers[0], json!(true));
    assert!(answers[1].as_u64() > Some(1000) && answers[2].as_u64() > Some(1000), "{answers:?}");
}

/// Files that are made and removed under each other, as SQLite does with its journals.
#[test]
fn a_file_is_opened_or_made_whatever_others_do() {
    let home = home("volumes-race", &NAMES, STAYS, "");
    let daemon = Daemon::start(&home, &DaemonOptions::default());
    // On a busy machine for longer, until there were enough.
    let race = "import time\nend, result = time.monotonic() + 4, 0\n\
        while time.monotonic() < end + 20 * (result <= 50):\n\
        \x20os.close(os.open('/data/raced', os.O_RDWR | os.O_CREAT, 0o644)); result += 1\n\
        \x20try: os.unlink('/data/raced')\n\
        \x20except FileNotFoundError: pass";
    let opened = at_once(&daemon, |_| race.to_owned());
    assert!(opened.iter().all(|count| count.as_u64() > Some(50)), "{opened:?}");
}

/// Each request opens the database anew, beside others.
#[test]
fn a_database_is_opened_by_many_at_once() {
    let home = home("volumes-sqlite-many", &["first"], "isolation = \"request\"", "");
    let daemon = Daemon::start(&home, &DaemonOptions::default());
    let insert = "db = sqlite3.connect('/data/app.db', timeout=30)\n\
        db.execute('PRAGMA journal_mode = WAL')\n\
        db.execute('CREATE TABLE IF NOT EXISTS t (n INTEGER, filler BLOB)')\n\
        with db: db.execute('INSERT INTO t VALUES (1, ?)', (os.urandom(5000),))\n\
        db.close()";
    ask_volume(&daemon, "first", insert);
    thread::scope(|threads| {
        for _ in 0..4 {
            threads.spawn(|| (0..25).for_each(|_| drop(ask_volume(&daemon, "first", insert))));
        }
    });
    let check = "db = sqlite3.connect('/data/app.db', timeout=30)\n\
        result = [db.execute('PRAGMA integrity_check').fetchone()[0], \
        db.execute('SELECT count(*) FROM t').fetchone()[0]]";
    assert_eq!(ask_volume(&daemon, "first", check), json!(["ok", 101]));
}

/// A daemon that is killed leaves no byte in a file that its program has not written.
#[test]
fn a_killed_daemon_leaves_files_as_long_as_they_were_written() {
    let home = home("volumes-killed", &["first"], STAYS, "");
    for round in 0..3 {
        let daemon = Daemon::start(&home, &DaemonOptions::default());
        let log = files(&home).join("log");
        let writing = daemon.gateway();
        let writer = thread::spawn(move || {
            let code = "f = os.open('/data/log', os.O_WRONLY | os.O_APPEND | os.O_CREAT)\n\
                n = 0\nwhile True: n += 1; os.write(f, b'%07d\\n' % n)";
            let _ = request(writing, "first", "/", Some(code.as_bytes()));
        });
        let size = || fs::metadata(&log).map_or(0, |found| found.len());
        wait_until("it is being written", || size() > 300_000);
        let sandboxes = daemon.sandboxes();
        daemon.kill();
        writer.join().expect("it ends");
        wait_until("nobody writes any more", || sandboxes.iter().all(|one| !exists(one.pid)));
        let left = size();
        // The next one makes it right.
        let daemon = Daemon::start(&home, &DaemonOptions::default());
        let told = ask_volume(&daemon, "first", "result = os.path.getsize('/data/log')");
        let text = fs::read(&log).unwrap();
        assert_eq!(told, json!(text.len()));
        // The file is made longer ahead: by 128 KiB, and then by twice as much.
        assert!(text.len() > 128 << 10 && text.len() as u64 <= left, "{} {left}", text.len());
        for (n, line) in text.chunks(8).enumerate() {
            assert_eq!(line, format!("{:07}\n", n + 1).as_bytes(), "round {round}");
        }
        ask_volume(&daemon, "first", "os.unlink('/data/log')");
    }
}

/// A daemon that starts while somebody copies a volume, as `thaw volume snapshot` does.
#[test]
fn a_volume_that_could_not_be_opened_is_tried_again() {
    let home = home("volumes-again", &["first"], STAYS, "");
    let copying = fs::File::create(home.join("volumes/data/copying")).unwrap();
    rustix::fs::flock(&copying, rustix::fs::FlockOperation::LockExclusive).unwrap();
    let daemon = Daemon::start(&home, &DaemonOptions::default());
    let ask = || post(daemon.gateway(), "first", "/", b"result = os.listdir('/data')");
    let refused = ask();
    assert!(refused.status >= 500, "{}", refused.text());
    wait_until("it is said why", || daemon.log().contains("is being made"));
    drop(copying);
    wait_until("it is opened", || ask().status == 200);
}

/// The next daemon serves them, to those that its predecessor has left and to others.
#[test]
fn functions_with_volumes_are_served_by_the_next_daemon() {
    let home = home("volumes-next", &NAMES, STAYS, "");
    let mut daemon = Daemon::start(&home, &DaemonOptions::default());
    let code = "f = os.open('/data/next', os.O_RDWR | os.O_APPEND | os.O_CREAT)\n\
        for n in range(5): os.write(f, b'x' * 10)\nresult = os.fstat(f).st_size";
    for round in 0..3 {
        for (number, name) in NAMES.into_iter().enumerate() {
            let size = (round * NAMES.len() + number + 1) * 50;
            assert_eq!(ask_volume(&daemon, name, code), json!(size));
        }
        NAMES.iter().for_each(|name| daemon.wait_until_kept(name));
        daemon.kill_and_await_next();
    }
}

/// A program of the operator's, in a process of its own, has the volume of a function that is served.
#[test]
fn another_process_of_the_host_has_the_volume_too() {
    let home = home("volumes-elsewhere", &["first"], STAYS, "");
    let daemon = Daemon::start(&home, &DaemonOptions::default());
    // It is being made longer by a sandbox alone when the other process comes.
    let before = "f = os.open('/data/log', os.O_RDWR | os.O_APPEND | os.O_CREAT)\n\
        for n in range(5): os.write(f, b'x' * 1000)";
    ask_volume(&daemon, "first", before);
    let code = "import os, sys\n\
        print(os.path.getsize('/v/log'), flush=True)\n\
        f = os.open('/v/log', os.O_RDWR | os.O_APPEND)\n\
        for n in range(300): os.write(f, b'y' * 10)\n\
        sys.stdin.read()\n\
        print(os.path.getsize('/v/log'), os.pread(f, 10, os.path.getsize('/v/log') - 10), flush=True)";
    let mut other = thaw()
        .env("THAW_HOME", &home)
        .args(["run", "--weak-limits", "--rootfs", "/", "-v", "data:/v", "--"])
        .args(["/usr/bin/python3", "-c", code])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .expect("thaw run");
    let until = Instant::now() + Duration::from_secs(60);
    let size = "result = [os.fstat(f).st_size, os.lseek(f, 0, os.SEEK_END)]";
    while ask_volume(&daemon, "first", size) != json!([8000, 8000]) {
        assert!(Instant::now() < until, "what another process writes is not seen");
        thread::sleep(Duration::from_millis(20));
    }
    let more =
        "for n in range(100): os.write(f, b'z' * 10)\nresult = os.pread(f, 10, 7990).decode()";
    assert_eq!(ask_volume(&daemon, "first", more), json!("yyyyyyyyyy"));
    drop(other.stdin.take());
    let output = other.wait_with_output().expect("its output");
    assert_eq!(String::from_utf8_lossy(&output.stdout), "5000\n9000 b'zzzzzzzzzz'\n");
    // Alone again, it goes on.
    let alone = "for n in range(100): os.write(f, b'a' * 10)\nresult = os.fstat(f).st_size";
    assert_eq!(ask_volume(&daemon, "first", alone), json!(10_000));
    wait_until("it is cut", || fs::metadata(files(&home).join("log")).unwrap().len() == 10_000);
}

/// A step of reading and writing, in Python.
const STEP: &str = "\
    \x20way, data = rng.randrange(9), bytes([step % 251 + 1]) * rng.randrange(1, 9000)\n\
    \x20at = rng.randrange(len(model) + 3000)\n\
    \x20if way < 3:\n\
    \x20\x20assert os.pwrite((fd, other)[way % 2], data, at) == len(data)\n\
    \x20\x20model.extend(bytes(max(0, at - len(model)))); model[at:at + len(data)] = data\n\
    \x20elif way == 3:\n\
    \x20\x20assert os.write(ap, data) == len(data); model += data\n\
    \x20elif way == 4:\n\
    \x20\x20n = rng.randrange(min(len(model) + 1000, 300000) + 1); os.ftruncate(fd, n)\n\
    \x20\x20model.extend(bytes(max(0, n - len(model)))); del model[n:]\n\
    \x20elif way == 5 and model:\n\
    \x20\x20m = mmap.mmap(fd, len(model)); at %= len(model); m[at] = 255; model[at] = 255; m.close()\n\
    \x20elif way == 6:\n\
    \x20\x20os.fsync(other)\n\
    \x20else:\n\
    \x20\x20n = rng.randrange(20000)\n\
    \x20\x20assert os.pread((fd, other, ap)[step % 3], n, at) == bytes(model[at:at + n]), (step, at, n)\n\
    \x20if step % 50 == 0:\n\
    \x20\x20assert os.fstat(fd).st_size == os.path.getsize('/data/ways') == os.lseek(ap, 0, 2) == len(model), step";

/// Reads and writes by all ways at once, of one file and one sandbox, against what a list of bytes says.
#[test]
fn a_file_is_what_was_written_to_it_by_whatever_way() {
    let home = home("volumes-ways", &["first"], STAYS, "");
    let daemon = Daemon::start(&home, &DaemonOptions::default());
    let code = "import mmap, random\n\
        rng = random.Random(7)\n\
        fd = os.open('/data/ways', os.O_RDWR | os.O_CREAT)\n\
        other = os.open('/data/ways', os.O_RDWR)\n\
        ap = os.open('/data/ways', os.O_RDWR | os.O_APPEND)\n\
        model = bytearray()";
    ask_volume(&daemon, "first", code);
    let steps = |from: u32| {
        format!("for step in range({from}, {from} + 500):\n{STEP}\nresult = len(model)")
    };
    // In several requests, each of which has its time.
    let lengths: Vec<_> =
        (0..6).map(|part| ask_volume(&daemon, "first", &steps(part * 500))).collect();
    let length = &lengths[5];
    // Nobody writes any more: soon it is as long on the host.
    let on_host = || fs::metadata(files(&home).join("ways")).unwrap().len();
    wait_until("it is cut", || json!(on_host()) == *length);
    let whole = "result = open('/data/ways', 'rb').read() == bytes(model)";
    assert_eq!(ask_volume(&daemon, "first", whole), json!(true));
    // A process that forks goes on with the same files.
    let forks = "pid = os.fork()\n\
        if pid == 0:\n\
        \x20[os.write(ap, b'child') for n in range(200)]; os._exit(0)\n\
        [os.write(ap, b'chief') for n in range(200)]\n\
        assert os.waitpid(pid, 0)[1] == 0\n\
        data = open('/data/ways', 'rb').read()[len(model):]\n\
        result = sorted(set(data[k:k + 5] for k in range(0, len(data), 5)))[0].decode(), len(data)";
    assert_eq!(ask_volume(&daemon, "first", forks), json!(["chief", 2000]));
}

/// Pages are made before they are written to: those of long writes, and some more behind short ones that
/// follow each other. Nobody sees that, also if the file is cut meanwhile, or its program forks.
#[test]
fn a_file_whose_pages_were_made_ahead_is_what_was_written_to_it() {
    let home = home("volumes-ahead", &["first"], STAYS, "");
    let daemon = Daemon::start(&home, &DaemonOptions::default());
    let code = "import random\n\
        rng = random.Random(3)\n\
        fd = os.open('/data/long', os.O_RDWR | os.O_CREAT)\n\
        model = bytearray()\n\
        def add(size, count):\n\
        \x20for n in range(count):\n\
        \x20\x20data = rng.randbytes(64) * (size // 64 + 1)\n\
        \x20\x20assert os.pwrite(fd, data[:size], len(model)) == size; model.extend(data[:size])\n\
        def cut(size):\n\
        \x20os.ftruncate(fd, size); del model[size:]\n\
        def check():\n\
        \x20assert os.fstat(fd).st_size == len(model) and os.pread(fd, len(model) + 1, 0) == model\n\
        add(4096, 2000); check(); cut(1 << 20); add(4096, 600); os.fsync(fd); add(4096, 600); check()\n\
        cut(100); add(1 << 20, 5); check(); add(100000, 20); add(4000, 700); check()\n\
        os.ftruncate(fd, len(model) + 70000); model.extend(bytes(70000)); add(300000, 3); check()\n\
        pid = os.fork()\n\
        if pid == 0: add(4096, 500); add(1 << 20, 2); check(); os._exit(0)\n\
        assert os.waitpid(pid, 0)[1] == 0\n\
        model.extend(os.pread(fd, 8 << 20, len(model))); add(4096, 500); check()\n\
        result = len(model)";
    let length = ask_volume(&daemon, "first", code);
    let on_host = || fs::metadata(files(&home).join("long")).unwrap();
    wait_until("it is cut", || json!(on_host().len()) == length);
    let same = "result = open('/data/long', 'rb').read() == bytes(model)";
    assert_eq!(ask_volume(&daemon, "first", same), json!(true));
    // What was made in vain takes no place on the disk, but where a file system rounds up.
    let blocks = std::os::unix::fs::MetadataExt::blocks(&on_host()) * 512;
    assert!(blocks <= on_host().len() + (256 << 10), "{blocks} of {}", on_host().len());
}

/// What cp(1) with `-p`, tar(1) and make(1) rely on.
#[test]
fn a_file_has_the_time_of_its_last_write_or_the_one_that_it_was_given() {
    let home = home("volumes-times", &["first"], STAYS, "");
    let daemon = Daemon::start(&home, &DaemonOptions::default());
    let code = "import time\n\
        f = open('/data/given', 'wb', buffering=0)\n\
        for n in range(5): f.write(b'x' * 5000)\n\
        os.utime('/data/given', (86400, 86400))\n\
        given = [os.stat('/data/given').st_mtime]\n\
        f.close()\n\
        f = open('/data/given', 'r+b', buffering=0)\n\
        given.append(os.fstat(f.fileno()).st_mtime)\n\
        f.write(b'y')\n\
        first = os.stat('/data/given').st_mtime\n\
        time.sleep(1.1)\n\
        f.seek(0); f.write(b'z')\n\
        second = os.stat('/data/given').st_mtime\n\
        os.posix_fallocate(f.fileno(), 0, 30000)\n\
        result = [given, first > 86400, second > first, os.path.getsize('/data/given')]";
    let expected = json!([[86_400.0, 86_400.0], true, true, 30_000]);
    assert_eq!(ask_volume(&daemon, "first", code), expected);
    let close = "os.utime(f.fileno(), (86400, 86400)); f.close()";
    ask_volume(&daemon, "first", close);
    let found = fs::metadata(files(&home).join("given")).unwrap();
    assert_eq!((found.len(), std::os::unix::fs::MetadataExt::mtime(&found)), (30_000, 86_400));
}

/// Of a freeze, a hibernation and a sleep, the file knows nothing.
#[test]
fn a_file_goes_on_after_its_sandbox_has_slept() {
    let keys = "isolation = \"instance\"";
    let home = home("volumes-slept", &["first"], keys, "");
    let daemon = Daemon::start(&home, &DaemonOptions::default());
    let write = "f = os.open('/data/log', os.O_RDWR | os.O_APPEND | os.O_CREAT)\n\
        for n in range(9): os.write(f, b'x' * 999)";
    ask_volume(&daemon, "first", write);
    let more = "for n in range(9): os.write(f, b'y' * 999)\n\
        result = [os.fstat(f).st_size, os.pread(f, 2, 8990).decode()]";
    let hibernate = || {
        let is_idle = || ["idle", "woken-up"].contains(&&*daemon.instance("first").2);
        wait_until("it is idle", is_idle);
        command(&daemon, &["hibernate", "first"]).success();
    };
    hibernate();
    assert_eq!(ask_volume(&daemon, "first", more), json!([17_982, "xy"]));
    hibernate();
    command(&daemon, &["sleep", "first"]).success();
    let (gateway, again) = (daemon.gateway(), more.as_bytes());
    assert_eq!(post(gateway, "first", "/", again).json()["result"], json!([26_973, "xy"]));
}

/// From outside: what a sandbox may change of the host's files is what its volume grants, and the page on
/// which it says how long files are. The host's page cannot be changed.
#[test]
fn a_sandbox_holds_no_more_of_a_volume_than_is_listed() {
    let home = home("volumes-held", &["first"], STAYS, "");
    let daemon = Daemon::start(&home, &DaemonOptions::default());
    let open = "f = open('/data/held', 'wb', buffering=0)\nf.write(b'x'); f.write(b'y')";
    ask_volume(&daemon, "first", open);
    wait_until("it is idle", || daemon.instance("first").2 == "idle");
    let process = PathBuf::from(format!("/proc/{}", daemon.instances("first")[0]["pid"]));
    let volume = fs::canonicalize(&home).unwrap().join("volumes/data");
    let (mut changed, mut lengths) = (Vec::new(), 0);
    for entry in fs::read_dir(process.join("fd")).unwrap() {
        let number = entry.unwrap().file_name();
        // What was open for a moment only is gone.
        let Ok(target) = fs::read_link(process.join("fd").join(&number)) else { continue };
        let Ok(info) = fs::read_to_string(process.join("fdinfo").join(&number)) else { continue };
        let flags = info.lines().find_map(|line| line.strip_prefix("flags:")).unwrap();
        let is_writable = u32::from_str_radix(flags.trim(), 8).unwrap() & 3 != 0;
        let is_of_host = target.starts_with("/memfd:thaw-lengths (deleted)");
        lengths += usize::from(is_of_host);
        let is_file =
            fs::metadata(process.join("fd").join(&number)).is_ok_and(|file| file.is_file());
        if is_file && is_writable && !is_of_host {
            let place = target.strip_prefix(&volume);
            let place = place.unwrap_or_else(|_| panic!("{target:?} can be changed"));
            changed.push(place.components().next().unwrap().as_os_str().to_owned());
        }
    }
    changed.sort();
    assert_eq!((changed, lengths), (vec!["files".into(), "lengths".into()], 1));
    let maps = fs::read_to_string(process.join("maps")).unwrap();
    let of_host: Vec<_> = maps.lines().filter(|line| line.contains("thaw-lengths")).collect();
    assert!(of_host.len() == 1 && of_host[0].contains(" r--s "), "{of_host:?}");
    let limits = fs::read_to_string(process.join("limits")).unwrap();
    let longest = limits.lines().find(|line| line.starts_with("Max file size")).unwrap();
    assert_eq!(longest.split_whitespace().nth(3), Some("0"), "{longest}");
}
