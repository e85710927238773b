//! Instances: one thawed copy of a function each.

mod keeper;
mod launch;
mod sandboxed;
mod standby;
mod state;

pub use keeper::Outcome;
pub(crate) use keeper::{Command, Delivery, Keeper};
pub use launch::{
    Client, End, FrozenInstance, Instance, LaunchError, Launched, Launcher, Report, StandbyInfo,
};
pub use sandboxed::{SandboxLauncher, WorkingSetUse};
pub use standby::BootPolicy;
pub use state::{Change, InstanceState};
