//! Directories of the host are served by a process for each sandbox, which has no more rights
//! than the files take.

use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::fs::{FileExt, symlink};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};
use thaw_e2e::{Process, descendants, descriptors, exists, kill, run, skip, thaw, wait_until};

/// A sandbox that waits for the end of its input, with these arguments of `thaw run`.
struct Waiting {
    run: Child,
    server: u32,
}

fn start(arguments: &[&str]) -> Waiting {
    start_program(arguments, &["cat", "/etc/hostname", "-"])
}

fn start_program(arguments: &[&str], program: &[&str]) -> Waiting {
    let mut command = thaw();
    command.args(["run", "--weak-limits"]).args(arguments).arg("--").args(program);
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let run = command.spawn().expect("thaw runs");
    let find = || descendants(run.id()).into_iter().find(is_server);
    wait_until("files are served", || find().is_some_and(|server| has_filter(server.pid)));
    let server = find().expect("it is there").pid;
    Waiting { run, server }
}

fn is_server(process: &Process) -> bool {
    process.name == "thaw-files"
}

fn has_filter(pid: u32) -> bool {
    status(pid, "Seccomp") == ["2"]
}

/// The letter of a process or thread with this name in `/proc`.
fn state_of(name: &str) -> String {
    field_of(name, "State").first().cloned().unwrap_or_default()
}

/// A field of `/proc/PID/status`.
fn status(pid: u32, field: &str) -> Vec<String> {
    field_of(&pid.to_string(), field)
}

fn field_of(name: &str, field: &str) -> Vec<String> {
    let text = fs::read_to_string(format!("/proc/{name}/status")).unwrap_or_default();
    let line = text.lines().find_map(|line| line.strip_prefix(&format!("{field}:")));
    line.unwrap_or_default().split_whitespace().map(str::to_owned).collect()
}

impl Drop for Waiting {
    fn drop(&mut self) {
        let _ = self.run.kill();
        let _ = self.run.wait();
    }
}

#[test]
fn it_has_the_rights_under_which_files_are_served() {
    let is_root = rustix::process::geteuid().is_root();
    let waiting = start(&["--rootfs", "/"]);
    let pid = waiting.server;
    for field in ["CapInh", "CapPrm", "CapEff", "CapAmb"] {
        assert_eq!(status(pid, field), ["0000000000000000"], "{field}");
    }
    assert_eq!(status(pid, "NoNewPrivs"), ["1"]);
    if is_root {
        // The last is what files are opened with.
        assert_eq!(status(pid, "Uid"), ["0", "0", "0", "65534"]);
        assert_eq!(status(pid, "Gid"), ["0", "0", "0", "65534"]);
        assert_eq!(status(pid, "Groups"), [""; 0]);
    }
    // Standard streams, its caller, both sockets of the sandbox and the list of mounts; the directory,
    // and those of the last path. For a moment a file that the program's start asks for.
    wait_until("it holds seven descriptors, three of them sockets, and directories", || {
        let all = descriptors(pid);
        let sockets = all.values().filter(|file| file.target.starts_with("socket:")).count();
        let directories = all.values().filter(|file| Path::new(&file.target).is_dir()).count();
        (1..=9).contains(&directories) && (all.len() - directories, sockets) == (7, 3)
    });
    drop(waiting);
    wait_until("it ends with its caller", || !exists(pid));
}

#[test]
fn as_root_it_has_what_files_take() {
    if !rustix::process::geteuid().is_root() {
        skip("--as-root is about root");
        return;
    }
    let waiting = start(&["--as-root", "--rootfs", "/"]);
    // CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH, CAP_FOWNER and CAP_FSETID.
    for field in ["CapPrm", "CapEff"] {
        assert_eq!(status(waiting.server, field), ["000000000000001e"], "{field}");
    }
    assert_eq!(status(waiting.server, "CapInh"), ["0000000000000000"]);
}

#[test]
fn each_sandbox_has_its_own_which_ends_with_it() {
    let (one, other) = (start(&["--rootfs", "/"]), start(&["--rootfs", "/"]));
    assert_ne!(one.server, other.server);
    let of_one = one.server;
    drop(one);
    wait_until("that of one has ended", || !exists(of_one));
    assert!(has_filter(other.server));
}

/// A sandbox does not wait for answers that nobody gives.
#[test]
fn a_sandbox_whose_files_nobody_serves_is_ended() {
    let mut waiting = start(&["--rootfs", "/"]);
    // Kept open: `wait` closes it otherwise, and the program may end by itself first.
    let _input = waiting.run.stdin.take();
    kill(waiting.server);
    let status = waiting.run.wait().expect("it ends");
    assert_eq!(status.code(), Some(1));
    let mut said = String::new();
    let mut stderr = waiting.run.stderr.take().expect("a pipe");
    stderr.read_to_string(&mut said).expect("text");
    assert!(said.contains("the process that serves files of this host to it has ended"), "{said}");
}

/// Not even while the host has not noticed yet: the program would go on as if its files were broken.
#[test]
fn a_program_whose_files_nobody_serves_does_not_go_on() {
    let home = tempfile::tempdir().expect("a directory");
    let bind = format!("{}:/shared:rw", home.path().display());
    // Nearly always a request is being served.
    let program = "
import os
file = os.open('/shared/file', os.O_WRONLY | os.O_CREAT)
try:
    while True:
        os.pwrite(file, b'.', 0)
        os.fsync(file)
except OSError: print('goes on', flush=True)
";
    let arguments = ["--as-root", "--rootfs", "/", "--bind", &bind];
    // At times the request has not been read, and then the host ends the sandbox for sure.
    for _ in 0..5 {
        let mut waiting = start_program(&arguments, &["python3", "-c", program]);
        wait_until("it writes", || home.path().join("file").exists());
        fs::remove_file(home.path().join("file")).expect("it goes");
        let (pid, run) = (waiting.run.id(), Pid::from_child(&waiting.run));
        kill_process(run, Signal::STOP).expect("it stops");
        let threads = || fs::read_dir(format!("/proc/{pid}/task")).expect("it runs").flatten();
        let is_stopped = |thread: fs::DirEntry| {
            state_of(&format!("{pid}/task/{}", thread.file_name().display())) == "T"
        };
        wait_until("all its threads stop", || threads().all(is_stopped));
        kill(waiting.server);
        wait_until("no request is served", || state_of(&waiting.server.to_string()) == "Z");
        thread::sleep(Duration::from_millis(100));
        kill_process(run, Signal::CONT).expect("it goes on");
        assert_eq!(waiting.run.wait().expect("it ends").code(), Some(1));
        let mut said = String::new();
        waiting.run.stdout.take().expect("a pipe").read_to_string(&mut said).expect("text");
        assert_eq!(said, "");
    }
}

/// Who types ^C means the program.
#[test]
fn signals_of_a_terminal_do_not_reach_it() {
    let waiting = start(&["--rootfs", "/"]);
    let session = |pid: u32| {
        let text = fs::read_to_string(format!("/proc/{pid}/stat")).expect("it runs");
        let rest = text.rsplit_once(')').expect("a name").1.to_owned();
        rest.split_whitespace().nth(3).expect("a session").to_owned()
    };
    assert_eq!(session(waiting.server), waiting.server.to_string());
    assert_ne!(session(waiting.run.id()), session(waiting.server));
}

/// Whatever a program of the host changes, the guest sees in its next system call.
#[test]
fn a_guest_sees_what_others_have_just_changed() {
    let home = tempfile::tempdir().expect("a directory");
    let at = |path: &str| home.path().join(path);
    fs::create_dir_all(at("a/b/c")).expect("directories");
    let mut command = thaw();
    command.args(["run", "--weak-limits", "--as-root", "--rootfs", "/"]);
    command.args(["--bind", &format!("{}:/shared:rw", home.path().display())]);
    // What is printed was read to its end: it may be written to from then on.
    let script =
        "cd /shared; while read p; do x=$(cat $p 2>/dev/null || echo none); echo \"$x\"; done";
    command.args(["--", "sh", "-c", script]).stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut guest = command.spawn().expect("thaw runs");
    let mut input = guest.stdin.take().expect("a pipe");
    let mut output = BufReader::new(guest.stdout.take().expect("a pipe"));
    let mut read = |path: &str| {
        writeln!(input, "{path}").expect("it reads");
        let mut line = String::new();
        output.read_line(&mut line).expect("it answers");
        line.trim_end().to_owned()
    };
    let put = |path: &str, text: &str| fs::write(at(path), format!("{text}\n")).expect("a file");
    let file = "/shared/a/b/c/file";
    assert_eq!(read(file), "none");
    for text in ["one", "another", "a third, which is longer"] {
        put("a/b/c/file", text);
        assert_eq!(read(file), text);
        assert_eq!(read("a/b/../b/c/file"), text);
    }
    fs::rename(at("a/b"), at("a/moved")).expect("it moves");
    assert_eq!(
        (read(file), read("a/moved/c/file")),
        ("none".into(), "a third, which is longer".into())
    );
    symlink("moved", at("a/b")).expect("a link");
    put("a/moved/c/file", "by a link");
    assert_eq!(read(file), "by a link");
    fs::remove_file(at("a/b")).expect("it goes");
    put("a/b", "no directory");
    assert_eq!((read(file), read("a/b")), ("none".into(), "no directory".into()));
    drop(input);
    assert!(guest.wait().expect("it ends").success());
}

/// What is mapped is the host's file: it is not copied, and shows what the host writes, as on Linux.
#[test]
fn a_mapping_of_a_bound_file_is_the_file() {
    let home = tempfile::tempdir().expect("a directory");
    let file = home.path().join("file");
    fs::write(&file, [b'a'; 3 * 4096]).expect("a file");
    let program = "
import mmap, os
file = os.open('/shared/file', os.O_RDONLY)
view = mmap.mmap(file, 3 * 4096, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
view[4096] = ord('w')
print(view[0:1], view[4096:4097], flush=True)
input()
print(view[0:1], view[4096:4097], view[8192:8193], flush=True)
input()
child = os.fork()
if not child:
    view[8192]
    os._exit(0)
print(os.WTERMSIG(os.waitpid(child, 0)[1]), view[4096:4097], flush=True)
";
    let bind = format!("{}:/shared", home.path().display());
    let arguments = ["--as-root", "--rootfs", "/", "--bind", &bind];
    let mut guest = start_program(&arguments, &["python3", "-c", program]);
    let mut input = guest.run.stdin.take().expect("a pipe");
    let mut output = BufReader::new(guest.run.stdout.take().expect("a pipe"));
    let mut line = || {
        let mut line = String::new();
        output.read_line(&mut line).expect("it prints");
        line
    };
    assert_eq!(line(), "b'a' b'w'\n");
    let written = fs::OpenOptions::new().write(true).open(&file).expect("it opens");
    written.write_all_at(&[b'b'; 3 * 4096], 0).expect("it is written");
    writeln!(input).expect("it reads");
    assert_eq!(line(), "b'b' b'w' b'b'\n");
    written.set_len(2 * 4096).expect("it is cut");
    writeln!(input).expect("it reads");
    // SIGBUS. What the program has written is its own.
    assert_eq!(line(), "7 b'w'\n");
}

/// Programs and libraries of a bound directory, also where the host would not execute them.
#[test]
fn programs_in_bound_directories_are_executed() {
    let home = tempfile::tempdir().expect("a directory");
    let _mounted = Mounted::without_execution(home.path());
    fs::copy("/usr/bin/env", home.path().join("program")).expect("a copy");
    let bind = format!("{}:/shared", home.path().display());
    let mut command = thaw();
    command.args(["run", "--weak-limits", "--as-root", "--rootfs", "/", "--bind", &bind]);
    command.args(["--", "/shared/program", "echo", "it runs"]);
    assert_eq!(run(&mut command).success(), "it runs\n");
}

/// A file system in memory, until this is dropped.
struct Mounted<'a>(&'a Path);

impl<'a> Mounted<'a> {
    /// One from which the host executes nothing; none for a user who may not mount.
    fn without_execution(at: &'a Path) -> Option<Self> {
        let mut mount = Command::new("mount");
        mount.args(["-t", "tmpfs", "-o", "noexec", "tmpfs"]).arg(at).stderr(Stdio::null());
        let is_mounted = mount.status().is_ok_and(|status| status.success());
        if !is_mounted {
            skip("the test of a directory whose programs the host does not execute: no mount(8)");
        }
        is_mounted.then_some(Self(at))
    }
}

impl Drop for Mounted<'_> {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("-l").arg(self.0).status();
    }
}

/// So many mounts that their descriptors take several packets.
#[test]
fn many_directories_are_served_at_once() {
    let home = tempfile::tempdir().expect("a directory");
    let mut command: Command = thaw();
    command.args(["run", "--weak-limits", "--as-root", "--rootfs", "/"]);
    for number in 0..40 {
        let directory = home.path().join(format!("d{number}"));
        fs::create_dir(&directory).expect("a directory");
        fs::write(directory.join("number"), format!("{number}\n")).expect("a file");
        command.args(["--bind", &format!("{}:/mnt/m{number}:rw", directory.display())]);
    }
    let script = "for n in $(seq 0 39); do read x < /mnt/m$n/number; echo $x > /mnt/m$n/copy; done";
    command.args(["--", "sh", "-c", script]);
    run(&mut command).success();
    for number in 0..40 {
        let copy = home.path().join(format!("d{number}/copy"));
        assert_eq!(fs::read_to_string(copy).expect("a copy"), format!("{number}\n"));
    }
}

/// A sandbox with bound directories that runs a program in Python with the first one as its argument.
fn python(binds: &[String], program: &str) -> String {
    let mut command = thaw();
    command.args(["run", "--weak-limits", "--as-root", "--rootfs", "/"]);
    for bind in binds {
        command.args(["--bind", bind]);
    }
    command.args(["--", "python3", "-c", program]);
    run(&mut command).success()
}

/// More names, and longer ones, than a request has room for.
#[test]
fn long_paths_are_refused_or_looked_up_as_on_linux() {
    let home = tempfile::tempdir().expect("a directory");
    fs::create_dir_all(home.path().join("a/".repeat(60))).expect("directories");
    let bind = format!("{}:/shared:rw", home.path().display());
    let program = "
import os, errno
def error(call, *arguments):
    try: call(*arguments)
    except OSError as error: return errno.errorcode[error.errno]
    return 'none'
os.symlink('/shared/' + 'x' * 4087, '/tmp/long')
os.symlink('/shared/' + 'a/' * 50, '/tmp/deep')
print(error(os.stat, '/tmp/long/' + 'y' * 4086), error(os.stat, '/shared/' + 'a/' * 60))
print(error(os.stat, '/tmp/deep/' + 'a/' * 10), error(os.stat, '/tmp/deep/' + 'a/' * 11))
directory = '/shared'
for name in 'd' * 15:
    directory += '/' + name * 254
    os.mkdir(directory)
os.chdir(directory)
print(error(os.symlink, 't' * 4095, 'l' * 250), error(os.rename, 'n' * 250, 'm' * 250))
print(error(os.stat, directory + '/..'), error(os.listdir, '.'))
";
    let said = python(&[bind], program);
    let expected = "ENAMETOOLONG none\nnone ENOENT\nENAMETOOLONG ENOENT\nnone none\n";
    assert_eq!(said, expected);
}

/// What is open in bound directories leaves the sandbox and the process that serves its files enough
/// descriptors for all else.
#[test]
fn many_open_files_leave_descriptors_for_others() {
    let home = tempfile::tempdir().expect("a directory");
    let mut binds = Vec::new();
    for number in 0..9 {
        let directory = home.path().join(format!("m{number}"));
        fs::create_dir_all(directory.join("d/".repeat(30))).expect("directories");
        for file in 0..500 {
            fs::write(directory.join(format!("f{file}")), format!("{number} {file}"))
                .expect("a file");
        }
        binds.push(format!("{}:/m/{number}", directory.display()));
    }
    let program = "
import os, resource
resource.setrlimit(resource.RLIMIT_NOFILE, (8192, 8192))
files = [(m, f, open(f'/m/{m}/f{f}')) for m in range(9) for f in range(500)]
for m in range(9): os.stat(f'/m/{m}/' + 'd/' * 30)
print(open('/etc/hostname').read() != '', all(file.read() == f'{m} {f}' for m, f, file in files))
";
    assert_eq!(python(&binds, program), "True True\n");
}
