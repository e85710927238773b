//! What functions print: who printed it, and what becomes of one that prints too much.

use serde_json::Value;
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};
use thaw_e2e::{
    Daemon, DaemonOptions, Function, built_home, get, has_controller, request, resident_bytes, run,
    thaw, wait_until,
};

/// A daemon that may grow by so much while guests flood their logs.
const GROWTH_MAX: u64 = 96 << 20;
/// How long they do.
const FLOOD: Duration = Duration::from_secs(8);

fn printer(name: &'static str, keys: &'static str) -> Function {
    Function::PythonVariant { program: "printer", name, keys }
}

/// The lines of a function's log, as the daemon has them.
fn lines(daemon: &Daemon, function: &str) -> Vec<Value> {
    let text = daemon.admin(&format!("/functions/{function}/logs")).text();
    text.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect()
}

/// The line with this text, when it is there.
fn line(daemon: &Daemon, function: &str, text: &str) -> Value {
    let find = || lines(daemon, function).into_iter().find(|line| line["text"] == text);
    wait_until(&format!("{function} has printed {text}"), || find().is_some());
    find().expect("just seen")
}

#[test]
fn lines_say_which_instance_printed_them_however_it_was_booted() {
    let functions = [
        printer("warm", "template = false"),
        printer("fork", "template = true"),
        printer("ready", "template = false\nready = 2"),
    ];
    let home = built_home("logs-origins", &functions);
    let daemon = Daemon::start(&home, &DaemonOptions::default());
    for kind in ["warm", "fork", "ready"] {
        let detail = || daemon.admin(&format!("/functions/{kind}")).json();
        // A template is made after some boots.
        wait_until(&format!("a boot can be by {kind}"), || {
            let standby = &detail()["standby"];
            match kind {
                "fork" if standby["template"].is_null() => {
                    get(daemon.gateway(), kind, "/");
                    false
                }
                "ready" => {
                    let ps = run(thaw().env("THAW_HOME", &home).args(["ps", "--json"])).success();
                    let ps: Vec<Value> = serde_json::from_str(&ps).expect("JSON");
                    let ready = ps.iter().filter(|one| one["state"] == "ready").count();
                    ready > 0 && standby["ready"].as_array().is_some_and(|r| !r.is_empty())
                }
                _ => true,
            }
        });
        let said = ["one", "two"].map(|word| {
            assert_eq!(get(daemon.gateway(), kind, &format!("/say/{word}")).status, 200);
            let out = line(&daemon, kind, &format!("out {word}"));
            let err = line(&daemon, kind, &format!("err {word}"));
            assert_eq!((&out["stream"], &err["stream"]), (&"out".into(), &"err".into()));
            assert!(out["pid"].as_u64().is_some_and(|pid| pid > 1), "{out}");
            assert_eq!(out["pid"], err["pid"]);
            assert_eq!(out["instance"], err["instance"]);
            out["instance"].as_u64().expect("a number")
        });
        assert_ne!(said[0], said[1]);
        let of = |id: u64| {
            let boots = detail()["boots"].clone();
            boots.as_array()?.iter().find(|boot| boot["instance"] == id).cloned()
        };
        wait_until("its boot is known", || of(said[0]).is_some());
        let boot = of(said[0]).expect("its boot");
        // The first boot of an image for a while counts as cold.
        assert!(boot["kind"] == kind || kind == "warm" && boot["kind"] == "cold", "{boot}");
        // The files have the same, and one instance's lines can be had alone.
        let logs = |more: &[&str]| logs(&home, kind, more);
        for (id, word) in said.iter().zip(["one", "two"]) {
            let line = format!("[{id}] out {word}\n");
            wait_until("it is in the file", || logs(&[]).contains(&line));
        }
        let one = logs(&["--instance", &said[1].to_string()]);
        assert!(one.contains("out two\n") && !one.contains("one"), "{one}");
    }
    assert_eq!(daemon.stop(), Some(0));
}

/// The lines of `thaw logs`.
fn logs(home: &Path, function: &str, more: &[&str]) -> String {
    run(thaw().env("THAW_HOME", home).args(["logs", function]).args(more)).success()
}

#[test]
fn the_end_of_an_instance_stands_in_the_log_behind_what_it_has_printed() {
    let keys = "limits.timeout = \"20s\"\nlimits.memory = \"128MiB\"";
    let home = built_home("logs-ends", &[printer("ending", keys)]);
    let daemon = Daemon::start(&home, &DaemonOptions::default());
    let mut ends = vec![
        ("/exit", 502, "the program ended with exit code 3"),
        ("/hang", 504, "no answer within 20 s, ending the instance"),
    ];
    let limited = has_controller("memory");
    if limited {
        ends.push(("/eat", 502, "it reached its memory limit, `limits.memory` of 128MiB"));
    }
    for (path, status, said) in &ends {
        assert_eq!(get(daemon.gateway(), "ending", path).status, *status, "{path}");
        wait_until("it is in the file", || logs(&home, "ending", &[]).contains(said));
    }
    let all = logs(&home, "ending", &[]);
    let mut lines = all.lines();
    let last_words = lines.next().expect("a line");
    let (origin, text) = last_words.split_once(' ').expect("its instance");
    assert_eq!(text, "last words, without an end", "{all}");
    let id = origin.trim_matches(['[', ']']);
    let end = format!("[thaw] instance {id}: {}", ends[0].2);
    assert_eq!(lines.next(), Some(&*end), "{all}");
    let one = logs(&home, "ending", &["--instance", id]);
    assert_eq!(one, format!("{text}\n{end}\n"));
    let json: Value =
        logs(&home, "ending", &["--json", "--grep", "exit code"]).parse().expect("one line");
    assert_eq!((&json["stream"], &json["instance"].to_string()[..]), (&"thaw".into(), id));
    // What is shown before the text is searched, too.
    let found = logs(&home, "ending", &["--grep", &format!(r"^\[thaw\] instance {id}:")]);
    assert_eq!(found, format!("{end}\n"));
    if limited {
        let last = lines.last().expect("a line");
        assert!(last.contains(ends[2].2), "{all}");
        assert!(last.ends_with("; raise `limits.memory` in thaw.toml"), "{all}");
        // The owner hears the same at their own door, and the public does not.
        let invoked = run(thaw().env("THAW_HOME", &home).args(["invoke", "ending", "-p", "/eat"]));
        assert_eq!(invoked.code, Some(1), "{invoked:?}");
        assert!(invoked.stdout.contains("`limits.memory` of 128MiB"), "{invoked:?}");
        assert!(invoked.stdout.contains("raise `limits.memory`"), "{invoked:?}");
        let public = get(daemon.gateway(), "ending", "/eat");
        assert!(!public.text().contains("limits.memory"), "{}", public.text());
    }
    assert_eq!(daemon.stop(), Some(0));
}

#[test]
fn lines_are_chosen_by_their_time_and_text() {
    let home = built_home("logs-chosen", &[printer("chosen", "isolation = \"instance\"")]);
    let daemon = Daemon::start(&home, &DaemonOptions::default());
    for word in ["first", "second"] {
        assert_eq!(get(daemon.gateway(), "chosen", &format!("/say/{word}")).status, 200);
    }
    wait_until("all is in the file", || {
        let text = logs(&home, "chosen", &[]);
        ["out first", "err first", "out second", "err second"]
            .iter()
            .all(|line| text.contains(line))
    });
    let chosen = |more: &[&str]| -> Vec<String> {
        let text = logs(&home, "chosen", more);
        text.lines().filter_map(|line| Some(line.split_once(' ')?.1.to_owned())).collect()
    };
    assert_eq!(chosen(&["--grep", "^out .*t$"]), ["out first"]);
    // The two streams are read in either order.
    let last = chosen(&["-g", "second", "-n", "1"]);
    assert!(last == ["err second"] || last == ["out second"], "{last:?}");
    assert_eq!(chosen(&["--since", "1h"]).len(), 4);
    assert!(chosen(&["--since", "2999-01-01T00:00:00Z"]).is_empty());
    let line: Value =
        serde_json::from_str(logs(&home, "chosen", &["--json", "--grep", "out second"]).trim())
            .expect("one line");
    let stamped = logs(&home, "chosen", &["-t", "--grep", "out second"]);
    let time = stamped.split(' ').next().expect("a time");
    let from = logs(&home, "chosen", &["--json", "--since", time, "--grep", "second"]);
    assert!(from.contains(&line["time_ms"].to_string()), "{from}");
    for wrong in [&["--since", "yesterday"][..], &["--grep", "("]] {
        let outcome = run(thaw().args(["logs", "chosen"]).args(wrong));
        assert_eq!(outcome.code, Some(2), "{wrong:?}: {}", outcome.stdout);
    }
    assert_eq!(daemon.stop(), Some(0));
}

#[test]
fn what_guests_print_cannot_drive_a_terminal_or_pass_for_another() {
    let home = built_home("logs-escapes", &[printer("rude", "isolation = \"instance\"")]);
    let daemon = Daemon::start(&home, &DaemonOptions::default());
    let said = "/say/%1b%5b2J%1b%5d0;owned%07%0a%5bthaw%5d%20all%20is%20well";
    assert_eq!(get(daemon.gateway(), "rude", said).status, 200);
    wait_until("it is in the file", || logs(&home, "rude", &[]).contains("all is well"));
    let shown = logs(&home, "rude", &[]);
    assert!(!shown.bytes().any(|byte| byte < b' ' && byte != b'\n'), "{shown:?}");
    assert!(shown.contains("\\x1b[2J\\x1b]0;owned\\x07\n"), "{shown}");
    assert!(!shown.lines().any(|line| line.starts_with("[thaw]")), "{shown}");
    assert_eq!(daemon.stop(), Some(0));
}

#[test]
fn floods_take_bounded_memory_and_hold_up_nobody() {
    let keys = "isolation = \"instance\"\nlimits.concurrency = 1\nlimits.keep_alive = \"600s\"";
    let functions = [printer("flooder", keys), printer("quiet", "isolation = \"instance\"")];
    let home = built_home("logs-floods", &functions);
    let arguments = vec!["--drain=1s".to_owned()];
    let daemon = Daemon::start(&home, &DaemonOptions { arguments });
    let gateway = daemon.gateway();
    assert_eq!(get(gateway, "quiet", "/say/before").status, 200);
    let before = resident_bytes(daemon.pid());
    // An instance that has answered is idle, and the next request goes to it: the
    // floods are started at the same time, to be in instances of their own.
    thread::scope(|scope| {
        for kind in ["empty", "empty", "single", "long", "lines"] {
            let path = format!("/flood/{kind}");
            scope.spawn(move || assert_eq!(get(gateway, "flooder", &path).status, 200));
        }
    });
    let mut largest = 0;
    let begin = Instant::now();
    while begin.elapsed() < FLOOD {
        // Whoever is held up by the log has no answer within the function's time.
        assert_eq!(get(gateway, "quiet", "/").status, 200);
        let recent = daemon.admin("/functions/flooder/logs").body.len();
        assert!(recent < 4 << 20, "{recent} bytes of lines are in memory");
        largest = largest.max(resident_bytes(daemon.pid()).saturating_sub(before));
        assert!(largest < GROWTH_MAX, "the daemon has grown by {largest} bytes");
        thread::sleep(Duration::from_millis(20));
    }
    // Others' lines are all there, and those that flood are slowed down, not stopped.
    assert_eq!(get(gateway, "quiet", "/say/after").status, 200);
    line(&daemon, "quiet", "out after");
    wait_until("one that floods answers", || {
        request(gateway, "flooder", "/say/still", None).is_ok_and(|r| r.status == 200)
    });
    let said = |line: &Value| line["text"].as_str().is_some_and(|t| t.contains("logs too much"));
    wait_until("the gap is said", || {
        let file = std::fs::read_to_string(home.join("logs/flooder.log")).unwrap_or_default();
        file.contains("logs too much") || lines(&daemon, "flooder").iter().any(said)
    });
    assert_eq!(daemon.stop(), Some(0));
}
