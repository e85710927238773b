//! The seccomp filter, compiled from the lists of [`thaw_abi::filter`].
//!
//! A system call from anywhere but the kernel's own host-call instruction is a
//! guest's and traps to the kernel (`SIGSYS`). One from there is checked
//! against the list; everything else returns `EPERM`. A call by another
//! architecture's convention (`int 0x80`) traps wherever it comes from, and is a fault
//! of the guest's ([`super::fault`]).
#![allow(unsafe_code)]

use core::sync::atomic::{AtomicBool, Ordering::Relaxed};

use thaw_abi::filter::{Check, List};

use super::calls::{hostcall, nr, thaw_hostcall_return};
use crate::errno::Result;

/// `struct sock_filter` (linux/filter.h).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub(super) struct Instruction {
    code: u16,
    jump_true: u8,
    jump_false: u8,
    k: u32,
}

/// `struct sock_fprog`.
#[repr(C)]
struct Program {
    len: u16,
    filter: *const Instruction,
}

const LOAD_WORD: u16 = 0x20;
const JUMP_EQUAL: u16 = 0x15;
const JUMP_SET: u16 = 0x45;
const AND: u16 = 0x54;
const RETURN: u16 = 0x06;

/// What `seccomp_data` and `siginfo_t` call this architecture (linux/audit.h).
pub(super) const AUDIT_ARCH_X86_64: u32 = 0xc000_003e;
const RET_TRAP: u32 = 0x0003_0000;
const RET_EPERM: u32 = 0x0005_0001;
const RET_ALLOW: u32 = 0x7fff_0000;

// Offsets in `struct seccomp_data`.
const NUMBER: u32 = 0;
const ARCH: u32 = 4;
const INSTRUCTION_POINTER: u32 = 8;
const ARGUMENTS: u32 = 16;

/// Most instructions that the table may compile to.
const MAX: usize = 320;

/// A compiled filter.
pub(super) struct Filter {
    instructions: [Instruction; MAX],
    len: usize,
}

impl Filter {
    /// Compiles a list for a host-call instruction that ends at `allowed_ip`.
    pub(super) fn compile(allowed_ip: u64, list: List) -> Self {
        let mut filter = Filter {
            instructions: [Instruction { code: 0, jump_true: 0, jump_false: 0, k: 0 }; MAX],
            len: 0,
        };
        filter.require_word(ARCH, AUDIT_ARCH_X86_64, RET_TRAP);
        filter.require_word(INSTRUCTION_POINTER, allowed_ip as u32, RET_TRAP);
        filter.require_word(INSTRUCTION_POINTER + 4, (allowed_ip >> 32) as u32, RET_TRAP);
        for call in list.calls() {
            filter.push(LOAD_WORD, 0, 0, NUMBER);
            let branch = filter.push(JUMP_EQUAL, 0, 0, call.number);
            for check in call.checks {
                filter.check(check);
            }
            filter.push(RETURN, 0, 0, RET_ALLOW);
            let skip = filter.len - branch - 1;
            assert!(skip < 256, "a call has too many checks");
            filter.instructions[branch].jump_false = skip as u8;
        }
        filter.push(RETURN, 0, 0, RET_EPERM);
        filter
    }

    fn push(&mut self, code: u16, jump_true: u8, jump_false: u8, k: u32) -> usize {
        assert!(self.len < MAX, "the filter is too long");
        self.instructions[self.len] = Instruction { code, jump_true, jump_false, k };
        self.len += 1;
        self.len - 1
    }

    /// Returns `otherwise` unless the word at `offset` is `value`.
    fn require_word(&mut self, offset: u32, value: u32, otherwise: u32) {
        self.push(LOAD_WORD, 0, 0, offset);
        self.push(JUMP_EQUAL, 1, 0, value);
        self.push(RETURN, 0, 0, otherwise);
    }

    fn check(&mut self, check: &Check) {
        let argument = |index: u32| ARGUMENTS + 8 * index;
        match *check {
            Check::Zero(index) => {
                self.require_word(argument(index), 0, RET_EPERM);
                self.require_word(argument(index) + 4, 0, RET_EPERM);
            }
            // The kernel looks at the low half of an `int` argument only, but
            // `mmap` takes its flags as a long: check both halves.
            Check::Mask(index, mask) => {
                self.require_word(argument(index) + 4, 0, RET_EPERM);
                self.push(LOAD_WORD, 0, 0, argument(index));
                self.push(JUMP_SET, 0, 1, !mask);
                self.push(RETURN, 0, 0, RET_EPERM);
            }
            Check::OneOf(index, values) => {
                self.require_word(argument(index) + 4, 0, RET_EPERM);
                self.push(LOAD_WORD, 0, 0, argument(index));
                for (i, value) in values.iter().enumerate() {
                    self.push(JUMP_EQUAL, (values.len() - i) as u8, 0, *value);
                }
                self.push(RETURN, 0, 0, RET_EPERM);
            }
            Check::Bits(index, mask, value) => {
                self.require_word(argument(index) + 4, 0, RET_EPERM);
                self.push(LOAD_WORD, 0, 0, argument(index));
                self.push(AND, 0, 0, mask);
                self.push(JUMP_EQUAL, 1, 0, value);
                self.push(RETURN, 0, 0, RET_EPERM);
            }
        }
    }
}

/// Whether the filter lets this host process make another one, or a thread: said at every
/// boot, by the name that the zygote was given.
static MAY_CLONE: AtomicBool = AtomicBool::new(true);

/// Whether the host lets this sandbox have more than one host process and virtual CPU.
pub(super) fn may_clone() -> bool {
    MAY_CLONE.load(Relaxed)
}

/// Installs the filter for good. From here on only `thaw_hostcall` reaches the host.
pub(super) fn install(list: List) -> Result<()> {
    MAY_CLONE.store(list != List::SingleProcess, Relaxed);
    let filter = Filter::compile(&raw const thaw_hostcall_return as u64, list);
    let program = Program { len: filter.len as u16, filter: filter.instructions.as_ptr() };
    const SECCOMP_SET_MODE_FILTER: u64 = 1;
    // SAFETY: the program is valid for the call.
    unsafe {
        hostcall(nr::SECCOMP, [SECCOMP_SET_MODE_FILTER, 0, &raw const program as u64, 0, 0, 0])
    }
    .map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Runs the filter as the host's BPF machine would.
    fn run(filter: &Filter, number: u32, ip: u64, args: [u64; 6], arch: u32) -> u32 {
        let mut data = [0u8; 64];
        data[0..4].copy_from_slice(&number.to_le_bytes());
        data[4..8].copy_from_slice(&arch.to_le_bytes());
        data[8..16].copy_from_slice(&ip.to_le_bytes());
        for (i, arg) in args.iter().enumerate() {
            data[16 + 8 * i..24 + 8 * i].copy_from_slice(&arg.to_le_bytes());
        }
        let (mut pc, mut accumulator) = (0, 0u32);
        loop {
            let i = filter.instructions[..filter.len][pc];
            pc += 1;
            match i.code {
                LOAD_WORD => {
                    let at = i.k as usize;
                    accumulator =
                        u32::from_le_bytes([data[at], data[at + 1], data[at + 2], data[at + 3]]);
                }
                JUMP_EQUAL => {
                    pc += if accumulator == i.k { i.jump_true } else { i.jump_false } as usize
                }
                JUMP_SET => {
                    pc += if accumulator & i.k != 0 { i.jump_true } else { i.jump_false } as usize
                }
                AND => accumulator &= i.k,
                RETURN => return i.k,
                code => panic!("unknown instruction {code:#x}"),
            }
        }
    }

    const IP: u64 = 0x7e00_0000_1234;

    #[test]
    fn calls_of_guests_and_of_foreign_architectures_trap() {
        let filter = Filter::compile(IP, List::General);
        assert_eq!(run(&filter, 0, IP + 1, [0; 6], AUDIT_ARCH_X86_64), RET_TRAP);
        assert_eq!(run(&filter, 0, IP | 1 << 50, [0; 6], AUDIT_ARCH_X86_64), RET_TRAP);
        for number in 0..500 {
            assert_eq!(run(&filter, number, IP, harmless(number), 0x4000_0003), RET_TRAP);
        }
    }

    /// Arguments that pass the checks of a call.
    fn harmless(number: u32) -> [u64; 6] {
        let mut args = [0; 6];
        let call = List::General.calls().find(|call| call.number == number);
        for check in call.map_or(&[][..], |call| call.checks) {
            match *check {
                Check::OneOf(index, values) => args[index as usize] = values[0] as u64,
                Check::Bits(index, _, value) => args[index as usize] = value as u64,
                Check::Zero(_) | Check::Mask(..) => {}
            }
        }
        args
    }

    #[test]
    fn only_listed_calls_pass() {
        for list in [List::SingleProcess, List::General] {
            let filter = Filter::compile(IP, list);
            for number in 0..1024 {
                let allowed = list.calls().any(|call| call.number == number);
                let result = run(&filter, number, IP, harmless(number), AUDIT_ARCH_X86_64);
                assert_eq!(result == RET_ALLOW, allowed, "{list:?} {number}");
                let x32 = run(&filter, number | 0x4000_0000, IP, [0; 6], AUDIT_ARCH_X86_64);
                assert_eq!(x32, RET_EPERM);
            }
        }
    }

    #[test]
    fn a_template_may_do_more() {
        let usual = Filter::compile(IP, List::General);
        let template = Filter::compile(IP, List::Templates);
        // clone, dup2, setpgid, setresgid, setresuid, capset.
        for number in [56, 33, 109, 119, 117, 126] {
            let mut args = [0; 6];
            let call = List::Templates.calls().find(|call| call.number == number).unwrap();
            for check in call.checks {
                if let Check::OneOf(index, values) = *check {
                    args[index as usize] = values[values.len() - 1] as u64;
                }
            }
            let run = |filter| run(filter, call.number, IP, args, AUDIT_ARCH_X86_64);
            assert_eq!((run(&usual), run(&template)), (RET_EPERM, RET_ALLOW), "{}", call.name);
        }
        let capable = run(&template, 126, IP + 8, [0; 6], AUDIT_ARCH_X86_64);
        assert_eq!(capable, RET_TRAP);
    }

    #[test]
    fn arguments_are_checked() {
        let filter = Filter::compile(IP, List::General);
        let allowed = |number, args| run(&filter, number, IP, args, AUDIT_ARCH_X86_64) == RET_ALLOW;
        // read: standard streams, and nothing whose offset others share.
        assert!(allowed(0, [0, 0x1000, 16, 0, 0, 0]));
        assert!(allowed(0, [2, 0x1000, 16, 0, 0, 0]));
        assert!(!allowed(0, [3, 0x1000, 16, 0, 0, 0]));
        assert!(!allowed(0, [1 << 32, 0x1000, 16, 0, 0, 0]));
        // sendto: an address, MSG_FASTOPEN, bits in the upper half.
        assert!(allowed(44, [3, 1, 1, 0x4040, 0, 0]));
        assert!(!allowed(44, [3, 1, 1, 0x4040, 0x1000, 16]));
        assert!(!allowed(44, [3, 1, 1, 0x2000_0000, 0, 0]));
        assert!(!allowed(44, [3, 1, 1, 1 << 32, 0, 0]));
        // mmap: MAP_HUGETLB, MAP_LOCKED.
        assert!(allowed(9, [0, 4096, 3, 0x22, u64::MAX, 0]));
        assert!(!allowed(9, [0, 4096, 3, 0x40022, u64::MAX, 0]));
        assert!(!allowed(9, [0, 4096, 3, 0x2022, u64::MAX, 0]));
        // madvise: MADV_DONTNEED, MADV_HWPOISON, MADV_MERGEABLE.
        assert!(allowed(28, [0, 4096, 4, 0, 0, 0]));
        assert!(allowed(28, [0, 4096, 23, 0, 0, 0]));
        assert!(!allowed(28, [0, 4096, 100, 0, 0, 0]));
        assert!(!allowed(28, [0, 4096, 12, 0, 0, 0]));
        // clock_gettime: CLOCK_REALTIME, a descriptor's clock, the time in programs only.
        let own_clock = u32::MAX << 3 | 2;
        for allowed_clock in [own_clock, own_clock | 4, !7 << 3 | 2] {
            assert!(allowed(228, [allowed_clock as u64, 0x1000, 0, 0, 0, 0]));
        }
        for other_clock in [0, 3, u64::from(own_clock | 1), u64::from(own_clock) - 1, u64::MAX - 1]
        {
            assert!(!allowed(228, [other_clock, 0x1000, 0, 0, 0, 0]), "{other_clock:#x}");
        }
        // process_madvise: of another process, MADV_COLLAPSE.
        let own = thaw_abi::filter::PIDFD_SELF as u64;
        assert!(allowed(440, [own, 0x1000, 1, 23, 0, 0]));
        assert!(!allowed(440, [3, 0x1000, 1, 23, 0, 0]));
        assert!(!allowed(440, [own, 0x1000, 1, 25, 0, 0]));
    }
}
