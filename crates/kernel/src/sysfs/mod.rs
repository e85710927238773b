//! `/sys` (sysfs(5)) and the control group file system below it (cgroups(7)),
//! as much of them as language runtimes read.

mod interfaces;

use alloc::format;
use alloc::sync::Arc;
use alloc::vec::Vec;

use crate::errno::Result;
use crate::fs::inode::{FileType, FilesystemId, Inode};
use crate::fs::pseudo::{
    Directory, Fixed, Generated, Item, Kind, Names, Place, directory, file, text,
};
use crate::procfs::{cpu_list, cpu_mask};
use crate::state::kernel;
use crate::task::sched_attributes::present_cpus;

use interfaces::Interfaces;

/// `SYSFS_MAGIC` and `CGROUP2_SUPER_MAGIC` (statfs(2)).
const MAGIC: i64 = 0x6265_6572;
const CGROUP_MAGIC: i64 = 0x6367_7270;

/// The root directory.
pub fn root(filesystem: FilesystemId) -> Arc<dyn Inode> {
    Directory::new(Place { filesystem, magic: MAGIC, ino: 1, owner: (0, 0) }, Fixed(ROOT))
}

/// The root of the file system on `/sys/fs/cgroup`.
pub fn cgroup_root(filesystem: FilesystemId) -> Arc<dyn Inode> {
    Directory::new(Place { filesystem, magic: CGROUP_MAGIC, ino: 1, owner: (0, 0) }, Fixed(CGROUP))
}

fn cpus() -> u32 {
    kernel().config.get().cpus.max(1)
}

fn mask_line() -> Result<Vec<u8>> {
    Ok(format!("{}\n", cpu_mask(present_cpus())).into_bytes())
}

fn list_line() -> Result<Vec<u8>> {
    Ok(format!("{}\n", cpu_list(present_cpus())).into_bytes())
}

const ROOT: &[Item] = &[
    directory("block", &[]),
    directory("bus", &[]),
    directory("class", CLASS),
    directory("dev", &[directory("block", &[]), directory("char", &[])]),
    directory("devices", &[directory("system", SYSTEM)]),
    directory("fs", &[directory("cgroup", &[])]),
    directory("kernel", KERNEL),
    directory("module", &[]),
];

const CLASS: &[Item] = &[Item {
    name: "net",
    kind: Kind::Made(FileType::Directory, |place| Directory::new(*place, Interfaces)),
}];

const SYSTEM: &[Item] = &[
    directory(
        "clocksource",
        &[directory(
            "clocksource0",
            &[text("available_clocksource", "tsc \n"), text("current_clocksource", "tsc\n")],
        )],
    ),
    Item {
        name: "cpu",
        kind: Kind::Made(FileType::Directory, |place| Directory::new(*place, Processors)),
    },
    directory(
        "node",
        &[
            text("has_cpu", "0\n"),
            text("has_memory", "0\n"),
            text("has_normal_memory", "0\n"),
            directory(
                "node0",
                &[
                    file("cpulist", list_line),
                    file("cpumap", mask_line),
                    file("meminfo", node_meminfo),
                    text("distance", "10\n"),
                ],
            ),
            text("online", "0\n"),
            text("possible", "0\n"),
        ],
    ),
];

fn node_meminfo() -> Result<Vec<u8>> {
    let (total, free) = crate::procfs::memory();
    let line = |name: &str, bytes: u64| {
        format!("Node 0 {:<16}{:>8} kB\n", format!("{name}:"), bytes / 1024)
    };
    Ok((line("MemTotal", total) + &line("MemFree", free) + &line("MemUsed", total - free))
        .into_bytes())
}

const KERNEL: &[Item] = &[directory(
    "mm",
    &[
        directory("hugepages", &[]),
        directory(
            "transparent_hugepage",
            &[
                text("defrag", "always defer defer+madvise [madvise] never\n"),
                text("enabled", "always [madvise] never\n"),
                text("hpage_pmd_size", "2097152\n"),
                text("shmem_enabled", "always within_size advise [never] deny force\n"),
            ],
        ),
    ],
)];

/// `/sys/devices/system/cpu`: the fixed names, then one directory per processor.
struct Processors;

const PROCESSORS: &[Item] = &[
    text("isolated", "\n"),
    text("kernel_max", "8191\n"),
    text("offline", "\n"),
    file("online", list_line),
    file("possible", list_line),
    file("present", list_line),
    directory("smt", &[text("active", "0\n"), text("control", "notsupported\n")]),
];

const TOPOLOGY: &[Item] = &[
    text("cluster_id", "0\n"),
    file("core_siblings", mask_line),
    file("core_siblings_list", list_line),
    text("die_id", "0\n"),
    file("die_cpus", mask_line),
    file("die_cpus_list", list_line),
    file("package_cpus", mask_line),
    file("package_cpus_list", list_line),
    text("physical_package_id", "0\n"),
];

impl Names for Processors {
    fn lookup(&self, name: &[u8], place: &Place) -> Result<Option<Arc<dyn Inode>>> {
        if let Some(found) = Fixed(PROCESSORS).lookup(name, place)? {
            return Ok(Some(found));
        }
        let number = core::str::from_utf8(name)
            .ok()
            .and_then(|name| name.strip_prefix("cpu")?.parse::<u32>().ok());
        let known = number.filter(|&number| number < cpus());
        Ok(known.map(|number| {
            Directory::new(place.below(name), Processor { number }) as Arc<dyn Inode>
        }))
    }

    fn list(&self, emit: &mut dyn FnMut(&[u8], FileType)) -> Result<()> {
        for number in 0..cpus() {
            emit(format!("cpu{number}").as_bytes(), FileType::Directory);
        }
        Fixed(PROCESSORS).list(emit)
    }
}

/// `/sys/devices/system/cpu/cpuN`.
struct Processor {
    number: u32,
}

impl Names for Processor {
    fn lookup(&self, name: &[u8], place: &Place) -> Result<Option<Arc<dyn Inode>>> {
        match name {
            b"topology" => {
                Ok(Some(Directory::new(place.below(name), Topology { number: self.number })))
            }
            _ => Ok(None),
        }
    }

    fn list(&self, emit: &mut dyn FnMut(&[u8], FileType)) -> Result<()> {
        emit(b"topology", FileType::Directory);
        Ok(())
    }
}

/// `/sys/devices/system/cpu/cpuN/topology`: every processor is a core of its own.
struct Topology {
    number: u32,
}

impl Names for Topology {
    fn lookup(&self, name: &[u8], place: &Place) -> Result<Option<Arc<dyn Inode>>> {
        let number = self.number;
        match name {
            b"core_id" | b"core_cpus_list" | b"thread_siblings_list" => {
                Ok(Some(Generated::read_only(place.below(name), move || {
                    Ok(format!("{number}\n").into_bytes())
                })))
            }
            b"core_cpus" | b"thread_siblings" => {
                Ok(Some(Generated::read_only(place.below(name), move || {
                    Ok(format!("{}\n", cpu_mask(1 << number)).into_bytes())
                })))
            }
            name => Fixed(TOPOLOGY).lookup(name, place),
        }
    }

    fn list(&self, emit: &mut dyn FnMut(&[u8], FileType)) -> Result<()> {
        for name in ["core_cpus", "core_cpus_list", "core_id", "thread_siblings"] {
            emit(name.as_bytes(), FileType::Regular);
        }
        emit(b"thread_siblings_list", FileType::Regular);
        Fixed(TOPOLOGY).list(emit)
    }
}

/// A number in a line; 0 is a process or thread that the reader does not see.
fn id_line(number: u32) -> Vec<u8> {
    format!("{number}\n").into_bytes()
}

/// Control group limits: those of the sandbox.
const CGROUP: &[Item] = &[
    text("cgroup.controllers", "cpuset cpu memory pids\n"),
    text("cgroup.events", "populated 1\nfrozen 0\n"),
    text("cgroup.freeze", "0\n"),
    text("cgroup.max.depth", "max\n"),
    text("cgroup.max.descendants", "max\n"),
    file("cgroup.procs", || {
        let processes = crate::state::kernel().tasks.all_processes();
        Ok(processes.iter().flat_map(|it| id_line(it.pid.for_caller())).collect())
    }),
    text("cgroup.stat", "nr_descendants 0\nnr_dying_descendants 0\n"),
    text("cgroup.subtree_control", "\n"),
    file("cgroup.threads", || {
        let threads = kernel().tasks.threads.borrow_mut();
        Ok(threads.keys().flat_map(|tid| id_line(tid.for_caller())).collect())
    }),
    text("cgroup.type", "domain\n"),
    // A quota in microseconds per period.
    text("cpu.idle", "0\n"),
    file("cpu.max", || Ok(format!("{} 100000\n", cpus() * 100_000).into_bytes())),
    file("cpu.stat", cpu_stat),
    text("cpu.weight", "100\n"),
    text("cpu.weight.nice", "0\n"),
    file("cpuset.cpus", list_line),
    file("cpuset.cpus.effective", list_line),
    text("cpuset.mems", "0\n"),
    text("cpuset.mems.effective", "0\n"),
    file("memory.current", || {
        let (total, free) = crate::procfs::memory();
        Ok(format!("{}\n", total - free).into_bytes())
    }),
    file("memory.events", memory_events),
    file("memory.events.local", memory_events),
    text("memory.high", "max\n"),
    text("memory.low", "0\n"),
    file("memory.max", || {
        Ok(match kernel().config.get().memory_limit {
            0 => b"max\n".to_vec(),
            limit => format!("{limit}\n").into_bytes(),
        })
    }),
    text("memory.min", "0\n"),
    text("memory.oom.group", "0\n"),
    file("memory.stat", || {
        let files = kernel().pages.borrow_mut().bytes_in_use();
        Ok(format!(
            "anon 0\nfile {files}\nkernel 0\nshmem {files}\ninactive_file 0\nactive_file 0\n"
        )
        .into_bytes())
    }),
    text("memory.swap.current", "0\n"),
    text("memory.swap.high", "max\n"),
    text("memory.swap.max", "0\n"),
    file("pids.current", || {
        Ok(format!("{}\n", kernel().tasks.threads.borrow_mut().len()).into_bytes())
    }),
    text("pids.events", "max 0\n"),
    text("pids.max", "32768\n"),
];

/// All CPU time is the program's own.
fn cpu_stat() -> Result<Vec<u8>> {
    let used_us = kernel().tasks.usage.cpu_ns() / 1000;
    let text = format!("usage_usec {used_us}\nuser_usec {used_us}\nsystem_usec 0\n");
    Ok((text + "nr_periods 0\nnr_throttled 0\nthrottled_usec 0\n").into_bytes())
}

fn memory_events() -> Result<Vec<u8>> {
    let kills = kernel().tasks.oom_kills.get();
    Ok(format!("low 0\nhigh 0\nmax 0\noom {kills}\noom_kill {kills}\noom_group_kill 0\n")
        .into_bytes())
}
