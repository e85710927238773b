//! Large files: from the host's disk into a sandbox and back, beside a copy on that disk.

use super::{BenchError, Percentiles, Subject};
use serde::Serialize;
use std::fs::{self, File};
use std::io::{self, BufWriter, Read, Write};
use std::path::{Path, PathBuf};
use thaw_node::remote::files::FileProblem;
use thaw_node::sandboxes::Sandboxes;

/// Bytes of one.
const SIZE: usize = 100 << 20;
/// Bytes that are read from the disk or written to it at a time, as of a client.
const CHUNK: usize = 256 << 10;
/// Turns at most: each moves three files.
const ROUNDS_MAX: usize = 10;
/// Where it is in the sandbox.
const FILE: &str = "/tmp/thaw-bench-large";

/// What was measured.
#[derive(Clone, Debug, Serialize)]
pub struct LargeFileReport {
    /// Bytes of the file.
    pub bytes: u64,
    /// How often it was moved.
    pub n: usize,
    /// A file of the host is copied to another one on its disk, which is new.
    pub copy_us: Percentiles,
    /// It is copied to a new file in a sandbox.
    pub write_us: Percentiles,
    /// That one is copied to a new file of the host.
    pub read_us: Percentiles,
    /// Speed of writing by that of the copy: medians.
    pub write_speed: f64,
    /// The same of reading.
    pub read_speed: f64,
}

/// Moves large files, each time with a new sandbox.
pub(super) fn measure(
    subject: &Subject,
    directory: &Path,
    count: usize,
    progress: &mut dyn FnMut(usize),
) -> Result<LargeFileReport, BenchError> {
    let files = Files::make(directory)?;
    let rounds = count.min(ROUNDS_MAX);
    let mut samples: [Vec<u64>; 3] = Default::default();
    for round in 0..rounds {
        progress(round + 1);
        let sandbox = subject.new_sandbox()?;
        let taken = files.round(subject, &sandbox);
        subject.end(&sandbox)?;
        for (samples, one) in samples.iter_mut().zip(taken?) {
            samples.push(one);
        }
    }
    let [copy_us, write_us, read_us] = samples.each_mut().map(|ns| Percentiles::of_ns(ns));
    let speed = |of: &Percentiles| copy_us.p50 / of.p50.max(f64::MIN_POSITIVE);
    let (write_speed, read_speed) = (speed(&write_us), speed(&read_us));
    let bytes = SIZE as u64;
    Ok(LargeFileReport { bytes, n: rounds, copy_us, write_us, read_us, write_speed, read_speed })
}

/// Files of the host that are there for as long as this is.
struct Files {
    original: PathBuf,
    copy: PathBuf,
}

impl Files {
    fn make(directory: &Path) -> io::Result<Self> {
        let files = Self { original: directory.join("original"), copy: directory.join("copy") };
        let mut original = File::create(&files.original)?;
        for chunk in 0..SIZE / CHUNK {
            // No two chunks are alike.
            original.write_all(&[chunk.to_le_bytes(); CHUNK / size_of::<usize>()].concat())?;
        }
        // The disk is not busy with it when the measurement begins.
        original.sync_all()?;
        Ok(files)
    }

    fn round(&self, subject: &Subject, sandbox: &str) -> Result<[u64; 3], BenchError> {
        let (_, copy) =
            self.anew(|| subject.timed(async { fs::copy(&self.original, &self.copy) }))?;
        let sandboxes = &subject.sandboxes;
        let (_, write) = subject.timed(upload(sandboxes, sandbox, &self.original))?;
        let (_, read) = self.anew(|| subject.timed(download(sandboxes, sandbox, &self.copy)))?;
        match same(&self.original, &self.copy)? {
            true => Ok([copy, write, read]),
            false => Err(BenchError::Verb(format!("{FILE} is not what was written to it"))),
        }
    }

    /// Does something for which the copy must not be there.
    fn anew<T>(&self, does: impl FnOnce() -> T) -> T {
        let _ = fs::remove_file(&self.copy);
        does()
    }
}

impl Drop for Files {
    fn drop(&mut self) {
        for path in [&self.original, &self.copy] {
            let _ = fs::remove_file(path);
        }
    }
}

async fn upload(sandboxes: &Sandboxes, sandbox: &str, from: &Path) -> Result<(), BenchError> {
    let mut session = sandboxes.files(sandbox).await?;
    session.write(FILE, None, None).await.map_err(refused)?;
    let (mut from, mut chunk) = (File::open(from)?, vec![0; CHUNK]);
    loop {
        let len = from.read(&mut chunk)?;
        if len == 0 {
            break;
        }
        session.put(&chunk[..len]).await.map_err(refused)?;
    }
    session.finish(FILE).await.map(drop).map_err(refused)
}

async fn download(sandboxes: &Sandboxes, sandbox: &str, to: &Path) -> Result<(), BenchError> {
    let mut session = sandboxes.files(sandbox).await?;
    session.read(FILE).await.map_err(refused)?;
    let mut to = BufWriter::with_capacity(CHUNK, File::create(to)?);
    while let Some(piece) = session.next_piece(FILE).await.map_err(refused)? {
        to.write_all(&piece)?;
    }
    Ok(to.flush()?)
}

fn refused(error: FileProblem) -> BenchError {
    BenchError::Verb(format!("{FILE} of {} MiB: {error}", SIZE >> 20))
}

/// Whether two files have the same contents.
fn same(one: &Path, other: &Path) -> io::Result<bool> {
    let (mut one, mut other) = (File::open(one)?, File::open(other)?);
    if one.metadata()?.len() != other.metadata()?.len() {
        return Ok(false);
    }
    let (mut left, mut right) = (vec![0; CHUNK], vec![0; CHUNK]);
    for _ in 0..SIZE / CHUNK {
        one.read_exact(&mut left)?;
        other.read_exact(&mut right)?;
        if left != right {
            return Ok(false);
        }
    }
    Ok(true)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_are_compared_to_their_end() {
        let directory = tempfile::tempdir().unwrap();
        let files = Files::make(directory.path()).unwrap();
        fs::copy(&files.original, &files.copy).unwrap();
        assert!(same(&files.original, &files.copy).unwrap());
        let copy = File::options().write(true).open(&files.copy).unwrap();
        std::os::unix::fs::FileExt::write_all_at(&copy, b"?", SIZE as u64 - 1).unwrap();
        assert!(!same(&files.original, &files.copy).unwrap());
        copy.set_len(SIZE as u64 - 1).unwrap();
        assert!(!same(&files.original, &files.copy).unwrap());
        drop(files);
        assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 0);
    }
}
