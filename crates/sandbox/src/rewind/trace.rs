//! A process of one thread that is stopped (ptrace(2)), and what only its tracer reaches:
//! registers, signals, and host calls made in its name.
#![allow(unsafe_code)]

use std::io::{self, Error, IoSlice};
use std::mem::MaybeUninit;
use std::ops::Range;
use std::ptr;

use libc::{c_int, c_long, c_void, pid_t, user_regs_struct};

/// Bytes of the extended state of a processor, at most: with AMX it is some 11 KiB.
const VECTOR_STATE_MAX: usize = 16 * 1024;
/// Note type of the extended state (linux/elf.h).
const NT_X86_XSTATE: usize = 0x202;
/// Type of the requests of ptrace(2), which C libraries do not agree on.
#[cfg(not(target_env = "musl"))]
type Request = libc::c_uint;
#[cfg(target_env = "musl")]
type Request = libc::c_int;

/// `PTRACE_GETSIGMASK` and `PTRACE_SETSIGMASK` (linux/ptrace.h), with the size of a mask.
const GET_SIGNAL_MASK: Request = 0x420a;
const SET_SIGNAL_MASK: Request = 0x420b;
const SIGNAL_MASK_LEN: usize = 8;
/// Stops that one host call may take: each pending signal is one.
const STOPS_MAX: u32 = 80;
/// Bytes of a `syscall` instruction.
pub const SYSCALL_LEN: u64 = 2;

/// What a thread is besides its memory.
#[derive(Clone)]
pub struct ThreadState {
    pub registers: user_regs_struct,
    vectors: Vec<u8>,
    signal_mask: u64,
}

/// A process that this one has stopped. Dropping it ends the process: nobody is to go on with
/// it but who says so ([`Stopped::go_on`]).
pub struct Stopped {
    pid: pid_t,
}

impl Stopped {
    /// Stops a process.
    ///
    /// # Errors
    /// The host's; `ESRCH`: it has ended.
    pub fn new(pid: u32) -> io::Result<Self> {
        let pid = pid as pid_t;
        request(libc::PTRACE_SEIZE, pid, 0, libc::PTRACE_O_EXITKILL as *mut c_void)?;
        let stopped = Self { pid };
        request(libc::PTRACE_INTERRUPT, pid, 0, ptr::null_mut())?;
        stopped.wait()?;
        Ok(stopped)
    }

    /// Lets it go on as it is now.
    pub fn go_on(self) -> io::Result<()> {
        request(libc::PTRACE_DETACH, self.pid, 0, ptr::null_mut())?;
        std::mem::forget(self);
        Ok(())
    }

    pub fn state(&self) -> io::Result<ThreadState> {
        let registers = self.registers()?;
        let mut vectors = vec![0; VECTOR_STATE_MAX];
        let len = self.vectors(libc::PTRACE_GETREGSET, &mut vectors)?;
        vectors.truncate(len);
        let mut signal_mask = 0_u64;
        let mask = (&raw mut signal_mask).cast();
        request(GET_SIGNAL_MASK, self.pid, SIGNAL_MASK_LEN, mask)?;
        Ok(ThreadState { registers, vectors, signal_mask })
    }

    pub fn set_state(&self, state: &ThreadState) -> io::Result<()> {
        let mut vectors = state.vectors.clone();
        self.vectors(libc::PTRACE_SETREGSET, &mut vectors)?;
        self.set_signal_mask(state.signal_mask)?;
        self.set_registers(&state.registers)
    }

    /// Writes `parts`, one after the other, to these ranges of its memory, which it can write
    /// itself. Both are `IOV_MAX` at most, and of the same length in all. Takes half the time of
    /// `/proc/PID/mem`, through which the host copies everything twice.
    pub fn write(&self, parts: &[IoSlice<'_>], ranges: &[Range<u64>]) -> io::Result<()> {
        let remote = ranges.iter().map(|range| libc::iovec {
            iov_base: ptr::with_exposed_provenance_mut(range.start as usize),
            iov_len: (range.end - range.start) as usize,
        });
        let remote: Vec<libc::iovec> = remote.collect();
        let wanted: usize = remote.iter().map(|range| range.iov_len).sum();
        // SAFETY: an `IoSlice` is an `iovec` (its documentation); both arrays have the lengths
        // that are given with them. Memory of this process is only read.
        let written = unsafe {
            let (local, remote) = (parts.as_ptr().cast::<libc::iovec>(), remote.as_ptr());
            let (locals, remotes) = (parts.len() as u64, ranges.len() as u64);
            libc::process_vm_writev(self.pid, local, locals, remote, remotes, 0)
        };
        match usize::try_from(written) {
            Ok(written) if written == wanted => Ok(()),
            Ok(_) => Err(Error::from(io::ErrorKind::WriteZero)),
            Err(_) => Err(Error::last_os_error()),
        }
    }

    /// Makes a host call in the name of the process: executes the `syscall` instruction at
    /// which `state` waits, and nothing else. Signals that are pending are dropped on the way.
    ///
    /// # Errors
    /// The host's, of tracing. What the call returns is the result.
    pub fn call(
        &self,
        state: &ThreadState,
        number: c_long,
        arguments: [u64; 6],
    ) -> io::Result<i64> {
        let mut registers = state.registers;
        let [rdi, rsi, rdx, r10, r8, r9] = arguments;
        let site = registers.rip;
        registers.rax = number as u64;
        // Nothing is to be restarted (the host would change the registers).
        registers.orig_rax = u64::MAX;
        (registers.rdi, registers.rsi, registers.rdx) = (rdi, rsi, rdx);
        (registers.r10, registers.r8, registers.r9) = (r10, r8, r9);
        self.set_registers(&registers)?;
        for _ in 0..STOPS_MAX {
            request(libc::PTRACE_SINGLESTEP, self.pid, 0, ptr::null_mut())?;
            self.wait()?;
            let now = self.registers()?;
            if now.rip == site + SYSCALL_LEN {
                return Ok(now.rax as i64);
            }
            // A signal came first, and is gone: the instruction is still to be executed.
            if now.rip != site {
                return Err(Error::from(io::ErrorKind::InvalidData));
            }
        }
        Err(Error::from(io::ErrorKind::InvalidData))
    }

    /// Drops the signals that wait to be delivered, blocked ones, too: each is a stop, and
    /// does not reach the process. `call` is one that changes nothing.
    pub fn drop_signals(&self, call: impl FnOnce(&Self) -> io::Result<i64>) -> io::Result<()> {
        self.set_signal_mask(0)?;
        call(self).map(drop)
    }

    fn set_signal_mask(&self, mut mask: u64) -> io::Result<()> {
        request(SET_SIGNAL_MASK, self.pid, SIGNAL_MASK_LEN, (&raw mut mask).cast())
    }

    fn registers(&self) -> io::Result<user_regs_struct> {
        let mut registers = MaybeUninit::<user_regs_struct>::uninit();
        request(libc::PTRACE_GETREGS, self.pid, 0, registers.as_mut_ptr().cast())?;
        // SAFETY: the call has filled it.
        Ok(unsafe { registers.assume_init() })
    }

    pub fn set_registers(&self, registers: &user_regs_struct) -> io::Result<()> {
        request(libc::PTRACE_SETREGS, self.pid, 0, ptr::from_ref(registers).cast_mut().cast())
    }

    /// Reads or writes the extended state; returns its length.
    fn vectors(&self, direction: Request, state: &mut [u8]) -> io::Result<usize> {
        let base = state.as_mut_ptr().cast::<c_void>();
        let mut part = libc::iovec { iov_base: base, iov_len: state.len() };
        request(direction, self.pid, NT_X86_XSTATE, (&raw mut part).cast())?;
        Ok(part.iov_len)
    }

    /// Waits until it has stopped.
    fn wait(&self) -> io::Result<()> {
        let mut status: c_int = 0;
        loop {
            // SAFETY: `status` outlives the call.
            let waited = unsafe { libc::waitpid(self.pid, &raw mut status, libc::__WALL) };
            match waited {
                -1 if Error::last_os_error().kind() == io::ErrorKind::Interrupted => {}
                -1 => return Err(Error::last_os_error()),
                _ if libc::WIFSTOPPED(status) => return Ok(()),
                _ => return Err(Error::from_raw_os_error(libc::ESRCH)),
            }
        }
    }
}

impl Drop for Stopped {
    fn drop(&mut self) {
        // SAFETY: a call without memory. It may have ended; then nothing happens.
        unsafe { libc::kill(self.pid, libc::SIGKILL) };
        // Its maker hears of its end only when its tracer has.
        while self.wait().is_ok() {}
    }
}

/// ptrace(2). `data` points to memory that is as long as the request says, if it takes any.
fn request(request: Request, pid: pid_t, address: usize, data: *mut c_void) -> io::Result<()> {
    // SAFETY: the callers in this file pass pointers to values that live through the call, and
    // their lengths.
    match unsafe { libc::ptrace(request, pid, address, data) } {
        -1 => Err(Error::last_os_error()),
        _ => Ok(()),
    }
}
