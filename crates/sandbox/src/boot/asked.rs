//! Contents that sandboxes without a program have asked for, for the next ones of the same image.
//!
//! Such an image was frozen before any program ran, so nothing in it says which files the first
//! command is going to open: the loader, libraries, locales. Each would be a question to the broker,
//! some 20 of them for a small program. The first sandboxes ask, and the boot commands of later
//! ones bring the descriptors along.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::{Arc, PoisonError, RwLock};

use thaw_abi::image::ancestor_depth;

use crate::broker::{BlobSource, FetchAnswer};

/// Most contents that are remembered. Each is a descriptor in the daemon, and one in each sandbox.
pub(super) const ASKED_MAX: usize = 64;

/// Contents of a root file system that sandboxes have asked for: the first [`ASKED_MAX`]. A sandbox
/// chooses what it asks for, so the worst that it can do to later ones is that they ask themselves.
#[derive(Debug, Default)]
pub struct AskedContents {
    all: RwLock<Vec<(u32, Arc<OwnedFd>)>>,
}

impl AskedContents {
    /// Numbers and descriptors, but for those that a boot command has anyway; at most `most`.
    pub(super) fn beside(&self, carried: &[u32], most: usize) -> Vec<(u32, Arc<OwnedFd>)> {
        let all = self.all.read().unwrap_or_else(PoisonError::into_inner);
        all.iter().filter(|(blob, _)| !carried.contains(blob)).take(most).cloned().collect()
    }

    fn note(&self, blob: u32, file: &OwnedFd) {
        let has_room = |all: &[(u32, Arc<OwnedFd>)]| {
            all.len() < ASKED_MAX && all.iter().all(|(known, _)| *known != blob)
        };
        if !has_room(&self.all.read().unwrap_or_else(PoisonError::into_inner)) {
            return;
        }
        // A daemon that has too many descriptors remembers none.
        let Ok(file) = file.try_clone() else { return };
        let mut all = self.all.write().unwrap_or_else(PoisonError::into_inner);
        if has_room(&all) {
            all.push((blob, Arc::new(file)));
        }
    }
}

/// Notes which contents are opened.
pub(super) struct Noting {
    /// Where they come from.
    pub blobs: Arc<dyn BlobSource>,
    /// Where they are noted.
    pub asked: Arc<AskedContents>,
}

impl BlobSource for Noting {
    fn open_blob(&self, blob: u32) -> io::Result<OwnedFd> {
        let file = self.blobs.open_blob(blob)?;
        if ancestor_depth(blob).is_none() {
            self.asked.note(blob, &file);
        }
        Ok(file)
    }

    fn fetch(&self, blob: u32, answer: FetchAnswer) -> Result<(), FetchAnswer> {
        self.blobs.fetch(blob, answer)
    }

    fn failure(&self) -> Option<String> {
        self.blobs.failure()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::File;
    use thaw_abi::image::ancestor_number;

    /// Has all contents up to a number.
    struct UpTo(u32);

    impl BlobSource for UpTo {
        fn open_blob(&self, blob: u32) -> io::Result<OwnedFd> {
            let is_there = blob <= self.0 || ancestor_depth(blob).is_some();
            is_there.then_some(()).ok_or(io::ErrorKind::NotFound)?;
            Ok(File::open("/dev/null")?.into())
        }
    }

    fn numbers(asked: &AskedContents, carried: &[u32], most: usize) -> Vec<u32> {
        asked.beside(carried, most).into_iter().map(|(blob, _)| blob).collect()
    }

    #[test]
    fn what_was_asked_for_is_noted_once_and_in_order() {
        let asked = Arc::new(AskedContents::default());
        let source = Noting { blobs: Arc::new(UpTo(9)), asked: asked.clone() };
        for blob in [7, 3, 7, 5] {
            source.open_blob(blob).unwrap();
        }
        assert!(source.open_blob(10).is_err());
        // The boot command brings all of the image's ancestors anyway.
        source.open_blob(ancestor_number(0)).unwrap();
        assert_eq!(numbers(&asked, &[], 9), [7, 3, 5]);
        assert_eq!(numbers(&asked, &[3, 4], 9), [7, 5]);
        assert_eq!(numbers(&asked, &[3], 1), [7]);
    }

    #[test]
    fn there_is_a_bound() {
        let asked = Arc::new(AskedContents::default());
        let source = Noting { blobs: Arc::new(UpTo(u32::MAX)), asked: asked.clone() };
        for blob in 0..2 * ASKED_MAX as u32 {
            source.open_blob(blob).unwrap();
        }
        assert_eq!(numbers(&asked, &[], usize::MAX), Vec::from_iter(0..ASKED_MAX as u32));
    }
}
