//! Following a connection from its placement to its end, so that its client
//! gets an answer whatever becomes of the instance.

use super::answer::refuse;
use super::refusal::Refusal;
use super::report::{self, Account};
use crate::edge::{AccessRecord, Passage, RequestId};
use crate::health::Verdict;
use crate::instance::{Client, Done, End, Outcome, Placed};
use crate::service::{PlaceError, Placement, Reuse, Service};
use crate::socket::{Traffic, traffic, unread};
use rustix::net::{Shutdown, shutdown};
use std::sync::Arc;
use std::time::Duration;
use thaw_home::clock::monotonic_ns;
use thaw_home::config::EntryKind;

/// How often a connection that no instance has touched is placed anew.
const PLACEMENTS_MAX: u32 = 3;

/// Gives a connection to an instance, and sees that its client gets an answer. Only a
/// connection that has to wait, or whose instance fails, has a task of its own.
pub(super) fn attend(
    service: &Arc<Service>,
    client: Arc<Client>,
    record: Option<Arc<AccessRecord>>,
) {
    let attendant = Attendant { service: service.clone(), client, record, placements: 1 };
    match service.place_now(&attendant.client, Reuse::None, attendant.clone().done()) {
        Placement::Placed(_) => attendant.note_placed(),
        Placement::Idle(_) => unreachable!("no other connection was asked for"),
        Placement::Later => {
            tokio::spawn(attendant.place());
        }
        Placement::Failed(error) => {
            let refusal = Refusal::of(service, error.into());
            tokio::spawn(async move { attendant.refuse(&refusal).await });
        }
    }
}

/// What becomes of a connection that an instance has had since an earlier daemon: its client
/// gets an answer, and no other instance gets it.
pub(crate) fn attend_inherited(service: &Arc<Service>, client: Arc<Client>) -> Done {
    Attendant { service: service.clone(), client, record: None, placements: PLACEMENTS_MAX }.done()
}

/// Who follows a connection.
#[derive(Clone)]
struct Attendant {
    service: Arc<Service>,
    client: Arc<Client>,
    /// Its first request, if requests are logged.
    record: Option<Arc<AccessRecord>>,
    /// How often it was placed, this time included.
    placements: u32,
}

impl Attendant {
    fn done(self) -> Done {
        Box::new(move |placed, outcome| match outcome {
            Outcome::Closed => {
                self.service.note(Verdict::Served);
                self.log(None);
            }
            outcome => drop(tokio::spawn(self.make_good(placed, outcome))),
        })
    }

    /// Waits until an instance can have the connection.
    async fn place(self) {
        // A daemon that ends waits for it.
        let _busy = self.service.shared().admission().begin();
        let done = self.clone().done();
        match self.service.place(&self.client, Reuse::None, done).await {
            Ok(_) => self.note_placed(),
            Err(error) => self.refuse(&Refusal::of(&self.service, error)).await,
        }
    }

    /// An instance has failed the connection: tries another, or answers in its place.
    async fn make_good(mut self, placed: Placed, outcome: Outcome) {
        let carried = traffic(&self.client.socket).ok();
        let end = match (outcome, carried) {
            // Something was answered; the client sees where it stops.
            (Outcome::Closed, _) => return self.log(None),
            (_, Some(Traffic { sent: 1.., .. })) => {
                self.service.note(Verdict::Failed);
                return self.log(None);
            }
            (Outcome::Late, _) => {
                let timeout = self.service.config().limits.timeout.0;
                let function = self.service.name().to_string();
                return self.refuse(&Refusal::Timeout { function, timeout }).await;
            }
            (Outcome::Gone(end), _) => end,
        };
        // An instance that was waiting may end at the moment it gets a connection, and so
        // may a zygote before it has become one. If it has read nothing and sent nothing,
        // nobody can tell that it was there. A program that ends by itself before it reads
        // would do so again.
        let received = carried.map(|carried| carried.received);
        let may_be_unseen = placed.waited || matches!(end, End::KilledInBoot(_) | End::TenantSpent);
        // Whoever asks for its state is told that it is gone, before another one answers.
        let may_be_unseen = may_be_unseen && !matches!(end, End::MemoryLost(_));
        let is_untouched = may_be_unseen && received == unread(&self.client.socket).ok();
        if is_untouched && self.placements < PLACEMENTS_MAX {
            self.placements += 1;
            // The cause of its death may have killed all ready instances, too.
            let launcher = self.service.launcher();
            let given_up = tokio::task::spawn_blocking(move || launcher.give_up_ready());
            given_up.await.expect("a launcher does not panic");
            return self.place().await;
        }
        self.refuse(&ended(&self.service, &end)).await;
    }

    async fn refuse(&self, refusal: &Refusal) {
        let (service, client) = (&self.service, &self.client);
        let shared = service.shared();
        let id = self.record.as_ref().map_or_else(RequestId::new, |record| record.id);
        report::refused(shared, id, client.peer, Some(service.name()), refusal);
        self.log(Some(refusal));
        if let Some(verdict) = refusal.verdict() {
            service.note(verdict);
        }
        match service.config().entry.kind {
            // Its client would not understand; that it is closed says enough.
            EntryKind::Tcp => {
                let _ = shutdown(&client.socket, Shutdown::Both);
            }
            _ => {
                let audience = report::audience(shared, client.addresses());
                refuse(client, refusal, id, audience).await;
            }
        }
    }

    /// An instance has the connection.
    fn note_placed(&self) {
        let shared = self.service.shared();
        let waited_ns = monotonic_ns().saturating_sub(self.client.accepted_ns);
        shared.metrics().placed(self.service.name(), Duration::from_nanos(waited_ns));
    }

    /// The connection is over: an instance has answered by itself, or the gateway refuses.
    fn log(&self, refusal: Option<&Refusal>) {
        let Some(record) = &self.record else { return };
        let sent = traffic(&self.client.socket).map_or(0, |traffic| traffic.sent);
        let mut account =
            Account::begin(self.service.shared(), self.client.accepted_ns, Some(record.clone()));
        account.passage = Passage {
            function: Some(self.service.name().clone()),
            status: refusal.map(Refusal::status),
            error: refusal.map(Refusal::error),
            sent,
            ..Passage::default()
        };
    }
}

/// What a client is told whose instance ended so.
pub(super) fn ended(service: &Service, end: &End) -> Refusal {
    let reason = end.to_string();
    Refusal::of(
        service,
        match end {
            End::NotFetched(_) => PlaceError::NotFetched(reason),
            End::MemoryLost(_) => PlaceError::CannotWake(reason),
            _ => PlaceError::InstanceDied(reason),
        },
    )
}

pub(super) fn died(service: &Service, reason: String) -> Refusal {
    Refusal::of(service, PlaceError::InstanceDied(reason))
}
