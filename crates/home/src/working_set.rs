//! What the store has of an image's working set.

use thaw_sandbox::WorkingSet;
use thaw_store::{ImageId, Store};

/// The working set that is stored of an image, if it is of use.
pub fn stored_working_set(store: &Store, image: ImageId) -> Option<WorkingSet> {
    let bytes = match store.working_set(image) {
        Ok(bytes) => bytes?,
        Err(error) => {
            tracing::warn!("{error}");
            return None;
        }
    };
    match WorkingSet::from_bytes(&bytes) {
        Ok(set) => Some(set),
        Err(error) => {
            tracing::warn!("{error}");
            None
        }
    }
}
