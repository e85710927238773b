//! Signatures of what lies in registries, as `cosign` makes them with a key pair: ECDSA over P-256
//! and SHA-256. What is signed is a small document with the digest of the manifest ("simple
//! signing"); document and signature lie in the registry under the tag `sha256-<digest>.sig`.
//!
//! Specification: cosign, `specs/SIGNATURE_SPEC.md`; containers-signature(5), "JSON data format".

use crate::error::{OciError, escaped};
use crate::layer::digest;
use ring::rand::SystemRandom;
use ring::signature::{
    ECDSA_P256_SHA256_ASN1, ECDSA_P256_SHA256_ASN1_SIGNING, EcdsaKeyPair, KeyPair,
    UnparsedPublicKey,
};
use rustls_pki_types::pem::PemObject;
use rustls_pki_types::{PrivatePkcs8KeyDer, SubjectPublicKeyInfoDer};
use serde::Deserialize;
use serde_json::json;
use std::fs;
use std::path::Path;

/// Media type of the document that is signed.
pub(crate) const SIMPLE_SIGNING: &str = "application/vnd.dev.cosign.simplesigning.v1+json";
/// The annotation of its layer with the signature, in base64.
pub(crate) const SIGNATURE_ANNOTATION: &str = "dev.cosignproject.cosign/signature";
/// The document says that it is one.
const KIND: &str = "cosign container image signature";
/// Longest document, and longest signature in base64.
pub(crate) const PAYLOAD_MAX: u64 = 64 << 10;
const SIGNATURE_MAX: usize = 1024;
/// Longest key file.
const KEY_MAX: u64 = 64 << 10;
/// The beginning of a `SubjectPublicKeyInfo` of a point on P-256 that is not compressed (RFC 5480):
/// the algorithm `id-ecPublicKey`, the curve `secp256r1`, and a bit string of 66 bytes.
const P256_INFO: [u8; 26] = [
    0x30, 0x59, 0x30, 0x13, 0x06, 0x07, 0x2a, 0x86, 0x48, 0xce, 0x3d, 0x02, 0x01, 0x06, 0x08, 0x2a,
    0x86, 0x48, 0xce, 0x3d, 0x03, 0x01, 0x07, 0x03, 0x42, 0x00,
];

/// A public key by which signatures are verified.
#[derive(Clone, Debug)]
pub struct VerifyKey {
    /// The point, not compressed.
    point: Vec<u8>,
}

/// A private key with which signatures are made.
pub struct SigningKey {
    pair: EcdsaKeyPair,
    random: SystemRandom,
}

impl std::fmt::Debug for SigningKey {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("SigningKey")
    }
}

fn read(path: &Path) -> Result<Vec<u8>, OciError> {
    let unreadable = |error| OciError::file("read", path, error);
    let size = fs::metadata(path).map_err(unreadable)?.len();
    match size > KEY_MAX {
        true => Err(wrong(path, "it is longer than a key")),
        false => fs::read(path).map_err(unreadable),
    }
}

fn wrong(path: &Path, reason: &str) -> OciError {
    OciError::Key { path: path.to_owned(), reason: reason.to_owned() }
}

impl VerifyKey {
    /// Reads a public key, as `cosign generate-key-pair` and `openssl pkey -pubout` write it.
    ///
    /// # Errors
    /// The file is not such a key.
    pub fn read(path: &Path) -> Result<Self, OciError> {
        let text = read(path)?;
        let information = SubjectPublicKeyInfoDer::from_pem_slice(&text).map_err(|_| {
            wrong(path, "it is no public key in PEM, as in cosign.pub; name such a file")
        })?;
        let point = information.strip_prefix(&P256_INFO).filter(|point| point.len() == 65);
        match point {
            Some(point) => Ok(Self { point: point.to_vec() }),
            None => Err(wrong(
                path,
                "it is no key of ECDSA over P-256; make one with `cosign generate-key-pair`",
            )),
        }
    }

    fn accepts(&self, message: &[u8], signature: &[u8]) -> bool {
        let key = UnparsedPublicKey::new(&ECDSA_P256_SHA256_ASN1, &self.point);
        key.verify(message, signature).is_ok()
    }

    /// Whether a document with its signature (base64) is this key's word for a manifest.
    ///
    /// # Errors
    /// Why not.
    pub(crate) fn check(
        &self,
        payload: &[u8],
        signature: &str,
        manifest: &str,
    ) -> Result<(), &'static str> {
        let decoded = Some(signature).filter(|text| text.len() <= SIGNATURE_MAX);
        let decoded = decoded.and_then(from_base64).ok_or("it makes no sense")?;
        if !self.accepts(payload, &decoded) {
            return Err("it is another key's");
        }
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
}

impl SigningKey {
    /// Reads a private key in PKCS #8, as `openssl genpkey` writes it.
    ///
    /// # Errors
    /// The file is not such a key.
    pub fn read(path: &Path) -> Result<Self, OciError> {
        let text = read(path)?;
        if text.windows(9).any(|word| word == b"ENCRYPTED") {
            return Err(wrong(
                path,
                "it is encrypted, which Thaw cannot read; make a key with `openssl genpkey -algorithm EC \
                 -pkeyopt ec_paramgen_curve:P-256` and keep it where nobody else can read it",
            ));
        }
        if text.windows(14).any(|word| word == b"EC PRIVATE KEY") {
            return Err(wrong(
                path,
                "it is a key in the form of SEC 1; turn it into PKCS #8 with `openssl pkcs8 -topk8 -nocrypt`",
            ));
        }
        let der = PrivatePkcs8KeyDer::from_pem_slice(&text).map_err(|_| {
            wrong(path, "it is no private key in PEM; make one with `openssl genpkey`")
        })?;
        let random = SystemRandom::new();
        let der = der.secret_pkcs8_der();
        let pair = EcdsaKeyPair::from_pkcs8(&ECDSA_P256_SHA256_ASN1_SIGNING, der, &random);
        let pair = pair.map_err(|_| {
            wrong(
                path,
                "it is no key of ECDSA over P-256; make one with `openssl genpkey -algorithm EC \
                         -pkeyopt ec_paramgen_curve:P-256`",
            )
        })?;
        Ok(Self { pair, random })
    }

    /// The key by which its signatures are verified.
    pub(crate) fn verify_key(&self) -> VerifyKey {
        VerifyKey { point: self.pair.public_key().as_ref().to_vec() }
    }

    /// Signs a document; the signature is in base64.
    pub(crate) fn sign(&self, payload: &[u8]) -> Result<String, OciError> {
        let signature = self.pair.sign(&self.random, payload);
        let signature = signature.map_err(|_| {
            OciError::document("the host", "it has no random numbers for a signature")
        })?;
        Ok(to_base64(signature.as_ref()))
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

fn from_base64(text: &str) -> Option<Vec<u8>> {
    use base64::Engine as _;
    base64::engine::general_purpose::STANDARD.decode(text).ok()
}

fn to_base64(bytes: &[u8]) -> String {
    use base64::Engine as _;
    base64::engine::general_purpose::STANDARD.encode(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::PathBuf;
    use std::process::Command;

    const DIGEST: &str = "sha256:0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef";

    struct Keys {
        directory: tempfile::TempDir,
    }

    impl Keys {
        fn new() -> Self {
            Self { directory: tempfile::tempdir().unwrap() }
        }

        fn path(&self, name: &str) -> PathBuf {
            self.directory.path().join(name)
        }

        fn openssl(&self, arguments: &[&str]) {
            let mut command = Command::new("openssl");
            let output =
                command.current_dir(self.directory.path()).args(arguments).output().unwrap();
            assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        }

        fn pair(&self, name: &str, curve: &str) -> (PathBuf, PathBuf) {
            let (private, public) = (format!("{name}.key"), format!("{name}.pub"));
            let curve = format!("ec_paramgen_curve:{curve}");
            self.openssl(&["genpkey", "-algorithm", "EC", "-pkeyopt", &curve, "-out", &private]);
            self.openssl(&["pkey", "-in", &private, "-pubout", "-out", &public]);
            (self.path(&private), self.path(&public))
        }
    }

    #[test]
    fn a_signature_is_for_one_manifest_by_one_key() {
        let keys = Keys::new();
        let (private, public) = keys.pair("one", "P-256");
        let (_, other) = keys.pair("two", "P-256");
        let (key, other) = (VerifyKey::read(&public).unwrap(), VerifyKey::read(&other).unwrap());
        let payload = payload("registry.example/shop", DIGEST);
        let signature = SigningKey::read(&private).unwrap().sign(&payload).unwrap();
        key.check(&payload, &signature, DIGEST).unwrap();
        assert_eq!(other.check(&payload, &signature, DIGEST), Err("it is another key's"));
        let elsewhere = DIGEST.replace('0', "1");
        assert_eq!(
            key.check(&payload, &signature, &elsewhere),
            Err("it is one for something else")
        );
        assert_eq!(key.check(&payload, "%", DIGEST), Err("it makes no sense"));
        assert_eq!(key.check(&payload, &"A".repeat(2000), DIGEST), Err("it makes no sense"));
        for at in 0..payload.len() {
            let mut flipped = payload.clone();
            flipped[at] ^= 1;
            key.check(&flipped, &signature, DIGEST).unwrap_err();
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
        VerifyKey::read(&public).unwrap().check(&payload, &theirs, DIGEST).unwrap();
        let ours = SigningKey::read(&private).unwrap().sign(&payload).unwrap();
        fs::write(keys.path("ours"), from_base64(&ours).unwrap()).unwrap();
        keys.openssl(&["dgst", "-sha256", "-verify", "one.pub", "-signature", "ours", "payload"]);
    }

    #[test]
    fn signed_words_that_mean_something_else_are_refused() {
        let keys = Keys::new();
        let (private, public) = keys.pair("one", "P-256");
        let (signing, key) =
            (SigningKey::read(&private).unwrap(), VerifyKey::read(&public).unwrap());
        let refused = |payload: &str| {
            let signature = signing.sign(payload.as_bytes()).unwrap();
            key.check(payload.as_bytes(), &signature, DIGEST).unwrap_err()
        };
        assert_eq!(refused("{}"), "its document makes no sense");
        let good = String::from_utf8(payload("a", DIGEST)).unwrap();
        assert_eq!(
            refused(&good.replace("container image", "other")),
            "it is no signature of an image"
        );
    }

    #[test]
    fn keys_of_other_kinds_are_refused_with_a_way_out() {
        let keys = Keys::new();
        let (private, public) = keys.pair("large", "P-384");
        let message = |error: OciError| error.to_string();
        assert!(message(VerifyKey::read(&public).unwrap_err()).contains("P-256"));
        assert!(message(SigningKey::read(&private).unwrap_err()).contains("P-256"));
        assert!(message(VerifyKey::read(&private).unwrap_err()).contains("no public key"));
        assert!(message(SigningKey::read(&public).unwrap_err()).contains("no private key"));
        assert!(message(VerifyKey::read(&keys.path("none")).unwrap_err()).contains("none"));
        fs::write(keys.path("long"), vec![b'a'; 1 << 20]).unwrap();
        assert!(message(VerifyKey::read(&keys.path("long")).unwrap_err()).contains("longer"));
        let (private, _) = keys.pair("one", "P-256");
        let name = private.file_name().unwrap().to_str().unwrap();
        keys.openssl(&["ec", "-in", name, "-out", "sec1"]);
        assert!(message(SigningKey::read(&keys.path("sec1")).unwrap_err()).contains("SEC 1"));
        let encrypted = ["pkcs8", "-topk8", "-in", name, "-passout", "pass:x", "-out", "locked"];
        keys.openssl(&encrypted);
        assert!(message(SigningKey::read(&keys.path("locked")).unwrap_err()).contains("encrypted"));
    }

    #[test]
    fn signatures_lie_under_the_tag_that_cosign_looks_for() {
        assert_eq!(tag_of("sha256:ab"), "sha256-ab.sig");
    }
}
