//! Finding jumps to given instructions.
//!
//! The text is not decoded: every place where a relative jump could stand counts,
//! whether one stands there or not. So no direct jump is overlooked; a mistaken
//! find costs a patch and nothing else.

use crate::errno::Result;
use crate::user::UserAddress;

/// How far jumps are looked for: further than functions are long.
const REACH: u64 = 256 << 10;
/// Bytes read at a time.
const CHUNK: usize = 4096;
/// Bytes that a 4-byte displacement reaches into the next chunk.
const OVERLAP: usize = 3;

/// Whether a direct jump in `text` (start, end) near by may lead to one of `targets`.
///
/// Errors: `EFAULT` if the text cannot be read.
pub fn lead_to(targets: impl Iterator<Item = u64> + Clone, text: (u64, u64)) -> Result<bool> {
    let Some(first) = targets.clone().next() else { return Ok(false) };
    let start = text.0.max(first.saturating_sub(REACH));
    let end = text.1.min(first.saturating_add(REACH));
    let mut chunk = [0u8; CHUNK + OVERLAP];
    let mut at = start;
    while at < end {
        let len = ((end - at) as usize).min(CHUNK + OVERLAP);
        UserAddress(at).read_bytes(&mut chunk[..len])?;
        if targets.clone().any(|target| chunk_leads_to(&chunk[..len], at, target)) {
            return Ok(true);
        }
        at += CHUNK as u64;
    }
    Ok(false)
}

/// Whether bytes at address `at` may hold a jump to `target`.
fn chunk_leads_to(bytes: &[u8], at: u64, target: u64) -> bool {
    leads_far(bytes, at, target) || leads_near(bytes, at, target)
}

/// A 4-byte displacement counts from its own end: `jmp`, `call`, `jcc`.
fn leads_far(bytes: &[u8], at: u64, target: u64) -> bool {
    let wanted = target.wrapping_sub(at).wrapping_sub(4) as u32;
    bytes.windows(4).enumerate().any(|(i, four)| {
        u32::from_le_bytes([four[0], four[1], four[2], four[3]]) == wanted.wrapping_sub(i as u32)
    })
}

/// A 1-byte displacement: `jcc`, `loop` and its relatives, `jmp`.
fn leads_near(bytes: &[u8], at: u64, target: u64) -> bool {
    let (low, high) = (target.saturating_sub(129).max(at), target.saturating_add(126));
    let end = at + bytes.len() as u64;
    if low >= end || high < at {
        return false;
    }
    let range = (low - at) as usize..((high - at) as usize + 2).min(bytes.len());
    bytes[range].windows(2).zip(low..).any(|(two, place)| {
        matches!(two[0], 0x70..=0x7f | 0xe0..=0xe3 | 0xeb)
            && place.wrapping_add(2).wrapping_add_signed((two[1] as i8).into()) == target
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn finds_near_and_far_jumps() {
        let mut text = [0x90u8; 600];
        assert!(!chunk_leads_to(&text, 0x1000, 0x1100));
        // jne +6 at 0x10f8
        text[0xf8..0xfa].copy_from_slice(&[0x75, 0x06]);
        assert!(chunk_leads_to(&text, 0x1000, 0x1100));
        assert!(!chunk_leads_to(&text, 0x1000, 0x1101));
        // jmp -0x80 at 0x117e
        text[0x17e..0x180].copy_from_slice(&[0xeb, 0x80]);
        assert!(chunk_leads_to(&text, 0x1000, 0x1100));
        let mut text = [0x90u8; 600];
        // jmp to 0x9000 and back to 0x800
        text[0x20..0x25].copy_from_slice(&[0xe9, 0xdb, 0x7f, 0, 0]);
        assert!(chunk_leads_to(&text, 0x1000, 0x9000));
        text[0x20..0x26].copy_from_slice(&[0x0f, 0x84, 0xda, 0xf7, 0xff, 0xff]);
        assert!(chunk_leads_to(&text, 0x1000, 0x800));
        assert!(!chunk_leads_to(&text, 0x1000, 0x801));
    }

    #[test]
    fn looks_at_the_edges_of_a_chunk() {
        let mut text = [0x90u8; 16];
        text[14..].copy_from_slice(&[0xeb, 0x10]);
        assert!(chunk_leads_to(&text, 0, 0x20));
        text[..2].copy_from_slice(&[0xeb, 0x00]);
        assert!(chunk_leads_to(&text, 0, 2));
        assert!(!chunk_leads_to(&text, 0x4000, 0x2));
    }
}
