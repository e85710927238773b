//! Live templates: fork boots (Catalyzer's sandbox fork).

use std::fmt;
use std::io::{self, IoSlice};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use bytemuck::bytes_of;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::process::{PidfdFlags, pidfd_open};
use thaw_abi::control::{Connection, Fork, MSG_FORK, MSG_READY, MessageHeader, THAW_AS_TEMPLATE};

use super::handle::{Alive, Connected};
use super::process::{KnownAs, Numbers, Process, affinity_of};
use super::verify::verify;
use super::{ReadySandbox, ZygoteError, ZygoteParent, boot_error, broker, numbered};
use crate::boot::{BootError, BootPlan, ThawOptions, send_identity};
use crate::console::{Console, HostEnd};
use crate::limits::{Limits, ResourceLimits};
use crate::message;
use crate::sandbox::Sandbox;

/// How long a template may take to be prepared.
const PATIENCE: Duration = Duration::from_secs(10);
/// How long a template may take to fork a copy.
const FORK_PATIENCE: Duration = Duration::from_secs(2);
/// How long the fork of a copy is awaited without sleep.
const EAGERNESS: Duration = Duration::from_micros(400);
/// Seats that are kept ready.
const SEATS: usize = 8;

/// A process that has mapped an image and forks copies of it. Dropping it kills
/// it; its copies live on.
///
/// It never runs anything of the image, since it keeps the rights to give each
/// copy a user id and a pid namespace of its own.
pub struct Template {
    sandbox: Sandbox,
    plan: Arc<BootPlan>,
    limits: ResourceLimits,
    /// Where its copies write: each to a pipe of its own.
    console: Console,
    seats: Mutex<Vec<Seat>>,
}

/// What a copy needs of its own, made before it is wanted.
struct Seat {
    /// The host's end of its control socket.
    host: OwnedFd,
    /// The copy's own.
    sandbox: OwnedFd,
    /// The host's side of its console.
    console: HostEnd,
    /// The copy's side.
    console_write: OwnedFd,
    limits: Arc<Limits>,
    /// The files that move the copy into its control groups.
    entrances: Vec<OwnedFd>,
    slot: Slot,
}

/// A slot that nobody else has, given back when it is dropped.
struct Slot {
    number: Option<u32>,
    parent: Arc<Connected>,
}

impl Slot {
    fn take(parent: &Arc<Connected>) -> Result<Self, ZygoteError> {
        let number =
            parent.registry().take_slot().ok_or(ZygoteError::Full { limit: parent.limit })?;
        Ok(Self { number: Some(number), parent: parent.clone() })
    }

    /// The user id that goes with it.
    fn id(&self) -> u32 {
        self.parent.id_of_slot(self.number.unwrap_or_default())
    }

    /// Makes the end of the copy that has the slot known; it may have been
    /// reported already. `number` is its number in the parent's pid namespace.
    fn give_to(mut self, number: u32, copy: &Process) {
        let mut registry = self.parent.registry();
        let reported = registry.ended_copies.remove(number);
        // A copy that never came to be may have had the number before.
        match reported.filter(|_| !copy.is_running().unwrap_or(false)) {
            None => {
                let (exit, limits) = (copy.exit.clone(), copy.limits.clone());
                let slot = self.number.take();
                registry.copies.insert(number, Alive { slot, exit, _limits: limits });
            }
            Some(status) => copy.exit.fill(status),
        }
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        if self.number.is_some() {
            self.parent.registry().put_slot(self.number);
        }
    }
}

impl fmt::Debug for Template {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Template").field("pid", &self.pid()).finish_non_exhaustive()
    }
}

impl ZygoteParent {
    /// Makes a template of an image. Takes milliseconds.
    pub fn template(
        &self,
        plan: &Arc<BootPlan>,
        options: &ThawOptions<'_>,
    ) -> Result<Template, TemplateError> {
        let zygote = self.create_for_template()?;
        // Its copies inherit it.
        zygote.join(options.cores)?;
        plan.send(&zygote.control, THAW_AS_TEMPLATE, None, options).map_err(boot_error)?;
        let broker = zygote.broker(plan.rootfs(), options.egress, numbered(&[]))?;
        let mut sandbox = zygote.into_sandbox(broker);
        sandbox.wait_prepared(PATIENCE)?;
        let template = Template {
            sandbox,
            plan: plan.clone(),
            limits: options.limits,
            console: self.config.console.clone(),
            seats: Mutex::default(),
        };
        template.fill_seats()?;
        Ok(template)
    }
}

/// Why there is no template.
#[derive(Debug, thiserror::Error)]
pub enum TemplateError {
    /// Its process could not be made.
    #[error(transparent)]
    Zygote(#[from] ZygoteError),
    /// It could not map the image.
    #[error(transparent)]
    Boot(#[from] BootError),
}

impl Template {
    pub(crate) fn sandbox(&self) -> &Sandbox {
        &self.sandbox
    }

    /// Forks a copy, with a client's connected, non-blocking socket if there is
    /// one. On an error the socket is still with the caller, who may boot
    /// another way.
    pub fn fork(
        &self,
        connection: Option<(Connection, BorrowedFd<'_>)>,
        options: &ThawOptions<'_>,
    ) -> Result<Sandbox, BootError> {
        let copy = self.make_copy(options)?;
        // Last, since the copy may answer and end before this thread runs again:
        // whatever fails up to here has not touched the connection. Meanwhile the
        // copy has taken over the image's memory.
        send_identity(copy.control(), connection, options).map_err(boot_error)?;
        Ok(copy)
    }

    /// Forks a copy that waits to be wanted, as one that was booted ahead from the image
    /// does: all that takes long, and long at times, is done. Call it where nobody waits.
    pub fn fork_ahead(&self, options: &ThawOptions<'_>) -> Result<ReadySandbox, BootError> {
        Ok(ReadySandbox::new(self.make_copy(options)?, self.plan.clone()))
    }

    /// Forks a copy, which takes over the image's memory and then waits for its identity.
    fn make_copy(&self, options: &ThawOptions<'_>) -> Result<Sandbox, BootError> {
        let taken = self.seats.lock().unwrap_or_else(PoisonError::into_inner).pop();
        let Seat { host, sandbox, console, console_write, limits, entrances, slot } = match taken {
            Some(seat) => seat,
            None => self.make_seat().map_err(|error| BootError::Fork(error.to_string()))?,
        };
        // Not woken here: this thread does not sleep until the copy exists.
        self.ask_for_copy(slot.id(), &sandbox, &entrances, &console_write).map_err(boot_error)?;
        // From here on the copy alone has them, so that its end shows.
        drop((sandbox, console_write));
        let failed = |error: io::Error| BootError::Fork(error.to_string());
        let (Numbers { pid, own: own_number }, pidfd) = wait_for_copy(&host).map_err(failed)?;

        console.set_pid(pid);
        // Before it can write anything.
        if let Some(label) = self.sandbox.known_label() {
            console.set_label(label);
        }
        let (exit, parent) = (Arc::default(), slot.parent.clone());
        let (known_as, slot_number) = (KnownAs::Copy(0), slot.number);
        let mut process = Process {
            pid,
            own_number,
            pidfd: Arc::new(pidfd),
            exit,
            limits,
            parent,
            affinity: affinity_of(own_number),
            known_as,
            slot: slot_number,
        };
        let number = verify(&process).map_err(|error| BootError::Fork(error.to_string()))?;
        process.known_as = KnownAs::Copy(number);
        slot.give_to(number, &process);
        process.set_limits(self.limits, options.cpu_time_limit).map_err(BootError::Limits)?;
        let volumes = numbered(options.volumes);
        let broker = broker((&process, &host), self.plan.rootfs(), options.egress, volumes)?;
        Ok(Sandbox::new(process, host, console, broker).thawed_from(&self.plan))
    }

    /// Makes what the next copies need. Call it where nobody waits.
    pub fn fill_seats(&self) -> Result<(), ZygoteError> {
        loop {
            if self.seats.lock().unwrap_or_else(PoisonError::into_inner).len() >= SEATS {
                return Ok(());
            }
            let seat = self.make_seat()?;
            self.seats.lock().unwrap_or_else(PoisonError::into_inner).push(seat);
        }
    }

    fn make_seat(&self) -> Result<Seat, ZygoteError> {
        let during = |step| move |source| ZygoteError::Create { step, source };
        let parent = &self.sandbox.process().parent;
        let (host, sandbox) = message::control_pair().map_err(during("make its socket"))?;
        rustix::io::ioctl_fionbio(&host, true)
            .map_err(|errno| during("make its socket non-blocking")(errno.into()))?;
        // The first message shows which process the copy is.
        rustix::net::sockopt::set_socket_passcred(&host, true)
            .map_err(|errno| during("make its socket")(errno.into()))?;
        let id = parent.registry().next_id().ok_or(ZygoteError::ParentDied)?;
        let slot = Slot::take(parent)?;
        let group = parent.groups.create(id).map_err(during("make its control group"))?;
        let entrances = group.entrances().map_err(during("open its control group"))?;
        let limits = Arc::new(Limits::new(group));
        limits.expect(self.limits);
        let (console, console_write) = self.console.open().map_err(during("make its console"))?;
        Ok(Seat { host, sandbox, console, console_write, limits, entrances, slot })
    }

    /// Sends [`MSG_FORK`].
    fn ask_for_copy(
        &self,
        id: u32,
        control: &OwnedFd,
        entrances: &[OwnedFd],
        console: &OwnedFd,
    ) -> io::Result<()> {
        let body = Fork { id, reserved: 0 };
        let header = message::header(MSG_FORK, size_of::<Fork>(), 0);
        let parts = [IoSlice::new(bytes_of(&header)), IoSlice::new(bytes_of(&body))];
        let descriptors: Vec<_> =
            std::iter::once(control).chain(entrances).chain([console]).map(AsFd::as_fd).collect();
        message::send(self.sandbox.control(), &parts, &descriptors)
    }

    /// What its copies are booted from.
    pub fn plan(&self) -> &Arc<BootPlan> {
        &self.plan
    }

    /// See [`Sandbox::label`]; its copies have the same label.
    pub fn label(&self, label: &Arc<str>) {
        self.sandbox.label(label);
    }

    /// Process id as seen by the caller's `/proc`.
    pub fn pid(&self) -> u32 {
        self.sandbox.pid()
    }

    /// Whether its process has ended.
    pub fn has_ended(&self) -> bool {
        self.sandbox.try_wait().is_some()
    }
}

/// Waits for the first message of a copy, which shows its process.
fn wait_for_copy(control: &OwnedFd) -> io::Result<(Numbers, OwnedFd)> {
    let died = || io::Error::from(io::ErrorKind::UnexpectedEof);
    let mut bytes = [0; size_of::<MessageHeader>()];
    let (len, sender) = loop {
        match message::receive_with_sender(control, &mut bytes) {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => await_input(control)?,
            result => break result?,
        }
    };
    let header: MessageHeader = bytemuck::pod_read_unaligned(&bytes);
    if len != bytes.len() || header.kind != MSG_READY {
        return Err(died());
    }
    let pid = sender.ok_or_else(died)?;
    let pidfd = pidfd_open(pid, PidfdFlags::empty())?;
    // As long as its end of the socket is open, the number is its own.
    let mut events = [PollFd::new(control, PollFlags::empty())];
    poll(&mut events, Some(&Timespec { tv_sec: 0, tv_nsec: 0 }))?;
    if events[0].revents().contains(PollFlags::HUP) {
        return Err(died());
    }
    rustix::net::sockopt::set_socket_passcred(control, false)?;
    Ok((Numbers::of_own(pid, pidfd.as_fd())?, pidfd))
}

/// Looks often at first: whoever sends to a process that sleeps has to wake it,
/// which would take the copy longer than all else that it does before it runs.
fn await_input(control: &OwnedFd) -> io::Result<()> {
    let began = Instant::now();
    while began.elapsed() < EAGERNESS {
        let mut events = [PollFd::new(control, PollFlags::IN)];
        if poll(&mut events, Some(&Timespec { tv_sec: 0, tv_nsec: 0 }))? > 0 {
            return Ok(());
        }
        std::thread::yield_now();
    }
    let timeout = Timespec { tv_sec: FORK_PATIENCE.as_secs() as i64, tv_nsec: 0 };
    loop {
        let mut events = [PollFd::new(control, PollFlags::IN)];
        match poll(&mut events, Some(&timeout)) {
            Ok(0) => return Err(io::Error::from(io::ErrorKind::TimedOut)),
            Ok(_) => return Ok(()),
            Err(Errno::INTR) => {}
            Err(errno) => return Err(errno.into()),
        }
    }
}
