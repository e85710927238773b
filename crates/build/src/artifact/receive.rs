//! From pieces to the store. Everything is read, compared and verified before anything is published:
//! what is refused leaves nothing in the store.

use super::ArtifactError;
use std::fs::File;
use std::io::{self, Read};
use std::os::unix::fs::FileExt;
use thaw_home::config::FunctionConfig;
use thaw_oci::PulledFunction;
use thaw_oci::artifact::{Naming, PIECE_MAX, PieceReader, Section};
use thaw_sandbox::{Image, Kernel};
use thaw_store::{
    Blob, Domain, ForeignIndex, IndexId, KERNEL_MAX, KernelId, NewImage, Session, StoreError,
    image_id,
};

/// Longest index: one of four million files.
const INDEX_MAX: u64 = 512 << 20;
/// Bytes that are copied at once.
const CHUNK: usize = 1 << 20;
const PAGE: usize = 4096;

/// The files of a function, of which nothing is published yet.
pub(super) struct ReceivedFiles {
    /// The index, whose contents have the names that they have in this store.
    pub index: ForeignIndex,
    /// The name of the index where it was pushed, which the image knows.
    pub original: IndexId,
}

/// Reads the index and the contents of all files into the session.
///
/// # Errors
/// They are not what the document and the index say.
pub(super) fn files(
    session: &mut Session,
    pulled: &PulledFunction,
    config: &FunctionConfig,
    files_max: usize,
) -> Result<ReceivedFiles, ArtifactError> {
    let part = &pulled.document.index;
    if part.size > INDEX_MAX {
        return Err(ArtifactError::refused("its index is longer than 512 MiB"));
    }
    let mut reader = pulled.reader(Section::Files);
    let bytes = exactly(&mut reader, part.size, "the index")?;
    let index = ForeignIndex::parse(&bytes, files_max)
        .map_err(|error| ArtifactError::refused(format!("of its index, {error}")))?;
    drop(bytes);
    if index.id() != part.id {
        return Err(ArtifactError::refused("its index is another one than its document says"));
    }
    let contents: u64 = index.blobs().map(|blob| blob.size).sum();
    if contents != part.contents {
        return Err(ArtifactError::refused(
            "its files are larger or smaller than its document says",
        ));
    }
    let namings =
        part.naming.iter().flat_map(|run| std::iter::repeat_n(&run.naming, run.count as usize));
    let mut names = Vec::with_capacity(index.blobs().len());
    let mut namings = namings.fuse();
    for blob in index.blobs() {
        let naming = namings.next().ok_or_else(wrong_count)?;
        names.push(content(session, &mut reader, blob, naming, config)?.hash);
    }
    if namings.next().is_some() {
        return Err(wrong_count());
    }
    reader.finish(Section::Files)?;
    let original = index.id();
    let renamed = index.renamed(&names).map_err(ArtifactError::refused)?;
    Ok(ReceivedFiles { index: renamed, original })
}

fn wrong_count() -> ArtifactError {
    ArtifactError::refused("its document counts its contents wrong")
}

/// Reads one content into the session. Who shared it where it was pushed decides by what it is
/// verified; who shares it here is decided here.
fn content(
    session: &mut Session,
    reader: &mut PieceReader,
    blob: Blob,
    naming: &Naming,
    config: &FunctionConfig,
) -> Result<Blob, ArtifactError> {
    let (there, here) = match naming {
        Naming::Shared => (Domain::shared(), config.domain()),
        Naming::Domain(name) => (Domain::own(name), config.domain()),
        Naming::Private(name) => (Domain::private(name), config.private_domain()),
    };
    let mut source = there.naming(reader.take(blob.size));
    let stored = session.put_stream(&mut source, &here).map_err(|error| match error {
        StoreError::Source(error) => unreadable("its files", &error),
        error => error.into(),
    })?;
    match stored {
        Some(stored) if source.blob() == blob => Ok(stored),
        _ => {
            Err(ArtifactError::refused(format!("content {} is not what its name says", blob.hash)))
        }
    }
}

/// Reads the kernel build that the image needs.
///
/// # Errors
/// It is another one, or none.
pub(super) fn kernel(pulled: &PulledFunction) -> Result<Kernel, ArtifactError> {
    let size = pulled.document.kernel.unwrap_or(0);
    if size > KERNEL_MAX {
        return Err(ArtifactError::refused("its kernel build is longer than 64 MiB"));
    }
    let mut reader = pulled.reader(Section::Kernel);
    let elf = exactly(&mut reader, size, "the kernel build")?;
    reader.finish(Section::Kernel)?;
    let wanted = pulled.document.image.kernel;
    let kernel = Kernel::from_elf(elf)
        .map_err(|_| ArtifactError::refused("its kernel build is no kernel"))?;
    match KernelId(kernel.build_id()) == wanted {
        true => Ok(kernel),
        false => {
            Err(ArtifactError::refused("its kernel build is another one than its image needs"))
        }
    }
}

/// Reads the recorded working set, if one came along.
///
/// # Errors
/// It is longer than a piece.
pub(super) fn working_set(pulled: &PulledFunction) -> Result<Option<Vec<u8>>, ArtifactError> {
    let mut bytes = Vec::new();
    let reader = pulled.reader(Section::WorkingSet);
    reader
        .take(PIECE_MAX as u64 + 1)
        .read_to_end(&mut bytes)
        .map_err(|error| unreadable("its working set", &error))?;
    match bytes.len() {
        0 => Ok(None),
        len if len > PIECE_MAX => {
            Err(ArtifactError::refused("its working set is longer than 4 MiB"))
        }
        _ => Ok(Some(bytes)),
    }
}

/// Reads the image into a file of the session and verifies it: its checksum, its tables, and that it
/// is the one that the document describes, over these files.
///
/// # Errors
/// It is not.
pub(super) fn image(
    session: &mut Session,
    pulled: &PulledFunction,
    files: &ReceivedFiles,
) -> Result<NewImage, ArtifactError> {
    let part = &pulled.document.image;
    let new = session.new_image_file()?;
    let mut reader = pulled.reader(Section::Image);
    copy(&mut reader, new.file(), part.size)?;
    reader.finish(Section::Image)?;
    let writing = |source| StoreError::Io { action: "read", path: "the new image".into(), source };
    if image_id(new.file()).map_err(writing)? != part.id {
        return Err(ArtifactError::refused("its image is another one than its document says"));
    }
    let image = open(&new, files.original, files, pulled)?;
    if files.index.id() != files.original {
        image.move_to_index(*files.index.id().as_bytes())?;
        open(&new, files.index.id(), files, pulled)?;
    }
    Ok(new)
}

/// Opens the image and compares its header with the document.
fn open(
    new: &NewImage,
    over: IndexId,
    files: &ReceivedFiles,
    pulled: &PulledFunction,
) -> Result<Image, ArtifactError> {
    let part = &pulled.document.image;
    let failed = |source| StoreError::Io { action: "open", path: "the new image".into(), source };
    let file = new.file().try_clone().map_err(failed)?;
    let image = Image::open(file).map_err(|error| match error {
        thaw_sandbox::ImageError::Differential => {
            ArtifactError::refused("its image holds only how it differs from others")
        }
        error => ArtifactError::refused(error),
    })?;
    let header = image.header();
    if header.depth != 0 {
        return Err(ArtifactError::refused("its image stands on others, which do not come along"));
    }
    if header.index != *over.as_bytes() {
        return Err(ArtifactError::refused("its image was frozen over other files"));
    }
    if header.kernel_build != part.kernel.0 || header.cpu_features != part.cpu_features {
        return Err(ArtifactError::refused(
            "its image needs another kernel build or processor than its document says",
        ));
    }
    image.check_contents(files.index.blobs().len()).map_err(ArtifactError::refused)?;
    Ok(image)
}

/// Why `what` cannot be read. A piece that is not there was removed by another pull, and what the host
/// lacks may be there soon: nobody has sent anything wrong.
fn unreadable(what: &str, error: &io::Error) -> ArtifactError {
    match (error.kind(), error.raw_os_error()) {
        (io::ErrorKind::NotFound, _) => ArtifactError::Removed,
        (_, Some(number)) => ArtifactError::Unread {
            what: what.to_owned(),
            error: io::Error::from_raw_os_error(number),
        },
        _ => ArtifactError::refused(format!("of {what}, {error}")),
    }
}

/// Reads so many bytes and no fewer.
fn exactly(reader: &mut PieceReader, size: u64, what: &str) -> Result<Vec<u8>, ArtifactError> {
    let mut bytes = Vec::new();
    let read = reader.take(size).read_to_end(&mut bytes);
    read.map_err(|error| unreadable(what, &error))?;
    match bytes.len() as u64 == size {
        true => Ok(bytes),
        false => Err(ArtifactError::refused(format!("{what} is shorter than its document says"))),
    }
}

/// Copies so many bytes into an empty file, leaving holes where pages are zero.
fn copy(reader: &mut PieceReader, file: &File, size: u64) -> Result<(), ArtifactError> {
    let written = |result: io::Result<()>| {
        result.map_err(|source| match source.kind() {
            io::ErrorKind::StorageFull => StoreError::NoSpace { path: "the new image".into() },
            _ => StoreError::Io { action: "write", path: "the new image".into(), source },
        })
    };
    let mut at = 0;
    let mut chunk = Vec::with_capacity(CHUNK);
    while at < size {
        chunk.clear();
        let want = (size - at).min(CHUNK as u64);
        let read = reader.take(want).read_to_end(&mut chunk);
        read.map_err(|error| unreadable("its image", &error))?;
        if chunk.len() as u64 != want {
            return Err(ArtifactError::refused("its image is shorter than its document says"));
        }
        for (number, page) in chunk.chunks(PAGE).enumerate() {
            if page.iter().any(|&byte| byte != 0) {
                written(file.write_all_at(page, at + (number * PAGE) as u64))?;
            }
        }
        at += want;
    }
    Ok(written(file.set_len(size))?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_piece_that_was_removed_meanwhile_is_nobodys_fault() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("piece");
        let read = || exactly(&mut PieceReader::new(vec![path.clone()]), 5, "the index");
        assert!(!read().unwrap_err().is_refusal());
        std::fs::write(&path, b"no piece").unwrap();
        assert!(read().unwrap_err().is_refusal());
        // It stands for a disk that cannot be read.
        std::fs::remove_file(&path).unwrap();
        std::fs::create_dir(&path).unwrap();
        assert!(!read().unwrap_err().is_refusal());
    }
}
