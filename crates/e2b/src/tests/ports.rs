//! Ports of programs.

use super::*;
use crate::records::ENVS_MAX;

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
async fn the_server_for_code_gets_the_environment_of_the_sandbox_and_other_ports_do_not() {
    let place = Place::new();
    let open = json!({
        "templateID": "base",
        "envVars": {"A": "grün"},
        "network": {"allowPublicTraffic": true}
    });
    let made = place.make(open).await;
    let forged = ("Thaw-Sandbox-Environment", "Zm9yZ2Vk");
    let owns = ("X-Access-Token", made.token.as_str());
    let head = text_of(at_port(&place, &made, "49999", &[forged, owns]).await).await;
    let wanted = json!({"A": "grün", "E2B_SANDBOX": "true", "E2B_SANDBOX_ID": made.id});
    assert_eq!(environment_in(&head), Some(wanted));
    assert!(!head.contains("token"), "{head}");
    let head = text_of(at_port(&place, &made, "8080", &[forged, owns]).await).await;
    assert!(!head.contains("environment"), "{head}");
    // Strangers of an open sandbox do not make it show its environment.
    for wrong in ["", "x"] {
        let stranger = [forged, ("X-Access-Token", wrong)];
        let head = text_of(at_port(&place, &made, "49999", &stranger).await).await;
        let wanted = json!({"E2B_SANDBOX": "true", "E2B_SANDBOX_ID": made.id});
        assert_eq!(environment_in(&head), Some(wanted));
    }
    // The token of a private one's ports is enough.
    let made = json!({"templateID": "base", "envVars": {"A": "b"}});
    let (_, shown, _) = place.control("secret", "POST /v2/sandboxes", made).await;
    let id = shown["sandboxID"].as_str().unwrap().to_owned();
    let traffic = ("E2b-Traffic-Access-Token", shown["trafficAccessToken"].as_str().unwrap());
    let made = Made { id, token: String::new() };
    let head = text_of(at_port(&place, &made, "49999", &[traffic]).await).await;
    assert_eq!(environment_in(&head).unwrap()["A"], "b");
}

#[tokio::test]
async fn an_environment_that_no_server_takes_as_a_header_is_refused() {
    let place = Place::new();
    // The longest that a sandbox may have: each byte is six in JSON.
    let long = json!({"templateID": "base", "envVars": {"A": "\u{1}".repeat(ENVS_MAX - 1)}});
    let (_, shown, _) = place.control("secret", "POST /v2/sandboxes", long).await;
    let id = shown["sandboxID"].as_str().unwrap().to_owned();
    let traffic = ("E2b-Traffic-Access-Token", shown["trafficAccessToken"].as_str().unwrap());
    let made = Made { id, token: String::new() };
    let refused = at_port(&place, &made, "49999", &[traffic]).await;
    assert_eq!(refused.status(), StatusCode::PAYLOAD_TOO_LARGE);
    assert!(text_of(refused).await.contains("set less"));
    assert_eq!(at_port(&place, &made, "8080", &[traffic]).await.status(), StatusCode::OK);
}

/// The environment that a server for code is told.
fn environment_in(head: &str) -> Option<Value> {
    let shown: Vec<_> =
        head.lines().filter_map(|line| line.strip_prefix("thaw-sandbox-environment: ")).collect();
    let [shown] = shown[..] else { return None };
    let decoded = base64::Engine::decode(&base64::engine::general_purpose::STANDARD, shown);
    Some(serde_json::from_slice(&decoded.unwrap()).unwrap())
}
