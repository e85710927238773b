//! Requests about pulls.

use super::Admin;
use super::extract::Path;
use super::routes::problem;
use axum::body::Bytes;
use axum::extract::State;
use axum::extract::rejection::BytesRejection;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use axum::{Json, Router};
use thaw_node::pulls::{NewPull, PullsError};

pub(super) fn routes() -> Router<Admin> {
    Router::new()
        .route("/pulls", get(all).post(begin))
        .route("/pulls/{id}", get(one).delete(cancel))
}

async fn all(State(admin): State<Admin>) -> Response {
    Json(admin.shared().pulls().all()).into_response()
}

async fn begin(State(admin): State<Admin>, body: Result<Bytes, BytesRejection>) -> Response {
    let wrong = |reason: String| problem(StatusCode::BAD_REQUEST, "wrong_pull", reason);
    let body = match body {
        Ok(body) => body,
        Err(error) => return problem(error.status(), "wrong_pull", error.body_text()),
    };
    let new: NewPull = match serde_json::from_slice(&body) {
        Ok(new) => new,
        Err(error) => return wrong(error.to_string()),
    };
    match admin.shared().pulls().begin(new) {
        Ok(pull) => Json(pull).into_response(),
        Err(PullsError::Wrong(reason)) => wrong(reason),
        Err(error @ PullsError::Full) => {
            problem(StatusCode::TOO_MANY_REQUESTS, "too_many_pulls", error)
        }
    }
}

async fn one(State(admin): State<Admin>, Path(id): Path<u64>) -> Response {
    admin.shared().pulls().of(id).map_or_else(|| unknown(id), |pull| Json(pull).into_response())
}

async fn cancel(State(admin): State<Admin>, Path(id): Path<u64>) -> Response {
    let cancelled = admin.shared().pulls().cancel(&admin.home.partial(), id);
    cancelled.map_or_else(|| unknown(id), |pull| Json(pull).into_response())
}

fn unknown(id: u64) -> Response {
    let reason = format!("there is no pull {id}; GET /pulls lists those of this daemon");
    problem(StatusCode::NOT_FOUND, "unknown_pull", reason)
}
