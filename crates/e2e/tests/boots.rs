//! The four boots: what a copy is must not depend on how it was booted.

use rustix::fs::{Advice, fadvise};
use serde_json::Value;
use std::collections::BTreeSet;
use std::fs;
use std::path::Path;
use std::process::Command;
use std::sync::OnceLock;
use thaw_e2e::{
    Daemon, DaemonOptions, Function, built_home, descendants, exists, get, kill, prefetch_file,
    process, repository, run, wait_until,
};

const WARM: &str = "template = false";
const FORK: &str = "template = true";
const READY: &str = "template = false\nready = 2";

/// One daemon for the tests that damage nothing.
fn served() -> &'static Daemon {
    static SERVED: OnceLock<Daemon> = OnceLock::new();
    SERVED.get_or_init(|| {
        let copies = |name, keys| Function::PythonVariant { program: "copies", name, keys };
        let home = built_home(
            "boots",
            &[
                copies("warm", WARM),
                copies("fork", FORK),
                copies("ready", READY),
                copies("warm-workers", "template = false\nenv.WORKERS = \"2\""),
                copies("fork-workers", "template = true\nenv.WORKERS = \"2\""),
                copies("ready-workers", "template = false\nready = 2\nenv.WORKERS = \"2\""),
            ],
        );
        Daemon::start(&home, &DaemonOptions::default())
    })
}

fn detail(daemon: &Daemon, function: &str) -> Value {
    daemon.admin(&format!("/functions/{function}")).json()
}

/// Waits until the next boot of a function will be of this kind.
fn await_standby(daemon: &Daemon, function: &str, kind: &str) {
    await_standbys(daemon, function, kind, 1);
}

/// Waits until the next `count` boots of a function will be of this kind.
fn await_standbys(daemon: &Daemon, function: &str, kind: &str, count: usize) {
    let is_there = |standby: &Value| match kind {
        "fork" => !standby["template"].is_null(),
        "ready" => standby["ready"].as_array().is_some_and(|ready| ready.len() >= count),
        _ => true,
    };
    wait_until(&format!("{function} can boot by {kind}"), || {
        is_there(&detail(daemon, function)["standby"])
    });
}

/// Asks two copies at the same time.
#[track_caller]
fn ask_two(daemon: &Daemon, function: &str) -> [Value; 2] {
    std::thread::scope(|scope| {
        [0, 1]
            .map(|_| scope.spawn(|| ask_for_the_time(daemon, function)))
            .map(|asked| asked.join().expect("an answer"))
    })
}

/// Bytes of memory that functions have if they do not say.
const DEFAULT_LIMIT: u64 = 256 << 20;

/// Asks a copy of its own.
#[track_caller]
fn ask(daemon: &Daemon, function: &str) -> Value {
    let response = get(daemon.gateway(), function, "/");
    assert_eq!(response.status, 200, "{}", response.text());
    response.json()
}

/// The same, and checks that its clock is that of the host.
#[track_caller]
fn ask_for_the_time(daemon: &Daemon, function: &str) -> Value {
    let now = || std::time::UNIX_EPOCH.elapsed().expect("a clock").as_secs_f64();
    let before = now();
    let value = ask(daemon, function);
    let time = value["time"].as_f64().expect("a number");
    assert!((before - 1.0..now() + 1.0).contains(&time), "{value}, asked at {before}");
    value
}

/// The instances that boots of a function are known of, the newest first.
fn booted(daemon: &Daemon, function: &str) -> Vec<u64> {
    let boots = detail(daemon, function)["boots"].clone();
    let instance = |boot: &Value| boot["instance"].as_u64().expect("a number");
    boots.as_array().expect("an array").iter().map(instance).collect()
}

/// Waits until `count` boots are known beside those of these instances: a client may be answered
/// before the boot is noted.
#[track_caller]
fn await_boots(daemon: &Daemon, function: &str, before: &[u64], count: usize) {
    let is_new = |instance: &u64| !before.contains(instance);
    wait_until("its boots are noted", || {
        booted(daemon, function).into_iter().filter(is_new).count() >= count
    });
}

/// Boots copies, some of them side by side, and checks that they are what they
/// should be and differ from each other; returns the kinds of the boots, the newest
/// first.
#[track_caller]
fn check_copies(daemon: &Daemon, function: &str, kind: &str, limit: u64) -> Vec<String> {
    let mut seen = BTreeSet::new();
    let mut values = Vec::new();
    let before = booted(daemon, function);
    for _ in 0..3 {
        await_standby(daemon, function, kind);
        values.push(ask_for_the_time(daemon, function));
    }
    await_standbys(daemon, function, kind, 2);
    values.extend(ask_two(daemon, function));
    await_standby(daemon, function, kind);
    values.push(ask_for_the_time(daemon, function));
    await_boots(daemon, function, &before, values.len());
    for value in &values {
        let unique = value["unique"].as_object().expect("an object");
        for (key, drawn) in unique {
            assert!(
                seen.insert(format!("{key} {drawn}")),
                "two copies drew the same {key}: {drawn}"
            );
        }
        assert!(value["threads"].is_null() || value["threads"] == 4, "{value}");
        assert_eq!(value["greeting"], values[0]["greeting"], "{value}");
        assert_eq!(value["system_v"], values[0]["system_v"], "{value}");
        assert!(value["ticked"].as_u64().is_some_and(|ticked| ticked > 0), "{value}");
        assert_eq!(value["hostname"], values[0]["hostname"]);
        assert_eq!(value["limit"], limit.to_string());
        assert!(value["lost"].as_array().is_none_or(Vec::is_empty), "{value}");
    }
    let boots = detail(daemon, function)["boots"].clone();
    let boots = boots.as_array().expect("an array");
    boots.iter().map(|boot| boot["kind"].as_str().expect("a kind").to_owned()).collect()
}

#[test]
fn copies_from_the_image_are_their_own() {
    let kinds = check_copies(served(), "warm", "warm", DEFAULT_LIMIT);
    assert!(kinds.iter().all(|kind| kind == "warm" || kind == "cold"), "{kinds:?}");
    check_copies(served(), "warm-workers", "warm", DEFAULT_LIMIT);
}

#[test]
fn copies_of_a_template_are_their_own() {
    for function in ["fork", "fork-workers"] {
        // The first one comes from the image, and shows the working set.
        ask(served(), function);
        let kinds = check_copies(served(), function, "fork", DEFAULT_LIMIT);
        assert!(kinds[..5].iter().all(|kind| kind == "fork"), "{function}: {kinds:?}");
    }
}

#[test]
fn copies_that_were_booted_ahead_are_their_own() {
    for function in ["ready", "ready-workers"] {
        let kinds = check_copies(served(), function, "ready", DEFAULT_LIMIT);
        assert!(kinds[..4].iter().all(|kind| kind == "ready"), "{function}: {kinds:?}");
    }
}

/// A program of `tests/guest/functions/copies` in another language than Python.
struct Program {
    language: &'static str,
    source: &'static str,
    /// Makes what is frozen of the source, which it finds in its working directory; empty for
    /// a source that is run as it is. The examples are built in sandboxes, so here it runs on
    /// this host, and once for all kinds of boots.
    compile: &'static str,
    /// What it makes.
    made: &'static str,
    /// Keys of `thaw.toml`.
    keys: &'static str,
    /// Keys of its `[runtime]`.
    runtime: &'static str,
}

/// Bytes of memory that these programs have.
const PROGRAM_LIMIT: u64 = 512 << 20;

/// Compiles a program in a directory; returns the path of what was made.
fn compiled(program: &Program, work: &Path) -> String {
    let source = repository().join("tests/guest/functions").join(program.source);
    fs::copy(&source, work.join(source.file_name().expect("a file"))).expect("a copy");
    run(Command::new("sh").args(["-c", program.compile]).current_dir(work)).success();
    work.join(program.made).to_str().expect("a path").to_owned()
}

/// Boots a program in each way; returns what its first copy said.
#[track_caller]
fn check_program(program: &Program) -> Value {
    let language = program.language;
    let work = tempfile::tempdir().expect("a temporary directory");
    let source: &str = match program.compile {
        "" => program.source,
        _ => compiled(program, work.path()).leak(),
    };
    let functions = [("warm", WARM), ("fork", FORK), ("ready", READY)].map(|(kind, keys)| {
        let name: &str = format!("{language}-{kind}").leak();
        let keys = format!(
            "{}\n{keys}\nenv.GREETING = \"hello\"\nlimits.memory = \"512MiB\"\n[runtime]\n{}",
            program.keys, program.runtime
        );
        Function::Program { source, name, keys }
    });
    let home = built_home(&format!("boots-{language}"), &functions);
    let daemon = Daemon::start(&home, &DaemonOptions::default());
    let first = ask(&daemon, functions[0].name());
    assert_eq!(first["greeting"], "hello");
    // The first one comes from the image, and shows the working set.
    functions.iter().for_each(|function| drop(ask(&daemon, function.name())));
    for (function, kind) in functions.iter().zip(["warm", "fork", "ready"]) {
        let kinds = check_copies(&daemon, function.name(), kind, PROGRAM_LIMIT);
        let is_as_wanted = |booted: &String| booted == kind || kind == "warm" && booted == "cold";
        assert!(kinds[..6].iter().all(is_as_wanted), "{language} by {kind}: {kinds:?}");
    }
    first
}

#[test]
fn copies_in_node_are_their_own() {
    check_program(&Program {
        language: "node",
        source: "copies/app.js",
        compile: "",
        made: "",
        keys: "command = [\"node\", \"app.js\"]\nfiles = [\"app.js\"]",
        runtime: "kind = \"node\"",
    });
}

#[test]
fn copies_in_java_are_their_own() {
    check_program(&Program {
        language: "java",
        source: "copies/App.java",
        compile: "javac -d classes App.java",
        made: "classes",
        keys: "command = [\"java\", \"-cp\", \"/app/classes\", \"App\"]\nfiles = [\"classes\"]",
        runtime: "kind = \"java\"",
    });
}

#[test]
fn copies_in_go_are_their_own() {
    check_program(&Program {
        language: "go",
        source: "copies/app.go",
        compile: "CGO_ENABLED=0 go build -o app app.go",
        made: "app",
        keys: "command = [\"/app/app\"]\nfiles = [\"app\"]",
        runtime: "kind = \"binary\"",
    });
}

#[test]
fn copies_in_ruby_are_their_own() {
    check_program(&Program {
        language: "ruby",
        source: "copies/app.rb",
        compile: "",
        made: "",
        keys: "command = [\"ruby\", \"app.rb\"]\nfiles = [\"app.rb\"]",
        runtime: "kind = \"ruby\"",
    });
}

#[test]
fn copies_in_php_are_their_own() {
    check_program(&Program {
        language: "php",
        source: "copies/app.php",
        compile: "",
        made: "",
        keys: "command = [\"php\", \"-S\", \"0.0.0.0:8080\", \"app.php\"]\nfiles = [\"app.php\"]",
        runtime: "kind = \"php\"",
    });
}

/// System V objects that were made before the freeze are every copy's own, and
/// threads that wait for them go on.
#[test]
fn copies_in_c_are_their_own() {
    let first = check_program(&Program {
        language: "c",
        source: "copies/app.c",
        compile: "cc -O2 -static -pthread -o app app.c",
        made: "app",
        keys: "command = [\"/app/app\"]\nfiles = [\"app\"]",
        runtime: "kind = \"binary\"",
    });
    assert_eq!(first["system_v"], "101 requests, a message, 1 attached");
}

/// A copy gets another virtual CPU when threads have waited for one in it, not because
/// timers that were due when it was frozen go off: that would cost its first response
/// most of a millisecond.
#[test]
fn a_copy_that_answers_at_once_has_one_virtual_cpu() {
    let home = built_home(
        "boots-cpus",
        &[Function::Variant {
            example: "hello-go",
            name: "go",
            keys: "isolation = \"instance\"".to_owned(),
            limits: "cpu = 2",
        }],
    );
    let daemon = Daemon::start(&home, &DaemonOptions::default());
    let host_threads = || {
        assert_eq!(get(daemon.gateway(), "go", "/").status, 200);
        // It may answer before the gateway has noted it.
        wait_until("it is known", || !daemon.instances("go").is_empty());
        let pid = daemon.first_instance("go")["pid"].as_u64().expect("a process id") as u32;
        let threads = status(pid, "Threads");
        kill(pid);
        wait_until("it is gone", || daemon.instances("go").is_empty());
        threads
    };
    // On a busy machine, threads may really have waited in some of them.
    wait_until("a copy has one host thread", || host_threads() == "1");
}

/// The lines of `/proc/PID/status` that isolation shows in.
fn status(pid: u32, field: &str) -> String {
    let text = std::fs::read_to_string(format!("/proc/{pid}/status")).expect("a process");
    let line = text.lines().find_map(|line| line.strip_prefix(field)).expect("the field");
    line.trim_start_matches(':').trim().to_owned()
}

/// A copy of a template has nothing of the template's rights, ids and groups.
#[test]
fn a_copy_of_a_template_is_isolated_like_any_other() {
    let home = built_home(
        "boots-isolation",
        &[Function::PythonVariant {
            program: "copies",
            name: "kept",
            keys: "template = true\nisolation = \"instance\"\nlimits.instances = 4",
        }],
    );
    let daemon = Daemon::start(&home, &DaemonOptions::default());
    // Two at a time, so that the second one is booted, too.
    let both = || {
        std::thread::scope(|scope| {
            let asked = [0, 1].map(|_| scope.spawn(|| ask(&daemon, "kept")));
            asked.into_iter().for_each(|thread| drop(thread.join().expect("an answer")));
        });
    };
    both();
    await_standby(&daemon, "kept", "fork");
    daemon.instances("kept").iter().for_each(|instance| {
        kill(instance["pid"].as_u64().expect("a process id") as u32);
    });
    wait_until("they are gone", || daemon.instances("kept").is_empty());
    // One that has answered before the second client comes serves that one, too.
    wait_until("there are two", || {
        both();
        daemon.instances("kept").len() == 2
    });
    let copies: Vec<u32> = daemon
        .instances("kept")
        .iter()
        .map(|instance| instance["pid"].as_u64().expect("a process id") as u32)
        .collect();
    assert_eq!(copies.len(), 2);
    for instance in daemon.instances("kept") {
        let number = instance["id"].as_u64().expect("a number");
        // It may have answered before its boot is noted.
        wait_until("its boot is noted", || booted(&daemon, "kept").contains(&number));
        let boots = detail(&daemon, "kept")["boots"].clone();
        let of_it = boots.as_array().expect("boots").iter().find(|boot| boot["instance"] == number);
        assert_eq!(of_it.expect("its boot")["kind"], "fork", "{boots}");
    }

    let template =
        detail(&daemon, "kept")["standby"]["template"].as_u64().expect("a template") as u32;
    assert_eq!(status(template, "CapEff"), "00000000002000c0");
    let groups: Vec<String> = copies.iter().map(|&pid| memory_group(pid)).collect();
    for (i, &pid) in copies.iter().enumerate() {
        for field in ["CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"] {
            assert_eq!(status(pid, field), "0000000000000000", "{field}");
        }
        assert_eq!((status(pid, "Seccomp"), status(pid, "NoNewPrivs")), ("2".into(), "1".into()));
        assert_eq!(status(pid, "NSpid").split_whitespace().next_back(), Some("1"));
        assert_ne!(status(pid, "Uid"), status(template, "Uid"));
        assert_ne!(status(pid, "NSpgid"), status(template, "NSpgid"));
        assert_eq!(process(pid).map(|p| p.parent), process(template).map(|p| p.parent));
        if !groups[i].is_empty() {
            assert_ne!(groups[i], memory_group(template));
            assert!(!groups[..i].contains(&groups[i]), "{groups:?}");
        }
    }
    assert_ne!(status(copies[0], "Uid"), status(copies[1], "Uid"));
    for namespace in ["pid", "uts"] {
        let of = |pid: u32| {
            std::fs::read_link(format!("/proc/{pid}/ns/{namespace}")).expect("a namespace")
        };
        assert_ne!(of(copies[0]), of(copies[1]), "{namespace}");
    }
    // Copies outlive their template, and end with the daemon.
    kill(template);
    wait_until("the template is gone", || !exists(template));
    assert!(copies.iter().all(|&pid| exists(pid)));
    let all: Vec<u32> = descendants(daemon.main_pid()).iter().map(|p| p.pid).collect();
    daemon.kill();
    wait_until("nothing is left", || !all.iter().any(|&pid| exists(pid)));
}

/// A thread has its own `%gs` in every copy.
#[test]
fn a_segment_of_the_program_is_thawed() {
    let segment = |name, keys| Function::PythonVariant { program: "segment", name, keys };
    let kinds = [("warm", WARM), ("fork", FORK), ("ready", READY)];
    let home = built_home("boots-segment", &kinds.map(|(name, keys)| segment(name, keys)));
    let daemon = Daemon::start(&home, &DaemonOptions::default());
    for (kind, _) in kinds {
        for _ in 0..3 {
            assert_eq!(get(daemon.gateway(), kind, "/").text(), "2a2a2a2a2a2a2a2a\n");
            await_standby(&daemon, kind, kind);
        }
    }
}

/// Images whose mappings are too many for one message are thawed in every way, too,
/// and so is memory that processes share.
#[test]
fn processes_with_thousands_of_mappings_are_thawed() {
    let mapped = |name, keys| Function::PythonVariant { program: "mapped", name, keys };
    let kinds = [("warm", WARM), ("fork", FORK), ("ready", READY)];
    let home = built_home("boots-mapped", &kinds.map(|(name, keys)| mapped(name, keys)));
    let daemon = Daemon::start(&home, &DaemonOptions::default());
    let sum = |salt: u64| (0..2500).step_by(2).map(|page| page + salt).sum::<u64>();
    for (kind, _) in kinds {
        let answer = || get(daemon.gateway(), kind, "/").text();
        // Shared memory was counted in before the freeze, by the child, by the parent.
        let expected = format!("{} {} [3, 3, 3, 0]\n", sum(0), sum(2));
        assert_eq!(answer(), expected);
        await_standby(&daemon, kind, kind);
        for _ in 0..3 {
            assert_eq!(answer(), expected);
        }
    }
}

/// The memory control group of a process; empty if there are none.
fn memory_group(pid: u32) -> String {
    let text = std::fs::read_to_string(format!("/proc/{pid}/cgroup")).unwrap_or_default();
    let of_memory = |line: &&str| line.contains(":memory:") || line.starts_with("0::");
    let line = text.lines().find(of_memory).unwrap_or_default();
    line.rsplit(':').next().unwrap_or_default().trim_matches('/').to_owned()
}

/// A function that is built anew or removed keeps nothing of the old one ready.
#[test]
fn what_was_kept_for_an_older_function_is_ended() {
    let function = Function::PythonVariant { program: "copies", name: "ready", keys: READY };
    let home = built_home("boots-replaced", std::slice::from_ref(&function));
    let daemon = Daemon::start(&home, &DaemonOptions::default());
    let kept = || -> Vec<u32> {
        let standby = detail(&daemon, "ready")["standby"]["ready"].clone();
        let pids = standby.as_array().expect("an array").iter();
        pids.map(|pid| pid.as_u64().expect("a process id") as u32).collect()
    };
    wait_until("two are ready", || kept().len() == 2);
    let old = kept();
    assert_eq!(function.build(&home).code, Some(0));
    wait_until("the old ones have ended", || !old.iter().any(|&pid| exists(pid)));
    wait_until("two are ready again", || kept().len() == 2);
    ask(&daemon, "ready");
}

/// A boot uses the copy that the template has forked ahead, which is isolated before anybody
/// wants it, and another one follows. One that has died is no loss.
#[test]
fn a_copy_is_forked_ahead_of_each_boot() {
    let function = Function::PythonVariant { program: "copies", name: "fork", keys: FORK };
    let home = built_home("boots-ahead", &[function]);
    let daemon = Daemon::start(&home, &DaemonOptions::default());
    ask(&daemon, "fork");
    let ahead = || -> Option<u32> {
        let pid = detail(&daemon, "fork")["standby"]["forked"][0].as_u64()?;
        Some(pid as u32)
    };
    for is_lost in [false, true, false] {
        wait_until("a copy is forked ahead", || ahead().is_some());
        let waiting = ahead().expect("a copy");
        assert_eq!(status(waiting, "CapEff"), "0000000000000000");
        assert_eq!(status(waiting, "Seccomp"), "2");
        if is_lost {
            kill(waiting);
        }
        assert_eq!(kind_of_boot(&daemon, "fork"), "fork");
        wait_until("another one is", || ahead().is_some_and(|pid| pid != waiting));
    }
}

/// Whatever dies that was kept for the next boot, the next boot works.
#[test]
fn lost_standbys_are_made_again() {
    let copies = |name, keys| Function::PythonVariant { program: "copies", name, keys };
    let home = built_home("boots-lost", &[copies("fork", FORK), copies("ready", READY)]);
    let daemon = Daemon::start(&home, &DaemonOptions::default());
    ask(&daemon, "fork");
    for _ in 0..3 {
        await_standby(&daemon, "fork", "fork");
        let template = detail(&daemon, "fork")["standby"]["template"].as_u64().expect("a template");
        kill(template as u32);
        ask(&daemon, "fork");
        wait_until("another template is made", || {
            ask(&daemon, "fork");
            let now = detail(&daemon, "fork")["standby"]["template"].as_u64();
            now.is_some_and(|now| now != template)
        });
        await_standby(&daemon, "ready", "ready");
        for pid in detail(&daemon, "ready")["standby"]["ready"].as_array().expect("an array") {
            kill(pid.as_u64().expect("a process id") as u32);
        }
        ask(&daemon, "ready");
    }
}

#[test]
fn metrics_count_the_memory_of_what_is_kept_for_the_next_boots() {
    let daemon = served();
    ask(daemon, "fork");
    await_standby(daemon, "fork", "fork");
    // Nobody is asked for these: another test counts on who is ready.
    await_standby(daemon, "ready", "ready");
    for state in ["function=\"fork\",state=\"template\"", "function=\"ready\",state=\"ready\""] {
        let series = format!("thaw_instance_memory_bytes{{{state}}} ");
        let bytes = |line: &str| line.strip_prefix(&series)?.parse::<u64>().ok();
        wait_until(&format!("memory is counted of {state}"), || {
            daemon.admin("/metrics").text().lines().find_map(bytes).is_some_and(|bytes| bytes > 0)
        });
        let series = format!("thaw_instances{{{state}}} ");
        wait_until(&format!("{state} is counted"), || {
            daemon.admin("/metrics").text().lines().any(|line| line.starts_with(&series))
        });
    }
}

/// A guest chooses which pages it touches, but not how much the node remembers of
/// that: here 131,072 runs of pages of zeros and 8,192 of written pages.
#[test]
fn a_recorded_working_set_is_small_whatever_the_guest_touches() {
    const RUNS_MAX: u64 = 4096;
    const BLOBS_MAX: u64 = 4096;
    const FRAME: u64 = 56 + 32;
    let sprawling = Function::Python("sprawling");
    let home = built_home("boots-sprawling", &[sprawling]);
    let daemon = Daemon::start(&home, &DaemonOptions::default());
    let images = home.join("store/images");
    let sets = || -> Vec<u64> {
        let files = fs::read_dir(&images).expect("images").map(|file| file.expect("an entry"));
        let sets = files.filter(|file| file.path().extension().is_some_and(|e| e == "workingset"));
        sets.map(|file| file.metadata().expect("attributes").len()).collect()
    };
    // On a busy machine the first one may take too long to show it.
    wait_until("its working set is stored", || {
        assert_eq!(get(daemon.gateway(), "sprawling", "/").text(), "0");
        !sets().is_empty()
    });
    let sizes = sets();
    assert!(sizes.iter().all(|&size| size <= FRAME + 24 * RUNS_MAX + 4 * BLOBS_MAX), "{sizes:?}");
    // What was left out comes in when it is touched.
    for _ in 0..3 {
        assert_eq!(get(daemon.gateway(), "sprawling", "/").text(), "0");
    }
}

/// Empties the page cache of what lies in a directory.
fn drop_from_page_cache(directory: &Path) {
    for entry in fs::read_dir(directory).expect("a directory") {
        let path = entry.expect("an entry").path();
        if path.is_dir() {
            drop_from_page_cache(&path);
        } else if let Ok(file) = fs::File::open(&path) {
            fadvise(&file, 0, None, Advice::DontNeed).expect("advice");
        }
    }
}

/// Bytes of the only tenant in the store.
fn stored_bytes(daemon: &Daemon) -> u64 {
    let tenants: Value = daemon.admin("/tenants").json();
    tenants[0]["store"].as_u64().expect("bytes")
}

/// The file counts for the tenant, as its functions do; it is written as soon as there is room.
#[test]
fn a_prefetch_file_needs_room_in_the_store_of_its_tenant() {
    let function = Function::PythonVariant { program: "copies", name: "cold", keys: WARM };
    let home = built_home("boots-cold-quota", &[function]);
    let options = DaemonOptions::default();
    let daemon = Daemon::start(&home, &options);
    let stored = stored_bytes(&daemon);
    daemon.stop();
    // The working set has room there.
    let quota = format!("[default]\nstore = \"{}B\"\n", stored + (256 << 10));
    fs::write(home.join("tenants.toml"), quota).expect("tenants.toml");
    let daemon = Daemon::start(&home, &options);
    wait_until("the file is refused", || {
        ask(&daemon, "cold");
        daemon.log().contains("without a prefetch file")
    });
    let log = daemon.log();
    assert!(
        log.contains("the quota of functions without a domain") && log.contains("cold"),
        "{log}"
    );
    assert_eq!(prefetch_file(&home), None);
    ask(&daemon, "cold");
    daemon.stop();
    fs::remove_file(home.join("tenants.toml")).expect("removed");
    let daemon = Daemon::start(&home, &options);
    wait_until("its prefetch file is stored", || prefetch_file(&home).is_some());
    wait_until("it counts", || stored_bytes(&daemon) > stored + (256 << 10));
}

/// Asks once, and returns how the copy that answered was booted.
fn kind_of_boot(daemon: &Daemon, function: &str) -> String {
    let before = booted(daemon, function);
    ask(daemon, function);
    await_boots(daemon, function, &before, 1);
    let boots = detail(daemon, function)["boots"].clone();
    boots[0]["kind"].as_str().expect("a kind").to_owned()
}

/// Pages that were read from the prefetch file and pages that are mapped later are those of
/// the image; a damaged file is not used.
#[test]
fn a_cold_boot_takes_its_pages_from_the_prefetch_file() {
    let function = Function::PythonVariant { program: "copies", name: "cold", keys: WARM };
    let home = built_home("boots-cold", &[function]);
    let options = DaemonOptions::default();
    let daemon = Daemon::start(&home, &options);
    wait_until("its prefetch file is stored", || {
        ask(&daemon, "cold");
        prefetch_file(&home).is_some()
    });
    let empty = || drop_from_page_cache(&home.join("store"));
    let boots_cold = || {
        empty();
        kind_of_boot(&daemon, "cold") == "cold"
    };
    // Pages that are just being read, or that a copy maps that has not ended yet, stay.
    wait_until("it boots cold", boots_cold);
    wait_until("its pages are back", || kind_of_boot(&daemon, "cold") == "warm");
    wait_until("it boots cold again", boots_cold);
    check_copies(&daemon, "cold", "cold", DEFAULT_LIMIT);
    daemon.stop();

    let path = prefetch_file(&home).expect("a prefetch file");
    let mut bytes = fs::read(&path).expect("its bytes");
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    fs::remove_file(&path).expect("removed");
    fs::write(&path, bytes).expect("written");
    let daemon = Daemon::start(&home, &options);
    // The first boot of a daemon is taken for cold.
    kind_of_boot(&daemon, "cold");
    for _ in 0..3 {
        empty();
        assert_eq!(kind_of_boot(&daemon, "cold"), "warm");
    }
    wait_until("the log says why", || {
        let log = daemon.log();
        log.contains("without a prefetch file") && log.contains("damaged")
    });
}

/// Requests differ: pages that later ones touch join the recorded working set, both those of warm
/// boots now and then and those that a cold boot did not find in its file.
#[test]
fn a_working_set_is_the_union_of_what_several_requests_touch() {
    const BLOCK: u64 = 256 << 10;
    let function = Function::PythonVariant { program: "wanderer", name: "union", keys: WARM };
    let home = built_home("boots-union", &[function]);
    let daemon = Daemon::start(&home, &DaemonOptions::default());
    let ask = |block: u64| {
        let response = get(daemon.gateway(), "union", &format!("/{block}"));
        assert_eq!(response.text(), (block + 1).to_string(), "{}", daemon.log());
    };
    let stored = || prefetch_file(&home).map_or(0, |path| path.metadata().expect("a file").len());
    wait_until("its prefetch file is stored", || {
        ask(0);
        stored() > 0
    });
    let first = stored();
    wait_until("the file has what a later request touches, too", || {
        ask(7);
        stored() >= first + BLOCK
    });
    // All others of these requests have touched the same.
    let second = stored();
    assert!(second < first + 2 * BLOCK, "{first} {second}");
    wait_until("the file has what a cold boot has missed, too", || {
        drop_from_page_cache(&home.join("store"));
        ask(30);
        stored() >= second + BLOCK
    });
    let third = stored();
    daemon.stop();
    // The next daemon uses the file, and what is not in it is right all the same.
    let daemon = Daemon::start(&home, &DaemonOptions::default());
    for block in [0, 7, 30, 50] {
        drop_from_page_cache(&home.join("store"));
        let response = get(daemon.gateway(), "union", &format!("/{block}"));
        assert_eq!(response.text(), (block + 1).to_string(), "{}", daemon.log());
    }
    assert!(!daemon.log().contains("prefetch file"), "{}", daemon.log());
    assert!(stored() >= third);
}
