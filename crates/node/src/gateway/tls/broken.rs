//! Why a connection within TLS cannot go on, and what its client is told.

use std::io;

/// Why a connection cannot go on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum Broken {
    /// It does not decrypt.
    #[error(
        "the client has sent a record that its keys did not make, or that was changed on its way"
    )]
    Forged,
    /// It is longer than any may be.
    #[error("the client has sent a record that is longer than any may be")]
    TooLong,
    /// It has no header of a record.
    #[error("the client has sent bytes that are no record of TLS")]
    NoRecord,
    /// It is of a kind that cannot come now.
    #[error("the client has sent a record that cannot come after the handshake")]
    Unexpected,
    /// It is about keys.
    #[error("the client wants new keys, on which only the daemon of its handshake can agree")]
    NewKeys,
    /// Nothing but records that say nothing.
    #[error("the client has sent one empty record after the other")]
    Empty,
    /// The client's alert.
    #[error("the client has ended the connection with alert {0} of TLS")]
    Alert(u8),
    /// See [`super::keys::GCM_RECORDS_MAX`].
    #[error("the keys of the connection have sealed as many records as they may")]
    WornOut,
}

impl Broken {
    /// What the client is told (RFC 8446 §6.2); nothing if it has ended the connection itself.
    pub fn alert(self) -> Option<u8> {
        match self {
            Self::Forged => Some(20),
            Self::TooLong => Some(22),
            Self::NoRecord => Some(50),
            Self::Unexpected | Self::Empty => Some(10),
            Self::NewKeys | Self::WornOut => Some(80),
            Self::Alert(_) => None,
        }
    }
}

impl From<Broken> for io::Error {
    fn from(broken: Broken) -> Self {
        Self::new(io::ErrorKind::InvalidData, broken)
    }
}
