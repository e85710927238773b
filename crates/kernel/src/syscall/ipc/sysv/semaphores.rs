//! System calls on System V semaphores.

use bytemuck::{Pod, Zeroable};

use crate::args::{Mode, UserPtr};
use crate::errno::{Errno, Result};
use crate::ipc::namespace::{left_of, own};
use crate::ipc::sysv::permissions::{Caller, READ, UserPermissions, WRITE};
use crate::ipc::sysv::registry::{Object, place_of};
use crate::ipc::sysv::semaphores::{Attempt, Operation, SemaphoreSet, VALUE_MAX};
use crate::ipc::sysv::{IPC_INFO, IPC_RMID, IPC_SET, IPC_STAT, SystemV};
use crate::platform::user::UserAddress;
use crate::task::current_process;
use crate::task::ids::Pid;
use crate::task::wait::wait_until;
use crate::time::{Timeout, Timespec};

/// Most semaphores in a set (`SEMMSL`) and sets (`SEMMNI`).
const SET_MAX: i32 = 32000;
/// Most semaphores in all sets (`SEMMNS`).
const ALL_MAX: usize = 1_024_000;
/// Most operations in one call (`SEMOPM`).
const OPERATIONS_MAX: usize = 500;

const GETPID: u32 = 11;
const GETVAL: u32 = 12;
const GETALL: u32 = 13;
const GETNCNT: u32 = 14;
const GETZCNT: u32 = 15;
const SETVAL: u32 = 16;
const SETALL: u32 = 17;
const SEM_STAT: u32 = 18;
const SEM_INFO: u32 = 19;
const SEM_STAT_ANY: u32 = 20;

fn caller() -> Caller {
    Caller::current()
}

/// Number of semaphores in all sets.
fn in_use() -> usize {
    in_sets(&own().system_v)
}

fn in_sets(system_v: &SystemV) -> usize {
    system_v.semaphores.all().iter().map(|(_, set)| set.len()).sum()
}

/// semget(2).
pub fn semget(key: i32, count: i32, Mode(flags): Mode) -> Result<i32> {
    if !(0..=SET_MAX).contains(&count) {
        return Err(Errno::EINVAL);
    }
    let count = count as usize;
    let fits = |set: &SemaphoreSet| if count > set.len() { Err(Errno::EINVAL) } else { Ok(()) };
    let id = own().system_v.semaphores.get(
        (key, flags),
        &caller(),
        left_of(SET_MAX as usize, |it| it.semaphores.count()),
        fits,
        |permissions| {
            if count == 0 {
                return Err(Errno::EINVAL);
            }
            if in_use() + count > left_of(ALL_MAX, in_sets) {
                return Err(Errno::ENOSPC);
            }
            Ok(SemaphoreSet::new(permissions, count))
        },
    )?;
    Ok(id)
}

/// semop(2).
pub fn semop(id: i32, operations: UserPtr<Operation>, count: u32) -> Result<()> {
    operate(id, operations, count, Timeout::Never)
}

/// semtimedop(2).
pub fn semtimedop(
    id: i32,
    operations: UserPtr<Operation>,
    count: u32,
    timeout: UserPtr<Timespec>,
) -> Result<()> {
    // The time is looked at after the operations, but must be readable.
    match timeout.read_if_some()?.map(Timespec::to_ns) {
        None => operate(id, operations, count, Timeout::Never),
        Some(Ok(ns)) => operate(id, operations, count, Timeout::after_ns(ns)),
        Some(Err(error)) => read_operations(id, operations, count).and(Err(error)),
    }
}

fn read_operations(
    id: i32,
    at: UserPtr<Operation>,
    count: u32,
) -> Result<alloc::vec::Vec<Operation>> {
    let count = count as usize;
    if count == 0 || id < 0 {
        return Err(Errno::EINVAL);
    }
    if count > OPERATIONS_MAX {
        return Err(Errno::E2BIG);
    }
    at.read_array(count)
}

fn operate(id: i32, at: UserPtr<Operation>, count: u32, timeout: Timeout) -> Result<()> {
    let operations = read_operations(id, at, count)?;
    let set = own().system_v.semaphores.find(id)?;
    let last = operations.iter().map(|operation| usize::from(operation.number)).max();
    if last.is_some_and(|last| last >= set.len()) {
        return Err(Errno::EFBIG);
    }
    let alters = operations.iter().any(|operation| operation.amount != 0);
    set.permissions().get().check(if alters { WRITE } else { READ }, &caller())?;
    let pending = match set.operate(operations, current_process().pid) {
        Attempt::Ended(outcome) => return outcome,
        Attempt::Waits(pending) => pending,
    };
    let outcome = wait_until(&[&pending.queue], timeout.deadline(), || pending.outcome());
    set.give_up(&pending);
    // semop(2): never restarted after a signal.
    outcome.map_err(|error| match error {
        Errno::ETIMEDOUT => Errno::EAGAIN,
        Errno::ERESTARTSYS => Errno::EINTR,
        error => error,
    })
}

/// `struct semid64_ds`.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct Status {
    permissions: UserPermissions,
    operated_s: i64,
    unused1: u64,
    changed_s: i64,
    unused2: u64,
    count: u64,
    unused3: [u64; 2],
}

/// semctl(2).
pub fn semctl(id: i32, number: i32, command: u32, argument: UserAddress) -> Result<u64> {
    if id < 0 {
        return Err(Errno::EINVAL);
    }
    let namespace = own();
    let sets = &namespace.system_v.semaphores;
    match command {
        IPC_INFO | SEM_INFO => info(command, argument).map(u64::from),
        IPC_STAT => status(id, &*sets.find(id)?, argument, Readers::Permitted).map(|()| 0),
        SEM_STAT | SEM_STAT_ANY => {
            let (id, set) = sets.at_place(place_of(id))?;
            let readers = if command == SEM_STAT { Readers::Permitted } else { Readers::All };
            status(id, &set, argument, readers).map(|()| id as u64)
        }
        IPC_SET => {
            let wanted: Status = argument.read()?;
            let set = sets.find(id)?;
            let mut permissions = set.permissions().get();
            permissions.check_owner(&caller())?;
            permissions.update(&wanted.permissions, &caller().user_namespace)?;
            set.permissions().set(permissions);
            set.changed();
            Ok(0)
        }
        IPC_RMID => {
            let set = sets.find(id)?;
            set.permissions().get().check_owner(&caller())?;
            sets.remove(id);
            set.removed();
            Ok(0)
        }
        GETALL => {
            let set = sets.find(id)?;
            set.permissions().get().check(READ, &caller())?;
            let values: alloc::vec::Vec<u16> =
                set.look(|state| state.semaphores.iter().map(|s| s.value as u16).collect());
            argument.write_bytes(bytemuck::cast_slice(&values)).map(|()| 0)
        }
        SETALL => {
            let set = sets.find(id)?;
            set.permissions().get().check(WRITE, &caller())?;
            let values = argument.read_array::<u16>(set.len())?;
            if values.iter().any(|&value| i32::from(value) > VALUE_MAX) {
                return Err(Errno::ERANGE);
            }
            set.set(0, &values, current_process().pid);
            Ok(0)
        }
        SETVAL => set_value(id, number, argument.0 as i32).map(|()| 0),
        GETPID | GETVAL | GETNCNT | GETZCNT => one(id, number, command),
        _ => Err(Errno::EINVAL),
    }
}

fn set_value(id: i32, number: i32, value: i32) -> Result<()> {
    if !(0..=VALUE_MAX).contains(&value) {
        return Err(Errno::ERANGE);
    }
    let set = own().system_v.semaphores.find(id)?;
    let number = usize::try_from(number).ok().filter(|&number| number < set.len());
    let number = number.ok_or(Errno::EINVAL)?;
    set.permissions().get().check(WRITE, &caller())?;
    set.set(number, &[value as u16], current_process().pid);
    Ok(())
}

/// What there is to know about one semaphore.
fn one(id: i32, number: i32, command: u32) -> Result<u64> {
    let set = own().system_v.semaphores.find(id)?;
    set.permissions().get().check(READ, &caller())?;
    let number = u16::try_from(number).ok().filter(|&number| usize::from(number) < set.len());
    let number = number.ok_or(Errno::EINVAL)?;
    let semaphore = set.look(|state| state.semaphores[usize::from(number)]);
    Ok(match command {
        GETPID => Pid::new(semaphore.last_pid).for_caller().into(),
        GETVAL => semaphore.value as u64,
        GETNCNT => set.waiting(number, false) as u64,
        _ => set.waiting(number, true) as u64,
    })
}

/// Who may ask for a status.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Readers {
    /// Those whom the mode permits to read.
    Permitted,
    /// Everybody (`SEM_STAT_ANY`).
    All,
}

fn status(id: i32, set: &SemaphoreSet, to: UserAddress, readers: Readers) -> Result<()> {
    let permissions = set.permissions().get();
    if readers == Readers::Permitted {
        permissions.check(READ, &caller())?;
    }
    let status = set.look(|state| Status {
        permissions: permissions.to_user(id, &caller().user_namespace),
        operated_s: state.operated_s,
        changed_s: state.changed_s,
        count: state.semaphores.len() as u64,
        ..Status::zeroed()
    });
    to.write(&status)
}

/// `struct seminfo`: the limits, with what is in use for `SEM_INFO`.
fn info(command: u32, to: UserAddress) -> Result<u32> {
    const BYTES_OF_UNDO: i32 = 20;
    let namespace = own();
    let sets = &namespace.system_v.semaphores;
    let (sets_or_size, semaphores_or_value) = match command {
        SEM_INFO => (sets.count() as i32, in_use() as i32),
        _ => (BYTES_OF_UNDO, VALUE_MAX),
    };
    let all = ALL_MAX as i32;
    let operations = OPERATIONS_MAX as i32;
    // map, sets, semaphores, undos, semaphores in a set, operations in a call,
    // undos of a process, size of an undo, largest value, largest undo.
    let info: [i32; 10] = [
        all,
        SET_MAX,
        all,
        all,
        SET_MAX,
        operations,
        operations,
        sets_or_size,
        VALUE_MAX,
        semaphores_or_value,
    ];
    to.write(&info)?;
    Ok(sets.last_place())
}
