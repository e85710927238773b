//! The top of the kernel as what lies below sees it: where system calls, faults and signals of
//! the host come in from the platform, and what processes ask of the layers above theirs.

use alloc::sync::Arc;

use thaw_abi::control::{FLAG_FREEZE_AT_ENTRY, FLAG_NO_PATCHING};

use crate::exec::missing;
use crate::freeze;
use crate::fs::{locks, tty};
use crate::ipc::mqueue::notification;
use crate::ipc::sysv;
use crate::mm::{AddressSpace, lazy, shared};
use crate::platform::cpu;
use crate::platform::machine::{Patched, Patience, SystemCallSites};
use crate::platform::registers::{Frame, SIGSEGV, is_memory_fault};
use crate::platform::upcalls::{Ended, Upcalls};
use crate::platform::user::UserAddress;
use crate::state::kernel;
use crate::syscall::trace;
use crate::task::hooks::Hooks;
use crate::task::host_process::{self, own_space};
use crate::task::signal::{self, Signal};
use crate::task::{Process, thread};

/// The kernel.
pub struct Kernel;

impl Upcalls for Kernel {
    fn system_call(&self, frame: &Frame) {
        crate::syscall::perform(frame);
    }

    fn trapped_system_call(&self, frame: &Frame) {
        patch(frame);
        crate::syscall::perform(frame);
    }

    fn fault(&self, frame: &Frame) {
        if is_memory_fault(frame.signal()) && lazy::map_page(frame.address()) {
            // It is none any more.
            frame.set_signal(0);
            return;
        }
        let space = own_space();
        if frame.signal() == SIGSEGV && space.gate.restart_displaced(frame) {
            // The thread was at a `syscall` that has been patched away under it.
            return;
        }
        if frame.signal() == SIGSEGV && space.gate.is_being_written(frame, &**space) {
            frame.set_rip(space.gate.relocated(frame.rip()));
            return;
        }
        if cpu::is_remembered() && is_at_cpuid(frame) {
            answer_cpuid(frame);
            return;
        }
        signal::guest_fault(frame);
    }

    fn map_missing(&self, address: u64, code: i32, may_page_in: bool) -> bool {
        lazy::map_page(address) || may_page_in && shared::page_in(&own_space(), address, code)
    }

    fn is_in_vdso(&self, address: u64) -> bool {
        own_space().is_in_vdso(address)
    }

    fn before_return(&self, frame: &Frame) {
        signal::before_return(frame);
    }

    fn begin_thread(&self) {
        thread::begin();
    }

    fn run_vcpu(&self) -> ! {
        host_process::run()
    }

    fn interrupt_idle(&self, vcpu: usize) {
        host_process::end_wait(vcpu);
    }

    fn child_ended(&self, pid: u32) -> Ended {
        host_process::twins::has_ended(pid)
    }

    fn panicked(&self) {
        host_process::tell_of_panic();
    }
}

impl Hooks for Kernel {
    fn freeze_if_due(&self) -> bool {
        freeze::freeze_if_due()
    }

    fn process_ends(&self, process: &Process) {
        locks::release_process(process);
        tty::job::process_ended(process);
        sysv::undo_semaphores(process);
        notification::process_ended(process);
        kernel().aio.remove_all(process);
    }

    fn process_ended(&self, process: &Process) {
        missing::process_ended(process);
        crate::remote::process_ended(process);
        sysv::process_ended(process);
    }

    fn fatal_fault(&self, frame: &Frame, signal: Signal, code: i32, address: u64) {
        trace::fatal_fault(frame, signal, code, address);
    }

    fn sandbox_ends(&self) {
        missing::process_ended(&thread::current().process);
        trace::summary();
    }
}

/// Patches the site of a trapped system call, if that pays.
fn patch(frame: &Frame) {
    let (kernel, space) = (kernel(), own_space());
    let memory: &AddressSpace = &space;
    let flags = kernel.config.get().flags;
    if flags & FLAG_NO_PATCHING != 0 {
        return;
    }
    let traps = match kernel.generation.get() {
        0 if flags & FLAG_FREEZE_AT_ENTRY != 0 => Patience::NONE,
        0 => Patience::OF_PROGRAM,
        _ => Patience::OF_COPY,
    };
    let patience = Patience { traps, may_move_behind: host_process::own_host_process().is_alone() };
    if memory.gate.patch(frame, memory, patience) == Patched::Behind {
        for thread in kernel.tasks.all_threads() {
            if core::ptr::eq(Arc::as_ptr(&thread.process.mm()), &*space) {
                let frame = thread.frame();
                frame.set_rip(space.gate.relocated(frame.rip()));
            }
        }
    }
}

/// Whether the guest's `cpuid` instruction has faulted: a general protection fault at these two
/// bytes.
fn is_at_cpuid(frame: &Frame) -> bool {
    const GENERAL_PROTECTION: u64 = 13;
    const CPUID: [u8; 2] = [0x0f, 0xa2];
    frame.signal() == SIGSEGV
        && frame.trap() == GENERAL_PROTECTION
        && UserAddress(frame.rip()).read::<[u8; 2]>() == Ok(CPUID)
}

/// Does what the instruction does. It clears the upper halves of the registers.
fn answer_cpuid(frame: &Frame) {
    let found = cpu::cpuid(frame.rax() as u32, frame.rcx() as u32);
    frame.set_rax(found.eax.into());
    frame.set_rbx(found.ebx.into());
    frame.set_rcx(found.ecx.into());
    frame.set_rdx(found.edx.into());
    frame.set_rip(frame.rip() + 2);
}
