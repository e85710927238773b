//! Look-ups by the host's resolver, on threads of their own: getaddrinfo(3) may
//! take as long as it likes.

use std::collections::VecDeque;
use std::net::{IpAddr, ToSocketAddrs};
use std::sync::{Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use super::message::Outcome;

/// Most look-ups at a time.
const THREADS_MAX: usize = 16;
/// Most look-ups that wait for a thread.
const WAITING_MAX: usize = 512;
/// How long a thread without work stays.
const IDLE: Duration = Duration::from_secs(10);
/// How long an answer is used again: programs ask for either type of address.
const FRESH: Duration = Duration::from_secs(5);
/// Most answers that are kept.
const KEPT_MAX: usize = 256;

type Job = Box<dyn FnOnce() + Send>;

#[derive(Default)]
struct State {
    waiting: VecDeque<Job>,
    threads: usize,
    idle: usize,
    /// The newest last.
    kept: VecDeque<(Instant, String, Outcome)>,
}

/// The threads of this process.
#[derive(Default)]
struct Pool {
    state: Mutex<State>,
    work: Condvar,
}

fn pool() -> &'static Pool {
    static POOL: OnceLock<Pool> = OnceLock::new();
    POOL.get_or_init(Pool::default)
}

impl Pool {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn run(&self) {
        let mut state = self.lock();
        loop {
            if let Some(job) = state.waiting.pop_front() {
                drop(state);
                job();
                state = self.lock();
                continue;
            }
            state.idle += 1;
            let (guard, waited) =
                self.work.wait_timeout(state, IDLE).unwrap_or_else(PoisonError::into_inner);
            state = guard;
            state.idle -= 1;
            if waited.timed_out() && state.waiting.is_empty() {
                state.threads -= 1;
                return;
            }
        }
    }
}

/// Too many look-ups wait already.
#[derive(Debug, PartialEq, Eq)]
pub struct Overloaded;

/// Runs `job` on a thread that may wait.
pub fn submit(job: impl FnOnce() + Send + 'static) -> Result<(), Overloaded> {
    let pool = pool();
    let mut state = pool.lock();
    if state.waiting.len() >= WAITING_MAX {
        return Err(Overloaded);
    }
    if state.idle <= state.waiting.len() && state.threads < THREADS_MAX {
        let thread = std::thread::Builder::new().name("thaw-lookup".into());
        match thread.spawn(|| self::pool().run()) {
            Ok(_) => state.threads += 1,
            Err(_) if state.threads == 0 => return Err(Overloaded),
            Err(_) => {}
        }
    }
    state.waiting.push_back(Box::new(job));
    pool.work.notify_one();
    Ok(())
}

/// Asks the host's resolver for the addresses of a name, or one's own memory if
/// that was just done. May block.
pub fn addresses_of(name: &str) -> Outcome {
    let pool = pool();
    {
        let mut state = pool.lock();
        state.kept.retain(|(when, ..)| when.elapsed() < FRESH);
        if let Some((_, _, outcome)) = state.kept.iter().find(|(_, kept, _)| kept == name) {
            return outcome.clone();
        }
    }
    let outcome = ask(name);
    let mut state = pool.lock();
    if state.kept.len() == KEPT_MAX {
        state.kept.pop_front();
    }
    state.kept.push_back((Instant::now(), name.to_owned(), outcome.clone()));
    outcome
}

fn ask(name: &str) -> Outcome {
    match (name, 0).to_socket_addrs() {
        Ok(found) => {
            let mut addresses: Vec<IpAddr> = Vec::new();
            for ip in found.map(|address| address.ip().to_canonical()) {
                // What means the host to the host would mean the sandbox to the sandbox.
                if !ip.is_loopback() && !ip.is_unspecified() && !addresses.contains(&ip) {
                    addresses.push(ip);
                }
            }
            Outcome::Addresses(addresses)
        }
        // The standard library passes on no more than the text of gai_strerror(3).
        Err(error) if error.to_string().contains("Temporary failure") => Outcome::Failed,
        Err(_) => Outcome::NoSuchName,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc;

    #[test]
    fn jobs_run_at_the_same_time() {
        let (sender, receiver) = mpsc::channel();
        let (gate_sender, gate) = mpsc::channel::<()>();
        submit(move || {
            let _ = gate.recv();
        })
        .unwrap();
        submit(move || sender.send(7).unwrap()).unwrap();
        assert_eq!(receiver.recv_timeout(Duration::from_secs(10)), Ok(7));
        drop(gate_sender);
    }

    #[test]
    fn the_hosts_loopback_is_no_answer() {
        // An address is a name to getaddrinfo(3): no server is asked.
        assert_eq!(ask("127.0.0.1"), Outcome::Addresses(vec![]));
        let address = "192.0.2.1".parse().unwrap();
        assert_eq!(ask("192.0.2.1"), Outcome::Addresses(vec![address]));
    }
}
