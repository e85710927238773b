//! Files inside an instance, from outside. All paths are resolved there, by its kernel, with the
//! rights of the session's user; nothing of this host is touched.

use crate::remote::RemoteChannel;
use bytemuck::{Pod, Zeroable};
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
use serde::{Deserialize, Serialize};
use std::io::{self, IoSlice};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream as StdUnixStream;
use std::time::Duration;
use thaw_abi::control::FileAttributes;
use thaw_abi::remote::*;
use thaw_sandbox::{RemoteMessage, escape};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;
use tokio::sync::OwnedSemaphorePermit;
use tokio::time::timeout;

/// How long a sandbox may take for the next bytes.
const PATIENCE: Duration = Duration::from_secs(30);
/// Most entries of a directory that are listed.
const ENTRIES_MAX: usize = 100_000;
/// Most bytes of memory of what is listed at once: 100,000 names of 70 bytes.
const LIST_BYTES_MAX: usize = 24 << 20;
/// Most bytes of a name in a directory, and of the target of a link.
const NAME_MAX: usize = 4096;

/// Pieces of a file that are sent at once: about what a socket holds, so that the sandbox and the
/// daemon wake each other seldom.
const PIECES_AT_ONCE: usize = 8;

/// Why something was not done with a file.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum FileProblem {
    /// The sandbox says no: an error number, and one sentence.
    #[error("{1}")]
    Refused(i32, String),
    /// The sandbox does not know the user of the session.
    #[error("the sandbox does not know the user")]
    UnknownUser,
    /// The session is over: the sandbox has ended, breaks the protocol, or does not answer.
    #[error("the files of the sandbox cannot be reached ({0}); try again")]
    Lost(String),
}

impl From<io::Error> for FileProblem {
    fn from(error: io::Error) -> Self {
        Self::Lost(error.to_string())
    }
}

type Outcome<T> = Result<T, FileProblem>;

/// What a file is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "lowercase")]
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

/// A file, as the API shows it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
pub struct FileInfo {
    /// Its name, or the path that was asked for.
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

impl FileInfo {
    fn new(name: &[u8], attributes: &FileAttributes) -> Self {
        let kind = match attributes.mode & 0o170_000 {
            0o100_000 => FileKind::File,
            0o040_000 => FileKind::Directory,
            0o120_000 => FileKind::Link,
            _ => FileKind::Other,
        };
        Self {
            name: String::from_utf8_lossy(name).into_owned(),
            kind,
            size: attributes.size,
            mode: attributes.mode & 0o7777,
            uid: attributes.uid,
            gid: attributes.gid,
            mtime: attributes.mtime_sec,
        }
    }
}

/// A conversation with a sandbox about files.
pub struct FileSession {
    socket: UnixStream,
    /// The sandbox has said that it knows the user.
    is_greeted: bool,
    /// The length of the next piece of the file that is read, if that has come already.
    next_len: Option<u32>,
    _place: OwnedSemaphorePermit,
}

impl FileSession {
    /// Opens a session of a user; empty: that of the sandbox.
    ///
    /// # Errors
    /// One sentence.
    pub(crate) fn open(
        channel: &dyn RemoteChannel,
        user: &str,
        place: OwnedSemaphorePermit,
    ) -> Result<Self, String> {
        let message = RemoteMessage::files(user).map_err(|error| error.to_string())?;
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let pair = socketpair(AddressFamily::UNIX, SocketType::STREAM, flags, None);
        let (ours, theirs) = pair.map_err(|error| error.to_string())?;
        let socket = UnixStream::from_std(StdUnixStream::from(ours));
        let socket = socket.map_err(|error| error.to_string())?;
        let sent = channel.send_remote(message, &[theirs.as_fd()]);
        sent.map_err(|error| format!("the instance takes no message: {error}"))?;
        Ok(Self { socket, is_greeted: false, next_len: None, _place: place })
    }

    /// A session with whoever has the other end of a socket.
    #[cfg(test)]
    pub(super) fn with(socket: UnixStream, place: OwnedSemaphorePermit) -> Self {
        Self { socket, is_greeted: false, next_len: None, _place: place }
    }

    /// What a file is.
    ///
    /// # Errors
    /// See [`FileProblem`]; so for all that follow.
    pub async fn stat(&mut self, path: &str, follows: bool) -> Outcome<FileInfo> {
        let flags = if follows { 0 } else { FILE_NO_FOLLOW };
        let (answer, _) = self.simple(FILE_STAT, flags, path, "").await?;
        Ok(FileInfo::new(path.as_bytes(), &answer.attributes))
    }

    /// The target of a symbolic link.
    pub async fn read_link(&mut self, path: &str) -> Outcome<String> {
        let (_, bytes) = self.simple(FILE_READ_LINK, 0, path, "").await?;
        Ok(String::from_utf8_lossy(&bytes).into_owned())
    }

    /// Makes a directory, and those above it that are missing.
    pub async fn make_directory(&mut self, path: &str, mode: Option<u32>) -> Outcome<()> {
        let set = mode.map_or(0, |_| FILE_SET_MODE);
        let flags = FILE_PARENTS | set;
        let mode = mode.unwrap_or(0);
        let operation = FILE_MAKE_DIRECTORY;
        let request = FileRequest { operation, flags, mode, ..FileRequest::default() };
        self.ask(request, path, "").await?;
        self.answer(path).await.map(drop)
    }

    /// Changes permissions and the time of the last modification of what is at a path, in seconds
    /// since 1970. A symbolic link there is followed.
    pub async fn change(&mut self, path: &str, mode: u32, mtime: i64) -> Outcome<()> {
        let (operation, flags) = (FILE_CHANGE, FILE_SET_MODE | FILE_SET_TIME);
        let request = FileRequest { operation, flags, mode, mtime, ..FileRequest::default() };
        self.ask(request, path, "").await?;
        self.answer(path).await.map(drop)
    }

    /// Mounts a volume at a path; `number` and `kind` as for [`FILE_MOUNT`].
    pub(crate) async fn mount(&mut self, path: &str, number: u32, kind: u8) -> Outcome<()> {
        let (offset, mode) = (number.into(), kind.into());
        let operation = FILE_MOUNT;
        let request = FileRequest { operation, offset, mode, ..FileRequest::default() };
        self.ask(request, path, "").await?;
        self.answer(path).await.map(drop)
    }

    /// Gives a file another name.
    pub async fn rename(&mut self, from: &str, to: &str) -> Outcome<()> {
        self.simple(FILE_RENAME, 0, from, to).await.map(drop)
    }

    /// Makes a symbolic link, and directories above it that are missing.
    pub async fn symlink(&mut self, target: &str, path: &str) -> Outcome<()> {
        self.simple(FILE_SYMLINK, FILE_PARENTS, path, target).await.map(drop)
    }

    /// Removes a file, or a directory, with all in it if `all`.
    pub async fn remove(&mut self, path: &str, all: bool) -> Outcome<()> {
        let flags = if all { FILE_RECURSIVE } else { 0 };
        self.simple(FILE_REMOVE, flags, path, "").await.map(drop)
    }

    /// The entries of a directory, sorted by name.
    pub async fn list(&mut self, path: &str) -> Outcome<Vec<FileInfo>> {
        let request = FileRequest { operation: FILE_LIST, ..FileRequest::default() };
        self.ask(request, path, "").await?;
        self.answer(path).await?;
        let (mut entries, mut bytes) = (Vec::new(), 0);
        while let Some(piece) = self.piece(path).await? {
            let (head, name) =
                piece.split_at_checked(size_of::<FileAttributes>()).ok_or_else(broken)?;
            bytes += piece.len() + size_of::<FileInfo>();
            if entries.len() >= ENTRIES_MAX || name.len() > NAME_MAX || bytes > LIST_BYTES_MAX {
                return Err(FileProblem::Refused(
                    libc::EOVERFLOW,
                    format!("{} has more entries than are listed at once", shown(path)),
                ));
            }
            entries.push(FileInfo::new(name, &bytemuck::pod_read_unaligned(head)));
        }
        entries.sort_by(|a, b| a.name.cmp(&b.name));
        Ok(entries)
    }

    /// Begins to read a file; [`FileSession::next_piece`] has its contents.
    pub async fn read(&mut self, path: &str) -> Outcome<FileInfo> {
        self.read_up_to(path, u64::MAX).await
    }

    /// The same for so many bytes at its beginning.
    pub async fn read_up_to(&mut self, path: &str, len: u64) -> Outcome<FileInfo> {
        let operation = FILE_READ;
        self.ask(FileRequest { operation, len, ..FileRequest::default() }, path, "").await?;
        let (answer, _) = self.answer(path).await?;
        Ok(FileInfo::new(path.as_bytes(), &answer.attributes))
    }

    /// The next bytes of the file that is read; `None` at its end.
    pub async fn next_piece(&mut self, path: &str) -> Outcome<Option<Vec<u8>>> {
        let len = match self.next_len.take() {
            Some(len) => len,
            None => self.receive_plain().await?,
        };
        let Some(len) = piece_len(len, path)? else { return Ok(None) };
        // The length of the next one, or the end, follows without being asked for.
        let mut bytes = vec![0; len + size_of::<u32>()];
        self.receive(&mut bytes).await?;
        self.next_len = bytes.last_chunk().map(|next| u32::from_ne_bytes(*next));
        bytes.truncate(len);
        Ok(Some(bytes))
    }

    /// Begins to write a file, with directories above it that are missing; permissions and time
    /// as given. [`FileSession::put`] and [`FileSession::finish`] follow.
    pub async fn write(
        &mut self,
        path: &str,
        mode: Option<u32>,
        mtime: Option<i64>,
    ) -> Outcome<()> {
        let flags =
            FILE_PARENTS | mode.map_or(0, |_| FILE_SET_MODE) | mtime.map_or(0, |_| FILE_SET_TIME);
        let request = FileRequest {
            operation: FILE_WRITE,
            flags,
            mode: mode.unwrap_or(0),
            mtime: mtime.unwrap_or(0),
            ..FileRequest::default()
        };
        self.ask(request, path, "").await
    }

    /// Adds bytes to the file that is written.
    pub async fn put(&mut self, bytes: &[u8]) -> Outcome<()> {
        for bytes in bytes.chunks(PIECES_AT_ONCE * FILE_PIECE_MAX) {
            let pieces = bytes.chunks(FILE_PIECE_MAX);
            let lengths: Vec<_> = pieces.map(|piece| (piece.len() as u32).to_ne_bytes()).collect();
            let pieces = lengths.iter().zip(bytes.chunks(FILE_PIECE_MAX));
            let mut framed: Vec<_> =
                pieces.flat_map(|(len, piece)| [IoSlice::new(len), IoSlice::new(piece)]).collect();
            self.send_all(&mut framed).await?;
        }
        Ok(())
    }

    /// All of the file has been written; what it is now.
    pub async fn finish(&mut self, path: &str) -> Outcome<FileInfo> {
        self.send(&[0; 4]).await?;
        let (answer, _) = self.answer(path).await?;
        Ok(FileInfo::new(path.as_bytes(), &answer.attributes))
    }

    /// Begins to watch a directory, with those in it if `all`; [`FileSession::next_event`] tells
    /// what happens there. The session is of no other use then.
    pub async fn watch(&mut self, path: &str, all: bool) -> Outcome<()> {
        let flags = if all { FILE_RECURSIVE } else { 0 };
        self.simple(FILE_WATCH, flags, path, "").await.map(drop)
    }

    /// What happens next in the directory that is watched: `WATCH_*`, and the path of the file in
    /// it. Waits for it, without an end.
    pub async fn next_event(&mut self, path: &str) -> Outcome<(u32, String)> {
        self.socket.readable().await?;
        let piece = self.piece(path).await?.ok_or_else(broken)?;
        let (head, name) = piece.split_at_checked(size_of::<WatchEvent>()).ok_or_else(broken)?;
        if name.is_empty() || name.len() > FILE_PATH_MAX {
            return Err(broken());
        }
        let event: WatchEvent = bytemuck::pod_read_unaligned(head);
        Ok((event.what, String::from_utf8_lossy(name).into_owned()))
    }

    async fn simple(
        &mut self,
        operation: u32,
        flags: u32,
        path: &str,
        other: &str,
    ) -> Outcome<(FileAnswer, Vec<u8>)> {
        self.ask(FileRequest { operation, flags, ..FileRequest::default() }, path, other).await?;
        self.answer(path).await
    }

    async fn ask(&mut self, request: FileRequest, path: &str, other: &str) -> Outcome<()> {
        for text in [path, other] {
            if text.len() > FILE_PATH_MAX || text.contains('\0') {
                let why = "is longer than 4095 bytes, or has a NUL byte in it";
                return Err(FileProblem::Refused(libc::EINVAL, format!("{} {why}", shown(text))));
            }
        }
        let (path_len, other_len) = (path.len() as u32, other.len() as u32);
        let request = FileRequest { path_len, other_len, ..request };
        self.send(&[bytemuck::bytes_of(&request), path.as_bytes(), other.as_bytes()].concat()).await
    }

    async fn send(&mut self, bytes: &[u8]) -> Outcome<()> {
        match timeout(PATIENCE, self.socket.write_all(bytes)).await {
            Ok(sent) => Ok(sent?),
            Err(_) => Err(late()),
        }
    }

    async fn send_all(&mut self, mut slices: &mut [IoSlice<'_>]) -> Outcome<()> {
        while !slices.is_empty() {
            match timeout(PATIENCE, self.socket.write_vectored(slices)).await {
                Ok(Ok(0)) => return Err(io::Error::from(io::ErrorKind::WriteZero).into()),
                Ok(sent) => IoSlice::advance_slices(&mut slices, sent?),
                Err(_) => return Err(late()),
            }
        }
        Ok(())
    }

    async fn receive(&mut self, bytes: &mut [u8]) -> Outcome<()> {
        match timeout(PATIENCE, self.socket.read_exact(bytes)).await {
            Ok(received) => received.map(drop).map_err(FileProblem::from),
            Err(_) => Err(late()),
        }
    }

    async fn answer(&mut self, path: &str) -> Outcome<(FileAnswer, Vec<u8>)> {
        if !self.is_greeted {
            let (greeting, _) = self.one_answer().await?;
            if greeting.errno != 0 {
                return Err(match greeting.errno {
                    libc::ENOENT => FileProblem::UnknownUser,
                    errno => FileProblem::Refused(errno, explain(errno)),
                });
            }
            self.is_greeted = true;
        }
        let (answer, bytes) = self.one_answer().await?;
        match answer.errno {
            0 => Ok((answer, bytes)),
            errno => Err(refused(errno, path)),
        }
    }

    async fn one_answer(&mut self) -> Outcome<(FileAnswer, Vec<u8>)> {
        let answer: FileAnswer = self.receive_plain().await?;
        if answer.len as usize > NAME_MAX {
            return Err(broken());
        }
        let mut bytes = vec![0; answer.len as usize];
        self.receive(&mut bytes).await?;
        Ok((answer, bytes))
    }

    async fn receive_plain<T: Pod + Zeroable>(&mut self) -> Outcome<T> {
        let mut value = T::zeroed();
        self.receive(bytemuck::bytes_of_mut(&mut value)).await?;
        Ok(value)
    }

    async fn piece(&mut self, path: &str) -> Outcome<Option<Vec<u8>>> {
        let len = self.receive_plain().await?;
        let Some(len) = piece_len(len, path)? else { return Ok(None) };
        let mut bytes = vec![0; len];
        self.receive(&mut bytes).await?;
        Ok(Some(bytes))
    }
}

/// The length of a piece, as the sandbox has said it; `None`: it was the last one.
fn piece_len(said: u32, path: &str) -> Outcome<Option<usize>> {
    match said {
        0 => Ok(None),
        len if len & FILE_FAILED != 0 => Err(refused((len & !FILE_FAILED) as i32, path)),
        len if len as usize > FILE_PIECE_MAX => Err(broken()),
        len => Ok(Some(len as usize)),
    }
}

fn late() -> FileProblem {
    FileProblem::Lost(format!("no answer within {} s", PATIENCE.as_secs()))
}

fn broken() -> FileProblem {
    FileProblem::Lost("its answer makes no sense".to_owned())
}

pub(super) fn shown(path: &str) -> String {
    escape(path.as_bytes())
}

fn refused(errno: i32, path: &str) -> FileProblem {
    let why = match errno {
        // Whether there is a directory or not: no file has such a name.
        libc::EISDIR if path.ends_with('/') => {
            "a file is meant, and only a directory's name ends with a /; add the file's name".into()
        }
        errno => explain(errno),
    };
    FileProblem::Refused(errno, format!("{}: {why}", shown(path)))
}

/// What an error number of the sandbox means, for people.
fn explain(errno: i32) -> String {
    match errno {
        libc::ENOENT => "it does not exist in the sandbox".into(),
        libc::EACCES | libc::EPERM => "the user may not do that; name another user".into(),
        libc::EISDIR => "it is a directory".into(),
        libc::ENOTDIR => "a part of it is no directory".into(),
        libc::ENOTEMPTY => "the directory is not empty; say that all in it is meant".into(),
        libc::EINVAL => "it is no regular file, or cannot be used so".into(),
        libc::ENOSPC | libc::ENOMEM => {
            "the sandbox has no room for it; files take its memory, so raise `memory`".into()
        }
        errno => io::Error::from_raw_os_error(errno).to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_with_a_slash_is_not_said_to_be_a_directory() {
        let said = |path| match refused(libc::EISDIR, path) {
            FileProblem::Refused(_, said) => said,
            _ => panic!("refused"),
        };
        assert_eq!(said("/tmp"), "/tmp: it is a directory");
        assert!(said("/new/").contains("add the file's name"), "{}", said("/new/"));
    }
    use std::sync::Arc;
    use tokio::sync::Semaphore;

    #[tokio::test]
    async fn pieces_come_whole_and_in_order_however_little_a_socket_takes() {
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        let place = Arc::new(Semaphore::new(1)).try_acquire_owned().unwrap();
        let mut session = FileSession::with(ours, place);
        let lens = [1, FILE_PIECE_MAX, 3, 2_000_001];
        let bytes: Vec<u8> = (0..2_000_001u32).map(|n| (n / 7) as u8).collect();
        let sent = bytes.clone();
        let sender = tokio::spawn(async move {
            for len in lens {
                session.put(&sent[..len]).await.unwrap();
            }
        });
        for len in lens {
            let mut left = &bytes[..len];
            while !left.is_empty() {
                let piece = theirs.read_u32_le().await.unwrap() as usize;
                assert_eq!(piece, left.len().min(FILE_PIECE_MAX));
                let mut got = vec![0; piece];
                theirs.read_exact(&mut got).await.unwrap();
                assert!(got == left[..piece]);
                left = &left[piece..];
            }
        }
        sender.await.unwrap();
        assert_eq!(theirs.read(&mut [0]).await.unwrap(), 0, "nothing more came");
    }
}
