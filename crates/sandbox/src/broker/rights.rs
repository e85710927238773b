//! Under whose rights the broker opens files.

use std::io;

use rustix::process::geteuid;
use rustix::thread::{CapabilitySet, capabilities, set_thread_groups};
use serde::{Deserialize, Serialize};

use crate::confine::hold_capabilities;
use crate::sys;

/// User and group id of nobody (the overflow id of user_namespaces(7)).
pub(super) const NOBODY: u32 = 65_534;

/// Capabilities that opening and changing files can take (capabilities(7)).
const ABOUT_FILES: CapabilitySet = CapabilitySet::DAC_OVERRIDE
    .union(CapabilitySet::DAC_READ_SEARCH)
    .union(CapabilitySet::FOWNER)
    .union(CapabilitySet::FSETID);

/// Under whose rights files of the host are opened for a sandbox.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum FileRights {
    /// Those of the calling user without any capability; for root those of
    /// `nobody`, who is in no group.
    #[default]
    Unprivileged,
    /// All that the calling process has.
    Caller,
}

impl FileRights {
    /// Gives the calling process, which has one thread, these rights, for good. Of
    /// capabilities it keeps those that are about files at most.
    pub(super) fn take_for_process(self) -> io::Result<()> {
        self.take()?;
        if self == Self::Unprivileged {
            return Ok(());
        }
        let kept = capabilities(None)?.permitted.intersection(ABOUT_FILES);
        Ok(hold_capabilities(kept)?)
    }

    /// Gives the calling thread these rights, for good.
    ///
    /// Credentials belong to threads (credentials(7)); the rest of the process keeps
    /// its own. The real and effective user ids stay: with those of nobody, a
    /// process of that user could send signals to the thread.
    pub(super) fn take(self) -> io::Result<()> {
        if self == Self::Caller {
            return Ok(());
        }
        if geteuid().is_root() {
            set_thread_groups(&[])?;
            sys::set_filesystem_ids(NOBODY, NOBODY)?;
        }
        Ok(hold_capabilities(CapabilitySet::empty())?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn root_becomes_nobody_in_one_thread_only() {
        if !geteuid().is_root() {
            eprintln!("not checked: it takes root to give up its rights");
            return;
        }
        let directory = tempfile::tempdir().unwrap();
        let secret = directory.path().join("secret");
        fs::write(&secret, "secret").unwrap();
        fs::set_permissions(directory.path(), PermissionsExt::from_mode(0o755)).unwrap();
        fs::set_permissions(&secret, PermissionsExt::from_mode(0o640)).unwrap();
        let read = |rights: FileRights| {
            let secret = secret.clone();
            let thread = std::thread::spawn(move || {
                rights.take().unwrap();
                fs::read(&secret).map_err(|error| error.kind())
            });
            thread.join().unwrap()
        };
        assert_eq!(read(FileRights::Unprivileged), Err(io::ErrorKind::PermissionDenied));
        assert_eq!(read(FileRights::Caller).unwrap(), b"secret");
        assert_eq!(fs::read(&secret).unwrap(), b"secret");
    }
}
