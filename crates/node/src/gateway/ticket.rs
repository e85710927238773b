//! Giving a connection to an instance from a task that waits for its end.

use super::refusal::Refusal;
use crate::instance::{Client, Done, Outcome, Placed};
use crate::service::{Found, Placement, Reuse, Service};
use crate::upstream::{Line, Upstream};
use std::sync::Arc;
use tokio::sync::oneshot;

/// A connection that an instance has.
pub(super) struct Ticket {
    /// Which instance.
    pub placed: Placed,
    /// Resolves when the connection is done with.
    pub done: oneshot::Receiver<Outcome>,
}

/// What serves a request.
pub(super) enum Seat {
    /// The connection that was offered: an instance has it.
    Taken(Ticket),
    /// Another one to an instance, which was there already.
    Other(Upstream),
}

impl Seat {
    /// Finds an instance for a connection, or another connection if that will do.
    ///
    /// # Errors
    /// What the client is to be told.
    pub async fn find(
        service: &Arc<Service>,
        client: &Arc<Client>,
        reuse: Reuse,
    ) -> Result<Self, Refusal> {
        let (tell, done) = teller();
        match service.place_now(client, reuse, tell) {
            Placement::Placed(placed) => return Ok(Self::Taken(Ticket { placed, done })),
            Placement::Idle(upstream) => return Ok(Self::Other(upstream)),
            Placement::Failed(error) => return Err(Refusal::of(service, error.into())),
            Placement::Later => {}
        }
        let (tell, done) = teller();
        match service.place(client, reuse, tell).await {
            Ok(Found::Placed(placed)) => Ok(Self::Taken(Ticket { placed, done })),
            Ok(Found::Idle(upstream)) => Ok(Self::Other(upstream)),
            Err(error) => Err(Refusal::of(service, error)),
        }
    }
}

impl Ticket {
    /// Finds an instance for a connection if that takes no waiting.
    pub fn now(service: &Arc<Service>, client: &Arc<Client>) -> Option<Self> {
        let (tell, done) = teller();
        match service.place_now(client, Reuse::None, tell) {
            Placement::Placed(placed) => Some(Self { placed, done }),
            Placement::Idle(_) | Placement::Later | Placement::Failed(_) => None,
        }
    }

    /// Finds an instance for a connection.
    ///
    /// # Errors
    /// What the client is to be told.
    pub async fn find(service: &Arc<Service>, client: &Arc<Client>) -> Result<Self, Refusal> {
        match Seat::find(service, client, Reuse::None).await? {
            Seat::Taken(ticket) => Ok(ticket),
            Seat::Other(_) => unreachable!("no other connection was asked for"),
        }
    }

    /// The connection as one on which the gateway speaks HTTP, where the instance has got
    /// `far_end` and the gateway has `line`.
    pub fn upstream(self, line: Line, far_end: Arc<Client>) -> Upstream {
        Upstream::new(line, far_end, self.placed, self.done)
    }
}

fn teller() -> (Done, oneshot::Receiver<Outcome>) {
    let (sender, done) = oneshot::channel();
    let tell = move |_, outcome| {
        // The task that has asked may have given up.
        let _ = sender.send(outcome);
    };
    (Box::new(tell), done)
}
