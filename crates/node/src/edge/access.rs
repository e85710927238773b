//! The access log: a line for each request when it is over. Clients choose most of what is
//! in a line, so every part of it has a bound, and nothing of it can end the line.

use super::request_id::RequestId;
use hyper::header::{HeaderMap, HeaderName, REFERER, USER_AGENT};
use serde::Deserialize;
use serde_json::json;
use std::fmt::Write;
use std::net::SocketAddr;
use std::time::{Duration, SystemTime, UNIX_EPOCH};
use thaw_home::config::FunctionName;

/// Most bytes of one part of a line that a client has chosen.
const PART_MAX: usize = 1024;
const DAY_S: u64 = 86_400;
const MONTHS: [&str; 12] =
    ["Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec"];

/// How a line looks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Format {
    /// An object of JSON.
    Json,
    /// As Apache's `combined` has it, for tools that read that.
    Combined,
}

/// A request, as it came.
#[derive(Clone, Debug)]
pub(crate) struct AccessRecord {
    pub time: SystemTime,
    pub id: RequestId,
    pub peer: SocketAddr,
    /// It came over TLS.
    pub is_tls: bool,
    /// The client's own bytes, cut.
    method: String,
    host: String,
    target: String,
    version: &'static str,
    agent: String,
    referer: String,
}

/// What became of a request.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Passage {
    pub function: Option<FunctionName>,
    /// Who the client has shown to be.
    pub user: Option<String>,
    /// `None`: an instance has answered by itself, on a connection that was handed over.
    pub status: Option<u16>,
    /// Bytes of the body of the answer; all bytes to the client if it was handed over.
    pub sent: u64,
    pub duration: Duration,
    /// Why the gateway has answered itself.
    pub error: Option<&'static str>,
}

impl AccessRecord {
    /// A request with this line and these headers.
    pub fn new(
        id: RequestId,
        (peer, is_tls): (SocketAddr, bool),
        (method, host, target): (&str, &str, &str),
        version: &'static str,
        headers: Option<&HeaderMap>,
    ) -> Self {
        let field = |name: HeaderName| {
            let value = headers.and_then(|headers| headers.get(name));
            value.map_or(String::new(), |value| cut(&String::from_utf8_lossy(value.as_bytes())))
        };
        Self {
            time: SystemTime::now(),
            id,
            peer,
            is_tls,
            method: cut(method),
            host: cut(host),
            target: cut(target),
            version,
            agent: field(USER_AGENT),
            referer: field(REFERER),
        }
    }

    /// The line, with its end.
    pub(super) fn line(&self, passage: &Passage, format: Format) -> String {
        match format {
            Format::Json => format!("{}\n", self.json(passage)),
            Format::Combined => self.combined(passage),
        }
    }

    fn json(&self, passage: &Passage) -> serde_json::Value {
        let time_ms = self.time.duration_since(UNIX_EPOCH).unwrap_or_default().as_millis();
        let mut line = json!({
            "time_ms": u64::try_from(time_ms).unwrap_or(u64::MAX),
            "request_id": self.id.to_string(),
            "trace_id": self.id.trace(),
            "client": self.peer.ip().to_string(),
            "port": self.peer.port(),
            "tls": self.is_tls,
            "method": self.method,
            "host": self.host,
            "target": self.target,
            "version": self.version,
            "status": passage.status,
            "sent": passage.sent,
            "duration_us": u64::try_from(passage.duration.as_micros()).unwrap_or(u64::MAX),
        });
        let optional = [
            ("function", passage.function.as_ref().map(|name| name.as_str())),
            ("user", passage.user.as_deref()),
            ("error", passage.error),
            ("user_agent", Some(self.agent.as_str()).filter(|text| !text.is_empty())),
            ("referer", Some(self.referer.as_str()).filter(|text| !text.is_empty())),
        ];
        for (name, value) in optional {
            if let Some(value) = value {
                line[name] = json!(value);
            }
        }
        line
    }

    fn combined(&self, passage: &Passage) -> String {
        let or_none = |text: &str| if text.is_empty() { "-".to_owned() } else { escaped(text) };
        let status = passage.status.map_or("-".to_owned(), |status| status.to_string());
        format!(
            "{} - {} [{}] \"{} {} {}\" {status} {} \"{}\" \"{}\" {}\n",
            self.peer.ip(),
            or_none(passage.user.as_deref().unwrap_or_default()).replace(' ', "\\x20"),
            clock(self.time),
            escaped(&self.method),
            escaped(&self.target),
            self.version,
            passage.sent,
            or_none(&self.referer),
            or_none(&self.agent),
            self.id,
        )
    }
}

fn cut(text: &str) -> String {
    beginning(text, PART_MAX).to_owned()
}

/// The beginning of a text, of at most so many bytes.
pub(crate) fn beginning(text: &str, most: usize) -> &str {
    let mut end = text.len().min(most);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    &text[..end]
}

/// Text between quotation marks.
fn escaped(text: &str) -> String {
    let mut escaped = String::with_capacity(text.len());
    for byte in text.bytes() {
        match byte {
            b'"' | b'\\' | 0..0x20 | 0x7f.. => {
                let _ = write!(escaped, "\\x{byte:02X}");
            }
            _ => escaped.push(byte.into()),
        }
    }
    escaped
}

/// A time as `combined` has it, in UTC.
fn clock(time: SystemTime) -> String {
    let seconds = time.duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
    let (year, month, day) = date(seconds / DAY_S);
    let rest = seconds % DAY_S;
    let (hour, minute, second) = (rest / 3600, rest / 60 % 60, rest % 60);
    let month = MONTHS[month as usize - 1];
    format!("{day:02}/{month}/{year}:{hour:02}:{minute:02}:{second:02} +0000")
}

/// The date that is so many days after 1970-01-01 (Hinnant, "chrono-Compatible Low-Level Date
/// Algorithms", `civil_from_days`).
fn date(days: u64) -> (u64, u64, u64) {
    let days = days + 719_468;
    let (era, of_era) = (days / 146_097, days % 146_097);
    let year_of_era = (of_era - of_era / 1460 + of_era / 36_524 - of_era / 146_096) / 365;
    let of_year = of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let shifted = (5 * of_year + 2) / 153;
    let day = of_year - (153 * shifted + 2) / 5 + 1;
    let month = if shifted < 10 { shifted + 3 } else { shifted - 9 };
    (year_of_era + era * 400 + u64::from(month <= 2), month, day)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(target: &str, agent: &str) -> AccessRecord {
        let mut headers = HeaderMap::new();
        headers.insert(USER_AGENT, agent.parse().unwrap());
        let line = ("GET", "f.example", target);
        let client = ("192.0.2.1:5000".parse().unwrap(), false);
        let mut record =
            AccessRecord::new(RequestId::new(), client, line, "HTTP/1.1", Some(&headers));
        record.time = UNIX_EPOCH + Duration::from_secs(1_709_210_096);
        record
    }

    fn passage() -> Passage {
        Passage { status: Some(200), sent: 12, ..Passage::default() }
    }

    #[test]
    fn combined_lines_are_as_tools_expect_them() {
        let record_of_it = record("/x?y", "curl/8");
        let line = record_of_it.line(&passage(), Format::Combined);
        let expected = format!(
            "192.0.2.1 - - [29/Feb/2024:12:34:56 +0000] \"GET /x?y HTTP/1.1\" 200 12 \"-\" \"curl/8\" {}\n",
            record_of_it.id
        );
        assert_eq!(line, expected);
        let by = Passage { user: Some("a b".into()), status: None, ..passage() };
        let line = record("/", "say \"hi\"\\").line(&by, Format::Combined);
        assert!(line.contains(" - a\\x20b ["), "{line}");
        assert!(line.contains("\" - 12 \"-\" \"say \\x22hi\\x22\\x5C\" "), "{line}");
    }

    #[test]
    fn json_lines_say_what_is_known() {
        let record = record("/x", "curl/8");
        let mut passage = passage();
        passage.function = Some("f".parse().unwrap());
        passage.duration = Duration::from_millis(3);
        let line = record.line(&passage, Format::Json);
        let line: serde_json::Value = serde_json::from_str(&line).unwrap();
        assert_eq!(line["time_ms"], 1_709_210_096_000_u64);
        assert_eq!(line["request_id"], record.id.to_string());
        assert_eq!((&line["function"], &line["status"]), (&json!("f"), &json!(200)));
        assert_eq!((&line["duration_us"], &line["sent"]), (&json!(3000), &json!(12)));
        assert!(line.get("error").is_none() && line.get("user").is_none());
    }

    #[test]
    fn a_line_is_one_line_and_has_a_bound() {
        let long = "é".repeat(100_000);
        let mut record = record(&format!("/{long}"), "x");
        record.method = cut("GET\n\u{7f}evil");
        record.agent = cut(&format!("\r\n{long}"));
        for format in [Format::Json, Format::Combined] {
            let line = record.line(&passage(), format);
            assert_eq!(line.matches(['\n', '\r']).count(), 1, "{line}");
            assert!(line.is_ascii() || format == Format::Json, "{line}");
            assert!(line.len() < 16 * PART_MAX, "{}", line.len());
        }
    }

    #[test]
    fn dates_are_those_of_the_calendar() {
        assert_eq!(date(0), (1970, 1, 1));
        assert_eq!(date(59), (1970, 3, 1));
        assert_eq!(date(11_016), (2000, 2, 29));
        assert_eq!(date(47_540), (2100, 2, 28));
        assert_eq!(date(47_541), (2100, 3, 1));
    }
}
