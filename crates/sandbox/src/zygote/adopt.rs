//! Sandboxes that outlive their daemon. A daemon has its monitor keep the descriptors of a
//! sandbox and of the zygote parent that has made it; the next daemon takes them over.
//!
//! ```text
//!  daemon ── keep: sockets, pidfd, pipes, a note ──▶ monitor
//!    ✝                                                 │
//!  next daemon ◀── the same ───────────────────────────┘
//! ```
//!
//! What was not kept ends with its daemon: zygotes, templates and what was booted ahead hang
//! on sockets that close, and [`take_over`] ends whatever else a kept parent still has.

use std::collections::{HashMap, HashSet};
use std::fmt;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use rustix::process::{PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use serde::{Deserialize, Serialize};

use super::handle::{Alive, Connected, Ids, ParentThread};
use super::process::{KnownAs, Numbers, Process, own_number_of, pid_of};
use super::protocol::UserIds;
use super::{broker_of, numbered};
use crate::boot::{BootError, BootPlan};
use crate::broker::{VolumeHolder, VolumeMount, VolumeUser};
use crate::console::{Console, HostEnd};
use crate::egress::{EgressPolicy, LeftSockets};
use crate::limits::{Hierarchy, Limits, ResourceLimits};
use crate::monitor::{self, IdShare, Keep, Kept, KeptKind, MonitorLink};
use crate::sandbox::Sandbox;

/// Zygote parents of earlier daemons that are taken over: each daemon that is killed leaves one,
/// as long as one of its sandboxes lives.
const PARENTS_MAX: usize = 16;
/// Looks at the children of a parent, at most, and the pause between two.
const LOOKS: u32 = 50;
const LOOK_PAUSE: Duration = Duration::from_millis(1);
/// Descriptors of every sandbox: its control socket, its pidfd, its console.
const OWN_DESCRIPTORS: usize = 3;

/// What the next daemon has to know of a zygote parent. Its descriptors: the control socket
/// and the pidfd.
#[derive(Debug, Serialize, Deserialize)]
struct ParentNote {
    /// See [`UserIds::of_slot`].
    first_id: u32,
    kernel_build_id: [u8; 32],
}

/// What the next daemon has to know of a sandbox.
#[derive(Debug, Serialize, Deserialize)]
struct SandboxNote {
    /// Key of its zygote parent.
    parent: u64,
    known_as: KnownAs,
    slot: Option<u32>,
    /// One more descriptor follows its own: the file with its outgoing connections.
    has_connections: bool,
    /// It has volumes, and this number among all who have some. An older daemon leaves no such sandbox.
    #[serde(default)]
    volume_holder: Option<VolumeHolder>,
    /// For whoever had it kept.
    note: String,
}

/// Something that the monitor keeps for the next daemon, until this is dropped.
#[derive(Debug)]
pub struct KeptForSuccessor(Keep);

impl KeptForSuccessor {
    /// Becomes true when the monitor has it: the daemon may end.
    pub fn has_arrived(&self) -> &Arc<AtomicBool> {
        self.0.has_arrived()
    }
}

/// Has the monitor keep a connection for the next daemon: the client's socket, and others that belong
/// to it. `None`: this process has no monitor.
///
/// # Errors
/// The note is too long, or the monitor keeps as much as it may.
pub fn keep_connection(
    socket: BorrowedFd<'_>,
    others: &[BorrowedFd<'_>],
    note: &str,
) -> io::Result<Option<KeptForSuccessor>> {
    let Some(link) = monitor::of_this_process() else { return Ok(None) };
    let all = [&[socket], others].concat();
    let keep = link.keep(KeptKind::Connection, None, note.as_bytes(), &all)?;
    Ok(Some(KeptForSuccessor(keep)))
}

impl Sandbox {
    /// Has the monitor keep the sandbox for the daemon that comes after this one, with two
    /// descriptors of the caller's at most. `None`: this process has no monitor.
    ///
    /// # Errors
    /// The note is too long, or the monitor keeps as much as it may.
    pub fn keep(
        &self,
        note: &str,
        descriptors: &[BorrowedFd<'_>],
    ) -> io::Result<Option<KeptForSuccessor>> {
        let Some(link) = monitor::of_this_process() else { return Ok(None) };
        let process = self.process();
        let connections = self.connections_for_successor()?;
        let own = SandboxNote {
            parent: process.parent.keep(&link)?,
            known_as: process.known_as,
            slot: process.slot,
            has_connections: connections.is_some(),
            volume_holder: self.volume_holder(),
            note: note.to_owned(),
        };
        let text = serde_json::to_vec(&own).expect("plain data");
        let console = self.console_for_successor()?;
        let mut all = vec![self.control().as_fd(), process.pidfd(), console.as_fd()];
        all.extend(connections.iter().map(AsFd::as_fd));
        all.extend(descriptors);
        let group = process.limits.group().name().number;
        let keep = link.keep(KeptKind::Sandbox, Some(group), &text, &all)?;
        Ok(Some(KeptForSuccessor(keep)))
    }
}

impl Connected {
    /// Has the parent kept, unless it is. Its key.
    fn keep(&self, link: &Arc<MonitorLink>) -> io::Result<u64> {
        let mut kept = self.kept.lock().expect("no holder panics");
        if let Some(keep) = &*kept {
            return Ok(keep.key());
        }
        if !self.has_monitor {
            return Err(io::ErrorKind::Unsupported.into());
        }
        let note = ParentNote { first_id: self.first_id, kernel_build_id: self.kernel_build_id() };
        let text = serde_json::to_vec(&note).expect("plain data");
        let descriptors = [self.control.as_fd(), self.pidfd.as_fd()];
        let keep = link.keep(KeptKind::Parent, None, &text, &descriptors)?;
        Ok(kept.insert(keep).key())
    }

    /// The connection to a parent that an earlier daemon has started, for its sandboxes that
    /// live. It makes no others.
    fn adopt(link: &Arc<MonitorLink>, keep: Keep, kept: Kept) -> io::Result<Arc<Self>> {
        let note: ParentNote = serde_json::from_slice(&kept.note)?;
        let [control, pidfd] = exactly(kept.descriptors)?;
        let pid = pid_of(pidfd.as_fd())?;
        Ok(Arc::new(Self {
            control,
            pid,
            pidfd,
            user_ids: match link.grant().ids {
                0 => UserIds::Shared,
                _ => UserIds::OnePerSandbox,
            },
            first_id: note.first_id,
            limit: 0,
            groups: Hierarchy::granted(link.clone()),
            kernel_build_id: note.kernel_build_id,
            registry: Arc::default(),
            state: Arc::default(),
            rewinders: Arc::default(),
            has_monitor: true,
            kept: Mutex::new(Some(keep)),
        }))
    }

    /// Begins to listen to an adopted parent, whose sandboxes are in the registry by now and have
    /// these ids.
    fn listen(&self, ids: Vec<IdShare>) -> io::Result<()> {
        let thread_of_parent = ParentThread {
            control: self.control.try_clone()?,
            registry: self.registry.clone(),
            helpers: (self.state.clone(), self.rewinders.clone()),
            ids: Ids::Adopted { _each: ids },
        };
        let pidfd = self.pidfd.try_clone()?;
        let thread = std::thread::Builder::new().name("zygote-parent".into());
        thread.spawn(move || thread_of_parent.go_on(pidfd)).map(drop)
    }

    /// Ends all children that are not among `kept`: the daemon that knew them has ended. Looks
    /// until there are none: one look may miss some while others end (proc_pid_task_children(5)).
    fn end_others(&self, kept: &HashSet<u32>) {
        for _ in 0..LOOKS {
            if self.end_some_others(kept) == 0 {
                return;
            }
            std::thread::sleep(LOOK_PAUSE);
        }
    }

    /// Ends those that a look shows; how many there were.
    fn end_some_others(&self, kept: &HashSet<u32>) -> usize {
        let mut ended = 0;
        let path = format!("/proc/{0}/task/{0}/children", self.pid);
        let children = std::fs::read_to_string(path).unwrap_or_default();
        for child in children.split_whitespace().filter_map(|pid| pid.parse::<u32>().ok()) {
            if let Some(pid) = own_number_of(child).filter(|_| !kept.contains(&child))
                && let Ok(pidfd) = pidfd_open(pid, PidfdFlags::empty())
                // The number may be another's since; that one is no child of the parent.
                && parent_of(child) == Some(self.pid)
            {
                let _ = pidfd_send_signal(&pidfd, Signal::KILL);
                ended += 1;
            }
        }
        ended
    }
}

/// A live sandbox whose daemon has ended. Dropping it ends it.
pub struct Orphan {
    process: Process,
    control: OwnedFd,
    console: HostEnd,
    connections: Option<LeftSockets>,
    descriptors: Vec<OwnedFd>,
    volume_holder: Option<VolumeHolder>,
    note: String,
    keep: Keep,
}

impl fmt::Debug for Orphan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Orphan").field("pid", &self.process.pid).finish_non_exhaustive()
    }
}

/// A sandbox that was taken over.
#[derive(Debug)]
pub struct Adopted {
    /// The sandbox.
    pub sandbox: Sandbox,
    /// The descriptors that were kept with it.
    pub descriptors: Vec<OwnedFd>,
    /// Keeps it for the daemon after this one, too.
    pub kept: KeptForSuccessor,
}

/// A connection that a sandbox of a daemon that has ended still has.
#[derive(Debug)]
pub struct OrphanConnection {
    /// The client's socket.
    pub socket: OwnedFd,
    /// What was kept with it.
    pub others: Vec<OwnedFd>,
    /// What was noted about it.
    pub note: String,
    /// Keeps it for the daemon after this one, too.
    pub kept: KeptForSuccessor,
}

/// What the daemons before this one have left.
#[derive(Debug, Default)]
pub struct Legacy {
    /// Sandboxes that live.
    pub sandboxes: Vec<Orphan>,
    /// Connections that they had when they were last looked at.
    pub connections: Vec<OrphanConnection>,
    /// Why something could not be taken over; most often it has ended meanwhile.
    pub problems: Vec<String>,
}

impl Orphan {
    /// Its user id, as its user namespace numbers them.
    fn id(&self) -> Option<u32> {
        Some(self.process.parent.id_of_slot(self.process.slot?))
    }

    /// What was noted about it.
    pub fn note(&self) -> &str {
        &self.note
    }

    /// Takes the sandbox over, over the files of `plan` and with the volumes that it has, in the same order.
    /// `thawed` is the checksum of the image that it was booted from, if that is known: a freeze of it
    /// relies on that. It hears of it, asks again what nobody has answered, and takes back what it had
    /// open in its volumes.
    ///
    /// # Errors
    /// It has ended, or its limits cannot be kept.
    pub fn adopt(
        self,
        plan: &BootPlan,
        limits: ResourceLimits,
        cpu_time_limit: Option<Duration>,
        egress: &Arc<EgressPolicy>,
        volumes: &[VolumeMount],
        thawed: Option<[u8; 32]>,
    ) -> Result<Adopted, BootError> {
        let Self {
            process, control, console, connections, descriptors, volume_holder, keep, ..
        } = self;
        process.set_limits(limits, cpu_time_limit).map_err(BootError::Limits)?;
        if volume_holder.is_none() && !volumes.is_empty() {
            return Err(BootError::NotPrepared("its volumes are new to it".to_owned()));
        }
        let holder = volume_holder.unwrap_or_default();
        let user = VolumeUser { holder, left: Some(process.pidfd()) };
        let broker = broker_of(&control, plan.rootfs(), egress, numbered(volumes), &user)?;
        if let Some(left) = connections {
            broker.take_over_connections(left);
        }
        console.set_pid(process.pid);
        let mut sandbox = Sandbox::new(process, control, console, broker).thawed_as(thawed);
        sandbox.renew().map_err(BootError::Send)?;
        Ok(Adopted { sandbox, descriptors, kept: KeptForSuccessor(keep) })
    }
}

/// Takes over what earlier daemons of this process's monitor have had kept. To be called once,
/// before there are zygote parents. What cannot be understood ends, and so do the sandboxes of
/// the oldest zygote parents if there are more than [`PARENTS_MAX`].
///
/// # Errors
/// The monitor has ended.
pub fn take_over(console: &Console) -> io::Result<Legacy> {
    let Some(link) = monitor::of_this_process() else { return Ok(Legacy::default()) };
    let mut legacy = Legacy::default();
    let all = link.kept()?.into_iter();
    let (mut parents, others): (Vec<_>, Vec<_>) =
        all.partition(|(_, kept)| kept.kind == KeptKind::Parent);
    if parents.len() > PARENTS_MAX {
        let old = parents.len() - PARENTS_MAX;
        legacy.problems.push(format!("{old} zygote parents are too many daemons old"));
        parents.drain(..old);
    }
    let mut adopted = HashMap::new();
    for (keep, kept) in parents {
        let key = keep.key();
        match Connected::adopt(&link, keep, kept) {
            Ok(parent) => drop(adopted.insert(key, parent)),
            Err(error) => legacy.problems.push(format!("a zygote parent: {error}")),
        }
    }
    for (keep, kept) in others {
        let group = kept.group;
        let result = match kept.kind {
            KeptKind::Sandbox => orphan(&adopted, console, keep, kept)
                .map(|orphan| legacy.sandboxes.push(orphan))
                .inspect_err(|_| link.remove_group(group.number)),
            _ => connection(keep, kept).map(|connection| legacy.connections.push(connection)),
        };
        if let Err(error) = result {
            legacy.problems.push(error.to_string());
        }
    }
    LeftSockets::forget_closed(
        legacy.sandboxes.iter_mut().filter_map(|orphan| orphan.connections.as_mut()),
    );
    for parent in adopted.values() {
        if let Err(error) = settle(&link, parent, &legacy.sandboxes) {
            let is_others = |orphan: &Orphan| !Arc::ptr_eq(&orphan.process.parent, parent);
            legacy.sandboxes.retain(is_others);
            legacy.problems.push(format!("the sandboxes of a zygote parent: {error}"));
        }
    }
    Ok(legacy)
}

/// Ends what a parent has besides these sandboxes, takes their ids, and listens to it.
fn settle(
    link: &Arc<MonitorLink>,
    parent: &Arc<Connected>,
    sandboxes: &[Orphan],
) -> io::Result<()> {
    let own = || sandboxes.iter().filter(|orphan| Arc::ptr_eq(&orphan.process.parent, parent));
    parent.end_others(&own().map(|orphan| orphan.process.pid).collect());
    let of_sandboxes = own().filter_map(Orphan::id);
    let ids: io::Result<Vec<_>> =
        of_sandboxes.chain([parent.first_id]).map(|id| link.take_id(id)).collect();
    parent.listen(ids?)
}

fn orphan(
    parents: &HashMap<u64, Arc<Connected>>,
    console: &Console,
    keep: Keep,
    kept: Kept,
) -> io::Result<Orphan> {
    let invalid = || io::Error::from(io::ErrorKind::InvalidData);
    let note: SandboxNote = serde_json::from_slice(&kept.note)?;
    let parent = parents.get(&note.parent).ok_or_else(invalid)?.clone();
    // Its id is reckoned from the slot.
    let is_sound = |slot: u32| parent.first_id.checked_add(slot).is_some_and(|id| id < u32::MAX);
    if !note.slot.is_none_or(is_sound) {
        return Err(invalid());
    }
    let mut own = kept.descriptors;
    if own.len() < OWN_DESCRIPTORS + usize::from(note.has_connections) {
        return Err(invalid());
    }
    let mut descriptors = own.split_off(OWN_DESCRIPTORS);
    let connections =
        note.has_connections.then(|| LeftSockets::read(descriptors.remove(0))).transpose()?;
    let [control, pidfd, read] = exactly(own)?;
    let Numbers { pid, own: own_number } = Numbers::of(pidfd.as_fd())?;
    let limits = Arc::new(Limits::new(parent.groups.adopt(kept.group)));
    let SandboxNote { known_as, slot, volume_holder, note, .. } = note;
    let exit = Arc::default();
    let alive = Alive { slot, exit: Arc::clone(&exit), _limits: limits.clone() };
    match known_as {
        KnownAs::Created(id) => drop(parent.registry().alive.insert(id, alive)),
        KnownAs::Copy(number) => drop(parent.registry().copies.insert(number, alive)),
    }
    let affinity = None;
    let process = Process {
        pid,
        own_number,
        pidfd: Arc::new(pidfd),
        exit,
        limits,
        parent,
        affinity,
        known_as,
        slot,
    };
    let console = console.adopt(read)?;
    Ok(Orphan { process, control, console, connections, descriptors, volume_holder, note, keep })
}

fn connection(keep: Keep, kept: Kept) -> io::Result<OrphanConnection> {
    let mut others = kept.descriptors.into_iter();
    let socket = others.next().ok_or(io::ErrorKind::InvalidData)?;
    let note = String::from_utf8(kept.note).map_err(io::Error::other)?;
    Ok(OrphanConnection { socket, others: others.collect(), note, kept: KeptForSuccessor(keep) })
}

fn exactly<const N: usize>(descriptors: Vec<OwnedFd>) -> io::Result<[OwnedFd; N]> {
    descriptors.try_into().map_err(|_| io::Error::from(io::ErrorKind::InvalidData))
}

/// The parent of a process (proc_pid_stat(5)).
fn parent_of(pid: u32) -> Option<u32> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The name in parentheses may hold anything.
    stat.rsplit_once(')')?.1.split_whitespace().nth(1)?.parse().ok()
}
