//! Instances of several processes hibernate, sleep and are copied as those of one are.

use serde_json::Value;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use thaw_e2e::{
    Daemon, DaemonOptions, Function, Outcome, built_home, children, copy_home, get, kill, run,
    skip, state_helper_at_work, thaw, wait_until,
};

const KEYS: &str = "isolation = \"instance\"\n[limits]\nconcurrency = 8\nkeep_alive = \"10m\"\n\
                    memory = \"256MiB\"\ninstances = 4\n";
const BY_ITSELF: &str = "isolation = \"instance\"\nlimits = { concurrency = 8, keep_alive = \
                         \"10m\", hibernate_after = \"300ms\" }";

const LARGE: &str = "isolation = \"instance\"\nlimits = { concurrency = 8, keep_alive = \
                     \"10m\", memory = \"1GiB\", instances = 12 }";

fn family(name: &'static str, keys: &'static str) -> Function {
    Function::PythonVariant { program: "family", name, keys }
}

fn daemon(label: &str) -> Daemon {
    static HOME: OnceLock<PathBuf> = OnceLock::new();
    let home = HOME.get_or_init(|| {
        let few = format!("{KEYS}processes = 6\n");
        built_home(
            "families",
            &[
                family("family", KEYS),
                family("idle", BY_ITSELF),
                family("few", few.leak()),
                family("large", LARGE),
            ],
        )
    });
    Daemon::start(&copy_home(home, &format!("families-{label}")), &DaemonOptions::default())
}

fn command(daemon: &Daemon, arguments: &[&str]) -> Outcome {
    run(thaw().env("THAW_HOME", daemon.home()).args(arguments))
}

#[track_caller]
fn said(daemon: &Daemon, function: &str, path: &str) -> Value {
    let response = get(daemon.gateway(), function, path);
    assert_eq!(response.status, 200, "{}\n{}", response.text(), daemon.log());
    serde_json::from_str(&response.text()).expect("JSON")
}

/// What one instance says.
#[track_caller]
fn said_by(daemon: &Daemon, instance: u64, path: &str) -> Value {
    said_by_one_of(daemon, "family", instance, path)
}

#[track_caller]
fn said_by_one_of(daemon: &Daemon, function: &str, instance: u64, path: &str) -> Value {
    let instance = instance.to_string();
    let arguments = ["invoke", function, "--instance", &instance, "--path", path];
    serde_json::from_str(&command(daemon, &arguments).success()).expect("JSON")
}

/// What each process has of one kind of memory.
fn of_each(said: &Value, what: &str) -> Vec<u64> {
    let processes = said.as_array().expect("the processes");
    processes.iter().map(|process| process[what].as_u64().expect("a checksum")).collect()
}

/// All memory, by what it is.
fn memory(said: &Value) -> [Vec<u64>; 4] {
    ["inherited", "own", "shared", "file"].map(|what| of_each(said, what))
}

#[track_caller]
fn wait_for_state(daemon: &Daemon, function: &str, states: &[&str]) {
    wait_until(&format!("{function} is {states:?}"), || {
        states.contains(&&*daemon.instance(function).2)
    });
}

#[track_caller]
fn hibernate(daemon: &Daemon, function: &str) -> Value {
    wait_for_state(daemon, function, &["idle", "woken-up"]);
    let outcome = command(daemon, &["hibernate", function, "--json"]);
    assert_eq!(outcome.code, Some(0), "{}\n{}", outcome.stderr, daemon.log());
    serde_json::from_str(&outcome.stdout).expect("JSON")
}

/// The host processes of a sandbox, the first one first.
fn host_processes(first: u32) -> Vec<u32> {
    std::iter::once(first).chain(children(first).iter().map(|child| child.pid)).collect()
}

/// Bytes of memory that the host processes of a sandbox have for themselves, and of their page
/// tables, and of the file that they share.
fn own_memory(first: u32) -> u64 {
    let field = |pid: u32, file: &str, name: &str| -> u64 {
        let text = fs::read_to_string(format!("/proc/{pid}/{file}")).expect("root may read this");
        let line = text.lines().find(|line| line.starts_with(name)).expect("the field");
        line.split_whitespace().nth(1).expect("a value").parse::<u64>().expect("a number") * 1024
    };
    let of_process =
        |pid| field(pid, "smaps_rollup", "Anonymous:") + field(pid, "status", "VmPTE:");
    let descriptors = fs::read_dir(format!("/proc/{first}/fd")).expect("root may read this");
    let descriptors = descriptors.map(|entry| entry.expect("a descriptor").path());
    let arena = descriptors.into_iter().find(|path| {
        let file = fs::read_link(path).expect("a descriptor");
        file.to_string_lossy().starts_with("/memfd:thaw-arena")
    });
    let shared = fs::metadata(arena.expect("several processes share it")).expect("a file");
    host_processes(first).into_iter().map(of_process).sum::<u64>() + shared.blocks() * 512
}

/// Copies an instance; the number of the copy, and whether a twin was read.
#[track_caller]
fn fork(daemon: &Daemon, instance: u64) -> (u64, bool) {
    let copied = command(daemon, &["fork", &instance.to_string(), "-n", "1", "--json"]).success();
    let copied: Value = serde_json::from_str(&copied).expect("JSON");
    (
        copied["ids"][0].as_u64().expect("a number"),
        copied["twin"].as_bool().expect("a twin or none"),
    )
}

/// Ends an instance.
#[track_caller]
fn end(daemon: &Daemon, function: &str, instance: u64) {
    let instances = daemon.instances(function);
    let found = instances.iter().find(|known| known["id"] == instance).expect("the instance");
    kill(found["pid"].as_u64().expect("a pid") as u32);
    wait_until("it is gone", || {
        !daemon.instances(function).iter().any(|known| known["id"] == instance)
    });
}

#[test]
fn a_server_with_workers_keeps_its_memory_over_hibernations() {
    let daemon = daemon("told");
    said(&daemon, "family", "/grow/8");
    said(&daemon, "family", "/share");
    let before = memory(&said(&daemon, "family", "/"));
    wait_for_state(&daemon, "family", &["idle"]);
    let (_, pid, _) = daemon.instance("family");
    let warm = own_memory(pid);
    assert!(warm > 24 << 20, "{warm}");
    for round in 1..=4 {
        let done = hibernate(&daemon, "family");
        assert!(done["stored"].as_u64().expect("bytes") > 24 << 20, "{done}");
        let left = own_memory(pid);
        assert!(left * 100 < warm * 7, "{left} of {warm}");
        // One worker, and then all.
        assert!(said(&daemon, "family", "/1")["asked"].as_u64() > Some(2 * round));
        if round % 2 == 0 {
            hibernate(&daemon, "family");
        }
        assert_eq!(memory(&said(&daemon, "family", "/")), before, "round {round}");
        wait_for_state(&daemon, "family", &["woken-up"]);
    }
    // What is shared still is, and what was not is not.
    said(&daemon, "family", "/share");
    let after = memory(&said(&daemon, "family", "/"));
    assert_eq!((&after[0], &after[1]), (&before[0], &before[1]));
    for what in 2..4 {
        assert_ne!(after[what], before[what]);
        assert!(after[what].iter().all(|sum| *sum == after[what][0]), "{after:?}");
    }
    assert_eq!(said(&daemon, "family", "/fork"), 7);
}

#[test]
fn one_with_workers_hibernates_by_itself_again_and_again() {
    let daemon = daemon("idle");
    let before = memory(&said(&daemon, "idle", "/"));
    for round in 0..6 {
        wait_for_state(&daemon, "idle", &["hibernated"]);
        match round % 2 {
            0 => assert!(said(&daemon, "idle", "/2")["asked"].is_u64()),
            _ => assert_eq!(memory(&said(&daemon, "idle", "/")), before),
        }
    }
}

#[test]
fn the_end_of_a_worker_s_host_process_ends_a_hibernated_instance() {
    let daemon = daemon("killed");
    for number in 0..4 {
        said(&daemon, "family", "/");
        hibernate(&daemon, "family");
        let processes = host_processes(daemon.instance("family").1);
        assert_eq!(processes.len(), 4);
        kill(processes[number]);
        wait_until("it is gone", || daemon.instances("family").is_empty());
    }
    assert_eq!(of_each(&said(&daemon, "family", "/"), "asked").len(), 4);
}

#[test]
fn one_with_workers_falls_asleep_and_is_copied_whatever_it_has_of_its_memory() {
    let daemon = daemon("asleep");
    said(&daemon, "family", "/grow/2");
    said(&daemon, "family", "/share");
    let before = memory(&said(&daemon, "family", "/"));
    for round in 0..3 {
        hibernate(&daemon, "family");
        if round > 0 {
            // Two of the workers are still without.
            said(&daemon, "family", "/0");
        }
        let (id, ..) = daemon.instance("family");
        wait_for_state(&daemon, "family", &["hibernated", "woken-up"]);
        let (copy, had_twin) = fork(&daemon, id);
        assert!(had_twin);
        assert_eq!(memory(&said_by(&daemon, copy, "/")), before);
        end(&daemon, "family", copy);
        wait_for_state(&daemon, "family", &["hibernated", "woken-up", "idle"]);
        let outcome = command(&daemon, &["sleep", "family"]);
        assert_eq!(outcome.code, Some(0), "{}\n{}", outcome.stderr, daemon.log());
        wait_for_state(&daemon, "family", &["asleep"]);
        assert_eq!(memory(&said(&daemon, "family", "/")), before);
        assert_eq!(daemon.instance("family").0, id);
    }
}

#[test]
fn one_with_workers_outlives_its_daemon() {
    if !rustix::process::geteuid().is_root() {
        skip("only a daemon of root's has a monitor");
        return;
    }
    let mut daemon = daemon("outlived");
    let before = memory(&said(&daemon, "family", "/"));
    daemon.wait_until_kept("family");
    hibernate(&daemon, "family");
    let (_, pid, _) = daemon.instance("family");
    daemon.kill_and_await_next();
    wait_until("it is taken over", || daemon.instances("family").len() == 1);
    assert_eq!(memory(&said(&daemon, "family", "/")), before);
    assert_eq!(daemon.instance("family").1, pid);
    hibernate(&daemon, "family");
    assert_eq!(memory(&said(&daemon, "family", "/")), before);
}

/// What workers share and what each has for itself, in a copy of one that is at work.
#[test]
fn copies_of_one_that_is_at_work_are_of_one_moment() {
    let daemon = daemon("moment");
    let before = memory(&said(&daemon, "family", "/"));
    said(&daemon, "family", "/play");
    let (original, ..) = daemon.instance("family");
    let score_of = |instance: u64| -> u64 {
        let workers = said_by(&daemon, instance, "/played");
        let played = of_each(&workers, "played");
        let score = workers[2]["score"].as_array().expect("numbers");
        for (number, played) in played.iter().enumerate() {
            // The last to be asked has the latest of the others.
            let score = score[number].as_u64().expect("a number");
            assert!(*played <= score, "{workers}");
        }
        played.iter().sum()
    };
    for _ in 0..4 {
        let at_fork = score_of(original);
        let (copy, had_twin) = fork(&daemon, original);
        assert!(had_twin);
        for instance in [copy, original] {
            // They count in turn, which a token more or less would end or speed up.
            let first = score_of(instance);
            assert!(first >= at_fork);
            wait_until("it goes on", || score_of(instance) > first);
            let scores = said_by(&daemon, instance, "/played")[0]["score"].clone();
            let scores: Vec<u64> = serde_json::from_value(scores).expect("numbers");
            let spread = scores.iter().max().zip(scores.iter().min());
            assert!(spread.is_some_and(|(most, least)| most - least <= 1), "{scores:?}");
            let same = memory(&said_by(&daemon, instance, "/"));
            assert_eq!((&same[0], &same[1]), (&before[0], &before[1]));
        }
        end(&daemon, "family", copy);
    }
}

/// What a copy says, unless it has ended without all of its memory, as its log says then.
#[track_caller]
fn said_by_copy(daemon: &Daemon, function: &str, copy: u64) -> Option<Value> {
    let number = copy.to_string();
    let said = command(daemon, &["invoke", function, "--instance", &number, "--path", "/"]);
    if said.code == Some(0) {
        return Some(serde_json::from_str(&said.stdout).expect("JSON"));
    }
    wait_until("the copy has ended", || {
        !daemon.instances(function).iter().any(|known| known["id"] == copy)
    });
    let log = || command(daemon, &["logs", function, "--instance", &number]).success();
    let why = "the rest of the memory of this copy has not been copied";
    wait_until("its log says why", || log().contains(why));
    None
}

/// Says when it is dropped that something is over, also if it has failed.
struct Over<'a>(&'a AtomicBool);

impl Drop for Over<'_> {
    fn drop(&mut self) {
        self.0.store(true, Relaxed);
    }
}

/// A copy that was answered for before all of its memory was copied may end with the twin.
#[test]
fn an_instance_survives_the_end_of_any_twin_and_its_copy_is_whole_or_ends() {
    let daemon = daemon("twins");
    said(&daemon, "family", "/grow/20");
    let before = memory(&said(&daemon, "family", "/"));
    let (original, pid, _) = daemon.instance("family");
    let own = host_processes(pid);
    let mut at_rest = 0;
    for number in 0..120 {
        // On a busy machine, twins are often read before they are found.
        if number >= 8 && at_rest > 0 {
            break;
        }
        let is_over = AtomicBool::new(false);
        let (copy, had_twin) = std::thread::scope(|scope| {
            scope.spawn(|| {
                while !is_over.load(Relaxed) {
                    let all = host_processes(pid);
                    let twins: Vec<_> = all.into_iter().filter(|it| !own.contains(it)).collect();
                    if let Some(&twin) = twins.get(number % 4) {
                        kill(twin);
                        return;
                    }
                }
            });
            let _over = Over(&is_over);
            fork(&daemon, original)
        });
        at_rest += usize::from(!had_twin);
        if let Some(said) = said_by_copy(&daemon, "family", copy) {
            assert_eq!(memory(&said), before, "{}", daemon.log());
            end(&daemon, "family", copy);
        } else {
            assert!(had_twin, "it was copied from who rested");
        }
        assert_eq!(memory(&said_by(&daemon, original, "/")), before, "{}", daemon.log());
        wait_until("the twins are gone", || host_processes(pid).len() == 4);
    }
    assert!(at_rest > 0, "no twin was killed before it was read");
    assert_eq!(daemon.instance("family").1, pid);
}

#[test]
fn the_twin_of_a_process_that_has_ended_ends_too() {
    let daemon = daemon("outlives");
    said(&daemon, "family", "/grow/20");
    let (original, pid, _) = daemon.instance("family");
    std::thread::scope(|scope| {
        let copying = scope.spawn(|| fork(&daemon, original));
        wait_until("there are twins", || host_processes(pid).len() > 4 || copying.is_finished());
        assert_eq!(said_by(&daemon, original, "/end/2"), true);
        let (copy, _) = copying.join().expect("a copy");
        assert_eq!(said_by(&daemon, copy, "/0")["asked"], 2);
        end(&daemon, "family", copy);
    });
    wait_until("there are three processes", || host_processes(pid).len() == 3);
    let (copy, had_twin) = fork(&daemon, original);
    assert!(had_twin);
    assert_eq!(said_by(&daemon, copy, "/1")["asked"], 2);
    wait_until("there are three processes", || host_processes(pid).len() == 3);
}

#[test]
fn one_rests_where_twins_would_be_too_many_or_would_share_too_much() {
    let daemon = daemon("rests");
    // There is room for two of four twins.
    let before = memory(&said(&daemon, "few", "/"));
    let (original, pid, _) = daemon.instance("few");
    for _ in 0..3 {
        let (copy, had_twin) = fork(&daemon, original);
        assert!(!had_twin);
        for instance in [copy, original] {
            assert_eq!(memory(&said_by_one_of(&daemon, "few", instance, "/")), before);
        }
        end(&daemon, "few", copy);
        wait_until("what there was of twins is gone", || host_processes(pid).len() == 4);
    }
    // A copy of the files would take longer than a pause may.
    let sum = said(&daemon, "family", "/keep/80");
    let (original, ..) = daemon.instance("family");
    let (copy, had_twin) = fork(&daemon, original);
    assert!(!had_twin);
    for instance in [copy, original] {
        assert_eq!(said_by(&daemon, instance, "/kept"), sum);
    }
}

/// Descriptors of images of copies that a process could write to.
fn writable_images(pid: u32) -> (usize, usize) {
    let (mut all, mut writable) = (0, 0);
    for entry in fs::read_dir(format!("/proc/{pid}/fd")).expect("root may read this").flatten() {
        let Ok(file) = fs::read_link(entry.path()) else { continue };
        if !file.to_string_lossy().starts_with("/memfd:thaw-copy") {
            continue;
        }
        let number = entry.file_name();
        let about = fs::read_to_string(format!("/proc/{pid}/fdinfo/{}", number.display()));
        // It may have been closed just now.
        let Ok(about) = about else { continue };
        let flags = about.lines().find_map(|line| line.strip_prefix("flags:")).expect("flags");
        all += 1;
        // The last octal digit has the access mode (open(2)).
        writable += usize::from(!flags.trim().ends_with('0'));
    }
    (all, writable)
}

/// They are answered for before all processes have their memory, for which the image is written while
/// they run.
#[test]
fn copies_in_quick_succession_have_all_of_their_memory() {
    let daemon = daemon("succession");
    let grown = said(&daemon, "large", "/grow/40");
    assert_eq!(grown.as_array().map(Vec::len), Some(3));
    let before = memory(&said(&daemon, "large", "/"));
    let (original, pid, _) = daemon.instance("large");
    let (mut copies, mut images) = (Vec::new(), 0);
    for _ in 0..3 {
        let (copy, had_twin) = fork(&daemon, original);
        assert!(had_twin);
        let found = daemon.instances("large");
        let found = found.iter().find(|known| known["id"] == copy).expect("the copy");
        let (all, writable) = writable_images(found["pid"].as_u64().expect("a pid") as u32);
        assert_eq!(writable, 0, "of {all}");
        images += all;
        copies.push(copy);
    }
    assert!(images > 0, "no copy was seen with its image");
    let together = command(&daemon, &["fork", &original.to_string(), "-n", "3", "--json"]);
    let together: Value = serde_json::from_str(&together.success()).expect("JSON");
    copies.extend(together["ids"].as_array().expect("copies").iter().filter_map(Value::as_u64));
    // Nothing that the original does meanwhile is in them.
    said_by_one_of(&daemon, "large", original, "/grow/1");
    // One of a copy whose memory may not be there yet.
    copies.push(fork(&daemon, copies[5]).0);
    for copy in &copies {
        assert_eq!(memory(&said_by_one_of(&daemon, "large", *copy, "/")), before, "{copy}");
    }
    assert_eq!(daemon.instances("large").len(), 8);
    wait_until("all twins have ended", || children(pid).len() == 3);
}

#[test]
fn a_copy_outlives_an_original_that_ends_at_once() {
    let daemon = daemon("orphan");
    let sandbox = |arguments: &[&str]| {
        command(&daemon, &[&["sandbox"], arguments].concat()).success();
    };
    let said_by = |name: &str, path: &str| {
        let shown = command(&daemon, &["sandbox", "show", name, "--json"]).success();
        let shown: Value = serde_json::from_str(&shown).expect("JSON");
        said_by_one_of(&daemon, "large", shown["instance"].as_u64().expect("a number"), path)
    };
    sandbox(&["create", "large", "--name", "one"]);
    said_by("one", "/grow/60");
    let before = memory(&said_by("one", "/"));
    let end_itself = "import os; os.kill(1, 9)";
    for (number, (original, copy)) in
        [("one", "two"), ("two", "three"), ("three", "four")].into_iter().enumerate()
    {
        sandbox(&["fork", original, "--name", copy]);
        match number {
            // Its first process is killed by another one.
            1 => {
                command(&daemon, &["exec", original, "--", "python3", "-c", end_itself]);
                wait_until("it has ended", || daemon.instances("large").len() == 1);
            }
            _ => sandbox(&["kill", original]),
        }
        assert_eq!(memory(&said_by(copy, "/")), before, "{copy}");
        wait_until("the original has ended", || daemon.instances("large").len() == 1);
    }
}

#[test]
fn a_copy_ends_if_nobody_copies_the_rest_of_its_memory() {
    let daemon = daemon("rest");
    said(&daemon, "large", "/grow/100");
    let before = memory(&said(&daemon, "large", "/"));
    let (original, pid, _) = daemon.instance("large");
    let mut ended = 0;
    for round in 0..40 {
        if round >= 2 && ended > 0 {
            break;
        }
        let (copy, _) = fork(&daemon, original);
        let helper = state_helper_at_work(pid);
        let worker = helper.and_then(|helper| children(helper).last().cloned());
        if worker.is_none() {
            // It was copied before it was looked for.
            end(&daemon, "large", copy);
            continue;
        }
        kill(worker.expect("just looked").pid);
        if let Some(said) = said_by_copy(&daemon, "large", copy) {
            // The worker was done before it was killed.
            assert_eq!(memory(&said), before);
            end(&daemon, "large", copy);
            continue;
        }
        wait_until("the twins have ended", || children(pid).len() == 3);
        ended += 1;
    }
    assert!(ended > 0, "all copies had their memory before anybody could be killed");
    assert_eq!(memory(&said_by_one_of(&daemon, "large", original, "/")), before);
    let (copy, _) = fork(&daemon, original);
    assert_eq!(memory(&said_by_one_of(&daemon, "large", copy, "/")), before);
}
