//! Pulling from a registry: an image into an OCI layout on disk, a function's pieces into a
//! directory.

use super::download::{BlobDirectory, PullProgress, distinct};
use super::settings::Registries;
use super::source::{Document, Source, check_digest, on_this_thread};
use crate::artifact::{
    DOCUMENT_MAX, FunctionDocument, FunctionManifest, PieceReader, Section, is_function,
};
use crate::error::{OciError, escaped};
use crate::reference::Reference;
use crate::signature::VerifyKey;
use crate::unpack::Limits;
use oci_client::manifest::{
    IMAGE_MANIFEST_LIST_MEDIA_TYPE, IMAGE_MANIFEST_MEDIA_TYPE, OCI_IMAGE_INDEX_MEDIA_TYPE,
    OCI_IMAGE_MEDIA_TYPE,
};
use oci_spec::image::{Arch, ImageIndex, ImageManifest, Os};
use std::fs;
use std::path::{Path, PathBuf};
use thaw_store::Owner;

/// Documents that a registry may answer with.
const ACCEPTED: [&str; 4] = [
    OCI_IMAGE_INDEX_MEDIA_TYPE,
    OCI_IMAGE_MEDIA_TYPE,
    IMAGE_MANIFEST_LIST_MEDIA_TYPE,
    IMAGE_MANIFEST_MEDIA_TYPE,
];

/// Something that is to be pulled.
#[derive(Debug)]
pub struct Pull<'a> {
    /// Its name.
    pub reference: &'a Reference,
    /// How registries are reached.
    pub registries: &'a Registries,
    /// The directory that becomes an OCI layout; what is there of an earlier try is used.
    pub directory: &'a Path,
    /// With whose rights files are written.
    pub owner: Owner,
    /// What it may take.
    pub limits: Limits,
}

/// How a function is pulled, if it is one.
pub struct FunctionPull<'a> {
    /// The directory that keeps pieces, by their digests.
    pub pieces: &'a Path,
    /// Says which sections are wanted of a function, or in one sentence why it is refused.
    pub choose: &'a mut Choose<'a>,
}

/// Is asked what to take of a function.
pub type Choose<'a> = dyn FnMut(&Offer<'_>) -> Result<Vec<Section>, String> + 'a;

/// A function in a registry, of which nothing but the document was read.
#[derive(Clone, Copy, Debug)]
pub struct Offer<'a> {
    /// What it says of itself.
    pub document: &'a FunctionDocument,
    /// Whether a key has signed it that registries.toml names for its registry.
    pub is_signed: bool,
}

/// What was pulled.
#[derive(Debug)]
pub enum Pulled {
    /// An image: the directory is an OCI layout now.
    Image,
    /// A function.
    Function(Box<PulledFunction>),
}

/// A function whose pieces are here. Their digests are right; what they hold was not looked at.
#[derive(Debug)]
pub struct PulledFunction {
    /// What it says of itself.
    pub document: FunctionDocument,
    /// Digest of its manifest.
    pub digest: String,
    /// Whether a key has signed it that registries.toml names for its registry.
    pub is_signed: bool,
    /// Bytes of its pieces, those that were not wanted not counted.
    pub bytes: u64,
    /// Bytes that were moved.
    pub moved: u64,
    pieces: Vec<(Section, PathBuf)>,
    /// Pieces that were not here before.
    fresh: Vec<PathBuf>,
}

impl PulledFunction {
    /// One whose pieces lie at these paths: `(all, moved)` bytes of them.
    pub(super) fn new(
        document: FunctionDocument,
        digest: String,
        is_signed: bool,
        (bytes, moved): (u64, u64),
        pieces: Vec<(Section, PathBuf)>,
    ) -> Self {
        Self { document, digest, is_signed, bytes, moved, pieces, fresh: Vec::new() }
    }

    /// Reads what the pieces of a section hold.
    pub fn reader(&self, section: Section) -> PieceReader {
        let of = |(found, path): &(Section, PathBuf)| (*found == section).then(|| path.clone());
        PieceReader::new(self.pieces.iter().filter_map(of).collect())
    }

    /// Removes the pieces that came with it: it was refused.
    pub fn forget(&self) {
        for path in &self.fresh {
            // What cannot be removed goes with the other old pieces.
            let _ = fs::remove_file(path);
        }
    }
}

impl Pull<'_> {
    /// Pulls it. Without `function`, functions are refused.
    ///
    /// # Errors
    /// The registry cannot be reached or refuses, what it sends is not what its digest says, or it
    /// is not signed by the key that it has to be signed by.
    pub fn run(
        &self,
        mut function: Option<FunctionPull<'_>>,
        progress: &mut dyn FnMut(PullProgress),
    ) -> Result<Pulled, OciError> {
        let runtime = on_this_thread().map_err(|error| self.failed(error.to_string()))?;
        let key = self.verify_key()?;
        runtime.block_on(async {
            let mut last = None;
            for host in self.hosts() {
                match self.from(&host, key.as_ref(), function.as_mut(), progress).await {
                    // Another one may have it, or send what it should. The registry itself comes
                    // last, and is the one to be believed.
                    Err(error) if is_of_host(&error) => last = Some(error),
                    result => return result,
                }
            }
            Err(last.unwrap_or_else(|| self.failed("no registry has it".to_owned())))
        })
    }

    /// Mirrors, and then the registry itself.
    pub(super) fn hosts(&self) -> Vec<String> {
        let host = self.reference.registry();
        let mirrors = self.registries.rule(host).map(|rule| rule.mirrors.clone());
        mirrors.into_iter().flatten().chain([host.to_owned()]).collect()
    }

    /// The key that has to have signed it.
    fn verify_key(&self) -> Result<Option<VerifyKey>, OciError> {
        let rule = self.registries.rule(self.reference.registry());
        rule.and_then(|rule| rule.verify_key.as_deref()).map(VerifyKey::read).transpose()
    }

    fn failed(&self, reason: String) -> OciError {
        OciError::Registry { action: "pull", image: self.reference.to_string(), reason }
    }

    /// What a host has by this name, signed if it has to be.
    async fn manifest(
        &self,
        host: &str,
        key: Option<&VerifyKey>,
    ) -> Result<(Source, Manifest), OciError> {
        let source = Source::new(self.registries, self.reference, host, "pull")?;
        let found = source.document(&source.reference, &ACCEPTED).await?;
        if let Some(key) = key {
            source.check_signature(&found.digest, key).await?;
        }
        let manifest = source.for_this_machine(found).await?;
        Ok((source, manifest))
    }

    /// The function of this name, if it is one; of the first host that has it.
    pub(super) async fn find(&self) -> Result<Option<FoundFunction>, OciError> {
        let key = self.verify_key()?;
        let mut last = None;
        for host in self.hosts() {
            match self.find_at(&host, key.as_ref()).await {
                Err(error) if is_of_host(&error) => last = Some(error),
                result => return result,
            }
        }
        Err(last.unwrap_or_else(|| self.failed("no registry has it".to_owned())))
    }

    async fn find_at(
        &self,
        host: &str,
        key: Option<&VerifyKey>,
    ) -> Result<Option<FoundFunction>, OciError> {
        let (source, manifest) = self.manifest(host, key).await?;
        if !is_function(&manifest.parsed) {
            return Ok(None);
        }
        let parsed = FunctionManifest::of(&manifest.parsed)?;
        let document = self.document(&source, &parsed).await?;
        let Manifest { bytes, digest, .. } = manifest;
        let is_signed = key.is_some();
        Ok(Some(FoundFunction { source, bytes, manifest: parsed, document, digest, is_signed }))
    }

    /// What a function says of itself.
    async fn document(
        &self,
        source: &Source,
        parsed: &FunctionManifest,
    ) -> Result<FunctionDocument, OciError> {
        let what = "the function's document";
        let document = match parsed.inline_document()? {
            Some(document) => document,
            None => {
                let json = source.small_blob(what, &parsed.document, DOCUMENT_MAX).await?;
                FunctionDocument::parse(&json)?
            }
        };
        self.check_size([document.bytes().unwrap_or(u64::MAX)].into_iter(), "bytes")?;
        Ok(document)
    }

    async fn from(
        &self,
        host: &str,
        key: Option<&VerifyKey>,
        function: Option<&mut FunctionPull<'_>>,
        progress: &mut dyn FnMut(PullProgress),
    ) -> Result<Pulled, OciError> {
        let (source, manifest) = self.manifest(host, key).await?;
        if !is_function(&manifest.parsed) {
            return self.image(&source, &manifest, progress).await;
        }
        let Some(function) = function else {
            return Err(OciError::Function { name: self.reference.to_string() });
        };
        self.function(&source, &manifest, key.is_some(), function, progress).await
    }

    async fn image(
        &self,
        source: &Source,
        manifest: &Manifest,
        progress: &mut dyn FnMut(PullProgress),
    ) -> Result<Pulled, OciError> {
        let blobs = BlobDirectory::make(&self.directory.join("blobs/sha256"), self.owner)?;
        // Some tools list an empty layer several times.
        let all = [manifest.parsed.config()].into_iter().chain(manifest.parsed.layers());
        let wanted = distinct(all);
        self.check_size(wanted.iter().map(oci_spec::image::Descriptor::size), "bytes of layers")?;
        source.fetch(wanted, &blobs, progress).await?;
        self.finish(manifest)?;
        Ok(Pulled::Image)
    }

    fn check_size(
        &self,
        sizes: impl Iterator<Item = u64>,
        what: &'static str,
    ) -> Result<u64, OciError> {
        let bytes = sizes.fold(0, u64::saturating_add);
        match bytes > self.limits.bytes {
            true => Err(OciError::TooLarge { limit: self.limits.bytes, what }),
            false => Ok(bytes),
        }
    }

    async fn function(
        &self,
        source: &Source,
        manifest: &Manifest,
        is_signed: bool,
        function: &mut FunctionPull<'_>,
        progress: &mut dyn FnMut(PullProgress),
    ) -> Result<Pulled, OciError> {
        let parsed = FunctionManifest::of(&manifest.parsed)?;
        let document = self.document(source, &parsed).await?;
        let offer = Offer { document: &document, is_signed };
        let sections = (function.choose)(&offer).map_err(OciError::Refused)?;
        let wanted = || {
            let all = Section::ALL.into_iter().filter(|section| sections.contains(section));
            all.flat_map(|section| parsed.pieces(section).map(move |piece| (section, piece)))
        };
        let blobs = BlobDirectory::make(function.pieces, self.owner)?;
        let all = distinct(wanted().map(|(_, piece)| piece));
        let bytes = self.check_size(all.iter().map(oci_spec::image::Descriptor::size), "bytes")?;
        let path = |piece: &oci_spec::image::Descriptor| {
            piece.as_digest_sha256().map(|hex| blobs.blob(hex))
        };
        let fresh = all.iter().filter_map(path).filter(|path| !path.exists()).collect();
        let moved = source.fetch(all.clone(), &blobs, progress).await?;
        let pieces = wanted().filter_map(|(section, piece)| Some((section, path(piece)?)));
        let (pieces, digest) = (pieces.collect(), manifest.digest.clone());
        let pulled = PulledFunction { document, digest, is_signed, bytes, moved, pieces, fresh };
        Ok(Pulled::Function(Box::new(pulled)))
    }

    /// Makes what was downloaded an OCI layout of this one image.
    fn finish(&self, manifest: &Manifest) -> Result<(), OciError> {
        let failed = |error| OciError::file("act as the owner of", self.directory, error);
        let _acting = self.owner.act().map_err(failed)?;
        let write = |name: &str, bytes: &[u8]| {
            let path = self.directory.join(name);
            fs::write(&path, bytes).map_err(|error| OciError::file("write", &path, error))
        };
        let hex = manifest.digest.trim_start_matches("sha256:");
        write(&format!("blobs/sha256/{hex}"), &manifest.bytes)?;
        write("oci-layout", br#"{"imageLayoutVersion":"1.0.0"}"#)?;
        let index = serde_json::json!({
            "schemaVersion": 2,
            "manifests": [{
                "mediaType": OCI_IMAGE_MEDIA_TYPE,
                "digest": manifest.digest,
                "size": manifest.bytes.len(),
                "annotations": { "org.opencontainers.image.ref.name": self.reference.to_string() },
            }],
        });
        write("index.json", index.to_string().as_bytes())
    }
}

/// Whether another host may do better.
fn is_of_host(error: &OciError) -> bool {
    matches!(
        error,
        OciError::Registry { .. }
            | OciError::Document { .. }
            | OciError::Unsigned { .. }
            | OciError::Digest { .. }
    )
}

/// A function that a host has.
pub(super) struct FoundFunction {
    pub source: Source,
    /// The manifest as it came.
    pub bytes: Vec<u8>,
    pub manifest: FunctionManifest,
    pub document: FunctionDocument,
    pub digest: String,
    pub is_signed: bool,
}

/// A manifest for this machine.
struct Manifest {
    bytes: Vec<u8>,
    digest: String,
    parsed: ImageManifest,
}

impl Source {
    /// The manifest for linux/amd64.
    async fn for_this_machine(&self, found: Document) -> Result<Manifest, OciError> {
        let Document { bytes, digest } = found;
        if let Ok(parsed) = serde_json::from_slice(&bytes) {
            return Ok(Manifest { bytes, digest, parsed });
        }
        let unusable = |error| OciError::document("the manifest that the registry sent", error);
        let index: ImageIndex = serde_json::from_slice(&bytes).map_err(unusable)?;
        let platforms =
            index.manifests().iter().filter_map(|one| Some((one, one.platform().as_ref()?)));
        let mut has = Vec::new();
        for (descriptor, platform) in platforms {
            if *platform.os() == Os::Linux && *platform.architecture() == Arch::Amd64 {
                let wanted = descriptor.digest().to_string();
                let reference = self.reference.clone_with_digest(wanted.clone());
                let Document { bytes, digest } = self.document(&reference, &ACCEPTED).await?;
                check_digest(&digest, &wanted)?;
                let parsed = serde_json::from_slice(&bytes).map_err(unusable)?;
                return Ok(Manifest { bytes, digest, parsed });
            }
            has.push(format!("{}/{}", platform.os(), platform.architecture()));
        }
        Err(OciError::Platform { has: escaped(has.join(", ").as_bytes()) })
    }
}

#[cfg(test)]
mod tests {
    use super::super::settings::RegistryRule;
    use super::*;

    #[test]
    fn mirrors_are_asked_first() {
        let directory = tempfile::tempdir().unwrap();
        let (host, mirrors) = ("a.example".to_owned(), vec!["b".to_owned()]);
        let rule = RegistryRule { host, mirrors, ..RegistryRule::default() };
        let registries = Registries { registry: vec![rule] };
        let reference: Reference = "a.example/x".parse().unwrap();
        let pull = Pull {
            reference: &reference,
            registries: &registries,
            directory: directory.path(),
            owner: Owner::Caller,
            limits: Limits::default(),
        };
        assert_eq!(pull.hosts(), ["b", "a.example"]);
    }
}
