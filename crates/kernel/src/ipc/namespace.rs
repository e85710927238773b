//! IPC namespaces: System V objects and names of POSIX message queues (ipc_namespaces(7)).

use alloc::collections::BTreeMap;
use alloc::sync::{Arc, Weak};
use alloc::vec::Vec;

use super::mqueue::Names;
use super::sysv::SystemV;
use crate::errno::Result;
use crate::state::kernel;
use crate::sync::KernelCell;
use crate::task::namespace::{Common, Kind};
use crate::task::thread::running;
use crate::task::user_namespace::UserNamespace;

/// Those that exist besides the first one, by inode number.
#[derive(Default)]
pub struct Others(KernelCell<BTreeMap<u64, Weak<IpcNamespace>>>);

/// Objects that processes find by ids, keys and names.
pub struct IpcNamespace {
    /// Number and owner.
    pub common: Common,
    /// System V objects.
    pub system_v: SystemV,
    /// POSIX message queues.
    pub queues: Names,
}

impl IpcNamespace {
    /// The first one.
    pub fn first() -> Self {
        Self::with(Common::first(Kind::Ipc))
    }

    fn with(common: Common) -> Self {
        Self { common, system_v: SystemV::default(), queues: Names::default() }
    }

    /// Another one, which is empty; `ENOSPC`.
    pub fn create(owner: &UserNamespace) -> Result<Arc<Self>> {
        let new = Arc::new(Self::with(Common::new(Kind::Ipc, owner)?));
        let others = &kernel().ipc_namespaces.0;
        others.borrow_mut().insert(new.common.ino(), Arc::downgrade(&new));
        Ok(new)
    }
}

impl Drop for IpcNamespace {
    fn drop(&mut self) {
        self.queues.remove_all();
        let gone = kernel().ipc_namespaces.0.borrow_mut().remove(&self.common.ino());
        drop(gone);
    }
}

/// That of the running process, or the first one if none runs.
pub fn own() -> Arc<IpcNamespace> {
    match running() {
        Some(thread) => thread.process.namespaces().ipc.clone(),
        None => kernel().namespaces.ipc.clone(),
    }
}

/// All that exist.
pub fn all() -> Vec<Arc<IpcNamespace>> {
    let first = kernel().namespaces.ipc.clone();
    let others = kernel().ipc_namespaces.0.borrow_mut();
    core::iter::once(first).chain(others.values().filter_map(Weak::upgrade)).collect()
}

/// What is left of a number that holds for the sandbox, after what namespaces other than the caller's
/// have: no program gets more by making namespaces.
pub fn left_of(most: usize, count: impl Fn(&SystemV) -> usize) -> usize {
    if kernel().ipc_namespaces.0.borrow_mut().is_empty() {
        return most;
    }
    let own = own();
    let others = all().into_iter().filter(|namespace| !Arc::ptr_eq(namespace, &own));
    most.saturating_sub(others.map(|namespace| count(&namespace.system_v)).sum())
}
