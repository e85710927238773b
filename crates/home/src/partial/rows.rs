//! Where the bytes of a function lie in its pieces.

use std::ops::Range;
use thaw_oci::artifact::{FunctionDocument, PIECE_MAX, Section};
use thaw_sandbox::{MovedFile, Pieces, Segment};

const PAGE: u64 = 4096;

/// The pieces of the image and then those of the files, numbered from 0.
#[derive(Clone, Debug)]
pub struct Rows {
    /// Offset in the image at which each of its pieces ends.
    image: Vec<u64>,
    /// The same of index and contents.
    files: Vec<u64>,
    /// Offset in the row of files of each content, and of its end.
    contents: Vec<u64>,
}

impl Rows {
    /// Those of a function whose contents have these sizes.
    ///
    /// # Errors
    /// One sentence: the document does not say where its pieces end, or contradicts itself.
    pub fn new(
        document: &FunctionDocument,
        contents: impl Iterator<Item = u64>,
    ) -> Result<Self, String> {
        let table = document.pieces.as_ref().ok_or(
            "its document does not say where its pieces end; have it pushed by this version of Thaw",
        )?;
        let wrong = || "its document contradicts itself about its pieces".to_owned();
        let (image, files) = (ends(&table.image)?, ends(&table.files)?);
        let mut at = document.index.size;
        let mut offsets = vec![at];
        for size in contents {
            at = at.checked_add(size).ok_or_else(wrong)?;
            offsets.push(at);
        }
        let len = |ends: &[u64]| ends.last().copied().unwrap_or(0);
        let is_right = len(&image) == document.image.size && len(&files) == at;
        // A page of the image lies in one piece.
        let (_, whole) = image.split_last().ok_or_else(wrong)?;
        match is_right && whole.iter().all(|end| end.is_multiple_of(PAGE)) {
            true => Ok(Self { image, files, contents: offsets }),
            false => Err(wrong()),
        }
    }

    /// How many contents there are.
    pub fn contents(&self) -> u32 {
        self.contents.len() as u32 - 1
    }

    /// Bytes of a content.
    pub fn content_len(&self, number: u32) -> Option<u64> {
        let [start, end] = self.contents.get(number as usize..)?.first_chunk::<2>()?;
        Some(end - start)
    }

    /// How many pieces a section has.
    pub fn count(&self, section: Section) -> usize {
        match section {
            Section::Image => self.image.len(),
            Section::Files => self.files.len(),
            Section::Kernel | Section::WorkingSet | Section::Run => 0,
        }
    }

    /// The section of a piece and its number there.
    pub fn piece(&self, number: u32) -> (Section, usize) {
        match (number as usize).checked_sub(self.image.len()) {
            None => (Section::Image, number as usize),
            Some(number) => (Section::Files, number),
        }
    }

    /// The bytes of its section that a piece holds.
    pub fn range(&self, piece: u32) -> Range<u64> {
        let (section, number) = self.piece(piece);
        let ends = self.ends(section);
        let start = number.checked_sub(1).map_or(0, |before| ends[before]);
        start..ends[number]
    }

    /// The section of a file, and where the file begins there.
    pub fn place(&self, of: MovedFile) -> Option<(Section, u64)> {
        match of {
            MovedFile::Image => Some((Section::Image, 0)),
            MovedFile::Content(number) => {
                self.content_len(number)?;
                Some((Section::Files, self.contents[number as usize]))
            }
        }
    }

    /// The bytes of its file that a segment holds: whole pages, as far as the file goes.
    pub fn segment(&self, segment: Segment) -> Option<Range<u64>> {
        let (_, start) = self.place(segment.of)?;
        let len = self.len_of(segment.of)?;
        let row = self.range(segment.piece);
        let inside = |at: u64| at.saturating_sub(start).next_multiple_of(PAGE).min(len);
        Some(inside(row.start)..inside(row.end))
    }

    /// The pieces that hold a range of a file.
    pub fn pieces_of(&self, of: MovedFile, range: &Range<u64>) -> Option<Range<u32>> {
        let (section, start) = self.place(of)?;
        if range.is_empty() {
            return Some(0..0);
        }
        let ends = self.ends(section);
        let holding = |at: u64| ends.partition_point(|&end| end <= start + at) as u32;
        let before = if section == Section::Files { self.image.len() as u32 } else { 0 };
        Some(before + holding(range.start)..before + holding(range.end - 1) + 1)
    }

    /// Bytes of a file.
    pub fn len_of(&self, of: MovedFile) -> Option<u64> {
        match of {
            MovedFile::Image => self.image.last().copied(),
            MovedFile::Content(number) => self.content_len(number),
        }
    }

    fn ends(&self, section: Section) -> &[u64] {
        if section == Section::Image { &self.image } else { &self.files }
    }
}

impl Pieces for Rows {
    fn at(&self, of: MovedFile, offset: u64) -> Option<(u32, u64)> {
        let len = self.len_of(of).filter(|&len| offset < len)?;
        let all = self.pieces_of(of, &(0..len))?;
        if matches!(of, MovedFile::Content(_)) && all.len() <= 1 {
            return None;
        }
        let piece = self.pieces_of(of, &(offset..offset + 1))?.start;
        let (_, start) = self.place(of)?;
        Some((piece, (self.range(piece).end - start).next_multiple_of(PAGE)))
    }
}

/// Where pieces of these lengths end.
fn ends(lengths: &[u32]) -> Result<Vec<u64>, String> {
    let mut at = 0;
    let next = |&len: &u32| {
        at += u64::from(len);
        let is_possible = (1..=PIECE_MAX as u32).contains(&len);
        is_possible.then_some(at).ok_or_else(|| "a piece has an impossible length".to_owned())
    };
    lengths.iter().map(next).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use thaw_oci::artifact::{DOCUMENT_VERSION, ImagePart, IndexPart, PieceTable};
    use thaw_store::{ImageId, IndexId, KernelId, Name};

    fn document(image: &[u32], files: &[u32]) -> FunctionDocument {
        let sum = |all: &[u32]| all.iter().copied().map(u64::from).sum::<u64>();
        FunctionDocument {
            version: DOCUMENT_VERSION,
            name: Name::new("shop").unwrap(),
            function: serde_json::Value::Null,
            index: IndexPart { id: IndexId([1; 32]), size: 100, contents: 0, naming: Vec::new() },
            image: ImagePart {
                id: ImageId([2; 32]),
                size: sum(image),
                kernel: KernelId([3; 32]),
                cpu_features: [0; 8],
            },
            kernel: None,
            run: None,
            pieces: Some(PieceTable { files: files.to_vec(), image: image.to_vec() }),
        }
    }

    /// An image of two pieces; an index of 100 bytes, contents of 5000, 20000 and 30 bytes.
    fn rows() -> Rows {
        let document = document(&[0x3000, 0x1000], &[100 + 5000 + 6000, 10_000, 4030]);
        Rows::new(&document, [5000, 20_000, 30].into_iter()).unwrap()
    }

    #[test]
    fn segments_are_whole_pages_and_know_their_pieces() {
        let rows = rows();
        let (image, content) = (MovedFile::Image, MovedFile::Content(1));
        assert_eq!(rows.at(image, 0x2000), Some((0, 0x3000)));
        assert_eq!(rows.at(image, 0x3000), Some((1, 0x4000)));
        assert_eq!(rows.at(image, 0x4000), None);
        // Those that come in one piece are asked for whole.
        assert_eq!(rows.at(MovedFile::Content(0), 0), None);
        assert_eq!(rows.at(MovedFile::Content(2), 0), None);
        assert_eq!(rows.at(MovedFile::Content(3), 0), None);
        // 6000 bytes in the first piece, 10000 in the next, 4000 in the last.
        assert_eq!(rows.at(content, 0), Some((2, 8192)));
        assert_eq!(rows.at(content, 8192), Some((3, 16384)));
        assert_eq!(rows.at(content, 16384), Some((4, 20480)));
        let segment = |piece| rows.segment(Segment { of: content, piece }).unwrap();
        assert_eq!([segment(2), segment(3), segment(4)], [0..8192, 8192..16384, 16384..20000]);
        // A page that lies in two pieces needs both.
        assert_eq!(rows.pieces_of(content, &segment(2)), Some(2..4));
        assert_eq!(rows.pieces_of(content, &segment(4)), Some(4..5));
        assert_eq!(rows.pieces_of(MovedFile::Content(2), &(0..30)), Some(4..5));
        assert_eq!(rows.piece(4), (Section::Files, 2));
        assert_eq!(rows.range(3), 11_100..21_100);
        assert_eq!(
            (rows.contents(), rows.content_len(2), rows.content_len(3)),
            (3, Some(30), None)
        );
    }

    #[test]
    fn documents_that_contradict_themselves_are_refused() {
        let right = [100 + 50];
        let refused = |image: &[u32], files: &[u32]| {
            Rows::new(&document(image, files), [50].into_iter()).unwrap_err()
        };
        Rows::new(&document(&[0x1000], &right), [50].into_iter()).unwrap();
        assert!(refused(&[0x1000], &[149]).contains("contradicts"));
        assert!(refused(&[], &right).contains("contradicts"));
        assert!(refused(&[0x1001, 0xfff], &right).contains("contradicts"), "a page in two pieces");
        assert!(refused(&[0, 0x1000], &right).contains("impossible"));
        assert!(refused(&[PIECE_MAX as u32 + 1], &right).contains("impossible"));
        let old = FunctionDocument { pieces: None, ..document(&[0x1000], &right) };
        assert!(Rows::new(&old, [50].into_iter()).unwrap_err().contains("pushed by this version"));
    }
}
