//! Sandboxes come to rest for a pause, a copy or a checkpoint whatever their programs do just then.

use std::fs;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};
use std::time::{Duration, Instant};
use thaw_e2e::{
    Daemon, DaemonOptions, call, home_with_box, ok, pause_until_hibernated, wait_until,
};

fn home(label: &str) -> PathBuf {
    home_with_box(label, &[], &["sh", "cat", "sleep", "true"], "")
}

/// sh makes each by vfork(2) and execve(2).
#[test]
fn a_sandbox_that_makes_processes_all_the_time_is_paused_and_copied_and_goes_on() {
    let home = home("exec-pause-processes");
    let _daemon = Daemon::start(&home, &DaemonOptions::default());
    ok(&home, &["sandbox", "create", "box", "--name", "busy"]);
    for number in ["1", "2", "3"] {
        let count = "while true; do echo . >> /tmp/$0; sleep 0.01; done";
        ok(&home, &["exec", "-d", "busy", "--", "sh", "-c", count, number]);
    }
    let counted =
        |name: &str| ok(&home, &["exec", name, "--", "cat", "/tmp/1", "/tmp/2", "/tmp/3"]).len();
    for round in 0..20 {
        let before = counted("busy");
        pause_until_hibernated(&home, "busy");
        assert!(counted("busy") >= before);
        if round % 5 == 0 {
            ok(&home, &["sandbox", "fork", "busy", "--name", "copy"]);
            assert!(counted("copy") >= before);
            ok(&home, &["sandbox", "kill", "copy"]);
        }
    }
}

/// A thread that looks at the host beside itself, again and again, is the one that hears of a copy.
#[test]
fn a_sandbox_whose_program_polls_without_a_pause_is_copied() {
    let home = home("rest-polls");
    let _daemon = Daemon::start(&home, &DaemonOptions::default());
    ok(&home, &["sandbox", "create", "box", "--name", "polls"]);
    let poll = "import select\nwhile True: select.select([], [], [], 0)";
    ok(&home, &["exec", "-d", "polls", "--", "python3", "-c", poll]);
    for name in ["first", "second", "third"] {
        ok(&home, &["sandbox", "fork", "polls", "--name", name]);
        assert_eq!(ok(&home, &["exec", name, "--", "sh", "-c", "echo lives"]), "lives\n");
    }
    assert_eq!(ok(&home, &["exec", "polls", "--", "sh", "-c", "echo lives"]), "lives\n");
}

/// Processes (the shell has a `true` of its own) that are killed while another host process is about to have them (execve(2) after
/// vfork(2)).
const KILLED: &str = "
import os, signal, subprocess, time
for number in range(150):
    shell = subprocess.Popen(['sh', '-c', 'while :; do /usr/bin/true; done'], start_new_session=True)
    time.sleep(0.002 * (number % 9 + 1))
    os.killpg(shell.pid, signal.SIGKILL)
    shell.wait()
print('done')
";

#[test]
fn processes_may_be_killed_at_any_moment() {
    let home = home("rest-killed");
    let _daemon = Daemon::start(&home, &DaemonOptions::default());
    ok(&home, &["sandbox", "create", "box", "--name", "kills"]);
    assert_eq!(ok(&home, &["exec", "kills", "--", "python3", "-c", KILLED]), "done\n");
    assert_eq!(ok(&home, &["exec", "kills", "--", "sh", "-c", "echo lives"]), "lives\n");
}

/// Pages of a process that are in memory (statm of proc(5)).
fn resident(pid: u32) -> u64 {
    let statm = fs::read_to_string(format!("/proc/{pid}/statm")).unwrap_or_default();
    statm.split(' ').nth(1).and_then(|pages| pages.parse().ok()).unwrap_or(0)
}

/// The sandbox says that it has given up its memory to nobody but the next daemon, which has not
/// told it to.
#[test]
fn a_daemon_that_is_killed_while_a_sandbox_gives_up_its_memory_leaves_it() {
    let home = home("rest-killed-daemon");
    let mut daemon = Daemon::start(&home, &DaemonOptions::default());
    ok(&home, &["sandbox", "create", "box", "--name", "one"]);
    let holds = "import os, time\nheld = os.urandom(1 << 20)\ntime.sleep(1000)";
    for _ in 0..6 {
        ok(&home, &["exec", "-d", "one", "--", "python3", "-c", holds]);
    }
    let all = || -> Vec<u32> {
        daemon.sandboxes().iter().map(|one| one.pid).filter(|&pid| resident(pid) > 700).collect()
    };
    wait_until("they hold their memory", || all().len() >= 6);
    let all = all();
    for _ in 0..2 {
        daemon.wait_until_kept("box");
        let before: Vec<u64> = all.iter().map(|&pid| resident(pid)).collect();
        ok(&home, &["sandbox", "pause", "one"]);
        let deadline = Instant::now() + Duration::from_secs(60);
        while all.iter().zip(&before).all(|(&pid, &before)| resident(pid) > before * 7 / 10) {
            assert!(Instant::now() < deadline, "it never gives up its memory");
        }
        daemon.kill_and_await_next();
        assert_eq!(ok(&home, &["exec", "one", "--", "sh", "-c", "echo lives"]), "lives\n");
    }
}

/// A process that is wanted while the sandbox is on its way to sleep runs in it, or wakes it.
#[test]
fn processes_are_started_while_a_sandbox_falls_asleep() {
    let home = home("rest-sleep-exec");
    let daemon = Daemon::start(&home, &DaemonOptions::default());
    ok(&home, &["sandbox", "create", "box", "--name", "one"]);
    let start = "for number in 1 2 3; do sleep 1000 </dev/null >/dev/null 2>&1 & done";
    ok(&home, &["exec", "one", "--", "sh", "-c", start]);
    let instance = daemon.first_instance("box")["id"].to_string();
    let slept = AtomicU32::new(0);
    std::thread::scope(|scope| {
        let (stop, stopped) = std::sync::mpsc::channel::<()>();
        let sleep = || call(&home, &["sleep", "box", "--instance", &instance]).code == Some(0);
        let counted = &slept;
        let sleeper = scope.spawn(move || {
            while stopped.try_recv() == Err(std::sync::mpsc::TryRecvError::Empty) {
                counted.fetch_add(u32::from(sleep()), Relaxed);
            }
        });
        // Longer where those who start processes leave it no moment.
        for round in 0..600 {
            if round >= 60 && slept.load(Relaxed) > 0 {
                break;
            }
            let echo = format!("echo {round}");
            let printed = call(&home, &["exec", "one", "--", "sh", "-c", &echo]);
            assert_eq!(printed.success(), format!("{round}\n"));
        }
        drop(stop);
        sleeper.join().expect("it has not panicked");
    });
    assert!(slept.load(Relaxed) > 0, "it never slept");
}

/// A sandbox that is told to end while it wakes from sleep does not sleep on.
#[test]
fn a_sandbox_that_is_killed_while_it_wakes_is_gone() {
    let home = home("rest-killed-waking");
    let daemon = Daemon::start(&home, &DaemonOptions::default());
    let fill = "import os\nfile = open('/large', 'wb')\n\
                for _ in range(100): file.write(os.urandom(1 << 20))";
    for wait_ms in [5, 20, 60, 120, 200] {
        ok(&home, &["sandbox", "create", "box", "--name", "one"]);
        ok(&home, &["exec", "one", "--", "python3", "-c", fill]);
        let instance = daemon.first_instance("box")["id"].to_string();
        wait_until("it sleeps", || {
            call(&home, &["sleep", "box", "--instance", &instance]).code == Some(0)
        });
        std::thread::scope(|scope| {
            scope.spawn(|| call(&home, &["sandbox", "resume", "one"]));
            std::thread::sleep(Duration::from_millis(wait_ms));
            ok(&home, &["sandbox", "kill", "one"]);
        });
        wait_until("nothing is left of it", || daemon.instances("box").is_empty());
        let left = || fs::read_dir(home.join("asleep")).map_or(0, Iterator::count);
        wait_until(&format!("no file is left, after {wait_ms} ms"), || left() == 0);
    }
}
