//! Images at rest: packed, which takes a tenth of the room.
//!
//! An image that is booted is a file that is mapped. Most of its bytes are in other files of the
//! store, too: in the image that it differs from at the same address, in the files of its root
//! file system. *Packed*, it holds what remains, compressed ([`format`], [`codec`]). It is unpacked when
//! it is opened, and the result must have the image's name, which is the hash of its content. So
//! whatever is damaged, no other image is booted.
//!
//! The packed file lies beside the other. That is removed only after the packed one was read and
//! found to be whole, and only while nobody has it open.
//!
//! A source that is damaged is mended one day, by a file of the same name with other bytes. So
//! what an image is packed against, and what its packed form is verified with, is hashed first
//! ([`sources`]), and each piece of it again when it is used ([`pieces`]).

mod codec;
mod format;
mod pieces;
mod sources;

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fs::{self, File};
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt};
use std::path::Path;
use std::time::SystemTime;

use bytemuck::bytes_of;

use crate::error::{Context, Kind, Result, StoreError};
use crate::id::ImageId;
use crate::layout::ImageFile;
use crate::lock::{lock_shared, try_lock_exclusive};
use crate::sparse::{Namer, image_id};
use crate::stage::{Existing, Stage, publish, seal_as, sync_directory};
use crate::store::{Store, open_existing};
use crate::usage::allocated;
use codec::{Packed, UnpackError, read_padded};
use format::{HEADER_LEN, Header, PAGE, PAGES_MAX, RANGES_MAX, Range, Tables};
use sources::Sources;

pub use format::Source;
#[cfg(any(test, feature = "fuzzing"))]
pub(crate) use format::check_tables;
#[cfg(test)]
pub(crate) use format::tests::seed;
pub(crate) use sources::WholeSources;

/// Most images that are unpacked to unpack one: more than a chain can have.
const DEPTH_MAX: u32 = 64;
/// Times that an image is unpacked because somebody has removed it meanwhile.
const ATTEMPTS: u32 = 3;

/// What an image is likely to be equal to, or nearly so: `len` bytes at `at` in the image, at
/// `offset` in the source. All three are whole pages. A wrong one costs room only.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Reference {
    /// First byte in the image.
    pub at: u64,
    /// Bytes.
    pub len: u64,
    /// The other file.
    pub source: Source,
    /// First byte there.
    pub offset: u64,
}

/// What a packed image says of itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PackedSizes {
    /// Bytes of the image, holes included.
    pub image_len: u64,
    /// Bytes of it that are not zero.
    pub stored: u64,
    /// Bytes of the packed file.
    pub packed: u64,
}

/// An image that lies in the store as it is booted, and may be packed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UnpackedImage {
    /// Its name.
    pub id: ImageId,
    /// Bytes that it occupies on disk, with its prefetch file.
    pub allocated: u64,
    /// When it was last opened, if it was packed before, or stored.
    pub last_used: SystemTime,
    /// Whether its packed form is there.
    pub is_packed: bool,
}

/// What became of an image that was to lie there packed only.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Removed {
    /// So many bytes on disk are free.
    Freed(u64),
    /// Somebody has it open, packs it or stores it anew.
    InUse,
}

impl Store {
    /// Packs an image that is there, beside it. An older packed form is replaced.
    ///
    /// # Errors
    /// It is not there, does not consist of whole pages, or a source is damaged or cannot be read.
    pub fn pack_image(&self, id: ImageId, references: &[Reference]) -> Result<PackedSizes> {
        let _acting = self.layout.act()?;
        let mut session = self.session()?;
        let to = self.layout.packed_image(id);
        let (path, image) = (self.layout.image(id), self.open_unpacked(id)?);
        let metadata = image.metadata().context("inspect", &path)?;
        let pages = metadata.len() / PAGE as u64;
        if !metadata.len().is_multiple_of(PAGE as u64) || pages > PAGES_MAX {
            return Err(StoreError::damaged(Kind::Image, id, "it has an impossible length"));
        }
        let mut whole = WholeSources::default();
        let mut sources = Sources::new(self, 0, Some(&mut whole));
        let mut tables = tables_of(references, pages);
        let (file, from) = session.stage.create_file()?;
        let content = {
            let named = tables.sources.clone();
            let mut read = |number: u32, at, buffer: &mut [u8]| {
                sources.read(named[number as usize], at, buffer)
            };
            let mut writer = io::BufWriter::new(&file);
            codec::pack(&image, pages, &tables.ranges, &mut read, &mut writer)
                .and_then(|content| writer.into_inner().map(|_| content).map_err(Into::into))
        };
        if let Some(error) = sources.failed {
            return Err(error);
        }
        let content = content.context("write", &from)?;
        tables.frames = content.frames;
        let (header, packed) =
            tables.finish(id, pages, content.stored_pages).context("write", &from)?;
        file.write_all_at(&packed, header.tables_at().start).context("write", &from)?;
        file.write_all_at(bytes_of(&header), 0).context("write", &from)?;
        seal_as(&file, &from, metadata.permissions().mode() & 0o777)?;
        file.sync_all().context("sync", &from)?;
        publish(&from, &to, Existing::Replace)?;
        sync_directory(&self.layout.images())?;
        self.packed_sizes(id)
    }

    /// Whether an image has to be unpacked before it can be booted.
    pub fn is_packed_only(&self, id: ImageId) -> bool {
        let Ok(_acting) = self.layout.act() else { return false };
        !self.layout.image(id).exists() && self.layout.packed_image(id).exists()
    }

    /// What a packed image says of itself.
    ///
    /// # Errors
    /// It is not there, or is damaged.
    pub fn packed_sizes(&self, id: ImageId) -> Result<PackedSizes> {
        let _acting = self.layout.act()?;
        let (file, header) = self.open_packed(id)?;
        let packed = file.metadata().context("inspect", &self.layout.packed_image(id))?.len();
        let (image_len, stored) = (header.image_len(), header.stored_pages * PAGE as u64);
        Ok(PackedSizes { image_len, stored, packed })
    }

    /// Opens an image, and unpacks it if it is packed only. `depth` images are being unpacked, each
    /// because of the next.
    pub(crate) fn open_image_beneath(&self, id: ImageId, depth: u32) -> Result<File> {
        let _acting = self.layout.act()?;
        for _ in 0..ATTEMPTS {
            match self.open_unpacked(id) {
                Err(error) if error.is_not_found() => {
                    if !self.layout.packed_image(id).exists() {
                        return Err(error);
                    }
                    self.unpack(id, depth)?;
                }
                opened => {
                    let file = opened?;
                    self.note_use(id, &file);
                    return Ok(file);
                }
            }
        }
        Err(StoreError::not_found(Kind::Image, id))
    }

    /// Notes that an image was used which may be removed because it was not used for long. Where
    /// that cannot be noted, it goes sooner.
    fn note_use(&self, id: ImageId, file: &File) {
        if self.layout.packed_image(id).exists() {
            let _ = file.set_modified(SystemTime::now());
        }
    }

    /// Unpacks an image beside its packed form. Where the disk is full, others are removed that are
    /// packed, too, and not in use.
    fn unpack(&self, id: ImageId, depth: u32) -> Result<()> {
        match self.unpack_once(id, depth) {
            Err(StoreError::NoSpace { path }) => {
                let wanted = self.packed_sizes(id)?.stored;
                match self.make_room(wanted)? {
                    true => self.unpack_once(id, depth),
                    false => Err(StoreError::NoSpace { path }),
                }
            }
            unpacked => unpacked,
        }
    }

    fn unpack_once(&self, id: ImageId, depth: u32) -> Result<()> {
        let (file, header) = self.open_packed(id)?;
        let mut stage = Stage::create(&self.layout)?;
        let (image, from) = stage.create_file()?;
        image.set_len(header.image_len()).context("write", &from)?;
        // Its own name says whether the sources were right.
        let sources = Sources::new(self, depth + 1, None);
        let unpacked = self.unpack_to(id, (&file, &header), sources, &mut |bytes, at| {
            image.write_all_at(bytes, at)
        })?;
        unpacked.context("write", &from)?;
        if image_id(&image).context("read", &from)? != id {
            return Err(StoreError::damaged(Kind::Packed, id, WRONG_CONTENT));
        }
        let mode = file.metadata().context("inspect", &self.layout.packed_image(id))?.mode();
        seal_as(&image, &from, mode & 0o777)?;
        // Not even a host that stops now must leave half of it under its name.
        image.sync_all().context("sync", &from)?;
        publish(&from, &self.layout.image(id), Existing::Keep)
    }

    /// Unpacks all of an open packed image, as [`Packed::unpack`] does. The inner error is that of
    /// `write`.
    fn unpack_to(
        &self,
        id: ImageId,
        (file, header): (&File, &Header),
        mut sources: Sources<'_>,
        write: &mut dyn FnMut(&[u8], u64) -> io::Result<()>,
    ) -> Result<io::Result<()>> {
        let damaged = |why| StoreError::damaged(Kind::Packed, id, why);
        if sources.depth() > DEPTH_MAX {
            return Err(damaged("it differs from images that differ from it"));
        }
        let path = self.layout.packed_image(id);
        let tables = tables_in(id, file, header).map_err(|error| match error {
            UnpackError::Damaged(why) => damaged(why),
            UnpackError::Read(error) | UnpackError::Write(error) => {
                StoreError::io("read", &path, error)
            }
        })?;
        let packed = Packed {
            file,
            tables: &tables,
            pages: header.pages,
            stored_pages: header.stored_pages,
        };
        let unpacked = packed.unpack(
            &mut |number, at, buffer| sources.read(tables.sources[number as usize], at, buffer),
            write,
        );
        if let Some(error) = sources.failed {
            return Err(error);
        }
        match unpacked {
            Ok(()) => Ok(Ok(())),
            Err(UnpackError::Write(error)) => Ok(Err(error)),
            Err(UnpackError::Damaged(why)) => Err(damaged(why)),
            Err(UnpackError::Read(error)) => Err(StoreError::io("read", &path, error)),
        }
    }

    /// Unpacks an image to nowhere and compares it with its name; how many bytes were read. What it
    /// differs from is hashed before.
    ///
    /// # Errors
    /// It is damaged, or what it differs from is.
    pub fn verify_packed(&self, id: ImageId) -> Result<u64> {
        let (_, bytes) = self.open_verified(id, &mut WholeSources::default())?;
        Ok(bytes)
    }

    /// The same; the packed file that was read is open.
    pub(crate) fn open_verified(
        &self,
        id: ImageId,
        whole: &mut WholeSources,
    ) -> Result<(File, u64)> {
        let _acting = self.layout.act()?;
        let (file, header) = self.open_packed(id)?;
        let mut name = Namer::new(header.image_len());
        let sources = Sources::new(self, 1, Some(whole));
        let unpacked = self.unpack_to(id, (&file, &header), sources, &mut |bytes, at| {
            name.add(bytes, at);
            Ok(())
        })?;
        unpacked.context("read", &self.layout.packed_image(id))?;
        match name.finish() == id {
            true => Ok((file, header.tables_at().end)),
            false => Err(StoreError::damaged(Kind::Packed, id, WRONG_CONTENT)),
        }
    }

    /// Opens a packed image, which the garbage collector keeps as long as the file is open.
    fn open_packed(&self, id: ImageId) -> Result<(File, Header)> {
        let path = self.layout.packed_image(id);
        let file = open_existing(&path, Kind::Packed, id)?;
        lock_shared(&file, &path)?;
        let metadata = file.metadata().context("inspect", &path)?;
        if metadata.nlink() == 0 {
            return Err(StoreError::not_found(Kind::Packed, id));
        }
        let mut head = [0; HEADER_LEN];
        read_padded(&file, &mut head, 0).context("read", &path)?;
        let header = Header::parse(&head, metadata.len())
            .map_err(|why| StoreError::damaged(Kind::Packed, id, why))?;
        Ok((file, header))
    }

    /// The images that lie there as they are booted, those first that were not used for longest.
    /// Those that others differ from are left out: they are in use whenever one of the others is.
    ///
    /// # Errors
    /// The store cannot be read.
    pub fn unpacked_images(&self) -> Result<Vec<UnpackedImage>> {
        let _acting = self.layout.act()?;
        let bases = self.bases()?;
        let mut found = Vec::new();
        for (path, file) in self.image_files()? {
            let ImageFile::Image(id) = file else { continue };
            let Ok(metadata) = fs::symlink_metadata(&path) else { continue }; // Just removed.
            if bases.contains(&id) {
                continue;
            }
            found.push(UnpackedImage {
                id,
                allocated: metadata.blocks() * 512 + allocated(&self.layout.prefetch(id))?,
                last_used: metadata.modified().context("inspect", &path)?,
                is_packed: self.layout.packed_image(id).exists(),
            });
        }
        found.sort_by_key(|image| (image.last_used, image.id));
        Ok(found)
    }

    /// Images that others differ from, and those of runtime templates.
    fn bases(&self) -> Result<BTreeSet<ImageId>> {
        let mut bases: BTreeSet<ImageId> =
            self.list_templates()?.iter().map(|template| template.image).collect();
        for (_, file) in self.image_files()? {
            let ImageFile::Ancestors(id) = file else { continue };
            match self.image_ancestors(id) {
                Ok(ancestors) => bases.extend(ancestors),
                // Nobody knows what it needs, and nobody can boot it.
                Err(StoreError::Damaged { .. }) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(bases)
    }

    /// Removes an image that is packed as it is booted, and its prefetch file, unless somebody has
    /// it open. The packed form is read first and compared with the image's name.
    ///
    /// # Errors
    /// The packed form is not there or is damaged, or what it differs from is; nothing was removed.
    pub fn remove_unpacked(&self, id: ImageId) -> Result<Removed> {
        let _acting = self.layout.act()?;
        // Keeps the collector out.
        let _session = self.session()?;
        let (packed, _) = self.open_verified(id, &mut WholeSources::default())?;
        let path = self.layout.image(id);
        let file = open_existing(&path, Kind::Image, id)?;
        if !try_lock_exclusive(&file, &path)? {
            return Ok(Removed::InUse);
        }
        // Whoever replaces or removes one of the two forms has the other one locked meanwhile.
        let are_the_same =
            is_named(&file, &path) && is_named(&packed, &self.layout.packed_image(id));
        if !are_the_same {
            return Ok(Removed::InUse);
        }
        let mut freed = 0;
        for path in [self.layout.prefetch(id), path] {
            freed += allocated(&path)?;
            match fs::remove_file(&path) {
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                removed => removed.context("remove", &path)?,
            }
        }
        Ok(Removed::Freed(freed))
    }

    /// Removes images that are packed, too, until so many bytes are free; says whether they are.
    fn make_room(&self, wanted: u64) -> Result<bool> {
        let mut freed = 0;
        for image in self.unpacked_images()?.iter().filter(|image| image.is_packed) {
            if freed >= wanted {
                break;
            }
            match self.remove_unpacked(image.id) {
                Ok(Removed::Freed(bytes)) => freed += bytes,
                // One that cannot be packed again stays.
                Ok(Removed::InUse) | Err(StoreError::Damaged { .. }) => {}
                Err(error) if error.is_not_found() => {}
                Err(error) => return Err(error),
            }
        }
        Ok(freed >= wanted)
    }
}

const WRONG_CONTENT: &str = "its bytes do not match its name";

/// Whether a path names a file that is open.
fn is_named(file: &File, path: &Path) -> bool {
    let Ok(open) = file.metadata() else { return false };
    fs::symlink_metadata(path).is_ok_and(|now| (now.dev(), now.ino()) == (open.dev(), open.ino()))
}

/// Reads and checks the tables of a packed image.
fn tables_in(
    id: ImageId,
    file: &File,
    header: &Header,
) -> std::result::Result<Tables, UnpackError> {
    let at = header.tables_at();
    let mut packed = vec![0; (at.end - at.start) as usize];
    file.read_exact_at(&mut packed, at.start).map_err(UnpackError::Read)?;
    header.check(id, &packed).map_err(UnpackError::Damaged)?;
    header.tables(&packed).map_err(UnpackError::Damaged)
}

/// The references that can be used, by rising place in the image: of two for one page, the one that
/// was given first.
fn tables_of(references: &[Reference], pages: u64) -> Tables {
    let mut tables = Tables::default();
    let mut numbers: HashMap<Source, u32> = HashMap::new();
    let mut taken: BTreeMap<u64, Range> = BTreeMap::new();
    for reference in references {
        let Some((first, end)) = pages_of(reference, pages) else { continue };
        let next = tables.sources.len() as u32;
        let source = *numbers.entry(reference.source).or_insert(next);
        if source == next {
            tables.sources.push(reference.source);
        }
        let from = reference.offset / PAGE as u64;
        for free in free_between(&taken, first, end) {
            let Ok(count) = u32::try_from(free.end - free.start) else { continue };
            if taken.len() < RANGES_MAX {
                let range =
                    Range { first: free.start, from: from + free.start - first, count, source };
                taken.insert(range.first, range);
            }
        }
    }
    tables.ranges = taken.into_values().collect();
    tables
}

/// First page of a reference in an image of so many pages, and the first one behind; `None`: it
/// cannot be used.
fn pages_of(reference: &Reference, pages: u64) -> Option<(u64, u64)> {
    let Reference { at, len, offset, .. } = *reference;
    let page = PAGE as u64;
    let are_pages = [at, len, offset].iter().all(|bytes| bytes.is_multiple_of(page));
    let end = at.checked_add(len)? / page;
    (are_pages && end <= pages && offset.checked_add(len).is_some()).then_some((at / page, end))
}

/// The pages from `first` to `end` that no range has.
fn free_between(taken: &BTreeMap<u64, Range>, first: u64, end: u64) -> Vec<std::ops::Range<u64>> {
    let before = taken.range(..first).next_back().map_or(0, |(_, range)| range.end());
    let (mut at, mut free) = (first.max(before), Vec::new());
    for range in taken.range(first..end.max(first)).map(|(_, range)| range) {
        if at < range.first {
            free.push(at..range.first);
        }
        at = at.max(range.end());
    }
    if at < end {
        free.push(at..end);
    }
    free
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn of_two_references_for_a_page_the_first_one_counts() {
        let page = PAGE as u64;
        let reference = |at: u64, len: u64, image: u8, offset: u64| Reference {
            at: at * page,
            len: len * page,
            source: Source::Image(ImageId([image; 32])),
            offset: offset * page,
        };
        let given = [
            reference(10, 5, 1, 100),
            reference(20, 5, 1, 200),
            // All of it, and what is left of that.
            reference(8, 20, 2, 300),
            reference(0, 9, 1, 400),
            // Beyond the image, and beyond all files.
            reference(90, 20, 1, 0),
            reference(95, 2, 1, u64::MAX / page),
            Reference { at: 40 * page + 1, ..reference(0, 1, 1, 0) },
        ];
        let tables = tables_of(&given, 100);
        let found: Vec<_> = tables
            .ranges
            .iter()
            .map(|range| (range.first, range.count, range.source, range.from))
            .collect();
        let expected = [
            (0, 8, 0, 400),
            (8, 2, 1, 300),
            (10, 5, 0, 100),
            (15, 5, 1, 307),
            (20, 5, 0, 200),
            (25, 3, 1, 317),
        ];
        assert_eq!(found, expected);
    }
}
