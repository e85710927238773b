//! What a tracer asks of a tracee.

use alloc::sync::Arc;

use super::{Attachment, Event, Mode, Options, Reason, Stop, detach, resume, urge};
use crate::errno::{Errno, Result};
use crate::mm::force::Access;
use crate::platform::registers::AUDIT_ARCH;
use crate::platform::user::UserAddress;
use crate::task::ids::Tid;
use crate::task::process::Life;
use crate::task::signal::{self, SI_KERNEL, SIGKILL, Signal, SignalInfo, SignalSet, UNBLOCKABLE};
use crate::task::thread::{Thread, current};
use crate::task::visit::{self, Program};

/// A tracee of the running thread.
pub struct Own(Arc<Thread>);

/// One that has stopped.
pub struct Stopped(Arc<Thread>);

impl Own {
    /// The thread with an id; `ESRCH` if the running thread does not trace it.
    pub fn find(tid: Tid) -> Result<Self> {
        let thread = crate::state::kernel().tasks.thread(tid).ok_or(Errno::ESRCH)?;
        match thread.tracee.tracing_thread() == Some(current().tid()) {
            true => Ok(Self(thread)),
            false => Err(Errno::ESRCH),
        }
    }

    /// The same if it has stopped; `ESRCH` if not.
    pub fn stopped(self) -> Result<Stopped> {
        let has_stopped = self.0.tracee.with(|tracing| tracing.stop.is_some());
        if has_stopped == Some(true) { Ok(Stopped(self.0)) } else { Err(Errno::ESRCH) }
    }

    /// `PTRACE_KILL`.
    pub fn kill(&self) {
        signal::send_to_process(&self.0.process, SignalInfo::new(SIGKILL, SI_KERNEL));
    }

    /// `PTRACE_INTERRUPT`; `EIO` if it was not seized.
    pub fn interrupt(&self) -> Result<()> {
        let thread = &self.0;
        let is_seized = thread.tracee.with(|tracing| {
            let is_seized = tracing.attachment == Attachment::Seized;
            tracing.trap_is_due |= is_seized;
            tracing.is_listening &= !is_seized;
            is_seized
        });
        if is_seized != Some(true) {
            return Err(Errno::EIO);
        }
        thread.tracee.resumed.wake_all(crate::task::wait::Events::IN);
        urge(thread);
        Ok(())
    }
}

/// `struct ptrace_syscall_info`: what all kinds of stops have.
#[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
pub struct CallInfo {
    /// `PTRACE_SYSCALL_INFO_*`.
    kind: u8,
    pad: [u8; 3],
    architecture: u32,
    rip: u64,
    rsp: u64,
    /// Number and arguments at the beginning, and what a filter says; result and whether it is an error
    /// at the end.
    words: [u64; 8],
}

impl Stopped {
    /// The thread.
    pub fn thread(&self) -> &Thread {
        &self.0
    }

    fn stop(&self) -> Option<Stop> {
        self.0.tracee.with(|tracing| tracing.stop).flatten()
    }

    /// `PTRACE_CONT`, `PTRACE_SYSCALL`, `PTRACE_SINGLESTEP`.
    pub fn resume(self, mode: Mode, signal: Option<Signal>) {
        resume(&self.0, mode, signal);
    }

    /// `PTRACE_DETACH`.
    pub fn detach(self, signal: Option<Signal>) {
        detach(&self.0, signal);
    }

    /// `PTRACE_LISTEN`; `EIO` unless it was seized and its process has been stopped.
    pub fn listen(&self) -> Result<()> {
        let may = self.stop().is_some_and(|stop| stop.reason == Reason::Event(Event::Stop));
        let is_group_stop = matches!(self.0.process.life.get(), Life::Stopped(_));
        let is_due = self.0.tracee.with(|tracing| {
            if may {
                (tracing.stop, tracing.is_listening) = (None, true);
            }
            tracing.trap_is_due
        });
        if !may {
            return Err(Errno::EIO);
        }
        if !is_group_stop || is_due == Some(true) {
            // What it would listen for has come.
            self.0
                .tracee
                .with(|tracing| (tracing.is_listening, tracing.trap_is_due) = (false, true));
            self.0.tracee.resumed.wake_all(crate::task::wait::Events::IN);
        }
        Ok(())
    }

    /// Reads memory; `EIO` if not all of it is there.
    pub fn read(&self, from: UserAddress, bytes: &mut [u8]) -> Result<()> {
        let count = visit::read(&Program::of(self.0.process.clone()), from, bytes)?;
        if count == bytes.len() { Ok(()) } else { Err(Errno::EIO) }
    }

    /// Writes memory, also where the tracee may not; `EIO` if not all of it is there.
    pub fn write(&self, to: UserAddress, bytes: &[u8]) -> Result<()> {
        let program = Program::of(self.0.process.clone());
        let count = visit::write(&program, to, bytes, Access::Forced).or(Err(Errno::EIO))?;
        if count == bytes.len() { Ok(()) } else { Err(Errno::EIO) }
    }

    /// `PTRACE_SETOPTIONS`.
    pub fn set_options(&self, options: Options) {
        self.0.tracee.with(|tracing| tracing.options = options);
    }

    /// `PTRACE_GETEVENTMSG`.
    pub fn message(&self) -> u64 {
        self.0.tracee.with(|tracing| tracing.message).unwrap_or(0)
    }

    /// `PTRACE_GETSIGINFO`; `EINVAL` if it has stopped with its process.
    pub fn signal_info(&self) -> Result<SignalInfo> {
        self.stop().and_then(|stop| stop.info).ok_or(Errno::EINVAL)
    }

    /// `PTRACE_SETSIGINFO`.
    pub fn set_signal_info(&self, info: SignalInfo) -> Result<()> {
        self.signal_info()?;
        self.0.tracee.with(|tracing| {
            if let Some(stop) = &mut tracing.stop {
                stop.info = Some(info);
            }
        });
        Ok(())
    }

    /// `PTRACE_GETSIGMASK`.
    pub fn mask(&self) -> SignalSet {
        let signals = self.0.signals.borrow_mut();
        signals.saved_mask.unwrap_or(signals.mask)
    }

    /// `PTRACE_SETSIGMASK`.
    pub fn set_mask(&self, mask: SignalSet) {
        let mut signals = self.0.signals.borrow_mut();
        signals.saved_mask = None;
        signals.mask = mask & !UNBLOCKABLE;
        drop(signals);
        self.0.needs_attention();
        signal::pass_on(&self.0.process);
    }

    /// `PTRACE_GET_SYSCALL_INFO`, and how many bytes of it mean something.
    pub fn call_info(&self) -> (CallInfo, usize) {
        const BEGINS: u8 = 1;
        const ENDS: u8 = 2;
        const FILTERED: u8 = 3;
        let registers = super::registers::general(&self.0);
        let mut info = CallInfo {
            kind: 0,
            pad: [0; 3],
            architecture: AUDIT_ARCH,
            rip: registers.rip,
            rsp: registers.rsp,
            words: [0; 8],
        };
        let common = core::mem::offset_of!(CallInfo, words);
        match self.stop().map(|stop| stop.reason) {
            Some(reason @ (Reason::CallBegins | Reason::Event(Event::Seccomp))) => {
                let [rdi, rsi, rdx, r10, r8, r9] = self.0.frame().arguments();
                let message = self.message();
                info.words = [registers.orig_rax, rdi, rsi, rdx, r10, r8, r9, message];
                let (kind, len) = match reason {
                    Reason::CallBegins => (BEGINS, 56),
                    _ => (FILTERED, 60),
                };
                info.kind = kind;
                (info, common + len)
            }
            Some(Reason::CallEnds) => {
                info.kind = ENDS;
                let is_error = Errno::from_return(registers.rax).is_err();
                info.words[..2].copy_from_slice(&[registers.rax, is_error.into()]);
                (info, common + 9)
            }
            _ => (info, common),
        }
    }
}
