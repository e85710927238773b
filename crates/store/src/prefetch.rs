//! Prefetch files: the pages that the first request of an image touches, one after the
//! other, so that a cold boot reads them in one go.
//!
//! ```text
//! header (32 used bytes, a hash, a hash), zeros up to 4096
//! pages
//! ```
//!
//! The order of the pages follows from the image and its working set. The store does not
//! know it: it keeps the name that the writer gave it (`layout`).

use std::fs::File;
use std::os::unix::fs::FileExt;

use bytemuck::{Pod, Zeroable};

use crate::error::{Context, Kind, Result, StoreError};
use crate::id::ImageId;
use crate::stage::{Existing, publish, seal, sync_directory};
use crate::store::{Store, open_existing};

/// Bytes before the first page.
pub const PREFETCH_HEAD: u64 = 4096;
/// Most bytes of pages: of more, a request waits for the processor and not for the disk.
pub const PREFETCH_MAX: u64 = 64 << 20;

const MAGIC: [u8; 8] = *b"THAWPRE\0";
const VERSION: u32 = 1;
/// Bytes that are read at a time.
const CHUNK: usize = 1 << 20;

/// Start of the file; all else up to [`PREFETCH_HEAD`] is zero.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
struct Header {
    magic: [u8; 8],
    version: u32,
    reserved: u32,
    /// Bytes of the pages.
    len: u64,
    /// Zero.
    padding: u64,
    /// Which pages in which order, as the writer names it.
    layout: [u8; 32],
    /// BLAKE3 of the image's name, the header with zeros here, and the pages.
    checksum: [u8; 32],
}

/// A prefetch file whose checksum was right when it was opened.
#[derive(Debug)]
pub struct Prefetch {
    file: File,
    len: u64,
    layout: [u8; 32],
}

impl Prefetch {
    /// The file; its pages begin at [`PREFETCH_HEAD`].
    pub fn into_file(self) -> File {
        self.file
    }

    /// Bytes of the file.
    #[expect(clippy::len_without_is_empty, reason = "it has a header at least")]
    pub fn len(&self) -> u64 {
        PREFETCH_HEAD + self.len
    }

    /// The name that the writer gave to the order of the pages.
    pub fn layout(&self) -> [u8; 32] {
        self.layout
    }
}

impl Header {
    fn new(id: ImageId, layout: [u8; 32], file: &File, len: u64) -> std::io::Result<Self> {
        let (magic, version) = (MAGIC, VERSION);
        let mut header =
            Self { magic, version, reserved: 0, len, padding: 0, layout, checksum: [0; 32] };
        header.checksum = header.checksum_of(id, file)?;
        Ok(header)
    }

    /// Reads it, and says why it cannot be one if it cannot.
    fn parse(page: &[u8], file_len: u64) -> std::result::Result<Self, &'static str> {
        let (head, rest) = page.split_at_checked(size_of::<Self>()).ok_or("it is too short")?;
        let header: Self = bytemuck::pod_read_unaligned(head);
        if header.magic != MAGIC || header.version != VERSION {
            return Err("it is not a prefetch file that this program knows");
        }
        if header.len > PREFETCH_MAX || !header.len.is_multiple_of(4096) {
            return Err("it has an impossible length");
        }
        if file_len != PREFETCH_HEAD + header.len {
            return Err("it does not have the length that it should have");
        }
        match rest.iter().all(|&byte| byte == 0) {
            true => Ok(header),
            false => Err("its header is not followed by zeros"),
        }
    }

    fn checksum_of(&self, id: ImageId, file: &File) -> std::io::Result<[u8; 32]> {
        let mut hasher = blake3::Hasher::new();
        hasher.update(id.as_bytes());
        hasher.update(bytemuck::bytes_of(&Self { checksum: [0; 32], ..*self }));
        let mut buffer = vec![0; CHUNK];
        let mut at = 0;
        while at < self.len {
            let part = &mut buffer[..CHUNK.min((self.len - at) as usize)];
            file.read_exact_at(part, PREFETCH_HEAD + at)?;
            hasher.update(part);
            at += part.len() as u64;
        }
        Ok(*hasher.finalize().as_bytes())
    }
}

/// Parses a header and asserts what must hold of it.
#[cfg(any(test, feature = "fuzzing"))]
pub(crate) fn check_header(page: &[u8], file_len: u64) {
    if let Ok(header) = Header::parse(page, file_len) {
        assert!(header.len <= PREFETCH_MAX && header.len + PREFETCH_HEAD == file_len);
    }
}

impl Store {
    /// Stores the pages of an image's working set, replacing older ones. `write` writes
    /// them from [`PREFETCH_HEAD`] on, whole pages without a hole in between, and returns
    /// how many bytes there are: [`PREFETCH_MAX`] at most. `layout` names their order.
    ///
    /// # Errors
    /// The image is gone, the pages are too many, or the disk is full.
    pub fn put_prefetch(
        &self,
        id: ImageId,
        layout: [u8; 32],
        write: impl FnOnce(&File) -> std::io::Result<u64>,
    ) -> Result<()> {
        let _acting = self.layout.act()?;
        let mut session = self.session()?;
        if !session.layout.has_image(id) {
            return Err(StoreError::not_found(Kind::Image, id));
        }
        let (file, from) = session.stage.create_file()?;
        let len = write(&file).context("write", &from)?;
        let header = Header::new(id, layout, &file, len).context("read", &from)?;
        let mut head = vec![0; PREFETCH_HEAD as usize];
        head[..size_of::<Header>()].copy_from_slice(bytemuck::bytes_of(&header));
        file.write_all_at(&head, 0).context("write", &from)?;
        let file_len = file.metadata().context("inspect", &from)?.len();
        Header::parse(&head, file_len)
            .map_err(|why| StoreError::damaged(Kind::Prefetch, id, why))?;
        seal(&file, &from)?;
        file.sync_all().context("sync", &from)?;
        publish(&from, &session.layout.prefetch(id), Existing::Replace)?;
        sync_directory(&session.layout.images())
    }

    /// Opens the prefetch file of an image read-only and checks it, which reads all of it;
    /// `None` if there is none. A damaged one is an error, after which a caller can go on
    /// without.
    ///
    /// # Errors
    /// It is damaged, or the host's error.
    pub fn open_prefetch(&self, id: ImageId) -> Result<Option<Prefetch>> {
        let _acting = self.layout.act()?;
        let path = self.layout.prefetch(id);
        let file = match open_existing(&path, Kind::Prefetch, id) {
            Err(error) if error.is_not_found() => return Ok(None),
            opened => opened?,
        };
        let file_len = file.metadata().context("inspect", &path)?.len();
        let mut page = vec![0; PREFETCH_HEAD.min(file_len) as usize];
        file.read_exact_at(&mut page, 0).context("read", &path)?;
        let damaged = |why| StoreError::damaged(Kind::Prefetch, id, why);
        let header = Header::parse(&page, file_len).map_err(damaged)?;
        if header.checksum_of(id, &file).context("read", &path)? != header.checksum {
            return Err(damaged("its checksum is wrong"));
        }
        Ok(Some(Prefetch { file, len: header.len, layout: header.layout }))
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    pub(crate) fn page(len: u64) -> Vec<u8> {
        let header = Header { magic: MAGIC, version: VERSION, len, ..Header::zeroed() };
        let mut page = bytemuck::bytes_of(&header).to_vec();
        page.resize(PREFETCH_HEAD as usize, 0);
        page
    }

    #[test]
    fn format_tripwire() {
        assert_eq!((size_of::<Header>(), VERSION, PREFETCH_HEAD), (96, 1, 4096));
    }

    #[test]
    fn only_a_header_with_possible_lengths_is_one() {
        assert_eq!(Header::parse(&page(8192), 3 * 4096).map(|header| header.len), Ok(8192));
        let most = PREFETCH_MAX + PREFETCH_HEAD;
        assert!(Header::parse(&page(PREFETCH_MAX), most).is_ok());
        for (len, file_len) in [
            (8192, 8192),
            (8192, 4 * 4096),
            (8191, 8191 + 4096),
            (PREFETCH_MAX + 4096, most + 4096),
        ] {
            assert!(Header::parse(&page(len), file_len).is_err(), "{len}");
        }
        assert!(Header::parse(&page(u64::MAX - 4095), 0).is_err());
        for len in 0..size_of::<Header>() {
            assert!(Header::parse(&page(0)[..len], PREFETCH_HEAD).is_err());
        }
        let mut other = page(0);
        other[4095] = 1;
        assert!(Header::parse(&other, PREFETCH_HEAD).is_err());
    }
}
