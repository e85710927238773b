//! Who may call a function. Passwords and tokens are kept as their SHA-256: they are meant
//! to be long and random, and then nobody can try them out.

use super::file::Reader;
use super::jwt::Tokens;
use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use hyper::header::{AUTHORIZATION, HeaderMap};
use serde::Deserialize;
use serde::de::{Deserializer, Error};
use sha2::{Digest, Sha256};
use std::collections::BTreeMap;
use std::path::PathBuf;

/// A function's `auth`, as it is written.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(super) struct AuthTable {
    bearer: Vec<Hash>,
    /// By the name of the user.
    basic: BTreeMap<String, Hash>,
    jwt: Option<JwtTable>,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct JwtTable {
    keys: PathBuf,
    issuer: String,
    audience: String,
}

/// What a client of a function has to show: any one of these.
#[derive(Clone)]
pub(super) struct Auth {
    bearer: Vec<Hash>,
    basic: BTreeMap<String, Hash>,
    tokens: Option<Tokens>,
}

/// A client may call the function.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Granted {
    /// Who it is, if that is known.
    pub user: Option<String>,
    /// What it has shown would open the function to whoever reads it, the function included.
    pub is_secret: bool,
}

/// A client may not.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Unauthorized {
    /// `WWW-Authenticate` of the answer.
    pub challenge: &'static str,
    /// For the log.
    pub why: String,
}

/// The SHA-256 of a secret, written `sha256:` and 64 hexadecimal digits.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Hash([u8; 32]);

impl Hash {
    fn of(secret: &[u8]) -> Self {
        Self(Sha256::digest(secret).into())
    }

    fn parse(text: &str) -> Option<Self> {
        let digits = text.strip_prefix("sha256:").filter(|digits| digits.is_ascii())?;
        if digits.len() != 64 {
            return None;
        }
        let mut bytes = [0; 32];
        for (at, byte) in bytes.iter_mut().enumerate() {
            *byte = u8::from_str_radix(&digits[2 * at..2 * at + 2], 16).ok()?;
        }
        Some(Self(bytes))
    }

    /// Takes the same time wherever they differ.
    fn is(&self, other: &Self) -> bool {
        let differ = self.0.iter().zip(other.0).fold(0, |differ, (a, b)| differ | (a ^ b));
        std::hint::black_box(differ) == 0
    }
}

impl<'de> Deserialize<'de> for Hash {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        // The text may be the secret itself, and is not repeated.
        Self::parse(&text).ok_or_else(|| {
            D::Error::custom(
                "a secret is written as its hash, \"sha256:\" and 64 hexadecimal digits; \
                 `printf %s SECRET | sha256sum` makes one",
            )
        })
    }
}

impl AuthTable {
    /// Reads what it names.
    ///
    /// # Errors
    /// One sentence.
    pub fn load(self, reader: &mut Reader) -> Result<Auth, String> {
        let Self { bearer, basic, jwt } = self;
        let tokens = match jwt {
            None => None,
            Some(JwtTable { keys, issuer, audience }) => {
                let set = reader.read(&keys)?;
                let tokens = Tokens::new(&set, issuer, audience);
                Some(tokens.map_err(|why| format!("{}: {why}", keys.display()))?)
            }
        };
        if bearer.is_empty() && basic.is_empty() && tokens.is_none() {
            return Err("`auth` names nobody; write `bearer`, `basic` or `jwt`".to_owned());
        }
        if basic.keys().any(|user| user.contains(':') || user.is_empty()) {
            return Err("a user's name in `basic` is not empty and has no `:`".to_owned());
        }
        Ok(Auth { bearer, basic, tokens })
    }
}

impl Auth {
    /// Judges what a client shows.
    ///
    /// # Errors
    /// It may not call the function.
    pub fn check(&self, headers: &HeaderMap) -> Result<Granted, Unauthorized> {
        let mut fields = headers.get_all(AUTHORIZATION).iter();
        let field = match (fields.next(), fields.next()) {
            (None, _) => return Err(self.refuse("it has no Authorization header")),
            (Some(_), Some(_)) => return Err(self.refuse("it has two Authorization headers")),
            (Some(field), None) => field.to_str().unwrap_or_default(),
        };
        let (scheme, value) = field.split_once(' ').unwrap_or((field, ""));
        let value = value.trim();
        if scheme.eq_ignore_ascii_case("basic") {
            return self.check_basic(value);
        }
        if !scheme.eq_ignore_ascii_case("bearer") {
            return Err(self.refuse("its Authorization is neither Basic nor Bearer"));
        }
        let hash = Hash::of(value.as_bytes());
        // All are compared, whichever fits.
        if self.bearer.iter().fold(false, |found, known| found | known.is(&hash)) {
            return Ok(Granted { user: None, is_secret: true });
        }
        match &self.tokens {
            Some(tokens) => match tokens.check(value) {
                Ok(user) => Ok(Granted { user, is_secret: false }),
                Err(why) => Err(self.refuse(&format!("its token is not taken: {why}"))),
            },
            None => Err(self.refuse("its token is unknown")),
        }
    }

    fn check_basic(&self, value: &str) -> Result<Granted, Unauthorized> {
        let pair =
            BASE64_STANDARD.decode(value).ok().and_then(|bytes| String::from_utf8(bytes).ok());
        let Some((user, password)) = pair.as_deref().and_then(|pair| pair.split_once(':')) else {
            return Err(self.refuse("its Authorization is not a user and a password"));
        };
        let hash = Hash::of(password.as_bytes());
        match self.basic.get(user) {
            Some(known) if known.is(&hash) => {
                Ok(Granted { user: Some(user.to_owned()), is_secret: true })
            }
            _ => Err(self.refuse("its user or password is wrong")),
        }
    }

    fn refuse(&self, why: &str) -> Unauthorized {
        let challenge = match self.basic.is_empty() {
            true => "Bearer",
            false => "Basic realm=\"restricted\", charset=\"UTF-8\"",
        };
        Unauthorized { challenge, why: why.to_owned() }
    }
}

#[cfg(test)]
mod tests {
    use super::super::jwt::tests::{claims, key, sign};
    use super::*;

    fn hash(secret: &str) -> String {
        let digits: String =
            Sha256::digest(secret).iter().map(|byte| format!("{byte:02x}")).collect();
        format!("sha256:{digits}")
    }

    fn auth(text: &str) -> Result<Auth, String> {
        let directory = tempfile::tempdir().unwrap();
        let (_, set) = key();
        std::fs::write(directory.path().join("keys.json"), set).unwrap();
        let table: AuthTable = toml::from_str(text).map_err(|error| error.to_string())?;
        table.load(&mut Reader::new(directory.path()))
    }

    fn shown(value: &str) -> HeaderMap {
        let mut headers = HeaderMap::new();
        headers.insert(AUTHORIZATION, value.parse().unwrap());
        headers
    }

    fn basic(pair: &str) -> HeaderMap {
        shown(&format!("Basic {}", BASE64_STANDARD.encode(pair)))
    }

    #[test]
    fn whoever_knows_a_secret_is_let_in() {
        let text = format!(
            "bearer = [\"{}\", \"{}\"]\nbasic.ann = \"{}\"",
            hash("one"),
            hash("two"),
            hash("pass:word")
        );
        let auth = auth(&text).unwrap();
        for token in ["Bearer one", "bearer two", "BEARER  two"] {
            assert_eq!(auth.check(&shown(token)), Ok(Granted { user: None, is_secret: true }));
        }
        assert_eq!(auth.check(&basic("ann:pass:word")).unwrap().user.as_deref(), Some("ann"));
        let mut twice = shown("Bearer one");
        twice.append(AUTHORIZATION, "Bearer one".parse().unwrap());
        for headers in [
            HeaderMap::new(),
            twice,
            shown(""),
            shown("Bearer"),
            shown("Bearer three"),
            shown("Digest one"),
            shown("one"),
            shown("Basic one"),
            basic("ann"),
            basic("ann:"),
            basic("bob:pass:word"),
            basic(&format!("ann:{}", hash("pass:word"))),
        ] {
            let refused = auth.check(&headers).unwrap_err();
            assert!(refused.challenge.starts_with("Basic realm="), "{headers:?}");
        }
    }

    #[test]
    fn tokens_are_judged_by_the_key_set() {
        let directory = tempfile::tempdir().unwrap();
        let (pair, set) = key();
        std::fs::write(directory.path().join("keys.json"), set).unwrap();
        let text =
            "jwt = { keys = \"keys.json\", issuer = \"https://issuer\", audience = \"api\" }";
        let table: AuthTable = toml::from_str(text).unwrap();
        let auth = table.load(&mut Reader::new(directory.path())).unwrap();
        let token = sign(&pair, &serde_json::json!({"alg": "ES256"}), &claims());
        let granted = auth.check(&shown(&format!("Bearer {token}"))).unwrap();
        assert_eq!(granted, Granted { user: Some("ann".to_owned()), is_secret: false });
        let refused = auth.check(&shown("Bearer x.y.z")).unwrap_err();
        assert_eq!(refused.challenge, "Bearer");
    }

    #[test]
    fn wrong_tables_are_named() {
        for (text, why) in [
            ("", "names nobody"),
            ("bearer = [\"hunter2\"]", "64 hexadecimal digits"),
            (
                "basic.\"a:b\" = \"sha256:0000000000000000000000000000000000000000000000000000000000000000\"",
                "no `:`",
            ),
            ("jwt = { keys = \"none.json\", issuer = \"i\", audience = \"a\" }", "none.json"),
            ("jwt = { keys = \"keys.json\", issuer = \"i\" }", "audience"),
        ] {
            let error = auth(text).err().unwrap();
            assert!(error.contains(why) && !error.contains("hunter2\" "), "{error}");
        }
    }
}
