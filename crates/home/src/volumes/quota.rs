//! What volumes count for in the quotas of tenants: their sizes, whether or not there is so much in
//! them, and again for each of their snapshots, which are as large at most.

use super::{VolumeError, VolumeStore, failed};
use crate::config::{ByteSize, DomainName, QUOTAS_FILE, Quotas};
use crate::tenants::TenantName;
use rustix::fs::{FlockOperation, flock};
use std::collections::BTreeMap;
use std::fs::File;
use std::io::ErrorKind;

impl VolumeStore {
    /// Bytes that the volumes of all tenants count for. One that cannot be read counts for nobody.
    ///
    /// # Errors
    /// The host refuses.
    pub fn bytes_of_tenants(&self) -> Result<BTreeMap<TenantName, u64>, VolumeError> {
        let _acting = self.home.act()?;
        let mut found: BTreeMap<TenantName, u64> = BTreeMap::new();
        for name in self.names()? {
            let Ok(note) = self.read_note(&name) else { continue };
            let copies = 1 + self.count_copies(&name)?;
            let bytes = found.entry(TenantName::of(note.domain.as_ref())).or_default();
            *bytes = bytes.saturating_add(note.size.bytes().saturating_mul(copies));
        }
        Ok(found)
    }

    /// Keeps others from making volumes and snapshots until the result is dropped.
    pub(super) fn counting(&self) -> Result<File, VolumeError> {
        let all = self.all();
        let counting = File::open(&all).map_err(failed("open", &all))?;
        match flock(&counting, FlockOperation::LockExclusive) {
            Ok(()) => Ok(counting),
            Err(error) => Err(failed("lock", &all)(error.into())),
        }
    }

    /// Refuses so many more bytes if the tenant of `domain` may not have them. To be asked while
    /// [`VolumeStore::counting`] lasts.
    pub(super) fn check_quota(
        &self,
        domain: Option<&DomainName>,
        more: ByteSize,
    ) -> Result<(), VolumeError> {
        let quotas = Quotas::load(&self.home.root().join(QUOTAS_FILE))?;
        let Some(quota) = quotas.of(domain).volumes else { return Ok(()) };
        let tenant = TenantName::of(domain);
        let used = self.bytes_of_tenants()?.get(&tenant).copied().unwrap_or_default();
        let needed = used.saturating_add(more.bytes());
        match needed <= quota.bytes() {
            true => Ok(()),
            false => Err(VolumeError::Quota { tenant, quota, needed }),
        }
    }

    /// The names of all volumes, in order.
    pub fn names(&self) -> Result<Vec<thaw_store::Name>, VolumeError> {
        let _acting = self.home.act()?;
        let all = self.all();
        let entries = match std::fs::read_dir(&all) {
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Vec::new()),
            entries => entries.map_err(failed("read", &all))?,
        };
        let names = entries.filter_map(|entry| entry.ok()?.file_name().into_string().ok());
        let mut names: Vec<_> =
            names.filter_map(|name| thaw_store::Name::new(&name).ok()).collect();
        names.sort();
        Ok(names)
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::{config, store};
    use super::*;
    use thaw_store::Name;

    fn name(name: &str) -> Name {
        Name::new(name).unwrap()
    }

    #[test]
    fn a_tenant_has_volumes_and_snapshots_up_to_its_quota() {
        let (_directory, volumes) = store();
        let quotas = "[domain.x]\nvolumes = \"4MiB\"";
        std::fs::write(volumes.home.root().join(QUOTAS_FILE), quotas).unwrap();
        let domain: DomainName = "x".parse().unwrap();
        let size: ByteSize = "2MiB".parse().unwrap();
        volumes.create(&name("a"), size, &[], Some(&domain)).unwrap();
        volumes.snapshot(&name("a"), &name("one")).unwrap();
        let of_x = || volumes.bytes_of_tenants().unwrap()[&TenantName::of(Some(&domain))];
        assert_eq!(of_x(), 4 << 20);
        let refused = volumes.snapshot(&name("a"), &name("two")).unwrap_err().to_string();
        assert!(refused.contains("domain `x` is 4MiB") && refused.contains("6291456"), "{refused}");
        assert_eq!(volumes.show(&name("a")).unwrap().snapshots.len(), 1);
        // What an author names in thaw.toml is bound alike, and nothing of it is left.
        let mut build = config("f", "b");
        build.sharing.domain = Some(domain.clone());
        let refused = volumes.of_new_function(&build).map(drop);
        assert!(matches!(refused, Err(VolumeError::Quota { .. })), "{refused:?}");
        assert!(matches!(volumes.show(&name("b")), Err(VolumeError::Missing(_))));
        // Others have nothing to do with it.
        volumes.create(&name("c"), size, &[], None).unwrap();
        volumes.remove_snapshot(&name("a"), &name("one")).unwrap();
        volumes.of_new_function(&build).map(drop).unwrap();
        assert_eq!(of_x(), 3 << 20);
        assert_eq!(volumes.show(&name("b")).unwrap().domain, Some(domain));
    }

    #[test]
    fn wrong_quotas_let_nobody_have_more() {
        let (_directory, volumes) = store();
        let size: ByteSize = "1MiB".parse().unwrap();
        std::fs::write(volumes.home.root().join(QUOTAS_FILE), "[domain.x]\nvolume = 1").unwrap();
        let refused = volumes.create(&name("a"), size, &[], None);
        assert!(matches!(refused, Err(VolumeError::Quotas(_))), "{refused:?}");
        assert!(matches!(volumes.show(&name("a")), Err(VolumeError::Missing(_))));
    }
}
