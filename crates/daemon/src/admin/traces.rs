//! Spans of requests that change something: sandboxes, processes in them, invocations.

use super::Admin;
use axum::extract::{MatchedPath, Request, State};
use axum::middleware::Next;
use axum::response::Response;
use hyper::Method;
use std::time::{Instant, SystemTime};
use thaw_node::traces::{Kind, Span, known, unix_ns};

/// Records a request as a span, which is the parent of what the gateway does for it.
pub(super) async fn traced(
    State(admin): State<Admin>,
    mut request: Request,
    next: Next,
) -> Response {
    let Some(tracer) = admin.shared().tracer().cloned() else { return next.run(request).await };
    // Whoever only looks, such as `thaw top`, does so often.
    if matches!(*request.method(), Method::GET | Method::HEAD) {
        return next.run(request).await;
    }
    let id = tracer.begin(request.headers());
    id.write(request.headers_mut());
    if !id.is_sampled() {
        return next.run(request).await;
    }
    let route = request.extensions().get::<MatchedPath>();
    let route = route.map_or(String::new(), |route| route.as_str().to_owned());
    let method = known(request.method());
    let (start_ns, began) = (unix_ns(SystemTime::now()), Instant::now());
    let name = format!("{method} {route}").trim_end().to_owned();
    let mut span = Span::begun(id, Kind::Server, name, start_ns);
    span.set("http.request.method", method);
    span.set("http.route", &*route);
    span.set("url.path", request.uri().path());
    let response = next.run(request).await;
    let took = u64::try_from(began.elapsed().as_nanos()).unwrap_or(u64::MAX);
    span.end_ns = start_ns.saturating_add(took);
    let status = response.status();
    span.set("http.response.status_code", u64::from(status.as_u16()));
    if status.is_server_error() {
        span.set("error.type", status.as_str());
        span.error = Some(status.to_string());
    }
    tracer.record_span(span);
    response
}
