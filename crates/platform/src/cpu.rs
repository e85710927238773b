//! What guest programs see of the processor.
//!
//! A sandbox whose program is held to a level of the instruction set
//! ([`thaw_abi::cpu::Baseline`]) has its `cpuid` instructions fault, and the kernel's own would
//! fault, too. So all answers are taken down before ([`remember`]), and the kernel reads them
//! here. In all other sandboxes it asks the processor.

use core::arch::x86_64::{__cpuid_count, CpuidResult};
use core::sync::atomic::{AtomicU32, AtomicU64, Ordering::Relaxed};

use thaw_abi::cpu::Baseline;

/// Most answers that are taken down.
const ANSWERS_MAX: usize = 64;
/// The highest basic leaf that a masked program sees: state components. Behind it lie leaves
/// about features that no level has.
const HIGHEST_BASIC: u32 = 0xd;
/// The first extended leaf, and the last that a masked program sees.
const EXTENDED: u32 = 0x8000_0000;
const HIGHEST_EXTENDED: u32 = 0x8000_0008;
/// Components of the legacy area, which lie at fixed places.
const LEGACY_COMPONENTS: u64 = 0b11;
/// Highest component of a level: the upper vectors of AVX-512.
const COMPONENT_MAX: u32 = 7;
/// Bytes of an area in the standard format that has all components up to those of AVX-512.
const WIDEST_AREA: u32 = 2688;

/// What the processor answers to a leaf and a sub-leaf.
struct Answer {
    leaf: AtomicU32,
    sub: AtomicU32,
    registers: [AtomicU32; 4],
}

impl Answer {
    const fn empty() -> Self {
        let registers = [const { AtomicU32::new(0) }; 4];
        Self { leaf: AtomicU32::new(0), sub: AtomicU32::new(0), registers }
    }

    fn set(&self, leaf: u32, sub: u32, found: CpuidResult) {
        self.leaf.store(leaf, Relaxed);
        self.sub.store(sub, Relaxed);
        let words = [found.eax, found.ebx, found.ecx, found.edx];
        for (register, word) in self.registers.iter().zip(words) {
            register.store(word, Relaxed);
        }
    }

    fn get(&self) -> CpuidResult {
        let [eax, ebx, ecx, edx] = [0, 1, 2, 3].map(|number| self.registers[number].load(Relaxed));
        CpuidResult { eax, ebx, ecx, edx }
    }
}

/// The answers, and how many there are: none, unless the program is to be masked. Written before
/// there is a guest, and only read from then on.
static ANSWERS: [Answer; ANSWERS_MAX] = [const { Answer::empty() }; ANSWERS_MAX];
static COUNT: AtomicU32 = AtomicU32::new(0);
/// The [`Baseline`] as a number; 0: none.
static LEVEL: AtomicU32 = AtomicU32::new(0);
/// State components that guest threads may have.
static COMPONENTS: AtomicU64 = AtomicU64::new(u64::MAX);

const NOTHING: CpuidResult = CpuidResult { eax: 0, ebx: 0, ecx: 0, edx: 0 };

/// Takes down all that the processor says, as long as it says anything. To be called once,
/// before there is a guest.
pub fn remember() {
    let mut count = 0;
    let mut note = |leaf: u32, sub: u32| {
        let found = __cpuid_count(leaf, sub);
        if let Some(answer) = ANSWERS.get(count) {
            answer.set(leaf, sub, found);
            count += 1;
        }
        found
    };
    let highest = note(0, 0).eax.min(HIGHEST_BASIC);
    let is_there = |leaf: u32| leaf <= highest;
    for leaf in [1, 2, 3, 5, 6, 7, 9, 10].into_iter().filter(|&leaf| is_there(leaf)) {
        note(leaf, 0);
    }
    if is_there(4) {
        // Caches, up to one of type 0.
        (0..16).any(|sub| note(4, sub).eax & 0x1f == 0);
    }
    if is_there(0xb) {
        // Threads and cores, up to a level without a type.
        (0..8).any(|sub| note(0xb, sub).ecx >> 8 & 0xff == 0);
    }
    if is_there(0xd) {
        for sub in 0..=COMPONENT_MAX {
            note(0xd, sub);
        }
    }
    let highest = note(EXTENDED, 0).eax.min(HIGHEST_EXTENDED);
    for leaf in EXTENDED + 1..=highest {
        note(leaf, 0);
    }
    COUNT.store(count as u32, Relaxed);
}

/// Whether the answers were taken down: the processor gives none any more.
pub fn is_remembered() -> bool {
    COUNT.load(Relaxed) > 0
}

/// Shows no more than this level from now on.
pub fn hold_to(level: Baseline) {
    LEVEL.store(level as u32, Relaxed);
    COMPONENTS.store(level.visible().components, Relaxed);
    crate::fpu::forget_size();
}

/// State components that are saved of guest threads, a bit for each as in `XCR0`. The processor
/// may have fewer.
pub fn components() -> u64 {
    COMPONENTS.load(Relaxed)
}

/// What the guest's `cpuid` answers: the processor's answer, as far as the program may see it.
pub fn cpuid(leaf: u32, sub: u32) -> CpuidResult {
    if !is_remembered() {
        return __cpuid_count(leaf, sub);
    }
    let level = LEVEL.load(Relaxed);
    match Baseline::ALL.into_iter().find(|&known| known as u32 == level) {
        Some(level) => masked(level, leaf, sub, &remembered),
        None => remembered(leaf, sub),
    }
}

/// What was taken down. Sub-leaves count for those leaves only that have some.
fn remembered(leaf: u32, sub: u32) -> CpuidResult {
    let sub = if matches!(leaf, 4 | 7 | 0xb | 0xd) { sub } else { 0 };
    let count = (COUNT.load(Relaxed) as usize).min(ANSWERS_MAX);
    let is_it =
        |answer: &&Answer| answer.leaf.load(Relaxed) == leaf && answer.sub.load(Relaxed) == sub;
    ANSWERS[..count].iter().find(is_it).map_or(NOTHING, Answer::get)
}

/// What a program sees that is held to a level, on a processor that answers `real`.
fn masked(
    level: Baseline,
    leaf: u32,
    sub: u32,
    real: &dyn Fn(u32, u32) -> CpuidResult,
) -> CpuidResult {
    let visible = level.visible();
    let found = real(leaf, sub);
    match (leaf, sub) {
        (0, _) => CpuidResult { eax: found.eax.min(HIGHEST_BASIC), ..found },
        (1, _) => CpuidResult {
            ecx: found.ecx & visible.leaf_1_ecx,
            edx: found.edx & visible.leaf_1_edx,
            ..found
        },
        // Thermal and performance: what follows from them is not for guests.
        (6 | 9 | 10, _) => NOTHING,
        (7, 0) => CpuidResult { ebx: found.ebx & visible.leaf_7_ebx, ..NOTHING },
        // Without OSXSAVE there are no components to speak of.
        (0xd, _) if visible.components == LEGACY_COMPONENTS => NOTHING,
        (0xd, 0) => {
            let components = components_of(&found) & visible.components;
            // Programs that save state themselves, such as the C library's loader, save what is
            // enabled, which cannot be hidden from them: `xgetbv` does not fault. So they are
            // told how much room that takes at most, here and on other machines.
            let room = found.ebx.max(WIDEST_AREA);
            let (low, high) = (components as u32, (components >> 32) as u32);
            CpuidResult { eax: low, ebx: room, ecx: room, edx: high }
        }
        (0xd, 2..=COMPONENT_MAX) if visible.components >> sub & 1 != 0 => found,
        (7 | 0xd, _) => NOTHING,
        (2..=HIGHEST_BASIC, _) => found,
        (EXTENDED, _) => CpuidResult { eax: found.eax.min(HIGHEST_EXTENDED), ..found },
        (0x8000_0001, _) => CpuidResult { ecx: found.ecx & visible.extended_ecx, ..found },
        (0x8000_0002..=HIGHEST_EXTENDED, _) => found,
        _ => NOTHING,
    }
}

/// Bytes of an `xsave` area in the standard format for what is saved of guest threads.
pub fn area_size() -> u32 {
    let real =
        |leaf, sub| if is_remembered() { remembered(leaf, sub) } else { __cpuid_count(leaf, sub) };
    match components() {
        u64::MAX => real(0xd, 0).ebx,
        some => area(components_of(&real(0xd, 0)) & some, &real),
    }
}

fn components_of(leaf_d: &CpuidResult) -> u64 {
    u64::from(leaf_d.edx) << 32 | u64::from(leaf_d.eax)
}

/// Bytes of an `xsave` area in the standard format that has these components (Intel SDM vol. 1,
/// 13.4).
fn area(components: u64, real: &dyn Fn(u32, u32) -> CpuidResult) -> u32 {
    let extended = components & !LEGACY_COMPONENTS;
    let end = |component: u32| {
        let place = real(0xd, component);
        place.eax.saturating_add(place.ebx)
    };
    let ends = (2..=COMPONENT_MAX).filter(|component| extended >> component & 1 != 0).map(end);
    ends.max().unwrap_or(0).max(crate::fpu::LEGACY_AND_HEADER as u32)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn seen(level: Baseline, leaf: u32, sub: u32) -> CpuidResult {
        masked(level, leaf, sub, &|leaf, sub| __cpuid_count(leaf, sub))
    }

    /// A processor that has everything, and areas as Intel's have them.
    fn everything(leaf: u32, sub: u32) -> CpuidResult {
        let all = CpuidResult { eax: u32::MAX, ebx: u32::MAX, ecx: u32::MAX, edx: u32::MAX };
        match (leaf, sub) {
            (0xd, 0) => CpuidResult { edx: 0, ..all },
            (0xd, 2) => CpuidResult { eax: 256, ebx: 576, ..NOTHING },
            (0xd, 5) => CpuidResult { eax: 64, ebx: 1088, ..NOTHING },
            (0xd, 6) => CpuidResult { eax: 512, ebx: 1152, ..NOTHING },
            (0xd, 7) => CpuidResult { eax: 1024, ebx: 1664, ..NOTHING },
            _ => all,
        }
    }

    #[test]
    fn a_program_sees_what_its_level_has() {
        for level in Baseline::ALL {
            let (see, required) =
                (|leaf, sub| masked(level, leaf, sub, &everything), level.required());
            assert_eq!(see(0, 0).eax, HIGHEST_BASIC);
            assert_eq!(see(1, 0).ecx & required.leaf_1_ecx, required.leaf_1_ecx);
            assert_eq!(see(1, 0).ecx & !level.visible().leaf_1_ecx, 0);
            // No hypervisor shows itself.
            assert_eq!(see(1, 0).ecx & 1 << 31, 0);
            assert_eq!(see(7, 0).ebx, level.visible().leaf_7_ebx);
            assert_eq!((see(7, 0).eax, see(7, 0).ecx, see(7, 0).edx), (0, 0, 0));
            assert_eq!(see(0x8000_0001, 0).ecx, required.extended_ecx);
            assert_eq!(see(0xd, 1), NOTHING);
            for (leaf, sub) in
                [(0xe, 0), (0x14, 0), (0x1f, 0), (0x4000_0000, 0), (7, 1), (u32::MAX, 0)]
            {
                assert_eq!(see(leaf, sub), NOTHING, "{leaf:x} {sub}");
            }
        }
    }

    #[test]
    fn areas_have_room_for_the_components_of_the_level() {
        let components = Baseline::ALL.map(|level| level.visible().components);
        let sizes = components.map(|components| area(components, &everything));
        assert_eq!(sizes, [576, 832, 2688]);
        let components = Baseline::ALL.map(|level| masked(level, 0xd, 0, &everything).eax);
        assert_eq!(components, [0, 0b111, 0b1110_0111]);
        // On a processor without AVX-512, too: its program may go on where there is.
        let lesser = |leaf, sub| match (leaf, sub) {
            (0xd, 0) => CpuidResult { eax: 0b111, ebx: 832, ecx: 832, edx: 0 },
            _ => everything(leaf, sub),
        };
        assert_eq!(masked(Baseline::V3, 0xd, 0, &lesser).ebx, WIDEST_AREA);
        assert_eq!(masked(Baseline::V2, 0xd, 2, &everything), NOTHING);
        assert_eq!(masked(Baseline::V3, 0xd, 2, &everything), everything(0xd, 2));
    }

    #[test]
    fn nobody_sees_more_than_the_processor_has() {
        for level in Baseline::ALL {
            assert_eq!(seen(level, 1, 0).ecx & !__cpuid_count(1, 0).ecx, 0);
            assert_eq!(seen(level, 7, 0).ebx & !__cpuid_count(7, 0).ebx, 0);
        }
    }

    #[test]
    fn what_was_taken_down_is_what_the_processor_said() {
        remember();
        assert!(is_remembered() && (COUNT.load(Relaxed) as usize) < ANSWERS_MAX);
        for (leaf, sub) in [(0, 0), (7, 0), (0xd, 0), (0xd, 2), (EXTENDED, 0), (0x8000_0002, 0)] {
            assert_eq!(remembered(leaf, sub), __cpuid_count(leaf, sub), "{leaf:x} {sub}");
        }
        // Of leaf 1, one word says on which processor it was asked.
        assert_eq!(remembered(1, 9).ecx, __cpuid_count(1, 0).ecx);
        assert_eq!(remembered(0x4000_0000, 0), NOTHING);
        COUNT.store(0, Relaxed);
    }
}
