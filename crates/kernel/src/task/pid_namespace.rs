//! PID namespaces (pid_namespaces(7)).
//!
//! Ids ([`super::ids`]) are numbers of the whole sandbox: those of the initial namespace. Any other
//! namespace has numbers of its own for its threads and for those of the namespaces below it. Ids
//! become these numbers where the guest sees them.

use alloc::collections::VecDeque;
use alloc::sync::Arc;
use alloc::vec::Vec;
use core::sync::atomic::Ordering::Relaxed;

use super::ids::{Pid, Tid};
use super::namespace::{Common, Kind};
use super::process::{FIRST_PID, FIRST_REUSED_ID, PID_MAX, Process};
use super::signal::{self, SI_KERNEL, SI_SIGIO, SI_TIMER, SIGKILL, SignalInfo};
use super::thread::{Thread, running};
use super::user_namespace::UserNamespace;
use super::wait::{Events, WaitQueue};
use super::{exit, ptrace, scheduler};
use crate::errno::{Errno, Result};
use crate::state::kernel;
use crate::sync::KernelCell;

/// How deep namespaces are nested at most (`MAX_PID_NS_LEVEL` in include/linux/pid_namespace.h).
const LEVEL_MAX: u32 = 32;

/// Of how many processes that are gone a namespace knows the number.
const GONE_MAX: usize = 256;

/// The id that no process has.
const NOBODY: Pid = Pid::new(0);

/// A PID namespace; the default is the initial one.
#[derive(Clone, Default)]
pub struct PidNamespace(Option<Arc<Numbers>>);

/// A namespace that is not the initial one.
struct Numbers {
    common: Common,
    parent: PidNamespace,
    /// How many are above it.
    level: u32,
    init: KernelCell<Init>,
    table: KernelCell<Table>,
    /// Woken when one of its processes is gone.
    process_gone: WaitQueue,
}

/// What has the number 1 in a namespace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Init {
    /// The first process that is made there.
    Awaited,
    /// This process.
    Living(Pid),
    /// It ends or has ended: there are no new processes any more.
    Ended(Pid),
}

/// Numbers of ids. New ones are nearly always the largest, so both lists mostly grow at the end.
#[derive(Default)]
struct Table {
    /// Numbers and their ids, in order of numbers.
    ids: Pairs,
    /// Ids and their numbers, in order of ids.
    numbers: Pairs,
    last: u32,
    gone: Gone,
}

/// Ids of processes that are gone, and their numbers: the last few, the newest first. What they have left behind
/// tells who it was: credentials on a socket, the last one who changed a semaphore.
#[derive(Default)]
struct Gone {
    ids: VecDeque<(u32, u32)>,
    /// When this was so ([`Tasks::wraps`](super::process::Tasks)), the ids were not handed out anew.
    wraps: u32,
}

impl Gone {
    /// Forgets all if some may have been handed out anew.
    fn refresh(&mut self) {
        let wraps = kernel().tasks.wraps.load(Relaxed);
        if core::mem::replace(&mut self.wraps, wraps) != wraps {
            self.ids.clear();
        }
    }

    fn add(&mut self, id: u32, number: u32) {
        self.refresh();
        // A larger one is from before the ids began anew, and will be handed out without that.
        if id <= kernel().tasks.last_id.load(Relaxed) {
            self.ids.truncate(GONE_MAX - 1);
            self.ids.push_front((id, number));
        }
    }

    fn get(&mut self, id: u32) -> Option<u32> {
        self.refresh();
        self.ids.iter().find(|&&(gone, _)| gone == id).map(|&(_, number)| number)
    }
}

/// Keys with values, in order of keys.
#[derive(Default)]
struct Pairs(Vec<(u32, u32)>);

impl Pairs {
    fn place(&self, key: u32) -> core::result::Result<usize, usize> {
        self.0.binary_search_by_key(&key, |&(known, _)| known)
    }

    fn get(&self, key: u32) -> Option<u32> {
        self.place(key).ok().map(|at| self.0[at].1)
    }

    fn insert(&mut self, key: u32, value: u32) {
        if let Err(at) = self.place(key) {
            self.0.insert(at, (key, value));
        }
    }

    fn remove(&mut self, key: u32) -> Option<u32> {
        self.place(key).ok().map(|at| self.0.remove(at).1)
    }
}

impl Table {
    /// Gives an id a number. As in the sandbox, numbers are used again as late as possible.
    fn add(&mut self, id: u32) -> u32 {
        self.remove(id);
        loop {
            self.last = if self.last + 1 >= PID_MAX { FIRST_REUSED_ID } else { self.last + 1 };
            if self.ids.get(self.last).is_none() {
                break;
            }
        }
        self.ids.insert(self.last, id);
        self.numbers.insert(id, self.last);
        self.last
    }

    #[inline(never)]
    fn remove(&mut self, id: u32) -> Option<u32> {
        let number = self.numbers.remove(id)?;
        self.ids.remove(number);
        Some(number)
    }
}

impl Numbers {
    // Out of line: ids become numbers in many places, and hardly ever here.
    #[inline(never)]
    fn number_of(&self, id: u32) -> u32 {
        let mut table = self.table.borrow_mut();
        let number = table.numbers.get(id);
        number.or_else(|| table.gone.get(id)).unwrap_or(0)
    }

    #[inline(never)]
    fn id_of(&self, number: u32) -> u32 {
        self.table.borrow_mut().ids.get(number).unwrap_or(0)
    }
}

impl PidNamespace {
    /// Whether it is the one that the sandbox begins with.
    #[inline]
    pub fn is_initial(&self) -> bool {
        self.0.is_none()
    }

    /// In which user namespace capabilities over it count.
    pub fn owner(&self) -> UserNamespace {
        self.0.as_ref().map_or(UserNamespace::INITIAL, |it| it.common.owner().clone())
    }

    /// How many are above it.
    pub fn level(&self) -> u32 {
        self.0.as_ref().map_or(0, |it| it.level)
    }

    /// The one above it; the initial one has none.
    pub fn parent(&self) -> Option<&Self> {
        self.0.as_ref().map(|it| &it.parent)
    }

    /// Its inode number in `/proc/PID/ns`.
    pub fn ino(&self) -> u64 {
        self.0.as_ref().map_or(Kind::Pid.first_ino(), |it| it.common.ino())
    }

    /// Whether both are the same.
    pub fn is(&self, other: &Self) -> bool {
        match (&self.0, &other.0) {
            (None, None) => true,
            (Some(own), Some(other)) => Arc::ptr_eq(own, other),
            _ => false,
        }
    }

    /// It, and those above it, from the lowest one on.
    fn lineage(&self) -> impl Iterator<Item = &Self> {
        core::iter::successors(Some(self), |it| it.parent())
    }

    /// Whether another namespace is this one or below it.
    pub fn includes(&self, other: &Self) -> bool {
        let mut other = other;
        while other.level() > self.level() {
            let Some(parent) = other.parent() else { break };
            other = parent;
        }
        other.is(self)
    }

    /// The number of an id; 0 if it has none here.
    #[inline]
    pub fn number_of(&self, id: u32) -> u32 {
        match &self.0 {
            None => id,
            Some(own) => own.number_of(id),
        }
    }

    /// The id with a number; 0, which is nobody's, if there is none.
    #[inline]
    pub fn id_of(&self, number: u32) -> u32 {
        match &self.0 {
            None => number,
            Some(own) => own.id_of(number),
        }
    }

    /// The numbers of an id in namespaces from this one down to `lowest`, as `/proc/PID/status` shows
    /// them; 0 if that is not below this one.
    pub fn numbers_down_to(&self, lowest: &Self, id: u32) -> Vec<u32> {
        if !self.includes(lowest) {
            return Vec::from([0]);
        }
        let mut numbers = Vec::new();
        for namespace in lowest.lineage().take_while(|it| it.level() >= self.level()) {
            numbers.insert(0, namespace.number_of(id));
        }
        numbers
    }

    /// The number that was given last.
    pub fn last_number(&self) -> u32 {
        let last_id = || kernel().tasks.last_id.load(Relaxed);
        self.0.as_ref().map_or_else(last_id, |own| own.table.borrow_mut().last)
    }

    /// The processes here and below, in order of their numbers.
    pub fn processes_by_number(&self) -> Vec<Arc<Process>> {
        let Some(own) = &self.0 else { return kernel().tasks.all_processes() };
        let mut processes = Vec::new();
        for &(_, id) in &own.table.borrow_mut().ids.0 {
            processes.extend(kernel().tasks.process(Pid::new(id)));
        }
        processes
    }

    /// A new namespace below this one, without processes, that a user namespace owns. `ENOSPC`: there are too many, or it would lie
    /// too deep.
    pub fn new_below(&self, owner: &UserNamespace) -> Result<Self> {
        let level = self.level() + 1;
        if level > LEVEL_MAX {
            return Err(Errno::ENOSPC);
        }
        Ok(Self(Some(Arc::new(Numbers {
            common: Common::new(Kind::Pid, owner)?,
            parent: self.clone(),
            level,
            init: KernelCell::new(Init::Awaited),
            table: KernelCell::default(),
            process_gone: WaitQueue::new(),
        }))))
    }

    /// Gives a thread that is being made a number here and in the namespaces above. `ENOMEM`: init has
    /// ended.
    fn admit(&self, tid: Tid) -> Result<()> {
        if self.is_closed() {
            return Err(Errno::ENOMEM);
        }
        for own in self.lineage().filter_map(|it| it.0.as_ref()) {
            own.table.borrow_mut().add(tid.number());
            if own.init.get() == Init::Awaited {
                own.init.set(Init::Living(tid.process()));
            }
        }
        Ok(())
    }

    /// Takes the numbers of a thread back that is not made after all. A namespace whose init it would have
    /// been stays without one (`free_pid` in kernel/pid.c).
    fn refuse(&self, tid: Tid) {
        self.dismiss(tid);
        for namespace in self.lineage().filter(|it| it.init() == Some(tid.process())) {
            namespace.end(NOBODY);
        }
    }

    /// Takes the numbers of a thread back.
    pub fn dismiss(&self, tid: Tid) {
        for own in self.lineage().filter_map(|it| it.0.as_ref()) {
            own.table.borrow_mut().remove(tid.number());
        }
    }

    /// Takes the numbers of an id back that no process, thread, group or session has any more.
    fn dismiss_unused(&self, tid: Tid) {
        if !self.is_initial() && !kernel().tasks.is_in_use(tid.number()) {
            self.bury(tid);
        }
    }

    /// Takes the numbers of a process back that is gone. What it has left behind still tells them.
    fn bury(&self, tid: Tid) {
        for own in self.lineage().filter_map(|it| it.0.as_ref()) {
            let mut table = own.table.borrow_mut();
            if let Some(number) = table.remove(tid.number()) {
                table.gone.add(tid.number(), number);
            }
        }
    }

    /// A process is gone: takes the numbers back that nobody uses any more.
    pub(super) fn process_is_gone(&self, process: &Process) {
        let family = process.family.get();
        self.dismiss_unused(process.pid.main_thread());
        has_left(process, family.group.led_by());
        has_left(process, family.session.led_by());
        for own in self.lineage().filter_map(|it| it.0.as_ref()) {
            own.process_gone.wake_all(Events::IN);
        }
    }

    /// The process with the number 1. `None`: there is none yet, or none any more.
    pub fn init(&self) -> Option<Pid> {
        match &self.0 {
            None => Some(FIRST_PID),
            Some(own) => match own.init.get() {
                Init::Living(pid) => Some(pid),
                Init::Awaited | Init::Ended(_) => None,
            },
        }
    }

    /// Who gets children that have lost their parent: init, as long as it is there.
    pub(super) fn reaper(&self) -> Pid {
        let init = self.0.as_ref().map(|own| own.init.get());
        match init {
            Some(Init::Living(pid) | Init::Ended(pid)) if Self::is_there(pid) => pid,
            _ => FIRST_PID,
        }
    }

    fn is_there(pid: Pid) -> bool {
        kernel().tasks.process(pid).is_some_and(|process| !process.is_zombie())
    }

    /// Whether it has or had an init.
    pub fn has_begun(&self) -> bool {
        self.0.as_ref().is_none_or(|own| own.init.get() != Init::Awaited)
    }

    /// Whether its init ends or has ended.
    pub fn has_ended(&self) -> bool {
        self.0.as_ref().is_some_and(|own| matches!(own.init.get(), Init::Ended(_)))
    }

    /// Whether it gets no new processes: its init ends or has ended, or that of one above.
    fn is_closed(&self) -> bool {
        self.lineage().any(|it| it.has_ended())
    }

    /// The processes here and below.
    fn processes(&self) -> Vec<Arc<Process>> {
        kernel().tasks.processes_where(|process| self.includes(&process.pid_namespace))
    }

    /// Ends all processes but init, which ends.
    fn end(&self, init: Pid) {
        if let Some(own) = &self.0 {
            own.init.set(Init::Ended(init));
        }
        for process in self.processes() {
            if process.pid == init {
                continue;
            }
            signal::send_to_process(&process, SignalInfo::new(SIGKILL, SI_KERNEL));
            let is_own = process.parent_pid() == Some(init);
            if is_own && process.is_zombie() && ptrace::awaited_tracer(&process).is_none() {
                exit::report_end_to_parent(&process);
            }
        }
    }
}

/// The numbers of a thread that is being made. Dropped, it takes them back.
pub struct Admission {
    namespace: PidNamespace,
    tid: Tid,
    is_final: bool,
}

impl Admission {
    /// Gives the thread numbers; `ENOMEM`.
    pub(super) fn new(namespace: &PidNamespace, tid: Tid) -> Result<Self> {
        namespace.admit(tid)?;
        Ok(Self { namespace: namespace.clone(), tid, is_final: false })
    }

    /// The thread is there, and keeps them.
    pub(super) fn confirm(&mut self) {
        self.is_final = true;
    }
}

impl Drop for Admission {
    fn drop(&mut self) {
        if !self.is_final {
            self.namespace.refuse(self.tid);
        }
    }
}

impl Process {
    /// Whether it is init of a PID namespace other than the initial one.
    #[inline]
    pub fn leads_pid_namespace(&self) -> bool {
        !self.pid_namespace.is_initial() && self.pid_namespace.init() == Some(self.pid)
    }

    /// Whether it is init of a PID namespace that ends: its children need nobody who waits for them.
    pub(super) fn ends_pid_namespace(&self) -> bool {
        let init = self.pid_namespace.0.as_ref().map(|own| own.init.get());
        init == Some(Init::Ended(self.pid))
    }

    /// A namespace below that of the process. `EINVAL`: its children are in another one already.
    pub(super) fn new_pid_namespace(&self, owner: &UserNamespace) -> Result<PidNamespace> {
        if !self.pid_namespace_for_children.borrow_mut().is(&self.pid_namespace) {
            return Err(Errno::EINVAL);
        }
        self.pid_namespace.new_below(owner)
    }

    /// Children are in a namespace, which is the own one or below it (unshare(2), setns(2)).
    pub fn enter_pid_namespace(&self, namespace: &PidNamespace) {
        let new = namespace.clone();
        let old = core::mem::replace(&mut *self.pid_namespace_for_children.borrow_mut(), new);
        drop(old);
    }

    /// Whether a process runs that this one cannot see, as seen by a receiver of its signals.
    fn is_out_of_sight(&self) -> bool {
        running().is_none_or(|by| self.pid_namespace.number_of(by.process.pid.number()) == 0)
    }

    /// Whether a signal that cannot be caught passes init of a PID namespace by: only those of the kernel
    /// and of processes outside get to it, and what a tracer is to see (`sig_task_ignored` in kernel/signal.c).
    pub(super) fn is_shielded_from(&self, info: &SignalInfo) -> bool {
        let has_sender = info.code <= 0 && info.code != SI_TIMER && info.code != SI_SIGIO;
        let is_from_outside = || has_sender && self.is_out_of_sight();
        let is_seen_by_tracer = || info.signal != SIGKILL && self.is_traced();
        self.leads_pid_namespace()
            && info.code != SI_KERNEL
            && !is_from_outside()
            && !is_seen_by_tracer()
    }

    fn is_traced(&self) -> bool {
        self.threads.borrow_mut().iter().any(|thread| thread.tracee.is_traced())
    }

    /// Whether the sender of a signal is known to this process by a number.
    pub fn knows_sender(&self) -> bool {
        self.pid_namespace.is_initial() || !self.is_out_of_sight()
    }
}

/// The running thread is the last one of a process. If that is a namespace's init, all processes there end
/// first (`zap_pid_ns_processes` in kernel/pid_namespace.c).
pub(super) fn await_end(process: &Process) {
    if !process.leads_pid_namespace() {
        return;
    }
    let namespace = process.pid_namespace.clone();
    namespace.end(process.pid);
    let Some(own) = &namespace.0 else { return };
    while namespace.processes().iter().any(|other| other.pid != process.pid) {
        scheduler::block_uninterruptibly(&own.process_gone);
    }
}

/// The last thread of a process has ended: nobody stays behind in a namespace without init.
pub(super) fn process_ends(process: &Process) {
    if process.leads_pid_namespace() {
        process.pid_namespace.end(process.pid);
    }
}

/// A new thread can be found. Its namespace may have ended meanwhile.
pub(super) fn thread_is_known(thread: &Thread) {
    if thread.process.pid_namespace.is_closed() {
        signal::send_to_process(&thread.process, SignalInfo::new(SIGKILL, SI_KERNEL));
    }
}

/// A process has left a group or session, perhaps as the last one of it: takes the numbers of its leader
/// back, which may have been in a namespace below.
pub fn has_left(process: &Process, leader: Pid) {
    let tasks = &kernel().tasks;
    let id = leader.number();
    if leader == process.pid || tasks.process(leader).is_some() || tasks.is_in_use(id) {
        return;
    }
    process.pid_namespace.bury(leader.main_thread());
    for other in tasks.processes_where(|other| {
        !other.pid_namespace.is_initial() && other.pid_namespace.number_of(id) != 0
    }) {
        other.pid_namespace.bury(leader.main_thread());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::task::current_process;
    use crate::task::namespace::NAMESPACES_MAX;
    use crate::testing::Sandbox;

    #[test]
    fn ids_have_numbers_of_their_own() {
        let _sandbox = Sandbox::new();
        let initial = PidNamespace::default();
        let outer = initial.new_below(&UserNamespace::INITIAL).unwrap();
        let inner = outer.new_below(&UserNamespace::INITIAL).unwrap();
        inner.admit(Tid::new(70)).unwrap();
        outer.admit(Tid::new(80)).unwrap();
        inner.admit(Tid::new(90)).unwrap();
        assert_eq!(initial.numbers_down_to(&inner, 90), [90, 3, 2]);
        assert_eq!(outer.numbers_down_to(&inner, 90), [3, 2]);
        let other = initial.new_below(&UserNamespace::INITIAL).unwrap();
        assert_eq!(other.numbers_down_to(&inner, 90), [0], "not below");
        assert_eq!(inner.last_number(), 2);
        assert_eq!([inner.id_of(1), inner.id_of(2), inner.id_of(3)], [70, 90, 0]);
        assert_eq!((inner.number_of(80), outer.number_of(80)), (0, 2));
        inner.dismiss(Tid::new(90));
        assert_eq!((inner.number_of(90), outer.id_of(3)), (0, 0));
        // The next number is a new one.
        inner.admit(Tid::new(91)).unwrap();
        assert_eq!(inner.number_of(91), 3);
        assert!(initial.includes(&inner) && outer.includes(&inner) && !inner.includes(&outer));
    }

    #[test]
    fn who_is_gone_has_a_number_until_ids_begin_anew() {
        let _sandbox = Sandbox::new();
        let tasks = &kernel().tasks;
        tasks.last_id.store(80, Relaxed);
        let namespace = PidNamespace::default().new_below(&UserNamespace::INITIAL).unwrap();
        for id in [70, 71, 90] {
            namespace.admit(Tid::new(id)).unwrap();
            namespace.bury(Tid::new(id));
        }
        assert_eq!([70, 71, 90].map(|id| namespace.number_of(id)), [1, 2, 0]);
        assert_eq!([1, 2, 3].map(|number| namespace.id_of(number)), [0; 3]);
        tasks.last_id.store(PID_MAX, Relaxed);
        assert_eq!(tasks.new_id().number(), FIRST_REUSED_ID);
        assert_eq!(namespace.number_of(70), 0);
    }

    #[test]
    fn numbers_begin_anew_at_the_end() {
        let mut table = Table { last: PID_MAX - 2, ..Table::default() };
        assert_eq!(table.add(5), PID_MAX - 1);
        assert_eq!(table.add(6), FIRST_REUSED_ID);
        assert_eq!(table.add(6), FIRST_REUSED_ID + 1);
    }

    #[test]
    fn the_first_process_is_init_and_nobody_comes_after_it() {
        let _sandbox = Sandbox::new();
        let namespace = PidNamespace::default().new_below(&UserNamespace::INITIAL).unwrap();
        namespace.admit(Tid::new(70)).unwrap();
        namespace.admit(Tid::new(71)).unwrap();
        namespace.refuse(Tid::new(70));
        assert_eq!((namespace.init(), namespace.number_of(71)), (None, 2));
        assert_eq!(namespace.admit(Tid::new(72)), Err(Errno::ENOMEM));
        let namespace = PidNamespace::default().new_below(&UserNamespace::INITIAL).unwrap();
        namespace.admit(Tid::new(71)).unwrap();
        assert_eq!((namespace.init(), namespace.number_of(71)), (Some(Pid::new(71)), 1));
        namespace.end(current_process().pid);
        assert_eq!(namespace.admit(Tid::new(72)), Err(Errno::ENOMEM));
        assert!(!namespace.new_below(&UserNamespace::INITIAL).unwrap().has_ended());
        assert_eq!(
            namespace.new_below(&UserNamespace::INITIAL).unwrap().admit(Tid::new(72)),
            Err(Errno::ENOMEM)
        );
    }

    #[test]
    fn depth_and_number_have_a_limit() {
        let _sandbox = Sandbox::new();
        let mut namespaces = Vec::from([PidNamespace::default()]);
        for level in 1..=LEVEL_MAX {
            let new = namespaces[level as usize - 1].new_below(&UserNamespace::INITIAL).unwrap();
            namespaces.push(new);
        }
        assert_eq!(
            namespaces[LEVEL_MAX as usize].new_below(&UserNamespace::INITIAL).err(),
            Some(Errno::ENOSPC)
        );
        while namespaces.len() <= NAMESPACES_MAX as usize {
            let new = namespaces[0].new_below(&UserNamespace::INITIAL).unwrap();
            namespaces.push(new);
        }
        assert_eq!(namespaces[0].new_below(&UserNamespace::INITIAL).err(), Some(Errno::ENOSPC));
        namespaces.pop();
        assert!(namespaces[0].new_below(&UserNamespace::INITIAL).is_ok());
    }
}
