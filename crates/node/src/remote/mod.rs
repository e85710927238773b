//! One live instance from outside: processes in it, its files and ports, and the rules, limits and
//! volumes of its own.
//!
//! A process is started by a message to the instance's sandbox, with sockets that become its
//! streams. This daemon holds the other ends: it keeps what the process prints, within a bound,
//! whether or not somebody is attached.

mod channel;
pub mod egress;
pub mod exec;
pub mod files;
pub mod limits;
pub mod listeners;
mod output;
mod own_file;
pub mod pace;
pub mod ports;
pub mod tree;
pub mod untree;
pub mod volumes;

pub use channel::RemoteChannel;
pub use egress::{
    EgressInfo, EgressWish, NetworkUsage, SandboxEgress, SandboxInject, look_at_egress_bytes,
};
pub use exec::{ExecInfo, ExecNote, ExecRequest, ExecState, Execs};
pub use limits::{LimitsChange, LimitsInfo, MemoryHeld};
pub use listeners::Listener;
pub use output::{Next, READERS_MAX, Reader, Stream};
pub use volumes::SandboxVolume;
