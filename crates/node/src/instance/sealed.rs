//! Swap files whose sandbox asks before it wakes, and waits at a gate.
//!
//! *Encrypted*: what a sandbox is hibernated over is a file in memory, emptied as long as it is
//! hibernated, and filled again when it wakes. Its content lies on disk meanwhile, under a key that
//! only this process has.
//!
//! *Verified*: it is a file on disk, which is read whole and compared with its checksum.

use crate::swap::SwapSpace;
use crate::tenants::Tenant;
use rustix::pipe::{PipeFlags, pipe_with};
use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::sync::{Arc, Mutex, MutexGuard};
use thaw_home::seal::{SealKey, memory_file, seal};
use thaw_sandbox::SwapFile;
use thaw_store::{ImageId, image_id};
use tokio::task::JoinHandle;

/// A file in memory that is to be encrypted when it is written.
pub(super) struct Unsealed {
    plain: File,
    gate: OwnedFd,
}

/// A file in memory, and its encrypted content as long as it is empty; or a file on disk that has to
/// be verified.
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
    form: Form,
    /// The writing end of the pipe at which the sandbox waits ([`SwapFile::gate`]).
    gate: OwnedFd,
}

/// How the content lies on disk.
#[derive(Debug)]
enum Form {
    /// In this file, with this key.
    Encrypted(File, SealKey),
    /// As it is, with this checksum of the whole.
    Verified(ImageId),
}

/// The reading and the writing end of a gate.
pub(super) fn gate() -> io::Result<(OwnedFd, OwnedFd)> {
    Ok(pipe_with(PipeFlags::CLOEXEC)?)
}

impl Unsealed {
    /// A file for a sandbox.
    ///
    /// # Errors
    /// The host's.
    pub fn new() -> io::Result<(Self, SwapFile)> {
        let (write, read) = memory_file()?;
        let (told, gate) = gate()?;
        let own = Self { plain: write.try_clone()?, gate };
        Ok((own, SwapFile { write, read, gate: Some(told) }))
    }

    /// Bytes of what was written.
    ///
    /// # Errors
    /// The host's.
    pub fn len(&self) -> io::Result<u64> {
        Ok(self.plain.metadata()?.len())
    }

    /// Encrypts what was written, to disk.
    ///
    /// # Errors
    /// The disk is full or fails; [`io::ErrorKind::Interrupted`]: it is not wanted any more.
    pub fn seal(self, space: &SwapSpace, is_wanted: &dyn Fn() -> bool) -> io::Result<Sealed> {
        let Self { plain, gate } = self;
        let file = space.new_file(plain.metadata()?.len())?.write;
        let key = seal(&plain, &file, is_wanted)?;
        Ok(Sealed::of(plain, Form::Encrypted(file, key), gate))
    }
}

impl Sealed {
    fn of(plain: File, form: Form, gate: OwnedFd) -> Self {
        let content = Mutex::new(Some(Content { form, gate }));
        Self { plain, content, is_sealed: AtomicBool::new(true) }
    }

    /// A file on disk that is verified before the sandbox behind this gate goes on. Reads it whole.
    ///
    /// # Errors
    /// The host's.
    pub fn verified(file: File, gate: OwnedFd) -> io::Result<Self> {
        let checksum = image_id(&file)?;
        Ok(Self::of(file, Form::Verified(checksum), gate))
    }

    /// Whether the sandbox has to wait for its content.
    pub fn is_sealed(&self) -> bool {
        self.is_sealed.load(SeqCst)
    }

    /// Bytes of the encrypted file; `None`: there is none. Waits while it is decrypted, as the
    /// others below do.
    pub fn encrypted_len(&self) -> Option<u64> {
        match &self.content().as_ref()?.form {
            Form::Encrypted(_, key) => Some(key.sealed_len()),
            Form::Verified(_) => None,
        }
    }

    /// Gives the memory of a file that is encrypted on disk back, unless its content is wanted by
    /// now.
    pub fn empty(&self) {
        if let Some(Content { form: Form::Encrypted(..), .. }) = &*self.content()
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

    /// Brings the content back, or verifies it, and lets the sandbox go on. An encrypted file and
    /// its key are gone then.
    ///
    /// # Errors
    /// The file is damaged or cannot be read: the sandbox waits on, and is to be ended.
    pub fn unseal(&self) -> io::Result<()> {
        let mut content = self.content();
        let Some(Content { form, gate }) = &*content else { return Ok(()) };
        match form {
            Form::Encrypted(file, key) => {
                // Whatever is there is none of the program's.
                self.plain.set_len(0)?;
                key.unseal(file, &self.plain)?;
            }
            Form::Verified(checksum) if image_id(&self.plain)? == *checksum => {}
            Form::Verified(_) => {
                let why = "its swap file is damaged: its checksum is wrong";
                return Err(io::Error::new(io::ErrorKind::InvalidData, why));
            }
        }
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
    /// [`Sealed::unseal`], on a thread that may wait, when it is the turn of its tenant.
    pub fn new(sealed: Arc<Sealed>, tenant: Arc<Tenant>) -> Self {
        Self(tokio::spawn(async move {
            let place = tenant.unsealer().await;
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
        assert!(sealed.is_sealed() && sealed.encrypted_len() > Some(6));
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
    fn a_verified_file_is_let_through_only_as_it_was() {
        let directory = tempfile::tempdir().unwrap();
        let space = SwapSpace::begin(directory.path().to_owned()).unwrap();
        let content = [7; 3 * 4096 + 5];
        let changes: [&dyn Fn(&File); 4] = [
            &|_| {},
            &|file| file.write_all_at(&[6], 4096).unwrap(),
            &|file| file.set_len(4096).unwrap(),
            &|file| file.set_len(4 * 4096).unwrap(),
        ];
        for (number, change) in changes.into_iter().enumerate() {
            let swap = space.new_file(1).unwrap();
            swap.write.write_all_at(&content, 0).unwrap();
            let (told, gate) = gate().unwrap();
            let sealed = Sealed::verified(swap.write.try_clone().unwrap(), gate).unwrap();
            // It is where it is.
            sealed.empty();
            assert!(sealed.is_sealed() && sealed.encrypted_len().is_none());
            change(&swap.write);
            rustix::fs::fcntl_setfl(&told, rustix::fs::OFlags::NONBLOCK).unwrap();
            match sealed.unseal() {
                Ok(()) => assert_eq!(number, 0),
                Err(error) => {
                    assert!(number > 0 && error.kind() == io::ErrorKind::InvalidData, "{error}");
                    rustix::io::read(&told, &mut [0; 1]).unwrap_err();
                }
            }
        }
    }

    #[test]
    fn nothing_of_a_damaged_file_is_let_through() {
        let directory = tempfile::tempdir().unwrap();
        let space = SwapSpace::begin(directory.path().to_owned()).unwrap();
        let (sealed, swap) = sealed(&space);
        match &sealed.content().as_ref().unwrap().form {
            Form::Encrypted(file, _) => {
                let mut first = [0];
                file.read_exact_at(&mut first, 0).unwrap();
                file.write_all_at(&[!first[0]], 0).unwrap();
            }
            Form::Verified(_) => panic!("it is encrypted"),
        }
        sealed.empty();
        sealed.unseal().unwrap_err();
        let gate = swap.gate.unwrap();
        let flags = rustix::fs::OFlags::NONBLOCK;
        rustix::fs::fcntl_setfl(&gate, flags).unwrap();
        let error = rustix::io::read(&gate, &mut [0; 1]).unwrap_err();
        assert_eq!(error, rustix::io::Errno::AGAIN, "the gate is shut, and somebody is behind it");
    }
}
