//! `/dev`: character devices by number, as on Linux (null(4), random(4), …).

mod devices;

use alloc::sync::Arc;

use thaw_abi::control::START_PATH;

use super::DEV_FS;
use super::file::{File, OpenFlags};
use super::inode::{FilesystemId, Inode, NewInode, NewKind};
use super::overlay::{Node, Overlay};
use super::path::Path;
use super::tty::Controlling;
use super::tty::pty::Slave;
use crate::errno::{Errno, Result};
use crate::task::freeze_request;

pub use devices::{Null, Random, Zero};

/// Device number from major and minor, as `st_rdev` has it.
pub const fn makedev(major: u64, minor: u64) -> u64 {
    ((major & 0xfff) << 8) | (minor & 0xff) | ((minor & !0xff) << 12) | ((major & !0xfff) << 32)
}

const NULL: u64 = makedev(1, 3);
const ZERO: u64 = makedev(1, 5);
const FULL: u64 = makedev(1, 7);
const RANDOM: u64 = makedev(1, 8);
const URANDOM: u64 = makedev(1, 9);
const KMSG: u64 = makedev(1, 11);
const TTY: u64 = makedev(5, 0);
const CONSOLE: u64 = makedev(5, 1);
const PTMX: u64 = makedev(5, 2);
/// `/dev/thaw`: from the range that Linux leaves to local use.
const THAW: u64 = makedev(240, 0);

const NODES: &[(&[u8], u64, u32)] = &[
    (b"null", NULL, 0o666),
    (b"zero", ZERO, 0o666),
    (b"full", FULL, 0o666),
    (b"random", RANDOM, 0o666),
    (b"urandom", URANDOM, 0o666),
    (b"tty", TTY, 0o666),
    (b"console", CONSOLE, 0o600),
    (b"ptmx", PTMX, 0o666),
    (b"thaw", THAW, 0o666),
];

const LINKS: &[(&[u8], &[u8])] = &[
    (b"fd", b"/proc/self/fd"),
    (b"stdin", b"/proc/self/fd/0"),
    (b"stdout", b"/proc/self/fd/1"),
    (b"stderr", b"/proc/self/fd/2"),
];

/// The name of [`START_PATH`] in `/dev`.
const START_NAME: &[u8] = START_PATH.split_at("/dev/".len()).1.as_bytes();

/// Somebody looks for a name that is not there. If that is [`START_PATH`], and this is to become a
/// runtime template, it is the freeze.
///
/// # Errors
/// `ERESTARTNOINTR` in a copy: the call has to read its path again, which the host has written over.
/// `EINTR`: the thread has to end.
pub fn missing(directory: &Path, name: &[u8]) -> Result<()> {
    let is_start = name == START_NAME
        && directory.inode().filesystem() == DEV_FS
        && freeze_request::awaits_program();
    if is_start { Err(freeze_request::await_program()) } else { Ok(()) }
}

/// The file system on `/dev`; returns its root directory.
pub fn file_system(id: FilesystemId) -> Result<Arc<Node>> {
    let root = Overlay::empty(id, 0o755);
    let new = |kind, permissions| NewInode { kind, permissions, uid: 0, gid: 0 };
    for &(name, number, permissions) in NODES {
        root.create(name, &new(NewKind::CharacterDevice(number), permissions))?;
    }
    for &(name, target) in LINKS {
        root.create(name, &new(NewKind::Symlink(target.to_vec()), 0o777))?;
    }
    for name in [&b"shm"[..], b"pts", b"mqueue"] {
        root.create(name, &new(NewKind::Directory, 0o755))?;
    }
    Ok(root)
}

/// Opens a character device. `ENXIO` if there is none of that number.
pub fn open(path: &Path, flags: OpenFlags) -> Result<Arc<dyn File>> {
    let inode = path.inode().clone();
    let attributes = inode.attributes();
    match attributes.rdev {
        NULL => Ok(Arc::new(Null::new(inode))),
        ZERO => Ok(Arc::new(Zero::new(inode, devices::Writes::Vanish))),
        FULL => Ok(Arc::new(Zero::new(inode, devices::Writes::Fail))),
        RANDOM | URANDOM => Ok(Arc::new(Random::new(inode))),
        CONSOLE => super::stdio::console().ok_or(Errno::ENXIO),
        TTY => controlling_terminal(flags),
        PTMX => {
            let identity = super::Context::current().identity;
            super::tty::pty::Master::open((identity.uid, TTY_GROUP))
        }
        THAW => Ok(Arc::new(devices::Thaw::new(inode))),
        KMSG => Err(Errno::ENXIO),
        // The slave of a pseudo terminal, or a standard stream that is a
        // terminal, opened again by name.
        _ => inode.open(flags),
    }
}

/// Group of terminals, as devpts is told by its mount options.
const TTY_GROUP: u32 = 5;

/// `/dev/tty`: the controlling terminal of the caller (tty(4)); `ENXIO`.
fn controlling_terminal(flags: OpenFlags) -> Result<Arc<dyn File>> {
    let process = crate::task::current_process();
    let terminals = &crate::state::kernel().fs.terminals;
    match terminals.controlling(process.pid, process.session()) {
        Some(Controlling::Host) => super::stdio::terminal().ok_or(Errno::ENXIO),
        Some(Controlling::Pty(pty)) => Slave::open(&pty, flags | OpenFlags::NOCTTY),
        None => Err(Errno::ENXIO),
    }
}
