//! A daemon that ends in order, and leaves its instances to the next one.

use super::{Service, Slots};
use crate::instance::{Command, Leaving};

impl Service {
    /// Has all instances outlive this daemon that can, and the others end: idle ones now, each
    /// other one after its last connection. Idle ones that persist sleep, if they may: it takes
    /// long. How many are still to be waited for.
    pub(crate) fn leave_all(&self, may_sleep: bool) -> usize {
        let is_retired = self.is_retired();
        if is_retired {
            // The next daemon would not have them, but for its sandboxes.
            self.retire_others();
        }
        let (persists, is_single_use) = (self.persists(), self.is_single_use());
        let mut slots = self.slots();
        let Slots { all, held, .. } = &mut *slots;
        let mut waited_for = 0;
        for (id, slot) in all {
            if is_retired && !held.contains(id) {
                waited_for += 1;
                continue;
            }
            if persists && may_sleep && slot.state.is_idle() && !slot.table.cannot_sleep() {
                // What lies on disk outlives the monitor, too.
                slot.table.tell(Command::Sleep(None));
                waited_for += 1;
                continue;
            }
            // A sandbox does not end with a connection.
            let ends = is_single_use && !held.contains(id) && slot.table.lasting() == 0;
            match slot.table.leaving() {
                Leaving::Kept if !ends => continue,
                Leaving::NotYet if !ends => slot.table.tell(Command::Leave),
                _ if slot.connections == 0 => {
                    slot.end();
                    slot.table.tell(Command::Stop);
                }
                _ => {}
            }
            waited_for += 1;
        }
        waited_for
    }

    /// Ends the instances that do not outlive this daemon, whatever they do.
    pub(crate) fn kill_those_that_stay(&self) {
        let is_retired = self.is_retired();
        let mut slots = self.slots();
        let Slots { all, held, .. } = &mut *slots;
        for (id, slot) in all {
            let is_wanted = !is_retired || held.contains(id);
            if !is_wanted || slot.table.leaving() != Leaving::Kept {
                slot.end();
                slot.table.tell(Command::End);
            }
        }
    }
}
