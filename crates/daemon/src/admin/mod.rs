//! The admin API: what runs here, and a few things that can be done about it.
//! HTTP with JSON; handlers translate and delegate.
//!
//! It can replace images and reads what functions print, so it is for the operator
//! alone. It listens on a Unix socket of mode 0600, and serves the daemon's user and root
//! (`SO_PEERCRED`, unix(7)). Over TCP it listens only if asked to, and every request must
//! show a token (`access`). Values of environment variables are secrets and never part of
//! an answer.
//!
//! | request | answer |
//! | --- | --- |
//! | `GET /healthz` | `{"status": "ok"}`, or 503 while the node drains |
//! | `GET /metrics` | text for Prometheus |
//! | `GET /functions` | [`FunctionInfo`] of each |
//! | `GET /functions/NAME` | [`FunctionDetail`] |
//! | `GET /functions/NAME/logs?follow=true&instance=ID` | a [`Line`](thaw_node::logs::Line) in each line |
//! | `POST /functions/NAME/invoke?method=M&path=P&timings=true` | the function's own response |
//! | `POST /functions/NAME/freeze?instance=ID` | [`Frozen`]: an idle instance is the new image |
//! | `POST /functions/NAME/hibernate?instance=ID` | [`Hibernated`]: an idle instance has given up its memory |
//! | `POST /functions/NAME/sleep?instance=ID` | [`FellAsleep`]: an idle instance is asleep |
//! | `POST /functions/NAME/wake?instance=ID` | [`Woken`]: a hibernated instance has its memory back, or one that was asleep runs |
//! | `GET /functions/NAME/versions` | [`Deployment`](crate::deploy::Deployment): its versions, and which get requests |
//! | `POST /functions/NAME/activate?version=V` | the same: all requests go to the version |
//! | `POST /functions/NAME/restart` | [`Restarted`](thaw_node::catalog::Restarted): new instances serve the same versions |
//! | `POST /functions/NAME/rollback` | the same: the last change was taken back |
//! | `POST /functions/NAME/split?version=V&percent=P&header=N=V` | the same: the version has a share |
//! | `POST /instances/ID/exec` | [`ExecInfo`](thaw_node::remote::ExecInfo), or its streams: a process in it |
//! | `GET /instances/ID/execs`, `GET …/EXEC`, `GET …/EXEC/output` | those there are, one, and what it has printed |
//! | `POST /instances/ID/execs/EXEC/attach`, `POST …/signal?number=N` | its streams; a signal for it |
//! | `GET`, `PUT`, `DELETE /instances/ID/files?path=P` | a file in it, and `…/files/list`, `stat`, `directory`, `rename`, `link` |
//! | `GET`, `PUT /instances/ID/files/tree?path=P` | a directory in it as tar; [`TreeReport`](thaw_node::remote::untree::TreeReport): what came of one |
//! | `GET /sandboxes`, `POST /sandboxes` | [`SandboxInfo`](thaw_node::sandboxes::SandboxInfo) of each; a new one |
//! | `GET`, `DELETE /sandboxes/NAME`, `POST …/pause`, `resume`, `fork?name=N`, `timeout?seconds=N` | one of them |
//! | `GET`, `PUT /sandboxes/NAME/limits` | [`LimitsInfo`](thaw_node::remote::LimitsInfo): what it may use, which changes while it runs |
//! | `GET`, `PUT /sandboxes/NAME/egress` | [`EgressInfo`](thaw_node::remote::EgressInfo): where it may connect to, and what it has reached |
//! | `GET /sandboxes/NAME/ports` | [`Listener`](thaw_node::remote::Listener) of each port on which something in it listens |
//! | `POST /sandboxes/NAME/ports/PORT` with `Upgrade: thaw-port` | the bytes of a port on which something in it listens |
//! | `GET /pulls`, `POST /pulls` | [`PullInfo`](thaw_node::pulls::PullInfo) of each; [`NewPull`](thaw_node::pulls::NewPull) begins one |
//! | `GET`, `DELETE /pulls/ID` | one of them; it ends |
//! | `GET /queues`, `GET /functions/NAME/queue`, `GET …/queue/ID` | [`QueueInfo`](thaw_node::metrics::QueueInfo) of each; [`InvocationInfo`](thaw_node::triggers::InvocationInfo) of those in one; one with its request |
//! | `POST /functions/NAME/queue/retry?id=ID`, `purge?id=ID&state=S` | dead letters are queued again; invocations are removed |
//! | `GET /schedules`, `GET /functions/NAME/schedules` | [`ScheduleInfo`](thaw_node::triggers::ScheduleInfo) of each |
//! | `GET /instances` | [`InstanceInfo`](thaw_node::service::InstanceInfo) of each |
//! | `GET /stats` | [`Stats`](thaw_node::history::Stats): rates and states of the last seconds |
//! | `GET /stats/series?function=NAME` | [`SeriesView`](thaw_node::history::SeriesView): the last hour |
//! | `GET /events` | the latest [`Event`](thaw_node::metrics::Event)s, newest first |
//! | `GET /openapi.json` | this API, as OpenAPI describes it |
//! | `GET /df` | [`UsageReport`](thaw_node::usage::UsageReport): what is stored and shared |
//! | `GET /tenants` | [`TenantReport`](thaw_node::tenants::TenantReport) of each |
//! | `GET /images` | [`ImageSummary`] of each |
//! | `POST /reload` | [`Reload`](thaw_node::catalog::Reload): serves what is new in the store |

mod access;
mod exec;
mod extract;
mod files;
mod invoke;
mod listen;
pub(crate) mod openapi;
mod owner_key;
mod pulls;
mod queue;
pub(crate) mod routes;
mod sandboxes;
mod stats;
mod traces;
mod trees;
mod types;
mod versions;

pub use access::RemoteAccess;
pub use exec::{EXEC_PROTOCOL, Frame};
pub use invoke::{BOOT_HEADER, PHASES_HEADER};
pub(crate) use listen::serve_tcp;
pub use listen::{LocalListener, listen_at};
pub use types::{
    CheckpointInfo, FellAsleep, Frozen, FunctionDetail, FunctionInfo, Hibernated, ImageSummary,
    Problem, SnapshotMade, Woken, summarize_images,
};

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::{Arc, Weak};
use thaw_home::home::Home;
use thaw_node::catalog::Catalog;
use thaw_node::history::History;
use thaw_node::node::NodeState;
use thaw_node::sandboxes::Sandboxes;
use thaw_node::service::Services;
use thaw_node::triggers::Triggers;
use tokio::sync::Mutex;

/// What handlers work with.
#[derive(Clone)]
pub struct Admin {
    /// The functions that are served.
    pub services: Arc<Services>,
    /// What calls functions without a client that waits, until the daemon ends.
    pub triggers: Weak<Triggers>,
    /// Those that are stored.
    pub catalog: Arc<Catalog>,
    /// Where the shared gateway listens.
    pub gateway: SocketAddr,
    /// What it has done lately.
    pub history: Arc<History>,
    /// Its sandboxes.
    pub sandboxes: Arc<Sandboxes>,
    /// The node's state directory.
    pub home: Home,
    /// Held by the one request that counts what is stored: that reads many files.
    pub counting: Arc<Mutex<()>>,
    /// Called after functions have come or gone.
    pub on_reload: Arc<dyn Fn() -> BTreeMap<String, String> + Send + Sync>,
}

impl Admin {
    /// What all functions of the node share.
    pub(crate) fn shared(&self) -> &Arc<NodeState> {
        self.services.shared()
    }
}
