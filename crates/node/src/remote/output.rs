//! What a process prints, kept within a bound.

use serde::{Deserialize, Serialize};
use std::collections::VecDeque;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use tokio::sync::Notify;

/// Most bytes that are kept of what one process has printed.
pub(super) const KEPT_MAX: usize = 256 << 10;
/// Most bytes that are kept of all processes of a node. Beyond that each keeps what it has last
/// printed.
const KEPT_IN_ALL: usize = 64 << 20;
/// The least that one keeps.
const KEPT_MIN: usize = 8 << 10;

/// Bytes of a piece to which no more are added.
const PIECE_MAX: usize = 4 << 10;
/// Bytes of memory that a piece takes beside its own.
const PIECE_COST: usize = 64;

/// Most who read what one process prints at a time.
pub const READERS_MAX: usize = 16;

/// Bytes that are kept of all processes.
static KEPT: AtomicUsize = AtomicUsize::new(0);

/// Where bytes were printed to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Stream {
    /// Standard output, or the terminal.
    Stdout,
    /// Standard error.
    Stderr,
}

/// What a reader gets next.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Next {
    /// Bytes.
    Bytes(Stream, Vec<u8>),
    /// So many bytes were printed and not kept.
    Lost(u64),
    /// All there is.
    End,
}

struct Kept {
    pieces: VecDeque<(Stream, Vec<u8>)>,
    /// Number of bytes printed before the first piece.
    from: u64,
    /// Bytes of memory that the pieces take.
    bytes: usize,
    /// Where each attached reader is.
    readers: Vec<Arc<Mutex<u64>>>,
    is_ended: bool,
}

/// What one process prints.
pub struct Output {
    kept: Mutex<Kept>,
    /// There is more, or it has ended.
    more: Notify,
    /// A reader has taken something, or has gone.
    taken: Notify,
}

impl Output {
    pub fn new() -> Arc<Self> {
        let kept = Kept {
            pieces: VecDeque::new(),
            from: 0,
            bytes: 0,
            readers: Vec::new(),
            is_ended: false,
        };
        Arc::new(Self { kept: Mutex::new(kept), more: Notify::new(), taken: Notify::new() })
    }

    /// Keeps what was printed. Waits while somebody who reads has not taken what would have to be
    /// dropped for it: the process waits then, as it would for a pipe.
    pub async fn put(&self, stream: Stream, bytes: &[u8]) {
        loop {
            let taken = self.taken.notified();
            tokio::pin!(taken);
            taken.as_mut().enable();
            if self.try_put(stream, bytes) {
                return self.more.notify_waiters();
            }
            taken.await;
        }
    }

    fn try_put(&self, stream: Stream, bytes: &[u8]) -> bool {
        let mut kept = self.kept();
        let room = match KEPT.load(Ordering::Relaxed) > KEPT_IN_ALL {
            true => KEPT_MIN,
            false => KEPT_MAX,
        };
        while kept.bytes > 0 && kept.bytes + bytes.len() > room {
            let end = kept.from + kept.pieces.front().map_or(0, |(_, bytes)| bytes.len() as u64);
            let is_wanted = |at: &Arc<Mutex<u64>>| *at.lock().expect("no holder panics") < end;
            if kept.readers.iter().any(is_wanted) {
                return false;
            }
            kept.drop_first();
        }
        kept.append(stream, bytes);
        true
    }

    /// The same for what follows alone.
    pub fn reader_from_now(self: &Arc<Self>) -> Option<Reader> {
        let reader = self.reader()?;
        *reader.at.lock().expect("no holder panics") = self.kept().end();
        self.taken.notify_waiters();
        Some(reader)
    }

    /// Nothing more is printed.
    pub fn end(&self) {
        self.kept().is_ended = true;
        self.more.notify_waiters();
    }

    /// Somebody who reads all that is kept, and what follows; `None` if too many do.
    pub fn reader(self: &Arc<Self>) -> Option<Reader> {
        let at = Arc::new(Mutex::new(0));
        let mut kept = self.kept();
        if kept.readers.len() >= READERS_MAX {
            return None;
        }
        kept.readers.push(at.clone());
        Some(Reader { output: self.clone(), at })
    }

    fn kept(&self) -> MutexGuard<'_, Kept> {
        self.kept.lock().expect("no holder panics")
    }
}

impl Kept {
    /// Adds bytes to the last piece if they are of the same stream and it is short: readers count
    /// bytes, and a program that prints one at a time makes few pieces.
    fn append(&mut self, stream: Stream, bytes: &[u8]) {
        let cost = match self.pieces.back_mut() {
            Some((last, piece)) if *last == stream && piece.len() < PIECE_MAX => {
                piece.extend_from_slice(bytes);
                bytes.len()
            }
            _ => {
                self.pieces.push_back((stream, bytes.to_vec()));
                bytes.len() + PIECE_COST
            }
        };
        self.bytes += cost;
        KEPT.fetch_add(cost, Ordering::Relaxed);
    }

    fn drop_first(&mut self) {
        if let Some((_, bytes)) = self.pieces.pop_front() {
            self.from += bytes.len() as u64;
            self.bytes -= bytes.len() + PIECE_COST;
            KEPT.fetch_sub(bytes.len() + PIECE_COST, Ordering::Relaxed);
        }
    }

    /// How many bytes were printed in all.
    fn end(&self) -> u64 {
        self.from + self.pieces.iter().map(|(_, bytes)| bytes.len() as u64).sum::<u64>()
    }
}

impl Drop for Kept {
    fn drop(&mut self) {
        KEPT.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

/// Reads what a process prints; as long as it is there the process waits for it.
pub struct Reader {
    output: Arc<Output>,
    at: Arc<Mutex<u64>>,
}

impl Reader {
    /// What comes next; waits for it.
    pub async fn next(&mut self) -> Next {
        loop {
            let more = self.output.more.notified();
            tokio::pin!(more);
            more.as_mut().enable();
            if let Some(next) = self.try_next() {
                return next;
            }
            more.await;
        }
    }

    /// What is kept of it now; `None`: nothing more yet.
    pub fn try_next(&self) -> Option<Next> {
        let next = {
            let kept = self.output.kept();
            let mut at = self.at.lock().expect("no holder panics");
            if *at < kept.from {
                let lost = kept.from - *at;
                *at = kept.from;
                return Some(Next::Lost(lost));
            }
            let mut begin = kept.from;
            let found = kept.pieces.iter().find_map(|(stream, bytes)| {
                let end = begin + bytes.len() as u64;
                let rest = (*at < end).then(|| &bytes[(*at - begin) as usize..]);
                begin = end;
                rest.map(|rest| (*stream, rest.to_vec()))
            });
            match found {
                Some((stream, bytes)) => {
                    *at += bytes.len() as u64;
                    Some(Next::Bytes(stream, bytes))
                }
                None => kept.is_ended.then_some(Next::End),
            }
        };
        self.output.taken.notify_waiters();
        next
    }
}

impl Drop for Reader {
    fn drop(&mut self) {
        self.output.kept().readers.retain(|at| !Arc::ptr_eq(at, &self.at));
        self.output.taken.notify_waiters();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;
    use tokio::time::timeout;

    #[tokio::test]
    async fn a_program_that_prints_single_bytes_makes_few_pieces() {
        let output = Output::new();
        for n in 0..100_000u32 {
            output.put(Stream::Stdout, &[n as u8]).await;
        }
        assert!(output.kept().pieces.len() <= 100_000 / PIECE_MAX + 1);
        for _ in 0..50_000 {
            output.put(Stream::Stdout, b"o").await;
            output.put(Stream::Stderr, b"e").await;
        }
        // Pieces that cannot be joined cost what they take.
        assert!(output.kept().pieces.len() <= KEPT_MAX / PIECE_COST);
        let mut reader = output.reader_from_now().unwrap();
        output.put(Stream::Stdout, b"new").await;
        output.end();
        assert_eq!(reader.next().await, Next::Bytes(Stream::Stdout, b"new".to_vec()));
        assert_eq!(reader.next().await, Next::End);
    }

    #[tokio::test]
    async fn nobody_reads_and_the_last_bytes_are_kept() {
        let output = Output::new();
        for n in 0..40u8 {
            output.put(Stream::Stdout, &[n; 16 << 10]).await;
        }
        output.end();
        let mut reader = output.reader().unwrap();
        let Next::Lost(lost) = reader.next().await else { panic!("some bytes are lost") };
        let pieces = KEPT_MAX / ((16 << 10) + PIECE_COST);
        assert_eq!(lost as usize, (40 - pieces) << 14);
        let mut got = 0;
        loop {
            match reader.next().await {
                Next::Bytes(Stream::Stdout, bytes) => got += bytes.len(),
                Next::End => break,
                next => panic!("{next:?}"),
            }
        }
        assert_eq!(got, pieces << 14);
    }

    #[tokio::test]
    async fn somebody_reads_and_nothing_is_lost() {
        let output = Output::new();
        let mut reader = output.reader().unwrap();
        let writer = output.clone();
        let writing = tokio::spawn(async move {
            for _ in 0..100 {
                writer.put(Stream::Stderr, &[1; 16 << 10]).await;
            }
            writer.end();
        });
        // It waits as long as nothing is taken.
        tokio::time::sleep(Duration::from_millis(50)).await;
        assert!(!writing.is_finished());
        let mut got = 0;
        while let Next::Bytes(_, bytes) = reader.next().await {
            got += bytes.len();
        }
        assert_eq!(got, 100 << 14);
        // One who goes away holds up nobody.
        let output = Output::new();
        let reader = output.reader().unwrap();
        output.put(Stream::Stdout, &[0; KEPT_MAX]).await;
        drop(reader);
        timeout(Duration::from_secs(60), output.put(Stream::Stdout, &[0; 10])).await.unwrap();
    }

    #[test]
    fn no_more_than_the_bound_read_one_process() {
        let output = Output::new();
        let mut readers: Vec<_> = (0..READERS_MAX).map(|_| output.reader().unwrap()).collect();
        assert!(output.reader().is_none());
        drop(readers.pop());
        assert!(output.reader().is_some());
    }
}
