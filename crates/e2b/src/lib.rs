#![doc = include_str!("../README.md")]
#![forbid(unsafe_code)]

mod address;
pub mod backend;
mod connect;
mod control;
#[cfg(test)]
mod fake;
mod files;
mod filesystem;
mod input;
mod keys;
mod list;
mod messages;
mod metrics;
mod network;
mod node_backend;
mod ports;
mod problem;
mod process;
mod records;
mod samples;
mod serve;
mod settings;
mod snapshots;
mod templates;
#[cfg(test)]
mod tests;
mod volumes;
mod watch;

pub use keys::{KEYS_FILE, Key, KeyError, KeyStore, NewKey, RequestRate, Role};
pub use node_backend::NodeBackend;
pub use problem::{Kind, Problem};
pub use settings::{FILE, LiveSettings, SettingsError};

use backend::{Backend, Sandbox};
use records::Records;
use std::collections::BTreeMap;
use std::io;
use std::path::Path;
use std::sync::{Arc, Mutex};
use thaw_node::edge::LiveServer;
use tokio::sync::Semaphore;

/// The version of envd that the SDKs are told. They use what it can: from 0.5.7 on, uploads as
/// plain bytes; only from 0.6.2 on, metadata of files, which there is none of here.
const ENVD_VERSION: &str = "0.5.7";
/// Most streams of a key at a time: processes that somebody reads, and uploads of input.
const STREAMS_MAX: usize = 256;
/// Most connections to ports of a sandbox at a time.
const PORTS_MAX: usize = 192;

/// The API.
pub struct E2b {
    backend: Arc<dyn Backend>,
    settings: LiveSettings,
    records: Records,
    streams: Streams,
    /// Connections to ports, by the id of the sandbox: whoever makes them may be anybody.
    ports: Streams,
    watchers: watch::Watchers,
    /// What sandboxes have used.
    samples: samples::Samples,
    templates: templates::Templates,
    /// Volumes whose files somebody has just used.
    open_volumes: Arc<volumes::OpenVolumes>,
    /// Requests for files of volumes, by owner.
    contents: Streams,
    /// The same of all owners.
    content_turns: Arc<Semaphore>,
    /// Held by whoever changes the network of a sandbox, and what is known of it.
    network_turn: tokio::sync::Mutex<()>,
    /// Requests of each key.
    rates: keys::Rates,
    /// How TLS is spoken, if it is.
    tls: Option<LiveServer>,
}

impl E2b {
    /// The API in front of sandboxes, with what lies in a node's home.
    ///
    /// # Errors
    /// The records cannot be read or written, or the certificates are not usable.
    pub fn new(
        backend: Arc<dyn Backend>,
        settings: LiveSettings,
        directory: &Path,
    ) -> io::Result<Arc<Self>> {
        let records = Records::load(directory)?;
        let templates = templates::Templates::load(directory)?;
        let tables = settings.now().certificates.clone();
        let tls = (!tables.is_empty()).then(|| LiveServer::load(directory, &tables)).transpose();
        let tls = tls.map_err(io::Error::other)?;
        let (streams, ports, watchers, rates, contents) = Default::default();
        let content_turns = Arc::new(Semaphore::new(volumes::CONTENTS_MAX));
        let api = Self {
            backend,
            settings,
            records,
            streams,
            ports,
            watchers,
            samples: samples::Samples::default(),
            templates,
            open_volumes: Arc::default(),
            contents,
            content_turns,
            network_turn: tokio::sync::Mutex::default(),
            rates,
            tls,
        };
        api.forget_missing_volumes();
        Ok(Arc::new(api))
    }

    /// The sandboxes of an owner that are there. Forgets those that are not any more.
    fn sandboxes_of(&self, owner: &str) -> Vec<Sandbox> {
        self.present(self.records.of(owner))
    }

    /// Those of these sandboxes that are there. Forgets the others.
    fn present(&self, ids: Vec<String>) -> Vec<Sandbox> {
        let found = |id: String| {
            let found = self.backend.find(&id);
            if found.is_none() && self.backend.is_gone(&id) {
                self.records.remove(&id);
                self.watchers.forget(&id);
            }
            found
        };
        ids.into_iter().filter_map(found).collect()
    }
}

/// How many streams each owner or sandbox has.
#[derive(Clone, Default)]
struct Streams(Arc<Mutex<BTreeMap<String, usize>>>);

impl Streams {
    /// Counts one more, for as long as the result is there.
    fn enter(&self, owner: &str) -> Result<StreamPlace, Problem> {
        self.enter_below(owner, STREAMS_MAX)
    }

    /// The same where others are fewer than `most`, which is not 0.
    fn enter_below(&self, owner: &str, most: usize) -> Result<StreamPlace, Problem> {
        self.enter_where(owner, |_| most)
    }

    /// The same where the owner has fewer than `most`, and no more than half of what others leave of
    /// `of_all`, but one.
    fn enter_half(&self, owner: &str, most: usize, of_all: usize) -> Result<StreamPlace, Problem> {
        self.enter_where(owner, |others| (of_all.saturating_sub(others) / 2).clamp(1, most))
    }

    fn enter_where(
        &self,
        owner: &str,
        most: impl FnOnce(usize) -> usize,
    ) -> Result<StreamPlace, Problem> {
        let mut counts = self.0.lock().expect("no holder panics");
        let others = counts.iter().filter(|(other, _)| *other != owner);
        let most = most(others.map(|(_, count)| count).sum());
        let count = counts.entry(owner.to_owned()).or_default();
        if *count >= most {
            return Err(Problem::new(
                Kind::Exhausted,
                format!("`{owner}` has {most} streams already; end some, or wait"),
            ));
        }
        *count += 1;
        Ok(StreamPlace { streams: self.clone(), owner: owner.to_owned() })
    }
}

/// The place of one stream.
struct StreamPlace {
    streams: Streams,
    owner: String,
}

impl Drop for StreamPlace {
    fn drop(&mut self) {
        let mut counts = self.streams.0.lock().expect("no holder panics");
        if let Some(count) = counts.get_mut(&self.owner) {
            *count -= 1;
            if *count == 0 {
                counts.remove(&self.owner);
            }
        }
    }
}
