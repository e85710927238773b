//! Triggers: asynchronous invocations, schedules and events.

use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::fs;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};
use thaw_e2e::{
    Daemon, DaemonOptions, Function, Raw, Response, built_home, command, get, post, run, thaw,
    wait_until,
};

/// One attempt after the other is quick.
const QUEUE: &str = "async = { backoff = \"100ms\", backoff_max = \"200ms\" }\ncloudevents = true";

fn home(label: &str, keys: &'static str) -> PathBuf {
    built_home(label, &[Function::PythonVariant { program: "receiver", name: "receiver", keys }])
}

fn serve(label: &str, keys: &'static str) -> Daemon {
    Daemon::start(&home(label, keys), &DaemonOptions::default())
}

/// A POST to the function with these fields.
fn send(gateway: SocketAddr, path: &str, fields: &str, body: &str) -> Response {
    let head = format!(
        "POST {path} HTTP/1.1\r\nHost: receiver\r\nContent-Length: {}\r\n{fields}\r\n",
        body.len()
    );
    let mut client = Raw::connect(gateway);
    client.send(head).send(body);
    client.response().expect("an answer")
}

const ASYNC: &str = "Prefer: respond-async\r\n";

/// Queues a POST; the name of the invocation.
#[track_caller]
fn queue(daemon: &Daemon, path: &str, fields: &str, body: &str) -> String {
    let answer = send(daemon.gateway(), path, &format!("{ASYNC}{fields}"), body);
    assert_eq!(answer.status, 202, "{}", answer.text());
    assert_eq!(answer.header("preference-applied"), Some("respond-async"));
    let id = answer.json()["id"].as_str().expect("an id").to_owned();
    assert_eq!(answer.header("thaw-invocation-id"), Some(&*id));
    id
}

/// The requests that the function has printed.
fn seen(home: &Path) -> Vec<Value> {
    let log = fs::read_to_string(home.join("logs/receiver.log")).unwrap_or_default();
    let lines = log.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
    lines.filter_map(|line| serde_json::from_str(line["text"].as_str()?).ok()).collect()
}

/// Those of an invocation.
fn attempts(home: &Path, id: &str) -> Vec<Value> {
    let is_it = |request: &Value| request["headers"]["thaw-invocation-id"] == id;
    seen(home).into_iter().filter(is_it).collect()
}

/// The queue of the first function in numbers: those that wait or run, and dead letters.
fn counts(daemon: &Daemon) -> (u64, u64) {
    counts_of(daemon, "receiver")
}

fn counts_of(daemon: &Daemon, function: &str) -> (u64, u64) {
    let queues = daemon.admin("/queues").json();
    let found = queues.as_array().expect("a list").iter().find(|q| q["function"] == function);
    let number = |key: &str| found.map_or(0, |queue| queue[key].as_u64().expect("a number"));
    (number("queued") + number("running"), number("dead"))
}

fn wait_for_counts(daemon: &Daemon, expected: (u64, u64)) {
    wait_until(&format!("the queue has {expected:?}"), || counts(daemon) == expected);
}

#[test]
fn an_invocation_is_answered_at_once_and_done_later() {
    let daemon = serve("triggers-async", QUEUE);
    let id = queue(&daemon, "/a?b=c", "X-Own: 1\r\nIdempotency-Key: k\r\n", "hello");
    wait_for_counts(&daemon, (0, 0));
    wait_until("the function was called", || attempts(daemon.home(), &id).len() == 1);
    let got = attempts(daemon.home(), &id).remove(0);
    assert_eq!((&got["method"], &got["path"]), (&json!("POST"), &json!("/a?b=c")));
    assert_eq!(got["body"], "hello");
    let headers = &got["headers"];
    assert_eq!((&headers["x-own"], &headers["thaw-attempt"]), (&json!("1"), &json!("1")));
    assert_eq!((&headers["ce-type"], &headers["ce-id"]), (&json!("thaw.invocation"), &json!(id)));
    assert_eq!(headers["prefer"], Value::Null);

    // The same key is the same invocation, also when that is done.
    let again =
        send(daemon.gateway(), "/a?b=c", &format!("{ASYNC}Idempotency-Key: k\r\n"), "hello");
    assert_eq!((again.status, again.json()), (202, json!({"id": id, "duplicate": true})));
    // A connection that ends is not handed over with such a request.
    let id = queue(&daemon, "/", "Connection: close\r\n", "bye");
    wait_until("the function was called", || attempts(daemon.home(), &id).len() == 1);
    // Whoever does not ask for it waits.
    assert_eq!(post(daemon.gateway(), "receiver", "/", b"now").status, 200);
    let asynchronously = ["invoke", "receiver", "--data", "x", "--async", "--idempotency-key", "i"];
    let said = command(&daemon, &asynchronously);
    let id = said.stdout.strip_suffix('\n').expect("a line");
    assert_eq!((said.stderr.as_str(), said.code), ("", Some(0)));
    wait_until("the function was called", || attempts(daemon.home(), id).len() == 1);
    let again = command(&daemon, &asynchronously);
    assert_eq!(again.stdout, said.stdout);
    assert!(again.stderr.contains("queued before"), "{again:?}");
    let json = command(&daemon, &[&asynchronously[..], &["--json"]].concat()).success();
    assert!(json.contains(&format!("\"{id}\"")), "{json}");
    wait_for_counts(&daemon, (0, 0));
    for line in [
        "thaw_queue_invocations_total{function=\"receiver\",outcome=\"queued\"} 3",
        "thaw_queue_invocations_total{function=\"receiver\",outcome=\"duplicate\"} 3",
        "thaw_queue_attempts_total{function=\"receiver\",outcome=\"done\"} 3",
    ] {
        wait_until(&format!("the metrics say {line}"), || {
            daemon.admin("/metrics").text().contains(line)
        });
    }
}

#[test]
fn an_answer_that_never_ends_does_not_hold_its_attempt_up() {
    let keys = "async = { attempts = 1, timeout = \"1s\" }";
    let daemon = serve("triggers-trickle", keys);
    let id = queue(&daemon, "/trickle", "", "");
    wait_for_counts(&daemon, (0, 1));
    let listed = command(&daemon, &["queue", "list", "receiver"]).success();
    assert!(listed.contains(&id) && listed.contains("async.timeout"), "{listed}");
    for action in ["list", "purge"] {
        let refused = command(&daemon, &["queue", action, "nosuch"]);
        assert!(refused.stderr.contains("no function is named `nosuch`"), "{refused:?}");
    }
    // Its instance is free again, or another one is. On a busy machine a second may be too short for it.
    wait_until("a next one was done", || {
        let id = queue(&daemon, "/", "", "next");
        let has_ended = || ["done", "dead"].contains(&state(&daemon, &id).as_str());
        wait_until("it has ended", has_ended);
        state(&daemon, &id) == "done"
    });
}

#[test]
fn only_a_function_that_says_so_has_a_queue() {
    let daemon = serve("triggers-none", "");
    assert_eq!(send(daemon.gateway(), "/", ASYNC, "").status, 200);
    let refused = command(&daemon, &["invoke", "receiver", "--async"]);
    assert!(
        refused.code != Some(0)
            && format!("{}{}", refused.stdout, refused.stderr).contains("[async]")
    );
}

#[test]
fn failures_are_tried_again_and_end_as_dead_letters() {
    let daemon = serve("triggers-retry", QUEUE);
    let flaky = queue(&daemon, "/flaky", "", "");
    let failing = queue(&daemon, "/fail", "", "letter");
    let refused = queue(&daemon, "/refuse", "", "");
    wait_for_counts(&daemon, (0, 2));
    for (id, expected) in [(&flaky, 3), (&failing, 3), (&refused, 1)] {
        wait_until("all attempts were made", || attempts(daemon.home(), id).len() == expected);
    }
    // Each is printed by another instance.
    let numbers: BTreeSet<_> = attempts(daemon.home(), &failing)
        .iter()
        .map(|got| got["headers"]["thaw-attempt"].to_string())
        .collect();
    assert_eq!(numbers, BTreeSet::from(["\"1\"", "\"2\"", "\"3\""].map(str::to_owned)));

    let listed = command(&daemon, &["queue", "list", "receiver"]).success();
    assert!(listed.contains(&failing) && listed.contains("status 500"), "{listed}");
    assert!(listed.contains(&refused) && listed.contains("status 422"), "{listed}");
    assert!(!listed.contains(&flaky), "{listed}");
    let shown = command(&daemon, &["queue", "show", "receiver", &failing]).success();
    assert!(shown.contains("POST /fail") && shown.contains("letter"), "{shown}");
    command(&daemon, &["queue", "retry", "receiver", &failing]).success();
    wait_until("it was tried again", || attempts(daemon.home(), &failing).len() == 6);
    wait_for_counts(&daemon, (0, 2));
    let said = command(&daemon, &["queue", "purge", "receiver"]).success();
    assert!(said.contains("removed 2"), "{said}");
    let unknown = command(&daemon, &["queue", "show", "receiver", &failing]);
    assert!(unknown.code != Some(0) && unknown.stderr.contains(&failing), "{}", unknown.stderr);
}

#[test]
fn a_killed_daemon_loses_nothing_that_it_has_answered() {
    let mut daemon = serve("triggers-kill", QUEUE);
    let mut ids = BTreeSet::new();
    for round in 0..3 {
        for number in 0..12 {
            ids.insert(queue(
                &daemon,
                "/slow",
                &format!("Idempotency-Key: {round}-{number}\r\n"),
                "",
            ));
        }
        // Some run, some are done, some wait.
        wait_until("one has run", || !seen(daemon.home()).is_empty());
        daemon.kill_and_await_next();
        let again = format!("{ASYNC}Idempotency-Key: {round}-0\r\n");
        let again = send(daemon.gateway(), "/slow", &again, "").json();
        assert_eq!(again["duplicate"], true, "{again}");
        assert!(ids.contains(again["id"].as_str().expect("an id")));
    }
    assert_eq!(ids.len(), 36);
    wait_for_counts(&daemon, (0, 0));
    assert!(ids.iter().all(|id| state(&daemon, id) == "done"));
    // A line that an instance had printed when a daemon was killed may be lost.
    let has_run = |id: &&String| !attempts(daemon.home(), id).is_empty();
    wait_until("each has run", || ids.iter().filter(has_run).count() + 3 * LINES_LOST >= ids.len());
}

#[test]
fn a_full_queue_refuses_and_clients_who_wait_are_served() {
    let keys =
        "async = { entries = 3, body_max = \"1KiB\", concurrency = 2 }\nlimits.instances = 2";
    let daemon = serve("triggers-full", keys);
    let ids: Vec<_> = (0..3).map(|_| queue(&daemon, "/stuck", "", "")).collect();
    for id in &ids {
        let state = state(&daemon, id);
        assert!(state == "queued" || state == "running", "{state}");
    }
    let refused = send(daemon.gateway(), "/", ASYNC, "");
    assert_eq!((refused.status, refused.header("retry-after")), (503, Some("5")));
    assert!(daemon.explain(&refused).contains("async.entries"));
    let large = send(daemon.gateway(), "/", ASYNC, &"x".repeat(1025));
    assert_eq!(large.status, 413, "{}", large.text());
    // Half of the function's two places is left to those who wait.
    wait_until("one runs", || seen(daemon.home()).len() == 1);
    assert_eq!(get(daemon.gateway(), "receiver", "/").status, 200);
    let said = command(&daemon, &["queue", "purge", "receiver", "--queued"]).success();
    assert!(said.contains("removed 2"), "{said}");
    wait_for_counts(&daemon, (1, 0));
}

#[test]
fn a_damaged_queue_stops_triggers_only() {
    let home = home("triggers-damaged", QUEUE);
    fs::create_dir_all(home.join("triggers")).expect("a directory");
    fs::write(home.join("triggers/queue.redb"), "no database").expect("a file");
    let daemon = Daemon::start(&home, &DaemonOptions::default());
    assert_eq!(get(daemon.gateway(), "receiver", "/").status, 200);
    let refused = send(daemon.gateway(), "/", ASYNC, "");
    assert_eq!(refused.status, 503, "{}", refused.text());
    let listed = run(thaw().env("THAW_HOME", &home).args(["queue", "list"]));
    assert!(listed.code != Some(0) && listed.stderr.contains("move it away"), "{}", listed.stderr);
}

/// Runs a daemon whose queue has a disk of its own of 4 MiB.
const SMALL_DISK: &str = r#"mount -t tmpfs -o size=4m,mode=700 none "$1" && shift && exec "$@""#;

#[test]
fn a_full_disk_refuses_and_has_room_again() {
    let keys = "async = { concurrency = 1, bytes = \"1GiB\" }";
    let home = home("triggers-disk", keys);
    let directory = home.join("triggers");
    fs::create_dir_all(&directory).expect("a directory");
    let directory = directory.to_string_lossy().into_owned();
    let program = ["unshare", "--mount", "/bin/sh", "-c", SMALL_DISK, "sh", &directory];
    let program = program.map(str::to_owned);
    let daemon = Daemon::start_by(&program, &home, &DaemonOptions::default());
    let body = "x".repeat(256 << 10);
    let mut queued = 0;
    let refused = loop {
        let answer = send(daemon.gateway(), "/stuck", ASYNC, &body);
        if answer.status != 202 {
            break answer;
        }
        queued += 1;
        assert!(queued < 32, "4 MiB hold no more");
    };
    assert_eq!((refused.status, refused.header("retry-after")), (503, Some("5")));
    assert!(queued > 2 && daemon.explain(&refused).contains("make room"), "{queued}");
    assert_eq!(counts(&daemon), (queued, 0), "what was answered is there, and nothing else");
    assert_eq!(get(daemon.gateway(), "receiver", "/").status, 200);
    wait_until("one runs", || daemon.admin("/queues").json()[0]["running"] == 1);
    let said = command(&daemon, &["queue", "purge", "receiver", "--queued"]).success();
    assert!(said.contains(&format!("removed {}", queued - 1)), "{said}");
    queue(&daemon, "/", "", &body);
}

/// A file that moves the clock of a daemon's triggers, and the daemon.
fn serve_with_clock(home: &Path) -> (PathBuf, Daemon) {
    let clock = home.join("clock");
    let program = ["/usr/bin/env".to_owned(), format!("THAW_CLOCK={}", clock.display())];
    (clock, Daemon::start_by(&program, home, &DaemonOptions::default()))
}

/// Moves the clock to so many seconds after the next whole hour, and that many hours.
fn move_to(clock: &Path, start: u64, hours: u64, seconds: u64) {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).expect("after 1970").as_secs();
    let target = start - start % 3600 + hours * 3600 + seconds;
    let beside = clock.with_extension("new");
    fs::write(&beside, format!("{}", target as i64 - now as i64)).expect("a file");
    fs::rename(beside, clock).expect("the clock");
}

/// What a schedule has fired for, once for each time.
fn fired(home: &Path, schedule: &str) -> Vec<Value> {
    let source = format!("/functions/receiver/schedules/{schedule}");
    let is_it = |request: &Value| request["headers"]["ce-source"] == source;
    let mut all: Vec<Value> = seen(home).into_iter().filter(is_it).collect();
    let id = |request: &Value| request["headers"]["thaw-invocation-id"].to_string();
    all.sort_by_key(id);
    // One may be attempted twice if the daemon is killed before it knows the end of an attempt.
    all.dedup_by_key(|request| id(request));
    all
}

#[test]
fn schedules_fire_once_for_each_time_and_make_up_for_the_last_missed_one() {
    let keys = "schedules = [
        { name = \"plain\", cron = \"0 * * * *\", path = \"/plain\", body = \"tick\" },
        { name = \"kept\", cron = \"0 * * * *\", timezone = \"Europe/Berlin\", catch_up = \"last\" },
        { name = \"rare\", cron = \"0 0 29 2 *\" }]";
    let home = home("triggers-schedules", keys);
    let start = SystemTime::now().duration_since(UNIX_EPOCH).expect("after 1970").as_secs();
    fs::write(home.join("clock"), "0").expect("a file");
    move_to(&home.join("clock"), start, 1, 1800);
    let (clock, mut daemon) = serve_with_clock(&home);
    let rows = || daemon.admin("/schedules").json();
    let has_begun = |schedule: &Value| schedule["until_ms"].is_u64();
    wait_until("the schedules have begun", || {
        rows().as_array().is_some_and(|all| all.len() == 3 && all.iter().all(has_begun))
    });
    move_to(&clock, start, 2, 5);
    wait_until("both have fired", || {
        fired(&home, "plain").len() == 1 && fired(&home, "kept").len() == 1
    });
    let got = fired(&home, "plain").remove(0);
    assert_eq!(
        (&got["method"], &got["path"], &got["body"]),
        (&json!("POST"), &json!("/plain"), &json!("tick"))
    );
    assert_eq!(got["headers"]["ce-type"], "thaw.schedule");

    // The next daemon fires nothing twice, and leaves out what it missed or makes up for the last.
    daemon.kill_and_await_next();
    move_to(&clock, start, 6, 1800);
    wait_until("one is made up for", || fired(&home, "kept").len() == 2);
    wait_until("the other one is left out", || {
        let schedules = daemon.admin("/functions/receiver/schedules").json();
        let mut all = schedules.as_array().expect("a list").iter();
        all.find(|schedule| schedule["name"] == "plain").expect("it")["skipped"] == 1
    });
    assert_eq!(fired(&home, "plain").len(), 1);
    move_to(&clock, start, 7, 5);
    wait_until("both fire again", || {
        fired(&home, "plain").len() == 2 && fired(&home, "kept").len() == 3
    });
    let listed = command(&daemon, &["schedule", "list", "receiver"]).success();
    assert!(listed.contains("Europe/Berlin") && listed.contains("rare"), "{listed}");
    assert!(command(&daemon, &["inspect", "receiver"]).success().contains("SCHEDULES"));
    assert!(command(&daemon, &["list"]).success().contains("NEXT"));
    assert_eq!((fired(&home, "plain").len(), fired(&home, "rare").len()), (2, 0));
}

#[test]
fn events_reach_the_function_in_binary_mode_and_wrong_ones_do_not() {
    let daemon = serve("triggers-events", QUEUE);
    let structured = "Content-Type: application/cloudevents+json\r\n";
    let event = r#"{"specversion":"1.0","id":"1","source":"/s","type":"t","data":{"k":1}}"#;
    for fields in [structured.to_owned(), format!("{structured}Connection: close\r\n")] {
        let answer = send(daemon.gateway(), "/", &fields, event);
        assert_eq!(answer.status, 200, "{}", answer.text());
        let got = answer.json();
        assert_eq!((&got["headers"]["ce-id"], &got["body"]), (&json!("1"), &json!("{\"k\":1}")));
        assert_eq!(got["headers"]["content-type"], "application/json");
    }
    // An event that is queued is known by its source and id.
    let id = queue(&daemon, "/", structured, event);
    let binary = "ce-specversion: 1.0\r\nce-id: 1\r\nce-source: /s\r\nce-type: t\r\n";
    assert_eq!(queue(&daemon, "/", binary, "{\"k\":1}"), id);
    let other = send(daemon.gateway(), "/", &format!("{ASYNC}{binary}"), "other");
    assert_eq!((other.status, &other.json()["error"]), (422, &json!("key_reused")));
    wait_until("it was handed on", || attempts(daemon.home(), &id).len() == 1);
    assert_eq!(attempts(daemon.home(), &id)[0]["headers"]["ce-type"], "t");

    // Nobody passes for the queue.
    for connection in ["", "Connection: close\r\n"] {
        let fields = format!("{connection}Thaw-Invocation-Id: 1\r\nThaw-Attempt: 1\r\n");
        let got = send(daemon.gateway(), "/", &fields, "").json();
        assert_eq!(got["headers"]["thaw-invocation-id"], Value::Null, "{got}");
        assert_eq!(got["headers"]["thaw-attempt"], Value::Null, "{got}");
        let fields = format!("{connection}ce-type: thaw.schedule\r\n");
        assert_eq!(send(daemon.gateway(), "/", &fields, "").status, 400);
    }
    let own = r#"{"specversion":"1.0","id":"1","source":"/s","type":"thaw.schedule"}"#;

    for (fields, body, why) in [
        (structured, own, "not for clients"),
        (structured, "{}", "specversion"),
        (structured, "[", "JSON"),
        ("ce-specversion: 1.0\r\n", "", "`id`"),
        ("Content-Type: application/cloudevents-batch+json\r\n", "[]", "batches"),
    ] {
        let refused = send(daemon.gateway(), "/", fields, body);
        assert_eq!(refused.status, 400, "{}", refused.text());
        assert!(
            refused.json()["reason"].as_str().is_some_and(|said| said.contains(why)),
            "{}",
            refused.text()
        );
    }
    assert_eq!(post(daemon.gateway(), "receiver", "/", b"no event").status, 200);
}

/// What a client is told of the invocation `id`.
fn status(daemon: &Daemon, id: &str) -> Response {
    get(daemon.gateway(), "receiver", &format!("/slow?thaw-invocation={id}"))
}

fn state(daemon: &Daemon, id: &str) -> String {
    status(daemon, id).json()["state"].as_str().unwrap_or_default().to_owned()
}

/// Lines of the log that may be lost with a daemon that is killed: those of requests at that moment.
const LINES_LOST: usize = 2;

/// The ends of invocations of which the other function has heard: its own invocation, whose end and
/// how it was.
fn heard(home: &Path) -> BTreeSet<(String, String, String)> {
    let log = fs::read_to_string(home.join("logs/hearer.log")).unwrap_or_default();
    let lines = log.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
    let requests =
        lines.filter_map(|line| serde_json::from_str::<Value>(line["text"].as_str()?).ok());
    let ends = requests.filter_map(|got| {
        let body: Value = serde_json::from_str(got["body"].as_str()?).ok()?;
        let text = |value: &Value| value.as_str().map(str::to_owned);
        Some((
            text(&got["headers"]["thaw-invocation-id"])?,
            text(&body["id"])?,
            text(&body["state"])?,
        ))
    });
    ends.collect()
}

#[test]
fn clients_and_destinations_learn_what_became_of_an_invocation() {
    let keys = "async = { attempts = 2, backoff = \"100ms\", backoff_max = \"200ms\", \
                on_success = \"hearer\", on_failure = \"hearer\" }";
    let receiver = Function::PythonVariant { program: "receiver", name: "receiver", keys };
    let hearer = Function::PythonVariant { program: "receiver", name: "hearer", keys: "" };
    let home = built_home("triggers-ends", &[receiver, hearer]);
    let mut daemon = Daemon::start(&home, &DaemonOptions::default());
    let answer = send(daemon.gateway(), "/slow?a=b", ASYNC, "");
    assert_eq!(answer.status, 202);
    let location = answer.header("location").expect("a place to ask").to_owned();
    let id = answer.json()["id"].as_str().expect("an id").to_owned();
    assert_eq!(location, format!("?thaw-invocation={id}"));
    wait_until("it is done", || state(&daemon, &id) == "done");
    let done = status(&daemon, &id).json();
    assert_eq!(done, json!({"id": id, "state": "done", "attempts": 1, "status": 200}));
    assert_eq!(status(&daemon, &"0".repeat(32)).status, 404);
    // Functions without a queue get such requests themselves, as any other.
    let path = format!("/?thaw-invocation={id}");
    assert_eq!(get(daemon.gateway(), "hearer", &path).json()["path"], path);

    let mut ids = BTreeSet::from([id]);
    ids.extend((0..6).map(|_| queue(&daemon, "/slow", "", "")));
    ids.extend((0..3).map(|_| queue(&daemon, "/refuse", "", "")));
    wait_until("some have ended", || heard(&home).len() >= 2);
    daemon.kill_and_await_next();
    wait_until("all have ended", || {
        ids.iter().all(|id| ["done", "dead"].contains(&state(&daemon, id).as_str()))
    });
    let heard_of = |all: &BTreeSet<(String, String, String)>| {
        all.iter().map(|(_, of, _)| of.clone()).collect::<BTreeSet<_>>().len()
    };
    // A line that an instance had printed when the daemon was killed may be lost.
    wait_until("all ends were heard of", || heard_of(&heard(&home)) + LINES_LOST >= ids.len());
    wait_until("nothing waits", || counts_of(&daemon, "hearer").0 == 0);
    // Each end is one invocation of the destination, whatever was attempted twice.
    let all = heard(&home);
    assert_eq!(all.len(), heard_of(&all), "{all:?}");
    let dead = all.iter().filter(|(.., state)| state == "dead").count();
    assert!(dead <= 3 && dead + LINES_LOST >= 3, "{all:?}");
}
