//! Descriptors under the runtime's reactor, and work that it must not wait for.
#![allow(unsafe_code)]

use std::io;
use std::net::TcpListener;
use std::os::fd::OwnedFd;
use thaw_sandbox::Sandbox;
use tokio::io::unix::AsyncFd;
use tokio::runtime::{Handle, RuntimeFlavor};

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

/// Does work that may wait for a disk, wherever this is called. On one of the runtime's
/// threads, its other tasks go on elsewhere meanwhile.
pub fn waiting<T>(work: impl FnOnce() -> T) -> T {
    match Handle::try_current().map(|runtime| runtime.runtime_flavor()) {
        Ok(RuntimeFlavor::MultiThread) => tokio::task::block_in_place(work),
        // Nobody else is on this thread, or nobody can go on elsewhere.
        _ => work(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc;
    use std::time::Duration;

    #[test]
    fn other_tasks_go_on_while_one_waits() {
        let mut builder = tokio::runtime::Builder::new_multi_thread();
        let runtime = builder.worker_threads(1).build().unwrap();
        let (sender, receiver) = mpsc::channel();
        let waits = runtime.spawn(async move {
            // Runs on the same thread, the only one, as soon as that is free.
            tokio::spawn(async move { sender.send(()).unwrap() });
            waiting(|| receiver.recv_timeout(Duration::from_secs(20)))
        });
        runtime.block_on(waits).unwrap().expect("the other task has run");
    }

    #[test]
    fn work_is_done_without_a_runtime_and_with_one_thread() {
        assert_eq!(waiting(|| 1), 1);
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        assert_eq!(runtime.block_on(async { waiting(|| 2) }), 2);
    }
}
