//! Random `kill -9` of everything that `thaw serve` consists of, under load.
//!
//! `THAW_CHAOS_KILLS` says how many (`scripts/chaos` strikes 10,000 times), `THAW_CHAOS_SEED`
//! repeats the choices of an earlier run, as far as processes come and go alike.

mod clients;
mod remains;
mod victims;

use clients::{Address, Habit, Load, Tally};
use remains::{Holdings, adopt_orphans, check_no_groups, check_no_orphans, check_store};
use std::cell::Cell;
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread;
use std::time::{Duration, SystemTime, UNIX_EPOCH};
use thaw_e2e::{
    Daemon, DaemonOptions, Function, built_home, copy_home, exists, get, kill, post, repository,
    thaw, wait_until,
};
use victims::{Census, VICTIMS, Victim, strike};

/// Blows unless `THAW_CHAOS_KILLS` says otherwise: as many as CI has time for.
const KILLS: u64 = 300;
/// Of so many blows, one strikes the daemon itself.
const BLOWS_FOR_A_DAEMON: u64 = 50;
/// Longest pause between two blows, in milliseconds.
const PAUSE_MS: u64 = 20;
/// Blows for each look at what there is: most of what it has shown must still be there.
const BLOWS_FOR_A_CENSUS: u64 = 4;
/// Blows between two lines about how far a storm is.
const PROGRESS: u64 = 500;
/// The client that loads each function, twice each.
const CLIENTS: [(&str, Habit); 8] = [
    ("hello-c", Habit::Close),
    ("shared", Habit::KeepAlive),
    ("forked", Habit::SlowSender),
    ("hello-python", Habit::Close),
    ("keeper", Habit::KeepAlive),
    ("keeper", Habit::SlowReader),
    ("keeper", Habit::Upload),
    ("words", Habit::Stdin),
];

/// A store with a function of every kind.
fn home() -> &'static Path {
    static HOME: OnceLock<PathBuf> = OnceLock::new();
    HOME.get_or_init(|| {
        let of_c = |name, keys: &str| Function::Variant {
            example: "hello-c",
            name,
            keys: keys.to_owned(),
            limits: "queue = \"20s\"",
        };
        let functions = [
            Function::Example("hello-c"),
            of_c("shared", "isolation = \"instance\""),
            of_c("forked", "template = true"),
            Function::PythonVariant {
                program: "keeper",
                name: "keeper",
                keys: "isolation = \"instance\"\nready = 1",
            },
            Function::Variant {
                example: "hello-python",
                name: "hello-python",
                keys: "ready = 2\ntemplate = true".to_owned(),
                limits: "queue = \"20s\"",
            },
            Function::Directory("words"),
        ];
        built_home("chaos", &functions)
    })
}

/// One storm at a time: what it leaves is looked for among all that this process has started.
fn alone() -> MutexGuard<'static, ()> {
    static STORM: Mutex<()> = Mutex::new(());
    STORM.lock().unwrap_or_else(PoisonError::into_inner)
}

fn number_from_environment(name: &str) -> Option<u64> {
    let text = std::env::var(name).ok()?;
    Some(text.parse().unwrap_or_else(|_| panic!("{name} is {text:?}, which is no number")))
}

fn kills() -> u64 {
    number_from_environment("THAW_CHAOS_KILLS").unwrap_or(KILLS)
}

/// xorshift64: a seed repeats its choices.
struct Random(u64);

impl Random {
    /// Seeded by `THAW_CHAOS_SEED`, or by the time of day.
    fn new() -> Self {
        let since_epoch = SystemTime::now().duration_since(UNIX_EPOCH).expect("after 1970");
        let now = since_epoch.as_nanos() as u64;
        let seed = number_from_environment("THAW_CHAOS_SEED").unwrap_or(now).max(1);
        eprintln!("THAW_CHAOS_SEED={seed} THAW_CHAOS_KILLS={}", kills());
        Self(seed)
    }

    fn below(&mut self, limit: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % limit
    }

    fn one_of<'a, T>(&mut self, all: &'a [T]) -> Option<&'a T> {
        if all.is_empty() { None } else { all.get(self.below(all.len() as u64) as usize) }
    }

    fn victim(&mut self) -> Victim {
        let mut blow = self.below(VICTIMS.iter().map(|(_, weight)| weight).sum());
        for (victim, weight) in VICTIMS {
            if blow < weight {
                return victim;
            }
            blow -= weight;
        }
        unreachable!("the blow is below the sum of all weights")
    }

    fn pause(&mut self, most_ms: u64) {
        thread::sleep(Duration::from_millis(self.below(most_ms)));
    }
}

/// A pool of one zygote grows to sixteen at most, so that it is small again soon.
fn options() -> DaemonOptions {
    DaemonOptions { arguments: ["--zygotes", "1"].map(str::to_owned).to_vec() }
}

/// Asks every function until it answers: a request may meet an instance that the last blow has ended, and
/// of whose end the daemon has not heard.
fn check_every_function(daemon: &Daemon) {
    for name in ["hello-c", "shared", "forked", "hello-python", "keeper"] {
        let answers = || get(daemon.gateway(), name, "/").status == 200;
        wait_until(&format!("{name} answers"), answers);
    }
    let answers = || post(daemon.gateway(), "words", "/", b"one two").status == 200;
    wait_until("words answers", answers);
}

/// Checks that nobody was told anything wrong.
fn check_tally(tally: &Tally) {
    assert!(tally.wrong.is_empty(), "{tally:#?}");
}

#[test]
fn sandboxes_are_killed_at_random() {
    let _alone = alone();
    adopt_orphans();
    let mut random = Random::new();
    let home = copy_home(home(), "chaos-sandboxes");
    let daemon = Daemon::start(&home, &options());
    let (main, pid) = (daemon.main_pid(), daemon.pid());
    check_every_function(&daemon);
    let before = Holdings::of(&daemon);
    let address: Address = Arc::new(Mutex::new(Some(daemon.gateway())));
    let clients = [CLIENTS, CLIENTS].concat();
    let load = Load::start(&address, &clients);
    let struck = storm(&daemon, &mut random);
    wait_until("every function has answered", || load.has_heard_all());
    let tally = load.finish();
    eprintln!("struck {struck:?}; heard {tally:#?}");
    assert!(exists(pid), "the daemon has ended");
    check_tally(&tally);
    assert_eq!(tally.unanswered, 0, "clients saw the end without a word: {tally:#?}");
    check_every_function(&daemon);
    let shown = Cell::new(before);
    wait_until("the daemon holds no more than before", || {
        let now = Holdings::of(&daemon);
        if !now.fit(before) && shown.replace(now) != now {
            eprintln!("{now:?}, before {before:?}");
        }
        now.fit(before)
    });
    assert_eq!(daemon.stop(), Some(0));
    check_no_orphans();
    check_no_groups(&BTreeSet::from([main]));
    check_store(&home);
}

/// Strikes until there were enough blows; how often each kind was struck.
fn storm(daemon: &Daemon, random: &mut Random) -> BTreeMap<Victim, u64> {
    let mut struck = BTreeMap::new();
    let (mut blows, mut told) = (0, 0);
    while blows < kills() {
        let census = Census::take(daemon);
        for _ in 0..BLOWS_FOR_A_CENSUS {
            let kind = random.victim();
            let mut found = census.find(kind);
            // Now and then several at a time: one death must not hide another.
            let at_once = if random.below(10) == 0 { 5 } else { 1 };
            for _ in 0..at_once {
                let Some(victim) = random.one_of(&found).cloned() else { break };
                found.retain(|other| *other != victim);
                if strike(&victim) {
                    blows += 1;
                    *struck.entry(kind).or_default() += 1;
                }
            }
            random.pause(PAUSE_MS);
        }
        assert!(exists(daemon.pid()), "the daemon has ended:\n{}", daemon.log());
        if blows / PROGRESS > told {
            told = blows / PROGRESS;
            eprintln!("{blows} blows: {struck:?}");
        }
    }
    struck
}

/// A build that goes on while the daemon is killed, and may be killed itself.
struct Build(Child);

impl Build {
    fn start(home: &Path) -> Self {
        let mut build = thaw();
        build.env("THAW_HOME", home).args(["build", "--quiet"]);
        build.arg(repository().join("examples/hello-c"));
        build.stdout(Stdio::null()).stderr(Stdio::piped());
        Self(build.spawn().expect("thaw"))
    }

    fn kill(mut self) {
        kill(self.0.id());
        self.0.wait().expect("our child");
    }

    /// A daemon that dies while it is told of the new version is the only excuse.
    fn finish(self) {
        let outcome = self.0.wait_with_output().expect("our child");
        let complaint = String::from_utf8_lossy(&outcome.stderr);
        assert!(outcome.status.success() || complaint.contains("daemon"), "{complaint}");
    }
}

#[test]
fn the_daemon_is_killed_at_random() {
    let _alone = alone();
    adopt_orphans();
    let mut random = Random::new();
    let home = copy_home(home(), "chaos-daemon");
    let address: Address = Arc::default();
    let load = Load::start(&address, &CLIENTS);
    let mut daemons = BTreeSet::new();
    for _ in 0..(kills() / BLOWS_FOR_A_DAEMON).max(3) {
        let daemon = Daemon::start(&home, &options());
        daemons.insert(daemon.main_pid());
        *address.lock().expect("no holder panics") = Some(daemon.gateway());
        let build = Build::start(&home);
        random.pause(1500);
        let sandboxes = daemon.sandboxes();
        match random.below(2) {
            0 => build.kill(),
            _ => build.finish(),
        }
        if daemon.pid() != daemon.main_pid() {
            // Its monitor starts another, which takes over what lives, and may be killed while
            // it does so.
            for _ in 0..random.below(5) {
                if let Some(pid) = daemon.live_pid() {
                    kill(pid);
                }
                random.pause(600);
            }
        }
        daemon.kill();
        *address.lock().expect("no holder panics") = None;
        drop(daemon);
        wait_until("no sandbox is left", || sandboxes.iter().all(|s| !exists(s.pid)));
        check_no_orphans();
    }
    // The last one is not killed: whoever still waits gets an answer.
    let daemon = Daemon::start(&home, &options());
    daemons.insert(daemon.main_pid());
    *address.lock().expect("no holder panics") = Some(daemon.gateway());
    wait_until("every function has answered", || load.has_heard_all());
    let tally = load.finish();
    eprintln!("killed {} daemons; heard {tally:#?}", daemons.len() - 1);
    check_tally(&tally);
    check_every_function(&daemon);
    assert_eq!(daemon.stop(), Some(0));
    check_no_orphans();
    check_no_groups(&daemons);
    check_store(&home);
}
