//! System calls on memory policies (set_mempolicy(2)): answers as on a machine with one node.

use crate::args::{Flags, UserPtr};
use crate::errno::{Errno, Result};
use crate::platform::user::UserAddress;
use crate::task::memory_policy::{INTERLEAVE, MemoryPolicy, Nodes};
use crate::task::{Capabilities, current, current_process};

const MPOL_F_NODE: u32 = 1;
const MPOL_F_ADDR: u32 = 2;
const MPOL_F_MEMS_ALLOWED: u32 = 4;

const MPOL_MF_STRICT: u32 = 1;
const MPOL_MF_MOVE: u32 = 2;
const MPOL_MF_MOVE_ALL: u32 = 4;

const PAGE: u64 = 4096;
/// Bits of a set of nodes that Linux can have (`MAX_NUMNODES`); those beyond must be zero.
const NODES_MAX: usize = 1024;

/// Reads the set of nodes with numbers below `bits` less one, as Linux counts.
fn nodes(at: UserPtr<u64>, bits: u64) -> Result<Nodes> {
    let bits = bits.wrapping_sub(1);
    if bits == 0 || at.is_null() {
        return Ok(Nodes::default());
    }
    if bits > PAGE * 8 {
        return Err(Errno::EINVAL);
    }
    let bits = bits as usize;
    let mut words = at.read_array(bits.div_ceil(64))?;
    if let (Some(last), 1..) = (words.last_mut(), bits % 64) {
        *last &= (1 << (bits % 64)) - 1;
    }
    let (known, beyond) = words.split_at(words.len().min(NODES_MAX / 64));
    if beyond.iter().any(|&word| word != 0) {
        return Err(Errno::EINVAL);
    }
    let has_others = known.iter().enumerate().any(|(index, &word)| match index {
        0 => word & !1 != 0,
        _ => word != 0,
    });
    Ok(Nodes { has_node: known.first().is_some_and(|word| word & 1 != 0), has_others })
}

/// set_mempolicy(2).
pub fn set_mempolicy(mode: u32, mask: UserPtr<u64>, bits: u64) -> Result<()> {
    let policy = MemoryPolicy::new(mode, nodes(mask, bits)?)?;
    current().memory_policy.set(policy);
    Ok(())
}

/// get_mempolicy(2).
pub fn get_mempolicy(
    mode_to: UserPtr<u32>,
    mask_to: UserPtr<u8>,
    bits: u64,
    UserAddress(address): UserAddress,
    Flags(flags): Flags,
) -> Result<()> {
    if !mask_to.is_null() && bits < 1
        || flags & !(MPOL_F_NODE | MPOL_F_ADDR | MPOL_F_MEMS_ALLOWED) != 0
    {
        return Err(Errno::EINVAL);
    }
    let policy = current().memory_policy.get();
    let of_address = flags & MPOL_F_ADDR != 0;
    let (mode, names_node) = if flags & MPOL_F_MEMS_ALLOWED != 0 {
        if flags & (MPOL_F_NODE | MPOL_F_ADDR) != 0 {
            return Err(Errno::EINVAL);
        }
        (0, true)
    } else if of_address && current_process().mm().find(address).is_none() {
        return Err(Errno::EFAULT);
    } else if !of_address && address != 0 {
        return Err(Errno::EINVAL);
    } else if flags & MPOL_F_NODE != 0 {
        // The node of the page, or the next one of a thread that takes turns: both are 0.
        if !of_address && policy.mode != INTERLEAVE {
            return Err(Errno::EINVAL);
        }
        (0, policy.names_node)
    } else {
        (policy.mode | policy.flags, policy.names_node)
    };
    mode_to.write_if_some(&mode)?;
    if mask_to.is_null() { Ok(()) } else { put_nodes(mask_to, bits, names_node) }
}

/// Writes the set of nodes into as many bytes as `bits` need.
fn put_nodes(to: UserPtr<u8>, bits: u64, names_node: bool) -> Result<()> {
    let len = bits.wrapping_sub(1).div_ceil(64).saturating_mul(8);
    if len > PAGE {
        return Err(Errno::EINVAL);
    }
    let mut bytes = [0u8; PAGE as usize];
    bytes[0] = names_node.into();
    to.write_slice(&bytes[..len as usize])
}

/// mbind(2): all memory is on the node anyway.
pub fn mbind(
    UserAddress(start): UserAddress,
    len: u64,
    mode: u32,
    mask: UserPtr<u64>,
    bits: u64,
    Flags(flags): Flags,
) -> Result<()> {
    let nodes = nodes(mask, bits)?;
    if flags & !(MPOL_MF_STRICT | MPOL_MF_MOVE | MPOL_MF_MOVE_ALL) != 0 {
        return Err(Errno::EINVAL);
    }
    let process = current_process();
    if flags & MPOL_MF_MOVE_ALL != 0 {
        process.credentials.borrow_mut().require(Capabilities::SYS_NICE)?;
    }
    let len = len.checked_next_multiple_of(PAGE);
    let end = len.and_then(|len| start.checked_add(len)).ok_or(Errno::EINVAL)?;
    if !start.is_multiple_of(PAGE) {
        return Err(Errno::EINVAL);
    }
    MemoryPolicy::new(mode, nodes)?;
    if start == end || process.mm().covers(start, end) { Ok(()) } else { Err(Errno::EFAULT) }
}
