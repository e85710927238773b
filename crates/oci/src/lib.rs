//! Container images: reading OCI layouts and `docker save` archives, pulling from registries, and
//! unpacking layers into a tree of the store.
//!
//! ```text
//! registry ──pull──▶ OCI layout on disk ─┐
//! directory, archive ────────────────────┴─open──▶ Image ──unpack──▶ Tree, Settings
//! ```
//!
//! Everything in an image is somebody else's: names, sizes, links, the length of what is compressed.
//! Each has a bound ([`Limits`]), and digests are verified before anything is published.
//!
//! Specification: OCI image format 1.1, OCI distribution 1.1, Docker image specification 1.2.

mod apply;
pub mod artifact;
pub mod credentials;
mod error;
mod layer;
mod layout;
mod pax;
mod reference;
mod registry;
mod settings;
mod signature;
mod sparse;
mod unpack;

pub use error::OciError;
pub use layer::{Allowance, Metered, Trailing, digest};
pub use layout::{Image, Layout};
pub use reference::{Reference, default_tag};
pub use registry::{
    Choose, FunctionPull, Offer, PieceName, Pull, PullProgress, Pulled, PulledFunction, Push,
    PushProgress, PushReport, Registries, RegistryRule, RemoteFunction, STALL, Upload,
    check as check_piece, has as has_piece,
};
pub use settings::Settings;
pub use signature::{AskPassword, SigningKey, VerifyKey};
pub use unpack::{Limits, UnpackReport, Unpacked};
