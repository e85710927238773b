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
use crate::task::{Process, Thread};

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

/// The process with this id; `ENOENT` if it has ended, since it then has no files any more.
fn living(pid: Pid) -> Result<Arc<Process>> {
    let process = process(pid)?;
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

/// The directory of a process, if `name` is the id of one.
pub fn directory(name: &[u8], parent: &Place) -> Option<Arc<dyn Inode>> {
    let pid = Pid::new(parse_id(name)?);
    let process = process(pid).ok()?;
    let owner = {
        let credentials = process.credentials.borrow_mut();
        (credentials.euid, credentials.egid)
    };
    let place = Place { owner, ..parent.below(name) };
    Some(Directory::new(
        place,
        ProcessNames { pid, tid: pid.main_thread(), kind: DirectoryKind::Process },
    ))
}

/// Emits the ids of all processes.
pub fn list(emit: &mut dyn FnMut(&[u8], FileType)) {
    for process in kernel().tasks.all_processes() {
        emit(alloc::format!("{}", process.pid).as_bytes(), FileType::Directory);
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

#[derive(Clone, Copy)]
struct ProcessNames {
    pid: Pid,
    tid: Tid,
    kind: DirectoryKind,
}

/// Makes the content of a file from a thread and its process.
type Content = fn(&Thread, &Process) -> Result<Vec<u8>>;

/// Files by name, with their permissions.
const FILES: &[(&str, u32, Content)] = &[
    ("auxv", 0o400, |_, process| {
        Ok(bytemuck::cast_slice(&process.auxiliary_vector.borrow_mut()).to_vec())
    }),
    ("children", 0o444, children),
    ("cmdline", 0o444, |_, process| Ok(process.command_line.borrow_mut().clone())),
    ("coredump_filter", 0o444, |_, _| Ok(b"00000033\n".to_vec())),
    ("environ", 0o400, |_, process| Ok(process.environment.borrow_mut().clone())),
    ("io", 0o400, |_, process| status::io(process)),
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
    ("stat", 0o444, status::stat),
    ("statm", 0o444, memory::statm),
    ("status", 0o444, status::status),
    ("timerslack_ns", 0o444, |thread, _| {
        Ok(alloc::format!("{}\n", thread.timer_slack.get().current_ns).into_bytes())
    }),
];

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
            let (names, name) = (*self, known.as_bytes());
            let generate = move || match names.subject()? {
                (process, Some(thread)) => content(&thread, &process),
                (process, None) => zombie::content(name, &process),
            };
            let check = move || match names.subject() {
                Ok((_, None)) => zombie::check(name),
                _ => Ok(()),
            };
            let (generate, check) = (Arc::new(generate), Arc::new(check));
            return Ok(Some(Generated::checked(place, permissions, generate, check)));
        }
        if let Some(&(_, subject)) =
            id_maps::NAMES.iter().find(|(known, _)| known.as_bytes() == name)
        {
            return Ok(Some(Arc::new(IdMap { place, pid, subject })));
        }
        let inode: Arc<dyn Inode> = match name {
            b"exe" => SymbolicLink::new(place, move || {
                living(pid)?.executable.borrow_mut().clone().map(Link::Magic).ok_or(Errno::ENOENT)
            }),
            b"cwd" => SymbolicLink::new(place, move || {
                Ok(Link::Magic(living(pid)?.fs().borrow_mut().cwd.clone()))
            }),
            b"root" => SymbolicLink::new(place, move || {
                Ok(Link::Magic(living(pid)?.fs().borrow_mut().root.clone()))
            }),
            b"fd" => Directory::new(place, Descriptors { pid }),
            b"fdinfo" => Directory::new(place, DescriptorInfos { pid }),
            b"net" => Directory::new(place, Fixed(settings::NET)),
            b"ns" => Directory::new(place, Namespaces { pid }),
            b"mem" => super::mem::inode(place, pid),
            b"task" if self.kind == DirectoryKind::Process => Directory::new(place, Tasks { pid }),
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
fn children(thread: &Thread, process: &Process) -> Result<Vec<u8>> {
    if thread.tid() != process.pid.main_thread() {
        return Ok(Vec::new());
    }
    let all = kernel().tasks.all_processes();
    let own = all.iter().filter(|child| child.parent_pid() == Some(process.pid));
    Ok(own.flat_map(|child| alloc::format!("{} ", child.pid).into_bytes()).collect())
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
        let pid = self.pid;
        Ok(Some(SymbolicLink::new(directory.below(name), move || {
            Ok(Link::Magic(nsfs::path(Namespace::of(&*living(pid)?, kind))))
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
    thread(tid)?.name.set(name);
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
}

impl Names for Tasks {
    fn lookup(&self, name: &[u8], directory: &Place) -> Result<Option<Arc<dyn Inode>>> {
        let Some(tid) = parse_id(name).map(Tid::new) else { return Ok(None) };
        if !shown_ids(self.pid).contains(&tid) {
            return Ok(None);
        }
        let names = ProcessNames { pid: self.pid, tid, kind: DirectoryKind::Thread };
        Ok(Some(Directory::new(directory.below(name), names)))
    }

    fn list(&self, emit: &mut dyn FnMut(&[u8], FileType)) -> Result<()> {
        for tid in shown_ids(self.pid) {
            let name: String = alloc::format!("{tid}");
            emit(name.as_bytes(), FileType::Directory);
        }
        Ok(())
    }

    /// Programs count their threads by it.
    fn links(&self) -> u32 {
        2 + shown_ids(self.pid).len() as u32
    }
}
