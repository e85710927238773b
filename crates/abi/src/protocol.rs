//! The version of what a host and the kernel of a sandbox say to each other.
//!
//! An image runs under the kernel build that it was frozen under, for as long as somebody wants
//! to thaw it, so a host meets kernels that are older than itself. A kernel names the version
//! that it speaks in a note of its ELF file, and a host refuses those that it does not speak.
//!
//! A change of any of these needs a new version, unless a kernel that does not know of it is
//! not asked for it: [`crate::control`], [`crate::bind`], [`crate::freeze`],
//! [`crate::layout`], [`crate::network`], [`crate::remote`], [`crate::rootfs`], and the tables of
//! [`crate::image`] that a boot command carries. The host keeps speaking the two versions
//! before its own.

use bytemuck::{Pod, Zeroable};

/// The version that a kernel of this source speaks.
pub const PROTOCOL_VERSION: u32 = 1;
/// The oldest that a host of this source speaks: two before its own, once there were as many.
pub const PROTOCOL_OLDEST: u32 = 1;
/// Type of the note in a kernel's ELF file, whose owner is [`crate::image::NOTE_OWNER`] and
/// whose content is the version, a `u32`.
pub const NOTE_PROTOCOL: u32 = 0x7468_0010;

/// The note, as a kernel carries it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
#[repr(C, align(4))]
pub struct ProtocolNote {
    owner_len: u32,
    content_len: u32,
    kind: u32,
    owner: [u8; 8],
    version: u32,
}

impl ProtocolNote {
    /// That of a kernel of this source.
    pub const OWN: Self = Self {
        owner_len: crate::image::NOTE_OWNER.len() as u32,
        content_len: size_of::<u32>() as u32,
        kind: NOTE_PROTOCOL,
        owner: *b"THAW\0\0\0\0",
        version: PROTOCOL_VERSION,
    };
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::control::*;
    use crate::freeze::*;
    use crate::image::Mapping;
    use crate::remote::*;

    #[test]
    fn the_note_is_one_of_elf() {
        let bytes = bytemuck::bytes_of(&ProtocolNote::OWN);
        assert_eq!(bytes.len(), 24);
        assert_eq!(&bytes[12..17], crate::image::NOTE_OWNER);
        assert_eq!(bytes[20..24], PROTOCOL_VERSION.to_ne_bytes());
    }

    #[test]
    fn a_host_speaks_at_most_two_versions_more() {
        let more = PROTOCOL_VERSION.checked_sub(PROTOCOL_OLDEST);
        assert!(matches!(more, Some(0..=2)), "{more:?}");
    }

    /// The sizes of all that is said, in this version. If this fails, a kernel that was built
    /// before speaks otherwise: give `PROTOCOL_VERSION` the next number, let the host go on to
    /// speak the one before, and change the table.
    #[test]
    fn protocol_tripwire() {
        let sizes = [
            ("MessageHeader", size_of::<MessageHeader>(), 16),
            ("HostName", size_of::<HostName>(), 64),
            ("Start", size_of::<Start>(), 96),
            ("MemoryWrite", size_of::<MemoryWrite>(), 16),
            ("Thaw", size_of::<Thaw>(), 96),
            ("Identity", size_of::<Identity>(), 56),
            ("Secret", size_of::<Secret>(), 8),
            ("Fork", size_of::<Fork>(), 8),
            ("PopulateRange", size_of::<PopulateRange>(), 24),
            ("Connection", size_of::<Connection>(), 56),
            ("Reply", size_of::<Reply>(), 8),
            ("Booted", size_of::<Booted>(), 32),
            ("EntryPoint", size_of::<EntryPoint>(), 24),
            ("Rest", size_of::<Rest>(), 16),
            ("Resting", size_of::<Resting>(), 24),
            ("Hibernate", size_of::<Hibernate>(), 48),
            ("Awake", size_of::<Awake>(), 40),
            ("Described", size_of::<Described>(), 40),
            ("Activity", size_of::<Activity>(), 24),
            ("Losses", size_of::<Losses>(), 32),
            ("DeniedWay", size_of::<DeniedWay>(), 32),
            ("Outgoing", size_of::<Outgoing>(), 8),
            ("Limits", size_of::<Limits>(), 16),
            ("Written", size_of::<Written>(), 16),
            ("ConnectionClosed", size_of::<ConnectionClosed>(), 8),
            ("Exit", size_of::<Exit>(), 8),
            ("OpenBlob", size_of::<OpenBlob>(), 8),
            ("OpenSocket", size_of::<OpenSocket>(), 32),
            ("OpenedSocket", size_of::<OpenedSocket>(), 8),
            ("ListDirectory", size_of::<ListDirectory>(), 8),
            ("DirectoryEntry", size_of::<DirectoryEntry>(), 16),
            ("FileAttributes", size_of::<FileAttributes>(), 56),
            ("ReportHeader", size_of::<ReportHeader>(), 40),
            ("FrozenRegion", size_of::<FrozenRegion>(), 48),
            ("FrozenThread", size_of::<FrozenThread>(), 224),
            ("Mapping", size_of::<Mapping>(), 40),
            ("Exec", size_of::<Exec>(), 32),
            ("ExecSignal", size_of::<ExecSignal>(), 16),
            ("ExecWindow", size_of::<ExecWindow>(), 16),
            ("ExecStarted", size_of::<ExecStarted>(), 16),
            ("ExecEnded", size_of::<ExecEnded>(), 16),
            ("ExecFailed", size_of::<ExecFailed>(), 8),
            ("Files", size_of::<Files>(), 8),
            ("FileRequest", size_of::<FileRequest>(), 48),
            ("FileAnswer", size_of::<FileAnswer>(), 64),
            ("Port", size_of::<Port>(), 8),
            ("WatchEvent", size_of::<WatchEvent>(), 8),
        ];
        assert_eq!(PROTOCOL_VERSION, 1, "this table is that of version 1");
        for (name, size, known) in sizes {
            assert_eq!(size, known, "{name}");
        }
    }
}
