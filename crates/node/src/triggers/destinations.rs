//! Destinations: functions that are called when an invocation of another one is done, or given up.
//!
//! What a destination gets is queued in the transaction that notes the end, so that it is queued
//! once for each end, also if the daemon is killed. A chain of destinations has an end
//! ([`DEPTH_MAX`]), and stays within one tenant.

use super::cloudevents;
use super::ledger::Ledger;
use super::record::{InvocationId, NewInvocation, Origin, QueuedRequest, Record, Terms};
use super::{carried, record};
use hyper::header::{CONTENT_TYPE, HeaderMap, HeaderValue};
use serde_json::json;

/// Most destinations between an invocation and what somebody has queued.
const DEPTH_MAX: u8 = 8;

/// An invocation that has come to an end.
#[derive(Clone, Debug)]
pub(super) struct Ended {
    pub id: InvocationId,
    pub record: Record,
    /// The status of the function's answer; `None`: it was given up.
    pub status: Option<u16>,
}

/// A destination that was to be called.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Called {
    pub function: String,
    pub is_queued: bool,
}

impl Ledger {
    /// Queues what has ended since the last time for the functions that want to hear of it; `terms`
    /// says what holds for a function that is served.
    pub fn call_destinations(
        &mut self,
        now_ms: u64,
        terms: impl Fn(&str) -> Option<Terms>,
    ) -> Vec<Called> {
        let mut called = Vec::new();
        for ended in self.take_ended() {
            let own = terms(&ended.record.function).map(|terms| terms.config);
            let wanted = own.and_then(|own| match ended.status {
                Some(_) => own.on_success,
                None => own.on_failure,
            });
            let Some(function) = wanted.map(|name| name.to_string()) else { continue };
            let outcome = self.call(&ended, &function, terms(&function), now_ms);
            if let Err(why) = &outcome {
                let (id, of) = (ended.id, &ended.record.function);
                tracing::warn!(
                    function,
                    "it does not hear of the end of invocation {id} of `{of}`: {why}"
                );
            }
            called.push(Called { function, is_queued: outcome.is_ok() });
        }
        called
    }

    fn call(
        &mut self,
        ended: &Ended,
        function: &str,
        terms: Option<Terms>,
        now_ms: u64,
    ) -> Result<(), String> {
        let depth = ended.record.depth.saturating_add(1);
        if depth > DEPTH_MAX {
            return Err(format!("{DEPTH_MAX} destinations have followed each other"));
        }
        let terms = terms.ok_or("no function of that name is served")?;
        if terms.domain != ended.record.domain {
            return Err("it is another tenant's".to_owned());
        }
        let origin = Origin::Function(ended.record.function.clone());
        let request = request(ended, now_ms)?;
        let new = NewInvocation { function: function.to_owned(), origin, request, key: None };
        let queued = self.queue_behind(new, &terms, now_ms, depth);
        queued.map(drop).map_err(|why| why.to_string())
    }
}

/// A CloudEvent that says what came of an invocation.
fn request(ended: &Ended, now_ms: u64) -> Result<QueuedRequest, String> {
    let Ended { id, record, status } = ended;
    let record::Record { function, method, path, .. } = record;
    let state = if status.is_some() { "done" } else { "dead" };
    let attempts = record.attempts + u32::from(status.is_some());
    let mut body = json!({
        "id": id, "function": function, "state": state, "attempts": attempts,
        "method": method, "path": path,
    });
    match (status, &record.dead) {
        (Some(status), _) => body["status"] = json!(status),
        (None, death) => body["reason"] = json!(death.as_ref().map(|death| &death.reason)),
    }
    let mut headers = HeaderMap::new();
    let (kind, source) =
        (format!("thaw.invocation.{state}"), format!("/functions/{function}/queue"));
    cloudevents::describe(&mut headers, (&kind, &source, &id.to_string()), now_ms);
    headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
    Ok(QueuedRequest {
        method: "POST".to_owned(),
        path: "/".to_owned(),
        headers: carried(&headers)?,
        body: body.to_string().into_bytes(),
    })
}
