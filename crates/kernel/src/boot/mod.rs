//! The zygote: from the first instruction to a running guest.
//!
//! A zygote does everything that does not depend on the function, installs the
//! host-call filter and waits. A start command makes it a fresh sandbox
//! ([`program`]), a thaw command a copy of an image ([`thaw`]). Statics in this
//! folder hold what every boot rebuilds.
#![allow(unsafe_code)]

mod post_copy;
pub mod program;
mod runtime;
mod template;
pub mod thaw;

use core::ffi::CStr;
use core::num::NonZeroU64;

use thaw_abi::control::{
    Exit, HOST_MEMORY_VARIABLE, MSG_EXIT, MSG_FAILED, MSG_READY, MSG_START, MSG_THAW,
    SINGLE_PROCESS_NAME, TEMPLATE_NAME,
};
use thaw_abi::cpu::MASKED_NAME;
use thaw_abi::filter::List;

use crate::errno::Result;
use crate::host::{control, phases};
use crate::mm::{arena, heap};
use crate::platform;
use crate::platform::boot_area::{BLOBS, MAPPINGS, RANGES};
use crate::platform::cpu;
use crate::platform::machine::{Clocks, Machine, Memory, Populate, Processes, Threads, Vcpus};
use crate::platform::message;
use crate::platform::panic;
use crate::platform::start::{InitialStack, Segment};
use crate::task::host_process;

/// Entry point of the freestanding program.
///
/// # Safety
/// `stack` must be the initial stack that the host made.
pub unsafe extern "C" fn start(stack: *const u64) -> ! {
    // SAFETY: the caller's promise; nobody changes the stack, which is left below.
    let stack = unsafe { InitialStack::new(stack) };
    if let Err(error) = become_zygote(&stack) {
        crate::console!("thaw zygote cannot set itself up: {error:?}");
        Machine::exit(panic::PANIC_EXIT_CODE)
    }
    Machine::leave_first_stack(zygote_main)
}

/// Which host calls the zygote parent wants the zygote to make: its name says so.
fn list_of_name(name: &CStr) -> List {
    if name == TEMPLATE_NAME {
        List::Templates
    } else if name == SINGLE_PROCESS_NAME {
        List::SingleProcess
    } else {
        // That of a masked one, too.
        List::General
    }
}

/// Touches everything that a boot is going to touch, so that no boot waits for
/// a page fault of the kernel's own.
fn touch(own: impl Iterator<Item = Segment>, list: List) {
    const PT_LOAD: u32 = 1;
    const WRITABLE: u32 = 2;
    for segment in own.filter(|segment| segment.kind == PT_LOAD) {
        let first = segment.address & !4095;
        let len = (segment.address + segment.memory_size - first).next_multiple_of(4096);
        let how = if segment.flags & WRITABLE != 0 { Populate::Write } else { Populate::Read };
        if how == Populate::Write {
            arena::set_variables(first, len);
        }
        let _ = Machine::populate(first, len, how);
    }
    let own =
        [MAPPINGS.range(200), RANGES.range(500), BLOBS.range(2000), host_process::first_range()];
    let own = message::next_buffer().into_iter().chain(own);
    for (start, len) in Machine::first_touched().into_iter().chain(own) {
        let _ = Machine::populate(start, len, Populate::Write);
    }
    if list != List::Templates {
        // What a template touches, its copies would have to copy.
        heap::touch_front();
    }
    Machine::monotonic_ns();
}

fn become_zygote(stack: &InitialStack) -> Result<()> {
    let list = list_of_name(stack.name());
    crate::state::set_host_memory(host_memory(stack));
    platform::upcalls::register(&crate::upcalls::Kernel);
    control::register_handler(crate::messages::handle);
    crate::task::hooks::register(&crate::upcalls::Kernel);
    Machine::begin_first()?;
    heap::map_front()?;
    host_process::map_first()?;
    Machine::find_clocks(stack.vdso());
    Machine::catch_guest()?;
    if stack.name() == MASKED_NAME {
        // The filter would not let it.
        cpu::remember();
        Machine::fault_on_cpuid()?;
    }
    touch(stack.segments(), list);
    if list == List::Templates {
        template::keep_capabilities()?;
    }
    Machine::confine(list)?;
    Ok(())
}

/// Bytes of memory that the host has, if it says so.
fn host_memory(stack: &InitialStack) -> Option<NonZeroU64> {
    stack.variable(HOST_MEMORY_VARIABLE)?.to_str().ok()?.parse().ok()
}

extern "C" fn zygote_main() -> ! {
    control::send(MSG_READY, 0, &[], &[]);
    let message = control::receive_command();
    phases::received();
    let outcome = match message.kind {
        MSG_START => program::start(&message),
        MSG_THAW => thaw::thaw(&message),
        _ => fail(b"the boot command is unknown to this kernel"),
    };
    // Its buffer is for the next message.
    drop(message);
    match outcome {
        Ok(()) => host_process::run(),
        Err(error) => fail(error.name().as_bytes()),
    }
}

/// Tells the host why its program cannot be started, with a shell's exit code, and ends the sandbox.
fn cannot_start(code: u8, reason: &[u8]) -> ! {
    say_failed(reason);
    let exit = Exit { code: code.into(), signal: 0 };
    control::send(MSG_EXIT, 0, bytemuck::bytes_of(&exit), &[]);
    Machine::exit(code.into())
}

/// Tells the host why this sandbox cannot run, and ends it.
pub fn fail(reason: &[u8]) -> ! {
    say_failed(reason);
    Machine::exit(panic::PANIC_EXIT_CODE)
}

fn say_failed(reason: &[u8]) {
    // It may quote a name of any length.
    const LONGEST: usize = 4096;
    control::send(MSG_FAILED, 0, &reason[..reason.len().min(LONGEST)], &[]);
}
