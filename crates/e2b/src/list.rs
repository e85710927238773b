//! The lists of the control API: which sandboxes are meant, and their pages.

use super::E2b;
use super::backend::Sandbox;
use super::control::{Asked, Client};
use super::input::Query;
use super::problem::Problem;
use axum::Extension;
use axum::Json;
use axum::extract::State;
use axum::http::{HeaderName, HeaderValue};
use axum::response::{IntoResponse, Response};
use serde::Deserialize;
use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::time::{Duration, UNIX_EPOCH};

/// Most sandboxes in one page of a list.
const PAGE_MAX: usize = 100;
/// The header that says where the next page begins.
const NEXT_TOKEN: HeaderName = HeaderName::from_static("x-next-token");

/// What is listed.
#[derive(Default, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct ListQuery {
    metadata: Option<String>,
    state: Option<String>,
    order: Option<String>,
    started_after: Option<String>,
    template: Option<String>,
    next_token: Option<String>,
    limit: Option<usize>,
}

/// The first version of the list: those that run, all of them.
pub(super) async fn running(
    (State(e2b), Extension(client), Query(query)): Asked<Query<ListQuery>>,
) -> Response {
    let query = ListQuery { state: Some("running".to_owned()), ..query };
    match matching(&e2b, &client, &query) {
        Ok(found) => {
            let shown: Vec<_> = found.iter().map(|sandbox| e2b.listed(sandbox)).collect();
            Json(shown).into_response()
        }
        Err(problem) => problem.into_response(),
    }
}

/// One page of a list. The next one begins after the last sandbox of this one, so that sandboxes
/// that come and go meanwhile shift nothing.
pub(super) async fn page(
    (State(e2b), Extension(client), Query(query)): Asked<Query<ListQuery>>,
) -> Response {
    let found = || {
        let limit = query.limit.unwrap_or(PAGE_MAX);
        if !(1..=PAGE_MAX).contains(&limit) {
            return Err(Problem::invalid(format!("`limit` is between 1 and {PAGE_MAX}")));
        }
        let mut found = matching(&e2b, &client, &query)?;
        if let Some(token) = &query.next_token {
            let at = found.iter().position(|sandbox| position(sandbox) == *token);
            let at = at.ok_or_else(|| {
                Problem::invalid("the sandbox at which this page begins is gone; list anew")
            })?;
            found.drain(..at);
        }
        let next = found.get(limit).map(position);
        found.truncate(limit);
        Ok((found, next))
    };
    match found() {
        Ok((found, next)) => {
            let shown: Vec<_> = found.iter().map(|sandbox| e2b.listed(sandbox)).collect();
            let mut response = Json(shown).into_response();
            if let Some(token) = next.and_then(|token| HeaderValue::try_from(token).ok()) {
                response.headers_mut().insert(NEXT_TOKEN, token);
            }
            response
        }
        Err(problem) => problem.into_response(),
    }
}

fn position(sandbox: &Sandbox) -> String {
    format!("{}-{}", sandbox.created_ms, sandbox.id)
}

/// The sandboxes that a query means, the latest first unless it says otherwise.
fn matching(e2b: &E2b, client: &Client, query: &ListQuery) -> Result<Vec<Sandbox>, Problem> {
    let states = query.state.as_deref().unwrap_or("running,paused");
    let (runs, pauses) = (named(states, "running"), named(states, "paused"));
    let metadata = query.metadata.as_deref().map(metadata_filter).transpose()?.unwrap_or_default();
    let after = query.started_after.as_deref().map(time_ms).transpose()?.unwrap_or(0);
    let settings = e2b.settings.now();
    let meant = query.template.as_deref().map(|template| settings.function(template));
    let is_of_it = |sandbox: &Sandbox, meant: &str| {
        let record = e2b.records.get(&sandbox.id).unwrap_or_default();
        settings.function(&record.template) == meant
    };
    let is_meant = |sandbox: &Sandbox| {
        (if sandbox.is_paused() { pauses } else { runs })
            && sandbox.created_ms >= after
            && meant.is_none_or(|meant| is_of_it(sandbox, meant))
            && metadata.iter().all(|(name, value)| sandbox.metadata.get(name) == Some(value))
    };
    let mut found = e2b.seen_by(client);
    found.retain(is_meant);
    let key = |sandbox: &Sandbox| (sandbox.created_ms, sandbox.id.clone());
    match query.order.as_deref() {
        Some("asc") => found.sort_by_key(key),
        Some("desc") | None => found.sort_by_key(|sandbox| Reverse(key(sandbox))),
        Some(other) => {
            return Err(Problem::invalid(format!("`order` is `asc` or `desc`, not {other:?}")));
        }
    }
    Ok(found)
}

fn named(list: &str, name: &str) -> bool {
    list.split(',').any(|one| one.trim() == name)
}

/// Names and values of a form, which the SDKs have each encoded once more.
fn metadata_filter(text: &str) -> Result<BTreeMap<String, String>, Problem> {
    let wrong = |_| Problem::invalid("`metadata` is no form (`name=value&…`) of UTF-8 text");
    let pairs = text.split('&').filter(|pair| !pair.is_empty()).map(|pair| {
        let (name, value) = pair.split_once('=').unwrap_or((pair, ""));
        Ok((decoded(&decoded(name)?)?, decoded(&decoded(value)?)?))
    });
    pairs.collect::<Result<_, std::str::Utf8Error>>().map_err(wrong)
}

fn decoded(text: &str) -> Result<String, std::str::Utf8Error> {
    let spaced = text.replace('+', " ");
    percent_encoding::percent_decode_str(&spaced).decode_utf8().map(Into::into)
}

/// Milliseconds since 1970 of a time as ISO 8601 has it, with the offset of a time zone.
fn time_ms(text: &str) -> Result<u64, Problem> {
    let wrong =
        || Problem::invalid(format!("{text:?} is no time; write it as 2026-01-31T12:00:00Z"));
    // A `+` in a query that nobody has encoded is a blank.
    let text = text.replace(' ', "+");
    let (local, sign, offset) = match text.rfind(['+', '-']) {
        Some(at) if at > 10 => (&text[..at], text.as_bytes()[at], &text[at + 1..]),
        _ => (text.trim_end_matches('Z'), b'+', "00:00"),
    };
    let (hours, minutes) = offset.split_once(':').ok_or_else(wrong)?;
    let minutes = hours.parse::<u64>().ok().zip(minutes.parse::<u64>().ok());
    let (hours, minutes) = minutes.filter(|(h, m)| *h < 24 && *m < 60).ok_or_else(wrong)?;
    let local = humantime::parse_rfc3339_weak(local).map_err(|_| wrong())?;
    let local = local.duration_since(UNIX_EPOCH).map_err(|_| wrong())?;
    let offset = Duration::from_secs((hours * 60 + minutes) * 60);
    let time = match sign {
        b'+' => local.saturating_sub(offset),
        _ => local + offset,
    };
    u64::try_from(time.as_millis()).map_err(|_| wrong())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_read_with_their_offsets() {
        let noon = time_ms("2026-01-31T12:00:00Z").unwrap();
        for text in [
            "2026-01-31T12:00:00",
            "2026-01-31T14:00:00+02:00",
            "2026-01-31T14:00:00 02:00",
            "2026-01-31T06:30:00-05:30",
            "2026-01-31T12:00:00.000000+00:00",
        ] {
            assert_eq!(time_ms(text).ok(), Some(noon), "{text}");
        }
        for text in ["", "noon", "2026-01-31T12:00:00+2", "2026-01-31T12:00:00+99:00"] {
            assert!(time_ms(text).is_err(), "{text}");
        }
    }

    #[test]
    fn metadata_is_encoded_twice() {
        let read = metadata_filter("a%2520b=c%2526d&e=f").unwrap();
        let expected = [("a b", "c&d"), ("e", "f")].map(|(a, b)| (a.to_owned(), b.to_owned()));
        assert_eq!(read, expected.into());
        assert!(metadata_filter("a=%ff").is_err());
    }
}
