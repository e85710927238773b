//! Lines that functions have printed.

use serde::{Deserialize, Serialize};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// Bytes of memory that a line takes beside its text: its structure, its reference
/// counts, its place in the ring, and what the allocator adds to both allocations.
pub(super) const LINE_COST: usize = 128;

/// Where a line came from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Stream {
    /// Standard output.
    Out,
    /// Standard error.
    Err,
    /// Thaw's own remarks.
    Thaw,
}

/// The instance that printed a line.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Origin {
    /// Number of the instance on its node.
    pub instance: u64,
    /// Process id of the instance on the host.
    pub pid: u32,
}

/// A line that a function printed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Line {
    /// When it was read, milliseconds since the epoch.
    pub time_ms: u64,
    /// Where it came from.
    pub stream: Stream,
    /// Who printed it, or whom it is about; `None` for Thaw's remarks on the log.
    #[serde(flatten)]
    pub origin: Option<Origin>,
    /// The text, without its line end. Written by a guest: escape it before a
    /// terminal sees it.
    pub text: String,
}

impl Line {
    /// A line that is read now.
    pub(super) fn now(stream: Stream, origin: Option<Origin>, text: String) -> Self {
        let time = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or(Duration::ZERO);
        Self { time_ms: time.as_millis() as u64, stream, origin, text }
    }

    /// Bytes of memory that it takes.
    pub(super) fn cost(&self) -> usize {
        LINE_COST + self.text.len()
    }

    /// When it was read.
    pub fn time(&self) -> SystemTime {
        UNIX_EPOCH + Duration::from_millis(self.time_ms)
    }

    /// Whether an instance printed it, or it is about that one; with `None` every line is wanted.
    pub fn is_of(&self, instance: Option<u64>) -> bool {
        instance.is_none() || self.origin.map(|origin| origin.instance) == instance
    }

    /// The line as JSON with a line end, as files and the admin API have it.
    pub fn to_json(&self) -> Vec<u8> {
        let mut json = serde_json::to_vec(self).expect("a line is plain data");
        json.push(b'\n');
        json
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn json_says_which_instance_it_was() {
        let origin = Some(Origin { instance: 7, pid: 42 });
        let line = Line { time_ms: 1, stream: Stream::Out, origin, text: "a\u{1b}".to_owned() };
        let json = line.to_json();
        let text = r#"{"time_ms":1,"stream":"out","instance":7,"pid":42,"text":"a\u001b"}"#;
        assert_eq!(String::from_utf8(json.clone()).unwrap(), format!("{text}\n"));
        assert_eq!(serde_json::from_slice::<Line>(&json).unwrap(), line);
        let remark = Line { origin: None, stream: Stream::Thaw, ..line };
        assert_eq!(serde_json::from_slice::<Line>(&remark.to_json()).unwrap(), remark);
    }
}
