//! Files of volumes when another daemon has taken the sandbox over.
//!
//! The one before knew which files are open, which locks they have, and whose length was delegated;
//! nobody knows it now but this kernel. So it opens the files again by their names and takes their locks
//! again, as NFS clients do when a server has restarted (RFC 8881, 8.4.2), before anybody else
//! gets at them ([decisions/0083](../../../../../docs/decisions/0083-instances-with-volumes-outlive-their-daemon.md)).

use alloc::sync::{Arc, Weak};
use alloc::vec::Vec;

use thaw_abi::bind::*;

use super::{Bind, lengths};
use crate::sync::KernelCell;

/// Hosts that a request is asked of, one after the other.
pub(super) const HOSTS_MAX: u32 = 4;

/// The volumes that are mounted.
#[derive(Default)]
pub struct Volumes {
    mounted: KernelCell<Vec<Weak<Bind>>>,
    /// See [`Volumes::host`].
    host: KernelCell<u64>,
    is_renewing: KernelCell<bool>,
}

impl Volumes {
    pub(super) fn add(&self, bind: &Arc<Bind>) {
        self.mounted.borrow_mut().push(Arc::downgrade(bind));
    }

    /// A number for the host that serves the volumes: another one from the moment on when another
    /// daemon does.
    pub fn host(&self) -> u64 {
        self.host.get()
    }

    fn all(&self) -> Vec<Arc<Bind>> {
        let mut mounted = self.mounted.borrow_mut();
        mounted.retain(|bind| bind.strong_count() > 0);
        mounted.iter().filter_map(Weak::upgrade).collect()
    }

    /// Takes files back from a host that is gone, if another one serves. False: that is being done
    /// already.
    pub fn renew(&self) -> bool {
        if self.is_renewing.get() {
            return false;
        }
        self.is_renewing.set(true);
        for _ in 0..HOSTS_MAX {
            if self.take_back() {
                break;
            }
        }
        self.is_renewing.set(false);
        true
    }

    /// Takes all back from the host that serves now; false: that one has ended meanwhile.
    fn take_back(&self) -> bool {
        let mut all = self.all();
        let is_left =
            |bind: &Arc<Bind>| bind.ask_number(VOLUME_RENEW, [RENEW_ASK, 0, 0], &[]) == Ok(1);
        all.retain(is_left);
        if all.is_empty() {
            return true;
        }
        *self.host.borrow_mut() += 1;
        // Of all volumes before the first file is opened: for that, everybody's are waited for.
        lengths::let_go();
        let say = |bind: &Arc<Bind>, step| {
            // A host that does not hear it is gone, too.
            let _ = bind.ask(VOLUME_RENEW, [step, 0, 0], &[]);
        };
        all.iter().for_each(|bind| say(bind, RENEW_LET_GO));
        if all.iter().any(is_left) {
            // It would wait for itself.
            return false;
        }
        for bind in &all {
            // Whoever uses another one that is not there any more hears of it.
            let has_its_locks = bind.open_files().iter().all(|file| file.take_back());
            say(bind, if has_its_locks { RENEW_DONE } else { RENEW_LOST });
        }
        true
    }
}

/// Whether a request that a host may have served can be made once more.
pub(super) fn is_repeatable(request: &BindRequest) -> bool {
    const O_CREAT: u64 = 0o100;
    match request.operation {
        BIND_MKDIR | BIND_UNLINK | BIND_RMDIR | BIND_RENAME | BIND_LINK | BIND_SYMLINK
        | VOLUME_APPEND => false,
        BIND_OPEN => request.a & O_CREAT == 0,
        VOLUME_WRITE => request.b != VOLUME_END,
        _ => true,
    }
}

/// Whether a request names an open file by the host's number.
pub(super) fn names_open_file(operation: u32) -> bool {
    matches!(
        operation,
        BIND_CLOSE
            | BIND_FSTAT
            | BIND_FTRUNCATE
            | BIND_SYNC
            | VOLUME_GROW
            | VOLUME_APPEND
            | VOLUME_WRITE
            | VOLUME_GRANT
            | VOLUME_LOCK_READ
            | VOLUME_LOCK_WRITE
            | VOLUME_UNLOCK
            | VOLUME_TEST_LOCK
            | VOLUME_FLOCK
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_would_be_done_twice_is_not_asked_again() {
        let request = |operation, a, b| BindRequest { mount: 0, operation, a, b, c: 0 };
        for (operation, a, b) in [
            (BIND_MKDIR, 0o755, 0),
            (BIND_RENAME, 0, 0),
            (BIND_OPEN, 0o102, 0o644),
            (VOLUME_WRITE, 1, VOLUME_END),
            (VOLUME_APPEND, 1, 10),
        ] {
            assert!(!is_repeatable(&request(operation, a, b)), "{operation}");
        }
        for (operation, a, b) in [
            (BIND_STAT, 0, 0),
            (BIND_OPEN, 2, 0),
            (VOLUME_WRITE, 1, 4096),
            (VOLUME_LOCK_WRITE, 1, 0),
            (VOLUME_RENEW, RENEW_ASK, 0),
        ] {
            assert!(is_repeatable(&request(operation, a, b)), "{operation}");
        }
    }
}
