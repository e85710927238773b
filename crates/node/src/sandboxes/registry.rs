//! Sandboxes: instances that somebody has asked for by name, and which stay until they are told
//! to end, or their time has come.
//!
//! What is known of them lies in a file, so that the next daemon knows them, too: it takes over
//! the instances that outlive this one, and those that are asleep.

mod bounds;
mod contents;
mod description;
mod file;
mod gone;
mod making;
mod timeouts;

pub use contents::Started;
pub use description::{ForkedFrom, NewSandbox, OnTimeout, SandboxInfo, SandboxProblem};
pub use file::{functions_of_sandboxes, versions_of_sandboxes};

use crate::remote::look_at_egress_bytes;
use crate::sandboxes::usage::usage_of;
use crate::service::{Service, Services};
use crate::to_its_end::to_its_end;
use file::Known;
use making::Making;
use std::mem;
use std::sync::{Arc, Mutex};
use std::time::{SystemTime, UNIX_EPOCH};
use thaw_home::state_file::StateFile;
use thaw_home::state_file::table::Table;
use timeouts::Times;

/// The sandboxes of a node.
pub struct Sandboxes {
    services: Arc<Services>,
    /// By their names, for the next daemon, too.
    all: StateFile<Known>,
    /// Those that are being made. Locked before `all`.
    making: Mutex<Making>,
    times: Times,
}

impl Sandboxes {
    /// The service of the instance of one, if that is there.
    fn service(&self, info: &SandboxInfo) -> Option<Arc<Service>> {
        self.services.service_with(&info.function, info.instance)
    }

    /// Whether there is one of this name, if only its file, whose function is not served yet.
    pub fn knows(&self, name: &str) -> bool {
        let is_there = |info: &SandboxInfo| self.services.may_have_instance(info.instance);
        self.all.lock().get(name).is_some_and(is_there)
    }

    /// All of them whose instances are there.
    pub fn list(&self) -> Vec<SandboxInfo> {
        // First: what is taken in meanwhile has a service then.
        let left = self.services.shared().left_ids();
        let all: Vec<_> = self.all.lock().values().cloned().collect();
        let shown = all.into_iter().filter_map(|info| {
            let service = self.service(&info);
            let is_there = service.is_some() || left.contains(&info.instance);
            is_there.then(|| self.with_state_of(info, service))
        });
        shown.collect()
    }

    /// One of them, by its name or the number of its instance.
    ///
    /// # Errors
    /// There is none.
    pub fn find(&self, name: &str) -> Result<SandboxInfo, SandboxProblem> {
        let info = self.noted(name)?;
        match self.service(&info) {
            Some(_) => Ok(self.with_state(info)),
            None if self.knows(&info.name) => Err(SandboxProblem::Refused(format!(
                "sandbox `{name}` is asleep, and its function `{}` is not served yet; try again, or \
                 end it with `thaw sandbox kill`",
                info.function
            ))),
            None => Err(SandboxProblem::Unknown(name.to_owned())),
        }
    }

    /// What was noted of one, whether it is there or not.
    fn noted(&self, name: &str) -> Result<SandboxInfo, SandboxProblem> {
        let found = {
            let all = self.all.lock();
            let by_number = || {
                let number = name.parse::<u64>().ok();
                all.values().find(|info| Some(info.instance) == number)
            };
            all.get(name).or_else(by_number).cloned()
        };
        found.ok_or_else(|| SandboxProblem::Unknown(name.to_owned()))
    }

    /// One of them with all that is known of it.
    ///
    /// # Errors
    /// There is none.
    pub async fn show(&self, name: &str) -> Result<SandboxInfo, SandboxProblem> {
        look_at_egress_bytes().await;
        let info = self.find(name)?;
        let service = self.service(&info);
        let service = service.ok_or_else(|| SandboxProblem::Unknown(name.to_owned()))?;
        let usage = Some(usage_of(&service, info.instance).await);
        let egress = self.services.shared().egress().info(info.instance);
        Ok(SandboxInfo { egress, usage, ..info })
    }

    fn with_state(&self, info: SandboxInfo) -> SandboxInfo {
        let service = self.service(&info);
        self.with_state_of(info, service)
    }

    fn with_state_of(&self, info: SandboxInfo, service: Option<Arc<Service>>) -> SandboxInfo {
        let state = service.as_ref().and_then(|service| service.state_of(info.instance));
        let state = state.map(|state| state.name().to_owned());
        let memory_kept = service.and_then(|service| service.why_memory_is_kept(info.instance));
        let network = self.services.shared().egress().bytes(info.instance);
        let volumes = self.services.shared().own_volumes().of(info.instance);
        SandboxInfo { state, memory_kept, network, volumes, ..info }
    }

    /// Somebody wants something of it, if it is one: it is not to be paused again.
    pub fn wanted(self: &Arc<Self>, instance: u64) {
        let mut all = self.all.lock();
        let is_it = |info: &&SandboxInfo| info.instance == instance && info.paused;
        let Some(name) = all.values().find(is_it).map(|info| info.name.clone()) else { return };
        if let Some(info) = all.get_mut(&name) {
            info.paused = false;
        }
        drop(all);
        self.all.write_soon();
    }

    /// Notes whether the next daemon is to pause one.
    async fn note_pause(self: &Arc<Self>, of: &SandboxInfo, paused: bool) {
        let note = |info: &mut SandboxInfo| mem::replace(&mut info.paused, paused);
        let was = same_one(&mut self.all.lock(), of).map(note);
        if was == Some(!paused) {
            self.write().await;
        }
    }

    /// Ends one.
    ///
    /// # Errors
    /// There is none.
    pub fn kill(self: &Arc<Self>, name: &str) -> Result<SandboxInfo, SandboxProblem> {
        let info = self.noted(name)?;
        if !self.knows(&info.name) {
            return Err(SandboxProblem::Unknown(name.to_owned()));
        }
        self.kill_noted(&info);
        Ok(info)
    }

    fn kill_noted(self: &Arc<Self>, info: &SandboxInfo) {
        // It may be asleep since before this daemon began.
        self.services.shared().end_left(info.instance);
        self.services.shared().own_volumes().release(info.instance);
        if let Some(service) = self.service(info) {
            service.kill(info.instance);
        }
        let mut all = self.all.lock();
        // Its name was free as soon as it had ended.
        if same_one(&mut all, info).is_some() {
            all.remove(&info.name);
        }
        drop(all);
        self.all.write_soon();
    }

    /// Ends the sandbox of an instance, if it is one still.
    pub fn end_instance(self: &Arc<Self>, instance: u64) {
        // Whoever ended it before has done the same.
        let _ = self.kill(&instance.to_string());
    }

    /// Has one run nothing until somebody wants something of it. It gives up its memory after that.
    ///
    /// # Errors
    /// There is none, or it cannot.
    pub async fn pause(self: &Arc<Self>, name: &str) -> Result<SandboxInfo, SandboxProblem> {
        // What was noted is to be true, also if nobody waits for it any more.
        let (this, name) = (self.clone(), name.to_owned());
        to_its_end(async move { this.pause_now(&name).await }).await
    }

    async fn pause_now(self: &Arc<Self>, name: &str) -> Result<SandboxInfo, SandboxProblem> {
        let info = self.find(name)?;
        let service = self.service(&info);
        let service = service.ok_or_else(|| SandboxProblem::Unknown(name.to_owned()))?;
        // Before it is paused: whoever uses it meanwhile takes the note back.
        self.note_pause(&info, true).await;
        if let Err(error) = service.pause(info.instance).await {
            self.note_pause(&info, false).await;
            return Err(SandboxProblem::Refused(error));
        }
        self.find(name)
    }

    /// Has one run that was paused.
    ///
    /// # Errors
    /// There is none, or it cannot be woken.
    pub async fn resume(self: &Arc<Self>, name: &str) -> Result<SandboxInfo, SandboxProblem> {
        let info = self.find(name)?;
        let service = self.service(&info);
        let service = service.ok_or_else(|| SandboxProblem::Unknown(name.to_owned()))?;
        service.reach(info.instance).await.map_err(SandboxProblem::Refused)?;
        service.wake(Some(info.instance)).await.map_err(SandboxProblem::Refused)?;
        self.used(info.instance);
        self.find(name)
    }
}

/// The entry of a sandbox, unless another one has its name by now.
fn same_one<'a>(all: &'a mut Table<SandboxInfo>, of: &SandboxInfo) -> Option<&'a mut SandboxInfo> {
    all.get_mut(&of.name).filter(|found| found.instance == of.instance)
}

fn now_ms() -> u64 {
    let since_epoch = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since_epoch.as_millis()).unwrap_or(u64::MAX)
}

fn deadline(timeout_s: Option<u64>) -> Option<u64> {
    timeout_s.map(|seconds| now_ms().saturating_add(seconds.saturating_mul(1000)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_that_another_one_has_by_now_is_not_taken_from_it() {
        let info = |instance: u64| -> SandboxInfo {
            serde_json::from_value(serde_json::json!({
                "name": "box", "instance": instance, "function": "f", "created_ms": 1,
                "deadline_ms": null, "timeout_s": null, "on_timeout": "kill", "metadata": {}
            }))
            .unwrap()
        };
        let mut all = Table::default();
        all.insert("box".to_owned(), info(6));
        assert!(same_one(&mut all, &info(5)).is_none());
        assert_eq!(same_one(&mut all, &info(6)).map(|found| found.instance), Some(6));
    }
}
