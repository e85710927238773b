//! The guest's vdso (vdso(7)).

use crate::errno::Result;
use crate::task::Process;

/// Maps the vdso and returns its address, 0 if there is none.
pub fn map(_process: &Process) -> Result<u64> {
    Ok(0)
}
