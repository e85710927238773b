//! Forms of system call sites: which whole instructions around a `syscall` can
//! move to a trampoline.
//!
//! What lies before a `syscall` can only be recognized, since instructions cannot
//! be told apart backwards; what lies behind it can be decoded, because an
//! instruction begins there. A few forms that name registers and constants only
//! are nearly all that compilers put there: the check for an error above all.

/// `syscall`.
pub const SYSCALL: [u8; 2] = [0x0f, 0x05];
/// Bytes looked at up to the end of the `syscall` instruction.
pub const BEFORE: usize = 9;
/// Bytes looked at behind it.
pub const BEHIND: usize = 11;

/// What registers hold at a `syscall` instruction.
#[derive(Clone, Copy, Debug, Default)]
pub struct Registers {
    pub rax: u64,
    pub rdi: u64,
    pub rsi: u64,
    pub rdx: u64,
}

/// Bytes of the instruction before the `syscall` at the end of `bytes`, if it can
/// move. It is one instruction, so that no jump can lead inside.
pub fn prefix(bytes: &[u8; BEFORE], registers: &Registers) -> Option<usize> {
    let immediate =
        |at: usize| i32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]);
    // 48 c7 c0 imm32: mov $nr,%rax, as Go emits. Tested first, because its
    // immediate may look like the next pattern.
    if bytes[..3] == [0x48, 0xc7, 0xc0] && immediate(3) as i64 as u64 == registers.rax {
        return Some(7);
    }
    // b8 imm32 and its relatives: mov $nr,%eax, mov $AT_FDCWD,%edi. That the immediate is what
    // lies in the register tells it from five bytes that are something else, but for
    // two cases: REX.B before it names another register, and 8b bf is mov disp32(%rdi),%edi.
    let is_other = bytes[1] & 0xf1 == 0x41 || bytes[1..3] == [0x8b, 0xbf];
    let loaded = match bytes[2] {
        0xb8 => Some(registers.rax),
        0xba => Some(registers.rdx),
        0xbe => Some(registers.rsi),
        0xbf => Some(registers.rdi),
        _ => None,
    };
    if !is_other && loaded == Some(immediate(3) as u32 as u64) {
        return Some(5);
    }
    // 4c 8b 4c 24 08: mov 8(%rsp),%r9, in syscall(3) of the C library.
    if bytes[2..7] == [0x4c, 0x8b, 0x4c, 0x24, 0x08] {
        return Some(5);
    }
    None
}

/// Whole instructions behind a `syscall`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Suffix {
    len: usize,
    /// Bit n: an instruction begins at byte n.
    begins: u16,
}

impl Suffix {
    /// Bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Offsets at which instructions begin.
    pub fn boundaries(&self) -> impl Iterator<Item = usize> + Clone + use<> {
        let begins = self.begins;
        (0..BEHIND).filter(move |at| begins & 1 << at != 0)
    }
}

/// The instructions at the beginning of `bytes` that are at least `least` bytes
/// long, if all of them can move.
pub fn suffix(bytes: &[u8; BEHIND], least: usize) -> Option<Suffix> {
    let mut suffix = Suffix { len: 0, begins: 0 };
    while suffix.len < least {
        let len = movable_instruction(&bytes[suffix.len..])?;
        suffix.begins |= 1 << suffix.len;
        suffix.len += len;
    }
    (suffix.len <= BEHIND).then_some(suffix)
}

/// Bytes of the first instruction, if it is one that computes with registers and
/// constants only, wherever it lies (Intel SDM vol. 2, chapter 2 and appendix A).
fn movable_instruction(bytes: &[u8]) -> Option<usize> {
    let (prefix, rest) = match bytes {
        [rex @ 0x40..=0x4f, rest @ ..] => (Some(*rex), rest),
        _ => (None, bytes),
    };
    let is_wide = prefix.is_some_and(|rex| rex & 8 != 0);
    let names_register = |modrm: &u8| modrm >> 6 == 3;
    let len = match rest {
        // The eight computations: accumulator with imm32.
        [0x05 | 0x0d | 0x15 | 0x1d | 0x25 | 0x2d | 0x35 | 0x3d, ..] => 5,
        // The same of two registers, either way round; test; movslq; mov.
        [
            0x01 | 0x03 | 0x09 | 0x0b | 0x11 | 0x13 | 0x19 | 0x1b | 0x21 | 0x23 | 0x29 | 0x2b
            | 0x31 | 0x33 | 0x39 | 0x3b | 0x63 | 0x85 | 0x89 | 0x8b,
            modrm,
            ..,
        ] if names_register(modrm) => 2,
        // The same with imm32, with imm8.
        [0x81, modrm, ..] if names_register(modrm) => 6,
        [0x83, modrm, ..] if names_register(modrm) => 3,
        // mov $imm32, but not mov $imm64.
        [0xb8..=0xbf, ..] if !is_wide => 5,
        [0xc7, modrm, ..] if modrm & 0xf8 == 0xc0 => 6,
        // not, neg.
        [0xf7, modrm, ..] if modrm & 0xf0 == 0xd0 => 2,
        // cltq, cltd and their relatives.
        [0x98 | 0x99, ..] => 1,
        _ => return None,
    };
    Some(len + usize::from(prefix.is_some()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn recognizes_what_comes_before() {
        let of = |rax| Registers { rax, ..Registers::default() };
        let libc = [0x90, 0x90, 0xb8, 0x27, 0, 0, 0, 0x0f, 0x05];
        assert_eq!(prefix(&libc, &of(39)), Some(5));
        assert_eq!(prefix(&libc, &of(40)), None, "the immediate is not the number in rax");
        let go = [0x48, 0xc7, 0xc0, 0x27, 0, 0, 0, 0x0f, 0x05];
        assert_eq!(prefix(&go, &of(39)), Some(7));
        let generic = [0x90, 0x90, 0x4c, 0x8b, 0x4c, 0x24, 0x08, 0x0f, 0x05];
        assert_eq!(prefix(&generic, &of(1)), Some(5));
        let other = [0x90, 0x90, 0x90, 0x89, 0xd0, 0x90, 0x90, 0x0f, 0x05];
        assert_eq!(prefix(&other, &of(1)), None);
    }

    #[test]
    fn recognizes_arguments_that_are_loaded_last() {
        // mov $AT_FDCWD,%edi, in open64 of the C library.
        let mut open = [0x90, 0x90, 0xbf, 0x9c, 0xff, 0xff, 0xff, 0x0f, 0x05];
        let of = |rdi| Registers { rdi, ..Registers::default() };
        assert_eq!(prefix(&open, &of(0xffff_ff9c)), Some(5));
        assert_eq!(prefix(&open, &of(-100i64 as u64)), None, "it clears the upper half");
        open[1] = 0x4a;
        assert_eq!(prefix(&open, &of(0xffff_ff9c)), Some(5), "the end of jb +0x4a");
        open[1] = 0x41;
        assert_eq!(prefix(&open, &of(0xffff_ff9c)), None, "mov $AT_FDCWD,%r15d");
        let field = [0x90, 0x8b, 0xbf, 0xd0, 2, 0, 0, 0x0f, 0x05];
        assert_eq!(prefix(&field, &of(0x2d0)), None, "mov 0x2d0(%rdi),%edi");
        let length = [0x90, 0x90, 0xbe, 0x18, 0, 0, 0, 0x0f, 0x05];
        let of = |rsi| Registers { rsi, ..Registers::default() };
        assert_eq!(prefix(&length, &of(24)), Some(5));
        let mode = [0x90, 0x90, 0xba, 0x18, 0, 0, 0, 0x0f, 0x05];
        assert_eq!(prefix(&mode, &of(24)), None);
    }

    fn behind(bytes: &[u8]) -> Option<(usize, Vec<usize>)> {
        let mut all = [0x06; BEHIND];
        all[..bytes.len()].copy_from_slice(bytes);
        suffix(&all, 5).map(|suffix| (suffix.len(), suffix.boundaries().collect()))
    }

    #[test]
    fn decodes_what_comes_behind() {
        let compare = [0x48, 0x3d, 0x00, 0xf0, 0xff, 0xff];
        assert_eq!(behind(&compare), Some((6, vec![0])));
        assert_eq!(behind(&compare[1..]), Some((5, vec![0])), "of the lower half");
        // mov %eax,%r12d; cmp $-4096,%eax
        let two = [0x41, 0x89, 0xc4, 0x3d, 0x00, 0xf0, 0xff, 0xff];
        assert_eq!(behind(&two), Some((8, vec![0, 3])));
        // mov %rax,%rdx; xor %eax,%eax
        assert_eq!(behind(&[0x48, 0x89, 0xc2, 0x31, 0xc0]), Some((5, vec![0, 3])));
    }

    #[test]
    fn leaves_what_depends_on_its_place_or_on_memory() {
        assert_eq!(behind(&[0x48, 0x83, 0xf8, 0xfc, 0x74, 0xef]), None, "a jump");
        assert_eq!(behind(&[0x8b, 0x05, 1, 2, 3, 4]), None, "relative to rip");
        assert_eq!(behind(&[0x48, 0x8b, 0x44, 0x24, 0x48]), None, "memory");
        assert_eq!(behind(&[0x48, 0xb8, 1, 2, 3, 4, 5, 6, 7, 8]), None, "mov $imm64");
    }
}
