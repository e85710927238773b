//! Programs collected from the host run in the collected root file system.

mod common;

use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use common::{empty_store, export, is_root};
use tempfile::TempDir;
use thaw_store::collect::{
    CollectError, CollectRequest, Collected, Extra, MissingLibrary, RuntimeRequest,
};
use thaw_store::{Store, StoreError, Tree};

/// Collects and exports to a directory.
fn collect(request: &CollectRequest) -> (TempDir, PathBuf, Collected) {
    let (directory, store) = empty_store();
    let mut session = store.session().unwrap();
    let mut tree = Tree::new();
    let collected = session.collect(&mut tree, request, &mut |_| {}).unwrap();
    let index = session.put_index(&tree).unwrap();
    let root = directory.path().join("root");
    let open = Store::open_index(&store, index).unwrap();
    thaw_store::index::check_structure(&open.index()).unwrap();
    export(&store, &open, &root);
    (directory, root, collected)
}

/// Runs a program in a root directory, with `/proc`, from which the dynamic loader
/// learns what `$ORIGIN` is.
fn run_in(root: &Path, program: &Path, arguments: &[&str]) -> Output {
    let mut proc = std::ffi::OsString::from("--mount-proc=");
    proc.push(root.join("proc"));
    Command::new("unshare")
        .args(["--fork", "--pid"])
        .arg(proc)
        .arg("chroot")
        .arg(root)
        .arg(program)
        .args(arguments)
        .env_clear()
        .env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin")
        .output()
        .expect("unshare(1) and chroot(1) are part of every Linux")
}

fn stdout(output: &Output) -> String {
    assert!(output.status.success(), "{output:?}");
    String::from_utf8(output.stdout.clone()).unwrap()
}

#[test]
fn a_dynamic_program_runs() {
    if !is_root("running a collected program") {
        return;
    }
    let request = CollectRequest { programs: vec!["ls".into()], ..Default::default() };
    let (_directory, root, collected) = collect(&request);
    let output = run_in(&root, &collected.programs[0], &["/"]);
    let listed = stdout(&output);
    for name in ["tmp", "etc", "proc", "dev"] {
        assert!(listed.lines().any(|line| line == name), "{listed}");
    }
}

#[test]
fn python_runs_with_its_standard_library() {
    if !is_root("running a collected interpreter") {
        return;
    }
    let runtimes = vec![RuntimeRequest::new("python3")];
    let request = CollectRequest { runtimes, ..Default::default() };
    let (_directory, root, collected) = collect(&request);
    let python = collected.search_path[0].join("python3");
    let script = "import http.server, json, ssl, sqlite3, hashlib, ctypes, zlib, decimal, \
                  asyncio, socketserver, uuid; print(json.dumps([1, 2]))";
    assert_eq!(stdout(&run_in(&root, &python, &["-c", script])), "[1, 2]\n");
}

/// Collects a language's runtime and runs its interpreter in what was collected.
fn language(name: &str, arguments: &[&str]) -> String {
    let runtimes = vec![RuntimeRequest::new(name)];
    let request = CollectRequest { runtimes, ..Default::default() };
    let (_directory, root, collected) = collect(&request);
    // Perl opens it for -e; the kernel's own /dev is not here.
    fs::write(root.join("dev/null"), "").unwrap();
    stdout(&run_in(&root, &collected.search_path[0].join(name), arguments))
}

#[test]
fn every_language_runs_with_its_library() {
    if !is_root("running a collected interpreter") {
        return;
    }
    let node = "const [a, z] = [require('crypto'), require('zlib')];
                console.log(z.gunzipSync(z.gzipSync(a.createHash('md5').update('').digest('hex')))
                    .toString(), new Intl.NumberFormat('en').format(1234))";
    assert_eq!(language("node", &["-e", node]), "d41d8cd98f00b204e9800998ecf8427e 1,234\n");
    let ruby = "require 'json'; require 'openssl'; require 'socket'; require 'digest'
                puts JSON.generate([Digest::MD5.hexdigest('')])";
    assert_eq!(language("ruby", &["-e", ruby]), "[\"d41d8cd98f00b204e9800998ecf8427e\"]\n");
    let php = "echo json_encode([md5(''), extension_loaded('pdo')]), \"\\n\";";
    assert_eq!(language("php", &["-r", php]), "[\"d41d8cd98f00b204e9800998ecf8427e\",true]\n");
    let perl =
        "use POSIX; use JSON::PP; use List::Util 'sum'; print encode_json([sum 1, 2]), qq(\\n)";
    assert_eq!(language("perl", &["-e", perl]), "[3]\n");
    assert!(language("java", &["-Xshare:on", "--list-modules"]).contains("java.base@"));
}

/// Compiles a program or library with the host's C compiler.
fn compile(source: &str, output: &Path, arguments: &[&str]) {
    fs::create_dir_all(output.parent().unwrap()).unwrap();
    let file = output.with_extension("c");
    fs::write(&file, source).unwrap();
    let status =
        Command::new("cc").arg(&file).arg("-o").arg(output).args(arguments).status().unwrap();
    assert!(status.success());
    fs::remove_file(file).unwrap();
}

/// A program whose libraries lie beside it: one found by the run path of the
/// program, one by that of the library, which lies in a directory of its own.
fn program_with_libraries(root: &Path) -> PathBuf {
    let (inner, outer) = (root.join("inner/libinner.so"), root.join("lib/libouter.so"));
    compile("int inner(void) { return 40; }", &inner, &["-shared", "-fPIC"]);
    let link_inner = format!("-L{}", root.join("inner").display());
    let arguments = ["-shared", "-fPIC", &link_inner, "-linner", "-Wl,-rpath,$ORIGIN/../inner"];
    let source = "int inner(void); int outer(void) { return inner() + 2; }";
    compile(source, &outer, &arguments);
    let program = root.join("bin/program");
    let link_outer = format!("-L{}", root.join("lib").display());
    let link_path = format!("-Wl,-rpath-link,{}", root.join("inner").display());
    let arguments = [&link_outer[..], "-louter", &link_path, "-Wl,-rpath,${ORIGIN}/../lib"];
    let source = "int outer(void); int printf(const char *, ...); \
                  int main(void) { printf(\"%d\\n\", outer()); return 0; }";
    compile(source, &program, &arguments);
    program
}

#[test]
fn libraries_are_found_by_run_paths() {
    let directory = tempfile::tempdir().unwrap();
    let program = program_with_libraries(directory.path());
    // Reached through links, as `/lib` and `python3` are.
    symlink("bin", directory.path().join("commands")).unwrap();
    symlink("program", directory.path().join("bin/again")).unwrap();
    let linked = directory.path().join("commands/again");
    let programs = vec![linked.clone().into(), program.into()];
    let (_store, root, collected) = collect(&CollectRequest { programs, ..Default::default() });
    assert_eq!(collected.programs[0], linked);
    assert_eq!(collected.missing_libraries, []);
    let mode = fs::metadata(root.join("tmp")).unwrap().permissions().mode();
    assert_eq!(mode & 0o7777, 0o1777);
    if is_root("running a collected program") {
        for program in &collected.programs {
            assert_eq!(stdout(&run_in(&root, program, &[])), "42\n");
        }
    }
}

#[test]
fn a_missing_library_is_named() {
    let directory = tempfile::tempdir().unwrap();
    let program = program_with_libraries(directory.path());
    fs::remove_file(directory.path().join("inner/libinner.so")).unwrap();
    let (_directory, store) = empty_store();
    let mut session = store.session().unwrap();
    let mut collect = |request| session.collect(&mut Tree::new(), &request, &mut |_| {});
    let programs = vec![program.into()];
    let error = collect(CollectRequest { programs, ..Default::default() }).unwrap_err();
    let StoreError::Collect(CollectError::NoLibrary { program, library }) = &error else {
        panic!("{error}");
    };
    assert_eq!(library, "libinner.so");
    assert!(program.ends_with("lib/libouter.so"), "{error}");
    // In a directory that comes along it is only reported.
    let files = vec![directory.path().to_owned()];
    let collected = collect(CollectRequest { files, ..Default::default() }).unwrap();
    let expected = MissingLibrary { wanted_by: program.clone(), library: library.clone() };
    assert_eq!(collected.missing_libraries, [expected]);
}

#[test]
fn scripts_bring_their_interpreters() {
    let directory = tempfile::tempdir().unwrap();
    let script = directory.path().join("script");
    fs::write(&script, "#!/usr/bin/env -S sh\nset -e\necho from a script\n").unwrap();
    fs::set_permissions(&script, fs::Permissions::from_mode(0o755)).unwrap();
    let programs = vec![script.into()];
    let (_store, root, collected) = collect(&CollectRequest { programs, ..Default::default() });
    if is_root("running a collected script") {
        assert_eq!(stdout(&run_in(&root, &collected.programs[0], &[])), "from a script\n");
    }
}

#[test]
fn what_is_not_a_program_is_refused() {
    let directory = tempfile::tempdir().unwrap();
    let text = directory.path().join("text");
    fs::write(&text, "just text").unwrap();
    let (_directory, store) = empty_store();
    let mut session = store.session().unwrap();
    let mut error = |program: std::ffi::OsString| {
        let request = CollectRequest { programs: vec![program], ..Default::default() };
        session.collect(&mut Tree::new(), &request, &mut |_| {}).unwrap_err()
    };
    let is = |error: StoreError, expected: fn(&CollectError) -> bool| match &error {
        StoreError::Collect(inner) => assert!(expected(inner), "{error}"),
        other => panic!("{other}"),
    };
    is(error(text.into()), |error| matches!(error, CollectError::NotAProgram(_)));
    is(error("no-such-program".into()), |error| matches!(error, CollectError::NoProgram(_)));
    is(error("/no/such".into()), |error| matches!(error, CollectError::NoFile(_)));
    let runtimes = vec![RuntimeRequest::new("cobol")];
    let request = CollectRequest { runtimes, ..Default::default() };
    let unknown = session.collect(&mut Tree::new(), &request, &mut |_| {}).unwrap_err();
    assert!(unknown.to_string().contains("python3"), "{unknown}");
}

#[test]
fn libraries_of_the_functions_own_files_come_without_the_files() {
    let directory = tempfile::tempdir().unwrap();
    let program = program_with_libraries(directory.path());
    let libraries_of = vec![program.clone()];
    let (_store, root, _) = collect(&CollectRequest { libraries_of, ..Default::default() });
    let below = |path: &Path| root.join(path.strip_prefix("/").unwrap());
    assert!(!below(&program).exists());
    assert!(below(&directory.path().join("inner/libinner.so")).exists());
    assert!(root.join("lib64/ld-linux-x86-64.so.2").exists());
}

#[test]
fn virtual_environments_bring_their_packages() {
    if !is_root("running a collected interpreter") {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let environment = directory.path().join("venv");
    let made = Command::new("python3")
        .args(["-m", "venv", "--without-pip"])
        .arg(&environment)
        .status()
        .unwrap();
    assert!(made.success());
    let python = environment.join("bin/python3");
    let find = "import sysconfig; print(sysconfig.get_path('purelib'), end='')";
    let packages = Command::new(&python).args(["-c", find]).output().unwrap();
    let packages = PathBuf::from(stdout(&packages));
    fs::write(packages.join("own_package.py"), "value = 'found'\n").unwrap();
    let request =
        RuntimeRequest { interpreter: Some(python.clone()), ..RuntimeRequest::new("python3") };
    let runtimes = vec![request];
    let (_store, root, collected) = collect(&CollectRequest { runtimes, ..Default::default() });
    assert_eq!(collected.search_path, [environment.join("bin")]);
    let script =
        "import own_package, json, sys; print(own_package.value, sys.prefix != sys.base_prefix)";
    assert_eq!(stdout(&run_in(&root, &python, &["-c", script])), "found True\n");
}

#[test]
fn extras_come_when_asked_for() {
    let has = |extras: Vec<Extra>, path: &str| {
        let (_store, root, _) = collect(&CollectRequest { extras, ..Default::default() });
        root.join(path).exists()
    };
    for (extra, path) in
        [(Extra::TimeZones, "usr/share/zoneinfo/Europe"), (Extra::Certificates, "etc/ssl/certs")]
    {
        let on_host = Path::new("/").join(path).exists();
        assert!(!has(Vec::new(), path));
        assert_eq!(has(vec![extra], path), on_host, "{path}");
    }
}

/// Whoever made an object file may have written any path into it.
#[test]
fn an_interpreter_that_is_no_library_is_not_collected() {
    let directory = tempfile::tempdir().unwrap();
    let secret = directory.path().join("secret");
    std::fs::write(&secret, "not for everybody").unwrap();
    let source = directory.path().join("object.c");
    std::fs::write(&source, "int main(void) { return 0; }").unwrap();
    let object = directory.path().join("own/object");
    std::fs::create_dir(object.parent().unwrap()).unwrap();
    let mut compiler = std::process::Command::new("cc");
    compiler.arg(&source).arg("-o").arg(&object);
    compiler.arg(format!("-Wl,--dynamic-linker={}", secret.display()));
    assert!(compiler.status().unwrap().success());
    let (_home, store) = empty_store();
    let mut session = store.session().unwrap();
    let mut tree = Tree::new();
    let libraries_of = vec![object.parent().unwrap().to_owned()];
    let request = CollectRequest { libraries_of, ..Default::default() };
    let collected = session.collect(&mut tree, &request, &mut |_| {}).unwrap();
    assert!(tree.find(&secret).is_none());
    assert!(collected.missing_libraries.iter().any(|m| m.library == secret.to_string_lossy()));
}

/// A request of somebody who has fewer rights than this process.
#[test]
fn only_what_everybody_may_read_is_collected_for_others() {
    use std::os::unix::fs::PermissionsExt;
    let directory = tempfile::tempdir().unwrap();
    let mode = |path: &str, mode: u32| {
        let permissions = std::fs::Permissions::from_mode(mode);
        std::fs::set_permissions(directory.path().join(path), permissions).unwrap();
    };
    std::fs::create_dir(directory.path().join("private")).unwrap();
    for (path, bits) in [("open", 0o644), ("secret", 0o600), ("private/open", 0o644)] {
        std::fs::write(directory.path().join(path), path).unwrap();
        mode(path, bits);
    }
    mode("private", 0o700);
    mode("", 0o755);
    let (_home, store) = empty_store();
    let collect = |path: &str, granted: &str| {
        let mut session = store.session().unwrap();
        let mut tree = Tree::new();
        let granted = directory.path().join(granted);
        let request = CollectRequest {
            files: vec![directory.path().join(path)],
            readers: thaw_store::import::Readers::Everybody,
            granted: vec![granted],
            ..Default::default()
        };
        session.collect(&mut tree, &request, &mut |_| {}).map(drop)
    };
    collect("open", "nothing").unwrap();
    collect("secret", "nothing").unwrap_err();
    collect("secret", "secret").unwrap_err();
    let error = collect("private/open", "nothing").unwrap_err();
    assert!(error.to_string().contains("not every user"), "{error}");
    collect("private/open", "private").unwrap();
    // A directory on the way to something granted leads nowhere else.
    collect("private/open", "private/other").unwrap_err();
}

#[test]
fn what_links_lead_to_and_may_not_be_read_is_left_out() {
    use std::os::unix::fs::{PermissionsExt, symlink};
    // What a link names below /tmp is never collected.
    let directory = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let path = |name: &str| directory.path().join(name);
    for name in ["ssl", "etc/private", "etc/public"] {
        std::fs::create_dir_all(path(name)).unwrap();
    }
    for name in ["etc/private/key", "etc/public/cert", "etc/secret"] {
        std::fs::write(path(name), name).unwrap();
    }
    for (link, target) in
        [("private", "etc/private"), ("public", "etc/public"), ("secret", "etc/secret")]
    {
        symlink(path(target), path("ssl").join(link)).unwrap();
    }
    for (name, mode) in [("", 0o755), ("etc/private", 0o700), ("etc/secret", 0o600)] {
        std::fs::set_permissions(path(name), std::fs::Permissions::from_mode(mode)).unwrap();
    }
    let (_home, store) = empty_store();
    let collect = |name: &str| {
        let mut tree = Tree::new();
        let request = CollectRequest {
            files: vec![path(name)],
            readers: thaw_store::import::Readers::Everybody,
            granted: vec![directory.path().to_owned()],
            ..Default::default()
        };
        let mut session = store.session().unwrap();
        session.collect(&mut tree, &request, &mut |_| {}).map(|collected| (tree, collected))
    };
    let (tree, collected) = collect("ssl").unwrap();
    assert_eq!(collected.unreadable, [path("etc/secret"), path("etc/private")]);
    assert!(tree.find(&path("etc/public/cert")).is_some());
    assert!(tree.find(&path("ssl/private")).is_some(), "the link itself may be read");
    for name in ["etc/private", "etc/secret"] {
        assert!(tree.find(&path(name)).is_none(), "{name}");
    }
    collect("etc/private").map(drop).unwrap_err();
}
