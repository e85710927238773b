//! Every bound is reached.

use super::*;
use std::time::{Duration, Instant};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

#[tokio::test]
async fn a_key_has_no_more_streams_than_the_bound() {
    let place = Place::new();
    let made = place.make(base()).await;
    let start = [json!({"process": {"cmd": "sh"}})];
    let mut followed = Vec::new();
    for _ in 0..STREAMS_MAX {
        followed.push(place.stream(&made, "/process.Process/Start", &start).await);
    }
    let refused = place.stream(&made, "/process.Process/Start", &start).await;
    assert_eq!(messages_of(refused).await[0]["error"]["code"], "resource_exhausted");
    let read = place.envd(&made, "/files?path=x", "", Body::empty()).await;
    assert_eq!(read.status(), StatusCode::TOO_MANY_REQUESTS);
    // When clients have gone their places are free again.
    drop(followed);
    let until = Instant::now() + Duration::from_secs(60);
    while !place.api.streams.0.lock().unwrap().is_empty() {
        assert!(Instant::now() < until, "places are kept for clients that have gone");
        tokio::task::yield_now().await;
    }
}

#[tokio::test]
async fn a_list_has_no_more_entries_than_the_bound() {
    let place = Place::new();
    let made = place.make(base()).await;
    for n in 0..=filesystem::ENTRIES_MAX {
        place.fake.put(&made.id, &format!("/work/{n}"), Some(b""));
    }
    let (status, answer) =
        place.unary(&made, "/filesystem.Filesystem/ListDir", json!({"path": "/work"})).await;
    assert_eq!(
        (status, &answer["code"]),
        (StatusCode::TOO_MANY_REQUESTS, &json!("resource_exhausted"))
    );
}

#[tokio::test]
async fn messages_and_bodies_have_bounds() {
    let place = Place::new();
    let made = place.make(base()).await;
    let large = Body::from(vec![b' '; MESSAGE_MAX + 1]);
    let answered = place.envd(&made, "/process.Process/List", "application/json", large).await;
    assert_eq!(answered.status(), StatusCode::PAYLOAD_TOO_LARGE);
    let text = json!({"templateID": "b".repeat(1 << 20)});
    let (status, ..) = place.control("secret", "POST /v2/sandboxes", text).await;
    assert_eq!(status, StatusCode::PAYLOAD_TOO_LARGE);
    let binary =
        place.envd(&made, "/process.Process/List", "application/proto", Body::empty()).await;
    assert_eq!(binary.status(), StatusCode::NOT_IMPLEMENTED);
}

#[tokio::test]
async fn a_refused_request_leaves_the_connection_usable_or_says_that_it_closes() {
    let place = Place::new();
    let made = Made { id: "none".to_owned(), token: String::new() };
    for (len, closes) in [(32 << 10, false), (128 << 10, true)] {
        let pieces = (0..len / 1024).map(|_| Ok::<_, std::io::Error>(vec![0_u8; 1024]));
        let body = Body::from_stream(tokio_stream::iter(pieces));
        let kind = "application/connect+json";
        let answer = place.envd(&made, "/process.Process/Start", kind, body).await;
        assert_eq!(answer.status(), StatusCode::BAD_GATEWAY);
        assert_eq!(answer.headers().contains_key("connection"), closes, "{len}");
    }
}

#[tokio::test]
async fn whoever_still_sends_a_file_reads_why_it_is_refused() {
    let place = Place::new();
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let serving = tokio::spawn(place.api.clone().serve(listener));
    let mut client = TcpStream::connect(address).await.unwrap();
    // More than the buffers of both sides take.
    let head = "PUT /volumecontent/none/file?path=/a HTTP/1.1\r\nHost: a\r\nContent-Length: 33554432\r\n\r\n";
    client.write_all(head.as_bytes()).await.unwrap();
    client.write_all(&vec![0; 32 << 20]).await.unwrap();
    let mut answer = String::new();
    client.read_to_string(&mut answer).await.unwrap();
    assert!(answer.starts_with("HTTP/1.1 40"), "{answer}");
    serving.abort();
}

#[tokio::test]
async fn watchers_and_their_events_have_bounds() {
    let place = Place::new();
    let made = place.make(base()).await;
    let part = |name: &str| format!("/filesystem.Filesystem/{name}");
    place.fake.put(&made.id, "/busy", None);
    let (_, created) = place.unary(&made, &part("CreateWatcher"), json!({"path": "/busy"})).await;
    let watcher = json!({"watcherId": created["watcherId"]});
    // Nobody asks for so many events, so they end.
    while !place.api.watchers.has_ended(1) {
        tokio::task::yield_now().await;
    }
    let (status, told) = place.unary(&made, &part("GetWatcherEvents"), watcher.clone()).await;
    let bytes = told["events"].to_string().len();
    assert!(status == StatusCode::OK && bytes < 300 << 10, "{bytes}");
    let (_, told) = place.unary(&made, &part("GetWatcherEvents"), watcher).await;
    assert_eq!(told["code"], "data_loss", "{told}");
    for _ in 0..16 {
        let (status, _) =
            place.unary(&made, &part("CreateWatcher"), json!({"path": "/work"})).await;
        assert_eq!(status, StatusCode::OK);
    }
    let (_, full) = place.unary(&made, &part("CreateWatcher"), json!({"path": "/work"})).await;
    assert_eq!(full["code"], "resource_exhausted", "{full}");
}

#[tokio::test]
async fn streams_that_are_held_open_have_a_bound_and_give_their_places_back() {
    let place = Place::new();
    let made = place.make(base()).await;
    // Clients that send the beginning of an upload, and then nothing.
    let (mut senders, mut uploads) = (Vec::new(), Vec::new());
    let watch = json!({"path": "/work"});
    let path = "/filesystem.Filesystem/WatchDir";
    for _ in 0..STREAMS_MAX {
        uploads.push(place.stream(&made, path, std::slice::from_ref(&watch)).await);
    }
    senders.push(place.stream(&made, path, std::slice::from_ref(&watch)).await);
    let full = messages_of(senders.pop().unwrap()).await;
    assert_eq!(full[0]["error"]["code"], "resource_exhausted", "{full:?}");
    // Another key has places of its own.
    let (_, other, _) = place.control("other", "POST /v2/sandboxes", base()).await;
    let text = |name: &str| other[name].as_str().unwrap().to_owned();
    let other = Made { id: text("sandboxID"), token: text("envdAccessToken") };
    let (status, _) =
        place.unary(&other, "/filesystem.Filesystem/CreateWatcher", watch.clone()).await;
    assert_eq!(status, StatusCode::OK);
    drop(uploads);
    while place.api.streams.0.lock().unwrap().contains_key("a") {
        tokio::task::yield_now().await;
    }
}

#[tokio::test]
async fn an_upload_that_drips_keeps_one_place_and_no_more() {
    let place = Place::new();
    let made = place.make(base()).await;
    let (sender, receiver) = tokio::sync::mpsc::channel::<Result<Vec<u8>, std::io::Error>>(1);
    let body = Body::from_stream(tokio_stream::wrappers::ReceiverStream::new(receiver));
    let path = "/files?path=/work/drip";
    let upload = place.envd(&made, path, "application/octet-stream", body);
    let drip = async {
        for _ in 0..10 {
            sender.send(Ok(b"x".to_vec())).await.unwrap();
            let count = place.api.streams.0.lock().unwrap().get("a").copied();
            assert!(count.unwrap_or(0) <= 1);
        }
        drop(sender);
    };
    let (uploaded, ()) = tokio::join!(upload, drip);
    assert_eq!(uploaded.status(), StatusCode::OK);
    assert_eq!(place.fake.file(&made.id, "/work/drip").unwrap(), b"xxxxxxxxxx");
    assert!(place.api.streams.0.lock().unwrap().is_empty());
}

#[tokio::test]
async fn tags_and_arguments_have_bounds() {
    let place = Place::new();
    let made = place.make(base()).await;
    let start = |tag: usize, args: usize| {
        json!({
            "process": {"cmd": "/bin/bash", "args": vec!["x"; args]}, "tag": "t".repeat(tag), "stdin": false
        })
    };
    for (tag, args, is_taken) in [(256, 4096, true), (257, 1, false), (1, 4097, false)] {
        let started = place.stream(&made, "/process.Process/Start", &[start(tag, args)]).await;
        let last = messages_of(started).await.pop().unwrap();
        assert_eq!(last.get("error").is_none(), is_taken, "{tag} {args} {last}");
    }
}

#[tokio::test]
async fn lists_of_files_have_a_bound() {
    let place = Place::new();
    let made = place.make(base()).await;
    for n in 0..=filesystem::ENTRIES_MAX {
        place.fake.put(&made.id, &format!("/work/{n:05}"), Some(b""));
    }
    let list = "/filesystem.Filesystem/ListDir";
    let (_, refused) = place.unary(&made, list, json!({"path": "/work"})).await;
    assert_eq!(refused["code"], "resource_exhausted", "{refused}");
}
