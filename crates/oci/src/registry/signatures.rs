//! Signatures in a registry: found, verified, added.

use super::source::Source;
use crate::error::OciError;
use crate::signature::simple::{self, SIGNATURE_ANNOTATION, SIMPLE_SIGNING};
use crate::signature::{PAYLOAD_MAX, SigningKey, VerifyKey, bundle};
use oci_client::Reference as Named;
use oci_client::manifest::{OCI_IMAGE_INDEX_MEDIA_TYPE, OCI_IMAGE_MEDIA_TYPE};
use oci_spec::image::{Descriptor, ImageManifest};
use serde::Deserialize;
use serde_json::{Value, json};

/// Most signatures of a manifest that are looked at, of each form.
const SIGNATURES_MAX: usize = 32;
/// Most pages of a list of what refers to a manifest that are read.
const PAGES_MAX: usize = 16;
/// Longest bundle: besides the signature it may have entries of transparency logs and certificates.
const BUNDLE_MAX: u64 = 256 << 10;
const CONFIGURATION: &str = "application/vnd.oci.image.config.v1+json";

/// A signature of a manifest: its document, and the signature in base64.
struct Signature {
    document: Descriptor,
    signature: String,
}

impl Signature {
    /// That of a layer; `None`: it is none.
    fn of(layer: &Value) -> Option<Self> {
        let document: Descriptor = serde_json::from_value(layer.clone()).ok()?;
        let signature = document.annotations().as_ref()?.get(SIGNATURE_ANNOTATION)?.clone();
        let is_one = document.media_type().to_string() == SIMPLE_SIGNING;
        is_one.then_some(Self { document, signature })
    }
}

/// A manifest of signatures. What of it makes no sense hides nothing else.
#[derive(Deserialize)]
struct Signatures {
    layers: Vec<Value>,
}

/// An index of what refers to a manifest.
#[derive(Deserialize)]
struct Referrers {
    manifests: Vec<Value>,
}

/// Adds what may be bundles in a page of what refers to a manifest, and keeps the first ones: those that say so are
/// first.
fn add_bundles(all: &mut Vec<Descriptor>, page: &[u8]) -> Result<(), OciError> {
    let parsed: Referrers = serde_json::from_slice(page)
        .map_err(|error| OciError::document("the index of what refers to the image", error))?;
    let known = |value| serde_json::from_value::<Descriptor>(value).ok();
    let about = |descriptor: &Descriptor| {
        let annotations = descriptor.annotations().as_ref()?;
        Some(annotations.get(bundle::PREDICATE_ANNOTATION)? == bundle::SIGNED)
    };
    all.extend(parsed.manifests.into_iter().filter_map(known));
    all.retain(|descriptor| about(descriptor) != Some(false));
    all.sort_by_key(|descriptor| about(descriptor).is_none());
    all.truncate(SIGNATURES_MAX);
    Ok(())
}

impl Source {
    /// Makes sure that a key has signed a manifest. A signature that cannot be read does not hide another one.
    ///
    /// # Errors
    /// It has not, or the registry cannot be asked.
    pub async fn check_signature(&self, manifest: &str, key: &VerifyKey) -> Result<(), OciError> {
        let mut why = "it has no signature".to_owned();
        let signatures = self.signature_layers(manifest).await.unwrap_or_else(|error| {
            why = error.to_string();
            Vec::new()
        });
        for signature in signatures.iter().filter_map(Signature::of).take(SIGNATURES_MAX) {
            match self.check(&signature, manifest, key).await {
                Ok(Ok(())) => return Ok(()),
                Ok(Err(reason)) => why = format!("of its signature, {reason}"),
                Err(error) => why = error.to_string(),
            }
        }
        let (bundles, unasked) = self.bundles(manifest).await?;
        for descriptor in bundles {
            match self.check_bundle(&descriptor, manifest, key).await {
                Ok(Some(Ok(()))) => return Ok(()),
                Ok(Some(Err(reason))) => why = format!("of its signature, {reason}"),
                Ok(None) => {}
                Err(error) => why = error.to_string(),
            }
        }
        if let Some(unasked) = unasked {
            why = unasked.to_string();
        }
        Err(OciError::Unsigned { image: self.reference.whole(), why })
    }

    async fn check(
        &self,
        signature: &Signature,
        manifest: &str,
        key: &VerifyKey,
    ) -> Result<Result<(), &'static str>, OciError> {
        let what = "the document of a signature";
        let payload = self.small_blob(what, &signature.document, PAYLOAD_MAX).await?;
        Ok(simple::check(key, &payload, &signature.signature, manifest))
    }

    /// The layers of the manifest that has the signatures of another one.
    async fn signature_layers(&self, manifest: &str) -> Result<Vec<Value>, OciError> {
        let tag = self.tagged(simple::tag_of(manifest));
        let Some(found) = self.find_document(&tag, &[OCI_IMAGE_MEDIA_TYPE]).await? else {
            return Ok(Vec::new());
        };
        let parsed: Signatures = serde_json::from_slice(&found.bytes)
            .map_err(|error| OciError::document("the manifest of signatures", error))?;
        Ok(parsed.layers)
    }

    /// What refers to a manifest and may be bundles, the first ones of many: those that say so are first. And
    /// why the rest of the list is not asked for, if it is not.
    async fn bundles(
        &self,
        manifest: &str,
    ) -> Result<(Vec<Descriptor>, Option<OciError>), OciError> {
        let tag = self.tagged(bundle::referrers_tag(manifest));
        let mut page = self.referrers(manifest, &tag, OCI_IMAGE_INDEX_MEDIA_TYPE).await?;
        let mut all = Vec::new();
        for _ in 0..PAGES_MAX {
            let Some(found) = page else { break };
            add_bundles(&mut all, &found.bytes)?;
            page = match found.next {
                Ok(Some(next)) => self.page(next, &tag, OCI_IMAGE_INDEX_MEDIA_TYPE).await?,
                Ok(None) => None,
                Err(unasked) => return Ok((all, Some(unasked))),
            };
        }
        Ok((all, None))
    }

    /// Whether the bundle in a manifest is a key's word for another manifest; `None`: it has no bundle.
    async fn check_bundle(
        &self,
        descriptor: &Descriptor,
        manifest: &str,
        key: &VerifyKey,
    ) -> Result<Option<Result<(), &'static str>>, OciError> {
        let named = self.with_digest(descriptor.digest().to_string());
        let Some(found) = self.find_document(&named, &[OCI_IMAGE_MEDIA_TYPE]).await? else {
            return Ok(None);
        };
        let parsed: ImageManifest = serde_json::from_slice(&found.bytes)
            .map_err(|error| OciError::document("the manifest of a signature", error))?;
        let is_bundle =
            |layer: &&Descriptor| layer.media_type().to_string().starts_with(bundle::MEDIA_TYPE);
        let Some(layer) = parsed.layers().iter().find(is_bundle) else { return Ok(None) };
        let bytes = self.small_blob("the bundle of a signature", layer, BUNDLE_MAX).await?;
        Ok(Some(bundle::check(key, &bytes, manifest)))
    }

    /// The same repository with a digest.
    fn with_digest(&self, digest: String) -> Named {
        let (registry, repository) = (self.reference.registry(), self.reference.repository());
        self.at_host(Named::with_digest(registry.to_owned(), repository.to_owned(), digest))
    }

    /// The same repository with another tag.
    fn tagged(&self, tag: String) -> Named {
        let (registry, repository) = (self.reference.registry(), self.reference.repository());
        self.at_host(Named::with_tag(registry.to_owned(), repository.to_owned(), tag))
    }

    /// The same at the mirror that this is, if it is one.
    fn at_host(&self, mut named: Named) -> Named {
        if self.host != self.reference.registry() {
            named.set_mirror_registry(self.host.clone());
        }
        named
    }

    /// Adds a signature of a manifest, unless the key has signed it before.
    ///
    /// # Errors
    /// The registry refuses, or there are too many signatures.
    pub async fn sign(&self, manifest: &str, key: &SigningKey) -> Result<(), OciError> {
        let mut all = self.signature_layers(manifest).await?;
        for signature in all.iter().filter_map(Signature::of) {
            // One that cannot be read is somebody else's.
            if let Ok(Ok(())) = self.check(&signature, manifest, &key.verify_key()).await {
                return Ok(());
            }
        }
        if all.len() >= SIGNATURES_MAX {
            return Err(self.refused(format!("it has {SIGNATURES_MAX} signatures already")));
        }
        let repository = format!("{}/{}", self.reference.registry(), self.reference.repository());
        let payload = simple::payload(&repository, manifest);
        let signature = key.sign(&payload)?;
        let digest = simple::payload_digest(&payload);
        let layer = json!({
            "mediaType": SIMPLE_SIGNING,
            "digest": digest,
            "size": payload.len(),
            "annotations": { SIGNATURE_ANNOTATION: signature },
        });
        self.send(&digest, payload, None).await?;
        all.push(layer);
        self.put_signatures(manifest, &all).await
    }

    /// Stores the layers, of which others are as they were.
    async fn put_signatures(&self, manifest: &str, layers: &[Value]) -> Result<(), OciError> {
        let digest = |layer: &Value| layer["digest"].as_str().unwrap_or_default().to_owned();
        let digests: Vec<_> = layers.iter().map(digest).collect();
        let configuration = simple::configuration(&digests);
        let digest = simple::payload_digest(&configuration);
        let size = configuration.len();
        self.send(&digest, configuration, None).await?;
        let document = json!({
            "schemaVersion": 2,
            "mediaType": OCI_IMAGE_MEDIA_TYPE,
            "config": { "mediaType": CONFIGURATION, "digest": digest, "size": size },
            "layers": layers,
        });
        let tag = self.tagged(simple::tag_of(manifest));
        self.put_manifest(&tag, document.to_string().into_bytes()).await
    }
}
