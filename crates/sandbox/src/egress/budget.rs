//! What the sandboxes of one function may use together: a function that has many
//! instances has no more of the host than one that has few.

use std::collections::{HashMap, HashSet};
use std::fs::File;
use std::io::{BufRead, BufReader};
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use rustix::fs::fstat;
use rustix::io::Errno;

use super::rate::Rate;

/// Sockets that one sandbox may ask for at once, and after that one in this time.
const OF_SANDBOX: (u32, Duration) = (1024, Duration::from_millis(2));
/// The same for all sandboxes of a function: 2000 a second.
const OF_FUNCTION: (u32, Duration) = (2048, Duration::from_micros(500));
/// Most sockets that the sandboxes of a function may have open.
pub const OPEN_MAX: usize = 8192;
/// From so many that are not known to be closed on, the host is asked. A function
/// can have asked for no more than the difference to [`OPEN_MAX`] until it answers.
const OPEN_DOUBTFUL: usize = 4096;
/// How often the host is asked at most.
const ASKED_EVERY: Duration = Duration::from_secs(1);
/// Most connections of the sandboxes of a function to the resolver at a time.
pub const CHANNELS_MAX: usize = 256;

/// The budget of one function.
#[derive(Debug)]
pub struct Budget {
    /// Tells it from the others of this process.
    pub id: u64,
    rate: Mutex<Rate>,
    open: Mutex<Open>,
    /// Connections to the resolver.
    pub channels: Arc<AtomicUsize>,
}

/// Sockets that are not known to be closed.
#[derive(Debug)]
struct Open {
    /// The sandbox that has each, by the socket's inode number.
    owners: HashMap<u64, u64>,
    asked: Option<Instant>,
    is_asking: bool,
}

impl Default for Budget {
    fn default() -> Self {
        static IDS: AtomicU64 = AtomicU64::new(0);
        Self {
            id: IDS.fetch_add(1, Ordering::Relaxed),
            rate: Mutex::new(Rate::new(OF_FUNCTION)),
            open: Mutex::new(Open { owners: HashMap::new(), asked: None, is_asking: false }),
            channels: Arc::default(),
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The part of one sandbox. Dropping it, with the sandbox, closes its sockets.
#[derive(Debug)]
pub struct Share {
    budget: Arc<Budget>,
    sandbox: u64,
    rate: Mutex<Rate>,
}

impl Share {
    pub fn new(budget: Arc<Budget>) -> Self {
        static SANDBOXES: AtomicU64 = AtomicU64::new(0);
        let sandbox = SANDBOXES.fetch_add(1, Ordering::Relaxed);
        Self { budget, sandbox, rate: Mutex::new(Rate::new(OF_SANDBOX)) }
    }

    /// Takes leave to ask for a socket; `EAGAIN` if the sandbox or its function has
    /// asked for too many.
    pub fn ask(&self, now: Instant) -> Result<(), Errno> {
        let is_in_time = lock(&self.rate).take(now) && lock(&self.budget.rate).take(now);
        if is_in_time { Ok(()) } else { Err(Errno::AGAIN) }
    }

    /// Notes a socket that the sandbox is about to get; `EAGAIN` if its function has
    /// too many open.
    pub fn note_open(&self, socket: impl AsFd) -> Result<(), Errno> {
        let inode = fstat(socket)?.st_ino;
        let mut open = lock(&self.budget.open);
        if open.owners.len() >= OPEN_MAX {
            return Err(Errno::AGAIN);
        }
        open.owners.insert(inode, self.sandbox);
        Ok(())
    }

    /// Whether somebody should call [`Budget::forget_closed`], on a thread that may
    /// wait: at most one at a time is told so.
    pub fn is_in_doubt(&self, now: Instant) -> bool {
        let mut open = lock(&self.budget.open);
        let is_due = open.asked.is_none_or(|asked| now.duration_since(asked) >= ASKED_EVERY);
        if open.owners.len() < OPEN_DOUBTFUL || open.is_asking || !is_due {
            return false;
        }
        (open.is_asking, open.asked) = (true, Some(now));
        true
    }

    /// The budget that it is a part of.
    pub fn budget(&self) -> Arc<Budget> {
        self.budget.clone()
    }
}

impl Drop for Share {
    fn drop(&mut self) {
        lock(&self.budget.open).owners.retain(|_, owner| *owner != self.sandbox);
    }
}

impl Budget {
    /// Asks the host which sockets have been closed since. Takes as long as the host
    /// needs to write down all sockets that there are.
    pub fn forget_closed(&self) {
        let before: Vec<u64> = lock(&self.open).owners.keys().copied().collect();
        let present = sockets_present();
        let mut open = lock(&self.open);
        open.is_asking = false;
        // Without an answer they stay: a limit that is too strict harms one function,
        // none at all the host.
        if let Some(present) = present {
            for inode in before.into_iter().filter(|inode| !present.contains(inode)) {
                open.owners.remove(&inode);
            }
        }
    }

    /// The sockets are looked at another time.
    pub fn cannot_ask(&self) {
        lock(&self.open).is_asking = false;
    }

    #[cfg(test)]
    pub fn open_count(&self) -> usize {
        lock(&self.open).owners.len()
    }
}

/// The inode numbers of all Internet sockets of this network namespace that
/// somebody has open (proc_net(5)); `None` if the host does not say.
fn sockets_present() -> Option<HashSet<u64>> {
    let mut present = HashSet::new();
    for table in ["tcp", "udp"] {
        read_table(&format!("/proc/self/net/{table}"), &mut present)?;
        // A host may be without IPv6.
        let _ = read_table(&format!("/proc/self/net/{table}6"), &mut present);
    }
    Some(present)
}

fn read_table(path: &str, present: &mut HashSet<u64>) -> Option<()> {
    for line in BufReader::new(File::open(path).ok()?).lines() {
        // The tenth column; a header line has words there.
        let line = line.ok()?;
        present.extend(line.split_whitespace().nth(9).and_then(|inode| inode.parse::<u64>().ok()));
    }
    Some(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::{TcpListener, TcpStream, UdpSocket};

    #[test]
    fn many_sandboxes_of_a_function_ask_no_faster_than_a_few() {
        let budget: Arc<Budget> = Arc::default();
        let now = Instant::now();
        let sandboxes: Vec<Share> = (0..10).map(|_| Share::new(budget.clone())).collect();
        let granted = |share: &Share| (0..5000).filter(|_| share.ask(now).is_ok()).count();
        let granted: Vec<usize> = sandboxes.iter().map(granted).collect();
        assert_eq!(granted[..2], [1024, 1024]);
        assert!(granted.iter().sum::<usize>() <= 2048 + 10, "{granted:?}");
        // Another function has its own.
        assert!(Share::new(Arc::default()).ask(now).is_ok());
    }

    #[test]
    fn sockets_are_counted_until_they_are_closed() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let budget: Arc<Budget> = Arc::default();
        let share = Share::new(budget.clone());
        let stream = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let datagrams = UdpSocket::bind("127.0.0.1:0").unwrap();
        datagrams.connect("127.0.0.1:9").unwrap();
        share.note_open(&stream).unwrap();
        share.note_open(&datagrams).unwrap();
        budget.forget_closed();
        assert_eq!(budget.open_count(), 2);
        drop(stream);
        budget.forget_closed();
        assert_eq!(budget.open_count(), 1);
        drop(share);
        assert_eq!(budget.open_count(), 0);
    }

    #[test]
    fn a_function_has_so_many_sockets_open_and_no_more() {
        let budget: Arc<Budget> = Arc::default();
        let (full, other) = (Share::new(budget.clone()), Share::new(budget.clone()));
        let now = Instant::now();
        // Inode numbers that no socket has: all of them have been closed.
        let closed = (1..=OPEN_MAX as u64).map(|number| (u64::MAX - number, full.sandbox));
        lock(&budget.open).owners.extend(closed);
        let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
        assert_eq!(other.note_open(&socket), Err(Errno::AGAIN));
        // One is told to look, and not too often.
        assert!(other.is_in_doubt(now) && !full.is_in_doubt(now + ASKED_EVERY));
        budget.forget_closed();
        assert!(other.note_open(&socket).is_ok());
        assert_eq!(budget.open_count(), 1);
        assert!(!other.is_in_doubt(now + ASKED_EVERY));
    }
}
