//! Shared memory (shmat(2)): nameless files in memory, mapped shared.

use alloc::format;
use alloc::sync::Arc;

use super::permissions::Permissions;
use super::registry::Object;
use super::{IPC_PRIVATE, SystemV, now_s};
use crate::errno::Result;
use crate::io::{Sink, Source};
use crate::ipc::namespace;
use crate::mm::backing::FileBacking;
use crate::mm::backing::UpperPages;
use crate::mm::shared::Placed;
use crate::mm::vma::Vma;
use crate::state::kernel;
use crate::sync::KernelCell;
use crate::task::Process;
use crate::task::ids::Pid;
use crate::task::thread::running;

/// Goes with its last attachment (`IPC_RMID`).
pub const SHM_DEST: u32 = 0o1000;
/// Not to be paged out (`SHM_LOCK`).
pub const SHM_LOCKED: u32 = 0o2000;

/// A segment of shared memory.
pub struct Segment {
    permissions: KernelCell<Permissions>,
    pages: Arc<SegmentPages>,
    /// Device and inode number of the file.
    file: (u64, u64),
    /// Bytes, as asked for.
    pub size: u64,
    /// Process that has made it.
    pub creator: Pid,
    /// What changes.
    pub state: KernelCell<State>,
}

/// What changes.
#[derive(Clone, Copy, Default)]
pub struct State {
    /// When it was attached, detached and changed last, in seconds since the epoch.
    pub times_s: [i64; 3],
    /// Process that has attached or detached it last.
    pub last_pid: u32,
    /// [`SHM_DEST`] and [`SHM_LOCKED`].
    pub flags: u32,
}

const ATTACHED: usize = 0;
const DETACHED: usize = 1;
const CHANGED: usize = 2;

/// The pages of a segment, which tell it when a mapping of them has gone.
struct SegmentPages {
    file: Arc<dyn UpperPages>,
}

impl UpperPages for SegmentPages {
    fn len(&self) -> u64 {
        self.file.len()
    }

    fn read_at(&self, sink: &mut Sink<'_>, offset: u64) -> Result<usize> {
        self.file.read_at(sink, offset)
    }

    fn write_at(&self, source: &mut Source<'_>, offset: u64) -> Result<usize> {
        self.file.write_at(source, offset)
    }

    fn lend(&self, page: u64, address: u64, prot: u32) -> Result<Option<Placed>> {
        self.file.lend(page, address, prot)
    }

    fn recall(&self, start: u64, end: u64) {
        self.file.recall(start, end);
    }

    fn is_segment(&self) -> bool {
        true
    }

    fn unmapped(&self) {
        let Some(thread) = running() else { return };
        let is_own = |segment: &Segment| core::ptr::eq(Arc::as_ptr(&segment.pages), self);
        for namespace in namespace::all() {
            let all = namespace.system_v.memory.all();
            if let Some((id, segment)) = all.into_iter().find(|(_, segment)| is_own(segment)) {
                return detached(&namespace.system_v, id, &segment, thread.process.pid);
            }
        }
    }
}

impl Object for Segment {
    fn permissions(&self) -> &KernelCell<Permissions> {
        &self.permissions
    }
}

impl Segment {
    /// A segment of zeros.
    pub fn new(permissions: Permissions, size: u64, creator: Pid) -> Result<Self> {
        let len = size.next_multiple_of(4096);
        let owner = (permissions.uid, permissions.gid);
        let (file, attributes) = kernel().fs.memory_file(permissions.mode, owner, len)?;
        let pages = Arc::new(SegmentPages { file });
        let state = State { times_s: [0, 0, now_s()], ..State::default() };
        Ok(Self {
            permissions: KernelCell::new(permissions),
            pages,
            file: (attributes.dev, attributes.ino),
            size,
            creator,
            state: KernelCell::new(state),
        })
    }

    /// What a mapping of it shows.
    pub fn backing(&self, is_writable: bool) -> FileBacking {
        let path = format!("/SYSV{:08x} (deleted)", self.permissions.get().key).into_bytes();
        FileBacking {
            source: crate::mm::backing::MmapSource::Upper(self.pages.clone()),
            path: path.into(),
            device: self.file.0,
            inode: self.file.1,
            writable: is_writable,
            holder: None,
        }
    }

    /// Whether an area shows it.
    pub fn is_shown_by(&self, vma: &Vma) -> bool {
        let own = Arc::as_ptr(&self.pages);
        vma.shared_upper().is_some_and(|pages| core::ptr::addr_eq(Arc::as_ptr(pages), own))
    }

    /// Number of areas that show it, in all processes (`shm_nattch`).
    pub fn attachments(&self) -> u64 {
        let count = |vma: &Vma| u64::from(self.is_shown_by(vma));
        kernel().tasks.spaces().iter().map(|space| space.sum(&count)).sum()
    }

    /// Notes that a process has attached it.
    pub fn attached(&self, pid: Pid) {
        let mut state = self.state.borrow_mut();
        state.times_s[ATTACHED] = now_s();
        state.last_pid = pid.number();
    }

    /// Notes a change by shmctl(2).
    pub fn changed(&self) {
        self.state.borrow_mut().times_s[CHANGED] = now_s();
    }
}

/// Notes that a process has detached what it has shown of a segment, which goes if
/// it was to.
fn detached(system_v: &SystemV, id: i32, segment: &Segment, pid: Pid) {
    let is_condemned = {
        let mut state = segment.state.borrow_mut();
        state.times_s[DETACHED] = now_s();
        state.last_pid = pid.number();
        state.flags & SHM_DEST != 0
    };
    if is_condemned && segment.attachments() == 0 {
        system_v.memory.remove(id);
    }
}

/// A process has ended; its memory is gone if no other has it.
pub fn process_ended(process: &Process) {
    namespace::all().iter().for_each(|namespace| detach_all(&namespace.system_v, process));
}

fn detach_all(system_v: &SystemV, process: &Process) {
    let segments = system_v.memory.all();
    let mm = process.mm();
    if segments.is_empty() || mm.users() > 0 {
        return;
    }
    let areas = mm.areas();
    for (id, segment) in segments {
        if areas.iter().any(|vma| segment.is_shown_by(vma)) {
            detached(system_v, id, &segment, process.pid);
        }
    }
}

/// `IPC_RMID`: the segment goes with its last attachment, and nobody finds it by
/// its key any more.
pub fn condemn(system_v: &SystemV, id: i32, segment: &Segment) {
    if segment.attachments() == 0 {
        system_v.memory.remove(id);
        return;
    }
    segment.state.borrow_mut().flags |= SHM_DEST;
    let key = core::mem::replace(&mut segment.permissions.borrow_mut().key, IPC_PRIVATE);
    if key != IPC_PRIVATE {
        system_v.memory.forget_key(key);
    }
}
