//! What all kinds of namespaces have (namespaces(7)): a number, an owner, and a limit.

use super::clone::CloneFlags;
use super::user_namespace::UserNamespace;
use crate::errno::{Errno, Result};
use crate::state::kernel;
use crate::sync::KernelCell;

/// Namespaces of one kind that a sandbox may have (`max_*_namespaces`, namespaces(7)).
pub const NAMESPACES_MAX: u32 = 4096;

/// What a namespace separates.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Views of control groups.
    Cgroup,
    /// System V objects and POSIX message queues.
    Ipc,
    /// Mounts.
    Mounts,
    /// Interfaces, ports, abstract names of sockets.
    Net,
    /// Process ids.
    Pid,
    /// Clocks.
    Time,
    /// User and group ids, capabilities.
    User,
    /// Host name and domain name.
    Uts,
}

/// Number of kinds.
pub(super) const KINDS: usize = 8;

impl Kind {
    /// Its name in `/proc/PID/ns`.
    pub fn name(self) -> &'static str {
        match self {
            Self::Cgroup => "cgroup",
            Self::Ipc => "ipc",
            Self::Mounts => "mnt",
            Self::Net => "net",
            Self::Pid => "pid",
            Self::Time => "time",
            Self::User => "user",
            Self::Uts => "uts",
        }
    }

    /// Its flag for clone(2), unshare(2) and setns(2).
    pub fn flag(self) -> u64 {
        const NEWTIME: u64 = 0x80;
        match self {
            Self::Cgroup => CloneFlags::NEWCGROUP.bits(),
            Self::Ipc => CloneFlags::NEWIPC.bits(),
            Self::Mounts => CloneFlags::NEWNS.bits(),
            Self::Net => CloneFlags::NEWNET.bits(),
            Self::Pid => CloneFlags::NEWPID.bits(),
            Self::Time => NEWTIME,
            Self::User => CloneFlags::NEWUSER.bits(),
            Self::Uts => CloneFlags::NEWUTS.bits(),
        }
    }

    /// The inode number of the first namespace (include/linux/proc_ns.h; that of networks is the first
    /// number that Linux gives out).
    pub fn first_ino(self) -> u64 {
        match self {
            Self::Mounts => 0xefff_fff8,
            Self::Net => 0xefff_fff9,
            Self::Time => 0xefff_fffa,
            Self::Cgroup => 0xefff_fffb,
            Self::Pid => 0xefff_fffc,
            Self::User => 0xefff_fffd,
            Self::Uts => 0xefff_fffe,
            Self::Ipc => 0xefff_ffff,
        }
    }
}

/// How many namespaces there are.
#[derive(Default)]
pub struct Counts {
    /// Besides the first, by kind.
    by_kind: KernelCell<[u32; KINDS]>,
    /// Those that ever were.
    made: KernelCell<u64>,
}

/// What each namespace has. It counts as one while it exists.
pub struct Common {
    kind: Kind,
    ino: u64,
    owner: UserNamespace,
}

impl Common {
    /// That of the first namespace of a kind.
    pub fn first(kind: Kind) -> Self {
        Self { kind, ino: kind.first_ino(), owner: UserNamespace::INITIAL }
    }

    /// That of another one, which a user namespace owns; `ENOSPC` if there are too many, in the sandbox or
    /// for that one.
    pub fn new(kind: Kind, owner: &UserNamespace) -> Result<Self> {
        let counts = &kernel().namespace_counts;
        let of_kind = &mut counts.by_kind.borrow_mut()[kind as usize];
        if *of_kind >= NAMESPACES_MAX {
            return Err(Errno::ENOSPC);
        }
        owner.count_namespace(kind)?;
        *of_kind += 1;
        let mut made = counts.made.borrow_mut();
        *made += 1;
        Ok(Self { kind, ino: FIRST_DYNAMIC + *made, owner: owner.clone() })
    }

    /// What it separates.
    pub fn kind(&self) -> Kind {
        self.kind
    }

    /// Its inode number, which is never used again.
    pub fn ino(&self) -> u64 {
        self.ino
    }

    /// In which capabilities over it count.
    pub fn owner(&self) -> &UserNamespace {
        &self.owner
    }
}

/// Numbers of namespaces are above this (`PROC_DYNAMIC_FIRST`, fs/proc/generic.c).
const FIRST_DYNAMIC: u64 = 0xf000_0000;

impl Drop for Common {
    fn drop(&mut self) {
        if self.ino != self.kind.first_ino() {
            kernel().namespace_counts.by_kind.borrow_mut()[self.kind as usize] -= 1;
            self.owner.namespace_is_gone(self.kind);
        }
    }
}
