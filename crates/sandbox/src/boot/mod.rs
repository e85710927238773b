//! Booting a zygote: starting a program in it, or thawing an image into it.

mod asked;
mod plan;
mod post_copy;
mod secrets;
mod start;
mod thaw;

pub use asked::AskedContents;
pub use plan::{BootPlan, PlanError};
pub use post_copy::PostCopy;
pub use secrets::{Secrets, TooManySecrets};
pub use start::{MemoryWrites, Mount, MountKind, Rootfs, StartSpec};
pub use thaw::{RESUMED_MAX, ThawOptions};

pub(crate) use start::encode as encode_start;
pub(crate) use thaw::send_identity;

use std::net::SocketAddr;
use thaw_abi::control;

/// `FLAG_*` of [`thaw_abi::control`], to be combined with `|`.
pub type BootFlags = u32;

/// Why a zygote did not boot.
#[derive(Debug, thiserror::Error)]
pub enum BootError {
    /// The zygote has died while it waited; take another one.
    #[error("the zygote died before it was used; take another one from the pool")]
    ZygoteDied,
    /// An argument, variable, path or name holds a NUL byte.
    #[error("{what} contains a NUL byte; remove it")]
    Nul {
        /// Which one.
        what: &'static str,
    },
    /// There is no program to run.
    #[error("there is no program to run: the argument list is empty")]
    NoProgram,
    /// Arguments and environment do not fit into the boot command.
    #[error(
        "arguments and environment take {bytes} bytes, more than the {limit} of a boot command; shorten them"
    )]
    TooLong {
        /// Bytes of the command.
        bytes: usize,
        /// Largest command.
        limit: usize,
    },
    /// A limit could not be set.
    #[error("cannot set the sandbox's limits: {0}")]
    Limits(#[source] std::io::Error),
    /// It could not be taken into its group of core scheduling.
    #[error("cannot keep the sandbox apart from others on its core: {0}")]
    Cores(#[source] std::io::Error),
    /// Directories of the host cannot be served.
    #[error(
        "cannot serve files of this host ({0}); run as a user who is not root, or add --as-root"
    )]
    Files(#[source] std::io::Error),
    /// The copy could not be prepared.
    #[error("the copy could not be prepared: {0}")]
    NotPrepared(String),
    /// The template could not fork a copy.
    #[error("the template could not fork a copy: {0}")]
    Fork(String),
    /// The boot command could not be sent.
    #[error("cannot send the boot command: {0}")]
    Send(#[source] std::io::Error),
}

/// Randomness for one sandbox, from the host kernel.
fn fresh_seed() -> std::io::Result<[u8; 32]> {
    let mut seed = [0; 32];
    let filled = rustix::rand::getrandom(&mut seed, rustix::rand::GetRandomFlags::empty())?;
    // getrandom(2) is not interrupted for requests of up to 256 bytes.
    if filled != seed.len() {
        return Err(std::io::Error::from(std::io::ErrorKind::UnexpectedEof));
    }
    Ok(seed)
}

/// Describes a client's connection for [`crate::Zygote::thaw`] and
/// [`crate::Sandbox::send_connection`]. `local` is the address that the guest
/// is to see itself at: its port is the function's own.
pub fn connection(id: u64, peer: SocketAddr, local: SocketAddr) -> control::Connection {
    control::Connection { id, peer: address(peer), local: address(local) }
}

fn address(address: SocketAddr) -> control::Address {
    let mut bytes = [0; 16];
    let family = match address {
        SocketAddr::V4(v4) => {
            bytes[..4].copy_from_slice(&v4.ip().octets());
            libc::AF_INET
        }
        SocketAddr::V6(v6) => {
            bytes = v6.ip().octets();
            libc::AF_INET6
        }
    };
    control::Address { bytes, family: family as u16, port: address.port(), reserved: 0 }
}
