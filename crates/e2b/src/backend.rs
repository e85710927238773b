//! What E2B's API needs of the sandboxes behind it, and no more. The node's own are bound to it in
//! `node_backend`; unit tests use one that lives in memory.

use super::problem::Problem;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use std::future::Future;
use std::io::Read;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;
use thaw_home::volumes::VolumeStore;
use thaw_node::remote::egress::ClientEgress;
use thaw_node::remote::{EgressWish, LimitsChange, SandboxVolume};
use thaw_store::Name;
use tokio::io::{AsyncRead, AsyncWrite};

/// A value that comes later, of a trait that is used as an object.
pub type Later<'a, T> = Pin<Box<dyn Future<Output = T> + Send + 'a>>;

/// The outcome of an operation: a value, or why there is none.
pub type Outcome<T> = Result<T, Problem>;

/// A sandbox that is wanted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Wanted {
    /// Its id, which nobody has yet.
    pub id: String,
    /// The function whose image it is a copy of.
    pub function: String,
    /// The snapshot that it is a copy of instead.
    pub snapshot: Option<String>,
    /// Seconds until its time has come.
    pub timeout_s: u64,
    /// Whether it is paused then, instead of ended.
    pub pauses: bool,
    /// What whoever asks wants to know of it later.
    pub metadata: BTreeMap<String, String>,
    /// Where it may connect to.
    pub egress: EgressWish,
    /// What it may use, where that is not what its function says.
    pub limits: LimitsChange,
    /// Volumes of the node that are mounted in it.
    pub volumes: Vec<SandboxVolume>,
    /// Volumes of the node that whoever asks may use, such as those that a snapshot has mounted.
    pub granted_volumes: BTreeSet<Name>,
}

/// What sandboxes are copies of, so exactly that equal ones begin with the same.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Base {
    /// The image of a version of a function.
    Function {
        /// The function.
        name: String,
        /// Its version.
        version: u32,
        /// The image.
        image: String,
        /// A hash of its configuration.
        config: String,
    },
    /// A checkpoint, by its name, which no other one ever has.
    Checkpoint(String),
}

impl Base {
    /// Whether this is another version of the same function.
    pub fn replaces(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Function { name, .. }, Self::Function { name: other_name, .. }) => {
                name == other_name && self != other
            }
            _ => false,
        }
    }
}

/// A sandbox.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Sandbox {
    /// Its id.
    pub id: String,
    /// The function whose image it is a copy of.
    pub function: String,
    /// When it was made, in milliseconds since 1970.
    pub created_ms: u64,
    /// When its time comes, in milliseconds since 1970; none: it is paused, and stays.
    pub deadline_ms: Option<u64>,
    /// Whether it is paused then, instead of ended.
    pub pauses: bool,
    /// See [`Wanted::metadata`].
    pub metadata: BTreeMap<String, String>,
    /// Processors that it may use.
    pub cpus: u32,
    /// Memory that it may use, in bytes.
    pub memory_bytes: u64,
    /// Where relative paths begin.
    pub directory: String,
    /// Volumes of the node that it has beside those of its function.
    pub volumes: Vec<SandboxVolume>,
}

impl Sandbox {
    /// Whether it has been paused, by a request or because its time has come.
    pub fn is_paused(&self) -> bool {
        self.deadline_ms.is_none()
    }
}

/// A process that is wanted.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct WantedProcess {
    /// The program, and its arguments.
    pub argv: Vec<String>,
    /// Environment, added to that of the sandbox.
    pub envs: BTreeMap<String, String>,
    /// Working directory; none: that of the sandbox.
    pub cwd: Option<String>,
    /// User; none: that of the sandbox.
    pub user: Option<String>,
    /// Rows and columns of its terminal, if it has one.
    pub terminal: Option<(u16, u16)>,
    /// Whether its standard input stays open.
    pub stdin: bool,
    /// A name of whoever asks.
    pub tag: Option<String>,
}

/// How a process has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ended {
    /// With an exit code.
    Code(u8),
    /// By a signal.
    Signal(u8),
}

/// What a process prints next.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Piece {
    /// To standard output, or its terminal.
    Stdout(Vec<u8>),
    /// To standard error.
    Stderr(Vec<u8>),
    /// So many bytes were printed that nobody has kept.
    Lost(u64),
    /// Nothing more: it has ended.
    End(Ended),
    /// The sandbox has ended, and the process with it.
    Gone,
}

/// What one process prints, in order.
pub trait Output: Send {
    /// The next piece; waits for it.
    fn next(&mut self) -> Later<'_, Piece>;
}

/// A process that was started from outside.
pub trait Process: Send + Sync {
    /// Its number in the sandbox.
    fn pid(&self) -> u32;
    /// What was asked for.
    fn wanted(&self) -> WantedProcess;
    /// What it prints from now on.
    ///
    /// # Errors
    /// Too many read it.
    fn follow(&self) -> Outcome<Box<dyn Output>>;
    /// Passes bytes to its standard input or its terminal.
    fn write<'a>(&'a self, bytes: &'a [u8]) -> Later<'a, ()>;
    /// Its standard input is at its end.
    fn close_stdin(&self) -> Later<'_, ()>;
    /// Sends a signal to it and its children.
    ///
    /// # Errors
    /// The sandbox takes no message.
    fn signal(&self, number: u32) -> Outcome<()>;
    /// Its terminal has another size, in rows and columns.
    fn resize(&self, size: (u16, u16));
    /// Waits until it has ended.
    fn ended(&self) -> Later<'_, ()>;
}

/// A process that has begun to run, and all that it prints.
pub type Started = (Arc<dyn Process>, Box<dyn Output>);

/// What a file is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FileKind {
    /// A regular file.
    File,
    /// A directory.
    Directory,
    /// A symbolic link.
    Link,
    /// Something else.
    Other,
}

/// A file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FileView {
    /// Its name in its directory, or the path that was asked for.
    pub name: String,
    /// What it is.
    pub kind: FileKind,
    /// Bytes.
    pub size: u64,
    /// Permissions.
    pub mode: u32,
    /// Owner.
    pub uid: u32,
    /// Group.
    pub gid: u32,
    /// Last modification, in seconds since 1970.
    pub mtime: i64,
}

/// The files of a sandbox, with the rights of one user. All paths are absolute.
pub trait Files: Send {
    /// What a file is, or what a link leads to if `follows`.
    fn stat<'a>(&'a mut self, path: &'a str, links: Links) -> Later<'a, Outcome<FileView>>;
    /// Where a symbolic link leads.
    fn read_link<'a>(&'a mut self, path: &'a str) -> Later<'a, Outcome<String>>;
    /// The entries of a directory, sorted by name.
    fn list<'a>(&'a mut self, path: &'a str) -> Later<'a, Outcome<Vec<FileView>>>;
    /// Makes a directory, and those above it that are missing.
    fn make_directory<'a>(&'a mut self, path: &'a str) -> Later<'a, Outcome<()>>;
    /// Gives a file another name.
    fn rename<'a>(&'a mut self, from: &'a str, to: &'a str) -> Later<'a, Outcome<()>>;
    /// Removes a file, or a directory with all in it.
    fn remove<'a>(&'a mut self, path: &'a str) -> Later<'a, Outcome<()>>;
    /// Begins to read a file, so many bytes at most; [`Files::next_piece`] has its contents.
    fn read<'a>(&'a mut self, path: &'a str, most: u64) -> Later<'a, Outcome<FileView>>;
    /// The next bytes of the file that is read; `None` at its end.
    fn next_piece<'a>(&'a mut self, path: &'a str) -> Later<'a, Outcome<Option<Vec<u8>>>>;
    /// Begins to write a file, and makes directories above it that are missing.
    /// [`Files::put`] and [`Files::finish`] follow.
    fn write<'a>(&'a mut self, path: &'a str) -> Later<'a, Outcome<()>>;
    /// Adds bytes to the file that is written.
    fn put<'a>(&'a mut self, bytes: &'a [u8]) -> Later<'a, Outcome<()>>;
    /// Begins to watch a directory; [`Files::next_event`] follows, and nothing else.
    fn watch<'a>(&'a mut self, path: &'a str, depth: Depth) -> Later<'a, Outcome<()>>;
    /// What happens next in the directory that is watched, and to which file in it.
    fn next_event<'a>(&'a mut self, path: &'a str) -> Later<'a, Outcome<(Happened, String)>>;
    /// All of the file has been written.
    fn finish<'a>(&'a mut self, path: &'a str) -> Later<'a, Outcome<FileView>>;
}

/// Whether the last part of a path is followed if it is a symbolic link.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Links {
    /// What it leads to is meant.
    Followed,
    /// The link is meant.
    Kept,
}

/// Which directories are watched.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Depth {
    /// The one that is named.
    One,
    /// With all in it.
    All,
}

/// What has happened to a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Happened {
    /// It was created.
    Created,
    /// Its contents have changed.
    Written,
    /// It was removed.
    Removed,
    /// It has another name, or is elsewhere.
    Renamed,
    /// Its attributes have changed.
    Changed,
}

/// What a sandbox uses.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Usage {
    /// CPU time in percent of one processor, just now; none where the host does not count it.
    pub cpu_percent: Option<f64>,
    /// Memory, in bytes, files included.
    pub memory_bytes: u64,
}

/// What a sandbox has used until now, and has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Count {
    /// CPU time since its host process was made; none where the host does not count it.
    pub cpu_time: Option<Duration>,
    /// Memory, in bytes, files included.
    pub memory_bytes: u64,
}

/// A connection that carries bytes both ways.
pub trait ByteStream: AsyncRead + AsyncWrite + Send + Unpin {}

impl<T: AsyncRead + AsyncWrite + Send + Unpin> ByteStream for T {}

/// Sandboxes.
pub trait Backend: Send + Sync {
    /// Whether what is wanted could be made with its limits.
    fn check<'a>(&'a self, wanted: &'a Wanted) -> Later<'a, Outcome<()>>;
    /// What one would be a copy of that is made now.
    ///
    /// # Errors
    /// There is no such function.
    fn base(&self, wanted: &Wanted) -> Outcome<Base>;
    /// Makes one.
    fn create(&self, wanted: Wanted) -> Later<'_, Outcome<Sandbox>>;
    /// One that is there, running or paused.
    fn find(&self, id: &str) -> Option<Sandbox>;
    /// Whether there is none of this name, not even one that cannot be reached just now.
    fn is_gone(&self, id: &str) -> bool {
        self.find(id).is_none()
    }

    /// Ends one.
    ///
    /// # Errors
    /// There is none.
    fn kill(&self, id: &str) -> Outcome<()>;
    /// Has one give up its memory and stay, until it is resumed.
    fn pause<'a>(&'a self, id: &'a str) -> Later<'a, Outcome<()>>;
    /// Has one run that was paused, with a new timeout.
    fn resume<'a>(&'a self, id: &'a str, timeout_s: u64) -> Later<'a, Outcome<()>>;
    /// Its time comes in so many seconds.
    ///
    /// # Errors
    /// There is none.
    fn set_timeout(&self, id: &str, timeout_s: u64) -> Outcome<()>;
    /// Replaces the rules by which one connects.
    fn set_egress<'a>(&'a self, id: &'a str, asked: ClientEgress) -> Later<'a, Outcome<()>>;
    /// Makes a copy of one, with all that it has in memory.
    fn fork<'a>(&'a self, id: &'a str, copy: &'a str) -> Later<'a, Outcome<Sandbox>>;
    /// Writes all that one has in memory to the store, by a name that nobody has yet.
    ///
    /// # Errors
    /// [`Kind::Late`]: nobody waits for it any more, and it may be written yet.
    fn snapshot<'a>(&'a self, id: &'a str, name: &'a str) -> Later<'a, Outcome<()>>;
    /// The volumes of the node.
    ///
    /// # Errors
    /// There are none here.
    fn volumes(&self) -> Outcome<VolumeStore>;
    /// Whether a sandbox has a volume of the node that is not ending: also one that is asleep, and whose
    /// volumes are not open.
    fn has_volume(&self, name: &Name) -> bool;
    /// Removes what [`Backend::snapshot`] has written; whether it was there.
    fn remove_snapshot<'a>(&'a self, name: &'a str) -> Later<'a, Outcome<bool>>;
    /// Names of all that it has written and that is there, and that begin so.
    fn snapshots<'a>(&'a self, prefix: &'a str) -> Later<'a, Outcome<Vec<String>>>;
    /// What one uses now; none: it is paused, hibernated or asleep. Wakes nobody.
    fn usage<'a>(&'a self, id: &'a str) -> Later<'a, Outcome<Option<Usage>>>;
    /// What one has used until now; none as above. Wakes nobody.
    fn count<'a>(&'a self, id: &'a str) -> Later<'a, Outcome<Option<Count>>>;
    /// Starts a process in one, and waits until it runs.
    fn start<'a>(&'a self, id: &'a str, wanted: WantedProcess) -> Later<'a, Outcome<Started>>;
    /// Processes of one that were started so, and run.
    ///
    /// # Errors
    /// There is no such sandbox.
    fn processes<'a>(&'a self, id: &'a str) -> Later<'a, Outcome<Vec<Arc<dyn Process>>>>;
    /// Connects to a port on which a program in one listens.
    fn port<'a>(&'a self, id: &'a str, port: u16) -> Later<'a, Outcome<Box<dyn ByteStream>>>;
    /// Makes what a stream of tar has below a directory of one, as its superuser.
    fn unpack<'a>(
        &'a self,
        id: &'a str,
        directory: &'a str,
        archive: Box<dyn Read + Send>,
    ) -> Later<'a, Outcome<()>>;
    /// The files of one, with the rights of a user; none: that of the sandbox.
    fn files<'a>(
        &'a self,
        id: &'a str,
        user: Option<&'a str>,
    ) -> Later<'a, Outcome<Box<dyn Files>>>;
}
