//! A proxy before a registry that holds, cuts or stalls what is asked of it.

use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::{self, sleep};
use std::time::Duration;

/// What becomes of requests for blobs and of their answers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// They pass.
    Pass,
    /// They wait until the mode changes.
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
    /// Requests of any kind: the number of their connection, and their path.
    requests: Mutex<Vec<(usize, String)>>,
}

/// The proxy.
pub struct Gate {
    address: SocketAddr,
    state: Arc<State>,
}

/// Bytes of an answer that pass before it stalls or breaks.
const BEGINNING: usize = 2000;

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
        if let Some(path) = line.strip_prefix("GET ").and_then(|line| line.split(' ').next()) {
            let mut requests = state.requests.lock().expect("no holder panics");
            requests.push((number, path.to_owned()));
        }
        drop(line);
        let asks = buffer[..read].starts_with(b"GET ")
            && buffer[..read].windows(7).any(|part| part == b"/blobs/");
        if asks && state.asked.fetch_add(1, Ordering::SeqCst) >= state.free.load(Ordering::SeqCst) {
            limited.store(1, Ordering::SeqCst);
            while state.mode() == Mode::Hold && !state.lets_one_pass() {
                sleep(Duration::from_millis(5));
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
        sleep(Duration::from_millis(5));
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
