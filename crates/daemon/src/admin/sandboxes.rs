//! Requests about sandboxes.

use super::Admin;
use super::extract::{JsonBody, Path, Query};
use super::files;
use super::routes::problem;
use axum::extract::{Request, State};
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post, put};
use axum::{Json, Router};
use hyper_util::rt::TokioIo;
use serde::Deserialize;
use thaw_node::catalog::LoadError;
use thaw_node::remote::listeners::listeners;
use thaw_node::remote::ports::{PORT_PROTOCOL, PortProblem};
use thaw_node::remote::{
    EgressInfo, LimitsChange, LimitsInfo, SandboxEgress, SandboxInject, look_at_egress_bytes,
};
use thaw_node::sandboxes::registry::SandboxProblem;
use thaw_node::sandboxes::{NewSandbox, SandboxInfo};
use thaw_store::{InvalidName, Name};
use tokio::io::copy_bidirectional;

/// Their paths.
pub(super) fn routes() -> Router<Admin> {
    Router::new()
        .route("/sandboxes", get(list).post(create))
        .route("/sandboxes/{name}", get(show).delete(kill))
        .route("/sandboxes/{name}/pause", post(pause))
        .route("/sandboxes/{name}/resume", post(resume))
        .route("/sandboxes/{name}/fork", post(fork))
        .route("/sandboxes/{name}/timeout", post(set_timeout))
        .route("/sandboxes/{name}/limits", get(limits).put(set_limits))
        .route("/sandboxes/{name}/egress", get(egress).put(set_egress))
        .route("/sandboxes/{name}/inject", put(set_inject))
        .route("/sandboxes/{name}/ports", get(ports))
        .route("/sandboxes/{name}/ports/{port}", post(connect_port))
}

fn answer(outcome: Result<SandboxInfo, SandboxProblem>) -> Response {
    match outcome {
        Ok(info) => Json(info).into_response(),
        Err(error) => refusal(&error),
    }
}

fn refusal(error: &SandboxProblem) -> Response {
    match error {
        SandboxProblem::Wrong(_) => problem(StatusCode::BAD_REQUEST, "bad_sandbox", error),
        SandboxProblem::Unknown(_) => problem(StatusCode::NOT_FOUND, "unknown_sandbox", error),
        SandboxProblem::Missing(_) => problem(StatusCode::BAD_REQUEST, "not_trusted", error),
        SandboxProblem::Refused(_) => problem(StatusCode::CONFLICT, "refused", error),
    }
}

async fn list(State(admin): State<Admin>) -> Json<Vec<SandboxInfo>> {
    look_at_egress_bytes().await;
    Json(admin.sandboxes.list())
}

async fn create(State(admin): State<Admin>, JsonBody(new): JsonBody<NewSandbox>) -> Response {
    if let Err(error) = check_name(&new.name) {
        return refusal(&error);
    }
    let made = match new.checkpoint.clone() {
        None => admin.sandboxes.create(new).await,
        Some(checkpoint) => create_of(&admin, &checkpoint, new).await,
    };
    answer(made)
}

/// Makes a sandbox of a checkpoint. Its image is read whole, so it may take seconds.
async fn create_of(
    admin: &Admin,
    checkpoint: &str,
    new: NewSandbox,
) -> Result<SandboxInfo, SandboxProblem> {
    let wrong = |error: InvalidName| SandboxProblem::Wrong(error.to_string());
    let name = Name::new(checkpoint).map_err(wrong)?;
    let opened = admin.catalog.checkpoint_for_sandbox(name).await;
    let opened = opened.map_err(|error| SandboxProblem::Refused(why_none_of(checkpoint, error)))?;
    admin.sandboxes.create_of(new, opened).await
}

/// Why no sandbox can be made of a checkpoint.
fn why_none_of(checkpoint: &str, error: LoadError) -> String {
    match error {
        LoadError::Store(error) if error.is_not_found() => format!(
            "no checkpoint is named `{checkpoint}`; `thaw checkpoints` shows those there are"
        ),
        LoadError::Encrypted { key, .. } => format!(
            "checkpoint `{checkpoint}` is encrypted with key {key}, and sandboxes are made of plain \
             ones; `thaw restore {checkpoint} --key-file FILE` makes an instance of it"
        ),
        error => error.to_string(),
    }
}

/// Refuses a name that would be taken for the number of an instance.
fn check_name(name: &str) -> Result<(), SandboxProblem> {
    if name.is_empty() || !name.bytes().all(|byte| byte.is_ascii_digit()) {
        return Ok(());
    }
    Err(SandboxProblem::Wrong(format!(
        "a sandbox cannot be named `{name}`, which would be taken for the number of an instance; \
         put a letter into the name"
    )))
}

async fn show(State(admin): State<Admin>, Path(name): Path<String>) -> Response {
    answer(admin.sandboxes.show(&name).await)
}

fn egress_answer(outcome: Result<EgressInfo, SandboxProblem>) -> Response {
    outcome.map_or_else(|error| refusal(&error), |egress| Json(egress).into_response())
}

async fn egress(State(admin): State<Admin>, Path(name): Path<String>) -> Response {
    egress_answer(admin.sandboxes.egress(&name))
}

async fn set_egress(
    State(admin): State<Admin>,
    Path(name): Path<String>,
    JsonBody(egress): JsonBody<SandboxEgress>,
) -> Response {
    egress_answer(admin.sandboxes.set_egress(&name, &egress).await)
}

async fn set_inject(
    State(admin): State<Admin>,
    Path(name): Path<String>,
    JsonBody(inject): JsonBody<SandboxInject>,
) -> Response {
    egress_answer(admin.sandboxes.set_inject(&name, inject).await)
}

fn limits_answer(outcome: Result<LimitsInfo, SandboxProblem>) -> Response {
    outcome.map_or_else(|error| refusal(&error), |limits| Json(limits).into_response())
}

async fn limits(State(admin): State<Admin>, Path(name): Path<String>) -> Response {
    limits_answer(admin.sandboxes.limits(&name).await)
}

async fn set_limits(
    State(admin): State<Admin>,
    Path(name): Path<String>,
    JsonBody(change): JsonBody<LimitsChange>,
) -> Response {
    limits_answer(admin.sandboxes.set_limits(&name, change).await)
}

async fn kill(State(admin): State<Admin>, Path(name): Path<String>) -> Response {
    let killed = admin.sandboxes.kill(&name);
    // The next daemon is to know it, too.
    admin.sandboxes.written().await;
    answer(killed)
}

async fn pause(State(admin): State<Admin>, Path(name): Path<String>) -> Response {
    answer(admin.sandboxes.pause(&name).await)
}

async fn resume(State(admin): State<Admin>, Path(name): Path<String>) -> Response {
    answer(admin.sandboxes.resume(&name).await)
}

#[derive(Deserialize)]
struct ForkQuery {
    #[serde(default)]
    name: String,
}

async fn fork(
    State(admin): State<Admin>,
    Path(name): Path<String>,
    Query(query): Query<ForkQuery>,
) -> Response {
    if let Err(error) = check_name(&query.name) {
        return refusal(&error);
    }
    answer(admin.sandboxes.fork(&name, &query.name).await)
}

/// Connects to a port on which something in the sandbox listens. With `Connection: Upgrade` and
/// `Upgrade: thaw-port` the connection carries the port's bytes from then on.
/// It wakes for that.
async fn ports(State(admin): State<Admin>, Path(name): Path<String>) -> Response {
    let info = match admin.sandboxes.find(&name) {
        Ok(info) => info,
        Err(error) => return refusal(&error),
    };
    match files::session(&admin, info.instance, "").await {
        Ok(mut session) => files::answer(listeners(&mut session).await),
        Err(refused) => *refused,
    }
}

async fn connect_port(
    State(admin): State<Admin>,
    Path((name, port)): Path<(String, u16)>,
    mut request: Request,
) -> Response {
    let wants = request.headers().get(header::UPGRADE).is_some_and(|value| value == PORT_PROTOCOL);
    if !wants {
        let reason = format!("ask with `Connection: Upgrade` and `Upgrade: {PORT_PROTOCOL}`");
        return problem(StatusCode::UPGRADE_REQUIRED, "no_upgrade", reason);
    }
    let info = match admin.sandboxes.find(&name) {
        Ok(info) => info,
        Err(error) => return refusal(&error),
    };
    let Some(service) = admin.services.service_of(info.instance) else {
        return refusal(&SandboxProblem::Unknown(name));
    };
    admin.sandboxes.used(info.instance);
    let mut stream = match service.port(info.instance, port).await {
        Ok(stream) => stream,
        Err(error) => {
            let status = match error {
                PortProblem::Full(_) => StatusCode::TOO_MANY_REQUESTS,
                PortProblem::Closed(_) | PortProblem::Refused(_) => StatusCode::CONFLICT,
            };
            return problem(status, "no_port", error);
        }
    };
    let upgrade = hyper::upgrade::on(&mut request);
    tokio::spawn(async move {
        if let Ok(client) = upgrade.await {
            // A side that breaks off needs no more.
            let _ = copy_bidirectional(&mut TokioIo::new(client), &mut stream).await;
        }
        admin.sandboxes.used(info.instance);
    });
    let mut response = StatusCode::SWITCHING_PROTOCOLS.into_response();
    let headers = response.headers_mut();
    headers.insert(header::CONNECTION, HeaderValue::from_static("upgrade"));
    headers.insert(header::UPGRADE, HeaderValue::from_static(PORT_PROTOCOL));
    response
}

#[derive(Deserialize)]
struct TimeoutQuery {
    seconds: Option<u64>,
}

async fn set_timeout(
    State(admin): State<Admin>,
    Path(name): Path<String>,
    Query(query): Query<TimeoutQuery>,
) -> Response {
    let changed = admin.sandboxes.set_timeout(&name, query.seconds);
    admin.sandboxes.written().await;
    answer(changed.and_then(|()| admin.sandboxes.find(&name)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_is_not_a_number() {
        for name in ["", "box", "8a", "a8", "sb-83"] {
            assert!(check_name(name).is_ok(), "{name}");
        }
        let why = check_name("83").unwrap_err().to_string();
        assert!(why.contains("number of an instance"), "{why}");
    }
}
