//! The admin API: what runs here, and a few things that can be done about it.
//! HTTP with JSON; handlers translate and delegate.
//!
//! | request | answer |
//! | --- | --- |
//! | `GET /healthz` | `{"status": "ok"}`, or 503 while the node drains |
//! | `GET /metrics` | text for Prometheus |
//! | `GET /functions` | [`FunctionInfo`] of each |
//! | `GET /functions/NAME` | [`FunctionDetail`] |
//! | `GET /functions/NAME/logs?follow=true` | a [`Line`](crate::logs::Line) in each line |
//! | `POST /functions/NAME/invoke?method=M&path=P&timings=true` | the function's own response |
//! | `POST /functions/NAME/freeze?instance=ID` | [`Frozen`]: an idle instance is the new image |
//! | `GET /instances` | [`InstanceInfo`](crate::service::InstanceInfo) of each |
//! | `GET /images` | [`ImageSummary`] of each |
//! | `POST /reload` | [`Reload`](crate::catalog::Reload): serves what is new in the store |

mod invoke;
mod routes;
mod types;

pub use invoke::{BOOT_HEADER, PHASES_HEADER};
pub use types::{Frozen, FunctionDetail, FunctionInfo, ImageSummary, Problem, summarize_images};

use crate::catalog::Catalog;
use crate::node::Shared;
use axum::Router;
use std::net::SocketAddr;
use std::sync::Arc;

/// What handlers work with.
#[derive(Clone)]
pub struct Admin {
    /// The node.
    pub shared: Arc<Shared>,
    /// Its functions.
    pub catalog: Arc<Catalog>,
    /// Where the shared gateway listens.
    pub gateway: SocketAddr,
    /// Called after functions have come or gone.
    pub on_reload: Arc<dyn Fn() + Send + Sync>,
}

impl Admin {
    /// The API as a service.
    pub fn router(self) -> Router {
        routes::router(self)
    }
}
