//! Programs change the tree of mounts of their sandbox, each in a namespace of its own if it likes.

use std::path::PathBuf;

use thaw_e2e::{
    Daemon, DaemonOptions, Linking, Outcome, compile, home_with_box, ok, pause_until_hibernated,
    run, thaw,
};

/// Runs a program as root of a sandbox that sees the files of the host.
fn as_root(options: &[&str], command: &[&str]) -> Outcome {
    let mut thaw = thaw();
    thaw.args(["run", "--as-root", "--rootfs", "/"]).args(options);
    run(thaw.arg("--").args(command))
}

/// What a script of root's prints there.
#[track_caller]
fn script(text: &str) -> String {
    as_root(&[], &["sh", "-ec", text]).success()
}

#[test]
fn mount_and_umount_do_what_they_do_on_linux() {
    let said = script(
        "mount -t tmpfs none /tmp; mkdir /tmp/a /tmp/b; mount -t tmpfs -o size=1m,mode=700 some /tmp/a; echo text > /tmp/a/file
         mount --bind /tmp/a /tmp/b; cat /tmp/b/file
         findmnt -n -o TARGET,SOURCE,FSTYPE,OPTIONS /tmp/b
         mount -o remount,bind,ro /tmp/b; echo x 2>/dev/null > /tmp/b/file || echo read-only
         umount /tmp/b; ls /tmp/b; umount /tmp/a; ls /tmp/a
         mount -t ext4 /dev/null /tmp/a 2>&1 | grep -o \"unknown filesystem type 'ext4'\"",
    );
    let line = "/tmp/b some   tmpfs  rw,relatime,size=1024k,mode=700";
    let words = |text: &str| text.split_whitespace().map(str::to_owned).collect::<Vec<_>>();
    let lines: Vec<&str> = said.lines().collect();
    assert_eq!(lines[0], "text");
    assert_eq!(words(lines[1]), words(line));
    assert_eq!(lines[2..], ["read-only", "unknown filesystem type 'ext4'"]);
}

#[test]
fn a_namespace_is_left_and_entered() {
    let said = script(
        "mount -t tmpfs none /tmp; mkdir /tmp/m /tmp/go; mkfifo /tmp/go/fifo
         unshare -m sh -c 'mount -t tmpfs inside /tmp/m; touch /tmp/m/file; echo > /tmp/go/fifo; read x < /tmp/go/fifo' &
         read x < /tmp/go/fifo
         echo outside $(ls /tmp/m); echo inside $(nsenter -t $! -m ls /tmp/m)
         test $(readlink /proc/$!/ns/mnt) != $(readlink /proc/self/ns/mnt) && echo another
         echo > /tmp/go/fifo; wait; grep -c inside /proc/self/mounts || true",
    );
    assert_eq!(said, "outside\ninside file\nanother\n0\n");
}

#[test]
fn who_is_not_root_mounts_nothing() {
    let said = script(
        "setpriv --reuid 65534 unshare -m true 2>&1 | grep -o 'Operation not permitted'
         setpriv --reuid 65534 mount -t tmpfs x /mnt 2>&1 | grep -o 'must be superuser' || true
         grep -c /mnt /proc/self/mounts || true",
    );
    assert_eq!(said, "Operation not permitted\nmust be superuser\n0\n");
}

/// bubblewrap makes a root of its own of binds and new file systems, goes there with pivot_root(2),
/// and lets go of the old one.
#[test]
fn bubblewrap_makes_a_sandbox_in_a_sandbox() {
    let inside = "test -z \"$(ls -A /tmp)\"; echo x > /tmp/file; cat /tmp/file
         touch /etc/file 2>/dev/null || echo read-only; echo gone > /dev/null
         ls /dev | tr '\\n' ' '; echo; findmnt -n -o FSTYPE /tmp; findmnt -n -o FSTYPE /proc | tail -1
         readlink /proc/self/cwd; test ! -e /oldroot && test ! -e /newroot && echo complete";
    let command = [
        &["bwrap", "--ro-bind", "/", "/", "--tmpfs", "/tmp", "--dev", "/dev"][..],
        &["--proc", "/proc", "--chdir", "/usr", "sh", "-ec", inside],
    ]
    .concat();
    let said = as_root(&[], &command).success();
    let devices = "core fd full null ptmx pts random shm stderr stdin stdout tty urandom zero ";
    let expected = ["x", "read-only", devices, "tmpfs", "proc", "/usr", "complete"];
    assert_eq!(said.lines().collect::<Vec<_>>(), expected);
    // Only some directories, and a file of which the content is handed over.
    let said = script(
        "echo given > /tmp/given; bwrap --ro-bind /usr /usr --symlink usr/lib64 /lib64 --symlink usr/lib /lib \\
         --symlink usr/bin /bin --file 9 /etc/given --dir /tmp 9< /tmp/given \\
         sh -c 'cat /etc/given; echo /*; exit 3' || echo status $?",
    );
    assert_eq!(said, "given\n/bin /etc /lib /lib64 /tmp /usr\nstatus 3\n");
}

/// A name of a directory of the host is what its files are found by, so none that leads to a mount
/// changes: what is written there would come to the host, and to other files.
#[test]
fn what_leads_to_a_mount_in_a_bound_directory_keeps_its_name() {
    let directory = tempfile::tempdir().expect("a directory");
    let option = format!("--bind={}:/v:rw", directory.path().display());
    let text = "mkdir -p /v/a/b/m /v/t/c; mount -t tmpfs x /v/a/b/m
         for name in a a/b; do mv /v/$name /v/t 2>&1 | grep -o 'busy' || echo moved $name; done
         mv --exchange /v/t /v/a 2>&1 | grep -o 'busy' || mv /v/a /v/u 2>&1 | grep -o busy
         rmdir /v/a/b/m 2>&1 | grep -o busy
         mv /v/t/c /v/a/b/; mv /v/a/b/c /v/t; echo secret > /v/a/b/m/file; umount /v/a/b/m
         mv /v/a/b /v/t/b; rmdir /v/t/b/m; ls /v /v/t";
    let said = as_root(&[&option], &["sh", "-ec", text]).success();
    assert_eq!(said, "busy\nbusy\nbusy\nbusy\n/v:\na\nt\n\n/v/t:\nb\nc\n");
    assert!(!directory.path().join("a/b").exists() && directory.path().join("t/b").exists());
}

/// Whatever a program mounts, the kernel keeps a bounded number, and nothing once it is gone.
#[test]
fn mounts_are_bounded_and_nothing_of_them_is_left() {
    let program: PathBuf = compile("hostile/many_mounts", Linking::Static);
    let program = program.to_str().expect("a path");
    let said = as_root(&["--memory", "256MiB"], &[program]).success();
    let filled = "ENOSPC, then ENOSPC\nleft over: 0\n";
    let again = format!("{filled}as many again: yes\n");
    let large = "a large file: ENOSPC\n".repeat(2);
    let expected = format!(
        "{filled}mounts: within the bound\n{}namespaces: each ended with the next\n{again}\
         deep mounts are listed: yes\n{large}{again}",
        again.repeat(3)
    );
    assert_eq!(said, expected);
}

#[test]
fn mounts_are_part_of_what_is_frozen() {
    let programs = ["sh", "cat", "mount", "umount", "mkdir"];
    let home = home_with_box("mounts", &[], &programs, "");
    let _daemon = Daemon::start(&home, &DaemonOptions::default());
    let sh = |sandbox: &str, text: &str| {
        ok(&home, &["exec", sandbox, "--user", "0", "--", "sh", "-ec", text])
    };
    ok(&home, &["sandbox", "create", "box", "--name", "one"]);
    sh(
        "one",
        "mkdir /m /n; mount -t tmpfs -o size=1m x /m; echo before > /m/file
         mount --bind /m /n; mount -o remount,bind,ro /n",
    );
    ok(&home, &["sandbox", "fork", "one", "--name", "copy"]);
    ok(&home, &["sandbox", "checkpoint", "one", "point"]);
    ok(&home, &["sandbox", "create", "--checkpoint", "point", "--name", "again"]);
    pause_until_hibernated(&home, "one");
    for sandbox in ["copy", "again", "one"] {
        let said = sh(
            sandbox,
            "cat /n/file; echo x 2>/dev/null > /n/file || echo read-only; echo $HOSTNAME > /m/file
             umount /n; mount -o remount,size=2m /m; umount /m; cat /m/file 2>/dev/null || echo gone",
        );
        assert_eq!(said, "before\nread-only\ngone\n", "{sandbox}");
    }
}
