//! Names of things in the store: content hashes and names that people choose.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// Why a text is not a hash: it is not 64 hexadecimal digits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("a hash is 64 hexadecimal digits in lower case")]
pub struct InvalidHash;

macro_rules! hash_type {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub struct $name(pub [u8; 32]);

        impl $name {
            /// The 32 bytes.
            pub const fn as_bytes(&self) -> &[u8; 32] {
                &self.0
            }
        }

        impl From<blake3::Hash> for $name {
            fn from(hash: blake3::Hash) -> Self {
                Self(*hash.as_bytes())
            }
        }

        impl From<[u8; 32]> for $name {
            fn from(bytes: [u8; 32]) -> Self {
                Self(bytes)
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(&blake3::Hash::from_bytes(self.0).to_hex())
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, concat!(stringify!($name), "({})"), self)
            }
        }

        impl FromStr for $name {
            type Err = InvalidHash;

            fn from_str(text: &str) -> Result<Self, InvalidHash> {
                parse_hex(text).map(Self)
            }
        }

        impl Serialize for $name {
            fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                serializer.collect_str(self)
            }
        }

        impl<'de> Deserialize<'de> for $name {
            fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                let text = String::deserialize(deserializer)?;
                text.parse().map_err(serde::de::Error::custom)
            }
        }
    };
}

hash_type! {
    /// Name of a blob: BLAKE3 of its content, in a sharing domain of its own
    /// keyed with the domain's name (see [`crate::Domain`]).
    BlobHash
}
hash_type! {
    /// Name of a rootfs index: BLAKE3 of the whole index file.
    IndexId
}
hash_type! {
    /// Name of a snapshot image: hash of its length and of those pages that are
    /// not zero (see [`crate::image_id`]).
    ImageId
}

hash_type! {
    /// Name of a build of the Thaw kernel: BLAKE3 of its ELF file.
    KernelId
}

/// A dozen hexadecimal digits that stand for some bytes, to tell names apart.
pub fn short_hash(bytes: &[u8]) -> String {
    blake3::hash(bytes).to_hex()[..12].to_owned()
}

/// Upper-case digits are refused: a hash is a file name, and one file has one name.
fn parse_hex(text: &str) -> Result<[u8; 32], InvalidHash> {
    if text.len() != 64 || text.bytes().any(|byte| byte.is_ascii_uppercase()) {
        return Err(InvalidHash);
    }
    blake3::Hash::from_hex(text).map(|hash| *hash.as_bytes()).map_err(|_| InvalidHash)
}

/// The name of a function, a rootfs or a sharing domain: 1 to 64 of `a-z A-Z
/// 0-9 . _ -`, the first a letter or a digit. Such a name is always a safe file
/// name.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(transparent)]
pub struct Name(String);

/// Why a text is not a [`Name`]; holds the text.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "{0:?} is not a usable name: choose 1 to 64 of a-z, A-Z, 0-9, '.', '_' and '-', beginning \
     with a letter or a digit"
)]
pub struct InvalidName(pub String);

impl Name {
    /// Checks `text` and makes it a name.
    pub fn new(text: &str) -> Result<Self, InvalidName> {
        let allowed = |byte: u8| byte.is_ascii_alphanumeric() || b"._-".contains(&byte);
        let first_ok = text.bytes().next().is_some_and(|byte| byte.is_ascii_alphanumeric());
        if first_ok && text.len() <= 64 && text.bytes().all(allowed) {
            Ok(Self(text.to_owned()))
        } else {
            Err(InvalidName(text.to_owned()))
        }
    }

    /// The name as text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl FromStr for Name {
    type Err = InvalidName;

    fn from_str(text: &str) -> Result<Self, InvalidName> {
        Self::new(text)
    }
}

impl<'de> Deserialize<'de> for Name {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        Name::new(&String::deserialize(deserializer)?).map_err(serde::de::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hashes_survive_their_text_form() {
        let hash = BlobHash::from(blake3::hash(b"content"));
        assert_eq!(hash.to_string().parse(), Ok(hash));
        assert_eq!("ab".parse::<BlobHash>(), Err(InvalidHash));
        assert_eq!(hash.to_string().to_uppercase().parse::<BlobHash>(), Err(InvalidHash));
    }

    #[test]
    fn names_are_safe_file_names() {
        for good in ["hello-python", "a", "A.b_c-9", "0"] {
            assert!(Name::new(good).is_ok(), "{good}");
        }
        for bad in ["", ".", "..", "a/b", "-a", ".a", "ä", "a\0", "a b", &"x".repeat(65)] {
            assert!(Name::new(bad).is_err(), "{bad}");
        }
    }
}
