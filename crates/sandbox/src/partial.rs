//! Boots of an image of which only a part is here (docs/decisions/0035).
//!
//! A copy maps the pages of its working set and all of its kernel's memory from a prefetch file.
//! Every other part of the image, and of contents that are moved in several pieces, is cut where
//! the pieces end, and has a number behind those of the index' contents: a [`Segment`]. The kernel
//! in the sandbox asks for its descriptor when it is first touched, as it does for a content, and
//! waits until the host has it. So it maps nothing that is not there.

use std::fs::File;
use std::sync::Arc;

use thaw_abi::image::{Mapping, SOURCE_BLOB, SOURCE_IMAGE};

use crate::boot::{BootPlan, PlanError};
use crate::broker::BlobSource;
use crate::image::Image;
use crate::prefetch::PrefetchLayout;
use crate::working_set::{PopulatePolicy, WorkingSet};

/// Most bytes of the pages of a prefetch file.
const PAGES_MAX: u64 = 128 << 20;

/// A file that is moved in pieces.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum MovedFile {
    /// The image.
    Image,
    /// The content with this number.
    Content(u32),
}

/// The part of a file that lies in one piece.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Segment {
    /// The file.
    pub of: MovedFile,
    /// The piece.
    pub piece: u32,
}

/// Where the pieces of files end.
pub trait Pieces {
    /// The piece that holds the byte at `offset` of a file, and the offset in the file at which
    /// the next piece begins, rounded to where a mapping can be cut. `None`: the content is
    /// moved in one piece, or there is no such byte.
    fn at(&self, of: MovedFile, offset: u64) -> Option<(u32, u64)>;
}

/// How an image is booted of which only a part is here.
#[derive(Clone, Debug)]
pub struct PartialLayout {
    prefetch: PrefetchLayout,
    segments: Vec<Segment>,
}

impl PartialLayout {
    /// The layout of an image over an index of `contents` contents. `None`: too much has to be
    /// there before a boot, or it is of several processes.
    pub fn new(
        image: &Image,
        set: &WorkingSet,
        contents: u32,
        pieces: &dyn Pieces,
    ) -> Option<Self> {
        let mut prefetch = run_layout(image, set)?;
        let mut segments = Vec::new();
        let mut parts = Vec::new();
        for mapping in prefetch.mappings() {
            cut(mapping, contents, pieces, &mut segments, &mut parts);
        }
        prefetch.set_mappings(parts);
        Some(Self { prefetch, segments })
    }

    /// The segments, in the order of their numbers, of which the first is the number of contents.
    pub fn segments(&self) -> &[Segment] {
        &self.segments
    }
}

/// The layout of the prefetch file without which nothing can be booted; `None` as above.
pub fn run_layout(image: &Image, set: &WorkingSet) -> Option<PrefetchLayout> {
    match image.mappings_at_if_many() {
        Some(_) => None,
        None => PrefetchLayout::with_kernel(image, set, PAGES_MAX),
    }
}

/// Cuts a mapping where pieces end, unless its bytes are in the prefetch file or come whole.
fn cut(
    mapping: &Mapping,
    contents: u32,
    pieces: &dyn Pieces,
    segments: &mut Vec<Segment>,
    parts: &mut Vec<Mapping>,
) {
    let of = match mapping.source {
        SOURCE_IMAGE => MovedFile::Image,
        SOURCE_BLOB => MovedFile::Content(mapping.blob),
        _ => return parts.push(*mapping),
    };
    let mut done = 0;
    while done < mapping.len {
        let rest = Mapping {
            start: mapping.start + done,
            len: mapping.len - done,
            offset: mapping.offset + done,
            ..*mapping
        };
        let Some((piece, end)) = pieces.at(of, rest.offset) else { return parts.push(rest) };
        let segment = Segment { of, piece };
        let known = segments.iter().rposition(|known| *known == segment);
        let number = known.unwrap_or_else(|| {
            segments.push(segment);
            segments.len() - 1
        });
        let len = rest.len.min(end.saturating_sub(rest.offset)).max(thaw_abi::PAGE_SIZE);
        let blob = contents.saturating_add(number as u32);
        parts.push(Mapping { len, source: SOURCE_BLOB, blob, ..rest });
        done += len;
    }
}

impl Image {
    /// Prepares boots of this image, of which only a part is here. `blobs` opens contents by their
    /// numbers and segments by theirs ([`PartialLayout::segments`]).
    ///
    /// # Errors
    /// The index cannot be read, or the boot command would not fit into one message.
    pub fn plan_partial(
        &self,
        (index, index_len): (Arc<File>, u64),
        blobs: Arc<dyn BlobSource>,
        (layout, prefetch): (PartialLayout, Arc<File>),
        set: &WorkingSet,
    ) -> Result<BootPlan, PlanError> {
        let mut plan = BootPlan::bare(self, index, index_len, blobs)?;
        plan.add_segments(layout.segments.len() as u32);
        plan.prefetch(prefetch, layout.prefetch, set, PopulatePolicy::Both)?;
        Ok(plan)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use thaw_abi::image::{SOURCE_PREFETCH, SOURCE_ZERO};

    /// Pieces of four pages of the image, and of content 3.
    struct Fours;

    impl Pieces for Fours {
        fn at(&self, of: MovedFile, offset: u64) -> Option<(u32, u64)> {
            let piece = offset / 0x4000;
            let first = match of {
                MovedFile::Image => 0,
                MovedFile::Content(3) => 100,
                MovedFile::Content(_) => return None,
            };
            Some((first + piece as u32, (piece + 1) * 0x4000))
        }
    }

    fn mapping(page: u64, pages: u64, source: u32, blob: u32, offset: u64) -> Mapping {
        let (start, len, offset) = (page << 12, pages << 12, offset << 12);
        Mapping { start, len, offset, source, blob, prot: 3, flags: 0 }
    }

    #[test]
    fn mappings_are_cut_where_pieces_end() {
        let whole = [
            mapping(1, 6, SOURCE_IMAGE, 0, 2),
            mapping(10, 1, SOURCE_PREFETCH, 0, 0),
            mapping(11, 2, SOURCE_ZERO, 0, 0),
            mapping(20, 9, SOURCE_BLOB, 2, 0),
            mapping(30, 3, SOURCE_BLOB, 3, 3),
            mapping(40, 1, SOURCE_IMAGE, 0, 3),
        ];
        let (mut segments, mut parts) = (Vec::new(), Vec::new());
        for mapping in &whole {
            cut(mapping, 50, &Fours, &mut segments, &mut parts);
        }
        let expected = [
            mapping(1, 2, SOURCE_BLOB, 50, 2),
            mapping(3, 4, SOURCE_BLOB, 51, 4),
            whole[1],
            whole[2],
            whole[3],
            mapping(30, 1, SOURCE_BLOB, 52, 3),
            mapping(31, 2, SOURCE_BLOB, 53, 4),
            mapping(40, 1, SOURCE_BLOB, 50, 3),
        ];
        assert_eq!(parts, expected);
        let of = |of, piece| Segment { of, piece };
        let content = MovedFile::Content(3);
        let image = MovedFile::Image;
        assert_eq!(segments, [of(image, 0), of(image, 1), of(content, 100), of(content, 101)]);
    }
}
