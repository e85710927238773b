//! inotify(7): watches on inodes, and queues of what happened to them.
//!
//! Watches lie in one table by inode; each pins its inode. The virtual file
//! system reports events through [`super::notify`]. An event on a file goes to
//! the watches of the directory that holds it first, with the file's name, then
//! to those of the file itself.

use alloc::collections::{BTreeMap, VecDeque};
use alloc::format;
use alloc::string::String;
use alloc::sync::{Arc, Weak};
use alloc::vec::Vec;
use core::sync::atomic::{AtomicU32, AtomicUsize, Ordering};

use bitflags::bitflags;

use super::file::{Events, File};
use super::inode::{Attributes, FileType, FilesystemId, Inode};
use crate::errno::{Errno, Result};
use crate::io::{Sink, Source};
use crate::platform::user::UserAddress;
use crate::state::kernel;
use crate::sync::KernelCell;
use crate::task::wait::WaitQueue;

/// `fs.inotify.max_queued_events`.
pub const QUEUE_MAX: usize = 16384;
/// `fs.inotify.max_user_instances`.
pub const INSTANCES_MAX: usize = 128;
/// `fs.inotify.max_user_watches`.
pub const WATCHES_MAX: usize = 65536;

bitflags! {
    /// Events and flags, with the values of inotify(7).
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub struct Mask: u32 {
        /// The file was read.
        const ACCESS = 0x1;
        /// The content has changed.
        const MODIFY = 0x2;
        /// Attributes have changed.
        const ATTRIB = 0x4;
        /// A file that was open for writing was closed.
        const CLOSE_WRITE = 0x8;
        /// A file that was open for reading was closed.
        const CLOSE_NOWRITE = 0x10;
        /// The file was opened.
        const OPEN = 0x20;
        /// A file was moved away.
        const MOVED_FROM = 0x40;
        /// A file was moved here.
        const MOVED_TO = 0x80;
        /// A name was created in a directory.
        const CREATE = 0x100;
        /// A name was removed from a directory.
        const DELETE = 0x200;
        /// The watched file itself is gone.
        const DELETE_SELF = 0x400;
        /// The watched file itself was moved.
        const MOVE_SELF = 0x800;
        /// The file system was unmounted.
        const UNMOUNT = 0x2000;
        /// Events were lost.
        const Q_OVERFLOW = 0x4000;
        /// The watch has ended.
        const IGNORED = 0x8000;
        /// Watch directories only.
        const ONLYDIR = 0x0100_0000;
        /// Do not follow a final symbolic link.
        const DONT_FOLLOW = 0x0200_0000;
        /// No events of names that have been removed.
        const EXCL_UNLINK = 0x0400_0000;
        /// Fail if the file is watched already.
        const MASK_CREATE = 0x1000_0000;
        /// Add to the mask of an existing watch.
        const MASK_ADD = 0x2000_0000;
        /// The event is about a directory.
        const ISDIR = 0x4000_0000;
        /// End the watch with its first event.
        const ONESHOT = 0x8000_0000;
        /// `IN_ALL_EVENTS`.
        const ALL_EVENTS = 0xfff;
    }
}

/// What one event says.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Event {
    watch: i32,
    mask: Mask,
    cookie: u32,
    name: Vec<u8>,
}

/// Bytes of `struct inotify_event` without a name.
const HEADER: usize = 16;

impl Event {
    /// Names are padded with zeros, at least one, to a multiple of the header.
    fn len(&self) -> usize {
        match self.name.len() {
            0 => HEADER,
            len => HEADER + (len + 1).next_multiple_of(HEADER),
        }
    }

    fn bytes(&self) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(self.len());
        bytes.extend_from_slice(&self.watch.to_le_bytes());
        bytes.extend_from_slice(&self.mask.bits().to_le_bytes());
        bytes.extend_from_slice(&self.cookie.to_le_bytes());
        bytes.extend_from_slice(&((self.len() - HEADER) as u32).to_le_bytes());
        bytes.extend_from_slice(&self.name);
        bytes.resize(self.len(), 0);
        bytes
    }
}

/// An inotify instance: an open file that events are read from.
#[derive(Default)]
pub struct Inotify {
    queue: KernelCell<VecDeque<Event>>,
    /// Watched inodes by watch descriptor.
    watches: KernelCell<BTreeMap<i32, InodeKey>>,
    last: AtomicU32,
    readers: WaitQueue,
}

/// Tells inodes apart: their file system and address. A watched inode is kept alive, so that
/// no other can have it.
type InodeKey = (FilesystemId, usize);

fn key(inode: &Arc<dyn Inode>) -> InodeKey {
    (inode.filesystem(), Arc::as_ptr(inode).cast::<()>() as usize)
}

struct Watched {
    inode: Arc<dyn Inode>,
    marks: Vec<Mark>,
}

/// One instance's interest in one inode.
struct Mark {
    instance: Weak<Inotify>,
    watch: i32,
    mask: Mask,
}

impl Mark {
    fn is_of(&self, instance: &Inotify) -> bool {
        core::ptr::eq(self.instance.as_ptr(), instance)
    }
}

/// All watches of the sandbox.
#[derive(Default)]
pub struct Watches {
    by_inode: KernelCell<BTreeMap<InodeKey, Watched>>,
    count: AtomicUsize,
    instances: AtomicUsize,
    last_cookie: AtomicU32,
}

/// A name in a watched directory.
#[derive(Clone, Copy)]
pub struct Name<'a> {
    /// The name.
    pub name: &'a [u8],
    /// Whether the name has been removed by now.
    pub unlinked: bool,
}

impl Watches {
    /// Whether nobody watches anything.
    pub fn is_empty(&self) -> bool {
        self.count.load(Ordering::Relaxed) == 0
    }

    /// A number that ties the two events of a move together.
    pub fn new_cookie(&self) -> u32 {
        self.last_cookie.fetch_add(1, Ordering::Relaxed) + 1
    }

    /// A new instance; `EMFILE` if there are too many.
    pub fn instance(&self) -> Result<Arc<Inotify>> {
        if self.instances.load(Ordering::Relaxed) >= INSTANCES_MAX {
            return Err(Errno::EMFILE);
        }
        self.instances.fetch_add(1, Ordering::Relaxed);
        Ok(Arc::new(Inotify::default()))
    }

    /// The lines of an instance in `/proc/PID/fdinfo`: its watches.
    fn details(&self, instance: &Inotify) -> String {
        let watches = instance.watches.borrow_mut().clone();
        let table = self.by_inode.borrow_mut();
        let line = |watch: &i32, watched: &Watched| {
            let mark = watched.marks.iter().find(|mark| mark.is_of(instance))?;
            let Attributes { ino, dev, .. } = watched.inode.attributes();
            let mask = mark.mask.bits();
            Some(format!(
                "inotify wd:{watch:x} ino:{ino:x} sdev:{dev:x} mask:{mask:x} ignored_mask:0\n"
            ))
        };
        // The newest first, as Linux has them.
        watches.iter().rev().filter_map(|(watch, key)| line(watch, table.get(key)?)).collect()
    }

    /// Watches an inode; returns the watch descriptor.
    pub fn add(
        &self,
        instance: &Arc<Inotify>,
        inode: &Arc<dyn Inode>,
        wanted: Mask,
    ) -> Result<i32> {
        let kept = wanted & (Mask::ALL_EVENTS | Mask::EXCL_UNLINK | Mask::ONESHOT);
        let mut table = self.by_inode.borrow_mut();
        let watched = table
            .entry(key(inode))
            .or_insert_with(|| Watched { inode: inode.clone(), marks: Vec::new() });
        if let Some(mark) = watched.marks.iter_mut().find(|mark| mark.is_of(instance)) {
            if wanted.contains(Mask::MASK_CREATE) {
                return Err(Errno::EEXIST);
            }
            mark.mask = if wanted.contains(Mask::MASK_ADD) { mark.mask | kept } else { kept };
            return Ok(mark.watch);
        }
        if self.count.load(Ordering::Relaxed) >= WATCHES_MAX {
            if watched.marks.is_empty() {
                table.remove(&key(inode));
            }
            return Err(Errno::ENOSPC);
        }
        let watch = instance.last.fetch_add(1, Ordering::Relaxed) as i32 + 1;
        watched.marks.push(Mark { instance: Arc::downgrade(instance), watch, mask: kept });
        instance.watches.borrow_mut().insert(watch, key(inode));
        self.count.fetch_add(1, Ordering::Relaxed);
        Ok(watch)
    }

    /// Removes a watch; `EINVAL` if there is none. `IN_IGNORED` follows.
    pub fn remove(&self, instance: &Inotify, watch: i32) -> Result<()> {
        let inode = instance.watches.borrow_mut().remove(&watch).ok_or(Errno::EINVAL)?;
        self.forget(instance, inode);
        instance.push(Event { watch, mask: Mask::IGNORED, cookie: 0, name: Vec::new() });
        Ok(())
    }

    fn forget(&self, instance: &Inotify, inode: InodeKey) {
        let dropped = {
            let mut table = self.by_inode.borrow_mut();
            let Some(watched) = table.get_mut(&inode) else { return };
            let before = watched.marks.len();
            watched.marks.retain(|mark| !mark.is_of(instance));
            self.count.fetch_sub(before - watched.marks.len(), Ordering::Relaxed);
            if watched.marks.is_empty() { table.remove(&inode) } else { None }
        };
        drop(dropped);
    }

    /// Reports an event to those who watch an inode: of the inode itself, or of
    /// a name in it.
    pub fn report(&self, inode: &Arc<dyn Inode>, what: Mask, cookie: u32, name: Option<Name<'_>>) {
        let interested: Vec<(Arc<Inotify>, i32, Mask)> = {
            let table = self.by_inode.borrow_mut();
            let Some(watched) = table.get(&key(inode)) else { return };
            let marks = watched.marks.iter().filter(|mark| {
                let unlinked = name.is_some_and(|name| name.unlinked);
                mark.mask.intersects(what & Mask::ALL_EVENTS)
                    && !(unlinked && mark.mask.contains(Mask::EXCL_UNLINK))
            });
            marks
                .filter_map(|mark| Some((mark.instance.upgrade()?, mark.watch, mark.mask)))
                .collect()
        };
        for (instance, watch, mask) in interested {
            let name = name.map_or_else(Vec::new, |name| name.name.to_vec());
            instance.push(Event { watch, mask: what, cookie, name });
            if mask.contains(Mask::ONESHOT) {
                // Nobody else has removed it meanwhile: nothing ran in between.
                let _ = self.remove(&instance, watch);
            }
        }
    }

    /// The inode is gone: its watches end.
    pub fn gone(&self, inode: &Arc<dyn Inode>) {
        self.end(key(inode), None);
    }

    /// A file system is gone with its last mount, and the watches of its files end
    /// (`fsnotify_unmount_inodes`, fs/notify/fsnotify.c).
    pub fn unmounted(&self, filesystem: FilesystemId) {
        let of_filesystem = (filesystem, 0)..=(filesystem, usize::MAX);
        let watched: Vec<(InodeKey, FileType)> = {
            let table = self.by_inode.borrow_mut();
            let all = table.range(of_filesystem);
            all.map(|(key, watched)| (*key, watched.inode.file_type())).collect()
        };
        for (inode, file_type) in watched {
            let is_directory = file_type == FileType::Directory;
            let what = if is_directory { Mask::UNMOUNT | Mask::ISDIR } else { Mask::UNMOUNT };
            self.end(inode, Some(what));
        }
    }

    /// Ends the watches of an inode, each with a last event if there is to be one.
    fn end(&self, inode: InodeKey, last: Option<Mask>) {
        let watched = self.by_inode.borrow_mut().remove(&inode);
        let Some(watched) = watched else { return };
        self.count.fetch_sub(watched.marks.len(), Ordering::Relaxed);
        for mark in &watched.marks {
            if let Some(instance) = mark.instance.upgrade() {
                instance.watches.borrow_mut().remove(&mark.watch);
                for mask in last.into_iter().chain([Mask::IGNORED]) {
                    instance.push(Event { watch: mark.watch, mask, cookie: 0, name: Vec::new() });
                }
            }
        }
        drop(watched.inode);
    }

    fn instance_closed(&self, instance: &Inotify) {
        let inodes = core::mem::take(&mut *instance.watches.borrow_mut());
        for inode in inodes.into_values() {
            self.forget(instance, inode);
        }
        self.instances.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Inotify {
    /// Bytes of the event that is read next, if there is one.
    pub fn next_len(&self) -> Option<usize> {
        self.queue.borrow_mut().front().map(Event::len)
    }

    /// Queues an event, unless it repeats the last one.
    fn push(&self, event: Event) {
        {
            let mut queue = self.queue.borrow_mut();
            if event.mask != Mask::IGNORED && queue.back() == Some(&event) {
                return;
            }
            if queue.len() >= QUEUE_MAX {
                let overflow =
                    Event { watch: -1, mask: Mask::Q_OVERFLOW, cookie: 0, name: Vec::new() };
                if queue.back() == Some(&overflow) {
                    return;
                }
                queue.push_back(overflow);
            } else {
                queue.push_back(event);
            }
        }
        self.readers.wake_all(Events::IN | Events::RDNORM);
    }
}

const FIONREAD: u32 = 0x541b;

impl File for Inotify {
    fn read(&self, sink: &mut Sink<'_>, _: u64) -> Result<usize> {
        let mut done = 0;
        loop {
            let event = {
                let mut queue = self.queue.borrow_mut();
                match queue.front() {
                    None if done == 0 => return Err(Errno::EAGAIN),
                    None => return Ok(done),
                    Some(next) if next.len() > sink.remaining() && done == 0 => {
                        return Err(Errno::EINVAL);
                    }
                    Some(next) if next.len() > sink.remaining() => return Ok(done),
                    Some(_) => queue.pop_front(),
                }
            };
            let Some(event) = event else { return Ok(done) };
            let bytes = event.bytes();
            match sink.put(&bytes) {
                Ok(count) if count == bytes.len() => done += count,
                // Like Linux, what could not be delivered is lost.
                Ok(_) | Err(_) if done == 0 => return Err(Errno::EFAULT),
                Ok(_) | Err(_) => return Ok(done),
            }
        }
    }

    fn write(&self, _: &mut Source<'_>, _: u64) -> Result<usize> {
        Err(Errno::EBADF)
    }

    fn poll(&self) -> Events {
        match self.queue.borrow_mut().is_empty() {
            true => Events::empty(),
            false => Events::IN | Events::RDNORM,
        }
    }

    fn wait_queue(&self) -> Option<&WaitQueue> {
        Some(&self.readers)
    }

    fn ioctl(&self, request: u32, argument: UserAddress) -> Result<u64> {
        if request != FIONREAD {
            return Err(Errno::ENOTTY);
        }
        let bytes: usize = self.queue.borrow_mut().iter().map(Event::len).sum();
        argument.write(&(bytes as i32)).map(|()| 0)
    }

    fn details(&self) -> String {
        kernel().fs.watches.details(self)
    }

    fn description(&self) -> String {
        String::from("anon_inode:inotify")
    }
}

impl Drop for Inotify {
    fn drop(&mut self) {
        crate::state::kernel().fs.watches.instance_closed(self);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fs::tests::World;

    fn read(instance: &Inotify) -> Vec<(i32, u32, String)> {
        let mut bytes = alloc::vec![0; 4096];
        let Ok(count) = instance.read(&mut Sink::kernel(&mut bytes), 0) else {
            return Vec::new();
        };
        let mut rest = &bytes[..count];
        let mut events = Vec::new();
        while !rest.is_empty() {
            let word = |at: usize| u32::from_le_bytes(rest[at..at + 4].try_into().unwrap());
            let len = word(12) as usize;
            let name = rest[16..16 + len].split(|&b| b == 0).next().unwrap().to_vec();
            events.push((word(0) as i32, word(4), String::from_utf8(name).unwrap()));
            rest = &rest[16 + len..];
        }
        events
    }

    #[test]
    fn watches_replace_add_and_end() {
        let world = World::new();
        let watches = &world.fs.watches;
        let instance = watches.instance().unwrap();
        let directory = world.walk("/etc").unwrap();
        let inode = directory.inode();
        let watch = watches.add(&instance, inode, Mask::OPEN).unwrap();
        assert_eq!(watches.add(&instance, inode, Mask::CREATE | Mask::MASK_ADD), Ok(watch));
        let again = watches.add(&instance, inode, Mask::OPEN | Mask::MASK_CREATE);
        assert_eq!(again, Err(Errno::EEXIST));
        let name = Some(Name { name: b"motd", unlinked: false });
        watches.report(inode, Mask::OPEN, 0, name);
        watches.report(inode, Mask::OPEN, 0, name);
        watches.report(inode, Mask::ACCESS, 0, name);
        watches.report(inode, Mask::CREATE, 0, None);
        assert_eq!(read(&instance), [(1, 0x20, "motd".into()), (1, 0x100, "".into())]);
        assert_eq!(watches.remove(&instance, 7), Err(Errno::EINVAL));
        watches.remove(&instance, watch).unwrap();
        assert_eq!(read(&instance), [(1, 0x8000, "".into())]);
        assert!(watches.is_empty());
    }

    #[test]
    fn watches_end_with_their_file_system() {
        let world = World::new();
        let watches = &world.fs.watches;
        let instance = watches.instance().unwrap();
        let (file, other) = (world.walk("/etc/motd").unwrap(), world.walk("/dev/null").unwrap());
        watches.add(&instance, file.inode(), Mask::OPEN).unwrap();
        watches.add(&instance, world.walk("/etc").unwrap().inode(), Mask::OPEN).unwrap();
        watches.add(&instance, other.inode(), Mask::OPEN).unwrap();
        watches.unmounted(file.inode().filesystem());
        let mut told = read(&instance);
        told.sort();
        let of = |watch, mask| (watch, mask, String::new());
        assert_eq!(told, [of(1, 0x2000), of(1, 0x8000), of(2, 0x8000), of(2, 0x4000_2000)]);
        assert_eq!(watches.count.load(Ordering::Relaxed), 1);
    }

    #[test]
    fn a_closed_instance_watches_nothing() {
        let world = World::new();
        let watches = &world.fs.watches;
        let instance = watches.instance().unwrap();
        watches.add(&instance, world.walk("/etc").unwrap().inode(), Mask::CREATE).unwrap();
        world.write("/etc/new", "x").unwrap();
        assert_eq!(read(&instance), [(1, 0x100, "new".into())]);
        drop(instance);
        assert!(watches.is_empty());
        assert_eq!(watches.instances.load(Ordering::Relaxed), 0);
    }

    #[test]
    fn a_full_queue_overflows_once() {
        let world = World::new();
        let watches = &world.fs.watches;
        let instance = watches.instance().unwrap();
        let file = world.walk("/etc/motd").unwrap();
        watches.add(&instance, file.inode(), Mask::ALL_EVENTS).unwrap();
        for number in 0..QUEUE_MAX as u32 + 10 {
            watches.report(file.inode(), Mask::MODIFY, number, None);
        }
        assert_eq!(instance.queue.borrow_mut().len(), QUEUE_MAX + 1);
        assert_eq!(instance.queue.borrow_mut().back().unwrap().mask, Mask::Q_OVERFLOW);
    }
}
