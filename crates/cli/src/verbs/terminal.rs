//! The user's terminal, which a program in a sandbox may switch to other modes.

use rustix::termios::isatty;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use thaw_abi::control::TerminalMode;
use thaw_sandbox::{set_terminal_mode, terminal_mode};

/// Puts the modes of a terminal back when dropped.
pub struct Restore {
    saved: Option<Arc<(OwnedFd, TerminalMode)>>,
}

/// Remembers the modes of the first of `stdio` that is a terminal, to put them
/// back at the end, even if this program ends by a panic.
pub fn restore_at_the_end(stdio: [BorrowedFd<'_>; 3]) -> io::Result<Restore> {
    let Some(terminal) = stdio.into_iter().find(|stream| isatty(stream)) else {
        return Ok(Restore { saved: None });
    };
    let saved = Arc::new((terminal.try_clone_to_owned()?, terminal_mode(terminal)?));
    let at_panic = saved.clone();
    let report = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |info| {
        put_back(&at_panic);
        report(info);
    }));
    Ok(Restore { saved: Some(saved) })
}

/// A terminal that is gone needs no modes, so errors do not matter.
fn put_back((terminal, modes): &(OwnedFd, TerminalMode)) {
    let terminal = terminal.as_fd();
    if terminal_mode(terminal).is_ok_and(|now| now != *modes) {
        let _ = set_terminal_mode(terminal, modes);
    }
}

impl Drop for Restore {
    fn drop(&mut self) {
        if let Some(saved) = &self.saved {
            put_back(saved);
        }
    }
}
