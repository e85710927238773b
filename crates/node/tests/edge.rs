//! What the operator says of clients in `gateway.toml`, and what is written down of them, over
//! instances that are threads of the test.

mod common;

use common::{Guest, Node, PATIENCE, Response, Wire, eventually, field};
use std::path::Path;
use std::sync::atomic::Ordering;
use std::thread;
use std::time::Duration;
use thaw_node::logs::{AccessFile, LogLimits, access_log_path};
use thaw_sandbox::GuestExit;

const SHARED: &str = "isolation = \"instance\"";
/// Clients at an address of the function's own get their connections whole.
const HANDED_OVER: &str =
    "isolation = \"instance\"\nlisten = \"127.0.0.1:9\"\n[entry]\nconnections = \"handover\"";
/// `printf %s sesame | sha256sum`
const SESAME: &str = "sha256:d0c04f4b1951e4aeaaec8223ed2039e542f3aae805a6fa7f6d794e5afff5d272";

/// Answers every request with its head.
fn echo_head(guest: &mut Guest) {
    while let Some(request) = guest.request() {
        guest.answer(&request.head);
        if field(&request.head, "connection").is_some_and(|options| options.contains("close")) {
            return;
        }
    }
}

fn here() -> &'static Path {
    Path::new(".")
}

fn json(response: &Response) -> serde_json::Value {
    serde_json::from_slice(&response.body).unwrap_or_else(|_| panic!("{}", response.text()))
}

fn ask(node: &Node, head: &str) -> Response {
    let mut client = node.connect();
    client.send(format!("{head}\r\n\r\n"));
    client.response().expect("an answer")
}

fn status(node: &Node, head: &str) -> u16 {
    ask(node, head).status
}

#[test]
fn the_public_gets_a_request_id_and_the_operator_the_reason() {
    let node = Node::new(10);
    node.serve("f", "", |guest| {
        guest.request();
        guest.exit(GuestExit::Code(3));
        // Its end is heard of before that of its connection.
        thread::sleep(Duration::from_secs(20));
    });
    for connection in ["close", "keep-alive"] {
        let head = format!("GET / HTTP/1.1\r\nHost: f\r\nConnection: {connection}");
        let public = ask(&node, &head);
        let body = json(&public);
        assert_eq!((public.status, &body["error"]), (502, &"bad_gateway".into()));
        assert_eq!(field(&public.head, "thaw-request-id").as_deref(), body["request_id"].as_str());
        let text = body.to_string();
        assert!(!text.contains("instance") && body.get("function").is_none(), "{text}");

        let mut operator = node.connect();
        let trust = node.shared.edge().operators().trust(operator.addresses());
        operator.send(format!("{head}\r\n\r\n"));
        let told = json(&operator.response().unwrap());
        assert_eq!((&told["error"], &told["function"]), (&"instance_died".into(), &"f".into()));
        drop(trust);
    }
}

#[test]
fn a_trace_goes_through_the_gateway() {
    let node = Node::new(10);
    node.serve("f", SHARED, echo_head);
    let trace = "0af7651916cd43dd8448eb211c80319c";
    let seen = ask(
        &node,
        &format!("GET / HTTP/1.1\r\nHost: f\r\nTraceparent: 00-{trace}-b7ad6b7169203331-01"),
    );
    let parent = field(&seen.text(), "traceparent").unwrap();
    assert!(parent.starts_with(&format!("00-{trace}-")) && parent.ends_with("-01"), "{parent}");
    assert!(!parent.contains("b7ad6b7169203331"), "{parent}");
    let begun = field(&ask(&node, "GET / HTTP/1.1\r\nHost: f").text(), "traceparent").unwrap();
    assert_eq!(begun.len(), 55);
    assert!(!begun.contains(trace), "{begun}");
}

#[test]
fn requests_go_where_the_routes_say() {
    let node = Node::new(10);
    for name in ["shop", "api"] {
        node.serve(name, SHARED, move |guest| {
            while let Some(request) = guest.request() {
                guest.answer(format!("{name} {}", request.head.lines().next().unwrap()));
            }
        });
    }
    let routes = "by_name = false
         [[route]]\nhost = \"www.example\"\nfunction = \"shop\"
         [[route]]\nhost = \"www.example\"\npath = \"/api\"\nfunction = \"api\"\nstrip = true
         [[route]]\nhost = \"*.old\"\nredirect = \"https://www.example{path}\"
         [[route]]\nhost = \"gone\"\nfunction = \"nobody\"";
    node.rule(here(), routes);
    let mut client = node.connect();
    for (host, path, expected) in [
        ("www.example", "/x?y", "shop GET /x?y HTTP/1.1"),
        ("WWW.example.:80", "/api/v1?q", "api GET /v1?q HTTP/1.1"),
        ("www.example", "/api", "api GET / HTTP/1.1"),
    ] {
        assert_eq!(client.get(host, path).text(), expected);
    }
    // What follows a request that was to be the last comes to no path without a route.
    node.rule(
        here(),
        "by_name = false\n[[route]]\nhost = \"h\"\npath = \"/open\"\nfunction = \"shop\"",
    );
    let mut sly = node.connect();
    sly.send("GET /open/a HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n");
    sly.send("GET /admin HTTP/1.1\r\nHost: h\r\n\r\n");
    let seen = String::from_utf8_lossy(&sly.rest()).into_owned();
    assert!(seen.contains("shop GET /open/a ") && !seen.contains("/admin"), "{seen}");
    node.rule(here(), routes);
    // A last request is not handed over if its function must not see its path as it is.
    let last = ask(&node, "GET /api/x HTTP/1.1\r\nHost: www.example\r\nConnection: close");
    assert_eq!(last.text(), "api GET /x HTTP/1.1");
    let redirect = client.get("a.old", "/x?y");
    assert_eq!(redirect.status, 308);
    assert_eq!(field(&redirect.head, "location").as_deref(), Some("https://www.example/x?y"));
    for host in ["shop", "gone", "other.example"] {
        assert_eq!(client.get(host, "/").error(), "not_found", "{host}");
    }
}

#[test]
fn every_request_to_a_guarded_function_has_to_show_a_secret() {
    let node = Node::new(10);
    let (_, threads) = node.serve("f", HANDED_OVER, echo_head);
    let own = node.listen_for("f");
    node.rule(here(), &format!("[function.f]\nauth.bearer = [\"{SESAME}\"]"));
    for connection in ["close", "keep-alive"] {
        for address in [own, node.address] {
            let mut client = Wire::connect(address);
            client.send(format!("GET / HTTP/1.1\r\nHost: f\r\nConnection: {connection}\r\n\r\n"));
            let refused = client.response().unwrap();
            assert_eq!((refused.status, refused.error().as_str()), (401, "unauthorized"));
            assert_eq!(field(&refused.head, "www-authenticate").as_deref(), Some("Bearer"));
        }
    }
    assert_eq!(threads.launched.load(Ordering::SeqCst), 0, "nothing was booted for them");
    let mut client = Wire::connect(own);
    client.send("GET / HTTP/1.1\r\nHost: f\r\nAuthorization: Bearer sesame\r\n\r\n");
    let seen = client.response().unwrap();
    assert_eq!(seen.status, 200);
    assert_eq!(field(&seen.text(), "authorization"), None, "the function learns no secret");
    assert_eq!(client.get("f", "/").status, 401, "the next one on the connection has to, too");
    // The admin API's calls go past all of it, by the function's name.
    let secret = format!("by_name = false\n[function.f]\nauth.bearer = [\"{SESAME}\"]");
    node.rule(here(), &secret);
    assert_eq!(node.connect().get("f", "/").status, 404);
    for connection in ["keep-alive", "close"] {
        let mut operator = node.operator();
        operator.send(format!("GET / HTTP/1.1\r\nHost: f\r\nConnection: {connection}\r\n\r\n"));
        assert_eq!(operator.response().unwrap().status, 200);
    }
}

#[test]
fn bodies_have_the_bound_of_their_function() {
    let node = Node::new(10);
    node.serve("f", SHARED, |guest| {
        while let Some(request) = guest.request() {
            guest.answer(request.body.len().to_string());
        }
    });
    node.rule(here(), "[function.f]\nbody_max = \"10B\"");
    let post = |rest: &str| {
        let mut client = node.connect();
        client.send(format!("POST / HTTP/1.1\r\nHost: f\r\n{rest}"));
        client.response().expect("an answer")
    };
    assert_eq!(post("Content-Length: 10\r\n\r\n0123456789").text(), "10");
    assert_eq!(post("Transfer-Encoding: chunked\r\n\r\na\r\n0123456789\r\n0\r\n\r\n").text(), "10");
    for large in [
        "Content-Length: 11\r\n\r\n0123456789x",
        "Content-Length: 99999999999\r\n\r\n",
        "Transfer-Encoding: chunked\r\n\r\na\r\n0123456789\r\n1\r\nx\r\n0\r\n\r\n",
    ] {
        let refused = post(large);
        assert_eq!((refused.status, refused.error().as_str()), (413, "body_too_large"), "{large}");
    }
}

#[test]
fn a_client_over_its_rate_is_told_when_to_come_back() {
    let node = Node::new(10);
    node.serve("f", SHARED, echo_head);
    node.serve("g", SHARED, echo_head);
    node.rule(here(), "[function.f]\nrate = { requests = 3, per = \"1h\" }");
    let mut client = node.connect();
    let statuses: Vec<_> = (0..5).map(|_| client.get("f", "/").status).collect();
    assert_eq!(statuses, [200, 200, 200, 429, 429]);
    let refused = client.get("f", "/");
    assert_eq!(refused.error(), "too_many_requests");
    let wait: u64 = field(&refused.head, "retry-after").unwrap().parse().unwrap();
    assert!((1000..=1200).contains(&wait), "{wait}");
    assert_eq!(client.get("g", "/").status, 200);
}

#[test]
fn rules_hold_for_clients_that_do_not_speak_http() {
    let node = Node::new(10);
    node.serve("f", "listen = \"127.0.0.1:9\"\n[entry]\nkind = \"tcp\"", |guest| {
        guest.send("hello");
    });
    let address = node.listen_raw_for("f");
    let heard = || Wire::connect(address).rest();
    node.rule(here(), "[function.f]\nrate = { requests = 2, per = \"1h\" }");
    assert_eq!((0..4).map(|_| heard().len()).collect::<Vec<_>>(), [5, 5, 0, 0]);
    // A rule that cannot be kept lets nobody in.
    node.rule(here(), &format!("[function.f]\nauth.bearer = [\"{SESAME}\"]"));
    assert!(heard().is_empty());
    node.rule(here(), "");
    assert_eq!(heard(), b"hello");
}

#[test]
fn pages_of_other_origins_are_told_what_they_may() {
    let node = Node::new(10);
    let (_, threads) = node.serve("f", SHARED, echo_head);
    node.rule(here(), "[function.f]\ncors = { origins = [\"https://a\"], methods = [\"PUT\"] }");
    let asked = ask(
        &node,
        "OPTIONS / HTTP/1.1\r\nHost: f\r\nOrigin: https://a\r\nAccess-Control-Request-Method: PUT",
    );
    assert_eq!(asked.status, 204);
    assert_eq!(field(&asked.head, "access-control-allow-methods").as_deref(), Some("PUT"));
    assert_eq!(threads.launched.load(Ordering::SeqCst), 0);
    let origin = |origin: &str| {
        let answer = ask(&node, &format!("GET / HTTP/1.1\r\nHost: f\r\nOrigin: {origin}"));
        field(&answer.head, "access-control-allow-origin")
    };
    assert_eq!(origin("https://a").as_deref(), Some("https://a"));
    assert_eq!(origin("https://b"), None);
}

#[test]
fn requests_are_logged_whatever_way_they_took() {
    let directory = tempfile::tempdir().unwrap();
    let node = Node::new(10);
    node.serve("f", SHARED, |guest| {
        while guest.request().is_some() {
            guest.answer("hello");
        }
    });
    node.shared.edge().log_to(AccessFile::start(directory.path(), LogLimits::default()).unwrap());
    assert_eq!(node.connect().get("f", "/before").status, 200);
    node.rule(here(), "[access_log]\nformat = \"json\"");
    let mut client = node.connect();
    client.send("GET /routed?x HTTP/1.1\r\nHost: f\r\nUser-Agent: test\r\n\r\n");
    assert_eq!(client.response().unwrap().text(), "hello");
    let refused = client.get("nobody", "/refused");
    let last = "GET /last HTTP/1.1\r\nHost: f\r\nConnection: close\r\n\r\n";
    let mut other = node.connect();
    other.send(last).stream.shutdown(std::net::Shutdown::Write).unwrap();
    assert_eq!(other.response().unwrap().text(), "hello");
    drop(other);
    let lines = || -> Vec<serde_json::Value> {
        let text = std::fs::read_to_string(access_log_path(directory.path())).unwrap_or_default();
        // The last one may be half there.
        text.lines().filter_map(|line| serde_json::from_str(line).ok()).collect()
    };
    eventually(|| lines().len() == 3);
    let lines = lines();
    let of = |target: &str| lines.iter().find(|line| line["target"] == target).unwrap();
    let routed = of("/routed?x");
    assert_eq!((&routed["status"], &routed["sent"]), (&200.into(), &5.into()), "{routed}");
    assert_eq!((&routed["function"], &routed["user_agent"]), (&"f".into(), &"test".into()));
    assert_eq!(routed["client"], "127.0.0.1");
    let unknown = of("/refused");
    assert_eq!((&unknown["status"], &unknown["error"]), (&404.into(), &"unknown_function".into()));
    assert_eq!(unknown["request_id"], json(&refused)["request_id"]);
    let whole = of("/last");
    assert!(whole["status"].is_null() && whole["sent"].as_u64() > Some(5), "{whole}");
    node.rule(here(), "[access_log]\nformat = \"combined\"");
    let answer = client.get("f", "/combined");
    assert_eq!(answer.status, 200);
    assert!(node.shared.edge().finish_log(PATIENCE));
    let text = std::fs::read_to_string(access_log_path(directory.path())).unwrap();
    let line = text.lines().last().unwrap();
    assert!(line.contains("] \"GET /combined HTTP/1.1\" 200 5 \"-\" \"-\""), "{line}");
    let id = field(&answer.head, "thaw-request-id").expect("its id");
    assert!(line.ends_with(&format!("\" {id}")), "{id}: {line}");
    assert_eq!(field(&answer.head, "thaw-error"), None);
}

#[test]
fn responses_are_counted_by_function_and_code() {
    let node = Node::new(10);
    node.serve("f", SHARED, echo_head);
    assert_eq!(status(&node, "GET / HTTP/1.1\r\nHost: f"), 200);
    assert_eq!(status(&node, "GET / HTTP/1.1\r\nHost: made-up"), 404);
    let text = || node.shared.metrics().text(&[], 0);
    eventually(|| text().contains("thaw_responses_total{function=\"f\",code=\"200\"} 1"));
    eventually(|| text().contains("thaw_responses_total{function=\"\",code=\"404\"} 1"));
    eventually(|| text().contains("thaw_request_queue_seconds_count{function=\"f\"} 1"));
    assert!(!text().contains("made-up"));
}

#[test]
fn idle_connections_that_were_handed_over_make_room() {
    let node = Node::new(10);
    let limits = "[limits]\ninstances = 2\nconcurrency = 4\nqueue = \"20s\"";
    node.serve("f", &format!("{HANDED_OVER}\n{limits}"), |guest| {
        while let Some(request) = guest.request() {
            if request.head.starts_with("GET /slow") {
                thread::sleep(Duration::from_secs(5));
            }
            guest.answer("x");
        }
    });
    let own = node.listen_for("f");
    let mut clients: Vec<_> = (0..8).map(|_| Wire::connect(own)).collect();
    for client in &mut clients[1..] {
        assert_eq!(client.get("f", "/").status, 200);
    }
    clients[0].send("GET /slow HTTP/1.1\r\nHost: f\r\n\r\n");
    // All places are held: seven by idle connections, one by a request that is under way.
    let mut others: Vec<_> = (0..6).map(|_| Wire::connect(own)).collect();
    for other in &mut others {
        other.send("GET / HTTP/1.1\r\nHost: f\r\n\r\n");
    }
    for other in &mut others {
        assert_eq!(other.response().expect("an answer").status, 200);
    }
    assert_eq!(clients[0].response().expect("its answer").status, 200, "it was not idle");
}
