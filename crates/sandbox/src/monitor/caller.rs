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
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::os::unix::process::CommandExt;
use std::process::Command;
use std::time::{Duration, Instant};

use bytemuck::{Pod, Zeroable};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::process::{
    DumpableBehavior, Pid, Signal, WaitId, WaitIdOptions, WaitOptions, pidfd_send_signal,
    set_dumpable_behavior, set_parent_process_death_signal, setsid, wait, waitid,
};
use rustix::thread::{
    CapabilitySet, CapabilitySets, LinkNameSpaceType, UnshareFlags,
    configure_capability_in_ambient_set, move_into_link_name_space, set_capabilities, set_name,
    set_no_new_privs, unshare_unsafe,
};

use super::DaemonIds;
use super::protocol::Answer;
use crate::allowed::{Call, Otherwise, call, install_list};
use crate::message;
use crate::sys::{self, Forked};
use crate::zygote::{
    IdRange, enter_empty_root, map_to_themselves, pid_of, receive, send, shrink_bounding_set,
};

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
    /// Makes them for the caller, whose ids these are, with ids for sandboxes if it has any
    /// to spare.
    ///
    /// To be called in a process with one thread.
    ///
    /// # Errors
    /// The host forbids user namespaces.
    pub fn make(caller: DaemonIds, range: Option<&IdRange>) -> io::Result<Self> {
        let range = range.map(|range| (range.first, range.slots));
        // One for root of the sandboxes' namespace, and one for a sandbox at least.
        let with_range = range.filter(|&(_, count)| count > 1);
        let made = match make_user_namespaces(caller, with_range) {
            // The helpers may be missing, or not be allowed to help.
            Err(_) if with_range.is_some() => make_user_namespaces(caller, None),
            made => made,
        };
        let UserNamespaces { daemon, sandboxes, slots } = made?;
        let pids = PidNamespace::make(daemon.as_fd())?;
        Ok(Self { user: daemon, sandboxes, slots, pids })
    }

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
    /// To be called in a process with one thread.
    ///
    /// # Errors
    /// The host's.
    pub fn renew(&mut self) -> io::Result<()> {
        self.pids.end()?;
        self.pids = PidNamespace::make(self.user.as_fd())?;
        Ok(())
    }

    /// Whether a child of the monitor is process 1 of the pid namespace, which stays.
    pub fn is_init(&self, pid: u32) -> bool {
        self.pids.pid == pid
    }

    /// Executes `command` in the namespaces of the daemon, as the caller's user id, with the
    /// capabilities of [`KEPT_OVER_EXEC`]. Returns its number in the caller's pid namespace.
    ///
    /// The process that the library forks cannot enter a pid namespace itself (setns(2)), so
    /// it forks a sibling, which executes, and ends. Both are children of the calling thread,
    /// which reaps them.
    ///
    /// # Errors
    /// The host's.
    pub fn spawn(&self, command: &mut Command) -> io::Result<Pid> {
        let (told, tell) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC)?;
        let (user, pids) = (self.user.as_raw_fd(), self.pids.namespace.as_raw_fd());
        let tell_pid = tell.as_raw_fd();
        // SAFETY: between fork and exec nothing is called but the host; the descriptors are
        // open as long as `self` and `tell` live, which is until the process has executed.
        unsafe {
            command.pre_exec(move || {
                sys::reset_signals();
                sys::close_on_exec_from(3)?;
                enter(BorrowedFd::borrow_raw(user), BorrowedFd::borrow_raw(pids))?;
                fork_sibling_and_end(tell_pid)
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
}

/// Enters the daemon's user namespace, with [`KEPT_OVER_EXEC`], and has children made in its
/// pid namespace.
fn enter(user: BorrowedFd<'_>, pids: BorrowedFd<'_>) -> io::Result<()> {
    move_into_link_name_space(user, Some(LinkNameSpaceType::User))?;
    move_into_link_name_space(pids, Some(LinkNameSpaceType::ProcessID))?;
    let kept = KEPT_OVER_EXEC;
    set_capabilities(None, CapabilitySets { effective: kept, permitted: kept, inheritable: kept })?;
    for capability in kept.iter() {
        configure_capability_in_ambient_set(capability, true)?;
    }
    Ok(())
}

/// Goes on in a sibling of this process, whose number is written to `tell`; this one ends.
fn fork_sibling_and_end(tell: RawFd) -> io::Result<()> {
    // SAFETY: a process that was just forked has one thread; the flag shares nothing.
    match unsafe { sys::fork_with(libc::CLONE_PARENT as u64) }? {
        Forked::Child => Ok(()),
        Forked::Parent { pid, .. } => {
            // SAFETY: the caller keeps the descriptor open.
            let tell = unsafe { BorrowedFd::borrow_raw(tell) };
            // Its reader notices if this fails.
            let _ = rustix::io::write(tell, &pid.to_le_bytes());
            sys::exit_at_once(0)
        }
    }
}

/// What [`make_user_namespaces`] makes.
struct UserNamespaces {
    daemon: OwnedFd,
    sandboxes: OwnedFd,
    slots: u32,
}

/// How the ids of the sandboxes' user namespace are to be mapped: from 0 on.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
struct InnerMap {
    uid: u32,
    gid: u32,
    count: u32,
}

/// Makes both user namespaces; a process in the outer one makes the inner one, since nobody
/// else has the right to map its ids.
fn make_user_namespaces(
    caller: DaemonIds,
    range: Option<(u32, u32)>,
) -> io::Result<UserNamespaces> {
    let (own, remote) = message::control_pair()?;
    // SAFETY: the caller promises that there is one thread; nothing is shared.
    match unsafe { sys::fork_with(libc::CLONE_NEWUSER as u64) }? {
        Forked::Child => {
            drop(own);
            let made = receive::<InnerMap>(&remote, &mut Vec::new())
                .and_then(|map| make_inner(map.ok_or(Errno::PIPE)?));
            // If the other side is gone, there is nobody left to tell.
            let _ = answer(&remote, made.map(|namespace| vec![namespace]));
            sys::exit_at_once(0)
        }
        Forked::Parent { pid, pidfd } => {
            drop(remote);
            let made = direct_maker(&own, pid, caller, range);
            pidfd_send_signal(&pidfd, Signal::KILL)?;
            waitid(WaitId::PidFd(pidfd.as_fd()), WaitIdOptions::EXITED)?;
            made
        }
    }
}

/// Maps the ids of the process that makes the inner namespace, and has it do so.
fn direct_maker(
    maker: &OwnedFd,
    pid: i32,
    caller: DaemonIds,
    range: Option<(u32, u32)>,
) -> io::Result<UserNamespaces> {
    let map = match map_to_themselves(pid, range)? {
        Some(ids) => InnerMap { uid: ids.uid, gid: ids.gid, count: ids.count },
        None => InnerMap { uid: caller.uid, gid: caller.gid, count: 1 },
    };
    let daemon = File::open(format!("/proc/{pid}/ns/user"))?.into();
    send(maker, &map, &[])?;
    let [sandboxes] = answered(maker)?;
    Ok(UserNamespaces { daemon, sandboxes, slots: map.count - 1 })
}

/// Makes a user namespace below that of the calling process.
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
            let InnerMap { uid, gid, count } = map;
            fs::write(format!("/proc/{pid}/gid_map"), format!("0 {gid} {count}"))?;
            fs::write(format!("/proc/{pid}/uid_map"), format!("0 {uid} {count}"))?;
            let namespace = File::open(format!("/proc/{pid}/ns/user"))?.into();
            Ok(namespace)
        }
    }
}

/// Tells the monitor what a process between has made.
fn answer(socket: &OwnedFd, made: io::Result<Vec<OwnedFd>>) -> io::Result<()> {
    let (errno, made) = match made {
        Ok(made) => (0, made),
        Err(error) => (error.raw_os_error().unwrap_or(libc::EIO), Vec::new()),
    };
    let made: Vec<_> = made.iter().map(AsFd::as_fd).collect();
    send(socket, &Answer { errno, reserved: 0 }, &made)
}

/// What [`answer`] has sent.
fn answered<const COUNT: usize>(socket: &OwnedFd) -> io::Result<[OwnedFd; COUNT]> {
    let mut made = Vec::new();
    match receive::<Answer>(socket, &mut made)? {
        Some(Answer { errno: 0, .. }) => {
            made.try_into().map_err(|_| io::Error::from(io::ErrorKind::InvalidData))
        }
        Some(Answer { errno, .. }) => Err(io::Error::from_raw_os_error(errno)),
        None => Err(io::Error::from(io::ErrorKind::UnexpectedEof)),
    }
}

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
        // SAFETY: the caller promises that there is one thread; nothing is shared.
        match unsafe { sys::fork_with(0) }? {
            Forked::Child => {
                drop(own);
                let made = move_into_link_name_space(user, Some(LinkNameSpaceType::User))
                    .map_err(io::Error::from)
                    .and_then(|()| fork_init(&remote));
                let _ = answer(&remote, made);
                sys::exit_at_once(0)
            }
            Forked::Parent { pidfd, .. } => {
                drop(remote);
                let made = answered(&own);
                waitid(WaitId::PidFd(pidfd.as_fd()), WaitIdOptions::EXITED)?;
                let [namespace, init] = made?;
                match await_confined(own).and_then(|()| pid_of(init.as_fd())) {
                    Ok(pid) => Ok(Self { namespace, init, pid }),
                    Err(error) => {
                        pidfd_send_signal(&init, Signal::KILL)?;
                        waitid(WaitId::PidFd(init.as_fd()), WaitIdOptions::EXITED)?;
                        Err(error)
                    }
                }
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
fn await_confined(init: OwnedFd) -> io::Result<()> {
    send(&init, &Answer { errno: 0, reserved: 0 }, &[])?;
    match receive::<Answer>(&init, &mut Vec::new())? {
        Some(Answer { errno, .. }) => Err(io::Error::from_raw_os_error(errno)),
        None => Ok(()),
    }
}

/// Forks process 1 of a new pid namespace; that namespace, and a descriptor of the process.
fn fork_init(monitor: &OwnedFd) -> io::Result<Vec<OwnedFd>> {
    // SAFETY: this process has one thread; nothing is shared.
    match unsafe { sys::fork_with((libc::CLONE_NEWPID | libc::CLONE_PARENT) as u64) }? {
        Forked::Parent { pid, pidfd } => {
            let namespace = File::open(format!("/proc/{pid}/ns/pid"))?.into();
            Ok(vec![namespace, pidfd])
        }
        Forked::Child => {
            let confined = confine_init(monitor);
            if confined.is_err() {
                let _ = answer(monitor, confined.map(|()| Vec::new()));
                sys::exit_at_once(1)
            }
            let _ = sys::close_descriptors(0, u32::MAX);
            loop {
                // SAFETY: takes no arguments.
                unsafe { libc::pause() };
            }
        }
    }
}

/// The host calls of process 1.
static INIT_CALLS: &[Call] = &[
    call(libc::SYS_pause, &[], "waits for its end"),
    call(libc::SYS_close_range, &[], "gives up its descriptors"),
    call(libc::SYS_exit_group, &[], "its end"),
    call(libc::SYS_rt_sigreturn, &[], "signals"),
];

/// Gives up everything: the daemon has the same ids in the same user namespace, so what this
/// process could reach would be the daemon's.
fn confine_init(monitor: &OwnedFd) -> io::Result<()> {
    set_parent_process_death_signal(Some(Signal::KILL))?;
    // A monitor that has ended before that says nothing.
    if receive::<Answer>(monitor, &mut Vec::new())?.is_none() {
        return Err(Errno::PIPE.into());
    }
    // Its maker has opened what it needs of this process, and there is no daemon yet. That
    // will have no rights over the user namespace of this memory, which is the caller's.
    set_dumpable_behavior(DumpableBehavior::NotDumpable)?;
    sys::reset_signals();
    // Orphans are reaped by the host kernel then (wait(2), NOTES).
    // SAFETY: to ignore a signal leaves no handler that could run.
    unsafe { libc::signal(libc::SIGCHLD, libc::SIG_IGN) };
    set_name(c"thaw-init")?;
    setsid()?;
    // SAFETY: this process has one thread, and no descriptors are unshared.
    unsafe { unshare_unsafe(UnshareFlags::NEWNS) }?;
    enter_empty_root()?;
    shrink_bounding_set(CapabilitySet::empty())?;
    let none = CapabilitySet::empty();
    set_capabilities(None, CapabilitySets { effective: none, permitted: none, inheritable: none })?;
    set_no_new_privs(true)?;
    install_list(INIT_CALLS.iter().copied(), Otherwise::Kill)
}
