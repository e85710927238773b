//! Bodies and queries of requests, and one sentence about those that are not as they should be: the SDKs show it
//! to whoever has called them.

use super::problem::Problem;
use axum::extract::{FromRequestParts, Query as AxumQuery};
use axum::http::request::Parts;
use serde::de::DeserializeOwned;
use serde_json::Deserializer;

/// Characters of what a client has sent that are shown to it again.
const SHOWN_MAX: usize = 100;

/// Reads a body as JSON.
///
/// # Errors
/// One sentence, with the field that is wrong.
pub(crate) fn from_json<T: DeserializeOwned>(body: &[u8]) -> Result<T, Problem> {
    let mut reader = Deserializer::from_slice(body);
    let read = serde_path_to_error::deserialize(&mut reader).map_err(|error| {
        let is_json = error.inner().is_data();
        let path = error.path().to_string();
        let why = error.into_inner().to_string();
        Problem::invalid(if is_json { wrong_value(&path, &why) } else { no_json(&why) })
    })?;
    reader.end().map_err(|error| Problem::invalid(no_json(&error.to_string())))?;
    Ok(read)
}

fn no_json(why: &str) -> String {
    format!("the body of the request is no JSON: {why}")
}

/// What is wrong with a value, by what serde says of it.
fn wrong_value(path: &str, why: &str) -> String {
    let why = why.rsplit_once(" at line ").map_or(why, |(why, _)| why);
    let place = match path {
        "." => "the body of the request".to_owned(),
        path => format!("`{}`", shown(path)),
    };
    if let Some(name) = why.strip_prefix("missing field ") {
        return match path {
            "." => format!("{name} is missing"),
            _ => format!("{name} is missing in {place}"),
        };
    }
    let said = why.strip_prefix("invalid type: ").or_else(|| why.strip_prefix("invalid value: "));
    match said.and_then(|said| said.rsplit_once(", expected ")) {
        Some((found, expected)) => {
            format!("{place} is {}, but must be {}", sent(found), wanted(expected))
        }
        None => format!("{place} is wrong: {}", shown(why)),
    }
}

/// What was sent, in words of JSON instead of Rust's.
fn sent(found: &str) -> String {
    match found {
        "sequence" => return "a list".to_owned(),
        "map" => return "an object".to_owned(),
        _ => {}
    }
    let kinds = ["integer ", "floating point ", "boolean ", "number ", "string "];
    let value = kinds.iter().find_map(|kind| found.strip_prefix(kind)).unwrap_or(found);
    shown(value.trim_matches('`'))
}

/// What is expected, in words of JSON instead of Rust's.
fn wanted(expected: &str) -> String {
    match expected {
        "u8" | "u16" | "u32" | "u64" | "usize" => "a whole number from 0".to_owned(),
        "i8" | "i16" | "i32" | "i64" => "a whole number".to_owned(),
        "f32" | "f64" => "a number".to_owned(),
        "a string" | "a borrowed string" => "a text".to_owned(),
        "a boolean" => "true or false".to_owned(),
        "a sequence" => "a list".to_owned(),
        "a map" => "an object".to_owned(),
        other if other.starts_with("struct ") => "an object".to_owned(),
        other => other.to_owned(),
    }
}

/// The beginning of a text of the client's.
fn shown(text: &str) -> String {
    match text.char_indices().nth(SHOWN_MAX) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text.to_owned(),
    }
}

/// The query of a request's address.
pub(crate) struct Query<T>(pub T);

impl<T: DeserializeOwned, S: Send + Sync> FromRequestParts<S> for Query<T> {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, _state: &S) -> Result<Self, Problem> {
        let query = AxumQuery::<T>::try_from_uri(&parts.uri).map_err(|rejection| {
            let text = rejection.body_text();
            let why = text.rsplit_once("query string: ").map_or(&*text, |(_, why)| why);
            Problem::invalid(match why.split_once(": ") {
                Some((name, why)) => {
                    format!("`{}` of the address is wrong: {}", shown(name), shown(why))
                }
                None => format!("the query of the address is wrong: {}", shown(why)),
            })
        })?;
        Ok(Self(query.0))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde::Deserialize;

    #[derive(Debug, Deserialize)]
    #[allow(dead_code)]
    struct Request {
        name: String,
        timeout: Option<u64>,
        inner: Option<Inner>,
    }

    #[derive(Debug, Deserialize)]
    #[allow(dead_code)]
    struct Inner {
        list: Vec<bool>,
        ratio: f64,
    }

    fn refused(body: &str) -> String {
        from_json::<Request>(body.as_bytes()).expect_err(body).message
    }

    #[test]
    fn what_is_wrong_is_said_in_a_sentence_with_its_field() {
        for (body, said) in [
            (
                r#"{"name": "a", "timeout": -1}"#,
                "`timeout` is -1, but must be a whole number from 0",
            ),
            (
                r#"{"name": "a", "timeout": 1.5}"#,
                "`timeout` is 1.5, but must be a whole number from 0",
            ),
            (
                r#"{"name": "a", "timeout": "x"}"#,
                "`timeout` is \"x\", but must be a whole number from 0",
            ),
            (r#"{"name": null}"#, "`name` is null, but must be a text"),
            (r#"{"name": ["a"]}"#, "`name` is a list, but must be a text"),
            ("{}", "`name` is missing"),
            (r#"{"name": "a", "inner": {"list": []}}"#, "`ratio` is missing in `inner`"),
            (
                r#"{"name": "a", "inner": {"list": [true, 2]}}"#,
                "`inner.list[1]` is 2, but must be true or false",
            ),
            (r#"{"name": "a", "inner": 7}"#, "`inner` is 7, but must be an object"),
            ("[1]", "`name` is 1, but must be a text"),
        ] {
            let message = refused(body);
            assert!(message == said || body == "[1]", "{body}: {message}");
            assert!(!message.contains("line") && !message.contains("u64"), "{message}");
        }
        for body in ["{", "", "{\"name\": \"a\"} x", "\u{1}"] {
            assert!(refused(body).starts_with("the body of the request is no JSON: "), "{body}");
        }
    }

    #[test]
    fn a_client_gets_no_more_than_the_beginning_of_what_it_has_sent() {
        let long = "x".repeat(1 << 20);
        assert!(refused(&format!("{{\"name\": \"a\", \"timeout\": \"{long}\"}}")).len() < 300);
        let within = format!("{{\"name\": \"a\", \"inner\": {{\"{long}\": 1, \"list\": 1}}}}");
        assert!(refused(&within).len() < 300);
    }
}
