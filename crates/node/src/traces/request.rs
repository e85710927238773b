//! The spans of a request: that of the gateway, and within it the wait for an instance, the boot
//! with its phases, and the execution.
//!
//! A sandbox reports the phases of its boot by itself, perhaps after its answer. So they are looked
//! up among recent boots when the request is sent. What a sandbox says is kept within its request.

use super::Record;
use super::span::{Kind, Span, unix_ns};
use crate::boots::{BootRecord, RecentBoots};
use crate::edge::{Passage, RequestId};
use hyper::header::{HOST, HeaderName, USER_AGENT};
use hyper::{Method, Request, Version};
use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::SystemTime;
use thaw_home::clock::monotonic_ns;
use thaw_home::tenants::TenantName;

/// Who has come, and how.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Came {
    pub peer: SocketAddr,
    pub is_tls: bool,
    /// When, in nanoseconds of `CLOCK_MONOTONIC`.
    pub since_ns: u64,
}

/// A request that is recorded, on its way.
#[derive(Debug)]
pub(crate) struct RequestTrace {
    since_ns: u64,
    start_ns: u64,
    span: Span,
    /// What the span's name begins with.
    method: &'static str,
    placed: Mutex<Option<Placed>>,
}

/// What serves a request.
#[derive(Clone, Debug)]
struct Placed {
    instance: u64,
    version: u32,
    tenant: String,
    at_ns: u64,
}

/// A request that is over.
#[derive(Debug)]
pub(crate) struct Seen {
    /// Its own span, but for the boot.
    span: Span,
    /// The clock's time at the beginning, in nanoseconds of `CLOCK_MONOTONIC`.
    since_ns: u64,
    placed: Option<Placed>,
}

/// Boots by the number of the instance and the time of the request that has caused them.
pub(super) struct Boots(HashMap<(u64, u64), BootRecord>);

impl Boots {
    /// The boots that these records had.
    pub fn of(records: &[Record], boots: &RecentBoots) -> Self {
        let wanted = records.iter().filter_map(|record| match record {
            Record::Request(seen) => Some((seen.placed.as_ref()?.instance, seen.since_ns)),
            Record::Span(_) => None,
        });
        Self(boots.caused_by(&wanted.collect()))
    }
}

impl RequestTrace {
    pub fn new<B>(id: RequestId, request: &Request<B>, came: Came) -> Arc<Self> {
        let waited = monotonic_ns().saturating_sub(came.since_ns);
        let start_ns = unix_ns(SystemTime::now()).saturating_sub(waited);
        let uri = request.uri();
        let text = |name: HeaderName| {
            request.headers().get(name).and_then(|value| value.to_str().ok()).unwrap_or_default()
        };
        let host = uri.authority().map_or_else(|| text(HOST), |authority| authority.as_str());
        let version = match request.version() {
            Version::HTTP_2 => "2",
            Version::HTTP_10 => "1.0",
            _ => "1.1",
        };
        let mut span = Span::begun(id, Kind::Server, String::new(), start_ns);
        let method = known(request.method());
        span.set("http.request.method", method);
        if method == "_OTHER" {
            span.set("http.request.method_original", request.method().as_str());
        }
        span.set("url.path", uri.path());
        span.set("url.scheme", if came.is_tls { "https" } else { "http" });
        span.set("server.address", without_port(host));
        span.set("client.address", &*came.peer.ip().to_string());
        span.set("network.protocol.version", version);
        span.set("user_agent.original", text(USER_AGENT));
        let placed = Mutex::default();
        Arc::new(Self { since_ns: came.since_ns, start_ns, span, method, placed })
    }

    /// An instance of this version of a function has it. The last one counts.
    pub fn placed(&self, instance: u64, version: u32, tenant: &TenantName) {
        *self.placed.lock().expect("no holder panics") = Some(Placed {
            instance,
            version,
            tenant: tenant.label().to_owned(),
            at_ns: monotonic_ns(),
        });
    }

    #[cfg(test)]
    pub fn placed_for_test(&self, instance: u64) {
        *self.placed.lock().unwrap() =
            Some(Placed { instance, version: 1, tenant: String::new(), at_ns: monotonic_ns() });
    }

    /// It is over.
    pub fn finish(&self, passage: &Passage) -> Record {
        let placed = self.placed.lock().expect("no holder panics").take();
        let mut span = self.span.clone();
        let took = monotonic_ns().saturating_sub(self.since_ns);
        span.end_ns = self.start_ns.saturating_add(took);
        let method = if self.method == "_OTHER" { "HTTP" } else { self.method };
        span.name = match &passage.function {
            Some(function) => format!("{method} {function}"),
            None => method.to_owned(),
        };
        if let Some(function) = &passage.function {
            span.set("faas.name", function.as_str());
            span.set("faas.trigger", "http");
        }
        if let Some(placed) = &placed {
            span.set("faas.version", &*placed.version.to_string());
            span.set("faas.instance", &*placed.instance.to_string());
            span.set("thaw.tenant", &*placed.tenant);
        }
        if let Some(status) = passage.status {
            span.set("http.response.status_code", u64::from(status));
        }
        span.set("http.response.body.size", passage.sent);
        let is_failed = passage.status.is_some_and(|status| status >= 500);
        let error = passage.error.map(str::to_owned);
        let error = error.or_else(|| is_failed.then(|| passage.status.unwrap_or(0).to_string()));
        if let Some(error) = &error {
            span.set("error.type", &**error);
        }
        // What a client has done wrong is no error of a server (semantic conventions of HTTP).
        span.error = error.filter(|_| is_failed);
        Record::Request(Box::new(Seen { span, since_ns: self.since_ns, placed }))
    }
}

impl Seen {
    /// Spans without those of a boot.
    pub fn spans_at_least(&self) -> u64 {
        if self.placed.is_some() { 3 } else { 1 }
    }

    /// All of them.
    pub(super) fn spans(mut self, boots: &Boots) -> Vec<Span> {
        let Some(placed) = self.placed.take() else { return vec![self.span] };
        let boot = boots.0.get(&(placed.instance, self.since_ns));
        self.span.set("faas.coldstart", boot.is_some());
        let mut children = Vec::new();
        match boot {
            Some(boot) => self.boot(boot, &mut children),
            None => {
                let at = self.wall(placed.at_ns.saturating_sub(self.since_ns), self.span.start_ns);
                self.step("queue", (self.span.start_ns, at), &mut children);
                self.step("execution", (at, self.span.end_ns), &mut children);
            }
        }
        children.insert(0, self.span);
        children
    }

    /// The time so many nanoseconds after the beginning: not before `earliest`, nor after the end.
    fn wall(&self, after_ns: u64, earliest: u64) -> u64 {
        let at = self.span.start_ns.saturating_add(after_ns);
        at.min(self.span.end_ns).max(earliest)
    }

    fn step(&self, name: &str, times: (u64, u64), into: &mut Vec<Span>) -> RequestId {
        let span = Span::child(self.span.id, name, times);
        let id = span.id;
        into.push(span);
        id
    }

    fn boot(&self, boot: &BootRecord, into: &mut Vec<Span>) {
        let phases = &boot.phases;
        let begin = self.wall(phases.zygote, self.span.start_ns);
        self.step("queue", (self.span.start_ns, begin), into);
        let place = into.len();
        let whole = self.step("boot", (begin, begin), into);
        let mut end = begin;
        for (name, after) in [
            ("commanded", phases.received),
            ("mapped", phases.mapped),
            ("entered", phases.first_instruction),
        ] {
            let Some(after) = after else { continue };
            let next = self.wall(after, end);
            into.push(Span::child(whole, name, (end, next)));
            end = next;
        }
        into[place].end_ns = end;
        into[place].set("thaw.boot.kind", boot.kind.name());
        let execution = into.len();
        self.step("execution", (end, self.span.end_ns), into);
        if let Some(answered) = phases.first_byte {
            let first_byte = self.wall(answered, end);
            into.push(Span::child(into[execution].id, "answered", (end, first_byte)));
        }
    }
}

/// Methods have few names in traces: clients make others up.
pub fn known(method: &Method) -> &'static str {
    const ALL: [&str; 9] =
        ["CONNECT", "DELETE", "GET", "HEAD", "OPTIONS", "PATCH", "POST", "PUT", "TRACE"];
    ALL.into_iter().find(|name| *name == method.as_str()).unwrap_or("_OTHER")
}

fn without_port(host: &str) -> &str {
    match host.rsplit_once(':') {
        Some((name, port)) if port.bytes().all(|digit| digit.is_ascii_digit()) => name,
        _ => host,
    }
}
