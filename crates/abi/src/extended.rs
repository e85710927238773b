//! Extended attributes of the files of a root file system (xattr(7)): which an index may hold, how
//! many, and what `security.capability` says.
//!
//! An index holds `user.*` of regular files and directories, and `security.capability`. Others
//! speak of the host that made them: `trusted.overlay.*` of its layers, `security.selinux` and
//! `security.ima` of its policies. Access control lists (`system.posix_acl_*`) are no attributes
//! that the kernel can enforce.

/// Most bytes of a name (`XATTR_NAME_MAX`, limits.h).
pub const NAME_MAX: usize = 255;
/// Most bytes of a value (`XATTR_SIZE_MAX`).
pub const VALUE_MAX: usize = 65536;
/// Most bytes of all names of a file, each with its terminator (`XATTR_LIST_MAX`).
pub const LIST_MAX: usize = 65536;
/// Most bytes of names and values of one file.
pub const FILE_MAX: usize = 1 << 20;
/// Most bytes of names and values of all files of an index.
pub const INDEX_MAX: usize = 16 << 20;

/// The attribute with a file's capabilities.
pub const CAPABILITY: &[u8] = b"security.capability";

/// File type of a mode (inode(7)).
const S_IFMT: u32 = 0o170000;
const S_IFDIR: u32 = 0o040000;
const S_IFREG: u32 = 0o100000;

/// Whether an index keeps an attribute of this name of a file of this mode.
pub fn is_kept(name: &[u8], mode: u32) -> bool {
    match name.strip_prefix(b"user.") {
        // Links and special files have none (xattr(7)).
        Some(rest) => !rest.is_empty() && matches!(mode & S_IFMT, S_IFREG | S_IFDIR),
        None => name == CAPABILITY,
    }
}

/// Whether an attribute that is kept has a name and a value that Linux lets a program set.
pub fn is_possible(name: &[u8], value: &[u8]) -> bool {
    name.len() <= NAME_MAX
        && !name.contains(&0)
        && value.len() <= VALUE_MAX
        && (name != CAPABILITY || FileCapabilities::parse(value).is_some())
}

/// What `security.capability` says (`struct vfs_ns_cap_data`, linux/capability.h).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FileCapabilities {
    /// Capabilities that the file gives, by bit.
    pub permitted: u64,
    /// Capabilities that it gives to who may inherit them.
    pub inheritable: u64,
    /// Whether what it gives is effective at once.
    pub effective: bool,
    /// The user who is root where they count; 0 in the first user namespace.
    pub root: u32,
}

/// `VFS_CAP_REVISION_MASK`.
const REVISION_MASK: u32 = 0xff00_0000;
/// `VFS_CAP_REVISION_2`: without a root.
const REVISION_2: u32 = 0x0200_0000;
/// `VFS_CAP_REVISION_3`: with one.
const REVISION_3: u32 = 0x0300_0000;
/// `VFS_CAP_FLAGS_EFFECTIVE`.
const EFFECTIVE: u32 = 1;

impl FileCapabilities {
    /// Reads a value; `None` if it is not one that Linux lets a program set.
    pub fn parse(value: &[u8]) -> Option<Self> {
        let (words, rest) = value.as_chunks::<4>();
        let word = |number: usize| words.get(number).map_or(0, |word| u32::from_le_bytes(*word));
        let magic = word(0);
        match (magic & REVISION_MASK, words.len(), rest) {
            (REVISION_2, 5, []) | (REVISION_3, 6, []) => {}
            _ => return None,
        }
        let set = |low: u32, high: u32| u64::from(low) | u64::from(high) << 32;
        Some(Self {
            permitted: set(word(1), word(3)),
            inheritable: set(word(2), word(4)),
            effective: magic & EFFECTIVE != 0,
            root: word(5),
        })
    }
}

#[cfg(test)]
mod tests {
    extern crate std;

    use super::*;

    /// `cap_net_raw+ep`, as setcap(8) writes it.
    const NET_RAW: [u8; 20] = [1, 0, 0, 2, 0, 0x20, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];

    #[test]
    fn capabilities_are_those_of_setcap() {
        let raw = FileCapabilities { permitted: 1 << 13, inheritable: 0, effective: true, root: 0 };
        assert_eq!(FileCapabilities::parse(&NET_RAW), Some(raw));
        let mut of_a_namespace = [&NET_RAW[..], &[0xa0, 0x86, 1, 0]].concat();
        of_a_namespace[3] = 3;
        let parsed = FileCapabilities::parse(&of_a_namespace);
        assert_eq!(parsed, Some(FileCapabilities { root: 100_000, ..raw }));
        let high = [&[0, 0, 0, 2][..], &[0; 8], &[0x80, 0, 0, 0, 1, 0, 0, 0]].concat();
        let parsed = FileCapabilities::parse(&high).unwrap();
        assert_eq!((parsed.permitted, parsed.inheritable), (1 << 39, 1 << 32));
        assert!(!parsed.effective);
    }

    #[test]
    fn other_values_are_none() {
        for len in (0..20).chain([24]) {
            let mut value = [0; 24];
            value[..20].copy_from_slice(&NET_RAW);
            assert_eq!(FileCapabilities::parse(&value[..len]), None, "{len}");
        }
        for revision in [0, 1, 3, 4] {
            let mut value = NET_RAW;
            value[3] = revision;
            assert_eq!(FileCapabilities::parse(&value), None, "{revision}");
        }
    }

    #[test]
    fn attributes_of_the_host_are_not_kept() {
        for name in ["user.a", "security.capability"] {
            assert!(is_kept(name.as_bytes(), S_IFREG | 0o644) && is_kept(name.as_bytes(), S_IFDIR));
        }
        assert!(!is_kept(b"user.a", 0o120777) && is_kept(CAPABILITY, 0o120777));
        for name in [
            "trusted.overlay.opaque",
            "security.selinux",
            "security.ima",
            "system.posix_acl_access",
            "user.",
            "user",
            "",
        ] {
            assert!(!is_kept(name.as_bytes(), S_IFREG), "{name}");
        }
    }

    #[test]
    fn names_and_values_have_bounds() {
        let name = |len: usize| [&b"user."[..], &[b'n'; 300][..len - 5]].concat();
        assert!(is_possible(&name(NAME_MAX), b"") && !is_possible(&name(NAME_MAX + 1), b""));
        assert!(!is_possible(b"user.a\0b", b""));
        let value = [0; VALUE_MAX + 1];
        assert!(is_possible(b"user.a", &value[1..]) && !is_possible(b"user.a", &value));
        assert!(is_possible(CAPABILITY, &NET_RAW) && !is_possible(CAPABILITY, b""));
    }
}
