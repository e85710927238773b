//! What every instance of a function gets, however it is booted.

use super::launch::LaunchError;
use super::options::Techniques;
use crate::inject::Proxy;
use crate::logs::{FunctionLog, InstanceLog, InstancePipes, Logs};
use crate::tenants::{Lease, Tenant};
use std::io;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};
use thaw_abi::control::{FLAG_SAY_DENIALS, FLAG_SAY_LACKS};
use thaw_home::config::{EntryKind, FunctionConfig, FunctionName, VolumeConfig};
use thaw_home::secrets::{SecretSource, SecretStore};
use thaw_sandbox::{EgressPolicy, Processes, ResourceLimits, Secrets, ThawOptions, VolumeMount};
use thaw_store::Name;

/// How long nobody tries again to open volumes that could not be opened.
const OPEN_AGAIN_AFTER: Duration = Duration::from_secs(1);

/// The limits, rights and names of each instance.
#[derive(Clone)]
pub(super) struct InstanceTerms {
    pub function: FunctionName,
    /// The program and its arguments.
    pub command: Vec<String>,
    /// The function's name for the lines of its kernels.
    pub label: Arc<str>,
    pub limits: ResourceLimits,
    pub cpu_time_limit: Option<Duration>,
    /// Which zygotes it is booted in.
    pub processes: Processes,
    /// The port that the program listens on.
    pub port: u16,
    flags: u32,
    pub egress: Arc<EgressPolicy>,
    /// The secrets that the program reads.
    secrets: Vec<Name>,
    /// Where they are; empty until it is known.
    secret_store: Arc<SecretSource>,
    /// The volumes that the program uses.
    volumes: Vec<VolumeConfig>,
    /// The same, open; empty until they can be used.
    opened_volumes: Arc<OnceLock<Vec<VolumeMount>>>,
    /// Why they could not be opened, and when that was tried last.
    volume_problem: Arc<Mutex<Option<(Instant, String)>>>,
    pub tenant: Arc<Tenant>,
}

impl InstanceTerms {
    /// Those that the configuration of a function says, within what its tenant may have.
    pub fn new(config: &FunctionConfig, tenant: Arc<Tenant>, techniques: Techniques) -> Self {
        let secret_store: Arc<SecretSource> = Arc::default();
        let proxy = Proxy::of_function(config, &secret_store, tenant.injected());
        // In a sandbox people try programs that may not be there.
        let says_lacks = match config.entry.kind {
            EntryKind::Sandbox => 0,
            _ => FLAG_SAY_LACKS,
        };
        Self {
            function: config.name.clone(),
            command: config.command.clone(),
            label: config.name.as_str().into(),
            limits: config.limits.of_an_instance(),
            cpu_time_limit: config.limits.cpu_time.map(|span| span.0),
            processes: config.processes(),
            port: config.port_number(),
            flags: thaw_home::debug::flags()
                | FLAG_SAY_DENIALS
                | says_lacks
                | config.entry_flags()
                | techniques.flags(),
            egress: config.egress.policy_within(&config.name, tenant.egress(), proxy),
            secrets: config.secrets.names.clone(),
            secret_store,
            volumes: config.volumes.clone(),
            opened_volumes: Arc::default(),
            volume_problem: Arc::default(),
            tenant,
        }
    }

    /// The same with other limits.
    pub fn limited_to(self, limits: ResourceLimits) -> Self {
        Self { limits, ..self }
    }

    /// Room of the tenant for something that is kept ready.
    pub fn lease(&self) -> Option<Lease> {
        self.tenant.room().try_enter(self.limits.memory)
    }

    /// Something is kept ready now: somebody who waits for room can have it ended.
    pub fn kept_ready(&self) {
        self.tenant.room().stir();
    }

    /// Copies get their secrets from there, and their volumes from beside them.
    pub fn read_secrets_from(&self, store: &Arc<SecretStore>) {
        // Who boots hears why they cannot be used, and the log says so.
        let _ = self.open_volumes(store);
        self.secret_store.set(store);
    }

    /// Opens the volumes, unless they are open, or that has failed just now: what prevents it may pass,
    /// such as a snapshot that is being made.
    fn open_volumes(&self, store: &SecretStore) -> Result<(), LaunchError> {
        let mut problem = self.volume_problem.lock().unwrap_or_else(PoisonError::into_inner);
        if self.opened_volumes.get().is_some() {
            return Ok(());
        }
        if let Some((_, why)) = problem.as_ref().filter(|(at, _)| at.elapsed() < OPEN_AGAIN_AFTER) {
            return Err(LaunchError::Lacking(why.clone()));
        }
        let share = self.tenant.volumes();
        match store.volumes().of_function(&self.function, &self.volumes, share) {
            Ok(opened) => {
                *problem = None;
                // Nobody else sets it: the lock is held.
                let _ = self.opened_volumes.set(opened);
                Ok(())
            }
            Err(error) => {
                let why = error.to_string();
                self.say_volume_problem(problem.replace((Instant::now(), why.clone())), &why);
                Err(LaunchError::Lacking(why))
            }
        }
    }

    /// Says in the log why volumes cannot be opened, unless that was so when it was tried before.
    fn say_volume_problem(&self, before: Option<(Instant, String)>, why: &str) {
        if before.is_none_or(|(_, before)| before != why) {
            let why = thaw_sandbox::escape(why.as_bytes());
            tracing::warn!("no instance of `{}` begins without its volumes: {why}", self.function);
        }
    }

    /// The function was removed: its instances get no secrets any more.
    pub fn withdraw_secrets(&self) {
        self.secret_store.withdraw();
    }

    /// The secrets as they are now; `None`: the program reads none. Reads a small file for each.
    ///
    /// # Errors
    /// One is not set.
    pub fn secrets(&self) -> Result<Option<Secrets>, LaunchError> {
        self.check_volumes()?;
        if self.secrets.is_empty() {
            return Ok(None);
        }
        let lacking = |why: String| LaunchError::Lacking(why);
        let store = self.secret_store.get();
        let store = store.ok_or_else(|| lacking("only a daemon has its secrets".to_owned()))?;
        let secrets = store.read(&self.function, &self.secrets);
        secrets.map(Some).map_err(|error| lacking(error.to_string()))
    }

    /// Whether the program uses volumes.
    pub fn has_volumes(&self) -> bool {
        !self.volumes.is_empty() || !self.mounts().is_empty()
    }

    /// The same with more volumes, and the number of the first of these.
    ///
    /// # Errors
    /// The function's own cannot be used.
    pub fn mounting(&self, more: &[VolumeMount]) -> Result<(Self, u32), LaunchError> {
        self.check_volumes()?;
        let mut all = self.mounts().to_vec();
        let first = u32::try_from(all.len()).expect("there are few");
        all.extend_from_slice(more);
        let opened_volumes = Arc::new(OnceLock::from(all));
        Ok((Self { opened_volumes, ..self.clone() }, first))
    }

    /// Whether all volumes can be used.
    fn check_volumes(&self) -> Result<(), LaunchError> {
        if !self.has_volumes() || self.opened_volumes.get().is_some() {
            return Ok(());
        }
        match self.secret_store.get() {
            Some(store) => self.open_volumes(store),
            None => Err(LaunchError::Lacking("only a daemon has its volumes".to_owned())),
        }
    }

    /// The volumes that every instance has, by number of the mount.
    ///
    /// # Errors
    /// One cannot be used.
    pub fn volumes(&self) -> Result<&[VolumeMount], LaunchError> {
        self.check_volumes()?;
        Ok(self.mounts())
    }

    fn mounts(&self) -> &[VolumeMount] {
        self.opened_volumes.get().map(Vec::as_slice).unwrap_or_default()
    }

    /// What every boot is told. A copy that was booted ahead has its pipes, and a
    /// template gets none.
    pub fn options<'a>(&'a self, pipes: Option<&'a InstancePipes>) -> ThawOptions<'a> {
        ThawOptions {
            streams: pipes.map(|pipes| [pipes.stdout(), pipes.stderr()]),
            limits: self.limits,
            cpu_time_limit: self.cpu_time_limit,
            flags: self.flags,
            hostname: "",
            secrets: None,
            resumed: &[],
            volumes: self.mounts(),
            egress: &self.egress,
            cores: self.tenant.cores(),
        }
    }
}

/// Where the output of a function's instances goes.
#[derive(Clone)]
pub(super) struct FunctionOutput {
    pub logs: Arc<Logs>,
    pub log: Arc<FunctionLog>,
}

impl FunctionOutput {
    /// Pipes for the output of one copy.
    pub fn pipes(&self) -> Result<InstancePipes, LaunchError> {
        self.logs.pipes(&self.log).map_err(|error| {
            LaunchError::Failed(format!(
                "cannot make pipes for the output of an instance ({error}); raise the limit of open files"
            ))
        })
    }

    /// The log of an instance that an earlier daemon has booted, whose pipes end here.
    pub fn adopt(&self, readers: [OwnedFd; 2]) -> io::Result<InstanceLog> {
        self.logs.adopt(&self.log, readers)
    }
}

/// Where the output of a copy goes.
pub(super) struct Output {
    pub log: InstanceLog,
    /// This process's ends of the pipes, as long as it has them.
    pub pipes: Option<InstancePipes>,
}

impl From<InstancePipes> for Output {
    fn from(pipes: InstancePipes) -> Self {
        Self { log: pipes.log(), pipes: Some(pipes) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tenants::Tenants;
    use std::future::ready;
    use thaw_home::config::Quotas;
    use thaw_home::tenants::TenantName;

    /// While it is made it has the room, and there is nothing yet that could be ended.
    #[tokio::test(flavor = "current_thread")]
    async fn who_waits_for_room_hears_of_what_is_kept_ready() {
        let tenants = Tenants::default();
        tenants.set(Quotas::parse("t".as_ref(), "[default]\ninstances = 1").unwrap());
        let tenant = tenants.of(TenantName::default());
        let text = "name = \"f\"\ncommand = [\"/app\"]\nport = 8080\n[runtime]\nkind = \"binary\"";
        let config = FunctionConfig::parse("thaw.toml".as_ref(), text).unwrap();
        let techniques = Techniques { lazy_mapping: true, io_cache: true };
        let terms = InstanceTerms::new(&config, tenant.clone(), techniques);
        let lease = terms.lease().unwrap();
        let mut turn = tenant.room().queue(0);
        let stirred = tenant.room().stirred();
        tokio::pin!(stirred);
        tokio::select! {
            biased;
            () = &mut stirred => panic!("there is nothing to end yet"),
            () = ready(()) => {}
        }
        terms.kept_ready();
        stirred.await;
        // Whoever has heard of it ends it, and has its room.
        assert!(terms.lease().is_none() && turn.try_lease().is_none());
        drop(lease);
        assert!(turn.try_lease().is_some());
    }
}
