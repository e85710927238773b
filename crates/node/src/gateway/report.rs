//! What is written down of requests: refusals with their details, and a line of the access
//! log and a count of the answer when a request is over.

use super::refusal::{Audience, Refusal};
use crate::edge::{AccessRecord, Addresses, Passage, RequestId, Rules, beginning};
use crate::node::NodeState;
use crate::traces::RequestTrace;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};
use thaw_home::clock::monotonic_ns;
use thaw_home::config::FunctionName;

/// Most bytes of a detail that are logged.
const DETAIL_MAX: usize = 512;

/// Counts a refusal, and logs why it was.
pub(super) fn refused(
    shared: &NodeState,
    id: RequestId,
    peer: SocketAddr,
    function: Option<&FunctionName>,
    refusal: &Refusal,
) {
    shared.metrics().refused(function, refusal.status(), refusal.error());
    let Some(missing) = shared.edge().refusals().admit(Instant::now()) else { return };
    if missing > 0 {
        tracing::warn!("{missing} refusals before this one were not logged: there are too many");
    }
    let (request, error, detail) = (id.to_string(), refusal.error(), harmless(&refusal.detail()));
    let function = function.map(FunctionName::as_str).unwrap_or_default();
    let trace = id.trace();
    if refusal.status() >= 500 {
        tracing::warn!(request, trace, function, %peer, error, "refused a request: {detail}");
    } else {
        tracing::info!(request, trace, function, %peer, error, "refused a request: {detail}");
    }
}

/// A detail without what a terminal would act on, and its beginning only: it may repeat what
/// the client has sent.
fn harmless(detail: &str) -> String {
    thaw_sandbox::escape(beginning(detail, DETAIL_MAX).as_bytes())
}

/// Who reads what a client with these addresses is told.
pub(super) fn audience(shared: &NodeState, addresses: Addresses) -> Audience {
    match shared.edge().operators().has(addresses) {
        true => Audience::Operator,
        false => Audience::Public,
    }
}

/// What is said of the client with these addresses. Nothing is of who calls a function through the
/// admin API: he has shown that he may, and calls it by its name.
pub(super) fn rules_for(shared: &NodeState, addresses: Addresses) -> Option<Arc<Rules>> {
    shared.edge().rules().filter(|_| audience(shared, addresses) == Audience::Public)
}

/// A request on its way. When it is dropped, the request is over.
pub(super) struct Account {
    shared: Arc<NodeState>,
    since_ns: u64,
    record: Option<Arc<AccessRecord>>,
    /// Its spans, if they are recorded.
    pub trace: Option<Arc<RequestTrace>>,
    pub passage: Passage,
}

impl Account {
    pub fn begin(
        shared: &Arc<NodeState>,
        since_ns: u64,
        record: Option<Arc<AccessRecord>>,
    ) -> Self {
        Self { shared: shared.clone(), since_ns, record, trace: None, passage: Passage::default() }
    }
}

impl Drop for Account {
    fn drop(&mut self) {
        let duration = Duration::from_nanos(monotonic_ns().saturating_sub(self.since_ns));
        self.passage.duration = duration;
        let Passage { function, status, .. } = &self.passage;
        if let Some(status) = status {
            self.shared.metrics().responded(function.as_ref(), *status, duration);
        }
        if let (Some(trace), Some(tracer)) = (&self.trace, self.shared.tracer()) {
            tracer.record(trace.finish(&self.passage));
        }
        if let Some(record) = &self.record {
            self.shared.edge().log(record, &self.passage);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_clients_send_does_not_drive_a_terminal_or_fill_the_log() {
        let name = format!("a\u{202e}\u{1b}[2J{}", "x".repeat(20_000));
        let line = harmless(&Refusal::UnknownFunction(Some(name)).detail());
        assert!(line.len() < 2 * DETAIL_MAX, "{}", line.len());
        assert!(!line.contains(['\u{202e}', '\u{1b}']), "{line}");
    }
}
