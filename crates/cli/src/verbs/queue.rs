//! `thaw queue`: invocations that wait for their function, and those that were given up.

use crate::client::{Daemon, DaemonArguments};
use crate::failure::Outcome;
use crate::output::{self, Table, ago, escape, size};
use clap::{Args, Subcommand};
use serde_json::Value;
use std::process::ExitCode;
use thaw_home::config::FunctionName;
use thaw_node::metrics::QueueInfo;
use thaw_node::triggers::{InvocationId, InvocationInfo, Origin};

/// Show, retry and remove asynchronous invocations.
///
/// An invocation whose attempts have all failed, which the function has refused, or which became
/// too old is a dead letter: it stays for 14 days, and is tried again only if somebody says so.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    thaw queue list\n  \
    thaw queue list mailer\n  \
    thaw queue show mailer 5f0c0a4e2f8e4f0cb1d57e0f8d3a7c11\n  \
    thaw queue retry mailer\n  \
    thaw queue purge mailer --queued")]
pub struct Arguments {
    #[command(subcommand)]
    action: Action,
    #[command(flatten)]
    daemon: DaemonArguments,
}

#[derive(Debug, Subcommand)]
enum Action {
    /// List the queues, or the invocations of a function, a thousand at most.
    #[command(visible_alias = "ls")]
    List {
        /// The function.
        function: Option<FunctionName>,
        /// Print JSON.
        #[arg(long)]
        json: bool,
    },
    /// Show an invocation with its request.
    Show {
        /// The function.
        function: FunctionName,
        /// The invocation.
        id: InvocationId,
        /// Print JSON.
        #[arg(long)]
        json: bool,
    },
    /// Queue dead letters again, with all attempts before them.
    Retry {
        /// The function.
        function: FunctionName,
        /// One invocation; default: all dead letters of the function.
        id: Option<InvocationId>,
        /// Print JSON.
        #[arg(long)]
        json: bool,
    },
    /// Remove dead letters, or what waits. What is being attempted stays.
    Purge {
        /// The function.
        function: FunctionName,
        /// One invocation; default: all dead letters of the function.
        id: Option<InvocationId>,
        /// All that waits, and not the dead letters.
        #[arg(long, conflicts_with = "id")]
        queued: bool,
        /// Print JSON.
        #[arg(long)]
        json: bool,
    },
}

pub fn run(arguments: &Arguments) -> Outcome {
    let daemon = Daemon::find(&arguments.daemon)?;
    match &arguments.action {
        Action::List { function: None, json } => {
            let queues: Vec<QueueInfo> = daemon.get("/queues")?;
            show(*json, &queues, |queues| table_of_queues(queues))
        }
        Action::List { function: Some(function), json } => {
            let all: Vec<InvocationInfo> = daemon.get(&format!("/functions/{function}/queue"))?;
            show(*json, &all, |all| table(all))
        }
        Action::Show { function, id, json } => {
            let found: Value = daemon.get(&format!("/functions/{function}/queue/{id}"))?;
            show(*json, &found, describe)
        }
        Action::Retry { function, id, json } => {
            let url = format!("/functions/{function}/queue/retry{}", query(*id, false));
            let done: Value = daemon.post(&url)?;
            output::print_done(*json, &done, |done| {
                format!("{} dead letters of {function} are queued again", done["retried"])
            })
        }
        Action::Purge { function, id, queued, json } => {
            let url = format!("/functions/{function}/queue/purge{}", query(*id, *queued));
            let done: Value = daemon.post(&url)?;
            output::print_done(*json, &done, |done| {
                format!("removed {} invocations of {function}", done["removed"])
            })
        }
    }
}

fn show<T: serde::Serialize>(json: bool, found: &T, text: impl FnOnce(&T) -> String) -> Outcome {
    match json {
        true => output::print_json(found)?,
        false => output::print(&text(found))?,
    }
    Ok(ExitCode::SUCCESS)
}

fn query(id: Option<InvocationId>, queued: bool) -> String {
    match id {
        Some(id) => format!("?id={}", escape(&id.to_string())),
        None if queued => "?state=queued".to_owned(),
        None => "?state=dead".to_owned(),
    }
}

fn table_of_queues(queues: &[QueueInfo]) -> String {
    let mut table = Table::new(&["FUNCTION", "QUEUED", "RUNNING", "DEAD", "SIZE", "OLDEST"]);
    for queue in queues {
        table.row(vec![
            queue.function.clone(),
            queue.queued.to_string(),
            queue.running.to_string(),
            queue.dead.to_string(),
            size(queue.bytes + queue.dead_bytes),
            queue.oldest_ms.map_or("-".to_owned(), |oldest| format!("{} ago", ago(oldest))),
        ]);
    }
    table.text()
}

fn table(all: &[InvocationInfo]) -> String {
    let mut table = Table::new(&["ID", "STATE", "FROM", "QUEUED", "FAILED", "REQUEST", "REASON"]);
    for InvocationInfo { id, state, record } in all {
        let reason = record.dead.as_ref().map(|death| &death.reason).or(record.last.as_ref());
        table.row(vec![
            id.to_string(),
            state.clone(),
            from(&record.origin),
            format!("{} ago", ago(record.created_ms)),
            record.attempts.to_string(),
            format!("{} {}", record.method, thaw_sandbox::escape(record.path.as_bytes())),
            reason.map_or("-".to_owned(), |reason| thaw_sandbox::escape(reason.as_bytes())),
        ]);
    }
    table.text()
}

fn from(origin: &Origin) -> String {
    match origin {
        Origin::Client => "client".to_owned(),
        Origin::Operator => "operator".to_owned(),
        Origin::Schedule(name) => format!("schedule {name}"),
        Origin::Function(name) => format!("end of one of {name}"),
    }
}

/// An invocation with its request; a body that is text is shown.
fn describe(found: &Value) -> String {
    let mut text = String::new();
    if let Ok(info) = serde_json::from_value::<InvocationInfo>(found["invocation"].clone()) {
        text = table(&[info]);
    }
    let line = |value: &Value| thaw_sandbox::escape(value.as_str().unwrap_or_default().as_bytes());
    let request = &found["request"];
    text += &format!("\n{} {}\n", line(&request["method"]), line(&request["path"]));
    for header in request["headers"].as_array().into_iter().flatten() {
        text += &format!("{}: {}\n", line(&header[0]), line(&header[1]));
    }
    let encoded = found["body_base64"].as_str().unwrap_or_default();
    match body(encoded) {
        Some(body) if !body.is_empty() => text += &format!("\n{body}\n"),
        Some(_) => {}
        None => text += "\n(the body is not text; --json shows it)\n",
    }
    text
}

fn body(encoded: &str) -> Option<String> {
    use base64::Engine;
    let bytes = base64::engine::general_purpose::STANDARD.decode(encoded).ok()?;
    let text = String::from_utf8(bytes).ok()?;
    let lines = text.split('\n').map(|line| thaw_sandbox::escape(line.as_bytes()));
    Some(lines.collect::<Vec<_>>().join("\n"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn an_invocation_is_shown_without_what_a_terminal_acts_on() {
        let found = json!({
            "invocation": null,
            "request": {"method": "POST", "path": "/a", "headers": [["x", "\u{1b}[2J"]]},
            "body_base64": "aGkbWzJK"
        });
        let text = describe(&found);
        assert!(text.contains("POST /a\n") && text.contains("hi"), "{text}");
        assert!(!text.contains('\u{1b}'), "{text:?}");
        assert!(describe(&json!({"body_base64": "/w=="})).contains("not text"));
    }
}
