//! The API as a client sees it, in front of sandboxes that live in memory.

mod bounds;
mod control;
mod envd;
mod keys;
mod ports;
mod templates;
mod volumes;

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
    directory: TempDir,
}

/// A sandbox, as whoever has made it knows it.
struct Made {
    id: String,
    token: String,
}

impl Place {
    fn new() -> Self {
        Self::with(tempfile::tempdir().unwrap(), Arc::default())
    }

    /// In a home, in front of sandboxes that may be there already.
    fn with(directory: TempDir, fake: Arc<Fake>) -> Self {
        let text = format!(
            "[templates]\nbase = \"python\"\n\
             [[keys]]\nname = \"a\"\nsha256 = \"{}\"\nsandboxes = 3\ntemplates = 2\n\
             [[keys]]\nname = \"b\"\nsha256 = \"{}\"\n",
            HASHES[0], HASHES[1]
        );
        let file = directory.path().join(FILE);
        std::fs::write(&file, text).unwrap();
        let settings = LiveSettings::load(file).unwrap();
        let api = E2b::new(fake.clone(), settings, directory.path()).unwrap();
        Self { api, fake, directory }
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
        self.send(self.to_envd(made, path, kind).body(body).unwrap()).await
    }

    fn to_envd(&self, made: &Made, path: &str, kind: &str) -> axum::http::request::Builder {
        let method = if kind.is_empty() { "GET" } else { "POST" };
        Request::builder()
            .method(method)
            .uri(path)
            .header("E2b-Sandbox-Id", &made.id)
            .header("E2b-Sandbox-Port", "49983")
            .header("X-Access-Token", &made.token)
            .header("content-type", kind)
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
