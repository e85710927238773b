//! Which file systems of the host a sandbox may see.
//!
//! Kinds are known by mount, from `/proc/self/mountinfo` (proc_pid_mountinfo(5)):
//! to ask a file system itself (statfs(2)) would make a FUSE daemon or a dead
//! server answer first, which they may never do.

use std::collections::{HashMap, HashSet};
use std::fs::{self, File};
use std::io::{self, Read, Seek};
use std::os::fd::BorrowedFd;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{AtFlags, CWD, Statx, StatxFlags, statx};
use rustix::io::Errno;
use rustix::path::Arg;

/// File systems without a device of their own that hold files nevertheless. All
/// others of that sort, those of the future too, show or control the state of the
/// host, and there are about 40 of them: this is the shorter list, and one that
/// fails to the safe side.
const WITHOUT_DEVICE: [&str; 30] = [
    "9p", "afs", "aufs", "bcachefs", "beegfs", "ceph", "cifs", "coda", "devtmpfs", "ecryptfs",
    "gpfs", "hostfs", "jffs2", "lustre", "ncpfs", "nfs", "nfs4", "orangefs", "overlay", "prl_fs",
    "ramfs", "rootfs", "shiftfs", "smb3", "tmpfs", "ubifs", "vboxsf", "virtiofs", "wslfs", "zfs",
];

/// File systems on devices, in case `/proc/filesystems` is hidden.
const ON_DEVICES: [&str; 12] = [
    "btrfs", "erofs", "exfat", "ext2", "ext3", "ext4", "f2fs", "iso9660", "squashfs", "udf",
    "vfat", "xfs",
];

/// What a file system is to a sandbox.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// It holds files.
    Files,
    /// A process answers for it (FUSE), as it likes and when it likes.
    Fuse,
    /// It shows the host's own state, or would mount something else (autofs).
    Pseudo,
}

impl Kind {
    /// `name` is as mountinfo has it: `ext4`, `fuse.sshfs`.
    fn of(name: &str, on_devices: &HashSet<String>) -> Self {
        let base = name.split_once('.').map_or(name, |(base, _)| base);
        if matches!(base, "fuse" | "fuseblk") {
            return Self::Fuse;
        }
        let has_files = WITHOUT_DEVICE.contains(&base)
            || ON_DEVICES.contains(&base)
            || on_devices.contains(base);
        if has_files { Self::Files } else { Self::Pseudo }
    }
}

/// The mounts of this process' namespace.
#[derive(Debug)]
pub struct Mounts {
    file: File,
    kinds: HashMap<u64, Kind>,
    on_devices: HashSet<String>,
}

impl Mounts {
    /// Reads the mounts of the calling process.
    pub fn of_this_process() -> io::Result<Self> {
        let known = fs::read_to_string("/proc/filesystems").unwrap_or_default();
        let on_devices =
            known.lines().filter_map(|line| line.strip_prefix('\t')).map(str::to_owned).collect();
        let file = File::open("/proc/self/mountinfo")?;
        let mut mounts = Self { file, kinds: HashMap::new(), on_devices };
        mounts.read()?;
        Ok(mounts)
    }

    fn read(&mut self) -> io::Result<()> {
        let mut bytes = Vec::new();
        self.file.rewind()?;
        self.file.read_to_end(&mut bytes)?;
        self.kinds = parse(&String::from_utf8_lossy(&bytes), &self.on_devices);
        // In a directory that it was confined to (chroot(2)), a process is not shown
        // the mount that it is in. A root directory holds files.
        if let Ok(root) = look(CWD, "/") {
            self.kinds.entry(root.stx_mnt_id).or_insert(Kind::Files);
        }
        Ok(())
    }

    /// Reads the mounts again if there are others since the last time.
    pub fn refresh(&mut self) -> io::Result<()> {
        let mut events = [PollFd::new(&self.file, PollFlags::PRI)];
        let at_once = Timespec { tv_sec: 0, tv_nsec: 0 };
        if poll(&mut events, Some(&at_once))? > 0 { self.read() } else { Ok(()) }
    }

    /// The kind of a mount, by its number. One that is not listed is not trusted.
    pub fn kind(&self, mount: u64) -> Kind {
        self.kinds.get(&mount).copied().unwrap_or(Kind::Pseudo)
    }
}

fn parse(text: &str, on_devices: &HashSet<String>) -> HashMap<u64, Kind> {
    let mount = |line: &str| {
        let number = line.split(' ').next()?.parse().ok()?;
        // Optional fields end with a hyphen; spaces in names are written as `\040`.
        let (_, rest) = line.split_once(" - ")?;
        Some((number, Kind::of(rest.split(' ').next()?, on_devices)))
    };
    text.lines().filter_map(mount).collect()
}

/// What is known of a file without asking the server or daemon behind it, and
/// without mounting anything.
pub fn look(at: BorrowedFd<'_>, path: impl Arg + Copy) -> Result<Statx, Errno> {
    let flags = AtFlags::EMPTY_PATH
        | AtFlags::SYMLINK_NOFOLLOW
        | AtFlags::NO_AUTOMOUNT
        | AtFlags::STATX_DONT_SYNC;
    let wanted = StatxFlags::TYPE | StatxFlags::INO | StatxFlags::MNT_ID;
    match statx(at, path, flags, wanted) {
        // FUSE shows other users nothing but where it is mounted.
        Err(Errno::ACCESS) => statx(at, path, flags, StatxFlags::MNT_ID),
        result => result,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// All of Linux 6.18 that are no place for files, by the names that they register.
    const PSEUDO: [&str; 43] = [
        "anon_inodefs",
        "autofs",
        "bdev",
        "binder",
        "binfmt_misc",
        "bpf",
        "cgroup",
        "cgroup2",
        "configfs",
        "cpuset",
        "cxl",
        "dax",
        "debugfs",
        "devpts",
        "dlmfs",
        "dmabuf",
        "drm",
        "efivarfs",
        "functionfs",
        "fusectl",
        "gadgetfs",
        "guest-memfd",
        "hugetlbfs",
        "mqueue",
        "nfsd",
        "nsfs",
        "nullfs",
        "openpromfs",
        "pidfs",
        "pipefs",
        "proc",
        "pstore",
        "resctrl",
        "rpc_pipefs",
        "secretmem",
        "securityfs",
        "selinuxfs",
        "smackfs",
        "sockfs",
        "spufs",
        "sysfs",
        "tracefs",
        "xenfs",
    ];

    #[test]
    fn no_file_system_of_the_hosts_state_is_served() {
        for name in PSEUDO {
            assert_eq!(Kind::of(name, &HashSet::new()), Kind::Pseudo, "{name}");
        }
        assert_eq!(Kind::of("invented-tomorrow", &HashSet::new()), Kind::Pseudo);
    }

    #[test]
    fn files_and_fuse_are_told_apart() {
        let on_devices = HashSet::from(["ntfs3".to_owned(), "fuseblk".to_owned()]);
        for name in ["ext4", "tmpfs", "overlay", "nfs4", "ntfs3", "virtiofs"] {
            assert_eq!(Kind::of(name, &on_devices), Kind::Files, "{name}");
        }
        for name in ["fuse", "fuse.sshfs", "fuseblk", "fuseblk.ntfs-3g"] {
            assert_eq!(Kind::of(name, &on_devices), Kind::Fuse, "{name}");
        }
    }

    #[test]
    fn mounts_are_read() {
        let text = "22 27 0:21 / /proc rw,relatime - proc proc rw\n\
                    30 27 0:9 / /a\\040-\\040b rw master:1 propagate_from:2 - fuse.x y rw\n\
                    27 1 254:0 / / rw,relatime - ext4 /dev/vda rw,discard\n\
                    nonsense\n";
        let kinds = parse(text, &HashSet::new());
        let expected = [(22, Kind::Pseudo), (30, Kind::Fuse), (27, Kind::Files)];
        assert_eq!(kinds, HashMap::from(expected));
    }

    #[test]
    fn this_hosts_mounts_are_known() {
        let mut mounts = Mounts::of_this_process().unwrap();
        mounts.refresh().unwrap();
        let kind = |path| mounts.kind(look(CWD, path).unwrap().stx_mnt_id);
        assert_eq!(kind("/proc"), Kind::Pseudo);
        assert_eq!(kind("/"), Kind::Files);
        assert_eq!(mounts.kind(u64::MAX), Kind::Pseudo);
    }
}
