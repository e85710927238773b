//! Images that store only how they differ from others, and which those are.
//!
//! An image names its ancestors itself, but images are opaque here. So the store keeps a record
//! beside each image that has some: all that the image refers to, not only its parent.

use std::collections::BTreeSet;
use std::fs;
use std::path::PathBuf;

use bytemuck::{Pod, Zeroable};

use crate::error::{Kind, Result, StoreError};
use crate::id::ImageId;
use crate::session::Session;
use crate::stage::RECORD_MODE;
use crate::store::Store;

/// First bytes of a record of ancestors.
const MAGIC: [u8; 8] = *b"THAWANC\0";
/// Version of the record.
const VERSION: u32 = 1;
/// Most ancestors of an image: more than a chain can have.
const ANCESTORS_MAX: usize = 256;

/// Start of a record; the names follow, 32 bytes each.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct Header {
    magic: [u8; 8],
    version: u32,
    count: u32,
    /// BLAKE3 of the image's name and those of the ancestors.
    checksum: [u8; 32],
}

/// Bound to the image's name: a record that strayed to another image is damaged.
fn checksum(id: ImageId, names: &[u8]) -> [u8; 32] {
    *blake3::Hasher::new().update(id.as_bytes()).update(names).finalize().as_bytes()
}

impl Session {
    /// Stages the record of the ancestors of an image that is about to be published.
    ///
    /// # Errors
    /// One of them is not in the store.
    pub(crate) fn stage_ancestors(
        &mut self,
        id: ImageId,
        ancestors: &[ImageId],
    ) -> Result<PathBuf> {
        for &ancestor in ancestors {
            drop(self.open_image(ancestor)?);
        }
        let names: Vec<u8> = ancestors.iter().flat_map(|id| *id.as_bytes()).collect();
        let header = Header {
            magic: MAGIC,
            version: VERSION,
            count: ancestors.len() as u32,
            checksum: checksum(id, &names),
        };
        self.stage.write_file(&[bytemuck::bytes_of(&header), &names], RECORD_MODE)
    }
}

impl Store {
    /// The images that an image refers to, in the order in which it was stored with them: none
    /// if it holds all of its memory itself.
    ///
    /// # Errors
    /// The record is damaged: without it, nobody knows what the image needs.
    pub fn image_ancestors(&self, id: ImageId) -> Result<Vec<ImageId>> {
        let _acting = self.layout.act()?;
        let path = self.layout.ancestors(id);
        match fs::read(&path) {
            Ok(bytes) => {
                parse(id, &bytes).map_err(|why| StoreError::damaged(Kind::Ancestors, id, why))
            }
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(Vec::new()),
            Err(error) => Err(StoreError::io("read", &path, error)),
        }
    }

    /// Adds to images all that they refer to.
    pub(crate) fn add_ancestors(&self, images: &mut BTreeSet<ImageId>) -> Result<()> {
        let mut open: Vec<ImageId> = images.iter().copied().collect();
        while let Some(id) = open.pop() {
            let ancestors = self.image_ancestors(id)?;
            open.extend(ancestors.into_iter().filter(|&ancestor| images.insert(ancestor)));
        }
        Ok(())
    }
}

fn parse(id: ImageId, bytes: &[u8]) -> std::result::Result<Vec<ImageId>, &'static str> {
    let head = size_of::<Header>();
    let (header, names) = bytes.split_at_checked(head).ok_or("it is shorter than its header")?;
    let header: Header = bytemuck::pod_read_unaligned(header);
    if header.magic != MAGIC || header.version != VERSION {
        return Err("it is not a record of ancestors that this program knows");
    }
    if header.checksum != checksum(id, names) {
        return Err("its checksum is wrong");
    }
    let ancestors = names.chunks_exact(32);
    let count = header.count as usize;
    if count > ANCESTORS_MAX || ancestors.len() != count || !ancestors.remainder().is_empty() {
        return Err("its number of ancestors is wrong");
    }
    let name = |bytes: &[u8]| bytes.try_into().map(ImageId).expect("32 bytes");
    Ok(ancestors.map(name).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_record_is_that_of_its_image_and_whole() {
        let (id, other) = (ImageId([1; 32]), ImageId([2; 32]));
        let names = [[3; 32], [4; 32]].concat();
        let record = |count: u32| {
            let checksum = checksum(id, &names);
            let header = Header { magic: MAGIC, version: VERSION, count, checksum };
            [bytemuck::bytes_of(&header), &names].concat()
        };
        let good = record(2);
        assert_eq!(parse(id, &good), Ok(vec![ImageId([3; 32]), ImageId([4; 32])]));
        parse(other, &good).unwrap_err();
        for count in [0, 1, 3, u32::MAX] {
            parse(id, &record(count)).unwrap_err();
        }
        for len in 0..good.len() {
            parse(id, &good[..len]).unwrap_err();
        }
        for at in 0..good.len() {
            let mut flipped = good.clone();
            flipped[at] ^= 4;
            parse(id, &flipped).unwrap_err();
        }
    }
}
