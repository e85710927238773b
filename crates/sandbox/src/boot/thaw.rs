//! Thawing an image in a zygote.

use std::io::{self, IoSlice};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::slice;
use std::sync::Arc;
use std::time::Duration;

use bytemuck::{bytes_of, cast_slice};
use thaw_abi::control::{Connection, MESSAGE_MAX, MSG_THAW, MessageHeader, Thaw};

use super::plan::FIXED_DESCRIPTORS;
use super::{BootFlags, BootPlan, Rootfs, fresh_seed};
use crate::egress::EgressPolicy;
use crate::message;

/// What may differ from one thaw of an image to the next.
#[derive(Clone, Copy, Debug)]
pub struct ThawOptions<'a> {
    /// Standard output; duplicated, not consumed.
    pub stdout: BorrowedFd<'a>,
    /// Standard error; duplicated, not consumed.
    pub stderr: BorrowedFd<'a>,
    /// Bytes of memory the sandbox may use; 0: no limit.
    pub memory_limit: u64,
    /// CPU time after which the host kernel ends the sandbox, in whole seconds
    /// rounded up; `None`: no limit.
    pub cpu_time_limit: Option<Duration>,
    /// `FLAG_*` of [`thaw_abi::control`].
    pub flags: BootFlags,
    /// Host name; empty keeps the frozen one.
    pub hostname: &'a str,
    /// What the program may connect to.
    pub egress: &'a Arc<EgressPolicy>,
}

impl BootPlan {
    /// The rootfs that the plan's image was frozen over.
    pub(crate) fn rootfs(&self) -> Rootfs {
        Rootfs::Index { file: self.index.clone(), len: self.index_len, blobs: self.blobs.clone() }
    }

    /// Sends the boot command: one host call, nothing copied but the
    /// descriptors' numbers.
    pub(crate) fn send(
        &self,
        control: &OwnedFd,
        connection: Option<(Connection, BorrowedFd<'_>)>,
        options: &ThawOptions<'_>,
    ) -> io::Result<()> {
        let body = Thaw {
            seed: fresh_seed()?,
            memory_limit: options.memory_limit,
            index_len: self.index_len,
            flags: options.flags | options.egress.flags(),
            mapping_count: self.mappings.len() as u32,
            populate_count: self.populate.len() as u32,
            connection_count: connection.is_some().into(),
            blob_count: self.blob_numbers.len() as u32,
            hostname_len: options.hostname.len() as u32,
        };
        let connections: &[Connection] =
            connection.as_ref().map_or(&[], |(about, _)| slice::from_ref(about));
        let tail: [&[u8]; 5] = [
            cast_slice(&self.mappings),
            cast_slice(&self.populate),
            cast_slice(connections),
            cast_slice(&self.blob_numbers),
            options.hostname.as_bytes(),
        ];
        let len = size_of::<Thaw>() + tail.iter().map(|part| part.len()).sum::<usize>();
        if size_of::<MessageHeader>() + len > MESSAGE_MAX {
            return Err(io::Error::from(io::ErrorKind::ArgumentListTooLong));
        }
        let header = message::header(MSG_THAW, len, 0);
        let parts = [
            IoSlice::new(bytes_of(&header)),
            IoSlice::new(bytes_of(&body)),
            IoSlice::new(tail[0]),
            IoSlice::new(tail[1]),
            IoSlice::new(tail[2]),
            IoSlice::new(tail[3]),
            IoSlice::new(tail[4]),
        ];

        let mut descriptors = Vec::with_capacity(FIXED_DESCRIPTORS + self.blob_files.len());
        descriptors.extend([
            self.image.as_fd(),
            self.index.as_fd(),
            options.stdout,
            options.stderr,
        ]);
        descriptors.extend(self.blob_files.iter().map(AsFd::as_fd));
        descriptors.extend(connection.map(|(_, socket)| socket));
        message::send(control, &parts, &descriptors)
    }
}
