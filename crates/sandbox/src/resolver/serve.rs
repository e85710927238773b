//! The life of a resolver process, and that of a worker.
#![allow(unsafe_code)]

use std::net::{IpAddr, ToSocketAddrs};
use std::os::fd::{AsFd, OwnedFd};
use std::time::Instant;

use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use rustix::process::{
    Pid, PidfdFlags, Signal, WaitId, WaitIdOptions, getpid, pidfd_open, pidfd_send_signal, waitid,
};

use super::confine::become_worker;
use super::filter::Filter;
use super::protocol::{
    ADDRESSES_MAX, Answer, Found, LOOK_UP_MAX, Question, REQUEST_WORKER, Received, receive, send,
};
use crate::zygote::receive as receive_with_descriptors;
use crate::{message, sys};

/// Most workers at a time: twice as many as a caller asks questions, since those whose
/// questions it has given up may still be there.
const WORKERS_MAX: usize = 256;

/// A worker.
struct Worker {
    pidfd: OwnedFd,
    deadline: Instant,
}

impl Worker {
    /// Whether it has ended; it has been reaped then.
    fn has_ended(&self) -> bool {
        let options = WaitIdOptions::EXITED | WaitIdOptions::NOHANG;
        // An error says that there is no such child.
        !matches!(waitid(WaitId::PidFd(self.pidfd.as_fd()), options), Ok(None))
    }
}

/// Forks workers until the caller closes its end of `control`. Returns the code to exit
/// with. Workers die with this process.
pub fn serve(control: OwnedFd, filter: &Filter) -> i32 {
    let mut workers: Vec<Worker> = Vec::new();
    let resolver = getpid();
    loop {
        let is_asked = match wait(&control, &workers) {
            Ok(is_asked) => is_asked,
            Err(_) => return 1,
        };
        let now = Instant::now();
        for worker in workers.iter().filter(|worker| worker.deadline <= now) {
            // It may have ended just now.
            let _ = pidfd_send_signal(&worker.pidfd, Signal::KILL);
        }
        workers.retain(|worker| !worker.has_ended());
        if !is_asked {
            continue;
        }
        let mut descriptors = Vec::new();
        let socket = match receive_with_descriptors::<u32>(&control, &mut descriptors) {
            Ok(Some(REQUEST_WORKER)) => <[OwnedFd; 1]>::try_from(descriptors),
            Ok(None) => return 0,
            _ => return 1,
        };
        let Ok([socket]) = socket else { return 1 };
        if workers.len() >= WORKERS_MAX {
            // The caller sees the end of its socket.
            continue;
        }
        // SAFETY: this process has one thread.
        match unsafe { sys::fork() } {
            Ok(None) => {
                // It must neither hear the caller nor know other workers.
                drop((control, workers));
                return run_worker(&socket, resolver, filter);
            }
            // The process cannot be another's yet: it has not been reaped.
            Ok(Some(pid)) => match pidfd_open(pid, PidfdFlags::empty()) {
                Ok(pidfd) => {
                    workers.push(Worker { pidfd, deadline: Instant::now() + LOOK_UP_MAX });
                }
                Err(_) => return 1,
            },
            // The host is out of processes or memory. The caller sees the end of its socket.
            Err(_) => {}
        }
    }
}

/// Waits until the caller says something, a worker ends or has taken too long; whether it was
/// the caller.
fn wait(control: &OwnedFd, workers: &[Worker]) -> Result<bool, Errno> {
    let mut events = vec![PollFd::new(control, PollFlags::IN)];
    events.extend(workers.iter().map(|worker| PollFd::new(&worker.pidfd, PollFlags::IN)));
    let earliest = workers.iter().map(|worker| worker.deadline).min();
    let timeout = earliest.map(message::time_until);
    match poll(&mut events, timeout.as_ref()) {
        Ok(_) => Ok(!events[0].revents().is_empty()),
        Err(Errno::INTR) => Ok(false),
        Err(errno) => Err(errno),
    }
}

/// The life of a worker. Returns the code to exit with.
fn run_worker(socket: &OwnedFd, resolver: Pid, filter: &Filter) -> i32 {
    if become_worker(resolver, filter).is_err() {
        return 1;
    }
    let Ok(Received::Packet(question)) = receive::<Question>(socket) else { return 1 };
    let Some(name) = question.name() else { return 1 };
    i32::from(send(socket, &Answer::new(&ask(name)), &[]).is_err())
}

/// Asks the host's resolver.
fn ask(name: &str) -> Found {
    match (name, 0).to_socket_addrs() {
        Ok(all) => {
            let mut addresses: Vec<IpAddr> = Vec::new();
            for ip in all.map(|address| address.ip().to_canonical()) {
                if addresses.len() < ADDRESSES_MAX && !addresses.contains(&ip) {
                    addresses.push(ip);
                }
            }
            Found::Addresses(addresses)
        }
        Err(error) if is_temporary(&error.to_string()) => Found::Failed,
        Err(_) => Found::NoSuchName,
    }
}

/// Whether it is `EAI_AGAIN`. The standard library passes on no more than the text of
/// gai_strerror(3): that of the GNU C library, or of musl.
fn is_temporary(error: &str) -> bool {
    ["Temporary failure", "Try again"].iter().any(|text| error.contains(text))
}
