//! The scheduler.

use super::wait::{WaitQueue, Wake};
use crate::time::Instant;

/// Blocks the running thread until one of `queues` is woken, `deadline`
/// passes or a signal arrives.
pub fn block_on(_queues: &[&WaitQueue], _deadline: Option<Instant>) -> Wake {
    unimplemented!()
}
