//! Whose turn it is: which invocations are attempted next.

use super::{Ledger, Unread};
use crate::triggers::file::{FileError, NoRequest};
use crate::triggers::record::{InvocationId, Job, Unavailable};
use std::collections::HashMap;
use std::ops::Bound::{Excluded, Unbounded};

/// No wait between two attempts is longer: the clock went back.
const LONGEST_WAIT_MS: u64 = 2 * 3600 * 1000;
/// How often a request is tried that the host does not read, before its invocation is given up.
const UNREAD_MAX: u32 = 5;
/// How long it is left alone after that; longer each time.
const UNREAD_WAIT_MS: u64 = 5_000;

/// What there is to do now.
#[derive(Debug, Default)]
pub(in crate::triggers) struct Taken {
    pub jobs: Vec<Job>,
    /// When the next one is due for which there is room, in milliseconds since 1970.
    pub next_due_ms: Option<u64>,
}

/// Who has the places of attempts.
#[derive(Debug)]
struct Places {
    all: usize,
    taken: usize,
    of_tenants: HashMap<Option<String>, usize>,
}

impl Places {
    /// Gives a tenant one more; whether it may have that.
    fn take(&mut self, domain: Option<String>) -> bool {
        let own = self.of_tenants.entry(domain).or_default();
        let others = self.taken - *own;
        let may = *own < (self.all.saturating_sub(others) / 2).max(1);
        *own += usize::from(may);
        self.taken += usize::from(may);
        may
    }
}

impl Ledger {
    /// What is due, one of each function in turn; `room` says how many more of a function may
    /// be attempted when so many are, and `most` is for all. A tenant gets half of the places that
    /// the others leave, at least one: attempts may take long.
    pub fn take(
        &mut self,
        now_ms: u64,
        most: usize,
        room: impl Fn(&str, usize) -> usize,
    ) -> Result<Taken, Unavailable> {
        self.rebase(now_ms);
        let after = |last: &str| (Excluded(last.to_owned()), Unbounded);
        let later = self.books.range(after(&self.last_served)).map(|(name, _)| name.clone());
        let earlier = self.books.range(..=self.last_served.clone()).map(|(name, _)| name.clone());
        let order: Vec<String> = later.chain(earlier).collect();
        let mut taken = Taken::default();
        let waits = order.into_iter().filter_map(|name| {
            let book = &self.books[&name];
            let left = if book.due.is_empty() { 0 } else { room(&name, book.running.len()) };
            (left > 0).then_some((name, left))
        });
        let mut waiting: Vec<(String, usize)> = waits.collect();
        let first = |ledger: &Self, name: &str| {
            let mut due = ledger.books.get(name)?.due.iter();
            let is_left_alone = |id: &InvocationId| {
                ledger.unread.get(id).is_some_and(|unread| unread.again_ms > now_ms)
            };
            due.find(|(_, id)| !ledger.fresh.contains(id) && !is_left_alone(id)).copied()
        };
        let mut places = self.places(most);
        let mut found_one = true;
        while found_one {
            found_one = false;
            for (name, left) in waiting.iter_mut().filter(|(_, left)| *left > 0) {
                if taken.jobs.len() >= most {
                    return Ok(taken);
                }
                let due = first(self, name).filter(|(due, _)| *due <= now_ms);
                let Some((_, id)) = due else { continue };
                let domain = self.records.get(&id).and_then(|record| record.domain.clone());
                if !places.take(domain) {
                    // It goes on when an attempt of its tenant is over.
                    *left = 0;
                    continue;
                }
                *left -= 1;
                found_one = true;
                if let Some(job) = self.start(id, now_ms)? {
                    taken.jobs.push(job);
                    self.last_served.clone_from(name);
                }
            }
        }
        waiting.retain(|(_, left)| *left > 0);
        let next = waiting.iter().filter_map(|(name, _)| first(self, name));
        taken.next_due_ms = next.map(|(due, _)| due).min();
        Ok(taken)
    }

    /// All places of attempts, `free` of which nobody has.
    fn places(&self, free: usize) -> Places {
        let mut places = Places { all: free, taken: 0, of_tenants: HashMap::new() };
        for id in self.books.values().flat_map(|book| &book.running) {
            if let Some(record) = self.records.get(id) {
                places.all += 1;
                places.taken += 1;
                *places.of_tenants.entry(record.domain.clone()).or_default() += 1;
            }
        }
        places
    }

    /// Begins an attempt. After an error nothing is as it is here: the file is opened anew.
    fn start(&mut self, id: InvocationId, now_ms: u64) -> Result<Option<Job>, Unavailable> {
        let Some(file) = &self.file else { return Err(Unavailable("it is closed".to_owned())) };
        let Some(record) = self.records.get(&id).cloned() else { return Ok(None) };
        let request = match file.request(id) {
            Ok(request) => request,
            Err(NoRequest::Damaged(reason)) => {
                self.bury(id, reason, now_ms);
                return Ok(None);
            }
            Err(NoRequest::Unread(why)) => return self.does_not_read(id, why, now_ms),
        };
        self.unread.remove(&id);
        if let Some(book) = self.books.get_mut(&record.function) {
            book.due.remove(&(record.due_ms, id));
            book.running.insert(id);
            self.begun.insert(id);
        }
        Ok(Some(Job { id, record, request }))
    }

    /// The host has not read a request. That may be over soon; one that is never read keeps no other
    /// waiting, and is given up.
    fn does_not_read(
        &mut self,
        id: InvocationId,
        why: FileError,
        now_ms: u64,
    ) -> Result<Option<Job>, Unavailable> {
        let times = self.unread.get(&id).map_or(1, |unread| unread.times + 1);
        if times > UNREAD_MAX {
            self.unread.remove(&id);
            let reason = format!("its request was not read in {UNREAD_MAX} tries: {why}");
            self.bury(id, reason, now_ms);
            return Ok(None);
        }
        let again_ms = now_ms.saturating_add(UNREAD_WAIT_MS * u64::from(times));
        self.unread.insert(id, Unread { times, again_ms });
        self.failed = Some(why.clone());
        Err(Unavailable(why))
    }

    /// No due time lies further ahead than waits are long, unless the clock went back.
    fn rebase(&mut self, now_ms: u64) {
        let horizon = now_ms.saturating_add(LONGEST_WAIT_MS);
        for book in self.books.values_mut() {
            if book.due.first().is_none_or(|(due, _)| *due <= horizon) {
                continue;
            }
            let late: Vec<_> = std::mem::take(&mut book.due).into_iter().collect();
            for (_, id) in late {
                book.due.insert((now_ms, id));
                if let Some(record) = self.records.get_mut(&id) {
                    record.due_ms = now_ms;
                }
            }
        }
    }
}
