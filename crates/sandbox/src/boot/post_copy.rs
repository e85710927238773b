//! Thawing an image that is still being written (post-copy, as live migration has it).

use std::io::{self, PipeWriter, Write};
use std::os::fd::OwnedFd;
use std::sync::{Mutex, MutexGuard};

/// Whether all memory of an image is there, as sandboxes hear of it that were thawed before. If this
/// is dropped before, they end.
#[derive(Debug)]
pub struct PostCopy {
    state: Mutex<State>,
}

#[derive(Debug)]
enum State {
    /// It is being written; those who wait for it.
    Coming(Vec<PipeWriter>),
    There,
    Failed,
}

impl PostCopy {
    /// That of an image of which the memory of the first address space is there.
    #[expect(clippy::new_without_default, reason = "it says that something is there")]
    pub fn new() -> Self {
        Self { state: Mutex::new(State::Coming(Vec::new())) }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("no holder panics")
    }

    /// All memory is there. Whoever has waited goes on.
    pub fn complete(&self) {
        if let State::Coming(waiting) = std::mem::replace(&mut *self.state(), State::There) {
            for mut sandbox in waiting {
                // One that has ended does not wait any more.
                let _ = sandbox.write_all(&[1]);
            }
        }
    }

    /// The rest of the memory does not come. Whoever waits ends, and nobody is thawed any more.
    pub fn fail(&self) {
        let mut state = self.state();
        if matches!(*state, State::Coming(_)) {
            *state = State::Failed;
        }
    }

    /// What the next sandbox waits at; `None`: all memory is there.
    ///
    /// # Errors
    /// The rest does not come, or the limit of open files is reached.
    pub(super) fn gate(&self) -> io::Result<Option<OwnedFd>> {
        match &mut *self.state() {
            State::There => Ok(None),
            State::Failed => Err(io::Error::other("its memory could not be copied")),
            State::Coming(waiting) => {
                let (gate, opener) = io::pipe()?;
                waiting.push(opener);
                Ok(Some(gate.into()))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::File;
    use std::io::Read;

    /// What a sandbox finds at its gate when the host has closed its end.
    fn found(gate: OwnedFd) -> Vec<u8> {
        let mut bytes = Vec::new();
        File::from(gate).read_to_end(&mut bytes).unwrap();
        bytes
    }

    #[test]
    fn each_sandbox_has_a_gate_of_its_own_until_all_is_there() {
        let post_copy = PostCopy::new();
        let [first, second] = [(); 2].map(|()| post_copy.gate().unwrap().unwrap());
        post_copy.complete();
        // Whoever takes the byte of one takes nothing from the other.
        assert_eq!((found(first), found(second)), (vec![1], vec![1]));
        assert!(post_copy.gate().unwrap().is_none());
        post_copy.fail();
        assert!(post_copy.gate().unwrap().is_none(), "what is there stays");
    }

    #[test]
    fn gates_stay_shut_if_the_rest_does_not_come() {
        let post_copy = PostCopy::new();
        let gate = post_copy.gate().unwrap().unwrap();
        post_copy.fail();
        assert!(found(gate).is_empty());
        assert!(post_copy.gate().is_err());
        let gate = {
            let dropped = PostCopy::new();
            dropped.gate().unwrap().unwrap()
        };
        assert!(found(gate).is_empty());
    }
}
