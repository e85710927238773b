//! Prefetch files: the pages of a working set one after the other, of the image and of
//! blobs alike, so that a cold boot reads them in one go.
//!
//! A cold boot maps these pages from the prefetch file and all else from where it was. The
//! order of the pages follows from the mappings of the image and the working set alone: the
//! file holds nothing but pages, and no number in it is trusted.

use std::collections::HashMap;
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::FileExt;

use thaw_abi::PAGE_SIZE;
use thaw_abi::image::{
    MAPPING_EAGER, MAPPING_KERNEL, Mapping, SOURCE_BLOB, SOURCE_IMAGE, SOURCE_PREFETCH,
};

use thaw_abi::layout::{SHM_BASE, SHM_MAX};

use crate::boot::BootPlan;
use crate::image::Image;
use crate::sys::cached_pages;
use crate::working_set::{FRONT_END, WorkingSet, is_front, joined, read_range_ahead};

/// Pages between two runs that are read along with them: to read one more takes about as
/// long as to make one more mapping (docs/decisions/0023). More of them if there would be too
/// many mappings for a boot command.
const GAPS: [u64; 5] = [2, 8, 32, 128, 512];
/// Most mappings of a boot with a prefetch file.
const MAPPINGS_MAX: usize = 2000;
/// Changes whenever the order of the pages does.
const LAYOUT_NAME: &[u8] = b"thaw prefetch layout 1";
/// Bytes that are copied at a time.
const CHUNK: usize = 1 << 20;

/// Which pages of the kernel's memory are in a prefetch file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum KernelPages {
    /// Those of the working set.
    Touched,
    /// All.
    All,
}

/// Which pages lie where in a prefetch file, and how a boot maps them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PrefetchLayout {
    mappings: Vec<Mapping>,
    /// What the mappings with [`SOURCE_PREFETCH`] are copies of, by number of the mapping.
    origins: Vec<(usize, Mapping)>,
    /// Bytes of the pages.
    len: u64,
    name: [u8; 32],
}

impl PrefetchLayout {
    /// The layout for boots of `plan`, with pages from `first_page` bytes of the file on,
    /// `max` bytes at most. `None`: it has no such pages or too many, or is of several
    /// processes, whose memory is not mapped at once.
    pub fn new(plan: &BootPlan, set: &WorkingSet, first_page: u64, max: u64) -> Option<Self> {
        if plan.mappings_at.is_some() {
            return None;
        }
        let checksum = plan.image_checksum();
        Self::of(plan.mappings(), checksum, set, KernelPages::Touched, (first_page, max))
    }

    /// The same for boots of an image of which nothing else is here: with all memory of the kernel,
    /// which cannot wait for what it touches, and from the beginning of the file on.
    pub(crate) fn with_kernel(image: &Image, set: &WorkingSet, max: u64) -> Option<Self> {
        let checksum = image.header().checksum;
        Self::of(image.mappings(), checksum, set, KernelPages::All, (0, max))
    }

    fn of(
        whole: &[Mapping],
        checksum: [u8; 32],
        set: &WorkingSet,
        kernel: KernelPages,
        (first_page, max): (u64, u64),
    ) -> Option<Self> {
        if whole.iter().any(is_of_several) {
            return None;
        }
        let cut_with = |gap| cut(whole, set, kernel, gap);
        let mut parts = GAPS.into_iter().map(cut_with).find(|parts| parts.len() <= MAPPINGS_MAX)?;
        let origins = place(&mut parts, whole, first_page);
        let len = origins.iter().map(|(_, origin)| origin.len).sum();
        if len == 0 || len > max {
            return None;
        }
        let mut hasher = blake3::Hasher::new();
        hasher.update(LAYOUT_NAME).update(&checksum);
        hasher.update(bytemuck::cast_slice(&parts));
        Some(Self { mappings: parts, origins, len, name: *hasher.finalize().as_bytes() })
    }

    /// A hash of the image, the pages and their order.
    pub fn name(&self) -> [u8; 32] {
        self.name
    }

    /// Bytes of the pages.
    #[expect(clippy::len_without_is_empty, reason = "there is none without pages")]
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Copies the pages of the image and of its blobs to their places in the file.
    ///
    /// # Errors
    /// A blob cannot be opened, or the host's error.
    pub fn write(&self, plan: &BootPlan, to: &File) -> io::Result<()> {
        let mut blobs: HashMap<u32, File> = HashMap::new();
        for (at, origin) in &self.origins {
            let from = match origin.source {
                SOURCE_IMAGE => &*plan.image,
                _ => match blobs.entry(origin.blob) {
                    std::collections::hash_map::Entry::Occupied(known) => &*known.into_mut(),
                    std::collections::hash_map::Entry::Vacant(unknown) => {
                        &*unknown.insert(plan.blobs.open_blob(origin.blob)?.into())
                    }
                },
            };
            copy(from, origin.offset, to, self.mappings[*at].offset, origin.len)?;
        }
        Ok(())
    }

    pub(crate) fn mappings(&self) -> &[Mapping] {
        &self.mappings
    }

    /// Replaces the mappings by parts of them; the order of the pages stays.
    pub(crate) fn set_mappings(&mut self, parts: Vec<Mapping>) {
        // Numbers of mappings are others now: it is only booted from.
        self.origins.clear();
        self.mappings = parts;
    }

    pub(crate) fn into_mappings(self) -> Vec<Mapping> {
        self.mappings
    }
}

/// Whether a mapping is of memory that several processes have, or one of several has: the
/// kernel copies that from the image.
fn is_of_several(mapping: &Mapping) -> bool {
    mapping.space() > 0 || (SHM_BASE..SHM_BASE + SHM_MAX).contains(&mapping.start)
}

/// Cuts mappings into parts that were touched, which are to come from the prefetch file, and
/// the parts between them.
fn cut(whole: &[Mapping], set: &WorkingSet, kernel: KernelPages, gap: u64) -> Vec<Mapping> {
    let mut parts = Vec::new();
    for mapping in whole {
        let end = mapping.start + mapping.len;
        let mut from = mapping.start;
        let is_whole = kernel == KernelPages::All && mapping.flags & MAPPING_KERNEL != 0;
        let touched = match is_whole && has_content(mapping) {
            true => std::iter::once(mapping.start..end).collect(),
            false => touched_parts(mapping, set, gap * PAGE_SIZE),
        };
        for touched in touched {
            parts.extend(untouched(mapping, from..touched.start));
            let flags = mapping.flags | MAPPING_EAGER;
            let (source, part) = (SOURCE_PREFETCH, slice(mapping, touched.clone()));
            parts.push(Mapping { source, flags, ..part });
            from = touched.end;
        }
        match from == mapping.start {
            true => parts.push(*mapping),
            false => parts.extend(untouched(mapping, from..end)),
        }
    }
    parts
}

fn has_content(mapping: &Mapping) -> bool {
    matches!(mapping.source, SOURCE_IMAGE | SOURCE_BLOB)
}

/// The parts of a mapping that come from the prefetch file.
fn touched_parts(mapping: &Mapping, set: &WorkingSet, gap: u64) -> Vec<Range<u64>> {
    if !has_content(mapping) {
        return Vec::new();
    }
    let (start, end) = (mapping.start, mapping.start + mapping.len);
    let runs = |from| joined(set.within(from, end).map(|run| run.start..run.end), gap);
    if !is_front(mapping) {
        return runs(start);
    }
    // The front of the kernel's heap is read in one piece.
    let front_end = FRONT_END.min(end);
    std::iter::once(start..front_end).chain(runs(front_end)).collect()
}

/// A part that is mapped when it is touched, unless the kernel needs it there.
fn untouched(mapping: &Mapping, range: Range<u64>) -> Option<Mapping> {
    let kernel = mapping.flags & MAPPING_KERNEL;
    let flags = if kernel != 0 { mapping.flags } else { mapping.flags & !MAPPING_EAGER };
    (!range.is_empty()).then(|| Mapping { flags, ..slice(mapping, range) })
}

fn slice(mapping: &Mapping, range: Range<u64>) -> Mapping {
    let offset = mapping.offset + (range.start - mapping.start);
    Mapping { start: range.start, len: range.end - range.start, offset, ..*mapping }
}

/// Gives the touched parts of the mappings `whole` their places in the file: first those of
/// the kernel, which needs its memory before anything else runs. Returns what they are
/// copies of.
fn place(parts: &mut [Mapping], whole: &[Mapping], first_page: u64) -> Vec<(usize, Mapping)> {
    let mut origins = Vec::new();
    let mut at = first_page;
    for of_kernel in [true, false] {
        for (number, part) in parts.iter_mut().enumerate() {
            let is_of_kernel = part.flags & MAPPING_KERNEL != 0;
            if part.source != SOURCE_PREFETCH || is_of_kernel != of_kernel {
                continue;
            }
            let of = &whole[whole.partition_point(|mapping| mapping.start <= part.start) - 1];
            origins.push((number, Mapping { source: of.source, ..*part }));
            *part = Mapping { blob: 0, offset: at, ..*part };
            at += part.len;
        }
    }
    origins
}

/// Copies a part of a file; behind the end of the file there are zeros, as in a mapping.
fn copy(from: &File, from_at: u64, to: &File, to_at: u64, len: u64) -> io::Result<()> {
    let mut buffer = vec![0; CHUNK.min(len as usize)];
    for start in (0..len).step_by(CHUNK) {
        let part = &mut buffer[..CHUNK.min((len - start) as usize)];
        let mut filled = 0;
        while filled < part.len() {
            match from.read_at(&mut part[filled..], from_at + start + filled as u64)? {
                0 => break,
                read => filled += read,
            }
        }
        part[filled..].fill(0);
        to.write_all_at(part, to_at + start)?;
    }
    Ok(())
}

/// Brings a prefetch file into the page cache in large requests, without waiting for them.
///
/// # Errors
/// The host's error.
pub fn read_ahead(file: &File) -> io::Result<()> {
    read_range_ahead(file, 0..file.metadata()?.len())
}

/// Whether any page of a file is in the page cache; `None`: this host does not say (Linux
/// before 6.5).
pub fn is_cached(file: &File) -> Option<bool> {
    cached_pages(file.as_fd(), 0, 0).ok().map(|pages| pages > 0)
}

/// Pages of an image and its blobs that are looked at to know whether the working set is in
/// the page cache.
#[derive(Debug)]
pub struct CacheProbe {
    /// Number of the blob among those of the plan, or the image, and an offset.
    samples: Vec<(Option<usize>, u64)>,
}

/// Pages that are looked at.
const SAMPLES: usize = 16;

impl CacheProbe {
    /// For the files of a plan without a prefetch file.
    pub fn new(plan: &BootPlan, set: &WorkingSet) -> Self {
        let mut pages = Vec::new();
        let image = set.file_ranges(plan.mappings(), |mapping| mapping.source == SOURCE_IMAGE);
        pages.extend(image.into_iter().map(|range| (None, range.start)));
        for (at, &number) in plan.blob_numbers.iter().enumerate() {
            let of_it = |mapping: &Mapping| mapping.source == SOURCE_BLOB && mapping.blob == number;
            let ranges = set.file_ranges(plan.mappings(), of_it);
            pages.extend(ranges.into_iter().map(|range| (Some(at), range.start)));
        }
        let step = pages.len().div_ceil(SAMPLES).max(1);
        Self { samples: pages.into_iter().step_by(step).collect() }
    }

    /// Whether one of the pages, another each time that `turn` is, is in the page cache;
    /// `None`: this host does not say (Linux before 6.5).
    pub fn is_one_cached(&self, plan: &BootPlan, turn: usize) -> Option<bool> {
        let at = turn.checked_rem(self.samples.len())?;
        self.is_cached(plan, at)
    }

    /// Whether most of the pages are in the page cache.
    pub fn are_most_cached(&self, plan: &BootPlan) -> Option<bool> {
        let cached: Option<Vec<bool>> =
            (0..self.samples.len()).map(|at| self.is_cached(plan, at)).collect();
        let cached = cached?;
        Some(cached.iter().filter(|&&cached| cached).count() * 4 > cached.len() * 3)
    }

    fn is_cached(&self, plan: &BootPlan, at: usize) -> Option<bool> {
        let (blob, offset) = self.samples[at];
        let file: BorrowedFd<'_> = match blob {
            None => plan.image.as_fd(),
            Some(blob) => plan.blob_files.get(blob)?.as_fd(),
        };
        cached_pages(file, offset, PAGE_SIZE).ok().map(|pages| pages > 0)
    }
}

#[cfg(test)]
mod tests {
    use thaw_abi::image::SOURCE_ZERO;
    use thaw_abi::layout::{HEAP_BASE, HEAP_FRONT};

    use super::*;
    use crate::working_set::Use;
    use crate::working_set::tests::set;

    const P: u64 = PAGE_SIZE;

    fn mapping(page: u64, pages: u64, source: u32, offset: u64, flags: u32) -> Mapping {
        let (start, len, offset) = (page * P, pages * P, offset * P);
        Mapping { start, len, offset, source, blob: 7, prot: 3, flags }
    }

    /// Page, pages, source, page in the file, flags.
    fn seen(parts: &[Mapping]) -> Vec<(u64, u64, u32, u64, u32)> {
        let seen = |part: &Mapping| {
            (part.start / P, part.len / P, part.source, part.offset / P, part.flags)
        };
        parts.iter().map(seen).collect()
    }

    #[test]
    fn touched_parts_come_from_the_file_and_the_rest_waits() {
        let eager = MAPPING_EAGER;
        let whole = [
            mapping(10, 10, SOURCE_IMAGE, 100, eager),
            mapping(20, 5, SOURCE_BLOB, 0, eager),
            mapping(30, 9, SOURCE_ZERO, 0, eager),
            mapping(50, 9, SOURCE_BLOB, 3, 0),
        ];
        // Pages 14 and 22 lie between touched ones.
        let touched = set(&[
            (12, 2, Use::Read),
            (15, 1, Use::Written),
            (19, 3, Use::Read),
            (23, 1, Use::Read),
            (30, 2, Use::Written),
        ]);
        let mut parts = cut(&whole, &touched, KernelPages::Touched, 1);
        let origins = place(&mut parts, &whole, P);
        let expected = [
            (10, 2, SOURCE_IMAGE, 100, 0),
            (12, 4, SOURCE_PREFETCH, 1, eager),
            (16, 3, SOURCE_IMAGE, 106, 0),
            (19, 1, SOURCE_PREFETCH, 5, eager),
            (20, 4, SOURCE_PREFETCH, 6, eager),
            (24, 1, SOURCE_BLOB, 4, 0),
            (30, 9, SOURCE_ZERO, 0, eager),
            (50, 9, SOURCE_BLOB, 3, 0),
        ];
        assert_eq!(seen(&parts), expected);
        let of: Vec<_> = origins.iter().map(|(at, of)| (*at, of.source, of.offset / P)).collect();
        assert_eq!(of, [(1, SOURCE_IMAGE, 102), (3, SOURCE_IMAGE, 109), (4, SOURCE_BLOB, 0)]);
        assert_eq!(origins[2].1.blob, 7);
    }

    #[test]
    fn the_kernel_comes_first_and_all_of_it_is_mapped() {
        let kernel = MAPPING_KERNEL | MAPPING_EAGER;
        let heap = HEAP_BASE / P;
        let front = HEAP_FRONT / P;
        let whole =
            [mapping(10, 2, SOURCE_IMAGE, 0, 0), mapping(heap, 100, SOURCE_IMAGE, 2, kernel)];
        let touched =
            set(&[(10, 1, Use::Read), (heap + 3, 1, Use::Written), (heap + 60, 2, Use::Read)]);
        let mut parts = cut(&whole, &touched, KernelPages::Touched, 2);
        place(&mut parts, &whole, P);
        let expected = [
            (10, 1, SOURCE_PREFETCH, front + 3, MAPPING_EAGER),
            (11, 1, SOURCE_IMAGE, 1, 0),
            (heap, front, SOURCE_PREFETCH, 1, kernel),
            (heap + front, 60 - front, SOURCE_IMAGE, 2 + front, kernel),
            (heap + 60, 2, SOURCE_PREFETCH, 1 + front, kernel),
            (heap + 62, 38, SOURCE_IMAGE, 64, kernel),
        ];
        assert_eq!(seen(&parts), expected);
    }

    #[test]
    fn parts_are_as_long_as_the_whole_whatever_was_touched() {
        let whole = [mapping(5, 40, SOURCE_IMAGE, 9, 0), mapping(50, 40, SOURCE_BLOB, 0, 0)];
        for seed in 0..500_u64 {
            let mut state = seed;
            let mut random = |below: u64| {
                state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
                (state >> 33) % below
            };
            let (mut page, mut runs) = (0, Vec::new());
            while page < 100 {
                let len = 1 + random(6);
                runs.push((page, len, Use::Read));
                page += len + 1 + random(12);
            }
            for gap in GAPS {
                let mut parts = cut(&whole, &set(&runs), KernelPages::Touched, gap);
                let origins = place(&mut parts, &whole, P);
                for mapping in &whole {
                    let end = mapping.start + mapping.len;
                    let of_it =
                        parts.iter().filter(|part| (mapping.start..end).contains(&part.start));
                    let covered = of_it.fold(mapping.start, |at, part| {
                        assert_eq!(part.start, at, "seed {seed}");
                        at + part.len
                    });
                    assert_eq!(covered, end, "seed {seed}");
                }
                // In the file, the pages follow each other.
                let end = origins.iter().fold(P, |at, (number, origin)| {
                    assert_eq!((parts[*number].offset, parts[*number].len), (at, origin.len));
                    at + origin.len
                });
                assert_eq!(end - P, origins.iter().map(|(_, origin)| origin.len).sum::<u64>());
            }
        }
    }

    #[test]
    fn memory_of_several_processes_is_recognized() {
        let kernel = MAPPING_KERNEL;
        assert!(!is_of_several(&mapping(10, 1, SOURCE_IMAGE, 0, kernel)));
        let second = 1 << thaw_abi::image::MAPPING_SPACE_SHIFT;
        assert!(is_of_several(&mapping(10, 1, SOURCE_IMAGE, 0, second)));
        assert!(is_of_several(&mapping(SHM_BASE / P, 1, SOURCE_IMAGE, 0, 0)));
    }

    #[test]
    fn a_copy_has_zeros_behind_the_end_of_the_file() {
        let (from, to) = (tempfile::tempfile().unwrap(), tempfile::tempfile().unwrap());
        from.write_all_at(&[5; 5000], 0).unwrap();
        to.write_all_at(&[9; 12_288], 4096).unwrap();
        copy(&from, 4096, &to, 8192, 4096).unwrap();
        let mut found = [0; 12_288];
        to.read_exact_at(&mut found, 4096).unwrap();
        assert!(found[..4096].iter().all(|&byte| byte == 9));
        assert!(found[4096..5000].iter().all(|&byte| byte == 5));
        assert!(found[5000..8192].iter().all(|&byte| byte == 0));
        assert!(found[8192..].iter().all(|&byte| byte == 9));
    }

    #[test]
    fn a_page_that_was_just_written_is_cached() {
        let file = tempfile::tempfile().unwrap();
        file.write_all_at(&[1; 4096], 0).unwrap();
        assert_ne!(is_cached(&file), Some(false));
    }
}
