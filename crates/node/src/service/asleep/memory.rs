//! The room that an instance which is asleep takes of its tenant once it runs.

use crate::asleep::Asleep;
use crate::service::Service;
use thaw_home::config::{ByteSize, QUOTAS_FILE};

impl Service {
    /// Bytes of memory that the boot for a client takes of the tenant: those of an instance, and
    /// those that decrypting the one takes that is to be woken for it.
    pub(in crate::service) fn memory_to_begin(&self) -> u64 {
        let asleep = {
            let slots = self.slots();
            let most = self.config.limits.concurrency.get();
            let id = slots.asleep.one_with_room(most, &slots.held);
            id.and_then(|id| slots.asleep.get(id)).map(|sleeper| sleeper.asleep.clone())
        };
        asleep.map_or(self.memory(), |asleep| self.memory_to_wake(&asleep))
    }

    /// The same to wake this one. One that never wakes takes no more than a new instance.
    pub(in crate::service) fn memory_to_wake(&self, asleep: &Asleep) -> u64 {
        match self.never_wakes(asleep.id(), asleep.decrypted_len()) {
            None => self.needs_awake(asleep),
            Some(_) => self.memory(),
        }
    }

    /// What an instance that is asleep takes once it runs, its decrypted memory included.
    pub(super) fn needs_awake(&self, asleep: &Asleep) -> u64 {
        let own = self.limits_of(asleep.id()).memory;
        own.saturating_add(asleep.decrypted_len().unwrap_or_default())
    }

    /// Why an instance cannot be woken with so many bytes of decrypted memory, even if the tenant
    /// has no other: one sentence for the operator.
    pub(crate) fn never_wakes(&self, id: u64, decrypted: Option<u64>) -> Option<String> {
        let (own, decrypted) = (self.limits_of(id).memory, decrypted?);
        self.tenant.room().never_keeps(own.saturating_add(decrypted)).then(|| {
            let (tenant, own, decrypted) = (self.tenant.name(), ByteSize(own), ByteSize(decrypted));
            format!(
                "the quota of {tenant} never has room for {own} of an instance and {decrypted} of \
                 decrypted memory, which it needs to wake; have the operator raise `memory` in \
                 {QUOTAS_FILE}, or lower `limits.memory`"
            )
        })
    }
}
