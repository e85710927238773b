//! The queue: an index in memory of what lies in the file, and what may be done with it.
//!
//! One thread has it (`writer`). What it does changes the index at once and the file when that thread
//! commits; if that fails, the index is built from the file again. That an invocation runs is
//! in memory only.

mod ends;
mod results;
mod turns;
mod views;

use super::destinations::Ended;
use super::file::{Change, Content, FileError, Key, KeyRow, QueueFile};
use super::record::{
    InvocationId, NewInvocation, NotQueued, OVERHEAD, Queued, Record, ResultRow, ScheduleRow, Terms,
};
use crate::edge::beginning;
use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
#[cfg(test)]
pub(super) use turns::Taken;

/// Longest idempotency key, in bytes.
pub const KEY_MAX: usize = 1024;
/// Bytes of a method and of a path that are kept beside a request, which has them whole.
const METHOD_KEPT: usize = 32;
const PATH_KEPT: usize = 256;
/// Bytes of a reason that are kept.
const REASON_MAX: usize = 512;

/// Bounds of the node.
#[derive(Clone, Copy, Debug)]
pub(super) struct Bounds {
    pub entries: u64,
    pub bytes: u64,
    pub keys: usize,
    pub keys_of_a_function: usize,
    pub dead: usize,
    pub dead_bytes: u64,
    pub results: usize,
}

pub(super) const BOUNDS: Bounds = Bounds {
    entries: 100_000,
    bytes: 1 << 30,
    keys: 500_000,
    keys_of_a_function: 100_000,
    dead: 100_000,
    dead_bytes: 1 << 30,
    results: 100_000,
};

/// Bytes that an idempotency key counts for in the quota of its tenant.
const KEY_BYTES: u64 = 256;

/// What a tenant has.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct Share {
    /// Bytes of invocations that are not dead, and of keys.
    bytes: u64,
    /// Invocations that are not dead, and their bytes.
    entries: u64,
    entry_bytes: u64,
    keys: usize,
}

/// The invocations of a function.
#[derive(Debug, Default)]
struct Book {
    /// Those that wait, by when they are due.
    due: BTreeSet<(u64, InvocationId)>,
    running: HashSet<InvocationId>,
    /// Those that are not dead, by when they are given up.
    expiring: BTreeSet<(u64, InvocationId)>,
    /// Those that are not dead, by when they came.
    ages: BTreeSet<(u64, InvocationId)>,
    /// Dead letters, by when they died.
    dead: BTreeSet<(u64, InvocationId)>,
    bytes: u64,
    dead_bytes: u64,
    keys: BTreeSet<(u64, Key)>,
    /// What became of those that are done, by when that is forgotten.
    results: BTreeSet<(u64, InvocationId)>,
}

impl Book {
    fn entries(&self) -> u64 {
        (self.due.len() + self.running.len()) as u64
    }

    fn is_empty(&self) -> bool {
        self.entries() == 0
            && self.dead.is_empty()
            && self.keys.is_empty()
            && self.results.is_empty()
    }
}

/// Which invocations of a function are meant.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Which {
    /// This one.
    One(InvocationId),
    /// The dead letters.
    Dead,
    /// Those that wait.
    Queued,
}

/// A request that the host has not read.
#[derive(Clone, Copy, Debug)]
struct Unread {
    times: u32,
    /// Not before this is it tried again, in milliseconds since 1970.
    again_ms: u64,
}

/// What is known of invocations in memory only, and stays so when the file is opened anew.
#[derive(Clone, Debug, Default)]
pub(super) struct Carried {
    /// Those that are being attempted.
    pub running: HashSet<InvocationId>,
    unread: HashMap<InvocationId, Unread>,
}

/// The queue.
#[derive(Default)]
pub(super) struct Ledger {
    file: Option<QueueFile>,
    staged: Vec<Change>,
    /// Those that came since the last commit: their requests are not in the file yet.
    fresh: HashSet<InvocationId>,
    /// Those whose attempts have begun since: nobody has heard of them if it fails.
    begun: HashSet<InvocationId>,
    /// Those whose attempts have ended since: they have been attempted, also if it fails.
    finished: HashSet<InvocationId>,
    /// Those whose requests the host has not read.
    unread: HashMap<InvocationId, Unread>,
    /// Why the file has to be opened anew.
    failed: Option<FileError>,
    records: HashMap<InvocationId, Record>,
    books: BTreeMap<String, Book>,
    tenants: HashMap<Option<String>, Share>,
    keys: HashMap<Key, KeyRow>,
    schedules: BTreeMap<String, ScheduleRow>,
    results: HashMap<InvocationId, ResultRow>,
    /// Those that have come to an end since their destinations were called last.
    ended: Vec<Ended>,
    entries: u64,
    bytes: u64,
    dead: usize,
    dead_bytes: u64,
    bounds: Option<Bounds>,
    /// The function that was served last.
    last_served: String,
}

impl Ledger {
    /// From a file, of whose invocations this is known besides.
    pub fn new(file: QueueFile, content: Content, carried: Carried) -> Self {
        let Carried { running, unread } = carried;
        let mut ledger = Self { file: Some(file), unread, ..Self::default() };
        for (id, mut record) in content.records {
            // Files of earlier versions have longer ones.
            record.method = beginning(&record.method, METHOD_KEPT).to_owned();
            record.path = beginning(&record.path, PATH_KEPT).to_owned();
            ledger.enter(id, record, running.contains(&id));
        }
        for (key, row) in content.keys {
            ledger.enter_key(key, row);
        }
        for (id, row) in content.results {
            ledger.enter_result(id, row);
        }
        let records = &ledger.records;
        ledger.unread.retain(|id, _| records.contains_key(id));
        ledger.schedules = content.schedules.into_iter().collect();
        ledger
    }

    #[cfg(test)]
    pub fn bound(&mut self, bounds: Bounds) {
        self.bounds = Some(bounds);
    }

    /// Nothing can be written any more.
    #[cfg(test)]
    pub fn close(&mut self) {
        self.file = None;
    }

    fn bounds(&self) -> Bounds {
        self.bounds.unwrap_or(BOUNDS)
    }

    /// The next requests, so many, are not read.
    #[cfg(test)]
    pub fn fail_to_read(&self, requests: u32) {
        self.file.as_ref().expect("it is open").unreadable.set(requests);
    }

    /// Writes what has changed, unless the file has failed before.
    pub fn commit(&mut self) -> Result<(), FileError> {
        if let Some(why) = self.failed.take() {
            return Err(why);
        }
        let staged = std::mem::take(&mut self.staged);
        match &self.file {
            _ if staged.is_empty() => {}
            Some(file) => file.apply(&staged)?,
            None => return Err("it is closed".to_owned()),
        }
        self.fresh.clear();
        self.begun.clear();
        self.finished.clear();
        Ok(())
    }

    /// The invocations that were being attempted at the last commit.
    pub fn running(&self) -> HashSet<InvocationId> {
        let running = self.books.values().flat_map(|book| book.running.iter());
        running.chain(&self.finished).filter(|id| !self.begun.contains(id)).copied().collect()
    }

    /// What stays known when the file is opened anew.
    pub fn carried(&self) -> Carried {
        Carried { running: self.running(), unread: self.unread.clone() }
    }

    // The index.

    fn enter(&mut self, id: InvocationId, record: Record, is_running: bool) {
        let book = self.books.entry(record.function.clone()).or_default();
        if let Some(death) = &record.dead {
            book.dead.insert((death.at_ms, id));
            book.dead_bytes += record.bytes;
            self.dead += 1;
            self.dead_bytes += record.bytes;
        } else {
            match is_running {
                true => drop(book.running.insert(id)),
                false => drop(book.due.insert((record.due_ms, id))),
            }
            book.expiring.insert((record.expires_ms, id));
            book.ages.insert((record.created_ms, id));
            book.bytes += record.bytes;
            self.bytes += record.bytes;
            self.entries += 1;
            let share = self.tenants.entry(record.domain.clone()).or_default();
            share.bytes += record.bytes;
            share.entries += 1;
            share.entry_bytes += record.bytes;
        }
        self.records.insert(id, record);
    }

    /// Takes one out of the index.
    fn leave(&mut self, id: InvocationId) -> Option<Record> {
        let record = self.records.remove(&id)?;
        let book = self.books.get_mut(&record.function)?;
        if let Some(death) = &record.dead {
            book.dead.remove(&(death.at_ms, id));
            book.dead_bytes -= record.bytes;
            self.dead -= 1;
            self.dead_bytes -= record.bytes;
        } else {
            book.running.remove(&id);
            book.due.remove(&(record.due_ms, id));
            book.expiring.remove(&(record.expires_ms, id));
            book.ages.remove(&(record.created_ms, id));
            book.bytes -= record.bytes;
            self.bytes -= record.bytes;
            self.entries -= 1;
            self.shrink(&record.domain, |share| {
                share.bytes -= record.bytes;
                share.entries -= 1;
                share.entry_bytes -= record.bytes;
            });
        }
        let Some(book) = self.books.get(&record.function) else { return Some(record) };
        if book.is_empty() {
            self.books.remove(&record.function);
        }
        Some(record)
    }

    /// Takes something from a tenant, and forgets one that has nothing.
    fn shrink(&mut self, domain: &Option<String>, change: impl FnOnce(&mut Share)) {
        if let Some(share) = self.tenants.get_mut(domain) {
            change(share);
            if *share == Share::default() {
                self.tenants.remove(domain);
            }
        }
    }

    fn enter_key(&mut self, key: Key, row: KeyRow) {
        let book = self.books.entry(row.function.clone()).or_default();
        book.keys.insert((row.expires_ms, key));
        let share = self.tenants.entry(row.domain.clone()).or_default();
        share.keys += 1;
        share.bytes += KEY_BYTES;
        self.keys.insert(key, row);
    }

    fn remove_key(&mut self, key: Key) {
        let Some(row) = self.keys.remove(&key) else { return };
        self.staged.push(Change::RemoveKey(key));
        self.shrink(&row.domain, |share| {
            share.keys -= 1;
            share.bytes -= KEY_BYTES;
        });
        if let Some(book) = self.books.get_mut(&row.function) {
            book.keys.remove(&(row.expires_ms, key));
            if book.is_empty() {
                self.books.remove(&row.function);
            }
        }
    }

    fn remove(&mut self, id: InvocationId) {
        if self.leave(id).is_some() {
            self.staged.push(Change::Remove(id));
        }
    }

    fn update(&mut self, id: InvocationId, change: impl FnOnce(&mut Record)) {
        let Some(mut record) = self.leave(id) else { return };
        change(&mut record);
        self.staged.push(Change::Update(id, Box::new(record.clone())));
        self.enter(id, record, false);
    }

    // What may be done.

    /// Queues an invocation, if there is room.
    pub fn queue(
        &mut self,
        new: NewInvocation,
        terms: &Terms,
        now_ms: u64,
    ) -> Result<Queued, NotQueued> {
        self.queue_behind(new, terms, now_ms, 0)
    }

    /// As [`Ledger::queue`], behind so many destinations.
    pub(in crate::triggers) fn queue_behind(
        &mut self,
        new: NewInvocation,
        terms: &Terms,
        now_ms: u64,
        depth: u8,
    ) -> Result<Queued, NotQueued> {
        let key = new.key.as_deref().map(|key| hash(&new.function, key));
        let digest = key.map_or(0, |_| new.request.digest());
        if let Some(row) = key.and_then(|key| self.keys.get(&key))
            && row.expires_ms > now_ms
        {
            return match row.request == digest {
                true => Ok(Queued { id: row.id, is_duplicate: true }),
                false => Err(NotQueued::KeyReused),
            };
        }
        let body = new.request.body.len() as u64;
        if body > terms.config.body_max.bytes() {
            return Err(NotQueued::TooLarge(terms.config.body_max.bytes()));
        }
        let stored = new.request.to_bytes();
        let bytes = stored.len() as u64 + OVERHEAD;
        self.check_room(&new.function, bytes, key.is_some(), terms).map_err(NotQueued::Full)?;
        let id = InvocationId::random();
        let max_age_ms = milliseconds(terms.config.max_age.0);
        let record = Record {
            function: new.function.clone(),
            domain: terms.domain.clone(),
            origin: new.origin,
            method: beginning(&new.request.method, METHOD_KEPT).to_owned(),
            path: beginning(&new.request.path, PATH_KEPT).to_owned(),
            created_ms: now_ms,
            expires_ms: now_ms.saturating_add(max_age_ms),
            due_ms: now_ms,
            attempts: 0,
            deferrals: 0,
            bytes,
            last: None,
            dead: None,
            depth,
        };
        self.staged.push(Change::Add(id, Box::new(record.clone()), stored));
        self.fresh.insert(id);
        self.enter(id, record, false);
        if let Some(key) = key {
            self.remove_key(key);
            let expires_ms = now_ms.saturating_add(milliseconds(terms.config.idempotency.0));
            let domain = terms.domain.clone();
            let row = KeyRow { function: new.function, domain, id, expires_ms, request: digest };
            self.staged.push(Change::AddKey(key, row.clone()));
            self.enter_key(key, row);
        }
        Ok(Queued { id, is_duplicate: false })
    }

    fn check_room(
        &self,
        function: &str,
        bytes: u64,
        has_key: bool,
        terms: &Terms,
    ) -> Result<(), String> {
        let bounds = self.bounds();
        let none = Book::default();
        let book = self.books.get(function).unwrap_or(&none);
        let share = self.tenants.get(&terms.domain).copied().unwrap_or_default();
        let of_tenant = share.bytes;
        if book.entries() >= u64::from(terms.config.entries.get()) {
            return Err(format!(
                "{} invocations of `{function}` wait, as many as `async.entries` allows",
                book.entries()
            ));
        }
        if book.bytes + bytes > terms.config.bytes.bytes() {
            return Err(format!(
                "the queue of `{function}` holds {} bytes; `async.bytes` allows no more",
                book.bytes
            ));
        }
        if let Some(most) = terms.tenant_bytes
            && of_tenant + bytes + u64::from(has_key) * KEY_BYTES > most.bytes()
        {
            return Err(format!(
                "the queues of its tenant hold {of_tenant} bytes; its quota `queue` is {most}"
            ));
        }
        if self.entries >= bounds.entries || self.bytes + bytes > bounds.bytes {
            return Err("the queues of the node are full".to_owned());
        }
        // As with places of attempts, there is always room for one more tenant. Functions without
        // a domain are the operator's, not one tenant's.
        let is_tenants = terms.domain.is_some();
        let share_of = |all, of_others| if is_tenants { half(all, of_others) } else { all };
        let most = share_of(bounds.entries, self.entries - share.entries);
        let most_bytes = share_of(bounds.bytes, self.bytes - share.entry_bytes);
        let most_keys = match is_tenants {
            true => half(bounds.keys, self.keys.len() - share.keys),
            false => bounds.keys,
        };
        if share.entries >= most || share.entry_bytes + bytes > most_bytes {
            return Err(format!(
                "{} invocations of {} bytes of its tenant wait, half of what the node has for all \
                 others and it",
                share.entries, share.entry_bytes
            ));
        }
        if has_key
            && (book.keys.len() >= bounds.keys_of_a_function
                || share.keys >= most_keys
                || self.keys.len() >= bounds.keys)
        {
            return Err(format!(
                "too many idempotency keys of `{function}` are known; shorten `async.idempotency`"
            ));
        }
        Ok(())
    }

    // Schedules.

    /// What is known of a schedule.
    pub fn schedule(&self, name: &str) -> Option<&ScheduleRow> {
        self.schedules.get(name)
    }

    pub fn schedules(&self) -> BTreeMap<String, ScheduleRow> {
        self.schedules.clone()
    }

    pub fn set_schedule(&mut self, name: &str, row: ScheduleRow) {
        self.staged.push(Change::SetSchedule(name.to_owned(), row.clone()));
        self.schedules.insert(name.to_owned(), row);
    }

    pub fn remove_schedule(&mut self, name: &str) {
        if self.schedules.remove(name).is_some() {
            self.staged.push(Change::RemoveSchedule(name.to_owned()));
        }
    }

    /// Whether an invocation is queued or runs.
    pub fn is_open(&self, id: InvocationId) -> bool {
        self.records.get(&id).is_some_and(|record| record.dead.is_none())
    }
}

/// The invocation of the largest function of the largest tenant, of functions with their tenants,
/// their sizes and an invocation each.
fn of_largest<'a>(
    functions: impl Iterator<Item = (&'a Option<String>, u64, InvocationId)>,
) -> Option<InvocationId> {
    let mut of_tenants: HashMap<&Option<String>, (u64, u64, InvocationId)> = HashMap::new();
    for (domain, size, id) in functions {
        let (sum, largest, of_it) = of_tenants.entry(domain).or_insert((0, size, id));
        *sum += size;
        if size > *largest {
            (*largest, *of_it) = (size, id);
        }
    }
    of_tenants.into_values().max_by_key(|(sum, ..)| *sum).map(|(.., id)| id)
}

fn hash(function: &str, key: &[u8]) -> Key {
    let mut hasher = blake3::Hasher::new();
    hasher.update(&(function.len() as u64).to_le_bytes());
    hasher.update(function.as_bytes());
    hasher.update(key);
    *hasher.finalize().as_bytes()
}

/// Half of what others leave of all: what one tenant may have.
fn half<T>(all: T, of_others: T) -> T
where
    T: Copy + Ord + From<u8> + std::ops::Sub<Output = T> + std::ops::Div<Output = T>,
{
    let left = if all > of_others { all - of_others } else { T::from(0) };
    left / T::from(2)
}

fn milliseconds(time: std::time::Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}

fn shortened(mut text: String) -> String {
    text.truncate(beginning(&text, REASON_MAX).len());
    text
}
