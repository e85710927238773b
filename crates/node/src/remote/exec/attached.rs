//! Those who tell a process something. As long as one of them is there, the instance does not sleep, with
//! which what they say would be lost.

use super::streams::Input;
use super::{Exec, window};
use std::ops::Deref;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;
use thaw_sandbox::{RemoteMessage, SignalTo};
use tokio::io::AsyncWriteExt;

/// How long a terminal's hang-up waits for those who type.
const HANG_UP_PATIENCE: Duration = Duration::from_secs(5);
/// SIGHUP (signal(7)).
const HANGUP: u32 = 1;

/// Somebody who is attached to a process.
pub struct Attached(Arc<Exec>);

impl Attached {
    /// Attaches to a process of an instance that does not sleep.
    pub(super) fn to(exec: Arc<Exec>) -> Self {
        exec.attached.fetch_add(1, Ordering::Relaxed);
        exec.was_attached.store(true, Ordering::Relaxed);
        Self(exec)
    }

    /// Passes bytes to its standard input, or its terminal; nothing closes standard input. What
    /// comes after that is dropped, as is what it does not read once it has ended.
    pub async fn write(&self, bytes: &[u8]) {
        let mut stdin = self.stdin.lock().await;
        let Input::Open(open) = &mut *stdin else { return };
        if bytes.is_empty() {
            // A terminal has no end of its own: a program sees the character for it.
            if !self.has_terminal {
                stdin.end().await;
            }
            return;
        }
        let is_broken = tokio::select! {
            written = open.write_all(bytes) => written.is_err(),
            _ = self.ended() => true,
        };
        if is_broken {
            *stdin = Input::None;
        }
    }

    /// Hangs up its terminal, as the end of a connection does with a real one: its session hears
    /// SIGHUP, and whoever reads the terminal gets its end. A signal alone would be lost on a
    /// program that waits for a line already.
    pub async fn hang_up(&self) {
        let close = async { self.stdin.lock().await.end().await };
        tokio::select! {
            () = close => {}
            _ = self.ended() => {}
            // Somebody else types what it does not read.
            () = tokio::time::sleep(HANG_UP_PATIENCE) => drop(self.signal(HANGUP, SignalTo::Group)),
        }
    }

    /// Sends it a signal.
    ///
    /// # Errors
    /// One sentence.
    pub fn signal(&self, number: u32, to: SignalTo) -> Result<(), String> {
        if !(1..=64).contains(&number) {
            return Err(format!("{number} is no signal; give 1 to 64"));
        }
        self.send(RemoteMessage::signal(self.id, number, to))
    }

    /// Its terminal has another size.
    pub fn resize(&self, size: (u16, u16)) {
        // One that has ended needs none.
        let _ = self.send(RemoteMessage::window(self.id, window(size)));
    }
}

impl Clone for Attached {
    fn clone(&self) -> Self {
        Self::to(self.0.clone())
    }
}

impl Deref for Attached {
    type Target = Arc<Exec>;

    fn deref(&self) -> &Arc<Exec> {
        &self.0
    }
}

impl Drop for Attached {
    fn drop(&mut self) {
        self.0.attached.fetch_sub(1, Ordering::Relaxed);
    }
}
