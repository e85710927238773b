//! Starting a program in a fresh sandbox.

use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::os::fd::BorrowedFd;
use std::os::unix::ffi::OsStrExt;
use std::sync::Arc;
use std::time::Duration;

use bytemuck::{Zeroable, bytes_of};
use thaw_abi::bind::{
    MOUNT_BIND, MOUNT_BIND_WRITABLE, MOUNT_TMPFS, MOUNT_VOLUME, MOUNT_VOLUME_WRITABLE,
};
use thaw_abi::control::{
    FLAG_INIT, MESSAGE_MAX, MSG_START, MemoryWrite, ROOTFS_HOST, ROOTFS_INDEX, Start, WindowSize,
};

use super::{BootError, BootFlags, fresh_seed};
use crate::broker::{BlobSource, BoundAccess, BoundDirectory, HostDirectory, VolumeMount};
use crate::egress::EgressPolicy;
use crate::limits::ResourceLimits;
use crate::message;

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

/// Something to mount, besides what every sandbox has.
#[derive(Clone, Debug)]
pub struct Mount {
    /// Where: an absolute path in the sandbox; made if it is missing.
    pub at: OsString,
    /// What.
    pub kind: MountKind,
}

/// What to mount.
#[derive(Clone, Debug)]
pub enum MountKind {
    /// A directory of the host.
    Bind(BoundDirectory),
    /// A volume.
    Volume(VolumeMount),
    /// An empty file system in memory.
    Tmpfs,
}

impl MountKind {
    fn letter(&self) -> u8 {
        match self {
            Self::Bind(directory) if directory.access() == BoundAccess::Write => {
                MOUNT_BIND_WRITABLE
            }
            Self::Bind(_) => MOUNT_BIND,
            Self::Volume(mount) if mount.access == BoundAccess::Write => MOUNT_VOLUME_WRITABLE,
            Self::Volume(_) => MOUNT_VOLUME,
            Self::Tmpfs => MOUNT_TMPFS,
        }
    }
}

/// A program to be started in a fresh sandbox.
#[derive(Clone)]
pub struct StartSpec<'a> {
    /// Path of the program in the rootfs; `None`: look up `argv[0]` in `PATH`.
    pub program: Option<OsString>,
    /// Arguments, the program's name first; none with [`FLAG_INIT`].
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
    /// Port on which the function listens; 0 if it serves nobody.
    pub port: u16,
    /// With `FLAG_FREEZE_AT_ENTRY`: the signal that freezes the program instead
    /// of being delivered; 0: none.
    pub entry_signal: u32,
    /// Virtual CPUs, at least 1. The host gives the sandbox as many processors' worth of
    /// CPU time.
    pub cpus: u32,
    /// Bytes of memory the sandbox may use; 0: no limit.
    pub memory_limit: u64,
    /// Most host processes, with each further virtual CPU of a process counted as one;
    /// 0: no limit but [`crate::limits::PROCESSES_MAX`].
    pub process_limit: u32,
    /// CPU time after which the sandbox is ended, of all its processes together; `None`:
    /// no limit.
    pub cpu_time_limit: Option<Duration>,
    /// `FLAG_*` of [`thaw_abi::control`].
    pub flags: BootFlags,
    /// The files.
    pub rootfs: Rootfs,
    /// What the program may connect to.
    pub egress: Arc<EgressPolicy>,
    /// What is mounted above them.
    pub mounts: Vec<Mount>,
    /// Standard input, output and error; duplicated, not consumed.
    pub stdio: [BorrowedFd<'a>; 3],
    /// Size of the terminal, if one of [`Self::stdio`] is one.
    pub window: Option<WindowSize>,
}

impl StartSpec<'_> {
    /// What the host is to enforce.
    pub fn limits(&self) -> ResourceLimits {
        ResourceLimits { memory: self.memory_limit, cpus: self.cpus, processes: self.process_limit }
    }

    /// The volumes by number of the mount.
    pub(crate) fn volumes(&self) -> impl Iterator<Item = (u32, &VolumeMount)> + Clone {
        (0..).zip(&self.mounts).filter_map(|(number, mount)| match &mount.kind {
            MountKind::Volume(volume) => Some((number, volume)),
            _ => None,
        })
    }
}

/// What a copy of a runtime template has in its memory in the place of what the template has there.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MemoryWrites(Vec<(u64, Vec<u8>)>);

impl MemoryWrites {
    /// Adds bytes for an address, in memory that the program can write to.
    pub fn add(&mut self, address: u64, bytes: Vec<u8>) {
        self.0.push((address, bytes));
    }

    /// All of them, each with its address.
    pub fn all(&self) -> &[(u64, Vec<u8>)] {
        &self.0
    }

    /// The end of the tail of a start command.
    fn said(&self) -> Vec<u8> {
        let mut said = Vec::new();
        for (address, bytes) in &self.0 {
            let head = MemoryWrite { address: *address, len: bytes.len() as u64 };
            said.extend_from_slice(bytes_of(&head));
            said.extend_from_slice(bytes);
        }
        said
    }
}

/// The whole message that starts `spec`, in a copy of a runtime template with `writes`.
pub(crate) fn encode(spec: &StartSpec<'_>, writes: &MemoryWrites) -> Result<Vec<u8>, BootError> {
    if spec.argv.is_empty() != (spec.flags & FLAG_INIT != 0) {
        return Err(BootError::NoProgram);
    }
    let (rootfs, index_len) = match &spec.rootfs {
        Rootfs::Index { len, .. } => (ROOTFS_INDEX, *len),
        Rootfs::HostDirectory(_) => (ROOTFS_HOST, 0),
    };
    let body = Start {
        seed: fresh_seed().map_err(BootError::Send)?,
        memory_limit: spec.memory_limit,
        index_len,
        flags: spec.flags | spec.egress.flags(),
        rootfs,
        port: spec.port.into(),
        cpus: spec.cpus.max(1),
        uid: spec.uid,
        gid: spec.gid,
        argv_count: spec.argv.len() as u32,
        env_count: spec.env.len() as u32,
        mount_count: spec.mounts.len() as u32,
        entry_signal: spec.entry_signal,
        window: spec.window.unwrap_or_else(WindowSize::zeroed),
    };

    let mut strings = Vec::new();
    let mut push = |what: &'static str, text: &OsStr| {
        if text.as_bytes().contains(&0) {
            return Err(BootError::Nul { what });
        }
        strings.extend_from_slice(text.as_bytes());
        strings.push(0);
        Ok(())
    };
    push("the host name", &spec.hostname)?;
    push("the working directory", &spec.cwd)?;
    push("the program's path", spec.program.as_deref().unwrap_or_default())?;
    for argument in &spec.argv {
        push("an argument", argument)?;
    }
    for variable in &spec.env {
        push("an environment variable", variable)?;
    }
    for mount in &spec.mounts {
        let mut text = OsString::from(OsStr::from_bytes(&[mount.kind.letter()]));
        text.push(&mount.at);
        push("a mount point", &text)?;
    }

    strings.append(&mut writes.said());

    let len = size_of::<Start>() + strings.len();
    let header = message::header(MSG_START, len, 0);
    let bytes = size_of_val(&header) + len;
    if bytes > MESSAGE_MAX {
        return Err(BootError::TooLong { bytes, limit: MESSAGE_MAX });
    }
    let mut message = Vec::with_capacity(bytes);
    message.extend_from_slice(bytes_of(&header));
    message.extend_from_slice(bytes_of(&body));
    message.append(&mut strings);
    Ok(message)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::AsFd;

    fn encode(spec: &StartSpec<'_>) -> Result<Vec<u8>, BootError> {
        super::encode(spec, &MemoryWrites::default())
    }

    fn spec(argv: &[&str]) -> StartSpec<'static> {
        let directory = HostDirectory::open("/".as_ref()).unwrap();
        let stderr: &'static std::io::Stderr = Box::leak(Box::new(std::io::stderr()));
        StartSpec {
            program: None,
            argv: argv.iter().map(OsString::from).collect(),
            env: vec!["A=b".into()],
            cwd: "/tmp".into(),
            hostname: "box".into(),
            uid: 1,
            gid: 2,
            port: 8000,
            entry_signal: 0,
            cpus: 1,
            memory_limit: 5,
            process_limit: 0,
            cpu_time_limit: None,
            flags: 0,
            rootfs: Rootfs::HostDirectory(Arc::new(directory)),
            egress: Arc::default(),
            mounts: vec![Mount { at: "/scratch".into(), kind: MountKind::Tmpfs }],
            stdio: [stderr.as_fd(); 3],
            window: None,
        }
    }

    #[test]
    fn the_message_is_as_documented() {
        let message = encode(&spec(&["sh", "-c", "true"])).unwrap();
        let (header, rest) = message.split_at(16);
        let header: thaw_abi::control::MessageHeader = bytemuck::pod_read_unaligned(header);
        assert_eq!((header.kind, header.len as usize), (MSG_START, rest.len()));
        let (body, tail) = rest.split_at(size_of::<Start>());
        let body: Start = bytemuck::pod_read_unaligned(body);
        assert_eq!((body.argv_count, body.env_count, body.port), (3, 1, 8000));
        assert_eq!(body.rootfs, ROOTFS_HOST);
        assert_ne!(body.seed, [0; 32]);
        assert_eq!(body.mount_count, 1);
        assert_eq!(tail, b"box\0/tmp\0\0sh\0-c\0true\0A=b\0t/scratch\0");
    }

    #[test]
    fn writes_follow_the_strings() {
        let mut writes = MemoryWrites::default();
        writes.add(0x1000, b"ab\0".to_vec());
        writes.add(0x2000, Vec::new());
        let spec = spec(&["sh"]);
        let (plain, message) = (encode(&spec).unwrap(), super::encode(&spec, &writes).unwrap());
        let heads = [(0x1000u64, 3u64), (0x2000, 0)].map(|(at, len)| [at, len]);
        let [first, second] = heads.map(bytemuck::cast::<[u64; 2], [u8; 16]>);
        assert_eq!(message[plain.len()..], [&first[..], b"ab\0", &second].concat());
    }

    #[test]
    fn each_start_has_its_own_seed() {
        assert_ne!(encode(&spec(&["a"])).unwrap(), encode(&spec(&["a"])).unwrap());
    }

    #[test]
    fn what_cannot_be_started_is_refused() {
        assert!(matches!(encode(&spec(&[])), Err(BootError::NoProgram)));
        let nul = BootError::Nul { what: "an argument" }.to_string();
        assert_eq!(encode(&spec(&["a\0b"])).unwrap_err().to_string(), nul);
        let long = "x".repeat(MESSAGE_MAX);
        assert!(matches!(encode(&spec(&[&long])), Err(BootError::TooLong { .. })));
    }
}
