//! Which version of a function gets its requests: what can be done about it, and what is known.
//!
//! The record in the store says so. Whoever changes that has the daemon compare afterwards
//! ([`Catalog::reload`]).

use serde::{Deserialize, Serialize};
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};
use thaw_home::config::{EntryKind, FunctionName};
use thaw_home::function::{BuiltFunction, FunctionError, StoredFunction};
use thaw_node::catalog::Catalog;
use thaw_node::health::Requests;
use thaw_node::service::Services;
use thaw_store::{
    FunctionRecord, HeaderRule, Name, RolledBack, Share, Store, StoreError, Version, VersionError,
};

/// The versions of a function, and which of them get its requests.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
pub struct Deployment {
    /// The function.
    pub function: String,
    /// The number of the active version.
    pub active: u32,
    /// The number of the version that was active before, to which one can go back.
    pub before: Option<u32>,
    /// All versions, the oldest first.
    pub versions: Vec<VersionInfo>,
    /// What was taken out of service for its failures, since somebody last changed this.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(with = "Option<serde_json::Value>")]
    pub rolled_back: Option<RolledBack>,
}

/// A version of a function.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
pub struct VersionInfo {
    /// Its number.
    pub number: u32,
    /// A name for it.
    pub label: Option<String>,
    /// Its image.
    pub image: Option<String>,
    /// When it was built, or last frozen, milliseconds since the epoch.
    pub created_ms: u64,
    /// Of a hundred requests so many go there.
    pub percent: u8,
    /// Requests with this header go there in any case.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(with = "Option<serde_json::Value>")]
    pub header: Option<HeaderRule>,
    /// Why it gets no requests any more, if that was not somebody's wish.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub problem: Option<String>,
    /// Where it was built from; `None`: it was pulled, or its record cannot be read.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub source: Option<String>,
    /// Live instances; `None`: no daemon serves it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub instances: Option<usize>,
    /// Requests since the daemon serves it; `None`: as above.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub requests: Option<Requests>,
}

/// Why nothing was changed.
#[derive(Debug, thiserror::Error)]
pub enum DeployError {
    /// There is no such function, or its record cannot be changed.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// There is no such version, or it cannot get requests.
    #[error(transparent)]
    Version(#[from] VersionError),
    /// The version cannot be read.
    #[error(transparent)]
    Function(#[from] FunctionError),
    /// A share needs requests that come one by one, the same way.
    #[error("version {version} of `{function}` cannot have a share: {reason}")]
    NoShare {
        /// The function.
        function: String,
        /// The version.
        version: u32,
        /// Why.
        reason: &'static str,
    },
}

impl DeployError {
    /// Whether what was named does not exist.
    pub fn is_not_found(&self) -> bool {
        match self {
            Self::Store(error) => error.is_not_found(),
            Self::Version(error) => matches!(error, VersionError::Unknown { .. }),
            Self::Function(_) | Self::NoShare { .. } => false,
        }
    }
}

/// The versions of a function.
///
/// # Errors
/// There is no such function.
pub fn versions(store: &Store, function: &str) -> Result<Deployment, DeployError> {
    Ok(Deployment::of(&store.get_function(&named(function)?)?))
}

/// Sends all requests of a function to a version, by its number or label.
///
/// # Errors
/// There is no such function or version, or it cannot get requests.
pub fn activate(store: &Store, function: &str, version: &str) -> Result<Deployment, DeployError> {
    change(store, function, |record| {
        let number = record.find(version)?;
        readable(record, number)?;
        Ok(record.activate(number)?)
    })
}

/// Takes back the last change: ends shares if there are any, and otherwise goes back to the
/// version that was active before.
///
/// # Errors
/// There is no such function, or no version to go back to.
pub fn roll_back(store: &Store, function: &str) -> Result<Deployment, DeployError> {
    change(store, function, |record| Ok(record.roll_back()?))
}

/// Gives a version of a function a share of the requests: `percent` of a hundred, and those with
/// a header. A share of nothing ends it.
///
/// # Errors
/// There is no such function or version, or it cannot have that share.
pub fn split(
    store: &Store,
    function: &str,
    version: &str,
    percent: u8,
    header: Option<HeaderRule>,
) -> Result<Deployment, DeployError> {
    change(store, function, |record| {
        let number = record.find(version)?;
        let (active, other) = (readable(record, record.number)?, readable(record, number)?);
        let no_share = |reason| DeployError::NoShare {
            function: function.to_owned(),
            version: number,
            reason,
        };
        if (active.entry.kind, active.listen) != (other.entry.kind, other.listen) {
            return Err(no_share(
                "its `kind` or `listen` is not that of the active version; activate it instead",
            ));
        }
        if header.is_some() && matches!(active.entry.kind, EntryKind::Tcp | EntryKind::Udp) {
            return Err(no_share("its clients send no headers; give it a percentage only"));
        }
        Ok(record.share(number, percent, header)?)
    })
}

fn change(
    store: &Store,
    function: &str,
    change: impl FnOnce(&mut FunctionRecord) -> Result<(), DeployError>,
) -> Result<Deployment, DeployError> {
    let mut session = store.session()?;
    let record = session.change_function(&named(function)?, change)?;
    Ok(Deployment::of(&record))
}

fn named(function: &str) -> Result<Name, StoreError> {
    Ok(Name::new(function)?)
}

/// The configuration of a version.
fn readable(
    record: &FunctionRecord,
    number: u32,
) -> Result<thaw_home::config::FunctionConfig, DeployError> {
    let found = record.versions().into_iter().find(|version| version.number == number);
    let found = found.ok_or_else(|| VersionError::Unknown {
        function: record.name.clone(),
        wanted: number.to_string(),
    })?;
    Ok(BuiltFunction::from_version(&record.name, found)?.function.config)
}

impl Deployment {
    fn of(record: &FunctionRecord) -> Self {
        let shared: u32 = record.split.iter().map(|share| u32::from(share.percent)).sum();
        let info = |version: Version| {
            let share = record.split.iter().find(|share| share.version == version.number);
            let is_active = version.number == record.number;
            let left = u8::try_from(100_u32.saturating_sub(shared)).unwrap_or(0);
            VersionInfo::of(version, if is_active { left } else { 0 }, share)
        };
        Self {
            function: record.name.to_string(),
            active: record.number,
            before: record.before(),
            versions: record.versions().into_iter().map(info).collect(),
            rolled_back: record.rolled_back.clone(),
        }
    }

    /// The same with what a daemon knows.
    pub fn with_live(mut self, services: &Services) -> Self {
        let Some(served) = services.served(&self.function) else { return self };
        for service in served.services() {
            let info = self.versions.iter_mut().find(|info| info.number == service.version());
            if let Some(info) = info {
                info.instances = Some(0);
                info.requests = Some(service.requests());
            }
        }
        // A version that gets no requests may have sandboxes.
        for service in services.versions_of(&self.function) {
            let info = self.versions.iter_mut().find(|info| info.number == service.version());
            if let Some(info) = info {
                *info.instances.get_or_insert_default() += service.instance_count();
            }
        }
        self
    }
}

impl VersionInfo {
    fn of(version: Version, left: u8, share: Option<&Share>) -> Self {
        let stored: Option<StoredFunction> = serde_json::from_value(version.config).ok();
        let source = stored.map(|stored| stored.source).filter(|path| !path.as_os_str().is_empty());
        Self {
            number: version.number,
            label: version.label.map(|label| label.to_string()),
            image: version.image.map(|image| image.to_string()),
            created_ms: version.created_ms,
            percent: share.map_or(left, |share| share.percent),
            header: share.and_then(|share| share.header.clone()),
            problem: version.problem,
            source: source.map(|path| path.display().to_string()),
            instances: None,
            requests: None,
        }
    }
}

/// Takes versions out of service of which too many requests fail, until the task is dropped.
/// `on_change` is called after each.
pub(crate) async fn take_out_failing(
    catalog: Arc<Catalog>,
    on_change: impl Fn() + Send + Sync + 'static,
) {
    let on_change = Arc::new(on_change);
    loop {
        let (function, version, reason) = catalog.node().failures().next().await;
        let (catalog, on_change) = (catalog.clone(), on_change.clone());
        let taken = tokio::task::spawn_blocking(move || {
            take_out(&catalog, &function, version, &reason, &*on_change);
        });
        if let Err(error) = taken.await {
            tracing::error!("a version that fails could not be taken out of service: {error}");
        }
    }
}

fn take_out(
    catalog: &Arc<Catalog>,
    function: &FunctionName,
    version: u32,
    reason: &str,
    on_change: &dyn Fn(),
) {
    match take_out_of_store(catalog.store(), function, version, reason) {
        Ok(Taken::Out { to }) => {
            catalog.node().metrics().rolled_back(function);
            tracing::warn!(%function, version, "took the version out of service, and version {to} gets its requests: {reason}");
        }
        // It is served still because the daemon could not read what it should serve.
        Ok(Taken::Before) => {}
        Ok(Taken::Kept(why)) => {
            tracing::warn!(%function, version, "{reason}; the version stays in service: {why}");
            return;
        }
        Err(error) => {
            tracing::error!(%function, version, "{reason}; the version could not be taken out of service, which is tried again: {error}");
            return report_again(catalog.services(), function, version);
        }
    }
    match catalog.reload() {
        Ok(_) => on_change(),
        Err(error) => {
            tracing::error!("cannot reload: {error}");
            report_again(catalog.services(), function, version);
        }
    }
}

/// Has a version that could not be taken out of service reported again.
fn report_again(services: &Services, function: &FunctionName, version: u32) {
    let served = services.served(function.as_str());
    let versions = served.iter().flat_map(|served| served.services());
    versions.filter(|service| service.version() == version).for_each(|it| it.report_again());
}

/// What became of a version that fails.
#[derive(Debug, PartialEq, Eq)]
enum Taken {
    /// Another one gets its requests.
    Out { to: u32 },
    /// It was taken out before, or it is gone.
    Before,
    /// It stays, with the reason.
    Kept(&'static str),
}

fn take_out_of_store(
    store: &Store,
    function: &FunctionName,
    version: u32,
    reason: &str,
) -> Result<Taken, DeployError> {
    let mut taken = Taken::Kept("no other version was active before it");
    change(store, function.as_str(), |record| {
        if record.number != version && !record.shares(version) {
            taken = Taken::Before;
        } else if record.number == version && !is_watched(record)? {
            taken = Taken::Kept("it was active for longer than `watch` in [rollback]");
        } else if let Some(to) = record.take_out(version, reason) {
            taken = Taken::Out { to };
        }
        Ok(())
    })?;
    Ok(taken)
}

/// Whether the active version is new.
fn is_watched(record: &FunctionRecord) -> Result<bool, DeployError> {
    let rollback = readable(record, record.number)?.rollback.unwrap_or_default();
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let active_for = now.saturating_sub(Duration::from_millis(record.activated_ms));
    Ok(active_for <= rollback.watch.0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;
    use std::os::unix::fs::FileExt;
    use thaw_home::config::FunctionConfig;
    use thaw_store::{NewFunction, Tree};

    /// A function whose versions have these further keys; the last one is active.
    fn store(versions: &[&str]) -> (tempfile::TempDir, Store) {
        let directory = tempfile::tempdir().unwrap();
        let store = Store::open(directory.path()).unwrap();
        let mut session = store.session().unwrap();
        for (number, keys) in versions.iter().enumerate() {
            let text =
                format!("name = \"f\"\ncommand = [\"x\"]\nport = 80\nrootfs = \"./r\"\n{keys}");
            let config = FunctionConfig::parse("thaw.toml".as_ref(), &text).unwrap();
            let config = json!({ "config": config, "environment": {}, "source": "/s" });
            let index = session.put_index(&Tree::new()).unwrap();
            let image = session.new_image_file().unwrap();
            image.file().write_all_at(&[number as u8 + 1], 0).unwrap();
            let image = Some(session.commit_image(image).unwrap());
            let name = Name::new("f").unwrap();
            session.put_function(NewFunction { name, config, index, image }).unwrap();
        }
        drop(session);
        (directory, store)
    }

    fn canary() -> Option<HeaderRule> {
        Some(HeaderRule::parse("x=y").unwrap())
    }

    #[test]
    fn a_share_needs_requests_that_come_the_same_way() {
        let (_directory, store) = store(&["listen = \"127.0.0.1:1\"", "", ""]);
        let error = split(&store, "f", "1", 5, None).unwrap_err().to_string();
        assert!(error.contains("`kind` or `listen`") && error.contains("activate it"), "{error}");
        let deployment = split(&store, "f", "2", 5, canary()).unwrap();
        let shares: Vec<_> = deployment.versions.iter().map(|version| version.percent).collect();
        assert_eq!((shares, deployment.before), (vec![0, 5, 95], Some(2)));
        assert!(split(&store, "f", "9", 5, None).unwrap_err().is_not_found());
        assert!(activate(&store, "g", "1").unwrap_err().is_not_found());
    }

    #[test]
    fn clients_without_headers_are_chosen_by_chance_only() {
        let tcp = "listen = \"127.0.0.1:1\"\nentry = { kind = \"tcp\" }";
        let (_directory, store) = store(&[tcp, tcp]);
        let error = split(&store, "f", "1", 5, canary()).unwrap_err().to_string();
        assert!(error.contains("send no headers"), "{error}");
        split(&store, "f", "1", 5, None).unwrap();
    }

    #[test]
    fn an_active_version_is_watched_for_a_while_only() {
        let (_directory, store) =
            store(&["", "[rollback]\nwatch = \"1h\"", "[rollback]\nwatch = \"0s\""]);
        let name: FunctionName = "f".parse().unwrap();
        // The clock has to go on.
        std::thread::sleep(Duration::from_millis(2));
        let taken = |version| take_out_of_store(&store, &name, version, "it failed").unwrap();
        assert!(matches!(taken(3), Taken::Kept(why) if why.contains("`watch`")));
        activate(&store, "f", "2").unwrap();
        assert_eq!(taken(2), Taken::Out { to: 3 });
        let known = versions(&store, "f").unwrap();
        assert_eq!((known.active, known.rolled_back.unwrap().version), (3, 2));
        assert_eq!(known.versions[1].problem.as_deref(), Some("it failed"));
        assert_eq!(taken(2), Taken::Before);
    }

    #[test]
    fn the_only_version_stays() {
        let (_directory, store) = store(&["[rollback]\nwatch = \"1h\""]);
        let taken = take_out_of_store(&store, &"f".parse().unwrap(), 1, "it failed").unwrap();
        assert_eq!(taken, Taken::Kept("no other version was active before it"));
    }
}
