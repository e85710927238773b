//! What the platform asks of the kernel above it.
//!
//! The platform gets into the kernel at a few places only: a guest thread has made a
//! system call, has faulted, is about to return or runs for the first time; a virtual CPU
//! begins or is interrupted while it is idle; the kernel has panicked. The kernel
//! implements [`Upcalls`] for these, and [`register`]s them before the first guest runs.

use crate::registers::Frame;
use crate::sync::Late;

/// The kernel, as the platform sees it.
///
/// Where it says *with the kernel lock*, the platform has taken the lock for the calling
/// virtual CPU and gives it up afterwards; `frame` holds the registers of the running
/// thread, which it goes on with.
pub trait Upcalls: Sync {
    /// The running thread makes a system call: its number and arguments are in `frame`,
    /// and so is its result afterwards. With the kernel lock.
    fn system_call(&self, frame: &Frame);

    /// As [`Upcalls::system_call`], by a `syscall` instruction that is not patched and has
    /// trapped: the kernel may patch it first ([`crate::machine::SystemCallSites::patch`]).
    fn trapped_system_call(&self, frame: &Frame);

    /// The running thread has raised `frame.signal()`, a signal of the processor, at
    /// `frame.rip()`. With the kernel lock.
    fn fault(&self, frame: &Frame);

    /// The kernel itself has touched memory that is not there, with whatever state it has
    /// borrowed: whether that is there now. `code` is the `si_code` of the signal. Guest
    /// memory that shows a page of a file may be mapped only if `may_page_in`.
    fn map_missing(&self, address: u64, code: i32, may_page_in: bool) -> bool;

    /// Whether an address is in the vdso that the running thread's program has. With the kernel lock.
    fn is_in_vdso(&self, address: u64) -> bool;

    /// The running thread is about to return to the guest, and its
    /// [`crate::machine::ThreadState::needs_attention`] was called. Called again for as
    /// long as it is. With the kernel lock.
    fn before_return(&self, frame: &Frame);

    /// The running thread runs for the first time. With the kernel lock, which the idle
    /// loop has handed over.
    fn begin_thread(&self);

    /// The idle loop of a virtual CPU that has just begun. With the kernel lock.
    fn run_vcpu(&self) -> !;

    /// A signal of the host has come for an idle virtual CPU, in the middle of anything:
    /// ends its wait, if it waits or is about to. `vcpu` is its number
    /// ([`crate::machine::Vcpus::number`]). Without the kernel lock.
    fn interrupt_idle(&self, vcpu: usize);

    /// A host process of the sandbox has ended, in the middle of anything: what it was. Without
    /// the kernel lock.
    fn child_ended(&self, pid: u32) -> Ended;

    /// The kernel has panicked in this host process: tells the others.
    fn panicked(&self);
}

/// What a process that has ended was to the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ended {
    /// One that has an address space of the guest, and may have had the kernel lock.
    HostProcess,
    /// A twin ([`crate::machine::Kinship::SiblingTwin`]).
    Twin,
    /// Neither, as far as the kernel knows.
    Unknown,
}

static KERNEL: Late<&'static dyn Upcalls> = Late::empty();

/// Names the kernel. To be called once, before there is a guest.
pub fn register(kernel: &'static dyn Upcalls) {
    KERNEL.set(kernel);
}

/// The kernel. Panics before there is one.
#[inline]
pub(crate) fn kernel() -> &'static dyn Upcalls {
    *KERNEL
}

/// The kernel, if there is one.
pub(crate) fn registered() -> Option<&'static dyn Upcalls> {
    KERNEL.get().copied()
}
