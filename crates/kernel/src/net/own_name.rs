//! The host name that the host gives to a sandbox which runs: that of a copy, of a checkpoint or of a function
//! is not its own.

use alloc::boxed::Box;
use alloc::vec::Vec;

use super::resolver_files::replace_own_name;
use crate::errno::Result;
use crate::fs::Context;
use crate::state::{ProcessFiles, kernel};
use crate::task::Credentials;
use crate::task::work::{self, Next, Work};

/// Changes the host name, and then `/etc/hosts`.
pub fn change(name: &[u8]) {
    let kernel = kernel();
    let before =
        core::mem::replace(&mut *kernel.namespaces.uts.hostname.borrow_mut(), name.to_vec());
    if before != name {
        let files = ProcessFiles::new(kernel.fs.namespace.clone());
        work::start(b"hostname", Credentials::default(), files, Box::new(RenameInHosts { before }));
    }
}

/// Has `/etc/hosts` say the present name in the place of one before.
pub(super) fn rename_in_hosts(before: &[u8]) -> Result<()> {
    let name = kernel().namespaces.uts.hostname.borrow_mut().clone();
    if name == before { Ok(()) } else { replace_own_name(&Context::current(), before, &name) }
}

/// Does that, which may wait for the host.
struct RenameInHosts {
    before: Vec<u8>,
}

impl Work for RenameInHosts {
    fn run(self: Box<Self>) -> Next {
        if let Err(error) = rename_in_hosts(&self.before) {
            crate::console!("thaw kernel: /etc/hosts cannot be changed: {}", error.name());
        }
        Next::End
    }
}
