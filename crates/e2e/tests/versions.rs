//! Versions of a function: which there are, which gets a request, and what becomes of the
//! connections of one that gets none any more.

use serde_json::Value;
use std::collections::BTreeMap;
use std::fs;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::thread;
use std::time::Duration;
use thaw_e2e::{
    Daemon, DaemonOptions, Heard, Outcome, Raw, built_home, free_port, get, repository, run, thaw,
    wait_until,
};

const FUNCTION: &str = "versioned";

/// How a version is built.
#[derive(Clone, Copy, Default)]
struct Build<'a> {
    /// Top-level keys.
    keys: &'a str,
    /// Keys of `[limits]`.
    limits: &'a str,
    /// Further tables.
    tables: &'a str,
    /// Options of `thaw build`.
    options: &'a [&'a str],
}

impl Build<'_> {
    /// A version that stays and serves many at a time.
    const SHARED: Build<'static> = Build {
        keys: "isolation = \"instance\"",
        limits: "concurrency = 64",
        tables: "",
        options: &[],
    };

    /// Builds a version that answers with its name.
    fn version(&self, home: &Path, name: &str) -> Outcome {
        let directory = tempfile::tempdir().expect("a directory");
        let program = repository().join("tests/guest/functions/versioned.py");
        fs::copy(program, directory.path().join("app.py")).expect("a copy");
        let Self { keys, limits, tables, options } = self;
        let text = format!(
            "name = \"{FUNCTION}\"\ncommand = [\"python3\", \"app.py\", \"{name}\"]\nport = 8080\n\
             files = [\"app.py\"]\n{keys}\n[limits]\n{limits}\n{tables}\n\
             [runtime]\nkind = \"python3\"\ninterpreter = \"/usr/bin/python3\"\n"
        );
        fs::write(directory.path().join("thaw.toml"), text).expect("thaw.toml");
        let mut build = thaw();
        build.env("THAW_HOME", home).args(["build", "--quiet", "--weak-limits"]).args(*options);
        run(build.arg(directory.path()))
    }

    /// A store with these versions, the last of which is active.
    fn home(&self, label: &str, versions: &[&str]) -> PathBuf {
        let home = built_home(label, &[]);
        for version in versions {
            self.version(&home, version).success();
        }
        home
    }
}

fn command(home: &Path, arguments: &[&str]) -> Outcome {
    run(thaw().env("THAW_HOME", home).args(arguments))
}

#[track_caller]
fn versions(home: &Path) -> Value {
    let said = command(home, &["versions", FUNCTION, "--json"]).success();
    serde_json::from_str(&said).expect("JSON")
}

/// Numbers of all versions.
#[track_caller]
fn numbers(home: &Path) -> Vec<u64> {
    let all = versions(home);
    let all = all["versions"].as_array().expect("an array");
    all.iter().map(|version| version["number"].as_u64().expect("a number")).collect()
}

/// Which version answers a request on a connection of its own.
#[track_caller]
fn asked(daemon: &Daemon) -> String {
    let response = get(daemon.gateway(), FUNCTION, "/");
    assert_eq!(response.status, 200, "{}", response.text());
    response.text()
}

/// A request on a connection that is kept.
fn kept_request(connection: &mut Raw, path: &str, header: &str) -> Option<(u16, String)> {
    let head = format!("GET {path} HTTP/1.1\r\nHost: {FUNCTION}\r\n{header}\r\n");
    let response = connection.send(head).response()?;
    Some((response.status, response.text()))
}

/// Asks on kept connections and on new ones until it is told to stop; how often which version
/// has answered, and what went wrong.
struct Load {
    stop: AtomicBool,
    answers: Mutex<BTreeMap<String, u32>>,
    wrong: Mutex<Vec<String>>,
}

impl Load {
    fn new() -> Self {
        Self { stop: AtomicBool::new(false), answers: Mutex::default(), wrong: Mutex::default() }
    }

    fn note(&self, answer: Option<(u16, String)>) {
        match answer {
            Some((200, version)) => *self.answers.lock().unwrap().entry(version).or_default() += 1,
            other => {
                self.wrong.lock().unwrap().push(format!("{other:?}"));
                // Nothing more is to be learnt.
                self.stop.store(true, Relaxed);
            }
        }
    }

    fn on_kept_connections(&self, gateway: SocketAddr) {
        let mut connection = Raw::connect(gateway);
        while !self.stop.load(Relaxed) {
            self.note(kept_request(&mut connection, "/", ""));
        }
    }

    fn on_new_connections(&self, gateway: SocketAddr) {
        while !self.stop.load(Relaxed) {
            let answer = kept_request(&mut Raw::connect(gateway), "/", "Connection: close\r\n");
            self.note(answer);
        }
    }

    fn count(&self, version: &str) -> u32 {
        self.answers.lock().unwrap().get(version).copied().unwrap_or_default()
    }

    /// Waits until a version has answered some more requests.
    #[track_caller]
    fn hears_of(&self, version: &str) {
        let before = self.count(version);
        wait_until(&format!("{version} answers"), || {
            assert_eq!(*self.wrong.lock().unwrap(), Vec::<String>::new());
            self.count(version) > before + 10
        });
    }
}

/// Has the clients of a load end, also if something else fails.
struct Ending<'a>(&'a Load);

impl Drop for Ending<'_> {
    fn drop(&mut self) {
        self.0.stop.store(true, Relaxed);
    }
}

/// Changes what is served while clients ask.
fn nothing_fails(build: &Build<'_>, label: &str) {
    let home = build.home(label, &["one", "two"]);
    let daemon = Daemon::start(&home, &DaemonOptions::default());
    let load = Load::new();
    thread::scope(|scope| {
        let _ending = Ending(&load);
        for _ in 0..2 {
            scope.spawn(|| load.on_kept_connections(daemon.gateway()));
            scope.spawn(|| load.on_new_connections(daemon.gateway()));
        }
        load.hears_of("two");
        command(&home, &["activate", FUNCTION, "1"]).success();
        load.hears_of("one");
        command(&home, &["rollback", FUNCTION]).success();
        load.hears_of("two");
        build.version(&home, "three").success();
        load.hears_of("three");
        command(&home, &["split", FUNCTION, "1", "--percent", "50"]).success();
        load.hears_of("one");
        command(&home, &["rollback", FUNCTION]).success();
        command(&home, &["rollback", FUNCTION]).success();
        load.hears_of("two");
    });
    assert_eq!(*load.wrong.lock().unwrap(), Vec::<String>::new());
    // Nothing of the others is left, and what answers is what should.
    wait_until("only the active version has instances", || {
        daemon.instances(FUNCTION).iter().all(|instance| instance["version"] == 2)
    });
    assert_eq!(asked(&daemon), "two");
}

#[test]
fn no_request_fails_when_versions_change() {
    nothing_fails(&Build::SHARED, "versions-shared");
}

#[test]
fn no_request_fails_when_each_has_an_instance() {
    nothing_fails(&Build { limits: "queue = \"20s\"", ..Build::default() }, "versions-single");
}

#[test]
fn requests_are_split_by_percent_and_by_header() {
    let home = Build::SHARED.home("versions-split", &["one", "two"]);
    let daemon = Daemon::start(&home, &DaemonOptions::default());
    let split = ["split", FUNCTION, "1", "--percent", "25", "--header", "X-Canary=yes"];
    command(&home, &split).success();
    let mut connection = Raw::connect(daemon.gateway());
    let count = 800;
    let ones = (0..count)
        .filter(|_| {
            let answer = kept_request(&mut connection, "/", "").expect("an answer");
            assert_eq!(answer.0, 200);
            answer.1 == "one"
        })
        .count();
    // Six standard deviations of a binomial distribution with p = 1/4.
    assert!((126..=274).contains(&ones), "{ones} of {count}");
    for header in ["X-Canary: yes\r\n", "x-canary:yes\r\nConnection: close\r\n"] {
        for _ in 0..20 {
            let mut connection = Raw::connect(daemon.gateway());
            assert_eq!(kept_request(&mut connection, "/", header), Some((200, "one".into())));
        }
    }
    // The second request of a connection finds its own way.
    let mut both = Raw::connect(daemon.gateway());
    let canary = "X-Canary: yes\r\n";
    assert_eq!(kept_request(&mut both, "/", canary), Some((200, "one".into())));
    let other = "X-Canary: no\r\n";
    let two = Some((200, "two".to_owned()));
    assert!((0..100).any(|_| kept_request(&mut both, "/", other) == two));
    let known = versions(&home);
    assert_eq!(
        (&known["versions"][0]["percent"], &known["versions"][1]["percent"]),
        (&25.into(), &75.into())
    );
    assert!(known["versions"][0]["requests"]["all"].as_u64() > Some(100), "{known}");
    // It is so in the next daemon, too.
    assert_eq!(daemon.stop(), Some(0));
    let daemon = Daemon::start(&home, &DaemonOptions::default());
    let mut connection = Raw::connect(daemon.gateway());
    assert_eq!(kept_request(&mut connection, "/", canary), Some((200, "one".into())));
    command(&home, &["split", FUNCTION, "1", "--percent", "0"]).success();
    let mut connection = Raw::connect(daemon.gateway());
    assert_eq!(kept_request(&mut connection, "/", canary), Some((200, "two".into())));
}

#[test]
fn a_version_that_fails_is_taken_out_of_service() {
    let watched = Build {
        tables: "[rollback]\npercent = 20\nrequests = 10\nwindow = \"30s\"",
        ..Build::SHARED
    };
    let home = watched.home("versions-rollback", &["good"]);
    let daemon = Daemon::start(&home, &DaemonOptions::default());
    // Below the bound, and errors of clients.
    for _ in 0..15 {
        asked(&daemon);
    }
    assert_eq!(get(daemon.gateway(), FUNCTION, "/fail").status, 500);
    watched.version(&home, "bad").success();
    wait_until("the version before answers", || {
        let answer = get(daemon.gateway(), FUNCTION, "/").text();
        answer == "good" && versions(&home)["rolled_back"]["version"] == 2
    });
    let known = versions(&home);
    assert_eq!(known["active"], 1, "{known}");
    let problem = known["versions"][1]["problem"].as_str().expect("a problem");
    assert!(problem.contains("requests failed within 30s, more than 20 percent"), "{problem}");
    wait_until("the function has a problem", || {
        let functions = daemon.admin("/functions").json();
        let problem = functions[0]["problem"].as_str().unwrap_or_default();
        problem.starts_with("version 2 was taken out of service")
    });
    wait_until("it is said", || daemon.log().contains("took the version out of service"));
    wait_until("it is counted", || {
        let line = "thaw_rollbacks_total{function=\"versioned\"} 1";
        daemon.admin("/metrics").text().contains(line)
    });
    // One with a share only.
    let later = Build { options: &["--no-activate", "--label", "canary"], ..watched };
    later.version(&home, "bad too").success();
    command(&home, &["split", FUNCTION, "canary", "--percent", "50"]).success();
    let has_no_problem = || daemon.admin("/functions").json()[0]["problem"].is_null();
    wait_until("the problem is forgotten", has_no_problem);
    wait_until("it has no share any more", || {
        // Enough of them have to fail within the window, however long a command takes.
        (0..10).for_each(|_| drop(get(daemon.gateway(), FUNCTION, "/")));
        versions(&home)["versions"][2]["percent"] == 0
    });
    let known = versions(&home);
    assert_eq!((&known["active"], &known["rolled_back"]["version"]), (&1.into(), &3.into()));
    for _ in 0..20 {
        assert_eq!(asked(&daemon), "good");
    }
    // The only one that answers stays, however bad.
    command(&home, &["activate", FUNCTION, "2"]).success();
    wait_until("the problem is forgotten", has_no_problem);
}

#[test]
fn the_newest_versions_are_kept() {
    let home = Build::default().home("versions-gc", &["one", "two", "three", "four", "five"]);
    let later = Build { options: &["--no-activate", "--label", "next"], ..Build::default() };
    let said = later.version(&home, "six").success();
    assert!(said.contains("built version 6 of versioned"), "{said}");
    assert_eq!(versions(&home)["active"], 5);
    command(&home, &["split", FUNCTION, "1", "--percent", "1"]).success();
    let said = command(&home, &["gc", "--dry-run", "--json"]).success();
    let said: Value = serde_json::from_str(&said).expect("JSON");
    assert_eq!(said["versions"], 2, "{said}");
    command(&home, &["gc"]).success();
    assert_eq!(numbers(&home), [1, 4, 5, 6]);
    command(&home, &["activate", FUNCTION, "next"]).success();
    command(&home, &["gc", "--keep", "1"]).success();
    assert_eq!(numbers(&home), [5, 6], "the one to go back to stays");
    let daemon = Daemon::start(&home, &DaemonOptions::default());
    assert_eq!(asked(&daemon), "six");
    command(&home, &["rollback", FUNCTION]).success();
    assert_eq!(asked(&daemon), "five");
}

#[test]
fn what_cannot_be_done_is_said() {
    let home = Build::default().home("versions-refused", &["one", "two"]);
    let daemon = Daemon::start(&home, &DaemonOptions::default());
    let refused = |arguments: &[&str], why: &str| {
        let outcome = command(&home, arguments);
        assert!(
            outcome.code != Some(0) && outcome.stderr.contains(why),
            "{arguments:?}: {outcome:?}"
        );
        assert_eq!(outcome.stderr.trim_end().lines().count(), 1, "{outcome:?}");
    };
    refused(&["activate", FUNCTION, "7"], "has no version 7");
    refused(&["activate", "nobody", "1"], "no function nobody");
    refused(&["split", FUNCTION, "2", "--percent", "10"], "is the active one");
    refused(&["split", FUNCTION, "1", "--header", "nonsense"], "is not a header");
    command(&home, &["rollback", FUNCTION]).success();
    refused(&["rollback", FUNCTION], "has no version to go back to");
    assert_eq!(daemon.stop(), Some(0));
    refused(&["rollback", FUNCTION], "has no version to go back to");
}

/// A server whose clients have it to themselves, at an address of its own.
fn handed_over(label: &str, limits: &str) -> (Daemon, SocketAddr, PathBuf) {
    let address = SocketAddr::from(([127, 0, 0, 1], free_port()));
    let keys = format!(
        "isolation = \"instance\"\nlisten = \"{address}\"\nentry = {{ connections = \"handover\" }}"
    );
    let limits = format!("concurrency = 64\n{limits}");
    let build = Build { keys: &keys, limits: &limits, ..Build::default() };
    let home = build.home(label, &["one", "two"]);
    (Daemon::start(&home, &DaemonOptions::default()), address, home)
}

#[test]
fn connections_follow_a_deploy() {
    let (daemon, address, home) = handed_over("versions-connections", "drain = \"10m\"");
    let mut idle = Raw::connect(address);
    assert_eq!(kept_request(&mut idle, "/", ""), Some((200, "two".into())));
    let mut busy = Raw::connect(address);
    busy.send(format!("GET /slow HTTP/1.1\r\nHost: {FUNCTION}\r\n\r\n"));
    wait_until("the request has arrived", || {
        daemon.instances(FUNCTION).first().is_some_and(|found| found["connections"] == 2)
    });
    command(&home, &["activate", FUNCTION, "1"]).success();
    // A request that is under way is answered by the version that has it.
    assert_eq!(busy.response().map(|response| response.text()), Some("two".to_owned()));
    assert_eq!(busy.hear(Duration::ZERO), Heard::End);
    assert_eq!(idle.hear(Duration::ZERO), Heard::End);
    let mut new = Raw::connect(address);
    assert_eq!(kept_request(&mut new, "/", ""), Some((200, "one".into())));
    wait_until("the old instance is gone", || {
        daemon.instances(FUNCTION).iter().all(|instance| instance["version"] == 1)
    });
    // What is removed ends as well.
    command(&home, &["remove", FUNCTION]).success();
    assert_eq!(new.hear(Duration::ZERO), Heard::End);
    wait_until("nothing is left of it", || daemon.instances(FUNCTION).is_empty());
}

#[test]
fn what_does_not_end_is_ended() {
    let (daemon, address, home) = handed_over("versions-drain", "drain = \"1s\"");
    let mut endless = Raw::connect(address);
    endless.send(format!("GET /forever HTTP/1.1\r\nHost: {FUNCTION}\r\n\r\n"));
    wait_until("the request has arrived", || {
        daemon.instances(FUNCTION).first().is_some_and(|found| found["connections"] == 1)
    });
    command(&home, &["remove", FUNCTION]).success();
    assert!(matches!(endless.hear(Duration::ZERO), Heard::Cut(_) | Heard::End));
    wait_until("nothing is left of it", || daemon.instances(FUNCTION).is_empty());
    wait_until("the log says so", || daemon.log().contains("were still busy 1s after"));
}
