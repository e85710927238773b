//! What sandboxes could learn of each other through the processor and the memory of
//! this host: settings that an operator can change (docs/hardening.md).

use std::fs;
use std::path::Path;

use super::{Probe, Status};
use crate::cores::{CoreError, CoreScheduling};

/// Where Linux says whether two hardware threads share a core.
const SMT: &str = "/sys/devices/system/cpu/smt/active";
/// Where Linux says what it does against each fault of the processor.
const VULNERABILITIES: &str = "/sys/devices/system/cpu/vulnerabilities";
/// Where Linux says whether it merges equal pages.
const MERGING: &str = "/sys/kernel/mm/ksm/run";

/// Examines the settings.
pub(super) fn probe() -> [Probe; 4] {
    let read = |path| fs::read_to_string(path).unwrap_or_default();
    let cores = core_scheduling(&read(SMT), &CoreScheduling::start().map(drop));
    [
        smt(&read(SMT)),
        cores,
        mitigations(&vulnerable(Path::new(VULNERABILITIES))),
        merging(&read(MERGING)),
    ]
}

fn smt(active: &str) -> Probe {
    const NAME: &str = "hardware threads";
    if active.trim() != "1" {
        return Probe::good(NAME, "no two share a core, as far as this host can tell");
    }
    Probe::with(
        NAME,
        Status::Limited,
        "two share a core, so that two tenants may share its caches and buffers at a time",
        "if tenants do not trust each other: `echo off > /sys/devices/system/cpu/smt/control`",
    )
}

fn core_scheduling(smt_active: &str, tried: &Result<(), CoreError>) -> Probe {
    const NAME: &str = "core scheduling";
    let not_needed = || Probe::good(NAME, "not needed: no two hardware threads share a core");
    match tried {
        Ok(()) => Probe::good(NAME, "`thaw serve --core-scheduling` keeps tenants apart on cores"),
        Err(_) if smt_active.trim() != "1" => not_needed(),
        Err(CoreError::NoThreads) => not_needed(),
        Err(CoreError::NoKernel) => {
            let way_out = "use one with CONFIG_SCHED_CORE, or `echo off > \
                           /sys/devices/system/cpu/smt/control`, if tenants do not trust each other";
            Probe::with(NAME, Status::Limited, "the host kernel has none", way_out)
        }
        Err(CoreError::Host(error)) => {
            let found = format!("prctl(2) refuses it ({error})");
            Probe::with(NAME, Status::Limited, found, "let a container's filter allow prctl(2)")
        }
    }
}

/// Faults of the processor that nothing is done against.
fn vulnerable(directory: &Path) -> Vec<String> {
    let Ok(entries) = fs::read_dir(directory) else { return Vec::new() };
    let is_open =
        |path: &Path| fs::read_to_string(path).is_ok_and(|state| state.starts_with("Vulnerable"));
    let open = entries.flatten().filter(|entry| is_open(&entry.path()));
    let mut names: Vec<_> =
        open.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect();
    names.sort();
    names
}

fn mitigations(vulnerable: &[String]) -> Probe {
    const NAME: &str = "mitigations";
    if vulnerable.is_empty() {
        return Probe::good(NAME, "for every fault of the processor that this host knows");
    }
    Probe::with(
        NAME,
        Status::Limited,
        format!("nothing is done against {}", vulnerable.join(", ")),
        "boot without `mitigations=off`, update the microcode, or give each tenant a machine",
    )
}

fn merging(run: &str) -> Probe {
    const NAME: &str = "page merging";
    if run.trim() != "1" {
        return Probe::good(NAME, "equal pages are not merged");
    }
    Probe::with(
        NAME,
        Status::Limited,
        "equal pages are merged, though Thaw asks for none of its own",
        "`echo 2 > /sys/kernel/mm/ksm/run` if nothing else on this host needs it",
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_setting_that_helps_a_neighbour_is_named() {
        assert_eq!(smt("0\n").status, Status::Good);
        assert_eq!(smt("").status, Status::Good);
        assert_eq!(smt("1\n").status, Status::Limited);
        assert_eq!(core_scheduling("1\n", &Ok(())).status, Status::Good);
        assert_eq!(core_scheduling("1\n", &Err(CoreError::NoThreads)).status, Status::Good);
        assert_eq!(core_scheduling("1\n", &Err(CoreError::NoKernel)).status, Status::Limited);
        assert_eq!(core_scheduling("0\n", &Err(CoreError::NoKernel)).status, Status::Good);
        assert_eq!(merging("0\n").status, Status::Good);
        assert_eq!(merging("1\n").status, Status::Limited);
    }

    #[test]
    fn open_faults_are_listed() {
        let directory = tempfile::tempdir().unwrap();
        for (name, state) in [
            ("meltdown", "Not affected\n"),
            ("spectre_v2", "Vulnerable, IBPB: disabled\n"),
            ("mds", "Mitigation: Clear CPU buffers\n"),
            ("gds", "Vulnerable\n"),
        ] {
            fs::write(directory.path().join(name), state).unwrap();
        }
        assert_eq!(vulnerable(directory.path()), ["gds", "spectre_v2"]);
        assert!(mitigations(&["gds".to_owned()]).found.contains("gds"));
        assert_eq!(mitigations(&vulnerable(Path::new("/nowhere"))).status, Status::Good);
    }
}
