//! Sessions over files: the host asks over a socket, and a thread of the kernel's own does what a
//! process of the session's user could do ([`thaw_abi::remote`]).

use alloc::boxed::Box;
use alloc::sync::Arc;
use alloc::vec::Vec;

use thaw_abi::bind::{MOUNT_VOLUME, MOUNT_VOLUME_WRITABLE};
use thaw_abi::control::FileAttributes;
use thaw_abi::remote::*;

use super::stream::HostSocket;
use super::tree;
use super::user;
use super::watch::{Depth, Watch};
use crate::errno::{Errno, Result};
use crate::fs::Context;
use crate::fs::file::{Events, OpenFile, OpenFlags};
use crate::fs::inode::{AttributeChanges, Attributes, FileType, Link, NewKind, Timestamp};
use crate::fs::namespace::{self, RenameKind};
use crate::fs::open::{How, open};
use crate::fs::path::Path;
use crate::fs::walk::{Follow, Resolve, walk};
use crate::io::{Sink, Source};
use crate::platform::machine::HostFd;
use crate::state::{ProcessFiles, kernel};
use crate::syscall::files::attributes;
use crate::task::process::FIRST_PID;
use crate::task::work::{self, Next, Work};
use crate::task::{Credentials, current_process, host_process, scheduler};

/// Where the bytes of a piece lie in a buffer, behind its length: a copy to such an address is several
/// times as fast as one to any other.
const PIECE_AT: usize = 64;
/// Numbers of mounts are below this.
const MOUNTS_MAX: u32 = 256;

/// Begins a session of a user (empty: that of the first process) over a socket.
pub fn start(fd: HostFd, user: Vec<u8>) {
    let session = Session { socket: HostSocket::new(fd), user, out: Vec::new() };
    let files = ProcessFiles::new(kernel().fs.namespace.clone());
    work::start(b"files", Credentials::default(), files, Box::new(session));
}

struct Session {
    socket: HostSocket,
    user: Vec<u8>,
    /// What is to be sent.
    out: Vec<u8>,
}

/// The host has closed its end, or breaks the protocol: the session is over.
struct Over;

impl Work for Session {
    fn run(mut self: Box<Self>) -> Next {
        let greeting = self.become_user();
        self.answer(greeting.map(|()| Answer::default()));
        while self.flush().and_then(|()| self.serve()).is_ok() {}
        drop(self);
        super::session_ended();
        Next::End
    }
}

/// What a request without pieces is answered with.
#[derive(Default)]
struct Answer {
    attributes: Option<FileAttributes>,
    bytes: Vec<u8>,
}

impl Session {
    fn become_user(&self) -> Result<()> {
        let own = current_process();
        let first = kernel().tasks.process(FIRST_PID).ok_or(Errno::ESRCH)?;
        own.enter_mounts(&first);
        // Whoever looks the user up may read what everybody may.
        *own.credentials.borrow_mut() = first.credentials.borrow_mut().clone();
        if !self.user.is_empty() {
            let user = user::find(&Context::current(), &self.user)?;
            *own.credentials.borrow_mut() = user.credentials;
        }
        Ok(())
    }

    /// Serves one request.
    fn serve(&mut self) -> core::result::Result<(), Over> {
        let mut head = [0; size_of::<FileRequest>()];
        self.receive(&mut head)?;
        let request: FileRequest = bytemuck::pod_read_unaligned(&head);
        let is_short = |len: u32| len as usize <= FILE_PATH_MAX;
        if !is_short(request.path_len) || !is_short(request.other_len) {
            return Err(Over);
        }
        let mut path = alloc::vec![0; request.path_len as usize];
        self.receive(&mut path)?;
        let mut other = alloc::vec![0; request.other_len as usize];
        self.receive(&mut other)?;
        host_process::count_request();
        let context = Context::current();
        match request.operation {
            FILE_READ => self.read(&context, &request, &path),
            FILE_LIST => self.list(&context, &path),
            FILE_WRITE => self.write(&context, &request, &path),
            FILE_WATCH => self.watch(&context, &request, &path),
            _ => {
                let outcome = perform(&context, &request, &path, &other);
                self.answer(outcome);
                Ok(())
            }
        }
    }

    fn answer(&mut self, outcome: Result<Answer>) {
        let (errno, answer) = match outcome {
            Ok(answer) => (0, answer),
            Err(error) => (error.0, Answer::default()),
        };
        let attributes = answer.attributes.unwrap_or(bytemuck::Zeroable::zeroed());
        let head = FileAnswer { errno, len: answer.bytes.len() as u32, attributes };
        self.out.extend_from_slice(bytemuck::bytes_of(&head));
        self.out.extend_from_slice(&answer.bytes);
    }

    /// Adds a piece, or with none the end.
    fn piece(&mut self, bytes: &[u8]) -> core::result::Result<(), Over> {
        self.out.extend_from_slice(&(bytes.len() as u32).to_ne_bytes());
        self.out.extend_from_slice(bytes);
        if self.out.len() >= FILE_PIECE_MAX { self.flush() } else { Ok(()) }
    }

    /// Sends a piece that lies in a buffer behind [`PIECE_AT`] bytes, and what is to be sent before it,
    /// or keeps a short one as [`Session::piece`] does.
    fn piece_in(&mut self, buffer: &mut [u8]) -> core::result::Result<(), Over> {
        let len = buffer.len() - PIECE_AT;
        if len < FILE_PIECE_MAX / 2 {
            return self.piece(&buffer[PIECE_AT..]);
        }
        self.flush()?;
        let head = PIECE_AT - size_of::<u32>();
        buffer[head..PIECE_AT].copy_from_slice(&(len as u32).to_ne_bytes());
        self.send(&buffer[head..])
    }

    /// Adds an end before its time.
    fn failed_piece(&mut self, error: Errno) {
        self.out.extend_from_slice(&(FILE_FAILED | error.0 as u32).to_ne_bytes());
    }

    fn read(
        &mut self,
        context: &Context,
        request: &FileRequest,
        path: &[u8],
    ) -> core::result::Result<(), Over> {
        let flags = OpenFlags::NONBLOCK;
        let file = match open_regular(context, path, flags, 0) {
            Ok(file) => file,
            Err(error) => {
                self.answer(Err(error));
                return Ok(());
            }
        };
        self.answer(Ok(attributes_of(&file.path)));
        let (mut offset, mut left) = (request.offset, request.len);
        let mut buffer = alloc::vec![0; PIECE_AT + FILE_PIECE_MAX];
        while left > 0 {
            let room = usize::try_from(left).unwrap_or(usize::MAX).min(FILE_PIECE_MAX);
            match file.file.read(&mut Sink::kernel(&mut buffer[PIECE_AT..][..room]), offset) {
                Ok(0) => break,
                Ok(count) => {
                    self.piece_in(&mut buffer[..PIECE_AT + count])?;
                    offset = offset.saturating_add(count as u64);
                    left -= count as u64;
                }
                Err(error) => {
                    self.failed_piece(error);
                    return Ok(());
                }
            }
            scheduler::yield_if_due();
        }
        self.piece(&[])
    }

    fn list(&mut self, context: &Context, path: &[u8]) -> core::result::Result<(), Over> {
        let found = tree::directory(context, &context.cwd, path);
        let (directory, names) = match found.and_then(|path| tree::names(context, path)) {
            Ok(found) => found,
            Err(error) => {
                self.answer(Err(error));
                return Ok(());
            }
        };
        self.answer(Ok(attributes_of(&Some(directory.clone()))));
        for name in names {
            // One that has gone meanwhile is not listed.
            let Ok(entry) = walk(context, &directory, &name, Follow::No) else { continue };
            let attributes = to_message(&entry.inode().attributes());
            self.piece(&[bytemuck::bytes_of(&attributes), &name].concat())?;
            scheduler::yield_if_due();
        }
        self.piece(&[])
    }

    /// Writes a file. What comes after an error is taken, and dropped.
    fn write(
        &mut self,
        context: &Context,
        request: &FileRequest,
        path: &[u8],
    ) -> core::result::Result<(), Over> {
        let mut file = open_to_write(context, request, path);
        let mut buffer = Vec::new();
        loop {
            let mut len = [0; 4];
            self.receive(&mut len)?;
            let len = u32::from_ne_bytes(len);
            if len & FILE_FAILED != 0 {
                // The host gives up; what has come stays.
                file = Err(Errno::ECANCELED);
                break;
            }
            if len as usize > FILE_PIECE_MAX {
                return Err(Over);
            }
            if len == 0 {
                break;
            }
            buffer.resize(len as usize, 0);
            self.receive(&mut buffer)?;
            if let Ok(open) = &file
                && let Err(error) = write_all(open, &buffer)
            {
                file = Err(error);
            }
            scheduler::yield_if_due();
        }
        let outcome = file.and_then(|file| {
            let place = file.path.as_ref().ok_or(Errno::EINVAL)?;
            change(context, place, request)?;
            Ok(attributes_of(&file.path))
        });
        self.answer(outcome);
        Ok(())
    }

    /// Tells what happens in a directory, until the host closes the session or sends anything.
    fn watch(
        &mut self,
        context: &Context,
        request: &FileRequest,
        path: &[u8],
    ) -> core::result::Result<(), Over> {
        let depth = match request.flags & FILE_RECURSIVE {
            0 => Depth::One,
            _ => Depth::All,
        };
        let begun = tree::directory(context, &context.cwd, path)
            .and_then(|directory| Watch::begin(context, &directory, depth));
        let mut watch = match begun {
            Ok(watch) => watch,
            Err(error) => {
                self.answer(Err(error));
                return Ok(());
            }
        };
        self.answer(Ok(Answer::default()));
        loop {
            match watch.next(context) {
                Ok(Some((event, path))) => {
                    self.piece(&[bytemuck::bytes_of(&event), &path].concat())?;
                    scheduler::yield_if_due();
                }
                Ok(None) => {
                    self.flush()?;
                    if self.socket.poll().intersects(Events::IN | Events::HUP | Events::ERR) {
                        return Err(Over);
                    }
                    let queues = [self.socket.queue(), watch.queue()];
                    scheduler::block_uninterruptibly_on(&queues);
                }
                Err(error) => {
                    self.failed_piece(error);
                    return Ok(());
                }
            }
        }
    }

    /// Receives exactly so many bytes.
    fn receive(&self, bytes: &mut [u8]) -> core::result::Result<(), Over> {
        let mut done = 0;
        while done < bytes.len() {
            match self.socket.read(&mut Sink::kernel(&mut bytes[done..])) {
                Ok(0) => return Err(Over),
                Ok(count) => done += count,
                Err(Errno::EAGAIN) => {
                    scheduler::block_uninterruptibly_on(&[self.socket.queue()]);
                }
                Err(_) => return Err(Over),
            }
        }
        Ok(())
    }

    /// Sends what is to be sent.
    fn flush(&mut self) -> core::result::Result<(), Over> {
        let out = core::mem::take(&mut self.out);
        self.send(&out)
    }

    fn send(&self, bytes: &[u8]) -> core::result::Result<(), Over> {
        let mut source = Source::kernel(bytes);
        while source.remaining() > 0 {
            match self.socket.write(&mut source) {
                Ok(_) => {}
                Err(Errno::EAGAIN) => {
                    scheduler::block_uninterruptibly_on(&[self.socket.queue()]);
                }
                Err(_) => return Err(Over),
            }
        }
        Ok(())
    }
}

/// Does what needs no pieces.
fn perform(context: &Context, request: &FileRequest, path: &[u8], other: &[u8]) -> Result<Answer> {
    let is_set = |flag| request.flags & flag != 0;
    let follow = if is_set(FILE_NO_FOLLOW) { Follow::No } else { Follow::Yes };
    let cwd = &context.cwd;
    match request.operation {
        FILE_STAT => return Ok(attributes_of(&Some(walk(context, cwd, path, follow)?))),
        FILE_MAKE_DIRECTORY => {
            let mode = if is_set(FILE_SET_MODE) { request.mode & 0o1777 } else { 0o777 };
            match is_set(FILE_PARENTS) {
                true => tree::make_all(context, path, mode)?,
                false => {
                    namespace::create(context, cwd, path, NewKind::Directory, mode)?;
                }
            }
        }
        FILE_RENAME => {
            if is_set(FILE_PARENTS) {
                tree::make_parents(context, other)?;
            }
            let kind = match is_set(FILE_EXCLUSIVE) {
                true => RenameKind::NoReplace,
                false => RenameKind::Replace,
            };
            namespace::rename(context, (cwd, path), (cwd, other), kind)?;
        }
        FILE_REMOVE => tree::remove(context, path, is_set(FILE_RECURSIVE))?,
        FILE_SYMLINK => {
            if other.is_empty() {
                return Err(Errno::ENOENT);
            }
            if is_set(FILE_PARENTS) {
                tree::make_parents(context, path)?;
            }
            namespace::create(context, cwd, path, NewKind::Symlink(other.to_vec()), 0o777)?;
        }
        FILE_READ_LINK => {
            let link = walk(context, cwd, path, Follow::No)?;
            let bytes = match link.inode().read_link()? {
                Link::Text(text) => text,
                Link::Magic(target) => target.absolute_name(&context.root).display(),
            };
            return Ok(Answer { bytes, ..Answer::default() });
        }
        FILE_CHANGE => change(context, &walk(context, cwd, path, follow)?, request)?,
        FILE_MOUNT => mount(context, request, path)?,
        _ => return Err(Errno::ENOSYS),
    }
    Ok(Answer::default())
}

/// Mounts a volume, whose files belong to the session's user.
fn mount(context: &Context, request: &FileRequest, at: &[u8]) -> Result<()> {
    let kind = u8::try_from(request.mode).map_err(|_| Errno::EINVAL)?;
    let number = u32::try_from(request.offset).map_err(|_| Errno::EINVAL)?;
    let is_volume = matches!(kind, MOUNT_VOLUME | MOUNT_VOLUME_WRITABLE);
    if !is_volume || !at.starts_with(b"/") || number >= MOUNTS_MAX {
        return Err(Errno::EINVAL);
    }
    let owner = (context.identity.uid, context.identity.gid);
    kernel().fs.mount_extra(number, kind, at, owner)
}

/// Changes what the request's flags say.
fn change(context: &Context, path: &Path, request: &FileRequest) -> Result<()> {
    if request.flags & FILE_SET_MODE != 0 {
        attributes::change_permissions(context, path, request.mode)?;
    }
    if request.flags & FILE_SET_TIME != 0 {
        if !context.identity.owns(&path.inode().attributes()) {
            return Err(Errno::EPERM);
        }
        let mtime = Timestamp { sec: request.mtime, nsec: 0 };
        let changes = AttributeChanges { mtime: Some(mtime), ..Default::default() };
        attributes::change(path, &changes)?;
    }
    Ok(())
}

/// Opens a regular file: nothing that could wait, or do more than hold bytes.
fn open_regular(
    context: &Context,
    path: &[u8],
    flags: OpenFlags,
    permissions: u32,
) -> Result<Arc<OpenFile>> {
    match walk(context, &context.cwd, path, Follow::Yes) {
        Ok(found) => match found.inode().file_type() {
            FileType::Regular => {}
            FileType::Directory => return Err(Errno::EISDIR),
            _ => return Err(Errno::EINVAL),
        },
        Err(Errno::ENOENT) if flags.contains(OpenFlags::CREAT) => {}
        Err(error) => return Err(error),
    }
    open(context, &context.cwd, path, How { flags, permissions, resolve: Resolve::empty() })
}

fn open_to_write(context: &Context, request: &FileRequest, path: &[u8]) -> Result<Arc<OpenFile>> {
    let is_set = |flag| request.flags & flag != 0;
    if is_set(FILE_PARENTS) {
        tree::make_parents(context, path)?;
    }
    let mut flags = OpenFlags::WRONLY | OpenFlags::CREAT | OpenFlags::NONBLOCK;
    flags.set(OpenFlags::EXCL, is_set(FILE_EXCLUSIVE));
    flags.set(OpenFlags::APPEND, is_set(FILE_APPEND));
    flags.set(OpenFlags::TRUNC, !is_set(FILE_APPEND) && request.offset == 0);
    let mode = if is_set(FILE_SET_MODE) { request.mode & 0o7777 } else { 0o666 };
    let file = open_regular(context, path, flags, mode)?;
    file.set_position(request.offset);
    Ok(file)
}

fn write_all(file: &OpenFile, bytes: &[u8]) -> Result<()> {
    let mut source = Source::kernel(bytes);
    while source.remaining() > 0 {
        if file.write(&mut source)? == 0 {
            return Err(Errno::EIO);
        }
    }
    Ok(())
}

fn attributes_of(path: &Option<Path>) -> Answer {
    let attributes = path.as_ref().map(|path| to_message(&path.inode().attributes()));
    Answer { attributes, ..Answer::default() }
}

fn to_message(attributes: &Attributes) -> FileAttributes {
    FileAttributes {
        device: attributes.dev,
        inode: attributes.ino,
        size: attributes.size,
        mtime_sec: attributes.mtime.sec,
        mtime_nsec: attributes.mtime.nsec,
        mode: attributes.mode,
        uid: attributes.uid,
        gid: attributes.gid,
        nlink: attributes.nlink,
        rdev: attributes.rdev as u32,
    }
}
