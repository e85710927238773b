//! Readiness of host descriptors.
//!
//! A [`HostFile`] remembers what is known to be possible on its descriptor, so
//! that polling it costs no host call in the steady state: reading is known to
//! be possible until a read comes back short, writing until a write does. What
//! is not known is asked of the host in one call for all descriptors, when no
//! thread can run ([`HostPoll::watch`]) or when a guest polls without waiting
//! ([`check`]). Only descriptors that somebody waits for are asked
//! about, and only for what is not known yet, so that an unread socket does not
//! end every wait at once.

use alloc::sync::{Arc, Weak};
use alloc::vec::Vec;
use core::sync::atomic::{AtomicU32, Ordering};

use crate::errno::{Errno, Result};
use crate::io::{IoSlice, Sink, Source};
use crate::platform::boot_area::AWAITED;
use crate::platform::kernel_lock;
use crate::platform::machine::{HostFd, HostFiles, Machine, Peek, PollFd};
use crate::platform::user::UserAddress;
use crate::state::{OfBoot, kernel};
use crate::sync::KernelCell;
use crate::task::host_process;
use crate::task::wait::{Events, WaitQueue};

const IN: Events = Events::IN.union(Events::RDNORM);
const OUT: Events = Events::OUT.union(Events::WRNORM);
/// What ends a connection: nothing changes after it.
const END: Events = Events::HUP.union(Events::ERR);

/// Small pieces of a write to a socket are gathered up to this size, so that a
/// header and a short body are one host call and one packet.
const GATHER_MAX: usize = 4096;

/// Writes to a descriptor that may block are cut into pieces of this size:
/// the host says that a pipe is writable when this much fits (pipe(7), PIPE_BUF).
const BLOCKING_WRITE_MAX: usize = 4096;

/// After this many polls that were answered without the host, ask it anyway,
/// lest a busy guest never hears of its clients.
const CHECK_EVERY: u32 = 32;

/// Which host descriptor a file stands for. This is saved with the file, the
/// descriptor itself is not.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Handle {
    /// Standard input, output or error, whatever that is in this boot.
    Standard(u8),
    /// A descriptor of one boot; gone in every other.
    OfBoot(OfBoot<HostFd>),
    /// None, as one of another boot.
    Lost,
}

/// How the descriptor behaves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A stream socket: used with `MSG_DONTWAIT`.
    Socket,
    /// As [`Kind::Socket`], and its connect is in progress.
    Connecting,
    /// A datagram socket. An error of it is read like a datagram, and passes.
    Datagram,
    /// A pipe, terminal or file whose host description may block: it is asked
    /// before every read and write.
    MayBlock,
}

/// A file on the host, with what is known about its readiness.
pub struct HostFile {
    handle: KernelCell<Handle>,
    kind: Kind,
    /// Events known to be possible.
    known: AtomicU32,
    /// Events that were possible before the last use and have to be looked at.
    doubtful: AtomicU32,
    queue: Arc<WaitQueue>,
}

impl HostFile {
    /// A file whose changes wake `queue`. Make it known with [`HostPoll::register`].
    pub fn new(handle: Handle, kind: Kind, queue: Arc<WaitQueue>) -> Arc<Self> {
        let (known, doubtful) = match kind {
            // A fresh socket can be written to, and whether it can be read is
            // not known.
            Kind::Socket | Kind::Datagram => (OUT, IN),
            Kind::Connecting | Kind::MayBlock => (Events::empty(), IN | OUT),
        };
        Arc::new(Self {
            handle: KernelCell::new(handle),
            kind,
            known: AtomicU32::new(known.bits()),
            doubtful: AtomicU32::new(doubtful.bits()),
            queue,
        })
    }

    /// A file over a descriptor of this boot, included in every look at the host.
    pub fn of_this_boot(fd: HostFd, kind: Kind, queue: Arc<WaitQueue>) -> Arc<Self> {
        let file = Self::new(Handle::OfBoot(OfBoot::new(fd)), kind, queue);
        host_poll().register(&file);
        file
    }

    /// A socket of an earlier boot is `fd` in this one. Nothing is known of it.
    pub fn goes_on(&self, fd: HostFd) {
        self.handle.set(Handle::OfBoot(OfBoot::new(fd)));
        self.set(OUT, IN);
    }

    /// The descriptor; `ECONNRESET` if it belonged to another boot, `EIO` if
    /// this boot has no such standard descriptor.
    pub fn fd(&self) -> Result<HostFd> {
        match self.handle.get() {
            Handle::OfBoot(fd) => fd.get().copied().ok_or(Errno::ECONNRESET),
            Handle::Lost => Err(Errno::ECONNRESET),
            Handle::Standard(index) => {
                crate::host::stdio::descriptor(index.into()).ok_or(Errno::EIO)
            }
        }
    }

    /// Whether it is the socket of a client, who brings standard input.
    fn is_client(&self) -> bool {
        matches!(self.handle.get(), Handle::Standard(0 | 1))
            && kernel().config.get().reads_requests()
    }

    /// Where to wait for changes.
    pub fn queue(&self) -> &WaitQueue {
        &self.queue
    }

    fn known(&self) -> Events {
        Events::from_bits_truncate(self.known.load(Ordering::Relaxed))
    }

    fn doubtful(&self) -> Events {
        Events::from_bits_truncate(self.doubtful.load(Ordering::Relaxed))
    }

    fn set(&self, known: Events, doubtful: Events) {
        self.known.store(known.bits(), Ordering::Relaxed);
        self.doubtful.store(doubtful.bits(), Ordering::Relaxed);
    }

    /// Notes that `events` are not possible until the host says so again.
    fn clear(&self, events: Events) {
        if !self.known().intersects(END) {
            self.set(self.known() - events, self.doubtful() - events);
        }
    }

    /// Notes that `events` were possible and may still be.
    fn doubt(&self, events: Events) {
        if !self.known().intersects(END) {
            self.set(self.known() - events, self.doubtful() | events);
        }
    }

    /// Notes what the host found.
    fn learn(&self, found: Events) {
        let mut found = with_synonyms(found);
        if self.kind == Kind::Datagram && found.contains(Events::ERR) {
            found = (found - Events::ERR) | IN;
        }
        self.set(self.known() | found, self.doubtful() - found);
    }

    /// Notes that reading has come to the end of the stream: that lasts.
    fn note_end_of_stream(&self) {
        self.learn(Events::IN | Events::RDHUP);
    }

    /// Events that the host may be asked about: those not known.
    fn unknown(&self) -> Events {
        if self.known().intersects(END) {
            return Events::empty();
        }
        (Events::IN | Events::OUT | Events::RDHUP) - self.known()
    }

    /// What is possible now. Asks the host only about what is in doubt. A
    /// descriptor of another boot is hung up.
    pub fn poll(&self) -> Events {
        let Ok(fd) = self.fd() else {
            return IN | OUT | END | Events::RDHUP;
        };
        if self.doubtful().is_empty() {
            return self.known();
        }
        self.ask(fd);
        self.known()
    }

    /// One call to the host about this descriptor alone.
    fn ask(&self, fd: HostFd) {
        let mut request = [PollFd { fd: fd.0, events: self.unknown().bits() as i16, revents: 0 }];
        let found = match Machine::poll(&mut request, Some(0)) {
            Ok(_) => Events::from_bits_truncate(request[0].revents as u16 as u32),
            Err(_) => Events::empty(),
        };
        self.set(self.known(), Events::empty());
        self.learn(found);
    }

    /// Whether reading can be expected to yield something now.
    fn may_use(&self, fd: HostFd, events: Events) -> bool {
        if self.kind != Kind::MayBlock || self.known().intersects(events | END) {
            return true;
        }
        self.ask(fd);
        self.known().intersects(events | END)
    }

    /// Reads into `sink`; `EAGAIN` if there is nothing.
    pub fn read(&self, sink: &mut Sink<'_>, peek: Peek) -> Result<usize> {
        let fd = self.fd()?;
        if !self.may_use(fd, Events::IN) {
            return Err(Errno::EAGAIN);
        }
        let mut done = 0;
        while let Some(mut piece) = sink.next_piece() {
            let (at, len) = (piece.address(), piece.len());
            let outcome = retry_after_fault(at, len, Touch::ToWrite, || match self.kind {
                Kind::MayBlock if self.is_client() => Machine::recv(fd, piece.first(len), peek),
                Kind::MayBlock => Machine::read(fd, piece.first(len)),
                // The watcher may find news meanwhile, which is then taken for
                // dealt with: the host is asked again before anybody waits.
                _ => kernel_lock::unlocked(|| Machine::recv(fd, piece.first(len), peek)),
            });
            match outcome {
                Ok(count) => {
                    sink.advance(count);
                    done += count;
                    if count == 0 {
                        if self.kind != Kind::MayBlock {
                            self.note_end_of_stream();
                        }
                        break;
                    }
                    if count < len && peek == Peek::No {
                        self.clear(IN);
                    } else {
                        self.doubt(IN);
                    }
                    // A second look would see the same bytes, and a second read
                    // of what may block would have to ask first.
                    if count < len || peek == Peek::Yes || self.kind == Kind::MayBlock {
                        break;
                    }
                }
                Err(error) => {
                    if error == Errno::EAGAIN {
                        self.clear(IN);
                    }
                    return if done > 0 { Ok(done) } else { Err(error) };
                }
            }
        }
        Ok(done)
    }

    /// Sends a datagram whole.
    pub fn send_datagram(&self, bytes: &[u8]) -> Result<()> {
        Machine::send(self.fd()?, bytes.into()).map(drop)
    }

    /// Receives a datagram, or with `peek` looks at it: bytes stored, and bytes
    /// that it has.
    pub fn receive_datagram(&self, sink: &mut Sink<'_>, peek: bool) -> Result<(usize, usize)> {
        const DATAGRAM_MAX: usize = 65_536;
        let fd = self.fd()?;
        let mut buffer = alloc::vec![0u8; sink.remaining().clamp(1, DATAGRAM_MAX)];
        let peek = if peek { Peek::Yes } else { Peek::No };
        let outcome = Machine::recv_datagram(fd, &mut buffer, peek);
        match outcome {
            Err(Errno::EAGAIN) => self.clear(IN),
            _ => self.doubt(IN),
        }
        let length = outcome?;
        let bytes = sink.put(&buffer[..length.min(buffer.len())])?;
        Ok((bytes, length))
    }

    /// Writes from `source`; `EAGAIN` if nothing can be written now.
    pub fn write(&self, source: &mut Source<'_>) -> Result<usize> {
        let fd = self.fd()?;
        let mut done = 0;
        while let Some(piece) = source.next_piece() {
            if !self.may_use(fd, Events::OUT) {
                return if done > 0 { Ok(done) } else { Err(Errno::EAGAIN) };
            }
            let mut gathered: [u8; GATHER_MAX];
            let piece: IoSlice<'_> = if self.kind == Kind::MayBlock {
                piece.first(BLOCKING_WRITE_MAX)
            } else if piece.len() < GATHER_MAX && piece.len() < source.remaining() {
                gathered = [0; GATHER_MAX];
                let len = source.peek(&mut gathered)?;
                gathered[..len].into()
            } else {
                piece
            };
            let len = piece.len();
            let outcome =
                retry_after_fault(piece.address(), len, Touch::ToRead, || match self.kind {
                    Kind::MayBlock => Machine::write(fd, piece),
                    _ => kernel_lock::unlocked(|| Machine::send(fd, piece)),
                });
            match outcome {
                Ok(count) => {
                    source.advance(count);
                    done += count;
                    if self.kind == Kind::MayBlock {
                        self.doubt(OUT);
                    }
                    if count < len {
                        self.clear(OUT);
                        break;
                    }
                }
                Err(error) => {
                    if error == Errno::EAGAIN {
                        self.clear(OUT);
                    }
                    return if done > 0 { Ok(done) } else { Err(error) };
                }
            }
        }
        Ok(done)
    }
}

fn with_synonyms(events: Events) -> Events {
    let mut all = events;
    if events.contains(Events::IN) {
        all |= Events::RDNORM;
    }
    if events.contains(Events::OUT) {
        all |= Events::WRNORM;
    }
    all
}

/// What a host call does with guest memory.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Touch {
    ToRead,
    ToWrite,
}

impl Touch {
    /// Has the memory at an address made, if it is the guest's; it stays as it is.
    fn page_of(self, address: UserAddress) -> Result<()> {
        match self {
            Self::ToRead => address.read::<u8>().map(drop),
            // Another thread may write there just now.
            Self::ToWrite => UserAddress(address.0 & !3).update_u32(Some).map(drop),
        }
    }
}

/// Makes a host call on guest memory. The host knows nothing of memory that
/// the kernel maps when it is first touched, and fails where it has no memory left for a page that is
/// written first, for which a page fault waits: after `EFAULT`, touch it and try once more.
fn retry_after_fault(
    at: u64,
    len: usize,
    touch: Touch,
    mut call: impl FnMut() -> Result<usize>,
) -> Result<usize> {
    match call() {
        Err(Errno::EFAULT) => {
            let mut page = at;
            while page < at + len as u64 {
                if touch.page_of(UserAddress(page)).is_err() {
                    break;
                }
                page = (page & !4095) + 4096;
            }
            call()
        }
        outcome => outcome,
    }
}

/// Takes from the wake socket what was sent to it.
fn drain(socket: HostFd) {
    let mut received = [0u8; 256];
    // A short receive has taken all there was.
    while Machine::recv(socket, received[..].as_mut().into(), Peek::No) == Ok(received.len()) {}
}

/// What ended a wait for the host.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Waited {
    /// There is a message on the control socket.
    pub control: bool,
    /// How many files had news.
    pub files: usize,
    /// A host signal came in between.
    pub interrupted: bool,
}

/// The host-backed files of the sandbox. Saved, but what belongs to another
/// boot is dropped at the first look.
#[derive(Default)]
pub struct HostPoll {
    files: KernelCell<Vec<Weak<HostFile>>>,
    /// Reused from call to call.
    requests: KernelCell<Requests>,
    /// Descriptors and events that the watcher waits for.
    watched: KernelCell<Vec<(i32, i16)>>,
    busy: AtomicU32,
}

#[derive(Default)]
struct Requests {
    fds: Vec<PollFd>,
    files: Vec<Arc<HostFile>>,
    /// Whether the control socket comes behind the files.
    has_control: bool,
}

impl HostPoll {
    /// No files.
    pub const fn new() -> Self {
        Self {
            files: KernelCell::new(Vec::new()),
            requests: KernelCell::new(Requests {
                fds: Vec::new(),
                files: Vec::new(),
                has_control: false,
            }),
            watched: KernelCell::new(Vec::new()),
            busy: AtomicU32::new(0),
        }
    }

    /// Includes `file` in every look at the host, for as long as it lives.
    pub fn register(&self, file: &Arc<HostFile>) {
        let mut files = self.files.borrow_mut();
        files.retain(|file| file.strong_count() > 0);
        files.push(Arc::downgrade(file));
    }

    /// Looks at the host without waiting and wakes those who wait for what it
    /// finds; `control` is the control socket.
    pub fn look(&self, control: Option<HostFd>) -> Waited {
        let requests = self.requests(control, None);
        if requests.fds.is_empty() {
            self.give_back(requests);
            return Waited::default();
        }
        let mut requests = requests;
        let outcome = Machine::poll(&mut requests.fds, Some(0));
        self.finish(requests, outcome.is_ok())
    }

    /// Waits in the host until the control socket, the wake socket or a file has news,
    /// for at most `timeout_ns`, and wakes those who wait for it. The kernel
    /// lock is given up meanwhile.
    pub fn watch(&self, timeout_ns: Option<u64>) -> Waited {
        use crate::host::control;
        use crate::mm::arena;
        let wake_socket = arena::wake_socket().filter(|_| kernel_lock::is_enabled());
        let mut requests = self.requests(Some(control::CONTROL), wake_socket);
        if wake_socket.is_some() {
            let mut watched = self.watched.borrow_mut();
            watched.clear();
            watched.extend(requests.fds.iter().map(|request| (request.fd, request.events)));
        }
        kernel_lock::release();
        let mut outcome = Machine::poll(&mut requests.fds, timeout_ns);
        kernel_lock::acquire();
        if host_process::settle() {
            // What was found then does not hold any more.
            outcome = Err(Errno::EINTR);
        }
        if let Some(wake_socket) = wake_socket
            && outcome.is_ok()
            && requests.fds.last().is_some_and(|request| request.revents != 0)
        {
            drain(wake_socket);
        }
        self.finish(requests, outcome.is_ok())
    }

    /// Notes outside of all saved memory what the watcher would wait for; how many descriptors, or
    /// `None` if there is no room for them. The control socket comes first.
    fn note_awaited(&self) -> Option<usize> {
        let requests = self.requests(None, None);
        let control = PollFd {
            fd: crate::host::control::CONTROL.0,
            events: Events::IN.bits() as i16,
            revents: 0,
        };
        let count = requests.fds.len() + 1;
        let fits = count <= AWAITED.capacity();
        if fits {
            let wanted = core::iter::once(&control).chain(&requests.fds);
            AWAITED.cells(count).iter().zip(wanted).for_each(|(place, wanted)| place.set(*wanted));
        }
        self.give_back(requests);
        fits.then_some(count)
    }

    /// Whether somebody waits for something that the watcher does not watch.
    pub fn has_unwatched(&self) -> bool {
        let requests = self.requests(None, None);
        let any = {
            let watched = self.watched.borrow_mut();
            requests.fds.iter().any(|wanted| {
                !watched.iter().any(|&(fd, events)| fd == wanted.fd && wanted.events & !events == 0)
            })
        };
        self.give_back(requests);
        any
    }

    /// What to ask the host: the files that somebody waits for, the control
    /// socket and the wake socket, in this order.
    fn requests(&self, control: Option<HostFd>, wake_socket: Option<HostFd>) -> Requests {
        let mut requests = core::mem::take(&mut *self.requests.borrow_mut());
        requests.fds.clear();
        requests.files.clear();
        requests.has_control = control.is_some();
        for file in self.files.borrow_mut().iter().filter_map(Weak::upgrade) {
            let (Ok(fd), false, asked) = (file.fd(), file.queue.is_empty(), file.unknown()) else {
                continue;
            };
            if !asked.is_empty() {
                requests.fds.push(PollFd { fd: fd.0, events: asked.bits() as i16, revents: 0 });
                requests.files.push(file);
            }
        }
        for fd in [control, wake_socket].into_iter().flatten() {
            let events = Events::IN.bits() as i16;
            requests.fds.push(PollFd { fd: fd.0, events, revents: 0 });
        }
        requests
    }

    fn finish(&self, requests: Requests, is_ok: bool) -> Waited {
        let mut waited = Waited { interrupted: !is_ok, ..Waited::default() };
        if is_ok {
            waited.control = requests.has_control
                && requests.fds.get(requests.files.len()).is_some_and(|r| r.revents != 0);
            for (file, request) in requests.files.iter().zip(&requests.fds) {
                let found = Events::from_bits_truncate(request.revents as u16 as u32);
                if !found.is_empty() {
                    waited.files += 1;
                    file.learn(found);
                    file.queue.wake_all(with_synonyms(found));
                }
            }
        }
        self.give_back(requests);
        waited
    }

    /// Keeps the memory of a list, not the files.
    fn give_back(&self, mut requests: Requests) {
        requests.files.clear();
        *self.requests.borrow_mut() = requests;
    }

    /// Wakes those who wait for a descriptor that is not of this boot, after a
    /// thaw: nothing else would ever tell them that it is gone.
    pub fn wake_lost(&self) {
        let files: Vec<_> = self.files.borrow_mut().iter().filter_map(Weak::upgrade).collect();
        for file in files.iter().filter(|file| file.fd().is_err()) {
            file.queue.wake_all(IN | OUT | END | Events::RDHUP);
        }
    }

    /// The descriptor of a standard stream is another one from now on: nothing is
    /// known of it, and those who wait look again.
    pub fn renewed(&self, stream: u8) {
        for file in self.standard(stream) {
            file.set(Events::empty(), IN | OUT);
            file.queue.wake_all(IN | OUT);
        }
    }

    /// Whether somebody waits for a standard stream.
    pub fn is_awaited(&self, stream: u8) -> bool {
        self.standard(stream).iter().any(|file| !file.queue.is_empty())
    }

    fn standard(&self, stream: u8) -> Vec<Arc<HostFile>> {
        let files = self.files.borrow_mut();
        let all = files.iter().filter_map(Weak::upgrade);
        all.filter(|file| file.handle.get() == Handle::Standard(stream)).collect()
    }

    /// Whether a socket has something to read, as of a look made now.
    pub fn has_unread_data(&self) -> bool {
        let files: Vec<_> = self.files.borrow_mut().iter().filter_map(Weak::upgrade).collect();
        files.iter().filter(|file| file.kind == Kind::Socket).any(|file| {
            // The end of the stream is readable too, but is no data.
            let look = |fd| Machine::recv(fd, [0u8; 1][..].as_mut().into(), Peek::Yes);
            file.fd().and_then(look).is_ok_and(|count| count > 0)
        })
    }
}

fn host_poll() -> &'static HostPoll {
    &kernel().host_poll
}

/// See [`HostPoll::watch`]; whether there is a message on the control socket.
pub fn watch(timeout_ns: Option<u64>) -> bool {
    host_poll().watch(timeout_ns).control
}

/// See [`HostPoll::note_awaited`].
pub fn note_awaited() -> Option<usize> {
    host_poll().note_awaited()
}

/// See [`HostPoll::has_unwatched`].
pub fn has_unwatched() -> bool {
    host_poll().has_unwatched()
}

/// Looks at the host without waiting: at the files, and at the control socket,
/// so that a guest which polls and never rests hears of new clients.
pub fn check() {
    let control = Some(crate::host::control::CONTROL);
    let polls = host_poll();
    polls.busy.store(0, Ordering::Relaxed);
    crate::task::host_process::note_look();
    if polls.look(control).control || crate::host::control::has_kept() {
        crate::host::control::handle_messages();
        if let Some(thread) = crate::task::thread::running()
            && !crate::task::host_process::may_run_threads()
        {
            // All threads are to rest: on its way out this one does.
            thread.needs_attention();
        }
    }
}

/// Counts a poll that found something without the host; looks at the host now
/// and then.
pub fn note_busy() {
    if host_poll().busy.fetch_add(1, Ordering::Relaxed) >= CHECK_EVERY {
        check();
    }
}

#[cfg(test)]
#[path = "host_poll_tests.rs"]
mod tests;
