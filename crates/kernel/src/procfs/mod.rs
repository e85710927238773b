//! `/proc` (proc(5)), as much of it as language runtimes and tools read.

mod cpu;
mod descriptors;
mod id_maps;
mod mem;
mod memory;
mod process;
mod settings;
mod status;
mod system;
mod zombie;

#[cfg(test)]
mod tests;

pub use memory::Totals;

use alloc::sync::Arc;

pub use cpu::{cpu_list, cpu_mask};
pub use system::memory;

use crate::errno::{Errno, Result};
use crate::fs::inode::{FileType, FilesystemId, Inode, Link};
use crate::fs::pseudo::{Directory, Fixed, Generated, Item, Kind, Names, Place, SymbolicLink};
use crate::ipc::sysv::proc_files as sysv;
use crate::task::pid_namespace::PidNamespace;

/// `PROC_SUPER_MAGIC` (statfs(2)).
const MAGIC: i64 = 0x9fa0;

/// The root directory of a file system that shows the processes of a PID namespace.
pub fn root(filesystem: FilesystemId, namespace: PidNamespace) -> Arc<dyn Inode> {
    let place = Place { filesystem, magic: MAGIC, ino: 1, owner: (0, 0) };
    Directory::new(place, Root { namespace })
}

/// Names in `/proc`: the fixed ones, then one per process.
struct Root {
    namespace: PidNamespace,
}

const FIXED: &[Item] = &[
    Item { name: "cgroups", kind: Kind::Text(system::CGROUPS) },
    Item { name: "cmdline", kind: Kind::Text("thaw\n") },
    Item { name: "consoles", kind: Kind::Text("") },
    Item { name: "cpuinfo", kind: Kind::File(cpu::cpuinfo) },
    Item { name: "devices", kind: Kind::Text(system::DEVICES) },
    Item { name: "diskstats", kind: Kind::Text("") },
    Item { name: "filesystems", kind: Kind::Text(system::FILESYSTEMS) },
    Item { name: "interrupts", kind: Kind::File(system::interrupts) },
    Item { name: "loadavg", kind: Kind::File(system::loadavg) },
    Item { name: "meminfo", kind: Kind::File(system::meminfo) },
    Item { name: "modules", kind: Kind::Text("") },
    Item { name: "mounts", kind: Kind::Link("self/mounts") },
    Item { name: "net", kind: Kind::Link("self/net") },
    Item { name: "partitions", kind: Kind::Text("major minor  #blocks  name\n\n") },
    Item { name: "softirqs", kind: Kind::Text(system::SOFTIRQS) },
    Item { name: "stat", kind: Kind::File(system::stat) },
    Item { name: "swaps", kind: Kind::Text("Filename\t\t\t\tType\t\tSize\t\tUsed\t\tPriority\n") },
    Item { name: "sys", kind: Kind::Directory(settings::SYS) },
    Item { name: "sysvipc", kind: Kind::Directory(SYSVIPC) },
    Item { name: "tty", kind: Kind::Directory(TTY) },
    Item { name: "uptime", kind: Kind::File(system::uptime) },
    Item { name: "version", kind: Kind::File(system::version) },
    Item { name: "vmstat", kind: Kind::File(system::vmstat) },
];

const SYSVIPC: &[Item] = &[
    Item { name: "msg", kind: Kind::File(sysv::messages) },
    Item { name: "sem", kind: Kind::File(sysv::semaphores) },
    Item { name: "shm", kind: Kind::File(sysv::memory) },
];

const TTY: &[Item] = &[
    Item { name: "drivers", kind: Kind::Text(system::TTY_DRIVERS) },
    Item { name: "ldiscs", kind: Kind::Text(system::TTY_DISCIPLINES) },
];

/// What a link of the root directory leads to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Own {
    Process,
    Thread,
}

/// The reader's own directory; `ENOENT` if the namespace does not know it.
fn own_link(namespace: &PidNamespace, own: Own) -> Result<Link> {
    let thread = crate::task::current();
    let pid = thread.process.pid.number_in(namespace);
    let tid = thread.tid().number_in(namespace);
    let text = match own {
        _ if pid == 0 => return Err(Errno::ENOENT),
        Own::Process => alloc::format!("{pid}"),
        Own::Thread => alloc::format!("{pid}/task/{tid}"),
    };
    Ok(Link::Text(text.into_bytes()))
}

impl Names for Root {
    fn lookup(&self, name: &[u8], directory: &Place) -> Result<Option<Arc<dyn Inode>>> {
        if let Some(found) = Fixed(FIXED).lookup(name, directory)? {
            return Ok(Some(found));
        }
        let place = directory.below(name);
        match name {
            b"locks" => {
                let namespace = self.namespace.clone();
                Ok(Some(Generated::read_only(place, move || system::locks(&namespace))))
            }
            b"self" => {
                let namespace = self.namespace.clone();
                Ok(Some(SymbolicLink::new(place, move || own_link(&namespace, Own::Process))))
            }
            b"thread-self" => {
                let namespace = self.namespace.clone();
                Ok(Some(SymbolicLink::new(place, move || own_link(&namespace, Own::Thread))))
            }
            name => Ok(process::directory(name, directory, &self.namespace)),
        }
    }

    fn list(&self, emit: &mut dyn FnMut(&[u8], FileType)) -> Result<()> {
        Fixed(FIXED).list(emit)?;
        emit(b"locks", FileType::Regular);
        emit(b"self", FileType::Symlink);
        emit(b"thread-self", FileType::Symlink);
        process::list(&self.namespace, emit);
        Ok(())
    }
}
