//! Standard output and error of a program that has volumes.
//!
//! Such a program can make no file longer by itself, not even these two
//! (docs/decisions/0041-volumes.md). So what it writes for a regular file goes through a pipe.

use std::fs::File;
use std::io::{self, PipeReader, Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::fs::MetadataExt;
use std::thread::{self, JoinHandle};

/// Copies what a program writes to files, on threads.
#[derive(Default)]
pub struct Relay {
    /// Files by device and inode number, and the pipe for each.
    files: Vec<((u64, u64), OwnedFd)>,
    threads: Vec<JoinHandle<io::Result<()>>>,
}

impl Relay {
    /// What a program gets in the place of `output`: a pipe if that is a regular file. Two outputs
    /// to one file share a pipe, so that what is written stays in order.
    ///
    /// # Errors
    /// There are no descriptors or no threads left.
    pub fn of(&mut self, output: OwnedFd) -> io::Result<OwnedFd> {
        let mut file = File::from(output);
        let found = file.metadata()?;
        if !found.is_file() {
            return Ok(file.into());
        }
        let id = (found.dev(), found.ino());
        if let Some((_, pipe)) = self.files.iter().find(|(known, _)| *known == id) {
            return pipe.try_clone();
        }
        let (reader, writer) = io::pipe()?;
        let writer = OwnedFd::from(writer);
        self.files.push((id, writer.try_clone()?));
        let copy = move || copy(reader, &mut file);
        self.threads.push(thread::Builder::new().name("output".into()).spawn(copy)?);
        Ok(writer)
    }

    /// Waits until all is written. Whoever can write to the pipes must have ended.
    ///
    /// # Errors
    /// A file could not be written; its program has found the pipe closed then.
    pub fn finish(self) -> io::Result<()> {
        drop(self.files);
        let join = |thread: JoinHandle<_>| thread.join().expect("it does not panic");
        self.threads.into_iter().try_for_each(join)
    }
}

/// Copies until the end. Others write to the same open file meanwhile, so that each piece goes where the
/// file's offset is when it has come; splice(2), as [`io::copy`] uses it, takes the offset before.
fn copy(mut from: PipeReader, to: &mut impl Write) -> io::Result<()> {
    let mut piece = vec![0; 64 << 10];
    loop {
        match from.read(&mut piece) {
            Ok(0) => return to.flush(),
            Ok(count) => to.write_all(&piece[..count])?,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    #[test]
    fn outputs_to_one_file_stay_in_order_and_others_are_left_alone() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("out");
        let file = File::create(&path).unwrap();
        let mut relay = Relay::default();
        let mut out = File::from(relay.of(file.try_clone().unwrap().into()).unwrap());
        let mut err = File::from(relay.of(file.into()).unwrap());
        for line in 0..100 {
            let to = if line % 2 == 0 { &mut out } else { &mut err };
            writeln!(to, "{line}").unwrap();
        }
        let null = File::options().write(true).open("/dev/null").unwrap();
        let (dev, ino) = (null.metadata().unwrap().dev(), null.metadata().unwrap().ino());
        let same = File::from(relay.of(null.into()).unwrap()).metadata().unwrap();
        assert_eq!((same.dev(), same.ino()), (dev, ino));
        drop((out, err));
        relay.finish().unwrap();
        let expected: String = (0..100).map(|line| format!("{line}\n")).collect();
        assert_eq!(fs::read_to_string(&path).unwrap(), expected);
    }

    #[test]
    fn others_who_write_to_the_same_file_lose_nothing() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("out");
        let mut file = File::create(&path).unwrap();
        let mut relays: Vec<_> = (0..2).map(|_| Relay::default()).collect();
        let mut outputs: Vec<_> = relays
            .iter_mut()
            .map(|relay| File::from(relay.of(file.try_clone().unwrap().into()).unwrap()))
            .collect();
        let mut expected = 0;
        for (round, word) in ["one\n", "two\n", "three\n", "four\n", "five\n"].iter().enumerate() {
            match outputs.get_mut(round % 3) {
                Some(output) => output.write_all(word.as_bytes()).unwrap(),
                None => file.write_all(word.as_bytes()).unwrap(),
            }
            expected += word.len() as u64;
            let until = std::time::Instant::now() + std::time::Duration::from_secs(20);
            while file.metadata().unwrap().len() < expected {
                assert!(std::time::Instant::now() < until, "{word:?} was lost");
                thread::yield_now();
            }
        }
        drop(outputs);
        relays.into_iter().for_each(|relay| relay.finish().unwrap());
        assert_eq!(fs::read_to_string(&path).unwrap(), "one\ntwo\nthree\nfour\nfive\n");
    }

    #[test]
    fn a_full_disk_is_an_error() {
        let mut relay = Relay::default();
        let (reader, writer) = io::pipe().unwrap();
        let full = File::options().write(true).open("/dev/full").unwrap();
        let copying = thread::spawn(move || copy(reader, &mut &full));
        drop(relay.of(OwnedFd::from(writer)).map(|pipe| File::from(pipe).write_all(b"x")));
        assert_eq!(copying.join().unwrap().unwrap_err().kind(), io::ErrorKind::StorageFull);
    }
}
