//! "Simple signing": what is signed is a small document with the digest of the manifest. Document and
//! signature lie in the registry under the tag `sha256-<digest>.sig`.
//!
//! Specification: cosign, `specs/SIGNATURE_SPEC.md`; containers-signature(5), "JSON data format".

use super::VerifyKey;
use crate::error::escaped;
use crate::layer::digest;
use serde::Deserialize;
use serde_json::json;

/// Media type of the document that is signed.
pub(crate) const SIMPLE_SIGNING: &str = "application/vnd.dev.cosign.simplesigning.v1+json";
/// The annotation of its layer with the signature, in base64.
pub(crate) const SIGNATURE_ANNOTATION: &str = "dev.cosignproject.cosign/signature";
/// The document says that it is one.
const KIND: &str = "cosign container image signature";

/// Whether a document with its signature (base64) is a key's word for a manifest.
///
/// # Errors
/// Why not.
pub(crate) fn check(
    key: &VerifyKey,
    payload: &[u8],
    signature: &str,
    manifest: &str,
) -> Result<(), &'static str> {
    key.check(payload, signature)?;
    // Only what was signed is interpreted.
    let Payload { critical } =
        serde_json::from_slice(payload).map_err(|_| "its document makes no sense")?;
    if critical.kind != KIND {
        return Err("it is no signature of an image");
    }
    match critical.image.digest == manifest {
        true => Ok(()),
        false => Err("it is one for something else"),
    }
}

#[derive(Deserialize)]
struct Payload {
    critical: Critical,
}

#[derive(Deserialize)]
struct Critical {
    image: SignedImage,
    #[serde(rename = "type")]
    kind: String,
}

#[derive(Deserialize)]
struct SignedImage {
    #[serde(rename = "docker-manifest-digest")]
    digest: String,
}

/// The document that is signed for a manifest.
pub(crate) fn payload(repository: &str, manifest: &str) -> Vec<u8> {
    let document = json!({
        "critical": {
            "identity": { "docker-reference": repository },
            "image": { "docker-manifest-digest": manifest },
            "type": KIND,
        },
        "optional": null,
    });
    document.to_string().into_bytes()
}

/// The tag under which the signatures of a manifest lie.
pub(crate) fn tag_of(manifest: &str) -> String {
    format!("{}.sig", escaped(manifest.as_bytes()).replace(':', "-"))
}

/// The configuration of the image that signatures lie in, as `cosign` has it: there are as many
/// layers as documents.
pub(crate) fn configuration(layers: &[String]) -> Vec<u8> {
    let document = json!({
        "architecture": "", "os": "", "config": {}, "created": "0001-01-01T00:00:00Z",
        "history": layers.iter().map(|_| json!({ "created": "0001-01-01T00:00:00Z" })).collect::<Vec<_>>(),
        "rootfs": { "type": "layers", "diff_ids": layers },
    });
    document.to_string().into_bytes()
}

/// The digest of a document, as its layer names it.
pub(crate) fn payload_digest(payload: &[u8]) -> String {
    digest(payload)
}

#[cfg(test)]
mod tests {
    use super::super::tests::{DIGEST, Keys, no_password};
    use super::super::{SigningKey, from_base64, to_base64};
    use super::*;
    use std::fs;

    #[test]
    fn a_signature_is_for_one_manifest_by_one_key() {
        let keys = Keys::new();
        let (private, public) = keys.pair("one", "P-256");
        let (_, other) = keys.pair("two", "P-256");
        let (key, other) = (VerifyKey::read(&public).unwrap(), VerifyKey::read(&other).unwrap());
        let payload = payload("registry.example/shop", DIGEST);
        let signature = SigningKey::read(&private, &no_password).unwrap().sign(&payload).unwrap();
        check(&key, &payload, &signature, DIGEST).unwrap();
        assert_eq!(check(&other, &payload, &signature, DIGEST), Err("it is another key's"));
        let elsewhere = DIGEST.replace('0', "1");
        assert_eq!(
            check(&key, &payload, &signature, &elsewhere),
            Err("it is one for something else")
        );
        assert_eq!(check(&key, &payload, "%", DIGEST), Err("it makes no sense"));
        assert_eq!(check(&key, &payload, &"A".repeat(2000), DIGEST), Err("it makes no sense"));
        for at in 0..payload.len() {
            let mut flipped = payload.clone();
            flipped[at] ^= 1;
            check(&key, &flipped, &signature, DIGEST).unwrap_err();
        }
    }

    /// What others sign with such a key is accepted, and they accept what is signed here.
    #[test]
    fn others_understand_the_signatures() {
        let keys = Keys::new();
        let (private, public) = keys.pair("one", "P-256");
        let payload = payload("registry.example/shop", DIGEST);
        fs::write(keys.path("payload"), &payload).unwrap();
        keys.openssl(&["dgst", "-sha256", "-sign", "one.key", "-out", "theirs", "payload"]);
        let theirs = to_base64(&fs::read(keys.path("theirs")).unwrap());
        check(&VerifyKey::read(&public).unwrap(), &payload, &theirs, DIGEST).unwrap();
        let ours = SigningKey::read(&private, &no_password).unwrap().sign(&payload).unwrap();
        fs::write(keys.path("ours"), from_base64(&ours).unwrap()).unwrap();
        keys.openssl(&["dgst", "-sha256", "-verify", "one.pub", "-signature", "ours", "payload"]);
    }

    #[test]
    fn signed_words_that_mean_something_else_are_refused() {
        let keys = Keys::new();
        let (private, public) = keys.pair("one", "P-256");
        let (signing, key) =
            (SigningKey::read(&private, &no_password).unwrap(), VerifyKey::read(&public).unwrap());
        let refused = |payload: &str| {
            let signature = signing.sign(payload.as_bytes()).unwrap();
            check(&key, payload.as_bytes(), &signature, DIGEST).unwrap_err()
        };
        assert_eq!(refused("{}"), "its document makes no sense");
        let good = String::from_utf8(payload("a", DIGEST)).unwrap();
        assert_eq!(
            refused(&good.replace("container image", "other")),
            "it is no signature of an image"
        );
    }

    #[test]
    fn signatures_lie_under_the_tag_that_cosign_looks_for() {
        assert_eq!(tag_of("sha256:ab"), "sha256-ab.sig");
    }
}
