//! Files with holes: where their data lie, and a name for their content that
//! costs nothing for holes.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;

use rustix::fs::{SeekFrom, seek};
use rustix::io::Errno;
use thaw_abi::PAGE_SIZE;

use crate::id::ImageId;

/// Bytes read at once, a multiple of the page size.
const CHUNK: u64 = 1 << 20;

/// The name of an image: BLAKE3 of its length, of the numbers of its pages that
/// are not zero and of their content. Holes and zero pages are the same, so the
/// name does not depend on the file system or on how the file was copied, and
/// only data are read.
pub fn image_id(file: &File) -> io::Result<ImageId> {
    image_id_read(file, &mut |buffer, at| file.read_exact_at(buffer, at))
}

/// The same of what `read` gives of the file: it fills a buffer from an offset on.
pub(crate) fn image_id_read(
    file: &File,
    read: &mut dyn FnMut(&mut [u8], u64) -> io::Result<()>,
) -> io::Result<ImageId> {
    let len = file.metadata()?.len();
    let mut namer = Namer::new(len);
    let mut chunk = vec![0u8; CHUNK as usize];
    for extent in data_extents(file, len)? {
        let mut at = extent.start;
        while at < extent.end {
            let want = (extent.end - at).min(CHUNK) as usize;
            read(&mut chunk[..want], at)?;
            namer.add(&chunk[..want], at);
            at += want as u64;
        }
    }
    Ok(namer.finish())
}

/// Names an image from its parts: see [`image_id`].
pub(crate) struct Namer {
    len: u64,
    runs: PageRuns,
    content: blake3::Hasher,
}

impl Namer {
    /// For an image of so many bytes.
    pub fn new(len: u64) -> Self {
        Self { len, runs: PageRuns::default(), content: blake3::Hasher::new() }
    }

    /// Adds the bytes at `at`, which are whole pages behind all that were added before.
    pub fn add(&mut self, bytes: &[u8], at: u64) {
        // Pages without a zero page between them are hashed at once: of 4 KiB at a time BLAKE3 cannot
        // use the widest instructions, and takes 1.6 times as long.
        let mut unhashed = 0;
        for (index, page) in bytes.chunks(PAGE_SIZE as usize).enumerate() {
            if page.iter().any(|&byte| byte != 0) {
                self.runs.push(at / PAGE_SIZE + index as u64);
                continue;
            }
            let start = index * PAGE_SIZE as usize;
            self.content.update(&bytes[unhashed..start]);
            unhashed = start + page.len();
        }
        self.content.update(&bytes[unhashed..]);
    }

    /// The name.
    pub fn finish(self) -> ImageId {
        let mut name = blake3::Hasher::new_derive_key("Thaw store image name v1");
        name.update(&self.len.to_le_bytes());
        name.update(self.runs.finish().as_bytes());
        name.update(self.content.finalize().as_bytes());
        name.finalize().into()
    }
}

/// Hashes page numbers as runs of neighbours.
#[derive(Default)]
struct PageRuns {
    hasher: blake3::Hasher,
    current: Option<Range<u64>>,
}

impl PageRuns {
    fn push(&mut self, page: u64) {
        match &mut self.current {
            Some(run) if run.end == page => run.end += 1,
            _ => {
                self.close();
                self.current = Some(page..page + 1);
            }
        }
    }

    fn close(&mut self) {
        if let Some(run) = self.current.take() {
            self.hasher.update(&run.start.to_le_bytes());
            self.hasher.update(&run.end.to_le_bytes());
        }
    }

    fn finish(mut self) -> blake3::Hash {
        self.close();
        self.hasher.finalize()
    }
}

/// The parts of a file that are not holes, lseek(2) `SEEK_DATA`, each widened to
/// whole pages; the last one ends with the file.
pub(crate) fn data_extents(file: &File, len: u64) -> io::Result<Vec<Range<u64>>> {
    let mut extents: Vec<Range<u64>> = Vec::new();
    let mut at = 0;
    while at < len {
        let start = match seek(file, SeekFrom::Data(at)) {
            Ok(start) => start / PAGE_SIZE * PAGE_SIZE,
            Err(Errno::NXIO) => break, // Nothing but a hole is left.
            Err(error) => return Err(error.into()),
        };
        let end = seek(file, SeekFrom::Hole(start.max(at)))?.next_multiple_of(PAGE_SIZE).min(len);
        match extents.last_mut() {
            Some(last) if last.end >= start => last.end = end,
            _ => extents.push(start..end),
        }
        at = end;
    }
    Ok(extents)
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    fn file_with(parts: &[(u64, &[u8])], len: u64) -> File {
        let file = tempfile::tempfile().unwrap();
        file.set_len(len).unwrap();
        for (offset, bytes) in parts {
            file.write_all_at(bytes, *offset).unwrap();
        }
        file
    }

    #[test]
    fn holes_and_zeros_have_the_same_name() {
        let len = 3 * CHUNK + 100;
        let sparse = file_with(&[(8192, b"data"), (2 * CHUNK, b"more"), (len - 1, b"x")], len);
        let mut dense = tempfile::tempfile().unwrap();
        let mut bytes = vec![0u8; len as usize];
        bytes[8192..8196].copy_from_slice(b"data");
        bytes[2 * CHUNK as usize..2 * CHUNK as usize + 4].copy_from_slice(b"more");
        bytes[len as usize - 1] = b'x';
        dense.write_all(&bytes).unwrap();
        assert_eq!(image_id(&sparse).unwrap(), image_id(&dense).unwrap());
    }

    /// Stores keep the names that images have: page by page, as the definition says.
    #[test]
    fn a_name_is_that_of_its_definition() {
        let page = |byte: u8| vec![byte; PAGE_SIZE as usize];
        let kinds = [1, 2, 0, 3, 0, 0, 4, 5, 6, 7, 8];
        let bytes: Vec<u8> = kinds.iter().flat_map(|&kind| page(kind)).chain([9; 100]).collect();
        let mut content = blake3::Hasher::new();
        for kind in kinds.iter().filter(|kind| **kind != 0) {
            content.update(&page(*kind));
        }
        content.update(&[9; 100]);
        let mut runs = blake3::Hasher::new();
        for edge in [0_u64, 2, 3, 4, 6, 12] {
            runs.update(&edge.to_le_bytes());
        }
        let mut name = blake3::Hasher::new_derive_key("Thaw store image name v1");
        name.update(&(bytes.len() as u64).to_le_bytes());
        name.update(runs.finalize().as_bytes());
        name.update(content.finalize().as_bytes());
        let file = file_with(&[(0, &bytes)], bytes.len() as u64);
        assert_eq!(image_id(&file).unwrap(), name.finalize().into());
    }

    #[test]
    fn what_differs_has_another_name() {
        let base = image_id(&file_with(&[(4096, b"data")], 20000)).unwrap();
        for (parts, len) in [
            (vec![(4096, &b"Data"[..])], 20000),
            (vec![(8192, &b"data"[..])], 20000),
            (vec![(4096, &b"data"[..])], 20001),
            (vec![(4096, &b"data"[..]), (12288, &b"x"[..])], 20000),
            (vec![], 20000),
            (vec![], 0),
        ] {
            assert_ne!(image_id(&file_with(&parts, len)).unwrap(), base, "{parts:?} {len}");
        }
    }

    #[test]
    fn extents_cover_all_data() {
        let file = file_with(&[(5000, b"a"), (1 << 20, b"b")], 2 << 20);
        let extents = data_extents(&file, 2 << 20).unwrap();
        for at in [5000, 1 << 20] {
            assert!(extents.iter().any(|extent| extent.contains(&at)), "{at} in {extents:?}");
        }
        assert!(extents.windows(2).all(|pair| pair[0].end < pair[1].start));
        assert!(extents.iter().all(|extent| extent.start % PAGE_SIZE == 0));
    }
}
