//! CPU features: a frozen program has looked at them once and relies on them
//! in every copy.

use std::arch::x86_64::{__cpuid, __cpuid_count, _xgetbv};

/// What each word of [`thaw_abi::image::ImageHeader::cpu_features`] is, with
/// names for the bits that people know.
const WORDS: [(&str, &[(u32, &str)]); 7] = [
    (
        "cpuid 1 ecx",
        &[
            (0, "sse3"),
            (9, "ssse3"),
            (12, "fma"),
            (19, "sse4_1"),
            (20, "sse4_2"),
            (22, "movbe"),
            (23, "popcnt"),
            (25, "aes"),
            (26, "xsave"),
            (28, "avx"),
            (29, "f16c"),
            (30, "rdrand"),
        ],
    ),
    ("cpuid 1 edx", &[(25, "sse"), (26, "sse2")]),
    (
        "cpuid 7 ebx",
        &[
            (0, "fsgsbase"),
            (3, "bmi1"),
            (5, "avx2"),
            (8, "bmi2"),
            (9, "erms"),
            (11, "rtm"),
            (16, "avx512f"),
            (17, "avx512dq"),
            (18, "rdseed"),
            (19, "adx"),
            (29, "sha"),
            (30, "avx512bw"),
            (31, "avx512vl"),
        ],
    ),
    (
        "cpuid 7 ecx",
        &[
            (1, "avx512vbmi"),
            (3, "pku"),
            (5, "waitpkg"),
            (8, "gfni"),
            (9, "vaes"),
            (10, "vpclmulqdq"),
            (11, "avx512_vnni"),
            (14, "avx512_vpopcntdq"),
        ],
    ),
    ("cpuid 7 edx", &[(4, "fsrm"), (22, "amx_bf16"), (24, "amx_tile"), (25, "amx_int8")]),
    ("cpuid 0xd.1 eax", &[(0, "xsaveopt"), (1, "xsavec"), (2, "xgetbv1"), (3, "xsaves")]),
    (
        "xcr0",
        &[
            (1, "sse state"),
            (2, "avx state"),
            (5, "avx-512 opmask state"),
            (6, "avx-512 state"),
            (9, "pkru state"),
            (17, "amx state"),
        ],
    ),
];
/// Bits that say something about the machine and not about instructions.
const IGNORED: [u32; 7] = [
    1 << 31, // Runs under a hypervisor.
    0,
    0,
    0,
    0,
    0,
    0,
];

/// CPU features of this machine, as
/// [`thaw_abi::image::ImageHeader::cpu_features`] describes them.
#[allow(unsafe_code)]
pub fn cpu_features() -> [u32; 8] {
    let one = __cpuid(1);
    let seven = __cpuid_count(7, 0);
    let state = __cpuid_count(0xd, 0);
    let extension = __cpuid_count(0xd, 1);
    // SAFETY: OSXSAVE (bit 27) says that the operating system has enabled
    // `xgetbv`; without it, only the x87 and SSE state exists.
    let xcr0 = if one.ecx & 1 << 27 != 0 { unsafe { xcr0() } } else { 0b11 };
    [one.ecx, one.edx, seven.ebx, seven.ecx, seven.edx, extension.eax & 0xf, xcr0 as u32, state.ebx]
}

/// # Safety
///
/// The CPU and the operating system must support `xgetbv`.
#[target_feature(enable = "xsave")]
#[allow(unsafe_code)]
unsafe fn xcr0() -> u64 {
    // SAFETY: as the caller promises; register 0 always exists.
    unsafe { _xgetbv(0) }
}

/// The features that the image may use and this machine lacks, in words;
/// `None` if there are none.
pub(super) fn missing(image: &[u32; 8], machine: &[u32; 8]) -> Option<String> {
    let mut missing = Vec::new();
    for (number, (word, names)) in WORDS.iter().enumerate() {
        let lacking = image[number] & !machine[number] & !IGNORED[number];
        for bit in (0..32).filter(|bit| lacking >> bit & 1 != 0) {
            let known = names.iter().find(|(number, _)| *number == bit);
            missing.push(match known {
                Some((_, name)) => (*name).to_owned(),
                None => format!("{word} bit {bit}"),
            });
        }
    }
    if image[7] > machine[7] {
        missing.push(format!("an xsave area of {} bytes", image[7]));
    }
    (!missing.is_empty()).then(|| missing.join(", "))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_machine_fits_itself() {
        let features = cpu_features();
        assert_ne!(features[1] & 1 << 26, 0, "every x86-64 CPU has SSE2");
        assert_eq!(missing(&features, &features), None);
    }

    #[test]
    fn a_lesser_machine_does_not_fit() {
        let image = cpu_features();
        let mut machine = image;
        machine[1] &= !(1 << 26);
        assert_eq!(missing(&image, &machine).unwrap(), "sse2");
        let mut machine = image;
        machine[7] -= 1;
        assert!(missing(&image, &machine).unwrap().contains("xsave area"));
    }

    #[test]
    fn a_greater_machine_fits() {
        let image = [0; 8];
        assert_eq!(missing(&image, &cpu_features()), None);
        let mut image = image;
        image[0] = 1 << 31;
        assert_eq!(missing(&image, &[0; 8]), None, "a hypervisor is not needed");
    }
}
