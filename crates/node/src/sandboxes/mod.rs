//! Processes and files inside live instances, from outside, and sandboxes: instances that stay.
//!
//! A process is started by a message to the instance's sandbox, with sockets that become its
//! streams. This daemon holds the other ends: it keeps what the process prints, within a bound,
//! whether or not somebody is attached.

pub mod egress;
pub mod exec;
pub mod files;
pub mod limits;
pub mod listeners;
mod output;
mod own_file;
pub mod pace;
pub mod ports;
pub mod registry;
pub mod tree;
pub mod untree;
mod usage;
pub mod volumes;

pub use egress::{EgressInfo, EgressWish, SandboxEgress, SandboxInject};
pub use exec::{ExecInfo, ExecNote, ExecRequest, ExecState, Execs};
pub use limits::{LimitsChange, LimitsInfo};
pub use listeners::Listener;
pub use output::{Next, READERS_MAX, Reader, Stream};
pub use registry::{
    ForkedFrom, NewSandbox, OnTimeout, SandboxInfo, Sandboxes, Started, functions_of_sandboxes,
};
pub use usage::look_at_egress_bytes;
pub use usage::{NetworkUsage, SandboxUsage};
pub use volumes::SandboxVolume;
