//! Why an image cannot be used.

use std::io;
use std::path::PathBuf;
use thaw_store::StoreError;
use thaw_store::index::TreeError;

/// One sentence each, for whoever gave the image.
#[derive(Debug, thiserror::Error)]
pub enum OciError {
    /// A file of this host cannot be read or written.
    #[error("cannot {action} {} ({error}); check the path and its permissions", path.display())]
    File {
        /// What was to be done, as in "read".
        action: &'static str,
        /// The file.
        path: PathBuf,
        /// What the system said.
        error: io::Error,
    },
    /// It is no image.
    #[error(
        "{} is neither an OCI layout nor an archive of `docker save` or `podman save` ({reason}); name \
         such a directory or file", path.display()
    )]
    NotAnImage {
        /// What was named.
        path: PathBuf,
        /// What is missing.
        reason: String,
    },
    /// It holds several images.
    #[error("it holds several images ({}); name one with --tag", tags.join(", "))]
    Several {
        /// Their tags.
        tags: Vec<String>,
    },
    /// It does not hold the image that was asked for.
    #[error("it holds no image `{wanted}`{}", has(tags))]
    NoSuchTag {
        /// The tag that was asked for.
        wanted: String,
        /// The tags of the images that it holds.
        tags: Vec<String>,
    },
    /// No image in it is for this machine.
    #[error("it has no image for linux/amd64, but for {has}; build or pull it for linux/amd64")]
    Platform {
        /// What it is for.
        has: String,
    },
    /// A document or layer is not what its digest says.
    #[error("{what} is damaged: its digest is {found}, not {wanted}; copy or pull it anew")]
    Digest {
        /// Which part.
        what: String,
        /// Digest of the content.
        found: String,
        /// Digest that it should have.
        wanted: String,
    },
    /// A document makes no sense.
    #[error("{what} makes no sense ({reason}); make the image anew")]
    Document {
        /// Which part.
        what: String,
        /// Why not.
        reason: String,
    },
    /// A layer cannot be unpacked.
    #[error("layer {layer} cannot be unpacked at `{path}`: {reason}")]
    Entry {
        /// Number of the layer, from 1.
        layer: usize,
        /// Name of the entry, escaped.
        path: String,
        /// Why not.
        reason: String,
    },
    /// It is larger than it may be.
    #[error("it has more than {limit} {what}; {}", smaller(what))]
    TooLarge {
        /// The bound.
        limit: u64,
        /// Of what.
        what: &'static str,
    },
    /// The text names no image.
    #[error(
        "`{text}` names no image ({reason}); give one such as docker.io/library/python:3.12-slim"
    )]
    Reference {
        /// The text.
        text: String,
        /// Why not.
        reason: String,
    },
    /// A registry refuses, or cannot be reached.
    #[error("cannot {action} {image}: {reason}")]
    Registry {
        /// What was tried: `pull` or `push`.
        action: &'static str,
        /// The image.
        image: String,
        /// What the registry said, and the way out.
        reason: String,
    },
    /// Who should have signed it has not.
    #[error(
        "{image} is not signed by the `verify_key` of its registry in registries.toml: {why}; have it signed, \
         or correct `verify_key`"
    )]
    Unsigned {
        /// The image.
        image: String,
        /// What is wrong with its signatures.
        why: String,
    },
    /// It is a function, where an image was wanted.
    #[error(
        "{name} is a frozen function and no container image; `thaw pull` it, and call it by its name"
    )]
    Function {
        /// Its name in the registry.
        name: String,
    },
    /// A key cannot be used.
    #[error("{} is no usable key: {reason}", path.display())]
    Key {
        /// The file.
        path: PathBuf,
        /// Why not, and the way out.
        reason: String,
    },
    /// Whoever pulls does not take it; one sentence.
    #[error("{0}")]
    Refused(String),
    /// A configuration file makes no sense.
    #[error("{} makes no sense ({reason}); correct or remove it", path.display())]
    Configuration {
        /// The file.
        path: PathBuf,
        /// Why not.
        reason: String,
    },
    /// The store refused something.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// The files do not fit together.
    #[error(transparent)]
    Tree(#[from] TreeError),
}

fn has(tags: &[String]) -> String {
    match tags {
        [] => "; its images have no tags".to_owned(),
        tags => format!(", but {}", tags.join(", ")),
    }
}

fn smaller(what: &str) -> &'static str {
    match what.starts_with("bytes") {
        true => "take a smaller one, or allow more with --max-size",
        false => "take a smaller one",
    }
}

impl OciError {
    pub(crate) fn file(action: &'static str, path: impl Into<PathBuf>, error: io::Error) -> Self {
        Self::File { action, path: path.into(), error }
    }

    pub(crate) fn document(what: impl Into<String>, reason: impl ToString) -> Self {
        Self::Document { what: what.into(), reason: reason.to_string() }
    }
}

/// A name from an image, with what would confuse a terminal escaped.
pub(crate) fn escaped(name: &[u8]) -> String {
    name.escape_ascii().to_string()
}
