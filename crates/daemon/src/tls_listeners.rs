//! The addresses at which the node speaks TLS, and its certificates as time goes by.

use crate::daemon::{listen_for, with_held};
use std::collections::HashMap;
use std::io;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::Duration;
use thaw_node::gateway::Gateway;
use thaw_node::node::NodeState;
use tokio::task::{JoinHandle, spawn_blocking};
use tokio::time::sleep;

/// How often certificates and key sets are looked at.
const LOOK_EVERY: Duration = Duration::from_secs(5);

/// Reads certificates and key sets again when they have changed.
pub(crate) async fn watch_files(shared: Arc<NodeState>) {
    let mut seen = None;
    loop {
        sleep(LOOK_EVERY).await;
        let shared = shared.clone();
        let look = spawn_blocking(move || shared.edge().look_at_files(seen));
        seen = look.await.ok().flatten();
    }
}

/// The listeners; each has a task.
pub(crate) struct TlsListeners {
    gateway: Gateway,
    shared: Arc<NodeState>,
    tasks: Mutex<HashMap<SocketAddr, JoinHandle<io::Result<()>>>>,
}

impl TlsListeners {
    pub fn new(gateway: Gateway, shared: Arc<NodeState>) -> Self {
        Self { gateway, shared, tasks: Mutex::default() }
    }

    /// Tries the addresses again that somebody else had.
    pub fn try_again(&self) {
        if self.shared.edge().deaf().is_some() {
            self.update();
        }
    }

    /// Listens where the present rules want it, and nowhere else.
    pub fn update(&self) {
        let rules = self.shared.edge().rules();
        let wanted = rules.map(|rules| rules.tls_addresses().to_vec()).unwrap_or_default();
        let mut tasks = self.tasks.lock().expect("no holder panics");
        tasks.retain(|address, task| {
            let stays = wanted.contains(address) && !task.is_finished();
            if !stays {
                task.abort();
            }
            stays
        });
        let known = self.shared.edge().forget_deaf();
        for address in wanted {
            if tasks.contains_key(&address) {
                continue;
            }
            match listen_for(address, "`listen` of [tls] in gateway.toml") {
                Ok((listener, held)) => {
                    let listening = self.gateway.clone().listen_tls(listener);
                    tasks.insert(address, tokio::spawn(with_held(held, listening)));
                }
                Err(error) => {
                    let why = error.to_string();
                    // It is tried again every few seconds.
                    if known.get(&address) != Some(&why) {
                        tracing::error!("{why}");
                    }
                    self.shared.edge().note_deaf(address, why);
                }
            }
        }
    }

    /// Accepts nobody from now on.
    pub fn stop(&self) {
        self.tasks.lock().expect("no holder panics").drain().for_each(|(_, task)| task.abort());
    }
}
