//! What a sandbox uses and has used: `get_metrics`. The past is in [`super::samples`]; one sample of
//! now follows it.

use super::E2b;
use super::backend::{Sandbox, Usage};
use super::control::{Client, answer, now_ms, time_text};
use super::input::Query;
use super::problem::Problem;
use super::samples::Sample;
use axum::extract::{Path, State};
use axum::http::StatusCode;
use axum::response::Response;
use axum::routing::get;
use axum::{Extension, Router};
use serde::Deserialize;
use serde_json::{Value, json};
use std::sync::Arc;

/// Its path.
pub(super) fn routes() -> Router<Arc<E2b>> {
    Router::new().route("/sandboxes/{id}/metrics", get(metrics))
}

/// A span of time, in seconds since 1970, with both ends.
#[derive(Deserialize)]
struct Span {
    start: Option<u64>,
    end: Option<u64>,
}

impl Span {
    /// The first and the last millisecond of it.
    fn bounds_ms(&self) -> Result<(u64, u64), Problem> {
        let start = self.start.unwrap_or(0);
        let end = self.end.unwrap_or(u64::MAX);
        if end < start {
            return Err(Problem::invalid("`end` is before `start`; name a later time"));
        }
        Ok((start.saturating_mul(1000), end.saturating_mul(1000).saturating_add(999)))
    }
}

impl Sample {
    fn now(sandbox: &Sandbox, usage: Usage) -> Result<Self, Problem> {
        let cpu_percent = usage.cpu_percent.ok_or_else(|| {
            Problem::unsupported(
                "this host counts no CPU time of sandboxes; `thaw doctor` says what control groups \
                 it lacks",
            )
        })?;
        Ok(Self {
            time_ms: now_ms(),
            cpu_percent: cpu_percent as f32,
            memory_bytes: usage.memory_bytes,
            cpus: sandbox.cpus,
            memory_max_bytes: sandbox.memory_bytes,
        })
    }

    fn shown(&self) -> Value {
        json!({
            "timestamp": time_text(self.time_ms),
            "timestampUnix": self.time_ms / 1000,
            "cpuCount": self.cpus,
            "cpuUsedPct": self.cpu_percent,
            "memUsed": self.memory_bytes,
            "memTotal": self.memory_max_bytes,
            "memCache": 0,
            // Files take memory here.
            "diskUsed": self.memory_bytes,
            "diskTotal": self.memory_max_bytes,
        })
    }
}

/// A sandbox that is paused uses nothing, and has a past only.
async fn metrics(
    State(e2b): State<Arc<E2b>>,
    Extension(client): Extension<Client>,
    Path(id): Path<String>,
    Query(span): Query<Span>,
) -> Response {
    let measured = async {
        let (sandbox, _) = e2b.own(&client, &id)?;
        let (start, end) = span.bounds_ms()?;
        let mut samples = e2b.samples.between(&id, start, end);
        if !sandbox.is_paused()
            && (start..=end).contains(&now_ms())
            && let Some(usage) = e2b.backend.usage(&id).await?
        {
            samples.push(Sample::now(&sandbox, usage)?);
        }
        Ok(samples.iter().map(Sample::shown).collect())
    };
    answer(StatusCode::OK, measured.await)
}
