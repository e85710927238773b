//! What is written down of an invocation.

use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;
use thaw_home::config::{AsyncConfig, ByteSize};

/// Names an invocation: 128 random bits.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct InvocationId(pub(super) u128);

impl InvocationId {
    /// A new one.
    pub fn random() -> Self {
        Self(random())
    }
}

/// 128 bits of the host's random numbers.
pub(super) fn random() -> u128 {
    let mut bytes = [0; 16];
    // Of up to 256 bytes all come (getrandom(2)).
    rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty())
        .expect("the host has random numbers");
    u128::from_le_bytes(bytes)
}

impl fmt::Display for InvocationId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:032x}", self.0)
    }
}

impl fmt::Debug for InvocationId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl FromStr for InvocationId {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let number = (text.len() == 32).then(|| u128::from_str_radix(text, 16).ok()).flatten();
        number.map(Self).ok_or_else(|| {
            format!("`{text}` names no invocation; `thaw queue list NAME` shows the ids")
        })
    }
}

impl Serialize for InvocationId {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for InvocationId {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(serde::de::Error::custom)
    }
}

/// The request of an invocation, without what is said of one connection only.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct QueuedRequest {
    /// Its method.
    pub method: String,
    /// Path and query.
    pub path: String,
    /// Names and values.
    pub headers: Vec<(String, String)>,
    /// Its body. Stored behind the rest.
    #[serde(skip)]
    pub body: Vec<u8>,
}

impl QueuedRequest {
    /// As it is stored: the length of the head in four bytes, the head as JSON, the body.
    pub(super) fn to_bytes(&self) -> Vec<u8> {
        let head = serde_json::to_vec(self).expect("texts are JSON");
        let mut bytes = (head.len() as u32).to_le_bytes().to_vec();
        bytes.extend_from_slice(&head);
        bytes.extend_from_slice(&self.body);
        bytes
    }

    /// Tells it from other requests: its method, its path and its body. The headers are left out: those
    /// of a client that sends a request again may differ.
    pub(super) fn digest(&self) -> u128 {
        let mut hasher = blake3::Hasher::new();
        for part in [self.method.as_bytes(), self.path.as_bytes(), &self.body] {
            hasher.update(&(part.len() as u64).to_le_bytes());
            hasher.update(part);
        }
        let mut digest = [0; 16];
        hasher.finalize_xof().fill(&mut digest);
        u128::from_le_bytes(digest)
    }

    /// From [`QueuedRequest::to_bytes`]; `None`: it is damaged.
    pub(super) fn from_bytes(bytes: &[u8]) -> Option<Self> {
        let (len, rest) = bytes.split_first_chunk::<4>()?;
        let (head, body) = rest.split_at_checked(u32::from_le_bytes(*len) as usize)?;
        let mut request: Self = serde_json::from_slice(head).ok()?;
        body.clone_into(&mut request.body);
        Some(request)
    }
}

/// Who has queued an invocation.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Origin {
    /// A client of the gateway.
    Client,
    /// Somebody with access to the admin API.
    Operator,
    /// The schedule of this name.
    Schedule(String),
    /// The end of an invocation of this function, whose destination it is.
    Function(String),
}

/// [`Origin`] as it lies in the file, which an earlier version reads, too: to that one an
/// [`Origin::Function`] is a client.
mod stored_origin {
    use super::Origin;
    use serde::{Deserialize, Deserializer, Serialize, Serializer};

    #[derive(Serialize, Deserialize)]
    struct Stored {
        origin: Origin,
        #[serde(default, skip_serializing_if = "Option::is_none")]
        origin_function: Option<String>,
    }

    pub fn serialize<S: Serializer>(origin: &Origin, serializer: S) -> Result<S::Ok, S::Error> {
        let stored = match origin.clone() {
            Origin::Function(name) => {
                Stored { origin: Origin::Client, origin_function: Some(name) }
            }
            origin => Stored { origin, origin_function: None },
        };
        stored.serialize(serializer)
    }

    pub fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Origin, D::Error> {
        let Stored { origin, origin_function } = Stored::deserialize(deserializer)?;
        Ok(origin_function.map_or(origin, Origin::Function))
    }
}

/// Why an invocation was given up, and when.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Death {
    /// Milliseconds since 1970.
    pub at_ms: u64,
    /// One sentence.
    pub reason: String,
}

/// What is known of an invocation besides its request. Times are milliseconds since 1970.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Record {
    /// The function.
    pub function: String,
    /// The domain of its tenant.
    pub domain: Option<String>,
    /// Who has queued it.
    #[serde(flatten, with = "stored_origin")]
    pub origin: Origin,
    /// Method of the request.
    pub method: String,
    /// Path of the request.
    pub path: String,
    /// When it was queued.
    pub created_ms: u64,
    /// When it is given up.
    pub expires_ms: u64,
    /// When it is attempted next.
    pub due_ms: u64,
    /// Attempts that have failed.
    pub attempts: u32,
    /// Times that there was no room for an attempt, since the last one.
    pub deferrals: u32,
    /// Bytes that it counts for.
    pub bytes: u64,
    /// What came of the last attempt.
    pub last: Option<String>,
    /// Set when it was given up: it is a dead letter.
    pub dead: Option<Death>,
    /// How many destinations lie between it and what was queued by somebody.
    #[serde(default)]
    pub depth: u8,
}

/// What is kept of an invocation that is done.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ResultRow {
    /// The function.
    pub function: String,
    /// The domain of its tenant.
    #[serde(default)]
    pub domain: Option<String>,
    /// The status of its answer.
    pub status: u16,
    /// Attempts, the last one included.
    pub attempts: u32,
    /// When it is forgotten, in milliseconds since 1970.
    pub expires_ms: u64,
}

/// How an invocation is, for who has queued it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct InvocationStatus {
    /// Its name.
    pub id: InvocationId,
    /// `queued`, `running`, `done` or `dead`.
    pub state: &'static str,
    /// Attempts that are over.
    pub attempts: u32,
    /// The status of the function's answer, if it is done.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub status: Option<u16>,
}

/// Bytes that an invocation counts for besides its request: its entries in tables and indexes.
pub(super) const OVERHEAD: u64 = 512;

/// What holds for the invocations of a function.
#[derive(Clone, Debug)]
pub struct Terms {
    /// Its `[async]`.
    pub config: AsyncConfig,
    /// The domain of its tenant.
    pub domain: Option<String>,
    /// Bytes that its tenant may have in queues.
    pub tenant_bytes: Option<ByteSize>,
}

/// An invocation that is to be queued.
#[derive(Clone, Debug)]
pub struct NewInvocation {
    /// The function.
    pub function: String,
    /// Who queues it.
    pub origin: Origin,
    /// Its request.
    pub request: QueuedRequest,
    /// Another one with the same key is not queued. It says who has sent it, too.
    pub key: Option<Vec<u8>>,
}

/// The answer to who has queued something.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Queued {
    /// Its name.
    pub id: InvocationId,
    /// It was there before.
    pub is_duplicate: bool,
}

/// Why something was not queued.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NotQueued {
    /// A bound of the function, its tenant or the node is reached.
    #[error("{0}")]
    Full(String),
    /// The body is larger than the function takes.
    #[error("the body of an asynchronous invocation may have {0} bytes; see `async.body_max`")]
    TooLarge(u64),
    /// Another request has the same key.
    #[error("the idempotency key was used for another request; send another key")]
    KeyReused,
    /// The queue cannot be written.
    #[error("{0}")]
    Unavailable(#[from] Unavailable),
}

/// The file of the queue cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the queue of triggers is not available: {0}")]
pub struct Unavailable(pub String);

/// What became of an attempt.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// The function has done it, and answered with this status.
    Done(u16),
    /// It may be tried again, after this many milliseconds if the function has said so.
    Failed {
        /// One sentence.
        reason: String,
        /// `Retry-After`.
        retry_after_ms: Option<u64>,
    },
    /// It would fail again.
    Refused(String),
    /// The function has not seen it.
    Deferred(String),
}

/// What is to be attempted.
#[derive(Clone, Debug)]
pub struct Job {
    /// The invocation.
    pub id: InvocationId,
    /// What is known of it.
    pub record: Record,
    /// Its request.
    pub request: QueuedRequest,
}

/// An invocation, as it is shown.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct InvocationInfo {
    /// Its name.
    pub id: InvocationId,
    /// `queued`, `running` or `dead`.
    pub state: String,
    /// The rest.
    #[serde(flatten)]
    pub record: Record,
}

/// When a schedule has last fired.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ScheduleRow {
    /// Its expression and time zone: with others it begins anew.
    pub spec: String,
    /// The last time of it that is done with, in milliseconds since 1970.
    pub until_ms: u64,
    /// The last time that it has fired for.
    pub fired_ms: Option<u64>,
    /// The invocation of that time.
    pub invocation: Option<InvocationId>,
    /// Times that were left out.
    pub skipped: u64,
    /// Why the last time was left out, if it was.
    pub problem: Option<String>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_are_read_as_they_were_written() {
        let request = QueuedRequest {
            method: "POST".into(),
            path: "/a?b".into(),
            headers: vec![("content-type".into(), "text/plain".into())],
            body: vec![0, 255, 10],
        };
        let bytes = request.to_bytes();
        assert_eq!(QueuedRequest::from_bytes(&bytes), Some(request));
        for end in 0..bytes.len() - 3 {
            assert_eq!(QueuedRequest::from_bytes(&bytes[..end]), None, "{end}");
        }
    }

    #[test]
    fn ids_are_read_as_they_are_written() {
        let id = InvocationId::random();
        assert_eq!(id.to_string().parse(), Ok(id));
        assert!("12".parse::<InvocationId>().is_err());
        assert!(
            "+0000000000000000000000000000000".parse::<InvocationId>().is_ok_and(|id| id.0 == 0)
        );
        assert_ne!(id, InvocationId::random());
    }
}
