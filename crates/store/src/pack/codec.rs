//! Packing and unpacking the pages of an image, frame by frame.
//!
//! A page whose content a source has is left out. One that differs from a source's in a few words,
//! as objects do whose references were counted, is stored as the bits that differ: nearly all of
//! them are zero, which zstd stores in a few bytes.

use std::fs::File;
use std::io::{self, Write};
use std::os::unix::fs::FileExt;

use super::format::{
    DIFFERENCE, FRAME_MAX, FRAME_PAGES, HEADER_LEN, LEVEL, OWN, PAGE, Range, SAME, Tables, ZERO,
};
use crate::sparse::data_extents;

/// Reads pages of a source, by its number; bytes behind its end are zero.
pub(crate) type ReadSource<'a> = dyn FnMut(u32, u64, &mut [u8]) -> io::Result<()> + 'a;

/// Reads from a file; bytes behind its end are zero.
pub(crate) fn read_padded(file: &File, mut buffer: &mut [u8], mut at: u64) -> io::Result<()> {
    while !buffer.is_empty() {
        match file.read_at(buffer, at) {
            Ok(0) => break,
            Ok(count) => {
                buffer = &mut buffer[count..];
                at += count as u64;
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    buffer.fill(0);
    Ok(())
}

/// What the sources have in the place of a frame's pages.
struct Beneath {
    content: Vec<u8>,
    /// Whether there is something.
    known: [bool; FRAME_PAGES],
}

impl Beneath {
    fn new() -> Self {
        Self { content: vec![0; FRAME_PAGES * PAGE], known: [false; FRAME_PAGES] }
    }

    /// Reads what the ranges have for the pages from `first` on.
    fn read(&mut self, first: u64, ranges: &[Range], read: &mut ReadSource<'_>) -> io::Result<()> {
        self.known.fill(false);
        let end = first + FRAME_PAGES as u64;
        let from = ranges.partition_point(|range| range.end() <= first);
        for range in ranges[from..].iter().take_while(|range| range.first < end) {
            let start = range.first.max(first);
            let pages = (start - first) as usize..(range.end().min(end) - first) as usize;
            let place = &mut self.content[pages.start * PAGE..pages.end * PAGE];
            read(range.source, (range.from + start - range.first) * PAGE as u64, place)?;
            self.known[pages].fill(true);
        }
        Ok(())
    }

    fn page(&self, number: usize) -> Option<&[u8]> {
        self.known[number].then(|| &self.content[number * PAGE..(number + 1) * PAGE])
    }
}

fn words(page: &[u8]) -> impl Iterator<Item = u64> + '_ {
    page.chunks_exact(8).map(|word| u64::from_le_bytes(word.try_into().expect("8 bytes")))
}

/// How a page is stored that has `beneath` in the sources: whatever leaves fewer words.
fn operation(page: &[u8], beneath: Option<&[u8]>) -> u8 {
    let own = words(page).filter(|&word| word != 0).count();
    let Some(beneath) = beneath else { return if own == 0 { ZERO } else { OWN } };
    let different = words(page).zip(words(beneath)).filter(|(a, b)| a != b).count();
    match (own, different) {
        (0, _) => ZERO,
        (_, 0) => SAME,
        (own, different) if different < own => DIFFERENCE,
        _ => OWN,
    }
}

fn flip(page: &mut [u8], beneath: &[u8]) {
    page.iter_mut().zip(beneath).for_each(|(byte, other)| *byte ^= other);
}

/// What was packed.
pub(crate) struct Content {
    /// Bytes of each frame.
    pub frames: Vec<u32>,
    /// Pages that are not zero.
    pub stored_pages: u64,
}

/// Writes the frames of an image behind the header's place in `to`, which is at its start.
///
/// # Errors
/// The host's.
pub(crate) fn pack(
    image: &File,
    pages: u64,
    ranges: &[Range],
    read: &mut ReadSource<'_>,
    to: &mut dyn Write,
) -> io::Result<Content> {
    let mut compressor = zstd::bulk::Compressor::new(LEVEL)?;
    compressor.include_checksum(true)?;
    let extents = data_extents(image, pages * PAGE as u64)?;
    let (mut beneath, mut buffer) = (Beneath::new(), vec![0; FRAME_PAGES * PAGE]);
    let mut packed = Content { frames: Vec::new(), stored_pages: 0 };
    to.write_all(&[0; HEADER_LEN])?;
    for first in (0..pages).step_by(FRAME_PAGES) {
        let count = FRAME_PAGES.min((pages - first) as usize);
        let buffer = &mut buffer[..count * PAGE];
        let start = first * PAGE as u64;
        let end = start + buffer.len() as u64;
        let next = extents.partition_point(|data| data.end <= start);
        let is_hole = extents.get(next).is_none_or(|data| data.start >= end);
        let frame = match is_hole {
            true => vec![ZERO; count],
            false => {
                image.read_exact_at(buffer, start)?;
                beneath.read(first, ranges, read)?;
                frame_of(buffer, &beneath)
            }
        };
        packed.stored_pages += frame[..count].iter().filter(|&&op| op != ZERO).count() as u64;
        let compressed = compressor.compress(&frame)?;
        to.write_all(&compressed)?;
        packed.frames.push(compressed.len() as u32);
    }
    Ok(packed)
}

/// A frame before it is compressed.
fn frame_of(pages: &[u8], beneath: &Beneath) -> Vec<u8> {
    let mut frame = Vec::with_capacity(FRAME_MAX);
    let all = || pages.chunks_exact(PAGE).enumerate();
    frame.extend(all().map(|(number, page)| operation(page, beneath.page(number))));
    for (number, page) in all() {
        match (frame[number], beneath.page(number)) {
            (OWN, _) => frame.extend_from_slice(page),
            (DIFFERENCE, Some(other)) => {
                let at = frame.len();
                frame.extend_from_slice(page);
                flip(&mut frame[at..], other);
            }
            _ => {}
        }
    }
    frame
}

/// Why an image could not be unpacked.
#[derive(Debug)]
pub(crate) enum UnpackError {
    /// What is packed makes no sense.
    Damaged(&'static str),
    /// It, or a source, could not be read.
    Read(io::Error),
    /// The image could not be written.
    Write(io::Error),
}

/// A packed image whose header and tables were checked.
pub(crate) struct Packed<'a> {
    pub file: &'a File,
    pub tables: &'a Tables,
    pub pages: u64,
    pub stored_pages: u64,
}

impl Packed<'_> {
    /// Hands all runs of pages that are not zero to `write`, with their place in the image, by
    /// rising place: not more of them than the header says.
    ///
    /// # Errors
    /// It is damaged, or the host's.
    pub fn unpack(
        &self,
        read: &mut ReadSource<'_>,
        write: &mut dyn FnMut(&[u8], u64) -> io::Result<()>,
    ) -> Result<(), UnpackError> {
        let mut decompressor = zstd::bulk::Decompressor::new().map_err(UnpackError::Read)?;
        let mut beneath = Beneath::new();
        let (mut packed, mut frame) = (Vec::new(), Vec::with_capacity(FRAME_MAX));
        let mut image = vec![0; FRAME_PAGES * PAGE];
        let (mut at, mut stored) = (HEADER_LEN as u64, 0);
        for (number, &len) in self.tables.frames.iter().enumerate() {
            let first = (number * FRAME_PAGES) as u64;
            let count = FRAME_PAGES.min((self.pages - first) as usize);
            packed.resize(len as usize, 0);
            self.file.read_exact_at(&mut packed, at).map_err(UnpackError::Read)?;
            at += u64::from(len);
            frame.clear();
            // It never grows, however much the frame says that it holds.
            decompressor
                .decompress_to_buffer(&packed, &mut frame)
                .map_err(|_| UnpackError::Damaged("a frame cannot be uncompressed"))?;
            let (ops, content) = check_frame(&frame, count)?;
            if ops.iter().any(|&op| op == SAME || op == DIFFERENCE) {
                beneath.read(first, &self.tables.ranges, read).map_err(UnpackError::Read)?;
            }
            fill(&mut image, ops, content, &beneath)?;
            stored += ops.iter().filter(|&&op| op != ZERO).count() as u64;
            if stored > self.stored_pages {
                return Err(UnpackError::Damaged("it holds more than it says"));
            }
            for run in runs(ops) {
                let place = (first + run.start as u64) * PAGE as u64;
                write(&image[run.start * PAGE..run.end * PAGE], place)
                    .map_err(UnpackError::Write)?;
            }
        }
        match stored == self.stored_pages {
            true => Ok(()),
            false => Err(UnpackError::Damaged("it holds less than it says")),
        }
    }
}

/// The operations of a frame and its content, which is as long as they say.
fn check_frame(frame: &[u8], count: usize) -> Result<(&[u8], &[u8]), UnpackError> {
    let (ops, content) =
        frame.split_at_checked(count).ok_or(UnpackError::Damaged("a frame is too short"))?;
    let with_content = ops.iter().filter(|&&op| op == DIFFERENCE || op == OWN).count();
    let are_known = ops.iter().all(|&op| op <= OWN);
    match are_known && content.len() == with_content * PAGE {
        true => Ok((ops, content)),
        false => Err(UnpackError::Damaged("a frame makes no sense")),
    }
}

/// Makes the pages of a frame.
fn fill(
    image: &mut [u8],
    ops: &[u8],
    mut content: &[u8],
    beneath: &Beneath,
) -> Result<(), UnpackError> {
    for (number, (&op, page)) in ops.iter().zip(image.chunks_exact_mut(PAGE)).enumerate() {
        let no_range = UnpackError::Damaged("a page differs from one that no source has");
        match op {
            SAME => page.copy_from_slice(beneath.page(number).ok_or(no_range)?),
            ZERO => {}
            _ => {
                let (own, rest) = content.split_at(PAGE);
                page.copy_from_slice(own);
                content = rest;
                if op == DIFFERENCE {
                    flip(page, beneath.page(number).ok_or(no_range)?);
                }
            }
        }
    }
    Ok(())
}

/// Runs of pages that are not zero.
fn runs(ops: &[u8]) -> impl Iterator<Item = std::ops::Range<usize>> + '_ {
    let mut at = 0;
    std::iter::from_fn(move || {
        let start = at + ops[at..].iter().position(|&op| op != ZERO)?;
        let len = ops[start..].iter().position(|&op| op == ZERO);
        at = len.map_or(ops.len(), |len| start + len);
        Some(start..at)
    })
}

#[cfg(test)]
mod tests {
    use super::super::format::Tables;
    use super::*;
    use proptest::prelude::*;

    /// What a page is made of.
    #[derive(Clone, Debug)]
    enum Made {
        Zero,
        Same,
        /// Words of the source's page that are other ones.
        Changed(Vec<(usize, u64)>),
        Own(u8),
    }

    fn made() -> impl Strategy<Value = Made> {
        let word = (0..PAGE / 8, any::<u64>());
        prop_oneof![
            Just(Made::Zero),
            Just(Made::Same),
            prop::collection::vec(word, 1..600).prop_map(Made::Changed),
            any::<u8>().prop_map(Made::Own),
        ]
    }

    fn page_of_source(number: u64) -> Vec<u8> {
        (0..PAGE as u64).map(|at| (number * 31 + at * at % 251 + at / 97) as u8).collect()
    }

    fn page(made: &Made, beneath: u64) -> Vec<u8> {
        let mut page = page_of_source(beneath);
        match made {
            Made::Zero => page.fill(0),
            Made::Same => {}
            Made::Changed(words) => {
                for (at, word) in words {
                    page[at * 8..][..8].copy_from_slice(&word.to_le_bytes());
                }
            }
            Made::Own(first) => {
                let own = (0..PAGE).map(|at| first.wrapping_mul(3).wrapping_add((at / 5) as u8));
                page = own.collect();
            }
        }
        page
    }

    /// The source has its pages one behind the other, with this one first.
    const FROM: u64 = 9;

    fn read_source(_: u32, at: u64, buffer: &mut [u8]) -> io::Result<()> {
        for (number, page) in buffer.chunks_mut(PAGE).enumerate() {
            page.copy_from_slice(&page_of_source(at / PAGE as u64 + number as u64));
        }
        Ok(())
    }

    /// Packs pages that have a range each third time, and unpacks them again.
    fn pack_and_unpack(image: &[u8], ranges: Vec<Range>) -> (Vec<u8>, usize) {
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(image).unwrap();
        let pages = (image.len() / PAGE) as u64;
        let packed = tempfile::tempfile().unwrap();
        let content = pack(&file, pages, &ranges, &mut read_source, &mut &packed).unwrap();
        let tables = Tables { sources: Vec::new(), ranges, frames: content.frames };
        let len = packed.metadata().unwrap().len() as usize;
        let stored_pages = content.stored_pages;
        let mut out = vec![0; image.len()];
        let unpacked = Packed { file: &packed, tables: &tables, pages, stored_pages };
        let mut place = |bytes: &[u8], at: u64| {
            out[at as usize..][..bytes.len()].copy_from_slice(bytes);
            Ok(())
        };
        unpacked.unpack(&mut read_source, &mut place).unwrap();
        (out, len)
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(24))]
        #[test]
        fn images_come_back_as_they_were(
            pages in prop::collection::vec(made(), 1..600),
            gaps in prop::collection::vec((1u32..50, 0u64..20), 0..40),
        ) {
            let image: Vec<u8> = pages
                .iter()
                .enumerate()
                .flat_map(|(number, made)| page(made, FROM + number as u64))
                .collect();
            let (mut ranges, mut at) = (Vec::new(), 0);
            for (count, gap) in gaps {
                let first = at + gap;
                at = first + u64::from(count);
                if at <= pages.len() as u64 {
                    ranges.push(Range { first, from: FROM + first, count, source: 0 });
                }
            }
            let (found, _) = pack_and_unpack(&image, ranges);
            prop_assert!(found == image);
        }
    }

    #[test]
    fn pages_that_differ_in_a_few_words_take_a_few_bytes() {
        let image: Vec<u8> = (0..512)
            .flat_map(|number| {
                page(&Made::Changed(vec![(7, number), (100, !number)]), FROM + number)
            })
            .collect();
        let all = vec![Range { first: 0, from: FROM, count: 512, source: 0 }];
        let (found, with) = pack_and_unpack(&image, all);
        assert!(found == image);
        assert!(with < 512 * 64, "{with}");
    }

    #[test]
    fn the_way_that_leaves_fewer_words_is_taken() {
        let some = |words: &[(usize, u64)]| {
            let mut page = vec![0; PAGE];
            words
                .iter()
                .for_each(|(at, word)| page[at * 8..][..8].copy_from_slice(&word.to_le_bytes()));
            page
        };
        let page = some(&[(3, 1), (9, 2)]);
        assert_eq!(operation(&page, None), OWN);
        assert_eq!(operation(&page, Some(&page)), SAME);
        assert_eq!(operation(&page, Some(&some(&[(3, 1)]))), DIFFERENCE);
        assert_eq!(operation(&page, Some(&some(&[(4, 1)]))), OWN);
        assert_eq!(operation(&some(&[]), Some(&page)), ZERO);
        assert_eq!(operation(&some(&[]), None), ZERO);
    }

    /// Unpacks one frame of two pages, of which the first has a range.
    fn unpack_frame(frame: &[u8], stored_pages: u64) -> Result<(), UnpackError> {
        let mut packed = tempfile::tempfile().unwrap();
        let compressed = zstd::bulk::compress(frame, 1).unwrap();
        packed.write_all(&[0; HEADER_LEN]).unwrap();
        packed.write_all(&compressed).unwrap();
        let ranges = vec![Range { first: 0, from: 0, count: 1, source: 0 }];
        let frames = vec![compressed.len() as u32];
        let tables = Tables { sources: Vec::new(), ranges, frames };
        let packed = Packed { file: &packed, tables: &tables, pages: 2, stored_pages };
        packed.unpack(&mut read_source, &mut |_, _| Ok(()))
    }

    #[test]
    fn frames_that_make_no_sense_are_refused() {
        let with = |ops: [u8; 2], pages: usize| [&ops[..], &vec![1; pages * PAGE]].concat();
        assert!(unpack_frame(&with([SAME, OWN], 1), 2).is_ok());
        assert!(unpack_frame(&with([DIFFERENCE, ZERO], 1), 1).is_ok());
        for (frame, stored) in [
            (vec![], 0),
            (vec![ZERO], 0),
            (with([SAME, OWN], 0), 2),
            (with([SAME, OWN], 2), 2),
            // Nothing lies beneath the second.
            (with([ZERO, SAME], 0), 1),
            (with([ZERO, DIFFERENCE], 1), 1),
            (with([OWN + 1, ZERO], 0), 1),
            // More, or less, than it says.
            (with([SAME, OWN], 1), 1),
            (with([SAME, OWN], 1), 3),
            // A bomb: more than a frame can hold.
            (vec![0; 64 << 20], 2),
        ] {
            let refused = unpack_frame(&frame, stored);
            assert!(matches!(refused, Err(UnpackError::Damaged(_))), "{refused:?}");
        }
    }
}
