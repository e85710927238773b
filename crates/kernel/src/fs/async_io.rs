//! Signal-driven I/O (`O_ASYNC`, `F_SETOWN` and `F_SETSIG` in fcntl(2)).

use alloc::sync::Arc;

use super::file::{Events, OpenFile, OpenFlags};
use crate::errno::{Errno, Result};
use crate::sync::Lock;
use crate::task::signal::send_to_group;
use crate::task::signal::{SI_KERNEL, SIGNAL_COUNT, SignalInfo, send_to_process, send_to_thread};
use crate::task::wait::{WaitToken, Waiter};

/// `SIGIO`.
const SIGIO: u32 = 29;

/// Who is told.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Owner {
    /// Nobody.
    Nobody,
    /// A thread (`F_OWNER_TID`).
    Thread(u32),
    /// A process.
    Process(u32),
    /// A process group.
    Group(u32),
}

impl Owner {
    /// From the argument of `F_SETOWN`: negative numbers are groups.
    pub fn from_number(number: i32) -> Result<Self> {
        match number {
            0 => Ok(Self::Nobody),
            i32::MIN => Err(Errno::EINVAL),
            number if number < 0 => Ok(Self::Group(number.unsigned_abs())),
            number => Ok(Self::Process(number as u32)),
        }
    }

    /// What `F_GETOWN` returns.
    pub fn number(self) -> i32 {
        match self {
            Self::Nobody => 0,
            Self::Group(id) => -(id as i32),
            Self::Thread(id) | Self::Process(id) => id as i32,
        }
    }

    /// From `struct f_owner_ex`: `F_OWNER_TID` 0, `F_OWNER_PID` 1, `F_OWNER_PGRP` 2.
    pub fn from_pair([kind, id]: [i32; 2]) -> Result<Self> {
        let id = u32::try_from(id).map_err(|_| Errno::EINVAL)?;
        match kind {
            0..=2 if id == 0 => Ok(Self::Nobody),
            0 => Ok(Self::Thread(id)),
            1 => Ok(Self::Process(id)),
            2 => Ok(Self::Group(id)),
            _ => Err(Errno::EINVAL),
        }
    }

    /// As `struct f_owner_ex`.
    pub fn pair(self) -> [i32; 2] {
        match self {
            Self::Nobody => [1, 0],
            Self::Thread(id) => [0, id as i32],
            Self::Process(id) => [1, id as i32],
            Self::Group(id) => [2, id as i32],
        }
    }

    /// `ESRCH` unless there is such a thread, process or group.
    fn check(self) -> Result<()> {
        let tasks = &crate::state::kernel().tasks;
        let exists = match self {
            Self::Nobody => true,
            Self::Thread(id) => tasks.threads.lock().contains_key(&id),
            Self::Process(id) => tasks.process(id).is_some(),
            Self::Group(id) => !tasks.processes_where(|p| p.process_group() == id).is_empty(),
        };
        if exists { Ok(()) } else { Err(Errno::ESRCH) }
    }
}

/// Hears of a file's changes and tells the owner.
struct Teller {
    state: Lock<(Owner, u32)>,
    /// The descriptor on which telling was turned on.
    fd: Lock<i32>,
}

impl Waiter for Teller {
    fn wake(&self, events: Events) {
        let interesting = Events::IN | Events::OUT | Events::PRI | Events::ERR | Events::HUP;
        if !events.intersects(interesting) {
            return;
        }
        let (owner, signal) = self.state.get();
        let info = match signal {
            0 => SignalInfo::new(SIGIO, SI_KERNEL),
            // POLL_IN, POLL_OUT, POLL_ERR, POLL_HUP: si_band holds the events.
            signal => {
                let code = match events {
                    events if events.contains(Events::HUP) => 6,
                    events if events.contains(Events::ERR) => 4,
                    events if events.contains(Events::IN) => 1,
                    _ => 2,
                };
                let mut info = SignalInfo::new(signal, code);
                info.payload[0] = events.bits().into();
                info.payload[1] = self.fd.get() as u32 as u64;
                info
            }
        };
        let tasks = &crate::state::kernel().tasks;
        match owner {
            Owner::Nobody => {}
            Owner::Thread(id) => {
                let thread = tasks.threads.lock().get(&id).cloned();
                if let Some(thread) = thread {
                    send_to_thread(&thread, info);
                }
            }
            Owner::Process(id) => {
                if let Some(process) = tasks.process(id) {
                    send_to_process(&process, info);
                }
            }
            Owner::Group(id) => drop(send_to_group(id, info)),
        }
    }
}

/// What an open file description knows of this.
#[derive(Default)]
pub struct AsyncIo {
    teller: Lock<Option<Arc<Teller>>>,
    registered: Lock<Option<WaitToken>>,
}

impl AsyncIo {
    fn get(&self) -> (Owner, u32) {
        self.teller.lock().as_ref().map_or((Owner::Nobody, 0), |teller| teller.state.get())
    }

    fn set(&self, owner: Owner, signal: u32) {
        let mut teller = self.teller.lock();
        match &*teller {
            Some(teller) => teller.state.set((owner, signal)),
            None => {
                let (state, fd) = (Lock::new((owner, signal)), Lock::new(-1));
                *teller = Some(Arc::new(Teller { state, fd }));
            }
        }
    }
}

impl OpenFile {
    /// Who is told of changes.
    pub fn async_owner(&self) -> Owner {
        self.async_io.get().0
    }

    /// Says who is told of changes. `ESRCH` if there is no such thing.
    pub fn set_async_owner(&self, owner: Owner) -> Result<()> {
        owner.check()?;
        self.async_io.set(owner, self.async_io.get().1);
        Ok(())
    }

    /// The signal that tells; 0 is `SIGIO` without details.
    pub fn async_signal(&self) -> u32 {
        self.async_io.get().1
    }

    /// Chooses the signal.
    pub fn set_async_signal(&self, signal: u64) -> Result<()> {
        let signal = u32::try_from(signal).ok().filter(|signal| *signal <= SIGNAL_COUNT);
        self.async_io.set(self.async_io.get().0, signal.ok_or(Errno::EINVAL)?);
        Ok(())
    }

    /// The status flags have changed by way of `fd`: begins or ends telling.
    pub fn note_async_flag(&self, fd: i32) {
        let Some(queue) = self.file.wait_queue() else { return };
        let wanted = self.flags().contains(OpenFlags::ASYNC);
        let token = self.async_io.registered.lock().take();
        match (token, wanted) {
            (Some(token), true) => self.async_io.registered.set(Some(token)),
            (Some(token), false) => queue.unregister(token),
            (None, false) => {}
            (None, true) => {
                let (owner, signal) = self.async_io.get();
                self.async_io.set(owner, signal);
                let teller = self.async_io.teller.lock().clone();
                if let Some(teller) = teller {
                    teller.fd.set(fd);
                    self.async_io.registered.set(Some(queue.register(teller)));
                }
            }
        }
    }

    /// The description is about to go.
    pub(super) fn end_async(&self) {
        let token = self.async_io.registered.lock().take();
        if let (Some(token), Some(queue)) = (token, self.file.wait_queue()) {
            queue.unregister(token);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn owners_have_two_forms() {
        for owner in [Owner::Nobody, Owner::Process(7), Owner::Group(9)] {
            assert_eq!(Owner::from_number(owner.number()), Ok(owner));
            assert_eq!(Owner::from_pair(owner.pair()), Ok(owner));
        }
        assert_eq!(Owner::from_pair([0, 5]), Ok(Owner::Thread(5)));
        assert_eq!(Owner::from_pair([3, 5]), Err(Errno::EINVAL));
        assert_eq!(Owner::from_number(i32::MIN), Err(Errno::EINVAL));
    }
}
