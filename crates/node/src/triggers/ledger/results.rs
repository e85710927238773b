//! What is kept of invocations that are done, for who has queued them.

use super::{Ended, Ledger, ResultRow, milliseconds, of_largest};
use crate::triggers::file::Change;
use crate::triggers::record::{InvocationId, InvocationStatus};
use thaw_home::config::AsyncConfig;

impl Ledger {
    /// An invocation is done: its function has answered with `status`.
    pub(super) fn succeed(
        &mut self,
        id: InvocationId,
        status: u16,
        config: &AsyncConfig,
        now_ms: u64,
    ) {
        let Some(record) = self.records.get(&id).cloned() else { return };
        self.remove(id);
        let kept_ms = milliseconds(config.results.0);
        if kept_ms > 0 {
            let row = ResultRow {
                function: record.function.clone(),
                domain: record.domain.clone(),
                status,
                attempts: record.attempts + 1,
                expires_ms: now_ms.saturating_add(kept_ms),
            };
            self.staged.push(Change::AddResult(id, row.clone()));
            self.enter_result(id, row);
            self.bound_results(&record.function, config.entries.get() as usize);
        }
        self.ended.push(Ended { id, record, status: Some(status) });
    }

    pub(super) fn enter_result(&mut self, id: InvocationId, row: ResultRow) {
        let book = self.books.entry(row.function.clone()).or_default();
        book.results.insert((row.expires_ms, id));
        self.results.insert(id, row);
    }

    fn remove_result(&mut self, id: InvocationId) {
        let Some(row) = self.results.remove(&id) else { return };
        self.staged.push(Change::RemoveResult(id));
        if let Some(book) = self.books.get_mut(&row.function) {
            book.results.remove(&(row.expires_ms, id));
            if book.is_empty() {
                self.books.remove(&row.function);
            }
        }
    }

    /// Forgets the oldest results of a function beyond `most`, and those of the largest function of
    /// the largest tenant while the node has too many.
    fn bound_results(&mut self, function: &str, most: usize) {
        while let Some(book) = self.books.get(function)
            && book.results.len() > most
            && let Some((_, id)) = book.results.first().copied()
        {
            self.remove_result(id);
        }
        while self.results.len() > self.bounds().results
            && let Some(id) = self.oldest_result_of_largest()
        {
            self.remove_result(id);
        }
    }

    fn oldest_result_of_largest(&self) -> Option<InvocationId> {
        let of_books = self.books.values().filter_map(|book| {
            let (_, oldest) = book.results.first()?;
            Some((&self.results.get(oldest)?.domain, book.results.len() as u64, *oldest))
        });
        of_largest(of_books)
    }

    pub(super) fn expire_results(&mut self, now_ms: u64) {
        let over = self.books.values().flat_map(|book| {
            let over = book.results.iter().take_while(|(at, _)| *at <= now_ms);
            over.map(|(_, id)| *id)
        });
        let over: Vec<InvocationId> = over.collect();
        over.into_iter().for_each(|id| self.remove_result(id));
    }

    /// Forgets all results of a function.
    pub(super) fn forget_results(&mut self, function: &str) {
        let Some(book) = self.books.get(function) else { return };
        let all: Vec<InvocationId> = book.results.iter().map(|(_, id)| *id).collect();
        all.into_iter().for_each(|id| self.remove_result(id));
    }

    /// How an invocation of a function is; `None`: there is none of that name, or not any more.
    pub fn status(&self, function: &str, id: InvocationId) -> Option<InvocationStatus> {
        if let Some(row) = self.results.get(&id).filter(|row| row.function == function) {
            let (attempts, status) = (row.attempts, Some(row.status));
            return Some(InvocationStatus { id, state: "done", attempts, status });
        }
        let record = self.records.get(&id).filter(|record| record.function == function)?;
        let state = self.state_of(id, record);
        Some(InvocationStatus { id, state, attempts: record.attempts, status: None })
    }
}
