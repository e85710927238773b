//! Starting a program in a fresh sandbox.

use std::ffi::OsString;
use std::fs::File;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::time::Duration;

use thaw_abi::control::WindowSize;

use super::{BootError, BootFlags};
use crate::broker::{BlobSource, HostDirectory};

/// Where a sandbox's files come from.
#[derive(Clone)]
pub enum Rootfs {
    /// A rootfs index and its blobs.
    Index {
        /// The index, open for reading.
        file: Arc<File>,
        /// Its bytes.
        len: u64,
        /// Opens the blobs that the index names.
        blobs: Arc<dyn BlobSource>,
    },
    /// A directory of the host, served read-only through the broker.
    HostDirectory(Arc<HostDirectory>),
}

/// A program to be started in a fresh sandbox.
#[derive(Clone)]
pub struct StartSpec<'a> {
    /// Path of the program in the rootfs; `None`: look up `argv[0]` in `PATH`.
    pub program: Option<OsString>,
    /// Arguments, the program's name first.
    pub argv: Vec<OsString>,
    /// Environment, each `NAME=value`.
    pub env: Vec<OsString>,
    /// Working directory in the rootfs.
    pub cwd: OsString,
    /// Host name that the program sees.
    pub hostname: OsString,
    /// User id that the program sees itself as.
    pub uid: u32,
    /// Group id that the program sees itself as.
    pub gid: u32,
    /// TCP port on which the function listens; 0 if it serves nobody.
    pub port: u16,
    /// Virtual CPUs, at least 1.
    pub cpus: u32,
    /// Bytes of memory the sandbox may use; 0: no limit.
    pub memory_limit: u64,
    /// CPU time after which the host kernel ends the sandbox, in whole seconds
    /// rounded up; `None`: no limit.
    pub cpu_time_limit: Option<Duration>,
    /// `FLAG_*` of [`thaw_abi::control`].
    pub flags: BootFlags,
    /// The files.
    pub rootfs: Rootfs,
    /// Standard input, output and error; duplicated, not consumed.
    pub stdio: [BorrowedFd<'a>; 3],
    /// Size of the terminal, if one of [`Self::stdio`] is one.
    pub window: Option<WindowSize>,
}

pub(crate) fn encode(spec: &StartSpec<'_>) -> Result<Vec<u8>, BootError> {
    let _ = spec;
    todo!()
}
