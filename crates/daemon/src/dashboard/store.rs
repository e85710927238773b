//! What is stored and shared: `thaw df` as a page.

use super::App;
use super::format::bytes;
use super::frame::{Page, Place, problem};
use super::session::Session;
use super::svg::shares;
use crate::admin::routes::measure_usage;
use axum::extract::State;
use axum::http::StatusCode;
use axum::response::Response;
use axum::routing::get;
use axum::{Extension, Router};
use maud::{Markup, html};
use thaw_node::usage::UsageReport;

pub(super) fn routes() -> Router<App> {
    Router::new().route("/store", get(store))
}

async fn store(State(app): State<App>, Extension(session): Extension<Session>) -> Response {
    let report = match measure_usage(&app.admin).await {
        Ok(report) => report,
        Err(error) => return problem(&session, StatusCode::INTERNAL_SERVER_ERROR, &error),
    };
    let page = Page {
        place: Place::Store,
        title: "Store",
        above: &[],
        live: None,
        charts: false,
        session: &session,
    };
    let rest = html! {
        (totals(&report))
        (functions(&report))
        div.columns { (checkpoints(&report)) (images(&report)) }
        @if !report.damaged.is_empty() {
            section.card { h2 { "Damaged" } ul { @for line in &report.damaged { li.problem { (line) } } } }
        }
    };
    page.show(rest, html! {})
}

fn totals(report: &UsageReport) -> Markup {
    let store = &report.store;
    let parts = [
        ("Images", store.images_bytes, "p1"),
        ("Working sets", store.working_sets_bytes, "p2"),
        ("Files", store.files_bytes, "p3"),
        ("Indexes", store.indexes_bytes, "p4"),
        ("Kernel builds", store.kernels_bytes, "p5"),
        ("Records", store.records_bytes, "p6"),
        ("Unpublished", store.unpublished_bytes, "p7"),
    ];
    let whole = store.total_bytes.max(1) as f64;
    let bar: Vec<_> = parts
        .iter()
        .map(|(name, size, class)| {
            (*class, *size as f64 / whole, format!("{name}: {}", bytes(*size)))
        })
        .collect();
    let home = &report.home;
    let beside = [
        ("Asleep", home.asleep.bytes),
        ("Swap", home.swap_bytes.unwrap_or(0)),
        ("Interrupted pulls", home.pulls_bytes),
        ("Pieces", home.pieces_bytes),
        ("Work of builds", home.work_bytes),
        ("Logs", home.logs_bytes),
    ];
    html! {
        section.card {
            h2 { "Store: " (bytes(store.total_bytes)) a href="/metrics#thaw_tenant_store_bytes" { "thaw_tenant_store_bytes" } }
            (shares(&bar))
            ul.legend { @for (name, size, class) in parts { li { i class=(class) {} (name) " " b { (bytes(size)) } } } }
            @if store.unused_bytes > 0 { p.hint { (bytes(store.unused_bytes)) " are needed by nobody; " code { "thaw gc" } " removes them." } }
            h3 { "Beside the store" }
            ul.legend { @for (name, size) in beside { li { (name) " " b { (bytes(size)) } } } }
        }
    }
}

fn functions(report: &UsageReport) -> Markup {
    html! {
        section.card {
            h2 { "Functions" }
            div.scroll { table {
                thead { tr { th { "Function" } th { "Domain" } th.number { "Own" } th.number { "Shared" } th.number { "In its base" }
                    th.number { "Instances" } th.number { "Private memory" } th.number { "Proportional" } th.number { "Asleep" } } }
                tbody {
                    @for function in &report.functions {
                        tr {
                            td { a href=(format!("/functions/{}", function.name)) { (function.name) } }
                            td { (function.domain.as_ref().map_or("–", |domain| domain.name().as_str())) }
                            td.number { (bytes(function.disk.own_bytes)) }
                            td.number { (bytes(function.disk.shared_bytes)) }
                            td.number { (bytes(function.disk.base_bytes)) }
                            @let memory = function.memory.unwrap_or_default();
                            td.number { (memory.instances) }
                            td.number { (bytes(memory.private_bytes)) }
                            td.number { (bytes(memory.pss_bytes)) }
                            td.number { (bytes(function.asleep.bytes)) }
                        }
                    }
                }
            } }
        }
    }
}

fn checkpoints(report: &UsageReport) -> Markup {
    html! {
        section.card {
            h2 { "Checkpoints" }
            @if report.checkpoints.is_empty() { p.hint { "There is none." } } @else { table {
                thead { tr { th { "Name" } th { "Of" } th.number { "Own" } } }
                tbody { @for one in &report.checkpoints { tr {
                    td { (one.name) } td { (one.function) } td.number { (bytes(one.disk.own_bytes)) }
                } } }
            } }
        }
    }
}

fn images(report: &UsageReport) -> Markup {
    html! {
        section.card {
            h2 { "Container images and kernels" }
            table {
                thead { tr { th { "Name" } th.number { "Own" } th.number { "Shared" } } }
                tbody {
                    @for one in &report.images { tr {
                        td { (one.name) } td.number { (bytes(one.disk.own_bytes)) } td.number { (bytes(one.disk.shared_bytes)) }
                    } }
                    @for one in &report.kernels { tr {
                        td { "kernel " code { (super::format::beginning(&one.kernel)) } " · " (one.images) " images" }
                        td.number { (bytes(one.bytes)) } td.number { "–" }
                    } }
                }
            }
        }
    }
}
