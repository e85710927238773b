#![doc = include_str!("../README.md")]
#![forbid(unsafe_code)]

mod ancestors;
mod blob;
mod checkpoint;
pub mod collect;
mod error;
mod footprint;
mod function;
#[cfg(any(test, feature = "fuzzing"))]
pub mod fuzzing;
mod gc;
mod id;
mod image;
pub mod import;
pub mod index;
mod kernel;
mod known;
mod layout;
mod lock;
mod owner;
mod pack;
mod prefetch;
mod reserve;
mod session;
mod sparse;
mod stage;
mod store;
mod template;
mod usage;
mod verify;
mod version;

pub use blob::{Blob, Domain, NamingReader};
pub use checkpoint::{CheckpointList, CheckpointRecord, NewCheckpoint};
pub use error::{Kind, Result, StoreError};
pub use footprint::Footprint;
pub use function::{
    Activation, FunctionList, FunctionRecord, FunctionVersion, NewFunction, RootfsRecord,
};
pub use gc::{GcReport, Kept, KeptOut};
pub use id::{BlobHash, ImageId, IndexId, InvalidHash, InvalidName, KernelId, Name, short_hash};
pub use image::{ImageForm, ImageInfo, NewImage};
pub use index::{ForeignIndex, ForeignIndexError, OpenIndex, Tree};
pub use kernel::{KERNEL_MAX, KernelInfo};
pub use owner::{Acting, Closed, Owner, closed};
pub use pack::{PackedSizes, Reference, Removed, Source, UnpackedImage};
pub use prefetch::{PREFETCH_HEAD, PREFETCH_MAX, Prefetch};
pub use reserve::{DiskFull, RESERVE, Reserve, Room};
pub use session::Session;
pub use sparse::image_id;
pub use stage::{LeftOver, Removal};
pub use store::Store;
pub use template::TemplateRecord;
pub use usage::{KernelUse, OtherUser, Sizes, StoreUsage, StoredBytes, User, UserKind};
pub use verify::{Problem, Repair, VerifyReport};
pub use version::{
    HeaderRule, RolledBack, SHARES_MAX, Share, VERSIONS_KEPT, VERSIONS_MAX, Version, VersionError,
    parse_label,
};
