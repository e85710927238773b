//! CloudEvents 1.0 over HTTP: which requests are events, whether they are valid, and how one in
//! structured mode becomes one in binary mode (the specification's HTTP protocol binding, §3).

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use hyper::header::{CONTENT_LENGTH, CONTENT_TYPE, HeaderMap, HeaderName, HeaderValue};
use percent_encoding::{AsciiSet, CONTROLS, percent_decode, utf8_percent_encode};
use serde::de::{Deserialize, Deserializer, Error as _, MapAccess, Visitor};
use serde_json::value::RawValue;
use std::collections::BTreeMap;
use std::fmt;
use thaw_http::head::EVENT_TYPE;

/// The version that is spoken.
const VERSION: &str = "1.0";
/// With what the types of the node's own events begin.
const OWN_TYPES: &str = "thaw.";
/// Prefix of the headers of attributes.
const PREFIX: &str = "ce-";
/// Most attributes of an event: as many as a head has fields for.
const ATTRIBUTES_MAX: usize = 100;
/// Most bytes of all attributes as headers: as many as a head has.
const ATTRIBUTES_BYTES: usize = 16 << 10;
/// Characters of a value that are percent-encoded in a header (§3.1.3.2).
const ENCODED: &AsciiSet = &CONTROLS.add(b' ').add(b'"').add(b'%');

/// How a request carries an event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// It does not.
    None,
    /// Its headers are the attributes, and its body is the data.
    Binary,
    /// Its body is JSON with both.
    Structured,
}

/// What is wrong with an event: one sentence.
pub type WrongEvent = String;

/// Whether headers are those of an event in binary mode.
pub fn is_binary(headers: &HeaderMap) -> bool {
    headers.contains_key("ce-specversion")
}

/// How a request carries an event.
///
/// # Errors
/// It carries one in a way that is not supported.
pub fn mode(headers: &HeaderMap) -> Result<Mode, WrongEvent> {
    let kind = headers.get(CONTENT_TYPE).and_then(|kind| kind.to_str().ok()).unwrap_or_default();
    let kind = kind.split(';').next().unwrap_or_default().trim().to_ascii_lowercase();
    match kind.strip_prefix("application/cloudevents") {
        Some("+json") => Ok(Mode::Structured),
        Some(batch) if batch.starts_with("-batch") => {
            Err("batches of events are not supported; send each event in a request of its own"
                .to_owned())
        }
        Some(other) if other.is_empty() || other.starts_with('+') => Err(format!(
            "events as `{kind}` are not supported; send application/cloudevents+json, or headers \
             that begin with ce-"
        )),
        _ if is_binary(headers) => Ok(Mode::Binary),
        _ => Ok(Mode::None),
    }
}

/// Checks that a client's event does not pass for one of the node's own.
///
/// # Errors
/// It does.
pub fn check_foreign(headers: &HeaderMap) -> Result<(), WrongEvent> {
    let is_own = |value: &HeaderValue| {
        let text = percent_decode(value.as_bytes()).collect::<Vec<u8>>();
        let text = text.trim_ascii_start().get(..OWN_TYPES.len());
        text.is_some_and(|text| text.eq_ignore_ascii_case(OWN_TYPES.as_bytes()))
    };
    match headers.get_all(EVENT_TYPE).iter().any(is_own) {
        true => Err(format!("types of events that begin with {OWN_TYPES} are not for clients")),
        false => Ok(()),
    }
}

/// Checks the attributes of an event in binary mode.
///
/// # Errors
/// What is wrong.
pub fn check(headers: &HeaderMap) -> Result<(), WrongEvent> {
    let attribute = |name: &str| -> Result<Option<String>, WrongEvent> {
        let header = format!("{PREFIX}{name}");
        let mut values = headers.get_all(&header).iter();
        let value = values.next();
        if values.next().is_some() {
            return Err(format!("the event has `{header}` twice; send it once"));
        }
        let decode = |value: &HeaderValue| {
            let text = percent_decode(value.as_bytes()).decode_utf8().ok()?;
            Some(text.into_owned())
        };
        value
            .map(|value| {
                decode(value).ok_or_else(|| format!("`{header}` of the event is not text"))
            })
            .transpose()
    };
    check_attributes(attribute)?;
    let mut names = headers.keys().filter_map(|name| name.as_str().strip_prefix(PREFIX));
    names.try_for_each(check_name)
}

/// Checks what every event has, and what has a form.
fn check_attributes(
    attribute: impl Fn(&str) -> Result<Option<String>, WrongEvent>,
) -> Result<(), WrongEvent> {
    match attribute("specversion")?.as_deref() {
        Some(VERSION) => {}
        Some(other) => {
            return Err(format!(
                "CloudEvents {} are not known; send specversion {VERSION}",
                thaw_sandbox::escape(other.as_bytes())
            ));
        }
        None => return Err(format!("the event has no specversion; send {VERSION}")),
    }
    for name in ["id", "source", "type"] {
        if attribute(name)?.is_none_or(|value| value.is_empty()) {
            return Err(format!("the event has no `{name}`, which is required; send one"));
        }
    }
    let wrong_uri = |value: &str| value.contains([' ', '\t', '\n', '<', '>', '"']);
    for name in ["source", "dataschema"] {
        if attribute(name)?.is_some_and(|value| wrong_uri(&value)) {
            return Err(format!("`{name}` of the event is no URI"));
        }
    }
    match attribute("time")? {
        Some(time) if time.parse::<jiff::Timestamp>().is_err() => {
            Err("`time` of the event is no time of RFC 3339, such as 2026-11-23T21:00:00Z"
                .to_owned())
        }
        _ => Ok(()),
    }
}

/// Names are of lower-case letters and digits (§3.1 of the specification).
fn check_name(name: &str) -> Result<(), WrongEvent> {
    let is_usual = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit();
    match !name.is_empty() && name.len() <= 64 && name.bytes().all(is_usual) {
        true => Ok(()),
        false => Err(format!(
            "`{}` cannot name an attribute of an event; use lower-case letters and digits",
            thaw_sandbox::escape(name.as_bytes())
        )),
    }
}

/// Makes an event in structured mode one in binary mode: its attributes become headers, and its data
/// is the body that this gives back.
///
/// # Errors
/// What is wrong with it.
pub fn to_binary(headers: &mut HeaderMap, body: &[u8]) -> Result<Vec<u8>, WrongEvent> {
    let Fields(event) = serde_json::from_slice(body)
        .map_err(|error| format!("the event is no JSON object ({error})"))?;
    let data = event.get("data").map(|data| data.get());
    let encoded = event.get("data_base64").map(|data| data.get());
    let attributes = texts(&event)?;
    let find = |name: &str| attributes.iter().find(|(key, _)| key == name).map(|(_, v)| v.clone());
    check_attributes(|name| Ok(find(name)))?;
    let kind = find("datacontenttype");
    let is_text = kind.as_deref().is_some_and(|kind| !is_json(kind));
    let data = match (data, encoded) {
        (Some(_), Some(_)) => return Err("the event has `data` and `data_base64`".to_owned()),
        (None, Some(encoded)) => {
            let text: String = serde_json::from_str(encoded)
                .map_err(|_| "`data_base64` of the event is no text".to_owned())?;
            STANDARD
                .decode(text)
                .map_err(|error| format!("`data_base64` of the event is no base64 ({error})"))?
        }
        (Some(data), None) if is_text && data.starts_with('"') => {
            let text: String = serde_json::from_str(data)
                .map_err(|error| format!("`data` of the event is no text ({error})"))?;
            text.into_bytes()
        }
        // As it was written: another way to write the same number may be longer.
        (Some(data), None) => data.as_bytes().to_vec(),
        (None, None) => Vec::new(),
    };
    // Attributes that came as headers, too, are not those of the event.
    let stale: Vec<HeaderName> =
        headers.keys().filter(|name| name.as_str().starts_with(PREFIX)).cloned().collect();
    stale.iter().for_each(|name| drop(headers.remove(name)));
    headers.remove(CONTENT_TYPE);
    headers.remove(CONTENT_LENGTH);
    let mut size = 0;
    for (name, value) in &attributes {
        let (header, value) = match name.as_str() {
            "datacontenttype" => (CONTENT_TYPE.to_string(), value.clone()),
            _ => (format!("{PREFIX}{name}"), utf8_percent_encode(value, ENCODED).to_string()),
        };
        size += header.len() + value.len();
        if size > ATTRIBUTES_BYTES {
            return Err(format!(
                "the attributes of the event have more than {} KiB; put large values into `data`",
                ATTRIBUTES_BYTES >> 10
            ));
        }
        let wrong = || format!("`{name}` of the event cannot be sent as a header");
        let header = HeaderName::from_bytes(header.as_bytes()).map_err(|_| wrong())?;
        headers.insert(header, HeaderValue::from_str(&value).map_err(|_| wrong())?);
    }
    if !data.is_empty() && kind.is_none() {
        headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
    }
    Ok(data)
}

/// The fields of an event, as they were written.
struct Fields<'a>(BTreeMap<String, &'a RawValue>);

impl<'de> Deserialize<'de> for Fields<'de> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(FieldsVisitor)
    }
}

struct FieldsVisitor;

impl<'de> Visitor<'de> for FieldsVisitor {
    type Value = Fields<'de>;

    fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("an object")
    }

    fn visit_map<M: MapAccess<'de>>(self, mut map: M) -> Result<Fields<'de>, M::Error> {
        let mut fields = BTreeMap::new();
        while let Some((name, value)) = map.next_entry::<String, &'de RawValue>()? {
            // Its data is no attribute.
            if fields.len() > ATTRIBUTES_MAX {
                return Err(M::Error::custom(format!(
                    "it has more than {ATTRIBUTES_MAX} attributes"
                )));
            }
            if fields.insert(name, value).is_some() {
                return Err(M::Error::custom("it has a name twice"));
            }
        }
        Ok(Fields(fields))
    }
}

/// Attributes as texts (§3.1.3.1); those that are `null` are not there.
fn texts(event: &BTreeMap<String, &RawValue>) -> Result<Vec<(String, String)>, WrongEvent> {
    let mut attributes = Vec::new();
    for (name, value) in event.iter().filter(|(name, _)| !is_data(name)) {
        check_name(name)?;
        let value = value.get();
        let text = match value {
            "null" => continue,
            "true" | "false" => value.to_owned(),
            _ if value.starts_with('"') => serde_json::from_str(value)
                .map_err(|error| format!("`{name}` of the event is no text ({error})"))?,
            _ if value.parse::<i32>().is_ok() => value.to_owned(),
            _ => {
                return Err(format!(
                    "`{name}` of the event is no text, no 32-bit integer and no boolean"
                ));
            }
        };
        attributes.push((name.clone(), text));
    }
    Ok(attributes)
}

fn is_data(name: &str) -> bool {
    matches!(name, "data" | "data_base64")
}

fn is_json(kind: &str) -> bool {
    let kind = kind.split(';').next().unwrap_or_default().trim().to_ascii_lowercase();
    kind.ends_with("/json") || kind.ends_with("+json")
}

/// Makes a request an event of this type, source and id, of this time in milliseconds since 1970.
pub(super) fn describe(
    headers: &mut HeaderMap,
    (kind, source, id): (&str, &str, &str),
    time_ms: u64,
) {
    let time =
        i64::try_from(time_ms).ok().and_then(|ms| jiff::Timestamp::from_millisecond(ms).ok());
    let time = time.map(|time| time.to_string());
    let attributes = [
        ("ce-specversion", Some(VERSION)),
        (EVENT_TYPE, Some(kind)),
        ("ce-source", Some(source)),
        ("ce-id", Some(id)),
        ("ce-time", time.as_deref()),
    ];
    for (name, value) in attributes {
        if let Some(value) = value.and_then(|value| HeaderValue::from_str(value).ok()) {
            headers.insert(name, value);
        }
    }
}

/// Tells an event from all others: its source and its id.
pub(crate) fn identity(headers: &HeaderMap) -> Option<Vec<u8>> {
    if !is_binary(headers) {
        return None;
    }
    let (source, id) = (headers.get("ce-source")?, headers.get("ce-id")?);
    // A header has no line feed.
    Some([source.as_bytes(), b"\n", id.as_bytes()].concat())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn headers(fields: &[(&'static str, &str)]) -> HeaderMap {
        let mut headers = HeaderMap::new();
        for (name, value) in fields {
            headers.append(*name, HeaderValue::from_str(value).unwrap());
        }
        headers
    }

    const BINARY: [(&str, &str); 4] =
        [("ce-specversion", "1.0"), ("ce-id", "1"), ("ce-source", "/s"), ("ce-type", "t")];

    #[test]
    fn modes_are_known_by_their_headers() {
        let of = |kind: &str| mode(&headers(&[("content-type", kind)]));
        assert_eq!(of("application/cloudevents+json; charset=utf-8"), Ok(Mode::Structured));
        assert_eq!(of("application/json"), Ok(Mode::None));
        assert_eq!(of("application/cloudeventsx"), Ok(Mode::None));
        assert_eq!(mode(&headers(&BINARY)), Ok(Mode::Binary));
        assert!(of("application/cloudevents-batch+json").unwrap_err().contains("batches"));
        assert!(of("application/cloudevents+avro").unwrap_err().contains("avro"));
    }

    #[test]
    fn events_in_binary_mode_are_checked() {
        assert_eq!(check(&headers(&BINARY)), Ok(()));
        for missing in 0..4 {
            let some = BINARY.iter().enumerate().filter(|(at, _)| *at != missing);
            let some: Vec<_> = some.map(|(_, field)| *field).collect();
            assert!(check(&headers(&some)).is_err(), "{missing}");
        }
        for wrong in [
            ("ce-specversion", "0.3"),
            ("ce-id", "2"),
            ("ce-time", "yesterday"),
            ("ce-dataschema", "a b"),
            ("ce-my_own", "1"),
            ("ce-x", "%ff"),
        ] {
            let all: Vec<_> = BINARY.into_iter().chain([wrong]).collect();
            // A value that is no text is found where it has a form only.
            assert_eq!(check(&headers(&all)).is_err(), wrong.0 != "ce-x", "{wrong:?}");
        }
        let all: Vec<_> = BINARY.into_iter().chain([("ce-time", "2026-11-23T21:00:00Z")]).collect();
        assert_eq!(check(&headers(&all)), Ok(()));
    }

    #[test]
    fn clients_cannot_send_events_of_the_node() {
        for (kind, expected) in [
            ("thaw.schedule", false),
            ("Thaw.invocation", false),
            ("%74haw%2Eschedule", false),
            ("thaw", true),
            ("com.thaw.schedule", true),
            ("t", true),
        ] {
            let all = headers(&[("ce-type", "t"), ("ce-type", kind)]);
            assert_eq!(check_foreign(&all).is_ok(), expected, "{kind}");
        }
        assert_eq!(check_foreign(&HeaderMap::new()), Ok(()));
    }

    #[test]
    fn structured_events_become_binary_ones() {
        let mut got = headers(&[("content-type", "application/cloudevents+json"), ("ce-old", "1")]);
        let event = r#"{"specversion":"1.0","id":"a b","source":"/s","type":"t","n":5,"yes":true,
            "gone":null,"city":"Köln","data":{"k":[1]}}"#;
        let data = to_binary(&mut got, event.as_bytes()).unwrap();
        assert_eq!(data, br#"{"k":[1]}"#);
        assert_eq!(got["ce-id"], "a%20b");
        assert_eq!(
            (&got["ce-n"], &got["ce-yes"]),
            (&"5".parse().unwrap(), &"true".parse().unwrap())
        );
        assert_eq!(got["ce-city"], "K%C3%B6ln");
        assert_eq!(got["content-type"], "application/json");
        assert!(!got.contains_key("ce-gone") && !got.contains_key("ce-old"));
        assert_eq!(check(&got), Ok(()));
    }

    #[test]
    fn data_is_what_its_type_says() {
        let data = |rest: &str| {
            let event =
                format!(r#"{{"specversion":"1.0","id":"1","source":"/s","type":"t"{rest}}}"#);
            to_binary(&mut HeaderMap::new(), event.as_bytes())
        };
        assert_eq!(data(""), Ok(Vec::new()));
        assert_eq!(data(r#","data":"x""#), Ok(b"\"x\"".to_vec()));
        assert_eq!(data(r#","datacontenttype":"text/plain","data":"x""#), Ok(b"x".to_vec()));
        assert_eq!(data(r#","datacontenttype":"a/b+json","data":"x""#), Ok(b"\"x\"".to_vec()));
        assert_eq!(data(r#","data_base64":"AP8=""#), Ok(vec![0, 255]));
        for wrong in [
            r#","data":1,"data_base64":"AA==""#,
            r#","data_base64":"?""#,
            r#","data_base64":1"#,
            r#","Upper":1"#,
            r#","n":4294967296"#,
            r#","o":{}"#,
            r#","x":"a","datacontenttype":"a\nb""#,
        ] {
            assert!(data(wrong).is_err(), "{wrong}");
        }
        assert!(to_binary(&mut HeaderMap::new(), b"[]").is_err());
        assert!(to_binary(&mut HeaderMap::new(), b"{").is_err());
    }

    #[test]
    fn an_event_does_not_grow_on_its_way() {
        let event = |rest: &str| {
            format!(r#"{{"specversion":"1.0","id":"1","source":"/s","type":"t",{rest}}}"#)
        };
        let convert = |rest: &str| to_binary(&mut HeaderMap::new(), event(rest).as_bytes());
        // Written out as numbers of 64 bits they would be ten times as long.
        let data = format!("[{}]", vec!["1e9"; 1000].join(","));
        assert_eq!(convert(&format!("\"data\":{data}")), Ok(data.into_bytes()));
        let value = |len: usize| convert(&format!("\"big\":\"{}\"", "x".repeat(len)));
        assert!(value(15 << 10).is_ok());
        assert!(value(16 << 10).unwrap_err().contains("16 KiB"));
        // Three bytes each, when they are encoded.
        let spaces = convert(&format!("\"big\":\"{}\"", " ".repeat(6 << 10)));
        assert!(spaces.unwrap_err().contains("16 KiB"));
        let many = |count: usize| {
            let all: Vec<String> = (0..count).map(|n| format!("\"a{n}\":1")).collect();
            convert(&all.join(","))
        };
        assert!(many(ATTRIBUTES_MAX - 4).is_ok());
        assert!(many(ATTRIBUTES_MAX + 1).unwrap_err().contains("attributes"));
        assert!(convert(r#""id":"2""#).unwrap_err().contains("twice"));
    }

    #[test]
    fn what_is_described_is_an_event() {
        let mut got = HeaderMap::new();
        describe(&mut got, ("thaw.schedule", "/functions/f/schedules/s", "s-1"), 1_795_353_549_000);
        assert_eq!(check(&got), Ok(()));
        assert_eq!(identity(&got), Some(b"/functions/f/schedules/s\ns-1".to_vec()));
        assert_eq!(identity(&HeaderMap::new()), None);
    }
}
