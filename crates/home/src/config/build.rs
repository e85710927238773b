//! `[build]` and `[sharing]`: how a function's files are made, and who shares them.

use super::{ByteSize, EgressRule, TimeSpan};
use serde::{Deserialize, Serialize};
use thaw_store::Domain;
use thaw_store::import::PathPattern;

/// `[build]`: a command that makes files of the function before they are imported,
/// and what it and `pip` may use.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct BuildConfig {
    /// Program and arguments; none: only `requirements` of `[runtime]` are installed.
    #[serde(deserialize_with = "super::non_empty", skip_serializing_if = "Vec::is_empty")]
    pub command: Vec<String>,
    /// Destinations that it may connect to. Those of the function are in `[egress]`.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub egress: Vec<EgressRule>,
    /// Memory that it may use, its own files in memory included.
    pub memory: ByteSize,
    /// How long it may take.
    pub timeout: TimeSpan,
}

impl Default for BuildConfig {
    fn default() -> Self {
        Self {
            command: Vec::new(),
            egress: Vec::new(),
            memory: ByteSize::mebibytes(4096),
            timeout: TimeSpan::seconds(30 * 60),
        }
    }
}

/// `[sharing]`: with which functions equal files are one file on the host, hence one
/// copy on disk and in the page cache.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Sharing {
    /// Only with functions of the same domain; none: with all that name none either.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub domain: Option<DomainName>,
    /// Files of the function's directory that are shared with no other function.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub private: Vec<PrivateFiles>,
}

impl Sharing {
    /// Whether nothing is set.
    pub fn is_default(&self) -> bool {
        *self == Self::default()
    }
}

/// The name of a sharing domain.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct DomainName(thaw_store::Name);

impl DomainName {
    /// The name as the store knows it.
    pub fn name(&self) -> &thaw_store::Name {
        &self.0
    }
}

impl std::str::FromStr for DomainName {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if text.starts_with(Domain::PRIVATE_PREFIX) {
            let prefix = Domain::PRIVATE_PREFIX;
            return Err(format!(
                "names of domains that begin with `{prefix}` are for private files; \
                 choose another one"
            ));
        }
        match thaw_store::Name::new(text) {
            Ok(name) => Ok(Self(name)),
            Err(error) => Err(error.to_string()),
        }
    }
}

impl TryFrom<String> for DomainName {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        text.parse()
    }
}

impl From<DomainName> for String {
    fn from(domain: DomainName) -> Self {
        domain.0.to_string()
    }
}

/// Files by their paths below the function's directory, such as `secrets/**` or
/// `**/*.key`; see [`PathPattern`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct PrivateFiles {
    text: String,
    pattern: PathPattern,
}

impl PrivateFiles {
    /// The pattern.
    pub fn pattern(&self) -> &PathPattern {
        &self.pattern
    }
}

impl TryFrom<String> for PrivateFiles {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        match PathPattern::new(&text) {
            Some(pattern) => Ok(Self { text, pattern }),
            None => Err(format!(
                "`{text}` does not name files of the function's directory; give a relative path \
                 without .. and of at most {} names, in which * and ** stand for any",
                PathPattern::NAMES_MAX
            )),
        }
    }
}

impl From<PrivateFiles> for String {
    fn from(files: PrivateFiles) -> Self {
        files.text
    }
}
