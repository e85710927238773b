//! Things that go wrong: kills at random points under load, a full disk. Nothing
//! is lost, nobody is orphaned, errors are clear.

use rustix::process::Signal;
use std::cell::Cell;
use std::fs;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};
use thaw_e2e::{
    Daemon, DaemonOptions, Function, Process, built_home, children, copy_home, exists, get, kill,
    request, run, thaw, wait_until,
};

fn home() -> &'static Path {
    static HOME: OnceLock<PathBuf> = OnceLock::new();
    HOME.get_or_init(|| {
        built_home("faults", &[Function::Example("hello-c"), Function::Example("hello-python")])
    })
}

/// Clients that ask without pause.
struct Load {
    stop: Arc<AtomicBool>,
    answered: Arc<AtomicUsize>,
    clients: Vec<JoinHandle<Vec<String>>>,
}

impl Load {
    fn start(gateway: SocketAddr) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let answered = Arc::new(AtomicUsize::new(0));
        let clients = (0..4)
            .map(|i| {
                let (stop, answered) = (stop.clone(), answered.clone());
                thread::spawn(move || {
                    let name = if i == 0 { "hello-python" } else { "hello-c" };
                    let mut wrong = Vec::new();
                    while !stop.load(Ordering::Relaxed) {
                        // No answer at all is fine while the daemon is being killed,
                        // and so is one of the gateway's own; a wrong one is not.
                        match request(gateway, name, "/", None) {
                            Ok(response) if response.status == 200 => {
                                if response.text().starts_with("Hello from ") {
                                    answered.fetch_add(1, Ordering::Relaxed);
                                } else {
                                    wrong.push(response.text());
                                }
                            }
                            Ok(response) if (502..=503).contains(&response.status) => {}
                            Ok(response) => wrong.push(format!("{response:?}")),
                            Err(_) => thread::sleep(Duration::from_millis(5)),
                        }
                    }
                    wrong
                })
            })
            .collect();
        Self { stop, answered, clients }
    }

    /// Waits for some more good answers.
    fn wait_for(&self, count: usize) {
        let goal = self.answered.load(Ordering::Relaxed) + count;
        wait_until("enough requests are answered", || {
            self.answered.load(Ordering::Relaxed) >= goal
        });
    }

    fn finish(self) {
        self.stop.store(true, Ordering::Relaxed);
        for client in self.clients {
            assert_eq!(client.join().expect("a client"), Vec::<String>::new());
        }
    }
}

/// A small generator: tests must not depend on luck that cannot be repeated.
struct Random(u64);

impl Random {
    fn below(&mut self, limit: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % limit
    }
}

/// The direct child of the daemon that has made all its sandboxes.
fn zygote_parent(daemon: &Daemon) -> Process {
    let with_children = |process: &Process| !children(process.pid).is_empty();
    let found = Cell::new(None);
    wait_until("the zygote parent has children", || {
        let process = children(daemon.main_pid()).into_iter().find(with_children);
        let is_found = process.is_some();
        found.set(process);
        is_found
    });
    found.take().expect("found")
}

/// Somebody who can make a program crash cannot go on guessing its addresses: it backs off
/// and is frozen anew, with others.
#[test]
fn many_crashes_give_a_function_another_layout() {
    let keys = "limits = { crashes = 4 }";
    let function = Function::PythonVariant { program: "crashes", name: "crashes", keys };
    let daemon = Daemon::start(&built_home("crashes", &[function]), &DaemonOptions::default());
    let ask = |path: &str| get(daemon.gateway(), "crashes", path);
    let place = ask("/").text();
    assert_eq!(ask("/").text(), place, "copies of one image differ");
    for _ in 0..4 {
        assert_eq!(ask("/crash").status, 502);
    }
    let answer = ask("/");
    if answer.status == 503 {
        assert!(daemon.explain(&answer).contains("backing_off"), "{}", answer.text());
        assert!(answer.header("retry-after").is_some());
    }
    wait_until("it answers again, from elsewhere", || {
        let answer = ask("/");
        answer.status == 200 && answer.text() != place
    });
    let metrics = daemon.admin("/metrics").text();
    assert!(metrics.contains("thaw_crash_backoffs_total{function=\"crashes\"} 1"), "{metrics}");
}

/// An image is frozen anew when it has the age that its owner has set.
#[test]
fn an_old_image_is_refreshed() {
    let keys = "refresh = \"1h\"";
    let function = Function::PythonVariant { program: "crashes", name: "refreshed", keys };
    let home = built_home("refreshed", &[function]);
    let path = home.join("store/functions/refreshed/record.json");
    let mut record: serde_json::Value =
        serde_json::from_slice(&fs::read(&path).expect("a record")).expect("JSON");
    let created_ms = record["created_ms"].as_u64().expect("a time");
    record["created_ms"] = (created_ms - 3_600_000).into();
    fs::write(&path, record.to_string()).expect("the record");
    let daemon = Daemon::start(&home, &DaemonOptions::default());
    wait_until("the image is younger", || {
        let record: serde_json::Value =
            serde_json::from_slice(&fs::read(&path).expect("a record")).expect("JSON");
        record["created_ms"].as_u64().expect("a time") > created_ms
    });
    assert_eq!(get(daemon.gateway(), "refreshed", "/").status, 200);
}

#[test]
fn a_killed_daemon_leaves_no_sandbox_and_starts_again() {
    let home = copy_home(home(), "faults-daemon");
    let mut random = Random(0x5eed1);
    for round in 0..6 {
        let daemon = Daemon::start(&home, &DaemonOptions::default());
        let load = Load::start(daemon.gateway());
        load.wait_for(5);
        thread::sleep(Duration::from_millis(random.below(200)));
        let sandboxes = daemon.sandboxes();
        assert!(!sandboxes.is_empty(), "round {round}");
        daemon.kill();
        wait_until("no sandbox is left", || sandboxes.iter().all(|s| !exists(s.pid)));
        load.finish();
    }
    let outcome = run(thaw().env("THAW_HOME", &home).arg("gc"));
    assert_eq!(outcome.code, Some(0), "{}", outcome.stderr);
    let daemon = Daemon::start(&home, &DaemonOptions::default());
    assert_eq!(get(daemon.gateway(), "hello-c", "/").status, 200);
    assert_eq!(get(daemon.gateway(), "hello-python", "/").status, 200);
    assert_eq!(daemon.stop(), Some(0));
}

#[test]
fn killed_instances_and_zygotes_are_replaced() {
    let home = copy_home(home(), "faults-instances");
    let daemon = Daemon::start(&home, &DaemonOptions::default());
    let load = Load::start(daemon.gateway());
    let mut random = Random(0x5eed2);
    for _ in 0..40 {
        thread::sleep(Duration::from_millis(random.below(30)));
        let parent = zygote_parent(&daemon);
        let sandboxes = children(parent.pid);
        if !sandboxes.is_empty() {
            kill(sandboxes[random.below(sandboxes.len() as u64) as usize].pid);
        }
    }
    load.wait_for(50);
    load.finish();
    assert!(exists(daemon.pid()));
    wait_until("the other function answers, too", || {
        get(daemon.gateway(), "hello-python", "/").status == 200
    });
    assert_eq!(daemon.stop(), Some(0));
}

#[test]
fn a_killed_zygote_parent_is_replaced() {
    let home = copy_home(home(), "faults-parent");
    let daemon = Daemon::start(&home, &DaemonOptions::default());
    let load = Load::start(daemon.gateway());
    let mut random = Random(0x5eed3);
    for _ in 0..4 {
        load.wait_for(10);
        thread::sleep(Duration::from_millis(random.below(100)));
        let parent = zygote_parent(&daemon);
        kill(parent.pid);
        wait_until("there is another one", || zygote_parent(&daemon).pid != parent.pid);
    }
    load.wait_for(50);
    load.finish();
    assert_eq!(daemon.stop(), Some(0));
}

/// Zygotes that are stopped take a boot command and do nothing about it, like those that
/// are killed before they have come to it.
#[test]
fn a_request_whose_zygote_is_killed_before_its_guest_runs_is_answered() {
    let home = copy_home(home(), "faults-boot");
    let daemon = Daemon::start(&home, &DaemonOptions::default());
    assert_eq!(get(daemon.gateway(), "hello-c", "/").status, 200);
    let zygotes = || children(zygote_parent(&daemon).pid);
    let awaits_its_command = |zygote: &thaw_e2e::Process| {
        let call = fs::read_to_string(format!("/proc/{}/syscall", zygote.pid)).unwrap_or_default();
        call.starts_with(&format!("{} ", libc::SYS_recvmsg))
    };
    for _ in 0..5 {
        // One that is stopped while it is made has no request, and others wait for it.
        wait_until("no zygote is being made", || zygotes().iter().all(awaits_its_command));
        let stopped = zygotes();
        for zygote in &stopped {
            send(zygote.pid, Signal::STOP);
        }
        let gateway = daemon.gateway();
        let client = thread::spawn(move || get(gateway, "hello-c", "/"));
        let has_request = |zygote: &thaw_e2e::Process| {
            let is_it = |instance: &serde_json::Value| instance["pid"] == zygote.pid;
            daemon.instances("hello-c").iter().any(is_it)
        };
        // A zygote that was made since may have answered.
        wait_until("a stopped zygote has the request", || {
            client.is_finished() || stopped.iter().any(has_request)
        });
        // It goes last, when the others are gone: the request is tried three times, and one that
        // is still dying would take it.
        let (holders, others): (Vec<_>, Vec<_>) = stopped.iter().partition(|one| has_request(one));
        others.iter().for_each(|zygote| kill(zygote.pid));
        wait_until("the others are gone", || others.iter().all(|zygote| !exists(zygote.pid)));
        holders.iter().for_each(|zygote| kill(zygote.pid));
        let response = client.join().expect("a client");
        assert_eq!(response.status, 200, "{}", response.text());
    }
    assert_eq!(daemon.stop(), Some(0));
}

/// Sends a signal to a process that may have ended.
fn send(pid: u32, signal: Signal) {
    if let Some(pid) = rustix::process::Pid::from_raw(pid as i32) {
        let _ = rustix::process::kill_process(pid, signal);
    }
}

#[test]
fn a_stopping_daemon_finishes_what_it_has_begun() {
    let home = copy_home(home(), "faults-drain");
    let daemon = Daemon::start(&home, &DaemonOptions::default());
    let gateway = daemon.gateway();
    let slow = thread::spawn(move || get(gateway, "hello-python", "/slow?seconds=15"));
    wait_until("the request is being served", || {
        daemon.instances("hello-python").iter().any(|i| i["connections"].as_u64() == Some(1))
    });
    let sandboxes = daemon.sandboxes();
    daemon.signal(Signal::TERM);
    assert_eq!(slow.join().expect("a client").status, 200);
    assert_eq!(daemon.stop(), Some(0));
    wait_until("no sandbox is left", || sandboxes.iter().all(|s| !exists(s.pid)));
}

#[test]
fn a_second_daemon_is_refused() {
    let home = copy_home(home(), "faults-second");
    let daemon = Daemon::start(&home, &DaemonOptions::default());
    let mut second = thaw();
    second.env("THAW_HOME", &home).args(["serve", "--listen=127.0.0.1:0"]);
    let outcome = run(&mut second);
    assert_eq!(outcome.code, Some(1));
    assert!(outcome.stderr.contains("another daemon"), "{}", outcome.stderr);
    assert_eq!(get(daemon.gateway(), "hello-c", "/").status, 200);
    assert_eq!(daemon.stop(), Some(0));
}

#[test]
fn a_build_that_is_killed_leaves_the_store_usable() {
    let home = copy_home(home(), "faults-build");
    let mut random = Random(0x5eed4);
    for _ in 0..8 {
        let mut build = thaw();
        build.env("THAW_HOME", &home).args(["build", "--quiet"]);
        build.arg(thaw_e2e::repository().join("examples/hello-python"));
        let mut build = build.spawn().expect("thaw");
        thread::sleep(Duration::from_millis(random.below(900)));
        let below = thaw_e2e::descendants(build.id());
        kill(build.id());
        build.wait().expect("our child");
        wait_until("its sandboxes are gone", || below.iter().all(|p| !exists(p.pid)));
    }
    let daemon = Daemon::start(&home, &DaemonOptions::default());
    assert_eq!(get(daemon.gateway(), "hello-python", "/").status, 200);
    // A new build is served at once, and what nothing refers to goes.
    let outcome = Function::Example("hello-python").build(&home);
    assert_eq!(outcome.code, Some(0), "{}", outcome.stderr);
    assert_eq!(get(daemon.gateway(), "hello-python", "/").status, 200);
    let outcome = run(thaw().env("THAW_HOME", &home).arg("gc"));
    assert_eq!(outcome.code, Some(0), "{}", outcome.stderr);
    assert_eq!(get(daemon.gateway(), "hello-python", "/").status, 200);
    assert_eq!(daemon.stop(), Some(0));
}

#[test]
fn builds_of_one_directory_wait_for_each_other() {
    let work = tempfile::tempdir().expect("a temporary directory");
    let command = r#"["sh", "-c", "mkdir busy && sleep 0.5 && rmdir busy"]"#;
    let function = Function::Variant {
        example: "hello-c",
        name: "twice",
        keys: format!("[build]\ncommand = {command}"),
        limits: "",
    };
    let directory = function.directory(work.path());
    let homes = ["first", "second"].map(|home| work.path().join(home));
    let builds = homes.map(|home| {
        let mut build = thaw();
        build.env("THAW_HOME", home).arg("build").arg(&directory);
        build.stderr(Stdio::piped()).spawn().expect("thaw")
    });
    for build in builds {
        let outcome = build.wait_with_output().expect("our child");
        assert!(outcome.status.success(), "{}", String::from_utf8_lossy(&outcome.stderr));
    }
}

/// A small file system in memory, which takes root to make; none without.
struct SmallDisk(PathBuf);

impl SmallDisk {
    fn mount(label: &str, size: &str) -> Option<Self> {
        let path = std::env::temp_dir().join(format!("thaw-{label}-{}", std::process::id()));
        fs::create_dir_all(&path).expect("a directory");
        let mut mount = Command::new("mount");
        mount.args(["-t", "tmpfs", "-o", &format!("size={size}"), "tmpfs"]).arg(&path);
        if run(&mut mount).code == Some(0) {
            return Some(Self(path));
        }
        fs::remove_dir(&path).expect("removable");
        None
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        run(Command::new("umount").arg("-l").arg(&self.0));
        let _ = fs::remove_dir(&self.0);
    }
}

#[test]
fn a_full_disk_stops_logs_and_nothing_else() {
    let Some(disk) = SmallDisk::mount("logs", "64k") else {
        eprintln!("not checked: mounting a small file system takes root");
        return;
    };
    let home = copy_home(home(), "faults-logs");
    let logs = home.join("logs");
    if logs.exists() {
        fs::remove_dir_all(&logs).expect("removable");
    }
    std::os::unix::fs::symlink(&disk.0, &logs).expect("a link");
    let refused = Daemon::try_start(&home, &DaemonOptions::default()).expect_err("it is root's");
    let advised = refused.split('`').nth(1).expect("a way out").to_owned();
    assert!(run(Command::new("sh").args(["-c", &advised])).code == Some(0), "{refused}");
    let filler = disk.0.join("filler");
    fs::write(&filler, vec![0; 128 << 10]).expect_err("the disk is smaller");
    let daemon = Daemon::start(&home, &DaemonOptions::default());
    let ask = || assert_eq!(get(daemon.gateway(), "hello-python", "/random").status, 200);
    let said = |text: &str| daemon.log().matches(text).count();
    wait_until("the daemon says that it cannot write", || {
        ask();
        said("cannot write") > 0
    });
    // Longer than a second, after which it tries again.
    let begin = Instant::now();
    while begin.elapsed() < Duration::from_secs(3) {
        ask();
    }
    assert_eq!(said("hello-python.log"), 1, "{}", daemon.log());
    fs::remove_file(&filler).expect("removable");
    wait_until("it writes again", || {
        ask();
        let text = fs::read_to_string(logs.join("hello-python.log")).unwrap_or_default();
        text.contains("lines are missing here") && text.contains("/random")
    });
    wait_until("it says so", || said("is written again") == 1);
    assert_eq!(daemon.stop(), Some(0));
    fs::remove_file(&logs).expect("removable");
}

#[test]
fn a_full_disk_is_a_clear_error_and_loses_nothing() {
    // The Python example needs some 60 MiB, the C example one.
    let Some(disk) = SmallDisk::mount("disk", "24m") else {
        eprintln!("not checked: mounting a small file system takes root");
        return;
    };
    let home = disk.0.join("home");
    fs::create_dir(&home).expect("a home");
    let outcome = Function::Example("hello-c").build(&home);
    assert_eq!(outcome.code, Some(0), "{}", outcome.stderr);
    for _ in 0..2 {
        let outcome = Function::Example("hello-python").build(&home);
        assert_eq!(outcome.code, Some(1), "{}", outcome.stderr);
        let complaint = outcome.stderr.to_lowercase();
        assert!(
            complaint.contains("the disk that holds") && complaint.contains("is full: free"),
            "{complaint}"
        );
        assert!(!complaint.contains("panicked"), "{complaint}");
    }
    let daemon = Daemon::start(&home, &DaemonOptions::default());
    assert_eq!(get(daemon.gateway(), "hello-c", "/").status, 200);
    assert_eq!(get(daemon.gateway(), "hello-python", "/").status, 404);
    assert_eq!(daemon.stop(), Some(0));
    let outcome = run(thaw().env("THAW_HOME", &home).arg("gc"));
    assert_eq!(outcome.code, Some(0), "{}", outcome.stderr);
}

/// The store keeps a little room for both.
#[test]
fn a_daemon_starts_again_and_versions_change_on_a_full_disk() {
    let Some(disk) = SmallDisk::mount("needed", "32m") else {
        eprintln!("not checked: mounting a small file system takes root");
        return;
    };
    let home = disk.0.join("home");
    fs::create_dir(&home).expect("a home");
    for _ in 0..2 {
        let outcome = Function::Example("hello-c").build(&home);
        assert_eq!(outcome.code, Some(0), "{}", outcome.stderr);
    }
    let mut daemon = Daemon::start(&home, &DaemonOptions::default());
    let fill = |name: &str| {
        fs::write(disk.0.join(name), vec![0; 32 << 20]).expect_err("the disk is smaller");
    };
    fill("first");
    daemon.kill_and_await_next();
    fill("second");
    let versions = run(thaw().env("THAW_HOME", &home).args(["versions", "hello-c", "--json"]));
    assert!(versions.stdout.contains("\"number\": 2"), "{versions:?}");
    for version in ["1", "2"] {
        let activate = ["activate", "hello-c", version];
        let outcome = run(thaw().env("THAW_HOME", &home).args(activate));
        assert!(outcome.success().contains(&format!("to version {version}")), "{}", daemon.log());
    }
    wait_until("the daemon says that the disk is full", || {
        daemon.log().contains("is full: only what is small and needed is written still")
    });
    assert_eq!(get(daemon.gateway(), "hello-c", "/").status, 200);
    for name in ["first", "second"] {
        fs::remove_file(disk.0.join(name)).expect("removable");
    }
    wait_until("the room is held again", || {
        let reserve = fs::metadata(home.join("store/reserve")).expect("it is there");
        reserve.len() == 512 << 10 && daemon.log().contains("has room again")
    });
    assert_eq!(daemon.stop(), Some(0));
}

#[test]
fn a_full_disk_refuses_a_checkpoint_and_the_instance_goes_on() {
    let Some(disk) = SmallDisk::mount("checkpoints", "24m") else {
        eprintln!("not checked: mounting a small file system takes root");
        return;
    };
    let home = disk.0.join("home");
    fs::create_dir(&home).expect("a home");
    let directory = tempfile::tempdir().expect("a directory");
    let example = Function::Example("hello-c").directory(directory.path());
    fs::copy(example.join("build/hello"), directory.path().join("hello")).expect("a program");
    let text = "name = \"hello-c\"\ncommand = [\"/app/hello\"]\nport = 8080\nfiles = [\"hello\"]\n\
                isolation = \"instance\"\n[runtime]\nkind = \"binary\"\n";
    fs::write(directory.path().join("thaw.toml"), text).expect("writable");
    let command = |arguments: &[&str]| run(thaw().env("THAW_HOME", &home).args(arguments));
    command(&["build", directory.path().to_str().expect("UTF-8")]).success();
    let daemon = Daemon::start(&home, &DaemonOptions::default());
    let ask = || assert_eq!(get(daemon.gateway(), "hello-c", "/").status, 200);
    ask();
    let id = daemon.first_instance("hello-c")["id"].to_string();
    command(&["checkpoint", &id, "before"]).success();

    let filler = disk.0.join("filler");
    fs::write(&filler, vec![0; 24 << 20]).expect_err("the disk is smaller");
    let refused = command(&["checkpoint", &id, "full"]);
    assert_eq!(refused.code, Some(1), "{}", refused.stdout);
    let names_the_disk = format!("the disk that holds {}", home.join("store").display());
    assert!(refused.stderr.contains(&names_the_disk), "{}", refused.stderr);
    assert!(refused.stderr.contains("is full: free some space on it"), "{}", refused.stderr);
    ask();
    assert_eq!(daemon.first_instance("hello-c")["id"].to_string(), id, "it went on");
    // Copies are in memory.
    command(&["fork", &id]).success();

    fs::remove_file(&filler).expect("removable");
    let after = command(&["checkpoint", &id, "after"]).success();
    assert!(after.contains("after"), "{after}");
    let names = command(&["checkpoints"]).success();
    assert!(names.contains("before") && !names.contains("full"), "{names}");
    command(&["restore", "after"]).success();
    assert_eq!(daemon.stop(), Some(0));
}
