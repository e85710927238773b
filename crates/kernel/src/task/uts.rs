//! UTS namespaces: the names of the machine (uts_namespaces(7)).

use alloc::vec::Vec;

use super::namespace::{Common, Kind};
use super::user_namespace::UserNamespace;
use crate::errno::Result;
use crate::sync::KernelCell;

/// The names of the machine.
pub struct UtsNamespace {
    /// Number and owner.
    pub common: Common,
    /// Host name, as in uname(2).
    pub hostname: KernelCell<Vec<u8>>,
    /// NIS domain name, once it was set.
    pub domainname: KernelCell<Option<Vec<u8>>>,
}

impl UtsNamespace {
    /// The first one, without names.
    pub fn first() -> Self {
        let common = Common::first(Kind::Uts);
        Self { common, hostname: KernelCell::default(), domainname: KernelCell::default() }
    }

    /// Another one with the same names.
    pub fn copy(&self, owner: &UserNamespace) -> Result<Self> {
        Ok(Self {
            common: Common::new(Kind::Uts, owner)?,
            hostname: KernelCell::new(self.hostname.borrow_mut().clone()),
            domainname: KernelCell::new(self.domainname.borrow_mut().clone()),
        })
    }

    /// The NIS domain name, as uname(2) has it.
    pub fn shown_domainname(&self) -> Vec<u8> {
        self.domainname.borrow_mut().clone().unwrap_or_else(|| b"(none)".to_vec())
    }
}
