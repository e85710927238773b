//! Sandboxes whose instances have ended: they are forgotten, and so are rules and limits of such instances.

use super::Sandboxes;
use std::collections::HashSet;
use std::sync::Arc;

impl Sandboxes {
    /// Forgets those whose instances have ended since this was called last. What it takes is in
    /// proportion to these.
    pub(super) fn forget_departed(self: &Arc<Self>) {
        let departed = self.services.shared().take_departures();
        if !departed.is_empty() {
            self.forget(departed);
        }
    }

    /// Looks at all of them, as nobody may have told of one. What it takes is in proportion to the
    /// instances that there are.
    pub(super) fn forget_gone(self: &Arc<Self>) {
        let mut known: HashSet<u64> = self.all.lock().values().map(|info| info.instance).collect();
        known.extend(self.services.shared().ids_with_own());
        // Later: a number that is known and not among these is that of none that is being made.
        let there = self.services.instance_ids();
        self.forget(known.into_iter().filter(|id| !there.contains(id)).collect());
    }

    fn forget(self: &Arc<Self>, departed: Vec<u64>) {
        let mut gone = HashSet::new();
        for id in departed {
            match self.services.service_of(id) {
                Some(service) if !service.tells_of_end(id) => self.services.shared().departs(id),
                None if !self.services.may_have_instance(id) => {
                    self.services.shared().forget_own(id);
                    gone.insert(id);
                }
                _ => {}
            }
        }
        if gone.is_empty() {
            return;
        }
        let (before, after) = {
            let mut all = self.all.lock();
            let before = all.len();
            all.retain(|_, info| !gone.contains(&info.instance));
            (before, all.len())
        };
        if after != before {
            self.all.write_soon();
        }
    }
}
