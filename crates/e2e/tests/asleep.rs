//! Instances that are asleep: their process has ended, and a file is left from which they wake.

use serde_json::Value;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;
use std::time::{Duration, Instant};
use thaw_e2e::{
    Daemon, DaemonOptions, Function, Heard, Outcome, Raw, Response, built_home, copy_home, exists,
    free_port, get, kill, prefetch_file, request, run, skip, thaw, wait_until,
};

const ALONE: &str = "isolation = \"instance\"\n[limits]\nconcurrency = 8\ninstances = 1\n\
                     keep_alive = \"10m\"\n";
const SEVERAL: &str = "isolation = \"instance\"\n[limits]\nkeep_alive = \"10m\"\n";
const BY_ITSELF: &str = "isolation = \"instance\"\nlimits = { concurrency = 8, instances = 1, \
                         keep_alive = \"10m\", sleep_after = \"300ms\" }";
const SHORT: &str = "isolation = \"instance\"\nlimits = { keep_alive = \"25s\" }";
const PERSISTENT: &str = "isolation = \"instance\"\npersist = true\n[limits]\nconcurrency = 8\n\
                          keep_alive = \"10m\"\n";

fn survivor(name: &'static str, keys: &'static str) -> Function {
    Function::PythonVariant { program: "survivor", name, keys }
}

/// Connections are handed over whole, at an address of the function's own.
fn whole_port() -> u16 {
    static PORT: OnceLock<u16> = OnceLock::new();
    *PORT.get_or_init(free_port)
}

fn whole() -> Function {
    let keys = format!(
        "isolation = \"instance\"\nlisten = \"127.0.0.1:{}\"\n\
         entry = {{ connections = \"handover\" }}\n\
         limits = {{ concurrency = 8, instances = 1, keep_alive = \"10m\", sleep_after = \"300ms\" }}",
        whole_port()
    );
    survivor("whole", keys.leak())
}

/// A home of its own with functions that remember how often they were asked.
fn home(label: &str) -> PathBuf {
    static HOME: OnceLock<PathBuf> = OnceLock::new();
    let home = HOME.get_or_init(|| {
        let functions = [
            survivor("alone", ALONE),
            survivor("several", SEVERAL),
            survivor("by-itself", BY_ITSELF),
            survivor("short", SHORT),
            survivor("persistent", PERSISTENT),
        ];
        built_home("asleep", &functions)
    });
    copy_home(home, &format!("asleep-{label}"))
}

fn daemon(label: &str) -> Daemon {
    Daemon::start(&home(label), &DaemonOptions::default())
}

fn command(daemon: &Daemon, arguments: &[&str]) -> Outcome {
    run(thaw().env("THAW_HOME", daemon.home()).args(arguments))
}

/// What an answered request counts.
#[track_caller]
fn counted(response: &Response, daemon: &Daemon) -> u32 {
    assert_eq!(response.status, 200, "{}\n{}", response.text(), daemon.log());
    response.text().trim().parse().expect("a number")
}

#[track_caller]
fn count(daemon: &Daemon, function: &str) -> u32 {
    counted(&get(daemon.gateway(), function, "/count"), daemon)
}

#[track_caller]
fn count_at(daemon: &Daemon, function: &str, instance: u64) -> u32 {
    let instance = instance.to_string();
    let said = command(daemon, &["invoke", function, "--instance", &instance, "--path", "/count"]);
    said.success().trim().parse().expect("a number")
}

#[track_caller]
fn wait_for_state(daemon: &Daemon, function: &str, state: &str) {
    wait_until(&format!("{function} is {state}"), || {
        let instances = daemon.instances(function);
        !instances.is_empty() && instances.iter().all(|instance| instance["state"] == state)
    });
}

/// Puts the only instance of a function to sleep as soon as it is idle.
#[track_caller]
fn put_to_sleep(daemon: &Daemon, function: &str) -> Value {
    wait_until("it is idle", || {
        ["idle", "hibernated", "woken-up"].contains(&&*daemon.instance(function).2)
    });
    let outcome = command(daemon, &["sleep", function, "--json"]);
    assert_eq!(outcome.code, Some(0), "{}\n{}", outcome.stderr, daemon.log());
    serde_json::from_str(&outcome.stdout).expect("JSON")
}

/// Waits until instances that are asleep no more have left nothing: their files go a moment after them.
#[track_caller]
fn wait_for_no_files(home: &Path) {
    wait_until("no files are left", || files(home).is_empty());
}

/// The files of instances that are asleep.
fn files(home: &Path) -> Vec<PathBuf> {
    let all = fs::read_dir(home.join("asleep")).expect("the directory");
    let mut all: Vec<_> = all.map(|entry| entry.expect("an entry").path()).collect();
    all.sort();
    all
}

#[test]
fn an_instance_keeps_its_state_and_its_number_over_three_sleeps() {
    let daemon = daemon("told");
    assert_eq!(count(&daemon, "alone"), 1);
    assert_eq!(get(daemon.gateway(), "alone", "/grow/24").status, 200);
    wait_for_state(&daemon, "alone", "idle");
    let (id, mut pid, _) = daemon.instance("alone");
    for round in 1..=3 {
        let done = put_to_sleep(&daemon, "alone");
        assert_eq!(done["instance"].as_u64(), Some(id), "{done}");
        assert!(done["stored"].as_u64().expect("bytes") > 24 << 20, "{done}");
        assert_eq!(daemon.instance("alone"), (id, 0, "asleep".to_owned()));
        wait_until("its process is gone", || !exists(pid));
        let left = files(daemon.home());
        assert_eq!(left.len(), 2, "{left:?}");
        assert_eq!(count(&daemon, "alone"), 2 + round);
        let (same, new, _) = daemon.instance("alone");
        assert_eq!(same, id);
        pid = new;
        wait_for_no_files(daemon.home());
    }
    for line in
        ["thaw_sleeps_total{function=\"alone\"} 3", "thaw_sleep_wakes_total{function=\"alone\"} 3"]
    {
        wait_until(&format!("the metrics say {line}"), || {
            daemon.admin("/metrics").text().contains(line)
        });
    }
}

#[test]
fn it_is_woken_by_the_control_plane_and_by_whoever_names_it() {
    let daemon = daemon("woken");
    assert_eq!(count(&daemon, "several"), 1);
    wait_for_state(&daemon, "several", "idle");
    let (id, ..) = daemon.instance("several");
    put_to_sleep(&daemon, "several");
    let twice = command(&daemon, &["sleep", "several"]);
    assert_eq!(twice.code, Some(1), "{}", twice.stdout);
    assert!(twice.stderr.contains("no idle instance to put to sleep"), "{}", twice.stderr);
    let listed = command(&daemon, &["ps"]).success();
    assert!(listed.contains("asleep"), "{listed}");

    let woken = command(&daemon, &["wake", "several"]).success();
    assert!(woken.starts_with(&format!("woke instance {id} of several")), "{woken}");
    wait_for_state(&daemon, "several", "idle");
    assert_eq!(count(&daemon, "several"), 2);

    let number = id.to_string();
    for (round, arguments) in [
        vec!["fork", &number, "-n", "1"],
        vec!["checkpoint", &number, "of-a-sleeper"],
        vec!["invoke", "several", "--instance", &number, "--path", "/count"],
    ]
    .into_iter()
    .enumerate()
    {
        wait_for_state(&daemon, "several", "idle");
        command(&daemon, &["sleep", "several", "--instance", &number]).success();
        command(&daemon, &arguments).success();
        let instances = daemon.instances("several");
        assert!(instances.iter().all(|one| one["state"] != "asleep"), "{round}: {instances:?}");
    }
    assert_eq!(count_at(&daemon, "several", id), 4);
    let copies: Vec<_> = daemon.instances("several");
    let copy = copies.iter().find(|one| one["id"] != id).expect("a copy")["id"].as_u64();
    let copy = copy.expect("a number");
    assert_eq!(count_at(&daemon, "several", copy), 3);
    // A copy sleeps as well, without the memory that it shares with others.
    wait_for_state(&daemon, "several", "idle");
    command(&daemon, &["sleep", "several", "--instance", &copy.to_string()]).success();
    assert_eq!(count_at(&daemon, "several", copy), 4);
}

#[test]
fn a_client_stays_connected_over_the_sleep() {
    let daemon = daemon("by-itself");
    let mut client = Raw::connect(daemon.gateway());
    for round in 1..=3 {
        client.send("GET /count HTTP/1.1\r\nHost: by-itself\r\n\r\n");
        let response = match client.hear(Duration::ZERO) {
            Heard::Response(response) => response,
            other => panic!("round {round}: {other:?}, {:?}", daemon.instances("by-itself")),
        };
        assert_eq!(counted(&response, &daemon), round);
        wait_for_state(&daemon, "by-itself", "asleep");
    }
}

/// The daemon keeps the sockets, and the program goes on with the descriptors that it had.
#[test]
fn connections_that_the_program_has_itself_go_on_after_the_sleep() {
    let daemon = Daemon::start(&built_home("asleep-whole", &[whole()]), &DaemonOptions::default());
    let address = ([127, 0, 0, 1], whole_port()).into();
    let ask = |client: &mut Raw| {
        client.send("GET /count HTTP/1.1\r\nHost: whole\r\n\r\n");
        counted(&client.response().expect("an answer"), &daemon)
    };
    let connections = || daemon.first_instance("whole")["connections"].as_u64();
    let mut first = Raw::connect(address);
    assert_eq!(ask(&mut first), 1);
    let (id, ..) = daemon.instance("whole");
    for round in 0..3 {
        wait_for_state(&daemon, "whole", "asleep");
        wait_until("its connection is kept", || connections() == Some(1));
        assert_eq!(ask(&mut first), 2 + round, "{}", daemon.log());
        assert_eq!(daemon.instance("whole").0, id);
    }
    // A second client comes while the first is connected to one that is asleep.
    wait_for_state(&daemon, "whole", "asleep");
    let mut second = Raw::connect(address);
    assert_eq!(ask(&mut second), 5);
    assert_eq!(ask(&mut first), 6);
    wait_for_state(&daemon, "whole", "asleep");
    wait_until("both connections are kept", || connections() == Some(2));
    // Half a request wakes it, and keeps it awake for the rest.
    second.send("GET /count HTTP/1.1\r\n");
    wait_until("it is awake", || daemon.instance("whole").2 == "busy");
    std::thread::sleep(std::time::Duration::from_millis(600));
    assert_eq!(daemon.instance("whole").2, "busy");
    second.send("Host: whole\r\n\r\n");
    assert_eq!(counted(&second.response().expect("an answer"), &daemon), 7);
    // The end of a connection is seen by the program, which lets go of it.
    wait_for_state(&daemon, "whole", "asleep");
    drop(second);
    wait_until("one connection is left", || {
        daemon.instance("whole").2 == "asleep" && connections() == Some(1)
    });
    assert_eq!(ask(&mut first), 8);
    // Who is connected when the instance ends sees that.
    wait_for_state(&daemon, "whole", "asleep");
    assert_eq!(daemon.stop(), Some(0));
    assert!(matches!(first.hear(std::time::Duration::ZERO), Heard::End), "it is closed");
}

#[test]
fn many_who_come_at_once_wake_the_same_instance() {
    let daemon = daemon("at-once");
    count(&daemon, "alone");
    let (id, ..) = daemon.instance("alone");
    for round in 0..5 {
        put_to_sleep(&daemon, "alone");
        std::thread::scope(|scope| {
            let ask = || get(daemon.gateway(), "alone", "/count").status;
            let asked = [(); 8].map(|()| scope.spawn(ask));
            asked.into_iter().for_each(|asked| assert_eq!(asked.join().expect("an answer"), 200));
        });
        assert_eq!(daemon.instance("alone").0, id, "{round}");
    }
    assert_eq!(count(&daemon, "alone"), 42);
}

#[test]
fn instances_sleep_while_memory_is_short() {
    let home = home("pressure");
    let shortage = home.join("shortage");
    let program = ["/usr/bin/env".to_owned(), format!("THAW_PRESSURE={}", shortage.display())];
    let daemon = Daemon::start_by(&program, &home, &DaemonOptions::default());
    // Neither sleeps by itself.
    let functions = ["alone", "several"];
    for function in functions {
        assert_eq!(count(&daemon, function), 1);
        wait_for_state(&daemon, function, "idle");
    }
    fs::write(&shortage, "").expect("writable");
    for function in functions {
        wait_for_state(&daemon, function, "asleep");
    }
    fs::remove_file(&shortage).expect("it is there");
    for function in functions {
        assert_eq!(count(&daemon, function), 2);
    }
    // Boots from their files count apart from others.
    for function in functions {
        let says = |line: &&str, what: &str| line.contains(what);
        let is_of_it = |line: &&str| {
            let function = format!("function=\"{function}\"");
            ["_count{", "boot=\"asleep\"", "first_byte", &function]
                .iter()
                .all(|what| says(line, what))
        };
        // A client may be answered before the boot is noted.
        wait_until(&format!("a boot of {function} from its file is counted"), || {
            let metrics = daemon.admin("/metrics").text();
            metrics.lines().find(is_of_it).is_some_and(|line| line.ends_with(" 1"))
        });
    }
}

#[test]
fn it_ends_when_its_time_is_over() {
    let daemon = daemon("short");
    assert_eq!(count(&daemon, "short"), 1);
    put_to_sleep(&daemon, "short");
    wait_until("it has ended", || daemon.instances("short").is_empty());
    wait_for_no_files(daemon.home());
    assert_eq!(count(&daemon, "short"), 1);
}

#[test]
fn a_file_that_is_damaged_is_refused_and_the_client_told() {
    let daemon = daemon("damaged");
    for damage in [
        // Cut off, flipped in the middle, and gone.
        |path: &Path| {
            let file = fs::OpenOptions::new().write(true).open(path).expect("root may");
            let len = file.metadata().expect("attributes").len();
            file.set_len(len / 2).expect("cut off");
        },
        |path: &Path| {
            let mut bytes = fs::read(path).expect("root may");
            let middle = bytes.len() / 2;
            bytes[middle] ^= 1;
            fs::write(path, bytes).expect("root may");
        },
        |path: &Path| fs::remove_file(path).expect("root may"),
    ] {
        assert_eq!(count(&daemon, "alone"), 1);
        put_to_sleep(&daemon, "alone");
        let files = files(daemon.home());
        damage(files.iter().find(|path| path.extension().expect("one") == "image").expect("one"));
        let refused = get(daemon.gateway(), "alone", "/count");
        assert_eq!(refused.status, 503, "{}", refused.text());
        let reason = daemon.explain(&refused);
        assert!(reason.contains("cannot_wake"), "{reason}");
        assert!(reason.contains("its state is lost"), "{reason}");
        // Nothing is left of it.
        wait_for_no_files(daemon.home());
    }
    // Nothing of it was run.
    assert_eq!(count(&daemon, "alone"), 1);
    wait_until("the losses are counted", || {
        daemon.admin("/metrics").text().contains("thaw_sleep_losses_total{function=\"alone\"} 3")
    });
}

#[test]
fn it_is_asleep_in_the_next_daemon() {
    let home = home("killed-daemon");
    let daemon = Daemon::start(&home, &DaemonOptions::default());
    assert_eq!(count(&daemon, "alone"), 1);
    put_to_sleep(&daemon, "alone");
    let (id, ..) = daemon.instance("alone");
    // What a daemon leaves that is killed while it writes.
    fs::write(home.join("asleep/77.image"), "begun").expect("root may");
    fs::write(home.join("asleep/78.json"), "{").expect("root may");
    daemon.kill();
    drop(daemon);
    let daemon = Daemon::start(&home, &DaemonOptions::default());
    assert_eq!(daemon.instance("alone"), (id, 0, "asleep".to_owned()));
    wait_until("the others are removed", || files(&home).len() == 2);
    assert_eq!(count(&daemon, "alone"), 2);
    put_to_sleep(&daemon, "alone");
    // One that stops in order keeps only those who asked for it.
    assert_eq!(daemon.stop(), Some(0));
    assert!(files(&home).is_empty());
}

/// Its memory is that of its own file, and not of its function's image, wherever it has not written.
#[test]
fn one_that_was_woken_keeps_its_memory_under_the_next_daemon() {
    let mut daemon = daemon("woken-and-taken-over");
    let ask = |daemon: &Daemon, path: &str| get(daemon.gateway(), "alone", path).text();
    let digest = ask(&daemon, "/draw/4");
    put_to_sleep(&daemon, "alone");
    assert_eq!(ask(&daemon, "/digest"), digest);
    let (id, pid, _) = daemon.instance("alone");
    daemon.wait_until_kept("alone");
    daemon.kill_and_await_next();
    let taken_over = daemon.instance("alone");
    assert_eq!((taken_over.0, taken_over.1), (id, pid), "{}", daemon.log());
    for _ in 0..2 {
        put_to_sleep(&daemon, "alone");
        assert_eq!(ask(&daemon, "/digest"), digest, "{}", daemon.log());
    }
    let copy = command(&daemon, &["checkpoint", &id.to_string(), "woken"]);
    copy.success();
    command(&daemon, &["gc"]).success();
    assert_eq!(ask(&daemon, "/digest"), digest);
}

/// What a sleeping instance differs from is referred to by nothing else in the store.
#[test]
fn the_garbage_collector_keeps_what_sleepers_differ_from() {
    let home = home("collected");
    let daemon = Daemon::start(&home, &DaemonOptions::default());
    count(&daemon, "persistent");
    put_to_sleep(&daemon, "persistent");
    let images = command(&daemon, &["images", "--json"]).success();
    let images: Value = serde_json::from_str(&images).expect("JSON");
    let is_its = |image: &&Value| image["functions"][0] == "persistent";
    let found = images.as_array().expect("a list").iter().find(is_its).expect("an image");
    let image = found["image"].as_str().expect("a name").to_owned();
    assert_eq!(daemon.stop(), Some(0));
    run(thaw().env("THAW_HOME", &home).args(["remove", "persistent"])).success();
    let kept = || home.join("store/images").join(&image).exists();
    run(thaw().env("THAW_HOME", &home).arg("gc")).success();
    assert!(kept(), "{image} is gone");
    for file in files(&home) {
        fs::remove_file(home.join("asleep").join(file)).expect("root may");
    }
    run(thaw().env("THAW_HOME", &home).arg("gc")).success();
    assert!(!kept(), "{image} is not needed any more");
}

#[test]
fn persistent_instances_are_asleep_after_a_restart() {
    let home = home("persistent");
    let mut daemon = Daemon::start(&home, &DaemonOptions::default());
    assert_eq!(count(&daemon, "alone"), 1);
    for round in 1..=4 {
        assert_eq!(count(&daemon, "persistent"), round);
        if round == 3 {
            // It may be asleep already.
            put_to_sleep(&daemon, "persistent");
        }
        let (id, ..) = daemon.instance("persistent");
        assert_eq!(daemon.stop(), Some(0));
        assert_eq!(files(&home).len(), 2, "{:?}", files(&home));
        daemon = Daemon::start(&home, &DaemonOptions::default());
        assert!(daemon.instances("alone").is_empty());
        assert_eq!(daemon.instance("persistent"), (id, 0, "asleep".to_owned()));
    }
}

#[test]
fn one_that_is_killed_while_it_wakes_sleeps_on_or_is_answered() {
    let daemon = daemon("killed");
    count(&daemon, "alone");
    let mut expected = 1;
    for round in 0..20 {
        put_to_sleep(&daemon, "alone");
        let status = std::thread::scope(|scope| {
            let asked = scope.spawn(|| request(daemon.gateway(), "alone", "/count", None));
            std::thread::sleep(std::time::Duration::from_millis(round));
            let pids = daemon.instances("alone");
            for pid in pids.iter().filter_map(|one| one["pid"].as_u64()).filter(|pid| *pid != 0) {
                kill(pid as u32);
            }
            asked.join().expect("an answer")
        });
        match status {
            Ok(answer) if answer.status == 200 => expected = counted(&answer, &daemon),
            Ok(answer) => assert_eq!(answer.status, 502, "{round}: {}", answer.text()),
            // It was killed in the middle of its answer.
            Err(_) => {}
        }
        let now = count(&daemon, "alone");
        // It sleeps on, or ran already and is lost as any other.
        assert!(now == expected + 1 || now == 1, "{round}: {now} after {expected}");
        expected = now;
    }
}

/// Clients ask all the time while the instance is put to sleep again and again: each gets an
/// answer, and the state is that of one instance.
#[test]
fn nothing_is_lost_under_load() {
    let daemon = daemon("load");
    count(&daemon, "alone");
    let (id, ..) = daemon.instance("alone");
    let is_over = std::sync::atomic::AtomicBool::new(false);
    let relaxed = std::sync::atomic::Ordering::Relaxed;
    let asked: u32 = std::thread::scope(|scope| {
        let ask = || {
            let (mut asked, mut client) = (0, Raw::connect(daemon.gateway()));
            while !is_over.load(relaxed) {
                client.send("GET /count HTTP/1.1\r\nHost: alone\r\n\r\n");
                counted(&client.response().expect("an answer"), &daemon);
                asked += 1;
                std::thread::sleep(std::time::Duration::from_millis(7));
            }
            asked
        };
        let clients = [(); 3].map(|()| scope.spawn(ask));
        let mut slept = 0;
        for _ in 0..60 {
            let outcome = command(&daemon, &["sleep", "alone"]);
            slept += u32::from(outcome.code == Some(0));
        }
        is_over.store(true, relaxed);
        eprintln!("slept {slept} of 60 times");
        clients.into_iter().map(|client| client.join().expect("answers")).sum()
    });
    assert_eq!(count(&daemon, "alone"), asked + 2);
    assert_eq!(daemon.instance("alone").0, id);
}

#[test]
fn one_that_is_killed_while_it_is_put_to_sleep_is_replaced_or_asleep() {
    let daemon = daemon("killed-asleep");
    for round in 0..16 {
        count(&daemon, "alone");
        wait_for_state(&daemon, "alone", "idle");
        let (_, pid, _) = daemon.instance("alone");
        let outcome = std::thread::scope(|scope| {
            let asked = scope.spawn(|| command(&daemon, &["sleep", "alone"]));
            std::thread::sleep(std::time::Duration::from_millis(round * 4));
            kill(pid);
            asked.join().expect("an outcome")
        });
        // One that is asleep as a whole loses nothing with its process.
        let is_asleep = outcome.code == Some(0);
        if !is_asleep {
            assert!(!outcome.stderr.is_empty());
            wait_until("it is gone", || daemon.instances("alone").is_empty());
        }
        let counted = count(&daemon, "alone");
        assert_eq!(counted > 1, is_asleep, "{round}: {counted} {}", outcome.stderr);
        kill(daemon.instance("alone").1);
        wait_until("it is gone", || daemon.instances("alone").is_empty());
        wait_for_no_files(daemon.home());
    }
}

/// A home with a small static program, as `hello`.
fn hello_home(label: &str, limits: &'static str) -> PathBuf {
    let function = Function::Variant {
        example: "hello-c",
        name: "hello",
        keys: "isolation = \"instance\"".to_owned(),
        limits,
    };
    built_home(label, &[function])
}

/// A small file system in memory, which takes root to make; none without.
struct SmallDisk(PathBuf);

impl SmallDisk {
    fn mount(size: &str) -> Option<Self> {
        let path = std::env::temp_dir().join(format!("thaw-asleep-{}", std::process::id()));
        fs::create_dir_all(&path).expect("a directory");
        let mut mount = Command::new("mount");
        mount.args(["-t", "tmpfs", "-o", &format!("size={size}"), "tmpfs"]).arg(&path);
        (run(&mut mount).code == Some(0)).then_some(Self(path))
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        run(Command::new("umount").arg("-l").arg(&self.0));
        let _ = fs::remove_dir(&self.0);
    }
}

#[test]
fn a_full_disk_is_a_clear_error_and_the_instance_goes_on() {
    let Some(disk) = SmallDisk::mount("120m") else {
        skip("mounting a small file system takes root");
        return;
    };
    let home = disk.0.join("home");
    let built = hello_home("asleep-full", "memory = \"16MiB\"\nkeep_alive = \"10m\"");
    run(Command::new("cp").arg("-a").arg(built).arg(&home)).success();
    let daemon = Daemon::start(&home, &DaemonOptions::default());
    let ask = || assert_eq!(get(daemon.gateway(), "hello", "/").status, 200);
    ask();
    let (id, ..) = daemon.instance("hello");
    let filler = disk.0.join("filler");
    // 64 MiB are left to others before anything is written.
    fs::write(&filler, vec![0; 50 << 20]).expect("room");
    wait_for_state(&daemon, "hello", "idle");
    let refused = command(&daemon, &["sleep", "hello"]);
    assert_eq!(refused.code, Some(1), "{}", refused.stdout);
    assert!(refused.stderr.contains("make room on the disk"), "{}", refused.stderr);
    ask();
    assert_eq!(daemon.instance("hello").0, id);
    wait_for_no_files(&home);
    fs::remove_file(&filler).expect("removable");
    wait_for_state(&daemon, "hello", "idle");
    command(&daemon, &["sleep", "hello"]).success();
    ask();
    assert_eq!(daemon.instance("hello").0, id);
}

#[test]
fn sleepers_count_in_the_quota_of_their_tenant() {
    let home = home("quota");
    let quota = |text: &str| fs::write(home.join("tenants.toml"), text).expect("writable");
    quota("[default]\nstore = \"1GiB\"\n");
    let daemon = Daemon::start(&home, &DaemonOptions::default());
    let stored = || {
        let said = command(&daemon, &["tenants", "--json"]).success();
        let tenants: Value = serde_json::from_str(&said).expect("JSON");
        let of_all = tenants.as_array().expect("a list").iter();
        of_all.filter_map(|tenant| tenant["store"].as_u64()).sum::<u64>()
    };
    count(&daemon, "several");
    // Its prefetch file counts, too, unless it takes too long to make one.
    let until = Instant::now() + Duration::from_secs(20);
    while prefetch_file(&home).is_none() && Instant::now() < until {
        std::thread::sleep(Duration::from_millis(50));
    }
    let done = put_to_sleep(&daemon, "several");
    let on_disk = done["on_disk"].as_u64().expect("bytes");
    let asleep = stored();
    assert!(on_disk > 64 << 10 && asleep > on_disk, "{done}");
    assert_eq!(count(&daemon, "several"), 2);
    wait_until("it does not count any more", || stored() == asleep - on_disk);

    quota("[default]\nstore = \"1MiB\"\n");
    daemon.signal(rustix::process::Signal::HUP);
    wait_until("the quota is in force", || {
        let outcome = command(&daemon, &["sleep", "several"]);
        let woken = command(&daemon, &["wake", "several"]);
        outcome.stderr.contains("with this sleeping instance it would have")
            && woken.code != Some(0)
    });
    assert_eq!(count(&daemon, "several"), 3);
}

/// What a process has in memory that is its own, in bytes.
fn anonymous(pid: u32) -> u64 {
    let text = fs::read_to_string(format!("/proc/{pid}/status")).expect("root may read this");
    let line = text.lines().find(|line| line.starts_with("RssAnon:")).expect("the field");
    line.split_whitespace().nth(1).expect("a value").parse::<u64>().expect("a number") * 1024
}

#[test]
fn a_thousand_are_asleep_at_once_and_each_wakes() {
    let home = hello_home(
        "asleep-thousand",
        "memory = \"16MiB\"\ninstances = 1100\nkeep_alive = \"1h\"\nsleep_after = \"200ms\"",
    );
    let daemon = Daemon::start(&home, &DaemonOptions::default());
    assert_eq!(get(daemon.gateway(), "hello", "/").status, 200);
    let (original, ..) = daemon.instance("hello");
    let before = anonymous(daemon.pid());
    for _ in 0..20 {
        // It is refused while the instance is about to sleep.
        wait_until("it is copied", || {
            let copied = command(&daemon, &["fork", &original.to_string(), "-n", "50"]);
            assert!(copied.code == Some(0) || copied.stderr.contains("try again"), "{copied:?}");
            copied.code == Some(0)
        });
        wait_for_state(&daemon, "hello", "asleep");
    }
    let instances = daemon.instances("hello");
    assert_eq!(instances.len(), 1001);
    assert_eq!(files(&home).len(), 2002);
    let more = anonymous(daemon.pid()).saturating_sub(before);
    eprintln!("{more} bytes of the daemon for 1001 that are asleep");
    assert!(more / 1001 < 16 << 10, "{more}");
    for one in instances.iter().step_by(97) {
        let id = one["id"].to_string();
        command(&daemon, &["invoke", "hello", "--instance", &id]).success();
    }
    assert_eq!(daemon.instances("hello").len(), 1001, "no other was booted");
}
