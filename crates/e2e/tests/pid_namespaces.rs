//! Programs run in PID namespaces of their sandbox, as on Linux.

use thaw_e2e::{
    Daemon, DaemonOptions, Outcome, home_with_box, ok, pause_until_hibernated, run, thaw,
};

/// Runs a program as root of a sandbox that sees the files of the host.
fn as_root(command: &[&str]) -> Outcome {
    let mut thaw = thaw();
    thaw.args(["run", "--as-root", "--rootfs", "/", "--"]);
    run(thaw.args(command))
}

/// What a script of root's prints there.
#[track_caller]
fn script(text: &str) -> String {
    as_root(&["sh", "-ec", text]).success()
}

/// Words of each line.
fn words(text: &str) -> Vec<Vec<&str>> {
    text.lines().map(|line| line.split_whitespace().collect()).collect()
}

#[test]
fn unshare_and_ps_see_the_processes_of_the_namespace() {
    let said =
        as_root(&["unshare", "--fork", "--pid", "--mount-proc", "ps", "-A", "-o", "pid,comm"]);
    assert_eq!(words(&said.success()), [["PID", "COMMAND"], ["1", "ps"]]);
    let said = script(
        "unshare --fork --pid --mount-proc sh -c 'sleep 100 & ps -A -o pid,ppid,comm; ls -d /proc/[0-9]* | wc -l; kill $!'
         ls -d /proc/[0-9]* | wc -l | grep -q '^[1-9]'",
    );
    let expected = [
        &["PID", "PPID", "COMMAND"][..],
        &["1", "0", "sh"],
        &["2", "1", "sleep"],
        &["3", "1", "ps"],
    ];
    assert_eq!(words(&said)[..4], expected);
}

#[test]
fn a_process_has_a_number_on_each_level() {
    let said = script(
        "unshare --fork --pid --mount-proc unshare --fork --pid sh -c 'grep NSpid /proc/2/status; echo $$'
         unshare --fork --pid sh -c 'readlink /proc/self || echo none; test $$ = 1'
         unshare --fork --pid --mount-proc readlink /proc/self /proc/thread-self",
    );
    // The `/proc` of the sandbox shows who runs in it under its own numbers.
    let lines: Vec<&str> = said.lines().collect();
    assert_eq!(lines[..2], ["NSpid:\t2\t1", "1"]);
    assert!(lines[2].parse::<u32>().is_ok_and(|number| number > 1), "{said}");
    assert_eq!(lines[3..], ["1", "1/task/1"]);
}

#[test]
fn nsenter_goes_into_a_namespace() {
    let said = script(
        "mount -t tmpfs none /tmp; mkfifo /tmp/fifo
         unshare --fork --pid --mount-proc sh -c 'echo > /tmp/fifo; read x < /tmp/fifo; exit 7' &
         read x < /tmp/fifo
         child=$(cat /proc/$!/task/$!/children); child=${child% }
         nsenter -t $child -p -m ps -A -o pid,ppid,comm | tail -n 1
         test $(readlink /proc/$child/ns/pid) = $(readlink /proc/$!/ns/pid_for_children) && echo the same
         test $(readlink /proc/$child/ns/pid) != $(readlink /proc/self/ns/pid) && echo another
         echo > /tmp/fifo; wait $! || echo status $?",
    );
    let lines: Vec<&str> = said.lines().collect();
    assert_eq!(words(lines[0]), [["2", "0", "ps"]]);
    assert_eq!(lines[1..], ["the same", "another", "status 7"]);
}

/// As tools run the commands of an agent.
#[test]
fn bubblewrap_shows_a_command_only_its_own_processes() {
    let said = as_root(&[
        "bwrap",
        "--new-session",
        "--die-with-parent",
        "--unshare-pid",
        "--dev",
        "/dev",
        "--proc",
        "/proc",
        "--ro-bind",
        "/usr",
        "/usr",
        "--symlink",
        "usr/bin",
        "/bin",
        "--symlink",
        "usr/lib",
        "/lib",
        "--symlink",
        "usr/lib64",
        "/lib64",
        "sh",
        "-c",
        "echo $$; ps -A -o pid,comm; exit 3",
    ]);
    assert_eq!(said.code, Some(3), "{}", said.stderr);
    let expected = [&["2"][..], &["PID", "COMMAND"], &["1", "bwrap"], &["2", "sh"], &["3", "ps"]];
    assert_eq!(words(&said.stdout), expected);
}

#[test]
fn the_end_of_init_ends_all() {
    let said = script(
        "unshare --fork --pid --kill-child sh -c 'sleep 1000 & setsid sleep 1000 & exit 5' || echo status $?
         ps -A -o comm | grep -c sleep || true",
    );
    assert_eq!(said, "status 5\n0\n");
}

#[test]
fn who_is_not_root_makes_none() {
    let said =
        script("setpriv --reuid 65534 unshare --pid true 2>&1 | grep -o 'Operation not permitted'");
    assert_eq!(said, "Operation not permitted\n");
}

#[test]
fn namespaces_are_part_of_what_is_frozen() {
    let home = home_with_box(
        "pid_namespaces",
        &[],
        &["sh", "cat", "mount", "unshare", "sleep", "kill"],
        "",
    );
    let _daemon = Daemon::start(&home, &DaemonOptions::default());
    let sh = |sandbox: &str, text: &str| {
        ok(&home, &["exec", sandbox, "--user", "0", "--", "sh", "-ec", text])
    };
    ok(&home, &["sandbox", "create", "box", "--name", "one"]);
    sh(
        "one",
        "unshare --fork --pid --mount-proc sh -c 'sleep 1000 & echo > /begun; while :; do test -e /ask && break; sleep 0.1; done
           read -r name pids < /proc/2/comm; echo $name > /answer; sleep 1000' < /dev/null > /dev/null 2>&1 &
         while ! test -e /begun; do sleep 0.1; done",
    );
    ok(&home, &["sandbox", "fork", "one", "--name", "copy"]);
    pause_until_hibernated(&home, "one");
    for sandbox in ["copy", "one"] {
        let said =
            sh(sandbox, "echo > /ask; while ! test -s /answer; do sleep 0.1; done; cat /answer");
        assert_eq!(said, "sleep\n", "{sandbox}");
    }
}
