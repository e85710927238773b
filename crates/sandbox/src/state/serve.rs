//! The life of a state helper: it serves one request after the other.

use std::fs::File;
use std::io::{self, IoSlice};
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;
use std::time::Instant;

use bytemuck::{Pod, pod_read_unaligned};
use thaw_abi::image::Mapping;

use super::processes::{Sandbox, Space};
use super::protocol::{
    ANSWER_BLOB, ANSWER_DONE, ANSWER_FAILED, Answer, BLOBS_MAX, BlobReply, ERROR_BLOB, ERROR_HOST,
    ERROR_MEMORY, ERROR_PANIC, ERROR_REPORT, ERROR_SANDBOX_ENDED, ERROR_TOO_LARGE,
    ERROR_TOO_MANY_MAPPINGS, ERROR_WRITE, FreezeRequest, PACKET_MAX, PIECE_MAX, REPLY_BLOB,
    REQUEST_CHECK, REQUEST_FREEZE, REQUEST_RECORD, RecordRequest, errno_of,
};
use crate::freeze::{FreezeError, FreezeReport, Order, Source, write_image};
use crate::message;
use crate::working_set::{RECORDING_MAX, record};

/// Most mappings that a recording looks at; those of one process are far fewer.
const MAPPINGS_MAX: u32 = 1 << 16;

/// Serves requests until the caller closes its end. Returns the exit code.
pub(super) fn serve(socket: &OwnedFd, proc: &OwnedFd) -> i32 {
    let mut packet = vec![0; PACKET_MAX];
    loop {
        let mut descriptors = Vec::new();
        let len = match message::receive(socket, &mut packet, Some(&mut descriptors)) {
            Ok(received) if received.truncated => return 1,
            Ok(received) => received.len,
            Err(_) => return 1,
        };
        if len == 0 {
            return 0;
        }
        let mut descriptors = descriptors.into_iter();
        let (first, second) = (descriptors.next(), descriptors.next());
        let served = match (kind_of(&packet[..len]), first, second) {
            (REQUEST_CHECK, Some(pidfd), None) => Ok(check(proc, &pidfd)),
            (REQUEST_FREEZE, Some(pidfd), Some(image)) => {
                freeze(socket, proc, &pidfd, image.into(), &packet[..len])
            }
            (REQUEST_RECORD, Some(pidfd), Some(mappings)) => {
                working_set(proc, &pidfd, mappings.into(), &packet[..len])
            }
            _ => return 1,
        };
        // What a request has brought or opened is closed by now. If this fails, the caller is
        // gone, or has sent what no caller sends.
        let sent =
            served.and_then(|answers| answers.iter().try_for_each(|answer| send(socket, answer)));
        if sent.is_err() {
            return 1;
        }
    }
}

/// The packets of an answer.
type Answers = Vec<Vec<u8>>;

/// The caller of a helper with a bug learns where it is: the helper has no other voice.
pub(super) fn tell_of_panics(socket: &OwnedFd) {
    let Ok(socket) = socket.try_clone() else { return };
    std::panic::set_hook(Box::new(move |panic| {
        let answer = Answer { error: ERROR_PANIC, ..Answer::new(ANSWER_FAILED) };
        let text = panic.to_string();
        let _ = message::send(&socket, &[IoSlice::new(&answer.with_text(&text))], &[]);
        std::process::exit(1);
    }));
}

fn kind_of(packet: &[u8]) -> u32 {
    packet.first_chunk().map_or(0, |kind| u32::from_le_bytes(*kind))
}

/// The fixed part of a request and what follows it.
fn parse<T: Pod>(packet: &[u8]) -> io::Result<(T, &[u8])> {
    let (head, tail) = packet
        .split_at_checked(size_of::<T>())
        .ok_or_else(|| io::Error::from(io::ErrorKind::InvalidData))?;
    Ok((pod_read_unaligned(head), tail))
}

fn send(socket: &OwnedFd, packet: &[u8]) -> io::Result<()> {
    message::send(socket, &[IoSlice::new(packet)], &[])
}

/// Says that a host call failed.
fn host_error(error: &io::Error) -> Answers {
    let answer = Answer { error: ERROR_HOST, errno: errno_of(error), ..Answer::new(ANSWER_FAILED) };
    vec![answer.with_text(&error.to_string())]
}

fn check(proc: &OwnedFd, pidfd: &OwnedFd) -> Answers {
    match Sandbox::open(proc, pidfd).and_then(|sandbox| sandbox.first_space()) {
        Ok(_) => vec![Answer::new(ANSWER_DONE).with_text("")],
        Err(error) => host_error(&error),
    }
}

fn freeze(
    socket: &OwnedFd,
    proc: &OwnedFd,
    pidfd: &OwnedFd,
    image: File,
    packet: &[u8],
) -> io::Result<Answers> {
    let (request, about) = parse::<FreezeRequest>(packet)?;
    if about.len() != request.about_len as usize {
        return Err(io::ErrorKind::InvalidData.into());
    }
    let frozen = Sandbox::open(proc, pidfd).map_err(FreezeError::Memory).and_then(|sandbox| {
        let mut source = Frozen { socket, sandbox, blobs: 0 };
        let result = write_image(&mut source, &Order { request, about }, &image);
        // Memory of a process that has ended reads as if it had never been touched: without
        // this check an image with holes would pass for a good one.
        match source.sandbox.is_whole() {
            Ok(true) => result,
            Ok(false) => Err(FreezeError::SandboxEnded),
            Err(error) => Err(FreezeError::Memory(error)),
        }
    });
    Ok(vec![match frozen {
        Ok(report) => done(&report).with_text(""),
        Err(error) => failed(&error),
    }])
}

fn done(report: &FreezeReport) -> Answer {
    Answer {
        numbers: [
            report.file_len,
            report.stored,
            report.from_blobs,
            report.zero,
            report.stored_clean,
            report.regions as u64,
            (report.mappings as u64) << 32 | report.blobs as u64,
            report.threads as u64,
        ],
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
        FreezeError::Memory(source) => host(ERROR_MEMORY, source),
        FreezeError::Write(source) => host(ERROR_WRITE, source),
        FreezeError::SandboxEnded => failed(ERROR_SANDBOX_ENDED).with_text(""),
        // The caller's own.
        FreezeError::HostDirectory | FreezeError::About { .. } | FreezeError::Helper(_) => {
            failed(ERROR_PANIC).with_text(&error.to_string())
        }
    }
}

/// What a freeze reads.
struct Frozen<'a> {
    socket: &'a OwnedFd,
    sandbox: Sandbox<'a>,
    /// Blobs asked for so far.
    blobs: u32,
}

impl Source for Frozen<'_> {
    fn first_space(&mut self) -> io::Result<Space> {
        self.sandbox.first_space()
    }

    fn space(&mut self, process: u32) -> io::Result<Space> {
        self.sandbox.space(process)
    }

    fn blob(&mut self, number: u32) -> io::Result<File> {
        if self.blobs == BLOBS_MAX {
            return Err(io::Error::other(format!("the program maps more than {BLOBS_MAX} files")));
        }
        self.blobs += 1;
        send(self.socket, &Answer { blob: number, ..Answer::new(ANSWER_BLOB) }.with_text(""))?;
        let mut reply = [0; size_of::<BlobReply>()];
        let mut descriptors = Vec::new();
        let packet = message::receive(self.socket, &mut reply, Some(&mut descriptors))?;
        let reply: BlobReply = pod_read_unaligned(&reply);
        match (packet.len == size_of::<BlobReply>() && reply.kind == REPLY_BLOB, reply.errno) {
            // The caller is gone, and with it whoever wants the image.
            (false, _) => std::process::exit(1),
            (true, 0) => match descriptors.pop() {
                Some(blob) => Ok(blob.into()),
                None => Err(io::Error::from_raw_os_error(libc::EMFILE)),
            },
            (true, errno) => Err(io::Error::from_raw_os_error(errno)),
        }
    }
}

fn working_set(
    proc: &OwnedFd,
    pidfd: &OwnedFd,
    mappings: File,
    packet: &[u8],
) -> io::Result<Answers> {
    let (request, _) = parse::<RecordRequest>(packet)?;
    let mappings = read_mappings(&mappings, request.mappings)?;
    let recorded = Sandbox::open(proc, pidfd).and_then(|sandbox| {
        let pages = sandbox.first_space()?.pages;
        let mut pages = pages.until(Instant::now() + RECORDING_MAX);
        record(&mut pages, &mappings, request.image_checksum)
    });
    let set = match recorded {
        Ok(set) => set.to_bytes(),
        Err(error) => return Ok(host_error(&error)),
    };
    let numbers = [set.len() as u64, 0, 0, 0, 0, 0, 0, 0];
    let head = Answer { numbers, ..Answer::new(ANSWER_DONE) }.with_text("");
    Ok(std::iter::once(head).chain(set.chunks(PIECE_MAX).map(<[u8]>::to_vec)).collect())
}

fn read_mappings(file: &File, count: u32) -> io::Result<Vec<Mapping>> {
    if count > MAPPINGS_MAX {
        return Err(io::ErrorKind::InvalidData.into());
    }
    let mut mappings = vec![<Mapping as bytemuck::Zeroable>::zeroed(); count as usize];
    file.read_exact_at(bytemuck::cast_slice_mut(&mut mappings), 0)?;
    Ok(mappings)
}
