//! A second platform, made of what is public: it has clocks and one thread state, and no machine.
//! The crate itself includes it for the feature `another-platform`, with which the kernel is
//! compiled against it (`tests/another_platform.rs` of the kernel).
#![allow(unsafe_code)]

use core::cell::Cell;
use core::sync::atomic::{AtomicU32, AtomicU64, Ordering::Relaxed};

use thaw_abi::filter::List;
use thaw_platform::errno::Result;
use thaw_platform::fpu::FpuState;
use thaw_platform::io::{IoSlice, IoSliceMut, IoVec};
use thaw_platform::machine::*;
use thaw_platform::memory::Pages;
use thaw_platform::registers::{Frame, TrapFrame};
use thaw_platform::sync::KernelCell;
use thaw_platform::thread::KernelStack;

/// The platform.
pub struct Nowhere;

impl Platform for Nowhere {
    type SystemCallSites = NoSites;
}

impl Clocks for Nowhere {
    fn find_clocks(_: u64) {}

    fn read_clock(clock: u32) -> (i64, i64) {
        (i64::from(clock), 2)
    }

    fn own_cpu_ns() -> u64 {
        0
    }

    fn process_cpu_ns(_: u32) -> u64 {
        0
    }

    fn guest_clock() -> &'static AtomicU64 {
        static NONE: AtomicU64 = AtomicU64::new(0);
        &NONE
    }
}

/// System call sites that are fast as they are.
#[derive(Default)]
pub struct NoSites;

impl SystemCallSites for NoSites {
    fn create(&self, _: VdsoSlots) -> Result<()> {
        Ok(())
    }

    fn copy(&self) -> Self {
        NoSites
    }

    fn mapped_range(&self) -> (u64, u64) {
        (0, 0)
    }

    fn patch(&self, _: &Frame, _: &dyn Code, _: Patience) -> Patched {
        Patched::Nothing
    }

    fn restart_address(&self, rip: u64) -> u64 {
        rip - 2
    }

    fn restart_displaced(&self, _: &Frame) -> bool {
        false
    }

    fn relocated(&self, rip: u64) -> u64 {
        rip
    }

    fn as_seen(&self, rip: u64) -> u64 {
        rip
    }

    fn is_being_written(&self, _: &Frame, _: &dyn Code) -> bool {
        false
    }

    fn put_back(&self, _: &dyn Code) {}

    fn replace_again(&self) {}
}

/// Methods of a machine that is not there.
macro_rules! missing {
    ($($(#[$unsafe:ident])? fn $name:ident($($argument:ty),*) $(-> $result:ty)?;)*) => {
        $(missing!(@ $($unsafe)? fn $name($($argument),*) $(-> $result)?);)*
    };
    (@ unsafe fn $name:ident($($argument:ty),*) $(-> $result:ty)?) => {
        unsafe fn $name($(_: $argument),*) $(-> $result)? {
            panic!("there is no machine")
        }
    };
    (@ fn $name:ident($($argument:ty),*) $(-> $result:ty)?) => {
        fn $name($(_: $argument),*) $(-> $result)? {
            panic!("there is no machine")
        }
    };
}

impl Memory for Nowhere {
    missing! {
        fn map_anonymous(impl Pages, u32, Sharing) -> Result<()>;
        fn map_file(HostFd, impl Pages, u32, Sharing, u64) -> Result<()>;
        fn protect(impl Pages, u32) -> Result<()>;
        fn unmap(impl Pages) -> Result<()>;
        fn move_pages(impl Pages, impl Pages) -> Result<()>;
        fn discard(impl Pages) -> Result<()>;
        fn remove(impl Pages) -> Result<()>;
        fn populate(u64, u64, Populate) -> Result<()>;
        fn populate_ranges(&[Cell<IoVec>], Populate) -> Result<u64>;
        #[unsafe] fn copy(*mut u8, *const u8, usize) -> usize;
        #[unsafe] fn copy_present(*mut u8, *const u8, usize) -> usize;
        fn store_in_file(&AtomicU64, u64) -> Result<()>;
        fn load_from_file(&AtomicU64) -> Result<u64>;
        #[unsafe] fn compare_exchange(*mut u32, u32, u32) -> Option<u32>;
        fn barrier() -> Result<()>;
    }
}

impl Processes for Nowhere {
    missing! {
        fn fork(Kinship) -> Result<Forked>;
        fn be_twin() -> !;
        fn end_twin();
        fn may_fork() -> bool;
        fn confine(List) -> Result<()>;
        fn set_ids(u32) -> Result<()>;
        fn set_capabilities(u32) -> Result<()>;
        fn new_process_group() -> Result<()>;
        fn exit(u64) -> !;
    }
}

impl Vcpus for Nowhere {
    const MAX_VCPUS: u32 = 1;

    missing! {
        fn begin_first() -> Result<()>;
        fn leave_first_stack(extern "C" fn() -> !) -> !;
        fn begin_forked();
        fn start(u32, usize) -> Result<u32>;
        fn end() -> !;
        fn exit_thread() -> !;
        fn index() -> u32;
        fn first_touched() -> [(u64, u64); 3];
        fn discard_stacks();
        fn number() -> usize;
        fn set_number(usize);
        fn interrupt(u32, u32);
        fn wait(&AtomicU32, u32, Option<u64>);
        fn wake(&AtomicU32, u32);
        fn arm_alarm(u64);
        fn has_signal() -> bool;
        fn take_doorbell() -> bool;
        fn take_alarm() -> bool;
    }
}

impl Threads for Nowhere {
    type State = Registers;

    missing! {
        fn catch_guest() -> Result<()>;
        fn fault_on_cpuid() -> Result<()>;
        fn put_registers_away();
        fn fs_base() -> u64;
        fn set_fs_base(u64);
        fn keep_own_gs(&Registers);
        fn forget_own_gs();
        fn running() -> *const ();
        #[unsafe] fn set_running(*const (), *const Registers);
        #[unsafe] fn switch_from_idle(*const (), &Registers, impl FnOnce());
        fn stack_end(u64) -> u64;
    }
}

impl HostFiles for Nowhere {
    missing! {
        fn read(HostFd, IoSliceMut<'_>) -> Result<usize>;
        fn write(HostFd, IoSlice<'_>) -> Result<usize>;
        fn pread(HostFd, IoSliceMut<'_>, u64) -> Result<usize>;
        fn recv(HostFd, IoSliceMut<'_>, Peek) -> Result<usize>;
        fn recv_datagram(HostFd, &mut [u8], Peek) -> Result<usize>;
        fn receive(HostFd, &mut [u64], &mut FdBuffer, bool) -> Result<Arrived>;
        fn send(HostFd, IoSlice<'_>) -> Result<usize>;
        fn shutdown(HostFd, u32) -> Result<()>;
        fn poll(&mut [PollFd], Option<u64>) -> Result<usize>;
        fn duplicate_to(HostFd, HostFd) -> Result<()>;
        fn close(HostFd);
    }
}

/// The state of a thread that never runs.
pub struct Registers {
    frame: Frame,
    stack: KernelStack,
    fpu: KernelCell<FpuState>,
    attention: AtomicU32,
    bases: [AtomicU64; 2],
}

// SAFETY: it is shared under the kernel lock only.
unsafe impl Sync for Registers {}

/// Its registers may be saved, though they are in a cell.
impl core::panic::RefUnwindSafe for Registers {}

impl ThreadState for Registers {
    fn new(stack: KernelStack, frame: TrapFrame) -> Self {
        Self {
            frame: Frame::new(frame),
            stack,
            fpu: KernelCell::new(FpuState::initial()),
            attention: AtomicU32::new(0),
            bases: Default::default(),
        }
    }

    fn frame(&self) -> &Frame {
        &self.frame
    }

    fn stack(&self) -> &KernelStack {
        &self.stack
    }

    fn stack_pointer(&self) -> u64 {
        self.stack.top()
    }

    fn needs_attention(&self) {
        self.attention.store(1, Relaxed);
    }

    fn is_attention_needed(&self) -> bool {
        self.attention.load(Relaxed) != 0
    }

    fn attended(&self) {
        self.attention.store(0, Relaxed);
    }

    fn fs_base(&self) -> u64 {
        self.bases[0].load(Relaxed)
    }

    fn set_fs_base(&self, base: u64) {
        self.bases[0].store(base, Relaxed);
    }

    fn gs_base(&self) -> u64 {
        self.bases[1].load(Relaxed)
    }

    fn set_gs_base(&self, base: u64) {
        self.bases[1].store(base, Relaxed);
    }

    fn fpu(&self) -> &KernelCell<FpuState> {
        &self.fpu
    }

    fn save_fpu(&self) {}

    fn copy_fpu(&self, running: &Self) {
        self.fpu.borrow_mut().copy_from(&running.fpu.borrow_mut());
    }

    fn reset_fpu(&self) {
        *self.fpu.borrow_mut() = FpuState::initial();
    }

    fn forget_fpu(&self) {}

    fn switch_to_idle(&self) {
        panic!("there is no machine")
    }
}
