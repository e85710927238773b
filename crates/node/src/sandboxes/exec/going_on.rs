//! Processes that go on in a copy of their sandbox, or when it wakes from its sleep: with other
//! sockets in place of those that they had.

use super::{Exec, ExecState, Execs, START_PATIENCE, Sockets};
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
            let exec = Arc::new(Exec::new(next(), note, stdin, connector.clone()));
            exec.goes_on.store(true, Ordering::Relaxed);
            if self.insert(&exec).is_err() {
                break;
            }
            all.push(exec.clone());
            self.tell(&exec, note.id, sockets, &**connector);
        }
        // One that takes no message has ended.
        let _ = connector.send_remote(RemoteMessage::execs_go_on(), &[]);
        all
    }

    /// Tells the sandbox which sockets a process has from now on.
    fn tell(&self, exec: &Arc<Exec>, earlier: u64, sockets: Sockets, connector: &dyn Connector) {
        let message = RemoteMessage::exec_goes_on(earlier, exec.id);
        if connector.send_remote(message, &sockets.lent()).is_err() {
            self.lock().execs.remove(&exec.id);
            return exec.become_(ExecState::lost());
        }
        tokio::spawn(exec.clone().collect(sockets.ours));
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
