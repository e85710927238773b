//! From one daemon to the next: instances that an earlier one has put to sleep, and those that are left
//! to a later one.

use super::sleepers::Sleeper;
use crate::asleep::{AsleepNote, Left};
use crate::remote::{ExecNote, Execs};
use crate::service::Service;
use std::sync::Arc;

impl Service {
    /// Whether its instances are left to the next daemon.
    pub(crate) fn persists(&self) -> bool {
        self.config.persist && !self.slots().asleep.is_closed()
    }

    /// Whether an instance that an earlier daemon has put to sleep can be taken in.
    ///
    /// # Errors
    /// It is none of this version's: one sentence for the log.
    pub(crate) fn check_asleep(&self, note: &AsleepNote) -> Result<(), String> {
        if self.is_single_use() {
            return Err("its function has isolation = \"request\" by now".to_owned());
        }
        if self.launcher.index() != Some(note.index) {
            return Err("its function was built anew".to_owned());
        }
        if self.tenant.name().domain() != note.domain.as_ref() {
            return Err("its function is in another sharing domain by now".to_owned());
        }
        if note.kernel.is_some_and(|kernel| self.launcher.kernel_build() != Some(kernel)) {
            return Err("its function was frozen anew under another kernel build".to_owned());
        }
        Ok(())
    }

    /// Takes in an instance that an earlier daemon has put to sleep.
    ///
    /// # Errors
    /// It is none of this version's: one sentence for the log.
    pub(crate) fn take_over_asleep(self: &Arc<Self>, left: Left) -> Result<(), String> {
        self.check_asleep(&left.note)?;
        let slots = self.slots();
        if slots.asleep.contains(left.note.id) {
            // It was awake, and the files of this name are those of its next sleep.
            left.keep();
            return Err("it is asleep already".to_owned());
        }
        if slots.contains_key(&left.note.id) {
            return Err("it was awake already".to_owned());
        }
        drop(slots);
        let execs = self.left_execs(&left.note.execs);
        let asleep = left.take_over(&self.tenant);
        let id = asleep.id();
        let sleeper = Sleeper::new(Arc::new(asleep), execs.clone());
        self.slots().asleep.insert(sleeper).map_err(|_| "it is not served".to_owned())?;
        self.end_with(id, execs.all());
        Ok(())
    }

    /// Processes of an instance of an earlier daemon. No new one gets their numbers.
    pub(in crate::service) fn left_execs(&self, notes: &[ExecNote]) -> Arc<Execs> {
        notes.iter().for_each(|note| self.shared.number_is_taken(note.id));
        Arc::new(Execs::asleep(notes))
    }

    /// Leaves all that are asleep to the next daemon; how many there are.
    pub(crate) fn keep_asleep(&self) -> usize {
        let mut kept = self.slots().asleep.close();
        for Sleeper { asleep, execs, .. } in &mut kept {
            // Their processes do not end with this daemon, and nobody is to hear that they have.
            *execs = None;
            if let Err(error) = asleep.keep() {
                let (function, instance) = (self.name(), asleep.id());
                tracing::warn!(%function, instance, "an instance that is asleep may not outlive a loss of power: {error}");
            }
        }
        kept.len()
    }
}
