//! `struct timespec` (timespec(3type)).

use crate::errno::{Errno, Result};
use crate::platform::user::UserAddress;

const NS: u64 = 1_000_000_000;

/// `struct timespec`.
#[derive(Clone, Copy, Debug, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
pub struct Timespec {
    /// Seconds.
    pub seconds: i64,
    /// Nanoseconds, below 1,000,000,000.
    pub nanoseconds: i64,
}

impl Timespec {
    /// From nanoseconds.
    pub fn from_ns(ns: u64) -> Self {
        Self { seconds: (ns / NS) as i64, nanoseconds: (ns % NS) as i64 }
    }

    /// In nanoseconds, at most `u64::MAX / 2`; `EINVAL` if it is not a time.
    pub fn to_ns(self) -> Result<u64> {
        if self.seconds < 0 || !(0..NS as i64).contains(&self.nanoseconds) {
            return Err(Errno::EINVAL);
        }
        let ns = (self.seconds as u64).saturating_mul(NS).saturating_add(self.nanoseconds as u64);
        Ok(ns.min(u64::MAX / 2))
    }
}

/// Reads a `struct timespec`, in nanoseconds.
pub fn read_timespec(at: UserAddress) -> Result<u64> {
    at.read::<Timespec>()?.to_ns()
}
