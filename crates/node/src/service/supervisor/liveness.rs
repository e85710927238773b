//! Asking the program again and again whether it is well, and ending an instance that is not.

use super::Supervisor;
use super::sleep::Sleep;
use crate::instance::{Probe, ProbeFailure, Question, Rest};
use crate::remote::ports::sockets;
use crate::service::Service;
use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;
use thaw_home::config::Liveness;
use tokio::sync::OwnedSemaphorePermit;
use tokio::time::Instant;

/// How long until a probe is tried again for which there was no place.
const PLACE_AGAIN: Duration = Duration::from_millis(250);

/// What became of a probe.
pub(super) type Probed = Result<(), ProbeFailure>;

/// The probes of an instance, one at a time.
#[derive(Default)]
pub(super) struct Health {
    /// When to ask next; none: never.
    next: Option<Instant>,
    /// What is asked now. The connection ends with it.
    probing: Option<Pin<Box<dyn Future<Output = Probed> + Send>>>,
    /// Failures since the last success.
    failures: u32,
}

impl Health {
    pub fn of(service: &Service) -> Self {
        let period = service.config().liveness.as_ref().map(|liveness| liveness.period.0);
        Self { next: period.map(|period| Instant::now() + period), ..Self::default() }
    }

    /// When to look whether to ask.
    pub fn next_look(&self) -> Option<Instant> {
        self.next.filter(|_| self.probing.is_none())
    }

    /// What became of the probe that is under way.
    pub fn poll(&mut self, context: &mut Context<'_>) -> Poll<Probed> {
        let Some(probing) = &mut self.probing else { return Poll::Pending };
        let probed = std::task::ready!(probing.as_mut().poll(context));
        self.probing = None;
        Poll::Ready(probed)
    }

    /// Whether a probe is under way.
    pub fn is_probing(&self) -> bool {
        self.probing.is_some()
    }

    /// Ends the probe that is under way, which then says nothing; whether there was one.
    pub fn cancel(&mut self) -> bool {
        self.probing.take().is_some()
    }
}

impl Supervisor {
    /// Asks the program, unless the instance is about to rest, or cannot be asked now.
    pub(super) fn probe(&mut self, now: Instant) {
        let Some(liveness) = self.service.config().liveness.clone() else { return };
        let Some(places) = self.probe_places() else {
            self.health.next = Some(now + PLACE_AGAIN);
            return;
        };
        self.health.next = Some(now + liveness.period.0);
        if !self.is_about_to_rest() && self.service.begin_probe(self.id) {
            self.begin_probe(&liveness, places);
        }
    }

    fn begin_probe(
        &mut self,
        liveness: &Liveness,
        places: (OwnedSemaphorePermit, OwnedSemaphorePermit),
    ) {
        let config = self.service.config();
        let sockets = match sockets() {
            Ok(sockets) => sockets,
            // The instance cannot help it.
            Err(error) => {
                tracing::debug!(function = %config.name, instance = self.id, "no liveness probe: {error}");
                return;
            }
        };
        let probe = Probe {
            connector: self.connections.connector(),
            sockets,
            port: config.port_number(),
            host: config.name.to_string(),
            question: Question::of(liveness, config.protocol),
            limit: liveness.timeout.0,
            places,
        };
        let table = self.connections.clone();
        self.health.probing = Some(Box::pin(probe.run(move || table.watch())));
    }

    /// Places among the probes of the node and of the tenant; `None`: all are taken.
    fn probe_places(&self) -> Option<(OwnedSemaphorePermit, OwnedSemaphorePermit)> {
        let share = self.service.tenant().probe_place()?;
        Some((self.service.shared().probe_place()?, share))
    }

    /// Whether something else is done with the instance, which a connection would disturb, or which
    /// keeps it from answering.
    fn is_about_to_rest(&self) -> bool {
        self.rest.as_ref().is_some_and(Rest::is_wanted)
            || self.sleep != Sleep::Awake
            || !self.hibernate.is_empty()
            || !self.pauses.is_empty()
            || self.sleepiness.is_asked()
            || self.stopping.is_some()
    }

    /// A probe is over.
    pub(super) fn probed(&mut self, probed: Probed) {
        let failure = match probed {
            Ok(()) => {
                self.health.failures = 0;
                return;
            }
            Err(failure) => failure,
        };
        let is_telling = failure.is_answer() || self.service.was_never_full(self.id);
        if !is_telling || self.service.is_ending(self.id) {
            return;
        }
        self.health.failures += 1;
        self.service.shared().metrics().liveness_failed(self.service.name());
        let most = self.service.config().liveness.as_ref().map_or(u32::MAX, |terms| terms.failures);
        if self.health.failures < most {
            tracing::debug!(function = %self.service.name(), instance = self.id, "a liveness probe failed: {failure}");
            return;
        }
        self.end_unwell(&failure);
    }

    /// Ends the instance, which gets no more connections; the next request boots another.
    fn end_unwell(&mut self, failure: &ProbeFailure) {
        self.health.next = None;
        let count = match self.health.failures {
            1 => "a liveness probe".to_owned(),
            count => format!("{count} liveness probes in a row"),
        };
        let why = format!("ended because it failed {count}: {failure}");
        tracing::warn!(function = %self.service.name(), instance = self.id, "{why}");
        self.instance.remark(&why);
        self.service.shared().metrics().liveness_ended(self.service.name());
        self.service.retire(self.id);
        self.stop(Instant::now());
    }
}
