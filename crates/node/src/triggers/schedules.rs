//! Schedules: when they fire, and that they fire once for each time.

use super::Triggers;
use super::attempts::terms_of;
use super::cloudevents;
use super::ledger::Ledger;
use super::record::{NewInvocation, NotQueued, Origin, Queued, QueuedRequest, ScheduleRow, Terms};
use crate::service::Services;
use crate::traces::{Producing, Tracer};
use hyper::header::{HeaderMap, HeaderName, HeaderValue};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeSet, HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;
use thaw_home::clock::wall_ms;
use thaw_home::config::{CatchUp, Overlap, Schedule};
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

/// What there is to do now; `last` is the last time of the schedule until now.
fn due(schedule: &Schedule, row: Option<&ScheduleRow>, last: Option<u64>, now_ms: u64) -> Due {
    let Some(row) = row.filter(|row| row.spec == spec(schedule)) else { return Due::Begin };
    if row.until_ms > now_ms.saturating_add(AHEAD_MS) {
        return Due::Begin;
    }
    let Some(time) = last.filter(|time| *time > row.until_ms) else { return Due::Nothing };
    match schedule.catch_up {
        CatchUp::None if now_ms - time > LATE_MS => Due::Missed(time),
        CatchUp::None | CatchUp::Last => Due::Fire(time),
    }
}

/// The times of a schedule about one moment.
#[derive(Clone, Debug)]
struct Times {
    spec: String,
    /// When they were computed.
    at_ms: u64,
    last_ms: Option<u64>,
    next_ms: Option<u64>,
}

impl Times {
    fn new(schedule: &Schedule, now_ms: u64) -> Self {
        let zone = schedule.timezone.zone();
        Self {
            spec: spec(schedule),
            at_ms: now_ms,
            last_ms: schedule.cron.last_until(now_ms, &zone),
            next_ms: schedule.cron.next_after(now_ms, &zone),
        }
    }

    /// Whether `last_ms` still is the last time.
    fn hold(&self, schedule: &Schedule, now_ms: u64) -> bool {
        let is_between = self.at_ms <= now_ms && self.next_ms.is_none_or(|next| now_ms < next);
        is_between && self.spec == spec(schedule)
    }
}

/// The times of all schedules, by the names of their rows. They are computed again only when one
/// has passed, and never by the thread that has the queue: that takes long.
#[derive(Debug, Default)]
struct Clockwork {
    times: HashMap<String, Times>,
    #[cfg(test)]
    computed: usize,
}

impl Clockwork {
    /// The last time of a schedule until now.
    fn last_until(&mut self, name: &str, schedule: &Schedule, now_ms: u64) -> Option<u64> {
        if let Some(times) = self.times.get(name)
            && times.hold(schedule, now_ms)
        {
            return times.last_ms;
        }
        #[cfg(test)]
        {
            self.computed += 1;
        }
        let times = Times::new(schedule, now_ms);
        let last = times.last_ms;
        self.times.insert(name.to_owned(), times);
        last
    }

    /// Whether all times of the functions that are served are known.
    fn is_settled(&self, services: &Services, now_ms: u64) -> bool {
        services.functions().iter().all(|service| {
            let function = service.name().as_str();
            service.config().schedules.iter().all(|schedule| {
                let times = self.times.get(&row_name(function, schedule));
                times.is_some_and(|times| times.hold(schedule, now_ms))
            })
        })
    }
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
/// disk together. `last` is the last time of the schedule until now.
pub(super) fn look(
    ledger: &mut Ledger,
    function: &str,
    schedule: &Schedule,
    last: Option<u64>,
    (terms, tracer): (&Terms, Option<&Arc<Tracer>>),
    now_ms: u64,
) -> Looked {
    let name = row_name(function, schedule);
    let row = ledger.schedule(&name).cloned();
    let (time, reason) = match due(schedule, row.as_ref(), last, now_ms) {
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
        None => match fire(ledger, function, schedule, time, (terms, tracer), now_ms) {
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

/// Queues the request of a schedule for a time.
fn fire(
    ledger: &mut Ledger,
    function: &str,
    schedule: &Schedule,
    time_ms: u64,
    (terms, tracer): (&Terms, Option<&Arc<Tracer>>),
    now_ms: u64,
) -> Result<Queued, NotQueued> {
    let mut new = invocation(function, schedule, time_ms);
    let Some(tracer) = tracer else { return ledger.queue(new, terms, now_ms) };
    let producing = Producing::begin_trace(tracer, function);
    let mut headers = HeaderMap::new();
    producing.id().write(&mut headers);
    let said = headers
        .iter()
        .map(|(name, value)| (name.to_string(), value.to_str().unwrap_or_default().to_owned()));
    // The author of a schedule may have written one.
    new.request.headers.retain(|(name, _)| !headers.contains_key(name.as_str()));
    new.request.headers.extend(said);
    let queued = ledger.queue(new, terms, now_ms)?;
    producing.finish(queued.id);
    Ok(queued)
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
pub(super) async fn fire_all(triggers: Arc<Triggers>) {
    let mut clockwork = Clockwork::default();
    loop {
        if !triggers.services.shared().is_draining() {
            clockwork = look_at_all(&triggers, clockwork).await;
        }
        sleep(LOOK).await;
    }
}

/// A function with schedules, and the last time of each until now.
struct Scheduled {
    function: String,
    schedules: Vec<(Schedule, Option<u64>)>,
    terms: Terms,
}

/// All functions with schedules.
fn scheduled(services: &Services, clockwork: &mut Clockwork, now_ms: u64) -> Vec<Scheduled> {
    let mut known = Vec::new();
    let mut rows = HashSet::new();
    for service in services.functions() {
        let (function, config) = (service.name().to_string(), service.config());
        if config.schedules.is_empty() {
            continue;
        }
        let Some(terms) = terms_of(services, &function) else { continue };
        let with_last = |schedule: &Schedule| {
            let name = row_name(&function, schedule);
            let last = clockwork.last_until(&name, schedule, now_ms);
            rows.insert(name);
            (schedule.clone(), last)
        };
        let schedules = config.schedules.iter().map(with_last).collect();
        known.push(Scheduled { function, schedules, terms });
    }
    clockwork.times.retain(|name, _| rows.contains(name));
    known
}

async fn look_at_all(triggers: &Triggers, mut clockwork: Clockwork) -> Clockwork {
    let (services, now_ms) = (&triggers.services, wall_ms());
    let known = if clockwork.is_settled(services, now_ms) {
        // Nothing takes long. A thread for each look would keep as many as the node ever had: each
        // has something to do again before it has been idle for long enough to end.
        scheduled(services, &mut clockwork, now_ms)
    } else {
        let of_all = services.clone();
        let computed = tokio::task::spawn_blocking(move || {
            let known = scheduled(&of_all, &mut clockwork, now_ms);
            (known, clockwork)
        });
        let Ok((known, computed)) = computed.await else { return Clockwork::default() };
        clockwork = computed;
        known
    };
    let tracer = services.shared().tracer().cloned();
    let looked = triggers.writer.ask(move |ledger| {
        let mut rows = BTreeSet::new();
        let mut looked = Vec::new();
        for Scheduled { function, schedules, terms } in &known {
            for (schedule, last) in schedules {
                rows.insert(row_name(function, schedule));
                let done =
                    look(ledger, function, schedule, *last, (terms, tracer.as_ref()), now_ms);
                if done != Looked::Nothing {
                    looked.push((function.clone(), schedule.name.to_string(), done));
                }
            }
        }
        forget_others(ledger, &rows, now_ms);
        looked
    });
    // The log has it.
    let Ok(looked) = looked.await else { return clockwork };
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
        services.shared().metrics().triggers().scheduled(&function, &schedule, outcome);
        triggers.wake.notify_one();
    }
    clockwork
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_computed_when_one_has_passed_and_not_at_every_look() {
        const HOUR: u64 = 3_600_000;
        let start = 500_000 * HOUR;
        let hourly: Schedule = toml::from_str("name = \"s\"\ncron = \"0 * * * *\"").unwrap();
        let mut clockwork = Clockwork::default();
        for at in (0..3600).map(|second| start + second * 1000) {
            assert_eq!(clockwork.last_until("f/s", &hourly, at), Some(start));
        }
        assert_eq!(clockwork.computed, 1);
        assert_eq!(clockwork.last_until("f/s", &hourly, start + HOUR), Some(start + HOUR));
        // The clock goes back.
        assert_eq!(clockwork.last_until("f/s", &hourly, start), Some(start));
        let other: Schedule = toml::from_str("name = \"s\"\ncron = \"30 * * * *\"").unwrap();
        assert_eq!(clockwork.last_until("f/s", &other, start), Some(start - HOUR / 2));
        assert_eq!(clockwork.computed, 4);
    }
}
