//! JSON Web Tokens (RFC 7519) that a key of a set (RFC 7517) has signed. `jsonwebtoken` reads
//! and judges tokens; the cryptography below it is `ring`, as everywhere here.

use jsonwebtoken::crypto::{CryptoProvider, JwkUtils, JwtVerifier};
use jsonwebtoken::errors::{Error, ErrorKind};
use jsonwebtoken::jwk::{AlgorithmParameters, EllipticCurve, Jwk, JwkSet};
use jsonwebtoken::{Algorithm, DecodingKey, DecodingKeyKind, Validation, decode, decode_header};
use ring::{hmac, signature as ring_signature};
use serde::Deserialize;

/// Most keys of a set.
const KEYS_MAX: usize = 64;
/// Most keys that a token is tried with.
const TRIES_MAX: usize = 4;
/// How much the clocks of this node and of the issuer may differ, in seconds.
const LEEWAY_S: u64 = 60;

/// What judges tokens.
#[derive(Clone)]
pub(super) struct Tokens {
    keys: Vec<Key>,
    issuer: String,
    audience: String,
}

#[derive(Clone)]
struct Key {
    id: Option<String>,
    algorithm: Algorithm,
    key: DecodingKey,
}

/// Of what a token claims, what is used; the rest is judged by `jsonwebtoken`.
#[derive(Deserialize)]
struct Claims {
    sub: Option<String>,
}

impl Tokens {
    /// Takes tokens for `audience` that `issuer` has signed with a key of the set.
    ///
    /// # Errors
    /// One sentence.
    pub fn new(set: &[u8], issuer: String, audience: String) -> Result<Self, String> {
        // The only one of this process; another call finds it installed.
        let _ = RING.install_default();
        let set: JwkSet = serde_json::from_slice(set)
            .map_err(|error| format!("it is no set of JSON Web Keys ({error})"))?;
        if set.keys.len() > KEYS_MAX {
            return Err(format!("it has more than {KEYS_MAX} keys"));
        }
        let keys = set.keys.iter().map(Key::new).collect::<Result<Vec<_>, _>>()?;
        match keys.is_empty() {
            true => Err("it has no keys".to_owned()),
            false => Ok(Self { keys, issuer, audience }),
        }
    }

    /// Whose token this is.
    ///
    /// # Errors
    /// Why it is not taken.
    pub fn check(&self, token: &str) -> Result<Option<String>, String> {
        let header = decode_header(token).map_err(|error| error.to_string())?;
        let fits = |key: &&Key| {
            key.algorithm == header.alg && (header.kid.is_none() || key.id == header.kid)
        };
        let mut why = format!("no key of the set is for {:?}, key {:?}", header.alg, header.kid);
        for key in self.keys.iter().filter(fits).take(TRIES_MAX) {
            match decode::<Claims>(token, &key.key, &self.validation(key.algorithm)) {
                Ok(token) => return Ok(token.claims.sub),
                Err(error) => why = error.to_string(),
            }
        }
        Err(why)
    }

    fn validation(&self, algorithm: Algorithm) -> Validation {
        let mut validation = Validation::new(algorithm);
        validation.leeway = LEEWAY_S;
        validation.validate_nbf = true;
        validation.set_issuer(&[&self.issuer]);
        validation.set_audience(&[&self.audience]);
        validation.set_required_spec_claims(&["exp", "iss", "aud"]);
        validation
    }
}

impl Key {
    fn new(jwk: &Jwk) -> Result<Self, String> {
        let id = jwk.common.key_id.clone();
        let named = id.as_deref().unwrap_or("without a name");
        let algorithm = match jwk.common.key_algorithm {
            Some(algorithm) => algorithm.to_string().parse().ok(),
            None => usual_algorithm(jwk),
        };
        let algorithm = algorithm.filter(|algorithm| Verifier::can(*algorithm));
        let algorithm = algorithm.ok_or_else(|| {
            format!(
                "its key `{named}` is of a kind that is not known here; use RS256, ES256 or EdDSA"
            )
        })?;
        let key = DecodingKey::from_jwk(jwk)
            .map_err(|error| format!("its key `{named}` is not usable ({error})"))?;
        Ok(Self { id, algorithm, key })
    }
}

/// The algorithm of a key that does not say it.
fn usual_algorithm(jwk: &Jwk) -> Option<Algorithm> {
    match &jwk.algorithm {
        AlgorithmParameters::RSA(_) => Some(Algorithm::RS256),
        AlgorithmParameters::EllipticCurve(key) => match key.curve {
            EllipticCurve::P256 => Some(Algorithm::ES256),
            EllipticCurve::P384 => Some(Algorithm::ES384),
            _ => None,
        },
        AlgorithmParameters::OctetKeyPair(_) => Some(Algorithm::EdDSA),
        AlgorithmParameters::OctetKey(_) => Some(Algorithm::HS256),
    }
}

/// Verifies with `ring`; nothing is signed here.
static RING: CryptoProvider = CryptoProvider {
    signer_factory: |_, _| Err(ErrorKind::InvalidAlgorithm.into()),
    verifier_factory: |algorithm, key| match Verifier::can(*algorithm) {
        true => Ok(Box::new(Verifier { algorithm: *algorithm, key: key.clone() })),
        false => Err(Error::from(ErrorKind::InvalidAlgorithm)),
    },
    jwk_utils: JwkUtils::new_unimplemented(),
};

struct Verifier {
    algorithm: Algorithm,
    key: DecodingKey,
}

/// How a kind of signature is verified.
enum Scheme {
    Hmac(hmac::Algorithm),
    Rsa(&'static ring_signature::RsaParameters),
    Point(&'static dyn ring_signature::VerificationAlgorithm),
}

impl Verifier {
    fn can(algorithm: Algorithm) -> bool {
        scheme(algorithm).is_some()
    }

    fn is_valid(&self, message: &[u8], signature: &[u8]) -> bool {
        match (scheme(self.algorithm), self.key.kind()) {
            (Some(Scheme::Hmac(algorithm)), DecodingKeyKind::SecretOrDer(secret)) => {
                hmac::verify(&hmac::Key::new(algorithm, secret), message, signature).is_ok()
            }
            (Some(Scheme::Rsa(parameters)), DecodingKeyKind::RsaModulusExponent { n, e }) => {
                let key = ring_signature::RsaPublicKeyComponents { n, e };
                key.verify(parameters, message, signature).is_ok()
            }
            (Some(Scheme::Point(algorithm)), DecodingKeyKind::SecretOrDer(point)) => {
                let key = ring_signature::UnparsedPublicKey::new(algorithm, point);
                key.verify(message, signature).is_ok()
            }
            _ => false,
        }
    }
}

fn scheme(algorithm: Algorithm) -> Option<Scheme> {
    use ring_signature as known;
    Some(match algorithm {
        Algorithm::HS256 => Scheme::Hmac(hmac::HMAC_SHA256),
        Algorithm::HS384 => Scheme::Hmac(hmac::HMAC_SHA384),
        Algorithm::HS512 => Scheme::Hmac(hmac::HMAC_SHA512),
        Algorithm::RS256 => Scheme::Rsa(&known::RSA_PKCS1_2048_8192_SHA256),
        Algorithm::RS384 => Scheme::Rsa(&known::RSA_PKCS1_2048_8192_SHA384),
        Algorithm::RS512 => Scheme::Rsa(&known::RSA_PKCS1_2048_8192_SHA512),
        Algorithm::PS256 => Scheme::Rsa(&known::RSA_PSS_2048_8192_SHA256),
        Algorithm::PS384 => Scheme::Rsa(&known::RSA_PSS_2048_8192_SHA384),
        Algorithm::PS512 => Scheme::Rsa(&known::RSA_PSS_2048_8192_SHA512),
        Algorithm::ES256 => Scheme::Point(&known::ECDSA_P256_SHA256_FIXED),
        Algorithm::ES384 => Scheme::Point(&known::ECDSA_P384_SHA384_FIXED),
        Algorithm::EdDSA => Scheme::Point(&known::ED25519),
        #[allow(unreachable_patterns)]
        _ => return None,
    })
}

impl signature::Verifier<Vec<u8>> for Verifier {
    fn verify(&self, message: &[u8], signature: &Vec<u8>) -> Result<(), signature::Error> {
        self.is_valid(message, signature).then_some(()).ok_or_else(signature::Error::new)
    }
}

impl JwtVerifier for Verifier {
    fn algorithm(&self) -> Algorithm {
        self.algorithm
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use base64::Engine;
    use base64::prelude::BASE64_URL_SAFE_NO_PAD as BASE64;
    use ring::rand::SystemRandom;
    use ring::signature::{ECDSA_P256_SHA256_FIXED_SIGNING, EcdsaKeyPair, KeyPair};
    use serde_json::{Value, json};

    /// A key, and a set of it alone.
    pub fn key() -> (EcdsaKeyPair, Vec<u8>) {
        let random = SystemRandom::new();
        let document =
            EcdsaKeyPair::generate_pkcs8(&ECDSA_P256_SHA256_FIXED_SIGNING, &random).unwrap();
        let pair =
            EcdsaKeyPair::from_pkcs8(&ECDSA_P256_SHA256_FIXED_SIGNING, document.as_ref(), &random)
                .unwrap();
        let point = &pair.public_key().as_ref()[1..];
        let (x, y) = (BASE64.encode(&point[..32]), BASE64.encode(&point[32..]));
        let set = json!({"keys": [{"kty": "EC", "crv": "P-256", "kid": "k", "x": x, "y": y}]});
        (pair, set.to_string().into_bytes())
    }

    pub fn sign(pair: &EcdsaKeyPair, header: &Value, claims: &Value) -> String {
        let encode = |value: &Value| BASE64.encode(value.to_string());
        let message = format!("{}.{}", encode(header), encode(claims));
        let signature = pair.sign(&SystemRandom::new(), message.as_bytes()).unwrap();
        format!("{message}.{}", BASE64.encode(signature))
    }

    pub fn claims() -> Value {
        let now = jsonwebtoken::get_current_timestamp();
        json!({"iss": "https://issuer", "aud": "api", "sub": "ann", "exp": now + 600})
    }

    fn tokens(set: &[u8]) -> Tokens {
        Tokens::new(set, "https://issuer".to_owned(), "api".to_owned()).unwrap()
    }

    #[test]
    fn tokens_of_the_issuer_are_taken() {
        let (pair, set) = key();
        let token = sign(&pair, &json!({"alg": "ES256", "kid": "k"}), &claims());
        assert_eq!(tokens(&set).check(&token), Ok(Some("ann".to_owned())));
        let token = sign(&pair, &json!({"alg": "ES256"}), &claims());
        assert_eq!(tokens(&set).check(&token), Ok(Some("ann".to_owned())), "without a name");
    }

    #[test]
    fn other_tokens_are_not() {
        let (pair, set) = key();
        let tokens = tokens(&set);
        let header = json!({"alg": "ES256", "kid": "k"});
        let with = |name: &str, value: Value| {
            let mut claims = claims();
            claims[name] = value;
            sign(&pair, &header, &claims)
        };
        let without = |name: &str| {
            let mut claims = claims();
            claims.as_object_mut().unwrap().remove(name);
            sign(&pair, &header, &claims)
        };
        let good = sign(&pair, &header, &claims());
        let mut flipped = good.clone().into_bytes();
        let middle = good.find('.').unwrap() + 5;
        flipped[middle] = if flipped[middle] == b'a' { b'b' } else { b'a' };
        let unsigned = sign(&pair, &json!({"alg": "none"}), &claims());
        let later = jsonwebtoken::get_current_timestamp() + 3600;
        for token in [
            String::new(),
            "a.b.c".to_owned(),
            String::from_utf8(flipped).unwrap(),
            good[..good.rfind('.').unwrap() + 1].to_owned(),
            unsigned,
            with("iss", json!("https://other")),
            with("aud", json!("web")),
            with("exp", json!(1)),
            with("exp", json!("never")),
            with("nbf", json!(later)),
            with("nbf", json!("later")),
            without("exp"),
            without("iss"),
            without("aud"),
            sign(&key().0, &header, &claims()),
            sign(&pair, &json!({"alg": "ES256", "kid": "other"}), &claims()),
            // The public key is no secret.
            sign(&pair, &json!({"alg": "HS256", "kid": "k"}), &claims()),
        ] {
            assert!(tokens.check(&token).is_err(), "{token}");
        }
    }

    #[test]
    fn sets_that_are_none_are_refused() {
        let new = |set: &str| Tokens::new(set.as_bytes(), "i".into(), "a".into()).err().unwrap();
        assert!(new("{}").contains("no set"));
        assert!(new("{\"keys\": []}").contains("no keys"));
        let odd = json!({"keys": [{"kty": "EC", "crv": "P-521", "x": "AA", "y": "AA"}]});
        assert!(new(&odd.to_string()).contains("not known here"));
        let one = json!({"kty": "oct", "k": "AAAA"});
        let many = json!({"keys": vec![one; KEYS_MAX + 1]});
        assert!(new(&many.to_string()).contains("more than"));
    }
}
