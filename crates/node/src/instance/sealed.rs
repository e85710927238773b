//! Swap files that are encrypted: what a sandbox is hibernated over is a file in memory, emptied as
//! long as it is hibernated, and filled again when it wakes. Its content lies on disk meanwhile,
//! under a key that only this process has.

use crate::seal::{SealKey, memory_file, seal, unsealer};
use crate::swap::SwapSpace;
use rustix::pipe::{PipeFlags, pipe_with};
use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::sync::{Arc, Mutex, MutexGuard};
use thaw_sandbox::SwapFile;
use tokio::task::JoinHandle;

/// A file in memory that is to be encrypted when it is written.
pub(super) struct Unsealed {
    plain: File,
    gate: OwnedFd,
}

/// A file in memory, and its encrypted content as long as it is empty.
#[derive(Debug)]
pub(super) struct Sealed {
    plain: File,
    /// `None`: it is back. Held as long as the file is decrypted.
    content: Mutex<Option<Content>>,
    /// Whether the content is there, for those who cannot wait.
    is_sealed: AtomicBool,
}

#[derive(Debug)]
struct Content {
    file: File,
    key: SealKey,
    /// The writing end of the pipe at which the sandbox waits ([`SwapFile::gate`]).
    gate: OwnedFd,
}

impl Unsealed {
    /// A file for a sandbox.
    ///
    /// # Errors
    /// The host's.
    pub fn new() -> io::Result<(Self, SwapFile)> {
        let (write, read) = memory_file()?;
        let (told, gate) = pipe_with(PipeFlags::CLOEXEC)?;
        let own = Self { plain: write.try_clone()?, gate };
        Ok((own, SwapFile { write, read, gate: Some(told) }))
    }

    /// Encrypts what was written, to disk.
    ///
    /// # Errors
    /// The disk is full or fails; [`io::ErrorKind::Interrupted`]: it is not wanted any more.
    pub fn seal(self, space: &SwapSpace, is_wanted: &dyn Fn() -> bool) -> io::Result<Sealed> {
        let Self { plain, gate } = self;
        let file = space.new_file(plain.metadata()?.len())?.write;
        let key = seal(&plain, &file, is_wanted)?;
        let content = Mutex::new(Some(Content { file, key, gate }));
        Ok(Sealed { plain, content, is_sealed: AtomicBool::new(true) })
    }
}

impl Sealed {
    /// Whether its content is on disk only, or will be.
    pub fn is_sealed(&self) -> bool {
        self.is_sealed.load(SeqCst)
    }

    /// Bytes of the encrypted file. Waits while it is decrypted, as the others below do.
    pub fn len(&self) -> u64 {
        self.content().as_ref().map_or(0, |content| content.key.sealed_len())
    }

    /// Gives the memory of the file back, unless its content is wanted by now.
    pub fn empty(&self) {
        if let Some(_sealed) = &*self.content()
            && let Err(error) = self.plain.set_len(0)
        {
            tracing::warn!("a hibernated instance keeps a copy of its memory: {error}");
        }
    }

    /// Gives the disk and the key back, whoever keeps a descriptor.
    pub fn discard(&self) {
        drop(self.content().take());
        self.is_sealed.store(false, SeqCst);
    }

    /// Brings the content back and lets the sandbox go on. The encrypted file and its key are gone
    /// then.
    ///
    /// # Errors
    /// The file is damaged or cannot be read: the sandbox waits on, and is to be ended.
    pub fn unseal(&self) -> io::Result<()> {
        let mut content = self.content();
        let Some(Content { file, key, gate }) = &*content else { return Ok(()) };
        // Whatever is there is none of the program's.
        self.plain.set_len(0)?;
        key.unseal(file, &self.plain)?;
        rustix::io::write(gate, &[1])?;
        *content = None;
        self.is_sealed.store(false, SeqCst);
        Ok(())
    }

    fn content(&self) -> MutexGuard<'_, Option<Content>> {
        self.content.lock().expect("nobody panics with it")
    }
}

/// A file that is being decrypted, or waits for that. Whoever waits still leaves the queue with this
/// value.
pub(super) struct Unsealing(pub JoinHandle<io::Result<()>>);

impl Unsealing {
    /// [`Sealed::unseal`], on a thread that may wait.
    pub fn new(sealed: Arc<Sealed>) -> Self {
        Self(tokio::spawn(async move {
            let place = unsealer().await;
            let unsealed = tokio::task::spawn_blocking(move || {
                let _place = place;
                sealed.unseal()
            });
            unsealed.await.map_err(io::Error::other)?
        }))
    }
}

impl Drop for Unsealing {
    fn drop(&mut self) {
        self.0.abort();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Read;
    use std::os::unix::fs::FileExt;

    fn sealed(space: &SwapSpace) -> (Sealed, SwapFile) {
        let (unsealed, swap) = Unsealed::new().unwrap();
        swap.write.write_all_at(b"memory", 0).unwrap();
        (unsealed.seal(space, &|| true).unwrap(), swap)
    }

    #[test]
    fn the_content_is_gone_until_it_is_wanted() {
        let directory = tempfile::tempdir().unwrap();
        let space = SwapSpace::begin(directory.path().to_owned()).unwrap();
        let (sealed, swap) = sealed(&space);
        assert!(sealed.is_sealed() && sealed.len() > 6);
        sealed.empty();
        assert_eq!(swap.read.metadata().unwrap().len(), 0);
        sealed.unseal().unwrap();
        let mut seen = [0; 6];
        swap.read.read_exact_at(&mut seen, 0).unwrap();
        assert_eq!(&seen, b"memory");
        let mut gate = File::from(swap.gate.unwrap());
        assert_eq!(gate.read(&mut seen).unwrap(), 1);
        // One that comes late takes nothing away.
        sealed.empty();
        assert_eq!(swap.read.metadata().unwrap().len(), 6);
        assert!(!sealed.is_sealed());
    }

    #[test]
    fn nothing_of_a_damaged_file_is_let_through() {
        let directory = tempfile::tempdir().unwrap();
        let space = SwapSpace::begin(directory.path().to_owned()).unwrap();
        let (sealed, swap) = sealed(&space);
        sealed.content().as_ref().unwrap().file.write_all_at(b"x", 0).unwrap();
        sealed.empty();
        sealed.unseal().unwrap_err();
        let gate = swap.gate.unwrap();
        let flags = rustix::fs::OFlags::NONBLOCK;
        rustix::fs::fcntl_setfl(&gate, flags).unwrap();
        let error = rustix::io::read(&gate, &mut [0; 1]).unwrap_err();
        assert_eq!(error, rustix::io::Errno::AGAIN, "the gate is shut, and somebody is behind it");
    }
}
