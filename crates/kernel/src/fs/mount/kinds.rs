//! New file systems, by name.

use alloc::string::String;
use alloc::sync::Arc;

use super::filesystem::{Access, Filesystem};
use super::options::{self, Options};
use crate::errno::{Errno, Result};
use crate::fs::dentry::Dentry;
use crate::fs::inode::Inode;
use crate::fs::overlay::{Limits, Overlay, node_of_inode};
use crate::fs::tty::devpts;
use crate::state::{Namespace, kernel};
use crate::task::namespace::Kind;
use crate::task::{Capabilities, current_process};

/// Directories of memory, and those of the kernel's own that have options.
const TMPFS: &str = "tmpfs";
const RAMFS: &str = "ramfs";
const DEVPTS: &str = "devpts";
const PROC: &str = "proc";

/// The file system that mount(2) asks for by name. `ENODEV`: there is none of that name.
/// `EINVAL`: it does not have these options.
pub(super) fn open(kind: &[u8], options: &[u8], access: Access) -> Result<Arc<Filesystem>> {
    check_may_open(kind)?;
    match kind {
        b"tmpfs" => memory(TMPFS, &options::parse(options, options::TMPFS)?, access),
        b"ramfs" => memory(RAMFS, &options::parse(options, options::RAMFS)?, access),
        b"devpts" => terminals(&options::parse(options, options::DEVPTS)?, access),
        b"proc" => processes(options, access),
        b"devtmpfs" => {
            options::parse(options, options::TMPFS)?;
            kernel().fs.devices()
        }
        _ => {
            let shared = kernel().fs.shared(kind).ok_or(Errno::ENODEV)?;
            options::parse(options, options::NONE)?;
            Ok(shared)
        }
    }
}

/// `EPERM` unless the caller may mount this file system: outside of the initial user namespace, some
/// may be mounted only (`FS_USERNS_MOUNT`), and one that shows a namespace by those alone who have
/// capabilities over that. `ENODEV`: there is none.
fn check_may_open(kind: &[u8]) -> Result<()> {
    let process = current_process();
    let mounter = process.credentials.borrow_mut().clone();
    if mounter.user_namespace.is_initial() {
        return Ok(());
    }
    let shown = match kind {
        b"tmpfs" | b"ramfs" | b"devpts" => return Ok(()),
        b"proc" => Kind::Pid,
        b"sysfs" => Kind::Net,
        b"cgroup2" => Kind::Cgroup,
        b"devtmpfs" => return Err(Errno::EPERM),
        _ if kernel().fs.shared(kind).is_some() => return Err(Errno::EPERM),
        _ => return Err(Errno::ENODEV),
    };
    let owner = Namespace::of(&process, shown).owner().unwrap_or_default();
    mounter.require_in(&owner, Capabilities::SYS_ADMIN)
}

/// A new directory in memory. The sandbox's own limit for files holds in any case.
fn memory(kind: &'static str, options: &Options, access: Access) -> Result<Arc<Filesystem>> {
    let default = if kind == TMPFS { options::TMPFS_MODE } else { 0o755 };
    let number = kernel().fs.registry.new_filesystem();
    let mounter = current_process().credentials.borrow_mut().clone();
    let users = mounter.user_namespace;
    let uid = options.uid.map_or(Some(mounter.fsuid), |id| users.user(id)).ok_or(Errno::EINVAL)?;
    let gid = options.gid.map_or(Some(mounter.fsgid), |id| users.group(id)).ok_or(Errno::EINVAL)?;
    let owner = (uid, gid);
    let limits = Limits { pages: options.pages, inodes: options.inodes };
    let root = Overlay::limited(number.id(), options.mode.unwrap_or(default), owner, limits)?;
    let root: Arc<dyn Inode> = root;
    let text = options.text();
    Ok(Filesystem::of_program((number, users), kind, Dentry::root(root), &text, access))
}

/// The terminals, under another root: those of all devpts are the same here, but for those made outside of
/// the mounter's user namespace.
fn terminals(options: &Options, access: Access) -> Result<Arc<Filesystem>> {
    let number = kernel().fs.registry.new_filesystem();
    let users = current_process().credentials.borrow_mut().user_namespace.clone();
    let root = Dentry::root(devpts::root(options.ptmx_mode.unwrap_or(0), users.clone()));
    let text = options.text_of_terminals();
    Ok(Filesystem::of_program((number, users), DEVPTS, root, &text, access))
}

/// The processes of the caller's PID namespace. The initial one has the `/proc` that is there already.
fn processes(options: &[u8], access: Access) -> Result<Arc<Filesystem>> {
    options::parse(options, options::NONE)?;
    let namespace = current_process().pid_namespace.clone();
    if namespace.is_initial() {
        return kernel().fs.shared(PROC.as_bytes()).ok_or(Errno::ENODEV);
    }
    let number = kernel().fs.registry.new_filesystem();
    let users = current_process().credentials.borrow_mut().user_namespace.clone();
    let root = Dentry::root(kernel().fs.proc_root(number.id(), namespace));
    Ok(Filesystem::of_program((number, users), PROC, root, "", access))
}

/// Changes a file system that is mounted. `EINVAL`: it does not have these options, or holds more
/// than they allow.
pub(super) fn reconfigure(filesystem: &Filesystem, options: &[u8], access: Access) -> Result<()> {
    let known = match filesystem.kind {
        TMPFS => options::TMPFS,
        RAMFS => options::RAMFS,
        DEVPTS => options::DEVPTS,
        // What was mounted at boot may be named with options that it already has.
        _ => options::NONE,
    };
    let new = options::parse(options, known)?;
    let node = node_of_inode(&filesystem.root.inode).filter(|_| filesystem.kind == TMPFS);
    if let Some(node) = &node {
        node.check_limits(Limits { pages: new.pages, inodes: new.inodes })?;
    }
    filesystem.set_access(access)?;
    if let Some(node) = &node {
        node.set_limits(Limits { pages: new.pages, inodes: new.inodes });
        filesystem.set_options(changed(&filesystem.options(), &new));
    }
    Ok(())
}

/// Options as they are shown after some have changed: only limits do.
fn changed(old: &str, new: &Options) -> String {
    let is_replaced = |option: &&str| {
        new.pages.is_some() && option.starts_with("size=")
            || new.inodes.is_some() && option.starts_with("nr_inodes=")
    };
    let kept = old.split(',').filter(|option| !option.is_empty() && !is_replaced(option));
    let limits = Options { mode: None, uid: None, gid: None, ptmx_mode: None, ..*new };
    let kept: String = kept.map(|option| alloc::format!(",{option}")).collect();
    limits.text() + &kept
}
