//! The monitor's end.
#![allow(unsafe_code)]

mod state;

pub use state::MonitorState;

use std::collections::{BTreeMap, HashMap, HashSet};
use std::ffi::OsString;
use std::fmt;
use std::io;
use std::net::{SocketAddr, TcpListener, UdpSocket};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;

use rustix::io::Errno;
use rustix::process::Pid;
use serde::{Deserialize, Serialize};

use super::caller::{Begun, CallerNamespaces, InnerRoot};
use super::handover::path_of;
use super::namespace::UserNamespace;
use super::protocol::{
    Answer, Grant, Kept, REQUEST_BIND, REQUEST_FETCHER, REQUEST_FORGET, REQUEST_GROUP,
    REQUEST_KEEP, REQUEST_LEAVE, REQUEST_NEXT_KEPT, REQUEST_PARENT, REQUEST_REMOVE_GROUP,
    REQUEST_RESOLVER, REQUEST_SERVING, REQUEST_STATE_HELPER, Request, VERSION, receive_request,
    send_kept,
};
use super::store::{DescriptorStore, do_not_linger};
use crate::egress::Transport;
use crate::host::RESERVE_IDS;
use crate::join::Join;
use crate::limits::{self, Group, GroupName, Hierarchy, Newcomers, Version, WeakLimits};
use crate::resolver;
use crate::state::{Task, launcher};
use crate::sys;
use crate::zygote::{IdRange, PARENT_ARGUMENT, ZygoteError, refuse_weak_limits, send};

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
/// Ids of one monitor, besides that of root: those of sandboxes, and one of its resolver
/// processes. Sandboxes that outlive their daemon keep theirs, and the next daemon has as many
/// as ever.
const IDS_MAX: u32 = 8 * SANDBOXES_MAX + 1;
/// Groups of one daemon at a time: also of sandboxes that are being made, and of those that
/// have ended and whose groups are not removed yet.
const GROUPS_MAX: usize = 2 * SANDBOXES_MAX as usize;
/// Children of a monitor: the daemon, zygote parents, resolver processes, and launchers of
/// zygote parents and state helpers.
const CHILDREN_MAX: usize = 64;
/// Fetchers of a daemon at a time. It has fewer itself; those of before may not be gone yet.
const FETCHERS_MAX: usize = 16;
/// What is kept for the next daemon: sandboxes, zygote parents, and connections.
const KEPT_MAX: usize = 2 * SANDBOXES_MAX as usize;
/// Of the descriptors that the monitor may have, this share is for what it keeps.
const KEPT_SHARE: u64 = 2;
/// Ports from this one on a daemon binds itself (ip(7)).
const UNPRIVILEGED_PORT: u16 = 1024;
/// Requests of a daemon that has ended, at most: more than the buffer of a socket holds. Whoever else has
/// its end cannot keep the monitor busy.
const LAST_MAX: usize = 4096;
/// Sockets that are bound for a daemon, at most, in its life.
const BOUND_MAX: u32 = 4096;

/// The privileged side of one daemon.
#[derive(Debug)]
pub struct Monitor {
    ids: DaemonIds,
    /// Held for as long as there are sandboxes with these ids.
    range: Option<IdRange>,
    /// See [`Grant`].
    slots: u32,
    namespaces: Namespaces,
    groups: Arc<Hierarchy>,
    /// Whom the daemon may move into groups. `None`: whomever its user may.
    newcomers: Option<Newcomers>,
    made: HashMap<u64, Group>,
    store: DescriptorStore,
    bound: u32,
    /// The daemon has asked for something.
    has_asked: bool,
    /// The daemon has said that it serves its clients.
    is_serving: bool,
    /// The daemon has said that it ends in order.
    has_left: bool,
    /// See [`Grant`].
    life: u32,
    /// [`GROUPS_MAX`].
    groups_max: usize,
    /// [`CHILDREN_MAX`].
    children_max: usize,
    /// How fetchers are started, if they are.
    fetcher: Option<FetcherCommand>,
    /// Those that were started, by process id.
    fetchers: Vec<u32>,
    /// Versions of daemons by their life: of the present one, and of those before it that have had
    /// something kept which is kept still.
    versions: BTreeMap<u32, u32>,
    /// The program from which the helpers of this daemon are started, if that is not this one.
    helpers: Option<OwnedFd>,
}

/// How a fetcher is started: an executable of Thaw, with these arguments and variables.
#[derive(Clone)]
pub struct FetcherCommand {
    /// Its arguments.
    pub arguments: Vec<OsString>,
    /// Its environment, which may hold credentials.
    pub environment: Vec<(OsString, OsString)>,
}

impl fmt::Debug for FetcherCommand {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FetcherCommand").field("arguments", &self.arguments).finish_non_exhaustive()
    }
}

impl FetcherCommand {
    /// The command, with this socket as its standard input.
    pub fn with(&self, socket: OwnedFd) -> Command {
        self.by(sys::OWN_PROGRAM.as_ref(), socket)
    }

    /// The same by another Thaw.
    fn by(&self, program: &Path, socket: OwnedFd) -> Command {
        let mut command = Command::new(program);
        command
            .args(&self.arguments)
            .env_clear()
            .envs(self.environment.iter().cloned())
            .current_dir("/")
            .stdin(Stdio::from(socket))
            .stdout(Stdio::null());
        command
    }
}

/// Why a daemon cannot be kept from the other processes of its user.
#[derive(Debug, thiserror::Error)]
#[error(transparent)]
pub struct NoNamespaces(io::Error);

/// The namespaces of a daemon's sandboxes.
#[derive(Debug)]
enum Namespaces {
    /// The monitor is root, and the daemon another user.
    OfRoot(UserNamespace),
    /// Both are the same user.
    OfCaller(Box<CallerNamespaces>),
}

impl Namespaces {
    /// The user namespace of the sandboxes.
    fn of_sandboxes(&self) -> BorrowedFd<'_> {
        match self {
            Self::OfRoot(namespace) => namespace.as_fd(),
            Self::OfCaller(namespaces) => namespaces.of_sandboxes(),
        }
    }
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
        let range = IdRange::reserve(FIRST_ID, IDS_MAX)
            .map_err(during(RESERVE_IDS))?
            .ok_or_else(|| during(RESERVE_IDS)(Errno::PERM.into()))?;
        // With root's of the namespace, which is the zygote parents' id.
        let namespace = match UserNamespace::make(ids, range.first, range.slots + 1) {
            Ok(namespace) => namespace,
            Err(error) if forbids_namespaces(&error) => return Ok(None),
            Err(source) => return Err(during("make a user namespace")(source)),
        };
        let slots = range.slots;
        let (namespaces, groups) = (Namespaces::OfRoot(namespace), limits::discover());
        let newcomers = Newcomers::let_in(&groups, range.first)
            .map_err(during("let sandboxes into control groups"))?;
        let made = Self::with(ids, Some(range), slots, namespaces, groups, weak_limits)?;
        Ok(Some(Self { newcomers: Some(newcomers), ..made }))
    }

    /// Makes what a daemon with the caller's own ids needs; or why the host has not the user
    /// and pid namespaces that keep it from the caller's other processes. To be called by
    /// another user than root, before there are threads or children.
    ///
    /// # Errors
    /// The host does not keep limits.
    pub fn of_caller(
        ids: DaemonIds,
        weak_limits: WeakLimits,
    ) -> Result<Result<Self, NoNamespaces>, ZygoteError> {
        let during = |step| move |source| ZygoteError::Parent { step, source };
        // One more for root of their user namespace.
        let range = IdRange::reserve(FIRST_ID, SANDBOXES_MAX + 1).map_err(during(RESERVE_IDS))?;
        let made = Begun::new(ids, range.as_ref()).and_then(|begun| {
            let groups = limits::discover();
            let root = match groups.places().iter().any(|place| place.version == Version::V1) {
                true => InnerRoot::Own,
                false => InnerRoot::Subordinate,
            };
            Ok((begun.finish(root)?, groups))
        });
        let (namespaces, groups) = match made {
            Ok((namespaces, groups)) => (Box::new(namespaces), groups),
            Err(error) if forbids_namespaces(&error) => return Ok(Err(NoNamespaces(error))),
            Err(source) => return Err(during("make its namespaces")(source)),
        };
        let slots = namespaces.slots();
        let namespaces = Namespaces::OfCaller(namespaces);
        Self::with(ids, range, slots, namespaces, groups, weak_limits).map(Ok)
    }

    fn with(
        ids: DaemonIds,
        range: Option<IdRange>,
        slots: u32,
        namespaces: Namespaces,
        groups: Arc<Hierarchy>,
        weak_limits: WeakLimits,
    ) -> Result<Self, ZygoteError> {
        if weak_limits == WeakLimits::Refuse {
            refuse_weak_limits(groups.missing())?;
        }
        Ok(Self {
            ids,
            range,
            slots,
            namespaces,
            groups,
            newcomers: None,
            made: HashMap::new(),
            store: DescriptorStore::new(KEPT_MAX, kept_descriptors_max()),
            bound: 0,
            has_asked: false,
            is_serving: false,
            has_left: false,
            life: 0,
            groups_max: GROUPS_MAX,
            children_max: CHILDREN_MAX,
            fetcher: None,
            fetchers: Vec::new(),
            versions: BTreeMap::from([(0, VERSION)]),
            helpers: None,
        })
    }

    /// Starts the daemon: the command that `command` makes, which goes on as a child of the
    /// calling thread, in the namespaces of the daemon if it has the caller's ids.
    ///
    /// # Errors
    /// The host's.
    pub fn spawn_daemon(&mut self, command: impl Fn() -> io::Result<Command>) -> io::Result<Pid> {
        match &mut self.namespaces {
            Namespaces::OfRoot(_) => spawn(command_with_nothing(&mut command()?)),
            Namespaces::OfCaller(namespaces) => {
                let mut first = command()?;
                match namespaces.spawn(&mut first) {
                    // Process 1 of their pid namespace ends, or has ended (pid_namespaces(7)).
                    // Or the process between was killed, and nobody knows what it has made.
                    Err(error)
                        if error.raw_os_error() == Some(libc::ENOMEM)
                            || error.kind() == io::ErrorKind::UnexpectedEof =>
                    {
                        drop(first);
                        namespaces.renew()?;
                        namespaces.spawn(&mut command()?)
                    }
                    spawned => spawned,
                }
            }
        }
    }

    /// Whether the calling thread has children that end with a daemon that has ended: zygote
    /// parents that are not kept for the next, and launchers.
    pub fn has_ending_children(&self) -> bool {
        let staying = self.staying_children();
        children().into_iter().any(|child| !staying.contains(&child))
    }

    /// Children that do not end with their daemon: the zygote parents that are kept for the
    /// next one, and process 1 of its pid namespace.
    fn staying_children(&self) -> HashSet<u32> {
        let mut staying = self.store.parent_pids();
        if let Namespaces::OfCaller(namespaces) = &self.namespaces {
            staying.insert(namespaces.init_pid());
        }
        staying
    }

    /// What the daemon is told at its start.
    pub fn grant(&self) -> Grant {
        Grant {
            ids: ids_of_sandboxes(self.slots),
            life: self.life,
            places: self.groups.places().to_vec(),
            missing: self.groups.missing().to_vec(),
        }
    }

    /// Serves one request, which must be there. Leaves children behind that the caller
    /// reaps. Never waits for the daemon if `socket` does not block. False: the daemon has closed its end, or
    /// has sent something that is no request.
    pub fn serve(&mut self, socket: &OwnedFd) -> bool {
        let mut descriptors = Vec::new();
        let received = receive_request(socket, &mut descriptors);
        // They may be closed right now.
        descriptors.iter().for_each(do_not_linger);
        let Ok(Some((request, note))) = received else { return false };
        self.has_asked = true;
        let done = match request.kind {
            REQUEST_PARENT => self.start_parent(descriptors).map(|()| Vec::new()),
            REQUEST_STATE_HELPER => {
                self.start_state_helper(descriptors, request.number).map(|()| Vec::new())
            }
            REQUEST_RESOLVER => self.start_resolver(descriptors).map(|()| Vec::new()),
            REQUEST_FETCHER => self.start_fetcher(descriptors).map(|()| Vec::new()),
            REQUEST_GROUP => return self.answer_group(socket, request.number),
            REQUEST_BIND => self.bind(&request).map(|socket| vec![socket]),
            REQUEST_KEEP => {
                self.store.keep(&request, self.life, note, descriptors).map(|()| Vec::new())
            }
            REQUEST_LEAVE => {
                self.has_left = true;
                Ok(Vec::new())
            }
            REQUEST_SERVING => {
                self.is_serving = true;
                return true;
            }
            REQUEST_NEXT_KEPT => {
                return send_kept(socket, self.kept_after(request.number)).is_ok();
            }
            REQUEST_FORGET => {
                self.store.forget(request.number);
                return true;
            }
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
        send(socket, &Answer::new(errno), &attached).is_ok()
    }

    /// Heeds what a daemon that has ended has said before of what is kept for the next one, which would
    /// get it as it is no more. Nothing is made for it, and nobody reads an answer. `socket` does not block
    /// afterwards.
    pub fn serve_last(&mut self, socket: &OwnedFd) {
        if rustix::io::ioctl_fionbio(socket, true).is_err() {
            return;
        }
        for _ in 0..LAST_MAX {
            let mut descriptors = Vec::new();
            let received = receive_request(socket, &mut descriptors);
            descriptors.iter().for_each(do_not_linger);
            let Ok(Some((request, note))) = received else { return };
            self.has_asked = true;
            match request.kind {
                REQUEST_KEEP => {
                    // It is refused as it would have been in time.
                    let _ = self.store.keep(&request, self.life, note, descriptors);
                }
                REQUEST_FORGET => self.store.forget(request.number),
                REQUEST_LEAVE => self.has_left = true,
                _ => {}
            }
        }
    }

    /// Makes control groups, and sends their name and entrances.
    fn answer_group(&mut self, socket: &OwnedFd, number: u64) -> bool {
        match self.make_group(number) {
            Ok((group, entrances)) => {
                let entrances: Vec<_> = entrances.iter().map(AsFd::as_fd).collect();
                send(socket, &Answer { group, ..Answer::new(0) }, &entrances).is_ok()
            }
            Err(error) => {
                let errno = error.raw_os_error().unwrap_or(libc::EIO);
                send(socket, &Answer::new(errno), &[]).is_ok()
            }
        }
    }

    /// What is kept under the first key behind `key`, with the name of its control groups.
    fn kept_after(&self, key: u64) -> Option<(u64, &Kept, GroupName)> {
        let (key, kept) = self.store.next_after(key)?;
        let made = self.made.get(&kept.group.number);
        Some((key, kept, made.map_or(kept.group, Group::name)))
    }

    /// Lets go of what a daemon that has ended had kept for the next.
    pub fn forget_kept(&mut self) {
        self.store.forget_all();
        self.made.clear();
    }

    /// How many things are kept for the next daemon: sandboxes, zygote parents, connections.
    pub fn kept(&self) -> usize {
        self.store.len()
    }

    /// Whether the daemon has asked for anything. One that has not, such as one of another version,
    /// has not begun.
    pub fn has_asked(&self) -> bool {
        self.has_asked
    }

    /// Whether the daemon, which this monitor has started, has said that it serves its clients.
    pub fn is_serving(&self) -> bool {
        self.is_serving
    }

    /// Whether the daemon has said that it ends in order, and leaves what is kept to the next.
    pub fn has_left(&self) -> bool {
        self.has_left
    }

    /// Removes what was made for a daemon that has ended, but for what is kept for the next.
    pub fn forget_daemon(&mut self) {
        let kept = self.store.groups();
        self.made.retain(|number, _| kept.contains(number));
        self.bound = 0;
        (self.has_asked, self.is_serving, self.has_left) = (false, false, false);
        self.life += 1;
        self.helpers = None;
        let kept = self.store.lives();
        self.versions.retain(|life, _| kept.contains(life));
        self.versions.insert(self.life, VERSION);
    }

    /// The program from which helpers of the daemon are started.
    fn program(&self) -> PathBuf {
        match &self.helpers {
            Some(helpers) => path_of(helpers.as_fd()).into(),
            None => sys::OWN_PROGRAM.into(),
        }
    }

    /// Starts a zygote parent in the daemon's user namespace; it is a child of the
    /// calling thread.
    fn start_parent(&self, descriptors: Vec<OwnedFd>) -> io::Result<()> {
        let [control, kernel] = <[OwnedFd; 2]>::try_from(descriptors).map_err(|_| Errno::INVAL)?;
        let mut launcher = Command::new(self.program());
        launcher
            .args([PARENT_ARGUMENT, Join::AsRoot.argument()])
            .env_clear()
            .current_dir("/")
            .stdin(Stdio::from(control))
            .stdout(Stdio::from(kernel));
        if self.newcomers.is_some() {
            enter_groups(&mut launcher, Newcomers::origins(&self.groups)?);
        }
        self.launch(launcher)
    }

    /// Starts a state helper or a rewinder, which has rights in the daemon's user namespace only.
    fn start_state_helper(&self, descriptors: Vec<OwnedFd>, number: u64) -> io::Result<()> {
        let [socket, pid_namespace] =
            <[OwnedFd; 2]>::try_from(descriptors).map_err(|_| Errno::INVAL)?;
        let task = Task::from_number((number >> 32) as u32).ok_or(Errno::INVAL)?;
        let (program, id) = (self.program(), number as u32);
        self.launch(launcher(&program, socket, pid_namespace, id, Join::AsRoot, task))
    }

    /// Starts a resolver process, with the id that no sandbox has. It gives up its rights as
    /// soon as it has a root directory of its own, and does not wait for the daemon before.
    fn start_resolver(&self, descriptors: Vec<OwnedFd>) -> io::Result<()> {
        let [socket] = <[OwnedFd; 1]>::try_from(descriptors).map_err(|_| Errno::INVAL)?;
        let namespaces = resolver::Namespaces::Joined;
        self.launch(resolver::launcher(&self.program(), socket, self.resolver_id(), namespaces))
    }

    /// Says how fetchers are started. Until then, none are.
    pub fn fetch_with(&mut self, fetcher: FetcherCommand) {
        self.fetcher = Some(fetcher);
    }

    /// Starts a fetcher. It becomes what the daemon is (the daemon's user, in a root directory of
    /// its own) before it reads what the daemon has to say.
    fn start_fetcher(&mut self, descriptors: Vec<OwnedFd>) -> io::Result<()> {
        let [socket] = <[OwnedFd; 1]>::try_from(descriptors).map_err(|_| Errno::INVAL)?;
        let fetcher = self.fetcher.as_ref().ok_or(Errno::NOSYS)?;
        let mut command = fetcher.by(&self.program(), socket);
        self.check_children()?;
        let present = children();
        self.fetchers.retain(|fetcher| present.contains(fetcher));
        if self.fetchers.len() >= FETCHERS_MAX {
            return Err(Errno::AGAIN.into());
        }
        let pid = match &self.namespaces {
            Namespaces::OfRoot(_) => spawn(command_with_nothing(&mut command))?,
            Namespaces::OfCaller(namespaces) => namespaces.spawn(&mut command)?,
        };
        self.fetchers.push(pid.as_raw_nonzero().get().cast_unsigned());
        Ok(())
    }

    /// The id of resolver processes in the daemon's user namespace: its last one. No sandbox
    /// has it, unless it is the only one.
    fn resolver_id(&self) -> u32 {
        self.slots
    }

    /// Starts a launcher, which becomes root of the daemon's user namespace, and nobody
    /// outside ([`Join::AsRoot`]). It ends as soon as it has forked what is wanted; what went
    /// wrong it says on the socket that it was given. Nobody waits for it here: it waits for
    /// the daemon.
    fn launch(&self, mut launcher: Command) -> io::Result<()> {
        self.check_children()?;
        launcher.stderr(self.namespaces.of_sandboxes().try_clone_to_owned()?);
        // The caller of this library reaps all children.
        match &self.namespaces {
            Namespaces::OfRoot(_) => spawn(command_with_nothing(&mut launcher)).map(drop),
            Namespaces::OfCaller(namespaces) => namespaces.spawn(&mut launcher).map(drop),
        }
    }

    /// `EAGAIN` if this process has all the children that it may have.
    fn check_children(&self) -> io::Result<()> {
        // Of those that are kept there is a number of their own ([`DescriptorStore::keep`]).
        let kept = self.store.parent_pids();
        let others = children().into_iter().filter(|child| !kept.contains(child)).count();
        if others >= self.children_max { Err(Errno::AGAIN.into()) } else { Ok(()) }
    }

    fn make_group(&mut self, number: u64) -> io::Result<(GroupName, Vec<OwnedFd>)> {
        if self.made.len() >= self.groups_max {
            return Err(Errno::NOSPC.into());
        }
        if number >> 32 != u64::from(self.life) {
            return Err(Errno::INVAL.into());
        }
        if self.made.contains_key(&number) {
            return Err(Errno::EXIST.into());
        }
        let mut group = self.groups.create(number)?;
        group.give_settings_to(self.ids.uid, self.ids.gid)?;
        let entrances = match &self.newcomers {
            Some(newcomers) => group.entrances_of(newcomers)?,
            None => group.entrances()?,
        };
        let name = group.name();
        self.made.insert(number, group);
        Ok((name, entrances))
    }

    fn bind(&mut self, request: &Request) -> io::Result<OwnedFd> {
        let (address, transport) = request.address_to_bind();
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

/// Makes the namespaces by which a daemon of the caller's is split from its monitor, and ends
/// what is in them. To be called before there are threads or children.
///
/// # Errors
/// The host's: a daemon would not be split.
pub fn try_separation() -> io::Result<()> {
    let ids = |uid, gid| DaemonIds { uid, gid };
    if rustix::process::geteuid().is_root() {
        let daemon = ids(FIRST_ID - 1, FIRST_ID - 1);
        return UserNamespace::make(daemon, FIRST_ID, 1).map(drop);
    }
    let caller = ids(rustix::process::getuid().as_raw(), rustix::process::getgid().as_raw());
    Begun::new(caller, None)?.finish(InnerRoot::Own)?.end()
}

/// Descriptors that may be kept for the next daemon.
fn kept_descriptors_max() -> usize {
    let limit = rustix::process::getrlimit(rustix::process::Resource::Nofile);
    (limit.maximum.unwrap_or(u64::MAX) / KEPT_SHARE).try_into().unwrap_or(usize::MAX)
}

/// How many of the ids of a daemon are for sandboxes: all but that of resolver processes.
fn ids_of_sandboxes(ids: u32) -> u32 {
    if ids > 1 { ids - 1 } else { ids }
}

/// The process ids of the calling thread's children. None is missing, since none goes while
/// this thread, which reaps them, reads (proc_pid_task_children(5)).
fn children() -> Vec<u32> {
    let text = std::fs::read_to_string("/proc/thread-self/children").unwrap_or_default();
    text.split_whitespace().filter_map(|child| child.parse().ok()).collect()
}

/// Has a command enter the groups into which these files lead.
fn enter_groups(command: &mut Command, entrances: Vec<OwnedFd>) {
    // SAFETY: between fork and exec nothing is called but the host.
    unsafe {
        command.pre_exec(move || {
            entrances.iter().try_for_each(|entrance| {
                rustix::io::write(entrance, b"0")?;
                Ok(())
            })
        });
    }
}

/// Lets a command inherit its standard streams and no more.
fn command_with_nothing(command: &mut Command) -> &mut Command {
    // SAFETY: between fork and exec nothing is called but the host.
    unsafe {
        command.pre_exec(|| {
            sys::reset_signals();
            sys::close_on_exec_from(3)
        })
    }
}

fn spawn(command: &mut Command) -> io::Result<Pid> {
    Ok(Pid::from_child(&command.spawn()?))
}

/// Whether the host has no user namespaces for anybody (user_namespaces(7)), which is more
/// than that one could not be made just now.
fn forbids_namespaces(error: &io::Error) -> bool {
    let errno = error.raw_os_error().map(Errno::from_raw_os_error);
    errno.is_some_and(|errno| {
        [Errno::NOSPC, Errno::USERS, Errno::PERM, Errno::ACCESS, Errno::INVAL, Errno::NOSYS]
            .contains(&errno)
    })
}

fn bind(address: SocketAddr, transport: Transport) -> io::Result<OwnedFd> {
    Ok(match transport {
        Transport::Tcp => TcpListener::bind(address)?.into(),
        Transport::Udp => UdpSocket::bind(address)?.into(),
    })
}

#[cfg(test)]
mod tests;
