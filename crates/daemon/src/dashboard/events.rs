//! What happened lately, and whom functions may reach.

use super::App;
use super::format::time;
use super::frame::{Page, Place};
use super::session::Session;
use axum::extract::{Query, State};
use axum::response::Response;
use axum::routing::get;
use axum::{Extension, Router};
use maud::{Markup, html};
use serde::Deserialize;
use thaw_node::metrics::{Event, EventKind};

/// Events of a page.
const EVENTS_SHOWN: usize = 512;

pub(super) fn routes() -> Router<App> {
    Router::new().route("/events", get(events)).route("/network", get(network))
}

#[derive(Deserialize)]
struct EventsQuery {
    #[serde(default)]
    only: String,
}

/// What an event says.
pub(super) fn text(event: &Event) -> Markup {
    let times = event.count > 1;
    html! {
        @if event.subject.is_empty() { (what(event.kind)) } @else {
            b { (event.subject) } " " (what(event.kind))
        }
        @if !event.detail.is_empty() { ": " (event.detail) }
        @if times { " · " (event.count) " times" }
    }
}

fn what(kind: EventKind) -> &'static str {
    match kind {
        EventKind::Ended => "lost an instance",
        EventKind::BackedOff => "backs off after many crashes",
        EventKind::RolledBack => "was rolled back: a version has failed too often",
        EventKind::EgressDenied => "wanted to connect to where it may not",
        EventKind::Refused => "was not served",
        EventKind::Hibernated => "had an instance give up its memory",
        EventKind::Woken => "had a hibernated instance wake",
        EventKind::FellAsleep => "had an instance fall asleep",
        EventKind::WokeUp => "had an instance boot again that was asleep",
        EventKind::Lost => "lost an instance that was asleep",
        EventKind::Operator => "by the dashboard",
    }
}

async fn events(
    State(app): State<App>,
    Query(query): Query<EventsQuery>,
    Extension(session): Extension<Session>,
) -> Response {
    let all = app.admin.shared().metrics().events().latest(EVENTS_SHOWN);
    let is_wanted = |event: &&Event| match query.only.as_str() {
        "bad" => event.kind.is_bad(),
        "operator" => super::overview::is_own(event.kind),
        _ => true,
    };
    let wanted: Vec<_> = all.iter().filter(is_wanted).collect();
    let choices = [("", "all"), ("bad", "problems"), ("operator", "by operators")];
    let address = format!(
        "/events?only={}",
        if choices.iter().any(|(c, _)| *c == query.only) { &query.only } else { "" }
    );
    let page = Page {
        place: Place::Events,
        title: "Events",
        above: &[],
        live: Some(&address),
        charts: false,
        session: &session,
    };
    let live = html! {
        nav.tabs aria-label="Which events" {
            @for (choice, name) in choices {
                a href=(format!("/events?only={choice}")) aria-current=[(choice == query.only).then_some("true")] { (name) }
            }
        }
        section.card {
            @if wanted.is_empty() { p.hint { "There are none since the daemon started." } }
            ul.events {
                @for event in &wanted {
                    li data-bad[event.kind.is_bad()] {
                        span.kind { (event.kind.name()) }
                        span { (text(event)) }
                        time datetime=(time(event.time_ms)) data-ms=(event.time_ms) {}
                    }
                }
            }
        }
        p.hint { "The latest 512 events are kept, in memory. Equal ones within a minute are counted as one." }
    };
    page.show(live, html! {})
}

async fn network(State(app): State<App>, Extension(session): Extension<Session>) -> Response {
    let events = app.admin.shared().metrics().events().latest(EVENTS_SHOWN);
    let denied = |function: &str| -> u64 {
        let of =
            |event: &&Event| event.kind == EventKind::EgressDenied && event.subject == function;
        events.iter().filter(of).map(|event| event.count).sum()
    };
    let page = Page {
        place: Place::Network,
        title: "Network",
        above: &[],
        live: Some("/network"),
        charts: false,
        session: &session,
    };
    let mut functions = app.admin.services.functions();
    functions.sort_by(|a, b| a.name().as_str().cmp(b.name().as_str()));
    let rule = |rule: &thaw_home::config::EgressRule| {
        serde_json::to_value(rule)
            .ok()
            .and_then(|v| v.as_str().map(str::to_owned))
            .unwrap_or_default()
    };
    let live = html! {
        section.card {
            h2 { "Outgoing connections" a href="/metrics#thaw_egress_denied" { "thaw_egress_denied" } }
            p.hint { "Functions reach only what their " code { "[egress]" } " allows; by default that is nothing." }
            div.scroll { table {
                thead { tr { th { "Function" } th { "May connect to" } th { "Connects again after a thaw" } th { "Own address" } th.number { "Denied lately" } } }
                tbody {
                    @for service in &functions {
                        @let config = service.config();
                        tr {
                            td { a href=(format!("/functions/{}", config.name)) { (config.name) } }
                            td { @if config.egress.allow.is_empty() { span.hint { "nothing" } }
                                @for allowed in &config.egress.allow { code.rule { (rule(allowed)) } " " } }
                            td { @for again in &config.egress.reconnect { code.rule { (rule(again)) } " " } }
                            td { @if let Some(listen) = config.listen { code { (listen) } } @else { span.hint { "–" } } }
                            td.number { (denied(config.name.as_str())) }
                        }
                    }
                }
            } }
        }
    };
    page.show(live, html! {})
}
