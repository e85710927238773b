//! All functions that are served here: which versions get requests, which instances make room for others,
//! and their end.

mod asked;
mod cpu_time;
mod ending;
mod left_asleep;
mod rollout;
mod room;
mod routing;

pub use cpu_time::watch_cpu_time;
pub use rollout::{Served, ShareOf};

use super::{InstanceInfo, Service};
use crate::node::NodeState;
use asked::Asked;
use std::collections::HashMap;
use std::sync::{Arc, Mutex, RwLock};
use thaw_home::config::FunctionName;

/// The functions that are served on a node.
pub struct Services {
    shared: Arc<NodeState>,
    served: RwLock<HashMap<FunctionName, Served>>,
    /// Replaced or removed services whose last instances still work.
    retired: Mutex<Vec<Arc<Service>>>,
    /// Instances that were asked to give up their memory.
    relieved: Mutex<Asked>,
    /// Those that were asked to fall asleep.
    sent_to_sleep: Mutex<Asked>,
}

impl Services {
    /// None yet; those that come share this.
    pub fn new(shared: Arc<NodeState>) -> Arc<Self> {
        Arc::new(Self {
            shared,
            served: RwLock::default(),
            retired: Mutex::default(),
            relieved: Mutex::default(),
            sent_to_sleep: Mutex::default(),
        })
    }

    /// What all functions share.
    pub fn shared(&self) -> &Arc<NodeState> {
        &self.shared
    }

    /// All live instances.
    pub fn instances(&self) -> Vec<InstanceInfo> {
        self.everything().iter().flat_map(|service| service.instances()).collect()
    }

    /// Has the processes of all live instances wait for the next daemon: the last thing that this one does.
    /// The next one does not know what becomes of them after that.
    pub async fn leave_execs(&self) {
        let of_all = |service: &Arc<Service>| {
            let is_secret = service.config().hibernate.encrypt;
            service.with_execs().into_iter().map(move |(id, table)| (id, table, is_secret))
        };
        let tables: Vec<_> = self.everything().iter().flat_map(of_all).collect();
        self.shared.leave_execs_of(&tables).await;
    }
}
