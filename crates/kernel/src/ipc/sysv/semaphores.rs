//! Sets of semaphores (semop(2)).

use alloc::collections::{BTreeMap, VecDeque};
use alloc::sync::Arc;
use alloc::vec::Vec;

use bytemuck::{Pod, Zeroable};

use super::permissions::Permissions;
use super::registry::Object;
use super::{IPC_NOWAIT, now_s};
use crate::errno::{Errno, Result};
use crate::fs::file::Events;
use crate::sync::KernelCell;
use crate::task::ids::Pid;
use crate::task::wait::WaitQueue;

/// Largest value of a semaphore (`SEMVMX`).
pub const VALUE_MAX: i32 = 32767;
/// An operation that is undone when the process ends.
const SEM_UNDO: u32 = 0x1000;

/// `struct sembuf` (semop(2)).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct Operation {
    /// Which semaphore of the set.
    pub number: u16,
    /// What is added; 0 waits for the value to be 0.
    pub amount: i16,
    /// `IPC_NOWAIT`, `SEM_UNDO`.
    pub flags: u16,
}

impl Operation {
    /// Whether it counts when the process ends.
    pub fn has_undo(&self) -> bool {
        u32::from(self.flags) & SEM_UNDO != 0
    }
}

/// A semaphore.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Semaphore {
    /// Its value, 0 to [`VALUE_MAX`].
    pub value: i32,
    /// The process that has changed it last.
    pub last_pid: u32,
}

/// Operations that wait.
pub struct Pending {
    operations: Vec<Operation>,
    pid: Pid,
    blocked_by: KernelCell<Operation>,
    outcome: KernelCell<Option<Result<()>>>,
    /// Where their thread waits.
    pub queue: WaitQueue,
}

impl Pending {
    /// How they have ended.
    pub fn outcome(&self) -> Option<Result<()>> {
        self.outcome.get()
    }

    fn alters(&self) -> bool {
        self.operations.iter().any(|operation| operation.amount != 0)
    }
}

/// What has become of operations.
pub enum Attempt {
    /// They are done, or never will be.
    Ended(Result<()>),
    /// They wait.
    Waits(Arc<Pending>),
}

/// Why operations cannot be done now.
enum Obstacle {
    Wait(Operation),
    Error(Errno),
}

/// A set of semaphores.
pub struct SemaphoreSet {
    permissions: KernelCell<Permissions>,
    state: KernelCell<State>,
}

/// What changes.
pub struct State {
    /// The semaphores.
    pub semaphores: Vec<Semaphore>,
    /// When operations were done last, in seconds since the epoch.
    pub operated_s: i64,
    /// When it was made or changed by semctl(2).
    pub changed_s: i64,
    /// What is added to the semaphores when a process ends, by process.
    undo: BTreeMap<Pid, Vec<i16>>,
    pending: VecDeque<Arc<Pending>>,
    is_removed: bool,
}

impl Object for SemaphoreSet {
    fn permissions(&self) -> &KernelCell<Permissions> {
        &self.permissions
    }
}

impl State {
    /// Does all operations or none.
    fn perform(
        &mut self,
        operations: &[Operation],
        pid: Pid,
    ) -> core::result::Result<(), Obstacle> {
        for (index, operation) in operations.iter().enumerate() {
            if let Err(obstacle) = self.step(operation, pid) {
                operations[..index].iter().for_each(|done| self.step_back(done, pid));
                return Err(obstacle);
            }
        }
        for operation in operations {
            self.semaphores[usize::from(operation.number)].last_pid = pid.number();
        }
        self.operated_s = now_s();
        Ok(())
    }

    fn step(&mut self, operation: &Operation, pid: Pid) -> core::result::Result<(), Obstacle> {
        let count = self.semaphores.len();
        let semaphore = &mut self.semaphores[usize::from(operation.number)];
        let value = semaphore.value + i32::from(operation.amount);
        if value < 0 || operation.amount == 0 && semaphore.value != 0 {
            return Err(Obstacle::Wait(*operation));
        }
        if value > VALUE_MAX {
            return Err(Obstacle::Error(Errno::ERANGE));
        }
        if operation.has_undo() {
            let undo = self.undo.entry(pid).or_insert_with(|| alloc::vec![0; count]);
            let entry = &mut undo[usize::from(operation.number)];
            *entry = entry.checked_sub(operation.amount).ok_or(Obstacle::Error(Errno::ERANGE))?;
        }
        semaphore.value = value;
        Ok(())
    }

    fn step_back(&mut self, operation: &Operation, pid: Pid) {
        let number = usize::from(operation.number);
        self.semaphores[number].value -= i32::from(operation.amount);
        if operation.has_undo()
            && let Some(undo) = self.undo.get_mut(&pid)
        {
            undo[number] = undo[number].wrapping_add(operation.amount);
        }
    }

    /// Does what has become possible, those that wait for zeros first, then in the
    /// order of arrival; returns whom to wake.
    fn update(&mut self) -> Vec<Arc<Pending>> {
        let mut ended = Vec::new();
        while let Some(index) = self.next_possible() {
            ended.extend(self.pending.remove(index));
        }
        ended
    }

    fn next_possible(&mut self) -> Option<usize> {
        for alters in [false, true] {
            for index in 0..self.pending.len() {
                let pending = self.pending[index].clone();
                if pending.alters() == alters && self.attempt(&pending) {
                    return Some(index);
                }
            }
        }
        None
    }

    /// Whether pending operations have ended now.
    fn attempt(&mut self, pending: &Pending) -> bool {
        let outcome = match self.perform(&pending.operations, pending.pid) {
            Ok(()) => Ok(()),
            Err(Obstacle::Error(error)) => Err(error),
            Err(Obstacle::Wait(operation)) => match would_wait(&operation) {
                Some(error) => Err(error),
                None => {
                    pending.blocked_by.set(operation);
                    return false;
                }
            },
        };
        pending.outcome.set(Some(outcome));
        true
    }
}

/// The error of an operation that must not wait.
fn would_wait(operation: &Operation) -> Option<Errno> {
    (u32::from(operation.flags) & IPC_NOWAIT != 0).then_some(Errno::EAGAIN)
}

fn wake(ended: Vec<Arc<Pending>>) {
    for pending in ended {
        pending.queue.wake_all(Events::IN);
    }
}

impl SemaphoreSet {
    /// A set of `count` semaphores, all 0.
    pub fn new(permissions: Permissions, count: usize) -> Self {
        let state = State {
            semaphores: alloc::vec![Semaphore::default(); count],
            operated_s: 0,
            changed_s: now_s(),
            undo: BTreeMap::new(),
            pending: VecDeque::new(),
            is_removed: false,
        };
        Self { permissions: KernelCell::new(permissions), state: KernelCell::new(state) }
    }

    /// Number of semaphores.
    pub fn len(&self) -> usize {
        self.state.borrow_mut().semaphores.len()
    }

    /// Never: there are no sets without semaphores.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Looks at the state.
    pub fn look<R>(&self, look: impl FnOnce(&State) -> R) -> R {
        look(&self.state.borrow_mut())
    }

    /// semop(2): the semaphores that `operations` name exist.
    pub fn operate(&self, operations: Vec<Operation>, pid: Pid) -> Attempt {
        let mut state = self.state.borrow_mut();
        if state.is_removed {
            return Attempt::Ended(Err(Errno::EIDRM));
        }
        match state.perform(&operations, pid) {
            Ok(()) => {
                let ended = state.update();
                drop(state);
                wake(ended);
                Attempt::Ended(Ok(()))
            }
            Err(Obstacle::Error(error)) => Attempt::Ended(Err(error)),
            Err(Obstacle::Wait(operation)) => {
                if let Some(error) = would_wait(&operation) {
                    return Attempt::Ended(Err(error));
                }
                let pending = Arc::new(Pending {
                    operations,
                    pid,
                    blocked_by: KernelCell::new(operation),
                    outcome: KernelCell::new(None),
                    queue: WaitQueue::new(),
                });
                state.pending.push_back(pending.clone());
                Attempt::Waits(pending)
            }
        }
    }

    /// Takes operations back that have not been done.
    pub fn give_up(&self, pending: &Arc<Pending>) {
        self.state.borrow_mut().pending.retain(|other| !Arc::ptr_eq(other, pending));
    }

    /// Number of threads that wait for a semaphore to grow, or to be 0.
    pub fn waiting(&self, number: u16, for_zero: bool) -> usize {
        let state = self.state.borrow_mut();
        let blocking = state.pending.iter().map(|pending| pending.blocked_by.get());
        blocking
            .filter(|operation| operation.number == number && (operation.amount == 0) == for_zero)
            .count()
    }

    /// `SETVAL` and `SETALL`: sets values from semaphore `first` on; what processes
    /// would undo of them is forgotten.
    pub fn set(&self, first: usize, values: &[u16], pid: Pid) {
        let ended = {
            let mut state = self.state.borrow_mut();
            for (number, &value) in (first..).zip(values) {
                state.semaphores[number] =
                    Semaphore { value: value.into(), last_pid: pid.number() };
                state.undo.values_mut().for_each(|undo| undo[number] = 0);
            }
            state.changed_s = now_s();
            state.update()
        };
        wake(ended);
    }

    /// `IPC_SET`: notes the change.
    pub fn changed(&self) {
        self.state.borrow_mut().changed_s = now_s();
    }

    /// `IPC_RMID`: those who wait hear of it.
    pub fn removed(&self) {
        let pending = {
            let mut state = self.state.borrow_mut();
            state.is_removed = true;
            core::mem::take(&mut state.pending)
        };
        for pending in pending {
            pending.outcome.set(Some(Err(Errno::EIDRM)));
            pending.queue.wake_all(Events::IN);
        }
    }

    /// Undoes what a process has done with `SEM_UNDO` (exit_sem of Linux).
    pub fn undo(&self, pid: Pid) {
        let ended = {
            let mut state = self.state.borrow_mut();
            let Some(undo) = state.undo.remove(&pid) else { return };
            for (semaphore, amount) in state.semaphores.iter_mut().zip(undo) {
                if amount != 0 {
                    let value = (semaphore.value + i32::from(amount)).clamp(0, VALUE_MAX);
                    *semaphore = Semaphore { value, last_pid: pid.number() };
                }
            }
            state.operated_s = now_s();
            state.update()
        };
        wake(ended);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::Sandbox;

    fn operation(number: u16, amount: i16, flags: u32) -> Operation {
        Operation { number, amount, flags: flags as u16 }
    }

    fn ended(attempt: Attempt) -> Result<()> {
        match attempt {
            Attempt::Ended(outcome) => outcome,
            Attempt::Waits(_) => panic!("waits"),
        }
    }

    fn values(set: &SemaphoreSet) -> Vec<i32> {
        set.look(|state| state.semaphores.iter().map(|semaphore| semaphore.value).collect())
    }

    #[test]
    fn all_operations_are_done_or_none() {
        let _sandbox = Sandbox::new();
        let set = SemaphoreSet::new(Permissions::default(), 2);
        let both = vec![operation(0, 2, 0), operation(1, -1, IPC_NOWAIT)];
        assert_eq!(ended(set.operate(both, Pid::new(7))), Err(Errno::EAGAIN));
        assert_eq!(values(&set), [0, 0]);
        let over = vec![operation(0, 1, 0), operation(0, i16::MAX, 0)];
        assert_eq!(ended(set.operate(over, Pid::new(7))), Err(Errno::ERANGE));
        assert_eq!(values(&set), [0, 0]);
        assert_eq!(
            ended(set.operate(vec![operation(0, 2, 0), operation(0, -1, 0)], Pid::new(7))),
            Ok(())
        );
        assert_eq!(values(&set), [1, 0]);
    }

    #[test]
    fn who_waits_is_served_by_who_makes_it_possible() {
        let _sandbox = Sandbox::new();
        let set = SemaphoreSet::new(Permissions::default(), 1);
        let Attempt::Waits(first) = set.operate(vec![operation(0, -2, 0)], Pid::new(1)) else {
            panic!()
        };
        let Attempt::Waits(second) = set.operate(vec![operation(0, -1, 0)], Pid::new(2)) else {
            panic!()
        };
        assert_eq!((set.waiting(0, false), set.waiting(0, true)), (2, 0));
        assert_eq!(ended(set.operate(vec![operation(0, 1, 0)], Pid::new(3))), Ok(()));
        assert_eq!((first.outcome(), second.outcome()), (None, Some(Ok(()))));
        assert_eq!(ended(set.operate(vec![operation(0, 3, 0)], Pid::new(3))), Ok(()));
        assert_eq!(first.outcome(), Some(Ok(())));
        let Attempt::Waits(zero) = set.operate(vec![operation(0, 0, 0)], Pid::new(4)) else {
            panic!()
        };
        assert_eq!((set.waiting(0, false), set.waiting(0, true)), (0, 1));
        set.removed();
        assert_eq!(zero.outcome(), Some(Err(Errno::EIDRM)));
    }

    #[test]
    fn what_a_process_has_done_is_undone() {
        let _sandbox = Sandbox::new();
        let set = SemaphoreSet::new(Permissions::default(), 2);
        assert_eq!(ended(set.operate(vec![operation(0, 5, SEM_UNDO)], Pid::new(1))), Ok(()));
        assert_eq!(ended(set.operate(vec![operation(0, -2, SEM_UNDO)], Pid::new(2))), Ok(()));
        set.undo(Pid::new(2));
        assert_eq!(values(&set), [5, 0]);
        assert_eq!(ended(set.operate(vec![operation(0, -4, 0)], Pid::new(3))), Ok(()));
        set.undo(Pid::new(1));
        assert_eq!(values(&set), [0, 0], "not below zero");
        assert_eq!(ended(set.operate(vec![operation(1, 5, SEM_UNDO)], Pid::new(1))), Ok(()));
        set.set(1, &[9], Pid::new(4));
        set.undo(Pid::new(1));
        assert_eq!(values(&set), [0, 9], "set values are not undone");
    }
}
