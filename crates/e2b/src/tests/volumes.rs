//! Volumes, and files in them, as a client sees them.

use super::*;
use crate::Streams;
use crate::records::VolumeRecord;
use axum::http::header::AUTHORIZATION;
use std::os::unix::fs::symlink;
use std::sync::atomic::Ordering;
use thaw_home::home::Home;
use thaw_home::volumes::VolumeStore;

struct Volumes {
    place: Place,
    store: VolumeStore,
}

/// A volume, as whoever has made it knows it.
struct Volume {
    id: String,
    token: String,
}

impl Volumes {
    fn new() -> Self {
        let place = Place::new();
        let store = VolumeStore::of(Home::at(place.directory.path().join("home")).unwrap());
        *place.fake.volumes.lock().unwrap() = Some(store.clone());
        Self { place, store }
    }

    async fn control(&self, key: &str, line: &str, body: Value) -> (StatusCode, Value) {
        let (status, answer, _) = self.place.control(key, line, body).await;
        (status, answer)
    }

    async fn make(&self, name: &str) -> Volume {
        let (status, made) = self.control("secret", "POST /volumes", json!({"name": name})).await;
        assert_eq!(status, StatusCode::CREATED, "{made}");
        let text = |name: &str| made[name].as_str().unwrap().to_owned();
        Volume { id: text("volumeID"), token: text("token") }
    }

    async fn content(&self, of: &Volume, line: &str, body: Body) -> Response {
        let (method, path) = line.split_once(' ').unwrap();
        let uri = format!("/volumecontent/{}/{path}", of.id);
        let request = Request::builder().method(method).uri(uri);
        let request = request.header(AUTHORIZATION, format!("Bearer {}", of.token));
        self.place.send(request.body(body).unwrap()).await
    }

    async fn status(&self, of: &Volume, line: &str, body: &str) -> u16 {
        self.content(of, line, Body::from(body.to_owned())).await.status().as_u16()
    }
}

#[tokio::test]
async fn volumes_are_their_keys_and_no_more_than_it_may_have() {
    let all = Volumes::new();
    let file = all.place.directory.path().join(FILE);
    let text = std::fs::read_to_string(&file).unwrap();
    let bounded = text.replacen("templates = 2", "volumes = 2\nvolume_size = \"1MiB\"", 1);
    std::fs::write(&file, bounded).unwrap();
    let one = all.make("one").await;
    assert_eq!(all.store.list().unwrap()[0].size, 1 << 20);
    for (name, status) in
        [("one", 409), ("", 400), ("a/b", 400), ("..", 400), (&"x".repeat(129), 400)]
    {
        let (refused, _) = all.control("secret", "POST /volumes", json!({"name": name})).await;
        assert_eq!(refused.as_u16(), status, "{name}");
    }
    all.make("two").await;
    let (many, _) = all.control("secret", "POST /volumes", json!({"name": "three"})).await;
    assert_eq!(many, StatusCode::TOO_MANY_REQUESTS);
    let (_, listed) = all.control("secret", "GET /volumes", Value::Null).await;
    assert_eq!(listed.as_array().unwrap().len(), 2);
    let (_, listed) = all.control("other", "GET /volumes", Value::Null).await;
    assert_eq!(listed, json!([]));
    let line = |method: &str| format!("{method} /volumes/{}", one.id);
    let (status, shown) = all.control("secret", &line("GET"), Value::Null).await;
    assert_eq!((status, &shown["name"]), (StatusCode::OK, &json!("one")));
    assert_eq!(shown["token"], json!(one.token));
    for method in ["GET", "DELETE"] {
        let (status, _) = all.control("other", &line(method), Value::Null).await;
        assert_eq!(status, StatusCode::NOT_FOUND);
    }
    // Nobody else mounts it, by its name or by that on the node.
    for name in ["one".to_owned(), one.id.clone(), format!("e2b-{}", one.id)] {
        let body = json!({"templateID": "base", "volumeMounts": [{"name": name, "path": "/v"}]});
        let (status, _) = all.control("other", "POST /v2/sandboxes", body).await;
        assert_eq!(status, StatusCode::NOT_FOUND);
    }
    let body = json!({"templateID": "base", "volumeMounts": [{"name": "one", "path": "/v"}]});
    let made = all.place.make(body).await;
    let (_, shown) =
        all.control("secret", &format!("GET /sandboxes/{}", made.id), Value::Null).await;
    assert_eq!(shown["volumeMounts"], json!([{"name": "one", "path": "/v"}]));
    // One of a sandbox that is asleep stays, open or not.
    all.place.fake.has_volumes.store(true, Ordering::SeqCst);
    let (status, _) = all.control("secret", &line("DELETE"), Value::Null).await;
    assert_eq!(status, StatusCode::CONFLICT);
    all.place.fake.has_volumes.store(false, Ordering::SeqCst);
    let (status, _) = all.control("secret", &line("DELETE"), Value::Null).await;
    assert_eq!(status, StatusCode::NO_CONTENT);
    let (status, _) = all.control("secret", &line("DELETE"), Value::Null).await;
    assert_eq!(status, StatusCode::NOT_FOUND);
    assert_eq!(all.store.list().unwrap().len(), 1);
}

#[tokio::test]
async fn a_volume_that_is_being_made_is_not_seen_and_not_removed() {
    let all = Volumes::new();
    let record = VolumeRecord { owner: "a".into(), name: "new".into(), is_being_made: true };
    let records = &all.place.api.records;
    let id = records.insert_volume(record, 4).unwrap();
    let (_, listed) = all.control("secret", "GET /volumes", Value::Null).await;
    assert_eq!(listed, json!([]));
    let body = json!({"templateID": "base", "volumeMounts": [{"name": "new", "path": "/v"}]});
    let new = Volume { id: id.clone(), token: records.volume_token(&id) };
    assert_eq!(all.status(&new, "GET dir?path=/", "").await, 401);
    for (line, body, status) in [
        (format!("GET /volumes/{id}"), Value::Null, 404),
        (format!("DELETE /volumes/{id}"), Value::Null, 409),
        ("POST /v2/sandboxes".to_owned(), body, 404),
    ] {
        assert_eq!(all.control("secret", &line, body).await.0.as_u16(), status, "{line}");
    }
    // The next daemon finds that it never came.
    all.place.api.forget_missing_volumes();
    assert_eq!(records.volume(&id), None);
}

#[test]
fn an_owner_has_no_more_than_half_of_what_others_leave() {
    let streams = Streams::default();
    let enter = |owner: &str| streams.enter_half(owner, 3, 8);
    let mut all = Vec::new();
    for (owner, most) in [("a", 3), ("b", 2), ("c", 1), ("d", 1)] {
        let own: Vec<_> = (0..8).map_while(|_| enter(owner).ok()).collect();
        assert_eq!(own.len(), most, "{owner}");
        all.extend(own);
    }
    drop(all);
    enter("d").unwrap();
}

#[tokio::test]
async fn files_of_a_volume_are_for_whoever_has_its_token() {
    let all = Volumes::new();
    let (one, two) = (all.make("one").await, all.make("two").await);
    assert_eq!(all.status(&one, "PUT file?path=/a/b&force=true", "content").await, 201);
    let read = all.content(&one, "GET file?path=/a/b", Body::empty()).await;
    assert_eq!(read.headers()["content-length"], "7");
    assert_eq!(read.into_body().collect().await.unwrap().to_bytes(), "content");
    let listed = all.content(&one, "GET dir?path=/&depth=2", Body::empty()).await;
    let listed = json_of(listed).await;
    assert_eq!(listed[1]["path"], "/a/b");
    for (line, body, status) in [
        ("PUT file?path=/c/d", "x", 404),
        ("PUT file?path=/", "x", 400),
        ("PUT file?path=/../x", "x", 400),
        ("PUT file?path=/a", "x", 400),
        ("PUT file?path=/x&uid=7", "x", 501),
        ("PUT file?path=/x&mode=99999", "x", 400),
        ("GET file?path=/a/b/../../../etc/passwd", "", 400),
        ("GET file?path=/none", "", 404),
        ("GET path?path=/none", "", 404),
        ("GET dir?path=/&depth=1000", "", 400),
        ("POST dir?path=/a", "", 409),
        ("POST dir?path=/n/o", "", 404),
        ("PATCH path?path=/a/b", "{\"mode\": 384}", 200),
        ("PATCH path?path=/a/b", "{\"gid\": 7}", 501),
        ("PATCH path?path=/a/b", "{", 400),
        ("DELETE path?path=/none", "", 404),
    ] {
        assert_eq!(all.status(&one, line, body).await, status, "{line}");
    }
    let wrong = Volume { id: one.id.clone(), token: two.token.clone() };
    let none = Volume { id: "../secrets".replace('/', "%2F"), token: one.token.clone() };
    for stranger in [&wrong, &none] {
        for line in ["GET file?path=/a/b", "GET dir?path=/", "DELETE path?path=/a"] {
            assert_eq!(all.status(stranger, line, "").await, 401);
        }
    }
    let files = all.place.directory.path().join(format!("home/volumes/e2b-{}/files", one.id));
    symlink("/etc/passwd", files.join("passwd")).unwrap();
    symlink("/etc", files.join("etc")).unwrap();
    for line in ["GET file?path=/passwd", "GET file?path=/etc/passwd", "GET dir?path=/etc"] {
        assert_eq!(all.status(&one, line, "").await, 400, "{line}");
    }
    assert_eq!(all.status(&one, "DELETE path?path=/a", "").await, 204);
    let settings = all.place.directory.path().join(FILE);
    let text = std::fs::read_to_string(&settings).unwrap();
    std::fs::write(&settings, text.replacen("\"a\"", "\"z\"", 1)).unwrap();
    assert_eq!(all.status(&one, "GET dir?path=/", "").await, 401, "its key is gone");
}
