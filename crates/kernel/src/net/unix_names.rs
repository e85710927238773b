//! Names of Unix sockets (unix(7)): paths, abstract names, autobind.
//!
//! A path leads to a file, and the file's identity leads to the socket. The
//! socket holds the path, so the identity is not given to another file while
//! the socket lives, even when the name has been removed.

use alloc::collections::BTreeMap;
use alloc::format;
use alloc::sync::{Arc, Weak};

use super::address::{SocketAddress, UnixName};
use super::unix_datagram::UnixDatagram;
use super::unix_stream::UnixStream;
use crate::errno::{Errno, Result};
use crate::fs::context::{AT_FDCWD, Context};
use crate::fs::inode::{FileType, NewKind};
use crate::fs::path::Path;
use crate::fs::permission::Access;
use crate::fs::walk::{Follow, walk};
use crate::sync::KernelCell;

/// A socket that has a name.
#[derive(Clone)]
pub enum Named {
    /// A stream or packet socket.
    Stream(Weak<UnixStream>),
    /// A datagram socket.
    Datagram(Weak<UnixDatagram>),
}

impl Named {
    fn is_alive(&self) -> bool {
        match self {
            Self::Stream(socket) => socket.strong_count() > 0,
            Self::Datagram(socket) => socket.strong_count() > 0,
        }
    }
}

#[derive(Clone, PartialEq, Eq, PartialOrd, Ord)]
enum Key {
    /// Device and inode number.
    File(u64, u64),
    /// Number of the network namespace, and name.
    Abstract(u64, Arc<[u8]>),
}

/// A name that a socket has; given up with [`Names::release`].
pub struct Binding {
    /// As getsockname(2) reports it.
    pub name: UnixName,
    key: Key,
    /// Keeps the file, and so its identity.
    _path: Option<Path>,
}

/// All names, as those in a network namespace see them.
#[derive(Default)]
pub struct Names {
    sockets: Arc<KernelCell<BTreeMap<Key, Named>>>,
    /// The number of the namespace; 0 for the first one.
    namespace: u64,
    next_autobind: KernelCell<u32>,
}

impl Names {
    /// None.
    pub fn new() -> Self {
        Self::default()
    }

    /// The names as those in another namespace see them.
    pub fn within(&self, namespace: u64) -> Self {
        Self { sockets: self.sockets.clone(), namespace, next_autobind: KernelCell::default() }
    }

    /// Gives a socket an address as its name. Autobind of a socket that has one does nothing.
    pub fn bind_to(
        &self,
        address: &SocketAddress,
        binding: &KernelCell<Option<Binding>>,
        socket: Named,
    ) -> Result<()> {
        let SocketAddress::Unix(name) = address else { return Err(Errno::EINVAL) };
        if binding.borrow_mut().is_some() {
            return match name {
                UnixName::Unnamed => Ok(()),
                // Linux makes the file first, and looks at the socket then.
                UnixName::Path(path) if find_node(path).is_ok() => Err(Errno::EADDRINUSE),
                _ => Err(Errno::EINVAL),
            };
        }
        let bound = self.bind(name, socket)?;
        *binding.borrow_mut() = Some(bound);
        Ok(())
    }

    /// Gives `socket` a name: creates the file of a path, or chooses an abstract
    /// name if the one asked for is empty. `EADDRINUSE` if it is taken.
    fn bind(&self, name: &UnixName, socket: Named) -> Result<Binding> {
        let binding = match name {
            UnixName::Path(path) => {
                let node = create_node(path)?;
                let key = file_key(&node);
                Binding { name: name.clone(), key, _path: Some(node) }
            }
            UnixName::Abstract(abstract_name) => Binding {
                name: name.clone(),
                key: Key::Abstract(self.namespace, abstract_name.clone()),
                _path: None,
            },
            UnixName::Unnamed => self.autobind(),
        };
        let mut sockets = self.sockets.borrow_mut();
        if sockets.get(&binding.key).is_some_and(Named::is_alive) {
            return Err(Errno::EADDRINUSE);
        }
        sockets.insert(binding.key.clone(), socket);
        Ok(binding)
    }

    /// An abstract name of five hexadecimal digits (unix(7), "Autobind feature").
    fn autobind(&self) -> Binding {
        loop {
            let number = {
                let mut next = self.next_autobind.borrow_mut();
                *next = (*next + 1) & 0xf_ffff;
                *next
            };
            let name: Arc<[u8]> = format!("{number:05x}").into_bytes().into();
            let key = Key::Abstract(self.namespace, name.clone());
            if !self.sockets.borrow_mut().get(&key).is_some_and(Named::is_alive) {
                return Binding { name: UnixName::Abstract(name), key, _path: None };
            }
        }
    }

    /// Gives a name up. The file of a path stays.
    pub fn release(&self, binding: Binding) {
        let socket = self.sockets.borrow_mut().remove(&binding.key);
        drop(socket);
        drop(binding);
    }

    /// The socket with a name. `ECONNREFUSED` if there is none, `ENOENT` if
    /// there is no such path.
    pub fn find(&self, name: &UnixName) -> Result<Named> {
        let key = match name {
            UnixName::Path(path) => file_key(&find_node(path)?),
            UnixName::Abstract(name) => Key::Abstract(self.namespace, name.clone()),
            UnixName::Unnamed => return Err(Errno::EINVAL),
        };
        self.sockets.borrow_mut().get(&key).cloned().ok_or(Errno::ECONNREFUSED)
    }
}

fn file_key(path: &Path) -> Key {
    let attributes = path.inode().attributes();
    Key::File(attributes.dev, attributes.ino)
}

fn create_node(path: &[u8]) -> Result<Path> {
    let context = Context::current();
    let start = context.start(AT_FDCWD)?;
    match crate::fs::namespace::create(&context, &start, path, NewKind::Socket, 0o777) {
        Err(Errno::EEXIST) => Err(Errno::EADDRINUSE),
        outcome => outcome,
    }
}

fn find_node(path: &[u8]) -> Result<Path> {
    let context = Context::current();
    let start = context.start(AT_FDCWD)?;
    let found = walk(&context, &start, path, Follow::Yes)?;
    context.identity.check(&**found.inode(), Access::WRITE)?;
    if found.inode().file_type() != FileType::Socket {
        return Err(Errno::ECONNREFUSED);
    }
    Ok(found)
}
