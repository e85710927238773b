//! The manifest of an artifact (OCI image manifest with an `artifactType`).

use super::FunctionDocument;
use super::packed_max;
use super::{FUNCTION_ARTIFACT, FUNCTION_DOCUMENT, Section};
use crate::error::OciError;
use base64::Engine as _;
use base64::prelude::BASE64_STANDARD as BASE64;
use oci_spec::image::{Descriptor, ImageManifest, MediaType};
use serde_json::json;

/// Longest document: a run of contents takes some 30 bytes.
pub(crate) const DOCUMENT_MAX: u64 = 4 << 20;
/// Most pieces: what fits into a manifest of 4 MiB.
pub(crate) const PIECES_MAX: usize = 20_000;
/// Longest document that a manifest has in itself. It costs a third more there (base64), and whoever
/// reads only the manifest moves it.
const INLINE_MAX: usize = 256 << 10;
const WHAT: &str = "the function's manifest";

/// Whether a manifest is that of a function.
pub(crate) fn is_function(manifest: &ImageManifest) -> bool {
    let named = |media_type: &MediaType, name: &str| media_type.to_string() == name;
    manifest.artifact_type().as_ref().is_some_and(|kind| named(kind, FUNCTION_ARTIFACT))
        || named(manifest.config().media_type(), FUNCTION_DOCUMENT)
}

/// What a manifest says of a function, checked as far as it can be without the pieces.
#[derive(Clone, Debug)]
pub(crate) struct FunctionManifest {
    pub document: Descriptor,
    pieces: Vec<(Section, Descriptor)>,
}

impl FunctionManifest {
    /// Interprets a manifest of which [`is_function`] is true.
    ///
    /// # Errors
    /// It has pieces that cannot be, or too many.
    pub fn of(manifest: &ImageManifest) -> Result<Self, OciError> {
        let wrong = |reason: String| OciError::document(WHAT, reason);
        if manifest.layers().len() > PIECES_MAX {
            return Err(wrong(format!("it has more than {PIECES_MAX} pieces")));
        }
        let document = manifest.config().clone();
        if document.media_type().to_string() != FUNCTION_DOCUMENT {
            return Err(wrong("its document is of another kind".to_owned()));
        }
        if document.size() > DOCUMENT_MAX {
            return Err(wrong("its document is longer than 4 MiB".to_owned()));
        }
        let mut pieces = Vec::with_capacity(manifest.layers().len());
        let mut before = Section::Files;
        for layer in manifest.layers() {
            let kind = layer.media_type().to_string();
            let section = Section::ALL.into_iter().find(|section| section.media_type() == kind);
            let section = section.filter(|&section| section >= before).ok_or_else(|| {
                wrong("a piece is of an unknown kind, or out of order".to_owned())
            })?;
            if layer.size() == 0 || layer.size() > packed_max(section) {
                return Err(wrong("a piece has an impossible size".to_owned()));
            }
            if section == Section::Run && before == Section::Run {
                return Err(wrong("it has two runs".to_owned()));
            }
            before = section;
            pieces.push((section, layer.clone()));
        }
        Ok(Self { document, pieces })
    }

    /// The document, if the manifest has it in itself (`data` of its descriptor, OCI image
    /// specification, "Content Descriptors"). The registry that holds the manifest need not be
    /// asked again.
    ///
    /// # Errors
    /// It is another one than the descriptor says, or makes no sense.
    pub fn inline_document(&self) -> Result<Option<FunctionDocument>, OciError> {
        let Some(data) = self.document.data() else { return Ok(None) };
        let wrong = || OciError::document(WHAT, "the document in it is another one than it says");
        let bytes = BASE64.decode(data).map_err(|_| wrong())?;
        let is_it = crate::layer::digest(&bytes) == self.document.digest().to_string();
        if !is_it || bytes.len() as u64 != self.document.size() {
            return Err(wrong());
        }
        FunctionDocument::parse(&bytes).map(Some)
    }

    /// The pieces of a section, in order.
    pub fn pieces(&self, section: Section) -> impl Iterator<Item = &Descriptor> {
        self.pieces.iter().filter(move |(of, _)| *of == section).map(|(_, piece)| piece)
    }
}

/// The digest and size of something in a registry.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Sent {
    pub digest: String,
    pub size: u64,
}

/// The JSON of a manifest. Equal functions give equal bytes.
///
/// # Errors
/// There are more pieces than a manifest can name.
pub(crate) fn new_manifest(
    name: &str,
    document: &[u8],
    pieces: &[(Section, Sent)],
) -> Result<Vec<u8>, OciError> {
    if pieces.len() > PIECES_MAX {
        let reason = format!("it has more than {PIECES_MAX} pieces, which no registry takes");
        return Err(OciError::document("the function", reason));
    }
    let descriptor = |kind: &str, sent: &Sent| json!({ "mediaType": kind, "digest": sent.digest, "size": sent.size });
    let layers: Vec<_> =
        pieces.iter().map(|(section, sent)| descriptor(section.media_type(), sent)).collect();
    let about = Sent { digest: crate::layer::digest(document), size: document.len() as u64 };
    let mut config = descriptor(FUNCTION_DOCUMENT, &about);
    if document.len() <= INLINE_MAX {
        config["data"] = json!(BASE64.encode(document));
    }
    let manifest = json!({
        "schemaVersion": 2,
        "mediaType": oci_client::manifest::OCI_IMAGE_MEDIA_TYPE,
        "artifactType": FUNCTION_ARTIFACT,
        "config": config,
        "layers": layers,
        "annotations": { "org.opencontainers.image.title": name },
    });
    Ok(manifest.to_string().into_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sent(size: u64) -> Sent {
        Sent { digest: crate::layer::digest(&size.to_le_bytes()), size }
    }

    fn parse(text: &str) -> Result<FunctionManifest, OciError> {
        let manifest: ImageManifest = serde_json::from_str(text).unwrap();
        assert!(is_function(&manifest));
        FunctionManifest::of(&manifest)
    }

    #[test]
    fn manifests_are_read_back_and_bad_ones_refused() {
        let pieces =
            [(Section::Files, sent(10)), (Section::Files, sent(11)), (Section::Image, sent(12))];
        let text = String::from_utf8(new_manifest("shop", b"five!", &pieces).unwrap()).unwrap();
        let manifest = parse(&text).unwrap();
        assert_eq!(manifest.pieces(Section::Files).count(), 2);
        assert_eq!(manifest.pieces(Section::Image).next().unwrap().size(), 12);
        assert_eq!(manifest.pieces(Section::Kernel).count(), 0);
        let refused = |from: &str, to: &str| {
            let changed = text.replace(from, to);
            assert_ne!(changed, text, "{from}");
            parse(&changed).unwrap_err().to_string()
        };
        assert!(refused("\"size\":12", "\"size\":5000000").contains("impossible size"));
        assert!(refused("\"size\":12", "\"size\":0").contains("impossible size"));
        assert!(refused("\"size\":5}", "\"size\":99999999}").contains("4 MiB"));
        assert!(refused(Section::Image.media_type(), "text/plain").contains("unknown kind"));
        let pieces = [(Section::Image, sent(10)), (Section::Files, sent(11))];
        let text = String::from_utf8(new_manifest("shop", b"five!", &pieces).unwrap()).unwrap();
        assert!(parse(&text).unwrap_err().to_string().contains("out of order"));
        let runs = [(Section::Run, sent(5_000_000)), (Section::Run, sent(1))];
        let text = String::from_utf8(new_manifest("shop", b"five!", &runs).unwrap()).unwrap();
        assert!(parse(&text).unwrap_err().to_string().contains("two runs"));
        let text = String::from_utf8(new_manifest("shop", b"five!", &runs[..1]).unwrap()).unwrap();
        assert_eq!(parse(&text).unwrap().pieces(Section::Run).count(), 1);
        let many = vec![(Section::Files, sent(1)); PIECES_MAX + 1];
        assert!(new_manifest("shop", b"five!", &many).is_err());
        let most = new_manifest("shop", b"five!", &many[1..]).unwrap();
        assert!(most.len() <= crate::registry::MANIFEST_MAX, "{}", most.len());
    }

    #[test]
    fn documents_lie_in_manifests_unless_they_are_long() {
        let document = super::super::document::sample();
        let manifest = new_manifest("shop", &document.to_json(), &[]).unwrap();
        let text = String::from_utf8(manifest).unwrap();
        assert_eq!(parse(&text).unwrap().inline_document().unwrap(), Some(document));
        let value: serde_json::Value = serde_json::from_str(&text).unwrap();
        let with = |data: Option<String>| {
            let mut value = value.clone();
            match data {
                Some(data) => value["config"]["data"] = json!(data),
                None => drop(value["config"].as_object_mut().unwrap().remove("data")),
            }
            parse(&value.to_string()).unwrap().inline_document()
        };
        // As older Thaws push them.
        assert_eq!(with(None).unwrap(), None);
        for wrong in ["not base64!".to_owned(), BASE64.encode("{}"), String::new()] {
            let error = with(Some(wrong)).unwrap_err().to_string();
            assert!(error.contains("another one than it says"), "{error}");
        }
        let config = |len: usize| {
            let manifest = new_manifest("shop", &vec![b' '; len], &[]).unwrap();
            serde_json::from_slice::<serde_json::Value>(&manifest).unwrap()["config"].clone()
        };
        assert!(config(INLINE_MAX)["data"].is_string());
        assert!(config(INLINE_MAX + 1).get("data").is_none());
    }
}
