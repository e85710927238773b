//! `/proc/PID/uid_map` and its relatives, `/proc/PID/setgroups` (user_namespaces(7)).

use alloc::string::String;
use alloc::sync::Arc;
use alloc::vec::Vec;

use crate::errno::{Errno, Result};
use crate::fs::file::{File, OpenFlags, Stat};
use crate::fs::inode::{Attributes, FileType, FilesystemId, Inode, Statfs};
use crate::fs::pseudo::Place;
use crate::io::{Sink, Source};
use crate::task::ids::Pid;
use crate::task::user_namespace::{Ids, UserNamespace};
use crate::task::{Capabilities, Credentials, current_process};

/// Bytes of a write are fewer than this.
const WRITE_MAX: usize = 4096;

/// What a file is about.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Subject {
    /// A map.
    Map(Ids),
    /// Whether setgroups(2) may be called.
    Setgroups,
}

/// Names of the files.
pub(super) const NAMES: [(&str, Subject); 4] = [
    ("gid_map", Subject::Map(Ids::Groups)),
    ("projid_map", Subject::Map(Ids::Projects)),
    ("setgroups", Subject::Setgroups),
    ("uid_map", Subject::Map(Ids::Users)),
];

/// A file about the user namespace of a process.
pub(super) struct IdMap {
    pub place: Place,
    pub pid: Pid,
    pub subject: Subject,
}

impl Inode for IdMap {
    fn attributes(&self) -> Attributes {
        self.place.attributes(FileType::Regular, 0o644)
    }
    fn file_type(&self) -> FileType {
        FileType::Regular
    }
    fn filesystem(&self) -> FilesystemId {
        self.place.filesystem
    }
    fn open(self: Arc<Self>, flags: OpenFlags) -> Result<Arc<dyn File>> {
        let process = super::process::process(self.pid)?;
        let namespace = process.credentials.borrow_mut().user_namespace.clone();
        let opener = current_process().credentials.borrow_mut().clone();
        let may_write = opener.can_in(&namespace, Capabilities::SYS_ADMIN);
        if flags.can_write() && self.subject == Subject::Setgroups && !may_write {
            return Err(Errno::EACCES);
        }
        Ok(Arc::new(OpenIdMap { inode: self, namespace, opener }))
    }
    fn truncate(&self, _: u64) -> Result<()> {
        Ok(())
    }
    fn statfs(&self) -> Statfs {
        self.place.statfs()
    }
}

/// An open one. Who has opened it must have the right to write, too: the writer may be a program
/// with more rights that means to write to its standard output.
struct OpenIdMap {
    inode: Arc<IdMap>,
    namespace: UserNamespace,
    opener: Credentials,
}

impl OpenIdMap {
    fn content(&self) -> Vec<u8> {
        match self.inode.subject {
            Subject::Map(ids) => self.namespace.shown_map(ids, &self.opener.user_namespace),
            Subject::Setgroups if self.namespace.allows_setgroups() => b"allow\n".to_vec(),
            Subject::Setgroups => b"deny\n".to_vec(),
        }
    }
}

impl File for OpenIdMap {
    fn read(&self, sink: &mut Sink<'_>, offset: u64) -> Result<usize> {
        let content = self.content();
        let rest = usize::try_from(offset).ok().and_then(|offset| content.get(offset..));
        sink.put(rest.unwrap_or(&[]))
    }

    fn write(&self, source: &mut Source<'_>, offset: u64) -> Result<usize> {
        if offset != 0 {
            return Err(Errno::EINVAL);
        }
        let text = source.take_all(WRITE_MAX - 1).map_err(|error| match error {
            Errno::EMSGSIZE => Errno::EINVAL,
            error => error,
        })?;
        let writer = current_process().credentials.borrow_mut().clone();
        match self.inode.subject {
            Subject::Map(ids) => self.namespace.write_map(ids, &text, &self.opener, &writer)?,
            Subject::Setgroups => self.namespace.write_setgroups(&text)?,
        }
        Ok(text.len())
    }

    fn seekable(&self) -> bool {
        true
    }

    fn stat(&self) -> Result<Stat> {
        Ok(self.inode.attributes().to_stat())
    }

    fn description(&self) -> String {
        String::from("id map")
    }
}
