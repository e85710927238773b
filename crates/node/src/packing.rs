//! Which images are packed, and what they are likely to be equal to.
//!
//! The images of a store may occupy some room on disk as they are booted. Beyond that, those that
//! were not used for longest are packed ([`Store::pack_image`]). A boot unpacks them again.

use std::collections::BTreeMap;
use std::time::SystemTime;

use thaw_abi::image::{Mapping, SOURCE_BLOB, SOURCE_IMAGE, ancestor_depth};
use thaw_sandbox::{Image, ImageError};
use thaw_store::{
    BlobHash, ImageId, IndexId, Kind, OpenIndex, Reference, Removed, Source, Store, StoreError,
    UnpackedImage,
};

use thaw_build::build::open_ancestor;
use thaw_home::config::ByteSize;
use thaw_home::seal::owner::Head;

/// Room on disk for images as they are booted, unless the operator says otherwise.
pub const ROOM_DEFAULT: ByteSize = ByteSize::mebibytes(8 << 10);

/// Who has images open that may be closed.
pub trait OpenImages {
    /// When an image was last of use to it; `None`: it does not have it open.
    fn last_used(&self, image: ImageId) -> Option<SystemTime>;
    /// Closes an image, if nothing needs it now. It is opened again when it is needed.
    fn close(&self, image: ImageId);
}

/// Nobody.
pub struct Nobody;

impl OpenImages for Nobody {
    fn last_used(&self, _: ImageId) -> Option<SystemTime> {
        None
    }

    fn close(&self, _: ImageId) {}
}

/// What [`make_room`] did.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RoomReport {
    /// Images that lie there packed only, now.
    pub packed: usize,
    /// Bytes on disk that this freed.
    pub freed: u64,
    /// Images that are in use.
    pub in_use: usize,
    /// Bytes on disk of the images that still lie there as they are booted. Encrypted ones are
    /// never packed, and count only where there is room for all.
    pub left: u64,
    /// What went wrong, one sentence for each image that stays for it.
    pub failed: Vec<String>,
}

/// Packs images that are not in use until those that are not packed occupy `room` bytes at most.
///
/// # Errors
/// The store cannot be read or written; single damaged images are no error.
pub fn make_room(
    store: &Store,
    room: u64,
    others: &dyn OpenImages,
) -> Result<RoomReport, StoreError> {
    let mut images = store.unpacked_images()?;
    let all = |images: &[UnpackedImage]| images.iter().map(|image| image.allocated).sum();
    let mut report = RoomReport { left: all(&images), ..RoomReport::default() };
    if report.left <= room {
        return Ok(report);
    }
    // Nothing is equal to them, and nothing makes them shorter.
    images.retain(|image| !is_encrypted(store, image.id));
    report.left = all(&images);
    images.sort_by_key(|image| {
        others.last_used(image.id).map_or(image.last_used, |used| used.max(image.last_used))
    });
    for image in images {
        if report.left <= room {
            break;
        }
        others.close(image.id);
        match pack(store, image.id) {
            Ok(Some(freed)) => {
                report.packed += 1;
                report.freed += freed;
                report.left -= image.allocated.min(report.left);
            }
            Ok(None) => report.in_use += 1,
            // Collected meanwhile.
            Err(PackError::Store(error)) if error.is_not_found() => {}
            Err(PackError::Store(
                error @ (StoreError::NoSpace { .. } | StoreError::Busy { .. }),
            )) => {
                return Err(error);
            }
            Err(error) => report.failed.push(format!("image {} stays: {error}", image.id)),
        }
    }
    Ok(report)
}

/// Whether an image is encrypted. One that cannot be read is not: packing says what is wrong.
fn is_encrypted(store: &Store, id: ImageId) -> bool {
    store.open_image(id).is_ok_and(|file| Head::read(&file).is_ok_and(|head| head.is_some()))
}

/// Why an image could not be packed.
#[derive(Debug, thiserror::Error)]
pub enum PackError {
    /// The store refuses it.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// The image is not usable.
    #[error(transparent)]
    Image(#[from] ImageError),
}

/// Has an image lie there packed only. How many bytes on disk that has freed; `None`: it is in use.
///
/// # Errors
/// It cannot be packed; it is as it was.
pub fn pack(store: &Store, id: ImageId) -> Result<Option<u64>, PackError> {
    match store.remove_unpacked(id) {
        Ok(removed) => return Ok(freed(removed, 0)),
        // It is not packed, or has to be packed again.
        Err(StoreError::NotFound { kind: Kind::Packed, .. })
        | Err(StoreError::Damaged { kind: Kind::Packed, .. }) => {}
        Err(error) => return Err(error.into()),
    }
    let sizes = store.pack_image(id, &references(store, id)?)?;
    Ok(freed(store.remove_unpacked(id)?, sizes.packed))
}

fn freed(removed: Removed, written: u64) -> Option<u64> {
    match removed {
        Removed::Freed(bytes) => Some(bytes.saturating_sub(written)),
        Removed::InUse => None,
    }
}

/// What an image is likely to be equal to: its parent at the same addresses, and the files that its
/// other memory there is mapped from.
fn references(store: &Store, id: ImageId) -> Result<Vec<Reference>, PackError> {
    let open = |id: ImageId| -> Result<Image, PackError> {
        let file = store.open_image(id)?;
        Ok(Image::open_with(file, &mut |ancestor| open_ancestor(store, ancestor))?)
    };
    let image = open(id)?;
    let index = match store.open_index(IndexId(image.header().index)) {
        Ok(index) => Some(index),
        // Files are compared with nothing then.
        Err(StoreError::NotFound { .. } | StoreError::Damaged { .. }) => None,
        Err(error) => return Err(error.into()),
    };
    let parent = match image.ancestors().last() {
        Some(parent) => Some((ImageId(parent.name), open(ImageId(parent.name))?)),
        None => None,
    };
    let parent = parent.as_ref().map(|(id, image)| Parent::new(*id, image));
    Ok(Likely { index: index.as_ref(), found: Vec::new() }.of(&image, parent.as_ref()))
}

/// The image that another one differs from.
struct Parent<'a> {
    id: ImageId,
    image: &'a Image,
    /// Its mappings by address space, by rising address.
    spaces: BTreeMap<u32, Vec<Mapping>>,
}

impl<'a> Parent<'a> {
    fn new(id: ImageId, image: &'a Image) -> Self {
        let mut spaces: BTreeMap<u32, Vec<Mapping>> = BTreeMap::new();
        for mapping in image.mappings() {
            spaces.entry(mapping.space()).or_default().push(*mapping);
        }
        spaces.values_mut().for_each(|mappings| mappings.sort_by_key(|mapping| mapping.start));
        Self { id, image, spaces }
    }

    /// Those of a process: of one that it does not have, those of its first one, from which the
    /// other was forked.
    fn mappings(&self, space: u32) -> &[Mapping] {
        let found = self.spaces.get(&space).or_else(|| self.spaces.get(&0));
        found.map_or(&[], Vec::as_slice)
    }

    fn ancestor(&self, depth: u32) -> Option<Source> {
        let named = self.image.ancestors().iter().find(|named| named.depth == depth);
        named.map(|named| Source::Image(ImageId(named.name)))
    }
}

/// References that are being found.
struct Likely<'a> {
    index: Option<&'a OpenIndex>,
    found: Vec<Reference>,
}

impl Likely<'_> {
    fn of(mut self, image: &Image, parent: Option<&Parent<'_>>) -> Vec<Reference> {
        let mappings = image.mappings();
        for (number, stored) in mappings.iter().enumerate() {
            if stored.source != SOURCE_IMAGE {
                continue;
            }
            if let Some(parent) = parent {
                self.of_parent(stored, parent);
            }
            // What was written of a file's mapping lies between the parts that were not.
            if let Some(before) = mappings[..number].last() {
                self.of_neighbour(stored, before);
            }
            if let Some(next) = mappings.get(number + 1) {
                self.of_neighbour(stored, next);
            }
        }
        self.found
    }

    /// The parts of a stored range that the parent has at the same addresses.
    fn of_parent(&mut self, stored: &Mapping, parent: &Parent<'_>) {
        let end = stored.start + stored.len;
        let all = parent.mappings(stored.space());
        let first = all.partition_point(|other| other.start + other.len <= stored.start);
        for other in all[first..].iter().take_while(|other| other.start < end) {
            let start = stored.start.max(other.start);
            let stop = end.min(other.start + other.len);
            let source = match (other.source, ancestor_depth(other.blob)) {
                (SOURCE_IMAGE, _) => Some(Source::Image(parent.id)),
                (SOURCE_BLOB, Some(depth)) => parent.ancestor(depth),
                (SOURCE_BLOB, None) => self.blob(other.blob),
                _ => None,
            };
            if let Some(source) = source {
                let at = stored.offset + (start - stored.start);
                let offset = other.offset + (start - other.start);
                self.found.push(Reference { at, len: stop - start, source, offset });
            }
        }
    }

    /// The file of a neighbouring mapping, as if it went on.
    fn of_neighbour(&mut self, stored: &Mapping, other: &Mapping) {
        if other.source != SOURCE_BLOB || ancestor_depth(other.blob).is_some() {
            return;
        }
        let is_before = other.start + other.len == stored.start;
        let is_behind = stored.start + stored.len == other.start;
        let offset = match (is_before, is_behind) {
            (true, _) => Some(other.offset + other.len),
            (_, true) => other.offset.checked_sub(stored.len),
            _ => None,
        };
        if let (Some(offset), Some(source)) = (offset, self.blob(other.blob)) {
            self.found.push(Reference { at: stored.offset, len: stored.len, source, offset });
        }
    }

    fn blob(&self, number: u32) -> Option<Source> {
        let blob = self.index?.index().blobs().get(number as usize).map(|blob| blob.hash)?;
        Some(Source::Blob(BlobHash(blob)))
    }
}
