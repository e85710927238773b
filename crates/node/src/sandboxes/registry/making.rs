//! New sandboxes: of a function, of a checkpoint, or of another one.

use super::{ForkedFrom, NewSandbox, SandboxInfo, SandboxProblem, Sandboxes, deadline, now_ms};
use crate::catalog::OpenedCheckpoint;
use crate::service::Service;
use crate::to_its_end::to_its_end;
use std::collections::BTreeSet;
use std::sync::{Arc, MutexGuard};
use thaw_store::Name;

/// Most sandboxes of a node.
const SANDBOXES_MAX: usize = 10_000;
/// Most bytes of names and values of metadata of one.
const METADATA_MAX: usize = 16 << 10;

/// Sandboxes that are being made.
#[derive(Default)]
pub(super) struct Making {
    count: usize,
    /// The names that were asked for.
    names: BTreeSet<String>,
}

impl Making {
    fn remove(&mut self, name: &str) {
        self.count -= 1;
        self.names.remove(name);
    }
}

/// One that is being made, until this is dropped.
struct BeingMade {
    /// None: it is there.
    sandboxes: Option<Arc<Sandboxes>>,
    name: String,
}

impl BeingMade {
    /// It is there.
    fn end(mut self, making: &mut Making) {
        self.sandboxes = None;
        making.remove(&self.name);
    }
}

impl Drop for BeingMade {
    fn drop(&mut self) {
        if let Some(sandboxes) = self.sandboxes.take() {
            sandboxes.making().remove(&self.name);
        }
    }
}

impl Sandboxes {
    /// Makes one. It is done to its end, also if nobody waits for that any more: no instance may stay
    /// that nobody knows.
    ///
    /// # Errors
    /// See [`SandboxProblem`].
    pub async fn create(self: &Arc<Self>, new: NewSandbox) -> Result<SandboxInfo, SandboxProblem> {
        let this = self.clone();
        to_its_end(async move { this.create_now(new).await }).await
    }

    async fn create_now(self: &Arc<Self>, new: NewSandbox) -> Result<SandboxInfo, SandboxProblem> {
        let made = self.begin(&new)?;
        let unknown = || {
            SandboxProblem::Wrong(format!(
                "no function is named `{}`; `thaw list` shows those there are, and `thaw sandbox \
                 create` makes one of a container image",
                new.function
            ))
        };
        let service = self.services.route(&new.function).ok_or_else(unknown)?;
        let egress = new.egress_wish(&service)?;
        let volumes = new.wanted_volumes(&service, Vec::new())?;
        let booted = service.boot_held(egress, volumes).await;
        let instance = booted.map_err(SandboxProblem::Refused)?;
        self.adopt(&service, instance, (new, made), None).await
    }

    /// Makes one of a checkpoint: what boots its instances, and the service that they belong to.
    ///
    /// # Errors
    /// See [`SandboxProblem`].
    pub async fn create_of(
        self: &Arc<Self>,
        new: NewSandbox,
        opened: OpenedCheckpoint,
    ) -> Result<SandboxInfo, SandboxProblem> {
        let this = self.clone();
        to_its_end(async move { this.create_of_now(new, opened).await }).await
    }

    async fn create_of_now(
        self: &Arc<Self>,
        new: NewSandbox,
        OpenedCheckpoint { service, launcher, volumes }: OpenedCheckpoint,
    ) -> Result<SandboxInfo, SandboxProblem> {
        let made = self.begin(&new)?;
        if !new.function.is_empty() && new.function != service.name().as_str() {
            return Err(SandboxProblem::Wrong(format!(
                "the checkpoint is of `{}`, and not of `{}`; leave the function out",
                service.name(),
                new.function
            )));
        }
        let egress = new.egress_wish(&service)?;
        let volumes = new.wanted_volumes(&service, volumes)?;
        let booted = service.boot_held_of(launcher, egress, volumes).await;
        let instance = booted.map_err(SandboxProblem::Refused)?;
        self.adopt(&service, instance, (new, made), None).await
    }

    /// Makes a sandbox of a copy of another one, with all that it has in memory.
    ///
    /// # Errors
    /// See [`SandboxProblem`].
    pub async fn fork(
        self: &Arc<Self>,
        name: &str,
        new_name: &str,
    ) -> Result<SandboxInfo, SandboxProblem> {
        let (this, name, new_name) = (self.clone(), name.to_owned(), new_name.to_owned());
        to_its_end(async move { this.fork_now(&name, &new_name).await }).await
    }

    async fn fork_now(
        self: &Arc<Self>,
        name: &str,
        new_name: &str,
    ) -> Result<SandboxInfo, SandboxProblem> {
        let info = self.find(name)?;
        let new = NewSandbox {
            name: new_name.to_owned(),
            function: info.function.to_string(),
            timeout_s: info.timeout_s,
            on_timeout: info.on_timeout,
            metadata: info.metadata.clone(),
            // Copies keep the rules.
            ..NewSandbox::default()
        };
        let made = self.begin(&new)?;
        let service = self.service(&info);
        let service = service.ok_or_else(|| SandboxProblem::Unknown(name.to_owned()))?;
        service.reach(info.instance).await.map_err(SandboxProblem::Refused)?;
        let forked = service.fork_held(info.instance).await;
        let instance = forked.map_err(SandboxProblem::Refused)?;
        let forked_from = ForkedFrom { name: info.name, instance: info.instance };
        self.adopt(&service, instance, (new, made), Some(forked_from)).await
    }

    /// Begins to make one, for which there is room, and whose name nobody else gets meanwhile.
    fn begin(self: &Arc<Self>, new: &NewSandbox) -> Result<BeingMade, SandboxProblem> {
        if !new.name.is_empty()
            && let Err(error) = Name::new(&new.name)
        {
            return Err(SandboxProblem::Wrong(error.to_string()));
        }
        let bytes: usize = new.metadata.iter().map(|(name, value)| name.len() + value.len()).sum();
        if bytes > METADATA_MAX {
            return Err(SandboxProblem::Wrong(format!(
                "the metadata has {bytes} bytes, and at most {METADATA_MAX} are kept; keep less"
            )));
        }
        if new.timeout_s == Some(0) {
            return Err(SandboxProblem::Wrong("a timeout of 0 leaves no time; give some".into()));
        }
        let (mut making, mut all) = (self.making(), self.all.lock());
        let is_there = |info: &SandboxInfo| self.services.may_have_instance(info.instance);
        if making.names.contains(&new.name) || all.get(&new.name).is_some_and(is_there) {
            return Err(SandboxProblem::Refused(format!(
                "there is a sandbox `{}` already; name another one, or end it with `thaw sandbox \
                 kill`",
                new.name
            )));
        }
        if all.len() + making.count >= SANDBOXES_MAX {
            return Err(SandboxProblem::Refused(format!(
                "this node has {SANDBOXES_MAX} sandboxes; end some"
            )));
        }
        // One whose instance has just ended does not have its name any more.
        all.remove(&new.name);
        making.count += 1;
        if !new.name.is_empty() {
            making.names.insert(new.name.clone());
        }
        Ok(BeingMade { sandboxes: Some(self.clone()), name: new.name.clone() })
    }

    fn making(&self) -> MutexGuard<'_, Making> {
        self.making.lock().expect("no holder panics")
    }

    async fn adopt(
        self: &Arc<Self>,
        service: &Service,
        instance: u64,
        (new, made): (NewSandbox, BeingMade),
        forked_from: Option<ForkedFrom>,
    ) -> Result<SandboxInfo, SandboxProblem> {
        let name = if new.name.is_empty() { format!("sb-{instance}") } else { new.name };
        service.name_host(instance, &name);
        let info = SandboxInfo {
            name: name.clone(),
            instance,
            function: service.name().clone(),
            version: service.version(),
            created_ms: now_ms(),
            deadline_ms: deadline(new.timeout_s),
            timeout_s: new.timeout_s,
            on_timeout: new.on_timeout,
            metadata: new.metadata,
            forked_from,
            paused: false,
            state: None,
            memory_kept: None,
            egress: None,
            usage: None,
            network: None,
            volumes: self.services.shared().own_volumes().of(instance),
        };
        let clash = {
            let (mut making, mut all) = (self.making(), self.all.lock());
            // It is counted once, and has its name, for whoever looks.
            made.end(&mut making);
            let clash = all.contains_key(&name);
            if !clash {
                all.insert(name.clone(), info.clone());
            }
            clash
        };
        if clash {
            service.kill(instance);
            return Err(SandboxProblem::Refused(format!("there is a sandbox `{name}` already")));
        }
        self.write().await;
        Ok(info)
    }
}
