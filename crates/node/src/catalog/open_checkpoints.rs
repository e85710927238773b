//! Checkpoints that are open, so that the next sandbox of one need not read its image again.

use crate::instance::Launcher;
use crate::service::Service;
use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, Weak};
use thaw_store::{ImageId, Name};

/// Most of them. Each has some descriptors, and the page tables of its image.
const OPEN_MAX: usize = 32;

struct Open {
    name: Name,
    image: ImageId,
    /// The version of its function that its sandboxes belong to: another one has other limits. It
    /// may go meanwhile.
    service: Weak<Service>,
    launcher: Arc<dyn Launcher>,
}

/// Those of which sandboxes were made last, the latest in front.
#[derive(Default)]
pub(super) struct OpenCheckpoints(Mutex<VecDeque<Open>>);

impl OpenCheckpoints {
    /// What boots sandboxes of one, if it is open for this version of its function.
    pub fn get(
        &self,
        name: &Name,
        image: ImageId,
        service: &Arc<Service>,
    ) -> Option<Arc<dyn Launcher>> {
        let mut all = self.all();
        let is_it = |open: &Open| {
            let is_same = open.service.upgrade().is_some_and(|one| Arc::ptr_eq(&one, service));
            open.name == *name && open.image == image && is_same
        };
        let at = all.iter().position(is_it)?;
        let open = all.remove(at)?;
        let launcher = open.launcher.clone();
        all.push_front(open);
        Some(launcher)
    }

    /// Keeps one open, in place of what was open by its name.
    pub fn keep(
        &self,
        name: Name,
        image: ImageId,
        service: &Arc<Service>,
        launcher: &Arc<dyn Launcher>,
    ) {
        let mut all = self.all();
        all.retain(|open| open.name != name && open.service.strong_count() > 0);
        let service = Arc::downgrade(service);
        all.push_front(Open { name, image, service, launcher: launcher.clone() });
        all.truncate(OPEN_MAX);
    }

    /// Closes one.
    pub fn close(&self, name: &Name) {
        self.all().retain(|open| open.name != *name);
    }

    fn all(&self) -> MutexGuard<'_, VecDeque<Open>> {
        self.0.lock().expect("no holder panics")
    }
}
