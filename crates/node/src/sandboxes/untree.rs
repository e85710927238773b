//! Trees that come as streams of tar, into an instance.
//!
//! The client says what is in a stream. Paths stay below the directory that was named, sizes and
//! counts have bounds, and each file is written by the instance's own kernel with the rights of
//! the session's user. Devices, FIFOs and sockets are left out.

use super::files::{FileProblem, FileSession, shown};
use super::tree::TreeLimits;
use axum::body::Bytes;
use serde::{Deserialize, Serialize};
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
    let mut unpacker = Unpacker { session, other, root, handle, limits, directories, held, report };
    unpacker.run(source)?;
    Ok(unpacker.report)
}

struct Unpacker<'a> {
    session: FileSession,
    other: FileSession,
    root: String,
    handle: &'a Handle,
    limits: TreeLimits,
    /// What permissions and times directories are to have when all is in them.
    directories: Vec<(String, u32, i64)>,
    /// Bytes of their paths.
    held: usize,
    report: TreeReport,
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
        self.handle.block_on(self.session.make_directory(path, mode))
    }

    fn entry<R: Read>(&mut self, mut entry: Entry<'_, R>) -> Outcome<()> {
        let kind = entry.header().entry_type();
        if kind.is_pax_global_extensions() {
            return Ok(());
        }
        let path = inner_path(&entry.path_bytes())?;
        refuse_sparse(&mut entry, &path)?;
        self.limits.take(&path, entry.size())?;
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
                self.handle.block_on(self.session.symlink(&target, &inside))?;
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
        match self.handle.block_on(self.session.remove(path, false)) {
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
        self.handle.block_on(self.session.write(path, Some(mode), Some(mtime)))?;
        let mut buffer = vec![0; PIECE];
        let mut written = 0;
        loop {
            let count = entry.read(&mut buffer).map_err(|error| broken(&error))?;
            if count == 0 {
                break;
            }
            self.handle.block_on(self.session.put(&buffer[..count]))?;
            written += count as u64;
        }
        if written != size {
            let reason = format!("it ends within {}", shown(path));
            return Err(broken(&io::Error::other(reason)));
        }
        self.report.bytes += written;
        self.handle.block_on(self.session.finish(path)).map(drop)
    }

    /// A second name of a file becomes a file with the same contents.
    fn duplicate(&mut self, from: &str, to: &str, mode: u32, mtime: i64) -> Outcome<()> {
        let (handle, other, session) = (self.handle, &mut self.other, &mut self.session);
        let copied = handle.block_on(async {
            let info = other.read(from).await?;
            self.limits.take(to, info.size)?;
            session.write(to, Some(mode), Some(mtime)).await?;
            let mut bytes = 0;
            while let Some(piece) = other.next_piece(from).await? {
                bytes += piece.len() as u64;
                if bytes > info.size {
                    let reason = "grew while it was copied; copy again";
                    let reason = format!("{} {reason}", shown(from));
                    return Err(FileProblem::Refused(libc::EBUSY, reason));
                }
                session.put(&piece).await?;
            }
            session.finish(to).await.map(|_| bytes)
        });
        self.report.bytes += copied?;
        Ok(())
    }

    /// Innermost ones first: a time changes when something is made in a directory.
    fn finish_directories(&mut self) -> Outcome<()> {
        while let Some((path, mode, mtime)) = self.directories.pop() {
            self.handle.block_on(self.session.change(&path, mode, mtime))?;
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
