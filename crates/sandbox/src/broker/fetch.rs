//! Blobs of one sandbox that are fetched from elsewhere, and answered when they are here.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::net::{Shutdown, shutdown};

use super::{BlobSource, QueueFull, check_read_only};
use crate::message;

/// Most blobs that one sandbox waits for. Its kernel asks for one after the other.
const WAITING_MAX: usize = 64;
/// How long a sandbox may leave its answers unread.
const UNREAD_TIMEOUT: Duration = Duration::from_secs(2);
/// How long it is waited for what the host lacks, before it is tried again.
const SHORTAGE_PAUSE: Duration = Duration::from_millis(10);

/// What answers a sandbox that waits for blobs.
pub struct Fetches {
    control: Arc<OwnedFd>,
    waiting: Arc<AtomicUsize>,
}

impl Fetches {
    /// Answers go to this control socket.
    pub fn new(control: OwnedFd) -> Self {
        Self { control: Arc::new(control), waiting: Arc::default() }
    }

    /// Begins to fetch a blob for the request with this number; `false`: it is here.
    ///
    /// # Errors
    /// The sandbox waits for more than it has reason to.
    pub fn begin(
        &self,
        blobs: &dyn BlobSource,
        blob: u32,
        sequence: u64,
    ) -> Result<bool, QueueFull> {
        if self.waiting.fetch_add(1, Ordering::Relaxed) >= WAITING_MAX {
            self.waiting.fetch_sub(1, Ordering::Relaxed);
            return Err(QueueFull);
        }
        let (control, waiting) = (self.control.clone(), self.waiting.clone());
        let answer = Box::new(move |found: io::Result<OwnedFd>| {
            waiting.fetch_sub(1, Ordering::Relaxed);
            answer(&control, sequence, found);
        });
        let is_fetched = blobs.fetch(blob, answer).is_ok();
        if !is_fetched {
            self.waiting.fetch_sub(1, Ordering::Relaxed);
        }
        Ok(is_fetched)
    }
}

/// Sends a blob. A sandbox whose memory is not to be had is ended: nothing that it could be told
/// would let it go on as if it had never been frozen. So is one that does not read its answers, and one
/// to which the host can send nothing.
fn answer(control: &OwnedFd, sequence: u64, found: io::Result<OwnedFd>) {
    let usable = found.ok().filter(|file| check_read_only(file.as_fd()).is_ok());
    let sent = usable.is_some_and(|file| {
        let reply = message::reply(sequence, 0, &[]);
        let deadline = Instant::now() + UNREAD_TIMEOUT;
        retried(deadline, || message::send_until(control, &reply, &[file.as_fd()], deadline))
            .is_ok()
    });
    if !sent {
        let _ = shutdown(control, Shutdown::Both);
    }
}

/// Sends again and again while the host lacks what that takes.
fn retried(deadline: Instant, mut send: impl FnMut() -> io::Result<()>) -> io::Result<()> {
    loop {
        match send() {
            Err(error) if is_shortage(&error) && Instant::now() < deadline => {
                thread::sleep(SHORTAGE_PAUSE);
            }
            result => return result,
        }
    }
}

/// Whether the host lacks memory, or has too many descriptors on their way between processes
/// (unix(7), `ETOOMANYREFS`).
fn is_shortage(error: &io::Error) -> bool {
    let errno = Errno::from_io_error(error);
    matches!(errno, Some(Errno::TOOMANYREFS | Errno::NOBUFS | Errno::NOMEM))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::File;
    use std::sync::Mutex;

    use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
    use thaw_abi::control::{MessageHeader, Reply};

    use crate::broker::FetchAnswer;

    /// Keeps what it is asked for until it is told to answer.
    #[derive(Default)]
    struct Far(Mutex<Vec<FetchAnswer>>);

    impl BlobSource for Far {
        fn open_blob(&self, _: u32) -> io::Result<OwnedFd> {
            Err(io::ErrorKind::NotFound.into())
        }

        fn fetch(&self, blob: u32, answer: FetchAnswer) -> Result<(), FetchAnswer> {
            match blob {
                0 => Err(answer),
                _ => {
                    self.0.lock().unwrap().push(answer);
                    Ok(())
                }
            }
        }
    }

    fn sandbox() -> (Fetches, OwnedFd) {
        let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
        let (host, guest) =
            socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).unwrap();
        (Fetches::new(host), guest)
    }

    #[test]
    fn answers_come_when_the_blob_is_here() {
        let ((fetches, guest), far) = (sandbox(), Far::default());
        assert!(!fetches.begin(&far, 0, 1).unwrap_or_else(|_| panic!()), "it is here");
        assert!(fetches.begin(&far, 1, 7).unwrap_or_else(|_| panic!()));
        let mut buffer = [0; 64];
        let nothing = message::receive(&guest, &mut buffer, None).unwrap_err();
        assert_eq!(nothing.kind(), io::ErrorKind::WouldBlock);
        let answer = far.0.lock().unwrap().pop().unwrap();
        answer(Ok(File::open("/proc/self/exe").unwrap().into()));
        let packet = message::receive(&guest, &mut buffer, None).unwrap();
        let (head, rest) = buffer[..packet.len].split_at(size_of::<MessageHeader>());
        let header: MessageHeader = bytemuck::pod_read_unaligned(head);
        let reply: Reply = bytemuck::pod_read_unaligned(rest);
        assert_eq!((header.sequence, reply.errno), (7, 0));
    }

    #[test]
    fn a_sandbox_whose_memory_is_not_to_be_had_is_ended() {
        type Found = fn() -> io::Result<OwnedFd>;
        let lost: Found = || Err(io::ErrorKind::TimedOut.into());
        let writable: Found = || Ok(tempfile::tempfile().unwrap().into());
        for found in [lost, writable] {
            let ((fetches, guest), far) = (sandbox(), Far::default());
            assert!(fetches.begin(&far, 1, 7).unwrap_or_else(|_| panic!()));
            far.0.lock().unwrap().pop().unwrap()(found());
            let packet = message::receive(&guest, &mut [0; 64], None).unwrap();
            assert_eq!(packet.len, 0, "the end");
        }
    }

    #[test]
    fn a_sandbox_waits_for_a_bounded_number_of_blobs() {
        let ((fetches, _guest), far) = (sandbox(), Far::default());
        for blob in 1..=WAITING_MAX as u32 {
            assert!(fetches.begin(&far, blob, 1).unwrap_or_else(|_| panic!()));
        }
        assert!(fetches.begin(&far, 1, 1).is_err(), "one more");
        far.0.lock().unwrap().pop().unwrap()(Ok(File::open("/proc/self/exe").unwrap().into()));
        assert!(fetches.begin(&far, 1, 1).is_ok(), "there is room again");
    }

    #[test]
    fn what_the_host_lacks_for_a_moment_ends_nobody() {
        for errno in [Errno::TOOMANYREFS, Errno::NOBUFS, Errno::NOMEM] {
            let mut tried = 0;
            let sent = retried(Instant::now() + Duration::from_secs(60), || {
                tried += 1;
                if tried < 3 { Err(errno.into()) } else { Ok(()) }
            });
            assert!(sent.is_ok() && tried == 3);
            let over = retried(Instant::now(), || Err(errno.into()));
            assert_eq!(over.unwrap_err().raw_os_error(), Some(errno.raw_os_error()));
        }
        let mut tried = 0;
        let ended = retried(Instant::now() + Duration::from_secs(60), || {
            tried += 1;
            Err(Errno::PIPE.into())
        });
        assert!(ended.is_err() && tried == 1);
    }

    #[test]
    fn a_sandbox_that_cannot_be_answered_is_ended() {
        let ((fetches, guest), far) = (sandbox(), Far::default());
        assert!(fetches.begin(&far, 1, 7).unwrap_or_else(|_| panic!()));
        // As a host does that refuses: nobody is at the other end for sending.
        shutdown(&*fetches.control, Shutdown::Write).unwrap();
        far.0.lock().unwrap().pop().unwrap()(Ok(File::open("/proc/self/exe").unwrap().into()));
        let error = message::send(&guest, &[io::IoSlice::new(b"anybody")], &[]).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::BrokenPipe);
    }
}
