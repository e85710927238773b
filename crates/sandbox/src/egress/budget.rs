//! What the sandboxes of one function, and those of one tenant, may use together: who has
//! many instances has no more of the host than who has few.

use std::collections::{HashMap, HashSet};
use std::fs::File;
use std::io::{self, BufRead, BufReader};
use std::net::SocketAddr;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use rustix::fs::fstat;
use rustix::io::Errno;

use super::ledger::{Entry, Ledger, Written};
use super::meter;
use super::rate::Rate;
use super::rules::EgressRules;
use super::traffic::{Account, FunctionTraffic, SandboxTraffic};

/// Sockets that one sandbox may ask for at once, and after that one in this time.
const OF_SANDBOX: (u32, Duration) = (1024, Duration::from_millis(2));
/// The same for all sandboxes of a function: 2000 a second.
const OF_FUNCTION: (u32, Duration) = (2048, Duration::from_micros(500));
/// Names that the sandboxes of a function may have looked up at once, and after that one in
/// this time: 250 a second. Each is a process of the host, which costs half a millisecond of
/// a processor.
const LOOK_UPS: (u32, Duration) = (1000, Duration::from_millis(4));
/// Most sockets that the sandboxes of a function may have open.
pub const OPEN_MAX: usize = 8192;
/// From so many that are not known to be closed on, the host is asked. A function
/// can have asked for no more than the difference to [`OPEN_MAX`] until it answers.
const OPEN_DOUBTFUL: usize = 4096;
/// How often the host is asked at most.
const ASKED_EVERY: Duration = Duration::from_secs(1);
/// The same where there may be no more, so that somebody waits for the answer: not more
/// often than this, and for no more than a twentieth of a processor's time.
const ASKED_IN_HASTE_EVERY: Duration = Duration::from_millis(5);
const HASTE: u32 = 20;
/// How long somebody waits at most until others are known to be closed.
const PATIENCE: Duration = Duration::from_millis(500);
/// Most connections of the sandboxes of a function to the resolver at a time.
pub const CHANNELS_MAX: usize = 256;

/// The budget of one function.
#[derive(Debug)]
pub struct Budget {
    /// Tells it from the others of this process.
    pub id: u64,
    rate: Mutex<Rate>,
    look_ups: Mutex<Rate>,
    open: OpenSockets,
    /// Connections to the resolver.
    pub channels: Arc<AtomicUsize>,
    /// What the function shares with others.
    tenant: Option<Arc<EgressQuota>>,
    /// Bytes of its connections.
    traffic: OnceLock<Arc<FunctionTraffic>>,
}

/// What the sandboxes of several functions may use together: of all functions of one
/// tenant. Bounds can be set at any time; `None`: none but that of each function.
#[derive(Debug, Default)]
pub struct EgressQuota {
    rate: Mutex<Option<Rate>>,
    open: OpenSockets,
    /// What rules of the functions and of their sandboxes may allow at most.
    ceiling: Mutex<Option<Arc<EgressRules>>>,
}

/// Sockets that are not known to be closed, and how many there may be.
#[derive(Debug)]
struct OpenSockets {
    most: AtomicUsize,
    known: Mutex<Open>,
}

#[derive(Debug, Default)]
struct Open {
    /// The sandbox that has each, by the socket's inode number.
    owners: HashMap<u64, u64>,
    asked: Option<Instant>,
    /// How long the host took to answer.
    took: Duration,
    is_asking: bool,
}

impl Default for Budget {
    fn default() -> Self {
        static IDS: AtomicU64 = AtomicU64::new(0);
        Self {
            id: IDS.fetch_add(1, Ordering::Relaxed),
            rate: Mutex::new(Rate::new(OF_FUNCTION)),
            look_ups: Mutex::new(Rate::new(LOOK_UPS)),
            open: OpenSockets::of(OPEN_MAX),
            channels: Arc::default(),
            tenant: None,
            traffic: OnceLock::new(),
        }
    }
}

impl EgressQuota {
    /// Sets how many connections the sandboxes may have at a time, and how many they may
    /// ask for in a second. Connections that there are stay.
    pub fn set(&self, connections: Option<u32>, per_second: Option<u32>) {
        let most = connections.map_or(usize::MAX, |count| count as usize);
        self.open.most.store(most, Ordering::Relaxed);
        let mut rate = lock(&self.rate);
        let bucket = |count| (count, (Duration::from_secs(1) / count).max(Duration::from_nanos(1)));
        match (&mut *rate, per_second) {
            // No token is ever added to a bucket without room.
            (rate, Some(0)) => *rate = Some(Rate::new((0, Duration::MAX))),
            (Some(rate), Some(count)) => rate.change(bucket(count)),
            (rate @ None, Some(count)) => *rate = Some(Rate::new(bucket(count))),
            (rate, None) => *rate = None,
        }
    }

    /// Sets what rules of the functions and of their sandboxes may allow at most; `None`:
    /// anything. Connections that there are stay.
    pub fn set_ceiling(&self, ceiling: Option<EgressRules>) {
        *lock(&self.ceiling) = ceiling.map(Arc::new);
    }

    /// Connections that are not known to be closed. Asks the host which are, and so takes
    /// as long as the host needs to write down all sockets that there are.
    pub fn connections(&self) -> usize {
        let before = self.open.inodes();
        if !before.is_empty() {
            self.open.forget_closed(&before, sockets_present().as_ref());
        }
        self.open.count()
    }

    fn take(&self, now: Instant) -> bool {
        lock(&self.rate).as_mut().is_none_or(|rate| rate.take(now))
    }
}

impl Default for OpenSockets {
    fn default() -> Self {
        Self::of(usize::MAX)
    }
}

impl OpenSockets {
    fn of(most: usize) -> Self {
        Self { most: AtomicUsize::new(most), known: Mutex::default() }
    }

    fn most(&self) -> usize {
        self.most.load(Ordering::Relaxed)
    }

    fn has_room(&self) -> bool {
        self.count() < self.most()
    }

    fn count(&self) -> usize {
        lock(&self.known).owners.len()
    }

    fn inodes(&self) -> Vec<u64> {
        lock(&self.known).owners.keys().copied().collect()
    }

    /// The sockets of one sandbox.
    fn inodes_of(&self, sandbox: u64) -> Vec<u64> {
        let open = lock(&self.known);
        let of_sandbox = open.owners.iter().filter(|(_, owner)| **owner == sandbox);
        of_sandbox.map(|(inode, _)| *inode).collect()
    }

    /// Notes sockets that a sandbox has already, however many there may be.
    fn take_over(&self, inodes: &[u64], sandbox: u64) {
        lock(&self.known).owners.extend(inodes.iter().map(|inode| (*inode, sandbox)));
    }

    /// Notes a socket of a sandbox; whether there may be one more.
    fn note(&self, inode: u64, sandbox: u64) -> bool {
        let mut open = lock(&self.known);
        if open.owners.len() >= self.most() {
            return false;
        }
        open.owners.insert(inode, sandbox);
        true
    }

    fn forget(&self, inode: u64) {
        lock(&self.known).owners.remove(&inode);
    }

    fn forget_sandbox(&self, sandbox: u64) {
        lock(&self.known).owners.retain(|_, owner| *owner != sandbox);
    }

    /// Whether somebody should ask the host: at most one at a time is told so.
    fn is_in_doubt(&self, now: Instant) -> bool {
        let mut open = lock(&self.known);
        let (count, most) = (open.owners.len(), self.most());
        let every = match count < most {
            true => ASKED_EVERY,
            false => ASKED_IN_HASTE_EVERY.max(open.took * HASTE),
        };
        let is_due = open.asked.is_none_or(|asked| now.duration_since(asked) >= every);
        if count < OPEN_DOUBTFUL.min(most) || open.is_asking || !is_due {
            return false;
        }
        (open.is_asking, open.asked) = (true, Some(now));
        true
    }

    /// Forgets those of `before`, the sockets before the host was asked, that the host has
    /// no more. Without an answer they stay: a limit that is too strict harms one function,
    /// none at all the host.
    fn forget_closed(&self, before: &[u64], present: Option<&HashSet<u64>>) {
        let mut open = lock(&self.known);
        open.is_asking = false;
        open.took = open.asked.map_or(Duration::ZERO, |asked| asked.elapsed());
        if let Some(present) = present {
            for inode in before.iter().filter(|inode| !present.contains(inode)) {
                open.owners.remove(inode);
            }
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
    /// Where the bytes of its connections are counted, and what the next daemon is to know.
    account: Arc<Account>,
}

impl Share {
    pub fn new(budget: Arc<Budget>) -> Self {
        static SANDBOXES: AtomicU64 = AtomicU64::new(0);
        let sandbox = SANDBOXES.fetch_add(1, Ordering::Relaxed);
        let account = Arc::new(Account::of(budget.clone()));
        Self { budget, sandbox, rate: Mutex::new(Rate::new(OF_SANDBOX)), account }
    }

    /// Counts bytes for this sandbox, too, which stays.
    pub fn count_for(&self, sandbox: Option<Arc<SandboxTraffic>>) {
        self.account.count_for(sandbox);
    }

    /// Takes leave to ask for a socket; `EAGAIN` if the sandbox, its function or its
    /// tenant has asked for too many.
    pub fn ask(&self, now: Instant) -> Result<(), Errno> {
        let is_in_time = lock(&self.rate).take(now)
            && lock(&self.budget.rate).take(now)
            && self.budget.tenant.as_ref().is_none_or(|tenant| tenant.take(now));
        if is_in_time { Ok(()) } else { Err(Errno::AGAIN) }
    }

    /// Whether there may be one more socket; `EAGAIN` if not.
    pub fn has_room(&self) -> Result<(), Errno> {
        let of_tenant = self.budget.tenant.as_ref();
        let has_room =
            self.budget.open.has_room() && of_tenant.is_none_or(|tenant| tenant.open.has_room());
        if has_room { Ok(()) } else { Err(Errno::AGAIN) }
    }

    /// Waits until there may be one more, or the host has said that none was closed: half
    /// a second at most.
    pub fn wait_for_room(&self) {
        let begun = Instant::now();
        while self.has_room().is_err() && begun.elapsed() < PATIENCE {
            if self.is_in_doubt(Instant::now()) {
                return self.budget.forget_closed();
            }
            std::thread::sleep(ASKED_IN_HASTE_EVERY);
        }
    }

    /// Notes a socket that the sandbox is about to get, a TCP connection to `to` or another one;
    /// `EAGAIN` if its function or its tenant has too many open.
    pub fn note_open(&self, socket: impl AsFd, to: Option<SocketAddr>) -> Result<(), Errno> {
        let inode = fstat(&socket)?.st_ino;
        if !self.budget.open.note(inode, self.sandbox) {
            return Err(Errno::AGAIN);
        }
        let of_tenant = self.budget.tenant.as_ref();
        if of_tenant.is_some_and(|tenant| !tenant.open.note(inode, self.sandbox)) {
            self.budget.forget(inode);
            return Err(Errno::AGAIN);
        }
        let counted = to.zip(meter::running());
        let id = counted.and_then(|(to, meter)| meter.count(socket, (inode, to), &self.account));
        self.write_down(Entry::new(inode, id)).inspect_err(|_| self.budget.forget(inode))
    }

    fn write_down(&self, socket: Entry) -> Result<(), Errno> {
        let mut ledger = self.account.ledger();
        let noted = ledger.as_mut().map_or(Ok(()), |ledger| ledger.note(socket, || self.open()));
        noted.map_err(|error| Errno::from_io_error(&error).unwrap_or(Errno::NOMEM))
    }

    /// Its sockets that are not known to be closed.
    fn open(&self) -> Vec<Entry> {
        let inodes = self.budget.open.inodes_of(self.sandbox);
        let meter = meter::running().filter(|_| !inodes.is_empty());
        let ids = meter.map(|meter| meter.ids_of(&self.account)).unwrap_or_default();
        inodes.iter().map(|inode| Entry::new(*inode, ids.get(inode).copied())).collect()
    }

    /// Has the sandbox's sockets written down for the next daemon from now on; a descriptor of
    /// the file.
    pub fn for_successor(&self) -> io::Result<OwnedFd> {
        let mut ledger = self.account.ledger();
        match &mut *ledger {
            Some(ledger) => ledger,
            // A socket that comes meanwhile is noted first, and waits to be written down.
            none => none.insert(Ledger::create(&Written {
                ended: self.account.of_ended(),
                sockets: self.open(),
            })?),
        }
        .for_successor()
    }

    /// Goes on with what an earlier daemon has written down: the sockets of it that there still
    /// are. They count, even if there are more than there may be.
    pub fn take_over(&self, ledger: Ledger, written: &Written) {
        let inodes: Vec<u64> = written.sockets.iter().map(|socket| socket.inode).collect();
        self.budget.open.take_over(&inodes, self.sandbox);
        if let Some(tenant) = &self.budget.tenant {
            tenant.open.take_over(&inodes, self.sandbox);
        }
        *self.account.ledger() = Some(ledger);
        self.account.had_before(written.ended);
        if let Some(meter) = meter::running() {
            meter.take_over(&written.sockets, &self.account);
        }
    }

    /// Whether somebody should call [`Budget::forget_closed`], on a thread that may
    /// wait: at most one at a time is told so.
    pub fn is_in_doubt(&self, now: Instant) -> bool {
        let of_tenant = self.budget.tenant.as_ref();
        self.budget.open.is_in_doubt(now)
            || of_tenant.is_some_and(|tenant| tenant.open.is_in_doubt(now))
    }

    /// The budget that it is a part of.
    pub fn budget(&self) -> Arc<Budget> {
        self.budget.clone()
    }
}

impl Drop for Share {
    fn drop(&mut self) {
        self.budget.open.forget_sandbox(self.sandbox);
        if let Some(tenant) = &self.budget.tenant {
            tenant.open.forget_sandbox(self.sandbox);
        }
    }
}

impl Budget {
    /// Takes leave to have a name looked up; false if there were too many.
    pub fn take_look_up(&self, now: Instant) -> bool {
        lock(&self.look_ups).take(now)
    }

    /// What rules may allow at most; `None`: anything.
    pub fn ceiling(&self) -> Option<Arc<EgressRules>> {
        self.tenant.as_ref().and_then(|tenant| lock(&tenant.ceiling).clone())
    }

    /// The bytes of its connections.
    pub fn traffic(&self) -> &FunctionTraffic {
        self.traffic.get_or_init(Arc::default)
    }

    /// A socket is known to be closed.
    pub fn forget(&self, inode: u64) {
        self.open.forget(inode);
        if let Some(tenant) = &self.tenant {
            tenant.open.forget(inode);
        }
    }

    /// Has the bytes of its connections counted as those of the function of this name.
    pub fn count_as(&self, function: &str) {
        if let Some(meter) = meter::running() {
            self.traffic.get_or_init(|| meter.function(function));
        }
    }

    /// The budget of a function that shares another one with others.
    pub fn within(tenant: Arc<EgressQuota>) -> Self {
        Self { tenant: Some(tenant), ..Self::default() }
    }

    /// Asks the host which sockets have been closed since. Takes as long as the host
    /// needs to write down all sockets that there are.
    pub fn forget_closed(&self) {
        let of_tenant = self.tenant.as_ref().map(|tenant| (&tenant.open, tenant.open.inodes()));
        let of_function = self.open.inodes();
        let present = sockets_present();
        self.open.forget_closed(&of_function, present.as_ref());
        if let Some((open, before)) = of_tenant {
            open.forget_closed(&before, present.as_ref());
        }
    }

    /// The sockets are looked at another time.
    pub fn cannot_ask(&self) {
        self.open.forget_closed(&[], None);
        if let Some(tenant) = &self.tenant {
            tenant.open.forget_closed(&[], None);
        }
    }

    #[cfg(test)]
    pub fn open_count(&self) -> usize {
        self.open.count()
    }
}

/// The inode numbers of all Internet sockets of this network namespace that
/// somebody has open (proc_net(5)); `None` if the host does not say.
pub fn sockets_present() -> Option<HashSet<u64>> {
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
    use std::io::{Read, Write};
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
    fn names_are_looked_up_no_faster_than_a_function_may() {
        let budget = Budget::default();
        let now = Instant::now();
        let granted = |now| (0..5000).filter(|_| budget.take_look_up(now)).count();
        assert_eq!(granted(now), 1000);
        // The bucket was made a moment before `now`.
        assert!((249..=251).contains(&granted(now + Duration::from_secs(1))));
        assert!(Budget::default().take_look_up(now));
    }

    #[test]
    fn sockets_are_counted_until_they_are_closed() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let budget: Arc<Budget> = Arc::default();
        let share = Share::new(budget.clone());
        let stream = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let datagrams = UdpSocket::bind("127.0.0.1:0").unwrap();
        datagrams.connect("127.0.0.1:9").unwrap();
        share.note_open(&stream, None).unwrap();
        share.note_open(&datagrams, None).unwrap();
        budget.forget_closed();
        assert_eq!(budget.open_count(), 2);
        drop(stream);
        budget.forget_closed();
        assert_eq!(budget.open_count(), 1);
        drop(share);
        assert_eq!(budget.open_count(), 0);
    }

    #[test]
    fn sockets_count_for_function_and_tenant_after_a_takeover() {
        let tenant: Arc<EgressQuota> = Arc::default();
        let before = Share::new(Arc::new(Budget::within(tenant)));
        let sockets: Vec<_> = (0..4).map(|_| UdpSocket::bind("127.0.0.1:0").unwrap()).collect();
        before.note_open(&sockets[0], None).unwrap();
        let file = before.for_successor().unwrap();
        // The same file, whoever asks again; what comes later stands in it, too.
        drop(before.for_successor().unwrap());
        before.note_open(&sockets[1], None).unwrap();

        let quota: Arc<EgressQuota> = Arc::default();
        quota.set(Some(3), None);
        let budget = Arc::new(Budget::within(quota.clone()));
        let after = Share::new(budget.clone());
        let (ledger, written) = Ledger::open(file).unwrap();
        assert_eq!(written.sockets.len(), 2);
        after.take_over(ledger, &written);
        assert_eq!((quota.connections(), budget.open_count()), (2, 2));
        after.note_open(&sockets[2], None).unwrap();
        assert_eq!(after.note_open(&sockets[3], None), Err(Errno::AGAIN));
        assert_eq!(Ledger::open(after.for_successor().unwrap()).unwrap().1.sockets.len(), 3);
        // They count until they are closed, or their sandbox ends.
        drop(sockets);
        assert_eq!(quota.connections(), 0);
        drop(after);
        assert_eq!(budget.open_count(), 0);
    }

    /// Of a sandbox that stays, everything once; of its function, what is carried since then.
    #[test]
    fn the_next_daemon_goes_on_with_the_bytes_of_a_sandbox() {
        if let Err(error) = meter::count_egress_bytes() {
            eprintln!("skipped: {error}");
            return;
        }
        let until = Instant::now() + Duration::from_secs(60);
        let wait_for = |traffic: &SandboxTraffic, sent: u64| {
            while traffic.all.read().sent < sent {
                assert!(Instant::now() < until, "{traffic:?}, {sent}");
                meter::look_at_egress_bytes();
                std::thread::sleep(Duration::from_millis(20));
            }
        };
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let before = Share::new(Arc::default());
        let traffic: Arc<SandboxTraffic> = Arc::default();
        before.count_for(Some(traffic.clone()));
        let file = before.for_successor().unwrap();
        let connect = |share: &Share| {
            let stream = TcpStream::connect(address).unwrap();
            share.note_open(&stream, Some(address)).unwrap();
            (stream, listener.accept().unwrap().0)
        };
        let send = |(stream, peer): &mut (TcpStream, TcpStream), count: usize| {
            stream.write_all(&vec![0; count]).unwrap();
            peer.read_exact(&mut vec![0; count]).unwrap();
        };
        let (mut stays, mut ends) = (connect(&before), connect(&before));
        send(&mut stays, 1000);
        send(&mut ends, 200);
        drop(ends);
        wait_for(&traffic, 1200);
        while Ledger::open(before.for_successor().unwrap()).unwrap().1.ended.sent < 200 {
            assert!(Instant::now() < until);
        }

        let after = Share::new(Arc::default());
        let next: Arc<SandboxTraffic> = Arc::default();
        after.count_for(Some(next.clone()));
        let (ledger, mut written) = Ledger::open(file).unwrap();
        written.sockets.retain(|socket| socket.inode == fstat(&stays.0).unwrap().st_ino);
        after.take_over(ledger, &written);
        let of_function = || after.account.function().bytes.read().sent;
        assert!((1200..=1201).contains(&next.all.read().sent), "{next:?}");
        assert_eq!(of_function(), 0);
        send(&mut stays, 30);
        wait_for(&next, 1230);
        assert!((1230..=1231).contains(&next.all.read().sent), "{next:?}");
        assert_eq!(of_function(), 30);
        drop(stays);
        while !(1230..=1232).contains(&next.ended.read().sent) {
            assert!(Instant::now() < until, "{next:?}");
        }
    }

    #[test]
    fn a_function_has_so_many_sockets_open_and_no_more() {
        let budget: Arc<Budget> = Arc::default();
        let (full, other) = (Share::new(budget.clone()), Share::new(budget.clone()));
        let now = Instant::now();
        // Inode numbers that no socket has: all of them have been closed.
        let closed = (1..=OPEN_MAX as u64).map(|number| (u64::MAX - number, full.sandbox));
        lock(&budget.open.known).owners.extend(closed);
        let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
        assert_eq!(other.note_open(&socket, None), Err(Errno::AGAIN));
        // One is told to look, and not too often.
        assert!(other.is_in_doubt(now) && !full.is_in_doubt(now + ASKED_EVERY));
        budget.forget_closed();
        assert!(other.note_open(&socket, None).is_ok());
        assert_eq!(budget.open_count(), 1);
        assert!(!other.is_in_doubt(now + ASKED_EVERY));
    }

    #[test]
    fn the_functions_of_a_tenant_ask_no_faster_than_its_quota_allows() {
        let quota: Arc<EgressQuota> = Arc::default();
        let share = || Share::new(Arc::new(Budget::within(quota.clone())));
        let functions = [share(), share()];
        let now = Instant::now();
        let granted = |tries: usize, now| {
            let asks = (0..tries).map(|number| functions[number % 2].ask(now));
            asks.filter(Result::is_ok).count()
        };
        assert_eq!(granted(100, now), 100, "there is no quota yet");
        quota.set(None, Some(10));
        assert_eq!(granted(100, now), 10);
        let second = Duration::from_secs(1);
        // The bucket was made a moment after `now`.
        assert!((9..=10).contains(&granted(100, now + second)));
        quota.set(None, Some(0));
        assert_eq!(granted(100, now + 10 * second), 0);
        quota.set(None, Some(u32::MAX));
        assert!(granted(100, now + 20 * second) > 0);
        quota.set(None, None);
        assert_eq!(granted(100, now + 30 * second), 100);
        // Another tenant has its own.
        assert!(Share::new(Arc::new(Budget::within(Arc::default()))).ask(now).is_ok());
    }

    #[test]
    fn the_functions_of_a_tenant_have_as_many_connections_as_its_quota_allows() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let connect = || TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let quota: Arc<EgressQuota> = Arc::default();
        quota.set(Some(2), None);
        let share = || Share::new(Arc::new(Budget::within(quota.clone())));
        let (one, other) = (share(), share());
        let streams = [connect(), connect(), connect()];
        one.note_open(&streams[0], None).unwrap();
        other.note_open(&streams[1], None).unwrap();
        assert_eq!(other.note_open(&streams[2], None), Err(Errno::AGAIN));
        assert_eq!(other.budget.open_count(), 1, "it does not count for the function either");
        // The host is asked, and says that none was closed.
        one.wait_for_room();
        assert_eq!(one.has_room(), Err(Errno::AGAIN));
        assert_eq!(other.note_open(&streams[2], None), Err(Errno::AGAIN));
        let [first, ..] = streams;
        drop(first);
        let until = Instant::now() + Duration::from_secs(20);
        while other.has_room().is_err() && Instant::now() < until {
            other.wait_for_room();
        }
        assert!(other.note_open(connect(), None).is_ok());
        drop(one);
        assert_eq!(quota.connections(), 1);
        drop(other);
        assert_eq!(quota.connections(), 0);
    }
}
