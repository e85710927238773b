//! The connections of one instance: whoever accepts a client puts its connection in,
//! the instance's keeper takes it out.

use super::keeper::Command;
use super::launch::{Client, Connector, End};
use super::patience::Patience;
use crate::config::FunctionConfig;
use std::collections::HashMap;
use std::fmt;
use std::mem;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;
use tokio::sync::{OwnedSemaphorePermit, mpsc};
use tokio::time::Instant;

/// A connection that an instance has.
#[derive(Clone, Copy, Debug)]
pub struct Placed {
    /// Number of the instance.
    pub instance: u64,
    /// The instance had been waiting, and may have ended meanwhile.
    pub waited: bool,
}

/// What became of a connection that was given to an instance.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// The guest has closed it.
    Closed,
    /// The instance was ended because a request had waited for too long.
    Late,
    /// The instance ended while it had the connection.
    Gone(End),
}

/// Who is told what became of a connection.
pub(crate) type Done = Box<dyn FnOnce(Placed, Outcome) + Send>;

/// A connection on its way to an instance.
pub(crate) struct Delivery {
    pub client: Arc<Client>,
    /// The connection's share of the function's capacity.
    pub permit: OwnedSemaphorePermit,
    pub done: Done,
}

impl fmt::Debug for Delivery {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Delivery").field("client", &self.client.id).finish_non_exhaustive()
    }
}

/// A connection that the guest has.
pub(super) struct Held {
    /// The client, if it is looked at; otherwise the guest alone has the socket.
    client: Option<Arc<Client>>,
    /// When to look whether it has been silent for too long.
    look_at: Option<Instant>,
    permit: OwnedSemaphorePermit,
    placed: Placed,
    done: Done,
}

impl Held {
    /// Tells what became of the connection, and lets go of its socket. Returns its share
    /// of the function's capacity.
    pub fn end(self, outcome: Outcome) -> OwnedSemaphorePermit {
        drop(self.client);
        (self.done)(self.placed, outcome);
        self.permit
    }
}

/// The connections of one instance.
pub(crate) struct Connections {
    connector: Arc<dyn Connector>,
    commands: mpsc::UnboundedSender<Command>,
    /// The keeper knows that something was sent, and is going to look whether it was
    /// read.
    is_watched: AtomicBool,
    /// How long after it was placed a connection is looked at; `None`: never.
    first_look: Option<Duration>,
    open: Mutex<Open>,
}

#[derive(Default)]
struct Open {
    held: HashMap<u64, Held>,
    /// No later than the first `look_at`.
    next_look: Option<Instant>,
    /// The instance is gone.
    is_closed: bool,
}

impl Open {
    fn look_no_later_than(&mut self, at: Option<Instant>) {
        self.next_look = [self.next_look, at].into_iter().flatten().min();
    }
}

impl Connections {
    pub(crate) fn new(
        connector: Arc<dyn Connector>,
        commands: mpsc::UnboundedSender<Command>,
        config: &FunctionConfig,
    ) -> Self {
        let first_look = Patience::of(config).map(|patience| patience.first_look);
        let (is_watched, open) = (AtomicBool::new(false), Mutex::default());
        Self { connector, commands, is_watched, first_look, open }
    }

    /// Takes in the connection that the instance was booted with.
    pub(crate) fn adopt(&self, delivery: Delivery, placed: Placed) {
        // Nobody could have closed it before the instance has a keeper.
        let _ = self.insert(delivery, placed);
    }

    /// Hands a connection to the instance. One that has ended, or does not take what it
    /// is given, leaves the connection untouched.
    pub(crate) fn hand_over(&self, delivery: Delivery, placed: Placed) -> Result<(), Delivery> {
        let client = delivery.client.clone();
        // Its end may be reported before the call has returned.
        self.insert(delivery, placed)?;
        if self.connector.connect(&client).is_err() {
            return match self.take(client.id) {
                Some(Held { permit, done, .. }) => Err(Delivery { client, permit, done }),
                // The instance is gone, and whoever wants to know has been told.
                None => Ok(()),
            };
        }
        if !self.is_watched.swap(true, SeqCst) {
            self.tell(Command::Watch);
        }
        Ok(())
    }

    fn insert(&self, delivery: Delivery, placed: Placed) -> Result<(), Delivery> {
        let look_at = self.first_look.map(|after| Instant::now() + after);
        let mut open = self.open();
        if open.is_closed {
            return Err(delivery);
        }
        open.look_no_later_than(look_at);
        let Delivery { client, permit, done } = delivery;
        let id = client.id;
        let client = look_at.map(|_| client);
        open.held.insert(id, Held { client, look_at, permit, placed, done });
        Ok(())
    }

    /// Tells the keeper something. One that has ended needs to know nothing.
    pub(crate) fn tell(&self, command: Command) {
        let _ = self.commands.send(command);
    }

    // For the keeper.

    /// It is about to look whether the instance has read everything: it wants to be told
    /// of what is sent from now on.
    pub(super) fn stop_watching(&self) {
        self.is_watched.store(false, SeqCst);
    }

    /// Takes a connection out.
    pub(super) fn take(&self, id: u64) -> Option<Held> {
        self.open().held.remove(&id)
    }

    /// The instance is gone: takes all connections out, by number, and lets no other in.
    pub(super) fn close(&self) -> HashMap<u64, Held> {
        let mut open = self.open();
        open.is_closed = true;
        mem::take(&mut open.held)
    }

    /// When a connection has to be looked at.
    pub(super) fn next_look(&self) -> Option<Instant> {
        self.open().next_look
    }

    /// The connections that have to be looked at by `now`; each gets another time by
    /// [`Connections::look_again`], or is not looked at again.
    pub(super) fn due(&self, now: Instant) -> Vec<Arc<Client>> {
        let mut open = self.open();
        let mut due = Vec::new();
        let mut next = None;
        for held in open.held.values_mut() {
            match held.look_at {
                Some(at) if at <= now => {
                    held.look_at = None;
                    due.extend(held.client.clone());
                }
                at => next = [next, at].into_iter().flatten().min(),
            }
        }
        open.next_look = next;
        due
    }

    /// Has a connection looked at again, if it is still there.
    pub(super) fn look_again(&self, id: u64, at: Instant) {
        let mut open = self.open();
        if let Some(held) = open.held.get_mut(&id) {
            held.look_at = Some(at);
            open.look_no_later_than(Some(at));
        }
    }

    fn open(&self) -> MutexGuard<'_, Open> {
        self.open.lock().expect("no holder panics")
    }
}
