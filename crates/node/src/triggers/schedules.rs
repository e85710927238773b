//! Schedules: when they fire, and that they fire once for each time.

use super::Triggers;
use super::attempts::terms_of;
use super::cloudevents;
use super::cron::Cron;
use super::ledger::Ledger;
use super::record::{NewInvocation, NotQueued, Origin, QueuedRequest, ScheduleRow, Terms};
use crate::clock::wall_ms;
use crate::config::{CatchUp, Overlap, Schedule};
use crate::node::NodeState;
use hyper::header::{HeaderMap, HeaderName, HeaderValue};
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;
use tokio::time::sleep;

/// A time that is later than this was missed.
const LATE_MS: u64 = 60_000;
/// A time that is done with and lies further ahead than this is of a wrong clock.
const AHEAD_MS: u64 = 24 * 3600 * 1000;
/// How long what is known of a schedule is kept when no function has it any more.
const KEPT_MS: u64 = 14 * 24 * 3600 * 1000;
/// How often it is looked whether one is due.
const LOOK: Duration = Duration::from_millis(500);

/// A schedule, as it is shown. Times are milliseconds since 1970.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
pub struct ScheduleInfo {
    /// Its function.
    pub function: String,
    /// Its name.
    pub name: String,
    /// When it fires.
    pub cron: String,
    /// Where that is the time.
    pub timezone: String,
    /// When it fires next; none: never.
    pub next_ms: Option<u64>,
    /// Times until then are done with; none: the node has not looked at it yet.
    pub until_ms: Option<u64>,
    /// The time that it has last fired for.
    pub fired_ms: Option<u64>,
    /// The invocation of that time.
    pub invocation: Option<String>,
    /// Times that were left out.
    pub skipped: u64,
    /// Why the last time was left out, if it was.
    pub problem: Option<String>,
}

impl ScheduleInfo {
    /// A schedule, and what is known of it.
    pub(super) fn new(
        function: &str,
        schedule: &Schedule,
        row: Option<&ScheduleRow>,
        now_ms: u64,
    ) -> Self {
        let row = row.filter(|row| row.spec == spec(schedule));
        let from = row.map_or(now_ms, |row| row.until_ms.max(now_ms));
        Self {
            function: function.to_owned(),
            name: schedule.name.to_string(),
            cron: schedule.cron.to_string(),
            timezone: schedule.timezone.name().to_owned(),
            next_ms: schedule.cron.next_after(from, &schedule.timezone.zone()),
            until_ms: row.map(|row| row.until_ms),
            fired_ms: row.and_then(|row| row.fired_ms),
            invocation: row.and_then(|row| row.invocation).map(|id| id.to_string()),
            skipped: row.map_or(0, |row| row.skipped),
            problem: row.and_then(|row| row.problem.clone()),
        }
    }
}

/// The name of what is known of a schedule.
pub(super) fn row_name(function: &str, schedule: &Schedule) -> String {
    format!("{function}/{}", schedule.name)
}

fn spec(schedule: &Schedule) -> String {
    format!("{} {}", schedule.cron, schedule.timezone.name())
}

/// What there is to do for a schedule.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Due {
    Nothing,
    /// It begins now.
    Begin,
    /// It fires for this time.
    Fire(u64),
    /// This time, and those before it, were missed.
    Missed(u64),
}

/// What there is to do now.
fn due(schedule: &Schedule, row: Option<&ScheduleRow>, now_ms: u64) -> Due {
    let Some(row) = row.filter(|row| row.spec == spec(schedule)) else { return Due::Begin };
    if row.until_ms > now_ms.saturating_add(AHEAD_MS) {
        return Due::Begin;
    }
    let last = last_until(&schedule.cron, schedule, now_ms);
    let Some(time) = last.filter(|time| *time > row.until_ms) else { return Due::Nothing };
    match schedule.catch_up {
        CatchUp::None if now_ms - time > LATE_MS => Due::Missed(time),
        CatchUp::None | CatchUp::Last => Due::Fire(time),
    }
}

fn last_until(cron: &Cron, schedule: &Schedule, now_ms: u64) -> Option<u64> {
    cron.last_until(now_ms, &schedule.timezone.zone())
}

/// What has come of looking at a schedule, for metrics and the log.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Looked {
    Nothing,
    Fired,
    /// A time was left out, for this reason.
    Skipped(String),
}

/// Does what there is to do for a schedule: that it has fired, and what it has queued, are on the
/// disk together.
pub(super) fn look(
    ledger: &mut Ledger,
    function: &str,
    schedule: &Schedule,
    terms: &Terms,
    now_ms: u64,
) -> Looked {
    let name = row_name(function, schedule);
    let row = ledger.schedule(&name).cloned();
    let (time, reason) = match due(schedule, row.as_ref(), now_ms) {
        Due::Nothing => return Looked::Nothing,
        Due::Begin => {
            ledger.set_schedule(&name, begun(schedule, now_ms));
            return Looked::Nothing;
        }
        Due::Missed(time) => (time, Some("the node did not run then".to_owned())),
        Due::Fire(time) => (time, None),
    };
    let mut row = row.unwrap_or_else(|| begun(schedule, now_ms));
    let is_open = row.invocation.is_some_and(|id| ledger.is_open(id));
    let reason = reason.or_else(|| {
        let overlaps = schedule.overlap == Overlap::Skip && is_open;
        overlaps.then(|| "its last invocation was not done".to_owned())
    });
    row.until_ms = time;
    let reason = match reason {
        Some(reason) => Some(reason),
        None => match ledger.queue(invocation(function, schedule, time), terms, now_ms) {
            Ok(queued) => {
                (row.fired_ms, row.invocation) = (Some(time), Some(queued.id));
                None
            }
            Err(NotQueued::Full(reason)) => Some(reason),
            Err(error) => Some(error.to_string()),
        },
    };
    row.skipped += u64::from(reason.is_some());
    row.problem.clone_from(&reason);
    ledger.set_schedule(&name, row);
    reason.map_or(Looked::Fired, Looked::Skipped)
}

fn begun(schedule: &Schedule, now_ms: u64) -> ScheduleRow {
    ScheduleRow {
        spec: spec(schedule),
        until_ms: now_ms,
        fired_ms: None,
        invocation: None,
        skipped: 0,
        problem: None,
    }
}

/// The request of a schedule for a time: an event that says which.
fn invocation(function: &str, schedule: &Schedule, time_ms: u64) -> NewInvocation {
    let source = format!("/functions/{function}/schedules/{}", schedule.name);
    let mut headers = HeaderMap::new();
    for (name, value) in &schedule.headers {
        if let (Ok(name), Ok(value)) =
            (HeaderName::from_bytes(name.0.as_bytes()), HeaderValue::from_str(&value.0))
        {
            headers.append(name, value);
        }
    }
    let about = ("thaw.schedule", &*source, &*format!("{}-{time_ms}", schedule.name));
    cloudevents::describe(&mut headers, about, time_ms);
    let pair = |(name, value): (&HeaderName, &HeaderValue)| {
        (name.to_string(), value.to_str().unwrap_or_default().to_owned())
    };
    NewInvocation {
        function: function.to_owned(),
        origin: Origin::Schedule(schedule.name.to_string()),
        request: QueuedRequest {
            method: schedule.method().to_owned(),
            path: schedule.path.0.clone(),
            headers: headers.iter().map(pair).collect(),
            body: schedule.body.clone().unwrap_or_default().into_bytes(),
        },
        key: None,
    }
}

/// Looks at all schedules of the functions that are served, until the task is dropped.
pub(super) async fn fire_all(triggers: Arc<Triggers>, node: Arc<NodeState>) {
    loop {
        if !node.is_draining() {
            look_at_all(&triggers, &node).await;
        }
        sleep(LOOK).await;
    }
}

async fn look_at_all(triggers: &Arc<Triggers>, node: &Arc<NodeState>) {
    let mut known = Vec::new();
    for service in node.functions() {
        let (name, config) = (service.name().to_string(), service.config());
        if let Some(terms) = (!config.schedules.is_empty()).then(|| terms_of(node, &name)).flatten()
        {
            known.push((name, config.schedules.clone(), terms));
        }
    }
    let now_ms = wall_ms();
    let looked = triggers.writer.ask(move |ledger| {
        let mut rows = BTreeSet::new();
        let mut looked = Vec::new();
        for (function, schedules, terms) in &known {
            for schedule in schedules {
                rows.insert(row_name(function, schedule));
                let done = look(ledger, function, schedule, terms, now_ms);
                if done != Looked::Nothing {
                    looked.push((function.clone(), schedule.name.to_string(), done));
                }
            }
        }
        forget_others(ledger, &rows, now_ms);
        looked
    });
    // The log has it.
    let Ok(looked) = looked.await else { return };
    for (function, schedule, done) in looked {
        let outcome = match &done {
            Looked::Skipped(reason) => {
                tracing::warn!(function, schedule, "a schedule has not fired: {reason}");
                "skipped"
            }
            _ => {
                tracing::info!(function, schedule, "a schedule has fired");
                "fired"
            }
        };
        node.metrics().triggers().scheduled(&function, &schedule, outcome);
        triggers.wake.notify_one();
    }
}

/// Forgets schedules that no function has had for long.
fn forget_others(ledger: &mut Ledger, rows: &BTreeSet<String>, now_ms: u64) {
    let old: Vec<String> = ledger
        .schedules()
        .into_iter()
        .filter(|(name, row)| !rows.contains(name) && row.until_ms.saturating_add(KEPT_MS) < now_ms)
        .map(|(name, _)| name)
        .collect();
    old.iter().for_each(|name| ledger.remove_schedule(name));
}
