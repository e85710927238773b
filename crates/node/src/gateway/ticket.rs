//! Giving a connection to an instance from a task that waits for its end.

use super::attend::died;
use super::refusal::Refusal;
use crate::instance::{Client, Done, Outcome};
use crate::service::{Placement, Service};
use std::sync::Arc;
use tokio::sync::oneshot;

/// A connection that an instance has.
pub(super) struct Ticket {
    /// Number of the instance.
    pub instance: u64,
    /// Resolves when the connection is done with.
    pub done: oneshot::Receiver<Outcome>,
}

impl Ticket {
    /// Gives the connection to an instance if that takes no waiting.
    ///
    /// # Errors
    /// What the client is to be told.
    pub fn at_once(service: &Arc<Service>, client: &Arc<Client>) -> Result<Option<Self>, Refusal> {
        let (tell, done) = teller();
        match service.place_now(client, tell) {
            Placement::Placed(placed) => Ok(Some(Self { instance: placed.instance, done })),
            Placement::Later => Ok(None),
            Placement::Failed(error) => Err(died(service, error.to_string())),
        }
    }

    /// Waits until an instance can have the connection.
    ///
    /// # Errors
    /// What the client is to be told.
    pub async fn wait(service: &Arc<Service>, client: &Arc<Client>) -> Result<Self, Refusal> {
        let (tell, done) = teller();
        let placed = service.place(client, tell).await?;
        Ok(Self { instance: placed.instance, done })
    }
}

fn teller() -> (Done, oneshot::Receiver<Outcome>) {
    let (sender, done) = oneshot::channel();
    let tell = move |_, outcome| {
        // Who has asked may have lost patience.
        let _ = sender.send(outcome);
    };
    (Box::new(tell), done)
}
