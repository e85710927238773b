//! Symbols that a mapped ELF file exports (elf(5)), looked up as the dynamic linker
//! does, in the hash table of `DT_GNU_HASH`. Guest memory may say anything: what
//! makes no sense finds nothing.

use core::ops::Range;

use bytemuck::{Pod, Zeroable};

use crate::platform::user::UserAddress;

/// A segment that is mapped.
pub const PT_LOAD: u32 = 1;
const PT_DYNAMIC: u32 = 2;
const DT_STRTAB: u64 = 5;
const DT_SYMTAB: u64 = 6;
const DT_GNU_HASH: u64 = 0x6fff_fef5;
/// Most program headers, dynamic entries and symbols of one hash that are looked at.
const ENTRIES_MAX: u64 = 256;

/// `Elf64_Phdr`.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
#[allow(missing_docs)]
pub struct ProgramHeader {
    pub kind: u32,
    pub flags: u32,
    pub offset: u64,
    pub address: u64,
    pub physical: u64,
    pub file_size: u64,
    pub memory_size: u64,
    pub align: u64,
}

/// `Elf64_Sym`.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct Symbol {
    name: u32,
    kind: u16,
    section: u16,
    value: u64,
    size: u64,
}

/// The head of the table at `DT_GNU_HASH`.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct HashHeader {
    buckets: u32,
    first_symbol: u32,
    bloom_words: u32,
    bloom_shift: u32,
}

/// The tables of a mapped file.
pub struct Symbols {
    /// What is added to addresses of the file.
    bias: u64,
    hash: u64,
    symbols: u64,
    strings: u64,
}

impl Symbols {
    /// Of the file whose first byte is mapped at `start`.
    pub fn of_file_at(start: u64) -> Option<Self> {
        const MAGIC: [u8; 4] = *b"\x7fELF";
        let file = UserAddress(start);
        if file.read::<[u8; 4]>().ok()? != MAGIC {
            return None;
        }
        let headers: u64 = file.offset(32).read().ok()?;
        let count: u16 = file.offset(56).read().ok()?;
        let mut first_load = None;
        let mut dynamic = None;
        for index in 0..u64::from(count).min(ENTRIES_MAX) {
            let at = headers.wrapping_add(index * size_of::<ProgramHeader>() as u64);
            let header: ProgramHeader = file.offset(at).read().ok()?;
            match header.kind {
                PT_LOAD if first_load.is_none() => first_load = Some(header.address & !4095),
                PT_DYNAMIC => dynamic = Some(header.address),
                _ => {}
            }
        }
        Self::of_dynamic_section(start.wrapping_sub(first_load?), dynamic?)
    }

    fn of_dynamic_section(bias: u64, section: u64) -> Option<Self> {
        let section = UserAddress(section.wrapping_add(bias));
        let mut tables = Self { bias, hash: 0, symbols: 0, strings: 0 };
        for index in 0..ENTRIES_MAX {
            let [tag, value]: [u64; 2] = section.offset(index * 16).read().ok()?;
            // glibc has relocated the addresses in place, others have not.
            let address = if value < bias { value.wrapping_add(bias) } else { value };
            match tag {
                0 => break,
                DT_GNU_HASH => tables.hash = address,
                DT_SYMTAB => tables.symbols = address,
                DT_STRTAB => tables.strings = address,
                _ => {}
            }
        }
        (tables.hash != 0 && tables.symbols != 0 && tables.strings != 0).then_some(tables)
    }

    /// The addresses of an exported function or variable.
    pub fn find(&self, name: &[u8]) -> Option<Range<u64>> {
        let table = UserAddress(self.hash);
        let header: HashHeader = table.read().ok()?;
        let buckets = table.offset(16 + u64::from(header.bloom_words) * 8);
        let chains = buckets.offset(u64::from(header.buckets) * 4);
        let hash = gnu_hash(name);
        let bucket = u64::from(hash.checked_rem(header.buckets)?);
        let first: u32 = buckets.offset(bucket * 4).read().ok()?;
        let first_in_chains = first.checked_sub(header.first_symbol)?;
        for index in 0..ENTRIES_MAX {
            let at = (u64::from(first_in_chains) + index) * 4;
            let link: u32 = chains.offset(at).read().ok()?;
            if link | 1 == hash | 1
                && let Some(found) = self.symbol(u64::from(first) + index, name)
            {
                return Some(found);
            }
            if link & 1 != 0 {
                break;
            }
        }
        None
    }

    /// The addresses of a symbol, if that is its name.
    fn symbol(&self, index: u64, name: &[u8]) -> Option<Range<u64>> {
        let at = self.symbols.wrapping_add(index * size_of::<Symbol>() as u64);
        let symbol: Symbol = UserAddress(at).read().ok()?;
        let text = UserAddress(self.strings).offset(symbol.name.into());
        let is_named = text.read_string(name.len()).is_ok_and(|text| text == name);
        let start = self.bias.wrapping_add(symbol.value);
        (is_named && symbol.section != 0).then(|| start..start.wrapping_add(symbol.size))
    }
}

/// The hash of a name in `DT_GNU_HASH`.
fn gnu_hash(name: &[u8]) -> u32 {
    name.iter().fold(5381, |hash: u32, &byte| hash.wrapping_mul(33).wrapping_add(byte.into()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_hashed_as_the_linker_does() {
        // From the description of the format.
        assert_eq!(gnu_hash(b""), 0x1505);
        assert_eq!(gnu_hash(b"printf"), 0x156b_2bb8);
        assert_eq!(gnu_hash(b"exit"), 0x7c96_7e3f);
        assert_eq!(size_of::<Symbol>(), 24);
        assert_eq!(size_of::<ProgramHeader>(), 56);
    }
}
