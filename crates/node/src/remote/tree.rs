//! Trees of files as streams of tar (POSIX pax, with GNU's long names): out of an instance with
//! [`pack`], into it with [`unpack`](super::untree::unpack).
//!
//! Names, sizes and kinds are what the guest says; each is judged before it is used, and all that
//! is kept of them has a bound. The stream names nothing outside the tree: paths are relative,
//! without `..`.

use super::files::{FileInfo, FileKind, FileProblem, FileSession, shown};
use super::pace::{Pace, Waits};
use axum::body::Bytes;
use std::io;
use std::path::Path;
use std::time::Duration;
use tar::{Builder, EntryType, Header};
use tokio::sync::{Semaphore, mpsc};
use tokio::time::timeout;

/// Content type of a tree.
pub const TREE_TYPE: &str = "application/x-tar";
/// Keyword of the pax record with which a stream says why it ends before its time.
pub const FAILED_RECORD: &str = "THAW.failed";
/// Keyword of the pax record that names what a stream has left out.
pub const LEFT_OUT_RECORD: &str = "THAW.left_out";
/// Most files and directories of a tree.
pub const TREE_ENTRIES_MAX: u64 = 1 << 20;
/// Most bytes of the files of a tree.
pub const TREE_BYTES_MAX: u64 = 64 << 30;
/// Most bytes of names and attributes that are held while a tree is read.
const HELD_MAX: usize = 32 << 20;
/// Most trees that a node packs and unpacks at a time.
const TREES_MAX: usize = 8;
/// Most names of what is left out; others are counted.
const NAMED_MAX: usize = 10;
/// Bytes that an archive is made of multiples of.
const BLOCK: u64 = 512;

/// How long a client may take for the next bytes.
pub const CLIENT_PATIENCE: Duration = Duration::from_secs(60);

/// How long what a client is told last has until its connection breaks.
const BREAK_AFTER: Duration = Duration::from_millis(200);
/// How long a sandbox may take to say what is in a directory.
const LIST_PATIENCE: Duration = Duration::from_secs(60);

/// Places for those who copy trees.
pub static PLACES: Semaphore = Semaphore::const_new(TREES_MAX);

type Outcome<T> = Result<T, FileProblem>;
/// Where a stream goes: its bytes, or its end before its time.
pub type Sink = mpsc::Sender<Result<Bytes, io::Error>>;

/// What a tree may take.
#[derive(Clone, Copy, Debug)]
pub struct TreeLimits {
    /// Files and directories.
    pub entries: u64,
    /// Bytes of files.
    pub bytes: u64,
    /// Bytes of names and attributes that are held at a time.
    pub held: usize,
    /// Time of the sandbox.
    pub pace: Pace,
}

impl Default for TreeLimits {
    fn default() -> Self {
        let pace = Pace::default();
        Self { entries: TREE_ENTRIES_MAX, bytes: TREE_BYTES_MAX, held: HELD_MAX, pace }
    }
}

impl TreeLimits {
    /// Counts an entry, and says if it is one too many.
    pub(super) fn take(&mut self, path: &str, bytes: u64) -> Outcome<()> {
        let left = self.entries.checked_sub(1).zip(self.bytes.checked_sub(bytes));
        (self.entries, self.bytes) = left.ok_or_else(|| {
            FileProblem::Refused(
                libc::EFBIG,
                format!(
                    "{}: the tree has more than {TREE_ENTRIES_MAX} entries, or {} GiB; copy parts \
                     of it",
                    shown(path),
                    TREE_BYTES_MAX >> 30
                ),
            )
        })?;
        Ok(())
    }
}

/// A directory that is being packed.
struct Level {
    /// Its path in the tree, with a slash behind it; empty for the tree itself.
    path: String,
    /// What is left of it.
    rest: std::vec::IntoIter<FileInfo>,
    /// What it takes in memory.
    bytes: usize,
}

/// Sends a directory of a sandbox as a stream. Where that fails half-way, the stream ends before
/// its time; between two entries it says why in a last record.
pub async fn pack(session: FileSession, root: String, limits: TreeLimits, sink: Sink) {
    let client = sink.clone();
    let mut packer = Packer::new(session, root, limits, sink);
    let packed = tokio::select! {
        packed = packer.run() => packed,
        // Whatever the sandbox still says is for nobody.
        () = client.closed() => return,
    };
    if let Err(problem) = packed {
        // Within a file it would be read as contents.
        if !packer.is_within_file && packer.record(FAILED_RECORD, &problem.to_string()).is_ok() {
            let _ = packer.flush().await;
            // What the server has not written yet is lost when the connection breaks.
            tokio::time::sleep(BREAK_AFTER).await;
        }
        // Only that breaks the connection: without it the stream would end as if it were whole.
        let broken = packer.sink.send(Err(io::Error::other(problem.to_string())));
        let _ = timeout(CLIENT_PATIENCE, broken).await;
    }
}

struct Packer {
    session: FileSession,
    root: String,
    limits: TreeLimits,
    waits: Waits,
    sink: Sink,
    /// Heads of entries, until they are sent.
    heads: Builder<Vec<u8>>,
    held: usize,
    left_out: Vec<String>,
    left_out_count: u64,
    /// The head of a file is sent, and its contents are not all.
    is_within_file: bool,
}

impl Packer {
    fn new(session: FileSession, root: String, limits: TreeLimits, sink: Sink) -> Self {
        let root = root.trim_end_matches('/').to_owned();
        let (heads, waits) = (Builder::new(Vec::new()), Waits::new(limits.pace));
        let (held, left_out, left_out_count, is_within_file) = Default::default();
        Self {
            session,
            root,
            limits,
            waits,
            sink,
            heads,
            held,
            left_out,
            left_out_count,
            is_within_file,
        }
    }

    async fn run(&mut self) -> Outcome<()> {
        let root = self.path("");
        let info = self.waits.wait(self.session.stat(&root, true)).await?;
        self.directory("./", &info)?;
        let mut stack = vec![self.level(String::new()).await?];
        while let Some(level) = stack.last_mut() {
            let Some(info) = level.rest.next() else {
                self.held -= level.bytes;
                stack.pop();
                continue;
            };
            if info.name.contains('/') || ["", ".", ".."].contains(&info.name.as_str()) {
                return Err(FileProblem::Lost("it lists what is no name of a file".to_owned()));
            }
            let path = format!("{}{}", level.path, info.name);
            if let Some(below) = self.entry(path, &info).await? {
                stack.push(below);
            }
        }
        self.end().await
    }

    /// A path of the tree in the sandbox.
    fn path(&self, path: &str) -> String {
        match (self.root.is_empty(), path.is_empty()) {
            (false, true) => self.root.clone(),
            _ => format!("{}/{path}", self.root),
        }
    }

    /// What a directory has in it.
    async fn level(&mut self, path: String) -> Outcome<Level> {
        let inside = self.path(&path);
        let entries = timeout(LIST_PATIENCE, self.waits.wait(self.session.list(&inside)))
            .await
            .map_err(|_| {
            FileProblem::Lost(format!("it does not say what is in {} in time", shown(&inside)))
        })??;
        let of_one = |info: &FileInfo| size_of::<FileInfo>() + info.name.len();
        let bytes = path.len() + entries.iter().map(of_one).sum::<usize>();
        self.held += bytes;
        if self.held > self.limits.held {
            return Err(FileProblem::Refused(
                libc::EOVERFLOW,
                format!(
                    "{}: the directories on the way here have more than {} MiB of names; copy \
                     parts of the tree",
                    shown(&path),
                    self.limits.held >> 20
                ),
            ));
        }
        Ok(Level { path, rest: entries.into_iter(), bytes })
    }

    /// Packs one entry; what is in it if it is a directory.
    async fn entry(&mut self, path: String, info: &FileInfo) -> Outcome<Option<Level>> {
        self.waits.entry();
        match info.kind {
            FileKind::File => self.file(&path, info).await?,
            FileKind::Link => self.link(&path, info).await?,
            FileKind::Other => {
                self.limits.take(&path, 0)?;
                self.leave_out(&path);
            }
            FileKind::Directory => {
                let below = self.level(path.clone() + "/").await;
                let Some(level) = self.found(&path, below)? else { return Ok(None) };
                self.directory(&level.path, info)?;
                self.flush().await?;
                return Ok(Some(level));
            }
        }
        Ok(None)
    }

    /// What was asked for, unless it is not there any more: what lives goes away now and then. A
    /// name that is not UTF-8 is never found.
    fn found<T>(&mut self, path: &str, outcome: Outcome<T>) -> Outcome<Option<T>> {
        match outcome {
            Err(FileProblem::Refused(libc::ENOENT, _)) => {
                self.limits.take(path, 0)?;
                self.leave_out(path);
                Ok(None)
            }
            outcome => outcome.map(Some),
        }
    }

    fn leave_out(&mut self, path: &str) {
        self.left_out_count += 1;
        if self.left_out.len() < NAMED_MAX {
            self.left_out.push(shown(path));
        }
    }

    fn directory(&mut self, path: &str, info: &FileInfo) -> Outcome<()> {
        self.limits.take(path, 0)?;
        let mut header = header_of(info, EntryType::Directory, 0);
        self.heads.append_data(&mut header, Path::new(path), io::empty()).map_err(unpackable(path))
    }

    async fn link(&mut self, path: &str, info: &FileInfo) -> Outcome<()> {
        let inside = self.path(path);
        let target = self.waits.wait(self.session.read_link(&inside)).await;
        let Some(target) = self.found(path, target)? else { return Ok(()) };
        self.limits.take(path, 0)?;
        let mut header = header_of(info, EntryType::Symlink, 0);
        let added = self.heads.append_link(&mut header, Path::new(path), Path::new(&target));
        added.map_err(unpackable(path))?;
        self.flush().await
    }

    /// A file, as long as it was when it was opened.
    async fn file(&mut self, path: &str, info: &FileInfo) -> Outcome<()> {
        let inside = self.path(path);
        let opened = self.waits.wait(self.session.read_up_to(&inside, info.size)).await;
        let Some(opened) = self.found(path, opened)? else { return Ok(()) };
        let size = opened.size.min(info.size);
        self.limits.take(path, size)?;
        let mut header = header_of(&opened, EntryType::Regular, size);
        let added = self.heads.append_data(&mut header, Path::new(path), io::empty());
        added.map_err(unpackable(path))?;
        self.flush().await?;
        self.is_within_file = true;
        let mut left = size;
        while let Some(piece) = self.waits.wait(self.session.next_piece(&inside)).await? {
            self.waits.moved(piece.len());
            left = left.checked_sub(piece.len() as u64).ok_or_else(|| changed(path))?;
            self.send(piece.into()).await?;
        }
        if left > 0 {
            return Err(changed(path));
        }
        let padding = size.next_multiple_of(BLOCK) - size;
        self.send(vec![0; padding as usize].into()).await?;
        self.is_within_file = false;
        Ok(())
    }

    /// A record for whoever reads the stream with Thaw; others pass it over.
    fn record(&mut self, keyword: &str, text: &str) -> io::Result<()> {
        let text: String = text.chars().map(|c| if c.is_control() { ' ' } else { c }).collect();
        let rest = format!(" {keyword}={text}\n");
        // The length counts its own digits (pax(1), "pax Extended Header").
        let mut len = rest.len() + 1;
        while len != rest.len() + len.to_string().len() {
            len = rest.len() + len.to_string().len();
        }
        let record = format!("{len}{rest}");
        let mut header = Header::new_ustar();
        header.set_entry_type(EntryType::XGlobalHeader);
        header.set_size(record.len() as u64);
        header.set_path("pax_global_header")?;
        header.set_cksum();
        self.heads.append(&header, record.as_bytes())
    }

    async fn end(&mut self) -> Outcome<()> {
        if self.left_out_count > 0 {
            let text = format!("{} {}", self.left_out_count, self.left_out.join(", "));
            self.record(LEFT_OUT_RECORD, &text)?;
        }
        self.heads.finish()?;
        self.flush().await
    }

    async fn flush(&mut self) -> Outcome<()> {
        let bytes = std::mem::take(self.heads.get_mut());
        self.send(bytes.into()).await
    }

    async fn send(&mut self, bytes: Bytes) -> Outcome<()> {
        if bytes.is_empty() {
            return Ok(());
        }
        match timeout(CLIENT_PATIENCE, self.sink.send(Ok(bytes))).await {
            Ok(Ok(())) => Ok(()),
            Ok(Err(_)) => Err(FileProblem::Lost("the client has gone".to_owned())),
            Err(_) => Err(FileProblem::Lost("the client reads nothing".to_owned())),
        }
    }
}

/// The head of an entry. Owners are not those of the client's machine, and are left out.
fn header_of(info: &FileInfo, kind: EntryType, size: u64) -> Header {
    let mut header = Header::new_gnu();
    header.set_entry_type(kind);
    header.set_mode(info.mode);
    header.set_size(size);
    header.set_mtime(u64::try_from(info.mtime).unwrap_or(0));
    header.set_uid(0);
    header.set_gid(0);
    header
}

fn changed(path: &str) -> FileProblem {
    let reason = "it became shorter while it was copied; copy again";
    FileProblem::Refused(libc::EBUSY, format!("{}: {reason}", shown(path)))
}

fn unpackable(path: &str) -> impl FnOnce(io::Error) -> FileProblem {
    let path = shown(path);
    move |error| {
        FileProblem::Refused(libc::EINVAL, format!("{path} has no place in an archive: {error}"))
    }
}
