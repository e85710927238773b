//! The standard streams: files over host descriptors that come with the boot.
//!
//! The file itself is saved; the descriptor is asked for anew at every use,
//! since each boot brings its own. A stream without one in this boot behaves
//! like `/dev/null`.

use alloc::string::String;
use alloc::sync::Arc;
use core::any::Any;

use thaw_abi::control::{FLAG_STDERR_TTY, FLAG_STDIN_TTY, FLAG_STDOUT_TTY, WindowSize};

use super::dentry::Dentry;
use super::file::{Events, File, OpenFile, OpenFlags, Stat};
use super::inode::{Attributes, FileType, FilesystemId, Inode, Statfs};
use super::path::Path;
use crate::errno::{Errno, Result};
use crate::io::{Sink, Source};
use crate::net::host_poll::{Handle, HostFile, Kind as HostKind};
use crate::platform::host::{HostFd, Peek};
use crate::platform::user::UserAddress;
use crate::sync::Lock;
use crate::task::wait::WaitQueue;

/// Number of a standard stream: 0, 1 or 2.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stream(pub usize);

impl Stream {
    fn is_terminal(self) -> bool {
        let flag = [FLAG_STDIN_TTY, FLAG_STDOUT_TTY, FLAG_STDERR_TTY][self.0.min(2)];
        crate::state::kernel().config.lock().flags & flag != 0
    }

    fn descriptor(self) -> Option<HostFd> {
        crate::boot::stdio::descriptor(self.0)
    }
}

/// An open standard stream.
pub struct StandardStream {
    stream: Stream,
    host: Arc<HostFile>,
    terminal: Lock<Terminal>,
}

/// `struct termios` of the kernel ABI (ioctl_tty(2)).
#[derive(Clone, Copy, Debug, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
struct Termios {
    input: u32,
    output: u32,
    control: u32,
    local: u32,
    line: u8,
    characters: [u8; 19],
}

impl Termios {
    /// What a fresh terminal has (`tty_std_termios`).
    const STANDARD: Termios = Termios {
        input: 0o2400,
        output: 0o5,
        control: 0o277,
        local: 0o105073,
        line: 0,
        characters: [3, 28, 127, 21, 4, 0, 1, 0, 17, 19, 26, 0, 18, 15, 23, 22, 0, 0, 0],
    };
}

/// `struct winsize` (ioctl_tty(2)).
#[derive(Clone, Copy, Debug, Default, PartialEq, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
struct WinSize {
    rows: u16,
    columns: u16,
    x_pixels: u16,
    y_pixels: u16,
}

struct Terminal {
    termios: Termios,
    foreground: u32,
}

impl StandardStream {
    fn new(stream: Stream) -> Arc<Self> {
        let terminal = Terminal { termios: Termios::STANDARD, foreground: 1 };
        let queue = Arc::new(WaitQueue::new());
        let host = HostFile::new(Handle::Standard(stream.0 as u8), HostKind::MayBlock, queue);
        crate::state::kernel().net.host_poll.register(&host);
        Arc::new(Self { stream, host, terminal: Lock::new(terminal) })
    }

    fn is_terminal(&self) -> bool {
        self.stream.is_terminal()
    }

    fn attributes(&self) -> Attributes {
        let (mode, rdev) = if self.is_terminal() {
            (0o020620, super::dev::makedev(136, 0))
        } else {
            (0o010600, 0)
        };
        Attributes {
            dev: 14,
            ino: 3 + self.stream.0 as u64,
            mode,
            nlink: 1,
            rdev,
            ..Attributes::default()
        }
    }
}

impl File for StandardStream {
    fn read(&self, sink: &mut Sink<'_>, _: u64) -> Result<usize> {
        if self.stream.descriptor().is_none() {
            return Ok(0);
        }
        self.host.read(sink, Peek::No)
    }

    fn write(&self, source: &mut Source<'_>, _: u64) -> Result<usize> {
        if self.stream.descriptor().is_none() {
            let count = source.remaining();
            source.advance(count);
            return Ok(count);
        }
        self.host.write(source)
    }

    fn poll(&self) -> Events {
        match self.stream.descriptor() {
            Some(_) => self.host.poll(),
            None => Events::IN | Events::OUT | Events::RDNORM | Events::WRNORM,
        }
    }

    fn wait_queue(&self) -> Option<&WaitQueue> {
        Some(self.host.queue())
    }

    fn stat(&self) -> Result<Stat> {
        Ok(self.attributes().to_stat())
    }

    fn ioctl(&self, request: u32, argument: UserAddress) -> Result<u64> {
        if !self.is_terminal() {
            return Err(Errno::ENOTTY);
        }
        match request {
            TCGETS => argument.write(&self.terminal.lock().termios)?,
            // Kept for TCGETS. The host's terminal stays as its user set it.
            TCSETS | TCSETSW | TCSETSF => {
                let termios: Termios = argument.read()?;
                self.terminal.lock().termios = termios;
            }
            TIOCGWINSZ => {
                let window = crate::state::kernel().window.get();
                let size =
                    WinSize { rows: window.rows, columns: window.columns, ..WinSize::default() };
                argument.write(&size)?;
            }
            TIOCSWINSZ => {
                let size: WinSize = argument.read()?;
                let window = WindowSize { rows: size.rows, columns: size.columns, reserved: 0 };
                crate::state::kernel().window.set(window);
            }
            TIOCGPGRP => {
                let group = self.terminal.lock().foreground;
                argument.write(&group)?;
            }
            TIOCSPGRP => {
                let group: u32 = argument.read()?;
                self.terminal.lock().foreground = group;
            }
            TIOCGSID => argument.write(&1u32)?,
            TIOCOUTQ | FIONREAD => argument.write(&0u32)?,
            TCFLSH | TCSBRK | TCXONC | TIOCSCTTY | TIOCNOTTY => {}
            _ => return Err(Errno::ENOTTY),
        }
        Ok(0)
    }

    fn description(&self) -> String {
        if self.is_terminal() {
            String::from("/dev/pts/0")
        } else {
            alloc::format!("pipe:[{}]", 3 + self.stream.0)
        }
    }

    fn as_any(&self) -> &dyn Any {
        self
    }

    fn into_any(self: Arc<Self>) -> Arc<dyn Any + Send + Sync> {
        self
    }
}

const TCGETS: u32 = 0x5401;
const TCSETS: u32 = 0x5402;
const TCSETSW: u32 = 0x5403;
const TCSETSF: u32 = 0x5404;
const TCSBRK: u32 = 0x5409;
const TCXONC: u32 = 0x540a;
const TCFLSH: u32 = 0x540b;
const TIOCSCTTY: u32 = 0x540e;
const TIOCGPGRP: u32 = 0x540f;
const TIOCSPGRP: u32 = 0x5410;
const TIOCOUTQ: u32 = 0x5411;
const TIOCGWINSZ: u32 = 0x5413;
const TIOCSWINSZ: u32 = 0x5414;
const FIONREAD: u32 = 0x541b;
const TIOCNOTTY: u32 = 0x5422;
const TIOCGSID: u32 = 0x5429;

/// The inode behind a standard stream, so that `/dev/stdout` and
/// `/proc/self/fd/1` lead to it.
struct StreamInode {
    file: Arc<StandardStream>,
}

impl Inode for StreamInode {
    fn attributes(&self) -> Attributes {
        self.file.attributes()
    }
    fn file_type(&self) -> FileType {
        if self.file.is_terminal() { FileType::CharacterDevice } else { FileType::Fifo }
    }
    fn filesystem(&self) -> FilesystemId {
        FilesystemId(u32::MAX)
    }
    fn open(self: Arc<Self>, _: OpenFlags) -> Result<Arc<dyn File>> {
        Ok(self.file.clone())
    }
    fn statfs(&self) -> Statfs {
        Statfs { kind: 0x5049_5045, bsize: 4096, frsize: 4096, namelen: 255, ..Statfs::default() }
    }
    fn as_any(&self) -> &dyn Any {
        self
    }
    fn into_any(self: Arc<Self>) -> Arc<dyn Any + Send + Sync> {
        self
    }
}

/// Opens a standard stream for the first process of a sandbox.
pub fn open(stream: Stream) -> Arc<OpenFile> {
    let file = StandardStream::new(stream);
    let flags = if file.is_terminal() {
        OpenFlags::RDWR
    } else if stream.0 == 0 {
        OpenFlags::empty()
    } else {
        OpenFlags::WRONLY
    };
    let name = file.description();
    let inode = Arc::new(StreamInode { file: file.clone() });
    let path = Path::new(Dentry::anonymous(inode, name.as_bytes()));
    OpenFile::new(file, flags | OpenFlags::LARGEFILE, Some(path))
}

/// `/dev/console`: standard error, wherever the host has put it.
pub fn console() -> Option<Arc<dyn File>> {
    Some(StandardStream::new(Stream(2)))
}

/// `/dev/tty`: the first standard stream that is a terminal.
pub fn controlling_terminal() -> Option<Arc<dyn File>> {
    let stream = [0, 1, 2].map(Stream).into_iter().find(|stream| stream.is_terminal())?;
    Some(StandardStream::new(stream))
}
