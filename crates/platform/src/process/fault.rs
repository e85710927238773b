//! What the host's signals mean: system calls that are not patched, faults of
//! the guest, faults of the kernel on guest memory, and memory that a thaw has
//! left to be mapped on first touch.
#![allow(unsafe_code)]

use core::sync::atomic::Ordering::Relaxed;

use thaw_abi::layout::{KERNEL_BASE, LAYOUT_END};

use super::calls::{hostcall, nr};
use super::filter::AUDIT_ARCH_X86_64;
use super::segment::Interrupted;
use super::{HostProcesses, copies, entry, memory, segment, vcpu};
use crate::boot_area::{TWIN_TO_BE, of_process};
use crate::errno::Result;
use crate::machine::{ThreadState, Threads};
use crate::registers::{
    DEBUG_EXCEPTION, Frame, MachineContext, RETURN_FULL, SIGBUS, SIGSEGV, SIGTRAP, TRAP_FLAG,
    TrapFrame, is_memory_fault,
};
use crate::thread::KERNEL_STACK_SIZE;
use crate::upcalls::Ended;
use crate::{kernel_lock, upcalls};

const SIGILL: u32 = 4;
const SIGFPE: u32 = 8;
const SIGPIPE: u32 = 13;
pub(super) const SIGCHLD: u32 = 17;
const SIGSYS: u32 = 31;

/// `siginfo_t`, as far as faults use it.
#[repr(C)]
pub struct HostSignalInfo {
    signal: i32,
    errno: i32,
    code: i32,
    pad: i32,
    address: u64,
    /// `si_status` of `SIGCHLD`.
    status: i32,
    /// `si_arch` of `SIGSYS`.
    arch: u32,
}

impl HostSignalInfo {
    /// Whether a system call of another architecture was made: `int 0x80`, or any in code of 32 bits.
    fn is_of_foreign_call(&self, signal: u32) -> bool {
        signal == SIGSYS && self.arch != AUDIT_ARCH_X86_64
    }
}

/// `si_code` of what no address is known of.
const SI_KERNEL: i32 = 0x80;
/// Trap number of a general protection fault (`#GP`).
const GENERAL_PROTECTION: u64 = 13;

/// What the entry code does next.
#[repr(C)]
pub struct Continuation {
    frame: *mut TrapFrame,
    /// 1: call [`handle`]; 0: resume the frame.
    handle: u64,
}

/// The signal with which the host rings the doorbell: there is a message that a guest which
/// never waits would not see.
pub const SIGUSR1: u32 = 10;
/// The signal of the alarm that the kernel sets for the guest's timers.
pub const SIGALRM: u32 = 14;

/// In a frame: a system call came to the direct entry while it was closed.
const CLOSED_DOOR: u32 = u32::MAX;

/// First half of the trapped entry, on the signal stack: decides what to do and
/// puts the interrupted registers where that needs them.
pub(crate) extern "C" fn prologue(
    signal: u32,
    info: &HostSignalInfo,
    context: &MachineContext,
    local: *mut TrapFrame,
) -> Continuation {
    // The guest's vdso runs kernel text and the host's vdso on the guest's stack:
    // that is the guest. The kernel runs the host's vdso on its own.
    let in_kernel = context.rip >= KERNEL_BASE && context.rsp >= KERNEL_BASE;
    let interrupted = match in_kernel {
        false => Interrupted::Guest,
        true if vcpu::is_on_signal_stack(local as u64, context.rsp) => Interrupted::Handler,
        true => Interrupted::Kernel,
    };
    segment::take_gs(local as u64, interrupted);
    if matches!(signal, SIGUSR1 | SIGALRM | SIGCHLD) {
        return notice(signal, info, context, local, in_kernel);
    }
    let is_foreign = info.is_of_foreign_call(signal);
    if signal == SIGSYS && context.rip >= LAYOUT_END && !is_foreign {
        // Only the host's vdso lies there: it has fallen back to a system call. The kernel reads clocks, too, so it
        // would have found out; a guest that calls the host's code by itself has no right to that.
        if in_kernel || vcpu::block().thread.get().is_null() {
            crate::panic::die_with("the host's clock source has no vdso clock; see `thaw doctor`")
        }
        return continue_in_kernel(forbidden_call(info, context));
    }
    let memory_fault = is_memory_fault(signal);
    if !in_kernel {
        if vcpu::block().thread.get().is_null() {
            die_in_kernel(signal, info, context)
        }
        if entry::is_at_closed_entry(context.rip) {
            let call = frame_from(CLOSED_DOOR, info, context, context.rcx);
            return continue_in_kernel(TrapFrame { orig_rax: context.rax, ..call });
        }
        // A step can end in the direct entry's first instructions.
        let rip = entry::resumable(context.rip);
        return continue_in_kernel(frame_from(signal, info, context, rip));
    }
    if signal == SIGTRAP && context.trap == DEBUG_EXCEPTION {
        // The guest steps through its instructions and has come in by the direct entry:
        // it goes on with that when the call returns, with the flags in its frame.
        let mut frame = frame_from(signal, info, context, context.rip);
        if !entry::is_before_flags_are_saved(context.rip) {
            frame.rflags &= !TRAP_FLAG;
        }
        return resume(local, frame);
    }
    // From here on this vCPU has the kernel lock.
    let fault_exit = memory_fault.then(|| copies::fault_exit(context.rip)).flatten();
    let may_page_in = fault_exit.as_ref().is_some_and(|exit| exit.may_page_in);
    let is_there =
        memory_fault && upcalls::kernel().map_missing(info.address, info.code, may_page_in);
    let resume_at = match is_there {
        true => Some(context.rip),
        false => fault_exit.map(|exit| exit.resume_at),
    };
    match resume_at {
        Some(_) if is_on_its_way_out(context) => begin_return_again(),
        Some(rip) => resume(local, frame_from(signal, info, context, rip)),
        None => die_in_kernel(signal, info, context),
    }
}

/// A host process of the sandbox has ended. One that was killed, or that the
/// kernel has ended in a panic, may have held the kernel lock and anything
/// else: the sandbox ends with it.
fn child_ended(info: &HostSignalInfo) {
    const CLD_EXITED: i32 = 1;
    // `si_pid` lies where other signals have an address.
    let pid = info.address as u32;
    let ended = upcalls::registered().map_or(Ended::Unknown, |kernel| kernel.child_ended(pid));
    let twin = of_process().twin.load(Relaxed);
    // The first process may just be forking one; a number may have been that of a twin once.
    let is_own_twin = twin != 0 && (twin == TWIN_TO_BE || twin == pid);
    let _ = of_process().twin.compare_exchange(pid, 0, Relaxed, Relaxed);
    let is_twin = ended == Ended::Twin || ended == Ended::Unknown && is_own_twin;
    // A twin holds nothing.
    if is_twin || info.code == CLD_EXITED && info.status == 0 {
        return;
    }
    if info.code != CLD_EXITED {
        crate::console!(
            "thaw kernel: the host has ended a process of the sandbox with signal {}; it may be out of memory or CPU time",
            info.status
        );
    }
    crate::panic::tell_others();
    crate::panic::end_all()
}

/// Goes on with `frame` at the top of the running thread's kernel stack, which
/// is unused while the guest runs.
fn continue_in_kernel(frame: TrapFrame) -> Continuation {
    let at = top_frame();
    // SAFETY: see above.
    unsafe { at.write(frame) };
    Continuation { frame: at, handle: 1 }
}

/// Puts the registers back at once.
fn resume(local: *mut TrapFrame, frame: TrapFrame) -> Continuation {
    // SAFETY: reserved by the entry code.
    unsafe { local.write(frame) };
    Continuation { frame: local, handle: 0 }
}

fn top_frame() -> *mut TrapFrame {
    (vcpu::block().kernel_stack_top.get() as *mut TrapFrame).wrapping_sub(1)
}

/// The host has rung the doorbell, the alarm has gone off, or a host process has ended.
fn notice(
    signal: u32,
    info: &HostSignalInfo,
    context: &MachineContext,
    local: *mut TrapFrame,
    in_kernel: bool,
) -> Continuation {
    let block = vcpu::block_of_stack(context.rsp);
    match signal {
        SIGUSR1 => {
            block.rings.fetch_add(1, Relaxed);
            block.doorbell_rang.store(true, Relaxed);
        }
        SIGALRM => block.alarmed.store(true, Relaxed),
        _ => child_ended(info),
    }
    if signal != SIGCHLD && block.thread.get().is_null() {
        // The host goes on with an interrupted wait by itself: end it.
        upcalls::kernel().interrupt_idle(block.number.get());
    }
    if !core::ptr::eq(block, vcpu::block()) {
        // A vCPU that is just starting: its idle loop will look.
        return resume(local, frame_from(SIGUSR1, info, context, context.rip));
    }
    interrupt(info, context, local, in_kernel)
}

/// A guest is interrupted; the kernel looks when it is done, or at once if it is
/// about to return and would not look any more.
///
/// No handler may put a guest's registers back by itself: a signal that arrives while
/// the handler runs finds the kernel at work, and would be overlooked.
fn interrupt(
    info: &HostSignalInfo,
    context: &MachineContext,
    local: *mut TrapFrame,
    in_kernel: bool,
) -> Continuation {
    // SAFETY: the running thread lives as long as it runs.
    let Some(thread) = (unsafe { vcpu::block().thread.get().as_ref() }) else {
        return resume(local, frame_from(SIGUSR1, info, context, context.rip));
    };
    thread.needs_attention();
    if !in_kernel {
        let rip = entry::resumable(context.rip);
        return continue_in_kernel(frame_from(SIGUSR1, info, context, rip));
    }
    if is_on_its_way_out(context) {
        return begin_return_again();
    }
    resume(local, frame_from(SIGUSR1, info, context, context.rip))
}

/// Whether the running thread was about to return to the guest, and would not look at
/// what is due any more.
fn is_on_its_way_out(context: &MachineContext) -> bool {
    let below_top = vcpu::block().kernel_stack_top.get().wrapping_sub(context.rsp);
    entry::is_returning(context.rip) && below_top < KERNEL_STACK_SIZE as u64
}

/// Begins the running thread's return again: the frame being restored is still
/// complete.
fn begin_return_again() -> Continuation {
    let frame = top_frame();
    // SAFETY: the frame of the running thread, which is on its way out.
    unsafe {
        (*frame).signal = SIGUSR1;
        // The registers that a fast return finds in place are the handler's now.
        (*frame).how = RETURN_FULL;
    }
    Continuation { frame, handle: 1 }
}

fn frame_from(signal: u32, info: &HostSignalInfo, context: &MachineContext, rip: u64) -> TrapFrame {
    if info.is_of_foreign_call(signal) {
        return foreign_call(info, context, rip);
    }
    frame_of(signal, info, context, rip)
}

/// A call that the guest has no right to make is a general protection fault.
fn forbidden_call(info: &HostSignalInfo, context: &MachineContext) -> TrapFrame {
    let (code, trap) = (SI_KERNEL, GENERAL_PROTECTION);
    let frame = frame_of(SIGSEGV, info, context, context.rip.wrapping_sub(2));
    TrapFrame { code, address: 0, trap, error: 0, ..frame }
}

/// A call of another architecture is what it is on a kernel that does not serve any: a general protection
/// fault at the instruction, of which each has two bytes.
fn foreign_call(info: &HostSignalInfo, context: &MachineContext, rip: u64) -> TrapFrame {
    /// The interrupt's entry in the interrupt table (Intel SDM vol. 3, 6.13).
    const INTERRUPT_0X80: u64 = 0x80 << 3 | 2;
    // The fast calls of 32 bits go on in the host's vdso, whatever made them: where is not known then, and a
    // handler that returns faults again.
    let at = if rip >= LAYOUT_END { 0 } else { rip.wrapping_sub(2) };
    TrapFrame {
        code: SI_KERNEL,
        address: 0,
        trap: GENERAL_PROTECTION,
        error: INTERRUPT_0X80,
        ..frame_of(SIGSEGV, info, context, at)
    }
}

fn frame_of(signal: u32, info: &HostSignalInfo, context: &MachineContext, rip: u64) -> TrapFrame {
    let mut frame = TrapFrame {
        orig_rax: if signal == SIGSYS { context.rax } else { u64::MAX },
        rip,
        signal,
        code: info.code,
        address: info.address,
        trap: context.trap,
        error: context.error,
        ..context.to_frame()
    };
    // SAFETY: the host always saves the vector state; xmm0 lies at offset 160
    // of the legacy area (Intel SDM vol. 1, 13.4.1).
    unsafe {
        core::ptr::copy_nonoverlapping(
            (context.fpstate as *const u8).add(160),
            frame.xmm.as_mut_ptr().cast::<u8>(),
            256,
        );
    }
    frame
}

/// Second half, on the thread's kernel stack with the guest's vector state in
/// the registers.
pub(crate) extern "C" fn handle(frame: &Frame) {
    kernel_lock::acquire();
    // SAFETY: the running thread lives as long as it runs.
    let thread = unsafe { vcpu::block().thread.get().as_ref() };
    let mut has_stepped = false;
    if let Some(thread) = thread {
        HostProcesses::keep_own_gs(thread);
        has_stepped = thread.leaving.end_step(frame);
        if has_stepped {
            thread.needs_attention();
        }
    }
    match frame.signal() {
        SIGTRAP if has_stepped && frame.trap() == DEBUG_EXCEPTION => frame.set_signal(SIGUSR1),
        SIGSYS => {
            // As the real instruction would leave them.
            frame.set_rcx(frame.rip());
            frame.set_r11(frame.rflags());
            frame.set_signal(0);
            upcalls::kernel().trapped_system_call(frame);
        }
        CLOSED_DOOR => {
            frame.set_r11(frame.rflags());
            frame.set_signal(0);
            upcalls::kernel().system_call(frame);
        }
        SIGUSR1 => {}
        _ => upcalls::kernel().fault(frame),
    }
    kernel_lock::release();
}

fn die_in_kernel(signal: u32, info: &HostSignalInfo, context: &MachineContext) -> ! {
    crate::console!(
        "thaw kernel panicked: signal {signal} (code {}) at rip {:#x}, address {:#x}\n\
         rax {:#x} rbx {:#x} rcx {:#x} rdx {:#x} rsi {:#x} rdi {:#x} rbp {:#x} rsp {:#x}\n\
         r8 {:#x} r9 {:#x} r10 {:#x} r11 {:#x} r12 {:#x} r13 {:#x} r14 {:#x} r15 {:#x}",
        info.code,
        context.rip,
        info.address,
        context.rax,
        context.rbx,
        context.rcx,
        context.rdx,
        context.rsi,
        context.rdi,
        context.rbp,
        context.rsp,
        context.r8,
        context.r9,
        context.r10,
        context.r11,
        context.r12,
        context.r13,
        context.r14,
        context.r15
    );
    crate::panic::print_stack(context.rsp);
    crate::panic::tell_others();
    crate::panic::end_all()
}

/// Makes the host deliver signals of this host thread on its vCPU's signal stack.
pub(super) fn use_signal_stack(vcpu: u32) -> Result<()> {
    /// `stack_t`.
    #[repr(C)]
    struct Stack {
        base: u64,
        flags: u64,
        size: u64,
    }
    let stack = Stack { base: vcpu::signal_stack(vcpu), flags: 0, size: vcpu::SIGNAL_STACK_SIZE };
    // SAFETY: the signal stack is mapped and used for nothing else.
    unsafe { hostcall(nr::SIGALTSTACK, [&raw const stack as u64, 0, 0, 0, 0, 0]) }.map(drop)
}

/// Makes `cpuid` fault (arch_prctl(2)): a general protection fault, and so a `SIGSEGV`.
pub(super) fn on_cpuid() -> Result<()> {
    const ARCH_CPUID_FAULT: u64 = 0x1012;
    // SAFETY: changes what an instruction does that the kernel does not use any more.
    unsafe { hostcall(nr::ARCH_PRCTL, [ARCH_CPUID_FAULT, 0, 0, 0, 0, 0]) }.map(drop)
}

/// Installs the trapped entry for all signals that can mean something.
pub(super) fn install_handlers() -> Result<()> {
    /// `struct kernel_sigaction`.
    #[repr(C)]
    struct Action {
        handler: u64,
        flags: u64,
        restorer: u64,
        mask: u64,
    }
    const SA_SIGINFO: u64 = 4;
    const SA_RESTORER: u64 = 0x0400_0000;
    const SA_ONSTACK: u64 = 0x0800_0000;
    const SA_RESTART: u64 = 0x1000_0000;
    const SA_NODEFER: u64 = 0x4000_0000;
    /// No zombies: nobody waits for host processes.
    const SA_NOCLDWAIT: u64 = 2;
    /// The host may stop processes and let them go on.
    const SA_NOCLDSTOP: u64 = 1;
    const SIG_IGN: u64 = 1;
    use_signal_stack(0)?;
    memory::keep_from_children(vcpu::signal_stack(0), vcpu::SIGNAL_STACK_SIZE);
    let install = |signal: u32, action: &Action| {
        let args = [signal as u64, core::ptr::from_ref(action) as u64, 0, 8, 0, 0];
        // SAFETY: the handler never returns to the host's restorer.
        unsafe { hostcall(nr::RT_SIGACTION, args) }.map(drop)
    };
    let entry = &raw const entry::thaw_trap_entry as u64;
    let of_children = SA_NOCLDWAIT | SA_NOCLDSTOP;
    let action = Action {
        handler: entry,
        flags: SA_SIGINFO | SA_RESTORER | SA_ONSTACK | SA_RESTART | SA_NODEFER | of_children,
        restorer: entry,
        mask: 0,
    };
    for signal in [SIGILL, SIGTRAP, SIGBUS, SIGFPE, SIGUSR1, SIGALRM, SIGCHLD, SIGSEGV, SIGSYS] {
        install(signal, &action)?;
    }
    // The guest's thread that writes gets its own signal.
    install(SIGPIPE, &Action { handler: SIG_IGN, flags: 0, restorer: 0, mask: 0 })
}
