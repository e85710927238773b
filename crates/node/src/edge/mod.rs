//! The edge of the node, where its clients are: what its operator says of them in
//! `gateway.toml` (routes, certificates, authentication, limits), the log of their
//! requests, and the details of what they were refused.
//!
//! The gateway asks here; nothing here speaks HTTP with anybody.

mod access;
mod auth;
mod certificates;
mod cors;
mod file;
mod jwt;
mod live_server;
mod operators;
mod rate;
mod refusals;
mod request_id;
mod routes;
mod rules;

pub(crate) use access::{AccessRecord, Passage, beginning};
pub(crate) use auth::{Granted, Unauthorized};
pub use certificates::CertificateTable;
pub(crate) use certificates::Certificates;
pub use file::{GATEWAY_FILE, GatewayFileError};
pub use live_server::LiveServer;
pub use operators::{Addresses, Operators, Trust};
pub use rate::take_allowance;
pub use request_id::RequestId;
pub(crate) use routes::{Asked, Target};
pub(crate) use rules::Policy;
pub use rules::{Mention, Rules};

use crate::logs::AccessFile;
use access::Format;
use file::Stamp;
use rate::Rates;
use refusals::RefusalLog;
use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock, RwLock};
use std::time::Duration;
use thaw_home::config::FunctionName;

/// Most functions that the rules name and that do not exist of which something is said.
const STRANGERS_MAX: usize = 16;

/// What the gateway goes by. Locks are held for a few instructions each, and none is taken
/// while another is held.
#[derive(Debug, Default)]
pub struct Edge {
    rules: RwLock<Arc<Rules>>,
    /// There are no rules but the usual ones: the fast path needs to know no more.
    has_rules: AtomicBool,
    /// Where they come from.
    file: Mutex<Option<PathBuf>>,
    rates: Rates,
    operators: Operators,
    refusals: RefusalLog,
    access: OnceLock<AccessFile>,
    /// What was last said of functions that the file names and that do not exist.
    strangers: Mutex<Vec<String>>,
    /// Addresses of `[tls]` at which nobody listens, and why.
    deaf: Mutex<BTreeMap<SocketAddr, String>>,
}

/// The files that the rules name, as they were when somebody looked.
pub struct Seen(Vec<Stamp>);

impl Seen {
    fn is_of(&self, files: &[Stamp]) -> bool {
        self.0.iter().map(|stamp| &stamp.path).eq(files.iter().map(|stamp| &stamp.path))
    }
}

impl Edge {
    /// Reads the rules in the file at `path`, from now on; without a file there are the usual ones.
    ///
    /// # Errors
    /// The file, or one that it names, is there and not usable.
    pub fn read_from(&self, path: PathBuf) -> Result<(), GatewayFileError> {
        *self.file.lock().expect("no holder panics") = Some(path);
        self.reload()
    }

    /// Reads the rules again. On an error the old ones stay.
    ///
    /// # Errors
    /// The file, or one that it names, is there and not usable.
    pub fn reload(&self) -> Result<(), GatewayFileError> {
        let file = self.file.lock().expect("no holder panics").clone();
        if let Some(file) = file {
            self.set(Rules::load(&file)?);
        }
        Ok(())
    }

    /// Reads the rules again if a certificate or a key set has changed since it was `seen`; what is
    /// seen now. On an error the old rules stay, and all is read again after the next change.
    pub fn look_at_files(&self, seen: Option<Seen>) -> Option<Seen> {
        let rules = self.rules()?;
        let before = seen.filter(|seen| seen.is_of(rules.files()));
        let before = before.map_or_else(|| rules.files().to_vec(), |seen| seen.0);
        let now: Vec<_> = before.iter().map(|stamp| Stamp::of(stamp.path.clone())).collect();
        if now != before {
            match self.reload() {
                Ok(()) => tracing::info!("read certificates and key sets again"),
                Err(error) => {
                    tracing::error!("certificates and key sets stay what they were: {error}");
                }
            }
        }
        Some(Seen(now))
    }

    /// Goes by these rules from now on.
    pub fn set(&self, rules: Rules) {
        self.has_rules.store(!rules.is_usual(), Ordering::Release);
        *self.rules.write().expect("no holder panics") = Arc::new(rules);
    }

    /// The present rules; `None`: the usual ones.
    pub fn rules(&self) -> Option<Arc<Rules>> {
        self.has_rules
            .load(Ordering::Acquire)
            .then(|| self.rules.read().expect("no holder panics").clone())
    }

    /// Says in the log which functions the rules name that do not exist, unless that was said before. One may come
    /// later, so that is no error. What the rules say of them, a sentence each.
    pub(crate) fn name_strangers(&self, exists: impl Fn(&FunctionName) -> bool) -> Vec<String> {
        let rules = self.rules();
        let mentions = rules.iter().flat_map(|rules| rules.mentions());
        let mut strangers = mentions.filter(|mention| !exists(&mention.function));
        let mut said: Vec<_> =
            strangers.by_ref().take(STRANGERS_MAX).map(Mention::of_nobody).collect();
        if let more @ 1.. = strangers.count() {
            said.push(format!("{more} further functions that it names do not exist"));
        }
        let mut before = self.strangers.lock().expect("no holder panics");
        said.iter().filter(|one| !before.contains(one)).for_each(|one| {
            tracing::warn!("{GATEWAY_FILE}: {one}");
        });
        before.clone_from(&said);
        said
    }

    /// Counts a request of a client against a function's rate; how long it has to wait
    /// otherwise.
    pub(crate) fn count(
        &self,
        function: &FunctionName,
        policy: &Policy,
        client: SocketAddr,
    ) -> Result<(), Duration> {
        policy.rate.as_ref().map_or(Ok(()), |rate| self.rates.count(function, rate, client.ip()))
    }

    /// Addresses of clients that are the operator's own.
    pub fn operators(&self) -> &Operators {
        &self.operators
    }

    /// The details of what clients were refused.
    pub(crate) fn refusals(&self) -> &RefusalLog {
        &self.refusals
    }

    /// Notes that nobody listens at an address where the rules want it, and why.
    pub fn note_deaf(&self, address: SocketAddr, why: String) {
        self.deaf.lock().expect("no holder panics").insert(address, why);
    }

    /// Forgets which addresses nobody listens at, and says why it was so.
    pub fn forget_deaf(&self) -> BTreeMap<SocketAddr, String> {
        std::mem::take(&mut *self.deaf.lock().expect("no holder panics"))
    }

    /// Why nobody listens where the rules want it, if it is so.
    pub fn deaf(&self) -> Option<String> {
        self.deaf.lock().expect("no holder panics").values().next().cloned()
    }

    /// Has requests logged to a file, if the rules say so.
    pub fn log_to(&self, file: AccessFile) {
        // There is one for each daemon.
        let _ = self.access.set(file);
    }

    /// Writes what is not written yet; whether all was.
    pub fn finish_log(&self, patience: Duration) -> bool {
        self.access.get().is_none_or(|file| file.finish(patience))
    }

    fn access_format(&self) -> Option<Format> {
        self.access.get().and(self.rules()?.access_log)
    }

    /// Whether requests are logged.
    pub(crate) fn logs_requests(&self) -> bool {
        self.access_format().is_some()
    }

    /// Logs a request that is over.
    pub(crate) fn log(&self, record: &AccessRecord, passage: &Passage) {
        if let (Some(file), Some(format)) = (self.access.get(), self.access_format()) {
            file.add(record.line(passage, format).as_bytes());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::jwt::tests::{claims, key, sign};
    use super::*;
    use hyper::header::{AUTHORIZATION, HeaderMap};

    fn lets_in(edge: &Edge, token: &str) -> bool {
        let policy = edge.rules().unwrap().policy(&"f".parse().unwrap()).unwrap();
        let mut headers = HeaderMap::new();
        headers.insert(AUTHORIZATION, format!("Bearer {token}").parse().unwrap());
        policy.authenticate(&headers).unwrap().is_ok()
    }

    #[test]
    fn functions_that_do_not_exist_are_named_up_to_a_bound() {
        let edge = Edge::default();
        let routes: String =
            (0..40).map(|n| format!("[[route]]\npath = \"/{n}\"\nfunction = \"f{n}\"\n")).collect();
        edge.set(Rules::parse(GATEWAY_FILE.as_ref(), &routes).unwrap());
        let said = edge.name_strangers(|name| name.as_str() == "f0");
        assert_eq!(said.len(), STRANGERS_MAX + 1);
        assert!(said[0].starts_with("line 6: the route leads to `f1`,"), "{said:?}");
        assert_eq!(said[STRANGERS_MAX], "23 further functions that it names do not exist");
        assert!(edge.name_strangers(|_| true).is_empty());
    }

    #[test]
    fn files_that_change_are_read_again_and_wrong_ones_change_nothing() {
        let directory = tempfile::tempdir().unwrap();
        let keys = directory.path().join("keys.json");
        let file = directory.path().join(GATEWAY_FILE);
        let jwt = "{ keys = \"keys.json\", issuer = \"https://issuer\", audience = \"api\" }";
        std::fs::write(&file, format!("[function.f]\nauth.jwt = {jwt}")).unwrap();
        let (old, set) = key();
        std::fs::write(&keys, set).unwrap();
        let edge = Edge::default();
        edge.read_from(file).unwrap();
        let header = serde_json::json!({"alg": "ES256"});
        let (new, set) = key();
        let [of_old, of_new] = [&old, &new].map(|key| sign(key, &header, &claims()));

        let seen = edge.look_at_files(None);
        assert!(lets_in(&edge, &of_old) && !lets_in(&edge, &of_new));
        // As editors and ACME clients do.
        let beside = directory.path().join("new");
        std::fs::write(&beside, set).unwrap();
        std::fs::rename(beside, &keys).unwrap();
        let seen = edge.look_at_files(seen);
        assert!(!lets_in(&edge, &of_old) && lets_in(&edge, &of_new));
        std::fs::write(&keys, "{}").unwrap();
        assert!(edge.look_at_files(seen).is_some());
        assert!(lets_in(&edge, &of_new));
    }
}
