//! The document of an artifact: the function, and how large its parts are.

use super::Section;
use crate::error::OciError;
use serde::{Deserialize, Serialize};
use thaw_store::{ImageId, IndexId, KernelId, Name};

/// Version of the documents that are written.
pub const DOCUMENT_VERSION: u32 = 2;
/// The oldest version that is read: it has neither [`RunPart`] nor [`PieceTable`].
const DOCUMENT_OLDEST: u32 = 1;

/// What an artifact says of a function. All of it is somebody else's: whoever reads it checks what
/// it says against the pieces.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FunctionDocument {
    /// [`DOCUMENT_VERSION`], or an older one.
    pub version: u32,
    /// The function's name where it was pushed.
    pub name: Name,
    /// Its configuration and environment, of which this crate understands nothing.
    pub function: serde_json::Value,
    /// Its root file system.
    pub index: IndexPart,
    /// Its image.
    pub image: ImagePart,
    /// Bytes of the kernel build that comes along; `None`: it does not.
    pub kernel: Option<u64>,
    /// What it can be booted with before the rest is there; `None`: it cannot.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub run: Option<RunPart>,
    /// Where its pieces were cut.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pieces: Option<PieceTable>,
}

/// The run: the working set, the index, the image up to its memory, and pages, one after the other
/// in one layer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RunPart {
    /// Bytes of the working set.
    pub working_set: u64,
    /// Bytes of the image before its memory.
    pub head: u64,
    /// Bytes of the pages.
    pub pages: u64,
    /// Hash of the order of the pages, in hexadecimal digits.
    pub layout: String,
}

/// Bytes of the pieces of two sections, not compressed, in order.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PieceTable {
    /// Of index and contents.
    pub files: Vec<u32>,
    /// Of the image.
    pub image: Vec<u32>,
}

impl PieceTable {
    /// The pieces of a section; `None`: they are not told.
    pub fn of(&self, section: Section) -> Option<&[u32]> {
        match section {
            Section::Files => Some(&self.files),
            Section::Image => Some(&self.image),
            Section::Kernel | Section::WorkingSet | Section::Run => None,
        }
    }
}

/// The root file system. Its contents follow the index in the pieces, in the order of the index.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct IndexPart {
    /// BLAKE3 of the index.
    pub id: IndexId,
    /// Bytes of the index.
    pub size: u64,
    /// Bytes of all contents.
    pub contents: u64,
    /// How the contents are named, as runs of neighbours in the order of the index.
    pub naming: Vec<NamingRun>,
}

/// Neighbours that are named alike.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NamingRun {
    /// How they are named.
    pub naming: Naming,
    /// How many there are.
    pub count: u32,
}

/// By whose name a content is named: who shared it where it was pushed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Naming {
    /// Everybody.
    Shared,
    /// A sharing domain of this name.
    Domain(Name),
    /// Nobody but the function of this name.
    Private(Name),
}

/// The image.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ImagePart {
    /// Its name in a store.
    pub id: ImageId,
    /// Bytes of its file.
    pub size: u64,
    /// The kernel build that it needs.
    pub kernel: KernelId,
    /// CPU features that it may use, as in its header.
    pub cpu_features: [u32; 8],
}

impl FunctionDocument {
    /// Reads the JSON.
    ///
    /// # Errors
    /// It is not a document of a version that this program knows.
    pub fn parse(bytes: &[u8]) -> Result<Self, OciError> {
        #[derive(Deserialize)]
        struct Version {
            version: u32,
        }
        const WHAT: &str = "the function's document";
        let wrong = |error: serde_json::Error| OciError::document(WHAT, error);
        let Version { version } = serde_json::from_slice(bytes).map_err(wrong)?;
        if !(DOCUMENT_OLDEST..=DOCUMENT_VERSION).contains(&version) {
            let reason = format!(
                "it has version {version}, this Thaw knows {DOCUMENT_OLDEST} to {DOCUMENT_VERSION}"
            );
            return Err(OciError::document(WHAT, reason));
        }
        serde_json::from_slice(bytes).map_err(wrong)
    }

    /// As JSON. Equal documents give equal bytes.
    pub fn to_json(&self) -> Vec<u8> {
        serde_json::to_vec(self).expect("it has text keys and no value that JSON cannot express")
    }

    /// Bytes of all parts; `None`: no disk has as many.
    pub fn bytes(&self) -> Option<u64> {
        let parts = [self.index.contents, self.image.size, self.kernel.unwrap_or(0)];
        parts.into_iter().try_fold(self.index.size, u64::checked_add)
    }
}

/// A document, for tests.
#[cfg(test)]
pub(super) fn sample() -> FunctionDocument {
    let shop = Name::new("shop").unwrap();
    FunctionDocument {
        version: DOCUMENT_VERSION,
        name: shop.clone(),
        function: serde_json::json!({ "config": {} }),
        index: IndexPart {
            id: IndexId([1; 32]),
            size: 100,
            contents: 200,
            naming: vec![
                NamingRun { naming: Naming::Shared, count: 3 },
                NamingRun { naming: Naming::Private(shop), count: 1 },
            ],
        },
        image: ImagePart {
            id: ImageId([2; 32]),
            size: 4096,
            kernel: KernelId([3; 32]),
            cpu_features: [7; 8],
        },
        kernel: Some(50),
        run: None,
        pieces: None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn documents_are_read_back() {
        let document = sample();
        let json = document.to_json();
        assert_eq!(FunctionDocument::parse(&json).unwrap(), document);
        assert_eq!(document.bytes(), Some(4446));
        let run = RunPart { working_set: 1, head: 2, pages: 4096, layout: "0f".repeat(32) };
        let pieces = PieceTable { files: vec![300], image: vec![4096] };
        let lazy = FunctionDocument { run: Some(run), pieces: Some(pieces), ..sample() };
        assert_eq!(FunctionDocument::parse(&lazy.to_json()).unwrap(), lazy);
        // Those of before are read, too.
        let old = FunctionDocument { version: 1, ..sample() };
        assert_eq!(FunctionDocument::parse(&old.to_json()).unwrap(), old);
        let huge = FunctionDocument { kernel: Some(u64::MAX), ..document };
        assert_eq!(huge.bytes(), None);
    }

    #[test]
    fn others_are_refused() {
        let text = String::from_utf8(sample().to_json()).unwrap();
        let refused =
            |text: &str| FunctionDocument::parse(text.as_bytes()).unwrap_err().to_string();
        let newer = refused(&text.replace("\"version\":2", "\"version\":3"));
        assert!(newer.contains("version 3, this Thaw knows 1 to 2"), "{newer}");
        refused(&text.replace("\"size\":100", "\"size\":-1"));
        refused(&text.replace("\"shop\"", "\"../shop\""));
        refused(&text.replace("\"kernel\":50", "\"kernel\":50,\"more\":1"));
        refused("{");
        refused("[]");
    }

    #[test]
    fn documents_of_any_bytes_are_survived() {
        let json = sample().to_json();
        thaw_mutate::survive("function_document", &[&json[..]], 2000, |bytes| {
            if let Ok(document) = FunctionDocument::parse(bytes) {
                let _ = document.bytes();
            }
        });
    }
}
