//! One live sandbox, as its supervisor sees it.

use super::copies::LastCheckpoint;
use super::end::{End, Overrun};
use super::hibernation::{Hibernation, HibernationTerms, Outcome};
use super::launch::{Client, Launcher};
use super::live::{
    Checkpoint, Checkpointed, Connector, Finish, FrozenInstance, HibernatedInstance, Instance,
    Origin, Reading, ReadingStep, Report,
};
use super::recording::Shows;
use super::sandboxed::ImageBoots;
use super::standby::{Lent, Spent, Standby};
use crate::asleep::{AsleepImage, NewAsleep};
use crate::logs::{InstanceLog, InstancePipes};
use crate::reactor::watch_sandbox;
use crate::remote::limits::Unchanged;
use crate::remote::{MemoryHeld, RemoteChannel};
use crate::tenants::Lease;
use std::future::Future;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::process::ExitStatusExt;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::task::{Context, Poll, ready};
use std::time::Duration;
use thaw_abi::control::EntryPoint;
use thaw_home::config::{ByteSize, StopSignal};
use thaw_home::seal::owner::KeyId;
use thaw_sandbox::{
    BootPlan, EgressPolicy, Event, Freezer, KeptForSuccessor, LimitReached, Lowered, MemoryReader,
    NotChanged, Progress, RaisedMemory, RemoteMessage, ResourceLimits, Sandbox, Twin, Volume,
    connection, kernel_build_id,
};
use thaw_store::ImageId;
use tokio::io::unix::AsyncFd;
use tokio::task::JoinHandle;
use tokio::time::{Sleep, sleep};

/// How long an instance that is to end lives on for its working set to be recorded,
/// even if no thread has had time for that yet.
const RECORDING_PATIENCE: Duration = Duration::from_millis(1500);

pub(super) struct SandboxInstance {
    sandbox: AsyncFd<Sandbox>,
    pid: u32,
    /// What it was booted from.
    plan: Arc<BootPlan>,
    boots: Arc<ImageBoots>,
    /// This process's ends of the pipes for its output, until it has booted.
    pipes: Option<InstancePipes>,
    log: InstanceLog,
    /// What it said about its end, if anything.
    end: Option<End>,
    /// It was asked to come to rest.
    asked_to_rest: bool,
    /// Whether it may have a twin when it rests.
    twin: Twin,
    /// It is at rest, and waits to be told to go on.
    is_at_rest: bool,
    /// Its memory limit is raised for its twin.
    raised: Option<RaisedMemory>,
    /// The limit is to be as before soon: its twin ends.
    lowering: Option<Looks>,
    /// This node has ended it, or does so after the recording.
    killed: bool,
    gone: bool,
    /// What its first request shows of the working set.
    shows: Shows,
    /// Its working set is being recorded.
    recording: Option<JoinHandle<()>>,
    /// When it is ended although its working set is still being recorded.
    last_moment: Option<Pin<Box<Sleep>>>,
    /// It has hung up, and how it ended is not known yet.
    parting: Option<Looks>,
    /// It outlives this daemon.
    kept: Option<KeptForSuccessor>,
    /// It will be ready again.
    lent: Option<Lent>,
    /// What the next checkpoint of it may differ from.
    last_checkpoint: LastCheckpoint,
    hibernation: Hibernation,
    /// What it may use.
    limits: ResourceLimits,
    /// They have changed, and the sandbox has not heard of it: that would wake it.
    has_untold_limits: bool,
}

/// Looks whether something has happened of which nobody tells.
struct Looks {
    next_look: Pin<Box<Sleep>>,
    looks_left: u32,
}

impl Looks {
    fn new((count, between): (u32, Duration)) -> Self {
        Self { next_look: Box::pin(sleep(between)), looks_left: count }
    }

    /// Ready when it is time for the next look.
    fn poll(&mut self, context: &mut Context<'_>, (_, between): (u32, Duration)) -> Poll<()> {
        ready!(self.next_look.as_mut().poll(context));
        self.looks_left = self.looks_left.saturating_sub(1);
        self.next_look = Box::pin(sleep(between));
        Poll::Ready(())
    }
}

/// How often it is looked how a process has ended, of which the zygote parent tells a moment
/// later, and how long between two looks.
const PARTING_LOOKS: (u32, Duration) = (20, Duration::from_millis(1));
/// How often it is looked whether a sandbox has given back what its twin had, and how long
/// between two looks.
const LOWERING_LOOKS: (u32, Duration) = (1000, Duration::from_millis(10));

/// Hands connections to a sandbox.
struct SandboxConnector {
    connector: thaw_sandbox::Connector,
    port: u16,
    kernel_build: [u8; 32],
}

impl Connector for SandboxConnector {
    fn connect(&self, client: &Client) -> io::Result<()> {
        let local = (client.local.ip(), self.port).into();
        let connection = connection(client.id, client.peer, local);
        self.connector.send_connection(&connection, client.socket.as_fd())
    }

    fn name_host(&self, name: &str) -> io::Result<()> {
        match self.kernel_build == kernel_build_id() {
            true => self.connector.send_host_name(name),
            false => Ok(()),
        }
    }
}

impl RemoteChannel for SandboxConnector {
    fn send_remote(&self, message: RemoteMessage, sockets: &[BorrowedFd<'_>]) -> io::Result<()> {
        self.connector.send_remote(message, sockets)
    }

    fn can_have_execs_go_on(&self) -> bool {
        self.kernel_build == kernel_build_id()
    }
}

impl SandboxInstance {
    /// One that runs, of the function whose image `boots` boots.
    ///
    /// # Errors
    /// The host has no descriptors left to watch it.
    pub fn new(
        sandbox: Sandbox,
        plan: Arc<BootPlan>,
        boots: Arc<ImageBoots>,
        log: InstanceLog,
    ) -> io::Result<Self> {
        let sandbox = watch_sandbox(sandbox)?;
        sandbox.get_ref().label(&boots.terms.label);
        let limits = boots.terms.limits;
        Ok(Self {
            pid: sandbox.get_ref().pid(),
            sandbox,
            plan,
            boots,
            pipes: None,
            log,
            end: None,
            asked_to_rest: false,
            twin: Twin::Refused,
            is_at_rest: false,
            raised: None,
            lowering: None,
            killed: false,
            gone: false,
            shows: Shows::default(),
            recording: None,
            last_moment: None,
            parting: None,
            kept: None,
            lent: None,
            last_checkpoint: LastCheckpoint::default(),
            hibernation: Hibernation::default(),
            limits,
            has_untold_limits: false,
        })
    }

    /// The same with this process's ends of the pipes for its output, until it has booted.
    pub fn with_pipes(self, pipes: Option<InstancePipes>) -> Self {
        Self { pipes, ..self }
    }

    /// The same for one that will be ready again.
    pub fn lent(self, lent: Option<Lent>) -> Self {
        Self { lent, ..self }
    }

    /// The same for one that outlives this daemon.
    pub fn kept_as(self, kept: KeptForSuccessor) -> Self {
        Self { kept: Some(kept), ..self }
    }

    /// The same for one that may use something else than others of its function.
    pub fn limited_to(self, limits: ResourceLimits) -> Self {
        Self { limits, ..self }
    }

    /// The same for one that shows something of the working set.
    pub fn showing(self, shows: Shows) -> Self {
        Self { shows, ..self }
    }

    pub fn sandbox(&self) -> &Sandbox {
        self.sandbox.get_ref()
    }

    /// Sends what waits for room, and has the task woken when there is some.
    fn flush(&mut self, context: &mut Context<'_>) {
        while let Poll::Ready(Ok(mut ready)) = self.sandbox.poll_write_ready_mut(context) {
            // That its process has ended is what the next read says.
            let ended = ready.get_inner_mut().flush().is_err();
            if ended || !ready.get_inner().wants_write() {
                return;
            }
            ready.clear_ready();
        }
    }

    /// What it has connected to, or was denied, since the last call.
    fn egress_events(&self) -> Option<Report> {
        let events = self.sandbox.get_ref().take_egress_events();
        (!events.is_empty()).then_some(Report::Egress(events))
    }

    /// How it ended; waits a moment for an end that nobody here has wanted.
    fn poll_end(&mut self, context: &mut Context<'_>) -> Poll<End> {
        if let Some(end) = self.end.take() {
            return Poll::Ready(end);
        }
        let (looks, _) = PARTING_LOOKS;
        loop {
            let status = self.sandbox.get_ref().try_wait();
            let left = self.parting.as_ref().map_or(looks, |parting| parting.looks_left);
            if self.killed || status.is_some() || left == 0 {
                let not_fetched = self.plan.fetch_failure().filter(|_| !self.killed);
                if let Some(why) = not_fetched {
                    return Poll::Ready(End::NotFetched(why));
                }
                // Why this node has ended it, it knows.
                let overrun = if self.killed { None } else { self.overrun() };
                let killed = || End::Killed(status.and_then(|status| status.signal()));
                return Poll::Ready(overrun.map_or_else(killed, End::LimitReached));
            }
            let parting = self.parting.get_or_insert_with(|| Looks::new(PARTING_LOOKS));
            ready!(parting.poll(context, PARTING_LOOKS));
        }
    }

    /// The limit that it has reached, if it has reached one.
    fn overrun(&self) -> Option<Overrun> {
        let sandbox = self.sandbox.get_ref();
        let limit = sandbox.limit_reached()?;
        let memory_peak = match limit {
            LimitReached::Memory => sandbox.memory_peak(),
            LimitReached::CpuTime => None,
        };
        Some(Overrun { limit, memory_peak, setting: None })
    }

    /// Puts the usual memory limit in force again as soon as the memory of the twin has been given
    /// back. A sandbox that keeps more for itself is ended, as it would have been without the twin.
    fn poll_lowering(&mut self, context: &mut Context<'_>) {
        while let (Some(raised), Some(looks)) = (&self.raised, &mut self.lowering) {
            if looks.poll(context, LOWERING_LOOKS).is_pending() {
                return;
            }
            match raised.lower() {
                Ok(Lowered::TooMuchInUse) if looks.looks_left > 0 => continue,
                Ok(Lowered::TooMuchInUse) => {
                    raised.note_not_given_back();
                    self.end_process();
                }
                Ok(Lowered::Done) => {}
                Err(error) => {
                    tracing::warn!(pid = self.pid, "cannot lower a memory limit again: {error}");
                    self.end_process();
                }
            }
            (self.raised, self.lowering) = (None, None);
        }
    }

    /// Lets it have the memory of a twin, if the host has a way; whether it may have one.
    fn allow_twin(&mut self) -> Twin {
        if let Some(raised) = &self.raised
            && !matches!(raised.lower(), Ok(Lowered::Done))
        {
            // An earlier twin has its memory still.
            return Twin::Refused;
        }
        self.lowering = None;
        self.raised = self.sandbox().allow_twin_memory().ok();
        if self.raised.is_some() { Twin::Allowed } else { Twin::Refused }
    }

    /// It has hung up: says how it ended, as soon as that is known.
    fn part(&mut self, context: &mut Context<'_>) -> Poll<Report> {
        let end = ready!(self.poll_end(context));
        self.gone = true;
        Poll::Ready(Report::Gone(end))
    }

    /// Ends it now if that has waited for the recording, which is over.
    fn poll_recording(&mut self, context: &mut Context<'_>) {
        let Some(recording) = &mut self.recording else { return };
        let is_late = |moment: &mut Pin<Box<Sleep>>| moment.as_mut().poll(context).is_ready();
        let is_late = self.last_moment.as_mut().is_some_and(is_late);
        if is_late || Pin::new(recording).poll(context).is_ready() {
            // One that is late finds that its process has ended.
            self.recording = None;
            if self.killed {
                self.end_process();
            }
        }
    }

    /// Refuses what cannot be done with one whose image is only partly here: what lies in another
    /// image must be named by its place in that.
    fn check_whole(&self) -> io::Result<()> {
        match self.plan.is_partial() {
            true => Err(io::Error::other(
                "the function is still being pulled; try again with an instance that is booted when that is done",
            )),
            false => Ok(()),
        }
    }

    /// What reads its memory.
    fn freezer(&self) -> Result<Freezer, String> {
        Freezer::new(self.sandbox()).map_err(|error| error.to_string())
    }

    fn end_process(&self) {
        if let Err(error) = self.sandbox.get_ref().kill() {
            tracing::warn!(pid = self.pid, "cannot end a sandbox: {error}");
        }
    }
}

impl Instance for SandboxInstance {
    fn pid(&self) -> u32 {
        self.pid
    }

    fn identify(&mut self, id: u64) {
        self.log.identify(id, self.pid);
    }

    fn remark(&self, text: &str) {
        self.log.remark(text);
    }

    fn log_end(&self, how: String) {
        self.log.ended(how);
    }

    fn connector(&self) -> Arc<dyn Connector> {
        let sandbox = self.sandbox.get_ref();
        let (connector, kernel_build) = (sandbox.connector(), sandbox.kernel_build_id());
        Arc::new(SandboxConnector { connector, port: self.boots.terms.port, kernel_build })
    }

    fn keep(&mut self, note: &str) -> io::Result<Option<Arc<AtomicBool>>> {
        // The next daemon would know nothing of what it still waits for.
        if self.plan.is_partial() {
            return Ok(None);
        }
        // One that is about to be frozen would wait for this daemon for ever.
        if self.kept.is_none() && !self.asked_to_rest {
            let readers = self.log.for_successor()?;
            let readers = [readers[0].as_fd(), readers[1].as_fd()];
            self.kept = self.sandbox.get_ref().keep(note, &readers)?;
        }
        Ok(self.kept.as_ref().map(|kept| kept.has_arrived().clone()))
    }

    fn ring_if_unread(&mut self) {
        if let Err(error) = self.sandbox.get_ref().ring_if_unread() {
            tracing::warn!(pid = self.pid, "cannot ring the doorbell of a sandbox: {error}");
        }
    }

    fn terminate(&mut self, signal: StopSignal) -> io::Result<()> {
        self.sandbox.get_mut().send_signal(signal.number())
    }

    fn kill(&mut self) {
        self.killed = true;
        // An instance that serves one request shows its working set before it ends.
        if self.recording.is_some() {
            self.last_moment.get_or_insert_with(|| Box::pin(sleep(RECORDING_PATIENCE)));
        } else {
            self.end_process();
        }
    }

    fn end_unreachable(&mut self) {
        self.end_process();
    }

    fn poll_report(&mut self, context: &mut Context<'_>) -> Poll<Report> {
        if self.gone {
            return Poll::Pending;
        }
        self.poll_recording(context);
        self.poll_lowering(context);
        if self.parting.is_some() {
            return self.part(context);
        }
        if self.sandbox.get_ref().wants_write() {
            self.flush(context);
        }
        if let Some(report) = self.egress_events() {
            return Poll::Ready(report);
        }
        let hibernation = self.hibernation.poll(self.sandbox.get_mut(), context);
        match hibernation {
            Poll::Ready(Outcome::Lost(error)) => {
                let why = format!("the sandbox was hibernated and cannot wake: {error}");
                self.end = Some(End::MemoryLost(why));
                self.kill();
            }
            Poll::Ready(outcome) => return Poll::Ready(report_of(outcome)),
            Poll::Pending => {}
        }
        loop {
            // The runtime is shutting down if it fails.
            let Ok(mut ready) = ready!(self.sandbox.poll_read_ready_mut(context)) else {
                return Poll::Pending;
            };
            match ready.get_inner_mut().poll_event() {
                Progress::Event(Event::Booted(times)) => {
                    if let Some(pipes) = self.pipes.take() {
                        pipes.handed_over();
                    }
                    return Poll::Ready(Report::Booted(times));
                }
                Progress::Event(Event::ConnectionClosed { id }) => {
                    self.hibernation.served(ready.get_ref().get_ref());
                    return Poll::Ready(Report::ConnectionClosed(id));
                }
                Progress::Event(Event::Exit(exit)) => {
                    // Where it could not start, that says more.
                    self.end.get_or_insert(End::Exited(exit));
                }
                Progress::Event(Event::Failed(reason)) => {
                    self.end = Some(match self.hibernation.is_hibernated() {
                        true => End::MemoryLost(reason),
                        false => End::Failed(reason),
                    });
                }
                Progress::Event(Event::Violation(violation)) => {
                    self.end = Some(End::Violation(violation.to_string()));
                }
                Progress::Event(Event::Prepared) => {
                    self.end = Some(End::Violation("it was prepared twice".into()));
                    self.kill();
                }
                // It would be asked again and again for the memory of what is no twin.
                Progress::Event(Event::EntryPoint(rest))
                    if rest.process != 0 && self.twin == Twin::Refused =>
                {
                    self.end = Some(End::Violation("it made a twin unasked".into()));
                    self.kill();
                }
                // A thawed copy reports its entry point only if asked to freeze.
                Progress::Event(Event::EntryPoint(rest)) if self.asked_to_rest => {
                    self.asked_to_rest = false;
                    self.is_at_rest = rest.process == 0;
                    if self.is_at_rest && self.raised.is_some() {
                        self.lowering = Some(Looks::new(LOWERING_LOOKS));
                        context.waker().wake_by_ref();
                    }
                    return Poll::Ready(Report::AtRest(rest));
                }
                Progress::Event(Event::EntryPoint(_)) => {
                    self.end = Some(End::Violation("it reported an entry point unasked".into()));
                    self.kill();
                }
                Progress::Event(Event::Resting(resting)) => {
                    if self.hibernation.resting(ready.get_inner_mut(), resting) {
                        // Whoever writes is waited for when this is asked next.
                        return Poll::Ready(Report::Resting);
                    }
                    if self.hibernation.has_asked_nothing() {
                        // Nobody else would let it go on. If it has ended, its report is on the way.
                        let _ = ready.get_inner_mut().wake();
                    }
                }
                Progress::Event(Event::Hibernated) => match self.hibernation.hibernated() {
                    Some(outcome) => return Poll::Ready(report_of(outcome)),
                    // To hear of this daemon wakes it.
                    None if self.hibernation.may_answer_earlier_daemon() => {}
                    None => {
                        self.end = Some(End::Violation("it hibernated unasked".into()));
                        self.kill();
                    }
                },
                Progress::Event(Event::Unseal) => {
                    if !self.hibernation.unseal() {
                        self.end = Some(End::Violation("it woke without being encrypted".into()));
                        self.kill();
                    }
                    // Whoever decrypts is to be waited for from now on.
                    context.waker().wake_by_ref();
                    return Poll::Pending;
                }
                Progress::Event(Event::Awake(awake)) => {
                    // An earlier rest may have ended long ago; a sandbox may say what it likes.
                    let is_last = self.hibernation.awake(awake);
                    if self.has_untold_limits && self.hibernation.is_awake() {
                        // If it has ended, its report is on the way.
                        let _ = ready.get_inner_mut().tell_limits(self.limits);
                        self.has_untold_limits = false;
                    }
                    if is_last {
                        return Poll::Ready(Report::Awake(awake));
                    }
                }
                Progress::Event(
                    Event::Described(_) | Event::Activity(_) | Event::Losses(_) | Event::Written(_),
                ) => {}
                Progress::Event(Event::Denied(denied)) => {
                    return Poll::Ready(Report::Egress(denied));
                }
                Progress::Event(Event::Lacks(lack)) => return Poll::Ready(Report::Lacks(lack)),
                Progress::Event(Event::OomKilled(killed)) => {
                    return Poll::Ready(Report::OomKilled(killed));
                }
                Progress::Event(Event::Remote(event)) => {
                    return Poll::Ready(Report::Remote(event));
                }
                Progress::Event(Event::Hangup) => return self.part(context),
                Progress::Busy => {
                    context.waker().wake_by_ref();
                    return Poll::Pending;
                }
                Progress::Idle => {
                    ready.clear_ready();
                    if let Some(report) = self.egress_events() {
                        return Poll::Ready(report);
                    }
                    if self.sandbox.get_ref().wants_write() {
                        self.flush(context);
                    }
                }
            }
        }
    }

    fn origin(&self) -> Origin {
        let image = self.sandbox().image_checksum().map(ImageId);
        Origin { image, index: Some(self.boots.rootfs.id()) }
    }

    fn owner_key(&self) -> Option<KeyId> {
        self.boots.decrypted.as_ref()?.owner_key
    }

    fn use_egress(&mut self, policy: &Arc<EgressPolicy>) -> io::Result<()> {
        self.sandbox.get_mut().use_egress(policy)
    }

    fn set_limits(&mut self, wanted: ResourceLimits) -> Result<(), Unchanged> {
        self.end_trim();
        if self.raised.is_some() || self.asked_to_rest || self.hibernation.is_under_way() {
            return Err(Unchanged::Busy);
        }
        let elsewhere = self.hibernation.bytes_elsewhere();
        let changed = self.sandbox().change_limits(self.limits, wanted, elsewhere);
        changed.map_err(|error| Unchanged::Refused(explain_unchanged(&error)))?;
        self.limits = wanted;
        self.has_untold_limits = !self.hibernation.is_awake();
        if self.has_untold_limits {
            self.sandbox().tell_limits_later(wanted);
        } else {
            // If it has ended, its report is on the way.
            let _ = self.sandbox().tell_limits(wanted);
        }
        Ok(())
    }

    fn cpu_time(&self) -> Option<Duration> {
        self.sandbox().cpu_time().ok().flatten()
    }

    fn memory_held(&self) -> MemoryHeld {
        let swapped = self.hibernation.bytes_elsewhere();
        MemoryHeld { bytes: self.sandbox().memory_held().ok().flatten(), swapped }
    }

    fn memory_reader(&self) -> io::Result<MemoryReader> {
        MemoryReader::new(self.sandbox())
    }

    fn first_request_done(&mut self) {
        let sandbox = self.sandbox.get_ref();
        self.recording = self.boots.begin_recording(sandbox, &self.plan, self.shows);
        if self.plan.prefetches() {
            self.boots.fill_cache_behind();
        }
    }

    fn can_rewind(&self) -> bool {
        let goes_on = !self.killed && !self.gone && self.end.is_none() && self.parting.is_none();
        let is_looked_at =
            self.recording.is_some() || self.asked_to_rest || self.hibernation.is_under_way();
        goes_on
            && !is_looked_at
            && self.boots.standby().rewinds()
            && self.sandbox.get_ref().can_rewind()
    }

    fn rewind(self: Box<Self>, lease: Lease) {
        let Self { sandbox, boots, log, lent, .. } = *self;
        Standby::rewind(boots, Spent { sandbox: sandbox.into_inner(), log, lease, lent });
    }

    fn hibernate(&mut self, terms: HibernationTerms) -> io::Result<()> {
        self.check_whole()?;
        self.end_trim();
        if self.recording.is_some() || self.asked_to_rest {
            return Err(io::ErrorKind::WouldBlock.into());
        }
        let base = self.boots.base();
        self.hibernation.begin(self.sandbox.get_mut(), terms, base)
    }

    fn trim(&mut self) -> io::Result<()> {
        self.check_whole()?;
        if self.recording.is_some() || self.asked_to_rest || self.parting.is_some() {
            return Err(io::ErrorKind::WouldBlock.into());
        }
        let base = self.boots.base();
        self.hibernation.begin_trim(self.sandbox.get_mut(), base)
    }

    fn end_trim(&mut self) {
        self.hibernation.end_trim(self.sandbox.get_mut());
    }

    fn wake(&mut self) -> io::Result<()> {
        self.hibernation.end(self.sandbox.get_mut())
    }

    fn request_rest(&mut self) -> io::Result<()> {
        self.check_whole()?;
        self.hibernation.end(self.sandbox.get_mut())?;
        self.asked_to_rest = true;
        self.twin = Twin::Refused;
        self.kept = None;
        self.sandbox.get_mut().request_freeze()
    }

    fn request_checkpoint(&mut self, twin: Twin) -> io::Result<()> {
        self.check_whole()?;
        self.end_trim();
        self.asked_to_rest = true;
        // The next daemon would not know that it waits.
        self.kept = None;
        self.twin = if twin == Twin::Allowed { self.allow_twin() } else { twin };
        let twin = self.twin;
        self.sandbox.get_mut().request_checkpoint(twin)
    }

    fn copy(&mut self, rest: EntryPoint) -> Result<Reading<Arc<dyn Launcher>>, String> {
        let (freezer, boots, limits) = (self.freezer()?, self.boots.clone(), self.limits);
        Ok(Box::new(move |on_step| {
            Ok(Box::new(boots.copy(&freezer, rest, limits, on_step)?) as Finish<_>)
        }))
    }

    fn checkpoint(
        &mut self,
        rest: EntryPoint,
        new: Checkpoint,
    ) -> Result<Reading<Checkpointed>, String> {
        let (freezer, boots) = (self.freezer()?, self.boots.clone());
        let (last, memory) = (self.last_checkpoint.clone(), self.limits.memory);
        Ok(Box::new(move |on_step| {
            let is_read = &mut || on_step(ReadingStep::Read);
            Ok(Box::new(boots.checkpoint(&freezer, rest, &last, new, memory, is_read)?)
                as Finish<_>)
        }))
    }

    fn has_volumes(&self) -> bool {
        self.boots.terms.has_volumes()
    }

    fn renews_volumes(&self) -> bool {
        self.sandbox().renews_volumes()
    }

    fn open_files_of(&self, volume: &Volume) -> usize {
        self.sandbox().open_files_of(volume)
    }

    fn end_twin(&mut self) {
        // One that has ended says so itself.
        let _ = self.sandbox.get_mut().end_twin();
        self.lowering = Some(Looks::new(LOWERING_LOOKS));
    }

    fn write_asleep(&mut self, rest: EntryPoint, new: &NewAsleep) -> Result<AsleepImage, String> {
        self.boots.write_asleep(self.sandbox(), rest, self.limits.memory, new)
    }

    fn resume(&mut self) {
        if std::mem::take(&mut self.is_at_rest) {
            // As above.
            let _ = self.sandbox().resume();
        }
    }

    fn freeze(&mut self, rest: EntryPoint) -> Result<FrozenInstance, String> {
        self.boots.freeze(self.sandbox.get_ref(), rest)
    }
}

fn explain_unchanged(error: &NotChanged) -> String {
    match error {
        NotChanged::InUse { held, wanted } => format!(
            "the sandbox has {} of memory, files included, and was to have {}; remove files or end \
             processes in it, or give it more",
            ByteSize(*held),
            ByteSize(*wanted)
        ),
        NotChanged::NotEnforced(_) => format!("{error}; see `thaw doctor`"),
        NotChanged::Host(error) => format!("the host does not change its limits ({error})"),
    }
}

fn report_of(outcome: Outcome) -> Report {
    match outcome {
        Outcome::Hibernated(swapped) => Report::Hibernated(HibernatedInstance {
            stored: swapped.stored,
            ranges: swapped.populated,
            write_ms: swapped.duration.as_secs_f64() * 1e3,
        }),
        Outcome::Failed(error) => {
            Report::NotHibernated { why: error.to_string(), is_torn: error.is_torn() }
        }
        Outcome::Trimmed(trimmed) => Report::Trimmed(trimmed.map_err(|error| error.to_string())),
        Outcome::Lost(error) => Report::NotHibernated { why: error.to_string(), is_torn: false },
    }
}
