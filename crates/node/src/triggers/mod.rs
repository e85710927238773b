//! Triggers: what calls functions without a client that waits. Asynchronous invocations and
//! schedules go through one durable queue ([decisions/0043](../../../docs/decisions/0043-triggers.md)).
//!
//! | module | what it is |
//! | --- | --- |
//! | `record` | what is written down of an invocation |
//! | `file` | the tables on disk |
//! | `ledger` | the index in memory, and every rule of the queue |
//! | `writer` | the thread that has both; group commit |
//! | `retry` | what an answer means, and when to try again |
//! | `attempts` | sending what is due |
//! | `destinations` | calling other functions with what came of an invocation |
//! | `schedules` | queueing what schedules ask for |
//! | `cloudevents` | CloudEvents over HTTP |

mod attempts;
pub mod cloudevents;
mod destinations;
mod file;
mod ledger;
mod record;
mod retry;
mod schedules;
#[cfg(test)]
mod tests;
mod writer;

pub use ledger::{KEY_MAX, Which};
pub use record::{
    Death, InvocationId, InvocationInfo, InvocationStatus, NewInvocation, NotQueued, Origin,
    Queued, QueuedRequest, Record, Unavailable,
};
#[cfg(test)]
pub(crate) use retry::gateway_error;
pub use schedules::ScheduleInfo;

use crate::body_room::{Holder, Room, Rooms};
use crate::metrics::QueueInfo;
use crate::service::Services;
use hyper::header::{HeaderMap, HeaderName, HeaderValue};
use std::collections::HashMap;
use std::io;
use std::net::SocketAddr;
use std::path::Path;
use std::sync::{Arc, Mutex, Weak};
use std::thread::JoinHandle as Thread;
use thaw_home::clock::wall_ms;
use tokio::sync::Notify;
use tokio::task::JoinHandle;
use writer::Writer;

/// Name of the file in its directory.
const FILE: &str = "queue.redb";
/// Invocations that an answer lists.
const LISTED_MAX: usize = 1000;

/// The triggers of a node.
pub struct Triggers {
    writer: Writer,
    /// What they call.
    services: Arc<Services>,
    /// Where attempts are sent.
    gateway: SocketAddr,
    /// There may be something to attempt.
    wake: Notify,
    rooms: Rooms,
}

/// What runs for the triggers of a node. They are gone when this is stopped and the attempts and requests
/// that are under way have ended: all others have only weak references.
pub struct Running {
    triggers: Arc<Triggers>,
    tasks: Vec<JoinHandle<()>>,
    thread: Thread<()>,
}

impl Triggers {
    /// Opens the queue in a directory, and attempts what is in it through the gateway at this
    /// address, by so many instances at most as a part of `instances` makes.
    ///
    /// # Errors
    /// The host has no thread. A file that cannot be used is no error: clients who wait are served.
    pub fn start(
        directory: &Path,
        services: Arc<Services>,
        gateway: SocketAddr,
        instances: usize,
    ) -> io::Result<Running> {
        let (writer, thread) = Writer::start(directory.join(FILE))?;
        let (wake, rooms) = (Notify::new(), Rooms::default());
        let triggers = Arc::new(Self { writer, services, gateway, wake, rooms });
        let attempting = attempts::attempt_all(triggers.clone(), instances);
        let firing = schedules::fire_all(triggers.clone());
        let tasks = vec![tokio::spawn(attempting), tokio::spawn(firing)];
        Ok(Running { triggers, tasks, thread })
    }

    /// Room for a body that is read; it takes some when the body comes.
    pub(crate) fn room(&self, holder: Holder) -> Room {
        self.rooms.room(holder)
    }

    /// Queues an invocation of a function that is served; it is on the disk when this returns. The
    /// room of its body is given back when the queue has it, even if nobody waits any more.
    ///
    /// # Errors
    /// See [`NotQueued`].
    pub(crate) async fn queue(&self, new: NewInvocation, room: Room) -> Result<Queued, NotQueued> {
        let function = new.function.clone();
        let queued = match attempts::terms_of(&self.services, &function) {
            None => Err(NotQueued::Full(format!("`{function}` is being removed"))),
            Some(terms) => {
                let now_ms = wall_ms();
                let queue = move |ledger: &mut ledger::Ledger| {
                    let queued = ledger.queue(new, &terms, now_ms);
                    drop(room);
                    queued
                };
                match self.writer.ask(queue).await {
                    Ok(queued) => queued,
                    Err(unavailable) => Err(unavailable.into()),
                }
            }
        };
        let outcome = match &queued {
            Ok(Queued { is_duplicate: false, .. }) => "queued",
            Ok(Queued { is_duplicate: true, .. }) => "duplicate",
            Err(_) => "refused",
        };
        self.services.shared().metrics().triggers().queued(&function, outcome);
        self.wake.notify_one();
        queued
    }

    /// How an invocation of a function is; `None`: there is none of that name, or not any more.
    ///
    /// # Errors
    /// The file cannot be used.
    pub(crate) async fn status(
        &self,
        function: String,
        id: InvocationId,
    ) -> Result<Option<InvocationStatus>, Unavailable> {
        self.writer.ask(move |ledger| ledger.status(&function, id)).await
    }

    /// All queues in numbers.
    ///
    /// # Errors
    /// The file cannot be used.
    pub async fn queues(&self) -> Result<Vec<QueueInfo>, Unavailable> {
        self.writer.ask(|ledger| ledger.queues()).await
    }

    /// Bytes that tenants have in queues, by domain.
    ///
    /// # Errors
    /// The file cannot be used.
    pub async fn bytes_of_tenants(&self) -> Result<HashMap<Option<String>, u64>, Unavailable> {
        self.writer.ask(|ledger| ledger.bytes_of_tenants()).await
    }

    /// The invocations of a function, a thousand at most.
    ///
    /// # Errors
    /// The file cannot be used.
    pub async fn list(&self, function: String) -> Result<Vec<InvocationInfo>, Unavailable> {
        self.writer.ask(move |ledger| ledger.list(&function, LISTED_MAX)).await
    }

    /// An invocation with its request; `None`: there is none of that name.
    ///
    /// # Errors
    /// The file cannot be used.
    pub async fn show(
        &self,
        function: String,
        id: InvocationId,
    ) -> Result<Option<(InvocationInfo, QueuedRequest)>, Unavailable> {
        let found = self.writer.ask(move |ledger| ledger.show(&function, id).transpose()).await?;
        found.map_err(Unavailable)
    }

    /// Queues dead letters of a function that is served again; how many.
    ///
    /// # Errors
    /// The file cannot be used, or there is no room for all of them.
    pub async fn retry(&self, function: String, which: Which) -> Result<u64, NotQueued> {
        let gone = || NotQueued::Full(format!("no function is named `{function}`"));
        let terms = attempts::terms_of(&self.services, &function).ok_or_else(gone)?;
        let now_ms = wall_ms();
        let count =
            self.writer.ask(move |ledger| ledger.retry(&function, which, &terms, now_ms)).await?;
        self.wake.notify_one();
        count.map_err(NotQueued::Full)
    }

    /// Removes invocations that are not being attempted; how many.
    ///
    /// # Errors
    /// The file cannot be used.
    pub async fn purge(&self, function: String, which: Which) -> Result<u64, Unavailable> {
        self.writer.ask(move |ledger| ledger.purge(&function, which)).await
    }

    /// The schedules of a function, or of all, and when they fire.
    ///
    /// # Errors
    /// The file cannot be used.
    pub async fn schedules(
        &self,
        function: Option<&str>,
    ) -> Result<Vec<ScheduleInfo>, Unavailable> {
        let rows = self.writer.ask(|ledger| ledger.schedules()).await?;
        let now_ms = wall_ms();
        let wanted: Vec<_> = self
            .services
            .functions()
            .into_iter()
            .filter(|service| function.is_none_or(|name| service.name().as_str() == name))
            .collect();
        // Times may take long to compute.
        let computed = tokio::task::spawn_blocking(move || {
            let mut all = Vec::new();
            for service in wanted {
                let name = service.name().as_str();
                for schedule in &service.config().schedules {
                    let row = rows.get(&schedules::row_name(name, schedule));
                    all.push(ScheduleInfo::new(name, schedule, row, now_ms));
                }
            }
            all
        });
        computed.await.map_err(|error| Unavailable(error.to_string()))
    }
}

impl Running {
    /// The triggers, for those who queue invocations.
    pub fn downgrade(&self) -> Weak<Triggers> {
        Arc::downgrade(&self.triggers)
    }

    /// Attempts nothing more, and closes the file. What was being attempted is in the queue.
    pub async fn stop(self) {
        for task in &self.tasks {
            task.abort();
        }
        for task in self.tasks {
            let _ = task.await;
        }
        drop(self.triggers);
        // Attempts that are not over keep the thread; the file needs no closing to be whole.
        let thread = Mutex::new(Some(self.thread));
        let joined = tokio::task::spawn_blocking(move || {
            let thread = thread.into_inner().ok().flatten();
            thread.map(Thread::join)
        });
        let _ = tokio::time::timeout(std::time::Duration::from_secs(2), joined).await;
    }
}

/// The fields of a request that are kept with it.
///
/// # Errors
/// A value is not text: one sentence.
pub(crate) fn carried(headers: &HeaderMap) -> Result<Vec<(String, String)>, String> {
    let kept = headers.iter().filter(|(name, _)| attempts::is_carried(name));
    let pair = |(name, value): (&HeaderName, &HeaderValue)| {
        let value = value.to_str().map_err(|_| {
            format!("the header `{name}` is not plain text, which a queue does not keep")
        })?;
        Ok((name.to_string(), value.to_owned()))
    };
    kept.map(pair).collect()
}

/// Whether a request asks to be answered before it is done (RFC 7240 §4.1).
pub(crate) fn prefers_async(headers: &HeaderMap) -> bool {
    let values = headers.get_all("prefer").iter().filter_map(|value| value.to_str().ok());
    let mut preferences = values.flat_map(|value| value.split(','));
    preferences.any(|one| {
        let name = one.split(';').next().unwrap_or_default().trim();
        name.eq_ignore_ascii_case("respond-async")
    })
}
