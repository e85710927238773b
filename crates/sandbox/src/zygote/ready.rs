//! Copies that are booted ahead: everything is mapped, nothing of the guest has
//! run.

use std::fmt;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::time::Duration;

use thaw_abi::control::Connection;

use super::boot_error;
use crate::boot::{BootError, BootPlan, ThawOptions, send_identity};
use crate::rewind::RewindError;
use crate::sandbox::Sandbox;

/// How long a copy may take to be prepared.
const PATIENCE: Duration = Duration::from_secs(10);

/// A copy of an image that waits to be wanted. Dropping it kills it.
pub struct ReadySandbox {
    sandbox: Sandbox,
    plan: Arc<BootPlan>,
}

impl fmt::Debug for ReadySandbox {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ReadySandbox").field("pid", &self.pid()).finish_non_exhaustive()
    }
}

impl ReadySandbox {
    /// One that waits by itself: a template has forked it, or it was put back.
    pub(crate) fn new(sandbox: Sandbox, plan: Arc<BootPlan>) -> Self {
        Self { sandbox, plan }
    }

    /// Waits until the copy, which has been told to wait, is prepared.
    pub(super) fn prepare(mut sandbox: Sandbox, plan: Arc<BootPlan>) -> Result<Self, BootError> {
        sandbox.wait_prepared(PATIENCE)?;
        Ok(Self { sandbox, plan })
    }

    /// Goes on as itself, with a client's connected, non-blocking socket if there
    /// is one. On an error the socket is still with the caller.
    pub fn go(
        self,
        connection: Option<(Connection, BorrowedFd<'_>)>,
        options: &ThawOptions<'_>,
    ) -> Result<Sandbox, BootError> {
        let send = || send_identity(self.sandbox.control(), connection, options);
        self.sandbox.process().woken_here(send).map_err(boot_error)?;
        Ok(self.sandbox)
    }

    /// Has the state taken down that it is in, so that it can be put back into it when it has
    /// run ([`Sandbox::rewind`]).
    ///
    /// # Errors
    /// It cannot be put back later; it may have ended.
    pub fn take_down(&mut self) -> Result<(), RewindError> {
        self.sandbox.take_down(&self.plan)
    }

    pub(crate) fn sandbox(&self) -> &Sandbox {
        &self.sandbox
    }

    /// What it was booted from.
    pub fn plan(&self) -> &Arc<BootPlan> {
        &self.plan
    }

    /// See [`Sandbox::label`].
    pub fn label(&self, label: &Arc<str>) {
        self.sandbox.label(label);
    }

    /// Process id as seen by the caller's `/proc`.
    pub fn pid(&self) -> u32 {
        self.sandbox.pid()
    }

    /// Whether its process has ended while it waited.
    pub fn has_ended(&self) -> bool {
        self.sandbox.try_wait().is_some()
    }
}
