//! The life of a rewinder: it serves one request after the other.

use std::collections::HashMap;
use std::ffi::CStr;
use std::io::{self, IoSlice};
use std::os::fd::OwnedFd;

use rustix::fs::readlinkat;

use super::held::{Held, PAGES_MAX};
use super::process::Process;
use super::protocol::{Answer, REQUEST_FORGET, REQUEST_REWIND, REQUEST_TAKE_DOWN, Reason, Request};
use crate::{message, sys};

/// Most pages that are kept of all sandboxes together, 1 GiB.
const ALL_PAGES_MAX: usize = 32 * PAGES_MAX;
/// Most sandboxes: each takes seven open files.
const SANDBOXES_MAX: usize = 1000;

/// Serves requests until the caller closes its end. Returns the exit code.
pub(crate) fn serve(control: &OwnedFd, proc: &OwnedFd) -> i32 {
    // In a container it may see the numbers of another pid namespace: ptrace(2) would reach
    // other processes than are meant.
    let own = std::process::id().to_string();
    if readlinkat(proc, "self", Vec::new()).ok().as_deref().map(CStr::to_bytes)
        != Some(own.as_bytes())
    {
        return 1;
    }
    let mut rewinder = Rewinder::default();
    let mut packet = [0; size_of::<Request>() + 1];
    loop {
        let mut descriptors = Vec::new();
        let len = match message::receive(control, &mut packet, Some(&mut descriptors)) {
            Ok(received) if received.len == 0 => return 0,
            Ok(received) => received.len,
            Err(_) => return 1,
        };
        let Some(request) = Request::parse(&packet[..len]) else { return 1 };
        let Some(answer) = rewinder.answer(&request, descriptors.pop(), proc) else { continue };
        if message::send(control, &[IoSlice::new(&answer)], &[]).is_err() {
            return 1;
        }
    }
}

/// The sandboxes whose state was taken down, by key.
#[derive(Default)]
struct Rewinder {
    held: HashMap<u64, Held>,
}

impl Rewinder {
    fn answer(
        &mut self,
        request: &Request,
        pidfd: Option<OwnedFd>,
        proc: &OwnedFd,
    ) -> Option<Vec<u8>> {
        match (request.kind, pidfd) {
            (REQUEST_TAKE_DOWN, Some(pidfd)) => Some(self.take_down(request.key, pidfd, proc)),
            (REQUEST_REWIND, None) => Some(self.rewind(request.key)),
            (REQUEST_FORGET, None) => {
                self.held.remove(&request.key);
                None
            }
            _ => Some(Answer::refused(Reason::Other, "there is no such request")),
        }
    }

    fn take_down(&mut self, key: u64, pidfd: OwnedFd, proc: &OwnedFd) -> Vec<u8> {
        self.held.retain(|_, held| held.runs());
        let pages: usize = self.held.values().map(Held::pages).sum();
        if self.held.len() >= SANDBOXES_MAX || pages + PAGES_MAX > ALL_PAGES_MAX {
            let why = "too many sandboxes are rewound at a time";
            return Answer::refused(Reason::Pages, why);
        }
        let process = Process::open(proc, pidfd).map_err(io::Error::into);
        match process.and_then(|process| Held::new(process, self.held.values())) {
            Ok(held) => {
                let answer = Answer::done(held.pages() as u64, 0).with_text("");
                self.held.insert(key, held);
                answer
            }
            Err(refusal) => Answer::refused(refusal.reason(), &refusal.to_string()),
        }
    }

    fn rewind(&mut self, key: u64) -> Vec<u8> {
        let Some(held) = self.held.get_mut(&key) else {
            return Answer::refused(Reason::Other, "its state was not taken down");
        };
        let begin = sys::thread_processor_time();
        match held.rewind() {
            Ok(effort) => {
                let nanoseconds = sys::thread_processor_time().saturating_sub(begin);
                Answer { nanoseconds, ..Answer::done(effort.pages, effort.calls) }.with_text("")
            }
            Err(refusal) => {
                self.held.remove(&key);
                Answer::refused(refusal.reason(), &refusal.to_string())
            }
        }
    }
}
