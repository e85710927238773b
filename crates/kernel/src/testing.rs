//! A sandbox for unit tests: they run the code that runs in a sandbox, not another one.
//!
//! [`Sandbox::new`] makes by hand what a boot makes: the per-boot area with the block of a
//! virtual CPU, the root of saved state, a first process with a thread that counts as the
//! running one, and the control socket. A thread of the test process holds the other end
//! of that socket and answers as the host would, out of a [`Host`].
//!
//! All of this is one per process, as in a sandbox, so tests that have a sandbox take
//! turns. A test that needs one and has none dies of a segmentation fault (no virtual
//! CPU) or panics (no root).
#![allow(unsafe_code)]

use std::collections::BTreeMap;
use std::fs::File;
use std::io::Write;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use alloc::sync::Arc;

use bytemuck::{Pod, bytes_of, pod_read_unaligned};
use thaw_abi::control::*;
use thaw_abi::layout::{CONSOLE_FD, CONTROL_FD};

use crate::errno::{Errno, Result};
use crate::fs::FileSystems;
use crate::fs::lower::LowerLayer;
use crate::host::blobs;
use crate::mm::heap;
use crate::mm::pages::PageAllocator;
use crate::platform::machine::{Clocks, HostFiles, Machine, Vcpus};
use crate::platform::registers::TrapFrame;
use crate::platform::thread::{assume_identity, forget_identity};
use crate::state::{self, Config, Kernel, ProcessFiles, kernel};
use crate::task::process::FIRST_PID;
use crate::task::{Credentials, Process, Thread, host_process};
use crate::time::random::Generator;

/// The only sandbox at the time; see [`kernel`] for its state.
pub struct Sandbox {
    /// What the host has and hears.
    pub host: Arc<Host>,
    _turn: MutexGuard<'static, ()>,
}

static TURN: Mutex<()> = Mutex::new(());

impl Sandbox {
    /// A sandbox without files, whose first process is that of the user 1000.
    pub fn new() -> Self {
        Self::over(LowerLayer::empty(), Vec::new(), Credentials::of_user(1000, 1000))
    }

    /// A sandbox over a lower layer whose files have these contents.
    pub fn over(lower: LowerLayer, blobs: Vec<Vec<u8>>, credentials: Credentials) -> Self {
        let turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
        state::set_host_memory(None);
        Machine::begin_first().unwrap();
        heap::map_front().unwrap();
        host_process::map_first().unwrap();
        // SAFETY: getauxval(3) only looks values up.
        Machine::find_clocks(unsafe { libc::getauxval(libc::AT_SYSINFO_EHDR) });
        blobs::initialize(blobs.len() as u32).unwrap();
        let host = Arc::new(Host {
            known: Mutex::new(Known { blobs, ..Known::default() }),
            ..Host::default()
        });
        connect(host.clone());
        // SAFETY: the area is this sandbox's.
        let pages = unsafe { PageAllocator::of_sandbox() };
        let config = Config { cpus: 1, ..Config::default() };
        state::install(Kernel::new(config, Generator::new([7; 32]), pages));
        kernel().fs.set(FileSystems::new(lower, crate::boot::program::views()).unwrap());
        let thread = first_thread(credentials);
        // SAFETY: the task table keeps the thread, and no state is ever freed.
        unsafe { assume_identity(&thread) };
        Self { host, _turn: turn }
    }

    /// Gives the running process other users and groups.
    pub fn become_user(&self, credentials: Credentials) {
        *crate::task::current_process().credentials.borrow_mut() = credentials;
    }

    /// Takes the signals that are pending for the running thread.
    pub fn take_signals(&self) -> Vec<crate::task::signal::Signal> {
        let pending =
            core::mem::take(&mut crate::task::thread::current().signals.borrow_mut().pending);
        pending.iter().map(|info| info.signal).collect()
    }
}

impl Drop for Sandbox {
    fn drop(&mut self) {
        for blob in blobs::open_blobs() {
            Machine::close(blobs::descriptor(blob).unwrap());
        }
        reserve_numbers();
        forget_identity();
        // SAFETY: nobody finds the state at address 0, so nobody uses that of this test.
        unsafe { state::restore(0) };
    }
}

/// Whether there is something in guest memory at the address of a page.
pub fn is_mapped(address: u64) -> bool {
    let mut resident = 0u8;
    // SAFETY: mincore(2) writes a byte for the page, and fails if there is none.
    unsafe { libc::mincore(address as *mut _, 4096, &mut resident) == 0 }
}

fn first_thread(credentials: Credentials) -> Arc<Thread> {
    let process =
        Arc::new(Process::first(credentials, ProcessFiles::new(kernel().fs.namespace.clone())));
    host_process::begin(process.mm());
    kernel().tasks.processes.borrow_mut().insert(FIRST_PID, process.clone());
    let thread = Thread::new(FIRST_PID.main_thread(), process.clone(), TrapFrame::zeroed());
    thread.sched.borrow_mut().state = crate::task::scheduler::RunState::Runnable;
    process.threads.borrow_mut().push(thread.clone());
    kernel().tasks.threads.borrow_mut().insert(FIRST_PID.main_thread(), thread.clone());
    thread
}

/// What is at the other end of the control socket.
#[derive(Default)]
pub struct Host {
    known: Mutex<Known>,
    news: Condvar,
}

#[derive(Default)]
struct Known {
    blobs: Vec<Vec<u8>>,
    /// The host directory, by path.
    files: BTreeMap<Vec<u8>, HostFile>,
    /// Messages other than requests, kind and body.
    heard: Vec<(u32, Vec<u8>)>,
}

/// A file of the host directory.
pub struct HostFile {
    /// Its attributes.
    pub attributes: FileAttributes,
    /// Target of a symbolic link.
    pub target: Vec<u8>,
}

/// What a request is answered with: the tail, and a descriptor.
type Answer = Result<(Vec<u8>, Option<OwnedFd>)>;

impl Host {
    fn known(&self) -> MutexGuard<'_, Known> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Puts a file into the host directory.
    pub fn put(&self, path: &str, file: HostFile) {
        self.known().files.insert(path.as_bytes().to_vec(), file);
    }

    /// Removes a file from the host directory.
    pub fn remove(&self, path: &str) {
        self.known().files.remove(path.as_bytes());
    }

    /// Waits for a message of the sandbox and returns its body.
    pub fn wait_for(&self, kind: u32) -> Vec<u8> {
        let limit = Duration::from_secs(30);
        let is_missing = |known: &mut Known| !known.heard.iter().any(|(heard, _)| *heard == kind);
        let (mut known, _) = self.news.wait_timeout_while(self.known(), limit, is_missing).unwrap();
        let at = known.heard.iter().position(|(heard, _)| *heard == kind).expect("a message");
        known.heard.remove(at).1
    }

    fn answer(&self, kind: u32, body: &[u8]) -> Answer {
        let known = self.known();
        match kind {
            MSG_OPEN_BLOB => {
                let (OpenBlob { blob, .. }, _) = split(body);
                known.blobs.get(blob as usize).map(|bytes| open_memory(bytes)).ok_or(Errno::EIO)
            }
            MSG_FS_STAT => known.file(body).map(|file| (bytes_of(&file.attributes).to_vec(), None)),
            MSG_FS_READLINK => known.file(body).map(|file| (file.target.clone(), None)),
            MSG_FS_LIST => Ok((known.list(body), None)),
            MSG_OPEN_SOCKET => Err(Errno::EACCES),
            MSG_MEMORY_FILE => Ok(open_memory(b"")),
            _ => Err(Errno::EIO),
        }
    }

    /// Serves a sandbox until it closes its end.
    fn serve(&self, socket: OwnedFd) {
        let mut message = vec![0; MESSAGE_MAX];
        loop {
            // SAFETY: `message` may be written to.
            let len = unsafe {
                libc::recv(socket.as_raw_fd(), message.as_mut_ptr().cast(), message.len(), 0)
            };
            if len <= 0 {
                return;
            }
            let (header, body): (MessageHeader, _) = split(&message[..len as usize]);
            if header.kind < MSG_OPEN_BLOB {
                self.known().heard.push((header.kind, body.to_vec()));
                self.news.notify_all();
            } else {
                reply(&socket, header.sequence, self.answer(header.kind, body));
            }
        }
    }
}

impl Known {
    fn file(&self, path: &[u8]) -> Result<&HostFile> {
        self.files.get(path).ok_or(Errno::ENOENT)
    }

    /// One entry of a directory with its attributes, since every entry must be asked for.
    fn list(&self, request: &[u8]) -> Vec<u8> {
        let (ListDirectory { skip, .. }, path) = split(request);
        let prefix = if path.is_empty() { Vec::new() } else { [path, b"/"].concat() };
        let mut inside = self.files.iter().filter_map(|(path, file)| {
            let name = path.strip_prefix(&prefix[..])?;
            (!name.is_empty() && !name.contains(&b'/')).then_some((name, file))
        });
        let Some((name, file)) = inside.nth(skip as usize) else { return Vec::new() };
        let entry = DirectoryEntry {
            inode: file.attributes.inode,
            file_type: (file.attributes.mode >> 12) & 15,
            name_len: name.len() as u32,
        };
        let mut bytes = [bytes_of(&entry), name].concat();
        bytes.resize(bytes.len().next_multiple_of(8), 0);
        bytes.extend_from_slice(bytes_of(&file.attributes));
        bytes
    }
}

fn split<T: Pod>(bytes: &[u8]) -> (T, &[u8]) {
    let (head, tail) = bytes.split_at(size_of::<T>());
    (pod_read_unaligned(head), tail)
}

/// A file of the host with this content.
fn open_memory(bytes: &[u8]) -> (Vec<u8>, Option<OwnedFd>) {
    // SAFETY: the name is a C string, and the new descriptor is nobody else's.
    let mut file =
        unsafe { File::from_raw_fd(libc::memfd_create(c"blob".as_ptr(), libc::MFD_CLOEXEC)) };
    file.write_all(bytes).unwrap();
    (Vec::new(), Some(file.into()))
}

fn reply(socket: &OwnedFd, sequence: u64, answer: Answer) {
    let (errno, tail, fd) = match answer {
        Ok((tail, fd)) => (0, tail, fd),
        Err(error) => (error.0, Vec::new(), None),
    };
    let reply = Reply { errno, reserved: 0 };
    let body = [bytes_of(&reply), &tail].concat();
    let header = MessageHeader { kind: MSG_REPLY, len: body.len() as u32, sequence };
    let bytes = [bytes_of(&header), &body].concat();
    let vector = libc::iovec { iov_base: bytes.as_ptr() as *mut _, iov_len: bytes.len() };
    // `struct cmsghdr` and one descriptor (cmsg(3)).
    let rights = [20, u64::from(libc::SCM_RIGHTS as u32) << 32 | libc::SOL_SOCKET as u64, 0];
    let rights = [rights[0], rights[1], fd.as_ref().map_or(0, |fd| fd.as_raw_fd() as u64)];
    // SAFETY: all zero is a message without anything.
    let mut message: libc::msghdr = unsafe { core::mem::zeroed() };
    message.msg_iov = (&raw const vector).cast_mut();
    message.msg_iovlen = 1;
    if fd.is_some() {
        message.msg_control = rights.as_ptr().cast_mut().cast();
        message.msg_controllen = size_of_val(&rights);
    }
    // SAFETY: the message points to what lives until after the call. That the sandbox is
    // gone is no matter.
    unsafe { libc::sendmsg(socket.as_raw_fd(), &message, libc::MSG_NOSIGNAL) };
}

/// Makes the control socket, with `host` at the other end.
fn connect(host: Arc<Host>) {
    let mut ends = [0; 2];
    // SAFETY: `ends` may be written to; the descriptors are nobody else's.
    let theirs = unsafe {
        let kind = libc::SOCK_SEQPACKET | libc::SOCK_CLOEXEC;
        assert_eq!(libc::socketpair(libc::AF_UNIX, kind, 0, ends.as_mut_ptr()), 0);
        assert_eq!(libc::dup2(ends[0], CONTROL_FD), CONTROL_FD);
        libc::close(ends[0]);
        OwnedFd::from_raw_fd(ends[1])
    };
    std::thread::spawn(move || host.serve(theirs));
}

/// Gives the descriptors with a fixed number to nobody.
extern "C" fn reserve_numbers() {
    // SAFETY: plain system calls; nobody else has these numbers.
    unsafe {
        let null = libc::open(c"/dev/null".as_ptr(), libc::O_RDWR);
        for number in [CONTROL_FD, CONSOLE_FD] {
            libc::dup2(null, number);
        }
        if null != CONTROL_FD && null != CONSOLE_FD {
            libc::close(null);
        }
        // The alarm of time slices: nobody's here.
        libc::signal(libc::SIGALRM, libc::SIG_IGN);
    }
}

/// Before the test harness opens anything. Miri has no sandbox, and not these calls.
#[cfg(not(miri))]
#[used]
#[unsafe(link_section = ".init_array")]
static RESERVE_NUMBERS: extern "C" fn() = reserve_numbers;
