//! Files in `/proc` about the machine.

use alloc::format;
use alloc::string::String;
use alloc::sync::Arc;
use alloc::vec::Vec;

use super::status::ticks;
use crate::errno::Result;
use crate::fs::locks::{Family, LockKind, Owner};
use crate::fs::mount::{Mount, MountFlags};
use crate::fs::path::Path;
use crate::state::kernel;
use crate::state::{RELEASE, VERSION};
use crate::task::current_process;
use crate::task::pid_namespace::PidNamespace;
use crate::task::usage::{LOAD_BITS, LOAD_ONE, Share};
use crate::task::{Process, Thread};

pub(super) const CGROUPS: &str = "#subsys_name\thierarchy\tnum_cgroups\tenabled\n\
    cpuset\t0\t1\t1\ncpu\t0\t1\t1\ncpuacct\t0\t1\t1\nmemory\t0\t1\t1\npids\t0\t1\t1\n";

pub(super) const DEVICES: &str = "Character devices:\n  1 mem\n  5 /dev/tty\n  5 /dev/console\n136 pts\n240 thaw\n\nBlock devices:\n";

pub(super) const FILESYSTEMS: &str = "nodev\tsysfs\nnodev\ttmpfs\nnodev\tproc\nnodev\tcgroup2\nnodev\tpipefs\nnodev\tsockfs\nnodev\tdevpts\nnodev\tdevtmpfs\nnodev\tramfs\n";

pub(super) const SOFTIRQS: &str = "                    CPU0\n";

/// `tty/drivers`: name, node, major number, minor numbers, kind.
pub(super) const TTY_DRIVERS: &str = "/dev/tty             /dev/tty        5       0 system:/dev/tty\n\
    /dev/console         /dev/console    5       1 system:console\n\
    /dev/ptmx            /dev/ptmx       5       2 system\n\
    pty_slave            /dev/pts      136 0-1048575 pty:slave\n\
    pty_master           /dev/ptm      128 0-1048575 pty:master\n";

pub(super) const TTY_DISCIPLINES: &str = "n_tty       0\n";

/// `locks`: all advisory locks (proc_locks(5)), but for those of processes that a namespace does not know.
pub(super) fn locks(namespace: &PidNamespace) -> Result<Vec<u8>> {
    let mut text = String::new();
    let mut number = 0;
    kernel().fs.locks.for_each(&mut |(device, inode, family), held| {
        number += 1;
        let (kind, pid) = match (family, held.owner) {
            (Family::Flock, _) => ("FLOCK ", -1),
            (Family::Record, Owner::Process(pid)) => ("POSIX ", pid.number_in(namespace) as i32),
            (Family::Record, Owner::Description(_)) => ("OFDLCK", -1),
        };
        if pid == 0 {
            return;
        }
        let mode = if held.kind == LockKind::Write { "WRITE" } else { "READ " };
        let (major, minor) = ((device >> 8) & 0xfff, (device & 0xff) | ((device >> 12) & !0xff));
        let end = match held.range.end {
            u64::MAX => String::from("EOF"),
            end => format!("{}", end - 1),
        };
        text += &format!(
            "{number}: {kind} ADVISORY  {mode} {pid} {major:02x}:{minor:02x}:{inode} {} {end}\n",
            held.range.start
        );
    });
    Ok(text.into_bytes())
}

/// Bytes of memory in all, and bytes that are free.
pub fn memory() -> (u64, u64) {
    let total = kernel().memory_total();
    let used = crate::mm::heap::bytes_in_use() + kernel().pages.borrow_mut().bytes_in_use();
    (total, total.saturating_sub(used))
}

/// `meminfo`, by the sandbox's limit.
pub(super) fn meminfo() -> Result<Vec<u8>> {
    let (total, free) = memory();
    let files = kernel().pages.borrow_mut().bytes_in_use();
    let heap = crate::mm::heap::bytes_in_use();
    let mut text = String::new();
    for (name, bytes) in [
        ("MemTotal", total),
        ("MemFree", free),
        ("MemAvailable", free),
        ("Buffers", 0),
        ("Cached", files),
        ("SwapCached", 0),
        ("Active", 0),
        ("Inactive", 0),
        ("Active(anon)", 0),
        ("Inactive(anon)", 0),
        ("Active(file)", 0),
        ("Inactive(file)", 0),
        ("Unevictable", 0),
        ("Mlocked", 0),
        ("SwapTotal", 0),
        ("SwapFree", 0),
        ("Dirty", 0),
        ("Writeback", 0),
        ("AnonPages", 0),
        ("Mapped", 0),
        ("Shmem", files),
        ("KReclaimable", 0),
        ("Slab", heap),
        ("SReclaimable", 0),
        ("SUnreclaim", heap),
        ("KernelStack", 0),
        ("PageTables", 0),
        ("CommitLimit", total),
        ("Committed_AS", total - free),
        ("VmallocTotal", 0),
        ("VmallocUsed", 0),
        ("AnonHugePages", 0),
    ] {
        text += &format!("{:<16}{:>8} kB\n", format!("{name}:"), bytes / 1024);
    }
    text += "HugePages_Total:       0\nHugePages_Free:        0\nHugePages_Rsvd:        0\n\
             HugePages_Surp:        0\nHugepagesize:       2048 kB\n";
    Ok(text.into_bytes())
}

fn uptime_ns() -> u64 {
    crate::time::clock::boottime_ns()
}

fn cpus() -> u32 {
    kernel().config.get().cpus.max(1)
}

/// `stat`. CPU time of programs and of the kernel for them are not told apart: all is the user's.
pub(super) fn stat() -> Result<Vec<u8>> {
    let usage = &kernel().tasks.usage;
    let (of_cpus, total) = usage.shares();
    let mut text = processor_line("cpu ", total);
    for (cpu, &share) in of_cpus.iter().enumerate() {
        text += &processor_line(&format!("cpu{cpu}"), share);
    }
    let booted =
        (crate::fs::inode::Timestamp::now().sec as u64).saturating_sub(uptime_ns() / 1_000_000_000);
    let (switches, forks) = (usage.switches(), usage.forks());
    let running = kernel().tasks.runnable().max(1);
    text += &format!(
        "intr 0\nctxt {switches}\nbtime {booted}\nprocesses {forks}\nprocs_running {running}\n\
         procs_blocked 0\nsoftirq 0 0 0 0 0 0 0 0 0 0 0\n"
    );
    Ok(text.into_bytes())
}

fn processor_line(name: &str, share: Share) -> String {
    format!("{name} {} 0 0 {} 0 0 0 0 0 0\n", ticks(share.busy_ns), ticks(share.idle_ns))
}

/// `uptime`.
pub(super) fn uptime() -> Result<Vec<u8>> {
    let idle_ns = kernel().tasks.usage.shares().1.idle_ns;
    let shown = |ns: u64| format!("{}.{:02}", ns / 1_000_000_000, ns / 10_000_000 % 100);
    Ok(format!("{} {}\n", shown(uptime_ns()), shown(idle_ns)).into_bytes())
}

/// `loadavg`.
pub(super) fn loadavg() -> Result<Vec<u8>> {
    let loads = kernel().tasks.usage.loads().map(shown_load);
    let running = kernel().tasks.runnable();
    let threads = kernel().tasks.threads.borrow_mut();
    let last = current_process().pid_namespace.last_number();
    Ok(format!("{} {running}/{} {last}\n", loads.join(" "), threads.len()).into_bytes())
}

/// A load with two decimal places, rounded as by Linux (`loadavg_proc_show`).
pub(super) fn shown_load(load: u64) -> String {
    let hundredths = ((load + LOAD_ONE / 200) * 100) >> LOAD_BITS;
    format!("{}.{:02}", hundredths / 100, hundredths % 100)
}

/// `version`.
pub(super) fn version() -> Result<Vec<u8>> {
    Ok(format!("Linux version {RELEASE} (thaw@thaw) (rustc) {VERSION}\n").into_bytes())
}

/// `interrupts`: none reach the sandbox.
pub(super) fn interrupts() -> Result<Vec<u8>> {
    let mut text = String::from("           ");
    for cpu in 0..cpus() {
        text += &format!("{:<11}", format!("CPU{cpu}"));
    }
    text.push('\n');
    Ok(text.into_bytes())
}

/// `vmstat`.
pub(super) fn vmstat() -> Result<Vec<u8>> {
    let (_, free) = memory();
    let (free, kills) = (free / 4096, kernel().tasks.oom_kills.get());
    Ok(format!("nr_free_pages {free}\npgpgin 0\npgpgout 0\npswpin 0\npswpout 0\npgfault 0\npgmajfault 0\noom_kill {kills}\n").into_bytes())
}

/// A name in a table whose columns are separated by spaces (getmntent(3)).
fn escaped(name: &[u8]) -> Vec<u8> {
    let mut text = Vec::with_capacity(name.len());
    for &byte in name {
        match byte {
            b' ' | b'\t' | b'\n' | b'\\' => text.extend(format!("\\{byte:03o}").into_bytes()),
            byte => text.push(byte),
        }
    }
    text
}

/// Steps up in trees, and bytes of names, that one look takes at most: a program may nest directories
/// and mounts as deep as it likes.
const STEPS_MAX: usize = 1 << 22;

/// A line about each mount that the process can reach, made of the name of its place. What `STEPS_MAX`
/// does not suffice for is left out.
fn lines(
    process: &Process,
    line: impl Fn(&Mount, &[u8], &mut usize) -> Option<Vec<u8>>,
) -> Result<Vec<u8>> {
    let (namespace, root) = process.with_fs(|fs| (fs.namespace.clone(), fs.root.clone()));
    let mut steps = STEPS_MAX;
    let mut of_mount = |mount: &Arc<Mount>| -> Option<Vec<u8>> {
        let place = Path::new(mount.clone(), mount.root.clone());
        let (name, is_reachable) = place.name_from(&root, &mut steps)?;
        steps = steps.checked_sub(mount.source.len())?;
        if is_reachable { line(mount, &escaped(&name), &mut steps) } else { Some(Vec::new()) }
    };
    let mut text = Vec::new();
    for mount in namespace.mounts() {
        let Some(line) = of_mount(&mount) else { break };
        text.extend_from_slice(&line);
    }
    Ok(text)
}

/// `mounts`.
pub(super) fn mounts(_: &Thread, process: &Process) -> Result<Vec<u8>> {
    lines(process, |mount, at, _| {
        let rest = format!(" {} {} 0 0\n", mount.filesystem.kind, mount.options());
        Some([&escaped(&mount.source), &b" "[..], at, rest.as_bytes()].concat())
    })
}

/// `mountstats`.
pub(super) fn mountstats(_: &Thread, process: &Process) -> Result<Vec<u8>> {
    lines(process, |mount, at, _| {
        let rest = format!(" with fstype {}\n", mount.filesystem.kind);
        let source = escaped(&mount.source);
        Some([&b"device "[..], &source, b" mounted on ", at, rest.as_bytes()].concat())
    })
}

/// `mountinfo`.
pub(super) fn mountinfo(_: &Thread, process: &Process) -> Result<Vec<u8>> {
    lines(process, mountinfo_line)
}

/// `show_mountinfo`, fs/proc_namespace.c.
fn mountinfo_line(mount: &Mount, at: &[u8], steps: &mut usize) -> Option<Vec<u8>> {
    let device = mount.root.inode.attributes().dev;
    let minor = (device & 0xff) | ((device >> 12) & !0xff);
    let parent = mount.place().map_or(mount.id, |place| place.parent.id);
    let deleted = if mount.root.is_unlinked() { "//deleted" } else { "" };
    let root = escaped(&mount.root.name_in_filesystem(steps)?);
    let flags = mount.flags();
    let access = |is_read_only| if is_read_only { "ro" } else { "rw" };
    let own = access(flags.contains(MountFlags::READ_ONLY));
    let unbindable = if flags.contains(MountFlags::UNBINDABLE) { " unbindable" } else { "" };
    let filesystem = &mount.filesystem;
    let numbers = format!("{} {parent} 0:{minor} ", mount.id);
    let of_mount = format!(" {own}{}{unbindable} - {} ", flags.text(), filesystem.kind);
    let of_files = format!(" {}{}\n", access(filesystem.is_read_only()), filesystem.options());
    let parts = [
        numbers.as_bytes(),
        &root,
        deleted.as_bytes(),
        b" ",
        at,
        of_mount.as_bytes(),
        &escaped(&mount.source),
        of_files.as_bytes(),
    ];
    Some(parts.concat())
}
