//! The life of a state helper: it serves one request after the other, each with a worker.
//!
//! The helper itself parses nothing but requests of its caller, and files of `/proc` that
//! the host's kernel writes.
#![allow(unsafe_code)]

use std::fs::File;
use std::io::{self, IoSlice};
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::time::Instant;

use bytemuck::{Pod, pod_read_unaligned};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
use rustix::process::{Pid, WaitOptions, waitpid};
use thaw_abi::image::{Ancestor, Mapping};

use super::confine::become_worker;
use super::processes::{FIRST_PROCESS, Sandbox, Space};
use super::protocol::{
    ANSWER_DONE, ANSWER_FAILED, ANSWER_FIRST, ANSWER_IDLE, ANSWER_READ, Answer, BLOBS_AT_ONCE,
    BLOBS_MAX, BlobReply, ERROR_BASE, ERROR_BLOB, ERROR_HOST, ERROR_MEMORY, ERROR_PANIC,
    ERROR_REPORT, ERROR_SANDBOX_ENDED, ERROR_TOO_LARGE, ERROR_TOO_MANY_MAPPINGS, ERROR_WRITE,
    FREEZE_IN_MEMORY, FreezeRequest, PACKET_MAX, PIECE_MAX, REPLY_BLOB, REQUEST_CHECK,
    REQUEST_FREEZE, REQUEST_MEMORY, REQUEST_RECORD, REQUEST_UNCHANGED, RecordRequest,
    UnchangedRequest, errno_of,
};
use crate::freeze::{FreezeError, FreezeReport, Order, Source, serve_mate, write_image};
use crate::memory::SandboxMemory;
use crate::message;
use crate::sys;
use crate::trim::{self, FileId};
use crate::working_set::{RECORDING_MAX, record};

/// Most mappings that a recording looks at; those of one process are far fewer.
const MAPPINGS_MAX: u32 = 1 << 16;

/// Serves requests until the caller closes its end of `control`. Returns the exit code of
/// the helper, and of a worker.
pub(super) fn serve(control: OwnedFd, proc: OwnedFd) -> i32 {
    let mut packet = vec![0; PACKET_MAX];
    loop {
        let mut descriptors = Vec::new();
        let len = match message::receive(&control, &mut packet, Some(&mut descriptors)) {
            Ok(received) if received.truncated || received.descriptors_dropped => return 1,
            Ok(received) => received.len,
            Err(_) => return 1,
        };
        if len == 0 {
            return 0;
        }
        let mut descriptors = descriptors.into_iter();
        let (socket, pidfd) = (descriptors.next(), descriptors.next());
        let (Some(socket), Some(pidfd)) = (socket, pidfd) else { return 1 };
        let files = descriptors.map(File::from).collect();
        let Some(work) = Work::of(&packet[..len], files) else { return 1 };
        let opened = open(&work, &proc, pidfd).and_then(|sandbox| {
            let (mate, remote) = match work.wants_mate().then(fork_mate).transpose()? {
                Some(Mate::Itself(own)) => return Ok(Made::Mate(own, sandbox)),
                Some(Mate::Of(mate, remote)) => (Some(mate), Some(remote)),
                None => (None, None),
            };
            // SAFETY: the helper has one thread.
            match unsafe { sys::fork() } {
                Ok(None) => Ok(Made::Worker(sandbox, remote)),
                Ok(Some(worker)) => Ok(Made::Both(worker, mate)),
                Err(error) => {
                    // It sees the end of its socket.
                    drop(remote);
                    mate.map(has_done);
                    Err(error)
                }
            }
        });
        match opened {
            // A worker that was taken over must not speak for the helper.
            Ok(Made::Worker(sandbox, mate)) => {
                drop((control, proc));
                return i32::from(run_worker(socket, work, sandbox, mate).is_err());
            }
            Ok(Made::Mate(own, sandbox)) => {
                drop((control, proc, socket));
                return i32::from(run_mate(&own, work, sandbox).is_err());
            }
            Ok(Made::Both(worker, mate)) => {
                drop((socket, work));
                // The caller sees the end of the worker's socket, and starts another helper.
                if !has_done(worker) || mate.is_some_and(|mate| !has_done(mate)) {
                    return 1;
                }
            }
            Err(error) => {
                if send_all(&socket, &host_error(&error)).is_err() {
                    return 1;
                }
            }
        }
        if send(&control, &Answer::new(ANSWER_IDLE).with_text("")).is_err() {
            return 1;
        }
        // The worker of the next request has a copy of it.
        packet[..len].fill(0);
    }
}

/// What a process is after the forks for a request.
enum Made {
    /// A worker, with the socket of its mate if it has one.
    Worker(Sandbox, Option<OwnedFd>),
    /// Its mate.
    Mate(OwnedFd, Sandbox),
    /// The helper.
    Both(Pid, Option<Pid>),
}

/// Which side of the fork of a mate this is.
enum Mate {
    /// The mate, with its end of the socket.
    Itself(OwnedFd),
    /// The helper, with the mate's process and the worker's end.
    Of(Pid, OwnedFd),
}

/// Forks a second worker, which copies what the first one says.
fn fork_mate() -> io::Result<Mate> {
    let kind = (AddressFamily::UNIX, SocketType::SEQPACKET);
    let (remote, own) = socketpair(kind.0, kind.1, SocketFlags::CLOEXEC, None)?;
    // SAFETY: the helper has one thread.
    Ok(match unsafe { sys::fork() }? {
        None => Mate::Itself(own),
        Some(mate) => Mate::Of(mate, remote),
    })
}

/// The life of a worker.
///
/// # Errors
/// The caller is gone, or has sent what no caller sends.
fn run_worker(
    socket: OwnedFd,
    work: Work,
    sandbox: Sandbox,
    mate: Option<OwnedFd>,
) -> io::Result<()> {
    let socket = Arc::new(socket);
    tell_of_panics(&socket);
    become_worker()?;
    let answers = work.answer(&socket, sandbox, mate)?;
    send_all(&socket, &answers)
}

/// The life of a worker's mate.
///
/// # Errors
/// The worker has sent what none sends.
fn run_mate(own: &OwnedFd, work: Work, sandbox: Sandbox) -> io::Result<()> {
    become_worker()?;
    match work {
        Work::Freeze { image, .. } => serve_mate(own, sandbox, &image),
        _ => Ok(()),
    }
}

/// Waits for the end of a worker; false if it has crashed or was killed.
fn has_done(worker: Pid) -> bool {
    loop {
        match waitpid(Some(worker), WaitOptions::empty()) {
            Err(Errno::INTR) => {}
            ended => return matches!(ended, Ok(Some((_, end))) if end.exit_status() == Some(0)),
        }
    }
}

/// A request.
enum Work {
    Check,
    Freeze { request: Box<FreezeRequest>, about: Vec<u8>, ancestors: Vec<Ancestor>, image: File },
    Record { request: RecordRequest, mappings: File },
    Memory,
    Unchanged(Vec<(FileId, File)>),
}

impl Work {
    /// Reads a request; `None`: no caller sends such a one.
    fn of(packet: &[u8], mut files: Vec<File>) -> Option<Self> {
        if kind_of(packet) == REQUEST_UNCHANGED {
            let (request, _) = parse::<UnchangedRequest>(packet)?;
            let ids = request.ids.get(..request.count as usize)?;
            let is_whole = ids.len() == files.len();
            return is_whole.then(|| Self::Unchanged(ids.iter().copied().zip(files).collect()));
        }
        let file = files.pop();
        if !files.is_empty() {
            return None;
        }
        match (kind_of(packet), file) {
            (REQUEST_CHECK, None) => Some(Self::Check),
            (REQUEST_MEMORY, None) => Some(Self::Memory),
            (REQUEST_FREEZE, Some(image)) => {
                let (request, tail) = parse::<FreezeRequest>(packet)?;
                let (about, tail) = tail.split_at_checked(request.about_len as usize)?;
                let ancestors = tail.chunks_exact(size_of::<Ancestor>());
                let count = request.ancestor_count as usize;
                let is_whole = ancestors.len() == count && ancestors.remainder().is_empty();
                let ancestors = ancestors.map(pod_read_unaligned).collect();
                let (request, about) = (Box::new(request), about.to_vec());
                is_whole.then_some(Self::Freeze { request, about, ancestors, image })
            }
            (REQUEST_RECORD, Some(mappings)) => {
                let (request, _) = parse::<RecordRequest>(packet)?;
                Some(Self::Record { request, mappings })
            }
            _ => None,
        }
    }

    /// Whether two are to do it: where nothing but processors limits how fast that is.
    fn wants_mate(&self) -> bool {
        matches!(self, Self::Freeze { request, .. } if request.flags & FREEZE_IN_MEMORY != 0)
    }

    /// Does it: what a worker is for.
    fn answer(
        self,
        socket: &OwnedFd,
        sandbox: Sandbox,
        mate: Option<OwnedFd>,
    ) -> io::Result<Answers> {
        match self {
            Self::Check => Ok(vec![Answer::new(ANSWER_DONE).with_text("")]),
            Self::Freeze { request, about, ancestors, image } => {
                let order = Order { request: *request, about: &about, ancestors: &ancestors };
                let source = Frozen { socket, sandbox, mate, blobs: 0, is_read: false };
                Ok(freeze(source, &order, &image))
            }
            Self::Record { request, mappings } => working_set(sandbox, &request, &mappings),
            Self::Memory => Ok(memory(&sandbox)),
            Self::Unchanged(files) => Ok(unchanged(sandbox, &files)),
        }
    }
}

/// Opens what a worker will read.
fn open(work: &Work, proc: &OwnedFd, pidfd: OwnedFd) -> io::Result<Sandbox> {
    let mut sandbox = Sandbox::open(proc, pidfd)?;
    match work {
        Work::Freeze { .. } => sandbox.open_members(proc)?,
        Work::Memory => sandbox.open_summaries(proc)?,
        Work::Unchanged(_) => sandbox.open_maps()?,
        Work::Check | Work::Record { .. } => {}
    }
    Ok(sandbox)
}

/// Compares the memory of the first process of a sandbox with files.
fn unchanged(mut sandbox: Sandbox, files: &[(FileId, File)]) -> Answers {
    let space = sandbox.take_space(FIRST_PROCESS);
    let found = space.and_then(|space| trim::find(space, sandbox.maps()?, files));
    // What has ended reads as if it had never been touched.
    match (found, sandbox.is_whole()) {
        (Ok(ranges), Ok(true)) => long_answer(bytemuck::cast_slice(&ranges)),
        (Ok(_), Ok(false)) => host_error(&Errno::SRCH.into()),
        (Err(error), _) | (_, Err(error)) => host_error(&error),
    }
}

/// An answer that may be longer than a packet.
fn long_answer(bytes: &[u8]) -> Answers {
    let numbers = [bytes.len() as u64, 0, 0, 0, 0, 0, 0, 0];
    let head = Answer { numbers, ..Answer::new(ANSWER_DONE) }.with_text("");
    std::iter::once(head).chain(bytes.chunks(PIECE_MAX).map(<[u8]>::to_vec)).collect()
}

/// Sums up the memory of the processes of a sandbox.
fn memory(sandbox: &Sandbox) -> Answers {
    match SandboxMemory::sum(sandbox.summaries()) {
        Ok(memory) => vec![memory.answer().with_text("")],
        Err(error) => host_error(&error),
    }
}

fn send_all(socket: &OwnedFd, answers: &Answers) -> io::Result<()> {
    answers.iter().try_for_each(|answer| send(socket, answer))
}

/// The packets of an answer.
type Answers = Vec<Vec<u8>>;

/// The caller of a worker with a bug learns where it is: the worker has no other voice.
fn tell_of_panics(socket: &Arc<OwnedFd>) {
    let socket = socket.clone();
    std::panic::set_hook(Box::new(move |panic| {
        let answer = Answer { error: ERROR_PANIC, ..Answer::new(ANSWER_FAILED) };
        let text = panic.to_string();
        let _ = message::send(&*socket, &[IoSlice::new(&answer.with_text(&text))], &[]);
        sys::exit_at_once(1);
    }));
}

fn kind_of(packet: &[u8]) -> u32 {
    packet.first_chunk().map_or(0, |kind| u32::from_le_bytes(*kind))
}

/// The fixed part of a request and what follows it.
fn parse<T: Pod>(packet: &[u8]) -> Option<(T, &[u8])> {
    let (head, tail) = packet.split_at_checked(size_of::<T>())?;
    Some((pod_read_unaligned(head), tail))
}

fn send(socket: &OwnedFd, packet: &[u8]) -> io::Result<()> {
    message::send(socket, &[IoSlice::new(packet)], &[])
}

/// Says that a host call failed.
fn host_error(error: &io::Error) -> Answers {
    let answer = Answer { error: ERROR_HOST, errno: errno_of(error), ..Answer::new(ANSWER_FAILED) };
    vec![answer.with_text(&error.to_string())]
}

fn freeze(mut source: Frozen<'_>, order: &Order<'_>, image: &File) -> Answers {
    let result = write_image(&mut source, order, image);
    // The memory of a process that has ended cannot be read, or reads as if it had never
    // been touched. So neither an image nor an error of then means what it says.
    let frozen = match source.sandbox.is_whole() {
        // What it does after its memory was read is its own matter.
        _ if source.is_read => result,
        Ok(true) => result,
        Ok(false) => Err(FreezeError::SandboxEnded),
        Err(error) => Err(FreezeError::Memory(error)),
    };
    vec![match frozen {
        Ok(report) => done(&report).with_text(""),
        Err(error) => failed(&error),
    }]
}

fn done(report: &FreezeReport) -> Answer {
    Answer {
        numbers: [
            report.file_len,
            report.stored,
            report.from_blobs,
            report.zero,
            report.stored_clean,
            (report.regions as u64) << 32 | report.threads as u64,
            (report.mappings as u64) << 32 | report.blobs as u64,
            report.from_ancestors,
        ],
        blob: report.depth,
        checksum: report.checksum,
        ..Answer::new(ANSWER_DONE)
    }
}

fn failed(error: &FreezeError) -> Vec<u8> {
    let failed = |error| Answer { error, ..Answer::new(ANSWER_FAILED) };
    let host = |error, source: &io::Error| {
        Answer { errno: errno_of(source), ..failed(error) }.with_text(&source.to_string())
    };
    match error {
        FreezeError::Report(why) => failed(ERROR_REPORT).with_text(why),
        FreezeError::TooLarge { needed, limit } => {
            let numbers = [*needed, *limit, 0, 0, 0, 0, 0, 0];
            Answer { numbers, ..failed(ERROR_TOO_LARGE) }.with_text("")
        }
        FreezeError::TooManyMappings { limit } => {
            let numbers = [*limit as u64, 0, 0, 0, 0, 0, 0, 0];
            Answer { numbers, ..failed(ERROR_TOO_MANY_MAPPINGS) }.with_text("")
        }
        FreezeError::Blob { blob, source } => {
            Answer { blob: *blob, errno: errno_of(source), ..failed(ERROR_BLOB) }
                .with_text(&source.to_string())
        }
        // The memory and the page map of a process that has ended are empty (proc(5)).
        FreezeError::Memory(source) if source.kind() == io::ErrorKind::UnexpectedEof => {
            failed(ERROR_SANDBOX_ENDED).with_text("")
        }
        FreezeError::Memory(source) => host(ERROR_MEMORY, source),
        FreezeError::Write(source) => host(ERROR_WRITE, source),
        FreezeError::SandboxEnded => failed(ERROR_SANDBOX_ENDED).with_text(""),
        FreezeError::Base(why) => failed(ERROR_BASE).with_text(why),
        // The caller's own.
        FreezeError::HostDirectory | FreezeError::About { .. } | FreezeError::Helper(_) => {
            failed(ERROR_PANIC).with_text(&error.to_string())
        }
    }
}

/// What a freeze reads.
struct Frozen<'a> {
    socket: &'a OwnedFd,
    sandbox: Sandbox,
    /// The socket of another worker that copies.
    mate: Option<OwnedFd>,
    /// Blobs asked for so far.
    blobs: usize,
    /// Its memory has been read, and it may go on.
    is_read: bool,
}

impl Source for Frozen<'_> {
    fn take_space(&mut self, process: u32) -> io::Result<Space> {
        self.sandbox.take_space(process)
    }

    fn blobs(&mut self, numbers: &[u32]) -> Result<Vec<File>, (u32, io::Error)> {
        let mut files = Vec::with_capacity(numbers.len());
        for part in numbers.chunks(BLOBS_AT_ONCE) {
            files.extend(self.some_blobs(part)?);
        }
        Ok(files)
    }

    fn take_mate(&mut self) -> Option<OwnedFd> {
        self.mate.take()
    }

    fn first_is_written(&mut self) -> Result<(), FreezeError> {
        self.tell(ANSWER_FIRST)
    }

    fn memory_is_read(&mut self) -> Result<(), FreezeError> {
        self.tell(ANSWER_READ)?;
        self.is_read = true;
        Ok(())
    }
}

impl Frozen<'_> {
    /// Tells the caller of a step, if all that was read so far was the sandbox' memory.
    fn tell(&mut self, answer: u32) -> Result<(), FreezeError> {
        match self.sandbox.is_whole() {
            Ok(true) => {}
            Ok(false) => return Err(FreezeError::SandboxEnded),
            Err(error) => return Err(FreezeError::Memory(error)),
        }
        let sent = send(self.socket, &Answer::new(answer).with_text(""));
        // Without the caller nobody wants the image.
        sent.map_err(FreezeError::Memory)
    }

    fn some_blobs(&mut self, numbers: &[u32]) -> Result<Vec<File>, (u32, io::Error)> {
        let failed = |error| (numbers[0], error);
        self.blobs += numbers.len();
        if self.blobs > BLOBS_MAX {
            let why = format!("the program maps more than {BLOBS_MAX} files");
            return Err(failed(io::Error::other(why)));
        }
        send(self.socket, &Answer::asking_for(numbers).with_text("")).map_err(failed)?;
        let mut reply = [0; size_of::<BlobReply>()];
        let mut files = Vec::new();
        let received = message::receive(self.socket, &mut reply, Some(&mut files));
        let len = received.map_err(failed)?.len;
        let reply: BlobReply = pod_read_unaligned(&reply);
        if len != size_of::<BlobReply>() || reply.kind != REPLY_BLOB {
            // The caller is gone, and with it whoever wants the image.
            sys::exit_at_once(1);
        }
        match numbers.get(files.len()) {
            None => Ok(files.into_iter().map(File::from).collect()),
            // Without an error there were descriptors, but no room for them here.
            Some(&missing) => {
                let errno = if reply.errno == 0 { libc::EMFILE } else { reply.errno };
                Err((missing, io::Error::from_raw_os_error(errno)))
            }
        }
    }
}

fn working_set(
    mut sandbox: Sandbox,
    request: &RecordRequest,
    mappings: &File,
) -> io::Result<Answers> {
    let mappings = read_mappings(mappings, request.mappings)?;
    let recorded = sandbox.take_space(FIRST_PROCESS).and_then(|space| {
        let mut pages = space.pages.until(Instant::now() + RECORDING_MAX);
        record(&mut pages, &mappings, request.image_checksum)
    });
    Ok(match recorded {
        Ok(set) => long_answer(&set.to_bytes()),
        Err(error) => host_error(&error),
    })
}

fn read_mappings(file: &File, count: u32) -> io::Result<Vec<Mapping>> {
    if count > MAPPINGS_MAX {
        return Err(io::ErrorKind::InvalidData.into());
    }
    let mut mappings = vec![<Mapping as bytemuck::Zeroable>::zeroed(); count as usize];
    file.read_exact_at(bytemuck::cast_slice_mut(&mut mappings), 0)?;
    Ok(mappings)
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::process::{PidfdFlags, getpid, pidfd_open};

    fn with_frozen<T>(blobs: usize, act: impl FnOnce(&mut Frozen<'_>, &OwnedFd) -> T) -> T {
        let (caller, helper) = message::control_pair().unwrap();
        let proc: OwnedFd = File::open("/proc").unwrap().into();
        let pidfd = pidfd_open(getpid(), PidfdFlags::empty()).unwrap();
        let sandbox = Sandbox::open(&proc, pidfd).unwrap();
        act(&mut Frozen { socket: &helper, sandbox, mate: None, blobs, is_read: false }, &caller)
    }

    #[test]
    fn blobs_are_asked_for_in_parts() {
        let file: OwnedFd = tempfile::tempfile().unwrap().into();
        let numbers: Vec<u32> = (100..100 + BLOBS_AT_ONCE as u32 + 3).collect();
        for (second, errno) in [(3, 0), (2, 0), (2, libc::ENOENT), (0, libc::EACCES)] {
            let result = with_frozen(0, |frozen, caller| {
                for (count, errno) in [(BLOBS_AT_ONCE, 0), (second, errno)] {
                    let reply = BlobReply { kind: REPLY_BLOB, errno };
                    let files = vec![std::os::fd::AsFd::as_fd(&file); count];
                    let parts = [IoSlice::new(bytemuck::bytes_of(&reply))];
                    message::send(caller, &parts, &files).unwrap();
                }
                frozen.blobs(&numbers)
            });
            match result {
                Ok(files) => assert_eq!((files.len(), second), (numbers.len(), 3)),
                Err((missing, error)) => {
                    assert_eq!(missing, 100 + (BLOBS_AT_ONCE + second) as u32);
                    let expected = if errno == 0 { libc::EMFILE } else { errno };
                    assert_eq!(error.raw_os_error(), Some(expected));
                }
            }
        }
    }

    #[test]
    fn a_program_maps_so_many_files_at_most() {
        let (blob, error) =
            with_frozen(BLOBS_MAX - 1, |frozen, _| frozen.blobs(&[7, 8])).unwrap_err();
        assert_eq!(blob, 7);
        assert_eq!(error.to_string(), "the program maps more than 4096 files");
    }

    #[test]
    fn so_many_mappings_are_looked_at_at_most() {
        let file = tempfile::tempfile().unwrap();
        file.set_len(u64::from(MAPPINGS_MAX + 1) * size_of::<Mapping>() as u64).unwrap();
        assert_eq!(read_mappings(&file, MAPPINGS_MAX).unwrap().len(), MAPPINGS_MAX as usize);
        read_mappings(&file, MAPPINGS_MAX + 1).unwrap_err();
    }
}
