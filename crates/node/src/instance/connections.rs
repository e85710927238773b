//! The connections of one instance: whoever accepts a client puts its connection in,
//! the instance's supervisor takes it out.

use super::command::Command;
use super::end::End;
use super::launch::{Client, Way};
use super::live::Connector;
use super::patience::Patience;
use crate::edge::Addresses;
use crate::remote::Execs;
use rustix::net::{Shutdown, shutdown};
use serde::{Deserialize, Serialize};
use std::collections::HashMap;
use std::fmt;
use std::io;
use std::mem;
use std::net::SocketAddr;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock};
use std::time::Duration;
use thaw_home::clock::monotonic_ns;
use thaw_home::config::FunctionConfig;
use thaw_sandbox::{KeptForSuccessor, RESUMED_MAX, keep_connection};
use tokio::sync::{OwnedSemaphorePermit, mpsc};
use tokio::time::Instant;

/// How long the monitor may take to have what a daemon leaves that ends.
const KEEP_PATIENCE: Duration = Duration::from_secs(2);

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

/// What the next daemon has to know of a connection that an instance has.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct ConnectionNote {
    /// Number of the instance.
    pub instance: u64,
    /// Number of the connection.
    pub id: u64,
    pub peer: SocketAddr,
    pub local: SocketAddr,
    /// When it was accepted, in nanoseconds of `CLOCK_MONOTONIC`.
    pub accepted_ns: u64,
    pub wants_head_only: bool,
}

/// A connection whose bytes an earlier daemon has copied.
#[derive(Debug)]
pub(crate) struct JoinedOrphan {
    /// Number of the instance.
    pub instance: u64,
    /// Number of the connection.
    pub connection: u64,
    pub addresses: Addresses,
    /// The client's socket.
    pub client: OwnedFd,
    /// The one whose other end the instance has.
    pub far: OwnedFd,
    /// What was read of either and not written to the other, if there is any.
    pub left: Option<OwnedFd>,
}

/// A connection that an instance of an earlier daemon has.
pub(crate) enum Inherited {
    /// It was handed over; the monitor keeps it for the next daemon, too.
    HandedOver(Arc<Client>, KeptForSuccessor),
    /// The gateway copies its bytes.
    Joined(JoinedOrphan),
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

/// Why the gateway has let go of a connection that the guest still has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum LetGo {
    /// Its request was answered.
    Answered,
    /// Its client has gone away before that.
    Abandoned,
}

/// A connection that the guest has.
pub(crate) struct OpenConnection {
    watch: Watch,
    /// When to look whether it has been silent for too long, or is closed.
    look_at: Option<Instant>,
    /// Its share of the function's capacity, one for each request that is under way; none while no
    /// request is on a connection that the gateway keeps for others.
    permit: Option<OwnedSemaphorePermit>,
    placed: Placed,
    done: Done,
    /// It outlives this daemon.
    kept: Option<KeptForSuccessor>,
    /// The guest was told to close it, since others wait for its place.
    is_crowded_out: bool,
    /// It has another protocol by now, and the gateway only copies its bytes.
    is_joined: bool,
}

/// Who knows how a connection goes.
enum Watch {
    /// The supervisor, from the client's socket.
    Client(Arc<Client>),
    /// The gateway, through which it passes.
    Gateway,
    /// The guest alone has it, and is expected to close it.
    Guest(LetGo),
}

impl OpenConnection {
    /// Tells what became of the connection, and lets go of its socket. Returns its share
    /// of the function's capacity.
    pub fn end(self, outcome: Outcome) -> Option<OwnedSemaphorePermit> {
        drop(self.watch);
        (self.done)(self.placed, outcome);
        self.permit
    }
}

/// Connections of clients, by number, that an instance has while it is asleep. Each keeps its share
/// of the function's capacity. They end with this value.
#[derive(Default)]
pub(crate) struct KeptConnections(HashMap<u64, OpenConnection>);

impl KeptConnections {
    /// Number of connections.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// The clients.
    pub fn clients(&self) -> Vec<Arc<Client>> {
        let client = |held: &OpenConnection| match &held.watch {
            Watch::Client(client) => Some(client.clone()),
            Watch::Gateway | Watch::Guest(_) => None,
        };
        self.0.values().filter_map(client).collect()
    }

    /// Ends them all: their clients are told what became of the instance, or see the end.
    pub fn end(mut self, outcome: &Outcome) {
        for (_, held) in self.0.drain() {
            drop(held.end(outcome.clone()));
        }
    }
}

impl fmt::Debug for KeptConnections {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("KeptConnections").field(&self.len()).finish()
    }
}

impl Drop for KeptConnections {
    fn drop(&mut self) {
        for (_, held) in self.0.drain() {
            drop(held.end(Outcome::Closed));
        }
    }
}

/// A connection whose time has come.
pub(crate) enum Due {
    /// It has to be looked at.
    Look(Arc<Client>),
    /// The guest should have closed it.
    Overdue(u64, LetGo),
}

/// Whether an instance outlives this daemon.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Leaving {
    /// The monitor has it.
    Kept,
    /// It does not yet.
    NotYet,
    /// It ends with this daemon.
    Refused,
}

/// The connections of one instance.
pub(crate) struct ConnectionTable {
    connector: Arc<dyn Connector>,
    commands: mpsc::UnboundedSender<Command>,
    /// The supervisor knows that something was sent, and is going to look whether it was
    /// read.
    is_watched: AtomicBool,
    /// The supervisor knows that a first request was answered.
    has_served: AtomicBool,
    /// Whether the monitor has the instance, for the next daemon, if it was asked to.
    is_kept: Mutex<Option<Arc<AtomicBool>>>,
    /// The instance cannot outlive this daemon.
    cannot_leave: AtomicBool,
    /// When it was to be kept at once.
    asked_to_leave: OnceLock<Instant>,
    /// It was tried in vain to put it to sleep.
    cannot_sleep: AtomicBool,
    /// How long after it was placed a connection is looked at; `None`: never.
    first_look: Option<Duration>,
    open: Mutex<Open>,
    /// Processes in it that were started from outside.
    execs: Arc<Execs>,
}

#[derive(Default)]
struct Open {
    held: HashMap<u64, OpenConnection>,
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

/// A connection that an instance has not got, untouched.
pub(crate) struct Refused {
    pub delivery: Delivery,
    /// Why it did not get it, as it seems to be alive: a sentence for the operator. `None`: it has ended.
    pub lives_on: Option<String>,
}

/// See [`Refused::lives_on`].
fn why_not_connected(error: &io::Error) -> Option<String> {
    match error.kind() {
        io::ErrorKind::BrokenPipe
        | io::ErrorKind::ConnectionReset
        | io::ErrorKind::NotConnected => None,
        io::ErrorKind::OutOfMemory => {
            Some("the instance reads none of its messages, and no more can wait, ending it".into())
        }
        _ => Some(format!("the instance cannot be given a connection ({error}), ending it")),
    }
}

impl ConnectionTable {
    pub(crate) fn new(
        connector: Arc<dyn Connector>,
        commands: mpsc::UnboundedSender<Command>,
        config: &FunctionConfig,
    ) -> Self {
        let first_look = Patience::of(config).map(|patience| patience.first_look);
        Self {
            connector,
            commands,
            is_watched: AtomicBool::new(false),
            has_served: AtomicBool::new(false),
            is_kept: Mutex::default(),
            cannot_leave: AtomicBool::new(false),
            asked_to_leave: OnceLock::new(),
            cannot_sleep: AtomicBool::new(false),
            first_look,
            open: Mutex::default(),
            execs: Arc::default(),
        }
    }

    /// Those of an instance that had these processes from outside before it fell asleep.
    pub(crate) fn with_execs(self, execs: Arc<Execs>) -> Self {
        Self { execs, ..self }
    }

    /// Processes in the instance that were started from outside.
    pub(crate) fn execs(&self) -> &Arc<Execs> {
        &self.execs
    }

    /// What hands things to the instance.
    pub(crate) fn connector(&self) -> Arc<dyn Connector> {
        self.connector.clone()
    }

    /// Has the supervisor look soon whether the instance has read what it was sent.
    pub(crate) fn watch(&self) {
        if !self.is_watched.swap(true, SeqCst) {
            self.tell(Command::Watch);
        }
    }

    /// Takes in the connection that the instance was booted with.
    pub(crate) fn adopt(&self, delivery: Delivery, placed: Placed) {
        // Nobody could have closed it before the instance has a supervisor.
        let _ = self.insert(delivery, placed);
    }

    /// Hands a connection to the instance. One that has ended, or does not take what it
    /// is given, leaves the connection untouched.
    pub(crate) fn hand_over(&self, delivery: Delivery, placed: Placed) -> Result<(), Refused> {
        let client = delivery.client.clone();
        // Its end may be reported before the call has returned.
        self.insert(delivery, placed).map_err(|delivery| Refused { delivery, lives_on: None })?;
        if let Err(error) = self.connector.connect(&client) {
            return match self.take(client.id) {
                Some(OpenConnection { permit: Some(mut permit), done, .. }) => {
                    // Others may have begun to use it meanwhile, and their places are free.
                    let permit = permit.split(1).expect("it has its own");
                    let delivery = Delivery { client, permit, done };
                    Err(Refused { delivery, lives_on: why_not_connected(&error) })
                }
                // The instance is gone, and whoever wants to know has been told.
                _ => Ok(()),
            };
        }
        self.watch();
        Ok(())
    }

    fn insert(&self, delivery: Delivery, placed: Placed) -> Result<(), Delivery> {
        let look_at = match delivery.client.way {
            Way::HandedOver => self.first_look.map(|after| Instant::now() + after),
            Way::Routed => None,
        };
        let mut open = self.open();
        if open.is_closed {
            return Err(delivery);
        }
        open.look_no_later_than(look_at);
        let Delivery { client, permit, done } = delivery;
        let id = client.id;
        let watch = if look_at.is_some() { Watch::Client(client) } else { Watch::Gateway };
        open.held.insert(
            id,
            OpenConnection {
                watch,
                look_at,
                permit: Some(permit),
                placed,
                done,
                kept: None,
                is_crowded_out: false,
                is_joined: false,
            },
        );
        Ok(())
    }

    /// Takes in a connection that was handed over to the instance by an earlier daemon.
    pub(crate) fn inherit(&self, delivery: Delivery, placed: Placed, kept: KeptForSuccessor) {
        let id = delivery.client.id;
        // Nobody could have closed it before the instance has a supervisor.
        let _ = self.insert(delivery, placed);
        if let Some(held) = self.open().held.get_mut(&id) {
            held.kept = Some(kept);
        }
    }

    /// Takes in one of which the gateway copies the bytes, as an earlier daemon did.
    pub(crate) fn inherit_joined(
        &self,
        orphan: &JoinedOrphan,
        permit: OwnedSemaphorePermit,
        placed: Placed,
    ) {
        let held = OpenConnection {
            watch: Watch::Gateway,
            look_at: None,
            permit: Some(permit),
            placed,
            // Its client sees the end by its socket.
            done: Box::new(|_, _| {}),
            kept: None,
            is_crowded_out: false,
            is_joined: true,
        };
        self.open().held.insert(orphan.connection, held);
    }

    /// Has those connections outlive this daemon that were handed over whole and are at least
    /// as old as `age`. How long until the next one is, if there is one.
    ///
    /// # Errors
    /// This process has no descriptors left.
    pub(crate) fn keep_old_ones(&self, age: Duration) -> io::Result<Option<Duration>> {
        let now_ns = monotonic_ns();
        let mut next = None;
        let mut old = Vec::new();
        for (id, held) in &self.open().held {
            let Watch::Client(client) = &held.watch else { continue };
            if held.kept.is_some() {
                continue;
            }
            let is_old = Duration::from_nanos(now_ns.saturating_sub(client.accepted_ns));
            match age.checked_sub(is_old) {
                None | Some(Duration::ZERO) => {
                    old.push((*id, held.placed.instance, client.clone()));
                }
                Some(left) => next = Some(next.map_or(left, |next: Duration| next.min(left))),
            }
        }
        for (id, instance, client) in old {
            let note = ConnectionNote {
                instance,
                id,
                peer: client.peer,
                local: client.local,
                accepted_ns: client.accepted_ns,
                wants_head_only: client.wants_head_only,
            };
            let text = serde_json::to_string(&note).expect("plain data");
            let kept = keep_connection(client.socket.as_fd(), &[], &text)?;
            if let Some(held) = self.open().held.get_mut(&id) {
                held.kept = kept;
            }
        }
        Ok(next)
    }

    // For connections that the gateway keeps for several requests.

    /// A request is under way on a connection; the guest may have closed it.
    pub(crate) fn occupy(
        &self,
        id: u64,
        permit: OwnedSemaphorePermit,
    ) -> Result<(), OwnedSemaphorePermit> {
        match self.open().held.get_mut(&id) {
            Some(held) => {
                match &mut held.permit {
                    Some(others) => others.merge(permit),
                    none => *none = Some(permit),
                }
                Ok(())
            }
            None => Err(permit),
        }
    }

    /// A request is under way on a connection no more. Returns its share of the
    /// function's capacity, unless the guest has closed it and the supervisor has seen that.
    pub(crate) fn vacate(&self, id: u64) -> Option<OwnedSemaphorePermit> {
        let mut open = self.open();
        let permit = &mut open.held.get_mut(&id)?.permit;
        match permit {
            Some(several) if several.num_permits() > 1 => several.split(1),
            one => one.take(),
        }
    }

    /// The gateway has let go of a connection: the guest is to close it by `at`.
    pub(crate) fn let_go(&self, id: u64, why: LetGo, at: Instant) {
        {
            let mut open = self.open();
            let Some(held) = open.held.get_mut(&id) else { return };
            held.watch = Watch::Guest(why);
            held.look_at = Some(at);
            open.look_no_later_than(Some(at));
        }
        self.tell(Command::Look);
    }

    /// Connections that were handed over, whose last request was answered at least `after` ago and
    /// on which the client has asked nothing since; and for how long.
    pub(crate) fn idle_for(
        &self,
        config: &FunctionConfig,
        after: Duration,
    ) -> Vec<(Duration, Arc<Client>)> {
        // Of a protocol that is not known nobody can say that it is nobody's turn.
        let Some(patience) = Patience::of(config).filter(|patience| patience.answer.is_some())
        else {
            return Vec::new();
        };
        let open = self.open();
        let handed_over = open.held.values().filter(|held| !held.is_crowded_out);
        let idle = handed_over.filter_map(|held| match &held.watch {
            Watch::Client(client) => {
                patience.silent_for(client).map(|silence| (silence, client.clone()))
            }
            Watch::Gateway | Watch::Guest(_) => None,
        });
        idle.filter(|(silence, _)| *silence >= after).collect()
    }

    /// Has the guest close a connection: it sees the end of the stream. Whether it has it.
    pub(crate) fn crowd_out(&self, id: u64) -> bool {
        let mut open = self.open();
        let Some(held) = open.held.get_mut(&id) else { return false };
        let Watch::Client(client) = &held.watch else { return false };
        // A client that has gone has ended it already.
        let _ = shutdown(&client.socket, Shutdown::Read);
        held.is_crowded_out = true;
        true
    }

    /// A request was answered; the supervisor wants to know of the first one.
    pub(crate) fn note_served(&self) {
        if !self.has_served.swap(true, SeqCst) {
            self.tell(Command::Served);
        }
    }

    /// Number of connections that the guest has.
    pub(crate) fn count(&self) -> usize {
        self.open().held.len()
    }

    /// How many of them outlive this daemon together with the instance; `None`: it does not.
    pub(crate) fn kept(&self) -> Option<usize> {
        let is_kept = |held: &&OpenConnection| {
            held.kept.as_ref().is_some_and(|kept| kept.has_arrived().load(SeqCst))
        };
        self.monitor_has_it().then(|| {
            let open = self.open();
            open.held.values().filter(is_kept).count()
        })
    }

    /// Whether the next daemon gets it from the monitor.
    pub(crate) fn monitor_has_it(&self) -> bool {
        let is_kept = self.is_kept.lock().expect("no holder panics");
        is_kept.as_ref().is_some_and(|has_arrived| has_arrived.load(SeqCst))
    }

    /// Whether the next daemon gets the instance with all connections that were handed over.
    pub(crate) fn leaving(&self) -> Leaving {
        if self.cannot_leave.load(SeqCst) {
            return Leaving::Refused;
        }
        let has_it = self.monitor_has_it();
        let is_asked =
            |held: &OpenConnection| !matches!(held.watch, Watch::Client(_)) || held.kept.is_some();
        // Only then is it known that nobody looks at it, and that no other daemon is needed to wake it.
        let Some(asked) = self.asked_to_leave.get() else { return Leaving::NotYet };
        let is_late = || asked.elapsed() > KEEP_PATIENCE;
        match has_it {
            true if self.open().held.values().all(is_asked) => Leaving::Kept,
            // Most likely the monitor keeps as much as it may.
            false if is_late() => Leaving::Refused,
            _ => Leaving::NotYet,
        }
    }

    /// How many connections it has that may outlive this daemon.
    pub(crate) fn lasting(&self) -> usize {
        let lasts =
            |held: &&OpenConnection| held.is_joined || matches!(held.watch, Watch::Client(_));
        self.open().held.values().filter(lasts).count()
    }

    /// A connection has another protocol from now on.
    pub(crate) fn join(&self, id: u64) {
        if let Some(held) = self.open().held.get_mut(&id) {
            held.is_joined = true;
        }
    }

    /// Whether it was tried in vain to put it to sleep.
    pub(crate) fn cannot_sleep(&self) -> bool {
        self.cannot_sleep.load(SeqCst)
    }

    /// Tells the supervisor something. One that has ended needs to know nothing.
    pub(crate) fn tell(&self, command: Command) {
        let _ = self.commands.send(command);
    }

    // For the supervisor.

    /// The monitor was asked to keep the instance for the next daemon, or to forget it.
    pub(crate) fn note_kept(&self, has_arrived: Option<Arc<AtomicBool>>) {
        *self.is_kept.lock().expect("no holder panics") = has_arrived;
    }

    /// The monitor was asked to have the instance at once.
    pub(crate) fn note_asked_to_leave(&self) {
        let _ = self.asked_to_leave.set(Instant::now());
    }

    /// The instance ends with this daemon.
    pub(crate) fn note_cannot_leave(&self) {
        self.cannot_leave.store(true, SeqCst);
    }

    /// It was tried in vain to put it to sleep.
    pub(crate) fn note_cannot_sleep(&self) {
        self.cannot_sleep.store(true, SeqCst);
    }

    /// It is about to look whether the instance has read everything: it wants to be told
    /// of what is sent from now on.
    pub(crate) fn stop_watching(&self) {
        self.is_watched.store(false, SeqCst);
    }

    /// Takes a connection out.
    pub(crate) fn take(&self, id: u64) -> Option<OpenConnection> {
        self.open().held.remove(&id)
    }

    /// The instance is gone: takes all connections out, by number, and lets no other in.
    pub(crate) fn close(&self) -> HashMap<u64, OpenConnection> {
        let mut open = self.open();
        open.is_closed = true;
        mem::take(&mut open.held)
    }

    /// For how long the instance has had nothing to do for any client, as far as their sockets
    /// tell; `None`: somebody waits for something, or there are more than go on after a sleep.
    pub(crate) fn silent_for(&self, patience: Option<Patience>) -> Option<Duration> {
        let open = self.open();
        let mut shortest = Duration::MAX;
        let mut clients = 0;
        for held in open.held.values() {
            match &held.watch {
                Watch::Client(client) => {
                    clients += 1;
                    shortest = shortest.min(patience?.silent_for(client)?);
                }
                // The gateway ends those on which there is no request, and the guest has no
                // part in what it was told to close.
                Watch::Gateway | Watch::Guest(_) if held.permit.is_none() => {}
                Watch::Gateway | Watch::Guest(_) => return None,
            }
        }
        (clients <= RESUMED_MAX).then_some(shortest)
    }

    /// Takes out the connections of clients that an instance has which is about to sleep.
    pub(crate) fn take_clients(&self) -> KeptConnections {
        let mut open = self.open();
        let is_clients = |held: &mut OpenConnection| matches!(held.watch, Watch::Client(_));
        KeptConnections(open.held.extract_if(|_, held| is_clients(held)).collect())
    }

    /// Puts them in again, here or for the instance that is booted in its place.
    pub(crate) fn put_back(&self, mut kept: KeptConnections) {
        let look_at = self.first_look.map(|after| Instant::now() + after);
        let mut open = self.open();
        open.look_no_later_than(look_at);
        for (id, held) in mem::take(&mut kept.0) {
            open.held.insert(id, OpenConnection { look_at, ..held });
        }
    }

    /// When a connection has to be looked at.
    pub(crate) fn next_look(&self) -> Option<Instant> {
        self.open().next_look
    }

    /// The connections whose time has come by `now`; each gets another time by
    /// [`ConnectionTable::look_again`], or is not looked at again.
    pub(crate) fn due(&self, now: Instant) -> Vec<Due> {
        let mut open = self.open();
        let mut due = Vec::new();
        let mut next = None;
        for (id, held) in &mut open.held {
            match held.look_at {
                Some(at) if at <= now => {
                    held.look_at = None;
                    match &held.watch {
                        Watch::Client(client) => due.push(Due::Look(client.clone())),
                        Watch::Guest(why) => due.push(Due::Overdue(*id, *why)),
                        Watch::Gateway => {}
                    }
                }
                at => next = [next, at].into_iter().flatten().min(),
            }
        }
        open.next_look = next;
        due
    }

    /// Has all connections of clients looked at.
    pub(crate) fn look_at_all(&self, at: Instant) {
        let mut open = self.open();
        let clients = open.held.values_mut().filter(|held| matches!(held.watch, Watch::Client(_)));
        clients.for_each(|held| held.look_at = Some(at));
        open.look_no_later_than(Some(at));
    }

    /// Has a connection looked at again, if it is still there.
    pub(crate) fn look_again(&self, id: u64, at: Instant) {
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::remote::RemoteChannel;
    use std::os::fd::BorrowedFd;
    use thaw_sandbox::RemoteMessage;

    struct Nobody;

    impl Connector for Nobody {
        fn connect(&self, _: &Client) -> io::Result<()> {
            Ok(())
        }
    }

    impl RemoteChannel for Nobody {
        fn send_remote(&self, _: RemoteMessage, _: &[BorrowedFd<'_>]) -> io::Result<()> {
            Err(io::ErrorKind::Unsupported.into())
        }
    }

    #[test]
    fn it_outlives_the_daemon_only_as_long_as_the_monitor_has_it() {
        let text = "name = \"f\"\ncommand = [\"x\"]\nrootfs = \"./r\"\nport = 80\n";
        let config = FunctionConfig::parse("thaw.toml".as_ref(), text).unwrap();
        let (commands, _) = mpsc::unbounded_channel();
        let table = ConnectionTable::new(Arc::new(Nobody), commands, &config);
        assert_eq!(table.kept(), None);
        table.note_kept(Some(Arc::new(AtomicBool::new(true))));
        assert_eq!(table.kept(), Some(0));
        // It is to rest, and the monitor forgets it.
        table.note_kept(None);
        assert_eq!(table.kept(), None);
        let has_arrived = Arc::new(AtomicBool::new(false));
        table.note_kept(Some(has_arrived.clone()));
        assert_eq!(table.kept(), None);
        has_arrived.store(true, SeqCst);
        assert_eq!(table.kept(), Some(0));
    }
}
