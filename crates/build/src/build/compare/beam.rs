//! Whether a program runs in Erlang's machine, which counts the time of the day by the monotonic clock unless it is
//! told otherwise (`+c false`, erl(1)): it is behind in copies, for which that clock stood still.

use super::super::findings;
use super::go_times::bytes_at;
use object::LittleEndian;
use object::elf::{FileHeader64, NoteType, PT_LOAD, ProgramHeader64};
use object::read::elf::{FileHeader, ProgramHeader};
use object::{ReadCache, ReadRef};
use thaw_home::function::Finding;
use thaw_store::{ImageId, Session};

/// The auxiliary vector of a process (elf.h).
const NT_AUXV: NoteType = NoteType(6);
/// The address of the name by which a program was executed (getauxval(3)).
const AT_EXECFN: u64 = 31;
/// The file name of Erlang's machine.
const MACHINE: &[u8] = b"beam.smp";
/// Most bytes of arguments and variables that lie before that name.
const STRINGS_MAX: u64 = 128 << 10;
/// Most bytes of the name.
const NAME_MAX: u64 = 4096;
/// `+c false` as erlexec(1) gives it to the machine.
const UNCORRECTED: &[u8] = b"\0-c\0false\0";

/// What there is to say of the first process of an image, if that is Erlang's machine.
pub(in super::super) fn clock(session: &Session, image: ImageId) -> Option<Finding> {
    let image = ReadCache::new(session.open_image(image).ok()?);
    is_corrected(&image)?.then(findings::of_erlang)
}

/// Whether the machine corrects its time by the monotonic clock; `None`: it is another program.
fn is_corrected<'a>(image: impl ReadRef<'a>) -> Option<bool> {
    let endian = LittleEndian;
    let header = FileHeader64::<LittleEndian>::parse(image).ok()?;
    let segments = header.program_headers(endian, image).ok()?;
    let name_at = executed_name(segments, image)?;
    // Behind the name there is little else in the stack.
    let name = (1..=NAME_MAX)
        .rev()
        .step_by(8)
        .find_map(|size| bytes_at(segments, image, name_at, size))?;
    let name = name.split(|&byte| byte == 0).next()?;
    if name.rsplit(|&byte| byte == b'/').next()? != MACHINE {
        return None;
    }
    let stack = segments.iter().find(|segment| {
        let begin = segment.p_vaddr(endian);
        let end = begin.checked_add(segment.p_filesz(endian));
        segment.p_type(endian) == PT_LOAD
            && begin <= name_at
            && end.is_some_and(|end| name_at < end)
    })?;
    let begin = stack.p_vaddr(endian).max(name_at.saturating_sub(STRINGS_MAX));
    let strings = bytes_at(segments, image, begin, name_at - begin)?;
    Some(!strings.windows(UNCORRECTED.len()).any(|words| words == UNCORRECTED))
}

/// Where the name lies by which the first process was executed.
fn executed_name<'a>(
    segments: &[ProgramHeader64<LittleEndian>],
    image: impl ReadRef<'a>,
) -> Option<u64> {
    let endian = LittleEndian;
    let mut all = segments.iter().filter_map(|it| it.notes(endian, image).ok().flatten());
    all.find_map(|mut notes| {
        while let Ok(Some(note)) = notes.next() {
            if note.n_type(endian) == NT_AUXV {
                let (entries, _) = note.desc().as_chunks::<16>();
                let number = |bytes: &[u8]| bytes.try_into().ok().map(u64::from_le_bytes);
                let found = entries.iter().find(|entry| number(&entry[..8]) == Some(AT_EXECFN))?;
                return number(&found[8..]);
            }
        }
        None
    })
}
