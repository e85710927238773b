//! Sandboxes: all of them with who was forked from whom, one, and what can be done with it.

use super::App;
use super::format::{age, bytes};
use super::frame::{Action, Page, Place, facts, problem};
use super::inside::{Inside, look};
use super::overview::state_if_any;
use super::session::Session;
use axum::extract::{Form, Path, State};
use axum::http::StatusCode;
use axum::response::{IntoResponse, Redirect, Response};
use axum::routing::{get, post};
use axum::{Extension, Router};
use maud::{Markup, html};
use serde::Deserialize;
use std::collections::BTreeMap;
use std::time::{SystemTime, UNIX_EPOCH};
use thaw_node::remote::{ExecInfo, ExecState, NetworkUsage};
use thaw_node::sandboxes::registry::SandboxProblem;
use thaw_node::sandboxes::{NewSandbox, SandboxInfo};
use thaw_node::usage::measure_instance;
use thaw_sandbox::SandboxMemory;

/// Sandboxes that the page lists.
const SHOWN: usize = 500;
/// How deep the tree of forks is shown.
const DEPTH_MAX: usize = 32;

pub(super) fn routes() -> Router<App> {
    Router::new()
        .route("/sandboxes", get(list).post(create))
        .route("/sandboxes/{name}", get(show))
        .route("/sandboxes/{name}/pause", post(pause))
        .route("/sandboxes/{name}/resume", post(resume))
        .route("/sandboxes/{name}/fork", post(fork))
        .route("/sandboxes/{name}/kill", post(kill))
}

/// Sandboxes in the order of the tree of forks, each with its depth.
fn tree(all: &[SandboxInfo]) -> Vec<(usize, &SandboxInfo)> {
    let mut children: BTreeMap<u64, Vec<&SandboxInfo>> = BTreeMap::new();
    let mut roots = Vec::new();
    for one in all {
        match &one.forked_from {
            Some(from) if all.iter().any(|other| other.instance == from.instance) => {
                children.entry(from.instance).or_default().push(one);
            }
            _ => roots.push(one),
        }
    }
    let mut ordered = Vec::new();
    let mut ahead: Vec<_> = roots.into_iter().rev().map(|one| (0, one)).collect();
    while let Some((depth, one)) = ahead.pop() {
        ordered.push((depth.min(DEPTH_MAX), one));
        let below = children.remove(&one.instance).unwrap_or_default();
        ahead.extend(below.into_iter().rev().map(|child| (depth + 1, child)));
    }
    ordered
}

fn address(name: &str) -> String {
    format!("/sandboxes/{name}")
}

fn now_ms() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_millis() as u64
}

async fn list(State(app): State<App>, Extension(session): Extension<Session>) -> Response {
    let all = app.admin.sandboxes.list();
    let page = Page {
        place: Place::Sandboxes,
        title: "Sandboxes",
        above: &[],
        live: Some("/sandboxes"),
        charts: false,
        session: &session,
    };
    let live = html! {
        section.card {
            @if all.is_empty() {
                p.hint { "There is none. " code { "thaw sandbox create debian:12" } " makes one of a container image." }
            } @else { (table(&all, &session)) }
            @if all.len() > SHOWN { p.hint { (all.len() - SHOWN) " more are not shown." } }
        }
    };
    page.show(live, creation(&app, &session))
}

fn table(all: &[SandboxInfo], session: &Session) -> Markup {
    let now = now_ms();
    html! {
        div.scroll { table.tree {
            thead { tr { th { "Sandbox" } th { "State" } th { "Of" } th.number { "Instance" } th.number { "Age" } th { "Time-out" } th { "" } } }
            tbody { @for (depth, one) in tree(all).into_iter().take(SHOWN) {
                tr {
                    td { @for _ in 0..depth { span.branch aria-hidden="true" {} } a href=(address(&one.name)) { (one.name) }
                        @if let Some(from) = &one.forked_from { span.hint { " fork of " (from.name) } } }
                    td { (state_if_any(one.state.as_deref())) }
                    td { a href=(format!("/functions/{}", one.function)) { (one.function) } }
                    td.number { "#" (one.instance) }
                    td.number { (age(now.saturating_sub(one.created_ms) / 1000)) }
                    td { (time_out(one, now)) }
                    td.actions { (actions(one, session)) }
                }
            } }
        } }
    }
}

fn time_out(one: &SandboxInfo, now: u64) -> String {
    let then = match one.on_timeout {
        thaw_node::sandboxes::OnTimeout::Pause => "pauses",
        thaw_node::sandboxes::OnTimeout::Kill => "ends",
    };
    match one.deadline_ms {
        Some(at) => format!("{then} in {}", age(at.saturating_sub(now) / 1000)),
        None => "–".to_owned(),
    }
}

fn is_paused(one: &SandboxInfo) -> bool {
    matches!(one.state.as_deref(), Some("paused" | "hibernated" | "asleep"))
}

fn actions(one: &SandboxInfo, session: &Session) -> Markup {
    let name = &one.name;
    let act = |verb: &str, label, asks, is_dangerous| {
        let address = format!("/sandboxes/{name}/{verb}");
        Action { address: &address, name: label, asks, is_dangerous }.show(session, html! {})
    };
    let question = format!("End the sandbox {name}? All that is in it is lost.");
    html! {
        div.buttons {
            @if is_paused(one) { (act("resume", "Resume", None, false)) } @else { (act("pause", "Pause", None, false)) }
            (act("fork", "Fork", None, false))
            (act("kill", "Kill", Some(question.as_str()), true))
        }
    }
}

fn creation(app: &App, session: &Session) -> Markup {
    let mut names: Vec<_> =
        app.admin.services.functions().iter().map(|service| service.name().to_string()).collect();
    names.sort();
    html! {
        @if !names.is_empty() { section.card {
            h2 { "New sandbox" }
            form.inline method="post" action="/sandboxes" {
                input type="hidden" name="form" value=(session.form);
                label { "Function " select name="function" { @for name in &names { option { (name) } } } }
                label { "Name " input name="name" placeholder="made up" autocomplete="off" spellcheck="false"; }
                button.primary type="submit" { "Create" }
            }
        } }
    }
}

async fn show(
    State(app): State<App>,
    Path(name): Path<String>,
    Extension(session): Extension<Session>,
) -> Response {
    let one = match app.admin.sandboxes.find(&name) {
        Ok(one) => one,
        Err(error) => return problem(&session, StatusCode::NOT_FOUND, &error.to_string()),
    };
    let Some(service) = app.admin.services.service_of(one.instance) else {
        return problem(&session, StatusCode::NOT_FOUND, "Its instance has ended.");
    };
    // Looking must not wake it.
    let (inside, memory) = match is_paused(&one) {
        true => (None, None),
        false => (
            Some(look(&service, one.instance).await),
            measure_instance(&service, one.instance).await,
        ),
    };
    let execs = service.execs_of(one.instance).map(|execs| execs.list());
    let address = address(&one.name);
    let page = Page {
        place: Place::Sandboxes,
        title: &one.name,
        above: &[("Sandboxes", "/sandboxes")],
        live: Some(&address),
        charts: false,
        session: &session,
    };
    let all = app.admin.sandboxes.list();
    let instance = service.instances().into_iter().find(|found| found.id == one.instance);
    let live = html! {
        div.columns {
            section.card {
                h2 { "State" (state_if_any(one.state.as_deref())) }
                (facts(&about(&one, memory, instance.map(|i| (i.pid, i.connections, i.served)))))
                (actions(&one, &session))
            }
            section.card {
                h2 { "Inside" }
                nav.doors {
                    a.button.primary href=(format!("{address}/terminal")) { "Terminal" }
                    a.button href=(format!("{address}/files?path=/")) { "Files" }
                    a.button href=(format!("/logs?function={}&instance={}", one.function, one.instance)) { "Log" }
                }
                (ports(inside.as_ref()))
                (family(&all, &one))
            }
        }
        (processes(inside.as_ref()))
        (from_outside(&execs.unwrap_or_default()))
    };
    page.show(live, html! {})
}

type Numbers = Option<(u32, u32, u64)>;

fn about(
    one: &SandboxInfo,
    memory: Option<SandboxMemory>,
    numbers: Numbers,
) -> Vec<(&'static str, Markup)> {
    let now = now_ms();
    let mut pairs = vec![
        ("Of", html! { a href=(format!("/functions/{}", one.function)) { (one.function) } }),
        ("Instance", html! { "#" (one.instance) }),
        ("Age", html! { (age(now.saturating_sub(one.created_ms) / 1000)) }),
        ("Time-out", html! { (time_out(one, now)) }),
    ];
    if let Some((pid, connections, served)) = numbers {
        pairs.push(("Process", html! { @if pid == 0 { "none" } @else { (pid) } }));
        pairs.push(("Connections", html! { (connections) ", served " (served) }));
    }
    match memory {
        Some(memory) => pairs.push(("Memory", html! {
            (bytes(memory.private)) " private, " (bytes(memory.shared)) " shared, " (bytes(memory.pss)) " proportional"
        })),
        None => pairs.extend(memory_of_paused(one).map(|memory| ("Memory", memory))),
    }
    if let Some(NetworkUsage { sent_bytes, received_bytes }) = one.network {
        pairs.push((
            "TCP to the outside",
            html! { (bytes(sent_bytes)) " sent, " (bytes(received_bytes)) " received" },
        ));
    }
    for (name, value) in one.metadata.iter().take(32) {
        pairs.push(("Metadata", html! { code { (name) } " " (value) }));
    }
    pairs
}

/// Where the memory of a sandbox is, if that is paused.
fn memory_of_paused(one: &SandboxInfo) -> Option<Markup> {
    Some(match (one.state.as_deref()?, &one.memory_kept) {
        ("paused", Some(why)) => html! { "kept, since it could not be written: " (why) },
        ("paused", None) => html! { "being written" },
        _ if is_paused(one) => html! { "given up" },
        _ => return None,
    })
}

fn ports(inside: Option<&Inside>) -> Markup {
    html! {
        h3 { "Ports" }
        @match inside {
            Some(inside) if !inside.ports.is_empty() => {
                ul.chips { @for (port, address) in &inside.ports { li { b { (port) } " " span.hint { (address) } } } }
            }
            Some(_) => { p.hint { "Nothing listens." } }
            None => { p.hint { "It is paused; looking would wake it." } }
        }
    }
}

/// The sandbox in the tree of forks.
fn family(all: &[SandboxInfo], one: &SandboxInfo) -> Markup {
    let children: Vec<_> = all
        .iter()
        .filter(|other| {
            other.forked_from.as_ref().is_some_and(|from| from.instance == one.instance)
        })
        .collect();
    html! {
        h3 { "Forks" }
        @if let Some(from) = &one.forked_from {
            p { "Copy of "
                @if all.iter().any(|other| other.instance == from.instance) { a href=(address(&from.name)) { (from.name) } }
                @else { (from.name) " (#" (from.instance) ", ended)" }
            }
        }
        @if children.is_empty() { p.hint { "None was made of it." } }
        ul.chips { @for child in children { li { a href=(address(&child.name)) { (child.name) } } } }
    }
}

fn processes(inside: Option<&Inside>) -> Markup {
    let Some(inside) = inside else { return html! {} };
    html! {
        section.card {
            h2 { "Processes" }
            @if let Some(problem) = &inside.problem { p.hint { (problem) } }
            @if !inside.processes.is_empty() { div.scroll { table {
                thead { tr { th.number { "PID" } th.number { "Parent" } th { "State" } th.number { "Threads" } th { "Command" } } }
                tbody { @for process in &inside.processes { tr {
                    td.number { (process.pid) } td.number { (process.parent) } td { (process.state) } td.number { (process.threads) }
                    td { code { (process.command) } }
                } } }
            } } }
        }
    }
}

fn from_outside(execs: &[ExecInfo]) -> Markup {
    html! {
        @if !execs.is_empty() { section.card {
            h2 { "Started from outside" }
            div.scroll { table {
                thead { tr { th.number { "Number" } th { "Command" } th { "State" } th.number { "Age" } } }
                tbody { @for exec in execs { tr {
                    td.number { (exec.id) }
                    td { code { (exec.argv.join(" ").chars().take(200).collect::<String>()) } @if exec.terminal { span.hint { " terminal" } } }
                    td { (what_became(&exec.state)) }
                    td.number { (age(exec.age_s)) }
                } } }
            } }
        } }
    }
}

fn what_became(state: &ExecState) -> String {
    match state {
        ExecState::Failed { reason, .. } => reason.clone(),
        other => other.to_string(),
    }
}

fn refused(session: &Session, error: &SandboxProblem) -> Response {
    let status = match error {
        SandboxProblem::Wrong(_) => StatusCode::BAD_REQUEST,
        SandboxProblem::Unknown(_) => StatusCode::NOT_FOUND,
        SandboxProblem::Refused(_) | SandboxProblem::Missing(_) => StatusCode::CONFLICT,
    };
    problem(session, status, &error.to_string())
}

/// After something was done: the page of the sandbox, or why it was not.
fn done(
    app: &App,
    session: &Session,
    what: &str,
    outcome: Result<SandboxInfo, SandboxProblem>,
) -> Response {
    match outcome {
        Ok(info) => {
            app.note(&info.name, what);
            Redirect::to(&address(&info.name)).into_response()
        }
        Err(error) => refused(session, &error),
    }
}

async fn pause(
    State(app): State<App>,
    Path(name): Path<String>,
    Extension(session): Extension<Session>,
) -> Response {
    done(&app, &session, "paused", app.admin.sandboxes.pause(&name).await)
}

async fn resume(
    State(app): State<App>,
    Path(name): Path<String>,
    Extension(session): Extension<Session>,
) -> Response {
    done(&app, &session, "resumed", app.admin.sandboxes.resume(&name).await)
}

async fn fork(
    State(app): State<App>,
    Path(name): Path<String>,
    Extension(session): Extension<Session>,
) -> Response {
    done(&app, &session, &format!("forked from {name}"), app.admin.sandboxes.fork(&name, "").await)
}

async fn kill(
    State(app): State<App>,
    Path(name): Path<String>,
    Extension(session): Extension<Session>,
) -> Response {
    let killed = app.admin.sandboxes.kill(&name);
    app.admin.sandboxes.written().await;
    match killed {
        Ok(info) => {
            app.note(&info.name, "killed");
            Redirect::to("/sandboxes").into_response()
        }
        Err(error) => refused(&session, &error),
    }
}

#[derive(Deserialize)]
struct Creation {
    function: String,
    #[serde(default)]
    name: String,
}

async fn create(
    State(app): State<App>,
    Extension(session): Extension<Session>,
    Form(wanted): Form<Creation>,
) -> Response {
    let Creation { function, name } = wanted;
    let new = NewSandbox { name: name.trim().to_owned(), function, ..NewSandbox::default() };
    done(&app, &session, "created", app.admin.sandboxes.create(new).await)
}

#[cfg(test)]
mod tests {
    use super::*;
    use thaw_node::sandboxes::ForkedFrom;

    fn sandbox(instance: u64, from: Option<u64>) -> SandboxInfo {
        SandboxInfo {
            egress: None,
            usage: None,
            network: None,
            volumes: Vec::new(),
            name: format!("s{instance}"),
            instance,
            function: "f".parse().unwrap(),
            version: 1,
            created_ms: 0,
            deadline_ms: None,
            timeout_s: None,
            on_timeout: Default::default(),
            metadata: BTreeMap::new(),
            forked_from: from.map(|instance| ForkedFrom { name: format!("s{instance}"), instance }),
            paused: false,
            state: None,
            memory_kept: None,
        }
    }

    #[test]
    fn forks_stand_below_what_they_were_made_of() {
        let all = [(1, None), (2, Some(1)), (3, None), (4, Some(2)), (5, Some(1)), (6, Some(99))]
            .map(|(instance, from)| sandbox(instance, from));
        let found: Vec<_> = tree(&all).iter().map(|(depth, one)| (*depth, one.instance)).collect();
        assert_eq!(found, [(0, 1), (1, 2), (2, 4), (1, 5), (0, 3), (0, 6)]);
    }

    #[test]
    fn a_long_line_of_forks_is_shown_in_full_and_not_too_deep() {
        let all: Vec<_> = (1..500).map(|n| sandbox(n, (n > 1).then(|| n - 1))).collect();
        let found = tree(&all);
        assert_eq!(found.len(), all.len());
        assert_eq!(found.last().unwrap().0, DEPTH_MAX);
    }
}
