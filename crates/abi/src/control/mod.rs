//! The control protocol between a sandbox and its host.
//!
//! The control socket is a `SOCK_SEQPACKET` Unix socket at
//! [`crate::layout::CONTROL_FD`]. One packet is one message: a
//! [`MessageHeader`], a body that depends on the kind, and a tail of variable
//! length that the body describes. Descriptors travel as `SCM_RIGHTS`, in the
//! order that the body's documentation gives.
//!
//! The host treats every message of a sandbox as hostile. The sandbox trusts
//! the host.
//!
//! | module | what it holds |
//! | --- | --- |
//! | `kinds` | the kinds of messages, by number |
//! | `flags` | flags of a boot |
//! | `boot` | what starts or thaws a program |
//! | `running` | what is said while it runs |
//! | `rest` | freezing, copying, hibernating, giving back pages |
//! | `out_of_memory` | what happens when memory is used up |
//! | `reports` | what builds hear of the program |
//! | `requests` | what a sandbox asks for |

mod boot;
mod flags;
mod kinds;
mod out_of_memory;
mod reports;
mod requests;
mod rest;
mod running;

use bytemuck::{Pod, Zeroable};

pub use boot::*;
pub use flags::*;
pub use kinds::*;
pub use out_of_memory::*;
pub use reports::*;
pub use requests::*;
pub use rest::*;
pub use running::*;

/// Largest message, header included, in bytes.
pub const MESSAGE_MAX: usize = 160 * 1024;
/// Most descriptors in one message (`SCM_MAX_FD` of the host kernel is 253).
pub const MESSAGE_MAX_FDS: usize = 250;

/// Start of every message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct MessageHeader {
    /// One of the `MSG_*` constants.
    pub kind: u32,
    /// Bytes after the header.
    pub len: u32,
    /// Number of the request that a [`MSG_REPLY`] answers; 0 otherwise. A
    /// sandbox numbers its requests from 1.
    pub sequence: u64,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bodies_keep_the_tail_aligned() {
        for size in [
            size_of::<MessageHeader>(),
            size_of::<Start>(),
            size_of::<MemoryWrite>(),
            size_of::<Thaw>(),
            size_of::<Identity>(),
            size_of::<Fork>(),
            size_of::<Connection>(),
            size_of::<Reply>(),
            size_of::<Booted>(),
            size_of::<DirectoryEntry>(),
            size_of::<FileAttributes>(),
            size_of::<PopulateRange>(),
            size_of::<OpenSocket>(),
            size_of::<OpenedSocket>(),
            size_of::<TerminalMode>(),
            size_of::<Rest>(),
            size_of::<Resting>(),
            size_of::<Hibernate>(),
            size_of::<Awake>(),
        ] {
            assert_eq!(size % 8, 0);
        }
    }
}
