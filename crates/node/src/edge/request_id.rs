//! Numbers by which a request is found again: in the answer that its client got, in the
//! logs of this node, and in those of the function.
//!
//! A request of a traced client says `traceparent` (W3C Trace Context, Recommendation of
//! 2021). The gateway keeps the trace and enters itself as the parent; it begins a trace for
//! a request that has none. The id of the gateway's own part is the request id.

use hyper::header::{HeaderMap, HeaderName, HeaderValue};
use std::fmt;
use std::hash::{BuildHasher, Hasher, RandomState};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use thaw_http::message::TRACEPARENT;

/// Vendors' parts of a trace; means nothing without [`TRACEPARENT`].
const TRACESTATE: HeaderName = HeaderName::from_static("tracestate");

/// The one of `trace-flags` that says "sampled".
const SAMPLED: u8 = 1;

/// What a request is called.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RequestId {
    trace: u128,
    /// Of the gateway's part, not 0.
    span: u64,
    /// Of the part that this one belongs to; 0: it is the first one.
    parent: u64,
    /// `trace-flags`: 1 is "sampled".
    flags: u8,
}

impl RequestId {
    /// The name of a request that no trace is known of.
    pub(crate) fn new() -> Self {
        let trace = u128::from(unique()) << 64 | u128::from(unique());
        Self { trace, span: unique(), parent: 0, flags: 0 }
    }

    /// The name of a request with these headers.
    pub fn of(headers: &HeaderMap) -> Self {
        let mut all = headers.get_all(TRACEPARENT).iter();
        let (Some(value), None) = (all.next(), all.next()) else { return Self::new() };
        match parse(value.as_bytes()) {
            Some((trace, parent, flags)) => Self { trace, span: unique(), parent, flags },
            None => Self::new(),
        }
    }

    /// Tells the next hop of it.
    pub fn write(self, headers: &mut HeaderMap) {
        let Self { trace, span, flags, .. } = self;
        let text = format!("00-{trace:032x}-{span:016x}-{flags:02x}");
        let value = HeaderValue::try_from(text).expect("hexadecimal digits and hyphens");
        if parse_all(headers) != Some(trace) {
            // It belongs to a trace that could not be read (§3.3 of the Recommendation).
            headers.remove(TRACESTATE);
        }
        headers.insert(TRACEPARENT, value);
    }

    /// The name of a part of this one.
    pub fn child(self) -> Self {
        Self { span: unique(), parent: self.span, ..self }
    }

    /// The name of the part that it belongs to, as far as that is known.
    pub fn of_parent(self) -> Option<Self> {
        self.parent().map(|span| Self { span, parent: 0, ..self })
    }

    /// The same, where others are told whether it is recorded.
    pub fn sampled(self, is_sampled: bool) -> Self {
        let flag = if is_sampled { SAMPLED } else { 0 };
        Self { flags: (self.flags & !SAMPLED) | flag, ..self }
    }

    /// Whether it is recorded.
    pub fn is_sampled(self) -> bool {
        self.flags & SAMPLED != 0
    }

    /// The number of its trace.
    pub fn trace_number(self) -> u128 {
        self.trace
    }

    /// Its own number in the trace.
    pub fn span(self) -> u64 {
        self.span
    }

    /// The number of the part that it belongs to.
    pub fn parent(self) -> Option<u64> {
        (self.parent != 0).then_some(self.parent)
    }

    /// The trace, as 32 hexadecimal digits.
    pub fn trace(self) -> String {
        format!("{:032x}", self.trace)
    }
}

impl fmt::Display for RequestId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}", self.span)
    }
}

fn parse_all(headers: &HeaderMap) -> Option<u128> {
    let mut all = headers.get_all(TRACEPARENT).iter();
    match (all.next(), all.next()) {
        (Some(value), None) => parse(value.as_bytes()).map(|(trace, ..)| trace),
        _ => None,
    }
}

/// The trace, the part of it, and the flags that a `traceparent` names, if it is valid (§3.2). Of a later
/// version than 0, what is known of it is read.
fn parse(value: &[u8]) -> Option<(u128, u64, u8)> {
    let is_later = value.get(..2) != Some(b"00");
    let has_end = value.len() == 55 || is_later && value.get(55) == Some(&b'-');
    if !has_end || [2, 35, 52].iter().any(|&at| value[at] != b'-') || &value[..2] == b"ff" {
        return None;
    }
    let (version, trace) = (hex(&value[..2])?, hex(&value[3..35])?);
    let (parent, flags) = (hex(&value[36..52])?, hex(&value[53..55])?);
    let known = if version == 0 { flags as u8 } else { flags as u8 & 1 };
    (trace != 0 && parent != 0).then_some((trace, parent as u64, known))
}

/// A number in lower-case hexadecimal digits.
fn hex(digits: &[u8]) -> Option<u128> {
    digits.iter().try_fold(0, |number: u128, digit| {
        let digit = match digit {
            b'0'..=b'9' => digit - b'0',
            b'a'..=b'f' => digit - b'a' + 10,
            _ => return None,
        };
        Some(number << 4 | u128::from(digit))
    })
}

/// A number that this process has not given before, as far as 64 bits go, and that says
/// nothing of how many there were: a keyed hash (SipHash) of a count.
fn unique() -> u64 {
    static KEY: OnceLock<RandomState> = OnceLock::new();
    static COUNT: AtomicU64 = AtomicU64::new(0);
    let mut hasher = KEY.get_or_init(RandomState::new).build_hasher();
    hasher.write_u64(COUNT.fetch_add(1, Relaxed));
    hasher.finish().max(1)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    const TRACE: &str = "0af7651916cd43dd8448eb211c80319c";

    fn headers(values: &[&str]) -> HeaderMap {
        let mut headers = HeaderMap::new();
        for value in values {
            headers.append(TRACEPARENT, value.parse().unwrap());
        }
        headers.insert(TRACESTATE, "vendor=1".parse().unwrap());
        headers
    }

    #[test]
    fn a_trace_goes_on_with_the_gateway_as_parent() {
        let mut headers = headers(&[&format!("00-{TRACE}-b7ad6b7169203331-01")]);
        let id = RequestId::of(&headers);
        assert_eq!(id.trace(), TRACE);
        id.write(&mut headers);
        assert_eq!(headers[TRACEPARENT], format!("00-{TRACE}-{id}-01"));
        assert!(headers.contains_key(TRACESTATE));
        // A later version may have more to say, which is not passed on.
        let later = self::headers(&[&format!("cc-{TRACE}-b7ad6b7169203331-03-more")]);
        assert_eq!(RequestId::of(&later).trace(), TRACE);
        assert_eq!(RequestId::of(&later).flags, 1);
    }

    #[test]
    fn what_is_no_trace_is_replaced_by_a_new_one() {
        let zeros = "0".repeat(32);
        let whole = format!("00-{TRACE}-b7ad6b7169203331-01");
        for values in [
            &[][..],
            &[""],
            &["00"],
            &[&format!("{whole}-more")],
            &[&format!("00-{}-b7ad6b7169203331-01", TRACE.to_uppercase())],
            &[&format!("00-{zeros}-b7ad6b7169203331-01")],
            &[&format!("00-{TRACE}-0000000000000000-01")],
            &[&format!("ff-{TRACE}-b7ad6b7169203331-01")],
            &[&whole, &whole],
        ] {
            let mut headers = headers(values);
            let id = RequestId::of(&headers);
            assert_ne!(id.trace(), TRACE, "{values:?}");
            id.write(&mut headers);
            assert_eq!(headers[TRACEPARENT], format!("00-{}-{id}-00", id.trace()));
            assert!(!headers.contains_key(TRACESTATE), "{values:?}");
        }
    }

    #[test]
    fn a_part_belongs_to_what_it_is_a_part_of() {
        let id = RequestId::of(&headers(&[&format!("00-{TRACE}-b7ad6b7169203331-03")]));
        assert_eq!((id.parent(), id.is_sampled()), (Some(0xb7ad_6b71_6920_3331), true));
        let child = id.child();
        assert_eq!((child.parent(), child.trace()), (Some(id.span()), id.trace()));
        assert_ne!(child.span(), id.span());
        // Other flags stay as they are.
        assert_eq!((id.sampled(false).flags, id.sampled(true).flags), (2, 3));
        assert_eq!(RequestId::new().parent(), None);
    }

    #[test]
    fn ids_differ() {
        let all: HashSet<_> = (0..1000).map(|_| RequestId::new().to_string()).collect();
        assert_eq!(all.len(), 1000);
    }
}
