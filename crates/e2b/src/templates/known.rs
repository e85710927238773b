//! What is known of one template, and of one build.

use super::names::beginning;
use crate::records::Defaults;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use thaw_node::remote::LimitsChange;

/// Most builds of a template that are known, besides those with tags.
const BUILDS_MAX: usize = 10;
/// Most bytes of the reason why a build has failed.
pub const MESSAGE_MAX: usize = 4 << 10;
/// The step at which the base is made ready, in the words of the SDK.
pub const BASE: &str = "base";
/// The step after all others, in the words of the SDK.
pub const FINALIZE: &str = "finalize";

/// What is known of a template.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Template {
    /// The name of the key that made it.
    pub owner: String,
    /// What its owner calls it.
    pub name: String,
    /// When it was made, in milliseconds since 1970.
    pub created_ms: u64,
    /// Its builds, by id.
    pub builds: BTreeMap<String, Build>,
    /// Which build each tag means.
    pub tags: BTreeMap<String, Tag>,
    /// Sandboxes that this daemon has made of it.
    #[serde(skip)]
    pub spawned: u64,
    /// When the last of them was made.
    #[serde(skip)]
    pub spawned_ms: Option<u64>,
}

/// A name for a build.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Tag {
    /// The build.
    pub build: String,
    /// When it got the tag.
    pub created_ms: u64,
}

/// What is known of a build.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Build {
    /// When it was asked for.
    pub created_ms: u64,
    /// When it has ended.
    pub finished_ms: Option<u64>,
    /// The tags that it gets.
    pub tags: Vec<String>,
    /// What has become of it.
    pub state: State,
    /// What sandboxes of it may use, where that is not what their function says.
    pub limits: LimitsChange,
    /// Processors and bytes of memory that its sandbox had.
    pub had: Option<(u32, u64)>,
    /// What commands begin with in sandboxes of it.
    pub defaults: Defaults,
    /// The sandbox in which it is made.
    pub sandbox: String,
    /// The checkpoint that is made of that.
    pub checkpoint: String,
}

/// What has become of a build.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum State {
    /// Files may be uploaded for it; it has not begun.
    Waiting,
    /// It is under way.
    Building,
    /// Sandboxes can be made of it.
    Ready,
    /// There is nothing of it, and why.
    Failed(Failure),
}

/// Why a build has failed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Failure {
    /// One sentence, perhaps with the last output of a command.
    pub message: String,
    /// The step: `base`, the number of one, `finalize`.
    pub step: String,
}

impl Failure {
    /// The failure of a step. It is kept, so what is said of it has a bound.
    pub fn new(step: &str, message: &str) -> Self {
        let message = beginning(message, MESSAGE_MAX).to_owned();
        Self { message, step: step.to_owned() }
    }
}

/// A build that is wanted.
#[derive(Clone, Debug)]
pub struct NewBuild {
    /// The name of its template.
    pub name: String,
    /// The tags that it gets.
    pub tags: Vec<String>,
    /// What its sandboxes may use.
    pub limits: LimitsChange,
}

/// What a sandbox is made of, or a template begins with.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Found {
    /// The id of the template.
    pub template: String,
    /// The checkpoint.
    pub checkpoint: String,
    /// What commands begin with.
    pub defaults: Defaults,
    /// What sandboxes may use.
    pub limits: LimitsChange,
}

impl Template {
    /// The build that its owner means by a tag, or `None`.
    pub fn ready(&self, tag: &str) -> Option<(&String, &Build)> {
        let (id, build) = self.builds.get_key_value(&self.tags.get(tag)?.build)?;
        (build.state == State::Ready).then_some((id, build))
    }

    /// The build that was asked for last.
    pub fn latest(&self) -> Option<(&String, &Build)> {
        self.builds.iter().max_by_key(|(_, build)| build.created_ms)
    }

    /// Whether nothing was ever built of it, or nothing is left, and nothing is being built.
    pub fn is_idle_and_empty(&self) -> bool {
        !self.builds.values().any(|build| matches!(build.state, State::Ready | State::Building))
    }

    /// Forgets builds that nobody asks for any more. Those that have tags or are under way stay, and
    /// so does the newest one, whatever the clock has said of the others.
    pub fn forget_old_builds(&mut self, newest: &str) {
        let tagged: BTreeSet<_> = self.tags.values().map(|tag| tag.build.clone()).collect();
        let others = self
            .builds
            .iter()
            .filter(|(id, build)| !tagged.contains(*id) && build.state != State::Building)
            .filter(|(id, _)| *id != newest);
        let mut others: Vec<_> = others.map(|(id, build)| (build.created_ms, id.clone())).collect();
        others.sort();
        let surplus = others.len().saturating_sub(BUILDS_MAX - 1);
        for (_, id) in others.drain(..surplus) {
            self.builds.remove(&id);
        }
    }
}
