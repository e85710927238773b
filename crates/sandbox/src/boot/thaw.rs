//! Thawing an image in a zygote.

use std::io::{self, IoSlice};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::slice;
use std::sync::Arc;
use std::time::Duration;

use bytemuck::{bytes_of, cast_slice};
use thaw_abi::control::{
    CONNECTION_GOES_ON, Connection, Identity, MESSAGE_MAX, MSG_GO, MSG_THAW, MessageHeader,
    THAW_AND_RUN, THAW_POST_COPY, Thaw,
};

use super::plan::{BLOBS_MAX, FIXED_DESCRIPTORS};
use super::{BootFlags, BootPlan, Rootfs, Secrets, fresh_seed};
use crate::broker::VolumeMount;
use crate::cores::CoreGroup;
use crate::egress::EgressPolicy;
use crate::limits::ResourceLimits;
use crate::message;

/// What may differ from one thaw of an image to the next.
#[derive(Clone, Copy, Debug)]
pub struct ThawOptions<'a> {
    /// Standard output and standard error; duplicated, not consumed. Give each copy some
    /// of its own: what several write to, one can fill up for the others. `None` keeps
    /// those that it got when it was prepared; until it gets some, both behave like
    /// `/dev/null`, which is all that a template needs.
    pub streams: Option<[BorrowedFd<'a>; 2]>,
    /// How much the sandbox may have at a time.
    pub limits: ResourceLimits,
    /// CPU time after which the sandbox is ended, of all its processes together; `None`:
    /// no limit.
    pub cpu_time_limit: Option<Duration>,
    /// `FLAG_*` of [`thaw_abi::control`].
    pub flags: BootFlags,
    /// Host name; empty keeps the frozen one.
    pub hostname: &'a str,
    /// Files in `/run/secrets`.
    pub secrets: Option<&'a Secrets>,
    /// What the program may connect to.
    pub egress: &'a Arc<EgressPolicy>,
    /// Connections that the sandbox had when it was frozen, by the numbers of that time, and has
    /// still; duplicated, not consumed. Only for a copy that goes on in its place, and as many as
    /// [`RESUMED_MAX`] at most.
    pub resumed: &'a [(Connection, BorrowedFd<'a>)],
    /// The volumes that were mounted when the program was started, in the same order.
    pub volumes: &'a [VolumeMount],
    /// With whom the sandbox may share a core; `None`: with everybody who is in no group.
    pub cores: Option<&'a CoreGroup>,
}

impl<'a> ThawOptions<'a> {
    fn said_secrets(&self) -> &'a [u8] {
        self.secrets.map_or(&[], Secrets::said)
    }
}

/// Most connections of a sandbox that go on in another boot: their descriptors travel with the
/// boot command.
pub const RESUMED_MAX: usize = 64;

impl BootPlan {
    /// The rootfs that the plan's image was frozen over.
    pub(crate) fn rootfs(&self) -> Rootfs {
        Rootfs::Index { file: self.index.clone(), len: self.index_len, blobs: self.blobs.clone() }
    }

    /// Sends the boot command: one host call, nothing copied but the
    /// descriptors' numbers. `mode` is one of `THAW_*`.
    pub(crate) fn send(
        &self,
        control: &OwnedFd,
        mode: u32,
        connection: Handed<'_>,
        options: &ThawOptions<'_>,
    ) -> io::Result<()> {
        if options.resumed.len() > RESUMED_MAX {
            return Err(io::Error::from(io::ErrorKind::ArgumentListTooLong));
        }
        // The sandbox asks for the others when it needs them. Ancestors, which it cannot ask for,
        // come first, and are fewer.
        let room = BLOBS_MAX - options.resumed.len();
        let blobs = self.blob_numbers.len().min(room);
        let (asked, asked_files): (Vec<u32>, Vec<_>) = match &self.asked {
            Some(asked) => asked.beside(&self.blob_numbers, room - blobs).into_iter().unzip(),
            None => Default::default(),
        };
        let gate = self.post_copy.as_ref().map_or(Ok(None), |rest| rest.gate())?;
        let mode = match (mode, &gate) {
            (mode, None) => mode,
            (THAW_AND_RUN, Some(_)) => THAW_POST_COPY,
            // Nobody does so: what is booted ahead would wait for it.
            (_, Some(_)) => return Err(io::Error::from(io::ErrorKind::InvalidInput)),
        };
        let resumed: Vec<_> = options.resumed.iter().map(|(about, _)| going_on(about)).collect();
        let body = Thaw {
            index_len: self.index_len,
            mappings_at: self.mappings_at.unwrap_or(0),
            mode,
            mapping_count: self.mappings.len() as u32,
            populate_count: self.populate.len() as u32,
            blob_count: (blobs + asked.len()) as u32,
            index_blobs: self.index_blobs,
            prefetch_count: self.prefetch.is_some().into(),
            identity: Identity {
                connection_count: (resumed.len() + usize::from(connection.is_some())) as u32,
                ..identity(connection, options)?
            },
        };
        let tail: [&[u8]; 8] = [
            self.carried_mappings(),
            cast_slice(&self.populate),
            cast_slice(&resumed),
            connections(&connection),
            &padded(options.hostname),
            cast_slice(&self.blob_numbers[..blobs]),
            cast_slice(&asked),
            options.said_secrets(),
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
            IoSlice::new(tail[5]),
            IoSlice::new(tail[6]),
            IoSlice::new(tail[7]),
        ];

        let mut descriptors = Vec::with_capacity(FIXED_DESCRIPTORS + blobs + asked.len());
        descriptors.extend([self.image.as_fd(), self.index.as_fd()]);
        descriptors.extend(self.prefetch.as_ref().map(AsFd::as_fd));
        descriptors.extend(gate.as_ref().map(AsFd::as_fd));
        descriptors.extend(self.blob_files[..blobs].iter().map(AsFd::as_fd));
        descriptors.extend(asked_files.iter().map(|file| file.as_fd()));
        descriptors.extend(options.streams.into_iter().flatten());
        descriptors.extend(options.resumed.iter().map(|(_, socket)| socket));
        descriptors.extend(connection.map(|(_, socket)| socket));
        message::send(control, &parts, &descriptors)
    }
}

/// A client's connected, non-blocking socket for a copy, if there is one.
pub(crate) type Handed<'a> = Option<(Connection, BorrowedFd<'a>)>;

/// Sends [`MSG_GO`].
pub(crate) fn send_identity(
    control: &OwnedFd,
    connection: Handed<'_>,
    options: &ThawOptions<'_>,
) -> io::Result<()> {
    let body = identity(connection, options)?;
    let (connections, hostname) = (connections(&connection), padded(options.hostname));
    let secrets = options.said_secrets();
    let len = size_of::<Identity>() + connections.len() + hostname.len() + secrets.len();
    let header = message::header(MSG_GO, len, 0);
    let parts = [
        IoSlice::new(bytes_of(&header)),
        IoSlice::new(bytes_of(&body)),
        IoSlice::new(connections),
        IoSlice::new(&hostname),
        IoSlice::new(secrets),
    ];
    let mut descriptors = Vec::with_capacity(3);
    descriptors.extend(options.streams.into_iter().flatten());
    descriptors.extend(connection.map(|(_, socket)| socket));
    message::send(control, &parts, &descriptors)
}

fn identity(connection: Handed<'_>, options: &ThawOptions<'_>) -> io::Result<Identity> {
    Ok(Identity {
        seed: fresh_seed()?,
        memory_limit: options.limits.memory,
        flags: options.flags | options.egress.flags(),
        connection_count: connection.is_some().into(),
        hostname_len: options.hostname.len() as u32,
        stream_count: options.streams.map_or(0, |streams| streams.len() as u32),
    })
}

/// What a boot command says of a connection that goes on.
fn going_on(about: &Connection) -> Connection {
    Connection { id: about.id | CONNECTION_GOES_ON, ..*about }
}

fn connections<'a>(connection: &'a Handed<'_>) -> &'a [u8] {
    let connections: &[Connection] =
        connection.as_ref().map_or(&[], |(about, _)| slice::from_ref(about));
    cast_slice(connections)
}

/// A host name, padded with zeros to a multiple of 8 bytes.
fn padded(hostname: &str) -> Vec<u8> {
    let mut bytes = hostname.as_bytes().to_vec();
    bytes.resize(bytes.len().next_multiple_of(8), 0);
    bytes
}
