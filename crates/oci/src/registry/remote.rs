//! A function in a registry whose pieces are fetched one by one, in any order.

use super::download::note_use;
use super::pace::Broke;
use super::pull::{FoundFunction, Pull, PulledFunction};
use super::source::{Broken, Source, check_digest};
use crate::artifact::{FunctionDocument, FunctionManifest, Section, packed_max};
use crate::error::OciError;
use oci_spec::image::Descriptor;
use std::path::Path;
use std::time::Duration;
use tokio::time::{sleep, timeout};

/// How long a registry may send nothing in the middle of a piece.
pub const STALL: Duration = Duration::from_secs(5);
/// How often a piece is tried to be fetched without progress, and the first pause, which doubles each
/// time.
const ATTEMPTS: u32 = 4;
const PAUSE: Duration = Duration::from_millis(100);
/// How often a piece is tried to be fetched in all.
const ATTEMPTS_IN_ALL: u32 = 64;
/// Bytes more that are progress.
const PROGRESS: usize = 16 << 10;

/// A function of which the manifest and the document were read.
pub struct RemoteFunction {
    source: Source,
    manifest: FunctionManifest,
    /// The manifest as it came, by which the function can be found [again](Pull::known_function).
    pub manifest_bytes: Vec<u8>,
    /// What it says of itself.
    pub document: FunctionDocument,
    /// Digest of its manifest.
    pub digest: String,
    /// Whether a key has signed it that registries.toml names for its registry.
    pub is_signed: bool,
}

/// A piece of a function, as its manifest names it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PieceName {
    /// SHA-256 digest in hexadecimal digits: the name of its file.
    pub hex: String,
    /// Bytes, compressed.
    pub size: u64,
}

impl Pull<'_> {
    /// Finds a function, of which nothing but the document is read. `None`: it is a container image.
    ///
    /// # Errors
    /// The registry cannot be reached or refuses, or it is not signed by the key that it has to be
    /// signed by.
    pub async fn find_function(&self) -> Result<Option<RemoteFunction>, OciError> {
        let found = self.find().await?;
        Ok(found.map(|found| {
            let FoundFunction { source, bytes, manifest, document, digest, is_signed } = found;
            let manifest_bytes = bytes;
            RemoteFunction { source, manifest, manifest_bytes, document, digest, is_signed }
        }))
    }

    /// A function that was found before, of which nothing is asked for now: its manifest, its
    /// document, and whether it was signed. Its pieces come from `host`, if that is still one of those
    /// from which they may come.
    ///
    /// # Errors
    /// The manifest is not what its digest says, or the host's certificates or credentials cannot be
    /// read.
    pub fn known_function(
        &self,
        host: &str,
        manifest_bytes: Vec<u8>,
        (document, digest, is_signed): (FunctionDocument, String, bool),
    ) -> Result<RemoteFunction, OciError> {
        check_digest(&crate::layer::digest(&manifest_bytes), &digest)?;
        let hosts = self.hosts();
        let host = hosts.iter().find(|known| *known == host).or(hosts.last());
        let host = host.map_or(self.reference.registry(), String::as_str);
        let source = Source::new(self.registries, self.reference, host, "pull")?;
        let unusable = |error| OciError::document("the manifest that was kept", error);
        let parsed = serde_json::from_slice(&manifest_bytes).map_err(unusable)?;
        let manifest = FunctionManifest::of(&parsed)?;
        Ok(RemoteFunction { source, manifest, manifest_bytes, document, digest, is_signed })
    }
}

impl RemoteFunction {
    /// The host that has it.
    pub fn host(&self) -> &str {
        &self.source.host
    }

    /// The pieces of a section, in order.
    ///
    /// # Errors
    /// A digest is of another kind than SHA-256.
    pub fn pieces(&self, section: Section) -> Result<Vec<PieceName>, OciError> {
        let name = |piece: &Descriptor| {
            let hex = piece.as_digest_sha256().ok_or_else(|| {
                let digest = crate::error::escaped(piece.digest().to_string().as_bytes());
                self.source.refused(format!("the digest {digest} is not of kind sha256"))
            })?;
            Ok(PieceName { hex: hex.to_owned(), size: piece.size() })
        };
        self.manifest.pieces(section).map(name).collect()
    }

    /// Fetches a piece, compressed, of which the digest is right. Goes on after connections that
    /// break or stall, a bounded number of times.
    ///
    /// # Errors
    /// The registry does not send it, or something else.
    pub async fn fetch(&self, section: Section, piece: &PieceName) -> Result<Vec<u8>, OciError> {
        if piece.size > packed_max(section) {
            return Err(OciError::document(named(section), "it is longer than any can be"));
        }
        let mut bytes = Vec::new();
        // A registry that begins again and again does not get on, nor does one that only drips.
        let (mut attempts, mut in_all, mut before) = (0, 0, 0);
        loop {
            let ended = self.go_on(section, piece, &mut bytes).await;
            let ended = ended.and_then(|()| check(piece, &bytes).map_err(Ended::Wrong));
            attempts += 1;
            in_all += 1;
            if bytes.len() >= before + PROGRESS {
                (attempts, before) = (1, bytes.len());
            }
            let error = match ended {
                Ok(()) => return Ok(bytes),
                Err(Ended::Final(error)) => return Err(error),
                // What is wrong begins anew, what has broken off goes on.
                Err(Ended::Wrong(error)) => {
                    bytes.clear();
                    error
                }
                Err(Ended::Broken(error)) => error,
            };
            if attempts >= ATTEMPTS || in_all >= ATTEMPTS_IN_ALL {
                return Err(error);
            }
            sleep(PAUSE * 2_u32.pow(attempts - 1)).await;
        }
    }

    /// Adds what comes until the piece is whole or the connection ends.
    async fn go_on(
        &self,
        section: Section,
        piece: &PieceName,
        bytes: &mut Vec<u8>,
    ) -> Result<(), Ended> {
        let (source, host) = (&self.source, self.source.place());
        let digest = format!("sha256:{}", piece.hex);
        let stalled =
            |_| Ended::Broken(source.refused(format!("{host} sends nothing more; try again")));
        let broke_off =
            |error: String| source.refused(format!("{host} broke off ({error}); try again"));
        let opened = source.open_blob(&digest, bytes.len() as u64);
        let opened = timeout(STALL, opened).await.map_err(stalled)?;
        let ended = |broken| match broken {
            Broken::Network(reason) => Ended::Broken(broke_off(reason)),
            Broken::Slow => Ended::Broken(broke_off(Broke::Slow.to_string())),
            Broken::Token(error) => Ended::Broken(error),
            Broken::Final(error) => Ended::Final(error),
        };
        let mut stream = opened.map_err(ended)?;
        bytes.truncate(stream.from as usize);
        while (bytes.len() as u64) < piece.size {
            let chunk = timeout(STALL, stream.next()).await.map_err(stalled)?;
            let chunk = chunk.map_err(|broke| ended(broke.into()))?;
            let Some(chunk) = chunk else {
                return Err(Ended::Broken(broke_off("too early".to_owned())));
            };
            bytes.extend_from_slice(&chunk);
            if bytes.len() as u64 > piece.size {
                let why = "it is longer than the manifest says";
                return Err(Ended::Wrong(OciError::document(named(section), why)));
            }
        }
        Ok(())
    }

    /// The function as a pull has it whose pieces are all in `directory`, of which `moved` bytes were
    /// moved; `None`: some are not there.
    ///
    /// # Errors
    /// A digest is of another kind than SHA-256.
    pub fn pulled(
        &self,
        sections: &[Section],
        directory: &Path,
        moved: u64,
    ) -> Result<Option<PulledFunction>, OciError> {
        let mut pieces = Vec::new();
        let mut bytes = 0;
        for section in Section::ALL.into_iter().filter(|section| sections.contains(section)) {
            for piece in self.pieces(section)? {
                let path = directory.join(&piece.hex);
                if !has(directory, &piece) {
                    return Ok(None);
                }
                bytes += piece.size;
                pieces.push((section, path));
            }
        }
        let (document, digest) = (self.document.clone(), self.digest.clone());
        Ok(Some(PulledFunction::new(document, digest, self.is_signed, (bytes, moved), pieces)))
    }
}

/// Why a piece is not whole.
enum Ended {
    /// The connection broke off, or too little came: it is worth going on.
    Broken(OciError),
    /// What has come is something else.
    Wrong(OciError),
    /// It helps nothing to ask again.
    Final(OciError),
}

/// What errors call a piece.
fn named(section: Section) -> String {
    format!("a piece of the function's {section}")
}

/// Whether a piece lies in a directory of pieces, which counts as used by that. Its digest is compared when
/// it is read.
pub fn has(directory: &Path, piece: &PieceName) -> bool {
    let path = directory.join(&piece.hex);
    let is_here = path.metadata().is_ok_and(|found| found.is_file() && found.len() == piece.size);
    if is_here {
        note_use(&path);
    }
    is_here
}

/// Compares the digest of a piece with its name.
///
/// # Errors
/// It is another one.
pub fn check(piece: &PieceName, bytes: &[u8]) -> Result<(), OciError> {
    let (found, wanted) = (crate::layer::digest(bytes), format!("sha256:{}", piece.hex));
    match found == wanted {
        true => Ok(()),
        false => {
            Err(OciError::Digest { what: "a piece of the function".to_owned(), found, wanted })
        }
    }
}
