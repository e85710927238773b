//! Signals about files: signal-driven I/O (`O_ASYNC`, `F_SETOWN` and `F_SETSIG`
//! in fcntl(2)), and `SIGURG` (socket(7)), for which an owner is enough.

use alloc::sync::Arc;

use super::file::{Events, OpenFile, OpenFlags};
use crate::errno::{Errno, Result};
use crate::sync::KernelCell;
use crate::task::ids::{Pgid, Pid, Tid};
use crate::task::signal::{
    SI_KERNEL, SIGIO, SIGURG, Signal, SignalInfo, send_to_group, send_to_process, send_to_thread,
};
use crate::task::wait::{WaitToken, Waiter};

/// Who is told.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Owner {
    /// Nobody.
    Nobody,
    /// A thread (`F_OWNER_TID`).
    Thread(Tid),
    /// A process.
    Process(Pid),
    /// A process group.
    Group(Pgid),
}

impl Owner {
    /// From the argument of `F_SETOWN`: negative numbers are groups.
    pub fn from_number(number: i32) -> Result<Self> {
        match number {
            0 => Ok(Self::Nobody),
            i32::MIN => Err(Errno::EINVAL),
            number if number < 0 => Ok(Self::Group(Pgid::from_caller(number.unsigned_abs()))),
            number => Ok(Self::Process(Pid::from_caller(number as u32))),
        }
    }

    /// What `F_GETOWN` returns.
    pub fn number(self) -> i32 {
        match self.pair() {
            [2, id] => -id,
            [_, id] => id,
        }
    }

    /// From `struct f_owner_ex`: `F_OWNER_TID` 0, `F_OWNER_PID` 1, `F_OWNER_PGRP` 2.
    pub fn from_pair([kind, id]: [i32; 2]) -> Result<Self> {
        let id = u32::try_from(id).map_err(|_| Errno::EINVAL)?;
        match kind {
            0..=2 if id == 0 => Ok(Self::Nobody),
            0 => Ok(Self::Thread(Tid::from_caller(id))),
            1 => Ok(Self::Process(Pid::from_caller(id))),
            2 => Ok(Self::Group(Pgid::from_caller(id))),
            _ => Err(Errno::EINVAL),
        }
    }

    /// As `struct f_owner_ex`.
    pub fn pair(self) -> [i32; 2] {
        match self {
            Self::Nobody => [1, 0],
            Self::Thread(id) => [0, id.for_caller() as i32],
            Self::Process(id) => [1, id.for_caller() as i32],
            Self::Group(id) => [2, id.for_caller() as i32],
        }
    }

    /// `ESRCH` unless there is such a thread, process or group.
    fn check(self) -> Result<()> {
        let tasks = &crate::state::kernel().tasks;
        let exists = match self {
            Self::Nobody => true,
            Self::Thread(id) => tasks.threads.borrow_mut().contains_key(&id),
            Self::Process(id) => tasks.process(id).is_some(),
            Self::Group(id) => !tasks.processes_where(|p| p.process_group() == id).is_empty(),
        };
        if exists { Ok(()) } else { Err(Errno::ESRCH) }
    }

    fn tell(self, info: SignalInfo) {
        let tasks = &crate::state::kernel().tasks;
        match self {
            Self::Nobody => {}
            Self::Thread(id) => {
                let thread = tasks.threads.borrow_mut().get(&id).cloned();
                if let Some(thread) = thread {
                    send_to_thread(&thread, info);
                }
            }
            Self::Process(id) => {
                if let Some(process) = tasks.process(id) {
                    send_to_process(&process, info);
                }
            }
            Self::Group(id) => drop(send_to_group(id, info)),
        }
    }
}

/// Hears of a file's changes and tells the owner.
struct Teller {
    state: KernelCell<(Owner, Option<Signal>)>,
    /// Whether `O_ASYNC` is on.
    tells_all: KernelCell<bool>,
    /// The descriptor on which telling was turned on.
    fd: KernelCell<i32>,
}

impl Waiter for Teller {
    fn wake(&self, events: Events) {
        let (owner, signal) = self.state.get();
        if events.contains(Events::PRI) {
            owner.tell(SignalInfo::new(SIGURG, SI_KERNEL));
        }
        let interesting = Events::IN | Events::OUT | Events::PRI | Events::ERR | Events::HUP;
        if !self.tells_all.get() || !events.intersects(interesting) {
            return;
        }
        let info = match signal {
            None => SignalInfo::new(SIGIO, SI_KERNEL),
            // POLL_IN, POLL_OUT, POLL_ERR, POLL_HUP: si_band holds the events.
            Some(signal) => {
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
        owner.tell(info);
    }
}

/// What an open file description knows of this.
#[derive(Default)]
pub struct AsyncIo {
    teller: KernelCell<Option<Arc<Teller>>>,
    registered: KernelCell<Option<WaitToken>>,
}

impl AsyncIo {
    fn get(&self) -> (Owner, Option<Signal>) {
        self.teller.borrow_mut().as_ref().map_or((Owner::Nobody, None), |teller| teller.state.get())
    }

    fn set(&self, owner: Owner, signal: Option<Signal>) -> Arc<Teller> {
        let mut teller = self.teller.borrow_mut();
        let teller = teller.get_or_insert_with(|| {
            Arc::new(Teller {
                state: KernelCell::new((owner, signal)),
                tells_all: KernelCell::new(false),
                fd: KernelCell::new(-1),
            })
        });
        teller.state.set((owner, signal));
        teller.clone()
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
        let teller = self.async_io.set(owner, self.async_io.get().1);
        self.register(teller);
        Ok(())
    }

    /// The signal that tells; none is `SIGIO` without details.
    pub fn async_signal(&self) -> Option<Signal> {
        self.async_io.get().1
    }

    /// Chooses the signal.
    pub fn set_async_signal(&self, signal: Option<Signal>) {
        self.async_io.set(self.async_io.get().0, signal);
    }

    /// The status flags have changed by way of `fd`: begins or ends telling.
    pub fn note_async_flag(&self, fd: i32) {
        let wanted = self.flags().contains(OpenFlags::ASYNC);
        if !wanted && self.async_io.teller.borrow_mut().is_none() {
            return;
        }
        let (owner, signal) = self.async_io.get();
        let teller = self.async_io.set(owner, signal);
        if wanted && !teller.tells_all.get() {
            teller.fd.set(fd);
        }
        teller.tells_all.set(wanted);
        self.register(teller);
    }

    fn register(&self, teller: Arc<Teller>) {
        if !self.file.tells_async() {
            return;
        }
        let mut registered = self.async_io.registered.borrow_mut();
        if let (None, Some(queue)) = (*registered, self.file.wait_queue()) {
            *registered = Some(queue.register(teller));
        }
    }

    /// The description is about to go.
    pub(super) fn end_async(&self) {
        let token = self.async_io.registered.borrow_mut().take();
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
        let _sandbox = crate::testing::Sandbox::new();
        for owner in [Owner::Nobody, Owner::Process(Pid::new(7)), Owner::Group(Pgid::new(9))] {
            assert_eq!(Owner::from_number(owner.number()), Ok(owner));
            assert_eq!(Owner::from_pair(owner.pair()), Ok(owner));
        }
        assert_eq!(Owner::from_pair([0, 5]), Ok(Owner::Thread(Tid::new(5))));
        assert_eq!(Owner::from_pair([3, 5]), Err(Errno::EINVAL));
        assert_eq!(Owner::from_number(i32::MIN), Err(Errno::EINVAL));
    }
}
