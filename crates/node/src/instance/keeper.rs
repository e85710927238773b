//! The task that owns a live instance: passes connections in, takes reports
//! out, and ends it when its time has come.

use super::launch::{Client, End, FrozenInstance, Instance, Launched, Report};
use crate::boots::{BootKind, BootRecord, Phases};
use crate::service::Service;
use std::collections::HashMap;
use std::future::poll_fn;
use std::net::SocketAddr;
use std::sync::Arc;
use thaw_abi::control::EntryPoint;
use thaw_sandbox::{BootTimes, Denials};
use tokio::sync::{OwnedSemaphorePermit, mpsc, oneshot};
use tokio::time::{Instant, sleep_until};

/// Most denied outgoing connections of one instance that are logged.
const DENIALS_LOGGED: usize = 16;

/// What became of a connection that was given to an instance.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// The guest has closed it.
    Closed,
    /// The instance ended before it got the connection; the socket is untouched.
    Undelivered,
    /// The instance ended while it had the connection.
    Gone(End),
}

/// A connection on its way to an instance.
pub(crate) struct Delivery {
    pub client: Arc<Client>,
    pub done: oneshot::Sender<Outcome>,
    /// The connection's share of the function's capacity.
    pub permit: OwnedSemaphorePermit,
}

/// What a keeper can be told.
pub(crate) enum Command {
    Connect(Delivery),
    /// Make its memory the image of the function, and end; it is idle.
    Freeze(FreezeReply),
    End,
}

/// Where to say how a freeze went.
pub(crate) type FreezeReply = oneshot::Sender<Result<FrozenInstance, String>>;

/// A connection that the guest has.
struct Open {
    done: oneshot::Sender<Outcome>,
    permit: OwnedSemaphorePermit,
}

/// How the boot came about.
struct Boot {
    kind: BootKind,
    peer: SocketAddr,
    accepted_ns: u64,
    zygote_ns: u64,
    /// It is known that the sandbox has booted.
    is_reported: bool,
}

/// The owner of one instance.
pub(crate) struct Keeper {
    id: u64,
    service: Arc<Service>,
    instance: Box<dyn Instance>,
    commands: mpsc::UnboundedReceiver<Command>,
    open: HashMap<u64, Open>,
    /// With one instance a connection, its share of the capacity is free only
    /// when the instance is gone.
    retained: Vec<OwnedSemaphorePermit>,
    boot: Option<Boot>,
    /// Who wants it to be frozen.
    freeze: Option<FreezeReply>,
    /// Denied connections that were logged.
    denials_logged: usize,
    served: u64,
    idle_since: Option<Instant>,
    /// The instance's share of the node's capacity.
    _capacity: OwnedSemaphorePermit,
}

enum Step {
    Report(Report),
    Command(Option<Command>),
    IdleTooLong,
}

impl Keeper {
    /// The keeper of an instance that was booted with `first` in it.
    pub(crate) fn new(
        id: u64,
        service: Arc<Service>,
        launched: Launched,
        commands: mpsc::UnboundedReceiver<Command>,
        first: Delivery,
        capacity: OwnedSemaphorePermit,
    ) -> Self {
        let Delivery { client, done, permit } = first;
        let Launched { instance, kind, zygote_ns } = launched;
        let boot = Boot {
            kind,
            peer: client.peer,
            accepted_ns: client.accepted_ns,
            zygote_ns,
            is_reported: false,
        };
        Self {
            id,
            service,
            instance,
            commands,
            open: HashMap::from([(client.id, Open { done, permit })]),
            retained: Vec::new(),
            boot: Some(boot),
            freeze: None,
            denials_logged: 0,
            served: 0,
            idle_since: None,
            _capacity: capacity,
        }
    }

    /// Serves the instance until it is gone.
    pub(crate) async fn run(mut self) {
        loop {
            let deadline = self.idle_since.map(|since| since + self.service.keep_alive());
            let step = tokio::select! {
                report = poll_fn(|context| self.instance.poll_report(context)) => Step::Report(report),
                command = self.commands.recv() => Step::Command(command),
                () = sleep_until(deadline.unwrap_or_else(Instant::now)), if deadline.is_some() => {
                    Step::IdleTooLong
                }
            };
            match step {
                Step::Report(Report::Booted(times)) => self.booted(&times),
                Step::Report(Report::ConnectionClosed(connection)) => self.closed(connection),
                Step::Report(Report::Denied(denials)) => self.denied(&denials),
                Step::Report(Report::Gone(end)) => return self.gone(end),
                Step::Command(Some(Command::Connect(delivery))) => self.connect(delivery),
                Step::Report(Report::AtRest(rest)) => self.freeze(rest),
                Step::Command(Some(Command::Freeze(reply))) => {
                    self.idle_since = None;
                    match self.instance.request_rest() {
                        Ok(()) => self.freeze = Some(reply),
                        // The report of its end is on the way.
                        Err(error) => drop(reply.send(Err(error.to_string()))),
                    }
                }
                Step::Command(Some(Command::End) | None) => self.instance.kill(),
                // Only if no connection is on its way does the instance end.
                Step::IdleTooLong => {
                    self.idle_since = None;
                    if self.service.retire_if_idle(self.id) {
                        self.instance.kill();
                    }
                }
            }
        }
    }

    /// Every denial is counted; a program that tries again and again does not fill
    /// the log.
    fn denied(&mut self, denials: &Denials) {
        let function = self.service.name();
        self.service.egress_denied(denials.total);
        let left = DENIALS_LOGGED.saturating_sub(self.denials_logged);
        for denied in denials.recent.iter().take(left) {
            tracing::warn!(%function, instance = self.id, "denied an outgoing connection to {denied}; see [egress] in its thaw.toml");
            self.denials_logged += 1;
        }
    }

    fn freeze(&mut self, rest: EntryPoint) {
        if let Some(reply) = self.freeze.take() {
            // Others of the runtime's tasks go on elsewhere meanwhile.
            let outcome = tokio::task::block_in_place(|| self.instance.freeze(rest));
            // Who has asked may have lost patience.
            let _ = reply.send(outcome);
        }
        self.instance.kill();
    }

    /// The first report may come before the first response byte, if the guest
    /// waits for something or another of its processes answers; a later one
    /// completes it.
    fn booted(&mut self, times: &BootTimes) {
        let Some(boot) = &mut self.boot else { return };
        let record = BootRecord {
            function: self.service.name().clone(),
            instance: self.id,
            kind: boot.kind,
            peer: boot.peer,
            accepted_ns: boot.accepted_ns,
            phases: Phases::new(boot.accepted_ns, boot.zygote_ns, times),
        };
        let has_answered = record.phases.first_byte.is_some();
        match boot.is_reported {
            false => self.service.booted(record),
            true if has_answered => self.service.answered(&record),
            true => {}
        }
        boot.is_reported = true;
        if has_answered {
            self.boot = None;
        }
    }

    fn connect(&mut self, delivery: Delivery) {
        self.idle_since = None;
        let Delivery { client, done, permit } = delivery;
        match self.instance.connect(&client) {
            Ok(()) => {
                self.open.insert(client.id, Open { done, permit });
            }
            // The report of its end is on the way.
            Err(_) => {
                self.service.retire(self.id);
                let _ = done.send(Outcome::Undelivered);
            }
        }
    }

    fn closed(&mut self, connection: u64) {
        // A number that the sandbox made up changes nothing.
        let Some(Open { done, permit }) = self.open.remove(&connection) else { return };
        // The client sees the end of its connection when the gateway lets go of
        // its descriptor, so that comes first.
        let _ = done.send(Outcome::Closed);
        self.served += 1;
        if self.served == 1 {
            self.instance.first_request_done();
        }
        if self.service.is_single_use() {
            self.retained.push(permit);
            self.service.retire(self.id);
            self.instance.kill();
        } else {
            let idle = self.service.disconnected(self.id);
            self.idle_since = idle.then(Instant::now);
        }
    }

    fn gone(mut self, end: End) {
        self.service.remove(self.id, &end);
        for (_, Open { done, .. }) in self.open.drain() {
            let _ = done.send(Outcome::Gone(end.clone()));
        }
        self.commands.close();
        while let Ok(command) = self.commands.try_recv() {
            if let Command::Connect(Delivery { done, .. }) = command {
                let _ = done.send(Outcome::Undelivered);
            }
        }
    }
}
