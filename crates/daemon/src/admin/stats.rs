//! Requests about the last hour, and the description of this API.

use super::Admin;
use super::extract::Query;
use super::openapi;
use super::routes::problem;
use axum::extract::State;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use axum::{Json, Router};
use serde::Deserialize;
use serde_json::Value;
use thaw_node::history::{SeriesView, Stats};
use thaw_node::metrics::Event;

/// Most events of an answer.
const EVENTS_MAX: usize = 512;

/// Their paths.
pub(super) fn routes() -> Router<Admin> {
    Router::new()
        .route("/stats", get(stats))
        .route("/stats/series", get(series))
        .route("/events", get(events))
        .route("/openapi.json", get(describe))
}

async fn stats(State(admin): State<Admin>) -> Json<Stats> {
    Json(admin.history.stats())
}

#[derive(Deserialize)]
struct SeriesQuery {
    /// The function; the node if none is given.
    function: Option<String>,
}

async fn series(State(admin): State<Admin>, Query(query): Query<SeriesQuery>) -> Response {
    let Some(name) = query.function else { return Json(admin.history.node()).into_response() };
    match admin.history.function(&name) {
        Some(series) => Json::<SeriesView>(series).into_response(),
        None => {
            let reason = format!("nothing is known of `{name}` in the last hour");
            problem(StatusCode::NOT_FOUND, "no_history", reason)
        }
    }
}

async fn events(State(admin): State<Admin>) -> Json<Vec<Event>> {
    Json(admin.shared().metrics().events().latest(EVENTS_MAX))
}

async fn describe() -> Json<Value> {
    Json(openapi::document())
}
