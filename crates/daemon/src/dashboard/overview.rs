//! The node at a glance.

use super::App;
use super::format::{age, bytes, millis_if_any, short};
use super::frame::{Chart, Page, Place, figure, state};
use super::session::Session;
use super::svg::shares;
use crate::admin::routes::report_tenants;
use axum::extract::State;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use axum::{Extension, Json, Router};
use maud::{Markup, html};
use thaw_node::history::Stats;
use thaw_node::metrics::EventKind;
use thaw_node::tenants::TenantReport;

/// Events that the page shows.
const EVENTS_SHOWN: usize = 6;
/// Functions that the page shows, the busiest.
const FUNCTIONS_SHOWN: usize = 8;

pub(super) fn routes() -> Router<App> {
    Router::new().route("/", get(overview)).route("/data/node.json", get(data))
}

async fn data(State(app): State<App>) -> Response {
    Json(app.admin.history.node()).into_response()
}

async fn overview(State(app): State<App>, Extension(session): Extension<Session>) -> Response {
    let stats = app.admin.history.stats();
    let tenants = match report_tenants(&app.admin).await {
        Ok(tenants) => tenants,
        Err(error) => {
            return super::frame::problem(&session, StatusCode::INTERNAL_SERVER_ERROR, &error);
        }
    };
    let page = Page {
        place: Place::Overview,
        title: "Overview",
        above: &[],
        live: Some("/"),
        charts: true,
        session: &session,
    };
    let live = html! {
        (figures(&app, &stats))
    };
    let more = html! {
        div.columns {
            (busiest(&app, &stats))
            (events(&app))
        }
        (memory(&tenants))
    };
    page.show(live, html! { (charts()) div #more { (more) } })
}

fn figures(app: &App, stats: &Stats) -> Markup {
    let node = &stats.node;
    let live: usize =
        node.all.instances.iter().filter(|(s, _)| *s != "asleep").map(|(_, n)| n).sum();
    let busy = node.all.instances.get("busy").copied().unwrap_or(0);
    let boots: f64 = node.all.boots.values().sum();
    html! {
        div.figures {
            (figure("Requests", html! { (short(node.all.requests)) small { "/s" } },
                html! { "p95 " (millis_if_any(node.all.request_p95_ms)) }, "thaw_request_queue_seconds"))
            (figure("Errors", html! { (short(node.all.server_errors)) small { "/s" } },
                html! { (short(node.all.refusals)) " refusals/s" }, "thaw_responses"))
            (figure("Boots", html! { (short(boots)) small { "/s" } },
                html! { "mean " (millis_if_any(node.all.boot_ms)) }, "thaw_boot_phase_seconds"))
            (figure("Instances", live, html! { (busy) " busy, room for " (node.instances_free) }, "thaw_instances"))
            (figure("Memory", bytes(node.memory_bytes), html! { (short(node.cpus)) " CPUs" }, "thaw_tenant_memory_used_bytes"))
            (figure("Zygotes", node.zygotes, html! { "of " (node.zygotes_target) }, "thaw_zygotes"))
            (figure("Sandboxes", app.admin.sandboxes.list().len(), html! { (app.admin.services.functions().len()) " functions" }, "thaw_instances"))
            (figure("Up", age(stats.uptime_s), html! { "Thaw " (stats.version) }, "thaw_zygotes"))
        }
    }
}

fn busiest(app: &App, stats: &Stats) -> Markup {
    let mut functions: Vec<_> = stats.functions.iter().collect();
    functions.sort_by(|a, b| b.requests.total_cmp(&a.requests).then(a.name.cmp(&b.name)));
    html! {
        section.card {
            h2 { "Busiest functions" a href="/functions" { "all" } }
            @if functions.is_empty() {
                p.hint { "There is no function yet: " code { "thaw build DIRECTORY" } " makes one." }
            }
            table {
                thead { tr { th { "Function" } th.number { "Requests/s" } th.number { "p95" } th { "Last 5 minutes" } } }
                tbody {
                    @for function in functions.iter().take(FUNCTIONS_SHOWN) {
                        tr {
                            td { a href=(format!("/functions/{}", function.name)) { (function.name) } }
                            td.number { (short(function.requests)) }
                            td.number { (millis_if_any(function.request_p95_ms)) }
                            td { (super::svg::sparkline(&app.admin.history.requests_of(&function.name, 60))) }
                        }
                    }
                }
            }
        }
    }
}

fn events(app: &App) -> Markup {
    let latest = app.admin.shared().metrics().events().latest(EVENTS_SHOWN);
    html! {
        section.card {
            h2 { "Latest events" a href="/events" { "all" } }
            @if latest.is_empty() { p.hint { "Nothing has happened since the daemon started." } }
            ul.events {
                @for event in &latest {
                    li data-bad[event.kind.is_bad()] {
                        span.kind { (event.kind.name()) }
                        span { (super::events::text(event)) }
                        time datetime=(super::format::time(event.time_ms)) data-ms=(event.time_ms) {}
                    }
                }
            }
        }
    }
}

/// Memory by tenant, and of what kind.
fn memory(tenants: &[TenantReport]) -> Markup {
    let total: u64 = tenants.iter().map(|tenant| tenant.memory_used).sum();
    let reserved: u64 = tenants.iter().map(|tenant| tenant.memory_reserved).sum();
    let share = |part: u64| part as f64 / total.max(1) as f64;
    html! {
        section.card {
            h2 { "Capacity by tenant" a href="/metrics#thaw_tenant_memory_used_bytes" { "thaw_tenant_memory_used_bytes" } }
            p.hint { "Sandboxes use " (bytes(total)) " of " (bytes(reserved)) " that their limits allow." }
            div.scroll { table {
                thead { tr {
                    th { "Tenant" } th.number { "Functions" } th.number { "Instances" } th.number { "Waiting" }
                    th.number { "Memory" } th { "Share" } th.number { "Swap" } th.number { "Store" } th.number { "Connections out" }
                } }
                tbody {
                    @for tenant in tenants {
                        @let name = tenant.domain.as_ref().map_or("(without a domain)", |domain| domain.name().as_str());
                        tr {
                            td { (name) }
                            td.number { (tenant.functions) }
                            td.number { (tenant.instances) }
                            td.number { (tenant.waiting) }
                            td.number { (bytes(tenant.memory_used)) }
                            td { (shares(&[("p3", share(tenant.memory_used), format!("{name} uses {}", bytes(tenant.memory_used)))])) }
                            td.number { (bytes(tenant.swap)) }
                            td.number { (bytes(tenant.store)) }
                            td.number { (tenant.egress_connections) }
                        }
                    }
                }
            } }
        }
    }
}

fn charts() -> Markup {
    let source = "/data/node.json";
    let chart = |title, columns, is_stacked, unit, metric| {
        Chart { title, source, columns, is_stacked, unit, metric }.show()
    };
    html! {
        div.charts {
            (chart("Requests per second", &[("requests", "requests"), ("server_errors", "errors"), ("refusals", "refusals")], false, "", "thaw_responses"))
            (chart("Boots per second, by kind", &[("cold", "cold"), ("warm", "warm"), ("fork", "fork"), ("ready", "ready"), ("woken", "asleep")], true, "", "thaw_connections"))
            (chart("Instances by state", &[("busy", "busy"), ("idle", "idle"), ("ahead", "ready"), ("hibernated", "hibernated"), ("asleep", "asleep")], true, "", "thaw_instances"))
            (chart("Memory of sandboxes", &[("memory", "memory")], true, "bytes", "thaw_tenant_memory_used_bytes"))
        }
    }
}

/// Kinds of events that are about an operator's own acts.
pub(super) fn is_own(kind: EventKind) -> bool {
    kind == EventKind::Operator
}

/// Shows a state, where there is one.
pub(super) fn state_if_any(name: Option<&str>) -> Markup {
    name.map_or_else(|| html! { "–" }, state)
}
