//! The secret of clients of the admin API over TCP.

use rustix::fs::{AtFlags, Mode, OFlags, openat, unlinkat};
use serde::{Deserialize, Serialize};
use std::ffi::OsStr;
use std::fmt;
use std::fs::File;
use std::hint::black_box;
use std::io::{self, ErrorKind, Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use thaw_store::Owner;

/// Random bytes of a token that Thaw makes.
const TOKEN_BYTES: usize = 32;
/// Shortest token that is taken from a file, in characters.
const TOKEN_MIN: usize = 16;
/// Longest one.
const TOKEN_MAX: usize = 1024;

/// The secret that a client of the admin API over TCP has to know.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct AdminToken(String);

impl fmt::Debug for AdminToken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("AdminToken(***)")
    }
}

/// Why there is no token.
#[derive(Debug, thiserror::Error)]
pub enum TokenError {
    /// The file cannot be read or made.
    #[error("cannot use the token file {} ({error}); name another one with {option}", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// The option that names it.
        option: &'static str,
        /// What the system said.
        error: io::Error,
    },
    /// Others can read it.
    #[error("the token file {} can be read by others; run `chmod 600` on it and change the token", path.display())]
    Open {
        /// The file.
        path: PathBuf,
    },
    /// There is no token in it.
    #[error(
        "the token file {} must hold {TOKEN_MIN} to {TOKEN_MAX} printable characters without blanks; remove it and Thaw makes one",
        path.display()
    )]
    Malformed {
        /// The file.
        path: PathBuf,
    },
}

impl AdminToken {
    /// The token in a file, which is made with a random one if it is missing. `option`
    /// is what names the file.
    ///
    /// # Errors
    /// The file cannot be used, or others can read it.
    pub fn read_or_create(path: &Path, option: &'static str) -> Result<Self, TokenError> {
        let failed = |error| TokenError::File { path: path.to_owned(), option, error };
        let (directory, name) = place(path).map_err(failed)?;
        // In the daemon's home it may be a link of the daemon's, which is told the token.
        let _acting = Owner::of(&directory.path).and_then(Owner::act_nearby).map_err(failed)?;
        match Self::create(&directory.opened, name) {
            Ok(token) => Ok(token),
            Err(error) if error.kind() == ErrorKind::AlreadyExists => {
                Self::read_at(&directory.opened, name, path, option)
            }
            Err(error) => Err(failed(error)),
        }
    }

    fn create(directory: &OwnedFd, name: &OsStr) -> io::Result<Self> {
        let mut bytes = [0; TOKEN_BYTES];
        let count = rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty())?;
        if count < bytes.len() {
            return Err(ErrorKind::UnexpectedEof.into());
        }
        let token: String = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
        let mode = Mode::from_raw_mode(0o600);
        let mut file = File::from(openat(directory, name, flags, mode)?);
        let written = file.write_all(format!("{token}\n").as_bytes());
        if written.is_err() {
            // Half a token is of no use.
            let _ = unlinkat(directory, name, AtFlags::empty());
        }
        written.map(|()| Self(token))
    }

    /// The token in a file.
    ///
    /// # Errors
    /// The file cannot be read, or others can read it.
    pub fn read(path: &Path, option: &'static str) -> Result<Self, TokenError> {
        let failed = |error| TokenError::File { path: path.to_owned(), option, error };
        let (directory, name) = place(path).map_err(failed)?;
        Self::read_at(&directory.opened, name, path, option)
    }

    fn read_at(
        directory: &OwnedFd,
        name: &OsStr,
        path: &Path,
        option: &'static str,
    ) -> Result<Self, TokenError> {
        let failed = |error: io::Error| TokenError::File { path: path.to_owned(), option, error };
        let opened = openat(directory, name, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty());
        let file = File::from(opened.map_err(|errno| failed(errno.into()))?);
        let is_open = file.metadata().map_err(failed)?.mode() & 0o077 != 0;
        if is_open {
            return Err(TokenError::Open { path: path.to_owned() });
        }
        let mut text = String::new();
        file.take(TOKEN_MAX as u64 + 2).read_to_string(&mut text).map_err(failed)?;
        let token = text.trim_end();
        let is_token = token.bytes().all(|byte| byte.is_ascii_graphic());
        match (TOKEN_MIN..=TOKEN_MAX).contains(&token.len()) && is_token {
            true => Ok(Self(token.to_owned())),
            false => Err(TokenError::Malformed { path: path.to_owned() }),
        }
    }

    /// Value of the `Authorization` header (RFC 6750, 2.1).
    pub fn header(&self) -> String {
        format!("Bearer {}", self.0)
    }

    /// Whether `given` is the token. How long this takes says only how long `given` is.
    pub fn is(&self, given: &[u8]) -> bool {
        let token = self.0.as_bytes();
        let differing = token.iter().zip(given).fold(0, |sum, (a, b)| black_box(sum | (a ^ b)));
        token.len() == given.len() && black_box(differing) == 0
    }
}

/// A directory in which a file is looked for.
struct Directory {
    path: PathBuf,
    opened: OwnedFd,
}

/// The directory of a file, and its name there.
fn place(path: &Path) -> io::Result<(Directory, &OsStr)> {
    let name = path.file_name().ok_or(ErrorKind::InvalidInput)?;
    let directory = path.parent().filter(|parent| !parent.as_os_str().is_empty());
    let directory = directory.unwrap_or(Path::new(".")).to_owned();
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let opened = rustix::fs::open(&directory, flags, Mode::empty())?;
    Ok((Directory { path: directory, opened }, name))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    const OPTION: &str = "--admin-token-file";

    #[test]
    fn tokens_are_made_once_and_for_one_user() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("token");
        let token = AdminToken::read_or_create(&path, OPTION).unwrap();
        assert_eq!(path.metadata().unwrap().mode() & 0o777, 0o600);
        assert_eq!(token.0.len(), 2 * TOKEN_BYTES);
        assert_eq!(AdminToken::read_or_create(&path, OPTION).unwrap(), token);
        assert_eq!(format!("{token:?}"), "AdminToken(***)");
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o640)).unwrap();
        let refused = AdminToken::read(&path, OPTION);
        assert!(matches!(refused, Err(TokenError::Open { .. })), "{refused:?}");
        let other = AdminToken::read_or_create(&directory.path().join("other"), OPTION).unwrap();
        assert_ne!(other, token);
    }

    #[test]
    fn what_is_no_token_is_refused() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("token");
        for text in [String::new(), "short".into(), "a b".repeat(10), "x".repeat(TOKEN_MAX + 1)] {
            std::fs::write(&path, text).unwrap();
            std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o600)).unwrap();
            let refused = AdminToken::read(&path, OPTION);
            assert!(matches!(refused, Err(TokenError::Malformed { .. })), "{refused:?}");
        }
    }
}
