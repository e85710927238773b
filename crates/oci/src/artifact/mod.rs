//! Frozen functions as OCI artifacts (docs/artifacts.md).
//!
//! ```text
//! manifest ── config: the document: what the function is, how large its parts are
//!          └─ layers: pieces of its files, of its image, of the kernel build that it needs
//! ```

mod document;
mod manifest;
mod pieces;

pub use document::{
    DOCUMENT_VERSION, FunctionDocument, ImagePart, IndexPart, Naming, NamingRun, PieceTable,
    RunPart,
};
pub(crate) use manifest::{DOCUMENT_MAX, FunctionManifest, Sent, is_function, new_manifest};
pub(crate) use pieces::packed_max;
pub use pieces::{Cutter, PIECE_MAX, Piece, PieceReader, RUN_MAX, packed, unpacked, unpacked_run};

use std::fmt;

/// What kind of artifact a manifest describes.
pub const FUNCTION_ARTIFACT: &str = "application/vnd.thaw.function.v1";
/// The document.
pub const FUNCTION_DOCUMENT: &str = "application/vnd.thaw.function.config.v1+json";

/// A part of a function, in pieces of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Section {
    /// The index, and then the contents of its files.
    Files,
    /// The snapshot image.
    Image,
    /// The kernel build that the image needs.
    Kernel,
    /// The recorded working set.
    WorkingSet,
    /// What a boot needs before the rest is there, in one piece.
    Run,
}

impl Section {
    /// All of them, in the order of the layers.
    pub const ALL: [Self; 5] =
        [Self::Files, Self::Image, Self::Kernel, Self::WorkingSet, Self::Run];

    /// Media type of its pieces.
    pub const fn media_type(self) -> &'static str {
        match self {
            Self::Files => "application/vnd.thaw.function.files.v1+zstd",
            Self::Image => "application/vnd.thaw.function.image.v1+zstd",
            Self::Kernel => "application/vnd.thaw.function.kernel.v1+zstd",
            Self::WorkingSet => "application/vnd.thaw.function.working-set.v1+zstd",
            Self::Run => "application/vnd.thaw.function.run.v1+zstd",
        }
    }
}

impl fmt::Display for Section {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Files => "files",
            Self::Image => "image",
            Self::Kernel => "kernel",
            Self::WorkingSet => "working set",
            Self::Run => "run",
        })
    }
}
