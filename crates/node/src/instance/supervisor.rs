//! The task that owns a live instance: takes its reports, keeps the times of its
//! connections, and ends it when its time has come. Connections do not pass through
//! here: whoever accepts one hands it over by [`ConnectionTable`].

use super::connections::{ConnectionTable, Due, LetGo, Outcome};
use super::hibernation::HibernationTerms;
use super::launch::{
    Checkpoint, Checkpointed, Client, End, FrozenInstance, HibernatedInstance, Instance, Launched,
    Launcher, Report,
};
use super::patience::{Patience, Verdict};
use crate::boots::{BootKind, BootRecord, Phases};
use crate::config::{DomainName, FunctionName};
use crate::service::Service;
use crate::socket::traffic;
use crate::tenants::Lease;
use rustix::net::{Shutdown, shutdown};
use serde::{Deserialize, Serialize};
use std::collections::HashSet;
use std::fmt;
use std::future::poll_fn;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;
use thaw_abi::control::EntryPoint;
use thaw_sandbox::monitor::has_monitor;
use thaw_sandbox::{Awake, AwakeCause, BootTimes, Denials, Timers};
use tokio::sync::{OwnedSemaphorePermit, mpsc, oneshot};
use tokio::time::{Instant, sleep};

/// Most denied outgoing connections of one instance that are logged.
const DENIALS_LOGGED: usize = 16;
/// How long a guest that computes goes on before it hears of a connection.
const RING_AFTER: Duration = Duration::from_millis(1);
/// How often a supervisor looks at most whether its instance is idle.
const IDLE_CHECK_MIN: Duration = Duration::from_millis(10);
/// How long a killed instance may take to be gone before its clients are answered.
const KILL_PATIENCE: Duration = Duration::from_millis(500);

/// How long an instance lives, or a connection that was handed over, before it is kept for the daemon that comes
/// after this one: most end before that, and cost nothing.
const KEEP_AFTER: Duration = Duration::from_millis(150);

/// What the next daemon has to know of an instance.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct InstanceNote {
    pub id: u64,
    pub function: FunctionName,
    /// Identifies the image that it was booted from.
    pub image: String,
    /// When it was booted, in milliseconds since 1970.
    pub booted_ms: u64,
    /// The function's tenant.
    pub domain: Option<DomainName>,
    /// Bytes of memory that it may use.
    pub memory: u64,
}

/// What a supervisor can be told.
#[derive(Debug)]
pub(crate) enum Command {
    /// Make sure that the instance reads what it was sent.
    Watch,
    /// Look when the next connection is due.
    Look,
    /// A first request was answered on a connection that stays.
    Served,
    /// Make its memory the image of the function, and end; it is idle.
    Freeze(FreezeReply),
    /// Copy its memory; it goes on.
    Copy(CopyReply),
    /// Write its memory to the store; it goes on.
    Checkpoint(Checkpoint, CheckpointReply),
    /// Give up its memory; it is idle.
    Hibernate(HibernateReply),
    /// Give up its memory if it is idle; nobody waits for that.
    Relieve,
    /// Take its memory back.
    Wake(WakeReply),
    End,
}

/// Where to say how a freeze went.
pub(crate) type FreezeReply = oneshot::Sender<Result<FrozenInstance, String>>;
/// Where to say how copying went.
pub(crate) type CopyReply = oneshot::Sender<Result<Copied, String>>;

/// Where to say how a checkpoint went, and for how long the instance rested.
pub(crate) type CheckpointReply = oneshot::Sender<Result<(Checkpointed, Duration), String>>;

/// The copied memory of an instance that has gone on.
pub(crate) struct Copied {
    /// Boots instances that begin where that one was.
    pub launcher: Arc<dyn Launcher>,
    /// For how long it rested, from the moment at which it was asked to.
    pub pause: Duration,
}

impl fmt::Debug for Copied {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Copied").field("pause", &self.pause).finish_non_exhaustive()
    }
}

/// Who wants the instance to come to rest.
enum Rest {
    Freeze(FreezeReply),
    Copy(CopyReply, Instant),
    Checkpoint(Checkpoint, CheckpointReply, Instant),
}

impl Rest {
    /// Whether the instance goes on afterwards.
    fn is_checkpoint(&self) -> bool {
        !matches!(self, Self::Freeze(_))
    }

    /// Whether whoever has asked still waits.
    fn is_wanted(&self) -> bool {
        match self {
            Self::Freeze(reply) => !reply.is_closed(),
            Self::Copy(reply, _) => !reply.is_closed(),
            Self::Checkpoint(_, reply, _) => !reply.is_closed(),
        }
    }

    /// Whoever has asked hears why there is none.
    fn refuse(self, reason: String) {
        // Who has asked may have lost patience.
        match self {
            Self::Freeze(reply) => drop(reply.send(Err(reason))),
            Self::Copy(reply, _) => drop(reply.send(Err(reason))),
            Self::Checkpoint(_, reply, _) => drop(reply.send(Err(reason))),
        }
    }
}

/// Where to say how a hibernation went.
pub(crate) type HibernateReply = oneshot::Sender<Result<HibernatedInstance, String>>;
/// Where to say how it woke; `None`: it was awake.
pub(crate) type WakeReply = oneshot::Sender<Result<Option<Awake>, String>>;

/// How long until it is tried again to hibernate an instance.
const HIBERNATE_AGAIN: Duration = Duration::from_millis(100);
/// The same after it has failed.
const HIBERNATE_AFTER_FAILURE: Duration = Duration::from_secs(60);

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
pub(crate) struct Supervisor {
    id: u64,
    service: Arc<Service>,
    instance: Box<dyn Instance>,
    commands: mpsc::UnboundedReceiver<Command>,
    connections: Arc<ConnectionTable>,
    patience: Option<Patience>,
    /// Connections for which the instance was ended.
    late: HashSet<u64>,
    /// With one instance a connection, its share of the capacity is free only
    /// when the instance is gone.
    retained: Vec<OwnedSemaphorePermit>,
    boot: Option<Boot>,
    /// Who waits for it to come to rest.
    rest: Option<Rest>,
    /// Who wants it to be hibernated.
    hibernate: Vec<HibernateReply>,
    /// Who wants it to be awake.
    wake: Vec<WakeReply>,
    /// Whether it is hibernated, or about to be.
    sleep: Sleep,
    /// When to try again what somebody waits for.
    hibernate_again: Option<Instant>,
    /// Not before this is it tried to hibernate it.
    hibernate_not_before: Option<Instant>,
    /// Denied connections that were logged.
    denials_logged: usize,
    served: u64,
    /// When to look whether the instance has been idle for too long.
    idle_look: Option<Instant>,
    /// When to look whether the instance has read what it was sent.
    ring_at: Option<Instant>,
    /// When to have it and its connections kept for the next daemon.
    keep_at: Option<Instant>,
    place: Place,
}

/// The place of one instance.
#[derive(Debug)]
pub(crate) struct Place {
    /// Its share of the node's capacity.
    pub _capacity: OwnedSemaphorePermit,
    /// Its share of what its tenant may have.
    pub lease: Lease,
}

/// Whether an instance is awake, as its supervisor knows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Sleep {
    Awake,
    /// It was asked to give up its memory.
    Begun,
    Hibernated,
}

enum Step {
    Report(Report),
    Command(Option<Command>),
    Alarm,
}

impl Supervisor {
    /// The supervisor of an instance that was booted with `first` in it.
    pub(crate) fn new(
        id: u64,
        service: Arc<Service>,
        launched: Launched,
        commands: mpsc::UnboundedReceiver<Command>,
        connections: Arc<ConnectionTable>,
        first: &Client,
        place: Place,
    ) -> Self {
        let Launched { instance, kind, zygote_ns } = launched;
        let (peer, accepted_ns) = (first.peer, first.accepted_ns);
        let boot = Boot { kind, peer, accepted_ns, zygote_ns, is_reported: false };
        Self {
            boot: Some(boot),
            ..Self::adopted(id, service, instance, commands, connections, place)
        }
    }

    /// The supervisor of an instance that an earlier daemon has booted.
    pub(crate) fn adopted(
        id: u64,
        service: Arc<Service>,
        mut instance: Box<dyn Instance>,
        commands: mpsc::UnboundedReceiver<Command>,
        connections: Arc<ConnectionTable>,
        place: Place,
    ) -> Self {
        instance.identify(id);
        let patience = Patience::of(service.config());
        // With a single connection, its end is the instance's.
        let idle_look = (!service.is_single_use()).then(|| Instant::now() + idle_check(&service));
        Self {
            id,
            service,
            instance,
            commands,
            connections,
            patience,
            late: HashSet::new(),
            retained: Vec::new(),
            boot: None,
            rest: None,
            hibernate: Vec::new(),
            wake: Vec::new(),
            sleep: Sleep::Awake,
            hibernate_again: None,
            hibernate_not_before: None,
            denials_logged: 0,
            served: 0,
            idle_look,
            ring_at: None,
            keep_at: keep_time(),
            place,
        }
    }

    /// Serves the instance until it is gone.
    pub(crate) async fn run(mut self) {
        let alarm = sleep(Duration::ZERO);
        tokio::pin!(alarm);
        loop {
            let due = self.next_alarm();
            if let Some(due) = due
                && due != alarm.deadline()
            {
                alarm.as_mut().reset(due);
            }
            let step = tokio::select! {
                report = poll_fn(|context| self.instance.poll_report(context)) => Step::Report(report),
                command = self.commands.recv() => Step::Command(command),
                () = &mut alarm, if due.is_some() => Step::Alarm,
            };
            match step {
                Step::Report(Report::Booted(times)) => self.booted(&times),
                Step::Report(Report::ConnectionClosed(connection)) => {
                    self.closed(connection);
                    if self.is_spent_and_sound() {
                        return self.rewind();
                    }
                }
                Step::Report(Report::Denied(denials)) => self.denied(&denials),
                Step::Report(Report::Gone(end)) => return self.gone(end),
                Step::Report(Report::AtRest(rest)) => self.at_rest(rest),
                Step::Report(Report::Hibernated(hibernated)) => self.hibernated(&hibernated),
                Step::Report(Report::NotHibernated(why)) => self.not_hibernated(&why),
                Step::Report(Report::Awake(awake)) => self.awake(awake),
                Step::Command(Some(Command::Watch)) => {
                    self.ring_at = Some(Instant::now() + RING_AFTER);
                    self.keep_at = self.keep_at.or_else(keep_time);
                }
                // The alarm is set anew in any case.
                Step::Command(Some(Command::Look)) => {}
                Step::Command(Some(Command::Served)) => self.served(),
                Step::Command(Some(Command::Freeze(reply))) => {
                    self.ask_to_rest(Rest::Freeze(reply))
                }
                Step::Command(Some(Command::Copy(reply))) => {
                    self.ask_to_rest(Rest::Copy(reply, Instant::now()));
                }
                Step::Command(Some(Command::Checkpoint(new, reply))) => {
                    self.ask_to_rest(Rest::Checkpoint(new, reply, Instant::now()));
                }
                Step::Command(Some(Command::Hibernate(reply))) => self.hibernate_for(reply),
                Step::Command(Some(Command::Relieve)) => self.relieve(Instant::now()),
                Step::Command(Some(Command::Wake(reply))) => self.wake_for(reply),
                Step::Command(Some(Command::End) | None) => self.instance.kill(),
                Step::Alarm => self.alarm(Instant::now()),
            }
        }
    }

    /// When there is something to do even if nothing happens.
    fn next_alarm(&self) -> Option<Instant> {
        let looks = [
            self.ring_at,
            self.keep_at,
            self.idle_look,
            self.hibernate_again,
            self.connections.next_look(),
        ];
        looks.into_iter().flatten().min()
    }

    fn alarm(&mut self, now: Instant) {
        let is_due = |at: Option<Instant>| at.is_some_and(|at| at <= now);
        if is_due(self.ring_at) {
            self.ring_at = None;
            self.connections.stop_watching();
            self.instance.ring_if_unread();
        }
        if is_due(self.keep_at) {
            self.keep();
        }
        if is_due(self.connections.next_look()) {
            self.look_at_connections(now);
        }
        if is_due(self.hibernate_again) {
            self.hibernate_if_wanted();
        }
        if is_due(self.idle_look) {
            self.end_if_idle(now);
        }
    }

    /// Has the instance and its connections outlive this daemon.
    fn keep(&mut self) {
        let note = InstanceNote {
            id: self.id,
            function: self.service.name().clone(),
            image: self.service.image().to_owned(),
            booted_ms: self.service.booted_ms(self.id),
            domain: self.service.tenant().name().domain().cloned(),
            memory: self.service.config().limits.memory.bytes(),
        };
        let note = serde_json::to_string(&note).expect("plain data");
        let kept = self.instance.keep(&note);
        let next = kept.and_then(|has_arrived| {
            self.connections.note_kept(has_arrived);
            self.connections.keep_old_ones(KEEP_AFTER)
        });
        self.keep_at = next.unwrap_or_else(|error| {
            let function = self.service.name();
            tracing::debug!(%function, instance = self.id, "cannot be kept for the next daemon: {error}");
            None
        })
        .map(|left| Instant::now() + left);
    }

    /// Ends the instance if it has been idle for long enough, or has it give up its memory.
    /// Instances become idle and busy with every request; nobody tells the supervisor, who
    /// looks when it may be time.
    fn end_if_idle(&mut self, now: Instant) {
        let since = self.service.idle_since(self.id);
        let until = since.map(|since| since + self.service.keep_alive());
        self.idle_look = match until {
            // Only if no connection is on its way does the instance end.
            Some(until) if until <= now.into_std() && self.service.retire_if_idle(self.id) => {
                self.instance.kill();
                None
            }
            Some(until) if until > now.into_std() => {
                let hibernation = since.and_then(|since| self.hibernate_if_idle(since, now));
                [Some(Instant::from_std(until)), hibernation].into_iter().flatten().min()
            }
            _ => Some(now + idle_check(&self.service)),
        };
    }

    /// Has an instance that is idle `since` then give up its memory if it is time. When to look
    /// again.
    fn hibernate_if_idle(&mut self, since: std::time::Instant, now: Instant) -> Option<Instant> {
        let after = self.service.config().limits.hibernate_after?.0;
        if self.sleep != Sleep::Awake || self.rest.is_some() {
            // Only a request changes that, and then the time begins anew.
            return Some(now + after.max(IDLE_CHECK_MIN));
        }
        let due = Instant::from_std(since + after);
        let due = self.hibernate_not_before.map_or(due, |not_before| due.max(not_before));
        if due > now {
            return Some(due);
        }
        match self.begin_hibernation() {
            Ok(()) => Some(now + after.max(IDLE_CHECK_MIN)),
            Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {
                Some(now + HIBERNATE_AGAIN)
            }
            Err(error) => {
                self.not_hibernated(&error.to_string());
                self.hibernate_not_before
            }
        }
    }

    /// Has the instance give up its memory now, unless that has failed a short while ago.
    fn relieve(&mut self, now: Instant) {
        let is_too_early = self.hibernate_not_before.is_some_and(|not_before| not_before > now);
        if self.sleep != Sleep::Awake || is_too_early {
            return;
        }
        match self.begin_hibernation() {
            // Where there are many, some wait for their turn.
            Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {}
            Err(error) => self.not_hibernated(&error.to_string()),
            Ok(()) => {}
        }
    }

    fn begin_hibernation(&mut self) -> std::io::Result<()> {
        let space = self.service.shared().swap_space().ok_or_else(|| {
            std::io::Error::other("this daemon has no directory for swap files; see its log")
        })?;
        let terms = HibernationTerms {
            space,
            max_stored: self.service.config().limits.memory.bytes(),
            timers: match self.service.config().hibernate.timers {
                true => Timers::Wake,
                false => Timers::Wait,
            },
        };
        self.instance.hibernate(terms)?;
        self.sleep = Sleep::Begun;
        Ok(())
    }

    fn hibernate_for(&mut self, reply: HibernateReply) {
        self.hibernate.push(reply);
        self.hibernate_if_wanted();
    }

    /// Has the instance give up its memory if somebody waits for that.
    fn hibernate_if_wanted(&mut self) {
        self.hibernate_again = None;
        if self.hibernate.is_empty() || self.sleep == Sleep::Begun {
            return;
        }
        let begun = match self.sleep {
            Sleep::Hibernated => Err("it is hibernated already".to_owned()),
            _ => match self.begin_hibernation() {
                Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {
                    self.hibernate_again = Some(Instant::now() + HIBERNATE_AGAIN);
                    return;
                }
                begun => begun.map_err(|error| error.to_string()),
            },
        };
        if let Err(why) = begun {
            self.answer_hibernation(&Err(why));
        }
    }

    /// Tells those who wait for a hibernation how it went; they may have lost patience.
    fn answer_hibernation(&mut self, outcome: &Result<HibernatedInstance, String>) {
        for reply in self.hibernate.drain(..) {
            drop(reply.send(outcome.clone()));
        }
    }

    fn wake_for(&mut self, reply: WakeReply) {
        match (self.sleep, self.instance.wake()) {
            (Sleep::Hibernated, Ok(())) => self.wake.push(reply),
            (_, woken) => drop(reply.send(woken.map(|()| None).map_err(|error| error.to_string()))),
        }
    }

    fn hibernated(&mut self, hibernated: &HibernatedInstance) {
        self.sleep = Sleep::Hibernated;
        self.service.hibernated(self.id);
        self.answer_hibernation(&Ok(hibernated.clone()));
    }

    /// It keeps its memory; it is tried again later.
    fn not_hibernated(&mut self, why: &str) {
        tracing::warn!(function = %self.service.name(), instance = self.id, "cannot hibernate an instance, which keeps its memory: {why}");
        self.sleep = Sleep::Awake;
        self.hibernate_not_before = Some(Instant::now() + HIBERNATE_AFTER_FAILURE);
        self.answer_hibernation(&Err(why.to_owned()));
    }

    fn awake(&mut self, awake: Awake) {
        let was = std::mem::replace(&mut self.sleep, Sleep::Awake);
        if was == Sleep::Awake && !awake.was_hibernated {
            // It was not asked to rest: a sandbox may say what it likes.
            return;
        }
        if awake.was_hibernated {
            self.service.woken(self.id);
            self.idle_look = Some(Instant::now() + idle_check(&self.service));
        } else if awake.cause == AwakeCause::SeveralProcesses {
            return self.not_hibernated("it has, or has had, several processes");
        }
        self.answer_hibernation(&Err(format!(
            "{} before its memory was written; try again",
            cause_of(awake.cause)
        )));
        for reply in self.wake.drain(..) {
            drop(reply.send(Ok(Some(awake))));
        }
    }

    /// Enforces the function's times.
    fn look_at_connections(&mut self, now: Instant) {
        for due in self.connections.due(now) {
            let client = match due {
                Due::Look(client) => client,
                Due::Overdue(connection, why) => {
                    self.overdue(connection, why);
                    continue;
                }
            };
            let Some(patience) = self.patience else { continue };
            if self.late.contains(&client.id) {
                // The instance takes its time to be gone.
                if let Some(held) = self.connections.take(client.id) {
                    drop(held.end(Outcome::Late));
                }
                continue;
            }
            let again = match patience.judge(traffic(&client.socket).unwrap_or_default()) {
                Verdict::Fine(again) => again,
                Verdict::Idle => {
                    // The guest sees the end of the stream and closes; a guest that
                    // does not is asked again.
                    let _ = shutdown(&client.socket, Shutdown::Read);
                    patience.first_look
                }
                Verdict::Late => {
                    self.late(client.id, patience.first_look);
                    KILL_PATIENCE
                }
            };
            self.connections.look_again(client.id, now + again);
        }
    }

    /// The guest keeps a connection that the gateway has let go of.
    fn overdue(&mut self, connection: u64, why: LetGo) {
        match why {
            // It was the instance's only one, and has done its work.
            LetGo::Answered => self.closed(connection),
            LetGo::Abandoned => self.late(connection, self.service.config().limits.timeout.0),
        }
    }

    /// A request has waited for too long: ends the instance. Only when it is gone can it
    /// answer no more.
    fn late(&mut self, connection: u64, limit: Duration) {
        tracing::warn!(function = %self.service.name(), instance = self.id, "no answer within {} s, ending the instance", limit.as_secs_f64());
        self.late.insert(connection);
        self.service.retire(self.id);
        self.instance.kill();
    }

    /// Every denial is counted; a program that tries again and again does not fill
    /// the log, nor does one whose names cannot be looked up.
    fn denied(&mut self, denials: &Denials) {
        let function = self.service.name();
        self.service.egress_denied(denials.total);
        let left = DENIALS_LOGGED.saturating_sub(self.denials_logged);
        for denied in denials.recent.iter().take(left) {
            tracing::warn!(%function, instance = self.id, "denied an outgoing connection to {denied}; see [egress] in its thaw.toml");
            self.denials_logged += 1;
        }
        let left = DENIALS_LOGGED.saturating_sub(self.denials_logged);
        for failure in denials.failures.iter().take(left) {
            tracing::warn!(%function, instance = self.id, "could not look up {failure}");
            self.denials_logged += 1;
        }
    }

    /// Asks the instance to come to rest, for one who wants it at a time.
    fn ask_to_rest(&mut self, rest: Rest) {
        let asked = match &self.rest {
            Some(earlier) if earlier.is_wanted() || !rest.is_checkpoint() => {
                return rest.refuse("it is being copied already; try again".to_owned());
            }
            // It was asked, and its rest is for somebody else now.
            Some(_) => Ok(()),
            None if rest.is_checkpoint() => self.instance.request_checkpoint(),
            None => self.instance.request_rest(),
        };
        match asked {
            Ok(()) => self.rest = Some(rest),
            // The report of its end is on the way.
            Err(error) => rest.refuse(format!("instance {} has ended ({error})", self.id)),
        }
    }

    /// The instance rests, as somebody has asked, who may have lost patience.
    fn at_rest(&mut self, rest: EntryPoint) {
        let wanted = self.rest.take();
        // Others of the runtime's tasks go on elsewhere meanwhile.
        match wanted {
            Some(lost) if lost.is_checkpoint() && !lost.is_wanted() => self.go_on(),
            Some(Rest::Copy(reply, since)) => {
                let copied = tokio::task::block_in_place(|| self.instance.copy(rest));
                self.go_on();
                let pause = since.elapsed();
                tokio::task::spawn_blocking(move || {
                    let done = copied.and_then(|finish| finish());
                    let _ = reply.send(done.map(|launcher| Copied { launcher, pause }));
                });
            }
            Some(Rest::Checkpoint(new, reply, since)) => {
                let written = tokio::task::block_in_place(|| self.instance.checkpoint(rest, new));
                self.go_on();
                let pause = since.elapsed();
                tokio::task::spawn_blocking(move || {
                    let done = written.and_then(|finish| finish());
                    let _ = reply.send(done.map(|checkpoint| (checkpoint, pause)));
                });
            }
            Some(Rest::Freeze(reply)) => {
                let _ = reply.send(tokio::task::block_in_place(|| self.instance.freeze(rest)));
                self.instance.kill();
            }
            None => self.instance.kill(),
        }
    }

    /// Ends the rest of the instance.
    fn go_on(&mut self) {
        // If it has ended, the report of that is on the way.
        let _ = self.instance.resume();
        self.keep_at = keep_time();
    }

    /// The first report may come before the first response byte, if the guest
    /// waits for something or another of its processes answers; a later one
    /// completes it.
    fn booted(&mut self, times: &BootTimes) {
        let Some(boot) = &mut self.boot else { return self.service.came_up(self.id) };
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

    fn closed(&mut self, connection: u64) {
        // A number that the sandbox made up changes nothing.
        let Some(held) = self.connections.take(connection) else { return };
        // The client sees the end of its connection when the node lets go of its
        // descriptor, so that comes first.
        let permit = held.end(Outcome::Closed);
        self.served();
        if self.service.is_single_use() {
            self.retained.extend(permit);
            self.service.retire(self.id);
            if !self.is_spent_and_sound() {
                self.instance.kill();
            }
        } else if let Some(permit) = permit {
            self.service.disconnected(self.id);
            drop(permit);
        } else {
            // It was kept for requests to come.
            self.service.forget_upstream(self.id, connection);
        }
    }

    /// Whether the instance has served the one request that it was for, and can be put back
    /// into the state before it.
    fn is_spent_and_sound(&self) -> bool {
        self.service.is_single_use()
            && self.served > 0
            && self.late.is_empty()
            && self.rest.is_none()
            && self.connections.count() == 0
            && self.instance.can_rewind()
    }

    /// Makes the instance another one, as new.
    fn rewind(self) {
        self.instance.rewind(self.place.lease);
        drop(self.connections.close());
        self.service.remove(self.id, &End::Rewound);
    }

    fn served(&mut self) {
        self.served += 1;
        if self.served == 1 {
            self.instance.first_request_done();
        }
    }

    /// Tells a kill before the sandbox has reported its boot from a later one.
    fn how_it_ended(&self, end: End) -> End {
        let is_booting = self.boot.as_ref().is_some_and(|boot| !boot.is_reported);
        match end {
            End::Killed(None | Some(libc::SIGKILL)) if self.is_spent() => End::TenantSpent,
            End::Killed(signal @ (None | Some(libc::SIGKILL))) if is_booting => {
                End::KilledInBoot(signal)
            }
            end => end,
        }
    }

    /// Whether the tenant's instances are being ended for the CPU time that they use.
    fn is_spent(&self) -> bool {
        self.service.tenant().cpu().spent_for().is_some()
    }

    fn gone(self, end: End) {
        let end = self.how_it_ended(end);
        self.service.remove(self.id, &end);
        for (connection, held) in self.connections.close() {
            let outcome = match self.late.contains(&connection) {
                true => Outcome::Late,
                false => Outcome::Gone(end.clone()),
            };
            drop(held.end(outcome));
        }
    }
}

/// When to have something kept that is new now.
fn keep_time() -> Option<Instant> {
    has_monitor().then(|| Instant::now() + KEEP_AFTER)
}

/// How long an instance that is busy now is not asked whether it is idle.
fn idle_check(service: &Service) -> Duration {
    let hibernate_after = service.config().limits.hibernate_after;
    let after = hibernate_after.map_or(service.keep_alive(), |after| after.0);
    after.min(service.keep_alive()).max(IDLE_CHECK_MIN)
}

/// What has kept an instance from giving up its memory.
fn cause_of(cause: AwakeCause) -> &'static str {
    match cause {
        AwakeCause::Connection => "bytes came on one of its connections",
        AwakeCause::Timer => "a timer of the program was due",
        AwakeCause::Message | AwakeCause::SeveralProcesses => "it was asked something else",
    }
}
