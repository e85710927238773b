//! `thaw dev`: builds and serves again whenever files change, until it is told to end.

use rustix::process::{Pid, Signal, kill_process};
use std::fs;
use std::io::{BufRead, BufReader};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::sync::mpsc::{self, Receiver};
use std::thread;
use std::time::Duration;
use tempfile::TempDir;
use thaw_e2e::{Daemon, DaemonOptions, descendants, free_port, get, run, thaw, wait_until};

/// How long something may take that is waited for.
const PATIENCE: Duration = Duration::from_secs(120);

const SERVER: &str = "import http.server\nprint('loading')\nclass Handler(http.server.BaseHTTPRequestHandler):\n    \
    def do_GET(self):\n        print('was asked', flush=True)\n        self.send_response(200)\n        \
    self.end_headers()\n        self.wfile.write(b'WORD')\n    def log_message(self, *_): pass\n\
    http.server.HTTPServer(('', 8080), Handler).serve_forever()\n";

/// A running `thaw dev`, and what it prints.
struct Dev {
    child: Child,
    lines: Receiver<String>,
    heard: Vec<String>,
}

impl Dev {
    fn start(home: &Path, directory: &Path, port: u16) -> Self {
        let mut command = thaw();
        command.env("THAW_HOME", home).args([
            "dev",
            "--weak-limits",
            "--quiet",
            "50ms",
            "--listen",
        ]);
        command.arg(format!("127.0.0.1:{port}")).arg(directory).stdin(Stdio::null());
        let mut child =
            command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("thaw dev");
        let (sender, lines) = mpsc::channel();
        let streams: [Box<dyn std::io::Read + Send>; 2] = [
            Box::new(child.stdout.take().expect("a pipe")),
            Box::new(child.stderr.take().expect("a pipe")),
        ];
        for stream in streams {
            let sender = sender.clone();
            thread::spawn(move || {
                for line in BufReader::new(stream).lines().map_while(Result::ok) {
                    let _ = sender.send(line);
                }
            });
        }
        Self { child, lines, heard: Vec::new() }
    }

    /// Waits for a line that has this in it.
    #[track_caller]
    fn hear(&mut self, text: &str) -> String {
        loop {
            match self.lines.recv_timeout(PATIENCE) {
                Ok(line) => {
                    self.heard.push(line.clone());
                    if line.contains(text) {
                        return line;
                    }
                }
                Err(_) => panic!("nothing of `{text}` in\n{}", self.heard.join("\n")),
            }
        }
    }

    /// Ends it as Ctrl-C does; its exit code.
    fn interrupt(mut self) -> Option<i32> {
        let pid = Pid::from_child(&self.child);
        let below = descendants(self.child.id());
        kill_process(pid, Signal::INT).expect("it runs");
        self.hear("dev: stopped");
        let code = self.child.wait().expect("our child").code();
        wait_until("all that it started has ended", || {
            below.iter().all(|process| !thaw_e2e::exists(process.pid))
        });
        code
    }
}

impl Drop for Dev {
    fn drop(&mut self) {
        let _ = kill_process(Pid::from_child(&self.child), Signal::TERM);
        let _ = self.child.wait();
    }
}

struct Place {
    all: TempDir,
    port: u16,
}

impl Place {
    fn new() -> Self {
        let place = Self { all: tempfile::tempdir().expect("a directory"), port: free_port() };
        fs::create_dir(place.home()).expect("a directory");
        fs::create_dir(place.directory()).expect("a directory");
        place.write("one");
        let directory = place.directory();
        let mut init = thaw();
        init.arg("init").arg(&directory);
        let outcome = run(&mut init);
        assert_eq!(outcome.code, Some(0), "{}", outcome.stderr);
        place
    }

    fn home(&self) -> PathBuf {
        self.all.path().join("home")
    }

    fn directory(&self) -> PathBuf {
        self.all.path().join("shop")
    }

    /// The server that answers with a word.
    fn write(&self, word: &str) {
        fs::write(self.directory().join("app.py"), SERVER.replace("WORD", word)).expect("a file");
    }

    fn answer(&self) -> String {
        get(SocketAddr::from(([127, 0, 0, 1], self.port)), "shop", "/").text()
    }

    fn start(&self) -> Dev {
        Dev::start(&self.home(), &self.directory(), self.port)
    }
}

#[test]
fn changes_are_built_errors_are_shown_and_the_old_version_goes_on() {
    let place = Place::new();
    let mut dev = place.start();
    let line = dev.hear("serving shop: ");
    assert!(line.contains(&format!("http://shop.localhost:{}/", place.port)), "{line}");
    assert_eq!(place.answer(), "one");
    dev.hear("] was asked");
    place.write("two");
    dev.hear("dev: app.py changed");
    dev.hear("serving shop: ");
    wait_until("the next version answers", || place.answer() == "two");
    // An error is shown, and does no harm.
    fs::write(place.directory().join("app.py"), "import nothing_like_this\n").expect("a file");
    dev.hear("No module named 'nothing_like_this'");
    dev.hear("the version before goes on");
    assert_eq!(place.answer(), "two");
    // Neither does one in thaw.toml.
    let toml = place.directory().join("thaw.toml");
    let text = fs::read_to_string(&toml).expect("a file");
    fs::write(&toml, text.replace("port = ", "prot = ")).expect("a file");
    dev.hear("prot");
    dev.hear("the version before goes on");
    fs::write(&toml, text).expect("a file");
    place.write("three");
    dev.hear("serving shop: ");
    wait_until("the last version answers", || place.answer() == "three");
    assert_eq!(dev.interrupt(), Some(0));
}

#[test]
fn what_the_build_makes_starts_no_other_and_a_first_failure_waits() {
    let place = Place::new();
    let toml = place.directory().join("thaw.toml");
    let text = fs::read_to_string(&toml).expect("a file");
    let build = "\n[build]\ncommand = [\"sh\", \"-c\", \"test -e fine && date +%N > made\"]\n";
    fs::write(&toml, text + build).expect("a file");
    let mut dev = place.start();
    dev.hear("the build failed; waiting for a change");
    fs::write(place.directory().join("fine"), "").expect("a file");
    dev.hear("serving shop: ");
    let versions = || {
        let mut list = thaw();
        list.env("THAW_HOME", place.home()).args(["versions", "shop", "--json"]);
        let outcome = run(&mut list);
        let json: serde_json::Value = serde_json::from_str(&outcome.stdout).expect("JSON");
        json["versions"].as_array().expect("an array").len()
    };
    let first = versions();
    let words = ["two", "three", "four", "five"];
    for word in words {
        place.write(word);
        wait_until("the change is served", || place.answer() == word);
    }
    // The file that the second build made is new to it: one further build finds that out, sooner or later.
    assert!(versions() <= first + words.len() + 1, "{} versions after {first}", versions());
    assert_eq!(dev.interrupt(), Some(0));
}

#[test]
fn a_daemon_that_runs_is_used_and_left_alone() {
    let place = Place::new();
    let daemon = Daemon::start(&place.home(), &DaemonOptions::default());
    let mut dev = place.start();
    let line = dev.hear("serving shop: ");
    assert!(line.contains(&daemon.gateway().port().to_string()), "{line}");
    assert_eq!(get(daemon.gateway(), "shop", "/").text(), "one");
    assert_eq!(dev.interrupt(), Some(0));
    assert_eq!(get(daemon.gateway(), "shop", "/").text(), "one");
}

#[test]
fn a_directory_without_a_function_is_refused_with_the_way_out() {
    let place = tempfile::tempdir().expect("a directory");
    let mut dev = thaw();
    dev.env("THAW_HOME", place.path()).arg("dev").arg(place.path());
    let outcome = run(&mut dev);
    assert_eq!(outcome.code, Some(1));
    assert!(outcome.stderr.contains("`thaw init "), "{}", outcome.stderr);
}
