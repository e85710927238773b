//! Tenants: all functions of a sharing domain together. Which one is meant, and what each may have in
//! the store, which is counted when a function is built.

mod store;

pub use store::{
    Planned, StoreQuotaError, StoreUse, TenantStore, check as check_store, check_file,
    check_partial, tenant_of,
};

use crate::config::DomainName;
use std::fmt;

/// Which tenant is meant.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct TenantName(Option<DomainName>);

impl TenantName {
    /// The tenant of a domain's functions; none: of all functions without a domain.
    pub fn of(domain: Option<&DomainName>) -> Self {
        Self(domain.cloned())
    }

    /// The domain, if it is one.
    pub fn domain(&self) -> Option<&DomainName> {
        self.0.as_ref()
    }

    /// The domain's name, or an empty text, which no domain has.
    pub fn label(&self) -> &str {
        self.domain().map_or("", |domain| domain.name().as_str())
    }
}

impl fmt::Display for TenantName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.0 {
            Some(domain) => write!(f, "domain `{}`", domain.name()),
            None => f.write_str("functions without a domain"),
        }
    }
}
