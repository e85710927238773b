//! Job control: which session a terminal belongs to, which of its process
//! groups is in the foreground, and who is told by signal (credentials(7),
//! tcsetpgrp(3)).

use alloc::collections::BTreeSet;

use crate::errno::{Errno, Result};
use crate::state::kernel;
use crate::sync::KernelCell;
use crate::task::Capabilities;
use crate::task::ids::{Pgid, Pid, Sid};
use crate::task::pid_namespace::PidNamespace;
use crate::task::signal::{
    Action, SI_KERNEL, SIGCONT, SIGHUP, SIGTTIN, SIGTTOU, Signal, SignalInfo, bit, is_orphaned,
    send_to_group, send_to_process,
};
use crate::task::{Process, current_process};

/// A terminal's part of job control.
#[derive(Default)]
pub struct JobControl {
    /// The session whose controlling terminal it is.
    pub session: Option<Sid>,
    /// The process group in the foreground.
    pub foreground: Option<Pgid>,
    /// Processes of the session that have given it up (`TIOCNOTTY`).
    detached: BTreeSet<Pid>,
}

impl JobControl {
    /// The controlling terminal of a session, whose leader is in the foreground.
    pub fn of_session(session: Sid) -> Self {
        let foreground = Some(session.first_group());
        Self { session: Some(session), foreground, detached: BTreeSet::new() }
    }

    /// Whether it is the controlling terminal of a process.
    pub fn controls(&self, pid: Pid, session: Sid) -> bool {
        self.session == Some(session) && !self.detached.contains(&pid)
    }
}

/// Sends a signal of the kernel's to all processes of a group.
pub fn signal_process_group(group: Pgid, signal: Signal) {
    send_to_group(group, SignalInfo::new(signal, SI_KERNEL));
}

/// Sends a signal to the foreground process group.
pub fn signal_foreground(job: &KernelCell<JobControl>, signal: Signal) {
    let group = job.borrow_mut().foreground;
    if let Some(group) = group {
        signal_process_group(group, signal);
    }
}

/// Whether the running process is of the terminal's session and not in its
/// foreground.
fn is_background(job: &KernelCell<JobControl>) -> bool {
    let process = current_process();
    let job = job.borrow_mut();
    job.controls(process.pid, process.session())
        && job.foreground.is_some_and(|group| group != process.process_group())
}

/// Whether the running process would not notice a signal.
fn does_not_notice(signal: Signal) -> bool {
    let thread = crate::task::current();
    let blocked = thread.signals.borrow_mut().mask & bit(signal) != 0;
    blocked || thread.process.signals.borrow_mut().action(signal).handler == Action::IGNORE
}

/// What a background process hears when it reads from the terminal: `SIGTTIN`,
/// or `EIO` if it does not listen or nobody could continue it.
pub fn check_read(job: &KernelCell<JobControl>) -> Result<()> {
    if !is_background(job) {
        return Ok(());
    }
    if does_not_notice(SIGTTIN) || is_orphaned(current_process().process_group()) {
        return Err(Errno::EIO);
    }
    signal_process_group(current_process().process_group(), SIGTTIN);
    Err(Errno::ERESTARTSYS)
}

/// What a background process hears when it changes the terminal, or writes to
/// it with `TOSTOP`: `SIGTTOU`, unless it does not listen; `EIO` if nobody could continue it.
pub fn check_change(job: &KernelCell<JobControl>) -> Result<()> {
    if !is_background(job) || does_not_notice(SIGTTOU) {
        return Ok(());
    }
    if is_orphaned(current_process().process_group()) {
        return Err(Errno::EIO);
    }
    signal_process_group(current_process().process_group(), SIGTTOU);
    Err(Errno::ERESTARTSYS)
}

/// `EIO` unless the terminal is the running process' controlling one.
fn check_controlling(job: &KernelCell<JobControl>) -> Result<()> {
    let process = current_process();
    let controls = job.borrow_mut().controls(process.pid, process.session());
    if controls { Ok(()) } else { Err(Errno::ENOTTY) }
}

/// `TIOCGPGRP`.
pub fn foreground(job: &KernelCell<JobControl>) -> Result<u32> {
    check_controlling(job)?;
    Ok(foreground_for_caller(job))
}

/// Number of the process group in the foreground as the caller sees it, 0 for none.
pub fn foreground_for_caller(job: &KernelCell<JobControl>) -> u32 {
    job.borrow_mut().foreground.map_or(0, Pgid::for_caller)
}

/// Number of the process group in the foreground as a PID namespace sees it, 0 for none.
pub fn foreground_number(job: &KernelCell<JobControl>, namespace: &PidNamespace) -> u32 {
    job.borrow_mut().foreground.map_or(0, |group| group.number_in(namespace))
}

/// `TIOCSPGRP`.
pub fn set_foreground(job: &KernelCell<JobControl>, group: i32) -> Result<()> {
    check_controlling(job)?;
    // As Linux says it here.
    check_change(job).map_err(|error| if error == Errno::EIO { Errno::ENOTTY } else { error })?;
    let group = Pgid::from_caller(u32::try_from(group).map_err(|_| Errno::EINVAL)?);
    let own = current_process().session();
    let all = kernel().tasks.all_processes();
    let member = all.iter().find(|process| process.process_group() == group);
    let member = member.ok_or(Errno::ESRCH)?;
    if member.session() != own {
        return Err(Errno::EPERM);
    }
    job.borrow_mut().foreground = Some(group);
    Ok(())
}

/// `TIOCGSID`.
pub fn session(job: &KernelCell<JobControl>) -> Result<Sid> {
    check_controlling(job)?;
    job.borrow_mut().session.ok_or(Errno::ENOTTY)
}

/// Whether a terminal may be taken from the session that has it (`TIOCSCTTY`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Force {
    /// It may not.
    No,
    /// The superuser may.
    Steal,
}

/// `TIOCSCTTY`: makes the terminal the controlling one of the running
/// process' session, which it must lead and which must have none.
pub fn acquire(job: &KernelCell<JobControl>, force: Force) -> Result<()> {
    let process = current_process();
    let session = process.session();
    if job.borrow_mut().session == Some(session) && process.leads_session() {
        return Ok(());
    }
    let terminals = &kernel().fs.terminals;
    if !process.leads_session() || terminals.controlling(process.pid, session).is_some() {
        return Err(Errno::EPERM);
    }
    let taken = job.borrow_mut().session.is_some_and(|session| {
        // A session without processes is over.
        kernel().tasks.all_processes().iter().any(|process| process.session() == session)
    });
    let may_steal = process.credentials.borrow_mut().can(Capabilities::SYS_ADMIN);
    if taken && !(force == Force::Steal && may_steal) {
        return Err(Errno::EPERM);
    }
    *job.borrow_mut() = JobControl::of_session(session);
    job.borrow_mut().foreground = Some(process.process_group());
    Ok(())
}

/// What open(2) of a terminal without `O_NOCTTY` does.
pub fn acquire_if_free(job: &KernelCell<JobControl>) {
    let process = current_process();
    if process.leads_session() && job.borrow_mut().session.is_none() {
        // Whoever has one already keeps it: then this changes nothing.
        let _ = acquire(job, Force::No);
    }
}

/// `TIOCNOTTY`: the running process gives up the terminal; a session leader
/// gives it up for all, and the foreground hears `SIGHUP` and `SIGCONT`.
pub fn give_up(job: &KernelCell<JobControl>) -> Result<()> {
    check_controlling(job)?;
    let process = current_process();
    if !process.leads_session() {
        job.borrow_mut().detached.insert(process.pid);
        return Ok(());
    }
    hang_up_session(job);
    Ok(())
}

/// The terminal leaves its session, whose foreground is told.
pub fn hang_up_session(job: &KernelCell<JobControl>) {
    let old = core::mem::take(&mut *job.borrow_mut());
    if let Some(group) = old.foreground {
        signal_process_group(group, SIGHUP);
        signal_process_group(group, SIGCONT);
    }
}

/// A process ends: if it leads a session, its terminal leaves the session
/// (credentials(7); `disassociate_ctty`).
pub fn process_ended(process: &Process) {
    let terminals = &kernel().fs.terminals;
    if !process.leads_session() {
        return;
    }
    match terminals.controlling(process.pid, process.session()) {
        Some(super::Controlling::Host) => hang_up_session(&terminals.host.job),
        Some(super::Controlling::Pty(pty)) => hang_up_session(&pty.job),
        None => {}
    }
}

/// The terminal itself is gone: the leader of its session is told, too.
pub fn hang_up(job: &KernelCell<JobControl>) {
    let old = core::mem::take(&mut *job.borrow_mut());
    let Some(session) = old.session else { return };
    for process in kernel().tasks.all_processes().iter() {
        let leads = process.pid.led_session() == session;
        if leads || old.foreground == Some(process.process_group()) {
            send_to_process(process, SignalInfo::new(SIGHUP, SI_KERNEL));
            send_to_process(process, SignalInfo::new(SIGCONT, SI_KERNEL));
        }
    }
}
