//! On which nodes a thread wants its memory (set_mempolicy(2)): there is one node, 0, so this is kept and
//! given back.

use crate::errno::{Errno, Result};

/// `MPOL_DEFAULT`.
pub const DEFAULT: u32 = 0;
const PREFERRED: u32 = 1;
const BIND: u32 = 2;
/// `MPOL_INTERLEAVE`.
pub const INTERLEAVE: u32 = 3;
const LOCAL: u32 = 4;
const PREFERRED_MANY: u32 = 5;

/// `MPOL_F_NUMA_BALANCING`.
const BALANCING: u32 = 1 << 13;
/// `MPOL_F_RELATIVE_NODES`.
const RELATIVE: u32 = 1 << 14;
/// `MPOL_F_STATIC_NODES`.
const STATIC: u32 = 1 << 15;

/// A policy.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MemoryPolicy {
    /// `MPOL_*`, without flags.
    pub mode: u32,
    /// `MPOL_F_*`.
    pub flags: u32,
    /// Whether it names the node; it cannot name another one.
    pub names_node: bool,
}

/// The nodes that a program has named.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Nodes {
    /// Whether the node that there is is among them.
    pub has_node: bool,
    /// Whether others are, too.
    pub has_others: bool,
}

impl MemoryPolicy {
    /// The policy with a number, which holds flags, too; `EINVAL` as `mpol_new` of Linux.
    pub fn new(number: u32, nodes: Nodes) -> Result<Self> {
        let flags = number & (BALANCING | RELATIVE | STATIC);
        let mode = number & !flags;
        let is_contradiction = flags & (RELATIVE | STATIC) == RELATIVE | STATIC;
        if mode > PREFERRED_MANY || is_contradiction || flags & BALANCING != 0 && mode != BIND {
            return Err(Errno::EINVAL);
        }
        let is_empty = nodes == Nodes::default();
        let nodes_count = flags & (RELATIVE | STATIC) != 0;
        let policy = Self { mode, flags, names_node: nodes.has_node };
        match mode {
            DEFAULT if is_empty => Ok(Self::default()),
            PREFERRED if is_empty && !nodes_count => Ok(Self { mode: LOCAL, ..policy }),
            LOCAL if is_empty && !nodes_count => Ok(policy),
            DEFAULT | LOCAL => Err(Errno::EINVAL),
            // With flags, others are counted among those that there are.
            _ if nodes.has_node || nodes.has_others && flags & RELATIVE != 0 => {
                Ok(Self { names_node: true, ..policy })
            }
            _ => Err(Errno::EINVAL),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn policies_need_nodes_or_must_not_have_any() {
        let (none, node) = (Nodes::default(), Nodes { has_node: true, has_others: false });
        let other = Nodes { has_node: false, has_others: true };
        let new = MemoryPolicy::new;
        assert_eq!(new(DEFAULT, none), Ok(MemoryPolicy::default()));
        assert_eq!(new(DEFAULT, node), Err(Errno::EINVAL));
        assert_eq!(new(PREFERRED, none).unwrap().mode, LOCAL);
        assert!(new(BIND, node).unwrap().names_node);
        assert_eq!(new(BIND, none), Err(Errno::EINVAL));
        assert_eq!(new(BIND, other), Err(Errno::EINVAL));
        assert_eq!(new(LOCAL, node), Err(Errno::EINVAL));
        assert_eq!(new(BIND | STATIC | RELATIVE, node), Err(Errno::EINVAL));
        assert_eq!(new(INTERLEAVE | BALANCING, node), Err(Errno::EINVAL));
        assert_eq!(new(99, none), Err(Errno::EINVAL));
    }
}
