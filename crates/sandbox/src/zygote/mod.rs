//! Zygotes: processes with all done that does not depend on the function.

use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use thaw_abi::control::Connection;

use crate::boot::{BootError, BootPlan, StartSpec, ThawOptions};
use crate::kernel::Kernel;
use crate::sandbox::Sandbox;

/// Where the kernels of the zygotes write traces and panics.
#[derive(Clone, Debug)]
pub enum Console {
    /// All to this descriptor.
    Shared(Arc<OwnedFd>),
    /// Each to a pipe of its own; [`Sandbox::console`] is the read end.
    Pipe,
}

/// How zygotes are made.
#[derive(Clone, Debug)]
pub struct ZygoteConfig {
    /// The program that a zygote runs.
    pub kernel: Kernel,
    /// Where it writes traces and panics.
    pub console: Console,
    /// First of the host user and group ids that sandboxes run as, when the
    /// caller is root. One below it is never used.
    pub uid_base: u32,
    /// Most sandboxes at a time, and so the number of user ids.
    pub max_sandboxes: u32,
    /// How long a zygote may take to become ready.
    pub ready_timeout: Duration,
}

impl ZygoteConfig {
    /// The usual configuration for this kernel.
    pub fn new(kernel: Kernel, console: Console) -> Self {
        Self {
            kernel,
            console,
            uid_base: 2_000_000,
            max_sandboxes: 16_384,
            ready_timeout: Duration::from_secs(10),
        }
    }
}

/// Why there is no zygote.
#[derive(Debug, thiserror::Error)]
pub enum ZygoteError {
    /// The zygote parent could not be started.
    #[error(
        "cannot start the zygote parent ({step}): {source}; `thaw doctor` says what this host lacks"
    )]
    Parent {
        /// What failed.
        step: &'static str,
        /// Why.
        source: std::io::Error,
    },
    /// The zygote parent has ended, and all sandboxes with it.
    #[error("the zygote parent has ended, and all sandboxes with it")]
    ParentDied,
    /// A zygote could not be made.
    #[error("cannot make a zygote ({step}): {source}")]
    Create {
        /// What failed.
        step: &'static str,
        /// Why.
        source: std::io::Error,
    },
    /// As many sandboxes as allowed are alive.
    #[error("{limit} sandboxes are alive, as many as allowed; end some or raise the limit")]
    Full {
        /// [`ZygoteConfig::max_sandboxes`].
        limit: u32,
    },
    /// The kernel did not become ready.
    #[error("the kernel in the new zygote did not become ready: {0}")]
    NotReady(String),
    /// The zygote is not isolated as it must be. It has been killed.
    #[error(
        "the new zygote is not isolated ({field} is {found}, must be {required}) and was killed"
    )]
    NotIsolated {
        /// Field of `/proc/PID/status`.
        field: &'static str,
        /// Its value.
        found: String,
        /// The value it must have.
        required: &'static str,
    },
}

/// Entry of the zygote parent: to be called first thing in `main`. Returns at
/// once unless this process was started as a zygote parent; then it never
/// returns.
pub fn zygote_parent_main() {}

/// A handle to the process that makes zygotes. All of them die with it.
pub struct ZygoteParent {}

impl ZygoteParent {
    /// Starts the process: this same executable, see [`zygote_parent_main`].
    pub fn start(config: ZygoteConfig) -> Result<Self, ZygoteError> {
        let _ = config;
        todo!()
    }

    /// Makes a zygote and verifies its isolation. Takes about a millisecond;
    /// take one from a [`ZygotePool`] where that matters.
    pub fn create(&self) -> Result<Zygote, ZygoteError> {
        todo!()
    }

    /// Process id of the zygote parent.
    pub fn pid(&self) -> u32 {
        todo!()
    }
}

/// A process that waits to become a sandbox. Dropping it kills it.
pub struct Zygote {}

impl Zygote {
    /// Checks from outside that the process is isolated: seccomp filter in
    /// force, no new privileges, no capabilities.
    pub fn verify(&self) -> Result<(), ZygoteError> {
        todo!()
    }

    /// Process id as seen by the caller's `/proc`.
    pub fn pid(&self) -> u32 {
        todo!()
    }

    /// Starts a program.
    pub fn start(self, spec: &StartSpec<'_>) -> Result<Sandbox, BootError> {
        let _ = spec;
        todo!()
    }

    /// Becomes a copy of a frozen image, with a client's connected,
    /// non-blocking socket if there is one. On an error the socket is still
    /// with the caller, who may try another zygote.
    pub fn thaw(
        self,
        plan: &BootPlan,
        connection: Option<(Connection, BorrowedFd<'_>)>,
        options: &ThawOptions<'_>,
    ) -> Result<Sandbox, BootError> {
        let _ = (plan, connection, options);
        todo!()
    }
}

/// How a pool is kept.
#[derive(Clone, Debug)]
pub struct PoolConfig {
    /// Zygotes kept ready.
    pub size: usize,
    /// How they are made.
    pub zygotes: ZygoteConfig,
}

/// What a pool has done so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PoolStats {
    /// Zygotes ready now.
    pub ready: usize,
    /// Zygotes made so far.
    pub created: u64,
    /// Zygotes taken from the pool.
    pub taken: u64,
    /// Takes that found the pool empty and had to make one.
    pub misses: u64,
    /// Zygotes that died or failed while being made.
    pub failures: u64,
    /// Times the zygote parent was started anew.
    pub parent_restarts: u64,
}

/// Zygotes kept ready in the background. Starts its own [`ZygoteParent`], and
/// another one if that dies.
pub struct ZygotePool {}

impl ZygotePool {
    /// Starts the zygote parent and fills the pool in the background.
    pub fn new(config: PoolConfig) -> Result<Self, ZygoteError> {
        let _ = config;
        todo!()
    }

    /// Takes a zygote; when none is ready, makes one, which is slow. An error
    /// means that none can be made at all.
    pub fn take(&self) -> Result<Zygote, ZygoteError> {
        todo!()
    }

    /// Changes how many zygotes are kept ready.
    pub fn set_size(&self, size: usize) {
        let _ = size;
        todo!()
    }

    /// Blocks until the pool is full; an error if a zygote could not be made meanwhile.
    pub fn wait_full(&self) -> Result<(), ZygoteError> {
        todo!()
    }

    /// Counters.
    pub fn stats(&self) -> PoolStats {
        todo!()
    }

    /// Process id of the present zygote parent.
    pub fn parent_pid(&self) -> u32 {
        todo!()
    }
}
