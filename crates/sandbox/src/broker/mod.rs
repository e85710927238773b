//! The broker: what a sandbox may ask its host for.
//!
//! Requests are hostile. The broker answers each with data, one descriptor of a regular file,
//! which is read-only but for files of volumes ([`Volume`]), a socket to a destination that the egress policy
//! allows ([`crate::egress`]), or what the sandbox' processes share among
//! themselves: a memory file and an eventfd, once. It never follows a symbolic link,
//! never opens anything but a regular file or a directory, and changes nothing but
//! the modes of the terminal that the sandbox was given, if it was given one, and
//! what lies in directories that were given to be written to ([`BoundDirectory`]).
//!
//! Files of host directories are served by a process of their own (`process`), which has
//! the rights for that and no others.

mod bound;
mod fetch;
mod file_server;
mod file_systems;
mod files;
mod hidden;
mod host_directory;
mod memory;
mod owners;
mod part;
mod path;
mod process;
mod request;
mod rights;
mod volume;

pub use bound::{BoundAccess, BoundDirectory};
pub use host_directory::{FuseAccess, HostDirectory, HostPolicy};
pub use rights::FileRights;
pub use volume::{
    ClientFile, ClosedVolume, Copied, FileNumbers, NUMBERED_MAX, OwnFiles, Volume, VolumeClient,
    VolumeHolder, VolumeMount, VolumeShare, copy_snapshot, copy_volume, cut_to_lengths,
    settle_copy, volume_descriptors,
};

pub use file_server::leave_requests_about_volumes;
pub(crate) use file_server::{FileServer, QueueFull};
pub(crate) use files::{Directories, VolumeUser};
pub(crate) use owners::Ids;
pub(crate) use process::main as files_main;
pub(crate) use request::{Question, Request, socket_address};

use std::collections::BTreeSet;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use rustix::fs::{FileType, OFlags, fcntl_getfl, fstat};
use rustix::io::Errno;
use rustix::termios::isatty;

use crate::boot::Rootfs;
use crate::egress::{EgressEvents, EgressPolicy, LeftSockets, Opening, Sockets};
use crate::event::Violation;
use crate::{message, sys};
use fetch::Fetches;
use process::FileProcess;

/// Opens the blobs of one rootfs index.
pub trait BlobSource: Send + Sync {
    /// Opens the blob with this number (its place in the index's blob table):
    /// a regular file, read-only. A number outside the table is
    /// [`io::ErrorKind::NotFound`]; the number may come from a sandbox.
    fn open_blob(&self, blob: u32) -> io::Result<OwnedFd>;

    /// Begins to fetch a blob that is elsewhere: `answer` is called when it is here or cannot
    /// be had, once, on another thread. The default is for a source that has all of them, and
    /// returns `answer` as it is.
    ///
    /// # Errors
    /// The blob is here: [`BlobSource::open_blob`] opens it.
    fn fetch(&self, blob: u32, answer: FetchAnswer) -> Result<(), FetchAnswer> {
        let _ = blob;
        Err(answer)
    }

    /// Why a blob could not be fetched, if that has happened to anybody lately.
    fn failure(&self) -> Option<String> {
        None
    }
}

/// Gets a blob that was fetched.
pub type FetchAnswer = Box<dyn FnOnce(io::Result<OwnedFd>) + Send>;

/// The part of an answer that depends on the question.
#[derive(Debug, Default)]
pub(crate) struct Answer {
    tail: Vec<u8>,
    descriptor: Option<OwnedFd>,
}

impl Answer {
    fn data(tail: Vec<u8>) -> Self {
        Self { tail, descriptor: None }
    }

    /// Bytes of it that a reply carries.
    #[cfg(any(test, feature = "fuzzing"))]
    pub fn tail_len(&self) -> usize {
        self.tail.len()
    }

    fn file(descriptor: OwnedFd, tail: Vec<u8>) -> Self {
        Self { tail, descriptor: Some(descriptor) }
    }
}

/// The broker of one sandbox.
pub(crate) struct Broker {
    rootfs: Rootfs,
    /// Blobs that the sandbox has asked for, each once.
    asked: BTreeSet<u32>,
    /// What its processes share.
    shared: memory::Granted,
    /// Sockets to the outside; none: nothing may be reached.
    sockets: Option<Sockets>,
    /// The terminal behind the standard streams.
    terminal: Option<OwnedFd>,
    /// Serves directories of the host, if it uses any.
    files: Option<FileProcess>,
    /// Serves volumes, if it uses any.
    volumes: Option<Volumes>,
    volume_holder: Option<VolumeHolder>,
    /// The daemon before this one has left the sandbox with its volumes.
    is_left: bool,
    /// Answers about blobs that are fetched.
    fetches: Option<Fetches>,
}

/// The volumes of a sandbox. Threads serve them from the first request on.
enum Volumes {
    Unused(Vec<u32>, Directories, OwnedFd),
    Used(Vec<u32>, FileServer),
}

impl Volumes {
    fn has(&self, mount: u32) -> bool {
        let (Self::Unused(mounts, ..) | Self::Used(mounts, _)) = self;
        mounts.contains(&mount)
    }
}

/// A reply: the message and the descriptor that goes with it.
pub(crate) type Served = (Vec<u8>, Option<OwnedFd>);

/// Most blobs that are remembered as asked for.
const ASKED_MAX: usize = 4096;

impl Broker {
    pub fn new(rootfs: Rootfs, sockets: Option<Sockets>) -> Self {
        Self {
            rootfs,
            asked: BTreeSet::new(),
            shared: memory::Granted::default(),
            sockets,
            terminal: None,
            files: None,
            volumes: None,
            volume_holder: None,
            is_left: false,
            fetches: None,
        }
    }

    /// Lets the sandbox ask for blobs that have to be fetched; answers about them go to `control`.
    pub fn fetch_blobs(mut self, control: OwnedFd) -> Self {
        self.fetches = Some(Fetches::new(control));
        self
    }

    /// Lets the sandbox use directories of the host, as soon as [`Broker::wait_for_files`] has
    /// returned; answers about them go to `control`.
    pub fn serve_files(&mut self, directories: Directories, control: OwnedFd) -> io::Result<()> {
        self.files = Some(FileProcess::start(&directories, control)?);
        Ok(())
    }

    /// Lets the sandbox use volumes, by number of the mount; answers about them go to `control`.
    pub fn serve_volumes<'a>(
        mut self,
        volumes: impl Iterator<Item = (u32, &'a VolumeMount)> + Clone,
        user: &VolumeUser<'_>,
        control: &OwnedFd,
    ) -> io::Result<Self> {
        let mounts: Vec<u32> = volumes.clone().map(|(number, _)| number).collect();
        if !mounts.is_empty() {
            let directories = Directories::of_volumes(volumes, user)?;
            self.volumes = Some(Volumes::Unused(mounts, directories, control.try_clone()?));
            self.volume_holder = Some(user.holder);
            self.is_left = user.left.is_some();
        }
        Ok(self)
    }

    /// What tells the sandbox from others that have volumes; none: it has no volumes.
    pub fn volume_holder(&self) -> Option<VolumeHolder> {
        self.volume_holder
    }

    /// Whether the daemon before this one has left the sandbox with its volumes.
    pub fn is_left(&self) -> bool {
        self.is_left
    }

    /// Passes a request about a volume on; whether it is one.
    fn serve_volume(&mut self, request: &Request<'_>) -> Result<bool, QueueFull> {
        let Question::Bind(bind, _) = request.question else { return Ok(false) };
        let Some(volumes) = self.volumes.take_if(|volumes| volumes.has(bind.mount)) else {
            return Ok(false);
        };
        let (mounts, server) = match volumes {
            Volumes::Used(mounts, server) => (mounts, server),
            Volumes::Unused(mounts, directories, control) => {
                // Without threads nobody answers: the sandbox ends.
                (mounts, FileServer::start(directories, control).map_err(|_| QueueFull)?)
            }
        };
        let submitted = server.submit(request.sequence, &request.question);
        self.volumes = Some(Volumes::Used(mounts, server));
        submitted
    }

    /// How many files of a volume the sandbox has open.
    pub fn open_files_of(&self, volume: &Volume) -> usize {
        match &self.volumes {
            Some(Volumes::Used(_, server)) => server.open_files_of(volume),
            _ => 0,
        }
    }

    /// Waits until directories of the host can be used.
    pub fn wait_for_files(&self) -> io::Result<()> {
        self.files.as_ref().map_or(Ok(()), FileProcess::wait_until_serving)
    }

    /// Why files are not served any more, if they were.
    pub fn files_ended(&self) -> Option<Violation> {
        self.files.as_ref().and_then(FileProcess::ended)
    }

    /// Lets the sandbox ask for the modes of its terminal: the first of these
    /// that is one.
    pub fn use_terminal(&mut self, stdio: [BorrowedFd<'_>; 3]) -> io::Result<()> {
        let terminal = stdio.into_iter().find(|stream| isatty(stream));
        self.terminal = terminal.map(|stream| stream.try_clone_to_owned()).transpose()?;
        Ok(())
    }

    /// Blobs that the sandbox has been given on request.
    pub fn asked(&self) -> impl Iterator<Item = u32> {
        self.asked.iter().copied()
    }

    /// Outgoing connections that were denied since the last call.
    pub fn take_egress_events(&self) -> EgressEvents {
        self.sockets.as_ref().map(Sockets::take_egress_events).unwrap_or_default()
    }

    /// Puts the sandbox under a policy of its own. `control` is the control socket.
    pub fn use_egress(&mut self, policy: &Arc<EgressPolicy>, control: OwnedFd) {
        self.sockets = Some(match self.sockets.take() {
            Some(sockets) => sockets.under(policy.clone()),
            None => Sockets::new(policy.clone(), control),
        });
    }

    /// A file with the sandbox's outgoing connections, for the daemon that comes after this
    /// one. `None`: it may have none.
    pub fn connections_for_successor(&self) -> io::Result<Option<OwnedFd>> {
        self.sockets.as_ref().map(Sockets::for_successor).transpose()
    }

    /// Counts the outgoing connections that the sandbox has from an earlier daemon.
    pub fn take_over_connections(&self, left: LeftSockets) {
        if let Some(sockets) = &self.sockets {
            sockets.take_over(left);
        }
    }

    /// Whether it has given the sandbox nothing that outlives a request and that it would have
    /// to take back, or answers later.
    pub fn is_as_new(&self) -> bool {
        self.shared.is_empty()
            && self.sockets.is_none()
            && self.terminal.is_none()
            && self.files.is_none()
            && self.volumes.is_none()
            && self.fetches.is_none()
    }

    pub fn rootfs(&self) -> &Rootfs {
        &self.rootfs
    }

    /// The reply to a request; `None` if somebody else will send it.
    ///
    /// # Errors
    /// More requests wait than a sandbox has reason to make.
    pub fn serve(&mut self, request: &Request<'_>) -> Result<Option<Served>, QueueFull> {
        if self.serve_volume(request)? {
            return Ok(None);
        }
        if let Some(files) = &self.files
            && let Some((kind, body)) = request.question.about_files()
        {
            files.pass_on(kind, request.sequence, &body)?;
            return Ok(None);
        }
        if let (Some(fetches), Rootfs::Index { blobs, .. }, Question::OpenBlob(blob)) =
            (&self.fetches, &self.rootfs, &request.question)
            && fetches.begin(&**blobs, *blob, request.sequence)?
        {
            return Ok(None);
        }
        let answer = match &request.question {
            Question::OpenSocket(to) => {
                let sockets = self.sockets.as_ref().ok_or(Errno::NETUNREACH);
                match sockets.and_then(|sockets| sockets.open(*to, request.sequence)) {
                    Ok(Opening::Opened(opened)) => {
                        let tail = bytemuck::bytes_of(&opened.tail()).to_vec();
                        Ok(Answer::file(opened.socket, tail))
                    }
                    Ok(Opening::Later) => return Ok(None),
                    Err(errno) => Err(errno),
                }
            }
            question => self.answer(question),
        };
        let (errno, answer) = match answer {
            Ok(answer) => (0, answer),
            Err(errno) => (errno.raw_os_error(), Answer::default()),
        };
        Ok(Some((message::reply(request.sequence, errno, &answer.tail), answer.descriptor)))
    }

    fn answer(&mut self, question: &Question<'_>) -> Result<Answer, Errno> {
        match (&self.rootfs, question) {
            (_, Question::MemoryFile) => {
                self.shared.memory_file().map(|file| Answer::file(file, Vec::new()))
            }
            (_, Question::WakeSocket) => {
                self.shared.wake_socket().map(|socket| Answer::file(socket, Vec::new()))
            }
            (_, Question::TerminalMode) => {
                let terminal = self.terminal.as_ref().ok_or(Errno::NOTTY)?;
                let mode = sys::terminal_mode(terminal.as_fd()).map_err(|e| errno_of(&e))?;
                Ok(Answer::data(bytemuck::bytes_of(&mode).to_vec()))
            }
            (_, Question::SetTerminalMode(mode)) => {
                let terminal = self.terminal.as_ref().ok_or(Errno::NOTTY)?;
                sys::set_terminal_mode(terminal.as_fd(), mode).map_err(|e| errno_of(&e))?;
                Ok(Answer::default())
            }
            (Rootfs::Index { blobs, .. }, Question::OpenBlob(blob)) => {
                let file = blobs.open_blob(*blob).map_err(|error| errno_of(&error))?;
                check_read_only(file.as_fd())?;
                if self.asked.len() < ASKED_MAX {
                    self.asked.insert(*blob);
                }
                Ok(Answer::file(file, Vec::new()))
            }
            // It has the other kind of rootfs, or no directories.
            _ => Err(Errno::NOSYS),
        }
    }
}

/// The last line of defence: whatever a source opened, a sandbox gets nothing
/// that can be written or that is not a regular file.
fn check_read_only(file: BorrowedFd<'_>) -> Result<(), Errno> {
    let is_read_only = fcntl_getfl(file)? & OFlags::RWMODE == OFlags::RDONLY;
    let is_regular = FileType::from_raw_mode(fstat(file)?.st_mode) == FileType::RegularFile;
    if is_read_only && is_regular { Ok(()) } else { Err(Errno::ACCESS) }
}

fn errno_of(error: &io::Error) -> Errno {
    match error.raw_os_error() {
        Some(errno) => Errno::from_raw_os_error(errno),
        None if error.kind() == io::ErrorKind::NotFound => Errno::NOENT,
        None => Errno::IO,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::File;
    use std::sync::Arc;
    use thaw_abi::control::Reply;

    struct Opens(fn() -> io::Result<OwnedFd>);

    impl BlobSource for Opens {
        fn open_blob(&self, _: u32) -> io::Result<OwnedFd> {
            (self.0)()
        }
    }

    fn serve(source: fn() -> io::Result<OwnedFd>, question: Question<'_>) -> (i32, bool) {
        let file = Arc::new(File::open("/dev/null").unwrap());
        let rootfs = Rootfs::Index { file, len: 0, blobs: Arc::new(Opens(source)) };
        let request = Request { sequence: 9, question };
        let (bytes, file) = Broker::new(rootfs, None).serve(&request).unwrap().unwrap();
        let reply: Reply = bytemuck::pod_read_unaligned(&bytes[16..24]);
        assert_eq!(bytes[8..16], 9_u64.to_le_bytes());
        (reply.errno, file.is_some())
    }

    #[test]
    fn a_blob_is_handed_out_read_only() {
        let source = || Ok(File::open("/proc/self/exe")?.into());
        assert_eq!(serve(source, Question::OpenBlob(1)), (0, true));
    }

    #[test]
    fn what_could_be_written_is_not_handed_out() {
        let source = || Ok(tempfile::tempfile()?.into());
        assert_eq!(serve(source, Question::OpenBlob(1)), (libc::EACCES, false));
        let source = || Ok(File::open("/")?.into());
        assert_eq!(serve(source, Question::OpenBlob(1)), (libc::EACCES, false));
    }

    #[test]
    fn errors_of_the_source_reach_the_sandbox() {
        let source = || Err(io::Error::from(io::ErrorKind::NotFound));
        assert_eq!(serve(source, Question::OpenBlob(1)), (libc::ENOENT, false));
    }

    #[test]
    fn an_index_has_no_host_files() {
        let source = || Err(io::Error::from(io::ErrorKind::NotFound));
        assert_eq!(serve(source, Question::Open(b"etc/passwd")), (libc::ENOSYS, false));
    }

    #[test]
    fn without_a_policy_nothing_can_be_reached() {
        let source = || Err(io::Error::from(io::ErrorKind::NotFound));
        let to = crate::egress::Destination {
            address: "192.0.2.1:443".parse().unwrap(),
            transport: crate::egress::Transport::Tcp,
        };
        assert_eq!(serve(source, Question::OpenSocket(to)), (libc::ENETUNREACH, false));
    }
}
