//! Pseudo terminals (pty(7)): the master, which a terminal emulator holds, and
//! the slave, which programs take for their terminal.

use alloc::string::String;
use alloc::sync::Arc;
use core::sync::atomic::{AtomicBool, AtomicU32, Ordering::Relaxed};

use super::discipline::{Discipline, Effect};
use super::ioctl;
use super::job::{self, JobControl};
use super::termios::{TOSTOP, WinSize};
use crate::errno::{Errno, Result};
use crate::fs::file::{Events, File, OpenFlags, Stat};
use crate::fs::inode::Attributes;
use crate::io::{Sink, Source};
use crate::platform::user::UserAddress;
use crate::state::kernel;
use crate::sync::KernelCell;
use crate::task::signal::SIGWINCH;
use crate::task::thread::running;
use crate::task::user_namespace::UserNamespace;
use crate::task::wait::WaitQueue;
use crate::task::{Capabilities, Thread};

/// The user namespace of the running process, or the initial one if none runs.
fn users_of_caller() -> UserNamespace {
    let users = |thread: &Thread| thread.process.credentials.borrow_mut().user_namespace.clone();
    running().map_or(UserNamespace::INITIAL, |thread| users(&thread))
}

/// Bytes moved between two looks at the queues.
const CHUNK: usize = 256;

/// Takes bytes as long as `take` takes all of a chunk; it returns how many it has taken. Returns the bytes
/// taken; `EAGAIN` if that is none.
fn take_while(source: &mut Source<'_>, mut take: impl FnMut(&[u8]) -> usize) -> Result<usize> {
    let mut done = 0;
    while source.remaining() > 0 {
        let mut chunk = [0; CHUNK];
        let count = match source.peek(&mut chunk) {
            Ok(count) => count,
            Err(error) if done == 0 => return Err(error),
            Err(_) => break,
        };
        let taken = take(&chunk[..count]);
        source.advance(taken);
        done += taken;
        if taken < count {
            break;
        }
    }
    if done == 0 && source.remaining() > 0 { Err(Errno::EAGAIN) } else { Ok(done) }
}

/// A pseudo terminal.
pub struct Pty {
    /// Its number: the name of the slave in `/dev/pts`.
    pub number: u32,
    /// Line discipline and everything in flight.
    pub discipline: KernelCell<Discipline>,
    /// Size of the window.
    pub size: KernelCell<WinSize>,
    /// Session and foreground group.
    pub job: KernelCell<JobControl>,
    /// The user namespace that it was made in: it has a name in this one and those above.
    pub users: UserNamespace,
    /// Permissions, owner and group of the slave's name.
    pub access: KernelCell<Access>,
    /// The slave cannot be opened yet (`TIOCSPTLCK`).
    pub locked: AtomicBool,
    /// The slave cannot be opened again (`TIOCEXCL`).
    pub exclusive: AtomicBool,
    /// Packet mode, with what has happened since the last read (`TIOCPKT`).
    pub packet: KernelCell<Option<u8>>,
    /// Open slaves.
    slaves: AtomicU32,
    /// The slave was open at some time.
    was_opened: AtomicBool,
    /// The master is closed: the terminal is hung up.
    hung_up: AtomicBool,
    slave_queue: WaitQueue,
    master_queue: WaitQueue,
}

/// Who may open the slave.
#[derive(Clone, Copy, Debug)]
#[allow(missing_docs)]
pub struct Access {
    pub permissions: u32,
    pub uid: u32,
    pub gid: u32,
}

/// `TIOCPKT_*`: input or output was flushed, output was stopped or started.
pub const PACKET_FLUSH_READ: u8 = 1;
/// See [`PACKET_FLUSH_READ`].
pub const PACKET_FLUSH_WRITE: u8 = 2;
/// See [`PACKET_FLUSH_READ`].
pub const PACKET_STOP: u8 = 4;
/// See [`PACKET_FLUSH_READ`].
pub const PACKET_START: u8 = 8;

impl Pty {
    /// A pseudo terminal whose slave is locked.
    pub fn new(number: u32, (uid, gid): (u32, u32)) -> Arc<Self> {
        Arc::new(Self {
            number,
            discipline: KernelCell::default(),
            size: KernelCell::default(),
            job: KernelCell::default(),
            users: users_of_caller(),
            access: KernelCell::new(Access { permissions: 0o620, uid, gid }),
            locked: AtomicBool::new(true),
            exclusive: AtomicBool::new(false),
            packet: KernelCell::new(None),
            slaves: AtomicU32::new(0),
            was_opened: AtomicBool::new(false),
            hung_up: AtomicBool::new(false),
            slave_queue: WaitQueue::new(),
            master_queue: WaitQueue::new(),
        })
    }

    /// Whether the master is closed.
    pub fn is_hung_up(&self) -> bool {
        self.hung_up.load(Relaxed)
    }

    /// The window has another size.
    pub fn resize(&self, size: WinSize) {
        if self.size.get() != size {
            self.size.set(size);
            job::signal_foreground(&self.job, SIGWINCH);
        }
    }

    /// Tells both ends that something has changed.
    pub fn wake(&self) {
        self.slave_queue.wake_all(Events::IN | Events::OUT | Events::RDNORM | Events::WRNORM);
        self.master_queue.wake_all(Events::IN | Events::OUT | Events::RDNORM | Events::WRNORM);
    }

    /// Notes what a master in packet mode is told next.
    pub fn note_packet(&self, what: u8) {
        if let Some(status) = self.packet.borrow_mut().as_mut() {
            // The latest of two opposites counts.
            let opposite = match what {
                PACKET_STOP => PACKET_START,
                PACKET_START => PACKET_STOP,
                _ => 0,
            };
            *status = (*status & !opposite) | what;
        }
    }

    /// Whether no slave is open any more.
    fn slave_is_gone(&self) -> bool {
        self.slaves.load(Relaxed) == 0 && self.was_opened.load(Relaxed)
    }
}

impl Drop for Pty {
    fn drop(&mut self) {
        kernel().fs.terminals.forget(self.number);
    }
}

/// An open master.
pub struct Master {
    pty: Arc<Pty>,
}

impl Master {
    /// The master of a pseudo terminal that has none yet.
    pub fn of(pty: Arc<Pty>) -> Self {
        Self { pty }
    }

    /// Opens `/dev/ptmx`: makes a new pseudo terminal.
    pub fn open(owner: (u32, u32)) -> Result<Arc<dyn File>> {
        Ok(Arc::new(Self::of(kernel().fs.terminals.new_pty(owner)?)))
    }

    /// Packet mode: what is told instead of data, if anything.
    fn packet_status(&self) -> Option<u8> {
        self.pty.packet.borrow_mut().as_mut().map(core::mem::take)
    }
}

impl File for Master {
    fn read(&self, sink: &mut Sink<'_>, _: u64) -> Result<usize> {
        let room = sink.remaining();
        if room == 0 {
            return Ok(0);
        }
        let mut head = 0;
        if let Some(status) = self.packet_status() {
            if status != 0 {
                return sink.put(&[status]);
            }
            head = 1;
        }
        let bytes: alloc::vec::Vec<u8> = {
            let output = &mut self.pty.discipline.borrow_mut().output;
            let count = output.len().min(room - head);
            core::iter::repeat_n(0, head).chain(output.drain(..count)).collect()
        };
        if bytes.len() == head {
            return Err(if self.pty.slave_is_gone() { Errno::EIO } else { Errno::EAGAIN });
        }
        let outcome = sink.put(&bytes);
        self.pty.slave_queue.wake_all(Events::OUT | Events::WRNORM);
        outcome
    }

    fn write(&self, source: &mut Source<'_>, _: u64) -> Result<usize> {
        let done = take_while(source, |chunk| {
            chunk.iter().take_while(|&&byte| self.receive(byte)).count()
        })?;
        self.pty.wake();
        Ok(done)
    }

    fn poll(&self) -> Events {
        let discipline = self.pty.discipline.borrow_mut();
        let mut events = Events::empty();
        let told = self.pty.packet.borrow_mut().is_some_and(|status| status != 0);
        if !discipline.output.is_empty() || told {
            events |= Events::IN | Events::RDNORM;
        }
        if told {
            events |= Events::PRI;
        }
        if discipline.has_room() {
            events |= Events::OUT | Events::WRNORM;
        }
        if self.pty.slave_is_gone() {
            events |= Events::HUP;
        }
        events
    }

    fn wait_queue(&self) -> Option<&WaitQueue> {
        Some(&self.pty.master_queue)
    }

    fn stat(&self) -> Result<Stat> {
        Ok(slave_attributes(&self.pty).to_stat())
    }

    fn ioctl(&self, request: u32, argument: UserAddress) -> Result<u64> {
        ioctl::master(&self.pty, request, argument)
    }

    fn description(&self) -> String {
        String::from("/dev/ptmx")
    }
}

impl Master {
    /// Types a byte; `false` if there is no room for it.
    fn receive(&self, byte: u8) -> bool {
        let effect = {
            let mut discipline = self.pty.discipline.borrow_mut();
            if !discipline.has_room() {
                return false;
            }
            let was_stopped = discipline.stopped;
            let effect = discipline.receive(byte);
            match (was_stopped, discipline.stopped) {
                (false, true) => self.pty.note_packet(PACKET_STOP),
                (true, false) => self.pty.note_packet(PACKET_START),
                _ => {}
            }
            effect
        };
        if let Effect::Signal(signal) = effect {
            job::signal_foreground(&self.pty.job, signal);
        }
        true
    }
}

impl Drop for Master {
    fn drop(&mut self) {
        self.pty.hung_up.store(true, Relaxed);
        job::hang_up(&self.pty.job);
        self.pty.slave_queue.wake_all(Events::IN | Events::OUT | Events::ERR | Events::HUP);
    }
}

/// An open slave.
pub struct Slave {
    pty: Arc<Pty>,
}

impl Slave {
    /// Opens the slave; `EIO` while it is locked and after a hang-up.
    pub fn open(pty: &Arc<Pty>, flags: OpenFlags) -> Result<Arc<dyn File>> {
        if pty.is_hung_up() || pty.locked.load(Relaxed) {
            return Err(Errno::EIO);
        }
        let may =
            crate::task::current_process().credentials.borrow_mut().can(Capabilities::SYS_ADMIN);
        if pty.exclusive.load(Relaxed) && !may {
            return Err(Errno::EBUSY);
        }
        pty.slaves.fetch_add(1, Relaxed);
        pty.was_opened.store(true, Relaxed);
        if !flags.contains(OpenFlags::NOCTTY) && flags.can_read() {
            job::acquire_if_free(&pty.job);
        }
        Ok(Arc::new(Self { pty: pty.clone() }))
    }
}

impl Slave {
    /// Copies bytes that a read takes, which leaves room for others.
    fn hand_out(&self, sink: &mut Sink<'_>, bytes: &[u8]) -> Result<usize> {
        let outcome = sink.put(bytes);
        self.pty.master_queue.wake_all(Events::OUT | Events::WRNORM);
        outcome
    }
}

impl File for Slave {
    fn read(&self, sink: &mut Sink<'_>, _: u64) -> Result<usize> {
        if self.pty.is_hung_up() {
            return Ok(0);
        }
        job::check_read(&self.pty.job)?;
        let bytes = self.pty.discipline.borrow_mut().read(sink.remaining()).ok_or(Errno::EAGAIN)?;
        self.hand_out(sink, &bytes)
    }

    fn write(&self, source: &mut Source<'_>, _: u64) -> Result<usize> {
        if self.pty.is_hung_up() {
            return Err(Errno::EIO);
        }
        if self.pty.discipline.borrow_mut().termios.has_local(TOSTOP) {
            job::check_change(&self.pty.job)?;
        }
        let done = take_while(source, |chunk| {
            let mut discipline = self.pty.discipline.borrow_mut();
            chunk.iter().take_while(|&&byte| discipline.send(byte)).count()
        })?;
        self.pty.master_queue.wake_all(Events::IN | Events::RDNORM);
        Ok(done)
    }

    fn poll(&self) -> Events {
        if self.pty.is_hung_up() {
            return Events::IN
                | Events::OUT
                | Events::ERR
                | Events::HUP
                | Events::RDNORM
                | Events::WRNORM;
        }
        let discipline = self.pty.discipline.borrow_mut();
        let mut events = Events::empty();
        if discipline.is_readable() {
            events |= Events::IN | Events::RDNORM;
        }
        if discipline.output.len() < super::discipline::OUTPUT_MAX && !discipline.stopped {
            events |= Events::OUT | Events::WRNORM;
        }
        events
    }

    fn wait_queue(&self) -> Option<&WaitQueue> {
        Some(&self.pty.slave_queue)
    }

    fn read_timeout_ns(&self) -> Option<u64> {
        self.pty.discipline.borrow_mut().timeout_ns()
    }

    fn timeout_ends_read(&self) -> bool {
        true
    }

    fn bytes_waiting(&self) -> usize {
        self.pty.discipline.borrow_mut().available()
    }

    fn take_waiting(&self, sink: &mut Sink<'_>) -> Result<usize> {
        let bytes = self.pty.discipline.borrow_mut().take(sink.remaining());
        self.hand_out(sink, &bytes)
    }

    fn stat(&self) -> Result<Stat> {
        Ok(slave_attributes(&self.pty).to_stat())
    }

    fn ioctl(&self, request: u32, argument: UserAddress) -> Result<u64> {
        if self.pty.is_hung_up() {
            return Err(Errno::EIO);
        }
        ioctl::slave(&self.pty, request, argument)
    }

    fn description(&self) -> String {
        alloc::format!("/dev/pts/{}", self.pty.number)
    }
}

impl Drop for Slave {
    fn drop(&mut self) {
        if self.pty.slaves.fetch_sub(1, Relaxed) == 1 {
            self.pty.exclusive.store(false, Relaxed);
            self.pty.master_queue.wake_all(Events::HUP | Events::IN);
        }
    }
}

/// Attributes of the slave's name.
pub fn slave_attributes(pty: &Pty) -> Attributes {
    let access = *pty.access.borrow_mut();
    super::devpts::attributes(u64::from(pty.number) + 3, pty.number, access)
}
