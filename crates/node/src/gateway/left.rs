//! What a daemon leaves to the next one beside the two sockets of a connection of another protocol: what it
//! has read and not written, and the state of TLS with its keys. It is a file in memory, which is nowhere
//! in the file system. Whoever goes on with the connection empties it first, so that nobody seals two
//! records with one nonce.

use super::tls::State;
use rustix::fs::{MemfdFlags, memfd_create};
use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use zeroize::Zeroizing;

/// Most bytes that a daemon takes over of a connection.
const LEFT_MAX: u64 = 1 << 20;
/// What the file of a connection within TLS begins with. A daemon that does not know it takes it for a length
/// that is too large.
const TLS: [u8; 8] = *b"thaw-tls";
/// What overwrites the file. A length that begins with it is too large, so that a file which was wiped out
/// only in part is not taken for one without TLS: zeros would be.
const WIPED: u8 = 0xff;

/// The file, whose bytes are wiped out when it is dropped. A daemon that leaves drops nothing.
#[derive(Debug)]
pub(super) struct LeftFile(File);

impl LeftFile {
    /// Writes what goes there and back, and the state of TLS; `None`: there is nothing of all that. Numbers
    /// are of 8 bytes, little endian: how much goes there, and within TLS how much goes back.
    ///
    /// # Errors
    /// It is more than the next daemon takes, or there is no memory.
    pub fn write(there: &[u8], back: &[u8], tls: Option<&State>) -> io::Result<Option<Self>> {
        if tls.is_none() && there.is_empty() && back.is_empty() {
            return Ok(None);
        }
        let state = tls.map(State::to_bytes);
        let state: &[u8] = state.as_ref().map_or(&[], |state| state);
        if there.len() + back.len() + state.len() > LEFT_MAX as usize {
            return Err(io::Error::other("there is more of it than the next daemon takes"));
        }
        let length = |bytes: &[u8]| (bytes.len() as u64).to_le_bytes();
        let mut file = Self(File::from(memfd_create("joined", MemfdFlags::CLOEXEC)?));
        if tls.is_some() {
            file.0.write_all(&TLS)?;
        }
        file.0.write_all(&length(there))?;
        if tls.is_some() {
            file.0.write_all(&length(back))?;
        }
        for bytes in [there, back, state] {
            file.0.write_all(bytes)?;
        }
        Ok(Some(file))
    }

    /// Empties it for all who have it.
    ///
    /// # Errors
    /// It has its bytes still.
    pub fn wipe(mut self) -> io::Result<()> {
        wipe(&mut self.0)
    }
}

impl Drop for LeftFile {
    fn drop(&mut self) {
        let _ = wipe(&mut self.0);
    }
}

impl AsFd for LeftFile {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

fn wipe(file: &mut File) -> io::Result<()> {
    overwrite(file)?;
    file.set_len(0)
}

/// The pages have no keys any more when they are given back.
fn overwrite(file: &mut File) -> io::Result<()> {
    let length = file.metadata()?.len();
    file.seek(SeekFrom::Start(0))?;
    io::copy(&mut io::repeat(WIPED).take(length), file).map(drop)
}

/// What an earlier daemon has left.
#[derive(Default)]
pub(super) struct Left {
    /// Read of the client, and not written to the instance.
    pub to_instance: Vec<u8>,
    /// Read of the instance, and not written to the client.
    pub to_client: Vec<u8>,
    /// If the client speaks TLS.
    pub tls: Option<State>,
}

impl Left {
    /// Reads what [`LeftFile::write`] has written, and empties the file.
    ///
    /// # Errors
    /// It was somebody else, or the file has its bytes still.
    pub fn take(file: OwnedFd) -> io::Result<Self> {
        let mut file = File::from(file);
        file.seek(SeekFrom::Start(0))?;
        let most = LEFT_MAX + 1 + 3 * 8;
        // It does not grow, so that no copy of the keys is left where it was.
        let length = file.metadata()?.len().min(most);
        let mut bytes = Zeroizing::new(Vec::with_capacity(usize::try_from(length).unwrap_or(0)));
        (&file).take(most).read_to_end(&mut bytes)?;
        wipe(&mut file)?;
        parse(&bytes).ok_or_else(|| io::Error::other("what was left of it is not readable"))
    }
}

fn parse(mut bytes: &[u8]) -> Option<Left> {
    let is_tls = bytes.starts_with(&TLS);
    if is_tls {
        bytes.split_off(..TLS.len())?;
    }
    let there = number(&mut bytes)?;
    let back = if is_tls { Some(number(&mut bytes)?) } else { None };
    if bytes.len() as u64 > LEFT_MAX {
        return None;
    }
    let to_instance = bytes.split_off(..there)?.to_vec();
    let to_client = bytes.split_off(..back.unwrap_or(bytes.len()))?.to_vec();
    let tls = if is_tls { Some(State::from_bytes(bytes).ok()?) } else { None };
    Some(Left { to_instance, to_client, tls })
}

fn number(bytes: &mut &[u8]) -> Option<usize> {
    let number = bytes.split_off(..8)?.try_into().ok()?;
    usize::try_from(u64::from_le_bytes(number)).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    const THERE: &[u8] = b"to the instance";
    const BACK: &[u8] = b"to the client";

    fn file(bytes: &[u8]) -> OwnedFd {
        let mut file = File::from(memfd_create("test", MemfdFlags::CLOEXEC).unwrap());
        file.write_all(bytes).unwrap();
        file.into()
    }

    fn bytes_of(file: &LeftFile) -> Vec<u8> {
        let mut bytes = Vec::new();
        (&file.0).seek(SeekFrom::Start(0)).unwrap();
        (&file.0).read_to_end(&mut bytes).unwrap();
        bytes
    }

    fn counted(count: u64, bytes: &[u8]) -> OwnedFd {
        file(&[&count.to_le_bytes(), bytes].concat())
    }

    #[test]
    fn what_is_left_is_read_as_it_was_written_or_not_at_all() {
        let both = [THERE, BACK].concat();
        let left = Left::take(counted(THERE.len() as u64, &both)).unwrap();
        assert_eq!((&left.to_instance[..], &left.to_client[..]), (THERE, BACK));
        assert!(left.tls.is_none());
        for count in [both.len() as u64 + 1, u64::MAX] {
            assert!(Left::take(counted(count, &both)).is_err(), "{count}");
        }
        let long = vec![0; LEFT_MAX as usize + 1];
        assert!(Left::take(counted(0, &long)).is_err());
        Left::take(counted(0, &long[1..])).unwrap();
        assert!(LeftFile::write(b"", b"", None).unwrap().is_none());
        assert!(LeftFile::write(&long, b"", None).is_err());
    }

    #[test]
    fn keys_are_read_once() {
        let state = State::for_test();
        let written = LeftFile::write(THERE, BACK, Some(&state)).unwrap().unwrap();
        let whole = bytes_of(&written);
        let copy = || written.as_fd().try_clone_to_owned().unwrap();
        let left = Left::take(copy()).unwrap();
        assert_eq!((&left.to_instance[..], &left.to_client[..]), (THERE, BACK));
        assert_eq!(*left.tls.unwrap().to_bytes(), *state.to_bytes());
        // The next one who has it finds nothing.
        assert_eq!(bytes_of(&written), b"");
        assert!(Left::take(copy()).is_err());
        for length in 0..whole.len() {
            assert!(Left::take(file(&whole[..length])).is_err(), "{length}");
        }
        assert!(Left::take(file(&[&whole[..], b"x"].concat())).is_err());
        Left::take(file(&whole)).unwrap();
    }

    /// As by a daemon that is killed meanwhile.
    #[test]
    fn what_is_wiped_out_in_part_is_not_readable() {
        let mut written = LeftFile::write(b"", BACK, Some(&State::for_test())).unwrap().unwrap();
        let whole = bytes_of(&written);
        overwrite(&mut written.0).unwrap();
        let wiped = bytes_of(&written);
        assert_eq!(wiped, vec![WIPED; whole.len()]);
        for length in 1..=whole.len() {
            let partly = [&wiped[..length], &whole[length..]].concat();
            assert!(Left::take(file(&partly)).is_err(), "{length}");
        }
    }

    #[test]
    fn a_daemon_that_stays_leaves_no_keys() {
        let enders: [fn(LeftFile); 2] = [|written| written.wipe().unwrap(), drop];
        for end in enders {
            let written = LeftFile::write(b"", b"", Some(&State::for_test())).unwrap().unwrap();
            let copy = written.as_fd().try_clone_to_owned().unwrap();
            end(written);
            assert_eq!(File::from(copy).metadata().unwrap().len(), 0);
        }
    }
}
