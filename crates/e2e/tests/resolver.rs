//! Names are looked up by processes that have no rights and nothing to lose, and that nobody
//! misses. The name server is hostile, and on this machine.

use rustix::process::Signal;
use std::fs;
use std::net::{Ipv4Addr, UdpSocket};
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;
use thaw_e2e::{
    Daemon, DaemonOptions, Process, built_home, children, copy_home, descendants, exists, get,
    ids_of, kill, repository, run, skip, status, thaw, wait_until,
};

/// Where the name server is.
const SERVER: Ipv4Addr = Ipv4Addr::new(127, 53, 7, 1);

/// Runs a program with another `/etc/resolv.conf` and `/etc/hosts`, which only it sees:
/// `/bin/sh -c OTHER_FILES sh DIRECTORY PROGRAM...`.
const OTHER_FILES: &str = r#"
directory=$1
shift
mount --bind "$directory/resolv.conf" /etc/resolv.conf
mount --bind "$directory/hosts" /etc/hosts
# As where systemd-resolved runs: its directory, with a mount of its own.
if [ -d /run/systemd ]; then
    mount -t tmpfs none /run/systemd
    mkdir /run/systemd/resolve
    mount -t tmpfs -o nosuid,nodev,noexec,mode=0755 none /run/systemd/resolve
    touch /run/systemd/resolve/io.systemd.Resolve
fi
exec "$@"
"#;

/// A daemon with the functions `names` and `others`, whose host asks [`server`].
struct Served {
    daemon: Daemon,
    _files: tempfile::TempDir,
}

/// With a host that waits for its name server for so many seconds; `None` where this user may not
/// change what the host's names mean.
fn serve(label: &str, seconds: u32) -> Option<Served> {
    static HOME: OnceLock<std::path::PathBuf> = OnceLock::new();
    if !rustix::process::geteuid().is_root() {
        skip("only root can give a process other name servers");
        return None;
    }
    if !server() {
        skip("port 53 of 127.53.7.1 is taken");
        return None;
    }
    let home = HOME.get_or_init(|| {
        let home = built_home("resolver", &[]);
        build(&home, "names");
        build(&home, "others");
        home
    });
    let home = copy_home(home, &format!("resolver-{label}"));
    let files = tempfile::tempdir().expect("a directory");
    let write = |name: &str, text: &str| fs::write(files.path().join(name), text).expect(name);
    let options = format!("timeout:{seconds} attempts:1");
    write("resolv.conf", &format!("nameserver {SERVER}\noptions {options}\n"));
    write("hosts", "127.0.0.1 localhost\n198.51.100.9 known.example.com\n");
    let directory = files.path().to_string_lossy().into_owned();
    let program = ["unshare", "--mount", "/bin/sh", "-c", OTHER_FILES, "sh", &directory];
    let program = program.map(str::to_owned);
    let daemon = Daemon::start_by(&program, &home, &DaemonOptions::default());
    Some(Served { daemon, _files: files })
}

fn build(home: &Path, name: &str) {
    let directory = home.join(name);
    fs::create_dir_all(&directory).expect("a directory");
    let script = repository().join("tests/guest/egress/names.py");
    fs::copy(script, directory.join("app.py")).expect("a copy");
    let text = format!(
        "name = \"{name}\"\ncommand = [\"python3\", \"app.py\"]\nport = 8080\n\
         files = [\"app.py\"]\n\
         [runtime]\nkind = \"python3\"\ninterpreter = \"/usr/bin/python3\"\n\
         [egress]\nallow = [\"*.example.com:80\"]\n"
    );
    fs::write(directory.join("thaw.toml"), text).expect("thaw.toml");
    run(thaw().env("THAW_HOME", home).arg("build").arg(&directory)).success();
}

/// Starts the name server, which lives as long as the tests. It answers 198.51.100.7 for a
/// name, but for those that begin with one of these words:
///
/// - `never`: it says nothing;
/// - `wild`: what it says is no answer, each time in another way.
fn server() -> bool {
    static STARTED: OnceLock<bool> = OnceLock::new();
    *STARTED.get_or_init(|| {
        let Ok(socket) = UdpSocket::bind((SERVER, 53)) else { return false };
        thread::spawn(move || {
            let mut buffer = [0; 2048];
            while let Ok((len, from)) = socket.recv_from(&mut buffer) {
                for answer in answers(&buffer[..len]) {
                    let _ = socket.send_to(&answer, from);
                }
            }
        });
        true
    })
}

fn answers(question: &[u8]) -> Vec<Vec<u8>> {
    let name = question.get(13..).unwrap_or_default();
    if name.starts_with(b"never") {
        return Vec::new();
    }
    let end = 12 + question[12..].iter().position(|&byte| byte == 0).unwrap_or(0) + 5;
    let is_v4 = question.get(end - 3) == Some(&1);
    let head = |count: u16| {
        let mut head = question[..2].to_vec();
        head.extend(b"\x81\x80\0\x01");
        head.extend(count.to_be_bytes());
        head.extend(b"\0\0\0\0");
        head.extend(&question[12..end]);
        head
    };
    let record = b"\xc0\x0c\0\x01\0\x01\0\0\0\x1e\0\x04\xc6\x33\x64\x07";
    if !name.starts_with(b"wild") {
        let count = u16::from(is_v4);
        let records = if is_v4 { &record[..] } else { &[] };
        return vec![[&head(count), records].concat()];
    }
    static WILD: AtomicU32 = AtomicU32::new(0);
    vec![match WILD.fetch_add(1, Ordering::Relaxed) % 8 {
        0 => Vec::new(),
        1 => question[..2].to_vec(),
        // More records than there are bytes.
        2 => [&head(u16::MAX), &record[..]].concat(),
        // A name that points to itself, and one that points nowhere.
        3 => [&head(1), &b"\xc0\x2e\0\x01\0\x01\0\0\0\x1e\0\x04\x01\x02\x03\x04"[..]].concat(),
        4 => [&head(1), &b"\xff\xff\0\x01\0\x01\0\0\0\x1e\0\x04\x01\x02\x03\x04"[..]].concat(),
        // An address that is longer than an address, and one that goes beyond the end.
        5 => [&head(1), &b"\xc0\x0c\0\x01\0\x01\0\0\0\x1e\0\x09"[..], &[1; 9]].concat(),
        6 => [&head(1), &b"\xc0\x0c\0\x01\0\x01\0\0\0\x1e\xff\xff\x01"[..]].concat(),
        // Canonical names in a circle, to the last byte that fits.
        _ => [&head(80), &b"\xc0\x0c\0\x05\0\x01\0\0\0\x1e\0\x02\xc0\x0c".repeat(80)[..]].concat(),
    }]
}

impl Served {
    fn ask(&self, function: &str, name: &str) -> String {
        get(self.daemon.gateway(), function, &format!("/{name}")).text()
    }

    fn resolver(&self) -> Option<Process> {
        let mut children = children(self.daemon.main_pid()).into_iter();
        children.find(|child| child.name == "thaw-resolver")
    }
}

fn namespace(pid: u32, name: &str) -> u64 {
    fs::metadata(format!("/proc/{pid}/ns/{name}")).expect("the process runs").ino()
}

#[test]
fn the_host_is_asked_by_a_process_without_rights() {
    let Some(served) = serve("rights", 5) else { return };
    assert!(served.resolver().is_none(), "nobody has asked");
    assert_eq!(served.ask("names", "known.example.com"), "198.51.100.9");
    assert_eq!(served.ask("names", "any.example.com"), "198.51.100.7");
    assert_eq!(served.ask("names", "example.org"), "none");
    let (daemon, resolver) = (served.daemon.pid(), served.resolver().expect("one").pid);
    let uid = status(resolver, "Uid");
    assert!(uid[0] != "0" && uid != status(daemon, "Uid"), "{uid:?}");
    for process in descendants(served.daemon.main_pid()) {
        // One that it has made for a question may be about to end.
        let is_resolver = process.pid == resolver || process.parent == resolver;
        assert!(is_resolver || ids_of(process.pid) != uid, "{process:?}");
    }
    for field in ["CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"] {
        assert_eq!(status(resolver, field), ["0000000000000000"], "{field}");
    }
    assert_eq!(status(resolver, "Groups"), [""; 0]);
    assert_eq!(
        (status(resolver, "NoNewPrivs"), status(resolver, "Seccomp")),
        (vec!["1".into()], vec!["2".into()])
    );
    for name in ["mnt", "ipc", "uts", "cgroup", "user"] {
        assert_ne!(namespace(resolver, name), namespace(daemon, name), "{name}");
    }
    // Name servers are where the host's are.
    assert_eq!(namespace(resolver, "net"), namespace(daemon, "net"));
    let names = |path: &str| -> Vec<String> {
        let all = fs::read_dir(format!("/proc/{resolver}/root/{path}")).expect("a directory");
        all.map(|entry| entry.expect("an entry").file_name().to_string_lossy().into()).collect()
    };
    assert!(names("").iter().all(|name| ["etc", "run"].contains(&&name[..])), "{:?}", names(""));
    let copied = ["resolv.conf", "hosts", "nsswitch.conf", "host.conf", "gai.conf"];
    assert!(names("etc").iter().all(|name| copied.contains(&&name[..])), "{:?}", names("etc"));
    let hosts = fs::read_to_string(format!("/proc/{resolver}/root/etc/hosts")).expect("a copy");
    assert!(hosts.contains("known.example.com"), "{hosts}");
    let has_service = Path::new("/run/systemd").is_dir();
    if has_service {
        assert_eq!(names("run/systemd/resolve"), ["io.systemd.Resolve"]);
    }
    let mounts = fs::read_to_string(format!("/proc/{resolver}/mountinfo")).expect("it runs");
    for line in mounts.lines() {
        let options = line.split(' ').nth(5).expect("options of the mount");
        let has = |wanted: &str| options.split(',').any(|option| option == wanted);
        assert!(["ro", "nosuid", "nodev", "noexec"].into_iter().all(has), "{line}");
    }
    assert_eq!(mounts.lines().count(), 1 + usize::from(has_service), "{mounts}");
    // Standard streams, and the socket of the daemon.
    let files = || fs::read_dir(format!("/proc/{resolver}/fd")).expect("it runs").count();
    // The socket of a question goes with its process.
    wait_until("its own descriptors are left", || files() == 4);
    assert_eq!(served.daemon.stop(), Some(0));
}

/// While a name server says nothing: each question has a process of its own, which knows no
/// other.
#[test]
fn a_question_is_seen_by_one_process_that_has_nothing_else() {
    let Some(served) = serve("workers", 10) else { return };
    assert_eq!(served.ask("names", "warm.example.com"), "198.51.100.7");
    let resolver = served.resolver().expect("one").pid;
    let workers = || children(resolver);
    wait_until("those of this question have ended", || workers().is_empty());
    thread::scope(|scope| {
        let asking = ["names", "others"]
            .map(|function| (scope.spawn(|| served.ask(function, "never.example.com")), function));
        wait_until("both are asked", || workers().len() >= 2);
        for worker in workers() {
            assert_eq!(status(worker.pid, "Uid"), status(resolver, "Uid"));
            assert_eq!(status(worker.pid, "CapEff"), ["0000000000000000"]);
            // It may have begun just now.
            let has_its_filter = || status(worker.pid, "Seccomp_filters") == ["2"];
            wait_until("it has its filter", has_its_filter);
            // Standard streams, the socket of its question, and that to the name server.
            let files = || fs::read_dir(format!("/proc/{}/fd", worker.pid)).expect("it runs");
            wait_until("it has nothing else", || files().count() <= 5);
        }
        // Others do not wait.
        assert_eq!(served.ask("others", "quick.example.com"), "198.51.100.7");
        for (asking, function) in asking {
            assert_eq!(asking.join().expect("an answer"), "failed", "{function}");
        }
        wait_until("they have ended", || workers().is_empty());
    });
    assert_eq!(served.daemon.stop(), Some(0));
}

#[test]
fn wild_answers_harm_nobody() {
    let Some(served) = serve("wild", 5) else { return };
    assert_eq!(served.ask("names", "warm.example.com"), "198.51.100.7");
    let (daemon, resolver) = (served.daemon.pid(), served.resolver().expect("one").pid);
    thread::scope(|scope| {
        for number in 0..24 {
            let served = &served;
            scope.spawn(move || {
                let said = served.ask("names", &format!("wild{number}.example.com"));
                // With musl, an address of the answer counts whatever name is beside it.
                let all = ["failed", "none", "198.51.100.7", "1.2.3.4"];
                assert!(all.contains(&&said[..]), "{number}: {said}");
            });
        }
    });
    assert_eq!(served.ask("others", "after.example.com"), "198.51.100.7");
    assert_eq!(served.daemon.pid(), daemon);
    assert!(exists(resolver) || served.resolver().is_some());
    assert_eq!(served.daemon.stop(), Some(0));
}

#[test]
fn one_that_is_killed_is_started_again() {
    let Some(served) = serve("again", 5) else { return };
    for number in 0..5 {
        let name = format!("n{number}.example.com");
        assert_eq!(served.ask("names", &name), "198.51.100.7");
        kill(served.resolver().expect("one").pid);
    }
    // While it works, too: the question is asked again.
    assert_eq!(served.ask("names", "warm.example.com"), "198.51.100.7");
    let resolver = served.resolver().expect("one").pid;
    thread::scope(|scope| {
        let asking = scope.spawn(|| served.ask("names", "never.example.com"));
        wait_until("it is asked", || !children(resolver).is_empty());
        kill(resolver);
        wait_until("another is asked", || {
            served.resolver().is_some_and(|other| other.pid != resolver)
        });
        assert_eq!(asking.join().expect("an answer"), "failed");
    });
    assert_eq!(served.daemon.stop(), Some(0));
}

#[test]
fn it_ends_with_its_daemon() {
    let Some(served) = serve("end", 5) else { return };
    assert_eq!(served.ask("names", "warm.example.com"), "198.51.100.7");
    let resolver = served.resolver().expect("one").pid;
    kill(served.daemon.pid());
    wait_until("it has ended", || !exists(resolver));
    // The next daemon has its own.
    assert_eq!(served.ask("names", "warm.example.com"), "198.51.100.7");
    let resolver = served.resolver().expect("one").pid;
    served.daemon.signal(Signal::TERM);
    wait_until("it has ended", || !exists(resolver));
}
