//! `/proc/PID` and `/proc/PID/task/TID`.

use alloc::string::String;
use alloc::sync::Arc;
use alloc::vec::Vec;

use super::descriptors::{DescriptorInfos, Descriptors};
use super::id_maps::{self, IdMap};
use super::{memory, settings, status, system, zombie};
use crate::errno::{Errno, Result};
use crate::fs::inode::{FileType, Inode, Link};
use crate::fs::nsfs;
use crate::fs::pseudo::{Directory, Fixed, Generated, Names, Place, SymbolicLink};
use crate::state::{Namespace, kernel};
use crate::task::ids::{Pid, Tid};
use crate::task::namespace::Kind;
use crate::task::pid_namespace::PidNamespace;
use crate::task::ptrace::access;
use crate::task::{Process, Thread, current_process};

/// Parses a process or thread id: decimal, no leading zero.
fn parse_id(name: &[u8]) -> Option<u32> {
    if name.first() == Some(&b'0') {
        return None;
    }
    core::str::from_utf8(name).ok()?.parse().ok()
}

/// The thread with this id; `ESRCH` if it has ended.
pub(super) fn thread(tid: Tid) -> Result<Arc<Thread>> {
    kernel().tasks.thread(tid).ok_or(Errno::ESRCH)
}

/// The process with this id, even if it has ended and waits for its parent;
/// `ESRCH` if it is gone.
pub(super) fn process(pid: Pid) -> Result<Arc<Process>> {
    kernel().tasks.process(pid).ok_or(Errno::ESRCH)
}

/// The process with this id, for what the running one may see of it (`EACCES`); `ENOENT` if it has ended,
/// since it then has no files any more.
fn shown(pid: Pid) -> Result<Arc<Process>> {
    let process = process(pid)?;
    access::check_read(&process)?;
    if process.is_zombie() { Err(Errno::ENOENT) } else { Ok(process) }
}

/// A thread that stands for a process: its main one, or another if that has
/// ended. `None` for a zombie.
fn representative(process: &Process) -> Option<Arc<Thread>> {
    let threads = process.threads.borrow_mut();
    threads
        .iter()
        .find(|thread| thread.tid() == process.pid.main_thread())
        .or(threads.first())
        .cloned()
}

/// Ids of the threads of a process.
pub(super) fn thread_ids(pid: Pid) -> Vec<Tid> {
    let threads = kernel().tasks.threads.borrow_mut();
    threads.iter().filter(|(_, thread)| thread.process.pid == pid).map(|(&tid, _)| tid).collect()
}

/// Ids in `/proc/PID/task`: a process that has ended is its main thread.
fn shown_ids(pid: Pid) -> Vec<Tid> {
    match process(pid) {
        Ok(process) if process.is_zombie() => Vec::from([pid.main_thread()]),
        _ => thread_ids(pid),
    }
}

/// The directory of a process, if `name` is the number of one in a namespace.
pub fn directory(name: &[u8], parent: &Place, namespace: &PidNamespace) -> Option<Arc<dyn Inode>> {
    let pid = Pid::new(namespace.id_of(parse_id(name)?));
    let process = process(pid).ok()?;
    let owner = {
        let credentials = process.credentials.borrow_mut();
        (credentials.euid, credentials.egid)
    };
    let place = Place { owner, ..parent.below(name) };
    let (tid, namespace) = (pid.main_thread(), namespace.clone());
    Some(Directory::new(place, ProcessNames { pid, tid, kind: DirectoryKind::Process, namespace }))
}

/// Emits the numbers of all processes in a namespace.
pub fn list(namespace: &PidNamespace, emit: &mut dyn FnMut(&[u8], FileType)) {
    for process in namespace.processes_by_number() {
        let number = process.pid.number_in(namespace);
        emit(alloc::format!("{number}").as_bytes(), FileType::Directory);
    }
}

/// Which of the two kinds of directory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum DirectoryKind {
    /// `/proc/PID`.
    Process,
    /// `/proc/PID/task/TID`.
    Thread,
}

#[derive(Clone)]
struct ProcessNames {
    pid: Pid,
    tid: Tid,
    kind: DirectoryKind,
    /// Whose numbers are shown.
    namespace: PidNamespace,
}

/// Makes the content of a file from a thread and its process.
type Content = fn(&Thread, &Process) -> Result<Vec<u8>>;

/// Files by name, with their permissions.
const FILES: &[(&str, u32, Content)] = &[
    ("auxv", 0o400, |_, process| {
        Ok(bytemuck::cast_slice(&process.auxiliary_vector.borrow_mut()).to_vec())
    }),
    ("cmdline", 0o444, |_, process| Ok(process.command_line.borrow_mut().clone())),
    ("coredump_filter", 0o444, |_, _| Ok(b"00000033\n".to_vec())),
    ("environ", 0o400, |_, process| Ok(process.environment.borrow_mut().clone())),
    ("io", 0o400, |_, process| access::check_read(process).and_then(|()| status::io(process))),
    ("limits", 0o444, |_, process| status::limits(process)),
    ("maps", 0o444, memory::maps),
    ("mountinfo", 0o444, system::mountinfo),
    ("mounts", 0o444, system::mounts),
    ("mountstats", 0o400, system::mountstats),
    ("personality", 0o400, |_, process| {
        Ok(alloc::format!("{:08x}\n", process.personality.get()).into_bytes())
    }),
    ("smaps", 0o444, memory::smaps),
    ("smaps_rollup", 0o444, memory::smaps_rollup),
    ("statm", 0o444, memory::statm),
    ("timerslack_ns", 0o444, |thread, _| {
        Ok(alloc::format!("{}\n", thread.timer_slack.get().current_ns).into_bytes())
    }),
];

/// Those that only who may look into the process can open.
const GUARDED: &[&str] = &["auxv", "environ", "maps", "smaps", "smaps_rollup"];

/// Makes the content of a file with numbers of a namespace.
type Numbered = fn(&Thread, &Process, &PidNamespace) -> Result<Vec<u8>>;

/// Files that show processes.
const NUMBERED: &[(&str, Numbered)] =
    &[("children", children), ("stat", status::stat), ("status", status::status)];

/// Files that are the same for every process, also for one that has ended.
const CONSTANT: &[(&str, u32, &str)] = &[
    ("cgroup", 0o444, "0::/\n"),
    ("cpuset", 0o444, "/\n"),
    ("oom_score", 0o444, "0\n"),
    ("schedstat", 0o444, "0 0 0\n"),
    ("wchan", 0o444, "0"),
];

const LINKS: &[&str] = &["exe", "cwd", "root"];
const DIRECTORIES: &[&str] = &["fd", "fdinfo", "net", "ns"];
/// Files that can be written to.
const SETTINGS: &[&str] = &["comm", "mem", "oom_score_adj"];

impl ProcessNames {
    /// Whom the files are about: a process and its thread, or no thread if it has ended.
    fn subject(&self) -> Result<(Arc<Process>, Option<Arc<Thread>>)> {
        let process = process(self.pid)?;
        let thread = match self.kind {
            DirectoryKind::Process => representative(&process),
            DirectoryKind::Thread => thread(self.tid).ok(),
        };
        match thread.is_some() || process.is_zombie() {
            true => Ok((process, thread)),
            false => Err(Errno::ESRCH),
        }
    }
}

impl Names for ProcessNames {
    fn lookup(&self, name: &[u8], directory: &Place) -> Result<Option<Arc<dyn Inode>>> {
        let (pid, tid) = (self.pid, self.tid);
        let place = directory.below(name);
        if let Some(&(_, permissions, text)) =
            CONSTANT.iter().find(|(known, ..)| known.as_bytes() == name)
        {
            let generate = move || self::process(pid).map(|_| text.as_bytes().to_vec());
            return Ok(Some(Generated::new(place, permissions, Arc::new(generate), None)));
        }
        if let Some(&(known, permissions, content)) =
            FILES.iter().find(|(known, ..)| known.as_bytes() == name)
        {
            let (names, checked, name) = (self.clone(), self.clone(), known.as_bytes());
            let generate = move || match names.subject()? {
                (process, Some(thread)) => content(&thread, &process),
                (process, None) => zombie::content(name, &process, &names.namespace),
            };
            let check = move || {
                let Ok((process, thread)) = checked.subject() else { return Ok(()) };
                if GUARDED.contains(&known) {
                    access::check_read(&process)?;
                }
                if thread.is_none() { zombie::check(name) } else { Ok(()) }
            };
            let (generate, check) = (Arc::new(generate), Arc::new(check));
            return Ok(Some(Generated::checked(place, permissions, generate, check)));
        }
        if let Some(&(known, content)) = NUMBERED.iter().find(|(known, _)| known.as_bytes() == name)
        {
            let (names, name) = (self.clone(), known.as_bytes());
            return Ok(Some(Generated::read_only(place, move || match names.subject()? {
                (process, Some(thread)) => content(&thread, &process, &names.namespace),
                (process, None) => zombie::content(name, &process, &names.namespace),
            })));
        }
        if let Some(&(_, subject)) =
            id_maps::NAMES.iter().find(|(known, _)| known.as_bytes() == name)
        {
            return Ok(Some(Arc::new(IdMap { place, pid, subject })));
        }
        let inode: Arc<dyn Inode> = match name {
            b"exe" => SymbolicLink::new(place, move || {
                shown(pid)?.executable.borrow_mut().clone().map(Link::Magic).ok_or(Errno::ENOENT)
            }),
            b"cwd" => SymbolicLink::new(place, move || {
                Ok(Link::Magic(shown(pid)?.fs().borrow_mut().cwd.clone()))
            }),
            b"root" => SymbolicLink::new(place, move || {
                Ok(Link::Magic(shown(pid)?.fs().borrow_mut().root.clone()))
            }),
            b"fd" => Directory::new(place, Descriptors { pid }),
            b"fdinfo" => Directory::new(place, DescriptorInfos { pid }),
            b"net" => Directory::new(place, Fixed(settings::NET)),
            b"ns" => Directory::new(place, Namespaces { pid }),
            b"mem" => super::mem::inode(place, pid),
            b"task" if self.kind == DirectoryKind::Process => {
                Directory::new(place, Tasks { pid, namespace: self.namespace.clone() })
            }
            b"comm" => Generated::new(
                place,
                0o644,
                Arc::new(move || {
                    let process = process(pid)?;
                    match thread(tid).ok().or_else(|| representative(&process)) {
                        Some(thread) => Ok(status::name_line(&thread)),
                        None => Ok(zombie::name_line(&process)),
                    }
                }),
                Some(Arc::new(move |text| set_name(tid, text))),
            ),
            b"oom_score_adj" => Generated::new(
                place,
                0o644,
                Arc::new(move || {
                    Ok(alloc::format!("{}\n", process(pid)?.oom_score_adj()).into_bytes())
                }),
                Some(Arc::new(move |text| set_oom_score_adj(pid, text))),
            ),
            _ => return Ok(None),
        };
        Ok(Some(inode))
    }

    fn list(&self, emit: &mut dyn FnMut(&[u8], FileType)) -> Result<()> {
        FILES.iter().for_each(|(name, ..)| emit(name.as_bytes(), FileType::Regular));
        NUMBERED.iter().for_each(|(name, ..)| emit(name.as_bytes(), FileType::Regular));
        CONSTANT.iter().for_each(|(name, ..)| emit(name.as_bytes(), FileType::Regular));
        id_maps::NAMES.iter().for_each(|(name, _)| emit(name.as_bytes(), FileType::Regular));
        SETTINGS.iter().for_each(|name| emit(name.as_bytes(), FileType::Regular));
        LINKS.iter().for_each(|name| emit(name.as_bytes(), FileType::Symlink));
        DIRECTORIES.iter().for_each(|name| emit(name.as_bytes(), FileType::Directory));
        if self.kind == DirectoryKind::Process {
            emit(b"task", FileType::Directory);
        }
        Ok(())
    }

    fn process(&self) -> Option<Pid> {
        (self.kind == DirectoryKind::Process).then_some(self.pid)
    }
}

/// Ids of the children of a process, as `task/TID/children` shows them.
fn children(thread: &Thread, process: &Process, namespace: &PidNamespace) -> Result<Vec<u8>> {
    if thread.tid() != process.pid.main_thread() {
        return Ok(Vec::new());
    }
    let all = kernel().tasks.all_processes();
    let own = all.iter().filter(|child| child.parent_pid() == Some(process.pid));
    let numbers = own.map(|child| child.pid.number_in(namespace));
    Ok(numbers.flat_map(|number| alloc::format!("{number} ").into_bytes()).collect())
}

/// Names in `/proc/PID/ns`.
const NAMESPACES: [(&str, Kind); 10] = [
    ("cgroup", Kind::Cgroup),
    ("ipc", Kind::Ipc),
    ("mnt", Kind::Mounts),
    ("net", Kind::Net),
    ("pid", Kind::Pid),
    ("pid_for_children", Kind::Pid),
    ("time", Kind::Time),
    ("time_for_children", Kind::Time),
    ("user", Kind::User),
    ("uts", Kind::Uts),
];

/// `/proc/PID/ns` (namespaces(7)).
struct Namespaces {
    pid: Pid,
}

impl Names for Namespaces {
    fn lookup(&self, name: &[u8], directory: &Place) -> Result<Option<Arc<dyn Inode>>> {
        let Some(&(_, kind)) = NAMESPACES.iter().find(|(known, _)| known.as_bytes() == name) else {
            return Ok(None);
        };
        let (pid, is_of_children) = (self.pid, name == b"pid_for_children");
        Ok(Some(SymbolicLink::new(directory.below(name), move || {
            let process = shown(pid)?;
            let namespace = match is_of_children {
                true => Namespace::of_children(&process).ok_or(Errno::ENOENT)?,
                false => Namespace::of(&process, kind),
            };
            Ok(Link::Magic(nsfs::path(namespace)))
        })))
    }

    fn list(&self, emit: &mut dyn FnMut(&[u8], FileType)) -> Result<()> {
        NAMESPACES.iter().for_each(|(name, _)| emit(name.as_bytes(), FileType::Symlink));
        Ok(())
    }

    fn permissions(&self) -> u32 {
        0o511
    }
}

fn set_name(tid: Tid, text: &[u8]) -> Result<()> {
    let text = text.strip_suffix(b"\n").unwrap_or(text);
    let len = text.len().min(15);
    let mut name = [0; 16];
    name[..len].copy_from_slice(&text[..len]);
    let thread = thread(tid)?;
    // `comm_write` (fs/proc/base.c).
    if thread.process.pid != current_process().pid {
        return Err(Errno::EINVAL);
    }
    thread.name.set(name);
    Ok(())
}

fn set_oom_score_adj(pid: Pid, text: &[u8]) -> Result<()> {
    let text = core::str::from_utf8(text).map_err(|_| Errno::EINVAL)?;
    let value: i32 = text.trim().parse().map_err(|_| Errno::EINVAL)?;
    process(pid)?.set_oom_score_adj(value)
}

/// `/proc/PID/task`.
struct Tasks {
    pid: Pid,
    namespace: PidNamespace,
}

impl Names for Tasks {
    fn lookup(&self, name: &[u8], directory: &Place) -> Result<Option<Arc<dyn Inode>>> {
        let Some(number) = parse_id(name) else { return Ok(None) };
        let (tid, namespace) = (Tid::new(self.namespace.id_of(number)), self.namespace.clone());
        if !shown_ids(self.pid).contains(&tid) {
            return Ok(None);
        }
        let names = ProcessNames { pid: self.pid, tid, kind: DirectoryKind::Thread, namespace };
        Ok(Some(Directory::new(directory.below(name), names)))
    }

    fn list(&self, emit: &mut dyn FnMut(&[u8], FileType)) -> Result<()> {
        for tid in shown_ids(self.pid) {
            let name: String = alloc::format!("{}", tid.number_in(&self.namespace));
            emit(name.as_bytes(), FileType::Directory);
        }
        Ok(())
    }

    /// Programs count their threads by it.
    fn links(&self) -> u32 {
        2 + shown_ids(self.pid).len() as u32
    }
}
