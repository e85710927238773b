//! A booted sandbox.

use std::fmt;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::process::ExitStatus;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, Weak};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use thaw_abi::control::{
    CHECKPOINT_TWIN, Checkpoint, Connection, HostName, Limits, MSG_CHECKPOINT, MSG_CONNECTION,
    MSG_DESCRIBE, MSG_FREEZE, MSG_HOST_NAME, MSG_LIMITS, MSG_OUTGOING, MSG_READY, MSG_RENEWED,
    MSG_RESUME, MSG_SIGNAL, MSG_TWIN_READ, MSG_WINDOW_SIZE, OOM_KILLED, OOM_NOBODY, OomKilled,
    Outgoing, Signal, WindowSize,
};
use thaw_abi::cpu::Baseline;

use crate::boot::{BootError, BootPlan, Rootfs};
use crate::broker::{Broker, QueueFull, VolumeHolder};
use crate::console::HostEnd;
use crate::egress::{EgressEvents, EgressPolicy, open_flags};
use crate::event::{Event, Incoming, KilledProcess, Progress, Violation, parse};
use crate::kernel::kernel_build_id;
use crate::limits::{
    self, Guarded, LimitReached, Meter, NotChanged, RaisedMemory, ResourceLimits, Tell,
};
use crate::message::{self, Outbox, OutboxFull};
use crate::rewind::{Effort, Reason, RewindError, TakenDown};
use crate::state::{StateError, Subject};
use crate::sys;
use crate::zygote::{Process, ReadySandbox};

/// Most broker requests served by one call of [`Sandbox::poll_event`].
const REQUEST_BUDGET: usize = 32;
/// Most bytes of a message from a sandbox: a header, a body and a path.
const INCOMING_MAX: usize = 8192;
/// Most bytes of replies that a sandbox may leave unread. It asks one thing at a
/// time per virtual CPU, so even one large reply for each stays below.
const UNREAD_MAX: usize = 256 * 1024;
/// Most messages that a sandbox can have left unread by the host: its socket holds no more.
const FORGOTTEN_MAX: usize = 4096;

/// A booted sandbox. Dropping it kills it.
///
/// Its descriptor ([`AsFd`]) is the control socket: when it is readable, call
/// [`Sandbox::poll_event`] until [`Progress::Idle`].
pub struct Sandbox {
    process: Process,
    line: Arc<Line>,
    console: HostEnd,
    broker: Broker,
    state: State,
    /// Checksum of the image that it is a copy of, if it is one.
    thawed_from: Option<[u8; 32]>,
    /// The level of the instruction set that its program is held to.
    baseline: Option<Baseline>,
    /// The state that it can be put back into.
    held: Option<(TakenDown, Arc<BootPlan>)>,
}

/// What is sent to a sandbox goes through here: by its owner, and by whoever accepts
/// connections for it.
struct Line {
    control: Arc<OwnedFd>,
    outbox: Mutex<Outbox>,
    /// What is sent before the next message.
    first: Mutex<Option<Vec<u8>>>,
    /// Whether something waits in the outbox: who asks does not have to wait while
    /// somebody else sends.
    wants_write: AtomicBool,
    /// Nothing is sent any more: the sandbox has begun anew, with another line.
    has_ended: AtomicBool,
}

/// Hands connections to a sandbox, beside its owner.
pub struct Connector(Arc<Line>);

/// Whether a sandbox that is asked to rest may go on before its memory is read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Twin {
    /// It may fork a process that holds its memory, where it can, and go on at once.
    Allowed,
    /// It waits until its memory has been read.
    Refused,
}

/// How far the conversation has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// It maps an image, and is to say when that is done.
    Preparing,
    /// Both sides talk.
    Open,
    /// The sandbox was killed for a violation; nothing more of it is read.
    Condemned,
    /// [`Event::Hangup`] was reported.
    HungUp,
}

impl fmt::Debug for Sandbox {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Sandbox").field("pid", &self.pid()).finish_non_exhaustive()
    }
}

impl Sandbox {
    pub(crate) fn new(
        process: Process,
        control: OwnedFd,
        console: HostEnd,
        broker: Broker,
    ) -> Self {
        let line = Arc::new(Line::new(Arc::new(control)));
        let state = State::Open;
        Self {
            process,
            line,
            console,
            broker,
            state,
            thawed_from: None,
            baseline: None,
            held: None,
        }
    }

    /// Notes that it is a copy of the image of a plan.
    pub(crate) fn thawed_from(self, plan: &BootPlan) -> Self {
        self.thawed_as(Some(plan.image_checksum))
    }

    /// Notes that it is a copy of the image with this checksum, or of one that is not known.
    pub(crate) fn thawed_as(mut self, checksum: Option<[u8; 32]>) -> Self {
        self.thawed_from = checksum;
        self
    }

    /// Notes the level of the instruction set that its program was started for.
    pub(crate) fn hold_to(&mut self, baseline: Option<Baseline>) {
        self.baseline = baseline;
    }

    /// The level of the instruction set that its program is held to.
    pub(crate) fn baseline(&self) -> Option<Baseline> {
        self.baseline
    }

    /// Checksum of the image that it is a copy of; `None`: it was started without one.
    pub fn image_checksum(&self) -> Option<[u8; 32]> {
        self.thawed_from
    }

    /// Has the state taken down in which it waits now to be wanted.
    ///
    /// # Errors
    /// It cannot be put back later; it may have ended.
    pub(crate) fn take_down(&mut self, plan: &Arc<BootPlan>) -> Result<(), RewindError> {
        let rewinder = self.process.parent.rewinder();
        let subject = self.subject().map_err(StateError::from_start)?;
        self.held = Some((rewinder.take_down(&subject)?, plan.clone()));
        Ok(())
    }

    /// Whether [`Sandbox::rewind`] may succeed.
    pub fn can_rewind(&self) -> bool {
        self.held.is_some() && self.state == State::Open && self.broker.is_as_new()
    }

    /// Puts it back into the state in which it waited to be wanted, whatever its guest has
    /// done meanwhile: nothing of that is left. What it has said since is dropped. Does not wait:
    /// `done` is told what became of it, on a thread that must not be held up. After an error
    /// the sandbox has ended.
    pub fn rewind(
        mut self,
        done: impl FnOnce(Result<(ReadySandbox, Effort), RewindError>) + Send + 'static,
    ) {
        let (taken_down, plan) = match self.prepare_rewind() {
            Ok(prepared) => prepared,
            Err(error) => {
                drop(self);
                return done(Err(error));
            }
        };
        taken_down.rewind(move |result| {
            let result = result.and_then(|(taken_down, effort)| {
                self.forget_messages().map_err(RewindError::Lost)?;
                self.held = Some((taken_down, plan.clone()));
                Ok((ReadySandbox::new(self, plan), effort))
            });
            done(result);
        });
    }

    /// Ends the conversation with it, and begins another one.
    fn prepare_rewind(&mut self) -> Result<(TakenDown, Arc<BootPlan>), RewindError> {
        let (true, Some(held)) = (self.can_rewind(), self.held.take()) else {
            let why = "it has got something that would have to be taken back";
            return Err(RewindError::Refused(Reason::Busy, why.to_owned()));
        };
        // Whoever holds on to the old line finds that the sandbox has gone.
        let is_quiet = self.line.end();
        self.line = Arc::new(Line::new(self.line.control.clone()));
        let unread = sys::unread_by_peer(self.control().as_fd()).map_err(RewindError::Lost)?;
        match is_quiet && unread == 0 {
            true => Ok(held),
            false => Err(RewindError::Busy),
        }
    }

    /// Drops what it has said and nobody has read.
    fn forget_messages(&self) -> io::Result<()> {
        let mut buffer = [0; INCOMING_MAX];
        for _ in 0..FORGOTTEN_MAX {
            match message::receive(self.control(), &mut buffer, None) {
                Ok(packet) if packet.len == 0 && !packet.truncated => break,
                Ok(_) => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(()),
                Err(error) => return Err(error),
            }
        }
        Err(io::Error::from(io::ErrorKind::ConnectionAborted))
    }

    /// Waits until it says [`Event::Prepared`]; it must say nothing else before.
    pub(crate) fn wait_prepared(&mut self, timeout: Duration) -> Result<(), BootError> {
        self.state = State::Preparing;
        match self.wait_event(Some(timeout)).map_err(BootError::Send)? {
            Some(Event::Prepared) => Ok(()),
            Some(Event::Failed(reason)) => Err(BootError::NotPrepared(reason)),
            Some(Event::Hangup) => Err(BootError::ZygoteDied),
            Some(_) => Err(BootError::NotPrepared("it sent something else first".to_owned())),
            None => Err(BootError::NotPrepared(format!("no sign of life within {timeout:?}"))),
        }
    }

    /// The control socket, for what precedes the guest's first instruction.
    pub(crate) fn control(&self) -> &OwnedFd {
        &self.line.control
    }

    /// The read end of its console, for the daemon that comes after this one.
    pub(crate) fn console_for_successor(&self) -> io::Result<OwnedFd> {
        self.console.for_successor()
    }

    /// A file with its outgoing connections, for the same; `None`: it may have none.
    pub(crate) fn connections_for_successor(&self) -> io::Result<Option<OwnedFd>> {
        self.broker.connections_for_successor()
    }

    /// Tells a sandbox that was taken over that whoever has served it is gone.
    pub(crate) fn renew(&mut self) -> io::Result<()> {
        self.send(message::message(MSG_RENEWED, &()), Vec::new())?;
        self.process.ring()
    }

    pub(crate) fn process(&self) -> &Process {
        &self.process
    }

    /// Reads messages of the sandbox, serves its broker requests, and returns
    /// the first event. Never blocks on the sandbox. After [`Event::Hangup`],
    /// it always returns [`Progress::Idle`].
    pub fn poll_event(&mut self) -> Progress {
        match self.state {
            State::Preparing | State::Open => {}
            State::Condemned => return self.hang_up(),
            State::HungUp => return Progress::Idle,
        }
        // One that takes nothing any more may have said why.
        let is_deaf = self.flush().is_err();
        for _ in 0..REQUEST_BUDGET {
            let mut buffer = [0; INCOMING_MAX];
            let packet = match message::receive(self.control(), &mut buffer, None) {
                Ok(packet) => packet,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => match is_deaf {
                    true => return self.hang_up(),
                    false => return Progress::Idle,
                },
                Err(_) => return self.closed(),
            };
            if packet.len == 0 && !packet.truncated {
                return self.closed();
            }
            let parsed = match (packet.truncated, packet.descriptors_dropped) {
                (true, _) => Err(Violation::TooLong { limit: INCOMING_MAX }),
                (_, true) => Err(Violation::Descriptor),
                _ => parse(&buffer[..packet.len]),
            };
            match parsed {
                Ok(Incoming::Event(Event::Prepared)) => {
                    if self.state != State::Preparing {
                        return self.violated(Violation::Kind { kind: MSG_READY });
                    }
                    self.state = State::Open;
                    return Progress::Event(Event::Prepared);
                }
                Ok(Incoming::OomKilled(killed)) => {
                    if let Some(event) = self.oom_killed(&killed) {
                        return Progress::Event(event);
                    }
                }
                Ok(Incoming::Event(event)) => return Progress::Event(event),
                Ok(Incoming::Request(request)) => {
                    if let Err(violation) = self.answer(&request) {
                        return self.violated(violation);
                    }
                }
                Err(violation) => return self.violated(violation),
            }
        }
        Progress::Busy
    }

    /// Serves a broker request.
    fn answer(&mut self, request: &crate::broker::Request<'_>) -> Result<(), Violation> {
        // Unread descriptors count against the daemon's own limit, so this is
        // checked before there are more of them.
        let unread = sys::unread_by_peer(self.control().as_fd()).unwrap_or(usize::MAX);
        if unread > UNREAD_MAX {
            return Err(Violation::RepliesUnread);
        }
        let served = self.broker.serve(request).map_err(|QueueFull| Violation::RepliesUnread)?;
        let Some((reply, descriptor)) = served else { return Ok(()) };
        match self.send(reply, descriptor.into_iter().collect()) {
            Err(error) if error.kind() == io::ErrorKind::OutOfMemory => {
                Err(Violation::RepliesUnread)
            }
            // If it has ended, the next read says so.
            Ok(()) | Err(_) => Ok(()),
        }
    }

    fn violated(&mut self, violation: Violation) -> Progress {
        self.state = State::Condemned;
        // The only error left is a missing right, and then the drop fails, too.
        let _ = self.kill();
        Progress::Event(Event::Violation(violation))
    }

    /// The control socket is closed: by the sandbox, or by whoever served files to it.
    fn closed(&mut self) -> Progress {
        match self.broker.files_ended() {
            Some(violation) => self.violated(violation),
            None => self.hang_up(),
        }
    }

    fn hang_up(&mut self) -> Progress {
        self.state = State::HungUp;
        // It may only have closed its socket: without one it is of no use.
        let _ = self.kill();
        Progress::Event(Event::Hangup)
    }

    /// Whether messages wait for room: poll the control socket for writability, too.
    pub fn wants_write(&self) -> bool {
        self.line.wants_write.load(Ordering::Acquire)
    }

    /// Blocks until the next event; `None` when `timeout` passes first, and
    /// after [`Event::Hangup`].
    pub fn wait_event(&mut self, timeout: Option<Duration>) -> io::Result<Option<Event>> {
        let deadline = timeout.map(|timeout| Instant::now() + timeout);
        loop {
            match self.poll_event() {
                Progress::Event(event) => return Ok(Some(event)),
                // A sandbox may keep this process busy for as long as it likes.
                Progress::Busy if deadline.is_some_and(|end| Instant::now() >= end) => {
                    return Ok(None);
                }
                Progress::Busy => continue,
                Progress::Idle if self.state == State::HungUp => return Ok(None),
                Progress::Idle => {}
            }
            let left = deadline.map(message::time_until);
            let mut interest = PollFlags::IN;
            if self.wants_write() {
                interest |= PollFlags::OUT;
            }
            match poll(&mut [PollFd::new(self.control(), interest)], left.as_ref()) {
                Ok(0) => return Ok(None),
                Ok(_) | Err(Errno::INTR) => {}
                Err(errno) => return Err(errno.into()),
            }
        }
    }

    /// Hands connections to the sandbox from anywhere, as long as it lives.
    pub fn connector(&self) -> Connector {
        Connector(self.line.clone())
    }

    /// Makes the sandbox look at its messages if it has not read all of them. A
    /// signal costs both sides more than a message, and a guest that waits reads at
    /// once.
    pub fn ring_if_unread(&self) -> io::Result<()> {
        match sys::unread_by_peer(self.control().as_fd())? {
            0 => Ok(()),
            _ => self.process.ring(),
        }
    }

    /// Sends what had to wait for room; [`Sandbox::poll_event`] does so, too.
    pub fn flush(&mut self) -> io::Result<()> {
        match self.wants_write() {
            true => self.line.with_outbox(|outbox, control| outbox.flush(control)),
            false => Ok(()),
        }
    }

    /// Sends a signal, 1 to 64, to the first guest process.
    pub fn send_signal(&mut self, number: u32) -> io::Result<()> {
        if !(1..=64).contains(&number) {
            return Err(io::Error::from(io::ErrorKind::InvalidInput));
        }
        self.send(message::message(MSG_SIGNAL, &Signal { number, reserved: 0 }), Vec::new())?;
        self.process.ring()
    }

    /// Tells the guest that its terminal has another size.
    pub fn send_window_size(&mut self, window: WindowSize) -> io::Result<()> {
        self.send(message::message(MSG_WINDOW_SIZE, &window), Vec::new())
    }

    /// Asks what the program does, which [`Event::Described`] says.
    pub fn request_description(&mut self) -> io::Result<()> {
        self.send(message::message(MSG_DESCRIBE, &()), Vec::new())?;
        self.process.ring()
    }

    /// Asks the sandbox to come to rest and report [`Event::EntryPoint`].
    pub fn request_freeze(&mut self) -> io::Result<()> {
        self.send(message::message(MSG_FREEZE, &()), Vec::new())?;
        self.process.ring()
    }

    /// Asks the sandbox to come to rest at once, whatever its threads are doing, and report
    /// [`Event::EntryPoint`]. After [`Sandbox::resume`] it goes on as if nothing had been, or
    /// before, if it may have a twin and has made one ([`thaw_abi::control::EntryPoint::process`]).
    pub fn request_checkpoint(&mut self, twin: Twin) -> io::Result<()> {
        let flags = if twin == Twin::Allowed { CHECKPOINT_TWIN } else { 0 };
        let checkpoint = Checkpoint { flags, reserved: 0 };
        self.send(message::message(MSG_CHECKPOINT, &checkpoint), Vec::new())?;
        self.process.ring()
    }

    /// What tells it from others that have volumes; none: it has no volumes.
    pub(crate) fn volume_holder(&self) -> Option<VolumeHolder> {
        self.broker.volume_holder()
    }

    /// How many files of a volume it has open.
    pub fn open_files_of(&self, volume: &crate::Volume) -> usize {
        self.broker.open_files_of(volume)
    }

    /// The memory of its twin has been read, or is not wanted any more.
    pub fn end_twin(&mut self) -> io::Result<()> {
        self.send(message::message(MSG_TWIN_READ, &()), Vec::new())?;
        self.process.ring()
    }

    /// Lets it have more memory as long as it has a twin: each page that it writes meanwhile is
    /// there twice. It may have all that it has now a second time.
    ///
    /// # Errors
    /// The host refuses; the limit is as before.
    pub fn allow_twin_memory(&self) -> io::Result<RaisedMemory> {
        RaisedMemory::of(&self.process.limits)
    }

    /// Changes its memory and processors from what they are, `before`, to `wanted`. Of its memory
    /// `elsewhere` bytes are in a swap file. It does not hear of it before
    /// [`Sandbox::tell_limits`].
    ///
    /// # Errors
    /// See [`NotChanged`]; the limits are as before.
    pub fn change_limits(
        &self,
        before: ResourceLimits,
        wanted: ResourceLimits,
        elsewhere: u64,
    ) -> Result<(), NotChanged> {
        self.process.limits.change(before, wanted, elsewhere)
    }

    /// Has one of its processes ended when its memory is used up, as on Linux, instead of all. To be
    /// called with the limits that it has. Nothing changes for one of a single process, for one
    /// whose kernel is of another build, and where no control group limits memory.
    pub fn enable_oom_killer(&self, limits: ResourceLimits) {
        let is_known = self.kernel_build_id() == kernel_build_id();
        if is_known && self.process.limits.can_end_one(limits) {
            let line: Weak<Line> = Arc::downgrade(&self.line);
            limits::guard(Guarded {
                limits: Arc::downgrade(&self.process.limits),
                line,
                pidfd: Arc::downgrade(&self.process.pidfd),
                pid: self.process.pid,
                has_own_numbers: self.process.own_number.is_some_and(|own| {
                    u32::try_from(own.as_raw_nonzero().get()) == Ok(self.process.pid)
                }),
            });
        }
    }

    /// What its kernel says of the process that it was to end, if it was asked.
    fn oom_killed(&self, killed: &OomKilled) -> Option<Event> {
        let limits = &self.process.limits;
        if !limits.take_answer() {
            return None;
        }
        limits.note_nobody_can_end(killed.outcome == OOM_NOBODY);
        (killed.outcome == OOM_KILLED).then(|| Event::OomKilled(KilledProcess::of(killed)))
    }

    /// Tells the sandbox its limits, which it shows to its programs, unless its kernel is of another
    /// build, which may not know of that.
    pub fn tell_limits(&self, limits: ResourceLimits) -> io::Result<()> {
        self.tell_limits_later(limits);
        match self.line.take_first() {
            Some(message) => self.send(message, Vec::new()),
            None => Ok(()),
        }
    }

    /// The same right before whatever is sent to it next, since each message wakes a sandbox that
    /// rests.
    pub fn tell_limits_later(&self, limits: ResourceLimits) {
        if self.kernel_build_id() == kernel_build_id() {
            let limits = Limits { memory: limits.memory, cpus: limits.cpus, reserved: 0 };
            self.line.put_first(message::message(MSG_LIMITS, &limits));
        }
    }

    /// Lets the sandbox go on after [`Event::EntryPoint`].
    pub fn resume(&self) -> io::Result<()> {
        self.send(message::message(MSG_RESUME, &()), Vec::new())
    }

    /// It cannot be put back any more.
    pub(crate) fn forget_held(&mut self) {
        self.held = None;
    }

    pub(crate) fn send(&self, message: Vec<u8>, descriptors: Vec<OwnedFd>) -> io::Result<()> {
        self.line.send(|outbox, control| outbox.send(control, message, descriptors))
    }

    /// The same to a sandbox that is to stay at rest.
    pub(crate) fn send_at_rest(
        &self,
        message: Vec<u8>,
        descriptors: Vec<OwnedFd>,
    ) -> io::Result<()> {
        self.line.send_alone(|outbox, control| outbox.send(control, message, descriptors))
    }

    /// Ends the sandbox at once. Harmless if it has ended already.
    pub fn kill(&self) -> io::Result<()> {
        self.process.kill()
    }

    /// Process id as seen by the caller's `/proc`.
    pub fn pid(&self) -> u32 {
        self.process.pid
    }

    /// A descriptor that becomes readable when the process has ended.
    pub fn pidfd(&self) -> BorrowedFd<'_> {
        self.process.pidfd()
    }

    /// Read end of the sandbox's console, non-blocking, where the kernel writes
    /// traces and panics; `None` unless [`crate::Console::Pipe`] leaves it to the caller.
    pub fn console(&self) -> Option<BorrowedFd<'_>> {
        self.console.pipe()
    }

    /// Names the sandbox in what comes from its console. The first name stays.
    pub fn label(&self, label: &Arc<str>) {
        self.console.set_label(label);
    }

    /// See [`Sandbox::label`].
    pub(crate) fn known_label(&self) -> Option<&Arc<str>> {
        self.console.label()
    }

    /// How the host process ended, if it has.
    pub fn try_wait(&self) -> Option<ExitStatus> {
        self.process.exit.get()
    }

    /// Blocks until the host process has ended. The guest's own exit code is in
    /// [`Event::Exit`]; this one tells of kills, crashes and limits.
    pub fn wait(&self) -> ExitStatus {
        self.process.exit.wait()
    }

    /// The limit that has ended the sandbox, or a process of it, if one has.
    pub fn limit_reached(&self) -> Option<LimitReached> {
        self.process.limits.reached()
    }

    /// Most bytes of memory that the sandbox has used, if the host counts that. A control group
    /// that other sandboxes have had before may remember theirs.
    pub fn memory_peak(&self) -> Option<u64> {
        self.process.limits.memory_peak()
    }

    /// CPU time that all processes of the sandbox have used, those that have ended
    /// included; `None` where no control group counts it.
    ///
    /// # Errors
    /// The control group cannot be read.
    pub fn cpu_time(&self) -> io::Result<Option<Duration>> {
        self.process.limits.group().cpu_time()
    }

    /// Bytes of memory that the sandbox has now, files in it included, and that count in its limit;
    /// `None` where no control group counts them.
    ///
    /// # Errors
    /// The control group cannot be read.
    pub fn memory_held(&self) -> io::Result<Option<u64>> {
        self.process.limits.group().memory_held()
    }

    /// Has `meter` count what the sandbox uses, from its beginning. The first meter
    /// stays. Takes no host call.
    pub fn count_by(&self, meter: &Arc<Meter>) {
        self.process.limits.count_by(meter);
    }

    /// The same, from now on: for one that was taken over.
    ///
    /// # Errors
    /// What it has used so far cannot be read.
    pub fn count_from_now_by(&self, meter: &Arc<Meter>) -> io::Result<()> {
        self.process.limits.count_from_now_by(meter)
    }

    /// Build id of the kernel that the sandbox runs.
    pub fn kernel_build_id(&self) -> [u8; 32] {
        self.process.parent.kernel_build_id()
    }

    /// Whether its kernel knows how to take back what it has open in volumes from the next daemon: it is
    /// of this build, or has been left by a daemon that knew.
    pub fn renews_volumes(&self) -> bool {
        self.broker.is_left() || self.kernel_build_id() == kernel_build_id()
    }

    /// The sandbox, for whoever asks the state helper about its memory.
    pub(crate) fn subject(&self) -> io::Result<Subject> {
        self.process.subject()
    }

    /// Blobs that the sandbox has asked for since its boot.
    pub(crate) fn blobs_asked(&self) -> impl Iterator<Item = u32> {
        self.broker.asked()
    }

    /// Outgoing connections and names that its policy has denied since the last call.
    /// Where nothing at all is allowed, the sandbox does not even ask.
    pub fn take_egress_events(&self) -> EgressEvents {
        self.broker.take_egress_events()
    }

    /// Puts the sandbox under a policy of its own, whose rules can change, and tells it that it
    /// has a way out. To be called before the first event of it is asked for.
    ///
    /// # Errors
    /// It has ended, or this process has too many descriptors.
    pub fn use_egress(&mut self, policy: &Arc<EgressPolicy>) -> io::Result<()> {
        let control = self.line.control.try_clone()?;
        self.broker.use_egress(policy, control);
        let outgoing = Outgoing { flags: open_flags(), reserved: 0 };
        self.send(message::message(MSG_OUTGOING, &outgoing), Vec::new())
    }

    /// The rootfs that the sandbox was booted over.
    pub fn rootfs(&self) -> &Rootfs {
        self.broker.rootfs()
    }
}

impl Tell for Line {
    fn tell(&self, message: Vec<u8>) -> io::Result<()> {
        self.send(|outbox, control| outbox.send(control, message, Vec::new()))
    }
}

impl Line {
    fn new(control: Arc<OwnedFd>) -> Self {
        let (outbox, first) = (Mutex::default(), Mutex::default());
        let (wants_write, has_ended) = (AtomicBool::new(false), AtomicBool::new(false));
        Self { control, outbox, first, wants_write, has_ended }
    }

    /// Sends nothing from now on; whether nothing waits to be sent.
    fn end(&self) -> bool {
        let outbox = self.outbox.lock().expect("no holder panics");
        self.has_ended.store(true, Ordering::Release);
        outbox.is_empty()
    }

    /// Has a message sent right before the next one.
    fn put_first(&self, message: Vec<u8>) {
        *self.first.lock().expect("no holder panics") = Some(message);
    }

    fn take_first(&self) -> Option<Vec<u8>> {
        self.first.lock().expect("no holder panics").take()
    }

    fn with_outbox<T>(&self, act: impl FnOnce(&mut Outbox, BorrowedFd<'_>) -> T) -> T {
        let mut outbox = self.outbox.lock().expect("no holder panics");
        let result = act(&mut outbox, self.control.as_fd());
        self.wants_write.store(!outbox.is_empty(), Ordering::Release);
        result
    }

    fn send(
        &self,
        send: impl FnOnce(&mut Outbox, BorrowedFd<'_>) -> io::Result<Result<(), OutboxFull>>,
    ) -> io::Result<()> {
        if let Some(first) = self.take_first() {
            self.send_alone(|outbox, control| outbox.send(control, first, Vec::new()))?;
        }
        self.send_alone(send)
    }

    /// The same for what a sandbox is to hear that stays at rest.
    fn send_alone(
        &self,
        send: impl FnOnce(&mut Outbox, BorrowedFd<'_>) -> io::Result<Result<(), OutboxFull>>,
    ) -> io::Result<()> {
        self.with_outbox(|outbox, control| {
            // It was set with the outbox locked.
            if self.has_ended.load(Ordering::Acquire) {
                return Err(Errno::PIPE.into());
            }
            send(outbox, control)
        })?
        .map_err(|OutboxFull| io::Error::from(io::ErrorKind::OutOfMemory))
    }
}

impl Connector {
    /// Hands a connected, non-blocking socket to the guest's listening socket.
    /// The caller's descriptor stays open. A guest that computes and never waits
    /// does not look: see [`Sandbox::ring_if_unread`]. What does not fit into the socket
    /// waits for the owner: see [`Sandbox::wants_write`].
    ///
    /// # Errors
    /// [`io::ErrorKind::OutOfMemory`]: too many messages wait for the sandbox already;
    /// others: it has ended.
    pub fn send_connection(
        &self,
        connection: &Connection,
        socket: BorrowedFd<'_>,
    ) -> io::Result<()> {
        let message = message::message(MSG_CONNECTION, connection);
        self.send_lent(message, &[socket])
    }

    /// Gives the sandbox another host name, in `/etc/hosts`, too. Its kernel has to be of this build.
    ///
    /// # Errors
    /// The name is empty or too long ([`io::ErrorKind::InvalidInput`]), or as [`Self::send_connection`].
    pub fn send_host_name(&self, name: &str) -> io::Result<()> {
        let name = HostName::new(name).ok_or(io::ErrorKind::InvalidInput)?;
        self.send_lent(message::message(MSG_HOST_NAME, &name), &[])
    }

    /// Sends a message with descriptors that stay open here, too.
    pub(crate) fn send_lent(
        &self,
        message: Vec<u8>,
        descriptors: &[BorrowedFd<'_>],
    ) -> io::Result<()> {
        self.0.send(|outbox, control| outbox.send_lent(control, message, descriptors))
    }
}

impl AsFd for Sandbox {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.control().as_fd()
    }
}

impl AsRawFd for Sandbox {
    fn as_raw_fd(&self) -> RawFd {
        self.control().as_raw_fd()
    }
}
