//! The control API: sandboxes are made, found, paused and ended. Whoever asks shows a key, and
//! sees the sandboxes of that key's name only.

use super::backend::{Sandbox, Wanted};
use super::problem::{Kind, Problem};
use super::records::{ENVS_MAX, Record};
use super::serve::{header, nothing, refused};
use super::settings::Key;
use super::{E2b, ENVD_VERSION};
use axum::extract::{Path, Query, Request, State};
use axum::http::{HeaderMap, HeaderName, HeaderValue, StatusCode};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Extension, Json, Router};
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::{Map, Value, json};
use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::future::Future;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// Seconds that a sandbox has unless the request says otherwise, as with E2B.
const TIMEOUT_S: u64 = 300;
/// Most seconds that a request may ask for.
const TIMEOUT_MAX_S: u64 = 30 * 24 * 3600;
/// Most copies of a sandbox that one request makes.
const COPIES_MAX: u32 = 16;
/// Most sandboxes in one page of a list.
const PAGE_MAX: usize = 100;
/// The header that says where the next page begins.
const NEXT_TOKEN: HeaderName = HeaderName::from_static("x-next-token");

type Asked<T> = (State<Arc<E2b>>, Extension<Client>, T);

/// Whoever asks.
#[derive(Clone, Debug)]
pub(super) struct Client(Key);

impl Client {
    fn owner(&self) -> &str {
        &self.0.name
    }
}

/// Its paths, in the versions that the SDKs use and have used.
pub(super) fn routes() -> Router<Arc<E2b>> {
    Router::new()
        .route("/sandboxes", get(list_running).post(create))
        .route("/v2/sandboxes", get(list).post(create))
        .route("/sandboxes/{id}", get(show).delete(kill))
        .route("/sandboxes/{id}/connect", post(connect))
        .route("/v2/sandboxes/{id}/connect", post(connect))
        .route("/sandboxes/{id}/resume", post(connect))
        .route("/sandboxes/{id}/pause", post(pause))
        .route("/sandboxes/{id}/timeout", post(set_timeout))
        .route("/sandboxes/{id}/refreshes", post(refresh))
        .route("/sandboxes/{id}/fork", post(fork))
        .fallback(|request: Request| async move {
            let (parts, body) = request.into_parts();
            refused(body, nothing(&parts).into_response()).await
        })
}

/// Lets requests through that show a key.
pub(super) async fn check_key(
    State(e2b): State<Arc<E2b>>,
    mut request: Request,
    next: Next,
) -> Response {
    let settings = e2b.settings.now();
    let shown = header(request.headers(), "x-api-key").unwrap_or_default();
    let Some(key) = settings.key(shown.as_bytes()) else {
        let problem = Problem::new(
            Kind::Unauthenticated,
            "the API key is missing or unknown; set E2B_API_KEY to one that e2b.toml of the node \
             has the hash of",
        );
        return refused(request.into_body(), problem.into_response()).await;
    };
    request.extensions_mut().insert(Client(key.clone()));
    next.run(request).await
}

/// Does something to its end, also if the client goes away meanwhile: half of it would leave a
/// sandbox that nobody knows.
pub(super) async fn to_its_end<T: Send + 'static>(
    work: impl Future<Output = T> + Send + 'static,
) -> T {
    tokio::spawn(work).await.expect("it does not panic")
}

/// A body as JSON; none is an empty object.
fn parse<T: DeserializeOwned>(body: &[u8]) -> Result<T, Problem> {
    let body = if body.is_empty() { b"{}" } else { body };
    serde_json::from_slice(body)
        .map_err(|error| Problem::invalid(format!("the request cannot be read: {error}")))
}

fn answer(status: StatusCode, outcome: Result<Value, Problem>) -> Response {
    match outcome {
        Ok(Value::Null) => status.into_response(),
        Ok(value) => (status, Json(value)).into_response(),
        Err(problem) => problem.into_response(),
    }
}

/// A sandbox that is wanted. What is not here is of no effect on what the sandbox is.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct CreateRequest {
    #[serde(rename = "templateID")]
    template: String,
    timeout: Option<u64>,
    #[serde(default)]
    auto_pause: bool,
    auto_pause_memory: Option<bool>,
    auto_resume: Option<AutoResume>,
    #[serde(default)]
    metadata: Option<BTreeMap<String, String>>,
    #[serde(default)]
    env_vars: Option<BTreeMap<String, String>>,
    #[serde(rename = "allow_internet_access")]
    allow_internet_access: Option<bool>,
    network: Option<Map<String, Value>>,
    mcp: Option<Value>,
    iam: Option<Value>,
    volume_mounts: Option<Vec<Value>>,
}

#[derive(Deserialize)]
struct AutoResume {
    enabled: bool,
}

impl CreateRequest {
    /// Refuses what would be left out silently otherwise.
    fn check(&self, headers: &HeaderMap) -> Result<(), Problem> {
        let lacks = [
            (
                self.allow_internet_access == Some(false),
                "`allow_internet_access`: the function's `[egress]` says where its sandboxes may connect to",
            ),
            (
                self.network.as_ref().is_some_and(|rules| !rules.is_empty()),
                "`network`: the function's `[egress]` says where its sandboxes may connect to",
            ),
            (self.mcp.is_some(), "`mcp`: there is no MCP gateway"),
            (self.iam.is_some(), "`iam`: sandboxes have no identities"),
            (
                self.volume_mounts.as_ref().is_some_and(|all| !all.is_empty()),
                "`volumeMounts`: there are no volumes",
            ),
            (
                self.auto_pause && self.auto_pause_memory == Some(false),
                "`autoPauseMemory`: a pause keeps the memory always",
            ),
            (
                headers.contains_key("idempotency-key"),
                "`Idempotency-Key`: requests are not compared with former ones",
            ),
        ];
        match lacks.iter().find(|(is_asked, _)| *is_asked) {
            Some((_, what)) => Err(Problem::unsupported(format!("{what}; leave it out"))),
            None => Ok(()),
        }
    }
}

/// Checks a number of seconds.
fn timeout(seconds: Option<u64>) -> Result<u64, Problem> {
    match seconds.unwrap_or(TIMEOUT_S) {
        seconds @ 1..=TIMEOUT_MAX_S => Ok(seconds),
        _ => Err(Problem::invalid(format!("a timeout is between 1 and {TIMEOUT_MAX_S} seconds"))),
    }
}

async fn create(
    State(e2b): State<Arc<E2b>>,
    Extension(client): Extension<Client>,
    headers: HeaderMap,
    body: axum::body::Bytes,
) -> Response {
    let made = to_its_end(async move { e2b.create(&client, &headers, &body).await });
    answer(StatusCode::CREATED, made.await)
}

impl E2b {
    async fn create(
        &self,
        client: &Client,
        headers: &HeaderMap,
        body: &[u8],
    ) -> Result<Value, Problem> {
        let request: CreateRequest = parse(body)?;
        request.check(headers)?;
        let envs = request.env_vars.unwrap_or_default();
        let bytes: usize = envs.iter().map(|(name, value)| name.len() + value.len()).sum();
        if bytes > ENVS_MAX {
            return Err(Problem::invalid(format!(
                "the environment has {bytes} bytes, and at most {ENVS_MAX} are kept; set less"
            )));
        }
        let record = Record {
            owner: client.owner().to_owned(),
            template: request.template,
            envs,
            auto_resume: request.auto_resume.is_some_and(|resume| resume.enabled),
            timeout_s: timeout(request.timeout)?,
            is_being_made: true,
        };
        let wanted = Wanted {
            id: String::new(),
            function: self.settings.now().function(&record.template).to_owned(),
            timeout_s: record.timeout_s,
            pauses: request.auto_pause,
            metadata: request.metadata.unwrap_or_default(),
        };
        // Those that have ended by themselves count no more.
        self.sandboxes_of(client.owner());
        let id = self.records.insert(record.clone(), client.0.sandboxes)?;
        let made = self.backend.create(Wanted { id: id.clone(), ..wanted }).await;
        match made {
            Ok(sandbox) => {
                self.records.made(&id);
                Ok(self.brief(&sandbox, &record))
            }
            Err(problem) => {
                self.records.remove(&id);
                Err(problem)
            }
        }
    }

    /// A sandbox of a client.
    fn own(&self, client: &Client, id: &str) -> Result<(Sandbox, Record), Problem> {
        let record = self.records.get(id).filter(|record| record.owner == client.owner());
        let found = record.and_then(|record| Some((self.backend.find(id)?, record)));
        found.ok_or_else(|| Problem::no_sandbox(id))
    }

    /// What whoever makes a sandbox, or connects to it, is told.
    fn brief(&self, sandbox: &Sandbox, record: &Record) -> Value {
        json!({
            "templateID": record.template,
            "sandboxID": sandbox.id,
            "clientID": "thaw",
            "envdVersion": ENVD_VERSION,
            "envdAccessToken": self.records.token(&sandbox.id),
            "trafficAccessToken": null,
            "domain": null,
        })
    }

    /// A sandbox in a list.
    fn listed(&self, sandbox: &Sandbox) -> Value {
        let record = self.records.get(&sandbox.id).unwrap_or_default();
        // A paused one has no end; E2B's API wants a time all the same.
        let end_ms = sandbox.deadline_ms.unwrap_or(sandbox.created_ms);
        json!({
            "templateID": record.template,
            "alias": record.template,
            "sandboxID": sandbox.id,
            "clientID": "thaw",
            "startedAt": time_text(sandbox.created_ms),
            "endAt": time_text(end_ms),
            "cpuCount": sandbox.cpus,
            "memoryMB": sandbox.memory_bytes >> 20,
            // Files take memory here.
            "diskSizeMB": sandbox.memory_bytes >> 20,
            "metadata": sandbox.metadata,
            "state": if sandbox.is_paused() { "paused" } else { "running" },
            "envdVersion": ENVD_VERSION,
        })
    }
}

fn time_text(ms: u64) -> String {
    humantime::format_rfc3339_millis(UNIX_EPOCH + Duration::from_millis(ms)).to_string()
}

async fn show((State(e2b), Extension(client), Path(id)): Asked<Path<String>>) -> Response {
    let shown = e2b.own(&client, &id).map(|(sandbox, record)| {
        let mut shown = e2b.listed(&sandbox);
        shown["envdAccessToken"] = json!(e2b.records.token(&id));
        let on_timeout = if sandbox.pauses { "pause" } else { "kill" };
        shown["lifecycle"] = json!({"autoResume": record.auto_resume, "onTimeout": on_timeout});
        shown
    });
    answer(StatusCode::OK, shown)
}

async fn kill((State(e2b), Extension(client), Path(id)): Asked<Path<String>>) -> Response {
    let killed = e2b.own(&client, &id).and_then(|_| e2b.backend.kill(&id));
    if killed.is_ok() {
        e2b.records.remove(&id);
    }
    answer(StatusCode::NO_CONTENT, killed.map(|()| Value::Null))
}

#[derive(Deserialize)]
struct PauseRequest {
    memory: Option<bool>,
}

async fn pause(
    (State(e2b), Extension(client), Path(id), body): (
        State<Arc<E2b>>,
        Extension<Client>,
        Path<String>,
        axum::body::Bytes,
    ),
) -> Response {
    let paused = async move {
        let request: PauseRequest = parse(&body)?;
        let (sandbox, _) = e2b.own(&client, &id)?;
        if request.memory == Some(false) {
            return Err(Problem::unsupported(
                "`memory`: a pause keeps the memory always; leave it out",
            ));
        }
        if sandbox.is_paused() {
            return Err(Problem::new(Kind::Exists, format!("sandbox \"{id}\" is paused already")));
        }
        e2b.backend.pause(&id).await.map(|()| Value::Null)
    };
    answer(StatusCode::NO_CONTENT, to_its_end(paused).await)
}

#[derive(Deserialize)]
struct ConnectRequest {
    timeout: Option<u64>,
    memory: Option<bool>,
}

/// Resumes a sandbox that is paused. One that runs gets more time, and never less.
async fn connect(
    (State(e2b), Extension(client), Path(id), body): (
        State<Arc<E2b>>,
        Extension<Client>,
        Path<String>,
        axum::body::Bytes,
    ),
) -> Response {
    let connected = async move {
        let request: ConnectRequest = parse(&body)?;
        let seconds = timeout(request.timeout)?;
        let (sandbox, record) = e2b.own(&client, &id)?;
        let status = match sandbox.deadline_ms {
            None if request.memory == Some(false) => {
                return Err(Problem::unsupported(
                    "`memory`: a sandbox is resumed with its memory always; leave it out",
                ));
            }
            None => {
                e2b.backend.resume(&id, seconds).await?;
                StatusCode::CREATED
            }
            Some(deadline) => {
                if deadline < now_ms() + seconds * 1000 {
                    e2b.backend.set_timeout(&id, seconds)?;
                }
                StatusCode::OK
            }
        };
        Ok((status, Json(e2b.brief(&sandbox, &record))))
    };
    to_its_end(connected).await.into_response()
}

fn now_ms() -> u64 {
    let since_epoch = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since_epoch.as_millis()).unwrap_or(u64::MAX)
}

#[derive(Deserialize)]
struct TimeoutRequest {
    #[serde(alias = "duration")]
    timeout: Option<u64>,
}

async fn set_timeout(
    (State(e2b), Extension(client), Path(id), body): (
        State<Arc<E2b>>,
        Extension<Client>,
        Path<String>,
        axum::body::Bytes,
    ),
) -> Response {
    let changed = || {
        let request: TimeoutRequest = parse(&body)?;
        running(&e2b, &client, &id)?;
        // 0 ends it at once, as far as a clock can tell.
        let seconds = request.timeout.map(|seconds| seconds.max(1));
        e2b.backend.set_timeout(&id, timeout(seconds)?).map(|()| Value::Null)
    };
    answer(StatusCode::NO_CONTENT, changed())
}

/// Gives a sandbox that runs more time, and never less.
async fn refresh(
    (State(e2b), Extension(client), Path(id), body): (
        State<Arc<E2b>>,
        Extension<Client>,
        Path<String>,
        axum::body::Bytes,
    ),
) -> Response {
    let changed = || {
        let request: TimeoutRequest = parse(&body)?;
        let deadline = running(&e2b, &client, &id)?;
        let seconds = timeout(request.timeout)?;
        if deadline < now_ms() + seconds * 1000 {
            e2b.backend.set_timeout(&id, seconds)?;
        }
        Ok(Value::Null)
    };
    answer(StatusCode::NO_CONTENT, changed())
}

/// When the time of a sandbox comes, which runs.
fn running(e2b: &E2b, client: &Client, id: &str) -> Result<u64, Problem> {
    let (sandbox, _) = e2b.own(client, id)?;
    sandbox.deadline_ms.ok_or_else(|| Problem::no_sandbox(id))
}

#[derive(Deserialize)]
struct ForkRequest {
    timeout: Option<u64>,
    count: Option<u32>,
}

async fn fork(
    (State(e2b), Extension(client), Path(id), body): (
        State<Arc<E2b>>,
        Extension<Client>,
        Path<String>,
        axum::body::Bytes,
    ),
) -> Response {
    let forked = async move {
        let request: ForkRequest = parse(&body)?;
        let seconds = timeout(request.timeout)?;
        let count = request.count.unwrap_or(1);
        if !(1..=COPIES_MAX).contains(&count) {
            return Err(Problem::invalid(format!("`count` is between 1 and {COPIES_MAX}")));
        }
        running(&e2b, &client, &id)?;
        let mut copies = Vec::new();
        for _ in 0..count {
            copies.push(match e2b.fork_one(&client, &id, seconds).await {
                Ok(copy) => json!({"sandbox": copy}),
                Err(problem) => json!({
                    "error": {"code": problem.status().as_u16(), "message": problem.message}
                }),
            });
        }
        Ok(json!(copies))
    };
    answer(StatusCode::CREATED, to_its_end(forked).await)
}

impl E2b {
    async fn fork_one(&self, client: &Client, id: &str, seconds: u64) -> Result<Value, Problem> {
        let (_, record) = self.own(client, id)?;
        let record = Record { timeout_s: seconds, ..record };
        let copy = self.records.insert(record.clone(), client.0.sandboxes)?;
        let forked = async {
            let sandbox = self.backend.fork(id, &copy).await?;
            self.backend.set_timeout(&copy, seconds)?;
            self.records.made(&copy);
            Ok(self.brief(&sandbox, &record))
        };
        let forked = forked.await;
        if forked.is_err() {
            self.records.remove(&copy);
        }
        forked
    }
}

/// What is listed.
#[derive(Default, Deserialize)]
#[serde(rename_all = "camelCase")]
struct ListQuery {
    metadata: Option<String>,
    state: Option<String>,
    order: Option<String>,
    started_after: Option<String>,
    template: Option<String>,
    next_token: Option<String>,
    limit: Option<usize>,
}

/// The first version of the list: those that run, all of them.
async fn list_running(
    (State(e2b), Extension(client), Query(query)): Asked<Query<ListQuery>>,
) -> Response {
    let query = ListQuery { state: Some("running".to_owned()), ..query };
    match matching(&e2b, &client, &query) {
        Ok(found) => {
            let shown: Vec<_> = found.iter().map(|sandbox| e2b.listed(sandbox)).collect();
            Json(shown).into_response()
        }
        Err(problem) => problem.into_response(),
    }
}

/// One page of a list. The next one begins after the last sandbox of this one, so that sandboxes
/// that come and go meanwhile shift nothing.
async fn list((State(e2b), Extension(client), Query(query)): Asked<Query<ListQuery>>) -> Response {
    let page = || {
        let limit = query.limit.unwrap_or(PAGE_MAX);
        if !(1..=PAGE_MAX).contains(&limit) {
            return Err(Problem::invalid(format!("`limit` is between 1 and {PAGE_MAX}")));
        }
        let mut found = matching(&e2b, &client, &query)?;
        if let Some(token) = &query.next_token {
            let at = found.iter().position(|sandbox| position(sandbox) == *token);
            let at = at.ok_or_else(|| {
                Problem::invalid("the sandbox at which this page begins is gone; list anew")
            })?;
            found.drain(..at);
        }
        let next = found.get(limit).map(position);
        found.truncate(limit);
        Ok((found, next))
    };
    match page() {
        Ok((found, next)) => {
            let shown: Vec<_> = found.iter().map(|sandbox| e2b.listed(sandbox)).collect();
            let mut response = Json(shown).into_response();
            if let Some(token) = next.and_then(|token| HeaderValue::try_from(token).ok()) {
                response.headers_mut().insert(NEXT_TOKEN, token);
            }
            response
        }
        Err(problem) => problem.into_response(),
    }
}

fn position(sandbox: &Sandbox) -> String {
    format!("{}-{}", sandbox.created_ms, sandbox.id)
}

/// The sandboxes that a query means, the latest first unless it says otherwise.
fn matching(e2b: &E2b, client: &Client, query: &ListQuery) -> Result<Vec<Sandbox>, Problem> {
    let states = query.state.as_deref().unwrap_or("running,paused");
    let (runs, pauses) = (named(states, "running"), named(states, "paused"));
    let metadata = query.metadata.as_deref().map(metadata_filter).transpose()?.unwrap_or_default();
    let after = query.started_after.as_deref().map(time_ms).transpose()?.unwrap_or(0);
    let settings = e2b.settings.now();
    let function = query.template.as_deref().map(|template| settings.function(template));
    let is_meant = |sandbox: &Sandbox| {
        (if sandbox.is_paused() { pauses } else { runs })
            && sandbox.created_ms >= after
            && function.is_none_or(|function| sandbox.function == function)
            && metadata.iter().all(|(name, value)| sandbox.metadata.get(name) == Some(value))
    };
    let mut found = e2b.sandboxes_of(client.owner());
    found.retain(is_meant);
    let key = |sandbox: &Sandbox| (sandbox.created_ms, sandbox.id.clone());
    match query.order.as_deref() {
        Some("asc") => found.sort_by_key(key),
        Some("desc") | None => found.sort_by_key(|sandbox| Reverse(key(sandbox))),
        Some(other) => {
            return Err(Problem::invalid(format!("`order` is `asc` or `desc`, not {other:?}")));
        }
    }
    Ok(found)
}

fn named(list: &str, name: &str) -> bool {
    list.split(',').any(|one| one.trim() == name)
}

/// Names and values of a form, which the SDKs have each encoded once more.
fn metadata_filter(text: &str) -> Result<BTreeMap<String, String>, Problem> {
    let wrong = |_| Problem::invalid("`metadata` is no form (`name=value&…`) of UTF-8 text");
    let pairs = text.split('&').filter(|pair| !pair.is_empty()).map(|pair| {
        let (name, value) = pair.split_once('=').unwrap_or((pair, ""));
        Ok((decoded(&decoded(name)?)?, decoded(&decoded(value)?)?))
    });
    pairs.collect::<Result<_, std::str::Utf8Error>>().map_err(wrong)
}

fn decoded(text: &str) -> Result<String, std::str::Utf8Error> {
    let spaced = text.replace('+', " ");
    percent_encoding::percent_decode_str(&spaced).decode_utf8().map(Into::into)
}

/// Milliseconds since 1970 of a time as ISO 8601 has it, with the offset of a time zone.
fn time_ms(text: &str) -> Result<u64, Problem> {
    let wrong =
        || Problem::invalid(format!("{text:?} is no time; write it as 2026-01-31T12:00:00Z"));
    // A `+` in a query that nobody has encoded is a blank.
    let text = text.replace(' ', "+");
    let (local, sign, offset) = match text.rfind(['+', '-']) {
        Some(at) if at > 10 => (&text[..at], text.as_bytes()[at], &text[at + 1..]),
        _ => (text.trim_end_matches('Z'), b'+', "00:00"),
    };
    let (hours, minutes) = offset.split_once(':').ok_or_else(wrong)?;
    let minutes = hours.parse::<u64>().ok().zip(minutes.parse::<u64>().ok());
    let (hours, minutes) = minutes.filter(|(h, m)| *h < 24 && *m < 60).ok_or_else(wrong)?;
    let local = humantime::parse_rfc3339_weak(local).map_err(|_| wrong())?;
    let local = local.duration_since(UNIX_EPOCH).map_err(|_| wrong())?;
    let offset = Duration::from_secs((hours * 60 + minutes) * 60);
    let time = match sign {
        b'+' => local.saturating_sub(offset),
        _ => local + offset,
    };
    u64::try_from(time.as_millis()).map_err(|_| wrong())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_read_with_their_offsets() {
        let noon = time_ms("2026-01-31T12:00:00Z").unwrap();
        for text in [
            "2026-01-31T12:00:00",
            "2026-01-31T14:00:00+02:00",
            "2026-01-31T14:00:00 02:00",
            "2026-01-31T06:30:00-05:30",
            "2026-01-31T12:00:00.000000+00:00",
        ] {
            assert_eq!(time_ms(text).ok(), Some(noon), "{text}");
        }
        for text in ["", "noon", "2026-01-31T12:00:00+2", "2026-01-31T12:00:00+99:00"] {
            assert!(time_ms(text).is_err(), "{text}");
        }
    }

    #[test]
    fn metadata_is_encoded_twice() {
        let read = metadata_filter("a%2520b=c%2526d&e=f").unwrap();
        let expected = [("a b", "c&d"), ("e", "f")].map(|(a, b)| (a.to_owned(), b.to_owned()));
        assert_eq!(read, expected.into());
        assert!(metadata_filter("a=%ff").is_err());
    }
}
