//! The metrics as a page, to which every figure leads, and the admin API's description.

use super::App;
use super::frame::{Page, Place};
use super::session::Session;
use crate::admin::openapi;
use crate::admin::routes::metrics_text;
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use axum::{Extension, Json, Router};
use maud::html;
use serde_json::Value;
use thaw_node::metrics::NAMES;

/// Series of one metric that the page shows.
const SERIES_SHOWN: usize = 60;

pub(super) fn routes() -> Router<App> {
    Router::new()
        .route("/metrics", get(metrics))
        .route("/api", get(api))
        .route("/openapi.json", get(document))
}

/// A metric of the text form (OpenMetrics 1.0, "ABNF").
#[derive(Debug, Default, PartialEq, Eq)]
struct Metric {
    name: String,
    kind: String,
    help: String,
    /// Series and value; of a histogram the sum and the count.
    series: Vec<(String, String)>,
    left_out: usize,
}

fn parse(text: &str) -> Vec<Metric> {
    let mut all: Vec<Metric> = Vec::new();
    for line in text.lines() {
        if let Some(rest) = line.strip_prefix("# HELP ") {
            let (name, help) = rest.split_once(' ').unwrap_or((rest, ""));
            all.push(Metric { name: name.to_owned(), help: help.to_owned(), ..Metric::default() });
        } else if let Some(rest) = line.strip_prefix("# TYPE ") {
            let kind = rest.split_once(' ').map_or("", |(_, kind)| kind);
            if let Some(last) = all.last_mut() {
                last.kind = kind.to_owned();
            }
        } else if !line.starts_with('#')
            && let Some(last) = all.last_mut()
            && !line.starts_with(&format!("{}_bucket", last.name))
            && let Some((series, value)) = line.rsplit_once(' ')
        {
            if last.series.len() < SERIES_SHOWN {
                last.series.push((series.to_owned(), value.to_owned()));
            } else {
                last.left_out += 1;
            }
        }
    }
    all
}

/// Adds the metrics that have no series yet, which the text leaves out: figures lead to them.
fn add_silent(all: &mut Vec<Metric>) {
    for (name, kind) in NAMES {
        if !all.iter().any(|metric| metric.name == *name) {
            let (name, kind) = ((*name).to_owned(), (*kind).to_owned());
            all.push(Metric { name, kind, ..Metric::default() });
        }
    }
}

async fn metrics(State(app): State<App>, Extension(session): Extension<Session>) -> Response {
    let mut all = parse(&metrics_text(&app.admin).await);
    add_silent(&mut all);
    let page = Page {
        place: Place::Metrics,
        title: "Metrics",
        above: &[],
        live: None,
        charts: false,
        session: &session,
    };
    let body = html! {
        p.hint {
            "Prometheus reads these from " code { "GET /metrics" } " of the admin API, buckets of histograms included."
        }
        @for metric in &all {
            section.card.metric #(metric.name) {
                h2 { code { (metric.name) } span.kind { (metric.kind) } }
                p.hint { (metric.help) }
                @if metric.series.is_empty() { p.hint { "No series yet." } }
                table.series { tbody { @for (series, value) in &metric.series {
                    tr { td { code { (series) } } td.number { (value) } }
                } } }
                @if metric.left_out > 0 { p.hint { (metric.left_out) " more series are left out here." } }
            }
        }
    };
    page.show(body, html! {})
}

async fn document() -> Response {
    Json(openapi::document()).into_response()
}

async fn api(Extension(session): Extension<Session>) -> Response {
    let document = openapi::document();
    let page = Page {
        place: Place::Api,
        title: "Admin API",
        above: &[],
        live: None,
        charts: false,
        session: &session,
    };
    let none = serde_json::Map::new();
    let paths = document["paths"].as_object().unwrap_or(&none);
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let body = html! {
        p.hint {
            "As OpenAPI: " a href="/openapi.json" download="thaw-openapi.json" { "openapi.json" }
            ". It is served on " code { "$THAW_HOME/admin.sock" } ", and over TCP with " code { "--admin" } "."
        }
        section.card { div.scroll { table.api { tbody {
            @for (path, operations) in paths {
                @for (method, operation) in operations.as_object().unwrap_or(&none) {
                    tr {
                        td { span.method data-method=(method) { (method.to_uppercase()) } }
                        td { code { (path) } }
                        td {
                            (text(&operation["summary"]))
                            @for parameter in operation["parameters"].as_array().into_iter().flatten() {
                                @if parameter["in"] == "query" { " " code.rule { (text(&parameter["name"])) } }
                            }
                        }
                    }
                }
            }
        } } } }
    };
    page.show(body, html! {})
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;
    use std::fs;
    use std::path::Path;

    #[test]
    fn metrics_are_read_with_their_series() {
        let text = "# HELP thaw_a Things.\n# TYPE thaw_a counter\nthaw_a_total{f=\"x y\"} 3\n\
                    # HELP thaw_b_seconds Times.\n# TYPE thaw_b_seconds histogram\n\
                    # UNIT thaw_b_seconds seconds\nthaw_b_seconds_sum 1.5\n\
                    thaw_b_seconds_bucket{le=\"1\"} 2\nthaw_b_seconds_count 2\n# EOF\n";
        let mut all = parse(text);
        assert_eq!(all.len(), 2);
        assert_eq!(all[0].series, [("thaw_a_total{f=\"x y\"}".to_owned(), "3".to_owned())]);
        add_silent(&mut all);
        assert_eq!(all.len(), 2 + NAMES.len());
        assert_eq!((all[1].kind.as_str(), all[1].series.len()), ("histogram", 2));
    }

    /// Names of metrics in a source.
    fn named(source: &str) -> BTreeSet<&str> {
        let is_part = |letter: char| letter.is_ascii_alphanumeric() || letter == '_';
        let words = source.split(|letter| !is_part(letter));
        let is_crate = |word: &str| source.contains(&format!("{word}::"));
        words
            .filter(|word| word.starts_with("thaw_") && *word != "thaw_session" && !is_crate(word))
            .collect()
    }

    #[test]
    fn figures_lead_to_metrics_that_there_are() {
        let pages = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/dashboard");
        let mut found = 0;
        for file in fs::read_dir(pages).unwrap() {
            let path = file.unwrap().path();
            if path.extension().is_none_or(|extension| extension != "rs")
                || path.ends_with("metrics.rs")
            {
                continue;
            }
            let source = fs::read_to_string(&path).unwrap();
            for name in named(&source) {
                found += 1;
                let is_there = NAMES.iter().any(|(known, _)| *known == name);
                assert!(is_there, "{} leads to {name}", path.display());
            }
        }
        assert!(found > 10, "{found}");
    }
}
