//! How much sandboxes may use, which changes while they run.

use serde_json::Value;
use std::fs;
use std::path::{Path, PathBuf};
use thaw_e2e::{
    Daemon, DaemonOptions, built_home, call, has_controller, limit_of, memory_limit_of, ok,
    pause_until_hibernated, run, skip, thaw, wait_until,
};

const MIB: u64 = 1 << 20;

/// A home with a function without a program, whose sandboxes begin with 128 MiB and one processor.
fn home(label: &str) -> PathBuf {
    let home = built_home(label, &[]);
    let directory = home.with_extension("box");
    fs::create_dir_all(&directory).unwrap();
    let text = "name = \"box\"\nisolation = \"instance\"\npersist = true\n[entry]\n\
                kind = \"sandbox\"\n[runtime]\nkind = \"python3\"\nprograms = [\"bash\", \"sh\", \
                \"cat\"]\n[limits]\ninstances = 50\nmemory = \"128MiB\"\nmemory_max = \"512MiB\"\n\
                cpu_max = 2\n";
    fs::write(directory.join("thaw.toml"), text).unwrap();
    run(thaw().arg("build").arg(&directory).env("THAW_HOME", &home)).success();
    home
}

/// Memory in MiB and processors, as `thaw sandbox limits --json` says.
fn limits(home: &Path, arguments: &[&str]) -> (u64, u64) {
    let said = ok(home, &[&["sandbox", "limits", "--json"], arguments].concat());
    let said: Value = serde_json::from_str(&said).expect("JSON");
    let number = |name: &str| said[name].as_u64().expect("a number");
    (number("memory_bytes") / MIB, number("cpus"))
}

fn refusal(home: &Path, arguments: &[&str]) -> String {
    let outcome = call(home, &[&["sandbox", "limits"], arguments].concat());
    assert_eq!(outcome.code, Some(1), "{outcome:?}");
    outcome.stderr
}

/// Whether a program in a sandbox can have so many MiB at a time.
fn can_have(home: &Path, sandbox: &str, mib: u64) -> bool {
    let program = format!(
        "kept = [bytearray(1 << 20) for _ in range({mib})]\n\
         for one in kept:\n\u{20} one[::4096] = b'x' * 256\nprint('had it')\n"
    );
    let outcome = call(home, &["exec", sandbox, "--", "python3", "-c", &program]);
    outcome.stdout == "had it\n"
}

/// MiB of memory, and processors, as programs in a sandbox see them.
fn seen(home: &Path, sandbox: &str) -> (u64, u64) {
    let program = "import os\nprint(open('/proc/meminfo').readline().split()[1], os.cpu_count())";
    let printed = ok(home, &["exec", sandbox, "--", "python3", "-c", program]);
    let numbers = printed.split_whitespace().map(|number| number.parse::<u64>().expect("a number"));
    let numbers: Vec<u64> = numbers.collect();
    (numbers[0] >> 10, numbers[1])
}

fn instance(home: &Path, sandbox: &str) -> Value {
    let shown = ok(home, &["sandbox", "show", sandbox, "--json"]);
    serde_json::from_str::<Value>(&shown).expect("JSON")["instance"].take()
}

fn pid(daemon: &Daemon, home: &Path, sandbox: &str) -> u64 {
    let id = instance(home, sandbox);
    let all = daemon.instances("box");
    let found = all.iter().find(|one| one["id"] == id).expect("it lives");
    found["pid"].as_u64().expect("a number")
}

/// What the control groups of a process say: MiB of memory, and processors.
fn in_force(pid: u64) -> (u64, u64) {
    let pid = pid.try_into().expect("a number");
    let cpu = limit_of(pid, "cpu", "cpu.cfs_quota_us", "cpu.max").expect("a limit");
    (memory_limit_of(pid).expect("a limit") / MIB, cpu / 100_000)
}

fn processors() -> usize {
    std::thread::available_parallelism().expect("a number").get()
}

fn has_groups() -> bool {
    let has = has_controller("memory") && has_controller("cpu");
    if !has {
        skip("this host has no control groups for memory and processors");
    }
    has
}

#[test]
fn the_limits_of_a_sandbox_change_while_it_runs() {
    if !has_groups() {
        return;
    }
    let home = home("sandbox-limits");
    fs::write(home.join("tenants.toml"), "[default]\nmemory = \"600MiB\"\n").unwrap();
    let daemon = Daemon::start(&home, &DaemonOptions::default());
    ok(&home, &["sandbox", "create", "box", "--name", "one"]);
    assert_eq!(limits(&home, &["one"]), (128, 1));
    let said = ok(&home, &["sandbox", "limits", "one"]);
    let has = said.strip_prefix("memory 128MiB, up to 512MiB; it has ");
    assert!(
        has.is_some_and(
            |rest| rest.ends_with(&format!("\ncpus 1, up to {}\n", 2.min(processors())))
        ),
        "{said}"
    );
    let pid = pid(&daemon, &home, "one");
    assert_eq!(in_force(pid), (128, 1));
    assert!(!can_have(&home, "one", 200), "it has 128 MiB");
    ok(&home, &["sandbox", "kill", "one"]);
    wait_until("it has ended", || daemon.instances("box").is_empty());

    ok(&home, &["sandbox", "create", "box", "--name", "two"]);
    let pid = self::pid(&daemon, &home, "two");
    assert_eq!(limits(&home, &["two", "--memory", "384MiB", "--cpus", "2"]), (384, 2));
    assert_eq!(in_force(pid), (384, 2));
    assert!(can_have(&home, "two", 250));
    // In one piece, too.
    let large = "print(len(bytearray(300 << 20)) >> 20)";
    assert_eq!(ok(&home, &["exec", "two", "--", "python3", "-c", large]), "300\n");
    assert_eq!(seen(&home, "two"), (384, 2));
    // The quota follows: there is room for one of 128 MiB, and for no other.
    ok(&home, &["sandbox", "create", "box", "--name", "three"]);
    let full = call(&home, &["sandbox", "create", "box", "--name", "four"]);
    assert!(full.stderr.contains("no room for one more instance"), "{full:?}");
    let refused = refusal(&home, &["three", "--memory", "256MiB"]);
    assert!(refused.contains("600MiB") && refused.contains("256MiB"), "{refused}");
    let refused = refusal(&home, &["two", "--memory", "513MiB"]);
    assert!(refused.contains("512MiB") && refused.contains("memory_max"), "{refused}");
    let refused = refusal(&home, &["two", "--cpus", "3"]);
    assert!(refused.contains("cpu_max"), "{refused}");

    // What it uses is not taken from it. Files are memory.
    ok(
        &home,
        &["exec", "two", "--", "python3", "-c", "open('/big', 'wb').write(b'x' * (64 << 20))"],
    );
    let refused = refusal(&home, &["two", "--memory", "48MiB"]);
    assert!(refused.contains("and was to have 48MiB"), "{refused}");
    // Both say how much it has.
    for verb in ["show", "limits"] {
        let said = ok(&home, &["sandbox", verb, "two", "--json"]);
        let said: Value = serde_json::from_str(&said).expect("JSON");
        let has = match verb {
            "show" => &said["usage"]["memory_bytes"],
            _ => &said["memory_used_bytes"],
        };
        let mib = has.as_u64().expect("it is counted") / MIB;
        assert!((64..128).contains(&mib), "{verb}: {said}");
    }
    assert_eq!((limits(&home, &["two"]), in_force(pid)), ((384, 2), (384, 2)));
    assert_eq!(limits(&home, &["two", "--memory", "160MiB", "--cpus", "1"]), (160, 1));
    assert_eq!((in_force(pid), seen(&home, "two")), ((160, 1), (160, 1)));
    assert_eq!(limits(&home, &["three", "--memory", "256MiB"]), (256, 1));
    let shown: Value =
        serde_json::from_str(&ok(&home, &["sandbox", "show", "three", "--json"])).expect("JSON");
    assert_eq!(shown["usage"]["memory_max_bytes"], 256 * MIB);
}

#[test]
fn copies_pauses_sleep_and_the_next_daemon_keep_the_limits() {
    if !has_groups() {
        return;
    }
    let home = home("sandbox-limits-kept");
    let mut daemon = Daemon::start(&home, &DaemonOptions::default());
    ok(&home, &["sandbox", "create", "box", "--name", "one"]);
    assert_eq!(limits(&home, &["one", "--memory", "320MiB", "--cpus", "2"]), (320, 2));
    // More than its function's limit is in use from here on. Nobody outside waits for the program.
    const KEEP: &str = "python3 -c '\nimport os, time\n\
        kept = [os.urandom(1 << 20) for _ in range(180)]\n\
        open(\"/ready\", \"w\").write(str(os.getpid()))\ntime.sleep(100000)\n\
        ' > /dev/null 2>&1 < /dev/null &";
    ok(&home, &["exec", "one", "--", "sh", "-c", KEEP]);
    wait_until("it has the memory", || {
        call(&home, &["exec", "one", "--", "cat", "/ready"]).code == Some(0)
    });
    let expect = |daemon: &Daemon, name: &str| {
        let lives = "kill -0 $(cat /ready) && echo alive";
        assert_eq!(ok(&home, &["exec", name, "--", "sh", "-c", lives]), "alive\n", "{name}");
        assert_eq!(limits(&home, &[name]), (320, 2), "{name}");
        assert_eq!(in_force(pid(daemon, &home, name)), (320, 2), "{name}");
        assert_eq!(seen(&home, name), (320, 2), "{name}");
    };
    expect(&daemon, "one");
    // One that is paused hears of it when it goes on.
    pause_until_hibernated(&home, "one");
    assert_eq!(limits(&home, &["one", "--memory", "352MiB", "--cpus", "1"]), (352, 1));
    assert_eq!(seen(&home, "one"), (352, 1));
    assert_eq!(limits(&home, &["one", "--memory", "320MiB", "--cpus", "2"]), (320, 2));
    ok(&home, &["sandbox", "fork", "one", "--name", "copy"]);
    expect(&daemon, "copy");
    ok(&home, &["sandbox", "pause", "one"]);
    // What is in its swap file comes back.
    let refused = refusal(&home, &["one", "--memory", "128MiB"]);
    assert!(refused.contains("and was to have 128MiB"), "{refused}");
    expect(&daemon, "one");
    ok(&home, &["sleep", "box", "--instance", &instance(&home, "one").to_string()]);
    expect(&daemon, "one");
    ok(&home, &["sleep", "box", "--instance", &instance(&home, "copy").to_string()]);

    daemon.wait_until_kept("box");
    daemon.kill_and_await_next();
    expect(&daemon, "one");
    // It has slept since before this daemon.
    expect(&daemon, "copy");
    assert_eq!(limits(&home, &["copy", "--cpus", "1"]), (320, 1));
    expect(&daemon, "one");
}

/// Takes so many MiB, one after the other.
fn take(mib: u64) -> String {
    format!("kept = [b'x' * (1 << 20) for _ in range({mib})]\nprint('had it')")
}

#[test]
fn one_process_is_ended_when_the_memory_of_a_sandbox_is_used_up() {
    if !has_groups() {
        return;
    }
    let home = home("sandbox-oom");
    let daemon = Daemon::start(&home, &DaemonOptions::default());
    ok(&home, &["sandbox", "create", "box", "--name", "one"]);
    let run = |program: &str| call(&home, &["exec", "one", "--", "python3", "-c", program]);
    let pid = self::pid(&daemon, &home, "one");
    ok(&home, &["exec", "one", "--", "sh", "-c", "echo mine > /tmp/file; sleep 1000 & echo"]);
    for round in 0..8 {
        let outcome = run(&take(200));
        assert_eq!(outcome.code, Some(137), "round {round}: {outcome:?}");
        // As much as there is room for is no reason.
        assert_eq!(run(&take(80)).stdout, "had it\n", "round {round}");
    }
    // Several at once, each of which alone would be too much, and somebody who is not to blame.
    let several = format!(
        "import subprocess, sys\nall = [subprocess.Popen([sys.executable, '-c', {:?}]) for _ in range(3)]\n\
         print([one.wait() for one in all])",
        take(200)
    );
    assert_eq!(run(&several).stdout, "[-9, -9, -9]\n");
    // The one with more memory is spared if it asks for it.
    let spared = format!(
        "import os, subprocess, sys\nkept = b'x' * (70 << 20)\n\
         open('/proc/self/oom_score_adj', 'w').write('-1000')\n\
         code = \"open('/proc/self/oom_score_adj', 'w').write('0')\\n\" + {:?}\n\
         print(subprocess.call([sys.executable, '-c', code]))",
        take(200)
    );
    assert_eq!(run(&spared).stdout, "-9\n");
    // All the rest is as before.
    assert_eq!(ok(&home, &["exec", "one", "--", "cat", "/tmp/file"]), "mine\n");
    assert_eq!(self::pid(&daemon, &home, "one"), pid);
    let events = ok(&home, &["exec", "one", "--", "cat", "/sys/fs/cgroup/memory.events"]);
    let kills = events.lines().find_map(|line| line.strip_prefix("oom_kill ")).expect("a count");
    assert_eq!(kills, "12");
    let log = ok(&home, &["logs", "box"]);
    assert!(
        log.contains("since the sandbox had used up its memory; raise `limits.memory`"),
        "{log}"
    );
    let counted = "thaw_oom_kills_total{function=\"box\"} 12";
    wait_until("they are counted", || daemon.admin("/metrics").text().contains(counted));
}
