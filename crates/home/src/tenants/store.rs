//! What tenants have in the store.

use super::TenantName;
use crate::config::{ByteSize, DomainName, QUOTAS_FILE, Quotas};
use crate::partial::{PartialLength, directory_beside, lengths};
use serde_json::Value;
use std::collections::BTreeMap;
use std::sync::Mutex;
use thaw_store::{
    CheckpointRecord, Footprint, FunctionRecord, ImageId, IndexId, Name, Store, StoreError,
    VERSIONS_KEPT, Version,
};

/// What one tenant has in the store.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TenantStore {
    /// Functions.
    pub functions: usize,
    /// Bytes of their files, indexes and images, and of checkpoints of their instances.
    pub bytes: u64,
}

/// What all tenants have in the store, as long as nothing is stored.
#[derive(Debug, Default)]
pub struct StoreUse {
    measured: Mutex<Option<Measured>>,
}

#[derive(Debug)]
struct Measured {
    /// Every version of a function has a time of its own, and its image gets a working set and
    /// a prefetch file later.
    versions: Vec<(Name, u64, u64)>,
    by_tenant: BTreeMap<TenantName, TenantStore>,
}

/// Why something is not stored.
#[derive(Debug, thiserror::Error)]
pub enum StoreQuotaError {
    /// The tenant would have too much.
    #[error(
        "the quota of {tenant} is {} in the store, and with {with} it would have {} there; \
         remove functions with `thaw remove` or checkpoints with `thaw checkpoints --remove`, make \
         this one smaller, or have the operator raise `store` in {QUOTAS_FILE}",
        in_mebibytes(*.quota),
        in_mebibytes(*.needed)
    )]
    Exceeded {
        /// The tenant.
        tenant: TenantName,
        /// Words for what is not stored.
        with: &'static str,
        /// Bytes that it may have.
        quota: u64,
        /// Bytes that it would have.
        needed: u64,
    },
    /// It cannot be counted.
    #[error(transparent)]
    Store(#[from] StoreError),
}

fn in_mebibytes(bytes: u64) -> String {
    format!("{:.1} MiB", bytes as f64 / f64::from(1 << 20))
}

/// A function that is about to be stored.
#[derive(Clone, Copy, Debug)]
pub struct Planned<'a> {
    /// Its name.
    pub name: &'a str,
    /// Its sharing domain.
    pub domain: Option<&'a DomainName>,
    /// Its root file system.
    pub index: IndexId,
    /// Its image, if it is known already.
    pub image: Option<ImageId>,
}

impl StoreUse {
    /// What every tenant has. Reads the indexes of all functions if something was stored
    /// since the last time.
    ///
    /// # Errors
    /// The store cannot be read.
    pub fn measure(&self, store: &Store) -> Result<BTreeMap<TenantName, TenantStore>, StoreError> {
        let records = store.list_functions()?.records;
        let checkpoints = store.list_checkpoints()?.records;
        let version = |(name, version): (Name, Version)| {
            let bytes = version.image.map_or(Ok(0), |image| store.image_bytes(image))?;
            Ok((name, version.created_ms, bytes))
        };
        let of_record = |record: &FunctionRecord| {
            let name = record.name.clone();
            versions(record).into_iter().map(move |version| (name.clone(), version))
        };
        let versions = records.iter().flat_map(of_record).map(version);
        let checkpointed = checkpoints.iter().map(|record| {
            Ok((record.name.clone(), record.created_ms, store.image_bytes(record.image)?))
        });
        let versions = versions.chain(checkpointed).collect::<Result<Vec<_>, StoreError>>()?;
        let mut measured = self.measured.lock().expect("no holder panics");
        if let Some(known) = measured.as_ref().filter(|known| known.versions == versions) {
            return Ok(with_partial(store, known.by_tenant.clone(), &records));
        }
        let by_tenant = measure(store, &records, &checkpoints)?;
        *measured = Some(Measured { versions, by_tenant: by_tenant.clone() });
        Ok(with_partial(store, by_tenant, &records))
    }
}

/// The same with the functions of which only a part is here.
fn with_partial(
    store: &Store,
    mut by_tenant: BTreeMap<TenantName, TenantStore>,
    records: &[FunctionRecord],
) -> BTreeMap<TenantName, TenantStore> {
    for partial in wanted_lengths(store, records) {
        let tenant = by_tenant.entry(TenantName::of(partial.domain.as_ref())).or_default();
        tenant.bytes = tenant.bytes.saturating_add(partial.bytes);
        let is_new = records.iter().all(|record| record.name.as_str() != partial.name);
        tenant.functions += usize::from(is_new);
    }
    by_tenant
}

/// Bytes of a tenant's functions of which only a part is here, but for the one of this name: each counts
/// with its whole length from the beginning. It may share files with others, which nobody knows before
/// all of it is here.
fn partial_bytes(store: &Store, tenant: &TenantName, but: Option<&str>) -> Result<u64, StoreError> {
    let records = store.list_functions()?.records;
    let counted = wanted_lengths(store, &records).into_iter().filter(|partial| {
        TenantName::of(partial.domain.as_ref()) == *tenant && Some(partial.name.as_str()) != but
    });
    Ok(counted.fold(0, |sum, partial| sum.saturating_add(partial.bytes)))
}

/// The functions of which a part is served. A directory of which a version was stored since is a leftover.
fn wanted_lengths(store: &Store, records: &[FunctionRecord]) -> Vec<PartialLength> {
    let mut all = lengths(&directory_beside(store));
    all.retain(|partial| {
        let stored = records.iter().find(|record| record.name.as_str() == partial.name);
        let newest =
            stored.and_then(|record| record.versions().iter().map(|one| one.created_ms).max());
        newest.is_none_or(|newest| newest < partial.created_ms)
    });
    all
}

/// Whether a tenant may have a function of so many bytes of which only a part is here yet.
///
/// # Errors
/// It would have too much, or that cannot be counted.
pub fn check_partial(
    store: &Store,
    quotas: &Quotas,
    (name, domain): (&str, Option<&DomainName>),
    bytes: u64,
) -> Result<(), StoreQuotaError> {
    let Some(quota) = quotas.of(domain).store else { return Ok(()) };
    let tenant = TenantName::of(domain);
    let needed = stored_bytes(store, &tenant)?
        .saturating_add(partial_bytes(store, &tenant, Some(name))?)
        .saturating_add(bytes);
    within(&tenant, "this function", quota, needed)
}

/// Bytes of a tenant's functions and checkpoints in the store.
fn stored_bytes(store: &Store, tenant: &TenantName) -> Result<u64, StoreQuotaError> {
    let mut footprint = Footprint::default();
    for record in store.list_functions()?.records {
        let versions = versions(&record);
        let of_tenant = |kept: &Kept<'_>| tenant_of(kept.config) == *tenant;
        add_all(store, &mut footprint, versions.iter().map(Kept::from).filter(of_tenant))?;
    }
    add_checkpoints(store, &mut footprint, tenant)?;
    Ok(footprint.bytes())
}

fn measure(
    store: &Store,
    records: &[FunctionRecord],
    checkpoints: &[CheckpointRecord],
) -> Result<BTreeMap<TenantName, TenantStore>, StoreError> {
    let mut footprints: BTreeMap<TenantName, (usize, Footprint)> = BTreeMap::new();
    for record in records {
        footprints.entry(tenant_of(&record.config)).or_default().0 += 1;
        for version in versions(record) {
            let kept = Kept::from(&version);
            let (_, footprint) = footprints.entry(tenant_of(kept.config)).or_default();
            footprint.add(store, kept.index, kept.image)?;
        }
    }
    for record in checkpoints {
        let kept = Kept::from(record);
        let (_, footprint) = footprints.entry(tenant_of(kept.config)).or_default();
        footprint.add(store, kept.index, kept.image)?;
    }
    let total = |(functions, footprint): (usize, Footprint)| TenantStore {
        functions,
        bytes: footprint.bytes(),
    };
    Ok(footprints.into_iter().map(|(tenant, found)| (tenant, total(found))).collect())
}

/// The tenant that the stored configuration of a function, or of a checkpoint, names. A record of another version of Thaw may
/// have no domain that this one can read: it is one without.
pub fn tenant_of(stored: &Value) -> TenantName {
    let domain = stored.pointer("/config/sharing/domain").and_then(Value::as_str);
    TenantName(domain.and_then(|domain| domain.parse().ok()))
}

/// Whether a tenant may have a function that is about to be stored. Those versions of
/// the function count, too, that stay beside it.
///
/// # Errors
/// It would have too much, or that cannot be counted.
pub fn check(store: &Store, quotas: &Quotas, planned: &Planned<'_>) -> Result<(), StoreQuotaError> {
    let Some(quota) = quotas.of(planned.domain).store else { return Ok(()) };
    let tenant = TenantName::of(planned.domain);
    let mut footprint = Footprint::default();
    footprint.add(store, planned.index, planned.image)?;
    let kept = |record: &FunctionRecord, footprint: &mut Footprint| {
        let kept = kept_of(record, planned);
        let of_tenant = |kept: &Kept<'_>| tenant_of(kept.config) == tenant;
        add_all(store, footprint, kept.iter().map(Kept::from).filter(of_tenant))
    };
    store.list_functions()?.records.iter().try_for_each(|record| kept(record, &mut footprint))?;
    add_checkpoints(store, &mut footprint, &tenant)?;
    let partial = partial_bytes(store, &tenant, Some(planned.name))?;
    within(&tenant, "this build", quota, footprint.bytes().saturating_add(partial))
}

/// Whether a tenant, whose quota in the store this is, may have `bytes` bytes more than the store has of it.
/// To be asked during a [`Store::counting_turn`] that lasts until they are there.
///
/// # Errors
/// It would have too much, or that cannot be counted.
pub fn check_file(
    store: &Store,
    (tenant, quota): (&TenantName, Option<ByteSize>),
    with: &'static str,
    bytes: u64,
) -> Result<(), StoreQuotaError> {
    let Some(quota) = quota else { return Ok(()) };
    let stored = stored_bytes(store, tenant)?;
    let partial = partial_bytes(store, tenant, None)?;
    within(tenant, with, quota, stored.saturating_add(bytes.saturating_add(partial)))
}

fn within(
    tenant: &TenantName,
    with: &'static str,
    quota: ByteSize,
    needed: u64,
) -> Result<(), StoreQuotaError> {
    let quota = quota.bytes();
    if needed > quota {
        return Err(StoreQuotaError::Exceeded { tenant: tenant.clone(), with, quota, needed });
    }
    Ok(())
}

fn add_all<'a>(
    store: &Store,
    footprint: &mut Footprint,
    mut kept: impl Iterator<Item = Kept<'a>>,
) -> Result<(), StoreQuotaError> {
    Ok(kept.try_for_each(|kept| footprint.add(store, kept.index, kept.image))?)
}

fn add_checkpoints(
    store: &Store,
    footprint: &mut Footprint,
    tenant: &TenantName,
) -> Result<(), StoreQuotaError> {
    let checkpoints = store.list_checkpoints()?.records;
    let of_tenant = |kept: &Kept<'_>| tenant_of(kept.config) == *tenant;
    add_all(store, footprint, checkpoints.iter().map(Kept::from).filter(of_tenant))
}

impl<'a> From<&'a CheckpointRecord> for Kept<'a> {
    fn from(record: &'a CheckpointRecord) -> Self {
        Self { config: &record.config, index: record.index, image: Some(record.image) }
    }
}

struct Kept<'a> {
    config: &'a Value,
    index: IndexId,
    image: Option<ImageId>,
}

impl<'a> From<&'a Version> for Kept<'a> {
    fn from(version: &'a Version) -> Self {
        Self { config: &version.config, index: version.index, image: version.image }
    }
}

/// The versions of a function that a garbage collection leaves: the others cost nobody's quota.
fn versions(record: &FunctionRecord) -> Vec<Version> {
    let surplus = record.surplus(VERSIONS_KEPT);
    let mut versions = record.versions();
    versions.retain(|version| !surplus.contains(&version.number));
    versions
}

/// Those that stay when `planned` is stored.
fn kept_of(record: &FunctionRecord, planned: &Planned<'_>) -> Vec<Version> {
    let is_replaced = record.name.as_str() == planned.name
        && (record.index, record.image) != (planned.index, planned.image);
    if is_replaced { record.beside_a_new_one(VERSIONS_KEPT) } else { versions(record) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;
    use std::path::Path;
    use thaw_store::index::{Attributes, Content, Node};
    use thaw_store::{Domain, NewFunction, Tree};

    const KIB: u64 = 1 << 10;

    fn index_of(store: &Store, contents: &[Vec<u8>]) -> IndexId {
        let mut session = store.session().unwrap();
        let mut tree = Tree::new();
        for (number, content) in contents.iter().enumerate() {
            let blob = session.put_blob(content, &Domain::shared()).unwrap();
            let attributes = Attributes::root(0o644);
            let node = Node { content: Content::Regular(blob), attributes };
            tree.add_at(Path::new(&format!("/{number}")), node).unwrap();
        }
        session.put_index(&tree).unwrap()
    }

    fn put(store: &Store, name: &str, domain: Option<&str>, contents: &[Vec<u8>]) -> IndexId {
        let index = index_of(store, contents);
        let sharing = domain.map_or(json!({}), |domain| json!({ "domain": domain }));
        let config = json!({ "config": { "sharing": sharing } });
        let new = NewFunction { name: Name::new(name).unwrap(), config, index, image: None };
        store.session().unwrap().put_function(new).unwrap();
        index
    }

    fn file(letter: u8, kibibytes: u64) -> Vec<u8> {
        vec![letter; (kibibytes * KIB) as usize]
    }

    #[test]
    fn a_file_counts_once_for_each_tenant_that_has_it() {
        let directory = tempfile::tempdir().unwrap();
        let store = Store::open(directory.path()).unwrap();
        let (large, small) = (file(b'a', 1024), file(b'b', 256));
        put(&store, "one", Some("x"), std::slice::from_ref(&large));
        put(&store, "two", Some("x"), &[large.clone(), small.clone()]);
        put(&store, "three", None, &[large]);
        let measured = StoreUse::default();
        let found = measured.measure(&store).unwrap();
        let tenant = |name: &str| TenantName(Some(name.parse().unwrap()));
        // Beside the files there are indexes of a few kilobytes.
        let near = |found: TenantStore, functions, kib: u64| {
            assert_eq!(found.functions, functions);
            assert!((kib * KIB..(kib + 64) * KIB).contains(&found.bytes), "{found:?}");
        };
        near(found[&tenant("x")], 2, 1280);
        near(found[&TenantName::default()], 1, 1024);
        put(&store, "four", Some("x"), &[file(b'c', 512)]);
        near(measured.measure(&store).unwrap()[&tenant("x")], 3, 1792);
    }

    #[test]
    fn a_tenant_may_have_so_much_and_no_more() {
        let directory = tempfile::tempdir().unwrap();
        let store = Store::open(directory.path()).unwrap();
        put(&store, "one", Some("x"), &[file(b'a', 1024)]);
        put(&store, "other", Some("y"), &[file(b'z', 4096)]);
        let quotas = Quotas::parse("t".as_ref(), "[domain.x]\nstore = \"2MiB\"").unwrap();
        let domains = ["x", "y"].map(|name| name.parse::<DomainName>().unwrap());
        let check = |name, domain: Option<&DomainName>, index| {
            check(&store, &quotas, &Planned { name, domain, index, image: None })
        };
        let (fits, large) = (file(b'b', 512), file(b'c', 1024));
        let fitting = index_of(&store, &[file(b'a', 1024), fits]);
        check("two", Some(&domains[0]), fitting).unwrap();
        let large = index_of(&store, &[large]);
        let error = check("two", Some(&domains[0]), large).unwrap_err();
        assert!(matches!(&error, StoreQuotaError::Exceeded { quota, .. } if *quota == 2048 * KIB));
        let text = error.to_string();
        assert!(text.contains("domain `x` is 2.0 MiB") && text.contains("have 2.0 MiB"), "{text}");
        // In place of the present version it is no smaller: that one is kept as well.
        assert!(check("one", Some(&domains[0]), large).is_err());
        check("two", Some(&domains[1]), large).unwrap();
        check("two", None, large).unwrap();
    }

    #[test]
    fn a_file_needs_room_beside_all_that_its_tenant_has() {
        let directory = tempfile::tempdir().unwrap();
        let store = Store::open(directory.path()).unwrap();
        put(&store, "one", Some("x"), &[file(b'a', 1024)]);
        put(&store, "other", Some("y"), &[file(b'z', 4096)]);
        put(&store, "two", Some("x"), &[file(b'b', 512)]);
        let name = TenantName(Some("x".parse().unwrap()));
        let has = StoreUse::default().measure(&store).unwrap()[&name].bytes;
        assert!(has >= 1536 * KIB, "{has}");
        let quota = Some(ByteSize(2048 * KIB));
        let check = |bytes| check_file(&store, (&name, quota), "a prefetch file", bytes);
        check(2048 * KIB - has).unwrap();
        let text = check(2048 * KIB - has + 1).unwrap_err().to_string();
        assert!(text.contains("`x` is 2.0 MiB") && text.contains("with a prefetch file"), "{text}");
        assert!(check(u64::MAX).is_err());
        // Nothing is counted for one without a quota.
        let free = (&TenantName::default(), None);
        check_file(&store, free, "a prefetch file", u64::MAX).unwrap();
    }

    #[test]
    fn a_damaged_index_does_not_keep_others_from_being_built() {
        let directory = tempfile::tempdir().unwrap();
        let store = Store::open(directory.path()).unwrap();
        let damaged = put(&store, "one", None, &[file(b'a', 64)]);
        let path = directory.path().join("indexes").join(damaged.to_string());
        std::fs::remove_file(&path).unwrap();
        std::fs::write(&path, b"damaged").unwrap();
        assert_eq!(StoreUse::default().measure(&store).unwrap().len(), 1);
    }
}
