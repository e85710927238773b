//! Limits of a file system that a program has mounted (tmpfs(5), `size` and `nr_inodes`).

use alloc::sync::Arc;

use crate::errno::{Errno, Result};
use crate::sync::KernelCell;

/// How much of something there may be, and is.
pub struct Quota {
    /// 0: any number.
    limit: KernelCell<u64>,
    used: KernelCell<u64>,
}

impl Quota {
    /// Nothing is there yet.
    pub fn new(limit: u64) -> Self {
        Self { limit: KernelCell::new(limit), used: KernelCell::new(0) }
    }

    /// The limit, and how much of it is left; `None` without a limit.
    pub fn limit_and_left(&self) -> Option<(u64, u64)> {
        let limit = self.limit.get();
        (limit > 0).then(|| (limit, limit.saturating_sub(self.used.get())))
    }

    /// Whether what is there is within a new limit.
    pub fn fits(&self, limit: u64) -> bool {
        limit == 0 || self.used.get() <= limit
    }

    /// Changes the limit.
    pub fn set_limit(&self, limit: u64) {
        self.limit.set(limit);
    }

    /// `ENOSPC` unless there may be so much more.
    pub fn check_room(&self, more: u64) -> Result<()> {
        match self.limit_and_left() {
            Some((_, left)) if left < more => Err(Errno::ENOSPC),
            _ => Ok(()),
        }
    }
}

/// What one file has of a quota; it is given back with the file. Files of a file system without
/// limits have nothing of any.
#[derive(Default)]
pub struct Share {
    quota: Option<Arc<Quota>>,
    used: u64,
}

impl Share {
    /// Nothing of a quota.
    pub fn of(quota: Option<&Arc<Quota>>) -> Self {
        Self { quota: quota.cloned(), used: 0 }
    }

    /// `ENOSPC` unless there may be so much more.
    pub fn check_room(&self, more: u64) -> Result<()> {
        self.quota.as_ref().map_or(Ok(()), |quota| quota.check_room(more))
    }

    /// Takes one more; `ENOSPC`.
    pub fn take_one(&mut self) -> Result<()> {
        if let Some(quota) = &self.quota {
            quota.check_room(1)?;
            *quota.used.borrow_mut() += 1;
            self.used += 1;
        }
        Ok(())
    }

    /// Gives back what is more than `left`.
    pub fn shrink_to(&mut self, left: u64) {
        if let Some(quota) = self.quota.as_ref().filter(|_| left < self.used) {
            *quota.used.borrow_mut() -= self.used - left;
            self.used = left;
        }
    }
}

impl Drop for Share {
    fn drop(&mut self) {
        self.shrink_to(0);
    }
}
