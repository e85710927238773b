//! The daemon's end.

use std::io::{self, IoSlice};
use std::net::SocketAddr;
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{self, Receiver, Sender};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use super::protocol::{
    Answer, Grant, Kept, KeptKind, NOTE_MAX, REQUEST_FETCHER, REQUEST_FORGET, REQUEST_GROUP,
    REQUEST_LEAVE, REQUEST_NEXT_KEPT, REQUEST_PARENT, REQUEST_REMOVE_GROUP, REQUEST_RESOLVER,
    REQUEST_SERVING, REQUEST_STATE_HELPER, Request, receive_kept,
};
use crate::egress::Transport;
use crate::limits::{GroupName, InForceByGroup};
use crate::message;
use crate::state::Task;
use crate::zygote::{receive, send};

/// The connection of this process to its monitor.
#[derive(Debug)]
pub struct MonitorLink {
    /// One request at a time: the next answer is the one to the last request.
    socket: Mutex<OwnedFd>,
    grant: Grant,
    last_group: AtomicU64,
    /// Limits of groups that were given back.
    settings: InForceByGroup,
    last_key: AtomicU64,
    /// Ids that zygote parents of this process have taken.
    taken: Mutex<Vec<Range<u32>>>,
    /// What nobody waits for, for a thread that does.
    queue: OnceLock<Sender<Queued>>,
    /// Times that the monitor has kept something no more.
    refusals: AtomicU64,
}

/// Something that the monitor is to do and nobody waits for: a monitor that is busy, or
/// stopped, holds up no client.
#[derive(Debug)]
enum Queued {
    Keep {
        request: Request,
        note: Vec<u8>,
        descriptors: Vec<OwnedFd>,
        /// Set when the monitor has it.
        has_arrived: Arc<AtomicBool>,
    },
    /// It is not answered.
    Tell(Request),
    /// The last one; whoever waits for it hears when the monitor has all.
    Leave(Sender<()>),
}

static LINK: OnceLock<Arc<MonitorLink>> = OnceLock::new();

/// Makes all zygote parents and control groups of this process come from the monitor at
/// the other end of `socket`. To be called once, before there is any.
pub fn adopt(socket: OwnedFd, grant: Grant) -> Arc<MonitorLink> {
    let link = MonitorLink {
        socket: Mutex::new(socket),
        last_group: AtomicU64::new(u64::from(grant.life) << 32),
        settings: InForceByGroup::default(),
        last_key: AtomicU64::new(u64::from(grant.life) << 32),
        taken: Mutex::default(),
        queue: OnceLock::new(),
        refusals: AtomicU64::new(0),
        grant,
    };
    LINK.get_or_init(|| Arc::new(link)).clone()
}

/// The link of this process, if it has a monitor.
pub fn of_this_process() -> Option<Arc<MonitorLink>> {
    LINK.get().cloned()
}

/// Whether this process has a monitor.
pub fn has_monitor() -> bool {
    LINK.get().is_some()
}

/// Ids of one zygote parent, given back when this is dropped.
#[derive(Debug)]
pub struct IdShare {
    link: Arc<MonitorLink>,
    range: Range<u32>,
}

impl IdShare {
    /// The id before that of the first sandbox, as the user namespace numbers them. It is
    /// the state helper's.
    pub fn base(&self) -> u32 {
        self.range.start
    }

    /// How many sandboxes can have one.
    pub fn slots(&self) -> u32 {
        self.range.end - self.range.start - 1
    }
}

impl Drop for IdShare {
    fn drop(&mut self) {
        lock(&self.link.taken).retain(|taken| *taken != self.range);
    }
}

/// Descriptors that the monitor keeps for the next daemon, until this is dropped.
#[derive(Debug)]
pub(crate) struct Keep {
    link: Arc<MonitorLink>,
    key: u64,
    has_arrived: Arc<AtomicBool>,
}

impl Keep {
    /// Becomes true when the monitor has it.
    pub fn has_arrived(&self) -> &Arc<AtomicBool> {
        &self.has_arrived
    }

    /// The key, by which what is kept can refer to each other.
    pub fn key(&self) -> u64 {
        self.key
    }
}

impl Drop for Keep {
    fn drop(&mut self) {
        self.link.send(Queued::Tell(Request::new(REQUEST_FORGET, self.key)));
    }
}

impl MonitorLink {
    /// What this process was granted.
    pub fn grant(&self) -> &Grant {
        &self.grant
    }

    /// Takes ids for `slots` sandboxes, or for as many as there are ids left. None, if all
    /// sandboxes of this process share one.
    ///
    /// # Errors
    /// All are taken.
    pub(crate) fn share_ids(self: &Arc<Self>, slots: u32) -> io::Result<IdShare> {
        if self.grant.ids == 0 {
            return Ok(self.shared_id());
        }
        let mut taken = lock(&self.taken);
        let range = first_gap(&taken, 1..self.grant.ids.saturating_add(1), slots.saturating_add(1))
            .filter(|range| range.len() > 1)
            .ok_or_else(|| io::Error::other("all user ids of this daemon are in use"))?;
        taken.push(range.clone());
        Ok(IdShare { link: self.clone(), range })
    }

    /// The id of all sandboxes and state helpers where they share one.
    fn shared_id(self: &Arc<Self>) -> IdShare {
        IdShare { link: self.clone(), range: 0..1 }
    }

    /// Takes an id that a sandbox of an earlier daemon has.
    ///
    /// # Errors
    /// It is not among those that were granted, or another sandbox has it.
    pub(crate) fn take_id(self: &Arc<Self>, id: u32) -> io::Result<IdShare> {
        if self.grant.ids == 0 {
            return Ok(self.shared_id());
        }
        let range = id..id.saturating_add(1);
        let mut taken = lock(&self.taken);
        if !(1..=self.grant.ids).contains(&id) || taken.iter().any(|other| other.contains(&id)) {
            return Err(io::Error::from(io::ErrorKind::InvalidData));
        }
        taken.push(range.clone());
        Ok(IdShare { link: self.clone(), range })
    }

    /// Has descriptors kept for the next daemon, with a note for it, and with them the
    /// control groups with this number, if any. Does not wait for it; a monitor that keeps as
    /// much as it may counts as a refusal ([`MonitorLink::refusals`]).
    ///
    /// # Errors
    /// The note is too long, or this process has no descriptors left.
    pub(crate) fn keep(
        self: &Arc<Self>,
        kind: KeptKind,
        group: Option<u64>,
        note: &[u8],
        descriptors: &[BorrowedFd<'_>],
    ) -> io::Result<Keep> {
        if note.len() > NOTE_MAX {
            return Err(io::Error::from(io::ErrorKind::InvalidInput));
        }
        let key = self.last_key.fetch_add(1, Ordering::Relaxed) + 1;
        let request = Request::keep(key, kind, group.unwrap_or_default());
        let own = descriptors.iter().map(|descriptor| descriptor.try_clone_to_owned());
        let descriptors = own.collect::<io::Result<_>>()?;
        let has_arrived = Arc::new(AtomicBool::new(false));
        let (note, told) = (note.to_vec(), has_arrived.clone());
        self.send(Queued::Keep { request, note, descriptors, has_arrived: told });
        Ok(Keep { link: self.clone(), key, has_arrived })
    }

    /// How often the monitor has refused to keep something.
    pub fn refusals(&self) -> u64 {
        self.refusals.load(Ordering::Relaxed)
    }

    /// Says that this daemon ends in order, behind everything that the monitor is to keep: when
    /// this has returned, the monitor has all of it, and nothing is kept or forgotten any more.
    ///
    /// # Errors
    /// The monitor has not answered within `patience`. It has what has arrived by then.
    pub fn leave(self: &Arc<Self>, patience: Duration) -> io::Result<()> {
        let (told, tell) = mpsc::channel();
        self.send(Queued::Leave(told));
        tell.recv_timeout(patience).map_err(|_| io::ErrorKind::TimedOut.into())
    }

    /// Says that this daemon serves its clients, to the monitor that has started it.
    pub fn say_serving(self: &Arc<Self>) {
        self.send(Queued::Tell(Request::new(REQUEST_SERVING, 0)));
    }

    /// Leaves a request to the thread that sends them in turn.
    fn send(self: &Arc<Self>, queued: Queued) {
        let queue = self.queue.get_or_init(|| {
            let (sender, receiver) = mpsc::channel();
            let link = self.clone();
            let thread = std::thread::Builder::new().name("monitor-queue".into());
            // Without the thread nothing is kept, and nothing else is lost.
            let _ = thread.spawn(move || link.do_queued(&receiver));
            sender
        });
        let _ = queue.send(queued);
    }

    fn do_queued(&self, queue: &Receiver<Queued>) {
        for queued in queue {
            let socket = lock(&self.socket);
            match queued {
                // A monitor that is gone takes this process with it.
                Queued::Tell(request) => drop(send(&*socket, &request, &[])),
                Queued::Leave(told) => {
                    let request = Request::new(REQUEST_LEAVE, 0);
                    if send(&*socket, &request, &[]).and_then(|()| receive_answer(&socket)).is_ok()
                    {
                        // Who waits may have lost patience.
                        let _ = told.send(());
                    }
                    return;
                }
                Queued::Keep { request, note, descriptors, has_arrived } => {
                    let parts = [IoSlice::new(bytemuck::bytes_of(&request)), IoSlice::new(&note)];
                    let lent: Vec<_> = descriptors.iter().map(AsFd::as_fd).collect();
                    let kept = message::send(&*socket, &parts, &lent)
                        .and_then(|()| receive_answer(&socket));
                    match kept {
                        Ok(_) => has_arrived.store(true, Ordering::Release),
                        Err(_) => drop(self.refusals.fetch_add(1, Ordering::Relaxed)),
                    }
                }
            }
        }
    }

    /// All that earlier daemons have had kept.
    ///
    /// # Errors
    /// The monitor has ended.
    pub(crate) fn kept(self: &Arc<Self>) -> io::Result<Vec<(Keep, Kept)>> {
        let mut all: Vec<(Keep, Kept)> = Vec::new();
        loop {
            let last = all.last().map_or(0, |(keep, _)| keep.key);
            let socket = lock(&self.socket);
            send(&*socket, &Request::new(REQUEST_NEXT_KEPT, last), &[])?;
            let Some((key, kept)) = receive_kept(&*socket)? else { return Ok(all) };
            drop(socket);
            let has_arrived = Arc::new(AtomicBool::new(true));
            all.push((Keep { link: self.clone(), key, has_arrived }, kept));
        }
    }

    /// Has a zygote parent started with this control socket and this kernel.
    pub(crate) fn start_parent(&self, control: OwnedFd, kernel: OwnedFd) -> io::Result<()> {
        self.ask(Request::new(REQUEST_PARENT, 0), &[control.as_fd(), kernel.as_fd()]).map(drop)
    }

    /// Has a state helper started with this socket, for sandboxes of this pid namespace.
    pub(crate) fn start_state_helper(
        &self,
        socket: OwnedFd,
        pid_namespace: OwnedFd,
        id: u32,
        task: Task,
    ) -> io::Result<()> {
        let number = u64::from(task.number()) << 32 | u64::from(id);
        let request = Request::new(REQUEST_STATE_HELPER, number);
        self.ask(request, &[socket.as_fd(), pid_namespace.as_fd()]).map(drop)
    }

    /// Has a resolver process started with this socket.
    pub(crate) fn start_resolver(&self, socket: OwnedFd) -> io::Result<()> {
        self.ask(Request::new(REQUEST_RESOLVER, 0), &[socket.as_fd()]).map(drop)
    }

    /// Has a fetcher started with this socket.
    ///
    /// # Errors
    /// The monitor has as many as it may (`EAGAIN`), or cannot start one.
    pub fn start_fetcher(&self, socket: OwnedFd) -> io::Result<()> {
        self.ask(Request::new(REQUEST_FETCHER, 0), &[socket.as_fd()]).map(drop)
    }

    /// Has control groups made; their name, and the files that move a process into them.
    pub(crate) fn make_group(&self) -> io::Result<(GroupName, Vec<OwnedFd>)> {
        let number = self.last_group.fetch_add(1, Ordering::Relaxed) + 1;
        let request = Request::new(REQUEST_GROUP, number);
        let (Answer { group, .. }, entrances) = self.ask_for_answer(request, &[])?;
        if group.number != number || entrances.len() != self.grant.places.len() {
            return Err(io::Error::from(io::ErrorKind::InvalidData));
        }
        Ok((group, entrances))
    }

    /// Limits of groups that were given back.
    pub(crate) fn settings(&self) -> &InForceByGroup {
        &self.settings
    }

    /// Has control groups removed as soon as nobody is in them.
    pub(crate) fn remove_group(self: &Arc<Self>, number: u64) {
        self.send(Queued::Tell(Request::new(REQUEST_REMOVE_GROUP, number)));
    }

    /// Binds a socket to a port that this process may not bind itself.
    ///
    /// # Errors
    /// Those of bind(2); `EACCES` if the port is not a privileged one.
    pub fn bind(&self, address: SocketAddr, transport: Transport) -> io::Result<OwnedFd> {
        let mut descriptors = self.ask(Request::bind(address, transport), &[])?;
        descriptors.pop().ok_or_else(|| io::Error::from(io::ErrorKind::InvalidData))
    }

    fn ask(&self, request: Request, descriptors: &[BorrowedFd<'_>]) -> io::Result<Vec<OwnedFd>> {
        Ok(self.ask_for_answer(request, descriptors)?.1)
    }

    fn ask_for_answer(
        &self,
        request: Request,
        descriptors: &[BorrowedFd<'_>],
    ) -> io::Result<(Answer, Vec<OwnedFd>)> {
        let socket = lock(&self.socket);
        send(&*socket, &request, descriptors)?;
        receive_answer(&socket)
    }
}

fn receive_answer(socket: &OwnedFd) -> io::Result<(Answer, Vec<OwnedFd>)> {
    let mut received = Vec::new();
    match receive::<Answer>(socket, &mut received)? {
        Some(answer) if answer.errno == 0 => Ok((answer, received)),
        Some(Answer { errno, .. }) => Err(io::Error::from_raw_os_error(errno)),
        None => Err(io::Error::other("the monitor has ended")),
    }
}

/// The first `wanted` numbers of `all`, or fewer, that are in none of `taken`.
fn first_gap(taken: &[Range<u32>], all: Range<u32>, wanted: u32) -> Option<Range<u32>> {
    let mut taken: Vec<_> = taken.to_vec();
    taken.sort_by_key(|range| range.start);
    let mut start = all.start;
    let mut largest: Option<Range<u32>> = None;
    for next in taken.iter().map(Some).chain([None]) {
        let end = next.map_or(all.end, |range| range.start);
        let gap = start..end.min(start.saturating_add(wanted));
        if gap.len() == wanted as usize {
            return Some(gap);
        }
        if !gap.is_empty() && largest.as_ref().is_none_or(|largest| largest.len() < gap.len()) {
            largest = Some(gap);
        }
        start = next.map_or(all.end, |range| range.end);
    }
    largest
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::monitor::protocol::{REQUEST_KEEP, receive_request};
    use crate::monitor::store::DescriptorStore;
    use std::fs::File;
    use std::time::Instant;

    /// A link to whoever has the other end.
    fn link() -> (Arc<MonitorLink>, OwnedFd) {
        let (socket, monitor) = message::control_pair().unwrap();
        let grant = Grant { ids: 0, life: 0, places: Vec::new(), missing: Vec::new() };
        let link = MonitorLink {
            socket: Mutex::new(socket),
            grant,
            settings: InForceByGroup::default(),
            last_group: AtomicU64::new(0),
            last_key: AtomicU64::new(0),
            taken: Mutex::default(),
            queue: OnceLock::new(),
            refusals: AtomicU64::new(0),
        };
        (Arc::new(link), monitor)
    }

    /// Serves all that is to be kept, until the other end is closed.
    fn keep_all(mut store: DescriptorStore, monitor: &OwnedFd) {
        let mut descriptors = Vec::new();
        while let Ok(Some((request, note))) = receive_request(monitor, &mut descriptors) {
            let given = std::mem::take(&mut descriptors);
            if request.kind == REQUEST_KEEP {
                let kept = store.keep(&request, 0, note, given);
                let errno = kept.map_or_else(|error| error.raw_os_error().unwrap(), |()| 0);
                let _ = send(monitor, &Answer::new(errno), &[]);
            } else {
                store.forget(request.number);
            }
        }
    }

    fn wait_for_refusals(link: &MonitorLink, count: u64) {
        let deadline = Instant::now() + Duration::from_secs(20);
        while link.refusals() != count {
            assert!(Instant::now() < deadline, "{} refusals", link.refusals());
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    #[test]
    fn refusals_of_a_full_store_are_counted() {
        let (link, monitor) = link();
        std::thread::spawn(move || keep_all(DescriptorStore::new(2, 10), &monitor));
        let null = File::open("/dev/null").unwrap();
        let keep =
            || link.keep(KeptKind::Connection, None, b"", &[null.as_fd()]).expect("it is sent");
        let kept = [(); 4].map(|()| keep());
        wait_for_refusals(&link, 2);
        // What was refused is forgotten without harm, and others have the room of what was kept.
        drop(kept);
        let more = [(); 3].map(|()| keep());
        wait_for_refusals(&link, 3);
        drop(more);
    }

    /// Whatever lets go of something afterwards, the next daemon gets it.
    #[test]
    fn a_daemon_that_leaves_has_everything_kept_and_forgets_nothing() {
        let (link, monitor) = link();
        let (done, store) = mpsc::channel();
        std::thread::spawn(move || {
            let mut store = DescriptorStore::new(100, 100);
            let mut descriptors = Vec::new();
            while let Ok(Some((request, note))) = receive_request(&monitor, &mut descriptors) {
                let given = std::mem::take(&mut descriptors);
                match request.kind {
                    REQUEST_KEEP => store.keep(&request, 0, note, given).unwrap(),
                    REQUEST_LEAVE => {}
                    _ => {
                        store.forget(request.number);
                        continue;
                    }
                }
                let _ = send(&monitor, &Answer::new(0), &[]);
            }
            done.send(store.len()).unwrap();
        });
        let null = File::open("/dev/null").unwrap();
        let keep = || link.keep(KeptKind::Connection, None, b"", &[null.as_fd()]).unwrap();
        let kept = [(); 20].map(|()| keep());
        link.leave(Duration::from_secs(20)).unwrap();
        assert!(kept.iter().all(|kept| kept.has_arrived().load(Ordering::Acquire)));
        drop(kept);
        drop(link);
        assert_eq!(store.recv_timeout(Duration::from_secs(20)), Ok(20));
    }

    #[test]
    fn a_daemon_that_leaves_waits_for_its_monitor_so_long() {
        let (link, _monitor) = link();
        let error = link.leave(Duration::from_millis(20)).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
    }

    /// Nobody reads the monitor's end.
    #[test]
    fn nobody_waits_for_a_monitor_that_keeps_and_forgets_nothing() {
        let (link, monitor) = link();
        let null = File::open("/dev/null").unwrap();
        // More than a socket holds.
        for _ in 0..500 {
            let note = [0; NOTE_MAX];
            drop(link.keep(KeptKind::Connection, None, &note, &[null.as_fd()]).unwrap());
        }
        assert_eq!(link.refusals(), 0);
        // Requests that are left in the queue fail.
        drop(monitor);
        wait_for_refusals(&link, 500);
    }

    #[test]
    fn parents_have_ids_that_no_other_has() {
        assert_eq!(first_gap(&[], 1..101, 100), Some(1..101));
        assert_eq!(first_gap(&[1..51, 60..101], 1..101, 9), Some(51..60));
        assert_eq!(first_gap(&[60..101, 1..51], 1..101, 20), Some(51..60));
        assert_eq!(first_gap(&[1..51, 51..101], 1..101, 1), None);
    }
}
