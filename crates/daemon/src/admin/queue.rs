//! Requests about queues and schedules.

use super::Admin;
use super::extract::{Path, Query};
use super::routes::{problem, unknown_function};
use axum::extract::State;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Json, Router};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use serde::Deserialize;
use serde_json::json;
use std::sync::Arc;
use thaw_node::triggers::{InvocationId, NotQueued, Triggers, Unavailable, Which};

pub(super) fn routes() -> Router<Admin> {
    Router::new()
        .route("/queues", get(queues))
        .route("/schedules", get(all_schedules))
        .route("/functions/{name}/queue", get(list))
        .route("/functions/{name}/queue/{id}", get(show))
        .route("/functions/{name}/queue/retry", post(retry))
        .route("/functions/{name}/queue/purge", post(purge))
        .route("/functions/{name}/schedules", get(schedules))
}

#[derive(Deserialize)]
struct WhichQuery {
    /// One invocation.
    id: Option<InvocationId>,
    /// `dead` or `queued`; default: `dead`.
    state: Option<String>,
}

impl WhichQuery {
    fn which(&self) -> Result<Which, String> {
        match (self.id, self.state.as_deref()) {
            (Some(id), None) => Ok(Which::One(id)),
            (None, None | Some("dead")) => Ok(Which::Dead),
            (None, Some("queued")) => Ok(Which::Queued),
            (Some(_), Some(_)) => Err("give `id` or `state`, not both".to_owned()),
            (None, Some(_)) => Err("`state` is `dead` or `queued`".to_owned()),
        }
    }
}

/// The node's triggers, or the answer that there are none.
fn triggers(admin: &Admin) -> Result<Arc<Triggers>, Box<Response>> {
    let stopping = || Unavailable("the node is stopping".to_owned());
    admin.triggers.upgrade().ok_or_else(|| Box::new(unavailable(&stopping())))
}

fn unavailable(why: &Unavailable) -> Response {
    problem(StatusCode::SERVICE_UNAVAILABLE, "queue_unavailable", why)
}

fn unknown_invocation(id: &str) -> Response {
    let reason = format!("there is no invocation {id}: it is done, or `thaw queue list` shows it");
    problem(StatusCode::NOT_FOUND, "unknown_invocation", reason)
}

/// Answers with JSON, or says why the queue cannot be used.
fn json_of(found: Result<impl serde::Serialize, Unavailable>) -> Response {
    match found {
        Ok(found) => Json(found).into_response(),
        Err(why) => unavailable(&why),
    }
}

async fn queues(State(admin): State<Admin>) -> Response {
    match triggers(&admin) {
        Ok(triggers) => json_of(triggers.queues().await),
        Err(answer) => *answer,
    }
}

async fn list(State(admin): State<Admin>, Path(name): Path<String>) -> Response {
    match triggers(&admin) {
        Ok(triggers) => match triggers.list(name.clone()).await {
            // What is queued of a function that has been removed is shown.
            Ok(all) if all.is_empty() && admin.services.route(&name).is_none() => {
                unknown_function(&name)
            }
            found => json_of(found),
        },
        Err(answer) => *answer,
    }
}

async fn show(State(admin): State<Admin>, Path((name, id)): Path<(String, String)>) -> Response {
    let triggers = match triggers(&admin) {
        Ok(triggers) => triggers,
        Err(answer) => return *answer,
    };
    let Ok(parsed) = id.parse::<InvocationId>() else { return unknown_invocation(&id) };
    match triggers.show(name, parsed).await {
        Ok(Some((info, request))) => {
            let body = STANDARD.encode(&request.body);
            Json(json!({"invocation": info, "request": request, "body_base64": body}))
                .into_response()
        }
        Ok(None) => unknown_invocation(&id),
        Err(why) => unavailable(&why),
    }
}

async fn retry(
    State(admin): State<Admin>,
    Path(name): Path<String>,
    Query(query): Query<WhichQuery>,
) -> Response {
    let (triggers, which) = match (triggers(&admin), query.which()) {
        (Err(answer), _) => return *answer,
        (_, Err(why)) => return problem(StatusCode::BAD_REQUEST, "bad_request", why),
        (_, Ok(Which::Queued)) => {
            let why = "what is queued is attempted by itself; only dead letters are retried";
            return problem(StatusCode::BAD_REQUEST, "bad_request", why);
        }
        (Ok(triggers), Ok(which)) => (triggers, which),
    };
    if admin.services.route(&name).is_none() {
        return unknown_function(&name);
    }
    match triggers.retry(name, which).await {
        Ok(0) if matches!(which, Which::One(_)) => {
            unknown_invocation(&query.id.map(|id| id.to_string()).unwrap_or_default())
        }
        Ok(count) => Json(json!({"retried": count})).into_response(),
        Err(NotQueued::Unavailable(why)) => unavailable(&why),
        Err(why) => problem(StatusCode::CONFLICT, "not_queued", why),
    }
}

async fn purge(
    State(admin): State<Admin>,
    Path(name): Path<String>,
    Query(query): Query<WhichQuery>,
) -> Response {
    let (triggers, which) = match (triggers(&admin), query.which()) {
        (Err(answer), _) => return *answer,
        (_, Err(why)) => return problem(StatusCode::BAD_REQUEST, "bad_request", why),
        (Ok(triggers), Ok(which)) => (triggers, which),
    };
    match triggers.purge(name.clone(), which).await {
        Ok(0) if matches!(which, Which::One(_)) => {
            unknown_invocation(&query.id.map(|id| id.to_string()).unwrap_or_default())
        }
        Ok(0) if admin.services.route(&name).is_none() => unknown_function(&name),
        Ok(count) => Json(json!({"removed": count})).into_response(),
        Err(why) => unavailable(&why),
    }
}

async fn all_schedules(State(admin): State<Admin>) -> Response {
    match triggers(&admin) {
        Ok(triggers) => json_of(triggers.schedules(None).await),
        Err(answer) => *answer,
    }
}

async fn schedules(State(admin): State<Admin>, Path(name): Path<String>) -> Response {
    if admin.services.route(&name).is_none() {
        return unknown_function(&name);
    }
    match triggers(&admin) {
        Ok(triggers) => json_of(triggers.schedules(Some(&name)).await),
        Err(answer) => *answer,
    }
}
