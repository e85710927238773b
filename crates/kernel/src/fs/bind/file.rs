//! Open regular files of bound directories.

use alloc::string::String;
use alloc::sync::Arc;

use thaw_abi::bind::*;

use super::node::Handle;
use super::{Bind, BoundNode};
use crate::errno::{Errno, Result};
use crate::fs::file::{File, Stat};
use crate::fs::inode::Inode;
use crate::fs::lower::host_file;
use crate::fs::writing;
use crate::host::files::BoundDescriptor;
use crate::io::{Sink, Source};
use crate::mm::backing::{HostPages, MmapSource, UpperPages};
use crate::mm::shared::Placed;
use crate::platform::machine::HostFd;

/// An open regular file of the host.
pub struct BoundFile {
    pages: Arc<Pages>,
}

/// What keeps the host's file open: the description, and mappings of the file.
struct Pages {
    node: Arc<BoundNode>,
    /// The open file.
    handle: Handle,
    /// The same to be read without a request, if it was opened to be read only.
    descriptor: Option<BoundDescriptor>,
    /// Whether what the host maps of it can become executable.
    is_executable: bool,
}

/// What the host has opened.
pub(super) struct Opened {
    handle: u64,
    descriptor: Option<HostFd>,
    is_executable: bool,
}

impl Opened {
    /// Opens a file that is there.
    pub fn open(bind: &Bind, access: u64, path: &[u8]) -> Result<Self> {
        let (descriptor, reply) = bind.request(BIND_OPEN, [access, 0, 1], path)?;
        let opened: OpenedBoundFile =
            bytemuck::try_pod_read_unaligned(&reply).map_err(|_| Errno::EIO)?;
        let OpenedBoundFile { handle, is_executable } = opened;
        Ok(Self { handle, descriptor, is_executable: is_executable == 1 })
    }

    /// A file that was made and is open to be written, by the host's number.
    pub fn made(handle: u64) -> Self {
        Self { handle, descriptor: None, is_executable: false }
    }
}

impl BoundFile {
    pub(super) fn new(node: Arc<BoundNode>, opened: Opened) -> Self {
        let handle = Handle::new(opened.handle);
        node.open.borrow_mut().push(handle);
        let descriptor = opened.descriptor.and_then(BoundDescriptor::keep);
        let is_executable = opened.is_executable;
        Self { pages: Arc::new(Pages { node, handle, descriptor, is_executable }) }
    }
}

impl Pages {
    /// The host's number; `ESTALE` if it belonged to another boot.
    fn handle(&self) -> Result<u64> {
        if self.handle.is_of_this_boot() { Ok(self.handle.number) } else { Err(Errno::ESTALE) }
    }

    fn kept_descriptor(&self) -> Option<HostFd> {
        self.descriptor.as_ref().and_then(BoundDescriptor::get)
    }

    fn read(&self, sink: &mut Sink<'_>, offset: u64) -> Result<usize> {
        if let Some(descriptor) = self.kept_descriptor() {
            let len = sink.remaining();
            return host_file::read_file(|| Ok(descriptor), sink, offset, len);
        }
        let mut done = 0;
        while sink.remaining() > 0 {
            let wanted = sink.remaining().min(BIND_READ_MAX) as u64;
            let arguments = [self.handle()?, offset + done as u64, wanted];
            let moved = self.node.bind.ask(BIND_READ, arguments, &[]).and_then(|bytes| {
                if bytes.is_empty() {
                    Ok((0, true))
                } else {
                    let short = (bytes.len() as u64) < wanted;
                    sink.put(&bytes).map(|count| (count, short || count < bytes.len()))
                }
            });
            match moved {
                Ok((count, end)) => {
                    done += count;
                    if end {
                        break;
                    }
                }
                Err(error) if done == 0 => return Err(error),
                Err(_) => break,
            }
        }
        Ok(done)
    }

    fn write(&self, source: &mut Source<'_>, offset: u64) -> Result<usize> {
        let mut done = 0;
        let mut buffer = alloc::vec![0; source.remaining().min(BIND_WRITE_MAX)];
        while source.remaining() > 0 {
            let moved = source.peek(&mut buffer).and_then(|count| {
                let arguments = [self.handle()?, offset + done as u64, 0];
                let written =
                    self.node.bind.ask_number(BIND_WRITE, arguments, &buffer[..count])? as usize;
                Ok((written.min(count), count))
            });
            match moved {
                Ok((written, count)) => {
                    source.advance(written);
                    done += written;
                    if written < count {
                        break;
                    }
                }
                Err(error) if done == 0 => return Err(error),
                Err(_) => break,
            }
        }
        Ok(done)
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        let handle = self.handle;
        self.node.open.borrow_mut().retain(|open| *open != handle);
        if handle.is_of_this_boot() {
            // Nobody is left to hear of a failure.
            let _ = self.node.bind.ask(BIND_CLOSE, [handle.number, 0, 0], &[]);
        }
    }
}

impl File for BoundFile {
    fn read(&self, sink: &mut Sink<'_>, offset: u64) -> Result<usize> {
        self.pages.read(sink, offset)
    }

    fn write(&self, source: &mut Source<'_>, offset: u64) -> Result<usize> {
        if source.remaining() == 0 {
            return Ok(0);
        }
        let room = writing::room(offset, source.remaining() as u64)?;
        source.limit(usize::try_from(room).unwrap_or(usize::MAX));
        self.pages.write(source, offset)
    }

    fn seekable(&self) -> bool {
        true
    }

    fn size(&self) -> u64 {
        self.pages.node.size()
    }

    fn stat(&self) -> Result<Stat> {
        Ok(self.pages.node.attributes().to_stat())
    }

    fn mmap_source(&self) -> Result<MmapSource> {
        // The kernel may have too many descriptors, and copies what the host would not execute.
        Ok(match self.pages.kept_descriptor().is_some() && self.pages.is_executable {
            true => MmapSource::HostFile(self.pages.clone()),
            false => MmapSource::Upper(self.pages.clone()),
        })
    }

    fn allows_shared_mappings(&self) -> bool {
        false
    }

    fn truncate(&self, size: u64) -> Result<()> {
        writing::check_size(self.size(), size)?;
        self.pages.node.bind.ask(BIND_FTRUNCATE, [self.pages.handle()?, size, 0], &[]).map(drop)
    }

    fn sync(&self) -> Result<()> {
        self.pages.node.bind.ask(BIND_SYNC, [self.pages.handle()?, 0, 0], &[]).map(drop)
    }

    fn description(&self) -> String {
        String::from("file")
    }
}

impl HostPages for Pages {
    fn descriptor(&self) -> Result<HostFd> {
        self.kept_descriptor().ok_or(Errno::ESTALE)
    }
}

/// What the host does not map is copied: mappings are private.
impl UpperPages for Pages {
    fn len(&self) -> u64 {
        self.node.size()
    }

    fn read_at(&self, sink: &mut Sink<'_>, offset: u64) -> Result<usize> {
        self.read(sink, offset)
    }

    fn write_at(&self, _: &mut Source<'_>, _: u64) -> Result<usize> {
        Err(Errno::EACCES)
    }

    fn lend(&self, _: u64, _: u64, _: u32) -> Result<Option<Placed>> {
        Ok(None)
    }

    fn recall(&self, _: u64, _: u64) {}
}
