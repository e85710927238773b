//! Signatures in a registry: found, verified, added.

use super::source::Source;
use crate::error::OciError;
use crate::signature::{
    self, PAYLOAD_MAX, SIGNATURE_ANNOTATION, SIMPLE_SIGNING, SigningKey, VerifyKey,
};
use oci_client::Reference as Named;
use oci_client::manifest::OCI_IMAGE_MEDIA_TYPE;
use oci_spec::image::{Descriptor, ImageManifest};
use serde_json::json;

/// Most signatures of a manifest that are looked at.
const SIGNATURES_MAX: usize = 32;
const CONFIGURATION: &str = "application/vnd.oci.image.config.v1+json";

/// A signature of a manifest: its document, and the signature in base64.
struct Signature {
    document: Descriptor,
    signature: String,
}

impl Source {
    /// Makes sure that a key has signed a manifest.
    ///
    /// # Errors
    /// It has not, or the registry cannot be asked.
    pub async fn check_signature(&self, manifest: &str, key: &VerifyKey) -> Result<(), OciError> {
        let mut why = "it has no signature";
        for signature in self.signatures(manifest).await? {
            match self.check(&signature, manifest, key).await? {
                Ok(()) => return Ok(()),
                Err(reason) => why = reason,
            }
        }
        Err(OciError::Unsigned {
            image: self.reference.whole(),
            why: match why {
                "it has no signature" => why.to_owned(),
                other => format!("of its signature, {other}"),
            },
        })
    }

    async fn check(
        &self,
        signature: &Signature,
        manifest: &str,
        key: &VerifyKey,
    ) -> Result<Result<(), &'static str>, OciError> {
        let what = "the document of a signature";
        let payload = self.small_blob(what, &signature.document, PAYLOAD_MAX).await?;
        Ok(key.check(&payload, &signature.signature, manifest))
    }

    /// The signatures of a manifest, the first ones of many.
    async fn signatures(&self, manifest: &str) -> Result<Vec<Signature>, OciError> {
        let tag = self.tagged(signature::tag_of(manifest));
        let Some(found) = self.find_document(&tag, &[OCI_IMAGE_MEDIA_TYPE]).await? else {
            return Ok(Vec::new());
        };
        let parsed: ImageManifest = serde_json::from_slice(&found.bytes)
            .map_err(|error| OciError::document("the manifest of signatures", error))?;
        let of = |layer: &Descriptor| {
            let is_one = layer.media_type().to_string() == SIMPLE_SIGNING;
            let signature = layer.annotations().as_ref()?.get(SIGNATURE_ANNOTATION)?.clone();
            is_one.then(|| Signature { document: layer.clone(), signature })
        };
        Ok(parsed.layers().iter().filter_map(of).take(SIGNATURES_MAX).collect())
    }

    /// The same repository with another tag.
    fn tagged(&self, tag: String) -> Named {
        let (registry, repository) = (self.reference.registry(), self.reference.repository());
        let mut named = Named::with_tag(registry.to_owned(), repository.to_owned(), tag);
        if self.host != registry {
            named.set_mirror_registry(self.host.clone());
        }
        named
    }

    /// Adds a signature of a manifest, unless the key has signed it before.
    ///
    /// # Errors
    /// The registry refuses, or there are too many signatures.
    pub async fn sign(&self, manifest: &str, key: &SigningKey) -> Result<(), OciError> {
        let mut all = self.signatures(manifest).await?;
        for signature in &all {
            if self.check(signature, manifest, &key.verify_key()).await?.is_ok() {
                return Ok(());
            }
        }
        if all.len() >= SIGNATURES_MAX {
            return Err(self.refused(format!("it has {SIGNATURES_MAX} signatures already")));
        }
        let repository = format!("{}/{}", self.reference.registry(), self.reference.repository());
        let payload = signature::payload(&repository, manifest);
        let signature = key.sign(&payload)?;
        let digest = signature::payload_digest(&payload);
        let layer = json!({ "mediaType": SIMPLE_SIGNING, "digest": digest, "size": payload.len() });
        let document = serde_json::from_value(layer).expect("it is a descriptor");
        self.send(&digest, payload, None).await?;
        all.push(Signature { document, signature });
        self.put_signatures(manifest, &all).await
    }

    async fn put_signatures(&self, manifest: &str, all: &[Signature]) -> Result<(), OciError> {
        let digests: Vec<_> = all.iter().map(|one| one.document.digest().to_string()).collect();
        let configuration = signature::configuration(&digests);
        let digest = signature::payload_digest(&configuration);
        let size = configuration.len();
        self.send(&digest, configuration, None).await?;
        let layers = all.iter().map(|one| {
            json!({
                "mediaType": SIMPLE_SIGNING,
                "digest": one.document.digest().to_string(),
                "size": one.document.size(),
                "annotations": { SIGNATURE_ANNOTATION: one.signature },
            })
        });
        let document = json!({
            "schemaVersion": 2,
            "mediaType": OCI_IMAGE_MEDIA_TYPE,
            "config": { "mediaType": CONFIGURATION, "digest": digest, "size": size },
            "layers": layers.collect::<Vec<_>>(),
        });
        let tag = self.tagged(signature::tag_of(manifest));
        self.put_manifest(&tag, document.to_string().into_bytes()).await
    }
}
