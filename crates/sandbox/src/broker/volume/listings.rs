//! The directory that a sandbox lists, within bounds: it lies in this process.

use std::sync::{Arc, Mutex, PoisonError};

use rustix::io::Errno;

use super::limits::{Gauge, LISTING_MAX, Taken};
use crate::broker::host_directory::{HostDirectory, Listing};

/// The listing of which a sandbox reads page after page.
#[derive(Default)]
pub(super) struct Listings(Mutex<Option<(Listing, Taken)>>);

impl Listings {
    /// Entries after the first `skip`.
    ///
    /// # Errors
    /// `EOVERFLOW`: the directory is too large. `ENOMEM`: the sandboxes of the tenant, or all, list too much.
    pub fn page(
        &self,
        directory: &HostDirectory,
        path: &[u8],
        skip: u64,
        of_tenant: &Arc<Gauge>,
    ) -> Result<Vec<u8>, Errno> {
        let mut last = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let kept = match last.take() {
            Some(kept) if skip > 0 && kept.0.is_of(path) => kept,
            other => {
                // Before another one is made, so that a sandbox has one at a time.
                drop(other);
                list(directory, path, of_tenant)?
            }
        };
        let tail = kept.0.page(skip);
        *last = (!tail.is_empty()).then_some(kept);
        Ok(tail)
    }
}

fn list(
    directory: &HostDirectory,
    path: &[u8],
    of_tenant: &Arc<Gauge>,
) -> Result<(Listing, Taken), Errno> {
    let (mut used, mut taken) = (0, of_tenant.take(0).ok_or(Errno::NOMEM)?);
    let listing = directory.list_within(path, |bytes| {
        used += bytes;
        match used <= LISTING_MAX {
            false => Err(Errno::OVERFLOW),
            true if taken.resize(used) => Ok(()),
            true => Err(Errno::NOMEM),
        }
    })?;
    Ok((listing, taken))
}
