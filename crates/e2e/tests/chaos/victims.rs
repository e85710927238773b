//! Whom the killer can strike.

use serde_json::Value;
use std::collections::BTreeSet;
use thaw_e2e::{Daemon, Process, kill, process};

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
    /// The process that opens the memory of sandboxes, or one that reads it.
    StateHelper,
}

/// The name of a [`Victim::StateHelper`].
const STATE_HELPER: &str = "thaw-state";

/// Each kind, and how often it is struck, in a hundred blows.
pub const VICTIMS: [(Victim, u64); 7] = [
    (Victim::Instance, 38),
    (Victim::Zygote, 30),
    (Victim::Ready, 10),
    (Victim::Template, 7),
    (Victim::Any, 10),
    (Victim::ZygoteParent, 3),
    (Victim::StateHelper, 2),
];

/// Everything below a daemon at one moment.
pub struct Census {
    main: u32,
    all: Vec<Process>,
    instances: BTreeSet<u32>,
    ready: BTreeSet<u32>,
    templates: BTreeSet<u32>,
}

impl Census {
    /// Takes a look.
    pub fn take(daemon: &Daemon) -> Self {
        let all = daemon.sandboxes();
        let instances = list(daemon, "/instances");
        let instances = instances.iter().filter_map(|instance| pid(&instance["pid"])).collect();
        let (mut ready, mut templates) = (BTreeSet::new(), BTreeSet::new());
        for function in list(daemon, "/functions") {
            let name = function["name"].as_str().expect("a name");
            let standby = &daemon.admin(&format!("/functions/{name}")).json()["standby"];
            ready.extend(standby["ready"].as_array().into_iter().flatten().filter_map(pid));
            templates.extend(pid(&standby["template"]));
        }
        Self { main: daemon.main_pid(), all, instances, ready, templates }
    }

    /// The processes of a kind. It may be another kind by now.
    pub fn find(&self, kind: Victim) -> Vec<Process> {
        let of = |process: &&Process| match kind {
            Victim::Instance => self.instances.contains(&process.pid),
            Victim::Ready => self.ready.contains(&process.pid),
            Victim::Template => self.templates.contains(&process.pid),
            Victim::ZygoteParent => self.is_zygote_parent(process),
            Victim::Zygote => self.is_zygote(process),
            Victim::StateHelper => process.name == STATE_HELPER,
            Victim::Any => true,
        };
        self.all.iter().filter(of).cloned().collect()
    }

    /// The daemon's child that has made its sandboxes.
    fn is_zygote_parent(&self, process: &Process) -> bool {
        process.parent == self.main
            && process.name != STATE_HELPER
            && self.all.iter().any(|other| other.parent == process.pid)
    }

    fn is_zygote(&self, process: &Process) -> bool {
        let known = [&self.instances, &self.ready, &self.templates];
        process.parent != self.main
            && process.name != STATE_HELPER
            && !known.iter().any(|kind| kind.contains(&process.pid))
    }
}

/// Kills a process, unless it has ended and its number may be another's.
pub fn strike(victim: &Process) -> bool {
    let is_same = process(victim.pid).is_some_and(|now| now.parent == victim.parent);
    if is_same {
        kill(victim.pid);
    }
    is_same
}

fn pid(value: &Value) -> Option<u32> {
    value.as_u64()?.try_into().ok()
}

fn list(daemon: &Daemon, path: &str) -> Vec<Value> {
    daemon.admin(path).json().as_array().expect("an array").clone()
}
