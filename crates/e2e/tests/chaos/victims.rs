//! Whom the killer can strike.

use serde_json::Value;
use thaw_e2e::{Daemon, children, descendants};

/// A kind of process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Victim {
    /// A process of an instance that the daemon shows.
    Instance,
    /// A process that waits to become an instance.
    Zygote,
    /// An instance that was booted ahead.
    Ready,
    /// A live template.
    Template,
    /// Anything below the daemon, the host processes that guests have forked included.
    Any,
    /// The process that makes zygotes; all sandboxes end with it.
    ZygoteParent,
}

/// Each kind, and how often it is struck, in a hundred blows.
pub const VICTIMS: [(Victim, u64); 6] = [
    (Victim::Instance, 40),
    (Victim::Zygote, 30),
    (Victim::Ready, 10),
    (Victim::Template, 7),
    (Victim::Any, 10),
    (Victim::ZygoteParent, 3),
];

impl Victim {
    /// The processes of this kind now.
    pub fn find(self, daemon: &Daemon) -> Vec<u32> {
        match self {
            Self::Instance => {
                let instances = daemon.admin("/instances").json();
                let instances = instances.as_array().expect("an array").iter();
                instances.filter_map(|instance| pid(&instance["pid"])).collect()
            }
            Self::Ready => standby(daemon, |standby| {
                standby["ready"].as_array().into_iter().flatten().filter_map(pid).collect()
            }),
            Self::Template => {
                standby(daemon, |standby| pid(&standby["template"]).into_iter().collect())
            }
            Self::ZygoteParent => zygote_parents(daemon),
            Self::Zygote => {
                let known: Vec<u32> = [Self::Instance, Self::Ready, Self::Template]
                    .into_iter()
                    .flat_map(|kind| kind.find(daemon))
                    .collect();
                let parents = zygote_parents(daemon);
                let sandboxes = parents.into_iter().flat_map(children).map(|process| process.pid);
                sandboxes.filter(|pid| !known.contains(pid)).collect()
            }
            Self::Any => descendants(daemon.pid()).into_iter().map(|process| process.pid).collect(),
        }
    }
}

fn pid(value: &Value) -> Option<u32> {
    value.as_u64()?.try_into().ok()
}

/// The children of the daemon that have made its sandboxes.
fn zygote_parents(daemon: &Daemon) -> Vec<u32> {
    let below = children(daemon.pid()).into_iter().map(|process| process.pid);
    below.filter(|pid| !children(*pid).is_empty()).collect()
}

/// Looks at what each function keeps for its next boots.
fn standby(daemon: &Daemon, look: impl Fn(&Value) -> Vec<u32>) -> Vec<u32> {
    let functions = daemon.admin("/functions").json();
    let functions = functions.as_array().expect("an array").iter();
    let names = functions.filter_map(|function| function["name"].as_str());
    names
        .flat_map(|name| look(&daemon.admin(&format!("/functions/{name}")).json()["standby"]))
        .collect()
}
