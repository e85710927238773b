//! Which variables of a program in Go keep times that it has read before the freeze.
//!
//! Nothing has to be asked: the symbol table says where the variables of its packages lie, and the
//! image of the frozen program what is there. A `time.Time` has 24 bytes (`wall`, `ext` and `loc` of
//! Go's time/time.go); a number is a time if it lies between the start of the program and its freeze.

use super::super::findings;
use super::go::{half, is_of_library, program, word};
use super::listed;
use object::elf::{ET_EXEC, FileHeader64, PT_LOAD, ProgramHeader64, SHT_SYMTAB, STT_OBJECT};
use object::read::elf::{FileHeader, ProgramHeader, SectionHeader, Sym};
use object::{LittleEndian, ReadCache, ReadRef};
use std::collections::BTreeSet;
use std::fs::File;
use std::ops::RangeInclusive;
use std::time::{SystemTime, UNIX_EPOCH};
use thaw_home::config::RuntimeKind;
use thaw_home::function::Finding;
use thaw_home::function::StoredFunction;
use thaw_store::{ImageId, IndexId, Session};

/// Most symbols of a program that are looked at.
const SYMBOLS_MAX: usize = 1 << 20;
/// Most bytes of its table of sections, of its symbols and of their names.
const TABLE_MAX: u64 = 256 << 20;
/// The bit of `wall` that says that there is a monotonic clock in `ext` (`hasMonotonic`).
const HAS_MONOTONIC: u64 = 1 << 63;
/// Seconds from the beginning of the year 1 to that of 1885, from which `wall` counts then, and to
/// that of 1970.
const WALL_TO_INTERNAL: i64 = days_before(1885) * 86_400;
const UNIX_TO_INTERNAL: i64 = days_before(1970) * 86_400;

/// Days from the beginning of the year 1 to that of `year`, in the Gregorian calendar.
const fn days_before(year: i64) -> i64 {
    let years = year - 1;
    years * 365 + years / 4 - years / 100 + years / 400
}

/// What there is to say of a function's program, which was started at `since`, if that is in Go.
pub(in super::super) fn times(
    session: &Session,
    function: &StoredFunction,
    (index, image): (IndexId, ImageId),
    since: SystemTime,
) -> Option<Finding> {
    let kind = function.runtime().map_or(RuntimeKind::Image, |runtime| runtime.kind);
    if !matches!(kind, RuntimeKind::Image | RuntimeKind::Binary) {
        return None;
    }
    let seconds = |time: SystemTime| time.duration_since(UNIX_EPOCH).ok().map(|it| it.as_secs());
    let meant = seconds(since)? as i64..=seconds(SystemTime::now())? as i64;
    let variables = variables(&ReadCache::new(program(session, function, index)?))?;
    let image = session.open_image(image).ok()?;
    let found = kept(&variables, &image, &meant)?;
    (!found.is_empty()).then(|| findings::of_times(&listed(found)))
}

/// A variable of a package: its name, where it lies, and its bytes.
type Variable = (String, u64, u64);

/// The variables of the program's own packages; `None` if it is not in Go, has no symbols, or no
/// fixed place.
fn variables<'a>(program: impl ReadRef<'a>) -> Option<Vec<Variable>> {
    let endian = LittleEndian;
    let header = FileHeader64::<LittleEndian>::parse(program).ok()?;
    if header.e_type(endian) != ET_EXEC || header.e_shnum(endian) > 1024 {
        return None;
    }
    let sections = header.sections(endian, program).ok()?;
    sections.section_by_name(endian, b".gopclntab")?;
    let sizes = sections.iter().filter(|section| section.sh_type(endian) == SHT_SYMTAB);
    if sizes.map(|section| section.sh_size(endian)).fold(0, u64::saturating_add) > TABLE_MAX {
        return None;
    }
    let symbols = sections.symbols(endian, program, SHT_SYMTAB).ok()?;
    let variable = |symbol: &object::elf::Sym64<LittleEndian>| {
        let size = symbol.st_size(endian);
        let name = std::str::from_utf8(symbol.name(endian, symbols.strings()).ok()?).ok()?;
        let is_time = matches!(size, 8 | 24) && symbol.st_type() == STT_OBJECT;
        // The compiler's own have another separator, or two of them.
        let is_own = !is_of_library(name) && !name.contains(':') && !name.contains("..");
        (is_time && is_own).then(|| (name.to_owned(), symbol.st_value(endian), size))
    };
    Some(symbols.iter().take(SYMBOLS_MAX).filter_map(variable).collect())
}

/// The names of variables that hold a time of these seconds in an image, sorted.
fn kept(variables: &[Variable], image: &File, meant: &RangeInclusive<i64>) -> Option<Vec<String>> {
    let image = ReadCache::new(image);
    let header = FileHeader64::<LittleEndian>::parse(&image).ok()?;
    let segments = header.program_headers(LittleEndian, &image).ok()?;
    let holds = |&&(_, address, size): &&Variable| {
        bytes_at(segments, &image, address, size).is_some_and(|bytes| is_time(bytes, meant))
    };
    let found = variables.iter().filter(holds).map(|(name, ..)| name.as_str());
    let found: BTreeSet<(bool, &str)> =
        found.map(|name| (!name.starts_with("main."), name)).collect();
    Some(found.into_iter().map(|(_, name)| thaw_sandbox::escape(name.as_bytes())).collect())
}

/// What lies in the image at an address of the program; `None`: it is as in the program's file, or
/// zero.
pub(super) fn bytes_at<'a>(
    segments: &[ProgramHeader64<LittleEndian>],
    image: impl ReadRef<'a>,
    address: u64,
    size: u64,
) -> Option<&'a [u8]> {
    let endian = LittleEndian;
    segments.iter().filter(|segment| segment.p_type(endian) == PT_LOAD).find_map(|segment| {
        let inside = address.checked_sub(segment.p_vaddr(endian))?;
        let is_stored = inside.checked_add(size)? <= segment.p_filesz(endian);
        let at = segment.p_offset(endian).checked_add(inside)?;
        is_stored.then(|| image.read_bytes_at(at, size).ok())?
    })
}

/// Whether a variable holds a time of these seconds since 1970.
fn is_time(bytes: &[u8], meant: &RangeInclusive<i64>) -> bool {
    let Some(first) = word(bytes, 0) else { return false };
    if bytes.len() == 8 {
        let number = first as i64;
        return [1, 1000, 1_000_000, 1_000_000_000]
            .iter()
            .any(|unit| meant.contains(&(number / unit)));
    }
    let (Some(ext), Some(nanoseconds)) = (word(bytes, 8), half(bytes, 0)) else { return false };
    let seconds = match first & HAS_MONOTONIC {
        0 => (ext as i64).wrapping_sub(UNIX_TO_INTERNAL),
        _ => (first << 1 >> 31) as i64 + WALL_TO_INTERNAL - UNIX_TO_INTERNAL,
    };
    nanoseconds & 0x3fff_ffff < 1_000_000_000 && meant.contains(&seconds)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_of_go_are_told_from_numbers() {
        let meant = 1_800_000_000..=1_800_000_060;
        let time = |wall: u64, ext: u64| {
            let mut bytes = wall.to_le_bytes().to_vec();
            bytes.extend(ext.to_le_bytes());
            bytes.extend([0; 8]);
            is_time(&bytes, &meant)
        };
        let now = 1_800_000_030_u64;
        let since_1885 = now + (UNIX_TO_INTERNAL - WALL_TO_INTERNAL) as u64;
        assert!(time(HAS_MONOTONIC | since_1885 << 30 | 999_999_999, 12_345));
        assert!(!time(HAS_MONOTONIC | (since_1885 + 60) << 30, 12_345));
        assert!(time(5, now + UNIX_TO_INTERNAL as u64));
        assert!(!time(5, now) && !time(0, 0) && !time(u64::MAX, u64::MAX));
        let number = |number: i64| is_time(&number.to_le_bytes(), &meant);
        assert!(
            number(1_800_000_000)
                && number(1_800_000_000_123)
                && number(1_800_000_000 * 1_000_000_000)
        );
        assert!(!number(0) && !number(-1) && !number(1_800_000_061) && !number(i64::MIN));
        assert!(!is_time(&[0; 4], &meant));
    }
}
