//! Who a process is and what it may do: user and group ids (credentials(7)) and
//! capabilities (capabilities(7)). All threads of a process share them.
//!
//! Inside the sandbox only: nothing here says anything to the host.

use alloc::vec::Vec;

use bitflags::bitflags;

use super::user_namespace::UserNamespace;
use crate::errno::{Errno, Result};

bitflags! {
    /// A set of capabilities, with the numbers of `linux/capability.h`. Those that
    /// the kernel asks for have a name.
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
    pub struct Capabilities: u64 {
        /// Give files away.
        const CHOWN = 1 << 0;
        /// Pass over the permissions of files.
        const DAC_OVERRIDE = 1 << 1;
        /// Read any file and search any directory.
        const DAC_READ_SEARCH = 1 << 2;
        /// Act as the owner of any file.
        const FOWNER = 1 << 3;
        /// Keep set-user-ID and set-group-ID bits.
        const FSETID = 1 << 4;
        /// Send signals to anybody.
        const KILL = 1 << 5;
        /// Take any group id.
        const SETGID = 1 << 6;
        /// Take any user id.
        const SETUID = 1 << 7;
        /// Change the bounding set and secure bits.
        const SETPCAP = 1 << 8;
        /// Mark files as immutable: one of [`Capabilities::OF_FILES`] only.
        const LINUX_IMMUTABLE = 1 << 9;
        /// Change interfaces.
        const NET_ADMIN = 1 << 12;
        /// Lock any amount of memory.
        const IPC_LOCK = 1 << 14;
        /// Pass over the permissions of System V objects.
        const IPC_OWNER = 1 << 15;
        /// Change the root directory.
        const SYS_CHROOT = 1 << 18;
        /// Trace anybody, and look into their memory.
        const SYS_PTRACE = 1 << 19;
        /// What has no capability of its own.
        const SYS_ADMIN = 1 << 21;
        /// Raise priorities.
        const SYS_NICE = 1 << 23;
        /// Raise limits.
        const SYS_RESOURCE = 1 << 24;
        /// Make device nodes.
        const MKNOD = 1 << 27;
        /// Set the capabilities of files.
        const SETFCAP = 1 << 31;
        /// Pass over mandatory access control: one of [`Capabilities::OF_FILES`] only.
        const MAC_OVERRIDE = 1 << 32;
        /// All that Linux knows, up to `CAP_CHECKPOINT_RESTORE`.
        const ALL = (1 << 41) - 1;
        /// Those that come and go with the user id for files, setfsuid(2).
        const OF_FILES = Self::CHOWN.bits()
            | Self::DAC_OVERRIDE.bits()
            | Self::DAC_READ_SEARCH.bits()
            | Self::FOWNER.bits()
            | Self::FSETID.bits()
            | Self::LINUX_IMMUTABLE.bits()
            | Self::MKNOD.bits()
            | Self::MAC_OVERRIDE.bits();
    }
}

impl Capabilities {
    /// The one with a number; `EINVAL` if there is none.
    pub fn from_number(number: u64) -> Result<Self> {
        let bit = u32::try_from(number).ok().and_then(|number| 1u64.checked_shl(number));
        bit.and_then(Self::from_bits).filter(|one| !one.is_empty()).ok_or(Errno::EINVAL)
    }
}

bitflags! {
    /// How user ids and capabilities hang together: `linux/securebits.h`.
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
    pub struct SecureBits: u32 {
        /// execve(2) gives the user id 0 no capabilities.
        const NO_ROOT = 1 << 0;
        /// A change of user ids leaves capabilities alone.
        const NO_SETUID_FIXUP = 1 << 2;
        /// Capabilities stay when the last user id of 0 goes (`PR_SET_KEEPCAPS`).
        const KEEP_CAPS = 1 << 4;
        /// The lock of [`SecureBits::KEEP_CAPS`].
        const KEEP_CAPS_LOCKED = 1 << 5;
        /// No ambient capability can be added.
        const NO_AMBIENT_RAISE = 1 << 6;
        /// All four and their locks, each beside its bit.
        const ALL = 0xff;
        /// All locks.
        const LOCKS = 0xaa;
    }
}

/// User and group ids, and capabilities.
#[derive(Clone, Debug, Default)]
#[allow(missing_docs)]
pub struct Credentials {
    pub uid: u32,
    pub euid: u32,
    pub suid: u32,
    pub fsuid: u32,
    pub gid: u32,
    pub egid: u32,
    pub sgid: u32,
    pub fsgid: u32,
    pub groups: Vec<u32>,
    /// Where the capabilities count.
    pub user_namespace: UserNamespace,
    /// What can be made effective.
    pub permitted: Capabilities,
    /// What counts.
    pub effective: Capabilities,
    /// What execve(2) keeps if the file says so.
    pub inheritable: Capabilities,
    /// What execve(2) can give at most.
    pub bounding: Capabilities,
    /// What execve(2) keeps.
    pub ambient: Capabilities,
    pub secure_bits: SecureBits,
    /// Whether execve(2) gives nothing any more (`PR_SET_NO_NEW_PRIVS`).
    pub no_new_privileges: bool,
    /// Whether the program has more rights than its user, or was to have (`AT_SECURE`, getauxval(3)).
    pub is_secure: bool,
}

impl Credentials {
    /// Those of a program that a user starts: the superuser may do everything.
    pub fn of_user(uid: u32, gid: u32) -> Self {
        let held = if uid == 0 { Capabilities::ALL } else { Capabilities::empty() };
        Self {
            permitted: held,
            effective: held,
            bounding: Capabilities::ALL,
            ..Self::default().with_users([uid; 3]).with_groups([gid; 3])
        }
    }

    /// Whether the holder may do what a capability stands for with what is the sandbox's as a whole:
    /// it needs the capability in the initial user namespace.
    pub fn can(&self, capability: Capabilities) -> bool {
        self.user_namespace.is_initial() && self.effective.contains(capability)
    }

    /// Whether it may with what is its own user namespace's.
    pub fn can_in_own(&self, capability: Capabilities) -> bool {
        self.effective.contains(capability)
    }

    /// Whether it may with what belongs to a user namespace (`cap_capable`, security/commoncap.c): a
    /// capability counts in its own one and those below, and who made a namespace has all in that.
    pub fn can_in(&self, target: &UserNamespace, capability: Capabilities) -> bool {
        let own = &self.user_namespace;
        let mut target = target;
        loop {
            if target == own {
                return self.effective.contains(capability);
            }
            let Some(parent) = target.parent() else { return false };
            if target.level() <= own.level() {
                return false;
            }
            if parent == own && target.owner() == self.euid {
                return true;
            }
            target = parent;
        }
    }

    /// `EPERM` unless it [can](Self::can).
    pub fn require(&self, capability: Capabilities) -> Result<()> {
        if self.can(capability) { Ok(()) } else { Err(Errno::EPERM) }
    }

    /// `EPERM` unless it can [in its own user namespace](Self::can_in_own).
    pub fn require_in_own(&self, capability: Capabilities) -> Result<()> {
        if self.can_in_own(capability) { Ok(()) } else { Err(Errno::EPERM) }
    }

    /// `EPERM` unless it can [in a user namespace](Self::can_in).
    pub fn require_in(&self, target: &UserNamespace, capability: Capabilities) -> Result<()> {
        if self.can_in(target, capability) { Ok(()) } else { Err(Errno::EPERM) }
    }

    /// Whether those of the same user are no more than these (`cred_cap_issubset`, kernel/cred.c): who has made
    /// a namespace has all rights in it already.
    pub fn includes(&self, new: &Self) -> bool {
        let own = &self.user_namespace;
        if *own == new.user_namespace {
            return self.permitted.contains(new.permitted);
        }
        let mut at = &new.user_namespace;
        while let Some(parent) = at.parent() {
            if parent == own && at.owner() == self.euid {
                return true;
            }
            at = parent;
        }
        false
    }

    /// The same user in another user namespace, with all capabilities there (`set_cred_user_ns`,
    /// kernel/user_namespace.c).
    pub fn in_namespace(self, user_namespace: UserNamespace) -> Self {
        Self {
            user_namespace,
            permitted: Capabilities::ALL,
            effective: Capabilities::ALL,
            inheritable: Capabilities::empty(),
            bounding: Capabilities::ALL,
            ambient: Capabilities::empty(),
            secure_bits: SecureBits::empty(),
            ..self
        }
    }

    /// Real, effective and saved user id.
    pub fn users(&self) -> [u32; 3] {
        [self.uid, self.euid, self.suid]
    }

    /// Real, effective and saved group id.
    pub fn groups_of_process(&self) -> [u32; 3] {
        [self.gid, self.egid, self.sgid]
    }

    fn with_users(mut self, [uid, euid, suid]: [u32; 3]) -> Self {
        (self.uid, self.euid, self.suid, self.fsuid) = (uid, euid, suid, euid);
        self
    }

    fn with_groups(mut self, [gid, egid, sgid]: [u32; 3]) -> Self {
        (self.gid, self.egid, self.sgid, self.fsgid) = (gid, egid, sgid, egid);
        self
    }

    /// Takes real, effective and saved user id; capabilities go with the user id 0
    /// ("Effect of user ID changes on capabilities", capabilities(7)).
    pub fn set_users(&mut self, new: [u32; 3]) {
        let (old, old_effective) = (self.users(), self.euid);
        *self = core::mem::take(self).with_users(new);
        if self.secure_bits.contains(SecureBits::NO_SETUID_FIXUP) {
            return;
        }
        let root = self.user_namespace.root();
        if old.contains(&root) && !new.contains(&root) {
            if !self.secure_bits.contains(SecureBits::KEEP_CAPS) {
                self.permitted = Capabilities::empty();
                self.effective = Capabilities::empty();
            }
            self.ambient = Capabilities::empty();
        }
        match (old_effective == root, self.euid == root) {
            (true, false) => self.effective = Capabilities::empty(),
            (false, true) => self.effective = self.permitted,
            _ => {}
        }
    }

    /// Takes real, effective and saved group id.
    pub fn set_groups(&mut self, new: [u32; 3]) {
        *self = core::mem::take(self).with_groups(new);
    }

    /// Takes the user id that counts for files, setfsuid(2).
    pub fn set_file_user(&mut self, id: u32) {
        let old = core::mem::replace(&mut self.fsuid, id);
        if self.secure_bits.contains(SecureBits::NO_SETUID_FIXUP) {
            return;
        }
        let root = self.user_namespace.root();
        match (old == root, id == root) {
            (true, false) => self.effective -= Capabilities::OF_FILES,
            (false, true) => self.effective |= self.permitted & Capabilities::OF_FILES,
            _ => {}
        }
    }

    /// Drops a capability for ever (`PR_CAPBSET_DROP`).
    pub fn drop_from_bounding(&mut self, capability: Capabilities) -> Result<()> {
        self.require_in_own(Capabilities::SETPCAP)?;
        self.bounding -= capability;
        Ok(())
    }

    /// Takes other sets, capset(2); `EPERM` if they are more than is allowed.
    pub fn set_capabilities(
        &mut self,
        effective: Capabilities,
        permitted: Capabilities,
        inheritable: Capabilities,
    ) -> Result<()> {
        let may_inherit = match self.can_in_own(Capabilities::SETPCAP) {
            true => Capabilities::ALL,
            false => self.inheritable | self.permitted,
        };
        let is_allowed = may_inherit.contains(inheritable)
            && (self.inheritable | self.bounding).contains(inheritable)
            && self.permitted.contains(permitted)
            && permitted.contains(effective);
        if !is_allowed {
            return Err(Errno::EPERM);
        }
        (self.effective, self.permitted, self.inheritable) = (effective, permitted, inheritable);
        self.ambient &= permitted & inheritable;
        Ok(())
    }

    /// Takes other secure bits (`PR_SET_SECUREBITS`).
    pub fn set_secure_bits(&mut self, bits: u32) -> Result<()> {
        let new = SecureBits::from_bits(bits).ok_or(Errno::EPERM)?;
        let old = self.secure_bits;
        let locked = SecureBits::from_bits_retain((old & SecureBits::LOCKS).bits() >> 1);
        let unlocks = !(new & SecureBits::LOCKS).contains(old & SecureBits::LOCKS);
        if unlocks || (old ^ new).intersects(locked) {
            return Err(Errno::EPERM);
        }
        self.require_in_own(Capabilities::SETPCAP)?;
        self.secure_bits = new;
        Ok(())
    }

    /// Keeps or drops capabilities at the next change of users (`PR_SET_KEEPCAPS`).
    pub fn set_keeps_capabilities(&mut self, keeps: bool) -> Result<()> {
        if self.secure_bits.contains(SecureBits::KEEP_CAPS_LOCKED) {
            return Err(Errno::EPERM);
        }
        self.secure_bits.set(SecureBits::KEEP_CAPS, keeps);
        Ok(())
    }

    /// Adds an ambient capability (`PR_CAP_AMBIENT_RAISE`).
    pub fn raise_ambient(&mut self, capability: Capabilities) -> Result<()> {
        let is_allowed = (self.permitted & self.inheritable).contains(capability)
            && !self.secure_bits.contains(SecureBits::NO_AMBIENT_RAISE);
        if !is_allowed {
            return Err(Errno::EPERM);
        }
        self.ambient |= capability;
        Ok(())
    }

    /// Whether its effective ids are not its own.
    pub fn has_other_ids(&self) -> bool {
        self.uid != self.euid || self.gid != self.egid
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn capabilities_go_with_the_last_user_id_of_0() {
        let mut root = Credentials::of_user(0, 0);
        root.set_users([0, 1000, 0]);
        assert!(root.effective.is_empty());
        assert_eq!(root.permitted, Capabilities::ALL);
        root.set_users([0, 0, 0]);
        assert_eq!(root.effective, Capabilities::ALL);
        root.set_users([1000; 3]);
        assert!(root.permitted.is_empty());
        assert_eq!(root.fsuid, 1000);
    }

    #[test]
    fn capabilities_that_are_kept_are_permitted_only() {
        let mut root = Credentials::of_user(0, 0);
        root.set_keeps_capabilities(true).expect("it is not locked");
        root.set_users([1000; 3]);
        assert_eq!((root.permitted, root.effective), (Capabilities::ALL, Capabilities::empty()));
        let some = Capabilities::SETGID | Capabilities::KILL;
        root.set_capabilities(some, some, Capabilities::empty()).expect("fewer than before");
        assert_eq!(root.set_capabilities(some, Capabilities::ALL, some), Err(Errno::EPERM));
    }

    #[test]
    fn the_user_id_for_files_takes_their_capabilities_with_it() {
        let mut root = Credentials::of_user(0, 0);
        root.set_file_user(1000);
        assert!(!root.can(Capabilities::DAC_OVERRIDE) && root.can(Capabilities::KILL));
        root.set_file_user(0);
        assert_eq!(root.effective, Capabilities::ALL);
    }

    #[test]
    fn locked_bits_stay() {
        let mut root = Credentials::of_user(0, 0);
        root.set_secure_bits(0b11).expect("the superuser may");
        assert_eq!(root.set_secure_bits(0), Err(Errno::EPERM));
        assert_eq!(root.set_secure_bits(1 << 8), Err(Errno::EPERM));
        root.set_secure_bits(0b111).expect("another bit");
    }

    #[test]
    fn numbers_of_capabilities_end() {
        assert_eq!(Capabilities::from_number(5), Ok(Capabilities::KILL));
        assert!(Capabilities::from_number(40).is_ok());
        for number in [41, 63, 64, u64::MAX] {
            assert_eq!(Capabilities::from_number(number), Err(Errno::EINVAL));
        }
    }
}
