//! Sandboxes: instances that stay, by their names.

pub mod registry;
mod usage;

pub use registry::{
    ForkedFrom, NewSandbox, OnTimeout, SandboxInfo, Sandboxes, Started, functions_of_sandboxes,
};
pub use usage::SandboxUsage;
