//! CPU features: a frozen program has looked at them once and relies on them
//! in every copy.

use std::arch::x86_64::{__cpuid, __cpuid_count, _xgetbv};

use thaw_abi::cpu::Baseline;

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

/// CPU features of this machine that a program sees which is held to a level.
pub fn cpu_features_of(baseline: Option<Baseline>) -> [u32; 8] {
    let machine = cpu_features();
    let Some(baseline) = baseline else { return machine };
    let visible = visible(baseline);
    let mut features: [u32; 8] = std::array::from_fn(|word| machine[word] & visible[word]);
    features[7] = area(features[6]);
    features
}

/// The words of [`cpu_features`] that a level shows at most; not the bytes of an area.
fn visible(baseline: Baseline) -> [u32; 8] {
    let visible = baseline.visible();
    let components = visible.components as u32;
    let (ecx, edx) = (visible.leaf_1_ecx & !IGNORED[0], visible.leaf_1_edx);
    [ecx, edx, visible.leaf_7_ebx, 0, 0, 0, components, u32::MAX]
}

/// Bytes of an `xsave` area with these components (Intel SDM vol. 1, 13.4).
fn area(components: u32) -> u32 {
    let end = |component: u32| {
        let place = __cpuid_count(0xd, component);
        place.eax.saturating_add(place.ebx)
    };
    let ends = (2..32).filter(|component| components >> component & 1 != 0).map(end);
    // The legacy area and the header.
    ends.max().unwrap_or(0).max(576)
}

/// What this machine lacks of a level, in words; `None` if it has all.
pub fn lacking(baseline: Baseline) -> Option<String> {
    let required = baseline.required();
    let components = required.components as u32;
    let (ecx, edx) = (required.leaf_1_ecx, required.leaf_1_edx);
    let wanted = [ecx, edx, required.leaf_7_ebx, 0, 0, 0, components, 0];
    let words = missing(&wanted, &cpu_features());
    let extended = __cpuid(0x8000_0001).ecx;
    let lacks_extended = required.extended_ecx & !extended != 0;
    words.or_else(|| lacks_extended.then(|| "lahf or lzcnt".to_owned()))
}

/// Whether this machine can have `cpuid` instructions of a sandbox answered by its kernel.
pub fn can_mask_cpuid() -> bool {
    let text = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let flags = text.lines().find(|line| line.starts_with("flags"));
    flags.is_some_and(|line| line.split_whitespace().any(|flag| flag == "cpuid_fault"))
}

/// The lowest level that shows all of these features; `None`: no level does.
pub fn level_of(features: &[u32; 8]) -> Option<Baseline> {
    let shows = |level: &Baseline| {
        let visible = visible(*level);
        (0..7).all(|word| features[word] & !visible[word] & !IGNORED[word] == 0)
    };
    Baseline::ALL.into_iter().find(shows)
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

/// Which of some features this machine lacks, in words; `None`: it has all.
pub fn missing_here(features: &[u32; 8]) -> Option<String> {
    missing(features, &cpu_features())
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
    fn what_a_level_shows_is_of_that_level() {
        for level in Baseline::ALL.into_iter().filter(|&level| lacking(level).is_none()) {
            let features = cpu_features_of(Some(level));
            assert_eq!(level_of(&features), Some(level));
            assert_eq!(missing(&features, &cpu_features()), None, "it runs here");
            assert_eq!(cpu_features_of(None), cpu_features());
        }
        let mut more = cpu_features_of(Some(Baseline::V4));
        more[3] |= 1 << 11;
        assert_eq!(level_of(&more), None);
    }

    #[test]
    fn a_lesser_machine_is_told_what_it_lacks() {
        let image = visible(Baseline::V3);
        let machine = visible(Baseline::V2);
        let missing = missing(&image, &machine).unwrap();
        for name in ["avx", "fma", "avx2", "bmi2", "avx state"] {
            assert!(missing.split(", ").any(|word| word == name), "{missing}");
        }
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
