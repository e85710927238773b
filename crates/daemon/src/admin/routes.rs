//! Requests to the admin API.

use super::Admin;
use super::access::{Denied, RemoteAccess, check_origin};
use super::extract::{Path, Query};
use super::invoke::invoke;
use super::owner_key::owner_key;
use super::types::{
    CheckpointInfo, FellAsleep, Frozen, FunctionDetail, FunctionInfo, Hibernated, Problem,
    SnapshotMade, Woken, summarize_images,
};
use axum::body::Body;
use axum::extract::{Request, State};
use axum::http::{HeaderValue, StatusCode, header};
use axum::middleware::{self, Next};
use axum::response::{IntoResponse, Response};
use axum::routing::{delete, get, post};
use axum::{Json, Router};
use serde::Deserialize;
use serde_json::json;
use std::collections::BTreeMap;
use std::convert::Infallible;
use std::num::NonZeroU32;
use std::sync::Arc;
use thaw_home::clock::wall_ms;
use thaw_home::tenants::TenantName;
use thaw_home::volumes::VolumeStore;
use thaw_node::catalog::OpenedCheckpoint;
use thaw_node::logs::{Follower, Line};
use thaw_node::service::{InstanceInfo, Service, VolumeFiles};
use thaw_node::tenants::TenantReport;
use thaw_node::to_its_end::to_its_end;
use thaw_node::usage::{UsageReport, measure_memory, memory_by_state};
use thaw_sandbox::Awake;
use thaw_store::Name;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;

/// The API as a service; with `access`, clients must show what it wants.
pub(super) fn router(admin: Admin, access: Option<Arc<RemoteAccess>>) -> Router {
    Router::new()
        .route("/healthz", get(health))
        .route("/metrics", get(metrics))
        .route("/functions", get(functions))
        .route("/functions/{name}", get(function))
        .route("/functions/{name}/logs", get(logs))
        .route("/functions/{name}/invoke", post(invoke))
        .route("/functions/{name}/freeze", post(freeze))
        .route("/functions/{name}/hibernate", post(hibernate))
        .route("/functions/{name}/sleep", post(put_to_sleep))
        .route("/functions/{name}/wake", post(wake))
        .route("/instances", get(instances))
        .route("/instances/{id}/fork", post(fork))
        .route("/instances/{id}/checkpoint", post(checkpoint))
        .route("/checkpoints", get(checkpoints))
        .route("/checkpoints/{name}", delete(remove_checkpoint))
        .route("/checkpoints/{name}/restore", post(restore))
        .route("/volumes/{name}/snapshots", post(snapshot_volume))
        .route("/df", get(usage))
        .route("/tenants", get(tenants))
        .route("/images", get(images))
        .route("/reload", post(reload))
        .merge(super::stats::routes())
        .merge(super::versions::routes())
        .merge(super::queue::routes())
        .merge(super::pulls::routes())
        .merge(super::exec::routes())
        .merge(super::files::routes())
        .merge(super::trees::routes())
        .merge(super::sandboxes::routes())
        .method_not_allowed_fallback(|| async {
            problem(
                StatusCode::METHOD_NOT_ALLOWED,
                "wrong_method",
                "the path takes other methods; the header `Allow` lists them",
            )
        })
        .fallback(|| async {
            problem(
                StatusCode::NOT_FOUND,
                "unknown_path",
                "see the documentation of the admin API for its paths",
            )
        })
        .layer(middleware::from_fn_with_state(admin.clone(), super::traces::traced))
        .layer(middleware::from_fn_with_state(access, check_access))
        .with_state(admin)
}

/// Builds an error answer.
pub(super) fn problem(status: StatusCode, error: &str, reason: impl ToString) -> Response {
    let problem = Problem { error: error.to_owned(), reason: reason.to_string() };
    (status, Json(problem)).into_response()
}

pub(super) fn unknown_function(name: &str) -> Response {
    let reason = format!("no function is named `{name}`; `thaw list` shows those there are");
    problem(StatusCode::NOT_FOUND, "unknown_function", reason)
}

pub(super) fn unknown_instance(id: u64) -> Response {
    let reason = format!("there is no instance {id}; `thaw ps` lists those there are");
    problem(StatusCode::NOT_FOUND, "unknown_instance", reason)
}

/// Lets only those requests through that show what is wanted.
async fn check_access(
    State(access): State<Option<Arc<RemoteAccess>>>,
    request: Request,
    next: Next,
) -> Response {
    let checked = match access {
        Some(access) => access.check(&request),
        None => check_origin(request.headers()),
    };
    let Err(denied) = checked else { return next.run(request).await };
    let mut response = problem(denied.status(), "forbidden", denied.reason());
    if denied == Denied::Token {
        let scheme = HeaderValue::from_static("Bearer");
        response.headers_mut().insert(header::WWW_AUTHENTICATE, scheme);
    }
    response
}

async fn health(State(admin): State<Admin>) -> Response {
    if admin.shared().is_draining() {
        return problem(
            StatusCode::SERVICE_UNAVAILABLE,
            "shutting_down",
            "the node is shutting down",
        );
    }
    Json(json!({"status": "ok", "version": env!("CARGO_PKG_VERSION")})).into_response()
}

async fn metrics(State(admin): State<Admin>) -> Response {
    let text = metrics_text(&admin).await;
    let kind = "application/openmetrics-text; version=1.0.0; charset=utf-8";
    ([(header::CONTENT_TYPE, HeaderValue::from_static(kind))], text).into_response()
}

/// What the node counts, as OpenMetrics.
pub(crate) async fn metrics_text(admin: &Admin) -> String {
    let mut counts = BTreeMap::new();
    for instance in admin.services.instances() {
        let state = serde_json::to_value(instance.state).ok();
        let state = state.and_then(|value| value.as_str().map(str::to_owned)).unwrap_or_default();
        *counts.entry((instance.function.to_string(), state)).or_insert(0) += 1;
    }
    for service in admin.services.everything() {
        for (state, _) in service.launcher().standby_memory() {
            let state = (service.name().to_string(), state.name().to_owned());
            *counts.entry(state).or_insert(0) += 1;
        }
    }
    let counts: Vec<_> = counts.into_iter().map(|((f, state), count)| (f, state, count)).collect();
    admin.shared().metrics().show_memory(&memory_by_state(&admin.services).await);
    let zygotes = admin.catalog.pool().stats().ready as i64;
    // The other metrics are worth having without these.
    let tenants = report_tenants(admin).await.unwrap_or_else(|error| {
        tracing::warn!("cannot count what tenants have in the store: {error}");
        Vec::new()
    });
    admin.shared().metrics().show_tenants(&tenants);
    let services = admin.services.functions();
    let rewinds = |service: &Arc<Service>| service.launcher().standby().rewinds;
    let rewinds: Vec<_> =
        services.iter().filter_map(|service| Some((service.name(), rewinds(service)?))).collect();
    admin.shared().metrics().show_rewinds(&rewinds);
    if let Some(triggers) = admin.triggers.upgrade()
        && let Ok(queues) = triggers.queues().await
    {
        admin.shared().metrics().triggers().show(&queues, wall_ms());
    }
    admin.shared().metrics().pulls().show(&admin.shared().pulls().count());
    if let Ok(Some(bytes)) =
        tokio::task::spawn_blocking(thaw_sandbox::egress_bytes_of_functions).await
    {
        admin.shared().metrics().show_egress_bytes(&bytes);
    }
    if let Some(link) = thaw_sandbox::monitor::of_this_process() {
        admin.shared().metrics().show_monitor_refusals(link.refusals());
    }
    admin.shared().metrics().text(&counts, zygotes)
}

async fn functions(State(admin): State<Admin>) -> Json<Vec<FunctionInfo>> {
    let services = admin.services.functions();
    Json(services.iter().map(|service| FunctionInfo::new(service, &admin.catalog)).collect())
}

async fn function(State(admin): State<Admin>, Path(name): Path<String>) -> Response {
    match admin.services.route(&name) {
        Some(service) => Json(FunctionDetail::new(&service, &admin)).into_response(),
        None => unknown_function(&name),
    }
}

async fn instances(State(admin): State<Admin>) -> Json<Vec<InstanceInfo>> {
    Json(admin.services.instances())
}

async fn usage(State(admin): State<Admin>) -> Response {
    match measure_usage(&admin).await {
        Ok(report) => Json(report).into_response(),
        Err(error) => problem(StatusCode::INTERNAL_SERVER_ERROR, "store", error),
    }
}

/// What is stored and shared.
///
/// # Errors
/// One sentence: the store cannot be read.
pub(crate) async fn measure_usage(admin: &Admin) -> Result<UsageReport, String> {
    // One count at a time, also if clients go away.
    let turn = admin.counting.clone().lock_owned().await;
    let (home, store) = (admin.home.clone(), admin.catalog.store().clone());
    let on_disk = tokio::task::spawn_blocking(move || {
        let _turn = turn;
        UsageReport::of_disk(&home, &store)
    });
    let memory = measure_memory(&admin.services).await;
    match on_disk.await {
        Ok(Ok(report)) => Ok(report.with_memory(admin.shared(), &memory)),
        Ok(Err(error)) => Err(error.to_string()),
        Err(error) => Err(error.to_string()),
    }
}

async fn tenants(State(admin): State<Admin>) -> Response {
    match report_tenants(&admin).await {
        Ok(tenants) => Json(tenants).into_response(),
        Err(error) => problem(StatusCode::INTERNAL_SERVER_ERROR, "store", error),
    }
}

/// What tenants use: reads files, so it is done where that holds nobody up.
pub(crate) async fn report_tenants(admin: &Admin) -> Result<Vec<TenantReport>, String> {
    let (shared, store) = (admin.shared().clone(), admin.catalog.store().clone());
    let volumes = VolumeStore::of(admin.home.clone());
    let report = tokio::task::spawn_blocking(move || -> Result<_, String> {
        let mut tenants =
            TenantReport::all(shared.tenants(), &store).map_err(|error| error.to_string())?;
        let volumes = volumes.bytes_of_tenants().map_err(|error| error.to_string())?;
        for tenant in &mut tenants {
            let name = TenantName::of(tenant.domain.as_ref());
            tenant.volumes = volumes.get(&name).copied().unwrap_or_default();
        }
        Ok(tenants)
    });
    match report.await {
        Ok(Ok(mut tenants)) => {
            if let Some(triggers) = admin.triggers.upgrade()
                && let Ok(queues) = triggers.bytes_of_tenants().await
            {
                for tenant in &mut tenants {
                    let domain = tenant.domain.as_ref().map(|domain| domain.name().to_string());
                    tenant.queue = queues.get(&domain).copied().unwrap_or(0);
                }
            }
            Ok(tenants)
        }
        Ok(Err(error)) => Err(error),
        Err(error) => Err(error.to_string()),
    }
}

async fn images(State(admin): State<Admin>) -> Response {
    let store = admin.catalog.store().clone();
    match tokio::task::spawn_blocking(move || summarize_images(&store)).await {
        Ok(Ok(images)) => Json(images).into_response(),
        Ok(Err(error)) => problem(StatusCode::INTERNAL_SERVER_ERROR, "store", error),
        Err(error) => problem(StatusCode::INTERNAL_SERVER_ERROR, "internal", error),
    }
}

async fn reload(State(admin): State<Admin>) -> Response {
    let catalog = admin.catalog.clone();
    match tokio::task::spawn_blocking(move || catalog.reload()).await {
        Ok(Ok(mut report)) => {
            report.unreachable = (admin.on_reload)();
            report.gateway = report.gateway.or_else(|| admin.shared().edge().deaf());
            Json(report).into_response()
        }
        Ok(Err(error)) => problem(StatusCode::INTERNAL_SERVER_ERROR, "store", error),
        Err(error) => problem(StatusCode::INTERNAL_SERVER_ERROR, "internal", error),
    }
}

/// Which instance is meant.
#[derive(Deserialize)]
struct InstanceQuery {
    instance: Option<u64>,
}

/// The version of a function that is meant: the one with the instance, or the active one.
fn version_with(admin: &Admin, name: &str, instance: Option<u64>) -> Option<Arc<Service>> {
    let active = admin.services.route(name)?;
    let named = instance.and_then(|id| admin.services.service_of(id));
    Some(named.filter(|service| service.name() == active.name()).unwrap_or(active))
}

async fn hibernate(
    State(admin): State<Admin>,
    Path(name): Path<String>,
    Query(query): Query<InstanceQuery>,
) -> Response {
    let service = version_with(&admin, &name, query.instance);
    let Some(service) = service else { return unknown_function(&name) };
    match service.hibernate(query.instance).await {
        Ok((instance, hibernated)) => {
            Json(Hibernated { function: service.name().clone(), instance, hibernated })
                .into_response()
        }
        Err(reason) => problem(StatusCode::CONFLICT, "not_hibernated", reason),
    }
}

async fn put_to_sleep(
    State(admin): State<Admin>,
    Path(name): Path<String>,
    Query(query): Query<InstanceQuery>,
) -> Response {
    let service = version_with(&admin, &name, query.instance);
    let Some(service) = service else { return unknown_function(&name) };
    match service.put_to_sleep(query.instance).await {
        Ok((instance, asleep)) => {
            Json(FellAsleep { function: service.name().clone(), instance, asleep }).into_response()
        }
        Err(reason) => problem(StatusCode::CONFLICT, "not_asleep", reason),
    }
}

/// Has an instance run if it is asleep: nothing else can be asked of one that is.
async fn awake(service: &Arc<Service>, id: u64) -> Result<(), Response> {
    let woken = service.wake_if_asleep(Some(id)).await;
    woken.map(drop).map_err(|reason| problem(StatusCode::CONFLICT, "not_woken", reason))
}

async fn wake(
    State(admin): State<Admin>,
    Path(name): Path<String>,
    Query(query): Query<InstanceQuery>,
) -> Response {
    let service = version_with(&admin, &name, query.instance);
    let Some(service) = service else { return unknown_function(&name) };
    let is_none_hibernated = !service.has_hibernated();
    if query.instance.is_some() || is_none_hibernated {
        match service.wake_if_asleep(query.instance).await {
            Ok(None) => {}
            Ok(Some((instance, took))) => {
                admin.sandboxes.wanted(instance);
                let wake_us = u64::try_from(took.as_micros()).ok();
                return Json(Woken { function: service.name().clone(), instance, wake_us })
                    .into_response();
            }
            Err(reason) => return problem(StatusCode::CONFLICT, "not_woken", reason),
        }
    }
    match service.wake(query.instance).await {
        Ok((instance, awake)) => {
            admin.sandboxes.wanted(instance);
            let took = |awake: Awake| awake.ready_ns.saturating_sub(awake.woken_ns) / 1000;
            let (function, wake_us) = (service.name().clone(), awake.map(took));
            Json(Woken { function, instance, wake_us }).into_response()
        }
        Err(reason) => problem(StatusCode::CONFLICT, "not_woken", reason),
    }
}

async fn freeze(
    State(admin): State<Admin>,
    Path(name): Path<String>,
    Query(query): Query<InstanceQuery>,
) -> Response {
    // An instance that is to be frozen gets no requests any more.
    to_its_end(async move { freeze_now(admin, name, query).await }).await
}

async fn freeze_now(admin: Admin, name: String, query: InstanceQuery) -> Response {
    let Some(service) = admin.services.route(&name) else { return unknown_function(&name) };
    if let Some(id) = query.instance
        && let Err(refused) = awake(&service, id).await
    {
        return refused;
    }
    let (instance, frozen) = match service.freeze(query.instance).await {
        Ok(done) => done,
        Err(reason) => return problem(StatusCode::CONFLICT, "not_frozen", reason),
    };
    let function = service.name().clone();
    drop(service);
    // From now on copies are of the new image.
    match reload(State(admin)).await {
        response if !response.status().is_success() => response,
        _ => Json(Frozen { function, instance, frozen }).into_response(),
    }
}

#[derive(Deserialize)]
struct ForkQuery {
    #[serde(default = "one")]
    copies: NonZeroU32,
}

fn one() -> NonZeroU32 {
    NonZeroU32::MIN
}

async fn fork(
    State(admin): State<Admin>,
    Path(id): Path<u64>,
    Query(query): Query<ForkQuery>,
) -> Response {
    let Some(service) = admin.services.service_of(id) else { return unknown_instance(id) };
    if let Err(refused) = awake(&service, id).await {
        return refused;
    }
    match service.fork(id, query.copies).await {
        Ok(forked) => Json(forked).into_response(),
        Err(reason) => problem(StatusCode::CONFLICT, "not_forked", reason),
    }
}

#[derive(Deserialize)]
struct CheckpointQuery {
    name: String,
    #[serde(default)]
    volumes: bool,
}

#[derive(Deserialize)]
struct RestoreQuery {
    #[serde(default = "one")]
    copies: NonZeroU32,
    #[serde(default)]
    volumes: bool,
}

async fn checkpoint(
    State(admin): State<Admin>,
    Path(id): Path<u64>,
    Query(query): Query<CheckpointQuery>,
    body: Body,
) -> Response {
    let name = match Name::new(&query.name) {
        Ok(name) => name,
        Err(error) => return problem(StatusCode::BAD_REQUEST, "bad_name", error),
    };
    let key = match owner_key(body).await {
        Ok(key) => key,
        Err(reason) => return problem(StatusCode::BAD_REQUEST, "bad_key", reason),
    };
    let Some(service) = admin.services.service_of(id) else { return unknown_instance(id) };
    if let Err(refused) = awake(&service, id).await {
        return refused;
    }
    let files = if query.volumes { VolumeFiles::Go } else { VolumeFiles::Stay };
    let wanted = name.clone();
    match service.checkpoint(id, name, key, files).await {
        Ok(taken) => {
            // One of that name may have been replaced that had volumes.
            tidy_volumes(&admin, &wanted).await;
            Json(taken).into_response()
        }
        Err(reason) => problem(StatusCode::CONFLICT, "no_checkpoint", reason),
    }
}

async fn checkpoints(State(admin): State<Admin>) -> Response {
    let store = admin.catalog.store().clone();
    match tokio::task::spawn_blocking(move || CheckpointInfo::all(&store)).await {
        Ok(Ok(checkpoints)) => Json(checkpoints).into_response(),
        Ok(Err(error)) => problem(StatusCode::INTERNAL_SERVER_ERROR, "store", error),
        Err(error) => problem(StatusCode::INTERNAL_SERVER_ERROR, "internal", error),
    }
}

async fn restore(
    State(admin): State<Admin>,
    Path(name): Path<String>,
    Query(query): Query<RestoreQuery>,
    body: Body,
) -> Response {
    let name = match Name::new(&name) {
        Ok(name) => name,
        Err(error) => return problem(StatusCode::BAD_REQUEST, "bad_name", error),
    };
    let key = match owner_key(body).await {
        Ok(key) => key,
        Err(reason) => return problem(StatusCode::BAD_REQUEST, "bad_key", reason),
    };
    let snapshots = match query.volumes {
        false => Vec::new(),
        true => match admin.catalog.volumes_of_checkpoint(&name).await {
            Ok(snapshots) => snapshots,
            Err(error) => return problem(StatusCode::CONFLICT, "not_restored", error),
        },
    };
    let opened = match admin.catalog.checkpoint(name, key).await {
        Ok(opened) => opened,
        Err(error) => return problem(StatusCode::CONFLICT, "not_restored", error),
    };
    let OpenedCheckpoint { service, launcher, volumes } = opened;
    match service.restore((launcher, volumes), query.copies, snapshots).await {
        Ok(restored) => Json(restored).into_response(),
        Err(reason) => problem(StatusCode::CONFLICT, "not_restored", reason),
    }
}

async fn remove_checkpoint(State(admin): State<Admin>, Path(name): Path<String>) -> Response {
    let name = match Name::new(&name) {
        Ok(name) => name,
        Err(error) => return problem(StatusCode::BAD_REQUEST, "bad_name", error),
    };
    let (store, wanted) = (admin.catalog.store().clone(), name.clone());
    match tokio::task::spawn_blocking(move || store.remove_checkpoint(&name)).await {
        Ok(Ok(())) => {
            admin.catalog.close_checkpoint(&wanted);
            tidy_volumes(&admin, &wanted).await;
            StatusCode::NO_CONTENT.into_response()
        }
        Ok(Err(error)) if error.is_not_found() => {
            problem(StatusCode::NOT_FOUND, "unknown_checkpoint", error)
        }
        Ok(Err(error)) => problem(StatusCode::CONFLICT, "not_removed", error),
        Err(error) => problem(StatusCode::INTERNAL_SERVER_ERROR, "internal", error),
    }
}

/// Removes the snapshots of volumes that belonged to a checkpoint which is not there any more.
async fn tidy_volumes(admin: &Admin, of: &Name) {
    let (volumes, store) = (VolumeStore::of(admin.home.clone()), admin.catalog.store().clone());
    let swept = tokio::task::spawn_blocking(move || volumes.sweep(&store)).await;
    if let Ok(Err(error)) = swept {
        // `thaw gc` tries again.
        tracing::warn!("snapshots of checkpoint `{of}` are there still: {error}");
    }
}

#[derive(Deserialize)]
struct SnapshotQuery {
    label: String,
}

/// Makes a snapshot of a volume while its users rest.
async fn snapshot_volume(
    State(admin): State<Admin>,
    Path(name): Path<String>,
    Query(query): Query<SnapshotQuery>,
) -> Response {
    let (volume, label) = match (Name::new(&name), Name::new(&query.label)) {
        (Ok(volume), Ok(label)) => (volume, label),
        (Err(error), _) | (_, Err(error)) => {
            return problem(StatusCode::BAD_REQUEST, "bad_name", error);
        }
    };
    match admin.services.snapshot_volume(volume, label).await {
        Ok(copied) => Json(SnapshotMade::from(copied)).into_response(),
        Err(error) => problem(StatusCode::CONFLICT, "no_snapshot", error),
    }
}

#[derive(Deserialize)]
struct LogQuery {
    #[serde(default)]
    follow: bool,
    /// Only what this instance printed.
    instance: Option<u64>,
}

async fn logs(
    State(admin): State<Admin>,
    Path(name): Path<String>,
    Query(query): Query<LogQuery>,
) -> Response {
    let Some(service) = admin.services.route(&name) else { return unknown_function(&name) };
    let log = admin.catalog.log(service.name());
    let kind = [(header::CONTENT_TYPE, HeaderValue::from_static("application/x-ndjson"))];
    if !query.follow {
        return (kind, json_lines(&log.recent(), query.instance)).into_response();
    }
    (kind, Body::from_stream(follow(log.follow(), query.instance))).into_response()
}

/// Sends lines as they come and as fast as the client takes them.
fn follow(
    mut follower: Follower,
    instance: Option<u64>,
) -> ReceiverStream<Result<Vec<u8>, Infallible>> {
    let (sender, receiver) = mpsc::channel(1);
    tokio::spawn(async move {
        loop {
            tokio::select! {
                lines = follower.next() => {
                    let json = json_lines(&lines, instance);
                    if !json.is_empty() && sender.send(Ok(json)).await.is_err() {
                        return;
                    }
                }
                () = sender.closed() => return,
            }
        }
    });
    ReceiverStream::new(receiver)
}

/// Lines as JSON: all, or those of one instance.
fn json_lines(lines: &[Arc<Line>], instance: Option<u64>) -> Vec<u8> {
    let is_wanted = |line: &&Arc<Line>| line.is_of(instance);
    lines.iter().filter(is_wanted).flat_map(|line| line.to_json()).collect()
}
