//! Private keys that `cosign generate-key-pair` has encrypted: PKCS #8 in a secretbox of NaCl (XSalsa20 and
//! Poly1305), whose key scrypt (RFC 7914) makes of a password.
//!
//! Specification: secure-systems-lab/go-securesystemslib, `encrypted`.

use super::{AskPassword, from_base64};
use crypto_secretbox::aead::Aead;
use crypto_secretbox::{KeyInit, Nonce, XSalsa20Poly1305};
use serde::Deserialize;
use zeroize::Zeroizing;

/// What the PEM section is called, by later versions of cosign and earlier ones.
const LABELS: [&str; 2] = ["ENCRYPTED SIGSTORE PRIVATE KEY", "ENCRYPTED COSIGN PRIVATE KEY"];
/// Most memory that scrypt may take, in bytes: four times what cosign has it take.
const MEMORY_MAX: u64 = 256 << 20;
/// Most turns of it.
const TURNS_MAX: u32 = 4;

/// An encrypted key, as JSON.
#[derive(Deserialize)]
pub(super) struct LockedKey {
    kdf: Derivation,
    cipher: Cipher,
    ciphertext: String,
}

#[derive(Deserialize)]
struct Derivation {
    name: String,
    params: Parameters,
    salt: String,
}

#[derive(Deserialize)]
struct Parameters {
    #[serde(rename = "N")]
    n: u64,
    r: u32,
    p: u32,
}

#[derive(Deserialize)]
struct Cipher {
    name: String,
    nonce: String,
}

/// The encrypted key in a file; `None`: it has none.
///
/// # Errors
/// Why it cannot be read.
pub(super) fn find(text: &[u8]) -> Option<Result<LockedKey, String>> {
    let text = std::str::from_utf8(text).ok()?;
    let (_, rest) =
        LABELS.iter().find_map(|label| text.split_once(&format!("-----BEGIN {label}-----")))?;
    let body: String = rest.lines().take_while(|line| !line.starts_with("-----END")).collect();
    let key = from_base64(body.trim()).and_then(|json| serde_json::from_slice(&json).ok());
    Some(key.ok_or_else(|| "its encrypted part makes no sense".to_owned()))
}

impl LockedKey {
    /// The key in PKCS #8.
    ///
    /// # Errors
    /// Why it cannot be had.
    pub(super) fn open(&self, password: &AskPassword<'_>) -> Result<Zeroizing<Vec<u8>>, String> {
        let Self { kdf, cipher, ciphertext } = self;
        if (kdf.name.as_str(), cipher.name.as_str()) != ("scrypt", "nacl/secretbox") {
            return Err("it is encrypted in a way that Thaw does not know".to_owned());
        }
        let senseless = || "its encrypted part makes no sense".to_owned();
        let decoded = [&kdf.salt, &cipher.nonce, ciphertext].map(|text| from_base64(text));
        let [Some(salt), Some(nonce), Some(ciphertext)] = decoded else { return Err(senseless()) };
        let nonce = Nonce::from(<[u8; 24]>::try_from(nonce).map_err(|_| senseless())?);
        let parameters = kdf.params.checked()?;
        let password = password().map_err(|error| format!("it is encrypted, and {error}"))?;
        let mut key = Zeroizing::new([0; 32]);
        let derived = scrypt::scrypt(password.as_bytes(), &salt, &parameters, key.as_mut());
        derived.map_err(|_| senseless())?;
        let opened = XSalsa20Poly1305::new((&*key).into()).decrypt(&nonce, ciphertext.as_slice());
        opened.map(Zeroizing::new).map_err(|_| "its password is another one".to_owned())
    }
}

impl Parameters {
    fn checked(&self) -> Result<scrypt::Params, String> {
        let Self { n, r, p } = *self;
        // RFC 7914, section 5: a block for each turn, and N of them for one.
        let blocks = n.checked_add(u64::from(p) + 1);
        let memory = blocks.and_then(|blocks| blocks.checked_mul(128 * u64::from(r)));
        if memory.is_none_or(|bytes| bytes > MEMORY_MAX) || p > TURNS_MAX || !n.is_power_of_two() {
            return Err("scrypt would take more than 256 MiB or four turns for it".to_owned());
        }
        let log_n = n.trailing_zeros() as u8;
        scrypt::Params::new(log_n, r, p)
            .map_err(|_| "its settings of scrypt make no sense".to_owned())
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::{Keys, made_by_cosign, no_password};
    use super::super::{SigningKey, VerifyKey, to_base64};
    use super::*;
    use std::fs;

    fn refused(text: &str, password: &str) -> String {
        let keys = Keys::new();
        let path = keys.path("changed.key");
        fs::write(&path, text).unwrap();
        let ask = || Ok(Zeroizing::new(password.to_owned()));
        SigningKey::read(&path, &ask).unwrap_err().to_string()
    }

    #[test]
    fn a_key_of_cosign_is_opened_with_its_password() {
        let path = made_by_cosign("cosign.key");
        let key = SigningKey::read(&path, &|| Ok(Zeroizing::new("thaw-test".to_owned()))).unwrap();
        let signature = key.sign(b"message").unwrap();
        let public = VerifyKey::read(&made_by_cosign("cosign.pub")).unwrap();
        public.check(b"message", &signature).unwrap();
        let text = fs::read_to_string(&path).unwrap();
        assert!(refused(&text, "another").contains("its password is another one"));
        let unasked = SigningKey::read(&path, &no_password).unwrap_err().to_string();
        assert!(unasked.contains("it is encrypted, and nobody is asked"), "{unasked}");
        let earlier = text.replace("SIGSTORE", "COSIGN");
        assert!(refused(&earlier, "another").contains("its password is another one"));
    }

    #[test]
    fn a_key_that_would_take_all_memory_or_makes_no_sense_is_refused() {
        let with = |kdf: serde_json::Value, nonce: &str| {
            let cipher = serde_json::json!({ "name": "nacl/secretbox", "nonce": nonce });
            let key = serde_json::json!({ "kdf": kdf, "cipher": cipher, "ciphertext": "AAAA" });
            let body = to_base64(key.to_string().as_bytes());
            format!("-----BEGIN {0}-----\n{body}\n-----END {0}-----\n", LABELS[0])
        };
        let kdf = |n: u64, r: u32, p: u32| {
            let params = serde_json::json!({ "N": n, "r": r, "p": p });
            serde_json::json!({ "name": "scrypt", "params": params, "salt": "AAAA" })
        };
        let nonce = to_base64(&[0; 24]);
        for (n, r, p) in [
            (1 << 40, 8, 1),
            (2, 1 << 21, 4),
            (1 << 16, u32::MAX, 1),
            (1 << 14, 8, 1000),
            (1000, 8, 1),
        ] {
            assert!(refused(&with(kdf(n, r, p), &nonce), "x").contains("more than 256 MiB"));
        }
        assert!(refused(&with(kdf(1 << 14, 0, 1), &nonce), "x").contains("settings of scrypt"));
        assert!(refused(&with(kdf(1 << 14, 8, 1), "AAAA"), "x").contains("makes no sense"));
        assert!(refused(&with(kdf(1 << 14, 8, 1), &nonce), "x").contains("another one"));
        let mut other = kdf(1 << 14, 8, 1);
        other["name"] = "argon2".into();
        assert!(refused(&with(other, &nonce), "x").contains("does not know"));
        let label = LABELS[0];
        assert!(refused(&format!("-----BEGIN {label}-----\n%\n"), "x").contains("makes no sense"));
    }
}
