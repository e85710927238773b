//! A volume in the hands of this process itself, as if it were one more sandbox: what it does counts,
//! waits and resolves paths as what sandboxes ask for. It follows no symbolic link.

use super::mounted::MountedVolume;
use super::{Share, VolumeMount};
use crate::broker::Answer;
use bytemuck::pod_read_unaligned;
use rustix::fs::OFlags;
use rustix::io::Errno;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use thaw_abi::bind::*;
use thaw_abi::control::{DirectoryEntry, FileAttributes};

/// Uses a volume, on a thread that does nothing else: it takes the rights of the volume's owner, and
/// waits while the volume is copied. Paths are relative, without empty parts, `.` and `..`; the empty one
/// is the volume's root.
pub struct VolumeClient(MountedVolume);

/// A regular file that a [`VolumeClient`] has open. It is closed with the client.
#[derive(Debug)]
pub struct ClientFile {
    handle: u64,
    file: File,
    size: u64,
}

impl ClientFile {
    /// Bytes that it had when it was opened.
    pub fn size(&self) -> u64 {
        self.size
    }

    /// Reads from a place on; 0 bytes: it ends there.
    ///
    /// # Errors
    /// The host cannot read it.
    pub fn read_at(&self, bytes: &mut [u8], at: u64) -> io::Result<usize> {
        self.file.read_at(bytes, at)
    }
}

impl VolumeClient {
    /// A client of a volume.
    pub fn new(mount: &VolumeMount) -> Self {
        Self(MountedVolume::new(mount, Share::default(), 0))
    }

    fn ask(&self, operation: u32, [a, b]: [u64; 2], tail: &[u8]) -> Result<Answer, Errno> {
        self.0.serve(&BindRequest { mount: 0, operation, a, b, c: 0 }, tail)
    }

    /// What is at a path, a symbolic link itself.
    ///
    /// # Errors
    /// The host's; so for all that follow.
    pub fn stat(&self, path: &[u8]) -> io::Result<FileAttributes> {
        let answer = self.ask(BIND_STAT, [0; 2], path)?;
        Ok(bytemuck::try_pod_read_unaligned(&answer.tail).map_err(|_| Errno::IO)?)
    }

    /// The target of a symbolic link, which is any text.
    pub fn read_link(&self, path: &[u8]) -> io::Result<Vec<u8>> {
        Ok(self.ask(BIND_READLINK, [0; 2], path)?.tail)
    }

    /// Names in a directory, from number `skip` on: some of them; none at the end.
    pub fn names(&self, path: &[u8], skip: usize) -> io::Result<Vec<Vec<u8>>> {
        let page = self.ask(BIND_LIST, [skip as u64, 0], path)?.tail;
        let (mut names, mut rest) = (Vec::new(), &page[..]);
        while let Some((head, tail)) = rest.split_at_checked(size_of::<DirectoryEntry>()) {
            let entry: DirectoryEntry = pod_read_unaligned(head);
            let len = entry.name_len as usize;
            let padded = len.next_multiple_of(8);
            let (name, next) = tail.split_at_checked(padded).ok_or(Errno::IO)?;
            names.push(name[..len].to_vec());
            rest = next;
        }
        Ok(names)
    }

    /// Opens a regular file to be read.
    pub fn open(&self, path: &[u8]) -> io::Result<ClientFile> {
        self.open_with(path, OFlags::RDONLY, 0)
    }

    /// Opens a regular file to be written, and makes it if it is not there, with these permissions.
    pub fn open_to_write(&self, path: &[u8], permissions: u32) -> io::Result<ClientFile> {
        match self.open_with(path, OFlags::RDWR, 0) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                self.open_with(path, OFlags::RDWR | OFlags::CREATE | OFlags::EXCL, permissions)
            }
            opened => opened,
        }
    }

    fn open_with(&self, path: &[u8], flags: OFlags, permissions: u32) -> io::Result<ClientFile> {
        let arguments = [flags.bits().into(), permissions.into()];
        let Answer { tail, descriptor } = self.ask(BIND_OPEN, arguments, path)?;
        let opened: OpenedVolumeFile =
            bytemuck::try_pod_read_unaligned(&tail).map_err(|_| Errno::IO)?;
        let file = File::from(descriptor.ok_or(Errno::IO)?);
        Ok(ClientFile { handle: opened.handle, file, size: opened.size })
    }

    /// Adds bytes to the end of a file.
    pub fn append(&self, file: &ClientFile, bytes: &[u8]) -> io::Result<()> {
        for piece in bytes.chunks(BIND_WRITE_MAX) {
            self.ask(VOLUME_WRITE, [file.handle, VOLUME_END], piece)?;
        }
        Ok(())
    }

    /// Sets the length of a file.
    pub fn set_len(&self, file: &ClientFile, len: u64) -> io::Result<()> {
        Ok(self.ask(BIND_FTRUNCATE, [file.handle, len], &[]).map(drop)?)
    }

    /// Makes a directory.
    pub fn make_directory(&self, path: &[u8], permissions: u32) -> io::Result<()> {
        Ok(self.ask(BIND_MKDIR, [permissions.into(), 0], path).map(drop)?)
    }

    /// Sets permissions; the owner keeps the right to read and write.
    pub fn set_permissions(&self, path: &[u8], permissions: u32) -> io::Result<()> {
        Ok(self.ask(BIND_CHMOD, [permissions.into(), 0], path).map(drop)?)
    }

    /// Removes a name that is no directory.
    pub fn unlink(&self, path: &[u8]) -> io::Result<()> {
        Ok(self.ask(BIND_UNLINK, [0; 2], path).map(drop)?)
    }

    /// Removes an empty directory.
    pub fn remove_directory(&self, path: &[u8]) -> io::Result<()> {
        Ok(self.ask(BIND_RMDIR, [0; 2], path).map(drop)?)
    }
}
