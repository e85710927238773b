//! The control API: sandboxes, who sees them, snapshots and what they use.

use super::*;
use std::time::{Duration, Instant};

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
        json!({"network": {"egressProxy": {"address": "a.example.com:1080"}}}),
        json!({"network": {"rules": {"a.example.com": [
            {"transform": {"headers": {"X": "${e2b.identity.tokens.a}"}}}
        ]}}}),
        json!({"mcp": {}}),
        json!({"iam": {}}),
        json!({"autoPause": true, "autoPauseMemory": false}),
    ] {
        let mut body = base();
        body.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
        let (status, answer, _) = place.control("secret", "POST /v2/sandboxes", body).await;
        assert_eq!(status, StatusCode::NOT_IMPLEMENTED, "{extra}");
        assert!(answer["message"].as_str().unwrap().len() > 20);
    }
    let (status, ..) = place.control("secret", "GET /secrets", Value::Null).await;
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
        (
            json!({"templateID": "base", "volumeMounts": [{"name": "v", "path": "/v"}]}),
            StatusCode::NOT_FOUND,
        ),
    ] {
        assert_eq!(place.control("secret", "POST /v2/sandboxes", body).await.0, status);
    }
    let negative = json!({"templateID": "base", "timeout": -1});
    for (line, body, said) in [
        ("POST /v2/sandboxes", negative, "`timeout` is -1, but must be a whole number from 0"),
        (
            "GET /v2/sandboxes?limit=many",
            Value::Null,
            "`limit` of the address is wrong: invalid digit found in string",
        ),
    ] {
        let (status, answer, _) = place.control("secret", line, body).await;
        assert_eq!((status, &answer["code"]), (StatusCode::BAD_REQUEST, &json!(400)));
        assert_eq!(answer["message"], said);
    }
    let wrong = json!({"process": {"pid": -1}});
    let (status, answer) = place.unary(&made, "/process.Process/Update", wrong).await;
    assert_eq!((status, &answer["code"]), (StatusCode::BAD_REQUEST, &json!("invalid_argument")));
    // What is refused leaves nothing behind.
    assert_eq!(place.api.records.of("a").len(), 1);
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
    let until = Instant::now() + Duration::from_secs(60);
    while place.api.sandboxes_of("a").len() != 1 {
        assert!(Instant::now() < until, "it is not done");
        tokio::task::yield_now().await;
    }
}

#[tokio::test]
async fn a_key_that_is_taken_away_takes_the_tokens_with_it() {
    let place = Place::new();
    let open = json!({"templateID": "base", "network": {"allowPublicTraffic": true}});
    let made = place.make(open).await;
    let list = "/process.Process/List";
    assert_eq!(place.unary(&made, list, json!({})).await.0, StatusCode::OK);
    let file = place.directory.path().join(FILE);
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
async fn metrics_are_of_the_past_and_of_now() {
    let place = Place::new();
    let made = place.make(base()).await;
    let line = format!("GET /sandboxes/{}/metrics", made.id);
    let (status, samples, _) = place.control("secret", &line, Value::Null).await;
    assert_eq!((status, &samples[0]["cpuUsedPct"]), (StatusCode::OK, &json!(50.0)));
    assert_eq!((&samples[0]["memUsed"], &samples[0]["cpuCount"]), (&json!(1 << 20), &json!(2)));
    let none = place.control("secret", &format!("{line}?end=1"), Value::Null).await.1;
    assert_eq!(none, json!([]));
    let (status, ..) = place.control("secret", &format!("{line}?start=5&end=4"), Value::Null).await;
    assert_eq!(status, StatusCode::BAD_REQUEST);
    assert_eq!(place.control("other", &line, Value::Null).await.0, StatusCode::NOT_FOUND);
    for _ in 0..3 {
        place.api.sample_after("").await;
    }
    let memory = |samples: &Value| {
        let all = samples.as_array().unwrap().iter();
        all.map(|one| one["memUsed"].as_u64().unwrap() >> 20).collect::<Vec<_>>()
    };
    let samples = place.control("secret", &line, Value::Null).await.1;
    assert_eq!(memory(&samples), [2, 2, 1], "the first look only begins to count");
    let second = samples[0]["timestampUnix"].as_u64().unwrap();
    let before = format!("{line}?end={}", second - 1);
    assert_eq!(place.control("secret", &before, Value::Null).await.1, json!([]));
    let since = format!("{line}?start={second}");
    assert_eq!(memory(&place.control("secret", &since, Value::Null).await.1), [2, 2, 1]);
    // One that is paused is not looked at, and has its past.
    place.fake.pause(&made.id).await.unwrap();
    place.api.sample_after("").await;
    assert_eq!(memory(&place.control("secret", &line, Value::Null).await.1), [2, 2]);
    place.control("secret", &format!("DELETE /sandboxes/{}", made.id), Value::Null).await;
    place.api.sample_after("").await;
    assert!(place.api.samples.between(&made.id, 0, u64::MAX).is_empty());
}
