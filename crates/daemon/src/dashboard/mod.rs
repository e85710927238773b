//! The dashboard: pages for the operator's browser.
//!
//! It listens only where `thaw serve --dashboard` says. Pages are made here (`maud`), and htmx
//! fetches their live parts again; charts, the log and the terminal take data from the same
//! origin. Whoever knows the admin token logs in with it and gets a session.
//!
//! Names, files, output and log lines come from guests and clients: `maud` escapes them, scripts put
//! them into text nodes only, and the content security policy allows no script and no style but the
//! files of [`assets`]. docs/dashboard.md has the bounds.

mod assets;
mod events;
mod files;
mod format;
mod frame;
mod functions;
mod guard;
mod inside;
mod logs;
mod metrics;
mod overview;
mod sandboxes;
mod session;
mod store;
mod svg;
mod terminal;

use crate::admin::{Admin, RemoteAccess, serve_tcp};
use axum::Router;
use axum::middleware;
use session::Sessions;
use std::io;
use std::sync::Arc;
use std::time::Duration;
use thaw_node::metrics::EventKind;
use tokio::net::TcpListener;
use tokio::sync::Semaphore;

/// Logs that are followed at a time.
const STREAMS_MAX: usize = 16;
/// How often sessions are ended whose time is over.
const TIDY_EVERY: Duration = Duration::from_secs(60);
/// Terminals at a time.
const TERMINALS_MAX: usize = 8;

/// The dashboard of a node.
pub struct Dashboard {
    admin: Admin,
    access: RemoteAccess,
    sessions: Sessions,
    streams: Arc<Semaphore>,
    terminals: Arc<Semaphore>,
    /// Wrong tokens are answered slowly, and so many at a time.
    wrong: Semaphore,
}

type App = Arc<Dashboard>;

impl Dashboard {
    /// One for those who show what `access` wants.
    pub fn new(admin: Admin, access: RemoteAccess) -> Arc<Self> {
        Arc::new(Self {
            admin,
            access,
            sessions: Sessions::default(),
            streams: Arc::new(Semaphore::new(STREAMS_MAX)),
            terminals: Arc::new(Semaphore::new(TERMINALS_MAX)),
            wrong: Semaphore::new(4),
        })
    }

    /// Serves browsers.
    ///
    /// # Errors
    /// The listener fails.
    pub async fn serve(self: Arc<Self>, listener: TcpListener) -> io::Result<()> {
        let sessions = self.clone();
        let tidy = async move {
            // Terminals and logs that are followed ask nothing, and end with their session.
            loop {
                tokio::time::sleep(TIDY_EVERY).await;
                sessions.sessions.tidy();
            }
        };
        tokio::select! {
            served = serve_tcp(self.router(), &listener) => served,
            () = tidy => Ok(()),
        }
    }

    fn router(self: Arc<Self>) -> Router {
        Router::new()
            .merge(overview::routes())
            .merge(functions::routes())
            .merge(sandboxes::routes())
            .merge(files::routes())
            .merge(terminal::routes())
            .merge(logs::routes())
            .merge(events::routes())
            .merge(store::routes())
            .merge(metrics::routes())
            .merge(guard::routes_out())
            .fallback(frame::not_found)
            .layer(middleware::from_fn_with_state(self.clone(), guard::check))
            .merge(guard::routes())
            .merge(assets::routes())
            .layer(middleware::from_fn_with_state(self.clone(), guard::protect))
            .with_state(self)
    }

    /// Notes what somebody did by the dashboard, in the events and in the daemon's log.
    fn note(&self, subject: &str, what: &str) {
        // A guest may have chosen the path of a file.
        let what = &thaw_sandbox::escape(what.as_bytes());
        self.admin.shared().metrics().events().note(EventKind::Operator, subject, what, 1);
        tracing::info!(subject, "by the dashboard: {what}");
    }
}
