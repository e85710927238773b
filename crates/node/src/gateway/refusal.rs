//! What a client gets when no function answers it.

use super::head::HeadError;
use crate::service::{PlaceError, Service};
use serde_json::json;
use std::time::Duration;

/// The gateway's own answer to a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// 400: the head is not HTTP/1, or cannot be routed.
    BadHead(HeadError),
    /// 404: no function has that name.
    UnknownFunction(Option<String>),
    /// 408: the head did not arrive in time.
    HeadTooSlow(Duration),
    /// 408: the body of the request stopped coming.
    BodyTooSlow(Duration),
    /// 421: the function does not speak HTTP.
    NotHttp {
        /// The function.
        function: String,
        /// How it is reached.
        way: String,
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
    /// 503: the node is going down.
    Draining,
    /// 504: no response byte within the function's timeout.
    Timeout {
        /// The function.
        function: String,
        /// The timeout.
        timeout: Duration,
    },
}

impl Refusal {
    /// What a client of a function is told when no instance could have its connection.
    pub(super) fn of(service: &Service, error: PlaceError) -> Self {
        let function = service.name().to_string();
        match error {
            PlaceError::InstanceDied(reason) => Self::InstanceDied { function, reason },
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

    /// The status code.
    pub fn status(&self) -> u16 {
        match self {
            Self::BadHead(HeadError::TooLarge) | Self::HeadTooLarge => 431,
            Self::BadHead(_) => 400,
            Self::UnknownFunction(_) => 404,
            Self::HeadTooSlow(_) | Self::BodyTooSlow(_) => 408,
            Self::NotHttp { .. } => 421,
            Self::InstanceDied { .. } | Self::BadResponse { .. } => 502,
            Self::NotFetched { .. }
            | Self::CannotWake { .. }
            | Self::NoCapacity { .. }
            | Self::QuotaReached { .. }
            | Self::BackingOff { .. }
            | Self::Draining => 503,
            Self::Timeout { .. } => 504,
        }
    }

    /// A short name of the error, for programs and metrics.
    pub fn error(&self) -> &'static str {
        match self {
            Self::BadHead(HeadError::TooLarge) | Self::HeadTooLarge => "head_too_large",
            Self::BadHead(_) => "bad_request",
            Self::UnknownFunction(_) => "unknown_function",
            Self::HeadTooSlow(_) => "head_too_slow",
            Self::BodyTooSlow(_) => "body_too_slow",
            Self::NotHttp { .. } => "not_http",
            Self::InstanceDied { .. } => "instance_died",
            Self::BadResponse { .. } => "bad_response",
            Self::NotFetched { .. } => "not_fetched",
            Self::CannotWake { .. } => "cannot_wake",
            Self::NoCapacity { .. } => "no_capacity",
            Self::QuotaReached { .. } => "quota_reached",
            Self::BackingOff { .. } => "backing_off",
            Self::Draining => "shutting_down",
            Self::Timeout { .. } => "timeout",
        }
    }

    /// One sentence.
    pub fn reason(&self) -> String {
        match self {
            Self::BadHead(error) => error.to_string(),
            Self::HeadTooLarge => HeadError::TooLarge.to_string(),
            Self::UnknownFunction(Some(name)) => {
                format!("no function is named `{name}`; see `thaw images` for those there are")
            }
            Self::UnknownFunction(None) => {
                "the Host header names no function; set it to a function's name".to_owned()
            }
            Self::HeadTooSlow(limit) => {
                format!("the request head was not complete after {} s", limit.as_secs_f64())
            }
            Self::BodyTooSlow(limit) => {
                format!("nothing of the request body came for {} s", limit.as_secs_f64())
            }
            Self::NotHttp { function, way } => {
                format!("`{function}` does not speak HTTP; it is reached by {way}")
            }
            Self::InstanceDied { reason, .. }
            | Self::BadResponse { reason, .. }
            | Self::NotFetched { reason, .. }
            | Self::CannotWake { reason, .. }
            | Self::NoCapacity { reason, .. }
            | Self::QuotaReached { reason, .. } => reason.clone(),
            Self::BackingOff { .. } => {
                "instances of the function crash again and again; it is being frozen anew, try \
                 again later"
                    .to_owned()
            }
            Self::Draining => "the node is shutting down".to_owned(),
            Self::Timeout { timeout, .. } => {
                format!("the function did not answer within {} s", timeout.as_secs_f64())
            }
        }
    }

    fn reason_phrase(&self) -> &'static str {
        match self.status() {
            400 => "Bad Request",
            404 => "Not Found",
            408 => "Request Timeout",
            421 => "Misdirected Request",
            431 => "Request Header Fields Too Large",
            502 => "Bad Gateway",
            503 => "Service Unavailable",
            _ => "Gateway Timeout",
        }
    }

    /// The body of the response: JSON, and a line feed.
    pub fn body(&self) -> String {
        let mut body = json!({"error": self.error(), "reason": self.reason()});
        match self {
            Self::InstanceDied { function, .. }
            | Self::BadResponse { function, .. }
            | Self::NotFetched { function, .. }
            | Self::CannotWake { function, .. }
            | Self::NoCapacity { function, .. }
            | Self::QuotaReached { function, .. }
            | Self::BackingOff { function, .. }
            | Self::NotHttp { function, .. }
            | Self::Timeout { function, .. }
            | Self::UnknownFunction(Some(function)) => body["function"] = json!(function),
            _ => {}
        }
        format!("{body}\n")
    }

    /// After how many seconds to try again, if that may help.
    pub fn retry_after(&self) -> Option<u64> {
        match self {
            Self::NoCapacity { retry_after, .. }
            | Self::QuotaReached { retry_after, .. }
            | Self::BackingOff { retry_after, .. } => Some(retry_after.as_secs().max(1)),
            Self::Draining | Self::CannotWake { .. } | Self::NotFetched { .. } => Some(1),
            _ => None,
        }
    }

    /// The whole HTTP response.
    pub fn response(&self, head_only: bool) -> Vec<u8> {
        let body = self.body();
        let retry = self.retry_after();
        let retry = retry.map_or(String::new(), |seconds| format!("Retry-After: {seconds}\r\n"));
        let head = format!(
            "HTTP/1.1 {} {}\r\nContent-Type: application/json\r\nContent-Length: {}\r\n{retry}\
             Connection: close\r\n\r\n",
            self.status(),
            self.reason_phrase(),
            body.len(),
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

    #[test]
    fn refusals_are_small_json_with_a_reason() {
        let refusal = Refusal::NoCapacity {
            function: "a".into(),
            reason: "all 2 instances are busy".into(),
            retry_after: Duration::from_millis(10),
        };
        let text = String::from_utf8(refusal.response(false)).unwrap();
        let (head, body) = text.split_once("\r\n\r\n").unwrap();
        assert!(head.starts_with("HTTP/1.1 503 Service Unavailable\r\n"), "{head}");
        assert!(head.contains("\r\nRetry-After: 1\r\n"), "{head}");
        assert!(head.contains(&format!("\r\nContent-Length: {}\r\n", body.len())), "{head}");
        let body: serde_json::Value = serde_json::from_str(body).unwrap();
        assert_eq!(body["error"], "no_capacity");
        assert_eq!(body["reason"], "all 2 instances are busy");
        assert_eq!(body["function"], "a");
        assert!(refusal.response(true).ends_with(b"\r\n\r\n"));
    }
}
