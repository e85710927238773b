//! Requests about sandboxes.

use super::Admin;
use super::routes::problem;
use crate::sandboxes::registry::SandboxProblem;
use crate::sandboxes::{NewSandbox, SandboxInfo};
use axum::extract::{Path, Query, State};
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Json, Router};
use serde::Deserialize;

/// Their paths.
pub(super) fn routes() -> Router<Admin> {
    Router::new()
        .route("/sandboxes", get(list).post(create))
        .route("/sandboxes/{name}", get(show).delete(kill))
        .route("/sandboxes/{name}/pause", post(pause))
        .route("/sandboxes/{name}/resume", post(resume))
        .route("/sandboxes/{name}/fork", post(fork))
        .route("/sandboxes/{name}/timeout", post(set_timeout))
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
        SandboxProblem::Refused(_) => problem(StatusCode::CONFLICT, "refused", error),
    }
}

async fn list(State(admin): State<Admin>) -> Json<Vec<SandboxInfo>> {
    Json(admin.sandboxes.list())
}

async fn create(State(admin): State<Admin>, Json(new): Json<NewSandbox>) -> Response {
    answer(admin.sandboxes.create(new).await)
}

async fn show(State(admin): State<Admin>, Path(name): Path<String>) -> Response {
    answer(admin.sandboxes.find(&name))
}

async fn kill(State(admin): State<Admin>, Path(name): Path<String>) -> Response {
    answer(admin.sandboxes.kill(&name))
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
    answer(admin.sandboxes.fork(&name, &query.name).await)
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
    answer(changed.and_then(|()| admin.sandboxes.find(&name)))
}
