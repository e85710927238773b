//! Requests about names in a volume, whose cost is counted.

use bytemuck::bytes_of;
use rustix::fs::{AtFlags, FileType, OFlags, chownat};
use rustix::io::Errno;
use std::os::fd::AsFd;
use thaw_abi::bind::*;
use thaw_abi::control::FileAttributes;

use super::MountedVolume;
use crate::broker::bound::walked;
use crate::broker::host_directory::encode;
use crate::broker::path::is_harmless;
use crate::broker::volume::{NAME_COST, Volume, is_regular, tree};

impl MountedVolume {
    /// Requests about names, whose cost is counted.
    pub(super) fn with_names(&self, request: &BindRequest, tail: &[u8]) -> Result<Vec<u8>, Errno> {
        let bound = self.bound();
        let serve = |request: &BindRequest| bound.answer(request, tail);
        match request.operation {
            BIND_STAT => {
                // Nobody cuts it meanwhile.
                let state = self.volume.state();
                let mut found = self.stat(tail)?;
                if Volume::note_written(&state.open, found.inode) {
                    found = self.stat(tail)?;
                }
                found.size = Volume::length(&state.open, found.inode, found.size);
                Ok(bytes_of(&found).to_vec())
            }
            BIND_WALK => {
                let state = self.volume.state();
                let walk = || bound.directory().attributes_along(tail, encode);
                let (mut found, mut error) = walk();
                // Nothing but the last name stands for what has been written to.
                let last = found.last().map(|last| last.inode);
                if last.is_some_and(|inode| Volume::note_written(&state.open, inode)) {
                    (found, error) = walk();
                }
                for found in &mut found {
                    found.size = Volume::length(&state.open, found.inode, found.size);
                }
                Ok(walked(&found, error, request.a))
            }
            BIND_UTIMES => {
                // What was written before changes the time no more.
                let state = self.volume.state();
                Volume::note_written(&state.open, self.stat(tail)?.inode);
                serve(request)
            }
            BIND_READLINK => serve(request),
            BIND_LIST => {
                let of_tenant = &self.of_tenant.listings;
                self.listings.page(bound.directory(), tail, request.a, of_tenant)
            }
            BIND_CHMOD => {
                // The daemon opens files again, by the rights of their owner.
                let kept = match is_regular(self.stat(tail)?.mode) {
                    true => 0o600,
                    false => 0o700,
                };
                serve(&BindRequest { a: request.a | kept, ..*request })
            }
            BIND_MKDIR => {
                tree::check_depth(tail)?;
                self.added(tail, NAME_COST, || {
                    serve(&BindRequest { a: request.a | 0o700, ..*request })
                })
            }
            BIND_SYMLINK => {
                let end = tail.iter().position(|&byte| byte == 0).ok_or(Errno::INVAL)?;
                self.added(&tail[..end], 2 * NAME_COST, || serve(request))
            }
            BIND_LINK => {
                self.check_writable()?;
                let _state = self.volume.state();
                self.volume.paid(NAME_COST, || serve(request))
            }
            BIND_UNLINK | BIND_RMDIR => {
                self.check_writable()?;
                let mut state = self.volume.state();
                let found = self.stat(tail)?;
                serve(request)?;
                self.volume.removed(&mut state, &found);
                Ok(Vec::new())
            }
            BIND_RENAME => self.rename(request, tail),
            BIND_TRUNCATE => {
                self.check_writable()?;
                // Held before it is opened: meanwhile nobody removes it.
                let mut state = self.volume.state();
                let (file, _) = bound.directory().open_regular(tail, OFlags::RDWR)?;
                self.volume.resize(&mut state, &file, request.a).map(|()| Vec::new())
            }
            _ => Err(Errno::NOSYS),
        }
    }

    pub(super) fn stat(&self, path: &[u8]) -> Result<FileAttributes, Errno> {
        if !is_harmless(path) {
            return Err(Errno::INVAL);
        }
        let found = self.bound().directory().stat(path)?;
        bytemuck::try_pod_read_unaligned(&found).map_err(|_| Errno::IO)
    }

    /// Makes what has the name `path` then.
    fn added(
        &self,
        path: &[u8],
        cost: u64,
        make: impl FnOnce() -> Result<Vec<u8>, Errno>,
    ) -> Result<Vec<u8>, Errno> {
        self.check_writable()?;
        let _state = self.volume.state();
        self.volume.paid(cost, make)?;
        self.give_away(path)?;
        Ok(Vec::new())
    }

    /// Gives what root has made to whom the volume belongs.
    fn give_away(&self, path: &[u8]) -> Result<(), Errno> {
        let Some((uid, gid)) = self.volume.owner else { return Ok(()) };
        let made = self.bound().directory().locate(path)?.seen()?;
        chownat(&made, c"", Some(uid), Some(gid), AtFlags::EMPTY_PATH)
    }

    fn rename(&self, request: &BindRequest, tail: &[u8]) -> Result<Vec<u8>, Errno> {
        self.check_writable()?;
        let mut state = self.volume.state();
        let end = tail.iter().position(|&byte| byte == 0).ok_or(Errno::INVAL)?;
        let (from, to) = (&tail[..end], &tail[end + 1..]);
        let replaced = match request.a {
            0 => self.stat(to).ok(),
            _ => None,
        };
        let moved = self.stat(from)?;
        self.check_move(from, to)?;
        if request.a == 2 {
            self.check_move(to, from)?;
        }
        self.bound().answer(request, tail)?;
        // rename(2): two names of one file both stay.
        if let Some(replaced) = replaced.filter(|replaced| replaced.inode != moved.inode) {
            self.volume.removed(&mut state, &replaced);
        }
        Ok(Vec::new())
    }

    /// Refuses to move a directory so that something in it would be too deep.
    fn check_move(&self, from: &[u8], to: &[u8]) -> Result<(), Errno> {
        let found = self.stat(from)?;
        let is_directory = FileType::from_raw_mode(found.mode) == FileType::Directory;
        if !is_directory || tree::depth(to) <= tree::depth(from) {
            return Ok(());
        }
        tree::check_depth(to)?;
        let directory = self.bound().directory().locate(from)?.seen()?;
        tree::check_move(directory.as_fd(), tree::depth(to))
    }
}
