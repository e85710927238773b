//! What operators see of the queue and do with it.

use super::{Book, Ledger, Which, milliseconds};
use crate::metrics::QueueInfo;
use crate::triggers::file::{FileError, Key, NoRequest};
use crate::triggers::record::{InvocationId, InvocationInfo, QueuedRequest, Record, Terms};
use std::collections::{HashMap, HashSet};

impl Ledger {
    /// Queues dead letters again, with all attempts before them; how many.
    pub fn retry(
        &mut self,
        function: &str,
        which: Which,
        terms: &Terms,
        now_ms: u64,
    ) -> Result<u64, String> {
        let mut count = 0;
        for id in self.select(function, which) {
            let Some(record) = self.records.get(&id).filter(|record| record.dead.is_some()) else {
                continue;
            };
            if let Err(full) = self.check_room(function, record.bytes, false, terms) {
                return Err(format!("{count} dead letters are queued again; {full}"));
            }
            let expires_ms = now_ms.saturating_add(milliseconds(terms.config.max_age.0));
            self.update(id, |record| {
                record.dead = None;
                (record.attempts, record.deferrals) = (0, 0);
                (record.due_ms, record.expires_ms) = (now_ms, expires_ms);
            });
            count += 1;
        }
        Ok(count)
    }

    /// Removes invocations that are not being attempted, and their idempotency keys; how many
    /// invocations. With those that wait go the keys and results of what is done, too.
    pub fn purge(&mut self, function: &str, which: Which) -> u64 {
        let chosen = self.select(function, which);
        let count = chosen.len() as u64;
        let removed: HashSet<InvocationId> = chosen.iter().copied().collect();
        let is_over = |id: InvocationId| which == Which::Queued && !self.records.contains_key(&id);
        let keys = self.books.get(function).into_iter().flat_map(|book| &book.keys);
        let goes = |key: &Key| {
            self.keys.get(key).is_some_and(|row| removed.contains(&row.id) || is_over(row.id))
        };
        let keys: Vec<Key> = keys.map(|(_, key)| *key).filter(goes).collect();
        keys.into_iter().for_each(|key| self.remove_key(key));
        chosen.into_iter().for_each(|id| self.remove(id));
        if which == Which::Queued {
            self.forget_results(function);
        }
        count
    }

    fn select(&self, function: &str, which: Which) -> Vec<InvocationId> {
        let Some(book) = self.books.get(function) else { return Vec::new() };
        match which {
            Which::Dead => book.dead.iter().map(|(_, id)| *id).collect(),
            Which::Queued => book.due.iter().map(|(_, id)| *id).collect(),
            Which::One(id) => {
                let record = self.records.get(&id).filter(|record| record.function == function);
                record.filter(|_| !book.running.contains(&id)).map(|_| id).into_iter().collect()
            }
        }
    }

    /// Invocations of a function, those that are attempted first, then those that wait, then the
    /// dead letters, newest first.
    pub fn list(&self, function: &str, most: usize) -> Vec<InvocationInfo> {
        let Some(book) = self.books.get(function) else { return Vec::new() };
        let due = book.due.iter().map(|(_, id)| id);
        let dead = book.dead.iter().rev().map(|(_, id)| id);
        let all = book.running.iter().chain(due).chain(dead);
        all.take(most).filter_map(|id| self.info(*id)).collect()
    }

    fn info(&self, id: InvocationId) -> Option<InvocationInfo> {
        let record = self.records.get(&id)?.clone();
        Some(InvocationInfo { id, state: self.state_of(id, &record).to_owned(), record })
    }

    /// How one is that is known.
    pub(super) fn state_of(&self, id: InvocationId, record: &Record) -> &'static str {
        let book = self.books.get(&record.function);
        match (&record.dead, book.is_some_and(|book| book.running.contains(&id))) {
            (Some(_), _) => "dead",
            (None, true) => "running",
            (None, false) => "queued",
        }
    }

    /// One of them with its request.
    pub fn show(
        &mut self,
        function: &str,
        id: InvocationId,
    ) -> Option<Result<(InvocationInfo, QueuedRequest), FileError>> {
        let info = self.info(id).filter(|info| info.record.function == function)?;
        let request = self.file.as_ref()?.request(id);
        Some(match request {
            Ok(request) => Ok((info, request)),
            Err(NoRequest::Damaged(why)) => Err(why),
            Err(NoRequest::Unread(why)) => {
                // It is opened anew.
                self.failed = Some(why.clone());
                Err(why)
            }
        })
    }

    /// All queues in numbers, by function.
    pub fn queues(&self) -> Vec<QueueInfo> {
        let info = |(name, book): (&String, &Book)| QueueInfo {
            function: name.clone(),
            queued: book.due.len() as u64,
            running: book.running.len() as u64,
            dead: book.dead.len() as u64,
            bytes: book.bytes,
            dead_bytes: book.dead_bytes,
            oldest_ms: book.ages.first().map(|(at, _)| *at),
        };
        self.books.iter().map(info).collect()
    }

    /// Bytes that tenants have in queues, by domain.
    pub fn bytes_of_tenants(&self) -> HashMap<Option<String>, u64> {
        self.tenants.iter().map(|(domain, share)| (domain.clone(), share.bytes)).collect()
    }
}
