//! Snapshot images and their working sets.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::panic::resume_unwind;
use std::path::{Path, PathBuf};
use std::thread;

use bytemuck::{Pod, Zeroable};
use serde::{Deserialize, Serialize};

use crate::error::{Context, Kind, Result, StoreError};
use crate::id::{ImageId, KernelId};
use crate::layout::{ImageFile as NamedFile, parse_image_name};
use crate::lock::lock_shared;
use crate::session::Session;
use crate::sparse::image_id;
use crate::stage::{Existing, SHARED_MODE, publish, seal_as, sync, sync_all, sync_directory};
use crate::store::{Store, open_existing};

/// First bytes of a working set record.
const WORKING_SET_MAGIC: [u8; 8] = *b"THAWWKS\0";
/// Permissions of images that hold what programs held while they ran.
const SECRET_MODE: u32 = 0o400;
/// Version of the record's header.
const WORKING_SET_VERSION: u32 = 1;

/// An image being written. Write to [`NewImage::file`], then hand it to
/// [`Session::commit_image`]. Without that it vanishes with its session.
#[derive(Debug)]
pub struct NewImage {
    file: File,
    path: PathBuf,
    kernel: Option<KernelId>,
}

impl NewImage {
    /// Says which build of the Thaw kernel it needs, which is kept as long as the image.
    pub fn needs(&mut self, kernel: KernelId) {
        self.kernel = Some(kernel);
    }

    /// The file, empty at first, open for reading and writing. Leave zero pages
    /// out as holes.
    pub fn file(&self) -> &File {
        &self.file
    }

    /// Why it could not be written, with its place: a full disk is named.
    pub fn unwritten(&self, error: io::Error) -> StoreError {
        StoreError::io("write", &self.path, error)
    }
}

/// An image in the store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ImageInfo {
    /// Its name.
    pub id: ImageId,
    /// Bytes of the file, holes included.
    pub len: u64,
    /// Bytes that it occupies on disk, packed and not.
    pub allocated: u64,
    /// How it lies there.
    pub form: ImageForm,
    /// Bytes of its recorded working set's file, 0 if there is none.
    pub working_set_len: u64,
}

/// How an image lies on disk.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ImageForm {
    /// As it is booted.
    #[default]
    Whole,
    /// Packed: it is unpacked when it is opened.
    Packed,
    /// As it is booted, and packed: it was unpacked.
    Both,
}

/// Start of a working set record; the content follows.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct WorkingSetHeader {
    magic: [u8; 8],
    version: u32,
    reserved: u32,
    len: u64,
    /// BLAKE3 of the image's name and the content.
    checksum: [u8; 32],
}

impl Session {
    /// Begins an image.
    pub fn new_image_file(&mut self) -> Result<NewImage> {
        let _acting = self.layout.act()?;
        let (file, path) = self.stage.create_file()?;
        Ok(NewImage { file, path, kernel: None })
    }

    /// Makes a finished image durable, read-only and visible under its name.
    /// Function records must name it before the session ends, or the garbage
    /// collector may take it.
    pub fn commit_image(&mut self, image: NewImage) -> Result<ImageId> {
        self.commit(image, &[], SHARED_MODE)
    }

    /// The same with an image that refers to others: `ancestors` are all of them. They stay as
    /// long as it does.
    ///
    /// # Errors
    /// One of them, or the kernel that the image needs, is not in the store.
    pub fn commit_image_over(&mut self, image: NewImage, ancestors: &[ImageId]) -> Result<ImageId> {
        self.commit(image, ancestors, SHARED_MODE)
    }

    /// The same with the image of a checkpoint, which only the store's owner may read and which
    /// may differ from others only: `ancestors` are all that it refers to. They stay as long as
    /// it does.
    ///
    /// # Errors
    /// One of them, or the kernel that the image needs, is not in the store.
    pub fn commit_checkpoint_image(
        &mut self,
        image: NewImage,
        ancestors: &[ImageId],
    ) -> Result<ImageId> {
        self.commit(image, ancestors, SECRET_MODE)
    }

    fn commit(&mut self, image: NewImage, ancestors: &[ImageId], mode: u32) -> Result<ImageId> {
        let _acting = self.layout.act()?;
        let NewImage { file, path, kernel } = image;
        seal_as(&file, &path, mode)?;
        // Its bytes go to the disk while they are hashed.
        let (id, records) = thread::scope(|scope| -> Result<_> {
            let syncing = scope.spawn(|| sync(&path));
            let id = image_id(&file).context("read", &path)?;
            let records = self.stage_records(id, ancestors, kernel)?;
            sync_all(&records.iter().map(|(from, _)| from.as_path()).collect::<Vec<_>>())?;
            syncing.join().unwrap_or_else(|panic| resume_unwind(panic))?;
            Ok((id, records))
        })?;
        // First: an image without them would lose its ancestors. A function or a template names the
        // image only when all of these names are on disk.
        for (from, to) in &records {
            publish(from, to, Existing::Replace)?;
        }
        let to = self.layout.image(id);
        // One of that name that is damaged gets replaced. Both are locked until the packed form
        // has been looked at: nobody removes one form while the other goes.
        let old = self.store.open_unpacked(id).ok();
        let intact = old.as_ref().is_some_and(|old| image_id(old).is_ok_and(|found| found == id));
        // Opened by name: copies of `file` may outlive this.
        let new = File::open(&path).context("open", &path)?;
        lock_shared(&new, &path)?;
        let existing = if intact { Existing::Keep } else { Existing::Replace };
        publish(&path, &to, existing)?;
        // A packed form that is damaged may be why it was made again. One that is whole stays:
        // somebody may have verified it just now, and be about to remove the other form.
        let packed = self.layout.packed_image(id);
        if !intact && packed.exists() && self.verify_packed(id).is_err() {
            self.remove_record(&packed)?;
        }
        sync_directory(&self.layout.images())?;
        Ok(id)
    }

    /// Writes what the store notes beside an image; each with the place where it belongs.
    fn stage_records(
        &mut self,
        id: ImageId,
        ancestors: &[ImageId],
        kernel: Option<KernelId>,
    ) -> Result<Vec<(PathBuf, PathBuf)>> {
        let mut records = Vec::new();
        if !ancestors.is_empty() {
            records.push((self.stage_ancestors(id, ancestors)?, self.layout.ancestors(id)));
        }
        if let Some(kernel) = kernel {
            records.push((self.stage_image_kernel(id, kernel)?, self.layout.image_kernel(id)));
        }
        Ok(records)
    }
}

impl Store {
    /// Opens an image read-only and close-on-exec. One that is packed is unpacked first, which takes
    /// milliseconds for each 10 MiB. While the descriptor or a copy of it lives, the garbage
    /// collector keeps the image, and nobody packs it.
    ///
    /// # Errors
    /// It is not there, it is packed and damaged, or there is no room to unpack it.
    pub fn open_image(&self, id: ImageId) -> Result<File> {
        self.open_image_beneath(id, 0)
    }

    /// The same if it lies there as it is booted.
    pub(crate) fn open_unpacked(&self, id: ImageId) -> Result<File> {
        let _acting = self.layout.act()?;
        let path = self.layout.image(id);
        let file = open_existing(&path, Kind::Image, id)?;
        lock_shared(&file, &path)?;
        if file.metadata().context("inspect", &path)?.nlink() == 0 {
            return Err(StoreError::not_found(Kind::Image, id));
        }
        Ok(file)
    }

    /// Records the working set of an image, replacing an older one. The bytes
    /// mean nothing to the store.
    pub fn put_working_set(&self, id: ImageId, bytes: &[u8]) -> Result<()> {
        let _acting = self.layout.act()?;
        let mut session = self.session()?;
        if !session.layout.has_image(id) {
            return Err(StoreError::not_found(Kind::Image, id));
        }
        let header = WorkingSetHeader {
            magic: WORKING_SET_MAGIC,
            version: WORKING_SET_VERSION,
            reserved: 0,
            len: bytes.len() as u64,
            checksum: working_set_checksum(id, bytes),
        };
        let to = session.layout.working_set(id);
        session.write_record(&to, &[bytemuck::bytes_of(&header), bytes], Existing::Replace)
    }

    /// The recorded working set of an image; `None` if none was recorded. A
    /// damaged one is an error, after which a caller can go on without.
    pub fn working_set(&self, id: ImageId) -> Result<Option<Vec<u8>>> {
        let _acting = self.layout.act()?;
        let path = self.layout.working_set(id);
        let mut bytes = match fs::read(&path) {
            Ok(bytes) => bytes,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(StoreError::io("read", &path, error)),
        };
        let damaged = |why: &str| Err(StoreError::damaged(Kind::WorkingSet, id, why));
        let head = size_of::<WorkingSetHeader>();
        if bytes.len() < head {
            return damaged("it is shorter than its header");
        }
        let content = bytes.split_off(head);
        let header: WorkingSetHeader = bytemuck::pod_read_unaligned(&bytes);
        if header.magic != WORKING_SET_MAGIC || header.version != WORKING_SET_VERSION {
            return damaged("it is not a working set that this program knows");
        }
        if header.len != content.len() as u64
            || header.checksum != working_set_checksum(id, &content)
        {
            return damaged("its checksum is wrong");
        }
        Ok(Some(content))
    }

    /// Forgets the working set of an image and its pages, so that the next boot records
    /// one; says whether there was one.
    pub fn remove_working_set(&self, id: ImageId) -> Result<bool> {
        let _acting = self.layout.act()?;
        let mut session = self.session()?;
        let prefetch = session.layout.prefetch(id);
        session.remove_record(&prefetch)?;
        let path = session.layout.working_set(id);
        session.remove_record(&path)
    }

    /// All images, sorted by name.
    pub fn list_images(&self) -> Result<Vec<ImageInfo>> {
        let _acting = self.layout.act()?;
        let mut images: BTreeMap<ImageId, ImageInfo> = BTreeMap::new();
        for (path, name) in self.image_files()? {
            let (id, form) = match name {
                NamedFile::Image(id) => (id, ImageForm::Whole),
                NamedFile::Packed(id) => (id, ImageForm::Packed),
                _ => continue,
            };
            let Ok(metadata) = fs::symlink_metadata(&path) else { continue }; // Just collected.
            let working_set_len =
                fs::symlink_metadata(self.layout.working_set(id)).map_or(0, |m| m.len());
            let found = images.entry(id).or_insert(ImageInfo {
                id,
                len: 0,
                allocated: 0,
                form,
                working_set_len,
            });
            found.allocated += metadata.blocks() * 512;
            found.form = if found.form == form { form } else { ImageForm::Both };
            if form == ImageForm::Whole {
                found.len = metadata.len();
            }
        }
        for image in images.values_mut().filter(|image| image.form == ImageForm::Packed) {
            // A damaged one is told of where it is opened.
            image.len = self.packed_sizes(image.id).map_or(0, |sizes| sizes.image_len);
        }
        Ok(images.into_values().collect())
    }

    /// Every file in the image directory that the store put there.
    pub(crate) fn image_files(&self) -> Result<Vec<(PathBuf, NamedFile)>> {
        let directory = self.layout.images();
        let paths = list(&directory)?;
        Ok(paths
            .into_iter()
            .filter_map(|path| {
                let name = parse_image_name(path.file_name()?.to_str()?)?;
                Some((path, name))
            })
            .collect())
    }
}

/// Paths of a directory's entries, sorted.
pub(crate) fn list(directory: &Path) -> Result<Vec<PathBuf>> {
    let mut paths = Vec::new();
    for entry in fs::read_dir(directory).context("read", directory)? {
        paths.push(entry.context("read", directory)?.path());
    }
    paths.sort();
    Ok(paths)
}

/// Bound to the image's name: a record that strayed to another image is damaged.
fn working_set_checksum(id: ImageId, bytes: &[u8]) -> [u8; 32] {
    *blake3::Hasher::new().update(id.as_bytes()).update(bytes).finalize().as_bytes()
}
