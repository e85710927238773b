//! Trees that come as streams of tar, into an instance.
//!
//! The client says what is in a stream. Paths stay below the directory that was named, sizes and
//! counts have bounds, and each file is written by the instance's own kernel with the rights of
//! the session's user. Devices, FIFOs and sockets are left out.

use super::files::{FileProblem, FileSession, shown};
use super::pace::Waits;
use super::tree::TreeLimits;
use axum::body::Bytes;
use serde::{Deserialize, Serialize};
use std::future::Future;
use std::io::{self, Read};
use std::path::Component;
use tar::{Archive, Entry, EntryType};
use thaw_oci::{Allowance, Metered, Trailing};
use tokio::runtime::Handle;
use tokio::sync::mpsc;

/// Most bytes of the headers of one entry: long names and attributes.
const HEADERS_MAX: u64 = 1 << 20;
/// Bytes that an archive is made of multiples of.
const BLOCK: u64 = 512;
/// Bytes of a file that are passed on at once.
const PIECE: usize = 32 << 10;

type Outcome<T> = Result<T, FileProblem>;

/// What has come of a stream.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema,
)]
pub struct TreeReport {
    /// Files, directories and links that were made.
    pub entries: u64,
    /// Bytes of files.
    pub bytes: u64,
    /// Devices, FIFOs and others that were left out.
    pub left_out: u64,
}

/// The bytes of a stream, as they come; an error is its end before its time.
pub struct Source {
    receiver: mpsc::Receiver<io::Result<Bytes>>,
    piece: Bytes,
}

impl Source {
    /// Those that are sent to a channel.
    pub fn new(receiver: mpsc::Receiver<io::Result<Bytes>>) -> Self {
        Self { receiver, piece: Bytes::new() }
    }
}

impl Read for Source {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        while self.piece.is_empty() {
            match self.receiver.blocking_recv() {
                Some(piece) => self.piece = piece?,
                None => return Ok(0),
            }
        }
        let count = buffer.len().min(self.piece.len());
        buffer[..count].copy_from_slice(&self.piece.split_to(count));
        Ok(count)
    }
}

/// Makes what a stream has below a directory of a sandbox, which is made if it is missing. `other`
/// is a session of the same user: files with a second name are read with it. Blocks until all has
/// come; the runtime of `handle` drives the sessions.
///
/// # Errors
/// See [`FileProblem`]. What has come until then is there.
pub fn unpack(
    sessions: (FileSession, FileSession),
    root: &str,
    source: impl Read,
    handle: &Handle,
    limits: TreeLimits,
) -> Outcome<TreeReport> {
    let (session, other) = sessions;
    let root = root.trim_end_matches('/').to_owned();
    let (directories, report, held) = Default::default();
    let driver = Driver { handle, waits: Waits::new(limits.pace) };
    let mut unpacker = Unpacker { session, other, root, driver, limits, directories, held, report };
    unpacker.run(source)?;
    Ok(unpacker.report)
}

struct Unpacker<'a> {
    session: FileSession,
    other: FileSession,
    root: String,
    driver: Driver<'a>,
    limits: TreeLimits,
    /// What permissions and times directories are to have when all is in them.
    directories: Vec<(String, u32, i64)>,
    /// Bytes of their paths.
    held: usize,
    report: TreeReport,
}

/// Drives sessions with a sandbox, for as long as that comes on.
struct Driver<'a> {
    handle: &'a Handle,
    waits: Waits,
}

impl Driver<'_> {
    fn run<T>(&mut self, work: impl Future<Output = Outcome<T>>) -> Outcome<T> {
        self.handle.block_on(self.waits.wait(work))
    }
}

fn broken(error: &io::Error) -> FileProblem {
    FileProblem::Refused(libc::EINVAL, format!("the stream is no whole archive ({error})"))
}

impl Unpacker<'_> {
    fn run(&mut self, source: impl Read) -> Outcome<()> {
        self.make(&self.path(""), None)?;
        let allowance = Allowance::new(HEADERS_MAX);
        let (counted, zeros) = Trailing::new(source);
        let mut archive = Archive::new(Metered::new(counted, allowance.clone()));
        let mut entries = archive.entries().map_err(|error| broken(&error))?;
        loop {
            allowance.set(HEADERS_MAX);
            zeros.set(0);
            let Some(entry) = entries.next() else { break };
            let entry = entry.map_err(|error| broken(&error))?;
            allowance.set(entry.size().saturating_add(HEADERS_MAX));
            self.entry(entry)?;
        }
        allowance.set(HEADERS_MAX);
        let mut rest = archive.into_inner();
        io::copy(&mut rest, &mut io::sink()).map_err(|error| broken(&error))?;
        if zeros.get() < BLOCK {
            return Err(broken(&io::Error::other("its end is missing")));
        }
        self.finish_directories()
    }

    fn path(&self, path: &str) -> String {
        match (self.root.is_empty(), path.is_empty()) {
            (false, true) => self.root.clone(),
            _ => format!("{}/{path}", self.root),
        }
    }

    fn make(&mut self, path: &str, mode: Option<u32>) -> Outcome<()> {
        self.driver.run(self.session.make_directory(path, mode))
    }

    fn entry<R: Read>(&mut self, mut entry: Entry<'_, R>) -> Outcome<()> {
        let kind = entry.header().entry_type();
        if kind.is_pax_global_extensions() {
            return Ok(());
        }
        let path = inner_path(&entry.path_bytes())?;
        refuse_sparse(&mut entry, &path)?;
        self.limits.take(&path, entry.size())?;
        self.driver.waits.entry();
        let inside = self.path(&path);
        let header = entry.header();
        let mode = header.mode().map_err(|error| broken(&error))? & 0o7777;
        let mtime = header.mtime().map_err(|error| broken(&error))?;
        let mtime = i64::try_from(mtime).unwrap_or(i64::MAX);
        match kind {
            EntryType::Directory => {
                // So that its owner can fill it.
                self.make(&inside, None)?;
                self.held += inside.len() + size_of::<(String, u32, i64)>();
                if self.held > self.limits.held {
                    return Err(FileProblem::Refused(
                        libc::EFBIG,
                        format!("{}: too many directories; copy parts of the tree", shown(&path)),
                    ));
                }
                self.directories.push((inside, mode, mtime));
            }
            EntryType::Symlink => {
                let target = link_target(&entry, &path)?;
                self.replace(&inside)?;
                self.driver.run(self.session.symlink(&target, &inside))?;
            }
            EntryType::Link => {
                let target = inner_path(link_target(&entry, &path)?.as_bytes())?;
                self.duplicate(&self.path(&target), &inside, mode, mtime)?;
            }
            EntryType::Regular | EntryType::Continuous | EntryType::GNUSparse => {
                self.file(&mut entry, &inside, mode, mtime)?;
            }
            _ => {
                self.report.left_out += 1;
                return Ok(());
            }
        }
        self.report.entries += 1;
        Ok(())
    }

    /// Takes away what a link is to replace, if that is no directory.
    fn replace(&mut self, path: &str) -> Outcome<()> {
        match self.driver.run(self.session.remove(path, false)) {
            Err(FileProblem::Refused(libc::ENOENT, _)) => Ok(()),
            removed => removed,
        }
    }

    fn file<R: Read>(
        &mut self,
        entry: &mut Entry<'_, R>,
        path: &str,
        mode: u32,
        mtime: i64,
    ) -> Outcome<()> {
        let size = entry.size();
        self.driver.run(self.session.write(path, Some(mode), Some(mtime)))?;
        let mut buffer = vec![0; PIECE];
        let mut written = 0;
        loop {
            let count = entry.read(&mut buffer).map_err(|error| broken(&error))?;
            if count == 0 {
                break;
            }
            self.driver.run(self.session.put(&buffer[..count]))?;
            self.driver.waits.moved(count);
            written += count as u64;
        }
        if written != size {
            let reason = format!("it ends within {}", shown(path));
            return Err(broken(&io::Error::other(reason)));
        }
        self.report.bytes += written;
        self.driver.run(self.session.finish(path)).map(drop)
    }

    /// A second name of a file becomes a file with the same contents.
    fn duplicate(&mut self, from: &str, to: &str, mode: u32, mtime: i64) -> Outcome<()> {
        let info = self.driver.run(self.other.read(from))?;
        self.limits.take(to, info.size)?;
        self.driver.run(self.session.write(to, Some(mode), Some(mtime)))?;
        let mut bytes = 0;
        while let Some(piece) = self.driver.run(self.other.next_piece(from))? {
            bytes += piece.len() as u64;
            if bytes > info.size {
                let reason = "grew while it was copied; copy again";
                let reason = format!("{} {reason}", shown(from));
                return Err(FileProblem::Refused(libc::EBUSY, reason));
            }
            self.driver.run(self.session.put(&piece))?;
            self.driver.waits.moved(piece.len());
        }
        self.driver.run(self.session.finish(to))?;
        self.report.bytes += bytes;
        Ok(())
    }

    /// Innermost ones first: a time changes when something is made in a directory.
    fn finish_directories(&mut self) -> Outcome<()> {
        while let Some((path, mode, mtime)) = self.directories.pop() {
            self.driver.waits.entry();
            self.driver.run(self.session.change(&path, mode, mtime))?;
        }
        Ok(())
    }
}

/// A sparse file in the form of PAX would be written with its map.
fn refuse_sparse<R: Read>(entry: &mut Entry<'_, R>, path: &str) -> Outcome<()> {
    let Some(records) = entry.pax_extensions().map_err(|error| broken(&error))? else {
        return Ok(());
    };
    for record in records {
        let record = record.map_err(|error| broken(&error))?;
        if record.key_bytes().starts_with(b"GNU.sparse.") {
            let reason = "is a sparse file in the form of PAX; pack it with `tar --format=gnu`";
            return Err(FileProblem::Refused(libc::EINVAL, format!("{} {reason}", shown(path))));
        }
    }
    Ok(())
}

/// A path of an archive as one below the tree, without `.`; empty for the tree itself.
fn inner_path(path: &[u8]) -> Outcome<String> {
    let refused = |why: &str| {
        let shown = thaw_sandbox::escape(path);
        Err(FileProblem::Refused(libc::EINVAL, format!("{shown} in the archive {why}")))
    };
    let Ok(text) = std::str::from_utf8(path) else {
        return refused("is not UTF-8; rename it");
    };
    let mut parts = Vec::new();
    for component in std::path::Path::new(text).components() {
        match component {
            Component::Normal(part) => parts.push(part.to_str().unwrap_or_default()),
            Component::CurDir => {}
            _ => return refused("leads out of the tree; make it with relative paths"),
        }
    }
    Ok(parts.join("/"))
}

fn link_target<R: Read>(entry: &Entry<'_, R>, path: &str) -> Outcome<String> {
    let target = entry.link_name_bytes().unwrap_or_default();
    let target = std::str::from_utf8(&target).ok().filter(|target| !target.is_empty());
    target.map(str::to_owned).ok_or_else(|| {
        FileProblem::Refused(libc::EINVAL, format!("{}: the link leads to no name", shown(path)))
    })
}

#[cfg(test)]
mod tests {
    use super::super::pace::Pace;
    use super::*;
    use bytemuck::Zeroable;
    use std::io::Write;
    use std::os::unix::net::UnixStream;
    use std::sync::Arc;
    use std::time::Duration;
    use tar::{Builder, Header};
    use thaw_abi::remote::*;
    use tokio::runtime::Runtime;
    use tokio::sync::Semaphore;

    /// Bytes of every file of the sandbox.
    const SIZE: u64 = 100_000;

    /// Serves a session as a sandbox whose files are read in pieces of `piece` bytes, with pauses.
    fn serve(mut socket: UnixStream, piece: usize, pause: Duration) -> io::Result<()> {
        let mut answer = FileAnswer::zeroed();
        answer.attributes.size = SIZE;
        let answer = bytemuck::bytes_of(&answer);
        socket.write_all(answer)?;
        loop {
            let mut request = FileRequest::default();
            socket.read_exact(bytemuck::bytes_of_mut(&mut request))?;
            let mut paths = vec![0; (request.path_len + request.other_len) as usize];
            socket.read_exact(&mut paths)?;
            if request.operation == FILE_WRITE {
                while take_piece(&mut socket)? > 0 {}
            }
            socket.write_all(answer)?;
            if request.operation == FILE_READ {
                for _ in 0..SIZE as usize / piece {
                    socket.write_all(&(piece as u32).to_ne_bytes())?;
                    socket.write_all(&vec![b'x'; piece])?;
                    std::thread::sleep(pause);
                }
                socket.write_all(&[0; 4])?;
            }
        }
    }

    fn take_piece(socket: &mut UnixStream) -> io::Result<u32> {
        let mut len = [0; 4];
        socket.read_exact(&mut len)?;
        let len = u32::from_ne_bytes(len);
        socket.read_exact(&mut vec![0; len as usize])?;
        Ok(len)
    }

    /// A file, and a second name for it.
    fn with_hard_link() -> Vec<u8> {
        let mut archive = Builder::new(Vec::new());
        let mut header = Header::new_gnu();
        header.set_mode(0o644);
        header.set_size(4);
        archive.append_data(&mut header, "a", &b"text"[..]).unwrap();
        header.set_entry_type(EntryType::Link);
        header.set_size(0);
        archive.append_link(&mut header, "b", "a").unwrap();
        archive.into_inner().unwrap()
    }

    fn unpack_into(piece: usize, pause: Duration, pace: Pace) -> Outcome<TreeReport> {
        let runtime = Runtime::new().unwrap();
        let _entered = runtime.enter();
        let places = Arc::new(Semaphore::new(2));
        let session = || {
            let (ours, theirs) = UnixStream::pair().unwrap();
            std::thread::spawn(move || serve(theirs, piece, pause));
            ours.set_nonblocking(true).unwrap();
            let socket = tokio::net::UnixStream::from_std(ours).unwrap();
            FileSession::with(socket, places.clone().try_acquire_owned().unwrap())
        };
        let limits = TreeLimits { pace, ..TreeLimits::default() };
        unpack((session(), session()), "/to", &with_hard_link()[..], runtime.handle(), limits)
    }

    #[test]
    fn a_sandbox_that_answers_a_byte_at_a_time_is_given_up() {
        let pace = Pace { grace: Duration::from_millis(300), ..Pace::default() };
        let refused = unpack_into(1, Duration::from_millis(20), pace).unwrap_err();
        assert!(refused.to_string().contains("comes on too slowly"), "{refused}");
    }

    #[test]
    fn a_sandbox_that_comes_on_has_its_time() {
        let report = unpack_into(10_000, Duration::from_millis(1), Pace::default()).unwrap();
        assert_eq!(report, TreeReport { entries: 2, bytes: 4 + SIZE, left_out: 0 });
    }
}
