//! Instances: one thawed copy of a function each.

mod keeper;
mod launch;
mod options;
mod sandboxed;
mod standby;
mod state;

pub use keeper::Outcome;
pub(crate) use keeper::{Command, Delivery, Keeper};
pub use launch::{
    Client, End, FrozenInstance, Instance, LaunchError, Launched, Launcher, Report, StandbyInfo,
};
pub use options::{LaunchOptions, Techniques, WorkingSetUse};
pub use sandboxed::SandboxLauncher;
pub use standby::BootPolicy;
pub use state::{Change, InstanceState};
