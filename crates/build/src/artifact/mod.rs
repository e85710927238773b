//! Frozen functions in registries: pushed, pulled, and what is believed of one that comes from
//! elsewhere (docs/artifacts.md, docs/decisions/0031-functions-from-registries.md).

mod accept;
mod fetcher;
mod lazy;
mod pieces;
mod place;
mod policy;
mod pull;
mod push;
mod receive;
mod run;
mod written;

pub use lazy::{OnServed, Part, go_on, pull_lazily, remove_partial};
pub use policy::Refreeze;
pub use pull::{Installed, PullEvent, PullOptions, Pulled, pull};
pub use push::{Pushed, push};

use crate::build::{BuildError, FreezeFailure};
use crate::container::ContainerError;
use thaw_home::function::FunctionError;
use thaw_home::home::HomeError;
use thaw_oci::OciError;
use thaw_sandbox::{ImageError, KernelError, PlanError};
use thaw_store::StoreError;

/// Why a function cannot be pushed or pulled.
#[derive(Debug, thiserror::Error)]
pub enum ArtifactError {
    /// The registry, or what it sent.
    #[error(transparent)]
    Oci(#[from] OciError),
    /// It is a container image, which cannot be pulled.
    #[error(transparent)]
    Container(#[from] ContainerError),
    /// The store refused something.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// The state directory cannot be used.
    #[error(transparent)]
    Home(#[from] HomeError),
    /// The function is not in the store, or its record is not usable.
    #[error(transparent)]
    Function(#[from] FunctionError),
    /// It cannot be stored, or not be frozen anew.
    #[error(transparent)]
    Build(#[from] BuildError),
    /// The stored image is damaged, or cannot be booted.
    #[error(transparent)]
    Image(#[from] ImageError),
    /// There is no kernel.
    #[error(transparent)]
    Kernel(#[from] KernelError),
    /// The image cannot be booted over its files.
    #[error(transparent)]
    Plan(#[from] PlanError),
    /// The image cannot be opened again.
    #[error(transparent)]
    Freeze(#[from] FreezeFailure),
    /// It cannot be pushed.
    #[error("`{name}` cannot be pushed: {reason}")]
    Unfit {
        /// The function.
        name: String,
        /// Why not, and the way out.
        reason: String,
    },
    /// It could not be pulled to its end.
    #[error("`{name}` is not pulled yet: {reason}")]
    Unpulled {
        /// The function.
        name: String,
        /// Why not, and the way out.
        reason: String,
    },
    /// A piece that was here is not any more.
    #[error("a piece of the function was removed while it was stored; pull it again")]
    Removed,
    /// The host could not read what is here.
    #[error("{what} of the function cannot be read: {error}; pull it again")]
    Unread {
        /// A part of it.
        what: String,
        /// Why not.
        error: std::io::Error,
    },
    /// What the registry sent is not a function that can be stored.
    #[error("the function is refused: {0}; have it pushed anew by somebody whom you trust")]
    Refused(String),
}

impl ArtifactError {
    /// A refusal that says `reason`.
    fn refused(reason: impl ToString) -> Self {
        Self::Refused(reason.to_string())
    }

    /// Whether what was sent is to blame, so that it need not be kept for another try.
    pub fn is_refusal(&self) -> bool {
        matches!(
            self,
            Self::Refused(_) | Self::Oci(OciError::Refused(_) | OciError::Document { .. })
        )
    }
}
