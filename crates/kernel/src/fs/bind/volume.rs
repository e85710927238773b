//! Open regular files of volumes.
//!
//! The host opens a file and hands its descriptor in. The kernel reads from it and maps it; no
//! byte travels in a message. What makes a file longer on the host, and what other sandboxes have to
//! know of (locks), is a request. How long a file is, the kernel mostly knows ([`lengths`]). A copy of a
//! frozen program opens the file again by its name, when it first uses it.

use alloc::string::String;
use alloc::sync::Arc;
use alloc::vec::Vec;
use core::ops::Range as Span;

use thaw_abi::bind::*;

use super::lengths::{self, Known};
use super::node::Handle;
use super::{Bind, BoundNode, number, parse, renewal};
use crate::errno::{Errno, Result};
use crate::fs::file::File;
use crate::fs::locks::{Family, HeldLock, HostLocks, LockKind, Owner, Range};
use crate::fs::lower::host_file;
use crate::fs::overlay::device_number;
use crate::fs::writing;
use crate::io::{Sink, Source};
use crate::mm::backing::{MmapSource, UpperPages};
use crate::mm::file_parts::{self, Lost, Parts};
use crate::mm::shared::Placed;
use crate::platform::machine::{HostFd, HostFiles, Machine, Memory, PROT_WRITE, Sharing};
use crate::platform::memory::GuestRange;
use crate::state;
use crate::sync::KernelCell;

/// Bytes of a write that travel in requests, at most, if it makes a file longer that others have open,
/// too: so many show at once, or in the order in which they come. Of a longer write, zeros show before.
const SENT_MAX: usize = 16 << 10;
/// How often a write looks again how long a file is that another sandbox makes shorter.
const LOOKS_MAX: u32 = 8;
/// How often a file is opened again while others are waited for, each time for as long as the host lets a
/// request take.
const TIMES_MAX: u32 = 6;
/// Reads of an open file after which it is read through mappings: one that is read once costs less
/// without.
const READS_BEFORE_MAPPING: u32 = 4;
/// Bytes of a read that goes through a mapping, at most. The host copies longer ones as fast, and
/// reads ahead from disk.
const MAPPED_READ_MAX: u64 = 64 << 10;

/// Bytes of a shared mapping that a fault maps at most, aligned as one table of pages of the
/// processor is. A fault behind what the file had maps its window anew, so that larger ones would
/// cost programs that make a file longer by pages.
const WINDOW: u64 = 2 << 20;

/// What the host has opened, in this boot.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Opened {
    /// Names it among [`file_parts`].
    number: u64,
    fd: i32,
    handle: Handle,
    inode: u64,
    /// Its place among the [`lengths`], from 1 on; 0: none.
    place: u64,
}

impl Opened {
    /// Opens a file, or makes it.
    pub fn open(bind: &Bind, flags: u64, permissions: u64, path: &[u8]) -> Result<Self> {
        // Only who has it gets places in it.
        let are_lengths_known = lengths::are_known(bind);
        let (fd, reply) = bind.ask_for_file(BIND_OPEN, [flags, permissions, 0], path)?;
        let known = parse_opened(&reply)?;
        bind.set_size(known.inode, known.size);
        Ok(Self {
            number: file_parts::new_number(),
            fd: fd.0,
            handle: Handle::new(known.handle),
            inode: known.inode,
            place: if are_lengths_known { known.place } else { 0 },
        })
    }

    /// What is known of its length without a question.
    fn known(&self, bind: &Bind) -> Option<Known> {
        let has_place = self.place > 0 && self.handle.is_of_this_host();
        has_place.then(|| Known::new(bind, self.place)).flatten()
    }

    /// The host's number.
    pub fn handle(&self) -> Handle {
        self.handle
    }

    /// Gives it back; nothing if that belongs to another boot.
    pub fn close(self, bind: &Bind) {
        if self.handle.is_of_this_boot() {
            file_parts::forget_file(self.number);
            self.close_handle(bind);
            Machine::close(HostFd::new(self.fd));
        }
    }

    /// Gives the host's number back, and keeps the descriptor.
    fn close_handle(self, bind: &Bind) {
        if self.handle.is_of_this_host() {
            // Nobody is left to hear of a failure.
            let _ = bind.ask(BIND_CLOSE, [self.handle.number, 0, 0], &[]);
        }
    }

    /// The same file with the descriptor and the mappings of `old`, which has it open, too: its inode
    /// number is nobody else's as long.
    fn with_descriptor_of(self, old: &Self) -> Self {
        Machine::close(HostFd::new(self.fd));
        Self { fd: old.fd, number: old.number, ..self }
    }
}

fn parse_opened(reply: &[u8]) -> Result<OpenedVolumeFile> {
    /// What a host of before says.
    const HEAD: usize = core::mem::offset_of!(OpenedVolumeFile, place);
    let mut known = OpenedVolumeFile::default();
    let len = reply.len().min(size_of_val(&known));
    let given = reply.get(..len).filter(|given| given.len() >= HEAD).ok_or(Errno::EIO)?;
    bytemuck::bytes_of_mut(&mut known)[..len].copy_from_slice(given);
    Ok(known)
}

/// An open regular file of a volume.
pub struct VolumeFile {
    pages: Arc<VolumePages>,
}

/// What keeps the host's file open: the description, mappings of the file, and locks.
pub(super) struct VolumePages {
    node: Arc<BoundNode>,
    writable: bool,
    inode: u64,
    /// `Err`: it could not be opened again in the boot of this generation.
    opened: KernelCell<core::result::Result<Opened, (u64, Errno)>>,
    /// Reads until it is read through mappings.
    reads_left: KernelCell<u32>,
}

impl VolumeFile {
    pub(super) fn new(node: Arc<BoundNode>, opened: Opened, writable: bool) -> Self {
        let inode = opened.inode;
        node.open.borrow_mut().push(opened.handle);
        let opened = KernelCell::new(Ok(opened));
        let reads_left = KernelCell::new(READS_BEFORE_MAPPING);
        let pages = Arc::new(VolumePages { node, writable, inode, opened, reads_left });
        pages.bind().add_open(&pages);
        Self { pages }
    }
}

impl VolumeFile {
    /// Makes the file at least `end` bytes long (fallocate(2)).
    pub fn allocate(&self, end: u64) -> Result<()> {
        let size = self.pages.look()?;
        writing::check_size(size, end)?;
        if end > size {
            let size = self.pages.ask_number(VOLUME_GROW, end, 0)?;
            self.pages.bind().set_size(self.pages.inode, size);
        }
        Ok(())
    }
}

impl VolumePages {
    fn bind(&self) -> &Bind {
        &self.node.bind
    }

    pub(super) fn node(&self) -> &BoundNode {
        &self.node
    }

    /// The file, opened by the host of this boot that serves now. `ESTALE` if it is not there any more, or
    /// another sandbox holds locks that this one had when it was frozen, or when its host ended.
    pub(super) fn opened(&self) -> Result<Opened> {
        self.open_now().map_err(|error| match error {
            Errno::EAGAIN => Errno::ESTALE,
            other => other,
        })
    }

    /// The same; `EAGAIN` when another sandbox is found to hold locks. What else than that and `ESTALE`
    /// went wrong may not the next time.
    fn open_now(&self) -> Result<Opened> {
        let known = self.opened.get();
        match known {
            Ok(opened) if opened.handle.is_of_this_host() => return Ok(opened),
            Err((generation, error)) if generation == state::generation() => return Err(error),
            _ => {}
        }
        let old = known.ok().filter(|old| old.handle.is_of_this_boot());
        let again = self.open_again(known.ok());
        if self.opened.get() != known {
            // To open it has found another host, of which all files were taken back.
            again.into_iter().for_each(|again| self.give_back(again, old));
            return self.opened.get().map_err(|(_, error)| error);
        }
        let lost = |error| {
            if matches!(error, Errno::ESTALE | Errno::EAGAIN) {
                // The node knows by its handle that it was open, and so is no other file of its name.
                self.opened.set(Err((state::generation(), Errno::ESTALE)));
                old.into_iter().for_each(|old| old.close(self.bind()));
            }
            Err(error)
        };
        let opened = match again {
            Ok(opened) => opened,
            Err(error) => return lost(error),
        };
        self.opened.set(Ok(opened));
        let locked = state::kernel().fs.locks.take_again(self.file(), self);
        if self.opened.get() != Ok(opened) {
            // The same while its locks were taken: this host has ended.
            return self.opened.get().map_err(|(_, error)| error);
        }
        let Err(error) = locked else {
            known.into_iter().for_each(|old| self.node.forget_handle(old.handle));
            return Ok(opened);
        };
        self.opened.set(known);
        self.give_back(opened, old);
        lost(error)
    }

    /// Gives back what was opened in vain; the descriptor may be that of `old`.
    fn give_back(&self, opened: Opened, old: Option<Opened>) {
        self.node.forget_handle(opened.handle);
        match old {
            Some(old) if old.fd == opened.fd => opened.close_handle(self.bind()),
            _ => opened.close(self.bind()),
        }
    }

    /// Opens the file for the next host, if it was open. False: its programs take themselves to have locks
    /// that they have not.
    pub(super) fn take_back(&self) -> bool {
        // A copy opens it when it uses it first, and hears then that others have the locks.
        if self.opened.get().is_ok_and(|opened| !opened.handle.is_of_this_boot()) {
            return true;
        }
        for _ in 0..TIMES_MAX {
            match self.open_now() {
                // Others are waited for.
                Err(Errno::ETIMEDOUT) => {}
                Err(Errno::EAGAIN) => return false,
                Ok(_) | Err(Errno::ESTALE) => return true,
                Err(_) => break,
            }
        }
        !state::kernel().fs.locks.is_locked(self.file())
    }

    fn open_again(&self, old: Option<Opened>) -> Result<Opened> {
        let access = if self.writable { 2 } else { 0 };
        let opened = Opened::open(self.bind(), access, 0, &self.node.path());
        let opened = opened.map_err(|error| match error {
            Errno::ENOENT | Errno::ENOTDIR | Errno::ENODEV => Errno::ESTALE,
            other => other,
        })?;
        if opened.inode != self.inode {
            opened.close(self.bind());
            return Err(Errno::ESTALE);
        }
        // The old one stays until it is known that the new one does.
        self.node.open.borrow_mut().push(opened.handle);
        Ok(match old.filter(|old| old.handle.is_of_this_boot()) {
            Some(old) => opened.with_descriptor_of(&old),
            None => opened,
        })
    }

    /// Asks about the file by the host's number for it, which is another one with another host.
    fn ask(&self, operation: u32, [b, c]: [u64; 2], tail: &[u8]) -> Result<Vec<u8>> {
        for _ in 0..renewal::HOSTS_MAX {
            let handle = self.opened()?.handle.number;
            match self.bind().ask(operation, [handle, b, c], tail) {
                Err(Errno::ENOTCONN) => {}
                answer => return answer,
            }
        }
        Err(Errno::EIO)
    }

    /// As [`VolumePages::ask`], for an answer that is a number.
    fn ask_number(&self, operation: u32, b: u64, c: u64) -> Result<u64> {
        number(self.ask(operation, [b, c], &[])?)
    }

    fn parts(&self, opened: &Opened) -> Parts {
        Parts { number: opened.number, fd: opened.fd, is_writable: self.writable }
    }

    /// Bytes of the file now.
    fn look(&self) -> Result<u64> {
        let opened = self.opened()?;
        if let Some(length) = opened.known(self.bind()).and_then(Known::length) {
            return Ok(length);
        }
        let found = parse(&self.ask(BIND_FSTAT, [0; 2], &[])?)?;
        self.bind().set_size(self.inode, found.size);
        Ok(found.size)
    }

    /// Bytes of the file as they are known without a question.
    fn size(&self) -> u64 {
        self.known_length().ok().flatten().unwrap_or_else(|| self.bind().size(self.inode))
    }

    /// Bytes of the file, if that is known for sure without a question.
    fn known_length(&self) -> Result<Option<u64>> {
        Ok(self.opened()?.known(self.bind()).and_then(Known::length))
    }

    fn read(&self, sink: &mut Sink<'_>, offset: u64) -> Result<usize> {
        let opened = self.opened()?;
        let wanted = sink.remaining() as u64;
        let known = opened.known(self.bind());
        let Some(length) = known.and_then(Known::length) else {
            return self.read_by_host(sink, offset, wanted);
        };
        let len = length.saturating_sub(offset).min(wanted);
        let mut done = 0;
        if len <= MAPPED_READ_MAX && self.is_read_often() {
            done = self.parts(&opened).read(sink, offset, len) as u64;
        }
        match done < len {
            false => Ok(done as usize),
            true => match self.read_by_host(sink, offset + done, len - done) {
                Ok(more) => Ok(done as usize + more),
                Err(error) if done == 0 => Err(error),
                Err(_) => Ok(done as usize),
            },
        }
    }

    fn note_written(&self) {
        if let Ok(opened) = self.opened() {
            opened.known(self.bind()).into_iter().for_each(Known::note_written);
        }
    }

    fn is_read_often(&self) -> bool {
        let mut left = self.reads_left.borrow_mut();
        *left = left.saturating_sub(1);
        *left == 0
    }

    fn read_by_host(&self, sink: &mut Sink<'_>, offset: u64, len: u64) -> Result<usize> {
        host_file::read_file(|| Ok(HostFd::new(self.opened()?.fd)), sink, offset, len as usize)
    }

    /// Makes a file longer that others have open, too: they see its new bytes, never zeros in their
    /// place. At the end, if there is no `offset`. Where the bytes are, and how many.
    fn write_longer(&self, source: &mut Source<'_>, offset: Option<u64>) -> Result<(u64, usize)> {
        let mut bytes = alloc::vec![0; source.remaining().min(BIND_WRITE_MAX)];
        let count = source.peek(&mut bytes)?;
        let arguments = [offset.unwrap_or(VOLUME_END), 0];
        let at = match self.ask(VOLUME_WRITE, arguments, &bytes[..count]) {
            Err(Errno::ENOSYS) => return self.fill_longer(source, offset, count as u64),
            written => number(written?)?,
        };
        source.take(&mut bytes[..count])?;
        self.bind().set_size(self.inode, at + count as u64);
        Ok((at, count))
    }

    /// The same in two steps: others see zeros meanwhile.
    fn fill_longer(
        &self,
        source: &mut Source<'_>,
        offset: Option<u64>,
        count: u64,
    ) -> Result<(u64, usize)> {
        let at = match offset {
            Some(offset) => {
                self.ask_number(VOLUME_GROW, offset.checked_add(count).ok_or(Errno::EFBIG)?, 0)?;
                offset
            }
            None => self.ask_number(VOLUME_APPEND, count, 0)?,
        };
        self.bind().set_size(self.inode, at + count);
        source.touch();
        let parts = self.parts(&self.opened()?);
        parts.make_pages(at..at + count, at + count);
        let written = parts.write(source, at, count);
        written.map(|written| (at, written)).map_err(reason)
    }

    fn write(&self, source: &mut Source<'_>, offset: u64) -> Result<usize> {
        let (mut done, mut looks) = (0_usize, 0);
        while source.remaining() > 0 {
            match self.write_some(source, offset + done as u64, &mut looks) {
                Ok(count) => done += count,
                Err(error) if done == 0 => return Err(error),
                Err(_) => break,
            }
        }
        Ok(done)
    }

    /// Writes at the end, wherever that is by then: where the bytes end, and how many they are. Others
    /// may come in between if they are more than [`DELEGATED_WRITE_MAX`].
    fn append(&self, source: &mut Source<'_>) -> Result<(u64, usize)> {
        let (mut end, mut done) = (0, 0);
        while source.remaining() > 0 {
            match self.append_some(source) {
                Ok((at, count)) => (end, done) = (at + count as u64, done + count),
                Err(error) if done == 0 => return Err(error),
                Err(_) => break,
            }
        }
        Ok((end, done))
    }

    /// The same at once: where the bytes are.
    fn append_some(&self, source: &mut Source<'_>) -> Result<(u64, usize)> {
        if let Some((at, written)) = self.write_by_delegation(source, None)? {
            let count = written.map_err(reason)?;
            self.note_written();
            return Ok((at, count));
        }
        let wanted = source.remaining();
        if wanted <= BIND_WRITE_MAX {
            if writing::has_limit() {
                // Where the end is may be a question.
                limit(source, self.look()?)?;
            }
            return self.write_longer(source, None);
        }
        // All of its place at once, so that nobody's bytes come in between.
        let at = self.ask_number(VOLUME_APPEND, wanted as u64, 0)?;
        self.bind().set_size(self.inode, at + wanted as u64);
        limit(source, at)?;
        self.write(source, at).map(|count| (at, count))
    }

    fn write_some(&self, source: &mut Source<'_>, offset: u64, looks: &mut u32) -> Result<usize> {
        let written = match self.write_by_delegation(source, Some(offset))? {
            Some((_, written)) => written,
            None => match self.size().checked_sub(offset) {
                None | Some(0) => {
                    let longer = match source.remaining() {
                        ..=SENT_MAX => self.write_longer(source, Some(offset)),
                        many => self.fill_longer(source, Some(offset), many as u64),
                    };
                    return longer.map(|(_, count)| count);
                }
                Some(room) => {
                    source.touch();
                    self.parts(&self.opened()?).write(source, offset, room)
                }
            },
        };
        match written {
            Ok(count) => {
                self.note_written();
                Ok(count)
            }
            Err(Lost::File) if *looks < LOOKS_MAX && self.look()? <= offset => {
                *looks += 1;
                Ok(0)
            }
            Err(lost) => Err(reason(lost)),
        }
    }

    /// Writes at `offset`, or at the end, by the delegation of the file's length; where the bytes are
    /// then, and how many. `None`: the length is not delegated.
    fn write_by_delegation(
        &self,
        source: &mut Source<'_>,
        offset: Option<u64>,
    ) -> Result<Option<(u64, core::result::Result<usize, Lost>)>> {
        loop {
            let opened = self.opened()?;
            let Some(known) = opened.known(self.bind()) else { return Ok(None) };
            let Some(granted) = known.granted() else { return Ok(None) };
            let at = offset.or_else(|| known.length()).unwrap_or_default();
            if offset.is_none() {
                limit(source, at)?;
            }
            let wanted = (source.remaining() as u64).min(DELEGATED_WRITE_MAX);
            let end = at.checked_add(wanted).ok_or(Errno::EFBIG)?;
            let mut least = wanted;
            if end > granted {
                match self.ask_number(VOLUME_GRANT, end, 0) {
                    Ok(_) => {}
                    Err(Errno::EAGAIN) => return Ok(None),
                    // What is there already can be written.
                    Err(_) if at < granted => least = 1,
                    Err(error) => return Err(error),
                };
            }
            source.touch();
            // What is known was said by the host that has opened the file.
            if !opened.handle.is_of_this_host() {
                continue;
            }
            let parts = self.parts(&opened);
            let written = known.write(|length, granted| {
                let at = offset.unwrap_or(length);
                let room = granted.saturating_sub(at).min(wanted);
                // It was taken back and given anew meanwhile.
                if room < least {
                    return (0, None);
                }
                parts.make_pages(length.max(at)..at + room, granted);
                let written = parts.write(source, at, room);
                (written.map_or(0, |count| at + count as u64), Some((at, written)))
            });
            match written {
                Some(Some(written)) => return Ok(Some(written)),
                Some(None) => {}
                None => return Ok(None),
            }
        }
    }
}

/// Has a write at `offset` keep to what the process may write.
fn limit(source: &mut Source<'_>, offset: u64) -> Result<()> {
    let room = writing::room(offset, source.remaining() as u64)?;
    source.limit(usize::try_from(room).unwrap_or(usize::MAX));
    Ok(())
}

fn reason(lost: Lost) -> Errno {
    match lost {
        Lost::Source => Errno::EFAULT,
        // It is there and cannot be written to: there is no room for a hole's bytes.
        Lost::File => Errno::ENOSPC,
        Lost::Host(error) => error,
    }
}

impl Drop for VolumePages {
    fn drop(&mut self) {
        if let Ok(opened) = self.opened.get() {
            self.node.forget_handle(opened.handle);
            opened.close(&self.node.bind);
        }
    }
}

impl File for VolumeFile {
    fn read(&self, sink: &mut Sink<'_>, offset: u64) -> Result<usize> {
        self.pages.read(sink, offset)
    }

    fn write(&self, source: &mut Source<'_>, offset: u64) -> Result<usize> {
        if source.remaining() == 0 {
            return Ok(0);
        }
        limit(source, offset)?;
        self.pages.write(source, offset)
    }

    fn append(&self, source: &mut Source<'_>) -> Option<Result<(u64, usize)>> {
        let appended = (source.remaining() > 0).then(|| self.pages.append(source));
        appended.map(|appended| appended.map(|(end, count)| (end - count as u64, count)))
    }

    fn seekable(&self) -> bool {
        true
    }

    fn size(&self) -> u64 {
        self.pages.look().unwrap_or_default()
    }

    fn mmap_source(&self) -> Result<MmapSource> {
        self.pages.opened()?;
        Ok(MmapSource::Upper(self.pages.clone()))
    }

    fn truncate(&self, size: u64) -> Result<()> {
        writing::check_size(self.size(), size)?;
        self.pages.ask(BIND_FTRUNCATE, [size, 0], &[])?;
        self.pages.bind().set_size(self.pages.inode, size);
        Ok(())
    }

    fn sync(&self) -> Result<()> {
        self.pages.ask(BIND_SYNC, [0; 2], &[]).map(drop)
    }

    fn host_locks(&self) -> Option<Arc<dyn HostLocks>> {
        Some(self.pages.clone())
    }

    fn description(&self) -> String {
        String::from("file")
    }
}

/// Shared mappings show the host's file itself.
impl UpperPages for VolumePages {
    fn len(&self) -> u64 {
        self.look().unwrap_or_default()
    }

    fn read_at(&self, sink: &mut Sink<'_>, offset: u64) -> Result<usize> {
        // The host's file may be longer than the length that is delegated.
        let left = self.known_length()?.unwrap_or(u64::MAX).saturating_sub(offset);
        self.read_by_host(sink, offset, left.min(sink.remaining() as u64))
    }

    fn write_at(&self, source: &mut Source<'_>, offset: u64) -> Result<usize> {
        let size = self.look()?;
        source.limit(usize::try_from(size.saturating_sub(offset)).unwrap_or(usize::MAX));
        self.write(source, offset)
    }

    fn lend(&self, page: u64, address: u64, prot: u32) -> Result<Option<Placed>> {
        self.lend_around(address, address..address.saturating_add(4096), page, prot)
    }

    fn lend_around(
        &self,
        address: u64,
        room: Span<u64>,
        first: u64,
        prot: u32,
    ) -> Result<Option<Placed>> {
        let opened = self.opened()?;
        let offset_of = |at: u64| {
            let page = first.checked_add((at - room.start) / 4096).ok_or(Errno::EINVAL)?;
            page.checked_mul(4096).ok_or(Errno::EINVAL)
        };
        let offset = offset_of(address)?;
        if offset >= self.size() && offset >= self.look()? {
            return Ok(None);
        }
        if prot & PROT_WRITE != 0 && !self.writable {
            return Err(Errno::EACCES);
        }
        let pages = self.size().div_ceil(4096).saturating_sub(first);
        let around = window(address, &room, pages);
        let range = GuestRange::new(around.start, around.end - around.start)?;
        let offset = offset_of(around.start)?;
        Machine::map_file(HostFd::new(opened.fd), range, prot, Sharing::Shared, offset)?;
        Ok(Some(Placed::Moved))
    }

    fn recall(&self, start: u64, end: u64) {
        if let Ok(range) = GuestRange::new(start, end.saturating_sub(start)) {
            // The next touch maps them again; without room for that, it fails then.
            let _ = Machine::unmap(range);
        }
    }
}

impl HostLocks for VolumePages {
    fn file(&self) -> (u64, u64) {
        (device_number(self.bind().id, 0), self.inode)
    }

    fn set(&self, family: Family, range: Range, kind: Option<LockKind>) -> Result<()> {
        let size = match family {
            Family::Record => {
                let operation = match kind {
                    None => VOLUME_UNLOCK,
                    Some(LockKind::Read) => VOLUME_LOCK_READ,
                    Some(LockKind::Write) => VOLUME_LOCK_WRITE,
                };
                self.ask_number(operation, range.start, length(range))?
            }
            Family::Flock => {
                let operation = match kind {
                    None => 8,
                    Some(LockKind::Read) => 1,
                    Some(LockKind::Write) => 2,
                };
                self.ask_number(VOLUME_FLOCK, operation, 0)?
            }
        };
        // Whoever held the lock before may have changed the file.
        self.bind().set_size(self.inode, size);
        Ok(())
    }

    fn test(&self, range: Range, kind: LockKind) -> Result<Option<HeldLock>> {
        let is_write = u64::from(kind == LockKind::Write);
        let tail = length(range).to_ne_bytes();
        let reply = self.ask(VOLUME_TEST_LOCK, [range.start, is_write], &tail)?;
        let Some(bytes) = reply.get(..size_of::<VolumeLock>()) else { return Ok(None) };
        let found: VolumeLock = bytemuck::pod_read_unaligned(bytes);
        let end = if found.len == 0 { u64::MAX } else { found.start.saturating_add(found.len) };
        let kind = if found.is_write == 1 { LockKind::Write } else { LockKind::Read };
        let range = Range { start: found.start, end };
        // fcntl(2): who holds it has no number here.
        Ok(Some(HeldLock { owner: Owner::Description(0), kind, range }))
    }
}

/// The addresses around a page that are mapped with it: those of the same aligned
/// [`WINDOW`] which show one of the first `pages` pages of `room`, the page itself in any case.
fn window(page: u64, room: &Span<u64>, pages: u64) -> Span<u64> {
    let aligned = page & !(WINDOW - 1);
    let shown = room.start.saturating_add(pages.saturating_mul(4096));
    let end = aligned.saturating_add(WINDOW).min(room.end).min(shown);
    aligned.max(room.start)..end.max(page + 4096)
}

/// Bytes of a range; 0: all.
fn length(range: Range) -> u64 {
    if range.end == u64::MAX { 0 } else { range.end - range.start }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fault_maps_the_pages_around_it_that_the_file_has() {
        let (start, page) = (0x1000_0000 - 0x3000, 4096);
        let room = start..start + 3 * WINDOW;
        // The mapping's beginning, up to the next window.
        assert_eq!(window(start + page, &room, 9999), start..0x1000_0000);
        // A whole window.
        assert_eq!(window(0x1000_1000, &room, 9999), 0x1000_0000..0x1000_0000 + WINDOW);
        // The mapping's end.
        let last = room.end - page;
        assert_eq!(window(last, &room, 9999), last & !(WINDOW - 1)..room.end);
        // Nothing behind the end of the file, of which three pages lie before the window.
        assert_eq!(window(0x1000_1000, &room, 5), 0x1000_0000..0x1000_2000);
        // The file is shorter than was known.
        assert_eq!(window(0x1000_1000, &room, 0), 0x1000_0000..0x1000_2000);
        assert_eq!(window(start, &(start..start + page), 1), start..start + page);
    }
}
