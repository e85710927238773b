//! Builds of functions whose author is hostile: nothing of theirs runs on the host, no
//! link leads out of their directory, no flood of output outlives its time-out.

use std::collections::BTreeSet;
use std::fs::{self, File, Permissions};
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown, symlink};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};
use tempfile::TempDir;
use thaw_e2e::{Daemon, DaemonOptions, Function, Outcome, get, run, run_within, thaw};

/// How long a build may take.
const PATIENCE: Duration = Duration::from_secs(300);
/// A file that every user may read, and one that only its owner may.
const PUBLIC: &str = "what everybody may read";
const SECRET: &str = "the secret of this test";

/// A function's directory, its home, and files beside them that are nobody's business.
struct Place {
    all: TempDir,
}

impl Place {
    fn new() -> Self {
        let all = tempfile::tempdir().expect("a directory");
        let place = Self { all };
        for directory in ["function", "home", "outside", "open"] {
            fs::create_dir(place.path(directory)).expect("a directory");
        }
        fs::write(place.path("outside/secret"), SECRET).expect("a file");
        fs::set_permissions(place.path("outside/secret"), Permissions::from_mode(0o600))
            .expect("permissions");
        // The rest may be looked at by everybody.
        fs::set_permissions(place.path(""), Permissions::from_mode(0o755)).expect("permissions");
        fs::write(place.path("open/public"), PUBLIC).expect("a file");
        place
    }

    fn path(&self, name: &str) -> PathBuf {
        self.all.path().join(name)
    }

    /// A static program that serves, and a thaw.toml with these keys.
    fn function(&self, keys: &str) {
        let source = Function::Variant {
            example: "hello-c",
            name: "source",
            keys: String::new(),
            limits: "",
        };
        let made = source.directory(self.all.path());
        fs::copy(made.join("hello"), self.path("function/hello")).expect("a program");
        self.configure(&format!(
            "name = \"hostile\"\ncommand = [\"/app/hello\"]\nport = 8080\n{keys}"
        ));
    }

    fn configure(&self, text: &str) {
        fs::write(self.path("function/thaw.toml"), text).expect("thaw.toml");
    }

    fn build(&self, options: &[&str]) -> Outcome {
        let mut build = thaw();
        build.env("THAW_HOME", self.path("home")).arg("build").args(options);
        run_within(PATIENCE, build.arg(self.path("function")), b"")
    }

    /// The blobs of the store with this content.
    fn blobs(&self, content: &str) -> Vec<PathBuf> {
        blobs(&self.path("home"), content)
    }
}

fn blobs(home: &Path, content: &str) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for shard in fs::read_dir(home.join("store/blobs")).expect("a store") {
        for blob in fs::read_dir(shard.expect("a shard").path()).expect("a shard") {
            let path = blob.expect("a blob").path();
            if fs::read(&path).expect("a blob") == content.as_bytes() {
                found.push(path);
            }
        }
    }
    found
}

/// Runs a build whose output is thrown away; its exit code, how long it took and the
/// most memory that it had, in KiB.
fn watched(build: &mut Command, log: &Path) -> (Option<i32>, Duration, u64) {
    let started = Instant::now();
    let stderr = File::create(log).expect("a log");
    let mut child =
        build.stdin(Stdio::null()).stdout(Stdio::null()).stderr(stderr).spawn().expect("thaw");
    let mut most = 0;
    loop {
        let status = fs::read_to_string(format!("/proc/{}/status", child.id()));
        let peak = status
            .unwrap_or_default()
            .lines()
            .find_map(|line| line.strip_prefix("VmHWM:")?.trim().strip_suffix(" kB")?.parse().ok());
        most = most.max(peak.unwrap_or(0));
        if let Some(status) = child.try_wait().expect("our child") {
            return (status.code(), started.elapsed(), most);
        }
        if started.elapsed() > PATIENCE {
            child.kill().expect("our child");
            return (None, started.elapsed(), most);
        }
        thread::sleep(Duration::from_millis(20));
    }
}

fn assert_bounded(place: &Place, options: &[&str], complaint: &str) {
    let mut build = thaw();
    build.env("THAW_HOME", place.path("home")).arg("build").args(options);
    let log = place.path("log");
    let (code, took, most) = watched(build.arg(place.path("function")), &log);
    let text = fs::read(&log).expect("a log");
    let end = String::from_utf8_lossy(&text[text.len().saturating_sub(3000)..]).into_owned();
    assert_eq!(code, Some(1), "after {took:?}: {end}");
    assert!(end.contains(complaint), "{end}");
    assert!(end.contains("lines of output were left out"), "{end}");
    assert!(most < 300 << 10, "{most} KiB");
    assert!(text.len() < 64 << 20, "{} bytes of log", text.len());
}

#[test]
fn a_program_that_floods_its_output_is_bounded_in_time_and_memory() {
    let place = Place::new();
    place.configure(
        "name = \"flood\"\ncommand = [\"/usr/bin/yes\", \"\"]\nport = 8080\nfiles = []\n\
         [runtime]\nkind = \"binary\"\n",
    );
    assert_bounded(&place, &["--timeout", "6s"], "did not wait for a client");
}

#[test]
fn a_build_command_that_floods_its_output_is_bounded_in_time_and_memory() {
    let place = Place::new();
    place.function("[build]\ncommand = [\"yes\"]\ntimeout = \"6s\"\n[runtime]\nkind = \"binary\"");
    for options in [&[][..], &["--trust-build"]] {
        assert_bounded(&place, options, "it took longer than 6 s");
    }
}

#[test]
fn what_a_build_prints_does_not_act_on_the_terminal() {
    let place = Place::new();
    place.function(
        "[build]\ncommand = [\"printf\", '\\033]0;title\\007\\033[2Jhidden\\n']\n\
         [runtime]\nkind = \"binary\"",
    );
    let outcome = place.build(&[]);
    assert_eq!(outcome.code, Some(0), "{}", outcome.stderr);
    assert!(outcome.stderr.contains("\\x1b[2Jhidden"), "{}", outcome.stderr);
    assert!(!outcome.stderr.contains('\x1b'), "{:?}", outcome.stderr);
}

#[test]
fn build_commands_see_the_hosts_tools_and_the_function_only() {
    let place = Place::new();
    let script = "echo made >made\n\
                  mkdir -p sub && echo two >sub/file && ln -s file sub/link && chmod 755 made\n\
                  cat ../outside/secret >stolen-1 2>/dev/null\n\
                  cat ../open/public >stolen-2 2>/dev/null\n\
                  cat /etc/shadow >stolen-3 2>/dev/null\n\
                  ls ../home >stolen-4 2>/dev/null\n\
                  cp /proc/$PPID/environ stolen-5 2>/dev/null\n\
                  echo written >../outside/written\n\
                  env | grep FOR_THE_OPERATOR >stolen-6\n\
                  exit 0\n";
    fs::write(place.path("function/build.sh"), script).expect("a script");
    place.function("[build]\ncommand = [\"sh\", \"build.sh\"]\n[runtime]\nkind = \"binary\"");
    let mut build = thaw();
    build.env("THAW_HOME", place.path("home")).env("FOR_THE_OPERATOR", SECRET);
    let outcome = run_within(PATIENCE, build.arg("build").arg(place.path("function")), b"");
    assert_eq!(outcome.code, Some(0), "{}", outcome.stderr);
    let read = |name: &str| fs::read_to_string(place.path("function").join(name));
    assert_eq!(read("made").expect("it was made"), "made\n");
    assert_eq!(read("sub/link").expect("it was made"), "two\n");
    for stolen in ["stolen-1", "stolen-2", "stolen-3", "stolen-4", "stolen-6"] {
        assert_eq!(read(stolen).unwrap_or_default(), "", "{stolen}");
    }
    assert!(!read("stolen-5").unwrap_or_default().contains(SECRET));
    assert!(!place.path("outside/written").exists());
    // Who trusts the author gets the old way.
    let outcome = place.build(&["--trust-build"]);
    assert_eq!(outcome.code, Some(0), "{}", outcome.stderr);
    assert!(place.path("outside/written").exists());
    assert_eq!(read("stolen-2").expect("it was made"), PUBLIC);
}

/// git uses no repository of another user, and pip no cache.
#[test]
fn build_commands_own_what_the_author_and_the_home_own() {
    if !rustix::process::getuid().is_root() {
        eprintln!("not checked: it takes root to build what belongs to somebody else");
        return;
    }
    let place = Place::new();
    let script = "git init -q && git status --short && mkdir -p $HOME/kept && \
                  stat -c 'owner of %n: %u:%g' . hello other $HOME $HOME/kept";
    place.function(&format!(
        "[build]\ncommand = [\"sh\", \"-c\", \"{script}\"]\n[runtime]\nkind = \"binary\""
    ));
    fs::write(place.path("function/other"), "").expect("a file");
    for (path, id) in [
        ("home", 1_999_999),
        ("function", 12_345),
        ("function/hello", 12_345),
        ("function/other", 4711),
    ] {
        chown(place.path(path), Some(id), Some(id + 1)).expect("root may give it away");
    }
    // The second time, directories are there that the first has made.
    for _ in 0..2 {
        let outcome = place.build(&[]);
        assert_eq!(outcome.code, Some(0), "{}", outcome.stderr);
        let of_program = [".", "hello", "/tmp/home", "/tmp/home/kept"].map(|name| (name, "0:0"));
        for (name, owner) in of_program.into_iter().chain([("other", "4711:4712")]) {
            let line = format!("owner of {name}: {owner}\n");
            assert!(outcome.stderr.contains(&line), "{line}{}", outcome.stderr);
        }
        assert!(outcome.stderr.contains("?? thaw.toml"), "{}", outcome.stderr);
    }
}

/// Go maps the files of its cache so, Rust the metadata of libraries.
#[test]
fn build_commands_map_files_of_the_function_that_they_only_read() {
    let place = Place::new();
    let script = "import mmap\n\
        with open('text', 'rb') as text:\n    \
            mapped = mmap.mmap(text.fileno(), 0, access=mmap.ACCESS_READ)\n    \
            print('mapped', mapped[:].decode())\n\
        with open('text', 'r+b') as text:\n    \
            try:\n        mmap.mmap(text.fileno(), 0)\n        print('shared')\n    \
            except OSError as error:\n        print('refused', error.errno)\n";
    fs::write(place.path("function/map.py"), script).expect("a script");
    fs::write(place.path("function/text"), "some text").expect("a file");
    place.function(
        "[build]\ncommand = [\"/usr/bin/python3\", \"map.py\"]\n[runtime]\nkind = \"binary\"",
    );
    let outcome = place.build(&[]);
    assert_eq!(outcome.code, Some(0), "{}", outcome.stderr);
    assert!(outcome.stderr.contains("mapped some text"), "{}", outcome.stderr);
    // Nothing that is written through a mapping may be lost silently: ENODEV.
    assert!(outcome.stderr.contains("refused 19"), "{}", outcome.stderr);
}

#[test]
fn build_commands_reach_what_their_rules_allow() {
    let place = Place::new();
    let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
    let port = listener.local_addr().expect("an address").port();
    let script = format!(
        "import socket\ntry:\n  socket.create_connection(('host.thaw.internal', {port}), 60)\n  \
         print('connected')\nexcept OSError as error:\n  print('refused', error)\n"
    );
    fs::write(place.path("function/connect.py"), script).expect("a script");
    let rules = [String::new(), format!("egress = [\"host.thaw.internal:{port}\"]\n")];
    for (rule, expected) in rules.iter().zip(["refused", "connected"]) {
        place.function(&format!(
            "[build]\ncommand = [\"/usr/bin/python3\", \"connect.py\"]\n{rule}\
             [runtime]\nkind = \"binary\""
        ));
        let outcome = place.build(&[]);
        assert_eq!(outcome.code, Some(0), "{}", outcome.stderr);
        assert!(outcome.stderr.contains(expected), "{}", outcome.stderr);
    }
}

#[test]
fn interpreters_that_a_function_names_do_not_run_on_the_host() {
    let place = Place::new();
    let marker = place.path("outside/ran");
    let script = format!("#!/bin/sh\ntouch {}\nexec /usr/bin/python3 \"$@\"\n", marker.display());
    fs::write(place.path("function/python"), script).expect("a script");
    fs::set_permissions(place.path("function/python"), Permissions::from_mode(0o755))
        .expect("permissions");
    fs::write(place.path("function/app.py"), "import http.server\n").expect("a program");
    // The second reads its site packages from a directory of the function, as that of a
    // virtual environment does.
    for (kind, interpreter) in [("python3", "./python"), ("perl", "./python")] {
        place.configure(&format!(
            "name = \"asks\"\ncommand = [\"python3\", \"-m\", \"http.server\", \"8080\"]\n\
             port = 8080\n[runtime]\nkind = \"{kind}\"\ninterpreter = \"{interpreter}\"\n"
        ));
        place.build(&[]);
        assert!(!marker.exists(), "{kind}");
    }
}

#[test]
fn a_virtual_environment_in_the_functions_directory_is_asked_in_a_sandbox() {
    let place = Place::new();
    let venv = place.path("function/venv");
    let made =
        run_within(PATIENCE, Command::new("/usr/bin/python3").args(["-m", "venv"]).arg(&venv), b"");
    if made.code != Some(0) {
        eprintln!("SKIPPED: this python3 has no venv: {}", made.stderr);
        return;
    }
    let site = fs::read_dir(venv.join("lib")).expect("a library").next().expect("a version");
    let packages = site.expect("a version").path().join("site-packages");
    let marker = place.path("outside/ran");
    let line = format!("import os; open({:?}, 'w')\n", marker.display().to_string());
    fs::write(packages.join("evil.pth"), line).expect("a file");
    fs::write(packages.join("mine.py"), "text = 'from the environment'\n").expect("a module");
    let app = "import http.server, mine\nclass H(http.server.BaseHTTPRequestHandler):\n  \
               def do_GET(self):\n    self.send_response(200); self.end_headers(); \
               self.wfile.write(mine.text.encode())\n\
               http.server.HTTPServer(('', 8080), H).serve_forever()\n";
    fs::write(place.path("function/app.py"), app).expect("a program");
    place.configure(
        "name = \"venv\"\ncommand = [\"python3\", \"app.py\"]\nport = 8080\n\
         files = [\"app.py\"]\n[runtime]\nkind = \"python3\"\ninterpreter = \"venv/bin/python3\"\n",
    );
    let outcome = place.build(&[]);
    assert_eq!(outcome.code, Some(0), "{}", outcome.stderr);
    assert!(!marker.exists());
    let daemon = Daemon::start(&place.path("home"), &DaemonOptions::default());
    assert_eq!(get(daemon.gateway(), "venv", "/").text(), "from the environment");
    assert_eq!(daemon.stop(), Some(0));
}

/// Programs that come with Python packages are found, and packages see the usual name of their directory.
#[test]
fn programs_of_packages_are_commands() {
    let place = Place::new();
    let packages = place.path("function/installed");
    fs::create_dir_all(packages.join("bin")).expect("a directory");
    let module = "import http.server\nclass H(http.server.BaseHTTPRequestHandler):\n  \
                  def do_GET(self):\n    self.send_response(200); self.end_headers(); \
                  self.wfile.write(__file__.encode())\n\
                  def main():\n  http.server.HTTPServer(('', 8080), H).serve_forever()\n";
    fs::write(packages.join("tool.py"), module).expect("a module");
    let script = packages.join("bin/serve-tool");
    fs::write(&script, "#!/usr/bin/python3\nimport tool\ntool.main()\n").expect("a script");
    fs::set_permissions(&script, Permissions::from_mode(0o755)).expect("permissions");
    place.configure(
        "name = \"tool\"\ncommand = [\"serve-tool\"]\nport = 8080\nfiles = []\n[runtime]\n\
         kind = \"python3\"\ninterpreter = \"/usr/bin/python3\"\npackages = \"installed\"\n",
    );
    let outcome = place.build(&[]);
    assert_eq!(outcome.code, Some(0), "{}", outcome.stderr);
    let daemon = Daemon::start(&place.path("home"), &DaemonOptions::default());
    let said = get(daemon.gateway(), "tool", "/").text();
    assert_eq!(said, "/opt/site-packages/tool.py");
    assert_eq!(daemon.stop(), Some(0));
}

#[test]
fn no_link_leads_out_of_a_functions_directory() {
    let place = Place::new();
    symlink("../outside/secret", place.path("function/link")).expect("a link");
    symlink(place.path("outside"), place.path("function/away")).expect("a link");
    symlink("../outside", place.path("function/up")).expect("a link");
    let binary = "[runtime]\nkind = \"binary\"";
    for from in ["link", "away", "away/secret", "up/secret", "up"] {
        place.function(&format!("files = [\"hello\", \"{from}\"]\n{binary}"));
        let outcome = place.build(&[]);
        assert_eq!(outcome.code, Some(1), "{from}: {}", outcome.stderr);
        assert!(outcome.stderr.contains("leads out"), "{from}: {}", outcome.stderr);
    }
    place.function(&format!(
        "files = [\"hello\"]\n{binary}\n[train]\nrequests = [{{ path = \"/\", method = \"POST\", \
         file = \"link\" }}]"
    ));
    let outcome = place.build(&[]);
    assert_eq!(outcome.code, Some(1), "{}", outcome.stderr);
    // A link in a directory that is imported stays a link.
    place.function(binary);
    let outcome = place.build(&[]);
    assert_eq!(outcome.code, Some(0), "{}", outcome.stderr);
    assert_eq!(place.blobs(SECRET), Vec::<PathBuf>::new());
}

#[test]
fn a_function_gets_files_of_the_host_that_everybody_may_read() {
    let place = Place::new();
    let build = |keys: &str, options: &[&str]| {
        place.function(keys);
        place.build(options)
    };
    let secret = place.path("outside/secret").display().to_string();
    let public = place.path("open/public").display().to_string();
    let include = |path: &str| format!("[runtime]\nkind = \"binary\"\ninclude = [\"{path}\"]");
    let outcome = build(&include(&secret), &[]);
    assert_eq!(outcome.code, Some(1), "{}", outcome.stderr);
    assert_eq!(place.blobs(SECRET), Vec::<PathBuf>::new());
    let outcome = build(&include(&public), &[]);
    assert_eq!(outcome.code, Some(0), "{}", outcome.stderr);
    assert_eq!(place.blobs(PUBLIC).len(), 1);
    // In a directory that others may not enter, it is nobody's either.
    fs::set_permissions(place.path("open"), Permissions::from_mode(0o700)).expect("permissions");
    let outcome = build(&include(&public), &[]);
    assert_eq!(outcome.code, Some(1), "{}", outcome.stderr);
    let rootfs = format!("rootfs = \"{}\"", place.path("outside").display());
    let outcome = build(&rootfs, &[]);
    assert_eq!(outcome.code, Some(1), "{}", outcome.stderr);
    assert_eq!(place.blobs(SECRET), Vec::<PathBuf>::new());
    let outcome = build(&include(&secret), &["--trust-build"]);
    assert_eq!(outcome.code, Some(0), "{}", outcome.stderr);
    assert_eq!(place.blobs(SECRET).len(), 1);
}

#[test]
fn no_function_is_the_whole_host() {
    let place = Place::new();
    symlink("/", place.path("root")).expect("a link");
    let link = place.path("root").display().to_string();
    for (rootfs, option) in [("/", "--json"), ("/usr/..", "--trust-build"), (&link, "--json")] {
        place.function(&format!("rootfs = \"{rootfs}\""));
        let outcome = place.build(&[option]);
        assert_eq!(outcome.code, Some(1), "{rootfs}: {}", outcome.stderr);
        let said = outcome.stderr.contains("`rootfs` of thaw.toml is `/`");
        assert!(said, "{rootfs}: {}", outcome.stderr);
    }
}

#[test]
fn an_object_file_cannot_name_any_file_as_its_interpreter() {
    let place = Place::new();
    let secret = place.path("outside/secret");
    // Owned by whoever builds, who may read it.
    fs::set_permissions(&secret, Permissions::from_mode(0o644)).expect("permissions");
    let source = place.path("object.c");
    fs::write(&source, "int main(void) { return 0; }").expect("a source");
    place.function("[runtime]\nkind = \"binary\"");
    let mut compiler = Command::new("cc");
    compiler.arg(&source).arg("-o").arg(place.path("function/object"));
    let linker = format!("-Wl,--dynamic-linker={}", secret.display());
    assert_eq!(run(compiler.arg(linker)).code, Some(0));
    let outcome = place.build(&[]);
    assert_eq!(outcome.code, Some(0), "{}", outcome.stderr);
    assert_eq!(place.blobs(SECRET), Vec::<PathBuf>::new());
}

#[test]
fn functions_of_different_domains_share_no_file() {
    const SHARED: &str = "a file that several functions have";
    const KEY: &str = "a file that is never shared";
    let place = Place::new();
    fs::create_dir_all(place.path("function/secrets/deep")).expect("a directory");
    fs::write(place.path("function/file"), SHARED).expect("a file");
    fs::write(place.path("function/secrets/deep/key"), KEY).expect("a file");
    let build = |name: &str, sharing: &str, options: &[&str]| {
        place.function(&format!("{sharing}\n[runtime]\nkind = \"binary\""));
        let text = fs::read_to_string(place.path("function/thaw.toml")).expect("thaw.toml");
        place.configure(&text.replace("hostile", name));
        let outcome = place.build(options);
        assert_eq!(outcome.code, Some(0), "{}", outcome.stderr);
        let inodes = |content| -> BTreeSet<u64> {
            place.blobs(content).iter().map(|blob| fs::metadata(blob).expect("it").ino()).collect()
        };
        (inodes(SHARED).len(), inodes(KEY).len())
    };
    let private = "[sharing]\nprivate = [\"secrets/**\"]";
    assert_eq!(build("one", "", &[]), (1, 1));
    assert_eq!(build("two", "", &[]), (1, 1));
    assert_eq!(build("three", private, &[]), (1, 2));
    assert_eq!(build("three", private, &[]), (1, 2));
    assert_eq!(build("four", private, &[]), (1, 3));
    assert_eq!(build("five", "[sharing]\ndomain = \"a\"", &[]), (2, 4));
    assert_eq!(build("six", "[sharing]\ndomain = \"a\"", &[]), (2, 4));
    assert_eq!(build("seven", "", &["--domain", "b"]), (3, 5));
    assert_eq!(build("eight", "[sharing]\ndomain = \"a\"", &["--domain", "b"]), (3, 5));
    // What is private by name is so wherever it comes from.
    let single = "files = [\"hello\", { from = \"secrets/deep/key\", to = \"/key\" }]\n[sharing]\n\
                  private = [\"**/key\"]";
    assert_eq!(build("nine", single, &[]), (3, 6));
    // They are found intact and run.
    let home = place.path("home");
    let daemon = Daemon::start(&home, &DaemonOptions::default());
    for name in ["four", "six", "seven"] {
        assert_eq!(get(daemon.gateway(), name, "/").status, 200, "{name}");
    }
    assert_eq!(daemon.stop(), Some(0));
    let outcome = run(thaw().env("THAW_HOME", &home).args(["gc", "--verify"]));
    assert!(!outcome.stderr.contains("damaged"), "{}", outcome.stderr);
    // Nobody can name the domain of another one's private files.
    let outcome = {
        place.function("[sharing]\ndomain = \"private.x\"\n[runtime]\nkind = \"binary\"");
        place.build(&[])
    };
    assert_eq!(outcome.code, Some(1), "{}", outcome.stderr);
}

#[test]
fn a_live_instance_is_not_frozen_over_a_newer_build() {
    let place = Place::new();
    let keys = |version: &str| {
        format!(
            "files = [\"hello\"]\nisolation = \"instance\"\nenv = {{ VERSION = \"{version}\" }}\n\
             [runtime]\nkind = \"binary\""
        )
    };
    place.function(&keys("one"));
    let outcome = place.build(&[]);
    assert_eq!(outcome.code, Some(0), "{}", outcome.stderr);
    let home = place.path("home");
    let daemon = Daemon::start(&home, &DaemonOptions::default());
    assert_eq!(get(daemon.gateway(), "hostile", "/").status, 200);
    // The daemon does not hear of the build, as if it were just about to.
    let address = home.join("daemon.json");
    let aside = home.join("aside.json");
    fs::rename(&address, &aside).expect("the daemon's address");
    // Its files stay the same, only the configuration changes.
    let text = fs::read_to_string(place.path("function/thaw.toml")).expect("thaw.toml");
    place.configure(&text.replace("\"one\"", "\"two\""));
    let outcome = place.build(&[]);
    assert_eq!(outcome.code, Some(0), "{}", outcome.stderr);
    fs::rename(&aside, &address).expect("the daemon's address");
    let record = home.join("store/functions/hostile/record.json");
    let built = fs::read(&record).expect("a record");
    let outcome = run(thaw().env("THAW_HOME", &home).args(["freeze", "hostile"]));
    assert_eq!(outcome.code, Some(1), "{}", outcome.stderr);
    assert!(outcome.stderr.contains("built anew"), "{}", outcome.stderr);
    assert_eq!(fs::read(&record).expect("a record"), built);
    assert_eq!(daemon.stop(), Some(0));
}

#[test]
fn an_image_tells_instances_nothing_of_the_host() {
    let place = Place::new();
    place.function("env = { PASSWORD = \"hunter2\" }\n[runtime]\nkind = \"binary\"");
    let outcome = place.build(&[]);
    assert_eq!(outcome.code, Some(0), "{}", outcome.stderr);
    let images = fs::read_dir(place.path("home/store/images")).expect("images");
    let source = place.path("function").display().to_string();
    for image in images {
        let bytes = fs::read(image.expect("an image").path()).expect("an image");
        let text = String::from_utf8_lossy(&bytes);
        assert!(!text.contains(&source), "the image names {source}");
        assert!(!text.contains("\"PASSWORD\""), "the image holds the configuration");
    }
}
