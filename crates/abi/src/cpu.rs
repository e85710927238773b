//! Levels of the x86-64 instruction set, as the System V ABI's supplement defines them
//! (x86-64 psABI, 3.1.1), and which bits of `cpuid` each lets a program see.

/// A level of the instruction set that programs can be held to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[repr(u32)]
pub enum Baseline {
    /// `x86-64-v2`: SSE4.2, POPCNT.
    V2 = 1,
    /// `x86-64-v3`: AVX2, BMI, FMA.
    V3 = 2,
    /// `x86-64-v4`: AVX-512 F, BW, CD, DQ, VL.
    V4 = 3,
}

/// Bits of `cpuid` and of `XCR0`. A word is what a level lets a program see, or what
/// distinguishes it from the one below.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Features {
    /// Leaf 1, `ecx`.
    pub leaf_1_ecx: u32,
    /// Leaf 1, `edx`.
    pub leaf_1_edx: u32,
    /// Leaf 7.0, `ebx`.
    pub leaf_7_ebx: u32,
    /// Leaf 8000_0001, `ecx`.
    pub extended_ecx: u32,
    /// State components (`XCR0`).
    pub components: u64,
}

/// Name (`argv[0]`) of a zygote whose program is to see less than the processor has: each
/// `cpuid` instruction of its sandbox faults (`ARCH_CPUID_FAULT`, arch_prctl(2)), and the kernel
/// answers.
pub const MASKED_NAME: &core::ffi::CStr = c"thaw-masked";

/// Where the level lies in the flags of [`crate::control::Start`], two bits, 0 for none.
const FLAG_SHIFT: u32 = 8;

/// What no level hides, since every sandbox has it: FSGSBASE.
const ALWAYS_LEAF_7_EBX: u32 = 1 << 0;

/// Leaf 1 `edx` of every x86-64 processor: all but what some have for power management,
/// debugging and hyper-threading.
const EVERY_LEAF_1_EDX: u32 = 0x078b_fbff;

impl Baseline {
    /// All levels, the lowest first.
    pub const ALL: [Self; 3] = [Self::V2, Self::V3, Self::V4];

    /// Its name.
    pub fn name(self) -> &'static str {
        match self {
            Self::V2 => "x86-64-v2",
            Self::V3 => "x86-64-v3",
            Self::V4 => "x86-64-v4",
        }
    }

    /// The level of that name.
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|level| level.name() == name)
    }

    /// Its bits in the flags of a start command.
    pub fn to_flags(self) -> u32 {
        (self as u32) << FLAG_SHIFT
    }

    /// The level in the flags of a start command.
    pub fn from_flags(flags: u32) -> Option<Self> {
        let number = flags >> FLAG_SHIFT & 3;
        Self::ALL.into_iter().find(|&level| level as u32 == number)
    }

    /// What a processor of this level must have.
    pub fn required(self) -> Features {
        // SSE3, SSSE3, CMPXCHG16B, SSE4.1, SSE4.2, POPCNT; LAHF.
        let v2 = Features {
            leaf_1_ecx: 1 << 0 | 1 << 9 | 1 << 13 | 1 << 19 | 1 << 20 | 1 << 23,
            leaf_1_edx: EVERY_LEAF_1_EDX,
            leaf_7_ebx: 0,
            extended_ecx: 1 << 0,
            components: 0b11,
        };
        // FMA, MOVBE, XSAVE, OSXSAVE, AVX, F16C; BMI1, AVX2, BMI2; LZCNT.
        let v3 = Features {
            leaf_1_ecx: v2.leaf_1_ecx | 1 << 12 | 1 << 22 | 1 << 26 | 1 << 27 | 1 << 28 | 1 << 29,
            leaf_1_edx: EVERY_LEAF_1_EDX,
            leaf_7_ebx: 1 << 3 | 1 << 5 | 1 << 8,
            extended_ecx: v2.extended_ecx | 1 << 5,
            components: 0b111,
        };
        match self {
            Self::V2 => v2,
            Self::V3 => v3,
            // AVX512F, DQ, CD, BW, VL; the mask registers and both parts of the vectors.
            Self::V4 => Features {
                leaf_7_ebx: v3.leaf_7_ebx | 1 << 16 | 1 << 17 | 1 << 28 | 1 << 30 | 1 << 31,
                components: 0b1110_0111,
                ..v3
            },
        }
    }

    /// What a program that is held to this level sees at most. Of leaf 7 `ecx` and `edx` and of leaf 0xD.1 it sees nothing.
    pub fn visible(self) -> Features {
        let required = self.required();
        Features { leaf_7_ebx: required.leaf_7_ebx | ALWAYS_LEAF_7_EBX, ..required }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_level_has_all_of_the_one_below() {
        for pair in Baseline::ALL.windows(2) {
            let (low, high) = (pair[0].visible(), pair[1].visible());
            assert_eq!(low.leaf_1_ecx & !high.leaf_1_ecx, 0);
            assert_eq!(low.leaf_7_ebx & !high.leaf_7_ebx, 0);
            assert_eq!(low.extended_ecx & !high.extended_ecx, 0);
            assert_eq!(low.components & !high.components, 0);
            assert_ne!(low, high);
        }
    }

    #[test]
    fn levels_survive_their_names_and_flags() {
        for level in Baseline::ALL {
            assert_eq!(Baseline::from_name(level.name()), Some(level));
            assert_eq!(Baseline::from_flags(level.to_flags() | 0xff | 0xffff_0000), Some(level));
        }
        assert_eq!(Baseline::from_name("x86-64-v9"), None);
        assert_eq!(Baseline::from_flags(0xffff_00ff), None);
    }
}
