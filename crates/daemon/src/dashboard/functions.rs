//! Functions: all of them, and one.

use super::App;
use super::format::{age, beginning, bytes, millis, millis_if_any, short};
use super::frame::{Chart, Page, Place, facts, figure, problem, state};
use super::session::Session;
use super::svg::{PHASES, sparkline, total_ns, waterfall};
use crate::admin::{FunctionDetail, FunctionInfo};
use crate::deploy::{self, Deployment};
use axum::extract::{Path, State};
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use axum::{Extension, Json, Router};
use maud::{Markup, html};
use std::sync::Arc;
use thaw_home::clock::monotonic_ns;
use thaw_node::boots::BootRecord;
use thaw_node::history::{FunctionStats, SeriesView};
use thaw_node::service::{InstanceInfo, Service};
use thaw_node::usage::{MemoryUse, measure_memory_of};
use thaw_store::{ImageInfo, Store};

/// Instances of a function whose memory the page counts.
const COUNTED_MAX: usize = 16;
/// Instances that the page lists.
const INSTANCES_SHOWN: usize = 200;

pub(super) fn routes() -> Router<App> {
    Router::new()
        .route("/functions", get(functions))
        .route("/functions/{name}", get(function))
        .route("/data/functions/{name}", get(data))
}

async fn data(State(app): State<App>, Path(name): Path<String>) -> Response {
    let nothing = || SeriesView {
        interval_ms: 0,
        times_ms: Vec::new(),
        columns: Vec::new(),
        values: Vec::new(),
    };
    Json(app.admin.history.function(&name).unwrap_or_else(nothing)).into_response()
}

async fn functions(State(app): State<App>, Extension(session): Extension<Session>) -> Response {
    let stats = app.admin.history.stats();
    let mut all: Vec<_> = app
        .admin
        .services
        .functions()
        .iter()
        .map(|service| FunctionInfo::new(service, &app.admin.catalog))
        .collect();
    all.sort_by(|a, b| a.name.as_str().cmp(b.name.as_str()));
    let of =
        |name: &str| stats.functions.iter().find(|of| of.name == name).cloned().unwrap_or_default();
    let page = Page {
        place: Place::Functions,
        title: "Functions",
        above: &[],
        live: Some("/functions"),
        charts: false,
        session: &session,
    };
    let live = html! {
        section.card { div.scroll { table {
            thead { tr {
                th { "Function" } th { "Kind" } th.number { "Version" } th.number { "Requests/s" } th.number { "Errors/s" }
                th.number { "p50" } th.number { "p95" } th.number { "Boot" } th { "Instances" } th { "Last 5 minutes" }
            } }
            tbody {
                @for function in &all {
                    @let stats = of(function.name.as_str());
                    tr {
                        td {
                            a href=(format!("/functions/{}", function.name)) { (function.name) }
                            @if let Some(problem) = &function.problem { " " span.state data-state="problem" title=(problem) { "problem" } }
                            @if function.backs_off_ms.is_some() { " " (state("backs-off")) }
                        }
                        td { (kind(function)) }
                        td.number { (function.version) }
                        td.number { (short(stats.requests)) }
                        td.number { (short(stats.server_errors + stats.refusals)) }
                        td.number { (millis_if_any(stats.request_p50_ms)) }
                        td.number { (millis_if_any(stats.request_p95_ms)) }
                        td.number { (millis_if_any(stats.boot_ms)) }
                        td { (states(&stats)) }
                        td { (sparkline(&app.admin.history.requests_of(function.name.as_str(), 60))) }
                    }
                }
            }
        } } @if all.is_empty() { p.hint { "There is none yet: " code { "thaw build DIRECTORY" } " makes one." } } }
    };
    page.show(live, html! {})
}

fn kind(function: &FunctionInfo) -> String {
    serde_json::to_value(function.kind)
        .ok()
        .and_then(|kind| kind.as_str().map(str::to_owned))
        .unwrap_or_default()
}

fn states(stats: &FunctionStats) -> Markup {
    html! {
        @for (name, count) in &stats.instances { span.state data-state=(name) { (count) " " (name) } " " }
        @if stats.instances.is_empty() { span.hint { "none" } }
    }
}

/// What the page reads from the store.
struct Stored {
    deployment: Option<Deployment>,
    ancestors: Vec<String>,
    image: Option<ImageInfo>,
}

fn stored(store: &Store, name: &str, image: &str) -> Stored {
    let id = image.parse().ok();
    Stored {
        deployment: deploy::versions(store, name).ok(),
        ancestors: id
            .and_then(|id| store.image_ancestors(id).ok())
            .unwrap_or_default()
            .iter()
            .map(ToString::to_string)
            .collect(),
        image: id.and_then(|id| store.list_images().ok()?.into_iter().find(|found| found.id == id)),
    }
}

async fn function(
    State(app): State<App>,
    Path(name): Path<String>,
    Extension(session): Extension<Session>,
) -> Response {
    let Some(service) = app.admin.services.route(&name) else {
        return problem(&session, StatusCode::NOT_FOUND, &format!("No function is named {name}."));
    };
    let name = service.name().to_string();
    let detail = FunctionDetail::new(&service, &app.admin);
    let (store, image) = (app.admin.catalog.store().clone(), detail.info.image.clone());
    let of = name.clone();
    let Ok(stored) = tokio::task::spawn_blocking(move || stored(&store, &of, &image)).await else {
        return problem(&session, StatusCode::INTERNAL_SERVER_ERROR, "The store cannot be read.");
    };
    let memory = measure_memory_of(&service, COUNTED_MAX).await;
    let stats = app.admin.history.stats();
    let stats = stats.functions.into_iter().find(|of| of.name == name).unwrap_or_default();
    let address = format!("/functions/{name}");
    let page = Page {
        place: Place::Functions,
        title: &name,
        above: &[("Functions", "/functions")],
        live: Some(&address),
        charts: true,
        session: &session,
    };
    let live = html! {
        @if let Some(problem) = &detail.info.problem { p.problem role="alert" { (problem) } }
        (figures(&stats, memory, &detail))
    };
    let more = html! {
        (boots(&detail.boots))
        div.columns {
            (about(&service, &detail, &stored))
            (versions(stored.deployment.map(|found| found.with_live(&app.admin.services))))
        }
        (instances(&detail.live))
    };
    page.show(live, html! { (charts(&name)) div #more { (more) } })
}

fn figures(stats: &FunctionStats, memory: MemoryUse, detail: &FunctionDetail) -> Markup {
    let boots: f64 = stats.boots.values().sum();
    html! {
        div.figures {
            (figure("Requests", html! { (short(stats.requests)) small { "/s" } },
                html! { (detail.live.iter().map(|one| one.served).sum::<u64>()) " by those that live" }, "thaw_request_queue_seconds"))
            (figure("Errors", html! { (short(stats.server_errors)) small { "/s" } },
                html! { (short(stats.refusals)) " refusals/s" }, "thaw_responses"))
            (figure("Latency p95", millis_if_any(stats.request_p95_ms),
                html! { "p50 " (millis_if_any(stats.request_p50_ms)) }, "thaw_request_duration_seconds"))
            (figure("Queue p95", millis_if_any(stats.queue_p95_ms), "until an instance had it", "thaw_request_queue_seconds"))
            (figure("Boots", html! { (short(boots)) small { "/s" } },
                html! { "mean " (millis_if_any(stats.boot_ms)) }, "thaw_boot_phase_seconds"))
            (figure("Instances", detail.live.len(), html! { (detail.standby.ready.len()) " ready ahead" }, "thaw_instances"))
            (figure("Private memory", bytes(memory.private_bytes),
                html! { (bytes(memory.pss_bytes)) " proportional, " (memory.counted) " of " (memory.instances) " counted" },
                "thaw_tenant_memory_used_bytes"))
        }
    }
}

/// The last boots, each with its phases.
fn boots(boots: &[BootRecord]) -> Markup {
    let scale = boots.iter().map(total_ns).max().unwrap_or(0);
    let now = monotonic_ns();
    html! {
        section.card {
            h2 { "Last boots" a href="/metrics#thaw_boot_phase_seconds" { "thaw_boot_phase_seconds" } }
            @if boots.is_empty() { p.hint { "There was none since the daemon started." } } @else {
                ul.legend { @for (name, class) in PHASES { li { i class=(class) {} (name) } } }
                table.boots { tbody {
                    @for boot in boots {
                        tr {
                            td { (state(boot.kind.name())) }
                            td.number { "#" (boot.instance) }
                            td.wide { (waterfall(boot, scale)) }
                            td.number { (millis(total_ns(boot) as f64 / 1e6)) }
                            td.number.hint { (age(now.saturating_sub(boot.accepted_ns) / 1_000_000_000)) " ago" }
                        }
                    }
                } }
                p.hint { "From the acceptance of the connection: what the copy is made of was taken, the sandbox had its command, memory was mapped, the first instruction ran, the first byte of the response was sent." }
            }
        }
    }
}

fn about(service: &Arc<Service>, detail: &FunctionDetail, stored: &Stored) -> Markup {
    let limits = &service.config().limits;
    let image = &stored.image;
    let mut pairs = vec![
        (
            "Entry",
            html! { (kind(&detail.info)) @if detail.info.port > 0 { ", port " (detail.info.port) } },
        ),
        (
            "Isolation",
            html! { (serde_json::to_value(detail.info.isolation).ok().and_then(|v| v.as_str().map(str::to_owned)).unwrap_or_default()) },
        ),
        (
            "Limits",
            html! { (limits.memory) ", " (limits.cpu) " CPU, " (limits.processes) " processes, " (limits.instances) " instances" },
        ),
        ("Image", html! { code title=(detail.info.image) { (beginning(&detail.info.image)) } }),
    ];
    if let Some(image) = image {
        let form = serde_json::to_value(image.form).ok();
        let form = form.and_then(|v| v.as_str().map(str::to_owned)).unwrap_or_default();
        pairs.push((
            "On disk",
            html! { (bytes(image.allocated)) " of " (bytes(image.len)) ", " (form) },
        ));
        pairs.push(("Working set", html! {
            @if image.working_set_len > 0 { "recorded, " (bytes(image.working_set_len)) } @else { "none yet" }
        }));
    }
    pairs.push(("Chain", html! {
        @if stored.ancestors.is_empty() { "has all of its memory itself" } @else {
            ol.chain {
                @for ancestor in &stored.ancestors { li { code title=(ancestor) { (beginning(ancestor)) } } }
                li { code { (beginning(&detail.info.image)) } " this one" }
            }
        }
    }));
    pairs.push((
        "Template",
        html! { @match detail.standby.template { Some(pid) => { "process " (pid) }, None => "–" } },
    ));
    html! {
        section.card {
            h2 { "About" a href=(format!("/logs?function={}", detail.info.name)) { "log" } }
            (facts(&pairs))
        }
    }
}

fn versions(deployment: Option<Deployment>) -> Markup {
    html! {
        section.card {
            h2 { "Versions" }
            @if let Some(deployment) = deployment {
                table {
                    thead { tr { th.number { "Number" } th { "Label" } th.number { "Share" } th.number { "Instances" } th.number { "Requests" } th.number { "Failed" } } }
                    tbody { @for version in deployment.versions.iter().rev() {
                        tr {
                            td.number { (version.number) @if version.number == deployment.active { " " (state("active")) } }
                            td { (version.label.as_deref().unwrap_or("–")) }
                            td.number { (version.percent) " %" }
                            td.number { (version.instances.unwrap_or(0)) }
                            @let requests = version.requests;
                            td.number { (requests.map_or(0, |requests| requests.all)) }
                            td.number { (requests.map_or(0, |requests| requests.failed)) }
                        }
                    } }
                }
            } @else { p.hint { "The store has none." } }
        }
    }
}

fn instances(live: &[InstanceInfo]) -> Markup {
    html! {
        section.card {
            h2 { "Instances" a href="/metrics#thaw_instances" { "thaw_instances" } }
            @if live.is_empty() { p.hint { "None lives now." } } @else { div.scroll { table {
                thead { tr { th.number { "Number" } th { "State" } th.number { "Version" } th.number { "Process" } th.number { "Connections" } th.number { "Served" } th.number { "Age" } } }
                tbody { @for one in live.iter().take(INSTANCES_SHOWN) {
                    tr {
                        td.number { "#" (one.id) } td { (state(one.state.name())) } td.number { (one.version) }
                        td.number { @if one.pid == 0 { "–" } @else { (one.pid) } }
                        td.number { (one.connections) } td.number { (one.served) } td.number { (age(one.age_s)) }
                    }
                } }
            } } }
            @if live.len() > INSTANCES_SHOWN { p.hint { (live.len() - INSTANCES_SHOWN) " more are not shown." } }
        }
    }
}

fn charts(name: &str) -> Markup {
    let source = format!("/data/functions/{name}");
    let chart = |title, columns, is_stacked, unit, metric| {
        Chart { title, source: &source, columns, is_stacked, unit, metric }.show()
    };
    html! {
        div.charts {
            (chart("Requests and errors per second", &[("requests", "requests"), ("client_errors", "4xx"), ("server_errors", "5xx"), ("refusals", "refusals")], false, "", "thaw_responses"))
            (chart("Latency of routed requests", &[("request_p50", "p50"), ("request_p95", "p95")], false, "ms", "thaw_request_duration_seconds"))
            (chart("Mean time of queue, boot, execution", &[("queue", "queue"), ("boot", "boot"), ("run", "execution")], true, "ms", "thaw_boot_phase_seconds"))
            (chart("Boots per second, by kind", &[("cold", "cold"), ("warm", "warm"), ("fork", "fork"), ("ready", "ready"), ("woken", "asleep")], true, "", "thaw_connections"))
            (chart("Instances by state", &[("busy", "busy"), ("idle", "idle"), ("ahead", "ready"), ("hibernated", "hibernated"), ("asleep", "asleep")], true, "", "thaw_instances"))
        }
    }
}
