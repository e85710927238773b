//! What this host has and lacks: the facts behind `thaw doctor`.

mod advice;
mod calls;
mod neighbours;
mod separation;

use std::fs;
use std::io;
use std::path::Path;

use rustix::fs::StatVfsMountFlags;
use rustix::process::geteuid;
use rustix::system::uname;

use advice::Settings;
pub(crate) use advice::{RESERVE_IDS, STORE_KERNEL, TOO_FEW_IDS};
pub(crate) use calls::call_main;

use crate::egress::check_egress_bytes;
use crate::image::cpu_features;
use crate::kernel::Kernel;
use crate::limits::{self, Controller, WeakLimits};
use crate::pagemap::PageMap;
use crate::sys::seccomp_action_available;
use crate::zygote::Console;
use crate::zygote::{UserIds, ZygoteConfig, ZygoteError, ZygoteParent};

/// How well the host serves one need of Thaw.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Status {
    /// All that Thaw can use is there.
    Good,
    /// Thaw works, with the limitation that the finding names.
    Limited,
    /// Thaw does not work on this host until it is mended.
    Missing,
}

/// One finding about the host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Probe {
    /// Short name, such as `user namespaces`.
    pub name: &'static str,
    /// How well the host serves this need.
    pub status: Status,
    /// What was found, one phrase.
    pub found: String,
    /// What to do about it, if anything.
    pub way_out: Option<String>,
}

impl Probe {
    fn good(name: &'static str, found: impl Into<String>) -> Self {
        Self { name, status: Status::Good, found: found.into(), way_out: None }
    }

    fn with(name: &'static str, status: Status, found: impl Into<String>, way_out: &str) -> Self {
        Self { name, status, found: found.into(), way_out: Some(way_out.to_owned()) }
    }
}

/// Oldest host kernel with every call that Thaw needs: `MADV_POPULATE_WRITE`
/// and `cgroup.kill` came with 5.14.
const OLDEST_KERNEL: (u32, u32) = (5, 14);

/// Examines the host. Takes some milliseconds: what can be tried is tried.
pub fn probe() -> Vec<Probe> {
    let release = uname().release().to_string_lossy().into_owned();
    let (calls, would_be_killed) = calls::calls();
    let mut probes = vec![kernel_version(&release), calls];
    if would_be_killed {
        return probes;
    }
    let settings = Settings::read();
    probes.extend([
        seccomp(),
        fsgsbase(rustix::param::linux_hwcap().1 as u64),
        xsave(&cpu_features()),
        lowest_address(&fs::read_to_string("/proc/sys/vm/mmap_min_addr").unwrap_or_default()),
        clock_source(&fs::read_to_string(CLOCK_SOURCE).unwrap_or_default()),
        user_namespaces(),
        separation::probe(),
        capabilities(&settings),
        memory_files(&settings),
        executable_memory(executable_memory_is_refused()),
        tracing(&fs::read_to_string(PTRACE_SCOPE).unwrap_or_default()),
    ]);
    probes.extend(limits_of_sandboxes());
    probes.push(page_map());
    probes.push(bytes_of_connections(check_egress_bytes()));
    probes.extend(isolation());
    probes.extend(neighbours::probe());
    probes
}

fn kernel_version(release: &str) -> Probe {
    const NAME: &str = "host kernel";
    let mut numbers = release.split(|c: char| !c.is_ascii_digit()).map(str::parse::<u32>);
    let version = match (numbers.next(), numbers.next()) {
        (Some(Ok(major)), Some(Ok(minor))) => (major, minor),
        _ => (0, 0),
    };
    if version < OLDEST_KERNEL {
        return Probe::with(
            NAME,
            Status::Missing,
            format!("Linux {release}"),
            "upgrade to Linux 5.14 or newer",
        );
    }
    if version < (6, 7) {
        let found = format!("Linux {release}, without PAGEMAP_SCAN");
        return Probe::with(
            NAME,
            Status::Limited,
            found,
            "Linux 6.7 freezes programs with large reservations faster",
        );
    }
    Probe::good(NAME, format!("Linux {release}"))
}

fn seccomp() -> Probe {
    const NAME: &str = "seccomp";
    const ACTIONS: [(&str, u32); 4] = [
        ("trap", libc::SECCOMP_RET_TRAP),
        ("errno", libc::SECCOMP_RET_ERRNO),
        ("kill process", libc::SECCOMP_RET_KILL_PROCESS),
        ("allow", libc::SECCOMP_RET_ALLOW),
    ];
    let missing: Vec<&str> = ACTIONS
        .iter()
        .filter(|(_, action)| !seccomp_action_available(*action))
        .map(|(name, _)| *name)
        .collect();
    if missing.is_empty() {
        return Probe::good(NAME, "filters with trap, errno and kill process");
    }
    let found = format!("no filter action {}", missing.join(", "));
    Probe::with(
        NAME,
        Status::Missing,
        found,
        "use a host kernel with CONFIG_SECCOMP_FILTER, and a container that allows seccomp(2)",
    )
}

fn fsgsbase(hwcap2: u64) -> Probe {
    const NAME: &str = "FSGSBASE";
    /// Bit 1 of `AT_HWCAP2` on x86-64 (arch/x86/include/uapi/asm/hwcap2.h).
    const HWCAP2_FSGSBASE: u64 = 1 << 1;
    if hwcap2 & HWCAP2_FSGSBASE != 0 {
        return Probe::good(NAME, "wrfsbase and wrgsbase work in user mode");
    }
    Probe::with(
        NAME,
        Status::Missing,
        "wrgsbase faults in user mode",
        "use a CPU since 2012 and a host kernel since 5.9, booted without `nofsgsbase`",
    )
}

fn xsave(features: &[u32; 8]) -> Probe {
    const NAME: &str = "XSAVE";
    let enabled = features[0] & 1 << 27 != 0;
    if !enabled {
        return Probe::with(
            NAME,
            Status::Missing,
            "xsave is not enabled",
            "use a CPU with XSAVE (Intel since 2008, AMD since 2011), visible in this virtual machine, \
             and a host kernel that is booted without `noxsave`",
        );
    }
    let states =
        [(1 << 2, "AVX"), (1 << 6, "AVX-512"), (1 << 9, "protection keys"), (1 << 17, "AMX")];
    let names: Vec<&str> =
        states.iter().filter(|(bit, _)| features[6] & bit != 0).map(|(_, name)| *name).collect();
    Probe::good(NAME, format!("{} bytes: SSE, {}", features[7], names.join(", ")))
}

/// The gate lies at 64 KiB, so this much must be mappable.
fn lowest_address(limit: &str) -> Probe {
    const NAME: &str = "lowest address";
    match limit.trim().parse::<u64>() {
        Ok(limit) if limit <= thaw_abi::layout::GATE_BASE => {
            Probe::good(NAME, format!("vm.mmap_min_addr is {limit}"))
        }
        Ok(limit) => Probe::with(
            NAME,
            Status::Missing,
            format!("vm.mmap_min_addr is {limit}"),
            "run `sysctl vm.mmap_min_addr=65536`",
        ),
        Err(_) => Probe::with(
            NAME,
            Status::Limited,
            "vm.mmap_min_addr cannot be read",
            "make sure that it is at most 65536",
        ),
    }
}

/// Which hardware Linux takes the time from.
const CLOCK_SOURCE: &str = "/sys/devices/system/clocksource/clocksource0/current_clocksource";

/// The kernel reads the host's clocks through the host's vdso, which has no
/// answer for every source of time.
fn clock_source(source: &str) -> Probe {
    const NAME: &str = "clock source";
    const WITH_VDSO: [&str; 4] = ["tsc", "kvm-clock", "hyperv_clocksource_tsc_page", "xen"];
    let source = source.trim();
    if WITH_VDSO.contains(&source) {
        return Probe::good(NAME, source);
    }
    let way_out = "choose one with a vdso clock, such as tsc: \
                   `echo tsc > /sys/devices/system/clocksource/clocksource0/current_clocksource`";
    let status = if source.is_empty() { Status::Limited } else { Status::Missing };
    let found = if source.is_empty() { "unknown" } else { source };
    Probe::with(NAME, status, found, way_out)
}

fn user_namespaces() -> Probe {
    const NAME: &str = "user namespaces";
    let read =
        |path: &str| fs::read_to_string(path).ok().and_then(|text| text.trim().parse::<u64>().ok());
    let forbidden = if read("/proc/sys/user/max_user_namespaces") == Some(0) {
        Some(("user.max_user_namespaces is 0", "run `sysctl user.max_user_namespaces=15000`"))
    } else if read("/proc/sys/kernel/unprivileged_userns_clone") == Some(0) && !geteuid().is_root()
    {
        Some((
            "kernel.unprivileged_userns_clone is 0",
            "run `sysctl kernel.unprivileged_userns_clone=1`",
        ))
    } else if read("/proc/sys/kernel/apparmor_restrict_unprivileged_userns") == Some(1)
        && !geteuid().is_root()
    {
        Some((
            "AppArmor restricts unprivileged user namespaces",
            "run `sysctl kernel.apparmor_restrict_unprivileged_userns=0` or add a profile for thaw",
        ))
    } else {
        None
    };
    match forbidden {
        None => Probe::good(NAME, "allowed"),
        Some((found, way_out)) => {
            let status = if geteuid().is_root() { Status::Limited } else { Status::Missing };
            Probe::with(NAME, status, found, way_out)
        }
    }
}

/// Whether each limit is enforced, and where or why not.
/// Whether the host tells how many bytes a connection has carried; `tried` says so.
fn bytes_of_connections(tried: io::Result<()>) -> Probe {
    const NAME: &str = "bytes of connections";
    match tried {
        Ok(()) => Probe::good(NAME, "the host counts those of outgoing connections"),
        Err(error) => Probe::with(
            NAME,
            Status::Limited,
            format!("those of outgoing connections are not counted ({error})"),
            "load the host's module `tcp_diag`, and let the service's filter allow AF_NETLINK",
        ),
    }
}

fn limits_of_sandboxes() -> Vec<Probe> {
    let way_out = format!("{}, or accept weaker limits with --weak-limits", limits::way_out());
    let hierarchy = limits::discover();
    Controller::ALL
        .into_iter()
        .map(|controller| {
            let name = match controller {
                Controller::Memory => "memory limits",
                Controller::Cpu => "CPU limits",
                Controller::Pids => "process limits",
                Controller::CpuAccounting => "CPU time limits",
            };
            let place = hierarchy.places().iter().find(|p| p.controllers.contains(&controller));
            if let Some(place) = place {
                let above = place.directory.parent().unwrap_or(&place.directory);
                let found =
                    format!("control groups version {}, in {}", place.version, above.display());
                return Probe::good(name, found);
            }
            let missing = hierarchy.missing().iter().find(|m| m.controller == controller);
            let reason = missing.map_or("unknown", |missing| missing.reason.as_str());
            let weak = match controller {
                Controller::Memory => {
                    "RLIMIT_DATA only, which counts what is mapped and not what is used"
                }
                Controller::Cpu => "kept by the guest's kernel only",
                Controller::Pids => "RLIMIT_NPROC only, where each sandbox has its own user id",
                Controller::CpuAccounting => "what /proc shows only",
            };
            Probe::with(name, Status::Limited, format!("{weak} ({reason})"), &way_out)
        })
        .collect()
}

fn capabilities(settings: &Settings) -> Probe {
    const NAME: &str = "capabilities";
    if settings.is_root && !settings.may_change_ids {
        return Probe::with(
            NAME,
            Status::Missing,
            "root without CAP_SETUID and CAP_SETGID, which sandboxes with user ids of their own take",
            "leave them in the unit's CapabilityBoundingSet=, or run Thaw as another user",
        );
    }
    Probe::good(
        NAME,
        if settings.is_root { "root with CAP_SETUID and CAP_SETGID" } else { "none needed" },
    )
}

fn memory_files(settings: &Settings) -> Probe {
    const NAME: &str = "memory files";
    if settings.forbids_memory_files() {
        let found = "executable ones are forbidden";
        return Probe::with(NAME, Status::Missing, found, advice::MEMORY_FILES);
    }
    Probe::good(NAME, "executable ones are allowed")
}

/// Whether memory that was written can be made executable: the kernel rewrites system
/// calls in the program's memory, and mappings of a file change from one to the other.
fn executable_memory_is_refused() -> bool {
    crate::sys::refuses_executable_memory()
}

fn executable_memory(is_refused: bool) -> Probe {
    const NAME: &str = "executable memory";
    if is_refused {
        return Probe::with(
            NAME,
            Status::Missing,
            "memory that was written cannot be made executable",
            "drop MemoryDenyWriteExecute= from the systemd unit, or whatever else sets PR_SET_MDWE or \
             filters mprotect(2)",
        );
    }
    Probe::good(NAME, "allowed for memory that was written")
}

/// Who may trace whom (Documentation/admin-guide/LSM/Yama.rst).
const PTRACE_SCOPE: &str = "/proc/sys/kernel/yama/ptrace_scope";

fn tracing(scope: &str) -> Probe {
    const NAME: &str = "tracing";
    match scope.trim() {
        "3" => Probe::with(
            NAME,
            Status::Limited,
            "kernel.yama.ptrace_scope is 3: nobody may read the memory of another process",
            "images are booted, but none can be built and no working set recorded: set a lower value \
             in /etc/sysctl.d and reboot, since 3 cannot be lowered",
        ),
        "2" if !geteuid().is_root() => Probe::with(
            NAME,
            Status::Limited,
            "kernel.yama.ptrace_scope is 2: it takes CAP_SYS_PTRACE to read another process's memory",
            "if `zygote` below says that memory cannot be read, build images as root, or run \
             `sysctl kernel.yama.ptrace_scope=1`",
        ),
        "" => Probe::good(NAME, "not restricted"),
        scope => Probe::good(NAME, format!("kernel.yama.ptrace_scope is {scope}")),
    }
}

/// What to do about an error while the zygote parent starts, if this host's settings
/// explain it.
pub(crate) fn advice(step: &str, error: &std::io::Error) -> Option<&'static str> {
    advice::explain(step, error, &Settings::read())
}

fn page_map() -> Probe {
    const NAME: &str = "page map";
    // Some page that is surely there: the one of this function's stack.
    let local = 0_u64;
    let here = &raw const local as u64 & !0xfff;
    let mut pages = 0;
    let walked = PageMap::own().and_then(|mut map| map.runs(here, here + 0x1000, |_| pages += 1));
    match walked {
        Ok(()) if pages > 0 => Probe::good(NAME, "readable"),
        Ok(()) => Probe::with(
            NAME,
            Status::Missing,
            "shows no pages",
            "use a host kernel with CONFIG_PROC_PAGE_MONITOR",
        ),
        Err(error) => Probe::with(
            NAME,
            Status::Missing,
            error.to_string(),
            "use a host kernel with CONFIG_PROC_PAGE_MONITOR, and mount /proc",
        ),
    }
}

/// Whether programs can be run from the store in this directory.
pub fn state_directory(path: &Path) -> Probe {
    const NAME: &str = "state directory";
    match rustix::fs::statvfs(path) {
        Ok(about) if about.f_flag.contains(StatVfsMountFlags::NOEXEC) => Probe::with(
            NAME,
            Status::Missing,
            format!("{} lies on a file system that is mounted noexec", path.display()),
            "set THAW_HOME to a directory on another one: sandboxes map programs from there",
        ),
        Ok(_) => Probe::good(NAME, path.display().to_string()),
        Err(errno) => Probe::with(
            NAME,
            Status::Missing,
            format!("{}: {errno}", path.display()),
            "set THAW_HOME to a directory that you may write to",
        ),
    }
}

/// Starts a zygote parent and a zygote: namespaces, ids, empty root, execution
/// of the kernel and the right to trace it are found out by doing.
fn isolation() -> Vec<Probe> {
    const PARENT: &str = "namespaces";
    const IDS: &str = "user ids";
    const ZYGOTE: &str = "zygote";
    let kernel = match Kernel::embedded() {
        Ok(kernel) => kernel,
        Err(error) => {
            return vec![Probe::with(
                ZYGOTE,
                Status::Missing,
                error.to_string(),
                "build Thaw with its kernel",
            )];
        }
    };
    let config = ZygoteConfig {
        weak_limits: WeakLimits::Accept,
        ..ZygoteConfig::new(kernel, Console::Pipe)
    };
    let parent = match ZygoteParent::start(config) {
        Ok(parent) => parent,
        Err(error) => {
            let way_out = match &error {
                ZygoteError::Parent { step, source } => advice(step, source),
                _ => None,
            };
            let way_out = way_out.unwrap_or(
                "allow this user to make namespaces, or run as root outside a restricted container",
            );
            return vec![Probe::with(PARENT, Status::Missing, without_hint(&error), way_out)];
        }
    };
    let ids = match parent.user_ids() {
        UserIds::OnePerSandbox => Probe::good(IDS, "one for each sandbox"),
        UserIds::Shared => Probe::with(
            IDS,
            Status::Limited,
            "all sandboxes share yours",
            "run as root, or install newuidmap (Debian: uidmap) and add a range for this user to both \
             /etc/subuid and /etc/subgid",
        ),
    };
    let zygote = match parent.create() {
        Ok(zygote) => match zygote.check_memory_is_readable() {
            Ok(()) => Probe::good(ZYGOTE, "starts isolated, and its memory can be frozen"),
            Err(error) => Probe::with(
                ZYGOTE,
                Status::Limited,
                format!("starts, but its memory cannot be read: {error}"),
                "images cannot be built, but booted: in a container, allow ptrace(2) and process \
                 namespaces for Thaw; with kernel.yama.ptrace_scope=3, set a lower one and reboot",
            ),
        },
        Err(error) => Probe::with(
            ZYGOTE,
            Status::Missing,
            error.to_string(),
            "see the other findings; if all are good, report this as a bug",
        ),
    };
    vec![
        Probe::good(PARENT, "user, pid, network, ipc, host name, mount and control group"),
        ids,
        zygote,
    ]
}

/// The error without its pointer to `thaw doctor`.
fn without_hint(error: &ZygoteError) -> String {
    match error {
        ZygoteError::Parent { step, source } => format!("cannot {step}: {source}"),
        error => error.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_host_that_counts_no_bytes_is_limited() {
        assert_eq!(bytes_of_connections(Ok(())).status, Status::Good);
        let without = bytes_of_connections(Err(io::ErrorKind::PermissionDenied.into()));
        assert_eq!(without.status, Status::Limited);
        assert!(without.way_out.unwrap().contains("tcp_diag"));
    }

    #[test]
    fn a_forbidden_trace_is_named() {
        assert_eq!(tracing("").status, Status::Good);
        assert_eq!(tracing("1\n").status, Status::Good);
        let strictest = tracing("3\n");
        assert_eq!(strictest.status, Status::Limited);
        assert!(strictest.found.contains("ptrace_scope is 3"), "{strictest:?}");
    }

    #[test]
    fn clock_sources_without_a_vdso_clock_are_named() {
        assert_eq!(clock_source("tsc\n").status, Status::Good);
        assert_eq!(clock_source("hpet\n").status, Status::Missing);
        assert_eq!(clock_source("").status, Status::Limited);
    }

    #[test]
    fn versions_are_compared_as_numbers() {
        assert_eq!(kernel_version("6.18.44-fc").status, Status::Good);
        assert_eq!(kernel_version("6.7").status, Status::Good);
        assert_eq!(kernel_version("6.1.0-42-amd64").status, Status::Limited);
        assert_eq!(kernel_version("5.13.9").status, Status::Missing);
        assert_eq!(kernel_version("4.18.0-553.el8").status, Status::Missing);
        assert_eq!(kernel_version("?").status, Status::Missing);
    }

    #[test]
    fn what_is_missing_has_a_way_out() {
        assert_eq!(fsgsbase(0b10).status, Status::Good);
        assert_eq!(lowest_address("65536\n").status, Status::Good);
        assert_eq!(xsave(&[1 << 27, 0, 0, 0, 0, 2, 7, 832]).status, Status::Good);
        // The kernel saves with xsave64 and restores with xrstor64: no xsavec is needed.
        assert_eq!(xsave(&[1 << 27, 0, 0, 0, 0, 0, 7, 832]).status, Status::Good);
        let settings = Settings { memfd_noexec: Some(2), is_root: true, ..Settings::default() };
        for probe in [
            fsgsbase(0),
            lowest_address("131072"),
            xsave(&[0; 8]),
            memory_files(&settings),
            capabilities(&settings),
            executable_memory(true),
        ] {
            assert_eq!(probe.status, Status::Missing);
            assert!(probe.way_out.is_some());
        }
    }
}
