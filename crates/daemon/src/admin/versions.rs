//! Requests about the versions of functions.

use super::Admin;
use super::extract::{Path, Query};
use super::routes::problem;
use crate::deploy::{self, DeployError, Deployment};
use axum::extract::State;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Json, Router};
use serde::Deserialize;
use thaw_node::catalog::RestartError;
use thaw_store::{HeaderRule, Store};

pub(super) fn routes() -> Router<Admin> {
    Router::new()
        .route("/functions/{name}/versions", get(versions))
        .route("/functions/{name}/activate", post(activate))
        .route("/functions/{name}/rollback", post(roll_back))
        .route("/functions/{name}/split", post(split))
        .route("/functions/{name}/restart", post(restart))
}

#[derive(Deserialize)]
struct VersionQuery {
    version: String,
}

#[derive(Deserialize)]
struct SplitQuery {
    version: String,
    #[serde(default)]
    percent: u8,
    /// `NAME=VALUE`.
    header: Option<String>,
}

async fn versions(State(admin): State<Admin>, Path(name): Path<String>) -> Response {
    let store = admin.catalog.store().clone();
    let found = tokio::task::spawn_blocking(move || deploy::versions(&store, &name)).await;
    match found {
        Ok(Ok(deployment)) => Json(deployment.with_live(&admin.services)).into_response(),
        Ok(Err(error)) => refused(&error),
        Err(error) => problem(StatusCode::INTERNAL_SERVER_ERROR, "internal", error),
    }
}

async fn activate(
    State(admin): State<Admin>,
    Path(name): Path<String>,
    Query(query): Query<VersionQuery>,
) -> Response {
    change(admin, move |store| deploy::activate(store, &name, &query.version)).await
}

async fn roll_back(State(admin): State<Admin>, Path(name): Path<String>) -> Response {
    change(admin, move |store| deploy::roll_back(store, &name)).await
}

async fn split(
    State(admin): State<Admin>,
    Path(name): Path<String>,
    Query(query): Query<SplitQuery>,
) -> Response {
    let SplitQuery { version, percent, header } = query;
    change(admin, move |store| {
        let header = header.as_deref().map(HeaderRule::parse).transpose()?;
        deploy::split(store, &name, &version, percent, header)
    })
    .await
}

async fn restart(State(admin): State<Admin>, Path(name): Path<String>) -> Response {
    let (catalog, home) = (admin.catalog.clone(), admin.home.clone());
    // Its instances are booted by tasks of the node.
    let restarted = tokio::task::spawn_blocking(move || catalog.restart(&home, &name));
    match restarted.await {
        Ok(Ok(restarted)) => Json(restarted).into_response(),
        Ok(Err(error @ RestartError::Unknown(_))) => {
            problem(StatusCode::NOT_FOUND, "unknown_function", error)
        }
        Ok(Err(error)) => problem(StatusCode::CONFLICT, "not_restarted", error),
        Err(error) => problem(StatusCode::INTERNAL_SERVER_ERROR, "internal", error),
    }
}

/// Changes which versions get requests, and serves them.
async fn change(
    admin: Admin,
    change: impl FnOnce(&Store) -> Result<Deployment, DeployError> + Send + 'static,
) -> Response {
    let catalog = admin.catalog.clone();
    let changed = tokio::task::spawn_blocking(move || {
        let deployment = change(catalog.store())?;
        let report = catalog.reload()?;
        Ok::<_, DeployError>((deployment, report))
    });
    match changed.await {
        Ok(Ok((deployment, mut report))) => {
            report.unreachable = (admin.on_reload)();
            let name = deployment.function.as_str();
            match report.broken.get(name).or_else(|| report.unreachable.get(name)) {
                Some(reason) => problem(StatusCode::CONFLICT, "not_served", reason),
                None => Json(deployment.with_live(&admin.services)).into_response(),
            }
        }
        Ok(Err(error)) => refused(&error),
        Err(error) => problem(StatusCode::INTERNAL_SERVER_ERROR, "internal", error),
    }
}

fn refused(error: &DeployError) -> Response {
    match error.is_not_found() {
        true => problem(StatusCode::NOT_FOUND, "unknown_version", error),
        false => problem(StatusCode::CONFLICT, "not_changed", error),
    }
}
