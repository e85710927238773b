//! Instances: one thawed copy of a function each.

mod asleep;
mod cold;
mod command;
mod connections;
mod copies;
mod end;
mod hibernation;
mod launch;
mod live;
mod options;
mod partial;
mod patience;
mod probe;
mod recording;
mod resting;
mod rewinding;
mod sandbox_instance;
mod sandboxed;
mod sealed;
mod standby;
mod state;
mod terms;
mod volumes;

pub(crate) use command::{
    Command, Copied, Held, HibernateReply, Hold, InstanceNote, Pause, PauseReply, Place, Rest,
    SleepReply, WakeReply,
};
pub(crate) use connections::{
    ConnectionNote, ConnectionTable, Delivery, Done, Due, Inherited, JoinedOrphan, KeptConnections,
    Leaving, LetGo,
};
pub use connections::{Outcome, Placed};
pub use end::{End, LimitSetting, Overrun};
pub use hibernation::HibernationTerms;
pub(crate) use hibernation::SwapStorage;
pub use launch::{
    Client, ComingBack, LaunchError, Launched, Launcher, NotNow, Opening, RewindInfo,
    RewindVerdict, StandbyInfo, StandbyState, WakeError, Way,
};
pub use live::{
    Checkpoint, CheckpointKey, Checkpointed, Connector, Finish, FrozenInstance, HibernatedInstance,
    Instance, InstanceUse, Reading, ReadingStep, Report, SleepingInstance, Unread,
};
pub use options::{LaunchOptions, Techniques, WorkingSetUse};
pub use partial::while_partial;
pub(crate) use patience::{Patience, Verdict};
pub(crate) use probe::{Probe, ProbeFailure, Question};
pub use resting::{OpenLauncher, RestingLauncher};
pub use rewinding::RewindPolicy;
pub use sandboxed::{Decrypted, SandboxLauncher, StandsOn};
pub use standby::BootPolicy;
pub use state::{Change, InstanceState};
pub(crate) use volumes::GiveUp;
pub use volumes::VolumesAtRest;
