//! Who a process is after execve(2).

use thaw_abi::extended::FileCapabilities;

use crate::errno::{Errno, Result};
use crate::fs::inode::{Attributes, Inode, S_ISGID, S_ISUID};
use crate::task::Credentials;
use crate::task::credentials::{Capabilities, SecureBits};

/// What a file gives to those who execute it.
#[derive(Clone, Copy, Debug, Default)]
pub struct Privileges {
    attributes: Attributes,
    capabilities: Option<FileCapabilities>,
}

impl Privileges {
    /// Those of a file; `EINVAL` if its capabilities make no sense.
    pub fn of(file: &dyn Inode) -> Result<Self> {
        let capabilities = match file.extended_attributes() {
            Some(all) => all.capabilities()?,
            None => None,
        };
        // Those that are for the root of another user namespace alone do not count.
        let capabilities = capabilities.filter(|capabilities| capabilities.root == 0);
        Ok(Self { attributes: file.attributes(), capabilities })
    }
}

/// Who a process is after it executes a file
/// ("Transformation of capabilities during execve()", capabilities(7)). `EPERM` if the file's
/// capabilities are to be effective and the process may not have one of them.
pub fn after_exec(old: &Credentials, file: &Privileges) -> Result<Credentials> {
    let mut new = old.clone();
    let users = &old.user_namespace;
    let (uid, gid) = (file.attributes.uid, file.attributes.gid);
    // A user that the namespace does not know gives nobody in it anything.
    if !old.no_new_privileges && users.knows_user(uid) && users.knows_group(gid) {
        take_ids(&mut new, &file.attributes);
    }
    (new.suid, new.fsuid, new.sgid, new.fsgid) = (new.euid, new.euid, new.egid, new.egid);
    let root = new.user_namespace.root();
    let has_capabilities = file.capabilities.is_some();
    let file = file.capabilities.unwrap_or_default();
    let given = Capabilities::from_bits_truncate(file.permitted);
    let inherited = Capabilities::from_bits_truncate(file.inheritable) & new.inheritable;
    new.permitted = given & new.bounding | inherited;
    let mut is_effective = file.effective;
    if is_effective && !new.permitted.contains(given) {
        return Err(Errno::EPERM);
    }
    // A set-user-ID program of root that has capabilities of its own gives others those alone.
    let has_those_alone = has_capabilities && new.uid != root && new.euid == root;
    let is_without_root = old.secure_bits.contains(SecureBits::NO_ROOT) || has_those_alone;
    if !is_without_root && (new.uid == root || new.euid == root) {
        new.permitted = new.inheritable | new.bounding;
        is_effective |= new.euid == root;
    }
    if old.no_new_privileges {
        new.permitted &= old.permitted;
    }
    if has_capabilities || new.has_other_ids() {
        new.ambient = Capabilities::empty();
    }
    let has_more = is_effective || !new.ambient.contains(new.permitted);
    new.is_secure = new.has_other_ids() || new.uid != root && has_more;
    new.permitted |= new.ambient;
    new.effective = if is_effective { new.permitted } else { new.ambient };
    new.secure_bits -= SecureBits::KEEP_CAPS;
    Ok(new)
}

/// The ids that set-user-ID and set-group-ID bits give.
fn take_ids(new: &mut Credentials, file: &Attributes) {
    if file.mode & S_ISUID != 0 {
        new.euid = file.uid;
    }
    // Without group execute the bit means mandatory locking.
    if file.mode & (S_ISGID | 0o010) == S_ISGID | 0o010 {
        new.egid = file.gid;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(mode: u32, uid: u32, gid: u32) -> Privileges {
        let attributes = Attributes { mode, uid, gid, ..Default::default() };
        Privileges { attributes, capabilities: None }
    }

    fn after_exec(old: &Credentials, file: &Privileges) -> Credentials {
        super::after_exec(old, file).expect("the file may be executed")
    }

    /// A file with permitted and inheritable capabilities.
    fn capable(permitted: Capabilities, inheritable: Capabilities, effective: bool) -> Privileges {
        let (permitted, inheritable) = (permitted.bits(), inheritable.bits());
        let capabilities = FileCapabilities { permitted, inheritable, effective, root: 0 };
        Privileges { capabilities: Some(capabilities), ..file(0o755, 0, 0) }
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
        assert!(new.is_secure);
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
        assert!(!new.is_secure);
        assert!(after_exec(&user, &file(0o4755, 7, 0)).ambient.is_empty());
    }

    #[test]
    fn files_give_their_capabilities() {
        let user = Credentials::of_user(1000, 1000);
        let none = Capabilities::empty();
        let (kill, chown) = (Capabilities::KILL, Capabilities::CHOWN);
        let sets = |new: &Credentials| (new.permitted, new.effective);
        let new = after_exec(&user, &capable(kill, none, true));
        assert_eq!(sets(&new), (kill, kill));
        assert!(new.is_secure && new.inheritable.is_empty());
        // They are those of this program, and not of the next one.
        assert_eq!(sets(&after_exec(&new, &file(0o755, 0, 0))), (none, none));
        let silent = after_exec(&user, &capable(kill, none, false));
        assert_eq!(sets(&silent), (kill, none));
        assert!(silent.is_secure);
        let held = Credentials { no_new_privileges: true, ..user.clone() };
        let new = after_exec(&held, &capable(kill, none, true));
        assert_eq!(sets(&new), (none, none));
        assert!(new.is_secure, "it was to have more");
        // Inheritable ones count on both sides only.
        let heir = Credentials { inheritable: kill | chown, ..user.clone() };
        assert_eq!(sets(&after_exec(&heir, &capable(none, kill, true))), (kill, kill));
        assert_eq!(sets(&after_exec(&user, &capable(none, kill, true))), (none, none));
        // Bits that this kernel does not know are none.
        let unknown = Capabilities::from_bits_retain(1 << 63);
        assert_eq!(sets(&after_exec(&user, &capable(unknown, none, true))), (none, none));
    }

    #[test]
    fn what_the_bounding_set_lacks_is_not_given() {
        let kill = Capabilities::KILL;
        let none = Capabilities::empty();
        let bounded =
            Credentials { bounding: Capabilities::CHOWN, ..Credentials::of_user(1000, 1000) };
        let refused = super::after_exec(&bounded, &capable(kill, none, true));
        assert_eq!(refused.map(|new| new.permitted), Err(Errno::EPERM));
        assert!(after_exec(&bounded, &capable(kill, none, false)).permitted.is_empty());
    }

    #[test]
    fn files_with_capabilities_end_ambient_ones_and_what_root_has_besides() {
        let (kill, none) = (Capabilities::KILL, Capabilities::empty());
        let user = Credentials::of_user(1000, 1000);
        let ambient = Credentials {
            permitted: kill,
            effective: kill,
            inheritable: kill,
            ambient: kill,
            ..user.clone()
        };
        assert_eq!(after_exec(&ambient, &file(0o755, 0, 0)).effective, kill);
        let new = after_exec(&ambient, &capable(none, none, false));
        assert_eq!((new.permitted, new.ambient), (none, none));
        let of_root =
            Privileges { attributes: file(0o4755, 0, 0).attributes, ..capable(kill, none, true) };
        let new = after_exec(&user, &of_root);
        assert_eq!((new.euid, new.permitted, new.effective), (0, kill, kill));
        let root = Credentials::of_user(0, 0);
        assert_eq!(after_exec(&root, &capable(kill, none, false)).effective, Capabilities::ALL);
        let without = Credentials { permitted: kill, no_new_privileges: true, ..root };
        assert_eq!(after_exec(&without, &file(0o755, 0, 0)).effective, kill);
    }
}
