//! Which function and which instance a request reaches.

use crate::common::{Node, PATIENCE, eventually, field};
use crate::{SHARED, echo_path};
use std::collections::HashSet;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

#[test]
fn two_requests_of_a_connection_reach_the_functions_that_they_name() {
    for isolation in ["", SHARED] {
        let node = Node::new(10);
        for name in ["f", "g"] {
            node.serve(name, isolation, move |guest| {
                while let Some(request) = guest.request() {
                    guest.answer(format!("{name} saw {:?}", field(&request.head, "cookie")));
                }
            });
        }
        let mut client = node.connect();
        for name in ["f", "g", "f", "nobody", "g"] {
            client.send(format!("GET / HTTP/1.1\r\nHost: {name}\r\nCookie: of-{name}\r\n\r\n"));
            let response = client.response().expect("an answer");
            match name {
                "nobody" => assert_eq!(response.error(), "not_found"),
                _ => assert_eq!(response.text(), format!("{name} saw Some(\"of-{name}\")")),
            }
        }
    }
}

#[test]
fn pipelined_requests_are_answered_in_turn_by_those_they_name() {
    let node = Node::new(10);
    node.serve("f", "", |guest| {
        guest.request();
        thread::sleep(Duration::from_millis(50));
        guest.answer("slow f");
    });
    node.serve("g", SHARED, echo_path);
    let mut client = node.connect();
    client.send(
        "GET /1 HTTP/1.1\r\nHost: g\r\n\r\nPOST /2 HTTP/1.1\r\nHost: f\r\nContent-Length: 3\r\n\r\nabc\
         GET /3 HTTP/1.1\r\nHost: g\r\n\r\nGET /4 HTTP/1.1\r\nHost: g\r\nConnection: close\r\n\r\n",
    );
    let bodies: Vec<_> = (0..4).map(|_| client.response().unwrap().text()).collect();
    assert_eq!(bodies, ["1 /1", "slow f", "1 /3", "1 /4"]);
    assert_eq!(client.rest(), b"");
}

#[test]
fn every_request_of_a_connection_has_an_instance_of_its_own_by_default() {
    let node = Node::new(10);
    let (service, _) = node.serve("f", "", echo_path);
    let mut client = node.connect();
    let bodies: HashSet<_> = (0..5).map(|_| client.get("f", "/").text()).collect();
    assert_eq!(bodies.len(), 5, "{bodies:?}");
    eventually(|| service.instance_count() == 0);
}

#[test]
fn an_instance_that_was_booted_for_a_request_that_is_none_ends() {
    let node = Node::new(10);
    let (service, threads) = node.serve("f", "[limits]\ninstances = 1", echo_path);
    // The gateway reads further than it peeks.
    let mut client = node.connect();
    client.send("POST / HTTP/1.1\r\nHost: f\r\nTransfer-Encoding: gzip, chunked\r\n\r\n");
    assert_eq!(client.response().unwrap().status, 400);
    eventually(|| service.instance_count() == 0);
    assert_eq!(threads.launched.load(Ordering::SeqCst), 1);
    assert_eq!(node.connect().get("f", "/").text(), "2 /");
}

#[test]
fn an_instance_is_told_that_nothing_follows_and_ends_even_if_it_does_not_listen() {
    let node = Node::new(10);
    let heads: Arc<Mutex<Vec<String>>> = Arc::default();
    let seen = heads.clone();
    let (service, _) = node.serve("f", "", move |guest| {
        seen.lock().unwrap().push(guest.request().unwrap().head);
        guest.answer("x");
        thread::sleep(PATIENCE);
    });
    assert_eq!(node.connect().get("f", "/").text(), "x");
    assert_eq!(field(&heads.lock().unwrap()[0], "connection").as_deref(), Some("close"));
    eventually(|| service.instance_count() == 0);
}

#[test]
fn the_connection_to_an_instance_is_kept_for_the_next_request_whoever_makes_it() {
    let node = Node::new(10);
    let (service, threads) = node.serve("f", SHARED, echo_path);
    let mut clients = [node.connect(), node.connect()];
    for round in 0..10 {
        let path = format!("/{round}");
        assert_eq!(clients[round % 2].get("f", &path).text(), format!("1 {path}"));
        eventually(|| service.instances()[0].connections == 0);
    }
    assert_eq!(threads.connections.load(Ordering::SeqCst), 1);
    assert_eq!(service.instances()[0].served, 10);
}

#[test]
fn idle_connections_hold_no_place() {
    let node = Node::new(10);
    let limits = "[limits]\ninstances = 1\nqueue = \"5s\"\nkeep_alive = \"300ms\"";
    let (service, threads) = node.serve("f", &format!("{SHARED}\n{limits}"), echo_path);
    let mut clients: Vec<_> = (0..8).map(|_| node.connect()).collect();
    for client in &mut clients {
        assert_eq!(client.get("f", "/").status, 200);
    }
    // Nor do they keep the instance, and they outlive it.
    eventually(|| service.instance_count() == 0);
    // On a busy machine, more than one may have been idle for so long.
    let ended = threads.launched.load(Ordering::SeqCst);
    assert_eq!(clients[0].get("f", "/").text(), format!("{} /", ended + 1));
}

#[test]
fn a_server_of_one_connection_at_a_time_serves_both_ways() {
    let node = Node::new(10);
    let turn = Arc::new(Mutex::new(()));
    let keys = format!("{SHARED}\n[limits]\ninstances = 1\ntimeout = \"5s\"");
    let (service, _) = node.serve("f", &keys, move |guest| {
        let _turn = turn.lock().unwrap();
        echo_path(guest);
    });
    let mut client = node.connect();
    for _ in 0..5 {
        assert_eq!(client.get("f", "/a").text(), "1 /a");
        eventually(|| service.instances()[0].connections == 0);
        let mut other = node.connect();
        other.send("GET /b HTTP/1.1\r\nHost: f\r\nConnection: close\r\n\r\n");
        assert_eq!(other.response().unwrap().text(), "1 /b");
        other.rest();
        eventually(|| service.instances()[0].connections == 0);
    }
}

#[test]
fn a_connection_that_the_instance_has_closed_meanwhile_is_replaced() {
    let node = Node::new(10);
    // It says that the connection stays, and closes it.
    let (_, threads) = node.serve("f", SHARED, |guest| {
        let request = guest.request();
        guest.answer(request.unwrap().body);
    });
    let mut client = node.connect();
    for round in 0..20 {
        client.send("POST / HTTP/1.1\r\nHost: f\r\nContent-Length: 4\r\n\r\nbody");
        assert_eq!(client.response().unwrap().text(), "body", "{round}");
    }
    assert_eq!(threads.launched.load(Ordering::SeqCst), 1);
}
