//! Counts the bytes of the TCP connections that sandboxes were given.
//!
//! The bytes go straight between a sandbox and the host's socket, and only the host counts them. It
//! tells how many a socket had when it is destroyed, and is asked every few seconds for those that
//! are open ([`super::sock_diag`]). Both are what a socket has carried since its beginning; what is
//! more than the time before is added.

use std::collections::HashMap;
use std::io;
use std::net::SocketAddr;
use std::os::fd::AsFd;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread::Builder;
use std::time::{Duration, Instant};

use rustix::io::Errno;

use super::budget::OPEN_MAX;
use super::ledger::Entry;
use super::sock_diag::{
    self, Asker, MESSAGE_MAX, Notices, PortRange, Said, SocketId, read_message,
};
use super::traffic::{Account, EgressBytes, FunctionTraffic};

/// How often the host is asked for the sockets that are open.
const LOOKS_EVERY: Duration = Duration::from_secs(5);
/// How often at most, whoever wants to know, and for no more than a twentieth of a processor's time.
const LOOKS_EVERY_AT_MOST: Duration = Duration::from_secs(1);
const LEISURE: u32 = 20;
/// How long a socket that the host does not show is waited for after notices were lost. One that is
/// reset, but that its program has not closed, is not shown either, and its notice comes late.
const PATIENCE: Duration = Duration::from_secs(60);
/// Sockets of a function that are counted at a time: more than may be open ([`OPEN_MAX`]), since
/// some are closed and not destroyed yet.
const OF_FUNCTION_MAX: usize = 2 * OPEN_MAX;
/// Sockets of all functions, each of which takes some 200 bytes.
const OF_NODE_MAX: usize = 128 * 1024;
/// Functions with counters of their own.
const FUNCTIONS_MAX: usize = 16 * 1024;

/// What is counted of a function.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FunctionEgressBytes {
    /// Its name.
    pub function: String,
    /// Of its connections, since this process has begun to count.
    pub bytes: EgressBytes,
    /// Connections whose bytes are not counted, or not all of them.
    pub uncounted: u64,
}

/// A socket whose bytes are counted.
#[derive(Debug)]
struct Counted {
    account: Arc<Account>,
    id: SocketId,
    inode: u64,
    /// What was counted already.
    seen: EgressBytes,
    /// When the host last showed it.
    shown: Instant,
}

/// All of them, by their cookies.
#[derive(Debug, Default)]
struct Sockets {
    all: HashMap<u64, Counted>,
    /// When the host has last dropped notices.
    lost: Option<Instant>,
}

impl Sockets {
    /// Whether there is room for one more.
    fn insert(
        &mut self,
        inode: u64,
        id: SocketId,
        account: &Arc<Account>,
        seen: EgressBytes,
    ) -> bool {
        let open = &account.function().open;
        if self.all.len() >= OF_NODE_MAX || open.load(Relaxed) >= OF_FUNCTION_MAX {
            return false;
        }
        let (account, shown) = (account.clone(), Instant::now());
        let before = self.all.insert(id.cookie(), Counted { account, id, inode, seen, shown });
        if before.is_none() {
            open.fetch_add(1, Relaxed);
        }
        true
    }

    /// The host says that a socket has carried so much. Sockets of others are none of ours.
    fn shown(&mut self, cookie: u64, bytes: EgressBytes) {
        let Some(counted) = self.all.get_mut(&cookie) else { return };
        counted.account.add(bytes - counted.seen);
        counted.seen = bytes;
        counted.shown = Instant::now();
    }

    /// It was destroyed; what is then to be noted of it, which takes other locks.
    fn destroyed(&mut self, said: Said) -> Option<Ended> {
        if let Some(bytes) = said.bytes {
            self.shown(said.cookie, bytes);
        }
        self.remove(said.cookie)
    }

    fn remove(&mut self, cookie: u64) -> Option<Ended> {
        let Counted { account, inode, seen, .. } = self.all.remove(&cookie)?;
        account.function().open.fetch_sub(1, Relaxed);
        Some(Ended { account, inode, all: seen })
    }

    /// Gives up a socket that the host shows no more, if its notice may be among those that were
    /// lost and has not come for a while.
    fn not_shown(&mut self, cookie: u64, now: Instant) -> Option<Ended> {
        let counted = self.all.get(&cookie)?;
        let may_be_lost = self.lost.is_some_and(|lost| lost >= counted.shown);
        if !may_be_lost || now.duration_since(counted.shown) < PATIENCE {
            return None;
        }
        counted.account.function().uncounted.fetch_add(1, Relaxed);
        self.remove(cookie)
    }
}

/// A connection that is no more.
#[derive(Debug)]
struct Ended {
    account: Arc<Account>,
    inode: u64,
    /// What it has carried.
    all: EgressBytes,
}

impl Ended {
    fn note(self) {
        self.account.ended(self.inode, self.all);
    }
}

/// Counts.
#[derive(Debug)]
pub struct Meter {
    sockets: Mutex<Sockets>,
    notices: Notices,
    ports: Mutex<PortRange>,
    looking: Mutex<Looking>,
    functions: Mutex<HashMap<String, Arc<FunctionTraffic>>>,
}

/// Asks the host.
#[derive(Debug)]
struct Looking {
    asker: Asker,
    looked: Option<Instant>,
    took: Duration,
}

static METER: OnceLock<&Meter> = OnceLock::new();

/// Begins to count the bytes of TCP connections that sandboxes of this process are given. To be
/// called before there are any.
///
/// # Errors
/// This host does not count them, or does not say; everything else works without.
pub fn count_egress_bytes() -> io::Result<()> {
    sock_diag::check()?;
    if running().is_some() {
        return Ok(());
    }
    // It counts as long as the process lives.
    let meter: &'static Meter = Box::leak(Box::new(Meter::new()?));
    Builder::new().name("thaw-ends".into()).spawn(|| meter.hear())?;
    Builder::new().name("thaw-bytes".into()).spawn(|| {
        loop {
            std::thread::sleep(LOOKS_EVERY);
            meter.look();
        }
    })?;
    // Nobody else has begun to.
    let _ = METER.set(meter);
    Ok(())
}

/// The bytes of each function that has, or had, a connection, as they are now, give or take a
/// second; `None`: they are not counted. May take some milliseconds.
pub fn egress_bytes_of_functions() -> Option<Vec<FunctionEgressBytes>> {
    let meter = running()?;
    meter.look();
    let functions = lock(&meter.functions);
    let of = |(name, traffic): (&String, &Arc<FunctionTraffic>)| FunctionEgressBytes {
        function: name.clone(),
        bytes: traffic.bytes.read(),
        uncounted: traffic.uncounted.load(Relaxed),
    };
    Some(functions.iter().filter(|(_, traffic)| traffic.is_used()).map(of).collect())
}

/// Has the counters of sandboxes say how it is now, give or take a second; whether bytes are
/// counted. May take some milliseconds.
pub fn look_at_egress_bytes() -> bool {
    running().inspect(|meter| meter.look()).is_some()
}

/// What counts in this process, if something does.
pub(super) fn running() -> Option<&'static Meter> {
    METER.get().copied()
}

impl Meter {
    fn new() -> Result<Self, Errno> {
        let looking = Looking { asker: Asker::open()?, looked: None, took: Duration::ZERO };
        Ok(Self {
            sockets: Mutex::default(),
            notices: Notices::open()?,
            ports: Mutex::new(PortRange::NONE),
            looking: Mutex::new(looking),
            functions: Mutex::default(),
        })
    }

    /// The counters of a function. Functions beyond a number share theirs.
    pub fn function(&self, name: &str) -> Arc<FunctionTraffic> {
        let mut functions = lock(&self.functions);
        if let Some(known) = functions.get(name) {
            return known.clone();
        }
        let name = if functions.len() < FUNCTIONS_MAX { name } else { "" };
        functions.entry(name.to_owned()).or_default().clone()
    }

    /// Counts the bytes of a socket that is about to be connected to `to`, from before whoever
    /// gets it can close it. One that cannot be counted is noted.
    pub fn count(
        &self,
        socket: impl AsFd,
        (inode, to): (u64, SocketAddr),
        account: &Arc<Account>,
    ) -> Option<SocketId> {
        let id = self.try_count(socket, (inode, to), account);
        if id.is_none() {
            account.function().uncounted.fetch_add(1, Relaxed);
        }
        id
    }

    fn try_count(
        &self,
        socket: impl AsFd,
        (inode, to): (u64, SocketAddr),
        account: &Arc<Account>,
    ) -> Option<SocketId> {
        let id = SocketId::of(socket, to).ok()?;
        self.hear_of(&id)?;
        lock(&self.sockets).insert(inode, id, account, EgressBytes::default()).then_some(id)
    }

    /// Has notices of the socket come.
    fn hear_of(&self, id: &SocketId) -> Option<()> {
        let mut ports = lock(&self.ports);
        if let Some(more) = ports.with(id.local_port()) {
            self.notices.hear_of(more).ok()?;
            *ports = more;
        }
        Some(())
    }

    /// Goes on with sockets of a sandbox that a daemon before this one has counted. What they have
    /// carried until now counts for the sandbox, whose counts go on, and not for the function,
    /// whose counts have begun anew.
    pub fn take_over(&self, sockets: &[Entry], account: &Arc<Account>) {
        for entry in sockets {
            let Some(id) = entry.id() else { continue };
            if self.try_take_over(entry.inode, id, account).is_none() {
                account.function().uncounted.fetch_add(1, Relaxed);
            }
        }
    }

    fn try_take_over(&self, inode: u64, id: SocketId, account: &Arc<Account>) -> Option<()> {
        self.hear_of(&id)?;
        let looking = lock(&self.looking);
        // A notice that comes meanwhile waits until the socket is known.
        let mut sockets = lock(&self.sockets);
        let bytes = looking.asker.ask(&id).ok()?.bytes?;
        account.add_to_sandbox(bytes);
        sockets.insert(inode, id, account, bytes).then_some(())
    }

    /// The sockets of an account that are counted, by their inode numbers.
    pub fn ids_of(&self, account: &Arc<Account>) -> HashMap<u64, SocketId> {
        let sockets = lock(&self.sockets);
        let of_account = sockets.all.values().filter(|one| Arc::ptr_eq(&one.account, account));
        of_account.map(|counted| (counted.inode, counted.id)).collect()
    }

    /// Asks the host for all sockets that are open, if that was not done a moment ago.
    pub fn look(&self) {
        let mut looking = lock(&self.looking);
        let pause = LOOKS_EVERY_AT_MOST.max(looking.took * LEISURE);
        if looking.looked.is_some_and(|looked| looked.elapsed() < pause) {
            return;
        }
        let begun = Instant::now();
        let ids: Vec<SocketId> = lock(&self.sockets).all.values().map(|one| one.id).collect();
        for id in ids {
            self.take_answer(&id, looking.asker.ask(&id));
        }
        (looking.looked, looking.took) = (Some(Instant::now()), begun.elapsed());
    }

    fn take_answer(&self, id: &SocketId, answer: Result<Said, Errno>) {
        let mut sockets = lock(&self.sockets);
        let ended = match answer {
            Ok(Said { cookie, bytes: Some(bytes) }) => {
                sockets.shown(cookie, bytes);
                None
            }
            Ok(Said { bytes: None, .. }) | Err(Errno::NOENT | Errno::STALE) => {
                sockets.not_shown(id.cookie(), Instant::now())
            }
            // Another time.
            Err(_) => None,
        };
        drop(sockets);
        ended.into_iter().for_each(Ended::note);
    }

    /// Hears of the ends of sockets, for good.
    fn hear(&self) {
        let mut buffer = [0; MESSAGE_MAX];
        loop {
            match self.notices.receive(&mut buffer) {
                Ok(message) => self.take_notice(message),
                Err(Errno::NOBUFS) => self.lost(),
                Err(Errno::INTR) => {}
                // No such error is known.
                Err(_) => {
                    self.lost();
                    std::thread::sleep(LOOKS_EVERY);
                }
            }
        }
    }

    fn take_notice(&self, message: &[u8]) {
        let Ok(said) = read_message(message) else { return };
        let ended = lock(&self.sockets).destroyed(said);
        ended.into_iter().for_each(Ended::note);
    }

    /// The host has dropped notices. Looks find out of which sockets.
    fn lost(&self) {
        lock(&self.sockets).lost = Some(Instant::now());
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::super::traffic::SandboxTraffic;
    use super::*;

    use std::io::{Read, Write};
    use std::net::{TcpListener, TcpStream};

    use bytemuck::Zeroable;
    use rustix::net::sockopt::set_socket_recv_buffer_size;

    const LONG: Duration = Duration::from_secs(60);

    fn bytes(sent: u64, received: u64) -> EgressBytes {
        EgressBytes { sent, received }
    }

    fn id(cookie: u32) -> SocketId {
        let mut id = SocketId::zeroed();
        id.set_cookie(cookie.into());
        id
    }

    /// An account of a sandbox that stays, and what is counted for that.
    fn account() -> (Arc<Account>, Arc<SandboxTraffic>) {
        let (account, sandbox) = (Account::of(Arc::default()), Arc::<SandboxTraffic>::default());
        account.count_for(Some(sandbox.clone()));
        (Arc::new(account), sandbox)
    }

    fn of_function(account: &Account) -> EgressBytes {
        account.function().bytes.read()
    }

    fn uncounted(account: &Account) -> u64 {
        account.function().uncounted.load(Relaxed)
    }

    #[test]
    fn every_byte_of_a_connection_counts_once() {
        let (account, sandbox) = account();
        let mut sockets = Sockets::default();
        assert!(sockets.insert(1, id(7), &account, EgressBytes::default()));
        // Of somebody else.
        sockets.shown(8, bytes(1000, 1000));
        assert!(sockets.destroyed(Said { cookie: 8, bytes: Some(bytes(9, 9)) }).is_none());
        sockets.shown(7, bytes(100, 10));
        sockets.shown(7, bytes(100, 10));
        assert_eq!((of_function(&account), sandbox.all.read()), (bytes(100, 10), bytes(100, 10)));
        assert_eq!(sandbox.ended.read(), EgressBytes::default());
        let end = Said { cookie: 7, bytes: Some(bytes(150, 70)) };
        sockets.destroyed(end).unwrap().note();
        assert!(sockets.destroyed(end).is_none());
        for counted in [of_function(&account), sandbox.all.read(), sandbox.ended.read()] {
            assert_eq!(counted, bytes(150, 70));
        }
        assert_eq!((uncounted(&account), account.function().open.load(Relaxed)), (0, 0));
    }

    #[test]
    fn a_socket_is_given_up_only_where_its_notice_may_be_lost() {
        let (account, sandbox) = account();
        let mut sockets = Sockets::default();
        sockets.insert(1, id(7), &account, EgressBytes::default());
        sockets.shown(7, bytes(5, 6));
        let late = Instant::now() + 2 * PATIENCE;
        // It was reset, and its program has it still.
        assert!(sockets.not_shown(7, late).is_none());
        sockets.lost = Some(Instant::now());
        assert!(sockets.not_shown(7, Instant::now()).is_none(), "its notice may come yet");
        sockets.insert(2, id(8), &account, EgressBytes::default());
        sockets.not_shown(7, late).unwrap().note();
        assert!(sockets.not_shown(8, late).is_none(), "no notice was lost since it was made");
        assert_eq!((sandbox.ended.read(), uncounted(&account)), (bytes(5, 6), 1));
        assert_eq!(sockets.all.len(), 1);
    }

    #[test]
    fn a_function_has_so_many_sockets_counted_and_no_more() {
        let ((full, _), (other, _)) = (account(), account());
        let mut sockets = Sockets::default();
        let mut insert = |number: usize, account: &Arc<Account>| {
            sockets.insert(0, id(number as u32), account, EgressBytes::default())
        };
        assert!((0..OF_FUNCTION_MAX).all(|number| insert(number, &full)));
        assert!(!insert(OF_FUNCTION_MAX, &full));
        assert!(insert(OF_FUNCTION_MAX, &other));
        sockets.remove(0).unwrap();
        assert!(sockets.insert(0, id(0), &full, EgressBytes::default()));
    }

    #[test]
    fn functions_beyond_a_number_share_counters() {
        let Some(meter) = meter() else { return };
        for number in 0..FUNCTIONS_MAX + 10 {
            meter.function(&format!("f{number}"));
        }
        assert!(Arc::ptr_eq(&meter.function("one"), &meter.function("other")));
        assert!(!Arc::ptr_eq(&meter.function("f1"), &meter.function("f2")));
        assert!(Arc::ptr_eq(&meter.function("f1"), &meter.function("f1")));
        assert_eq!(lock(&meter.functions).len(), FUNCTIONS_MAX + 1);
    }

    /// One of the test's own, whose threads do not run; `None` if the host does not say anything.
    fn meter() -> Option<&'static Meter> {
        match sock_diag::check() {
            Ok(()) => Some(Box::leak(Box::new(Meter::new().unwrap()))),
            Err(error) => {
                eprintln!("skipped: {error}");
                None
            }
        }
    }

    /// A connection whose bytes are counted, and its other end.
    fn connection(
        meter: &Meter,
        listener: &TcpListener,
        account: &Arc<Account>,
    ) -> (TcpStream, TcpStream, SocketId) {
        let address = listener.local_addr().unwrap();
        let stream = TcpStream::connect(address).unwrap();
        let id = meter.count(&stream, (1, address), account).unwrap();
        (stream, listener.accept().unwrap().0, id)
    }

    fn wait_until(what: &str, mut is_so: impl FnMut() -> bool) {
        let until = Instant::now() + LONG;
        while !is_so() {
            assert!(Instant::now() < until, "{what}");
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    #[test]
    fn connections_are_counted_while_they_are_open_and_when_they_end() {
        let Some(meter) = meter() else { return };
        std::thread::spawn(|| meter.hear());
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let (account, sandbox) = account();
        let (mut stream, mut peer, _) = connection(meter, &listener, &account);
        stream.write_all(&[0; 5000]).unwrap();
        peer.read_exact(&mut [0; 5000]).unwrap();
        peer.write_all(&[0; 70]).unwrap();
        stream.read_exact(&mut [0; 70]).unwrap();
        wait_until("open", || {
            meter.look();
            sandbox.all.read() == bytes(5000, 70)
        });
        stream.write_all(&[0; 3000]).unwrap();
        peer.read_exact(&mut [0; 3000]).unwrap();
        drop((peer, stream));
        wait_until("ended", || lock(&meter.sockets).all.is_empty());
        let all = of_function(&account);
        assert!((8000..=8001).contains(&all.sent) && (70..=71).contains(&all.received), "{all:?}");
        wait_until("noted", || sandbox.ended.read() == all);
        assert_eq!((sandbox.all.read(), uncounted(&account)), (all, 0));
    }

    /// A host that destroys more sockets than notices have room.
    #[test]
    fn lost_notices_are_found_out_by_looks() {
        const COUNT: u64 = 300;
        let Some(meter) = meter() else { return };
        set_socket_recv_buffer_size(&meter.notices, 1).unwrap();
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let (account, sandbox) = account();
        let mut ids = Vec::new();
        for _ in 0..COUNT {
            let (mut stream, mut peer, id) = connection(meter, &listener, &account);
            stream.write_all(&[0; 10]).unwrap();
            peer.read_exact(&mut [0; 10]).unwrap();
            ids.push(id);
        }
        let asker = Asker::open().unwrap();
        wait_until("closed", || {
            ids.iter().all(|id| !asker.ask(id).is_ok_and(|said| said.bytes.is_some()))
        });
        std::thread::spawn(|| meter.hear());
        wait_until("lost", || lock(&meter.sockets).lost.is_some());
        // What is not heard of for a while never will be.
        let late = Instant::now() + 2 * PATIENCE;
        for id in &ids {
            let ended = lock(&meter.sockets).not_shown(id.cookie(), late);
            ended.into_iter().for_each(Ended::note);
        }
        let given_up = uncounted(&account);
        // The one that has found room may be of another test.
        assert!((1..=COUNT).contains(&given_up), "{given_up}");
        assert!(lock(&meter.sockets).all.is_empty());
        // Of those that were heard of, all bytes: 10, and perhaps one for the end.
        let sent = sandbox.all.read().sent;
        let heard = COUNT - given_up;
        assert!((10 * heard..=11 * heard).contains(&sent), "{sent} of {heard}");
    }
}
