//! Filters as programs: classic BPF over what is known of a system call (seccomp(2),
//! `bpf_check_classic` and `bpf_convert_filter` in Linux' net/core/filter.c).

use alloc::vec::Vec;

use super::KILL_PROCESS;
use crate::errno::{Errno, Result};

/// `BPF_MAXINSNS`: most instructions of a program.
pub const INSTRUCTIONS_MAX: usize = 4096;
/// `BPF_MEMWORDS`: words of scratch memory.
const MEMORY_WORDS: usize = 16;
/// 32-bit words of `struct seccomp_data`, and its bytes.
pub const DATA_WORDS: usize = 16;
const DATA_BYTES: u32 = 4 * DATA_WORDS as u32;

/// `struct seccomp_data`, as a program reads it.
pub type Data = [u32; DATA_WORDS];

/// `struct sock_filter` (linux/filter.h).
#[derive(Clone, Copy, Debug, Default, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
pub struct Instruction {
    /// What it does.
    pub code: u16,
    /// Instructions that a jump leaves out if its condition holds.
    pub if_true: u8,
    /// The same if it does not.
    pub if_false: u8,
    /// Its constant.
    pub constant: u32,
}

// Codes (linux/bpf_common.h).
const LOAD: u16 = 0x00;
const LOAD_INDEX: u16 = 0x01;
const STORE: u16 = 0x02;
const STORE_INDEX: u16 = 0x03;
const COMPUTE: u16 = 0x04;
const JUMP: u16 = 0x05;
const RETURN: u16 = 0x06;
const RETURN_ACCUMULATOR: u16 = 0x16;
const TO_INDEX: u16 = 0x07;
const FROM_INDEX: u16 = 0x87;
/// From `struct seccomp_data`, a word.
const OF_DATA: u16 = 0x20;
/// From scratch memory.
const OF_MEMORY: u16 = 0x60;
/// The size of `struct seccomp_data`.
const OF_SIZE: u16 = 0x80;
/// The operand is the index register, not the constant.
const BY_INDEX: u16 = 0x08;
const ADD: u16 = 0x00;
const SUB: u16 = 0x10;
const MUL: u16 = 0x20;
const DIV: u16 = 0x30;
const OR: u16 = 0x40;
const AND: u16 = 0x50;
const SHIFT_LEFT: u16 = 0x60;
const SHIFT_RIGHT: u16 = 0x70;
const NEGATE: u16 = 0x80;
const XOR: u16 = 0xa0;
const EQUAL: u16 = 0x10;
const GREATER: u16 = 0x20;
const AT_LEAST: u16 = 0x30;
const HAS_BITS: u16 = 0x40;

/// The kind of an instruction (`BPF_CLASS`), and its operation (`BPF_OP`).
const fn class(code: u16) -> u16 {
    code & 7
}

const fn operation(code: u16) -> u16 {
    code & 0xf0
}

impl Instruction {
    /// Whether a filter may have it at all (`seccomp_check_filter` in Linux' kernel/seccomp.c).
    fn is_known(&self) -> bool {
        let code = self.code;
        let operation = operation(code);
        if code > 0xff {
            return false;
        }
        match class(code) {
            LOAD => matches!(code & !7, 0 | OF_DATA | OF_MEMORY | OF_SIZE),
            LOAD_INDEX => matches!(code & !7, 0 | OF_MEMORY | OF_SIZE),
            COMPUTE if operation == NEGATE => code == COMPUTE | NEGATE,
            COMPUTE => matches!(operation, ADD..=SHIFT_RIGHT | XOR),
            JUMP if operation == 0 => code == JUMP,
            JUMP => operation <= HAS_BITS,
            RETURN => matches!(code, RETURN | RETURN_ACCUMULATOR),
            _ => matches!(code, STORE | STORE_INDEX | TO_INDEX | FROM_INDEX),
        }
    }

    /// Whether its constant and its jumps are right, with so many instructions behind it.
    fn is_in_bounds(&self, behind: usize) -> bool {
        let constant = self.constant;
        match self.code {
            code if code == LOAD | OF_DATA => constant < DATA_BYTES && constant & 3 == 0,
            _ if self.uses_memory() => constant < MEMORY_WORDS as u32,
            code if code == COMPUTE | DIV => constant != 0,
            code if code == COMPUTE | SHIFT_LEFT || code == COMPUTE | SHIFT_RIGHT => constant < 32,
            JUMP => (constant as usize) < behind,
            code if class(code) == JUMP => usize::from(self.if_true.max(self.if_false)) < behind,
            _ => true,
        }
    }

    fn uses_memory(&self) -> bool {
        self.stores() || self.loads_memory()
    }

    fn stores(&self) -> bool {
        matches!(self.code, STORE | STORE_INDEX)
    }

    fn loads_memory(&self) -> bool {
        self.code == LOAD | OF_MEMORY || self.code == LOAD_INDEX | OF_MEMORY
    }

    /// How many instructions a jump may leave out.
    fn jumps(&self) -> Option<[usize; 2]> {
        match self.code {
            JUMP => Some([self.constant as usize; 2]),
            code if class(code) == JUMP => Some([self.if_true.into(), self.if_false.into()]),
            _ => None,
        }
    }
}

/// A program that has been checked: it ends, and reads only what it may.
pub struct Program(Vec<Instruction>);

/// Where the halves of the address of a call are in `struct seccomp_data`, in bytes.
const ADDRESS: [u32; 2] = [8, 12];

impl Program {
    /// `EINVAL` unless Linux would run it.
    pub fn check(instructions: Vec<Instruction>) -> Result<Self> {
        let len = instructions.len();
        let is_right = |(at, one): (usize, &Instruction)| {
            one.is_known() && one.is_in_bounds(len.saturating_sub(at + 1))
        };
        let ends = instructions.last().is_some_and(|last| class(last.code) == RETURN);
        let is_right = ends
            && len <= INSTRUCTIONS_MAX
            && instructions.iter().enumerate().all(is_right)
            && loads_what_was_stored(&instructions);
        if is_right { Ok(Self(instructions)) } else { Err(Errno::EINVAL) }
    }

    /// Whether it looks at where a call was made.
    pub fn loads_address(&self) -> bool {
        let is_load = |one: &Instruction| matches!(class(one.code), LOAD | LOAD_INDEX);
        let loads = |one: &Instruction| is_load(one) && one.code & !7 == OF_DATA;
        self.0.iter().any(|one| loads(one) && ADDRESS.contains(&one.constant))
    }

    /// Number of instructions.
    pub fn instructions(&self) -> usize {
        self.0.len()
    }

    /// What it returns. There are no jumps back, so each instruction runs once at most.
    pub fn run(&self, data: &Data) -> u32 {
        let (mut accumulator, mut index, mut memory) = (0u32, 0u32, [0u32; MEMORY_WORDS]);
        let mut at = 0usize;
        while let Some(one) = self.0.get(at) {
            at += 1;
            let constant = one.constant;
            let word = constant as usize % MEMORY_WORDS;
            let loaded = || match one.code & !7 {
                OF_DATA => data[constant as usize / 4 % DATA_WORDS],
                OF_MEMORY => memory[word],
                OF_SIZE => DATA_BYTES,
                _ => constant,
            };
            let operand = if one.code & BY_INDEX != 0 { index } else { constant };
            match class(one.code) {
                LOAD => accumulator = loaded(),
                LOAD_INDEX => index = loaded(),
                STORE => memory[word] = accumulator,
                STORE_INDEX => memory[word] = index,
                COMPUTE => match compute(operation(one.code), accumulator, operand) {
                    Some(result) => accumulator = result,
                    None => return 0,
                },
                JUMP if one.code == JUMP => at = at.saturating_add(constant as usize),
                JUMP if holds(operation(one.code), accumulator, operand) => {
                    at += usize::from(one.if_true);
                }
                JUMP => at += usize::from(one.if_false),
                RETURN if one.code == RETURN => return constant,
                RETURN => return accumulator,
                _ if one.code == TO_INDEX => index = accumulator,
                _ => accumulator = index,
            }
        }
        // A checked program does not get here.
        KILL_PROCESS
    }
}

/// Whether each word of scratch memory was stored on every way to where it is loaded
/// (`check_load_and_stores` in Linux' net/core/filter.c).
fn loads_what_was_stored(instructions: &[Instruction]) -> bool {
    // What was stored on all ways to an instruction that were looked at, a bit for each word.
    let mut on_ways = alloc::vec![u16::MAX; instructions.len()];
    let mut stored = 0u16;
    for (at, one) in instructions.iter().enumerate() {
        stored &= on_ways[at];
        let bit = 1u16.checked_shl(one.constant).unwrap_or(0);
        if one.stores() {
            stored |= bit;
        } else if one.loads_memory() && stored & bit == 0 {
            return false;
        } else if let Some(jumps) = one.jumps() {
            for target in jumps.map(|jump| at.saturating_add(jump + 1)) {
                if let Some(on_way) = on_ways.get_mut(target) {
                    *on_way &= stored;
                }
            }
            stored = u16::MAX;
        }
    }
    true
}

/// A result; none for a division by zero, which ends the program with 0. Shifts use the low five bits.
fn compute(operation: u16, left: u32, right: u32) -> Option<u32> {
    Some(match operation {
        ADD => left.wrapping_add(right),
        SUB => left.wrapping_sub(right),
        MUL => left.wrapping_mul(right),
        DIV => return left.checked_div(right),
        OR => left | right,
        AND => left & right,
        SHIFT_LEFT => left.wrapping_shl(right),
        SHIFT_RIGHT => left.wrapping_shr(right),
        NEGATE => left.wrapping_neg(),
        _ => left ^ right,
    })
}

/// Whether the condition of a jump holds.
fn holds(operation: u16, left: u32, right: u32) -> bool {
    match operation {
        EQUAL => left == right,
        GREATER => left > right,
        AT_LEAST => left >= right,
        _ => left & right != 0,
    }
}

#[cfg(test)]
#[path = "program_tests.rs"]
mod tests;
