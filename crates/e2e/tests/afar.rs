//! Functions that are booted before all of them is pulled (docs/decisions/0035), from a real
//! registry behind a connection that waits, breaks, stalls and lies.

#[path = "afar/bucket.rs"]
mod bucket;
#[allow(dead_code, reason = "other tests change more")]
#[path = "push/crafted.rs"]
mod crafted;
#[path = "afar/daemon_fetches.rs"]
mod daemon_fetches;
#[path = "afar/gate.rs"]
mod gate;

use crafted::Crafted;
use gate::{Gate, Mode};
use serde_json::{Value, json};
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::thread;
use std::time::{Duration, Instant};
use tempfile::TempDir;
use thaw_e2e::{
    Daemon, DaemonOptions, Registry, Response, built_home, get, prefetch_file, repository, run,
    run_within, thaw, wait_until,
};
use thaw_store::{Name, Repair, Store, Version};

/// `/` touches what its working set has; `/ballast` memory, and `/import` files, that nothing has
/// touched before. A working set is recorded when the first byte is answered, so `/` rehearses first
/// what a request does after that. One thread does all of it, and no timer wakes it, so that each
/// request for `/` touches the same pages. Each request has an instance of its own.
const PROGRAM: &str = r#"
import hashlib, http.server, random, socket, sys
sys.setswitchinterval(1000)
ballast = random.Random(7).randbytes(9 << 20)
digest = hashlib.sha256(ballast).hexdigest()
def answer(path):
    if path == "/ballast":
        return "whole" if hashlib.sha256(ballast).hexdigest() == digest else "torn"
    if path == "/import":
        import xml.dom.minidom
        return xml.dom.minidom.parseString("<far/>").documentElement.tagName
    return "here"
def rehearse():
    client, served = socket.socketpair()
    client.sendall(b"GET /rehearsal HTTP/1.1\r\nConnection: close\r\n\r\n")
    server.process_request(served, ("", 0))
    while client.recv(1000): pass
    client.close()
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        if self.path == "/": rehearse()
        body = answer(self.path).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
server = http.server.HTTPServer(("", 8080), Handler)
server.serve_forever(poll_interval=3600)
"#;

/// Pulls and builds of a whole interpreter, while other tests run.
const PATIENCE: Duration = Duration::from_secs(300);
/// Requests for blobs without which nothing can be booted: the run. The document lies in the manifest.
const NEEDED: usize = 1;
/// Pieces that a fetcher fetches in the background at a time (crates/build/src/artifact/fetcher.rs).
const BACKGROUND: usize = 3;
/// How often a request for `/` may find that its working set lacks something.
const MORE_MAX: usize = 5;

/// A home with the function, of which one request is recorded.
fn source() -> &'static Path {
    static SOURCE: OnceLock<PathBuf> = OnceLock::new();
    SOURCE.get_or_init(|| {
        let home = built_home("afar-source", &[]);
        let directory = tempfile::tempdir().expect("a directory");
        fs::write(directory.path().join("app.py"), PROGRAM).expect("app.py");
        // Nobody gives a request up but those who fetch what it needs.
        let text = "name = \"far\"\ncommand = [\"python3\", \"app.py\"]\nport = 8080\n\
                    [limits]\ntimeout = \"10m\"\n\
                    [runtime]\nkind = \"python3\"\ninterpreter = \"/usr/bin/python3\"\n";
        fs::write(directory.path().join("thaw.toml"), text).expect("thaw.toml");
        let mut build = thaw();
        build.env("THAW_HOME", &home).arg("build").arg(directory.path());
        run_within(PATIENCE, &mut build, b"").success();
        let daemon = Daemon::start(&home, &DaemonOptions::default());
        assert_eq!(get(daemon.gateway(), "far", "/").text(), "here");
        wait_until("its working set is stored", || prefetch_file(&home).is_some());
        drop(daemon);
        home
    })
}

/// The storage of a registry to which the function was pushed; to be copied.
fn pushed() -> &'static Path {
    static PUSHED: OnceLock<PathBuf> = OnceLock::new();
    PUSHED.get_or_init(|| {
        let home = source();
        let directory = home.with_extension("pushed");
        let _ = fs::remove_dir_all(&directory);
        fs::create_dir_all(&directory).expect("a directory");
        let registry = Registry::start(&directory, false);
        let mut push = thaw();
        push.env("THAW_HOME", home).args(["push", "far", &registry.image(IMAGE)]);
        run_within(PATIENCE, &mut push, b"").success();
        directory.join("registry")
    })
}

/// A registry with the function, and an empty home with a daemon.
struct Rig {
    _directory: TempDir,
    registry: Registry,
    storage: PathBuf,
    home: PathBuf,
    daemon: Daemon,
    gate: OnceLock<Gate>,
}

const IMAGE: &str = "team/far:1";

impl Rig {
    fn new(label: &str) -> Self {
        let directory = tempfile::tempdir().expect("a directory");
        run(Command::new("cp").arg("-a").arg(pushed()).arg(directory.path())).success();
        let registry = Registry::start(directory.path(), false);
        let home = built_home(label, &[]);
        let daemon = Daemon::start(&home, &DaemonOptions::default());
        let storage = directory.path().join("registry");
        let gate = OnceLock::new();
        Self { _directory: directory, registry, storage, home, daemon, gate }
    }

    fn gate(&self, mode: Mode) -> Gate {
        let gate = Gate::before(self.registry.address(), mode, NEEDED);
        assert!(self.gate.set(gate.clone()).is_ok(), "a rig has one gate");
        gate
    }

    /// The path of the run in the registry.
    fn run_path(&self) -> String {
        let manifest =
            ureq::get(format!("http://{}/v2/team/far/manifests/1", self.registry.address()))
                .header("Accept", "application/vnd.oci.image.manifest.v1+json")
                .call()
                .and_then(|answer| answer.into_body().read_json::<Value>())
                .expect("a manifest");
        let layers = manifest["layers"].as_array().expect("layers");
        let is_run =
            |layer: &&Value| layer["mediaType"].as_str().expect("a kind").contains(".run.");
        let run = layers.iter().find(is_run).expect("a run");
        format!("/v2/team/far/blobs/{}", run["digest"].as_str().expect("a digest"))
    }

    /// Begins to pull the function through the gate, and waits until it is served.
    #[track_caller]
    fn pull(&self, gate: &Gate) -> Fetcher {
        let fetcher = self.begin(gate);
        self.wait_until_served();
        fetcher
    }

    fn begin(&self, gate: &Gate) -> Fetcher {
        let mut command = thaw();
        command.env("THAW_HOME", &self.home).env_remove("DOCKER_CONFIG");
        command.args(["pull", &gate.image(IMAGE), "--lazy", "--json"]);
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        Fetcher(Some(command.spawn().expect("thaw")))
    }

    #[track_caller]
    fn wait_until_served(&self) {
        // Not by requests: so many refusals would not all be logged.
        let is_served = |functions: &Value| {
            functions.as_array().is_some_and(|all| all.iter().any(|one| one["name"] == "far"))
        };
        wait_until("the function is served", || is_served(&self.daemon.admin("/functions").json()));
    }

    fn get(&self, path: &str) -> Response {
        get(self.daemon.gateway(), "far", path)
    }

    /// A request for `/` may need a page that its working set lacks, although its program is
    /// deterministic. A gate that holds lets that pass, a few times.
    #[track_caller]
    fn answers(&self, path: &str, text: &str) {
        let gate = self.gate.get().filter(|_| path == "/");
        let before = gate.map_or(0, |gate| gate.requests().len());
        let mut answer = self.get(path);
        for _ in 0..MORE_MAX {
            let Some(gate) = gate.filter(|gate| gate.holds()) else { break };
            if answer.status != 503 || answer.json()["error"] != "unavailable" {
                break;
            }
            eprintln!("{path} lacks something: {}", self.daemon.explain(&answer));
            gate.let_pass_since(before);
            answer = self.get(path);
        }
        assert_eq!((answer.status, answer.text().as_str()), (200, text), "{path}");
    }

    #[track_caller]
    fn is_unavailable(&self, path: &str) -> String {
        let answer = self.get(path);
        assert_eq!((answer.status, answer.json()["error"].as_str()), (503, Some("unavailable")));
        assert!(answer.header("retry-after").is_some());
        self.daemon.explain(&answer)
    }

    /// The text of an answer. What has waited for the registry for too long is asked for again, as clients
    /// do that are told to try again.
    #[track_caller]
    fn get_at_last(&self, path: &str) -> String {
        let deadline = Instant::now() + PATIENCE;
        loop {
            let answer = self.get(path);
            if answer.status != 503 || answer.json()["error"] != "unavailable" {
                return answer.text();
            }
            assert!(Instant::now() < deadline, "{path}: {}", self.daemon.explain(&answer));
        }
    }

    /// The value of a metric, of which some come with what they count first.
    fn metric(&self, name: &str) -> Option<f64> {
        let text = self.daemon.admin("/metrics").text();
        text.lines().find_map(|line| line.strip_prefix(name)?.trim().parse().ok())
    }

    fn is_partial(&self) -> bool {
        self.home.join("partial/far").exists()
    }

    /// What was pulled is what was pushed, and the store is in order.
    #[track_caller]
    fn is_whole(&self) {
        Self::is_whole_in(&self.home, &|path| self.get(path));
    }

    #[track_caller]
    fn is_whole_in(home: &Path, get: &dyn Fn(&str) -> Response) {
        assert!(!home.join("partial/far").exists());
        let record = |home: &Path| {
            let store = Store::open(&home.join("store")).expect("a store");
            store.get_function(&Name::new("far").expect("a name")).expect("a function")
        };
        assert_eq!(record(home).image, record(source()).image);
        let store = Store::open(&home.join("store")).expect("a store");
        let report = store.verify(Repair::Report, &mut |_| {}).expect("a check");
        assert!(report.problems.is_empty(), "{:?}", report.problems);
        for (path, text) in [("/", "here"), ("/ballast", "whole"), ("/import", "far")] {
            let answer = get(path);
            assert_eq!((answer.status, answer.text().as_str()), (200, text), "{path}");
        }
    }

    /// The files of all pieces in the registry but those that a boot needs.
    fn pieces(&self) -> Vec<PathBuf> {
        let find = Command::new("find")
            .arg(self.storage.join("docker/registry/v2/blobs"))
            .args(["-name", "data", "-size", "+20k"])
            .output()
            .expect("find");
        let text = String::from_utf8(find.stdout).expect("UTF-8");
        let largest = |path: &PathBuf| fs::metadata(path).expect("a piece").len();
        let mut found: Vec<PathBuf> = text.lines().map(PathBuf::from).collect();
        found.sort_by_key(largest);
        found
    }
}

/// A `thaw pull --lazy`, which ends with the test.
struct Fetcher(Option<Child>);

impl Fetcher {
    /// What it prints when it has pulled all.
    #[track_caller]
    fn report(mut self) -> Value {
        let child = self.0.take().expect("it runs");
        let output = child.wait_with_output().expect("its end");
        let errors = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.success(), "{errors}");
        serde_json::from_slice(&output.stdout).expect("JSON")
    }

    fn kill(mut self) {
        let mut child = self.0.take().expect("it runs");
        child.kill().expect("it runs");
        child.wait().expect("its end");
    }
}

impl Drop for Fetcher {
    fn drop(&mut self) {
        if let Some(mut child) = self.0.take() {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

fn number(value: &Value, key: &str) -> u64 {
    value[key].as_u64().unwrap_or_else(|| panic!("{key} of {value}"))
}

#[test]
fn a_function_answers_before_all_of_it_is_here() {
    let rig = Rig::new("afar-hold");
    let gate = rig.gate(Mode::Hold);
    let fetcher = rig.pull(&gate);
    rig.answers("/", "here");
    assert!(rig.is_partial());
    rig.answers("/", "here");
    wait_until("the background waits", || gate.blobs() >= NEEDED + BACKGROUND);
    // Whoever touches more waits until it is here, and others do not wait for him.
    let is_open = AtomicBool::new(false);
    thread::scope(|scope| {
        let (rig, is_open) = (&rig, &is_open);
        let waiting = ["/ballast", "/import"].map(|path| {
            scope.spawn(move || {
                let text = rig.get_at_last(path);
                assert!(is_open.load(SeqCst), "{path} had nothing to answer with: {text}");
                text
            })
        });
        wait_until("both wait", || rig.metric("thaw_partial_parts_waiting") >= Some(2.0));
        rig.answers("/", "here");
        is_open.store(true, SeqCst);
        gate.set(Mode::Pass);
        let texts = waiting.map(|request| request.join().expect("an answer"));
        assert_eq!(texts, ["whole", "far"]);
    });
    wait_until("nobody waits", || rig.metric("thaw_partial_parts_waiting") == Some(0.0));
    let report = fetcher.report();
    assert_eq!((&report["function"], &report["refrozen"]), (&"far".into(), &Value::Null));
    rig.is_whole();
    // Nothing is moved again.
    let asked = gate.asked();
    let again = rig.begin(&gate).report();
    assert_eq!(again["moved"], 0, "{again}");
    assert!(gate.asked() - asked <= NEEDED, "{}", gate.asked() - asked);
}

/// A connection, the manifest with the document in it, the run.
#[test]
fn a_first_pull_takes_three_round_trips() {
    let rig = Rig::new("afar-trips");
    let gate = rig.gate(Mode::Hold);
    let _fetcher = rig.pull(&gate);
    let requests = gate.requests();
    assert_eq!(requests[0], (0, "/v2/team/far/manifests/1".to_owned()));
    assert!(requests[1].0 == 0 && requests[1].1.contains("/blobs/sha256:"), "{requests:?}");
    // What is not needed for a boot comes after that.
    assert_eq!(requests[1].1, rig.run_path(), "{requests:?}");
}

#[test]
fn connections_that_break_in_the_middle_are_made_again() {
    let rig = Rig::new("afar-break");
    let gate = rig.gate(Mode::Hold);
    let fetcher = rig.pull(&gate);
    gate.set(Mode::Break(6));
    rig.answers("/ballast", "whole");
    rig.answers("/import", "far");
    fetcher.report();
    rig.is_whole();
}

#[test]
fn whoever_needs_what_is_not_to_be_had_is_told_so_and_may_try_again() {
    let rig = Rig::new("afar-cut");
    let gate = rig.gate(Mode::Cut);
    let fetcher = rig.pull(&gate);
    let told = rig.is_unavailable("/ballast");
    assert!(told.contains("could not be fetched"), "{told}");
    // It is no fault of the function, and others are served.
    rig.answers("/", "here");
    rig.is_unavailable("/import");
    gate.set(Mode::Pass);
    rig.answers("/ballast", "whole");
    rig.answers("/import", "far");
    fetcher.report();
    rig.is_whole();
}

#[test]
fn a_registry_that_stalls_holds_nobody_for_ever() {
    let rig = Rig::new("afar-stall");
    let gate = rig.gate(Mode::Stall);
    let fetcher = rig.pull(&gate);
    let told = rig.is_unavailable("/ballast");
    assert!(told.contains("sends nothing more"), "{told}");
    gate.set(Mode::Pass);
    rig.answers("/ballast", "whole");
    fetcher.report();
    rig.is_whole();
}

#[test]
fn pieces_that_lie_reach_nobody() {
    let rig = Rig::new("afar-lie");
    let gate = rig.gate(Mode::Hold);
    let fetcher = rig.pull(&gate);
    let right: Vec<_> =
        rig.pieces().into_iter().map(|path| (fs::read(&path).expect("it"), path)).collect();
    assert!(right.len() > 10);
    for (bytes, path) in &right {
        let mut lie = bytes.clone();
        lie.iter_mut().skip(100).step_by(1000).for_each(|byte| *byte ^= 1);
        fs::write(path, lie).expect("a lie");
    }
    gate.set(Mode::Pass);
    let told = rig.is_unavailable("/ballast");
    assert!(told.contains("is damaged"), "{told}");
    rig.is_unavailable("/import");
    for (bytes, path) in &right {
        fs::write(path, bytes).expect("the truth");
    }
    rig.answers("/ballast", "whole");
    rig.answers("/import", "far");
    fetcher.report();
    rig.is_whole();
}

#[test]
fn a_daemon_that_is_killed_in_the_middle_goes_on() {
    let mut rig = Rig::new("afar-killed");
    let gate = rig.gate(Mode::Hold);
    let fetcher = rig.pull(&gate);
    rig.answers("/", "here");
    thread::scope(|scope| {
        let gateway = rig.daemon.gateway();
        // It may get anything but a wrong answer.
        let lost = scope.spawn(move || thaw_e2e::request(gateway, "far", "/ballast", None));
        wait_until("something more is asked for", || gate.asked() > NEEDED);
        rig.daemon.kill_and_await_next();
        if let Ok(answer) = lost.join().expect("a request") {
            assert_ne!(answer.status, 200, "{}", answer.text());
        }
    });
    rig.wait_until_served();
    rig.answers("/", "here");
    gate.set(Mode::Pass);
    rig.answers("/ballast", "whole");
    fetcher.report();
    rig.is_whole();
}

#[test]
fn a_full_disk_is_named_and_left_when_there_is_room() {
    let rig = Rig::new("afar-full");
    let gate = rig.gate(Mode::Hold);
    let fetcher = rig.pull(&gate);
    let pieces = rig.home.join("pieces/shared");
    let small = ["-t", "tmpfs", "-o", "size=64k,mode=0777", "none"];
    run(Command::new("mount").args(small).arg(&pieces)).success();
    struct Unmount<'a>(&'a Path);
    impl Drop for Unmount<'_> {
        fn drop(&mut self) {
            run(Command::new("umount").arg("-l").arg(self.0));
        }
    }
    let mounted = Unmount(&pieces);
    gate.set(Mode::Pass);
    let told = rig.is_unavailable("/ballast");
    assert!(told.contains("no room is left") && told.contains("thaw gc"), "{told}");
    rig.answers("/", "here");
    drop(mounted);
    rig.answers("/ballast", "whole");
    fetcher.report();
    rig.is_whole();
}

#[test]
fn a_version_that_was_pulled_whole_meanwhile_is_served() {
    let rig = Rig::new("afar-newer");
    let gate = rig.gate(Mode::Hold);
    let fetcher = rig.pull(&gate);
    fetcher.kill();
    // It may be about to, or pause.
    wait_until("the daemon fetches", || ["waiting", "fetching"].contains(&&*pull_state(&rig)));
    let mut pull = thaw();
    pull.env("THAW_HOME", &rig.home).args(["pull", &rig.registry.image(IMAGE)]);
    run_within(PATIENCE, &mut pull, b"").success();
    rig.answers("/ballast", "whole");
    rig.answers("/import", "far");
    // Nobody puts the older one in its place, also where all that it waited for is here now.
    let ended = ["cancelled", "done"];
    wait_until("it is fetched no more", || ended.contains(&&*pull_state(&rig)));
    rig.answers("/ballast", "whole");
    assert_eq!(rig.daemon.admin("/functions/far").json()["version"], 1);
}

/// One that pulls all of another function uses the pieces of its sharing domain for as long as its registry
/// likes.
#[test]
fn a_pull_that_is_not_lazy_holds_up_no_lazy_one() {
    let rig = Rig::new("afar-locked");
    let gate = rig.gate(Mode::Hold);
    let fetcher = rig.pull(&gate);
    let pieces = rig.home.join("pieces/shared");
    let lock = pieces.join("lock");
    let file = fs::File::options().create(true).append(true).open(&lock).expect("a lock");
    let owner = fs::metadata(&pieces).expect("a directory");
    assert_eq!(owner.mode() & 0o777, 0o700, "nobody else reads them");
    std::os::unix::fs::chown(&lock, Some(owner.uid()), Some(owner.gid())).expect("an owner");
    file.lock().expect("nobody has it");
    gate.set(Mode::Pass);
    fetcher.report();
    rig.is_whole();
    file.unlock().expect("it is held until here");
}

/// Where the last pull of the daemon stands.
fn pull_state(rig: &Rig) -> String {
    let pulls = rig.daemon.admin("/pulls").json();
    let last = pulls.as_array().and_then(|all| all.last()).cloned().unwrap_or_default();
    last["state"].as_str().unwrap_or_default().to_owned()
}

#[test]
fn runs_that_make_no_sense_are_refused_before_anything_is_served() {
    type Change = fn(&mut Crafted<'_>);
    let changes: [(&str, Change, &str); 5] = [
        (
            "layout",
            |crafted| crafted.document["run"]["layout"] = json!("0".repeat(64)),
            "another version of Thaw",
        ),
        (
            "pages",
            |crafted| {
                let pages = crafted.document["run"]["pages"].as_u64().expect("a number");
                crafted.document["run"]["pages"] = json!(pages + 4096);
            },
            "not as long as its document says",
        ),
        (
            "pieces",
            |crafted| {
                let first = crafted.document["pieces"]["image"][0].as_u64().expect("a number");
                crafted.document["pieces"]["image"][0] = json!(first - 4096);
            },
            "contradicts itself",
        ),
        (
            "index",
            |crafted| {
                let at = crafted.document["run"]["working_set"].as_u64().expect("a number");
                let piece = crafted.pieces("function.run")[0];
                let mut run = crafted.piece(piece);
                run[at as usize + 100] ^= 1;
                crafted.replace(piece, &run);
            },
            "of its index",
        ),
        (
            "missing",
            |crafted| {
                let piece = crafted.pieces("function.run")[0];
                crafted.layers().remove(piece);
            },
            "has no run",
        ),
    ];
    let rig = Rig::new("afar-hostile");
    let good = Crafted::read(&rig.registry, "team/far", "1");
    for (name, change, expected) in changes {
        let mut crafted = good.clone();
        change(&mut crafted);
        let mut pull = thaw();
        pull.env("THAW_HOME", &rig.home).args(["pull", &crafted.push(name), "--lazy"]);
        let refused = run_within(PATIENCE, &mut pull, b"");
        assert_eq!(refused.code, Some(1), "{name}: {}", refused.stdout);
        assert!(refused.stderr.contains(expected), "{name}: {}", refused.stderr);
        assert!(!rig.is_partial(), "{name}");
        assert_eq!(rig.get("/").status, 404, "{name}");
    }
}

#[test]
fn what_needs_all_of_an_instance_is_refused_while_some_is_missing() {
    let rig = Rig::new("afar-refused");
    let gate = rig.gate(Mode::Hold);
    let fetcher = rig.pull(&gate);
    let mut again = rig.begin(&gate).0.take().expect("it runs");
    let code = again.wait().expect("its end").code();
    assert_eq!(code, Some(1), "two fetchers of one function");
    let verb = |arguments: &[&str]| {
        let mut command = thaw();
        command.env("THAW_HOME", &rig.home).args(arguments);
        run(&mut command)
    };
    let removed = verb(&["remove", "far"]);
    assert!(removed.stderr.contains("is being pulled"), "{}", removed.stderr);
    rig.answers("/", "here");
    // What it was, if nobody wants it any more, is removed by its name.
    fetcher.kill();
    rig.answers("/", "here");
    // Not while the daemon begins to fetch it, or has just ended that.
    wait_until("it is removed", || verb(&["remove", "far"]).code == Some(0));
    assert!(!rig.is_partial());
    assert_eq!(rig.get("/").status, 404);
}

/// Runs a verb of `thaw` in the home of a rig.
#[track_caller]
fn verb(rig: &Rig, arguments: &[&str]) {
    let mut command = thaw();
    command.env("THAW_HOME", &rig.home).args(arguments);
    run_within(PATIENCE, &mut command, b"").success();
}

#[test]
fn a_kernel_build_that_only_a_partial_function_needs_stays() {
    let rig = Rig::new("afar-kernel");
    let kernels = |home: &Path| -> Vec<PathBuf> {
        let entries = fs::read_dir(home.join("store/kernels")).expect("a store");
        entries.map(|entry| entry.expect("a kernel build").path()).collect()
    };
    let kernel = kernels(source()).pop().expect("the function needs one");
    let elf = fs::read(kernel).expect("a kernel build");
    let store = Store::open(&rig.home.join("store")).expect("a store");
    store.session().and_then(|mut session| session.put_kernel(&elf)).expect("room");
    let fetcher = rig.pull(&rig.gate(Mode::Hold));
    verb(&rig, &["gc"]);
    assert_eq!(kernels(&rig.home).len(), 1);
    fetcher.kill();
    // Not while the daemon begins to fetch it, or has just ended that.
    wait_until("it is removed", || {
        let mut remove = thaw();
        run(remove.env("THAW_HOME", &rig.home).args(["remove", "far"])).code == Some(0)
    });
    verb(&rig, &["gc"]);
    assert_eq!(kernels(&rig.home).len(), 0);
}

#[test]
fn a_partial_directory_that_is_damaged_or_older_hides_no_stored_function() {
    let mut rig = Rig::new("afar-hidden");
    let gate = rig.gate(Mode::Hold);
    rig.pull(&gate).kill();
    // Otherwise the daemon may complete it with what the other pull fetches.
    daemon_fetches::leave_alone(&rig);
    let mut pull = thaw();
    pull.env("THAW_HOME", &rig.home).args(["pull", &rig.registry.image(IMAGE)]);
    run_within(PATIENCE, &mut pull, b"").success();
    let store = Store::open(&rig.home.join("store")).expect("a store");
    let far = Name::new("far").expect("a name");
    let stored_ms = store.get_function(&far).expect("a function").created_ms;
    // As if it had been pulled after that.
    let path = rig.home.join("partial/far/record.json");
    let mut record: Value =
        serde_json::from_slice(&fs::read(&path).expect("a record")).expect("JSON");
    record["created_ms"] = json!(stored_ms + 1000);
    fs::write(&path, record.to_string()).expect("a record");
    // What the other pull has fetched is not to be had again.
    fs::remove_dir_all(rig.home.join("pieces")).expect("pieces");
    gate.set(Mode::Cut);
    rig.daemon.kill_and_await_next();
    rig.wait_until_served();
    rig.is_unavailable("/ballast");
    // What the operator went back from is newer still.
    let mut session = store.session().expect("a session");
    let newer = |record: &mut thaw_store::FunctionRecord| -> Result<(), thaw_store::StoreError> {
        let number = record.number + 1;
        let version = Version { number, created_ms: stored_ms + 2000, ..record.active() };
        record.others.push(version);
        Ok(())
    };
    session.change_function(&far, newer).expect("a version");
    rig.daemon.kill_and_await_next();
    rig.wait_until_served();
    rig.answers("/ballast", "whole");
    // One that cannot be booted does not count.
    let gone = |record: &mut thaw_store::FunctionRecord| -> Result<(), thaw_store::StoreError> {
        record.others.clear();
        Ok(())
    };
    session.change_function(&far, gone).expect("no version");
    drop(session);
    fs::write(rig.home.join("partial/far/index"), b"damaged").expect("damage");
    rig.daemon.kill_and_await_next();
    rig.wait_until_served();
    rig.answers("/ballast", "whole");
    rig.answers("/import", "far");
}

#[test]
fn partial_functions_get_their_secrets() {
    let rig = Rig::new("afar-secrets");
    let home = built_home("afar-secrets-source", &[]);
    let directory = tempfile::tempdir().expect("a directory");
    let program = repository().join("tests/guest/functions/secretive.py");
    fs::copy(program, directory.path().join("app.py")).expect("a copy");
    let text = "name = \"far\"\ncommand = [\"python3\", \"app.py\"]\nport = 8080\n\
                [secrets]\nnames = [\"database\"]\n\
                [runtime]\nkind = \"python3\"\ninterpreter = \"/usr/bin/python3\"\n";
    fs::write(directory.path().join("thaw.toml"), text).expect("thaw.toml");
    let run_in = |home: &Path, arguments: &[&str], input: &[u8]| {
        run_within(PATIENCE, thaw().env("THAW_HOME", home).args(arguments), input).success();
    };
    run_in(&home, &["build", directory.path().to_str().expect("UTF-8")], b"");
    run_in(&home, &["secret", "set", "far", "database"], b"of the source");
    let daemon = Daemon::start(&home, &DaemonOptions::default());
    assert_eq!(get(daemon.gateway(), "far", "/").json()["now"]["database"], "of the source");
    wait_until("its working set is stored", || prefetch_file(&home).is_some());
    drop(daemon);
    run_in(&home, &["push", "far", &rig.registry.image(IMAGE)], b"");
    let gate = rig.gate(Mode::Hold);
    let _fetcher = rig.pull(&gate);
    let refused = rig.get("/");
    let explained = rig.daemon.explain(&refused);
    assert!(explained.contains("thaw secret set far database"), "{explained}");
    run_in(&rig.home, &["secret", "set", "far", "database"], b"of this node");
    assert_eq!(rig.get("/").json()["now"]["database"], "of this node");
    assert!(rig.is_partial());
}
