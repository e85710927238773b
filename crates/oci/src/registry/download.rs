//! Downloading blobs into files, by digest. What was downloaded before an interruption is not
//! downloaded again: complete blobs are kept, and others go on where they ended.

use super::pace::Broke;
use super::source::{Broken, Source};
use crate::error::OciError;
use oci_spec::image::Descriptor;
use sha2::{Digest as _, Sha256};
use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, SystemTime};
use thaw_store::{Acting, Owner};
use tokio::sync::Semaphore;
use tokio::task::JoinSet;

/// Blobs that are downloaded at the same time.
const AT_ONCE: usize = 4;
/// How often a download is tried again without a byte of progress, and the first pause.
const ATTEMPTS: u32 = 5;
const PAUSE: Duration = Duration::from_millis(200);
const PROGRESS_INTERVAL: Duration = Duration::from_millis(200);

/// How far a pull has come.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PullProgress {
    /// Bytes that are here.
    pub bytes: u64,
    /// Bytes of all blobs.
    pub of: u64,
    /// Of those that are here, the bytes that this pull has moved.
    pub moved: u64,
    /// Pieces that could not be had and are tried again, of a function that is served meanwhile.
    pub failed: u64,
}

/// Counters of a download.
#[derive(Debug, Default)]
struct Counters {
    here: AtomicU64,
    moved: AtomicU64,
}

/// A directory of blobs, named by their digests.
#[derive(Clone, Debug)]
pub(crate) struct BlobDirectory {
    path: PathBuf,
    owner: Owner,
}

impl BlobDirectory {
    /// The directory at `path`, made if missing, in which is acted with the rights of `owner`.
    ///
    /// # Errors
    /// It cannot be made.
    pub fn make(path: &Path, owner: Owner) -> Result<Self, OciError> {
        let directory = Self { path: path.to_owned(), owner };
        let made = {
            let _acting = directory.act()?;
            fs::create_dir_all(path)
        };
        made.map_err(|error| OciError::file("make", path, error))?;
        Ok(directory)
    }

    /// Acts as the owner until the result is dropped, which must be before the next `await`: other
    /// tasks of the thread would act so, too.
    fn act(&self) -> Result<Acting, OciError> {
        let failed = |error| OciError::file("act as the owner of", &self.path, error);
        self.owner.act().map_err(failed)
    }

    /// A blob that is whole and here.
    fn has(&self, hex: &str, size: u64) -> Result<bool, OciError> {
        let _acting = self.act()?;
        let path = self.blob(hex);
        let is_here = path.metadata().is_ok_and(|found| found.is_file() && found.len() == size);
        // One that is damaged is removed, and downloaded again.
        if !is_here || verify(&path, &format!("sha256:{hex}")).is_err() {
            return Ok(false);
        }
        note_use(&path);
        Ok(true)
    }

    /// Opens the beginning of a blob, to go on with it.
    fn open_part(&self, hex: &str) -> Result<File, OciError> {
        let _acting = self.act()?;
        let path = self.part(hex);
        let file = OpenOptions::new().read(true).append(true).create(true).open(&path);
        file.map_err(|error| OciError::file("write", &path, error))
    }

    /// Makes the beginning a blob, which is whole now.
    fn complete(&self, hex: &str) -> Result<(), OciError> {
        let _acting = self.act()?;
        let (part, done) = (self.part(hex), self.blob(hex));
        verify(&part, &format!("sha256:{hex}"))?;
        fs::rename(&part, &done).map_err(|error| OciError::file("write", &done, error))
    }

    /// Where the blob with this digest lies, if it does.
    pub fn blob(&self, hex: &str) -> PathBuf {
        self.path.join(hex)
    }

    fn part(&self, hex: &str) -> PathBuf {
        self.path.join(format!("{hex}.part"))
    }
}

/// Notes that a piece is used: it is not old. Where that cannot be noted, it is moved again one day.
pub(crate) fn note_use(path: &Path) {
    let _ = File::open(path).and_then(|file| file.set_modified(SystemTime::now()));
}

/// The different blobs among some.
pub(crate) fn distinct<'a>(all: impl Iterator<Item = &'a Descriptor>) -> Vec<Descriptor> {
    let mut seen = std::collections::HashSet::new();
    all.filter(|blob| seen.insert(blob.digest().to_string())).cloned().collect()
}

impl Source {
    /// Downloads what is not here yet, some at a time. Returns how many bytes were moved.
    ///
    /// # Errors
    /// A blob is not there, or is not what its digest says.
    pub async fn fetch(
        &self,
        wanted: Vec<Descriptor>,
        directory: &BlobDirectory,
        progress: &mut dyn FnMut(PullProgress),
    ) -> Result<u64, OciError> {
        if let Some(blob) = wanted.iter().find(|blob| blob.as_digest_sha256().is_none()) {
            let what = crate::error::escaped(blob.digest().to_string().as_bytes());
            return Err(self.refused(format!("the digest {what} is not of kind sha256")));
        }
        let of = wanted.iter().fold(0_u64, |sum, blob| sum.saturating_add(blob.size()));
        let counters = Arc::new(Counters::default());
        let places = Arc::new(Semaphore::new(AT_ONCE));
        let mut tasks = JoinSet::new();
        for blob in wanted {
            let (source, directory) = (self.clone(), directory.clone());
            let (counters, places) = (counters.clone(), places.clone());
            tasks.spawn(async move {
                let _place = places.acquire().await.expect("it is never closed");
                source.blob(&blob, &directory, &counters).await
            });
        }
        loop {
            let next = tokio::time::timeout(PROGRESS_INTERVAL, tasks.join_next()).await;
            let (bytes, moved) =
                (counters.here.load(Ordering::Relaxed), counters.moved.load(Ordering::Relaxed));
            progress(PullProgress { bytes, of, moved, failed: 0 });
            match next {
                Ok(None) => return Ok(moved),
                Ok(Some(done)) => done.expect("no task panics or is aborted")?,
                Err(_) => {}
            }
        }
    }

    /// Downloads a blob, going on after interruptions.
    async fn blob(
        &self,
        blob: &Descriptor,
        directory: &BlobDirectory,
        counters: &Counters,
    ) -> Result<(), OciError> {
        let hex = blob.as_digest_sha256().expect("others were refused").to_owned();
        let part = directory.part(&hex);
        if directory.has(&hex, blob.size())? {
            counters.here.fetch_add(blob.size(), Ordering::Relaxed);
            return Ok(());
        }
        let unusable = |error| OciError::file("write", &part, error);
        let mut file = directory.open_part(&hex)?;
        let mut len = file.metadata().map_err(unusable)?.len();
        if len > blob.size() {
            file.set_len(0).map_err(unusable)?;
            len = 0;
        }
        counters.here.fetch_add(len, Ordering::Relaxed);
        // A registry that begins again and again does not get on, nor does one that only drips.
        let (mut attempts, mut longest) = (0, len);
        while len < blob.size() {
            let result = self.go_on(blob, (&mut file, &part), len, counters).await;
            let now = file.metadata().map_err(unusable)?.len();
            let gets_on = now > longest && !matches!(result, Err(Broken::Slow));
            attempts = if gets_on { 0 } else { attempts + 1 };
            (len, longest) = (now, longest.max(now));
            let broken = match result {
                Err(Broken::Token(error) | Broken::Final(error)) => return Err(error),
                Err(Broken::Network(reason)) => Some(reason),
                Err(Broken::Slow) => Some(Broke::Slow.to_string()),
                Ok(()) if len < blob.size() => Some("it sends no more".to_owned()),
                Ok(()) => None,
            };
            match broken {
                Some(reason) if attempts >= ATTEMPTS => {
                    let host = &self.host;
                    return Err(self.refused(format!(
                        "the connection to {host} broke {ATTEMPTS} times ({reason}); try again, it goes on \
                         where it ended"
                    )));
                }
                Some(_) => tokio::time::sleep(PAUSE * 2_u32.pow(attempts)).await,
                None => {}
            }
        }
        directory.complete(&hex)
    }

    /// Downloads from byte `from` on, until the connection ends.
    async fn go_on(
        &self,
        blob: &Descriptor,
        (file, path): (&mut File, &Path),
        from: u64,
        counters: &Counters,
    ) -> Result<(), Broken> {
        let digest = blob.digest().to_string();
        let unusable = |error| Broken::Final(OciError::file("write", path, error));
        let mut stream = self.open_blob(&digest, from).await?;
        let mut left = blob.size() - stream.from;
        if stream.from < from {
            file.set_len(0).map_err(unusable)?;
            counters.here.fetch_sub(from, Ordering::Relaxed);
        }
        while let Some(chunk) = stream.next().await.map_err(Broken::from)? {
            if chunk.len() as u64 > left {
                let what = "a blob that the registry sent";
                let error = OciError::document(what, "it is longer than the manifest says");
                return Err(Broken::Final(error));
            }
            file.write_all(&chunk).map_err(unusable)?;
            left -= chunk.len() as u64;
            counters.here.fetch_add(chunk.len() as u64, Ordering::Relaxed);
            counters.moved.fetch_add(chunk.len() as u64, Ordering::Relaxed);
        }
        match left {
            0 => Ok(()),
            _ => Err(Broken::Network("it ended too early".to_owned())),
        }
    }

    /// A short blob, in memory.
    ///
    /// # Errors
    /// It is longer than its descriptor or `most` says, or not what its digest says.
    pub async fn small_blob(
        &self,
        what: &'static str,
        blob: &Descriptor,
        most: u64,
    ) -> Result<Vec<u8>, OciError> {
        if blob.size() > most {
            return Err(OciError::document(what, format!("it is longer than {most} bytes")));
        }
        let wanted = blob.digest().to_string();
        let broke_off =
            |broke: Broke| self.refused(format!("{} broke off ({broke}); try again", self.place()));
        let opened = self.open_blob(&wanted, 0).await;
        let mut stream = opened.map_err(|broken| match broken {
            Broken::Network(reason) => self.refused(format!(
                "{} cannot be reached ({reason}); check the name and the network",
                self.place()
            )),
            Broken::Slow => broke_off(Broke::Slow),
            Broken::Token(error) | Broken::Final(error) => error,
        })?;
        let mut bytes = Vec::new();
        while let Some(chunk) = stream.next().await.map_err(broke_off)? {
            if (bytes.len() + chunk.len()) as u64 > blob.size() {
                return Err(OciError::document(what, "it is longer than the manifest says"));
            }
            bytes.extend_from_slice(&chunk);
        }
        let found = crate::layer::digest(&bytes);
        match found == wanted {
            true => Ok(bytes),
            false => Err(OciError::Digest {
                what: what.to_owned(),
                found,
                wanted: crate::error::escaped(wanted.as_bytes()),
            }),
        }
    }
}

/// Compares the digest of a file; one that is wrong is removed.
fn verify(path: &Path, wanted: &str) -> Result<(), OciError> {
    let unreadable = |error| OciError::file("read", path, error);
    let mut hasher = Sha256::new();
    io::copy(&mut File::open(path).map_err(unreadable)?, &mut HashWriter(&mut hasher))
        .map_err(unreadable)?;
    let hex: String = hasher.finalize().iter().map(|byte| format!("{byte:02x}")).collect();
    let found = format!("sha256:{hex}");
    if found == wanted {
        return Ok(());
    }
    fs::remove_file(path).map_err(unreadable)?;
    let what = "a blob that the registry sent".to_owned();
    Err(OciError::Digest { what, found, wanted: wanted.to_owned() })
}

struct HashWriter<'a>(&'a mut Sha256);

impl Write for HashWriter<'_> {
    fn write(&mut self, buffer: &[u8]) -> io::Result<usize> {
        self.0.update(buffer);
        Ok(buffer.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
