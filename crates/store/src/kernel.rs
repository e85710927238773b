//! Builds of the Thaw kernel, and which images need which.
//!
//! An image holds pointers into the kernel that it was frozen under, so no other build can run
//! it. Images are opaque here: beside each lies a record of the build that it needs.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::io::{ErrorKind, Read};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::PathBuf;

use bytemuck::{Pod, Zeroable};

use crate::error::{Context, Kind, Result, StoreError};
use crate::id::{ImageId, KernelId};
use crate::image::list;
use crate::session::Session;
use crate::stage::{Existing, RECORD_MODE};
use crate::store::{Store, open_existing};

/// First bytes of a record of the kernel that an image needs.
const MAGIC: [u8; 8] = *b"THAWKRN\0";
/// Version of the record.
const VERSION: u32 = 1;
/// Most bytes of a kernel's file: several times what one with all its symbols has.
pub const KERNEL_MAX: u64 = 64 << 20;
/// Bytes of a stored kernel that are compared at once.
const COMPARED: usize = 256 << 10;

/// The record.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct Record {
    magic: [u8; 8],
    version: u32,
    reserved: u32,
    kernel: [u8; 32],
    /// BLAKE3 of the image's name and the kernel's.
    checksum: [u8; 32],
}

/// Bound to the image's name: a record that strayed to another image is damaged.
fn checksum(image: ImageId, kernel: KernelId) -> [u8; 32] {
    *blake3::Hasher::new().update(image.as_bytes()).update(kernel.as_bytes()).finalize().as_bytes()
}

/// A kernel build in the store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KernelInfo {
    /// Its name.
    pub id: KernelId,
    /// Bytes that it occupies on disk.
    pub allocated: u64,
}

impl Session {
    /// Stores the ELF file of a kernel build, unless it is there and intact. Images must name it
    /// before the session ends, or the garbage collector takes it.
    ///
    /// # Errors
    /// It is longer than [`KERNEL_MAX`], or cannot be written.
    pub fn put_kernel(&mut self, elf: &[u8]) -> Result<KernelId> {
        let _acting = self.layout.act()?;
        let id = KernelId::from(blake3::hash(elf));
        if elf.len() as u64 > KERNEL_MAX {
            return Err(StoreError::damaged(Kind::Kernel, id, "it is too long"));
        }
        if self.holds_kernel(id, elf)? {
            return Ok(id);
        }
        let to = self.layout.kernel(id);
        self.write_record(&to, &[elf], Existing::Replace)?;
        Ok(id)
    }

    /// Whether the kernel build of this name is in the store with these bytes. They are compared,
    /// which takes a part of the time that hashing the file takes.
    fn holds_kernel(&self, id: KernelId, elf: &[u8]) -> Result<bool> {
        let path = self.layout.kernel(id);
        let file = match open_existing(&path, Kind::Kernel, id) {
            Ok(file) => file,
            Err(StoreError::NotFound { .. }) => return Ok(false),
            Err(error) => return Err(error),
        };
        if file.metadata().context("inspect", &path)?.len() != elf.len() as u64 {
            return Ok(false);
        }
        let mut stored = vec![0; COMPARED.min(elf.len())];
        for (number, wanted) in elf.chunks(COMPARED).enumerate() {
            let stored = &mut stored[..wanted.len()];
            file.read_exact_at(stored, (number * COMPARED) as u64).context("read", &path)?;
            if stored != wanted {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Stages the record of the kernel that an image needs which is about to be published.
    ///
    /// # Errors
    /// That kernel is not in the store.
    pub(crate) fn stage_image_kernel(
        &mut self,
        image: ImageId,
        kernel: KernelId,
    ) -> Result<PathBuf> {
        if !self.has_kernel(kernel) {
            return Err(StoreError::not_found(Kind::Kernel, kernel));
        }
        let record = Record {
            magic: MAGIC,
            version: VERSION,
            reserved: 0,
            kernel: kernel.0,
            checksum: checksum(image, kernel),
        };
        self.stage.write_file(&[bytemuck::bytes_of(&record)], RECORD_MODE)
    }
}

impl Store {
    /// Whether a kernel build is in the store.
    pub fn has_kernel(&self, id: KernelId) -> bool {
        let Ok(_acting) = self.layout.act() else { return false };
        self.layout.kernel(id).is_file()
    }

    /// Where a kernel build lies if it is here, for `gdb`. The file must never be written to.
    pub fn kernel_path(&self, id: KernelId) -> PathBuf {
        self.layout.kernel(id)
    }

    /// The ELF file of a kernel build, which is what its name says.
    ///
    /// # Errors
    /// It is not there, or is not what was once stored.
    pub fn kernel(&self, id: KernelId) -> Result<Vec<u8>> {
        let _acting = self.layout.act()?;
        let path = self.layout.kernel(id);
        let file = open_existing(&path, Kind::Kernel, id)?;
        let mut elf = Vec::new();
        file.take(KERNEL_MAX + 1).read_to_end(&mut elf).context("read", &path)?;
        if elf.len() as u64 > KERNEL_MAX {
            return Err(StoreError::damaged(Kind::Kernel, id, "it is too long"));
        }
        match KernelId::from(blake3::hash(&elf)) == id {
            true => Ok(elf),
            false => Err(StoreError::damaged(Kind::Kernel, id, "its bytes do not match its name")),
        }
    }

    /// The kernel build that an image needs; `None`: it was stored before that was recorded.
    ///
    /// # Errors
    /// The record is damaged.
    pub fn image_kernel(&self, id: ImageId) -> Result<Option<KernelId>> {
        let _acting = self.layout.act()?;
        let path = self.layout.image_kernel(id);
        let mut bytes = Vec::new();
        match File::open(&path) {
            Ok(file) => {
                let most = size_of::<Record>() as u64 + 1;
                file.take(most).read_to_end(&mut bytes).context("read", &path)?;
            }
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(StoreError::io("open", &path, error)),
        }
        parse(id, &bytes).map(Some).map_err(|why| StoreError::damaged(Kind::ImageKernel, id, why))
    }

    /// All kernel builds, sorted by name.
    pub fn list_kernels(&self) -> Result<Vec<KernelInfo>> {
        let _acting = self.layout.act()?;
        let mut kernels = Vec::new();
        for path in list(&self.layout.kernels())? {
            let name = path.file_name().and_then(|name| name.to_str());
            let Some(id) = name.and_then(|name| name.parse().ok()) else { continue };
            let Ok(metadata) = fs::symlink_metadata(&path) else { continue }; // Just collected.
            kernels.push(KernelInfo { id, allocated: metadata.blocks() * 512 });
        }
        Ok(kernels)
    }

    /// The kernel builds that images need, and which images.
    ///
    /// # Errors
    /// A record is damaged, so that nobody knows.
    pub(crate) fn kernels_of(
        &self,
        images: &BTreeSet<ImageId>,
    ) -> Result<BTreeMap<KernelId, Vec<ImageId>>> {
        let mut kernels: BTreeMap<KernelId, Vec<ImageId>> = BTreeMap::new();
        for &image in images {
            if let Some(kernel) = self.image_kernel(image)? {
                kernels.entry(kernel).or_default().push(image);
            }
        }
        Ok(kernels)
    }
}

fn parse(image: ImageId, bytes: &[u8]) -> std::result::Result<KernelId, &'static str> {
    let record: Record =
        bytemuck::try_pod_read_unaligned(bytes).map_err(|_| "its length is wrong")?;
    if record.magic != MAGIC || record.version != VERSION || record.reserved != 0 {
        return Err("it is not a record that this program knows");
    }
    let kernel = KernelId(record.kernel);
    match record.checksum == checksum(image, kernel) {
        true => Ok(kernel),
        false => Err("its checksum is wrong"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_record_is_that_of_its_image_and_whole() {
        let (image, other, kernel) = (ImageId([1; 32]), ImageId([2; 32]), KernelId([3; 32]));
        let checksum = checksum(image, kernel);
        let record =
            Record { magic: MAGIC, version: VERSION, reserved: 0, kernel: kernel.0, checksum };
        let good = bytemuck::bytes_of(&record).to_vec();
        assert_eq!(parse(image, &good), Ok(kernel));
        parse(other, &good).unwrap_err();
        for len in 0..good.len() {
            parse(image, &good[..len]).unwrap_err();
        }
        parse(image, &[&good[..], &[0]].concat()).unwrap_err();
        for at in 0..good.len() {
            let mut flipped = good.clone();
            flipped[at] ^= 4;
            parse(image, &flipped).unwrap_err();
        }
    }
}
