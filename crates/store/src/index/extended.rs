//! Extended attributes of the files of a tree (`thaw_abi::extended` says which, and how many).

use std::collections::BTreeMap;

use thaw_abi::extended::{FILE_MAX, INDEX_MAX, LIST_MAX, is_possible};

/// Why a file cannot have an extended attribute.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ExtendedError {
    /// Its name or value is one that Linux refuses.
    #[error("the extended attribute {0:?} has a name or a value that Linux refuses")]
    Impossible(String),
    /// Files of this kind have none of that name, or it is not kept.
    #[error("the extended attribute {0:?} is not one that such a file may have")]
    NotKept(String),
    /// All names of a file have too many bytes.
    #[error("the names of its extended attributes have more than {LIST_MAX} bytes")]
    List,
    /// All names and values of a file have too many bytes.
    #[error("its extended attributes have more than {FILE_MAX} bytes")]
    File,
    /// Those of all files have too many bytes.
    #[error("the extended attributes of all files have more than {INDEX_MAX} bytes")]
    Index,
}

/// A name for a message.
pub(super) fn shown(name: &[u8]) -> String {
    String::from_utf8_lossy(&name[..name.len().min(64)]).into_owned()
}

/// Bytes of the extended attributes of a file.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Sizes {
    /// Names, each with its terminator.
    list: usize,
    /// Names and values.
    bytes: usize,
}

impl Sizes {
    /// Counts an attribute.
    pub(super) fn add(&mut self, name: &[u8], value: &[u8]) -> Result<(), ExtendedError> {
        if !is_possible(name, value) {
            return Err(ExtendedError::Impossible(shown(name)));
        }
        let list = self.list + name.len() + 1;
        let bytes = self.bytes + name.len() + value.len();
        if list > LIST_MAX {
            return Err(ExtendedError::List);
        }
        if bytes > FILE_MAX {
            return Err(ExtendedError::File);
        }
        *self = Self { list, bytes };
        Ok(())
    }
}

/// The extended attributes of a file: values by name.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Extended {
    by_name: BTreeMap<Vec<u8>, Vec<u8>>,
    sizes: Sizes,
}

impl Extended {
    /// None.
    pub const fn new() -> Self {
        Self { by_name: BTreeMap::new(), sizes: Sizes { list: 0, bytes: 0 } }
    }

    /// Adds an attribute; of two with one name, the later one counts.
    ///
    /// # Errors
    /// Linux refuses its name or value, or the file has too much of them.
    pub fn insert(&mut self, name: &[u8], value: &[u8]) -> Result<(), ExtendedError> {
        let mut sizes = self.sizes;
        if let Some(old) = self.by_name.get(name) {
            sizes.list -= name.len() + 1;
            sizes.bytes -= name.len() + old.len();
        }
        sizes.add(name, value)?;
        self.sizes = sizes;
        self.by_name.insert(name.to_vec(), value.to_vec());
        Ok(())
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.by_name.is_empty()
    }

    /// Bytes of names and values.
    pub(super) fn bytes(&self) -> usize {
        self.sizes.bytes
    }

    /// Names and values, by name.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = (&[u8], &[u8])> {
        self.by_name.iter().map(|(name, value)| (name.as_slice(), value.as_slice()))
    }
}

#[cfg(test)]
mod tests {
    use thaw_abi::extended::{NAME_MAX, VALUE_MAX};

    use super::*;

    #[test]
    fn the_last_of_two_counts() {
        let mut all = Extended::default();
        all.insert(b"user.a", b"first").unwrap();
        all.insert(b"user.a", b"second").unwrap();
        assert_eq!(all.iter().collect::<Vec<_>>(), [(&b"user.a"[..], &b"second"[..])]);
        assert_eq!(all.bytes(), 12);
    }

    #[test]
    fn a_file_has_no_more_than_linux_lists() {
        let refused = |all: &mut Extended, name: &[u8], value: &[u8]| {
            let before = all.clone();
            let error = all.insert(name, value).unwrap_err();
            assert_eq!(*all, before);
            error
        };
        let mut all = Extended::default();
        let long = [&b"user."[..], &[b'n'; NAME_MAX]].concat();
        assert!(matches!(refused(&mut all, &long, b""), ExtendedError::Impossible(_)));
        let large = [0; VALUE_MAX + 1];
        assert!(matches!(refused(&mut all, b"user.a", &large), ExtendedError::Impossible(_)));
        // 256 bytes each with its terminator.
        let name = |number: usize| format!("user.{number:0250}").into_bytes();
        for number in 0..LIST_MAX / (NAME_MAX + 1) {
            all.insert(&name(number), b"").unwrap();
        }
        assert_eq!(refused(&mut all, b"user.a", b""), ExtendedError::List);
        let mut all = Extended::default();
        for number in 0..15 {
            all.insert(format!("user.{number:02}").as_bytes(), &large[1..]).unwrap();
        }
        all.insert(b"user.15", &large[..VALUE_MAX - 16 * 7]).unwrap();
        assert_eq!(all.bytes(), FILE_MAX);
        assert_eq!(refused(&mut all, b"user.b", b""), ExtendedError::File);
    }
}
