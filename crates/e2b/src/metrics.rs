//! What a sandbox uses: `get_metrics`. There is one sample, of now; former ones are not kept.

use super::E2b;
use super::control::{Client, answer, now_ms, time_text};
use super::problem::Problem;
use axum::extract::{Path, Query, State};
use axum::http::StatusCode;
use axum::response::Response;
use axum::routing::get;
use axum::{Extension, Router};
use serde::Deserialize;
use serde_json::json;
use std::sync::Arc;

/// Its path.
pub(super) fn routes() -> Router<Arc<E2b>> {
    Router::new().route("/sandboxes/{id}/metrics", get(metrics))
}

/// A span of time, in seconds since 1970.
#[derive(Deserialize)]
struct Span {
    start: Option<u64>,
    end: Option<u64>,
}

/// A sandbox that is paused uses nothing, and has no sample.
async fn metrics(
    State(e2b): State<Arc<E2b>>,
    Extension(client): Extension<Client>,
    Path(id): Path<String>,
    Query(span): Query<Span>,
) -> Response {
    let measured = async {
        let (sandbox, _) = e2b.own(&client, &id)?;
        let now = now_ms();
        let is_wanted = span.start.is_none_or(|start| start <= now / 1000)
            && span.end.is_none_or(|end| now / 1000 <= end);
        if sandbox.is_paused() || !is_wanted {
            return Ok(json!([]));
        }
        let usage = e2b.backend.usage(&id).await?;
        let cpu = usage.cpu_percent.ok_or_else(|| {
            Problem::unsupported(
                "this host counts no CPU time of sandboxes; `thaw doctor` says what control groups \
                 it lacks",
            )
        })?;
        Ok(json!([{
            "timestamp": time_text(now),
            "timestampUnix": now / 1000,
            "cpuCount": sandbox.cpus,
            "cpuUsedPct": cpu,
            "memUsed": usage.memory_bytes,
            "memTotal": sandbox.memory_bytes,
            "memCache": 0,
            // Files take memory here.
            "diskUsed": usage.memory_bytes,
            "diskTotal": sandbox.memory_bytes,
        }]))
    };
    answer(StatusCode::OK, measured.await)
}
