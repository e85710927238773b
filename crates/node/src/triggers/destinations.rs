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
            let function = match destination(&ended, terms(&ended.record.function)) {
                Ok(Some(function)) => function,
                Ok(None) => continue,
                Err(why) => {
                    tracing::warn!(function = ended.record.function, "{why}");
                    continue;
                }
            };
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

/// The function that is to hear of an end.
///
/// # Errors
/// Nobody knows, since the function of the invocation is gone: one sentence for the log.
fn destination(ended: &Ended, own: Option<Terms>) -> Result<Option<String>, String> {
    let Some(Terms { config, .. }) = own else {
        return Err(format!(
            "nobody hears of the end of invocation {}: its function is not served any more, and \
             with it went its `on_success` and `on_failure`",
            ended.id
        ));
    };
    let wanted = if ended.status.is_some() { config.on_success } else { config.on_failure };
    Ok(wanted.map(|name| name.to_string()))
}

/// The id of the event that tells of an end: the attempts of the invocation have its own, and a dead
/// letter that is queued again may die again.
fn event_id(ended: &Ended) -> String {
    match (&ended.status, &ended.record.dead) {
        (None, Some(death)) => format!("{}-dead-{}", ended.id, death.at_ms),
        (None, None) => format!("{}-dead", ended.id),
        (Some(_), _) => format!("{}-done", ended.id),
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
    cloudevents::describe(&mut headers, (&kind, &source, &event_id(ended)), now_ms);
    headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
    Ok(QueuedRequest {
        method: "POST".to_owned(),
        path: "/".to_owned(),
        headers: carried(&headers)?,
        body: body.to_string().into_bytes(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ended(status: Option<u16>) -> Ended {
        let record = serde_json::from_value(json!({
            "function": "f", "domain": null, "origin": "client", "method": "POST", "path": "/",
            "created_ms": 1, "expires_ms": 2, "due_ms": 1, "attempts": 3, "deferrals": 0,
            "bytes": 1, "last": null, "dead": status.is_none().then(|| json!({"at_ms": 9, "reason": "r"})),
        }));
        Ended { id: InvocationId(7), record: record.unwrap(), status }
    }

    #[test]
    fn each_end_has_an_id_that_no_attempt_and_no_other_end_has() {
        let again = {
            let mut again = ended(None);
            again.record.dead.as_mut().unwrap().at_ms = 10;
            again
        };
        let mut ids: Vec<_> = [ended(None), again, ended(Some(200))].iter().map(event_id).collect();
        ids.push(InvocationId(7).to_string());
        ids.sort();
        ids.dedup();
        assert_eq!(ids.len(), 4, "{ids:?}");
        let event = request(&ended(None), 9).unwrap();
        assert!(event.headers.contains(&("ce-id".to_owned(), event_id(&ended(None)))));
    }

    #[test]
    fn an_end_of_a_function_that_is_gone_is_told_to_the_log() {
        let why = destination(&ended(None), None).unwrap_err();
        assert!(why.contains(&InvocationId(7).to_string()) && why.contains("not served"), "{why}");
        let terms = Terms { config: Default::default(), domain: None, tenant_bytes: None };
        assert_eq!(destination(&ended(None), Some(terms)), Ok(None));
    }
}
