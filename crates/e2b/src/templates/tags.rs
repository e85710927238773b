//! Tags: names for the builds of a template.

use super::names::{TemplateName, check_tags};
use crate::E2b;
use crate::control::{Asked, Client, answer, parse, time_text};
use crate::problem::Problem;
use axum::body::Bytes;
use axum::extract::{Path, State};
use axum::http::StatusCode;
use axum::response::Response;
use axum::routing::{get, post};
use axum::{Extension, Router};
use serde::Deserialize;
use serde_json::{Value, json};
use std::sync::Arc;

/// Their paths.
pub fn routes() -> Router<Arc<E2b>> {
    Router::new()
        .route("/templates/tags", post(assign).delete(remove))
        .route("/templates/{id}/tags", get(list))
}

#[derive(Deserialize)]
struct AssignRequest {
    target: String,
    tags: Vec<String>,
}

fn check(tags: &[String]) -> Result<(), Problem> {
    match tags.is_empty() {
        true => Err(Problem::invalid("`tags` is empty; name some")),
        false => check_tags(tags),
    }
}

async fn assign(
    State(e2b): State<Arc<E2b>>,
    Extension(client): Extension<Client>,
    body: Bytes,
) -> Response {
    let assigned = async {
        let request: AssignRequest = parse(&body)?;
        check(&request.tags)?;
        let target = TemplateName::parse(&request.target, client.owner())?;
        let build = e2b.templates.records.tag(client.owner(), &target, &request.tags)?;
        e2b.remove_leftovers().await;
        e2b.templates.records.written().await?;
        Ok(json!({"buildID": build, "tags": request.tags}))
    };
    answer(StatusCode::CREATED, assigned.await)
}

#[derive(Deserialize)]
struct RemoveRequest {
    name: String,
    tags: Vec<String>,
}

async fn remove(
    State(e2b): State<Arc<E2b>>,
    Extension(client): Extension<Client>,
    body: Bytes,
) -> Response {
    let removed = async {
        let request: RemoveRequest = parse(&body)?;
        check(&request.tags)?;
        let name = TemplateName::parse(&request.name, client.owner())?;
        e2b.templates.records.untag(client.owner(), &name.name, &request.tags)?;
        e2b.remove_leftovers().await;
        e2b.templates.records.written().await?;
        Ok(Value::Null)
    };
    answer(StatusCode::NO_CONTENT, removed.await)
}

async fn list((State(e2b), Extension(client), Path(name)): Asked<Path<String>>) -> Response {
    let listed = e2b.template(&client, &name).map(|(_, found)| {
        let tags = found.tags.iter().map(|(name, tag)| {
            json!({"tag": name, "buildID": tag.build, "createdAt": time_text(tag.created_ms)})
        });
        tags.collect()
    });
    answer(StatusCode::OK, listed)
}
