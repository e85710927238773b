//! What a function can be booted with before the rest of it is there.

use super::ArtifactError;
use rustix::fs::{MemfdFlags, memfd_create};
use std::fs::File;
use std::io::{self, Read, Seek};
use std::os::unix::fs::FileExt;
use thaw_home::function::BuiltFunction;
use thaw_home::working_set::stored_working_set;
use thaw_oci::artifact::{RUN_MAX, RunPart};
use thaw_sandbox::{Image, WorkingSet, run_layout};
use thaw_store::{OpenIndex, Store, StoreError};

/// A run and what the document says of it.
pub struct Run {
    pub part: RunPart,
    pub bytes: Vec<u8>,
}

/// The working set of a function that has served a request, and its run; `None`: it cannot be
/// booted in parts, since it is of several processes or touches too much.
pub fn run_of(
    store: &Store,
    function: &BuiltFunction,
    image: &Image,
    index: &OpenIndex,
) -> Result<(Option<WorkingSet>, Option<Run>), ArtifactError> {
    let checksum = image.header().checksum;
    let recorded = stored_working_set(store, function.image);
    let recorded = recorded.filter(|set| set.image_checksum() == checksum);
    let set = recorded.clone().unwrap_or_else(|| WorkingSet::empty(checksum));
    let Some(layout) = run_layout(image, &set) else { return Ok((recorded, None)) };
    let rootfs = function.rootfs(store)?;
    let plan = image.plan(rootfs.file(), rootfs.file_len(), rootfs.blobs())?;
    let pages = memfd_create("thaw-run", MemfdFlags::CLOEXEC).map_err(source)?;
    let mut pages = File::from(pages);
    layout.write(&plan, &pages).map_err(source)?;
    let set = set.to_bytes();
    let part = RunPart {
        working_set: set.len() as u64,
        head: image.head_len(),
        pages: layout.len(),
        layout: layout.name().iter().map(|byte| format!("{byte:02x}")).collect(),
    };
    let len = part.working_set + index.file_len() + part.head + part.pages;
    if len > RUN_MAX {
        return Ok((recorded, None));
    }
    let mut bytes = set;
    add(index.file(), index.file_len(), &mut bytes)?;
    add(image.file(), part.head, &mut bytes)?;
    pages.rewind().map_err(source)?;
    pages.read_to_end(&mut bytes).map_err(source)?;
    match bytes.len() as u64 == len {
        true => Ok((recorded, Some(Run { part, bytes }))),
        false => Err(source(io::Error::from(io::ErrorKind::UnexpectedEof))),
    }
}

fn add(file: &File, len: u64, to: &mut Vec<u8>) -> Result<(), ArtifactError> {
    let at = to.len();
    to.resize(at + len as usize, 0);
    file.read_exact_at(&mut to[at..], 0).map_err(source)
}

fn source(error: impl Into<io::Error>) -> ArtifactError {
    StoreError::Source(error.into()).into()
}
