//! Who a process is after execve(2).

use crate::fs::inode::{Attributes, S_ISGID, S_ISUID};
use crate::task::Credentials;
use crate::task::credentials::{Capabilities, SecureBits};

/// Who a process is after it executes a file with these attributes
/// ("Transformation of capabilities during execve()", capabilities(7)). Files
/// have no capabilities of their own here.
pub fn after_exec(old: &Credentials, file: &Attributes) -> Credentials {
    let mut new = old.clone();
    if !old.no_new_privileges {
        if file.mode & S_ISUID != 0 {
            new.euid = file.uid;
        }
        // Without group execute the bit means mandatory locking.
        if file.mode & (S_ISGID | 0o010) == S_ISGID | 0o010 {
            new.egid = file.gid;
        }
    }
    (new.suid, new.fsuid, new.sgid, new.fsgid) = (new.euid, new.euid, new.egid, new.egid);
    if new.has_other_ids() {
        new.ambient = Capabilities::empty();
    }
    let by_root = !old.secure_bits.contains(SecureBits::NO_ROOT);
    new.permitted = match by_root && (new.uid == 0 || new.euid == 0) {
        true => new.inheritable | new.bounding,
        false => new.ambient,
    };
    new.effective = if by_root && new.euid == 0 { new.permitted } else { new.ambient };
    new.secure_bits -= SecureBits::KEEP_CAPS;
    new
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::errno::Errno;

    fn file(mode: u32, uid: u32, gid: u32) -> Attributes {
        Attributes { mode, uid, gid, ..Default::default() }
    }

    #[test]
    fn kept_and_locked_bits() {
        let mut root = Credentials::of_user(0, 0);
        root.set_keeps_capabilities(true).expect("it is not locked");
        root.set_users([1000; 3]);
        let executed = after_exec(&root, &file(0o755, 0, 0));
        assert!(executed.permitted.is_empty());
        assert!(!executed.secure_bits.contains(SecureBits::KEEP_CAPS));
        let mut root = Credentials::of_user(0, 0);
        root.set_secure_bits(0b111).expect("the superuser may");
        assert!(after_exec(&root, &file(0o755, 0, 0)).permitted.is_empty());
    }

    #[test]
    fn files_give_their_owner_to_who_executes_them() {
        let user = Credentials::of_user(1000, 1000);
        let new = after_exec(&user, &file(0o4755, 0, 0));
        assert_eq!((new.uid, new.euid, new.suid, new.effective), (1000, 0, 0, Capabilities::ALL));
        assert!(new.is_secure());
        let held = Credentials { no_new_privileges: true, ..user };
        assert_eq!(after_exec(&held, &file(0o4755, 0, 0)).euid, 1000);
        assert_eq!(after_exec(&held, &file(0o2745, 0, 5)).egid, 1000);
    }

    #[test]
    fn ambient_capabilities_survive_execution() {
        let mut user = Credentials::of_user(0, 0);
        user.set_keeps_capabilities(true).expect("it is not locked");
        user.set_users([1000; 3]);
        let one = Capabilities::KILL;
        assert_eq!(user.raise_ambient(one), Err(Errno::EPERM));
        user.set_capabilities(one, one, one).expect("fewer than before");
        user.raise_ambient(one).expect("permitted and inheritable");
        let new = after_exec(&user, &file(0o755, 0, 0));
        assert_eq!((new.permitted, new.effective, new.ambient), (one, one, one));
        assert!(!new.is_secure());
        assert!(after_exec(&user, &file(0o4755, 7, 0)).ambient.is_empty());
    }
}
