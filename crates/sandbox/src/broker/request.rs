//! The requests of a sandbox, checked.

use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};

use bytemuck::AnyBitPattern;
use thaw_abi::bind::BindRequest;
use thaw_abi::control::{
    Address, ListDirectory, MSG_BIND, MSG_FS_LIST, MSG_FS_OPEN, MSG_FS_READLINK, MSG_FS_SOCKET,
    MSG_FS_STAT, MSG_MEMORY_FILE, MSG_OPEN_BLOB, MSG_OPEN_SOCKET, MSG_TERMINAL_GET,
    MSG_TERMINAL_SET, MSG_WAKE_SOCKET, OpenBlob, OpenSocket, TRANSPORT_DATAGRAM, TRANSPORT_STREAM,
    TerminalMode,
};

use super::path::is_harmless;
use crate::egress::{Destination, Transport};

/// A broker request.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Request<'a> {
    /// The sandbox's number for it.
    pub sequence: u64,
    /// What it asks for.
    pub question: Question<'a>,
}

/// What a sandbox asks for. Every path is relative, below the root, and free of
/// `.`, `..`, NUL and empty components; the empty path is the root itself.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Question<'a> {
    /// A blob of the rootfs index.
    OpenBlob(u32),
    /// Attributes of a file.
    Stat(&'a [u8]),
    /// Entries of a directory.
    List {
        /// The directory.
        path: &'a [u8],
        /// Entries to skip.
        skip: u64,
    },
    /// Target of a symbolic link.
    ReadLink(&'a [u8]),
    /// A regular file, to be read.
    Open(&'a [u8]),
    /// A socket of the sandbox' own for questions about directories of the host.
    FilesSocket,
    /// Memory that the processes of the sandbox share.
    MemoryFile,
    /// An eventfd(2) with which they wake each other.
    WakeSocket,
    /// A socket to a destination outside.
    OpenSocket(Destination),
    /// Something about a bound directory.
    Bind(BindRequest, &'a [u8]),
    /// Modes of the terminal.
    TerminalMode,
    /// Change the modes of the terminal.
    SetTerminalMode(TerminalMode),
}

impl<'a> Question<'a> {
    /// Reads the body of a request; `None` if it is not one of `kind`.
    pub fn parse(kind: u32, body: &'a [u8]) -> Option<Self> {
        let path = |bytes| is_harmless(bytes).then_some(bytes);
        match kind {
            MSG_OPEN_BLOB => {
                let (body, rest): (OpenBlob, _) = split(body)?;
                rest.is_empty().then_some(Self::OpenBlob(body.blob))
            }
            MSG_FS_STAT => path(body).map(Self::Stat),
            MSG_FS_LIST => {
                let (body, rest): (ListDirectory, _) = split(body)?;
                Some(Self::List { path: path(rest)?, skip: body.skip })
            }
            MSG_FS_READLINK => path(body).map(Self::ReadLink),
            MSG_FS_OPEN => path(body).map(Self::Open),
            MSG_FS_SOCKET => body.is_empty().then_some(Self::FilesSocket),
            MSG_MEMORY_FILE => body.is_empty().then_some(Self::MemoryFile),
            MSG_WAKE_SOCKET => body.is_empty().then_some(Self::WakeSocket),
            MSG_OPEN_SOCKET => {
                let (body, rest): (OpenSocket, _) = split(body)?;
                let transport = match body.transport {
                    TRANSPORT_STREAM => Transport::Tcp,
                    TRANSPORT_DATAGRAM => Transport::Udp,
                    _ => return None,
                };
                let address = socket_address(&body.to)?;
                rest.is_empty().then_some(Self::OpenSocket(Destination { address, transport }))
            }
            MSG_BIND => split(body).map(|(request, tail)| Self::Bind(request, tail)),
            MSG_TERMINAL_GET => body.is_empty().then_some(Self::TerminalMode),
            MSG_TERMINAL_SET => {
                let (body, rest): (TerminalMode, _) = split(body)?;
                (rest.is_empty() && body.when <= 2).then_some(Self::SetTerminalMode(body))
            }
            _ => None,
        }
    }
}

impl Question<'_> {
    /// The kind and the body of a question about files, as [`Question::parse`] reads them;
    /// `None`: it is about something else.
    pub fn about_files(&self) -> Option<(u32, Vec<u8>)> {
        Some(match *self {
            Self::Stat(path) => (MSG_FS_STAT, path.to_vec()),
            Self::ReadLink(path) => (MSG_FS_READLINK, path.to_vec()),
            Self::Open(path) => (MSG_FS_OPEN, path.to_vec()),
            Self::FilesSocket => (MSG_FS_SOCKET, Vec::new()),
            Self::List { path, skip } => {
                let head = ListDirectory { skip };
                (MSG_FS_LIST, [bytemuck::bytes_of(&head), path].concat())
            }
            Self::Bind(request, tail) => (MSG_BIND, [bytemuck::bytes_of(&request), tail].concat()),
            _ => return None,
        })
    }
}

/// An address as the standard library has it; `None` for an unknown family.
pub(crate) fn socket_address(address: &Address) -> Option<SocketAddr> {
    let [a, b, c, d, ..] = address.bytes;
    match i32::from(address.family) {
        libc::AF_INET => Some((Ipv4Addr::new(a, b, c, d), address.port).into()),
        libc::AF_INET6 => Some((Ipv6Addr::from(address.bytes), address.port).into()),
        _ => None,
    }
}

fn split<T: AnyBitPattern>(bytes: &[u8]) -> Option<(T, &[u8])> {
    let (head, rest) = bytes.split_at_checked(size_of::<T>())?;
    Some((bytemuck::pod_read_unaligned(head), rest))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bodies_are_read() {
        assert_eq!(
            Question::parse(MSG_OPEN_BLOB, &[3, 0, 0, 0, 0, 0, 0, 0]),
            Some(Question::OpenBlob(3))
        );
        assert_eq!(
            Question::parse(MSG_FS_LIST, b"\x05\0\0\0\0\0\0\0usr/lib"),
            Some(Question::List { path: b"usr/lib", skip: 5 })
        );
        assert_eq!(Question::parse(MSG_FS_STAT, b""), Some(Question::Stat(b"")));
        let mut to = Address { bytes: [0; 16], family: 2, port: 443, reserved: 0 };
        to.bytes[..4].copy_from_slice(&[192, 0, 2, 1]);
        let open = |transport| OpenSocket { to, transport, reserved: 0 };
        let destination =
            Destination { address: "192.0.2.1:443".parse().unwrap(), transport: Transport::Udp };
        let body = open(TRANSPORT_DATAGRAM);
        assert_eq!(
            Question::parse(MSG_OPEN_SOCKET, bytemuck::bytes_of(&body)),
            Some(Question::OpenSocket(destination))
        );
        assert_eq!(Question::parse(MSG_OPEN_SOCKET, bytemuck::bytes_of(&open(3))), None);
    }

    #[test]
    fn questions_about_files_can_be_passed_on() {
        let bind = BindRequest { mount: 1, operation: 2, a: 3, b: 4, c: 5 };
        for question in [
            Question::Stat(b"etc"),
            Question::List { path: b"usr/lib", skip: 9 },
            Question::ReadLink(b"bin"),
            Question::Open(b"etc/passwd"),
            Question::FilesSocket,
            Question::Bind(bind, b"tail"),
        ] {
            let (kind, body) = question.about_files().unwrap();
            assert_eq!(Question::parse(kind, &body), Some(question));
        }
        assert_eq!(Question::MemoryFile.about_files(), None);
    }

    #[test]
    fn short_long_and_unknown_bodies_are_refused() {
        assert_eq!(Question::parse(MSG_OPEN_BLOB, &[3, 0, 0, 0]), None);
        assert_eq!(Question::parse(MSG_OPEN_BLOB, &[0; 9]), None);
        assert_eq!(Question::parse(MSG_FS_LIST, &[0; 7]), None);
        assert_eq!(Question::parse(MSG_FS_OPEN, b"../etc/passwd"), None);
        assert_eq!(Question::parse(999, b""), None);
    }
}
