//! A proxy before a registry that holds, cuts or stalls what is asked of it.

use std::collections::HashSet;
use std::io::{ErrorKind, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::thread::{self, sleep};
use std::time::Duration;

/// What becomes of requests for blobs and of their answers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// They pass.
    Pass,
    /// They wait until the mode changes, or their client leaves.
    Hold,
    /// Each connection that asks for one is cut.
    Cut,
    /// So many connections are cut in the middle of an answer, then all pass.
    Break(usize),
    /// Answers stop in the middle until the mode changes.
    Stall,
}

struct State {
    mode: Mutex<Mode>,
    /// Requests for blobs so far.
    asked: AtomicUsize,
    /// Of those that are held, so many pass.
    more: AtomicUsize,
    /// So many of all pass in any mode.
    free: AtomicUsize,
    /// Requests for these paths pass in any mode.
    passing: Mutex<HashSet<String>>,
    /// Requests of any kind: the number of their connection, and their path.
    requests: Mutex<Vec<(usize, String)>>,
}

/// The proxy.
#[derive(Clone)]
pub struct Gate {
    address: SocketAddr,
    state: Arc<State>,
}

/// Bytes of an answer that pass before it stalls or breaks.
const BEGINNING: usize = 2000;
/// How often the gate looks at a request that is held.
const LOOK: Duration = Duration::from_millis(5);
/// Part of the path of each blob.
const BLOBS: &str = "/blobs/";

impl Gate {
    /// One before `to` that lets the first `free` requests for blobs pass.
    pub fn before(to: SocketAddr, mode: Mode, free: usize) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let address = listener.local_addr().expect("an address");
        let state = Arc::new(State {
            mode: Mutex::new(mode),
            asked: AtomicUsize::new(0),
            more: AtomicUsize::new(0),
            free: AtomicUsize::new(free),
            passing: Mutex::default(),
            requests: Mutex::default(),
        });
        let shared = state.clone();
        thread::spawn(move || {
            for (number, client) in listener.incoming().flatten().enumerate() {
                let state = shared.clone();
                let Ok(server) = TcpStream::connect(to) else { continue };
                let up = (client.try_clone().expect("a copy"), server.try_clone().expect("a copy"));
                let limited = Arc::new(AtomicUsize::new(0));
                let (of_state, of_limited) = (state.clone(), limited.clone());
                thread::spawn(move || requests((number, up.0), up.1, &of_state, &of_limited));
                thread::spawn(move || answers(server, client, &state, &limited));
            }
        });
        Self { address, state }
    }

    pub fn image(&self, name: &str) -> String {
        format!("localhost:{}/{name}", self.address.port())
    }

    pub fn set(&self, mode: Mode) {
        *self.state.mode.lock().expect("no holder panics") = mode;
    }

    /// Lets so many of the requests pass that are held, or will be.
    pub fn let_pass(&self, count: usize) {
        self.state.more.store(count, Ordering::SeqCst);
    }

    /// Lets all requests for this path pass, also those that are held.
    pub fn let_pass_path(&self, path: &str) {
        self.state.passing().insert(path.to_owned());
    }

    /// Lets the blobs pass that clients asked for after the first `before` requests of any kind: those
    /// that nobody had asked for until then, or all if there are no such.
    pub fn let_pass_since(&self, before: usize) {
        let requests = self.requests();
        let (before, since) = requests.split_at(before);
        let mut passing = self.state.passing();
        let asked: HashSet<String> = since.iter().map(|(_, path)| path.clone()).collect();
        let is_held = |path: &String| path.contains(BLOBS) && !passing.contains(path);
        let held: HashSet<String> = asked.into_iter().filter(is_held).collect();
        let is_new = |path: &&String| !before.iter().any(|(_, known)| known == *path);
        let new: HashSet<String> = held.iter().filter(is_new).cloned().collect();
        passing.extend(if new.is_empty() { held } else { new });
    }

    /// Whether requests wait that nothing lets pass.
    pub fn holds(&self) -> bool {
        self.state.mode() == Mode::Hold
    }

    /// Different blobs that clients asked for so far.
    pub fn blobs(&self) -> usize {
        let requests = self.requests();
        let paths = requests.iter().map(|(_, path)| path).filter(|path| path.contains(BLOBS));
        paths.collect::<HashSet<_>>().len()
    }

    /// Requests of any kind so far: the number of their connection, and their path.
    pub fn requests(&self) -> Vec<(usize, String)> {
        self.state.requests.lock().expect("no holder panics").clone()
    }

    /// Requests for blobs so far.
    pub fn asked(&self) -> usize {
        self.state.asked.load(Ordering::SeqCst)
    }
}

impl State {
    /// Whether a request that is held may pass all the same.
    fn lets_one_pass(&self) -> bool {
        let one = |left: usize| left.checked_sub(1);
        self.more.fetch_update(Ordering::SeqCst, Ordering::SeqCst, one).is_ok()
    }

    /// Whether all requests for this path pass.
    fn passes(&self, path: &str) -> bool {
        self.passing().contains(path)
    }

    fn passing(&self) -> MutexGuard<'_, HashSet<String>> {
        self.passing.lock().expect("no holder panics")
    }

    fn mode(&self) -> Mode {
        *self.mode.lock().expect("no holder panics")
    }
}

fn end(streams: [&TcpStream; 2]) {
    for stream in streams {
        let _ = stream.shutdown(Shutdown::Both);
    }
}

/// `limited` becomes 1 when what is answered from now on may be stopped.
fn requests(
    (number, mut from): (usize, TcpStream),
    mut to: TcpStream,
    state: &State,
    limited: &AtomicUsize,
) {
    let mut buffer = vec![0; 16 << 10];
    while let Ok(read @ 1..) = from.read(&mut buffer) {
        let line = String::from_utf8_lossy(&buffer[..read]);
        let path = line.strip_prefix("GET ").and_then(|line| line.split(' ').next());
        let path = path.map(str::to_owned);
        if let Some(path) = &path {
            let mut requests = state.requests.lock().expect("no holder panics");
            requests.push((number, path.clone()));
        }
        if let Some(path) = path.filter(|path| path.contains(BLOBS))
            && state.asked.fetch_add(1, Ordering::SeqCst) >= state.free.load(Ordering::SeqCst)
            && !state.passes(&path)
        {
            limited.store(1, Ordering::SeqCst);
            while state.mode() == Mode::Hold {
                // What nobody waits for any more must not pass in place of something else.
                if !is_waited_for(&from) {
                    return end([&from, &to]);
                }
                if state.passes(&path) || state.lets_one_pass() {
                    break;
                }
            }
            if state.mode() == Mode::Cut {
                break;
            }
        }
        if to.write_all(&buffer[..read]).is_err() {
            break;
        }
    }
    end([&from, &to]);
}

/// Whether a client that has asked for something is still there, after [`LOOK`].
fn is_waited_for(client: &TcpStream) -> bool {
    // Nothing else reads from it meanwhile.
    let peeked = client.set_read_timeout(Some(LOOK)).and_then(|()| client.peek(&mut [0]));
    let restored = client.set_read_timeout(None);
    match peeked {
        Ok(0) => false,
        Ok(_) => {
            sleep(LOOK);
            restored.is_ok()
        }
        Err(error) => {
            let passing = [ErrorKind::WouldBlock, ErrorKind::TimedOut, ErrorKind::Interrupted];
            passing.contains(&error.kind()) && restored.is_ok()
        }
    }
}

fn answers(mut from: TcpStream, mut to: TcpStream, state: &State, limited: &AtomicUsize) {
    let (mut buffer, mut passed) = (vec![0; 1000], 0);
    while let Ok(read @ 1..) = from.read(&mut buffer) {
        if limited.load(Ordering::SeqCst) == 1 {
            passed += read;
        }
        if passed > BEGINNING && is_stopped(state) {
            break;
        }
        if to.write_all(&buffer[..read]).is_err() {
            break;
        }
    }
    end([&from, &to]);
}

/// Waits as long as answers stall; whether this one is to break.
fn is_stopped(state: &State) -> bool {
    while state.mode() == Mode::Stall {
        sleep(LOOK);
    }
    let mut mode = state.mode.lock().expect("no holder panics");
    match *mode {
        Mode::Break(0) => {
            *mode = Mode::Pass;
            false
        }
        Mode::Break(left) => {
            *mode = Mode::Break(left - 1);
            true
        }
        _ => false,
    }
}
