//! The end of a process that leaves its sandboxes to another one.
//!
//! A sandbox that gets no reply does not know whether its request was served. So a request that has begun is
//! finished, and one that comes later is answered with `ENOTCONN`: nobody has served it. The sandbox then
//! asks what it has to take back ([`VOLUME_RENEW`]), which the next process answers.

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use thaw_abi::bind::VOLUME_RENEW;

use super::{FileQuestion, LEAVING};

/// Whether requests are served any more, and how many are being served.
pub(super) struct Leaving {
    state: Mutex<State>,
    changed: Condvar,
}

struct State {
    is_leaving: bool,
    under_way: usize,
}

/// A request that is being served, until its reply is sent.
pub(super) struct Served<'a>(&'a Leaving);

impl Leaving {
    pub const fn new() -> Self {
        let state = Mutex::new(State { is_leaving: false, under_way: 0 });
        Self { state, changed: Condvar::new() }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Begins to serve a request. `None`: none is served any more. That of a sandbox that asks what it has
    /// to take back is left to the next process, so that this one does not return.
    pub fn begin(&self, question: &FileQuestion) -> Option<Served<'_>> {
        let mut state = self.state();
        if !state.is_leaving {
            state.under_way += 1;
            return Some(Served(self));
        }
        drop(state);
        match question {
            FileQuestion::Bind(request, _) if request.operation == VOLUME_RENEW => loop {
                std::thread::park();
            },
            _ => None,
        }
    }
}

impl Drop for Served<'_> {
    fn drop(&mut self) {
        let mut state = self.0.state();
        state.under_way -= 1;
        if state.is_leaving {
            self.0.changed.notify_all();
        }
    }
}

/// Serves no request about volumes any more, of any sandbox, because this process is about to end and
/// another one goes on with its sandboxes. Waits until what is being served is done, for so long at most;
/// whether it is.
pub fn leave_requests_about_volumes(patience: Duration) -> bool {
    let mut state = LEAVING.state();
    state.is_leaving = true;
    let waiting = LEAVING.changed.wait_timeout_while(state, patience, |state| state.under_way > 0);
    !waiting.unwrap_or_else(PoisonError::into_inner).1.timed_out()
}
