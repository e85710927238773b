//! Processes and files in sandboxes.

use super::*;

#[tokio::test]
async fn envd_needs_the_token_of_the_sandbox() {
    let place = Place::new();
    let (made, other) = (place.make(base()).await, place.make(base()).await);
    for token in [String::new(), other.token] {
        let thief = Made { id: made.id.clone(), token };
        let (status, answer) = place.unary(&thief, "/process.Process/List", json!({})).await;
        assert_eq!(
            (status, &answer["code"]),
            (StatusCode::UNAUTHORIZED, &json!("unauthenticated"))
        );
        let read = place.envd(&thief, "/files?path=/x", "", Body::empty()).await;
        assert_eq!(read.status(), StatusCode::UNAUTHORIZED);
        let started = place.stream(&thief, "/process.Process/Start", &[json!({})]).await;
        let messages = messages_of(started).await;
        assert_eq!(messages[0]["error"]["code"], "unauthenticated");
    }
}

#[tokio::test]
async fn a_process_is_followed_to_its_end() {
    let place = Place::new();
    let made = place.make(json!({"templateID": "base", "envVars": {"A": "1", "B": "1"}})).await;
    let start = json!({"process": {"cmd": "/bin/bash", "args": ["x", "y"], "envs": {"B": "2"}}});
    let mut quick = start.clone();
    quick["stdin"] = json!(false);
    let messages = messages_of(place.stream(&made, "/process.Process/Start", &[quick]).await).await;
    assert_eq!(messages[0], json!({"event": {"start": {"pid": 100}}}));
    assert_eq!(printed(&messages, "stdout"), "xy");
    assert_eq!(messages[3]["event"]["end"]["exitCode"], 0);
    assert_eq!(messages[4], json!({}));

    // One with standard input, which is open unless the client says otherwise.
    let follows = place.stream(&made, "/process.Process/Start", &[start]).await;
    let (_, listed) = place.unary(&made, "/process.Process/List", json!({})).await;
    let config = &listed["processes"][0]["config"];
    assert_eq!((&config["cmd"], &config["envs"]["A"]), (&json!("/bin/bash"), &json!("1")));
    assert_eq!(
        (&config["envs"]["B"], &config["envs"]["E2B_SANDBOX"]),
        (&json!("2"), &json!("true"))
    );
    let one = json!({"pid": 101});
    let input = json!({"process": one, "input": {"stdin": "aGk="}});
    let (status, _) = place.unary(&made, "/process.Process/SendInput", input).await;
    assert_eq!(status, StatusCode::OK);
    let (status, _) =
        place.unary(&made, "/process.Process/CloseStdin", json!({"process": one})).await;
    assert_eq!(status, StatusCode::OK);
    assert_eq!(printed(&messages_of(follows).await, "stdout"), "xyhi");
    let (status, _) =
        place.unary(&made, "/process.Process/CloseStdin", json!({"process": one})).await;
    assert_eq!(status, StatusCode::NOT_FOUND);
}

#[tokio::test]
async fn a_relative_working_directory_begins_where_relative_paths_do() {
    let place = Place::new();
    let made = place.make(base()).await;
    for (asked, meant) in [("a/b", "/work/a/b"), ("/a", "/a")] {
        let start = json!({"process": {"cmd": "sh", "cwd": asked}});
        drop(place.stream(&made, "/process.Process/Start", &[start]).await);
        let (_, listed) = place.unary(&made, "/process.Process/List", json!({})).await;
        let last = listed["processes"].as_array().unwrap().last().unwrap();
        assert_eq!(last["config"]["cwd"], meant);
    }
}

#[tokio::test]
async fn a_stream_breaks_off_when_the_sandbox_ends() {
    let place = Place::new();
    let made = place.make(base()).await;
    let start = json!({"process": {"cmd": "sh"}});
    let follows = place.stream(&made, "/process.Process/Start", &[start]).await;
    let delete = format!("DELETE /sandboxes/{}", made.id);
    let (status, ..) = place.control("secret", &delete, Value::Null).await;
    assert_eq!(status, StatusCode::NO_CONTENT);
    assert!(follows.into_body().collect().await.is_err());
}

#[tokio::test]
async fn whose_time_is_over_is_told_so_and_not_how_the_process_has_ended() {
    let place = Place::new();
    let made = place.make(base()).await;
    let start = json!({"process": {"cmd": "sh"}});
    let request = place
        .to_envd(&made, "/process.Process/Start", "application/connect+json")
        .header("connect-timeout-ms", "1");
    let follows = place.send(request.body(Body::from(envelope(&start))).unwrap()).await;
    let messages = messages_of(follows).await;
    assert_eq!(messages.last().unwrap()["error"]["code"], "deadline_exceeded");
    assert!(!messages.iter().any(|message| message["event"]["end"].is_object()), "{messages:?}");
    // It ends all the same.
    let is_left = async || {
        let (_, listed) = place.unary(&made, "/process.Process/List", json!({})).await;
        listed["processes"].as_array().is_some_and(|left| !left.is_empty())
    };
    while is_left().await {
        tokio::task::yield_now().await;
    }
}

#[tokio::test]
async fn a_terminal_is_resized_and_killed() {
    let place = Place::new();
    let made = place.make(base()).await;
    let start = json!({
        "process": {"cmd": "sh"}, "pty": {"size": {"cols": 80, "rows": 24}}, "tag": "t"
    });
    let follows = place.stream(&made, "/process.Process/Start", &[start]).await;
    let one = json!({"tag": "t"});
    let size = json!({"process": one, "pty": {"size": {"cols": 100, "rows": 30}}});
    assert_eq!(place.unary(&made, "/process.Process/Update", size).await.0, StatusCode::OK);
    let (status, _) =
        place.unary(&made, "/process.Process/CloseStdin", json!({"process": one})).await;
    assert_eq!(status, StatusCode::BAD_REQUEST);
    let data = |text: &str| json!({"data": {"input": {"pty": text}}});
    let messages =
        [json!({"start": {"process": one}}), data("aGk="), json!({"keepalive": {}}), data("IQ==")];
    let sent = messages_of(place.stream(&made, "/process.Process/StreamInput", &messages).await);
    assert_eq!(sent.await, [json!({}), json!({})]);
    let kill = json!({"process": one, "signal": "SIGNAL_SIGKILL"});
    assert_eq!(place.unary(&made, "/process.Process/SendSignal", kill).await.0, StatusCode::OK);
    let messages = messages_of(follows).await;
    assert_eq!(printed(&messages, "pty"), "30x100hi!");
    assert_eq!(messages[messages.len() - 2]["event"]["end"]["error"], "signal: killed");
}

#[tokio::test]
async fn whoever_connects_sees_what_comes_from_then_on() {
    let place = Place::new();
    let made = place.make(base()).await;
    let start = json!({"process": {"cmd": "sh", "args": ["old"]}});
    let first = place.stream(&made, "/process.Process/Start", &[start]).await;
    // Whoever goes away leaves the process to itself.
    drop(first);
    let one = json!({"process": {"pid": 100}});
    let follows = place.stream(&made, "/process.Process/Connect", std::slice::from_ref(&one)).await;
    let input = json!({"process": {"pid": 100}, "input": {"stdin": "bmV3"}});
    place.unary(&made, "/process.Process/SendInput", input).await;
    place.unary(&made, "/process.Process/CloseStdin", one).await;
    assert_eq!(printed(&messages_of(follows).await, "stdout"), "new");
    let none = json!({"process": {"pid": 7}});
    let refused = messages_of(place.stream(&made, "/process.Process/Connect", &[none]).await).await;
    assert_eq!(refused[0]["error"]["code"], "not_found");
}

#[tokio::test]
async fn files_are_written_and_read() {
    let place = Place::new();
    let made = place.make(base()).await;
    let octets = "application/octet-stream";
    let written = place.envd(&made, "/files?path=a/b.txt", octets, Body::from("hello")).await;
    let path = json!([{"name": "b.txt", "type": "file", "path": "/work/a/b.txt"}]);
    assert_eq!(json_of(written).await, path);
    let read = place.envd(&made, "/files?path=/work/a/b.txt", "", Body::empty()).await;
    assert_eq!(read.into_body().collect().await.unwrap().to_bytes(), "hello");
    let missing = place.envd(&made, "/files?path=none", "", Body::empty()).await;
    assert_eq!(missing.status(), StatusCode::NOT_FOUND);
    let stranger = place.envd(&made, "/files?path=none&username=x", "", Body::empty()).await;
    assert_eq!(stranger.status(), StatusCode::UNAUTHORIZED);

    let form = "--X\r\nContent-Disposition: form-data; name=\"file\"; filename=\"/f/one\"\r\n\r\n1\r\n\
                --X\r\nContent-Disposition: form-data; name=\"file\"; filename=\"two\"\r\n\r\n2\r\n--X--\r\n";
    let kind = "multipart/form-data; boundary=X";
    let written = place.envd(&made, "/files", kind, Body::from(form)).await;
    assert_eq!(json_of(written).await[1]["path"], "/work/two");
    assert_eq!(place.fake.file(&made.id, "/f/one").unwrap(), b"1");
    // One address is of one file.
    let twice = place.envd(&made, "/files?path=x", kind, Body::from(form)).await;
    assert_eq!(twice.status(), StatusCode::BAD_REQUEST);
    let none = place.envd(&made, "/files", kind, Body::from("--X--\r\n")).await;
    assert_eq!(none.status(), StatusCode::BAD_REQUEST);
}

#[tokio::test]
async fn a_packed_body_is_unpacked_in_pieces() {
    use std::io::Write;
    let place = Place::new();
    let made = place.make(base()).await;
    let mut packer = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    let contents = vec![b'z'; 9 << 20];
    packer.write_all(&contents).unwrap();
    let send = async |body: Vec<u8>| {
        let request = Request::post("/files?path=/z")
            .header("E2b-Sandbox-Id", &made.id)
            .header("X-Access-Token", &made.token)
            .header("content-type", "application/octet-stream")
            .header("content-encoding", "gzip");
        place.send(request.body(Body::from(body)).unwrap()).await.status()
    };
    assert_eq!(send(packer.finish().unwrap()).await, StatusCode::OK);
    assert_eq!(place.fake.file(&made.id, "/z").unwrap(), contents);
    assert_eq!(send(b"no gzip".to_vec()).await, StatusCode::BAD_REQUEST);
}

#[tokio::test]
async fn directories_are_made_listed_moved_and_removed() {
    let place = Place::new();
    let made = place.make(base()).await;
    let call = async |method: &str, message: Value| {
        place.unary(&made, &format!("/filesystem.Filesystem/{method}"), message).await
    };
    let (status, shown) = call("MakeDir", json!({"path": "d/e"})).await;
    assert_eq!((status, &shown["entry"]["path"]), (StatusCode::OK, &json!("/work/d/e")));
    assert_eq!(shown["entry"]["type"], "FILE_TYPE_DIRECTORY");
    let (status, answer) = call("MakeDir", json!({"path": "d/e"})).await;
    assert_eq!((status, &answer["code"]), (StatusCode::CONFLICT, &json!("already_exists")));
    place.fake.put(&made.id, "/work/d/f", Some(b"123"));
    let paths = async |depth: u32| {
        let (_, listed) = call("ListDir", json!({"path": "/work", "depth": depth})).await;
        let entries = listed["entries"].as_array().unwrap().clone();
        entries.iter().map(|one| one["path"].as_str().unwrap().to_owned()).collect::<Vec<_>>()
    };
    assert_eq!(paths(0).await, ["/work/d"]);
    assert_eq!(paths(2).await, ["/work/d", "/work/d/e", "/work/d/f"]);
    let (_, moved) = call("Move", json!({"source": "d/f", "destination": "/g/h"})).await;
    assert_eq!((&moved["entry"]["path"], &moved["entry"]["size"]), (&json!("/g/h"), &json!("3")));
    assert_eq!(call("Stat", json!({"path": "/g/h"})).await.0, StatusCode::OK);
    assert_eq!(call("Stat", json!({"path": "d/f"})).await.0, StatusCode::NOT_FOUND);
    assert_eq!(call("ListDir", json!({"path": "/g/h"})).await.0, StatusCode::BAD_REQUEST);
    for _ in 0..2 {
        assert_eq!(call("Remove", json!({"path": "d"})).await.0, StatusCode::OK);
    }
    assert_eq!(paths(9).await, Vec::<String>::new());
}

#[tokio::test]
async fn a_directory_is_watched_by_a_stream_or_by_asking() {
    let place = Place::new();
    let made = place.make(base()).await;
    let part = |name: &str| format!("/filesystem.Filesystem/{name}");
    let mut body = place.stream(&made, &part("WatchDir"), &[json!({"path": "."})]).await;
    let mut seen = String::new();
    while !seen.contains("WRITE") {
        let frame = body.body_mut().frame().await.unwrap().unwrap();
        seen += &String::from_utf8_lossy(&frame.into_data().unwrap());
    }
    assert!(seen.contains("start") && seen.contains("EVENT_TYPE_CREATE"), "{seen}");
    let (_, created) = place.unary(&made, &part("CreateWatcher"), json!({"path": "/work"})).await;
    let watcher = json!({"watcherId": created["watcherId"]});
    let mut events = Vec::new();
    while events.len() < 2 {
        let (status, told) = place.unary(&made, &part("GetWatcherEvents"), watcher.clone()).await;
        assert_eq!(status, StatusCode::OK, "{told}");
        events.extend(told["events"].as_array().unwrap().clone());
        tokio::task::yield_now().await;
    }
    assert_eq!(events[0], json!({"name": "file", "type": "EVENT_TYPE_CREATE"}));
    // It is the sandbox's own.
    let other = place.make(base()).await;
    for name in ["GetWatcherEvents", "RemoveWatcher"] {
        let (status, _) = place.unary(&other, &part(name), watcher.clone()).await;
        assert_eq!(status, StatusCode::NOT_FOUND);
    }
    let removed = place.unary(&made, &part("RemoveWatcher"), watcher.clone()).await;
    assert_eq!(removed.0, StatusCode::OK);
    let gone = place.unary(&made, &part("GetWatcherEvents"), watcher).await;
    assert_eq!(gone.0, StatusCode::NOT_FOUND);
}
