//! Sandboxes: instances that somebody has asked for by name, and which stay until they are told
//! to end, or their time has come.
//!
//! What is known of them lies in a file, so that the next daemon knows them, too: it takes over
//! the instances that outlive this one, and those that are asleep.

use crate::config::FunctionName;
use crate::inject::{OwnHeaders, WrongHeaders};
use crate::instance::Launcher;
use crate::node::NodeState;
use crate::replace::replace;
use crate::sandboxes::egress::{
    ClientEgress, EgressInfo, EgressWish, SandboxEgress, SandboxInject,
};
use crate::sandboxes::exec::Exec;
use crate::sandboxes::files::{FileProblem, FileSession};
use crate::sandboxes::usage::{NetworkUsage, SandboxUsage, look_at_egress_bytes, usage_of};
use crate::sandboxes::{ExecRequest, ExecState, LimitsChange, LimitsInfo, Next, Reader};
use crate::service::Service;
use crate::to_its_end::to_its_end;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::io;
use std::mem;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{SystemTime, UNIX_EPOCH};
use thaw_store::Name;
use timeouts::Times;

mod timeouts;

/// Most sandboxes of a node.
const SANDBOXES_MAX: usize = 10_000;
/// Most bytes of names and values of metadata of one.
const METADATA_MAX: usize = 16 << 10;
/// How many are paused again at a time.
const PAUSES_AT_ONCE: usize = 8;
/// Name of the file.
const FILE: &str = "sandboxes.json";

/// What happens to a sandbox when its time has come.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema,
)]
#[serde(rename_all = "lowercase")]
pub enum OnTimeout {
    /// It gives up its memory, until it is wanted again.
    #[default]
    Pause,
    /// It ends.
    Kill,
}

/// A sandbox that is wanted, as the API takes it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct NewSandbox {
    /// Its name; one is made up if empty.
    pub name: String,
    /// The function whose image it is a copy of; empty: that of the checkpoint.
    pub function: String,
    /// The checkpoint that it begins where it was taken; none: the function's image.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub checkpoint: Option<String>,
    /// Seconds after which `on_timeout` happens, from the last use on; none: never.
    pub timeout_s: Option<u64>,
    /// What happens then.
    pub on_timeout: OnTimeout,
    /// What whoever asks wants to know of it later.
    pub metadata: BTreeMap<String, String>,
    /// Where it may connect to; none: where its function may.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub egress: Option<SandboxEgress>,
    /// The same of a client that may not have more than others allow.
    #[serde(skip)]
    pub client_egress: Option<EgressWish>,
}

impl NewSandbox {
    /// Where it is to connect to.
    fn egress_wish(&self, service: &Service) -> Result<EgressWish, SandboxProblem> {
        if let Some(EgressWish::Within { asked, .. }) = &self.client_egress {
            asked.headers.check_trust(service.config())?;
        }
        match (&self.egress, &self.client_egress) {
            (_, Some(wish)) => Ok(wish.clone()),
            (Some(egress), None) => {
                egress.rules().map(EgressWish::Rules).map_err(SandboxProblem::Wrong)
            }
            (None, None) => Ok(EgressWish::Function),
        }
    }
}

/// A sandbox, as it is kept and shown.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
pub struct SandboxInfo {
    /// Its name.
    pub name: String,
    /// Its instance.
    pub instance: u64,
    /// The function whose image it is a copy of.
    pub function: FunctionName,
    /// The version of the function: a sandbox outlives it. 0: it was made by an older Thaw.
    #[serde(default)]
    pub version: u32,
    /// When it was made, in milliseconds since 1970.
    pub created_ms: u64,
    /// When `on_timeout` happens, in milliseconds since 1970.
    pub deadline_ms: Option<u64>,
    /// See [`NewSandbox::timeout_s`].
    pub timeout_s: Option<u64>,
    /// What happens then.
    pub on_timeout: OnTimeout,
    /// Of whoever has asked for it.
    pub metadata: BTreeMap<String, String>,
    /// Of which sandbox it is a copy, if it is one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub forked_from: Option<ForkedFrom>,
    /// It was told to pause, and nobody has wanted anything of it since. So the next daemon, which
    /// wakes what it takes over, pauses it again.
    #[serde(default)]
    pub paused: bool,
    /// What its instance does (`thaw ps`); none where nobody has looked.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub state: Option<String>,
    /// Why one that is paused keeps its memory, if that could not be written.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory_kept: Option<String>,
    /// Where it may connect to, and what it has reached; none where nobody has looked.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub egress: Option<EgressInfo>,
    /// What it uses; none where nobody has looked.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub usage: Option<SandboxUsage>,
    /// What its TCP connections to the outside have carried; none where the host does not say, and
    /// of a sandbox that sleeps since before this daemon.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub network: Option<NetworkUsage>,
}

/// A sandbox that was copied. Names are used again, instances are not.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct ForkedFrom {
    /// Its name then.
    pub name: String,
    /// Its instance.
    pub instance: u64,
}

/// Why there is no such sandbox.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SandboxProblem {
    /// The request makes no sense.
    #[error("{0}")]
    Wrong(String),
    /// There is none of that name.
    #[error("no sandbox is named `{0}`; `thaw sandbox list` shows those there are")]
    Unknown(String),
    /// It cannot be done now.
    #[error("{0}")]
    Refused(String),
    /// Its function lacks what that takes.
    #[error("{0}")]
    Missing(String),
}

impl From<WrongHeaders> for SandboxProblem {
    fn from(error: WrongHeaders) -> Self {
        match error {
            WrongHeaders::Wrong(why) => Self::Wrong(why),
            WrongHeaders::Missing(why) => Self::Missing(why),
        }
    }
}

/// A program in a sandbox that goes on when this is dropped.
pub struct Started(Arc<Exec>);

impl Started {
    /// What has become of it.
    pub fn state(&self) -> ExecState {
        self.0.state()
    }
}

/// The sandboxes of a node.
pub struct Sandboxes {
    node: Arc<NodeState>,
    file: PathBuf,
    all: Mutex<BTreeMap<String, SandboxInfo>>,
    /// Held while the file is written.
    writing: Mutex<()>,
    times: Times,
}

impl Sandboxes {
    /// Those that the file in a directory knows and whose instances are there.
    ///
    /// # Errors
    /// The file is there and cannot be read.
    pub fn load(node: Arc<NodeState>, directory: &Path) -> io::Result<Arc<Self>> {
        let file = directory.join(FILE);
        let known: Vec<SandboxInfo> = match std::fs::read(&file) {
            Ok(bytes) => match serde_json::from_slice(&bytes) {
                Ok(known) => known,
                Err(error) => {
                    let aside = file.with_extension("damaged");
                    std::fs::rename(&file, &aside)?;
                    let (file, aside) = (file.display(), aside.display());
                    tracing::error!(
                        "{file}: {error}; its sandboxes are instances only, and {aside} keeps it"
                    );
                    Vec::new()
                }
            },
            Err(error) if error.kind() == io::ErrorKind::NotFound => Vec::new(),
            Err(error) => return Err(error),
        };
        let (mut all, before) = (BTreeMap::new(), known.clone());
        for mut one in known {
            match node.service_of(one.instance) {
                Some(service) if *service.name() == one.function => {
                    service.hold(one.instance);
                    // An older Thaw knew none.
                    one.version = service.version();
                    all.insert(one.name.clone(), one);
                }
                // It is asleep, and its function is being frozen anew.
                None if node.may_have_instance(one.instance) => {
                    all.insert(one.name.clone(), one);
                }
                // Numbers of instances begin anew with each monitor.
                _ => tracing::warn!(sandbox = one.name, "its instance has ended meanwhile"),
            }
        }
        let is_changed = !all.values().eq(&before);
        let this = Self {
            node,
            file,
            all: Mutex::new(all),
            writing: Mutex::default(),
            times: Times::default(),
        };
        if is_changed {
            this.write();
        }
        Ok(Arc::new(this))
    }

    /// The service of the instance of one, if that is there.
    fn service(&self, info: &SandboxInfo) -> Option<Arc<Service>> {
        let service = self.node.service_of(info.instance);
        service.filter(|service| *service.name() == info.function)
    }

    /// Whether there is one of this name, if only its file, whose function is not served yet.
    pub(crate) fn knows(&self, name: &str) -> bool {
        let is_there = |info: &SandboxInfo| self.node.may_have_instance(info.instance);
        self.all().get(name).is_some_and(is_there)
    }

    /// Makes one. It is done to its end, also if nobody waits for that any more: no instance may stay
    /// that nobody knows.
    ///
    /// # Errors
    /// See [`SandboxProblem`].
    pub async fn create(self: &Arc<Self>, new: NewSandbox) -> Result<SandboxInfo, SandboxProblem> {
        let this = self.clone();
        to_its_end(async move { this.create_now(new).await }).await
    }

    async fn create_now(&self, new: NewSandbox) -> Result<SandboxInfo, SandboxProblem> {
        self.check(&new)?;
        let unknown = || {
            SandboxProblem::Wrong(format!(
                "no function is named `{}`; `thaw list` shows those there are, and `thaw sandbox \
                 create` makes one of a container image",
                new.function
            ))
        };
        let service = self.node.route(&new.function).ok_or_else(unknown)?;
        let egress = new.egress_wish(&service)?;
        let instance = service.boot_held(egress).await.map_err(SandboxProblem::Refused)?;
        self.adopt(&service, instance, new, None)
    }

    /// Makes one of a checkpoint: what boots its instances, and the service that they belong to.
    ///
    /// # Errors
    /// See [`SandboxProblem`].
    pub(crate) async fn create_of(
        self: &Arc<Self>,
        new: NewSandbox,
        opened: (Arc<Service>, Arc<dyn Launcher>),
    ) -> Result<SandboxInfo, SandboxProblem> {
        let this = self.clone();
        to_its_end(async move { this.create_of_now(new, opened).await }).await
    }

    async fn create_of_now(
        &self,
        new: NewSandbox,
        (service, launcher): (Arc<Service>, Arc<dyn Launcher>),
    ) -> Result<SandboxInfo, SandboxProblem> {
        self.check(&new)?;
        if !new.function.is_empty() && new.function != service.name().as_str() {
            return Err(SandboxProblem::Wrong(format!(
                "the checkpoint is of `{}`, and not of `{}`; leave the function out",
                service.name(),
                new.function
            )));
        }
        let egress = new.egress_wish(&service)?;
        let booted = service.boot_held_of(launcher, egress).await;
        let instance = booted.map_err(SandboxProblem::Refused)?;
        self.adopt(&service, instance, new, None)
    }

    fn check(&self, new: &NewSandbox) -> Result<(), SandboxProblem> {
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
        let mut all = self.all();
        let is_there = |info: &SandboxInfo| self.node.may_have_instance(info.instance);
        if all.get(&new.name).is_some_and(is_there) {
            return Err(SandboxProblem::Refused(format!(
                "there is a sandbox `{}` already; name another one, or end it with `thaw sandbox \
                 kill`",
                new.name
            )));
        }
        if all.len() >= SANDBOXES_MAX {
            return Err(SandboxProblem::Refused(format!(
                "this node has {SANDBOXES_MAX} sandboxes; end some"
            )));
        }
        // One whose instance has just ended does not have its name any more.
        all.remove(&new.name);
        Ok(())
    }

    fn adopt(
        &self,
        service: &Service,
        instance: u64,
        new: NewSandbox,
        forked_from: Option<ForkedFrom>,
    ) -> Result<SandboxInfo, SandboxProblem> {
        let name = if new.name.is_empty() { format!("sb-{instance}") } else { new.name };
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
        };
        let clash = {
            let mut all = self.all();
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
        self.write();
        Ok(info)
    }

    /// All of them whose instances are there.
    pub fn list(&self) -> Vec<SandboxInfo> {
        self.forget_gone();
        let all: Vec<_> = self.all().values().cloned().collect();
        all.into_iter().map(|info| self.with_state(info)).collect()
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
            let all = self.all();
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
        let egress = self.node.egress().info(info.instance);
        Ok(SandboxInfo { egress, usage, ..info })
    }

    /// What one may use.
    ///
    /// # Errors
    /// There is none.
    pub fn limits(&self, name: &str) -> Result<LimitsInfo, SandboxProblem> {
        let info = self.find(name)?;
        let service = self.service(&info);
        let service = service.ok_or_else(|| SandboxProblem::Unknown(name.to_owned()))?;
        Ok(LimitsInfo::new(service.limits_of(info.instance), &service.config().limits))
    }

    /// Changes what one may use while it runs.
    ///
    /// # Errors
    /// It may not have so much, or has more than that; there is none.
    pub async fn set_limits(
        &self,
        name: &str,
        change: LimitsChange,
    ) -> Result<LimitsInfo, SandboxProblem> {
        let info = self.find(name)?;
        let service = self.service(&info);
        let service = service.ok_or_else(|| SandboxProblem::Unknown(name.to_owned()))?;
        service.change_limits(info.instance, change).await.map_err(SandboxProblem::Refused)?;
        self.limits(name)
    }

    /// Where one may connect to, and what it has reached.
    ///
    /// # Errors
    /// There is none.
    pub fn egress(&self, name: &str) -> Result<EgressInfo, SandboxProblem> {
        let info = self.find(name)?;
        let egress = self.node.egress().info(info.instance);
        egress.ok_or_else(|| {
            SandboxProblem::Refused(format!(
                "sandbox `{name}` connects as its function does: it was made by an older Thaw"
            ))
        })
    }

    /// Replaces the rules by which one connects; connections that it has stay.
    ///
    /// # Errors
    /// The rules make no sense, or there is none.
    pub async fn set_egress(
        &self,
        name: &str,
        egress: &SandboxEgress,
    ) -> Result<EgressInfo, SandboxProblem> {
        let rules = egress.rules().map_err(SandboxProblem::Wrong)?;
        let instance = self.find(name)?.instance;
        let changed = self.node.egress().change(instance, rules).await;
        changed.map_err(SandboxProblem::Refused)?;
        self.egress(name)
    }

    /// The same for a client that may not have more than others allow.
    ///
    /// # Errors
    /// There is none.
    pub(crate) async fn set_client_egress(
        &self,
        name: &str,
        asked: ClientEgress,
    ) -> Result<(), SandboxProblem> {
        let info = self.find(name)?;
        let service = self.service(&info);
        let service = service.ok_or_else(|| SandboxProblem::Unknown(name.to_owned()))?;
        asked.headers.check_trust(service.config())?;
        let changed = self.node.egress().change_within(info.instance, asked).await;
        changed.map_err(SandboxProblem::Refused)
    }

    /// Replaces the headers that the node adds to the requests of one, besides those of its
    /// function.
    ///
    /// # Errors
    /// They make no sense, its programs would not trust the node, or there is none.
    pub async fn set_inject(
        &self,
        name: &str,
        inject: SandboxInject,
    ) -> Result<EgressInfo, SandboxProblem> {
        let info = self.find(name)?;
        let service = self.service(&info);
        let service = service.ok_or_else(|| SandboxProblem::Unknown(name.to_owned()))?;
        let headers = OwnHeaders::of_secrets(inject.rules, service.config())?;
        let changed = self.node.egress().change_headers(info.instance, headers).await;
        changed.map_err(SandboxProblem::Refused)?;
        self.egress(name)
    }

    fn with_state(&self, info: SandboxInfo) -> SandboxInfo {
        let service = self.service(&info);
        let state = service.as_ref().and_then(|service| service.state_of(info.instance));
        let state = state.map(|state| state.name().to_owned());
        let memory_kept = service.and_then(|service| service.why_memory_is_kept(info.instance));
        let network = self.node.egress().bytes(info.instance);
        SandboxInfo { state, memory_kept, network, ..info }
    }

    /// Somebody wants something of it, if it is one: it is not to be paused again.
    pub(crate) fn wanted(&self, instance: u64) {
        let is_it = |info: &&mut SandboxInfo| info.instance == instance;
        let was_paused =
            self.all().values_mut().find(is_it).map(|info| mem::take(&mut info.paused));
        if was_paused == Some(true) {
            self.write();
        }
    }

    /// Notes whether the next daemon is to pause one.
    fn note_pause(&self, name: &str, paused: bool) {
        let was = self.all().get_mut(name).map(|info| mem::replace(&mut info.paused, paused));
        if was == Some(!paused) {
            self.write();
        }
    }

    /// Ends one.
    ///
    /// # Errors
    /// There is none.
    pub fn kill(&self, name: &str) -> Result<SandboxInfo, SandboxProblem> {
        let info = self.noted(name)?;
        if !self.knows(&info.name) {
            return Err(SandboxProblem::Unknown(name.to_owned()));
        }
        // It may be asleep since before this daemon began.
        self.node.end_left(info.instance);
        if let Some(service) = self.service(&info) {
            service.kill(info.instance);
        }
        self.all().remove(&info.name);
        self.write();
        Ok(info)
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

    async fn pause_now(&self, name: &str) -> Result<SandboxInfo, SandboxProblem> {
        let info = self.find(name)?;
        let service = self.service(&info);
        let service = service.ok_or_else(|| SandboxProblem::Unknown(name.to_owned()))?;
        // Before it is paused: whoever uses it meanwhile takes the note back.
        self.note_pause(&info.name, true);
        let paused = service.pause(info.instance).await;
        paused.map_err(|error| {
            self.note_pause(&info.name, false);
            SandboxProblem::Refused(error)
        })?;
        self.find(name)
    }

    /// Has one run that was paused.
    ///
    /// # Errors
    /// There is none, or it cannot be woken.
    pub async fn resume(&self, name: &str) -> Result<SandboxInfo, SandboxProblem> {
        let info = self.find(name)?;
        let service = self.service(&info);
        let service = service.ok_or_else(|| SandboxProblem::Unknown(name.to_owned()))?;
        service.reach(info.instance).await.map_err(SandboxProblem::Refused)?;
        service.wake(Some(info.instance)).await.map_err(SandboxProblem::Refused)?;
        self.used(info.instance);
        self.find(name)
    }

    /// Runs a program in one to its end, and drops what it prints; how it has ended.
    ///
    /// # Errors
    /// There is no such sandbox, or the program is not started.
    pub async fn run(
        &self,
        name: &str,
        request: &ExecRequest,
    ) -> Result<ExecState, SandboxProblem> {
        let (exec, mut output) = self.exec(name, request).await?;
        while output.next().await != Next::End {}
        Ok(exec.ended().await)
    }

    /// Starts a program in one that goes on, and waits until it has printed something; what.
    ///
    /// # Errors
    /// There is no such sandbox, or the program is not started, or ends before that.
    pub async fn start(
        &self,
        name: &str,
        request: &ExecRequest,
    ) -> Result<(Started, Vec<u8>), SandboxProblem> {
        let (exec, mut output) = self.exec(name, request).await?;
        loop {
            match output.next().await {
                Next::Bytes(_, printed) => return Ok((Started(exec), printed)),
                Next::Lost(_) => {}
                Next::End => {
                    let why = format!("`{}` ended without a word", request.argv.join(" "));
                    return Err(SandboxProblem::Refused(why));
                }
            }
        }
    }

    async fn exec(
        &self,
        name: &str,
        request: &ExecRequest,
    ) -> Result<(Arc<Exec>, Reader), SandboxProblem> {
        let info = self.find(name)?;
        let service = self.service(&info);
        let service = service.ok_or_else(|| SandboxProblem::Unknown(name.to_owned()))?;
        let started = service.exec(info.instance, request).await;
        started.map_err(|error| SandboxProblem::Refused(error.to_string()))
    }

    /// Writes a file in one, with the rights of its first process.
    ///
    /// # Errors
    /// There is no such sandbox, or its kernel refuses.
    pub async fn write_file(
        &self,
        name: &str,
        path: &str,
        bytes: &[u8],
    ) -> Result<(), SandboxProblem> {
        let mut session = self.files(name).await?;
        session.write(path, None, None).await.map_err(refused)?;
        session.put(bytes).await.map_err(refused)?;
        session.finish(path).await.map(drop).map_err(refused)
    }

    /// The first `most` bytes of a file in one, with the rights of its first process.
    ///
    /// # Errors
    /// There is no such sandbox, or its kernel refuses.
    pub async fn read_file(
        &self,
        name: &str,
        path: &str,
        most: u32,
    ) -> Result<Vec<u8>, SandboxProblem> {
        let mut session = self.files(name).await?;
        session.read_up_to(path, most.into()).await.map_err(refused)?;
        let mut contents = Vec::new();
        while let Some(piece) = session.next_piece(path).await.map_err(refused)? {
            if contents.len() + piece.len() > most as usize {
                return Err(SandboxProblem::Refused(format!("more came than {most} bytes")));
            }
            contents.extend(piece);
        }
        Ok(contents)
    }

    /// Opens a session over the files of one, with the rights of its first process.
    ///
    /// # Errors
    /// There is no such sandbox, or too many have a session.
    pub async fn files(&self, name: &str) -> Result<FileSession, SandboxProblem> {
        let info = self.find(name)?;
        let service = self.service(&info);
        let service = service.ok_or_else(|| SandboxProblem::Unknown(name.to_owned()))?;
        service.files(info.instance, "").await.map_err(SandboxProblem::Refused)
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

    async fn fork_now(&self, name: &str, new_name: &str) -> Result<SandboxInfo, SandboxProblem> {
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
        self.check(&new)?;
        let service = self.service(&info);
        let service = service.ok_or_else(|| SandboxProblem::Unknown(name.to_owned()))?;
        service.reach(info.instance).await.map_err(SandboxProblem::Refused)?;
        let forked = service.fork_held(info.instance).await;
        let instance = forked.map_err(SandboxProblem::Refused)?;
        let forked_from = ForkedFrom { name: info.name, instance: info.instance };
        self.adopt(&service, instance, new, Some(forked_from))
    }

    /// Forgets those whose instances have ended.
    fn forget_gone(&self) {
        let mut all = self.all();
        let before = all.len();
        self.node.egress().forget_gone(|id| self.node.may_have_instance(id));
        self.node.limits().forget_gone(|id| self.node.may_have_instance(id));
        all.retain(|_, info| {
            let is_other = |service: Arc<Service>| *service.name() != info.function;
            self.node.may_have_instance(info.instance)
                && !self.node.service_of(info.instance).is_some_and(is_other)
        });
        let changed = all.len() != before;
        drop(all);
        if changed {
            self.write();
        }
    }

    /// Writes them down for the next daemon.
    fn write(&self) {
        // Whoever writes last has read last.
        let _writing = self.writing.lock().expect("no holder panics");
        let all: Vec<_> = self.all().values().cloned().collect();
        let text = serde_json::to_vec(&all).expect("plain data");
        if let Err(error) = replace(&self.file, &text) {
            tracing::warn!("{}: {error}; the next daemon does not know them", self.file.display());
        }
    }

    fn all(&self) -> MutexGuard<'_, BTreeMap<String, SandboxInfo>> {
        self.all.lock().expect("no holder panics")
    }
}

/// The functions of which the file in a directory knows sandboxes, and their versions, by their
/// instances; none if it cannot be read, which [`Sandboxes::load`] says.
pub fn versions_of_sandboxes(directory: &Path) -> HashMap<u64, (FunctionName, u32)> {
    let known = known_in(directory).unwrap_or_default();
    known.into_iter().map(|info| (info.instance, (info.function, info.version))).collect()
}

/// The versions of functions of which the file in a directory knows sandboxes: the store has to
/// keep them.
///
/// # Errors
/// The file is there and cannot be read.
pub fn functions_of_sandboxes(directory: &Path) -> io::Result<BTreeSet<(FunctionName, u32)>> {
    let known = known_in(directory)?;
    Ok(known.into_iter().map(|info| (info.function, info.version)).collect())
}

fn known_in(directory: &Path) -> io::Result<Vec<SandboxInfo>> {
    let file = directory.join(FILE);
    let why =
        |error: io::Error| io::Error::new(error.kind(), format!("{}: {error}", file.display()));
    match std::fs::read(&file) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Vec::new()),
        read => serde_json::from_slice(&read.map_err(why)?).map_err(|error| why(error.into())),
    }
}

fn refused(error: FileProblem) -> SandboxProblem {
    SandboxProblem::Refused(error.to_string())
}

fn now_ms() -> u64 {
    let since_epoch = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since_epoch.as_millis()).unwrap_or(u64::MAX)
}

fn deadline(timeout_s: Option<u64>) -> Option<u64> {
    timeout_s.map(|seconds| now_ms().saturating_add(seconds.saturating_mul(1000)))
}
