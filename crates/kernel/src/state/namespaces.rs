//! The namespaces of a process, and one of them as a file holds it (namespaces(7)).
//!
//! Their types belong to several modules, of which processes may not know those above theirs.

use alloc::sync::Arc;
use alloc::vec::Vec;

use crate::errno::{Errno, Result};
use crate::fs::mount::MountNamespace;
use crate::ipc::namespace::IpcNamespace;
use crate::net::Network;
use crate::net::namespace::NetNamespace;
use crate::task::clone::CloneFlags;
use crate::task::namespace::{Common, Kind};
use crate::task::pid_namespace::PidNamespace;
use crate::task::user_namespace::UserNamespace;
use crate::task::uts::UtsNamespace;
use crate::task::{Process, current_process};

/// A namespace of which nothing is kept but its number.
pub struct BareNamespace {
    /// Number and owner.
    pub common: Common,
}

/// The namespaces of a process, but for those of mounts, which hang together with its directories,
/// and of users, which its credentials name: `struct nsproxy` of Linux.
#[derive(Clone)]
pub struct Namespaces {
    /// The names of the machine.
    pub uts: Arc<UtsNamespace>,
    /// System V objects and message queues.
    pub ipc: Arc<IpcNamespace>,
    /// Sockets that find each other.
    pub net: Arc<NetNamespace>,
    /// The view of control groups: there is one group, which all see as the root.
    pub cgroup: Arc<BareNamespace>,
}

impl Namespaces {
    /// Those of the sandbox's first process.
    pub fn first(network: &Network) -> Self {
        Self {
            uts: Arc::new(UtsNamespace::first()),
            ipc: Arc::new(IpcNamespace::first()),
            net: Arc::new(NetNamespace::first(network)),
            cgroup: Arc::new(BareNamespace { common: Common::first(Kind::Cgroup) }),
        }
    }

    /// The same, but for new ones of the kinds that `flags` name; `ENOSPC`.
    pub fn unshared(&self, flags: CloneFlags, owner: &UserNamespace) -> Result<Self> {
        let mut new = self.clone();
        if flags.contains(CloneFlags::NEWUTS) {
            new.uts = Arc::new(self.uts.copy(owner)?);
        }
        if flags.contains(CloneFlags::NEWIPC) {
            new.ipc = IpcNamespace::create(owner)?;
        }
        if flags.contains(CloneFlags::NEWNET) {
            new.net = Arc::new(NetNamespace::create(owner)?);
        }
        if flags.contains(CloneFlags::NEWCGROUP) {
            let common = Common::new(Kind::Cgroup, owner)?;
            new.cgroup = Arc::new(BareNamespace { common });
        }
        Ok(new)
    }

    /// Goes over to another namespace, if it is of a kind that is one of these.
    pub fn enter(&mut self, namespace: &Namespace) {
        match namespace {
            Namespace::Uts(uts) => self.uts = uts.clone(),
            Namespace::Ipc(ipc) => self.ipc = ipc.clone(),
            Namespace::Net(net) => self.net = net.clone(),
            Namespace::Cgroup(cgroup) => self.cgroup = cgroup.clone(),
            Namespace::Mounts(_) | Namespace::User(_) | Namespace::Pid(_) | Namespace::Only(_) => {}
        }
    }
}

/// One namespace, of any kind.
#[derive(Clone)]
pub enum Namespace {
    /// Of mounts.
    Mounts(Arc<MountNamespace>),
    /// Of users.
    User(UserNamespace),
    /// Of names of the machine.
    Uts(Arc<UtsNamespace>),
    /// Of System V objects and message queues.
    Ipc(Arc<IpcNamespace>),
    /// Of sockets that find each other.
    Net(Arc<NetNamespace>),
    /// Of control groups.
    Cgroup(Arc<BareNamespace>),
    /// Of processes.
    Pid(PidNamespace),
    /// The only one of a kind.
    Only(Kind),
}

impl Namespace {
    /// Those of a process that it can be followed into, in the order in which they are entered.
    pub fn all_of(process: &Process) -> Vec<Self> {
        let users = process.credentials.borrow_mut().user_namespace.clone();
        let mounts = process.with_fs(|fs| fs.namespace.clone());
        let Namespaces { uts, ipc, net, cgroup } = (*process.namespaces()).clone();
        let pids = process.pid_namespace.clone();
        Vec::from([
            Self::User(users),
            Self::Mounts(mounts),
            Self::Uts(uts),
            Self::Ipc(ipc),
            Self::Net(net),
            Self::Cgroup(cgroup),
            Self::Pid(pids),
        ])
    }

    /// The one of a kind that a process is in.
    pub fn of(process: &Process, kind: Kind) -> Self {
        let all = Self::all_of(process);
        all.into_iter().find(|known| known.kind() == kind).unwrap_or(Self::Only(kind))
    }

    /// The one that children of a process are in. `None`: nobody is in it yet, so it has no file.
    pub fn of_children(process: &Process) -> Option<Self> {
        let pids = process.pid_namespace_for_children.borrow_mut().clone();
        pids.has_begun().then_some(Self::Pid(pids))
    }

    /// What it separates.
    pub fn kind(&self) -> Kind {
        match self {
            Self::User(_) => Kind::User,
            Self::Pid(_) => Kind::Pid,
            Self::Only(kind) => *kind,
            Self::Mounts(mounts) => mounts.common.kind(),
            Self::Uts(uts) => uts.common.kind(),
            Self::Ipc(ipc) => ipc.common.kind(),
            Self::Net(net) => net.common.kind(),
            Self::Cgroup(cgroup) => cgroup.common.kind(),
        }
    }

    /// Its inode number.
    pub fn ino(&self) -> u64 {
        match self {
            Self::User(users) => users.ino(),
            Self::Pid(pids) => pids.ino(),
            Self::Only(kind) => kind.first_ino(),
            Self::Mounts(mounts) => mounts.common.ino(),
            Self::Uts(uts) => uts.common.ino(),
            Self::Ipc(ipc) => ipc.common.ino(),
            Self::Net(net) => net.common.ino(),
            Self::Cgroup(cgroup) => cgroup.common.ino(),
        }
    }

    /// In which user namespace capabilities over it count. That of a user namespace is its parent;
    /// `None`: it is the initial one.
    pub fn owner(&self) -> Option<UserNamespace> {
        match self {
            Self::User(users) => users.parent().cloned(),
            Self::Pid(pids) => Some(pids.owner()),
            Self::Only(_) => Some(UserNamespace::INITIAL),
            Self::Mounts(mounts) => Some(mounts.common.owner().clone()),
            Self::Uts(uts) => Some(uts.common.owner().clone()),
            Self::Ipc(ipc) => Some(ipc.common.owner().clone()),
            Self::Net(net) => Some(net.common.owner().clone()),
            Self::Cgroup(cgroup) => Some(cgroup.common.owner().clone()),
        }
    }

    /// The one above it; `EINVAL` for kinds that are no trees, `EPERM` at the top.
    pub fn parent(&self) -> Result<Namespace> {
        match self {
            Self::User(users) => users.parent().cloned().map(Self::User).ok_or(Errno::EPERM),
            // One that the caller's does not include is out of reach, too.
            Self::Pid(pids) => {
                let parent = pids.parent().ok_or(Errno::EPERM)?;
                let is_visible = current_process().pid_namespace.includes(parent);
                if is_visible { Ok(Self::Pid(parent.clone())) } else { Err(Errno::EPERM) }
            }
            _ => Err(Errno::EINVAL),
        }
    }
}
