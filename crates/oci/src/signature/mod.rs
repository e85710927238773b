//! Signatures of what lies in registries, as `cosign` makes them with a key pair: ECDSA over P-256
//! and SHA-256. There are two forms: a small document with the digest of the manifest beside each
//! signature ([`simple`], which Thaw makes, too), and bundles, which later versions of `cosign` make
//! ([`bundle`]).

pub(crate) mod bundle;
mod locked;
pub(crate) mod simple;

use crate::error::OciError;
use ring::rand::SystemRandom;
use ring::signature::{
    ECDSA_P256_SHA256_ASN1, ECDSA_P256_SHA256_ASN1_SIGNING, EcdsaKeyPair, KeyPair,
    UnparsedPublicKey,
};
use rustls_pki_types::pem::PemObject;
use rustls_pki_types::{PrivatePkcs8KeyDer, SubjectPublicKeyInfoDer};
use std::fs;
use std::io;
use std::path::Path;
use zeroize::Zeroizing;

/// Longest document that is signed, and longest signature in base64.
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

/// Asks somebody for a password.
pub type AskPassword<'a> = dyn Fn() -> io::Result<Zeroizing<String>> + 'a;

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

    /// Whether a signature (base64) of a message is this key's.
    ///
    /// # Errors
    /// Why not.
    fn check(&self, message: &[u8], signature: &str) -> Result<(), &'static str> {
        let decoded = Some(signature).filter(|text| text.len() <= SIGNATURE_MAX);
        let decoded = decoded.and_then(from_base64).ok_or("it makes no sense")?;
        let key = UnparsedPublicKey::new(&ECDSA_P256_SHA256_ASN1, &self.point);
        key.verify(message, &decoded).map_err(|_| "it is another key's")
    }
}

impl SigningKey {
    /// Reads a private key: in PKCS #8, as `openssl genpkey` writes it, or encrypted, as
    /// `cosign generate-key-pair` does. Only for that one `password` is asked.
    ///
    /// # Errors
    /// The file is not such a key, or the password is another one.
    pub fn read(path: &Path, password: &AskPassword<'_>) -> Result<Self, OciError> {
        let text = Zeroizing::new(read(path)?);
        if let Some(key) = locked::find(&text) {
            let opened = key.and_then(|key| key.open(password)).map_err(|why| wrong(path, &why))?;
            return Self::from_pkcs8(path, &opened);
        }
        if text.windows(9).any(|word| word == b"ENCRYPTED") {
            return Err(wrong(
                path,
                "it is encrypted otherwise than `cosign` does; write it anew with `openssl pkcs8 -topk8 \
                 -nocrypt` and keep it where nobody else can read it, or encrypt that with `cosign \
                 import-key-pair`",
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
        Self::from_pkcs8(path, der.secret_pkcs8_der())
    }

    fn from_pkcs8(path: &Path, der: &[u8]) -> Result<Self, OciError> {
        let random = SystemRandom::new();
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

fn from_base64(text: &str) -> Option<Vec<u8>> {
    use base64::Engine as _;
    use base64::engine::general_purpose::{STANDARD, URL_SAFE};
    // Envelopes may have either (DSSE, `envelope.md`).
    STANDARD.decode(text).or_else(|_| URL_SAFE.decode(text)).ok()
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

    pub(super) const DIGEST: &str =
        "sha256:0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef";

    pub(super) fn no_password() -> io::Result<Zeroizing<String>> {
        Err(io::Error::other("nobody is asked"))
    }

    /// A file that cosign has made.
    pub(super) fn made_by_cosign(name: &str) -> PathBuf {
        Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/cosign").join(name)
    }

    pub(super) struct Keys {
        directory: tempfile::TempDir,
    }

    impl Keys {
        pub(super) fn new() -> Self {
            Self { directory: tempfile::tempdir().unwrap() }
        }

        pub(super) fn path(&self, name: &str) -> PathBuf {
            self.directory.path().join(name)
        }

        pub(super) fn openssl(&self, arguments: &[&str]) {
            let mut command = Command::new("openssl");
            let output =
                command.current_dir(self.directory.path()).args(arguments).output().unwrap();
            assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        }

        pub(super) fn pair(&self, name: &str, curve: &str) -> (PathBuf, PathBuf) {
            let (private, public) = (format!("{name}.key"), format!("{name}.pub"));
            let curve = format!("ec_paramgen_curve:{curve}");
            self.openssl(&["genpkey", "-algorithm", "EC", "-pkeyopt", &curve, "-out", &private]);
            self.openssl(&["pkey", "-in", &private, "-pubout", "-out", &public]);
            (self.path(&private), self.path(&public))
        }
    }

    #[test]
    fn keys_of_other_kinds_are_refused_with_a_way_out() {
        let keys = Keys::new();
        let (private, public) = keys.pair("large", "P-384");
        let message = |error: OciError| error.to_string();
        assert!(message(VerifyKey::read(&public).unwrap_err()).contains("P-256"));
        assert!(message(SigningKey::read(&private, &no_password).unwrap_err()).contains("P-256"));
        assert!(message(VerifyKey::read(&private).unwrap_err()).contains("no public key"));
        assert!(
            message(SigningKey::read(&public, &no_password).unwrap_err())
                .contains("no private key")
        );
        assert!(message(VerifyKey::read(&keys.path("none")).unwrap_err()).contains("none"));
        fs::write(keys.path("long"), vec![b'a'; 1 << 20]).unwrap();
        assert!(message(VerifyKey::read(&keys.path("long")).unwrap_err()).contains("longer"));
        let (private, _) = keys.pair("one", "P-256");
        let name = private.file_name().unwrap().to_str().unwrap();
        keys.openssl(&["ec", "-in", name, "-out", "sec1"]);
        assert!(
            message(SigningKey::read(&keys.path("sec1"), &no_password).unwrap_err())
                .contains("SEC 1")
        );
        let encrypted = ["pkcs8", "-topk8", "-in", name, "-passout", "pass:x", "-out", "locked"];
        keys.openssl(&encrypted);
        assert!(
            message(SigningKey::read(&keys.path("locked"), &no_password).unwrap_err())
                .contains("encrypted")
        );
    }
}
