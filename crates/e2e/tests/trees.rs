//! Trees of files to sandboxes and from them, as streams of tar.

use std::collections::BTreeMap;
use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;
use thaw_e2e::{Daemon, DaemonOptions, Outcome, built_home, run, run_within, thaw, wait_until};

const BOX: &str = r#"
name = "box"
isolation = "instance"
[entry]
kind = "sandbox"
[runtime]
kind = "python3"
programs = ["bash", "sh", "cat", "ls", "ln", "mkdir", "mkfifo", "truncate", "touch", "find", "wc"]
[limits]
memory = "512MiB"
"#;
/// How long a tree of thousands of files may take.
const PATIENCE: Duration = Duration::from_secs(300);

/// A daemon with a sandbox `one`.
fn with_sandbox(label: &str) -> (Daemon, PathBuf) {
    let home = built_home(label, &[]);
    let directory = home.with_extension("box");
    fs::create_dir_all(&directory).unwrap();
    fs::write(directory.join("thaw.toml"), BOX).unwrap();
    run(thaw().arg("build").arg(&directory).env("THAW_HOME", &home)).success();
    let daemon = Daemon::start(&home, &DaemonOptions::default());
    call(&home, &["sandbox", "create", "box", "--name", "one"]).success();
    let work = home.with_extension("files");
    let _ = fs::remove_dir_all(&work);
    fs::create_dir_all(&work).unwrap();
    (daemon, work)
}

fn call(home: &Path, arguments: &[&str]) -> Outcome {
    run_within(PATIENCE, thaw().args(arguments).env("THAW_HOME", home), b"")
}

fn inside(daemon: &Daemon, script: &str) -> String {
    call(daemon.home(), &["exec", "one", "--", "sh", "-c", script]).success()
}

/// All that is below a directory: permissions, time and contents of each path.
fn seen(root: &Path) -> BTreeMap<PathBuf, (u32, i64, Vec<u8>)> {
    let (mut found, mut left) = (BTreeMap::new(), vec![root.to_owned()]);
    while let Some(directory) = left.pop() {
        for entry in fs::read_dir(&directory).unwrap() {
            let path = entry.unwrap().path();
            let attributes = path.symlink_metadata().unwrap();
            let (contents, mode, mtime) = if attributes.is_symlink() {
                let target = fs::read_link(&path).unwrap();
                (target.into_os_string().into_encoded_bytes(), 0, 0)
            } else {
                let is_directory = attributes.is_dir();
                let contents = if is_directory { Vec::new() } else { fs::read(&path).unwrap() };
                (contents, attributes.mode(), attributes.mtime())
            };
            if attributes.is_dir() {
                left.push(path.clone());
            }
            found.insert(path.strip_prefix(root).unwrap().to_owned(), (mode, mtime, contents));
        }
    }
    found
}

/// Copies a tree to the sandbox and back, and compares.
fn there_and_back(daemon: &Daemon, tree: &Path, work: &Path) -> usize {
    let name = tree.file_name().unwrap().to_str().unwrap();
    let (up, down) = (format!("one:/tmp/{name}"), work.join(format!("{name}-down")));
    call(daemon.home(), &["sandbox", "cp", "-r", tree.to_str().unwrap(), &up]).success();
    call(daemon.home(), &["sandbox", "cp", "-r", &up, down.to_str().unwrap()]).success();
    let (sent, come) = (seen(tree), seen(&down));
    let differing: Vec<_> = sent
        .iter()
        .filter(|(path, one)| come.get(*path) != Some(one))
        .map(|(path, _)| path)
        .take(5)
        .collect();
    assert!(differing.is_empty(), "{differing:?}");
    assert_eq!(sent.len(), come.len());
    come.len()
}

#[test]
fn trees_of_thousands_of_files_go_there_and_back() {
    let (daemon, work) = with_sandbox("trees-many");
    let many = work.join("many");
    for directory in 0..100 {
        let place = many.join(format!("{directory:03}/below"));
        fs::create_dir_all(&place).unwrap();
        for file in 0..100 {
            fs::write(place.join(format!("{file}")), format!("{directory} {file}")).unwrap();
        }
    }
    let long = many.join("l".repeat(200)).join("m".repeat(200));
    fs::create_dir_all(&long).unwrap();
    fs::write(long.join("ü n\n"), vec![7; 3 << 20]).unwrap();
    symlink(format!("../{}", "t".repeat(150)), many.join("link")).unwrap();
    symlink("/etc/passwd", many.join("away")).unwrap();
    fs::write(many.join("program"), "#!/bin/sh\n").unwrap();
    fs::set_permissions(many.join("program"), fs::Permissions::from_mode(0o751)).unwrap();
    fs::set_permissions(many.join("000"), fs::Permissions::from_mode(0o555)).unwrap();
    assert!(there_and_back(&daemon, &many, &work) > 10_000);
    // What npm and Python are made of, where they are.
    let real =
        ["/usr/lib/node_modules/npm", "/usr/share/nodejs/npm", "/usr/lib/python3/dist-packages"];
    if let Some(real) = real.iter().map(Path::new).find(|real| real.is_dir()) {
        let copy = work.join("real");
        run(Command::new("cp").arg("-rP").arg(real).arg(&copy)).success();
        assert!(there_and_back(&daemon, &copy, &work) > 10);
    }
}

#[test]
fn what_a_sandbox_calls_its_files_stays_where_it_belongs() {
    let (daemon, work) = with_sandbox("trees-odd");
    inside(
        &daemon,
        "mkdir -p /tmp/t/d && cd /tmp/t && mkfifo fifo && ln -s / root && ln -s ../.. up && \
         touch -- '..a' '-rf' 'a\\b' d/x && ln d/x second && truncate -s 256M d/hole && \
         touch \"$(printf 'b\\377')\"",
    );
    let down = work.join("down");
    let target = down.to_str().unwrap();
    let done = call(daemon.home(), &["sandbox", "cp", "one:/tmp/t", target]);
    assert_eq!(done.code, Some(0), "{done:?}");
    assert!(done.stderr.contains("2 left out") && done.stderr.contains("fifo"), "{done:?}");
    assert_eq!(fs::read_link(down.join("root")).unwrap(), Path::new("/"));
    for name in ["..a", "-rf", "a\\b", "d/x", "second"] {
        assert!(down.join(name).is_file(), "{name}");
    }
    let hole = down.join("d/hole").metadata().unwrap();
    assert_eq!(hole.len(), 256 << 20);
    assert!(hole.blocks() < 1024, "{}", hole.blocks());
    // Into the directory that is there now, under its own name; and not over that.
    call(daemon.home(), &["sandbox", "cp", "one:/tmp/t", target]).success();
    assert!(down.join("t/d/x").is_file());
    let again = call(daemon.home(), &["sandbox", "cp", "one:/tmp/t", target]);
    assert!(
        again.stderr.contains("File exists") || again.stderr.contains("entity already exists"),
        "{again:?}"
    );
    // More than a tree may have is said before it is written.
    inside(&daemon, "mkdir /tmp/big && truncate -s 100T /tmp/big/hole");
    let big = work.join("big");
    let done = call(daemon.home(), &["sandbox", "cp", "one:/tmp/big", big.to_str().unwrap()]);
    assert!(done.code == Some(1) && done.stderr.contains("64 GiB"), "{done:?}");
    assert!(done.stderr.contains("what has come until then"), "{done:?}");
}

#[test]
fn a_sandbox_without_room_says_so() {
    let (daemon, work) = with_sandbox("trees-room");
    let tree = work.join("large");
    fs::create_dir(&tree).unwrap();
    for n in 0..40 {
        fs::write(tree.join(n.to_string()), vec![n; 32 << 20]).unwrap();
    }
    let none = call(daemon.home(), &["sandbox", "cp", "one:/tmp/none", work.to_str().unwrap()]);
    assert!(none.stderr.contains("does not exist in the sandbox"), "{none:?}");
    let done = call(daemon.home(), &["sandbox", "cp", tree.to_str().unwrap(), "one:/tmp/large"]);
    assert!(done.code == Some(1) && done.stderr.contains("no room"), "{done:?}");
}

/// Begins to send a tree; the answer is still to come.
fn begin(daemon: &Daemon, path: &str) -> UnixStream {
    let (id, ..) = daemon.instance("box");
    let mut stream = UnixStream::connect(daemon.admin_socket()).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    let head = format!(
        "PUT /instances/{id}/files/tree?path={path} HTTP/1.1\r\nHost: localhost\r\n\
         Transfer-Encoding: chunked\r\n\r\n"
    );
    stream.write_all(head.as_bytes()).unwrap();
    stream
}

/// Sends a tree in one piece; status and body of the answer.
fn send(daemon: &Daemon, bytes: &[u8]) -> (u16, String) {
    let mut stream = begin(daemon, "/tmp/sent");
    let _ = write!(stream, "{:x}\r\n", bytes.len());
    let _ = stream.write_all(bytes).and_then(|()| stream.write_all(b"\r\n0\r\n\r\n"));
    answer(stream)
}

fn answer(stream: UnixStream) -> (u16, String) {
    let mut reader = BufReader::new(stream);
    let mut line = String::new();
    reader.read_line(&mut line).unwrap();
    let status = line.split(' ').nth(1).and_then(|code| code.parse().ok());
    let mut len = 0;
    loop {
        let mut header = String::new();
        reader.read_line(&mut header).unwrap();
        if let Some(value) = header.to_lowercase().strip_prefix("content-length:") {
            len = value.trim().parse().unwrap();
        }
        if header.trim().is_empty() {
            break;
        }
    }
    let mut body = vec![0; len];
    reader.read_exact(&mut body).unwrap();
    (status.expect("a status"), String::from_utf8(body).unwrap())
}

/// What tar makes of a script's files, with more arguments.
fn archive(work: &Path, name: &str, script: &str, arguments: &[&str]) -> Vec<u8> {
    let place = work.join(name);
    fs::create_dir_all(&place).unwrap();
    run(Command::new("sh").args(["-c", script]).current_dir(&place)).success();
    let file = work.join(format!("{name}.tar"));
    let mut tar = Command::new("tar");
    run(tar.arg("-C").arg(&place).arg("-cf").arg(&file).args(arguments)).success();
    fs::read(file).unwrap()
}

#[test]
fn streams_of_others_are_judged() {
    let (daemon, work) = with_sandbox("trees-others");
    // GNU tar's own: a second name, a hole, a FIFO, pax headers.
    let script = "echo first > a; ln a b; truncate -s 3M hole; mkfifo pipe; mkdir -m 711 d";
    let pack = |arguments: &[&str]| {
        archive(&work, "own", &format!("rm -rf *; {script}"), &[arguments, &["."]].concat())
    };
    let (status, body) = send(&daemon, &pack(&["--format=pax", "--sparse"]));
    assert!(status == 400 && body.contains("--format=gnu"), "{status} {body}");
    for arguments in [&["--format=gnu", "--sparse"][..], &["--format=pax"]] {
        let (status, body) = send(&daemon, &pack(arguments));
        assert_eq!(status, 200, "{body}");
        assert!(body.contains("\"left_out\":1"), "{body}");
        let told = inside(&daemon, "cd /tmp/sent && cat a b && wc -c < hole && ls -ld d");
        assert!(told.starts_with("first\nfirst\n3145728\ndrwx--x--x"), "{told}");
    }
    for transform in ["s,^x,../x,", "s,^x,/abs/x,"] {
        let arguments = ["--absolute-names", "--transform", transform, "x"];
        let bytes = archive(&work, "out", "echo x > x", &arguments);
        let (status, body) = send(&daemon, &bytes);
        assert!(status == 400 && body.contains("leads out of the tree"), "{status} {body}");
    }
    let whole = archive(&work, "cut", "echo x > x", &["x"]);
    for len in [0, 100, 600, 1024] {
        let (status, body) = send(&daemon, &whole[..len]);
        assert!(status == 400 && body.contains("no whole archive"), "{len} {status} {body}");
    }
    // A name without an end would be held in memory.
    let mut endless = whole[..512].to_vec();
    endless[156] = b'L';
    endless[124..136].copy_from_slice(b"77777777777\0");
    endless[148..156].fill(b' ');
    let sum: u32 = endless.iter().map(|byte| u32::from(*byte)).sum();
    endless[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
    endless.extend(vec![b'n'; 4 << 20]);
    let (status, body) = send(&daemon, &endless);
    assert!(status == 400 && body.contains("longer than it may be"), "{status} {body}");
}

#[test]
fn trees_at_a_time_have_a_bound_and_give_their_places_back() {
    let (daemon, work) = with_sandbox("trees-places");
    let tree = work.join("tree");
    fs::create_dir(&tree).unwrap();
    let copy = || call(daemon.home(), &["sandbox", "cp", tree.to_str().unwrap(), "one:/tmp/t"]);
    let held: Vec<_> = (0..8).map(|_| begin(&daemon, "/tmp/held")).collect();
    wait_until("all places are taken", || copy().stderr.contains("as many trees"));
    drop(held);
    wait_until("they are given back", || copy().code == Some(0));
    assert_eq!(daemon.instances("box").len(), 1);
}
