//! The API as a client sees it, in front of sandboxes that live in memory.

use super::connect::{MESSAGE_MAX, envelope};
use super::fake::Fake;
use super::settings::FILE;
use super::*;
use axum::body::Body;
use axum::http::{Request, StatusCode};
use axum::response::Response;
use http_body_util::BodyExt;
use hyper::service::Service;
use hyper_util::service::TowerToHyperService;
use serde_json::{Value, json};
use tempfile::TempDir;

/// SHA-256 of `secret` and of `other`.
const HASHES: [&str; 2] = [
    "2bb80d537b1da3e38bd30361aa855686bde0eacd7162fef6a25fe97bf527a25b",
    "d9298a10d1b0735837dc4bd85dac641b0f3cef27a47e5d53a54f2f3f5b2fcffa",
];

struct Place {
    api: Arc<E2b>,
    fake: Arc<Fake>,
    _directory: TempDir,
}

/// A sandbox, as whoever has made it knows it.
struct Made {
    id: String,
    token: String,
}

impl Place {
    fn new() -> Self {
        let directory = tempfile::tempdir().unwrap();
        let text = format!(
            "[templates]\nbase = \"python\"\n\
             [[keys]]\nname = \"a\"\nsha256 = \"{}\"\nsandboxes = 3\n\
             [[keys]]\nname = \"b\"\nsha256 = \"{}\"\n",
            HASHES[0], HASHES[1]
        );
        let file = directory.path().join(FILE);
        std::fs::write(&file, text).unwrap();
        let fake = Arc::new(Fake::default());
        let settings = LiveSettings::load(file).unwrap();
        let api = E2b::new(fake.clone(), settings, directory.path()).unwrap();
        Self { api, fake, _directory: directory }
    }

    async fn send(&self, request: Request<Body>) -> Response {
        TowerToHyperService::new(self.api.router()).call(request).await.unwrap()
    }

    /// A request to the control API; status, headers and JSON of its answer.
    async fn control(&self, key: &str, line: &str, body: Value) -> (StatusCode, Value, String) {
        let (method, path) = line.split_once(' ').unwrap();
        let body = if body.is_null() { Body::empty() } else { Body::from(body.to_string()) };
        let request = Request::builder().method(method).uri(path).header("X-API-KEY", key);
        let response = self.send(request.body(body).unwrap()).await;
        let next = response.headers().get("x-next-token").cloned();
        let next = next.map(|value| value.to_str().unwrap().to_owned()).unwrap_or_default();
        (response.status(), json_of(response).await, next)
    }

    async fn make(&self, body: Value) -> Made {
        let (status, made, _) = self.control("secret", "POST /v2/sandboxes", body).await;
        assert_eq!(status, StatusCode::CREATED, "{made}");
        let text = |name: &str| made[name].as_str().unwrap().to_owned();
        Made { id: text("sandboxID"), token: text("envdAccessToken") }
    }

    /// A request to envd's part.
    async fn envd(&self, made: &Made, path: &str, kind: &str, body: Body) -> Response {
        let method = if kind.is_empty() { "GET" } else { "POST" };
        let request = Request::builder()
            .method(method)
            .uri(path)
            .header("E2b-Sandbox-Id", &made.id)
            .header("E2b-Sandbox-Port", "49983")
            .header("X-Access-Token", &made.token)
            .header("content-type", kind);
        self.send(request.body(body).unwrap()).await
    }

    async fn unary(&self, made: &Made, method: &str, message: Value) -> (StatusCode, Value) {
        let body = Body::from(message.to_string());
        let response = self.envd(made, method, "application/json", body).await;
        (response.status(), json_of(response).await)
    }

    /// Begins a stream.
    async fn stream(&self, made: &Made, method: &str, messages: &[Value]) -> Response {
        let body = messages.iter().flat_map(envelope).collect::<Vec<_>>();
        let response = self.envd(made, method, "application/connect+json", Body::from(body)).await;
        assert_eq!(response.status(), StatusCode::OK);
        response
    }
}

async fn json_of(response: Response) -> Value {
    let bytes = response.into_body().collect().await.unwrap().to_bytes();
    serde_json::from_slice(&bytes).unwrap_or(Value::Null)
}

/// All messages of a stream; the last one is that of its end.
async fn messages_of(response: Response) -> Vec<Value> {
    let bytes = response.into_body().collect().await.unwrap().to_bytes();
    let (mut rest, mut messages) = (&bytes[..], Vec::new());
    while let Some((&[_, a, b, c, d], tail)) = rest.split_first_chunk() {
        let (message, tail) = tail.split_at(u32::from_be_bytes([a, b, c, d]) as usize);
        messages.push(serde_json::from_slice(message).unwrap());
        rest = tail;
    }
    messages
}

/// What processes have printed to `stream`.
fn printed(messages: &[Value], stream: &str) -> String {
    use base64::Engine;
    let pieces = messages.iter().filter_map(|one| one["event"]["data"][stream].as_str());
    let decoded =
        pieces.flat_map(|text| base64::engine::general_purpose::STANDARD.decode(text).unwrap());
    String::from_utf8(decoded.collect()).unwrap()
}

fn base() -> Value {
    json!({"templateID": "base"})
}

#[tokio::test]
async fn whoever_shows_no_key_gets_nothing() {
    let place = Place::new();
    for key in ["", "Secret", HASHES[0]] {
        for line in ["POST /v2/sandboxes", "GET /v2/sandboxes", "GET /templates"] {
            let (status, answer, _) = place.control(key, line, base()).await;
            assert_eq!((status, &answer["code"]), (StatusCode::UNAUTHORIZED, &json!(401)));
        }
    }
}

#[tokio::test]
async fn a_sandbox_is_seen_by_keys_of_its_owner_only() {
    let place = Place::new();
    let made = place.make(json!({"templateID": "base", "metadata": {"x": "y"}})).await;
    let line = format!("GET /sandboxes/{}", made.id);
    let (status, shown, _) = place.control("secret", &line, Value::Null).await;
    assert_eq!((status, &shown["state"]), (StatusCode::OK, &json!("running")));
    assert_eq!((&shown["templateID"], &shown["metadata"]["x"]), (&json!("base"), &json!("y")));
    for line in [
        line,
        format!("DELETE /sandboxes/{}", made.id),
        format!("POST /v2/sandboxes/{}/connect", made.id),
        format!("POST /sandboxes/{}/pause", made.id),
        format!("POST /sandboxes/{}/timeout", made.id),
        format!("POST /sandboxes/{}/fork", made.id),
    ] {
        let (status, ..) = place.control("other", &line, Value::Null).await;
        assert_eq!(status, StatusCode::NOT_FOUND, "{line}");
    }
    let (_, listed, _) = place.control("other", "GET /v2/sandboxes", Value::Null).await;
    assert_eq!(listed, json!([]));
}

#[tokio::test]
async fn pausing_and_connecting_change_the_state() {
    let place = Place::new();
    let made = place.make(base()).await;
    let line = |verb: &str| format!("POST /sandboxes/{}/{verb}", made.id);
    let send = async |verb, body| place.control("secret", &line(verb), body).await.0;
    assert_eq!(send("pause", json!({"memory": true})).await, StatusCode::NO_CONTENT);
    assert_eq!(send("pause", json!({})).await, StatusCode::CONFLICT);
    assert_eq!(send("timeout", json!({"timeout": 5})).await, StatusCode::NOT_FOUND);
    // A request for it does not find it.
    let (status, answer) = place.unary(&made, "/process.Process/List", json!({})).await;
    assert_eq!(status, StatusCode::BAD_GATEWAY);
    assert!(answer["message"].as_str().unwrap().contains("was not found"));
    let health = place.envd(&made, "/health", "", Body::empty()).await;
    assert_eq!(health.status(), StatusCode::BAD_GATEWAY);
    assert_eq!(send("connect", json!({"memory": false})).await, StatusCode::NOT_IMPLEMENTED);
    assert_eq!(send("connect", json!({"timeout": 60})).await, StatusCode::CREATED);
    assert_eq!(send("connect", json!({"timeout": 60})).await, StatusCode::OK);
    let health = place.envd(&made, "/health", "", Body::empty()).await;
    assert_eq!(health.status(), StatusCode::NO_CONTENT);
}

#[tokio::test]
async fn a_request_resumes_what_was_made_to_be_resumed() {
    let place = Place::new();
    let made = place.make(json!({
        "templateID": "base", "autoPause": true, "autoResume": {"enabled": true}
    }));
    let made = made.await;
    place.fake.pause(&made.id).await.unwrap();
    let (status, listed) = place.unary(&made, "/process.Process/List", json!({})).await;
    assert_eq!((status, listed), (StatusCode::OK, json!({"processes": []})));
}

#[tokio::test]
async fn connecting_never_shortens_the_time() {
    let place = Place::new();
    let made = place.make(json!({"templateID": "base", "timeout": 1000})).await;
    let deadline = || place.fake.find(&made.id).unwrap().deadline_ms.unwrap();
    let mut before = deadline();
    for line in ["POST /v2/sandboxes/ID/connect", "POST /sandboxes/ID/refreshes"] {
        let line = line.replace("ID", &made.id);
        place.control("secret", &line, json!({"timeout": 10})).await;
        assert_eq!(deadline(), before, "{line}");
        place.control("secret", &line, json!({"timeout": 2000})).await;
        assert!(deadline() > before, "{line}");
        place.fake.set_timeout(&made.id, 1000).unwrap();
        before = deadline();
    }
    let line = format!("POST /sandboxes/{}/timeout", made.id);
    place.control("secret", &line, json!({"timeout": 10})).await;
    assert!(deadline() < before);
}

#[tokio::test]
async fn lists_come_in_pages_and_by_what_is_asked() {
    let place = Place::new();
    for n in 0..3 {
        place.make(json!({"templateID": "base", "metadata": {"n": n.to_string()}})).await;
    }
    let list = async |query: &str| {
        let line = format!("GET /v2/sandboxes?{query}");
        let (status, listed, next) = place.control("secret", &line, Value::Null).await;
        assert_eq!(status, StatusCode::OK, "{listed}");
        let ns = listed.as_array().unwrap().iter().map(|one| one["metadata"]["n"].clone());
        (ns.collect::<Vec<_>>(), next)
    };
    let (first, next) = list("limit=2&order=asc").await;
    let (second, end) = list(&format!("limit=2&order=asc&nextToken={next}")).await;
    assert_eq!((first.len(), second.len(), end.as_str()), (2, 1, ""));
    assert_eq!(list("metadata=n%3D1").await.0, [json!("1")]);
    assert_eq!(list("state=paused").await.0.len(), 0);
    assert_eq!(list("template=base").await.0.len(), 3);
    assert_eq!(list("template=other").await.0.len(), 0);
    assert_eq!(list("startedAfter=2099-01-01T00:00:00Z").await.0.len(), 0);
    for query in ["limit=0", "limit=101", "order=up", "nextToken=1-x", "startedAfter=soon"] {
        let line = format!("GET /v2/sandboxes?{query}");
        let (status, ..) = place.control("secret", &line, Value::Null).await;
        assert_eq!(status, StatusCode::BAD_REQUEST, "{query}");
    }
}

#[tokio::test]
async fn a_key_has_no_more_sandboxes_than_its_bound() {
    let place = Place::new();
    let first = place.make(base()).await;
    // Two copies fit, the third does not.
    let line = format!("POST /sandboxes/{}/fork", first.id);
    let (status, copies, _) = place.control("secret", &line, json!({"count": 3})).await;
    assert_eq!(status, StatusCode::CREATED);
    assert!(copies[0]["sandbox"]["sandboxID"].is_string());
    assert_eq!(copies[2]["error"]["code"], 429);
    let (status, ..) = place.control("secret", "POST /v2/sandboxes", base()).await;
    assert_eq!(status, StatusCode::TOO_MANY_REQUESTS);
    // Another key has its own bound; and one that has ended by itself counts no more.
    let (status, ..) = place.control("other", "POST /v2/sandboxes", base()).await;
    assert_eq!(status, StatusCode::CREATED);
    place.fake.kill(&first.id).unwrap();
    place.make(base()).await;
    let (status, ..) = place.control("secret", &line, json!({"count": 17})).await;
    assert_eq!(status, StatusCode::BAD_REQUEST);
}

#[tokio::test]
async fn what_thaw_does_not_do_is_refused_with_a_sentence() {
    let place = Place::new();
    for extra in [
        json!({"allow_internet_access": false}),
        json!({"network": {"denyOut": ["0.0.0.0/0"]}}),
        json!({"mcp": {}}),
        json!({"iam": {}}),
        json!({"volumeMounts": [{"name": "v", "path": "/v"}]}),
        json!({"autoPause": true, "autoPauseMemory": false}),
    ] {
        let mut body = base();
        body.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
        let (status, answer, _) = place.control("secret", "POST /v2/sandboxes", body).await;
        assert_eq!(status, StatusCode::NOT_IMPLEMENTED, "{extra}");
        assert!(answer["message"].as_str().unwrap().len() > 20);
    }
    let (status, ..) = place.control("secret", "GET /templates", Value::Null).await;
    assert_eq!(status, StatusCode::NOT_IMPLEMENTED);
    let made = place.make(base()).await;
    let watch = json!({"path": "/work", "includeEntry": true});
    let (status, answer) =
        place.unary(&made, "/filesystem.Filesystem/CreateWatcher", watch.clone()).await;
    assert_eq!((status, &answer["code"]), (StatusCode::NOT_IMPLEMENTED, &json!("unimplemented")));
    // A stream has its answer in a stream.
    let watched = place.stream(&made, "/filesystem.Filesystem/WatchDir", &[watch]).await;
    assert_eq!(messages_of(watched).await[0]["error"]["code"], "unimplemented");
    for (body, status) in [
        (json!({"templateID": "none"}), StatusCode::NOT_FOUND),
        (json!({"templateID": "base", "timeout": 0}), StatusCode::BAD_REQUEST),
        (
            json!({"templateID": "base", "envVars": {"A": "b".repeat(1 << 17)}}),
            StatusCode::BAD_REQUEST,
        ),
        (json!({}), StatusCode::BAD_REQUEST),
    ] {
        assert_eq!(place.control("secret", "POST /v2/sandboxes", body).await.0, status);
    }
    // What is refused leaves nothing behind.
    assert_eq!(place.api.records.of("a").len(), 1);
}

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
    let mut starts = 0;
    while !place.api.streams.0.lock().unwrap().is_empty() {
        starts += 1;
        assert!(starts < 10_000, "places are kept for clients that have gone");
        tokio::task::yield_now().await;
    }
}

#[tokio::test]
async fn visitors_of_an_open_port_have_a_bound_and_do_not_lock_its_owner_out() {
    let place = Place::new();
    let open = json!({"templateID": "base", "network": {"allowPublicTraffic": true}});
    let made = place.make(open).await;
    let held: Vec<_> =
        (0..PORTS_MAX).map(|_| place.api.ports.enter_below(&made.id, PORTS_MAX).unwrap()).collect();
    let refused = at_port(&place, &made, "8080", &[]).await;
    assert_eq!(refused.status(), StatusCode::TOO_MANY_REQUESTS);
    let (status, _) = place.unary(&made, "/process.Process/List", json!({})).await;
    assert_eq!(status, StatusCode::OK);
    let start = [json!({"process": {"cmd": "sh"}})];
    let started = place.stream(&made, "/process.Process/Start", &start).await;
    assert_eq!(started.status(), StatusCode::OK);
    assert_eq!(place.api.streams.0.lock().unwrap().len(), 1);
    drop(held);
    assert_eq!(at_port(&place, &made, "8080", &[]).await.status(), StatusCode::OK);
}

#[tokio::test]
async fn a_snapshot_that_is_being_made_is_not_deleted() {
    let place = Place::new();
    let made = place.make(base()).await;
    let take = format!("POST /sandboxes/{}/snapshots", made.id);
    let (_, taken, _) = place.control("secret", &take, json!({})).await;
    let (_, one) = place.api.records.snapshots_of("a").remove(0);
    let id = place.api.records.insert_snapshot(one, 30).unwrap();
    let delete = format!("DELETE /templates/{id}");
    let (status, ..) = place.control("secret", &delete, Value::Null).await;
    assert_eq!(status, StatusCode::CONFLICT);
    place.api.records.made_snapshot(&id);
    let (status, ..) = place.control("secret", &delete, Value::Null).await;
    assert_eq!(status, StatusCode::NO_CONTENT);
    let delete = format!("DELETE /templates/{}", taken["snapshotID"].as_str().unwrap());
    let (status, ..) = place.control("secret", &delete, Value::Null).await;
    assert_eq!(status, StatusCode::NO_CONTENT);
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
async fn what_a_client_has_begun_is_done_if_it_goes_away() {
    let place = Place::new();
    let body = Body::from(base().to_string());
    let request = Request::post("/v2/sandboxes").header("X-API-KEY", "secret");
    let asked = place.send(request.body(body).unwrap());
    // The client goes when the server first waits for something.
    tokio::select! {
        biased;
        _ = asked => panic!("it was answered before the client could go"),
        () = std::future::ready(()) => {}
    }
    for _ in 0..1000 {
        tokio::task::yield_now().await;
    }
    assert_eq!(place.api.sandboxes_of("a").len(), 1);
}

/// A request to a port of a sandbox, with headers.
async fn at_port(place: &Place, made: &Made, port: &str, headers: &[(&str, &str)]) -> Response {
    let mut request = Request::builder()
        .uri("/a?b=c")
        .header("host", "somewhere")
        .header("E2b-Sandbox-Id", &made.id)
        .header("E2b-Sandbox-Port", port);
    for (name, value) in headers {
        request = request.header(*name, *value);
    }
    place.send(request.body(Body::empty()).unwrap()).await
}

async fn text_of(response: Response) -> String {
    let bytes = response.into_body().collect().await.unwrap().to_bytes();
    String::from_utf8(bytes.to_vec()).unwrap()
}

#[tokio::test]
async fn ports_are_private_unless_the_sandbox_was_made_open() {
    let place = Place::new();
    let (_, shown, _) = place.control("secret", "POST /v2/sandboxes", base()).await;
    let token = shown["trafficAccessToken"].as_str().unwrap().to_owned();
    let text = |name: &str| shown[name].as_str().unwrap().to_owned();
    let made = Made { id: text("sandboxID"), token: text("envdAccessToken") };
    assert_ne!(token, made.token);
    for wrong in ["", "x", &made.token] {
        let refused = at_port(&place, &made, "8080", &[("E2b-Traffic-Access-Token", wrong)]).await;
        assert_eq!(refused.status(), StatusCode::FORBIDDEN, "{wrong}");
    }
    // The token of a port opens nothing of envd.
    let envd = Made { id: made.id.clone(), token: token.clone() };
    let (status, _) = place.unary(&envd, "/process.Process/List", json!({})).await;
    assert_eq!(status, StatusCode::UNAUTHORIZED);
    let shows = ("E2b-Traffic-Access-Token", token.as_str());
    let own = [shows, ("X-Access-Token", &made.token), ("X-Own", "kept"), ("Connection", "X-Drop")];
    let passed = at_port(&place, &made, "8080", &[&own[..], &[("X-Drop", "1")]].concat()).await;
    assert_eq!(passed.status(), StatusCode::OK);
    let head = text_of(passed).await;
    assert!(head.starts_with("GET /a?b=c HTTP/1.1\r\n"), "{head}");
    assert!(head.contains("x-own: kept") && head.contains("host: somewhere"), "{head}");
    assert!(!head.contains("token") && !head.contains("x-drop"), "{head}");
    assert_eq!(at_port(&place, &made, "9", &[shows]).await.status(), StatusCode::BAD_GATEWAY);
    assert_eq!(at_port(&place, &made, "0", &[shows]).await.status(), StatusCode::BAD_REQUEST);
    let open = json!({"templateID": "base", "network": {"allowPublicTraffic": true}});
    let (_, shown, _) = place.control("secret", "POST /v2/sandboxes", open).await;
    assert_eq!(shown["trafficAccessToken"], Value::Null);
    let id = shown["sandboxID"].as_str().unwrap().to_owned();
    let open = Made { id, token: String::new() };
    assert_eq!(at_port(&place, &open, "8080", &[]).await.status(), StatusCode::OK);
}

#[tokio::test]
async fn a_key_that_is_taken_away_takes_the_tokens_with_it() {
    let place = Place::new();
    let open = json!({"templateID": "base", "network": {"allowPublicTraffic": true}});
    let made = place.make(open).await;
    let list = "/process.Process/List";
    assert_eq!(place.unary(&made, list, json!({})).await.0, StatusCode::OK);
    let file = place._directory.path().join(FILE);
    let text = format!("[[keys]]\nname = \"b\"\nsha256 = \"{}\"\n", HASHES[1]);
    std::fs::write(&file, text).unwrap();
    let later = std::time::SystemTime::now() + std::time::Duration::from_secs(60);
    std::fs::File::open(&file).unwrap().set_modified(later).unwrap();
    let (status, answer) = place.unary(&made, list, json!({})).await;
    assert_eq!(status, StatusCode::UNAUTHORIZED);
    assert!(answer["message"].as_str().unwrap().contains("taken away"), "{answer}");
    let refused = at_port(&place, &made, "8080", &[]).await;
    assert_eq!(refused.status(), StatusCode::UNAUTHORIZED);
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
    for n in 0..=super::filesystem::ENTRIES_MAX {
        place.fake.put(&made.id, &format!("/work/{n:05}"), Some(b""));
    }
    let list = "/filesystem.Filesystem/ListDir";
    let (_, refused) = place.unary(&made, list, json!({"path": "/work"})).await;
    assert_eq!(refused["code"], "resource_exhausted", "{refused}");
}

#[tokio::test]
async fn snapshots_are_their_owners_and_have_a_bound() {
    let place = Place::new();
    let made = place.make(base()).await;
    let take = format!("POST /sandboxes/{}/snapshots", made.id);
    place.fake.put(&made.id, "/work/kept", Some(b"1"));
    let (status, taken, _) = place.control("secret", &take, json!({"name": "first"})).await;
    assert_eq!((status, &taken["names"]), (StatusCode::CREATED, &json!(["first"])));
    place.fake.put(&made.id, "/work/kept", Some(b"2"));
    let id = taken["snapshotID"].as_str().unwrap();
    for (body, expected) in [
        (json!({"name": "first"}), StatusCode::CONFLICT),
        (json!({"name": "no name"}), StatusCode::BAD_REQUEST),
        (json!({"memory": false}), StatusCode::NOT_IMPLEMENTED),
    ] {
        assert_eq!(place.control("secret", &take, body).await.0, expected);
    }
    assert_eq!(place.control("other", &take, json!({})).await.0, StatusCode::NOT_FOUND);
    for name in [id, "first"] {
        place.make(json!({"templateID": name})).await;
        let stolen = json!({"templateID": name});
        let (status, ..) = place.control("other", "POST /v2/sandboxes", stolen).await;
        assert_eq!(status, StatusCode::NOT_FOUND, "{name}");
    }
    for n in 1..20 {
        assert_eq!(place.control("secret", &take, json!({})).await.0, StatusCode::CREATED, "{n}");
    }
    let (status, ..) = place.control("secret", &take, json!({})).await;
    assert_eq!(status, StatusCode::TOO_MANY_REQUESTS);
    let (_, page, next) = place.control("secret", "GET /snapshots?limit=15", Value::Null).await;
    assert_eq!(page.as_array().unwrap().len(), 15);
    let rest = format!("GET /snapshots?limit=15&nextToken={next}");
    let (_, page, next) = place.control("secret", &rest, Value::Null).await;
    assert_eq!((page.as_array().unwrap().len(), next.as_str()), (5, ""));
    let (_, listed, _) = place.control("other", "GET /snapshots", Value::Null).await;
    assert_eq!(listed, json!([]));
    let remove = format!("DELETE /templates/{id}");
    assert_eq!(place.control("other", &remove, Value::Null).await.0, StatusCode::NOT_FOUND);
    assert_eq!(place.control("secret", &remove, Value::Null).await.0, StatusCode::NO_CONTENT);
    assert_eq!(place.control("secret", &remove, Value::Null).await.0, StatusCode::NOT_FOUND);
}

#[tokio::test]
async fn a_sandbox_that_runs_has_one_sample_of_what_it_uses() {
    let place = Place::new();
    let made = place.make(base()).await;
    let line = format!("GET /sandboxes/{}/metrics", made.id);
    let (status, samples, _) = place.control("secret", &line, Value::Null).await;
    assert_eq!((status, &samples[0]["cpuUsedPct"]), (StatusCode::OK, &json!(50.0)));
    assert_eq!((&samples[0]["memUsed"], &samples[0]["cpuCount"]), (&json!(1 << 20), &json!(2)));
    let none = place.control("secret", &format!("{line}?end=1"), Value::Null).await.1;
    assert_eq!(none, json!([]));
    assert_eq!(place.control("other", &line, Value::Null).await.0, StatusCode::NOT_FOUND);
    place.fake.pause(&made.id).await.unwrap();
    assert_eq!(place.control("secret", &line, Value::Null).await.1, json!([]));
}
