//! The example functions over HTTP, through one daemon.

use std::net::SocketAddr;
use std::sync::OnceLock;
use std::thread;
use std::time::{Duration, Instant};
use thaw_e2e::{
    Daemon, DaemonOptions, Function, Raw, built_home, exists, free_port, get, post, python,
    repository, request, run, run_with_input, thaw, wait_until,
};

struct Served {
    daemon: Daemon,
    own_port: SocketAddr,
    whole_port: SocketAddr,
}

/// Requests that `examples/hello-python` has answered before it was frozen.
const TRAINED: u64 = 20;

/// One daemon for all tests of this file; it ends with the test process.
fn served() -> &'static Served {
    static SERVED: OnceLock<Served> = OnceLock::new();
    SERVED.get_or_init(|| {
        let own_port = SocketAddr::from(([127, 0, 0, 1], free_port()));
        let whole_port = SocketAddr::from(([127, 0, 0, 1], free_port()));
        let variant = |name, keys: &str, limits| Function::Variant {
            example: "hello-python",
            name,
            keys: keys.to_owned(),
            limits,
        };
        let kept = |name, keys: &str| Function::Program {
            source: "kept/kept.c",
            name,
            keys: format!(
                "command = [\"/app/kept\"]\nfiles = [\"kept\"]\nisolation = \"instance\"\n{keys}\n\
                 build = {{ command = [\"cc\", \"-O2\", \"-static\", \"-o\", \"kept\", \"kept.c\"] }}\n\
                 [runtime]\nkind = \"binary\""
            ),
        };
        let home = built_home(
            "gateway",
            &[
                Function::Example("hello-c"),
                Function::Example("hello-c-dynamic"),
                Function::Example("hello-python"),
                Function::Example("thumbnail-python"),
                Function::Python("asks"),
                Function::Python("filtered"),
                variant("reused", "isolation = \"instance\"", "instances = 1"),
                variant("counted", "isolation = \"instance\"", "instances = 1"),
                variant("killed", "isolation = \"instance\"", "instances = 1"),
                variant("short-lived", "isolation = \"instance\"", "keep_alive = \"300ms\""),
                variant("impatient", "", "timeout = \"4s\""),
                variant("alone", "", "instances = 1\nqueue = \"100ms\""),
                kept("kept", ""),
                kept(
                    "whole",
                    &format!(
                        "listen = \"{whole_port}\"\nentry = {{ connections = \"handover\" }}"
                    ),
                ),
                variant("own-port", &format!("listen = \"{own_port}\""), ""),
            ],
        );
        let arguments = vec!["--head-timeout=20s".to_owned()];
        Served { daemon: Daemon::start(&home, &DaemonOptions { arguments }), own_port, whole_port }
    })
}

fn gateway() -> SocketAddr {
    served().daemon.gateway()
}

#[track_caller]
fn assert_refused(response: &thaw_e2e::Response, status: u16, error: &str) {
    assert_eq!(response.status, status, "{}", response.text());
    assert_eq!(response.header("content-type"), Some("application/json"));
    let body = response.json();
    assert_eq!(body["error"], error, "{body}");
    assert!(body["reason"].as_str().is_some_and(|reason| reason.len() > 10), "{body}");
}

#[test]
fn c_functions_answer() {
    for name in ["hello-c", "hello-c-dynamic"] {
        for _ in 0..5 {
            let response = get(gateway(), name, "/some/path?x=1");
            assert_eq!(response.status, 200);
            assert_eq!(response.text(), "Hello from C! You asked for /some/path?x=1.\n");
        }
    }
}

#[test]
fn python_answers() {
    let response = get(gateway(), "hello-python", "/?name=Ada");
    assert_eq!(response.status, 200);
    assert_eq!(response.text(), "Hello from Python! Nice to meet Ada.\n");
    assert_eq!(get(gateway(), "hello-python", "/absent").status, 404);
    let environment = get(gateway(), "hello-python", "/env").json();
    assert_eq!(environment["GREETING"], "Hello from Python!");
    let body = vec![b'x'; 3 << 20];
    assert_eq!(post(gateway(), "hello-python", "/echo", &body).body, body);
}

#[test]
fn the_function_is_found_whatever_form_the_host_header_has() {
    for host in ["hello-c", "HELLO-C", "hello-c:8080"] {
        assert_eq!(get(gateway(), host, "/").status, 200, "{host}");
    }
}

#[test]
fn thumbnails_are_made() {
    let draw = "import sys; from PIL import Image; \
                Image.radial_gradient('L').resize((640, 480)).convert('RGB').save(sys.argv[1])";
    let directory = tempfile::tempdir().expect("a directory");
    let picture = directory.path().join("picture.png");
    let site = repository().join("examples/thumbnail-python/build/site");
    let mut command = std::process::Command::new(python());
    run(command.args(["-c", draw]).arg(&picture).env("PYTHONPATH", site)).success();
    let picture = std::fs::read(picture).expect("a picture");
    for (format, magic) in [("png", &b"\x89PNG"[..]), ("jpeg", &b"\xff\xd8\xff"[..])] {
        let path = format!("/?width=64&format={format}");
        let response = post(gateway(), "thumbnail-python", &path, &picture);
        assert_eq!(response.status, 200, "{}", response.text());
        assert!(response.body.starts_with(magic));
        assert!(response.body.len() < picture.len());
    }
    let response = post(gateway(), "thumbnail-python", "/", b"not an image");
    assert_eq!(response.status, 400);
}

#[test]
fn copies_of_one_image_share_no_random_values() {
    let values: Vec<_> = (0..8).map(|_| get(gateway(), "hello-python", "/random").json()).collect();
    for key in ["urandom", "random", "uuid4", "boot_id"] {
        for (i, a) in values.iter().enumerate() {
            assert!(!a[key].is_null(), "{a}");
            for b in &values[..i] {
                assert_ne!(a[key], b[key], "two copies gave the same {key}");
            }
        }
    }
}

/// The client of a copy that was frozen before it listened waits for it to do so.
#[test]
fn a_program_may_ask_for_its_freeze_before_it_listens() {
    let answers: Vec<String> = (0..3)
        .map(|_| {
            let response = get(gateway(), "asks", "/");
            assert_eq!(response.status, 200, "{}", response.text());
            response.text().to_owned()
        })
        .collect();
    for (i, answer) in answers.iter().enumerate() {
        assert!(answer.starts_with("1 "), "not the first copy of an image: {answer}");
        assert!(!answers[..i].contains(answer), "two copies drew the same number: {answer}");
    }
}

/// Filters of system calls are saved (seccomp(2)), and calls are watched in copies.
#[test]
fn a_program_that_has_restricted_itself_is_restricted_in_its_copies() {
    for _ in 0..3 {
        let response = get(gateway(), "filtered", "/");
        assert_eq!(response.text(), "error 77, signal 31, mode 2 with 2");
    }
}

#[test]
fn clocks_go_on_in_a_copy() {
    let first = get(gateway(), "hello-python", "/time").json();
    thread::sleep(Duration::from_millis(50));
    let before = std::time::UNIX_EPOCH.elapsed().expect("a clock").as_secs_f64();
    let second = get(gateway(), "hello-python", "/time").json();
    let time = |value: &serde_json::Value, key: &str| value[key].as_f64().expect("a number");
    assert!(time(&second, "time") > time(&first, "time"));
    assert!(time(&second, "boottime") > time(&first, "boottime"));
    let after = std::time::UNIX_EPOCH.elapsed().expect("a clock").as_secs_f64();
    assert!((before - 1.0..after + 1.0).contains(&time(&second, "time")), "{second}");
}

#[test]
fn a_function_has_a_port_of_its_own() {
    for host in ["own-port", "anything-else"] {
        let response = get(served().own_port, host, "/");
        assert_eq!(response.status, 200);
        assert!(response.text().starts_with("Hello"));
    }
}

#[test]
fn every_connection_gets_a_fresh_instance() {
    for _ in 0..3 {
        let process = get(gateway(), "hello-python", "/pid").json();
        assert_eq!(process["requests"], TRAINED + 1);
    }
}

#[test]
fn an_instance_is_reused_where_the_function_allows_it() {
    let count = || get(gateway(), "counted", "/pid").json()["requests"].as_u64().expect("a number");
    let first = count();
    assert_eq!((count(), count()), (first + 1, first + 2));
}

#[test]
fn an_idle_instance_ends_after_keep_alive() {
    let asked = || get(gateway(), "short-lived", "/pid").json()["requests"].clone();
    assert_eq!(asked(), 1);
    // It may have answered before the daemon shows it, and another one is the first again.
    wait_until("another one serves", || {
        wait_until("it is not there", || served().daemon.instances("short-lived").is_empty());
        asked() == 1
    });
}

#[test]
fn unknown_functions_are_404() {
    assert_refused(&get(gateway(), "nobody", "/"), 404, "not_found");
    assert_refused(&get(gateway(), "", "/"), 404, "not_found");
}

#[test]
fn unreadable_heads_are_400() {
    for head in [
        "GARBAGE\r\n\r\n",
        "GET / HTTP/1.1\r\nHost: hello-c\r\nbroken line\r\n\r\n",
        "GET / HTTP/7.0\r\nHost: hello-c\r\n\r\n",
        "\x16\x03\x01\x02\x00\x01\x00\x01\r\n\r\n",
    ] {
        let response = Raw::connect(gateway()).send(head).response().expect("an answer");
        assert_refused(&response, 400, "bad_request");
    }
}

#[test]
fn large_heads_are_431() {
    let head = format!("GET / HTTP/1.1\r\nHost: hello-c\r\nX: {}\r\n\r\n", "x".repeat(1 << 20));
    let response = Raw::connect(gateway()).send(head).response().expect("an answer");
    assert_refused(&response, 431, "head_too_large");
}

#[test]
fn slow_heads_are_408() {
    let mut client = Raw::connect(gateway());
    let response = client.send("GET / HTTP/1.1\r\nHost: hel").response().expect("an answer");
    assert_refused(&response, 408, "head_too_slow");
}

#[test]
fn a_head_may_come_in_pieces() {
    let mut client = Raw::connect(gateway());
    for piece in ["GE", "T /pie", "ces HTTP/1.1\r\nHo", "st: hello-c\r", "\n\r", "\n"] {
        client.send(piece);
        thread::sleep(Duration::from_millis(20));
    }
    assert_eq!(
        client.response().expect("an answer").text(),
        "Hello from C! You asked for /pieces.\n"
    );
}

#[test]
fn a_client_that_leaves_early_harms_nobody() {
    for bytes in ["", "GET", "GET / HTTP/1.1\r\nHost: hello-python\r\n\r\n"] {
        for _ in 0..5 {
            Raw::connect(gateway()).send(bytes);
        }
    }
    assert_eq!(get(gateway(), "hello-python", "/").status, 200);
}

#[test]
fn an_instance_that_dies_before_it_answers_is_502() {
    assert_refused(&get(gateway(), "hello-python", "/exit"), 502, "bad_gateway");
    assert_eq!(get(gateway(), "hello-python", "/").status, 200);
}

#[test]
fn no_capacity_is_503_with_retry_after() {
    let slow = thread::spawn(|| get(gateway(), "alone", "/slow?seconds=20"));
    wait_until("the only instance is busy", || served().daemon.instances("alone").len() == 1);
    let response = get(gateway(), "alone", "/");
    assert_refused(&response, 503, "unavailable");
    let seconds = response.header("retry-after").expect("Retry-After");
    assert!(seconds.parse::<u64>().is_ok_and(|seconds| seconds >= 1));
    assert_eq!(slow.join().expect("the slow request").status, 200);
    wait_until("there is room again", || get(gateway(), "alone", "/").status == 200);
}

#[test]
fn a_function_that_takes_too_long_is_504() {
    let started = Instant::now();
    assert_refused(&get(gateway(), "impatient", "/slow?seconds=50"), 504, "timeout");
    assert!(started.elapsed() < Duration::from_secs(30));
    let daemon = &served().daemon;
    wait_until("its instance is gone", || daemon.instances("impatient").is_empty());
    wait_until("another one answers", || get(gateway(), "impatient", "/").status == 200);
}

#[test]
fn many_clients_are_served_at_once() {
    let clients: Vec<_> = (0..16)
        .map(|i| {
            thread::spawn(move || {
                for n in 0..10 {
                    let path = format!("/client/{i}/{n}");
                    let name = if n % 2 == 0 { "hello-c" } else { "hello-c-dynamic" };
                    let text = get(gateway(), name, &path).text();
                    assert_eq!(text, format!("Hello from C! You asked for {path}.\n"));
                }
            })
        })
        .collect();
    for client in clients {
        client.join().expect("a client");
    }
}

/// Sends a request on which others follow, and reads its answer.
fn ask(client: &mut Raw, host: &str, path: &str) -> thaw_e2e::Response {
    client.send(format!("GET {path} HTTP/1.1\r\nHost: {host}\r\nCookie: of={host}\r\n\r\n"));
    client.response().expect("an answer")
}

#[test]
fn two_requests_of_a_connection_reach_two_instances() {
    // The function answers in HTTP/1.0 and closes, which is between it and the gateway.
    let mut client = Raw::connect(gateway());
    for _ in 0..3 {
        let process = ask(&mut client, "hello-python", "/pid").json();
        assert_eq!(process["requests"], TRAINED + 1);
    }
}

#[test]
fn requests_of_a_connection_reach_the_functions_that_they_name() {
    let mut client = Raw::connect(gateway());
    for round in 0..5 {
        let path = format!("/{round}");
        let text = ask(&mut client, "hello-c", &path).text();
        assert_eq!(text, format!("Hello from C! You asked for {path}.\n"));
        assert!(ask(&mut client, "hello-python", "/").text().starts_with("Hello from Python!"));
        assert_refused(&ask(&mut client, "nobody", "/"), 404, "not_found");
        assert_eq!(ask(&mut client, "reused", "/").status, 200);
    }
}

#[test]
fn pipelined_requests_are_answered_in_turn() {
    let mut client = Raw::connect(gateway());
    let head = |name: &str| format!("GET /p HTTP/1.1\r\nHost: {name}\r\n\r\n");
    client.send([head("hello-python"), head("hello-c"), head("hello-c")].concat());
    assert_eq!(client.response().expect("an answer").status, 404);
    for _ in 0..2 {
        let text = client.response().expect("an answer").text();
        assert_eq!(text, "Hello from C! You asked for /p.\n");
    }
}

/// A server in the sandbox that attends to one connection until it ends serves all that
/// comes through the gateway, and those that are handed over.
#[test]
fn a_connection_to_an_instance_serves_many_clients() {
    let mut clients: Vec<_> = (0..4).map(|_| Raw::connect(gateway())).collect();
    // An answer may be there before its place is free for another client.
    let wait_for_place = || {
        wait_until("the place is free", || {
            let instances = served().daemon.instances("kept");
            instances.iter().all(|instance| instance["connections"] == 0)
        });
    };
    for connection in [1, 3] {
        for request in 1..=20 {
            let text = ask(&mut clients[request % 4], "kept", "/").text();
            assert_eq!(text, format!("connection {connection}, request {request}\n"));
            wait_for_place();
        }
        // Such a client gets a connection of its own, for which the other one ends.
        let mut last = Raw::connect(gateway());
        last.send("GET / HTTP/1.1\r\nHost: kept\r\nConnection: close\r\n\r\n");
        let text = last.response().expect("an answer").text();
        assert_eq!(text, format!("connection {}, request 1\n", connection + 1));
        assert_eq!(last.read_to_end(), b"");
        wait_for_place();
    }
    assert_eq!(served().daemon.instances("kept").len(), 1);
}

#[test]
fn routed_requests_that_fail_say_why_and_the_connection_goes_on() {
    let mut client = Raw::connect(gateway());
    assert_refused(&ask(&mut client, "hello-python", "/exit"), 502, "bad_gateway");
    assert_refused(&ask(&mut client, "impatient", "/slow?seconds=50"), 504, "timeout");
    assert_eq!(ask(&mut client, "hello-python", "/").status, 200);
}

#[test]
fn the_body_is_asked_for_where_the_client_waits_to_be() {
    let mut client = Raw::connect(gateway());
    client.send(
        "POST /echo HTTP/1.1\r\nHost: hello-python\r\nContent-Length: 5\r\n\
         Expect: 100-continue\r\n\r\n",
    );
    assert_eq!(client.response().expect("an interim answer").status, 100);
    assert_eq!(client.send("hello").response().expect("an answer").text(), "hello");
}

#[test]
fn a_function_may_have_the_connections_at_its_own_address_whole() {
    let mut client = Raw::connect(served().whole_port);
    for (request, host) in [(1, "whole"), (2, "anything-else")] {
        let text = ask(&mut client, host, "/").text();
        assert_eq!(text, format!("connection 1, request {request}\n"));
    }
    // It may answer before the daemon shows it.
    wait_until("there is one instance", || served().daemon.instances("whole").len() == 1);
}

#[test]
fn a_body_that_arrives_with_the_head_is_not_lost() {
    let mut client = Raw::connect(gateway());
    client.send("POST /echo HTTP/1.1\r\nHost: hello-python\r\nContent-Length: 11\r\n\r\nhello ");
    thread::sleep(Duration::from_millis(50));
    client.send("again");
    assert_eq!(client.response().expect("an answer").text(), "hello again");
}

fn cli(arguments: &[&str]) -> thaw_e2e::Outcome {
    run(thaw().env("THAW_HOME", served().daemon.home()).args(arguments))
}

#[test]
fn invoke_prints_the_response_and_the_phases() {
    // What is known of a boot comes a moment after the answer, for which it is not waited for long.
    wait_until("all phases are printed", || {
        let outcome = cli(&["invoke", "hello-c", "--path", "/by-invoke", "--timings"]);
        assert_eq!(outcome.code, Some(0), "{}", outcome.stderr);
        assert!(outcome.stdout.contains("You asked for /by-invoke."), "{}", outcome.stdout);
        let phases = [" boot;", "taken", "mapped", "instruction", "byte"];
        phases.iter().all(|phase| outcome.stderr.contains(phase))
    });
    let outcome = cli(&["invoke", "hello-python", "--path", "/echo", "--data", "sent"]);
    assert_eq!(outcome.success(), "sent");
    // What is piped into it is a body; an empty pipe is none.
    let mut piped = thaw();
    piped.env("THAW_HOME", served().daemon.home()).args(["invoke", "hello-python", "-p", "/echo"]);
    assert_eq!(run_with_input(&mut piped, b"piped").success(), "piped");
    let outcome = cli(&["invoke", "hello-c"]);
    assert_eq!((&outcome.stderr[..], outcome.code), ("", Some(0)));
    let outcome = cli(&["invoke", "hello-pyton"]);
    let said = "no function is named `hello-pyton` (is `hello-python` meant?); `thaw list`";
    assert!(outcome.stdout.is_empty() && outcome.stderr.contains(said), "{outcome:?}");
    let outcome = cli(&["invoke", "nobody"]);
    assert_eq!(outcome.code, Some(1));
    assert!(outcome.stderr.contains("nobody"), "{}", outcome.stderr);
}

#[test]
fn invoke_prints_an_answer_that_comes_before_the_body_was_read() {
    let file = served().daemon.home().with_extension("body");
    let data = format!("@{}", file.display());
    for mebibytes in [1, 5, 20] {
        std::fs::write(&file, vec![b'x'; mebibytes << 20]).unwrap();
        for _ in 0..3 {
            let outcome =
                cli(&["invoke", "hello-python", "-X", "GET", "-p", "/?name=Ada", "-d", &data]);
            assert_eq!(outcome.success(), "Hello from Python! Nice to meet Ada.\n");
        }
    }
    let long = cli(&["invoke", "hello-c", "-p", &format!("/{}", "y".repeat(100_000))]);
    assert!(long.stderr.contains("the path is too long"), "{long:?}");
}

/// As those that ssh(1) and CI runners keep open.
#[test]
fn invoke_does_not_wait_for_a_pipe_to_which_nobody_writes() {
    let (input, _writer) = std::io::pipe().expect("a pipe");
    let output = thaw()
        .env("THAW_HOME", served().daemon.home())
        .args(["invoke", "hello-c", "-p", "/by-invoke"])
        .stdin(input)
        .output()
        .expect("it runs");
    let [out, said] = [&output.stdout, &output.stderr].map(|bytes| String::from_utf8_lossy(bytes));
    assert!(out.contains("You asked for /by-invoke."), "{out}{said}");
    assert!(said.contains("so the request has no body; `--data @-` waits for one"), "{said}");
}

#[test]
fn the_verbs_tell_about_the_functions() {
    assert_eq!(get(gateway(), "reused", "/").status, 200);
    wait_until("it is shown", || {
        let ps = cli(&["ps", "--json"]).success();
        let ps: serde_json::Value = serde_json::from_str(&ps).expect("JSON");
        ps.as_array().expect("a list").iter().any(|one| one["function"] == "reused")
    });
    let list = cli(&["ls", "--json"]).success();
    let list: serde_json::Value = serde_json::from_str(&list).expect("JSON");
    let python = list.as_array().expect("a list").iter().find(|one| one["name"] == "hello-python");
    let python = python.expect("it is listed");
    assert_eq!((&python["kind"], &python["state"]), (&"http".into(), &"served".into()), "{list}");
    assert!(python["version"].as_u64().is_some_and(|version| version > 0), "{list}");
    let list = cli(&["list"]).success();
    let line = list.lines().find(|line| line.starts_with("hello-python  ")).expect("its line");
    assert!(line.contains(&format!("hello-python at {}", gateway())), "{list}");
    let images = cli(&["images"]).success();
    for name in ["hello-c", "hello-python", "thumbnail-python"] {
        assert!(images.contains(name), "{images}");
    }
    let shown = cli(&["inspect", "hello-python"]).success();
    for part in ["FUNCTION", "CONFIGURATION", "INSTANCES", "BOOTS", "port = 8080"] {
        assert!(shown.contains(part), "{part} is missing in {shown}");
    }
    let inspected = cli(&["inspect", "hello-python", "--json"]).success();
    let inspected: serde_json::Value = serde_json::from_str(&inspected).expect("JSON");
    assert_eq!(inspected["name"], "hello-python");
    wait_until("the request is in the log", || {
        cli(&["logs", "hello-python"]).stdout.contains("GET ") || {
            get(gateway(), "hello-python", "/");
            false
        }
    });
}

#[test]
fn an_instance_that_is_killed_is_replaced() {
    assert_eq!(get(gateway(), "killed", "/").status, 200);
    let instances = served().daemon.instances("killed");
    if let Some(pid) = instances.first().and_then(|instance| instance["pid"].as_u64()) {
        thaw_e2e::kill(pid as u32);
        wait_until("it is gone", || !exists(pid as u32));
    }
    wait_until("another one serves", || {
        request(gateway(), "killed", "/pid", None).is_ok_and(|r| r.status == 200)
    });
}
