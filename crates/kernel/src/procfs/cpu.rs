//! `/proc/cpuinfo`, from the processor itself.

use crate::errno::Result;
use crate::platform::cpu::cpuid;
use crate::state::kernel;
use alloc::format;
use alloc::string::String;
use alloc::vec::Vec;

/// A set of processors, a bit for each, as `/sys` lists it: `0` or `0-3,5`.
pub fn cpu_list(set: u64) -> String {
    let has = |cpu: u32| cpu < 64 && set & (1 << cpu) != 0;
    let firsts = (0..64).filter(|&cpu| has(cpu) && (cpu == 0 || !has(cpu - 1)));
    let ranges: Vec<String> = firsts
        .map(|first| match (first..).take_while(|&cpu| has(cpu)).last() {
            Some(last) if last > first => format!("{first}-{last}"),
            _ => format!("{first}"),
        })
        .collect();
    ranges.join(",")
}

/// A set of processors as `/sys` writes it: words of 32 bits in hexadecimal.
pub fn cpu_mask(set: u64) -> String {
    match (set >> 32, set & 0xffff_ffff) {
        (0, low) => format!("{low:08x}"),
        (high, low) => format!("{high:08x},{low:08x}"),
    }
}

/// Family, model and stepping (Intel SDM volume 2, CPUID leaf 1).
fn signature() -> (u32, u32, u32) {
    let eax = cpuid(1, 0).eax;
    let (stepping, model, family) = (eax & 15, (eax >> 4) & 15, (eax >> 8) & 15);
    let extended = family == 15 || family == 6;
    let model = if extended { model | ((eax >> 12) & 0xf0) } else { model };
    let family = if family == 15 { family + ((eax >> 20) & 0xff) } else { family };
    (family, model, stepping)
}

fn vendor() -> String {
    let leaf = cpuid(0, 0);
    let words = [leaf.ebx, leaf.edx, leaf.ecx];
    words.iter().flat_map(|word| word.to_le_bytes()).map(char::from).collect()
}

fn brand() -> String {
    let bytes: Vec<u8> = (0x8000_0002..=0x8000_0004u32)
        .map(|leaf| cpuid(leaf, 0))
        .flat_map(|leaf| [leaf.eax, leaf.ebx, leaf.ecx, leaf.edx])
        .flat_map(u32::to_le_bytes)
        .take_while(|&byte| byte != 0)
        .collect();
    String::from_utf8_lossy(&bytes).trim().into()
}

/// Megahertz, from the brand name (`… @ 2.60GHz`) or leaf 16h; 0 if unknown.
fn megahertz(brand: &str) -> u32 {
    let named = brand.rsplit_once("@ ").and_then(|(_, speed)| {
        let (whole, fraction) = speed.trim().strip_suffix("GHz")?.split_once('.')?;
        Some(
            whole.parse::<u32>().ok()? * 1000
                + format!("{fraction:0<3}").get(..3)?.parse::<u32>().ok()?,
        )
    });
    let reported = || if cpuid(0, 0).eax >= 0x16 { cpuid(0x16, 0).eax & 0xffff } else { 0 };
    named.unwrap_or_else(reported)
}

/// Names of the feature bits, as in Linux' `cpufeatures.h`; `` for no name.
const LEAF_1_EDX: [&str; 32] = [
    "fpu", "vme", "de", "pse", "tsc", "msr", "pae", "mce", "cx8", "apic", "", "sep", "mtrr", "pge",
    "mca", "cmov", "pat", "pse36", "pn", "clflush", "", "dts", "acpi", "mmx", "fxsr", "sse",
    "sse2", "ss", "ht", "tm", "ia64", "pbe",
];
const LEAF_1_ECX: [&str; 32] = [
    "pni",
    "pclmulqdq",
    "dtes64",
    "monitor",
    "ds_cpl",
    "vmx",
    "smx",
    "est",
    "tm2",
    "ssse3",
    "cid",
    "sdbg",
    "fma",
    "cx16",
    "xtpr",
    "pdcm",
    "",
    "pcid",
    "dca",
    "sse4_1",
    "sse4_2",
    "x2apic",
    "movbe",
    "popcnt",
    "tsc_deadline_timer",
    "aes",
    "xsave",
    "",
    "avx",
    "f16c",
    "rdrand",
    "hypervisor",
];
const LEAF_7_EBX: [&str; 32] = [
    "fsgsbase",
    "tsc_adjust",
    "sgx",
    "bmi1",
    "hle",
    "avx2",
    "",
    "smep",
    "bmi2",
    "erms",
    "invpcid",
    "rtm",
    "cqm",
    "",
    "mpx",
    "rdt_a",
    "avx512f",
    "avx512dq",
    "rdseed",
    "adx",
    "smap",
    "avx512ifma",
    "",
    "clflushopt",
    "clwb",
    "intel_pt",
    "avx512pf",
    "avx512er",
    "avx512cd",
    "sha_ni",
    "avx512bw",
    "avx512vl",
];
const LEAF_7_ECX: [&str; 32] = [
    "",
    "avx512vbmi",
    "umip",
    "pku",
    "ospke",
    "waitpkg",
    "avx512_vbmi2",
    "",
    "gfni",
    "vaes",
    "vpclmulqdq",
    "avx512_vnni",
    "avx512_bitalg",
    "tme",
    "avx512_vpopcntdq",
    "",
    "la57",
    "",
    "",
    "",
    "",
    "",
    "rdpid",
    "",
    "",
    "cldemote",
    "",
    "movdiri",
    "movdir64b",
    "enqcmd",
    "sgx_lc",
    "",
];
const LEAF_7_EDX: [&str; 32] = [
    "",
    "",
    "avx512_4vnniw",
    "avx512_4fmaps",
    "fsrm",
    "",
    "",
    "",
    "avx512_vp2intersect",
    "",
    "md_clear",
    "",
    "",
    "",
    "serialize",
    "",
    "tsxldtrk",
    "",
    "pconfig",
    "arch_lbr",
    "ibt",
    "",
    "amx_bf16",
    "avx512_fp16",
    "amx_tile",
    "amx_int8",
    "",
    "",
    "flush_l1d",
    "arch_capabilities",
    "",
    "",
];
const EXTENDED_EDX: [&str; 32] = [
    "", "", "", "", "", "", "", "", "", "", "", "syscall", "", "", "", "", "", "", "", "mp", "nx",
    "", "mmxext", "", "", "fxsr_opt", "pdpe1gb", "rdtscp", "", "lm", "3dnowext", "3dnow",
];
const EXTENDED_ECX: [&str; 32] = [
    "lahf_lm",
    "cmp_legacy",
    "svm",
    "extapic",
    "cr8_legacy",
    "abm",
    "sse4a",
    "misalignsse",
    "3dnowprefetch",
    "osvw",
    "ibs",
    "xop",
    "skinit",
    "wdt",
    "",
    "lwp",
    "fma4",
    "tce",
    "",
    "nodeid_msr",
    "",
    "tbm",
    "topoext",
    "perfctr_core",
    "perfctr_nb",
    "",
    "bpext",
    "ptsc",
    "perfctr_llc",
    "mwaitx",
    "",
    "",
];
const LEAF_D_1_EAX: [&str; 5] = ["xsaveopt", "xsavec", "xgetbv1", "xsaves", ""];

fn flags() -> String {
    let highest = cpuid(0, 0).eax;
    let one = cpuid(1, 0);
    let seven = if highest >= 7 { Some(cpuid(7, 0)) } else { None };
    let extended = cpuid(0x8000_0001, 0);
    let mut sets: Vec<(u32, &[&str])> = alloc::vec![
        (one.edx, &LEAF_1_EDX[..]),
        (extended.edx, &EXTENDED_EDX),
        (one.ecx, &LEAF_1_ECX),
        (extended.ecx, &EXTENDED_ECX),
    ];
    if let Some(seven) = seven {
        sets.push((seven.ebx, &LEAF_7_EBX));
    }
    if highest >= 0xd {
        sets.push((cpuid(0xd, 1).eax, &LEAF_D_1_EAX));
    }
    if let Some(seven) = seven {
        sets.push((seven.ecx, &LEAF_7_ECX));
        sets.push((seven.edx, &LEAF_7_EDX));
    }
    let mut names: Vec<&str> = Vec::new();
    for (bits, known) in sets {
        names.extend(
            known
                .iter()
                .enumerate()
                .filter(|(bit, name)| bits >> bit & 1 != 0 && !name.is_empty())
                .map(|(_, name)| *name),
        );
    }
    names.join(" ")
}

/// Bits of physical and of virtual addresses (leaf 80000008h).
fn address_sizes() -> (u32, u32) {
    let eax = cpuid(0x8000_0008, 0).eax;
    (eax & 0xff, (eax >> 8) & 0xff)
}

/// The text for a number of processors.
pub(super) fn describe(cpus: u32) -> String {
    let (family, model, stepping) = signature();
    let (vendor, brand, flags) = (vendor(), brand(), flags());
    let mhz = megahertz(&brand);
    let (physical, virtual_bits) = address_sizes();
    let line_size = (cpuid(1, 0).ebx >> 8 & 0xff) * 8;
    let mut text = String::new();
    for cpu in 0..cpus {
        text += &format!(
            "processor\t: {cpu}\nvendor_id\t: {vendor}\ncpu family\t: {family}\nmodel\t\t: {model}\n\
             model name\t: {brand}\nstepping\t: {stepping}\ncpu MHz\t\t: {mhz}.000\ncache size\t: 0 KB\n\
             physical id\t: 0\nsiblings\t: {cpus}\ncore id\t\t: {cpu}\ncpu cores\t: {cpus}\napicid\t\t: {cpu}\n\
             initial apicid\t: {cpu}\nfpu\t\t: yes\nfpu_exception\t: yes\ncpuid level\t: {}\nwp\t\t: yes\n\
             flags\t\t: {flags}\nbugs\t\t:\nbogomips\t: {}.00\nclflush size\t: {line_size}\n\
             cache_alignment\t: {line_size}\naddress sizes\t: {physical} bits physical, {virtual_bits} bits virtual\n\
             power management:\n\n",
            cpuid(0, 0).eax,
            mhz * 2,
        );
    }
    text
}

/// `cpuinfo`.
pub(super) fn cpuinfo() -> Result<Vec<u8>> {
    Ok(describe(kernel().config.get().cpus.max(1)).into_bytes())
}
