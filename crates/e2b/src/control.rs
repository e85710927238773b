//! The control API: sandboxes are made, found, paused and ended. Whoever asks shows a key, and
//! sees the sandboxes of that key's name only.

use super::backend::{Sandbox, Wanted};
use super::input::from_json;
use super::keys::{Key, Role};
use super::network::NetworkRequest;
use super::problem::{Kind, Problem};
use super::records::{ENVS_MAX, Holder, Record};
use super::serve::{header, nothing, refused};
use super::{E2b, ENVD_VERSION, list, metrics, network, snapshots, templates, volumes};
use axum::body::Bytes;
use axum::extract::{Path, Request, State};
use axum::http::header::RETRY_AFTER;
use axum::http::{HeaderMap, HeaderValue, Method, StatusCode};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post, put};
use axum::{Extension, Json, Router};
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};
use thaw_home::config::ByteSize;
use thaw_node::remote::EgressWish;
use thaw_node::to_its_end::to_its_end;

/// Seconds that a sandbox has unless the request says otherwise, as with E2B.
const TIMEOUT_S: u64 = 300;
/// Most seconds that a request may ask for.
const TIMEOUT_MAX_S: u64 = 30 * 24 * 3600;
/// Most copies of a sandbox that one request makes.
const COPIES_MAX: u32 = 16;

pub(super) type Asked<T> = (State<Arc<E2b>>, Extension<Client>, T);
/// A request with a body about one thing.
pub(super) type Posted = (State<Arc<E2b>>, Extension<Client>, Path<String>, Bytes);

/// Whoever asks.
#[derive(Clone, Debug)]
pub(super) struct Client(Key);

impl Client {
    /// Most snapshots that it may have.
    pub fn most_snapshots(&self) -> u32 {
        self.0.snapshots
    }

    /// Most templates that it may have.
    pub fn most_templates(&self) -> u32 {
        self.0.templates
    }

    /// Most volumes that it may have, and the bytes of each.
    pub fn most_volumes(&self) -> (u32, ByteSize) {
        (self.0.volumes, self.0.volume_size)
    }

    /// What it may do.
    pub fn role(&self) -> Role {
        self.0.role
    }

    /// Refuses what changes something, or lets somebody change it.
    pub fn check_changes(&self) -> Result<(), Problem> {
        self.0.check(&Method::POST)
    }

    /// Whether the sandboxes of this owner are its business.
    fn sees(&self, owner: &str) -> bool {
        self.0.role == Role::Admin || self.0.name == owner
    }

    /// As whom it shows tokens for a sandbox of this owner.
    fn holder(&self, owner: &str) -> Holder {
        match self.0.name == owner {
            true => Holder::Owner,
            false => Holder::Key(self.0.sha256),
        }
    }

    /// The name under which its sandboxes are kept.
    pub fn owner(&self) -> &str {
        &self.0.name
    }
}

/// Its paths, in the versions that the SDKs use and have used.
pub(super) fn routes() -> Router<Arc<E2b>> {
    Router::new()
        .route("/sandboxes", get(list::running).post(create))
        .route("/v2/sandboxes", get(list::page).post(create))
        .route("/sandboxes/{id}", get(show).delete(kill))
        .route("/sandboxes/{id}/connect", post(connect))
        .route("/v2/sandboxes/{id}/connect", post(connect))
        .route("/sandboxes/{id}/resume", post(connect))
        .route("/sandboxes/{id}/pause", post(pause))
        .route("/sandboxes/{id}/timeout", post(set_timeout))
        .route("/sandboxes/{id}/network", put(network::update))
        .route("/sandboxes/{id}/refreshes", post(refresh))
        .route("/sandboxes/{id}/fork", post(fork))
        .merge(snapshots::routes())
        .merge(templates::routes())
        .merge(metrics::routes())
        .merge(volumes::routes())
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
            "the API key is missing or unknown; set E2B_API_KEY to one that `thaw key create` has \
             made, or that e2b.toml of the node has the hash of",
        );
        return refused(request.into_body(), problem.into_response()).await;
    };
    if let Err(wait) = e2b.rates.count(key, Instant::now()) {
        return refused(request.into_body(), too_often(wait)).await;
    }
    if let Err(problem) = key.check(request.method()) {
        return refused(request.into_body(), problem.into_response()).await;
    }
    request.extensions_mut().insert(Client(key.clone()));
    next.run(request).await
}

/// The answer to whoever has used up the allowance of requests.
fn too_often(wait: Duration) -> Response {
    let seconds = wait.as_secs() + u64::from(wait.subsec_nanos() > 0);
    let problem = Problem::new(
        Kind::Exhausted,
        format!("this key has made as many requests as its rate allows; wait {seconds} s"),
    );
    let mut answer = problem.into_response();
    answer.headers_mut().insert(RETRY_AFTER, HeaderValue::from(seconds));
    answer
}

/// A body as JSON; none is an empty object.
pub(super) fn parse<T: DeserializeOwned>(body: &[u8]) -> Result<T, Problem> {
    let body = if body.is_empty() { b"{}" } else { body };
    from_json(body)
}

pub(super) fn answer(status: StatusCode, outcome: Result<Value, Problem>) -> Response {
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
    network: Option<NetworkRequest>,
    mcp: Option<Value>,
    iam: Option<Value>,
    volume_mounts: Option<Vec<volumes::Mount>>,
}

#[derive(Deserialize)]
struct AutoResume {
    enabled: bool,
}

impl CreateRequest {
    /// Refuses what would be left out silently otherwise.
    fn check(&self, headers: &HeaderMap) -> Result<(), Problem> {
        let lacks = [
            (self.mcp.is_some(), "`mcp`: there is no MCP gateway"),
            (self.iam.is_some(), "`iam`: sandboxes have no identities"),
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
    body: Bytes,
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
        let network = request.network.unwrap_or_default();
        let asked = network.egress(request.allow_internet_access)?;
        let shown_network = network.asked(&asked.headers, request.allow_internet_access);
        let egress = EgressWish::Within { most: self.settings.now().most_egress(), asked };
        let volumes = self.mounts(client, request.volume_mounts.unwrap_or_default())?;
        let origin = self.origin(client.owner(), &request.template);
        let record = Record {
            owner: client.owner().to_owned(),
            template: request.template,
            envs,
            auto_resume: request.auto_resume.is_some_and(|resume| resume.enabled),
            timeout_s: timeout(request.timeout)?,
            is_open: network.allow_public_traffic == Some(true),
            network: shown_network,
            defaults: origin.defaults,
            limits: origin.limits,
            is_being_made: true,
        };
        let wanted = Wanted {
            id: String::new(),
            snapshot: origin.snapshot,
            function: origin.function,
            timeout_s: record.timeout_s,
            pauses: request.auto_pause,
            metadata: request.metadata.unwrap_or_default(),
            egress,
            limits: origin.limits,
            volumes,
            granted_volumes: self.volumes_for(client.owner()),
        };
        // Those that have ended by themselves count no more.
        self.sandboxes_of(client.owner());
        let id = self.records.insert(record.clone(), client.0.sandboxes)?;
        // The next daemon is to know whose it is, wherever this one ends. Without room on the disk it
        // does not, of which the log warns.
        let _ = self.records.written().await;
        let made = self.backend.create(Wanted { id: id.clone(), ..wanted }).await;
        match made {
            Ok(sandbox) => {
                self.records.made(&id);
                if let Some(template) = &origin.template {
                    self.templates.spawned(template);
                }
                Ok(self.brief(client, &sandbox, &record))
            }
            Err(problem) => {
                self.records.remove(&id);
                Err(problem)
            }
        }
    }

    /// The sandboxes that a client sees.
    pub(super) fn seen_by(&self, client: &Client) -> Vec<Sandbox> {
        match client.0.role {
            Role::Admin => self.present(self.records.all()),
            Role::User | Role::ReadOnly => self.sandboxes_of(client.owner()),
        }
    }

    /// A sandbox of a client.
    pub(super) fn own(&self, client: &Client, id: &str) -> Result<(Sandbox, Record), Problem> {
        let record = self.records.get(id).filter(|record| client.sees(&record.owner));
        let found = record.and_then(|record| Some((self.backend.find(id)?, record)));
        found.ok_or_else(|| Problem::no_sandbox(id))
    }

    /// What whoever makes a sandbox, or connects to it, is told.
    fn brief(&self, client: &Client, sandbox: &Sandbox, record: &Record) -> Value {
        let holder = client.holder(&record.owner);
        let traffic_token =
            (!record.is_open).then(|| self.records.traffic_token(&sandbox.id, holder));
        json!({
            "templateID": record.template,
            "sandboxID": sandbox.id,
            "clientID": "thaw",
            "envdVersion": ENVD_VERSION,
            "envdAccessToken": self.records.token(&sandbox.id, holder),
            "trafficAccessToken": traffic_token,
            "domain": self.settings.now().domain,
        })
    }

    /// A sandbox in a list.
    pub(super) fn listed(&self, sandbox: &Sandbox) -> Value {
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
            "volumeMounts": self.shown_mounts(&sandbox.volumes),
        })
    }
}

pub(super) fn time_text(ms: u64) -> String {
    humantime::format_rfc3339_millis(UNIX_EPOCH + Duration::from_millis(ms)).to_string()
}

async fn show((State(e2b), Extension(client), Path(id)): Asked<Path<String>>) -> Response {
    let shown = e2b.own(&client, &id).map(|(sandbox, record)| {
        let mut shown = e2b.listed(&sandbox);
        if client.0.role != Role::ReadOnly {
            let holder = client.holder(&record.owner);
            shown["envdAccessToken"] = json!(e2b.records.token(&id, holder));
        }
        shown["domain"] = json!(e2b.settings.now().domain);
        let on_timeout = if sandbox.pauses { "pause" } else { "kill" };
        record.network.show_in(&mut shown, record.is_open);
        shown["lifecycle"] = json!({"autoResume": record.auto_resume, "onTimeout": on_timeout});
        shown
    });
    answer(StatusCode::OK, shown)
}

async fn kill((State(e2b), Extension(client), Path(id)): Asked<Path<String>>) -> Response {
    let killed = e2b.own(&client, &id).and_then(|_| e2b.backend.kill(&id));
    if killed.is_ok() {
        e2b.records.remove(&id);
        e2b.watchers.forget(&id);
    }
    answer(StatusCode::NO_CONTENT, killed.map(|()| Value::Null))
}

#[derive(Deserialize)]
struct PauseRequest {
    memory: Option<bool>,
}

async fn pause((State(e2b), Extension(client), Path(id), body): Posted) -> Response {
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
async fn connect((State(e2b), Extension(client), Path(id), body): Posted) -> Response {
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
                e2b.extend(&id, deadline, seconds)?;
                StatusCode::OK
            }
        };
        Ok((status, Json(e2b.brief(&client, &sandbox, &record))))
    };
    to_its_end(connected).await.into_response()
}

pub(super) fn now_ms() -> u64 {
    let since_epoch = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since_epoch.as_millis()).unwrap_or(u64::MAX)
}

#[derive(Deserialize)]
struct TimeoutRequest {
    #[serde(alias = "duration")]
    timeout: Option<u64>,
}

async fn set_timeout((State(e2b), Extension(client), Path(id), body): Posted) -> Response {
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
async fn refresh((State(e2b), Extension(client), Path(id), body): Posted) -> Response {
    let changed = || {
        let request: TimeoutRequest = parse(&body)?;
        let deadline = running(&e2b, &client, &id)?;
        e2b.extend(&id, deadline, timeout(request.timeout)?).map(|()| Value::Null)
    };
    answer(StatusCode::NO_CONTENT, changed())
}

impl E2b {
    /// Gives a sandbox so many seconds from now, if that is later than its deadline.
    fn extend(&self, id: &str, deadline_ms: u64, seconds: u64) -> Result<(), Problem> {
        match deadline_ms < now_ms() + seconds * 1000 {
            true => self.backend.set_timeout(id, seconds),
            false => Ok(()),
        }
    }
}

/// When the time of a sandbox comes, which runs.
pub(super) fn running(e2b: &E2b, client: &Client, id: &str) -> Result<u64, Problem> {
    let (sandbox, _) = e2b.own(client, id)?;
    sandbox.deadline_ms.ok_or_else(|| Problem::no_sandbox(id))
}

#[derive(Deserialize)]
struct ForkRequest {
    timeout: Option<u64>,
    count: Option<u32>,
}

async fn fork((State(e2b), Extension(client), Path(id), body): Posted) -> Response {
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
            let _ = self.records.written().await;
            let sandbox = self.backend.fork(id, &copy).await?;
            self.backend.set_timeout(&copy, seconds)?;
            self.records.made(&copy);
            Ok(self.brief(client, &sandbox, &record))
        };
        let forked = forked.await;
        if forked.is_err() {
            self.records.remove(&copy);
        }
        forked
    }
}
