//! The end of a daemon: the signal that asks for it, and what is done then.

use super::listeners::ListenTask;
use super::serving::{GATEWAY, Serving};
use super::{ServeError, ServeOptions, Successor, lasting};
use crate::notification;
use std::future::{Future, poll_fn};
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;
use thaw_node::catalog::Catalog;
use thaw_node::logs::Logs;
use thaw_node::node::NodeState;
use thaw_node::tenants::write_down;
use thaw_sandbox::{leave_requests_about_volumes, monitor};
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::task::{AbortHandle, JoinError};

/// How long sending the last spans may take.
const TRACES_PATIENCE: Duration = Duration::from_secs(2);
/// How long writing the last lines of functions may take.
const LOGS_PATIENCE: Duration = Duration::from_secs(3);
/// How long the monitor may take to have what it is to keep for the next daemon.
const MONITOR_PATIENCE: Duration = Duration::from_secs(5);
/// How long requests about volumes that are being served may take.
const VOLUMES_PATIENCE: Duration = Duration::from_secs(2);

/// How leaving everything to the next daemon went.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum HandOver {
    /// The monitor has all that outlives this process.
    Done,
    /// Somebody wants everything to end.
    Interrupted,
}

/// What is to become of the instances of a daemon that ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Wish {
    /// The next daemon has them, if one comes.
    HandOver,
    /// They end.
    End,
}

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
    pub async fn wait_for_end(&mut self, signals: &mut Signals) -> Result<Wish, ServeError> {
        loop {
            tokio::select! {
                _ = signals.terminate.recv() => return Ok(Wish::HandOver),
                _ = signals.interrupt.recv() => return Ok(Wish::End),
                _ = signals.hangup.recv() => {
                    reload(self.catalog.clone()).await;
                    self.own.update();
                }
                ended = first_to_end(&mut self.listening) => {
                    return ended.map_err(io::Error::other)?.map(|()| Wish::End).map_err(Into::into);
                }
            }
        }
    }

    /// Finishes what is being served, for at most `patience`, and ends everything.
    pub async fn end(mut self, successor: Successor, patience: Duration) {
        tracing::info!("finishing what is being served");
        notification::stopping("Finishing what is being served");
        lasting::stay();
        // Clients that come now wait in the backlog until the sockets close, and
        // those that were accepted are told to come back.
        self.own.stop();
        if successor == Successor::Comes {
            self.listening[GATEWAY].abort();
        }
        self.services.drain(patience).await;
        self.stop_work().await;
        let kept = self.services.keep_asleep();
        if kept > 0 {
            tracing::info!(instances = kept, "left instances asleep for the next daemon");
        }
        self.stop_listening().await;
        self.write_periods();
        // Each service refers to all of them; the zygotes end, and what was
        // made for them is cleaned up, when the last service is gone.
        self.services.forget_all();
        let Self { services, catalog, own, logs, .. } = self;
        drop((catalog, own));
        write_last_lines(services.shared().clone(), logs).await;
        if successor == Successor::Comes {
            // Otherwise it might keep listeners that are closed here.
            tell_monitor().await;
        }
    }

    /// Leaves live instances, with the connections that were handed over to them, to the next daemon,
    /// which begins when this process has ended. Clients that come now wait for that one.
    pub async fn hand_over(&mut self, options: &ServeOptions, signals: &mut Signals) -> HandOver {
        tracing::info!("leaving the live instances to the next daemon");
        notification::stopping("Leaving the live instances to the next daemon");
        lasting::leave();
        self.own.stop();
        self.listening[GATEWAY].abort();
        tokio::select! {
            () = self.services.leave(options.drain) => {}
            _ = signals.interrupt.recv() => return HandOver::Interrupted,
        }
        self.stop_work().await;
        self.stop_listening().await;
        let instances = self.services.instances().len();
        self.services.keep_all_asleep();
        self.write_periods();
        write_last_lines(self.shared().clone(), self.logs.clone()).await;
        tell_monitor().await;
        self.services.leave_execs().await;
        leave_volumes().await;
        tracing::info!(instances, "left live instances to the next daemon");
        HandOver::Done
    }

    /// Ends what goes on in the background. The queue keeps what was being attempted.
    async fn stop_work(&mut self) {
        if let Some(triggers) = self.triggers.take() {
            triggers.stop().await;
        }
        if let Some((tracer, task)) = self.tracing.take() {
            task.abort();
            let _ = task.await;
            // What is not sent by then is lost.
            let _ =
                tokio::time::timeout(TRACES_PATIENCE, tracer.finish(self.shared().boots())).await;
        }
        self.shared().pulls().stop();
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
        if let Some(sandboxes) = self.sandboxes.take() {
            // Nobody changes them any more.
            sandboxes.written().await;
        }
    }

    fn write_periods(&self) {
        if self.shared().tenants().bound_cpu_time() {
            write_down(self.shared().tenants(), &self.periods);
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

/// Waits until the monitor has what it is to keep, and has let go of everything else.
async fn tell_monitor() {
    let Some(link) = monitor::of_this_process() else { return };
    let told = tokio::task::spawn_blocking(move || link.leave(MONITOR_PATIENCE)).await;
    if let Ok(Err(error)) = told {
        tracing::warn!("the monitor may not have everything for the next daemon: {error}");
    }
}

/// Serves no request about volumes any more: the next daemon does.
async fn leave_volumes() {
    let left = tokio::task::spawn_blocking(|| leave_requests_about_volumes(VOLUMES_PATIENCE)).await;
    if !left.unwrap_or(false) {
        tracing::warn!("requests about volumes that take long are not answered");
    }
}

async fn reload(catalog: Arc<Catalog>) {
    match tokio::task::spawn_blocking(move || catalog.reload()).await {
        Ok(Ok(report)) => tracing::info!("reloaded: {}", report.summary()),
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
