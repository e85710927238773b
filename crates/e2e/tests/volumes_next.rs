//! Instances with volumes that go on under the next daemon: what they have open is open, their locks hold,
//! and no byte is lost, wherever the daemon was killed.

use serde_json::{Value, json};
use std::path::PathBuf;
use std::thread;
use std::time::Duration;
use thaw_e2e::{
    Daemon, DaemonOptions, VolumeFunction, ask_volume, built_home, run, skip, thaw, wait_until,
};

const DATA: &str = "[[volumes]]\nname = \"data\"\npath = \"/data\"\nsize = \"64MiB\"\n";
const NAMES: [&str; 2] = ["first", "second"];

/// A daemon with functions that share a volume, or `None` where it would have no monitor.
fn daemon(label: &str) -> Option<Daemon> {
    if !rustix::process::geteuid().is_root() {
        skip("only a daemon of root's has a monitor");
        return None;
    }
    let home: PathBuf = built_home(label, &[]);
    for name in NAMES {
        if name != NAMES[0] {
            let mut allow = thaw();
            allow.env("THAW_HOME", &home).args(["volume", "allow", "data", name]);
            run(&mut allow).success();
        }
        let keys = "isolation = \"instance\"";
        VolumeFunction { name, keys, volumes: DATA, at_start: "" }.build(&home).success();
    }
    Some(Daemon::start(&home, &DaemonOptions::default()))
}

/// Kills the daemon when it has had its instances kept.
fn kill(daemon: &mut Daemon) {
    NAMES.iter().for_each(|name| daemon.wait_until_kept(name));
    daemon.kill_and_await_next();
}

fn ids(daemon: &Daemon) -> Vec<Value> {
    NAMES.iter().map(|name| daemon.first_instance(name)["id"].clone()).collect()
}

#[test]
fn what_is_open_goes_on_under_the_next_daemon() {
    let Some(mut daemon) = daemon("volumes-next-open") else { return };
    let open = "import fcntl, mmap\n\
        a = os.open('/data/a', os.O_RDWR | os.O_CREAT)\n\
        for n in range(5): os.write(a, b'a' * 1000)\n\
        os.mkdir('/data/d')\n\
        moved = os.open('/data/moved', os.O_RDWR | os.O_CREAT); os.write(moved, b'moved')\n\
        os.rename('/data/moved', '/data/d/moved')\n\
        gone = os.open('/data/gone', os.O_RDWR | os.O_CREAT); os.write(gone, b'gone'); os.unlink('/data/gone')\n\
        m = os.open('/data/m', os.O_RDWR | os.O_CREAT); os.ftruncate(m, 8192)\n\
        mapped = mmap.mmap(m, 8192); mapped[0:6] = b'before'\n\
        r = os.open('/data/a', os.O_RDONLY); os.lseek(r, 10, os.SEEK_SET)\n\
        locked = os.open('/data/l', os.O_RDWR | os.O_CREAT)\n\
        fcntl.lockf(locked, fcntl.LOCK_EX, 10, 100)\n\
        whole = os.open('/data/w', os.O_RDWR | os.O_CREAT); fcntl.flock(whole, fcntl.LOCK_SH)";
    ask_volume(&daemon, "first", open);
    ask_volume(&daemon, "second", "import fcntl\nb = os.open('/data/b', os.O_RDWR | os.O_CREAT)");
    let before = ids(&daemon);
    for round in 1..=3 {
        kill(&mut daemon);
        assert_eq!(ids(&daemon), before, "the same instances\n{}", daemon.log());
        // The other one asks first.
        let locks = "l, w = os.open('/data/l', os.O_RDWR), os.open('/data/w', os.O_RDWR)\n\
            def free(take):\n  try: take(); return True\n  except BlockingIOError: return False\n\
            result = [free(lambda: fcntl.lockf(l, fcntl.LOCK_EX | fcntl.LOCK_NB, 10, 100)),\n\
            \x20 free(lambda: fcntl.lockf(l, fcntl.LOCK_EX | fcntl.LOCK_NB, 10, 110)),\n\
            \x20 free(lambda: fcntl.flock(w, fcntl.LOCK_EX | fcntl.LOCK_NB)),\n\
            \x20 free(lambda: fcntl.flock(w, fcntl.LOCK_SH | fcntl.LOCK_NB))]\n\
            os.close(l); os.close(w)";
        let found = ask_volume(&daemon, "second", locks);
        assert_eq!(found, json!([false, true, false, true]), "round {round}");
        let files = "def errno(work):\n  try: work(); return 0\n  except OSError as e: return e.errno\n\
            mapped[4096:4101] = b'after'\n\
            os.write(a, b'b' * 1000)\n\
            os.lseek(moved, 0, os.SEEK_SET)\n\
            result = [os.fstat(a).st_size, os.read(r, 2).decode(), os.read(moved, 9).decode(),\n\
            \x20 mapped[0:6].decode(), os.pread(m, 5, 4096).decode(), errno(lambda: os.read(gone, 9))]";
        let size = 5000 + round * 1000;
        let found = ask_volume(&daemon, "first", files);
        let stale = rustix::io::Errno::STALE.raw_os_error();
        assert_eq!(found, json!([size, "aa", "moved", "before", "after", stale]));
        let size_there = "result = os.stat('/data/a').st_size";
        assert_eq!(ask_volume(&daemon, "second", size_there), json!(size));
        // Both have it open, and then one alone again.
        let both = "c = os.open('/data/a', os.O_RDWR | os.O_APPEND); os.write(c, b'c' * 7)\n\
            os.ftruncate(c, os.fstat(c).st_size - 7); os.close(c)";
        ask_volume(&daemon, "second", both);
    }
    let free = "os.close(locked); os.close(whole); mapped.close(); os.close(m)";
    ask_volume(&daemon, "first", free);
    let locks = "l, w = os.open('/data/l', os.O_RDWR), os.open('/data/w', os.O_RDWR)\n\
        fcntl.lockf(l, fcntl.LOCK_EX | fcntl.LOCK_NB); fcntl.flock(w, fcntl.LOCK_EX | fcntl.LOCK_NB)";
    ask_volume(&daemon, "second", locks);
}

/// Threads of the programs write while daemons come and go.
#[test]
fn what_is_written_meanwhile_is_there_once() {
    let Some(mut daemon) = daemon("volumes-next-written") else { return };
    // A record that an error was raised for may be there or not, as with any file system.
    let write = |who: &str| {
        format!(
            "import threading, time\n\
             written, failed, over = {{}}, [], threading.Event()\n\
             def write(path, name):\n\
             \x20 fd, n = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT), 0\n\
             \x20 while not over.is_set():\n\
             \x20   n += 1\n\
             \x20   try: os.write(fd, f'{{name}} {{n}} {{\"x\" * (n * 37 % 3000)}}\\n'.encode()); written[name] = n\n\
             \x20   except OSError as e: failed.append((name, n, e.errno))\n\
             \x20   time.sleep(0.001)\n\
             threads = [threading.Thread(target=write, args=a) for a in\n\
             \x20 [('/data/{who}', '{who}'), ('/data/shared', '{who}-shared')]]\n\
             if os.fork() == 0:\n\
             \x20 while not os.path.exists('/data/stop'):\n\
             \x20   with open('/data/{who}-child', 'a') as file:\n\
             \x20     for n in range(20): file.write(f'{{n}} line of the child\\n'); file.flush(); time.sleep(0.001)\n\
             \x20 os._exit(0)\n\
             for thread in threads: thread.start()"
        )
    };
    for name in NAMES {
        ask_volume(&daemon, name, &write(name));
    }
    let before = ids(&daemon);
    for _ in 0..5 {
        kill(&mut daemon);
        thread::sleep(Duration::from_millis(300));
    }
    assert_eq!(ids(&daemon), before, "{}", daemon.log());
    for name in NAMES {
        let code = format!(
            "path = '/data/{name}-child'\n\
             lines = open(path).read().count('\\n') if os.path.exists(path) else 0\n\
             result = min(written.get('{name}', 0), written.get('{name}-shared', 0), lines)"
        );
        wait_until("all have written much", || {
            ask_volume(&daemon, name, &code).as_u64() > Some(100)
        });
    }
    ask_volume(&daemon, "first", "os.close(os.open('/data/stop', os.O_CREAT))");
    for name in NAMES {
        let child = format!(
            "status = os.wait()[1]\nlines = open('/data/{name}-child').read().split('\\n')\n\
             result = [status, len(lines) > 100, len(lines) % 20, lines[20 * 3 + 7]]"
        );
        let found = ask_volume(&daemon, name, &child);
        assert_eq!(found, json!([0, true, 1, "7 line of the child"]));
        let end = "over.set()\nfor thread in threads: thread.join()\nresult = [written, failed]";
        let ended = ask_volume(&daemon, name, end);
        let (written, failed) = (&ended[0], &ended[1]);
        let failed: Vec<_> = failed.as_array().expect("a list").iter().collect();
        assert!(failed.len() <= 10, "{failed:?}");
        for (path, writer) in
            [(name.to_owned(), name.to_owned()), ("shared".into(), format!("{name}-shared"))]
        {
            let code = format!(
                "lines = [line.split(' ') for line in open('/data/{path}').read().split('\\n')[:-1]]\n\
                 result = [[int(l[1]) for l in lines if l[0] == '{writer}' and len(l[2]) == int(l[1]) * 37 % 3000],\n\
                 \x20 sum(1 for l in lines if len(l) != 3)]"
            );
            let found = ask_volume(&daemon, name, &code);
            let numbers: Vec<u64> =
                found[0].as_array().expect("a list").iter().filter_map(Value::as_u64).collect();
            let last = written[&writer].as_u64().expect("a number");
            assert!(last > 100, "{writer} has written {last}");
            assert!(
                numbers.windows(2).all(|pair| pair[0] < pair[1]),
                "{writer} is in order, and once"
            );
            let has_failed =
                |n: u64| failed.iter().any(|one| one[0] == writer.as_str() && one[1] == n);
            let missing: Vec<u64> = (1..=last)
                .filter(|n| numbers.binary_search(n).is_err() && !has_failed(*n))
                .collect();
            assert!(missing.is_empty(), "{writer}: {missing:?} of {last}\n{}", daemon.log());
            assert_eq!(found[1], json!(0), "{path} has whole records only");
        }
    }
}

/// Instances that rest hear of the next daemon, too.
#[test]
fn who_rests_takes_its_files_back() {
    let Some(mut daemon) = daemon("volumes-next-rest") else { return };
    let open = "import fcntl\na = os.open('/data/a', os.O_RDWR | os.O_CREAT | os.O_APPEND)\n\
        fcntl.flock(a, fcntl.LOCK_EX); os.write(a, b'before ')";
    ask_volume(&daemon, "first", open);
    ask_volume(&daemon, "second", "import fcntl");
    let id = daemon.first_instance("first")["id"].to_string();
    wait_until("it is idle", || daemon.first_instance("first")["state"] == "idle");
    let mut hibernate = thaw();
    run(hibernate.env("THAW_HOME", daemon.home()).args(["hibernate", "first", "--instance", &id]))
        .success();
    let before = ids(&daemon);
    kill(&mut daemon);
    let refused = "f = os.open('/data/a', os.O_RDWR)\n\
        try: fcntl.flock(f, fcntl.LOCK_EX | fcntl.LOCK_NB); result = 'taken'\n\
        except BlockingIOError: result = os.read(f, 100).decode()\nos.close(f)";
    assert_eq!(ask_volume(&daemon, "second", refused), json!("before "), "{}", daemon.log());
    let more = "os.write(a, b'after'); result = os.pread(a, 100, 0).decode()";
    assert_eq!(ask_volume(&daemon, "first", more), json!("before after"));
    assert_eq!(ids(&daemon), before, "{}", daemon.log());
}

/// SQLite has the file of its index mapped, and tells files apart by their numbers. Who waits for its lock sleeps in between,
/// for up to 100 ms, so that one program that writes without a pause can keep another one out for seconds: these pause.
#[test]
fn a_database_goes_on_under_the_next_daemon() {
    let Some(mut daemon) = daemon("volumes-next-database") else { return };
    let begin = "import threading, time\n\
        db = sqlite3.connect('/data/db', timeout=60, isolation_level=None, check_same_thread=False)\n\
        db.execute('pragma journal_mode=wal')\n\
        db.execute('create table if not exists t (who text, n integer, unique (who, n))')\n\
        done, failed, over = 0, [], threading.Event()\n\
        def insert(who):\n\
        \x20 global done\n\
        \x20 while not over.is_set():\n\
        \x20   try: db.execute('insert into t values (?, ?)', (who, done + 1)); done += 1\n\
        \x20   except sqlite3.Error as e: failed.append(str(e)); done += 1\n\
        \x20   time.sleep(0.01)";
    for name in NAMES {
        ask_volume(&daemon, name, begin);
    }
    for name in NAMES {
        let code =
            format!("thread = threading.Thread(target=insert, args=('{name}',)); thread.start()");
        ask_volume(&daemon, name, &code);
    }
    let before = ids(&daemon);
    for _ in 0..4 {
        kill(&mut daemon);
        for name in NAMES {
            let done = || ask_volume(&daemon, name, "result = done").as_u64().expect("a number");
            let before = done();
            wait_until("rows of both", || done() > before + 5);
        }
    }
    assert_eq!(ids(&daemon), before, "{}", daemon.log());
    let mut total = 0;
    for name in NAMES {
        let end = "over.set(); thread.join(); result = [done, failed]";
        let ended = ask_volume(&daemon, name, end);
        let failed = ended[1].as_array().expect("a list").len() as u64;
        assert!(failed <= 4, "{ended}");
        let done = ended[0].as_u64().expect("a number");
        total += done - failed;
    }
    let check = "result = [db.execute('pragma integrity_check').fetchone()[0], db.execute('select count(*) from t').fetchone()[0]]";
    let found = ask_volume(&daemon, "second", check);
    assert_eq!(found[0], "ok");
    assert!(found[1].as_u64().expect("a number") >= total, "{found} of {total}");
}
