//! Descriptors under the runtime's reactor.
#![allow(unsafe_code)]

use std::io;
use std::net::TcpListener;
use std::os::fd::OwnedFd;
use thaw_sandbox::Sandbox;
use tokio::io::unix::AsyncFd;

/// Watches a sandbox's control socket.
///
/// # Errors
/// The host's reactor is out of resources.
pub fn watch_sandbox(sandbox: Sandbox) -> io::Result<AsyncFd<Sandbox>> {
    // SAFETY: a sandbox owns its control socket and keeps it open until it is
    // dropped, even after the other end is gone.
    Ok(unsafe { AsyncFd::register(sandbox) }?)
}

/// Watches a listening socket.
///
/// # Errors
/// The host's reactor is out of resources.
pub fn watch_listener(listener: TcpListener) -> io::Result<AsyncFd<TcpListener>> {
    // SAFETY: a listener owns its one descriptor until it is dropped.
    Ok(unsafe { AsyncFd::register(listener) }?)
}

/// Watches a descriptor of any pollable kind.
///
/// # Errors
/// The host's reactor is out of resources.
pub fn watch(descriptor: OwnedFd) -> io::Result<AsyncFd<OwnedFd>> {
    // SAFETY: an owned descriptor stays open and the same until it is dropped.
    Ok(unsafe { AsyncFd::register(descriptor) }?)
}
