//! How attempts and invocations end, and how long what is dead is kept.

use super::{Book, Ledger, milliseconds, of_largest, shortened};
use crate::triggers::destinations::Ended;
use crate::triggers::record::{Death, InvocationId, Outcome, Terms};
use crate::triggers::retry::{chance, wait_ms};
use std::collections::BTreeSet;
use thaw_home::config::AsyncConfig;

/// How long a dead letter is kept.
const DEAD_LETTERS_KEPT_MS: u64 = 14 * 24 * 3600 * 1000;

impl Ledger {
    /// An attempt is over.
    pub fn finish(&mut self, id: InvocationId, outcome: Outcome, terms: &Terms, now_ms: u64) {
        let Some(record) = self.records.get(&id) else { return };
        self.finished.insert(id);
        let (config, function) = (&terms.config, record.function.clone());
        let (attempts, deferrals) = (record.attempts + 1, record.deferrals.saturating_add(1));
        match outcome {
            Outcome::Done(status) => self.succeed(id, status, config, now_ms),
            Outcome::Refused(reason) => {
                self.update(id, |record| record.attempts = attempts);
                self.bury(id, format!("the function refused it: {reason}"), now_ms);
            }
            Outcome::Failed { reason, .. } if attempts >= config.attempts.get() => {
                self.update(id, |record| record.attempts = attempts);
                self.bury(
                    id,
                    format!("attempt {attempts}, the last one, failed: {reason}"),
                    now_ms,
                );
            }
            Outcome::Failed { reason, retry_after_ms } => {
                let asked = retry_after_ms.unwrap_or(0).min(milliseconds(config.backoff_max.0));
                let wait = wait_ms(config, attempts, chance()).max(asked);
                self.update(id, |record| {
                    record.attempts = attempts;
                    record.deferrals = 0;
                    record.due_ms = now_ms + wait;
                    record.last = Some(shortened(reason));
                });
            }
            Outcome::Deferred(reason) => {
                let wait = wait_ms(config, deferrals, chance());
                self.update(id, |record| {
                    record.deferrals = deferrals;
                    record.due_ms = now_ms + wait;
                    record.last = Some(shortened(reason));
                });
            }
        }
        self.bound_dead_letters(&function, config);
    }

    /// Gives an invocation up.
    pub(super) fn bury(&mut self, id: InvocationId, reason: String, now_ms: u64) {
        let reason = shortened(reason);
        if let Some(record) = self.records.get(&id) {
            let function = record.function.as_str();
            tracing::warn!(function, invocation = %id, "gave up an invocation: {reason}");
        }
        self.update(id, |record| record.dead = Some(Death { at_ms: now_ms, reason }));
        if let Some(record) = self.records.get(&id) {
            self.ended.push(Ended { id, record: record.clone(), status: None });
        }
    }

    /// Those that have come to an end since the last call.
    pub(in crate::triggers) fn take_ended(&mut self) -> Vec<Ended> {
        std::mem::take(&mut self.ended)
    }

    /// Forgets the oldest dead letters of a function beyond what it may keep.
    fn bound_dead_letters(&mut self, function: &str, config: &AsyncConfig) {
        while let Some(book) = self.books.get(function)
            && (book.dead.len() > config.dead_letters as usize
                || book.dead_bytes > config.bytes.bytes())
            && let Some((_, oldest)) = book.dead.first().copied()
        {
            self.remove(oldest);
        }
    }

    /// Gives up what is too old, and forgets dead letters and keys that are.
    /// `config` says how a function's queue is.
    pub fn expire(&mut self, now_ms: u64, config: impl Fn(&str) -> AsyncConfig) {
        let is_over = |at: u64| at <= now_ms;
        let mut old = Vec::new();
        let mut grown = BTreeSet::new();
        let mut forgotten = Vec::new();
        let mut keys = Vec::new();
        for book in self.books.values() {
            let expired = book.expiring.iter().take_while(|(at, _)| is_over(*at));
            // What is being attempted may still come to an end.
            old.extend(expired.map(|(_, id)| *id).filter(|id| !book.running.contains(id)));
            let dead = book.dead.iter();
            let is_kept = |at: u64| at.saturating_add(DEAD_LETTERS_KEPT_MS) > now_ms;
            forgotten.extend(dead.take_while(|(at, _)| !is_kept(*at)).map(|(_, id)| *id));
            keys.extend(book.keys.iter().take_while(|(at, _)| is_over(*at)).map(|(_, key)| *key));
        }
        for id in old {
            grown.extend(self.records.get(&id).map(|record| record.function.clone()));
            let last = self.records.get(&id).and_then(|record| record.last.clone());
            let last = last.map_or(String::new(), |last| format!("; the last attempt: {last}"));
            self.bury(id, format!("it was older than `async.max_age`{last}"), now_ms);
        }
        grown.iter().for_each(|name| self.bound_dead_letters(name, &config(name)));
        forgotten.into_iter().for_each(|id| self.remove(id));
        keys.into_iter().for_each(|key| self.remove_key(key));
        self.expire_results(now_ms);
        while (self.dead_bytes > self.bounds().dead_bytes || self.dead > self.bounds().dead)
            && let Some(oldest) = self.oldest_of_largest(self.dead > self.bounds().dead)
        {
            self.remove(oldest);
        }
    }

    /// The oldest dead letter of the largest function of the largest tenant, by number or by bytes.
    fn oldest_of_largest(&self, by_number: bool) -> Option<InvocationId> {
        let size = |book: &Book| if by_number { book.dead.len() as u64 } else { book.dead_bytes };
        let of_books = self.books.values().filter_map(|book| {
            let (_, oldest) = book.dead.first()?;
            Some((&self.records.get(oldest)?.domain, size(book), *oldest))
        });
        of_largest(of_books)
    }
}
