//! Registries (OCI distribution specification): pulling images and functions, and pushing functions.

mod bucket;
mod download;
mod mounts;
mod pace;
mod pull;
mod push;
mod remote;
mod settings;
mod signatures;
mod source;

pub(crate) use bucket::{SCHEME, bucket_of, host_of};
pub use download::PullProgress;
pub use pull::{Choose, FunctionPull, Offer, Pull, Pulled, PulledFunction};
pub use push::{Push, PushProgress, PushReport, Upload};
pub use remote::{PieceName, RemoteFunction, STALL, check, has};
pub use settings::{Registries, RegistryRule};
#[cfg(test)]
pub(crate) use source::MANIFEST_MAX;
