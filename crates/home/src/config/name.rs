//! The name of a function.

use super::quantity::FromText;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use std::borrow::Borrow;
use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

/// The name of a function: a DNS label in lower case, because clients name the
/// function in the `Host` header.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct FunctionName(Arc<str>);

/// The text is not a function name.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "`{0}` is not a function name; use 1 to 63 lower-case letters, digits and hyphens, \
     beginning and ending with a letter or digit"
)]
pub struct NameError(String);

impl FunctionName {
    /// The name as text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl FromStr for FunctionName {
    type Err = NameError;

    fn from_str(text: &str) -> Result<Self, NameError> {
        let inner = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-';
        let bytes = text.as_bytes();
        let valid = (1..=63).contains(&bytes.len())
            && bytes.iter().copied().all(inner)
            && bytes[0] != b'-'
            && bytes[bytes.len() - 1] != b'-';
        if valid { Ok(Self(text.into())) } else { Err(NameError(text.to_owned())) }
    }
}

impl fmt::Display for FunctionName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&self.0)
    }
}

impl Borrow<str> for FunctionName {
    fn borrow(&self) -> &str {
        &self.0
    }
}

impl<'de> Deserialize<'de> for FunctionName {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_str(FromText("a function name", std::marker::PhantomData))
    }
}

impl Serialize for FunctionName {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_dns_labels() {
        for good in ["a", "hello-python", "x1", "0a"] {
            assert_eq!(good.parse::<FunctionName>().unwrap().as_str(), good);
        }
        let long = "a".repeat(64);
        for bad in ["", "-a", "a-", "A", "a.b", "a_b", "ä", "a b", "../x", &long] {
            assert!(bad.parse::<FunctionName>().is_err(), "{bad}");
        }
    }
}
