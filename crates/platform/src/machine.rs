//! The machine below the kernel, as a family of traits.
//!
//! A *platform* is one way to run guest code beside this kernel. [`Machine`] names the platform
//! that the kernel is compiled for; everything is dispatched statically, so that a call through
//! a trait costs as much as a call of a function. There is one platform, `process`:
//! host processes behind a seccomp filter. This module says what a second one would have to
//! promise, such as the same kernel in ring 0 of a virtual machine.
//!
//! | trait | what differs between platforms | in host processes | in ring 0 it would be |
//! | --- | --- | --- | --- |
//! | [`Memory`] | mappings, and copies that survive faults | `mmap` and its relatives, `SIGSEGV` | page tables, `#PF` |
//! | [`Processes`] | several address spaces, and the rights of the sandbox | `clone`, seccomp, ids | page table roots; no rights to give up |
//! | [`Vcpus`] | processors: starting, waiting, interrupting | host threads, `futex`, signals | processors, `hlt`, interrupts |
//! | [`Threads`], [`ThreadState`] | guest code is entered and left | the gate, `SIGSYS`, signal frames | `syscall`, `sysret`, the interrupt table |
//! | [`HostFiles`] | descriptors that the host has handed in | the host's own | numbers of the monitor, behind queues |
//! | [`Clocks`] | the host's time | the host's vdso | a page of the monitor and the time stamp counter |
//! | [`SystemCallSites`] | patching of `syscall` instructions | the gate | nothing: sites are fast as they are |
//!
//! The platform calls the kernel through [`crate::upcalls::Upcalls`]. All else in this crate is
//! above the platform and uses it through these traits: ranges, windows and tables
//! ([`crate::memory`]), addresses of the guest ([`crate::user`]), the kernel lock, messages.
//!
//! # Promises that hold for every method
//!
//! - **Errors** are those of the Linux system call that the method is named after, as an
//!   [`Errno`](crate::errno::Errno). A method that fails has changed nothing, if it does not
//!   say otherwise.
//! - **Blocking.** Nothing blocks but what says so. A method that blocks keeps the kernel lock:
//!   the caller gives it up around the call ([`crate::kernel_lock::unlocked`]) where others are
//!   to go on meanwhile.
//! - **Concurrency.** Callers have the kernel lock, unless a method says that it needs none.
//! - **Freezing.** Nothing of the platform is saved but the memory that the kernel has asked for
//!   and values of the two types [`ThreadState`] and [`SystemCallSites`], which therefore are
//!   [`Saved`]. A thaw finds these where they were, with everything else of the platform as it is
//!   in a new sandbox: no descriptors but the fixed ones, one virtual CPU, no alarm, no guest
//!   mapping.
//! - **Units.** Addresses and lengths are bytes, times are nanoseconds.
#![allow(unsafe_code)]

use alloc::vec::Vec;
use core::cell::Cell;
use core::sync::atomic::{AtomicU32, AtomicU64};

use thaw_abi::filter::List;

use crate::errno::Result;
use crate::io::{IoSlice, IoSliceMut, IoVec};
use crate::memory::Pages;
use crate::registers::{Frame, TrapFrame};
use crate::saved::{OfHost, Saved};
use crate::sync::KernelCell;
use crate::thread::KernelStack;

/// The platform that the kernel is compiled for.
#[cfg(not(feature = "another-platform"))]
pub type Machine = crate::process::HostProcesses;
/// The platform that the kernel is compiled against to see that it needs no other one.
#[cfg(feature = "another-platform")]
pub type Machine = crate::nowhere::Nowhere;
/// The platform's part of a guest thread.
pub type ThreadContext = <Machine as Threads>::State;
/// The patched system call sites of an address space.
pub type Gate = <Machine as Platform>::SystemCallSites;

/// One way to run guest code. A type without values implements it; its parts are the traits
/// that this one requires.
pub trait Platform: Memory + Processes + Vcpus + Threads + HostFiles + Clocks + 'static {
    /// What the platform knows of the `syscall` instructions of an address space.
    type SystemCallSites: SystemCallSites;
}

/// `PROT_READ` (mmap(2)).
pub const PROT_READ: u32 = 1;
/// `PROT_WRITE`.
pub const PROT_WRITE: u32 = 2;
/// `PROT_EXEC`.
pub const PROT_EXEC: u32 = 4;

/// Whether writes to a mapping are private.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sharing {
    /// `MAP_PRIVATE`: nobody else sees writes, and a fork copies them.
    Private,
    /// `MAP_SHARED`: the file, if there is one, and address spaces that fork see writes.
    Shared,
}

/// What [`Memory::populate`] gives memory for, page by page, as if it were touched. The memory
/// keeps its content.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Populate {
    /// `MADV_POPULATE_READ`: as if it were read.
    Read,
    /// `MADV_POPULATE_WRITE`: as if it were written to.
    Write,
}

/// The address space that the calling vCPU runs in: mappings, and accesses that may fault.
///
/// Mappings are pages of 4096 bytes, with a protection of `PROT_*` bits. What a change of a
/// mapping replaces is gone for all vCPUs of the address space when the method returns. A
/// method over several pages is not atomic for others: a vCPU that touches them meanwhile
/// finds the old page, the new one, or a fault, which the kernel gets as
/// [`map_missing`](crate::upcalls::Upcalls::map_missing) or
/// [`fault`](crate::upcalls::Upcalls::fault).
///
/// A freeze saves the bytes that the kernel reports to the host, and no mapping: a thaw makes
/// them again, from the image.
pub trait Memory {
    /// Maps zeroed memory, replacing what is there (mmap(2), `MAP_FIXED`). It takes room only
    /// where it is touched.
    fn map_anonymous(at: impl Pages, protection: u32, sharing: Sharing) -> Result<()>;

    /// Maps a file from `offset` on, which is a multiple of the size of a page, replacing what
    /// is there.
    fn map_file(
        fd: HostFd,
        at: impl Pages,
        protection: u32,
        sharing: Sharing,
        offset: u64,
    ) -> Result<()>;

    /// Changes how pages may be used (mprotect(2)).
    fn protect(at: impl Pages, protection: u32) -> Result<()>;

    /// Takes pages away (munmap(2)); that there are none is no error.
    fn unmap(at: impl Pages) -> Result<()>;

    /// Moves pages with their content to where others are, which they replace (mremap(2)).
    /// Nothing is left in their old place.
    ///
    /// # Errors
    /// `EINVAL` if the ranges have not the same length, `EFAULT` if nothing is mapped at `from`.
    fn move_pages(from: impl Pages, to: impl Pages) -> Result<()>;

    /// Makes memory what it was when it was mapped (`MADV_DONTNEED`, madvise(2)): zeros, or the
    /// content of the file.
    fn discard(at: impl Pages) -> Result<()>;

    /// Frees memory and that of the file it shows, which then reads as zeros (`MADV_REMOVE`).
    fn remove(at: impl Pages) -> Result<()>;

    /// Gives all pages from `address` on, `len` bytes, their memory at once. It is advice: after
    /// an error some may have theirs, and the others get it when they are touched.
    fn populate(address: u64, len: u64, how: Populate) -> Result<()>;

    /// As [`Memory::populate`], for many ranges. Returns the bytes dealt with.
    ///
    /// # Errors
    /// The host cannot do it in one call (Linux before 6.13).
    fn populate_ranges(ranges: &[Cell<IoVec>], how: Populate) -> Result<u64>;

    /// Copies `len` bytes, of which either side may be memory of the guest, and returns how many
    /// were not copied because of a fault. The kernel's
    /// [`map_missing`](crate::upcalls::Upcalls::map_missing) is asked first. Needs no kernel
    /// lock, and is not atomic in any unit.
    ///
    /// # Safety
    /// Whichever of the two ranges is kernel memory must be valid; the other may
    /// be anything below `GUEST_MAX`.
    unsafe fn copy(to: *mut u8, from: *const u8, len: usize) -> usize;

    /// As [`Memory::copy`], and stops at guest memory that is not there until the kernel maps a
    /// page of a file: it may be called with that file borrowed.
    ///
    /// # Safety
    /// As [`Memory::copy`].
    unsafe fn copy_present(to: *mut u8, from: *const u8, len: usize) -> usize;

    /// Stores a word in memory that shows a file, whose disk may be full, as one.
    ///
    /// # Errors
    /// `EFAULT`: there is no room for it.
    fn store_in_file(word: &AtomicU64, value: u64) -> Result<()>;

    /// Loads a word from memory that shows a file, as one.
    ///
    /// # Errors
    /// `EFAULT`: its disk fails.
    fn load_from_file(word: &AtomicU64) -> Result<u64>;

    /// Replaces a word by `new` if it is `expected`, atomically for all who share the memory,
    /// and returns the word as it was; `None` after a fault.
    ///
    /// # Safety
    /// `word` is aligned and below `GUEST_MAX`.
    unsafe fn compare_exchange(word: *mut u32, expected: u32, new: u32) -> Option<u32>;

    /// Makes every processor that runs a vCPU of this address space execute a full memory
    /// barrier (membarrier(2)).
    fn barrier() -> Result<()>;
}

/// Which relation a new host process has to the one that forks it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kinship {
    /// Its child.
    Child,
    /// A child of its parent.
    Sibling,
    /// As [`Kinship::Sibling`], and process 1 of a sandbox of its own: a copy of a template.
    Sandbox,
    /// A child that runs nothing and only holds its copy of the memory ([`Processes::be_twin`]).
    /// However it ends, the sandbox goes on. There is one at a time.
    Twin,
    /// The same of a process that is not the sandbox' first, and a child of its parent. The
    /// kernel knows its number ([`crate::upcalls::Upcalls::twin_ended`]).
    SiblingTwin,
}

/// Which side of a fork this is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Forked {
    /// The new process.
    Child,
    /// The old one.
    Parent {
        /// Number of the new one in the sandbox, for [`Vcpus::interrupt`].
        pid: u32,
    },
}

/// Address spaces of the sandbox, each with vCPUs of its own: *host processes*. The first one
/// ends the sandbox with its own end. Which of them a vCPU serves never changes.
///
/// Memory that was mapped [`Sharing::Shared`] is one memory in all of them, at the same
/// addresses. The per-boot area is of one host process. Descriptors are shared by all.
pub trait Processes {
    /// A new host process with a copy of this address space and with one vCPU: the calling one,
    /// which is to be idle, on a copy of its idle stack. Both sides return here. The new one has
    /// no kernel lock, and calls [`Vcpus::begin_forked`] first.
    ///
    /// # Errors
    /// The host has no memory or no process for it, or the sandbox may have only one
    /// ([`Processes::may_fork`]).
    fn fork(kinship: Kinship) -> Result<Forked>;

    /// What a new [`Kinship::Twin`] does after [`Vcpus::begin_forked`]: waits for its end, and
    /// changes no memory but its stacks and the first vCPU's part of the per-boot area.
    fn be_twin() -> !;

    /// Ends the twin of this host process, if there is one.
    fn end_twin();

    /// Whether the sandbox may have more than one host process and vCPU. It does not change
    /// after [`Processes::confine`].
    fn may_fork() -> bool;

    /// Gives up for good all that the list does not allow; until then everything is allowed.
    /// Whatever a guest does to the kernel, it gets no further than this.
    fn confine(list: List) -> Result<()>;

    /// Changes the user and the group to `id` (setresuid(2)). Gone before it fails: nothing, or
    /// the group.
    fn set_ids(id: u32) -> Result<()>;

    /// Keeps the rights `kept`, a bit set of capabilities (capabilities(7)), and none to pass on.
    fn set_capabilities(kept: u32) -> Result<()>;

    /// Leads a process group of its own (setpgid(2)), so that the host can signal all of it.
    fn new_process_group() -> Result<()>;

    /// Ends this host process with all of its vCPUs; the sandbox, if it is the first one. Needs
    /// no kernel lock.
    fn exit(code: u64) -> !;
}

/// Virtual CPUs of the calling vCPU's host process: each runs one guest thread or an idle loop
/// ([`run_vcpu`](crate::upcalls::Upcalls::run_vcpu)) at a time. Nothing of a vCPU is saved.
///
/// Two *signals* interrupt a vCPU: the doorbell, which the host rings after it has sent a
/// message, and the alarm. Each sets a flag of the vCPU that it interrupts. If a guest thread
/// runs there, [`before_return`](crate::upcalls::Upcalls::before_return) is called soon, and none
/// is overlooked on the way out; if it is idle,
/// [`interrupt_idle`](crate::upcalls::Upcalls::interrupt_idle) is called at once.
pub trait Vcpus {
    /// Most vCPUs of a host process.
    const MAX_VCPUS: u32;

    /// Makes the caller the first vCPU of the first host process, and maps the per-boot area.
    /// To be called once, before anything else of the platform.
    fn begin_first() -> Result<()>;

    /// Goes on with `main` on the idle stack of the first vCPU. Nothing on the stack in use
    /// is needed again.
    fn leave_first_stack(main: extern "C" fn() -> !) -> !;

    /// Makes the calling vCPU the only one of a host process that was just forked: it runs no
    /// thread and has no signal.
    fn begin_forked();

    /// Starts vCPU `index`, not 0, of this host process, with a number of the kernel's.
    ///
    /// # Errors
    /// The host has no memory or no thread for it; `EBUSY` if a vCPU with this index has ended
    /// in this host process.
    fn start(index: u32, number: usize) -> Result<u32>;

    /// Ends the calling vCPU, and with the last one the host process; gives up the kernel lock.
    fn end() -> !;

    /// As [`Vcpus::end`], without the kernel lock and as if the vCPU were still there: to be
    /// called when the sandbox ends.
    fn exit_thread() -> !;

    /// Index of the calling vCPU in its host process: 0 for the first one.
    fn index() -> u32;

    /// The memory of the first vCPU that every boot uses, as start and bytes: a sandbox that is made
    /// ahead of its boot populates it.
    fn first_touched() -> [(u64, u64); 3];

    /// Gives back the memory of the calling vCPU's stacks that is not in use. To be called by the
    /// idle loop.
    fn discard_stacks();

    /// The number that the kernel has given the calling vCPU, 0 at first: its own way to find
    /// what it has for the vCPU. Needs no kernel lock.
    fn number() -> usize;

    /// Gives the calling vCPU a number.
    fn set_number(number: usize);

    /// Sets the doorbell of a vCPU of any host process, as the host does; nothing happens if
    /// there is none. `pid` is from [`Forked::Parent`], 1 for the first host process, and `tid`
    /// from [`Vcpus::start`], or `pid` for a host process' first vCPU.
    fn interrupt(pid: u32, tid: u32);

    /// Sleeps while `word` is `expected`, for at most `timeout_ns` (futex(2)). It may return for
    /// no reason. The word may lie in memory that host processes share. Blocks, and needs no
    /// kernel lock.
    fn wait(word: &AtomicU32, expected: u32, timeout_ns: Option<u64>);

    /// Wakes at most `count` of those who sleep because of a word. Needs no kernel lock.
    fn wake(word: &AtomicU32, count: u32);

    /// Sets the alarm of this host process, which has one: it goes off once, on some vCPU, in
    /// `ns` nanoseconds or a microsecond, if that is later. It replaces the one that was set.
    fn arm_alarm(ns: u64);

    /// Whether there is a doorbell or an alarm for the calling vCPU, which goes on being so.
    fn has_signal() -> bool;

    /// Whether the host has rung the doorbell since the last call.
    fn take_doorbell() -> bool;

    /// Whether the alarm has gone off on this vCPU since the last call.
    fn take_alarm() -> bool;
}

/// Guest threads on the calling vCPU. The processor holds one thread's state at a time, of
/// which the platform may keep parts there while the kernel runs, and lazily while other threads
/// run: [`Threads::put_registers_away`] and [`ThreadState::save_fpu`] bring it into memory.
pub trait Threads {
    /// The platform's part of a guest thread.
    type State: ThreadState;

    /// Makes system calls and faults of guest code come to the kernel on the first vCPU. To be
    /// called once, before there is guest code.
    fn catch_guest() -> Result<()>;

    /// Makes each `cpuid` instruction fault from now on, the kernel's own as well, in this host
    /// process and all that it makes.
    ///
    /// # Errors
    /// The processor, or who shows it, cannot do that (`ENODEV`).
    fn fault_on_cpuid() -> Result<()>;

    /// Saves all that the processor holds of guest threads, so that memory holds all of every
    /// thread that has run on this vCPU, which is idle.
    fn put_registers_away();

    /// Base of `%fs` of the running thread.
    fn fs_base() -> u64;

    /// Sets the base of `%fs` of the running thread, a canonical address.
    fn set_fs_base(base: u64);

    /// The guest has given the running thread a `%gs` of its own or may have: makes sure that the
    /// platform finds its vCPU all the same.
    fn keep_own_gs(running: &Self::State);

    /// A new program begins, of which no thread has a `%gs` of its own.
    fn forget_own_gs();

    /// The thread that the kernel has named last for the calling vCPU; null if it runs none.
    fn running() -> *const ();

    /// Names the thread that the kernel works for, without running it, and what the platform has
    /// of it; nulls for none.
    ///
    /// # Safety
    /// Both are there until another one, or none, is named.
    unsafe fn set_running(thread: *const (), state: *const Self::State);

    /// Runs a thread on this vCPU until it calls [`ThreadState::switch_to_idle`]. To be called by
    /// the idle loop. `prepare` is called as soon as signals count for the thread, so that none
    /// that it asks for is overlooked.
    ///
    /// # Safety
    /// `state` is of `thread`, which no other vCPU runs, and neither goes before it has given
    /// up the vCPU for good ([`ThreadState::forget_fpu`]).
    unsafe fn switch_from_idle(thread: *const (), state: &Self::State, prepare: impl FnOnce());

    /// Where the kernel's stack that `stack_pointer` lies on ends; `stack_pointer` if it is not
    /// known. For the report of a panic.
    fn stack_end(stack_pointer: u64) -> u64;
}

/// The platform's part of a guest thread, all of it saved: the registers with which it entered
/// the kernel, its kernel stack, vector state, segments, and where it goes on when it runs
/// again. A thawed copy goes on with it on another vCPU of another machine that has the same
/// features.
///
/// Other vCPUs may refer to it as well, under the kernel lock.
pub trait ThreadState: Saved + Send + Sync + Sized {
    /// A thread that begins in the kernel
    /// ([`begin_thread`](crate::upcalls::Upcalls::begin_thread)), and returns to the guest with
    /// the registers `frame`.
    fn new(stack: KernelStack, frame: TrapFrame) -> Self;

    /// The registers with which the thread entered the kernel and will leave it. They are those
    /// of the guest only while it is in the kernel.
    fn frame(&self) -> &Frame;

    /// The kernel stack.
    fn stack(&self) -> &KernelStack;

    /// Where the part of the kernel stack begins that is in use, of a thread that does
    /// not run.
    fn stack_pointer(&self) -> u64;

    /// Marks that there is something to do before the thread returns to the guest:
    /// [`before_return`](crate::upcalls::Upcalls::before_return) is called for as long as it is
    /// marked. It takes effect at once for the running thread; another one may have to be
    /// interrupted.
    fn needs_attention(&self);

    /// Whether there is.
    fn is_attention_needed(&self) -> bool;

    /// What there was to do is being done.
    fn attended(&self);

    /// Base of `%fs` of a thread that does not run.
    fn fs_base(&self) -> u64;

    /// Sets the base of `%fs` of a thread that does not run.
    fn set_fs_base(&self, base: u64);

    /// Base of the guest's own `%gs`; 0 if it has none.
    fn gs_base(&self) -> u64;

    /// Gives the guest a `%gs` of its own from its next return on; 0 takes it away.
    fn set_gs_base(&self, base: u64);

    /// The vector state in memory: that of the registers for the running thread is only
    /// there after [`ThreadState::save_fpu`] or [`FpuState::save`](crate::fpu::FpuState::save).
    fn fpu(&self) -> &KernelCell<crate::fpu::FpuState>;

    /// Saves the vector state if it is in this virtual CPU's registers, so that memory
    /// holds all of the thread.
    fn save_fpu(&self);

    /// Takes over the vector state of the running thread.
    fn copy_fpu(&self, running: &Self);

    /// Puts the vector state of the running thread back to that of a new program.
    fn reset_fpu(&self);

    /// Gives up the vector state in the registers: the thread has ended.
    fn forget_fpu(&self);

    /// Gives the virtual CPU back to the idle loop; returns when the thread is chosen
    /// again, on any vCPU of its host process. To be called by the running thread. Blocks, and
    /// leaves the kernel lock to the idle loop.
    fn switch_to_idle(&self);
}

/// A descriptor of the host. It is of this boot, so that nothing that is saved can have one:
///
/// ```compile_fail
/// thaw_platform::saved::assert_saved::<thaw_platform::machine::HostFd>();
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HostFd(pub i32, OfHost);

impl HostFd {
    /// The descriptor with a number.
    pub const fn new(number: i32) -> Self {
        Self(number, OfHost::new())
    }
}

/// `struct pollfd` (poll(2)).
#[derive(Clone, Copy, Debug, bytemuck::Zeroable)]
#[repr(C)]
pub struct PollFd {
    /// Descriptor; negative entries are ignored.
    pub fd: i32,
    /// Events asked for: `POLLIN` and so on.
    pub events: i16,
    /// Events found.
    pub revents: i16,
}

/// Whether a receive leaves the data in place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Peek {
    /// `MSG_PEEK`.
    Yes,
    /// Consume.
    No,
}

/// What [`HostFiles::receive`] got.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Arrived {
    /// Bytes of the message.
    pub bytes: usize,
    /// Descriptors that came along.
    pub fds: usize,
}

/// Descriptors that the host has handed in: the standard streams, the control socket, sockets of
/// clients, files for reading. No method takes a path or makes a socket. Slices of guest memory
/// may fault: then a method moves what it can, and fails with `EFAULT` if that is nothing.
pub trait HostFiles {
    /// read(2) of a standard stream; blocks as the stream does.
    fn read(fd: HostFd, to: IoSliceMut<'_>) -> Result<usize>;

    /// write(2); blocks as the file does.
    fn write(fd: HostFd, from: IoSlice<'_>) -> Result<usize>;

    /// pread(2) of a file. Blocks for as long as the host reads it.
    fn pread(fd: HostFd, to: IoSliceMut<'_>, offset: u64) -> Result<usize>;

    /// recvfrom(2) without an address, never blocking.
    fn recv(fd: HostFd, to: IoSliceMut<'_>, peek: Peek) -> Result<usize>;

    /// As [`HostFiles::recv`] into the kernel's own memory, for datagrams: returns the bytes
    /// that the datagram has, of which those that fit were stored.
    fn recv_datagram(fd: HostFd, buffer: &mut [u8], peek: Peek) -> Result<usize>;

    /// recvmsg(2): fills `bytes` with a message, and `fds` with the descriptors that come along,
    /// which are the caller's then. What does not fit is lost. Blocks unless `nonblocking`.
    ///
    /// # Errors
    /// `EAGAIN` if there is none and `nonblocking`, `EPIPE` if there will be none.
    fn receive(
        socket: HostFd,
        bytes: &mut [u64],
        fds: &mut FdBuffer,
        nonblocking: bool,
    ) -> Result<Arrived>;

    /// sendto(2) without an address, never blocking, never raising `SIGPIPE`.
    fn send(fd: HostFd, from: IoSlice<'_>) -> Result<usize>;

    /// shutdown(2); `how` is `SHUT_RD` 0, `SHUT_WR` 1 or `SHUT_RDWR` 2.
    fn shutdown(fd: HostFd, how: u32) -> Result<()>;

    /// poll(2) with a relative time-out; `None` waits for ever. Blocks; a signal may end it or not,
    /// which is why the kernel hears of those in
    /// [`interrupt_idle`](crate::upcalls::Upcalls::interrupt_idle). Returns the number of
    /// descriptors with events.
    fn poll(fds: &mut [PollFd], timeout_ns: Option<u64>) -> Result<usize>;

    /// Gives a descriptor another number as well, in place of what has it (dup2(2)).
    fn duplicate_to(fd: HostFd, number: HostFd) -> Result<()>;

    /// close(2).
    fn close(fd: HostFd);
}

/// Most descriptors that come with one message.
pub const MAX_FDS: usize = 253;

/// Room for the descriptors of a message, as a control message (cmsg(3)) has them.
#[repr(C)]
pub struct FdBuffer {
    /// Bytes, with the head.
    pub len: u64,
    /// `cmsg_level` and `cmsg_type`.
    pub kind: [u32; 2],
    /// The descriptors.
    pub fds: [i32; MAX_FDS],
}

/// Clocks of the host. Reading one needs no kernel lock, and costs some ten nanoseconds; those of CPU
/// time are a host call.
pub trait Clocks {
    /// `CLOCK_REALTIME` (clock_gettime(2)).
    const REALTIME: u32 = 0;
    /// `CLOCK_MONOTONIC`.
    const MONOTONIC: u32 = 1;
    /// `CLOCK_BOOTTIME`.
    const BOOTTIME: u32 = 7;

    /// Makes the clocks known that the host offers at an address, 0 if it offers none.
    fn find_clocks(vdso: u64);

    /// Seconds and nanoseconds of one of the clocks above.
    fn read_clock(clock: u32) -> (i64, i64);

    /// Where the address is of the function that reads a clock in guest code, as
    /// clock_gettime(2) does; another one in every boot.
    fn guest_clock() -> &'static AtomicU64;

    /// For how long the calling vCPU had a processor, in nanoseconds, since its host thread began.
    fn own_cpu_ns() -> u64;

    /// For how long all vCPUs of a host process had one, in nanoseconds, those that have ended included; 0 if
    /// it has ended. `pid` is as for [`Vcpus::interrupt`].
    fn process_cpu_ns(pid: u32) -> u64;

    /// The host's `CLOCK_MONOTONIC`, in nanoseconds.
    #[inline]
    fn monotonic_ns() -> u64 {
        nanoseconds(Self::read_clock(Self::MONOTONIC))
    }

    /// The host's `CLOCK_REALTIME`, in nanoseconds since the epoch.
    fn realtime_ns() -> u64 {
        nanoseconds(Self::read_clock(Self::REALTIME))
    }

    /// The host's `CLOCK_BOOTTIME`, in nanoseconds.
    fn boottime_ns() -> u64 {
        nanoseconds(Self::read_clock(Self::BOOTTIME))
    }
}

pub(crate) fn nanoseconds((seconds, nanoseconds): (i64, i64)) -> u64 {
    (seconds as u64).wrapping_mul(1_000_000_000).wrapping_add(nanoseconds as u64)
}

/// What the kernel knows of the guest's code.
pub trait Code {
    /// The protection (`PROT_*`) of a range, if it is executable code that may be
    /// patched.
    fn protection(&self, start: u64, end: u64) -> Option<u32>;

    /// Start and end of the mapping around an address.
    fn text_around(&self, address: u64) -> Option<(u64, u64)>;

    /// The known sites in the mapping around an address, in order; `None` if that is not code of a
    /// file that never changes.
    fn known_sites(&self, address: u64) -> Option<Vec<KnownSite>>;

    /// Remembers a site for every program that maps the same file, if that never changes.
    fn remember_site(&self, site: &KnownSite);
}

/// A system call site at which a program has trapped, and whose last instruction before the
/// `syscall` can move.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KnownSite {
    /// Address of its `syscall`.
    pub syscall: u64,
    /// Its code.
    pub code: SiteCode,
}

/// The code of a known site. It is compared before it is replaced, since a program may have changed its
/// own copy of a file.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SiteCode {
    /// The last bytes are the instruction and the `syscall`.
    pub(crate) bytes: [u8; 9],
    /// Bytes of the instruction.
    pub(crate) prefix: u8,
}

/// When a site is patched.
#[derive(Clone, Copy, Debug)]
pub struct Patience {
    /// After so many traps in a row; a patch costs as much as a few of them.
    pub traps: u32,
    /// Instructions behind the `syscall` may move: no thread may be about to execute them
    /// without the kernel's knowing.
    pub may_move_behind: bool,
}

impl Patience {
    /// At once: the patches travel in an image.
    pub const NONE: u32 = 0;
    /// In a copy, which may live for one request.
    pub const OF_COPY: u32 = 2;
    /// In a program that may end at once, as those that shells start do.
    pub const OF_PROGRAM: u32 = 4;
}

/// Where the guest's vdso finds what it needs, in the first slots of the gate.
#[derive(Clone, Copy, Debug)]
pub struct VdsoSlots {
    /// Address of the kernel's code for it.
    pub clock: u64,
    /// Address of the offsets of the guest's clocks.
    pub offsets: u64,
}

/// What has been patched.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Patched {
    /// Nothing.
    Nothing,
    /// The site, with what comes before the `syscall`.
    Before,
    /// The site, with what comes behind it: the frames of all threads of the address space
    /// have to go through [`SystemCallSites::relocated`].
    Behind,
}

/// The `syscall` instructions of an address space, which a platform may replace by something
/// faster, and the code that it puts beside the guest's for that. Saved, as is what it has
/// changed in the guest's memory: a copy never traps at a site that was patched before.
///
/// A platform on which `syscall` is fast returns [`Patched::Nothing`] and every address as it is.
/// A default value is that of an address space without a program.
pub trait SystemCallSites: Saved + Default {
    /// Prepares an address space that gets a new program: its code can find `vdso` then. What was
    /// there of another program is gone.
    ///
    /// # Errors
    /// The host cannot map it.
    fn create(&self, vdso: VdsoSlots) -> Result<()>;

    /// Those of a forked address space, which has a copy of the memory.
    fn copy(&self) -> Self;

    /// The memory beside the guest's that a freeze has to save: start and bytes.
    fn mapped_range(&self) -> (u64, u64);

    /// Rewrites the site of the trapped system call in `frame` if its form is known and it
    /// has trapped often enough. Failure leaves the site as it is: the trap is always
    /// correct.
    fn patch(&self, frame: &Frame, code: &dyn Code, patience: Patience) -> Patched;

    /// Where a thread goes that is to execute again the system call that it
    /// returned from at `rip`: the instruction, or what replaced it.
    fn restart_address(&self, rip: u64) -> u64;

    /// If the frame faulted at a `syscall` that was replaced: sends it to the replacement.
    fn restart_displaced(&self, frame: &Frame) -> bool;

    /// Where the instruction at `rip` is now. For addresses that a program has kept:
    /// those in the frames of its signal handlers.
    fn relocated(&self, rip: u64) -> u64;

    /// The address that a program is to see in place of `rip`, if that is in a replacement:
    /// unwinding tables know nothing of those.
    fn as_seen(&self, rip: u64) -> u64;

    /// Whether a fault is of a vCPU that found code not executable, since another one
    /// was writing to it: it is to try again.
    fn is_being_written(&self, frame: &Frame, code: &dyn Code) -> bool;

    /// Puts back all that was replaced, and replaces nothing until [`SystemCallSites::replace_again`]:
    /// somebody looks at the code, and writes to it. Only in the address space itself.
    fn put_back(&self, code: &dyn Code);

    /// Sites are replaced again.
    fn replace_again(&self);
}
