//! Giving up capabilities and groups (capabilities(7)).

use rustix::io::Errno;
use rustix::thread::{
    CapabilitySet, CapabilitySets, capability_is_in_bounding_set, clear_ambient_capability_set,
    remove_capability_from_bounding_set, set_capabilities, set_thread_groups,
};

/// Removes all capabilities but `kept` from the bounding set, which takes `CAP_SETPCAP`.
///
/// # Errors
/// The host's.
pub fn shrink_bounding_set(kept: CapabilitySet) -> Result<(), Errno> {
    for bit in 0..64 {
        // Also capabilities that are newer than this program.
        let capability = CapabilitySet::from_bits_retain(1 << bit);
        match capability_is_in_bounding_set(capability) {
            Ok(true) if !kept.contains(capability) => {
                remove_capability_from_bounding_set(capability)?;
            }
            Ok(_) => {}
            // The first number that the host kernel does not know ends the list.
            Err(_) => break,
        }
    }
    Ok(())
}

/// Gives up all capabilities of the calling thread but these, which it does not leave to what
/// it executes.
///
/// # Errors
/// It has not all of these.
pub fn hold_capabilities(kept: CapabilitySet) -> Result<(), Errno> {
    let sets =
        CapabilitySets { effective: kept, permitted: kept, inheritable: CapabilitySet::empty() };
    set_capabilities(None, sets)
}

/// The same for good: executing a file gives none back.
///
/// # Errors
/// The host's.
pub fn drop_capabilities(kept: CapabilitySet) -> Result<(), Errno> {
    shrink_bounding_set(CapabilitySet::empty())?;
    clear_ambient_capability_set()?;
    hold_capabilities(kept)
}

/// Leaves all supplementary groups, where that is allowed: a user without a range in
/// `/etc/subuid` cannot drop groups in a user namespace (user_namespaces(7)).
///
/// # Errors
/// The host's, but for `EPERM`.
pub fn drop_groups_if_allowed() -> Result<(), Errno> {
    match set_thread_groups(&[]) {
        Ok(()) | Err(Errno::PERM) => Ok(()),
        Err(errno) => Err(errno),
    }
}
