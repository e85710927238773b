//! The room that images take on disk.

use super::Catalog;
use crate::packing::{self, OpenImages};
use crate::service::{Service, Services};
use std::sync::Arc;
use std::time::{Duration, SystemTime};
use thaw_store::{ImageId, Room};

/// How often the room that images take on disk is looked at.
const LOOK_FOR_ROOM: Duration = Duration::from_secs(10);

impl Catalog {
    /// Keeps the images that are not packed within `room` bytes on disk, and none open of which
    /// nobody can make sandboxes any more, and has the store's reserve filled again, until the task is
    /// dropped.
    pub async fn keep_room(self: Arc<Self>, room: u64) {
        let mut ticks = tokio::time::interval(LOOK_FOR_ROOM);
        let mut reserve = None;
        loop {
            ticks.tick().await;
            let catalog = self.clone();
            let look = move || {
                catalog.make_room(room);
                catalog.look_at_reserve(reserve)
            };
            let done = tokio::task::spawn_blocking(look).await;
            reserve = done.expect("packing does not panic");
        }
    }

    /// Fills the store's reserve again, and says when the disk has become too full for it, or is so no
    /// more; how it stood before, and stands now.
    fn look_at_reserve(&self, before: Option<Room>) -> Option<Room> {
        let now = self.store.fill_reserve();
        let disk = self.store.root().display();
        match (before, now) {
            (Some(Room::Short), Some(Room::Enough)) => {
                tracing::info!("the disk that holds {disk} has room again");
            }
            (None | Some(Room::Enough), Some(Room::Short)) => tracing::warn!(
                "the disk that holds {disk} is full: only what is small and needed is written still; free some \
                 space on it (`thaw df`, `thaw remove`, `thaw gc`)"
            ),
            _ => {}
        }
        // Where nothing can be said now, the last word holds.
        now.or(before)
    }

    /// Packs images that were not used for long, if those that are not packed take more than
    /// `room` bytes on disk.
    fn make_room(&self, room: u64) {
        self.close_gone_checkpoints();
        let made = packing::make_room(&self.store, room, &OfServices(&self.services));
        match made {
            Ok(report) => {
                if report.packed > 0 {
                    let (packed, freed) = (report.packed, report.freed);
                    tracing::info!(packed, freed, "packed images that were not used for long");
                }
                report.failed.iter().for_each(|failure| tracing::warn!("{failure}"));
            }
            Err(error) => tracing::warn!("images stay as they are: {error}"),
        }
    }
}

/// The images that services have open.
struct OfServices<'a>(&'a Services);

impl OfServices<'_> {
    fn of(&self, image: ImageId) -> impl Iterator<Item = Arc<Service>> {
        let name = image.to_string();
        self.0.services().into_iter().filter(move |service| service.image() == name)
    }
}

impl OpenImages for OfServices<'_> {
    fn last_used(&self, image: ImageId) -> Option<SystemTime> {
        self.of(image).filter_map(|service| service.launcher().last_used()).max()
    }

    fn close(&self, image: ImageId) {
        self.of(image).for_each(|service| service.launcher().close_if_unused());
    }
}
