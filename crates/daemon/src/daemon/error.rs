//! Why a daemon cannot serve.

use crate::activation::ActivationError;
use std::io;
use std::net::SocketAddr;
use std::path::PathBuf;
use thaw_home::admin::TokenError;
use thaw_home::config::QuotasError;
use thaw_home::home::HomeError;
use thaw_node::edge::GatewayFileError;
use thaw_sandbox::{CoreError, KernelError, ZygoteError};
use thaw_store::StoreError;

/// Why the node cannot serve.
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    /// The state directory is not usable.
    #[error(transparent)]
    Home(#[from] HomeError),
    /// The store is not usable.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// There is no kernel.
    #[error(transparent)]
    Kernel(#[from] KernelError),
    /// No zygotes can be made.
    #[error(transparent)]
    Zygote(#[from] ZygoteError),
    /// Tenants cannot be kept apart on cores.
    #[error(transparent)]
    Cores(#[from] CoreError),
    /// A monitor and its daemon do not find each other.
    #[error(transparent)]
    Rendezvous(#[from] crate::monitor::RendezvousError),
    /// A monitor cannot go on with what the program before it had.
    #[error("cannot go on in the place of another monitor: {0}")]
    TakeOver(#[from] crate::monitor::TakeOverError),
    /// An address is not available.
    #[error("cannot listen on {address} ({error}); choose another address with {option}")]
    Listen {
        /// The address.
        address: SocketAddr,
        /// The option that changes it.
        option: &'static str,
        /// What the system said.
        error: io::Error,
    },
    /// The admin API's socket cannot be made.
    #[error("cannot make the socket {} ({error}); free the path, or set THAW_HOME to another directory", path.display())]
    Socket {
        /// The socket.
        path: PathBuf,
        /// What the system said.
        error: io::Error,
    },
    /// There is no token for the admin API.
    #[error(transparent)]
    Token(#[from] TokenError),
    /// What is said of clients is not usable.
    #[error(transparent)]
    Gateway(#[from] GatewayFileError),
    /// The quotas of tenants are not usable.
    #[error(transparent)]
    Quotas(#[from] QuotasError),
    /// The settings of E2B's API are not usable.
    #[error(transparent)]
    E2b(#[from] thaw_e2b::SettingsError),
    /// The service manager has sockets that are of no use.
    #[error(transparent)]
    Activation(#[from] ActivationError),
    /// Traces cannot be sent as somebody has said.
    #[error("{0}")]
    Traces(String),
    /// A file of the state directory cannot be used.
    #[error("cannot use {} ({error}); check its owner and permissions", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// What the system said.
        error: io::Error,
    },
    /// The host refused something.
    #[error("cannot serve ({0}); `thaw doctor` says what this host lacks")]
    Io(#[from] io::Error),
}
