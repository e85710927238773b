//! Rootfs indexes: building them from a tree of files, reading and checking them.

mod check;
mod extended;
mod extension;
mod foreign;
mod open;
mod tree;
mod write;

pub use check::{StructureError, check_structure};
pub use extended::{Extended, ExtendedError};
pub use foreign::{ForeignIndex, ForeignIndexError};
pub use open::OpenIndex;
pub(crate) use tree::with_path;
pub use tree::{Attributes, Content, DeviceNumber, Node, NodeId, Timestamp, Tree, TreeError};
