//! `/proc/sys` and `/proc/PID/net`.

use alloc::format;
use alloc::sync::Arc;
use alloc::vec::Vec;

use crate::errno::{Errno, Result};
use crate::fs::fd_table::NR_OPEN;
use crate::fs::inode::{FileType, Inode};
use crate::fs::inotify;
use crate::fs::pseudo::{
    Directory, Generated, Item, Kind, Names, Place, bound, directory, file, setting, text,
};
use crate::ipc::aio;
use crate::ipc::mqueue::QUEUES_MAX;
use crate::ipc::mqueue::queue::{MESSAGE_BYTES_MAX, MESSAGES_MAX};
use crate::net::address::{AF_INET, AF_INET6, AF_UNIX};
use crate::net::socket_tables::{self, SocketTable};
use crate::net::tcp::IPPROTO_TCP;
use crate::net::udp::{IPPROTO_UDP, IPPROTO_UDPLITE};
use crate::net::{proc_counters, proc_files};
use crate::state::kernel;
use crate::state::{RELEASE, VERSION};
use crate::task::namespace::Kind as Separated;
use crate::task::seccomp::{ACTION_NAMES, LOGGED_NAMES};
use crate::task::uts::UtsNamespace;
use crate::task::{Capabilities, current_process};

/// `/proc/sys`.
pub(super) const SYS: &[Item] = &[
    directory("fs", FS),
    directory("kernel", KERNEL),
    directory("net", SYS_NET),
    Item {
        name: "user",
        kind: Kind::Made(FileType::Directory, |place| Directory::new(*place, OfUsers)),
    },
    directory("vm", VM),
];

/// How many namespaces of each kind can be made.
const NAMESPACES: &[(&str, Separated)] = &[
    ("max_cgroup_namespaces", Separated::Cgroup),
    ("max_ipc_namespaces", Separated::Ipc),
    ("max_mnt_namespaces", Separated::Mounts),
    ("max_net_namespaces", Separated::Net),
    ("max_pid_namespaces", Separated::Pid),
    ("max_time_namespaces", Separated::Time),
    ("max_user_namespaces", Separated::User),
    ("max_uts_namespaces", Separated::Uts),
];

/// `/proc/sys/user`: what holds in the user namespace of who looks.
struct OfUsers;

impl Names for OfUsers {
    fn lookup(&self, name: &[u8], directory: &Place) -> Result<Option<Arc<dyn Inode>>> {
        let Some(&(_, kind)) = NAMESPACES.iter().find(|(known, _)| known.as_bytes() == name) else {
            return Ok(None);
        };
        let own = current_process().credentials.borrow_mut().clone();
        let users = own.user_namespace.clone();
        // Who may exceed limits in a namespace sets those of it (`set_permissions`, kernel/ucount.c).
        let may_set = !users.is_initial() && own.can_in_own(Capabilities::SYS_RESOURCE);
        let permissions = if may_set { 0o666 } else { 0o644 };
        let shown = users.clone();
        let show = move || Ok(format!("{}\n", shown.namespaces_max(kind)).into_bytes());
        let set = move |text: &[u8]| users.set_namespaces_max(kind, limit(text)?);
        let place = directory.below(name);
        Ok(Some(Generated::new(place, permissions, Arc::new(show), Some(Arc::new(set)))))
    }

    fn list(&self, emit: &mut dyn FnMut(&[u8], FileType)) -> Result<()> {
        NAMESPACES.iter().for_each(|(name, _)| emit(name.as_bytes(), FileType::Regular));
        Ok(())
    }
}

/// A number that is not negative.
fn limit(text: &[u8]) -> Result<u32> {
    let text = core::str::from_utf8(text).map_err(|_| Errno::EINVAL)?;
    let value: i32 = text.trim().parse().map_err(|_| Errno::EINVAL)?;
    u32::try_from(value).map_err(|_| Errno::EINVAL)
}

const KERNEL: &[Item] = &[
    text("cap_last_cap", "40\n"),
    setting("core_pattern", "core\n"),
    setting("core_uses_pid", "0\n"),
    setting("dmesg_restrict", "1\n"),
    Item { name: "domainname", kind: Kind::Setting(domainname, set_domainname) },
    Item { name: "hostname", kind: Kind::Setting(hostname, set_hostname) },
    setting("io_uring_disabled", "2\n"),
    setting("kptr_restrict", "1\n"),
    setting("msgmax", "8192\n"),
    setting("msgmnb", "16384\n"),
    setting("msgmni", "32000\n"),
    text("ngroups_max", "65536\n"),
    setting("numa_balancing", "0\n"),
    file("osrelease", || Ok(format!("{RELEASE}\n").into_bytes())),
    text("ostype", "Linux\n"),
    setting("overflowgid", "65534\n"),
    setting("overflowuid", "65534\n"),
    setting("perf_event_paranoid", "4\n"),
    setting("panic", "0\n"),
    setting("pid_max", "4194304\n"),
    setting("printk", "4\t4\t1\t7\n"),
    directory("pty", PTY),
    directory("random", RANDOM),
    setting("randomize_va_space", "2\n"),
    setting("sched_child_runs_first", "0\n"),
    setting("sched_rt_period_us", "1000000\n"),
    setting("sched_rt_runtime_us", "950000\n"),
    directory("seccomp", SECCOMP),
    setting("sem", "32000\t1024000\t500\t32000\n"),
    setting("shmall", "18446744073692774399\n"),
    setting("shmmax", "18446744073692774399\n"),
    setting("shmmni", "4096\n"),
    setting("sysrq", "0\n"),
    setting("tainted", "0\n"),
    setting("threads-max", "32768\n"),
    setting("unprivileged_bpf_disabled", "2\n"),
    file("version", || Ok(format!("{VERSION}\n").into_bytes())),
];

const SECCOMP: &[Item] =
    &[text("actions_avail", ACTION_NAMES), text("actions_logged", LOGGED_NAMES)];

const PTY: &[Item] = &[setting("max", "4096\n")];

const RANDOM: &[Item] = &[
    file("boot_id", || Ok(uuid(kernel().fs.boot_id()))),
    text("entropy_avail", "256\n"),
    text("poolsize", "256\n"),
    setting("urandom_min_reseed_secs", "60\n"),
    file("uuid", || {
        let mut random = [0; 16];
        kernel().random.borrow_mut().fill(&mut random);
        Ok(uuid(random))
    }),
    setting("write_wakeup_threshold", "256\n"),
];

const VM: &[Item] = &[
    setting("dirty_background_ratio", "10\n"),
    setting("dirty_ratio", "20\n"),
    setting("max_map_count", "65530\n"),
    // The lowest address that the guest may map (`layout::GUEST_MIN`).
    setting("mmap_min_addr", "1048576\n"),
    setting("min_free_kbytes", "0\n"),
    setting("nr_hugepages", "0\n"),
    setting("nr_overcommit_hugepages", "0\n"),
    setting("overcommit_kbytes", "0\n"),
    setting("overcommit_memory", "0\n"),
    setting("overcommit_ratio", "50\n"),
    setting("page-cluster", "3\n"),
    setting("panic_on_oom", "0\n"),
    setting("swappiness", "0\n"),
    setting("vfs_cache_pressure", "100\n"),
    setting("zone_reclaim_mode", "0\n"),
];

const FS: &[Item] = &[
    bound("aio-max-nr", || Ok(format!("{}\n", aio::REQUESTS_MAX).into_bytes())),
    file("aio-nr", || Ok(format!("{}\n", kernel().aio.requests()).into_bytes())),
    directory("epoll", &[setting("max_user_watches", "1048576\n")]),
    setting("file-max", "9223372036854775807\n"),
    file("file-nr", || {
        let processes = kernel().tasks.all_processes();
        let open: usize = processes
            .iter()
            .map(|process| process.files.borrow_mut().borrow_mut().numbers().count())
            .sum();
        Ok(format!("{open}\t0\t9223372036854775807\n").into_bytes())
    }),
    text("inode-nr", "0\t0\n"),
    directory("inotify", INOTIFY),
    directory("mqueue", MQUEUE),
    setting("lease-break-time", "45\n"),
    setting("leases-enable", "0\n"),
    bound("nr_open", || Ok(format!("{NR_OPEN}\n").into_bytes())),
    setting("pipe-max-size", "1048576\n"),
    setting("pipe-user-pages-soft", "16384\n"),
    setting("protected_fifos", "0\n"),
    setting("protected_hardlinks", "0\n"),
    setting("protected_regular", "0\n"),
    setting("protected_symlinks", "0\n"),
    setting("suid_dumpable", "0\n"),
];

const INOTIFY: &[Item] = &[
    bound("max_queued_events", || Ok(format!("{}\n", inotify::QUEUE_MAX).into_bytes())),
    bound("max_user_instances", || Ok(format!("{}\n", inotify::INSTANCES_MAX).into_bytes())),
    bound("max_user_watches", || Ok(format!("{}\n", inotify::WATCHES_MAX).into_bytes())),
];

const MQUEUE: &[Item] = &[
    setting("msg_default", "10\n"),
    bound("msg_max", || Ok(format!("{MESSAGES_MAX}\n").into_bytes())),
    setting("msgsize_default", "8192\n"),
    bound("msgsize_max", || Ok(format!("{MESSAGE_BYTES_MAX}\n").into_bytes())),
    bound("queues_max", || Ok(format!("{QUEUES_MAX}\n").into_bytes())),
];

const SYS_NET: &[Item] = &[
    directory("core", NET_CORE),
    directory("ipv4", NET_IPV4),
    directory("ipv6", NET_IPV6),
    directory("unix", NET_UNIX),
];

const NET_CORE: &[Item] = &[
    setting("netdev_max_backlog", "1000\n"),
    setting("rmem_default", "212992\n"),
    setting("rmem_max", "212992\n"),
    setting("somaxconn", "4096\n"),
    setting("wmem_default", "212992\n"),
    setting("wmem_max", "212992\n"),
];

const NET_IPV4: &[Item] = &[
    setting("ip_local_port_range", "32768\t60999\n"),
    setting("ip_unprivileged_port_start", "1024\n"),
    setting("tcp_fin_timeout", "60\n"),
    setting("tcp_keepalive_intvl", "75\n"),
    setting("tcp_keepalive_probes", "9\n"),
    setting("tcp_keepalive_time", "7200\n"),
    setting("tcp_max_syn_backlog", "4096\n"),
    setting("tcp_rmem", "4096\t131072\t6291456\n"),
    setting("tcp_wmem", "4096\t16384\t4194304\n"),
];

const NET_IPV6: &[Item] = &[directory("conf", NET_IPV6_CONF)];
const NET_IPV6_CONF: &[Item] = &[directory("all", NET_IPV6_ALL)];
const NET_IPV6_ALL: &[Item] = &[setting("disable_ipv6", "0\n")];
const NET_UNIX: &[Item] = &[setting("max_dgram_qlen", "10\n")];

/// A random (version 4) UUID (RFC 9562, section 5.4), and a newline.
pub(super) fn uuid(mut random: [u8; 16]) -> Vec<u8> {
    random[6] = (random[6] & 0x0f) | 0x40;
    random[8] = (random[8] & 0x3f) | 0x80;
    let mut text = alloc::string::String::new();
    for (index, byte) in random.iter().enumerate() {
        if matches!(index, 4 | 6 | 8 | 10) {
            text.push('-');
        }
        text += &format!("{byte:02x}");
    }
    text.push('\n');
    text.into_bytes()
}

/// The names of the machine, as the caller has them.
fn own_names() -> Arc<UtsNamespace> {
    current_process().namespaces().uts.clone()
}

/// `EPERM` for those who have the ids of the superuser and are in a user namespace that has no
/// capability over these names.
fn check_may_name(names: &UtsNamespace) -> Result<()> {
    let process = current_process();
    let credentials = process.credentials.borrow_mut();
    match credentials.user_namespace.is_initial() {
        true => Ok(()),
        false => credentials.require_in(names.common.owner(), Capabilities::SYS_ADMIN),
    }
}

fn hostname() -> Result<Vec<u8>> {
    let mut name = own_names().hostname.borrow_mut().clone();
    name.push(b'\n');
    Ok(name)
}

fn set_hostname(text: &[u8]) -> Result<()> {
    let names = own_names();
    check_may_name(&names)?;
    *names.hostname.borrow_mut() = name_in(text)?;
    Ok(())
}

fn domainname() -> Result<Vec<u8>> {
    Ok([&*own_names().shown_domainname(), b"\n"].concat())
}

fn set_domainname(text: &[u8]) -> Result<()> {
    let names = own_names();
    check_may_name(&names)?;
    *names.domainname.borrow_mut() = Some(name_in(text)?);
    Ok(())
}

/// The name that was written to a setting.
fn name_in(text: &[u8]) -> Result<Vec<u8>> {
    let name = text.split(|&byte| byte == b'\n' || byte == 0).next().unwrap_or(text);
    if name.len() > 64 { Err(Errno::EINVAL) } else { Ok(name.to_vec()) }
}

/// `/proc/PID/net`.
pub(super) const NET: &[Item] = &[
    text("arp", "IP address       HW type     Flags       HW address            Mask     Device\n"),
    file("dev", proc_files::dev),
    file("if_inet6", proc_files::if_inet6),
    file("igmp", proc_files::igmp),
    file("igmp6", proc_files::igmp6),
    file("netstat", proc_counters::netstat),
    text("protocols", ""),
    text("raw", socket_tables::HEADING_RAW),
    file("route", proc_files::route),
    file("snmp", proc_counters::snmp),
    file("snmp6", proc_counters::snmp6),
    file("sockstat", proc_counters::sockstat),
    file("sockstat6", proc_counters::sockstat6),
    file("softnet_stat", proc_counters::softnet_stat),
    sockets("tcp", |place| table(place, AF_INET, IPPROTO_TCP)),
    sockets("tcp6", |place| table(place, AF_INET6, IPPROTO_TCP)),
    sockets("udp", |place| table(place, AF_INET, IPPROTO_UDP)),
    sockets("udp6", |place| table(place, AF_INET6, IPPROTO_UDP)),
    sockets("udplite", |place| table(place, AF_INET, IPPROTO_UDPLITE)),
    sockets("udplite6", |place| table(place, AF_INET6, IPPROTO_UDPLITE)),
    sockets("unix", |place| table(place, AF_UNIX, 0)),
];

const fn sockets(name: &'static str, make: fn(&Place) -> Arc<dyn Inode>) -> Item {
    Item { name, kind: Kind::Made(FileType::Regular, make) }
}

fn table(place: &Place, family: u16, protocol: u32) -> Arc<dyn Inode> {
    SocketTable::new(*place, socket_tables::Kind { family, protocol })
}
