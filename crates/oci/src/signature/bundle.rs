//! Sigstore bundles: a statement that names the manifest's digest, in an envelope with its signature. The bundle is
//! the layer of a manifest whose `subject` is the manifest that is signed.
//!
//! Specification: cosign, `specs/BUNDLE_SPEC.md`; sigstore/protobuf-specs, `sigstore_bundle.proto`; the envelope,
//! secure-systems-lab/dsse, `envelope.md` and `protocol.md`; the statement, in-toto/attestation, `spec/v1/statement.md`.

use super::{VerifyKey, from_base64};
use crate::error::escaped;
use serde::Deserialize;
use std::collections::BTreeMap;

/// What the media type of a bundle begins with; its version follows.
pub(crate) const MEDIA_TYPE: &str = "application/vnd.dev.sigstore.bundle";
/// What a statement is about: the image is signed, and nothing else is said of it.
pub(crate) const SIGNED: &str = "https://sigstore.dev/cosign/sign/v1";
/// The annotation that says what a bundle is about.
pub(crate) const PREDICATE_ANNOTATION: &str = "dev.sigstore.bundle.predicateType";
/// The type of what the envelope holds.
const STATEMENT: &str = "application/vnd.in-toto+json";
/// What a statement says of itself.
const STATEMENT_TYPE: &str = "https://in-toto.io/Statement/v1";
/// Most signatures of an envelope that are looked at.
const SIGNATURES_MAX: usize = 8;

#[derive(Deserialize)]
struct Bundle {
    #[serde(rename = "dsseEnvelope")]
    envelope: Option<Envelope>,
}

#[derive(Deserialize)]
struct Envelope {
    payload: String,
    #[serde(rename = "payloadType")]
    payload_type: String,
    signatures: Vec<EnvelopeSignature>,
}

#[derive(Deserialize)]
struct EnvelopeSignature {
    sig: String,
}

#[derive(Deserialize)]
struct Statement {
    #[serde(rename = "_type")]
    kind: String,
    subject: Vec<Subject>,
    #[serde(rename = "predicateType")]
    predicate: String,
}

#[derive(Deserialize)]
struct Subject {
    digest: BTreeMap<String, String>,
}

/// Whether a bundle is a key's word for a manifest.
///
/// # Errors
/// Why not.
pub(crate) fn check(key: &VerifyKey, bundle: &[u8], manifest: &str) -> Result<(), &'static str> {
    let bundle: Bundle = serde_json::from_slice(bundle).map_err(|_| "its bundle makes no sense")?;
    let envelope = bundle.envelope.ok_or("its bundle has no envelope")?;
    let payload = from_base64(&envelope.payload).ok_or("its envelope makes no sense")?;
    let message = pre_authentication(&envelope.payload_type, &payload);
    let mut checked = Err("its envelope has no signature");
    for signature in envelope.signatures.iter().take(SIGNATURES_MAX) {
        checked = key.check(&message, &signature.sig);
        if checked.is_ok() {
            break;
        }
    }
    checked?;
    // Only what was signed is interpreted, its type included.
    if envelope.payload_type != STATEMENT {
        return Err("it is no statement");
    }
    let statement: Statement =
        serde_json::from_slice(&payload).map_err(|_| "its statement makes no sense")?;
    if (statement.kind.as_str(), statement.predicate.as_str()) != (STATEMENT_TYPE, SIGNED) {
        return Err("it says something else of the image than that it is signed");
    }
    let is_manifest = |subject: &Subject| {
        let digests = &subject.digest;
        digests.iter().any(|(algorithm, value)| format!("{algorithm}:{value}") == manifest)
    };
    match statement.subject.iter().any(is_manifest) {
        true => Ok(()),
        false => Err("it is one for something else"),
    }
}

/// What is signed of an envelope (DSSE, `PAE`).
fn pre_authentication(payload_type: &str, payload: &[u8]) -> Vec<u8> {
    let head = format!("DSSEv1 {} {payload_type} {} ", payload_type.len(), payload.len());
    [head.as_bytes(), payload].concat()
}

/// The tag under which a registry that knows of no `subject` has the index of what belongs to a manifest
/// (distribution-spec, "Referrers Tag Schema").
pub(crate) fn referrers_tag(manifest: &str) -> String {
    escaped(manifest.as_bytes()).replace(':', "-")
}

#[cfg(test)]
mod tests {
    use super::super::tests::{DIGEST, Keys, made_by_cosign, no_password};
    use super::super::{SigningKey, to_base64};
    use super::*;
    use serde_json::{Value, json};

    fn statement() -> Value {
        let digest = DIGEST.strip_prefix("sha256:").unwrap();
        json!({
            "_type": STATEMENT_TYPE,
            "subject": [{ "digest": { "sha256": digest } }],
            "predicateType": SIGNED,
            "predicate": {},
        })
    }

    fn bundle(key: &SigningKey, payload_type: &str, statement: &Value) -> Value {
        let payload = statement.to_string().into_bytes();
        let signature = key.sign(&pre_authentication(payload_type, &payload)).unwrap();
        json!({
            "mediaType": "application/vnd.dev.sigstore.bundle.v0.3+json",
            "verificationMaterial": { "publicKey": { "hint": "somebody" } },
            "dsseEnvelope": {
                "payload": to_base64(&payload),
                "payloadType": payload_type,
                "signatures": [{ "sig": signature, "keyid": "" }],
            },
        })
    }

    #[test]
    fn a_bundle_is_for_one_manifest_by_one_key() {
        let keys = Keys::new();
        let (private, public) = keys.pair("one", "P-256");
        let (_, other) = keys.pair("two", "P-256");
        let (key, other) = (VerifyKey::read(&public).unwrap(), VerifyKey::read(&other).unwrap());
        let private = SigningKey::read(&private, &no_password).unwrap();
        let good = bundle(&private, STATEMENT, &statement());
        let checked = |key, bundle: &Value| check(key, bundle.to_string().as_bytes(), DIGEST);
        checked(&key, &good).unwrap();
        assert_eq!(checked(&other, &good), Err("it is another key's"));
        let elsewhere = DIGEST.replace('0', "1");
        let why = check(&key, good.to_string().as_bytes(), &elsewhere);
        assert_eq!(why, Err("it is one for something else"));
        // A second signature counts, one too many does not.
        let mut several = good.clone();
        let signatures = several["dsseEnvelope"]["signatures"].as_array_mut().unwrap();
        signatures.insert(0, json!({ "sig": "AAAA" }));
        checked(&key, &several).unwrap();
        let signatures = several["dsseEnvelope"]["signatures"].as_array_mut().unwrap();
        (0..SIGNATURES_MAX).for_each(|_| signatures.insert(0, json!({ "sig": "AAAA" })));
        assert_eq!(checked(&key, &several), Err("it is another key's"));
    }

    #[test]
    fn a_bundle_of_cosign_is_accepted() {
        const MANIFEST: &str =
            "sha256:9509672b26279027200e192b5dd4e55e7658e5a8f2808f632b57e41de48022c3";
        let key = VerifyKey::read(&made_by_cosign("cosign.pub")).unwrap();
        let bundle = std::fs::read(made_by_cosign("bundle.json")).unwrap();
        check(&key, &bundle, MANIFEST).unwrap();
        assert_eq!(check(&key, &bundle, DIGEST), Err("it is one for something else"));
        thaw_mutate::survive("bundle", &[&bundle], 2000, |mutated| {
            let _ = check(&key, mutated, MANIFEST);
        });
    }

    #[test]
    fn bundles_that_mean_something_else_are_refused() {
        let keys = Keys::new();
        let (private, public) = keys.pair("one", "P-256");
        let key = VerifyKey::read(&public).unwrap();
        let private = SigningKey::read(&private, &no_password).unwrap();
        let refused = |bundle: &Value| {
            check(&key, bundle.to_string().as_bytes(), DIGEST).expect_err("it is refused")
        };
        let changed = |key: &str, value: Value| {
            let mut statement = statement();
            statement[key] = value;
            refused(&bundle(&private, STATEMENT, &statement))
        };
        let list = "https://spdx.dev/Document";
        assert!(changed("predicateType", json!(list)).contains("something else of the image"));
        assert!(changed("_type", json!("https://example.org")).contains("something else"));
        assert_eq!(changed("subject", json!([])), "it is one for something else");
        assert_eq!(changed("subject", Value::Null), "its statement makes no sense");
        assert_eq!(refused(&bundle(&private, "text/plain", &statement())), "it is no statement");
        assert_eq!(refused(&json!({})), "its bundle has no envelope");
        assert_eq!(refused(&json!([])), "its bundle makes no sense");
        // What is not signed, or under another type, is not believed.
        let mut typed = bundle(&private, "text/plain", &statement());
        typed["dsseEnvelope"]["payloadType"] = json!(STATEMENT);
        assert_eq!(refused(&typed), "it is another key's");
        let mut unsigned = bundle(&private, STATEMENT, &statement());
        unsigned["dsseEnvelope"]["signatures"] = json!([]);
        assert_eq!(refused(&unsigned), "its envelope has no signature");
    }
}
