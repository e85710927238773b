//! The monitor's end.
#![allow(unsafe_code)]

use std::collections::HashMap;
use std::io;
use std::net::{SocketAddr, TcpListener, UdpSocket};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};
use std::sync::Arc;

use rustix::io::Errno;
use serde::{Deserialize, Serialize};

use super::namespace::UserNamespace;
use super::protocol::{
    Answer, Grant, REQUEST_BIND, REQUEST_GROUP, REQUEST_PARENT, REQUEST_REMOVE_GROUP, REQUEST_STATE_HELPER, Request,
};
use crate::egress::Transport;
use crate::host::RESERVE_IDS;
use crate::limits::{self, Group, Hierarchy, WeakLimits};
use crate::state::{Join, launcher};
use crate::sys;
use crate::zygote::{IdRange, PARENT_ARGUMENT, ZygoteError, receive, refuse_weak_limits, send};

/// The user and group of a daemon.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DaemonIds {
    /// User id.
    pub uid: u32,
    /// Group id.
    pub gid: u32,
}

/// First id that the sandboxes of a daemon may have.
const FIRST_ID: u32 = 2_000_000;
/// Sandboxes of one daemon at a time: those of its pool, and of the builds that it makes.
const SANDBOXES_MAX: u32 = 16_384 + 1024;
/// Groups of one daemon at a time: also of sandboxes that are being made, and of those that
/// have ended and whose groups are not removed yet.
const GROUPS_MAX: usize = 2 * SANDBOXES_MAX as usize;
/// Ports from this one on a daemon binds itself (ip(7)).
const UNPRIVILEGED_PORT: u16 = 1024;
/// Sockets that are bound for a daemon, at most, in its life.
const BOUND_MAX: u32 = 4096;

/// The privileged side of one daemon.
#[derive(Debug)]
pub struct Monitor {
    ids: DaemonIds,
    range: IdRange,
    namespace: UserNamespace,
    groups: Arc<Hierarchy>,
    made: HashMap<u64, Group>,
    bound: u32,
}

impl Monitor {
    /// Makes what a daemon of this user needs; `None` if the host has no user namespaces,
    /// without which nobody but root has the rights over its sandboxes. To be called
    /// before there are threads or children.
    ///
    /// # Errors
    /// The host does not keep limits, or has no ids to spare.
    pub fn new(ids: DaemonIds, weak_limits: WeakLimits) -> Result<Option<Self>, ZygoteError> {
        let during = |step| move |source| ZygoteError::Parent { step, source };
        let range = IdRange::reserve(FIRST_ID, SANDBOXES_MAX)
            .map_err(during(RESERVE_IDS))?
            .ok_or_else(|| during(RESERVE_IDS)(Errno::PERM.into()))?;
        // With root's of the namespace, which is the zygote parents' id.
        let Ok(namespace) = UserNamespace::make(ids, range.first, range.slots + 1) else {
            return Ok(None);
        };
        let groups = limits::discover();
        if weak_limits == WeakLimits::Refuse {
            refuse_weak_limits(groups.missing())?;
        }
        Ok(Some(Self { ids, range, namespace, groups, made: HashMap::new(), bound: 0 }))
    }

    /// What the daemon is told at its start.
    pub fn grant(&self) -> Grant {
        Grant {
            ids: self.range.slots,
            places: self.groups.places().to_vec(),
            missing: self.groups.missing().to_vec(),
        }
    }

    /// Serves one request, which must be there. False: the daemon has closed its end, or
    /// has sent something that is no request.
    pub fn serve(&mut self, socket: &OwnedFd) -> bool {
        let mut descriptors = Vec::new();
        let Ok(Some(request)) = receive::<Request>(socket, &mut descriptors) else { return false };
        let done = match request.kind {
            REQUEST_PARENT => self.start_parent(descriptors).map(|()| Vec::new()),
            REQUEST_STATE_HELPER => {
                self.start_state_helper(descriptors, request.number).map(|()| Vec::new())
            }
            REQUEST_GROUP => self.make_group(request.number),
            REQUEST_BIND => self.bind(&request).map(|socket| vec![socket]),
            REQUEST_REMOVE_GROUP => {
                self.made.remove(&request.number);
                return true;
            }
            _ => return false,
        };
        let (errno, attached) = match done {
            Ok(attached) => (0, attached),
            Err(error) => (error.raw_os_error().unwrap_or(libc::EIO), Vec::new()),
        };
        let attached: Vec<_> = attached.iter().map(AsFd::as_fd).collect();
        send(socket, &Answer { errno, reserved: 0 }, &attached).is_ok()
    }

    /// Removes what was made for a daemon that has ended.
    pub fn forget_daemon(&mut self) {
        self.made.clear();
        self.bound = 0;
    }

    /// Starts a zygote parent in the daemon's user namespace; it is a child of the
    /// calling thread.
    fn start_parent(&self, descriptors: Vec<OwnedFd>) -> io::Result<()> {
        let [control, kernel] =
            <[OwnedFd; 2]>::try_from(descriptors).map_err(|_| Errno::INVAL)?;
        let mut launcher = Command::new("/proc/self/exe");
        launcher
            .arg(PARENT_ARGUMENT)
            .env_clear()
            .current_dir("/")
            .stdin(Stdio::from(control))
            .stdout(Stdio::from(kernel));
        self.launch(launcher)
    }

    /// Starts a state helper, which has rights in the daemon's user namespace only.
    fn start_state_helper(&self, descriptors: Vec<OwnedFd>, id: u64) -> io::Result<()> {
        let [socket, pid_namespace] =
            <[OwnedFd; 2]>::try_from(descriptors).map_err(|_| Errno::INVAL)?;
        let id = u32::try_from(id).map_err(|_| Errno::INVAL)?;
        self.launch(launcher(socket, pid_namespace, id, Join::Nothing))
    }

    /// Runs a launcher as root of the daemon's user namespace, and as nobody outside. It
    /// ends as soon as it has forked what is wanted; what went wrong it says on the
    /// socket that it was given.
    fn launch(&self, mut launcher: Command) -> io::Result<()> {
        let namespace = self.namespace.as_fd().as_raw_fd();
        // SAFETY: between fork and exec nothing is called but the host; the descriptor
        // is open as long as `self` lives.
        unsafe {
            launcher.pre_exec(move || {
                sys::reset_signals();
                sys::close_on_exec_from(3)?;
                UserNamespace::enter_as_root(BorrowedFd::borrow_raw(namespace))
            });
        }
        launcher.spawn()?.wait().map(drop)
    }

    fn make_group(&mut self, number: u64) -> io::Result<Vec<OwnedFd>> {
        if self.made.len() >= GROUPS_MAX {
            return Err(Errno::NOSPC.into());
        }
        if self.made.contains_key(&number) {
            return Err(Errno::EXIST.into());
        }
        let group = self.groups.create(number)?;
        group.give_settings_to(self.ids.uid, self.ids.gid)?;
        let entrances = group.entrances()?;
        self.made.insert(number, group);
        Ok(entrances)
    }

    fn bind(&mut self, request: &Request) -> io::Result<OwnedFd> {
        let (address, transport) = request.to_be_bound();
        if address.port() == 0 || address.port() >= UNPRIVILEGED_PORT {
            return Err(Errno::ACCESS.into());
        }
        if self.bound >= BOUND_MAX {
            return Err(Errno::MFILE.into());
        }
        self.bound += 1;
        bind(address, transport)
    }
}

fn bind(address: SocketAddr, transport: Transport) -> io::Result<OwnedFd> {
    Ok(match transport {
        Transport::Tcp => TcpListener::bind(address)?.into(),
        Transport::Udp => UdpSocket::bind(address)?.into(),
    })
}
