//! Roles of keys, and their rates.

use super::super::keys::KEYS_FILE;
use super::*;
use axum::http::header::RETRY_AFTER;

/// SHA-256 of `boss`, `looker` and `eager`.
const MORE: [&str; 3] = [
    "a5e7c002443743c5836758c7d1cd8ddefd9fcf2061daa0efaac683fb99966057",
    "d133efd9800e396abbeb9de0cc7a6f873d58159121a0fc587f8a2ec1208ad50a",
    "0ca0c5ea4a249dfcba50d891aa6f89408342e6a3f3c6b27c5ab4e9f1da37eaf6",
];

/// A request with the token.
const LIST: &str = "/filesystem.Filesystem/ListDir";

/// A place with keys of `thaw key` beside those of e2b.toml.
fn place() -> Place {
    let place = Place::new();
    let text = format!(
        "[[keys]]\nname = \"boss\"\nsha256 = \"{}\"\nrole = \"admin\"\n\
         [[keys]]\nname = \"a\"\nsha256 = \"{}\"\nrole = \"read-only\"\n\
         [[keys]]\nname = \"a\"\nsha256 = \"{}\"\nrate = \"3 per 1h\"\n",
        MORE[0], MORE[1], MORE[2]
    );
    std::fs::write(place.directory.path().join(KEYS_FILE), text).unwrap();
    place
}

#[tokio::test]
async fn whoever_may_only_look_changes_nothing_and_gets_no_token() {
    let place = place();
    let made = place.make(base()).await;
    let of_one = |rest: &str| format!("/sandboxes/{}{rest}", made.id);
    for path in ["/v2/sandboxes".to_owned(), of_one(""), of_one("/metrics"), "/snapshots".into()] {
        let line = format!("GET {path}");
        let (status, shown, _) = place.control("looker", &line, Value::Null).await;
        assert_eq!(status, StatusCode::OK, "{line}");
        assert!(!shown.to_string().contains(&made.token), "{shown}");
    }
    for line in [
        "POST /v2/sandboxes".to_owned(),
        format!("POST /v2{}", of_one("/connect")),
        format!("POST {}", of_one("/pause")),
        format!("POST {}", of_one("/fork")),
        format!("POST {}", of_one("/snapshots")),
        format!("DELETE {}", of_one("")),
        "DELETE /templates/x".to_owned(),
    ] {
        let (status, answer, _) = place.control("looker", &line, base()).await;
        assert_eq!(status, StatusCode::FORBIDDEN, "{line}");
        assert!(answer["message"].as_str().unwrap().contains("read-only"), "{answer}");
    }
    assert_eq!(place.api.sandboxes_of("a").len(), 1);
}

#[tokio::test]
async fn an_admin_has_the_sandboxes_of_every_name() {
    let place = place();
    let made = place.make(base()).await;
    let (_, listed, _) = place.control("boss", "GET /v2/sandboxes", Value::Null).await;
    assert_eq!(listed[0]["sandboxID"], json!(made.id));
    let connect = format!("POST /v2/sandboxes/{}/connect", made.id);
    let (status, shown, _) = place.control("boss", &connect, json!({})).await;
    let token = shown["envdAccessToken"].as_str().unwrap().to_owned();
    assert!(status == StatusCode::OK && token != made.token, "the token is the admin's own");
    let again = Made { id: made.id.clone(), token };
    let (status, entries) = place.unary(&again, LIST, json!({"path": "/work"})).await;
    assert_eq!(status, StatusCode::OK, "{entries}");
    // A copy stays its owner's.
    let fork = format!("POST /sandboxes/{}/fork", made.id);
    place.control("boss", &fork, json!({})).await;
    assert_eq!(place.api.sandboxes_of("a").len(), 2);
    let (status, ..) =
        place.control("boss", &format!("DELETE /sandboxes/{}", made.id), Value::Null).await;
    assert_eq!(status, StatusCode::NO_CONTENT);
}

/// A request for a signed file, without a token in a header.
async fn signed(place: &Place, made: &Made) -> StatusCode {
    use base64::Engine;
    let text = format!("/a:read::{}", made.token);
    let hash = ring::digest::digest(&ring::digest::SHA256, text.as_bytes());
    let hash = base64::engine::general_purpose::STANDARD_NO_PAD.encode(hash);
    let signature = format!("v1_{hash}").replace('+', "%2B").replace('/', "%2F");
    let request = Request::get(format!("/files?path=/a&signature={signature}"))
        .header("E2b-Sandbox-Id", &made.id)
        .header("E2b-Sandbox-Port", "49983");
    place.send(request.body(Body::empty()).unwrap()).await.status()
}

#[tokio::test]
async fn what_an_admin_has_read_counts_no_more_when_its_key_is_taken_away() {
    let place = place();
    let made = place.make(base()).await;
    let read = async |line: &str| {
        let (_, shown, _) = place.control("boss", line, json!({})).await;
        let text = |name: &str| shown[name].as_str().unwrap_or_default().to_owned();
        (Made { id: made.id.clone(), token: text("envdAccessToken") }, text("trafficAccessToken"))
    };
    let (by_connecting, traffic) = read(&format!("POST /v2/sandboxes/{}/connect", made.id)).await;
    let (by_looking, _) = read(&format!("GET /sandboxes/{}", made.id)).await;
    assert_eq!(by_connecting.token, by_looking.token);
    let statuses = async |shown: &Made, traffic: &str| {
        let (listed, _) = place.unary(shown, LIST, json!({"path": "/work"})).await;
        let port = at_port(&place, shown, "8080", &[("E2b-Traffic-Access-Token", traffic)]).await;
        [listed, signed(&place, shown).await, port.status()]
    };
    let refused = [StatusCode::UNAUTHORIZED, StatusCode::UNAUTHORIZED, StatusCode::FORBIDDEN];
    let before = statuses(&by_connecting, &traffic).await;
    assert!(before.iter().zip(refused).all(|(status, refused)| *status != refused), "{before:?}");
    let keys = place.directory.path().join(KEYS_FILE);
    let text = std::fs::read_to_string(&keys).unwrap();
    // An admin that becomes a user loses them, too.
    let (_, others) = text.split_once("role = \"admin\"\n").unwrap();
    for without in [&text.replace("\"admin\"", "\"user\""), others] {
        std::fs::write(&keys, without).unwrap();
        assert_eq!(statuses(&by_connecting, &traffic).await, refused);
        let (status, _) = place.unary(&made, LIST, json!({"path": "/work"})).await;
        assert_eq!(status, StatusCode::OK, "its owner's stay");
        std::fs::write(&keys, &text).unwrap();
        assert_eq!(statuses(&by_connecting, &traffic).await, before);
    }
}

#[tokio::test]
async fn a_key_asks_no_more_often_than_its_rate() {
    let place = place();
    let ask = async |key: &str| {
        let request = Request::get("/v2/sandboxes").header("X-API-KEY", key);
        place.send(request.body(Body::empty()).unwrap()).await
    };
    for _ in 0..3 {
        assert_eq!(ask("eager").await.status(), StatusCode::OK);
    }
    let refused = ask("eager").await;
    assert_eq!(refused.status(), StatusCode::TOO_MANY_REQUESTS);
    let wait = refused.headers()[RETRY_AFTER].to_str().unwrap().parse::<u64>().unwrap();
    assert!((1..=1200).contains(&wait), "{wait}");
    assert!(json_of(refused).await["message"].as_str().unwrap().contains("wait"));
    // Another key of the same name has an allowance of its own.
    assert_eq!(ask("secret").await.status(), StatusCode::OK);
}
