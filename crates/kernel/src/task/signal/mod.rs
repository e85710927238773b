//! Signals (signal(7)): sets, actions, sending, and what is pending.

mod deliver;
pub mod frame;
mod job_control;
mod number;

use alloc::collections::VecDeque;

pub use deliver::{before_return, force, guest_fault};
pub use frame::sigreturn;
pub use job_control::*;
pub use number::*;

use super::Process;
use super::ids::Tid;
use super::process::RLIMIT_SIGPENDING;
use super::thread::{Thread, current};
use super::user_namespace::NO_ID;
use super::wait::WaitQueue;
use crate::errno::{Errno, Result};
use crate::platform::machine::ThreadState;
use crate::sync::KernelCell;
use crate::task::wait::Events;

/// `siginfo_t` (sigaction(2)).
#[derive(Clone, Copy, Debug, bytemuck::NoUninit)]
#[repr(C)]
pub struct SignalInfo {
    /// The signal.
    pub signal: Signal,
    /// `si_errno`.
    pub errno: i32,
    /// `si_code`.
    pub code: i32,
    /// Id of the process or thread whose number the payload begins with, until a receiver is known; 0 if
    /// there is none, and in guest memory.
    pub about: u32,
    /// What depends on the code: `si_pid` and `si_uid`, `si_addr`, `si_value`…
    pub payload: [u64; 14],
}

/// `SI_USER`: sent by kill(2).
pub const SI_USER: i32 = 0;
/// `SI_KERNEL`: sent by the kernel.
pub const SI_KERNEL: i32 = 0x80;
/// `SI_TKILL`: sent by tkill(2).
pub const SI_TKILL: i32 = -6;
/// `SI_TIMER`: sent by a POSIX timer.
pub const SI_TIMER: i32 = -2;
/// `SI_SIGIO`: about a file, without details.
pub const SI_SIGIO: i32 = -5;

impl SignalInfo {
    /// A signal without further information.
    pub fn new(signal: Signal, code: i32) -> Self {
        Self { signal, errno: 0, code, about: 0, payload: [0; 14] }
    }

    /// A signal sent by, or about, a process.
    pub fn from_process(signal: Signal, code: i32, process: &Process) -> Self {
        let mut info = Self::new(signal, code);
        let uid = process.credentials.borrow_mut().uid;
        info.payload[0] = (uid as u64) << 32;
        info.set_sender(process.pid.main_thread());
        info
    }

    /// Says that it was sent by, or is about, this process or thread.
    pub fn set_sender(&mut self, id: Tid) {
        self.about = id.number();
        self.set_number(id.number());
    }

    /// Says so by the number that the receiver has for it.
    pub fn set_number(&mut self, number: u32) {
        self.payload[0] = self.payload[0] >> 32 << 32 | u64::from(number);
    }

    /// The user that it was sent by, or is about.
    fn user(&self) -> u32 {
        (self.payload[0] >> 32) as u32
    }

    /// Says who that is by the id in the receiver's user namespace.
    fn set_user(&mut self, receiver: &Process, user: u32) {
        let id = receiver.credentials.borrow_mut().user_namespace.shown_user(user);
        self.payload[0] = self.payload[0] & u64::from(u32::MAX) | u64::from(id) << 32;
    }

    /// As a process gets it: ids are those of its PID and user namespaces.
    pub fn seen_by(mut self, receiver: &Process) -> Self {
        if self.about != 0 {
            self.set_user(receiver, self.user());
            self.set_number(receiver.pid_namespace.number_of(self.about));
            self.about = 0;
        }
        self
    }

    /// As a process gets it that another one has written it for: a sender whom it cannot see is 0, and the
    /// user has the id that the receiver knows.
    pub fn written_for(mut self, receiver: &Process) -> Self {
        if !receiver.knows_sender() {
            self.set_number(0);
        }
        let own = current().process.credentials.borrow_mut().user_namespace.clone();
        if own != receiver.credentials.borrow_mut().user_namespace {
            self.set_user(receiver, own.user(self.user()).unwrap_or(NO_ID));
        }
        self
    }

    /// A fault at an address.
    pub fn fault(signal: Signal, code: i32, address: u64) -> Self {
        let mut info = Self::new(signal, code);
        info.payload[0] = address;
        info
    }
}

/// A `siginfo_t` of the guest, with any number in place of a signal.
#[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
pub struct SignalRecord {
    number: u32,
    errno: i32,
    code: i32,
    pad: i32,
    payload: [u64; 14],
}

impl From<SignalInfo> for SignalRecord {
    fn from(info: SignalInfo) -> Self {
        let SignalInfo { signal, errno, code, about: _, payload } = info;
        Self { number: signal.number(), errno, code, pad: 0, payload }
    }
}

impl SignalRecord {
    /// Says nothing.
    pub const EMPTY: Self = Self { number: 0, errno: 0, code: 0, pad: 0, payload: [0; 14] };

    /// The number in place of a signal.
    pub fn number(&self) -> u32 {
        self.number
    }

    /// Whether a process may send it to itself only: it looks as if it came from the kernel or
    /// from kill(2).
    pub fn is_only_for_itself(&self) -> bool {
        self.code >= 0 || self.code == SI_TKILL
    }

    /// The same for a signal.
    pub fn with_signal(self, signal: Signal) -> SignalInfo {
        let Self { number: _, errno, code, pad: _, payload } = self;
        SignalInfo { signal, errno, code, about: 0, payload }
    }
}

/// What to do with a signal: `struct kernel_sigaction`.
#[derive(Clone, Copy, Debug, Default, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
pub struct Action {
    /// `SIG_DFL` 0, `SIG_IGN` 1, or the handler's address.
    pub handler: u64,
    /// `SA_*`.
    pub flags: u64,
    /// Where the handler returns to.
    pub restorer: u64,
    /// Signals blocked while the handler runs.
    pub mask: u64,
}

#[allow(missing_docs)]
impl Action {
    pub const DEFAULT: u64 = 0;
    pub const IGNORE: u64 = 1;
    pub const NOCLDSTOP: u64 = 1;
    pub const NOCLDWAIT: u64 = 2;
    pub const SIGINFO: u64 = 4;
    pub const RESTORER: u64 = 0x0400_0000;
    pub const ONSTACK: u64 = 0x0800_0000;
    pub const RESTART: u64 = 0x1000_0000;
    pub const NODEFER: u64 = 0x4000_0000;
    pub const RESETHAND: u64 = 0x8000_0000;
}

/// `stack_t` (sigaltstack(2)).
#[derive(Clone, Copy, Debug, Default, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
pub struct AlternateStack {
    /// First byte.
    pub base: u64,
    /// `SS_*`.
    pub flags: u32,
    /// Padding.
    pub pad: u32,
    /// Bytes.
    pub size: u64,
}

/// `SS_DISABLE`.
pub const SS_DISABLE: u32 = 2;
/// `SS_ONSTACK`.
pub const SS_ONSTACK: u32 = 1;
/// `SS_AUTODISARM`.
pub const SS_AUTODISARM: u32 = 1 << 31;

/// A thread's part of the signal state.
pub struct ThreadSignals {
    /// Blocked signals.
    pub mask: SignalSet,
    /// The mask to go back to after a call with a temporary one (ppoll, sigsuspend).
    pub saved_mask: Option<SignalSet>,
    /// Signals that the thread waits for in sigtimedwait(2): kept even if they
    /// would be ignored.
    pub awaited: SignalSet,
    /// Pending signals, oldest first.
    pub pending: VecDeque<SignalInfo>,
    /// Alternate signal stack.
    pub alternate_stack: AlternateStack,
    /// Deadline of an interrupted sleep, for restart_syscall(2).
    pub restart_deadline: Option<crate::time::Instant>,
}

impl Default for ThreadSignals {
    fn default() -> Self {
        Self {
            mask: 0,
            saved_mask: None,
            awaited: 0,
            pending: VecDeque::new(),
            alternate_stack: AlternateStack { flags: SS_DISABLE, ..Default::default() },
            restart_deadline: None,
        }
    }
}

/// A process' part of the signal state.
pub struct ProcessSignals {
    /// Actions by signal number minus 1.
    pub actions: [Action; SIGNAL_COUNT as usize],
    /// Signals for any thread of the process, oldest first.
    pub pending: VecDeque<SignalInfo>,
    /// Woken when a signal arrives (signalfd, sigwaitinfo).
    pub arrived: alloc::sync::Arc<WaitQueue>,
}

impl Default for ProcessSignals {
    fn default() -> Self {
        Self {
            actions: [Action::default(); SIGNAL_COUNT as usize],
            pending: VecDeque::new(),
            arrived: Default::default(),
        }
    }
}

impl ProcessSignals {
    /// execve(2): handlers go back to the default, ignored signals stay ignored.
    pub fn reset_for_exec(&mut self) {
        for action in &mut self.actions {
            let handler =
                if action.handler == Action::IGNORE { Action::IGNORE } else { Action::DEFAULT };
            *action = Action { handler, ..Action::default() };
        }
    }
}

impl ProcessSignals {
    /// What a child inherits: the actions, and where to wait: it may read from a signalfd that its
    /// parent has made.
    pub fn inherited(&self) -> Self {
        Self { actions: self.actions, arrived: self.arrived.clone(), ..Self::default() }
    }

    /// What is done with a signal.
    pub fn action(&mut self, signal: Signal) -> &mut Action {
        &mut self.actions[signal.index()]
    }

    /// `CLONE_CLEAR_SIGHAND`: handlers go back to the default, ignored signals
    /// stay ignored.
    pub fn reset_handlers(&mut self) {
        self.reset_for_exec();
    }
}

/// What happens with `SIG_DFL` (signal(7)).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DefaultAction {
    /// Ends the process.
    Terminate,
    /// Nothing.
    Ignore,
    /// Stops the process.
    Stop,
}

/// The default action of a signal.
pub fn default_action(signal: Signal) -> DefaultAction {
    match signal {
        SIGCHLD | SIGCONT | SIGURG | SIGWINCH => DefaultAction::Ignore,
        SIGSTOP | SIGTSTP | SIGTTIN | SIGTTOU => DefaultAction::Stop,
        _ => DefaultAction::Terminate,
    }
}

/// Whether an action lets a signal pass without effect (signal(7)).
pub fn is_ignored(action: &Action, signal: Signal) -> bool {
    action.handler == Action::IGNORE
        || action.handler == Action::DEFAULT && default_action(signal) == DefaultAction::Ignore
}

/// Whether a signal passes a process without effect: to init of a PID namespace, that is any signal
/// without a handler (pid_namespaces(7)). [`prepare`] lets only those be stopped that may.
fn is_ignored_by(process: &Process, action: &Action, signal: Signal) -> bool {
    let has_no_handler = action.handler == Action::DEFAULT && signal != SIGSTOP;
    is_ignored(action, signal) || has_no_handler && process.leads_pid_namespace()
}

/// How a signal is added to those that are pending.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Queueing {
    /// A standard signal that is pending already is not queued twice
    /// (signal(7), "Queueing and delivery semantics").
    Merged,
    /// The sender sees to it that the signal is pending once: POSIX timers.
    Always,
}

impl Queueing {
    /// Adds a signal. Of a real-time signal, those that are pending stand for what there is no room for.
    fn add(self, queue: &mut VecDeque<SignalInfo>, info: SignalInfo, limit: u64) {
        let is_full = queue.len() as u64 >= limit;
        let merges = self == Queueing::Merged && (!info.signal.is_real_time() || is_full);
        if merges && queue.iter().any(|pending| pending.signal == info.signal) {
            return;
        }
        queue.push_back(info);
    }
}

/// `RLIMIT_SIGPENDING` (getrlimit(2)).
fn queue_limit(process: &Process) -> u64 {
    process.limits.borrow_mut()[RLIMIT_SIGPENDING].current
}

/// `EAGAIN`: so many signals are queued already that a process may not have one more real-time signal
/// queued (`RLIMIT_SIGPENDING` of getrlimit(2)). Standard signals always find room, since each is pending
/// once.
pub fn check_room(process: &Process, thread: Option<&Thread>, signal: Signal) -> Result<()> {
    let limit = queue_limit(process);
    let queued = match thread {
        Some(thread) => thread.signals.borrow_mut().pending.len(),
        None => process.signals.borrow_mut().pending.len(),
    };
    if signal.is_real_time() && queued as u64 >= limit { Err(Errno::EAGAIN) } else { Ok(()) }
}

/// Sends a signal to a thread.
pub fn send_to_thread(thread: &Thread, info: SignalInfo) {
    deposit_for_thread(thread, info, Queueing::Merged);
}

/// Like [`send_to_thread`], even if the same signal is pending; whether it is
/// queued rather than ignored.
pub fn queue_to_thread(thread: &Thread, info: SignalInfo) -> bool {
    deposit_for_thread(thread, info, Queueing::Always)
}

fn deposit_for_thread(thread: &Thread, info: SignalInfo, queueing: Queueing) -> bool {
    let signal = info.signal;
    if prepare(&thread.process, &info) == Prepared::Done {
        return false;
    }
    let action = *thread.process.signals.borrow_mut().action(signal);
    let (blocked, awaited) = {
        let signals = thread.signals.borrow_mut();
        (signals.mask & bit(signal) != 0, signals.awaited & bit(signal) != 0)
    };
    let is_traced = thread.tracee.is_traced();
    if is_ignored_by(&thread.process, &action, signal) && !blocked && !awaited && !is_traced {
        return false;
    }
    let limit = queue_limit(&thread.process);
    let info = info.seen_by(&thread.process);
    queueing.add(&mut thread.signals.borrow_mut().pending, info, limit);
    thread.needs_attention();
    notify(thread);
    if !blocked {
        super::scheduler::interrupt(thread);
    }
    true
}

/// Sends a signal to a process: to whichever of its threads does not block it.
pub fn send_to_process(process: &Process, info: SignalInfo) {
    deposit_for_process(process, info, Queueing::Merged);
}

/// Like [`send_to_process`], even if the same signal is pending; whether it is
/// queued rather than ignored.
pub fn queue_to_process(process: &Process, info: SignalInfo) -> bool {
    deposit_for_process(process, info, Queueing::Always)
}

fn deposit_for_process(process: &Process, info: SignalInfo, queueing: Queueing) -> bool {
    let signal = info.signal;
    if process.is_zombie() || prepare(process, &info) == Prepared::Done {
        return false;
    }
    let threads = process.threads.borrow_mut().clone();
    // The main thread first, as Linux does.
    let willing = threads.iter().find(|thread| thread.signals.borrow_mut().mask & bit(signal) == 0);
    let action = *process.signals.borrow_mut().action(signal);
    let awaited =
        threads.iter().any(|thread| thread.signals.borrow_mut().awaited & bit(signal) != 0);
    let is_traced = willing.is_some_and(|thread| thread.tracee.is_traced());
    if is_ignored_by(process, &action, signal) && willing.is_some() && !awaited && !is_traced {
        return false;
    }
    let limit = queue_limit(process);
    let info = info.seen_by(process);
    queueing.add(&mut process.signals.borrow_mut().pending, info, limit);
    for thread in &threads {
        thread.needs_attention();
    }
    if let Some(thread) = threads.first() {
        notify(thread);
    }
    if let Some(thread) = willing {
        super::scheduler::interrupt(thread);
    }
    true
}

/// Has signals of a process taken by threads that do not block them, after the thread
/// that was to take them has ended or blocked them.
pub fn pass_on(process: &Process) {
    let pending = process.signals.borrow_mut().pending.clone();
    if pending.is_empty() {
        return;
    }
    let threads = process.threads.borrow_mut().clone();
    for info in pending {
        let blocks = |thread: &Thread| thread.signals.borrow_mut().mask & bit(info.signal) != 0;
        if let Some(thread) = threads.iter().find(|thread| !blocks(thread)) {
            thread.needs_attention();
            super::scheduler::interrupt(thread);
        }
    }
}

fn notify(thread: &Thread) {
    let arrived = thread.process.signals.borrow_mut().arrived.clone();
    arrived.wake_all(Events::IN);
}

/// Sends `SIGPIPE` to the running thread (write(2), EPIPE).
pub fn send_sigpipe() {
    send_to_thread(&current(), SignalInfo::new(SIGPIPE, SI_KERNEL));
}

/// Whether a signal is pending that the thread does not block.
pub fn is_pending(thread: &Thread) -> bool {
    if !thread.context.is_attention_needed() {
        return false;
    }
    let mask = thread.signals.borrow_mut().mask;
    thread.is_dying() || pending_set(thread) & !mask != 0 || thread.tracee.trap_is_due()
}

/// All pending signals, of the thread and of its process.
pub fn pending_set(thread: &Thread) -> SignalSet {
    let of_thread = set_of(&thread.signals.borrow_mut().pending);
    of_thread | set_of(&thread.process.signals.borrow_mut().pending)
}

/// The signals in a queue.
pub fn set_of(queue: &VecDeque<SignalInfo>) -> SignalSet {
    queue.iter().fold(0, |set, info| set | bit(info.signal))
}

/// Takes the next pending signal out of `wanted`: the thread's own before those
/// of the process, synchronous ones first, then by number (signal(7)).
pub fn take_pending(thread: &Thread, wanted: SignalSet) -> Option<SignalInfo> {
    loop {
        let own = take_next(&mut thread.signals.borrow_mut().pending, wanted);
        let taken =
            own.or_else(|| take_next(&mut thread.process.signals.borrow_mut().pending, wanted));
        let mut info = taken?;
        if info.code != SI_TIMER || crate::task::timers::posix::signal_taken(thread, &mut info) {
            return Some(info);
        }
    }
}

/// Signals that the thread itself causes.
const SYNCHRONOUS: SignalSet =
    bit(SIGSEGV) | bit(SIGBUS) | bit(SIGILL) | bit(SIGTRAP) | bit(SIGFPE) | bit(SIGSYS);

fn take_next(queue: &mut VecDeque<SignalInfo>, wanted: SignalSet) -> Option<SignalInfo> {
    let candidates = set_of(queue) & wanted;
    let first = if candidates & SYNCHRONOUS != 0 { candidates & SYNCHRONOUS } else { candidates };
    let signal = Signal::from_number(first.trailing_zeros() + 1)?;
    let at = queue.iter().position(|info| info.signal == signal)?;
    queue.remove(at)
}

/// Replaces the signal mask until the running system call returns to the
/// guest: a signal that ends the call is handled under the new mask, then the
/// old one is back (ppoll(2), sigsuspend(2)).
pub fn set_temporary_mask(mask: SignalSet) {
    let thread = current();
    let mut signals = thread.signals.borrow_mut();
    let old = signals.mask;
    signals.saved_mask.get_or_insert(old);
    signals.mask = mask & !UNBLOCKABLE;
    drop(signals);
    thread.needs_attention();
    pass_on(&thread.process);
}

/// Takes a temporary mask back before the call ends, since no signal has ended it.
pub fn restore_mask() {
    let thread = current();
    let mut signals = thread.signals.borrow_mut();
    if let Some(saved) = signals.saved_mask.take() {
        signals.mask = saved;
    }
    drop(signals);
    pass_on(&thread.process);
}

/// A lock around the process' signal state, for its field in `Process`.
pub type SharedSignals = KernelCell<ProcessSignals>;
