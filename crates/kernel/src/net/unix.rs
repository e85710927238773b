//! Unix sockets: making them (unix(7)).

use alloc::sync::Arc;

use super::socket::{Protocol, SocketType};
use super::unix_datagram::UnixDatagram;
use super::unix_names::Names;
use super::unix_stream::UnixStream;
use crate::fs::anonymous::InodeNumbers;

/// What Unix sockets share.
#[derive(Default)]
pub struct UnixNetwork {
    names: Arc<Names>,
}

impl UnixNetwork {
    /// That of another namespace: files are the same, and abstract names are not.
    pub fn within(&self, namespace: u64) -> Self {
        Self { names: Arc::new(self.names.within(namespace)) }
    }

    /// A fresh socket.
    pub fn socket(&self, kind: SocketType, inodes: &Arc<InodeNumbers>) -> Arc<dyn Protocol> {
        match kind {
            SocketType::Datagram => UnixDatagram::new(&self.names, inodes),
            _ => UnixStream::new(&self.names, inodes, kind),
        }
    }

    /// Two sockets connected to each other (socketpair(2)).
    pub fn pair(
        &self,
        kind: SocketType,
        inodes: &Arc<InodeNumbers>,
    ) -> (Arc<dyn Protocol>, Arc<dyn Protocol>) {
        match kind {
            SocketType::Datagram => {
                let (first, second) = UnixDatagram::pair(&self.names, inodes);
                (first, second)
            }
            _ => {
                let (first, second) = UnixStream::pair(&self.names, inodes, kind);
                (first, second)
            }
        }
    }
}
