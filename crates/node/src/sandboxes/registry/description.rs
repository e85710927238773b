//! Sandboxes as the API takes and shows them.

use crate::inject::WrongHeaders;
use crate::instance::InstanceState;
use crate::remote::NetworkUsage;
use crate::remote::egress::{EgressInfo, EgressWish, SandboxEgress};
use crate::remote::volumes::{SandboxVolume, WantedVolumes, configs};
use crate::sandboxes::usage::SandboxUsage;
use crate::service::Service;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use thaw_home::config::FunctionName;
use thaw_store::Name;

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
    /// Volumes that it has beside those of its function and of the checkpoint.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub volumes: Vec<SandboxVolume>,
    /// The names of volumes that whoever asks may use, whatever the tenant of the function may.
    #[serde(skip)]
    pub granted_volumes: BTreeSet<Name>,
    /// The same of a client that may not have more than others allow.
    #[serde(skip)]
    pub client_egress: Option<EgressWish>,
}

impl NewSandbox {
    /// The volumes that it is to have, with those that are mounted in its memory already.
    pub(super) fn wanted_volumes(
        &self,
        service: &Service,
        mounted: Vec<SandboxVolume>,
    ) -> Result<WantedVolumes, SandboxProblem> {
        let (new, granted) = (self.volumes.clone(), self.granted_volumes.clone());
        let wanted = WantedVolumes { mounted, new, granted };
        configs(&wanted.all(), &service.config().volumes).map_err(SandboxProblem::Wrong)?;
        Ok(wanted)
    }

    /// Where it is to connect to.
    pub(super) fn egress_wish(&self, service: &Service) -> Result<EgressWish, SandboxProblem> {
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
    /// The volumes that it has beside those of its function.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub volumes: Vec<SandboxVolume>,
}

impl SandboxInfo {
    /// Whether it has its memory and was not told to rest, where somebody has looked.
    pub fn is_awake(&self) -> bool {
        use InstanceState::{Asleep, Hibernated, Paused};
        let resting = [Paused, Hibernated, Asleep].map(InstanceState::name);
        self.state.as_deref().is_some_and(|state| !resting.contains(&state))
    }
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
