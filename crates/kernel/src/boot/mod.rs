//! The zygote: from the first instruction to a running guest.
//!
//! A zygote does everything that does not depend on the function, installs the
//! host-call filter and waits. A start command makes it a fresh sandbox
//! ([`program`]), a thaw command a copy of an image ([`thaw`]). Statics in this
//! folder hold what every boot rebuilds.
#![allow(unsafe_code)]

pub mod program;
mod template;
pub mod thaw;

use thaw_abi::control::{
    MSG_FAILED, MSG_READY, MSG_START, MSG_THAW, SINGLE_PROCESS_NAME, TEMPLATE_NAME,
};
use thaw_abi::filter::List;

use crate::errno::Result;
use crate::host::{blobs, control, phases};
use crate::mm::{arena, heap, lazy, populate};
use crate::platform::host::{self, Populate};
use crate::platform::{self, clock, fault, filter, panic, vcpu};

/// Entry point of the freestanding program.
///
/// # Safety
/// `stack` must be the initial stack that the host made.
pub unsafe extern "C" fn start(stack: *const u64) -> ! {
    // SAFETY: the caller's promise (System V ABI, 3.4.1).
    let find = |kind| unsafe { find_auxiliary(stack, kind) };
    let own = Segments { headers: find(AT_PHDR), count: find(AT_PHNUM) };
    // SAFETY: as above.
    let list = unsafe { list_of_name(stack) };
    if let Err(error) = become_zygote(find(AT_SYSINFO_EHDR), &own, list) {
        crate::console!("thaw zygote cannot set itself up: {error:?}");
        panic::exit(panic::PANIC_EXIT_CODE)
    }
    vcpu::leave_first_stack(zygote_main)
}

const AT_PHDR: u64 = 3;
const AT_PHNUM: u64 = 5;
const AT_SYSINFO_EHDR: u64 = 33;

/// Where the kernel's own program headers lie.
struct Segments {
    headers: u64,
    count: u64,
}

/// Which host calls the zygote parent wants the zygote to make: its name says so.
///
/// # Safety
/// `stack` must be the initial stack of a program.
unsafe fn list_of_name(stack: *const u64) -> List {
    // SAFETY: the caller's promise; the first argument is a C string.
    let name = unsafe { core::ffi::CStr::from_ptr(stack.add(1).read() as *const _) };
    if name == TEMPLATE_NAME {
        List::Templates
    } else if name == SINGLE_PROCESS_NAME {
        List::SingleProcess
    } else {
        List::General
    }
}

/// Finds a value in the auxiliary vector behind arguments and environment.
///
/// # Safety
/// `stack` must be the initial stack of a program.
unsafe fn find_auxiliary(stack: *const u64, kind: u64) -> u64 {
    // SAFETY: the caller's promise covers every word up to AT_NULL.
    unsafe {
        let mut at = stack.add(1 + stack.read() as usize + 1);
        while at.read() != 0 {
            at = at.add(1);
        }
        at = at.add(1);
        while at.read() != 0 {
            if at.read() == kind {
                return at.add(1).read();
            }
            at = at.add(2);
        }
    }
    0
}

/// Touches everything that a boot is going to touch, so that no boot waits for
/// a page fault of the kernel's own.
fn touch(own: &Segments, list: List) {
    const PT_LOAD: u32 = 1;
    const WRITABLE: u32 = 2;
    for i in 0..own.count {
        let header = (own.headers + i * 56) as *const u32;
        // SAFETY: the host has mapped the program headers with the program.
        let (kind, flags, start, len) = unsafe {
            let words = header.cast::<u64>();
            (header.read(), header.add(1).read(), words.add(2).read(), words.add(5).read())
        };
        if kind == PT_LOAD {
            let first = start & !4095;
            let how = if flags & WRITABLE != 0 { Populate::Write } else { Populate::Read };
            if flags & WRITABLE != 0 {
                let end = (start + len).next_multiple_of(4096);
                arena::set_variables(first, end - first);
            }
            let _ = host::populate(first, (start + len - first).next_multiple_of(4096), how);
        }
    }
    let own = [
        (vcpu::MESSAGE_BUFFER, 32 << 10),
        (control::FDS_BUFFER, 4096),
        (lazy::TABLE, 8192),
        (populate::TABLE, 8192),
        (blobs::TABLE, 8192),
    ];
    for (start, len) in vcpu::used_from_the_beginning().into_iter().chain(own) {
        let _ = host::populate(start, len, Populate::Write);
    }
    if list != List::Templates {
        // What a template touches, its copies would have to copy.
        heap::touch_front();
    }
    clock::monotonic_ns();
}

fn become_zygote(vdso: u64, own: &Segments, list: List) -> Result<()> {
    platform::upcalls::register(&crate::upcalls::Kernel);
    control::register_handler(crate::messages::handle);
    vcpu::begin_first()?;
    heap::map_front()?;
    clock::find_host_vdso(vdso);
    fault::install_handlers()?;
    touch(own, list);
    if list == List::Templates {
        template::keep_capabilities()?;
    }
    filter::install(list)?;
    Ok(())
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
    match outcome {
        Ok(()) => crate::task::carrier::run(),
        Err(error) => fail(error.name().as_bytes()),
    }
}

/// Tells the host why this sandbox cannot run, and ends it.
pub fn fail(reason: &[u8]) -> ! {
    // It may quote a name of any length.
    const LONGEST: usize = 4096;
    control::send(MSG_FAILED, 0, &reason[..reason.len().min(LONGEST)], &[]);
    panic::exit(panic::PANIC_EXIT_CODE)
}
