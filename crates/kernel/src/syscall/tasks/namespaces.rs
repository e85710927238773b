//! System calls on namespaces: unshare(2), setns(2).

use alloc::sync::Arc;
use alloc::vec::Vec;

use crate::args::{Fd, Flags, Word};
use crate::errno::{Errno, Result};
use crate::fs::nsfs::NamespaceFile;
use crate::ipc::pidfd::process_of;
use crate::ipc::sysv;
use crate::state::Namespace;
use crate::task::{Capabilities, Credentials, Process, current_process};

/// unshare(2).
pub fn unshare(Word(flags): Word) -> Result<()> {
    let process = current_process();
    if process.unshare(flags)? {
        sysv::undo_semaphores(&process);
    }
    Ok(())
}

/// setns(2): into a namespace by its file, or into several by a process that has them.
pub fn setns(fd: Fd, Flags(kinds): Flags) -> Result<()> {
    let process = current_process();
    let entered = named(fd, kinds.into())?;
    let credentials = check_may_enter(&process, &entered)?;
    let mut namespaces = (*process.namespaces()).clone();
    entered.iter().for_each(|namespace| namespaces.enter(namespace));
    for namespace in &entered {
        match namespace {
            Namespace::Mounts(mounts) => process.set_mounts(mounts),
            Namespace::Ipc(_) => sysv::undo_semaphores(&process),
            Namespace::Pid(pids) => process.enter_pid_namespace(pids),
            _ => {}
        }
    }
    process.set_namespaces(Arc::new(namespaces));
    process.take_user_namespace(credentials);
    Ok(())
}

/// The namespaces that a descriptor and flags name. `EINVAL`: the descriptor is of another kind.
fn named(fd: Fd, kinds: u64) -> Result<Vec<Namespace>> {
    let open = fd.usable_file()?;
    if let Some(file) = open.downcast::<NamespaceFile>() {
        let namespace = file.namespace();
        return match kinds == 0 || kinds == namespace.kind().flag() {
            true => Ok(alloc::vec![namespace.clone()]),
            false => Err(Errno::EINVAL),
        };
    }
    let other = process_of(fd).map_err(|_| Errno::EINVAL)?;
    let all = Namespace::all_of(&other);
    let known: u64 = all.iter().map(|namespace| namespace.kind().flag()).sum();
    if kinds == 0 || kinds & !known != 0 {
        return Err(Errno::EINVAL);
    }
    // It is in none any more.
    if other.is_zombie() {
        return Err(Errno::ESRCH);
    }
    Ok(all.into_iter().filter(|namespace| kinds & namespace.kind().flag() != 0).collect())
}

/// The credentials of a process in these namespaces. `EPERM` unless it may enter all of them: it needs
/// `CAP_SYS_ADMIN`, as it is now, both over them and in the user namespace that it is to be in.
/// `EINVAL`: it shares what it would leave.
fn check_may_enter(process: &Process, entered: &[Namespace]) -> Result<Credentials> {
    let own = process.credentials.borrow_mut().clone();
    let mut credentials = own.clone();
    for namespace in entered {
        if let Namespace::User(users) = namespace {
            if *users == credentials.user_namespace || process.shares_fs() {
                return Err(Errno::EINVAL);
            }
            own.require_in(users, Capabilities::SYS_ADMIN)?;
            credentials = credentials.in_namespace(users.clone());
            continue;
        }
        let owner = namespace.owner().unwrap_or_default();
        let users = &credentials.user_namespace;
        own.require_in(&owner, Capabilities::SYS_ADMIN)?;
        own.require_in(users, Capabilities::SYS_ADMIN)?;
        if let Namespace::Mounts(_) = namespace {
            own.require_in(users, Capabilities::SYS_CHROOT)?;
            if process.shares_fs() {
                return Err(Errno::EINVAL);
            }
        }
        // Only children come in, so there is no way up (`pidns_install`, kernel/pid_namespace.c).
        if let Namespace::Pid(pids) = namespace
            && !process.pid_namespace.includes(pids)
        {
            return Err(Errno::EINVAL);
        }
    }
    // All threads of a process have the same namespaces.
    if process.threads.borrow_mut().len() > 1 { Err(Errno::EINVAL) } else { Ok(credentials) }
}
