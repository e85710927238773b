//! Where an admin API listens, and how a client finds it.

use rustix::fs::{Mode, OFlags, open};
use serde::{Deserialize, Serialize};
use std::fmt;
use std::io;
use std::net::SocketAddr;
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::str::FromStr;

/// Longest path of a Unix socket, without its NUL byte (unix(7)).
const SOCKET_PATH_MAX: usize = 107;
/// How a Unix socket's address begins in writing.
const UNIX: &str = "unix:";

/// Address of an admin API; written `unix:PATH` or `IP:PORT`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(into = "String", try_from = "String")]
pub enum AdminAddress {
    /// A Unix socket.
    Unix(PathBuf),
    /// TCP, with a token.
    Tcp(SocketAddr),
}

impl fmt::Display for AdminAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unix(path) => write!(f, "{UNIX}{}", path.display()),
            Self::Tcp(address) => write!(f, "{address}"),
        }
    }
}

impl FromStr for AdminAddress {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let text = text.strip_prefix("http://").unwrap_or(text);
        match text.strip_prefix(UNIX) {
            Some("") => Err("name the socket after `unix:`".to_owned()),
            Some(path) => Ok(Self::Unix(path.into())),
            None => text.parse().map(Self::Tcp).map_err(|_| {
                "write unix:PATH for a socket, or IP:PORT such as 127.0.0.1:8081".to_owned()
            }),
        }
    }
}

impl From<AdminAddress> for String {
    fn from(address: AdminAddress) -> Self {
        address.to_string()
    }
}

impl TryFrom<String> for AdminAddress {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        text.parse()
    }
}

/// Connects to a Unix socket, whose path may be of any length.
///
/// # Errors
/// Nobody listens there, or not for this user.
pub fn connect_unix(path: &Path) -> io::Result<UnixStream> {
    with_short_path(path, |path| UnixStream::connect(path))
}

/// Calls `run` with a path of the same file that fits into a socket's address: a long
/// one leads through a descriptor of its directory.
///
/// # Errors
/// Its own, and the host's where it does not open the directory.
pub fn with_short_path<T>(path: &Path, run: impl FnOnce(&Path) -> io::Result<T>) -> io::Result<T> {
    if path.as_os_str().len() <= SOCKET_PATH_MAX {
        return run(path);
    }
    let (Some(directory), Some(name)) = (path.parent(), path.file_name()) else {
        return Err(io::ErrorKind::InvalidInput.into());
    };
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let directory = open(directory, flags, Mode::empty())?;
    run(&Path::new("/proc/self/fd").join(directory.as_raw_fd().to_string()).join(name))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_written_as_they_are_read() {
        for text in ["unix:/var/lib/thaw/admin.sock", "127.0.0.1:8081", "[::1]:1"] {
            assert_eq!(text.parse::<AdminAddress>().unwrap().to_string(), text);
        }
        assert_eq!("http://127.0.0.1:1".parse(), "127.0.0.1:1".parse::<AdminAddress>());
        for text in ["", "unix:", "localhost", "/var/lib/thaw/admin.sock"] {
            assert!(text.parse::<AdminAddress>().is_err(), "{text}");
        }
    }
}
