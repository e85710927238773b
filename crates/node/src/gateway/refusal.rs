//! What a client gets when no function answers it: for the public a general reason and the
//! id of its request; for the operator, and for the log beside that id, what went wrong.

use crate::edge::RequestId;
use crate::health::Verdict;
use crate::service::{PlaceError, Service};
use serde_json::json;
use std::time::Duration;
use thaw_http::head::HeadError;

/// The gateway's own answer to a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// 400: the head is not HTTP/1, or cannot be routed.
    BadHead(HeadError),
    /// 401: the client has to show who it is.
    Unauthorized {
        /// The function.
        function: String,
        /// How to.
        challenge: &'static str,
        /// What is wrong with what it has shown.
        why: String,
    },
    /// 404: no function has that name.
    UnknownFunction(Option<String>),
    /// 408: the head did not arrive in time.
    HeadTooSlow(Duration),
    /// 408: the body of the request stopped coming.
    BodyTooSlow(Duration),
    /// 413: the body of the request is larger than the function takes.
    BodyTooLarge {
        /// The function.
        function: String,
        /// Bytes that it takes.
        most: u64,
    },
    /// 421: the host's certificate is not the one that the client was shown.
    OtherCertificate,
    /// 421: the function does not speak HTTP.
    NotHttp {
        /// The function.
        function: String,
        /// How it is reached.
        way: String,
    },
    /// 429: the client has used up what the function takes of it.
    TooManyRequests {
        /// The function.
        function: String,
        /// When to try again.
        retry_after: Duration,
    },
    /// 431.
    HeadTooLarge,
    /// 502: the instance ended, or could not start, before it answered.
    InstanceDied {
        /// The function.
        function: String,
        /// What became of the instance.
        reason: String,
    },
    /// 502: the instance has answered something else than HTTP.
    BadResponse {
        /// The function.
        function: String,
        /// What was wrong.
        reason: String,
    },
    /// 503: the node lacks a volume or a secret of the function.
    NotSetUp {
        /// The function.
        function: String,
        /// What is missing, and the command that brings it.
        reason: String,
    },
    /// 503: a part of the function is elsewhere and could not be fetched.
    NotFetched {
        /// The function.
        function: String,
        /// What is wrong.
        reason: String,
    },
    /// 503: the instance that was asleep cannot be woken.
    CannotWake {
        /// The function.
        function: String,
        /// What is wrong.
        reason: String,
    },
    /// 503: every instance is busy and no more may be started.
    NoCapacity {
        /// The function.
        function: String,
        /// Which limit is reached.
        reason: String,
        /// When to try again.
        retry_after: Duration,
    },
    /// 503: the function's tenant has used up a quota.
    QuotaReached {
        /// The function.
        function: String,
        /// Which quota is reached.
        reason: String,
        /// When to try again.
        retry_after: Duration,
    },
    /// 503: instances of the function have crashed too often.
    BackingOff {
        /// The function.
        function: String,
        /// When to try again.
        retry_after: Duration,
    },
    /// 422: another request had the same idempotency key.
    KeyReused {
        /// The function.
        function: String,
    },
    /// 400: the event, or the invocation for the queue, is not valid.
    BadEvent(String),
    /// 503: the queue of the function takes no more.
    QueueFull {
        /// The function.
        function: String,
        /// Which bound is reached.
        reason: String,
    },
    /// 503: the queue cannot be written.
    QueueUnavailable {
        /// The function.
        function: String,
        /// What is wrong.
        reason: String,
    },
    /// 503: as many requests are under way on the node as it has descriptors for.
    NodeFull,
    /// 503: the node is going down.
    Draining,
    /// 504: the deadline that the client has set for its call has passed, as the function has found, too.
    DeadlinePassed {
        /// The function.
        function: String,
    },
    /// 504: no response byte within the function's timeout.
    Timeout {
        /// The function.
        function: String,
        /// The timeout.
        timeout: Duration,
    },
}

/// Who reads a refusal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Audience {
    /// Anybody.
    Public,
    /// Who has called the function through the admin API.
    Operator,
}

/// What is said of all refusals of one kind.
struct Kind {
    status: u16,
    /// For the operator's programs and metrics.
    error: &'static str,
    /// For anybody's.
    public_error: &'static str,
    /// One sentence for anybody.
    reason: &'static str,
}

impl Refusal {
    /// What a client of a function is told when no instance could have its connection.
    pub(super) fn of(service: &Service, error: PlaceError) -> Self {
        let function = service.name().to_string();
        match error {
            PlaceError::InstanceDied(reason) => Self::InstanceDied { function, reason },
            PlaceError::Lacking(reason) => Self::NotSetUp { function, reason },
            PlaceError::NotFetched(reason) => Self::NotFetched { function, reason },
            PlaceError::CannotWake(reason) => Self::CannotWake { function, reason },
            PlaceError::NoCapacity { reason, retry_after } => {
                Self::NoCapacity { function, reason, retry_after }
            }
            PlaceError::QuotaReached { reason, retry_after } => {
                Self::QuotaReached { function, reason, retry_after }
            }
            PlaceError::BackingOff { retry_after } => Self::BackingOff { function, retry_after },
            PlaceError::Draining => Self::Draining,
        }
    }

    /// What it says of the function; `None`: nothing, it is the client's fault or there was no
    /// room.
    pub(super) fn verdict(&self) -> Option<Verdict> {
        match self {
            Self::InstanceDied { .. }
            | Self::BadResponse { .. }
            | Self::NotSetUp { .. }
            | Self::CannotWake { .. }
            | Self::Timeout { .. } => Some(Verdict::Failed),
            Self::BadHead(_)
            | Self::BadEvent(_)
            | Self::KeyReused { .. }
            | Self::QueueFull { .. }
            | Self::QueueUnavailable { .. }
            | Self::Unauthorized { .. }
            | Self::BodyTooLarge { .. }
            | Self::OtherCertificate
            | Self::TooManyRequests { .. }
            | Self::NodeFull
            | Self::UnknownFunction(_)
            | Self::HeadTooSlow(_)
            | Self::BodyTooSlow(_)
            | Self::NotHttp { .. }
            | Self::HeadTooLarge
            | Self::NotFetched { .. }
            | Self::NoCapacity { .. }
            | Self::QuotaReached { .. }
            | Self::BackingOff { .. }
            | Self::DeadlinePassed { .. }
            | Self::Draining => None,
        }
    }

    /// What programs and people are told of its kind.
    fn kind(&self) -> Kind {
        let of = |status, error, reason| Kind { status, error, public_error: error, reason };
        let as_public = |public_error, kind: Kind| Kind { public_error, ..kind };
        let unavailable = |error| {
            let reason = "the service cannot take the request now; try again later";
            as_public("unavailable", of(503, error, reason))
        };
        match self {
            Self::BadHead(HeadError::TooLarge) | Self::HeadTooLarge => {
                of(431, "head_too_large", "the head of the request is too large")
            }
            Self::BadHead(_) => of(400, "bad_request", "the request is not HTTP"),
            Self::BadEvent(_) => {
                as_public("bad_request", of(400, "bad_event", "the event is not a CloudEvent"))
            }
            Self::KeyReused { .. } => {
                let reason =
                    "the Idempotency-Key was used for another request; send one of its own";
                of(422, "key_reused", reason)
            }
            Self::Unauthorized { .. } => {
                of(401, "unauthorized", "show who you are in an Authorization header")
            }
            Self::UnknownFunction(_) => {
                let reason =
                    "nothing is served here; check the host name and the path of the address";
                as_public("not_found", of(404, "unknown_function", reason))
            }
            Self::HeadTooSlow(_) => {
                let reason = "the head of the request did not arrive in time; send it again";
                of(408, "head_too_slow", reason)
            }
            Self::BodyTooSlow(_) => {
                let reason = "the body of the request did not arrive in time; send it again";
                of(408, "body_too_slow", reason)
            }
            Self::BodyTooLarge { .. } => {
                of(413, "body_too_large", "the body of the request is too large")
            }
            Self::NotHttp { .. } => {
                as_public("misdirected", of(421, "not_http", "this name does not speak HTTP"))
            }
            Self::OtherCertificate => {
                let reason =
                    "this host has another certificate; ask for it on a connection of its own";
                as_public("misdirected", of(421, "other_certificate", reason))
            }
            Self::TooManyRequests { .. } => {
                of(429, "too_many_requests", "there were too many requests; try again later")
            }
            Self::InstanceDied { .. } => {
                let reason = "the service failed while it handled the request";
                as_public("bad_gateway", of(502, "instance_died", reason))
            }
            Self::BadResponse { .. } => {
                let reason = "the service gave no valid answer";
                as_public("bad_gateway", of(502, "bad_response", reason))
            }
            Self::NotSetUp { .. } => unavailable("not_set_up"),
            Self::NotFetched { .. } => unavailable("not_fetched"),
            Self::CannotWake { .. } => unavailable("cannot_wake"),
            Self::NoCapacity { .. } => unavailable("no_capacity"),
            Self::QuotaReached { .. } => unavailable("quota_reached"),
            Self::BackingOff { .. } => unavailable("backing_off"),
            Self::QueueFull { .. } => unavailable("queue_full"),
            Self::QueueUnavailable { .. } => unavailable("queue_unavailable"),
            Self::NodeFull => unavailable("node_full"),
            Self::Draining => unavailable("shutting_down"),
            Self::DeadlinePassed { .. } => {
                of(504, "deadline_passed", "the deadline of the call has passed")
            }
            Self::Timeout { .. } => of(504, "timeout", "the service did not answer in time"),
        }
    }

    /// The status code.
    pub fn status(&self) -> u16 {
        self.kind().status
    }

    /// A short name of the error, for programs and metrics.
    pub fn error(&self) -> &'static str {
        self.kind().error
    }

    /// The kind, as anybody may know it: what a client can do about it.
    pub fn public_error(&self) -> &'static str {
        self.kind().public_error
    }

    /// One sentence that names nothing of this node.
    pub fn reason(&self) -> String {
        match self {
            // About the client's own bytes.
            Self::BadHead(error) => error.to_string(),
            Self::BadEvent(why) => why.clone(),
            Self::HeadTooLarge => HeadError::TooLarge.to_string(),
            other => other.kind().reason.to_owned(),
        }
    }

    /// One sentence for the operator.
    pub fn detail(&self) -> String {
        match self {
            Self::BadHead(error) => error.to_string(),
            Self::HeadTooLarge => HeadError::TooLarge.to_string(),
            Self::UnknownFunction(Some(name)) => {
                format!("no function is named `{name}`; `thaw list` shows those there are")
            }
            Self::UnknownFunction(None) => {
                "the Host header names no function; set it to a function's name".to_owned()
            }
            Self::HeadTooSlow(limit) => {
                format!("the request head was not complete after {} s", limit.as_secs_f64())
            }
            Self::BodyTooSlow(limit) => {
                format!(
                    "the request body stopped, or was not complete, within {} s",
                    limit.as_secs_f64()
                )
            }
            Self::NotHttp { function, way } => {
                format!("`{function}` does not speak HTTP; it is reached by {way}")
            }
            Self::InstanceDied { reason, .. }
            | Self::BadResponse { reason, .. }
            | Self::NotSetUp { reason, .. }
            | Self::NotFetched { reason, .. }
            | Self::CannotWake { reason, .. }
            | Self::NoCapacity { reason, .. }
            | Self::QueueFull { reason, .. }
            | Self::QueueUnavailable { reason, .. }
            | Self::BadEvent(reason)
            | Self::QuotaReached { reason, .. } => reason.clone(),
            Self::KeyReused { .. } => {
                "the idempotency key was used for a request with another method, path or body; \
                 send one of its own"
                    .to_owned()
            }
            Self::BackingOff { .. } => {
                "instances of the function crash again and again; it is being frozen anew, try \
                 again later"
                    .to_owned()
            }
            Self::Unauthorized { why, .. } => why.clone(),
            Self::BodyTooLarge { most, .. } => {
                format!("the body of the request is larger than `body_max`, {most} bytes")
            }
            Self::OtherCertificate => {
                "the client was shown the certificate of another host; see [tls] in gateway.toml"
                    .to_owned()
            }
            Self::TooManyRequests { retry_after, .. } => {
                format!("the client is over its `rate` for {} s", retry_after.as_secs_f64())
            }
            Self::NodeFull => "as many requests are under way as there are descriptors for; raise \
                               the limit of open files"
                .to_owned(),
            Self::Draining => "the node is shutting down".to_owned(),
            Self::DeadlinePassed { .. } => "the deadline of the call has passed".to_owned(),
            Self::Timeout { timeout, .. } => {
                format!("the function did not answer within {} s", timeout.as_secs_f64())
            }
        }
    }

    fn reason_phrase(&self) -> &'static str {
        match self.status() {
            400 => "Bad Request",
            401 => "Unauthorized",
            404 => "Not Found",
            408 => "Request Timeout",
            413 => "Content Too Large",
            421 => "Misdirected Request",
            422 => "Unprocessable Content",
            429 => "Too Many Requests",
            431 => "Request Header Fields Too Large",
            502 => "Bad Gateway",
            503 => "Service Unavailable",
            _ => "Gateway Timeout",
        }
    }

    /// The body of the response: JSON, and a line feed.
    pub(crate) fn body(&self, id: RequestId, audience: Audience) -> String {
        let id = id.to_string();
        let body = match audience {
            Audience::Public => {
                json!({"error": self.public_error(), "reason": self.reason(), "request_id": id})
            }
            Audience::Operator => self.operators_body(&id),
        };
        format!("{body}\n")
    }

    fn operators_body(&self, id: &str) -> serde_json::Value {
        let reason = self.detail();
        let mut body = json!({"error": self.error(), "reason": reason, "request_id": id});
        match self {
            Self::InstanceDied { function, .. }
            | Self::BadResponse { function, .. }
            | Self::NotSetUp { function, .. }
            | Self::NotFetched { function, .. }
            | Self::CannotWake { function, .. }
            | Self::NoCapacity { function, .. }
            | Self::QuotaReached { function, .. }
            | Self::BackingOff { function, .. }
            | Self::KeyReused { function }
            | Self::QueueFull { function, .. }
            | Self::QueueUnavailable { function, .. }
            | Self::NotHttp { function, .. }
            | Self::Unauthorized { function, .. }
            | Self::BodyTooLarge { function, .. }
            | Self::TooManyRequests { function, .. }
            | Self::DeadlinePassed { function }
            | Self::Timeout { function, .. }
            | Self::UnknownFunction(Some(function)) => body["function"] = json!(function),
            _ => {}
        }
        body
    }

    /// After how many seconds to try again, if that may help.
    pub fn retry_after(&self) -> Option<u64> {
        match self {
            Self::NoCapacity { retry_after, .. }
            | Self::QuotaReached { retry_after, .. }
            | Self::TooManyRequests { retry_after, .. }
            | Self::BackingOff { retry_after, .. } => {
                Some(retry_after.as_secs_f64().ceil().max(1.0) as u64)
            }
            Self::Draining | Self::NodeFull | Self::CannotWake { .. } | Self::NotFetched { .. } => {
                Some(1)
            }
            Self::NotSetUp { .. } | Self::QueueFull { .. } | Self::QueueUnavailable { .. } => {
                Some(5)
            }
            _ => None,
        }
    }

    /// Nobody knows where the next request of such a client begins.
    pub(crate) fn ends_connection(&self) -> bool {
        matches!(self, Self::BadHead(_) | Self::BodyTooSlow(_) | Self::BodyTooLarge { .. })
    }

    /// `WWW-Authenticate` of the answer.
    pub(crate) fn challenge(&self) -> Option<&'static str> {
        match self {
            Self::Unauthorized { challenge, .. } => Some(challenge),
            _ => None,
        }
    }

    /// The whole HTTP response.
    pub(crate) fn response(&self, id: RequestId, audience: Audience, head_only: bool) -> Vec<u8> {
        let body = self.body(id, audience);
        let retry = self.retry_after();
        let retry = retry.map_or(String::new(), |seconds| format!("Retry-After: {seconds}\r\n"));
        let head = format!(
            "HTTP/1.1 {} {}\r\nContent-Type: application/json\r\nContent-Length: {}\r\n{retry}\
             Thaw-Error: {}\r\nThaw-Request-Id: {id}\r\nConnection: close\r\n\r\n",
            self.status(),
            self.reason_phrase(),
            body.len(),
            self.public_error(),
        );
        let mut response = head.into_bytes();
        if !head_only {
            response.extend_from_slice(body.as_bytes());
        }
        response
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parts(refusal: &Refusal, audience: Audience) -> (String, serde_json::Value) {
        let id = RequestId::new();
        let text = String::from_utf8(refusal.response(id, audience, false)).unwrap();
        let (head, body) = text.split_once("\r\n\r\n").unwrap();
        assert!(head.contains(&format!("\r\nContent-Length: {}\r\n", body.len())), "{head}");
        assert!(head.contains(&format!("\r\nThaw-Request-Id: {id}\r\n")), "{head}");
        let body: serde_json::Value = serde_json::from_str(body).unwrap();
        assert_eq!(body["request_id"], id.to_string());
        assert!(refusal.response(id, audience, true).ends_with(b"\r\n\r\n"));
        (head.to_owned(), body)
    }

    /// One of each, whose parts say `secret`.
    fn all() -> Vec<Refusal> {
        let (function, reason) = ("secret".to_owned(), "secret".to_owned());
        let (retry_after, timeout) = (Duration::from_millis(10), Duration::from_secs(7777));
        let (f, r) = (|| function.clone(), || reason.clone());
        vec![
            Refusal::BadHead(HeadError::Body),
            Refusal::UnknownFunction(Some(f())),
            Refusal::HeadTooSlow(timeout),
            Refusal::BodyTooSlow(timeout),
            Refusal::NotHttp { function: f(), way: r() },
            Refusal::HeadTooLarge,
            Refusal::InstanceDied { function: f(), reason: r() },
            Refusal::BadResponse { function: f(), reason: r() },
            Refusal::NotSetUp { function: f(), reason: r() },
            Refusal::CannotWake { function: f(), reason: r() },
            Refusal::NoCapacity { function: f(), reason: r(), retry_after },
            Refusal::QuotaReached { function: f(), reason: r(), retry_after },
            Refusal::BackingOff { function: f(), retry_after },
            Refusal::Draining,
            Refusal::NodeFull,
            Refusal::OtherCertificate,
            Refusal::Unauthorized { function: f(), challenge: "Bearer", why: r() },
            Refusal::BodyTooLarge { function: f(), most: 7777 },
            Refusal::KeyReused { function: f() },
            Refusal::QueueFull { function: f(), reason: r() },
            Refusal::QueueUnavailable { function: f(), reason: r() },
            Refusal::TooManyRequests { function: f(), retry_after },
            Refusal::DeadlinePassed { function: f() },
            Refusal::Timeout { function: f(), timeout },
        ]
    }

    #[test]
    fn the_public_learns_a_reason_and_nothing_of_the_node() {
        for refusal in all() {
            let (_, body) = parts(&refusal, Audience::Public);
            let keys: Vec<_> = body.as_object().unwrap().keys().cloned().collect();
            assert_eq!(keys, ["error", "reason", "request_id"]);
            assert!(body["reason"].as_str().unwrap().len() > 10, "{body}");
            for internal in ["secret", "7777", "instance", "quota", "thaw", "function"] {
                assert!(!body.to_string().contains(internal), "{internal} in {body}");
            }
        }
    }

    #[test]
    fn the_queue_knows_every_error() {
        for refusal in all() {
            let error = refusal.error();
            assert_eq!(crate::triggers::gateway_error(error), Some(error));
        }
    }

    #[test]
    fn the_operator_learns_what_went_wrong() {
        let refusal = Refusal::NoCapacity {
            function: "a".into(),
            reason: "all 2 instances are busy".into(),
            retry_after: Duration::from_millis(10),
        };
        let (head, body) = parts(&refusal, Audience::Operator);
        assert!(head.starts_with("HTTP/1.1 503 Service Unavailable\r\n"), "{head}");
        assert!(head.contains("\r\nRetry-After: 1\r\n"), "{head}");
        assert_eq!(body["error"], "no_capacity");
        assert_eq!(body["reason"], "all 2 instances are busy");
        assert_eq!(body["function"], "a");
    }
}
