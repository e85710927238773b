//! Functions that the daemon fetches itself (docs/decisions/0061): since whoever did has ended, or
//! since a client of its admin API has asked for them.

use super::*;
use rustix::process::{Pid, Signal, kill_process};

/// Most fetchers of a daemon at a time (`FETCHERS_MAX`, crates/node/src/pulls/book.rs).
const FETCHERS_MAX: usize = 4;

/// The fetchers of a home.
fn fetchers(home: &Path) -> Vec<i32> {
    let entries = fs::read_dir("/proc").expect("processes").flatten();
    let pids = entries.filter_map(|entry| entry.file_name().to_str()?.parse::<i32>().ok());
    let is_its = |pid: &i32| {
        let text = |name: &str| fs::read(format!("/proc/{pid}/{name}")).unwrap_or_default();
        // The names of others begin alike.
        let home = format!("{}\"", home.display());
        let cmdline = String::from_utf8_lossy(&text("cmdline")).into_owned();
        text("comm") == b"thaw-fetcher\n" && cmdline.contains(&home)
    };
    pids.filter(is_its).collect()
}

/// Bytes of the pieces that a home keeps.
fn kept_bytes(home: &Path) -> u64 {
    let entries = fs::read_dir(home.join("pieces/shared")).into_iter().flatten().flatten();
    let is_piece = |entry: &fs::DirEntry| entry.file_name().len() == 64;
    entries.filter(is_piece).map(|entry| entry.metadata().map_or(0, |found| found.len())).sum()
}

fn send(rig: &Rig, method: &str, path: &str, body: &str) -> (u16, Value) {
    let head = format!(
        "{method} {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: {}\r\n\r\n{body}",
        body.len()
    );
    let mut socket =
        std::os::unix::net::UnixStream::connect(rig.daemon.admin_socket()).expect("a daemon");
    std::io::Write::write_all(&mut socket, head.as_bytes()).expect("a request");
    let text = std::io::read_to_string(socket).expect("an answer");
    let (head, body) = text.split_once("\r\n\r\n").expect("a head");
    let status = head.split(' ').nth(1).and_then(|code| code.parse().ok()).expect("a status");
    (status, serde_json::from_str(body).unwrap_or(Value::Null))
}

fn pulls(rig: &Rig) -> Vec<Value> {
    rig.daemon.admin("/pulls").json().as_array().expect("a list").clone()
}

/// The last pull of a daemon.
fn pull(rig: &Rig) -> Value {
    pulls(rig).pop().unwrap_or(Value::Null)
}

/// How long those who wait for a part do so without a fetcher (crates/node/src/far.rs).
const WITHOUT_FETCHER: Duration = Duration::from_secs(15);

/// The text that is answered to somebody who waits while one fetcher takes the place of another. Only if
/// that takes too long, as it may on a busy machine, is the request made again.
#[track_caller]
fn get_by_the_next(rig: &Rig, path: &str) -> String {
    let asked = Instant::now();
    let answer = rig.get(path);
    match answer.status {
        503 if asked.elapsed() >= WITHOUT_FETCHER => rig.get_at_last(path),
        _ => answer.text(),
    }
}

fn wait_for_state(rig: &Rig, state: &str) {
    wait_until(&format!("the pull is {state}"), || pull(rig)["state"] == state);
}

/// Has the daemon leave alone what it fetches.
#[track_caller]
pub fn leave_alone(rig: &Rig) {
    wait_for_state(rig, "fetching");
    let id = number(&pull(rig), "id");
    let (status, ended) = send(rig, "DELETE", &format!("/pulls/{id}"), "");
    assert_eq!((status, &ended["state"]), (200, &json!("cancelled")), "{ended}");
    wait_until("its fetcher has ended", || fetchers(&rig.home).is_empty());
}

/// Waits until a fetcher that ended so is counted. That comes after the end of its process.
fn wait_for_fetcher(rig: &Rig, outcome: &str) {
    let name = format!("thaw_pull_fetchers_total{{outcome=\"{outcome}\"}}");
    let is_counted = || rig.metric(&name).is_some_and(|count| count >= 1.0);
    wait_until(&format!("a fetcher is {outcome}"), is_counted);
}

/// The value of a metric.
fn metric(rig: &Rig, name: &str) -> f64 {
    rig.metric(name).unwrap_or_else(|| panic!("no {name}"))
}

#[track_caller]
fn becomes_whole(rig: &Rig) {
    wait_until("all of it is here", || !rig.is_partial());
    rig.is_whole();
    wait_until("its fetcher has ended", || fetchers(&rig.home).is_empty());
}

#[test]
fn a_pull_that_is_killed_is_gone_on_with_by_the_daemon() {
    let rig = Rig::new("afar-adopted");
    let gate = rig.gate(Mode::Hold);
    let fetcher = rig.pull(&gate);
    gate.let_pass(5);
    wait_until("some pieces are here", || kept_bytes(&rig.home) > 0 && gate.asked() > NEEDED + 5);
    let state = || rig.daemon.admin("/functions/far").json()["fetching"]["state"].clone();
    wait_until("the daemon knows who fetches", || state() == "command");
    assert!(fetchers(&rig.home).is_empty());
    thread::scope(|scope| {
        let asked = gate.asked();
        let waiting = scope.spawn(|| get_by_the_next(&rig, "/ballast"));
        wait_until("it is asked for", || gate.asked() > asked);
        fetcher.kill();
        wait_for_state(&rig, "fetching");
        let kept = kept_bytes(&rig.home);
        gate.set(Mode::Pass);
        // Whoever waited for the one that was killed is answered by the other.
        assert_eq!(waiting.join().expect("an answer"), "whole");
        becomes_whole(&rig);
        wait_for_state(&rig, "done");
        let pull = pull(&rig);
        assert_eq!((&pull["state"], &pull["function"]), (&json!("done"), &json!("far")), "{pull}");
        assert!(number(&pull, "moved") + kept <= number(&pull, "of"), "{kept} of {pull}");
        assert!(number(&pull, "moved") > 0 && kept > 0, "{kept} of {pull}");
    });
    wait_for_fetcher(&rig, "done");
}

#[test]
fn the_next_daemon_goes_on_too() {
    let mut rig = Rig::new("afar-adopted-again");
    let gate = rig.gate(Mode::Hold);
    rig.pull(&gate).kill();
    for _ in 0..2 {
        wait_until("the daemon fetches", || fetchers(&rig.home).len() == 1);
        rig.daemon.kill_and_await_next();
        rig.wait_until_served();
    }
    gate.set(Mode::Pass);
    rig.answers("/ballast", "whole");
    becomes_whole(&rig);
}

#[test]
fn a_fetcher_that_is_killed_is_followed_by_another() {
    let rig = Rig::new("afar-killed-fetcher");
    let gate = rig.gate(Mode::Hold);
    rig.pull(&gate).kill();
    wait_until("the daemon fetches", || fetchers(&rig.home).len() == 1);
    let first = fetchers(&rig.home)[0];
    thread::scope(|scope| {
        let asked = gate.asked();
        let waiting = scope.spawn(|| get_by_the_next(&rig, "/ballast"));
        wait_until("it is asked for", || gate.asked() > asked);
        kill_process(Pid::from_raw(first).expect("a pid"), Signal::KILL).expect("it runs");
        // Nobody can have fetched it before: the next fetcher does, before that request gives up.
        gate.set(Mode::Pass);
        assert_eq!(waiting.join().expect("an answer"), "whole");
    });
    becomes_whole(&rig);
    wait_for_fetcher(&rig, "failed");
    wait_for_fetcher(&rig, "done");
}

#[test]
fn failed_fetches_are_counted_and_told() {
    let rig = Rig::new("afar-adopted-cut");
    let gate = rig.gate(Mode::Hold);
    rig.pull(&gate).kill();
    wait_for_state(&rig, "fetching");
    gate.set(Mode::Cut);
    let told = rig.is_unavailable("/ballast");
    assert!(told.contains("could not be fetched"), "{told}");
    // These never fall.
    wait_until("it is counted", || metric(&rig, "thaw_pull_fetches_failed_total") >= 1.0);
    let parts_failed = || rig.metric("thaw_partial_parts_failed_total") >= Some(1.0);
    wait_until("so are the parts", parts_failed);
    // These begin anew with each fetcher: one gives up after a while, and another follows.
    wait_until("the pull counts it", || number(&pull(&rig), "failed_fetches") > 0);
    wait_until("it is told", || {
        let mut inspect = thaw();
        let inspected = run(inspect.env("THAW_HOME", &rig.home).args(["inspect", "far"]));
        inspected.success().contains("FAILED")
    });
    let mut list = thaw();
    let listed = run(list.env("THAW_HOME", &rig.home).args(["list", "--json"]));
    let listed: Value = serde_json::from_str(&listed.stdout).expect("JSON");
    let state = listed[0]["fetching"]["state"].as_str().expect("a state");
    assert!(["waiting", "fetching"].contains(&state), "{listed}");
    gate.set(Mode::Pass);
    rig.answers("/ballast", "whole");
    becomes_whole(&rig);
}

#[test]
fn one_whose_pull_was_ended_waits_for_nobody_for_ever() {
    let rig = Rig::new("afar-left-alone");
    let gate = rig.gate(Mode::Hold);
    rig.pull(&gate).kill();
    leave_alone(&rig);
    let told = rig.is_unavailable("/ballast");
    assert!(told.contains("nobody fetches"), "{told}");
    assert!(fetchers(&rig.home).is_empty() && pulls(&rig).len() == 1, "it is left alone");
    // The same command goes on with it still.
    gate.set(Mode::Pass);
    rig.begin(&gate).report();
    becomes_whole(&rig);
}

#[test]
fn a_fetcher_has_no_rights() {
    let rig = Rig::new("afar-rights");
    let gate = rig.gate(Mode::Hold);
    rig.pull(&gate).kill();
    wait_until("the daemon fetches", || fetchers(&rig.home).len() == 1);
    let pid = fetchers(&rig.home)[0];
    let status = || fs::read_to_string(format!("/proc/{pid}/status")).expect("it runs");
    // The last thing that it does before it reads what it is to do.
    wait_until("it has a filter", || status().contains("Seccomp:\t2"));
    let status = status();
    let of = |name: &str| {
        let line = status.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
        line.unwrap_or_else(|| panic!("no {name} in {status}")).trim().to_owned()
    };
    assert!(of("Uid").split_whitespace().all(|uid| uid != "0"), "{status}");
    for none in ["CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"] {
        assert_eq!(of(none).trim_start_matches('0'), "", "{none}");
    }
    assert_eq!((of("NoNewPrivs"), of("Seccomp")), ("1".to_owned(), "2".to_owned()));
    let root = format!("/proc/{pid}/root");
    for hidden in ["etc/passwd", "root", "home", "usr/bin", "usr/lib"] {
        assert!(!Path::new(&root).join(hidden).exists(), "{hidden}");
    }
    // It is the owner's of nothing there, so that the daemon, which has its id, cannot look into it.
    let memory = fs::metadata(format!("/proc/{pid}/mem")).expect("it runs");
    assert_eq!(std::os::unix::fs::MetadataExt::uid(&memory), 0);
    gate.set(Mode::Pass);
    becomes_whole(&rig);
}

#[test]
fn the_admin_api_pulls_lazily() {
    let rig = Rig::new("afar-api-lazy");
    let gate = rig.gate(Mode::Hold);
    let wanted = json!({ "reference": gate.image(IMAGE), "lazy": true }).to_string();
    let (status, begun) = send(&rig, "POST", "/pulls", &wanted);
    assert_eq!((status, &begun["state"]), (200, &json!("waiting")), "{begun}");
    rig.wait_until_served();
    rig.answers("/", "here");
    wait_until("it says so", || pull(&rig)["served"] == true);
    let detail = rig.daemon.admin("/functions/far").json();
    assert_eq!(detail["fetching"]["state"], "fetching", "{detail}");
    gate.set(Mode::Pass);
    rig.answers("/ballast", "whole");
    becomes_whole(&rig);
    wait_for_state(&rig, "done");
    let id = number(&begun, "id");
    let (_, done) = send(&rig, "GET", &format!("/pulls/{id}"), "");
    assert_eq!((&done["state"], &done["function"]), (&json!("done"), &json!("far")), "{done}");
    assert!(done["digest"].as_str().is_some_and(|digest| digest.starts_with("sha256:")), "{done}");
    assert_eq!(done["bytes"], done["of"], "{done}");
}

#[test]
fn the_admin_api_pulls_all_and_says_why_not() {
    let rig = Rig::new("afar-api-whole");
    let gate = rig.gate(Mode::Pass);
    let refused = [
        (json!({}), "missing field"),
        (json!({ "reference": "s3://" }), "s3://"),
        (json!({ "reference": gate.image(IMAGE), "name": "../x" }), "x"),
        (json!({ "reference": gate.image(IMAGE), "unknown": 1 }), "unknown field"),
    ];
    for (wanted, why) in refused {
        let (status, problem) = send(&rig, "POST", "/pulls", &wanted.to_string());
        assert_eq!((status, &problem["error"]), (400, &json!("wrong_pull")), "{problem}");
        assert!(problem["reason"].as_str().is_some_and(|reason| reason.contains(why)), "{problem}");
    }
    assert_eq!(send(&rig, "GET", "/pulls/7", "").0, 404);
    assert_eq!(send(&rig, "DELETE", "/pulls/7", "").0, 404);
    let begin = |image: &str| {
        let wanted = json!({ "reference": gate.image(image) }).to_string();
        assert_eq!(send(&rig, "POST", "/pulls", &wanted).0, 200);
    };
    begin("team/none:1");
    wait_for_state(&rig, "failed");
    let problem = pull(&rig)["problem"].to_string();
    assert!(problem.contains("has no such image"), "{problem}");
    begin(IMAGE);
    wait_for_state(&rig, "done");
    rig.wait_until_served();
    becomes_whole(&rig);
}

#[test]
fn so_many_fetchers_run_at_a_time() {
    let rig = Rig::new("afar-api-bound");
    let gate = rig.gate(Mode::Hold);
    // All runs pass, of which each pull asks for the same, so that no pull fails for good.
    gate.let_pass_path(&rig.run_path());
    let count = FETCHERS_MAX + 2;
    for number in 0..count {
        let name = format!("far-{number}");
        let wanted = json!({ "reference": gate.image(IMAGE), "name": name, "lazy": true });
        assert_eq!(send(&rig, "POST", "/pulls", &wanted.to_string()).0, 200);
    }
    let in_state = |state: &str| pulls(&rig).iter().filter(|pull| pull["state"] == state).count();
    // The daemon begins all that it may at once, long before the first of them are served.
    let are_served = || pulls(&rig).iter().filter(|pull| pull["served"] == true).count();
    wait_until("so many are at work", || are_served() >= FETCHERS_MAX);
    assert_eq!(are_served(), FETCHERS_MAX);
    assert_eq!(fetchers(&rig.home).len(), FETCHERS_MAX);
    assert_eq!((in_state("fetching"), in_state("waiting")), (FETCHERS_MAX, 2));
    assert_eq!(metric(&rig, "thaw_pulls{state=\"waiting\"}"), 2.0);
    gate.set(Mode::Pass);
    for done in 1..=count {
        wait_until(&format!("{done} are here"), || in_state("done") >= done);
    }
}

#[test]
fn a_partial_function_counts_with_its_whole_length() {
    let rig = Rig::new("afar-quota");
    let gate = rig.gate(Mode::Hold);
    let quota = |store: &str| {
        fs::write(rig.home.join("tenants.toml"), format!("[domain.x]\nstore = \"{store}\"\n"))
            .expect("a quota");
    };
    quota("8MiB");
    let pull_into = |lazy: bool| {
        let wanted = json!({ "reference": gate.image(IMAGE), "domain": "x", "lazy": lazy });
        assert_eq!(send(&rig, "POST", "/pulls", &wanted.to_string()).0, 200);
    };
    pull_into(true);
    wait_for_state(&rig, "failed");
    let problem = pull(&rig)["problem"].to_string();
    assert!(problem.contains("the quota of"), "{problem}");
    assert_eq!(gate.asked(), 0, "nothing of it was moved");
    quota("1GiB");
    pull_into(true);
    rig.wait_until_served();
    let tenant = || {
        let tenants = rig.daemon.admin("/tenants").json();
        let all = tenants.as_array().expect("a list").clone();
        all.into_iter().find(|tenant| tenant["domain"] == "x").unwrap_or(Value::Null)
    };
    let before = tenant();
    assert!(number(&before, "store") > 16 << 20, "{before}");
    assert_eq!(before["functions"], 1);
    gate.set(Mode::Pass);
    wait_until("all of it is here", || !rig.is_partial());
    wait_for_state(&rig, "done");
    assert_eq!(tenant()["functions"], 1);
}
