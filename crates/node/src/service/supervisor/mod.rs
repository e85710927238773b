//! The task that owns a live instance: takes its reports, keeps the times of its
//! connections, and ends it when its time has come. Connections do not pass through
//! here: whoever accepts one hands it over by [`ConnectionTable`].

mod asleep;
mod ending;
mod lacks;
mod liveness;
mod rest;
mod sleep;
mod trim;

use super::Service;
use crate::instance::{
    Client, Command, ConnectionTable, Due, End, HibernateReply, Instance, InstanceNote,
    InstanceUse, Launched, LetGo, Outcome, Overrun, Patience, PauseReply, Place, Report, Rest,
    SwapStorage, Verdict, WakeReply,
};
use asleep::Sleepiness;
use ending::{EndLater, Stopping};
use lacks::Lacks;
use liveness::{Health, Probed};
use sleep::Sleep;
use trim::Trims;

use crate::boots::{BootKind, BootRecord, Phases};
use crate::remote::limits::Unchanged;
use crate::socket::traffic;
use crate::tenants::Lease;
use rustix::net::{Shutdown, shutdown};
use std::collections::HashSet;
use std::collections::VecDeque;
use std::future::poll_fn;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;
use thaw_home::config::EntryKind;
use thaw_sandbox::monitor::has_monitor;
use thaw_sandbox::{BootTimes, EgressEvents, KilledProcess, ResourceLimits, Twin};
use tokio::sync::{OwnedSemaphorePermit, mpsc};
use tokio::time::{Instant, sleep as wait};

/// Most denied outgoing connections of one instance that are logged.
const DENIALS_LOGGED: usize = 16;
/// Most processes of one instance that were ended for want of memory and are logged.
const OOM_KILLS_LOGGED: usize = 16;
/// How long a guest that computes goes on before it hears of a connection.
const RING_AFTER: Duration = Duration::from_millis(1);
/// How often a supervisor looks at most whether its instance is idle.
const IDLE_CHECK_MIN: Duration = Duration::from_millis(10);
/// How long a killed instance may take to be gone before its clients are answered.
const KILL_PATIENCE: Duration = Duration::from_millis(500);

/// How long an instance lives, or a connection that was handed over, before it is kept for the daemon that comes
/// after this one: most end before that, and cost nothing.
const KEEP_AFTER: Duration = Duration::from_millis(150);

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
    /// Whether its program is well, if that is asked.
    health: Health,
    /// Connections for which the instance was ended.
    late: HashSet<u64>,
    /// With one instance a connection, its share of the capacity is free only
    /// when the instance is gone.
    retained: Vec<OwnedSemaphorePermit>,
    boot: Option<Boot>,
    /// Who waits for it to come to rest.
    rest: Option<Rest>,
    /// It was allowed to go on, and to have its twin read, when it was asked to rest.
    may_have_twin: bool,
    /// Its twin is being read, which may take this room.
    twin: Option<Option<Lease>>,
    /// Copies run that wait for that: the sandbox, and the twin with it, must not end before.
    copies_wait: Arc<AtomicBool>,
    /// It is to be ended after that.
    ends_later: Option<EndLater>,
    /// Who wants it to come to rest after that, and whether with a twin.
    next_rests: VecDeque<(Rest, Twin)>,
    /// Who wants it to be hibernated.
    hibernate: Vec<HibernateReply>,
    /// Who wants it to be paused.
    pauses: Vec<PauseReply>,
    /// Who wants it to be awake.
    wake: Vec<WakeReply>,
    /// Whether it is hibernated, or about to be.
    sleep: Sleep,
    /// It was sent something since it was asked to rest.
    is_disturbed: bool,
    /// CPU time that it had used when it said that it rests; none: nobody counts.
    used_at_rest: Option<Duration>,
    /// How often the memory could not be written since it was paused.
    times_kept: u32,
    /// When to try again what somebody waits for.
    hibernate_again: Option<Instant>,
    /// Until when it may come to rest that was asked to.
    rests_until: Option<Instant>,
    /// Not before this is it tried to hibernate it.
    hibernate_not_before: Option<Instant>,
    /// Whether it is on its way to sleep, or from there.
    sleepiness: Sleepiness,
    /// How it gives back what it does not need while it is idle.
    trims: Trims,
    /// Denied connections that were logged.
    denials_logged: usize,
    oom_kills_logged: usize,
    /// What it was heard to lack.
    lacks: Lacks,
    served: u64,
    /// When to look whether the instance has been idle for too long.
    idle_look: Option<Instant>,
    /// When to look whether the instance has read what it was sent.
    ring_at: Option<Instant>,
    /// When to have it and its connections kept for the next daemon.
    keep_at: Option<Instant>,
    /// It was asked to end by itself.
    stopping: Option<Stopping>,
    place: Place,
}

enum Step {
    Report(Report),
    Command(Option<Command>),
    Probed(Probed),
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
        let Launched { instance, kind, zygote_ns, .. } = launched;
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
        let health = Health::of(&service);
        // With a single connection, its end is the instance's.
        let idle_look = (!service.is_single_use()).then(|| Instant::now() + idle_check(&service));
        let keep_at = keep_time(&service);
        Self {
            id,
            service,
            instance,
            commands,
            connections,
            patience,
            health,
            late: HashSet::new(),
            retained: Vec::new(),
            boot: None,
            rest: None,
            may_have_twin: false,
            twin: None,
            copies_wait: Arc::default(),
            ends_later: None,
            next_rests: VecDeque::new(),
            hibernate: Vec::new(),
            pauses: Vec::new(),
            wake: Vec::new(),
            sleep: Sleep::Awake,
            is_disturbed: false,
            used_at_rest: None,
            times_kept: 0,
            hibernate_again: None,
            rests_until: None,
            hibernate_not_before: None,
            sleepiness: Sleepiness::default(),
            trims: Trims::default(),
            denials_logged: 0,
            oom_kills_logged: 0,
            lacks: Lacks::default(),
            served: 0,
            idle_look,
            ring_at: None,
            keep_at,
            stopping: None,
            place,
        }
    }

    /// Serves the instance until it is gone.
    pub(crate) async fn run(mut self) {
        let alarm = wait(Duration::ZERO);
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
                probed = poll_fn(|context| self.health.poll(context)) => Step::Probed(probed),
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
                Step::Report(Report::Remote(event)) => self.connections.execs().heard(event),
                Step::Report(Report::Egress(events)) => self.egress(&events),
                Step::Report(Report::Lacks(lack)) => self.lacks(&lack),
                Step::Report(Report::OomKilled(killed)) => self.oom_killed(&killed),
                Step::Report(Report::Gone(end)) => return self.gone(end),
                Step::Report(Report::AtRest(rest)) if self.sleepiness.is_asked() => {
                    if self.at_rest_to_sleep(rest) {
                        return self.lie_down().await;
                    }
                }
                Step::Report(Report::AtRest(_)) if self.sleepiness.is_late => {
                    self.sleepiness.is_late = false;
                    self.go_on();
                }
                Step::Report(Report::AtRest(rest)) => self.at_rest(rest),
                Step::Report(Report::Resting) => self.resting(),
                Step::Report(Report::Hibernated(hibernated)) => self.hibernated(&hibernated),
                Step::Report(Report::NotHibernated { why, is_torn }) => {
                    self.not_written(&why, is_torn);
                }
                Step::Report(Report::Trimmed(trimmed)) => self.trimmed(trimmed),
                Step::Report(Report::Awake(awake)) => self.awake(awake),
                Step::Command(Some(Command::Watch)) => {
                    self.is_disturbed = true;
                    self.ring_at = Some(Instant::now() + RING_AFTER);
                    self.keep_at = self.keep_at.or_else(|| keep_in(KEEP_AFTER));
                }
                // The alarm is set anew in any case.
                Step::Command(Some(Command::Look)) => {}
                Step::Command(Some(Command::Served)) => self.served(),
                Step::Command(Some(Command::Freeze(reply))) => {
                    self.ask_to_rest(Rest::Freeze(reply), Twin::Refused);
                }
                Step::Command(Some(Command::Copy(reply))) => {
                    // The copies have room, which they hardly need before its twin is gone.
                    self.ask_to_rest(Rest::Copy(reply, Instant::now()), Twin::Allowed);
                }
                Step::Command(Some(Command::Checkpoint(new, reply, room))) => {
                    // With a twin it would go on before its volumes are copied.
                    let goes_on = room.is_some() && new.volumes.is_none();
                    let twin = if goes_on { Twin::Allowed } else { Twin::Refused };
                    self.ask_to_rest(Rest::Checkpoint(new, reply, Instant::now(), room), twin);
                }
                Step::Command(Some(Command::Hold(hold))) => {
                    self.ask_to_rest(Rest::Hold(hold), Twin::Refused);
                }
                Step::Command(Some(Command::LetGo)) => self.let_go(),
                Step::Command(Some(Command::TwinRead(again))) => self.twin_read(again),
                Step::Command(Some(Command::Hibernate(reply))) => self.hibernate_for(reply),
                Step::Command(Some(Command::Pause(reply))) => self.pause_for(reply),
                Step::Command(Some(Command::Relieve)) => self.relieve(Instant::now()),
                Step::Command(Some(Command::Wake(reply))) => self.wake_for(reply),
                Step::Command(Some(Command::Withdraw)) => self.withdraw(),
                Step::Command(Some(Command::Sleep(Some(reply)))) => self.sleep_for(reply),
                Step::Command(Some(Command::SleepOrEnd)) => self.make_room(Instant::now()),
                Step::Command(Some(Command::Sleep(None))) => self.sleep_now(Instant::now()),
                Step::Command(Some(Command::Retire)) => self.retire(),
                Step::Command(Some(Command::Memory(reply))) => {
                    // Who has asked may have gone.
                    let _ = self.instance.memory_reader().map(|reader| reply.send(reader));
                }
                Step::Command(Some(Command::Use(reply))) => {
                    let (cpu_time, memory) =
                        (self.instance.cpu_time(), self.instance.memory_held());
                    // Who has asked may have gone.
                    let _ = reply.send(InstanceUse { cpu_time, memory });
                }
                Step::Command(Some(Command::Limits(wanted, reply))) => {
                    // Who has asked may have gone.
                    let _ = reply.send(self.change_limits(wanted));
                }
                Step::Command(Some(Command::Leave)) => self.outlive_daemon(),
                Step::Command(Some(Command::Stop)) => self.stop(Instant::now()),
                Step::Command(Some(Command::StopForOthers)) => self.stop_for_others(Instant::now()),
                Step::Command(Some(Command::End)) => self.kill(),
                Step::Command(Some(Command::EndUnreachable)) => self.end_unreachable(),
                Step::Command(None) => self.instance.kill(),
                Step::Command(Some(Command::EndLate(why))) => self.end_late(&why),
                Step::Probed(probed) => self.probed(probed),
                Step::Alarm => self.alarm(Instant::now()),
            }
        }
    }

    /// Changes what the instance may use, and what it takes of what its tenant may have.
    fn change_limits(&mut self, wanted: ResourceLimits) -> Result<(), Unchanged> {
        if self.rest.is_some() || self.twin.is_some() || self.sleepiness.is_asked() {
            return Err(Unchanged::Busy);
        }
        let before = self.place.lease.memory();
        if wanted.memory > before {
            let tenant = self.service.tenant();
            let taken = self.place.lease.resize(wanted.memory);
            taken.map_err(|most| Unchanged::Refused(tenant.explain_more(most, wanted.memory)))?;
        }
        let changed = self.instance.set_limits(wanted);
        let now = if changed.is_ok() { wanted.memory } else { before };
        // To take less needs no room.
        let _ = self.place.lease.resize(now);
        changed
    }

    /// When there is something to do even if nothing happens.
    fn next_alarm(&self) -> Option<Instant> {
        let looks = [
            self.ring_at,
            self.keep_at,
            self.stopping.as_ref().map(Stopping::kill_at),
            self.idle_look,
            self.hibernate_again,
            self.rests_until,
            self.trims.until,
            self.sleepiness.again,
            self.sleepiness.asked,
            self.sleepiness.until_kept.as_ref().map(|kept| kept.look),
            self.connections.next_look(),
            self.health.next_look(),
        ];
        looks.into_iter().flatten().min()
    }

    fn alarm(&mut self, now: Instant) {
        let is_due = |at: Option<Instant>| at.is_some_and(|at| at <= now);
        if is_due(self.ring_at) {
            self.ring_at = None;
            self.connections.stop_watching();
            // More may have been sent meanwhile, of which nobody tells.
            self.is_disturbed = true;
            self.instance.ring_if_unread();
        }
        if is_due(self.keep_at) {
            self.keep(KEEP_AFTER);
        }
        if is_due(self.stopping.as_ref().map(Stopping::kill_at)) {
            self.out_of_grace();
        }
        if is_due(self.connections.next_look()) {
            self.look_at_connections(now);
        }
        if is_due(self.hibernate_again) {
            self.hibernate_if_wanted();
        }
        if is_due(self.rests_until) {
            self.does_not_come_to_rest(now);
        }
        if is_due(self.trims.until) {
            self.trims_too_long();
        }
        if is_due(self.sleepiness.asked) {
            self.does_not_rest();
        }
        self.remove_files_if_kept(now);
        if is_due(self.sleepiness.again) {
            self.sleep_if_wanted();
        }
        if is_due(self.idle_look) {
            self.end_if_idle(now);
        }
        if is_due(self.health.next_look()) {
            self.probe(now);
        }
    }

    /// This daemon is about to end: has everything kept that is not yet. An instance that somebody
    /// looks at is asked again.
    fn outlive_daemon(&mut self) {
        self.end_trim();
        let is_looked_at = self.rest.is_some() || self.twin.is_some();
        // Only this daemon could decrypt or verify what is just being given up.
        if self.storage() == SwapStorage::Plain {
            // The next daemon pauses those again that are paused.
            self.go_on_with_memory("the daemon is being restarted; try again");
        }
        let is_about_to_sleep = self.sleepiness.is_asked() || self.sleep.is_under_way();
        if is_looked_at || is_about_to_sleep || !self.wake_from_own_key() {
            return;
        }
        match self.can_be_taken_over() && self.keep(Duration::ZERO) {
            true => self.connections.note_asked_to_leave(),
            false => self.connections.note_cannot_leave(),
        }
    }

    /// Whether the next daemon would take the instance over. The kernel of an earlier build may not know how
    /// to take back what it has open in volumes; one that is to rest, and does not, would do so unasked in
    /// the next one; and one of other files than its function's is nobody's.
    fn can_be_taken_over(&self) -> bool {
        let (origin, launcher) = (self.instance.origin(), self.service.launcher());
        let has_other_files = origin.index.is_some() && origin.index != launcher.index();
        let are_volumes_left = !self.has_volumes() || self.instance.renews_volumes();
        are_volumes_left && !has_other_files && !self.sleepiness.is_late
    }

    fn has_volumes(&self) -> bool {
        !self.service.config().volumes.is_empty() || self.instance.has_volumes()
    }

    /// Has the instance, and its connections of this age, outlive this daemon. Whether it can.
    fn keep(&mut self, age: Duration) -> bool {
        let note = InstanceNote {
            id: self.id,
            function: self.service.name().clone(),
            image: self.service.image().to_owned(),
            booted_ms: self.service.booted_ms(self.id),
            domain: self.service.tenant().name().domain().cloned(),
            memory: self.place.lease.memory(),
            origin: self.instance.origin(),
            has_volumes: self.has_volumes(),
            renews_volumes: self.instance.renews_volumes(),
        };
        let note = serde_json::to_string(&note).expect("plain data");
        let kept = self.instance.keep(&note);
        let next = kept.and_then(|has_arrived| {
            let is_kept = has_arrived.is_some();
            self.connections.note_kept(has_arrived);
            Ok((is_kept, self.connections.keep_old_ones(age)?))
        });
        let (is_kept, left) = next.unwrap_or_else(|error| {
            let function = self.service.name();
            tracing::debug!(%function, instance = self.id, "cannot be kept for the next daemon: {error}");
            (false, None)
        });
        self.keep_at = left.map(|left| Instant::now() + left);
        is_kept
    }

    /// Ends the instance if it has been idle for long enough, or has it give up its memory.
    /// Instances become idle and busy with every request; nobody tells the supervisor, who
    /// looks when it may be time.
    fn end_if_idle(&mut self, now: Instant) {
        let since = self.service.idle_since(self.id);
        let until = since.map(|since| since + self.service.keep_alive());
        let sleep = self.sleep_if_silent(now);
        self.idle_look = match until {
            // Only if no connection is on its way does the instance end.
            Some(until) if until <= now.into_std() && self.service.retire_if_idle(self.id) => {
                self.stop(now);
                None
            }
            Some(until) if until > now.into_std() => {
                let hibernation = since.and_then(|since| self.hibernate_if_idle(since, now));
                let trim = since.and_then(|since| self.trim_if_idle(since, now));
                [Some(Instant::from_std(until)), hibernation, trim, sleep]
                    .into_iter()
                    .flatten()
                    .min()
            }
            _ => [Some(now + idle_check(&self.service)), sleep].into_iter().flatten().min(),
        };
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

    /// Its version is served no longer: from now on connections that were handed over end when
    /// they are idle.
    fn retire(&mut self) {
        if let Some(patience) = &mut self.patience
            && patience.retire()
        {
            self.connections.look_at_all(Instant::now());
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
        self.late.insert(connection);
        self.service.retire(self.id);
        let limit = limit.as_secs_f64();
        self.end_late(&format!("no answer within {limit} s, ending the instance"));
    }

    fn end_late(&mut self, why: &str) {
        tracing::warn!(function = %self.service.name(), instance = self.id, "{why}");
        self.instance.remark(why);
        self.kill();
    }

    /// Every connection and denial is counted; a program that tries again and again does not fill
    /// the log, nor does one whose names cannot be looked up.
    fn egress(&mut self, events: &EgressEvents) {
        let function = self.service.name();
        self.service.count_egress(events.made, events.denied);
        let left = DENIALS_LOGGED.saturating_sub(self.denials_logged);
        for denied in events.recent.iter().take(left) {
            let text =
                format!("denied an outgoing connection to {denied}; see [egress] in its thaw.toml");
            tracing::warn!(%function, instance = self.id, "{text}");
            self.instance.remark(&text);
            self.denials_logged += 1;
        }
        let left = DENIALS_LOGGED.saturating_sub(self.denials_logged);
        for failure in events.failures.iter().take(left) {
            let text = format!("could not look up {failure}");
            tracing::warn!(%function, instance = self.id, "{text}");
            self.instance.remark(&text);
            self.denials_logged += 1;
        }
    }

    /// One of its processes was ended, since its memory was used up.
    fn oom_killed(&mut self, killed: &KilledProcess) {
        self.service.count_oom_kill();
        if self.oom_kills_logged < OOM_KILLS_LOGGED {
            self.oom_kills_logged += 1;
            let text = format!("{killed}; raise `limits.memory` in thaw.toml");
            tracing::warn!(function = %self.service.name(), instance = self.id, "{text}");
            self.instance.remark(&text);
        }
    }

    /// The first report may come before the first response byte, if the guest
    /// waits for something or another of its processes answers; a later one
    /// completes it.
    fn booted(&mut self, times: &BootTimes) {
        self.runs_again();
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
                self.kill();
            }
        } else if let Some(permit) = permit {
            // Of several requests that were under way on it, none is any more.
            (0..permit.num_permits()).for_each(|_| self.service.disconnected(self.id));
            drop(permit);
        }
        // It may have been kept for requests to come.
        self.service.forget_upstream(self.id, connection);
    }

    /// Whether the instance has served the one request that it was for, and can be put back
    /// into the state before it.
    fn is_spent_and_sound(&self) -> bool {
        self.service.is_single_use()
            && self.served > 0
            && self.late.is_empty()
            && self.rest.is_none()
            && self.connections.count() == 0
            && !self.connections.execs().in_use()
            && self.instance.can_rewind()
    }

    /// Makes the instance another one, as new.
    fn rewind(self) {
        self.connections.execs().close();
        let ending = self.place.lease.ending();
        self.instance.rewind(self.place.lease);
        drop(self.connections.close());
        self.service.remove(self.id, &End::Rewound, None, self.connections.execs());
        // Its room is the next one's.
        ending.announce(false);
    }

    fn served(&mut self) {
        self.served += 1;
        if self.served == 1 {
            self.instance.first_request_done();
        }
    }

    /// Tells a kill before the sandbox has reported its boot from a later one, and names the
    /// setting of a limit.
    fn how_it_ended(&self, end: End) -> End {
        let is_booting = self.boot.as_ref().is_some_and(|boot| !boot.is_reported);
        match end {
            End::Killed(None | Some(libc::SIGKILL)) if self.is_spent() => End::TenantSpent,
            End::Killed(signal @ (None | Some(libc::SIGKILL))) if is_booting => {
                End::KilledInBoot(signal)
            }
            End::LimitReached(overrun) => {
                let setting = self.service.setting_of(self.id, overrun.limit);
                End::LimitReached(Overrun { setting, ..overrun })
            }
            end => end,
        }
    }

    /// Whether the tenant's instances are being ended for the CPU time that they use.
    fn is_spent(&self) -> bool {
        self.service.tenant().cpu().spent_for().is_some()
    }

    fn gone(mut self, end: End) {
        let end = self.how_it_ended(end);
        let woken_from = self.sleepiness.woken_from.take();
        // Whoever sees that it is gone finds no files of it.
        self.sleepiness.until_kept = None;
        if let Some(unexpected) =
            self.service.remove(self.id, &end, woken_from, self.connections.execs())
        {
            self.instance.log_end(unexpected);
        }
        for (connection, held) in self.connections.close() {
            let outcome = match self.late.contains(&connection) {
                true => Outcome::Late,
                false => Outcome::Gone(end.clone()),
            };
            drop(held.end(outcome));
        }
    }
}

/// When to have an instance kept that is new now: a sandbox at once, since it stays.
fn keep_time(service: &Service) -> Option<Instant> {
    match service.config().entry.kind {
        EntryKind::Sandbox => keep_in(Duration::ZERO),
        _ => keep_in(KEEP_AFTER),
    }
}

/// When something is kept after so long, if there is a monitor for it.
fn keep_in(after: Duration) -> Option<Instant> {
    has_monitor().then(|| Instant::now() + after)
}

/// How long an instance that is busy now is not asked whether it is idle.
fn idle_check(service: &Service) -> Duration {
    let limits = &service.config().limits;
    let afters = [limits.hibernate_after, limits.sleep_after].into_iter().flatten();
    let after = afters.fold(limits.trim_after, Ord::min).0;
    after.min(service.keep_alive()).max(IDLE_CHECK_MIN)
}
