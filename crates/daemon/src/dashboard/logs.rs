//! Logs: the latest lines of a function with a search, and further ones as they come.

use super::App;
use super::format::time;
use super::frame::{Page, Place, plain};
use super::session::Session;
use axum::body::Body;
use axum::extract::{Query, State};
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use axum::{Extension, Router};
use maud::{Markup, html};
use serde::Deserialize;
use serde_json::json;
use std::convert::Infallible;
use std::sync::Arc;
use thaw_node::logs::{Line, Stream};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;

/// Lines that a page begins with.
const LINES_SHOWN: usize = 1000;
/// Characters of a search.
const SEARCH_MAX: usize = 200;
/// How often a silent stream says that it is there, so that one whose reader has gone ends.
const SIGN_OF_LIFE: std::time::Duration = std::time::Duration::from_secs(20);

pub(super) fn routes() -> Router<App> {
    Router::new().route("/logs", get(logs)).route("/logs/stream", get(stream))
}

/// Which lines are wanted.
#[derive(Clone, Debug, Default, Deserialize)]
struct Wanted {
    #[serde(default)]
    function: String,
    /// Text that a line has, in any case.
    #[serde(default)]
    q: String,
    /// Number of an instance.
    #[serde(default)]
    instance: String,
    /// `out`, `err` or `thaw`.
    #[serde(default)]
    stream: String,
}

fn name(stream: Stream) -> &'static str {
    match stream {
        Stream::Out => "out",
        Stream::Err => "err",
        Stream::Thaw => "thaw",
    }
}

impl Wanted {
    fn bounded(mut self) -> Self {
        self.q = self.q.trim().chars().take(SEARCH_MAX).collect::<String>().to_lowercase();
        self
    }

    fn takes(&self, line: &Line) -> bool {
        line.is_of(self.instance.parse().ok())
            && (self.stream.is_empty() || self.stream == name(line.stream))
            && (self.q.is_empty() || line.text.to_lowercase().contains(&self.q))
    }

    fn query(&self) -> String {
        let pairs = [
            ("function", &self.function),
            ("q", &self.q),
            ("instance", &self.instance),
            ("stream", &self.stream),
        ];
        serde_urlencoded::to_string(pairs).unwrap_or_default()
    }
}

async fn logs(
    State(app): State<App>,
    Query(wanted): Query<Wanted>,
    Extension(session): Extension<Session>,
) -> Response {
    let wanted = wanted.bounded();
    let mut names: Vec<_> =
        app.admin.services.functions().iter().map(|service| service.name().to_string()).collect();
    names.sort();
    let page = Page {
        place: Place::Logs,
        title: "Logs",
        above: &[],
        live: None,
        charts: false,
        session: &session,
    };
    let service = app.admin.services.route(&wanted.function);
    let lines = service.map(|service| app.admin.catalog.log(service.name()).recent());
    let body = html! {
        (search(&wanted, &names))
        @match &lines {
            Some(lines) => (log(lines, &wanted)),
            None => p.hint { "Choose a function." },
        }
    };
    page.show(body, html! {})
}

fn search(wanted: &Wanted, names: &[String]) -> Markup {
    html! {
        form.inline.card method="get" action="/logs" role="search" {
            label { "Function " select name="function" { @for name in names { option selected[*name == wanted.function] { (name) } } } }
            label.grow { "Search " input type="search" name="q" value=(wanted.q) placeholder="text in a line" spellcheck="false"; }
            label { "Instance " input.short name="instance" value=(wanted.instance) inputmode="numeric" placeholder="all"; }
            label { "Stream " select name="stream" {
                @for (value, name) in [("", "all"), ("out", "output"), ("err", "errors"), ("thaw", "Thaw")] {
                    option value=(value) selected[value == wanted.stream] { (name) }
                }
            } }
            button.primary type="submit" { "Show" }
        }
    }
}

fn log(lines: &[Arc<Line>], wanted: &Wanted) -> Markup {
    let found: Vec<_> = lines.iter().filter(|line| wanted.takes(line)).collect();
    let shown = &found[found.len().saturating_sub(LINES_SHOWN)..];
    html! {
        section.card.log-card {
            h2 {
                (found.len()) " of " (lines.len()) " lines in memory"
                label.switch { input type="checkbox" #tail checked; " live" }
            }
            div #log role="log" tabindex="0" aria-label=(format!("Log of {}", wanted.function))
                data-stream=(format!("/logs/stream?{}", wanted.query())) {
                @for line in shown { (entry(line)) }
            }
            p.hint { "Older lines are in the log's file: " code { "thaw logs " (wanted.function) " --grep TEXT" } }
        }
    }
}

fn entry(line: &Line) -> Markup {
    html! {
        div.line data-stream=(name(line.stream)) {
            time datetime=(time(line.time_ms)) { (time(line.time_ms)[11..23]) }
            span.origin { @if let Some(origin) = line.origin { "#" (origin.instance) } }
            span.text { (line.text) }
        }
    }
}

/// A line as a message of the stream (HTML, 9.2 server-sent events). JSON has no line ends.
fn message(line: &Line) -> Vec<u8> {
    let data = json!({
        "time": time(line.time_ms)[11..23],
        "stream": name(line.stream),
        "instance": line.origin.map(|origin| origin.instance),
        "text": line.text,
    });
    format!("data: {data}\n\n").into_bytes()
}

async fn stream(
    State(app): State<App>,
    Query(wanted): Query<Wanted>,
    Extension(session): Extension<Session>,
) -> Response {
    let wanted = wanted.bounded();
    let Some(service) = app.admin.services.route(&wanted.function) else {
        return plain(StatusCode::NOT_FOUND, "no function has this name");
    };
    let Ok(place) = app.streams.clone().try_acquire_owned() else {
        let why = "too many logs are followed already; close a page that follows one";
        return plain(StatusCode::TOO_MANY_REQUESTS, why);
    };
    let log = app.admin.catalog.log(service.name());
    let (mut follower, shown) = (log.follow(), log.recent().len());
    let (sender, receiver) = mpsc::channel::<Result<Vec<u8>, Infallible>>(1);
    tokio::spawn(async move {
        let _place = place;
        // The page has those that were there.
        let mut skipped = 0;
        loop {
            let message = tokio::select! {
                lines = follower.next() => {
                    let new = lines.iter().skip_while(|_| { skipped += 1; skipped <= shown });
                    new.filter(|line| wanted.takes(line)).flat_map(|line| message(line)).collect()
                }
                () = tokio::time::sleep(SIGN_OF_LIFE) => b": here\n\n".to_vec(),
                () = session.ended() => return,
                () = sender.closed() => return,
            };
            if !message.is_empty() && sender.send(Ok(message)).await.is_err() {
                return;
            }
        }
    });
    let kind = HeaderValue::from_static("text/event-stream");
    ([(header::CONTENT_TYPE, kind)], Body::from_stream(ReceiverStream::new(receiver)))
        .into_response()
}

#[cfg(test)]
mod tests {
    use super::*;
    use thaw_node::logs::Origin;

    fn line(text: &str) -> Line {
        let origin = Some(Origin { instance: 7, pid: 1 });
        Line { time_ms: 1000, stream: Stream::Err, origin, text: text.to_owned() }
    }

    #[test]
    fn lines_are_chosen_by_text_instance_and_stream() {
        let takes = |q: &str, instance: &str, stream: &str| {
            let [q, instance, stream] = [q, instance, stream].map(str::to_owned);
            Wanted { function: "f".into(), q, instance, stream }.bounded().takes(&line("An Error"))
        };
        assert!(takes("error", "", "") && takes("", "7", "err"));
        assert!(!takes("none", "", "") && !takes("", "8", "") && !takes("", "", "out"));
    }

    #[test]
    fn lines_of_guests_are_escaped_and_stay_one_message() {
        let hostile = line("<script>alert(1)</script>\u{2028}\ndata: x\n\n");
        assert!(!entry(&hostile).into_string().contains("<script>"));
        let message = String::from_utf8(message(&hostile)).unwrap();
        assert_eq!(message.matches('\n').count(), 2, "{message:?}");
    }
}
