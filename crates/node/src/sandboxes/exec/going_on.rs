//! Processes that go on in a copy of their sandbox, or when it wakes from its sleep: with other
//! sockets in place of those that they had.

use super::streams::Sockets;
use super::{Exec, ExecState, Execs, START_PATIENCE};
use crate::instance::Connector;
use serde::{Deserialize, Serialize};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use thaw_abi::remote::EXECS_MAX;
use thaw_sandbox::RemoteMessage;
use tokio::time::timeout;

/// Most bytes of a program's name that are noted on disk.
const NAME_MAX: usize = 64;

/// A process of a sandbox whose memory is copied.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ExecNote {
    /// The number that it had.
    pub id: u64,
    /// Program and arguments; on disk the program alone, since arguments may be secret.
    pub argv: Vec<String>,
    /// Whether it has a terminal.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub terminal: bool,
    /// Whether its standard input was open.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub stdin: bool,
    /// Its sandbox ends with it.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub ends_sandbox: bool,
    /// Its process id in the sandbox, if that was known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pid: Option<u32>,
}

impl ExecNote {
    fn of(exec: &Exec) -> Self {
        // Somebody who writes to it has it open.
        let is_open = exec.stdin.try_lock().map_or(true, |stdin| stdin.is_some());
        Self {
            id: exec.id,
            argv: exec.argv.clone(),
            terminal: exec.has_terminal,
            stdin: is_open,
            ends_sandbox: exec.ends_sandbox,
            pid: exec.pid(),
        }
    }

    /// What is written to disk.
    pub fn for_disk(mut self) -> Self {
        self.argv.truncate(1);
        for name in &mut self.argv {
            name.truncate(name.floor_char_boundary(NAME_MAX));
        }
        self
    }
}

impl Execs {
    /// Those that have not ended.
    pub fn notes(&self) -> Vec<ExecNote> {
        let known = self.lock();
        let alive = known.execs.values().filter(|exec| !exec.state().is_final());
        alive.map(|exec| ExecNote::of(exec)).collect()
    }

    /// Has the processes of the sandbox that this one is a copy of go on, with new numbers. Nothing
    /// is heard of those that it does not have.
    pub fn go_on_in_copy(
        &self,
        notes: &[ExecNote],
        mut next: impl FnMut() -> u64,
        connector: &Arc<dyn Connector>,
    ) -> Vec<Arc<Exec>> {
        let mut all = Vec::new();
        for note in notes.iter().take(EXECS_MAX) {
            let Ok((sockets, stdin)) = Sockets::new(note.terminal, note.stdin) else {
                // Its streams are at their end, as nobody has them.
                break;
            };
            let exec = Arc::new(Exec::new(next(), note, stdin));
            if self.insert(&exec).is_err() {
                break;
            }
            all.push(exec.clone());
            self.tell(&exec, note.id, sockets, connector);
        }
        // One that takes no message has ended.
        let _ = connector.send_remote(RemoteMessage::execs_go_on(), &[]);
        all
    }

    /// Processes of an instance that an earlier daemon has put to sleep.
    pub fn asleep(notes: &[ExecNote]) -> Self {
        let execs = Self::default();
        for note in notes.iter().take(EXECS_MAX) {
            let exec = Arc::new(Exec::new(note.id, note, None));
            exec.has_input.store(note.stdin, Ordering::Relaxed);
            exec.become_(ExecState::Running { pid: note.pid.unwrap_or_default() });
            execs.lock().execs.insert(note.id, exec);
        }
        let is_shut = execs.shut();
        debug_assert!(is_shut, "nobody has anything of it");
        execs
    }

    /// The instance sleeps: what reached it does not any more.
    pub fn fall_asleep(&self) {
        for exec in self.lock().execs.values() {
            exec.reach_by(None);
            // Nobody writes to one that may sleep.
            if let Ok(mut stdin) = exec.stdin.try_lock() {
                exec.has_input.store(stdin.take().is_some(), Ordering::Relaxed);
            }
        }
    }

    /// The instance lives on under the next daemon: these are to wait for that.
    pub fn wait_for_next(&self, connector: &Arc<dyn Connector>) {
        // One that takes no message has ended.
        let sent = connector.send_remote(RemoteMessage::execs_wait(), &[]);
        self.lock().wait = sent.is_ok();
    }

    /// Waits until they do, or the instance has ended.
    pub async fn wait(&self) {
        loop {
            let waiting = self.waiting.notified();
            tokio::pin!(waiting);
            // What comes from now on is noticed.
            waiting.as_mut().enable();
            let is_awaited = {
                let known = self.lock();
                known.wait && !known.is_closed
            };
            if !is_awaited {
                return;
            }
            waiting.await;
        }
    }

    /// What is left of these: the instance was killed while it woke, and sleeps on. Processes to which
    /// somebody has attached meanwhile have ended for them.
    pub fn asleep_again(self: &Arc<Self>) -> Arc<Self> {
        if self.may_sleep() && self.shut() {
            self.fall_asleep();
            return self.clone();
        }
        self.close();
        Arc::default()
    }

    /// The instance is awake again, and its processes go on by the numbers that they have, if its
    /// kernel can have them go on.
    pub fn wake(&self, connector: &Arc<dyn Connector>, can_go_on: bool) {
        let alive: Vec<_> = {
            let known = self.lock();
            known.execs.values().filter(|exec| !exec.state().is_final()).cloned().collect()
        };
        for exec in alive {
            let is_open = exec.has_input.load(Ordering::Relaxed);
            let sockets = can_go_on.then(|| Sockets::new(exec.has_terminal, is_open));
            match sockets {
                Some(Ok((sockets, stdin))) => {
                    // Nobody can write before the instance is open again.
                    if let Ok(mut own) = exec.stdin.try_lock() {
                        *own = stdin;
                    }
                    self.tell(&exec, exec.id, sockets, connector);
                }
                Some(Err(_)) | None => exec.become_(ExecState::lost()),
            }
        }
        if can_go_on {
            // One that takes no message has ended.
            let _ = connector.send_remote(RemoteMessage::execs_go_on(), &[]);
        }
        self.reopen();
    }

    /// Tells the sandbox which sockets a process has from now on.
    fn tell(
        &self,
        exec: &Arc<Exec>,
        earlier: u64,
        sockets: Sockets,
        connector: &Arc<dyn Connector>,
    ) {
        exec.goes_on.store(true, Ordering::Relaxed);
        exec.reach_by(Some(connector.clone()));
        let message = RemoteMessage::exec_goes_on(earlier, exec.id);
        if connector.send_remote(message, &sockets.lent()).is_err() {
            self.lock().execs.remove(&exec.id);
            return exec.become_(ExecState::lost());
        }
        exec.collect(sockets.ours);
        let exec = exec.clone();
        tokio::spawn(async move {
            let mut state = exec.state.subscribe();
            let answered = state.wait_for(|state| *state != ExecState::Starting);
            if timeout(START_PATIENCE, answered).await.is_err() {
                exec.become_(ExecState::lost());
            }
        });
    }

    /// The sandbox has no such process any more: one that nobody has ever known here is forgotten.
    pub(super) fn is_absent(&self, exec: &Exec) {
        if exec.pid().is_none() {
            self.lock().execs.remove(&exec.id);
        }
        exec.become_(ExecState::lost());
    }
}
