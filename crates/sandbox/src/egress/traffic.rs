//! Bytes of TCP connections: of a function, of a sandbox, and whose a connection's are.

use std::ops::{Add, Sub};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::budget::Budget;
use super::ledger::Ledger;

/// Bytes of what connections have carried, without headers of packets and what was sent again.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct EgressBytes {
    /// Those that the other side has confirmed.
    pub sent: u64,
    /// Those that have come.
    pub received: u64,
}

impl Add for EgressBytes {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        let sent = self.sent.wrapping_add(other.sent);
        Self { sent, received: self.received.wrapping_add(other.received) }
    }
}

impl Sub for EgressBytes {
    type Output = Self;

    /// What is more than `other`, which was earlier.
    fn sub(self, other: Self) -> Self {
        let sent = self.sent.saturating_sub(other.sent);
        Self { sent, received: self.received.saturating_sub(other.received) }
    }
}

/// Counters of bytes that only rise.
#[derive(Debug, Default)]
pub struct Traffic {
    sent: AtomicU64,
    received: AtomicU64,
}

impl Traffic {
    pub fn add(&self, bytes: EgressBytes) {
        self.sent.fetch_add(bytes.sent, Ordering::Relaxed);
        self.received.fetch_add(bytes.received, Ordering::Relaxed);
    }

    pub fn read(&self) -> EgressBytes {
        let sent = self.sent.load(Ordering::Relaxed);
        EgressBytes { sent, received: self.received.load(Ordering::Relaxed) }
    }
}

/// What is counted of a function, whatever version of it is served.
#[derive(Debug, Default)]
pub struct FunctionTraffic {
    pub bytes: Traffic,
    /// Connections whose bytes are not counted, or not all of them.
    pub uncounted: AtomicU64,
    /// Connections that are counted now.
    pub open: AtomicUsize,
}

impl FunctionTraffic {
    /// Whether there was a connection.
    pub fn is_used(&self) -> bool {
        self.open.load(Ordering::Relaxed) > 0
            || self.uncounted.load(Ordering::Relaxed) > 0
            || self.bytes.read() != EgressBytes::default()
    }
}

/// What is counted of a sandbox that stays, also while no process of it lives.
#[derive(Debug, Default)]
pub struct SandboxTraffic {
    /// Of all its connections.
    pub all: Traffic,
    /// The part of those that have ended.
    pub ended: Traffic,
}

/// Who has a connection: the process of one sandbox.
#[derive(Debug)]
pub struct Account {
    /// Of its function.
    budget: Arc<Budget>,
    sandbox: Mutex<Option<Arc<SandboxTraffic>>>,
    /// Its sockets, and the bytes of those that have ended, for the next daemon, once that is to
    /// know them.
    ledger: Mutex<Option<Ledger>>,
}

impl Account {
    /// One of a sandbox of the function that has this budget.
    pub fn of(budget: Arc<Budget>) -> Self {
        Self { budget, sandbox: Mutex::default(), ledger: Mutex::default() }
    }

    /// What is counted of its function.
    pub fn function(&self) -> &FunctionTraffic {
        self.budget.traffic()
    }

    /// Counts what is added from now on for this sandbox, too.
    pub fn count_for(&self, sandbox: Option<Arc<SandboxTraffic>>) {
        *lock(&self.sandbox) = sandbox;
    }

    /// A connection has carried so much more.
    pub fn add(&self, more: EgressBytes) {
        self.function().bytes.add(more);
        self.add_to_sandbox(more);
    }

    /// A connection had carried so much before this daemon, which counts for the sandbox and was
    /// counted for the function by the daemon before.
    pub fn add_to_sandbox(&self, more: EgressBytes) {
        if let Some(sandbox) = &*lock(&self.sandbox) {
            sandbox.all.add(more);
        }
    }

    /// The connection with this inode number has ended, and has carried so much since its
    /// beginning. It counts no more where there may be so many.
    pub fn ended(&self, inode: u64, all: EgressBytes) {
        self.budget.forget(inode);
        let Some(sandbox) = lock(&self.sandbox).clone() else { return };
        sandbox.ended.add(all);
        if let Some(ledger) = &*self.ledger() {
            // Without room on the host the next daemon counts these bytes not at all.
            let _ = ledger.note_ended(sandbox.ended.read());
        }
    }

    /// Connections that ended under an earlier daemon have carried so much.
    pub fn had_before(&self, ended: EgressBytes) {
        if let Some(sandbox) = &*lock(&self.sandbox) {
            sandbox.all.add(ended);
            sandbox.ended.add(ended);
        }
    }

    /// What connections of the sandbox that have ended have carried.
    pub fn of_ended(&self) -> EgressBytes {
        lock(&self.sandbox).as_ref().map(|sandbox| sandbox.ended.read()).unwrap_or_default()
    }

    /// The file for the next daemon.
    pub fn ledger(&self) -> MutexGuard<'_, Option<Ledger>> {
        lock(&self.ledger)
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
