//! The file format of packed images.
//!
//! ```text
//! header (88 bytes)
//! frames, one zstd frame for each 256 pages of the image
//!   uncompressed: one operation for each page, then the content of those that have some
//! tables, one zstd frame: sources, ranges, lengths of the frames
//! ```
//!
//! A *source* is another file of the store: an image that this one differs from, or a content of
//! its root file system. A *range* says which pages of the image are to be compared with which
//! pages of a source. All numbers are little-endian.

use bytemuck::{Pod, Zeroable};

use crate::id::{BlobHash, ImageId};

/// Level of compression, measured in docs/decisions/0036.
pub(crate) const LEVEL: i32 = 9;
/// Bytes of a page.
pub(crate) const PAGE: usize = thaw_abi::PAGE_SIZE as usize;
/// Pages of an image that are compressed together: enough to compress well, and what has to be
/// read for any one of them.
pub(crate) const FRAME_PAGES: usize = 256;
/// Most bytes of a frame before it is compressed.
pub(crate) const FRAME_MAX: usize = FRAME_PAGES * (1 + PAGE);
/// Most pages of an image: 1 TiB.
pub(crate) const PAGES_MAX: u64 = 1 << 28;
/// Most sources.
const SOURCES_MAX: usize = 1 << 16;
/// Most ranges.
pub(crate) const RANGES_MAX: usize = 1 << 18;
/// Most pages of a source: 16 TiB.
const SOURCE_PAGES_MAX: u64 = 1 << 32;

const MAGIC: [u8; 8] = *b"THAWPAK\0";
const VERSION: u32 = 1;

/// Zero, or a hole.
pub(crate) const ZERO: u8 = 0;
/// What the range says.
pub(crate) const SAME: u8 = 1;
/// The content, each bit flipped that is set in what the range says.
pub(crate) const DIFFERENCE: u8 = 2;
/// The content.
pub(crate) const OWN: u8 = 3;

/// Start of a packed image.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub(crate) struct Header {
    magic: [u8; 8],
    version: u32,
    /// Number of sources.
    sources: u32,
    /// Number of ranges.
    ranges: u32,
    /// Bytes of the tables in the file.
    tables_len: u32,
    /// Pages of the image.
    pub pages: u64,
    /// Those of them that are not zero.
    pub stored_pages: u64,
    /// Bytes of the file.
    file_len: u64,
    padding: u64,
    /// BLAKE3 of the image's name, the header with zeros here, and the tables. The image's name
    /// is that of its content, so nothing else needs one.
    checksum: [u8; 32],
}

/// Bytes of the header.
pub(crate) const HEADER_LEN: usize = size_of::<Header>();

/// A file of the store that a packed image refers to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Source {
    /// An image.
    Image(ImageId),
    /// The content of a regular file.
    Blob(BlobHash),
}

#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct RawSource {
    kind: u32,
    name: [u8; 32],
}

impl From<Source> for RawSource {
    fn from(source: Source) -> Self {
        match source {
            Source::Image(id) => Self { kind: 0, name: id.0 },
            Source::Blob(hash) => Self { kind: 1, name: hash.0 },
        }
    }
}

impl RawSource {
    fn parse(self) -> Option<Source> {
        match self.kind {
            0 => Some(Source::Image(ImageId(self.name))),
            1 => Some(Source::Blob(BlobHash(self.name))),
            _ => None,
        }
    }
}

/// Which pages of an image are compared with which of a source.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub(crate) struct Range {
    /// First page of the image.
    pub first: u64,
    /// First page of the source.
    pub from: u64,
    /// Number of pages.
    pub count: u32,
    /// Number of the source.
    pub source: u32,
}

impl Range {
    pub fn end(&self) -> u64 {
        self.first + u64::from(self.count)
    }
}

/// All but the content. It is written last, when the lengths are known.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Tables {
    pub sources: Vec<Source>,
    /// By rising first page, none over another.
    pub ranges: Vec<Range>,
    /// Bytes of each frame in the file.
    pub frames: Vec<u32>,
}

impl Tables {
    fn bytes(&self) -> Vec<u8> {
        let sources: Vec<RawSource> = self.sources.iter().map(|&source| source.into()).collect();
        [
            bytemuck::cast_slice(&sources),
            bytemuck::cast_slice(&self.ranges),
            bytemuck::cast_slice(&self.frames),
        ]
        .concat()
    }

    /// Header and compressed tables of a file.
    ///
    /// # Errors
    /// They cannot be compressed.
    pub fn finish(
        &self,
        id: ImageId,
        pages: u64,
        stored_pages: u64,
    ) -> std::io::Result<(Header, Vec<u8>)> {
        let tables = zstd::bulk::compress(&self.bytes(), LEVEL)?;
        let mut header = Header {
            magic: MAGIC,
            version: VERSION,
            sources: self.sources.len() as u32,
            ranges: self.ranges.len() as u32,
            tables_len: tables.len() as u32,
            pages,
            stored_pages,
            file_len: HEADER_LEN as u64 + self.frames_len() + tables.len() as u64,
            padding: 0,
            checksum: [0; 32],
        };
        header.checksum = header.checksum_of(id, &tables);
        Ok((header, tables))
    }

    /// Bytes of all frames.
    fn frames_len(&self) -> u64 {
        self.frames.iter().map(|&len| u64::from(len)).sum()
    }
}

impl Header {
    /// Reads it, and says why it cannot be one if it cannot. Nothing that it says is believed
    /// before its checksum is known.
    pub fn parse(bytes: &[u8], file_len: u64) -> Result<Self, &'static str> {
        let head = bytes.get(..HEADER_LEN).ok_or("it is shorter than its header")?;
        let header: Self = bytemuck::pod_read_unaligned(head);
        if header.magic != MAGIC || header.version != VERSION {
            return Err("it is not a packed image that this program knows");
        }
        if header.file_len != file_len {
            return Err("it does not have the length that it should have");
        }
        let tables_end = HEADER_LEN as u64 + u64::from(header.tables_len);
        let is_possible = header.pages <= PAGES_MAX
            && header.stored_pages <= header.pages
            && header.sources as usize <= SOURCES_MAX
            && header.ranges as usize <= RANGES_MAX
            && header.padding == 0
            && tables_end <= file_len;
        if is_possible { Ok(header) } else { Err("its header has impossible numbers") }
    }

    /// Where the tables lie in the file.
    pub fn tables_at(&self) -> std::ops::Range<u64> {
        self.file_len - u64::from(self.tables_len)..self.file_len
    }

    /// Bytes of the image.
    pub fn image_len(&self) -> u64 {
        self.pages * PAGE as u64
    }

    fn frame_count(&self) -> usize {
        self.pages.div_ceil(FRAME_PAGES as u64) as usize
    }

    fn checksum_of(&self, id: ImageId, tables: &[u8]) -> [u8; 32] {
        let mut hasher = blake3::Hasher::new();
        hasher.update(id.as_bytes());
        hasher.update(bytemuck::bytes_of(&Self { checksum: [0; 32], ..*self }));
        *hasher.update(tables).finalize().as_bytes()
    }

    /// Checks that header and tables are those of an image.
    pub fn check(&self, id: ImageId, tables: &[u8]) -> Result<(), &'static str> {
        let is_right = self.checksum_of(id, tables) == self.checksum;
        if is_right { Ok(()) } else { Err("its checksum is wrong") }
    }

    /// Reads the tables, whose bounds follow from the header's.
    pub fn tables(&self, packed: &[u8]) -> Result<Tables, &'static str> {
        let (sources, ranges) = (self.sources as usize, self.ranges as usize);
        let sources_len = sources * size_of::<RawSource>();
        let ranges_len = ranges * size_of::<Range>();
        let len = sources_len + ranges_len + self.frame_count() * size_of::<u32>();
        let bytes = zstd::bulk::decompress(packed, len).map_err(|_| "its tables are unreadable")?;
        if bytes.len() != len {
            return Err("its tables do not have the length that they should have");
        }
        let (sources, rest) = bytes.split_at(sources_len);
        let (ranges, frames) = rest.split_at(ranges_len);
        let sources = sources.chunks_exact(size_of::<RawSource>());
        let source = |bytes| bytemuck::pod_read_unaligned::<RawSource>(bytes).parse();
        let tables = Tables {
            sources: sources.map(source).collect::<Option<_>>().ok_or("it has unknown sources")?,
            ranges: collect(ranges),
            frames: collect(frames),
        };
        self.check_ranges(&tables)?;
        self.check_frames(&tables)?;
        Ok(tables)
    }

    fn check_ranges(&self, tables: &Tables) -> Result<(), &'static str> {
        let mut free = 0;
        for range in &tables.ranges {
            let count = u64::from(range.count);
            let is_possible = range.first >= free
                && range.first <= self.pages
                && count <= self.pages - range.first
                && range.from <= SOURCE_PAGES_MAX
                && (range.source as usize) < tables.sources.len();
            if !is_possible {
                return Err("its ranges make no sense");
            }
            free = range.end();
        }
        Ok(())
    }

    fn check_frames(&self, tables: &Tables) -> Result<(), &'static str> {
        let most = zstd::zstd_safe::compress_bound(FRAME_MAX);
        let are_possible = tables.frames.iter().all(|&len| len as usize <= most);
        match are_possible && HEADER_LEN as u64 + tables.frames_len() == self.tables_at().start {
            true => Ok(()),
            false => Err("its frames do not fill it"),
        }
    }
}

/// Values that need not be aligned.
fn collect<T: Pod>(bytes: &[u8]) -> Vec<T> {
    bytes.chunks_exact(size_of::<T>()).map(bytemuck::pod_read_unaligned).collect()
}

/// Parses a header and, behind it, the tables of a file of `file_len` bytes, and asserts what must
/// hold of them.
#[cfg(any(test, feature = "fuzzing"))]
pub(crate) fn check_tables(bytes: &[u8], file_len: u64) {
    let Ok(header) = Header::parse(bytes, file_len) else { return };
    let Some(packed) = bytes.get(HEADER_LEN..HEADER_LEN + header.tables_len as usize) else {
        return;
    };
    let Ok(tables) = header.tables(packed) else { return };
    assert_eq!(tables.frames.len(), header.frame_count());
    assert!(tables.ranges.iter().all(|range| range.end() <= header.pages));
    assert!(tables.ranges.windows(2).all(|pair| pair[0].end() <= pair[1].first));
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    const ID: ImageId = ImageId([7; 32]);

    fn tables() -> Tables {
        let sources = vec![Source::Image(ImageId([1; 32])), Source::Blob(BlobHash([2; 32]))];
        let range = |first, count, source| Range { first, from: 5, count, source };
        Tables { sources, ranges: vec![range(0, 10, 1), range(12, 300, 0)], frames: vec![40, 50] }
    }

    /// Header and tables, and the length of the file.
    fn written(tables: &Tables) -> (Vec<u8>, u64) {
        let (header, packed) = tables.finish(ID, 400, 100).unwrap();
        ([bytemuck::bytes_of(&header), &packed].concat(), header.file_len)
    }

    /// The same, to begin from where bytes are mutated.
    pub(crate) fn seed() -> (Vec<u8>, u64) {
        written(&tables())
    }

    fn read(written: &[u8], file_len: u64) -> Result<Tables, &'static str> {
        let header = Header::parse(written, file_len)?;
        let packed = &written[HEADER_LEN..];
        header.check(ID, packed)?;
        header.tables(packed)
    }

    #[test]
    fn format_tripwire() {
        assert_eq!((HEADER_LEN, size_of::<RawSource>(), size_of::<Range>()), (88, 36, 24));
        assert_eq!((VERSION, FRAME_PAGES, PAGE), (1, 256, 4096));
        assert_eq!([ZERO, SAME, DIFFERENCE, OWN], [0, 1, 2, 3]);
    }

    #[test]
    fn tables_are_read_as_they_were_written() {
        let (written, len) = written(&tables());
        assert_eq!(read(&written, len), Ok(tables()));
        for other in [len - 1, len + 1] {
            read(&written, other).unwrap_err();
        }
    }

    #[test]
    fn every_flipped_bit_of_header_and_tables_is_noticed() {
        let (written, len) = written(&tables());
        for at in 0..written.len() {
            let mut flipped = written.clone();
            flipped[at] ^= 4;
            read(&flipped, len).unwrap_err();
        }
    }

    #[test]
    fn impossible_tables_are_refused() {
        let changes: [fn(&mut Tables); 8] = [
            |tables| tables.ranges[0].source = 2,
            |tables| tables.ranges[0].count = 13,
            |tables| tables.ranges[1].count = 389,
            |tables| tables.ranges[1].first = 401,
            |tables| tables.ranges[1].first = u64::MAX,
            |tables| tables.ranges[1].from = u64::MAX,
            |tables| tables.ranges.reverse(),
            |tables| tables.frames[0] = u32::MAX,
        ];
        for change in changes {
            let mut changed = tables();
            change(&mut changed);
            let (written, len) = written(&changed);
            read(&written, len).unwrap_err();
        }
        let mut fewer = tables();
        fewer.frames.pop();
        let (written, len) = written(&fewer);
        read(&written, len).unwrap_err();
    }
}
