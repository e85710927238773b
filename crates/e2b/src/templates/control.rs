//! Requests for templates and their builds.

use super::build::Job;
use super::known::{BASE, Build, Failure, NewBuild, State, Template};
use super::log::PAGE_MAX;
use super::names::{TemplateName, check_tags};
use super::records::{no_build, no_template};
use super::shown::{status, summary, with_builds};
use super::steps::StartRequest;
use super::{Templates, tags, uploading};
use crate::control::{Asked, Client, Posted, answer, parse};
use crate::input::Query;
use crate::problem::{Kind, Problem};
use crate::{E2b, snapshots};
use axum::body::Bytes;
use axum::extract::{Path, State as Shared};
use axum::http::{HeaderName, HeaderValue, StatusCode};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, patch, post};
use axum::{Extension, Json, Router};
use serde::Deserialize;
use serde_json::{Value, json};
use std::sync::Arc;
use thaw_node::remote::LimitsChange;
use thaw_node::to_its_end::to_its_end;

/// Most templates in one page of a list.
const LIST_MAX: usize = 100;
/// The header that says where the next page begins.
const NEXT_TOKEN: HeaderName = HeaderName::from_static("x-next-token");

/// Their paths.
pub(crate) fn routes() -> Router<Arc<E2b>> {
    Router::new()
        .route("/v3/templates", post(request))
        .route("/templates", get(list_all))
        .route("/v2/templates", get(list))
        .route("/templates/{id}", get(show).patch(update))
        .route("/v2/templates/{id}", patch(update))
        .route("/templates/aliases/{alias}", get(find))
        .route("/v2/templates/{id}/builds/{build}", post(begin))
        .route("/templates/{id}/builds/{build}/status", get(build_status))
        .merge(tags::routes())
        .merge(uploading::link_routes())
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct BuildRequest {
    name: Option<String>,
    alias: Option<String>,
    #[serde(default)]
    tags: Vec<String>,
    cpu_count: Option<u32>,
    #[serde(rename = "memoryMB")]
    memory_mb: Option<u32>,
}

impl BuildRequest {
    /// The build that is wanted. `minFreeDiskMb` is of no effect: files take memory.
    fn wanted(self, owner: &str) -> Result<NewBuild, Problem> {
        let name = self.name.or(self.alias).unwrap_or_default();
        let name = TemplateName::parse(&name, owner)?;
        let mut tags = self.tags;
        match &name.tag {
            Some(tag) => tags.insert(0, tag.clone()),
            None if tags.is_empty() => tags.push(name.tag().to_owned()),
            None => {}
        }
        tags.sort();
        tags.dedup();
        check_tags(&tags)?;
        let limits = LimitsChange {
            cpus: self.cpu_count,
            memory_bytes: self.memory_mb.map(|mib| u64::from(mib) << 20),
        };
        Ok(NewBuild { name: name.name, tags, limits })
    }
}

/// Notes a build, for which files may be uploaded then.
async fn request(
    Shared(e2b): Shared<Arc<E2b>>,
    Extension(client): Extension<Client>,
    body: Bytes,
) -> Response {
    let requested = async {
        let wanted = parse::<BuildRequest>(&body)?.wanted(client.owner())?;
        let (name, tags) = (wanted.name.clone(), wanted.tags.clone());
        let records = &e2b.templates.records;
        let (template, build) = records.request(client.owner(), wanted, client.most_templates())?;
        records.written().await?;
        Ok(json!({
            "templateID": template,
            "buildID": build,
            "public": false,
            "names": [name],
            "aliases": [name],
            "tags": tags,
        }))
    };
    answer(StatusCode::ACCEPTED, requested.await)
}

/// Begins a build. It goes on if the client goes away.
async fn begin(
    Shared(e2b): Shared<Arc<E2b>>,
    Extension(client): Extension<Client>,
    Path((template, build)): Path<(String, String)>,
    body: Bytes,
) -> Response {
    let begun = to_its_end(async move { e2b.begin(&client, &template, &build, &body).await });
    answer(StatusCode::ACCEPTED, begun.await.map(|()| Value::Null))
}

impl E2b {
    async fn begin(
        self: &Arc<Self>,
        client: &Client,
        template: &str,
        build: &str,
        body: &[u8],
    ) -> Result<(), Problem> {
        let request: StartRequest = parse(body)?;
        let (template, found) = self.template(client, template)?;
        let known = found.builds.get(build).cloned().ok_or_else(|| no_build(build))?;
        let job = self.job(client, (template.clone(), build.to_owned()), known, request).await;
        let limits = job.as_ref().map(|job| job.known.limits).unwrap_or_default();
        let most = client.most_templates();
        let begin = || self.templates.records.begin((&template, build), limits, most);
        match job {
            Ok(job) => {
                let begun = self.templates.running.begin(&job.owner, build, begin)?;
                self.templates.records.written().await.inspect_err(|_| {
                    self.templates.running.end(build);
                    self.templates.records.has_not_begun(&template, build);
                })?;
                tokio::spawn(self.clone().build(job, begun));
                Ok(())
            }
            // The SDKs show the line of a step that has failed, and so that which names the base.
            Err(problem) if problem.kind == Kind::NotFound => {
                begin()?;
                let failure = Failure::new(BASE, &problem.message);
                let records = &self.templates.records;
                if !records.finish(&template, build, State::Failed(failure), |_| ()) {
                    // Its template was deleted meanwhile.
                    records.leave_over(build);
                }
                self.remove_leftovers().await;
                Ok(())
            }
            Err(problem) => Err(problem),
        }
    }

    /// What a build is to do, if it can be done.
    async fn job(
        &self,
        client: &Client,
        (template, build): (String, String),
        known: Build,
        request: StartRequest,
    ) -> Result<Job, Problem> {
        let owner = client.owner().to_owned();
        let origin = self.base(&owner, &request)?;
        let plan = request.plan()?;
        let limits = LimitsChange {
            cpus: known.limits.cpus.or(origin.limits.cpus),
            memory_bytes: known.limits.memory_bytes.or(origin.limits.memory_bytes),
        };
        let known = Build { limits, ..known };
        let times = self.templates.times;
        let most_templates = client.most_templates();
        let job = Job { owner, template, build, known, origin, plan, most_templates, times };
        self.backend.check(&job.wanted(self.settings.now().most_egress())).await?;
        Ok(job)
    }

    /// A template of a client, by its id or its name.
    pub(super) fn template(
        &self,
        client: &Client,
        name: &str,
    ) -> Result<(String, Template), Problem> {
        let own = TemplateName::parse(name, client.owner()).map_err(|_| no_template(name))?;
        self.templates.records.named(client.owner(), &own.name)
    }
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct StatusQuery {
    logs_offset: Option<usize>,
    limit: Option<usize>,
}

async fn build_status(
    (Shared(e2b), Extension(client), Path((template, build))): Asked<Path<(String, String)>>,
    Query(query): Query<StatusQuery>,
) -> Response {
    let shown = e2b.template(&client, &template).and_then(|(id, found)| {
        let known = found.builds.get(&build).ok_or_else(|| no_build(&build))?;
        let log = e2b.templates.running.log(&build);
        let page = (query.logs_offset.unwrap_or(0), query.limit.unwrap_or(PAGE_MAX));
        Ok(status((&id, &build), known, log.as_deref(), page))
    });
    // Whoever hears that it is ready finds it so, also if the next daemon answers.
    let _ = e2b.templates.records.written().await;
    answer(StatusCode::OK, shown)
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct ListQuery {
    limit: Option<usize>,
    next_token: Option<String>,
}

/// The first version of the list: all of them.
async fn list_all(Shared(e2b): Shared<Arc<E2b>>, Extension(client): Extension<Client>) -> Response {
    let all = e2b.templates.records.of(client.owner());
    Json(all.iter().map(|(id, one)| summary(id, one)).collect::<Vec<_>>()).into_response()
}

async fn list((Shared(e2b), Extension(client), Query(query)): Asked<Query<ListQuery>>) -> Response {
    let limit = query.limit.unwrap_or(LIST_MAX);
    if !(1..=LIST_MAX).contains(&limit) {
        return Problem::invalid(format!("`limit` is between 1 and {LIST_MAX}")).into_response();
    }
    let mut all = e2b.templates.records.of(client.owner());
    // A page begins at an id, whether that is still there or not.
    all.retain(|(id, _)| query.next_token.as_ref().is_none_or(|token| id >= token));
    let next = all.get(limit).map(|(id, _)| id.clone());
    let shown: Vec<_> = all.iter().take(limit).map(|(id, one)| summary(id, one)).collect();
    let mut response = Json(shown).into_response();
    if let Some(token) = next.and_then(|token| HeaderValue::try_from(token).ok()) {
        response.headers_mut().insert(NEXT_TOKEN, token);
    }
    response
}

async fn show((Shared(e2b), Extension(client), Path(name)): Asked<Path<String>>) -> Response {
    let shown = e2b.template(&client, &name).map(|(id, found)| with_builds(&id, &found));
    answer(StatusCode::OK, shown)
}

/// Whether there is a template of this name. Those that the operator has named are everybody's.
async fn find((Shared(e2b), Extension(client), Path(alias)): Asked<Path<String>>) -> Response {
    let own = e2b.template(&client, &alias).and_then(|(id, found)| {
        let tag = alias.split_once(':').map(|(_, tag)| tag);
        let has_tag = tag.is_none_or(|tag| found.tags.contains_key(tag));
        if has_tag { Ok(id) } else { Err(no_template(&alias)) }
    });
    let found = match own {
        Ok(id) => Ok(json!({"templateID": id, "public": false})),
        Err(problem) => match e2b.settings.now().templates.contains_key(&alias) {
            true => Ok(json!({"templateID": alias, "public": true})),
            false => Err(problem),
        },
    };
    answer(StatusCode::OK, found)
}

#[derive(Deserialize)]
struct UpdateRequest {
    public: Option<bool>,
}

async fn update((Shared(e2b), Extension(client), Path(name), body): Posted) -> Response {
    let updated = || {
        let request: UpdateRequest = parse(&body)?;
        let (_, found) = e2b.template(&client, &name)?;
        match request.public {
            Some(true) => {
                Err(Problem::unsupported("a template is its owner's alone; leave `public` out"))
            }
            _ => Ok(json!({"names": [found.name]})),
        }
    };
    answer(StatusCode::OK, updated())
}

/// Deletes a template, or a snapshot.
pub(crate) async fn remove(
    (Shared(e2b), Extension(client), Path(name)): Asked<Path<String>>,
) -> Response {
    let removed = to_its_end(async move {
        // A tag is taken away in another way, and snapshots may have such names.
        let own = match name.contains(':') {
            true => Err(no_template(&name)),
            false => e2b.template(&client, &name),
        };
        match own {
            Ok((id, _)) => e2b.remove_template(&client, &id).await,
            Err(problem) if problem.kind == Kind::NotFound => {
                snapshots::remove(&e2b, &client, &name).await
            }
            Err(problem) => Err(problem),
        }
    });
    answer(StatusCode::NO_CONTENT, removed.await.map(|()| Value::Null))
}

impl E2b {
    async fn remove_template(&self, client: &Client, id: &str) -> Result<(), Problem> {
        let Templates { records, cache, .. } = &self.templates;
        let builds = records.remove(client.owner(), id)?;
        if records.of(client.owner()).is_empty() {
            cache.leave_over_those_of(client.owner());
        }
        builds.iter().for_each(|build| self.templates.running.cancel(build));
        self.remove_leftovers().await;
        self.templates.records.written().await
    }
}
