//! The files that a packed image differs from.

use std::collections::{BTreeMap, HashMap};
use std::fs::File;
use std::io;
use std::rc::Rc;

use super::WRONG_CONTENT;
use super::codec::read_padded;
use super::format::Source;
use super::pieces::{PieceReader, Pieces};
use crate::error::{Context, Kind, Result, StoreError};
use crate::sparse::image_id_read;
use crate::store::Store;

/// Sources whose bytes were found to match their names, with what tells each piece of them again:
/// 256 bytes for each MiB.
#[derive(Debug, Default)]
pub(crate) struct WholeSources(BTreeMap<Source, Rc<Pieces>>);

/// The files that a packed image refers to, opened when they are needed.
pub(super) struct Sources<'a> {
    store: &'a Store,
    depth: u32,
    open: HashMap<Source, Opened>,
    /// Those that are known to be whole. The others are hashed when they are opened; without it,
    /// none is.
    whole: Option<&'a mut WholeSources>,
    /// Why the last one could not be used.
    pub failed: Option<StoreError>,
}

/// A source that is open.
enum Opened {
    /// Whatever its bytes are.
    Plain(File),
    /// What is read of it are the bytes that its name is the hash of.
    Whole(PieceReader),
}

impl<'a> Sources<'a> {
    /// For an image that is the `depth`th one that is being unpacked, each because of the one
    /// before it.
    pub fn new(store: &'a Store, depth: u32, whole: Option<&'a mut WholeSources>) -> Self {
        Self { store, depth, open: HashMap::new(), whole, failed: None }
    }

    /// How many images are being unpacked.
    pub fn depth(&self) -> u32 {
        self.depth
    }

    /// Reads from a source; bytes behind its end are zero.
    ///
    /// # Errors
    /// The host's; of one that cannot be used, with the reason in `failed`.
    pub fn read(&mut self, source: Source, at: u64, buffer: &mut [u8]) -> io::Result<()> {
        if !self.open.contains_key(&source) {
            match self.open(source) {
                Ok(opened) => drop(self.open.insert(source, opened)),
                Err(error) => {
                    self.failed = Some(error);
                    return Err(io::ErrorKind::NotFound.into());
                }
            }
        }
        let opened = self.open.get_mut(&source).expect("it was opened");
        match opened {
            Opened::Plain(file) => read_padded(file, buffer, at),
            Opened::Whole(reader) => reader.read_padded(buffer, at).inspect_err(|error| {
                if error.kind() == io::ErrorKind::InvalidData {
                    self.failed = Some(damaged(source));
                }
            }),
        }
    }

    fn open(&mut self, source: Source) -> Result<Opened> {
        let file = match source {
            Source::Image(id) => self.store.open_image_beneath(id, self.depth),
            Source::Blob(hash) => self.store.open_blob(hash),
        }?;
        let Some(whole) = &mut self.whole else { return Ok(Opened::Plain(file)) };
        let pieces = match whole.0.get(&source) {
            Some(pieces) => pieces.clone(),
            None => {
                let pieces = check(self.store, source, &file)?;
                whole.0.insert(source, pieces.clone());
                pieces
            }
        };
        Ok(Opened::Whole(PieceReader::new(file, pieces)))
    }
}

/// Compares a source with its name; what tells its pieces again.
fn check(store: &Store, source: Source, file: &File) -> Result<Rc<Pieces>> {
    let path = match source {
        Source::Image(id) => store.layout.image(id),
        Source::Blob(hash) => store.layout.blob(hash),
    };
    let pieces = Rc::new(Pieces::of(file).context("read", &path)?);
    let own = file.try_clone().context("open", &path)?;
    // By way of the pieces: they are those of the very bytes that the name is compared with.
    let mut reader = PieceReader::new(own, pieces.clone());
    let is_whole = match source {
        Source::Image(id) => {
            let found = image_id_read(file, &mut |buffer, at| reader.read_padded(buffer, at));
            found.map(|found| found == id)
        }
        Source::Blob(hash) => {
            let mut problem = None;
            let mut read = |buffer: &mut [u8], at| match reader.read(buffer, at) {
                Err(error) => {
                    problem = Some(io::Error::from(error.kind()));
                    Err(error)
                }
                count => count,
            };
            match (store.check_blob_read(hash, &mut read, &store.domains()?), problem) {
                (_, Some(problem)) => Err(problem),
                (checked, None) => Ok(checked?.0),
            }
        }
    };
    match is_whole {
        Ok(true) => Ok(pieces),
        Ok(false) => Err(damaged(source)),
        Err(error) if error.kind() == io::ErrorKind::InvalidData => Err(damaged(source)),
        Err(error) => Err(StoreError::io("read", &path, error)),
    }
}

fn damaged(source: Source) -> StoreError {
    match source {
        Source::Image(id) => StoreError::damaged(Kind::Image, id, WRONG_CONTENT),
        Source::Blob(hash) => StoreError::damaged(Kind::Blob, hash, WRONG_CONTENT),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::blob::Domain;
    use std::fs::{self, Permissions};
    use std::os::unix::fs::{FileExt, PermissionsExt};

    fn is_damaged(sources: &Sources<'_>) -> bool {
        matches!(sources.failed, Some(StoreError::Damaged { .. }))
    }

    #[test]
    fn damage_after_a_source_was_hashed_is_noticed_by_whoever_reads_it() {
        let directory = tempfile::tempdir().unwrap();
        let store = Store::open(directory.path()).unwrap();
        let bytes: Vec<u8> = (0..1_000_000u32).flat_map(|word| word.to_le_bytes()).collect();
        let mut session = store.session().unwrap();
        let blob = session.put_blob(&bytes, &Domain::shared()).unwrap().unwrap();
        session.put_index(&crate::Tree::new()).unwrap();
        let source = Source::Blob(blob.hash);
        let mut whole = WholeSources::default();
        let mut page = [0; 4096];
        let mut sources = Sources::new(&store, 0, Some(&mut whole));
        sources.read(source, 0, &mut page).unwrap();
        assert_eq!(page, bytes[..4096]);

        let path = store.layout.blob(blob.hash);
        fs::set_permissions(&path, Permissions::from_mode(0o600)).unwrap();
        let file = File::options().write(true).open(&path).unwrap();
        file.write_all_at(&[!bytes[3_000_000]], 3_000_000).unwrap();
        // What is not damaged can be read.
        sources.read(source, 1 << 20, &mut page).unwrap();
        assert!(sources.failed.is_none());
        sources.read(source, 3_000_000, &mut page).unwrap_err();
        assert!(is_damaged(&sources));
        // Whoever opens it again knows the pieces still.
        let mut again = Sources::new(&store, 0, Some(&mut whole));
        again.read(source, 2_999_000, &mut page).unwrap_err();
        assert!(is_damaged(&again));
        let mut fresh = WholeSources::default();
        let mut anew = Sources::new(&store, 0, Some(&mut fresh));
        anew.read(source, 0, &mut page).unwrap_err();
        assert!(is_damaged(&anew));
        file.write_all_at(&[bytes[3_000_000]], 3_000_000).unwrap();
        again.read(source, 2_999_000, &mut page).unwrap();
        assert_eq!(page, bytes[2_999_000..][..4096]);
        // Cut off, where zeros would be read.
        file.set_len(2_999_500).unwrap();
        let mut again = Sources::new(&store, 0, Some(&mut whole));
        again.read(source, 2_999_900, &mut page).unwrap_err();
    }
}
