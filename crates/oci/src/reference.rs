//! Names of images, as in `docker.io/library/python:3.12-slim`.

use crate::error::OciError;
use crate::registry::{SCHEME, bucket_of, host_of};
use std::fmt;
use std::str::FromStr;
use thaw_store::Name;

/// The tag of an image that is named without one.
pub const fn default_tag() -> &'static str {
    "latest"
}

/// The full name of an image: registry, repository, and tag or digest.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Reference(oci_client::Reference);

impl Reference {
    pub(crate) fn inner(&self) -> &oci_client::Reference {
        &self.0
    }

    /// Host, and port if there is one, of the registry.
    pub fn registry(&self) -> &str {
        self.0.registry()
    }

    /// Whether it means content by its digest, so that nothing else may have its name.
    pub fn has_digest(&self) -> bool {
        self.0.digest().is_some()
    }

    /// The registry with the repository, without tag and digest.
    pub fn repository(&self) -> String {
        format!("{}/{}", self.0.registry(), self.0.repository())
    }

    /// A name for the store, by which the image is found again: what one reads, and a hash of the
    /// whole reference, since different ones must not have the same.
    pub fn store_name(&self) -> Name {
        let whole = self.to_string();
        let last = self.0.repository().rsplit('/').next().unwrap_or_default();
        let version = self.0.tag().or(self.0.digest()).unwrap_or(default_tag());
        let allowed = |c: char| c.is_ascii_alphanumeric() || "._-".contains(c);
        let readable: String = format!("{last}-{version}")
            .chars()
            .map(|c| if allowed(c) { c } else { '-' })
            .take(40)
            .collect();
        let hash = thaw_store::short_hash(whole.as_bytes());
        Name::new(&format!("{readable}-{hash}")).expect("it begins with a letter or digit")
    }
}

impl FromStr for Reference {
    type Err = OciError;

    fn from_str(text: &str) -> Result<Self, OciError> {
        let wrong =
            |reason: String| OciError::Reference { text: text.escape_debug().to_string(), reason };
        // A bucket takes the place of a registry.
        let named = match text.strip_prefix(SCHEME) {
            Some(rest) => {
                let (bucket, rest) = rest.split_once('/').ok_or_else(|| {
                    wrong(
                        "a bucket needs a path in it, as in s3://bucket/functions/shop:3"
                            .to_owned(),
                    )
                })?;
                format!("{}/{rest}", host_of(bucket))
            }
            None => text.to_owned(),
        };
        let parsed =
            named.parse::<oci_client::Reference>().map_err(|error| wrong(error.to_string()))?;
        match bucket_of(parsed.registry()).is_some() == text.starts_with(SCHEME) {
            true => Ok(Self(parsed)),
            false => Err(wrong("a bucket is named as in s3://bucket/functions/shop:3".to_owned())),
        }
    }
}

impl fmt::Display for Reference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let whole = self.0.whole();
        match bucket_of(self.registry()) {
            Some(bucket) => write!(f, "{SCHEME}{bucket}{}", &whole[self.registry().len()..]),
            None => whole.fmt(f),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn short_names_mean_the_usual_registry() {
        let reference: Reference = "python:3.12-slim".parse().unwrap();
        assert_eq!(reference.to_string(), "docker.io/library/python:3.12-slim");
        assert_eq!("docker.io/library/python:3.12-slim".parse::<Reference>().unwrap(), reference);
        assert!(
            "localhost:5000/a/b".parse::<Reference>().unwrap().to_string().ends_with(":latest")
        );
        for bad in ["", "UPPER", "a b", "x:", "../x", "-x"] {
            assert!(bad.parse::<Reference>().is_err(), "{bad}");
        }
    }

    #[test]
    fn buckets_are_named_by_their_scheme() {
        let reference: Reference = "s3://my-bucket/functions/shop:3".parse().unwrap();
        assert_eq!(reference.to_string(), "s3://my-bucket/functions/shop:3");
        assert_eq!(reference.registry(), "my-bucket.s3");
        for bad in ["s3://", "s3://bucket", "s3://bucket/", "s3:///x", "bucket.s3/shop:3"] {
            let error = bad.parse::<Reference>().unwrap_err().to_string();
            assert!(error.contains("names no image"), "{bad}: {error}");
        }
    }

    #[test]
    fn names_in_the_store_differ_as_references_do() {
        let name = |text: &str| text.parse::<Reference>().unwrap().store_name();
        assert_eq!(name("python"), name("docker.io/library/python:latest"));
        assert!(name("python").as_str().starts_with("python-latest-"));
        assert_ne!(name("one.example/python"), name("two.example/python"));
        let long = format!("example.org/{}:{}", "x".repeat(100), "y".repeat(100));
        assert!(name(&long).as_str().len() <= 64);
    }
}
