//! Snapshots: all that a sandbox has in memory, kept in the store as a checkpoint, from which others
//! are made. `template` of a new sandbox names one by its id or its name.

use super::E2b;
use super::control::{Asked, Client, Posted, answer, parse};
use super::input::Query;
use super::problem::{Kind, Problem};
use super::records::Snapshot;
use super::templates;
use axum::extract::{Path, State};
use axum::http::{HeaderName, HeaderValue, StatusCode};
use axum::response::{IntoResponse, Response};
use axum::routing::{delete, get, post};
use axum::{Extension, Json, Router};
use serde::Deserialize;
use serde_json::{Value, json};
use std::sync::Arc;
use std::time::Duration;
use thaw_node::to_its_end::to_its_end;
use tokio::time::{Instant, sleep_until};

/// Most snapshots in one page of a list.
const PAGE_MAX: usize = 100;
/// Most bytes of a name.
const NAME_MAX: usize = 128;
/// How often it is looked whether a snapshot has come that nobody waits for any more.
const LATE_EVERY: Duration = Duration::from_secs(10);
/// The header that says where the next page begins.
const NEXT_TOKEN: HeaderName = HeaderName::from_static("x-next-token");

/// Their paths.
pub(super) fn routes() -> Router<Arc<E2b>> {
    Router::new()
        .route("/sandboxes/{id}/snapshots", post(create))
        .route("/snapshots", get(list))
        .route("/templates/{id}", delete(templates::remove))
}

#[derive(Deserialize)]
struct CreateRequest {
    name: Option<String>,
    memory: Option<bool>,
}

fn shown(id: &str, snapshot: &Snapshot) -> Value {
    json!({"snapshotID": id, "names": snapshot.name.iter().collect::<Vec<_>>()})
}

impl E2b {
    /// The snapshot that an owner means by an id or a name.
    pub(super) fn snapshot_named(&self, owner: &str, name: &str) -> Option<(String, Snapshot)> {
        let is_meant =
            |(id, one): &(String, Snapshot)| id == name || one.name.as_deref() == Some(name);
        self.records.snapshots_of(owner).into_iter().find(is_meant)
    }

    async fn take_snapshot(
        self: &Arc<Self>,
        client: &Client,
        id: &str,
        body: &[u8],
    ) -> Result<Value, Problem> {
        let request: CreateRequest = parse(body)?;
        let (_, record) = self.own(client, id)?;
        if request.memory == Some(false) {
            return Err(Problem::unsupported(
                "`memory`: a snapshot keeps the memory always; leave it out",
            ));
        }
        let is_name = |name: &String| {
            let is_fine = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.:/".contains(&byte);
            (1..=NAME_MAX).contains(&name.len()) && name.bytes().all(is_fine)
        };
        if request.name.as_ref().is_some_and(|name| !is_name(name)) {
            return Err(Problem::invalid(format!(
                "`name` has up to {NAME_MAX} letters, digits and any of -_.:/"
            )));
        }
        let owner = client.owner().to_owned();
        let snapshot = Snapshot {
            owner,
            sandbox: id.to_owned(),
            name: request.name,
            defaults: record.defaults,
            limits: record.limits,
            is_being_made: true,
            is_late: false,
        };
        let new = self.records.insert_snapshot(snapshot.clone(), client.most_snapshots())?;
        // The next daemon has to know whose it is, wherever this one ends.
        let taken = match self.records.written().await {
            Ok(()) => self.backend.snapshot(id, &new).await,
            Err(problem) => Err(problem),
        };
        match taken {
            Ok(()) => {
                self.records.made_snapshot(&new);
                Ok(shown(&new, &snapshot))
            }
            Err(problem) => {
                match problem.kind {
                    // Its place stays taken until then.
                    Kind::Late => {
                        self.records.snapshot_is_late(&new);
                        tokio::spawn(self.clone().remove_late(new));
                    }
                    _ => self.records.remove_snapshot(&new),
                }
                Err(problem)
            }
        }
    }

    /// Removes a snapshot that may be written after nobody waits for it any more.
    async fn remove_late(self: Arc<Self>, snapshot: String) {
        let until = Instant::now() + self.templates.times.late;
        loop {
            sleep_until(until.min(Instant::now() + LATE_EVERY)).await;
            match self.backend.remove_snapshot(&snapshot).await {
                Ok(false) if Instant::now() < until => {}
                Err(problem) if Instant::now() < until => {
                    tracing::warn!(%snapshot, "a snapshot that came too late stays for now: {problem}");
                }
                _ => return self.records.remove_snapshot(&snapshot),
            }
        }
    }
}

async fn create((State(e2b), Extension(client), Path(id), body): Posted) -> Response {
    let taken = to_its_end(async move { e2b.take_snapshot(&client, &id, &body).await });
    answer(StatusCode::CREATED, taken.await)
}

/// What is listed.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct ListQuery {
    #[serde(rename = "sandboxID")]
    sandbox: Option<String>,
    name: Option<String>,
    limit: Option<usize>,
    next_token: Option<String>,
}

async fn list((State(e2b), Extension(client), Query(query)): Asked<Query<ListQuery>>) -> Response {
    let limit = query.limit.unwrap_or(PAGE_MAX);
    if !(1..=PAGE_MAX).contains(&limit) {
        return Problem::invalid(format!("`limit` is between 1 and {PAGE_MAX}")).into_response();
    }
    let mut found = e2b.records.snapshots_of(client.owner());
    found.retain(|(id, one)| {
        query.sandbox.as_ref().is_none_or(|sandbox| one.sandbox == *sandbox)
            && query.name.as_ref().is_none_or(|name| one.name.as_ref() == Some(name))
            // A page begins at an id, whether that is still there or not.
            && query.next_token.as_ref().is_none_or(|token| id >= token)
    });
    let next = found.get(limit).map(|(id, _)| id.clone());
    found.truncate(limit);
    let shown: Vec<_> = found.iter().map(|(id, one)| shown(id, one)).collect();
    let mut response = Json(shown).into_response();
    if let Some(token) = next.and_then(|token| HeaderValue::try_from(token).ok()) {
        response.headers_mut().insert(NEXT_TOKEN, token);
    }
    response
}

/// Deletes a snapshot of a client.
///
/// # Errors
/// There is none, it is still being made, or others descend from it.
pub(super) async fn remove(e2b: &E2b, client: &Client, name: &str) -> Result<(), Problem> {
    let (id, snapshot) = e2b.snapshot_named(client.owner(), name).ok_or_else(|| {
        Problem::new(Kind::NotFound, format!("there is no template and no snapshot {name:?}"))
    })?;
    // Without its record nobody would own what comes into the store.
    if snapshot.is_being_made {
        let text = format!("the snapshot {id:?} is still being made; try again later");
        return Err(Problem::new(Kind::Exists, text));
    }
    // One that is gone from the store already is forgotten, too.
    if e2b.backend.remove_snapshot(&id).await.is_err() {
        // What builds have left there goes before it.
        e2b.remove_steps_on(&id).await;
        e2b.backend.remove_snapshot(&id).await?;
    }
    e2b.records.remove_snapshot(&id);
    Ok(())
}
