//! The end of a daemon: the signal that asks for it, and what is done then.

use super::listeners::ListenTask;
use super::serving::{GATEWAY, Serving};
use super::{ServeError, ServeOptions};
use crate::catalog::Catalog;
use crate::logs::Logs;
use crate::node::NodeState;
use crate::tenants::write_down;
use std::future::{Future, poll_fn};
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::task::{AbortHandle, JoinError};

/// How long sending the last spans may take.
const TRACES_PATIENCE: Duration = Duration::from_secs(2);
/// How long writing the last lines of functions may take.
const LOGS_PATIENCE: Duration = Duration::from_secs(3);

/// The signals that tell the daemon what to do.
pub(super) struct Signals {
    terminate: Signal,
    interrupt: Signal,
    hangup: Signal,
}

impl Signals {
    /// From now on they do not end this process.
    ///
    /// # Errors
    /// The host's.
    pub fn listen() -> io::Result<Self> {
        Ok(Self {
            terminate: signal(SignalKind::terminate())?,
            interrupt: signal(SignalKind::interrupt())?,
            hangup: signal(SignalKind::hangup())?,
        })
    }
}

impl Serving {
    /// Waits for the signal that ends the daemon, and reloads when one asks for that.
    ///
    /// # Errors
    /// A listener has failed.
    pub async fn wait_for_end(&mut self, signals: Signals) -> Result<(), ServeError> {
        let Signals { mut terminate, mut interrupt, mut hangup } = signals;
        loop {
            tokio::select! {
                _ = terminate.recv() => return Ok(()),
                _ = interrupt.recv() => return Ok(()),
                _ = hangup.recv() => {
                    reload(self.catalog.clone()).await;
                    self.own.update();
                }
                ended = first_to_end(&mut self.listening) => {
                    return Ok(ended.map_err(io::Error::other)??);
                }
            }
        }
    }

    /// Finishes what is being served, and ends everything.
    pub async fn end(mut self, options: &ServeOptions) {
        tracing::info!("finishing what is being served");
        // Clients that come now wait in the backlog until the sockets close, and
        // those that were accepted are told to come back.
        self.own.stop();
        if options.clients_wait {
            self.listening[GATEWAY].abort();
        }
        self.shared.drain(options.drain).await;
        self.stop_work().await;
        let kept = self.shared.keep_asleep();
        if kept > 0 {
            tracing::info!(instances = kept, "left instances asleep for the next daemon");
        }
        self.stop_listening().await;
        self.write_periods();
        // Services and the node refer to each other; the zygotes end, and what was
        // made for them is cleaned up, when the last service is gone.
        self.shared.forget_all();
        let Self { shared, catalog, own, logs, .. } = self;
        drop((catalog, own));
        write_last_lines(shared, logs).await;
    }

    /// Ends what goes on in the background. The queue keeps what was being attempted.
    async fn stop_work(&mut self) {
        if let Some(triggers) = self.triggers.take() {
            triggers.stop(&self.shared).await;
        }
        if let Some((tracer, task)) = self.tracing.take() {
            task.abort();
            let _ = task.await;
            // What is not sent by then is lost.
            let _ = tokio::time::timeout(TRACES_PATIENCE, tracer.finish(self.shared.boots())).await;
        }
        self.shared.pulls().stop();
        self.watching.iter().for_each(AbortHandle::abort);
    }

    async fn stop_listening(&mut self) {
        for task in self.listening.drain(..) {
            task.abort();
            // Only then has it let go of what it used. One that has ended by itself
            // was asked for its result before.
            if !task.is_finished() {
                let _ = task.await;
            }
        }
    }

    fn write_periods(&self) {
        if self.shared.tenants().bound_cpu_time() {
            write_down(&self.shared, &self.periods);
        }
    }
}

/// Writes the last words of instances that were ended just now.
async fn write_last_lines(shared: Arc<NodeState>, logs: Arc<Logs>) {
    let written = tokio::task::spawn_blocking(move || {
        shared.edge().finish_log(LOGS_PATIENCE) & logs.finish(LOGS_PATIENCE)
    })
    .await;
    if !written.unwrap_or(false) {
        tracing::warn!("the last lines of functions may be missing from their logs");
    }
}

async fn reload(catalog: Arc<Catalog>) {
    match tokio::task::spawn_blocking(move || catalog.reload()).await {
        Ok(Ok(report)) => tracing::info!(?report, "reloaded"),
        Ok(Err(error)) => tracing::error!("cannot reload: {error}"),
        Err(error) => tracing::error!("cannot reload: {error}"),
    }
}

/// The result of the task that ends first; none does before its listener fails.
async fn first_to_end(tasks: &mut [ListenTask]) -> Result<io::Result<()>, JoinError> {
    poll_fn(|context| {
        let mut ended = tasks.iter_mut().map(|task| Pin::new(task).poll(context));
        ended.find(Poll::is_ready).unwrap_or(Poll::Pending)
    })
    .await
}
