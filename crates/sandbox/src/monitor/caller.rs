//! The namespaces of a daemon that has the user id of whoever started it.
//!
//! ```text
//!  the caller's namespaces        monitor
//!  └─ a user and a pid namespace  process 1, daemon, launchers
//!     └─ a user namespace         zygote parents, and below them sandboxes
//! ```
//!
//! All that the daemon is allowed goes by its user id, which is also that of the caller's
//! other processes, so it must not be able to name or to inspect them. Being in another user
//! namespace than theirs keeps it from their memory, files and root directories (ptrace(2),
//! "Ptrace access mode checking"). In a pid namespace of its own it cannot signal them, nor
//! change their limits, priorities and processors: it has no number for them.
//!
//! The daemon's user id owns the user namespace of the sandboxes, as with a daemon of root's.
#![allow(unsafe_code)]

use std::fs::{self, File};
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use bytemuck::{Pod, Zeroable};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::process::{
    DumpableBehavior, Pid, PidfdFlags, Signal, WaitId, WaitIdOptions, WaitOptions, pidfd_open,
    pidfd_send_signal, set_dumpable_behavior, set_parent_process_death_signal, setsid, wait,
    waitid,
};
use rustix::thread::{
    CapabilitySet, CapabilitySets, LinkNameSpaceType, configure_capability_in_ambient_set,
    move_into_link_name_space, set_capabilities, set_name,
};

use super::DaemonIds;
use super::protocol::Answer;
use crate::allowed::{Call, Otherwise, call, install_list};
use crate::confine::{drop_capabilities, enter_empty_root, unshare_mounts};
use crate::message;
use crate::sys::{self, Forked};
use crate::zygote::{IdRange, Subordinate, map_to_themselves, pid_of, receive, send};

/// What a process has in the daemon's user namespace before it has entered its root
/// directory: to do so, and to give these up. Until then they also keep a daemon, which has
/// none, from looking into launchers (cap_ptrace_access_check in security/commoncap.c).
const KEPT_OVER_EXEC: CapabilitySet = CapabilitySet::SYS_ADMIN
    .union(CapabilitySet::SYS_CHROOT)
    .union(CapabilitySet::SETGID)
    .union(CapabilitySet::SETPCAP);

/// How long the processes of a pid namespace that is ended may take to be gone.
const END_PATIENCE: Duration = Duration::from_secs(10);

/// The namespaces of a daemon and its sandboxes.
#[derive(Debug)]
pub(super) struct CallerNamespaces {
    /// The daemon's.
    user: OwnedFd,
    /// That of the sandboxes, below it.
    sandboxes: OwnedFd,
    /// Sandboxes that can have a user id of their own.
    slots: u32,
    pids: PidNamespace,
}

impl CallerNamespaces {
    /// The user namespace of the sandboxes.
    pub fn of_sandboxes(&self) -> BorrowedFd<'_> {
        self.sandboxes.as_fd()
    }

    /// How many sandboxes can have a user id of their own; 0: all share the caller's.
    pub fn slots(&self) -> u32 {
        self.slots
    }

    /// Ends everything in the pid namespace and makes it anew: once its process 1 begins to
    /// end, no other process can be made there.
    ///
    /// # Errors
    /// The host's.
    pub fn renew(&mut self) -> io::Result<()> {
        self.pids.end()?;
        self.pids = PidNamespace::make(self.user.as_fd())?;
        Ok(())
    }

    /// Ends everything in the pid namespace.
    ///
    /// # Errors
    /// It takes too long.
    pub fn end(&self) -> io::Result<()> {
        self.pids.end()
    }

    /// Which child of the monitor is process 1 of the pid namespace. It stays.
    pub fn init_pid(&self) -> u32 {
        self.pids.pid
    }

    /// Executes `command` in the namespaces of the daemon, as the caller's user id, with the
    /// capabilities of [`KEPT_OVER_EXEC`]. Returns its number in the caller's pid namespace.
    ///
    /// # Errors
    /// The host's; `ENOMEM` if process 1 ends, or has ended.
    pub fn spawn(&self, command: &mut Command) -> io::Result<Pid> {
        spawn(command, self.user.as_fd(), Pids::In(self.pids.namespace.as_fd()))
    }
}

/// Which pid namespace a process is made in.
#[derive(Clone, Copy)]
enum Pids<'a> {
    /// A new one.
    New,
    /// This.
    In(BorrowedFd<'a>),
}

/// Executes `command` in a user namespace and a pid namespace. Returns its number in the
/// caller's pid namespace.
///
/// The process that the library forks cannot enter a pid namespace itself (setns(2)), so it
/// forks a sibling, which executes, and ends. Both are children of the calling thread, which
/// reaps them.
fn spawn(command: &mut Command, user: BorrowedFd<'_>, pids: Pids<'_>) -> io::Result<Pid> {
    let (told, tell) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC)?;
    let (user, tell_pid) = (user.as_raw_fd(), tell.as_raw_fd());
    let (pids, flags) = match pids {
        Pids::New => (None, libc::CLONE_PARENT | libc::CLONE_NEWPID),
        Pids::In(namespace) => (Some(namespace.as_raw_fd()), libc::CLONE_PARENT),
    };
    // SAFETY: between fork and exec nothing is called but the host; the descriptors are open
    // until the process has executed.
    unsafe {
        command.pre_exec(move || {
            sys::reset_signals();
            sys::close_on_exec_from(3)?;
            enter(
                BorrowedFd::borrow_raw(user),
                pids.map(|namespace| BorrowedFd::borrow_raw(namespace)),
            )?;
            fork_sibling_and_end(flags as u64, BorrowedFd::borrow_raw(tell_pid))
        });
    }
    command.spawn()?;
    drop(tell);
    let mut number = [0; 4];
    if rustix::io::read(&told, &mut number)? != number.len() {
        return Err(io::Error::from(io::ErrorKind::UnexpectedEof));
    }
    Pid::from_raw(i32::from_le_bytes(number)).ok_or_else(|| Errno::SRCH.into())
}

/// Enters the daemon's user namespace, with [`KEPT_OVER_EXEC`], and has children made in a pid
/// namespace.
fn enter(user: BorrowedFd<'_>, pids: Option<BorrowedFd<'_>>) -> io::Result<()> {
    move_into_link_name_space(user, Some(LinkNameSpaceType::User))?;
    if let Some(pids) = pids {
        move_into_link_name_space(pids, Some(LinkNameSpaceType::ProcessID))?;
    }
    let kept = KEPT_OVER_EXEC;
    set_capabilities(None, CapabilitySets { effective: kept, permitted: kept, inheritable: kept })?;
    for capability in kept.iter() {
        configure_capability_in_ambient_set(capability, true)?;
    }
    Ok(())
}

/// Goes on in a sibling of this process, whose number is written to `tell`; this one ends.
fn fork_sibling_and_end(flags: u64, tell: BorrowedFd<'_>) -> io::Result<()> {
    // SAFETY: a process that was just forked has one thread; the flags share nothing.
    match unsafe { sys::fork_with(flags) }? {
        Forked::Child => Ok(()),
        Forked::Parent { pid, .. } => {
            // Its reader notices if this fails.
            let _ = rustix::io::write(tell, &pid.to_le_bytes());
            sys::exit_at_once(0)
        }
    }
}

/// Which of the caller's ids is root in the user namespace of the sandboxes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum InnerRoot {
    /// One of its range in `/etc/subuid`, if it has one: nobody inside is the daemon.
    Subordinate,
    /// Its own. In a tree of version 1 nobody but root may move processes of another user
    /// into control groups (cgroups(7)).
    Own,
}

/// How the ids of the sandboxes' user namespace are to be mapped: that of root, and from 1 on
/// `count` others.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
struct InnerMap {
    root_uid: u32,
    root_gid: u32,
    uid: u32,
    gid: u32,
    count: u32,
}

impl InnerMap {
    fn new(caller: DaemonIds, range: Option<Subordinate>, root: InnerRoot) -> Self {
        let DaemonIds { uid: root_uid, gid: root_gid } = caller;
        match (range, root) {
            (None, _) => Self { root_uid, root_gid, uid: 0, gid: 0, count: 0 },
            (Some(Subordinate { uid, gid, count }), InnerRoot::Own) => {
                Self { root_uid, root_gid, uid, gid, count }
            }
            (Some(Subordinate { uid, gid, count }), InnerRoot::Subordinate) => {
                Self { root_uid: uid, root_gid: gid, uid: uid + 1, gid: gid + 1, count: count - 1 }
            }
        }
    }

    /// As in `/proc/PID/uid_map`, or the other.
    fn text(root: u32, first: u32, count: u32) -> String {
        match count {
            0 => format!("0 {root} 1"),
            _ => format!("0 {root} 1\n1 {first} {count}"),
        }
    }
}

/// The namespaces of a daemon, of which that of the sandboxes is to be made.
#[derive(Debug)]
pub(super) struct Begun {
    caller: DaemonIds,
    user: OwnedFd,
    range: Option<Subordinate>,
    /// A process in the daemon's user namespace: nobody else has the right to map ids below.
    maker: Maker,
}

#[derive(Debug)]
struct Maker {
    socket: OwnedFd,
    pidfd: OwnedFd,
}

impl Begun {
    /// Makes the daemon's user namespace for the caller, whose ids these are, with ids for
    /// sandboxes if it has any to spare.
    ///
    /// To be called in a process with one thread.
    ///
    /// # Errors
    /// The host forbids user namespaces.
    pub fn new(caller: DaemonIds, range: Option<&IdRange>) -> io::Result<Self> {
        let range = range.map(|range| (range.first, range.slots));
        // One for root of the sandboxes' namespace, and one for a sandbox at least.
        let with_range = range.filter(|&(_, count)| count > 1);
        match Self::with_range(caller, with_range) {
            // The helpers may be missing, or not be allowed to help.
            Err(_) if with_range.is_some() => Self::with_range(caller, None),
            begun => begun,
        }
    }

    fn with_range(caller: DaemonIds, range: Option<(u32, u32)>) -> io::Result<Self> {
        let (socket, remote) = message::control_pair()?;
        // SAFETY: the caller promises that there is one thread; nothing is shared.
        match unsafe { sys::fork_with(libc::CLONE_NEWUSER as u64) }? {
            Forked::Child => {
                drop(socket);
                let made = receive::<InnerMap>(&remote, &mut Vec::new())
                    .and_then(|map| make_inner(map.ok_or(Errno::PIPE)?));
                // If the other side is gone, there is nobody left to tell.
                let _ = answer(&remote, made.map(|namespace| vec![namespace]));
                sys::exit_at_once(0)
            }
            Forked::Parent { pid, pidfd } => {
                let maker = Maker { socket, pidfd };
                let range = map_to_themselves(pid, range)?;
                let user = File::open(format!("/proc/{pid}/ns/user"))?.into();
                Ok(Self { caller, user, range, maker })
            }
        }
    }

    /// Makes the rest.
    ///
    /// # Errors
    /// The host forbids more namespaces.
    pub fn finish(self, root: InnerRoot) -> io::Result<CallerNamespaces> {
        let map = InnerMap::new(self.caller, self.range, root);
        send(&self.maker.socket, &map, &[])?;
        let sandboxes = answered(&self.maker.socket)?;
        let pids = PidNamespace::make(self.user.as_fd())?;
        Ok(CallerNamespaces { user: self.user, sandboxes, slots: map.count, pids })
    }
}

impl Drop for Maker {
    fn drop(&mut self) {
        let _ = pidfd_send_signal(&self.pidfd, Signal::KILL);
        let _ = waitid(WaitId::PidFd(self.pidfd.as_fd()), WaitIdOptions::EXITED);
    }
}

/// Makes a user namespace below that of the calling process, which has one thread.
fn make_inner(map: InnerMap) -> io::Result<OwnedFd> {
    let (wait, go_on) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC)?;
    // SAFETY: this process has one thread; nothing is shared.
    match unsafe { sys::fork_with(libc::CLONE_NEWUSER as u64) }? {
        Forked::Child => {
            drop(go_on);
            // Its maker ends when it has a descriptor of the namespace, or has failed.
            let _ = rustix::io::read(&wait, &mut [0]);
            sys::exit_at_once(0)
        }
        Forked::Parent { pid, .. } => {
            let InnerMap { root_uid, root_gid, uid, gid, count } = map;
            fs::write(format!("/proc/{pid}/gid_map"), InnerMap::text(root_gid, gid, count))?;
            fs::write(format!("/proc/{pid}/uid_map"), InnerMap::text(root_uid, uid, count))?;
            let namespace = File::open(format!("/proc/{pid}/ns/user"))?.into();
            drop(go_on);
            Ok(namespace)
        }
    }
}

/// Tells the monitor what has become of what it wants.
fn answer(socket: &OwnedFd, made: io::Result<Vec<OwnedFd>>) -> io::Result<()> {
    let (errno, made) = match made {
        Ok(made) => (0, made),
        Err(error) => (error.raw_os_error().unwrap_or(libc::EIO), Vec::new()),
    };
    let made: Vec<_> = made.iter().map(AsFd::as_fd).collect();
    send(socket, &Answer::new(errno), &made)
}

/// The namespace that [`answer`] has sent.
fn answered(socket: &OwnedFd) -> io::Result<OwnedFd> {
    let mut made = Vec::new();
    match receive::<Answer>(socket, &mut made)? {
        Some(Answer { errno: 0, .. }) => {
            made.pop().ok_or_else(|| io::Error::from(io::ErrorKind::InvalidData))
        }
        Some(Answer { errno, .. }) => Err(io::Error::from_raw_os_error(errno)),
        None => Err(io::Error::from(io::ErrorKind::UnexpectedEof)),
    }
}

/// Hidden first argument that makes an executable process 1 of a pid namespace.
const INIT_ARGUMENT: &str = "--thaw-init";

/// A pid namespace, and its process 1, which ends with the monitor, and ends all others.
#[derive(Debug)]
struct PidNamespace {
    namespace: OwnedFd,
    init: OwnedFd,
    pid: u32,
}

impl PidNamespace {
    /// Makes one that belongs to this user namespace; its process 1 is a child of the calling
    /// thread.
    fn make(user: BorrowedFd<'_>) -> io::Result<Self> {
        let (own, remote) = message::control_pair()?;
        let mut command = Command::new("/proc/self/exe");
        command
            .arg(INIT_ARGUMENT)
            .env_clear()
            .current_dir("/")
            .stdin(Stdio::from(remote))
            .stdout(Stdio::null())
            .stderr(Stdio::null());
        let number = spawn(&mut command, user, Pids::New)?;
        // The other end of the socket is process 1's alone.
        drop(command);
        let init = pidfd_open(number, PidfdFlags::empty())?;
        let made = pid_of(init.as_fd()).and_then(|pid| {
            let namespace = File::open(format!("/proc/{pid}/ns/pid"))?.into();
            await_confined(&own)?;
            Ok((namespace, pid))
        });
        match made {
            Ok((namespace, pid)) => Ok(Self { namespace, init, pid }),
            Err(error) => {
                pidfd_send_signal(&init, Signal::KILL)?;
                waitid(WaitId::PidFd(init.as_fd()), WaitIdOptions::EXITED)?;
                Err(error)
            }
        }
    }

    /// Ends process 1, and all others with it. Reaps what is a child of the calling thread.
    fn end(&self) -> io::Result<()> {
        let deadline = Instant::now() + END_PATIENCE;
        let _ = pidfd_send_signal(&self.init, Signal::KILL);
        loop {
            // It waits until all others are reaped (pid_namespaces(7)).
            while let Ok(Some(_)) = wait(WaitOptions::NOHANG) {}
            let mut events = [PollFd::new(&self.init, PollFlags::IN)];
            if poll(&mut events, Some(&Timespec { tv_sec: 0, tv_nsec: 1_000_000 }))? > 0 {
                // Nobody else reaps it, unless somebody has in the loop above.
                let _ = waitid(WaitId::PidFd(self.init.as_fd()), WaitIdOptions::EXITED);
                return Ok(());
            }
            if Instant::now() > deadline {
                return Err(Errno::TIMEDOUT.into());
            }
        }
    }
}

/// Lets process 1 know that this process is there, with which it ends from then on, and waits
/// until it has given up everything, and its end of the socket.
fn await_confined(init: &OwnedFd) -> io::Result<()> {
    send(init, &Answer::new(0), &[])?;
    match receive::<Answer>(init, &mut Vec::new())? {
        Some(Answer { errno, .. }) => Err(io::Error::from_raw_os_error(errno)),
        None => Ok(()),
    }
}

/// The life of process 1 of a daemon's pid namespace, if this process was spawned as one.
pub(crate) fn init_main() -> Option<i32> {
    if std::env::args_os().nth(1).is_none_or(|argument| argument != INIT_ARGUMENT) {
        return None;
    }
    // Nothing can own this number yet: this runs first in the process.
    let Ok(monitor) = sys::duplicate_to(io::stdin().as_fd(), 3) else { return Some(1) };
    if let Err(error) = confine_init(&monitor) {
        let _ = answer(&monitor, Err(error));
        return Some(1);
    }
    // The monitor waits for this.
    if sys::close_descriptors(0, u32::MAX).is_err() {
        sys::exit_at_once(1)
    }
    loop {
        // SAFETY: takes no arguments.
        unsafe { libc::pause() };
    }
}

/// The host calls of process 1.
static INIT_CALLS: &[Call] = &[
    call(libc::SYS_pause, &[], "waits for its end"),
    call(libc::SYS_close_range, &[], "gives up its descriptors"),
    call(libc::SYS_exit_group, &[], "its end"),
    call(libc::SYS_rt_sigreturn, &[], "signals"),
];

/// Gives up everything: the daemon has the same ids in the same user namespace, so that it
/// could reach what this process can.
fn confine_init(monitor: &OwnedFd) -> io::Result<()> {
    set_parent_process_death_signal(Some(Signal::KILL))?;
    // A monitor that has ended before that says nothing.
    if receive::<Answer>(monitor, &mut Vec::new())?.is_none() {
        return Err(Errno::PIPE.into());
    }
    // There is no daemon yet. It will have no rights in this user namespace.
    set_dumpable_behavior(DumpableBehavior::NotDumpable)?;
    // Orphans are reaped by the host kernel then (wait(2), NOTES).
    // SAFETY: to ignore a signal leaves no handler that could run.
    unsafe { libc::signal(libc::SIGCHLD, libc::SIG_IGN) };
    set_name(c"thaw-init")?;
    setsid()?;
    unshare_mounts()?;
    enter_empty_root()?;
    drop_capabilities(CapabilitySet::empty())?;
    install_list(INIT_CALLS.iter().copied(), Otherwise::Kill)
}

#[cfg(test)]
mod tests {
    use super::*;

    const CALLER: DaemonIds = DaemonIds { uid: 1000, gid: 100 };
    const RANGE: Option<Subordinate> = Some(Subordinate { uid: 100_000, gid: 200_000, count: 9 });

    #[test]
    fn the_caller_is_among_the_sandboxes_ids_only_where_it_must_be() {
        let maps = |range, root| {
            let map = InnerMap::new(CALLER, range, root);
            let InnerMap { root_uid, root_gid, uid, gid, count } = map;
            [InnerMap::text(root_uid, uid, count), InnerMap::text(root_gid, gid, count)]
        };
        assert_eq!(maps(None, InnerRoot::Subordinate), ["0 1000 1", "0 100 1"]);
        let subordinate = ["0 100000 1\n1 100001 8", "0 200000 1\n1 200001 8"];
        assert_eq!(maps(RANGE, InnerRoot::Subordinate), subordinate);
        let own = ["0 1000 1\n1 100000 9", "0 100 1\n1 200000 9"];
        assert_eq!(maps(RANGE, InnerRoot::Own), own);
    }
}
