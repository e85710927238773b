//! From runs of pages to mappings and file offsets. Pure computation.

use thaw_abi::PAGE_SIZE;
use thaw_abi::freeze::{REGION_KERNEL, REGION_SHARED};
use thaw_abi::image::{
    MAPPING_EAGER, MAPPING_KERNEL, MAPPING_SHARED, MAPPING_SPACE_SHIFT, Mapping, SOURCE_BLOB,
    SOURCE_IMAGE, SOURCE_ZERO, ancestor_depth,
};
use thaw_abi::layout::{SHM_BASE, SHM_MAX};

use super::MergePolicy;
use super::report::Region;
use super::scan::{Content, Run};

/// A region with the runs that cover it.
#[derive(Clone, Debug)]
pub(crate) struct Scanned {
    pub region: Region,
    pub runs: Vec<Run>,
}

/// How a frozen sandbox becomes an image file.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Layout {
    /// Sorted by address space and address. Offsets in the image count from its first page of
    /// memory, see [`Layout::place`].
    pub mappings: Vec<Mapping>,
    /// Memory in the image, sorted by address and by offset, neighbours merged.
    pub segments: Vec<Segment>,
    /// Bytes stored although a blob or an ancestor has them.
    pub stored_clean: u64,
    /// Bytes of memory in the image, holes included.
    pub image_len: u64,
}

/// A range of memory that lies in the image file, in one piece.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Segment {
    pub start: u64,
    pub end: u64,
    pub offset: u64,
    /// Number of the address space.
    pub space: u32,
}

impl Segment {
    /// Bytes.
    pub fn len(&self) -> u64 {
        self.end - self.start
    }
}

/// Computes the layout, with merging as `policy` says, and harder if that
/// leaves more than `max_mappings`; `None` if nothing helps.
pub(crate) fn lay_out(
    scanned: &[Scanned],
    policy: MergePolicy,
    max_mappings: usize,
) -> Option<Layout> {
    let mut effort = Effort { merge: policy, copied_pages: 0 };
    loop {
        let layout = lay_out_once(scanned, effort);
        if layout.mappings.len() <= max_mappings {
            return Some(layout);
        }
        let harder = effort.harder();
        if harder == effort {
            return None;
        }
        effort = harder;
    }
}

/// What is done for fewer mappings.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Effort {
    merge: MergePolicy,
    /// Runs of so many pages or fewer that an ancestor has are stored. A chain of images can
    /// cut memory into many pieces without any that is new.
    copied_pages: u64,
}

impl Effort {
    fn harder(self) -> Self {
        let more = |pages: u64| (pages + pages.div_ceil(2)).clamp(1, 1 << 20);
        let MergePolicy { clean_gap_pages, zero_gap_pages } = self.merge;
        let merge = MergePolicy {
            clean_gap_pages: more(clean_gap_pages),
            zero_gap_pages: more(zero_gap_pages),
        };
        Self { merge, copied_pages: more(self.copied_pages) }
    }

    /// A run, stored if it is one of those that are.
    fn copied(self, run: Run, stored_clean: &mut u64) -> Run {
        let is_short = run.len() <= self.copied_pages * PAGE_SIZE;
        if !is_short || !matches!(run.content, Content::File { .. } | Content::Same { .. }) {
            return run;
        }
        *stored_clean += run.len();
        Run { content: Content::Own, ..run }
    }
}

fn lay_out_once(scanned: &[Scanned], effort: Effort) -> Layout {
    let mut layout = Layout::default();
    for group in groups(scanned) {
        let parts: Vec<Part<'_>> = group
            .into_iter()
            .map(|(region, run)| (region, effort.copied(run, &mut layout.stored_clean)))
            .collect();
        for (region, run) in merge(&parts, effort.merge, &mut layout.stored_clean) {
            layout.add(region, run);
        }
    }
    layout
}

/// A run and the region it belongs to.
type Part<'a> = (&'a Region, Run);

/// The runs of neighbouring regions that one mapping could cover, together.
fn groups(scanned: &[Scanned]) -> Vec<Vec<Part<'_>>> {
    let mut groups: Vec<Vec<Part<'_>>> = Vec::new();
    for Scanned { region, runs } in scanned {
        let parts = runs.iter().map(|&run| (region, run));
        match groups.last_mut() {
            Some(group) if group.last().is_some_and(|(last, _)| alike(last, region)) => {
                group.extend(parts);
            }
            _ => groups.push(parts.collect()),
        }
    }
    groups
}

fn alike(first: &Region, second: &Region) -> bool {
    let flags =
        |region: &Region| (region.has(REGION_KERNEL), region.has(REGION_SHARED), region.space);
    first.end() == second.start && first.prot == second.prot && flags(first) == flags(second)
}

/// Longest gap that is stored, in bytes. The kernel's memory is mapped at every
/// boot and mostly used: its zeros are holes of one mapping. The memory that guest
/// processes share is read instead, so that its zeros cost nothing.
fn longest_gap((region, run): &Part<'_>, policy: MergePolicy) -> u64 {
    match run.content {
        Content::Own => u64::MAX,
        Content::Zero if is_mapped_whole(region) => u64::MAX,
        Content::Blob | Content::File { .. } | Content::Same { .. } => {
            policy.clean_gap_pages * PAGE_SIZE
        }
        Content::Zero => policy.zero_gap_pages * PAGE_SIZE,
    }
}

fn is_mapped_whole(region: &Region) -> bool {
    let shared_memory = SHM_BASE..SHM_BASE + SHM_MAX;
    region.has(REGION_KERNEL) && !shared_memory.contains(&region.start)
}

/// Makes short gaps between stored runs stored, too.
fn merge<'a>(parts: &[Part<'a>], policy: MergePolicy, stored_clean: &mut u64) -> Vec<Part<'a>> {
    let leads_to_stored = leads_to_stored(parts, policy);
    let mut merged: Vec<Part<'a>> = Vec::with_capacity(parts.len());
    for (part, leads) in parts.iter().zip(leads_to_stored) {
        let (region, run) = *part;
        let follows_stored = merged.last().is_some_and(|(_, last)| last.content == Content::Own);
        // Of several short gaps in a row, each is judged alone; the last must
        // lead to a stored run.
        let is_hole = run.content == Content::Zero && is_mapped_whole(region);
        let absorbed =
            follows_stored && run.len() <= longest_gap(part, policy) && (is_hole || leads);
        match merged.last_mut() {
            Some((_, last)) if absorbed => {
                if !matches!(run.content, Content::Own | Content::Zero) {
                    *stored_clean += run.len();
                }
                last.end = run.end;
            }
            _ => merged.push((region, run)),
        }
    }
    merged
}

/// Of each run, whether only short gaps lie between it and a stored one, itself included.
fn leads_to_stored(parts: &[Part<'_>], policy: MergePolicy) -> Vec<bool> {
    let mut leads = vec![false; parts.len()];
    let mut next = false;
    for (part, leads) in parts.iter().zip(&mut leads).rev() {
        let is_stored = part.1.content == Content::Own;
        next = is_stored || next && part.1.len() <= longest_gap(part, policy);
        *leads = next;
    }
    leads
}

impl Layout {
    fn add(&mut self, region: &Region, run: Run) {
        let (source, blob, offset) = match (run.content, region.blob) {
            (Content::Blob, Some((blob, offset))) => {
                (SOURCE_BLOB, blob, offset + (run.start - region.start))
            }
            (Content::File { number, offset }, _) => (SOURCE_BLOB, number, offset),
            // A scan finds blob content in blob regions only.
            (Content::Zero | Content::Blob, _) => (SOURCE_ZERO, 0, 0),
            (Content::Own, _) => (SOURCE_IMAGE, 0, self.store(run, region.space)),
            (Content::Same { space }, _) => {
                let stored = self.place_of(run, space);
                (SOURCE_IMAGE, 0, stored.unwrap_or_else(|| self.store(run, region.space)))
            }
        };
        let mut flags = region.space << MAPPING_SPACE_SHIFT;
        if region.has(REGION_KERNEL) {
            flags |= MAPPING_KERNEL | MAPPING_EAGER;
        }
        if region.has(REGION_SHARED) {
            flags |= MAPPING_SHARED;
        }
        let mapping = Mapping {
            start: run.start,
            len: run.len(),
            offset,
            source,
            blob,
            prot: region.prot,
            flags,
        };
        match self.mappings.last_mut() {
            Some(last) if continues(last, &mapping) => last.len += mapping.len,
            _ => self.mappings.push(mapping),
        }
    }

    /// Gives a run its place behind what is there: neighbours in memory are
    /// neighbours in the file.
    fn store(&mut self, run: Run, space: u32) -> u64 {
        let offset = self.image_len;
        self.image_len += run.len();
        match self.segments.last_mut() {
            Some(last) if last.end == run.start && last.space == space => last.end = run.end,
            _ => self.segments.push(Segment { start: run.start, end: run.end, offset, space }),
        }
        offset
    }

    /// Where a run lies in the file as an address space that comes before has it.
    fn place_of(&self, run: Run, space: u32) -> Option<u64> {
        let behind = |segment: &Segment| (segment.space, segment.end) <= (space, run.start);
        let found = self.segments.get(self.segments.partition_point(behind))?;
        let is_in = found.space == space && found.start <= run.start && run.end <= found.end;
        is_in.then(|| found.offset + (run.start - found.start))
    }

    /// Whether some of the memory comes from ancestors.
    pub fn refers_to_ancestors(&self) -> bool {
        let is_of_one = |mapping: &Mapping| {
            mapping.source == SOURCE_BLOB && ancestor_depth(mapping.blob).is_some()
        };
        self.mappings.iter().any(is_of_one)
    }

    /// Moves all offsets to where the memory begins in the file.
    pub fn place(&mut self, first: u64) {
        for mapping in &mut self.mappings {
            if mapping.source == SOURCE_IMAGE {
                mapping.offset += first;
            }
        }
        for segment in &mut self.segments {
            segment.offset += first;
        }
    }
}

/// Whether one `mmap` call can make both.
fn continues(first: &Mapping, second: &Mapping) -> bool {
    let same = first.source == second.source
        && first.prot == second.prot
        && first.flags == second.flags
        && first.start + first.len == second.start;
    same && match first.source {
        SOURCE_ZERO => true,
        SOURCE_BLOB => first.blob == second.blob && first.offset + first.len == second.offset,
        _ => first.offset + first.len == second.offset,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const P: u64 = PAGE_SIZE;
    const NO_MERGING: MergePolicy = MergePolicy { clean_gap_pages: 0, zero_gap_pages: 0 };

    fn scanned(
        start: u64,
        prot: u32,
        blob: Option<(u32, u64)>,
        runs: &[(u64, Content)],
    ) -> Scanned {
        let mut at = start;
        let runs: Vec<Run> = runs
            .iter()
            .map(|&(pages, content)| {
                let run = Run { start: at, end: at + pages * P, content };
                at = run.end;
                run
            })
            .collect();
        let region =
            Region { start, len: at - start, blob, prot, flags: 0, path: Vec::new(), space: 0 };
        Scanned { region, runs }
    }

    fn summary(layout: &Layout) -> Vec<(u64, u64, u32, u64)> {
        let unit = |mapping: &Mapping| {
            (mapping.start / P, mapping.len / P, mapping.source, mapping.offset / P)
        };
        layout.mappings.iter().map(unit).collect()
    }

    use Content::{Blob, File, Own, Zero};
    use thaw_abi::image::ANCESTOR_FIRST;

    #[test]
    fn what_two_processes_have_is_mapped_from_one_place() {
        let same = Content::Same { space: 0 };
        let first = scanned(1000 * P, 3, None, &[(1, Zero), (4, Own), (1, Zero)]);
        let mut second = scanned(1000 * P, 3, None, &[(2, Zero), (2, same), (1, Own), (1, Zero)]);
        second.region.space = 1;
        let layout = lay_out(&[first.clone(), second.clone()], NO_MERGING, 100).unwrap();
        let image = SOURCE_IMAGE;
        let zero = SOURCE_ZERO;
        assert_eq!(
            summary(&layout),
            [
                (1000, 1, zero, 0),
                (1001, 4, image, 0),
                (1005, 1, zero, 0),
                (1000, 2, zero, 0),
                (1002, 2, image, 1),
                (1004, 1, image, 4),
                (1005, 1, zero, 0)
            ]
        );
        assert_eq!((layout.image_len, layout.stored_clean), (5 * P, 0));
        // Where that makes too many mappings it is stored once more, and so it is if nobody has it.
        let fewer = lay_out(&[first, second.clone()], NO_MERGING, 6).unwrap();
        assert!(fewer.mappings.len() <= 6 && fewer.stored_clean > 0, "{fewer:?}");
        let alone = lay_out(&[second], NO_MERGING, 100).unwrap();
        assert_eq!(alone.image_len, 3 * P);
    }

    #[test]
    fn runs_become_mappings() {
        let regions =
            [scanned(1000 * P, 3, Some((7, 5 * P)), &[(2, Blob), (1, Own), (3, Blob), (1, Zero)])];
        let layout = lay_out(&regions, NO_MERGING, 100).unwrap();
        assert_eq!(
            summary(&layout),
            [
                (1000, 2, SOURCE_BLOB, 5),
                (1002, 1, SOURCE_IMAGE, 0),
                (1003, 3, SOURCE_BLOB, 8),
                (1006, 1, SOURCE_ZERO, 0)
            ]
        );
        assert_eq!(layout.image_len, P);
    }

    #[test]
    fn neighbours_with_equal_protection_become_one() {
        let regions = [
            scanned(1000 * P, 3, Some((7, 0)), &[(2, Own)]),
            scanned(1002 * P, 3, None, &[(1, Own), (4, Zero)]),
            scanned(1007 * P, 3, None, &[(2, Zero), (1, Own)]),
            scanned(1010 * P, 1, None, &[(1, Own)]),
        ];
        let layout = lay_out(&regions, NO_MERGING, 100).unwrap();
        assert_eq!(
            summary(&layout),
            [
                (1000, 3, SOURCE_IMAGE, 0),
                (1003, 6, SOURCE_ZERO, 0),
                (1009, 1, SOURCE_IMAGE, 3),
                (1010, 1, SOURCE_IMAGE, 4)
            ]
        );
        // In the file, they are neighbours whatever their protection.
        assert_eq!(
            layout.segments,
            [
                Segment { start: 1000 * P, end: 1003 * P, offset: 0, space: 0 },
                Segment { start: 1009 * P, end: 1011 * P, offset: 3 * P, space: 0 },
            ]
        );
    }

    #[test]
    fn short_gaps_are_absorbed_and_long_ones_are_not() {
        let runs = [
            (1, Own),
            (2, Blob),
            (1, Own),
            (3, Blob),
            (1, Own),
            (5, Zero),
            (1, Own),
            (6, Zero),
            (1, Own),
            (1, Blob),
        ];
        let regions = [scanned(1000 * P, 3, Some((7, 0)), &runs)];
        let policy = MergePolicy { clean_gap_pages: 2, zero_gap_pages: 5 };
        let layout = lay_out(&regions, policy, 100).unwrap();
        assert_eq!(
            summary(&layout),
            [
                (1000, 4, SOURCE_IMAGE, 0),
                (1004, 3, SOURCE_BLOB, 4),
                (1007, 7, SOURCE_IMAGE, 4),
                (1014, 6, SOURCE_ZERO, 0),
                (1020, 1, SOURCE_IMAGE, 11),
                (1021, 1, SOURCE_BLOB, 21),
            ]
        );
        assert_eq!(layout.stored_clean, 2 * P);
    }

    #[test]
    fn merging_gets_harder_until_the_mappings_fit() {
        let runs: Vec<(u64, Content)> =
            (0..1000).map(|number| if number % 2 == 0 { (1, Own) } else { (3, Blob) }).collect();
        let regions = [scanned(1000 * P, 3, Some((7, 0)), &runs)];
        let effort = Effort { merge: NO_MERGING, copied_pages: 0 };
        assert_eq!(lay_out_once(&regions, effort).mappings.len(), 1000);
        let layout = lay_out(&regions, NO_MERGING, 10).unwrap();
        assert!(layout.mappings.len() <= 10);
        let islands: Vec<Scanned> =
            (0..20).map(|number| scanned((1000 + 2 * number) * P, 3, None, &[(1, Own)])).collect();
        assert_eq!(lay_out(&islands, NO_MERGING, 10), None);
    }

    #[test]
    fn pieces_of_ancestors_are_stored_when_there_are_too_many() {
        // Each odd page is that of one ancestor, each even one that of another.
        let piece = |page: u64| {
            let number = ANCESTOR_FIRST + (page % 2) as u32;
            (1, File { number, offset: (1 << 30) + page * P })
        };
        let runs: Vec<(u64, Content)> = (0..1000).map(piece).collect();
        let long =
            scanned(3000 * P, 3, None, &[(4096, File { number: ANCESTOR_FIRST, offset: 0 })]);
        let regions = [scanned(1000 * P, 3, None, &runs), long];
        let layout = lay_out(&regions, NO_MERGING, 1001).unwrap();
        assert_eq!((layout.mappings.len(), layout.image_len), (1001, 0));
        let layout = lay_out(&regions, NO_MERGING, 10).unwrap();
        assert_eq!(summary(&layout)[0], (1000, 1000, SOURCE_IMAGE, 0));
        assert_eq!((layout.mappings.len(), layout.stored_clean), (2, 1000 * P));
    }

    #[test]
    fn what_an_ancestor_has_in_one_piece_is_one_mapping() {
        let of = |offset| File { number: ANCESTOR_FIRST, offset };
        let regions = [
            scanned(1000 * P, 3, None, &[(2, of(0)), (1, Own), (2, of(3 * P))]),
            scanned(1005 * P, 3, None, &[(2, of(5 * P)), (1, of(0))]),
        ];
        let layout = lay_out(&regions, NO_MERGING, 100).unwrap();
        assert_eq!(
            summary(&layout),
            [
                (1000, 2, SOURCE_BLOB, 0),
                (1002, 1, SOURCE_IMAGE, 0),
                (1003, 4, SOURCE_BLOB, 3),
                (1007, 1, SOURCE_BLOB, 0)
            ]
        );
        // A gap has content of any source.
        let policy = MergePolicy { clean_gap_pages: 4, zero_gap_pages: 4 };
        let regions = [scanned(0, 3, Some((7, 0)), &[(1, Own), (4, of(0)), (1, Blob), (1, Own)])];
        let layout = lay_out(&regions, policy, 100).unwrap();
        assert_eq!((layout.mappings.len(), layout.stored_clean), (1, 5 * P));
    }

    #[test]
    fn every_byte_is_mapped_exactly_once() {
        let runs =
            [(1, Own), (1, Blob), (9, Zero), (1, Own), (20, Zero), (2, Blob), (1, Zero), (1, Own)];
        let regions =
            [scanned(1000 * P, 3, Some((7, 0)), &runs), scanned(1036 * P, 3, None, &[(3, Zero)])];
        for gap in 0..12 {
            let policy = MergePolicy { clean_gap_pages: gap, zero_gap_pages: gap };
            let layout = lay_out(&regions, policy, 100).unwrap();
            let mut at = 1000 * P;
            for mapping in &layout.mappings {
                assert_eq!(mapping.start, at);
                at += mapping.len;
            }
            assert_eq!(at, 1039 * P);
        }
    }
}
