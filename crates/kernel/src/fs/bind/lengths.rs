//! How long files of volumes are, without a question to the host ([`LengthsPage`]).
//!
//! The host says how long a file is that others have open, too. As long as a sandbox alone has it open,
//! its length is *delegated*: the kernel says how long it is, and may write
//! behind its end as far as the host has granted
//! ([decisions/0069](../../../../../docs/decisions/0069-lengths-of-files-are-delegated.md)).

use core::sync::atomic::Ordering::{Acquire, Relaxed, SeqCst};
use core::sync::atomic::{AtomicU64, fence};

use thaw_abi::bind::{
    EndsPage, FileLength, LENGTH_DELEGATED, LENGTH_TOLD, LENGTH_UNKNOWN, VOLUME_LENGTHS,
};
use thaw_abi::layout::LENGTHS_MOUNTS;

use super::Bind;
use crate::errno::{Errno, Result};
use crate::platform::boot_area::{ENDS, LENGTHS, of_process};
use crate::platform::machine::{HostFd, HostFiles, Machine, Memory, PROT_READ, PROT_WRITE};
use crate::state::{self, OfBoot};
use crate::sync::StaticCell;

/// What the host has given for a volume: lengths and ends. `None`: it gives none in this boot.
type Given = Option<[HostFd; 2]>;

/// The same by number of the mount, if the host that serves now was asked.
static GIVEN: StaticCell<[Option<OfBoot<Given>>; LENGTHS_MOUNTS]> =
    StaticCell::new([const { None }; LENGTHS_MOUNTS]);

/// Whether the lengths of a volume's files are told. The host is asked once in a boot.
pub fn are_known(bind: &Bind) -> bool {
    let mount = bind.mount as usize;
    let Some(bit) = 1_u64.checked_shl(bind.mount) else { return false };
    let host = state::kernel().volumes.host();
    if of_process().lengths_of.swap(host, Relaxed) != host {
        of_process().lengths.store(0, Relaxed);
    }
    if of_process().lengths.load(Relaxed) & bit != 0 {
        return true;
    }
    let Some([lengths, ends]) = given(bind) else { return false };
    let mapped = LENGTHS
        .map_to_file(mount, lengths, PROT_READ)
        .and_then(|()| ENDS.map_to_file(mount, ends, PROT_READ | PROT_WRITE));
    if mapped.is_ok() {
        of_process().lengths.fetch_or(bit, Relaxed);
    }
    mapped.is_ok()
}

/// Forgets what a host has given that is gone: nothing is written by its delegations any more. Host
/// processes map what the next one gives when they need it.
pub fn let_go() {
    for place in GIVEN.borrow_mut().iter_mut() {
        let given = place.take().and_then(|given| given.get().copied().flatten());
        given.into_iter().flatten().for_each(Machine::close);
    }
}

fn given(bind: &Bind) -> Given {
    let mount = bind.mount as usize;
    let known = GIVEN.borrow_mut()[mount].as_ref().and_then(|given| given.get().copied());
    known.unwrap_or_else(|| {
        let host = state::kernel().volumes.host();
        let given = ask_for_pages(bind);
        if state::kernel().volumes.host() != host {
            // They may be of two hosts, and the new one was asked when files were taken back.
            given.into_iter().flatten().for_each(Machine::close);
            return None;
        }
        match given {
            // What is late comes the next time.
            Err(Errno::ETIMEDOUT | Errno::EIO) => None,
            given => {
                GIVEN.borrow_mut()[mount] = Some(OfBoot::new(given.ok()));
                given.ok()
            }
        }
    })
}

/// Asks for both pages of a volume.
fn ask_for_pages(bind: &Bind) -> Result<[HostFd; 2]> {
    let ask = |which| bind.ask_for_file(VOLUME_LENGTHS, [which, 0, 0], &[]).map(|(fd, _)| fd);
    let lengths = ask(0)?;
    match ask(1) {
        Ok(ends) => Ok([lengths, ends]),
        Err(error) => {
            Machine::close(lengths);
            Err(error)
        }
    }
}

/// What the host and the kernel tell each other of one open file.
#[derive(Clone, Copy)]
pub struct Known {
    file: &'static FileLength,
    ends: &'static EndsPage,
    end: &'static AtomicU64,
    written: &'static AtomicU64,
}

impl Known {
    /// The file of a volume in this place, from 1 on.
    pub fn new(bind: &Bind, place: u64) -> Option<Self> {
        let index = usize::try_from(place).ok()?.checked_sub(1)?;
        if !are_known(bind) {
            return None;
        }
        let ends = ENDS.cell(bind.mount as usize);
        let file = LENGTHS.cell(bind.mount as usize).files.get(index)?;
        Some(Self { file, ends, end: ends.ends.get(index)?, written: ends.written.get(index)? })
    }

    /// Notes that bytes of the file have changed, for its time.
    pub fn note_written(self) {
        if Machine::load_from_file(self.written) == Ok(0) {
            // Without room for that, the time is the one of an earlier write.
            let _ = Machine::store_in_file(self.written, 1);
        }
    }

    fn state(self) -> u64 {
        self.file.state.load(SeqCst)
    }

    /// Bytes of the file; `None`: the host has to be asked.
    pub fn length(self) -> Option<u64> {
        if self.state() != LENGTH_TOLD {
            return Machine::load_from_file(self.end).ok();
        }
        Some(self.file.length.load(Acquire)).filter(|&length| length != LENGTH_UNKNOWN)
    }

    /// Bytes up to which the file may be written by a delegation; `None`: there is none.
    pub fn granted(self) -> Option<u64> {
        (self.state() == LENGTH_DELEGATED).then(|| self.file.granted.load(Acquire))
    }

    /// Writes by the delegation: `write` gets where the file ends now, and where it may end, and
    /// says where its bytes end, and what else there is to say. It sends the host nothing. `None`:
    /// there is no delegation any more, or no room to say so.
    pub fn write<T>(self, write: impl FnOnce(u64, u64) -> (u64, T)) -> Option<T> {
        Machine::store_in_file(&self.ends.busy, 1).ok()?;
        // The host withdraws it before it looks whether this is busy.
        fence(SeqCst);
        let outcome = self.granted().and_then(|granted| {
            let length = Machine::load_from_file(self.end).ok()?;
            let (end, outcome) = write(length, granted);
            let is_said = end <= length || Machine::store_in_file(self.end, end).is_ok();
            is_said.then_some(outcome)
        });
        fence(SeqCst);
        // It could be stored before.
        let _ = Machine::store_in_file(&self.ends.busy, 0);
        outcome
    }
}
