//! POSIX message queues (mq_overview(7)).
//!
//! A queue has a name, and lives until it has none and no descriptor. It counts with all that it may
//! ever hold, so a sandbox is refused a queue, not a message.

pub mod notification;
pub mod queue;

use alloc::collections::BTreeMap;
use alloc::sync::Arc;
use alloc::vec::Vec;

use queue::{Queue, Size};

use super::namespace;
use crate::errno::{Errno, Result};
use crate::fs::anonymous::InodeNumbers;
use crate::fs::file::OpenFlags;
use crate::fs::permission::{Access, Identity};
use crate::sync::KernelCell;
use crate::task::Process;
use crate::task::credentials::Capabilities;
use crate::task::process::RLIMIT_MSGQUEUE;

/// `/proc/sys/fs/mqueue/queues_max`: most queues of those who lack `CAP_SYS_RESOURCE`.
pub const QUEUES_MAX: usize = 256;
/// Most queues of all.
const QUEUES_MAX_OF_ALL: usize = 4096;
/// Bytes that all queues of the sandbox may hold together, whatever `RLIMIT_MSGQUEUE` says.
const BYTES_MAX_OF_ALL: u64 = 64 << 20;
/// Longest name.
const NAME_MAX: usize = 255;

/// The queues of an IPC namespace, by name. Saved.
#[derive(Default)]
pub struct Names(KernelCell<BTreeMap<Vec<u8>, Arc<Queue>>>);

impl Names {
    fn find(&self, name: &[u8]) -> Option<Arc<Queue>> {
        self.0.borrow_mut().get(name).cloned()
    }

    fn all(&self) -> Vec<Arc<Queue>> {
        self.0.borrow_mut().values().cloned().collect()
    }

    /// Takes all queues their names: the namespace ends.
    pub fn remove_all(&self) {
        let all = core::mem::take(&mut *self.0.borrow_mut());
        all.values().for_each(|queue| queue.unlinked());
    }
}

/// What holds for all queues of the sandbox. Saved.
#[derive(Default)]
pub struct MessageQueues {
    account: KernelCell<Account>,
    inodes: InodeNumbers,
}

/// What the queues may hold, those included that have no name any more.
#[derive(Default)]
struct Account {
    queues: usize,
    bytes_by_user: BTreeMap<u32, u64>,
}

impl Account {
    /// Counts one more queue; `EMFILE` beyond a user's limit or that of the sandbox.
    fn add(&mut self, user: u32, bytes: u64, limit: u64) -> Result<()> {
        let of_user = self.bytes_by_user.get(&user).copied().unwrap_or(0);
        let of_all: u64 = self.bytes_by_user.values().sum();
        if of_user.saturating_add(bytes) > limit || of_all.saturating_add(bytes) > BYTES_MAX_OF_ALL
        {
            return Err(Errno::EMFILE);
        }
        self.queues += 1;
        self.bytes_by_user.insert(user, of_user + bytes);
        Ok(())
    }

    fn remove(&mut self, user: u32, bytes: u64) {
        self.queues -= 1;
        let left = self.bytes_by_user.get(&user).map_or(0, |held| held.saturating_sub(bytes));
        match left {
            0 => self.bytes_by_user.remove(&user),
            left => self.bytes_by_user.insert(user, left),
        };
    }
}

/// A place in the account. Dropped, it is free again.
struct Charge {
    user: u32,
    bytes: u64,
}

impl Drop for Charge {
    fn drop(&mut self) {
        all().account.borrow_mut().remove(self.user, self.bytes);
    }
}

/// How mq_open(3) finds or makes a queue.
pub struct Request {
    /// Access mode, `O_CREAT` and `O_EXCL`.
    pub flags: OpenFlags,
    /// Permission bits of a new queue, those of the umask taken away.
    pub permissions: u32,
    /// What a new queue may hold; `None`: what is usual.
    pub size: Option<Size>,
}

/// What holds for all queues.
fn all() -> &'static MessageQueues {
    &crate::state::kernel().message_queues
}

/// Checks a name without its leading slash, as lookups in a directory do.
fn check_name(name: &[u8]) -> Result<()> {
    match name {
        b"" => Err(Errno::ENOENT),
        b"." | b".." => Err(Errno::EACCES),
        name if name.contains(&b'/') => Err(Errno::EACCES),
        name if name.len() > NAME_MAX => Err(Errno::ENAMETOOLONG),
        _ => Ok(()),
    }
}

/// The queue with a name, which is made if the request says so (mq_open(3)).
pub fn open(process: &Process, name: &[u8], request: &Request) -> Result<Arc<Queue>> {
    check_name(name)?;
    let flags = request.flags;
    let known = namespace::own().queues.find(name);
    match known {
        Some(_) if flags.contains(OpenFlags::CREAT | OpenFlags::EXCL) => Err(Errno::EEXIST),
        Some(queue) => {
            let identity = Identity::effective(&process.credentials.borrow_mut());
            identity.check_attributes(&queue.attributes(), access(flags)?)?;
            Ok(queue)
        }
        None if flags.contains(OpenFlags::CREAT) => create(process, name, request),
        None => Err(Errno::ENOENT),
    }
}

/// What an access mode needs; `EINVAL` for the one that is none.
fn access(flags: OpenFlags) -> Result<Access> {
    match (flags.contains(OpenFlags::WRONLY), flags.contains(OpenFlags::RDWR)) {
        (true, true) => Err(Errno::EINVAL),
        (true, false) => Ok(Access::WRITE),
        (false, true) => Ok(Access::READ | Access::WRITE),
        (false, false) => Ok(Access::READ),
    }
}

fn create(process: &Process, name: &[u8], request: &Request) -> Result<Arc<Queue>> {
    let credentials = process.credentials.borrow_mut().clone();
    let is_privileged = credentials.can(Capabilities::SYS_RESOURCE);
    let size = request.size.unwrap_or_default().checked(is_privileged)?;
    let limit = process.limits.borrow_mut()[RLIMIT_MSGQUEUE].current;
    let charge = charge(credentials.uid, size, limit, is_privileged)?;
    let owner = (credentials.fsuid, credentials.fsgid);
    let ino = all().inodes.next();
    let queue = Arc::new(Queue::new(name.to_vec(), size, owner, request.permissions, ino, charge));
    namespace::own().queues.0.borrow_mut().insert(name.to_vec(), queue.clone());
    Ok(queue)
}

/// Takes a place in the account; `ENOSPC` if there are too many queues.
fn charge(user: u32, size: Size, limit: u64, is_privileged: bool) -> Result<Charge> {
    let most = if is_privileged { QUEUES_MAX_OF_ALL } else { QUEUES_MAX };
    let mut account = all().account.borrow_mut();
    if account.queues >= most {
        return Err(Errno::ENOSPC);
    }
    let bytes = size.bytes()?;
    account.add(user, bytes, limit)?;
    Ok(Charge { user, bytes })
}

/// mq_unlink(3): takes a queue its name. As a directory with the sticky bit, the place of the names
/// lets only owners do that.
pub fn unlink(process: &Process, name: &[u8]) -> Result<()> {
    check_name(name)?;
    let namespace = namespace::own();
    let queue = namespace.queues.find(name).ok_or(Errno::ENOENT)?;
    let identity = Identity::effective(&process.credentials.borrow_mut());
    // The place of the names is that of the superuser whose namespace it is.
    let owns_names = namespace.common.owner().user(0) == Some(identity.uid);
    if !owns_names && !identity.owns(&queue.attributes()) {
        return Err(Errno::EPERM);
    }
    let removed = namespace.queues.0.borrow_mut().remove(name);
    queue.unlinked();
    drop(removed);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn users_have_limits_and_the_sandbox_too() {
        let mut account = Account::default();
        assert_eq!(account.add(1, 100, 150), Ok(()));
        assert_eq!(account.add(1, 51, 150), Err(Errno::EMFILE));
        assert_eq!(account.add(2, 51, 150), Ok(()));
        assert_eq!(account.add(3, BYTES_MAX_OF_ALL, u64::MAX), Err(Errno::EMFILE));
        account.remove(1, 100);
        assert_eq!(account.add(1, 150, 150), Ok(()));
        assert_eq!(account.queues, 2);
    }

    #[test]
    fn names_are_those_of_a_directory() {
        assert_eq!(check_name(b"queue"), Ok(()));
        assert_eq!(check_name(b""), Err(Errno::ENOENT));
        assert_eq!(check_name(b".."), Err(Errno::EACCES));
        assert_eq!(check_name(b"a/b"), Err(Errno::EACCES));
        assert_eq!(check_name(&[b'x'; 255]), Ok(()));
        assert_eq!(check_name(&[b'x'; 256]), Err(Errno::ENAMETOOLONG));
    }
}
