//! The initial stack: arguments, environment and auxiliary vector (System V
//! ABI 3.4.1, getauxval(3)).

use alloc::vec::Vec;

use thaw_abi::layout::GUEST_MAX;

use super::Program;
use super::elf::Loaded;
use crate::errno::Result;
use crate::mm::space::{MapRequest, Placement};
use crate::mm::vma::VmaFlags;
use crate::platform::machine::{PROT_EXEC, PROT_READ, PROT_WRITE};
use crate::platform::user::UserAddress;
use crate::state::kernel;
use crate::task::Process;
use crate::task::process::RLIMIT_STACK;

/// Largest stack, whatever the limit says: it is mapped as a whole.
const STACK_MAX: u64 = 64 << 20;
/// Space between the stack and the mappings below it.
const STACK_GAP: u64 = 256 << 20;

/// Randomized places of a program (address space layout randomization). All
/// copies of an image share those of the original.
pub struct Layout {
    stack_top: u64,
    /// New mappings go below.
    pub mmap_top: u64,
    brk_gap: u64,
}

impl Layout {
    /// Chooses a layout for a process.
    pub fn of(process: &Process) -> Self {
        // 22 bits of pages for the stack, 28 for mappings and 13 for the heap:
        // as Linux on x86-64.
        let stack_top = GUEST_MAX - (process.random_bits(0x3f_ffff) << 12);
        let mmap_top = stack_top - STACK_MAX - STACK_GAP - (process.random_bits(0xfff_ffff) << 12);
        let brk_gap = process.random_bits(0x1fff) << 12;
        Self { stack_top, mmap_top, brk_gap }
    }

    /// Where the heap begins, behind a program that ends at `end`.
    pub fn brk_start(&self, end: u64) -> u64 {
        end + self.brk_gap
    }
}

const AT_PHDR: u64 = 3;
const AT_PHENT: u64 = 4;
const AT_PHNUM: u64 = 5;
const AT_PAGESZ: u64 = 6;
const AT_BASE: u64 = 7;
const AT_FLAGS: u64 = 8;
const AT_ENTRY: u64 = 9;
const AT_UID: u64 = 11;
const AT_EUID: u64 = 12;
const AT_GID: u64 = 13;
const AT_EGID: u64 = 14;
const AT_PLATFORM: u64 = 15;
const AT_HWCAP: u64 = 16;
const AT_CLKTCK: u64 = 17;
const AT_SECURE: u64 = 23;
const AT_RANDOM: u64 = 25;
const AT_HWCAP2: u64 = 26;
const AT_EXECFN: u64 = 31;
const AT_SYSINFO_EHDR: u64 = 33;
const AT_MINSIGSTKSZ: u64 = 51;

/// Maps the stack, fills it and returns the initial stack pointer.
pub fn build(
    process: &Process,
    program: &Program,
    loaded: &Loaded,
    interpreter_base: u64,
    vdso: u64,
    layout: &Layout,
) -> Result<u64> {
    let size = process.limits.borrow_mut()[RLIMIT_STACK].current.clamp(1 << 20, STACK_MAX) & !4095;
    let exec = if loaded.executable_stack { PROT_EXEC } else { 0 };
    process.mm().map(MapRequest {
        placement: Placement::Fixed(layout.stack_top - size),
        len: size,
        prot: PROT_READ | PROT_WRITE | exec,
        flags: VmaFlags::STACK,
        file: None,
        offset: 0,
    })?;

    let mut stack = Stack { at: layout.stack_top - 8 };
    let name = stack.push_string(&program.name)?;
    let environment: Vec<u64> = stack.push_strings(&program.envp)?;
    let arguments: Vec<u64> = stack.push_strings(&program.argv)?;
    let platform = stack.push_string(b"x86_64")?;
    let mut random = [0u8; 16];
    kernel().random.borrow_mut().fill(&mut random);
    let random = stack.push(&random)?;

    let credentials = process.credentials.borrow_mut().clone();
    let users = &credentials.user_namespace;
    let mut words: Vec<u64> = Vec::new();
    words.push(arguments.len() as u64);
    words.extend(&arguments);
    words.push(0);
    words.extend(&environment);
    words.push(0);
    let mut auxiliary = alloc::vec![
        [AT_MINSIGSTKSZ, crate::platform::fpu::size() as u64 + 1024],
        [AT_HWCAP, hardware_capabilities()],
        [AT_PAGESZ, 4096],
        [AT_CLKTCK, 100],
        [AT_PHDR, loaded.program_headers],
        [AT_PHENT, 56],
        [AT_PHNUM, loaded.program_header_count],
        [AT_BASE, interpreter_base],
        [AT_FLAGS, 0],
        [AT_ENTRY, loaded.entry],
        [AT_UID, users.shown_user(credentials.uid).into()],
        [AT_EUID, users.shown_user(credentials.euid).into()],
        [AT_GID, users.shown_group(credentials.gid).into()],
        [AT_EGID, users.shown_group(credentials.egid).into()],
        [AT_SECURE, credentials.is_secure as u64],
        [AT_RANDOM, random],
        // Bit 1: FSGSBASE instructions may be used.
        [AT_HWCAP2, 2],
        [AT_EXECFN, name],
        [AT_PLATFORM, platform],
    ];
    if vdso != 0 {
        auxiliary.insert(0, [AT_SYSINFO_EHDR, vdso]);
    }
    auxiliary.push([0, 0]);
    let auxiliary: Vec<u64> = auxiliary.into_iter().flatten().collect();
    words.extend(&auxiliary);

    let rsp = (stack.at - words.len() as u64 * 8) & !15;
    UserAddress(rsp).write_bytes(bytemuck::cast_slice(&words))?;
    *process.auxiliary_vector.borrow_mut() = auxiliary;
    *process.command_line.borrow_mut() = joined(&program.argv);
    *process.environment.borrow_mut() = joined(&program.envp);
    Ok(rsp)
}

/// Strings one after the other, each NUL-terminated, as `/proc/PID/cmdline` shows them.
pub fn joined(strings: &[Vec<u8>]) -> Vec<u8> {
    let mut all = Vec::new();
    for string in strings {
        all.extend_from_slice(string);
        all.push(0);
    }
    all
}

/// `AT_HWCAP` on x86: edx of CPUID leaf 1.
fn hardware_capabilities() -> u64 {
    crate::platform::cpu::cpuid(1, 0).edx as u64
}

/// A stack that is being filled from the top.
struct Stack {
    at: u64,
}

impl Stack {
    fn push(&mut self, bytes: &[u8]) -> Result<u64> {
        self.at -= bytes.len() as u64;
        UserAddress(self.at).write_bytes(bytes)?;
        Ok(self.at)
    }

    fn push_string(&mut self, string: &[u8]) -> Result<u64> {
        self.push(&[0])?;
        self.push(string)
    }

    fn push_strings(&mut self, strings: &[Vec<u8>]) -> Result<Vec<u64>> {
        let mut addresses = Vec::with_capacity(strings.len());
        for string in strings.iter().rev() {
            addresses.push(self.push_string(string)?);
        }
        addresses.reverse();
        Ok(addresses)
    }
}
