//! Host processes, and what they may do.
#![allow(unsafe_code)]

use thaw_abi::filter::{CLONE_COPY, CLONE_PROCESS, CLONE_SIBLING, List};

use core::sync::atomic::Ordering::Relaxed;

use super::calls::{hostcall, nr};
use super::vcpu::Interrupts;
use super::{HostProcesses, filter, vcpu};
use crate::boot_area::{TWIN_TO_BE, of_process};
use crate::errno::Result;
use crate::machine::{Forked, HostFiles, Kinship, Processes, Vcpus};

/// How often a twin looks whether it is to end: a signal that comes between a look and the wait
/// does not end the wait.
const TWIN_LOOKS_NS: u64 = 20_000_000;

impl Processes for HostProcesses {
    fn fork(kinship: Kinship) -> Result<Forked> {
        let flags = match kinship {
            Kinship::Child | Kinship::Twin => CLONE_PROCESS,
            Kinship::Sibling | Kinship::SiblingTwin => CLONE_SIBLING,
            Kinship::Sandbox => CLONE_COPY,
        };
        let is_twin = kinship == Kinship::Twin;
        if is_twin {
            // It can be killed before this process knows its number.
            of_process().twin.store(TWIN_TO_BE, Relaxed);
        }
        // The child has no memory yet where the host delivers signals, and ends if that has none left.
        vcpu::set_interrupts(Interrupts::Held);
        let block = vcpu::block();
        block.rings_at_fork.store(block.rings.load(Relaxed), Relaxed);
        // SAFETY: no flag shares memory; the caller is on memory of its own process.
        let forked = unsafe { hostcall(nr::CLONE, [flags as u64, 0, 0, 0, 0, 0]) };
        if forked == Ok(0) {
            vcpu::touch_signal_stack();
        }
        vcpu::set_interrupts(Interrupts::Delivered);
        if is_twin {
            // A child has the number of its parent's, which it must not end.
            let number = forked.as_ref().map_or(0, |&pid| pid as u32);
            of_process().twin.store(number, Relaxed);
        }
        match forked? {
            0 => Ok(Forked::Child),
            pid => Ok(Forked::Parent { pid: pid as u32 }),
        }
    }

    fn be_twin() -> ! {
        while !Self::has_signal() {
            // Whatever ends the wait, it looks again.
            let _ = Self::poll(&mut [], Some(TWIN_LOOKS_NS));
        }
        Self::exit(0)
    }

    fn end_twin() {
        // It is forgotten when it has ended, of which the host tells.
        match of_process().twin.load(Relaxed) {
            0 | TWIN_TO_BE => {}
            pid => Self::interrupt(pid, pid),
        }
    }

    fn may_fork() -> bool {
        filter::may_clone()
    }

    fn confine(list: List) -> Result<()> {
        filter::install(list)
    }

    fn set_ids(id: u32) -> Result<()> {
        let id = id as u64;
        for number in [nr::SETRESGID, nr::SETRESUID] {
            // SAFETY: touches no memory.
            unsafe { hostcall(number, [id, id, id, 0, 0, 0]) }?;
        }
        Ok(())
    }

    fn set_capabilities(kept: u32) -> Result<()> {
        const LINUX_CAPABILITY_VERSION_3: u32 = 0x2008_0522;
        let header = [LINUX_CAPABILITY_VERSION_3, 0];
        let data = [kept, kept, 0, 0, 0, 0];
        let args = [&raw const header as u64, &raw const data as u64, 0, 0, 0, 0];
        // SAFETY: both arrays have the layout that capset(2) reads (two halves of
        // three words), and live for the call.
        unsafe { hostcall(nr::CAPSET, args) }.map(drop)
    }

    fn new_process_group() -> Result<()> {
        // SAFETY: touches no memory.
        unsafe { hostcall(nr::SETPGID, [0; 6]) }.map(drop)
    }

    fn exit(code: u64) -> ! {
        loop {
            // SAFETY: does not return.
            let _ = unsafe { hostcall(nr::EXIT_GROUP, [code, 0, 0, 0, 0, 0]) };
        }
    }
}
