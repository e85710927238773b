//! What all pages have: head, navigation, and parts that are used again.

use super::App;
use super::assets::path;
use super::session::Session;
use axum::Extension;
use axum::extract::State;
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{Html, IntoResponse, Response};
use maud::{DOCTYPE, Markup, PreEscaped, html};

/// What htmx may do: no code in attributes, no styles, no requests to others.
const HTMX: &str = r#"{"allowEval":false,"includeIndicatorStyles":false,"selfRequestsOnly":true,"allowScriptTags":false,"historyEnabled":false,"timeout":20000}"#;

/// Where in the navigation a page is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Place {
    Overview,
    Functions,
    Sandboxes,
    Logs,
    Events,
    Store,
    Network,
    Metrics,
    Api,
    Nowhere,
}

const NAVIGATION: [(Place, &str, &str, &str); 9] = [
    (Place::Overview, "/", "Overview", "M3 12h5l2-7 4 14 2-7h5"),
    (Place::Functions, "/functions", "Functions", "M4 5h7v7H4zM13 12h7v7h-7zM13 5h7M4 19h7"),
    (
        Place::Sandboxes,
        "/sandboxes",
        "Sandboxes",
        "M12 3l8 4.5v9L12 21l-8-4.5v-9zM4 7.5l8 4.5 8-4.5M12 12v9",
    ),
    (Place::Logs, "/logs", "Logs", "M5 5h14M5 10h10M5 15h14M5 20h7"),
    (Place::Events, "/events", "Events", "M12 4v9M12 17v2M4.9 19.5h14.2L12 4z"),
    (
        Place::Store,
        "/store",
        "Store",
        "M4 6c0-4 16-4 16 0v12c0 4-16 4-16 0zM4 6c0 4 16 4 16 0M4 12c0 4 16 4 16 0",
    ),
    (
        Place::Network,
        "/network",
        "Network",
        "M12 3a9 9 0 100 18 9 9 0 000-18zM3 12h18M12 3c-5 5-5 13 0 18M12 3c5 5 5 13 0 18",
    ),
    (Place::Metrics, "/metrics", "Metrics", "M5 20V10M10 20V4M15 20v-8M20 20V7"),
    (Place::Api, "/api", "API", "M8 7l-5 5 5 5M16 7l5 5-5 5M14 4l-4 16"),
];

fn head(title: &str, extra: &Markup) -> Markup {
    html! {
        head {
            meta charset="utf-8";
            meta name="viewport" content="width=device-width, initial-scale=1";
            meta name="color-scheme" content="light dark";
            meta name="htmx-config" content=(HTMX);
            title { (title) " · Thaw" }
            link rel="icon" type="image/svg+xml" href=(path("icon.svg"));
            link rel="stylesheet" href=(path("app.css"));
            script src=(path("theme.js")) {}
            (extra)
        }
    }
}

fn icon(shape: &str) -> Markup {
    html! { svg.icon viewBox="0 0 24 24" aria-hidden="true" { path d=(shape) {} } }
}

fn mark() -> Markup {
    html! {
        svg.mark viewBox="0 0 24 24" aria-hidden="true" {
            path d="M12 2v20M3.3 7l17.4 10M3.3 17L20.7 7M12 6l-2.5-2.5M12 6l2.5-2.5M12 18l-2.5 2.5M12 18l2.5 2.5" {}
        }
    }
}

/// A page.
pub(super) struct Page<'a> {
    pub place: Place,
    pub title: &'a str,
    /// Names and addresses of the pages above it.
    pub above: &'a [(&'a str, &'a str)],
    /// The address whose parts `#live` and `#more` are fetched again every few seconds.
    pub live: Option<&'a str>,
    /// Has charts.
    pub charts: bool,
    pub session: &'a Session,
}

impl Page<'_> {
    /// The page with what changes, which is fetched again, and what stays.
    pub fn show(&self, live: Markup, rest: Markup) -> Response {
        let scripts = html! {
            script defer src=(path("htmx.min.js")) {}
            @if self.charts {
                link rel="stylesheet" href=(path("uplot.min.css"));
                script defer src=(path("uplot.min.js")) {}
                script defer src=(path("charts.js")) {}
            }
            script defer src=(path("app.js")) {}
        };
        Html(self.whole(&scripts, live, rest).into_string()).into_response()
    }

    /// The page with other scripts.
    pub fn whole(&self, scripts: &Markup, live: Markup, rest: Markup) -> Markup {
        html! {
            (DOCTYPE)
            html lang="en" {
                (head(self.title, scripts))
                body {
                    a.skip href="#main" { "Skip to the content" }
                    (self.sidebar())
                    main #main tabindex="-1" {
                        header.top {
                            nav.crumbs aria-label="Path" {
                                @for (name, address) in self.above {
                                    a href=(address) { (name) } span aria-hidden="true" { "/" }
                                }
                            }
                            h1 { (self.title) }
                        }
                        @if let Some(address) = self.live {
                            div #live hx-get=(address) hx-trigger="every 5s" hx-select="#live"
                                hx-target="#live" hx-swap="outerHTML" hx-select-oob="#more" { (live) }
                        } @else {
                            div #live { (live) }
                        }
                        (rest)
                    }
                    dialog #confirm aria-labelledby="confirm-text" {
                        p #confirm-text {}
                        div.buttons {
                            button type="button" data-answer="no" { "Cancel" }
                            button.danger type="button" data-answer="yes" { "Go on" }
                        }
                    }
                }
            }
        }
    }

    fn sidebar(&self) -> Markup {
        html! {
            header.side {
                a.brand href="/" { (mark()) span { "Thaw" } }
                nav aria-label="Pages" {
                    @for (place, address, name, shape) in NAVIGATION {
                        a href=(address) aria-current=[(place == self.place).then_some("page")] {
                            (icon(shape)) span { (name) }
                        }
                    }
                }
                div.foot {
                    button type="button" #theme title="Light, dark or as the system" aria-label="Change the colours" {
                        (icon("M12 4a8 8 0 100 16zM12 4a8 8 0 010 16")) span { "Colours" }
                    }
                    form method="post" action="/logout" {
                        input type="hidden" name="form" value=(self.session.form);
                        button type="submit" title="Log out" {
                            (icon("M14 4h5v16h-5M10 8l-4 4 4 4M6 12h9")) span { "Log out" }
                        }
                    }
                }
            }
        }
    }
}

/// The page that asks for the token.
pub(super) fn login(problem: Option<&str>) -> Html<String> {
    let nothing = PreEscaped(String::new());
    let page = html! {
        (DOCTYPE)
        html lang="en" {
            (head("Log in", &nothing))
            body.login {
                main {
                    form.card method="post" action="/login" {
                        div.brand { (mark()) span { "Thaw" } }
                        label for="token" { "Admin token" }
                        input #token name="token" type="password" required autofocus
                            autocomplete="current-password" spellcheck="false"
                            aria-describedby="where" aria-invalid=[problem.map(|_| "true")];
                        @if let Some(problem) = problem { p.problem role="alert" { (problem) } }
                        button.primary type="submit" { "Log in" }
                        p.hint #where {
                            "It is in " code { "$THAW_HOME/admin.token" }
                            ", or where " code { "--admin-token-file" } " says."
                        }
                    }
                }
            }
        }
    };
    Html(page.into_string())
}

/// An answer without a page around it.
pub(super) fn plain(status: StatusCode, reason: &str) -> Response {
    let kind = HeaderValue::from_static("text/plain; charset=utf-8");
    (status, [(header::CONTENT_TYPE, kind)], format!("{reason}\n")).into_response()
}

/// A page that says what is wrong.
pub(super) fn problem(session: &Session, status: StatusCode, reason: &str) -> Response {
    let page = Page {
        place: Place::Nowhere,
        title: "This did not work",
        above: &[("Overview", "/")],
        live: None,
        charts: false,
        session,
    };
    let text = html! { section.card { p.problem role="alert" { (reason) } } };
    (status, page.show(text, html! {})).into_response()
}

pub(super) async fn not_found(
    State(_app): State<App>,
    Extension(session): Extension<Session>,
) -> Response {
    problem(&session, StatusCode::NOT_FOUND, "There is no such page.")
}

/// A button that does something.
pub(super) struct Action<'a> {
    pub address: &'a str,
    pub name: &'a str,
    /// What it asks before.
    pub asks: Option<&'a str>,
    pub is_dangerous: bool,
}

impl Action<'_> {
    pub fn show(&self, session: &Session, fields: Markup) -> Markup {
        html! {
            form.action method="post" action=(self.address) data-confirm=[self.asks] {
                input type="hidden" name="form" value=(session.form);
                (fields)
                button.danger[self.is_dangerous] type="submit" { (self.name) }
            }
        }
    }
}

/// A figure with a name, which leads to the metric that it shows.
pub(super) fn figure(
    name: &str,
    value: impl maud::Render,
    more: impl maud::Render,
    metric: &str,
) -> Markup {
    html! {
        a.figure href=(format!("/metrics#{metric}")) title=(format!("metric {metric}")) {
            span.name { (name) }
            span.value { (value) }
            span.more { (more) }
        }
    }
}

/// A chart of columns of a history, which `charts.js` draws.
pub(super) struct Chart<'a> {
    pub title: &'a str,
    pub source: &'a str,
    /// Name of each column and what it is called.
    pub columns: &'a [(&'a str, &'a str)],
    pub is_stacked: bool,
    /// `ms`, `bytes` or nothing.
    pub unit: &'a str,
    pub metric: &'a str,
}

impl Chart<'_> {
    pub fn show(&self) -> Markup {
        let names = |pick: fn(&(&str, &str)) -> String| {
            self.columns.iter().map(pick).collect::<Vec<_>>().join(",")
        };
        html! {
            figure.chart.card {
                figcaption {
                    span { (self.title) }
                    a href=(format!("/metrics#{}", self.metric)) { (self.metric) }
                }
                div.plot role="img" aria-label=(format!("{}, the last hour", self.title))
                    data-source=(self.source) data-columns=(names(|column| column.0.to_owned()))
                    data-labels=(names(|column| column.1.to_owned())) data-unit=(self.unit)
                    data-stacked[self.is_stacked] {}
            }
        }
    }
}

/// A state as a coloured word.
pub(super) fn state(name: &str) -> Markup {
    html! { span.state data-state=(name) { (name) } }
}

/// Pairs of a name and a value.
pub(super) fn facts(pairs: &[(&str, Markup)]) -> Markup {
    html! {
        dl.facts { @for (name, value) in pairs { div { dt { (name) } dd { (value) } } } }
    }
}
